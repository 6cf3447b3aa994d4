"""What an active party of SecureBoost reads that breaks the rules: rows written into gradients.

Nobody sees what it encrypts. So it gives up the lowest digits of a gradient, which a tree does not
miss, and writes a digit of its own there for one row each: in a sum that digit says whether the bin
holds the row. Two numbers of ``DIGITS`` digits tell ``2 * DIGITS`` rows a round, in every column of
every other party, and the trees stay as good as they were. That is the least it can read: nodes of
a level share no row, so that below the root the same digits can serve other rows again. (Weng et
al. 2020, "Practical Privacy Attacks on Vertical Federated Learning", arXiv:2011.09290, call it the
reverse sum attack; theirs tells the order of the bins that rows are in.)

Success is the share of values (rows times columns) whose bin is read, or guessed right as the
largest bin where a row has had no turn; chance, that of guessing alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from clients.secureboost import round as secureboost_round
from fedapp.crypto.packing import PRECISION, FixedPoint
from fedapp.messages.secureboost import SplitRequest
from simulations.attacks.frame import PLAIN, Attack, Outcome, Overrides, command
from simulations.attacks.heard import Heard, trained
from simulations.attacks.targets import ACTIVE, BINNED, PASSIVE, SECUREBOOST, true_bins

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
DIGITS = 44  # of 53; the others are the gradient
UNKNOWN = -1


class Writer:
    """An active party whose fixed-point numbers say which rows they are of.

    Of the passive party it keeps the truth, which the attack is judged by and does not use.
    """

    def __init__(self) -> None:
        self.first = 0  # row whose turn is next
        self.fresh = False  # rows are written, and their sums are still to come
        self.bits: list[npt.NDArray[np.bool_]] = []  # of each round, shape (n_bins, 2 * DIGITS)
        self.widths = np.empty(0, dtype=np.int64)
        self.codes = np.empty((0, 0), dtype=np.int64)

    def note(self, heard: Heard) -> None:
        """Note the columns; and the truth."""
        if (codes := true_bins(heard)) is not None:
            self.codes = codes
        if isinstance(heard.request, SplitRequest):
            self.widths = np.array(heard.site.store.facts["widths"][PASSIVE])

    @contextmanager
    def writing(self) -> Iterator[None]:
        """While the context is open, rows are written into gradients and read from sums."""
        writer = self

        class Written(FixedPoint):
            """Fixed-point numbers of a round."""

            __slots__ = ()

            @staticmethod
            def covering(
                gradients: npt.NDArray[np.float32], precision: int = PRECISION
            ) -> FixedPoint:
                return Written(FixedPoint.covering(gradients, precision).exponents, precision)

            def encode(self, gradients: npt.NDArray[np.float32]) -> Ints:
                integers = FixedPoint.encode(self, gradients) >> DIGITS << DIGITS
                turn = np.arange(writer.first, min(writer.first + 2 * DIGITS, len(integers)))
                places = turn - writer.first
                integers[turn, 0, places // DIGITS] += 1 << places % DIGITS
                writer.first, writer.fresh = writer.first + 2 * DIGITS, True
                return integers

            def decode(self, sums: Sequence[Sequence[int]], n_outputs: int) -> Array:
                if writer.fresh:  # of the root, where all rows are
                    writer.bits.append(_digits(sums))
                    writer.fresh = False
                return FixedPoint.decode(self, sums, n_outputs)

        with patch.object(secureboost_round, "FixedPoint", Written):
            yield

    def codes_read(self, n_rows: int) -> Ints:
        """Bins of all rows; int64, shape (n_rows, n_columns); one past the last where no value is,
        ``UNKNOWN`` where a row has had no turn."""
        found = np.full((n_rows, len(self.widths)), UNKNOWN)
        ends = np.cumsum(self.widths)
        for number, bits in enumerate(self.bits):
            rows = np.arange(number * 2 * DIGITS, min((number + 1) * 2 * DIGITS, n_rows))
            for column, width in enumerate(self.widths.tolist()):
                own = bits[ends[column] - width : ends[column], : len(rows)]
                found[rows, column] = np.where(own.any(axis=0), own.argmax(axis=0), width)
        return found


def _digits(sums: Sequence[Sequence[int]]) -> npt.NDArray[np.bool_]:
    """The lowest digits of pairs of numbers, shape (n_pairs, 2 * DIGITS)."""
    digits = [[int(one) >> place & 1 for one in pair for place in range(DIGITS)] for pair in sums]
    return np.array(digits, dtype=bool)


def attacked(overrides: Overrides) -> Outcome:
    """Write and read rows; where one has had no turn, take the bin that is largest by others."""
    writer = Writer()
    with (
        writer.writing(),
        trained({**SECUREBOOST, **overrides}, [ACTIVE, PASSIVE], writer.note) as run,
    ):
        truth, found = writer.codes, writer.codes_read(len(writer.codes))
        largest = np.array([np.bincount(column).argmax() for column in truth.T])
        guesses = np.where(found == UNKNOWN, largest, found)
        chance = float((truth == largest).mean())
        return Outcome(float((guesses == truth).mean()), chance, run.score)


ATTACK = Attack(
    name="reverse_sums",
    holder="an active party of SecureBoost that breaks the rules, from sums of what it makes up",
    measure="share of a passive party's values whose bin is found; chance: the largest bin",
    data=BINNED,
    ways={
        PLAIN: {},
        "3 rounds": {"num-boost-round": 3},
        "50 rounds": {"num-boost-round": 50},
        "max-bin=8": {"max-bin": 8},
        "first-trees=5": {"secureboost.first-trees": 5},
        "least-bin-rows=20, 20 rounds": {"least-bin-rows": 20, "num-boost-round": 20},
    },
    run=attacked,
)

if __name__ == "__main__":
    command(ATTACK)
