"""PAX that promises an epsilon for each row."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2

from fedapp import metrics
from fedapp.crypto.noise import KEY_BYTES, Budget
from fedapp.errors import ConfigError, FedappError, ProtocolError
from fedapp.histograms.bins import Cuts
from fedapp.histograms.build import CLEAR, make_consistent
from fedapp.histograms.fixed_point import Bounds
from fedapp.histograms.sketch import Descent, digit_counts
from fedapp.messages import pax_secure, secagg
from fedapp.messages.pax import CountRequest, GrowRequest
from fedapp.messages.pax_secure import COUNTED_ROWS
from fedapp.metrics.adders import TOTALS_NOISE, ClippedNumbers
from fedapp.metrics.names import EVAL_METRICS, NAMES
from fedapp.metrics.sums import make_plausible
from fedapp.report.card import model_card
from fedapp.run_folder import read_run
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.site import answer, sums
from fedapp.site.account import Position, account_of
from fedapp.site.store import Store
from fedapp.site.sums import Noise, add_noise, check_leaves
from fedapp.trees.losses import LOSSES, PLAIN
from fedapp.trees.model import LEAF, check_trees
from fedapp.trees.objective import BOUNDED, n_outputs, row_bounds, row_pairs
from fedapp.trees.rounds import draw_trees
from strategies.method import OF_ROWS
from strategies.secagg import exchange_keys
from tests.federated import model_of
from tests.messages.declared import example
from tests.network import die, resumed, run
from tests.tables import made_columns


@pytest.fixture
def made(made):
    """``made(objective, **overrides)``: a short private run on rows with missing values."""

    def make(objective="binary:logistic", columns=None, **more):
        columns = columns or made_columns(objective, 400)
        columns["c"] = np.random.default_rng(4).choice(["oslo", "rome", "bonn"], 400)
        clip = {} if objective in BOUNDED else {"privacy__clip": 8.0}
        usual = {"pax__aggregation": "secure", "privacy__epsilon": 20.0, **clip}
        return made("pax", objective, columns=columns, **{**usual, **more})

    return make


# A run


def test_a_run_takes_an_exchange_a_round_and_tells_what_it_promises(made, told):
    folder = run_local(made("multi:softprob", num_boost_round=3))
    summary, model = folder.summary, model_of(folder)
    assert summary["exchanges"] == 2 + 1 + 4 + 3 + 1
    assert len(model.trees) == 3 * model.n_outputs
    assert (summary["privacy"]["epsilon"], summary["privacy"]["delta"]) == (20, 1e-5)
    assert summary["metrics"]["train"] == summary["metrics"]["by_party"] == {}
    assert "accuracy" in summary["metrics"]["test"]
    assert all(line["train"] == line["valid"] == {} for line in folder.rounds)
    assert any("are never split" in text for text in summary["warnings"])
    card = model_card(read_run(folder.path))
    assert "## Privacy\n\n- promised: epsilon 20, delta 1e-05\n" in card
    assert "not covered: numbers of rows; " in card
    # Each sum has noise of the variance that was told.
    kinds = {kind for _, kind, _, _ in told}
    assert kinds == {"labels", "counts", "tree", "scores"}
    for kind in kinds:
        scaled = [
            np.ravel(added / np.sqrt(np.array(each.variances, dtype=float)))
            for place, answers in told.items()
            for _, added, each in answers
            if place[1] == kind and added.size
        ]
        flat = np.concatenate(scaled)
        assert (flat != 0).mean() > 0.9
        assert 1e-9 < chi2.cdf((flat**2).sum(), len(flat)) < 1 - 1e-9


def test_noise_that_hides_leaves_is_warned_of(made):
    summary = run_local(made(privacy__epsilon=2.0, max_depth=6, num_boost_round=8)).summary
    assert any("the noise of each leaf counts as" in text for text in summary["warnings"])


# Noise, once


@pytest.fixture
def told(monkeypatch):
    """What each site has told of each sum, and the noise that it had."""
    found = {}

    def listening(name, store, request, arrays, of):
        sums = add_noise(name, store, request, arrays, of)
        for place, (each, array, total) in enumerate(zip(of, arrays, sums, strict=True)):
            found.setdefault((name, each.kind, each.number, place), []).append(
                (total, total - array, each)
            )
        return sums

    monkeypatch.setattr(answer, "add_noise", listening)
    return found


@pytest.mark.by_default("how0")
@pytest.mark.parametrize(
    "how", [{"dies_before_reading": 8}, {"dies_before_reading": 9}, {"dies_before_sending": 9}]
)
def test_a_server_that_dies_gets_the_same_noise_again(made, told, how):
    settings = made()
    contexts = simulated_contexts(settings)
    die(settings, contexts, **how)
    folder = run(resumed(settings), contexts)
    assert folder.summary["trees"] == 2
    again = [answers for answers in told.values() if len(answers) > 1]
    assert bool(again) == (how.get("dies_before_reading") == 8)
    for answers in again:
        for total, _, _ in answers:
            np.testing.assert_array_equal(total, answers[0][0])


@pytest.fixture
def store(tmp_path):
    found = Store(tmp_path)
    found.put(sums.Promised(Budget(1.0, 1e-5, 4.1, n_rounds=2, n_parties=3), clip=0.0))
    found.put(Position(3, "one"))
    return found


REQUEST = pax_secure.PrivateCountRequest(1, np.empty(0, np.uint32), np.zeros(1, np.int64))
ZEROS = [np.zeros((4, 2), dtype=np.int64)]


def test_noise_follows_from_a_key_that_only_the_site_has(store, tmp_path):
    of = [Noise("tree", 0, (10**6,))]
    other = Store(tmp_path / "other")
    other.put(store.get(sums.Promised))
    other.put(store.get(Position))
    first, second = (add_noise("bank", site, REQUEST, ZEROS, of)[0] for site in (store, other))
    assert len(account_of(store).noise_key) == KEY_BYTES
    assert account_of(store).noise_key != account_of(other).noise_key
    assert (first != second).any()
    large = [Noise("tree", n, (10**18, 10**20)) for n in (0, 1)]
    first, second = (add_noise("bank", store, REQUEST, ZEROS, [each])[0] for each in large)
    assert (first != second).all()  # of two sums


def test_nothing_leaves_without_noise_once_it_is_promised(store):
    check_leaves("bank", store, REQUEST)
    check_leaves("bank", store, secagg.KeysRequest())
    rule = "class must be one for noised sums, as the run has"
    for kind in (CountRequest, GrowRequest):  # for sums, and for its own numbers
        with pytest.raises(ProtocolError, match=rule):
            check_leaves("bank", store, kind(**example(kind)))


# What a row moves


OBJECTIVES = sorted(OF_ROWS)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("heaviest", [0, 2])
def test_no_row_moves_a_tree_by_more_than_its_bound(objective, heaviest):
    rng, n_rows = np.random.default_rng(3), 20_000
    width = n_outputs(objective, 4)
    margins = rng.uniform(-6, 6, (n_rows, width)).astype(np.float32)
    if objective == "multi:softprob":  # also of two classes alone
        margins[: n_rows // 2, 2:] = -40
    low, high = LOSSES[objective].labels
    labels = rng.uniform(max(low, -30), min(high, 30), n_rows)
    if LOSSES[objective].classes[1]:
        labels = rng.integers(0, max(width, 2), n_rows)
    labels = (labels > 0).astype(int) if objective == "binary:hinge" else labels
    parameters = replace(PLAIN, max_delta_step=0.7, huber_slope=2.5)
    if objective == "binary:logistic":
        parameters = replace(parameters, scale_pos_weight=3.0)
    own = row_bounds(objective, parameters, 0.0 if objective in BOUNDED else 5.0)
    bounds = Bounds(COUNTED_ROWS, heaviest, 5)
    weights = np.full(n_rows, 2.0**heaviest, dtype=np.float32)
    pairs = row_pairs(objective, margins, labels.astype(np.float32), parameters)
    whole = own.whole(pairs, weights, bounds)
    moved = ((whole / np.array(own.sensitivities(bounds))) ** 2).sum(axis=(1, 2))
    assert 0.9 < moved.max() <= 1
    assert (whole[..., 1] >= 0).all()


def test_margins_that_are_no_numbers_move_nothing_beyond_the_bound():
    margins = np.array([[np.nan], [np.inf], [-np.inf], [3e38]], dtype=np.float32)
    own, bounds = row_bounds("binary:logistic", PLAIN, 0.0), Bounds(COUNTED_ROWS)
    pairs = row_pairs("binary:logistic", margins, np.ones(4, np.float32), PLAIN)
    whole = own.whole(pairs, np.ones(4, np.float32), bounds)
    assert (((whole / np.array(own.sensitivities(bounds))) ** 2).sum(axis=(1, 2)) <= 1).all()
    assert (whole[0] == 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_row_moves_the_scores_by_more_than_its_bound(objective):
    rng, bounds = np.random.default_rng(3), Bounds(COUNTED_ROWS, 1, 5)
    width = n_outputs(objective, 4)
    extra = ("mae",) if objective == "reg:tweedie" else ()
    most = 0.0
    for _ in range(200):
        adder = ClippedNumbers(bounds, 8.0)
        margins = rng.uniform(-30, 30, (1, width)).astype(np.float32)
        labels = rng.integers(0, 2, 1) if objective in BOUNDED else rng.uniform(1, 32, 1)
        weights = np.full(1, 2, np.float32)
        rows = margins, labels.astype(np.float32), weights
        found = metrics.statistics(objective, *rows, 32, 8.0, extra=extra, adder=adder)
        sums = found.sums.astype(float)
        sums[: adder.n_totals] /= TOTALS_NOISE
        moved = np.sqrt((sums**2).sum() + (found.histogram.astype(float) ** 2).sum())
        most = max(most, moved / adder.sensitivity)
    assert 0.5 < most <= 1


def test_a_row_is_counted_once_a_column_whatever_is_asked():
    values = np.array([[3.5, np.nan, -2.0]], dtype=np.float32)
    weights = np.array([7])
    prefixes, offsets = Descent(np.ones(3, dtype=bool), 2).wanted()
    counts = digit_counts(values, weights, prefixes, offsets, 0)
    assert sorted(counts.sum(axis=1)) == [0, 7, 7]
    first = np.full(3, np.flatnonzero(counts[0])[0], dtype=np.uint32)
    twice = digit_counts(values, weights, first, np.array([0, 3, 3, 3]), 1)
    assert twice.sum() == 7


# Cuts from noised counts


def test_cuts_of_noised_counts_ascend_and_lie_near_the_quantiles():
    rng, n_rows, deviation = np.random.default_rng(5), 20_000, 15.0
    values = np.column_stack((rng.normal(size=n_rows), rng.exponential(9, n_rows))).astype("f4")
    descent = Descent(np.ones(2, dtype=bool), 10, lightest=int(2 * CLEAR * deviation))
    weights = np.ones(n_rows, dtype=np.int64)
    while descent.digit < 4:
        counts = digit_counts(values, weights, *descent.wanted(), descent.digit)
        noisy = counts + np.rint(rng.normal(0, deviation, counts.shape)).astype(np.int64)
        descent.take(make_consistent(noisy, descent.masses if descent.digit else None, deviation))
    cuts = descent.cuts()
    for column in range(2):
        edges = cuts.column(column)
        assert (np.diff(edges) > 0).all()
        assert len(edges) > 5
        below = np.searchsorted(np.sort(values[:, column]), edges[:-1]) / n_rows
        assert np.abs(below * 10 - np.rint(below * 10)).max() < 0.5
        assert np.diff(below, prepend=0, append=1).max() < 0.2


def test_settled_counts_are_whole_and_add_up():
    noisy = np.array([[-5, 3, 900, 101], [-5, -8, 30, 2], [0, 500, 0, 500]])
    found = make_consistent(noisy, np.array([70, 11, 101]), deviation=20.0)
    assert found.sum(axis=1).tolist() == [70, 11, 101]
    assert found.tolist() == [[0, 0, 62, 8], [2, 3, 3, 3], [0, 50, 0, 51]]
    assert make_consistent(noisy, None, 20.0).tolist()[1:] == [[0, 0, 0, 0], [0, 500, 0, 500]]


def test_values_of_many_rows_are_seen_among_cells_whose_noise_adds_up_to_more():
    noisy = np.rint(np.random.default_rng(0).normal(0, 100, (1, 256))).astype(np.int64)
    noisy[0, [3, 130]] += [900, 700]
    found = make_consistent(noisy, np.array([1600]), deviation=100.0)
    assert np.flatnonzero(found).tolist() == [3, 130]
    assert abs(found[0, 3] - 900) < 200


def test_cuts_are_finite_where_noise_alone_has_counts():
    descent = Descent(np.ones(1, dtype=bool), 4)
    while descent.digit < 4:  # of 1.0, and of keys that are of no number
        counts = np.zeros((len(descent.wanted()[0]), 256), dtype=np.int64)
        counts[:, -1 if descent.digit else [0, 191, 255]] = 9
        descent.take(counts)
    assert np.isfinite(descent.cuts().edges).all()


# Drawn trees


CUTS = Cuts(
    np.array([1, 2, 3, 9, 5, 1, 2, 3, 1, 9], dtype=np.float32),
    np.array([0, 4, 5, 8, 10]),
    np.full(4, -1e30, dtype=np.float32),
    np.array([0, 0, 3, 0]),
)


def test_drawn_trees_split_one_column_each_in_turn():
    allowed = np.ones((2, 4), dtype=bool)
    columns = set()
    for round_id in range(20):
        grown = draw_trees(CUTS, allowed, 4, 7, round_id)
        again = draw_trees(CUTS, allowed, 4, 7, round_id)
        for tree, same in zip(grown.trees, again.trees, strict=True):
            assert (tree == same).all()
            check_trees(tree["left"], np.array([0, len(tree)]))
            splits = tree[tree["left"] != LEAF]
            assert len(splits)
            assert 1 not in splits["column"]  # has one bin
            columns |= set(splits["column"].tolist())
            assert len(set(splits["column"])) == 1
            # One leaf a bin at most.
            assert len(splits) < {0: 4, 2: 3, 3: 2}[int(splits["column"][0])]
            for number in splits["set"][splits["column"] == 2]:
                assert 0 < grown.sets.members(int(number)).sum() < 3
    assert columns == {0, 2, 3}
    turns = [int(draw_trees(CUTS, allowed, 1, 7, n).trees[0]["column"][0]) for n in range(6)]
    assert sorted(turns[:3]) == sorted(turns[3:]) == [0, 2, 3]
    allowed[:, :3] = False
    tree = draw_trees(CUTS, allowed[:1], 3, 0, 0).trees[0]
    assert tree["column"][tree["left"] != LEAF].tolist() == [3]
    allowed[:] = False
    assert len(draw_trees(CUTS, allowed[:1], 3, 0, 0).trees[0]) == 1


# Plausible scores


ONLY_ABOVE_0 = ("loss", "rms", "mae", "mape", "deviance", "tweedie")


@pytest.mark.parametrize(
    "objective", ["binary:logistic", "multi:softprob", "reg:squarederror", "binary:hinge"]
)
def test_a_score_that_no_rows_can_have_is_not_shown(objective):
    rng, width = np.random.default_rng(0), n_outputs(objective, 3)
    nothing = np.empty((0, width), np.float32), *(np.empty(0, np.float32),) * 2
    extra = EVAL_METRICS[objective]
    form = metrics.statistics(objective, *nothing, 32, extra=extra)
    lost = set[str]()
    for _ in range(100):
        cells, sums = (rng.normal(0, 9, each.shape) for each in (form.histogram, form.sums))
        read = make_plausible(metrics.Statistics(sums, cells))
        assert (read.histogram >= 0).all()
        metrics.check_statistics(objective, read)
        scores = metrics.scores(objective, read, extra)
        lost |= {name for name, value in scores.items() if np.isnan(value)}
        for name, value in scores.items():
            low = 0 if name not in ("r2", "poisson-nloglik") else -np.inf
            high = np.inf if any(map(name.__contains__, ONLY_ABOVE_0)) else 1
            assert np.isnan(value) or low <= value <= high, name
        # Nothing is moved into its range: what is shown is what the sums say.
        if "rmse" in NAMES[objective]:
            assert np.isnan(scores["rmse"]) == (sums[0] <= 0 or sums[1] < 0)
            assert np.isnan(scores["mae"]) or scores["mae"] == sums[2] / sums[0]
        shown = metrics.curves(objective, read)
        counts = [*shown.get("confusion", ()), metrics.class_weights(objective, read)]
        assert all(count >= 0 for row in counts for count in row)
        assert metrics.intervals(objective, read, extra=extra).keys() <= scores.keys()
    assert {*NAMES[objective]} - lost <= {"auc", "ks", "pr_auc", "auc_ovr"}


# Who is refused

REFUSED = [
    ({"pax__aggregation": "plain"}, r"pax\.aggregation must be secure with privacy\.epsilon"),
    ({"init_model": "x"}, r"init-model must be empty with privacy\.epsilon"),
    ({"early_stopping_rounds": 3}, r"early-stopping-rounds must be 0 with privacy\.epsilon"),
    ({"least_bin_rows": 3}, r"least-bin-rows must be 0 with privacy\.epsilon"),
    ({"subsample": 0.5}, r"subsample must be 1\.0 with privacy\.epsilon"),
    ({"monotone_constraints": "a:1"}, r"monotone-constraints must be empty with privacy"),
    ({"min_parties": 2}, r"min-parties must be 0 with privacy\.epsilon: the noise of every"),
    ({"parties": 1}, r"parties must be >= 2 with privacy\.epsilon"),
    ({"privacy__delta": 0.0}, r"privacy\.delta must be > 0"),
    ({"privacy__delta": 0.1}, r"privacy\.delta must be below 1 / \d+, the number of training"),
    ({"privacy__epsilon": 0.01}, r"privacy\.epsilon must be larger for so few rows: the noise"),
    ({"privacy__clip": 1.0}, r"privacy.clip must be 0, for gradients have a bound"),
    (
        {"objective": "reg:squarederror", "privacy__clip": 0.0},
        r"privacy.clip must be > 0, .* two standard deviations",
    ),
]


@pytest.mark.parametrize(("given", "rule"), REFUSED)
def test_what_cannot_be_kept_is_refused(made, given, rule):
    with pytest.raises(ConfigError, match=f"^{rule}"):
        run_local(made(**given))


def test_a_site_refuses_noise_that_may_lack_a_partys(made, monkeypatch):
    monkeypatch.setattr(
        "strategies.pax_dp.exchange_keys", lambda parties: exchange_keys(parties, 2)
    )
    with pytest.raises(FedappError, match="threshold must be 0, for the noise of all parties"):
        run_local(made())
