"""Keyed hashes of a table's rows, by which a site recognises rows wherever their file is.

Each row has two 64-bit hashes under a secret key of the site's home. Only the site can interpret
them, and they never leave it.

- Its *content*: the names and values of all feature columns, label, weight and base margin. The
  order of rows and columns does not matter, nor does the code of a category: its name is hashed. A
  number is the same as a category of that name, so a column that gets a first text stays the same.
  Of equal rows, the second, third ... have hashes of their own, so that equal rows are counted.
- Its *id*, if the table has an id column.

So a copy, a link and an export with a few more rows are recognised, exactly and row by row; with
ids, also if columns were renamed, added or changed. A copy with other ids (or none) *and* other
columns is not recognised, nor is one whose values were all written in another unit. Tables of few
distinct rows always have some in common.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.scratch import batches, joined
from fedapp.data.table import Table
from fedapp.trees.categories import entries_of

Hashes = npt.NDArray[np.uint64]

WORD_BYTES, DIGEST_BYTES = 8, 16
BLOCK = 2**17  # values hashed at a time, so that they stay in the cache
ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, eq=False)
class RowHashes:
    """Hashes of all rows of a table, each kind sorted and without repetition."""

    contents: Hashes
    ids: Hashes  # empty if the table has no id column
    columns: str  # digest of the columns' names and roles

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.contents)


def hash_rows(table: Table, key: bytes) -> RowHashes:
    """Hash every row of a table under a key of at most 64 bytes."""
    roles = {"label": table.labels, "weight": table.weights, "base-margin": table.base_margins}
    present = {role: values for role, values in roles.items() if values is not None}
    sums = joined(_sums_of_features(table, key), table.n_rows, np.empty(0, np.uint64))
    for role, values in present.items():
        for rows in batches(len(values), values.itemsize):
            sums[rows] += _mixed(_words(values[rows], key) + _number(key, "role", role))
    names = json.dumps([sorted(table.columns), sorted(present)])
    ids = np.empty(0, np.uint64) if table.ids is None else _words_of_texts(table.ids, key)
    columns = hashlib.blake2b(names.encode(), digest_size=DIGEST_BYTES).hexdigest()
    return RowHashes(_distinct(sums), _distinct(ids), columns)


def compare(first: RowHashes, second: RowHashes, with_ids: bool) -> tuple[int, int]:
    """Count the rows that two tables share, and the rows that only one of them has.

    Rows are shared by content, and with `with_ids` also by id if both tables have ids. A changed
    label makes another content, and a new column changes all contents but no id: so the second
    number is the smaller one that is not 0, of contents and ids that are shared at all.
    """
    pairs = [(first.contents, second.contents)]
    if with_ids and len(first.ids) and len(second.ids):
        pairs.append((first.ids, second.ids))
    shared = [n_common(*pair) for pair in pairs]
    differing = [sum(map(len, pair)) - 2 * n for pair, n in zip(pairs, shared, strict=True) if n]
    return max(shared), min(filter(None, differing), default=0)


def n_common(first: Hashes, second: Hashes) -> int:
    """Number of hashes in both arrays; each is sorted and without repetition."""
    if not len(first) or not len(second):
        return 0
    total = 0
    for some in batches(len(first), WORD_BYTES):
        positions = np.minimum(np.searchsorted(second, first[some]), len(second) - 1)
        total += int((second[positions] == first[some]).sum())
    return total


def digest_of(hashes: Hashes) -> str:
    """Digest of an array of hashes; empty if it is empty."""
    blob = hashes.astype("<u8", copy=False).view(np.uint8).data
    return hashlib.blake2b(blob, digest_size=DIGEST_BYTES).hexdigest() if len(blob) else ""


def _sums_of_features(table: Table, key: bytes) -> Iterator[Hashes]:
    """For each block of rows, the sums over columns of the hashes of their values."""
    keys = np.array([_number(key, "column", name) for name in table.columns], dtype=np.uint64)
    entries = enumerate(entries_of(table.categories, len(keys)))
    # Words of a column's categories, by code.
    words_of = {
        column: _words(np.array(names), key, np.float32) for column, names in entries if names
    }
    n_rows = max(1, BLOCK // len(keys))
    for start in range(0, table.n_rows, n_rows):
        values = table.values[start : start + n_rows]
        words = _words(values, key)
        for column, words_by_code in words_of.items():
            has_value = ~np.isnan(values[:, column])
            words[has_value, column] = words_by_code[values[has_value, column].astype(np.int64)]
        yield _mixed(words + keys).sum(axis=1, dtype=np.uint64)


def _words(values: npt.NDArray[Any], key: bytes, precision: type = np.float64) -> Hashes:
    """Each number's float64 bits, missing values and both zeros alike; hashes of other texts."""
    if values.dtype.kind != "U":
        numbers = values.astype(np.float64) + 0.0  # -0.0 becomes 0.0
        numbers[np.isnan(numbers)] = np.nan
        return numbers.view(np.uint64)
    texts, text_ids = np.unique(values, return_inverse=True)
    words = _words_of_texts(texts, key)
    for text_id, text in enumerate(texts.tolist()):
        with suppress(ValueError):
            words[text_id] = _words(np.array([precision(text)]), key)[0]
    return np.asarray(words[text_ids.ravel()])


def _words_of_texts(texts: npt.NDArray[np.str_], key: bytes) -> Hashes:
    """A hash of each text, whatever the longest one's length."""
    letters = np.ascontiguousarray(texts).view(np.uint32).reshape(len(texts), -1)
    words = np.full(len(texts), _number(key, "text", ""), dtype=np.uint64)
    for letter in letters.T:  # 0 beyond the end of a text
        words = np.where(letter != 0, _mixed(words + letter), words)
    return words


def _distinct(hashes: Hashes) -> Hashes:
    """Sort hashes, and give each repetition of a hash another one."""
    hashes = np.sort(hashes)
    repeats = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1
    seconds = np.maximum.accumulate(np.where(np.diff(repeats, prepend=-1) > 1, repeats, 0))
    hashes[repeats] += (repeats - seconds + 1).astype(np.uint64) * np.uint64(ODD)
    for some in batches(len(hashes), WORD_BYTES):
        hashes[some] = _mixed(hashes[some])
    hashes.sort()  # np.unique would make a hash table
    is_first = np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)]
    return np.asarray(hashes[is_first])


def _mixed(words: Hashes) -> Hashes:
    """A bijection of 64-bit words: the finaliser of SplitMix64 (Steele et al. 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(words ^ (words >> np.uint64(31)))


def _number(key: bytes, use: str, name: str) -> np.uint64:
    text = json.dumps([use, name]).encode()
    digest = hashlib.blake2b(text, key=key, digest_size=WORD_BYTES).digest()
    return np.uint64(int.from_bytes(digest, "little"))
