"""Labels of ranked rows: the query and the relevance of a row, as one whole number.

A label is ``N_GRADES`` times the number of the row's query, plus its relevance, so it goes wherever
labels go. Its numbers of queries mean nothing outside of the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

N_GRADES: Final = 32  # relevances, from 0; as in XGBoost, gains are 2^relevance - 1
MOST_QUERIES: Final = 2**24 // N_GRADES  # up to 2^24 float32 has all whole numbers


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
