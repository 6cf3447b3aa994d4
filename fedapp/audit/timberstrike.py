"""TimberStrike: rows rebuilt from the trees that a party sends.

Source: see ``simulations/README.md``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import coo_array, eye_array, hstack, vstack

from fedapp.arrays import Doubles, Flags, Ints
from fedapp.audit.listening import Trained
from fedapp.data.labels import class_ids
from fedapp.records.document import from_text
from fedapp.runs.tables import stacked_tables
from fedapp.trees.categories import NO_SET, NO_SETS, CategorySets, category_counts, recoded
from fedapp.trees.model import LEAF, Ensemble, Tree
from fedapp.trees.stacked import StackedModel

# timberstrike: the arithmetic

WHOLE = 1e-6  # tolerance: a solver's share may be this far below a whole number of rows


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """Marks of values; a box says which of them a row may have.

    Those of a column of numbers are *a number*, then *missing*; those of one of categories are its
    categories, then *missing*.
    """

    categories: Ints  # (n_columns,): 0 for numbers
    occurring: Flags  # (n_marks,): whether any row has it

    @classmethod
    def of(cls, values: Doubles, categories: Ints) -> Kinds:
        """The marks of a table's values."""
        kinds = cls(categories, np.empty(0, dtype=bool))
        shares = [kinds.shares(column, values[:, column]) for column in range(len(categories))]
        return cls(categories, np.concatenate(shares) > 0)

    @property
    def are_numbers(self) -> bool:
        """Whether all values are numbers, none missing."""
        return not self.categories.any() and not self.occurring[1::2].any()

    @property
    def starts(self) -> Ints:
        """First mark of each column, and the number of all; shape (n_columns + 1,)."""
        ends = np.cumsum(np.maximum(self.categories, 1) + 1)
        return np.concatenate(([0], ends)).astype(np.int64)

    def shares(self, column: int, values: Doubles) -> Doubles:
        """Share of a column's values that have each of its marks."""
        width = int(max(self.categories[column], 1))
        codes = values if self.categories[column] else np.where(np.isnan(values), values, 0.0)
        marks = np.where(np.isnan(codes), width, codes).astype(np.int64)
        return np.bincount(marks, minlength=width + 1) / max(len(marks), 1)

    def drop_empty(self, lows: Doubles, highs: Doubles, marks: Flags) -> None:
        """A value that no number can be is missing, and its range that of any."""
        numbers = np.flatnonzero(self.categories == 0)
        empty = lows >= highs
        marks[:, self.starts[numbers]] &= ~empty[:, numbers]
        lows[empty], highs[empty] = -np.inf, np.inf


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """The leaves of a tree that a row can be in."""

    lows: Doubles  # (n_leaves, n_columns): the boxes, lows <= values < highs
    highs: Doubles
    weights: Doubles  # (n_leaves,): -G / (H + lambda)
    hessians: Doubles  # (n_leaves,): H, or zeros if not disclosed
    steps: Doubles  # (n_leaves,): what a leaf adds to a row's margin
    marks: Flags  # (n_leaves, n_marks): marks that rows in it may have
    kinds: Kinds

    @classmethod
    def of(
        cls,
        tree: Tree,
        kinds: Kinds,
        step: float,
        has_hessians: bool = True,
        sets: CategorySets = NO_SETS,
    ) -> Leaves:
        """Read a tree whose leaf values are ``step`` times the weights."""
        shape, starts = (len(tree), len(kinds.categories)), kinds.starts
        lows, highs = (np.full(shape, end) for end in (-np.inf, np.inf))
        marks = np.tile(kinds.occurring, (len(tree), 1))
        for node in np.flatnonzero(tree["left"] != LEAF):
            left, column, threshold = (tree[name][node] for name in ("left", "column", "threshold"))
            lows[left : left + 2], highs[left : left + 2] = lows[node], highs[node]
            begin, end = starts[column : column + 2]
            marks[left : left + 2] = marks[node]
            marks[left + tree["default_left"][node], end - 1] = False
            if tree["set"][node] != NO_SET:  # its categories go right
                members = sets.members(int(tree["set"][node]))
                right = np.pad(members, (0, int(end - 1 - begin) - len(members)))
                marks[left, begin : end - 1] &= ~right
                marks[left + 1, begin : end - 1] &= right
                continue
            # Where parties merge bins, a split may leave one of the boxes empty.
            highs[left, column] = min(threshold, highs[node, column])
            lows[left + 1, column] = max(threshold, lows[node, column])
        kinds.drop_empty(lows, highs, marks)
        leaves = np.logical_or.reduceat(marks, starts[:-1], axis=1).all(axis=1)
        leaves &= tree["left"] == LEAF
        values = tree["value"][leaves].astype(np.float64)
        hessians = has_hessians * tree["hessian"][leaves].astype(np.float64)
        boxes = lows[leaves], highs[leaves]
        return cls(*boxes, values / step, hessians, values, marks[leaves], kinds)


@dataclass(slots=True, eq=False)
class Rows:
    """What is known of each row."""

    lows: Doubles  # (n_rows, n_columns): the box of each row
    highs: Doubles
    labels: Doubles  # (n_rows,), 0 or 1
    margins: Doubles  # (n_rows,)
    marks: Flags  # (n_rows, n_marks): that it may have

    @classmethod
    def in_first(cls, leaves: Leaves, margin: float, reg_lambda: float, n_rows: int) -> Rows:
        """Rows of a first tree, before which all have one margin; at most ``n_rows`` in a leaf."""
        counts = first_counts(leaves, margin, reg_lambda, n_rows)
        leaf_ids = np.repeat(np.tile(np.arange(len(counts)), 2), counts.T.ravel())
        labels = np.repeat([0.0, 1.0], counts.sum(axis=0))
        margins = margin + leaves.steps[leaf_ids]
        boxes = leaves.lows[leaf_ids], leaves.highs[leaf_ids]
        return cls(*boxes, labels, margins, leaves.marks[leaf_ids])

    def may_be_in(self, leaves: Leaves) -> Flags:
        """Whether the boxes of rows and leaves intersect, shape (n_rows, n_leaves)."""
        intersects = np.ones((len(self.labels), len(leaves.steps)), dtype=bool)
        used = (np.isfinite(leaves.lows) | np.isfinite(leaves.highs)).any(axis=0)
        kinds, starts = leaves.kinds, leaves.kinds.starts
        differ = (leaves.marks != kinds.occurring).any(axis=0)
        used |= np.logical_or.reduceat(differ, starts[:-1])
        for column in np.flatnonzero(used):
            inside = self.lows[:, [column]] < leaves.highs[:, column]
            inside &= leaves.lows[:, column] < self.highs[:, [column]]
            marks = slice(*starts[column : column + 2])
            ours, theirs = self.marks[:, marks], leaves.marks[:, marks]
            if not kinds.categories[column]:
                is_number = inside & ours[:, [0]] & theirs[:, 0]
                inside = is_number | (ours[:, [1]] & theirs[:, 1])
            else:
                inside = ours.astype(np.float32) @ theirs.T.astype(np.float32) > 0
            intersects &= inside
        return intersects

    def deal(self, leaves: Leaves, reg_lambda: float) -> None:
        """Put each row into a leaf of a tree that these rows have grown.

        Its box becomes the intersection of both.
        """
        leaf_ids = dealt(self, leaves, reg_lambda)
        self.lows = np.maximum(self.lows, leaves.lows[leaf_ids])
        self.highs = np.minimum(self.highs, leaves.highs[leaf_ids])
        self.margins = self.margins + leaves.steps[leaf_ids]
        self.marks = self.marks & leaves.marks[leaf_ids]
        leaves.kinds.drop_empty(self.lows, self.highs, self.marks)

    def move(self, leaves: Leaves) -> None:
        """Add the mean step of the leaves open to a row, in a tree that others have grown."""
        shares = self.may_be_in(leaves) * (leaves.hessians if leaves.hessians.any() else 1.0)
        shares = np.maximum(shares, 1e-12 * self.may_be_in(leaves))
        self.margins = self.margins + shares @ leaves.steps / shares.sum(axis=1)


def first_counts(leaves: Leaves, margin: float, reg_lambda: float, n_rows: int) -> Ints:
    """Rows of classes 0 and 1 in each leaf of a first tree, int64, shape (n_leaves, 2).

    Without hessians, the counts are those, of at most ``n_rows`` rows, whose weight is nearest.
    """
    mean = 1 / (1 + np.exp(-margin))
    hessian = mean * (1 - mean)
    if leaves.hessians.any():
        sizes = np.rint(leaves.hessians / hessian)
        sums = -leaves.weights * (leaves.hessians + reg_lambda)
        ones = np.clip(np.rint(sizes * mean - sums), 0, sizes)
    else:
        all_sizes = np.repeat(np.arange(1, n_rows + 1), np.arange(2, n_rows + 2))
        all_ones = np.concatenate([np.arange(size + 1) for size in range(1, n_rows + 1)])
        weights = (all_ones - all_sizes * mean) / (all_sizes * hessian + reg_lambda)
        order = np.argsort(weights, kind="stable")
        after = np.searchsorted(weights[order], leaves.weights).clip(1, len(order) - 1)
        nearer = weights[order[after]] - leaves.weights < leaves.weights - weights[order[after - 1]]
        nearest = order[np.where(nearer, after, after - 1)]
        sizes, ones = all_sizes[nearest].astype(float), all_ones[nearest].astype(float)
    return np.stack([sizes - ones, ones], axis=1).astype(np.int64)


def dealt(rows: Rows, leaves: Leaves, reg_lambda: float) -> Ints:
    """Assign each row to a leaf, such that its sums differ least from those of the leaves.

    Rows of one class and margin that are open to the same leaves are dealt out together.
    """
    open_to = rows.may_be_in(leaves)
    marks = np.column_stack([open_to, rows.labels, rows.margins])
    _, first, group, sizes = np.unique(
        marks, axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    shares = _shares(
        open_to[first], sizes, rows.labels[first], rows.margins[first], leaves, reg_lambda
    )
    whole = np.floor(shares + WHOLE)
    fractions = shares - whole
    leaf_ids = np.empty(len(group), dtype=np.int64)
    for number, size in enumerate(sizes.tolist()):
        counts = whole[number].astype(np.int64)
        # Rounding: the rows that remain go to the leaves with the largest fractions.
        counts[np.argsort(-fractions[number], kind="stable")[: size - counts.sum()]] += 1
        leaf_ids[group == number] = np.repeat(np.arange(len(counts)), counts)
    return leaf_ids


def _shares(
    open_to: Flags,
    sizes: Ints,
    labels: Doubles,
    margins: Doubles,
    leaves: Leaves,
    reg_lambda: float,
) -> Doubles:
    """How many rows of each group are in each leaf, float64, shape (n_groups, n_leaves)."""
    means = 1 / (1 + np.exp(-margins))
    gradients, hessians = means - labels, means * (1 - means)
    groups, leaf_ids = np.nonzero(open_to)
    n_leaves, n_pairs = open_to.shape[1], len(groups)
    if leaves.hessians.any():
        sums = -leaves.weights * (leaves.hessians + reg_lambda)
        equations_of_leaves = [(gradients[groups], sums), (hessians[groups], leaves.hessians)]
    else:  # G + w H = -w lambda
        coefficients = gradients[groups] + leaves.weights[leaf_ids] * hessians[groups]
        equations_of_leaves = [(coefficients, -leaves.weights * reg_lambda)]
    # Unknowns: shares of the pairs (group, leaf), then how far each sum is above and below its
    # target. The linear program minimises these deviations.
    pairs = np.arange(n_pairs)
    of_leaves = vstack(
        [
            coo_array((coefficients, (leaf_ids, pairs)), (n_leaves, n_pairs))
            for coefficients, _ in equations_of_leaves
        ]
    )
    of_groups = coo_array((np.ones(n_pairs), (groups, pairs)), (len(sizes), n_pairs))
    n_sums = of_leaves.shape[0]
    over, none = eye_array(n_sums), coo_array((len(sizes), 2 * n_sums))
    equations = vstack([hstack([of_leaves, over, -over]), hstack([of_groups, none])])
    costs = np.repeat([0.0, 1.0], [n_pairs, 2 * n_sums])
    targets = np.concatenate([*(sums for _, sums in equations_of_leaves), sizes])
    solution = linprog(costs, A_eq=equations.tocsr(), b_eq=targets, method="highs-ds").x
    shares = np.zeros(open_to.shape)
    shares[groups, leaf_ids] = solution[:n_pairs]
    return shares


# timberstrike: the attack

UNSEEN = 1e-6  # share of a mark that no known row has
TOLERANCE = 0.319  # standard deviations; a quarter of the values of a normal column are as near


def drawn(rows: Rows, known_rows: Doubles, rng: np.random.Generator, kinds: Kinds) -> Doubles:
    """Draw a value of each row in each column uniformly from its range, and append its label.

    Categories, and whether a value is missing, are drawn by their shares among the known rows.

    ``known_rows``, shape (n_known, n_columns + 1), give the bounds; the labels are last. Returns
    float64, shape (n_rows, n_columns + 1).
    """
    known_values = known_rows[:, :-1]
    present = ~np.isnan(known_values)
    lowest = known_values.min(axis=0, where=present, initial=np.inf)
    highest = known_values.max(axis=0, where=present, initial=-np.inf)
    lowest, highest = (np.where(present.any(axis=0), ends, 0.0) for ends in (lowest, highest))
    lows = np.where(np.isfinite(rows.lows), rows.lows, np.minimum(lowest, rows.highs))
    highs = np.where(np.isfinite(rows.highs), rows.highs, np.maximum(highest, lows))
    values = rng.uniform(lows, highs)
    for column, (begin, end) in enumerate(pairwise([] if kinds.are_numbers else kinds.starts)):
        shares = kinds.shares(column, known_values[:, column]) + UNSEEN
        weights = np.cumsum(rows.marks[:, begin:end] * shares, axis=1)
        marks = (weights > rng.uniform(0, weights[:, -1])[:, None]).argmax(axis=1)
        if kinds.categories[column]:
            values[:, column] = marks
        values[marks == end - begin - 1, column] = np.nan
    return np.column_stack([values, rows.labels])


def matched(rebuilt: Doubles, truth: Doubles, tolerances: Doubles) -> Doubles:
    """Share of each true row's values that its rebuilt row has within the tolerance.

    Rows, of shape (n_rows, n_columns + 1), are matched one to one so that the mean is largest.
    Excess rebuilt rows are dropped at random; a true row without a match has 0. A missing value is
    right where it is missing.
    """
    rebuilt = np.random.default_rng(0).permutation(rebuilt)[: len(truth)]
    right = np.zeros((len(rebuilt), len(truth)), dtype=np.int64)
    for column, tolerance in enumerate(tolerances):
        right += _near(rebuilt[:, [column]], truth[:, column], tolerance)
    pairs = linear_sum_assignment(right, maximize=True)
    shares = np.zeros(len(truth))
    shares[pairs[1]] = right[pairs] / truth.shape[1]
    return shares


def _near(rebuilt: Doubles, truth: Doubles, tolerances: Doubles | float) -> Flags:
    near: Flags = np.abs(rebuilt - truth) <= tolerances
    return near | (np.isnan(rebuilt) & np.isnan(truth))


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Trees and rows of one attack."""

    trees: Sequence[tuple[Leaves, bool]]  # in order, each with whether the rows have grown it
    margin: float  # of all rows before the first tree
    # (n_rows, n_columns + 1), the labels last: rows that have grown the trees, and as many known
    # to the attacker
    truth: Doubles
    known: Doubles

    def rebuilt(self, reg_lambda: float) -> Rows:
        """Rows rebuilt from the trees; they must have grown the first one."""
        (first, _), *later = self.trees
        rows = Rows.in_first(first, self.margin, reg_lambda, len(self.truth))
        for leaves, is_theirs in later:
            if is_theirs:
                rows.deal(leaves, reg_lambda)
            else:
                rows.move(leaves)
        return rows

    def shares(self, reg_lambda: float, rng: np.random.Generator) -> tuple[Doubles, Doubles]:
        """Shares of each row's values that the attack rebuilds, and that a guess does.

        The attacker knows the bounds of each column, as in the paper, and the rows of each class.
        """
        ends = np.full((len(self.truth), self.truth.shape[1] - 1), np.inf)
        kinds = self.trees[0][0].kinds
        marks = np.tile(kinds.occurring, (len(ends), 1))
        # Without trees, the guess has the same background knowledge.
        starts = np.full(len(ends), self.margin)
        blind = Rows(-ends, ends, self.truth[:, -1], starts, marks)
        rebuilt, guess = (
            matched(drawn(rows, self.known, rng, kinds), self.truth, self.tolerances)
            for rows in (self.rebuilt(reg_lambda), blind)
        )
        return rebuilt, guess

    @property
    def tolerances(self) -> Doubles:
        """How near a value must be in each column, and a label: a category is right or wrong."""
        present, kinds = ~np.isnan(self.truth), self.trees[0][0].kinds
        deviations = self.truth.std(axis=0, where=present | ~present.any(axis=0))
        deviations[:-1][kinds.categories > 0] = 0
        near: Doubles = TOLERANCE * np.nan_to_num(deviations)
        return near

    def finds_planted(self, reg_lambda: float, rng: np.random.Generator) -> bool:
        """Whether the first row is rebuilt, of whom one more first tree shows that it is alone in a
        leaf that is as narrow as the tolerance.
        """
        row, (first, _) = self.truth[0], self.trees[0]
        near = np.maximum(self.tolerances, 1e-6 * (1 + np.abs(np.nan_to_num(row))))
        lows, highs = (np.full((2, len(row) - 1), end) for end in (-np.inf, np.inf))
        lows[0], highs[0] = (np.nan_to_num(row + side * near / 2)[:-1] for side in (-1, 1))
        kinds = first.kinds
        row_marks = [kinds.shares(column, row[[column]]) > 0 for column in range(len(row) - 1)]
        marks = np.stack([np.concatenate(row_marks), kinds.occurring])
        without = np.isnan(row[:-1]) | (kinds.categories > 0)
        lows[0, without], highs[0, without] = -np.inf, np.inf
        mean = 1 / (1 + np.exp(-self.margin))
        labels = np.array([row[-1], self.truth[1:, -1].sum()])
        sizes = np.array([1, len(self.truth) - 1])
        hessians = sizes * mean * (1 - mean)
        weights = (labels - sizes * mean) / (hessians + reg_lambda)
        leaves = Leaves(lows, highs, weights, hessians, np.zeros(2), marks, kinds)
        planted = replace(self, trees=[(leaves, True), *self.trees])
        rebuilt = drawn(planted.rebuilt(reg_lambda), self.known, rng, kinds)
        return bool(_near(rebuilt, row, near).all(axis=1).any())


def target_of(run: Trained, has_hessians: bool) -> Target:
    """Rows and trees of the first party; of PAX, all rows and trees."""
    settings, is_pax = run.settings, run.settings.strategy == "pax"
    table, shares = stacked_tables(settings)
    names, eta, share = sorted(shares), settings.eta, 1.0
    attacked_parties = names if is_pax else names[:1]
    if settings.strategy == "fedxgbllr":
        model = from_text(run.model, StackedModel)
        bare, sets = model.bare, model.sets
        grown = [(tree, True) for tree in model.ensembles[0]]
        eta = float(settings.sections["fedxgbllr"]["eta"])
    else:
        bare = from_text(run.model, Ensemble)
        sets = bare.sets
        grown = [(tree, is_pax or not index % len(names)) for index, tree in enumerate(bare.trees)]
    if settings.strategy == "bagging":
        share = len(shares[names[0]]["train"]) / sum(len(rows["train"]) for rows in shares.values())
    last_grown = [index for index, (_, is_theirs) in enumerate(grown) if is_theirs][-1]
    n_columns = len(bare.columns)
    table = table.in_order(bare.columns)
    values = recoded(table.values, table.categories, bare.categories, bare.columns)[0]
    kinds = Kinds.of(values.astype(np.float64), category_counts(bare.categories, n_columns))
    # The weights are wrong for the trees of other parties, which do not use them.
    trees = [
        (Leaves.of(tree, kinds, eta * share, has_hessians, sets), is_theirs)
        for tree, is_theirs in grown[: last_grown + 1]
    ]
    assert table.labels is not None
    labels = class_ids(table.labels, bare.classes)
    numbers = np.column_stack([values, labels]).astype(np.float64)
    attacked_rows = np.concatenate([shares[name]["train"] for name in attacked_parties])
    held_back = np.concatenate([shares[name]["test"] for name in names])
    known_rows = np.random.default_rng(settings.seed).permutation(held_back)
    known_rows = np.resize(known_rows, len(attacked_rows))  # of too few, some twice
    return Target(trees, float(bare.base_margin[0]), numbers[attacked_rows], numbers[known_rows])
