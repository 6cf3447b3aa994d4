"""Letters between sites as handlers see them, and the answer of a run that has ended."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest

from fedapp.errors import ProtocolError
from fedapp.home import home
from fedapp.messages.fields import Array, Form, Letter, Range, Reply, Request
from fedapp.messages.parcels import Parcel, SentReply
from fedapp.site.answer import Site, answer
from fedapp.site.config import SiteConfig
from fedapp.site.mail import STEP_BYTES, Letters, Mail, box_key, know, seal_mail
from fedapp.site.store import Store
from fedapp.wire.codec import Envelope
from fedapp.wire.content import Content, enclosed, put_together, take_apart
from tests.conftest import MakeSettings
from tests.tampering import refuses

MODEL = "0123456789abcdef"
NAMES = ("bank", "shop")


@dataclass(frozen=True, slots=True, eq=False)
class MeetRequest(Request):
    """Know the keys."""

    kind: ClassVar[str] = "query.testmail_meet"
    keys: Annotated[Array, Form("uint8", "n_parties", 32)]


@dataclass(frozen=True, slots=True, eq=False)
class TellRequest(Request, letters=True):
    """Pass on what has come, and something new; in the end forget it all."""

    kind: ClassVar[str] = "train.testmail_tell"
    number: Annotated[int, Range(0, 100)]
    last: bool


@dataclass(frozen=True, slots=True, eq=False)
class TellReply(Reply, letters=True):
    """How often the handler ran, and what had come."""

    n_calls: int
    heard: Annotated[Array, Form("int64", "n_letters")]


@dataclass(frozen=True, slots=True, eq=False)
class BareReply(Reply):
    """Nothing, and no letters."""

    done: bool


@dataclass(frozen=True, slots=True, eq=False)
class Note(Letter):
    """A number."""

    number: Annotated[int, Range(0, 100)]


@dataclass(slots=True)
class Sites:
    """Two sites as the server talks to them."""

    calls: list[str]

    def ask(
        self, name: str, request: Request, parcels: Iterable[Parcel] = (), **envelope: Any
    ) -> Content:
        content = take_apart(request, name, parcels)
        return answer(
            SiteConfig(name, "rows.csv"),
            request.kind,
            Envelope(MODEL, method="testmail", **envelope),
            content,
        )

    def tell(self, name: str, number: int, last: bool = False, **more: Any) -> Content:
        return self.ask(name, TellRequest(number, last), **more)

    def store(self, name: str) -> Store:
        return Store.open(home() / "sites" / name / MODEL)


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> Sites:
    calls: list[str] = []

    def meet(site: Site, request: MeetRequest) -> SentReply:
        know(site.config, site.store, NAMES, request.keys)
        return SentReply()

    def tell(site: Site, request: TellRequest, mail: Mail) -> tuple[Reply, Letters]:
        calls.append(site.name)
        other = next(name for name in NAMES if name != site.name)
        heard = np.array([note.number for _, note in mail.each(Note)], dtype=np.int64)
        if request.last:
            site.store.forget()
        reply = TellReply(len(calls), heard) if request.number else BareReply(done=True)
        return reply, [(other, Note(request.number))]

    module = ModuleType("clients.testmail")
    vars(module)["HANDLERS"] = {MeetRequest: meet, TellRequest: tell}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = Sites(calls)
    keys = np.stack([box_key(name) for name in NAMES])
    for name in NAMES:
        found.ask(name, MeetRequest(keys), step=1)
    return found


def opened(sites: Sites, sent: Content, step: int) -> list[int]:
    """What shop makes of the parcels of bank's reply."""
    parcels = [("bank", content) for _, content in enclosed(sent)]
    reply = sites.tell("shop", 1, parcels=parcels, step=step)
    return put_together(TellReply, reply, "shop").heard.tolist()


def test_a_letter_reaches_the_other_handler_and_no_one_else_can_read_it(sites: Sites) -> None:
    sent = sites.tell("bank", 77, step=2)
    [(receiver, content)] = enclosed(sent)
    assert receiver == "shop"
    assert b"Note" not in content
    assert opened(sites, sent, step=2) == [77]


def test_a_request_that_came_without_its_letters_fields_is_refused(sites: Sites) -> None:
    content = Content("TellRequest", {"number": 1, "last": False}, {})
    with pytest.raises(ProtocolError, match=r"^bank: TellRequest.parcel_ends must be present$"):
        answer(
            SiteConfig("bank", "rows.csv"),
            TellRequest.kind,
            Envelope(MODEL, 2, method="testmail"),
            content,
        )


def test_a_message_that_carries_no_letters_must_not_bring_any(sites: Sites) -> None:
    carried = take_apart(TellRequest(1, False), "bank")
    keys = take_apart(MeetRequest(np.zeros((2, 32), np.uint8)), "bank")
    scalars = {"peers": carried.scalars["peers"]}
    content = Content("MeetRequest", scalars, {**keys.arrays})
    with pytest.raises(ProtocolError, match=r"^bank: MeetRequest.peers must be absent$"):
        answer(
            SiteConfig("bank", "rows.csv"),
            MeetRequest.kind,
            Envelope(MODEL, 2, method="testmail"),
            content,
        )


def test_a_reply_that_carries_no_letters_does_not_lose_them_in_silence(sites: Sites) -> None:
    with pytest.raises(AssertionError, match="BareReply carries no letters"):
        sites.tell("bank", 0, step=2)
    assert sites.store("bank").step == 1


def test_an_ended_run_answers_a_later_attempt_as_before_and_seals_its_letters_anew(
    sites: Sites,
) -> None:
    sent = sites.tell("bank", 77, last=True, step=5, gap=4, checkpoint=4)
    again = sites.tell("bank", 77, last=True, step=9, gap=1, checkpoint=4, attempt=1)
    assert sites.calls == ["bank"]
    assert again.scalars["n_calls"] == sent.scalars["n_calls"] == 1
    [(_, first)], [(_, second)] = enclosed(sent), enclosed(again)
    steps = [int.from_bytes(one[:STEP_BYTES], "little") for one in (first, second)]
    assert steps == [2, 9]
    assert opened(sites, sent, step=2) == [77]
    assert opened(sites, again, step=3) == [77]


def test_an_ended_run_refuses_another_request_than_the_one_that_ended_it(sites: Sites) -> None:
    sites.tell("bank", 77, last=True, step=5, gap=4, checkpoint=4)
    rule = "^bank: TellRequest.content must be what it was when the run ended$"
    with pytest.raises(ProtocolError, match=rule):
        sites.tell("bank", 78, last=True, step=9, gap=1, checkpoint=4, attempt=1)


def test_the_attempt_that_ended_a_run_is_answered_by_the_handler(sites: Sites) -> None:
    sites.tell("bank", 77, last=True, step=5, gap=4, checkpoint=4)
    reply = sites.tell("bank", 77, last=True, step=6, checkpoint=4)
    assert reply.scalars["n_calls"] == 2


def test_a_run_without_a_checkpoint_keeps_no_letters_when_it_ends(sites: Sites) -> None:
    sites.tell("bank", 77, last=True, step=2)
    assert "kept" not in sites.store("bank").facts
    assert "kept" not in sites.store("bank")
    sites.tell("shop", 77, last=True, step=5, gap=4, checkpoint=4)
    assert "kept" in sites.store("shop")


def test_a_parcel_for_nobody_of_the_run_stops_it_by_the_senders_name(
    vertical: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_nobody(*given: Any) -> list[Parcel]:
        return [("nobody", content) for _, content in seal_mail(*given)]

    monkeypatch.setattr("fedapp.site.answer.seal_mail", to_nobody)
    refuses(r"^party-1: SentReply\.parcels must be for parties$", vertical())
