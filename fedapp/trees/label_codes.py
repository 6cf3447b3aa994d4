"""Labels in a form that says which splits are best, and as little else as can be.

Which rows share a class is all that Gini and entropy look at, so classes are numbered by their
first row: whatever the classes are called, and in whatever order, the numbers are the same. In the
same way the variance of numbers looks at them up to y -> a + b y alone, so the first row's number
is put at 0, the first other one above it, and the largest distance at a power of two. Every
labelling that leads to the same forest has the same codes: they cannot tell one from the other.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.float64]
MOST_BITS = 40


def class_codes(labels: npt.NDArray[Any]) -> Codes:
    """Class of each row, numbered by the first row of each class; float64, shape (n_rows,)."""
    _, firsts, places = np.unique(labels, return_index=True, return_inverse=True)
    codes: Codes = np.argsort(np.argsort(firsts))[places].astype(np.float64)
    return codes


def number_codes(labels: npt.NDArray[np.float32]) -> tuple[Codes, float]:
    """Whole numbers in place of numbers, up to an affine map that the codes do not tell.

    They are so small that sums over all rows are exact in float64, in whatever order they are
    added: equal splits have equal improvements, and first of equals is the same everywhere.

    Parameters
    ----------
    labels : not all the same.

    Returns
    -------
    codes : float64, shape (n_rows,).
    unit : what a step of 1 is in labels.
    """
    distances = labels.astype(np.float64) - float(labels[0])
    bits = min(MOST_BITS, 52 - math.ceil(math.log2(len(labels))))
    unit = np.abs(distances).max() / 2.0**bits
    sign = np.sign(distances[np.flatnonzero(distances)[0]])
    return np.round(distances * sign / unit), float(unit)
