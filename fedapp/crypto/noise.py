"""Whole numbers of noise, drawn exactly from the discrete Gaussian distribution.

The number x comes up with a probability in proportion to exp(-x^2 / (2 sigma^2)). Added to whole
numbers it gives what continuous Gaussian noise gives in theory, and what such noise in floating
point does not: its last bits tell of the number below (Mironov 2012, "On significance of the least
significant bits for differential privacy").

Source: Canonne, Kamath and Steinke 2020, "The Discrete Gaussian for Differential Privacy"
(arXiv:2004.00010v3), Algorithms 1 to 3: a discrete Laplace draw is accepted with a probability
exp(-r) for a rational r. Departure: whole arrays are drawn at once, so exp(-r) is compared with a
random number u in float64 first. Where the two lie closer than ``MARGIN``, far more than what
float64 rounds off, further digits of both are taken until they differ. So each comparison has
exactly the probability exp(-r).
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

from fedapp.crypto.fixed_point import Whole
from fedapp.crypto.sealed import prefixed

LABEL = b"fedapp noise v1"
KEY_BYTES, NONCE_BYTES, WORD_BYTES = 32, 16, 8
# Float64 is off by less than 2^-43 in all that is compared.
MARGIN = 2.0**-40
# Beyond these, a draw or what it is scaled by leaves what float64 holds exactly.
MOST_VARIANCE = 2**80
# From here on a sum of draws is one draw of the sum's variance, up to a factor of 1 + exp(-300).
LEAST_SUMMED = 32

Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]


class Source:
    """Random words of 64 bits that follow from a key and a label.

    Parameters
    ----------
    key : 32 bytes, from the operating system.
    label : of what is drawn; another label gives other words.
    """

    def __init__(self, key: bytes, label: bytes) -> None:
        own = hashlib.blake2b(prefixed(LABEL, label), digest_size=KEY_BYTES, key=key).digest()
        self._stream = Cipher(ChaCha20(own, bytes(NONCE_BYTES)), mode=None).encryptor()

    def words(self, n_words: int) -> Words:
        """The next words: uint64, shape (n_words,)."""
        return np.frombuffer(self._stream.update(bytes(n_words * WORD_BYTES)), dtype="<u8")

    def below(self, bound: int, n_numbers: int) -> Whole:
        """Uniform numbers from 0 to ``bound`` - 1 < 2^62; int64, shape (n_numbers,)."""
        found = np.empty(0, dtype=np.int64)
        mask = np.uint64((1 << (bound - 1).bit_length()) - 1)
        while len(found) < n_numbers:
            drawn = (self.words(n_numbers - len(found)) & mask).astype(np.int64)
            found = np.concatenate((found, drawn[drawn < bound]))
        return found


def discrete_gaussian(variance: int, n_numbers: int, source: Source) -> Whole:
    """Independent draws of the discrete Gaussian distribution (Algorithm 3).

    Parameters
    ----------
    variance : sigma^2, 1 to 2^80.
    source : of random words.

    Returns
    -------
    int64, shape (n_numbers,).

    Raises
    ------
    ValueError : the variance is out of range.
    """
    if not 1 <= variance <= MOST_VARIANCE:
        raise ValueError(f"variance must be 1 to 2^80, got {variance}")
    scale = math.isqrt(variance) + 1
    found = np.empty(0, dtype=np.int64)
    while (missing := n_numbers - len(found)) > 0:
        drawn = _discrete_laplace(scale, 2 * missing + 8, source)
        distances = np.abs(drawn).astype(np.float64) - variance / scale
        sizes = np.abs(drawn).tolist()

        def power(place: int, sizes: list[int] = sizes) -> Fraction:
            return (sizes[place] - Fraction(variance, scale)) ** 2 / (2 * variance)

        kept = accept(distances**2 / (2 * float(variance)), power, source)
        found = np.concatenate((found, drawn[kept]))
    return found[:n_numbers]


def _discrete_laplace(scale: int, n_tries: int, source: Source) -> Whole:
    """Draws in proportion to exp(-|x| / scale), of ``n_tries`` those that succeed (Algorithm 2)."""
    rests = source.below(scale, n_tries)
    rests = rests[accept(rests / scale, lambda place: Fraction(int(rests[place]), scale), source)]
    # How often events of probability 1/e come in a row.
    n_numbers = len(rests)
    counts = np.zeros(n_numbers, dtype=np.int64)
    places = np.arange(n_numbers)
    while len(places):
        places = places[accept(np.ones(len(places)), lambda _: Fraction(1), source)]
        counts[places] += 1
    sizes = rests + scale * counts
    negative = (source.words(len(sizes)) & np.uint64(1)).astype(bool)
    kept = ~(negative & (sizes == 0))
    found: Whole = np.where(negative, -sizes, sizes)[kept]
    return found


def accept(
    powers: npt.NDArray[np.float64], exact: Callable[[int], Fraction], source: Source
) -> Bools:
    """Events of probability exp(-power) (Algorithm 1).

    Parameters
    ----------
    powers : float64, shape (n_events,), >= 0.
    exact : place of an event -> its power, of which the former is rounded.

    Returns
    -------
    bool, shape (n_events,).
    """
    words = source.words(len(powers))
    shares, bounds = words * 2.0**-64, np.exp(-powers)
    found: Bools = shares < bounds
    for place in np.flatnonzero(np.abs(shares - bounds) < MARGIN).tolist():
        found[place] = _is_below(int(words[place]), exact(place), source)
    return found


def _is_below(word: int, power: Fraction, source: Source) -> bool:
    """Whether a random number that begins with 64 bits is below exp(-power)."""
    n_bits = 64
    while True:
        digits = Context(prec=n_bits // 3 + 12)
        bound = digits.exp(-digits.divide(Decimal(power.numerator), Decimal(power.denominator)))
        # Rounding of the quotient moves the bound by as much times the power, at most.
        slack = Decimal(10) ** (8 - digits.prec)
        low, high = (digits.divide(Decimal(end), Decimal(1 << n_bits)) for end in (word, word + 1))
        if digits.add(high, slack) <= bound:
            return True
        if digits.subtract(low, slack) >= bound:
            return False
        word = word << 64 | int(source.words(1)[0])
        n_bits += 64
