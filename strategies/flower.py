"""Flower's face of a run: any method as a ``Strategy`` of a ServerApp.

One exchange is one Flower round: ``configure_train`` returns the messages of the pending exchange,
``aggregate_train`` passes the replies to the conversation. So Flower's ``Strategy.start`` can drive
a method too, and ends with the same model. ``start`` here calls the same hooks in the same order,
so that a subclass may override them, and adds what long runs need: it polls for replies every few
milliseconds, resends lost messages, waits for approvals, and ends with the conversation.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import FrameType
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedapp.data.schema import first
from fedapp.errors import ConfigError, DivergedError, PartyError, StoppedError, as_plain
from fedapp.messages.fields import Reply, Request
from fedapp.messages.vertical import Parcel
from fedapp.messages.wire import WAITING, Envelope, to_bytes, to_content, to_records
from fedapp.run_folder import Stage
from strategies.delivery import FLUSH_SECONDS, Courier, read_reply
from strategies.drive import Driver
from strategies.handshake import find_nodes, removed_nodes, shown_names, site_names
from strategies.method import TreeStrategy

APPROVAL_POLL = 2.0  # seconds
NOTED = 0.25  # seconds between two notes of exchanges of rounds
MOST_NAMED = 6  # parties in a stage's line
HOOKS = "configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate"
NO_WRAP = (
    "as it is: a wrapper that reads or changes weights, such as Flower's differential privacy, "
    "cannot serve trees (PAX has epsilon)"
)
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
log = logging.getLogger("fedapp")


class Stages:
    """Turns the exchanges of a run into stages; of those of rounds, one now and then is noted."""

    def __init__(self, note: Callable[[Stage], None], clock: Callable[[], float] = time.time):
        self._note, self._clock = note, clock
        self._phase, self._phase_began = "", 0.0
        self._noted_at = 0.0  # of an exchange of a round; 0: the next one is noted
        self._stage = Stage("", 0.0)

    def wait(self, doing: str) -> None:
        """Begin a stage without an exchange."""
        self._phase, self._phase_began = doing, self._clock()
        self._noted_at = 0.0
        self._note(Stage(doing, self._phase_began))

    def begin(self, request: Request, round_id: int, n_rounds: int) -> None:
        """Begin an exchange.

        ``round_id`` is from 1, and ignored if the request is not part of a round.
        """
        now = self._clock()
        if request.each_round:
            # May be n_rounds + 1: an exchange after the last round has that round's scores.
            self._phase = ""
            self._stage = Stage(request.doing, now, min(round_id, n_rounds), n_rounds)
            if now - self._noted_at < NOTED:
                return
            self._noted_at = now
        else:
            # Successive exchanges of one phase count as one stage.
            if request.doing != self._phase:
                self._phase, self._phase_began = request.doing, now
            self._stage = Stage(request.doing, self._phase_began)
            self._noted_at = 0.0
        self._note(self._stage)

    def name_waiting(self, parties: Sequence[str], away: Sequence[str] = ()) -> None:
        """Note the parties whose replies to the exchange are missing, and those not connected."""
        self._noted_at = 0.0
        doing = self._stage.doing
        doing += f"; waiting for {first(parties, MOST_NAMED)}" if parties else ""
        doing += f" ({first(away, MOST_NAMED)} not connected)" if away else ""
        self._note(replace(self._stage, doing=doing, waiting=parties))


class FlowerStrategy(Driver[Any], Strategy):
    """A method's run as a Flower strategy."""

    def __init__(self, protocol: TreeStrategy[Any]) -> None:
        super().__init__(protocol)
        self._is_asked = False  # whether the pending exchange's messages have been sent
        self._is_watched = True  # whether anybody looks at models before the last
        self._deadline = protocol.settings.exchange_deadline
        self._arrays = ArrayRecord()
        self._records = MetricRecord(), MetricRecord()
        self._recorded = self._scores  # in the records
        self._stages = Stages(
            lambda stage: self.callbacks.stage(replace(stage, warnings=self.slowness))
        )
        self._away = frozenset[str]()  # parties that are waited for and not connected
        self._came: Iterable[Message] = ()  # replies to the pending exchange

    @property
    def num_rounds(self) -> int:
        """Upper bound on the exchanges of a run, for Flower's ``start``."""
        protocol, settings = self.protocol, self.settings
        rounds = protocol.most_rounds(settings) * protocol.exchanges_a_round(settings)
        # A round in which a party is lost restarts, and masked sums then take two exchanges.
        times = 2 if settings.min_parties else 1
        return times * (protocol.exchanges_around(settings) + rounds)

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
        if not self._is_last(arrays):
            is_first = self._conversation is None
            remedy = "init_model continues a model" if is_first else f"the last model {NO_WRAP}"
            raise ConfigError(f"arrays must be {'empty; ' if is_first else ''}{remedy}")
        if self._conversation is None:
            arguments = _of_flowers_start()
            self._check_rounds(arguments.get("num_rounds"))
            self._deadline = arguments.get("timeout") or self._deadline
            wait = self._stages.wait
            n_lost = len(self._state.left_out)
            n_asked = self.settings.asked_parties
            nodes = find_nodes(grid, n_asked, n_lost, self.settings.start_deadline, wait)
            if not n_asked:
                self.protocol.settings = self.settings.with_parties(len(nodes))
                self.protocol.check_settings(self.settings)
            self.begin(nodes)
        self._is_asked = self.pending is not None
        return self._messages() if self.pending else ()

    def _messages(self) -> list[Message]:
        assert self.pending is not None
        encoded = dict[int, bytes]()  # by id; a request that all parties share is encoded once
        state, messages = self._state, list[Message]()
        for party, request in self.pending.requests.items():
            envelope = Envelope(
                state.model_id,
                self._step,
                self._checkpoint_step,
                state.attempt,
                state.gap(party),
                self.protocol.settings.strategy,
            )
            records = to_records(self._laid_out(party, request, encoded), envelope)
            address = self._addresses[party]
            messages.append(Message(records, address, request.kind, group_id=str(self._step)))
        return messages

    def _laid_out(self, party: str, request: Request, encoded: dict[int, bytes]) -> bytes:
        """Encode a request, with the letters that wait for the party."""
        assert self.pending is not None
        if request.carries_letters:
            relay = self.pending.relay
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
        where the server has none (``start`` makes it at the end only, unless a hook is overridden
        or ``evaluate_fn`` given); and the training rows' scores of the last finished round.

        Raises
        ------
        ConfigError : it is not given a reply that has come.
        FedappError : a reply is missing, refused or breaks a rule, and the run cannot continue.
        """
        if not self._is_asked:
            if self._conversation is None:
                raise ConfigError("aggregate_train must come after configure_train")
            return self._arrays, self._metrics()[0]
        by_address = {reply.metadata.src_node_id: reply for reply in replies}
        assert self.pending is not None
        came = self._came or _of_flowers_start().get("train_replies", ())
        dropped = {reply.metadata.src_node_id for reply in came} - by_address.keys()
        if names := [name for name in self.pending.requests if self._addresses[name] in dropped]:
            rule = "must be given the replies of all parties, errors too, in one call"
            way = "min_parties lets a run go on without those that fail"
            raise ConfigError(f"aggregate_train {rule}, got none of {', '.join(names)}; {way}")
        self._is_asked = False
        self.take(lambda party: self._read(by_address.get(self._addresses[party]), party))
        shows_model = self._is_watched or self.pending is None
        return self._model_so_far() if shows_model else self._arrays, self._metrics()[0]

    def _read(self, message: Message | None, party: str) -> tuple[Reply, list[Parcel]]:
        assert self.pending is not None
        # Before the parties have introduced themselves, only their nodes are known.
        name = party if self.protocol.parties else site_names().get(party, party)
        if message is None:
            why = f"no answer within {self._deadline:g} s"
            if self._addresses[party] in removed_nodes():
                why = "it was removed; fedapp federation add FOLDER NAME with a new key of the site"
            elif party in self._away:
                why += ", not connected: the site's own log says why"
            raise PartyError(name, self._step, why)
        return read_reply(message, name, self.pending.reply, self._state.model_id, self._step)

    def _model_so_far(self) -> ArrayRecord:
        if self._make_model is not None:
            model = np.frombuffer(self._make_model().encode(), dtype=np.uint8)
            self._arrays = ArrayRecord({"model": FlowerArray(model)})
            self._make_model = None
        return self._arrays

    def _metrics(self) -> tuple[MetricRecord, MetricRecord]:
        """The last scores of training and validation rows, as records that are made once."""
        if self._recorded is not self._scores:
            self._recorded = self._scores
            train, valid = self._scores
            self._records = MetricRecord(train), MetricRecord(valid)
        return self._records

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
        return self._metrics()[1]

    def summary(self) -> None:
        """Log what is about to run."""
        log.info(
            "%s on %s, model %s%s",
            type(self.protocol).__name__,
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
        hooks = {name: getattr(getattr(self, name), "__func__", None) for name in HOOKS}
        is_plain = all(hooks[name] is getattr(FlowerStrategy, name) for name in HOOKS)
        self._is_watched = evaluate_fn is not None or not is_plain
        self._deadline = timeout or self._deadline
        self.summary()
        waits = self.settings.resend_after, self._deadline
        courier = Courier(
            grid, self.ledger, *waits, self._name_waiting, self._clocks, removed=removed_nodes
        )
        arrays, result = initial_arrays or ArrayRecord(), Result()
        configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        if evaluate_fn and (metrics := evaluate_fn(0, arrays)):
            result.evaluate_metrics_serverapp[0] = metrics
        with self.ledger:
            for number in count(1):
                start, before = time.perf_counter(), self._arrays
                messages = list(self.configure_train(number, arrays, configs[0], grid))
                replies = self._replies(messages, courier)
                try:
                    model, train = self.aggregate_train(number, replies)
                except DivergedError as error:
                    raise self._at_round(error) from error
                self.ledger.flush(FLUSH_SECONDS)
                if messages[0].metadata.message_type.startswith("train."):
                    seconds, training = self._state.seconds
                    self._note(seconds=(seconds, training + time.perf_counter() - start))
                arrays = arrays if model is None else model
                messages = list(self.configure_evaluate(number, arrays, configs[1], grid))
                evaluated = grid.send_and_receive(messages, timeout=waits[1]) if messages else ()
                valid = self.aggregate_evaluate(number, evaluated)
                if train:
                    result.train_metrics_clientapp[number] = train
                if valid:
                    result.evaluate_metrics_clientapp[number] = valid
                evaluate = None if self._arrays is before else evaluate_fn
                if evaluate and (metrics := evaluate(number, arrays)):
                    result.evaluate_metrics_serverapp[number] = metrics
                if self.pending is None:
                    break
                if self._is_stopped:  # by a callback, here or in another process
                    raise StoppedError(f"the run was stopped after round {self._state.rounds}")
        if not self._is_last(arrays):
            raise ConfigError(f"aggregate_train must return the last model {NO_WRAP}")
        result.arrays = arrays
        return result

    def _is_last(self, arrays: ArrayRecord) -> bool:
        """Whether a model is the one that the last ``aggregate_train`` of this class returned."""
        return arrays is self._arrays or _bytes_of(arrays) == _bytes_of(self._arrays)

    def _check_rounds(self, num_rounds: int | None) -> None:
        """Refuse a number of exchanges with which the run might end without a model."""
        if num_rounds is not None and num_rounds < self.num_rounds:
            rule = f"must be >= {self.num_rounds} (strategy.num_rounds), as each is one exchange"
            remedy = "the strategy's own arguments say how much is trained"
            raise ConfigError(f"num_rounds {rule}, got {num_rounds}; {remedy}")

    def _replies(self, messages: Sequence[Message], courier: Courier) -> list[Message]:
        """Send the messages of the pending exchange, and wait for the replies."""
        requests = self.pending.requests if self.pending else {}
        parties = {self._addresses[party]: party for party in requests}
        nodes = [message.metadata.dst_node_id for message in messages]
        if not self._is_asked or sorted(nodes) != sorted(parties):
            rule = "must return those of super().configure_train, one for each party"
            raise ConfigError(f"messages of configure_train {rule}, got {len(nodes)} for {nodes}")
        request = next(iter(requests.values()))
        n_rounds = self.protocol.most_rounds(self.settings)
        self._stages.begin(request, self._state.rounds + 1, n_rounds)
        by_party = {parties[node]: each for node, each in zip(nodes, messages, strict=True)}
        replies = self._answers(courier, by_party)
        self._came = [replies[party] for party in requests if party in replies]
        return list(self._came)

    def _name_waiting(self, parties: Sequence[str], away: Sequence[str]) -> None:
        """Show whose replies are missing."""
        self._away = frozenset(away)
        nodes = self._addresses.values()
        self._stages.name_waiting(shown_names(parties, nodes), shown_names(away, nodes))

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


def _check_empty(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a config of a round, which no method reads."""
    if config:
        rule = "must be empty, settings are arguments of the strategy"
        raise ConfigError(f"{name} {rule}, got {', '.join(config)}")


def _of_flowers_start() -> Mapping[str, Any]:
    """Arguments of the ``Strategy.start`` that calls, also through a wrapper; none outside."""
    # Flower's loop passes neither its number of rounds nor its timeout to a hook.
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_code is not Strategy.start.__code__:
        frame = frame.f_back
    return frame.f_locals if frame else {}


def _bytes_of(arrays: ArrayRecord) -> dict[str, bytes]:
    return {name: array.data for name, array in arrays.items()}
