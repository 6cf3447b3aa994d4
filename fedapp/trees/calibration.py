"""Calibration of two classes: curves from margins to the log odds of the shares of positives.

Sources: Platt 1999, "Probabilistic outputs for support vector machines", with the Newton steps of
Lin, Lin and Weng 2007, "A note on Platt's probabilistic outputs for support vector machines";
Zadrozny and Elkan 2002, "Transforming classifier scores into accurate multiclass probability
estimates". Departure: the ends of an isotonic curve are Platt's targets, as no probability of 0 or
1 follows from finitely many rows, and one such row would have an infinite loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from fedapp.errors import ConfigError
from fedapp.trees.losses import LOGIT, Doubles

Calibration = Literal["none", "platt", "isotonic"]
FEWEST_ISOTONIC = 1000  # validation rows, below which an isotonic curve follows chance
# Of Newton steps: the most, the mean gradient at which they end, what is added to the curvature,
# the share of the expected fall that a step must have, and the shortest step.
_STEPS, _FLAT, _RIDGE, _ENOUGH, _SHORTEST = 100, 1e-10, 1e-12, 1e-4, 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A line of log odds by margin, or points of probabilities that do not fall: linear between
    them, constant beyond."""

    slope: Annotated[float, "> 0"]
    intercept: float
    margins: Annotated[Doubles, "n_points"]  # ascending; without points the line counts
    probabilities: Annotated[Doubles, "n_points", "> 0", "< 1"]

    @property
    def n_points(self) -> int:
        """Number of points."""
        return len(self.margins)

    def completed(self) -> Curve:
        """The curve; ValueError if its points fall."""
        if not ((np.diff(self.margins) > 0).all() and (np.diff(self.probabilities) >= 0).all()):
            raise ValueError("points of curve must rise")
        return self

    def odds(self, margins: Doubles) -> Doubles:
        """Log odds by margin."""
        if not self.n_points:
            return self.slope * margins + self.intercept
        return LOGIT.margins(np.interp(margins, self.margins, self.probabilities))


def calibrated(curve: Curve | None, margins: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Margins whose sigmoid is calibrated, of the same type; unchanged without a curve."""
    return margins if curve is None else curve.odds(margins.astype(float)).astype(margins.dtype)


def check_both_classes(calibration: Calibration, *by_class: float) -> None:
    """Raise ConfigError unless both classes have weight among the validation rows."""
    if min(by_class) <= 0:
        rule = "must be none where the validation rows of weight > 0 are not of both classes"
        way = "another seed or a larger valid-fraction may have both"
        raise ConfigError(f"calibration {rule}, got {calibration}: {way}")


def fit(
    calibration: Calibration, margins: Doubles, by_class: Doubles, n_rows: int, least: int = 1
) -> Curve | None:
    """The curve of ``n_rows`` validation rows; None if probabilities would not rise with margins.

    ``by_class``, shape (2, n), are the weights of negatives and positives, each > 0 in sum, at each
    of the ``margins``, shape (n,): of bins, or of single rows. Their scale does not count. Steps of
    an isotonic curve are of ``least`` of these with weight, or more.
    """
    negatives, positives = by_class * (n_rows / by_class.sum())
    n_negatives, n_positives = negatives.sum(), positives.sum()
    ends = 1 / (n_negatives + 2), (n_positives + 1) / (n_positives + 2)
    used = negatives + positives > 0
    points, weights, hits = margins[used], (negatives + positives)[used], positives[used]
    if calibration == "isotonic":
        from sklearn.isotonic import IsotonicRegression

        if least > 1:
            points, weights, hits = _grouped(points, weights, hits, least)
        steps = IsotonicRegression(y_min=ends[0], y_max=ends[1])
        steps.fit(points, hits / weights, sample_weight=weights)
        shares = steps.y_thresholds_
        return Curve(1.0, 0.0, steps.X_thresholds_, shares) if shares[-1] > shares[0] else None
    if np.ptp(points) == 0:
        return None
    targets = hits * ends[1] + (weights - hits) * ends[0]
    start = np.array([0.0, np.log((n_positives + 1) / (n_negatives + 1))])
    # Of inputs with mean 0 and deviation 1, so that no curvature is singular.
    center = np.average(points, weights=weights)
    spread = np.sqrt(np.average((points - center) ** 2, weights=weights))
    rise, level = _line((points - center) / spread, weights, targets, start).tolist()
    slope, intercept = rise / spread, level - rise * center / spread
    return Curve(slope, intercept, np.empty(0), np.empty(0)) if slope > 0 else None


def _grouped(
    points: Doubles, weights: Doubles, hits: Doubles, least: int
) -> tuple[Doubles, Doubles, Doubles]:
    """Mean margins, weights and positives of groups of rows with neighbouring margins."""
    order = np.argsort(points, kind="stable")
    points, weights, hits = points[order], weights[order], hits[order]
    _, firsts, counts = np.unique(points, return_index=True, return_counts=True)
    starts, n_rows = list[int](), least
    for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        if n_rows >= least and (len(points) - first >= least or not starts):
            starts.append(first)
            n_rows = 0
        n_rows += count
    totals = (np.add.reduceat(values, starts) for values in (points * weights, weights, hits))
    sums, of_groups, positives = totals
    return sums / of_groups, of_groups, positives


def _line(points: Doubles, weights: Doubles, targets: Doubles, line: Doubles) -> Doubles:
    """Slope and intercept of the least log loss, by Newton steps with backtracking."""
    inputs = np.stack((points, np.ones_like(points)), axis=1)

    def loss(line: Doubles) -> float:
        odds = inputs @ line
        return float(weights @ np.logaddexp(0.0, odds) - targets @ odds)

    for _ in range(_STEPS):
        shares = LOGIT.predict_exactly(inputs @ line)
        gradient = inputs.T @ (weights * shares - targets)
        curvature = inputs.T @ (inputs * (weights * shares * (1 - shares))[:, None])
        step = np.linalg.solve(curvature + _RIDGE * np.eye(2), gradient)
        size, enough = 1.0, _ENOUGH * float(gradient @ step)
        while size > _SHORTEST and loss(line - size * step) > loss(line) - size * enough:
            size /= 2
        if size <= _SHORTEST or np.abs(gradient).max() <= _FLAT * weights.sum():
            break
        line = line - size * step
    return line
