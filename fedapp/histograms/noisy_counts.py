"""Make noised counts of digits consistent, so that ``Descent`` can use them.

Noised counts of empty cells are not 0, some are negative, and the cells of a prefix do not add up
to the prefix's count. Here the weight of a prefix is divided between both halves of its cells in
proportion to their counts, then each half between its halves, down to single cells. A half that is
not clearly above its noise gets nothing; if neither is, both get the same. So cells too light to be
distinguished from noise are treated as one, and cuts always ascend.
"""

from __future__ import annotations

import math

import numpy as np

from fedapp.crypto.fixed_point import Whole

# With 256 empty cells, none passes with a probability of 0.98.
CLEAR = 4.0  # standard deviations


def settle(noised: Whole, masses: Whole | None, deviation: float) -> Whole:
    """Consistent counts for a descent: int64, shape of ``noised``, >= 0, rows add up to the masses.

    Parameters
    ----------
    noised : int64, shape (n_prefixes, n_cells), n_cells a power of two.
    masses : int64, shape (n_prefixes,), >= 0: weight of each prefix; None if unknown.
    deviation : standard deviation of the noise of a cell.
    """
    n_prefixes, n_cells = noised.shape
    if masses is None:
        clear = _clear(noised, deviation).sum(axis=1)
        masses = np.maximum(clear, _clear(noised.sum(axis=1), deviation * math.sqrt(n_cells)))
    consistent: Whole = masses[:, None]
    size = n_cells
    while size > 1:
        size //= 2
        halves = noised.reshape(n_prefixes, n_cells // size // 2, 2, size).sum(axis=-1)
        shares = _clear(halves, deviation * math.sqrt(size)).astype(np.float64)
        shares[~shares.any(axis=-1)] = 1
        lefts = np.floor(consistent * (shares[..., 0] / shares.sum(axis=-1))).astype(np.int64)
        consistent = np.stack((lefts, consistent - lefts), axis=-1).reshape(
            n_prefixes, n_cells // size
        )
    return consistent


def _clear(counts: Whole, deviation: float) -> Whole:
    """The counts, 0 where they may be noise."""
    clear: Whole = np.where(counts > CLEAR * deviation, counts, 0)
    return clear
