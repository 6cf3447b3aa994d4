"""Fedapp in Python: train on frames, load a run, predict, explain.

What the ``fedapp`` command does with a run it does by ``fedapp.session``, and so does this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal, overload

from fedapp.errors import ConfigError
from fedapp.finished import Run
from fedapp.frames import Data, drop_frames, holds_frames, placed
from fedapp.home import RUNS, private_folder, shown
from fedapp.keywords import check_functions, functions_of, settings_of, told_in_python
from fedapp.run_folder import RunFolder, new_run_dir
from fedapp.session import Training
from fedapp.studies import Compared, Folds, Tuned
from fedapp.trees.custom import held
from fedapp.watch import OnRound, Silent, Watcher

__all__ = ["Data", "Folds", "OnRound", "Run", "Tuned", "Watcher", "compare", "load", "run", "tune"]


@overload
def run(
    strategy: str,
    *,
    data: Data | None = None,
    label: str | int = "",
    parties: int | None = None,
    engine: str = "local",
    baselines: bool = False,
    on_round: OnRound | None = None,
    watcher: Watcher | None = None,
    folds: Literal[0] = 0,
    **settings: Any,
) -> Run: ...
@overload
def run(strategy: str, *, folds: int, **settings: Any) -> Run | Folds: ...
def run(
    strategy: str,
    *,
    data: Data | None = None,
    label: str | int = "",
    parties: int | None = None,
    engine: str = "local",
    baselines: bool = False,
    on_round: OnRound | None = None,
    watcher: Watcher | None = None,
    folds: int = 0,
    **settings: Any,
) -> Run | Folds:
    """Train a model, as ``fedapp run`` does.

    Parameters
    ----------
    strategy : "pax", "fedxgbllr", "bagging", "cyclic", "fedavg-linear", "secureboost" or
        "federated-forest".
    data : a data set's name or a file's path, or a DataFrame (pandas, polars, or anything that
        Arrow reads), a pyarrow Table, or a numpy array, whose columns are c0, c1, ...: one table,
        which is split among the parties. A list has a table for each party, a mapping gives the
        parties' names too. Frames are written to Parquet files in the run's folder, and deleted
        when the run has finished. Omitted: the data set "breast-cancer".
    label : name of the label column.
    parties : how many; by default as many as there are tables, and 3 for one table.
    engine : "local" (in this process), "simulation" (Flower's own runtime), or the name of a
        SuperLink in Flower's configuration, where the sites name their tables.
    baselines : whether to also train on pooled rows, and on each party's rows alone.
    on_round : called with a `RoundInfo` after every round, in order: by the local engine in this
        thread, by the simulation in another one. Where it returns False the run stops and can be
        resumed, at once by the local engine, in simulation maybe some rounds later.
    watcher : told what is done; by default nobody is.
    folds : of a cross-validation: the rows are dealt to so many parts, and each is held back by a
        run of its own; with ``fold`` too, that one alone is run.
    **settings : all others, with underscores; ``reg_lambda`` is lambda, ``reg_alpha`` alpha, lists
        stand for texts with commas, mappings for a method's own section: ``pax={"bins": "equal"}``.
        ``objective`` and ``eval_metric`` may be functions, which only ``engine="local"`` calls: see
        the notes. ``run_dir`` is the folder to write, by default a new one in ``runs``; ``resume``
        one to go on from. ``log`` names tools that log the run too: mlflow, tensorboard, wandb.

    Returns
    -------
    Run : the finished run; `Folds` where there are several.

    Raises
    ------
    ConfigError : a setting breaks its rule, or there is none of this name.
    DataError : a table breaks a rule.
    StoppedError : ``on_round`` returned False; says where the run goes on.
    FedappError : the run cannot go on.

    Notes
    -----
    Of pax, bagging and cyclic, ``objective`` may be a function of margins and labels, float32 of
    shape (n_rows,), that returns gradients and hessians of that shape. It is called with the rows
    of one party at a time, and multiplied by their weights. Labels are numbers, rows start from
    margin 0.5 as in XGBoost, or from ``base_margin``, and ``predict`` gives margins.

    ``eval_metric`` may be a function of labels and predictions (margins, where the objective is a
    function) that returns their mean over rows, or a name and that, the smaller the better. Means
    of parties are added up by their rows, so a metric that is no mean, as AUC, is refused, and so
    are weights. It is called ``custom@NAME`` in the scores.

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
    named = {**named, "label": label or None, "folds": folds or None}
    given: dict[str, Any] = settings_of(strategy, {**named, "parties": parties})
    how = given, engine, baselines, watcher or Silent(), on_round
    if folds and "fold" not in given:
        from simulations.folds import CrossValidation

        with told_in_python(), held(functions), _placing(strategy, data, given):
            return Folds(CrossValidation(strategy, *how).carry_out().path)
    training = Training(strategy, *how)
    with told_in_python(), held(functions), _noting(training), _placing(strategy, data, given):
        folder = training.carry_out()
    if folder is None:
        rule = "must lie on this machine to be loaded: give run_dir"
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
    runs: int | None = None,
    exchanges: int | None = None,
    bytes: int | None = None,
    output: str | PathLike[str] | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Tuned:
    """Search for the best settings of a method, as ``fedapp tune`` does.

    Trials are scored by the validation rows and do not look at the test rows; the best setting is
    then run once more, and that run alone scores them.

    Parameters
    ----------
    strategy, data, label, parties, engine, watcher : as for `run`; the engine is a simulated one.
    space : by setting, ``"log:0.01:0.5"``, ``"uniform:0.5:1"``, ``"int:3:8"`` or a list of values;
        added to the method's usual space. A setting that is given stays as it is.
    search : "random", or "optuna" (its TPE sampler; needs the package optuna).
    runs : trials at most; 20 where no budget is given.
    exchanges, bytes : of all trials and the last run at most; a trial that would pass them is
        stopped.
    output : folder of the search, which goes on where it is unfinished; by default a new one for
        frames, else one that follows from the table, the settings and the space.
    **settings : all others, as for `run`.

    Returns
    -------
    Tuned : the finished search.

    Raises
    ------
    ConfigError : a setting breaks its rule, there is none of this name, or the budget is too small.
    DataError : a table breaks a rule.
    FedappError : a run cannot go on.

    Examples
    --------
    >>> import fedapp
    >>> found = fedapp.tune("pax", runs=2, num_boost_round=2, max_depth=2)
    >>> len(found.trials)
    2
    """
    from simulations.tune import Budget, Tuning

    more = {"label": label or None, "parties": parties}
    given: dict[str, Any] = settings_of(strategy, {**settings, **more})
    with told_in_python():
        asked = {name: str(text) for name, text in settings_of(strategy, space or {}).items()}
        budget = Budget(runs, exchanges, bytes)
        with _placed_in(f"tune-{strategy}", data, output, given) as place:
            how = asked, search, budget, engine, watcher or Silent(), place
            return Tuned(Tuning(strategy, given, *how).carry_out().path)


def compare(
    strategies: Sequence[str],
    *,
    data: Data | None = None,
    label: str | int = "",
    parties: int | None = None,
    engine: str = "local",
    seeds: int = 1,
    folds: int = 0,
    output: str | PathLike[str] | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Compared:
    """Run several methods on the same rows, as ``fedapp compare`` does.

    Parameters
    ----------
    strategies : methods, each once.
    data, label, parties, engine, output, watcher, **settings : as for `tune`; finished runs that
        ``output`` has are not run again.
    seeds : runs of each method.
    folds : held back in turn with each seed; 0: none.

    Raises
    ------
    ConfigError : a setting breaks its rule, or the methods cannot be scored on the same rows.
    DataError, FedappError : a table breaks a rule, or a run cannot go on.

    Examples
    --------
    >>> import fedapp
    >>> found = fedapp.compare(["pax", "cyclic"], num_boost_round=2, max_depth=2)
    >>> sorted(found.runs)
    ['cyclic', 'pax']
    """
    from simulations.compare import carry_out

    if "fold" in settings:
        raise ConfigError("fold must be omitted in a comparison, which runs all folds")
    folded = {"folds": folds, "fold": 1} if folds else {}
    more = {"label": label or None, "parties": parties}
    given: dict[str, Any] = settings_of("", {**settings, **folded, **more})
    with told_in_python(), _placed_in("compare", data, output, given) as place:
        how = seeds, engine, watcher or Silent(), place
        return Compared(carry_out(strategies, given, *how)[0])


@contextmanager
def _placed_in(
    kind: str, data: Data | None, output: str | PathLike[str] | None, given: dict[str, Any]
) -> Iterator[Path | None]:
    """The folder of several runs, a new one for frames; names the tables in the settings.

    Frames are deleted where the block is refused before it writes anything else.
    """
    place, has_frames = None if output is None else Path(output), False
    if data is not None:
        if has_frames := holds_frames(data):
            place = place or Path(new_run_dir(kind, RUNS))
            private_folder(place)
        given["data"] = placed(data, (place or Path()).resolve())
    try:
        yield place
    except BaseException:
        if has_frames and place and not any(path.is_dir() for path in place.iterdir()):
            drop_frames(place)
            if not any(place.iterdir()):
                place.rmdir()
        raise


@contextmanager
def _noting(training: Training) -> Iterator[None]:
    """Note on what ends a run that has begun where it is kept, and how it goes on."""
    try:
        yield
    except BaseException as error:
        path = training.folder.path if training.folder else None
        if path and (path / "config.toml").exists() and not (path / "summary.json").exists():
            again = f"fedapp.run({training.strategy!r}, resume={shown(path)!r})"
            error.add_note(f"the run is kept in {shown(path)}; {again} goes on from there")
        raise


@contextmanager
def _placing(strategy: str, data: Data | None, given: dict[str, Any]) -> Iterator[None]:
    """Name the tables in the settings while the block runs; frames go to the run's folder."""
    if data is None:
        yield
        return
    if "resume" in given:
        raise ConfigError("data must be omitted with resume: the run's folder has them")
    if not holds_frames(data):
        given["data"] = placed(data, Path())
        yield
        return
    folder = RunFolder(Path(given.get("run-dir") or new_run_dir(strategy, RUNS)).resolve())
    folder.check_new()
    is_new = not folder.path.exists()
    private_folder(folder.path)
    given["run-dir"] = str(folder.path)
    try:
        given["data"] = placed(data, folder.path)
        yield
    except BaseException:
        if not (folder.path / "config.toml").exists():
            drop_frames(folder.path)
            if is_new and not any(folder.path.iterdir()):
                folder.path.rmdir()
        raise


def load(path: str | PathLike[str]) -> Run:
    """A finished run.

    Parameters
    ----------
    path : its folder.

    Raises
    ------
    ConfigError : the folder holds no run that has finished.

    Examples
    --------
    >>> import fedapp
    >>> path = fedapp.run("pax", num_boost_round=9, max_depth=2).path
    >>> fedapp.load(path).predict("breast-cancer")[:3]
    array([0, 0, 0])
    """
    return Run(path)
