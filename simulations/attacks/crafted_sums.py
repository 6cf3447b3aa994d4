"""What a passive party of SecureBoost reads of labels by sums that are not those of its columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from clients.secureboost import passive as secureboost_passive
from clients.secureboost.claims import Chosen, Claims
from clients.secureboost.passive import Passive, blocks_of
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.packing import PRECISION, PairLayout
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.paillier_keys import PublicKey
from fedapp.crypto.rings import Residues
from fedapp.crypto.sums import pack_sums
from fedapp.crypto.workers import Workers
from fedapp.errors import FedappError
from fedapp.messages.secureboost import EncryptedGradients, EncryptedSums, Splits
from fedapp.runs.baselines import join_tables
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.site.mail import Letters
from fedapp.trees.sets import CategorySets
from simulations.attacks.vertical import SECUREBOOST
from simulations.study import Row, show

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
# All trees are stumps, so a round has one split; of categories trees are deep.
STUMPS: dict[str, Any] = {"data": "default-credit", "columns": "sizes:5,18", "max-depth": 1}
DEEP: dict[str, Any] = {"data": "adult", "columns": "sizes:6,8", "max-depth": 6}
DEEP |= {"min-child-weight": 0.0}
TABLE_ROWS = {"default-credit": 30_000, "adult": 48_842}
SHARE = 16  # of the rows: what a made-up sum adds, and how often it has the target


@dataclass(slots=True)
class Liar:
    """A passive party that makes up columns, or only their sums, so that the choice shows labels.

    ``labels`` are the truth, of which it knows on which side of a true split more are positive.
    """

    labels: Bools
    read: dict[int, bool] = field(default_factory=dict)  # labels by row
    asked: list[int] = field(default_factory=list)  # in this round
    lefts: Bools = field(default_factory=lambda: np.empty(0, bool))  # rows by a true split
    invented: Ints = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # columns that it makes up
    is_positive: bool = False  # whether more of these are than of others
    codes: Any = None  # its true columns
    values: Any = None

    def begin(self, party: Passive) -> None:
        """Make up what the round needs, before its first sums."""

    def sums(self, party: Passive, key: PublicKey, sums: Residues, layout: PairLayout) -> Residues:
        """Sums by bin in place of those of its columns."""
        return sums

    def learn(self, party: Passive, letter: Splits) -> None:
        """Read labels from a split of its columns."""

    def next(self, most: int) -> list[int]:
        """Rows to ask for in this round."""
        self.asked = [row for row in range(len(self.labels)) if row not in self.read][:most]
        return self.asked


@contextmanager
def unchecked(but: Collection[str] = ()) -> Iterator[None]:
    """An active party does not check sums, except by methods of these names."""
    with ExitStack() as stack:
        for kind, name in ((Claims, "check_sums"), (Chosen, "check_sides")):
            if name not in but:
                stack.enter_context(patch.object(kind, name, lambda *given: None))
        yield


class Numbers(Liar):
    """Two columns whose sums in a bin are (B, H) and (-B, H), plus K times those of a row.

    No rows have such sums. Which gains more is the sign of the row's gradient.
    """

    def sums(self, party: Passive, key: PublicKey, sums: Residues, layout: PairLayout) -> Residues:
        ring, target, n_rows = ring_of(key.n_squared), self.next(1), len(party.drawn)
        place = int(np.searchsorted(party.drawn, target[0]))
        (row,) = blocks_of(party.blocks, place, place + 1)
        added = (n_rows // SHARE) << PRECISION
        pairs = [(sign * added << layout.field_bits) + added // 2 for sign in (1, -1)]
        times = ring.power(ring.read(row), n_rows // SHARE)
        changed_bins = ring.multiply(
            ring.read(encrypt(key, pairs, Workers(1))), np.repeat(times, 2, 0)
        )
        ends = np.cumsum(party.cuts.widths[party.drawn_columns])
        changed = ring.ones(len(sums))
        changed[ends[1] :], changed[[0, ends[0]]] = sums[ends[1] :], changed_bins
        return changed

    def learn(self, party: Passive, letter: Splits) -> None:
        if letter.columns[0] < 2:
            self.read[self.asked[0]] = bool(letter.columns[0])


class Rows(Liar):
    """Sums of made-up columns: a true split, with each subset of the targets on the left.

    Other targets are on the right. The one that gains most has the targets of one label. The split
    is the last that was chosen of its true columns, so the first round is honest.
    """

    moves = False  # whether its rows move by these columns, too

    def begin(self, party: Passive) -> None:
        if self.values is None:
            self.codes, self.values = party.codes, party.values
        if not len(self.lefts):
            return
        numeric = np.flatnonzero(~party.cuts.by_category & (party.cuts.widths > 1))
        self.invented = numeric[: 1 << (len(numeric).bit_length() - 1)]
        asked = self.next(len(self.invented).bit_length() - 1)
        codes, values = self.codes.copy(), self.values.copy()
        for subset, column in enumerate(self.invented):
            lefts = self.lefts.copy()
            lefts[asked] = [bool(subset >> number & 1) for number in range(len(asked))]
            codes[:, column] = ~lefts
            edge = party.cuts.edges[party.cuts.offsets[column]]
            values[: len(lefts), column] = np.where(lefts, edge - 1, edge)
        party.codes = codes
        if self.moves:
            party.values = values

    def learn(self, party: Passive, letter: Splits) -> None:
        if letter.columns[0] in self.invented:
            subset = int(np.flatnonzero(self.invented == letter.columns[0])[0])
            for number, row in enumerate(self.asked):
                self.read[row] = bool(subset >> number & 1) == self.is_positive
        else:
            bits = np.unpackbits(party.sides[party.name])
            self.lefts = bits[: len(party.codes)].astype(bool)
            shares = (self.labels[self.lefts].mean(), self.labels[~self.lefts].mean())
            self.is_positive = shares[0] > shares[1]


class Columns(Rows):
    """The same, and its rows move by the made-up columns: no sum is false."""

    moves = True


class Categories(Liar):
    """Random categories in each round; a node's rows that have one of their own are read.

    Their owner's order of categories is random, and those of lowest weight go right.
    """

    def begin(self, party: Passive) -> None:
        column = int(np.argmax(party.cuts.widths * party.cuts.by_category))
        n_rows, width = len(party.codes), int(party.cuts.widths[column])
        self.invented = np.array([column])
        codes, values = party.codes.copy(), party.values.copy()
        drawn = np.random.default_rng(len(self.read)).permutation(n_rows) % width
        codes[:, column], values[:n_rows, column] = drawn, drawn
        party.codes, party.values = codes, values

    def learn(self, party: Passive, letter: Splits) -> None:
        of_invented = letter.columns == self.invented[0]
        local = party.local_indices(letter)
        widths = party.cuts.categories[letter.columns]
        sets = CategorySets(letter.set_bits, widths[widths > 0])
        numbers = np.cumsum(widths > 0) - 1
        for split, number in zip(local[of_invented], numbers[of_invented], strict=True):
            nodes = party.nodes[letter.trees[split], : len(party.codes)]
            rows = np.flatnonzero(nodes == letter.nodes[split])
            codes, goes_right = party.codes[rows, self.invented[0]], sets.members(int(number))
            is_alone = np.bincount(codes, minlength=len(goes_right))[codes] == 1
            for row, code in zip(rows[is_alone], codes[is_alone], strict=True):
                self.read.setdefault(int(row), not goes_right[code])


LIES: dict[str, type[Liar]] = {
    "sums of no rows": Numbers,
    "sums of other rows": Rows,
    "made-up columns": Columns,
    "made-up categories": Categories,
}
# What the active party checks: that rows of the node can have the sums, and that those have them
# that are sent to a side.
CHECKS = {"nothing": (), "possible": ("check_sums",), "all": ("check_sums", "check_sides")}


def crafted_sums(
    lies: tuple[str, ...] = tuple(LIES), rows: int = 2000, rounds: int = 30, key_bits: int = 512
) -> Iterator[Row]:
    """Labels that a dishonest passive party of SecureBoost reads from what is chosen of its sums.

    The active party chooses the split of the largest gain, and its owner learns which of its
    columns that is. So a party makes up sums of which one or the other gains most, by the label of
    a row. ``python -m simulations attacks crafted_sums`` trains on ``--rows`` rows for ``--rounds``
    rounds, first without checks, then with each of ``CHECKS``. ``labels`` are read before the
    run ends, of which ``right`` are true; the party knows on which side of a true split positive
    labels are more frequent. No sum of columns that are made up with their rows is false, so
    ``fedapp.histograms.claimed.disclosed_labels`` is all that bounds them. A category of one row
    has a weight only with a ``min-child-weight`` below its hessian.
    """
    lines: list[Row] = []
    for lie in lies:
        for checks in CHECKS:
            table = DEEP if lie == "made-up categories" else STUMPS
            config = {**SECUREBOOST, **table, "eta": 0.1, "num-boost-round": rounds}
            config |= {"test-fraction": 1 - rows / TABLE_ROWS[table["data"]]}
            config |= {"secureboost.key-bits": key_bits}
            lines.append({"lie": lie, "checked": checks, **lied(config, lie, checks)})
            yield lines[-1]
    columns = "lie; checked; rounds; labels; right; ended"
    show(f"{rows} rows", lines, columns)


def lied(config: dict[str, Any], lie: str, checks: str) -> Row:
    """Train with a liar; without those of the active party's checks that are not named."""
    settings = load_settings(config)
    table, _, _ = join_tables(settings)
    labels = table.labels[table.split.train] == 1
    liar, begun, ended = LIES[lie](labels), [0], ""
    honest = {name: getattr(Passive, name) for name in ("_begin", "encrypted_sums", "_take_splits")}

    def begin(party: Passive, letter: EncryptedGradients) -> None:
        begun[0] += 1
        honest["_begin"](party, letter)
        liar.begin(party)

    def sums(party: Passive) -> EncryptedSums:
        def packed(key: Any, of_bins: Any, layout: Any, workers: Workers) -> Any:
            return pack_sums(key, liar.sums(party, key, of_bins, layout), layout, workers)

        with patch.object(secureboost_passive, "pack_sums", packed):
            sent: EncryptedSums = honest["encrypted_sums"](party)
            return sent

    def take(party: Passive, letter: Splits) -> Letters:
        letters: Letters = honest["_take_splits"](party, letter)
        if len(letter.columns):
            liar.learn(party, letter)
        return letters

    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        stack.enter_context(patch("fedapp.kernels.n_cores", lambda: 1))
        for name, lying in (("_begin", begin), ("encrypted_sums", sums), ("_take_splits", take)):
            stack.enter_context(patch.object(Passive, name, lying))
        stack.enter_context(unchecked(CHECKS[checks]))
        try:
            placed = load_settings({**config, "run-dir": f"{folder}/run"})
            run_local(placed)
        except FedappError as error:
            ended = str(error)
    right = sum(labels[row] == label for row, label in liar.read.items())
    return {"rounds": begun[0], "labels": len(liar.read), "right": int(right), "ended": ended}
