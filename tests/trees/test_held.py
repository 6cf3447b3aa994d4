"""What parties tell of sums and splits is held against rows and the model, exactly.

That cuts chosen by sums are those chosen by rows, and that honest owners are not refused, is in
``test_federated_forest_paillier`` and ``test_horizontal_forest`` of ``tests/strategies``.
"""

import math
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.crypto.packing import Layout
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.paillier_keys import generate_key
from fedapp.crypto.sums import SumJob, pack_terms, read_jobs
from fedapp.crypto.workers import Workers
from fedapp.histograms.bins import Cuts
from fedapp.histograms.fixed_point import Bounds
from fedapp.trees.divided import Nesting, path_to, way_down
from fedapp.trees.forest.cart import (
    LOWEST,
    RowFields,
    Rules,
    exact_products,
    exact_weights,
    number_codes,
)
from fedapp.trees.forest.encrypted import Extremes, LeftClaims
from fedapp.trees.forest.summed import (
    CellLayout,
    exponents,
    may_split,
    row_terms,
    search_sums,
    sum_cells,
)
from fedapp.trees.model import LEAF
from fedapp.trees.structure import Structure

N_ROWS = 90
WEIGHTS = {
    "none": lambda rng: np.ones(N_ROWS),
    "few": lambda rng: rng.choice([0, 0.5, 1, 2.5], N_ROWS),
    "any": lambda rng: rng.exponential(size=N_ROWS).astype(np.float32).astype(np.float64),
}


def test_a_row_more_or_less_is_found():
    sizes, sums = np.array([4, 2, 7]), np.array([[3.0, 1], [2, 0], [0, 7]])
    for n_more, moved, due in ((0, 0, None), (1, 0, 1), (-1, 0, 1), (0, 1, 1), (0, -1, 1)):
        place = np.arange(3) == 1
        claims = LeftClaims(np.arange(3), np.zeros(3), sizes + n_more * place, sums)
        lefts = SimpleNamespace(sizes=sizes, totals=sums + moved * place[:, None])
        assert claims.first_false(lefts) == due


@pytest.mark.parametrize("n_fields", [1, 2])  # of an extreme: of classes, or weight and number
def test_a_sum_that_its_number_of_rows_cannot_have_is_found(n_fields):
    """Of two nodes, with bins of columns and of missing values; rows add 1 to 3, or 2 to 4."""
    least, most = (np.repeat([pair], n_fields, axis=0).T for pair in ([1.0, 2.0], [3.0, 4.0]))
    extremes = Extremes(least, most)
    sums = np.array([[3.0, 3.0], [2.0, 2.0], [8.0, 8.0]]) / (2 if n_fields == 1 else 1)
    for sizes, fits in (
        ((2, 1, 2), [True, True, True]),
        ((0, 1, 2), [False, True, True]),
        ((99, 1, 2), [False, True, True]),
        ((2, 1, 1), [True, True, False]),
        ((2, 1, 5), [True, True, False]),
    ):
        layout = {"nodes": np.array([0, 1]), "n_bins": np.array([1, 1]), "missing": [1, 0]}
        listing = SimpleNamespace(**layout, sizes=np.array(sizes))
        assert extremes.fit(listing, sums).tolist() == fits


@pytest.mark.parametrize("weights", WEIGHTS)
def test_sums_of_rows_are_exact_in_any_order(weights):
    rng = np.random.default_rng(3)
    codes = number_codes(rng.normal(size=N_ROWS).astype(np.float32))[0]
    given = WEIGHTS[weights](rng)
    exact, fields = exact_weights(given), RowFields.of(codes, given, 0)
    draws = np.bincount(rng.integers(0, N_ROWS, N_ROWS), minlength=N_ROWS).astype(np.uint8)
    for values in (exact, exact_products(exact, codes)):
        assert (values * draws).sum() == values @ draws.astype(np.float64)
        assert (values * draws).sum() == math.fsum(values * draws)
        orders = [rng.permutation(N_ROWS) for _ in range(20)]
        assert len({float(np.cumsum(values[order])[-1]) for order in orders}) == 1
    np.testing.assert_allclose(exact, given, rtol=2.0**-24)
    np.testing.assert_array_equal(exact > 0, given > 0)
    np.testing.assert_array_equal(fields.numbers, np.round(fields.numbers))
    assert np.abs(fields.numbers).sum(axis=0).max() < 2**53
    assert np.abs(fields.numbers).max() <= 2**fields.bits
    np.testing.assert_array_equal(fields.numbers[:, 0] * fields.units[0], exact)


def test_weights_of_one_take_a_bit_and_what_is_tiny_stays_above_nothing():
    fields = RowFields.of(np.array([0.0, 1.0, 1.0]), np.ones(3), 2)
    np.testing.assert_array_equal(fields.numbers, [[1, 0], [0, 1], [0, 1]])
    assert fields.bits == 0
    assert exact_weights(np.array([1e30, 1e-30]))[1] > 0


def test_sums_of_too_few_ciphertexts_are_not_read():
    key, rows = generate_key(256, insecure_small_key=True), np.zeros(30, np.int32)
    layout = Layout(key.public.bits, 9, 2, 10, in_pairs=False)
    job = SumJob(rows, np.arange(30, dtype=np.int32), np.ones(1, np.uint8), 30)
    with closing(Workers(1)) as workers:
        one = encrypt(key, layout.pack(np.array([[3, -5]])), workers)
        packed = pack_terms(key.public, [one], [job], layout, workers)
        wanted = [(layout, np.ones(30, dtype=bool))]
        np.testing.assert_array_equal(read_jobs(key, packed, wanted, workers)[0], [[3, -5]] * 30)
        rule = f"ciphertexts must be {len(packed)}, got {len(packed) - 1}"
        with pytest.raises(ValueError, match=rule):
            read_jobs(key, packed[:-1], wanted, workers)


# Sums of rows that several hold


def test_a_cut_between_present_and_missing_values_has_the_lowest_threshold():
    codes = np.array([[1, 0, 0], [1, 0, 0], [255, 0, 0]], dtype=np.uint8)
    layout = CellLayout(np.array([[0]], dtype=np.int32), np.array([4, 3, 5]))
    powers = exponents(2, Bounds(3), False)
    terms = row_terms(np.float32([0, 0, 1]), np.ones(3, np.float32), 2, powers)
    once = np.ones((1, 3), np.uint8), np.zeros((1, 3), np.int32)
    root = np.zeros(1, np.int32), np.zeros(1, np.int32)
    sums = sum_cells(codes, 255, layout, terms, *once, root)
    rules = Rules("gini", 2, 2, 1, 0.0)
    edges = np.array([1, 2, 4, 9, 1, 5, 9, 1, 2, 3, 4, 5], dtype=np.float32)
    cuts = Cuts(edges, np.array([0, 4, 7, 12]), np.zeros(3, np.float32), np.array([0, 0, 5]))
    splits = search_sums(sums, layout, cuts, powers, rules, None).splits
    assert (splits.thresholds.tolist(), splits.defaults.tolist()) == ([LOWEST], [1])
    assert splits.sums.tolist() == [[[0, 1, 1], [2, 0, 2]]]
    assert not may_split(splits.sums, rules).any()  # both are pure
    assert may_split(np.array([[1.0, 1, 2]]), rules).all()  # as many rows as a node must have


def test_cells_of_a_party_are_found_among_those_of_all():
    columns = np.array([[1, 0]], dtype=np.int32)
    local, joint = CellLayout(columns, np.array([2, 1])), CellLayout(columns, np.array([3, 2]))
    # Bins 0 and 1 of column 0 are bins 0 and 2 of all; bin 0 of column 1 is its bin 1.
    moved = local.moved(np.arange(local.n_cells), joint, np.array([0, 2, 4]))
    assert moved.tolist() == [1, 2, 3, 5, 6]


# Where a party's splits are in the trees: which questions and structures belong to a model


N_WALKED = 5


@dataclass
class Model:
    """Random trees, of which some splits are the party's; and its sides of some rows."""

    lefts: list[np.ndarray]
    records: list[np.ndarray]  # -1: a leaf, or a split of another party
    sides: np.ndarray  # bool, (n_records, n_rows)

    @property
    def n_records(self):
        return len(self.sides)

    @property
    def nesting(self):
        return Nesting.of(zip(self.lefts, self.records, strict=True), self.n_records)


def made(seed):
    rng = np.random.default_rng(seed)
    all_lefts, all_records, n_records = [], [], 0
    for _ in range(rng.integers(1, 4)):
        lefts, records, depths = [LEAF], [-1], [0]
        node = 0
        while node < len(lefts):
            if depths[node] < 4 and (node == 0 or rng.random() < 0.7):
                lefts[node] = len(lefts)
                lefts += [LEAF, LEAF]
                depths += [depths[node] + 1] * 2
                is_local = rng.random() < 0.6
                records[node] = n_records if is_local else -1
                n_records += is_local
                records += [-1, -1]
            node += 1
        all_lefts.append(np.array(lefts))
        all_records.append(np.array(records))
    return Model(all_lefts, all_records, rng.random((n_records, N_WALKED)) < 0.5)


def may_follow(model, record, row, asked):
    """Whether others' sides exist by which a walk of the row now asks about the record."""
    for tree, records in enumerate(model.records):
        for node in np.flatnonzero(records == record).tolist():
            path = path_to(model.lefts[tree], node)
            way = [(int(records[at]), side) for at, side in path if records[at] >= 0]
            return way == asked.get((tree, row), [])
    raise AssertionError


def tree_of(model, record):
    return next(tree for tree, records in enumerate(model.records) if record in records)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.data())
def test_what_a_walk_asks_is_answered_and_nothing_that_no_walk_could_ask(seed, data):
    model, rng = made(seed), np.random.default_rng(seed)
    nodes = np.zeros((len(model.lefts), N_WALKED), dtype=int)
    asked = {}
    last = None
    for _ in range(10):
        questions = []
        for (tree, row), node in np.ndenumerate(nodes):
            while model.lefts[tree][node] != LEAF and model.records[tree][node] < 0:
                node = model.lefts[tree][node] + int(rng.integers(2))
            nodes[tree, row] = node
            if model.lefts[tree][node] != LEAF:
                questions.append((int(model.records[tree][node]), row))
        if model.n_records:
            # A letter with one question changed, or one more.
            record = data.draw(st.integers(0, model.n_records - 1))
            changed = record, data.draw(st.integers(0, N_WALKED - 1))
            kept = questions[data.draw(st.integers(0, 1)) :]
            is_once = (tree_of(model, record), changed[1]) not in {
                (tree_of(model, one), row) for one, row in kept
            }
            records, rows = np.array([*kept, changed]).T
            if is_once and may_follow(model, *changed, asked):
                way_down(model.nesting, last, N_WALKED, records, rows)
            else:
                with pytest.raises(ValueError, match="rows must be where the answers led them"):
                    way_down(model.nesting, last, N_WALKED, records, rows)
        if not questions:
            return
        records, rows = np.array(questions).T
        slots, last = way_down(model.nesting, last, N_WALKED, records, rows)
        sides = model.sides[records, rows]
        last.ravel()[slots] = 2 * records + sides
        for record, row, side in zip(records.tolist(), rows.tolist(), sides.tolist(), strict=True):
            tree = tree_of(model, record)
            asked.setdefault((tree, row), []).append((record, side))
            node = nodes[tree, row]
            nodes[tree, row] = model.lefts[tree][node] + (not side)


@pytest.mark.parametrize(
    ("nodes", "owners"),
    [([1, 3], [0, 0]), ([1, 1], [0, 0]), ([2, 1], [0, 0]), ([1, 2], [0, 2]), ([1, 2, 2], [0] * 3)],
    ids=["not open", "split twice", "out of order", "of no party", "more than there are"],
)
def test_splits_that_cannot_be_of_a_level_are_refused(nodes, owners):
    zero = np.zeros(1, np.int32)
    structure = Structure.roots(1).split(zero, zero, zero)
    trees = np.zeros(len(nodes), np.int32)
    assert structure.places(trees[:2], np.array([1, 2]), trees[:2], 2).tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"^must be open, in order, and of parties of the run"):
        structure.places(trees, np.array(nodes), np.array(owners), 2)


TREE = np.array([1, 3, 5, LEAF, LEAF, LEAF, LEAF])
TRAINED = Nesting.of([(TREE, np.array([0, 1, 2, *[-1] * 4])), (TREE[:3] * 0 + [1, -1, -1],
                      np.array([3, -1, -1]))], 4)  # fmt: skip


STUMP = np.array([1, LEAF, LEAF])


@pytest.mark.parametrize(
    ("sent", "fits"),
    [
        ([[0, 1, 2], [3]], True),
        ([[3], [0, 1, 2]], True),  # in another order
        ([[0, 1, 2]], True),  # fewer trees, as of a model that was cut at its best round
        ([[0, 2, 1], [3]], False),
        ([[0, 1, -1], [3]], False),
        ([[0], [1], [2], [3]], False),
        ([[1, 0, 2], [3]], False),
        ([[-1, 0, 3]], False),  # of two trees
    ],
)
def test_a_structure_is_of_whole_trained_trees(sent, fits):
    trees = [
        (TREE, np.array([*records, *[-1] * 4])) if len(records) == 3 else
        (STUMP, np.array([*records, -1, -1]))
        for records in sent
    ]  # fmt: skip
    local = np.array([one for records in sent for one in records if one >= 0])
    assert TRAINED.is_of_whole_trees(Nesting.of(trees, 4), local) == fits
