"""Fed-EINI: the predictions of the interactive way, in one encrypted round."""

import itertools

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from clients import eini as client
from fedapp.commands import cli
from fedapp.crypto.paillier import decrypt, encrypt
from fedapp.crypto.paillier_keys import PrivateKey, PublicKey, generate_key
from fedapp.crypto.sealed import unseal
from fedapp.crypto.sums import select_ciphertexts
from fedapp.crypto.workers import Workers
from fedapp.errors import PartyError
from fedapp.home import home
from fedapp.messages.wire import from_records, parcels_of
from fedapp.runs.local import run_local
from fedapp.site import mail
from fedapp.trees.divided import Lookup, candidates, skeleton
from fedapp.trees.model import check_trees
from tests.deployed import write_csv
from tests.encrypted import KINDS_OF_MODELS, SMALL, encrypted
from tests.federated import summary_of
from tests.strategies.test_interactive import inference, written
from tests.strategies.test_secureboost import CREDIT, DEFAULT, first_rows
from tests.transcript import listen


class Letters:
    """Every letter that a run's sites open, with its receiver."""

    def __init__(self, monkeypatch):
        self.opened = []

        def read(name, *given):
            found = mail.open_mail(name, *given)
            for sender, content in found._letters:
                self.opened.append((sender, name, content))
            return found

        monkeypatch.setattr("fedapp.site.answer.open_mail", read)

    def ciphertexts(self, sender, receiver):
        return [
            row.tobytes()
            for origin, end, content in self.opened
            if (origin, end) == (sender, receiver) and "ciphertexts" in content.arrays
            for row in content.arrays["ciphertexts"]
        ]


# The predictions


FEWER = {"multi:softprob": {"num_boost_round": 2}}  # trees of each class


@pytest.mark.slow
@pytest.mark.by_default("binary:logistic-2-*")
@pytest.mark.each_value_once
@pytest.mark.parametrize("strategy", KINDS_OF_MODELS, indirect=True)
@pytest.mark.parametrize(
    ("objective", "parties"),
    [
        ("binary:logistic", 2),
        ("binary:logistic", 3),
        ("binary:logistic", 4),
        ("multi:softprob", 3),
        ("reg:squarederror", 2),
    ],
)
def test_predictions_are_those_of_the_interactive_way(train, settings, objective, parties):
    trained, _ = train(objective, parties=parties, **FEWER.get(objective, {}))
    plain = inference(settings, trained, align="ordered")
    interactive = written(summary_of(run_local(plain)))
    summary = summary_of(run_local(encrypted(settings, trained, eini__batch_rows=25)))
    np.testing.assert_allclose(written(summary), interactive, rtol=0, atol=1e-9)
    assert summary["batches"] == 3
    # hello, three to align; the first step of all, one more a party and a batch
    assert summary["exchanges"] == 5 + parties + summary["batches"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "strategy", "parties"),
    [
        (CREDIT, "secureboost", 3),
        pytest.param(DEFAULT, "federated-forest", 3, marks=pytest.mark.slow),
        pytest.param(CREDIT, "secureboost", 2, marks=pytest.mark.slow),
        pytest.param(CREDIT, "secureboost", 4, marks=pytest.mark.slow),
        pytest.param(CREDIT, "federated-forest", 3, marks=pytest.mark.slow),
        pytest.param(DEFAULT, "secureboost", 2, marks=pytest.mark.slow),
        pytest.param(DEFAULT, "secureboost", 3, marks=pytest.mark.slow),
        pytest.param(DEFAULT, "secureboost", 4, marks=pytest.mark.slow),
    ],
    indirect=["strategy"],
)
def test_predictions_of_real_rows_are_those_of_the_interactive_way(
    real_data, train, settings, tmp_path, source, parties
):
    name, label, numbers = source
    data = first_rows(real_data / name, 200, tmp_path / "rows.csv", drop=numbers)
    trained, _ = train(data=data, label=label, parties=parties, max_depth=4)
    plain = inference(settings, trained, align="ordered", columns=trained.columns)
    interactive = written(summary_of(run_local(plain)))
    assert len(np.unique(interactive)) > 30
    summary = summary_of(run_local(encrypted(settings, trained)))
    assert summary["entries"] > 10
    np.testing.assert_allclose(written(summary), interactive, rtol=0, atol=1e-9)


def test_a_skeleton_keeps_what_passive_parties_split():
    #        0
    #      1   2        1 is passive, 2 and 0 are the active party's
    #     3 4 5 6
    lefts = np.array([1, 3, 5, -1, -1, -1, -1], dtype=np.int32)
    is_passive = np.array([False, True, False, False, False, False, False])
    found = skeleton(lefts, is_passive)
    assert found.lefts.tolist() == [1, 3, -1, -1, -1]
    assert found.sources.tolist() == [0, 1, 2, 3, 4]
    sides = {1: np.array([True, False])}
    assert candidates(found.lefts, sides, 2).tolist() == [[True, True, False], [True, False, True]]
    own = {0: np.array([True, False])}
    assert candidates(found.lefts, own, 2).tolist() == [[False, True, True], [True, False, False]]


# What crosses the wire


@pytest.mark.slow
def test_no_ciphertext_comes_twice_or_unchanged(train, settings, monkeypatch):
    trained, _ = train(parties=3)
    letters = Letters(monkeypatch)
    run_local(encrypted(settings, trained))
    first = letters.ciphertexts("party-1", "party-2")
    second = letters.ciphertexts("party-2", "party-3")
    sums = letters.ciphertexts("party-3", "party-1")
    every = [*first, *second, *sums]
    assert len(first) == len(second) > 1000
    assert 0 < len(sums) < len(first)
    assert len(set(every)) == len(every)
    assert not any(int.from_bytes(each, "big") in (0, 1) for each in every)


@pytest.mark.slow
def test_the_sum_of_a_row_does_not_repeat_under_the_same_key(train, settings, monkeypatch):
    trained, _ = train()
    real, found = client.Passive._totals, list[tuple[bytes, ...]]()

    def totals_twice(party, letter, key, chosen):
        letters = [real(party, letter, key, chosen) for _ in range(2)]
        found.extend(tuple(map(bytes, each.ciphertexts)) for each in letters)
        return letters[0]

    monkeypatch.setattr(client.Passive, "_totals", totals_twice)
    run_local(encrypted(settings, trained, eini__batch_rows=25))
    assert len(found) == 2 * 3
    every = [sums for letter in found for sums in letter]
    assert len(set(every)) == len(every) > 6


def test_what_is_not_chosen_becomes_a_fresh_zero():
    key, workers = generate_key(256, insecure_small_key=True), Workers(1)
    rows = encrypt(key, [5, 6, 7], workers)
    once, again = (
        select_ciphertexts(key.public, rows, np.array([True, False, True]), workers)
        for _ in range(2)
    )
    assert decrypt(key, once, workers) == [5, 0, 7]
    found = {row.tobytes() for row in np.concatenate((rows, once, again))}
    assert len(found) == 9


@pytest.mark.slow
def test_the_active_party_cannot_open_what_passive_parties_send_each_other(train, settings):
    trained, _ = train(parties=3)
    _, app = listen(encrypted(settings, trained))
    n_tried = 0
    for request, _ in app.of_kind("eini_step"):
        if request.metadata.dst_node_id != 4:  # party-3
            continue
        _, content = from_records(request.content, "party-3")
        for sender, parcel in parcels_of(content):
            address = mail.address_of(app.store("party-3"), sender, "party-3", parcel)
            sealed = parcel[mail.HEAD.size :]
            assert unseal(app.secret("party-3", sender), address, sealed)
            for peer in ("party-2", "party-3") if sender == "party-2" else ():
                n_tried += 1
                with pytest.raises(ValueError, match="parcel must be sealed for this address"):
                    unseal(app.secret("party-1", peer), address, sealed)
    assert n_tried


# The guard


def test_rows_with_few_ways_through_the_trees_are_refused(train, settings):
    trained, _ = train(data="breast-cancer", label="", num_boost_round=4, max_depth=3)
    match = r"rows must have 1e\+06 ways through .*, got 569 of 569 .* eini.unguarded=true predicts"
    with pytest.raises(PartyError, match=match):
        run_local(
            encrypted(
                settings, trained, eini__unguarded=False, eini__least_possibilities=1_000_000.0
            )
        )


def test_trees_of_one_passive_party_are_refused(train, settings):
    trained, _ = train(data="breast-cancer", label="", columns="sizes:1,29", num_boost_round=3)
    match = r"trees must have splits of two parties, got \d with all splits at one"
    with pytest.raises(PartyError, match=match):
        run_local(encrypted(settings, trained, eini__unguarded=False))


@pytest.mark.slow
def test_a_model_of_many_ways_passes_the_guard(train, settings):
    trained, _ = train(data="breast-cancer", label="", num_boost_round=6, max_depth=3)
    guarded = encrypted(settings, trained, eini__unguarded=False, eini__least_possibilities=2.0)
    assert len(written(summary_of(run_local(guarded)))) == 569


@pytest.mark.parametrize(
    ("splits", "missing", "ways"),
    [
        ([(0, 1.0, 0)], False, 2),
        ([(0, 1.0, 0)], True, 2),  # a missing value goes as a large one
        ([(0, 1.0, 0), (0, 1.0, 0)], True, 2),
        ([(0, 1.0, 0), (0, 1.0, 1)], True, 3),
        ([(0, 1.0, 0), (0, 2.0, 0)], True, 3),
        ([(0, 1.0, 1), (0, 2.0, 0)], False, 3),
        ([(0, 1.0, 1), (0, 2.0, 0)], True, 4),
        ([(0, 1.0, 0), (1, 1.0, 0), (1, 5.0, 0)], False, 6),
    ],
)
def test_ways_through_splits_are_the_answers_that_some_values_give(splits, missing, ways):
    columns, thresholds, defaults = map(np.array, zip(*splits, strict=True))
    cuts = columns, thresholds.astype(np.float32), defaults.astype(np.uint8)
    lookup = Lookup(*cuts, np.zeros_like(columns), np.empty(0, np.uint8))  # no categories
    values = np.array([[0, 0], [np.nan if missing else 1, 3]], dtype=np.float32)
    records = np.arange(len(splits))
    assert lookup.n_ways(records, values) == ways
    # By trying values around every threshold.
    tried = [-1.0, 1.0, 1.5, 2.0, 3.0, 5.0, 6.0, *([np.nan] if missing else [])]
    grid = np.array(list(itertools.product(tried, [-1, 1, 3, 5])), dtype=np.float32)
    assert len({tuple(lookup.sides(records, grid, row)) for row in range(len(grid))}) == ways


@pytest.mark.slow
def test_columns_whose_values_have_few_ways_through_their_splits_are_refused(
    train, settings, tmp_path
):
    # One column of 0 and 1 at the passive party: many trees, each with two ways, but the same two.
    rng = np.random.default_rng(3)
    columns = rng.normal(size=(3, 120)).round(2)
    flag = rng.integers(0, 2, 120)
    label = (columns.sum(axis=0) + 2 * flag > 1).astype(int)
    data = write_csv(
        tmp_path / "flag.csv", dict(zip("abcfy", [*columns, flag, label], strict=True))
    )
    trained, _ = train(data=data, columns="sizes:3,1", max_depth=3)
    given = {"eini__unguarded": False, "eini__least_possibilities": 3.0}
    match = r"party-2 .*columns of this party must have 3 ways .*, got fewer; eini.ung"
    with pytest.raises(PartyError, match=match):
        run_local(encrypted(settings, trained, **given))
    given["eini__least_possibilities"] = 2.0
    assert len(written(summary_of(run_local(encrypted(settings, trained, **given))))) == 120


@pytest.mark.parametrize(
    "lefts",
    [
        [1, -1],  # no right child
        [1, 0, -1],  # a child before its parent
        [-1, -1],  # two roots
        [1, 1, -1, -1],  # a node of two parents
        [3, -1, -1, -1, -1],  # nodes of no parent
    ],
)
def test_nodes_that_are_no_tree_are_told_from_a_tree(lefts):
    tree = [1, -1, 3, -1, -1]
    check_trees(np.array([*tree, -1, *tree]), np.array([0, 5, 6, 11]))
    for broken, offsets in (
        (lefts, [0, len(lefts)]),
        ([*tree, *lefts], [0, 5, 5 + len(lefts)]),
        (tree, [0, 4]),
        (tree, [0, 0, 5]),
        (tree, [1, 5]),
        (tree, []),
    ):
        with pytest.raises(ValueError, match=r"^(lefts|trees) must "):
            check_trees(np.array(broken), np.array(offsets, dtype=np.int64))


def test_keys_come_back_from_their_arrays():
    key = generate_key(256, insecure_small_key=True)
    assert PrivateKey.from_array(key.to_array()) == key
    assert PublicKey.from_array(key.public.to_array()) == key.public
    assert key.public.to_array().shape == (32,)


def test_the_command_predicts_under_encryption(train, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained, folder = train()
    small = [
        f"-ceini.{name.replace('_', '-')}={str(value).lower()}" for name, value in SMALL.items()
    ]
    arguments = ["predict", str(folder.path), "--data", trained.data, "--output", "out.parquet"]
    result = CliRunner().invoke(
        cli, [*arguments, "--inference", "eini", "-ceini.unguarded=true", *small]
    )
    assert result.exit_code == 0, result.output
    assert "60 rows written to out.parquet" in result.output
    table = pq.read_table("out.parquet")
    assert table.column_names[0] == "row"
    found = np.column_stack([table[name].to_numpy() for name in table.column_names[1:]])
    (place,) = (home() / "sites" / "party-1").glob("*/predictions.parquet")
    assert pq.read_table(place) == table
    interactive = inference(settings, trained, align="ordered")
    expected = written(summary_of(run_local(interactive)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
