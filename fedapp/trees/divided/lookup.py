"""Parts of a model whose splits lie at several parties, and the order in which they are summed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.categories import Categories
from fedapp.errors import DataError
from fedapp.trees.forest import model as bagged
from fedapp.trees.forest.model import BaggedForest
from fedapp.trees.model import LEAF, Ensemble, Tree, from_json, in_order
from fedapp.trees.sets import (
    NO_SET,
    NO_SETS,
    CategorySets,
    lefts_by_sets,
    set_numbers,
    sets_of_codes,
)
from fedapp.trees.sides import goes_left
from fedapp.trees.text import kind_of, read_categories, written_categories

FORMAT = 1
DIVIDED = "parts"  # kind of a model.json that says where the parts of a model lie
Ints = npt.NDArray[np.int64]
NO_QUANTILES = np.empty((0, 0), dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """A party's own splits; a record id is the place in the table.

    Parameters
    ----------
    columns : int64, shape (n_records,): the party's own numbers.
    thresholds : float32, shape (n_records,): below goes left.
    defaults : uint8, shape (n_records,): 1 where missing goes left.
    widths : int64, shape (n_records,): categories of the column, 0 where there is a threshold.
    set_bits : uint8: the categories that go right, see ``CategorySets``.
    """

    columns: Ints
    thresholds: npt.NDArray[np.float32]
    defaults: npt.NDArray[np.uint8]
    widths: Ints
    set_bits: npt.NDArray[np.uint8]

    @classmethod
    def of(
        cls,
        columns: Ints,
        thresholds: npt.NDArray[np.float32],
        defaults: npt.NDArray[np.uint8],
        widths: Ints | None = None,
        sets: CategorySets = NO_SETS,
    ) -> Lookup:
        """Of these splits; all have thresholds where no widths are given."""
        known = np.zeros(len(columns), dtype=np.int64) if widths is None else widths
        return cls(columns, thresholds, defaults, known, sets.bits)

    @classmethod
    def empty(cls) -> Lookup:
        """Without a split."""
        return cls.of(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.uint8))

    def plus(self, other: Lookup) -> Lookup:
        """With further splits at the end."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return Lookup(*(np.concatenate(pair) for pair in pairs))

    @property
    def sets(self) -> CategorySets:
        """Of the splits of columns of categories, in their order."""
        return CategorySets(self.set_bits, self.widths[self.widths > 0])

    @property
    def numbers(self) -> Ints:
        """The number of each split's set, ``NO_SET`` where it has a threshold."""
        return set_numbers(self.widths)

    def sides(
        self,
        record: int | Ints,
        values: npt.NDArray[np.float32],
        rows: npt.NDArray[Any] | slice | int = slice(None),
    ) -> npt.NDArray[np.bool_]:
        """Which rows one of the splits sends left, or which of several splits one row.

        Parameters
        ----------
        values : float32, shape (n_rows, n_columns): the party's columns.
        rows : those that are asked for.
        """
        return self._lefts(values[rows, self.columns[record]], record)

    def _lefts(self, values: npt.NDArray[np.float32], record: int | Ints) -> npt.NDArray[np.bool_]:
        """Whether splits send values left, a split a value or one for all."""
        defaults = self.defaults[record].astype(bool)
        found = goes_left(values, self.thresholds[record], defaults)
        if not len(self.set_bits):
            return found
        numbers = np.broadcast_to(self.numbers[record], found.shape)
        by_set = lefts_by_sets(
            values, np.broadcast_to(defaults, found.shape), np.maximum(numbers, 0), self.sets
        )
        return np.where(numbers == NO_SET, found, by_set)

    def n_ways(self, records: Ints, values: npt.NDArray[np.float32]) -> int:
        """How many answers some of the splits can give together, whatever the columns hold; that
        something is missing counts where the table has missing values."""
        ways = 1
        for column in np.unique(self.columns[records]):
            own = records[self.columns[records] == column]
            missing = [np.nan] if np.isnan(values[:, column]).any() else []
            width = int(self.widths[own[0]])
            known = range(width) if width else [-np.inf, *self.thresholds[own]]
            points = np.array([*known, *missing], dtype=np.float32)
            given = np.broadcast_to(points[:, None], (len(points), len(own)))
            ways *= len(np.unique(self._lefts(given, own), axis=0))
        return ways

    def to_json(
        self,
        names: Sequence[str],
        quantiles: npt.NDArray[np.float32] = NO_QUANTILES,
        categories: Categories = (),
    ) -> dict[str, Any]:
        """A document that JSON can hold.

        Parameters
        ----------
        names : of the party's columns.
        quantiles : of their values (``fedapp.site.likeness``), shape (n_columns, n_quantiles).
        categories : of the columns, in the order of their codes.
        """
        told = written_categories(categories, self.sets)
        widths = {"widths": self.widths.tolist()} if told else {}
        return {
            "format": FORMAT,
            "columns": list(names),
            "quantiles": [[_number(value) for value in points] for points in quantiles],
            "records": [
                [int(column), float(threshold), int(default)]
                for column, threshold, default in zip(
                    self.columns, self.thresholds, self.defaults, strict=True
                )
            ],
            **told,
            **widths,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Lookup:
        """Undo ``to_json``."""
        records = document["records"]
        widths = np.array(document.get("widths", [0] * len(records)), dtype=np.int64)
        return cls.of(
            np.array([record[0] for record in records], dtype=np.int64),
            np.array([record[1] for record in records], dtype=np.float32),
            np.array([record[2] for record in records], dtype=np.uint8),
            widths,
            sets_of_codes(document.get("sets", []), widths[widths > 0]),
        )


def categories_of(part: Mapping[str, Any]) -> Categories:
    """Names of the categories of a party's columns, in the order of their codes."""
    return read_categories(part, len(part["columns"]))


def quantiles_of(part: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """Quantiles of a party's columns; without rows where its part has none."""
    rows = part.get("quantiles", [])
    found = [[np.nan if value is None else value for value in row] for row in rows]
    return np.array(found, dtype=np.float32) if found else NO_QUANTILES


def _number(value: np.float32) -> float | None:
    """A number that reads back to the same bits; None for NaN, which JSON has not."""
    return None if np.isnan(value) else float(str(value))


def model_of(part: Mapping[str, Any]) -> Ensemble | BaggedForest:
    """The model in the active party's part; its class says how leaves become predictions.

    Raises
    ------
    DataError : it is of another format.
    """
    text: str = part["model"]
    return bagged.from_json(text) if kind_of(text) == bagged.KIND else from_json(text)


def split_owners(model: Ensemble | BaggedForest, part: Mapping[str, Any]) -> list[list[str]]:
    """Whose each node's split is, by tree; leaves too have a name, which means nothing."""
    names = list(part["n_columns"])
    ends = np.cumsum(list(part["n_columns"].values()))
    return [
        [names[place] for place in np.searchsorted(ends, tree["column"], side="right")]
        for tree in model.trees
    ]


def joint_names(names: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Names of all parties' columns, parties in turn: as they are where that tells whose each is,
    else all with their party, ``bank.balance``: where two parties have a column of one name, or a
    name begins with a party's and a dot.

    Parameters
    ----------
    names : of each party's columns.

    Raises
    ------
    DataError : a column of one party and one of another would have the same name.
    """
    alone = [name for own in names.values() for name in own]
    owned = tuple(f"{party}." for party in names)
    if len(set(alone)) == len(alone) and not any(name.startswith(owned) for name in alone):
        return tuple(alone)
    found = [f"{party}.{name}" for party, own in names.items() for name in own]
    repeated = [name for name, count in Counter(found).items() if count > 1]
    if repeated:
        rule = "columns of all parties must be told apart by party and name, got '{}' twice"
        raise DataError(rule.format(repeated[0]) + ": rename a column or a party")
    return tuple(found)


def joined(
    model: Ensemble,
    records: Sequence[Ints],
    owners: Sequence[Ints],
    lookups: Sequence[Lookup],
    columns: Sequence[str],
    categories: Categories = (),
) -> Ensemble:
    """The model with all thresholds, default sides and sets in it.

    Parameters
    ----------
    model : its splits have no thresholds, and default sides that their owners may have changed.
    records : of each tree, int64, shape (n_nodes,): record id of each split.
    owners : of each tree: number of the party of each split.
    lookups : of each party.
    columns : names of all columns, parties in turn.
    categories : names of the categories of each of them.
    """
    trees: list[Tree] = []
    every = NO_SETS.plus(*(lookup.sets for lookup in lookups))
    firsts = np.cumsum([0, *(len(lookup.sets) for lookup in lookups)])
    numbers = [lookup.numbers for lookup in lookups]
    for tree, record_ids, parties in zip(model.trees, records, owners, strict=True):
        copy = tree.copy()
        for node in np.flatnonzero(tree["left"] != LEAF):
            party, record = parties[node], record_ids[node]
            copy["threshold"][node] = lookups[party].thresholds[record]
            copy["default_left"][node] = lookups[party].defaults[record]
            if numbers[party][record] != NO_SET:
                copy["set"][node] = firsts[party] + numbers[party][record]
        trees.append(copy)
    grown = in_order(trees, every)
    names = tuple(columns)
    return replace(model, columns=names, trees=grown.trees, sets=grown.sets, categories=categories)
