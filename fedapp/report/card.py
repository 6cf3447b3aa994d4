"""The model card of a run: one page of Markdown that is distributed with the model.

It lists the parties and their rows, the scores, what attacks found, if the run was audited, what
was disclosed to whom (**Reveals** of every module whose messages were sent, as far as it holds by
the run's settings), settings and versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fedapp.errors import as_plain
from fedapp.findings import HEAD, TITLE, Audit
from fedapp.messages import reveals
from fedapp.messages.methods import kinds_of, module_of_group, modules_of_method
from fedapp.report.seats import settings_in_force
from fedapp.report.summary import (
    ScoreRow,
    headline,
    human_bytes,
    human_seconds,
    importance_text,
    row_counts,
    score_cells,
    score_notes,
    score_rows,
    scores_by_party,
    split_facts,
    times_text,
    verb,
    warning_lines,
)
from fedapp.run_files import RunFiles, Summary, importance_kind, importance_of
from fedapp.settings import defaults, flatten
from fedapp.trees.shown import FEW, WHAT

CARD = "model-card.md"
PURPOSE = "purpose", "what the scores are for, and who decides by them"
EXCLUDED = "excluded-uses", "populations, decisions, horizons"
LIMITS = """\
- Scores are of rows that these parties held back, not of other organisations or later rows.
- Nothing proves that the rows of a party are true.
- The model holds something of the rows that trained it: see below, where it was measured."""
MOST_COLUMNS = 20  # whose importance is shown
LONGEST = 2000  # characters of a cell, which may name many columns


def blank(name: str, asked: str) -> str:
    """The mark of what the product cannot know, in Markdown."""
    return f"**[TO FILL IN {name}: {plain(asked)}]**"


def model_card(run: RunFiles, answers: Mapping[str, str] | None = None) -> str:
    """The card's text; answers are to the blanks ``PURPOSE`` and ``EXCLUDED``, by their names."""
    uses = {
        name: plain((answers or {}).get(name, "")) or blank(name, asked)
        for name, asked in (PURPOSE, EXCLUDED)
    }
    summary = run.summary
    shown = tables(run)
    counts = ", ".join(f"{n:,} {subset}" for subset, n in row_counts(summary).items())
    totals = f"\n\nRows of all parties: {counts}." if counts else ""
    totals += "".join(
        f"\n\n{plain(f'{name.capitalize()}: {text}')}."
        for name, text in split_facts(summary).items()
    )
    parts = [
        f"# {plain(summary['strategy'])} on {plain(summary['data'])}",
        plain(headline(summary)),
        _model(run),
        "## Intended use",
        bullets({name.replace("-", " "): text for name, text in uses.items()}),
        "## Limits",
        LIMITS,
        "## Data",
        shown["parties_table"] + totals,
        *listed("What the run warned of:", warning_lines(summary)),
        *listed("How the tables were read:", summary.get("facts", [])),
        "## Scores",
        shown["scores"],
        shown["by_party"],
        *(plain(line) for line in score_notes(summary)),
        *privacy(summary),
        *audited(run.audit),
        *held(run),
        *(["## What the model rests on", *rests] if (rests := importance(summary)) else []),
        "## Who learned what",
        in_short(run),
        *in_full(run),
        "## Settings",
        shown["settings"],
        "## Versions",
        shown["versions"],
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def tables(run: RunFiles) -> dict[str, str]:
    """Tables of the card and other documents; empty if the parties have not sent their scores."""
    summary = run.summary
    subset, by_party = scores_by_party(summary)
    rows: list[ScoreRow] = [([name], scores) for name, scores in by_party.items()]
    parties = ((party["name"], f"{party['rows']:,}") for party in summary["parties"])
    return {
        "parties_table": table(["party", "rows"], parties),
        "scores": score_table(["model", "rows"], score_rows(summary)),
        "by_party": score_table([f"party, its {subset} rows"], rows) if rows else "",
        "settings": table(["setting", "value"], settings_of(run)),
        "versions": table(["package", "version"], summary.get("versions", {}).items()),
    }


def bullets(facts: Mapping[str, object]) -> str:
    """Names and values as a list, without empty ones; values are Markdown."""
    return "\n".join(f"- {name}: {value}" for name, value in facts.items() if value != "")


def method_line(summary: Summary) -> str:
    """The method in a sentence."""
    module = module_of_group(summary["strategy"].replace("-", "_"))
    text = (inspect.getdoc(module) or "").partition("\n")[0] if module else ""
    return text or str(summary["strategy"])


def _model(run: RunFiles) -> str:
    summary = run.summary
    size = sum(summary["bytes"].values())
    facts = {
        "method": method_line(summary),
        "objective": summary["objective"],
        "classes": ", ".join(map(str, summary.get("classes") or ())),
        "trees": summary["trees"] or "",
        verb(summary): times_text(summary),
        "model": summary.get("model_id", ""),
        "engine": summary.get("engine", ""),
        "traffic": f"{summary['exchanges']} exchanges, {human_bytes(size)}",
        "time": human_seconds(summary["seconds"].get("total", 0.0)),
    }
    return bullets({name: plain(value) for name, value in facts.items()})


def listed(heading: str, lines: Sequence[str]) -> list[str]:
    return [heading, "\n".join(f"- {plain(line)}" for line in lines)] if lines else []


def score_table(head: Sequence[str], rows: Sequence[ScoreRow]) -> str:
    names, cells = score_cells(rows)
    return table([*head, *names], cells)


def privacy(summary: Summary) -> list[str]:
    if not (terms := summary.get("privacy")):
        return []
    facts = {
        "promised": f"epsilon {terms['epsilon']:g}, delta {terms['delta']:g}",
        "unit": terms["unit"],
        "trees": f"one column a round, drawn; leaves have noise of {terms['leaf_noise']:.3g} "
        "(standard deviation of a sum of gradients)",
        "scores": "of rows that did not train, with noise of "
        f"{terms['score_noise']:.3g} rows a bin",
        "noise multiplier": f"{terms['noise_multiplier']:.4g}, by dp-accounting's RDP accountant",
        "not covered": "; ".join(terms["not_covered"]),
    }
    return ["## Privacy", bullets({name: plain(text) for name, text in facts.items()})]


def audited(audit: Audit | None) -> list[str]:
    """What attacks found; empty if the run was not audited."""
    if audit is None:
        return []
    cells = table(HEAD, [finding.cells for finding in audit.findings])
    notes = listed("How it was measured:", [*audit.notes])
    return [f"## {TITLE}", plain(audit.summary), cells, *notes]


def held(run: RunFiles) -> list[str]:
    """What the finished model shows of few rows, and the settings that lower it."""
    if not (few := run.summary.get("few")):
        return []
    least = flatten(run.config).get("least-rows-per-name") or FEW
    ways = dict(
        zip(WHAT, ("least-rows-per-name", "least-bin-rows, max-bin", "max-bin"), strict=True)
    )
    rows = [(what, f"{n:,}", ways[what]) for what, n in few.items()]
    about = (
        f"Counted at each party, of its own rows: a name, a cut or an end of fewer than {least}."
    )
    head = ["what", f"of fewer than {least} rows", "fewer by"]
    return ["## What the model holds of rows", about, table(head, rows)]


def importance(summary: Summary) -> list[str]:
    """Heading and table of the columns' importance; empty if it is not known."""
    gains = importance_of(summary)
    if not gains:
        return []
    n_shown = min(len(gains), MOST_COLUMNS)
    which = f"; the first {n_shown} of {len(gains)} columns" if n_shown < len(gains) else ""
    rows = ((name, f"{gain:.6g}") for name, gain in [*gains.items()][:n_shown])
    kind = importance_kind(summary["strategy"])
    return [f"{plain(importance_text(summary))}{which}:", table(["column", kind], rows)]


def known(run: RunFiles) -> dict[str, str]:
    """What is known of a run's settings, by which conditions of **Reveals** are decided."""
    summary = run.summary
    resolved = {"objective": summary["objective"], "parties": len(summary["parties"])}
    return reveals.facts_of(summary["strategy"], settings_in_force(run) | resolved)


def in_short(run: RunFiles) -> str:
    """What left the parties by the run's settings, as who approves it reads it."""
    return "\n".join(f"- {text}" for text in reveals.in_short(run.summary["strategy"], known(run)))


def in_full(run: RunFiles) -> Iterator[str]:
    """The rest of **Reveals** of each of the method's modules whose messages were sent."""
    sent, facts = {message["type"] for message in run.ledger}, known(run)
    for module in modules_of_method(run.summary["strategy"]):
        if kinds_of(module) & sent and (text := reveals.in_full(module, facts)):
            yield f"### {module.__name__.rpartition('.')[2].replace('_', '-')}"
            yield text


def settings_of(run: RunFiles) -> Iterator[Sequence[str]]:
    read = run.summary.get("settings_read")
    usual = defaults()
    for name, value in flatten(run.config).items():
        if (
            name != "run-dir"
            and (read is None or name in read)
            and value not in ("", usual.get(name))
        ):
            yield name, str(value)


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(plain(cell) for cell in line)} |" for line in lines)


def plain(value: object) -> str:
    """A text with Markdown and HTML escaped."""
    text = as_plain(str(value), LONGEST).replace("&", "&amp;").replace("<", "&lt;")
    for mark in "\\`*_[]|":
        text = text.replace(mark, f"\\{mark}")
    return text
