"""What noise costs: how the budget of a run is divided, and which epsilon its noise comes to.

All that a private run tells of its training rows are sums with Gaussian noise, one after the other,
each chosen by those before it. A sum that one row moves by at most d (L2), with noise of standard
deviation m d / sqrt(s), spends the share s of the budget; all shares together are 1. So whatever
the shares are, a run costs what one Gaussian mechanism of the noise multiplier m costs: rho =
1 / (2 m^2) of zero-concentrated differential privacy, and the epsilon for a given delta that
dp-accounting's RDP accountant finds. Discrete Gaussian noise has the same Renyi divergences at most
(Canonne, Kamath and Steinke 2020, Theorem 4), so this is no approximation; the accountant of
privacy loss distributions would give some 8% less noise, for continuous noise.

Neighbouring tables differ in one row of one party, which counts for nothing in one of them; the
numbers of rows are the same.

Each of n parties adds noise of variance sigma^2 / (n - 1), because each knows its own: without it,
the sum still has noise of variance sigma^2. Its sum over the parties is that of one draw, up to an
error that is 0 in float64 at the variances in use (Kairouz, Liu and Steinke 2021, "The Distributed
Discrete Gaussian Mechanism", arXiv:2102.06387, tau of Theorem 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from fedapp.crypto.noise import LEAST_SUMMED
from fedapp.packages import check_package

# Shares of the budget: of the mean label, of the cuts, and the trees' the rest. That of the cuts is
# the best of 0.08, 0.2 and 0.4 on average over three tables (simulations/README.md).
LABELS, COUNTS = 0.02, 0.4
# Of the trees' share, where they are split by sums; the leaves have the rest. The best of 0.3, 0.5
# and 0.8 on average over two tables at epsilon 1 and 8.
SPLITS = 0.8
N_COUNTS = 4  # exchanges in which the cuts are found
# A multiplier is told as a multiple of 2^-20.
MULTIPLIER_BITS = 20
LEAST_MULTIPLIER, FIRST_GUESS = 2.0**-10, 2.0


@dataclass(frozen=True, slots=True)
class Spending:
    """So many sums of a kind, each of which spends the same share of the budget."""

    kind: str
    times: int
    share: float


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may tell of its rows.

    Parameters
    ----------
    epsilon, delta : that are promised for a row.
    multiplier : standard deviation of the noise of a sum that takes the whole budget, over the most
        that one row moves it.
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
        """All that is told of training rows."""
        trees = (1 - LABELS - COUNTS) / self.n_rounds
        first = Spending("labels", 1, LABELS), Spending("counts", N_COUNTS, COUNTS / N_COUNTS)
        if not self.levels:
            return (*first, Spending("tree", self.n_rounds, trees))
        splits = Spending("splits", self.n_rounds * self.levels, SPLITS * trees / self.levels)
        return (*first, splits, Spending("tree", self.n_rounds, (1 - SPLITS) * trees))

    def share(self, kind: str) -> float:
        """What one sum of a kind spends. The scores of held-out rows spend their own budget."""
        if kind == "scores":
            return 1.0
        return next(spending.share for spending in self.schedule if spending.kind == kind)

    def deviation(self, kind: str, sensitivity: float) -> float:
        """Of the noise of one sum over all parties, their own noise among it."""
        own = self.multiplier * sensitivity / math.sqrt(self.share(kind))
        return own * math.sqrt(self.n_parties / (self.n_parties - 1))

    def own_variance(self, kind: str, sensitivity: float) -> int:
        """Of the noise that each party adds.

        Parameters
        ----------
        sensitivity : most that one row moves the sum (L2), in units.

        Returns
        -------
        In squares of units; rounded up.

        Raises
        ------
        ValueError : it is so small that sums of noise would not be as if drawn at once.
        """
        square = Fraction(self.multiplier) ** 2 * Fraction(sensitivity) ** 2
        found = math.ceil(square / (Fraction(self.share(kind)) * (self.n_parties - 1)))
        if found < LEAST_SUMMED:
            raise ValueError(f"the variance of noise must be >= {LEAST_SUMMED}, got {found}")
        return found

    def holds(self) -> bool:
        """Whether the noise keeps what is promised, by the accountant."""
        is_one = min(self.multiplier, self.delta, self.n_rounds) > 0
        return is_one and composed((self,), self.delta) <= self.epsilon

    def check(self) -> None:
        """Raise a ValueError where the noise does not keep what is promised."""
        if not self.holds():
            rule = (
                f"must be of more noise to keep epsilon {self.epsilon:g} for delta {self.delta:g}"
            )
            raise ValueError(f"multiplier {rule}, got {self.multiplier:g}")


def budget_for(
    epsilon: float, delta: float, n_rounds: int, n_parties: int, levels: int = 0
) -> Budget:
    """The least noise that keeps what is promised; arguments as of ``Budget``.

    Raises
    ------
    ConfigError : dp-accounting is not installed.
    """
    schedule = Budget(epsilon, delta, 1.0, n_rounds, n_parties, levels).schedule
    multiplier = calibrated(epsilon, delta, schedule)
    return Budget(epsilon, delta, multiplier, n_rounds, n_parties, levels)


def calibrated(epsilon: float, delta: float, schedule: Iterable[Spending]) -> float:
    """The least multiplier for an epsilon, found by bisection, in multiples of 2^-20."""
    accounting, rdp = _accounting()
    spendings = tuple(schedule)
    found = accounting.calibrate_dp_mechanism(
        rdp.RdpAccountant,
        lambda multiplier: _event(multiplier, spendings),
        epsilon,
        delta,
        accounting.LowerEndpointAndGuess(LEAST_MULTIPLIER, FIRST_GUESS),
        tol=2.0**-MULTIPLIER_BITS,
    )
    return float(math.ceil(float(found) * 2**MULTIPLIER_BITS + 1)) / 2.0**MULTIPLIER_BITS


def composed(budgets: Iterable[Budget], delta: float) -> float:
    """The epsilon of runs over the same rows together, by the accountant.

    Raises
    ------
    ConfigError : dp-accounting is not installed.
    """
    _, rdp = _accounting()
    accountant = rdp.RdpAccountant()
    for budget in budgets:
        accountant.compose(_event(budget.multiplier, budget.schedule))
    return float(accountant.get_epsilon(delta))


def check_installed() -> None:
    """Hold that there is an accountant.

    Raises
    ------
    ConfigError : says what to install.
    """
    check_package("dp-accounting", "for privacy.epsilon", "privacy")


def _event(multiplier: float, schedule: Iterable[Spending]) -> Any:
    """All that a run tells, as the accountant takes it."""
    accounting, _ = _accounting()
    builder = accounting.DpEventBuilder()
    for spending in schedule:
        one = accounting.GaussianDpEvent(multiplier / math.sqrt(spending.share))
        builder.compose(one, spending.times)
    return builder.build()


def _accounting() -> tuple[Any, Any]:
    """The package, which takes a second to import."""
    check_installed()
    import dp_accounting
    from dp_accounting import rdp

    return dp_accounting, rdp
