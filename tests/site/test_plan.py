"""A run asks a site for what its opening said, and for no more."""

from dataclasses import replace

import numpy as np
import pytest

from fedapp.errors import DivergedError, FedappError, PartyError, ProtocolError
from fedapp.histograms.sketch import LARGEST_FLOAT
from fedapp.messages.fields import fields_of
from fedapp.messages.handshake import GreetRequest
from fedapp.messages.pax import GrowRequest, GrowSumsRequest, SketchRequest
from fedapp.messages.wire import Envelope, to_content
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.site.answer import answer
from fedapp.site.trust import site_fingerprint
from strategies.method import TreeStrategy
from tests.crypto.test_masks import EDGES, GREETING, MODEL, NAMES, TERMS, Coordinator, growing
from tests.plans import planned

NO_CUTS = {"edges": np.empty(0, np.float32), "edge_offsets": np.empty(0, np.int64)}


def summing(first=False, **changes):
    """Masked sums of a round's root; the first one has cuts."""
    cuts = {"edges": EDGES, "edge_offsets": np.arange(3)} if first else NO_CUTS
    return GrowSumsRequest(**fields_of(replace(growing(), **changes)), **cuts, among=())


def test_a_run_that_was_approved_with_masks_is_not_asked_for_plain_sketches(configs):
    coordinator = Coordinator(configs)
    rule = r"^bank: SketchRequest\.class must be one for aggregation secure by the plan"
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask(SketchRequest(n_bins=4, **TERMS), 3, ["bank"])
    plain = replace(GREETING, **planned(NAMES, aggregation="plain"))
    rule = r"aggregation must be secure, as when the run was opened, got plain; begin a new run"
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask(plain, 3, ["bank"], attempt=1)


def test_a_plan_without_masks_allows_no_masked_or_noised_sums(configs):
    """Whoever sums with others must have approved that, and with whom."""
    coordinator = Coordinator(configs, aggregation="plain")
    with pytest.raises(ProtocolError, match=r"OpenRequest\.class must be one for aggregation plai"):
        coordinator.ask(coordinator.opening, 3, ["bank"])
    promise = {"epsilon": 1.0, "delta": 1e-5, "multiplier": 5.0}
    noised = Coordinator(configs, model="f" * 16, **promise)
    with pytest.raises(ProtocolError, match=r"OpenRequest\.class must be one for aggregation secu"):
        noised.ask(noised.opening, 3, ["bank"])


def test_a_plan_with_noise_allows_no_plain_sums(configs):
    """Whoever approves it reads of an epsilon, and the register counts it."""
    promise = {"epsilon": 1.0, "delta": 1e-5, "multiplier": 5.0}
    coordinator = Coordinator(configs, aggregation="plain", **promise)
    with pytest.raises(ProtocolError, match=r"SketchRequest\.class must be one for aggregation"):
        coordinator.ask(SketchRequest(n_bins=4, **TERMS), 3, ["bank"])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"subsample": 0.9}, r"subsample must be 1\.0 by the plan that opened the run, got 0\.9$"),
        ({"seed": 9}, r"seed must be 3 by the plan that opened the run, got 9$"),
        ({"level": 7}, r"level must be <= 6 by the plan that opened the run, got 7$"),
    ],
    ids=["subsample", "seed", "depth"],
)
def test_a_round_is_drawn_and_grown_as_planned(configs, change, rule):
    coordinator = Coordinator(configs)
    coordinator.ask(coordinator.opening, 3)
    with pytest.raises(ProtocolError, match=rf"^bank: GrowSumsRequest\.{rule}"):
        coordinator.ask(summing(first=True, **change), 4, ["bank"])


def test_rounds_rise_and_end_with_those_of_the_plan(configs):
    """The first need not be 0: a run may go on from another model."""
    coordinator = Coordinator(configs, rounds=2)
    coordinator.ask(coordinator.opening, 3)
    coordinator.ask(summing(first=True, round_id=5), 4)
    coordinator.ask(summing(round_id=6), 5)
    for round_id in (5, 6, 7):
        rule = rf"round_id must be none: all have begun by the plan .*, got {round_id}$"
        with pytest.raises(ProtocolError, match=rule):
            coordinator.ask(summing(round_id=round_id), 6, ["bank"])


def test_a_round_begins_once(configs):
    """Else one round has as many trees, of leaves of the coordinator's choice, as it asks for."""
    coordinator = Coordinator(configs, rounds=1)
    coordinator.ask(coordinator.opening, 3)
    coordinator.ask(summing(first=True), 4)
    told = {"leaf_values": np.ones(1, np.float32), "leaf_offsets": np.arange(2)}
    rule = r"round_id must be none: all have begun by the plan that opened the run, got 0$"
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask(summing(**told), 5, ["bank"])


def test_no_party_may_be_lost_that_the_plan_needs(configs):
    """What a lost party has sent before is told by the sums after: a person decides on that."""
    sites = {name: replace(config, least_parties=2) for name, config in configs.items()}
    coordinator = Coordinator(sites)
    opening = replace(coordinator.opening, threshold=3)
    rule = r"OpenRequest\.threshold must be 0 by the plan that opened the run, got 3$"
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask(opening, 3, ["bank"])


def test_a_server_that_goes_back_asks_for_no_other_sums(configs):
    """Each step back would else show another cell of the table."""
    coordinator = Coordinator(configs, rounds=2)
    coordinator.ask(coordinator.opening, 3)
    coordinator.ask(summing(first=True), 4, checkpoint=3)
    again = {"attempt": 1, "checkpoint": 3}
    other = summing(first=True, columns=np.zeros(1, np.int32))
    rule = r"^bank: GrowSumsRequest\.content must be what it was before the run was resumed; begin"
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask(other, 4, ["bank"], **again)
    coordinator.ask(summing(first=True), 4, ["bank"], **again)


def test_cuts_are_no_finer_than_planned(configs):
    coordinator = Coordinator(configs, max_bin=2)
    coordinator.ask(coordinator.opening, 3)
    edges = np.append(np.arange(2), np.append(np.arange(2), LARGEST_FLOAT)).astype(np.float32)
    finer = replace(summing(first=True), edges=edges, edge_offsets=np.array([0, 2, 5]))
    with pytest.raises(ProtocolError, match=r"edge_offsets must be <= 2 by the plan .*, got 3$"):
        coordinator.ask(finer, 4, ["bank"])


def test_a_server_that_goes_back_has_no_more_rounds(configs):
    coordinator = Coordinator(configs, rounds=2)
    coordinator.ask(coordinator.opening, 3)
    coordinator.ask(summing(first=True), 4, checkpoint=3)
    rule = r"round_id must be 0 by the plan that opened the run, got 2$"
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask(summing(first=True, round_id=2), 4, ["bank"], attempt=1, checkpoint=3)


def test_masks_are_between_the_parties_of_the_plan(configs):
    """A party that a person has not approved gets no part in a sum, although its key is pinned."""
    coordinator = Coordinator(configs)
    opening = coordinator.opening
    fewer = replace(
        opening, names=NAMES[:2], box_keys=opening.box_keys[:2], run_keys=opening.run_keys[:2]
    )
    sites = {name: replace(config, least_parties=2) for name, config in configs.items()}
    coordinator.configs = sites
    rule = r"^bank: parcel\.key of shop must be [0-9a-f ]{39} by the plan .*, got None$"
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask(fewer, 3, ["bank"])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"fingerprints": ("", "", "")}, r"parties must have bank with the fingerprint of its key"),
        ({"parties": ()}, r"fingerprints must be one a party"),
        ({"parties": ("bank", "bank", "shop")}, r"parties must be letters, digits, .* each once"),
        ({"max_bin": 2000}, r"max-bin must be <= 1024 \(most-bins in the node config of bank\)"),
    ],
    ids=["fingerprint", "parties", "twice", "bins"],
)
def test_a_plan_without_the_site_or_beyond_its_limits_is_refused(configs, change, rule):
    opening = replace(GREETING, **(planned(NAMES) | change))
    envelope = Envelope(MODEL, 1, method="pax")
    with pytest.raises(FedappError, match=rule):
        answer(configs["bank"], opening.kind, envelope, to_content(opening, "bank"))


def test_to_greet_a_site_leaves_nothing_there(configs):
    """It is answered before anybody has approved the run, as often as it is asked."""
    config = replace(configs["bank"], asks=True)
    for step in (0, 5, 0):
        envelope = Envelope(MODEL, step, method="pax")
        given = envelope, to_content(GreetRequest(), "bank")
        told = answer(config, GreetRequest.kind, *given).scalars
        assert told == {"name": "bank", "fingerprint": site_fingerprint("bank")}


# Whole runs


@pytest.mark.by_default("pax*", "bagging*", "cyclic*")
@pytest.mark.each_value_once
@pytest.mark.parametrize("patience", [0, 5], ids=["all rounds", "may stop early"])
@pytest.mark.parametrize("method", ["pax", "bagging", "cyclic", "fedavg-linear", "fedxgbllr"])
def test_honest_runs_of_sites_with_tables_of_their_own_keep_to_their_plans(
    settings, sites, write_table, method, patience
):
    """With early stopping the scores of the last round take a request more."""
    contexts = sites(
        *(
            {"name": name, "data": write_table(name, 200, seed), "allow": method}
            for seed, name in enumerate(("bank", "shop"))
        )
    )
    given = {"fedxgbllr__trees": 4, "fedxgbllr__rounds": 2} if method == "fedxgbllr" else {}
    run_local(
        settings(strategy=method, parties=2, early_stopping_rounds=patience, **given), contexts
    )


def test_sites_let_a_run_that_has_diverged_end_with_fewer_rounds_than_planned(
    settings, sites, write_table
):
    contexts = sites({"name": "bank", "data": write_table("bank"), "allow": "pax"})
    given = settings(parties=1, objective="reg:squarederror", eta=1e6, num_boost_round=20)
    with pytest.raises(DivergedError, match=r"; num-boost-round=\d+ ends before it") as caught:
        run_local(given, contexts)
    resumed = run_local(load_settings({"resume": given.run_dir}), contexts)
    assert f"num-boost-round={resumed.summary['trees']} ends" in str(caught.value)


def test_a_coordinator_that_trains_on_is_refused_in_every_round(
    settings, sites, write_table, monkeypatch
):
    plan = TreeStrategy.plan
    monkeypatch.setattr(TreeStrategy, "plan", lambda self: {**plan(self), "rounds": 1})
    contexts = sites({"name": "bank", "data": write_table("bank"), "allow": "pax"})
    rule = r"^bank \(step \d+\): GrowRequest\.round_id must be none: all have begun by the"
    with pytest.raises(PartyError, match=rule):
        run_local(settings(parties=1, num_boost_round=2), contexts)


def test_requests_declare_what_the_plan_bounds():
    bounded = {(GrowRequest, "level"): "levels", (SketchRequest, "n_bins"): "max_bin"}
    for (kind, field), name in bounded.items():
        request = kind
        assert request.planned[field].name == name
