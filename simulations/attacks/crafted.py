"""What a dishonest party of SecureBoost reads by numbers that it makes up.

``reverse_sums``: an active party writes rows beside gradients, as nobody sees what it encrypts.
``crafted_sums``: a passive party sends sums that are not of its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from clients.secureboost import active as secureboost_active
from clients.secureboost import round as secureboost_round
from clients.secureboost.passive import Passive
from clients.secureboost.round import Chosen, Claims
from clients.vertical import ciphertexts
from fedapp.arrays import Doubles, Flags, Ints
from fedapp.audit.listening import Transcript, trained
from fedapp.audit.vertical import largest_bins, true_bins
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.packing import PRECISION, FixedPoint, Layout
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.paillier_keys import PublicKey
from fedapp.crypto.rings import Residues
from fedapp.crypto.sums import pack_sums
from fedapp.crypto.workers import Workers
from fedapp.errors import FedappError
from fedapp.messages.secureboost import EncryptedGradients, EncryptedSums, SplitRequest, Splits
from fedapp.runs.baselines import join_tables
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.site.mail import Letters
from simulations.attack import PLAIN, UNKNOWN, Outcome, Overrides
from simulations.attacks.vertical import ACTIVE, PASSIVE, SECUREBOOST, SOLVED_BINS
from simulations.study import Row


@contextmanager
def unchecked(but: Collection[str] = ()) -> Iterator[None]:
    """An active party does not check sums, except by methods of these names."""
    with ExitStack() as stack:
        for kind, name in ((Claims, "check_sums"), (Chosen, "check_sides")):
            if name not in but:
                stack.enter_context(patch.object(kind, name, lambda *given: None))
        yield


# reverse_sums

DIGITS = 44  # of 53; the others are the gradient


class Writer:
    """An active party that writes rows into fixed-point numbers; the true codes only judge it."""

    def __init__(self) -> None:
        self.first = 0  # next row to write
        self.fresh = False  # rows are written and their sums not yet read
        self.bits: list[npt.NDArray[np.bool_]] = []  # of each round, shape (n_bins, 2 * DIGITS)
        self.widths = np.empty(0, dtype=np.int64)
        self.codes = np.empty((0, 0), dtype=np.int64)

    def note(self, transcript: Transcript) -> None:
        if (codes := true_bins(transcript, PASSIVE)) is not None:
            self.codes = codes
        if isinstance(transcript.request, SplitRequest):
            self.widths = secureboost_active.Active.load(transcript.site).joint.widths[PASSIVE]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write rows into gradients and read them from sums, while the context is open."""
        writer = self

        class Written(FixedPoint):
            __slots__ = ()

            @staticmethod
            def covering(
                gradients: npt.NDArray[np.float32], precision: int = PRECISION
            ) -> FixedPoint:
                return Written(FixedPoint.covering(gradients, precision).exponents, precision)

            def encode(self, gradients: npt.NDArray[np.float32]) -> Ints:
                integers = FixedPoint.encode(self, gradients) >> DIGITS << DIGITS
                turn = np.arange(writer.first, min(writer.first + 2 * DIGITS, len(integers)))
                digits = turn - writer.first
                integers[turn, 0, digits // DIGITS] += 1 << digits % DIGITS
                writer.first, writer.fresh = writer.first + 2 * DIGITS, True
                return integers

            def decode(self, sums: Sequence[Sequence[int]], n_outputs: int) -> Doubles:
                if writer.fresh:  # the first sums are of the root, which has all rows
                    # The lowest digits of each pair of numbers, shape (n_bins, 2 * DIGITS)
                    digits = [
                        [int(number) >> digit & 1 for number in pair for digit in range(DIGITS)]
                        for pair in sums
                    ]
                    writer.bits.append(np.array(digits, dtype=bool))
                    writer.fresh = False
                return FixedPoint.decode(self, sums, n_outputs)

        with (
            unchecked(),
            patch.object(secureboost_active, "FixedPoint", Written),
            patch.object(secureboost_round, "FixedPoint", Written),
        ):
            yield

    def codes_read(self, n_rows: int) -> Ints:
        """Bins of all rows, int64, shape (n_rows, n_columns).

        A missing value has the bin after the last; a row that was not written has ``UNKNOWN``.
        """
        codes = np.full((n_rows, len(self.widths)), UNKNOWN)
        ends = np.cumsum(self.widths)
        for number, bits in enumerate(self.bits):
            rows = np.arange(number * 2 * DIGITS, min((number + 1) * 2 * DIGITS, n_rows))
            for column, width in enumerate(self.widths.tolist()):
                bins = bits[ends[column] - width : ends[column], : len(rows)]
                codes[rows, column] = np.where(bins.any(axis=0), bins.argmax(axis=0), width)
        return codes


def attack_reverse_sums(overrides: Overrides) -> Outcome:
    """What a dishonest active party of SecureBoost reads by writing rows into gradients.

    Nobody sees what it encrypts. It gives up the lowest digits of a gradient, which a tree does not
    miss, and writes one digit for one row there: in a sum, that digit shows whether the bin holds
    the row. Two numbers of 44 digits read 88 rows a round, in every column of every other party,
    and the trees stay as good as they were. This is a lower bound: nodes of a level share no row,
    so below the root the same digits can serve other rows; an attacker who gives up the trees can
    use all digits. (Weng et al. 2020, "Practical Privacy Attacks on Vertical Federated Learning",
    arXiv:2011.09290, call it the reverse sum attack; theirs reads the order of rows' bins.)

    Success is the share of values (rows times columns) whose bin is read, or guessed right as the
    largest bin for rows that were not written; chance is that of guessing only.
    """
    writer = Writer()
    listeners = [(name, writer.note) for name in (ACTIVE, PASSIVE)]
    with (
        writer.writing(),
        trained(load_settings({**SECUREBOOST, **overrides}), listeners) as run,
    ):
        truth, codes = writer.codes, writer.codes_read(len(writer.codes))
        largest = np.array([np.bincount(column).argmax() for column in truth.T])
        guesses = np.where(codes == UNKNOWN, largest, codes)
        return Outcome(float((guesses == truth).mean()), largest_bins(truth.T), run.score)


REVERSE_SUMS = replace(
    SOLVED_BINS,
    holder="an active party of SecureBoost that breaks the rules, from sums of what it makes up",
    ways={
        PLAIN: {},
        "3 rounds": {"num-boost-round": 3},
        **{way: SOLVED_BINS.ways[way] for way in ("50 rounds", "max-bin=8", "first-trees=5")},
    },
    run=attack_reverse_sums,
)


# crafted_sums

# All trees are stumps, so a round has one split.
STUMPS: dict[str, Any] = {**SECUREBOOST, "data": "default-credit", "columns": "sizes:5,18"}
STUMPS |= {"max-depth": 1, "eta": 0.1}
SHARE = 16  # of the rows: what a made-up sum adds, and how often it has the target


@dataclass(slots=True)
class Liar:
    """A passive party that makes up columns, or only their sums, so that the choice shows labels.

    ``labels`` are the truth, of which it knows on which side of a true split more are positive.
    """

    labels: Flags
    read: dict[int, bool] = field(default_factory=dict)  # labels by row
    asked: list[int] = field(default_factory=list)  # in this round
    lefts: Flags = field(default_factory=lambda: np.empty(0, bool))  # rows by a true split
    invented: Ints = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # columns that it makes up
    is_positive: bool = False  # whether more of these are than of others
    codes: Any = None  # its true columns
    values: Any = None

    def begin(self, party: Passive) -> None:
        """Make up what the round needs, before its first sums."""

    def sums(self, party: Passive, key: PublicKey, sums: Residues, layout: Layout) -> Residues:
        """Sums by bin in place of those of its columns."""
        return sums

    def learn(self, party: Passive, letter: Splits) -> None:
        """Read labels from a split of its columns."""

    def next(self, most: int) -> list[int]:
        """Rows to ask for in this round."""
        self.asked = [row for row in range(len(self.labels)) if row not in self.read][:most]
        return self.asked


class Numbers(Liar):
    """Two columns whose sums in a bin are (B, H) and (-B, H), plus K times those of a row.

    No rows have such sums. Which gains more is the sign of the row's gradient.
    """

    def sums(self, party: Passive, key: PublicKey, sums: Residues, layout: Layout) -> Residues:
        ring, target, n_rows = ring_of(key.n_squared), self.next(1), len(party.gradients.rows)
        place = int(np.searchsorted(party.gradients.rows, target[0]))
        (row,) = party._encrypted.between(place, place + 1)
        added = (n_rows // SHARE) << PRECISION
        pairs = [(sign * added << layout.field_bits) + added // 2 for sign in (1, -1)]
        times = ring.power(ring.read(row), n_rows // SHARE)
        changed_bins = ring.multiply(
            ring.read(encrypt(key, pairs, Workers(1))), np.repeat(times, 2, 0)
        )
        ends = np.cumsum(party.table.cuts.widths[party.gradients.columns])
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
            self.codes, self.values = party.table.codes, party.values
        if not len(self.lefts):
            return
        numeric = np.flatnonzero(~party.table.cuts.by_category & (party.table.cuts.widths > 1))
        self.invented = numeric[: 1 << (len(numeric).bit_length() - 1)]
        asked = self.next(len(self.invented).bit_length() - 1)
        codes, values = self.codes.copy(), self.values.copy()
        for subset, column in enumerate(self.invented):
            lefts = self.lefts.copy()
            lefts[asked] = [bool(subset >> number & 1) for number in range(len(asked))]
            codes[:, column] = ~lefts
            edge = party.table.cuts.edges[party.table.cuts.offsets[column]]
            values[: len(lefts), column] = np.where(lefts, edge - 1, edge)
        party.table = replace(party.table, codes=codes)
        if self.moves:
            party.values = values

    def learn(self, party: Passive, letter: Splits) -> None:
        if letter.columns[0] in self.invented:
            subset = int(np.flatnonzero(self.invented == letter.columns[0])[0])
            for number, row in enumerate(self.asked):
                self.read[row] = bool(subset >> number & 1) == self.is_positive
        else:
            bits = np.unpackbits(party.trees.sides[party.name])
            self.lefts = bits[: party.n_train].astype(bool)
            shares = (self.labels[self.lefts].mean(), self.labels[~self.lefts].mean())
            self.is_positive = shares[0] > shares[1]


class Columns(Rows):
    """The same, and its rows move by the made-up columns: no sum is false."""

    moves = True


LIES: dict[str, type[Liar]] = {
    "sums of no rows": Numbers,
    "sums of other rows": Rows,
    "made-up columns": Columns,
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
    ``fedapp.histograms.claimed.disclosed_labels`` is all that bounds them.
    """
    config = {**STUMPS, "num-boost-round": rounds, "secureboost.key-bits": key_bits}
    config |= {"test-fraction": 1 - rows / 30_000}
    for lie, checks in product(lies, CHECKS):
        yield {"lie": lie, "checked": checks, **lied(config, lie, checks)}


def lied(config: Row, lie: str, checks: str) -> Row:
    """Train with a liar; without those of the active party's checks that are not named."""
    table, _, _ = join_tables(load_settings(config))
    labels = table.labels[table.split.train] == 1
    liar, n_rounds = LIES[lie](labels), 0
    honest_begin, honest_sums = Passive._begin, Passive.encrypted_sums
    honest_take = Passive._take_splits

    def begin(party: Passive, letter: EncryptedGradients) -> None:
        nonlocal n_rounds
        n_rounds += 1
        honest_begin(party, letter)
        liar.begin(party)

    def sums(party: Passive, *wanted: Any) -> EncryptedSums:
        def packed(key: Any, of_bins: Any, layout: Any, workers: Workers) -> Any:
            return pack_sums(key, liar.sums(party, key, of_bins, layout), layout, workers)

        with patch.object(ciphertexts, "pack_sums", packed):
            return honest_sums(party, *wanted)

    def take(party: Passive, letter: Splits) -> Letters:
        letters = honest_take(party, letter)
        if len(letter.columns):
            liar.learn(party, letter)
        return letters

    ended = ""
    with (
        TemporaryDirectory() as folder,
        patch("fedapp.kernels.n_cores", lambda: 1),
        patch.object(Passive, "_begin", begin),
        patch.object(Passive, "encrypted_sums", sums),
        patch.object(Passive, "_take_splits", take),
        unchecked(CHECKS[checks]),
    ):
        try:
            run_local(load_settings({**config, "run-dir": f"{folder}/run"}))
        except FedappError as error:
            ended = str(error)
    right = sum(labels[row] == label for row, label in liar.read.items())
    return {"rounds": n_rounds, "labels": len(liar.read), "right": int(right), "ended": ended}
