"""What a dishonest active party of SecureBoost reads, as nobody sees what it encrypts.

``reverse_sums`` writes rows beside gradients, ``crafted_gradients`` in place of them;
``readable_rows`` has the figure that sites see.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from clients.secureboost import active as secureboost_active
from clients.secureboost import passive as secureboost_passive
from clients.secureboost import round as secureboost_round
from clients.vertical.ciphertexts import Cipher
from fedapp.audit.bins import Array, Ints, largest_bins, true_bins
from fedapp.audit.listening import Transcript, trained
from fedapp.crypto.packing import PRECISION, FixedPoint, grouped_layouts, readable_rows
from fedapp.crypto.paillier import decrypt, encrypt
from fedapp.crypto.workers import Workers, shared_workers
from fedapp.messages.secureboost import EncryptedSums, SplitReply, SplitRequest, Splits
from fedapp.messages.vertical import Partition
from fedapp.runs.baselines import same_nodes
from fedapp.settings import load_settings
from fedapp.site.mail import Letters, Mail
from fedapp.trees.model import Ensemble
from fedapp.trees.xgboost import to_xgboost_json
from simulations.attack import PLAIN, UNKNOWN, Outcome, Overrides, misled, tabled
from simulations.attacks.crafted_sums import unchecked
from simulations.attacks.vertical import ACTIVE, PASSIVE, SECUREBOOST, SOLVED_BINS
from simulations.passing import run_and_load
from simulations.study import Row

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
        return Outcome(float((guesses == truth).mean()), largest_bins(truth.T), run.score)


REVERSE_SUMS = replace(
    SOLVED_BINS,
    name="reverse_sums",
    holder="an active party of SecureBoost that breaks the rules, from sums of what it makes up",
    ways={
        PLAIN: {},
        "3 rounds": {"num-boost-round": 3},
        **{way: SOLVED_BINS.ways[way] for way in ("50 rounds", "max-bin=8", "first-trees=5")},
    },
    run=attack_reverse_sums,
)


# crafted_gradients


class Crafter:
    """An active party that encrypts powers of 2 and splits rows by their number."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.n_nodes = 1 << (depth - 1)  # of the last level
        self.read, self.truth = np.empty((0, 0), np.int64), np.empty((0, 0), np.int64)

    def note(self, transcript: Transcript) -> None:
        if (codes := true_bins(transcript, PASSIVE)) is not None:
            self.truth = codes

    def encrypted(
        self, cipher: Cipher, fields: Ints, start: int, stop: int
    ) -> npt.NDArray[np.uint8]:
        """Row ``r`` of node ``r % n_nodes`` has a bit of its sums; where none is left, 0."""
        turns = [row // self.n_nodes for row in range(start, stop)]
        powers = [1 << turn if turn < cipher.layouts[0].slot_bits else 0 for turn in turns]
        return encrypt(cipher.private_key, powers, shared_workers())

    def split(self, party: secureboost_active.Active, mail: Mail) -> tuple[SplitReply, Letters]:
        """Split by the rows' numbers; read the sums of the last level that is summed."""
        letter = mail.one(EncryptedSums, PASSIVE)
        below = self.depth - 2 - letter.level  # levels between the children and the last
        if below < 0:
            self._read(party, letter)
            return SplitReply(growing=False, passive_splits=False), []
        nodes = np.arange(1 << letter.level, dtype=np.int32)
        rows = np.arange(len(party.values)) % self.n_nodes >> below
        sides = np.concatenate([rows[rows >> 1 == node] % 2 == 0 for node in nodes])
        lefts, n = 2 * (nodes + len(nodes)) - 1, len(nodes)
        children, nothing = np.sort(np.concatenate((lefts, lefts + 1))), np.empty(0, np.int64)
        zeros = np.zeros(2 * n, np.int32)
        splits = Splits(
            level=letter.level + 1,
            trees=zeros[:n],
            nodes=nodes + n - 1,
            owners=np.full(n, party.trees.number),
            columns=nothing,
            first_rights=nothing,
            defaults=nothing.astype(np.uint8),
            set_bits=nothing.astype(np.uint8),
            wanted_trees=zeros,
            wanted_nodes=children.astype(np.int32),
        )
        partition = Partition(letter.level, np.packbits(sides))
        letters = [(PASSIVE, splits), (PASSIVE, partition)]
        return SplitReply(growing=True, passive_splits=False), letters

    def _read(self, party: secureboost_active.Active, letter: EncryptedSums) -> None:
        """Bins of rows: the bits of each bin's sum."""
        layout, widths = party.cipher.layouts[0], party.joint.widths[PASSIVE]
        self.read = np.tile(widths, (party.n_train, 1))  # no bit in any bin: the value is missing
        self.read[layout.slot_bits * self.n_nodes :] = UNKNOWN
        bins = [(column, code) for column, width in enumerate(widths) for code in range(width)]
        plaintexts = decrypt(party.cipher.private_key, letter.ciphertexts, Workers(1))
        for index, plaintext in enumerate(plaintexts):
            for position in range(plaintext.bit_length()):
                slot, turn = divmod(position, layout.slot_bits)
                node, cell = divmod(index * layout.n_slots + slot, len(bins))
                if plaintext >> position & 1:
                    column, code = bins[cell]
                    self.read[turn * self.n_nodes + node, column] = code


@contextmanager
def with_precision(bits: int, hessian_bits: int = 0) -> Iterator[None]:
    """Gradients of fewer bits; ``hessian_bits`` rounds the hessians further."""
    honest = FixedPoint.encode

    def encode(scale: FixedPoint, gradients: npt.NDArray[np.float32]) -> Ints:
        integers = honest(scale, gradients)
        if hessian_bits:
            dropped = bits - hessian_bits
            integers[..., 1] = (integers[..., 1] + (1 << dropped >> 1)) >> dropped << dropped
        return integers

    with ExitStack() as stack:
        for function in (grouped_layouts, FixedPoint.covering, FixedPoint.__init__):
            stack.enter_context(patch.object(function, "__defaults__", (bits,)))
        for module in (secureboost_active, secureboost_passive):
            stack.enter_context(patch.object(module, "PRECISION", bits))
        stack.enter_context(patch.object(FixedPoint, "encode", encode))
        yield


REMEDIES: dict[str, tuple[int, int]] = {  # bits of gradients, and of hessians
    "none": (PRECISION, 0),
    **{f"precision {bits}": (bits, 0) for bits in (45, 40, 36, 32, 28)},
    "hessians 32": (PRECISION, 32),
}


def crafted_gradients(
    remedies: tuple[str, ...] = tuple(REMEDIES),
    rows: int = 4000,
    rounds: int = 20,
    depth: int = 6,
    max_bin: int = 32,
    key_bits: int = 2048,
) -> Iterator[Row]:
    """Rows that a dishonest active party of SecureBoost reads in one round, by bits of gradients.

    Nobody sees what it encrypts. It encrypts a power of 2 for each row, so that a sum of 0s and 1s
    lists the rows of a bin. Nodes of a level share no row and use the same powers again: it sends
    rows to the nodes of the last level by their number. The passive party is honest and cannot
    detect any of this.

    ``python -m simulations attacks crafted_gradients`` does so once in ``--rows`` training rows of
    default-credit, without and with each of ``--remedies``: fewer bits of precision, or of
    hessians. ``cells`` of ``all_cells`` values (rows times columns) are read right; ``readable``
    rows have a bit. Then two honest parties train ``--rounds`` rounds with the remedy, under a
    small key: nodes that differ from the model without it, gains to the last bit, and its CPU
    seconds by those without.
    """
    config = {**SECUREBOOST, "data": "default-credit", "columns": "sizes:12,11"}
    config |= {"test-fraction": 1 - rows / 30_000, "allow-export": True, "max-bin": max_bin}
    config |= {"max-depth": depth, "num-boost-round": rounds}
    columns = "remedy; bits a slot=bits; readable; cells; of=all_cells; seconds:.1f; "
    columns += "nodes that differ=differ; of nodes=nodes; AUC=auc:.4f; CPU, ratio=ratio:.2f"
    heading = f"default-credit, {rows} rows, depth {depth}, one round"
    with patch("fedapp.kernels.n_cores", lambda: 1):  # all work in this process
        lines = compared(config, ("none", *remedies), key_bits)
        yield from tabled(heading, columns, lines)


def compared(config: dict[str, Any], remedies: Sequence[str], key_bits: int) -> Iterator[Row]:
    """A line for each remedy: an attack under it, and a model beside that of the first."""
    reference, first = xgboosts(run_and_load(config)[1]), 0.0  # also a warm-up
    for remedy in dict.fromkeys(remedies):
        line = attack_once(config | {"secureboost.key-bits": key_bits}, remedy)
        start = time.process_time()
        with with_precision(*REMEDIES[remedy]):
            _, model, summary = run_and_load(config)
        seconds, auc = time.process_time() - start, summary["metrics"]["test"]["auc"]
        first = first or seconds
        same, nodes = same_nodes(xgboosts(model), reference)
        line |= {"cpu_seconds": seconds, "ratio": seconds / first}
        yield {"remedy": remedy, **line, "nodes": nodes, "differ": nodes - same, "auc": auc}


def xgboosts(model: Ensemble) -> Row:
    """A model in XGBoost's JSON."""
    document: Row = json.loads(to_xgboost_json(model))
    return document


def attack_once(config: dict[str, Any], remedy: str) -> Row:
    """Attack one round; the run ends by an error of the active party after it has read."""
    crafter, start = Crafter(config["max-depth"]), time.perf_counter()

    def split(
        party: secureboost_active.Active, request: SplitRequest, mail: Mail
    ) -> tuple[SplitReply, Letters]:
        return crafter.split(party, mail)

    with misled(
        config,
        with_precision(*REMEDIES[remedy]),
        patch.object(Cipher, "encrypted", lambda *given: crafter.encrypted(*given)),
        patch.object(secureboost_active.Active, "split", split),
        listeners=[(PASSIVE, crafter.note)],
    ):
        truth = crafter.truth
    precision, _ = REMEDIES[remedy]
    layouts = grouped_layouts(config["secureboost.key-bits"], len(truth), 1, precision)
    return {
        "rows": len(truth),
        "bits": layouts[0].slot_bits,
        "readable": readable_rows(layouts, crafter.depth),
        "cells": int((crafter.read == truth).sum()),
        "all_cells": truth.size,
        "seconds": time.perf_counter() - start,
    }
