"""Which bin each row has in a passive party's columns, solved from the sums of SecureBoost.

For each tree node, column and bin the active party decrypts the sums of gradients and hessians. It
has both for every row and knows which rows are in the node, so each sum is an equation in which of
these rows are in the bin. Gradients change every round, so equations add up. The attack fits the
share of each row in each bin to all equations, by accelerated projected gradients (Beck and
Teboulle 2009). It starts at the shares of the bins, which the first round reveals: there all
hessians are equal.

Where the passive party merges bins (``least-bin-rows``), a node sends sums only between the ends of
its groups; those of the roots are the finest. Then the attack solves for shares in these groups,
with equations in which rows lie above an end, from the nodes that sent it.

Success is the share of values (rows times columns) whose group gets the largest share; chance is
guessing the largest group of each column. Without merging, a group is a bin. What a value loses
because its bin is merged counts for neither: ``reverse_sums`` reads groups as they are, and counts
bins. Rows that were in the same leaves of all trees have one gradient, and sums cannot separate
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clients.secureboost.active import ActiveState, make_splits, read_party_sums
from clients.secureboost.shared import CHOSEN
from fedapp.messages.secureboost import SplitRequest
from fedapp.site.answer import phase_of
from simulations.attacks.frame import PLAIN, Attack, Outcome, Overrides, command
from simulations.attacks.heard import Heard, trained
from simulations.attacks.targets import ACTIVE, BINNED, PASSIVE, SECUREBOOST, true_bins

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
# Smallest singular value used, relative to the largest. Sums are exact to about 1e-10; smaller
# singular values would amplify that error into all shares.
RANK = 1e-6
STEPS, STILL = 400, 1e-5  # stop when no share moves more in a step


class Active:
    """An active party that collects the equations; the true codes only judge it."""

    def __init__(self) -> None:
        self.coefficients: list[Array] = []  # shape (2 n_wanted, n_rows)
        self.sums: list[Array] = []  # shape (2 n_wanted, n_bins)
        self.widths = np.empty(0, dtype=np.int64)  # bins of each column
        self.codes = np.empty((0, 0), dtype=np.int64)  # the truth: a bin more for missing values

    def note(self, heard: Heard) -> None:
        """Decrypt the sums, as the party is about to do itself."""
        if (codes := true_bins(heard)) is not None:
            self.codes = codes
        if not isinstance(heard.request, SplitRequest):
            return
        view = ActiveState.read(heard.site)
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
    """Equations of the same nodes, over some sets of groups."""

    rows: Floats  # (n_equations, n_rows), orthonormal
    sums: Floats  # (n_equations, n_sets): of the rows in each set
    sets: Ints  # (n_sets,)


def solved(
    coefficients: Array, sums: Array, widths: Ints, merged: bool = False
) -> list[tuple[Ints, Ints]]:
    """Solve for the group of bins that each row is in, for each column.

    Parameters
    ----------
    coefficients : shape (n_equations, n_rows): gradients and hessians in turn; the second is
        of all rows' hessians, which are equal.
    sums : shape (n_equations, n_bins).
    widths : bins of each column; one more is for missing values, whose sums are the rest.
    merged : nodes merge bins and send each group at its last bin; no value is missing.

    Returns
    -------
    For each column the last bin of each group, and the group of each row, int64, shape (n_rows,).
    """
    scale = np.sqrt((coefficients**2).sum(axis=1)).clip(1e-300)[:, None]
    scaled, totals = coefficients / scale, coefficients.sum(axis=1)
    whitened: dict[bytes, tuple[Floats, Array]] = {}  # by which equations, of the last column
    solutions = []
    for column_sums in np.split(sums, np.cumsum(widths)[:-1], axis=1):
        full = (
            column_sums
            if merged
            else np.hstack([column_sums, (totals - column_sums.sum(axis=1))[:, None]])
        )
        is_sent = (
            np.repeat(full[1::2] > 0, 2, axis=0) if merged else np.ones(full.shape, dtype=bool)
        )
        ends = np.flatnonzero(is_sent[0])
        # Single bins if all nodes send them; else the bins above each end but the last.
        is_single = not merged or len(ends) == 1
        members = np.eye(len(ends)) if is_single else np.triu(np.ones(2 * ends.shape), 1)[:-1]
        within = full[:, ends] @ members.T / scale
        sent_by = is_sent[:, ends[: len(members)]].T
        whitened = {
            key: whitened.get(key) or _whitened(scaled[np.frombuffer(key, dtype=bool)])
            for key in {key_row.tobytes() for key_row in sent_by}
        }
        equations = []
        for key, (rows, weights) in whitened.items():
            sets = np.flatnonzero([key_row.tobytes() == key for key_row in sent_by])
            known_sums = within[np.ix_(np.frombuffer(key, dtype=bool), sets)]
            equations.append(Equations(rows, (weights @ known_sums).astype(np.float32), sets))
        solutions.append(
            (ends, _fitted(equations, members, full[1, ends] / totals[1]).argmax(axis=1))
        )
    return solutions


def _whitened(equations: Array) -> tuple[Floats, Array]:
    """Orthonormal combinations of equations, and their weights, shape (n_kept, n_equations)."""
    left, sizes, right = np.linalg.svd(equations, full_matrices=False)
    is_large = sizes > RANK * sizes[0]
    return right[is_large].astype(np.float32), left.T[is_large] / sizes[is_large, None]


def _fitted(equations: Sequence[Equations], members: Array, shares: Array) -> Floats:
    """Shares of each row in the groups of a column, shape (n_rows, n_groups).

    ``members``, shape (n_sets, n_groups), is 1 where a set has a group; ``shares`` start the
    search.
    """
    within = members.astype(np.float32)
    step = np.float32(1 / np.linalg.norm(members, 2) ** 2)
    fit = ahead = np.tile(shares.astype(np.float32), (equations[0].rows.shape[1], 1))
    speed = 1.0
    for _ in range(STEPS):
        inside = ahead @ within.T
        errors = np.empty_like(inside)
        for equation in equations:
            errors[:, equation.sets] = equation.rows.T @ (
                equation.rows @ inside[:, equation.sets] - equation.sums
            )
        previous, fit = fit, _to_shares(ahead - step * errors @ within)
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


def attacked(overrides: Overrides) -> Outcome:
    active = Active()
    with trained({**SECUREBOOST, **overrides}, [ACTIVE, PASSIVE], active.note) as run:
        if not active.sums:  # the active party grew all trees by itself
            chance = _largest(active.codes.T)
            return Outcome(chance, chance, run.score)
        sums = np.concatenate(active.coefficients), np.concatenate(active.sums)
        solutions = solved(*sums, active.widths, merged=run.settings.least_bin_rows > 0)
        truth = [
            np.searchsorted(ends, codes)
            for (ends, _), codes in zip(solutions, active.codes.T, strict=True)
        ]
        success = np.mean(
            [codes == groups for codes, (_, groups) in zip(truth, solutions, strict=True)]
        )
        return Outcome(float(success), _largest(truth), run.score)


def _largest(columns: Iterable[Ints]) -> float:
    """Share of values in the largest group of their column."""
    return float(np.mean([np.bincount(column).max() / len(column) for column in columns]))


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
