"""The report of a run as one self-contained HTML file.

A page has a section for each question: scores, predictions, what the model rests on (with one of
its trees drawn as nested boxes), training, traffic and settings. ``comparison`` has the page of
``fedapp compare``; ``template`` draws all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from fedapp.metrics import is_metric, larger_is_better
from fedapp.report import plots
from fedapp.report.card import seats, unmet
from fedapp.report.curves import section
from fedapp.report.plots import Drawing, plain
from fedapp.report.summary import (
    DEPLOYMENT,
    OURS,
    PLAIN,
    by_baseline,
    certainty_notes,
    compared_with,
    drawn_metrics,
    headline,
    human_bytes,
    human_seconds,
    importance_text,
    main_names,
    metric_of,
    percent_text,
    read_settings,
    resolved_facts,
    score_cells,
    score_notes,
    score_rows,
    score_text,
    scores_by_party,
    threshold_text,
    times_text,
    value_text,
    verb,
    verdict,
    warning_lines,
)
from fedapp.report.template import STYLE, elements, page_template
from fedapp.report.tree import first_tree, model_of, tree_html
from fedapp.run_files import (
    DOWN,
    GAIN,
    TITLE,
    TOTAL_GAIN,
    UP,
    Audit,
    LedgerSums,
    Summary,
    importance_kind,
    importance_of,
)
from fedapp.run_folder import RunFolder
from fedapp.trees.divided import DividedModel
from fedapp.trees.linear import LinearModel

Fields = Mapping[str, Any]
Images = Mapping[str, Drawing]  # by caption
_MOST_CLASSES = 30  # in a table
_MOST_INTERVALS = 2  # scores whose intervals are drawn
_MOST_ALONE = 4  # parties whose baselines are drawn beside the run's curves
LEVEL = "level"
DIVIDED = "The parts of the model are at the parties: there is no tree to draw, nor SHAP values."
IN_NUMBERS = "Intervals, differences and errors of binning in numbers"
CALLED = "share of the rows, highest scores first"
HEADED = {"strategy", "run-dir", "resume"}  # in the page's title, or its location
# Settings of the table that a simulation splits among parties; sites bring their tables.
OF_SIMULATED_TABLES = {"data", "label", "id", "weight", "drop-columns", "partition", "columns"}

# Elements of a page, from plain texts; see ``template``.
table: Callable[..., Markup] = elements.table  # header, rows, n_texts=1: the rest are numbers
figures: Callable[[Images], Markup] = elements.figures
quiet: Callable[[str], Markup] = elements.quiet  # a small paragraph; empty for an empty text
folded: Callable[[str, Markup], Markup] = elements.folded  # opens when its title is clicked
headed: Callable[[str, str], Markup] = elements.headed  # a small heading; empty without a body
attack_cards: Callable[[Audit | None], Markup] = elements.attacks  # empty without an audit


def page(
    title: str,
    subtitle: str,
    sections: Mapping[str, str],
    warnings: Sequence[str] = (),
    numbers: Mapping[str, str] | None = None,
    lead: str = "",
    below: Sequence[str] = (),
) -> str:
    """A whole page; sections without a body are omitted, and texts that are no markup escaped."""
    return page_template.render(
        style=Markup(STYLE),
        title=title,
        subtitle=subtitle,
        sections={name: body for name, body in sections.items() if body},
        warnings=warnings,
        numbers=numbers,
        lead=lead,
        below=below,
    )


def strong(text: str) -> Markup:
    """A table cell in bold."""
    return Markup("<strong>{}</strong>").format(text)


def named(name: str, longest: int = 40) -> str:
    """A name of at most `longest` characters; a shortened one has the whole name as title."""
    shown = plain(name, longest)
    return shown if shown == name else Markup('<span title="{}">{}</span>').format(name, shown)


def arrow(metric: str) -> str:
    """A metric's name with the direction in which it improves."""
    return f"{metric} {'↑' if larger_is_better(metric) else '↓'}" if is_metric(metric) else metric


def run_page(run: RunFolder) -> str:
    """The HTML page of one run."""
    summary = run.summary
    versions = ", ".join(f"{name} {v}" for name, v in summary.get("versions", {}).items())
    facts: dict[str, object] = {"model": summary.get("model_id"), "engine": summary.get("engine")}
    facts |= {verb(summary): times_text(summary)}
    facts |= {"seed": summary.get("seed"), "versions": versions or None}
    warnings = warning_lines(summary)
    chosen = [f"{k}: {v}" for k, v in resolved_facts(summary).items() if k != "boosting"]
    # Of a simulation, whose rows are on this machine; largest first.
    missing = list((summary.get("missing") or {}).items())[: plots.N_COLUMNS]
    gaps = [[named(column), percent_text(share)] for column, share in missing]
    sections = {
        "Scores": _scores(summary),
        "How the tables were read": elements.listed([*chosen, *summary.get("facts", [])])
        + _rows_by_class(summary)
        + headed("Missing values", table(["column", "rows without a value"], gaps) if gaps else ""),
        "Predictions": figures(_predictions(summary)) + _confusions(summary),
        "What the model rests on": _foundations(run),
        "Curves": section(run),
        "Training": quiet(_early_end(run)) + figures(_training(run)),
        "Traffic": _traffic(run.sums),
        TITLE: attack_cards(run.audit),
        "What was run": _setup(run),
    }
    title = f"{summary['strategy']} on {summary['data']}"
    subtitle = " · ".join(f"{k} {v}" for k, v in facts.items() if v is not None)
    below = [
        Markup("<p>{}</p>").format(text) if (text := verdict(summary, metric_of(summary))) else "",
        elements.seats(seats(run), unmet(run)),
    ]
    numbers = _key_numbers(summary)
    return page(title, subtitle, sections, warnings, numbers, headline(summary), below)


def _early_end(run: RunFolder) -> str:
    n_rounds = run.rounds[-1].get("rounds", 0) if run.rounds else 0
    done = run.rounds[-1]["round"] if run.rounds else 0
    # A forest's rounds are levels; it stops when no node can be split, which is not early.
    if done >= n_rounds or _round_name(run.summary) == LEVEL:
        return ""
    best = run.summary.get("best_round")
    scored = f"; the best was round {best}" if best is not None else ""
    return f"Training ended early, after {done} of {n_rounds} rounds{scored}."


def _key_numbers(summary: Summary) -> dict[str, str]:
    metric = metric_of(summary)
    test = summary["metrics"].get("test") or {}
    values = {f"test {metric}": score_text(test[metric])} if metric in test else {}
    if summary["trees"]:
        values["trees"] = f"{summary['trees']:,}"
    values["exchanges"] = f"{summary['exchanges']:,}"
    if summary.get("matched_rows"):
        values["rows matched"] = f"{sum(summary['matched_rows'].values()):,}"
    for way, n_bytes in summary["bytes"].items():
        values[f"sent {way.replace('_', ' ')}"] = human_bytes(n_bytes)
    return values | {f"time, {name}": human_seconds(s) for name, s in summary["seconds"].items()}


def drawings(run: RunFolder) -> list[Drawing]:
    """The figures of the run's page."""
    return [*(_predictions(run.summary) | _importances(run) | _training(run)).values()]


def _training(run: RunFolder) -> dict[str, Drawing]:
    name = _round_name(run.summary)
    best = run.summary.get("best_round")
    return {
        f"{arrow(metric)} by {name}": plots.scores_by_round(run.rounds, metric, best, name)
        for metric in drawn_metrics(run)
    }


def _round_name(summary: Summary) -> str:
    return str(summary.get("round_name", "boosting round"))


def _traffic(sums: LedgerSums) -> str:
    if not sums.n_messages:
        return ""
    numbers, sizes = sums.n_messages, sums.sizes
    cells = [
        [kind, f"{numbers[kind, DOWN] + numbers[kind, UP]:,}"]
        + [human_bytes(sizes[kind, way]) for way in (DOWN, UP)]
        for kind in sorted({kind for kind, _ in numbers})
    ]
    totals = (human_bytes(sizes.total()) for sizes in (sums.received, sums.sent))
    cells.append([strong(cell) for cell in ("all", f"{numbers.total():,}", *totals)])
    parties = sorted({*sums.received, *sums.sent})
    each = {name: [sums.received[name], sums.sent[name]] for name in parties}
    by_party = {"Bytes by party": plots.traffic_by_party(each)}
    return table(["message", "count", "to parties", "to server"], cells) + figures(by_party)


def _setup(run: RunFolder) -> str:
    parties = [[named(party["name"]), f"{party['rows']:,}"] for party in run.summary["parties"]]
    head, changed, unchanged = ["setting", "value"], [], []
    in_deployment = run.summary.get("engine") == DEPLOYMENT
    hidden = HEADED | (OF_SIMULATED_TABLES if in_deployment else set())
    for name, value, is_usual in read_settings(run):
        text = value_text(value)
        if name not in hidden and is_usual:
            unchanged.append((name, text))
        elif name not in hidden:
            changed.append((name, strong(text)))
    unchanged_title = "The other settings that this method reads, at their defaults"
    boosting = resolved_facts(run.summary).get("boosting")
    return (
        quiet(f"Boosting: {boosting}." if boosting else "")
        + (table(head, changed, 2) if changed else quiet("All settings are the defaults."))
        + (folded(unchanged_title, table(head, unchanged, 2)) if unchanged else "")
        + table(["party", "rows"], parties)
    )


def _scores(summary: Summary) -> str:
    """Scores of the model and its baselines, and of the model at each party."""
    rows = score_rows(summary)
    if not rows:
        return ""
    names, lines = score_cells(rows, main_names(rows))
    cells = [
        [strong(text) for text in (named(model), *texts)]
        if (model, texts[0]) == OURS
        else [named(model), *texts]
        for model, *texts in lines
    ]
    has_test = bool(summary["metrics"].get("test"))
    numbers = certainty_notes(summary, metric_of(summary))
    notes = [
        "pooled: trained on what all parties have, in one place. alone: on what that party has."
        if summary.get("baselines")
        else "",
        "" if has_test else "There are no scores of test rows.",
        # In vertical methods the active party sends only scores.
        "The parties have sent scores alone, so there are no curves."
        if has_test and not summary.get("curves")
        else "",
        *(line for line in score_notes(summary) if line not in numbers),
    ]
    whole = table(["model", "rows", *map(arrow, names)], cells, 2)
    whole += figures(_intervals(summary))
    whole += folded(IN_NUMBERS, elements.listed(numbers)) if numbers else ""
    whole += Markup("").join(map(quiet, notes))
    subset, parties = scores_by_party(summary)
    if len(parties) < 2:
        return whole
    names = [name for name in names if any(name in scores for scores in parties.values())]
    lines = score_cells([([named(party)], scores) for party, scores in parties.items()], names)[1]
    title = f"The model on the {subset} rows of each party"
    return whole + headed(title, table(["party", *map(arrow, names)], lines))


def _spans_by_model(summary: Summary) -> dict[str, dict[str, list[float]]]:
    """Test scores of the run and its baselines, each with the ends of its interval if it has one,
    by model and name of the score."""
    baselines = summary.get("baselines") or {}
    ends = {"federated": summary.get("intervals"), **by_baseline(baselines.get("intervals"))}
    scores = {"federated": summary["metrics"].get("test"), **by_baseline(baselines)}
    spans = dict[str, dict[str, list[float]]]()
    for model, of_model in scores.items():
        of_ends = ends.get(model) or {}
        by_metric = {name: [v, *(of_ends.get(name) or ())] for name, v in (of_model or {}).items()}
        spans[model] = {name: span for name, span in by_metric.items() if None not in span}
    return spans


def _intervals(summary: Summary) -> dict[str, Drawing]:
    """Figures of the scores that have been compared with the baselines', the watched one first."""
    compared = (summary.get("baselines") or {}).get("differences") or {}
    names = [metric_of(summary), *PLAIN, *(compared.get("pooled") or ())]
    images, by_model = dict[str, Drawing](), _spans_by_model(summary)
    for metric in dict.fromkeys(names):
        differences = compared_with(summary, metric)
        models = {name: spans[metric] for name, spans in by_model.items() if metric in spans}
        if differences and len(images) < _MOST_INTERVALS and len(models) <= plots.N_COLUMNS:
            caption = (
                f"{arrow(metric)} on test rows, with 95 % intervals. Left: over samples of as many "
                "rows. Right: of differences on the same rows, blue where they exclude 0"
            )
            images[caption] = plots.intervals(models, differences, metric)
    return images


def _rows_by_class(summary: Summary) -> Markup:
    """Rows of each class at each party that has sent their sums, weighted as training is."""
    by_party = summary.get("class_weights") or {}
    of_parties = {name: weights for name, weights in by_party.items() if weights}
    is_noised = bool(summary.get("privacy"))
    if is_noised or not of_parties or max(map(len, of_parties.values())) > _MOST_CLASSES:
        return Markup("")
    totals = [sum(weights) for weights in zip(*of_parties.values(), strict=True)]
    lines = of_parties | ({"all": totals} if len(of_parties) > 1 else {})
    rows = []
    for name, weights in lines.items():
        shares = [weight / (sum(weights) or 1) for weight in weights]
        pairs = zip(weights, map(percent_text, shares), strict=True)
        rows.append([named(name), *(f"{weight:,.0f} ({share})" for weight, share in pairs)])
    return headed("Rows by class", table(["party", *_classes(summary, len(totals))], rows))


def _predictions(summary: Summary) -> dict[str, Drawing]:
    """Figures of the model's predictions of test rows, beside the baselines'."""
    curves = summary.get("curves") or {}
    images: dict[str, Drawing] = {}
    rocs = _of_models(summary, "roc", "auc")
    if (curves.get("roc") or {}).get("fpr"):
        images["ROC curve on test rows"] = plots.curves("roc", rocs, ("fpr", "tpr"), plots.RATES)
    if curves.get("pr"):
        counts, classes = curves["histogram"], _classes(summary, 2)
        shown = np.array([counts["negatives"], counts["positives"]])
        share, name = shown[1].sum() / shown.sum(), classes[1]
        gains, axes = _gains(rocs, share), ("recall", "precision")
        models = _of_models(summary, "pr", "pr_auc")
        caption = f"Precision and recall of class {name}; dotted: its share of the rows"
        images[caption] = plots.curves("precision_recall", models, axes, axes, (share, share))
        caption = f"Gains: how much of class {name} is among the rows with the highest scores"
        axes, labels = ("called", "found"), (CALLED, f"share of {name} found")
        images[caption] = plots.curves("gains", gains, axes, labels)
        caption = f"Lift: how many times as frequent class {name} is among them"
        axes, labels = ("called", "lift"), (CALLED, "lift")
        images[caption] = plots.curves("lift", gains, axes, labels, (1.0, 1.0))
        models = _of_models(summary, "calibration", "logloss", alone=False)
        caption = f"Calibration: how often rows are of class {name}, by tenths of the rows"
        axes = "predicted", "observed"
        labels = "predicted probability, mean of a group", "share of positives"
        images[caption] = plots.curves(
            "calibration", models, axes, labels, marker="o", markersize=4
        )
        caption = f"Predicted probability of class {name}, by class"
        images[caption] = plots.score_histogram(curves["histogram"], classes)
    if curves.get("residuals"):
        caption = "Residuals on test rows; the outer bars hold all that lies beyond"
        images[caption] = plots.residuals(_of_models(summary, "residuals", "rmse", alone=False))
    return images


def _gains(rocs: Mapping[str, Fields], share: float) -> dict[str, Fields]:
    """Positives found by rows called positive, of ROC curves; `share` of the rows are positive."""
    gains: dict[str, Fields] = {}
    for name, rates in rocs.items():
        hits, alarms = (np.array(rates[axis][1:]) for axis in ("tpr", "fpr"))
        called = share * hits + (1 - share) * alarms
        gains[name] = {"called": called, "found": hits, "lift": hits / called}
    return gains


def _of_models(summary: Summary, curve: str, metric: str, alone: bool = True) -> dict[str, Any]:
    """A curve of the run and of its baselines, by names that include a score."""
    baselines = summary.get("baselines") or {}
    drawn, scored = (by_baseline(of, "alone.{}") for of in (baselines.get("curves"), baselines))
    if not alone or len(drawn) > 1 + _MOST_ALONE:
        drawn = {"pooled": drawn["pooled"]}
    drawn = {"federated": summary.get("curves") or {}, **drawn}
    scored["federated"] = summary["metrics"].get("test") or {}
    by_name = {}
    for name, curves in drawn.items():
        values = curves.get(curve) or {}
        if any(values.values()):
            score = score_text(scored.get(name, {}).get(metric), 3)
            by_name[f"{name}, {metric.replace('_', ' ')} {score}"] = values
    return by_name


def _classes(summary: Summary, n_classes: int) -> list[str]:
    # Their numbers if the run has recorded no names.
    return summary.get("classes") or [str(number) for number in range(n_classes)]


def _confusions(summary: Summary) -> str:
    curves = summary.get("curves") or {}
    if not curves.get("confusion"):
        return ""
    counts = curves["confusion"]
    classes = _classes(summary, len(counts))
    if len(classes) != 2:
        return confusion_table(counts, classes, "Test rows by true and predicted class")
    text = f"Test rows by true and predicted class: {classes[1]} above probability 0.5"
    tables = confusion_table(counts, classes, text)
    at = curves.get("confusion_at_threshold")
    if at and not summary["threshold"].get("few"):
        value = threshold_text(summary["threshold"]["value"])
        text = f"The same from the chosen threshold on, probability {value}"
        tables += confusion_table(at, classes, text)
    return Markup('<div class="figures">{}</div>').format(tables)


def confusion_table(counts: Sequence[Sequence[float]], classes: Sequence[str], caption: str) -> str:
    """Weights of rows by true class (rows) and predicted class (columns), shaded by row.

    Empty for more than 30 classes.
    """
    if len(classes) > _MOST_CLASSES:
        return ""
    rows = [[(weight, weight / (sum(row) or 1.0)) for weight in row] for row in counts]
    names = [named(name, 12) for name in classes]
    return Markup(elements.confusion(names, rows, caption))


def _foundations(run: RunFolder) -> str:
    """Importance, one tree, contributions, and what a method reports of its model."""
    summary, model = run.summary, model_of(run)
    gains, tree = importance_of(summary), first_tree(model)
    shares = sorted((summary.get("gain_by_party") or {}).items(), key=lambda share: -share[1])
    head = ["party", "of the total gain"]
    by_party = [[named(name), percent_text(share)] for name, share in shares]
    return (
        figures(_importances(run))
        + (_columns(summary, gains) if gains else "")
        + headed("Whose columns the gain is of", table(head, by_party) if by_party else "")
        + quiet(DIVIDED if isinstance(model, DividedModel) else "")
        + headed("One tree", tree_html(tree) if tree else "")
    )


def _importances(run: RunFolder) -> dict[str, Drawing]:
    """Importance, weights of a linear model, SHAP values and learned rates, of what a run has."""
    summary, model, images = run.summary, model_of(run), dict[str, Drawing]()
    if gains := importance_of(summary):
        kind = importance_kind(summary["strategy"])
        of_pooled = ((summary.get("baselines") or {}).get("importance") or {}).get("pooled") or {}
        pooled = of_pooled.get(kind)
        beside = ", beside the pooled baseline's" if pooled else ""
        caption = f"{importance_text(summary)}; {_shown(gains)}{beside}"
        images[caption] = plots.importance(gains, kind, pooled)
    if isinstance(model, LinearModel):  # margin per standard deviation of an input
        has_one_output = model.weights.shape[1] == 1
        sizes = model.weights[:, 0] if has_one_output else np.abs(model.weights).mean(axis=1)
        values = dict(zip(model.inputs, sizes.tolist(), strict=True))
        label = "weight" if has_one_output else "mean |weight| over the classes"
        caption = f"Weights of the standardised columns, {_shown(values)}"
        images[caption] = plots.column_bars("weights", values, label)
    contributions = summary.get("contributions") or {}
    if any((contributions.get("mean") or {}).values()):
        rows = f"{contributions['rows']:,} test rows"
        caption = f"SHAP summary: how far a column moves the margin, mean over {rows}"
        means = contributions["mean"]
        images[caption] = plots.column_bars("contributions", means, "mean |contribution|")
    if rates := summary.get("learning_rates"):
        caption = "Learned rate of each tree; Z is the mean of a party"
        images[caption] = plots.learning_rates(rates["trees"], rates["parties"])
    return images


def _shown(columns: Mapping[str, float]) -> str:
    few = len(columns) <= plots.N_COLUMNS
    return f"all {len(columns)} in use" if few else f"first {plots.N_COLUMNS} of {len(columns)}"


def _columns(summary: Summary, gains: Mapping[str, float]) -> str:
    every = summary["importance"]
    counts = every.get("count") or {}
    kinds = [kind for kind in (GAIN, TOTAL_GAIN) if kind in every]
    moves = (summary.get("contributions") or {}).get("mean") or {}
    header = ["column", *kinds, "splits", *(["mean |contribution|"] if moves else [])]
    rows = [
        [named(n), *(f"{every[kind].get(n, 0.0):.6g}" for kind in kinds), f"{counts.get(n, 0):,}"]
        + ([f"{moves.get(n, 0.0):.4g}"] if moves else [])
        for n in gains
    ]
    return folded("Every column in numbers", table(header, rows))
