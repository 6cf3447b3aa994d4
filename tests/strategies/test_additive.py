"""PAX as a sum of curves: its nodes' sums, pairs, and rounds that are interrupted."""

import re

import numpy as np
import pytest

from clients.cuts import Binned, Cutting
from clients.pax import Party
from fedapp.errors import ConfigError
from fedapp.histograms.bins import digitise, with_categories
from fedapp.histograms.build import build_all_histograms
from fedapp.histograms.sketch import sketch_and_code, sketch_cuts, used_categories
from fedapp.histograms.split import CategoryRules, Penalties
from fedapp.messages.pax import TurnRequest
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.settings import load_settings
from fedapp.site.account import note
from fedapp.site.answer import Site
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from fedapp.trees.additive import Marginals
from fedapp.trees.grow import Growth, Queue, Shape
from fedapp.trees.losses import PLAIN
from fedapp.trees.structure import route_rows
from strategies.pax import PAX
from tests.federated import model_bytes, model_of, summary_of
from tests.network import FaultyApp, die, error_from, resumed, run
from tests.tables import made_columns

ADDITIVE = {"pax__additive": True, "max_bin": 32}
PAIRS = {**ADDITIVE, "pax__pairs": 2, "num_boost_round": 5}


@pytest.fixture
def cuts_of_rows():
    """Rows with ties, missing values, a constant and categories; their cuts and codes."""
    rng = np.random.default_rng(8)
    values = rng.integers(0, 30, (300, 5)).astype(np.float32)
    values[:, 2], values[:, 3] = 1, values[:, 3] % 6
    values[rng.random(values.shape) < 0.15] = np.nan
    categories = np.array([0, 0, 0, 6, 0])
    sketch = sketch_and_code(values, np.ones(300, np.float32), 9, categories)[0]
    full = sketch.with_categories(categories)
    cuts = with_categories(sketch_cuts(full), categories, used_categories([full], categories))
    return values, cuts, *digitise(values, cuts)


@pytest.mark.parametrize("queue", [Queue(), Queue("lossguide", 5)], ids=["whole", "few leaves"])
@pytest.mark.parametrize("seed", range(3))
def test_sums_of_bins_are_those_of_the_rows_of_every_node(cuts_of_rows, seed, queue):
    values, cuts, codes, missing_code = cuts_of_rows
    rng, n_outputs, n_columns = np.random.default_rng(seed), 2, values.shape[1]
    terms = np.stack((rng.normal(size=(2, 300)), rng.random((2, 300))), axis=2).astype(np.float32)
    terms[:, rng.random(300) < 0.1] = 0
    terms = np.tile(terms, (n_columns, 1, 1))
    n_trees = n_columns * n_outputs
    nodes, roots = np.zeros((n_trees, 300), np.int32), np.arange(n_trees, dtype=np.int32)

    def summed(trees, at):
        columns = np.arange(n_columns)
        given = columns, cuts.widths, terms, nodes, trees, at
        return build_all_histograms(codes, missing_code, *given)

    histograms, missing = summed(roots, np.zeros_like(roots))
    allowed = np.repeat(np.eye(n_columns, dtype=bool), n_outputs, axis=0)
    shape = Shape(4, 0.3, Penalties(1.0, 0.0, 0.0, 0.0), CategoryRules(4, 64), queue)
    growth = Growth(n_trees, cuts, allowed, shape)
    growth.set_roots(terms.sum(axis=1, dtype=np.float64))
    marginals, n_levels = Marginals(cuts, histograms[:2], missing[:2]), 0
    while growth.growing:
        wanted = growth.wanted
        expected, n_missing = summed(*np.ascontiguousarray(wanted.T))
        of_bins, of_missing = marginals.of(wanted)
        for row, tree in enumerate(wanted[:, 0]):
            column = tree // n_outputs
            bins = slice(*cuts.offsets[column : column + 2])
            np.testing.assert_allclose(of_bins[row, bins], expected[row, bins], atol=1e-9)
            assert of_missing[row, column] == n_missing[row, column]
        routes, sets = growth.split(of_bins, of_missing)
        marginals.move(routes, sets)
        nodes, n_levels = route_rows(nodes, routes, values, sets), n_levels + 1
    assert n_levels >= 3


def test_a_threshold_within_a_bin_divides_no_training_rows(cuts_of_rows, tmp_path):
    """Under masks too; else a server would learn by two rounds what values a bin has."""
    values, cuts, codes, _ = cuts_of_rows
    note(store := Store(tmp_path), opening={"aggregation": "plain", "pairs": 0})
    party = Party.load(Site(SiteConfig("bank", data=""), store))
    party.values = {"train": values, "valid": values[:0]}
    party.bins, party.columns = Binned.between(values, cuts), tuple("abcde")
    party.cutting = Cutting(cuts.categories, n_counted=4)
    n_rows = {"train": len(values), "valid": 0}
    party.labels = party.weights = {name: np.ones(n, np.float32) for name, n in n_rows.items()}
    party.objective, party.classes = "binary:logistic", ("0", "1")
    party.eval_metrics, party.loss, party.categories = (), PLAIN, ()
    top = float(np.nanmax(values[codes[:, 0] == 3, 0]))
    assert len(np.unique(values[codes[:, 0] == 3, 0])) > 1
    tree = {"sizes": [3], "lefts": [1, 0, 0], "values": [top, -1, 1], "columns": [0]}
    kinds = {"sizes": np.int32, "lefts": np.uint16, "values": np.float32, "columns": np.int32}
    arrays = {name: np.array(tree[name], kind) for name, kind in kinds.items()}
    ones, none = np.ones(1, np.uint8), np.empty(0)
    more = {"base_margin": np.zeros(1, np.float32), "score_bins": 16, "time_points": none}
    more |= {"defaults": ones, "sets": ones[:0], "score_edges": none}
    party.turn(TurnRequest(**arrays, **more, round_id=0, num_parallel_tree=1))
    margins = party.margins["train"][:, 0]
    assert {-1.0, 1.0} == set(margins.tolist())
    assert len(set(margins[codes[:, 0] == 3].tolist())) == 1


# Runs


@pytest.mark.parametrize("more", [{}, {"max_leaves": 4, "grow_policy": "lossguide"}], ids=str)
def test_trees_of_the_only_column_are_those_of_pax(made, more):
    columns = {name: made_columns("binary:logistic")[name] for name in "ay"}
    columns["w"] = np.arange(400) % 3
    given = {"columns": columns, "num_boost_round": 4, "weight": "w", **more}
    models = [model_bytes(run_local(made(**given, pax__additive=one))) for one in (True, False)]
    assert models[0] == models[1]


def categorical():
    columns, rng = made_columns("multi:softprob"), np.random.default_rng(4)
    columns["c"] = rng.choice(["oslo", "rome", "bonn", "york", "lima"], 400)
    columns["w"] = rng.integers(0, 3, 400)
    return {"objective": "multi:softprob", "columns": columns, "weight": "w", **PAIRS}


@pytest.mark.parametrize("more", [{}, {"max_leaves": 5, "grow_policy": "lossguide"}], ids=str)
def test_parties_under_masks_give_the_model_of_one_also_after_a_stop(made, more):
    """Pairs are chosen in round 4 and grow in round 5, each level in an exchange."""
    given = {**categorical(), "pax__aggregation": "secure", **more}
    alone, three = (run_local(made(**given, parties=n)) for n in (1, 3))
    assert model_bytes(alone) == model_bytes(three)
    model = model_of(three)
    is_split = [len(tree) > 1 for tree in model.trees[-6:]]
    assert (model.num_parallel_tree, any(is_split)) == (8, True)
    assert not any(len(tree) > 1 for tree in model.trees[-8 * 3 - 6 : -8 * 3])
    kinds = {line["step"]: line["type"] for line in three.ledger}
    last = max(step for step, kind in kinds.items() if kind == "train.pax_grow")
    die(settings := made(**given), dies_before_reading=last)
    contexts = simulated_contexts(settings)
    assert model_bytes(run(resumed(settings), contexts)) == model_bytes(three)


@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_the_pair_that_two_curves_do_not_explain_is_chosen(made, aggregation):
    rng = np.random.default_rng(2)
    values = rng.normal(size=(900, 6)).round(1)
    signal = 2 * values[:, 0] - 2 * values[:, 3] + 3 * values[:, 1] * values[:, 4]
    columns = {**dict(zip("abcdef", values.T, strict=True)), "y": signal}
    given = {"objective": "reg:squarederror", "columns": columns, "pax__aggregation": aggregation}
    model = model_of(run_local(made(**given, **{**PAIRS, "pax__pairs": 1, "num_boost_round": 8})))
    pairs = [tree for tree in model.trees[6::7] if len(tree) > 1]
    assert len(pairs) == 3
    assert {*pairs[0]["column"][pairs[0]["left"] > 0].tolist()} == {1, 4}


@pytest.mark.by_default("secure-choice", "plain-level")
@pytest.mark.parametrize("step", ["choice", "level"])
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_a_party_that_is_lost_while_pairs_are_asked_is_left_out(made, aggregation, step):
    given = {**PAIRS, "parties": 4, "min_parties": 3, "pax__aggregation": aggregation}
    given |= {"num_boost_round": 6}
    kinds = {line["step"]: line["type"] for line in run_local(made(**given)).ledger}
    asked = sorted(step for step, kind in kinds.items() if kind == "train.pax_grow")
    lost_at = asked[0] - 1 if step == "choice" else asked[-1]  # at the roots, or below
    folder = run(made(**given), app=FaultyApp(error_from(lost_at)))
    assert [one["party"] for one in summary_of(folder)["left_out"]] == ["party-2"]
    model = model_of(folder)
    assert len(model.trees) == 6 * 8
    # Masked sums with and without a party would disclose it: the next round chooses.
    is_later = (aggregation, step) == ("secure", "choice")
    has_pairs = [any(len(tree) > 1 for tree in model.trees[8 * n + 6 : 8 * n + 8]) for n in (4, 5)]
    assert has_pairs == [not is_later, True]


def test_a_model_without_its_pairs_says_so_and_keeps_its_best_round(made):
    given = {**PAIRS, "num_boost_round": 80, "early_stopping_rounds": 2, "eta": 1.0}
    folder = run_local(made(n_rows=150, **given, calibration="platt"))
    summary, lines = summary_of(folder), folder.rounds
    losses = [line["valid"]["logloss"] for line in lines]
    assert summary["best_round"] == int(np.argmin(losses)) + 1 == len(lines) - 2 < 40
    assert any("the model has none of pax.pairs=2" in text for text in summary["warnings"])


@pytest.mark.parametrize(
    "more",
    [
        {"monotone_constraints": "a:1,b:-1", "base_margin": "w"},
        {"least_bin_rows": 5, "max_leaves": 3},
    ],
    ids=lambda more: next(iter(more)),
)
def test_other_settings_go_with_curves(made, more):
    columns = made_columns("reg:squarederror") | {"f": np.ones(400)}
    columns |= {"w": np.arange(400) % 3} if "base_margin" in more else {}
    model = model_of(run_local(made("pax", "reg:squarederror", columns=columns, **PAIRS, **more)))
    rising = [tree for tree in model.trees[::8] if len(tree) > 1]
    assert rising
    if "base_margin" in more:
        assert all(tree["value"][1] <= tree["value"][2] for tree in rising if len(tree) == 3)
    assert all(len(tree) == 1 for tree in model.trees[5::8])  # of the constant


REFUSED = {
    "num-parallel-tree": (2, r"must be 1 with pax\.additive: a round has a tree of each column"),
    "subsample": (0.5, r"must be 1\.0 with pax\.additive: all trees of a round are grown from"),
    "colsample-bytree": (0.5, r"must be 1\.0 with pax\.additive: a round has a tree of each c"),
    "colsample-bylevel": (0.5, r"must be 1\.0 with pax\.additive: a tree splits one column"),
    "colsample-bynode": (0.5, r"must be 1\.0 with pax\.additive: a tree splits one column"),
    "interaction-constraints": ("[a,b]", r"must be empty with pax\.additive: pax\.pairs says"),
    "init-model": ("m.json", r"must be empty with pax\.additive: its trees may be of several"),
    "objective": ("reg:absoluteerror", r"must be one without risk sets or quantiles with pax"),
    "max-depth": (1, r"must be >= 2 with pax\.pairs, whose trees split two columns; got 1$"),
    "pax.additive": (False, r"must be true with pax\.pairs=1, got false"),
    "pax.pairs": (101, r"must be <= 100, got 101"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_go_with_curves_are_refused(name):
    value, rule = REFUSED[name]
    given = {"pax.additive": True, "pax.pairs": 1, "objective": "binary:logistic", name: value}
    with pytest.raises(ConfigError, match=rf"^{re.escape(name)} {rule}"):
        PAX(load_settings(given))


def test_pairs_are_no_more_than_the_columns_have_and_take_no_noise(made):
    with pytest.raises(ConfigError, match=r"^pax\.pairs must be <= 15 with 6 columns, got 16$"):
        run_local(made(**{**PAIRS, "pax__pairs": 16}))
    private = {"privacy__epsilon": 1.0, "pax__aggregation": "secure"}
    with pytest.raises(ConfigError, match=r"^pax\.pairs must be 0 with privacy\.epsilon: their"):
        run_local(made(**PAIRS, **private))
    assert PAX.exchanges_a_round(made(**ADDITIVE)) == 1
    assert PAX.planned(made(**ADDITIVE))["levels"] == 0
    assert PAX.exchanges_a_round(made(**PAIRS)) == 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0.5, "lossguide", 3)),
        ({"eta": 0.2, "max_leaves": 8}, (0.2, "depthwise", 8)),
        ({"max_depth": 6}, (0.5, "depthwise", 0)),
        ({"pax.aggregation": "secure", "privacy.epsilon": 1.0}, (0.3, "depthwise", 0)),
        ({"pax.aggregation": "secure", "privacy.epsilon": "0"}, (0.5, "lossguide", 3)),
        ({"pax.additive": "false"}, (0.1, "depthwise", 0)),
    ],
)
def test_trees_of_curves_are_small_unless_their_size_is_given(given, expected):
    settings = load_settings({"strategy": "pax", "pax.additive": True, **given})
    assert (settings.eta, settings.grow_policy, settings.max_leaves) == expected
