"""Run a strategy and write its folder."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedapp.conversation import Checkpoint
from fedapp.data.schema import REGISTRY
from fedapp.errors import ConfigError, DivergedError, in_words
from fedapp.known_names import meaning, method_hint
from fedapp.messages.methods import all_methods, module_of_group
from fedapp.metrics import few_of_class
from fedapp.process import versions
from fedapp.run_files import OnRound, RoundInfo
from fedapp.run_folder import Checkpoints, RunFolder, RunState, Stage, new_run_dir, resumed_settings
from fedapp.sections import flatten
from fedapp.settings import Settings, defaults
from strategies.drive import Callbacks, Driver
from strategies.flower import FlowerStrategy
from strategies.handshake import ENGINES, shared_rows
from strategies.method import TreeStrategy

# Resolved settings
BOOSTING = (
    *("num_boost_round", "eta", "early_stopping_rounds"),
    *("scale_pos_weight", "min_child_weight"),
)
DEPLOYMENT = "deployment"  # an engine
# Alternatives where a method does not read a setting.
REMEDIES = {"base-margin": "; else the column may be a feature, or excluded with drop-columns"}
log = logging.getLogger("fedapp")


@dataclass(frozen=True, slots=True)
class FolderCallbacks(Callbacks):
    """Writes what a strategy reports into a run's folder."""

    folder: RunFolder
    checkpoints: Checkpoints
    settings: Settings
    on_round: OnRound | None = None  # the run stops if it returns False
    before_checkpoint: Callable[[], None] | None = None

    def begin(self, settings: Settings, state: RunState) -> None:
        """Write the parties' and the attempt's numbers; drop lines written after a checkpoint."""
        if not self.settings.asked_parties:
            self.folder.write_settings(self.settings.with_parties(settings.parties))
        self.folder.rewind(state.step, state.rounds)
        if state.attempt:
            self.checkpoints.restart(state)

    def warnings(self, simulated: bool) -> Iterable[str]:
        return shared_rows(self.settings) if simulated else ()

    def stage(self, stage: Stage) -> None:
        self.folder.note(stage)

    def end_round(self, line: RoundInfo) -> bool:
        """Write a line; False if the caller, or a stop file, stops the run."""
        self.folder.add_round(line)
        is_to_stop = self.folder.is_to_stop
        return not (self.on_round and self.on_round(line) is False) and not is_to_stop

    def checkpoint(self, checkpoint: Checkpoint, state: RunState) -> None:
        if self.before_checkpoint is not None:
            self.before_checkpoint()
        self.checkpoints.save(state, checkpoint.state)

    def write_model(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            self.folder.write(name, text)


def train(
    grid: Grid,
    settings: Settings,
    on_round: OnRound | None = None,
    before_checkpoint: Callable[[], None] | None = None,
    warnings: Sequence[str] = (),
    strategy: TreeStrategy[Any] | None = None,
) -> RunFolder:
    """Run a strategy and write its folder.

    Parameters
    ----------
    on_round : called after every round.
    before_checkpoint : called before every checkpoint.
    warnings : of what makes this engine slow.
    strategy : of these settings, in place of the method's own.

    Raises
    ------
    StoppedError : ``on_round`` or a stop file stopped the run.
    FedappError : the run failed; the folder's ``failure.json`` says why.
    """
    settings = resumed_settings(settings)
    strategy_class = load_strategy(settings.strategy)
    strategy_class.check_settings(settings)
    folder = RunFolder(
        Path(settings.run_dir) if settings.run_dir else new_run_dir(settings.strategy)
    )
    engine = engine_name(grid)
    with folder.written(), folder.resumable():
        if settings.resume:
            folder.check_unfinished()  # another process may have finished it meanwhile
            folder.forget_failure()
        else:
            folder.begin(settings)
        more: dict[str, Any] = {}  # about a failure
        try:
            driver = FlowerStrategy(strategy or strategy_class.of_run(settings))
            driver.ledger.path = folder.ledger_file
            checkpoints = Checkpoints(folder.path, lasting=engine == DEPLOYMENT)
            driver.callbacks = FolderCallbacks(
                folder, checkpoints, settings, on_round, before_checkpoint
            )
            if state := checkpoints.state:
                driver.resume(checkpoints, state)
            more["model_id"] = driver.protocol.model_id
            driver.warn_of_slowness(warnings)
            driver.start(grid)
        except BaseException as error:
            text = in_words(error) if isinstance(error, OSError) else str(error)
            more |= {"rounds": error.rounds} if isinstance(error, DivergedError) else {}
            folder.write_failure(type(error).__name__, text, **more)
            raise
        folder.write_summary(summarise(driver, engine))
        folder.finish()
    log.info("the run is in %s", folder.path)
    return folder


def load_strategy(name: str) -> type[TreeStrategy[Any]]:
    """The strategy class of a method; raise ConfigError if there is none."""
    method = all_methods().get(name)
    module = module_of_group(name.replace("-", "_"))
    # A method's messages and its strategy are in files of one name.
    strategy: type[TreeStrategy[Any]] | None = None
    if method and module:
        file = importlib.import_module(f"strategies.{module.__name__.rpartition('.')[2]}")
        strategy = file.STRATEGIES.get(name)
    if strategy is None:
        parties = {way: one.parties for way, one in all_methods().items() if one.trains}
        hint = method_hint(name, parties)
        if Path(name).suffix or name in REGISTRY:
            hint = ": a table is the setting data"
        raise ConfigError(f"strategy must be one of {', '.join(parties)}, got {name!r}{hint}")
    return strategy


def check_read(settings: Settings, given: Collection[str] = ()) -> None:
    """Raise ConfigError if the method does not read a setting that is given or changed."""
    method = settings.strategy
    read = load_strategy(settings.strategy).settings_read(settings)
    values = flatten(settings.as_config())
    # Given settings come first: a preset changes others.
    unread = {*given, *settings.changed} - set(read)
    for name in sorted(unread, key=lambda name: (name not in given, name)):
        raise unread_error(name, values[name], method, read)


def unread_error(name: str, value: object, method: str, read: Collection[str]) -> ConfigError:
    """About a setting that a method does not read, with one that it reads, or who reads it.

    ``name`` may lack the section's name.
    """
    section, _, kebab = name.rpartition(".")
    settings = [setting for setting in defaults() if name in (setting, setting.partition(".")[2])]
    readers = [
        other
        for other, strategy in all_strategies().items()
        if (section or not all_methods()[other].describes) and any(map(strategy.takes, settings))
    ]
    way = meaning(kebab, read, method, value)
    if "; " not in way:  # no setting is nearest
        way += f"; read by {', '.join(readers)}"
    rule = f"must be omitted for {method}, which does not read it"
    return ConfigError(f"{name} {rule}, got {value!r}{way}{REMEDIES.get(name, '')}")


def all_strategies() -> dict[str, type[TreeStrategy[Any]]]:
    """Every method's strategy by the method's name."""
    return {name: load_strategy(name) for name in all_methods()}


def engine_name(grid: Grid) -> str:
    """The engine of a grid: local, simulation or deployment."""
    return ENGINES.get(type(grid).__name__, DEPLOYMENT)


def label_of(settings: Settings) -> str:
    """Name of the label column, also of a data set's."""
    named = settings.data in REGISTRY
    return REGISTRY[settings.data].label if named else settings.label


def summarise(driver: Driver[Any], engine: str) -> dict[str, Any]:
    """Content of ``summary.json``."""
    strategy, settings, state = driver.protocol, driver.settings, driver.state
    outcome = driver.outcome
    assert outcome is not None
    read = strategy.settings_read(settings)
    counts = strategy.row_counts()
    if counts.get("test") != outcome.get("test_weight"):  # rows with weights have no intervals
        outcome = {**outcome, "intervals": {}}
    share = outcome.get("rarer_class")
    n_valid = (outcome.get("matched_rows") or counts).get("valid", 0)
    few = "" if share is None else few_of_class(share, n_valid)
    if few and outcome.get("threshold"):
        outcome = {**outcome, "threshold": {**outcome["threshold"], "few": True}}
    return {
        "strategy": settings.strategy,
        "engine": engine,
        "data": settings.data if strategy.simulated else "the parties' own tables",
        "objective": settings.objective,
        **({"objective_reason": strategy.objective_reason} if strategy.objective_reason else {}),
        "label": label_of(settings) if strategy.simulated else "",
        **({"positive_label": settings.positive_label} if settings.positive_label else {}),
        "eval_metrics": settings.eval_metrics,
        "weight": settings.weight if strategy.simulated else "",
        "settings_read": read,
        "boosting": {name: getattr(settings, name) for name in BOOSTING if "preset" in read},
        "round_name": strategy.round_name,
        "seed": settings.seed,
        "model_id": state.model_id,
        "parties": [
            {"name": name, "rows": hello.n_rows} for name, hello in strategy.parties.items()
        ],
        "rows": counts,
        **strategy.split_facts(),
        **strategy.table_facts(),
        "left_out": state.left_out,
        "warnings": [*state.warnings, *filter(None, [few])],
        "facts": state.facts,
        **outcome,
        "exchanges": state.exchanges,
        "bytes": dict(zip(("to_parties", "to_server"), state.bytes, strict=True)),
        "seconds": {
            name: round(seconds, 3)
            for name, seconds in zip(("total", "train"), state.seconds, strict=True)
        },
        "versions": versions(),
    }
