"""Drive a method's conversation: its steps, checkpoints, rounds, warnings and lost parties.

Nothing here sends a message: ``pending`` is the exchange that is to be sent, and ``take`` passes
its replies to the conversation, up to its next exchange.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from fedapp import conversation
from fedapp.errors import DivergedError, FedappError, PartyError, as_protocol_error
from fedapp.messages.fields import Introduction, Reply, check_fields
from fedapp.messages.handshake import GreetReply, GreetRequest
from fedapp.messages.vertical import Parcel
from fedapp.run_files import RoundInfo, without_nan
from fedapp.run_folder import RunState, Stage
from fedapp.settings import Settings
from strategies import handshake
from strategies.delivery import Ledger, clock_text
from strategies.method import Outcome, TreeStrategy

CHECKPOINT_SECONDS = 0.5  # after a checkpoint, during which another is not stored if it is optional
log = logging.getLogger("fedapp")

I = TypeVar("I", bound=Introduction)  # noqa: E741


class Callbacks:
    """Receives a run's events, in its thread; each method does nothing here.

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

    def checkpoint(self, checkpoint: conversation.Checkpoint, state: RunState) -> None:
        """Called where an interrupted run could resume."""

    def write_model(self, files: Mapping[str, str]) -> None:
        """Called with the finished model: texts by file name, the model first."""


class Driver(Generic[I]):
    """Drives the conversation of one run.

    Attributes
    ----------
    protocol : the method's side of the run.
    pending : the exchange that is to be sent or answered; None before and after the run.
    callbacks : receives the run's events; does nothing by default.
    ledger : counts the messages that were sent.
    outcome : the method's part of the summary, once the conversation has ended.
    slowness : warnings of what makes every exchange slow, which progress shows at once.
    """

    def __init__(self, protocol: TreeStrategy[I]) -> None:
        self.protocol = protocol
        self.pending: conversation.Exchange | None = None
        self.callbacks = Callbacks()
        self.ledger = Ledger()
        self.outcome: Outcome | None = None
        self.slowness: tuple[str, ...] = ()
        self._conversation: conversation.Conversation[Outcome] | None = None
        self._saved: conversation.Saved | None = None
        self._state = RunState(protocol.model_id)
        self._checkpoint_step = 0
        self._saved_at = -math.inf  # when a checkpoint was stored
        self._is_stopped = False
        self._make_model: Callable[[], str] | None = None
        # Of training and validation rows, by the names of Flower's metrics.
        self._scores: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._n_failed = 0
        self._addresses: dict[str, int] = {}
        self._clocks: dict[str, float] = {}
        self._start = time.perf_counter()
        self._note_traffic()

    def resume(self, saved: conversation.Saved, state: RunState) -> None:
        """Resume from an earlier attempt's checkpoint; call before the start."""
        self._saved = saved
        self._state = replace(state, attempt=state.attempt + 1)
        self.protocol.model_id = state.model_id
        self.protocol.keys = state.keys
        self.protocol.warnings, self.protocol.facts = state.warnings, state.facts
        self._checkpoint_step = state.step
        self.ledger.to_parties, self.ledger.to_server = state.bytes
        self._note_traffic()

    @property
    def settings(self) -> Settings:
        """Settings of the run by now."""
        return self.protocol.settings

    @property
    def parties(self) -> conversation.Parties[I]:
        """The parties that take part, with their introductions."""
        return self.protocol.parties

    @property
    def state(self) -> RunState:
        """State of the run by now."""
        before, training = self._state.seconds
        seconds = before + time.perf_counter() - self._start, training
        sent = self.ledger.to_parties, self.ledger.to_server
        state = replace(self._state, bytes=sent, seconds=seconds)
        return replace(state, warnings=self.protocol.warnings, facts=self.protocol.facts)

    def warn_of_slowness(self, warnings: Iterable[str]) -> None:
        """Warn of what makes every exchange of this run slow."""
        for text in warnings:
            self.protocol.warn_once(text)
            self.slowness = (*self.slowness, text)

    def _note(self, **facts: Any) -> None:
        """Change fields of the state; ``state`` adds what is counted elsewhere."""
        self._state = replace(self._state, **facts)

    def _note_traffic(self) -> None:
        """Begin to count the bytes and seconds of a round."""
        self._last_round = (self.ledger.to_parties, self.ledger.to_server, time.perf_counter())

    @property
    def _is_step(self) -> bool:
        # Greetings are not steps of the run: they are sent again by every attempt.
        assert self.pending is not None
        return all(request.is_step for request in self.pending.requests.values())

    @property
    def _step(self) -> int:
        """Step of the pending exchange; 0 for a greeting."""
        return self._state.step if self._is_step else 0

    def begin(self, nodes: Sequence[int]) -> None:
        """Begin the conversation with the parties at these nodes."""
        self.callbacks.begin(self.protocol.settings, self._state)
        self.protocol.table_warnings = self.callbacks.warnings
        self._addresses = {f"node {node}": node for node in nodes}
        self._conversation = self._whole_run()
        self._advance(None)

    def take(self, read: Callable[[str], tuple[Reply, list[Parcel]]]) -> None:
        """Pass the replies to the conversation, up to its next exchange.

        ``read`` gives a party's reply and parcels, or raises a FedappError.
        """
        assert self.pending is not None
        answers = dict[str, Reply]()
        parcels_from = dict[str, list[Parcel]]()
        self._n_failed = 0
        for party in self.pending.requests:
            try:
                reply, parcels = read(party)
                if self.pending.check:
                    self.pending.check(party, reply)
            except FedappError as error:
                self._leave_out(party, error)
            else:
                answers[party] = reply
                parcels_from[party] = parcels
        if relay := self.pending.relay:
            for party, parcels in parcels_from.items():
                with as_protocol_error(party, self.pending.reply.__name__, "parcels"):
                    relay.collect(party, parcels)
        steps = self.pending.requests if self._is_step else ()
        asked = {**self._state.asked, **dict.fromkeys(steps, self._state.step)}
        self._note(exchanges=self._state.exchanges + 1, asked=asked)
        self._advance(answers)

    def _advance(self, answers: Mapping[str, Reply] | None) -> None:
        assert self._conversation is not None
        self.pending = None
        while True:
            try:
                event = self._conversation.send(answers)  # type: ignore[arg-type]
            except StopIteration as end:
                self.outcome = end.value
                test = _named("test", end.value.get("metrics", {}).get("test", {}))
                self._scores = self._scores[0], {**self._scores[1], **test}
                return
            if isinstance(event, conversation.Exchange):
                self.pending = event
                if self._is_step:
                    self._note(step=self._state.step + 1)
                return
            answers = None
            match event:
                case conversation.Checkpoint():
                    self._save(event)
                case conversation.Progress():
                    self._report(event)
                case conversation.SavedModel(files):  # at once: what comes after it may fail
                    self.callbacks.write_model(files)
                    self._make_model = next(iter(files.values())).__str__

    def _whole_run(self) -> conversation.Conversation[Outcome]:
        """Greet the parties, compare their introductions, and hold the method's conversation."""
        protocol = self.protocol
        n_lost = len(self._state.left_out)
        greetings = dict.fromkeys(self._addresses, GreetRequest())
        greeted = yield from conversation.ask(greetings, GreetReply, may_fail=n_lost)
        # The first round's time is without that in which the parties' processes have started.
        self._last_round = (*self._last_round[:2], time.perf_counter())
        handshake.check_texts(greeted.values())
        self.warn_of_slowness(handshake.slow_parties(greeted.values()))
        if not self._state.keys:
            members = handshake.parties_by_name(greeted.values())
            protocol.keys = {name: reply.fingerprint for name, reply in members.items()}
            self._note(keys=protocol.keys)
        self.ledger.rename({node: reply.name for node, reply in greeted.items()})
        openings = dict.fromkeys(
            (node for node in greetings if node in greeted), protocol.greeting()
        )
        n_lost -= len(greetings) - len(greeted)
        replies = yield from conversation.ask(openings, protocol.introduction, may_fail=n_lost)
        handshake.check_texts(replies.values())
        for node, reply in replies.items():
            name = greeted[node].name
            rule = f"must be {name}, as it was when the party was greeted, got {reply.name}"
            check_fields(name, reply, ("name", reply.name == name, rule))
        names = {node: reply.name for node, reply in replies.items()}
        last_steps = self._state.asked
        self._note(asked=dict.fromkeys(names.values(), self._state.step))
        self.ledger.rename(names)
        # From here on parties are addressed by name: before, only their nodes were known.
        self._addresses = {name: self._addresses[node] for node, name in names.items()}
        protocol.parties = parties = handshake.parties_by_name(replies.values())
        for excluded in self._state.left_out:
            if excluded["party"] in parties:
                parties.leave(excluded["party"])
        handshake.check_tables(parties, self._state)
        handshake.check_steps(parties, last_steps, self._checkpoint_step)
        if request := protocol.greeting_again():
            hellos = yield from conversation.ask(parties.all(request), protocol.introduction)
            handshake.check_texts(hellos.values())
            protocol.parties = parties = conversation.Parties(hellos)
        self._note(fingerprints={name: hello.fingerprint for name, hello in parties.items()})
        ahead = {name: self._clocks[node] for node, name in names.items() if node in self._clocks}
        notes = handshake.common_notes({name: hello.notes for name, hello in parties.items()})
        clocks = (clock_text(f"{name}'s", by, "the coordinator's") for name, by in ahead.items())
        for text in (*notes, *filter(None, clocks)):
            protocol.warn_once(text)
        for text in handshake.common_notes({name: hello.facts for name, hello in parties.items()}):
            if text not in protocol.facts:
                protocol.facts = (*protocol.facts, text)
                log.info("%s", text)
        protocol.resolve_objective()
        return (yield from protocol.conversation(parties, self._saved))

    def _leave_out(self, party: str, error: FedappError) -> None:
        """Exclude a party if enough others remain, or stop the run."""
        if isinstance(error, DivergedError) or not self.protocol.may_lose:
            raise error
        assert self.pending is not None
        if self.pending.may_fail is not None:
            # A greeting: parties that an earlier attempt has excluded need not come back.
            self._n_failed += 1
            if self._n_failed > self.pending.may_fail:
                raise error
            return
        parties, settings = self.protocol.parties, self.protocol.settings
        if len(parties) - 1 < (settings.min_parties or settings.parties):
            raise error
        parties.leave(party)
        reason = error.reason if isinstance(error, PartyError) else str(error)
        entry = {"party": party, "step": self._state.step, "reason": reason}
        self._note(left_out=(*self._state.left_out, entry))
        log.warning("%s is excluded from step %d on: %s", party, self._state.step, reason)

    def _save(self, checkpoint: conversation.Checkpoint) -> None:
        self._note(finished_rounds=checkpoint.rounds)
        self._make_model = checkpoint.model
        if checkpoint.is_optional and time.monotonic() - self._saved_at < CHECKPOINT_SECONDS:
            return
        self._checkpoint_step = self._state.step
        self.ledger.flush()
        self.callbacks.checkpoint(checkpoint, self.state)
        self._saved_at = time.monotonic()

    def _warn_of_no_split(self) -> None:
        """Warn that the first trees have no split, as where weights are small."""
        protocol, settings = self.protocol, self.protocol.settings
        if settings.init_model:  # its trees are counted too
            return
        text = (
            f"no tree of the first {protocol.round_name} has a split, so rows are predicted alike"
        )
        least = settings.min_child_weight
        if least and "min-child-weight" in protocol.settings_read(settings):
            text += f"; where weights are small, scale them or set min-child-weight below {least:g}"
        protocol.warn_once(text)

    def _report(self, progress: conversation.Progress) -> None:
        to_parties, to_server, start = self._last_round
        self._note_traffic()
        line: RoundInfo = {
            "round": progress.round,
            "rounds": self.protocol.most_rounds(self.protocol.settings),
            "trees": progress.n_trees,
            "leaves": progress.n_leaves,
            "train": without_nan(progress.train),
            "valid": without_nan(progress.valid),
            "exchanges": self._state.exchanges,
            "bytes": {
                "to_parties": self.ledger.to_parties - to_parties,
                "to_server": self.ledger.to_server - to_server,
            },
            "seconds": round(self._last_round[2] - start, 4),
        }
        if progress.round == 1 and progress.n_leaves == progress.n_trees > 0:
            self._warn_of_no_split()
        number = {"round": progress.round}
        train, valid = _named("train", progress.train), _named("valid", progress.valid)
        self._scores = train | number, valid | number
        self._note(rounds=progress.round)
        self._is_stopped = self.callbacks.end_round(line) is False
        scores = progress.valid or progress.train
        shown = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
        log.info("round %d/%d  %s", progress.round, line["rounds"], shown)

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


def _named(subset: str, scores: Mapping[str, float]) -> dict[str, Any]:
    """Scores by the names of Flower's metrics, such as ``valid_auc``."""
    return {f"{subset}_{name}": float(value) for name, value in scores.items()}
