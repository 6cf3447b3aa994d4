"""Parts of a model whose splits lie at several parties, and the order in which they are summed."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedapp.errors import DataError
from fedapp.home import PRIVATE, write_whole
from fedapp.trees import bagged
from fedapp.trees.bagged import BaggedForest
from fedapp.trees.model import LEAF, Ensemble, Tree, from_json, kind_of
from fedapp.trees.partition import goes_left

FORMAT = 1
SALT_BYTES = 32
PART = "part.json"
PARTS = "parts"  # kind of a model.json that says where the parts of a model lie
Ints = npt.NDArray[np.int64]
NO_QUANTILES = np.empty((0, 0), dtype=np.float32)


class Arrays(Protocol):
    """Where arrays are kept by name."""

    def __getitem__(self, name: str, /) -> npt.NDArray[Any]: ...
    def __setitem__(self, name: str, array: npt.NDArray[Any], /) -> None: ...


class Group(Protocol):
    """How many trees' gradients travel in one ciphertext."""

    @property
    def n_outputs(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """A party's own splits; a record id is the place in the table.

    Parameters
    ----------
    columns : int64, shape (n_records,): the party's own numbers.
    thresholds : float32, shape (n_records,): below goes left.
    defaults : uint8, shape (n_records,): 1 where missing goes left.
    """

    columns: Ints
    thresholds: npt.NDArray[np.float32]
    defaults: npt.NDArray[np.uint8]

    @classmethod
    def empty(cls) -> Lookup:
        """Without a split."""
        return cls(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.uint8))

    @classmethod
    def kept(cls, store: Arrays) -> Lookup:
        """As ``keep`` left it."""
        return cls(*(store[f"lookup.{name}"] for name in cls.__slots__))

    def keep(self, store: Arrays) -> None:
        """Keep it among other arrays."""
        for name in self.__slots__:
            store[f"lookup.{name}"] = getattr(self, name)

    def plus(
        self, columns: Ints, thresholds: npt.NDArray[np.float32], defaults: npt.NDArray[np.uint8]
    ) -> Lookup:
        """With further splits at the end."""
        return Lookup(
            np.concatenate((self.columns, columns)),
            np.concatenate((self.thresholds, thresholds)),
            np.concatenate((self.defaults, defaults)),
        )

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
        column = values[rows, self.columns[record]]
        return goes_left(column, self.thresholds[record], self.defaults[record].astype(bool))

    def n_ways(self, records: Ints, values: npt.NDArray[np.float32]) -> int:
        """How many answers some of the splits can give together, whatever the columns hold; that
        something is missing counts where the table has missing values."""
        ways = 1
        for column in np.unique(self.columns[records]):
            own = records[self.columns[records] == column]
            missing = [np.nan] if np.isnan(values[:, column]).any() else []
            thresholds, defaults = self.thresholds[own], self.defaults[own].astype(bool)
            points = np.array([-np.inf, *thresholds, *missing], dtype=np.float32)
            ways *= len(np.unique(goes_left(points[:, None], thresholds, defaults), axis=0))
        return ways

    def to_json(
        self, names: Sequence[str], quantiles: npt.NDArray[np.float32] = NO_QUANTILES
    ) -> dict[str, Any]:
        """A document that JSON can hold.

        Parameters
        ----------
        names : of the party's columns.
        quantiles : of their values (``fedapp.site.likeness``), shape (n_columns, n_quantiles).
        """
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
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Lookup:
        """Undo ``to_json``."""
        records = document["records"]
        return cls(
            np.array([record[0] for record in records], dtype=np.int64),
            np.array([record[1] for record in records], dtype=np.float32),
            np.array([record[2] for record in records], dtype=np.uint8),
        )


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


def write_part(folder: Path, document: Mapping[str, Any]) -> None:
    """Write a party's part of a model; nobody else on the machine may read it.

    Salt makes its digest say nothing: without it, who guessed a threshold could try the guess.
    """
    document = {**document, "salt": secrets.token_hex(SALT_BYTES)}
    write_whole(folder / PART, (json.dumps(document) + "\n").encode(), PRIVATE)


def read_part(folder: Path) -> dict[str, Any]:
    """Read what ``write_part`` wrote.

    Raises
    ------
    DataError : there is none, or it is of another format.
    """
    path = folder / PART
    if not path.is_file():
        raise DataError("model must have a part at this party, got none: was it trained here?")
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("format") != FORMAT:
        raise DataError(f"model must be of format {FORMAT}, got {document.get('format')!r}")
    return document


def part_digest(folder: Path) -> bytes:
    """32 bytes that change with a party's part of a model."""
    return hashlib.blake2b((folder / PART).read_bytes(), digest_size=32).digest()


def sum_jobs(
    groups: Sequence[Group],
    level: int,
    trees: npt.NDArray[np.int32],
    nodes: npt.NDArray[np.int32],
) -> Iterator[tuple[int, int, npt.NDArray[np.int32]]]:
    """In which order wanted nodes are summed, so that both sides read the sums alike.

    Yields
    ------
    Group of trees whose gradients share ciphertexts, tree whose nodes are meant, and these nodes.
    At the root all trees of a group have the same rows, and the first stands for all.
    """
    first = 0
    for number, group in enumerate(groups):
        members = range(first, first + group.n_outputs)
        first += group.n_outputs
        for tree in members if level else members[:1]:
            wanted = nodes[trees == tree]
            if len(wanted):
                yield number, tree, wanted


def joint_names(names: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Names of all parties' columns, parties in turn: ``bank.balance`` where another party has a
    ``balance`` too, else as they are; all of them so where that is not enough.

    Parameters
    ----------
    names : of each party's columns.
    """
    counts = Counter(name for own in names.values() for name in own)
    short = [
        f"{party}.{name}" if counts[name] > 1 else name
        for party, own in names.items()
        for name in own
    ]
    if len(set(short)) == len(short):
        return tuple(short)
    return tuple(f"{party}.{name}" for party, own in names.items() for name in own)


def joined(
    model: Ensemble,
    records: Sequence[Ints],
    owners: Sequence[Ints],
    lookups: Sequence[Lookup],
    columns: Sequence[str],
) -> Ensemble:
    """The model with all thresholds in it.

    Parameters
    ----------
    model : its splits have no thresholds.
    records : of each tree, int64, shape (n_nodes,): record id of each split.
    owners : of each tree: number of the party of each split.
    lookups : of each party.
    columns : names of all columns, parties in turn.
    """
    trees: list[Tree] = []
    for tree, record_ids, parties in zip(model.trees, records, owners, strict=True):
        copy = tree.copy()
        for node in np.flatnonzero(tree["left"] != LEAF):
            copy["threshold"][node] = lookups[parties[node]].thresholds[record_ids[node]]
        trees.append(copy)
    return replace(model, columns=tuple(columns), trees=tuple(trees))
