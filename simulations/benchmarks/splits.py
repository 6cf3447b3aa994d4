"""VertiBench's two ways to deal columns out to parties: by importance and by correlation.

Source: Wu, Hou and He 2024 (arXiv:2307.02040), section 4. Departure: the search for a split of a
given correlation exchanges columns pair by pair from several beginnings, in place of a genetic
algorithm; both look for the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Split = tuple[tuple[int, ...], ...]  # columns of each party, ascending
STARTS = 4  # beginnings of a search


def importance_split(
    n_columns: int, n_parties: int, alpha: float, rng: np.random.Generator
) -> Split:
    """Columns by shares from a symmetric Dirichlet distribution; each party has one at least.

    Parameters
    ----------
    n_columns : >= n_parties.
    n_parties : >= 2.
    alpha : > 0; small: one party has nearly all columns, and with them what is important.
    """
    first = rng.choice(n_columns, n_parties, replace=False)
    parties = rng.choice(n_parties, n_columns, p=_shares(alpha, n_parties, rng))
    parties[first] = np.arange(n_parties)
    return _by_party(parties, n_parties)


def _shares(alpha: float, n: int, rng: np.random.Generator) -> Array:
    """Of a Dirichlet distribution, by its logarithms, which small alphas do not make 0 / 0."""
    logs = np.log(rng.gamma(alpha + 1, size=n)) + np.log(rng.random(n)) / alpha
    shares = np.exp(logs - logs.max())
    found: Array = shares / shares.sum()
    return found


def _by_party(parties: npt.NDArray[np.int64], n_parties: int) -> Split:
    return tuple(tuple(np.flatnonzero(parties == party).tolist()) for party in range(n_parties))


def rank_correlations(values: npt.NDArray[np.float32]) -> Array:
    """Spearman's correlations of all columns; 0 where a column is constant.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); missing values rank first.
    """
    filled = np.nan_to_num(values, nan=-np.inf, neginf=-np.inf, posinf=np.inf)
    ranks = np.stack([_ranks(column) for column in filled.T])
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.corrcoef(ranks)
    return np.where(np.isfinite(found), found, 0.0)


def _ranks(column: npt.NDArray[np.float32]) -> Array:
    """Places in order; equal values share the mean of theirs."""
    _, groups, counts = np.unique(column, return_inverse=True, return_counts=True)
    found: Array = (np.cumsum(counts) - (counts - 1) / 2)[groups]
    return found


def partial_correlation(block: Array) -> float:
    """Pcor of two parties: how unequal the singular values of their correlations are, in [0, 1].

    Parameters
    ----------
    block : correlations, a row a column of the first party, a column one of the second.
    """
    values = np.linalg.svd(block, compute_uv=False)
    if len(values) < 2:
        return 0.0
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def inter_correlation(correlations: Array, split: Split) -> float:
    """Icor: mean over pairs of parties of Pcor between them less Pcor within the one.

    Parameters
    ----------
    correlations : of all columns, symmetric.
    split : of two parties or more.
    """
    own = [partial_correlation(correlations[np.ix_(party, party)]) for party in split]
    between = [
        partial_correlation(correlations[np.ix_(one, other)])
        for one, other in combinations(split, 2)
    ]
    return float(np.mean(between) - np.mean(own))


def correlation_split(
    correlations: Array, n_parties: int, beta: float, rng: np.random.Generator
) -> Split:
    """Columns in equal numbers, with an Icor of ``beta`` between its smallest and its largest.

    Parameters
    ----------
    correlations : shape (n_columns, n_columns), n_columns >= n_parties.
    n_parties : >= 2.
    beta : in [0, 1]; 0: what is correlated is at one party, 1: spread over all.
    """
    least, most = icor_range(correlations, n_parties, rng)
    target = beta * most + (1 - beta) * least
    return _search(correlations, n_parties, lambda icor: abs(icor - target), rng)


def icor_range(
    correlations: Array, n_parties: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Smallest and largest Icor that the search finds."""
    least = _search(correlations, n_parties, lambda icor: icor, rng)
    most = _search(correlations, n_parties, lambda icor: -icor, rng)
    return inter_correlation(correlations, least), inter_correlation(correlations, most)


def _search(
    correlations: Array,
    n_parties: int,
    loss: Callable[[float], float],
    rng: np.random.Generator,
) -> Split:
    """The split of least loss, of those that no exchange of two columns betters."""
    found = [_descend(correlations, n_parties, loss, rng) for _ in range(STARTS)]
    return min(found, key=lambda one: one[0])[1]


def _descend(
    correlations: Array,
    n_parties: int,
    loss: Callable[[float], float],
    rng: np.random.Generator,
) -> tuple[float, Split]:
    n_columns = len(correlations)
    parties = rng.permutation(np.arange(n_columns) % n_parties)

    def lost() -> float:
        return loss(inter_correlation(correlations, _by_party(parties, n_parties)))

    best, is_better = lost(), True
    while is_better:
        is_better = False
        for one, other in combinations(range(n_columns), 2):
            if parties[one] == parties[other]:
                continue
            parties[[one, other]] = parties[[other, one]]
            if (found := lost()) < best - 1e-12:
                best, is_better = found, True
            else:
                parties[[one, other]] = parties[[other, one]]
    return best, _by_party(parties, n_parties)


def column_order(split: Split) -> tuple[Sequence[int], str]:
    """Columns party by party, and the setting ``columns`` that then deals them out so."""
    order = [column for party in split for column in party]
    return order, "sizes:" + ",".join(str(len(party)) for party in split)
