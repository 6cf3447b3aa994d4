"""A run asks a site for what its opening said, and for no more, however it is opened again."""

import math
from dataclasses import replace
from functools import partial
from operator import attrgetter

import numpy as np
import pytest
from scipy.stats import norm

from fedapp.crypto.masking import unmasked_sum
from fedapp.crypto.noise import budget_for
from fedapp.errors import ConfigError, DivergedError, FedappError, ProtocolError
from fedapp.histograms.sketch import LARGEST_FLOAT
from fedapp.messages.handshake import GreetRequest
from fedapp.messages.pax import SHARED, SketchRequest, TurnRequest
from fedapp.messages.pax_secure import COUNTED_ROWS, PrivateOpenRequest
from fedapp.messages.secagg import LeftRequest
from fedapp.messages.wire import Envelope, to_content
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.site.trust import site_fingerprint
from tests.crypto.test_masks import (
    EDGES,
    GREETING,
    MODEL,
    NAMES,
    TERMS,
    Coordinator,
    growing,
)
from tests.plans import planned
from tests.site.office import runs, vertical_hello
from tests.sites import answer

EPSILON, DELTA, ROUNDS = 1.0, 1e-5, 2
ANOTHER = r"content must be what it was before the run was resumed; begin a new run$"


def summing(first=False, **changes):
    """Masked sums of a round's root; the first one has cuts."""
    cuts = {"edges": EDGES, "edge_offsets": np.arange(3)} if first else {}
    return replace(growing(), **cuts, **changes)


def turning(*columns):
    """A round of curves, after a tree that splits these columns, each in the left child."""
    n_splits = len(columns)
    lefts = np.zeros(2 * n_splits + 1, np.uint16)
    lefts[np.append(0, np.arange(1, 2 * n_splits - 1, 2))] = np.arange(1, 2 * n_splits, 2)
    return TurnRequest(
        **{name: getattr(growing(), name) for name in SHARED},
        edges=EDGES,
        edge_offsets=np.arange(3),
        sizes=np.array([len(lefts)], np.int32),
        lefts=lefts,
        values=np.full(len(lefts), 0.5, np.float32),
        columns=np.array(columns, np.int32),
        defaults=np.ones(n_splits, np.uint8),
        sets=np.empty(0, np.uint8),
    )


def ask(config, request, step, method="pax", **more):
    envelope = Envelope(MODEL, step, method=method, **more)
    return answer(config, request.kind, envelope, to_content(request, config.name))


def begun(config, **plan):
    """A site that has answered the opening and the sketch of a plain run of PAX."""
    names = (config.name, "zoo")
    ask(config, replace(GREETING, rounded=False, **planned(names, **plan)), 1)
    ask(config, SketchRequest(n_bins=8, **TERMS), 2)
    return config


def private(configs, model=MODEL, n_rounds=ROUNDS):
    """A run with noise before its parties meet."""
    budget = budget_for(EPSILON, DELTA, n_rounds, 3)
    numbers = {"epsilon": EPSILON, "delta": DELTA, "multiplier": budget.multiplier}
    opens = partial(PrivateOpenRequest, **numbers, n_rounds=n_rounds, clip=0.0)
    coordinator = Coordinator(configs, opens=opens, model=model, rounds=n_rounds, **numbers)
    coordinator.opening = replace(coordinator.opening, n_rows=COUNTED_ROWS)
    return coordinator


def asked(step, request, **more):
    """A message of the server; a request that is a function gets the coordinator."""

    def ask_sites(coordinator, names=NAMES):
        made = request(coordinator) if callable(request) else request
        coordinator.ask(made, step, names, **more)

    return ask_sites


def opened_again(step, **plan):
    """The opening once more, after a step back."""
    plan = {"aggregation": "secure", "threshold": 0, **plan}
    again = {"attempt": 1, "checkpoint": step - 1}
    return asked(step, lambda _: replace(GREETING, **planned(NAMES, **plan)), **again)


def with_fewer(coordinator):
    """The sites sum with one other party."""
    sites = coordinator.configs.items()
    coordinator.configs = {name: replace(config, least_parties=2) for name, config in sites}
    return coordinator


def roster_of_two(coordinator):
    """A party that a person has not approved gets no part in a sum, although its key is pinned."""
    opening = with_fewer(coordinator).opening
    of_two = {"names": NAMES[:2], "box_keys": opening.box_keys[:2]}
    return replace(opening, **of_two, run_keys=opening.run_keys[:2])


OPENING = attrgetter("opening")
OPENED, BACK = asked(3, OPENING), {"attempt": 1, "checkpoint": 3}
SUMMED = OPENED, asked(4, summing(first=True), checkpoint=3)
FEWER = opened_again(4, rounds=1, max_depth=6)
SKETCH = SketchRequest(n_bins=4, **TERMS)
PROMISE = {"epsilon": 1.0, "delta": 1e-5, "multiplier": 5.0}
BY_PLAN = "by the plan that opened the run, got"
ALL_BEGUN = "round_id must be none: all have begun by the plan that opened the run, got"
NEVER = "message must come at most"
PLAINLY = r"aggregation must be secure, as when the run was opened, got plain; begin a new run"
FOR_SECURE, FOR_PLAIN = (
    f"class must be one for aggregation {one} by" for one in ("secure", "plain")
)
ONE_COLUMN = summing(first=True, columns=np.zeros(1, np.int32))
LEAVES = {"leaf_values": np.ones(1, np.float32), "leaf_offsets": np.arange(2)}
FINER = np.append(np.arange(2), np.append(np.arange(2), LARGEST_FLOAT)).astype(np.float32)
FINER = replace(summing(first=True), edges=FINER, edge_offsets=np.array([0, 2, 5]))
REOPENED = (
    *(asked(3, OPENING, checkpoint=2), asked(4, summing(first=True), checkpoint=2)),
    opened_again(3, rounds=1, max_depth=1, columns=("b", "a")),
)


def refused(message, rule, *answered, **plan):
    """A message that is refused by a rule, after those that are answered, by the plan."""
    return message, rule, answered, plan


MASKED = {
    "plain sketches": refused(asked(3, SKETCH), FOR_SECURE),
    "another aggregation": refused(
        asked(3, lambda _: replace(GREETING, **planned(NAMES, aggregation="plain")), attempt=1),
        PLAINLY,
    ),
    # Whoever sums with others must have approved that, and with whom.
    "masks of a plain run": refused(OPENED, FOR_PLAIN, aggregation="plain"),
    "masks without noise": refused(OPENED, FOR_SECURE, **PROMISE),
    # Whoever approves it reads of an epsilon, and the register counts it.
    "no noise": refused(asked(3, SKETCH), "class must be one for", aggregation="plain", **PROMISE),
    **{
        name: refused(asked(4, summing(first=True, **{name: value})), f"{name} {rule}$", OPENED)
        for name, value, rule in (
            ("subsample", 0.9, rf"must be 1\.0 {BY_PLAN} 0\.9"),
            ("seed", 9, f"must be 3 {BY_PLAN} 9"),
            ("level", 7, f"must be <= 6 {BY_PLAN} 7"),
        )
    },
    # The first need not be 0: a run may go on from another model.
    **{
        f"round {round_id} after the last": refused(
            asked(6, summing(round_id=round_id)),
            rf"{ALL_BEGUN} {round_id}$",
            *(OPENED, asked(4, summing(first=True, round_id=5)), asked(5, summing(round_id=6))),
            rounds=2,
        )
        for round_id in (5, 6, 7)
    },
    # Else one round has as many trees, of leaves of the coordinator's choice, as it asks for.
    "a round twice": refused(asked(5, summing(**LEAVES)), rf"{ALL_BEGUN} 0$", *SUMMED, rounds=1),
    # Which sums all rows, whatever share of them a round draws, and any trees.
    "curves of another run": refused(asked(4, turning(0)), f"{NEVER} 0 times by", OPENED),
    "levels of curves": refused(
        asked(5, summing(round_id=1)),
        *(f"{NEVER} 0 times by", OPENED, asked(4, turning(0))),
        additive=True,
        levels=0,
    ),
    "a tree of a pair": refused(
        asked(4, turning(0, 1)), "columns must be 1 a tree at most", OPENED, additive=True
    ),
    "a round of curves twice": refused(
        *(asked(5, turning(1)), rf"{ALL_BEGUN} 0$", OPENED, asked(4, turning(0))),
        additive=True,
        rounds=1,
    ),
    # What a lost party has sent before is told by the sums after: a person decides on that.
    "a party to lose": refused(
        asked(3, lambda it: replace(with_fewer(it).opening, threshold=3)),
        rf"threshold must be 0 {BY_PLAN} 3$",
    ),
    # Each step back would else show another cell of the table.
    "other sums after a step back": refused(
        asked(4, ONE_COLUMN, **BACK), ANOTHER, *SUMMED, rounds=2
    ),
    "another round after a step back": refused(
        asked(4, summing(first=True, round_id=2), **BACK),
        *(rf"round_id must be 0 {BY_PLAN} 2$", *SUMMED),
        rounds=2,
    ),
    "finer cuts": refused(
        asked(4, FINER), r"edge_offsets must be <= 2 by the plan .*, got 3$", OPENED, max_bin=2
    ),
    "fewer parties": refused(
        asked(3, roster_of_two), r"key of shop must be [0-9a-f ]{39} by the plan .*, got None$"
    ),
    "another order of columns": refused(
        asked(4, OPENING, attempt=1, checkpoint=2), ANOTHER, *REOPENED, rounds=1, max_depth=1
    ),
    "other sums after fewer rounds": refused(
        asked(5, ONE_COLUMN, **BACK), ANOTHER, *SUMMED, FEWER, rounds=2, max_depth=6
    ),
    "a round beyond fewer rounds": refused(
        asked(6, summing(round_id=1), **BACK),
        *(ALL_BEGUN, *SUMMED, FEWER, asked(5, summing(first=True), **BACK)),
        rounds=2,
        max_depth=6,
    ),
}


@pytest.mark.parametrize("case", MASKED)
def test_sites_that_sum_answer_what_the_plan_allows(configs, case):
    last, rule, answered, plan = MASKED[case]
    coordinator = Coordinator(configs, **plan)
    for message in answered:
        message(coordinator)
    with pytest.raises(ProtocolError, match=rf"^bank: \w+\.{rule}"):
        last(coordinator, ["bank"])
    if case == "other sums after a step back":
        asked(4, summing(first=True), **BACK)(coordinator)


def restarted(**plan):
    """An opening of a plain run."""
    plan = {"aggregation": "plain", "rounds": 3, **plan}
    return lambda: replace(GREETING, rounded=False, **planned(plan.pop("parties", NAMES), **plan))


PLAIN = {"rounds": 1, "max_depth": 1}
SEALED = {"aggregation": "sealed"}
INVENTED = ("bank", *(f"invented-{number}" for number in range(60)))
# The node config, the plan, how often a round begins, and what is refused then.
BEGUN = {
    # One round would else be as many as the coordinator likes, with leaves of its choice.
    "a round again": ({}, PLAIN, 1, growing()),
    "other leaves": ({}, PLAIN, 1, replace(growing(), **LEAVES)),
    "another round": ({}, PLAIN, 1, replace(growing(), round_id=1)),
    "more restarts than planned": ({}, {**PLAIN, "restarts": 2}, 3, growing()),
    # Its sums would else be there with other bins merged, or other rows left out.
    "a site that merges bins": ({"least_bin_rows": 5}, {**PLAIN, "restarts": 2}, 1, growing()),
}
OPENINGS = {
    "restarts with masks": (
        restarted(aggregation="secure", restarts=1),
        r"restarts must be <= 0 in such a run ",
    ),
    "more rounds than a site restarts": (
        restarted(restarts=2, rounds=9),
        r"rounds must be <= 8 in such",
    ),
    # A coordinator would else get 121 rounds of a plan of one, each with leaves of its choice.
    "invented parties": (
        restarted(parties=INVENTED, **PLAIN, restarts=120),
        r"restarts must be <= 2 in such",
    ),
    **{
        f"{name} of a prediction": (
            partial(vertical_hello, ("bank", "shop"), **{"rounds": 0, name: 1, **SEALED}),
            f"{name} must be <= 0 in such a run",
        )
        for name in ("restarts", "rounds")
    },
}


@pytest.mark.parametrize("case", BEGUN)
def test_a_plain_round_begins_as_often_as_the_plan_says(configs, case):
    node, plan, n_begun, again = BEGUN[case]
    bank = begun(replace(configs["bank"], **node), aggregation="plain", **plan)
    for step in range(3, 3 + n_begun):
        ask(bank, growing(), step)
    with pytest.raises(ProtocolError, match=rf"^bank: GrowRequest\.{ALL_BEGUN}"):
        ask(bank, again, 3 + n_begun)


def test_a_site_that_discloses_only_sums_leaves_a_plain_run_that_has_begun(configs):
    bank = begun(configs["bank"], aggregation="plain")
    ask(bank, growing(), 3)
    for step in (3, 4):  # also what it has answered
        with pytest.raises(ConfigError, match=r"^aggregation must be secure for bank, whose node"):
            ask(replace(bank, least_parties=2), growing(), step)
    with pytest.raises(ConfigError, match=r"^aggregation must be secure for bank, whose node"):
        ask(replace(bank, least_parties=2), LeftRequest(), 3)  # whatever asks for it


@pytest.mark.parametrize("case", OPENINGS)
def test_a_run_restarts_no_more_rounds_than_it_can(configs, case):
    opening, rule = OPENINGS[case]
    opening = opening()
    method = "pax" if opening.kind == GREETING.kind else "interactive"
    bank = replace(configs["bank"], allowed=frozenset({method}), id_column="a")
    if case == "more rounds than a site restarts":
        bank = replace(bank, most_rounds=10)
    with pytest.raises(ProtocolError, match=rf"^bank: \w+\.{rule}"):
        ask(bank, opening, 1, method)


def test_what_began_again_does_so_after_every_step_back(configs):
    """A server that dies twice repeats what it asked; that is no further restart."""
    bank = begun(configs["bank"], rounds=2, max_depth=2, aggregation="plain", restarts=2)
    for attempt in (0, 1, 2, 3):
        for step in (3, 4, 5):
            ask(bank, growing(), step, attempt=attempt, checkpoint=2)
    with pytest.raises(ProtocolError, match=r"round_id must be 1 by the plan"):
        ask(bank, growing(), 6, attempt=3, checkpoint=2)


TABLE, OTHERS = ("a", "b"), 2  # columns that are counted; sums beside the counts
UNITS = 2**22  # of a row


def test_sums_have_noise_of_the_variance_that_the_budget_asks_for(configs):
    """No row is in most bins, so the median size of a count is that of the noise."""
    coordinator = private(configs, n_rounds=50)
    masked = coordinator.masked(coordinator.opening, 3)
    counts = unmasked_sum(masked.values(), OTHERS + len(TABLE) * 256)[OTHERS:]
    budget = budget_for(EPSILON, DELTA, 50, 3)
    deviation = budget.deviation("counts", math.sqrt(len(TABLE)) * UNITS)
    assert 0.7 < np.median(np.abs(counts)) / (norm.ppf(0.75) * deviation) < 1.4


def test_the_first_noised_sum_is_charged_and_none_leaves_beyond_the_budget(configs):
    """Two runs were opened before either had a sum, so only the sum itself can be refused."""
    limits = {"run_epsilon": EPSILON, "total_epsilon": EPSILON}
    sites = {name: replace(config, **limits) for name, config in configs.items()}
    first, second = (private(sites, model=16 * letter) for letter in "ab")
    first.ask(first.opening, 3)
    rule = r"^privacy\.epsilon must come to <= 1 in all runs on one table \(total-epsilon in the no"
    with pytest.raises(ConfigError, match=rule):
        second.ask(second.opening, 3)
    with pytest.raises(ConfigError, match=rule):
        private(sites, model=16 * "c")


def test_a_refused_opening_takes_no_budget(configs):
    coordinator = private(configs)
    keys = coordinator.opening.run_keys.copy()
    keys[1] = 0  # a point of low order, from which no secret follows
    with pytest.raises(ProtocolError, match=r"key"):
        coordinator.ask(replace(coordinator.opening, run_keys=keys), 3, ["bank"])
    (run,) = runs()
    assert not run.charged


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"fingerprints": ("", "", "")}, r"parties must have bank with the fingerprint of its key"),
        ({"parties": ()}, r"fingerprints must be one a party"),
        ({"parties": ("bank", "bank", "shop")}, r"parties must be letters, digits, .* each once"),
        ({"max_bin": 2000}, r"max-bin must be <= 1024 \(most-bins in the node config of bank\)"),
    ],
)
def test_a_plan_without_the_site_or_beyond_its_limits_is_refused(configs, change, rule):
    with pytest.raises(FedappError, match=rule):
        ask(configs["bank"], replace(GREETING, **(planned(NAMES) | change)), 1)


def test_to_greet_a_site_leaves_nothing_there(configs):
    """It is answered before anybody has approved the run, as often as it is asked."""
    config = replace(configs["bank"], asks=True)
    for step in (0, 5, 0):
        greeted = ask(config, GreetRequest(), step).scalars
        fingerprint = site_fingerprint("bank")
        assert greeted == {"name": "bank", "fingerprint": fingerprint, "fall_backs": []}


@pytest.mark.parametrize("method", ["pax", "bagging", "cyclic"])
def test_honest_runs_that_may_stop_early_keep_to_their_plans(settings, sites, write_table, method):
    """The scores of the last round take a request more."""
    nodes = [{"name": name, "data": write_table(name, 200), "allow": method} for name in ("a", "b")]
    run_local(settings(strategy=method, parties=2, early_stopping_rounds=5), sites(*nodes))


def test_sites_let_a_run_that_has_diverged_end_with_fewer_rounds_than_planned(
    settings, sites, write_table
):
    contexts = sites({"name": "bank", "data": write_table("bank"), "allow": "pax"})
    given = settings(parties=1, objective="reg:squarederror", eta=1e6, num_boost_round=20)
    with pytest.raises(DivergedError, match=r"; num-boost-round=\d+ ends before it") as caught:
        run_local(given, contexts)
    resumed = run_local(load_settings({"resume": given.run_dir}), contexts)
    assert f"num-boost-round={resumed.summary['trees']} ends" in str(caught.value)
