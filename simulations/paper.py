"""The one harness of papers: tables as data, results that are kept, and figures beside a paper's.

A study's ``main`` yields names and rows; its ``Paper`` says how they are printed.
"""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fedapp.home import home
from fedapp.process import versions
from fedapp.report import page as report_page
from fedapp.report.page import quiet
from fedapp.report.progress import Follower
from fedapp.run_folder import RunFolder
from fedapp.runs.clean import forget_model
from fedapp.runs.cluster import carried_out, check_on
from fedapp.runs.local import run_local
from fedapp.runs.series import Engine, Series, other_code
from fedapp.settings import Settings
from simulations.study import (
    PACKAGES,
    PERCENT,
    SHARE,
    TIMES,
    Row,
    console,
    grouped,
    provenance,
    show,
)

P = ParamSpec("P")
M = TypeVar("M", bound=Callable[[list[Row]], Iterable[Row]])  # makes lines of rows
PAGE = ("pax", "fedxgbllr", "secureboost", "federated_forest", "fed_eini")  # papers with figures
PAPERS_OUTPUT = Path("runs/papers")
Tables = Iterator[tuple[str, list[Row]]]


@dataclass(slots=True)
class Paper:
    """A study whose rows are printed as tables and written as JSON, with notes."""

    notes: str
    title: str = ""  # on the page of all papers
    file: str = "tables.json"  # in the option ``output``; may name options
    tables: dict[str, list[Callable[[list[Row], Row], None]]] = field(default_factory=dict)

    def table(self, name: str, heading: str, columns: str, n_texts: int = 1) -> Callable[[M], M]:
        """A table of the rows ``name``, if there are any; see ``show``.

        The decorated function makes its lines of the rows. The heading may name options of the
        study, as in ``{seeds} seeds``.
        """

        def decorate(lines: M) -> M:
            def print_table(rows: list[Row], options: Row) -> None:
                show(heading.format(**options), lines(rows), columns, n_texts)

            self.tables.setdefault(name, []).append(print_table)
            return lines

        return decorate

    def command(self, make: Callable[P, Tables]) -> Callable[P, None]:
        """The command of a function that yields rows; one that yields none writes nothing."""

        @wraps(make)
        def main(*values: P.args, **named: P.kwargs) -> None:
            bound = inspect.signature(make).bind(*values, **named)
            bound.apply_defaults()
            written = dict[str, Any]()
            for name, rows in make(*values, **named):
                written[name] = rows
                for print_table in self.tables.get(name, ()) if rows else ():
                    print_table(rows, bound.arguments)
            if written:
                output = bound.arguments["output"]
                self._write(written, output, self.file.format(**bound.arguments))

        return main

    def _write(self, tables: Row, output: Path, name: str) -> None:
        """Print the notes; write the rows with the command, ``provenance`` and versions."""
        how = {"command": " ".join(sys.argv), **provenance(), "versions": versions(PACKAGES)}
        console.print(self.notes, soft_wrap=True)
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        RunFolder(path.parent).write_json(path.name, {**tables, "notes": self.notes, **how})
        console.print(f"written to {path}", soft_wrap=True)
        if warning := other_code(output):
            console.print(warning, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of a paper beside ours."""

    what: str  # set, setting and score
    paper: float | None
    ours: float  # mean over the seeds
    pooled: float | None
    far: float = SHARE  # difference from which figures differ; of errors, the ratio
    is_error: bool = False  # whether less is better

    @property
    def differs(self) -> bool:
        if self.paper is None:
            return False
        if self.is_error:
            return max(self.ours / self.paper, self.paper / self.ours) > self.far
        return abs(self.ours - self.paper) > self.far

    @property
    def cells(self) -> list[str]:
        texts = ["" if value is None else f"{value:.4g}" for value in (self.paper, self.ours)]
        texts.append("" if self.pooled is None else f"{self.pooled:.4g}")
        if self.paper is None:
            return [self.what, *texts, ""]
        comparison = self.ours / self.paper if self.is_error else self.ours - self.paper
        return [self.what, *texts, f"x {comparison:.2f}" if self.is_error else f"{comparison:+.4f}"]


# Cells: results that are kept and read again


def series(folder: Path, what: str = "") -> Series:
    """Runs and results in a folder; printed lines about them begin with ``what``."""
    return Series(folder, partial(_say, what))


def _say(what: str, text: str) -> None:  # by name, so that a Series can be sent to another process
    console.print(f"{what}: {text}" if what else text)


def all_made(parts: Sequence[Callable[[], Sequence[Row]]], on: str, folder: Path) -> list[Row]:
    """The rows of a study's parts, in order.

    Where ``on`` is ray, the parts are made as Ray tasks before; each keeps its results in the
    ``folder``, and finds them there.
    """
    check_on(on, "local")
    if on:
        tasks = {f"part {n} of {len(parts)}": part for n, part in enumerate(parts, 1)}
        with Follower(console).alive() as follower:
            for _ in carried_out(tasks, folder, [], follower):
                pass
    return [row for part in parts for row in part()]


def run_and_tidy(settings: Settings) -> RunFolder:
    """Train in this process; delete the sites' parts of the model."""
    folder = run_local(settings)
    forget_model(folder.summary["model_id"])
    return folder


def run_and_keep(engine: Engine, settings: Settings) -> RunFolder:
    """Predict; move the predictions to the run's folder and delete the sites' files."""
    summary = (folder := engine(settings)).summary
    site = home() / "sites" / summary["active"] / summary["model_id"]
    shutil.copy(site / "predictions.parquet", folder.path)
    forget_model(summary["model_id"])
    return folder


def spent(ledger: Sequence[Mapping[str, Any]]) -> Row:
    """Seconds, bytes and exchanges of the inference; seconds of each idle exchange."""
    messages = [line for line in ledger if line["type"].startswith("evaluate.")]
    aligning = (dict(line) for line in ledger if ".alignment_" in line["type"])
    idle = grouped(aligning, "step").values()
    costs = {"seconds": messages[-1]["seconds"] - messages[0]["seconds"]}
    costs |= {"bytes": sum(line["bytes"] for line in messages)}
    costs |= {"exchanges": len({line["step"] for line in messages})}
    return {**costs, "idle": [lines[-1]["seconds"] - lines[0]["seconds"] for lines in idle]}


# The papers on one page


@dataclass(frozen=True, slots=True)
class Results:
    """Results of a paper's command."""

    title: str
    rows: tuple[Compared, ...]
    why: str  # where and why figures differ, as the command prints it
    command: str


def read_papers(folder: Path) -> list[Results]:
    """Papers whose commands have been run into ``folder``."""
    papers = []
    for name in PAGE:
        path = folder / name / "tables.json"
        if path.exists():
            tables = json.loads(path.read_text())
            paper = importlib.import_module(f"simulations.papers.{name}")
            rows = tuple(paper.page_rows(tables))
            papers.append(Results(paper.STUDY.title, rows, tables["notes"], tables["command"]))
    return papers


def papers_page(papers: Sequence[Results]) -> str:
    """All papers, as HTML; figures that differ are bold."""
    header = ["", "paper", "ours", "pooled", "ours against paper"]
    sections = {}
    for paper in papers:
        rows = [
            [report_page.strong(cell) for cell in figure.cells] if figure.differs else figure.cells
            for figure in paper.rows
        ]
        sections[paper.title] = (
            report_page.table(header, rows) + quiet(paper.command) + quiet(paper.why)
        )
    note = (
        f"Bold: accuracy or AUC {SHARE:g} apart, {PERCENT:g} point, or an error {TIMES:g} times as "
        "large. Pooled: the same model trained on all rows and columns in one place; for Fed-EINI, "
        "the interactive prediction of the same model. Ours are means over the command's seeds."
    )
    return report_page.page("The papers' figures beside ours", note, sections)


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
