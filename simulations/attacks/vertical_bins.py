"""Bins of rows, from sums that the active party decrypts.

One that breaks the rules reads them; one that keeps them solves equations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from clients.secureboost import active as secureboost_active
from clients.secureboost import round as secureboost_round
from fedapp.audit.bins import Active, Array, Ints, largest_bins, solved, true_bins
from fedapp.audit.listening import Transcript, trained
from fedapp.crypto.packing import PRECISION, FixedPoint
from fedapp.messages.secureboost import SplitRequest
from fedapp.settings import load_settings
from simulations.attack import PLAIN, Attack, Outcome, Overrides
from simulations.attacks.crafted_sums import unchecked
from simulations.attacks.vertical import ACTIVE, BINNED, PASSIVE, SECUREBOOST

# reverse_sums

DIGITS = 44  # of 53; the others are the gradient
UNKNOWN = -1


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

            def decode(self, sums: Sequence[Sequence[int]], n_outputs: int) -> Array:
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
    the row. Two numbers of 44 digits read 88 rows a round, in every column of
    every other party, and the trees stay as good as they were. This is a lower bound: nodes of a
    level share no row, so below the root the same digits can serve other rows, as they do in
    ``crafted_gradients``, which gives up the trees. (Weng et al. 2020,
    "Practical Privacy Attacks on Vertical Federated Learning", arXiv:2011.09290, call it the
    reverse sum attack; theirs reads the order of the bins that rows are in.)

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
        chance = float((truth == largest).mean())
        return Outcome(float((guesses == truth).mean()), chance, run.score)


REVERSE_SUMS = Attack(
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
    },
    run=attack_reverse_sums,
)


# solved_bins


def attack_solved_bins(overrides: Overrides) -> Outcome:
    """Which bin each row has in a passive party's columns, solved from the sums of SecureBoost.

    For each tree node, column and bin the active party decrypts the sums of gradients and hessians.
    It has both for every row and knows which rows are in the node, so each sum is an equation in
    which of these rows are in the bin. Gradients change every round, so equations add up. The
    attack fits the share of each row in each bin to all equations, by accelerated projected
    gradients (Beck and Teboulle 2009). It starts at the shares of the bins, which the first round
    reveals: there all hessians are equal.

    Success is the share of values (rows times columns) whose bin gets the largest share; chance is
    guessing the largest bin of each column. Rows that were in the same leaves of all trees have one
    gradient, and sums cannot separate them.
    """
    active = Active(PASSIVE)
    listeners = [(name, active.note) for name in (ACTIVE, PASSIVE)]
    with trained(load_settings({**SECUREBOOST, **overrides}), listeners) as run:
        if not active.sums:  # the active party grew all trees by itself
            chance = largest_bins(active.codes.T)
            return Outcome(chance, chance, run.score)
        coefficients, sums = np.concatenate(active.coefficients), np.concatenate(active.sums)
        success = (solved(coefficients, sums, active.widths) == active.codes).mean()
        return Outcome(float(success), largest_bins(active.codes.T), run.score)


SOLVED_BINS = Attack(
    name="solved_bins",
    holder="the active party of SecureBoost, from the sums that it decrypts",
    measure="share of a passive party's values whose bin is found; chance: the largest bin",
    data=BINNED,
    ways={
        PLAIN: {},
        "50 rounds": {"num-boost-round": 50},
        "max-depth=2": {"max-depth": 2},
        "max-bin=8": {"max-bin": 8},
        "first-trees=5": {"secureboost.first-trees": 5},
        "goss": {"secureboost.goss": True},
    },
    run=attack_solved_bins,
)
