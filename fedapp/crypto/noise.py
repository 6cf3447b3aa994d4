"""Exact draws from the discrete Gaussian distribution.

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
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from fedapp.crypto.sealed import prefixed
from fedapp.histograms.fixed_point import Whole

LABEL = b"fedapp noise v1"
KEY_BYTES, NONCE_BYTES, WORD_BYTES = 32, 16, 8
# float64's error in all comparisons is below 2^-43.
MARGIN = 2.0**-40
# Above, float64 no longer represents draws and scales exactly.
MOST_VARIANCE = 2**80
# From here on a sum of draws is one draw of the sum's variance, up to a factor of 1 + exp(-300).
LEAST_SUMMED = 32

Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]


class Source:
    """Random 64-bit words from a 32-byte key and a label; other labels give other words."""

    def __init__(self, key: bytes, label: bytes) -> None:
        label_key = hashlib.blake2b(prefixed(LABEL, label), digest_size=KEY_BYTES, key=key).digest()
        self._stream = Cipher(ChaCha20(label_key, bytes(NONCE_BYTES)), mode=None).encryptor()

    def words(self, n_words: int) -> Words:
        """The next words, shape (n_words,)."""
        return np.frombuffer(self._stream.update(bytes(n_words * WORD_BYTES)), dtype="<u8")

    def below(self, bound: int, n_numbers: int) -> Whole:
        """Uniform integers from 0 to ``bound`` - 1 < 2^62."""
        numbers = np.empty(0, dtype=np.int64)
        mask = np.uint64((1 << (bound - 1).bit_length()) - 1)
        while len(numbers) < n_numbers:
            candidates = (self.words(n_numbers - len(numbers)) & mask).astype(np.int64)
            numbers = np.concatenate((numbers, candidates[candidates < bound]))
        return numbers


def discrete_gaussian(variance: int, n_numbers: int, source: Source) -> Whole:
    """Independent draws of the discrete Gaussian distribution (Algorithm 3); int64."""
    if not 1 <= variance <= MOST_VARIANCE:
        raise ValueError(f"variance must be 1 to 2^80, got {variance}")
    scale = math.isqrt(variance) + 1
    draws = np.empty(0, dtype=np.int64)
    while (missing := n_numbers - len(draws)) > 0:
        candidates = _discrete_laplace(scale, 2 * missing + 8, source)
        distances = np.abs(candidates).astype(np.float64) - variance / scale
        sizes = np.abs(candidates).tolist()

        def power(place: int, sizes: list[int] = sizes) -> Fraction:
            return (sizes[place] - Fraction(variance, scale)) ** 2 / (2 * variance)

        accepted = accept(distances**2 / (2 * float(variance)), power, source)
        draws = np.concatenate((draws, candidates[accepted]))
    return draws[:n_numbers]


def _discrete_laplace(scale: int, n_tries: int, source: Source) -> Whole:
    """Draws in proportion to exp(-|x| / scale), fewer than ``n_tries`` (Algorithm 2)."""
    remainders = source.below(scale, n_tries)
    remainders = remainders[
        accept(remainders / scale, lambda place: Fraction(int(remainders[place]), scale), source)
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


def accept(
    powers: npt.NDArray[np.float64], exact: Callable[[int], Fraction], source: Source
) -> Bools:
    """Events of probability exp(-power) (Algorithm 1); bool, shape (n_events,).

    ``powers``, float64 >= 0, rounds the powers that ``exact`` returns for the index of an event.
    """
    words = source.words(len(powers))
    shares, bounds = words * 2.0**-64, np.exp(-powers)
    accepted: Bools = shares < bounds
    for place in np.flatnonzero(np.abs(shares - bounds) < MARGIN).tolist():
        accepted[place] = _is_below(int(words[place]), exact(place), source)
    return accepted


def _is_below(word: int, power: Fraction, source: Source) -> bool:
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
