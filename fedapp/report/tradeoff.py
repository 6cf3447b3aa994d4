"""The page of a comparison: what each strategy scores, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.table import Table

from fedapp.report import plots
from fedapp.report.markup import Strong, arrow, figures, page, section, table
from fedapp.report.summary import human_bytes, human_seconds, score_text


class Line(Protocol):
    """One strategy, or one baseline, over all seeds; see ``simulations.compare``."""

    @property
    def name(self) -> str: ...
    @property
    def scores(self) -> Sequence[float]: ...
    @property
    def mean(self) -> float: ...
    @property
    def spread(self) -> float: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def exchanges(self) -> float | None: ...
    @property
    def n_bytes(self) -> float | None: ...


def score_table(lines: Sequence[Line], metric: str) -> Table:
    """The comparison for a terminal."""
    grid = Table(*_header(metric))
    for column in grid.columns[1:]:
        column.justify = "right"
    for line in lines:
        grid.add_row(*_cells(line))
    return grid


def tradeoff_page(lines: Sequence[Line], metric: str, data: str, n_seeds: int) -> str:
    """The comparison as HTML: the table, score against bytes and seconds, score by line."""
    rows = [_cells(line) for line in lines]
    rows[0] = [Strong(cell) for cell in rows[0]]
    federated = [line for line in lines if line.n_bytes is not None]
    points = {
        f"{metric} against bytes": plots.tradeoff(
            [(line.name, line.n_bytes or 0.0, line.mean) for line in federated],
            "bytes sent",
            metric,
            human_bytes,
        ),
        f"{metric} against seconds": plots.tradeoff(
            [(line.name, line.seconds or 0.0, line.mean) for line in federated],
            "train time",
            metric,
            human_seconds,
        ),
        f"{metric} of every strategy, of pooled rows and of each party alone": plots.ranking(
            [(line.name, line.mean, line.spread, line.n_bytes is None) for line in lines], metric
        ),
    }
    seeds = "1 seed" if n_seeds == 1 else f"{n_seeds} seeds"
    note = f"<p>Mean and standard deviation over {seeds}; the same rows for all.</p>"
    parts = [
        section("Test scores and cost", table(_header(metric), rows) + note),
        section("Trade-offs", figures(points)),
    ]
    return page("Strategies compared", data, parts)


def _header(metric: str) -> list[str]:
    return ["strategy", arrow(metric), "±", "train", "exchanges", "bytes"]


def _cells(line: Line) -> list[str]:
    """A line of the table; a baseline sends nothing."""
    costs = ["", "", ""]
    if line.n_bytes is not None and line.seconds is not None and line.exchanges is not None:
        costs = [human_seconds(line.seconds), f"{line.exchanges:g}", human_bytes(line.n_bytes)]
    return [line.name, score_text(line.mean), score_text(line.spread), *costs]
