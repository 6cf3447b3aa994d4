"""Roles: fields in the store and back, and the order in which requests are answered."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from clients import (
    eini,
    fedavg_linear,
    federated_forest,
    fedxgbllr,
    handshake,
    inference,
    local_boosting,
    pax,
    pax_secure,
    secureboost,
    vertical,
)
from clients.federated_forest.paillier import PaillierActive, PaillierPassive
from clients.federated_forest.party import EncodedActive, EncodedPassive
from clients.secureboost.active import Active
from clients.secureboost.passive import Passive
from clients.secureboost.round import Round, Unsent
from fedapp.errors import ProtocolError
from fedapp.messages import describe
from fedapp.messages.handshake import GreetRequest, HelloRequest
from fedapp.messages.inference import ExplainRequest
from fedapp.messages.secureboost import (
    BeginRequest,
    EncryptRequest,
    FinishRequest,
    SetupRequest,
    SplitRequest,
    WalkRequest,
)
from fedapp.messages.vertical import VerticalHelloRequest
from fedapp.site.answer import Site
from fedapp.site.mail import Mail
from fedapp.site.roles import Role, name_of, role
from fedapp.site.settings import SiteConfig
from fedapp.site.store import NoStateError, Store
from fedapp.trees.grow import Growing
from tests.forests import encrypted_forest
from tests.network import run

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    low: Doubles
    high: Doubles
    n: int = 0


@role
class Sample(Role):
    """Fields of several forms."""

    n_rows: int = 3
    late: Doubles
    numbers: Doubles = np.zeros(2)
    pair: Pair
    other: Pair | None = None
    sides: Mapping[str, Doubles] = {}
    levels: tuple[Doubles, ...] = ()
    text: str | None = None


def opened(folder, store=None):
    store = store or Store.open(folder)
    return Sample.load(Site(SiteConfig("bank", "rows.csv"), store)), store


def written(party, store):
    """How many arrays a commit writes, without the reply."""
    party.save()
    before = len(store.journal._filed)
    store.commit(store.step + 1, 0, b"")
    return len(store.journal._filed) - before - 1


def test_only_what_was_replaced_is_written(tmp_path):
    party, store = opened(tmp_path)
    party.pair, party.numbers = Pair(np.zeros(1), np.ones(1)), np.zeros(1)
    party.sides, party.levels = {"a": np.ones(1), "b": np.ones(2)}, (np.ones(1),)
    assert written(party, store) == 6
    party, store = opened(tmp_path)
    assert (party.numbers[0], party.n_rows, party.text) == (0, 3, None)
    party.pair = replace(party.pair, high=np.zeros(2))
    party.sides = {"b": party.sides["b"], "c": np.ones(3)}
    party.levels = (*party.levels, np.ones(2))
    assert written(party, store) == 3  # pair.high, sides.c, levels.1
    party, store = opened(tmp_path)
    assert sorted(party.sides) == ["b", "c"]
    party.sides, party.levels, party.other = {}, (), party.pair
    assert written(party, store) == 0
    party, store = opened(tmp_path)
    assert (party.sides, party.levels) == ({}, ())
    assert party.other is not None
    party.other = None
    assert written(party, store) == 0
    assert opened(tmp_path)[0].other is None


def test_a_request_follows_no_request_of_another_method_that_has_its_name(tmp_path):
    party, _ = opened(tmp_path, Store(tmp_path, last=name_of(SetupRequest)))
    assert party.follows(SetupRequest)
    assert not party.follows(describe.SetupRequest)


def test_a_field_that_was_never_set_has_its_default_or_says_so(tmp_path):
    party, store = opened(tmp_path)
    assert party.numbers.tolist() == [0, 0]
    assert party.other is None
    assert party.sides == {}
    with pytest.raises(NoStateError, match="late"):
        _ = party.late
    with pytest.raises(AttributeError, match="numbres"):
        _ = party.numbres
    party.save()
    assert not store._values
    assert "zeros" not in repr(party)
    assert "array" not in repr(party)


ROLES = {
    **dict.fromkeys(
        (EncodedActive, EncodedPassive, PaillierActive, PaillierPassive), federated_forest.HANDLERS
    ),
    **dict.fromkeys((Active, Passive), secureboost.HANDLERS),
    **dict.fromkeys((inference.Active, inference.Passive), inference.HANDLERS),
    **dict.fromkeys((eini.Active, eini.Passive), eini.HANDLERS),
    vertical.Opening: vertical.HANDLERS,
    handshake.Opening: handshake.HANDLERS,
    pax.Party: pax.HANDLERS,
    pax_secure.Private: pax_secure.HANDLERS,
    local_boosting.Booster: local_boosting.HANDLERS,
    fedxgbllr.Stacker: fedxgbllr.HANDLERS,
    fedavg_linear.Averager: fedavg_linear.HANDLERS,
}
ANY_TIME = {ExplainRequest, VerticalHelloRequest, HelloRequest, GreetRequest}


def table_of(role_class):
    """Request -> requests that may follow it; none follow another method's of the same name."""
    follow = role_class.order.follow
    elsewhere = {f"elsewhere.{before.__name__}": set() for before in (*follow, FinishRequest)}
    return {name_of(before): {*after} for before, after in follow.items()} | elsewhere


def out_of_order(role_class):
    for last, after in table_of(role_class).items():
        for request in ROLES[role_class].keys() - after - ANY_TIME:
            yield last, request


@pytest.mark.parametrize("role_class", ROLES)
def test_a_request_out_of_order_is_refused_with_those_it_may_follow(tmp_path, role_class):
    wrong = [*out_of_order(role_class)]
    assert wrong
    for request in ROLES[role_class].keys() - ANY_TIME:  # a run that a site knows nothing of
        if request not in role_class.order.any_time:
            unknown = Site(SiteConfig("bank", "rows.csv"), Store(tmp_path))
            with pytest.raises(NoStateError, match="state"):
                ROLES[role_class][request](unknown, object.__new__(request))
    for last, request in wrong:
        store = Store(tmp_path, role=name_of(role_class), last=last)
        site = Site(SiteConfig("bank", "rows.csv"), store)
        follow = role_class.order.follow.items()
        before = " or ".join(kind.__name__ for kind, after in follow if request in after)
        rule = (
            f"follow {before} at {role_class.title}"
            if before
            else f"not come to {role_class.title}"
        )
        got = last.rpartition(".")[2]
        match = f"bank: {request.__name__}.step must {rule}, got it after {got}"
        with pytest.raises(ProtocolError, match=f"^{re.escape(match)}$"):
            ROLES[role_class][request](site, object.__new__(request))
        assert (store.role, store.last) == (name_of(role_class), last)


@pytest.mark.by_default("encoded")
@pytest.mark.parametrize("labels", ["encoded", "paillier"])
def test_a_run_of_federated_forest_makes_all_steps_of_its_order(
    settings, tmp_path, monkeypatch, labels
):
    honest, seen = Store.commit, set()

    def commit(self, *arguments):
        seen.add((self.role, self.last))
        honest(self, *arguments)

    monkeypatch.setattr(Store, "commit", commit)
    monkeypatch.setattr("fedapp.messages.vertical.BLOCK_BYTES", 2**12)  # several blocks
    run(encrypted_forest(settings, tmp_path)(parties=3, own_labels=labels))
    due = {
        (name_of(each), name_of(request))
        for each in ROLES
        if labels in each.title
        for after in each.order.follow.values()
        for request in after
    }
    assert {pair for pair in seen if pair[0] not in ("", name_of(vertical.Opening))} == due


GROWS, GROWN = (Growing((), np.zeros((n, 2), np.int32), np.zeros((n, 2))) for n in (1, 0))
STARTED = Round(0, np.zeros((1, 2, 2), np.float32), np.ones((1, 1), bool), GROWS)
WALKS = inference.Traversal(np.zeros((1, 2), np.int32), (), {})
UNSENT = replace(STARTED, unsent=Unsent(np.zeros((2, 1, 2), np.int64)))


@pytest.mark.parametrize(
    ("last", "request_class", "state"),
    [
        (SetupRequest, WalkRequest, {}),
        (SetupRequest, BeginRequest, {"traversal": WALKS}),
        (SplitRequest, BeginRequest, {"round": STARTED}),
        (SplitRequest, SplitRequest, {"round": replace(STARTED, growth=GROWN)}),
        (BeginRequest, SplitRequest, {}),
        (BeginRequest, SplitRequest, {"round": UNSENT}),
        (BeginRequest, EncryptRequest, {"round": STARTED}),
        (EncryptRequest, EncryptRequest, {"round": STARTED}),
    ],
)
def test_a_request_that_is_in_order_but_not_due_is_refused(tmp_path, last, request_class, state):
    store = Store(tmp_path, role=name_of(Active), last=name_of(last))
    site = Site(SiteConfig("bank", "rows.csv"), store)
    party = Active.load(site)
    for name, value in state.items():
        setattr(party, name, value)
    party.save()
    rule = f"^bank: {request_class.__name__}.step must be due: blocks of gradients and levels of "
    with pytest.raises(ProtocolError, match=rule):
        secureboost.HANDLERS[request_class](site, object.__new__(request_class), Mail("bank", []))
    assert site.store.last == name_of(last)
