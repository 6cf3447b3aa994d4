"""What surrounds a run: checks before it, its folder and its engine, and what is added to it after.

``fedapp run`` and ``fedapp.run`` are this and nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedapp.config import Settings, load_settings, settings_named
from fedapp.engines import SIMULATED, check_engine, engine_of, told
from fedapp.errors import ConfigError, FedappError
from fedapp.folder_locks import check_free
from fedapp.frames import drop_frames, named_frames
from fedapp.home import RUNS, private_folder, shown
from fedapp.logs import Logs, check_packages, logged
from fedapp.packages import check_extra
from fedapp.report.summary import worse_than_alone
from fedapp.run_folder import RunFolder, new_run_dir, resumed_settings
from fedapp.watch import OnRound, Silent, Watcher


@dataclass(slots=True)
class Training:
    """A run from its settings to its page.

    Parameters
    ----------
    strategy : name of the method.
    given : settings that differ from their defaults, by their names.
    engine : local, simulation, or the name of a SuperLink.
    baselines : whether XGBoost or scikit-learn is also trained on pooled rows, and each party's.
    watcher : shown what is done.
    on_round : called after every round; by simulated engines only.
    with_page : whether the run's page is written, and what moves its predictions is looked into.
    folder : of the run; None before there is one, and where it lies on another machine.
    """

    strategy: str
    given: Mapping[str, Any]
    engine: str = "local"
    baselines: bool = False
    watcher: Watcher = field(default_factory=Silent)
    on_round: OnRound | None = None
    with_page: bool = True
    folder: RunFolder | None = None

    def carry_out(self) -> RunFolder | None:
        """Train a model and write the run's folder; None where it lies on another machine.

        Raises
        ------
        ConfigError, DataError : a setting or a table breaks a rule; before anything is started.
        StoppedError : ``on_round`` stopped the run.
        FedappError : the run cannot go on.
        """
        watcher = self.watcher
        watcher.begin("reading the settings")
        settings = self._checked()
        check_tables(settings, self.engine, watcher)
        settings = settings.model_copy(update={"run_dir": run_dir_of(settings, self.engine)})
        self.folder = RunFolder(Path(settings.run_dir)) if settings.run_dir else None
        watcher.tell(told(self.engine))
        kept = self.folder.kept if self.folder else None
        earlier = kept.seconds[0] if kept else 0.0  # of the attempts that the run goes on from
        with self._logged(settings) as logs:
            folder = carry_out(settings, self.engine, watcher, logs.before(self.on_round))
            if folder is None or not (folder.path / "summary.json").exists():
                watcher.tell("The run has finished; its folder lies where the ServerApp runs.")
                return None
            self._add(folder, settings)
            logs.note(folder)
            watcher.begin("writing the report")
            folder.set_total_seconds(earlier + watcher.seconds)  # for the page
            if self.with_page:
                from fedapp.report.page import write_report

                write_report([folder.path])
            folder.set_total_seconds(earlier + watcher.seconds)
            logs.end(folder)
        return folder

    def _logged(self, settings: Settings) -> AbstractContextManager[Logs]:
        """The run in other tools; between organisations it is the ServerApp that logs."""
        if self.folder is None or self.engine not in SIMULATED or not settings.logs:
            return nullcontext(Logs({}, 0, self.watcher.tell))
        self.watcher.begin(f"opening {' and '.join(settings.logs)}")
        return logged(settings, self.folder, self.engine, self.watcher.tell)

    def _checked(self) -> Settings:
        """The settings of the run."""
        given = settings_named(self.given, self.strategy)
        settings = load_settings({**given, "strategy": self.strategy})
        is_simulated = self.engine in SIMULATED
        if settings.init_model and is_simulated:
            path = str(Path(settings.init_model).resolve())
            settings = settings.model_copy(update={"init_model": path})
        settings = resumed_settings(settings)
        check_method(settings, self.engine, given)
        if self.baselines and settings.init_model:
            rule = "must be empty with --baselines, which begin without a model"
            raise ConfigError(f"init-model {rule}, got {settings.init_model}")
        if self.baselines and not is_simulated:
            rule = "must have all rows in one place"
            raise ConfigError(f"--baselines {rule}, got --engine {self.engine}")
        if self.on_round and not is_simulated:
            rule = "must be omitted where the run's folder lies on another machine"
            raise ConfigError(f"on_round {rule}, got engine={self.engine!r}")
        return settings

    def _add(self, folder: RunFolder, settings: Settings) -> None:
        """Write into the summary what is asked for and can be told where all rows lie here."""
        if self.baselines:
            from simulations.baselines import run_baselines

            self.watcher.begin("training the baselines")
            found, summary = run_baselines(settings, folder.path), folder.summary
            warnings = [*summary["warnings"], *worse_than_alone(summary, found["alone"])]
            folder.add_to_summary({"baselines": found, "warnings": warnings})
        if self.with_page and self.engine in SIMULATED:
            from simulations.contributions import contributions

            self.watcher.begin("explaining the model on test rows")
            folder.add_to_summary({"contributions": contributions(settings, folder.path)})
        if drop_frames(folder.path):
            folder.add_to_summary({"data": named_frames(settings.data, folder.path)})


def run_dir_of(settings: Settings, engine: str, parent: Path = RUNS) -> str:
    """Where the run is written, by default a new folder in ``parent``; a SuperLink elsewhere
    chooses a place of its own."""
    if not settings.run_dir and engine not in SIMULATED:
        return ""
    run_dir = Path(settings.run_dir or new_run_dir(settings.strategy, parent)).resolve()
    if not settings.resume:
        RunFolder(run_dir).check_new()
    private_folder(run_dir)
    return str(run_dir)


@contextmanager
def passing(run_dir: str, stays: bool) -> Iterator[None]:
    """Delete a run's folder when the block has ended well; else keep it, and say where it is.

    Parameters
    ----------
    run_dir : empty where the folder lies on another machine.
    stays : whether it is kept anyway.
    """
    try:
        yield
    except FedappError as error:
        if run_dir:
            error.add_note(f"the run that failed is kept in {shown(Path(run_dir))}")
        raise
    if run_dir and not stays:
        shutil.rmtree(run_dir)


def check_method(settings: Settings, engine: str, given: Collection[str] = ()) -> None:
    """Hold that the engine is known, and that the method trains, is set well, and can run here.

    Parameters
    ----------
    given : names of settings that were given, which the method must read.

    Raises
    ------
    ConfigError : it is not.
    """
    from fedapp.messages.methods import all_methods
    from fedapp.server_app import check_read, load_strategy

    check_engine(engine)
    strategy = load_strategy(settings.strategy)
    if not all_methods()[settings.strategy].trains:
        rule = f"must be one that trains (fedapp predict --inference {settings.strategy} predicts)"
        raise ConfigError(f"strategy {rule}, got {settings.strategy!r}")
    strategy.check_settings(settings)
    check_read(settings, given)
    if engine in SIMULATED:
        check_extra(settings.strategy)
        check_packages(settings.logs)


def check_tables(settings: Settings, engine: str, watcher: Watcher) -> None:
    """Check tables that are here by all rules of a run before it is started; show its warnings.

    Raises
    ------
    DataError, ConfigError : a table breaks one.
    """
    if engine in SIMULATED:
        from fedapp.kernels import load_ahead
        from fedapp.messages.methods import all_methods
        from simulations.checks import check_tables

        watcher.begin("reading and checking the tables")
        if engine == "local":
            is_boosted = all_methods()[settings.strategy].baseline == "boosted"
            clients = f"clients.{settings.strategy.replace('-', '_')}"
            if is_boosted:
                load_ahead([clients, "xgboost"], ("fedapp.trees.forest", "fedapp.histograms.floor"))
            else:
                load_ahead([clients], ("fedapp.histograms", "fedapp.trees.boosted"))
        for text in check_tables(settings):
            watcher.tell(f"! {text}")


def carry_out(
    settings: Settings, engine: str, watcher: Watcher, on_round: OnRound | None = None
) -> RunFolder | None:
    """Have an engine carry out a run, and show where it is; its folder, where that is known here.

    Parameters
    ----------
    settings : with the run's folder, where it lies on this machine.
    engine : see ``engine_of``.
    """
    run = engine_of(engine, watcher.begin, on_round)
    if not settings.run_dir:
        return run(settings)
    folder = RunFolder(Path(settings.run_dir))
    check_free(folder.path)  # before Flower is started
    with folder.held(), watcher.run(folder, settings.watched_metric):
        return run(settings)
