"""Which bin each row has in a passive party's columns, solved from the sums of SecureBoost.

For each tree node, column and bin the active party decrypts the sums of gradients and hessians. It
has both of every row, and knows which rows are in the node: each sum is an equation in which of
these rows are in the bin. Rounds have other gradients, so equations add up. The share of a row in
each bin is looked for that fits all of them, by accelerated projected gradients (Beck and Teboulle
2009), from the shares of the bins on, which the first round tells: there all hessians are alike.

Where the passive party merges bins (``least-bin-rows``), a node tells sums between the ends of its
groups alone, of which those of the roots are the finest. Then the shares in these groups are looked
for, by equations in which rows lie above an end, from the nodes that tell it.

Success is the share of values (rows times columns) whose group has the largest share in the end;
chance, that of guessing the largest group of each column. Where nothing is merged a group is a bin.
What a value loses because its bin is merged is no part of either: ``reverse_sums`` reads groups as
they are, and counts bins. Rows that have been in the same leaves of all trees have one gradient,
and nobody can tell them apart by sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clients.secureboost.phases import CHOSEN
from clients.secureboost.round import make_splits, read_party_sums
from clients.secureboost.view import View
from fedapp.messages.secureboost import SplitRequest
from fedapp.site.phases import phase_of
from simulations.attacks.frame import PLAIN, Attack, Outcome, Overrides, command
from simulations.attacks.heard import Heard, trained
from simulations.attacks.targets import ACTIVE, BINNED, PASSIVE, SECUREBOOST, true_bins

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
# Of singular values, of the largest. Sums are known to about 1e-10: what smaller ones tell is lost
# in that, and would bring it into all shares.
RANK = 1e-6
STEPS, STILL = 400, 1e-5  # no share moves more in a step: that was the last one


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


@dataclass(frozen=True, slots=True, eq=False)
class Equations:
    """What the same nodes tell of the rows in some sets of groups.

    Parameters
    ----------
    rows : float32, shape (n_equations, n_rows), orthonormal.
    sums : float32, shape (n_equations, n_sets): of the rows in each set.
    sets : int64, shape (n_sets,): which these are.
    """

    rows: Floats
    sums: Floats
    sets: Ints


def solved(
    coefficients: Array, sums: Array, widths: Ints, merged: bool = False
) -> list[tuple[Ints, Ints]]:
    """The group of bins that each row is in, of each column.

    Parameters
    ----------
    coefficients : float64, shape (n_equations, n_rows): of gradients and hessians in turn; the
        second is of all rows' hessians, alike.
    sums : float64, shape (n_equations, n_bins).
    widths : bins of each column; one more is of missing values, whose sums are the rest.
    merged : nodes merge bins, and tell of each group in its last one; no value is missing.

    Returns
    -------
    The last bin of each group, and the group of each row, int64, shape (n_rows,).
    """
    scale = np.sqrt((coefficients**2).sum(axis=1)).clip(1e-300)[:, None]
    scaled, totals = coefficients / scale, coefficients.sum(axis=1)
    whitened: dict[bytes, tuple[Floats, Array]] = {}  # by which equations, of the last column
    found = []
    for own in np.split(sums, np.cumsum(widths)[:-1], axis=1):
        full = own if merged else np.hstack([own, (totals - own.sum(axis=1))[:, None]])
        told = np.repeat(full[1::2] > 0, 2, axis=0) if merged else np.ones(full.shape, dtype=bool)
        ends = np.flatnonzero(told[0])
        # Bins one by one where all nodes tell them; else those above each end but the last.
        singly = not merged or len(ends) == 1
        members = np.eye(len(ends)) if singly else np.triu(np.ones(2 * ends.shape), 1)[:-1]
        within = full[:, ends] @ members.T / scale
        by = told[:, ends[: len(members)]].T
        whitened = {
            key: whitened.get(key) or _whitened(scaled[np.frombuffer(key, dtype=bool)])
            for key in {one.tobytes() for one in by}
        }
        equations = []
        for key, (rows, weights) in whitened.items():
            sets = np.flatnonzero([one.tobytes() == key for one in by])
            known = within[np.ix_(np.frombuffer(key, dtype=bool), sets)]
            equations.append(Equations(rows, (weights @ known).astype(np.float32), sets))
        found.append((ends, _fitted(equations, members, full[1, ends] / totals[1]).argmax(axis=1)))
    return found


def _whitened(equations: Array) -> tuple[Floats, Array]:
    """Orthonormal combinations of equations, and their weights, shape (n_found, n_equations)."""
    left, sizes, right = np.linalg.svd(equations, full_matrices=False)
    kept = sizes > RANK * sizes[0]
    return right[kept].astype(np.float32), left.T[kept] / sizes[kept, None]


def _fitted(equations: Sequence[Equations], members: Array, shares: Array) -> Floats:
    """Shares of each row in the groups of a column, shape (n_rows, n_groups).

    Parameters
    ----------
    members : shape (n_sets, n_groups): 1 where a set has a group.
    shares : of all rows together, to begin with.
    """
    within = members.astype(np.float32)
    step = np.float32(1 / np.linalg.norm(members, 2) ** 2)
    found = ahead = np.tile(shares.astype(np.float32), (equations[0].rows.shape[1], 1))
    speed = 1.0
    for _ in range(STEPS):
        inside = ahead @ within.T
        errors = np.empty_like(inside)
        for one in equations:
            errors[:, one.sets] = one.rows.T @ (one.rows @ inside[:, one.sets] - one.sums)
        before, found = found, _to_shares(ahead - step * errors @ within)
        if np.abs(found - before).max() < STILL:
            break
        speed, last = (1 + np.sqrt(1 + 4 * speed**2)) / 2, speed
        ahead = found + np.float32((last - 1) / speed) * (found - before)
    return found


def _to_shares(values: Floats) -> Floats:
    """The nearest rows that are >= 0 and add up to 1 (Duchi et al. 2008)."""
    ordered = -np.sort(-values, axis=1)
    over = np.cumsum(ordered, axis=1) - 1
    counts = np.arange(1, values.shape[1] + 1, dtype=np.float32)
    last = (ordered * counts > over).sum(axis=1)
    level = over[np.arange(len(values)), last - 1] / last.astype(np.float32)
    nearest: Floats = np.maximum(values - level[:, None], 0)
    return nearest


def attacked(overrides: Overrides) -> Outcome:
    """Solve for the bins of the passive party's training rows."""
    active = Active()
    with trained({**SECUREBOOST, **overrides}, [ACTIVE, PASSIVE], active.note) as run:
        if not active.sums:  # all rounds were grown alone
            chance = _largest(active.codes.T)
            return Outcome(chance, chance, run.score)
        sums = np.concatenate(active.coefficients), np.concatenate(active.sums)
        found = solved(*sums, active.widths, merged=run.settings.least_bin_rows > 0)
        truth = [
            np.searchsorted(ends, own) for (ends, _), own in zip(found, active.codes.T, strict=True)
        ]
        success = np.mean([own == groups for own, (_, groups) in zip(truth, found, strict=True)])
        return Outcome(float(success), _largest(truth), run.score)


def _largest(columns: Iterable[Ints]) -> float:
    """Share of values in the largest group of their column."""
    return float(np.mean([np.bincount(own).max() / len(own) for own in columns]))


ATTACK = Attack(
    name="solved_bins",
    holder="the active party of SecureBoost, from the sums that it decrypts",
    measure="share of a passive party's values whose group is found; chance: the largest group",
    data=BINNED,
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
