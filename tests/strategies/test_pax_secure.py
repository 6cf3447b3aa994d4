"""PAX whose coordinator sees sums over all parties alone."""

import json

import numpy as np
import pytest

from clients.handshake import look
from fedapp.errors import ConfigError, DivergedError, FedappError, PartyError
from fedapp.histograms.sketch import LARGEST_FLOAT
from fedapp.messages import handshake
from fedapp.records.document import load
from fedapp.run_folder import Checkpoints
from fedapp.runs.local import run_local
from fedapp.site.settings import site_config
from fedapp.trees.model import LEAF, Ensemble
from tests.crypto.test_pairwise import MOST_CHI2, chi_squared
from tests.federated import lines_of, model_bytes, summary_of
from tests.tables import made_columns, write_rows
from tests.transcript import label_ranges, listen, masked_in, scalars_of

OBJECTIVES = ("binary:logistic", "multi:softprob", "reg:squarederror")
# Of each kind of trees one by default: with and without a tree a class.
EVERY_OBJECTIVE = pytest.mark.parametrize(
    "objective", [*OBJECTIVES[1:], pytest.param(OBJECTIVES[0], marks=pytest.mark.slow)]
)


@pytest.fixture
def made(settings, tmp_path):
    """``made(objective, **overrides)``: a short run under masks, on rows with missing values."""

    def make(objective="binary:logistic", **more):
        data = more.get("data") or tmp_path / f"{objective[:5]}.csv"
        if not more.get("data") and not data.exists():
            write_rows(data, made_columns(objective))
        given = {"label": "y", "objective": objective, "max_depth": 3, **more, "data": str(data)}
        return settings(**{"pax__aggregation": "secure", "max_bin": 32, **given})

    return make


# Sums have no order


@pytest.mark.slow
@pytest.mark.by_default("binary:hinge")
@pytest.mark.parametrize(
    "objective",
    [
        "reg:tweedie",
        "reg:squaredlogerror",
        "binary:hinge",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("count:poisson", "reg:gamma", "reg:logistic", "reg:pseudohubererror")
        ),
    ],
)
def test_every_objective_has_whole_gradients(made, tmp_path, objective):
    columns = made_columns("reg:squarederror")
    sizes = np.exp(columns["y"] / 30) + 0.01
    labels = {"count:poisson": np.round(sizes), "reg:logistic": sizes / sizes.max()}
    labels["binary:hinge"] = (sizes > np.quantile(sizes, 0.6)).astype(int)
    path = write_rows(tmp_path / "sizes.csv", {**columns, "y": labels.get(objective, sizes)})
    runs = [run_local(made(objective, data=str(path), parties=n)) for n in (1, 3)]
    assert model_bytes(runs[0]) == model_bytes(runs[1])
    assert load(runs[0].path / "model.json", Ensemble).n_outputs == 1
    plain = run_local(
        made(objective, data=str(path), parties=1, max_bin=64, pax__aggregation="plain")
    )
    again = run_local(made(objective, data=str(path), max_bin=64))
    assert_same_trees(*(load(each.path / "model.json", Ensemble) for each in (again, plain)))


@pytest.mark.slow
def test_weights_and_categories_are_those_of_all_rows(made, tmp_path):
    columns = made_columns("binary:logistic")
    rng = np.random.default_rng(4)
    columns["c"] = rng.choice(["oslo", "rome", "bonn", "york", "lima"], 400)
    columns["w"] = rng.uniform(0, 3, 400).round(3)
    columns["w"][::17] = 0
    path = write_rows(tmp_path / "weighted.csv", columns)
    given = {"data": str(path), "weight": "w", "max_bin": 64, "max_depth": 4}
    runs = [run_local(made(parties=n, **given)) for n in (1, 3)]
    assert model_bytes(runs[0]) == model_bytes(runs[1])
    plain = run_local(made(parties=1, pax__aggregation="plain", **given))
    assert_same_trees(*(load(each.path / "model.json", Ensemble) for each in (runs[1], plain)))


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


@pytest.mark.slow
@pytest.mark.by_default("multi:softprob")
@EVERY_OBJECTIVE
def test_columns_of_few_values_give_the_trees_of_plain_sums(made, objective):
    more = {"max_bin": 64, "num_boost_round": 4, "max_depth": 5}
    secure_run = run_local(made(objective, parties=3, **more))
    plain = run_local(made(objective, parties=1, pax__aggregation="plain", **more))
    models = [load(each.path / "model.json", Ensemble) for each in (secure_run, plain)]
    assert_same_trees(*models)
    scores, expected = (summary_of(each)["metrics"] for each in (secure_run, plain))
    assert scores.pop("by_party") == {}
    for subset, found in scores.items():
        assert found == pytest.approx(expected[subset], rel=1e-6, abs=1e-6)
    rounds = [lines_of(each.rounds)[-1]["valid"] for each in (secure_run, plain)]
    assert rounds[0] == pytest.approx(rounds[1], rel=1e-6, abs=1e-6)


REAL = [
    ("default-credit", "binary:logistic"),
    ("give-me-some-credit", "binary:logistic"),
    ("ijcnn1", "binary:logistic"),
    ("waveform", "multi:softprob"),
    ("abalone", "reg:squarederror"),
    ("space-ga", "reg:squarederror"),
]


@pytest.mark.parametrize(
    ("data", "objective"),
    [REAL[-1], *(pytest.param(*each, marks=pytest.mark.slow) for each in REAL[:-1])],
)
def test_real_rows_give_the_trees_of_plain_sums_with_the_same_cuts(
    real_data, made, tmp_path, data, objective
):
    """Where values are those that their bins begin with, plain sums have no other cuts."""
    from fedapp.data.datasets import read_source
    from fedapp.data.schema import Roles

    more = {"num_boost_round": 5, "max_depth": 5, "max_bin": 64, "valid_fraction": 0.0}
    secure_run = made(objective, data=data, label="", **more)
    states = []
    save = Checkpoints.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", lambda *given: states.append(given[2]) or save(*given))
        found = run_local(secure_run)
    cuts = states[0].boosting.cuts
    table = read_source(data, Roles())
    columns = {}
    for place, name in enumerate(table.columns):
        values, own = table.values[:, place], cuts.column(place)
        begins = np.append(np.float32(-1e30), own[:-1]).astype(np.float64)
        codes = np.minimum(np.searchsorted(own, values, side="right"), len(own) - 1)
        columns[f"x{name}"] = np.where(np.isnan(values), np.nan, begins[codes])
    assert table.labels is not None
    path = write_rows(tmp_path / "begins.csv", {**columns, "y": table.labels})
    plain = made(objective, data=str(path), parties=1, pax__aggregation="plain", **more)
    expected = run_local(plain)
    assert_same_trees(*(load(each.path / "model.json", Ensemble) for each in (found, expected)))


@pytest.mark.slow
def test_more_rounds_end_in_the_model_of_all_at_once(made):
    first = run_local(made(num_boost_round=2))
    more = run_local(made(num_boost_round=3, init_model=str(first.path)))
    once = run_local(made(num_boost_round=5))
    assert model_bytes(more) == model_bytes(once)


def test_constraints_draws_and_depth(made):
    given = {
        "colsample_bytree": 0.7,
        "colsample_bynode": 0.8,
        "subsample": 0.7,
        "monotone_constraints": "a:1",
        "interaction_constraints": "[a,b,c],[d,e,f]",
        "pax__bins": "equal",
        "max_bin": 64,
    }
    found, plain = (
        run_local(made(**given, parties=1, pax__aggregation=how)) for how in ("secure", "plain")
    )
    assert_same_trees(*(load(each.path / "model.json", Ensemble) for each in (found, plain)))
    assert summary_of(run_local(made(**given)))["trees"] == 2


# What is sent


def test_what_a_party_sends_is_uniform(made):
    _, app = listen(made(num_boost_round=4, max_bin=16))
    masked = masked_in(app)
    assert len(masked) > 30
    assert chi_squared(np.concatenate(masked)) < MOST_CHI2


def test_the_range_of_labels_is_told_to_powers_of_two_and_notes_stay(made):
    _, app = listen(made("reg:squarederror"))
    ranges = label_ranges(app)
    assert ranges
    assert {float(np.log2(value)) % 1 for value in ranges} == {0.0}
    assert all(scalars_of(reply)["notes"] == [] for _, reply in app.of_kind("query.hello"))


# Who is refused


def test_a_run_that_may_lose_too_many_parties_is_refused(made):
    with pytest.raises(ConfigError, match=r"^min-parties must be 0 or >= 3 of 4 with pax\.aggreg"):
        run_local(made(parties=4, min_parties=2))
    with pytest.raises(ConfigError, match=r"^min-parties must be 0 with .* early-stopping-rounds"):
        run_local(made(parties=4, min_parties=3, early_stopping_rounds=2))


def test_two_parties_are_told_what_each_sees(made):
    warnings = summary_of(run_local(made(parties=2)))["warnings"]
    assert any("hides little among 2" in text for text in warnings)


def test_sites_with_tables_of_their_own_train(made, three):
    run_settings = made(objective="auto", data="breast-cancer", parties=3)
    folder = run_local(run_settings, three(bank={"least-parties": 3}))
    assert summary_of(folder)["trees"] == 2
    assert load(folder.path / "model.json", Ensemble).objective == "binary:logistic"


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


@pytest.mark.parametrize(
    ("node", "aggregation", "rule"),
    [
        ({"least-parties": 4}, "secure", r"parties must be >= 4 \(least-parties of bank\), got 3"),
        ({"least-parties": 2}, "plain", r"aggregation must be secure for bank, whose node config"),
        (
            {"trusted": f"shop:{'0' * 32}"},
            "secure",
            r"insurer .*: parcel\.key must be one bank trusts \(none is pinned\)",
        ),
        (
            {"most-bins": 8},
            "secure",
            r"max-bin must be <= 8 \(most-bins in the node config of bank",
        ),
        ({"least-parties": 1}, "secure", r"least-parties must be >= 2, got .1."),
    ],
)
def test_a_site_refuses_what_its_node_config_does(made, three, node, aggregation, rule):
    run_settings = made(parties=3, pax__aggregation=aggregation)
    with pytest.raises(FedappError, match=rule):
        run_local(run_settings, three(bank=node))


def test_two_sites_sum_only_where_both_say_so(made, three):
    run_settings = made(parties=2, num_boost_round=1)
    with pytest.raises(
        PartyError, match=r"parties must be >= 3 \(least-parties of bank\), got 2; "
    ):
        run_local(run_settings, three()[:2])
    agreed = {"least-parties": 2}
    folder = run_local(made(parties=2), three(bank=agreed, insurer=agreed)[:2])
    assert json.loads((folder.path / "summary.json").read_text())["trees"] == 2


def test_counts_that_no_message_holds_are_refused(made, monkeypatch):
    monkeypatch.setattr("strategies.pax_sums.MAX_COUNT_BYTES", 10_000)
    with pytest.raises(
        ConfigError, match=r"^max-bin must be less for so many columns .* 10,000 at"
    ):
        run_local(made())


def test_gradients_beyond_what_holds_for_all_rows_are_refused(made):
    rule = r"every gradient must be <= .* got a larger one; a smaller eta"
    with pytest.raises(DivergedError, match=rule):
        run_local(made("reg:squarederror", eta=1000.0, num_boost_round=3))
