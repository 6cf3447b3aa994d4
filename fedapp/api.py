"""Fedapp in Python: train on frames, load a run, predict, explain.

Like the ``fedapp`` command, these functions work through ``fedapp.runs.session``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from fedapp.arguments import check_functions, functions_of, naming_python_keywords, settings_of
from fedapp.data.datasets import Data, drop_frames, has_frames, write_tables
from fedapp.errors import ConfigError
from fedapp.home import RUNS
from fedapp.report.progress import Watcher, following
from fedapp.run_files import CONFIG, OnRound
from fedapp.run_folder import RunFolder, new_run_dir
from fedapp.runs.clean import folder_of_runs
from fedapp.runs.run import Run
from fedapp.runs.run_groups import Compared, Tuned
from fedapp.runs.session import Training
from fedapp.trees.custom import functions_in_use

__all__ = ["Data", "OnRound", "Run", "Tuned", "Watcher", "compare", "load", "run", "tune"]


def run(
    strategy: str,
    *,
    data: Data | None = None,
    label: str | int = "",
    parties: int | None = None,
    engine: str = "local",
    baselines: bool = False,
    on_round: OnRound | None = None,
    progress: bool | Watcher | None = None,
    **settings: Any,
) -> Run:
    """Train a model, like ``fedapp run``.

    Parameters
    ----------
    strategy : name of a method, as ``fedapp run --help`` lists them.
    data : a data set's name, a file's path, a DataFrame (pandas, polars, or anything that Arrow
        reads), a pyarrow Table, or a numpy array, whose columns are named c0, c1, ... One table is
        split among the parties; a list has a table for each party, a mapping also names the
        parties. Frames are written to Parquet files in the run's folder, which are deleted when
        the run has finished. Default: the data set "breast-cancer".
    label : name of the label column.
    parties : number of parties; by default the number of tables, and 3 for one table.
    engine : "local" (in this process), "simulation" (Flower's simulation), or the name of a
        SuperLink in Flower's configuration, where the sites name their tables.
    baselines : whether to also train on the pooled rows, and on each party's rows only.
    on_round : called with a `RoundInfo` after every round, in order. The local engine calls it in
        this thread, the simulation in another one. If it returns False the run stops and can be
        resumed; a simulation may stop some rounds later.
    progress : whether to show progress; by default on a terminal and in a notebook. A `Watcher`
        shows it in its own way.
    **settings : all other settings, with underscores. ``reg_lambda`` is lambda, ``reg_alpha``
        alpha; a list replaces a text with commas, a mapping a method's section:
        ``pax={"bins": "equal"}``. ``objective`` and ``eval_metric`` may be functions with
        ``engine="local"``, see Notes. ``run_dir`` is the folder to write, by default a new one in
        ``runs``; ``resume`` is the folder of a run to resume. ``log="mlflow"`` also logs the run in
        MLflow.

    Returns
    -------
    Run : the finished run.

    Raises
    ------
    ConfigError : a setting is unknown or invalid.
    DataError : a table is invalid.
    StoppedError : ``on_round`` returned False.
    FedappError : the run failed.

    Notes
    -----
    For pax, bagging and cyclic, ``objective`` may be a function of margins and labels, float32 of
    shape (n_rows,), that returns gradients and hessians of that shape. It is called with the rows
    of one party at a time; its result is multiplied by their weights. Labels are numbers, rows
    start from margin 0.5 as in XGBoost, or from ``base_margin``, and ``predict`` returns margins.

    ``eval_metric`` may be a function of labels and predictions (margins, if the objective is a
    function) that returns their mean over rows, or a name and that mean; smaller is better. The
    parties' means are averaged by their numbers of rows, so weights and metrics that are no mean,
    such as AUC, are refused. The scores name it ``custom@NAME``.

    Examples
    --------
    >>> import fedapp
    >>> run = fedapp.run("pax", data="breast-cancer", parties=2, num_boost_round=5, max_depth=3)
    >>> run.summary["metrics"]["test"]["auc"] > 0.95
    True
    >>> run.classes
    ('0', '1')
    """
    named, functions = functions_of(settings)
    check_functions(functions, engine, baselines)
    overrides = _settings(strategy, named, label, parties)
    with ExitStack() as stack:
        watcher = stack.enter_context(following(progress))
        stack.enter_context(naming_python_keywords())
        stack.enter_context(functions_in_use(functions))
        training = Training(strategy, overrides, engine, baselines, watcher, on_round)
        stack.enter_context(_placing(strategy, data, overrides))
        folder = training.carry_out()
    if folder is None:
        rule = "must be on this machine to be loaded: give run_dir"
        raise ConfigError(f"the run has finished; its folder {rule}, got engine={engine!r}")
    return Run(folder.path)


def tune(
    strategy: str,
    *,
    data: Data | None = None,
    label: str | int = "",
    parties: int | None = None,
    engine: str = "local",
    space: Mapping[str, Any] | None = None,
    search: str = "random",
    runs: int = 20,
    baselines: bool = False,
    on: str = "",
    output: str | PathLike[str] | None = None,
    progress: bool | Watcher | None = None,
    **settings: Any,
) -> Tuned:
    """Search for the best settings of a method, like ``fedapp tune``.

    Trials are scored on the validation rows. The best setting is then run once more, and only that
    run scores the test rows.

    Parameters
    ----------
    strategy, data, label, parties, engine, progress : as for `run`; "local" or "simulation".
    space : by setting, ``"log:0.01:0.5"``, ``"uniform:0.5:1"``, ``"int:3:8"`` or a list of values;
        added to the method's default space. Settings that are given are not searched.
    search : "random", or "optuna" (its TPE sampler); both need the package optuna.
    runs : number of trials.
    baselines : also search settings of XGBoost on the pooled rows and on each party's, with as many
        trials each; ``summary["baselines"]`` has them.
    on : "ray": every trial is a task of the Ray cluster that ``RAY_ADDRESS`` names.
    output : folder of the search; an unfinished search in it is resumed. By default a new one for
        frames, else one that follows from the table, the settings and the space.
    **settings : all other settings, as for `run`.

    Raises
    ------
    ConfigError : a setting is unknown or invalid.
    DataError : a table is invalid.
    FedappError : a run failed.

    Examples
    --------
    >>> import fedapp
    >>> found = fedapp.tune("pax", runs=2, num_boost_round=2, max_depth=2)
    >>> len(found.trials)
    2
    """
    from fedapp.runs.tune import Tuning

    for name in ("exchanges", "bytes"):
        if name in settings:
            rule = "must be omitted, as runs= limits a search"
            raise ConfigError(f"{name} {rule}, got {settings[name]}")
    overrides = _settings(strategy, settings, label, parties)
    with naming_python_keywords():
        domains = {name: str(text) for name, text in settings_of(strategy, space or {}).items()}
        folder = _folder(f"tune-{strategy}", data, output)
        with following(progress) as watcher, _placing(strategy, data, overrides, folder):
            tuning = Tuning(
                strategy, overrides, domains, search, runs, engine, watcher, folder, on, baselines
            )
            return Tuned(tuning.carry_out().path)


def compare(
    strategies: Sequence[str],
    *,
    data: Data | None = None,
    label: str | int = "",
    parties: int | None = None,
    engine: str = "local",
    seeds: int = 1,
    folds: int = 0,
    on: str = "",
    output: str | PathLike[str] | None = None,
    progress: bool | Watcher | None = None,
    **settings: Any,
) -> Compared:
    """Run several methods on the same rows, like ``fedapp compare``.

    Parameters
    ----------
    strategies : methods, each once.
    data, label, parties, engine, output, progress, **settings : as for `tune`; finished runs in
        ``output`` are not repeated.
    seeds : number of runs of each method.
    folds : number of folds of a cross-validation with each seed; 0: none.
    on : "ray": every run is a task of the Ray cluster that ``RAY_ADDRESS`` names.

    Raises
    ------
    ConfigError : a setting is invalid, or the methods cannot be scored on the same rows.
    DataError, FedappError : a table is invalid, or a run failed.

    Examples
    --------
    >>> import fedapp
    >>> found = fedapp.compare(["pax", "cyclic"], num_boost_round=2, max_depth=2)
    >>> sorted(found.runs)
    ['cyclic', 'pax']
    """
    from fedapp.runs.compare import carry_out

    overrides = _settings("", settings, label, parties)
    folder = _folder("compare", data, output)
    placing = _placing("compare", data, overrides, folder)
    with following(progress) as watcher, naming_python_keywords(), placing:
        path, _ = carry_out(strategies, overrides, seeds, engine, watcher, folder, on, folds)
        return Compared(path)


def _settings(
    strategy: str, given: Mapping[str, Any], label: str | int, parties: int | None
) -> dict[str, Any]:
    """Settings by their full names; ConfigError also for a label that is no column's name."""
    if not isinstance(label, str | int):
        got = f"label must be the name of a column of data, got {type(label).__name__}"
        raise ConfigError(f"{got}: data=X.assign(target=y), label='target' is such a table")
    return {**settings_of(strategy, {**given, "label": label or None, "parties": parties})}


@contextmanager
def _placing(
    kind: str, data: Data | None, overrides: dict[str, Any], output: Path | None = None
) -> Iterator[None]:
    """Put the tables into the settings while the block runs.

    Frames go to the run's folder, or to `output`. Where the block fails before it wrote a run, the
    frames are deleted, and a new folder too.
    """
    if data is None:
        yield
        return
    if "resume" in overrides:
        raise ConfigError("data must be omitted with resume: the run's folder has them")
    if not has_frames(data):
        overrides["data"] = write_tables(data, Path())
        yield
        return
    if output is None:
        output = Path(overrides.get("run-dir") or new_run_dir(kind, RUNS)).resolve()
        RunFolder(output).check_new()
        overrides["run-dir"] = str(output)
    with folder_of_runs(output, keeps=lambda: True):  # but for a folder without anything
        try:
            overrides["data"] = write_tables(data, output.resolve())
            yield
        except BaseException:
            if not any(path.is_dir() or path.name == CONFIG for path in output.iterdir()):
                drop_frames(output)
            raise


def _folder(kind: str, data: Data | None, output: str | PathLike[str] | None) -> Path | None:
    """The folder of several runs: `output`, or a new one for frames."""
    if output is not None:
        return Path(output)
    return Path(new_run_dir(kind, RUNS)) if data is not None and has_frames(data) else None


def load(path: str | PathLike[str]) -> Run:
    """Open a finished run by its folder.

    Raises
    ------
    ConfigError : the folder has no finished run.

    Examples
    --------
    >>> import fedapp
    >>> path = fedapp.run("pax", num_boost_round=9, max_depth=2).path
    >>> fedapp.load(path).predict("breast-cancer")[:3]
    array([0, 0, 0])
    """
    return Run(path)
