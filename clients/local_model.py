"""Warn a site whose test rows XGBoost predicts better from its training rows only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import numpy as np

from clients.dictionary import kept_categories
from fedapp.messages.fields import Array
from fedapp.site.answer import Site
from fedapp.trees.objective import (
    CUSTOM,
    PLAIN,
    LossParameters,
    Objective,
    margins_of,
    one_hot,
    transform,
)
from fedapp.trees.predict import add_trees
from fedapp.trees.sets import category_counts
from fedapp.trees.xgboost import grow_trees

log = logging.getLogger("fedapp.site")
ROUNDS, MOST_ROWS = 50, 2**14  # takes about a second
PARAMETERS = {"max_bin": 256, "max_depth": 6, "eta": 0.3, "nthread": 1}


def warn_if_worse(
    site: Site,
    objective: str,
    margins: Array,
    train: Sequence[Array],
    test: Sequence[Array],
    loss: LossParameters = PLAIN,
) -> None:
    """Warn in the site's log if the federated model is worse on its test rows.

    Worse: the mean squared error is larger by more than two standard errors of the difference.
    ``margins`` is float32, shape (n_rows, n_outputs); ``train`` and ``test`` are values, labels and
    weights, and a large training set is thinned to every k-th row.
    """
    values, labels, weights = (rows[:: 1 + len(rows) // MOST_ROWS] for rows in train)
    rows, width = (len(labels), len(margins)), margins.shape[1]
    if objective == CUSTOM or not (weights.any() and test[2].any()):
        return
    name = cast(Objective, objective)
    widths = category_counts(kept_categories(site.store), values.shape[1])

    def truth(of: Array) -> Array:
        return of[:, None] if width == 1 else one_hot(of, np.empty((0, width), np.float32))

    mean = margins_of(
        name, np.average(truth(labels).astype(np.float64), axis=0, weights=weights)[None]
    )
    starts = [np.tile(mean, (n_rows, 1)) for n_rows in rows]
    settings = PARAMETERS, (values, labels, weights), starts[0], ROUNDS, widths, loss
    grown = grow_trees(name, width, *settings)
    local = add_trees(starts[1], grown.trees, test[0], grown.sets)
    federated, local_only = (
        ((transform(name, of_model).astype(np.float64) - truth(test[1])) ** 2).sum(axis=1) * test[2]
        for of_model in (margins, local)
    )
    if (federated - local_only).sum() > 2 * np.linalg.norm(federated - local_only):
        log.warning(
            "the federated model's mean squared error on %d test rows of this site is %.4g, that "
            "of XGBoost trained on this site's rows only %.4g: other parties' rows may be of "
            "another kind, or a party may have sent sums that are not of its rows",
            *(len(margins), federated.sum() / test[2].sum(), local_only.sum() / test[2].sum()),
        )
