"""One page for all papers: the figures they print, ours, and those of pooled rows side by side.

``python -m simulations.papers.page`` reads the results of this package's other commands, as far as
they have been run, and shows where ours differ from the paper's, and why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fedapp.report.page import Strong, escaped, page, section, table
from fedapp.run_folder import RunFolder
from simulations.papers import fed_eini, federated_forest, fedxgbllr, pax
from simulations.papers.tables import Row, console, grouped, mean_of, new_grid

Tables = Mapping[str, Any]
SHARE, PERCENT, TIMES = 0.01, 1.0, 1.1  # differences count above these: of 1, of 100, a ratio
OUTPUT = Path("runs/papers")


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


@dataclass(frozen=True, slots=True)
class Paper:
    """Results of a command."""

    title: str
    rows: tuple[Compared, ...]
    why: str  # where and why figures differ, as the command prints it
    command: str


def of_pax(tables: Tables) -> Iterator[Compared]:
    """Tables 2 and 4: scores by partition."""
    groups = grouped(tables["partitions"], "draw", "partition")
    for (draw, partition), rows in groups.items():
        if (draw, partition) not in pax.PRINTED:
            continue
        printed = dict(zip(pax.METRICS, pax.PRINTED[draw, partition], strict=True))
        for name in ("accuracy", "auc", "f1"):
            pooled = mean_of(groups[draw, "pooled"], name)
            what = f"{draw} draw, partition {partition}, {name}"
            yield Compared(what, printed[name], mean_of(rows, name), pooled)


def of_fedxgbllr(tables: Tables) -> Iterator[Compared]:
    """Table 2, and Table 4's heads."""
    pooled = {
        name: mean_of(rows, "test") for (name,), rows in grouped(tables["pooled"], "data").items()
    }
    for (data, clients), rows in grouped(tables["table_2"], "data", "clients").items():
        printed = fedxgbllr.PAPER.get(data, {}).get(clients)
        yield _by_task(f"{data}, {clients} clients", data, printed, rows, pooled[data])
    for (data, head), rows in grouped(tables["table_4"], "data", "head").items():
        heads = dict(zip(fedxgbllr.HEADS, fedxgbllr.PAPER_HEADS.get(data, ()), strict=False))
        yield _by_task(f"{data}, head {head}", data, heads.get(head), rows, pooled[data])


def _by_task(
    what: str, data: str, printed: float | None, rows: Sequence[Row], pooled: float
) -> Compared:
    is_error = fedxgbllr.is_error(data)
    score, far = ("MSE", TIMES) if is_error else ("accuracy in %", PERCENT)
    return Compared(f"{what}, {score}", printed, mean_of(rows, "score"), pooled, far, is_error)


def of_secureboost(tables: Tables) -> Iterator[Compared]:
    """Table 3, whose figures are not available: AUC of the first tree and of all."""
    for row in tables["tables_2_and_3"]:
        for part in ("first_tree", "all_trees"):
            what = f"{row['credit']}, {row['method']}, {part.replace('_', ' ')}, AUC"
            yield Compared(what, None, row[part]["auc"], None)


def of_forest(tables: Tables) -> Iterator[Compared]:
    """Table 1: Federated Forest beside a forest of the joined columns."""
    for row in tables["table_1"]:
        printed = federated_forest.PRINTED.get(row["data"], {})
        for name, pooled in (("NonFF", None), ("FF", row["NonFF"][0])):
            paper = printed[name][0] if name in printed else None
            yield Compared(f"{row['data']}, {name}", paper, row[name][0], pooled)


def of_eini(tables: Tables) -> Iterator[Compared]:
    """Table 2: AUC of encrypted prediction; "pooled" is the interactive way."""
    for row in tables["table_2"]:
        printed = fed_eini.PRINTED.get((row["credit"], row["share"]), (None, None))
        paper = printed if row["model"] == "boosted" else (None, None)
        interactive, encrypted = row["auc"]
        what = f"{row['credit']}, {row['model']}, {row['share']} % of the rows, AUC"
        yield Compared(what, paper[0], encrypted, interactive)


PAPERS: dict[str, tuple[str, Callable[[Tables], Iterator[Compared]]]] = {
    "pax": ("PAX, Tables 2 and 4", of_pax),
    "fedxgbllr": ("FedXGBllr, Tables 2 and 4", of_fedxgbllr),
    "secureboost": ("SecureBoost, Table 3", of_secureboost),
    "federated_forest": ("Federated Forest, Table 1", of_forest),
    "fed_eini": ("Fed-EINI, Table 2", of_eini),
}


def read(folder: Path) -> list[Paper]:
    """Papers whose commands have been run into ``folder``."""
    papers = []
    for name, (title, compare) in PAPERS.items():
        path = folder / name / "tables.json"
        if path.exists():
            tables = json.loads(path.read_text())
            why = tables.get("notes") or "\n".join(tables["differs"])
            papers.append(Paper(title, tuple(compare(tables)), why, tables["command"]))
    return papers


def papers_page(papers: Sequence[Paper]) -> str:
    """All papers, as HTML; figures that differ are bold."""
    header = ["", "paper", "ours", "pooled", "ours against paper"]
    sections = []
    for paper in papers:
        rows = [
            [Strong(cell) for cell in figure.cells] if figure.differs else figure.cells
            for figure in paper.rows
        ]
        why = f'<p class="quiet">{escaped(paper.command)}</p><p>{escaped(paper.why)}</p>'
        sections.append(section(paper.title, table(header, rows) + why))
    note = (
        f"Bold: accuracy or AUC {SHARE:g} apart, {PERCENT:g} point, or an error {TIMES:g} times as "
        "large. Pooled: the same model trained on all rows and columns in one place; for Fed-EINI, "
        "the interactive prediction of the same model. Ours are means over the command's seeds."
    )
    return page("The papers' figures beside ours", note, sections)


def main(folder: Annotated[Path, typer.Option(help="Of the papers' commands.")] = OUTPUT) -> None:
    """Print what differs, and write papers.html into the folder."""
    papers = read(folder)
    if not papers:
        console.print(f"no tables.json below {folder}: run simulations.papers.pax, say, first")
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
    typer.run(main)
