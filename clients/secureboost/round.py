"""A round at the active party: its gradients, encrypted in blocks, and the trees that grow.

A round replaces itself step by step; what it needs of the run is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from clients.secureboost.claims import ROWS_AT_ONCE, Chosen, Rows
from clients.secureboost.joint import Joint
from clients.vertical.party import Aligned, Bytes, Floats, Ints
from fedapp.crypto.packing import FixedPoint, PairLayout, grouped_layouts
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.paillier_keys import PrivateKey
from fedapp.crypto.workers import shared_workers
from fedapp.messages.fields import parameters_of
from fedapp.messages.secureboost import SetupRequest
from fedapp.site.policy import check_sample_size
from fedapp.trees.grow import Growing, Growth, Limits, Shape
from fedapp.trees.predict import Nodes
from fedapp.trees.structure import SplitNodes
from fedapp.trees.vector_leaves import VectorGrowth

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Cipher:
    """The private key of a run, and how gradients are packed under it."""

    key: Bytes
    n_rows: int
    n_pairs: int  # of a row

    @property
    def private_key(self) -> PrivateKey:
        """The key."""
        return PrivateKey.from_array(self.key)

    @property
    def layouts(self) -> tuple[PairLayout, ...]:
        """Of packed gradients, one per group of trees."""
        return grouped_layouts(self.private_key.public.bits, self.n_rows, self.n_pairs)

    @property
    def firsts(self) -> list[int]:
        """The first tree of each layout, and the end."""
        return [0, *accumulate(layout.n_outputs for layout in self.layouts)]

    def encrypted(self, fields: Ints, start: int, stop: int) -> Bytes:
        """Ciphertexts ``start`` to ``stop`` of all rows, layout by layout."""
        key, layouts, firsts = self.private_key, self.layouts, self.firsts
        blocks = [np.empty((0, key.public.ciphertext_bytes), dtype=np.uint8)]
        while start < stop:
            group, row = divmod(start, len(fields))
            end = min(len(fields), row + min(ROWS_AT_ONCE, stop - start))
            group_fields = fields[row:end, firsts[group] : firsts[group + 1]]
            blocks.append(encrypt(key, layouts[group].pack(group_fields), shared_workers()))
            start += end - row
        return np.concatenate(blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Unsent:
    """Gradients that are encrypted block by block, all under one layout before the next."""

    fields: Ints  # (n_drawn, n_outputs, 2): in fixed point
    n_sent: int = 0  # ciphertexts
    n_blocks: int = 0  # that are left


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

    @property
    def grows(self) -> bool:
        """Whether nodes of its trees wait for sums."""
        return self.growth is not None and len(self.growth.open_nodes) > 0

    def drawn(self, joint: Joint, party: str) -> Ints:
        """A party's columns, by its numbers, that some tree may split."""
        return joint.columns_of(party, np.flatnonzero(self.allowed.any(axis=0)))

    def growing(self, settings: SetupRequest, joint: Joint) -> Growth:
        """Its trees."""
        shape = Shape.of(parameters_of(settings), settings.num_parallel_tree)
        limits = Limits(
            settings.seed,
            self.number,
            settings.colsample_bylevel,
            settings.colsample_bynode,
            joint.monotone,
            tuple(map(frozenset, joint.interactions)),
        )
        kind = VectorGrowth if self.has_one_tree else Growth
        return kind(len(self.gradients), joint.cuts, self.allowed, shape, limits, self.growth)

    def block(self, cipher: Cipher, unsent: Unsent, most: int) -> tuple[Round, Bytes]:
        """The round without the next gradients, at most ``most`` ciphertexts; and these."""
        n_all = len(cipher.layouts) * len(unsent.fields)
        stop = min(n_all, unsent.n_sent + most)
        left = replace(unsent, n_sent=stop, n_blocks=-(-(n_all - stop) // most))
        ciphertexts = cipher.encrypted(unsent.fields, unsent.n_sent, stop)
        return replace(self, unsent=left if left.n_blocks else None), ciphertexts

    def rows(self, nodes: Nodes, n_parallel: int) -> Rows:
        """Training rows, in their nodes."""
        by_draw = self.gradients.reshape(n_parallel, -1, *self.gradients.shape[1:])
        drawn = np.repeat(by_draw.any(axis=(1, 3)), by_draw.shape[1], axis=0)
        nodes = nodes[:, : self.gradients.shape[1]]
        return Rows(self.number, self.gradients, drawn, nodes, FixedPoint(self.exponents))


NO_ROUND = Round(-1, np.empty((0, 0, 2), np.float32), np.empty((0, 0), bool))


def by_tree(pairs: Floats, n_parallel: int) -> Floats:
    """A view of gradients of shape (n_rows, n_pairs, 2) as (n_rows, n_parallel, n_outputs, 2)."""
    return pairs.reshape(len(pairs), n_parallel, -1, 2)


def drawn_pairs(party: Aligned, pairs: Floats, settings: SetupRequest, number: int) -> Floats:
    """Gradients of the rows that a round draws, 0 for others; of all if it left out too few."""
    if settings.subsample == 1 and not settings.goss:
        return pairs
    entropy = party.site.entropy(settings.seed, number, 1, share=settings.subsample)
    drawn = draw_rows(pairs.copy(), settings, np.random.default_rng(entropy))
    n_rows, n_drawn = (
        int(by_tree(of_rows, settings.num_parallel_tree).any(axis=(2, 3)).sum(axis=0).min())
        for of_rows in (pairs, drawn)
    )
    return drawn if check_sample_size(party.config, n_rows, n_drawn) == n_drawn else pairs


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
