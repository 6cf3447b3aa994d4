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

from fedapp.crypto.paillier_keys import SMALLEST_BITS
from fedapp.errors import ConfigError, as_plain, did_you_mean
from fedapp.messages import reveals
from fedapp.messages.methods import (
    Method,
    kinds_of,
    method_of,
    module_of_group,
    modules_of_method,
)
from fedapp.report.curves import about, additive_of, facts_of, strongest
from fedapp.report.summary import (
    DEPLOYMENT,
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
from fedapp.run_files import HEAD, Audit, Summary, importance_kind, importance_of
from fedapp.run_folder import RunFolder
from fedapp.sections import setting_names
from fedapp.settings import Value
from fedapp.site.settings import SiteConfig
from fedapp.trees.shown import FEW, WHAT

CARD = "model-card.md"
PURPOSE = "purpose", "what the scores are for, and who decides by them"
EXCLUDED = "excluded-uses", "populations, decisions, horizons"
MOST_COLUMNS, MOST_CURVES = 20, 5  # whose importance, and whose curves, are shown
COORDINATOR, OTHERS, HOLDER = "The coordinator", "The other parties", "Whoever gets the model"
OPEN = "no measure hides what a party sends: no masks over sums, no noise, no fewest rows a bin"
GUESSES = "its cuts and names of categories; it may guess whether a row trained the model"
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


def model_card(run: RunFolder, answers: Mapping[str, str] | None = None) -> str:
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


def shared(run: RunFolder) -> dict[str, str]:
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
        "curves": _curves(run),
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


def _about(run: RunFolder) -> str:
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


def _held(run: RunFolder) -> str:
    """What the finished model shows of few rows, and the settings that lower it."""
    if not (few := run.summary.get("few")):
        return ""
    least = run.settings.get("least-rows-per-name") or FEW
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


def _curves(run: RunFolder) -> str:
    """What an additive model is, and its strongest columns; empty for other models."""
    if (model := additive_of(run)) is None:
        return ""
    head = "column", "mean absolute value", "adds", "direction"
    alone = [curve for curve, *_ in strongest([model]) if len(curve.axes) == 1]
    rows = (facts_of(model, curve) for curve in alone[:MOST_CURVES])
    return f"{plain(about(model, run.summary))}\n\n{table(head, rows)}"


def known(run: RunFolder) -> dict[str, str]:
    """What is known of a run's settings, by which conditions of **Reveals** are decided."""
    summary = run.summary
    resolved = {"objective": summary["objective"], "parties": len(summary["parties"])}
    return reveals.facts_of(summary["strategy"], settings_in_force(run) | resolved)


def in_short(run: RunFolder) -> str:
    """What left the parties by the run's settings, as who approves it reads it."""
    return "\n".join(f"- {text}" for text in reveals.in_short(run.summary["strategy"], known(run)))


def in_full(run: RunFolder) -> Iterator[str]:
    """The rest of **Reveals** of each of the method's modules whose messages were sent."""
    sent, facts = {kind for kind, _ in run.sums.n_messages}, known(run)
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


# Who could see what, by seat: what a report says below its result, a summary of **Reveals**


def unmet(run: RunFolder) -> list[str]:
    """Measures that the run has switched off, or does not have."""
    lines = [f"{rule}: it is for tests only" for rule in weak_keys(run.settings)]
    if _setting(run, "unguarded"):
        lines.append("unguarded: sums of few leaves may give the ways of rows away")
    method = method_of(run.summary["strategy"])
    is_known = run.summary.get("engine") != DEPLOYMENT  # where sites have least-bin-rows
    is_horizontal = method and method.trains and method.family == "horizontal"
    if method and is_horizontal and is_known and not _measures(run, method):
        lines.append(OPEN)
    return lines


def weak_keys(settings: Mapping[str, Any]) -> list[str]:
    """What is wrong with the keys of a run with these settings."""
    bits = [
        int(settings.get(f"{name.partition('.')[0]}.key-bits", 0))
        for name, value in settings.items()
        if name.endswith(".insecure-small-key") and value
    ]
    return [f"a Paillier key of {n} bits can be broken" for n in bits if n < SMALLEST_BITS]


def seats(run: RunFolder) -> dict[str, str]:
    """What each seat could see, by its name; empty for a run that trains nothing."""
    method = method_of(run.summary["strategy"])
    if method is None or not method.trains or not run.summary["parties"]:
        return {}
    return dict(_vertical(run, method) if method.family == "vertical" else _horizontal(run, method))


def settings_in_force(run: RunFolder) -> dict[str, Value]:
    """Settings of a run, without those that real sites have in their node configs instead."""
    of_sites = setting_names(SiteConfig) if run.summary.get("engine") == DEPLOYMENT else ()
    return {name: v for name, v in run.settings.items() if name not in of_sites}


def _setting(run: RunFolder, name: str) -> Any:
    """A setting of the run's method."""
    return run.settings.get(f"{run.summary['strategy']}.{name}")


def _measures(run: RunFolder, method: Method) -> set[str]:
    """The settings in force that change what the coordinator gets, as ``Method.gets`` has them."""
    if run.summary.get("privacy"):
        return {"run-epsilon"}
    measures = {
        "least-parties": _setting(run, "aggregation") == "secure",
        "least-bin-rows": method.merges_bins and settings_in_force(run).get("least-bin-rows"),
    }
    return {name for name, is_in_force in measures.items() if is_in_force}


def _horizontal(run: RunFolder, method: Method) -> Iterator[tuple[str, str]]:
    measures = _measures(run, method)
    yield COORDINATOR, method.gets_with(measures)
    others = "the model as it grew"
    if len(run.summary["parties"]) == 2 and "least-parties" in measures:
        others += "; of two, each knows that the rest of a sum is the other's"
    yield OTHERS, others
    promised = run.summary.get("privacy")
    bound = f"no more than epsilon {promised['epsilon']:g} allows" if promised else GUESSES
    yield HOLDER, bound


def _vertical(run: RunFolder, method: Method) -> Iterator[tuple[str, str]]:
    active = run.summary.get("active", "The active party")
    exports = bool(settings_in_force(run).get("allow-export"))
    is_paillier = _setting(run, "labels") == "paillier"
    gets = method.gets_with({"encrypted-labels"} if is_paillier else set())
    is_encrypted = method.sums_ciphertexts or is_paillier
    yield COORDINATOR, gets + ", and the whole model (allow-export)" * exports
    bins = "sums of its labels over bins of the others' columns, from which it may find rows' bins"
    yield active, f"which of its rows the others have; {bins * is_encrypted}".rstrip("; ")
    labels = "codes of the labels: which rows share one"
    groups = "which rows go the same way in the trees, and so roughly which share a label"
    yield OTHERS, f"which of its rows all have; {groups if is_encrypted else labels}"
    if exports:
        yield HOLDER, GUESSES
