"""Sums of encrypted rows per tree node, column and bin, packed into few ciphertexts.

A sum is a product of ciphertexts mod n^2, and one product takes microseconds, so their number
matters. Columns are grouped where that helps: the rows of a tree node that have the same bins in
both of two columns are multiplied once into a joint cell, and the cells, far fewer than rows, into
the bins of either column.

    rows      --->  cells (column 0 x column 1)  --->  bins of column 0
    20,000          1,024                        --->  bins of column 1

A caller sums (``sum_rows``) and packs (``pack_sums``), or does both for sums of any rows
(``pack_terms``), and sends; the key's owner reads (``read_jobs``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Flags, Ints
from fedapp.crypto.lanes import ring_of, run_shared
from fedapp.crypto.packing import FixedPoint, Layout
from fedapp.crypto.paillier import (
    CALLS_PER_WORKER,
    check_ciphertexts,
    decrypt,
    encrypt,
    join_ciphertexts,
    masks_of,
    rerandomise,
    share_out,
)
from fedapp.crypto.paillier_keys import PrivateKey, PublicKey
from fedapp.crypto.rings import Bytes, Residues, products_by_place
from fedapp.crypto.workers import Rows, Workers

# Rows a call: fewer are not worth sending to another process, more would take too much memory.
FEWEST_ROWS, MOST_ROWS = 256, 1 << 15


def sum_rows(
    key: PublicKey,
    ciphertexts: Bytes,
    codes: npt.NDArray[np.uint8 | np.uint16],
    offsets: Ints,
    nodes: npt.NDArray[np.int32],
    n_nodes: int,
    workers: Workers,
) -> Residues:
    """Sum encrypted rows per tree node, column and bin.

    Parameters
    ----------
    ciphertexts : uint8, shape (n_rows, ciphertext_bytes), checked.
    codes : shape (n_rows, n_columns): bin ids; missing values have one more bin, by custom the
        last.
    offsets : int64, shape (n_columns + 1,): bins of column f are ``offsets[f]`` to
        ``offsets[f+1]``.
    nodes : int32, shape (n_rows,): index of the row's node among those to sum, -1 for none.

    Returns
    -------
    ``n_nodes * offsets[-1]`` sums, node after node, residues mod n^2. A sum of no rows is 1, the
    encryption of 0 without a mask: all must be packed, or re-randomised, before they are sent.
    """
    rows = np.flatnonzero(nodes >= 0)
    n2_ring, most = ring_of(key.n_squared), MOST_ROWS * workers.n_workers
    sums = n2_ring.ones(n_nodes * int(offsets[-1]))
    for first in range(0, len(rows), most):
        part = rows[first : first + most]
        n_chunks = min(workers.n_workers, max(1, len(part) // FEWEST_ROWS))
        calls = [
            (key, Rows([ciphertexts], chunk), Rows([codes], chunk), offsets, nodes[chunk], n_nodes)
            for chunk in np.array_split(part, n_chunks)
        ]
        for partial_sums in run_shared(workers, _sum_rows_of, calls):
            sums = n2_ring.multiply(sums, partial_sums)
    return sums


def select_ciphertexts(
    key: PublicKey, ciphertexts: Bytes, chosen: Flags, workers: Workers
) -> Bytes:
    """Chosen ciphertexts under fresh masks, and fresh encryptions of 0 in place of the others.

    The result, uint8 of shape (n, ciphertext_bytes), does not show which were ``chosen``, a boolean
    array.
    """
    masked_out = np.array(ciphertexts)
    masked_out[~chosen] = 0
    masked_out[~chosen, -1] = 1  # encryption of 0 under the mask 1, until it is re-randomised
    return rerandomise(key, masked_out, workers)


def pack_sums(key: PublicKey, sums: Residues, layout: Layout, workers: Workers) -> Bytes:
    """Put residues side by side in few ciphertexts, each under a fresh mask, fit to be sent."""
    slots = layout.n_slots
    shares = share_out(layout.n_plaintexts(len(sums)), workers)
    calls = [(key, sums[first * slots : last * slots], layout) for first, last in shares]
    return join_ciphertexts(key, run_shared(workers, _pack, calls))


@dataclass(frozen=True, slots=True, eq=False)
class SumJob:
    """Sums over any rows, each with at least one term.

    Parameters
    ----------
    rows, places : int32, shape (n_terms,): a row, and the sum that it is added to.
    counts : uint8, shape (n_rows,): multiplicity of each row in all of its sums.
    """

    rows: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]
    counts: npt.NDArray[np.uint8]
    n_sums: int


def pack_terms(
    key: PublicKey,
    blocks: Sequence[Bytes],
    jobs: Sequence[SumJob],
    layout: Layout,
    workers: Workers,
) -> Bytes:
    """Sum encrypted rows, and put the sums of each job side by side, under fresh masks.

    No ciphertext has sums of two jobs: ``layout.n_plaintexts(n_sums)`` ciphertexts a job.
    ``blocks`` are those of all rows in order, uint8 of shape (n_rows, ciphertext_bytes), checked.
    """
    packed = list[Bytes]()
    # A call has its terms, so few calls are made at a time.
    n_calls = CALLS_PER_WORKER * workers.n_workers
    for first in range(0, len(jobs), n_calls):
        calls = []
        for job in jobs[first : first + n_calls]:
            used, rows = np.unique(job.rows, return_inverse=True)
            terms = replace(job, rows=rows.astype(np.int32), counts=job.counts[used])
            calls.append((key, Rows(blocks, used), terms, layout))
        packed += run_shared(workers, _pack_terms, calls)
    return join_ciphertexts(key, packed)


def read_jobs(
    key: PrivateKey,
    ciphertexts: Bytes,
    jobs: Sequence[tuple[Layout, Flags]],
    workers: Workers,
    convert: Callable[[list[list[int]]], Any] = list,
) -> list[Any]:
    """Check, decrypt and unpack sums that were packed job by job; of each the fields of its sums.

    A job is a layout, and which of its sums to read, bool of shape (n_sums,); ciphertexts without
    such a sum are read as 0. ``convert`` makes an array, say, of one job's Python numbers before
    the next job has any. Raises a ValueError for a wrong number of ciphertexts, an invalid one,
    or a sum out of range.
    """
    sizes = [layout.n_plaintexts(len(wanted)) for layout, wanted in jobs]
    if len(ciphertexts) != sum(sizes):
        raise ValueError(f"ciphertexts must be {sum(sizes)}, got {len(ciphertexts)}")
    check_ciphertexts(key.public, ciphertexts)
    ends = np.cumsum([0, *sizes]).tolist()
    is_read = np.zeros(len(ciphertexts), dtype=np.bool_)
    for (layout, wanted), start in zip(jobs, ends, strict=False):
        is_read[start + np.flatnonzero(wanted) // layout.n_slots] = True
    plaintexts = [0] * len(ciphertexts)
    decrypted = decrypt(key, ciphertexts[is_read], workers)
    for index, plaintext in zip(np.flatnonzero(is_read), decrypted, strict=True):
        plaintexts[index] = plaintext
    return [
        convert(layout.unpack(plaintexts[start:end], len(wanted)))
        for (layout, wanted), start, end in zip(jobs, ends, ends[1:], strict=False)
    ]


def self_test(key: PrivateKey) -> None:
    """Encrypt, add, pack, re-randomise and decrypt a few rows; a RuntimeError if a sum is wrong."""
    gradients = np.array([[-1, 0.25], [0.5, 0.125], [1, 0]], dtype=np.float32)[:, None]
    scale, workers = FixedPoint((1, 0)), Workers(1)
    layout = Layout(key.public.bits, len(gradients))
    rows = encrypt(key, layout.pack(scale.encode(gradients)), workers)
    masked = rerandomise(key.public, rows, workers)
    codes, nodes = np.array([[0], [0], [2]], np.uint8), np.zeros(3, np.int32)
    sums = sum_rows(key.public, masked, codes, np.array([0, 3]), nodes, 1, workers)
    reply = pack_sums(key.public, sums, layout, workers)
    (fields,) = read_jobs(key, reply, [(layout, np.ones(3, dtype=bool))], workers)
    decrypted = scale.decode(fields, layout.n_outputs)[:, 0].tolist()
    if (masked == rows).all(axis=1).any() or decrypted != [[-0.5, 0.375], [0, 0], [1, 0]]:
        raise RuntimeError("Paillier arithmetic must give back known sums, got others")


@dataclass(frozen=True, slots=True, eq=False)
class ColumnGroup:
    """Groups of rows that share a node and the bins of some columns."""

    columns: tuple[int, ...]
    first_rows: Ints  # of each cell
    cell_ids: Ints  # of each row

    @property
    def n_products(self) -> int:
        """Products that the bins of these columns take, up to a constant."""
        return len(self.cell_ids) + (len(self.columns) - 1) * len(self.first_rows)


def _cells(columns: tuple[int, ...], bin_ids: Ints) -> ColumnGroup:
    """Group rows by some columns of ``bin_ids``."""
    cell_ids = bin_ids[:, columns[0]]
    for column in columns[1:]:
        # Each step renumbers the cells from 0, so that the product never exceeds 64 bits.
        cell_ids = np.unique(cell_ids, return_inverse=True)[1]
        cell_ids = cell_ids * (bin_ids[:, column].max(initial=0) + 1) + bin_ids[:, column]
    _, first_rows, cell_ids = np.unique(cell_ids, return_index=True, return_inverse=True)
    return ColumnGroup(columns, first_rows, cell_ids)


def group_columns(bin_ids: Ints) -> list[ColumnGroup]:
    """Group columns, those of few bins first, while that saves products."""
    singles = [_cells((column,), bin_ids) for column in range(bin_ids.shape[1])]
    groups: list[ColumnGroup] = []
    for single in sorted(singles, key=lambda cells: len(cells.first_rows)):
        if groups:
            joint = _cells(groups[-1].columns + single.columns, bin_ids)
            if joint.n_products < groups[-1].n_products + len(bin_ids):
                groups[-1] = joint
                continue
        groups.append(single)
    return groups


def _sum_rows_of(
    key: PublicKey,
    ciphertexts: Bytes,
    codes: npt.NDArray[np.uint8 | np.uint16],
    offsets: Ints,
    nodes: npt.NDArray[np.int32],
    n_nodes: int,
) -> Residues:
    n2_ring = ring_of(key.n_squared)
    rows, sums = n2_ring.read(ciphertexts), n2_ring.ones(n_nodes * int(offsets[-1]))
    bin_ids = nodes[:, None].astype(np.int64) * offsets[-1] + offsets[:-1] + codes
    for group in group_columns(bin_ids):
        _, cells = products_by_place(n2_ring, rows, group.cell_ids)
        for column in group.columns:
            places, products = products_by_place(n2_ring, cells, bin_ids[group.first_rows, column])
            sums[places] = products
    return sums


def _pack(key: PublicKey, sums: Residues, layout: Layout) -> Bytes:
    """Pack the sums of one call, each ciphertext under a fresh mask."""
    n2_ring, n_ciphertexts = ring_of(key.n_squared), layout.n_plaintexts(len(sums))
    n_slots = max(1, min(layout.n_slots, len(sums)))
    # The first sum in the lowest slot of each ciphertext, by Horner's rule.
    padded = np.concatenate([sums, n2_ring.ones(-len(sums) % n_slots)])
    slots = padded.reshape(-1, n_slots, *padded.shape[1:])
    packed = slots[:, -1]
    for slot in range(n_slots - 2, -1, -1):
        packed = n2_ring.multiply(n2_ring.squares(packed, layout.slot_bits), slots[:, slot])
    masked = n2_ring.multiply(packed, masks_of(key).draw(n_ciphertexts))
    return n2_ring.write(masked, key.ciphertext_bytes)


def _pack_terms(key: PublicKey, ciphertexts: Bytes, terms: SumJob, layout: Layout) -> Bytes:
    n2_ring = ring_of(key.n_squared)
    rows, sums = n2_ring.read(ciphertexts), n2_ring.ones(terms.n_sums)
    for count in np.unique(terms.counts):
        counted = terms.counts == count
        rows[counted] = n2_ring.power(rows[counted], int(count))
    where, which = terms.places.astype(np.int64), terms.rows.astype(np.int64)
    places, products = products_by_place(n2_ring, rows, where, which)
    sums[places] = products
    return _pack(key, sums, layout)
