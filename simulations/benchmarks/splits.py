"""VertiBench's two ways to split columns among parties: by importance and by correlation.

Source: Wu, Hou and He 2024 (arXiv:2307.02040), section 4. Departure: the search for a split of a
given correlation exchanges pairs of columns, from several random starts, instead of a genetic
algorithm; both search for the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Split = tuple[tuple[int, ...], ...]  # columns of each party, ascending
STARTS = 4  # random starts of a search


def importance_split(
    n_columns: int, n_parties: int, alpha: float, rng: np.random.Generator
) -> Split:
    """Split columns by shares from a symmetric Dirichlet distribution; each party has at least one.

    Parameters
    ----------
    n_columns : >= n_parties.
    alpha : > 0; if small, one party has nearly all columns, and with them the important ones.
    """
    first = rng.choice(n_columns, n_parties, replace=False)  # one column for each party
    parties = rng.choice(n_parties, n_columns, p=_shares(alpha, n_parties, rng))
    parties[first] = np.arange(n_parties)
    return _by_party(parties, n_parties)


def _shares(alpha: float, n: int, rng: np.random.Generator) -> Array:
    """Draw Dirichlet shares by their logarithms, which avoids 0 / 0 with a small alpha."""
    logs = np.log(rng.gamma(alpha + 1, size=n)) + np.log(rng.random(n)) / alpha
    shares = np.exp(logs - logs.max())
    normalised: Array = shares / shares.sum()
    return normalised


def _by_party(parties: npt.NDArray[np.int64], n_parties: int) -> Split:
    return tuple(tuple(np.flatnonzero(parties == party).tolist()) for party in range(n_parties))


def rank_correlations(values: npt.NDArray[np.float32]) -> Array:
    """Spearman's correlations of all columns; 0 for a constant one; missing values rank first."""
    filled = np.nan_to_num(values, nan=-np.inf, neginf=-np.inf, posinf=np.inf)
    ranks = np.stack([_ranks(column) for column in filled.T])
    with np.errstate(divide="ignore", invalid="ignore"):
        correlations = np.corrcoef(ranks)
    return np.where(np.isfinite(correlations), correlations, 0.0)


def _ranks(column: npt.NDArray[np.float32]) -> Array:
    """Ranks; equal values share their mean rank."""
    _, groups, counts = np.unique(column, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(counts) - (counts - 1) / 2)[groups]
    return ranks


def partial_correlation(block: Array) -> float:
    """Pcor of two parties, in [0, 1]: how unequal the singular values of their correlations are.

    ``block`` has a row for each column of the first party, and a column for each of the second.
    """
    values = np.linalg.svd(block, compute_uv=False)
    if len(values) < 2:
        return 0.0
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def inter_correlation(correlations: Array, split: Split) -> float:
    """Icor: mean over pairs of parties of Pcor between them, minus the mean Pcor within parties."""
    within = [partial_correlation(correlations[np.ix_(party, party)]) for party in split]
    between = [
        partial_correlation(correlations[np.ix_(one, other)])
        for one, other in combinations(split, 2)
    ]
    return float(np.mean(between) - np.mean(within))


def correlation_split(
    correlations: Array, n_parties: int, beta: float, rng: np.random.Generator
) -> Split:
    """Split columns in equal numbers, with an Icor of ``beta`` between the least and the largest.

    Parameters
    ----------
    correlations : shape (n_columns, n_columns), n_columns >= n_parties.
    beta : in [0, 1]; 0: correlated columns are at one party, 1: spread over all.
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
    correlations: Array, n_parties: int, loss: Callable[[float], float], rng: np.random.Generator
) -> Split:
    optima = [_descend(correlations, n_parties, loss, rng) for _ in range(STARTS)]
    return min(optima, key=lambda optimum: optimum[0])[1]


def _descend(
    correlations: Array, n_parties: int, loss: Callable[[float], float], rng: np.random.Generator
) -> tuple[float, Split]:
    n_columns = len(correlations)
    parties = rng.permutation(np.arange(n_columns) % n_parties)

    def current_loss() -> float:
        return loss(inter_correlation(correlations, _by_party(parties, n_parties)))

    best, is_better = current_loss(), True
    while is_better:
        is_better = False
        for one, other in combinations(range(n_columns), 2):
            if parties[one] == parties[other]:
                continue
            parties[[one, other]] = parties[[other, one]]
            if (new_loss := current_loss()) < best - 1e-12:
                best, is_better = new_loss, True
            else:
                parties[[one, other]] = parties[[other, one]]
    return best, _by_party(parties, n_parties)


def column_order(split: Split) -> tuple[Sequence[int], str]:
    """Columns party by party, and the setting ``columns`` that splits them in this order."""
    order = [column for party in split for column in party]
    return order, "sizes:" + ",".join(str(len(party)) for party in split)
