"""Scores of a model, from pooled rows and from sums that parties can add up.

``names`` lists the scores of each objective, ``sums`` has what a party adds up, ``scores`` what
follows from the total. The room knows nothing of parties or Flower, and of trees only the
objectives. Read this table first, then ``sums``.

``pooled`` needs every row in one place. ``statistics`` turns one party's rows into a few sums,
``+`` adds the sums of parties, ``scores`` computes the scores of the total. Both give the same
numbers, except for ``auc``, ``pr_auc``, ``auc_ovr`` and ``ks``, which come from a histogram of the
margin, and ``c-index``, from a table of times and margins; ``binning_errors`` bounds their errors.
All of them use sample weights. A row is called positive where its probability is above 0.5.
``intervals`` says how scores vary over samples of as many rows, and ``paired`` how the difference
of two models on the same rows does; ``mean_interval`` is of a mean over runs. ``names.SHOWN`` lists
the scores by objective.

    objective          sums                          histogram
    binary:logistic    w, w loss, w of hits,         (2, n_bins)  class x bin of the margin
                       misses, false alarms
    multi:softprob     w, w loss, w by class and     (2 k, n_bins / k)  per class: others, rows
                       predicted class (k x k)                    of it x bin of its log odds
    survival:*         w, w of events, w^2 of those  (2, k (k - 1)), k = n_bins / 16  event x
                       between points of time        range of the time and column of the margin
    rank:*             w, number of queries,         (1, 2)  0
                       their NDCG
    all others         w, w e^2, w |e|, w y, w y^2   (1, n_bins)  bin of the residual e, the label
                                                     y less the prediction

Additional metrics (``eval-metric``) append a sum each, so they are exact, except for ``merror``,
which follows from the accuracy, and ``aucpr``, which comes from the histogram: it treats the rows
of a bin as ties.
"""

# What other rooms use.
# ruff: noqa: F401
# mypy: implicit-reexport

from fedapp.metrics.intervals import intervals, mean_interval, paired, row_intervals
from fedapp.metrics.names import (
    AT_THRESHOLD,
    OBJECTIVES,
    check_metrics,
    for_xgboost,
    is_custom,
    is_metric,
    larger_is_better,
    loss_metric,
    scored_names,
    stopping_metric,
    watched_metric,
)
from fedapp.metrics.scores import (
    best_bin,
    binning_errors,
    class_weights,
    curves,
    few_of_class,
    pooled,
    pooled_subsets,
    rarer_share,
    scores,
    scores_from_bin,
    scores_from_margin,
    threshold_rows,
)
from fedapp.metrics.sums import Statistics, check_statistics, statistics
