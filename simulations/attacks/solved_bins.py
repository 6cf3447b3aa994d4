"""Which bin each row has in a passive party's columns, solved from the sums of SecureBoost.

For each tree node, column and bin the active party decrypts the sums of gradients and hessians. It
has both of every row, and knows which rows are in the node: each sum is an equation in which of
these rows are in the bin. Rounds have other gradients, so equations add up. The share of a row in
each bin is looked for that fits all of them, by accelerated projected gradients (Beck and Teboulle
2009), from the shares of the bins on, which the first round tells: there all hessians are alike.

Where the passive party merges bins (``least-bin-rows``), a node tells sums between the ends of its
groups alone, of which those of the roots are the finest. Of each such end is looked for which rows
lie above it, from the nodes that tell it: the solution nearest to the share of all rows.

Success is the share of values (rows times columns) whose bin has the largest share in the end;
chance, that of guessing the largest bin of each column. Rows that have been in the same leaves of
all trees have one gradient, and nobody can tell them apart by sums.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clients.secureboost.phases import CHOSEN
from clients.secureboost.round import make_splits, read_party_sums
from clients.secureboost.view import View
from fedapp.messages.secureboost import SplitRequest
from fedapp.site.phases import phase_of
from simulations.attacks.frame import PLAIN, Attack, Outcome, Overrides, command
from simulations.attacks.heard import Heard, trained
from simulations.attacks.targets import (
    ACTIVE,
    CREDIT,
    IONOSPHERE,
    PASSIVE,
    SECUREBOOST,
    true_bins,
)

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
RANK = 1e-9  # of singular values, of the largest; what is smaller is rounding
STEPS = 60


class Active:
    """An active party that keeps the equations which its sums are.

    Of the passive party it also keeps the truth, which the attack is judged by and does not use.
    """

    def __init__(self) -> None:
        self.coefficients: list[Array] = []  # shape (2 n_wanted, n_rows)
        self.sums: list[Array] = []  # shape (2 n_wanted, n_bins)
        self.widths = np.empty(0, dtype=np.int64)  # bins of each column
        self.codes = np.empty((0, 0), dtype=np.int64)  # the truth: a bin more for missing values

    def note(self, heard: Heard) -> None:
        """Decrypt what has come, as the party itself is about to."""
        if (codes := true_bins(heard)) is not None:
            self.codes = codes
        if not isinstance(heard.request, SplitRequest):
            return
        view = View.read(heard.site)
        if phase_of(view.store) == CHOSEN:
            make_splits(view, heard.mail)
        growth, rows = view.growth(), slice(view.n_train)
        histogram, _ = read_party_sums(view, heard.mail, PASSIVE, growth)
        self.widths = view.joint.widths[PASSIVE]
        for place, (tree, node) in enumerate(growth.wanted_pairs):
            inside = view.store["nodes"][tree, rows] == node
            self.coefficients.append((view.store["gradients"][tree] * inside[:, None]).T)
            self.sums.append(histogram[place].T)


def solved(coefficients: Array, sums: Array, widths: Ints) -> Ints:
    """The bin of each row in each column.

    Parameters
    ----------
    coefficients : float64, shape (n_equations, n_rows): the second is of all rows' hessians, alike.
    sums : float64, shape (n_equations, n_bins).
    widths : bins of each column; one more is of missing values, whose sums are the rest.

    Returns
    -------
    int64, shape (n_rows, n_columns).
    """
    scale = np.sqrt((coefficients**2).sum(axis=1)).clip(1e-300)[:, None]
    left, sizes, right = np.linalg.svd(coefficients / scale, full_matrices=False)
    kept, totals = sizes > RANK * sizes[0], coefficients.sum(axis=1)
    found = []
    for own in np.split(sums, np.cumsum(widths)[:-1], axis=1):
        full = np.hstack([own, (totals - own.sum(axis=1))[:, None]])
        wanted = (left.T @ (full / scale))[kept] / sizes[kept, None]
        found.append(_fitted(right[kept], wanted, full[1] / totals[1]).argmax(axis=1))
    return np.stack(found, axis=1)


def _fitted(equations: Array, sums: Array, shares: Array) -> Array:
    """Shares of each row in the bins of a column, float64, shape (n_rows, n_bins).

    Parameters
    ----------
    equations : float64, shape (n_equations, n_rows), orthonormal, so that steps have length 1.
    shares : of all rows together, to begin with.
    """
    found = ahead = np.tile(shares, (equations.shape[1], 1))
    speed = 1.0
    for _ in range(STEPS):
        before, found = found, _to_shares(ahead - equations.T @ (equations @ ahead - sums))
        speed, last = (1 + np.sqrt(1 + 4 * speed**2)) / 2, speed
        ahead = found + (last - 1) / speed * (found - before)
    return found


def _to_shares(values: Array) -> Array:
    """The nearest rows that are >= 0 and add up to 1 (Duchi et al. 2008)."""
    ordered = -np.sort(-values, axis=1)
    over = np.cumsum(ordered, axis=1) - 1
    counts = np.arange(1, values.shape[1] + 1)
    last = (ordered * counts > over).sum(axis=1)
    level = over[np.arange(len(values)), last - 1] / last
    nearest: Array = np.maximum(values - level[:, None], 0)
    return nearest


def solved_between(coefficients: Array, sums: Array, widths: Ints) -> Ints:
    """The same where nodes merge bins: of each group of a root, its last bin; no value is missing.

    Parameters
    ----------
    coefficients, sums : gradients and hessians in turn; the first two are of the first root.
    """
    scale = np.sqrt((coefficients**2).sum(axis=1)).clip(1e-300)
    left = coefficients / scale[:, None]
    products, totals = left @ left.T, left.sum(axis=1)
    of_hessians = np.arange(len(sums)) | 1
    found = []
    for own in np.split(sums, np.cumsum(widths)[:-1], axis=1):
        above = own[:, ::-1].cumsum(axis=1)[:, ::-1] - own
        told = own[of_hessians] > 0  # a bin with rows ends a group
        ends = np.flatnonzero(told[0])
        shares = [np.ones(left.shape[1])]
        for end in ends[:-1].tolist():
            known = np.flatnonzero(told[:, end])
            share = above[1, end] / coefficients[1].sum()
            rest = above[known, end] / scale[known] - share * totals[known]
            values, vectors = np.linalg.eigh(products[np.ix_(known, known)])
            kept = vectors[:, values > RANK * values[-1]]
            weights = kept @ ((kept.T @ rest) / values[values > RANK * values[-1]])
            shares.append(share + weights @ left[known])
        lying = np.stack([*shares, np.zeros(left.shape[1])], axis=1)
        found.append(ends[(lying[:, :-1] - lying[:, 1:]).argmax(axis=1)])
    return np.stack(found, axis=1)


def attacked(overrides: Overrides) -> Outcome:
    """Solve for the bins of the passive party's training rows."""
    active = Active()
    with trained({**SECUREBOOST, **overrides}, [ACTIVE, PASSIVE], active.note) as run:
        truth = active.codes
        chance = float(np.mean([np.bincount(own).max() / len(own) for own in truth.T]))
        if not active.sums:  # all rounds were grown alone
            return Outcome(chance, chance, run.score)
        sums = np.concatenate(active.coefficients), np.concatenate(active.sums)
        solve = solved_between if run.settings.least_bin_rows else solved
        success = float((solve(*sums, active.widths) == truth).mean())
        return Outcome(success, chance, run.score)


ATTACK = Attack(
    name="solved_bins",
    holder="the active party of SecureBoost, from the sums that it decrypts",
    measure="share of a passive party's values whose bin is found; chance: the largest bin",
    data={
        "ionosphere": IONOSPHERE,
        "default-credit": CREDIT,
    },
    ways={
        PLAIN: {},
        "50 rounds": {"num-boost-round": 50},
        "max-depth=2": {"max-depth": 2},
        "max-bin=8": {"max-bin": 8},
        "first-trees=5": {"secureboost.first-trees": 5},
        "goss": {"secureboost.goss": True},
        "least-bin-rows=5": {"least-bin-rows": 5},
        "least-bin-rows=20": {"least-bin-rows": 20},
        "least-bin-rows=20, 50 rounds": {"least-bin-rows": 20, "num-boost-round": 50},
    },
    run=attacked,
)

if __name__ == "__main__":
    command(ATTACK)
