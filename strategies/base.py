"""Drives a method's conversation through Flower's strategy hooks.

One exchange is one Flower round: ``configure_train`` gives the messages of the pending exchange,
``aggregate_train`` hands the replies to the conversation.
"""

from __future__ import annotations

import logging
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedapp.config import Settings
from fedapp.conversation import (
    Checkpoint,
    Conversation,
    Exchange,
    ModelFiles,
    Parties,
    Progress,
    ask,
)
from fedapp.errors import DivergedError, FedappError, PartyError, StoppedError, as_plain, blaming
from fedapp.messages.fields import Introduction, Reply, Request
from fedapp.messages.greet import GreetReply, GreetRequest
from fedapp.messages.parcels import Parcel
from fedapp.run_folder import RunFolder, without_nan
from fedapp.run_state import RunState
from fedapp.stage import Stages
from fedapp.trees.objective import AUTO, Objective
from fedapp.watch import OnRound, RoundInfo
from fedapp.wire.codec import WAITING, Envelope, records_of
from fedapp.wire.content import take_apart
from fedapp.wire.delivery import Courier, Patience
from fedapp.wire.layout import to_bytes
from fedapp.wire.ledger import Ledger
from fedapp.wire.replies import read_reply
from strategies.meeting import (
    check_greeted,
    check_steps,
    check_tables,
    check_texts,
    clock_warnings,
    find_nodes,
    meet,
    oddities,
    site_names,
)
from strategies.settings import ReadsSettings

log = logging.getLogger("fedapp")

Summary = Mapping[str, Any]  # a method's part of summary.json
APPROVAL_POLL = 2.0  # seconds

I = TypeVar("I", bound=Introduction)  # noqa: E741


class TreeStrategy(ReadsSettings, Strategy, Generic[I]):
    """A Flower strategy whose protocol is a conversation.

    ``introduction`` is the class of the replies to ``greeting``, which opens every run.

    Parameters
    ----------
    settings : of the run.
    folder : where the run is written.
    """

    introduction: type[I]

    def __init__(self, settings: Settings, folder: RunFolder) -> None:
        self.settings, self.folder = settings, folder
        saved = folder.saved() if settings.resume else None
        self._saved: Checkpoint | None = saved[0] if saved else None
        self._state = (
            replace(saved[1], attempt=saved[1].attempt + 1)
            if saved
            else RunState(secrets.token_hex(8))
        )
        self._checkpoint_step = self._state.step
        self.ledger = Ledger(folder.ledger, *self._state.bytes)
        self.parties: Parties[I] = Parties({})
        self.objective_reason = ""
        self.outcome: Summary | None = None
        self.on_round: OnRound | None = None
        self.before_checkpoint: Callable[[], None] | None = None
        self._is_stopped = False
        self._model = b""
        self._n_failed = 0
        self._addresses: dict[str, int] = {}
        self._clocks: dict[str, float] = {}
        self._pending: Exchange | None = None
        self._conversation: Conversation[Summary] | None = None
        self._last_round = (self.ledger.to_parties, self.ledger.to_server, time.perf_counter())
        self._start = time.perf_counter()
        self._kept_rounds = 0  # of the last checkpoint
        self._stages = Stages(folder.note)

    @abstractmethod
    def greeting(self) -> Request:
        """The request that opens a run."""

    def greeting_again(self) -> Request | None:
        """What opens the run once more, for what the parties have said of their tables; or None."""
        return None

    def plan(self) -> dict[str, Any]:
        """The fields of the run's ``Plan``."""
        names, fingerprints = tuple(self._state.keys), tuple(self._state.keys.values())
        return self.planned(self.settings) | {"parties": names, "fingerprints": fingerprints}

    @abstractmethod
    def conversation(self, parties: Parties[I], saved: Checkpoint | None) -> Conversation[Summary]:
        """The protocol, once the parties are known; ends with its part of the summary.

        Parameters
        ----------
        parties : everyone who takes part.
        saved : where an earlier attempt had come to, or None.
        """

    @abstractmethod
    def suggested_objective(self) -> tuple[Objective, str]:
        """The objective that the labels of the parties suggest, and why."""

    def settle(self) -> None:
        """Where the objective is left open, choose it by what the parties say of their labels; from
        here on it stands in the settings.

        Raises
        ------
        ConfigError : something is set that does not fit the one chosen.
        DataError : their labels do not fit together.
        ProtocolError : a party suggests one that labels cannot.
        """
        if self.settings.objective != AUTO or self.settings.model:
            return
        objective, why = self.suggested_objective()
        self.settings = self.settings.settled(objective)
        self.objective_reason = why
        log.info("objective %s: %s", objective, why)
        self.settled()

    def settled(self) -> None:
        """What follows from an objective that was left open."""

    @property
    def _is_step(self) -> bool:
        """Whether the pending exchange is a step of the run, not a greeting."""
        assert self._pending is not None
        return all(request.is_step for request in self._pending.requests.values())

    @property
    def _step(self) -> int:
        """Step of the pending exchange; 0 where it is none."""
        return self._state.step if self._is_step else 0

    # Flower's hooks

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of the pending exchange."""
        assert self._pending is not None
        laid_out = dict[int, bytes]()  # of requests that all parties get alike
        state, messages = self._state, list[Message]()
        for party, request in self._pending.requests.items():
            steps = (self._step, self._checkpoint_step, state.attempt, state.gap(party))
            envelope = Envelope(state.model_id, *steps, self.settings.strategy)
            records = records_of(self._laid_out(party, request, laid_out), envelope)
            to = self._addresses[party]
            messages.append(Message(records, to, request.kind, group_id=str(server_round)))
        return messages

    def _laid_out(self, party: str, request: Request, known: dict[int, bytes]) -> bytes:
        """A request as bytes, with letters that wait for the party; others are ``known`` by id."""
        assert self._pending is not None
        if request.carries_letters:
            relay = self._pending.relay
            return to_bytes(take_apart(request, party, relay.take(party) if relay else ()))
        if id(request) not in known:
            known[id(request)] = to_bytes(take_apart(request, party))
        return known[id(request)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Hand the replies to the conversation and let it go on."""
        by_address = {reply.metadata.src_node_id: reply for reply in replies}
        assert self._pending is not None
        answers, parcels = dict[str, Reply](), dict[str, list[Parcel]]()
        self._n_failed = 0
        for party in self._pending.requests:
            try:
                message = by_address.get(self._addresses[party])
                answers[party], parcels[party] = self._read(message, party)
            except FedappError as error:
                self._leave_out(party, error)
        if relay := self._pending.relay:
            for party, sent in parcels.items():
                with blaming(party, self._pending.reply.__name__, "parcels"):
                    relay.collect(party, sent)
        steps = self._pending.requests if self._is_step else ()
        asked = {**self._state.asked, **dict.fromkeys(steps, self._state.step)}
        self._note(exchanges=self._state.exchanges + 1, asked=asked)
        self._advance(answers)
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: scores ride on the training messages."""
        return ()

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Nothing: see ``configure_evaluate``."""
        return None

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
        num_rounds: int = 0,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Any = None,
    ) -> Result:
        """Run the conversation to its end.

        Of Flower's parameters only ``grid`` counts: the conversation knows how long it is, and the
        settings how long to wait.

        Raises
        ------
        FedappError : the run cannot go on, or a callback has stopped it.
        """
        self.summary()
        self.folder.rewind(self._state.step, self._state.rounds)
        if self._saved:
            self._save(self._saved)  # with the number of this attempt
        patience = Patience(self.settings.resend_after, self.settings.exchange_deadline)
        courier = Courier(grid, self.ledger, patience, self._name_waiting, self._clocks)
        most, wait = self.settings.parties, self._stages.wait
        wanted = most - len(self._state.left_out)
        nodes = find_nodes(grid.get_node_ids, wanted, most, self.settings.start_deadline, wait)
        self._addresses = {f"node {node}": node for node in nodes}
        self._conversation = self._whole_run()
        self._advance(None)
        while self._pending is not None:
            if self._is_stopped:  # by a callback, here or in another process
                rule = f"the run was stopped after round {self._state.rounds}"
                raise StoppedError(f"{rule}; resume={self.folder.path} goes on from there")
            try:
                self._exchange(self._pending, grid, courier)
            except DivergedError as error:
                if not (kept := self._kept_rounds):
                    raise
                raise DivergedError(
                    f"eta must be smaller, got {self.settings.eta}: training diverges in round "
                    f"{kept + 1}: {error}; a larger lambda or a max-delta-step may help too; "
                    f"num-boost-round={kept} ends before it, and so does the run if it is resumed"
                ) from error
        return self._result()

    def _exchange(self, pending: Exchange, grid: Grid, courier: Courier) -> None:
        """One exchange, timed."""
        began, request = time.perf_counter(), next(iter(pending.requests.values()))
        n_rounds, step = self.most_rounds(self.settings), self._step
        end = self._stages.begin(request, self._state.rounds + 1, n_rounds, pending.seconds)
        messages = self.configure_train(step, ArrayRecord(), ConfigRecord(), grid)
        by_party = dict(zip(pending.requests, messages, strict=True))
        self.aggregate_train(step, self._answers(courier, by_party).values())
        end()
        self.ledger.flush()
        if request.kind.startswith("train."):
            before, training = self._state.seconds
            self._note(seconds=(before, training + time.perf_counter() - began))

    def _name_waiting(self, parties: Sequence[str]) -> None:
        """Show whose replies are missing; of a site that has not said its name, the registered."""
        self._stages.name_waiting([site_names().get(party, party) for party in parties])

    def _answers(self, courier: Courier, messages: Mapping[str, Message]) -> dict[str, Message]:
        """Replies by party; sites whose people have yet to approve the run are asked again."""
        answers = courier.deliver(messages, self._step)
        deadline = time.monotonic() + self.settings.start_deadline
        while waiting := {
            party: reply.error.reason
            for party, reply in answers.items()
            if reply.has_error() and reply.error.code == WAITING
        }:
            if time.monotonic() > deadline:
                break
            self._stages.wait("; ".join(as_plain(told or "") for told in waiting.values()))
            time.sleep(APPROVAL_POLL)
            again = {party: messages[party] for party in waiting}
            answers |= courier.deliver(again, self._step)
        return answers

    # The run

    def _whole_run(self) -> Conversation[Summary]:
        """Meet the parties, then let the method talk to them."""
        n_lost = len(self._state.left_out)
        greetings = dict.fromkeys(self._addresses, GreetRequest())
        met = yield from ask(greetings, GreetReply, may_fail=n_lost)
        check_texts(met.values())
        if not self._state.keys:
            self._note(keys={one.name: one.fingerprint for one in meet(met.values()).values()})
        openings = dict.fromkeys((each for each in greetings if each in met), self.greeting())
        n_lost -= len(greetings) - len(met)
        replies = yield from ask(openings, self.introduction, may_fail=n_lost)
        check_texts(replies.values())
        check_greeted(replies, met)
        names = {label: reply.name for label, reply in replies.items()}
        before = self._state.asked
        self._note(asked=dict.fromkeys(names.values(), self._state.step))
        self.ledger.flush(names)
        self._addresses = {name: self._addresses[label] for label, name in names.items()}
        self.parties = meet(replies.values())
        for gone in self._state.left_out:
            if gone["party"] in self.parties:
                self.parties.leave(gone["party"])
        check_tables(self.parties, self._state)
        check_steps(self.parties, before, self._checkpoint_step)
        if again := self.greeting_again():
            members = yield from ask(self.parties.all(again), self.introduction)
            check_texts(members.values())
            self.parties = Parties(members)
        self._note(fingerprints={name: each.fingerprint for name, each in self.parties.items()})
        ahead = {name: self._clocks[label] for label, name in names.items()}
        for text in (*oddities(self.parties), *clock_warnings(ahead)):
            self.warn_once(text)
        self.settle()
        return (yield from self.conversation(self.parties, self._saved))

    def _advance(self, answers: Mapping[str, Reply] | None) -> None:
        """Let the conversation go on until it asks again or ends."""
        assert self._conversation is not None
        self._pending = None
        given: Mapping[str, Reply] | None = answers
        while True:
            try:
                event = self._conversation.send(given)  # type: ignore[arg-type]
            except StopIteration as end:
                self.outcome = end.value
                return
            if isinstance(event, Exchange):
                self._pending = event
                if self._is_step:
                    self._note(step=self._state.step + 1)
                return
            given = None
            match event:
                case Checkpoint():
                    self._save(event)
                case Progress():
                    self._report(event)
                case ModelFiles(files):  # at once: what comes after it may fail
                    for name, text in files.items():
                        self.folder.write(name, text)
                    self._model = next(iter(files.values())).encode()

    def _read(self, message: Message | None, party: str) -> tuple[Reply, list[Parcel]]:
        """One party's reply, decoded and checked, and the parcels that came with it."""
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
        """Go on without a party if enough others are left, or stop."""
        if isinstance(error, DivergedError):
            raise error
        assert self._pending is not None
        if self._pending.may_fail is not None:
            # Who was excluded by an earlier attempt need not come back.
            self._n_failed += 1
            if self._n_failed > self._pending.may_fail:
                raise error
            return
        fewest = self.settings.min_parties or self.settings.parties
        if len(self.parties) - 1 < fewest:
            raise error
        self.parties.leave(party)
        reason = error.reason if isinstance(error, PartyError) else str(error)
        gone = {"party": party, "step": self._state.step, "reason": reason}
        self._note(left_out=(*self._state.left_out, gone))
        log.warning("%s is excluded from step %d on: %s", party, self._state.step, reason)

    def _save(self, checkpoint: Checkpoint) -> None:
        """Make the last step the one that an interrupted run goes back to."""
        self._checkpoint_step = self._state.step
        self._kept_rounds = int(checkpoint.facts.get("rounds", 0))
        if self.before_checkpoint is not None:
            self.before_checkpoint()
        self.folder.save(checkpoint, self.state)

    def warn(self, text: str) -> None:
        """Tell the user now, and again in the summary."""
        self._note(warnings=(*self._state.warnings, text))
        log.warning("%s", text)

    def warn_once(self, text: str) -> None:
        """Warn, unless this run has, before it was interrupted."""
        if text not in self._state.warnings:
            self.warn(text)

    def _report(self, progress: Progress) -> None:
        """Write and log a line for a finished round."""
        to_parties, to_server, since = self._last_round
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
            "seconds": round(now - since, 4),
        }
        self.folder.add_round(line)
        self._note(rounds=progress.round)
        self._is_stopped = self.folder.is_to_stop
        if self.on_round is not None and self.on_round(line) is False:
            self._is_stopped = True
        scores = progress.valid or progress.train
        shown = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
        log.info("round %d/%d  %s", progress.round, line["rounds"], shown)

    @property
    def simulated(self) -> bool:
        """Whether the parties have shares of the table that ``data`` names."""
        return any(hello.simulated for hello in self.parties.values())

    def row_counts(self) -> dict[str, int]:
        """Rows that train, validate and test, all parties together, where the hello tells them."""
        return {}

    def table_facts(self) -> Mapping[str, Any]:
        """What the summary says of the parties' columns, beside what the conversation found."""
        return {}

    @property
    def state(self) -> RunState:
        """How far the run has come by now."""
        before, training = self._state.seconds
        seconds = before + time.perf_counter() - self._start, training
        sent = self.ledger.to_parties, self.ledger.to_server
        return replace(self._state, bytes=sent, seconds=seconds)

    def _note(self, **facts: Any) -> None:
        """Change facts of the run; ``state`` adds what is counted elsewhere."""
        self._state = replace(self._state, **facts)

    def _result(self) -> Result:
        """The model and the metrics in Flower's form."""
        assert self.outcome is not None
        arrays = ArrayRecord({"model": FlowerArray(np.frombuffer(self._model, dtype=np.uint8))})
        found = self.outcome.get("metrics", {}).get("test", {})
        metrics = MetricRecord({name: float(value) for name, value in found.items()})
        return Result(arrays=arrays, evaluate_metrics_clientapp={self._state.exchanges: metrics})
