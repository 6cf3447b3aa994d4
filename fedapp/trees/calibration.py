"""Calibration of two classes: curves from margins to the log odds of the shares of positives.

Sources: Platt 1999, "Probabilistic outputs for support vector machines"; Zadrozny and Elkan 2002,
"Transforming classifier scores into accurate multiclass probability estimates". Departure: the ends
of an isotonic curve are Platt's targets, as no probability of 0 or 1 follows from finitely many
rows, and one such row would have an infinite loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles
from fedapp.errors import ConfigError
from fedapp.trees.losses import LOGIT

Calibration = Literal["none", "platt", "isotonic"]
FEWEST_ISOTONIC = 1000  # validation rows, below which an isotonic curve follows chance


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
    from sklearn.linear_model import LogisticRegression

    targets = hits * ends[1] + (weights - hits) * ends[0]
    # Of inputs with mean 0 and deviation 1, so that no curvature is singular.
    center = np.average(points, weights=weights)
    spread = np.sqrt(np.average((points - center) ** 2, weights=weights))
    inputs = np.tile((points - center) / spread, 2)[:, None]
    of_classes = np.concatenate((weights - targets, targets))
    line = LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-8)
    line.fit(inputs, np.repeat([0, 1], len(points)), sample_weight=of_classes)
    rise, level = float(line.coef_[0, 0]), float(line.intercept_[0])
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
