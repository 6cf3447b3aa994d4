"""Ranked rows: their labels, LambdaMART's gradients as in XGBoost 3.2, and NDCG.

A label is ``N_GRADES`` times the number of the row's query, plus its relevance, so it goes wherever
labels go. Its numbers of queries mean nothing outside of the table.

Sources: Burges 2010, "From RankNet to LambdaRank to LambdaMART: An Overview"; pairs and both
normalizations are the defaults of XGBoost 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Floats, Ints
from fedapp.kernels import frozen, inlined, kernel

N_GRADES: Final = 32  # relevances, from 0; as in XGBoost, gains are 2^relevance - 1
MOST_QUERIES: Final = 2**24 // N_GRADES  # up to 2^24 float32 has all whole numbers

# Ranks whose pairs with all lower ones count, and of an NDCG that names none.
N_TOP: Final = 32
_LEAST_HESSIAN: Final = 1e-16


def queries_of(labels: npt.NDArray[Any]) -> Ints:
    """Number of each row's query."""
    return labels.astype(np.int64) // N_GRADES


def grades_of(labels: npt.NDArray[Any]) -> Ints:
    """Relevance of each row."""
    return labels.astype(np.int64) % N_GRADES


def numbered(names: npt.NDArray[np.str_]) -> Ints:
    """Numbers of queries in the order in which they first occur; (n_rows,)."""
    _, firsts, places = np.unique(names, return_index=True, return_inverse=True)
    numbers = np.empty(len(firsts), dtype=np.int64)
    numbers[np.argsort(firsts)] = np.arange(len(firsts))
    return numbers[places]


def join_queries(tables: Iterable[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Labels of several tables as those of one, in which all have queries of their own."""
    labels, n_before = list[npt.NDArray[Any]](), 0
    for of_table in tables:
        labels.append(of_table + N_GRADES * n_before)
        n_before += int(queries_of(of_table).max(initial=-1)) + 1
    return np.concatenate(labels)


def paired_rows(labels: npt.NDArray[Any]) -> tuple[int, int]:
    """How many queries there are, and how many of them have rows of different relevance."""
    codes = np.unique(labels)  # a query occurs once for each relevance
    counts = np.unique(queries_of(codes), return_counts=True)[1]
    return len(counts), int((counts > 1).sum())


def ranking_pairs(
    is_ndcg: bool, margins: Floats, labels: Floats, parameters: object
) -> tuple[Floats, Floats]:
    """Gradients and hessians of margins (n_rows, 1), of the margins' shape."""
    queries, grades = queries_of(labels), grades_of(labels)
    ranks, starts, discounts = _ranked(queries, -margins[:, 0])
    scales = _inverse_ideals(queries, grades, N_TOP)
    arrays = frozen(grades[ranks], margins[ranks, 0], starts, scales, discounts)
    pairs = np.empty((len(ranks), 2), dtype=np.float32)
    pairs[ranks] = _sums_of_pairs(*(*arrays, is_ndcg))
    return pairs[:, :1], pairs[:, 1:]


def query_ndcg(labels: Doubles, scores: Doubles, n_top: int = N_TOP) -> Doubles:
    """NDCG of the first ``n_top`` rows of each query, 1 without relevant rows; (n_queries,)."""
    queries, grades = queries_of(labels), grades_of(labels)
    ranks, starts, discounts = _ranked(queries, -scores)
    scales = _inverse_ideals(queries, grades, n_top)
    reached = _gains(*(*frozen(grades[ranks], starts, scales, discounts), n_top))
    return np.where(scales > 0, reached, 1.0)


def _ranked(queries: Ints, keys: npt.NDArray[Any]) -> tuple[Ints, Ints, Doubles]:
    """Rows by query, then ascending by key, ties in their order; the first place of each query;
    discounts of ranks."""
    ranks = np.lexsort((keys, queries))
    starts = np.append(np.flatnonzero(np.diff(queries[ranks], prepend=-1)), len(ranks))
    return ranks, starts, _discounts(int(np.diff(starts).max(initial=0)).bit_length())


@lru_cache(4)
def _discounts(n_bits: int) -> Doubles:
    return np.array([1.0 / math.log2(rank + 2.0) for rank in range(1 << n_bits)])


def _inverse_ideals(queries: Ints, grades: Ints, n_top: int) -> Doubles:
    """One over the gain of each query in the best order, 0 without relevant rows."""
    ranks, starts, discounts = _ranked(queries, -grades)
    ones = np.ones(len(starts) - 1)
    gains: Doubles = _gains(*(*frozen(grades[ranks], starts, ones, discounts), n_top))
    return np.divide(1.0, gains, out=np.zeros_like(gains), where=gains > 0)


@kernel
def _gain(grade: Any) -> Any:
    return np.float64((1 << grade) - 1)


@kernel
def _gains(grades: Any, starts: Any, scales: Any, discounts: Any, n_top: int) -> Any:
    """Discounted gain of the first ranks of each query, times its scale; ``grades`` are by rank."""
    gains = np.zeros(len(scales))
    for query in range(len(gains)):
        first = starts[query]
        for rank in range(min(starts[query + 1] - first, n_top)):
            gains[query] += discounts[rank] * _gain(grades[first + rank]) * scales[query]
    return gains


@inlined
def _pair(distance: Any, change: Any, is_spread: Any) -> Any:
    """Gradient and hessian of the better row of a pair, by how far its score is above the other.

    ``change`` is that of the metric if both swap their ranks.
    """
    # float32 here, as XGBoost's sigmoid is; all else is float64.
    power = math.exp(min(-distance, np.float32(88.7)))
    share = np.float64(np.float32(1) / (power + np.float32(1)))
    if is_spread:
        change /= np.float64(abs(distance)) + 0.01
    bend = max(share * (1.0 - share), _LEAST_HESSIAN) * change * 2.0
    return np.float32((share - 1.0) * change), np.float32(bend)


@kernel
def _sums_of_pairs(
    grades: Any, scores: Any, starts: Any, scales: Any, discounts: Any, is_ndcg: bool
) -> Any:
    """Gradient and hessian of each row; all arrays are by rank."""
    sums = np.zeros((len(grades), 2), dtype=np.float32)
    for query in range(len(scales)):
        first, end = starts[query], starts[query + 1]
        is_spread = scores[first] != scores[end - 1]
        total = 0.0
        for position in range(first, min(first + N_TOP, end)):
            for other in range(position + 1, end):
                if grades[position] == grades[other]:
                    continue
                high, low = position, other
                change = 1.0
                if grades[position] < grades[other]:
                    high, low = other, position
                if is_ndcg:
                    at_high, at_low = discounts[high - first], discounts[low - first]
                    more, less = _gain(grades[high]), _gain(grades[low])
                    before = more * at_high + less * at_low
                    change = abs((before - (less * at_high + more * at_low)) * scales[query])
                gradient, hessian = _pair(scores[high] - scores[low], change, is_spread)
                sums[high, 0] += gradient
                sums[high, 1] += hessian
                sums[low, 0] -= gradient
                sums[low, 1] += hessian
                total += -2.0 * np.float64(gradient)
        if total > 0:
            factor = np.float32(math.log2(1.0 + total) / total)
            for position in range(first, end):
                sums[position, 0] *= factor
                sums[position, 1] *= factor
    return sums
