"""Federated Forest: the forest of the joined table, whoever has which columns."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import accuracy_score

from fedapp.data.predictions import read_columns_of
from fedapp.data.schema import Roles
from fedapp.errors import PartyError
from fedapp.home import home
from fedapp.messages import federated_forest as messages
from fedapp.messages.vertical import SentReply
from fedapp.records.document import from_text, to_text
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.forest.label_codes import class_codes, number_codes
from tests.federated import lines_of, summary_of
from tests.forests import forest_settings, joined, part_of, pooled
from tests.letters import letters_sent
from tests.network import (
    run,
)
from tests.pooled import Pooled
from tests.tables import made_columns, write_rows
from tests.tampering import rewrite_letters
from tests.transcript import ORDERED, arrays_of, check_declared, listen, scalars_of
from tests.trees.test_cart import Limits, theirs

OBJECTIVES = ["binary:logistic", "multi:softprob", "reg:squarederror"]
KINDS = {
    **ORDERED,
    "train.federated_forest_setup": (messages.SetupRequest, SentReply),
    "train.federated_forest_level": (messages.LevelRequest, messages.LevelReply),
    "train.federated_forest_partition": (messages.PartitionRequest, messages.PartitionReply),
    "evaluate.federated_forest_finish": (messages.FinishRequest, messages.FinishReply),
}


@pytest.fixture
def forest(settings, tmp_path):
    """See ``forests.forest_settings``; 4 trees."""
    return forest_settings(settings, tmp_path, 400, own_trees=4, max_bin=64)


ONE_TREE = {"own_trees": 1, "own_bootstrap": False, "own_max_features": "all", "max_bin": 65535}


# The same forest


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_sample_weights_and_limits_count_as_on_the_joined_table(forest, tmp_path, objective):
    weights = np.random.default_rng(7).choice([0.0, 0.5, 1.0, 2.5], 400)
    data = write_rows(tmp_path / "weighted.csv", {**made_columns(objective), "w": weights})
    limits = {"own_min_samples_split": 20, "own_min_samples_leaf": 5}
    limits |= {"own_min_impurity_decrease": 0.01, "own_max_features": 0.5}
    run = forest(objective, 3, data=str(data), weight="w", own_max_depth=6, max_bin=16, **limits)
    model, _, _ = pooled(run)
    assert 20 < sum(map(len, model.trees)) < 60 * 4
    assert to_text(joined(run_local(run))) == to_text(model)


@pytest.mark.slow
@pytest.mark.by_default("encoded-2-*", "paillier-*")
@pytest.mark.each_value_once
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("parties", [2, 3, 6])
@pytest.mark.parametrize("labels", ["encoded", "paillier"])
def test_columns_drawn_for_each_tree_split_all_of_its_nodes(forest, objective, parties, labels):
    key = {"own_key_bits": 256, "own_insecure_small_key": True, "own_labels": labels}
    run = forest(objective, parties, own_max_features_per="tree", max_bin=16, **key)
    model, _, _ = pooled(run)
    assert to_text(joined(run_local(run))) == to_text(model)
    used = [{*tree["column"][tree["left"] >= 0].tolist()} for tree in model.trees]
    assert all(1 <= len(columns) <= 2 for columns in used)  # the root of 6
    assert len(set[int]().union(*used)) > 2


def with_categories(objective, folder):
    """A table of numbers and of two columns of names, missing values among both."""
    columns = made_columns(objective, n_rows=300)
    rng = np.random.default_rng(5)
    for name, names in (("b", list("pqrstuvw")), ("e", ["no", "yes", "perhaps"])):
        places = np.nan_to_num(columns[name]).astype(int) % len(names)
        shifted = np.where(rng.random(300) < 0.3, rng.integers(0, len(names), 300), places)
        columns[name] = np.where(rng.random(300) < 0.1, "", np.array(names)[shifted])
    return str(write_rows(folder / "categories.csv", columns))


@pytest.mark.by_default("encoded-2-*")
@pytest.mark.each_value_once
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("parties", [2, 5])
@pytest.mark.parametrize("labels", ["encoded", "paillier"])
def test_columns_of_categories_are_split_as_on_the_joined_table(
    forest, tmp_path, objective, parties, labels
):
    data = with_categories(objective, tmp_path)
    key = {"own_key_bits": 256, "own_insecure_small_key": True, "own_trees": 3}
    more = {"own_labels": labels, "own_max_depth": 4, "max_bin": 16, **key}
    run = forest(objective, parties, data=data, **more)
    model, _, _ = pooled(run)
    assert len(model.sets) > 5
    assert to_text(joined(run_local(run))) == to_text(model)


@pytest.mark.slow
@pytest.mark.by_default("2-encoded")
@pytest.mark.each_value_once
@pytest.mark.parametrize("labels", ["encoded", "paillier"])
@pytest.mark.parametrize("parties", [2, 5])
def test_a_forest_of_real_rows_with_categories_is_that_of_the_joined_table(
    real_data, forest, tmp_path, labels, parties
):
    lines = gzip.decompress((real_data / "adult.txt.gz").read_bytes()).decode().splitlines()
    names = [f"c{place}" for place in range(len(lines[0].split()) - 1)]
    n_rows = 600 if labels == "encoded" else 200
    rows = [line.replace("<=50K", "0").replace(">50K", "1").split() for line in lines[:n_rows]]
    data = tmp_path / "adult.csv"
    data.write_text("\n".join(map(",".join, [[*names, "y"], *rows])) + "\n")
    key = {"own_key_bits": 256, "own_insecure_small_key": True, "own_trees": 2}
    run = forest(parties=parties, data=str(data), own_labels=labels, own_max_depth=5, **key)
    model, _, _ = pooled(run)
    assert len(model.sets) > 5
    assert to_text(joined(run_local(run))) == to_text(model)


@pytest.mark.slow
@pytest.mark.by_default("interactive", "eini")
@pytest.mark.parametrize("inference", ["interactive", "one-round", "eini"])
def test_rows_are_predicted_by_the_names_of_each_partys_categories(
    forest, settings, tmp_path, inference
):
    data = with_categories("binary:logistic", tmp_path)
    trained = run_local(forest(data=data, own_max_depth=4))
    header, *rows = Path(data).read_text().splitlines()
    cells = [row.split(",") for row in rows[:40]]
    fields = [[*row[:1], {"p": "new", "": "p"}.get(row[1], row[1]), *row[2:]] for row in cells]
    new = tmp_path / "new.csv"
    new.write_text("\n".join([header, *map(",".join, fields)]) + "\n")
    model = trained.path / "model.json"
    key = {"eini__key_bits": 512, "eini__insecure_small_key": True, "eini__unguarded": True}
    given = {"data": str(new), "label": "y", "parties": 2, "align": "ordered", **key}
    model_id = json.loads(model.read_text())["model_id"]
    run = run_local(settings(strategy=inference, model=model_id, **given))
    summary = summary_of(run)
    n_new = sum(row[1] == "new" for row in fields)
    told = f"{n_new} values of 'b' are no category of the model, and count as missing"
    assert any(told in text for text in summary["warnings"])
    whole = joined(trained)
    table = read_columns_of(str(new), whole.columns, Roles(), categories=whole.categories)
    written = home() / "sites" / summary["active"] / summary["model_id"] / "predictions.csv"
    found = [float(line.split(",")[1]) for line in written.read_text().splitlines()[1:]]
    ours = whole.predictions(whole.leaves(table.values))[:, 0]
    np.testing.assert_allclose(sorted(found), sorted(ours), atol=1e-6)


@pytest.mark.by_default("2-*")
@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("data", "objective", "limits"),
    [
        ("breast-cancer", "binary:logistic", Limits()),
        ("wine", "multi:softprob", Limits("entropy", 2)),
        ("diabetes", "reg:squarederror", Limits("variance", 6, min_samples_leaf=20)),
    ],
)
@pytest.mark.parametrize("parties", [2, 5])
def test_one_tree_is_scikit_learns(forest, data, objective, limits, parties):
    own = {f"own_{name}": value for name, value in vars(limits).items()}
    assert_scikit_learns(
        forest(objective, parties, **ONE_TREE | own, data=data, label="", seed=3), limits
    )


@pytest.mark.by_default("2-ionosphere")
@pytest.mark.each_value_once
@pytest.mark.parametrize("data", ["ionosphere", "spambase", "waveform"])
@pytest.mark.parametrize("parties", [2, 5])
def test_one_tree_is_scikit_learns_on_real_rows(real_data, forest, data, parties):
    objective = "multi:softprob" if data == "waveform" else "binary:logistic"
    run = forest(objective, parties, **ONE_TREE, data=data, label="", seed=2)
    assert_scikit_learns(run, Limits())


def assert_scikit_learns(run, limits):
    """Predictions of training and unseen rows are those of scikit-learn's tree, without ties."""
    whole, model = Pooled(run), joined(run_local(run))
    given = whole.values[whole.train], whole.labels[whole.train], limits, None
    ours = model.predictions(model.leaves(whole.values))
    np.testing.assert_allclose(ours, theirs(*given, whole.values), 1e-6, 1e-6)


@pytest.mark.slow
def test_out_of_bag_scores_are_of_trees_that_have_not_seen_the_row(forest):
    run = forest(own_trees=20)
    model, rows, nodes = pooled(run)
    labels = Pooled(run).labels[Pooled(run).train]
    guesses = []
    for row in range(len(labels)):
        unseen = [tree for tree in range(20) if not rows.counts[tree, row]]
        shares = [model.values[tree][nodes[tree, row], 0] for tree in unseen]
        guesses.append(np.mean(shares) >= 0.5)
    summary = summary_of(run_local(run))
    assert summary["oob"]["accuracy"] == pytest.approx(accuracy_score(labels, guesses))
    assert summary["metrics"]["train"]["accuracy"] > summary["oob"]["accuracy"]
    assert summary_of(run_local(forest(own_bootstrap=False)))["oob"] == {}


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


def test_messages_have_their_declared_fields_and_the_server_sees_none_of_it(forest):
    run_settings = forest("reg:squarederror")
    folder, app = listen(run_settings)
    check_declared(app, KINDS)
    whole, model = Pooled(run_settings), joined(folder)
    secrets = [tree["threshold"][tree["left"] >= 0] for tree in model.trees]
    secrets += [values[values != 0] for values in model.values]
    secrets += [whole.labels, number_codes(whole.labels[whole.train])[0]]
    hidden = {value.tobytes() for array in secrets for value in array if abs(value) > 1}
    for _, request, reply in app.heard:
        for message in (request, reply):
            for name, array in arrays_of(message).items():
                shown = {value.tobytes() for value in array.ravel()}
                assert name == "parcels" or not shown & hidden, name
            told = json.dumps({k: str(v) for k, v in scalars_of(message).items()})
            assert '"a"' not in told
    assert set(summary_of(folder)["importance"]["gain"]) <= {
        f"party-{party} column {column}" for party in (1, 2) for column in (1, 2, 3)
    }


@pytest.mark.slow
def test_a_party_is_told_its_own_drawn_columns_and_codes_of_labels(forest):
    settings = forest("reg:squarederror", 3)
    folder, app = listen(settings)
    for request, _ in app.of_kind("forest_level"):
        assert set(arrays_of(request)) - {"parcel_ends", "parcels"} == {
            *("trees", "nodes", "owners", "n_drawn")
        }
        assert arrays_of(request)["n_drawn"].max() <= 2
    letters = letters_sent(app)
    labels = [letter for letter in letters if letter.name == "Labels"]
    assert {(letter.sender, letter.receiver) for letter in labels} == {
        *(("party-1", "party-2"), ("party-1", "party-3"))
    }
    whole = Pooled(settings)
    np.testing.assert_array_equal(labels[0]["codes"], number_codes(whole.labels[whole.train])[0])
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


@pytest.mark.parametrize(
    ("field", "change", "match"),
    [
        ("bits", lambda bits: bits[:-1], r"Partition.bits must be \d+ bytes, got"),
        ("level", lambda level: level + 1, "Partition.level must be the one being split"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(forest, monkeypatch, field, change, match):
    rewrite_letters(monkeypatch, "Partition", field, change)
    with pytest.raises(PartyError, match=match):
        run_local(forest())
