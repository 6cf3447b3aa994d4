"""Bins of rows, solved from the sums that the active party of SecureBoost decrypts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from clients.secureboost import active as secureboost_active
from clients.secureboost import passive as secureboost_passive
from fedapp.audit.listening import Trained, Transcript
from fedapp.messages.secureboost import EncryptedSums, SplitRequest

Array = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def true_bins(transcript: Transcript, passive: str) -> Ints | None:
    """True bins of a passive party's training rows, int64, shape (n_rows, n_columns).

    A missing value has the bin after the last. None unless the message is to that party and it has
    bins. Attacks are judged by these bins and do not use them.
    """
    if transcript.site.name != passive or "table" not in transcript.site.store:
        return None
    return secureboost_passive.Passive.load(transcript.site).table.codes.astype(np.int64)


# Smallest singular value used, relative to the largest. Sums are exact to about 1e-10; smaller
# singular values would amplify that error into all shares.
RANK = 1e-6
STEPS, STILL = 400, 1e-5  # stop when no share moves more in a step


class Active:
    """An active party that collects equations of a passive party, ``most`` if there are more.

    The true codes only judge it.
    """

    def __init__(self, passive: str, most: int | None = None) -> None:
        self._passive, self._most = passive, most
        self.coefficients: list[Array] = []  # shape (2 n_wanted, n_rows)
        self.sums: list[Array] = []  # shape (2 n_wanted, n_bins)
        self.widths = np.empty(0, dtype=np.int64)  # bins of each column
        self.codes = np.empty((0, 0), dtype=np.int64)  # the truth: a bin more for missing values

    def note(self, transcript: Transcript) -> None:
        """Decrypt the sums, as the party is about to do itself."""
        if (codes := true_bins(transcript, self._passive)) is not None:
            self.codes = codes
        is_full = self._most is not None and 2 * len(self.sums) >= self._most
        if is_full or not isinstance(transcript.request, SplitRequest):
            return
        party = secureboost_active.Active.load(transcript.site)
        if party.round.chosen is not None:
            party.apply_splits(transcript.mail)
        growth, rows = party.growing(), slice(party.n_train)
        letter = transcript.mail.one(EncryptedSums, self._passive)
        histogram, _ = party.party_sums(letter, self._passive, growth)
        self.widths = party.joint.widths[self._passive]
        for index, (tree, node) in enumerate(growth.wanted):
            inside = party.trees.nodes[tree, rows] == node
            gradients = party.round.gradients
            of_node = histogram[index]
            outputs = range(len(gradients)) if party.round.has_one_tree else [tree]
            of_outputs = of_node.reshape(len(of_node), len(outputs), 2).transpose(1, 2, 0)
            for output, of_output in zip(outputs, of_outputs, strict=True):
                self.coefficients.append((gradients[output] * inside[:, None]).T)
                self.sums.append(of_output)

    def finds_planted(self, run: Trained) -> bool:
        """Whether the bins of a row are found that is alone in a node."""
        pair = self.coefficients[0][:, self.coefficients[0].any(axis=0)][:, :1]  # of any row
        coefficients = np.pad(np.concatenate(self.coefficients), ((0, 2), (0, 1)))
        coefficients[-2:, -1:] = pair
        bins = np.concatenate([np.arange(width) == width - 1 for width in self.widths])
        sums = np.concatenate((*self.sums, pair * bins))
        return bool((solved(coefficients, sums, self.widths)[-1] == self.widths - 1).all())


def solved(coefficients: Array, sums: Array, widths: Ints) -> Ints:
    """Solve for the bin that each row is in, for each column.

    Parameters
    ----------
    coefficients : shape (n_equations, n_rows): gradients and hessians in turn; the second is
        of all rows' hessians, which are equal.
    sums : shape (n_equations, n_bins).
    widths : bins of each column; one more is for missing values, whose sums are the rest.

    Returns
    -------
    The bin of each row in each column, shape (n_rows, n_columns).
    """
    scale = np.sqrt((coefficients**2).sum(axis=1)).clip(1e-300)[:, None]
    totals = coefficients.sum(axis=1)
    left, sizes, right = np.linalg.svd(coefficients / scale, full_matrices=False)
    is_large = sizes > RANK * sizes[0]
    # Orthonormal combinations of the equations, and their weights.
    rows, weights = right[is_large].astype(np.float32), left.T[is_large] / sizes[is_large, None]
    columns = []
    for column_sums in np.split(sums, np.cumsum(widths)[:-1], axis=1):
        full = np.hstack([column_sums, (totals - column_sums.sum(axis=1))[:, None]])
        combined = (weights @ (full / scale)).astype(np.float32)
        columns.append(_fitted(rows, combined, full[1] / totals[1]).argmax(axis=1))
    return np.stack(columns, axis=1)


def _fitted(rows: Floats, sums: Floats, shares: Array) -> Floats:
    """Shares of each row in the bins of a column, shape (n_rows, n_bins).

    ``rows``, shape (n_equations, n_rows), are orthonormal; ``shares`` start the search.
    """
    fit = ahead = np.tile(shares.astype(np.float32), (rows.shape[1], 1))
    speed = 1.0
    for _ in range(STEPS):
        previous, fit = fit, _to_shares(ahead - rows.T @ (rows @ ahead - sums))
        if np.abs(fit - previous).max() < STILL:
            break
        # Momentum: extrapolate along the last step.
        speed, last = (1 + np.sqrt(1 + 4 * speed**2)) / 2, speed
        ahead = fit + np.float32((last - 1) / speed) * (fit - previous)
    return fit


def _to_shares(values: Floats) -> Floats:
    """Project rows to the simplex: >= 0, sum 1 (Duchi et al. 2008)."""
    ordered = -np.sort(-values, axis=1)
    over = np.cumsum(ordered, axis=1) - 1
    counts = np.arange(1, values.shape[1] + 1, dtype=np.float32)
    last = (ordered * counts > over).sum(axis=1)
    level = over[np.arange(len(values)), last - 1] / last.astype(np.float32)
    nearest: Floats = np.maximum(values - level[:, None], 0)
    return nearest


def largest_bins(columns: Iterable[Ints]) -> float:
    """Share of values in the largest bin of their column."""
    return float(np.mean([np.bincount(column).max() / len(column) for column in columns]))
