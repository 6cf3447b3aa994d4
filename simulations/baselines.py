"""What a federated model is held against: XGBoost on pooled rows, and each party alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedapp import metrics
from fedapp.config import Settings
from fedapp.data.datasets import read_source
from fedapp.site.config import party_name
from fedapp.site.labels import class_ids, class_names
from fedapp.site.rows import Holdout, Rows, share_rows
from fedapp.site.table import Table
from fedapp.trees.objective import base_score, n_outputs


def run_baselines(settings: Settings) -> dict[str, Any]:
    """Scores on the test rows of the run, by the run's own settings.

    Returns
    -------
    ``{"pooled": scores, "alone": {party: scores}}``; all rows and cuts are those of one machine.

    Raises
    ------
    DataError, ConfigError : there is no such table.
    """
    table = read_source(
        settings.data,
        label=settings.label,
        id_column=settings.id,
        weight=settings.weight,
        group=settings.group,
        drop=settings.dropped,
    )
    assert table.labels is not None
    labels = class_ids(table.labels, class_names(table.labels, settings.objective))
    holdout = Holdout(settings.test_fraction, settings.valid_fraction, settings.seed)
    shares = share_rows(table, holdout, settings.partition, settings.parties)
    test = np.concatenate(shares["test"])
    return {
        "pooled": _scores(
            settings, table, labels, _all(shares["train"]), _all(shares["valid"]), test
        ),
        "alone": {
            party_name(part, settings.parties): _scores(
                settings, table, labels, shares["train"][part], shares["valid"][part], test
            )
            for part in range(settings.parties)
        },
    }


def _all(shares: tuple[Rows, ...]) -> Rows:
    return np.sort(np.concatenate(shares))


def _scores(
    settings: Settings, table: Table, labels: Any, train: Rows, valid: Rows, test: Rows
) -> dict[str, float]:
    """Train XGBoost on some rows and score it on the test rows."""
    import xgboost

    weights = np.ones(table.n_rows, np.float32) if table.weights is None else table.weights
    parameters = xgboost_parameters(settings, labels, weights[train], labels[train])

    def matrix(rows: Rows) -> Any:
        return xgboost.DMatrix(table.values[rows], labels[rows], weight=weights[rows])

    binned = xgboost.QuantileDMatrix(
        table.values[train], labels[train], weight=weights[train], max_bin=settings.max_bin
    )
    stop = settings.early_stopping_rounds
    booster = xgboost.train(
        parameters,
        binned,
        settings.num_boost_round,
        evals=[(matrix(valid), "valid")] if stop and len(valid) else [],
        early_stopping_rounds=stop if stop and len(valid) else None,
        verbose_eval=False,
    )
    n_trees = booster.best_iteration + 1 if stop and len(valid) else 0
    margins = booster.predict(matrix(test), output_margin=True, iteration_range=(0, n_trees))
    return metrics.pooled(
        settings.objective,
        margins.reshape(len(test), -1).astype(np.float32),
        labels[test],
        weights[test],
    )


def xgboost_parameters(settings: Settings, labels: Any, weights: Any, drawn: Any) -> dict[str, Any]:
    """The run's settings as ``xgboost.train`` takes them.

    Parameters
    ----------
    labels : of all rows, for the number of classes.
    weights, drawn : weights and labels of the training rows, for the base score.
    """
    n_classes = int(labels.max()) + 1
    total = float(weights.sum(dtype=np.float64))
    label_sum = float(drawn.astype(np.float64) @ weights)
    parameters = {
        "objective": settings.objective,
        "tree_method": "hist",
        "base_score": float(base_score(settings.objective, label_sum, total)),
        "eval_metric": metrics.default_metric(settings.objective),
        "seed": settings.seed,
        "max_depth": settings.max_depth,
        "eta": settings.eta,
        "lambda": settings.reg_lambda,
        "alpha": settings.reg_alpha,
        "gamma": settings.gamma,
        "min_child_weight": settings.min_child_weight,
        "subsample": settings.subsample,
        "colsample_bytree": settings.colsample_bytree,
        "max_bin": settings.max_bin,
    }
    if n_outputs(settings.objective, n_classes) > 1:
        parameters["num_class"] = n_classes
    return parameters
