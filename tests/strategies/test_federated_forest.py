"""Federated Forest: the forest of the joined table, whoever has which columns, with labels in codes
and under Paillier."""

import json
from dataclasses import fields, replace
from functools import wraps

import numpy as np
import pytest
from sklearn.metrics import accuracy_score

from clients.federated_forest import paillier
from clients.federated_forest.paillier import PaillierActive, PaillierPassive
from fedapp.crypto.rings import from_bytes_array, to_bytes_array
from fedapp.data.predictions import read_columns_of
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, PartyError
from fedapp.messages import federated_forest as messages
from fedapp.messages import vertical
from fedapp.messages.vertical import Partition
from fedapp.records.document import to_text
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.trees.forest.cart import RowFields, class_codes, number_codes
from strategies.federated_forest import WARNINGS, FederatedForest
from tests.federated import summary_of
from tests.forests import encrypted_forest, forest_settings, joined, part_of, parts_of, pooled
from tests.letters import ciphertexts, letters_sent, raw_of, texts_of, written
from tests.network import run
from tests.pooled import Pooled
from tests.tables import made_columns, write_rows
from tests.tampering import keep_letters_back, refuses, rewrite_all_letters
from tests.transcript import arrays_of, listen, predicted_rows, scalars_of

BINARY, CLASSES, NUMBERS = "binary:logistic", "multi:softprob", "reg:squarederror"
BLOCK_ROWS = 41  # of a single receiver; does not divide the rows


@pytest.fixture
def made(settings, tmp_path):
    """``made(objective, parties, **more)``: see ``forests.encrypted_forest``."""
    return encrypted_forest(settings, tmp_path)


@pytest.fixture
def small_blocks(monkeypatch):
    """Messages that carry few ciphertexts."""
    monkeypatch.setattr(vertical, "BLOCK_BYTES", BLOCK_ROWS * 64)  # of a key of 256 bits


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
    # Deep trees have small nodes, in which columns of two parties tie.
    weights = np.random.default_rng(7).choice([0.0, 0.5, 1.0, 2.5], 200).astype(np.float32)
    return {**made_columns(objective, n_rows=200), "w": weights}


def with_ties(objective):
    """Columns of both parties that tie, values too close to be cut, and missing values."""
    rng = np.random.default_rng(5)
    tie = rng.integers(0, 3, 120).astype(np.float64)
    step = 2.0**-24  # between neighbours of float32 at 0.5; what is at most 1e-7 apart is not cut
    close = 0.5 + rng.choice([0, 1, 2, 5, 6, 9], 120) * step
    chain = 0.5 + rng.integers(0, 8, 120) * step
    gaps = np.where(rng.random(120) < 0.3, np.nan, 1.0)  # nothing but missing or not
    signal = tie + np.isnan(gaps) + (close > 0.5 + 3 * step) + rng.normal(size=120)
    columns = {"a": tie, "b": gaps, "c": chain, "d": tie, "e": close, "f": gaps}
    return {**columns, "y": (signal > 2).astype(int)}


LIMITS = {"own_min_samples_split": 20, "own_min_samples_leaf": 5, "own_max_features": 0.5}
LIMITS |= {"own_min_impurity_decrease": 0.01, "own_max_depth": 6, "weight": "w"}
DEEP = {"own_max_depth": 5, "own_max_features": "all"}
SAME = {  # columns, if not the usual ones; objective, parties, settings
    "two parties": (None, BINARY, 2, {"own_bootstrap": False}),
    "entropy": (None, CLASSES, 3, {"own_criterion": "entropy", "own_max_features": "all"}),
    "least gains": (None, NUMBERS, 3, {"own_min_impurity_decrease": 0.5, "max_bin": 256}),
    "columns of trees": (None, CLASSES, 2, {"own_max_features_per": "tree"}),
    "weights and limits": (with_weights, CLASSES, 3, LIMITS),
    "weights": (with_weights, BINARY, 3, {"weight": "w", "own_max_depth": 7}),
    "names": (with_categories, NUMBERS, 2, {"own_max_depth": 4}),
    "names of five parties": (with_categories, CLASSES, 5, {"own_max_depth": 4}),
    "ties": (with_ties, BINARY, 2, DEEP),
}


@pytest.mark.parametrize(("columns", "objective", "parties", "more"), SAME.values(), ids=SAME)
def test_the_forest_is_that_of_the_joined_table(made, tmp_path, columns, objective, parties, more):
    """Under encryption the forest, its parts and its scores are those with labels in codes."""
    if columns:
        more = {**more, "data": str(write_rows(tmp_path / "rows.csv", columns(objective)))}
    encrypted = run_local(made(objective, parties, **more))
    encoded = run_local(made(objective, parties, own_labels="encoded", **more))
    assert parts_of(encrypted) == parts_of(encoded)
    replies = [
        [{key: line[key] for key in ("round", "leaves", "train", "valid")} for line in lines]
        for lines in (encrypted.rounds, encoded.rounds)
    ]
    assert replies[0] == replies[1]
    for name in ("metrics", "oob", "importance", "matched_rows", "trees"):
        assert summary_of(encrypted)[name] == summary_of(encoded)[name]
    whole = pooled(made(objective, parties, **more))[0]
    assert to_text(joined(encrypted)) == to_text(whole)
    assert sum(map(len, whole.trees)) > 4 * len(whole.trees)
    assert (len(whole.sets) > 5) == (columns == with_categories)
    if "own_max_features_per" in more:
        used = [{*tree["column"][tree["left"] >= 0].tolist()} for tree in whole.trees]
        assert all(1 <= len(of_tree) <= 2 for of_tree in used)  # the root of 6
        assert len(set().union(*used)) > 2


def test_rows_are_predicted_by_the_names_of_each_partys_categories(forest, settings, tmp_path):
    columns = with_categories("binary:logistic")
    trained = run_local(
        forest(data=str(write_rows(tmp_path / "rows.csv", columns)), own_max_depth=4)
    )
    new = {name: column[:40] for name, column in columns.items()}
    new["b"] = np.array([{"p": "new", "": "p"}.get(name, name) for name in new["b"]])
    path = str(write_rows(tmp_path / "new.csv", new))
    given = {"data": path, "label": "y", "parties": 2, "align": "ordered"}
    model_id = summary_of(trained)["model_id"]
    folder = run_local(settings(strategy="one-round", model=model_id, **given))
    warning = (
        f"{(new['b'] == 'new').sum()} values of 'b' are no category of the model, and count as"
    )
    assert any(warning in text for text in summary_of(folder)["warnings"])
    whole = joined(trained)
    table = read_columns_of(path, whole.columns, Roles(), categories=whole.categories)
    ours = whole.predictions(whole.leaves(table.values))[:, 0]
    found = predicted_rows(folder)[:, -1]
    np.testing.assert_allclose(sorted(found), sorted(ours), atol=1e-6)


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
            fields = json.dumps({k: str(v) for k, v in scalars_of(message).items()})
            assert '"a"' not in fields
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


def test_the_master_keeps_the_model_where_all_parties_agree(forest):
    run = forest("multi:softprob", 3, own_master_keeps_model=True, allow_export=True)
    folder = run_local(run)
    assert (folder.path / "model.json").read_text() == to_text(pooled(run)[0])
    with pytest.raises(PartyError, match="allow-export must be true with"):
        run_local(forest(own_master_keeps_model=True))


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


# Labels under Paillier


def test_a_site_that_wants_its_labels_encrypted_refuses_codes(settings, sites, write_table):
    ids = [f"p{row}" for row in range(60)]
    bank = {"name": "bank", "data": write_table("bank", 60, id=ids), "id": "id"}
    columns = {"a": None, "b": None, "y": None, "c": range(60), "id": ids}
    shop = {"name": "shop", "data": write_table("shop", 60, **columns), "id": "id", "label": ""}
    contexts = sites({**bank, "encrypted-labels": "true"}, shop)
    given = {"strategy": "federated-forest", "parties": 2, "federated_forest__trees": 2}
    small = {"federated_forest__key_bits": 512, "federated_forest__insecure_small_key": True}
    rule = r"^bank \(step \d+\): federated-forest.labels must be paillier where a node config has"
    with pytest.raises(PartyError, match=rule):
        run(settings(**given), contexts)
    hidden = settings(**given, **small, federated_forest__labels="paillier")
    assert summary_of(run(hidden, contexts))["trees"] == 2


@pytest.mark.parametrize(("objective", "parties"), [(BINARY, 2), (CLASSES, 3)])
def test_labels_in_several_messages_make_the_same_forest(
    made, tmp_path, request, objective, parties
):
    data = write_rows(tmp_path / "rows.csv", with_weights(objective))
    given = {"data": str(data), "weight": "w", "own_max_depth": 4}
    whole = run_local(made(objective, parties, **given))
    request.getfixturevalue("small_blocks")
    blocks = run_local(made(objective, parties, **given))
    assert parts_of(blocks) == parts_of(whole)
    n_blocks = -(-summary_of(whole)["matched_rows"]["train"] // (BLOCK_ROWS // (parties - 1)))
    for folder, n_more in ((whole, 0), (blocks, n_blocks - 1)):
        lines = folder.ledger
        for kind in ("encrypt", "take"):  # one is encrypted while another is taken
            steps = {one["step"] for one in lines if one["type"].endswith(f"forest_{kind}")}
            assert len(steps) == n_more


def test_sizes_of_messages_hide_rows_without_weight(made, tmp_path, small_blocks, monkeypatch):
    columns, sizes, send = with_weights(BINARY), [], PaillierActive._next_block
    columns["w"] = np.where(np.arange(len(columns["w"])) % 7, columns["w"], 0)

    def sent(party, letter):
        letters = send(party, letter)
        sizes.append(len(letters[0][1].ciphertexts))
        return letters

    monkeypatch.setattr(PaillierActive, "_next_block", sent)
    data = str(write_rows(tmp_path / "rows.csv", columns))
    run_local(made(BINARY, 2, data=data, weight="w", own_max_depth=2))
    assert len(sizes) > 1 >= max(sizes) - min(sizes)


# What is refused


def false_sums(patch, field, change):
    """Every passive party changes a field of what it has summed."""
    honest = PaillierPassive.sum_columns

    @wraps(honest)
    def changed(party, request):
        letter = honest(party, request)
        given = (party,) if field == "ciphertexts" else ()
        return replace(letter, **{field: change(getattr(letter, field), *given)})

    patch.setattr(PaillierPassive, "sum_columns", changed)


def plus(added):
    """Adds to the plaintext of the first ciphertext; given the bits of a sum."""

    def change(rows, party):
        n, changed = party.encrypted.public_key.n, rows.copy()
        layout = party.encrypted.layouts[0]
        value = int(from_bytes_array(rows[:1])[0]) * (1 + added(layout.slot_bits) * n) % n**2
        changed[0] = to_bytes_array([value], rows.shape[1])[0]
        return changed

    return change


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    "added",
    [
        lambda bits: 1,
        lambda bits: -1,
        lambda bits: 1 << bits,
        lambda bits: (1000 << bits) - 1000,  # from one bin to the next: the sum of both stays
        lambda bits: 1 << 250,
    ],
)
@pytest.mark.parametrize("objective", ["binary:logistic", NUMBERS])
def test_sums_that_rows_cannot_have_stop_the_run_by_the_partys_name(
    made, monkeypatch, objective, added
):
    false_sums(monkeypatch, "ciphertexts", plus(added))
    rule = "must add up to the labels of each node|sums must be|plaintexts must be 0 past"
    refuses(rf"^party-2.*: ColumnSums.ciphertexts .*({rule})", made(objective))


def test_sums_of_more_rows_than_a_bin_has_stop_the_run_by_the_partys_name(made, monkeypatch):
    def moved(sizes):
        return sizes + np.eye(len(sizes), dtype=sizes.dtype)[0] - np.eye(len(sizes))[1].astype("i4")

    false_sums(monkeypatch, "sizes", moved)
    match = "ColumnSums.ciphertexts must be sums that as many rows of the node can have"
    refuses(f"^party-2.*: {match}", made(own_bootstrap=False))


@pytest.mark.parametrize(("parties", "level"), [(2, 0), (3, 2)])  # the first level, and the last
def test_rows_that_go_elsewhere_than_their_sums_stop_the_run_by_the_partys_name(
    made, monkeypatch, parties, level
):
    def elsewhere(sender, letters):
        def changed(letter):
            if sender == "party-1" or not isinstance(letter, Partition) or letter.level != level:
                return letter
            return replace(letter, bits=np.append(~letter.bits[:1], letter.bits[1:]))

        return [(receiver, changed(letter)) for receiver, letter in letters]

    rewrite_all_letters(monkeypatch, elsewhere)
    rule = r"ColumnSums.ciphertexts must be of the rows sent left, those of column \d are not"
    refuses(f"^party-[23].*: {rule}", made(parties=parties))


def test_columns_past_the_last_one_stop_the_run_by_the_partys_name(made, monkeypatch):
    false_sums(monkeypatch, "columns", lambda columns: columns + 5)
    refuses(
        r"^party-2.*: PartKept.gains must be \d columns at least, got 3",
        made(own_max_features="all"),
    )


@pytest.mark.parametrize(
    ("receiver", "letter"),
    [("party-1", "ColumnSums"), ("party-2", "EncryptedLabels"), ("party-2", "MoreLabels")],
)
def test_a_letter_that_the_server_keeps_back_stops_the_run_by_its_senders_name(
    made, monkeypatch, request, receiver, letter
):
    if letter == "MoreLabels":
        request.getfixturevalue("small_blocks")
    kept = {"party-1": messages.SplitRequest, "party-2": messages.SumRequest}[receiver]
    keep_letters_back(monkeypatch, kept, receiver)
    refuses(f"^party-[12].*: {letter}.letter must reach {receiver}", made())


@pytest.mark.parametrize(
    ("block_rows", "match"),
    [
        (BLOCK_ROWS // 2, "^party-1.*: EncryptRequest.step must come once a block of labels, got"),
        (2 * BLOCK_ROWS, r"^party-1.*: MoreLabels.ciphertexts must be \d+, got 72$"),
    ],
)
def test_a_server_that_asks_for_other_blocks_than_there_are_is_refused(
    made, small_blocks, monkeypatch, block_rows, match
):
    monkeypatch.setattr("strategies.vertical.block_rows", lambda *given: block_rows)
    refuses(match, made())


def test_a_server_that_tells_other_splits_than_were_chosen_is_found_out(made, monkeypatch):
    honest = messages.SplitRequest
    monkeypatch.setattr(
        "strategies.federated_forest.SplitRequest",
        lambda **given: honest(**given | {"owners": 1 - given["owners"]}),
    )
    refuses("^party-1.*: SplitRequest.nodes must be the splits that this party has chosen", made())


def test_a_server_that_asks_for_improvements_is_refused(made, monkeypatch):
    monkeypatch.setattr(FederatedForest, "encrypted", False)
    refuses(
        "^party-1.*: LevelRequest.step must not come to the active party with paillier labels",
        made(),
    )
    monkeypatch.setattr(FederatedForest, "encrypted", True)
    match = "^party-2.*: SumRequest.step must not come to a passive party with encoded labels"
    refuses(match, made(own_labels="encoded"))


def test_labels_that_do_not_fit_under_the_key_are_refused(made, tmp_path):
    columns = {**made_columns("multi:softprob", n_rows=200), "y": np.arange(200) % 40}
    data = write_rows(tmp_path / "classes.csv", columns)
    match = r"party-1.*federated-forest.key-bits must be > \d+ for 40 outputs of 9 bits, got 256"
    refuses(match, made("multi:softprob", data=str(data)))


def test_a_small_key_is_refused_without_consent(made):
    match = "federated-forest.key-bits must be >= 2048 without federated-forest.insecure-small-key"
    with pytest.raises(ConfigError, match=match):
        FederatedForest.section_settings(made(own_insecure_small_key=False))


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """Three parties, numbers as labels, weights; in one column each row has a bin of its own: the
    settings of a run, its folder, what each party keeps, the requests and the letters."""
    folder = tmp_path_factory.mktemp("heard")
    rng = np.random.default_rng(2)
    columns = made_columns(NUMBERS, n_rows=160)
    columns["f"], columns["w"] = rng.permutation(160) / 7, rng.exponential(size=160).round(4)
    columns["w"][:10] = 0
    data = write_rows(folder / "unique.csv", columns)

    def settings(**given):
        named = {name.replace("__", ".").replace("_", "-"): one for name, one in given.items()}
        return load_settings({"run-dir": str(folder / "run"), **named})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(folder / "home"))
        given = {"data": str(data), "weight": "w", "max_bin": 256}
        run_settings = encrypted_forest(settings, folder)(NUMBERS, 3, **given)
        done, app = listen(run_settings)
        requests = [raw_of(request) for _, request, _ in app.heard]
        return run_settings, done, parts_of(done), requests, letters_sent(app)


# What crosses the wire


def test_every_ciphertext_on_the_wire_is_fresh(heard):
    settings, folder, _, _, letters = heard
    came, left = ciphertexts(letters, "EncryptedLabels"), ciphertexts(letters, "ColumnSums")
    n_weighted = int((Pooled(settings).weights[Pooled(settings).train] > 0).sum())
    assert len(came) == 2 * n_weighted < 2 * summary_of(folder)["matched_rows"]["train"]
    assert len(left) > len(came)
    sizes = np.concatenate([one["sizes"] for one in letters if one.name == "ColumnSums"])
    assert (sizes == 1).sum() > 100  # such a sum could leave as the very ciphertext that came in
    assert len(set(came + left)) == len(came + left)
    assert min(int.from_bytes(one, "big") for one in came + left) > 1


LETTERS = messages.EncryptedLabels, messages.ColumnSums, messages.Won, messages.PartKept, Partition


def secrets_of_the_labels(run_settings):
    """Labels, their codes, weights and what is encrypted, as they may be written."""
    whole = Pooled(run_settings)
    labels, weights = whole.labels[whole.train], whole.weights[whole.train].astype(np.float64)
    codes = number_codes(labels)[0]
    columns = labels, codes, weights, *RowFields.of(codes, weights, 0).numbers.T
    return set[bytes]().union(*(runs_of(column, 4) for column in columns))


def runs_of(values, n_run):
    """Numbers as they may be written, in runs or as text; not in types that cannot hold them."""
    with np.errstate(invalid="ignore"):
        return written(values, n_run) | texts_of(np.asarray(values).tolist())


def test_a_passive_party_gets_no_label_no_code_and_no_weight(heard):
    settings, _, _, requests, letters = heard
    secrets = secrets_of_the_labels(settings)
    for party in ("party-2", "party-3"):
        mine = [one for one in letters if one.receiver == party]
        assert {one.name for one in mine} <= {
            *("EncryptedLabels", "Won", "Partition"),
            *("CommonRows", "OrderDigest"),
        }
        seen = b"|".join([*(one.raw for one in mine), *requests])
        assert not [secret for secret in secrets if secret in seen]
    for one in letters:
        for kind in (kind for kind in LETTERS if kind.__name__ == one.name):
            names = {*one.content.scalars, *one.content.arrays}
            assert names == {field.name for field in fields(kind)}


def test_the_active_party_sees_no_threshold_and_no_value_of_another(heard):
    *_, parts, _, letters = heard
    mine = [one for one in letters if one.receiver == "party-1"]
    assert {one.name for one in mine} <= {"ColumnSums", "Partition", "PartKept", "OrderDigest"}
    seen = b"|".join(one.raw for one in mine)
    for part in parts[1:]:
        secrets = runs_of(part["lookup"]["thresholds"], 2)
        assert len(secrets) > 4
        assert not [secret for secret in secrets if secret in seen]


def test_a_party_is_told_of_its_own_splits_alone_and_of_no_rows_in_the_last_level(heard):
    *_, parts, _, letters = heard
    for party, part in zip(("party-2", "party-3"), parts[1:], strict=True):
        won = [one for one in letters if one.name == "Won" and one.receiver == party]
        assert {one.sender for one in won} == {"party-1"}
        assert sum(len(one["listed"]) for one in won) == len(part["lookup"]["columns"]) > 0
    # Which rows a party sends left in the last level, only the active party is told.
    partitions = [one for one in letters if one.name == "Partition"]
    assert {one["level"] for one in partitions if one.receiver == "party-1"} == {0, 1, 2}
    assert {one["level"] for one in partitions if one.receiver != "party-1"} == {0, 1}


def improvements_of(patch):
    """Improvements that are compared from now on, as they may be written.

    Those of few binary digits, such as 1/4, are left out: a score may have the same value.
    """
    found, honest = set[bytes](), paillier.winners

    def noted(offers):
        for offer in offers:
            values = (value for value in offer.improvements if value > 0 and value * 2**16 % 1)
            found.update(value.tobytes() for value in values)
        return honest(offers)

    patch.setattr(paillier, "winners", noted)
    patch.setattr("strategies.federated_forest.winners", noted)
    return found


@pytest.mark.each_value_once
@pytest.mark.parametrize("labels", ["paillier", "encoded"])
@pytest.mark.parametrize("parties", [2, 3])
def test_the_server_sees_improvements_of_encoded_labels_alone(made, monkeypatch, labels, parties):
    found = improvements_of(monkeypatch)
    _, app = listen(made(parties=parties, own_labels=labels))
    seen = b"|".join(raw_of(message) for _, *pair in app.heard for message in pair)
    assert len(found) > 20
    assert any(value in seen for value in found) == (labels == "encoded")


@pytest.mark.parametrize("labels", WARNINGS)
def test_the_run_warns_of_what_its_form_of_labels_tells(made, labels):
    first, few = summary_of(run(made(own_labels=labels)))["warnings"]
    assert first == WARNINGS[labels]
    assert "of the rarer class" in few
