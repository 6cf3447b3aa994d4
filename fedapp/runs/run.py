"""What is finished, in Python: runs and their models, comparisons and searches."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedapp.arguments import settings_of
from fedapp.data.datasets import Data, Source, write_tables
from fedapp.data.predictions import by_class
from fedapp.errors import ConfigError, as_plain, check_package, did_you_mean_path
from fedapp.home import RUNS, check_output_folder, display_path, home
from fedapp.records.document import from_text, json_of, model_text, to_text
from fedapp.report import write_report
from fedapp.report.progress import following
from fedapp.run_files import Summary, json_object
from fedapp.run_folder import RunFolder
from fedapp.runs.predict import (
    Model,
    PredictedRows,
    check_predicted,
    contributions,
    encoded,
    load_model,
    parts_of,
    predicted_rows,
    trained_settings,
)
from fedapp.sections import flatten
from fedapp.site.store import read_part
from fedapp.trees.curves import boosted, curve_records
from fedapp.trees.divided import ActivePart, DividedModel
from fedapp.trees.edited import Curves, model_of_curves
from fedapp.trees.forest.bagged import BaggedForest, to_sklearn
from fedapp.trees.model import Edit, Ensemble, class_values
from fedapp.trees.predict import predict_margins
from fedapp.trees.xgboost import to_xgboost_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[Any]
Given = Mapping[str, Any]  # settings as Python names them


class Finished:
    """A finished run, comparison or search; raise ConfigError if it has not finished."""

    _kind: ClassVar[str]
    _files: ClassVar[tuple[str, ...]]  # that exist once it has finished; the summary is the first

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path).resolve()
        missing = [name for name in self._files if not (self.path / name).is_file()]
        if missing:
            rule = f"path must be the folder of a {self._kind} that has finished"
            hint = did_you_mean_path(Path(path), RUNS)
            raise ConfigError(f"{rule}, got {display_path(self.path)} without {missing[0]}{hint}")

    @property
    def summary(self) -> Mapping[str, Any]:
        """Content of ``summary.json``, ``comparison.json`` or ``tune.json``."""
        return json_object(self.path / self._files[0])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({display_path(self.path)!r})"


def _plot(name: str, shows: str, run: str = 'fedapp.load("runs/one")') -> Callable[[Run], Figure]:
    """A method that draws a figure of the report; ``run`` has one, for the example."""

    def plot(self: Run) -> Figure:
        from fedapp.report.page import drawings
        from fedapp.run_folder import read_run

        images = {drawing.name: drawing for drawing in reversed(drawings(read_run(self.path)))}
        if name not in images:
            rule = f"plot_{name} must be of a run whose report has this figure"
            raise ConfigError(f"{rule}, got one with {', '.join(sorted(images)) or 'none'}")
        return images[name]

    plot.__name__ = f"plot_{name}"
    plot.__doc__ = f"""Draw {shows}, as in the report; returns a matplotlib figure.

        Examples
        --------
        >>> import fedapp
        >>> run = {run}
        >>> figure = run.plot_{name}()
        """
    return plot


class Run(Finished):
    """A finished run: its scores and its model.

    Parameters
    ----------
    path : the run's folder.

    Examples
    --------
    >>> import fedapp
    >>> run = fedapp.run("pax", num_boost_round=2, max_depth=2)
    >>> run
    Run('...-pax')
    >>> sorted(run.summary["metrics"])
    ['by_party', 'test', 'train', 'valid']
    >>> run.predict_proba("breast-cancer").shape
    (569, 2)
    >>> run.to_xgboost().num_boosted_rounds()
    2
    """

    _kind = "run"
    _files = ("summary.json", "model.json")

    @property
    def summary(self) -> Summary:
        """Content of ``summary.json``; its fields: reference, JSON documents.

        Examples
        --------
        >>> import fedapp
        >>> fedapp.load("runs/one").summary["strategy"]
        'pax'
        """
        return RunFolder(self.path).summary

    @property
    def rounds(self) -> Any:
        """A record for each round, with scores such as ``train_logloss`` and ``valid_auc``: a
        pandas DataFrame if pandas is installed, else a list of dicts.

        Examples
        --------
        >>> import fedapp
        >>> run = fedapp.load("runs/one")
        >>> len(run.rounds), "valid_auc" in run.rounds
        (2, True)
        """
        run = RunFolder(self.path)
        flat = (flatten(line) for line in (run.rounds if run.rounds_file.is_file() else []))
        return as_frame([{key.replace(".", "_", 1): row[key] for key in row} for row in flat])

    @cached_property
    def _parts(self) -> DividedModel | None:
        return parts_of(self.path)

    @cached_property
    def model(self) -> Model | DividedModel:
        """The model; for a divided model, the names of the parties that have its parts.

        Examples
        --------
        >>> import fedapp
        >>> run = fedapp.load("runs/one")
        >>> len(run.model.trees), run.model.columns[:2]
        (2, ('mean radius', 'mean texture'))
        """
        return self._parts or load_model(self.path / "model.json")

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of their ids; empty for a regression.

        Raises
        ------
        DataError : the model is divided, and the active party's part is not on this machine.

        Examples
        --------
        >>> import fedapp
        >>> run = fedapp.load("runs/one")
        >>> run.classes
        ('0', '1')
        """
        if isinstance(self.model, DividedModel):
            part = home() / "sites" / self.model.active / self.model.model_id
            return read_part(part, ActivePart).model.classes
        return self.model.classes

    def predict(
        self,
        data: Source | Mapping[str, Source],
        *,
        id: str = "",
        inference: str = "interactive",
        output_margin: bool = False,
        progress: bool | None = None,
        **settings: Any,
    ) -> Array:
        """Predict classes or numbers for the rows of a table.

        Parameters
        ----------
        data : as for `run`; for parties with different columns, a table of each by the party's
            name. Columns that the model does not know are excluded.
        id : column by which the rows of several tables are matched; by default that of the run.
        inference : how parties predict with a divided model: "interactive", "one-round"
            or "eini" (encrypted), by the local engine.
        output_margin : predict XGBoost's margins, by a whole boosted model; without a calibration.
        progress : whether to show the parties' progress, as for `run`.
        **settings : of such a prediction, as for `run`.

        Returns
        -------
        shape (n_rows,), in the order of the table, or of the active party's table; of margins of
        several classes (n_rows, n_classes). Classes whose
        names are all numbers are numbers; of two classes the second is predicted if its
        probability is above 0.5.

        Raises
        ------
        DataError : a table is invalid, or lacks columns of the model or rows of another table.
        ConfigError : the tables are not the parties'.

        Examples
        --------
        >>> import fedapp
        >>> run = fedapp.load("runs/one")
        >>> run.predict("breast-cancer")[:3]
        array([0, 0, 0])
        """
        if output_margin:
            if not isinstance(self.model, Ensemble):
                rule = "must be of a boosted model that is whole in the run's folder"
                raise ConfigError(f"output_margin {rule}, got one of {self.summary['strategy']}")
            _check_none(settings)
            rows = self._rows(data, id)
            margins = predict_margins(self.model, rows.table.values, rows.table.base_margins)
            return margins[:, 0] if margins.shape[1] == 1 else margins
        predictions = self._predicted(data, id, inference, progress, settings)
        if not self.classes:
            return np.asarray(predictions[:, 0])
        return np.asarray(class_values(self.classes)[by_class(predictions).argmax(axis=1)])

    def predict_proba(
        self,
        data: Source | Mapping[str, Source],
        *,
        id: str = "",
        inference: str = "interactive",
        progress: bool | None = None,
        **settings: Any,
    ) -> Array:
        """Probability of each class, shape (n_rows, n_classes); see `predict`.

        Examples
        --------
        >>> import fedapp
        >>> run = fedapp.load("runs/one")
        >>> run.predict_proba("breast-cancer").shape
        (569, 2)
        """
        if not self.classes:
            raise ConfigError("predict_proba must be of a model of classes, got a regression")
        return by_class(self._predicted(data, id, inference, progress, settings))

    def explain(
        self,
        data: Source | Mapping[str, Source],
        ids: Sequence[str] = (),
        *,
        id: str = "",
        inference: str = "interactive",
        progress: bool | None = None,
        **settings: Any,
    ) -> Any:
        """Explain the predictions of rows.

        Parameters
        ----------
        data : see `predict`.
        ids : rows to explain, for a divided model.

        Returns
        -------
        For a whole boosted model, SHAP values: a column for each column of the model and at last
        ``bias``, for each class if there are several; a row sums to its margin. A pandas DataFrame
        if pandas is installed, else an array of shape (n_rows, n_columns + 1) or (n_rows,
        n_classes, n_columns + 1). For a divided model, the explanation of each party by its name.

        Raises
        ------
        ConfigError : the model is no boosted one, or ``ids`` are given for a whole model.

        Examples
        --------
        >>> import fedapp
        >>> run = fedapp.load("runs/one")
        >>> run.explain("breast-cancer").shape  # a value a column, and the bias
        (569, 31)
        """
        if self._parts:
            if not ids:
                raise ConfigError("ids must name rows where parties predict together, got none")
            named = ",".join(map(str, ids))
            return self._jointly(data, id, inference, progress, settings, named)[1]
        if len(ids):
            raise ConfigError(f"ids must be omitted for a whole model, got {len(ids)}")
        table = self._rows(data, id).table
        shap = contributions(self.to_xgboost(), table)
        try:
            import pandas
        except ImportError:
            return shap
        names = pandas.Index([*table.columns, "bias"])
        if shap.ndim > 2:
            names = pandas.MultiIndex.from_product([self.classes, names])
        return pandas.DataFrame(shap.reshape(len(shap), -1), columns=names)

    def curves(self, *others: Run) -> Any:
        """What each column, or pair of columns, of an additive model adds to the margin.

        Parameters
        ----------
        others : runs on the same columns, such as those of other seeds.

        Returns
        -------
        A pandas DataFrame if pandas is installed, else a list of dicts: ``column`` ("a & b" of a
        pair), ``class`` if there are several outputs, ``from`` (included) and ``to``, or
        ``category``, which is " (missing)" for missing values; of models with pairs the same of
        the second column (``from_2``); ``margin`` and ``weight``, a share of the training weight.
        The weights are those of leaves, divided evenly among their intervals; empty where unknown.
        With other runs ``low`` and ``high`` too: 5 % and 95 % over all of the runs.

        Raises
        ------
        ConfigError : a model is not additive, or the runs' columns differ.

        Examples
        --------
        >>> import fedapp
        >>> run = fedapp.run("pax", pax={"additive": True}, num_boost_round=2, max_depth=2)
        >>> [*run.curves()][:4]
        ['column', 'from', 'to', 'category']
        """
        return as_frame(list(curve_records([boosted(run.model) for run in (self, *others)])))

    def encode(self, data: Source | Mapping[str, Source], *, id: str = "") -> Any:
        """Rows for stock XGBoost with ``enable_categorical=True``; see `predict` for `data`, `id`.

        The columns are the model's, in its order, with ``_`` for ``[``, ``]`` and ``<``, which
        XGBoost allows in no name; booleans, dates and categories are its numbers. A pandas
        DataFrame if pandas is installed, else a pyarrow Table; without base margins.

        Examples
        --------
        >>> import fedapp, xgboost
        >>> run = fedapp.load("runs/one")
        >>> rows = xgboost.DMatrix(run.encode("breast-cancer"), enable_categorical=True)
        >>> run.to_xgboost().predict(rows).shape
        (569,)
        """
        if self._parts:
            raise ConfigError("encode must be of a whole model, got a divided one")
        return encoded(self._rows(data, id).table)

    def to_xgboost(self) -> Any:
        """The model as an ``xgboost.Booster``, without a calibration; raise ConfigError if it is no
        boosted one.

        Examples
        --------
        >>> import fedapp
        >>> run = fedapp.load("runs/one")
        >>> run.to_xgboost().num_features()
        30
        """
        import xgboost

        if not (path := self.path / "model.xgb.json").is_file():
            method = self.summary["strategy"]
            rule = "must be of a boosted model that is whole in the run's folder"
            raise ConfigError(f"to_xgboost {rule}, got one of {method}")
        json_of(model_text(path))  # XGBoost's parser ends the process where it is nested too deeply
        return xgboost.Booster(model_file=path)

    def to_onnx(self) -> bytes:
        """The model as the content of an ONNX file, without a calibration; needs the package onnx.

        Its input ``rows`` is float32 of shape (n_rows, n_columns), in the order of
        ``model.columns``; NaN is missing. A category is its index among the names in the file's
        property ``categories``, of an unknown name that of " (rare)" or NaN. Its outputs are
        ``label`` and ``probabilities``, or ``prediction`` for a regression.

        Examples
        --------
        >>> import fedapp
        >>> run = fedapp.load("runs/one")
        >>> import onnx
        >>> onnx.load_from_string(run.to_onnx()).graph.input[0].name
        'rows'
        """
        check_package("onnx", "", "onnx")
        from fedapp.trees.onnx import to_onnx

        if not isinstance(self.model, Ensemble | BaggedForest):
            rule = "must be of trees that are whole in the run's folder"
            raise ConfigError(f"to_onnx {rule}, got a model of {self.summary['strategy']}")
        return to_onnx(self.model, f"fedapp {self.summary['strategy']}, {self.path.name}")

    def to_sklearn(self) -> Any:
        """A forest as a fitted ``sklearn.ensemble.RandomForestClassifier``, or ``Regressor``.

        It predicts the same as the run's model, also for missing values; classes that are all
        numbers are numbers. Its ``feature_importances_`` is NaN: see `summary`. A file written by
        ``joblib.dump`` needs the same version of scikit-learn. Columns of categories are refused.

        Examples
        --------
        >>> import fedapp
        >>> forest = {"trees": 5, "master_keeps_model": True}
        >>> given = {"federated_forest": forest, "allow_export": True, "align": "ordered"}
        >>> run = fedapp.run("federated-forest", parties=2, **given)
        >>> run.to_sklearn()
        RandomForestClassifier(n_estimators=5)
        """
        if not isinstance(self.model, BaggedForest):
            rule = "must be of a forest that is whole in the run's folder"
            way = "" if self._parts is None else " whose parts are at the parties"
            raise ConfigError(f"to_sklearn {rule}, got a model of {self.summary['strategy']}{way}")
        return to_sklearn(self.model)

    def report(self) -> Path:
        """Write the run's HTML report and return its path.

        Examples
        --------
        >>> import fedapp
        >>> run = fedapp.load("runs/one")
        >>> run.report().name
        'report.html'
        """
        return write_report(self.path)

    def plot_curves(self, *others: Run) -> dict[str, Figure]:
        """Draw the curves of an additive model: a figure a column or pair, strongest first.

        Parameters
        ----------
        others : as for `curves`; columns then have a band from 5 % to 95 % over all of the runs.

        Examples
        --------
        >>> import fedapp
        >>> run = fedapp.run("pax", pax={"additive": True}, num_boost_round=2, max_depth=2)
        >>> figure = run.plot_curves()["mean radius"]
        """
        from fedapp.report.curves import figures_of, strongest

        models = [boosted(run.model) for run in (self, *others)]
        return {drawing.name: drawing for drawing in figures_of(models[0], strongest(models))}

    plot_importance = _plot(
        "importance", "the columns' shares of the gain, of a forest's total gain"
    )
    plot_contributions = _plot("contributions", "the columns' mean absolute SHAP values")
    plot_learning_curve = _plot("learning_curve", "the score of early stopping by round")
    plot_roc = _plot("roc", "ROC curves on test rows, also of the baselines")
    plot_precision_recall = _plot("precision_recall", "precision by recall on test rows")
    plot_gains = _plot("gains", "positives found by the share of rows called positive")
    plot_lift = _plot("lift", "how many times as frequent positives are among these rows")
    plot_calibration = _plot("calibration", "the share of positives by predicted probability")
    plot_probabilities = _plot("probabilities", "histograms of predictions, by class")
    plot_residuals = _plot(
        "residuals",
        "a histogram of label minus prediction on test rows",
        'fedapp.run("pax", data="diabetes", num_boost_round=2)',
    )

    def _predicted(
        self, data: Data, id_column: str, inference: str, progress: bool | None, settings: Given
    ) -> Array:
        """Raw predictions, shape (n_rows, n_outputs)."""
        if self._parts:
            return self._jointly(data, id_column, inference, progress, settings)[0]
        _check_none(settings)
        return np.asarray(self._rows(data, id_column).predictions)

    def _rows(self, data: Data, id_column: str) -> PredictedRows:
        """Rows of one or several tables, with the predictions of a whole model."""
        with self._placed(data, id_column) as (text, ids):
            rows = predicted_rows(self.path, text, ids, label=None)
        check_predicted(rows.unmatched, rows.warnings)
        return rows

    @contextmanager
    def _placed(self, data: Data, id_column: str) -> Iterator[tuple[str, str]]:
        """The setting ``data``, with frames in temporary files, and the column of ids."""
        with TemporaryDirectory() as folder:
            text = write_tables(data, Path(folder))
            several = isinstance(data, Mapping) or "," in text
            default = str(trained_settings(self.path).get("id", "")) if several else ""
            yield text, id_column or default

    def _jointly(
        self,
        data: Data,
        id_column: str,
        inference: str,
        progress: bool | None,
        settings: Given,
        explain: str = "",
    ) -> tuple[Array, Mapping[str, Any]]:
        """Predictions of a divided model, and the parties' explanations."""
        from pyarrow import parquet

        from fedapp.runs.session import predict_jointly, settings_to_predict

        parts = self._parts
        assert parts is not None
        with self._placed(data, id_column) as (text, ids), TemporaryDirectory() as folder:
            named = settings_of(inference, settings)
            fixed = {"data": text, "id": ids, "strategy": inference}
            fixed |= {"explain": explain} if explain else {}
            output = str(Path(folder) / "predictions.parquet")
            run = settings_to_predict(self.path, parts, named, fixed, output, "local")
            with following(progress) as watcher:
                predicted, explained = predict_jointly(run, parts, output, "local", watcher)
            frame = parquet.read_table(output)
        assert predicted is not None
        check_predicted(predicted.unmatched, predicted.warnings)
        columns = [column.to_numpy() for column in frame.columns[1:]]
        return np.column_stack(columns), explained


def edited_model(model: Ensemble, text: str, edit: Edit) -> Ensemble:
    """A model with the numbers of a document of its curves; ConfigError if more was edited."""
    ours, document = Curves.of(model, edit.model_id), from_text(text, Curves)
    if to_text(ours.without_numbers()) != to_text(document.without_numbers()):
        rule = "must be of this run, with only intercepts and values edited"
        raise ConfigError(f"curves {rule}, got others: fedapp export RUN --to curves writes them")
    return model_of_curves(model, document, edit)


def write_edited(run: Run, curves: Path, by: str, folder: Path) -> None:
    """Write a copy of a run whose model has the curves of a file, and says who has edited them.

    ConfigError if the file is of another model, `by` no name, or the folder not empty.
    """
    if not by.strip() or as_plain(by, 100) != by:
        rule = "must name who answers for the curves, in 1 to 100 printable characters"
        raise ConfigError(f"--edited-by {rule}, got {as_plain(by, 100)!r}")
    check_output_folder(folder, lambda _: False, "output")
    if folder.resolve().is_relative_to(run.path.resolve()):
        raise ConfigError(f"output must be outside of the run's folder, got {folder}")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    edit = Edit(by.strip(), now, str(run.summary["model_id"]))
    edited = edited_model(boosted(run.model), model_text(curves), edit)
    of_model = shutil.ignore_patterns("model.*", "curves.json", "documents", ".lock")
    shutil.copytree(run.path, folder, ignore=of_model, dirs_exist_ok=True)
    copy = RunFolder(folder)
    copy.write("model.json", to_text(edited))
    copy.write("model.xgb.json", to_xgboost_json(edited))
    notes, n_trees = [*run.summary.get("warnings", []), str(edit)], len(edited.trees)
    copy.write_json("summary.json", {**run.summary, "trees": n_trees, "warnings": notes})
    write_report(folder)


def _check_none(settings: Given) -> None:
    """Check that no settings of a joint prediction are given for a whole model."""
    if settings:
        name, value = next(iter(settings.items()))
        raise ConfigError(f"{name} must be omitted for a whole model, got {value!r}")


def as_frame(records: list[dict[str, Any]]) -> Any:
    """A pandas DataFrame if pandas is installed, else the records."""
    try:
        import pandas
    except ImportError:
        return records
    return pandas.DataFrame.from_records(records)
