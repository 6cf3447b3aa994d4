"""PAX whose coordinator sees sums over all parties alone."""

import numpy as np
import pytest

from clients.handshake import look
from fedapp.errors import ConfigError, DivergedError
from fedapp.histograms.sketch import LARGEST_FLOAT
from fedapp.messages import handshake
from fedapp.runs.local import run_local
from fedapp.site.settings import site_config
from fedapp.trees.model import LEAF
from tests.crypto.test_pairwise import MOST_CHI2, chi_squared
from tests.federated import lines_of, model_bytes, model_of, summary_of
from tests.tables import made_columns
from tests.transcript import listen, masked_in, scalars_of


@pytest.fixture
def made(made):
    """``made(objective, **overrides)``: a short run under masks, on rows with missing values."""
    usual = {"pax__aggregation": "secure", "max_bin": 32}
    return lambda objective="binary:logistic", **more: made("pax", objective, **{**usual, **more})


# Nothing changes but who sees what


def assert_same_trees(found, expected):
    """Both have the same splits, and leaves within 1e-6; a threshold below or above all values may
    be any such."""
    assert len(found.trees) == len(expected.trees)
    np.testing.assert_array_equal(found.sets.bits, expected.sets.bits)
    np.testing.assert_allclose(found.base_score, expected.base_score, rtol=1e-6)
    for own, other in zip(found.trees, expected.trees, strict=True):
        for name in ("left", "column", "default_left"):
            np.testing.assert_array_equal(own[name], other[name])
        is_cut = (own["left"] != LEAF) & (np.abs(own["threshold"]) < LARGEST_FLOAT)
        np.testing.assert_array_equal(own["threshold"][is_cut], other["threshold"][is_cut])
        leaves = own["left"] == LEAF
        np.testing.assert_allclose(own["value"][leaves], other["value"][leaves], rtol=1e-6)
        assert own["left"][0] != LEAF


DRAWN = {"colsample_bytree": 0.7, "colsample_bynode": 0.8, "pax__bins": "equal"}
DRAWN |= {"monotone_constraints": "a:1", "interaction_constraints": "[a,b,c],[d,e,f]"}


@pytest.mark.parametrize(
    "more", [DRAWN, {"weight": "w", "max_depth": 4}], ids=["drawn", "weights and names"]
)
def test_columns_of_few_values_give_the_trees_of_plain_sums(made, more):
    """Sums have no order: the model is, byte for byte, that of one party with all rows."""
    objective, more = "binary:logistic", {"max_bin": 64, **more}
    if "weight" in more:
        columns, rng = made_columns(objective), np.random.default_rng(4)
        columns["c"] = rng.choice(["oslo", "rome", "bonn", "york", "lima"], 400)
        columns["w"] = rng.uniform(0, 3, 400).round(3)
        columns["w"][::17] = 0
        more["columns"] = columns
    alone, three = (run_local(made(objective, parties=n, **more)) for n in (1, 3))
    plain = run_local(made(objective, parties=1, pax__aggregation="plain", **more))
    assert model_bytes(alone) == model_bytes(three)
    assert_same_trees(model_of(three), model_of(plain))
    scores, expected = (summary_of(each)["metrics"] for each in (three, plain))
    assert scores.pop("by_party") == {}
    for subset, found in scores.items():
        assert found == pytest.approx(expected[subset], rel=1e-6, abs=1e-6)
    rounds = [lines_of(each.rounds)[-1]["valid"] for each in (three, plain)]
    assert rounds[0] == pytest.approx(rounds[1], rel=1e-6, abs=1e-6)


# What is sent


def test_what_a_party_sends_is_uniform(made):
    _, app = listen(made(num_boost_round=4, max_bin=16))
    masked = masked_in(app)
    assert len(masked) > 30
    assert chi_squared(np.concatenate(masked)) < MOST_CHI2


def test_the_range_of_labels_is_told_to_powers_of_two_and_notes_stay(made):
    _, app = listen(made("reg:squarederror"))
    told = [scalars_of(reply) for _, reply in app.of_kind("query.hello")]
    ranges = {abs(one[name]) for one in told for name in ("label_low", "label_high")}
    assert {float(np.log2(value)) % 1 for value in ranges} == {0.0}
    assert all(one["notes"] == [] for one in told)


# Who is refused


REFUSED = {  # objective, settings, and the error
    "too many lost": (
        *("binary:logistic", {"parties": 4, "min_parties": 2}),
        r"^min-parties must be 0 or >= 3 of 4 with pax\.aggreg",
    ),
    "lost, and stopped early": (
        *("binary:logistic", {"parties": 4, "min_parties": 3, "early_stopping_rounds": 2}),
        r"^min-parties must be 0 with .* early-stopping-rounds",
    ),
    "counts that no message holds": (
        *("binary:logistic", {"max_bin": 65535}),
        r"^max-bin must be less for so many columns .* at",
    ),
    "gradients beyond all bounds": (
        *("reg:squarederror", {"eta": 1000.0, "num_boost_round": 3}),
        r"every gradient must be <= .* got a larger one; a smaller eta",
    ),
}


@pytest.mark.parametrize(("objective", "more", "rule"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_summed_is_refused(made, monkeypatch, objective, more, rule):
    monkeypatch.setattr("strategies.pax_sums.MAX_COUNT_BYTES", 100_000)
    with pytest.raises((ConfigError, DivergedError), match=rule):
        run_local(made(objective, **more))


def test_two_parties_are_told_what_each_sees(made):
    warnings = summary_of(run_local(made(parties=2)))["warnings"]
    assert any("hides little among 2" in text for text in warnings)


def test_a_site_with_least_parties_rounds_whatever_it_is_asked(write_table):
    data = str(write_table(y=np.linspace(-3, 5.5, 40)))
    node = {"name": "bank", "data": data, "label": "y"}
    request = handshake.HelloRequest("reg:squarederror", 0.2, 0.2, 3, False)
    exact, rounded = (
        look(site_config({**node, **more}, {}), request)[0] for more in ({}, {"least-parties": 3})
    )
    assert (exact.label_low, exact.label_high) == (-3, 5.5)
    assert (rounded.label_low, rounded.label_high) == (-4, 8)


def test_a_site_with_limits_names_no_classes_that_are_its_labels(write_table):
    """Salaries as classes would be sent with the opening, each as it is."""
    salaries = write_table("salaries", y=np.arange(40) * 10.5)
    node = {"name": "bank", "data": str(salaries), "label": "y", "allow": "pax"}
    request = handshake.HelloRequest("multi:softprob", 0.2, 0.2, 3, False)
    assert len(look(site_config(node, {}), request)[0].classes) == 40
    rule = "^objective must be for numbers at bank, whose classes would be its labels"
    for limit in ({"least-parties": 3}, {"run-epsilon": 1}):
        with pytest.raises(ConfigError, match=rule):
            look(site_config({**node, **limit}, {}), request)
    digits = write_table("digits", y=np.arange(40) % 10)
    assert look(site_config({**node, "data": str(digits), "least-parties": 3}, {}), request)
