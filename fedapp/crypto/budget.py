"""Privacy accounting: how a run divides its budget, and which epsilon its noise achieves.

A private run discloses only sums of its training rows with Gaussian noise, one after the other,
each chosen adaptively. A sum that one row changes by at most d (L2), with noise of standard
deviation m d / sqrt(s), spends the share s of the budget; the shares add up to 1. So a run costs
what one Gaussian mechanism of noise multiplier m costs, however the shares are chosen: rho = 1 / (2
m^2) of zero-concentrated differential privacy, and the epsilon that dp-accounting's RDP accountant
finds for a given delta. Discrete Gaussian noise has at most the same Renyi divergences (Canonne,
Kamath and Steinke 2020, Theorem 4), so this is no approximation. The accountant of privacy loss
distributions would need some 8% less noise, but only for continuous noise.

Neighbouring tables differ in one row of one party, which has weight 0 in one of them; the numbers
of rows are the same.

Each of n parties adds noise of variance sigma^2 / (n - 1), because each knows its own noise:
without it, the sum still has noise of variance sigma^2. The noise summed over the parties is
distributed as a single draw, up to an error that is 0 in float64 at the variances in use (Kairouz,
Liu and Steinke 2021, "The Distributed Discrete Gaussian Mechanism", arXiv:2102.06387, tau of
Theorem 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from fedapp.crypto.noise import LEAST_SUMMED
from fedapp.packages import check_package

# Shares of the budget: of the mean label and of the cuts; the trees have the rest. COUNTS was the
# best of 0.08, 0.2 and 0.4 on average over three tables (simulations/README.md).
LABELS, COUNTS = 0.02, 0.4
# Splits' part of the trees' share, where sums choose them; the leaves have the rest. The best of
# 0.3, 0.5 and 0.8 on average over two tables at epsilon 1 and 8.
SPLITS = 0.8
N_COUNTS = 4  # exchanges in which the cuts are found
# Multipliers are sent as multiples of 2^-20.
MULTIPLIER_BITS = 20
LEAST_MULTIPLIER, FIRST_GUESS = 2.0**-10, 2.0


@dataclass(frozen=True, slots=True)
class Spending:
    """``times`` sums of one kind, each of which spends the same share of the budget."""

    kind: str
    times: int
    share: float


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may disclose about its rows: at most ``epsilon`` and ``delta`` for each row.

    Parameters
    ----------
    multiplier : noise of a sum that takes the whole budget: its standard deviation over the most
        that one row changes the sum.
    n_rounds : boosting rounds.
    n_parties : that add noise, >= 2.
    levels : of a tree that are split by sums; 0 where splits are drawn.
    """

    epsilon: float
    delta: float
    multiplier: float
    n_rounds: int
    n_parties: int
    levels: int = 0

    @property
    def schedule(self) -> tuple[Spending, ...]:
        """All sums over training rows that a run discloses."""
        trees = (1 - LABELS - COUNTS) / self.n_rounds
        first = Spending("labels", 1, LABELS), Spending("counts", N_COUNTS, COUNTS / N_COUNTS)
        if not self.levels:
            return (*first, Spending("tree", self.n_rounds, trees))
        splits = Spending("splits", self.n_rounds * self.levels, SPLITS * trees / self.levels)
        return (*first, splits, Spending("tree", self.n_rounds, (1 - SPLITS) * trees))

    def share(self, kind: str) -> float:
        """Share that one sum of a kind spends; scores of held-out rows have their own budget."""
        if kind == "scores":
            return 1.0
        return next(spending.share for spending in self.schedule if spending.kind == kind)

    def deviation(self, kind: str, sensitivity: float) -> float:
        """Standard deviation of the noise of a sum over all parties, including their own noise."""
        without_own = self.multiplier * sensitivity / math.sqrt(self.share(kind))
        return without_own * math.sqrt(self.n_parties / (self.n_parties - 1))

    def own_variance(self, kind: str, sensitivity: float) -> int:
        """Variance of the noise that each party adds, in squared units, rounded up.

        One row changes the sum by at most ``sensitivity`` (L2), in units. Raises a ValueError if
        the variance is too small for the parties' noise to add up to a discrete Gaussian.
        """
        square = Fraction(self.multiplier) ** 2 * Fraction(sensitivity) ** 2
        variance = math.ceil(square / (Fraction(self.share(kind)) * (self.n_parties - 1)))
        if variance < LEAST_SUMMED:
            raise ValueError(f"the variance of noise must be >= {LEAST_SUMMED}, got {variance}")
        return variance

    def holds(self) -> bool:
        """Whether the noise keeps the promise, by the accountant."""
        is_valid = min(self.multiplier, self.delta, self.n_rounds) > 0
        return is_valid and composed((self,), self.delta) <= self.epsilon

    def check(self) -> None:
        """Raise a ValueError where the noise does not keep the promise."""
        if not self.holds():
            rule = (
                f"must be of more noise to keep epsilon {self.epsilon:g} for delta {self.delta:g}"
            )
            raise ValueError(f"multiplier {rule}, got {self.multiplier:g}")


def budget_for(
    epsilon: float, delta: float, n_rounds: int, n_parties: int, levels: int = 0
) -> Budget:
    """The least noise that keeps the promise; a ConfigError if dp-accounting is missing."""
    schedule = Budget(epsilon, delta, 1.0, n_rounds, n_parties, levels).schedule
    multiplier = calibrated(epsilon, delta, schedule)
    return Budget(epsilon, delta, multiplier, n_rounds, n_parties, levels)


def calibrated(epsilon: float, delta: float, schedule: Iterable[Spending]) -> float:
    """The least multiplier for an epsilon by bisection, rounded up to a multiple of 2^-20."""
    accounting, rdp = _accounting()
    spendings = tuple(schedule)
    multiplier = accounting.calibrate_dp_mechanism(
        rdp.RdpAccountant,
        lambda candidate: _event(candidate, spendings),
        epsilon,
        delta,
        accounting.LowerEndpointAndGuess(LEAST_MULTIPLIER, FIRST_GUESS),
        tol=2.0**-MULTIPLIER_BITS,
    )
    return float(math.ceil(float(multiplier) * 2**MULTIPLIER_BITS + 1)) / 2.0**MULTIPLIER_BITS


def composed(budgets: Iterable[Budget], delta: float) -> float:
    """The epsilon of several runs over the same rows; a ConfigError if dp-accounting is missing."""
    _, rdp = _accounting()
    accountant = rdp.RdpAccountant()
    for budget in budgets:
        accountant.compose(_event(budget.multiplier, budget.schedule))
    return float(accountant.get_epsilon(delta))


def check_installed() -> None:
    """Raise a ConfigError unless dp-accounting is installed."""
    check_package("dp-accounting", "for privacy.epsilon", "privacy")


def _event(multiplier: float, schedule: Iterable[Spending]) -> Any:
    """All sums of a run in the accountant's form."""
    accounting, _ = _accounting()
    builder = accounting.DpEventBuilder()
    for spending in schedule:
        one = accounting.GaussianDpEvent(multiplier / math.sqrt(spending.share))
        builder.compose(one, spending.times)
    return builder.build()


def _accounting() -> tuple[Any, Any]:
    """dp-accounting, which takes a second to import."""
    check_installed()
    import dp_accounting
    from dp_accounting import rdp

    return dp_accounting, rdp
