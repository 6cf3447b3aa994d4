"""Letters between sites as handlers see them, and the answer of a run that has ended."""

from dataclasses import dataclass, replace
from functools import partial
from shutil import rmtree
from typing import Annotated

import numpy as np
import pytest

from fedapp.crypto.sealed import new_private_key, public_key
from fedapp.errors import ConfigError, ProtocolError
from fedapp.home import home
from fedapp.messages.fields import (
    AT_ANY_TIME,
    Array,
    Form,
    Letter,
    Range,
    Reply,
    Request,
    SiteLimit,
    message,
    request,
)
from fedapp.messages.handshake import Plan
from fedapp.messages.vertical import SentReply
from fedapp.messages.wire import Content, Envelope, from_content, parcels_of, to_content
from fedapp.site.account import Account
from fedapp.site.mail import (
    address_of,
    begin_session,
    box_key,
    note_greeting,
    run_key,
    seal_mail,
    session_secret,
    store_peers,
)
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from tests.plans import planned
from tests.site.office import declare_group
from tests.sites import answer
from tests.tampering import refuses

MODEL = "0123456789abcdef"
NAMES = ("bank", "shop")


@request("query.testmail_greet")
class GreetRequest(Plan, Request):
    """Draw a key of the run."""

    rounds: Annotated[int, Range(0, 100)]


@request("query.testmail_meet")
class MeetRequest(Request):
    """Know the keys."""

    keys: Annotated[Array, Form("uint8", "n_parties", 32)]
    run_keys: Annotated[Array, Form("uint8", "n_parties", 32)]
    active: str


@request("train.testmail_tell", times=AT_ANY_TIME)
class TellRequest(Request, letters=True):
    """Pass on what has come, and something new; in the end forget it all."""

    number: Annotated[int, Range(0, 100)]
    last: bool


@message
class TellReply(Reply, letters=True):
    """How often the handler ran, and what had come."""

    n_calls: int
    heard: Annotated[Array, Form("int64", "n_letters")]


@message
class BareReply(Reply):
    """Nothing, and no letters."""

    done: bool


@message
class Note(Letter):
    """A number."""

    number: Annotated[int, Range(0, 100), SiteLimit("most-bins")]


@dataclass(slots=True)
class Sites:
    """Two sites as the server talks to them."""

    calls: list[str]

    def ask(self, name, request, parcels=(), **envelope):
        return self.hand(request.kind, to_content(request, name, parcels), name, **envelope)

    def hand(self, kind, content, name="bank", **envelope):
        """A message as it has arrived, whatever is in it."""
        site = SiteConfig(name, "rows.csv", allowed=frozenset({"testmail"}))
        return answer(site, kind, Envelope(MODEL, method="testmail", **envelope), content)

    def tell(self, name, number, last=False, **more):
        return self.ask(name, TellRequest(number, last), **more)

    def store(self, name):
        return Store.open(home() / "sites" / name / MODEL)

    def begin(self, lie=None, **envelope):
        """The first two steps, and the request of the second; the server may lie to a party."""
        for name in NAMES:
            greeting = GreetRequest(**planned(NAMES, aggregation="sealed", rounds=9, restarts=9))
            self.ask(name, lie(name, greeting) if lie else greeting, step=1, **envelope)
        keys = np.stack([box_key(name) for name in NAMES])
        run_keys = np.stack([run_key(self.store(name)) for name in NAMES])
        opening = MeetRequest(keys, run_keys, "bank")
        for name in NAMES:
            self.ask(name, lie(name, opening) if lie else opening, step=2, **envelope)
        return opening


@pytest.fixture
def unmet(monkeypatch):
    """Two sites that know nothing of each other yet."""
    calls = []

    def greet(site, request):
        note_greeting(site.store, request)
        begin_session(site.store)
        return SentReply()

    def meet(site, request):
        store_peers(site.config, site.store, NAMES, (request.keys, request.run_keys), request)
        return SentReply()

    def tell(site, request, mail):
        calls.append(site.name)
        other = next(name for name in NAMES if name != site.name)
        heard = np.array([note.number for _, note in mail.each(Note)], dtype=np.int64)
        if request.last:
            site.store.forget()
        reply = TellReply(len(calls), heard) if request.number else BareReply(done=True)
        return reply, [(other, Note(request.number))]

    handlers = {GreetRequest: greet, MeetRequest: meet, TellRequest: tell}
    declare_group(monkeypatch, "testmail", handlers)
    return Sites(calls)


@pytest.fixture
def sites(unmet):
    """The same after two steps, with each other's keys."""
    unmet.begin()
    return unmet


def opened(sites, sent, step, **envelope):
    """What shop makes of the parcels of bank's reply."""
    parcels = [("bank", content) for _, content in parcels_of(sent)]
    reply = sites.tell("shop", 1, parcels=parcels, step=step, **envelope)
    return from_content(TellReply, reply, "shop").heard.tolist()


def parcel_of(sent):
    [(_, content)] = parcels_of(sent)
    return content


def test_a_letter_reaches_the_other_handler_and_no_one_else_can_read_it(sites):
    sent = sites.tell("bank", 77, step=3)
    [(receiver, content)] = parcels_of(sent)
    assert receiver == "shop"
    assert b"Note" not in content
    assert opened(sites, sent, step=3) == [77]


TOLD = Content("TellRequest", {"number": 1, "last": False}, {})
TOLD_ALL = to_content(TellRequest(1, False), "bank")
PEERS = {"peers": TOLD_ALL.scalars["peers"]}
GREETED = to_content(GreetRequest(1), "bank")
SEEN = r"^bank: parcel\.step must be a new one, got one seen before$"
OVER = r"^bank: parcel\.step must be a new one, got one of an earlier attempt$"
NO_PARTY = r"parcel\.sender must be another party of the run$"
# What is done at two sites that have met, and why it is refused.
REFUSED = {
    "no fields of letters": (
        lambda sites: sites.hand(TellRequest.kind, TOLD, step=3),
        r"^bank: TellRequest\.parcel_ends must be present$",
    ),
    "a peer without a parcel": (
        lambda sites: sites.hand(
            TellRequest.kind,
            replace(TOLD_ALL, scalars=TOLD_ALL.scalars | {"peers": ["shop"]}),
            step=3,
        ),
        r"^bank: TellRequest\.peers must be one a parcel$",
    ),
    "letters where there are none": (
        lambda sites: sites.hand(
            GreetRequest.kind, replace(GREETED, scalars=GREETED.scalars | PEERS), step=3
        ),
        r"^bank: GreetRequest\.peers must be absent$",
    ),
    "a step beyond all": (
        lambda sites: sites.tell("bank", 1, step=2**32, gap=0, checkpoint=9),
        rf"^bank: TellRequest\.step must be <= {2**32 - 1}, got {2**32}$",
    ),
    "an attempt beyond all": (
        lambda sites: sites.tell("bank", 1, step=4, attempt=2**16, gap=0, checkpoint=9),
        rf"^bank: TellRequest\.attempt must be <= {2**16 - 1}, got {2**16}$",
    ),
    **{
        f"a letter of {sender}": (
            lambda sites, sender=sender: sites.tell("shop", 1, parcels=[(sender, b"")], step=3),
            f"^{sender}: {NO_PARTY}",
        )
        for sender in ("mallory", "shop")
    },
    "keys once more": (
        lambda sites: sites.ask("bank", sites.begin(), step=3),
        r"^bank: parcel\.names must be sent once$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_letter_of_the_run_is_refused(unmet, monkeypatch, case):
    act, rule = REFUSED[case]
    if case == "keys once more":  # by a simulated site, which has no plan that refuses them before
        monkeypatch.setattr("tests.site.test_mail.SiteConfig", partial(SiteConfig, simulated=True))
    else:
        unmet.begin()
    with pytest.raises(ProtocolError, match=rule):
        act(unmet)
    assert {unmet.store(name).step for name in NAMES} == {2}


def test_a_letter_that_cannot_be_sent_or_read_is_refused(sites, monkeypatch):
    with pytest.raises(AssertionError, match="BareReply carries no letters"):
        sites.tell("bank", 0, step=3)
    rule = r"must be <= 10 bytes, got \d\d; take fewer rows, columns or bins \(max-bin\)"
    with monkeypatch.context() as patch:
        patch.setattr("fedapp.site.mail.LARGEST_CONTENT", 10)
        with pytest.raises(ProtocolError, match=rf"^bank: Note\.letter {rule}$"):
            sites.tell("bank", 1, step=3)
    assert sites.store("bank").step == 2
    sent = sites.tell("bank", 77, step=3)
    rule = r"^number of bank must be <= 76 \(most-bins in the node config of shop\), got 77$"
    with monkeypatch.context() as patch:
        patch.setattr("tests.site.test_mail.SiteConfig", partial(SiteConfig, most_bins=76))
        with pytest.raises(ConfigError, match=rule):
            opened(sites, sent, step=3)
    with monkeypatch.context() as patch:
        patch.delattr("tests.site.test_mail.Note")
        with pytest.raises(ProtocolError, match=r"^bank: parcel\.class must be known, got Note$"):
            opened(sites, sent, step=3)
    assert opened(sites, sent, step=3) == [77]


UNLIKE = (
    r"^bank: parcel\.content must be sealed by bank for shop in this run, got \d+ bytes that are "
    "not: changed on the way, or the server sent the two different parties, keys or settings$"
)


def told(to, kind, change):
    """The server sends a party another request of a kind."""
    return lambda name, sent: change(sent) if name == to and isinstance(sent, kind) else sent


def test_parties_that_were_told_of_different_runs_do_not_read_each_other(unmet):
    """In what comes before the opening; of the opening see ``test_trust``."""
    unmet.begin(told("shop", GreetRequest, lambda greeting: replace(greeting, rounds=3)))
    sent = unmet.tell("bank", 77, step=3)
    with pytest.raises(ProtocolError, match=UNLIKE):
        opened(unmet, sent, step=3)


def test_a_site_is_not_told_another_key_of_the_run_than_its_own(unmet):
    key = np.frombuffer(public_key(new_private_key()), np.uint8)
    lie = told("bank", MeetRequest, lambda opening: replace(opening, run_keys=np.stack([key, key])))
    with pytest.raises(ProtocolError, match=r"^bank: parcel\.key must be the one that the site s"):
        unmet.begin(lie)


def test_parties_that_were_told_of_different_methods_do_not_read_each_other(sites):
    store = sites.store("shop")
    secrets = {
        session_secret("shop", store, Envelope(model, 3, method=method), "bank")
        for model in (MODEL, MODEL[::-1])
        for method in ("testmail", "pax")
    }
    assert len(secrets) == 4


def test_a_letter_that_came_before_is_refused_and_so_is_an_older_one(sites):
    older, newer, both = (sites.tell("bank", number, step=2 + number) for number in (1, 2, 3))
    assert opened(sites, newer, step=4, gap=0) == [2]
    for sent in (newer, older):
        with pytest.raises(ProtocolError, match=SEEN):
            opened(sites, sent, step=5)
    parcels = [("bank", parcel_of(both))]
    with pytest.raises(ProtocolError, match=SEEN):
        sites.tell("shop", 1, parcels=2 * parcels, step=5)


def resumed(sites, attempt, checkpoint, step, names=NAMES):
    """A server that was started anew greets the sites: a step that carries no news."""
    for name in names:
        envelope = {"attempt": attempt, "checkpoint": checkpoint, "gap": 0}
        sites.ask(name, TellRequest(1, False), step=step, **envelope)


def test_a_letter_of_a_start_that_is_over_is_refused_also_after_further_ones(sites):
    first = sites.tell("bank", 70, step=3)
    sites.tell("shop", 1, step=3)
    late = sites.tell("bank", 77, step=4, checkpoint=3)
    assert opened(sites, late, step=4, checkpoint=3) == [77]
    resumed(sites, attempt=1, checkpoint=3, step=4)
    again = {"attempt": 1, "checkpoint": 3, "step": 5}
    with pytest.raises(ProtocolError, match=OVER):
        opened(sites, late, **again)
    assert opened(sites, first, **again) == [70]
    new = sites.tell("bank", 78, attempt=1, checkpoint=3, step=6, gap=0)
    assert parcel_of(new)[8:] != parcel_of(late)[8:]  # sealed under another key
    own = [address_of(sites.store("bank"), "bank", "shop", parcel_of(one)) for one in (late, new)]
    assert [(one.step, one.attempt, one.since) for one in own] == [(4, 0, 0), (6, 1, 3)]
    resumed(sites, attempt=2, checkpoint=6, step=7)
    with pytest.raises(ProtocolError, match=OVER):
        opened(sites, late, attempt=2, checkpoint=6, step=8)
    assert opened(sites, new, attempt=2, checkpoint=6, step=8) == [78]


def test_a_server_cannot_name_another_checkpoint_than_it_kept(sites):
    """It would have the site forget what it has heard, and hear it again."""
    sites.tell("shop", 1, step=3)
    late = sites.tell("bank", 77, step=4, gap=0)
    assert opened(sites, late, step=4, checkpoint=3) == [77]
    sites.tell("shop", 1, step=5, checkpoint=3)
    with pytest.raises(ProtocolError, match=SEEN):
        opened(sites, late, attempt=1, checkpoint=4, step=6)
    sites.tell("shop", 1, attempt=1, checkpoint=3, step=4)


def test_parties_that_were_told_of_different_checkpoints_do_not_read_each_other(sites):
    """Otherwise one would go on from where the other has gone back."""
    for name in NAMES:
        sites.tell(name, 1, step=3)
    over = sites.tell("bank", 77, step=4, checkpoint=3)
    sites.tell("shop", 1, step=4)
    resumed(sites, attempt=1, checkpoint=3, step=5, names=["bank"])
    resumed(sites, attempt=1, checkpoint=4, step=5, names=["shop"])
    new = sites.tell("bank", 78, attempt=1, checkpoint=3, step=6)
    with pytest.raises(ProtocolError, match=UNLIKE):
        opened(sites, new, attempt=1, checkpoint=4, step=6)
    assert opened(sites, over, attempt=1, checkpoint=4, step=6) == [77]


def test_sites_that_lost_their_state_read_nothing_of_before(sites):
    old = sites.tell("bank", 77, step=3)
    assert opened(sites, old, step=3) == [77]
    keys = [run_key(sites.store(name)).tobytes() for name in NAMES]
    for name in NAMES:
        rmtree(sites.store(name).folder)
    sites.begin()
    assert not set(keys) & {run_key(sites.store(name)).tobytes() for name in NAMES}
    with pytest.raises(ProtocolError, match=UNLIKE):
        opened(sites, old, step=3)


LAST = {"step": 6, "gap": 4, "checkpoint": 5}


def test_an_ended_run_answers_a_later_attempt_with_the_same_letters_and_nothing_else(sites):
    sent = sites.tell("bank", 77, last=True, **LAST)
    later = {"last": True, "step": 9, "gap": 1, "checkpoint": 5, "attempt": 1}
    with pytest.raises(ProtocolError, match=r"^bank: TellRequest\.content must be what it was wh"):
        sites.tell("bank", 78, **later)
    again = sites.tell("bank", 77, **later)
    assert sites.calls == ["bank"]
    assert again.scalars["n_calls"] == sent.scalars["n_calls"] == 1
    assert parcels_of(again) == parcels_of(sent)
    store = sites.store("bank")
    files = b"".join(path.read_bytes() for path in store.folder.iterdir() if path.is_file())
    sealed = b"".join(store.read_bytes(name) for name in ("ended", "reply"))
    assert b"TellReply" in sealed
    assert b"Note" not in sealed + files


def test_the_attempt_that_ended_a_run_is_answered_by_the_handler_which_can_write_no_letter(sites):
    sites.tell("bank", 77, last=True, **LAST)
    assert "ended" in sites.store("bank")
    rule = r"parcel\.key must be there, the site has ended the run$"
    with pytest.raises(ProtocolError, match=rule):
        sites.tell("bank", 77, last=True, step=7, checkpoint=5)
    assert sites.calls == ["bank", "bank"]
    sites.tell("shop", 77, last=True, step=3)  # without a checkpoint no letters are kept
    assert not sites.store("shop").get(Account).endings
    assert "ended" not in sites.store("shop")


def test_a_parcel_for_nobody_of_the_run_stops_it_by_the_senders_name(vertical, monkeypatch):
    def to_nobody(*given):
        return [("nobody", content) for _, content in seal_mail(*given)]

    monkeypatch.setattr("fedapp.site.answer.seal_mail", to_nobody)
    refuses(r"^party-1: SentReply\.parcels must be for parties$", vertical(align="psi"))
