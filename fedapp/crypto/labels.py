"""Labels that are randomised once, so that whoever sees what is computed of them learns little.

A label of ``k`` classes stays with probability ``e^epsilon / (e^epsilon + k - 1)``, or becomes one
of the others, each as likely: k-ary randomised response (Warner 1965; Kairouz, Bonawitz and Ramage
2016, arXiv:1602.07387). A measure is clipped to a range and gets discrete Laplace noise (Ghosh,
Roughgarden and Sundararajan 2009, arXiv:0811.2841) on a grid of the range. Either is
``epsilon``-differentially private for the label of a row: whoever sees anything that was computed
of the result, all other parties together included, tells two labels apart with an advantage of
``tanh(epsilon / 2)`` at most.

A row's draw is a keyed hash of its id and label: a second one is the same, so that nothing is
learned by averaging, as long as label, classes, range and epsilon are. ``fedapp.site.labels`` sees
to that. Probabilities are met to 2^-63 each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedapp.crypto.noise import NOISE_LABEL
from fedapp.crypto.sealed import Stream, prefixed

LABEL = b"label"
STEPS = 2**12  # of a range of measures
TAIL = 45.0  # noise beyond this many scales has a probability below 2^-64

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]


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
    rows = [
        Stream(key, NOISE_LABEL, prefixed(LABEL, name.encode(), str(label).encode())).words(n_words)
        for name, label in zip(ids, labels, strict=True)
    ]
    return np.array(rows, dtype=np.uint64).reshape(len(ids), n_words)
