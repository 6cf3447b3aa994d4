"""Every message is answered once or named as lost, whatever the network does."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import cast

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.task_identity import TaskIdentity

from fedapp.errors import PartyError
from fedapp.messages.fields import loss_fields
from fedapp.messages.pax import SketchReply, SketchRequest
from fedapp.messages.wire import Envelope, n_bytes, to_content, to_records
from fedapp.settings import load_settings
from strategies import delivery
from strategies.delivery import (
    LONGEST_POLL,
    LOST,
    MISSED_AFTER,
    MISSED_TIMES,
    NAMED_AFTER,
    Courier,
    Ledger,
    read_reply,
)

RESEND, DEADLINE = 10.0, 100.0
ENVELOPE = Envelope("0123456789abcdef", 7)
NODES = {"bank": 2, "shop": 3}

# What a node does with a message it gets: (seconds until the answer, None or an error's code).
Answers = list[tuple[float, int | None]]
Script = Callable[[int, int], Answers]  # of a node and how many messages it had before


@dataclass(slots=True)
class Network:
    """A Grid and a clock: time passes when the courier sleeps."""

    script: Script
    now: float = 0.0
    pushed: list[tuple[float, Message]] = field(default_factory=list)
    due: list[tuple[float, str, Message]] = field(default_factory=list)
    n_broken: int = 0  # pushes in whose midst the SuperLink ends
    # When the bank's node connected, and a time from which on it is not.
    connected: Sequence[float] = (0.0,)
    gone: tuple[float, float] = (DEADLINE, DEADLINE)
    began: float = field(default_factory=time.time)

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
                answer = Error(code, "lost") if code else sketch_reply()
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
        found = [one for one in self.due if one[0] <= self.now and one[1] in asked]
        self.due = [one for one in self.due if one not in found]
        return [reply for _, _, reply in found]

    def n_sent(self, node):
        return sum(message.metadata.dst_node_id == node for _, message in self.pushed)

    def sent_at(self, party):
        node = NODES[party]
        return [at for at, message in self.pushed if message.metadata.dst_node_id == node]


def sketch_reply():
    reply = SketchReply(
        representatives=np.arange(3, dtype=np.float32),
        masses=np.ones(3, dtype=np.float32),
        offsets=np.array([0, 3], dtype=np.int64),
        maxima=np.array([2], dtype=np.float32),
        label_sums=np.ones(1),
        weight_sum=3.0,
        unseen=np.empty(0, np.int64),
    )
    return to_records(to_content(reply, "bank"), ENVELOPE)


def request():
    sketch = SketchRequest(
        n_bins=3,
        classes=("0", "1"),
        category_counts=np.empty(0, np.int32),
        categories=(),
        **loss_fields(load_settings({})),
    )
    return to_records(to_content(sketch, "bank"), ENVELOPE)


@dataclass(slots=True)
class Found:
    """What an exchange came to."""

    network: Network
    replies: dict[str, Message]
    ledger: Ledger
    named: list[tuple[float, list[str], list[str]]]

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

        grid, waits = cast(Grid, network), (resend_after, DEADLINE)
        courier = Courier(grid, ledger, *waits, name_waiting, clock=network.clock)
        messages = {
            party: Message(request(), node, SketchRequest.kind, group_id="7")
            for party, node in NODES.items()
        }
        if resend_after > RESEND:
            courier.deliver(messages, 7)
        return Found(network, courier.deliver(messages, 7), ledger, named)

    return run


def bank_is(answers):
    """The bank answers as said, by how many messages it had before; the shop in a second."""
    return lambda node, before: answers(before) if node == NODES["bank"] else [(1.0, None)]


def test_every_party_is_asked_once_where_nothing_is_lost(exchange):
    found = exchange(bank_is(lambda before: [(2.0, None)]))
    assert {party: found.network.sent_at(party) for party in NODES} == {"bank": [0], "shop": [0]}
    assert sorted(found.replies) == ["bank", "shop"]
    assert all(reply.has_content() for reply in found.replies.values())


def test_messages_are_sent_again_when_the_superlink_ends_in_the_midst_of_them(exchange):
    found = exchange(bank_is(lambda before: [(2.0, None)]), n_broken=2)
    assert sorted(found.replies) == ["bank", "shop"]
    assert all(len(found.network.sent_at(party)) == 1 for party in NODES)
    assert found.network.sent_at("bank")[0] < 2 * LONGEST_POLL


def test_an_exchange_ends_with_the_last_reply(exchange):
    found = exchange(bank_is(lambda before: [(2.0, None)]))
    assert 2.0 <= found.network.now <= 2.0 + LONGEST_POLL


def test_parties_that_do_not_answer_are_named_after_a_while(exchange):
    assert not exchange(bank_is(lambda before: [(2.0, None)])).named
    ((when, parties, away),) = exchange(bank_is(lambda before: [(9.0, None)])).named
    assert NAMED_AFTER <= when <= NAMED_AFTER + LONGEST_POLL
    assert (parties, away) == (["bank"], [])


def test_a_party_that_is_not_connected_is_named_as_such_until_it_is_back(exchange):
    found = exchange(bank_is(lambda before: [(18.0, None)]), gone=(2.0, 12.0))
    assert [(parties, away) for _, parties, away in found.named] == [
        (["bank"], ["bank"]),
        (["bank"], []),
    ]


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


def test_no_copy_is_sent_to_a_node_that_is_not_connected(exchange):
    script = bank_is(lambda before: [(1.0, None)] if before else [(1.0, 5)])
    found = exchange(script, gone=(0.5, 40.0))
    first, second = found.network.sent_at("bank")
    assert 40.0 <= second - first <= 41.0
    assert found.ledger.to_parties == 3 * n_bytes(request())


def test_a_lost_message_is_sent_again_after_a_while_to_its_party_alone(exchange):
    found = exchange(bank_is(lambda before: [(1.0, None)] if before else []))
    first, second = found.network.sent_at("bank")
    assert RESEND <= second - first <= RESEND + LONGEST_POLL
    assert len(found.network.sent_at("shop")) == 1
    assert sorted(found.replies) == ["bank", "shop"]


def test_a_message_that_is_sent_again_is_the_same_one(exchange):
    found = exchange(bank_is(lambda before: [(1.0, None)] if before else []))
    first, second = [
        message for _, message in found.network.pushed if message.metadata.dst_node_id == 2
    ]
    assert second.content == first.content
    assert second.metadata.message_type == first.metadata.message_type == "train.pax_sketch"
    assert second.metadata.group_id == first.metadata.group_id == "7"
    assert second.metadata.message_id != first.metadata.message_id


def test_the_answer_to_the_first_copy_counts_though_a_second_was_sent(exchange):
    found = exchange(bank_is(lambda before: [(RESEND + 5, None)] if before == 0 else []))
    assert len(found.network.sent_at("bank")) == 2
    assert found.replies["bank"].metadata.reply_to_message_id == "message-0"


def test_two_answers_to_one_request_count_once(exchange):
    found = exchange(bank_is(lambda before: [(1.0, None), (1.0, None)]))
    assert [line["from"] for line in found.lines].count("bank") == 1
    assert found.ledger.to_server == 2 * n_bytes(sketch_reply())


def test_answers_to_both_copies_of_a_request_count_once(exchange):
    at = RESEND + 5
    found = exchange(bank_is(lambda before: [(at if before == 0 else 5 - LONGEST_POLL, None)]))
    assert len(found.network.sent_at("bank")) == 2
    assert [line["from"] for line in found.lines].count("bank") == 1


@pytest.mark.parametrize("code", sorted(LOST))
def test_a_message_that_is_reported_as_lost_is_sent_again_soon(exchange, code):
    found = exchange(bank_is(lambda before: [(1.0, None)] if before else [(1.0, code)]))
    first, second = found.network.sent_at("bank")
    assert 1.0 + LONGEST_POLL <= second - first <= 1.0 + 3 * LONGEST_POLL
    assert found.replies["bank"].has_content()


def test_a_node_that_stays_away_is_not_asked_without_pause(exchange):
    found = exchange(bank_is(lambda before: [(0.0, 5)]))
    assert sorted(found.replies) == ["shop"]
    assert len(found.network.sent_at("bank")) <= DEADLINE / LONGEST_POLL + 1


@pytest.mark.parametrize("code", [1, 2, 6, 7, 1000, 1001])
def test_another_error_is_an_answer(exchange, code):
    found = exchange(bank_is(lambda before: [(1.0, code)]))
    assert len(found.network.sent_at("bank")) == 1
    assert found.replies["bank"].error.code == code


def test_the_deadline_ends_the_exchange_without_the_party_that_is_silent(exchange):
    found = exchange(bank_is(lambda before: []))
    assert sorted(found.replies) == ["shop"]
    assert DEADLINE <= found.network.now <= DEADLINE + LONGEST_POLL


def test_a_message_that_a_grid_refuses_is_offered_again(exchange, monkeypatch):
    push = Network.push_messages

    def refuse_first(network, messages):
        ids = list(push(network, messages))
        return [None] * len(ids) if network.now == 0 else ids

    monkeypatch.setattr(Network, "push_messages", refuse_first)
    found = exchange(bank_is(lambda before: [(1.0, None)]))
    assert sorted(found.replies) == ["bank", "shop"]
    assert [line["seconds"] > 0 for line in found.lines if line["from"] == "server"] == [True] * 2


def test_the_ledger_has_a_line_a_message_with_the_bytes_the_codec_wrote(exchange):
    found = exchange(bank_is(lambda before: [(2.0, None)]))
    seen = [(line["from"], line["to"], line["bytes"]) for line in found.lines]
    down, up = n_bytes(request()), n_bytes(sketch_reply())
    assert seen == [
        ("server", "bank", down),
        ("server", "shop", down),
        ("shop", "server", up),
        ("bank", "server", up),
    ]
    assert {(line["step"], line["type"]) for line in found.lines} == {(7, "train.pax_sketch")}
    assert (found.ledger.to_parties, found.ledger.to_server) == (2 * down, 2 * up)


def test_the_ledger_counts_every_copy_of_a_request(exchange):
    found = exchange(bank_is(lambda before: [(1.0, None)] if before else []))
    assert [line["to"] for line in found.lines].count("bank") == 2
    assert found.ledger.to_parties == 3 * n_bytes(request())


def test_an_error_has_no_bytes(exchange):
    found = exchange(bank_is(lambda before: [(1.0, 1001)]))
    assert [line["bytes"] for line in found.lines if line["from"] == "bank"] == [0]


def test_a_ledger_goes_on_where_its_file_ends(tmp_path):
    for _ in range(2):
        ledger = Ledger(tmp_path / "ledger.jsonl", 10, 20)
        ledger.sent(1, "query.hello", "bank", 5)
        ledger.received(1, "query.hello", "bank", 6)
        ledger.flush()
    assert (ledger.to_parties, ledger.to_server) == (15, 26)
    assert len(ledger.path.read_text().splitlines()) == 4


def test_a_node_that_runs_another_projects_clientapp_is_named_as_such():
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, 1, 0
    message = Message(request(), NODES["bank"], SketchRequest.kind, group_id="7")
    context = Context(0, NODES["bank"], {}, RecordDict(), {})
    with pytest.raises(ValueError, match="registered") as caught:
        ClientApp()(message, context)
    reason = f"Traceback (most recent call last):\n...\nValueError: {caught.value}"
    reply = Message(Error(2, reason), reply_to=message)
    rule = r"^bank \(step 7\): runs another ClientApp, must run fedapp's \(fedapp.client_app:app\)$"
    with pytest.raises(PartyError, match=rule):
        read_reply(reply, "bank", SketchReply, ENVELOPE.model_id, 7)
