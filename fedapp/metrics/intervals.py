"""Sampling intervals of scores, and of differences of two models on the same rows.

The rows are taken as a sample of a population: an interval says how a score would vary over samples
of as many rows. ``intervals`` needs only what parties send for the scores; ``paired`` needs the
rows of both models in one place. Neither is for weighted rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Final

import numpy as np

from fedapp.metrics.names import is_custom
from fedapp.metrics.scores import (
    BINARY,
    area_under_precision_recall,
    average_precisions,
    divided,
    multi_scores,
    scores,
    sigmoid,
)
from fedapp.metrics.sums import (
    N_BASE_SUMS,
    Array,
    Rows,
    Statistics,
    binary_losses,
    checked_rows,
    class_losses,
    confusion,
    is_called,
    losses_of,
    margin_middles,
    statistics,
    summed,
)
from fedapp.trees.objective import exact_predictions, is_of_rows, is_ranking, is_survival

N_DRAWS, SEED = 500, 7  # of the bootstrap
NORMAL: Final = NormalDist()
TWO_SIDED = NORMAL.inv_cdf(0.975)
N_BINS = 2**12
Span = tuple[float, float]
Difference = tuple[float, float, float]  # of two scores, and the ends of its interval


def intervals(
    objective: str,
    statistics: Statistics,
    center: float = 0.0,
    residual_range: float = 1.0,
    extra: Sequence[str] = (),
) -> dict[str, Span]:
    """95 % intervals of scores over samples of as many unweighted rows; arguments as for `curves`.

    ``auc`` has DeLong's interval on the logit scale, from the histogram, whose bins are ties.
    Shares of rows (``accuracy``, ``precision``, ``recall``, ``error``) have Wilson's, from their
    counts. Others are bootstrapped: cells of the histogram or the confusion matrix are drawn again,
    each with the value in its middle. Without interval are ``r2`` and ``auc_ovr``, as the sums do
    not relate labels to residuals and classes to each other; scores of times and of queries;
    ``ks``, an extreme over thresholds that draws exaggerate; a score that is the same in
    every draw; and all scores of cells that are no whole numbers of rows.

    Sources: DeLong et al. 1988, "Comparing the areas under two or more correlated ROC curves";
    Wilson 1927, "Probable inference, the law of succession, and statistical inference";
    Efron 1981, "Nonparametric standard errors and confidence intervals".
    """
    exact = scores(objective, statistics, extra)
    sums, histogram = statistics.sums, statistics.histogram
    n_rows = float(sums[0])
    counts = {BINARY: sums[2:N_BASE_SUMS], "multi:softprob": sums[2:]}.get(objective, sums[:1])
    counted = np.concatenate((histogram.ravel(), counts))
    is_counted = histogram.any() and (counted == np.rint(counted)).all() and (counted >= 0).all()
    # More than float64 counts are weights, which are all whole there.
    is_counted = is_counted and counted.sum() < 2.0**53
    if n_rows <= 0 or not is_of_rows(objective) or not is_counted:
        return {}
    if objective == "multi:softprob":
        odds = margin_middles(histogram.shape[1]) - np.log(len(histogram) // 2 - 1)
        losses = np.logaddexp(0.0, -odds) / n_rows
        counts = confusion(sums)

        def class_counts(draws: Array) -> dict[str, Array]:
            by_draw = [multi_scores(np.array([n_rows, np.nan, *drawn.flat]), ()) for drawn in draws]
            return {name: np.array([scores[name] for scores in by_draw]) for name in by_draw[0]}

        return {
            **_bootstrap(exact, histogram[1::2], lambda c: {"mlogloss": (c @ losses).sum(axis=1)}),
            **_bootstrap(exact, counts, class_counts),
            **_shares(exact, {"accuracy": (float(np.trace(counts)), n_rows)}, extra),
        }
    used = histogram.any(axis=0)
    cells = histogram[:, used]
    if objective == BINARY:
        margins = center + margin_middles(used.size)[used]
        losses = np.logaddexp(0.0, [margins, -margins])

        def class_scores(draws: Array) -> dict[str, Array]:
            alarms, hits = (draws @ (margins >= 0)).T
            positives = draws[:, 1].sum(axis=1)
            by_name = {
                "logloss": (draws * losses).sum(axis=(1, 2)) / n_rows,
                "f1": divided(2.0 * hits, hits + alarms + positives),
                "pr_auc": average_precisions(draws),
            }
            if "aucpr" in extra:
                by_name["aucpr"] = np.array(list(map(area_under_precision_recall, draws)))
            return by_name

        hits, misses, alarms = map(float, sums[2:N_BASE_SUMS])
        shares = {
            "accuracy": (n_rows - misses - alarms, n_rows),
            "precision": (hits, hits + alarms),
            "recall": (hits, hits + misses),
        }
        spans = {
            **_delong(exact["auc"], *cells),
            **_bootstrap(exact, cells, class_scores),
            **_shares(exact, shares, extra),
        }
        return {name: spans[name] for name in exact if name in spans}
    edges = np.linspace(-residual_range, residual_range, used.size + 1)
    errors = np.abs(edges[1:] + edges[:-1])[used] / 2.0

    def number_scores(draws: Array) -> dict[str, Array]:
        squares, absolutes = (draws[:, 0] @ losses for losses in (errors**2, errors))
        return {"rmse": np.sqrt(squares / n_rows), "mae": absolutes / n_rows}

    return _bootstrap(exact, cells, number_scores)


def row_intervals(
    objective: str, margins: Rows, labels: Rows, weights: Rows, extra: Sequence[str] = ()
) -> dict[str, Span]:
    """``intervals`` of rows in one place, {} if they have weights; see ``statistics``."""
    if not len(labels) or (weights != 1).any():
        return {}
    predictions = exact_predictions(objective, margins.astype(np.float64))[:, 0]
    widest = float(np.abs(labels - predictions).max()) or 1.0
    center = float(np.median(margins[:, 0]))
    if not np.isfinite(widest):
        return {}
    sums = statistics(objective, margins, labels, weights, N_BINS, widest, center, extra=extra)
    return intervals(objective, sums, center, widest, extra)


def wilson(count: float, total: float) -> Span:
    """Interval of the share that ``count`` of ``total`` rows are; ``total`` must be > 0.

    A count that is not 0 to ``total``, as noise or a party's false sums give, is the nearer end.
    """
    share, spread = min(max(count / total, 0.0), 1.0), TWO_SIDED**2 / total
    middle = (share + spread / 2.0) / (1.0 + spread)
    reach = TWO_SIDED / (1.0 + spread) * np.sqrt(share * (1.0 - share) / total + spread / 4 / total)
    low = float(middle - reach) if count > 0 else 0.0  # which rounding would miss
    return low, float(middle + reach) if count < total else 1.0


def _shares(
    exact: Mapping[str, float], counts: Mapping[str, Span], extra: Sequence[str]
) -> dict[str, Span]:
    """Wilson's intervals of shares, by their counts, and of the errors among ``extra``."""
    spans = {name: wilson(*pair) for name, pair in counts.items() if pair[1] > 0}
    n_rows = counts["accuracy"][1]
    errors = [name for name in extra if name.partition("@")[0] in ("error", "merror")]
    return spans | {name: wilson(exact[name] * n_rows, n_rows) for name in errors}


def mean_interval(values: Array) -> Span:
    """Student's 95 % interval of the mean of which these are normal draws; NaN for fewer than two.

    Source: Student 1908, "The probable error of a mean".
    """
    from scipy.special import stdtrit  # takes a tenth of a second, and only comparisons need it

    n = len(values)
    if n < 2:
        return float("nan"), float("nan")
    middle, error = float(values.mean()), float(values.std(ddof=1)) / n**0.5
    reach = float(stdtrit(n - 1, 0.975)) * error
    return middle - reach, middle + reach


# Two models on the same rows


def paired(
    objective: str,
    first: Rows,
    second: Rows,
    labels: Rows,
    weights: Rows,
    extra: Sequence[str] = (),
) -> dict[str, Difference]:
    """Scores of the first model less those of the second one on the same rows, with 95 % intervals.

    Both have made the same rows right or wrong, so the difference is known better than either
    score. ``auc`` follows DeLong et al. 1988, means of losses have the normal interval of their
    differences by row, and root mean squares that of their first-order change (delta method).
    Without are scores that are no mean over rows. ``first`` and ``second`` are margins; other
    arguments as for ``statistics``.

    Returns
    -------
    name -> difference, lower end, upper end; {} if rows have weights, or there are fewer than two.
    """
    if len(labels) < 2 or (weights != 1).any() or is_ranking(objective):
        return {}
    spans = _paired_auc(first[:, 0], second[:, 0], labels) if objective == BINARY else {}
    losses = [row_losses(objective, margins, labels, extra) for margins in (first, second)]
    for name in losses[0]:
        of_first, of_second = (by_name[name] for by_name in losses)
        value, terms = float(of_first.mean() - of_second.mean()), of_first - of_second
        if name in ("rmse", "rmsle"):
            roots = [float(np.sqrt(squares.mean())) for squares in (of_first, of_second)]
            if not all(roots):
                continue
            value = roots[0] - roots[1]
            terms = of_first / (2 * roots[0]) - of_second / (2 * roots[1])
        spans[name] = _normal(value, float(terms.var(ddof=1)) / len(labels))
    return spans


def row_losses(
    objective: str, margins: Rows, labels: Rows, extra: Sequence[str]
) -> dict[str, Array]:
    """Unweighted terms of each row, by the score that is their mean (of squares: its root)."""
    margins64, labels64, _ = checked_rows(objective, margins, labels, np.ones_like(labels))
    if objective == "multi:softprob":
        class_ids = labels64.astype(np.int64)
        hits = (margins64.argmax(axis=1) == class_ids).astype(np.float64)
        return {"mlogloss": class_losses(margins64, class_ids), "accuracy": hits}
    predictions = exact_predictions(objective, margins64)[:, 0]
    terms = {
        name: losses_of(name, labels64, predictions)
        for name in summed(objective, extra)
        if not is_custom(name)
    }
    if objective == BINARY:
        hits = (is_called(margins64[:, 0]) == (labels64 > 0)).astype(np.float64)
        return {"logloss": binary_losses(margins64[:, 0], labels64), "accuracy": hits, **terms}
    if is_survival(objective):  # whose labels are signed, and predictions may be hazard ratios
        return terms
    residuals = labels64 - predictions
    return {"rmse": residuals**2, "mae": np.abs(residuals), **terms}


def _normal(value: float, variance: float) -> Difference:
    reach = TWO_SIDED * float(np.sqrt(variance))
    return value, value - reach, value + reach


def _paired_auc(first: Rows, second: Rows, labels: Rows) -> dict[str, Difference]:
    positive = labels > 0
    if min(positive.sum(), (~positive).sum()) < 2:
        return {}
    placed = [_placements(values[~positive], values[positive]) for values in (first, second)]
    (above, below), (others_above, others_below) = placed
    terms = above - others_above, below - others_below
    variance = sum(float(values.var(ddof=1)) / len(values) for values in terms)
    return {"auc": _normal(float(terms[0].mean()), variance)}


def _placements(negatives: Rows, positives: Rows) -> tuple[Array, Array]:
    """Of each positive the share of negatives below it, and of each negative that of positives
    above it; ties count half."""

    def below(values: Rows, others: Rows) -> Array:
        ordered = np.sort(others)
        sides = [np.searchsorted(ordered, values, side) for side in ("left", "right")]
        return np.asarray((sides[0] + sides[1]) / (2.0 * len(others)))

    return below(positives, negatives), 1.0 - below(negatives, positives)


def _bootstrap(
    exact: Mapping[str, float], counts: Array, score: Callable[[Array], dict[str, Array]]
) -> dict[str, Span]:
    """Bias-corrected percentiles of scores of drawn counts, moved by what binning moves a score.

    ``score`` takes draws, shape (n, *counts.shape); its scores have shape (n,).
    """
    if not counts.any():  # noise may leave no row in any cell
        return {}
    cells = counts.ravel() > 0
    shares = counts.ravel()[cells] / counts.sum()
    # The counts themselves, then the draws.
    draws = np.zeros((1 + N_DRAWS, counts.size))
    draws[0] = counts.ravel()
    draws[1:, cells] = np.random.default_rng(SEED).multinomial(int(counts.sum()), shares, N_DRAWS)
    spans: dict[str, Span] = {}
    for name, every in score(draws.reshape(-1, *counts.shape)).items():
        value, values = float(every[0]), every[1:]
        values = values[~np.isnan(values)]
        if np.isnan(value) or not np.ptp(values):
            continue
        below = float(np.mean(values < value) + np.mean(values <= value)) / 2.0
        bias = NORMAL.inv_cdf(min(max(below, 1.0 / N_DRAWS), 1.0 - 1.0 / N_DRAWS))
        levels = [NORMAL.cdf(2.0 * bias + side) for side in (-TWO_SIDED, TWO_SIDED)]
        low, high = np.quantile(values, levels) + exact[name] - value
        spans[name] = float(low), float(high)
    return spans


def _delong(area: float, negatives: Array, positives: Array) -> dict[str, Span]:
    """Interval of ``auc``; empty if it is undefined, 0 or 1, or a class has one row only."""
    n_negatives, n_positives = float(negatives.sum()), float(positives.sum())
    if not 0 < area < 1 or min(n_negatives, n_positives) < 2:
        return {}
    above = (np.cumsum(negatives) - negatives / 2.0) / n_negatives
    below = (n_positives - np.cumsum(positives) + positives / 2.0) / n_positives
    variance = positives @ (above - area) ** 2 / (n_positives * (n_positives - 1.0))
    variance += negatives @ (below - area) ** 2 / (n_negatives * (n_negatives - 1.0))
    logit = np.log(area / (1.0 - area))
    reach = TWO_SIDED * np.sqrt(variance) / (area - area**2)
    low, high = sigmoid(np.array([logit - reach, logit + reach])).tolist()
    return {"auc": (low, high)}
