"""What all scikit-learn estimators share: parameters, tables from arrays, a fit by a run."""

from __future__ import annotations

import dataclasses
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse
from sklearn.base import is_classifier
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.validation import (
    _check_sample_weight,
    _num_samples,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)

from clients.vertical.opening import FEWEST_ROWS
from fedapp.arguments import (
    check_functions,
    check_parameters,
    functions_of,
    naming_python_keywords,
    python_name,
    settings_of,
)
from fedapp.data.datasets import (
    NAME,
    ArrowStream,
    array_names,
    as_arrow,
    drop_frames,
    party_name,
    write_tables,
)
from fedapp.errors import ConfigError, DataError
from fedapp.home import write_atomically
from fedapp.records.document import model_text
from fedapp.report.progress import following
from fedapp.run_files import importance_of
from fedapp.run_folder import RunFolder
from fedapp.runs.clean import folder_of_runs, forget_model
from fedapp.runs.predict import PredictedRows, check_predicted, predicted_rows
from fedapp.runs.run import Run
from fedapp.runs.session import Training
from fedapp.runs.set_by_command import SET_BY_COMMAND
from fedapp.sections import setting_names
from fedapp.settings import (
    SIMULATED_PARTIES,
    BoostingSettings,
    ConstraintSettings,
    GrowthSettings,
    about_settings,
    defaults,
    load_settings,
)
from fedapp.sklearn.rounds import (
    Range,
    evaluate_rounds,
    filled,
    leaves_of,
    only_rounds,
    path_of_model,
)
from fedapp.trees.custom import functions_in_use
from strategies.run import load_strategy

Arrays = npt.NDArray[Any]
RandomState = int | np.random.RandomState | None
LABEL, ID = "label", "row"
KEEPS_MODEL = "federated-forest.master-keeps-model"
# Files of the run's folder that are pickled with the estimator.
FILES = (
    *("summary.json", "model.json", "model.xgb.json"),
    *("config.toml", "rounds.jsonl", "ledger.jsonl"),
)
# Settings of a run that are parameters of methods that read them, beside those of their sections.
TABLES = BoostingSettings, GrowthSettings, ConstraintSettings
SETTINGS = setting_names(*TABLES) - {"preset"} | {"valid-fraction"}
# Names of parameters, as scikit-learn and XGBoost have them.
RENAMED = {"num-boost-round": "n_estimators", "trees": "n_estimators", "eta": "learning_rate"}
# What the parameters are that are no settings, or mean more here.
ABOUT = {
    "parties": "Number of parties that share the rows or columns; by default that of `groups`, or "
    "3, or 2 where they share two columns.",
    "engine": "`local`, in this process, or `simulation`, by Flower's runtime.",
    "random_state": "Seed of all random draws.",
    "run_dir": "New folder for the run; by default one that is deleted with the estimator.",
    "log": "Tool that also logs the run: mlflow.",
    "progress": "Whether `fit` shows progress; None: on a terminal and in a notebook.",
    "settings": 'Other settings of the run, as for fedapp.run: {"privacy": {"epsilon": 1}}.',
    "objective": "Loss by XGBoost's name, or a function (fedapp.run); reg:squarederror by default.",
    "class_weight": "`balanced`, or a weight by class; multiplies the rows' weights.",
    "columns": "Of each party by its name, the first has the labels; None deals them out evenly.",
    "eval_metric": "Further scores, by XGBoost's names, or a function as in fedapp.run.",
    "early_stopping_rounds": "Rounds without a better score; needs eval_set in fit, or "
    "valid_fraction, with which it is on by default.",
}
# Arguments of the examples; a key that is this small is insecure.
FEW, SMALL_KEY = "n_estimators=5, parties=2", "max_bin=16, key_bits=512, insecure_small_key=True"
COLUMNS = 'columns={"bank": range(20), "insurer": range(20, 30)}'
EXAMPLES = {
    "pax": FEW,
    "bagging": FEW,
    "cyclic": "n_estimators=6, parties=2",
    "fedxgbllr": "n_estimators=10, rounds=2, epochs=5, parties=2",
    "fedavg-linear": "rounds=5, parties=2",
    "secureboost": f"parties=2, n_estimators=2, {SMALL_KEY}",
    **dict.fromkeys(("federated-forest", "horizontal-forest"), FEW),
}
DOCSTRING = """{}

    Examples
    --------
    >>> from sklearn.datasets import {data}
    >>> from fedapp import {name}
    >>> X, y = {data}(return_X_y=True)
    >>> model = {name}({example})
    >>> model.fit(X, y).score(X, y) > {score}
    True

    Parameters
    ----------
    None is the method's default.

{parameters}
    """

if TYPE_CHECKING:  # scikit-learn has no types; these are the ones used here

    class BaseEstimator:
        def get_params(self, deep: bool = True) -> dict[str, Any]: ...
        def set_params(self, **params: Any) -> Self: ...
        def set_fit_request(self, **requests: bool | str | None) -> Self: ...
        def set_score_request(self, **requests: bool | str | None) -> Self: ...
        def __sklearn_tags__(self) -> Any: ...
        def __getstate__(self) -> Any: ...

    class RegressorMixin: ...

else:
    from sklearn.base import BaseEstimator, RegressorMixin


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Federated(BaseEstimator):
    """Base class of all estimators: their parameters are its fields and the method's settings."""

    method: ClassVar[str]
    setting_of: ClassVar[Mapping[str, str]]  # of each parameter that is one
    example: ClassVar[str] = ""  # arguments of the estimator in the example of the docstring
    example_of: ClassVar[Mapping[str, Any]]  # its data and the score it exceeds
    always: ClassVar[Mapping[str, Any]] = {"test-fraction": 0.0}  # settings beside the parameters
    class_weight: ClassVar[Any] = None

    parties: int | None = None
    engine: str = "local"
    random_state: RandomState = None
    run_dir: str | PathLike[str] | None = None
    log: str | Sequence[str] | None = None
    progress: bool | None = None
    settings: Mapping[str, Any] | None = None

    if TYPE_CHECKING:

        def __init__(self, **parameters: Any) -> None: ...

    def __init_subclass__(cls, method: str = "", **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if method:
            cls.method = method
            if method == "federated-forest":
                cls.always = {**cls.always, KEEPS_MODEL: True}
            cls.setting_of = {_parameter(method, name): name for name in _settings_of(method)}
            if issubclass(cls, RegressorMixin):
                cls.setting_of.pop("scale_pos_weight", None)
            for name in cls.setting_of:
                setattr(cls, name, 0.0 if name == "valid_fraction" else None)
            cls.__annotations__ = dict.fromkeys(cls.setting_of, Any)
        dataclasses.dataclass(eq=False, repr=False, kw_only=True)(cls)
        if method:
            cls.__init__ = _checked(cls.__init__)  # type: ignore[method-assign]
            about = {name: setting.text for name, setting in about_settings().items()}
            texts = {name: about[setting] for name, setting in cls.setting_of.items()} | ABOUT
            lines = (f"    {field.name} : {texts[field.name]}" for field in dataclasses.fields(cls))
            cls.__doc__ = DOCSTRING.format(
                (cls.__doc__ or "").rstrip(),
                **cls.example_of,
                name=cls.__name__,
                example=cls.example or EXAMPLES[method],
                parameters="\n".join(lines),
            )

    def set_params(self, **params: Any) -> Self:
        """Set parameters; ValueError for an unknown one, with the nearest."""
        with self._as_error():
            check_parameters(params, self.get_params(), self.setting_of, self.method)
        return super().set_params(**params)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = True
        return tags

    def __getstate__(self) -> Any:
        # The folder is deleted with the estimator that was fitted, not with copies of it.
        state = super().__getstate__().items()
        return {name: value for name, value in state if name != "_delete_folder"}

    def _targets(self, y: object) -> tuple[Arrays, dict[str, Any]]:
        """Labels for the run, and the settings that follow from them."""
        raise NotImplementedError

    def _tables(self, table: Any, label: str, groups: object) -> tuple[Any, dict[str, Any]]:
        """Tables of the parties, or one to split, and the settings that follow from them."""
        raise NotImplementedError

    def _read(self, X: object, reset: bool) -> Any:
        """Validate rows by scikit-learn's rules and convert them to a pyarrow.Table."""
        if isinstance(X, ArrowStream):
            validate_data(self, X, reset=reset, skip_check_array=True)
            return as_arrow(X)
        if isinstance(X, Mapping) and not issparse(X):  # a dok_array is one
            way = "pandas.DataFrame(X) is a frame of a mapping of columns"
            raise TypeError(f"X must be a frame or an array, got {type(X).__name__}: {way}")
        rules = {"dtype": [np.float64, np.float32], "ensure_all_finite": "allow-nan"}
        array = validate_data(self, X, reset=reset, accept_sparse="csr", **rules)
        array = filled(array) if issparse(array) else array
        return as_arrow(array).rename_columns(
            list(getattr(self, "feature_names_in_", array_names(array.shape[1])))
        )

    def fit(
        self,
        X: object,
        y: object,
        sample_weight: object = None,
        groups: object = None,
        *,
        eval_set: Sequence[tuple[object, object]] | None = None,
        base_margin: object = None,
        xgb_model: object = None,
    ) -> Self:
        """Train on all rows.

        Parameters
        ----------
        X : frame, array or sparse array, shape (n_rows, n_columns); NaN is missing, and so is what
            is absent from a sparse array. It is made dense.
        y : shape (n_rows,); if parties have different columns, the first party has it.
        sample_weight : shape (n_rows,), >= 0. With `groups`, a weight of 2 equals two rows in
            bagging, cyclic training and, with bins="equal", PAX.
        groups : shape (n_rows,): the party of each row, if parties have different rows; by default
            rows are dealt out at random, evenly.
        eval_set : pairs of X and y, scored after every round of boosted trees. All rounds are
            trained; with early_stopping_rounds those after the best one of the last pair are
            dropped, by the metric of the run's early stopping.
        base_margin : shape (n_rows,): the margin that each row starts from.
        xgb_model : boosted model to continue: a fitted estimator of fedapp or XGBoost, a Booster,
            or the path of a file; see init-model of a run.
        """
        if y is None:
            rule = "requires y to be passed, but the target y is None"
            raise ValueError(f"{type(self).__name__} {rule}")
        with self._as_error(), following(self.progress) as watcher:
            table = self._read(X, reset=True)
            names = table.column_names
            labels, of_labels = self._targets(y)
            check_consistent_length(labels, range(table.num_rows))
            label = _free(LABEL, names)
            arguments = {**self.always, **self._settings(), **of_labels, "label": label}
            table = table.append_column(label, [labels])
            of_rows = {} if base_margin is None else {"base-margin": column_or_1d(base_margin)}
            if sample_weight is not None or self.class_weight is not None:
                weights = _check_sample_weight(sample_weight, labels)
                if n_bad := int((weights < 0).sum()):
                    rule = "sample_weight must be >= 0 in every row"
                    raise ValueError(f"{rule}, got {n_bad:,} of {len(weights):,} rows below")
                weights = weights * compute_sample_weight(self.class_weight, column_or_1d(y))
                if is_classifier(self) and len(np.unique(labels[weights > 0])) < 2:
                    rule = "needs two classes, but only one class has rows with weight"
                    raise ValueError(f"{type(self).__name__} {rule}")
                of_rows["weight"] = weights
            for role, values in of_rows.items():
                check_consistent_length(labels, values)
                arguments[role] = _free(role, names)
                table = table.append_column(arguments[role], [values])
            tables, of_tables = self._tables(table, label, groups)
            arguments |= of_tables
            if not isinstance(tables, Mapping):
                n_parties = int(arguments.get("parties") or SIMULATED_PARTIES)
                self._check_dealt(table.num_rows, len(names), n_parties)
            if eval_set and (arguments.get("valid-fraction") or base_margin is not None):
                raise ConfigError("eval_set must be omitted with valid_fraction or base_margin")
            patience = arguments.pop("early-stopping-rounds", 0) if eval_set else 0
            functions = functions_of(self.get_params())[1]
            check_functions(functions, self.engine)
            with functions_in_use(functions), self._folder() as folder:
                arguments |= {"data": write_tables(tables, folder), "run-dir": str(folder)}
                if xgb_model is not None:
                    arguments["init-model"] = str(self._path_of(xgb_model, folder))
                has_page = self.run_dir is not None
                how: dict[str, Any] = {"watcher": watcher, "with_page": has_page}
                Training(self.method, arguments, self.engine, **how).carry_out()
                self._margin = arguments.get("base-margin", "")
                self._keep(names, RunFolder(folder), eval_set or (), patience)
                if has_page and patience:
                    self.run_.report()  # again, of the model cut back to its best round
        return self

    @contextmanager
    def _as_error(self, kind: type[Exception] = ValueError) -> Iterator[None]:
        """Turn errors into Python's of a kind, which name the estimator's parameters."""
        parameter_of = {setting: name for name, setting in self.setting_of.items()}
        parameter_of["init-model"] = "xgb_model"
        try:
            with naming_python_keywords(parameter_of):
                yield
        except Exception as error:
            for way_on in ("way_on", "__notes__"):  # the run's folder is deleted, or its tables
                vars(error).pop(way_on, None)
            if isinstance(error, ConfigError | DataError):
                raise kind(str(error)) from error
            raise

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """The run's folder: ``run_dir``, or one deleted with the estimator or on failure."""
        if self.run_dir is not None:
            folder = RunFolder(Path(self.run_dir).resolve())
            folder.check_new()
            with folder_of_runs(folder.path):
                try:
                    yield folder.path
                finally:
                    drop_frames(folder.path)
            return
        path = Path(mkdtemp(prefix="fedapp-"))
        delete = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        try:
            yield path
        except BaseException:
            delete()
            raise
        if delete_earlier := getattr(self, "_delete_folder", None):
            delete_earlier()
        self._delete_folder = delete

    def _check_dealt(self, n_rows: int, n_columns: int, n_parties: int) -> None:
        """Check that the table is large enough to give every party a share."""
        if n_rows < n_parties:
            rule = "parties must be at most the number of rows"
            raise ValueError(f"{rule}, n_samples={n_rows}, got {n_parties}")

    def _path_of(self, xgb_model: object, folder: Path) -> Path:
        """Path of the model to continue."""
        if isinstance(xgb_model, Federated):
            return xgb_model.run_.path / "model.json"
        return path_of_model(xgb_model, folder)

    def _settings(self) -> dict[str, Any]:
        """Settings from the parameters that are not None."""
        no_settings = {"columns", "engine", "run_dir", "random_state", "class_weight", "settings"}
        no_settings |= {"progress"}
        arguments = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None or field.name in no_settings:
                continue
            arguments[self.setting_of.get(field.name, field.name)] = value
        if isinstance(self.random_state, int | np.integer):
            arguments["seed"] = int(self.random_state)
        elif self.random_state is not None:
            arguments["seed"] = int(check_random_state(self.random_state).randint(2**31))
        arguments = settings_of(self.method, functions_of(arguments)[0])
        more = settings_of(self.method, self.settings or {})
        if taken := sorted(more.keys() & {*arguments, *self.always, *SET_BY_COMMAND["fit"]}):
            rule = "settings must have none that the estimator or its parameters set"
            raise ConfigError(f"{rule}, got {', '.join(taken)}")
        return {**arguments, **more}

    def _keep(self, names: Sequence[str], folder: RunFolder, eval_set: Any, patience: int) -> None:
        """Store the model, scores and importances; delete the states of the simulated sites."""
        self._place = folder.path
        forget_model(folder.summary["model_id"])
        for name in ("evals_result_", "best_iteration_", "feature_importances_"):
            vars(self).pop(name, None)  # of an earlier fit
        sets = []
        for X, y in eval_set:
            rows, labels = self._rows(X), column_or_1d(y)
            if hasattr(self, "classes_"):
                if unknown := set(labels.tolist()) - set(self.classes_.tolist()):
                    raise ValueError(f"eval_set must have classes of y, got {len(unknown)} others")
                labels = np.searchsorted(self.classes_, labels)
            sets.append((rows, np.asarray(labels, np.float32)))
        scores_of_sets, best = evaluate_rounds(folder, sets, patience)
        self.model_text_ = model_text(folder.path / "model.json")
        if best:
            n_initial = folder.summary.get("init_model", {}).get("rounds", 0)
            self.best_iteration_ = n_initial + best - 1
            self.evals_result_ = {
                f"validation_{index}": {
                    name: [scores_of_round[name] for scores_of_round in set_scores]
                    for name in set_scores[0]
                }
                for index, set_scores in enumerate(scores_of_sets)
            }
        gains = importance_of(folder.summary)
        if gains and set(gains) <= set(names):
            shares = np.array([gains.get(name, 0.0) for name in names])
            self.feature_importances_ = shares / shares.sum()
        files = [folder.path / name for name in FILES]
        self._files = {path.name: path.read_bytes() for path in files if path.exists()}

    @property
    def run_(self) -> Run:
        """The finished run; an unpickled estimator writes its files again."""
        check_is_fitted(self)
        if not (self._place / FILES[0]).is_file():
            self._place = Path(mkdtemp(prefix="fedapp-"))
            self._delete_folder = weakref.finalize(
                self, shutil.rmtree, self._place, ignore_errors=True
            )
            for name, content in self._files.items():
                write_atomically(self._place / name, content)
        return Run(self._place)

    def evals_result(self) -> dict[str, dict[str, list[float | None]]]:
        """Scores after each round, by pair of ``eval_set`` or else of the validation rows."""
        check_is_fitted(self)
        if not hasattr(self, "evals_result_"):
            rule = "must be of a fit that scored its rounds, by eval_set or valid_fraction"
            raise ValueError(f"evals_result {rule}, got none")
        return self.evals_result_

    @property
    def best_iteration(self) -> int:
        """Number from 0 of the round with the best score; AttributeError without such scores."""
        best: int = self.best_iteration_
        return best

    def get_booster(self) -> Any:
        """The model as an ``xgboost.Booster``; see `Run.to_xgboost`."""
        return self.run_.to_xgboost()

    def to_onnx(self) -> bytes:
        """The model as the content of an ONNX file; see `Run.to_onnx`."""
        return self.run_.to_onnx()

    def apply(self, X: object, iteration_range: Range | None = None) -> Arrays:
        """Leaf of each row in each tree, shape (n_rows, n_trees), numbered as in `get_booster`.

        The trees are those of rounds ``iteration_range[0]`` up to ``iteration_range[1]``, excluded.
        """
        margins = np.zeros(_num_samples(X)) if getattr(self, "_margin", "") else None
        with self._as_error():
            return leaves_of(self._rows(X, margins, iteration_range))

    def _rows(
        self, X: object, base_margin: object = None, iteration_range: Range | None = None
    ) -> PredictedRows:
        """Rows with the model's columns and category codes, and their predictions."""
        run, table = self.run_, self._read(X, reset=False)
        if bool(self._margin) != (base_margin is not None):
            raise ValueError("base_margin must be given where fit was given one, and only there")
        if self._margin:
            check_consistent_length(base_margin, range(table.num_rows))
            table = table.append_column(self._margin, [column_or_1d(base_margin)])
        with self._as_error(), TemporaryDirectory() as folder:
            rows = predicted_rows(run.path, write_tables(table, Path(folder)), label=None)
            check_predicted(rows.unmatched, rows.warnings)
            if iteration_range is None:
                return rows
            return only_rounds(RunFolder(run.path), rows, iteration_range)


class Horizontal(Federated):
    """Parties have the same columns of different rows."""

    def _tables(self, table: Any, label: str, groups: object) -> tuple[Any, dict[str, Any]]:
        if groups is None:
            return table, {}
        members = column_or_1d(groups)
        check_consistent_length(members, range(table.num_rows))
        parties, party_ids = np.unique(members, return_inverse=True)
        if self.parties not in (None, len(parties)):
            raise ValueError(f"parties must be those of groups, {len(parties)}, got {self.parties}")
        names = [str(name) for name in parties]
        if len(set(names)) < len(names) or not all(map(NAME.fullmatch, names)):
            names = [party_name(party_id, len(parties)) for party_id in range(len(parties))]
        tables = {name: table.filter(party_ids == at) for at, name in enumerate(names)}
        return tables, {"parties": len(tables)}


class Vertical(Federated):
    """Parties have different columns of the same rows; the parts of the model are joined."""

    always: ClassVar = {
        **Federated.always,
        "allow-export": True,
        "align": "ordered",
        "share-column-names": True,
    }

    columns: Mapping[str, Sequence[str | int]] | None = None

    def _path_of(self, xgb_model: object, folder: Path) -> Path:
        rule = "must be omitted where parties have different columns, whose model is divided"
        raise ConfigError(f"init-model {rule}: a run continues the folder of another run")

    def _check_dealt(self, n_rows: int, n_columns: int, n_parties: int) -> None:
        if n_rows < FEWEST_ROWS:
            raise ValueError(f"rows must be at least {FEWEST_ROWS}, got n_samples={n_rows}")
        if n_columns < n_parties:
            rule = "parties must be at most the number of columns"
            raise ValueError(f"{rule}, n_features={n_columns}, got {n_parties}")

    def _tables(self, table: Any, label: str, groups: object) -> tuple[Any, dict[str, Any]]:
        if groups is not None:
            raise ValueError("groups must be omitted where parties have different columns")
        if self.columns is None:
            # Every party needs a column, and two parties are the fewest.
            n_parties = max(2, min(SIMULATED_PARTIES, table.column_names.index(label)))
            return table, {"parties": n_parties} if self.parties is None else {}
        # The label, and what ``fit`` appended after it, go to the first party.
        at_first = table.column_names[table.column_names.index(label) :]
        names = table.column_names[: -len(at_first)]
        party_columns = {
            party: [
                names[column] if isinstance(column, int | np.integer) else str(column)
                for column in some
            ]
            for party, some in self.columns.items()
        }
        listed = [name for some in party_columns.values() for name in some]
        if sorted(listed) != sorted(names):
            rule = "columns must give every column of X to one party"
            raise ValueError(f"{rule}, got {', '.join(sorted(listed))}")
        id_column, rows = _free(ID, names), np.arange(table.num_rows).astype(str)
        tables: dict[str, Any] = {}
        for party, some in party_columns.items():
            part = table.select([*some, *([] if tables else at_first)])
            tables[party] = part.append_column(id_column, [rows])
        return tables, {"parties": len(tables), "id": id_column}


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor whose error for an unknown parameter has what it is here."""

    @wraps(init)
    def checked(self: Federated, **parameters: Any) -> None:
        with self._as_error(TypeError):
            names = signature(init).parameters
            check_parameters(parameters, names, self.setting_of, self.method)
        init(self, **parameters)

    return checked


def _settings_of(method: str) -> list[str]:
    """Settings of the run that are parameters of a method's estimators, in the order of files."""
    read = set(load_strategy(method).settings_read(load_settings({"strategy": method})))
    names = [
        setting
        for setting in defaults()
        if setting in SETTINGS & read or setting.startswith(f"{method}.")
    ]
    return [name for name in names if name != KEEPS_MODEL]


def _parameter(method: str, setting: str) -> str:
    """The name of a setting as a parameter."""
    if setting == "fedxgbllr.learning-rate":  # that of its trees is eta
        return "head_learning_rate"
    name = setting.removeprefix(f"{method}.")
    return RENAMED.get(name) or python_name(name)


def _free(name: str, taken: Sequence[str]) -> str:
    """Append underscores until the name is not taken."""
    while name in taken:
        name += "_"
    return name
