"""HTML of a finished run in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedapp.report.summary import score_text

MOST_SCORES = 6


def run_html(summary: Mapping[str, Any], folder: str) -> str:
    """Method, scores and folder of a run, from the content of its ``summary.json``."""
    metrics = summary["metrics"]
    scores = {name: metrics[name] for name in ("test", "valid", "train") if metrics.get(name)}
    names = list(dict.fromkeys(name for values in scores.values() for name in values))[:MOST_SCORES]
    head = "".join(f"<th>{escape_html(name)}</th>" for name in ("rows", *names))
    body = "".join(
        f"<tr><td>{escape_html(rows)}</td>"
        + "".join(f"<td>{escape_html(score_text(values.get(name)))}</td>" for name in names)
        + "</tr>"
        for rows, values in scores.items()
    )
    title = f"{summary['strategy']} on {Path(str(summary['data'])).name}"
    facts = f"{len(summary['parties'])} parties, {summary['trees']} trees, {folder}"
    return (
        f"<div><b>{escape_html(title)}</b><table><tr>{head}</tr>{body}</table>"
        f"<small>{escape_html(facts)}</small></div>"
    )
