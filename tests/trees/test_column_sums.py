"""Cuts chosen by sums over bins are those chosen by rows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.crypto.packing import integer_layout
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.paillier_keys import generate_key
from fedapp.crypto.sums import SumJob, pack_terms, read_jobs
from fedapp.crypto.workers import Workers
from fedapp.histograms.build import inside_of
from fedapp.trees.forest.cart import Rules, bin_columns, code_columns, fewest_rows
from fedapp.trees.forest.encrypted import NodeTotals, best_cuts, list_columns
from fedapp.trees.forest.label_codes import RowFields, exact_products, exact_weights, number_codes
from fedapp.trees.forest.levels import Rows, bootstrap_counts, columns_of, search_rows

N_ROWS, N_COLUMNS, N_NODES = 90, 5, 4


def made_rows(seed, n_classes, weights):
    """Rows with ties, holes and values close together, of one tree."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 6, (N_ROWS, N_COLUMNS)).astype(np.float32)
    x[:, 1] = 0.5 + rng.choice([0, 1, 2, 5, 6], N_ROWS) * 2.0**-24
    x[:, 2] = 7
    x[rng.random(x.shape) < 0.1] = np.nan
    x[:, 3] = x[:, 0]
    numbers = rng.normal(size=N_ROWS).astype(np.float32)
    targets = number_codes(numbers)[0]
    if n_classes:
        targets = rng.integers(0, n_classes, N_ROWS).astype(np.float64)
    bins = bin_columns(x, 64)
    return Rows(
        code_columns(x, bins), bins, targets, weights(rng), bootstrap_counts(seed, 1, N_ROWS)
    )


WEIGHTS = {
    "none": lambda rng: np.ones(N_ROWS),
    "few": lambda rng: rng.choice([0, 0.5, 1, 2.5], N_ROWS),
    "any": lambda rng: rng.exponential(size=N_ROWS).astype(np.float32).astype(np.float64),
}


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**31),
    st.sampled_from([("gini", 2), ("gini", 3), ("entropy", 3), ("variance", 0)]),
    st.sampled_from(sorted(WEIGHTS)),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.02]),
)
def test_cuts_by_sums_are_those_by_rows(seed, kind, weights, min_leaf, decrease):
    rows = made_rows(seed, kind[1], WEIGHTS[weights])
    rules = Rules(*kind, 4, min_leaf, decrease)
    rng = np.random.default_rng(seed)
    nodes = rng.integers(0, N_NODES, N_ROWS).astype(np.int32)
    wanted, drawn = np.arange(N_NODES, dtype=np.int32), rng.integers(0, 4, N_NODES)
    seeds, trees = rng.integers(0, 2**62, N_COLUMNS), np.zeros(N_NODES, dtype=np.int32)
    by_rows = search_rows(rows, nodes[None], (trees, wanted), seeds, drawn, rules)

    counts = rows.counts[0]
    inside = inside_of(nodes, (counts > 0) & (rows.weights > 0), wanted)
    given = inside, *columns_of(seeds, 0, wanted, drawn), drawn, fewest_rows(4, min_leaf)
    listing, own = list_columns(rows.codes, rows.bins, *given)
    fields = RowFields.of(rows.targets, rows.weights, kind[1])
    sums = np.zeros((len(listing.sizes), fields.numbers.shape[1]))
    np.add.at(sums, own.places, fields.numbers[own.rows] * counts[own.rows, None])
    totals = NodeTotals.of(fields, rows.targets, counts, inside, fewest_rows(4, min_leaf))
    if len(sums):
        np.testing.assert_array_equal(listing.per_column(sums), totals.totals[listing.nodes])
    by_sums = best_cuts(listing, sums, totals, fields.units, rules)

    np.testing.assert_array_equal(by_sums.improvements, by_rows.improvements)
    np.testing.assert_array_equal(by_sums.ranks, by_rows.ranks)
    found = by_sums.listed >= 0
    np.testing.assert_array_equal(found, by_rows.columns >= 0)
    listed = by_sums.listed[found]
    np.testing.assert_array_equal(listing.columns[listed], by_rows.columns[found])
    thresholds = listing.thresholds(listed, by_sums.cuts[found], own.bounds, rows.bins)
    np.testing.assert_array_equal(thresholds, by_rows.thresholds[found])
    np.testing.assert_array_equal(by_sums.defaults[found], by_rows.defaults[found])


def test_a_node_that_no_row_is_in_has_none():
    nodes, wanted = np.array([1, 1, 0], dtype=np.int32), np.array([1, 7], dtype=np.int32)
    rows, starts = inside_of(nodes, np.ones(3, dtype=bool), wanted)
    assert (rows.tolist(), starts.tolist()) == ([0, 1], [0, 2, 2])


@pytest.mark.parametrize("weights", sorted(WEIGHTS))
def test_sums_of_rows_are_exact_in_any_order(weights):
    rng = np.random.default_rng(3)
    codes = number_codes(rng.normal(size=N_ROWS).astype(np.float32))[0]
    given = WEIGHTS[weights](rng)
    exact, fields = exact_weights(given), RowFields.of(codes, given, 0)
    for values in (exact, exact_products(exact, codes)):
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


@pytest.mark.parametrize("n_workers", [1, 2])
def test_encrypted_terms_add_up_part_by_part_as_often_as_they_count(n_workers):
    key = generate_key(256, insecure_small_key=True)
    numbers = np.array([[3, -5], [1, 1000], [7, 0], [2, -999]], dtype=np.float64)
    layout = integer_layout(key.public.bits, 9, 2, 10)
    counts = np.array([1, 2, 0, 3], dtype=np.uint8)
    rows, places = np.array([0, 1, 3, 1], np.int32), np.array([0, 0, 1, 2], np.int32)
    one = SumJob(rows, places, counts, 3)
    jobs = [one, SumJob(rows[:1], places[:1], counts, 1), replace(one, counts=counts + 1)]
    with Workers(n_workers) as workers:
        encrypted = encrypt(key, layout.pack(numbers), workers)
        packed = pack_terms(key.public, encrypted, jobs, layout, workers)
        wanted = [np.array([False, False, True]), np.array([True]), np.zeros(3, dtype=bool)]
        jobs = [(layout, one) for one in wanted]
        found = read_jobs(key, packed, jobs, workers)
        with pytest.raises(ValueError, match="ciphertexts must be 3, got 2"):
            read_jobs(key, packed[:-1], jobs, workers)
    assert layout.n_slots > 3
    assert len(packed) == 3
    np.testing.assert_array_equal(found[0], [[5, 1995], [6, -2997], [2, 2000]])
    np.testing.assert_array_equal(found[1], [[3, -5]])
    assert not found[2].any()  # nobody asked for them
