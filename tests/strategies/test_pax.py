"""PAX: what it sends and what comes out, under masks the same, and sums of a site with a floor."""

import numpy as np
import pytest

from clients import pax
from clients.handshake import look
from fedapp.errors import ConfigError, DivergedError
from fedapp.histograms.bins import digitise
from fedapp.histograms.groups import cell_starts, group, merge_sketch_bins
from fedapp.histograms.sketch import LARGEST_FLOAT, sketch_and_code, sketch_cuts
from fedapp.messages import handshake
from fedapp.run_folder import Checkpoints
from fedapp.runs.local import run_local
from fedapp.site.settings import site_config
from fedapp.trees.model import LEAF
from strategies.pax_sums import share_bins
from tests.crypto.test_pairwise import MOST_CHI2, chi_squared
from tests.federated import model_bytes, model_of, summary_of
from tests.tables import made_columns
from tests.transcript import arrays_of, listen, masked_in, scalars_of


def test_the_smaller_child_alone_is_asked_for(settings):
    _, app = listen(settings(max_depth=3, parties=1, num_boost_round=1))
    asked = app.of_kind("pax_grow")
    assert [len(arrays_of(request)["wanted_nodes"]) for request, _ in asked] == [1, 1, 2]
    whole, *below = (arrays_of(reply)["histograms"][..., 1].sum() for _, reply in asked)
    assert max(below) < whole / 2


def test_bins_are_divided_by_rows_and_a_small_party_gets_few(settings):
    assert share_bins(255, {"a": 2721, "b": 265, "c": 13}) == {"a": 231, "b": 23, "c": 2}
    sizes = {"partition": "sizes:0.9,0.08,0.02", "pax__bins": "share"}
    _, app = listen(settings(**sizes, max_bin=50, valid_fraction=0.0))
    asked = [scalars_of(request)["n_bins"] for request, _ in app.of_kind("pax_sketch")]
    assert sorted(asked) == [2, 4, 45]


@pytest.mark.parametrize(
    ("data", "objective", "n_bins"),
    [("breast-cancer", "binary:logistic", 30), ("diabetes", "reg:squarederror", 10)],
)
def test_classification_keeps_the_finest_resolution_and_regression_the_coarsest(
    settings, monkeypatch, data, objective, n_bins
):
    states, save = [], Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda *given: states.append(given[2]) or save(*given))
    parties = {"partition": "sizes:0.75,0.25", "parties": 2}
    run_local(settings(data=data, objective=objective, max_bin=40, **parties))
    assert states[0].boosting.cuts.widths.max() == n_bins  # of a column, after the fusion


DEFAULT = {"early_stopping_rounds": "auto", "valid_fraction": 0.5, "test_fraction": 0.0}
DEFAULT |= {"parties": 2, "label": "y"}


@pytest.mark.by_default("400-pax", "198-pax", "400-cyclic")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "cyclic"])
@pytest.mark.parametrize("n_rows", [400, 198])
def test_a_default_run_stops_by_the_loss_of_enough_validation_rows(
    settings, write_table, strategy, n_rows
):
    given = {"data": str(write_table(n_rows=n_rows)), "num_boost_round": "auto", "eta": 1.0}
    folder = run_local(settings(strategy=strategy, **DEFAULT, **given))
    summary, lines = summary_of(folder), folder.rounds
    if n_rows == 198:  # of which too few are to look at
        assert (len(lines), summary["best_round"]) == (100, None)
        assert summary["boosting"]["early_stopping_rounds"] == 0
        return
    losses = [line["valid"]["logloss"] for line in lines]
    assert summary["best_round"] == int(np.argmin(losses)) + 1 == len(lines) - 20
    boosting = {"num_boost_round": 300, "eta": 1.0, "early_stopping_rounds": 20}
    assert summary["boosting"] == {**boosting, "scale_pos_weight": 1.0, "min_child_weight": 1.0}


def test_a_default_run_goes_on_where_there_is_nothing_to_stop_by(settings, write_table, caplog):
    labels = [0] * 398 + [1] * 2
    given = {"data": str(write_table(n_rows=400, y=labels)), "seed": 5}
    one = {**DEFAULT, "parties": 1}
    folder = run_local(settings(**one, **given, num_boost_round=25, eval_metric="auc"))
    summary = summary_of(folder)
    assert summary["metrics"]["valid"]["auc"] is None
    assert (summary["trees"], summary["best_round"]) == (25, None)
    assert "early stopping is off: it must have a validation auc to look at" in caplog.text


@pytest.mark.parametrize(
    ("parties", "partition", "bins"),
    [(4, "iid", "share"), (5, "iid", "equal"), (2, "sizes:0.81,0.19", "equal")],
)
def test_bins_are_shared_where_no_party_is_small(settings, parties, partition, bins):
    given = {"parties": parties, "partition": partition, "num_boost_round": 1, "max_bin": 16}
    folders = [run_local(settings(**given)), run_local(settings(**given, pax__bins=bins))]
    assert summary_of(folders[0])["bins"] == bins
    assert model_bytes(folders[0]) == model_bytes(folders[1])


def test_early_stopping_needs_rows_to_look_at(settings, write_table):
    few = {"test_fraction": 0.0, "valid_fraction": 0.01, "early_stopping_rounds": 2}
    run = settings(data=str(write_table(n_rows=8)), label="y", parties=1, **few)
    with pytest.raises(ConfigError, match="valid-fraction must leave validation rows"):
        run_local(run)


def test_a_tree_splits_only_the_columns_it_drew_and_sums_the_rows_it_drew(settings):
    drawn = {"num_boost_round": 6, "max_depth": 4, "colsample_bytree": 0.1, "subsample": 0.5}
    trees = model_of(run_local(settings(**drawn))).trees
    used = [set(tree["column"][tree["left"] != LEAF].tolist()) for tree in trees]
    assert all(1 <= len(columns) <= 3 for columns in used)
    assert len(set().union(*used)) > 3
    whole = model_of(run_local(settings())).trees[0]["hessian"][0]
    assert 0.35 * whole < trees[0]["hessian"][0] < 0.65 * whole


# Under masks: the coordinator sees sums over all parties alone


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
    rounds = [each.rounds[-1]["valid"] for each in (three, plain)]
    assert rounds[0] == pytest.approx(rounds[1], rel=1e-6, abs=1e-6)


# What is sent


def test_what_a_party_sends_is_uniform(made):
    _, app = listen(made(num_boost_round=4, max_bin=16))
    masked = masked_in(app)
    assert len(masked) > 30
    assert chi_squared(np.concatenate(masked)) < MOST_CHI2


def test_the_range_of_labels_is_told_to_powers_of_two_and_notes_stay(made):
    _, app = listen(made("reg:squarederror"))
    replies = [scalars_of(reply) for _, reply in app.of_kind("query.hello")]
    ranges = {abs(one[name]) for one in replies for name in ("label_low", "label_high")}
    assert {float(np.log2(value)) % 1 for value in ranges} == {0.0}
    assert all(one["notes"] == [] for one in replies)


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


# Sums of gradients whose bins have so many of a site's rows, or none


RNG = np.random.default_rng(3)
LEAST = 5


@pytest.fixture
def merging(made):
    """Squared errors, whose hessians count rows."""
    columns = {name: one[:160] for name, one in made_columns("reg:squarederror").items()}
    columns["c"] = RNG.choice(["oslo", "rome", "bonn", "york", "lima"], 160)
    given = {"objective": "reg:squarederror", "max_depth": 4, "parties": 2, "max_bin": 64}
    given |= {"pax__aggregation": "plain"}
    return lambda **more: made(**{"columns": columns, **given, **more})


# Groups


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([0, 5, 0, 9], [0, 1, 2, 3]),
        ([4, 1, 0, 5], [1, 1, 2, 3]),
        ([6, 4, 0, 0], [3, 3, 3, 3]),
    ],
)
def test_groups_have_so_many_rows_or_none(counts, expected):
    found = group(np.arange(4), np.array([counts]), np.array([0, 4]), LEAST)
    assert found.tolist() == expected


def test_a_sketch_has_so_many_rows_a_bin_and_no_smallest_or_largest_value():
    values = RNG.normal(size=(97, 3)).astype(np.float32)
    values[4:, 1] = np.nan
    weights = np.ones(97, np.float32)
    sketch = sketch_and_code(values, weights, 64)[0]
    merged = merge_sketch_bins(sketch, values, weights, LEAST)
    assert np.diff(merged.offsets)[1] == 0 < np.diff(merged.offsets)[0] <= 19
    codes, missing_code = digitise(values, sketch_cuts(merged))
    assert (codes[:, 1] == missing_code).all()
    for column in (0, 2):
        assert np.bincount(codes[:, column]).min() >= LEAST
        points, _ = merged.column(column)
        assert (values[:, column] <= points[0]).sum() == LEAST
        assert (values[:, column] >= merged.maxima[column]).sum() >= LEAST


# Runs


def is_few(counts):
    return bool(((counts > 0) & (counts < LEAST)).any())


@pytest.mark.by_default("secure")
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_every_bin_that_is_told_or_follows_has_so_many_rows_or_none(
    merging, monkeypatch, aggregation
):
    are_few = []
    sums = pax.Round.sums

    def looked_at(self, asked, bins):
        histograms, missing = sums(self, asked, bins)
        assert self.floor
        starts = cell_starts(bins.widths)
        # The other child of each split follows from its parent and its sibling.
        counted = bins, self.drawn, self.floor.nodes, self.floor.open_nodes
        all_counts = pax.cell_counts(*counted)
        for ends, counts in zip(self.floor.ends, all_counts, strict=True):
            are_few.append(is_few(np.bincount(ends, counts, starts[-1])))
        unit = max(float(self.gradients[..., 1].max()), 1.0)  # the hessian of a row
        are_few.append(is_few(np.rint(histograms[..., 1] / unit)) or is_few(missing))
        return histograms, missing

    monkeypatch.setattr(pax.Round, "sums", looked_at)
    settings = merging(least_bin_rows=LEAST, num_boost_round=3, pax__aggregation=aggregation)
    folder, app = listen(settings)
    assert len(are_few) > 50
    assert not any(are_few)
    for _, reply in app.of_kind("pax_sketch"):
        assert (arrays_of(reply)["masses"] >= LEAST).all()
    assert all(len(tree) > 3 for tree in model_of(folder).trees)
    assert np.isfinite(folder.summary["metrics"]["test"]["rmse"])


@pytest.mark.parametrize("floor", [0, LEAST])
def test_both_children_are_asked_for_where_a_party_merges_bins(merging, floor):
    """Those of the larger one do not follow: its parent was told in other groups."""
    _, app = listen(merging(least_bin_rows=floor))
    asked = [message for message, _ in app.of_kind("pax_grow")]
    below = [arrays_of(message) for message in asked if scalars_of(message)["level"]]
    assert len(below) > 3
    for one in below:
        children = len(one["wanted_nodes"]) // (2 if floor else 1)
        assert children == len(one["split_lefts"])


def test_a_nodes_sums_are_those_told_of_it(merging):
    """Not those that its parent was split into, between bins that rows were not told in."""
    folder, app = listen(merging(least_bin_rows=LEAST, parties=1, num_boost_round=1))
    (tree,) = model_of(folder).trees
    n_held = 0
    for message, reply in app.of_kind("pax_grow"):
        arrays, nodes = arrays_of(reply), arrays_of(message)["wanted_nodes"]
        for node, histogram, missing in zip(
            nodes, arrays["histograms"], arrays["missing"], strict=True
        ):
            # The hessian of a row is 1; each column tells of all rows, as one has no missing ones.
            n_rows = (histogram[:, 1].sum() + missing.sum()) / len(missing)
            n_held += n_rows > 0
            assert not n_rows or tree["hessian"][node] == n_rows
    assert n_held > 5


def test_a_party_of_fewer_rows_tells_nothing_of_its_gradients(merging):
    _, app = listen(merging(least_bin_rows=20, partition="sizes:0.9,0.1"))
    small = [
        arrays_of(reply)
        for message, reply in app.of_kind("pax_grow")
        if message.metadata.dst_node_id == 3
    ]
    assert small
    assert not any(one[name].any() for one in small for name in ("histograms", "root_sums"))


@pytest.mark.parametrize(("least", "n_counts"), [(0, 4), (LEAST, 1)])
def test_rows_that_a_round_does_not_draw_are_as_many_or_none(merging, least, n_counts):
    """Else they are told by how much a round of all rows differs from one without them."""
    more = {"subsample": 0.99, "num_boost_round": 20, "parties": 1, "max_depth": 1}
    _, app = listen(merging(least_bin_rows=least, **more))
    replies = [arrays_of(reply)["root_sums"] for _, reply in app.of_kind("pax_grow")]
    assert len({float(sums[0, 1]) for sums in replies if len(sums)}) == n_counts
