"""What a coordinator gains by opening a run in another way, or again: nothing."""

import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from fedapp.crypto.noise import budget_for
from fedapp.crypto.sealed import LARGEST_STEP
from fedapp.errors import ConfigError, FedappError, ProtocolError
from fedapp.home import home
from fedapp.messages import secureboost
from fedapp.messages.pax_secure import COUNTED_ROWS, PrivateOpenRequest
from fedapp.messages.vertical import VerticalHelloRequest
from fedapp.messages.wire import Content, Envelope, to_content
from fedapp.site import answer
from fedapp.site.mail import Mail
from fedapp.site.register import runs_of
from fedapp.site.settings import site_config
from fedapp.site.store import STATE
from tests.crypto.test_masks import GREETING, MODEL, NAMES, Coordinator, growing, scoring
from tests.network import fails_from, resumed, run
from tests.plans import planned
from tests.site.test_account import ask, begun, listing
from tests.site.test_plan import summing

EPSILON, DELTA, ROUNDS = 1.0, 1e-5, 2
ANOTHER = r"\.content must be what it was before the run was resumed; begin a new run$"


def private(configs):
    """A run with noise before its parties meet, and its plan."""
    budget = budget_for(EPSILON, DELTA, ROUNDS, 3)
    numbers = {"epsilon": EPSILON, "delta": DELTA, "multiplier": budget.multiplier}
    opens = partial(PrivateOpenRequest, **numbers, n_rounds=ROUNDS, clip=0.0)
    coordinator = Coordinator(configs, opens=opens, rounds=ROUNDS, **numbers)
    coordinator.opening = replace(coordinator.opening, n_rows=COUNTED_ROWS)
    return coordinator, {"rounds": ROUNDS, **numbers}


def masked_plan(**fields):
    return planned(NAMES, aggregation="secure", threshold=0, **fields)


# Another order of columns


@pytest.mark.slow
def test_noise_is_of_one_order_of_columns(configs):
    """The difference of both sums would be that of two columns, without noise."""
    coordinator, plan = private(configs)
    coordinator.masked(coordinator.opening, 3, checkpoint=2)
    again = {"attempt": 1, "checkpoint": 2}
    coordinator.ask(replace(GREETING, **masked_plan(**plan), columns=("b", "a")), 3, **again)
    with pytest.raises(ProtocolError, match=ANOTHER):
        coordinator.ask(coordinator.opening, 4, **again)


def test_a_sum_is_of_one_order_of_columns(configs):
    coordinator = Coordinator(configs, rounds=1, max_depth=1)
    coordinator.ask(coordinator.opening, 3, checkpoint=2)
    coordinator.ask(summing(first=True), 4, checkpoint=2)
    again = {"attempt": 1, "checkpoint": 2}
    more = masked_plan(rounds=1, max_depth=1)
    coordinator.ask(replace(GREETING, **more, columns=("b", "a")), 3, **again)
    with pytest.raises(ProtocolError, match=ANOTHER):
        coordinator.ask(coordinator.opening, 4, **again)


# Restarts


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        ({"aggregation": "plain", "restarts": 3}, r"restarts must be <= 2 in such a run "),
        ({"aggregation": "secure", "restarts": 1}, r"restarts must be <= 0 in such a run "),
        ({"aggregation": "plain", "restarts": 2, "rounds": 9}, r"rounds must be <= 8 in such"),
    ],
    ids=["more than two", "with masks", "rounds"],
)
def test_a_run_restarts_no_more_rounds_than_it_can(configs, plan, rule):
    bank = replace(configs["bank"], most_rounds=10)
    opening = replace(GREETING, rounded=False, **planned(NAMES, **{"rounds": 3, **plan}))
    with pytest.raises(ProtocolError, match=rule):
        ask(bank, opening, 1)


def test_invented_parties_bring_no_rounds(configs):
    """A coordinator would else get 121 rounds of a plan of one, each with leaves of its choice."""
    bank, names = configs["bank"], ("bank", *(f"invented-{number}" for number in range(60)))
    plan = planned(names, aggregation="plain", rounds=1, max_depth=1, restarts=120)
    with pytest.raises(ProtocolError, match=r"^bank: HelloRequest\.restarts must be <= 2 in such"):
        ask(bank, replace(GREETING, rounded=False, **plan), 1)


@pytest.mark.parametrize("more", [{"restarts": 1}, {"rounds": 1}])
def test_a_prediction_has_no_rounds(write_table, more):
    ids = [f"c{number}" for number in range(40)]
    node = {"name": "bank", "data": str(write_table("bank", id=ids)), "label": "y", "id": "id"}
    plan = planned(("bank", "shop"), aggregation="sealed", **{"rounds": 0, **more})
    opening = VerticalHelloRequest(True, 1000, 3, "", False, **plan)
    with pytest.raises(ProtocolError, match=rf"{next(iter(more))} must be <= 0 in such a run"):
        ask(site_config({**node, "allow": "interactive"}, {}), opening, 1, "interactive")


def test_what_began_again_does_so_after_every_step_back(configs):
    """A server that dies twice repeats what it asked; that is no further restart."""
    bank = begun(configs["bank"], rounds=2, max_depth=2, aggregation="plain", restarts=2)
    for step in (3, 4, 5):
        ask(bank, growing(), step, checkpoint=2)
    for attempt in (1, 2, 3):
        for step in (3, 4, 5):
            ask(bank, growing(), step, attempt=attempt, checkpoint=2)
    with pytest.raises(ProtocolError, match=r"round_id must be 1 by the plan"):
        ask(bank, growing(), 6, attempt=3, checkpoint=2)


@pytest.mark.slow
def test_a_server_that_dies_twice_after_it_lost_a_party_finishes_its_run(
    settings, sites, write_table
):
    nodes = [{"name": one, "data": write_table(one, 120, k)} for k, one in enumerate(NAMES)]
    contexts = sites(*nodes)
    one = settings(parties=3, strategy="pax", min_parties=2, num_boost_round=3)
    for given in (one, None):
        with pytest.raises(KeyboardInterrupt):
            run(given or resumed(one), contexts, fails_from(6), dies_before_sending=8)
    run(resumed(one), contexts, fails_from(6))


# Fewer rounds


def test_an_opening_with_fewer_rounds_gives_no_other_sum_and_no_round_beyond(configs):
    coordinator = Coordinator(configs, rounds=2, max_depth=6)
    coordinator.ask(coordinator.opening, 3)
    coordinator.ask(summing(first=True), 4, checkpoint=3)
    again = {"attempt": 1, "checkpoint": 3}
    coordinator.ask(replace(GREETING, **masked_plan(rounds=1, max_depth=6)), 4, **again)
    one_column = summing(first=True, columns=np.zeros(1, "i4"))
    with pytest.raises(ProtocolError, match=ANOTHER):
        coordinator.ask(one_column, 5, **again)
    coordinator.ask(summing(first=True), 5, **again)
    with pytest.raises(ProtocolError, match=r"round_id must be none: all have begun by the"):
        coordinator.ask(summing(round_id=1), 6, **again)


# What is refused leaves nothing


def test_a_refused_opening_takes_no_budget(configs):
    coordinator, _ = private(configs)
    keys = coordinator.opening.run_keys.copy()
    keys[1] = 0  # a point of low order, from which no secret follows
    with pytest.raises(ProtocolError, match=r"key"):
        coordinator.ask(replace(coordinator.opening, run_keys=keys), 3, ["bank"])
    (run,) = runs_of(home() / "sites" / "bank")
    assert not run.charged


def test_a_stranger_in_a_sum_leaves_no_model(configs):
    sites = {name: replace(config, least_parties=2) for name, config in configs.items()}
    coordinator = Coordinator(sites, threshold=3, rounds=1)
    coordinator.ask(coordinator.opening, 3)
    before = listing(home() / "sites" / "bank" / MODEL)
    with pytest.raises(ProtocolError, match=r"^bank: sum\.names must be of those that are left"):
        coordinator.ask(replace(scoring(), among=("mallory", "bank", "shop")), 4, ["bank"])
    assert listing(home() / "sites" / "bank" / MODEL) == before


def test_a_letter_of_no_kind_is_refused():
    mail = Mail("bank", [("shop", Content("Letter", {}, {}))])
    with pytest.raises(ProtocolError, match=r"^shop: parcel\.class must be known, got Letter$"):
        list(mail.decoded("secureboost", secureboost.SumRequest))


def test_a_step_beyond_all_numbers_is_refused(configs):
    bank = begun(configs["bank"], rounds=1, max_depth=1, aggregation="plain")
    before = listing(home() / "sites" / "bank" / MODEL)
    with pytest.raises(ProtocolError, match=rf"step must be <= {LARGEST_STEP}, got"):
        ask(bank, growing(), LARGEST_STEP + 1)
    assert listing(home() / "sites" / "bank" / MODEL) == before


def test_a_first_message_that_is_refused_does_not_delete_what_another_began(configs, monkeypatch):
    bank, kept, refused = configs["bank"], answer.rmtree, list[FedappError]()
    opening = replace(GREETING, rounded=False, **planned(("bank", "zoo"), aggregation="plain"))
    deletes = threading.Event()

    def slowly(*given, **more):
        deletes.set()
        time.sleep(0.3)  # the other message comes meanwhile
        kept(*given, **more)

    def first():
        envelope = Envelope(MODEL, 2, gap=1, method="pax")  # an opening is no second step
        try:
            answer.answer(bank, opening.kind, envelope, to_content(opening, "bank"))
        except FedappError as error:
            refused.append(error)

    monkeypatch.setattr(answer, "rmtree", slowly)
    thread = threading.Thread(target=first)
    thread.start()
    assert deletes.wait(10)
    with suppress(ConfigError):  # as the same opening was refused meanwhile
        ask(bank, opening, 1)
    thread.join()
    (run,), folder = runs_of(home() / "sites" / "bank"), home() / "sites" / "bank" / MODEL
    assert len(refused) == 1
    assert run.admitted == (folder / STATE).exists()
