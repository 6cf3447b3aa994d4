"""Names of categories in a message: for each column in turn, how many names and which.

Reveals: see ``hello``, in which a party sends the names that it has, and ``labels``, in which all
parties receive the names of all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from fedapp.errors import as_protocol_error
from fedapp.messages.fields import Array, Form, Range
from fedapp.trees.sets import MOST_CATEGORIES, Categories

NUMBERS = -1  # in place of a number of categories
MOST_NAMES = 2**20  # of all columns together
MOST_LETTERS = 2**24  # of all names together

Counts = Annotated[Array, Form("int32", "n_coded_columns", low=NUMBERS, high=MOST_CATEGORIES)]
"""Categories of each column, -1 for numbers, 0 where no row has a value; empty: all numbers."""
Names = Annotated[tuple[str, ...], Range(0, MOST_NAMES)]
Kinds = Annotated[tuple[str, ...], Range(0, 10**6)]
"""Of each column, by the words of a schema; "" where no row has a value; empty: all numbers."""


@dataclass(frozen=True, eq=False)
class JointCoding:
    """Part of a message: the meaning of codes of labels and categories at all parties."""

    __slots__ = ()  # its fields are slots of the message, which may have another base with slots

    classes: Annotated[tuple[str, ...], Range(0, 1000)]  # of all parties, in the order of their ids
    category_counts: Counts
    categories: Names  # of all parties, in the order of their codes


def pack_categories(categories: Categories) -> dict[str, Any]:
    """Message fields of the names; an entry without names is a column without values."""
    counts = [NUMBERS if names is None else len(names) for names in categories]
    all_names = tuple(name for names in categories for name in names or ())
    _check_sizes(counts, all_names)
    return {"category_counts": np.array(counts, dtype=np.int32), "categories": all_names}


def unpack_categories(counts: Array, names: Sequence[str], n_columns: int) -> Categories:
    """Inverse of ``pack_categories``; names must be distinct in a column."""
    sizes = np.maximum(counts, 0).tolist()
    if len(counts) not in (0, n_columns):
        raise ValueError(f"category_counts must be one a column of {n_columns}, got {len(counts)}")
    if sum(sizes) != len(names):
        raise ValueError(f"categories must be {sum(sizes)}, got {len(names)}")
    _check_sizes(sizes, names)
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    categories = tuple(
        None if count == NUMBERS else tuple(names[end - size : end])
        for count, size, end in zip(counts.tolist(), sizes, ends, strict=True)
    )
    if any(len(set(column)) < len(column) for column in categories if column):
        raise ValueError("categories must be distinct in a column")
    return categories


def dictionary_digest(names: Sequence[str]) -> str:
    """Digest of the names of one column in their order; 64 hex digits.

    It has no key, so that parties can compare theirs: anyone who guesses the names can confirm
    them.
    """
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()


def read_categories(party: str, message: Any, n_columns: int) -> Categories:
    """``unpack_categories`` of a message's fields; a ProtocolError names the party."""
    with as_protocol_error(party, type(message).__name__, "categories"):
        return unpack_categories(message.category_counts, message.categories, n_columns)


def _check_sizes(counts: Sequence[int], names: Sequence[str]) -> None:
    if max(counts, default=0) > MOST_CATEGORIES:
        raise ValueError(f"categories must be {MOST_CATEGORIES:,} a column at most")
    if len(names) > MOST_NAMES or sum(map(len, names)) > MOST_LETTERS:
        rule = f"{MOST_NAMES:,} names of {MOST_LETTERS:,} letters together at most"
        raise ValueError(f"categories must be {rule}, got {len(names):,}")
