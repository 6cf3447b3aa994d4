"""Documents about a run that people sign: threat model, impact assessment, validation report.

Their texts are in ``templates``; see ``card``.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from os.path import relpath
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markupsafe import Markup

from fedapp.home import Kind, begins_with
from fedapp.messages.methods import method_of
from fedapp.records.document import json_of, kind_of, model_text
from fedapp.report.card import (
    CARD,
    Blanks,
    counts_text,
    listed,
    method_line,
    plain,
    rendered,
    settings_in_force,
    shared,
    table,
    weak_keys,
)
from fedapp.report.page import page
from fedapp.report.summary import (
    DEPLOYMENT,
    defined,
    headline,
    human_bytes,
    metric_of,
    resolved_facts,
    row_counts,
    score_text,
    times_text,
    warning_lines,
)
from fedapp.report.template import HTML, TEMPLATES
from fedapp.run_files import Summary
from fedapp.run_folder import RunFolder
from fedapp.site.store import KEEP_DAYS
from fedapp.trees.divided import DividedModel

DOCUMENTS = "threat-model", "dpia", "validation-report"
TITLES = "Threat model", "Data protection impact assessment", "Validation report"
NOT_MEASURED = "Not measured: `fedapp audit` attacks a run."
NOT_COUNTED = "Not counted: the parts stay with their parties, or sums have noise."
OFF = ("", "0", "0.0", "False", "false", "plain")  # values that protect nothing
MOST_ROWS_A_BIN = 10  # fewer make bins nearly ranks
CHECKSUMS, PACKAGES = "SHA256SUMS", "sbom.cdx.json"
# What a folder of documents has, by name.
KINDS = {
    **{f"{name}.html": HTML for name in DOCUMENTS},
    **{
        f"{name}.md": Kind("a document", (".md",), begins_with(f"# {title} of ".encode()))
        for name, title in zip(DOCUMENTS, TITLES, strict=True)
    },
    PACKAGES: Kind("a list of packages", (".json",), begins_with(b'"bomFormat"')),
    CHECKSUMS: Kind(
        "a list of digests", ("",), begins_with(b"  threat-model.md\n", within=1 << 20)
    ),
}
# What a setting that lowers disclosure does, beside its value in the run.
CONTROLS = {
    **dict.fromkeys(
        ("pax.aggregation", "horizontal-forest.aggregation"),
        "sums of all parties under masks (secure), or each party's own (plain)",
    ),
    "privacy.epsilon": "noise in all sums, for each training row; 0: none",
    "label-epsilon": "labels are randomised once, at their party; 0: as they are",
    "least-bin-rows": "bins of fewer rows are merged in what leaves a party; 0: none",
    "least-rows-per-name": "names of categories of fewer rows are merged; 0: as each site says",
    "min-parties": "fewest parties of a sum after losses; 0: all are needed",
    "share-column-names": "whether parties learn the names of others' columns",
    "allow-export": "whether parts of the model may leave their party",
    "secureboost.key-bits": "bits of the Paillier key",
    "secureboost.first-trees": "first trees that the party with the labels grows alone",
    "federated-forest.labels": "how labels reach other parties",
    "federated-forest.key-bits": "bits of the Paillier key",
}


def documents(run: RunFolder, blanks: Blanks) -> dict[str, str]:
    """Texts by file name: each document in Markdown and HTML."""
    facts, files = (_markdown(run), _texts(run)), dict[str, str]()
    for name in DOCUMENTS:
        blanks.document = name
        text = rendered(name, blanks, *facts)
        files |= {f"{name}.md": text, f"{name}.html": _page(text)}
    blanks.check()
    return files


def checksums(run: Path, folder: Path) -> str:
    """SHA-256 of a run's files and its documents, for ``sha256sum -c`` in their ``folder``."""
    every = {path.resolve() for where in (run, folder) for path in where.iterdir()}
    paths = sorted(
        path
        for path in every
        if path.is_file() and path.name != CHECKSUMS and not path.name.startswith(".")
    )
    digests = ((hashlib.sha256(path.read_bytes()).hexdigest(), path) for path in paths)
    return "".join(f"{digest}  {relpath(path, folder.resolve())}\n" for digest, path in digests)


def configuration_of(run: RunFolder) -> str:
    """Which table of threats applies to a run."""
    settings = run.settings
    declared = method_of(run.summary["strategy"])
    if declared is None or declared.family == "vertical":
        return "vertical"
    if run.summary.get("privacy"):
        return "private"
    aggregation = settings.get(f"{run.summary['strategy']}.aggregation")
    return "sums" if aggregation == "secure" else "plain"


def _markdown(run: RunFolder) -> dict[str, str]:
    """Markdown that the templates ask for."""
    of_card = shared(run)
    return of_card | {
        "threats": (TEMPLATES / f"threats-{configuration_of(run)}.md").read_text(),
        "attacks": of_card["attacks"] or NOT_MEASURED,
        "controls": "\n\n".join(filter(None, (_controls(run), of_card["privacy"]))),
        "messages": _messages(run),
        "traffic": _traffic(run),
        "unfit": "\n\n".join(f"**{plain(line)}**" for line in unfit(run)),
        "bounds": "\n\n".join(map(plain, _bounds(run))),
        "findings": listed(_findings(run), "  - ") or "  - none",
        "reveals": f"[{CARD}](../{CARD})",
        "held": of_card["held"] or NOT_COUNTED,
    }


def _texts(run: RunFolder) -> dict[str, Any]:
    """Texts that the templates ask for."""
    summary, digest = run.summary, _digest(run)
    active, classes = summary.get("active"), resolved_facts(summary).get("classes", "")
    identity = f"Model {summary.get('model_id', '')}, trained {times_text(summary)} by engine "
    identity += f"{summary.get('engine')}; written on {datetime.now(UTC):%Y-%m-%d}. {digest}"
    return {
        "title": f"{summary['strategy']} on {Path(str(summary['data'])).name}",
        "identity": identity,
        "summary": summary,
        "method": method_line(summary),
        "configuration": configuration_of(run),
        "rows": counts_text(summary) or "not recorded",
        "columns": ", ".join(json_of(model_text(run.path / "model.json")).get("columns", ()))
        or "known to their parties only",
        "roles": f"Labels are at {active}; the other parties are passive." if active else "",
        "classes": f" ({classes})" if classes else "",
        "label_note": "; ".join(_randomised(summary)),
        "has_ids": bool(run.settings.get("id")),
        "has_baselines": bool(summary.get("baselines")),
        "headline": headline(summary),
        "model_digest": digest,
        "keep_days": KEEP_DAYS,
    }


def _controls(run: RunFolder) -> str:
    """Settings of the run that lower what is disclosed, those in force first."""
    settings, read = settings_in_force(run), run.summary.get("settings_read")
    every = [
        (name, str(settings[name]), text)
        for name, text in CONTROLS.items()
        if name in settings and (read is None or name in read)
    ]
    on = [row for row in every if row[1] not in OFF]
    off = ", ".join(name for name, value, _ in every if value in OFF)
    head = ["in force", "in this run", "what it does"]
    return "\n\n".join(
        [table(head, on) if on else "No setting is in force.", f"Off in this run: {off}."]
    )


def unfit(run: RunFolder) -> list[str]:
    """Why nothing that the run promises holds for real rows."""
    lines = [
        f"NOT FIT FOR REAL ROWS: {rule}; whoever gets ciphertexts reads them."
        for rule in weak_keys(run.settings)
    ]
    if run.summary.get("engine") != DEPLOYMENT:
        lines.append(
            "ONE MACHINE: all parties of this run were simulated where all rows and keys are. "
            "Separation, keys from people and deletion at sites are of a deployment."
        )
    return lines


def _randomised(summary: Summary) -> list[str]:
    """Warnings that scores are by randomised labels."""
    return [line for line in warning_lines(summary) if "label-epsilon" in line]


def _bounds(run: RunFolder) -> Iterator[str]:
    """Sentences about bins and labels that the table of threats has no place for."""
    settings = run.settings
    n_train = row_counts(run.summary).get("train", 0)
    n_bins, epsilon = int(settings.get("max-bin", 0)), float(settings.get("label-epsilon", 0))
    if run.summary.get("active") and n_bins and n_train < MOST_ROWS_A_BIN * n_bins:
        yield (
            f"With max-bin {n_bins} and {n_train:,} training rows a bin has some "
            f"{max(n_train / n_bins, 1):.0f} rows: bins nearly are the order of the values."
        )
    if epsilon:
        yield (
            f"label-epsilon {epsilon:g} bounds anybody's advantage over guessing which of two "
            f"labels a row has at {math.tanh(epsilon / 2):.2f}; what columns and other labels tell "
            "has no bound."
        )


def _findings(run: RunFolder) -> Iterator[str]:
    """What a validator would object to first."""
    summary = run.summary
    yield from unfit(run)
    yield from _randomised(summary)
    if not summary.get("baselines"):
        yield "no benchmark was trained"
    metric = metric_of(summary)
    train, test = (summary["metrics"].get(subset) for subset in ("train", "test"))
    if not test:
        yield "no test rows were scored"
    elif train and defined(train, metric) and defined(test, metric):
        of_train, of_test = score_text(train[metric]), score_text(test[metric])
        yield f"{metric} is {of_train} of training rows, {of_test} of test rows"
    if chosen := summary.get("threshold"):
        n_rows = row_counts(summary).get(chosen["rows"], 0)
        few = f"no threshold was chosen: too few of {n_rows:,} rows are of one class"
        yield few if chosen.get("few") else f"the threshold was chosen on {n_rows:,} rows"


def _digest(run: RunFolder) -> str:
    text = model_text(run.path / "model.json")
    if kind_of(text) == DividedModel.KIND:
        return "The model is divided: its parts, and their digests, are at the parties."
    return f"SHA-256 of model.json: {hashlib.sha256(text.encode()).hexdigest()}."


def _traffic(run: RunFolder) -> str:
    """Bytes that each party has received and sent."""
    ways = {"received": run.sums.received, "sent": run.sums.sent}
    names = (party["name"] for party in run.summary["parties"])
    rows = ((name, *(human_bytes(sizes[name]) for sizes in ways.values())) for name in names)
    return table(["party", *ways], rows)


def _messages(run: RunFolder) -> str:
    """Kinds of messages that were sent, with how many, and their bytes."""
    sums = run.sums
    rows = ((*kind, f"{n:,}", human_bytes(sums.sizes[kind])) for kind, n in sums.n_messages.items())
    return table(["kind", "from, to", "messages", "size"], rows)


def _page(text: str) -> str:
    """A document as a page, with a section for each heading."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    head, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    title, _, intro = head.removeprefix("# ").partition("\n")
    bodies = {}
    for section in sections:
        name, _, body = section.partition("\n")
        shown = markdown.render(body).replace("<table>", '<div class="wide texts"><table>')
        bodies[name] = Markup(shown.replace("</table>", "</table></div>"))
    return page(_text(markdown, title), _text(markdown, intro.strip()), bodies)


def _text(markdown: MarkdownIt, line: str) -> str:
    """Markdown of a line as the text that it shows."""
    return Markup(markdown.renderInline(line)).striptags()
