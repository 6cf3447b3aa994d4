"""Scores of a model, from pooled rows and from sums that parties can add up.

``pooled`` needs every row in one place. ``statistics`` turns one party's rows into a few sums,
``+`` adds the sums of parties, ``scores`` reads the scores off the total: the same numbers, but for
``auc`` and ``ks``, which come from a histogram of the margin (``auc_error`` bounds what that costs
the auc; ks can only be smaller than the exact one).

    objective          sums                          histogram
    binary:logistic    w, w loss, w of hits,         (2, n_bins)  class x bin of the margin
                       misses, false alarms
    multi:softprob     w, w loss                     (k, k)       class x predicted class
    reg:squarederror   w, w e^2, w |e|, w y, w y^2   (1, n_bins)  bin of the residual e = y - margin
"""

from fedapp.metrics.curves import curves
from fedapp.metrics.names import BETTER, LOSSES, OBJECTIVES, default_metric
from fedapp.metrics.rows import pooled
from fedapp.metrics.scores import auc_error, scores
from fedapp.metrics.sums import Array, Rows, Statistics, statistics

__all__ = [
    "BETTER",
    "LOSSES",
    "OBJECTIVES",
    "Array",
    "Rows",
    "Statistics",
    "auc_error",
    "curves",
    "default_metric",
    "pooled",
    "scores",
    "statistics",
]
