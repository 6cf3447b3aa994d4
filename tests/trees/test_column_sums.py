"""Cuts chosen by sums over bins are those chosen by rows, and what owners of columns claim of them
is checked."""

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
from fedapp.trees.divided import Lookup
from fedapp.trees.forest.cart import Rules, bin_columns, code_columns, fewest_rows
from fedapp.trees.forest.claims import Extremes, LeftClaims
from fedapp.trees.forest.encrypted import NodeTotals, best_cuts, list_columns
from fedapp.trees.forest.label_codes import RowFields, exact_products, exact_weights, number_codes
from fedapp.trees.forest.levels import Rows, bootstrap_counts, columns_of, search_rows
from fedapp.trees.predict import sides_of, slots_of
from fedapp.trees.sets import sets_of_rows

N_ROWS, N_COLUMNS, N_NODES = 90, 5, 4
WEIGHTS = {
    "none": lambda rng: np.ones(N_ROWS),
    "few": lambda rng: rng.choice([0, 0.5, 1, 2.5], N_ROWS),
    "any": lambda rng: rng.exponential(size=N_ROWS).astype(np.float32).astype(np.float64),
}
KINDS = ("gini", 2), ("gini", 3), ("entropy", 3), ("variance", 0)


def made_values(rng):
    """Numbers with ties, holes and values close together."""
    x = rng.integers(0, 6, (N_ROWS, N_COLUMNS)).astype(np.float32)
    x[:, 1] = 0.5 + rng.choice([0, 1, 2, 5, 6], N_ROWS) * 2.0**-24
    x[:, 2] = np.where(rng.random(N_ROWS) < 0.5, np.nan, 7)  # missing or not
    x[rng.random(x.shape) < rng.choice([0, 0.1, 0.5])] = np.nan
    return x


class Level:
    """Nodes of one tree, and sums over the rows of their bins, as the columns' owner claims them;
    the last two columns are of categories, or equal."""

    def __init__(self, seed, kind, weights, min_leaf, decrease=0.0, has_categories=True):
        rng = np.random.default_rng(seed)
        self.values = made_values(rng)
        if not has_categories:
            self.values[:, 3] = self.values[:, 0]
        widths = np.array([0, 0, 0, 6, 6]) * has_categories
        self.bins = bin_columns(self.values, int(rng.choice([4, 64])), widths)
        targets = number_codes(rng.normal(size=N_ROWS).astype(np.float32))[0]
        if kind[1]:
            targets = rng.integers(0, kind[1], N_ROWS).astype(np.float64)
        self.counts, self.targets = bootstrap_counts(seed, 1, N_ROWS), targets
        self.weights = WEIGHTS[weights](rng)
        self.fields = RowFields.of(targets, self.weights, kind[1])
        self.nodes = rng.integers(0, N_NODES, N_ROWS).astype(np.int32)
        self.drawn = rng.integers(int(has_categories), 4, N_NODES)
        self.seeds = rng.integers(0, 2**62, N_COLUMNS)
        self.fewest, self.wanted = fewest_rows(4, min_leaf), np.arange(N_NODES, dtype=np.int32)
        self.rules = Rules(*kind, 4, min_leaf, decrease)
        self.codes = code_columns(self.values, self.bins)
        inside, self.totals = self.inside(self.wanted, self.nodes)
        columns, keys = columns_of(self.seeds, 0, self.wanted, self.drawn)
        given = self.bins, inside, columns, keys, self.drawn, self.fewest
        self.listing, self.local = list_columns(self.codes, *given)
        of_rows, drawn = self.fields.numbers[self.local.rows], self.counts[0][self.local.rows]
        self.sums = np.zeros((len(self.listing.sizes), of_rows.shape[1]))
        np.add.at(self.sums, self.local.places, of_rows * drawn[:, None])
        choose = self.listing, self.sums, self.totals, self.fields.units
        self.choices = best_cuts(*choose, self.rules)
        self.extremes = Extremes.of(self.fields.of_rows(inside[0], self.counts[0]), inside)
        self.won = np.flatnonzero(self.choices.listed >= 0)
        of_splits = np.arange(len(self.won)), self.listing, self.sums, self.choices, self.won
        self.claims = LeftClaims.of(*of_splits)

    def inside(self, wanted, nodes):
        drawn = (self.counts[0] > 0) & (self.fields.weights > 0)
        inside = inside_of(nodes, drawn, wanted.astype(np.int32))
        of_rows = self.fields, self.targets, self.counts[0]
        return inside, NodeTotals.of(*of_rows, inside, self.fewest)

    def lefts(self):
        """Of the rows that the owner of the columns sends left."""
        best = self.local.candidates(self.listing, self.choices, self.bins)
        widths = best.widths[self.won]
        _, sets = sets_of_rows(widths, best.rights[self.won])
        splits = best.columns[self.won], best.thresholds[self.won], best.defaults[self.won]
        lookup = Lookup(*splits, widths, sets.bits)
        tree = np.zeros(len(self.won), np.int32)
        slots, sizes = slots_of(self.nodes[None], tree, self.won.astype(np.int32))
        bits = sides_of(self.values, *splits, slots, sizes, lookup.numbers, lookup.sets)
        children, ends = np.full(N_ROWS, len(self.won)), np.cumsum(sizes)
        for slot, end in enumerate(ends):
            rows = np.flatnonzero(slots[0] == slot)
            children[rows[bits[end - len(rows) : end]]] = slot
        return self.inside(np.arange(len(self.won)), children)[1]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**31),
    st.sampled_from(KINDS),
    st.sampled_from(sorted(WEIGHTS)),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.02]),
)
def test_cuts_by_sums_are_those_by_rows(seed, kind, weights, min_leaf, decrease):
    level = Level(seed, kind, weights, min_leaf, decrease, has_categories=False)
    rows = Rows(level.codes, level.bins, level.targets, level.weights, level.counts)
    nodes = level.nodes[None], (level.wanted * 0, level.wanted)
    by_rows = search_rows(rows, *nodes, level.seeds, level.drawn, level.rules)
    listing, by_sums = level.listing, level.choices
    if len(level.sums):
        expected = level.totals.totals[listing.nodes]
        np.testing.assert_array_equal(listing.per_column(level.sums), expected)
    np.testing.assert_array_equal(by_sums.improvements, by_rows.improvements)
    np.testing.assert_array_equal(by_sums.ranks, by_rows.ranks)
    found = by_sums.listed >= 0
    np.testing.assert_array_equal(found, by_rows.columns >= 0)
    listed = by_sums.listed[found]
    np.testing.assert_array_equal(listing.columns[listed], by_rows.columns[found])
    thresholds = listing.thresholds(listed, by_sums.cuts[found], level.local.bounds, level.bins)
    np.testing.assert_array_equal(thresholds, by_rows.thresholds[found])
    np.testing.assert_array_equal(by_sums.defaults[found], by_rows.defaults[found])


# What owners of columns claim


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**31),
    st.sampled_from(KINDS),
    st.sampled_from(sorted(WEIGHTS)),
    st.integers(1, 6),
)
def test_no_honest_owner_is_refused(seed, kind, weights, min_leaf):
    level = Level(seed, kind, weights, min_leaf)
    assert not len(level.won) or level.claims.first_false(level.lefts()) is None
    assert level.extremes.fit(level.listing, level.sums).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_more_or_less_is_found(kind):
    level = Level(1, kind, "any", 1)
    lefts, claims = level.lefts(), level.claims
    assert len(claims.splits) > 2
    for name in ("sizes", "sums"):
        changed = getattr(claims, name).copy()
        changed[1] += 1
        assert replace(claims, **{name: changed}).first_false(lefts) == 1


@pytest.mark.parametrize("size", [0, 99])
def test_a_sum_that_its_number_of_rows_cannot_have_is_found(size):
    level = Level(2, ("gini", 2), "none", 1)
    sizes = level.listing.sizes.copy()
    # Of rows that are drawn once or more often, none or far more than there are.
    sizes[0] = size
    assert not level.extremes.fit(replace(level.listing, sizes=sizes), level.sums)[0]


# Exact sums


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


def test_encrypted_terms_add_up_part_by_part_as_often_as_they_count():
    key = generate_key(256, insecure_small_key=True)
    numbers = np.array([[3, -5], [1, 1000], [7, 0], [2, -999]], dtype=np.float64)
    layout = integer_layout(key.public.bits, 9, 2, 10)
    counts = np.array([1, 2, 0, 3], dtype=np.uint8)
    rows, places = np.array([0, 1, 3, 1], np.int32), np.array([0, 0, 1, 2], np.int32)
    one = SumJob(rows, places, counts, 3)
    jobs = [one, SumJob(rows[:1], places[:1], counts, 1), replace(one, counts=counts + 1)]
    with Workers(1) as workers:
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
