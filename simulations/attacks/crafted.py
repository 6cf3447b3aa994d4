"""What a label holder of SecureBoost reads by encrypting no gradients, and what could stop it.

The one study is ``crafted_gradients``; ``readable_rows`` has the figure that sites see.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from gmpy2 import mpz, mpz_random, powmod, random_state

from clients.secureboost import active as secureboost_active
from clients.secureboost import passive as secureboost_passive
from clients.secureboost import start as secureboost_start
from fedapp.audit.bins import true_bins
from fedapp.audit.listening import ListeningApp, Transcript
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.packing import PRECISION, FixedPoint, PairLayout, grouped_layouts, readable_rows
from fedapp.crypto.paillier import decrypt, encrypt
from fedapp.crypto.paillier_keys import PrivateKey, generate_key
from fedapp.crypto.rings import products_by_place
from fedapp.crypto.sums import pack_sums, sum_rows
from fedapp.crypto.workers import Workers, shared_workers
from fedapp.errors import FedappError
from fedapp.messages.secureboost import EncryptedSums, SplitReply, SplitRequest, Splits
from fedapp.messages.vertical import Partition
from fedapp.runs.agreement import same_nodes
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.site.mail import Letters, Mail
from fedapp.trees.model import Ensemble
from fedapp.trees.xgboost import to_xgboost_json
from simulations.attacks.crafted_sums import unchecked
from simulations.attacks.vertical import PASSIVE, SECUREBOOST
from simulations.attacks.vertical_bins import UNKNOWN
from simulations.passing import run_and_load
from simulations.study import Row, show

Ints = npt.NDArray[np.int64]
Patches = Callable[[], AbstractContextManager[object]]
# Rows of the tables without the test rows, and how columns are divided.
TABLES: dict[str, dict[str, Any]] = {
    "default-credit": {"columns": "sizes:12,11", "n_rows": 30_000},
    "give-me-some-credit": {"columns": "sizes:5,5", "n_rows": 150_000},
}
CHALLENGE_BITS, MEASURED = 128, 20  # of a proof; exponentiations that are timed


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of the protocol, which the attacker knows."""

    patches: Patches
    precision: int = PRECISION
    noise: int = 0  # bits of each field that a passive party overwrites


class Crafter:
    """An active party that encrypts powers of 2 and splits rows by their number."""

    def __init__(self, depth: int, noise: int) -> None:
        self.depth, self.noise = depth, noise
        self.n_nodes = 1 << (depth - 1)  # of the last level
        self.read, self.truth = np.empty((0, 0), np.int64), np.empty((0, 0), np.int64)

    def note(self, transcript: Transcript) -> None:
        if (codes := true_bins(transcript, PASSIVE)) is not None:
            self.truth = codes

    def row_bits(self, layout: PairLayout) -> list[int]:
        """Bits of a slot that tell rows."""
        return [bit for bit in range(layout.slot_bits) if bit % layout.field_bits >= self.noise]

    def encrypted(
        self, key: PrivateKey, layouts: tuple[PairLayout, ...], fields: Ints, start: int, stop: int
    ) -> npt.NDArray[np.uint8]:
        """Row ``r`` of node ``r % n_nodes`` has a bit of its sums; where none is left, 0."""
        bits = self.row_bits(layouts[0])
        turns = [row // self.n_nodes for row in range(start, stop)]
        powers = [1 << bits[turn] if turn < len(bits) else 0 for turn in turns]
        return encrypt(key, powers, shared_workers())

    def split(self, party: secureboost_active.Active, mail: Mail) -> tuple[SplitReply, Letters]:
        """Split by the rows' numbers; read the sums of the last level that is summed."""
        letter = mail.one(EncryptedSums, PASSIVE)
        below = self.depth - 2 - letter.level  # levels between the children and the last
        if below < 0:
            self._read(party, letter)
            return SplitReply(growing=False, passive_splits=False), []
        nodes = np.arange(1 << letter.level, dtype=np.int32)
        rows = np.arange(len(party.numbers)) % self.n_nodes >> below
        sides = np.concatenate([rows[rows >> 1 == node] % 2 == 0 for node in nodes])
        lefts, n = 2 * (nodes + len(nodes)) - 1, len(nodes)
        children, nothing = np.sort(np.concatenate((lefts, lefts + 1))), np.empty(0, np.int64)
        zeros = np.zeros(2 * n, np.int32)
        splits = Splits(
            level=letter.level + 1,
            trees=zeros[:n],
            nodes=nodes + n - 1,
            owners=np.full(n, party.number),
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
        layout, widths = party.layouts[0], party.joint.widths[PASSIVE]
        turns = {bit: turn for turn, bit in enumerate(self.row_bits(layout))}
        self.read = np.tile(widths, (party.n_train, 1))  # no bit in any bin: the value is missing
        self.read[len(turns) * self.n_nodes :] = UNKNOWN
        bins = [(column, code) for column, width in enumerate(widths) for code in range(width)]
        for index, plaintext in enumerate(
            decrypt(party.private_key, letter.ciphertexts, Workers(1))
        ):
            for position in range(plaintext.bit_length()):
                slot, bit = divmod(position, layout.slot_bits)
                node, cell = divmod(index * layout.n_slots + slot, len(bins))
                if plaintext >> position & 1 and bit in turns:
                    column, code = bins[cell]
                    self.read[turns[bit] * self.n_nodes + node, column] = code


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
        for module in (secureboost_start, secureboost_passive):
            stack.enter_context(patch.object(module, "PRECISION", bits))
        stack.enter_context(patch.object(FixedPoint, "encode", encode))
        yield


@contextmanager
def with_noise(bits: int) -> Iterator[None]:
    """A passive party adds a number below ``2**bits`` to each field that it sends."""
    honest, rng = pack_sums, np.random.default_rng()

    def pack(key: Any, sums: Any, layout: PairLayout, workers: Workers) -> npt.NDArray[np.uint8]:
        packed, ring = honest(key, sums, layout, workers), ring_of(key.n_squared)
        numbers = []
        for first in range(0, len(sums), layout.n_slots):
            n_fields = layout.n_fields * min(layout.n_slots, len(sums) - first)
            noise = enumerate(rng.integers(0, 1 << bits, n_fields).tolist())
            numbers.append(sum(value << layout.field_bits * field for field, value in noise))
        noised = ring.multiply(ring.read(packed), ring.read(encrypt(key, numbers, workers)))
        return ring.write(noised, key.ciphertext_bytes)

    with unchecked(), patch.object(secureboost_passive, "pack_sums", pack):
        yield


def groups_of(counts: Ints, n_rows: int) -> Ints:
    """The first bin of the group that each bin is in; a group has at least ``n_rows`` rows."""
    firsts, first, n_grouped = np.zeros(len(counts), np.int64), 0, 0
    for bin_id, count in enumerate(counts.tolist()):
        firsts[bin_id], n_grouped = first, n_grouped + count
        if n_grouped >= n_rows:
            first, n_grouped = bin_id + 1, 0
    if 0 < first < len(counts):  # too few are left at the end
        firsts[first:] = firsts[first - 1]
    return firsts


@contextmanager
def with_cells_of(n_rows: int) -> Iterator[None]:
    """A passive party joins neighbouring bins of a node until they have ``n_rows`` rows."""
    honest = sum_rows

    def summed(key: Any, block: Any, codes: Any, offsets: Any, slots: Any, *rest: Any) -> Any:
        ring, n_nodes = ring_of(key.n_squared), rest[0]
        sums = honest(key, block, codes, offsets, slots, *rest)
        counts, inside = np.zeros((n_nodes, offsets[-1]), np.int64), slots >= 0
        for start, column in zip(offsets, codes.T, strict=False):
            np.add.at(counts, (slots[inside], start + column[inside]), 1)
        targets = np.tile(np.arange(offsets[-1]), (n_nodes, 1))
        for of_node, cells in zip(counts, targets, strict=True):
            for start, end in zip(offsets, offsets[1:] - 1, strict=False):
                cells[start:end] = start + groups_of(of_node[start:end], n_rows)
        target_ids = (targets + offsets[-1] * np.arange(n_nodes)[:, None]).ravel()
        joined = ring.ones(len(sums))
        filled, products = products_by_place(ring, sums, target_ids)
        joined[filled] = products
        return joined

    with unchecked(), patch.object(secureboost_passive, "sum_rows", summed):
        yield


REMEDIES: dict[str, Remedy] = {
    "none": Remedy(ExitStack),
    **{
        f"precision {bits}": Remedy(partial(with_precision, bits), precision=bits)
        for bits in (45, 40, 36, 32, 28)
    },
    "hessians 32": Remedy(partial(with_precision, PRECISION, 32)),
    **{f"noise {bits}": Remedy(partial(with_noise, bits), noise=bits) for bits in (10, 20, 30, 40)},
    **{f"cells of {n}": Remedy(partial(with_cells_of, n)) for n in (5, 20)},
}


def crafted_gradients(
    data: tuple[str, ...] = ("default-credit",),
    remedies: tuple[str, ...] = tuple(REMEDIES),
    rows: int = 4000,
    rounds: int = 20,
    depth: int = 6,
    max_bin: int = 32,
    key_bits: int = 2048,
) -> Iterator[Row]:
    """Rows that a dishonest active party of SecureBoost reads in one round, and what could stop it.

    Nobody sees what it encrypts. It encrypts a power of 2 for each row, so that a sum of 0s and 1s
    lists the rows of a bin. Nodes of a level share no row and use the same powers again: it sends
    rows to the nodes of the last level by their number. The passive party is honest and cannot
    detect any of this.

    ``python -m simulations attacks crafted_gradients`` does so once in ``--rows`` training rows,
    without and with each of ``--remedies``: fewer bits of precision, or of hessians; noise in the
    low bits of what a passive party sends; bins joined until they have a minimum of rows. ``cells``
    of ``all_cells`` values (rows times columns) are read right; ``readable`` rows have a bit. Then
    two honest parties train ``--rounds`` rounds with the remedy, under a small key: nodes that
    differ from the model without it, gains to the last bit, and its CPU seconds by those without.

    The last line is the cost of proving in zero knowledge that a ciphertext encrypts one of two
    pairs, as all gradients of the first round of ``binary:logistic`` are (Cramer, Damgård and
    Schoenmakers 1994): microseconds of the exponentiations for a row, beside those of encryption.
    """
    with patch("fedapp.kernels.n_cores", lambda: 1):  # all work in this process
        for name in data:
            table = dict(TABLES[name])
            config = {**SECUREBOOST, "data": name, "allow-export": True, "max-bin": max_bin}
            config |= {"test-fraction": 1 - rows / table.pop("n_rows"), **table}
            config |= {"max-depth": depth, "num-boost-round": rounds}
            lines: list[Row] = []
            for line in compared(config, ("none", *remedies), key_bits):
                lines.append({"data": name, **line})
                yield lines[-1]
            columns = "remedy; bits a slot=bits; readable; cells; of=all_cells; seconds:.1f; "
            columns += "nodes that differ=differ; of nodes=nodes; AUC=auc:.4f; CPU, ratio=ratio:.2f"
            show(f"{name}, {rows} rows, depth {depth}, one round", lines, columns)
        yield proof_cost(key_bits)


def compared(config: dict[str, Any], remedies: Sequence[str], key_bits: int) -> Iterator[Row]:
    """A line for each remedy: an attack under it, and a model beside that of the first."""
    reference, first = xgboosts(run_and_load(config)[1]), 0.0  # also a warm-up
    for remedy in dict.fromkeys(remedies):
        line = attack_once(config | {"secureboost.key-bits": key_bits}, REMEDIES[remedy])
        start = time.process_time()
        with REMEDIES[remedy].patches():
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


def attack_once(config: dict[str, Any], remedy: Remedy) -> Row:
    """Attack one round; the run ends by an error of the active party after it has read."""
    crafter, start = Crafter(config["max-depth"], remedy.noise), time.perf_counter()

    def split(
        party: secureboost_active.Active, request: SplitRequest, mail: Mail
    ) -> tuple[SplitReply, Letters]:
        return crafter.split(party, mail)

    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        stack.enter_context(remedy.patches())
        stack.enter_context(patch.object(secureboost_active, "encrypted", crafter.encrypted))
        stack.enter_context(patch.object(secureboost_active.Active, "split", split))
        with suppress(FedappError):
            settings = load_settings({**config, "run-dir": f"{folder}/run"})
            run_local(settings, client_app=ListeningApp([(PASSIVE, crafter.note)]))
    truth, key_bits = crafter.truth, config["secureboost.key-bits"]
    layouts = grouped_layouts(key_bits, len(truth), 1, remedy.precision)
    n_lost = layouts[0].n_fields * remedy.noise * crafter.n_nodes
    return {
        "rows": len(truth),
        "bits": layouts[0].slot_bits,
        "readable": readable_rows(layouts, crafter.depth) - n_lost,
        "cells": int((crafter.read == truth).sum()),
        "all_cells": truth.size,
        "seconds": time.perf_counter() - start,
    }


def proof_cost(key_bits: int) -> Row:
    """Microseconds of exponentiations for the proof and the check of a row, and of encryption.

    A proof has a commitment and a simulated branch, two powers of exponent n and one of the
    challenge; its check has two of each. The owner of the key computes modulo the squares of its
    primes. Multiplications and the bytes of hashes are left out.
    """
    key, draw = generate_key(key_bits, insecure_small_key=True), random_state(0)
    n, n_squared = key.public.n, key.public.n_squared
    bases = [mpz_random(draw, n_squared) for _ in range(MEASURED)]

    def micros(modulus: mpz, exponent: mpz) -> float:
        start = time.process_time()
        for base in bases:
            powmod(base, exponent, modulus)
        return (time.process_time() - start) / MEASURED * 1e6

    numbers, workers = list(range(1 << 12)), Workers(1)
    encrypt(key, numbers, workers)  # tables of the key
    start = time.process_time()
    encrypt(key, numbers, workers)
    encryption = (time.process_time() - start) / len(numbers) * 1e6
    challenge = mpz(1 << CHALLENGE_BITS) - 1
    by_owner = sum(
        2 * micros(p * p, n % (p * (p - 1))) + micros(p * p, challenge) for p in (key.p, key.q)
    )
    check = 2 * (micros(n_squared, n) + micros(n_squared, challenge))
    costs = {"encryption_us": encryption, "proof_us": by_owner, "check_us": check}
    show("a proof of the form of one row", [costs], "; ".join(f"{name}:.0f" for name in costs), 0)
    return {"proof": "one of two", "key_bits": key_bits, **costs, "ratio": check / encryption}
