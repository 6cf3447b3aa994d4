"""Where a party's splits are in the trees: which questions and structures belong to a model."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.trees.divided import Nesting, path_to, way_down
from fedapp.trees.model import LEAF
from fedapp.trees.structure import Structure

N_ROWS = 5


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
    return Model(all_lefts, all_records, rng.random((n_records, N_ROWS)) < 0.5)


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
    nodes = np.zeros((len(model.lefts), N_ROWS), dtype=int)
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
            changed = record, data.draw(st.integers(0, N_ROWS - 1))
            kept = questions[data.draw(st.integers(0, 1)) :]
            is_once = (tree_of(model, record), changed[1]) not in {
                (tree_of(model, one), row) for one, row in kept
            }
            records, rows = np.array([*kept, changed]).T
            if is_once and may_follow(model, *changed, asked):
                way_down(model.nesting, last, N_ROWS, records, rows)
            else:
                with pytest.raises(ValueError, match="rows must be where the answers led them"):
                    way_down(model.nesting, last, N_ROWS, records, rows)
        if not questions:
            return
        records, rows = np.array(questions).T
        slots, last = way_down(model.nesting, last, N_ROWS, records, rows)
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
