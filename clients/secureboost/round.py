"""A round at the active party: its gradients, encrypted in blocks, and the trees that grow.

A round replaces itself step by step; what it needs of the run is passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clients.secureboost.claims import ROWS_AT_ONCE, Chosen, Claim
from clients.secureboost.joint import Ints, Joint
from clients.vertical.party import Bytes
from fedapp.crypto.packing import FixedPoint, PairLayout
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.paillier_keys import PrivateKey
from fedapp.crypto.sums import read_jobs
from fedapp.crypto.workers import shared_workers
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.histograms.build import Histogram, sum_jobs
from fedapp.histograms.claimed import words_of
from fedapp.messages.fields import Array
from fedapp.messages.secureboost import EncryptedSums, SetupRequest
from fedapp.trees.grow import Growing, Growth, Routes
from fedapp.trees.sets import NO_SET, CategorySets
from fedapp.trees.structure import SplitNodes

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


class Sums(NamedTuple):
    """A party's sums by node and bin, and missing rows by node and column."""

    histograms: Histogram
    missing: Array
    claim: Claim | None = None  # the same in fixed point, of a passive party


@dataclass(frozen=True, slots=True, eq=False)
class Unsent:
    """Gradients that are encrypted block by block, all under one layout before the next."""

    fields: Ints  # (n_drawn, n_outputs, 2): in fixed point
    n_sent: int = 0  # ciphertexts

    def n_blocks(self, layouts: tuple[PairLayout, ...], most: int) -> int:
        """Blocks that are left, of at most ``most`` ciphertexts each."""
        return -(-(len(layouts) * len(self.fields) - self.n_sent) // most)


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A round in progress."""

    number: int
    gradients: Floats  # (n_outputs, n_train, 2), 0 for rows that are not drawn
    allowed: Bools  # (n_trees, n_columns): columns that each tree may split
    growth: Growing | None = None  # between two levels
    exponents: tuple[int, int] = (0, 0)  # scales of the encrypted gradients
    unsent: Unsent | None = None
    chosen: SplitNodes | None = None  # splits of a level by which the rows have not moved yet
    claims: Chosen | None = None  # by which they were chosen

    @property
    def has_one_tree(self) -> bool:
        """Whether one tree is of all outputs."""
        return len(self.allowed) < len(self.gradients)

    def drawn(self, joint: Joint, party: str) -> Ints:
        """A party's columns, by its numbers, that some tree may split."""
        return joint.columns_of(party, np.flatnonzero(self.allowed.any(axis=0)))

    def party_sums(
        self,
        letter: EncryptedSums,
        party: str,
        joint: Joint,
        growth: Growth,
        key: PrivateKey,
        layouts: tuple[PairLayout, ...],
    ) -> Sums:
        """Decrypt a passive party's sums of the wanted nodes; and its missing rows."""
        wanted, columns = growth.wanted, self.drawn(joint, party)
        if (letter.round_id, letter.level) != (self.number, growth.level):
            raise ProtocolError(party, "EncryptedSums", "level", "must be the one being split")
        if letter.missing.shape != (len(wanted), len(columns)):
            rule = f"must be of shape {(len(wanted), len(columns))}, got {letter.missing.shape}"
            raise ProtocolError(party, "EncryptedSums", "missing", rule)
        n_bins, scale = int(joint.widths[party][columns].sum()), FixedPoint(self.exponents)
        with as_protocol_error(party, "EncryptedSums", "ciphertexts"):
            trees, nodes = wanted.T
            ordered = sum_jobs(layouts, growth.level, trees, nodes, self.has_one_tree)
            jobs = list(ordered) if n_bins else []
            packed = [
                (layouts[group], np.ones(len(nodes) * n_bins, dtype=bool))
                for group, _, nodes in jobs
            ]
            fields = read_jobs(key, letter.ciphertexts, packed, shared_workers())
        shape, firsts = (len(wanted), n_bins, *growth.cell), _firsts(layouts)
        histograms, exact = np.zeros(shape), np.zeros((*shape, 2), dtype=np.int64)
        for (group, tree, _), of_job in zip(jobs, fields, strict=True):
            sums = scale.decode(of_job, layouts[group].n_outputs)  # gradients, hessians
            words = words_of(of_job).reshape(*sums.shape, 2)
            if self.has_one_tree:
                outputs = slice(firsts[group], firsts[group + 1])
                for of_all, of_group in ((histograms, sums), (exact, words)):
                    of_all[:, :, outputs] = of_group.reshape(
                        len(wanted), n_bins, *of_group.shape[1:]
                    )
                continue
            # At the root, one job sums for all trees of a group.
            for member in (tree,) if growth.level else range(firsts[group], firsts[group + 1]):
                for of_all, of_group in ((histograms, sums), (exact, words)):
                    of_tree = of_group[:, member - firsts[group]]
                    of_all[wanted[:, 0] == member] = of_tree.reshape(-1, *of_all.shape[1:])
        words = exact.reshape(len(wanted), n_bins, math.prod(growth.cell[:-1]), 2, 2)
        return Sums(histograms, letter.missing, Claim(words, letter.missing))


def encrypted(
    key: PrivateKey, layouts: tuple[PairLayout, ...], fields: Ints, start: int, stop: int
) -> Bytes:
    """Ciphertexts ``start`` to ``stop`` of all rows, layout by layout."""
    firsts = _firsts(layouts)
    blocks = [np.empty((0, key.public.ciphertext_bytes), dtype=np.uint8)]
    while start < stop:
        group, row = divmod(start, len(fields))
        end = min(len(fields), row + min(ROWS_AT_ONCE, stop - start))
        group_fields = fields[row:end, firsts[group] : firsts[group + 1]]
        blocks.append(encrypt(key, layouts[group].pack(group_fields), shared_workers()))
        start += end - row
    return np.concatenate(blocks)


def sets_of(routes: Routes, sets: CategorySets) -> CategorySets:
    """The category sets of some splits, in order."""
    return sets.take(routes["set"][routes["set"] != NO_SET])


def by_tree(pairs: Floats, n_parallel: int) -> Floats:
    """A view of gradients of shape (n_rows, n_pairs, 2) as (n_rows, n_parallel, n_outputs, 2)."""
    return pairs.reshape(len(pairs), n_parallel, -1, 2)


def _firsts(layouts: tuple[PairLayout, ...]) -> list[int]:
    """The first tree of each layout, and the end."""
    return [0, *accumulate(layout.n_outputs for layout in layouts)]


def draw_rows(pairs: Floats, settings: SetupRequest, rng: np.random.Generator) -> Floats:
    """Gradients, with those of rows that are not drawn set to 0; a draw for each parallel tree.

    Source of GOSS: Ke et al. 2017, "LightGBM", Algorithm 2.
    """
    n_rows = len(pairs)
    if settings.subsample < 1:
        shape = settings.num_parallel_tree, n_rows
        by_tree(pairs, shape[0])[(rng.random(shape) >= settings.subsample).T] = 0
    if not settings.goss:
        return pairs
    n_top, n_other = (int(rate * n_rows) for rate in (settings.top_rate, settings.other_rate))
    order = np.argsort(-np.abs(pairs[..., 0]).sum(axis=1), kind="stable")
    factors = np.zeros(n_rows, dtype=np.float32)
    factors[order[:n_top]] = 1
    others = rng.choice(order[n_top:], min(n_other, n_rows - n_top), replace=False)
    # Weighted up, so that sums over drawn rows estimate those over all.
    factors[others] = (1 - settings.top_rate) / settings.other_rate
    return pairs * factors[:, None, None]
