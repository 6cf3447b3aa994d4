"""A party of a vertical run: its aligned rows, and the digests that prove their order."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from fedapp.data.labels import (
    Labels,
    class_ids,
    note_on_untrained,
    number_labels,
    untrained_classes,
)
from fedapp.data.partition import SUBSETS
from fedapp.errors import DataError
from fedapp.messages.fields import Array, Letter, check_fields
from fedapp.messages.vertical import OrderDigest
from fedapp.records.codec import IN_FILE
from fedapp.site.labels import check_kind
from fedapp.site.mail import Letters, Mail, Session
from fedapp.site.roles import Role, role
from fedapp.site.store import part_digest, read_part
from fedapp.trees.categories import Categories
from fedapp.trees.divided import PARTS, ActivePart, Part
from fedapp.trees.objective import is_regression

log = logging.getLogger("fedapp.site")
Bytes = npt.NDArray[np.uint8]


def numbered(party: str, n_columns: int) -> list[str]:
    """Names of columns where a party does not share its own."""
    return [f"{party} column {column + 1}" for column in range(n_columns)]


class Subsets(NamedTuple):
    """How many rows each subset has; in the common order one comes after the other."""

    train: int
    valid: int
    test: int

    def of(self, subset: str) -> slice:
        """Rows of a subset."""
        number = SUBSETS.index(subset)
        return slice(sum(self[:number]), sum(self[: number + 1]))


@role
class Aligned(Role):
    """What the opening of a vertical run leaves; roles of its methods extend it.

    Arrays have a row for each of the party's rows that all parties have, in the common order:
    training, validation, test.
    """

    active: str  # name of the party that has the labels
    columns: tuple[str, ...]
    kinds: tuple[str, ...]  # of the columns
    categories: Annotated[Categories, IN_FILE]  # that code the values
    n_rows: Subsets
    model: str = ""  # id of the model to predict with; empty to train
    ids: npt.NDArray[np.str_]
    values: npt.NDArray[np.float32]  # (n_rows, n_columns); NaN is missing
    places: npt.NDArray[np.int64]  # rows of the party's table
    # At the active party, and where a table to predict has labels: as in a ``Table``
    labels: Labels | None = None
    weights: npt.NDArray[np.float32]  # with the labels
    base_margins: npt.NDArray[np.float32] | None = None
    quantiles: npt.NDArray[np.float32]  # of the columns, to train
    unmatched: npt.NDArray[np.str_]  # to predict, at the active party: ids that not all have
    # Of the ids that this party and another have, in order, until the other's is checked; with
    # join=left a passive party compares its ids with the active party only.
    digests: Mapping[str, npt.NDArray[np.uint8]] = {}

    @property
    def n_train(self) -> int:
        """Training rows."""
        return self.n_rows.train

    def party_part(self, model: str = "") -> Part:
        """The party's part of a model, by its id, or of the model to predict with."""
        return read_part(self.folder.parent / (model or self.model), *PARTS)

    def active_part(self, model: str = "") -> ActivePart:
        """The same, at the active party; raises a DataError if a party is missing."""
        part = read_part(self.folder.parent / (model or self.model), ActivePart)
        if missing := sorted(part.digests.keys() - {*self.peers}):
            names = ", ".join(missing)
            raise DataError(f"parties must be those of the model, got none named {names}")
        return part

    def part_digest(self, model: str = "") -> Array:
        """Digest of the party's part, for the active party; uint8, shape (32,)."""
        return np.frombuffer(
            part_digest(self.folder.parent / (model or self.model)), dtype=np.uint8
        )

    @property
    def peers(self) -> list[str]:
        """Names of all parties, in the run's order."""
        return list(self.site.store.get(Session).peers)

    @property
    def others(self) -> list[str]:
        """Names of the other parties."""
        return [name for name in self.peers if name != self.name]

    def to_others(self, letter: Letter) -> Letters:
        """The same letter for every other party."""
        return [(name, letter) for name in self.others]

    @property
    def passive(self) -> list[str]:
        """Names of the parties without labels."""
        return [name for name in self.peers if name != self.active]

    @property
    def is_active(self) -> bool:
        """Whether this party has the labels."""
        return self.name == self.active

    # Bits of common rows prove nothing: an active party could send any. So every party shows every
    # other that it knows the ids of the rows that it keeps. It sends a hash of its name, keyed by a
    # hash of the run's key and of these ids in order. If blake2b is a random oracle, nobody finds
    # that value without all of the ids, nor from another party's value, as the name differs. A
    # party that knows the id of a row has a right to match it; one that guesses ids is limited by
    # the sizes of lists. A proof that bits follow from the doubly masked lists would need those
    # lists, 32 bytes a row, and one of equal exponents: a list may contain points of any ids.
    def order_proof(self, sender: str, other: str) -> Array:
        """What a party, this or the other one, sends the other as a digest; uint8, (32,)."""
        key = self.digests[other].tobytes()
        proof = hashlib.blake2b(sender.encode(), key=key, digest_size=32)
        return np.frombuffer(proof.digest(), dtype=np.uint8)

    def check_order(self, mail: Mail) -> None:
        """Check, before anything is answered, that the passive parties know the ids of all rows.

        A passive party has checked the active one's digest when it kept the rows.
        """
        for name in self.digests:
            if name != self.active:
                self.check_proof(name, "OrderDigest", mail.one(OrderDigest, name).digest)
        self.digests = {}

    def end(self) -> None:
        """Delete all arrays, of rows whose order was checked."""
        assert not self.digests, "check_order must come before the run ends"
        Role.end(self)

    def check_proof(self, party: str, letter: str, digest: Array) -> None:
        """Check another party's digest of the order."""
        fits = (digest == self.order_proof(party, party)).all()
        rule = f"must be of the ids of {self.name}: ids must be those of {party}, in the same order"
        check_fields(party, letter, ("digest", fits, rule))

    def number_labels(self, objective: str) -> tuple[tuple[str, ...], npt.NDArray[np.float32]]:
        """Class names and labels as float32, at the active party; logs untrained classes."""
        assert self.labels is not None
        if self.config.label_epsilon:
            check_kind(self.config, objective)
            if is_regression(objective):  # noise leaves the range of labels that a loss allows
                return (), class_ids(self.labels, ())
        classes, numbers = number_labels(
            self.labels, objective, self.n_train, self.config.positive_label
        )
        if untrained := untrained_classes(classes, self.labels[: self.n_train]):
            log.warning("%s", note_on_untrained(untrained))
        return classes, numbers
