"""Everything around a run: checks, its folder and engine, and what is added to it afterwards.

``fedapp run`` and ``fedapp.run`` are thin wrappers of this module.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from fedapp.data.datasets import drop_frames, named_frames, party_sources, sources_to_predict
from fedapp.errors import ConfigError, FedappError, RunFailedError, StoppedError
from fedapp.home import (
    RUNS,
    check_free,
    check_output_folder,
    display_path,
    home,
    write_atomically,
)
from fedapp.messages.methods import all_methods, check_extra
from fedapp.report.progress import QUIET, Silent, Watcher
from fedapp.report.summary import worse_than_alone
from fedapp.run_files import OnRound
from fedapp.run_folder import RunFolder, is_of_a_beginning, new_run_dir, resumed_settings
from fedapp.runs.clean import folder_of_runs, predictions_folder
from fedapp.runs.logs import MLflowLog, check_packages
from fedapp.runs.predict import (
    Predicted,
    check_predictions,
    gains_by_party,
    trained_settings,
)
from fedapp.runs.set_by_command import check_set_by_command
from fedapp.settings import Settings, load_settings, settings_named
from fedapp.site.standing import METHOD as STANDING
from fedapp.superlinks import SIMULATED, find_superlink
from fedapp.trees.divided import DividedModel

PARTY_SIDE = ("clients/", "fedapp/site/")  # folders of the code that parties run


@dataclass(slots=True)
class Training:
    """A run from its settings to its report."""

    strategy: str
    given: Mapping[str, Any]  # settings that differ from their defaults
    engine: str = "local"  # or simulation, or the name of a SuperLink
    baselines: bool = False  # also train on the pooled rows, and on each party's
    watcher: Watcher = field(default_factory=Silent)
    on_round: OnRound | None = None  # with simulated engines only
    with_page: bool = True  # also write the report and compute contributions of columns
    facts: Callable[[RunFolder], Mapping[str, Any]] | None = None  # more fields of the summary
    folder: RunFolder | None = None  # None before it exists, or if it is on another machine
    describes: bool = False  # train nothing, describe the parties' tables

    def carry_out(self) -> RunFolder | None:
        """Train a model; returns its folder, or None if it is on another machine.

        An invalid setting or table raises ConfigError or DataError before anything is started, an
        ``on_round`` that stops the run StoppedError.
        """
        watcher = self.watcher
        watcher.begin("reading the settings")
        settings = self._checked()
        # The summary has the warnings.
        settings = check_tables(settings, self.engine, watcher)
        settings = settings.model_copy(update={"run_dir": run_dir_of(settings, self.engine)})
        self.folder = RunFolder(Path(settings.run_dir)) if settings.run_dir else None
        if self.with_page:  # not for each of many fits
            watcher.tell(describe_engine(self.engine))
        saved = self.folder.saved_state if self.folder else None
        earlier = saved.seconds[0] if saved else 0.0  # of earlier attempts of a resumed run
        place = folder_of_runs(self.folder.path) if self.folder else nullcontext()
        with place, self._logged(settings) as logs:
            on_round = logs.before(self.on_round) if logs else self.on_round
            with warnings_of_parties() as warnings:
                folder = carry_out(settings, self.engine, watcher, on_round)
            if folder is None or not folder.has_finished:
                watcher.tell("The run has finished; its folder is where the ServerApp runs.")
                return None
            shown = folder.summary["warnings"]
            new = [text for text in warnings if not text.endswith(tuple(shown))]
            if new:
                folder.add_to_summary({"warnings": [*shown, *new]})
            self._add(folder, settings)
            if logs:
                logs.note()
            watcher.begin("writing the report")
            folder.set_total_seconds(earlier + watcher.seconds)  # shown in the report
            if self.with_page:
                from fedapp.report import write_report

                write_report(folder.path)
            folder.set_total_seconds(earlier + watcher.seconds)
            if logs:
                logs.end()
        return folder

    def _logged(self, settings: Settings) -> AbstractContextManager[MLflowLog | None]:
        """Log a simulated run in MLflow too; between organisations the ServerApp does."""
        if self.folder is None or self.engine not in SIMULATED or not settings.log:
            return nullcontext()
        self.watcher.begin(f"opening {settings.log}")
        return MLflowLog(settings, self.folder, self.engine, self.watcher.tell)

    def _checked(self) -> Settings:
        named = settings_named(self.given, self.strategy)
        check_set_by_command("describe" if self.describes else "run", named)
        settings = load_settings({**named, "strategy": self.strategy})
        is_simulated = self.engine in SIMULATED
        if settings.init_model and is_simulated:
            path = str(Path(settings.init_model).resolve())
            settings = settings.model_copy(update={"init_model": path})
        if settings.without and not is_simulated:
            raise ConfigError(f"without must be in the sites' node configs, got {settings.without}")
        settings = resumed_settings(settings)
        if settings.run_dir and not settings.resume:
            RunFolder(Path(settings.run_dir)).check_new()
            check_output_folder(Path(settings.run_dir), is_of_a_beginning, "run-dir")
        check_method(settings, self.engine, named, self.describes)
        if self.baselines and settings.init_model:
            rule = "must be empty with --baselines, which begin without a model"
            raise ConfigError(f"init-model {rule}, got {settings.init_model}")
        if self.baselines and not is_simulated:
            rule = "must have all rows in one place"
            raise ConfigError(f"--baselines {rule}, got --engine {self.engine}")
        if self.on_round and not is_simulated:
            rule = "must be omitted where the run's folder is on another machine"
            raise ConfigError(f"on_round {rule}, got engine={self.engine!r}")
        return settings

    def _add(self, folder: RunFolder, settings: Settings) -> None:
        """Add baselines and contributions to the summary, which need all rows on this machine."""
        if self.baselines:
            self._add_baselines(folder, settings)
        if self.with_page and self.engine in SIMULATED and not self.describes:
            from fedapp.runs.differences import table_facts

            self.watcher.begin("explaining the model on test rows")
            resolved = settings.model_copy(update={"objective": folder.summary["objective"]})
            facts = table_facts(resolved, folder.path)
            if shares := gains_by_party(folder.path):
                facts["gain_by_party"] = shares
            folder.add_to_summary(facts)
        if self.facts is not None:
            folder.add_to_summary(self.facts(folder))
        if drop_frames(folder.path):
            folder.add_to_summary({"data": named_frames(settings.data, folder.path)})

    def _add_baselines(self, folder: RunFolder, settings: Settings) -> None:
        from fedapp.runs.baselines import lacking_memory_of, run_baselines
        from fedapp.runs.differences import differences

        summary = folder.summary
        if note := lacking_memory_of(settings):
            warnings = [*summary["warnings"], f"the baselines were left out: {note}"]
            folder.add_to_summary({"warnings": warnings})
            return
        self.watcher.begin("training the baselines")
        scores = run_baselines(settings, folder.path)
        resolved = settings.model_copy(update={"objective": summary["objective"]})
        margins = scores.pop("test_margins")
        scores["differences"] = differences(resolved, folder.path, margins)
        warnings = [*summary["warnings"], *worse_than_alone(summary, scores["alone"])]
        folder.add_to_summary({"baselines": scores, "warnings": warnings})


@contextmanager
def warnings_of_parties() -> Iterator[list[str]]:
    """What parties in this process warn of in their logs during a block, each text once."""
    texts, packages = dict[str, None](), Path(__file__).parents[2]
    folders = tuple(f"{packages}/{folder}" for folder in PARTY_SIDE)
    handler = logging.Handler(logging.WARNING)

    def note(record: logging.LogRecord) -> bool:
        if record.pathname.startswith(folders):
            texts[record.getMessage()] = None
        return False

    handler.addFilter(note)
    log = logging.getLogger("fedapp")
    log.addHandler(handler)
    noted = list[str]()
    try:
        yield noted
    finally:
        log.removeHandler(handler)
        noted += texts


def run_dir_of(settings: Settings, engine: str, parent: Path = RUNS) -> str:
    """Path of the run's folder, by default a new one in ``parent``; empty if a ServerApp has it."""
    if not settings.run_dir and engine not in SIMULATED:
        return ""
    run_dir = Path(settings.run_dir or new_run_dir(settings.strategy, parent)).resolve()
    if not settings.resume:
        RunFolder(run_dir).check_new()
    return str(run_dir)


def check_method(
    settings: Settings, engine: str, given: Collection[str] = (), describes: bool = False
) -> None:
    """Raise ConfigError if a method cannot train, or describe, here with these settings; it must
    read all of ``given``, even those with default values."""
    from strategies.run import check_read, load_strategy

    check_engine(engine)
    strategy = load_strategy(settings.strategy)
    declared = all_methods()[settings.strategy]
    if not (declared.describes if describes else declared.trains):
        way = f"fedapp predict --inference {settings.strategy} predicts"
        way = "fedapp describe describes" if declared.describes else way
        raise ConfigError(f"strategy must be one that trains ({way}), got {settings.strategy!r}")
    strategy.check_settings(settings)
    check_read(settings, given)
    if engine in SIMULATED:
        check_extra(settings.strategy)
        if settings.log:
            check_packages()


# Modules with kernels that only boosting calls.
OF_BOOSTING = (
    *("fedapp.histograms.claimed", "fedapp.histograms.groups", "fedapp.histograms.split"),
    *("fedapp.trees.ranking", "fedapp.trees.survival"),
)
COMPILING = "the first run of this version compiles its kernels, once: a minute or two at most"
_told = list[str]()  # once a process


def tell_of_compiling(watcher: Watcher) -> None:
    """Tell, before a run waits for that, that kernels are compiled, if none is on the disk yet."""
    from fedapp.kernels import cache_folder, config

    folder = None if config.DISABLE_JIT else cache_folder()
    if folder and not _told and not any(folder.glob("*.nbi")):
        _told.append(COMPILING)
        watcher.tell(COMPILING)


def check_tables(
    settings: Settings, engine: str, watcher: Watcher, shown: set[str] | None = None
) -> Settings:
    """Check a simulated run's tables; return settings that count its parties.

    Warnings are shown if they can be added to those that a command has ``shown``.
    """
    if engine in SIMULATED:
        from fedapp.kernels import load_ahead
        from fedapp.runs.tables import check_tables, natural_parties
        from strategies.run import load_strategy

        tell_of_compiling(watcher)
        watcher.begin("reading and checking the tables")
        if engine == "local":
            # Modules that the first round needs, and kernels that the method does not call.
            modules = [load_strategy(settings.strategy).__module__.replace("strategies", "clients")]
            method = all_methods()[settings.strategy]
            if method.trains and method.baseline == "boosted":
                load_ahead([*modules, "xgboost"], unused=("fedapp.trees.forest",))
            else:
                load_ahead(modules, unused=OF_BOOSTING)
        if n_parties := natural_parties(settings):
            settings = settings.with_parties(n_parties)
            column = settings.partition_column
            watcher.tell(f"{n_parties} parties, one for each value of '{column}'")
        for text in check_tables(settings):
            if shown is not None and text not in shown:
                shown.add(text)
                watcher.tell(f"! {text}")
    return settings


def carry_out(
    settings: Settings, engine: str, watcher: Watcher, on_round: OnRound | None = None
) -> RunFolder | None:
    """Carry out a run and show its progress; returns its folder, if it is on this machine."""
    run = engine_of(engine, watcher, on_round)
    if not settings.run_dir:
        return run(settings)
    folder = RunFolder(Path(settings.run_dir))
    check_free(folder.path)  # before Flower is started
    with folder.held(), watcher.run(folder, settings.watched_metric):
        return run(settings)


# Engines: in this process a thread answers for each party; otherwise a SuperLink starts the run and
# is asked for its status.


def check_engine(name: str) -> None:
    """Raise ConfigError if there is no such engine."""
    if name not in SIMULATED:
        find_superlink(name)


def describe_engine(name: str) -> str:
    """Describe an engine in a line."""
    if name == "local":
        return "engine local: the parties are simulated in this process"
    if name == "simulation":
        return (
            "engine simulation: Flower's own runtime, whose start takes some 15 s; "
            "--engine local makes the same model without it"
        )
    return f"engine {name}: the SuperLink at {find_superlink(name).host}"


def engine_of(
    name: str, watcher: Watcher, on_round: OnRound | None = None
) -> Callable[[Settings], RunFolder | None]:
    """The function that carries out a run; `watcher` shows what it does around the run.
    ``on_round`` is called after every round; ignored if the run's folder is on another machine."""
    check_engine(name)
    if name == "local":
        from fedapp.runs.local import run_local  # Flower takes a second to import

        return lambda settings: run_local(settings, on_round=on_round)
    from fedapp.runs.flower import run_simulation, run_superlink

    if name == "simulation":

        def simulate(settings: Settings) -> RunFolder:
            with _reporting(RunFolder(Path(settings.run_dir)), on_round):
                return run_simulation(settings, watcher)

        return simulate
    return lambda settings: run_superlink(settings, name, watcher)


@contextmanager
def _reporting(folder: RunFolder, on_round: OnRound | None) -> Iterator[None]:
    """Call ``on_round`` from a thread after each round, and raise here what it raises."""
    from fedapp.report.progress import Rounds

    if on_round is None:
        yield
        return
    ended, faults = Event(), list[BaseException]()
    saved = folder.saved_state
    rounds = Rounds(folder.rounds_file, saved.rounds if saved else 0)

    def watch() -> None:
        is_running = True
        while is_running:  # one pass more after the end, for the last lines
            is_running = not ended.wait(0.1)
            try:
                for entry in rounds.new(QUIET.tell):
                    if not faults and on_round(entry) is False:
                        folder.ask_to_stop()
            except BaseException as fault:
                faults.append(fault)
                folder.ask_to_stop()

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except RunFailedError as error:
        if faults or folder.error != StoppedError.__name__:
            raise
        raise StoppedError(str(error)) from None
    finally:
        ended.set()
        thread.join()
        if faults:
            raise faults[0]


# Settings that a joint prediction takes from the training run; OF_SIMULATED only in a simulation.
TRAINED = ("parties", "columns", "align", "join", "align-most-rows", "seed")
OF_SIMULATED = ("label", "event", "qid", "weight", "schema", "header", "decimal", "encoding")


# A joint prediction, None if it is on another machine, and explanations by party.
JointPrediction = tuple[Predicted | None, Mapping[str, Mapping[str, Any]]]


def settings_to_predict(
    run_dir: Path,
    parts: DividedModel,
    overrides: Mapping[str, Any],
    fixed: Mapping[str, Any],
    output: str,
    engine: str,
    command: str = "predict",
) -> Settings:
    """Settings of a run that predicts with the divided model of another run.

    ``parts`` are from ``fedapp.runs.predict.parts_of``; ``overrides`` are settings of a person,
    ``fixed`` those of the command, with ``strategy`` as the way to predict; ``output`` is empty if
    the active party chooses the file.
    """
    from strategies.run import check_read, load_strategy

    methods = [name for name, method in all_methods().items() if method.predicts]
    if fixed["strategy"] not in (*methods, STANDING):
        got = fixed["strategy"]
        raise ConfigError(f"inference must be one of {', '.join(methods)}, got {got!r}")
    if output:
        check_predictions(Path(output), str(fixed.get("data", "")))
    trained = trained_settings(run_dir)
    names = list(TRAINED)
    if engine in SIMULATED:
        names += OF_SIMULATED
        parties = {parts.active, *parts.passive}
        shared = not party_sources(trained["data"], trained["parties"])
        sources_to_predict(fixed["data"], parties, may_be_one=shared)
    overrides = settings_named(overrides)
    check_set_by_command(command, overrides)
    overrides |= fixed
    values = {name: trained[name] for name in names if name in trained}
    values |= {"model": parts.model_id, **overrides}
    if output:
        values["output"] = Path(output).suffix
    settings = load_settings(values)
    load_strategy(settings.strategy).section_settings(settings)
    check_read(settings, overrides)
    check_engine(engine)
    return settings


def predict_jointly(
    settings: Settings, parts: DividedModel, output: str, engine: str, watcher: Watcher
) -> JointPrediction:
    """Run a joint prediction; a note on a FedappError names the run's folder, which is kept."""
    check_tables(settings, engine, watcher)
    path = run_dir_of(settings, engine, predictions_folder())
    predicted: JointPrediction = None, {}
    try:
        folder = carry_out(settings.model_copy(update={"run_dir": path}), engine, watcher)
        if folder and engine in SIMULATED:
            predicted = _collected(folder, parts, settings, Path(output))
    except FedappError as error:
        if path:
            error.add_note(f"the run that failed is kept in {display_path(Path(path))}")
        raise
    if path and not settings.run_dir:
        shutil.rmtree(path)
    return predicted


def activate(
    run_dir: Path,
    parts: DividedModel,
    overrides: Mapping[str, Any],
    fixed: Mapping[str, Any],
    engine: str,
    watcher: Watcher,
) -> Mapping[str, Any] | None:
    """Let the sites of a SuperLink score by a run's model; returns the summary.

    None if the ServerApp is on another machine.
    """
    if engine in SIMULATED:
        rule = "must be a SuperLink's name, whose sites have standing processes"
        raise ConfigError(f"engine {rule}, got {engine}")
    fixed = {**fixed, "strategy": STANDING}
    command = "federation activate"
    settings = settings_to_predict(run_dir, parts, overrides, fixed, "", engine, command)
    path = run_dir_of(settings, engine, predictions_folder())
    folder = carry_out(settings.model_copy(update={"run_dir": path}), engine, watcher)
    return folder.summary if folder else None


def describe(
    given: Mapping[str, Any], is_vertical: bool, engine: str, watcher: Watcher
) -> RunFolder | None:
    """Describe the parties' tables before training; returns as ``Training.carry_out``."""
    declared = all_methods().items()
    names = {method.needs_label: name for name, method in declared if method.describes}
    method = names[not is_vertical]
    return Training(method, given, engine, watcher=watcher, describes=True).carry_out()


def _collected(
    folder: RunFolder, parts: DividedModel, settings: Settings, output: Path
) -> JointPrediction:
    summary = folder.summary
    sites, active = home() / "sites", parts.active
    site = sites / active / summary["model_id"]
    write_atomically(output.resolve(), (site / f"predictions{settings.output}").read_bytes())
    facts = json.loads((site / "predictions.json").read_text())
    explained = {}
    if settings.explain:
        for party in (active, *parts.passive):
            path = sites / party / summary["model_id"] / "explanation.json"
            explained[party] = json.loads(path.read_text())
    predicted = Predicted(
        n_rows=facts["rows"],
        unmatched=facts["not_matched"],
        tables=summary["tables"],
        scores=facts["scores"],
        note=facts["note"],
        warnings=[*summary["facts"], *summary["warnings"]],
    )
    return predicted, explained
