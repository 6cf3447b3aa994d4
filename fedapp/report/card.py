"""The model card of a run: one page of Markdown that is distributed with the model.

It lists the parties and their rows, the scores, what attacks found, if the run was audited, what
was disclosed to whom (**Reveals** of every module whose messages were sent, as far as it holds by
the run's settings), settings and versions.

Its text is in ``templates``, in Jinja2's language. What the product cannot know is a *blank*,
``{{ blank("purpose", "what it is for") }}``: marked in the document, or filled from the answers of
whoever has it made, by its name. Texts from outside are escaped.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedapp.errors import ConfigError, as_plain, did_you_mean
from fedapp.messages import reveals
from fedapp.messages.methods import kinds_of, module_of_group, modules_of_method
from fedapp.report.seats import settings_in_force
from fedapp.report.summary import (
    ScoreRow,
    headline,
    human_bytes,
    human_seconds,
    importance_text,
    read_settings,
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
from fedapp.report.template import TEMPLATES
from fedapp.run_files import HEAD, Audit, RunFiles, Summary, importance_kind, importance_of
from fedapp.settings import flatten
from fedapp.trees.shown import FEW, WHAT

CARD = "model-card.md"
PURPOSE = "purpose", "what the scores are for, and who decides by them"
EXCLUDED = "excluded-uses", "populations, decisions, horizons"
MOST_COLUMNS = 20  # whose importance is shown
LONGEST = 2000  # characters of a cell, which may name many columns


class Blanks:
    """Blanks of documents, and answers to them."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        self.answers = dict(answers)
        self.names: dict[str, str] = {}  # what is asked, by name
        self.open: Counter[str] = Counter()  # unanswered, by document
        self.document = ""

    def __call__(self, name: str, asked: str) -> Markup:
        """The answer as Markdown, or the marked blank."""
        self.names[name] = asked
        if text := self.answers.get(name, "").strip():
            return Markup(plain(text))
        self.open[self.document] += 1
        return Markup(f"**[TO FILL IN {name}: {plain(asked)}]**")

    def check(self) -> None:
        """Raise ConfigError for an answer to nothing, once all documents are rendered."""
        for name in self.answers:
            if name not in self.names:
                names = ", ".join(self.names)
                rule = f"must be to one of {names}, got {name}{did_you_mean(name, self.names)}"
                raise ConfigError(f"answers {rule}")


def model_card(run: RunFiles, answers: Mapping[str, str] | None = None) -> str:
    """The card's text; answers are to its blanks, by their names."""
    summary = run.summary
    markdown = {"about": _about(run), "reveals": "\n\n".join(in_full(run))}
    texts = {
        "title": f"{summary['strategy']} on {summary['data']}",
        "headline": headline(summary),
        "rows": counts_text(summary),
        "split": split_facts(summary),
    }
    return rendered("model-card", Blanks(answers or {}), shared(run) | markdown, texts)


def rendered(
    name: str, blanks: Blanks, markdown: Mapping[str, str], texts: Mapping[str, Any]
) -> str:
    """A template filled in; ``texts`` are escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else plain(value),
    )
    facts = {**texts, **{name: Markup(text) for name, text in markdown.items()}}
    about = {"purpose": PURPOSE, "excluded": EXCLUDED, "blank": blanks}
    text = environment.get_template(f"{name}.md").render(facts | about)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def shared(run: RunFiles) -> dict[str, str]:
    """What several documents show of a run, in Markdown; empty where there is nothing."""
    summary = run.summary
    subset, by_party = scores_by_party(summary)
    rows: list[ScoreRow] = [([name], scores) for name, scores in by_party.items()]
    parties = ((party["name"], f"{party['rows']:,}") for party in summary["parties"])
    changed = (
        (name, str(value))
        for name, value, is_usual in read_settings(run)
        if not is_usual and name != "run-dir"
    )
    return {
        "parties_table": table(["party", "rows"], parties),
        "scores": score_table(["model", "rows"], score_rows(summary)),
        "by_party": score_table([f"party, its {subset} rows"], rows) if rows else "",
        "settings": table(["setting", "value"], changed),
        "versions": table(["package", "version"], summary.get("versions", {}).items()),
        "warned": listed(warning_lines(summary)),
        "read": listed(summary.get("facts", [])),
        "notes": "\n\n".join(map(plain, score_notes(summary))),
        "privacy": _privacy(summary),
        "attacks": _audited(run.audit),
        "held": _held(run),
        "importance": _importance(summary),
        "leaves": in_short(run),
    }


def method_line(summary: Summary) -> str:
    """The method in a sentence."""
    module = module_of_group(summary["strategy"].replace("-", "_"))
    text = (inspect.getdoc(module) or "").partition("\n")[0] if module else ""
    return text or str(summary["strategy"])


def counts_text(summary: Summary) -> str:
    """Rows of all parties, by subset."""
    return ", ".join(f"{n:,} {subset}" for subset, n in row_counts(summary).items())


def _about(run: RunFiles) -> str:
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
    return _bullets(facts)


def _bullets(facts: Mapping[str, object]) -> str:
    """Names and values as a list, without empty ones."""
    return "\n".join(f"- {name}: {plain(value)}" for name, value in facts.items() if value != "")


def listed(lines: Iterable[str], mark: str = "- ") -> str:
    return "\n".join(f"{mark}{plain(line)}" for line in lines)


def score_table(head: Sequence[str], rows: Sequence[ScoreRow]) -> str:
    names, cells = score_cells(rows)
    return table([*head, *names], cells)


def _privacy(summary: Summary) -> str:
    if not (terms := summary.get("privacy")):
        return ""
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
    return _bullets(facts)


def _audited(audit: Audit | None) -> str:
    """What attacks found; empty if the run was not audited."""
    if audit is None:
        return ""
    cells = table(HEAD, [finding.cells for finding in audit.findings])
    parts = [plain(audit.summary), cells]
    parts += ["How it was measured:", notes] if (notes := listed(audit.notes)) else []
    return "\n\n".join(parts)


def _held(run: RunFiles) -> str:
    """What the finished model shows of few rows, and the settings that lower it."""
    if not (few := run.summary.get("few")):
        return ""
    least = flatten(run.config).get("least-rows-per-name") or FEW
    of_settings = "least-rows-per-name", "least-bin-rows, max-bin", "max-bin"
    ways = dict(zip(WHAT, of_settings, strict=True))
    rows = [(what, f"{n:,}", ways[what]) for what, n in few.items()]
    about = "Counted at each party, of its own rows: a name, a cut or an end of fewer than"
    shown = table(["what", f"of fewer than {least} rows", "fewer by"], rows)
    return f"{about} {least}.\n\n{shown}"


def _importance(summary: Summary) -> str:
    """Heading and table of the columns' importance; empty if it is not known."""
    gains = importance_of(summary)
    if not gains:
        return ""
    n_shown = min(len(gains), MOST_COLUMNS)
    which = f"; the first {n_shown} of {len(gains)} columns" if n_shown < len(gains) else ""
    rows = ((name, f"{gain:.6g}") for name, gain in [*gains.items()][:n_shown])
    columns = table(["column", importance_kind(summary["strategy"])], rows)
    return f"{plain(importance_text(summary))}{which}:\n\n{columns}"


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


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(plain(cell) for cell in line)} |" for line in lines)


def plain(value: object) -> str:
    """A text with Markdown and HTML escaped."""
    text = as_plain(str(value), LONGEST).replace("&", "&amp;").replace("<", "&lt;")
    for mark in "\\`*_[]|":
        text = text.replace(mark, f"\\{mark}")
    return text
