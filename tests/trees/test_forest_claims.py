"""Sums that honest owners of columns claim are those of the rows that they send left."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.histograms.build import inside_of
from fedapp.trees.divided import Lookup
from fedapp.trees.forest.cart import Rules, bin_columns, code_columns, fewest_rows
from fedapp.trees.forest.claims import Extremes, LeftClaims
from fedapp.trees.forest.encrypted import (
    Listing,
    NodeTotals,
    OwnerColumns,
    best_cuts,
    list_columns,
)
from fedapp.trees.forest.label_codes import RowFields, number_codes
from fedapp.trees.forest.levels import bootstrap_counts, columns_of
from fedapp.trees.predict import sides_of, slots_of
from fedapp.trees.sets import sets_of_rows
from tests.trees.test_column_sums import N_COLUMNS, N_NODES, N_ROWS, WEIGHTS


def made_values(rng):
    """Numbers with ties, holes and values close together; a column of categories."""
    x = rng.integers(0, 6, (N_ROWS, N_COLUMNS)).astype(np.float32)
    x[:, 1] = 0.5 + rng.choice([0, 1, 2, 5, 6], N_ROWS) * 2.0**-24
    x[:, 2] = np.where(rng.random(N_ROWS) < 0.5, np.nan, 7)  # missing or not
    x[rng.random(x.shape) < rng.choice([0, 0.1, 0.5])] = np.nan
    return x, np.array([0, 0, 0, 6, 6])


class Node:
    """Sums over the rows of some nodes, as their owner claims them, and as they are."""

    def __init__(self, seed, kind, weights, min_leaf):
        rng = np.random.default_rng(seed)
        self.values, widths = made_values(rng)
        self.bins = bin_columns(self.values, int(rng.choice([4, 64])), widths)
        targets = number_codes(rng.normal(size=N_ROWS).astype(np.float32))[0]
        if kind[1]:
            targets = rng.integers(0, kind[1], N_ROWS).astype(np.float64)
        self.counts, self.targets = bootstrap_counts(seed, 1, N_ROWS)[0], targets
        self.fields = RowFields.of(targets, WEIGHTS[weights](rng), kind[1])
        self.nodes = rng.integers(0, N_NODES, N_ROWS).astype(np.int32)
        self.fewest = fewest_rows(4, min_leaf)
        inside, totals = self.inside(np.arange(N_NODES))
        self.extremes = Extremes.of(self.fields.of_rows(inside[0], self.counts), inside)
        drawn, seeds = rng.integers(1, 4, N_NODES), rng.integers(0, 2**62, N_COLUMNS)
        columns, keys = columns_of(seeds, 0, np.arange(N_NODES, dtype=np.int32), drawn)
        given = self.bins, inside, columns, keys, drawn, self.fewest
        self.listing: Listing
        self.local: OwnerColumns
        self.listing, self.local = list_columns(code_columns(self.values, self.bins), *given)
        rows, places = self.local.rows, self.local.places
        self.sums = np.zeros((len(self.listing.sizes), self.fields.numbers.shape[1]))
        np.add.at(self.sums, places, self.fields.numbers[rows] * self.counts[rows, None])
        rules = Rules(kind[0], kind[1], 4, min_leaf, 0.0)
        self.choices = best_cuts(self.listing, self.sums, totals, self.fields.units, rules)
        self.won = np.flatnonzero(self.choices.listed >= 0)
        self.claims = LeftClaims.of(
            np.arange(len(self.won)), self.listing, self.sums, self.choices, self.won
        )

    def inside(self, wanted, nodes=None):
        drawn = (self.counts > 0) & (self.fields.weights > 0)
        chosen = self.nodes if nodes is None else nodes
        inside = inside_of(chosen, drawn, wanted.astype(np.int32))
        totals = NodeTotals.of(self.fields, self.targets, self.counts, inside, self.fewest)
        return inside, totals

    def lefts(self):
        """Of the rows that the owner of the columns sends left."""
        best = self.local.candidates(self.listing, self.choices, self.bins)
        widths, bits = best.widths[self.won], best.rights[self.won]
        _, sets = sets_of_rows(widths, bits)
        lookup = Lookup(
            best.columns[self.won],
            best.thresholds[self.won],
            best.defaults[self.won],
            widths,
            sets.bits,
        )
        tree = np.zeros(len(self.won), np.int32)
        slots, sizes = slots_of(self.nodes[None], tree, self.won.astype(np.int32))
        of_splits = lookup.columns, lookup.thresholds, lookup.defaults
        bits = sides_of(self.values, *of_splits, slots, sizes, lookup.numbers, lookup.sets)
        children, ends = np.full(N_ROWS, len(self.won)), np.cumsum(sizes)
        for slot, end in enumerate(ends):
            rows = np.flatnonzero(slots[0] == slot)
            children[rows[bits[end - len(rows) : end]]] = slot
        return self.inside(np.arange(len(self.won)), children)[1]


KINDS = (("gini", 2), ("gini", 3), ("entropy", 3), ("variance", 0))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**31),
    st.sampled_from(KINDS),
    st.sampled_from(sorted(WEIGHTS)),
    st.integers(1, 6),
)
def test_no_honest_owner_is_refused(seed, kind, weights, min_leaf):
    made = Node(seed, kind, weights, min_leaf)
    assert made.claims.first_false(made.lefts()) is None
    assert made.extremes.fit(made.listing, made.sums).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_more_or_less_is_found(kind):
    made = Node(1, kind, "any", 1)
    lefts, claims = made.lefts(), made.claims
    assert len(claims.splits) > 2
    for name in ("sizes", "sums"):
        changed = getattr(claims, name).copy()
        changed[1] += 1
        assert replace(claims, **{name: changed}).first_false(lefts) == 1


def test_a_sum_that_its_number_of_rows_cannot_have_is_found():
    made = Node(2, ("gini", 2), "none", 1)
    for change in (-1, 1):
        sizes = made.listing.sizes.copy()
        # Of rows that are drawn once or more often, none or far more than there are.
        sizes[0] = 0 if change < 0 else 99
        assert not made.extremes.fit(replace(made.listing, sizes=sizes), made.sums)[0]
