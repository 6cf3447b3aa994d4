"""Flower strategy that drives a method's conversation.

One exchange is one Flower round: ``configure_train`` returns the messages of the pending exchange,
``aggregate_train`` passes the replies to the conversation. So Flower's ``Strategy.start`` can drive
a method too, and ends with the same model. ``start`` here adds what long runs need: it polls for
replies every few milliseconds, resends lost messages, waits for approvals, and ends with the
conversation.

Which settings a method reads: a class declares its additions to those of its bases.
"""

from __future__ import annotations

import logging
import math
import secrets
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, Signature
from itertools import count
from types import FrameType
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedapp.conversation import (
    Checkpoint,
    Conversation,
    Exchange,
    Parties,
    Progress,
    Saved,
    SavedModel,
    ask,
)
from fedapp.errors import (
    ConfigError,
    DivergedError,
    FedappError,
    PartyError,
    ProtocolError,
    StoppedError,
    as_plain,
    as_protocol_error,
)
from fedapp.messages.fields import Introduction, Reply, Request
from fedapp.messages.handshake import GreetReply, GreetRequest
from fedapp.messages.vertical import Parcel
from fedapp.messages.wire import WAITING, Envelope, records_of, to_bytes, to_content
from fedapp.run_folder import RoundInfo, RunState, Stage, Stages, without_nan
from fedapp.settings import (
    BoostingSettings,
    ConstraintSettings,
    RunSettings,
    Section,
    Settings,
    SplitSettings,
    TableSettings,
    TreeSettings,
    Value,
    about_settings,
    defaults,
    flatten,
    load_settings,
    naming_python_keywords,
    python_name,
    setting_names,
    settings_of,
)
from fedapp.trees.objective import AUTO, CUSTOM, LOSSES, Objective, check_custom_is_set
from strategies.delivery import Courier, Ledger, Patience, read_reply
from strategies.handshake import (
    check_steps,
    check_tables,
    check_texts,
    clock_warnings,
    find_nodes,
    parties_by_name,
    site_names,
    table_warnings,
)

TREE_SETTINGS, BOOSTING_SETTINGS = setting_names(TreeSettings), setting_names(BoostingSettings)
# ``data`` of a strategy that names no table.
LOCAL_TABLES = "the parties' own tables"
# Settings of fedapp's ServerApp; a strategy in another app does not take them.
OF_APP = frozenset(("strategy", "run-dir", "resume", "log"))
# Settings of the tables, which are set at the parties, where the tables are.
OF_TABLES = setting_names(TableSettings) - {"positive-label"} | {
    *("base-margin", "partition", "columns", "least-bin-rows", "share-column-names"),
    "allow-export",
}
SPLIT_SETTINGS, CONSTRAINTS = setting_names(SplitSettings), setting_names(ConstraintSettings)
INIT_MODEL = frozenset(("init-model",))
BASE_MARGIN = frozenset(("base-margin",))
# Alternatives where a method does not read a setting.
REMEDIES = {"base-margin": "; else the column may be a feature, or excluded with drop-columns"}
ALL_OBJECTIVES = tuple(name for name in LOSSES if name != CUSTOM)
OBJECTIVES_OR_FUNCTION = (*ALL_OBJECTIVES, CUSTOM)
log = logging.getLogger("fedapp")

Summary = Mapping[str, Any]  # a method's part of summary.json
APPROVAL_POLL = 2.0  # seconds
CHECKPOINT_SECONDS = 0.5  # after a checkpoint, during which another is not stored if it is optional
NO_WRAP = (
    "as it is: a wrapper that reads or changes weights, such as Flower's differential privacy, "
    "cannot serve trees (PAX has epsilon)"
)
# Arguments of FedAvg that no method takes, and why or what to use.
SCORED = "training replies have the scores of all parties"
OF_FEDAVG: Mapping[str, str] = {
    "fraction_train": "a round takes all parties' rows; subsample draws from the rows of each",
    "fraction_evaluate": SCORED,
    "min_train_nodes": "min_parties is the number that a run continues with if others are lost",
    "min_evaluate_nodes": SCORED,
    "min_available_nodes": "parties is the number that a run waits for",
    "weighted_by_key": "each row counts once, or by the column that weight names at its party",
    "arrayrecord_key": "a method's messages have records of their own",
    "configrecord_key": "a method's messages have records of their own",
    "train_metrics_aggr_fn": "eval_metric names scores, which are computed over all rows",
    "evaluate_metrics_aggr_fn": "eval_metric names scores, which are computed over all rows",
    **dict.fromkeys(
        (
            "initial_arrays",
            "num_rounds",
            "timeout",
            "train_config",
            "evaluate_config",
            "evaluate_fn",
        ),
        "it is an argument of start",
    ),
}
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

I = TypeVar("I", bound=Introduction)  # noqa: E741


class ReadsSettings:
    """Base of strategies that declares what a method reads.

    ``method`` is its name; ``reads`` are the general settings that a class reads beside those of
    its bases; ``sections`` are tables of the run config that it shares with other methods;
    ``round_name`` is the term for a reported round; ``objectives`` are those that it can train.
    """

    method: ClassVar[str] = ""
    reads: ClassVar[frozenset[str]] = setting_names(RunSettings, TableSettings)
    round_name: ClassVar[str] = "boosting round"
    objectives: ClassVar[tuple[str, ...]] = ALL_OBJECTIVES
    sections: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        """Declare the settings, their defaults and what they are as keyword arguments."""
        super().__init_subclass__()
        if not cls.method:
            return
        about, lines, parameters = about_settings(), [], {}
        for name, value in defaults().items():
            if cls.takes(name) and name not in OF_APP | OF_TABLES:
                keyword = cls._keyword(name)
                lines += [f"    {keyword} : {about[name].text}"] * (keyword not in parameters)
                parameters[keyword] = Parameter(keyword, Parameter.KEYWORD_ONLY, default=value)
        cls.__signature__ = Signature([*parameters.values()])  # type: ignore[attr-defined]
        text = (cls.__doc__ or "").rstrip()
        cls.__doc__ = "\n".join([text, "", "    Parameters", "    ----------", *lines, "    "])

    @classmethod
    def takes(cls, name: str) -> bool:
        """Whether the method reads a setting, by its full name."""
        section, dot, _ = name.partition(".")
        if dot:
            return section in {cls.method, *cls.sections}
        return any(name in vars(base).get("reads", ()) for base in cls.__mro__)

    @classmethod
    def _keyword(cls, name: str) -> str:
        return python_name(name.rpartition(".")[2])

    @classmethod
    def of_run(cls, settings: Settings) -> Self:
        """A strategy with those of the app's settings that it reads."""
        config = flatten(settings.as_config())
        names = [name for name in config if name not in OF_APP and cls.takes(name)]
        return cls(**{name: config[name] for name in names})

    @classmethod
    def constructor_settings(cls, given: Mapping[str, Any]) -> Settings:
        """Settings from a constructor's arguments, see ``TreeStrategy``."""
        for name in OF_FEDAVG.keys() & given.keys():
            raise ConfigError(f"{name} must be omitted: {OF_FEDAVG[name]}, got {given[name]!r}")
        section_names = {
            cls._keyword(name): name for name in defaults() if "." in name and cls.takes(name)
        }
        with naming_python_keywords({name: keyword for keyword, name in section_names.items()}):
            # A name such as max_depth may be a setting of the method's section and a general one.
            named: dict[str, Value] = {}
            for name, value in flatten(given).items():
                general = name.replace("_", "-")
                if (keyword := name.replace("-", "_")) not in section_names or cls.takes(general):
                    named[name] = value
                elif section_names[keyword] not in given:
                    named[section_names[keyword]] = value
                elif value != defaults().get(general):  # a whole run config has both
                    named[name] = value
            named = settings_of(cls.method, named)
            if (method := named.setdefault("strategy", cls.method)) != cls.method:
                rule = f"must be {cls.method} for {cls.__name__}"
                raise ConfigError(f"strategy {rule}, got {method!r}")
            named.setdefault("data", LOCAL_TABLES)
            settings = load_settings(named)
            of_tables = OF_TABLES if settings.data == LOCAL_TABLES else frozenset()
            for name, value in settings.changed.items():
                if name in of_tables - {"data"} and name in named:
                    rule = "must be set where the tables are read, at the parties"
                elif name in OF_APP - {"strategy"}:
                    rule = "must be omitted: fedapp's own ServerApp keeps run folders"
                elif not cls.takes(name):
                    rule = f"must be omitted for {cls.method}, which does not read it"
                else:
                    continue
                raise ConfigError(f"{name} {rule}, got {value!r}")
            cls.check_settings(settings)
            return settings

    @classmethod
    def exchanges_a_round(cls, settings: Settings) -> int:
        """Largest number of exchanges of one of ``most_rounds``."""
        return 1

    @classmethod
    def exchanges_around(cls, settings: Settings) -> int:
        """Largest number of exchanges before the first round and after the last."""
        return 20  # greetings, cuts under masks, the last round's scores and the final ones

    @classmethod
    def check_settings(cls, settings: Settings) -> None:
        """Check that the method can serve a run's settings, its section included."""
        if settings.objective not in (AUTO, *cls.objectives):
            objectives = ", ".join((AUTO, *cls.objectives))
            rule = f"must be one of {objectives} for {settings.strategy}"
            got = "a function" if settings.objective == CUSTOM else settings.objective
            raise ConfigError(f"objective {rule}, got {got}")
        try:
            check_custom_is_set(settings.objective)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        cls.section_settings(settings)

    @classmethod
    def section_settings(cls, settings: Settings) -> Section | None:
        """The method's section of the run config, checked; None where it has none."""
        return None

    @classmethod
    def most_rounds(cls, settings: Settings) -> int:
        """Rounds of training unless something stops it early."""
        return settings.num_boost_round

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        """Fields of the run's ``Plan`` that depend only on its settings."""
        read = set(cls.settings_read(settings))
        names = {"max_depth", "subsample", "max_bin"}
        general = {one: getattr(settings, one) for one in names if one.replace("_", "-") in read}
        return {"rounds": cls.most_rounds(settings), **general}

    @classmethod
    def settings_read(cls, settings: Settings) -> tuple[str, ...]:
        """Names of the settings that this method reads: general ones and its section's."""
        general = frozenset().union(*(vars(base).get("reads", ()) for base in cls.__mro__))
        of_sections = (
            f"{section}.{name}"
            for section in (settings.strategy, *sorted(cls.sections))
            for name in settings.sections.get(section, {})
        )
        return (*sorted(general), *of_sections)


class TreeStrategy(ReadsSettings, Strategy, Generic[I]):
    """A Flower strategy whose protocol is a conversation.

    ``introduction`` is the class of the replies to ``greeting``, which opens every run.

    Parameters
    ----------
    **settings
        Names and defaults of the run config. Settings of the method's section come without the
        section's name (``bins``, not ``pax.bins``); lambda and alpha are ``reg_lambda`` and
        ``reg_alpha``. ``**context.run_config`` works as it is.

    Raises
    ------
    ConfigError : a setting breaks its rule, or this method does not read it.

    Attributes
    ----------
    section : the method's section of the settings, or None.
    callbacks : receives the run's events; does nothing by default.
    ledger : counts the messages that ``start`` has sent.
    """

    introduction: type[I]
    section: Section | None

    def __init__(self, **settings: Any) -> None:
        self.settings = self.constructor_settings(settings)
        self.section = self.section_settings(self.settings)
        self.callbacks = Callbacks()
        self.ledger = Ledger()
        self._saved: Saved | None = None
        self._state = RunState(secrets.token_hex(8))
        self._checkpoint_step = 0
        self.parties: Parties[I] = Parties({})
        self.objective_reason = ""
        self.outcome: Summary | None = None
        self._is_stopped = False
        self._is_asked = False  # whether the pending exchange's messages have been sent
        self._make_model: Callable[[], str] | None = None
        self._arrays = ArrayRecord()
        self._scores = MetricRecord(), MetricRecord()  # of training and validation rows
        self._n_failed = 0
        self._addresses: dict[str, int] = {}
        self._clocks: dict[str, float] = {}
        self._pending: Exchange | None = None
        self._conversation: Conversation[Summary] | None = None
        self._last_round = (self.ledger.to_parties, self.ledger.to_server, time.perf_counter())
        self._start = time.perf_counter()
        self._saved_at = -math.inf  # when a checkpoint was stored
        self._stages = Stages(lambda stage: self.callbacks.stage(stage))

    def resume(self, saved: Saved, state: RunState) -> None:
        """Resume from an earlier attempt's checkpoint; call before the start."""
        self._saved, self._state = saved, replace(state, attempt=state.attempt + 1)
        self._checkpoint_step = state.step
        self.ledger.to_parties, self.ledger.to_server = state.bytes
        self._last_round = (self.ledger.to_parties, self.ledger.to_server, time.perf_counter())

    @abstractmethod
    def greeting(self) -> Request:
        """The request that opens a run."""

    def greeting_again(self) -> Request | None:
        """A second opening request, once the parties' tables are known; None if not needed."""
        return None

    def plan(self) -> dict[str, Any]:
        """The fields of the run's ``Plan``."""
        names, fingerprints = tuple(self._state.keys), tuple(self._state.keys.values())
        return self.planned(self.settings) | {"parties": names, "fingerprints": fingerprints}

    @abstractmethod
    def conversation(self, parties: Parties[I], saved: Saved | None) -> Conversation[Summary]:
        """The protocol between known parties; ends with its part of the summary.

        ``saved`` is the state at the last checkpoint of an earlier attempt, or None.
        """

    @abstractmethod
    def suggested_objective(self) -> tuple[Objective, str]:
        """The objective that the parties' labels suggest, and why."""

    def resolve_objective(self) -> None:
        """Resolve ``objective=auto`` from the parties' labels and store it in the settings."""
        if self.settings.objective != AUTO or self.settings.model:
            return
        objective, why = self.suggested_objective()
        self.settings = self.settings.settled(objective)
        self.objective_reason = why
        log.info("objective %s: %s", objective, why)

    @property
    def _is_step(self) -> bool:
        # Greetings are not steps of the run: they are sent again by every attempt.
        assert self._pending is not None
        return all(request.is_step for request in self._pending.requests.values())

    @property
    def _step(self) -> int:
        """Step of the pending exchange; 0 for a greeting."""
        return self._state.step if self._is_step else 0

    # Flower's hooks

    @property
    def num_rounds(self) -> int:
        """Upper bound on the exchanges of a run, for Flower's ``start``."""
        settings = self.settings
        rounds = self.most_rounds(settings) * self.exchanges_a_round(settings)
        # A round in which a party is lost restarts, and masked sums then take two exchanges.
        times = 2 if settings.min_parties else 1
        return times * (self.exchanges_around(settings) + rounds)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages of the pending exchange; none once the run has ended.

        The first call waits for the nodes and starts the conversation.

        Parameters
        ----------
        arrays : what the last ``aggregate_train`` returned; empty in the first call.
        config : must be empty: settings are arguments of the constructor.

        Raises
        ------
        ConfigError : ``arrays`` is not the last model, replies have not been aggregated, the
            number of nodes is not that of the parties, or Flower's ``start`` has fewer rounds
            than ``num_rounds``.
        """
        _check_empty("config", config)
        if self._is_asked:
            raise ConfigError(f"aggregate_train must be given the replies of each round {NO_WRAP}")
        if arrays is not self._arrays and _bytes_of(arrays) != _bytes_of(self._arrays):
            is_first = self._conversation is None
            remedy = "init_model continues a model" if is_first else f"the last model {NO_WRAP}"
            raise ConfigError(f"arrays must be {'empty; ' if is_first else ''}{remedy}")
        if self._conversation is None:
            self._check_rounds(_rounds_of_flowers_start())
            wait, n_lost = self._stages.wait, len(self._state.left_out)
            n_asked = self.settings.asked_parties
            nodes = find_nodes(grid, n_asked, n_lost, self.settings.start_deadline, wait)
            if not n_asked:
                self.settings = self.settings.with_parties(len(nodes))
                self.check_settings(self.settings)
            self.callbacks.begin(self.settings, self._state)
            self._addresses = {f"node {node}": node for node in nodes}
            self._conversation = self._whole_run()
            self._advance(None)
        self._is_asked = self._pending is not None
        return self._messages() if self._pending else ()

    def _messages(self) -> list[Message]:
        assert self._pending is not None
        encoded = dict[int, bytes]()  # by id; a request that all parties share is encoded once
        state, messages = self._state, list[Message]()
        for party, request in self._pending.requests.items():
            steps = (self._step, self._checkpoint_step, state.attempt, state.gap(party))
            envelope = Envelope(state.model_id, *steps, self.settings.strategy)
            records = records_of(self._laid_out(party, request, encoded), envelope)
            address = self._addresses[party]
            messages.append(Message(records, address, request.kind, group_id=str(self._step)))
        return messages

    def _laid_out(self, party: str, request: Request, encoded: dict[int, bytes]) -> bytes:
        """Encode a request, with the letters that wait for the party."""
        assert self._pending is not None
        if request.carries_letters:
            relay = self._pending.relay
            return to_bytes(to_content(request, party, relay.take(party) if relay else ()))
        if id(request) not in encoded:
            encoded[id(request)] = to_bytes(to_content(request, party))
        return encoded[id(request)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Pass the replies to the conversation, up to its next request.

        Returns
        -------
        The model so far as ``model.json`` in the array ``model``, empty before the first round and
        where the server has none; and the training rows' scores of the last finished round.

        Raises
        ------
        FedappError : a reply is missing, refused or breaks a rule, and the run cannot continue.
        """
        if not self._is_asked:
            if self._conversation is None:
                raise ConfigError("aggregate_train must come after configure_train")
            return self._arrays, self._scores[0]
        self._take({reply.metadata.src_node_id: reply for reply in replies})
        return self._model_so_far(), self._scores[0]

    def _take(self, by_address: Mapping[int, Message]) -> None:
        assert self._pending is not None
        self._is_asked = False
        answers, parcels_from = dict[str, Reply](), dict[str, list[Parcel]]()
        self._n_failed = 0
        for party in self._pending.requests:
            try:
                message = by_address.get(self._addresses[party])
                answers[party], parcels_from[party] = self._read(message, party)
            except FedappError as error:
                self._leave_out(party, error)
        if relay := self._pending.relay:
            for party, parcels in parcels_from.items():
                with as_protocol_error(party, self._pending.reply.__name__, "parcels"):
                    relay.collect(party, parcels)
        steps = self._pending.requests if self._is_step else ()
        asked = {**self._state.asked, **dict.fromkeys(steps, self._state.step)}
        self._note(exchanges=self._state.exchanges + 1, asked=asked)
        self._advance(answers)

    def _model_so_far(self) -> ArrayRecord:
        if self._make_model is not None:
            model = np.frombuffer(self._make_model().encode(), dtype=np.uint8)
            self._arrays = ArrayRecord({"model": FlowerArray(model)})
            self._make_model = None
        return self._arrays

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: the training replies carry the scores. ConfigError if there is a config."""
        _check_empty("evaluate_config", config)
        return ()

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Validation scores of the last finished round; at the end those of the test rows."""
        return self._scores[1]

    def summary(self) -> None:
        """Log what is about to run."""
        log.info(
            "%s on %s, model %s%s",
            type(self).__name__,
            self.settings.data,
            self._state.model_id,
            f", resumed after step {self._state.step}" if self._state.step else "",
        )

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Train to the end; a strategy trains once.

        Parameters
        ----------
        grid : connection to the parties.
        initial_arrays : must be empty; ``init_model`` of the constructor continues a model.
        num_rounds : largest number of exchanges, at least ``strategy.num_rounds``. The constructor
            sets the number of boosting rounds.
        timeout : seconds for all replies of an exchange; by default ``exchange_deadline``.
        train_config, evaluate_config : must be empty.
        evaluate_fn : called with the exchange's number and the model so far, before the first
            exchange and after each that has changed the model.

        Returns
        -------
        Result : the model, and by exchange the scores of training rows (``train_metrics``) and of
            validation rows (``evaluate_metrics``), the last of which are those of the test rows.

        Raises
        ------
        ConfigError : an argument cannot be served.
        FedappError : the run cannot continue, or a callback has stopped it.
        """
        self._check_rounds(num_rounds)
        _check_empty("evaluate_config", evaluate_config or {})
        if self._conversation is not None:
            raise ConfigError("strategy must be a new one for each run, got one that has run")
        self.summary()
        patience = Patience(self.settings.resend_after, timeout or self.settings.exchange_deadline)
        courier = Courier(grid, self.ledger, patience, self._name_waiting, self._clocks)
        arrays, config, result = initial_arrays or ArrayRecord(), train_config, Result()
        if evaluate_fn and (metrics := evaluate_fn(0, arrays)):
            result.evaluate_metrics_serverapp[0] = metrics
        with self.ledger:
            for number in count(1):
                start = time.perf_counter()
                messages = self.configure_train(number, arrays, config or ConfigRecord(), grid)
                if self._pending is None:
                    break
                if self._is_stopped:  # by a callback, here or in another process
                    rule = f"the run was stopped after round {self._state.rounds}"
                    raise StoppedError(f"{rule}; {self.callbacks.way_on()}")
                try:
                    self._exchange(self._pending, messages, courier, start)
                except DivergedError as error:
                    raise self._at_round(error) from error
                if self._scores[0]:
                    result.train_metrics_clientapp[number] = self._scores[0]
                    result.evaluate_metrics_clientapp[number] = self._scores[1]
                evaluate = evaluate_fn if self._make_model else None
                if evaluate and (metrics := evaluate(number, self._model_so_far())):
                    result.evaluate_metrics_serverapp[number] = metrics
                arrays = self._arrays
        result.arrays = self._model_so_far()
        return result

    def _at_round(self, error: DivergedError) -> DivergedError:
        """The same error, with the round and what to do, once a round has been finished."""
        if not (rounds := self._state.finished_rounds):
            return error
        return DivergedError(
            f"eta must be smaller, got {self.settings.eta}: training diverges in round "
            f"{rounds + 1}: {error}; a larger lambda or a max-delta-step may help too; "
            f"num-boost-round={rounds} ends before it, and so does the run if it is resumed",
            rounds,
        )

    def _check_rounds(self, num_rounds: int | None) -> None:
        """Refuse a number of exchanges with which the run might end without a model."""
        if num_rounds is not None and num_rounds < self.num_rounds:
            rule = f"must be >= {self.num_rounds} (strategy.num_rounds), as each is one exchange"
            remedy = "the strategy's own arguments say how much is trained"
            raise ConfigError(f"num_rounds {rule}, got {num_rounds}; {remedy}")

    def _exchange(
        self, pending: Exchange, messages: Iterable[Message], courier: Courier, start: float
    ) -> None:
        request, n_rounds = next(iter(pending.requests.values())), self.most_rounds(self.settings)
        end = self._stages.begin(request, self._state.rounds + 1, n_rounds, pending.seconds)
        by_party = dict(zip(pending.requests, messages, strict=True))
        replies = self._answers(courier, by_party).values()
        self._take({reply.metadata.src_node_id: reply for reply in replies})
        end()
        self.ledger.flush_at_times()
        if request.kind.startswith("train."):
            before, training = self._state.seconds
            self._note(seconds=(before, training + time.perf_counter() - start))

    def _name_waiting(self, parties: Sequence[str], away: Sequence[str]) -> None:
        """Show whose replies are missing; an unnamed node by its registered site."""
        sites = site_names()
        names = {party: sites.get(party, party) for party in parties}
        self._stages.name_waiting([*names.values()], [names[party] for party in away])

    def _answers(self, courier: Courier, messages: Mapping[str, Message]) -> dict[str, Message]:
        """Replies by party; asks again while people have yet to approve the run."""
        replies = courier.deliver(messages, self._step)
        deadline = time.monotonic() + self.settings.start_deadline
        while waiting := {
            party: reply.error.reason
            for party, reply in replies.items()
            if reply.has_error() and reply.error.code == WAITING
        }:
            if time.monotonic() > deadline:
                break
            self._stages.wait("; ".join(as_plain(reason or "") for reason in waiting.values()))
            time.sleep(APPROVAL_POLL)
            again = {party: messages[party] for party in waiting}
            replies |= courier.deliver(again, self._step)
        return replies

    # The run

    def _whole_run(self) -> Conversation[Summary]:
        n_lost = len(self._state.left_out)
        greetings = dict.fromkeys(self._addresses, GreetRequest())
        greeted = yield from ask(greetings, GreetReply, may_fail=n_lost)
        # The first round's time is without that in which the parties' processes have started.
        self._last_round = (*self._last_round[:2], time.perf_counter())
        check_texts(greeted.values())
        if not self._state.keys:
            members = parties_by_name(greeted.values())
            self._note(keys={name: reply.fingerprint for name, reply in members.items()})
        self.ledger.rename({node: reply.name for node, reply in greeted.items()})
        openings = dict.fromkeys((node for node in greetings if node in greeted), self.greeting())
        n_lost -= len(greetings) - len(greeted)
        replies = yield from ask(openings, self.introduction, may_fail=n_lost)
        check_texts(replies.values())
        for node, reply in replies.items():
            if reply.name != (name := greeted[node].name):
                rule = f"must be {name}, as it was when the party was greeted, got {reply.name}"
                raise ProtocolError(name, type(reply).__name__, "name", rule)
        names = {node: reply.name for node, reply in replies.items()}
        last_steps = self._state.asked
        self._note(asked=dict.fromkeys(names.values(), self._state.step))
        self.ledger.rename(names)
        # From here on parties are addressed by name: before, only their nodes were known.
        self._addresses = {name: self._addresses[node] for node, name in names.items()}
        self.parties = parties_by_name(replies.values())
        for excluded in self._state.left_out:
            if excluded["party"] in self.parties:
                self.parties.leave(excluded["party"])
        check_tables(self.parties, self._state)
        check_steps(self.parties, last_steps, self._checkpoint_step)
        if request := self.greeting_again():
            hellos = yield from ask(self.parties.all(request), self.introduction)
            check_texts(hellos.values())
            self.parties = Parties(hellos)
        self._note(fingerprints={name: hello.fingerprint for name, hello in self.parties.items()})
        ahead = {name: self._clocks[node] for node, name in names.items() if node in self._clocks}
        for text in (*table_warnings(self.parties), *clock_warnings(ahead)):
            self.warn_once(text)
        self.resolve_objective()
        return (yield from self.conversation(self.parties, self._saved))

    def _advance(self, answers: Mapping[str, Reply] | None) -> None:
        assert self._conversation is not None
        self._pending = None
        while True:
            try:
                event = self._conversation.send(answers)  # type: ignore[arg-type]
            except StopIteration as end:
                self.outcome = end.value
                test = _named("test", end.value.get("metrics", {}).get("test", {}))
                self._scores = self._scores[0], MetricRecord({**self._scores[1], **test})
                return
            if isinstance(event, Exchange):
                self._pending = event
                if self._is_step:
                    self._note(step=self._state.step + 1)
                return
            answers = None
            match event:
                case Checkpoint():
                    self._save(event)
                case Progress():
                    self._report(event)
                case SavedModel(files):  # at once: what comes after it may fail
                    self.callbacks.write_model(files)
                    self._make_model = next(iter(files.values())).__str__

    def _read(self, message: Message | None, party: str) -> tuple[Reply, list[Parcel]]:
        assert self._pending is not None
        state = self._state
        if message is None:
            waited = f"no answer within {self.settings.exchange_deadline:g} s"
            raise PartyError(party, self._step, waited)
        expected = self._pending.reply, state.model_id, self._step
        reply, parcels = read_reply(message, party, *expected)
        if self._pending.check:
            self._pending.check(party, reply)
        return reply, parcels

    def _leave_out(self, party: str, error: FedappError) -> None:
        """Exclude a party if enough others remain, or stop the run."""
        if isinstance(error, DivergedError):
            raise error
        assert self._pending is not None
        if self._pending.may_fail is not None:
            # A greeting: parties that an earlier attempt has excluded need not come back.
            self._n_failed += 1
            if self._n_failed > self._pending.may_fail:
                raise error
            return
        fewest = self.settings.min_parties or self.settings.parties
        if len(self.parties) - 1 < fewest:
            raise error
        self.parties.leave(party)
        reason = error.reason if isinstance(error, PartyError) else str(error)
        entry = {"party": party, "step": self._state.step, "reason": reason}
        self._note(left_out=(*self._state.left_out, entry))
        log.warning("%s is excluded from step %d on: %s", party, self._state.step, reason)

    def _save(self, checkpoint: Checkpoint) -> None:
        self._note(finished_rounds=checkpoint.rounds)
        self._make_model = checkpoint.model
        if checkpoint.is_optional and time.monotonic() - self._saved_at < CHECKPOINT_SECONDS:
            return
        self._checkpoint_step = self._state.step
        self.ledger.flush()
        self.callbacks.checkpoint(checkpoint, self.state)
        self._saved_at = time.monotonic()

    def warn(self, text: str) -> None:
        """Warn the user now, and again in the summary."""
        self._note(warnings=(*self._state.warnings, text))
        log.warning("%s", text)

    def warn_once(self, text: str) -> None:
        """Warn, unless this run has already, also before an interruption."""
        if text not in self._state.warnings:
            self.warn(text)

    def _report(self, progress: Progress) -> None:
        to_parties, to_server, start = self._last_round
        now = time.perf_counter()
        self._last_round = (self.ledger.to_parties, self.ledger.to_server, now)
        line: RoundInfo = {
            "round": progress.round,
            "rounds": self.most_rounds(self.settings),
            "trees": progress.n_trees,
            "leaves": progress.n_leaves,
            "train": without_nan(progress.train),
            "valid": without_nan(progress.valid),
            "exchanges": self._state.exchanges,
            "bytes": {
                "to_parties": self.ledger.to_parties - to_parties,
                "to_server": self.ledger.to_server - to_server,
            },
            "seconds": round(now - start, 4),
        }
        self._scores = _named("train", progress.train), _named("valid", progress.valid)
        for record in self._scores:
            record["round"] = progress.round
        self._note(rounds=progress.round)
        self._is_stopped = self.callbacks.end_round(line) is False
        scores = progress.valid or progress.train
        shown = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
        log.info("round %d/%d  %s", progress.round, line["rounds"], shown)

    @property
    def simulated(self) -> bool:
        """Whether the parties have parts of the table that ``data`` names."""
        return any(hello.simulated for hello in self.parties.values())

    def row_counts(self) -> dict[str, int]:
        """Training, validation and test rows of all parties, where the hello reports them."""
        return {}

    def table_facts(self) -> Mapping[str, Any]:
        """The summary's part about the parties' columns."""
        return {}

    @property
    def state(self) -> RunState:
        """State of the run by now."""
        before, training = self._state.seconds
        seconds = before + time.perf_counter() - self._start, training
        sent = self.ledger.to_parties, self.ledger.to_server
        return replace(self._state, bytes=sent, seconds=seconds)

    def _note(self, **facts: Any) -> None:
        """Change fields of the state; ``state`` adds what is counted elsewhere."""
        self._state = replace(self._state, **facts)


def _named(subset: str, scores: Mapping[str, float]) -> MetricRecord:
    """Scores as Flower's metrics, such as ``valid_auc``."""
    return MetricRecord({f"{subset}_{name}": float(value) for name, value in scores.items()})


def _check_empty(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a config of a round, which no method reads."""
    if config:
        rule = "must be empty, settings are arguments of the strategy"
        raise ConfigError(f"{name} {rule}, got {', '.join(config)}")


def _rounds_of_flowers_start() -> int | None:
    """``num_rounds`` of the ``Strategy.start`` that calls, also through a wrapper; None outside."""
    # Flower's loop passes its number of rounds to no hook.
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_code is not Strategy.start.__code__:
        frame = frame.f_back
    return frame.f_locals["num_rounds"] if frame else None


def _bytes_of(arrays: ArrayRecord) -> dict[str, bytes]:
    return {name: array.data for name, array in arrays.items()}


class Callbacks:
    """Receives a strategy's events, in its thread; each method does nothing here.

    Set ``strategy.callbacks = MyCallbacks()`` before the start; ``strategies.run`` has those that
    write a run's folder.
    """

    def begin(self, settings: Settings, state: RunState) -> None:
        """Called once the parties are known, before the first message.

        ``settings`` have the number of parties; ``state`` is that of an earlier attempt, if any.
        """

    def warnings(self, simulated: bool) -> Iterable[str]:
        """More warnings about the parties' tables than their replies allow.

        ``simulated`` is whether the parties are on this machine.
        """
        return ()

    def stage(self, stage: Stage) -> None:
        """Called before each exchange, and while something is waited for."""

    def end_round(self, line: RoundInfo) -> object:
        """Called after every round; the run stops where it returns False."""

    def checkpoint(self, checkpoint: Checkpoint, state: RunState) -> None:
        """Called where an interrupted run could resume."""

    def write_model(self, files: Mapping[str, str]) -> None:
        """Called with the finished model: texts by file name, the model first."""

    def way_on(self) -> str:
        """How a stopped run can be resumed, for the error message."""
        return "its model so far is lost"
