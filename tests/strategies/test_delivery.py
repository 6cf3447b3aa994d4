"""Every message is answered once or named as lost, whatever the network does."""

import json
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.task_identity import TaskIdentity

from fedapp.errors import PartyError
from fedapp.messages.handshake import GreetReply, GreetRequest
from fedapp.messages.wire import Envelope, n_bytes, to_bytes, to_content, to_records
from strategies import delivery
from strategies.delivery import (
    LONGEST_POLL,
    LOST,
    MISSED_AFTER,
    MISSED_TIMES,
    NAMED_AFTER,
    SILENT_AFTER,
    Courier,
    Ledger,
    read_reply,
)

RESEND, DEADLINE = 10.0, 100.0
ENVELOPE = Envelope("0123456789abcdef", 7)
NODES = {"bank": 2, "shop": 3}


@dataclass(slots=True)
class Network:
    """A Grid and a clock: time passes when the courier sleeps."""

    # Of a node and how many messages it had before: answers as (seconds, None or an error's code).
    script: object
    now: float = 0.0
    pushed: list = field(default_factory=list)
    due: list = field(default_factory=list)
    n_broken: int = 0  # pushes in whose midst the SuperLink ends
    # When the bank's node connected, and a time from which on it is not.
    connected: tuple = (0.0,)
    gone: tuple = (DEADLINE, DEADLINE)
    began: float = field(default_factory=time.time)
    hangs: tuple = (DEADLINE, 0.0)  # from when on, and for how long, it answers nothing
    removed: set = field(default_factory=set)

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def push_messages(self, messages):
        if self.n_broken:
            self.n_broken -= 1
            raise ObjectPushError("object", 1, "session")
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            message_id = f"message-{len(self.pushed)}"
            message.metadata.__dict__["_message_id"] = message_id
            for delay, code in self.script(node, self.n_sent(node)):
                answer = Error(code, "lost") if code else greet_reply()
                reply = Message(answer, reply_to=message)
                self.due.append((self.now + delay, message_id, reply))
            self.pushed.append((self.now, message))
            ids.append(message_id)
        return ids

    def get_nodes(self):
        is_gone = self.gone[0] <= self.now < self.gone[1]
        since = self.began - 60 + max(at for at in self.connected if at <= self.now)
        text = datetime.fromtimestamp(since, UTC).isoformat()
        nodes = set(NODES.values()) - ({NODES["bank"]} if is_gone else set())
        return [NodeInfo(node_id=node, last_activated_at=text) for node in sorted(nodes)]

    def pull_messages(self, message_ids):
        asked = set(message_ids)
        if self.now >= self.hangs[0]:
            self.now, self.hangs = self.now + self.hangs[1], (DEADLINE, 0.0)
        found = [one for one in self.due if one[0] <= self.now and one[1] in asked]
        self.due = [one for one in self.due if one not in found]
        return [reply for _, _, reply in found]

    def n_sent(self, node):
        return sum(message.metadata.dst_node_id == node for _, message in self.pushed)

    def sent_at(self, party):
        node = NODES[party]
        return [at for at, message in self.pushed if message.metadata.dst_node_id == node]


def greet_reply():
    return to_records(to_bytes(to_content(GreetReply("bank", ""), "bank")), ENVELOPE)


def request():
    return to_records(to_bytes(to_content(GreetRequest(), "bank")), ENVELOPE)


@dataclass(slots=True)
class Found:
    """What an exchange came to."""

    network: Network
    replies: dict
    ledger: Ledger
    named: list

    @property
    def lines(self):
        self.ledger.flush()
        return [json.loads(line) for line in self.ledger.path.read_text().splitlines()]


@pytest.fixture
def exchange(tmp_path, monkeypatch):
    """Sends one request to each of two parties."""

    def run(script, resend_after=RESEND, **network_is):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, 1, 0
        network = Network(script, **network_is)
        monkeypatch.setattr(delivery.time, "sleep", network.sleep)
        ledger = Ledger(tmp_path / "ledger.jsonl")
        named = []

        def name_waiting(parties, away):
            named.append((network.now, list(parties), list(away)))

        waits = resend_after, DEADLINE
        how = {"clock": network.clock, "removed": lambda: network.removed}
        courier = Courier(network, ledger, *waits, name_waiting, **how)
        messages = {
            party: Message(request(), node, GreetRequest.kind, group_id="7")
            for party, node in NODES.items()
        }
        if resend_after > RESEND:
            courier.deliver(messages, 7)
        return Found(network, courier.deliver(messages, 7), ledger, named)

    return run


def bank_is(answers):
    """The bank answers as said, by how many messages it had before; the shop in a second."""
    return lambda node, before: answers(before) if node == NODES["bank"] else [(1.0, None)]


LATER = RESEND + 5
FAST, SLOW = [(1.0, None)], [(2.0, None)]
# What the bank answers by messages before; the network; copies for it, the last after so many
# seconds; when the exchange ends.
CASES = {
    "nothing is lost": (lambda before: SLOW, {}, (1, 0.0), 2.0),
    "the SuperLink ends twice": (lambda before: SLOW, {"n_broken": 2}, (1, 0.0), 2.0),
    "a message is lost": (lambda before: FAST if before else [], {}, (2, RESEND), RESEND + 1),
    "both copies are answered": (
        lambda before: [(5 - LONGEST_POLL, None)] if before else [(LATER, None)],
        *({}, (2, RESEND), LATER - LONGEST_POLL),
    ),
    "two answers to one": (lambda before: [*FAST, *FAST], {}, (1, 0.0), 1.0),
    **{
        f"lost by code {code}": (
            lambda before, code=code: FAST if before else [(1.0, code)],
            *({}, (2, 1.0 + LONGEST_POLL), 2.0 + LONGEST_POLL),
        )
        for code in sorted(LOST)
    },
    "not connected": (
        lambda before: FAST if before else [(1.0, 5)],
        *({"gone": (0.5, 40.0)}, (2, 40.0), 41.0),
    ),
}


@pytest.mark.parametrize(("answers", "network_is", "sent", "ends"), CASES.values(), ids=CASES)
def test_every_party_is_answered_once_whatever_is_lost(exchange, answers, network_is, sent, ends):
    """A message that is sent again is the same one; the ledger counts all copies and one reply."""
    found = exchange(bank_is(answers), **network_is)
    n_copies, after = sent
    at = found.network.sent_at("bank")
    assert len(at) == n_copies
    assert after <= at[-1] - at[0] <= after + 2 * LONGEST_POLL
    assert at[0] < 2 * LONGEST_POLL
    assert len(found.network.sent_at("shop")) == 1
    assert ends <= found.network.now <= ends + 3 * LONGEST_POLL
    assert sorted(found.replies) == ["bank", "shop"]
    assert all(reply.has_content() for reply in found.replies.values())
    copies = [message for _, message in found.network.pushed if message.metadata.dst_node_id == 2]
    for copy in copies:
        assert copy.content == copies[0].content
        assert (copy.metadata.message_type, copy.metadata.group_id) == ("query.greet", "7")
    assert len({copy.metadata.message_id for copy in copies}) == n_copies
    down, up = n_bytes(request()), n_bytes(greet_reply())
    lines = Counter((line["from"], line["to"], line["bytes"]) for line in found.lines)
    assert lines == {
        ("server", "bank", down): n_copies,
        ("server", "shop", down): 1,
        ("shop", "server", up): 1,
        ("bank", "server", up): 1,
    }
    assert {(line["step"], line["type"]) for line in found.lines} == {(7, "query.greet")}
    totals = found.ledger.to_parties, found.ledger.to_server
    assert totals == ((1 + n_copies) * down, 2 * up)


def test_parties_that_do_not_answer_are_named_after_a_while(exchange):
    assert not exchange(bank_is(lambda before: SLOW)).named
    (when, parties, away), _ = exchange(bank_is(lambda before: [(9.0, None)])).named
    assert NAMED_AFTER <= when <= NAMED_AFTER + LONGEST_POLL
    assert (parties, away) == (["bank"], [])
    found = exchange(bank_is(lambda before: [(18.0, None)]), gone=(2.0, 12.0))
    assert [named[1:] for named in found.named] == [(["bank"], ["bank"]), (["bank"], []), ([], [])]


def test_a_party_that_has_answered_is_not_named_any_more(exchange):
    seconds = {NODES["bank"]: 6.0, NODES["shop"]: 20.0}
    found = exchange(lambda node, before: [(seconds[node], None)])
    for (when, *named), (since, *parties) in zip(
        found.named, ((NAMED_AFTER, "bank", "shop"), (6.0, "shop"), (20.0,)), strict=True
    ):
        assert since <= when <= since + 2 * LONGEST_POLL
        assert named == [parties, []]


def test_a_superlink_that_hangs_is_named_and_not_its_sites(exchange, caplog):
    """A SuperLink that was stopped takes its sites for disconnected, until they send heartbeats."""
    script = bank_is(lambda before: [(75.0, None)])
    for hangs, away in ((40.0, []), (1.0, ["bank"])):
        caplog.clear()
        found = exchange(script, hangs=(6.0, hangs), gone=(6.0, 60.0), resend_after=RESEND)
        named = [away for when, parties, away in found.named if when > 7.0 and parties]
        assert named[:1] == ([away] if away else [])
        said = f"the SuperLink did not answer for {hangs:.0f} s; sites connect again"
        assert (said in caplog.messages) == (hangs > SILENT_AFTER)
        assert sorted(found.replies) == ["bank", "shop"]


def test_a_site_that_is_removed_is_not_waited_for(exchange):
    found = exchange(bank_is(lambda before: []), removed={NODES["bank"]})
    assert sorted(found.replies) == ["shop"]
    assert found.network.now < NAMED_AFTER + 2 * LONGEST_POLL


def test_a_party_that_has_connected_since_it_was_asked_is_asked_again_soon_and_once(exchange):
    """A SuperNode that is killed, and is back at once, has lost the message without a word."""
    script = bank_is(lambda before: [(8.0, None)] if before else [])
    # Connected 60 s before the run by the network's clock, and again, 64 s later, during it.
    found = exchange(script, connected=(0.0, 4.0), began=time.time() + 57)
    first, second = found.network.sent_at("bank")
    assert second - first < RESEND
    assert len(found.network.sent_at("shop")) == 1


@pytest.mark.parametrize(("usual", "least"), [(1.0, MISSED_AFTER), (3.0, 3.0 * MISSED_TIMES)])
def test_a_reply_is_missed_sooner_where_the_last_of_its_kind_took_less(exchange, usual, least):
    """A SuperLink that was stopped hands a message to a request that nobody waits for any more."""
    script = bank_is(lambda before: [] if before == 1 else [(usual, None)])
    found = exchange(script, resend_after=90.0)
    _, second, third = found.network.sent_at("bank")
    assert least <= third - second <= least + 2.0
    assert sorted(found.replies) == ["bank", "shop"]


@pytest.mark.parametrize("answers", [[], [(0.0, 5)]], ids=["silent", "away"])
def test_the_deadline_ends_the_exchange_without_the_party_that_is_silent(exchange, answers):
    found = exchange(bank_is(lambda before: answers))
    assert sorted(found.replies) == ["shop"]
    assert DEADLINE <= found.network.now <= DEADLINE + LONGEST_POLL
    assert len(found.network.sent_at("bank")) <= DEADLINE / LONGEST_POLL + 1


@pytest.mark.parametrize("code", [1, 1001])
def test_another_error_is_an_answer_without_bytes(exchange, code):
    found = exchange(bank_is(lambda before: [(1.0, code)]))
    assert len(found.network.sent_at("bank")) == 1
    assert found.replies["bank"].error.code == code
    assert [line["bytes"] for line in found.lines if line["from"] == "bank"] == [0]


def test_a_message_that_a_grid_refuses_is_offered_again(exchange, monkeypatch):
    push = Network.push_messages

    def refuse_first(network, messages):
        ids = list(push(network, messages))
        return [None] * len(ids) if network.now == 0 else ids

    monkeypatch.setattr(Network, "push_messages", refuse_first)
    found = exchange(bank_is(lambda before: FAST))
    assert sorted(found.replies) == ["bank", "shop"]
    assert [line["seconds"] > 0 for line in found.lines if line["from"] == "server"] == [True] * 2


def test_a_node_that_runs_another_projects_clientapp_is_named_as_such():
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, 1, 0
    message = Message(request(), NODES["bank"], GreetRequest.kind, group_id="7")
    context = Context(0, NODES["bank"], {}, RecordDict(), {})
    with pytest.raises(ValueError, match="registered") as caught:
        ClientApp()(message, context)
    reason = f"Traceback (most recent call last):\n...\nValueError: {caught.value}"
    reply = Message(Error(2, reason), reply_to=message)
    rule = r"^bank \(step 7\): runs another ClientApp, must run fedapp's \(fedapp.client_app:app\)$"
    with pytest.raises(PartyError, match=rule):
        read_reply(reply, "bank", GreetReply, ENVELOPE.model_id, 7)


@pytest.mark.parametrize(
    ("alive", "rule"),
    [
        (False, r"Ray's node ward-7 \(0badcafe\) must stay in .* \(ray start --address=HEAD:6379"),
        (True, "Ray's processes must stay until the run ends, with memory for them, got Actor"),
    ],
)
def test_a_node_of_ray_that_is_gone_is_named(monkeypatch, alive, rule):
    """Its exceptions name an actor, and Flower's reply the party whose message it had."""
    node = {"NodeName": "ward-7", "NodeID": "0badcafe" * 7, "Alive": alive}
    ray = SimpleNamespace(is_initialized=lambda: True, nodes=lambda: [node])
    monkeypatch.setitem(sys.modules, "ray", ray)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, 1, 0
    message = Message(request(), NODES["bank"], GreetRequest.kind, group_id="7")
    kinds = {
        "ActorUnavailableError": True,
        "ActorDiedError": True,
        "NodeDiedError": True,
        "RayTaskError": False,
    }
    for kind, is_named in kinds.items():
        reason = f"<class 'ray.exceptions.{kind}'>:<'The actor 17 is unavailable:\n what'>"
        reply = Message(Error(0, reason), reply_to=message)
        with pytest.raises(PartyError) as caught:
            read_reply(reply, "bank", GreetReply, ENVELOPE.model_id, 7)
        text = rule.replace("Actor", kind[:5])
        assert bool(re.match(rf"bank \(step 7\): {text}", str(caught.value))) == is_named
