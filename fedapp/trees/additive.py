"""Trees of one column or two, whose sum is a model that one can read column by column.

A node of a tree that splits one column consists of whole bins of it, so its sums follow from those
of the root: ``Marginals`` gives them, and such trees grow from one exchange. ``pair_strengths``
finds the columns that two of these curves do not explain.

Source: Nori et al. 2019 (arXiv:1909.09223), columns in turn with a small learning rate; Lou et al.
2013, "Accurate intelligible models with pairwise interactions", FAST. Departures: the trees of a
round are grown on the same gradients, each with a share of ``eta``, as XGBoost's parallel trees;
and a pair is tried at the first cut of one of its columns only, and all of the other's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Ints
from fedapp.histograms.bins import Cuts
from fedapp.histograms.build import Histogram
from fedapp.trees.categories import CategorySets
from fedapp.trees.structure import Routes, route_rows


class Marginals:
    """Sums of the nodes of trees of one column each, by the bins of its column that are in them.

    Parameters
    ----------
    cuts : layout of the histograms.
    histograms : float64, shape (n_outputs, n_bins, 2): sums at the roots.
    missing : int32, shape (n_outputs, n_columns).
    """

    def __init__(self, cuts: Cuts, histograms: Histogram, missing: npt.NDArray[np.int32]) -> None:
        self._cuts, self._histograms, self._missing = cuts, histograms, missing
        n_outputs, n_columns = missing.shape
        # A row a bin, the last of missing values: a bin goes where its largest value goes.
        self._values = np.full((int(cuts.widths.max(initial=0)) + 1, n_columns), np.nan, np.float32)
        for column, width in enumerate(cuts.widths.tolist()):
            tops = np.nextafter(cuts.column(column), np.float32(-np.inf))
            coded = cuts.by_category[column]
            self._values[:width, column] = np.arange(width) if coded else tops
        # Node of each bin of each tree's column.
        self._nodes = np.zeros((n_columns * n_outputs, len(self._values)), dtype=np.int32)

    def move(self, routes: Routes, sets: CategorySets) -> None:
        """Move bins by the splits of a level."""
        self._nodes = route_rows(self._nodes, routes, self._values, sets)

    def of(self, wanted: npt.NDArray[np.int32]) -> tuple[Histogram, npt.NDArray[np.int32]]:
        """Sums of some nodes, (n_wanted, 2): tree and node; 0 in all columns but the tree's."""
        n_outputs = len(self._missing)
        histograms = np.zeros((len(wanted), *self._histograms.shape[1:]))
        missing = np.zeros((len(wanted), self._missing.shape[1]), dtype=np.int32)
        for row, (tree, node) in enumerate(wanted.tolist()):
            column, output = divmod(tree, n_outputs)
            start, end = self._cuts.offsets[column : column + 2]
            is_in = self._nodes[tree] == node
            sums = self._histograms[output, start:end]
            histograms[row, start:end] = np.where(is_in[: end - start, None], sums, 0.0)
            missing[row, column] = self._missing[output, column] * is_in[-1]
        return histograms, missing


def pair_strengths(
    cuts: Cuts, roots: Histogram, firsts: Histogram, columns: Ints, reg_lambda: float
) -> Doubles:
    """How much four leaves of a pair of columns gain over what both columns gain alone.

    Parameters
    ----------
    roots, firsts : float64, shape (n_nodes, n_bins, 2): sums at roots, and at one child of each.
    columns : (n_nodes,): the column that divides each root.

    Returns
    -------
    Shape (n_columns, n_columns), symmetric: the largest gain over the cuts, summed over outputs.
    """
    strengths = np.zeros((cuts.n_columns, cuts.n_columns))
    for other in range(cuts.n_columns):
        bins = slice(cuts.offsets[other], cuts.offsets[other + 1])
        if cuts.widths[other] < 2:
            continue
        sides = np.stack((firsts[:, bins], roots[:, bins] - firsts[:, bins]))
        lefts = np.cumsum(sides, axis=2)[:, :, :-1]
        whole = sides.sum(axis=2, keepdims=True)
        quarters = _scores(lefts, reg_lambda) + _scores(whole - lefts, reg_lambda)
        left, all_rows = lefts.sum(axis=0), whole.sum(axis=0)
        alone = _scores(left, reg_lambda) + _scores(all_rows - left, reg_lambda)
        alone += _scores(whole, reg_lambda).sum(axis=0) - _scores(all_rows, reg_lambda)
        gains = (quarters.sum(axis=0) - alone).max(axis=1)
        np.add.at(strengths[:, other], columns, np.where(columns == other, 0.0, gains))
    return np.maximum(strengths, strengths.T)


def _scores(sums: Doubles, reg_lambda: float) -> Doubles:
    score: Doubles = sums[..., 0] ** 2 / np.maximum(sums[..., 1] + reg_lambda, 1e-12)
    return score


def strongest(strengths: Doubles, n_pairs: int) -> Ints:
    """The pairs of the largest strengths, (n_pairs, 2), each in the order of its columns."""
    firsts, seconds = np.triu_indices(len(strengths), 1)
    order = np.argsort(-strengths[firsts, seconds], kind="stable")[:n_pairs]
    return np.stack((firsts[order], seconds[order]), axis=1)
