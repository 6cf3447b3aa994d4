"""What moves the predictions of a whole model: its SHAP values on test rows.

Only where all tables lie in one place. A coordinator has no rows, and asks no party for any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.config import Settings
from fedapp.data.categories import chosen, recoded
from fedapp.messages.methods import all_methods
from fedapp.trees.boosted.from_xgboost import typed_columns
from fedapp.trees.model import Ensemble, load_model
from fedapp.trees.sets import category_counts
from simulations.baselines import join_tables
from simulations.rows import stacked_tables

MOST_ROWS = 1000


def contributions(settings: Settings, run_dir: Path) -> dict[str, Any]:
    """Mean size of the contributions of each column to the margin of a test row.

    Those to several classes are added up.

    Parameters
    ----------
    settings : of the run.
    run_dir : its folder.

    Returns
    -------
    ``{"rows": number of rows, "mean": {column: mean}}``, largest first; empty where the folder has
    no model of XGBoost's, or there are no test rows.

    Raises
    ------
    DataError, ConfigError : there is no such table.
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
    found = booster.predict(matrix, pred_contribs=True, strict_shape=True)
    # (row, class, column), and behind the columns the base margin.
    means = np.abs(found[:, :, :-1].astype(np.float64)).sum(axis=1).mean(axis=0)
    order = np.argsort(-means, kind="stable")
    return {"rows": len(values), "mean": {columns[c]: float(means[c]) for c in order}}


def _test_rows(settings: Settings, model: Ensemble) -> npt.NDArray[np.float32]:
    """At most 1,000 test rows, drawn by the run's seed, with the model's columns and codes."""
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
    own = chosen(categories, taken)
    return recoded(values[test][:, taken], own, model.categories, model.columns)[0]
