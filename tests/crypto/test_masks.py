"""What a coordinator gets that does not ask all sites alike: refusals, or noise."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np
import pytest

from fedapp.crypto.masking import unmasked_sum
from fedapp.crypto.sealed import new_private_key, public_key
from fedapp.errors import ProtocolError
from fedapp.histograms.sketch import LARGEST_FLOAT
from fedapp.messages.describe import CountsReply
from fedapp.messages.fields import OWN_OR_SUMS
from fedapp.messages.handshake import NUMBERS, HelloRequest, LabelsRequest
from fedapp.messages.pax import (
    CountRequest,
    GrowRequest,
    OpenRequest,
    SketchRequest,
)
from fedapp.messages.scoring import EvaluateRequest
from fedapp.messages.secagg import NO_KEYS, KeysRequest
from fedapp.messages.wire import Envelope, to_content
from fedapp.records.document import to_text
from fedapp.site import answer as answer_module
from fedapp.site.account import note, opening_of
from fedapp.site.answer import Asked, Site
from fedapp.site.settings import SiteConfig, site_config
from fedapp.site.store import Store
from fedapp.site.sums import Sums
from fedapp.trees.model import NO_TREES, Ensemble
from tests.crypto.test_pairwise import MOST_CHI2, chi_squared
from tests.messages.declared import example, kinds, name_of
from tests.plans import planned
from tests.sites import answer

NAMES = ("bank", "insurer", "shop")
MODEL = "0123456789abcdef"
N_TRAIN = 26  # of 40 rows at each
TERMS = {
    "classes": ("0", "1"),
    "category_counts": np.empty(0, np.int32),
    "categories": (),
    "scale_pos_weight": 1.0,
    "max_delta_step": 0.0,
    "tweedie_variance_power": 1.5,
    "huber_slope": 1.0,
    "aft_loss_distribution": "normal",
    "aft_loss_distribution_scale": 1.0,
    "quantile_alpha": 0.5,
    "eval_metrics": (),
}
GREETING = HelloRequest("binary:logistic", 0.2, 0.2, 3, True)
OPENS_PAX = partial(OpenRequest, count_bytes=4)
EDGES = np.full(2, LARGEST_FLOAT, np.float32)  # a bin a column
PREFIXES = np.arange(256, dtype=np.uint32)


class Coordinator:
    """Talks to sites as it likes, up to their keys as it should.

    Parameters
    ----------
    opens : the request by which parties meet, from the fields of a roster and terms.
    changes : fields of the opening that one site gets otherwise.
    plan : fields of it that all get, beside the parties.
    """

    def __init__(
        self,
        configs,
        threshold=0,
        method="pax",
        opens=OPENS_PAX,
        changes=MappingProxyType({}),
        model=MODEL,
        **plan,
    ):
        self._model, self.configs, self._method, names = model, configs, method, tuple(configs)
        said = {"aggregation": "secure", "threshold": threshold}
        fields = planned(names, **(said | plan))
        openings = {name: {**fields, **changes.get(name, {})} for name in names}
        self.ask({name: replace(GREETING, **own) for name, own in openings.items()}, 1, names)
        keys = self.ask(KeysRequest(), 2, names)
        self.opening = opens(
            names=names,
            box_keys=np.stack([keys[name].arrays["box_key"] for name in names]),
            run_keys=np.stack([keys[name].arrays["run_key"] for name in names]),
            n_rows=40 * len(names),
            heaviest=0,
            largest=0,
            threshold=threshold,
            **TERMS,
        )

    def ask(self, request, step, names=NAMES, attempt=0, **more):
        """What sites answer to the same request, or each to its own."""
        each = request if isinstance(request, Mapping) else dict.fromkeys(names, request)
        envelope = Envelope(self._model, step, attempt=attempt, method=self._method, **more)
        return {
            name: answer(self.configs[name], own.kind, envelope, to_content(own, name))
            for name, own in each.items()
        }

    def masked(self, *given, **more):
        return {name: reply.arrays["masked"] for name, reply in self.ask(*given, **more).items()}


def configs_of(write_table, **columns):
    nodes = {
        name: {"name": name, "data": str(write_table(name, seed=seed, **columns)), "label": "y"}
        for seed, name in enumerate(NAMES)
    }
    return {name: site_config({**node, "allow": "pax"}, {}) for name, node in nodes.items()}


@pytest.fixture
def configs(write_table):
    return configs_of(write_table)


@pytest.fixture
def coordinator(configs):
    return Coordinator(configs)


def counting(first=0, digit=1):
    """Counts by the second digit, or a later one, of what begins with some first ones."""
    return CountRequest(digit, PREFIXES[first:], np.array([0, 256 - first, 256 - first]))


UNDIVIDED = np.empty(0), np.empty(0)  # a table of times, of which there are none


def growing():
    """Sums of the first tree's root."""
    return GrowRequest(
        *(np.empty(0, dtype) for dtype in ("i4", "i4", "i4", "i4", "f4", "u1", "u1")),
        *(1, 1, np.zeros(1, np.float32), np.empty(0, np.float32), np.empty(0, np.int64)),
        *(*UNDIVIDED, 0, 0, 1.0, GREETING.seed, 16, np.empty((0, 2))),
        *(np.zeros(1, "i4"), np.zeros(1, "i4"), np.arange(2, dtype="i4")),
    )


def scoring():
    """The last question of a run, of a model without trees."""
    model = Ensemble("binary:logistic", np.float32([0.5]), ("a", "b"), ("0", "1"), *NO_TREES)
    document = np.frombuffer(to_text(model).encode(), np.uint8)
    return EvaluateRequest(*UNDIVIDED, document, 16, 1.0)


def is_noise(masked):
    return chi_squared(unmasked_sum(masked, 256**2, 4).astype(np.uint32)) < MOST_CHI2


def test_all_answers_together_are_counts_and_each_alone_is_noise(coordinator):
    coordinator.ask(coordinator.opening, 3)
    masked = coordinator.masked(counting(), 4)
    counts = unmasked_sum(masked.values(), 256**2, 4)
    exponent = 30 - 7
    assert counts.sum() == 3 * N_TRAIN << exponent
    assert set(np.unique(counts >> exponent)) <= set(range(20))
    for name in NAMES:
        assert is_noise([masked[name]])
        assert is_noise(masked[other] for other in NAMES if other != name)


def test_parties_that_are_asked_for_different_things_give_noise_from_there_on(coordinator):
    """Splits that send all rows but one party's elsewhere would else leave its rows alone."""
    coordinator.ask(coordinator.opening, 3)
    honest, other = counting(), replace(counting(), prefixes=PREFIXES + 256)
    asked = {"bank": other, "insurer": honest, "shop": honest}
    assert is_noise(coordinator.masked(asked, 4).values())
    for step in (5, 6):
        assert is_noise(coordinator.masked(counting(digit=step - 3), step).values())


@pytest.mark.parametrize(
    "change", [{"n_rows": 121}, {"test_fraction": 0.9}, {"seed": 4}], ids=["run", "rows", "seed"]
)
def test_parties_that_have_other_runs_or_plans_give_noise(configs, change):
    """Else the sum over all parties would be one of few rows but those of one party."""
    is_plan = "n_rows" not in change
    coordinator = Coordinator(configs, changes={"bank": change} if is_plan else {})
    openings = dict.fromkeys(NAMES, coordinator.opening)
    openings["bank"] = replace(coordinator.opening, **({} if is_plan else change))
    coordinator.ask(openings, 3)
    assert is_noise(coordinator.masked(counting(), 4).values())


def test_a_key_of_the_run_that_is_the_coordinators_own_gives_noise(coordinator):
    mallory, keys = new_private_key(), coordinator.opening.run_keys.copy()
    keys[0] = np.frombuffer(public_key(mallory), np.uint8)
    swapped = replace(coordinator.opening, run_keys=keys)
    honest = coordinator.opening
    coordinator.ask({"bank": honest, "insurer": swapped, "shop": swapped}, 3)
    masked = coordinator.masked(counting(), 4)
    assert is_noise(masked.values())
    assert is_noise([masked["insurer"], masked["shop"]])


def test_a_roster_with_other_keys_or_numbers_out_of_range_is_refused(coordinator):
    keys = coordinator.opening.box_keys.copy()
    keys[1] = np.frombuffer(public_key(new_private_key()), np.uint8)
    for site, change, rule in (
        ("bank", {"box_keys": keys}, r"insurer: parcel\.key must be one bank trusts"),
        ("insurer", {"box_keys": keys}, r"insurer: parcel\.key must be the one that the site sent"),
        ("shop", {"n_rows": 39}, r"shop: OpenRequest\.n_rows must be >= 40"),
        ("shop", {"heaviest": -1}, r"shop: OpenRequest\.heaviest must be >= 0"),
        ("shop", {"count_bytes": 3}, r"shop: .*count_bytes must be one of 2, 4, 8, got 3"),
    ):
        with pytest.raises(ProtocolError, match=f"^{rule}"):
            coordinator.ask(replace(coordinator.opening, **change), 3, [site])


def test_a_step_that_is_asked_again_gets_the_same_bytes_whatever_is_asked(coordinator):
    coordinator.ask(coordinator.opening, 3)
    first = coordinator.masked(counting(), 4)
    for again in (counting(), replace(counting(), digit=2)):
        for name, masked in coordinator.masked(again, 4).items():
            np.testing.assert_array_equal(masked, first[name])


def test_another_attempt_hides_equal_content_under_unrelated_masks(coordinator):
    """Else the sum of a new attempt without a party, less that of all before, would be its own."""
    coordinator.ask(coordinator.opening, 3)
    # A checkpoint, to which the sites can go back.
    coordinator.ask(counting(), 4)
    first = coordinator.masked(counting(digit=2), 5, checkpoint=4)
    again = coordinator.masked(counting(digit=2), 5, attempt=1, checkpoint=4)
    for name in NAMES:
        assert chi_squared(again[name] - first[name]) < MOST_CHI2
    assert (
        unmasked_sum(again.values(), 256**2, 4).tolist()
        == unmasked_sum(first.values(), 256**2, 4).tolist()
    )
    assert is_noise([again["bank"], again["insurer"]])
    assert is_noise([again["bank"], first["insurer"], first["shop"]])


def test_rows_are_counted_by_each_digit_once_before_the_cuts(coordinator):
    coordinator.ask(coordinator.opening, 3)
    way = "rows are counted by each digit once a run, before the cuts are sent"

    def refused(digit, due, step):
        rule = f"^bank: CountRequest.digit must be {due}, got {digit}; {way}$"
        with pytest.raises(ProtocolError, match=rule):
            coordinator.ask(counting(digit=digit), step, ["bank"])

    refused(2, due=1, step=4)
    for digit, due in ((1, 2), (2, 3)):
        coordinator.ask(counting(digit=digit), digit + 3)
        refused(digit, due, step=digit + 4)
    coordinator.ask(counting(digit=3), 6)
    for digit in (1, 3):
        with pytest.raises(ProtocolError, match="must come at most 3 times by the plan that"):
            coordinator.ask(counting(digit=digit), 7, ["bank"])


def test_no_rows_are_counted_once_the_cuts_are_told(coordinator):
    coordinator.ask(coordinator.opening, 3)
    coordinator.ask(replace(growing(), edges=EDGES, edge_offsets=np.arange(3)), 4)
    with pytest.raises(ProtocolError, match="must follow OpenRequest or CountRequest at a party"):
        coordinator.ask(counting(), 5)


def test_a_step_back_does_not_let_others_be_counted(coordinator):
    coordinator.ask(coordinator.opening, 3)
    coordinator.ask(counting(), 4, checkpoint=3)
    rule = "content must be what it was before the run was resumed; begin a new run"
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask(counting(1), 4, attempt=1, checkpoint=3)
    coordinator.ask(counting(), 4, attempt=2, checkpoint=3)
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask(counting(1), 4, attempt=3, checkpoint=3)


def test_what_is_counted_is_counted_once_in_a_request(coordinator):
    coordinator.ask(coordinator.opening, 3)
    request = CountRequest(1, PREFIXES[1:3], np.array([0, 1, 2]))
    for prefixes, ends, rule in (
        ([2, 1], [2, 2], "prefixes must ascend in a column"),
        ([1, 1], [2, 2], "prefixes must ascend in a column"),
        ([1, 2], [1, 1], "offsets must rise from 0 to 2"),
    ):
        wrong = CountRequest(1, np.array(prefixes, np.uint32), np.array([0, *ends]))
        with pytest.raises(ProtocolError, match=rf"^bank: CountRequest\.{rule}$"):
            coordinator.ask(wrong, 4, ["bank"])
    coordinator.ask(request, 4)


def test_categories_are_no_numbers_to_be_counted_by_digits(write_table):
    colours = ["red", "blue"] * 20
    coordinator = Coordinator(configs_of(write_table, a=colours))
    told = {"categories": ("blue", "red"), "category_counts": np.array([2, NUMBERS], np.int32)}
    coordinator.ask(replace(coordinator.opening, **told), 3)
    with pytest.raises(ProtocolError, match="offsets must give columns of categories none"):
        coordinator.ask(CountRequest(1, PREFIXES, np.array([0, 256, 256])), 4)
    coordinator.ask(CountRequest(1, PREFIXES, np.array([0, 0, 256])), 4)


def test_nothing_of_one_party_leaves_it_once_sums_are_masked(coordinator):
    coordinator.ask(coordinator.opening, 3)
    for request in (SketchRequest(n_bins=4, **TERMS), LabelsRequest(**TERMS)):
        with pytest.raises(ProtocolError, match="class must be one for sums over all parties"):
            coordinator.ask(request, 4, ["bank"])
    coordinator.masked(replace(growing(), edges=EDGES, edge_offsets=np.arange(3)), 4)
    coordinator.masked(scoring(), 5)


OF_PLAN = [kind for kind in kinds() if getattr(kind, "leaves", "") == OWN_OR_SUMS]


@pytest.mark.parametrize("kind", OF_PLAN, ids=name_of)
@pytest.mark.parametrize("aggregation", ["secure", "plain"])
def test_whether_sums_are_masked_the_plan_says_and_no_field(tmp_path, kind, aggregation):
    """Without a roster a masked run gets nothing; a plain run gets its sums as they are."""
    assert len(OF_PLAN) == 10
    depth = dict.fromkeys(("max_depth", "levels", "trees", "max_bin", "rounds", "additive"), 2)
    plan = planned(["bank"], aggregation=aggregation, subsample=0.0, bootstrap=True, **depth)
    opening = opening_of(replace(GREETING, seed=2, **plan))
    config = SiteConfig("bank", "rows.csv")
    site = Site(config, Store(tmp_path))
    note(site.store, opening=opening, method="pax")
    values = {**example(kind), **{name: () for name in ("among", "names") if name in kind.forms}}
    if "names" in values:
        values |= {"box_keys": NO_KEYS(), "run_keys": NO_KEYS(), "threshold": 0}
    request, sums = kind(**values), Sums([np.arange(3)], lambda sums: CountsReply(sums))
    envelope = Envelope(MODEL, 4, method="pax")
    content = to_content(request, "bank")
    asked = Asked(config, request, lambda *_: sums, envelope, content, 0.0)
    if aggregation == "secure":
        rule = rf"^bank: {kind.__name__}\.step must come later: the site has no masks of this model"
        with pytest.raises(ProtocolError, match=rule):
            answer_module._handled(site, asked)
        return
    np.testing.assert_array_equal(answer_module._handled(site, asked).arrays["counts"], range(3))


def test_the_last_answers_add_up_whichever_start_of_the_server_they_went_to(coordinator):
    """A site that has ended the run has no key to mask its answer again."""
    coordinator.ask(coordinator.opening, 3)
    request = scoring()
    first = coordinator.masked(request, 4, ["bank", "insurer"], checkpoint=3)
    again = coordinator.masked(request, 4, attempt=1, checkpoint=3)
    np.testing.assert_array_equal(again["bank"], first["bank"])
    n_values = 3 * (5 + 2 * 16)
    sums = unmasked_sum(again.values(), n_values)
    assert sums[0] == 3 * N_TRAIN << 62 - 7
    assert (sums >= 0).all()
    assert not (unmasked_sum([first["bank"], first["insurer"]], n_values) >= 0).all()
