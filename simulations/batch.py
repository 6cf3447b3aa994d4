"""Every bench, one after the other."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedapp.home import write_atomically


class Runs(NamedTuple):
    """Where the function of a bench is, and the arguments of its runs; without a text none."""

    file: str
    full: Sequence[str] = ("",)
    quick: Sequence[str] = ()


MANY_PARTIES = "--methods pax --parties 10 --columns 28 --trees 10 --rows 100000 1000000 10000000"
FLOWERS = "--rows 100000 --trees 2 --methods secureboost federated-forest pax"
BENCHES: Mapping[str, Runs] = {
    "pax_speed": Runs("pax", quick=["--repeats 1"]),
    "pax_secure": Runs(
        "pax", ["--parties 3", "--parties 10"], ["--rows 2000 --trees 4 --repeats 1"]
    ),
    "pax_floor": Runs("pax", quick=["--data breast-cancer --rounds 5"]),
    "privacy": Runs(
        "pax", ["--data adult abalone --seeds 3"], ["--data abalone --seeds 1 --rounds 10"]
    ),
    "parties": Runs("trees", quick=["--quick"]),
    "secureboost": Runs(
        "encryption",
        ["--key-bits 2048", "--key-bits 1024"],
        ["--key-bits 512 --checked-trees 1"],
    ),
    "federated_forest": Runs("trees", ["--align ordered", "--align psi"], [""]),
    "rows": Runs(
        "trees",
        [
            "",
            MANY_PARTIES,
            *(f"{FLOWERS} --engine {engine}" for engine in ("simulation", "deployment")),
        ],
        ["--rows 500 2000 --trees 2"],
    ),
    "exchange": Runs("exchange", quick=["--rounds 3"]),
    "score": Runs("score", quick=["--models pax credit --requests 100 --ahead-rows 20000"]),
    "faults": Runs("faults"),
    "exactness": Runs("exactness", quick=["--only reg:gamma"]),
    "multi_output": Runs(
        "multi_output", ["--key-bits 2048"], ["--quick --classes 4 --key-bits 512"]
    ),
}


def bench(
    quick: bool = False,
    full: bool = False,
    only: tuple[str, ...] = tuple(BENCHES),
    folder: str = "",
) -> None:
    """Run the benches that have not finished yet; exit with status 1 if one failed.

    ``--quick`` takes minutes, with small tables and keys; ``--full`` takes about an hour and gives
    the figures that ``bench/results.md`` quotes. For each bench the folder (``--folder``, by
    default ``runs/bench-quick`` or ``runs/bench-full``) receives

    - ``NAME.txt``: what it printed;
    - ``NAME.jsonl``: its JSON lines, each with ``run``, the arguments; written last, so that it
      marks the end.

    Each bench runs in its own process. One that has finished with the same arguments is not run
    again, so an interrupted command can be repeated. ``--only NAME ...`` selects benches.
    """
    from simulations.study import check_names

    check_names("only", only, BENCHES)
    if quick == full:
        raise SystemExit("bench must be called with --quick or --full, or with the name of one")
    size = "quick" if quick else "full"
    output = Path(folder or f"runs/bench-{size}")
    output.mkdir(parents=True, exist_ok=True)
    failed = [name for name in only if not run_bench(name, getattr(BENCHES[name], size), output)]
    print(f"tables and figures are in {output}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; NAME.txt says why")


def run_bench(name: str, all_arguments: Sequence[str], folder: Path) -> bool:
    """Run a bench unless it has finished; False if it failed."""
    runs, path = list(all_arguments), folder / f"{name}.jsonl"
    records = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    if not runs or list(dict.fromkeys(record["run"] for record in records)) == runs:
        return True
    start, lines, printed = time.monotonic(), list[dict[str, Any]](), list[str]()
    for arguments in runs:
        print(f"{name} {arguments}".rstrip(), flush=True)
        words = [sys.executable, "-m", "simulations", "bench", name, *shlex.split(arguments)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        printed += [f"$ {shlex.join(words[1:])}", done.stdout]
        if done.returncode:
            printed.append(done.stderr)
            break
        texts = [line for line in done.stdout.splitlines() if line.startswith("{")]
        lines += [{"run": arguments, **json.loads(text)} for text in texts]
    write_atomically(folder / f"{name}.txt", "\n".join(printed).encode())
    if done.returncode:
        print(f"  failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
        return False
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
    print(f"  {time.monotonic() - start:.0f} s")
    return True
