"""The command of all studies: benches, attacks and the papers' tables.

::

    python -m simulations bench NAME ...     one bench, with its options; --help lists them
    python -m simulations bench --quick      every bench, into one folder; --full as the README
    python -m simulations attacks NAME ...   one attack; without a name those of ``attacks --only``
    python -m simulations papers NAME ...    a paper's tables, or ``page``: all beside the papers'
    python -m simulations reference ...      digests of what every method computes

Modules are imported when they are needed: benches measure their own memory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedapp.home import write_atomically
from fedapp.run_folder import RunFolder
from simulations.study import (
    PERCENT,
    SHARE,
    TIMES,
    Compared,
    attack_main,
    console,
    new_grid,
    reference_main,
)

Record = dict[str, Any]

# Commands by module; a bench's or an attack's function is NAME_main, or NAME an ``Attack``.
BENCH_MODULES = {
    "trees": "pax_speed pax_memory pax_secure pax_floor privacy rows federated_forest "
    "fedxgbllr_epoch",
    "encryption": "secureboost paillier",
    "exchange": "exchange across faults serve parties",
}
ATTACK_MODULES = {
    "vertical": "shared_nodes reverse_sums solved_bins eini_paths label_groups forest_nodes",
    "horizontal": "timberstrike pax_rows membership",
}
TABLED = [name for names in ATTACK_MODULES.values() for name in names.split()][:7]
PAGE = ("pax", "fedxgbllr", "secureboost", "federated_forest", "fed_eini")  # papers with figures
STUDIES = (*PAGE, "noniid", "unified", "vertibench")
PAPERS_OUTPUT = Path("runs/papers")


def main(words: Sequence[str] | None = None) -> None:
    """Find the study and run it with the other words."""
    words = list(sys.argv[1:] if words is None else words)
    room, name = words[0] if words else "", words[1] if len(words) > 1 else ""
    benches, attacks = by_name(BENCH_MODULES), by_name(ATTACK_MODULES)
    n_names = 2
    if room == "bench" and name in benches:
        run = getattr(importlib.import_module(f"simulations.bench.{benches[name]}"), f"{name}_main")
    elif room == "attacks" and name in attacks:
        run = attack_command(name)
    elif room == "papers" and name in STUDIES:
        run = typer_command(importlib.import_module(f"simulations.papers.{name}").main)
    elif room == "papers" and name == "defaults":
        run = importlib.import_module("simulations.papers.noniid").defaults_main
    elif room == "papers" and name == "page":
        run = typer_command(page_main)
    elif room in ("bench", "attacks", "reference") and (not name or name.startswith("-")):
        n_names = 1
        run = {"bench": bench_main, "attacks": attack_all, "reference": reference_main}[room]
    else:
        names = {"bench": benches, "attacks": attacks, "papers": [*STUDIES, "defaults", "page"]}
        lines = [f"  {each} {' '.join(names[each])}" for each in names]
        rule = "python -m simulations must be called with one of"
        raise SystemExit("\n".join([rule, *lines, "  reference"]))
    sys.argv = [" ".join(["python -m simulations", *words[:n_names]]), *words[n_names:]]
    sys.exit(run())


def by_name(modules: Mapping[str, str]) -> dict[str, str]:
    """The module of each command."""
    return {name: module for module, names in modules.items() for name in names.split()}


def typer_command(function: Callable[..., None]) -> Callable[[], None]:
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return lambda: app(prog_name=sys.argv[0])


def attack_command(name: str) -> Callable[[], None]:
    module = importlib.import_module(f"simulations.attacks.{by_name(ATTACK_MODULES)[name]}")
    if attack := getattr(module, name.upper(), None):
        return partial(attack_main, attack)
    command: Callable[[], None] = getattr(module, f"{name}_main")
    return command


def attack_all() -> None:
    """Run all attacks of the table; ``--only`` selects some."""
    modules = {
        module: importlib.import_module(f"simulations.attacks.{module}")
        for module in ATTACK_MODULES
    }
    places = by_name(ATTACK_MODULES)
    attack_main(*(getattr(modules[places[name]], name.upper()) for name in TABLED))


# Every bench


@dataclass(frozen=True, slots=True)
class Bench:
    """A module of this package, and the arguments of each run."""

    full: tuple[str, ...] = ("",)
    quick: tuple[str, ...] = ("",)  # a minute or so; empty if there is no such run
    by: tuple[str, ...] = ()  # entries that identify a JSON line, of a bench that prints several


MANY_PARTIES = "--methods pax --parties 10 --columns 28 --trees 10 --rows 100000 1000000 10000000"
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
        (
            "",
            MANY_PARTIES,
            *(f"{FLOWERS} --engine {engine}" for engine in ("simulation", "deployment")),
        ),
        ("--rows 500 2000 --trees 2",),
        by=("method", "rows"),
    ),
    "fedxgbllr_epoch": Bench(quick=("--rows 2000",)),
    "serve": Bench(quick=("--seconds 2 --rounds 10",)),
    "exchange": Bench(quick=("--rounds 3",)),
    "across": Bench(quick=(), by=("strategy",)),
}
# Entries of a JSON line that are not figures
NO_FIGURES = {"bench", "by", "lines", "sizes", "seed", "versions"}


def bench_main(words: Sequence[str] | None = None) -> None:
    """Run the benches that have not finished yet; exit with status 1 if one failed.

    ``--quick`` takes minutes, with small tables and keys; ``--full`` takes about an hour and gives
    the figures that ``simulations/README.md`` quotes. For each bench the folder (``--folder``, by
    default ``runs/bench-quick`` or ``runs/bench-full``) receives

    - ``NAME.jsonl``: a line for each figure: ``bench``, ``run`` (its arguments), ``of`` (which of
      several results), ``figure``, ``value``; written last, so that it marks the end;
    - ``NAME.md``: the same as a table, with the ratios to peers that are installed;
    - ``NAME.txt``: what it printed.

    Each bench runs in its own process. One that has finished with the same arguments is not run
    again, so an interrupted command can be repeated. ``--only NAME ...`` selects benches.
    """
    parser = argparse.ArgumentParser(description="Every bench, one after the other.")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--quick", action="store_true", help="minutes")
    how.add_argument("--full", action="store_true", help="an hour or so")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES), metavar="NAME")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(words)
    size = "quick" if options.quick else "full"
    folder = options.folder or Path("runs") / f"bench-{size}"
    folder.mkdir(parents=True, exist_ok=True)
    failed = [name for name in options.only if not run_bench(name, size, folder)]
    print(f"tables and figures are in {folder}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; NAME.txt says why")


def run_bench(name: str, size: str, folder: Path) -> bool:
    """Run a bench unless it has finished; False if it failed."""
    from simulations.bench.trees import has_plugin

    without_peer = " --without-plugin" if name == "pax_speed" and not has_plugin() else ""
    runs = [f"{asked}{without_peer}".strip() for asked in getattr(BENCHES[name], size)]
    path = folder / f"{name}.jsonl"
    records = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    if not runs or list(dict.fromkeys(record["run"] for record in records)) == runs:
        return True
    start, lines, printed = time.monotonic(), list[tuple[str, Record]](), list[str]()
    for asked in runs:
        print(f"{name} {asked}".rstrip(), flush=True)
        command = [sys.executable, "-m", "simulations", "bench", name, *shlex.split(asked)]
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
    write_atomically(folder / f"{name}.md", bench_table(name, lines).encode())
    by = BENCHES[name].by
    texts = [
        json.dumps(figure) + "\n" for asked, line in lines for figure in figures(asked, line, by)
    ]
    write_atomically(path, "".join(texts).encode())
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


def figures(asked: str, line: Record, identity: Sequence[str] = ()) -> Iterator[Record]:
    """Yield a record for each number of a JSON line.

    ``asked`` are the arguments of the run; ``identity`` names the entries that identify the line.
    """
    common = {"bench": line.get("bench", ""), "run": asked}
    parts = [(identity, line), *((line["by"], each) for each in line.get("lines", []))]
    for by, part in parts:
        of = ", ".join(f"{key} {part[key]}" for key in by)
        for name, value in flat({key: part[key] for key in part if key not in by}):
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield {**common, "of": of, "figure": name, "value": value}


def bench_table(name: str, lines: Sequence[tuple[str, Record]]) -> str:
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
            why = tables.get("notes") or "\n".join(tables["differs"])
            paper = importlib.import_module(f"simulations.papers.{name}")
            rows = tuple(paper.page_rows(tables))
            papers.append(Paper(paper.TITLE, rows, why, tables["command"]))
    return papers


def papers_page(papers: Sequence[Paper]) -> str:
    """All papers, as HTML; figures that differ are bold."""
    from fedapp.report.page import page, quiet, strong, table

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
    return page("The papers' figures beside ours", note, sections)


def page_main(
    folder: Annotated[Path, typer.Option(help="Of the papers' commands.")] = PAPERS_OUTPUT,
) -> None:
    """Print what differs, and write papers.html into the folder."""
    papers = read_papers(folder)
    if not papers:
        console.print(f"no tables.json below {folder}: run simulations papers pax, say, first")
        raise typer.Exit(1)
    for paper in papers:
        comparable = [figure for figure in paper.rows if figure.paper is not None]
        differing = [figure for figure in comparable if figure.differs]
        heading = f"{paper.title}: {len(differing)} of {len(comparable)} printed figures differ"
        grid = new_grid(heading, ["", "paper", "ours", "pooled", "difference"], 1)
        for figure in differing:
            grid.add_row(*figure.cells)
        console.print(grid)
    RunFolder(folder).write("papers.html", papers_page(papers))
    console.print(f"{folder / 'papers.html'}", soft_wrap=True)


if __name__ == "__main__":
    main()
