"""Predict a table with the model of a finished run that is whole in its folder.

A divided model predicts in a run of its own: see ``fedapp.runs.session``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt

from clients.scoring import prediction_scores
from fedapp.arrays import Floats
from fedapp.data.datasets import (
    by_party,
    check_source,
    file_of_party,
    files_in,
    sources_to_predict,
)
from fedapp.data.predictions import (
    PREDICTIONS,
    named_predictions,
    read_columns_of,
    write_predictions,
)
from fedapp.data.schema import Roles, composed
from fedapp.data.scratch import batches, empty_table, joined, mapping
from fedapp.data.table import Table
from fedapp.errors import ConfigError, DataError, as_plain
from fedapp.home import check_output, display_path, home
from fedapp.messages.vertical import INNER
from fedapp.records.document import from_text, kind_of, model_text
from fedapp.run_files import Summary
from fedapp.run_folder import RunFolder, schema_copy
from fedapp.site.rows_to_predict import read_joined
from fedapp.site.settings import table_settings
from fedapp.site.store import read_part
from fedapp.trees.categories import NO_SET, entries_of
from fedapp.trees.divided import PARTS, ActivePart, DividedModel, joint_names, whole_model
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.linear import LinearModel, predict_linear
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.objective import transform
from fedapp.trees.predict import predict_margins
from fedapp.trees.stacked import StackedModel
from fedapp.trees.xgboost import names_for_xgboost

Model = Ensemble | BaggedForest | StackedModel | LinearModel


@dataclass(frozen=True, slots=True)
class Predicted:
    """Facts of a prediction whose rows were written to a file."""

    n_rows: int  # written
    unmatched: Sequence[str]  # ids of rows not written, as some table lacks them
    tables: Mapping[str, Mapping[str, Any]]  # source and size by party; empty for one table
    scores: Mapping[str, float | None]  # empty if the table has no labels
    note: str  # why there are no scores despite labels
    warnings: Sequence[str]  # on the tables


def predict_table(
    run_dir: Path, data: str, id_column: str, output: Path, label: str = ""
) -> Predicted:
    """Predict every row of a table and `write_rows`.

    For parties with different columns ``data`` may name a table of each,
    ``bank=a.csv,insurer=b.csv``. Rows are named by ``id_column``, or numbered from 0, and scored by
    ``label``, by default the run's.
    """
    check_predictions(output, data)
    return write_rows(run_dir, predicted_rows(run_dir, data, id_column, label), id_column, output)


def check_predictions(output: Path, data: str) -> None:
    """Check a file of predictions before any work: it is no table in ``data``, nor part of one."""
    check_output(output, PREDICTIONS, files_in(data))
    folders = {Path(name).resolve() for name in files_in(data)}
    if output.suffix == ".parquet" and output.resolve().parent in folders:
        raise ConfigError(f"output must be outside of the table's folder, got {output}")


@mapping()
def write_rows(run_dir: Path, rows: PredictedRows, id_column: str, output: Path) -> Predicted:
    """Write one line for each row to ``output`` (.csv or .parquet).

    The file has a column ``probability_<class>`` for every class of a multi-class model, or for the
    second of two classes, and ``prediction`` for a regression. Other columns are excluded.
    """
    model, table, predictions = rows.model, rows.table, rows.predictions
    named = named_predictions(model.classes, model.n_outputs, predictions)
    write_predictions(output, id_column or "row", table.ids, named)
    scores, note = dict[str, float](), ""
    if table.labels is not None:
        threshold = RunFolder(run_dir).threshold
        scores, note = prediction_scores(model, predictions, table.labels, table.weights, threshold)
    tables = {
        party: {"source": source, "rows": party_table.n_rows, "columns": len(party_table.columns)}
        for party, (source, party_table) in rows.tables.items()
    }
    return Predicted(table.n_rows, rows.unmatched, tables, scores, note, rows.warnings)


@dataclass(frozen=True, slots=True, eq=False)
class PredictedRows:
    """Rows with the predictions of a whole model."""

    model: Model
    table: Table  # with the model's columns and category codes
    predictions: Floats  # (n_rows, n_outputs): probabilities, or numbers
    unmatched: Sequence[str]  # ids of rows of the first table that others lack
    tables: Mapping[str, tuple[str, Table]]  # source and table by party; empty for one table
    warnings: Sequence[str]  # on the tables

    @property
    def names(self) -> npt.NDArray[np.str_]:
        """Ids of the rows, or their numbers from 0."""
        table = self.table
        return np.arange(table.n_rows).astype(str) if table.ids is None else table.ids


@mapping()
def predicted_rows(
    run_dir: Path, data: str, id_column: str = "", label: str | None = ""
) -> PredictedRows:
    """Predict the rows of a table, or of a table per party; see ``predict_table``.

    With ``label=None`` the rows are read without labels and weights.
    """
    model = load_model(run_dir / "model.json")
    run = RunFolder(run_dir)
    summary = run.summary if run.has_finished else cast(Summary, {})
    read_as = read_as_trained(run_dir, data)
    roles = Roles(id_column=composed(id_column), base_margin=model.margin_column)
    if label is not None:
        scored = {role: read_as[role] for role in ("weight", "event", "qid")}
        roles = replace(roles, label=composed(label) or read_as["label"], **scored)
    sources = _sources(data, summary)
    for source in sources.values() or [data]:
        check_source(source)
    unmatched, tables = list[str](), dict[str, Table]()
    if sources:
        readers = {
            party: read_as_trained(run_dir, source, party)["reader"]
            for party, source in sources.items()
        }
        table, unmatched, tables = read_joined(
            sources,
            model.columns,
            roles,
            summary["active"],
            model.categories,
            readers,
            model.kinds,
            join=str(trained_settings(run_dir).get("join", INNER)),
        )
    else:
        how = {"reader": read_as["reader"], "categories": model.categories, "kinds": model.kinds}
        table = read_columns_of(data, model.columns, roles, **how)
    notes = warnings_on(model, tables.values() or [table], table.values)
    named_tables = {party: (sources[party], party_table) for party, party_table in tables.items()}
    predictions = predict(model, table.values, table.base_margins)
    return PredictedRows(model, table, predictions, unmatched, named_tables, notes)


def check_predicted(unmatched: Sequence[str], notes: Sequence[str]) -> None:
    """Check that every row has a prediction, and warn the caller's caller of each data issue."""
    if unmatched:
        rule = f"rows must be in the tables of all parties, got {len(unmatched)} that are not"
        raise DataError(f"{rule}; fedapp predict writes the others")
    for note in notes:
        warnings.warn(note, stacklevel=4)


def warnings_on(model: Model, tables: Iterable[Table], values: Floats) -> list[str]:
    """Warnings on the tables of a prediction, and on their rows with the model's columns."""
    notes = [str(edit) for edit in getattr(model, "edits", ())]
    notes += [note.text(True) for table in tables for note in table.notes]
    return notes + _notes_on_range(model, values)


def _notes_on_range(model: Model, values: Floats) -> list[str]:
    """Warn about number columns with values far outside of the model's training range.

    A column is warned about if 5 % of its values exceed its thresholds by 10 times their spread
    (with fewer than five thresholds, half of the values by 100 times the largest threshold), or one
    value exceeds them by 100 times that distance.
    """
    texts = []
    for column_id, points in thresholds(model).items():
        low = points[0]
        high = points[-1]
        spread, share = (high - low, 0.05) if len(points) >= 5 else (10 * max(-low, high), 0.5)
        n_far, n_known, most, farthest = 0, 0, 0.0, np.float64(0)
        for rows in batches(len(values), 8):
            column = values[rows, column_id].astype(np.float64)
            away = np.nan_to_num(np.maximum(low - column, column - high))
            n_far += int((away > 10 * spread).sum())
            n_known += int((~np.isnan(column)).sum())
            if (largest := away.max()) > most:
                most, farthest = largest, column[away.argmax()]
        if spread and (n_far > share * n_known or most > 1000 * spread):
            rule = f"column {model.columns[column_id]!r}: {n_far:,} of {n_known:,} values are far"
            rule += f" outside of the range that the model knows ({low:g} to {high:g}), as "
            texts.append(as_plain(f"{rule}{farthest:g}; see that units are the same"))
    return texts


@lru_cache(8)
def thresholds(model: Model) -> dict[int, Floats]:
    """Sorted thresholds by number column; for a linear model, mean -2 to +2 deviations."""
    if isinstance(model, LinearModel):
        points = model.means[:, None] + np.outer(model.scales, np.linspace(-2, 2, 5))
        inputs = dict(zip(model.inputs, points, strict=True))
        return {at: inputs[name] for at, name in enumerate(model.columns) if name in inputs}
    # A threshold at the end of float32's range only separates missing values.
    splits = [
        tree[(tree["left"] >= 0) & (tree["set"] == NO_SET) & (np.abs(tree["threshold"]) < 1e38)]
        for tree in model.trees
    ]
    columns = np.array([at for tree in splits for at in tree["column"].tolist()], np.int64)
    thresholds = np.array([cut for tree in splits for cut in tree["threshold"]], np.float64)
    return {at: np.unique(thresholds[columns == at]) for at in np.unique(columns).tolist()}


def trained_settings(run_dir: Path) -> dict[str, Any]:
    """Settings of a run, with the paths of its schema copies; empty if it has no config.toml."""
    run = RunFolder(run_dir)
    settings = dict(run.settings) if run.has_begun else {}
    if schema := str(settings.get("schema", "")):
        copies = {party: schema_copy(run_dir.absolute(), party) for party in by_party(schema)}
        settings["schema"] = ",".join(
            f"{party}={path}" if party else str(path) for party, path in copies.items()
        )
    return settings


def read_as_trained(run_dir: Path, data: str, party: str = "") -> dict[str, Any]:
    """How a run, or a party of it, read its table, for another table; see ``table_settings``."""
    trained = trained_settings(run_dir)
    schema = file_of_party(str(trained.get("schema", "")), party)
    if schema and not Path(schema).is_file():
        rule = "must be in the folder of a run that has read its tables by a schema"
        way = f"copy the schema there as it was in training: {display_path(Path(schema))}"
        raise ConfigError(f"{Path(schema).name} {rule}, got none: {way}")
    return table_settings({**trained, "data": data, "schema": schema}, is_shared=True)


def _sources(data: str, summary: Summary) -> Mapping[str, str]:
    """Tables by party, if the parties have different columns; else empty."""
    if "active" in summary:
        parties = [party["name"] for party in summary["parties"]]
        return sources_to_predict(data, parties, may_be_one=True)
    if "," in data:
        rule = "must be one table for a model of parties that had the same columns"
        raise ConfigError(f"--data {rule}, got {data!r}")
    return {}


def parts_of(run_dir: Path) -> DividedModel | None:
    """The parties of a divided model; None if the run's folder has the whole model."""
    path = run_dir / "model.json"
    text = model_text(path) if path.is_file() else ""
    return from_text(text, DividedModel) if kind_of(text) == DividedModel.KIND else None


def load_model(path: Path) -> Model:
    """Read a whole model."""
    return model_of_text(model_text(path))


def model_of_text(text: str) -> Model:
    """Like ``load_model``, from the model's text."""
    kinds: Sequence[type[Model]] = get_args(Model)
    return from_text(text, *kinds)


def predict(model: Model, values: Floats, base_margins: Floats | None = None) -> Any:
    """Probabilities, or numbers, of rows with NaN for missing; shape (n_rows, n_outputs)."""
    slices: Iterable[slice] = [slice(None)]
    # The last digits of others depend on batches of their own.
    if isinstance(model, Ensemble | BaggedForest) and len(values):
        slices = batches(len(values), 4 * (values.shape[1] + len(model.trees)))
    parts = (
        _predicted(model, values[rows], None if base_margins is None else base_margins[rows])
        for rows in slices
    )
    return joined(parts, len(values))


def _predicted(model: Model, values: Floats, base_margins: Floats | None) -> Any:
    match model:
        case BaggedForest():
            return model.predictions(model.leaves(np.ascontiguousarray(values)))
        case Ensemble():
            margins = model.calibrated(predict_margins(model, values, base_margins))
        case StackedModel():
            margins = model.predict_margins(values)
        case LinearModel():
            margins = predict_linear(model, values)
    return transform(model.objective, margins)


def joined_model(run_dir: Path) -> Ensemble | BaggedForest | None:
    """The whole of a run's divided model; None if it is not divided, or a part is elsewhere.

    All parts are on one machine only after a simulation.
    """
    if (divided := parts_of(run_dir)) is None:
        return None
    active = _part(divided.model_id, divided.active)
    if not isinstance(active, ActivePart):
        return None
    parts = {name: _part(divided.model_id, name) for name in active.n_columns}
    if None in parts.values():
        return None
    numbers = {name: number for number, name in enumerate(parts)}
    owners = [
        np.array([numbers[name] for name in active.owners(tree)], np.int64)
        for tree in range(len(active.records))
    ]
    return whole_model(
        cast(Ensemble, active.model),  # or a forest
        active.records,
        owners,
        [(part.lookup, part.categories) for part in parts.values()],
        [len(part.columns) for part in parts.values()],
        joint_names({name: part.columns for name, part in parts.items()}),
    )


def gains_by_party(run_dir: Path) -> dict[str, float]:
    """Share of the total gain that the splits of each party have; {} if nobody here knows it."""
    divided = parts_of(run_dir)
    active = divided and _part(divided.model_id, divided.active)
    if not isinstance(active, ActivePart) or not isinstance(active.model, Ensemble):
        return {}
    gains = dict.fromkeys(active.n_columns, 0.0)
    for number, tree in enumerate(active.model.trees):
        names = np.array(active.owners(number))
        for name in gains:
            splits = (names == name) & (tree["left"] != LEAF)
            gains[name] += float(tree["gain"][splits].sum(dtype=np.float64))
    total = sum(gains.values())
    return {name: gain / total for name, gain in gains.items()} if total else {}


def _part(model_id: str, name: str) -> Any:
    """A party's part of a model; None if it is not here."""
    try:
        return read_part(home() / "sites" / name / model_id, *PARTS)
    except DataError:
        return None


# Rows for XGBoost, and what it explains of them


def encoded(table: Table) -> Any:
    """Rows of a model as a frame; categories are dictionary-encoded."""
    import pyarrow

    columns = []
    entries = entries_of(table.categories, len(table.columns))
    for values, names in zip(table.values.T, entries, strict=True):
        if names is not None:
            codes = pyarrow.array(values, from_pandas=True).cast(pyarrow.int32())
            values = pyarrow.DictionaryArray.from_arrays(codes, pyarrow.array(names))
        columns.append(values)
    frame = pyarrow.table(columns, names_for_xgboost(table.columns))
    try:
        return frame.to_pandas()
    except ImportError:
        return frame


def contributions(booster: Any, table: Table) -> npt.NDArray[Any]:
    """SHAP values of rows; shape (n_rows, n_columns + 1) or with classes between."""
    import xgboost

    options = {"base_margin": table.base_margins, "enable_categorical": True}
    matrix = xgboost.DMatrix(encoded(table), **options)
    return np.asarray(booster.predict(matrix, pred_contribs=True))


def write_explanation(
    booster: Any, rows: PredictedRows, id_column: str, ids: Sequence[str], file: Path
) -> int:
    """Write SHAP values of rows, all without ``ids``; returns their number.

    ``booster`` is the model of ``rows`` for XGBoost. ConfigError if an id is of no row.
    """
    table, names = rows.table, rows.names
    if absent := set(ids) - set(names.tolist()):
        rule = "must name rows of the table"
        raise ConfigError(f"--explain {rule}, got {len(absent):,} others: {min(absent)!r}")
    chosen = np.flatnonzero(np.isin(names, list(ids))) if ids else np.arange(table.n_rows)
    columns = [*table.columns, "bias"]
    if rows.model.n_outputs > 1:
        columns = [f"{label} {column}" for label in rows.model.classes for column in columns]
    shap = empty_table(len(chosen), len(columns))
    for some in batches(len(chosen), 4 * len(columns)):
        shap[some] = contributions(booster, table.take(chosen[some])).reshape(-1, len(columns))
    write_predictions(
        file, id_column or "row", names[chosen], dict(zip(columns, shap.T, strict=True))
    )
    return len(shap)
