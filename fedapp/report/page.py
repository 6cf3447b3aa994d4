"""The report of a run as one self-contained HTML file, and the elements of every such page.

A page has a section for each question: scores, predictions, what the model rests on (with one of
its trees drawn as nested boxes), training, traffic and settings.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

import numpy as np

from fedapp.metrics import AT_THRESHOLD, is_metric, larger_is_better
from fedapp.report import plots
from fedapp.report.plots import plain
from fedapp.report.summary import (
    DEPLOYMENT,
    Run,
    drawn_metrics,
    fact_lines,
    human_bytes,
    human_seconds,
    metric_of,
    resolved_facts,
    score_names,
    score_notes,
    score_rows,
    score_text,
    scores_by_party,
    warning_lines,
)
from fedapp.settings import defaults, flatten
from fedapp.trees import stacked
from fedapp.trees.categories import Categories, names_of
from fedapp.trees.divided import DIVIDED
from fedapp.trees.forest import model as bagged
from fedapp.trees.linear import KIND as LINEAR
from fedapp.trees.linear import linear_from_json
from fedapp.trees.model import KIND as BOOSTED
from fedapp.trees.model import LEAF, NODE, Tree, from_json, kind_of
from fedapp.trees.objective import LOG, LOGIT, LOSSES
from fedapp.trees.sets import NO_SET, NO_SETS, CategorySets

Fields = Mapping[str, Any]
Leaf = Callable[[int], tuple[str, float]]  # node -> text; sign, or -1 to 1, for its colour
_MOST_CLASSES = 30  # in a confusion matrix; with more, only the most confused pairs are listed
_MOST_PAIRS = 20
_MOST_ALONE = 4  # parties whose baselines are drawn beside the run's curves
DEEPEST = 4  # levels below the root that are drawn
_LONGEST_NAME = 18
_MOST_NAMES = 4  # categories in a box
_ROUNDING = 1e-6  # leaves below this share of the largest are shown as 0
LEVEL = "level"
HEADED = {"strategy", "run-dir", "resume"}  # in the page's title, or its location
# Settings of the table that a simulation splits among parties; sites bring their tables.
OF_SIMULATED_TABLES = {"data", "label", "id", "weight", "drop-columns", "partition", "columns"}


def run_page(run: Run) -> str:
    """The HTML page of one run."""
    summary = run.summary
    versions = ", ".join(f"{name} {v}" for name, v in summary.get("versions", {}).items())
    facts = {"model": summary.get("model_id"), "engine": summary.get("engine")}
    facts |= {"seed": summary.get("seed"), "versions": versions or None}
    lines = warning_lines(run.summary)
    n_rounds = run.rounds[-1].get("rounds", 0) if run.rounds else 0
    # A forest's rounds are levels; it stops when no node can be split, which is not early.
    if run.rounds and run.rounds[-1]["round"] < n_rounds and _round_name(run.summary) != LEVEL:
        best = run.summary.get("best_round")
        scored = f"; the best was round {best}" if best is not None else ""
        done = run.rounds[-1]["round"]
        lines.append(f"training ended early, after {done} of {n_rounds} rounds{scored}")
    chosen = [f"{k}: {v}" for k, v in resolved_facts(summary).items() if k != "boosting"]
    read = "".join(f"<li>{escaped(line)}</li>" for line in (*chosen, *fact_lines(summary)))
    sections = [
        "\n".join(f'<p class="warning">{escaped(line)}</p>' for line in lines),
        _key_numbers(summary),
        section("Scores", scores(summary)),
        section("How the tables were read", f"<ul>{read}</ul>" if read else ""),
        section("Predictions", predictions(summary)),
        section("What the model rests on", foundations(run)),
        section("Training", figures(_training(run))),
        section("Traffic", _traffic(run.ledger)),
        section("What was run", _setup(run)),
    ]
    subtitle = " · ".join(f"{k} {v}" for k, v in facts.items() if v is not None)
    return page(f"{summary['strategy']} on {summary['data']}", subtitle, sections)


def _key_numbers(summary: Mapping[str, Any]) -> str:
    metric = metric_of(summary)
    test = summary["metrics"].get("test") or {}
    values = {f"test {metric}": score_text(test[metric])} if metric in test else {}
    if summary["trees"]:
        values["trees"] = f"{summary['trees']:,}"
    values["exchanges"] = f"{summary['exchanges']:,}"
    if summary.get("matched_rows"):
        values["rows matched"] = f"{sum(summary['matched_rows'].values()):,}"
    values |= {
        f"sent {way.replace('_', ' ')}": human_bytes(n) for way, n in summary["bytes"].items()
    }
    values |= {f"time, {name}": human_seconds(s) for name, s in summary["seconds"].items()}
    cells = (f"<div><dt>{escaped(k)}</dt><dd>{escaped(v)}</dd></div>" for k, v in values.items())
    return f"<dl>{''.join(cells)}</dl>"


def _training(run: Run) -> dict[str, str]:
    if not run.rounds:
        return {}
    name, best = _round_name(run.summary), run.summary.get("best_round")
    images = {
        f"{arrow(metric)} by {name}": plots.scores_by_round(run.rounds, metric, best, name)
        for metric in drawn_metrics([run])
    }
    images[f"Bytes sent in each {name}"] = plots.traffic_by_round(run.rounds, name)
    images[f"Exchanges and seconds of each {name}"] = plots.effort_by_round(run.rounds, name)
    return images


def _round_name(summary: Mapping[str, Any]) -> str:
    return str(summary.get("round_name", plots.ROUND))


def _traffic(ledger: Sequence[Mapping[str, Any]]) -> str:
    types: dict[str, list[int]] = {}
    parties: dict[str, list[int]] = {}
    for message in ledger:
        is_up, size = message["to"] == "server", message["bytes"]
        counts = types.setdefault(message["type"], [0, 0, 0])
        sizes = parties.setdefault(message["from"] if is_up else message["to"], [0, 0])
        counts[0] += 1
        counts[1 + is_up] += size
        sizes[is_up] += size
    if not types:
        return ""
    rows = [*sorted(types.items()), ("all", [sum(c) for c in zip(*types.values(), strict=True)])]
    cells = [[name, f"{n:,}", human_bytes(down), human_bytes(up)] for name, (n, down, up) in rows]
    cells[-1] = [Strong(cell) for cell in cells[-1]]
    by_party = {"Bytes by party": plots.traffic_by_party(dict(sorted(parties.items())))}
    return table(["message", "count", "to parties", "to server"], cells) + figures(by_party)


def _setup(run: Run) -> str:
    parties = [[Name(party["name"]), f"{party['rows']:,}"] for party in run.summary["parties"]]
    head, usual = ["setting", "value"], defaults()
    read, in_deployment = run.summary.get("settings_read"), run.summary.get("engine") == DEPLOYMENT
    changed, unchanged = [], []
    for name, value in flatten(run.config).items():
        is_read = read is None or name in read
        is_elsewhere = name in HEADED or (in_deployment and name in OF_SIMULATED_TABLES)
        if value == "" or not is_read or is_elsewhere:
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if value != usual.get(name):
            changed.append((name, Strong(text)))
        else:
            unchanged.append((name, text))
    unchanged_title = "The other settings that this method reads, at their defaults"
    boosting = resolved_facts(run.summary).get("boosting")
    return (
        (quiet(f"Boosting: {boosting}.") if boosting else "")
        + (table(head, changed, n_texts=2) if changed else quiet("All settings are the defaults."))
        + (folded(unchanged_title, table(head, unchanged, n_texts=2)) if unchanged else "")
        + table(["party", "rows"], parties)
    )


def scores(summary: Fields) -> str:
    """Scores of the model and its baselines, and of the model at each party."""
    rows = score_rows(summary)
    if not rows:
        return ""
    names = [n for n in score_names([each for _, _, each in rows]) if n not in AT_THRESHOLD]
    cells = []
    for model, split, values in rows:
        texts = [Name(model), split, *(score_text(values.get(name)) for name in names)]
        ours = (model, split) == ("federated", "test")
        cells.append([Strong(text) for text in texts] if ours else texts)
    note = (
        "pooled: trained on what all parties have, in one place. alone: on what that party has."
        if summary.get("baselines")
        else ""
    )
    no_test = "" if summary["metrics"].get("test") else "No rows were held back to test."
    whole = table(["model", "rows", *map(arrow, names)], cells, n_texts=2)
    # In vertical methods the active party sends only scores.
    is_bare = summary["metrics"].get("test") and not summary.get("curves")
    no_curves = "The parties have sent scores alone, so there are no curves." if is_bare else ""
    notes = (note, no_test, no_curves, *score_notes(summary))
    scored = whole + "".join(map(quiet, notes))
    subset, parties = scores_by_party(summary)
    if len(parties) < 2:
        return scored
    names = [name for name in names if any(name in scores for scores in parties.values())]
    lines = [[Name(p), *(score_text(each.get(n)) for n in names)] for p, each in parties.items()]
    title = f"<h3>The model on the {subset} rows of each party</h3>"
    return scored + title + table(["party", *map(arrow, names)], lines)


def predictions(summary: Fields) -> str:
    """Figures of the model's predictions of test rows, beside the baselines'."""
    curves = summary.get("curves") or {}
    images: dict[str, str] = {}
    rocs = _of_models(summary, "roc", "auc")
    if (curves.get("roc") or {}).get("fpr"):
        images["ROC curve on test rows"] = plots.roc(rocs)
    if curves.get("pr"):
        (negatives, alarms), (misses, hits) = curves["confusion"]
        share = (misses + hits) / (negatives + alarms + misses + hits)
        classes = _classes(summary, 2)
        images |= {
            f"Precision and recall of class {classes[1]}; dotted: its share of the rows": (
                plots.precision_recall(_of_models(summary, "pr", "pr_auc"), share)
            ),
            f"Calibration: how often rows are of class {classes[1]}, by tenths of the rows": (
                plots.calibration(_of_models(summary, "calibration", "logloss", alone=False))
            ),
            f"Predicted probability of class {classes[1]}, by class": plots.score_histogram(
                curves["histogram"], classes
            ),
        }
    if curves.get("residuals"):
        caption = "Residuals on test rows; the outer bars hold all that lies beyond"
        models = _of_models(summary, "residuals", "rmse", alone=False)
        images[caption] = plots.residuals(models)
    return figures(images) + _confusions(summary, curves)


def _of_models(summary: Fields, curve: str, metric: str, alone: bool = True) -> dict[str, Any]:
    """A curve of the run and of its baselines, by names that include a score."""
    baselines = summary.get("baselines") or {}
    drawn = baselines.get("curves") or {}
    of_parties = drawn.get("alone") or {}
    models = {"federated": (summary.get("curves"), summary["metrics"].get("test"))}
    models["pooled"] = (drawn.get("pooled"), baselines.get("pooled"))
    if alone and len(of_parties) <= _MOST_ALONE:
        scored = baselines.get("alone") or {}
        models |= {f"alone.{n}": (curves, scored.get(n)) for n, curves in of_parties.items()}
    named = {}
    for name, (curves, scores) in models.items():
        values = (curves or {}).get(curve) or {}
        if any(values.values()):
            score = score_text((scores or {}).get(metric), 3)
            named[f"{name}, {metric.replace('_', ' ')} {score}"] = values
    return named


def _classes(summary: Fields, n_classes: int) -> list[str]:
    # Their numbers if the run has recorded no names.
    return summary.get("classes") or [str(number) for number in range(n_classes)]


def _confusions(summary: Fields, curves: Fields) -> str:
    if not curves.get("confusion"):
        return ""
    counts = curves["confusion"]
    classes = _classes(summary, len(counts))
    if len(classes) != 2:
        return confusion_table(counts, classes, "Test rows by true and predicted class")
    text = f"Test rows by true and predicted class: {classes[1]} from probability 0.5 on"
    tables = [confusion_table(counts, classes, text)]
    if at := curves.get("confusion_at_threshold"):
        value = score_text(summary["threshold"]["value"])
        text = f"The same from the chosen threshold on, probability {value}"
        tables.append(confusion_table(at, classes, text))
    return f'<div class="figures">{"".join(tables)}</div>'


def foundations(run: Run) -> str:
    """Importance, one tree, contributions, and what a method reports of its model."""
    summary, path = run.summary, run.path / "model.json"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    images = _importance(summary) | _weights(text) | _learned(summary)
    tree = first_tree(text) if text and kind_of(text) not in (DIVIDED, LINEAR) else None
    drawn = f"<h3>One tree</h3>{tree_html(tree)}" if tree else ""
    return figures(images) + _columns(summary) + quiet(_missing(run, text)) + drawn


def _importance(summary: Fields) -> dict[str, str]:
    gains = _total_gains(summary.get("importance"))
    if not gains:
        return {}
    pooled = _total_gains(((summary.get("baselines") or {}).get("importance") or {}).get("pooled"))
    beside = ", beside the pooled baseline's" if pooled else ""
    caption = f"Total gain by column, {_shown(gains)}{beside}"
    return {caption: plots.importance(gains, pooled or None)}


def _total_gains(importance: Mapping[str, Any] | None) -> Mapping[str, float]:
    """Total gain by column; older runs call it ``gain``."""
    values = importance or {}
    gains: Mapping[str, float] = values.get("total_gain") or values.get("gain") or {}
    return gains


def _shown(columns: Mapping[str, float]) -> str:
    few = len(columns) <= plots.N_COLUMNS
    return f"all {len(columns)} in use" if few else f"first {plots.N_COLUMNS} of {len(columns)}"


def _columns(summary: Fields) -> str:
    importance = summary.get("importance") or {}
    gains, counts = _total_gains(importance), importance.get("count") or {}
    moves = (summary.get("contributions") or {}).get("mean") or {}
    if not gains:
        return ""
    ordered = sorted(gains, key=gains.__getitem__, reverse=True)
    header = ["column", "total gain", "splits", *(["mean |contribution|"] if moves else [])]
    rows = [
        [Name(n), f"{gains[n]:.6g}", f"{counts.get(n, 0):,}"]
        + ([f"{moves.get(n, 0.0):.4g}"] if moves else [])
        for n in ordered
    ]
    return folded("Every column in numbers", table(header, rows))


def _weights(text: str) -> dict[str, str]:
    """Weights of a linear model: margin per standard deviation of an input."""
    if not text or kind_of(text) != LINEAR:
        return {}
    model = linear_from_json(text)
    one = model.weights.shape[1] == 1
    sizes = model.weights[:, 0] if one else np.abs(model.weights).mean(axis=1)
    values = dict(zip(model.inputs, sizes.tolist(), strict=True))
    label = "weight" if one else "mean |weight| over the classes"
    caption = f"Weights of the standardised columns, {_shown(values)}"
    return {caption: plots.column_bars(values, label)}


def _missing(run: Run, text: str) -> str:
    summary = run.summary
    if text and kind_of(text) == DIVIDED:
        return (
            "The parts of the model lie at the parties: there is no tree to draw, and there are no "
            "SHAP values."
        )
    if not (run.path / "model.xgb.json").is_file() or summary.get("contributions"):
        return ""
    if summary.get("engine") == DEPLOYMENT:
        return "No SHAP summary: the coordinator has no rows."
    if not summary["metrics"].get("test"):
        return "No SHAP summary: there are no test rows."
    return ""


def _learned(summary: Fields) -> dict[str, str]:
    """Figures of SHAP values, learned rates and leaf purity, if the run has them."""
    images = {}
    contributions = summary.get("contributions") or {}
    if any((contributions.get("mean") or {}).values()):
        rows = f"{contributions['rows']:,} test rows"
        caption = f"SHAP summary: how far a column moves the margin, mean over {rows}"
        images[caption] = plots.column_bars(contributions["mean"], "mean |contribution|")
    if rates := summary.get("learning_rates"):
        caption = "Learned rate of each tree; Z is the mean of a party"
        images[caption] = plots.learning_rates(rates["trees"], rates["parties"])
    if purity := summary.get("leaf_purity"):
        caption = (
            "Share of the majority class among rows that end together: in the leaves, and in what "
            "each passive party can tell apart. It could guess labels no better than by this share"
        )
        images[caption] = plots.purity(purity)
    return images


def confusion_table(counts: Sequence[Sequence[float]], classes: Sequence[str], caption: str) -> str:
    """Weights of rows by true class (rows) and predicted class (columns), shaded by row."""
    if len(classes) > _MOST_CLASSES:
        return _pairs(counts, classes, caption)
    head = "".join(f'<th class="n" scope="col">{titled(name, 12)}</th>' for name in classes)
    lines = []
    for true, (name, row) in enumerate(zip(classes, counts, strict=True)):
        cells, total = [], sum(row)
        for guessed, weight in enumerate(row):
            share = weight / total if total else 0.0
            color = "blue" if guessed == true else "vermilion"
            shade = f"background: color-mix(in srgb, var(--{color}) {50 * share:.0f}%, transparent)"
            style = f' style="{shade}"' if weight else ""
            cells.append(f'<td class="n"{style} title="{share:.1%}">{weight:,.0f}</td>')
        lines.append(f'<tr><th scope="row">{titled(name, 12)}</th>{"".join(cells)}</tr>')
    body = "\n".join(lines)
    corner = "<th>true \\ predicted</th>"
    return (
        f'<figure><div class="wide"><table class="matrix"><thead><tr>{corner}{head}'
        f"</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
        f"<figcaption>{escaped(caption)}</figcaption></figure>\n"
    )


def _pairs(counts: Sequence[Sequence[float]], classes: Sequence[str], caption: str) -> str:
    wrong = [
        (weight, weight / sum(row), classes[true], classes[guessed])
        for true, row in enumerate(counts)
        for guessed, weight in enumerate(row)
        if weight and true != guessed
    ]
    most = sorted(wrong, key=lambda each: each[0], reverse=True)[:_MOST_PAIRS]
    rows = [
        [Name(true), Name(guessed), f"{weight:,.0f}", f"{share:.1%}"]
        for weight, share, true, guessed in most
    ]
    note = f"{caption}: the pairs most often confused of {len(classes)} classes"
    header = ["true", "predicted", "rows", "of the true class"]
    return table(header, rows, n_texts=2) + quiet(note) if rows else ""


# One tree of a model, drawn as nested boxes.


@dataclass(frozen=True, slots=True, eq=False)
class DrawnTree:
    """A tree and the text of its leaves."""

    nodes: Tree  # fields left, column, threshold and default_left; perhaps gain and hessian
    columns: Sequence[str]
    leaf: Leaf
    caption: str
    sets: CategorySets = NO_SETS  # of the model's categorical columns
    categories: Categories = ()


def first_tree(text: str) -> DrawnTree | None:
    """The first tree of a model's text, or None if it has none; DataError if it is no model."""
    kind = kind_of(text)
    if kind == bagged.KIND:
        return _of_forest(bagged.from_json(text))
    if kind not in (BOOSTED, stacked.KIND):
        return None
    is_stacked = kind == stacked.KIND
    model = stacked.from_json(text).bare if is_stacked else from_json(text)
    if not model.trees:
        return None
    tree, has_several = model.trees[0], len(model.trees) > 1
    caption = f"The first of {len(model.trees):,} trees" if has_several else "The only tree"
    if is_stacked:
        caption += ", one of the first party's; the head learns how much each counts"
    elif model.objective == "multi:softprob":
        caption += f"; it adds to the margin of class {model.classes[0]}"
    elif len(model.classes) == 2:
        caption += f"; its leaves add to the log odds of class {model.classes[1]}"
    elif LOSSES[model.objective].link is LOG:
        caption += "; its leaves add to the logarithm of the prediction"
    elif LOSSES[model.objective].link is LOGIT:
        caption += "; its leaves add to the log odds of the prediction"
    else:
        caption += "; its leaves add to the prediction"

    least = _ROUNDING * float(np.abs(tree["value"]).max())

    def leaf(node: int) -> tuple[str, float]:
        value = float(tree["value"][node])
        return (f"{value:+.4g}", float(np.sign(value))) if abs(value) > least else ("0", 0.0)

    return DrawnTree(tree, model.columns, leaf, caption, model.sets, model.categories)


def tree_html(drawn: DrawnTree) -> str:
    """The tree as nested lists, down to ``DEEPEST`` levels below its root."""
    cut = f" Drawn down to level {DEEPEST}; +n: so many nodes below. "
    # Children of a node are at left and left + 1.
    level, depth = [0], -1
    while level:
        lefts, depth = [int(drawn.nodes["left"][node]) for node in level], depth + 1
        level = [left + side for left in lefts if left != LEAF for side in (0, 1)]
    cut = cut if depth > DEEPEST else " "
    note = (
        f"{drawn.caption}.{cut}A value equal to the threshold goes no; missing values go "
        "where it says so."
    )
    body = _item(drawn, 0, 0, "")
    return (
        f'<figure class="wide full"><ul class="tree">{body}</ul>'
        f"<figcaption>{escaped(note)}</figcaption></figure>\n"
    )


def _of_forest(model: bagged.BaggedForest) -> DrawnTree | None:
    if not model.trees:
        return None
    values, classes = model.values[0], model.classes

    def leaf(node: int) -> tuple[str, float]:
        shares = values[node]
        if not classes:
            return f"{shares[0]:.5g}", 0.0
        if len(shares) > 1:
            best = int(np.argmax(shares))
            return f"{plain(classes[best], _LONGEST_NAME)}: {shares[best]:.0%}", 0.0
        return f"{plain(classes[1], _LONGEST_NAME)}: {shares[0]:.0%}", float(2 * shares[0] - 1)

    caption = f"The first of {len(model.trees):,} trees; the forest is the mean of their leaves"
    return DrawnTree(model.trees[0], model.columns, leaf, caption)


def _item(drawn: DrawnTree, node: int, depth: int, branch: str) -> str:
    label = f'<span class="branch">{branch}</span>' if branch else ""
    left = int(drawn.nodes["left"][node])
    if left == LEAF:
        text, sign = drawn.leaf(node)
        side = "up" if sign > 0 else "down" if sign < 0 else "even"
        return f'<li>{label}<span class="leaf {side}">{escaped(text)}</span></li>'
    nodes = drawn.nodes[node]
    name = drawn.columns[int(nodes["column"])]
    facts = [f"missing {'yes' if nodes['default_left'] else 'no'}"]
    # Trees that were sent without their gains have zeros.
    if drawn.nodes.dtype == NODE and nodes["gain"] > 0:
        facts.insert(0, f"gain {_short(float(nodes['gain']))}")
    rule, full_rule = f"< {float(nodes['threshold']):.5g}", ""
    if len(drawn.sets) and nodes["set"] != NO_SET:
        rule, full_rule = _categories(drawn, node)
    title = f' title="{escaped(full_rule)}"' if full_rule else ""
    box = (
        f'<span class="split"><span title="{escaped(name)}">'
        f"{escaped(plain(name, _LONGEST_NAME))}</span> <span{title}>{escaped(rule)}"
        f"</span> <small>{escaped(' · '.join(facts))}</small></span>"
    )
    if depth == DEEPEST:
        more = f'<span class="more" title="nodes below">+{_n_below(drawn.nodes, node)}</span>'
        return f"<li>{label}{box}{more}</li>"
    sides = zip((left, left + 1), ("yes", "no"), strict=True)
    children = "".join(_item(drawn, child, depth + 1, side) for child, side in sides)
    return f"<li>{label}{box}<ul>{children}</ul></li>"


def _categories(drawn: DrawnTree, node: int) -> tuple[str, str]:
    """The categories a split sends left, short and in full; if fewer, those sent right."""
    split = drawn.nodes[node]
    names = names_of(drawn.categories, int(split["column"])) or ()
    right = drawn.sets.members(int(split["set"]))
    is_short = 2 * int(right.sum()) < len(names)
    word = "not in" if is_short else "in"
    chosen = [name for name, is_right in zip(names, right, strict=True) if is_right == is_short]
    shown = [plain(name, _LONGEST_NAME) for name in chosen[:_MOST_NAMES]]
    more = [f"+{len(chosen) - _MOST_NAMES}"] if len(chosen) > _MOST_NAMES else []
    return f"{word} {{{', '.join([*shown, *more])}}}", f"{word} {{{', '.join(chosen)}}}"


def _short(value: float) -> str:
    """About three digits: ``0.0123``, ``27.2k``, ``6.18M``."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def _n_below(nodes: Any, node: int) -> int:
    waiting, n = [node], -1
    while waiting:
        left, n = int(nodes["left"][waiting.pop()]), n + 1
        waiting += [] if left == LEAF else [left, left + 1]
    return n


# The elements of a page, and its template with the style sheet.


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<h1>$title</h1>
<p class="quiet">$subtitle</p>
$contents
$body
</body>
</html>
""")


# Every text from outside (names of columns, parties, data, settings) passes through ``escaped``.
class Strong(str):
    """A table cell in bold."""

    __slots__ = ()


class Name(str):
    """A table cell with a name from outside: shortened if long, with the full name as title."""

    __slots__ = ()


class RunName(str):
    """A table cell with the name of a run in a folder beside the page, linked to its page."""

    __slots__ = ()


def page(title: str, subtitle: str, sections: Sequence[str]) -> str:
    """The whole page; title and subtitle are plain text, sections are HTML."""
    body = "\n".join(filter(None, sections))
    heads = re.findall(r'<section id="(.*?)">\n<h2>(.*?)</h2>', body)
    links = " · ".join(f'<a href="#{anchor}">{head}</a>' for anchor, head in heads)
    return _PAGE.substitute(
        style=STYLE,
        title=escaped(title),
        subtitle=escaped(subtitle),
        contents=f"<nav>{links}</nav>" if links else "",
        body=body,
    )


def escaped(text: object) -> str:
    """Plain text as HTML, safe in attributes too."""
    return html.escape(str(text))


def titled(name: str, longest: int = 40) -> str:
    """A name as HTML, at most `longest` characters; a shortened one has a title."""
    shown = plain(name, longest)
    if shown == name:
        return escaped(name)
    return f'<span title="{escaped(name)}">{escaped(shown)}</span>'


def quiet(text: str) -> str:
    """A small paragraph; empty for an empty text."""
    return f'<p class="quiet">{escaped(text)}</p>' if text else ""


def section(title: str, body: str) -> str:
    """A section with a heading; empty for an empty body."""
    anchor = re.sub(r"\W+", "-", title.lower())
    head = f'<section id="{anchor}">\n<h2>{escaped(title)}</h2>'
    return f"{head}\n{body}\n</section>" if body else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], n_texts: int = 1) -> str:
    """A table whose first `n_texts` columns are text and the others numbers."""
    lines = [_row("th", header, n_texts), *(_row("td", row, n_texts) for row in rows)]
    head, *body = lines
    return (
        f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n'
        + "\n".join(body)
        + "\n</tbody></table></div>"
    )


def figures(images: Mapping[str, str]) -> str:
    """SVG images with captions."""
    if not images:
        return ""
    parts = []
    for caption, svg in images.items():
        text = escaped(caption)
        labelled = svg.replace("<svg", f'<svg role="img" aria-label="{text}"', 1)
        parts.append(f"<figure>{labelled}<figcaption>{text}</figcaption></figure>\n")
    return f'<div class="figures">\n{"".join(parts)}</div>'


def folded(title: str, body: str) -> str:
    """A part that opens when its title is clicked."""
    return f"<details><summary>{escaped(title)}</summary>\n{body}\n</details>"


def arrow(metric: str) -> str:
    """A metric's name with the direction in which it improves."""
    return f"{metric} {'↑' if larger_is_better(metric) else '↓'}" if is_metric(metric) else metric


def _row(tag: str, cells: Sequence[str], n_texts: int) -> str:
    return f"<tr>{''.join(_cell(tag, cell, i >= n_texts) for i, cell in enumerate(cells))}</tr>"


def _cell(tag: str, text: str, is_number: bool) -> str:
    kind = "n" if is_number else "name" if isinstance(text, Name) else ""
    inner = titled(text) if isinstance(text, Name) else escaped(text)
    if isinstance(text, RunName):
        inner = f'<a href="{inner}/report.html">{inner}</a>'
    if isinstance(text, Strong):
        inner = f"<strong>{inner}</strong>"
    return f'<{tag} class="{kind}">{inner}</{tag}>' if kind else f"<{tag}>{inner}</{tag}>"


# Light and dark, wide and narrow screens, and print.
STYLE = """\
:root { color-scheme: light dark; --paper: #fff; --ink: #222; --quiet: #5a5a5a; --line: #aaa;
  --grid: #e4e4e4; --blue: #0072b2; --vermilion: #d55e00; --green: #009e73; --orange: #e69f00;
  --pink: #cc79a7; --sky: #56b4e9; --warm: #fdf3ec; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15171b; --ink: #e4e6ea; --quiet: #a3a9b3; --line: #6b7280; --grid: #2d3138;
    --blue: #3f9be0; --vermilion: #f2783a; --green: #2bbf93; --orange: #f0b13c; --pink: #e09cc3;
    --sky: #a5d8f7; --warm: #2b1f18; }
}
@media print {
  :root { --paper: #fff; --ink: #222; --quiet: #5a5a5a; --line: #aaa; --grid: #e4e4e4;
    --blue: #0072b2; --vermilion: #d55e00; --green: #009e73; --orange: #e69f00; --pink: #cc79a7;
    --sky: #56b4e9; --warm: #fdf3ec; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--grid); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; }
nav { margin: .75rem 0; }
a { color: var(--blue); }
.quiet, figcaption { color: var(--quiet); font-size: .875rem; }
.quiet, td, th { overflow-wrap: break-word; }
.warning { border-left: 4px solid var(--vermilion); background: var(--warm);
  padding: .5rem .9rem; overflow-wrap: anywhere; }
dl { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1.25rem 0 0; }
dl div { flex: 1 1 auto; border: 1px solid var(--grid); border-radius: 6px; padding: .5rem .8rem; }
dt { color: var(--quiet); font-size: .8rem; }
dd { margin: 0; font-size: 1.3rem; font-weight: 600; white-space: nowrap; }
/* Shades show where a table goes on beyond the edge of a narrow screen. */
.wide { overflow-x: auto; margin: .75rem 0;
  background: linear-gradient(to right, var(--paper) 40%, transparent) left / 2rem 100% local,
    linear-gradient(to left, var(--paper) 40%, transparent) right / 2rem 100% local,
    linear-gradient(to right, var(--line), transparent) left / .6rem 100% scroll,
    linear-gradient(to left, var(--line), transparent) right / .6rem 100% scroll;
  background-repeat: no-repeat; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem .35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--grid); min-width: 4rem; }
th { color: var(--quiet); font-weight: 500; border-bottom-color: var(--line); }
.n { text-align: right; white-space: nowrap; }
td:first-child, .name { white-space: nowrap; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr));
  gap: 1.25rem; align-items: start; }
figure { margin: 0; break-inside: avoid; min-width: 0; }
figure > svg { width: 100%; height: auto; display: block; }
.matrix td, .matrix th { padding: .35rem .6rem; min-width: 3.2rem; }
.matrix th:first-child { padding-left: 0; }
/* The tree takes the screen's whole width, beyond the column of the text. */
.full { margin-inline: calc(50% - 50vw + 1rem); padding-inline: 0; }
.full .tree { width: max-content; min-width: min(100%, 60rem); margin: 0 auto; }
.full figcaption { max-width: 60rem; margin: 0 auto; }
.tree, .tree ul { list-style: none; margin: 0; padding: 0; position: relative; }
.tree { font-size: .75rem; line-height: 1.25; padding: .25rem 0 .75rem; }
.tree li { display: flex; align-items: center; position: relative; padding: .15rem 0; }
.tree ul { margin-left: .7rem; }
.tree ul::before { content: ""; position: absolute; left: -.7rem; top: 50%; width: .7rem;
  border-top: 1px solid var(--line); }
.tree ul > li { padding-left: .5rem; }
.tree ul > li::before { content: ""; position: absolute; left: 0; top: 50%; width: .5rem;
  border-top: 1px solid var(--line); }
.tree ul > li::after { content: ""; position: absolute; left: 0; top: 0; bottom: 0;
  border-left: 1px solid var(--line); }
.tree ul > li:first-child::after { top: 50%; }
.tree ul > li:last-child::after { bottom: 50%; }
.branch, .more { color: var(--quiet); font-size: .7rem; padding: 0 .25rem; white-space: nowrap; }
.split, .leaf { border: 1px solid var(--line); border-radius: 5px; padding: .15rem .4rem;
  white-space: nowrap; background: var(--paper); }
.split span, .split small { display: block; }
.split small { color: var(--quiet); font-size: .68rem; }
.leaf { border-radius: 999px; font-weight: 600; font-variant-numeric: tabular-nums; }
.up { border-color: var(--blue); color: var(--blue); }
.down { border-color: var(--vermilion); color: var(--vermilion); }
@media (max-width: 62rem) {
  .tree li { display: block; }
  .tree ul { margin-left: .8rem; }
  .tree ul::before, .tree ul > li::after { display: none; }
  .tree ul > li { padding: .25rem 0 0 .7rem; border-left: 1px solid var(--line); }
  .tree ul > li:last-child { border-left-color: transparent; }
  .tree ul > li::before { top: .85rem; width: .6rem; }
  .tree ul > li:last-child::after { display: block; top: 0; bottom: auto; height: .85rem;
    left: -1px; }
  .split, .leaf { display: inline-block; }
  .split span, .split small { display: inline; }
  .split small { padding-left: .5rem; }
}
summary { cursor: pointer; margin-top: .75rem; }
@media print {
  body { max-width: none; padding: 0; font-size: 11pt; }
  h2 { break-after: avoid; }
  tr, dl div, .warning { break-inside: avoid; }
  .figures { grid-template-columns: 1fr 1fr; }
  .wide { overflow: visible; }
  .full { margin-inline: 0; }
  table { font-size: 8.5pt; }
}
"""
