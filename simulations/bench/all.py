"""Every bench, one after the other, and what they found in one folder.

``python -m simulations.bench.all --quick`` takes minutes, with small tables and keys; ``--full``
takes about an hour and gives the figures that ``simulations/README.md`` quotes. For each bench the
folder (``--folder``, by default ``runs/bench-quick`` or ``runs/bench-full``) receives

- ``NAME.jsonl``: a line for each figure: ``bench``, ``run`` (its arguments), ``of`` (which of
  several results), ``figure``, ``value``;
- ``NAME.md``: the same as a table, with the ratios to peers that are installed;
- ``NAME.txt``: what it printed.

Each bench runs in its own process. One that has finished with the same arguments is not run again,
so an interrupted command can be repeated. ``--only NAME ...`` selects benches.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapp.home import write_atomically
from simulations.bench.federated_plugin import has_plugin

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bench:
    """A module of this package, and the arguments of each run."""

    full: tuple[str, ...] = ("",)
    quick: tuple[str, ...] = ("",)  # a minute or so; empty if there is no such run
    by: tuple[str, ...] = ()  # entries that identify a JSON line, of a bench that prints several


PARTIES = "--methods pax --parties 10 --columns 28 --trees 10 --rows 100000 1000000 10000000"
FLOWERS = "--rows 100000 --trees 2 --methods secureboost federated-forest pax"
BENCHES: Mapping[str, Bench] = {
    "pax_speed": Bench(quick=("--repeats 1",)),
    "pax_memory": Bench(quick=("--rows 100000",)),
    "pax_secure": Bench(("--parties 3", "--parties 10"), ("--rows 2000 --trees 4 --repeats 1",)),
    "pax_floor": Bench(
        quick=("--data breast-cancer --rounds 5",), by=("data", "aggregation", "least_bin_rows")
    ),
    "parties": Bench(quick=("--quick",)),
    "secureboost": Bench(
        ("--key-bits 2048", "--key-bits 1024"), ("--key-bits 512 --checked-trees 1",)
    ),
    "paillier": Bench(("--key-bits 2048", "--key-bits 1024"), ("--key-bits 512",)),
    "federated_forest": Bench(("--align ordered", "--align psi")),
    "rows": Bench(
        ("", PARTIES, *(f"{FLOWERS} --engine {engine}" for engine in ("simulation", "deployment"))),
        ("--rows 500 2000 --trees 2",),
        by=("method", "rows"),
    ),
    "fedxgbllr_epoch": Bench(quick=("--rows 2000",)),
    "serve": Bench(quick=("--seconds 2 --rounds 10",)),
    "exchange": Bench(quick=("--rounds 3",)),
    "across": Bench(quick=(), by=("strategy",)),
}
# Entries of a JSON line that are not figures.
NO_FIGURES = {"bench", "by", "lines", "sizes", "seed", "versions"}


def main(words: Sequence[str] | None = None) -> None:
    """Run the benches that have not finished yet; exit with status 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--quick", action="store_true", help="minutes")
    how.add_argument("--full", action="store_true", help="an hour or so")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES), metavar="NAME")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(words)
    size = "quick" if options.quick else "full"
    folder = options.folder or Path("runs") / f"bench-{size}"
    folder.mkdir(parents=True, exist_ok=True)
    failed = [name for name in options.only if not carried_out(name, size, folder)]
    print(f"tables and figures are in {folder}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; NAME.txt says why")


def carried_out(name: str, size: str, folder: Path) -> bool:
    """Run a bench unless it has finished; False if it failed."""
    without_peer = " --without-plugin" if name == "pax_speed" and not has_plugin() else ""
    runs = [f"{asked}{without_peer}".strip() for asked in getattr(BENCHES[name], size)]
    path = folder / f"{name}.jsonl"
    records = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    if not runs or list(dict.fromkeys(record["run"] for record in records)) == runs:
        return True
    start, lines, printed = time.monotonic(), list[tuple[str, Record]](), list[str]()
    for asked in runs:
        print(f"{name} {asked}".rstrip(), flush=True)
        command = [sys.executable, "-m", f"simulations.bench.{name}", *shlex.split(asked)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        printed += [f"$ {shlex.join(command[1:])}", done.stdout]
        if done.returncode:
            printed.append(done.stderr)
            break
        json_lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        lines += [(asked, json.loads(line)) for line in json_lines]
    write_atomically(folder / f"{name}.txt", "\n".join(printed).encode())
    if done.returncode:
        print(f"  failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
        return False
    write_atomically(folder / f"{name}.md", table(name, lines).encode())
    by = BENCHES[name].by
    texts = [
        json.dumps(figure) + "\n" for asked, line in lines for figure in figures(asked, line, by)
    ]
    write_atomically(path, "".join(texts).encode())  # last: it marks the end
    print(f"  {time.monotonic() - start:.0f} s")
    return True


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Numbers and texts of a JSON value, with their paths."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if name or key not in NO_FIGURES:
                yield from flat(inner, f"{name}, {key}" if name else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from flat(inner, f"{name}, {index}")
    elif value is not None:
        yield name, value


def figures(asked: str, line: Record, own: Sequence[str] = ()) -> Iterator[Record]:
    """Yield a record for each number of a JSON line.

    ``asked`` are the arguments of the run; ``own`` names the entries that identify the line.
    """
    common = {"bench": line.get("bench", ""), "run": asked}
    parts = [(own, line), *((line["by"], each) for each in line.get("lines", []))]
    for by, part in parts:
        of = ", ".join(f"{key} {part[key]}" for key in by)
        for name, value in flat({key: part[key] for key in part if key not in by}):
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield {**common, "of": of, "figure": name, "value": value}


def table(name: str, lines: Sequence[tuple[str, Record]]) -> str:
    """Format the lines of a bench as a Markdown table.

    A row for each entry of ``lines``; without these, a row for each figure and a column a run.
    """
    results = [(asked, record) for asked, line in lines for record in line.get("lines", [])]
    if not results and len(lines) > 2:
        results = [(asked, dict(flat(line))) for asked, line in lines]
    if results:
        keys = list(dict.fromkeys(key for _, record in results for key in record))
        rows = [[asked, *(record.get(key, "") for key in keys)] for asked, record in results]
        return f"# {name}\n\n{markdown(['run', *keys], rows)}"
    flattened = [dict(flat(line)) for _, line in lines]
    keys = list(dict.fromkeys(key for record in flattened for key in record))
    rows = [[key, *(record.get(key, "") for record in flattened)] for key in keys]
    return f"# {name}\n\n{markdown(['figure', *(asked or name for asked, _ in lines)], rows)}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table in Markdown; numbers with four significant digits."""

    def shown(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)

    lines = [header, ["---"] * len(header), *([shown(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
