"""Contributions of columns to the predictions of a whole model: SHAP values on test rows.

They need all tables in one place: a coordinator has no rows, and asks no party for any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.messages.fields import all_methods
from fedapp.settings import Settings
from fedapp.trees.model import Ensemble, load_model
from fedapp.trees.sets import category_counts, chosen, recoded
from fedapp.trees.xgboost import typed_columns
from simulations.baselines import join_tables
from simulations.rows import stacked_tables

MOST_ROWS = 1000


def contributions(settings: Settings, run_dir: Path) -> dict[str, Any]:
    """Mean absolute contribution of each column to the margin of a test row.

    Contributions to several classes are added up. Returns ``{"rows": number of rows, "mean":
    {column: mean}}``, largest first; empty without an XGBoost model or test rows.
    """
    import xgboost

    path = run_dir / "model.xgb.json"
    if not path.is_file():
        return {}
    model = load_model(run_dir / "model.json")
    columns, values = model.columns, _test_rows(settings, model)
    if not len(values):
        return {}
    booster = xgboost.Booster(model_file=path)
    types = typed_columns(category_counts(model.categories, len(columns)))
    matrix = xgboost.DMatrix(values, feature_names=booster.feature_names, **types)
    # (n_rows, n_classes, n_columns + 1); the last column is the base margin.
    shap = booster.predict(matrix, pred_contribs=True, strict_shape=True)
    means = np.abs(shap[:, :, :-1].astype(np.float64)).sum(axis=1).mean(axis=0)
    order = np.argsort(-means, kind="stable")
    return {"rows": len(values), "mean": {columns[c]: float(means[c]) for c in order}}


def _test_rows(settings: Settings, model: Ensemble) -> npt.NDArray[np.float32]:
    """At most ``MOST_ROWS`` test rows, drawn by the run's seed, with the model's columns."""
    if all_methods()[settings.strategy].family == "vertical":
        joined, _, _ = join_tables(settings)
        values, names, test = joined.values, joined.columns, joined.split.test
        categories = joined.categories
    else:
        table, shares = stacked_tables(settings)
        values, names, categories = table.values, table.columns, table.categories
        test = np.concatenate([rows["test"] for rows in shares.values()])
    if len(test) > MOST_ROWS:
        test = np.random.default_rng(settings.seed).choice(test, MOST_ROWS, replace=False)
    places = {name: place for place, name in enumerate(names)}
    taken = [places[name] for name in model.columns]
    dictionaries = chosen(categories, taken)
    return recoded(values[test][:, taken], dictionaries, model.categories, model.columns)[0]
