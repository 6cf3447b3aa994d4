"""A run's model on all rows in one process: its scores beside other models', its contributions.

A model that is divided among parties is joined first, if all of its parts are on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedapp import metrics
from fedapp.arrays import Floats
from fedapp.data.partition import Split
from fedapp.messages.methods import all_methods
from fedapp.records.document import load
from fedapp.runs.baselines import Pooled, baseline_rows, decoded, join_tables, pooled_of
from fedapp.runs.predict import joined_model, load_model, parts_of, predict
from fedapp.runs.tables import stacked_tables
from fedapp.settings import Settings
from fedapp.site.table import Rows
from fedapp.trees.categories import category_counts, chosen, recoded
from fedapp.trees.limits import ONE_TREE
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import margins_of
from fedapp.trees.predict import predict_margins
from fedapp.trees.xgboost import typed_columns

MOST_ROWS = 1000  # test rows of the contributions, drawn by the run's seed
Span = tuple[float, float, float]  # difference, and the ends of its 95 % interval


def differences(settings: Settings, run_dir: Path, margins: Mapping[str, Any]) -> dict[str, Any]:
    """Scores of the run's model less those of the baselines, see ``metrics.paired``.

    ``margins`` are those of ``run_baselines`` ("test_margins"). Returns
    ``{"pooled": {metric: span}, "alone": {party: {...}}}``; {} for a model with a part elsewhere,
    without test rows, or with weights.
    """
    if (scored := scored_rows(settings, run_dir, baseline_rows(settings)[0])) is None:
        return {}

    def less(text: str) -> dict[str, Span]:
        return scored.less(decoded(text, len(scored.labels)))

    alone = {name: less(text) for name, text in margins["alone"].items()}
    return {"pooled": less(margins["pooled"]), "alone": alone}


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """Margins of a run's test rows, by its own model."""

    settings: Settings
    margins: Floats  # (n_rows, n_outputs)
    labels: Floats  # (n_rows,)

    def less(self, others: Floats) -> dict[str, Span]:
        """Scores of the model less those of the margins of another one, on the same rows."""
        settings, rows = self.settings, (self.labels, np.ones_like(self.labels))
        return metrics.paired(
            settings.objective, self.margins, others, *rows, settings.eval_metrics
        )


def scored_rows(settings: Settings, run_dir: Path, rows: Pooled) -> ScoredRows | None:
    """The test rows of a run, in the order of ``rows``; None for a model with a part elsewhere,
    without test rows, or with weights."""
    test = rows.split.test
    if not len(test) or (rows.weights[test] != 1).any():
        return None
    margins = model_margins(run_dir, rows)
    return None if margins is None else ScoredRows(settings, margins, rows.labels[test])


def model_margins(run_dir: Path, rows: Pooled) -> Floats | None:
    """Margins of the test rows by a run's whole or joined model, (n_rows, n_outputs); None for one
    with a part elsewhere."""
    whole = joined_model(run_dir)
    if whole is None and parts_of(run_dir):
        return None
    model = whole or load_model(run_dir / "model.json")
    values, of = values_of(model, rows, rows.split.test), rows.base_margins
    starts = None if of is None else of[rows.split.test]
    if isinstance(model, Ensemble):
        return model.calibrated(predict_margins(model, values, starts))
    return margins_of(model.objective, predict(model, values, starts))


# They need all tables in one place: a coordinator has no rows, and asks no party for any.
def table_facts(settings: Settings, run_dir: Path) -> dict[str, Any]:
    """``missing``: share of missing values by column with some, largest first; ``contributions``.

    These are mean absolute contributions of each column to the margin of a test row, of several
    classes added up: ``{"rows": number of rows, "mean": {column: mean}}``, largest first; empty
    without an XGBoost model or test rows, and of one tree for all classes, for which XGBoost has
    none.
    """
    if all_methods()[settings.strategy].family == "vertical":
        rows = join_tables(settings)[0]
    else:
        table, parts = stacked_tables(settings)
        test = np.concatenate([part["test"] for part in parts.values()])
        rows = pooled_of(settings, table, Split(test[:0], test[:0], test))
    shares = np.array([np.isnan(column).mean() for column in rows.values.T])
    order = [c for c in np.argsort(-shares, kind="stable") if shares[c]]
    missing = {rows.columns[c]: float(shares[c]) for c in order}
    return {"missing": missing, "contributions": _contributions(settings, run_dir, rows)}


def _contributions(settings: Settings, run_dir: Path, rows: Pooled) -> dict[str, Any]:
    import xgboost

    path = run_dir / "model.xgb.json"
    if not path.is_file():
        return {}
    model = load(run_dir / "model.json", Ensemble)
    columns = model.columns
    test = rows.split.test
    if len(test) > MOST_ROWS:
        test = np.random.default_rng(settings.seed).choice(test, MOST_ROWS, replace=False)
    values = values_of(model, rows, test)
    if not len(values) or model.multi_strategy == ONE_TREE:
        return {}
    booster = xgboost.Booster(model_file=path)
    types = typed_columns(category_counts(model.categories, len(columns)))
    matrix = xgboost.DMatrix(values, feature_names=booster.feature_names, **types)
    # (n_rows, n_classes, n_columns + 1); the last column is the base margin.
    shap = booster.predict(matrix, pred_contribs=True, strict_shape=True)
    means = np.abs(shap[:, :, :-1].astype(np.float64)).sum(axis=1).mean(axis=0)
    order = np.argsort(-means, kind="stable")
    return {"rows": len(values), "mean": {columns[c]: float(means[c]) for c in order}}


def values_of(model: Any, rows: Pooled, of: Rows) -> Floats:
    """Some rows with a model's columns and codes."""
    column_ids = {name: column for column, name in enumerate(rows.columns)}
    taken = [column_ids[name] for name in model.columns]
    dictionaries = chosen(rows.categories, taken)
    return recoded(rows.values[of][:, taken], dictionaries, model.categories, model.columns)[0]
