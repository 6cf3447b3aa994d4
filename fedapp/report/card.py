"""The model card of a run: one page of Markdown that goes with the model.

What was trained on whose rows, how good it is, party by party, what was told to whom (the
**Reveals** of every module whose messages were sent), the settings and the versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fedapp.config import defaults, flatten
from fedapp.errors import as_plain
from fedapp.messages.methods import kinds_of, module_of_group, modules_of_method
from fedapp.report.summary import (
    Run,
    fact_lines,
    human_bytes,
    human_seconds,
    row_counts,
    score_names,
    score_notes,
    score_rows,
    score_text,
    scores_by_party,
    warning_lines,
)

CARD = "model-card.md"
LONGEST = 2000  # letters of a cell, which may name many columns


def model_card(run: Run) -> str:
    """The card's text."""
    summary = run.summary
    rows = ((party["name"], f"{party['rows']:,}") for party in summary["parties"])
    counts = ", ".join(f"{n:,} {subset}" for subset, n in row_counts(summary).items())
    told = f"\n\nRows of all parties: {counts}." if counts else ""
    parts = [
        f"# {_plain(summary['strategy'])} on {_plain(summary['data'])}",
        _model(summary),
        "## Data",
        _table(["party", "rows"], rows) + told,
        *_warnings(summary),
        "## Scores",
        _scores(summary),
        *_by_party(summary),
        *(_plain(line) for line in score_notes(summary)),
        *_privacy(summary),
        "## Who learned what",
        *_revealed(run),
        "## Settings",
        _table(["setting", "value"], _settings(run)),
        "## Versions",
        _table(["package", "version"], summary.get("versions", {}).items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _model(summary: dict[str, Any]) -> str:
    own = module_of_group(summary["strategy"].replace("-", "_"))
    method = (inspect.getdoc(own) or "").partition("\n")[0] if own else ""
    size = sum(summary["bytes"].values())
    facts = {
        "method": method or summary["strategy"],
        "objective": summary["objective"],
        "classes": ", ".join(map(str, summary.get("classes") or ())),
        "trees": summary["trees"] or "",
        "model": summary.get("model_id", ""),
        "engine": summary.get("engine", ""),
        "traffic": f"{summary['exchanges']} exchanges, {human_bytes(size)}",
        "time": human_seconds(summary["seconds"].get("total", 0.0)),
    }
    return "\n".join(f"- {name}: {_plain(value)}" for name, value in facts.items() if value != "")


def _warnings(summary: dict[str, Any]) -> list[str]:
    told = {"What the run warned of:": warning_lines(summary)}
    told["How the tables were read:"] = fact_lines(summary)
    lists = {head: "\n".join(f"- {_plain(line)}" for line in each) for head, each in told.items()}
    return [text for head, each in lists.items() if each for text in (head, each)]


def _scores(summary: dict[str, Any]) -> str:
    rows = score_rows(summary)
    names = score_names([scores for _, _, scores in rows])
    return _table(
        ["model", "rows", *names],
        ((model, of, *(score_text(scores.get(n)) for n in names)) for model, of, scores in rows),
    )


def _by_party(summary: dict[str, Any]) -> list[str]:
    """The model on each party's own rows, where they are told."""
    subset, found = scores_by_party(summary)
    if not found:
        return []
    names = score_names(list(found.values()))
    rows = ((party, *(score_text(each.get(n)) for n in names)) for party, each in found.items())
    return [f"By party, on its {subset} rows:", _table(["party", *names], rows)]


def _privacy(summary: dict[str, Any]) -> list[str]:
    """What the run promises for each row, if anything."""
    if not (told := summary.get("privacy")):
        return []
    how = f"drawn ({told['trees']})"
    if bins := told.get("split_bins"):
        how = f"split by sums with noise over at most {bins} bins a column"
    facts = {
        "promised": f"epsilon {told['epsilon']:g}, delta {told['delta']:g}",
        "unit": told["unit"],
        "trees": f"{how}; leaves have noise of {told['leaf_noise']:.3g} "
        "(standard deviation of a sum of gradients)",
        "scores": f"of rows that did not train, with noise of {told['score_noise']:.3g} rows a bin",
        "noise multiplier": f"{told['noise_multiplier']:.4g}, by dp-accounting's RDP accountant",
        "not covered": "; ".join(told["not_covered"]),
    }
    return ["## Privacy", "\n".join(f"- {name}: {_plain(text)}" for name, text in facts.items())]


def _revealed(run: Run) -> Iterator[str]:
    """What each module of the method says of its messages, if any of them was sent."""
    sent = {message["type"] for message in run.ledger}
    for module in modules_of_method(run.summary["strategy"]):
        told = (inspect.getdoc(module) or "").partition("\nReveals")[2].lstrip(":, \n").strip()
        if told and kinds_of(module) & sent:
            yield f"### {module.__name__.rpartition('.')[2].replace('_', '-')}"
            yield told


def _settings(run: Run) -> Iterator[Sequence[str]]:
    """Settings that the method reads and that are not their defaults."""
    reads, usual = run.summary.get("settings_read"), defaults()
    for name, value in flatten(run.config).items():
        if (reads is None or name in reads) and value not in ("", usual.get(name)):
            yield name, str(value)


def _table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_plain(cell) for cell in line)} |" for line in lines)


def _plain(value: object) -> str:
    """A text that is no Markdown or HTML, whatever a name holds."""
    text = as_plain(str(value), LONGEST).replace("&", "&amp;").replace("<", "&lt;")
    for mark in "\\`*_[]|":
        text = text.replace(mark, f"\\{mark}")
    return text
