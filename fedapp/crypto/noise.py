"""Differential privacy: exact discrete Gaussian noise in sums and its budget; randomised labels.

An integer x is drawn with probability proportional to exp(-x^2 / (2 sigma^2)). Added to integers it
achieves what continuous Gaussian noise achieves in theory. Floating-point noise does not: its last
bits depend on the number below it (Mironov 2012, "On significance of the least significant bits for
differential privacy").

Source: Canonne, Kamath and Steinke 2020, "The Discrete Gaussian for Differential Privacy"
(arXiv:2004.00010v3), Algorithms 1 to 3: a discrete Laplace draw is accepted with a probability
exp(-r) for a rational r. Departure: whole arrays are drawn at once, so exp(-r) is compared with a
random number u in float64 first. Where the two are closer than ``MARGIN``, far more than float64's
rounding, further digits of both are computed until they differ. So each comparison has exactly the
probability exp(-r).

A private run discloses only sums of its training rows with noise, one after the other, each chosen
adaptively. A sum that one row changes by at most d (L2), with noise of standard deviation m d /
sqrt(s), spends the share s of the budget; the shares add up to 1. So a run costs what one Gaussian
mechanism of multiplier m costs, however the shares are chosen: rho = 1 / (2 m^2) of concentrated
differential privacy, and the epsilon of dp-accounting's RDP accountant. Discrete noise has at most
the same Renyi divergences (Theorem 4). Neighbouring tables differ in one row of one party, which
has weight 0 in one of them.

Each of n parties adds noise of variance sigma^2 / (n - 1), because each knows its noise: without
it, the sum still has sigma^2. The parties' noise adds up to a single draw, up to an error that is 0
in float64 at the variances in use (Kairouz, Liu and Steinke 2021, arXiv:2102.06387, Theorem 1).

A label of ``k`` classes that is randomised once stays with probability ``e^epsilon / (e^epsilon + k
- 1)``, or becomes one of the others, each as likely: k-ary randomised response (Warner 1965;
Kairouz, Bonawitz and Ramage 2016, arXiv:1602.07387). A measure is clipped to a range and gets
discrete Laplace noise (Ghosh, Roughgarden and Sundararajan 2009, arXiv:0811.2841) on a grid of the
range. Either is ``epsilon``-differentially private for the label of a row: whoever sees anything
that was computed of the result, all other parties together included, tells two labels apart with an
advantage of ``tanh(epsilon / 2)`` at most.

A row's draw is a keyed hash of its id and label: a second one is the same, so that nothing is
learned by averaging, as long as label, classes, range and epsilon are. ``fedapp.site.labels`` sees
to that. Probabilities are met to 2^-63 each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from fedapp.arrays import Doubles, Flags, Floats
from fedapp.crypto.sealed import Stream, Words, prefixed
from fedapp.errors import check_package
from fedapp.histograms.fixed_point import Whole

NOISE_LABEL = b"fedapp noise v1"  # of all streams of noise
KEY_BYTES = 32
# float64's error in all comparisons is below 2^-43.
MARGIN = 2.0**-40
# Above, float64 no longer represents draws and scales exactly.
MAX_VARIANCE = 2**80
# From here on a sum of draws is one draw of the sum's variance, up to a factor of 1 + exp(-300).
MIN_SUMMED_VARIANCE = 32

# Shares of the budget: of the mean label and of the cuts; the trees have the rest. COUNTS was the
# best of 0.08, 0.2 and 0.4 on average over three tables (simulations/attacks/privacy.md).
LABELS, COUNTS = 0.02, 0.4
N_COUNTS = 4  # exchanges that determine the cuts
MULTIPLIER_BITS = 20  # multipliers are sent as multiples of 2^-20
LEAST_MULTIPLIER, FIRST_GUESS = 2.0**-10, 2.0

LABEL_STREAM = b"label"
STEPS = 2**12  # of a range of measures
TAIL = 45.0  # noise beyond this many scales has a probability below 2^-64


def discrete_gaussian(variance: int, n_numbers: int, source: Stream) -> Whole:
    """Independent draws of the discrete Gaussian distribution (Algorithm 3); int64."""
    if not 1 <= variance <= MAX_VARIANCE:
        raise ValueError(f"variance must be 1 to 2^80, got {variance}")
    scale = math.isqrt(variance) + 1
    draws = np.empty(0, dtype=np.int64)
    while (missing := n_numbers - len(draws)) > 0:
        candidates = _discrete_laplace(scale, 2 * missing + 8, source)
        distances = np.abs(candidates).astype(np.float64) - variance / scale
        sizes = np.abs(candidates).tolist()

        def power(index: int, sizes: list[int] = sizes) -> Fraction:
            return (sizes[index] - Fraction(variance, scale)) ** 2 / (2 * variance)

        accepted = accept(distances**2 / (2 * float(variance)), power, source)
        draws = np.concatenate((draws, candidates[accepted]))
    return draws[:n_numbers]


def _discrete_laplace(scale: int, n_tries: int, source: Stream) -> Whole:
    """Draws in proportion to exp(-|x| / scale), fewer than ``n_tries`` (Algorithm 2)."""
    remainders = source.below(scale, n_tries)
    remainders = remainders[
        accept(remainders / scale, lambda index: Fraction(int(remainders[index]), scale), source)
    ]
    # How often events of probability 1/e come in a row.
    n_numbers = len(remainders)
    counts = np.zeros(n_numbers, dtype=np.int64)
    places = np.arange(n_numbers)
    while len(places):
        places = places[accept(np.ones(len(places)), lambda _: Fraction(1), source)]
        counts[places] += 1
    sizes = remainders + scale * counts
    negative = (source.words(len(sizes)) & np.uint64(1)).astype(bool)
    valid = ~(negative & (sizes == 0))  # 0 would else come up twice as often
    draws: Whole = np.where(negative, -sizes, sizes)[valid]
    return draws


def accept(powers: Doubles, exact: Callable[[int], Fraction], source: Stream) -> Flags:
    """Events of probability exp(-power) (Algorithm 1); bool, shape (n_events,).

    ``powers``, float64 >= 0, rounds the powers that ``exact`` returns for the index of an event.
    """
    words = source.words(len(powers))
    shares, bounds = words * 2.0**-64, np.exp(-powers)
    accepted: Flags = shares < bounds
    for index in np.flatnonzero(np.abs(shares - bounds) < MARGIN).tolist():
        accepted[index] = _is_below(int(words[index]), exact(index), source)
    return accepted


def _is_below(word: int, power: Fraction, source: Stream) -> bool:
    """Whether a random number whose first 64 bits are ``word`` is below exp(-power)."""
    n_bits = 64
    while True:
        digits = Context(prec=n_bits // 3 + 12)
        bound = digits.exp(-digits.divide(Decimal(power.numerator), Decimal(power.denominator)))
        # Rounding the quotient changes the bound by at most the power times the rounding.
        slack = Decimal(10) ** (8 - digits.prec)
        low, high = (digits.divide(Decimal(end), Decimal(1 << n_bits)) for end in (word, word + 1))
        if digits.add(high, slack) <= bound:
            return True
        if digits.subtract(low, slack) >= bound:
            return False
        word = word << 64 | int(source.words(1)[0])
        n_bits += 64


# Privacy accounting


@dataclass(frozen=True, slots=True)
class BudgetItem:
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
    """

    epsilon: float
    delta: float
    multiplier: float
    n_rounds: int
    n_parties: int

    @property
    def schedule(self) -> tuple[BudgetItem, ...]:
        """All sums over training rows that a run discloses."""
        trees = (1 - LABELS - COUNTS) / self.n_rounds
        first = BudgetItem("labels", 1, LABELS), BudgetItem("counts", N_COUNTS, COUNTS / N_COUNTS)
        return (*first, BudgetItem("tree", self.n_rounds, trees))

    def share(self, kind: str) -> float:
        """Share that one sum of a kind spends; scores of held-out rows have another budget."""
        if kind == "scores":
            return 1.0
        return next(spending.share for spending in self.schedule if spending.kind == kind)

    def deviation(self, kind: str, sensitivity: float) -> float:
        """Standard deviation of the noise of a sum over all parties, for one outside."""
        to_a_party = self.multiplier * sensitivity / math.sqrt(self.share(kind))
        return to_a_party * math.sqrt(self.n_parties / (self.n_parties - 1))

    def party_variance(self, kind: str, sensitivity: float) -> int:
        """Variance of the noise that each party adds, in squared units, rounded up.

        One row changes the sum by at most ``sensitivity`` (L2), in units. Raises a ValueError if
        the variance is too small for the parties' noise to add up to a discrete Gaussian.
        """
        square = Fraction(self.multiplier) ** 2 * Fraction(sensitivity) ** 2
        variance = math.ceil(square / (Fraction(self.share(kind)) * (self.n_parties - 1)))
        if variance < MIN_SUMMED_VARIANCE:
            raise ValueError(
                f"the variance of noise must be >= {MIN_SUMMED_VARIANCE}, got {variance}"
            )
        return variance

    def check(self) -> None:
        """Raise a ValueError where the noise does not keep the promise, by the accountant."""
        is_valid = min(self.multiplier, self.delta, self.n_rounds) > 0
        if not is_valid or composed_epsilon((self,), self.delta) > self.epsilon:
            rule = (
                f"must be of more noise to keep epsilon {self.epsilon:g} for delta {self.delta:g}"
            )
            raise ValueError(f"multiplier {rule}, got {self.multiplier:g}")


def budget_for(epsilon: float, delta: float, n_rounds: int, n_parties: int) -> Budget:
    """The least noise that keeps the promise; a ConfigError if dp-accounting is missing.

    The multiplier is found by bisection, and rounded up to a multiple of 2^-20.
    """
    accounting, rdp = _accounting()
    schedule = Budget(epsilon, delta, 1.0, n_rounds, n_parties).schedule
    least = accounting.calibrate_dp_mechanism(
        rdp.RdpAccountant,
        lambda candidate: _event(candidate, schedule),
        epsilon,
        delta,
        accounting.LowerEndpointAndGuess(LEAST_MULTIPLIER, FIRST_GUESS),
        tol=2.0**-MULTIPLIER_BITS,
    )
    multiplier = float(math.ceil(float(least) * 2**MULTIPLIER_BITS + 1)) / 2.0**MULTIPLIER_BITS
    return Budget(epsilon, delta, multiplier, n_rounds, n_parties)


def composed_epsilon(budgets: Iterable[Budget], delta: float) -> float:
    """The epsilon of several runs over the same rows; a ConfigError if dp-accounting is missing."""
    _, rdp = _accounting()
    accountant = rdp.RdpAccountant()
    for budget in budgets:
        accountant.compose(_event(budget.multiplier, budget.schedule))
    return float(accountant.get_epsilon(delta))


def check_installed() -> None:
    """Raise a ConfigError unless dp-accounting is installed."""
    check_package("dp-accounting", "for privacy.epsilon", "privacy")


def _event(multiplier: float, schedule: Iterable[BudgetItem]) -> Any:
    """All sums of a run in the accountant's form."""
    accounting, _ = _accounting()
    builder = accounting.DpEventBuilder()
    for spending in schedule:
        event = accounting.GaussianDpEvent(multiplier / math.sqrt(spending.share))
        builder.compose(event, spending.times)
    return builder.build()


def _accounting() -> tuple[Any, Any]:
    """dp-accounting, which takes a second to import."""
    check_installed()
    import dp_accounting
    from dp_accounting import rdp

    return dp_accounting, rdp


# Randomised labels


def randomised_classes(
    numbers: Floats, classes: Sequence[str], epsilon: float, ids: Sequence[str], key: bytes
) -> Floats:
    """Numbers of classes, each kept or replaced by another; ``key`` has 32 bytes."""
    n_classes = len(classes)
    if n_classes < 2:
        return numbers
    stays = math.exp(epsilon) / (math.exp(epsilon) + n_classes - 1)
    words = _words(ids, [classes[number] for number in numbers.astype(int)], key, 2)
    # Classes after the own one, as if it were not there.
    others = 1 + (words[:, 1] % np.uint64(n_classes - 1)).astype(np.int64)
    replaced = (numbers.astype(np.int64) + others) % n_classes
    return np.where(words[:, 0] < _threshold(stays), numbers, replaced).astype(np.float32)


def randomised_measures(
    numbers: Floats, low: float, high: float, epsilon: float, ids: Sequence[str], key: bytes
) -> Floats:
    """Measures between ``low`` and ``high``, to which others are clipped, with noise."""
    step = (high - low) / STEPS
    places = np.rint((np.clip(numbers.astype(np.float64), low, high) - low) / step)
    # A geometric number has independent bits: P(bit i) = r / (1 + r), r = ratio^(2^i).
    rate = epsilon / STEPS
    n_bits = max(1, math.ceil(math.log2(TAIL / rate)))
    words = _words(ids, places.astype(int).tolist(), key, 2 * n_bits)
    odds = np.exp(-rate * 2.0 ** np.arange(n_bits))
    thresholds = np.array([_threshold(odd / (1 + odd)) for odd in odds.tolist()], dtype=np.uint64)
    powers = 2.0 ** np.arange(n_bits)
    first, second = ((part < thresholds) @ powers for part in np.split(words, 2, axis=1))
    # Their difference is discrete Laplace noise.
    noised: Floats = (low + step * (places + first - second)).astype(np.float32)
    return noised


def _threshold(probability: float) -> np.uint64:
    return np.uint64(min(int(math.ldexp(probability, 64)), 2**64 - 1))


def _words(ids: Sequence[str], labels: Sequence[object], key: bytes, n_words: int) -> Words:
    """Random words of each row, shape (n_rows, n_words)."""
    rows = []
    for name, label in zip(ids, labels, strict=True):
        row = prefixed(LABEL_STREAM, name.encode(), str(label).encode())
        rows.append(Stream(key, NOISE_LABEL, row).words(n_words))
    return np.array(rows, dtype=np.uint64).reshape(len(ids), n_words)
