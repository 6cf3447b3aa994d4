"""The report of a run as one self-contained HTML file; pages that compare runs.

A page has a section for each question: scores, predictions, what the model rests on (with one of
its trees drawn as nested boxes), training, traffic and settings.

`comparison_page` compares any finished runs (``fedapp report``); `tradeoff_page` shows a
`Comparison`, all of whose lines are scored on the same rows (``fedapp compare``).
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedapp.errors import DataError
from fedapp.metrics import AT_THRESHOLD, is_metric, larger_is_better
from fedapp.report import plots
from fedapp.report.plots import compared_scores, near_range, plain, ranking, tradeoff
from fedapp.report.summary import (
    COMMON,
    DEPLOYMENT,
    Run,
    Scores,
    drawn_metrics,
    fact_lines,
    human_bytes,
    human_seconds,
    metric_of,
    resolved_facts,
    row_counts,
    row_warnings,
    score_names,
    score_notes,
    score_rows,
    score_text,
    scores_by_party,
    warning_lines,
)
from fedapp.settings import Value, defaults, flatten
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
ONE_PLACE = (
    "pooled: all rows and columns in one place. A party's rows alone: trained on these. A party's "
    "columns alone: what the party that has the labels reaches without the others' columns."
)
N_ORDERS = 10  # of the training rows, for the range of pooled XGBoost's scores
TIES = (
    "less the best: mean and standard deviation of the differences to the best strategy, on the "
    "same seeds and folds; tie: the mean is within two standard errors of 0."
)
OFF_AXIS = " An arrow stands for a score beyond the axis, which is written beside it."
Named = Mapping[str, Run]
# A run's location, and settings that the table of runs shows.
STATED = {"run-dir", "resume", "strategy", "data", "parties", "seed"}


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


def comparison_page(runs: Sequence[Run]) -> str:
    """HTML page of two runs or more; DataError if they differ in their objective."""
    objectives = sorted({run.summary["objective"] for run in runs})
    if len(objectives) > 1:
        raise DataError(f"runs must share one objective, got {', '.join(objectives)}")
    named = named_runs(runs)
    warnings = [f'<p class="warning">{escaped(line)}</p>' for line in row_warnings(named)]
    rounds = {name: run.rounds for name, run in named.items() if run.rounds}
    curves = {
        f"{arrow(metric)} by boosting round": compared_scores(rounds, metric)
        for metric in drawn_metrics(runs)
    }
    rocs = {name: (run.summary.get("curves") or {}).get("roc") for name, run in named.items()}
    drawn = {name: roc for name, roc in rocs.items() if roc and roc["fpr"]}
    roc_figures = {"ROC curves": plots.roc(drawn, legend_below=True)} if drawn else {}
    sections = [
        *warnings,
        section("Scores on test rows", _scores(named)),
        section("What is compared", _facts(named)),
        section("Cost", _costs(named)),
        section("Trade-offs", figures(_trade_offs(named))),
        section("Training", figures(curves)),
        section("Predictions", figures(roc_figures)),
        section("Settings that differ", _differences(named)),
    ]
    data = " · ".join(dict.fromkeys(run.summary["data"] for run in runs))
    return page(f"{len(runs)} runs compared", data, sections)


def named_runs(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by the names of their folders, with a number where two agree."""
    folders = [run.path.resolve().name for run in runs]
    names = [
        f"{name} ({folders[: i + 1].count(name)})" if folders.count(name) > 1 else name
        for i, name in enumerate(folders)
    ]
    return dict(zip(names, runs, strict=True))


def _facts(named: Named) -> str:
    rows = []
    for name, run in named.items():
        counts, summary = row_counts(run.summary), run.summary
        n_train = counts.get("train", sum(party["rows"] for party in summary["parties"]))
        n_test = f"{counts['test']:,}" if "test" in counts else "not known"
        cells = n_test, f"{n_train:,}", f"{len(summary['parties'])}", f"{summary.get('seed', '')}"
        rows.append([Name(name), Name(summary["strategy"]), Name(summary["data"]), *cells])
    header = ["run", "strategy", "data", "rows scored", "training rows", "parties", "seed"]
    return table(header, rows, n_texts=3)


def _scores(named: Named) -> str:
    """Scores of each run and its pooled baseline; the best run of each column is bold."""
    tests: dict[str, Scores] = {
        n: run.summary["metrics"].get("test") or {} for n, run in named.items()
    }
    names = [name for name in score_names(list(tests.values())) if name not in AT_THRESHOLD]
    best = {}  # the best value of each metric, as shown
    for name in filter(is_metric, names):
        defined = [score for each in tests.values() if (score := _defined(each, name)) is not None]
        if defined:
            best[name] = score_text(max(defined) if larger_is_better(name) else min(defined))
    rows = []
    for run_name, run in named.items():
        texts = {name: score_text(tests[run_name].get(name)) for name in names}
        cells = [Strong(text) if text == best.get(name) else text for name, text in texts.items()]
        rows.append([Name(run_name), Name(run.summary["strategy"]), *cells])
        pooled = (run.summary.get("baselines") or {}).get("pooled")
        if pooled:
            texts = {name: score_text(pooled.get(name)) for name in names}
            rows.append(["", Name("pooled baseline"), *texts.values()])
    return table(["run", "strategy", *map(arrow, names)], rows, n_texts=2)


def _costs(named: Named) -> str:
    rows = []
    for name, run in named.items():
        summary, traffic = run.summary, run.summary["bytes"]
        counts = (summary["trees"], summary["exchanges"])
        sizes = (human_bytes(traffic[way]) for way in ("to_parties", "to_server"))
        seconds = human_seconds(summary["seconds"]["total"])
        rows.append([Name(name), *(f"{count:,}" for count in counts), *sizes, seconds])
    header = ["run", "trees", "exchanges", "to parties", "to server", "time"]
    return table(header, rows)


def _trade_offs(named: Named) -> dict[str, str]:
    """Scores of the early-stopping metric against costs; empty if fewer than two runs have it."""
    metric = metric_of(next(iter(named.values())).summary)
    lines = []
    for name, run in named.items():
        summary, pooled = run.summary, (run.summary.get("baselines") or {}).get("pooled") or {}
        if (score := _defined(summary["metrics"].get("test") or {}, metric)) is not None:
            seconds = summary["seconds"].get("train", summary["seconds"]["total"])
            costs = seconds, summary["exchanges"], sum(summary["bytes"].values())
            lines.append(Line(name, (score,), *costs))
        if (score := _defined(pooled, metric)) is not None:
            lines.append(Line(f"{name}, pooled", (score,)))
    if sum(line.n_bytes is not None for line in lines) < 2:
        return {}
    lines.sort(key=lambda line: line.mean, reverse=larger_is_better(metric))
    return cost_figures(lines, metric, "run")


def _defined(scores: Scores, metric: str) -> float | None:
    """A score, or None if it is absent or undefined."""
    value = scores.get(metric)
    return None if value is None or math.isnan(value) else value


def _differences(named: Named) -> str:
    """Settings that some run reads and that differ, in the first run's order."""
    unread = [run for run in named.values() if run.summary.get("settings_read") is None]
    read = {key for run in named.values() for key in run.summary.get("settings_read") or ()}
    flat = {name: flatten(run.config) for name, run in named.items()}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings)
    shown = [key for key in keys if key not in STATED and (unread or key in read)]
    rows = [[key, *(str(each.get(key, "not set")) for each in flat.values())] for key in shown]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return "<p>None.</p>"
    return table(["setting", *named], differing, n_texts=1 + len(named))


@dataclass(frozen=True, slots=True)
class Line:
    """One strategy or baseline over all seeds and folds."""

    name: str
    scores: tuple[float, ...]  # test scores by seed and fold, of the early-stopping metric
    # Means per run; None for a baseline, which sends nothing.
    seconds: float | None = None
    exchanges: float | None = None
    n_bytes: float | None = None  # both ways
    others: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # all test scores
    runs: tuple[str, ...] = ()  # names of the runs' folders, by seed and fold

    @property
    def mean(self) -> float:
        """Mean score."""
        return float(np.mean(self.scores))

    @property
    def spread(self) -> float:
        """Standard deviation of the score over seeds and folds; nan for one run."""
        return float(np.std(self.scores, ddof=1)) if len(self.scores) > 1 else float("nan")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Strategies and baselines that are scored on the same rows."""

    metric: str
    lines: tuple[Line, ...]  # ordered by the metric, best first
    data: str
    objective: str
    engine: str
    seeds: tuple[int, ...]
    n_parties: int
    n_rows: Mapping[str, int]  # "train", "valid" and "test"
    methods: Mapping[str, tuple[str, ...]]  # by what their parties split: "rows" or "columns"
    changed: Mapping[str, Value]  # settings that are not defaults, except those above
    unread: Mapping[str, tuple[str, ...]]  # method -> changed settings that it does not read
    folds: int = 0  # 0: no cross-validation
    orders: tuple[float, float] | None = None  # range of pooled XGBoost's scores, see N_ORDERS

    @property
    def metrics(self) -> list[str]:
        """The watched score, and up to two others."""
        others = (name for name in COMMON if name in self.lines[0].others)
        return list(dict.fromkeys([self.metric, *others]))[:3]

    @property
    def records(self) -> list[dict[str, Any]]:
        """A record per line, best first: means, differences to the best strategy, costs."""
        best, records = next(line for line in self.lines if line.n_bytes is not None), []
        for line in self.lines:
            pairs = Line("", tuple(np.subtract(line.scores, best.scores).tolist()))
            error = pairs.spread / len(pairs.scores) ** 0.5
            # A tie: the mean difference is within two standard errors of 0.
            ties = None if np.isnan(error) else abs(pairs.mean) <= 2 * error
            others = {name: line.others.get(name, np.nan) for name in self.metrics[1:]}
            means = {name: float(np.mean(scores)) for name, scores in others.items()}
            records.append(
                {"strategy": line.name, self.metric: line.mean, "sd": line.spread, **means}
                | {"difference": pairs.mean, "difference_sd": pairs.spread}
                | {"ties": ties, "is_best": line is best}
                | {"seconds": line.seconds, "exchanges": line.exchanges, "bytes": line.n_bytes}
            )
        return records

    @property
    def facts(self) -> dict[str, str]:
        """What is compared, in words."""
        rows = self.n_rows
        seeds = ", ".join(map(str, self.seeds))
        if self.folds:
            seeds += f", each with {self.folds} folds that are held back in turn"
        is_several = len(self.seeds) > 1 or self.folds > 1
        over = "all these runs" if self.folds else "them"
        of_fold = " (in the first fold)" if self.folds else ""  # fold sizes differ by a row
        several = f"; ± is the standard deviation over {over}" if is_several else ""
        split = [
            f"some of the {what} ({', '.join(methods)})" for what, methods in self.methods.items()
        ]
        partly = {name for names in self.unread.values() for name in names}
        usual = "no others are changed for every method" if partly else "all defaults"
        facts = {
            "data": f"{self.data}, {self.objective}",
            "rows": f"{rows['test']:,} test rows{of_fold} score every line; "
            f"{rows['train']:,} train, {rows['valid']:,} validate",
            "parties": f"{self.n_parties}, each with {' or '.join(split)}",
            "seeds": seeds + several if several else f"{seeds} (one: no spread is known)",
            "engine": self.engine,
            "settings": self._named(set(self.changed) - partly) or usual,
        }
        low, high = map(score_text, self.orders or (0.0, 0.0))
        if low != high:
            facts["row orders"] = (
                f"pooled XGBoost scores {low} to {high} over {N_ORDERS} orders of the training "
                "rows of the first run, which its cuts follow; smaller differences say nothing"
            )
        for method, unread in self.unread.items() if partly else ():
            read = self._named(partly - set(unread)) or "nothing more"
            not_read = f"; does not read {', '.join(unread)}" if unread else ""
            facts[method] = f"also reads {read}{not_read}"
        return facts

    def _named(self, names: Collection[str]) -> str:
        return ", ".join(f"{name}={self.changed[name]}" for name in self.changed if name in names)


def score_table(comparison: Comparison) -> Table:
    """The lines as a table for a terminal."""
    grid = Table(*_header(comparison))
    for column in grid.columns[1:]:
        column.justify = "right"
    for name, *cells in _rows(comparison):
        grid.add_row(escape(name), *cells)
    return grid


def tradeoff_page(comparison: Comparison) -> str:
    """The comparison as HTML: tables, and figures of scores against costs."""
    rows = _rows(comparison)
    rows[0] = [Strong(cell) for cell in rows[0]]
    rows_of_facts = list(map(list, comparison.facts.items()))
    facts = table(["", "of every line, or of a method"], rows_of_facts, n_texts=2)
    note = quiet(ONE_PLACE) + (quiet(TIES) if len(comparison.lines[0].scores) > 1 else "")
    run_rows = [
        [RunName(run), *(score_text(line.others[name][place]) for name in comparison.metrics)]
        for line in comparison.lines
        for place, run in enumerate(line.runs)
    ]
    head = ["run", *map(arrow, comparison.metrics)]
    sections = [
        section("Test scores and cost", table(_header(comparison), rows) + note),
        section("Every run", table(head, run_rows) if run_rows else ""),
        section("What is compared", facts),
        section(
            "Trade-offs", figures(cost_figures(comparison.lines, comparison.metric, "strategy"))
        ),
    ]
    title = f"{sum(map(len, comparison.methods.values()))} strategies compared"
    return page(title, f"{comparison.data} · {comparison.n_rows['test']:,} test rows", sections)


def cost_figures(lines: Sequence[Line], metric: str, what: str) -> dict[str, str]:
    """Figures of scores against costs, and a ranking, by caption; `what` names a line."""
    federated = [line for line in lines if line.n_bytes is not None]
    off_axis = OFF_AXIS if _has_far(federated) else ""
    by_bytes = [(line.name, line.n_bytes or 0.0, line.mean) for line in federated]
    by_seconds = [(line.name, line.seconds or 0.0, line.mean) for line in federated]
    by_exchanges = [(line.name, line.exchanges or 0.0, line.mean) for line in federated]
    points = [(line.name, line.mean, line.spread, line.n_bytes is None) for line in lines]
    several = any(len(line.scores) > 1 for line in lines)
    bars = ", with the standard deviation over the runs" if several else ""
    kinds = f"every {what}"
    if len(federated) < len(lines):
        kinds += " (dark) and of the baselines (pale)"
    all_off_axis = OFF_AXIS if _has_far(lines) else ""
    return {
        f"Test {arrow(metric)} of every {what} against the bytes it sends, on a logarithmic "
        f"scale.{off_axis}": tradeoff(by_bytes, "bytes sent", metric, human_bytes),
        f"Test {arrow(metric)} of every {what} against its training time, on a logarithmic "
        f"scale.{off_axis}": tradeoff(by_seconds, "train time", metric, human_seconds),
        f"Test {arrow(metric)} of every {what} against its exchanges with the parties, each of "
        f"which costs seconds in a deployment.{off_axis}": tradeoff(
            by_exchanges, "exchanges", metric, "{:g}".format
        ),
        f"Test {arrow(metric)} of {kinds}, best first{bars}.{all_off_axis}": ranking(
            points, metric
        ),
    }


def _has_far(lines: Sequence[Line]) -> bool:
    means = [line.mean for line in lines if np.isfinite(line.mean)]
    low, high = near_range(means)
    return any(not low <= mean <= high for mean in means)


def _header(comparison: Comparison) -> list[str]:
    metric, *others = map(arrow, comparison.metrics)
    pairs = ["less the best"] if len(comparison.lines[0].scores) > 1 else []
    return ["strategy", metric, "±", *pairs, *others, "train", "exchanges", "bytes"]


def _rows(comparison: Comparison) -> list[list[str]]:
    rows = []
    for record in comparison.records:
        mark = " tie" if record["ties"] else ""
        pairs = f"{record['difference']:+.4f} ± {score_text(record['difference_sd'])}{mark}"
        row = [record["strategy"], score_text(record[comparison.metric]), score_text(record["sd"])]
        row += (
            ["best" if record["is_best"] else pairs] if len(comparison.lines[0].scores) > 1 else []
        )
        row += [score_text(record[name]) for name in comparison.metrics[1:]]
        costs = ["", "", ""]
        if record["bytes"] is not None:
            costs = [human_seconds(record["seconds"]), f"{record['exchanges']:g}"]
            costs.append(human_bytes(record["bytes"]))
        rows.append(row + costs)
    return rows
