"""Every bench, one after the other, and the papers' figures on one page."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapp.home import write_atomically
from fedapp.run_folder import RunFolder
from simulations.study import PERCENT, SHARE, TIMES, Compared, check_names, console, show

PAGE = ("pax", "fedxgbllr", "secureboost", "federated_forest", "fed_eini")  # papers with figures
PAPERS_OUTPUT = Path("runs/papers")

# Every bench


# Arguments of each run of a bench, with --full and with --quick; without a text there is none.
MANY_PARTIES = "--methods pax --parties 10 --columns 28 --trees 10 --rows 100000 1000000 10000000"
FLOWERS = "--rows 100000 --trees 2 --methods secureboost federated-forest pax"
BENCHES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "pax_speed": ([""], ["--repeats 1"]),
    "pax_memory": ([""], ["--rows 100000"]),
    "pax_secure": (["--parties 3", "--parties 10"], ["--rows 2000 --trees 4 --repeats 1"]),
    "pax_floor": ([""], ["--data breast-cancer --rounds 5"]),
    "privacy": (["--data adult abalone --seeds 3"], ["--data abalone --seeds 1 --rounds 10"]),
    "parties": ([""], ["--quick"]),
    "secureboost": (
        ["--key-bits 2048", "--key-bits 1024"],
        ["--key-bits 512 --checked-trees 1"],
    ),
    "paillier": (["--key-bits 2048", "--key-bits 1024"], ["--key-bits 512"]),
    "federated_forest": (["--align ordered", "--align psi"], [""]),
    "rows": (
        [
            "",
            MANY_PARTIES,
            *(f"{FLOWERS} --engine {engine}" for engine in ("simulation", "deployment")),
        ],
        ["--rows 500 2000 --trees 2"],
    ),
    "serve": ([""], ["--seconds 2 --rounds 10"]),
    "exchange": ([""], ["--rounds 3"]),
    "score": ([""], ["--models names --requests 100 --ahead-rows 20000"]),
    "faults": ([""], []),
    "exactness": ([""], ["--only reg:gamma"]),
    "multi_output": (["--key-bits 2048"], ["--quick --classes 4 --key-bits 512"]),
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
    check_names("only", only, BENCHES)
    if quick == full:
        raise SystemExit("bench must be called with --quick or --full, or with the name of one")
    size = "quick" if quick else "full"
    output = Path(folder or f"runs/bench-{size}")
    output.mkdir(parents=True, exist_ok=True)
    failed = [name for name in only if not run_bench(name, BENCHES[name][int(quick)], output)]
    print(f"tables and figures are in {output}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; NAME.txt says why")


def run_bench(name: str, all_arguments: Sequence[str], folder: Path) -> bool:
    """Run a bench unless it has finished; False if it failed."""
    from simulations.bench.plugin import has_plugin

    without_peer = " --without-plugin" if name == "pax_speed" and not has_plugin() else ""
    runs = [f"{arguments}{without_peer}".strip() for arguments in all_arguments]
    path = folder / f"{name}.jsonl"
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


# The papers on one page


@dataclass(frozen=True, slots=True)
class Paper:
    """Results of a command."""

    title: str
    rows: tuple[Compared, ...]
    why: str  # where and why figures differ, as the command prints it
    command: str


def read_papers(folder: Path) -> list[Paper]:
    """Papers whose commands have been run into ``folder``."""
    papers = []
    for name in PAGE:
        path = folder / name / "tables.json"
        if path.exists():
            tables = json.loads(path.read_text())
            paper = importlib.import_module(f"simulations.papers.{name}")
            rows = tuple(paper.page_rows(tables))
            papers.append(Paper(paper.TITLE, rows, tables["notes"], tables["command"]))
    return papers


def papers_page(papers: Sequence[Paper]) -> str:
    """All papers, as HTML; figures that differ are bold."""
    from fedapp.report.page import page as html_page
    from fedapp.report.page import quiet, strong, table

    header = ["", "paper", "ours", "pooled", "ours against paper"]
    sections = {}
    for paper in papers:
        rows = [
            [strong(cell) for cell in figure.cells] if figure.differs else figure.cells
            for figure in paper.rows
        ]
        sections[paper.title] = table(header, rows) + quiet(paper.command) + quiet(paper.why)
    note = (
        f"Bold: accuracy or AUC {SHARE:g} apart, {PERCENT:g} point, or an error {TIMES:g} times as "
        "large. Pooled: the same model trained on all rows and columns in one place; for Fed-EINI, "
        "the interactive prediction of the same model. Ours are means over the command's seeds."
    )
    return html_page("The papers' figures beside ours", note, sections)


def page(folder: Path = PAPERS_OUTPUT) -> None:
    """Print what differs, and write papers.html into the folder of the papers' commands."""
    papers = read_papers(folder)
    if not papers:
        raise SystemExit(f"no tables.json below {folder}: run simulations papers pax, say, first")
    for paper in papers:
        comparable = [figure for figure in paper.rows if figure.paper is not None]
        differing = [figure for figure in comparable if figure.differs]
        heading = f"{paper.title}: {len(differing)} of {len(comparable)} printed figures differ"
        names = ("figure", "paper", "ours", "pooled", "difference")
        rows = [dict(zip(names, figure.cells, strict=True)) for figure in differing]
        show(heading, rows, "; ".join(names))
    RunFolder(folder).write("papers.html", papers_page(papers))
    console.print(f"{folder / 'papers.html'}", soft_wrap=True)
