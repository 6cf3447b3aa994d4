"""SecureBoost: XGBoost's own trees over columns of several parties, and no split by false sums."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import xgboost

from clients.secureboost.passive import Passive
from clients.secureboost.round import draw_rows
from clients.vertical import ciphertexts
from fedapp.api import load as load_run
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.packing import grouped_layouts
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.workers import Workers
from fedapp.errors import ConfigError, DataError, PartyError
from fedapp.records.document import from_text, to_text
from fedapp.runs.local import run_local
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.predict import predict_margins
from fedapp.trees.xgboost import stock_ensemble
from strategies.secureboost import SecureBoost
from tests.encrypted import scored
from tests.federated import model_bytes, model_of
from tests.letters import letters_sent
from tests.pooled import Pooled, assert_xgboosts
from tests.random_tables import differences, random_case
from tests.tables import made_columns, write_rows
from tests.tampering import refuses
from tests.transcript import listen


@pytest.fixture
def made(made):
    """``made(objective, **overrides)``: a run of three rounds on a small table."""
    usual = {"num_boost_round": 3, "max_bin": 16}
    return lambda objective="binary:logistic", **more: made(
        "secureboost", objective, **{**usual, **more}
    )


# The same trees


def test_first_trees_of_the_active_party_alone_and_later_ones_are_xgboosts(made):
    run = made(secureboost__first_trees=1)
    whole, folder = Pooled(run), run_local(run)
    is_local = whole.owners(np.arange(6)) == 0
    alone = np.where(is_local, whole.values, np.float32(np.nan))
    first = xgboost.train(whole.parameters, whole.matrix(alone), 1)
    later = xgboost.train(whole.parameters, whole.matrix(whole.values), 2, xgb_model=first)
    assert_xgboosts(folder, whole, later)
    split = [tree["column"][tree["left"] != LEAF] for tree in model_of(folder).trees]
    assert [bool(whole.owners(columns).any()) for columns in split] == [False, True, True]
    steps = {line["step"] for line in folder.ledger if line["type"].endswith("_sum")}
    assert len(steps) == 2 * 3  # of the levels of later trees


# Rows and columns that are drawn


def test_a_round_counts_none_but_the_rows_drawn_for_it(made):
    # Hessians are 1, so that the root's is the number of rows; of 288 about half are drawn.
    drawn, by_goss = (
        [
            float(tree["hessian"][0])
            for tree in model_of(run_local(made("reg:squarederror", **more))).trees
        ]
        for more in ({"subsample": 0.5}, {"secureboost__goss": True})
    )
    assert all(count.is_integer() and 115 < count < 173 for count in drawn)
    assert len(set(drawn)) == 3
    assert by_goss == [57 + 28 * 8] * 3  # 57 count once and 28 count 8 times


def test_goss_keeps_large_gradients_and_makes_up_for_the_others_it_leaves_out():
    boost = SimpleNamespace(
        num_parallel_tree=1, subsample=1.0, goss=True, top_rate=0.2, other_rate=0.1
    )
    rng = np.random.default_rng(1)
    pairs = rng.normal(size=(1000, 3, 2)).astype(np.float32)
    drawn = draw_rows(pairs.copy(), boost, rng)
    sizes = np.abs(pairs[..., 0]).sum(axis=1)
    top = sizes >= np.sort(sizes)[-200]
    rest = ~top & (drawn != 0).any(axis=(1, 2))
    assert np.array_equal(drawn[top], pairs[top])
    assert rest.sum() == 100
    # Ke et al. 2017, Algorithm 2: the sampled others stand for all of them, by (1 - a) / b.
    np.testing.assert_allclose(drawn[rest], pairs[rest] * 8, rtol=1e-6)


def test_rounds_grown_alone_are_no_more_than_early_stopping_waits_for(made):
    more = {"secureboost__first_trees": 4, "early_stopping_rounds": 3, "valid_fraction": 0.3}
    rule = "^secureboost.first-trees must be at most early-stopping-rounds where that is set, got 4"
    with pytest.raises(ConfigError, match=rule):
        SecureBoost.section_settings(made(**more))


# One tree a round for all classes: XGBoost's ``multi_output_tree``


ONE_TREE = {"multi_strategy": "multi_output_tree", "objective": "multi:softprob"}


@pytest.fixture
def one_tree(made):
    """Settings of a run of two rounds on a small table with three classes."""
    small = {"n_rows": 240, "num_boost_round": 2, "max_bin": 8, "secureboost__key_bits": 256}
    return lambda **more: made(**{**small, **ONE_TREE, **more})


# Seeds of three classes, without categories and constraints
@pytest.mark.parametrize("seed", [1002, 1023, 1037, 1079, 1107, 1121, 1135, 1149])
def test_random_tables_grow_xgboosts_trees_of_all_classes(vertical, tmp_path, seed):
    by_gain = {"grow-policy": "lossguide", "max-leaves": 4} if seed % 2 else {}
    keys = {"secureboost.key-bits": [256, 512][seed % 4 // 2]}
    case = random_case(tmp_path / "random.csv", seed, "secureboost")
    run = vertical(**{**case, **ONE_TREE, **by_gain, **keys})
    folder = run_local(run)
    assert differences(run, folder) == []
    model = model_of(folder)
    booster = xgboost.Booster(model_file=folder.path / "model.xgb.json")
    values = np.random.default_rng(seed).normal(2, 4, (99, len(model.columns))).astype(np.float32)
    matrix = xgboost.DMatrix(values, feature_names=booster.feature_names)
    ours = predict_margins(model, values)
    np.testing.assert_array_equal(booster.predict(matrix, output_margin=True), ours)


def test_a_node_is_summed_once_for_all_classes(one_tree):
    _, app = listen(one_tree(num_boost_round=1))
    letters = {}
    for letter in letters_sent(app):
        letters.setdefault(letter.name, []).append(letter)
    (key,), (bins,) = letters["PublicKey"], letters["ColumnBins"]
    assert key["n_outputs"] == 3
    layouts = grouped_layouts(256, key["most_rows"], 3)
    assert [layout.n_outputs for layout in layouts] == [2, 1]
    n_nodes = [len(letter["missing"]) for letter in letters["EncryptedSums"]]
    assert n_nodes == [1, 1, 2]
    for nodes, letter in zip(n_nodes, letters["EncryptedSums"], strict=True):
        n_sums = nodes * int(bins["widths"].sum())
        expected = sum(layout.n_plaintexts(n_sums) for layout in layouts)
        assert len(letter["ciphertexts"]) == expected
    assert not any(letter["trees"].any() for letter in letters["Splits"])


@pytest.fixture
def trained(one_tree, trained_once):
    """A run by gain, whose parts have splits that the model drops."""
    run = one_tree(grow_policy="lossguide", max_leaves=5, max_depth=0)
    return run, trained_once(run)


def test_a_document_of_one_tree_is_read_back_to_the_bit(trained):
    text = (trained[1].path / "model.json").read_text()
    model = from_text(text, Ensemble)
    assert to_text(model) == text
    assert all(tree["value"].shape == (len(tree), 3) for tree in model.trees)
    document = json.loads(text)
    other = {**document, "multi_strategy": "one_output_per_tree"}
    with pytest.raises(DataError, match=r"(trees must be|value must have|weight must have)"):
        from_text(json.dumps(other), Ensemble)
    document["trees"][0]["value"] = [row[:2] for row in document["trees"][0]["value"]]
    with pytest.raises(DataError, match="value must have 3 numbers a node with multi_output_tree"):
        from_text(json.dumps(document), Ensemble)


@pytest.mark.by_default("one-round")
@pytest.mark.parametrize("way", ["one-round", "interactive", "eini"])
def test_parts_predict_what_the_model_does(trained, settings, way):
    run, folder = trained
    expected = load_run(folder.path).predict_proba(run.data)
    np.testing.assert_allclose(scored(settings, run, way), expected, rtol=1e-6, atol=1e-6)


def test_a_run_continues_the_model(one_tree):
    first = run_local(one_tree(num_boost_round=1))
    second = run_local(one_tree(num_boost_round=1, init_model=str(first.path)))
    assert model_bytes(second) == model_bytes(run_local(one_tree(num_boost_round=2)))
    other = one_tree(init_model=str(first.path), multi_strategy="one_output_per_tree")
    with pytest.raises(PartyError, match="multi-strategy of init-model must be the run's at party"):
        run_local(other)


def test_onnx_predicts_what_one_tree_does(trained):
    ort = pytest.importorskip("onnxruntime")
    folder = trained[1]
    model = model_of(folder)
    values = np.random.default_rng(2).normal(20, 9, (50, 6)).astype(np.float32)
    session = ort.InferenceSession(load_run(folder.path).to_onnx())
    _, ours = session.run(None, {"rows": values})
    margins = predict_margins(model, values)
    powers = np.exp(margins - margins.max(axis=1, keepdims=True))
    np.testing.assert_allclose(ours, powers / powers.sum(axis=1, keepdims=True), atol=1e-6)


REFUSED = [
    ({"objective": "binary:logistic"}, "multi-strategy must be one_output_per_tree for binary:log"),
    ({"multi_strategy": "both"}, "multi-strategy must be one of 'one_output_per_tree' or"),
    ({"monotone_constraints": "a:1"}, "monotone-constraints must be empty with multi-strategy"),
    ({"interaction_constraints": "[a,b]"}, "interaction-constraints must be empty with multi-str"),
]


@pytest.mark.parametrize(("more", "rule"), REFUSED)
def test_settings_that_do_not_fit_one_tree_are_refused(one_tree, more, rule):
    with pytest.raises(ConfigError, match=f"^{rule}"):
        run_local(one_tree(**more))


def test_columns_of_categories_are_refused_as_by_xgboost(one_tree, tmp_path):
    columns = made_columns("multi:softprob", n_rows=100)
    kinds = [f"k{number % 4}" for number in range(100)]
    data = write_rows(tmp_path / "kinds.csv", {"kind": kinds, **columns})
    rule = "columns must be numbers with multi-strategy=multi_output_tree, .* categories at party"
    with pytest.raises(PartyError, match=rule):
        run_local(one_tree(data=str(data)))


def test_a_model_of_xgboost_with_vectors_is_refused_by_name(one_tree):
    run = Ensemble("multi:softprob", np.zeros(3, np.float32), tuple("abcdef"), tuple("012"), ())
    rule = "multi_strategy of init-model must be 'one_output_per_tree', got 'multi_output_tree'"
    with pytest.raises(ConfigError, match=f"^{rule}$"):
        stock_ensemble(bytes(Pooled(one_tree()).booster().save_raw("json")), run, print)


def test_parties_refuse_one_tree_of_one_output(one_tree, monkeypatch):
    monkeypatch.setattr("fedapp.settings.check_settings", lambda *_: None)  # as no server would
    rule = "multi_strategy must be one_output_per_tree with binary:logistic, which has one output"
    with pytest.raises(PartyError, match=rule):
        run_local(one_tree(objective="binary:logistic"))


def test_a_document_of_one_output_has_no_vectors():
    scores = np.full(1, 0.5, np.float32)
    how = {"multi_strategy": "multi_output_tree"}
    model = Ensemble("binary:logistic", scores, ("a",), ("0", "1"), (), **how)
    with pytest.raises(DataError, match="multi_strategy must be one_output_per_tree with one"):
        from_text(to_text(model), Ensemble)


# Sums of a passive party that are not those of its rows end a run by its name


SIDE, NOISE, VALUE, KIND = range(4)  # columns of party-2
SMALLER, LARGER = 0, 1  # which side of SIDE has more rows


@pytest.fixture
def two_splits(vertical, tmp_path):
    """Settings of a run whose first split is by ``side``, and whose second ones by ``value``."""

    def make(**more):
        rng = np.random.default_rng(5)
        side, value = (rng.random(240) < 0.7).astype(int), rng.integers(0, 8, 240)
        columns = {"side": side, "noise": rng.integers(0, 8, 240), "value": value}
        columns["kind"] = rng.choice(list("uvwxyz"), 240)
        labels = (value > np.where(side, 0, 6)).astype(int)
        if more.get("objective") == "multi:softprob":
            labels += value > 6
        columns = {"a": rng.integers(0, 3, 240), **columns, "y": labels}
        data = write_rows(tmp_path / "rows.csv", columns)
        shared = {"data": str(data), "label": "y", "columns": "sizes:1,4", "valid_fraction": 0.0}
        return vertical(**{**shared, **more})

    return make


# Sums of other rows than those that move: the rows have other bins while they are summed


def labels_of(codes):
    return codes[:, VALUE] > np.where(codes[:, SIDE], 0, 6)


def by_label(codes, widths):
    codes[:, NOISE] = np.where(labels_of(codes), widths[NOISE] - 1, 0)


def missing_by_label(codes, widths):
    codes[labels_of(codes), NOISE] = widths[NOISE]


def category_by_label(codes, widths):
    codes[:, KIND] = labels_of(codes)


def of_children(side):
    """The bins of another column, which gains most in one of the children of the first split."""

    def lie(codes, widths):
        codes[:, NOISE] = codes[:, [NOISE, VALUE]][range(len(codes)), 1 * (codes[:, SIDE] == side)]

    return lie


LIES = {
    "in the last level": (by_label, NOISE, {"max_depth": 1}),
    "as missing rows": (missing_by_label, NOISE, {}),
    "of categories": (category_by_label, KIND, {}),
    "of the smaller child": (of_children(SMALLER), NOISE, {}),
    "of the larger child, by difference": (of_children(LARGER), NOISE, {}),
    "of a tree of all classes": (
        *(by_label, NOISE),
        {**ONE_TREE, "drop_columns": "kind", "columns": "sizes:1,3"},
    ),
    "of parallel trees": (by_label, NOISE, {"num_parallel_tree": 2, "subsample": 0.6}),
}


@pytest.mark.parametrize(("lie", "column", "more"), LIES.values(), ids=LIES)
def test_a_split_by_sums_of_other_rows_is_refused(two_splits, monkeypatch, lie, column, more):
    sum_otherwise(monkeypatch, lie)
    rule = f"must be of rows with the sums that were claimed of column {column + 1} in round 1"
    refuses(f"^party-2.*: Partition.bits {rule}: other sums show labels$", two_splits(**more))


def sum_otherwise(patch, lie):
    """Party-2 sums rows as if they had other bins."""
    honest = Passive.encrypted_sums

    def sums(party, *wanted):
        true = party.table
        if party.name == "party-2":
            party.table = replace(true, codes=true.codes.copy())
            lie(party.table.codes, true.cuts.widths)
        letter, party.table = honest(party, *wanted), true
        return letter

    patch.setattr(Passive, "encrypted_sums", sums)


# Sums that no rows have

UNIT = 1 << 53


def added(gradients, hessians):
    """Wraps the packing of sums: numbers are added to the bins of the root."""

    def wrap(honest):
        def pack(key, sums, layout, workers):
            ring, width = ring_of(key.n_squared), layout.field_bits
            numbers = [
                (gradients.get(bin_id, 0) << width) + hessians.get(bin_id, 0)
                for bin_id in range(len(sums))
            ]
            changes = ring.read(encrypt(key, numbers, Workers(1)))
            return honest(key, ring.multiply(sums, changes), layout, workers)

        return pack

    return wrap


# Bins 0 and 1 are of the first column, 2 to 9 of the second.
IMPOSSIBLE = {
    "a little more than the node": (added({2: 1}, {}), NOISE),
    "less than the node": (added({}, {0: -1}), SIDE),
    "gradients that only more rows have": (added({3: 90 * UNIT, 4: -90 * UNIT}, {}), NOISE),
}


@pytest.mark.parametrize(("wrap", "column"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_sums_that_no_rows_have_are_refused(two_splits, monkeypatch, wrap, column):
    monkeypatch.setattr(ciphertexts, "pack_sums", wrap(ciphertexts.pack_sums))
    rule = f"must be sums that rows of the nodes can have, got others of column {column + 1}"
    refuses(f"^party-2.*: EncryptedSums.ciphertexts {rule} in round 1$", two_splits(max_depth=1))
