"""Sums over rows that several hold, and splits from them, beside a slow, obvious search."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedapp.histograms.bins import Cuts
from fedapp.histograms.fixed_point import Bounds
from fedapp.trees.forest.cart import LOWEST, Rules
from fedapp.trees.forest.summed import (
    CellLayout,
    exponents,
    may_split,
    node_values,
    node_weights,
    row_terms,
    search_sums,
    sum_cells,
)

WIDTHS = np.array([4, 3, 5])  # bins; the last column has categories
EDGES = np.array([1, 2, 4, 9, 1, 5, 9, 1, 2, 3, 4, 5], dtype=np.float32)
CUTS = Cuts(EDGES, np.array([0, 4, 7, 12]), np.zeros(3, np.float32), np.array([0, 0, 5]))
MISSING = 255
COLUMNS = np.array([[0, 1, 2], [2, 0, 1]], dtype=np.int32)
NODES = np.array([0, 0], dtype=np.int32), np.array([1, 2], dtype=np.int32)


@st.composite
def tables(draw):
    """Codes with missing ones, labels, weights, draws and nodes of a few rows."""
    n = draw(st.integers(2, 14))
    n_classes = draw(st.sampled_from([0, 2, 3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    codes = rng.integers(0, WIDTHS, (n, 3)).astype(np.uint8)
    codes[rng.random(codes.shape) < draw(st.sampled_from([0.0, 0.3]))] = MISSING
    labels = rng.integers(0, n_classes or 6, n)
    weights = rng.integers(0, 5, n) / 4 if draw(st.booleans()) else np.ones(n)
    return {
        "codes": codes,
        "labels": labels.astype(np.float32),
        "weights": weights.astype(np.float32),
        "draws": rng.integers(0, 3, (1, n)).astype(np.uint8),
        "nodes": rng.integers(0, 3, (1, n)).astype(np.int32),
        "n_classes": n_classes,
        "criterion": draw(st.sampled_from(["gini", "entropy"])) if n_classes else "variance",
        "fewest": (draw(st.sampled_from([2, 5])), draw(st.sampled_from([1, 2]))),
        "owner": rng.integers(0, 3, n),
    }


def sums_of(table, rows, powers, layout):
    weighted = table["labels"][rows], table["weights"][rows], table["n_classes"], powers
    where = table["draws"][:, rows], table["nodes"][:, rows]
    codes = np.ascontiguousarray(table["codes"][rows])
    return sum_cells(codes, MISSING, layout, row_terms(*weighted), *where, NODES)


def impurity(rows, criterion):
    """Weight times impurity of rows, each a weight and a label."""
    total = sum(weight for weight, _ in rows)
    if not total:
        return 0.0
    if criterion == "variance":
        mean = sum(weight * label for weight, label in rows) / total
        return float(sum(weight * (label - mean) ** 2 for weight, label in rows))
    labels = {label for _, label in rows}
    shares = [sum(weight for weight, label in rows if label == one) / total for one in labels]
    if criterion == "gini":
        return float(total * (1 - sum(share**2 for share in shares)))
    return float(total) * -sum(float(share) * np.log2(float(share)) for share in shares if share)


def sides(table, rows, column):
    """Every set of codes that may go left; missing values are code ``MISSING``.

    No set of categories is better than one of those that cut them in the order of their mean
    labels. Where a leaf needs several rows, none of these may be allowed, or another set be better:
    then they are all that may go left.
    """
    codes, n_classes = table["codes"][rows, column], table["n_classes"]
    present = sorted({*codes.tolist()} - {MISSING})
    if column == 2 and n_classes == 3:  # one category against all others
        lefts = [set(some) for some in combinations(present, 1)]
        lefts += [set(present) - one for one in lefts] + [set(), set(present)]
    elif column == 2 and table["fewest"][1] == 1:
        lefts = [set(c) for n in range(len(present) + 1) for c in combinations(present, n)]
    else:
        if column == 2:
            present.sort(key=lambda code: mean_label(table, rows[codes == code]))
        lefts = [set(present[:n]) for n in range(len(present) + 1)]
    both = [left | extra for left in lefts for extra in (set(), {MISSING})]
    every = {*codes.tolist()}
    return [left for left in both if left & every and every - left]


def terms_of(table, rows):
    """Weight, as often as the row is drawn, and label of each row."""
    weights = [Fraction(float(table["weights"][row])) * int(table["draws"][0, row]) for row in rows]
    return list(zip(weights, table["labels"][rows].astype(int).tolist(), strict=True))


def mean_label(table, rows):
    terms = terms_of(table, rows)
    return sum(weight * label for weight, label in terms) / sum(weight for weight, _ in terms)


def best(table, rows, columns):
    """The largest improvement of all allowed cuts of a node; -inf without any."""
    _, min_leaf = table["fewest"]
    terms = terms_of(table, rows)
    found = -np.inf
    for column in columns:
        codes = table["codes"][rows, column].tolist()
        for left in sides(table, rows, column):
            parts = [
                [term for term, code in zip(terms, codes, strict=True) if (code in left) == side]
                for side in (True, False)
            ]
            if min(map(len, parts)) >= min_leaf:
                after = sum(impurity(part, table["criterion"]) for part in parts)
                found = max(found, impurity(terms, table["criterion"]) - after)
    return found


@examples(max_examples=60, deadline=None)
@given(tables())
def test_splits_from_sums_are_the_best_of_all(table):
    n_classes, n = table["n_classes"], len(table["labels"])
    bounds, weighted = Bounds(4 * n, 2, 3), bool((table["weights"] != 1).any())
    powers, layout = exponents(n_classes, bounds, weighted), CellLayout(COLUMNS, WIDTHS)
    rules = Rules(table["criterion"], n_classes, *table["fewest"], 0.0)
    whole = sums_of(table, np.arange(n), powers, layout)
    parts = [
        sums_of(table, np.flatnonzero(table["owner"] == one), powers, layout) for one in range(3)
    ]
    assert (sum(parts) == whole).all()
    result = search_sums(whole, layout, CUTS, powers, rules, whole[:2])
    is_in = (table["draws"][0] > 0) & (table["weights"] > 0)
    for place, node in enumerate(NODES[1]):
        rows = np.flatnonzero(is_in & (table["nodes"][0] == node))
        assert result.totals[place, -1] == len(rows)
        is_pure = len({*table["labels"][rows].tolist()}) < 2
        large = len(rows) >= max(table["fewest"][0], 2 * table["fewest"][1])
        expected = best(table, rows, COLUMNS[place]) if large and not is_pure else -np.inf
        splits = np.flatnonzero(result.splits.nodes == place)
        if not len(splits):
            assert expected <= (1e-9 if n_classes == 0 else -np.inf)
            continue
        (split,) = splits
        assert result.splits.improvements[split] == pytest.approx(expected, abs=1e-9)
        check_children(table, rows, result.splits, int(split), powers)


def check_children(table, rows, splits, split, powers):
    """The split sends rows where it says, and its sums are of those."""
    column = int(splits.columns[split])
    codes = table["codes"][rows, column]
    is_missing = codes == MISSING
    if column == 2:
        is_right = splits.rights[split][np.where(is_missing, 0, codes)]
    else:  # a bin goes as its lower edge does
        first = CUTS.offsets[column]
        lowers = np.append(np.float32(0), EDGES)[np.where(is_missing, 0, first + codes)]
        lowers[codes == 0] = 0
        is_right = lowers >= splits.thresholds[split]
    is_right = np.where(is_missing, splits.defaults[split] == 0, is_right)
    assert 0 < is_right.sum() < len(rows)
    for side in (0, 1):
        inside = rows[is_right == side]
        weights = table["weights"][inside].astype(np.float64) * table["draws"][0, inside]
        sums = splits.sums[split, side]
        assert sums[-1] == len(inside)
        n_classes = table["n_classes"]
        assert node_weights(sums, powers, n_classes) == weights.sum()
        labels = table["labels"][inside].astype(np.float64)
        value = node_values(sums, powers, n_classes, 1)
        truth = (labels == n_classes - 1) if n_classes else labels
        assert value[0] == pytest.approx(weights @ truth / weights.sum())


def test_a_cut_between_present_and_missing_values_has_the_lowest_threshold():
    codes = np.array([[1, 0, 0], [1, 0, 0], [MISSING, 0, 0]], dtype=np.uint8)
    layout = CellLayout(np.array([[0]], dtype=np.int32), WIDTHS)
    powers = exponents(2, Bounds(3), False)
    terms = row_terms(np.float32([0, 0, 1]), np.ones(3, np.float32), 2, powers)
    once = np.ones((1, 3), np.uint8), np.zeros((1, 3), np.int32)
    root = np.zeros(1, np.int32), np.zeros(1, np.int32)
    sums = sum_cells(codes, MISSING, layout, terms, *once, root)
    rules = Rules("gini", 2, 2, 1, 0.0)
    splits = search_sums(sums, layout, CUTS, powers, rules, None).splits
    assert (splits.thresholds.tolist(), splits.defaults.tolist()) == ([LOWEST], [1])
    assert splits.sums.tolist() == [[[0, 1, 1], [2, 0, 2]]]
    assert not may_split(splits.sums, rules).any()  # both are pure


def test_cells_of_a_party_are_found_among_those_of_all():
    columns = np.array([[1, 0]], dtype=np.int32)
    local, joint = CellLayout(columns, np.array([2, 1])), CellLayout(columns, np.array([3, 2]))
    # Bins 0 and 1 of column 0 are bins 0 and 2 of all; bin 0 of column 1 is its bin 1.
    moved = local.moved(np.arange(local.n_cells), joint, np.array([0, 2, 4]))
    assert moved.tolist() == [1, 2, 3, 5, 6]
