"""Federated Forest: the forest of the joined table, whoever has which columns."""

import json

import numpy as np
import pytest
from sklearn.metrics import accuracy_score

from fedapp.data.predictions import read_columns_of
from fedapp.data.schema import Roles
from fedapp.errors import PartyError
from fedapp.records.document import from_text, to_text
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.forest.label_codes import class_codes, number_codes
from tests.federated import lines_of, summary_of
from tests.forests import forest_settings, joined, part_of, pooled
from tests.letters import letters_sent
from tests.network import run
from tests.pooled import Pooled
from tests.tables import made_columns, write_rows
from tests.transcript import arrays_of, listen, predicted_rows, scalars_of
from tests.trees.test_cart import Limits, theirs

OBJECTIVES = ["binary:logistic", "multi:softprob", "reg:squarederror"]


@pytest.fixture
def forest(settings, tmp_path):
    """See ``forests.forest_settings``; 4 trees."""
    return forest_settings(settings, tmp_path, 400, own_trees=4, max_bin=64)


# The same forest


def with_categories(objective, n_rows=300):
    """Columns of numbers and two of names, missing values among both."""
    columns = made_columns(objective, n_rows)
    rng = np.random.default_rng(5)
    for name, names in (("b", list("pqrstuvw")), ("e", ["no", "yes", "perhaps"])):
        places = np.nan_to_num(columns[name]).astype(int) % len(names)
        shifted = np.where(rng.random(n_rows) < 0.3, rng.integers(0, len(names), n_rows), places)
        columns[name] = np.where(rng.random(n_rows) < 0.1, "", np.array(names)[shifted])
    return columns


def with_weights(objective):
    weights = np.random.default_rng(7).choice([0.0, 0.5, 1.0, 2.5], 400)
    return {**made_columns(objective), "w": weights}


PAILLIER = {"own_labels": "paillier", "own_key_bits": 256, "own_insecure_small_key": True}
OF_TREES = {"own_max_features_per": "tree", "max_bin": 16}
NAMES = {"own_max_depth": 4, "max_bin": 16, "own_trees": 3}
LIMITS = {"own_min_samples_split": 20, "own_min_samples_leaf": 5, "own_max_features": 0.5}
LIMITS |= {"own_min_impurity_decrease": 0.01, "own_max_depth": 6, "max_bin": 16, "weight": "w"}
GROWN = {  # columns, if not the usual ones; objective, parties, settings
    "weights and limits": (with_weights, "multi:softprob", 3, LIMITS),
    "weights and limits of numbers": (with_weights, "reg:squarederror", 3, LIMITS),
    "columns of trees": (None, "binary:logistic", 2, OF_TREES),
    "columns of trees, encrypted": (None, "multi:softprob", 3, {**OF_TREES, **PAILLIER}),
    "columns of trees of six parties": (None, "reg:squarederror", 6, OF_TREES),
    "names": (with_categories, "binary:logistic", 2, NAMES),
    "names of five parties": (with_categories, "multi:softprob", 5, NAMES),
    "names, encrypted": (with_categories, "reg:squarederror", 2, {**NAMES, **PAILLIER}),
}


@pytest.mark.by_default(
    "weights and limits", "columns of trees*", "names", "names, encrypted", "names of five parties"
)
@pytest.mark.parametrize(("columns", "objective", "parties", "more"), GROWN.values(), ids=GROWN)
def test_the_forest_is_that_of_the_joined_table(
    forest, tmp_path, columns, objective, parties, more
):
    if columns:
        more = {**more, "data": str(write_rows(tmp_path / "rows.csv", columns(objective)))}
    run = forest(objective, parties, **more)
    model, _, _ = pooled(run)
    assert sum(map(len, model.trees)) > 20
    assert to_text(joined(run_local(run))) == to_text(model)
    assert (len(model.sets) > 5) == (columns == with_categories)
    if "own_max_features_per" in more:
        used = [{*tree["column"][tree["left"] >= 0].tolist()} for tree in model.trees]
        assert all(1 <= len(of_tree) <= 2 for of_tree in used)  # the root of 6
        assert len(set().union(*used)) > 2


@pytest.mark.by_default("one-round")
@pytest.mark.parametrize("inference", ["interactive", "one-round", "eini"])
def test_rows_are_predicted_by_the_names_of_each_partys_categories(
    forest, settings, tmp_path, inference
):
    columns = with_categories("binary:logistic")
    trained = run_local(
        forest(data=str(write_rows(tmp_path / "rows.csv", columns)), own_max_depth=4)
    )
    new = {name: column[:40] for name, column in columns.items()}
    new["b"] = np.array([{"p": "new", "": "p"}.get(name, name) for name in new["b"]])
    path = str(write_rows(tmp_path / "new.csv", new))
    key = {"eini__key_bits": 512, "eini__insecure_small_key": True, "eini__unguarded": True}
    given = {"data": path, "label": "y", "parties": 2, "align": "ordered", **key}
    model_id = summary_of(trained)["model_id"]
    folder = run_local(settings(strategy=inference, model=model_id, **given))
    told = f"{(new['b'] == 'new').sum()} values of 'b' are no category of the model, and count as"
    assert any(told in text for text in summary_of(folder)["warnings"])
    whole = joined(trained)
    table = read_columns_of(path, whole.columns, Roles(), categories=whole.categories)
    ours = whole.predictions(whole.leaves(table.values))[:, 0]
    found = predicted_rows(folder)[:, -1]
    np.testing.assert_allclose(sorted(found), sorted(ours), atol=1e-6)


@pytest.mark.parametrize(
    ("data", "objective", "limits"),
    [
        ("breast-cancer", "binary:logistic", Limits()),
        ("wine", "multi:softprob", Limits("entropy", 2)),
        ("diabetes", "reg:squarederror", Limits("variance", 6, min_samples_leaf=20)),
    ],
)
def test_one_tree_is_scikit_learns(forest, data, objective, limits):
    """Predictions of training and unseen rows are those of scikit-learn's tree, without ties."""
    own = {f"own_{name}": value for name, value in vars(limits).items()}
    own |= {"own_trees": 1, "own_bootstrap": False, "own_max_features": "all", "max_bin": 65535}
    run = forest(objective, 2, **own, data=data, label="", seed=3)
    whole, model = Pooled(run), joined(run_local(run))
    given = whole.values[whole.train], whole.labels[whole.train], limits, None
    ours = model.predictions(model.leaves(whole.values))
    np.testing.assert_allclose(ours, theirs(*given, whole.values), 1e-6, 1e-6)


def test_out_of_bag_scores_are_of_trees_that_have_not_seen_the_row(forest):
    run = forest(own_trees=12)
    model, rows, nodes = pooled(run)
    labels = Pooled(run).labels[Pooled(run).train]
    guesses = []
    for row in range(len(labels)):
        unseen = [tree for tree in range(12) if not rows.counts[tree, row]]
        shares = [model.values[tree][nodes[tree, row], 0] for tree in unseen]
        guesses.append(np.mean(shares) >= 0.5 if shares else None)
    known = np.array([guess is not None for guess in guesses])
    summary = summary_of(run_local(run))
    score = accuracy_score(labels[known], np.array(guesses)[known].astype(bool))
    assert summary["oob"]["accuracy"] == pytest.approx(score)
    assert summary["metrics"]["train"]["accuracy"] > summary["oob"]["accuracy"]


# Exchanges and messages


def test_a_forest_that_cannot_grow_further_stops(forest):
    run = forest(own_max_depth=50, own_min_samples_leaf=60)
    folder = run_local(run)
    ledger = {line["step"]: line["type"] for line in lines_of(folder.ledger)}
    assert len(lines_of(folder.rounds)) < 5
    assert sum("forest" in kind for kind in ledger.values()) < 2 + 2 * 5
    assert to_text(joined(folder)) == to_text(pooled(run)[0])


def test_every_level_is_told_of_with_its_scores(forest):
    folder = run_local(forest())
    rounds = lines_of(folder.rounds)
    assert [line["round"] for line in rounds] == [1, 2, 3]
    assert rounds[-1]["leaves"] == sum((t["left"] < 0).sum() for t in joined(folder).trees)
    assert rounds[0]["train"]["accuracy"] < rounds[-1]["train"]["accuracy"]
    summary = summary_of(folder)
    assert rounds[-1]["valid"] == pytest.approx(summary["metrics"]["valid"])


def test_the_server_sees_nothing_of_rows_and_parties_their_own_columns_and_codes(forest):
    run_settings = forest("reg:squarederror", 3)
    folder, app = listen(run_settings)
    whole, model = Pooled(run_settings), joined(folder)
    codes = number_codes(whole.labels[whole.train])[0]
    secrets = [tree["threshold"][tree["left"] >= 0] for tree in model.trees]
    secrets += [values[values != 0] for values in model.values]
    secrets += [whole.labels, codes]
    hidden = {value.tobytes() for array in secrets for value in array if abs(value) > 1}
    for _, *pair in app.heard:
        for message in pair:
            for name, array in arrays_of(message).items():
                shown = {value.tobytes() for value in array.ravel()}
                assert name == "parcels" or not shown & hidden, name
            told = json.dumps({k: str(v) for k, v in scalars_of(message).items()})
            assert '"a"' not in told
    places = {f"party-{party} column {column}" for party in (1, 2, 3) for column in (1, 2)}
    assert set(summary_of(folder)["importance"]["gain"]) <= places
    for request, _ in app.of_kind("forest_level"):
        asked = arrays_of(request)
        assert set(asked) - {"parcel_ends", "parcels"} == {"trees", "nodes", "owners", "n_drawn"}
        assert asked["n_drawn"].max() <= 2
    letters = letters_sent(app)
    labels = [letter for letter in letters if letter.name == "Labels"]
    ways = {(letter.sender, letter.receiver) for letter in labels}
    assert ways == {("party-1", "party-2"), ("party-1", "party-3")}
    np.testing.assert_array_equal(labels[0]["codes"], codes)
    partitions = {(one.sender, one.receiver) for one in letters if one.name == "Partition"}
    assert len(partitions) == 6
    kept = part_of("party-2", summary_of(folder)["model_id"])
    own = {"format", "kind", "columns", "kinds", "quantiles", "lookup", "active", "trees", "salt"}
    assert set(kept) == own


def test_codes_of_labels_are_the_same_for_all_labels_with_the_same_forest():
    numbers = np.random.default_rng(1).normal(size=200).astype(np.float32).round(2)
    codes, unit = number_codes(numbers)
    for scale, offset in ((2.0, 0.0), (-0.5, 3.0), (-4.0, -1.0)):
        image = (numbers.astype(np.float64) * scale + offset).astype(np.float32)
        np.testing.assert_allclose(number_codes(image)[0], codes, atol=2.0**20)  # of 2**40
    np.testing.assert_allclose(np.abs(np.diff(codes)) * unit, np.abs(np.diff(numbers)), atol=1e-6)
    assert codes.sum().is_integer()
    assert np.abs(codes).sum() < 2**53
    classes = np.array([7, 2, 2, 5, 7])
    np.testing.assert_array_equal(class_codes(classes), [0, 1, 1, 2, 0])
    np.testing.assert_array_equal(class_codes(-classes), [0, 1, 1, 2, 0])


def test_the_master_keeps_the_model_where_all_parties_agree(forest, tmp_path):
    run = forest("multi:softprob", 3, own_master_keeps_model=True, allow_export=True)
    folder = run_local(run)
    text = (folder.path / "model.json").read_text()
    assert text == to_text(pooled(run)[0])
    n_rows = predict_table(folder.path, run.data, "", tmp_path / "rows.csv").n_rows
    model, whole = from_text(text, BaggedForest), Pooled(run)
    expected = model.predictions(model.leaves(whole.values))
    lines = (tmp_path / "rows.csv").read_text().splitlines()[1:]
    found = np.array([list(map(float, line.split(",")[1:])) for line in lines])
    assert n_rows == len(whole.values)
    np.testing.assert_allclose(found, expected)
    with pytest.raises(PartyError, match="allow-export must be true with"):
        run_local(forest(own_master_keeps_model=True))


def test_importance_has_names_where_all_parties_share_them(forest):
    found = summary_of(run_local(forest(share_column_names=True)))["importance"]
    assert set(found["gain"]) <= set("abcdef")
    model = joined(run_local(forest()))
    columns = np.concatenate([tree["column"][tree["left"] >= 0] for tree in model.trees])
    assert found["count"] == {
        name: n for name, n in zip("abcdef", np.bincount(columns), strict=True) if n
    }


def test_sites_with_tables_of_their_own_draw_columns_from_a_secret_not_from_the_seed(
    write_table, sites, forest, monkeypatch
):
    drawn = []
    monkeypatch.setattr("secrets.randbits", lambda bits: drawn.append(bits) or 12345)
    rng = np.random.default_rng(8)
    # The bank has nothing but the label and a column that cannot be split.
    shop = {"a": rng.normal(size=80), "b": rng.normal(size=80)}
    bank = write_table("bank", 80, a=[1] * 80, b=None, y=(shop["a"] + shop["b"] > 0).astype(int))
    files = {"name": "bank", "data": bank}, {"name": "shop", "data": None, "label": ""}
    files[1]["data"] = write_table("shop", 80, **shop, y=None)
    folder = run(forest(own_max_features=0.5), sites(*files))
    assert 63 in drawn
    assert summary_of(folder)["metrics"]["train"]["accuracy"] > 0.85
    assert {tree["column"][0] for tree in joined(folder).trees} == {1, 2}
    drawn.clear()
    run(forest())
    assert 63 not in drawn


# Failures


def test_one_label_alone_is_refused(write_table, sites, forest):
    bank = write_table("bank", 40, y=[1] * 40)
    shop = write_table("shop", 40, a=None, b=None, y=None, c=range(40))
    contexts = sites({"name": "bank", "data": bank}, {"name": "shop", "data": shop, "label": ""})
    with pytest.raises(PartyError, match=r"bank.*label must not be the same in every training row"):
        run(forest(), contexts)
