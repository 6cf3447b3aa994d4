"""Ciphertexts of rows between the parties of a vertical run: one way, whatever the method.

The active party encrypts the numbers of its rows, several packed into a plaintext, and sends them
block by block. A passive party multiplies ciphertexts, which it cannot read, into those of sums,
and packs these into few. What comes from another party is checked before it is used::

    active    Cipher.encrypted      numbers of rows        -> a block of ciphertexts
    passive   EncryptedRows.plus    a block                -> checked and kept
              EncryptedRows.sums    the rows' cells        -> packed sums
    active    Cipher.read           packed sums, checked   -> sums of numbers

Whether rows can have such sums beyond a layout's limits is for the method to check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from clients.vertical.party import Aligned, Bytes
from fedapp.arrays import Flags, Ints
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.packing import PRECISION, Layout
from fedapp.crypto.paillier import check_ciphertexts, encrypt
from fedapp.crypto.paillier_keys import PrivateKey, PublicKey, generate_key, read_public_key
from fedapp.crypto.sums import SumJob, pack_sums, pack_terms, read_jobs, self_test, sum_rows
from fedapp.crypto.workers import shared_workers
from fedapp.errors import ConfigError, as_protocol_error
from fedapp.messages.fields import Array
from fedapp.site.account import account_of

ROWS_AT_ONCE = 1 << 15  # whose plaintexts are in memory together
# Layouts under a key; raises a ValueError if it is too small for a row.
LayoutsOf = Callable[[PublicKey], tuple[Layout, ...]]


def of_numbers(n_rows: int, n_outputs: int, precision: int = PRECISION) -> LayoutsOf:
    """One layout of signed numbers, for sums of up to ``n_rows`` rows; see ``Layout``."""
    return lambda key: (Layout(key.bits, n_rows, n_outputs, precision, in_pairs=False),)


class KeyOrder(Protocol):
    """A request that sets the key's size."""

    @property
    def key_bits(self) -> int: ...
    @property
    def insecure_small_key(self) -> bool: ...


class SentKey(Protocol):
    """A letter with the public key."""

    @property
    def n(self) -> Array: ...


class Sent(Protocol):
    """A letter with ciphertexts."""

    @property
    def ciphertexts(self) -> Array: ...


@dataclass(frozen=True, slots=True, eq=False)
class Cipher:
    """The active party's key, and how the numbers of a row are packed under it.

    With several layouts a row has a ciphertext under each, for the outputs in order.
    """

    key: Bytes = field(repr=False)  # the private one
    layouts: tuple[Layout, ...]

    @classmethod
    def drawn(cls, party: Aligned, order: KeyOrder, layouts_of: LayoutsOf) -> Cipher:
        """Draw the Paillier key and test it."""
        insecure, masks = order.insecure_small_key, party.config.full_masks
        try:
            key = generate_key(order.key_bits, insecure_small_key=insecure, full_masks=masks)
            layouts = layouts_of(key.public)
        except ValueError as error:
            raise ConfigError(f"{account_of(party.site.store).method}.{error}") from error
        self_test(key)
        return cls(key.to_array(), layouts)

    @property
    def private_key(self) -> PrivateKey:
        """The key."""
        return PrivateKey.from_array(self.key)

    @property
    def public_key(self) -> PublicKey:
        """Its public part."""
        return self.private_key.public

    @property
    def firsts(self) -> list[int]:
        """The first output of each layout, and the end."""
        return [0, *accumulate(layout.n_outputs for layout in self.layouts)]

    def encrypted(self, fields: Ints, start: int = 0, stop: int | None = None) -> Bytes:
        """Ciphertexts ``start`` to ``stop`` of rows, all under one layout before the next.

        ``fields`` are as ``Layout.pack`` expects them, with the outputs of all layouts.
        """
        key, firsts = self.private_key, self.firsts
        blocks = [np.empty((0, key.public.ciphertext_bytes), dtype=np.uint8)]
        stop = len(self.layouts) * len(fields) if stop is None else stop
        while start < stop:
            group, row = divmod(start, len(fields))
            end = min(len(fields), row + min(ROWS_AT_ONCE, stop - start))
            of_group = fields[row:end, firsts[group] : firsts[group + 1]]
            blocks.append(encrypt(key, self.layouts[group].pack(of_group), shared_workers()))
            start += end - row
        return np.concatenate(blocks)

    def read(
        self,
        party: str,
        letter: Sent,
        jobs: Sequence[tuple[int, Flags]],
        convert: Callable[[list[list[int]]], Any] = list,
    ) -> list[Any]:
        """Check, decrypt and unpack a party's sums: the fields of each, job by job.

        A job is the number of a layout, and which of its sums to read; see ``read_jobs``.
        """
        of_layouts = [(self.layouts[group], wanted) for group, wanted in jobs]
        with as_protocol_error(party, type(letter).__name__, "ciphertexts"):
            key, workers = self.private_key, shared_workers()
            return read_jobs(key, letter.ciphertexts, of_layouts, workers, convert)


@dataclass(frozen=True, slots=True, eq=False)
class EncryptedRows:
    """The active party's rows at another one, which can add them up, and not read them."""

    n: Bytes  # the public key's, big-endian
    layouts: tuple[Layout, ...]  # of a row's ciphertexts; those of the first come first
    blocks: tuple[Bytes, ...] = ()  # each is an array of the site's state; none has all

    @classmethod
    def none(
        cls, party: Aligned, letter: SentKey, order: KeyOrder, layouts_of: LayoutsOf
    ) -> EncryptedRows:
        """No rows yet, under the active party's key, which is checked."""
        with as_protocol_error(party.active, type(letter).__name__, "n"):
            insecure = order.insecure_small_key
            key = read_public_key(letter.n, order.key_bits, insecure_small_key=insecure)
            return cls(letter.n, layouts_of(key))

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    @property
    def public_key(self) -> PublicKey:
        """The key."""
        return PublicKey.from_array(self.n)

    def plus(self, party: str, letter: Sent) -> EncryptedRows:
        """With one more block, after checking that each number can be a ciphertext."""
        with as_protocol_error(party, type(letter).__name__, "ciphertexts"):
            check_ciphertexts(self.public_key, letter.ciphertexts)
        return replace(self, blocks=(*self.blocks, letter.ciphertexts))

    def between(self, first: int, last: int) -> Iterator[Bytes]:
        """Ciphertexts ``first`` to ``last``, block by block."""
        start = 0
        for block in self.blocks:
            low, high = max(first - start, 0), min(last - start, len(block))
            if low < high:
                yield block[low:high]
            start += len(block)

    def sums(
        self,
        codes: npt.NDArray[np.uint8 | np.uint16],
        offsets: Ints,
        nodes: npt.NDArray[np.int32],
        n_nodes: int,
        group: int = 0,
        sent: Flags | None = None,
    ) -> Bytes:
        """Packed sums under one layout by tree node, column and bin; see ``sum_rows``.

        ``sent`` selects the bins whose sums are packed, shape (offsets[-1],); None for all.
        """
        key, workers, n_rows = self.public_key, shared_workers(), len(nodes)
        products, first = ring_of(key.n_squared), 0
        sums = products.ones(n_nodes * int(offsets[-1]))
        # The product of two ciphertexts encrypts the sum.
        for block in self.between(group * n_rows, (group + 1) * n_rows):
            rows = slice(first, first + len(block))
            of_block = sum_rows(key, block, codes[rows], offsets, nodes[rows], n_nodes, workers)
            sums = products.multiply(sums, of_block)
            first += len(block)
        assert first == n_rows  # all have come, which the method has checked
        if sent is not None:
            sums = sums[np.tile(sent, n_nodes)]
        return pack_sums(key, sums, self.layouts[group], workers)

    def sums_of(self, jobs: Sequence[SumJob]) -> Bytes:
        """Packed sums of any rows, under the first layout; see ``pack_terms``."""
        return pack_terms(self.public_key, self.blocks, jobs, self.layouts[0], shared_workers())
