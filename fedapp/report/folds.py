"""The scores of a cross-validation on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedapp.metrics import AT_THRESHOLD
from fedapp.report.summary import score_names, score_text


def fold_table(found: Mapping[str, Any]) -> Table:
    """Mean and standard deviation over the folds: a line a score, a column a model and its rows.

    Parameters
    ----------
    found : the content of ``folds.json``.
    """
    scores = {name: line for name, line in found["scores"].items() if line}
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("score", no_wrap=True)
    for place, name in enumerate(scores):
        table.add_column(escape(name), justify="right", style=None if place else "bold")
    for name in score_names(list(scores.values())):
        if name not in AT_THRESHOLD:
            table.add_row(name, *(_cell(line.get(name, {})) for line in scores.values()))
    return table


def _cell(spread: Mapping[str, float | None]) -> str:
    return f"{score_text(spread.get('mean'))} ± {score_text(spread.get('sd'))}"
