"""The sections of a page about the model: scores, predictions, and what they depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedapp.metrics import AT_THRESHOLD
from fedapp.report import curve_plots, plots
from fedapp.report.markup import Name, Strong, arrow, escaped, figures, folded, quiet, table, titled
from fedapp.report.scored_rows import DEPLOYMENT
from fedapp.report.summary import (
    Run,
    score_names,
    score_notes,
    score_rows,
    score_text,
    scores_by_party,
)
from fedapp.report.tree import first_tree, tree_html
from fedapp.trees.divided import DIVIDED
from fedapp.trees.linear import KIND as LINEAR
from fedapp.trees.linear import linear_from_json
from fedapp.trees.model import kind_of

Fields = Mapping[str, Any]

_MOST_CLASSES = 30  # in a confusion matrix; with more, only the most confused pairs are listed
_MOST_PAIRS = 20
_MOST_ALONE = 4  # parties whose baselines are drawn beside the run's curves


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
        images["ROC curve on test rows"] = curve_plots.roc(rocs)
    if curves.get("pr"):
        (negatives, alarms), (misses, hits) = curves["confusion"]
        share = (misses + hits) / (negatives + alarms + misses + hits)
        classes = _classes(summary, 2)
        images |= {
            f"Precision and recall of class {classes[1]}; dotted: its share of the rows": (
                curve_plots.precision_recall(_of_models(summary, "pr", "pr_auc"), share)
            ),
            f"Calibration: how often rows are of class {classes[1]}, by tenths of the rows": (
                curve_plots.calibration(_of_models(summary, "calibration", "logloss", alone=False))
            ),
            f"Predicted probability of class {classes[1]}, by class": curve_plots.score_histogram(
                curves["histogram"], classes
            ),
        }
    if curves.get("residuals"):
        caption = "Residuals on test rows; the outer bars hold all that lies beyond"
        models = _of_models(summary, "residuals", "rmse", alone=False)
        images[caption] = curve_plots.residuals(models)
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
