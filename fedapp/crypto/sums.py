"""Sums of encrypted rows per tree node, column and bin, packed into few ciphertexts.

A sum is a product of ciphertexts mod n^2, and one product costs microseconds, so there should be
few. Columns are taken together where that helps: the rows of a tree node that have the same bins in
both of two columns are multiplied once into a joint cell, and the cells, far fewer than rows, into
the bins of either column.

    rows      --->  cells (column 0 x column 1)  --->  bins of column 0
    20,000          1,024                        --->  bins of column 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedapp.crypto.integers import Bytes
from fedapp.crypto.keys import PrivateKey, PublicKey
from fedapp.crypto.masks import masks_of
from fedapp.crypto.packing import FixedPoint, PairLayout, SumLayout
from fedapp.crypto.paillier import (
    CALLS_PER_WORKER,
    check_ciphertexts,
    decrypt,
    encrypt,
    rerandomise,
    share_out,
)
from fedapp.crypto.rings import Residues, products_by_place, ring, share
from fedapp.crypto.workers import Workers

Ints = npt.NDArray[np.int64]

# Fewer rows than this are not worth a message to another process; more are not summed at once.
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
    codes : uint8 or uint16, shape (n_rows, n_columns): bin of a value; where values are missing
        their bin is one more bin of the column, by custom the last.
    offsets : int64, shape (n_columns + 1,): bins of column f are ``offsets[f]`` to
        ``offsets[f+1]``.
    nodes : int32, shape (n_rows,): slot of the row's node among those to sum, -1 for none.
    n_nodes : int, >= 0.
    workers : processes to share the work.

    Returns
    -------
    ``n_nodes * offsets[-1]`` sums, the bins of a node one after the other, residues mod n^2. Where
    no row falls it is 1, the encryption of 0 without a mask: all must be packed, or re-randomised,
    before they leave.

    Raises
    ------
    ValueError : shapes differ, or a code or a node is out of range.
    """
    _check_rows(len(ciphertexts), codes, offsets, nodes, n_nodes)
    rows = np.flatnonzero(nodes >= 0)
    own, most = ring(key.n_squared), MOST_ROWS * workers.n_workers
    sums = own.ones(n_nodes * int(offsets[-1]))
    for first in range(0, len(rows), most):
        some = rows[first : first + most]
        n_chunks = min(workers.n_workers, max(1, len(some) // FEWEST_ROWS))
        calls = [
            (key, ciphertexts[chunk], codes[chunk], offsets, nodes[chunk], n_nodes)
            for chunk in np.array_split(some, n_chunks)
        ]
        for found in share(workers, _sum_rows_of, calls):
            sums = own.multiply(sums, found)
    return sums


def choose(
    key: PublicKey, ciphertexts: Bytes, chosen: npt.NDArray[np.bool_], workers: Workers
) -> Bytes:
    """Chosen ciphertexts under fresh masks, and fresh encryptions of 0 in place of the others.

    Parameters
    ----------
    ciphertexts : uint8, shape (n, ciphertext_bytes), checked.
    chosen : bool, shape (n,).

    Returns
    -------
    uint8, shape (n, ciphertext_bytes); whether one was chosen cannot be seen from it.
    """
    kept = np.array(ciphertexts)
    kept[~chosen] = 0
    kept[~chosen, -1] = 1  # 0 under the mask 1, which gets a fresh one like all the others
    return rerandomise(key, kept, workers)


def pack_sums(
    key: PublicKey, sums: Residues, layout: PairLayout | SumLayout, workers: Workers
) -> Bytes:
    """Put sums side by side in few ciphertexts, each under a fresh mask: fit to leave.

    Parameters
    ----------
    sums : n residues mod n^2.
    workers : processes to share the work.

    Returns
    -------
    uint8, shape (layout.n_plaintexts(n), ciphertext_bytes).
    """
    slots = layout.n_slots
    shares = share_out(layout.n_plaintexts(len(sums)), workers)
    calls = [(key, sums[first * slots : last * slots], layout) for first, last in shares]
    packed = share(workers, _pack, calls)
    return np.concatenate([np.empty((0, key.ciphertext_bytes), np.uint8), *packed])


def read_sums(
    key: PrivateKey,
    ciphertexts: Bytes,
    layout: PairLayout,
    scale: FixedPoint,
    n_sums: int,
    workers: Workers,
) -> npt.NDArray[np.float64]:
    """Decrypt, range-check and unpack what ``pack_sums`` made.

    Parameters
    ----------
    ciphertexts : uint8, shape (layout.n_plaintexts(n_sums), ciphertext_bytes); checked here.
    scale : that of the rows.
    n_sums : int, >= 0.
    workers : processes to share the work.

    Returns
    -------
    float64, shape (n_sums, n_outputs, 2): sums of gradients and hessians, exact sums of the rows'
    fixed-point values rounded once.

    Raises
    ------
    ValueError : not ciphertexts under this key, another number of them, or a sum out of range.
    """
    check_ciphertexts(key.public, ciphertexts)
    fields = layout.unpack(decrypt(key, ciphertexts, workers), n_sums)
    return scale.decode(fields, layout.n_outputs)


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What is summed, where each sum has rows of its own.

    Parameters
    ----------
    rows, places : int32, shape (n_terms,): rows, and the sum that each goes into.
    counts : uint8, shape (n_rows,): how often each row counts, wherever it does.
    n_sums : int: each has a term.
    """

    rows: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]
    counts: npt.NDArray[np.uint8]
    n_sums: int


def pack_terms(
    key: PublicKey,
    ciphertexts: Bytes,
    jobs: Sequence[Terms],
    layout: SumLayout,
    workers: Workers,
) -> Bytes:
    """Sum encrypted rows, and put the sums of each job side by side, under fresh masks.

    Parameters
    ----------
    ciphertexts : uint8, shape (n_rows, ciphertext_bytes), checked.
    jobs : what to sum; no ciphertext has sums of two of them.
    workers : processes to share the jobs.

    Returns
    -------
    uint8, shape (n, ciphertext_bytes): ``layout.n_plaintexts(n_sums)`` rows a job.
    """
    packed = [np.empty((0, key.ciphertext_bytes), np.uint8)]
    # A call takes its rows along, so few are made at a time.
    n_calls = CALLS_PER_WORKER * workers.n_workers
    for first in range(0, len(jobs), n_calls):
        own = [_own_rows(ciphertexts, job) for job in jobs[first : first + n_calls]]
        packed += share(workers, _pack_terms, [(key, *rows, layout) for rows in own])
    return np.concatenate(packed)


def _own_rows(ciphertexts: Bytes, job: Terms) -> tuple[Bytes, Terms]:
    """The rows of one job alone, and its terms in their numbers."""
    used, rows = np.unique(job.rows, return_inverse=True)
    return ciphertexts[used], replace(job, rows=rows.astype(np.int32), counts=job.counts[used])


def read_terms(
    key: PrivateKey,
    ciphertexts: Bytes,
    layout: SumLayout,
    wanted: Sequence[npt.NDArray[np.bool_]],
    workers: Workers,
) -> list[npt.NDArray[np.float64]]:
    """Decrypt, range-check and unpack what ``pack_terms`` made.

    Parameters
    ----------
    ciphertexts : uint8, shape (n, ciphertext_bytes); checked here.
    wanted : of each job, bool, shape (n_sums,): which sums are to be read.

    Returns
    -------
    Of each job, float64, shape (n_sums, n_fields); what shares no ciphertext with a wanted sum is
    0 unread.

    Raises
    ------
    ValueError : not ciphertexts under this key, another number of them, or a sum out of range.
    """
    sizes = [layout.n_plaintexts(len(job)) for job in wanted]
    if len(ciphertexts) != sum(sizes):
        raise ValueError(f"ciphertexts must be {sum(sizes)}, got {len(ciphertexts)}")
    check_ciphertexts(key.public, ciphertexts)
    ends = np.cumsum([0, *sizes]).tolist()
    read = np.zeros(len(ciphertexts), dtype=np.bool_)
    for job, end in zip(wanted, ends, strict=False):
        read[end + np.flatnonzero(job) // layout.n_slots] = True
    plaintexts = [0] * len(ciphertexts)
    for place, found in zip(
        np.flatnonzero(read), decrypt(key, ciphertexts[read], workers), strict=True
    ):
        plaintexts[place] = found
    return [
        layout.unpack(plaintexts[start:end], len(job))
        for job, start, end in zip(wanted, ends, ends[1:], strict=False)
    ]


def self_test(key: PrivateKey) -> None:
    """Encrypt, add, pack, re-randomise, decrypt and compare, on a few rows with known sums.

    Raises
    ------
    RuntimeError : a sum came out wrong.
    """
    gradients = np.array([[-1, 0.25], [0.5, 0.125], [1, 0]], dtype=np.float32)[:, None]
    scale, workers = FixedPoint((1, 0)), Workers(1)
    layout = PairLayout(key.public.bits, len(gradients))
    rows = encrypt(key, layout.pack(scale.encode(gradients)), workers)
    masked = rerandomise(key.public, rows, workers)
    codes, nodes = np.array([[0], [0], [2]], np.uint8), np.zeros(3, np.int32)
    sums = sum_rows(key.public, masked, codes, np.array([0, 3]), nodes, 1, workers)
    reply = pack_sums(key.public, sums, layout, workers)
    found = read_sums(key, reply, layout, scale, 3, workers)
    if (masked == rows).all(axis=1).any() or found[:, 0].tolist() != [
        [-0.5, 0.375],
        [0, 0],
        [1, 0],
    ]:
        raise RuntimeError("Paillier arithmetic must give back known sums, got others")


def _check_rows(
    n_rows: int,
    codes: npt.NDArray[np.uint8 | np.uint16],
    offsets: Ints,
    nodes: npt.NDArray[np.int32],
    n_nodes: int,
) -> None:
    """Refuse what does not fit together."""
    if codes.shape != (n_rows, len(offsets) - 1):
        raise ValueError(f"codes must be of shape {(n_rows, len(offsets) - 1)}, got {codes.shape}")
    if nodes.shape != (n_rows,):
        raise ValueError(f"nodes must be of shape {(n_rows,)}, got {nodes.shape}")
    if n_rows and not -1 <= nodes.min() <= nodes.max() < n_nodes:
        raise ValueError(f"nodes must be -1 to {n_nodes - 1}, got {nodes.min()} to {nodes.max()}")
    if (codes >= np.diff(offsets)).any():
        raise ValueError("codes must be below their column's bins, got one that is not")


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Where rows fall that are told apart by node and some columns' bins."""

    columns: tuple[int, ...]
    first_rows: Ints  # of each cell
    cell_ids: Ints  # of each row

    @property
    def n_products(self) -> int:
        """Products that the bins of these columns take, up to a constant."""
        return len(self.cell_ids) + (len(self.columns) - 1) * len(self.first_rows)


def _cells(columns: tuple[int, ...], bin_ids: Ints) -> Cells:
    """Tell rows apart by some columns of ``bin_ids``."""
    cell_ids = bin_ids[:, columns[0]]
    for column in columns[1:]:
        # Each step numbers the cells anew, so that the product never leaves 64 bits.
        cell_ids = np.unique(cell_ids, return_inverse=True)[1]
        cell_ids = cell_ids * (bin_ids[:, column].max(initial=0) + 1) + bin_ids[:, column]
    _, first_rows, cell_ids = np.unique(cell_ids, return_index=True, return_inverse=True)
    return Cells(columns, first_rows, cell_ids)


def group_columns(bin_ids: Ints) -> list[Cells]:
    """Take columns together, those of few bins first, while that saves products."""
    singles = [_cells((column,), bin_ids) for column in range(bin_ids.shape[1])]
    groups: list[Cells] = []
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
    """Sums of some of the rows."""
    own = ring(key.n_squared)
    rows, sums = own.read(ciphertexts), own.ones(n_nodes * int(offsets[-1]))
    bin_ids = nodes[:, None].astype(np.int64) * offsets[-1] + offsets[:-1] + codes
    for group in group_columns(bin_ids):
        _, cells = products_by_place(own, rows, group.cell_ids)
        for column in group.columns:
            places, found = products_by_place(own, cells, bin_ids[group.first_rows, column])
            sums[places] = found
    return sums


def _pack(key: PublicKey, sums: Residues, layout: PairLayout | SumLayout) -> Bytes:
    """One call's ciphertexts, each of several sums and under a fresh mask."""
    own, n_ciphertexts = ring(key.n_squared), layout.n_plaintexts(len(sums))
    n_slots = max(1, min(layout.n_slots, len(sums)))
    # The first sum in the lowest slot of each ciphertext, by Horner's rule.
    padded = np.concatenate([sums, own.ones(-len(sums) % n_slots)])
    slots = padded.reshape(-1, n_slots, *padded.shape[1:])
    packed = slots[:, -1]
    for slot in range(n_slots - 2, -1, -1):
        packed = own.multiply(own.squares(packed, layout.slot_bits), slots[:, slot])
    masked = own.multiply(packed, masks_of(key).draw(n_ciphertexts))
    return own.write(masked, key.ciphertext_bytes)


def _pack_terms(key: PublicKey, ciphertexts: Bytes, terms: Terms, layout: SumLayout) -> Bytes:
    """One job's sums."""
    own = ring(key.n_squared)
    rows, sums = own.read(ciphertexts), own.ones(terms.n_sums)
    for count in np.unique(terms.counts):
        counted = terms.counts == count
        rows[counted] = own.power(rows[counted], int(count))
    where, which = terms.places.astype(np.int64), terms.rows.astype(np.int64)
    places, found = products_by_place(own, rows, where, which)
    sums[places] = found
    return _pack(key, sums, layout)
