"""SIMD arithmetic on big integers: eight at a time where the processor has AVX-512 IFMA.

The front decides by processor: ``has_lanes`` says whether it multiplies side by side, ``ring_of``
gives the faster ring of a modulus, ``run_shared`` the faster way to share work. ``registers``
wraps the instructions for numba, ``ring`` has residues modulo an odd number, ``field`` those modulo
2^255 - 19, and ``ristretto`` points of a curve over these. The room knows nothing of keys,
protocols or parties. Read ``registers`` first.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from gmpy2 import mpz

from fedapp.crypto.rings import Ring
from fedapp.crypto.workers import Call, Workers

LANES, FEATURE = "fedapp.crypto.lanes.registers", "avx512ifma"


@functools.cache
def has_lanes() -> bool:
    """Whether this processor multiplies big integers side by side."""
    processor: Any = importlib.import_module("llvmlite.binding")
    try:
        features = processor.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know the processor
        return False
    # numba takes a moment to load, which a worker of another processor need not wait for.
    return bool(features.get(FEATURE)) and importlib.import_module(LANES).supported()


def ring_of(modulus: mpz) -> Ring:
    """The faster ring of an odd modulus; not cached, as a modulus may be secret."""
    if not has_lanes():
        return Ring(modulus)
    from fedapp.crypto.lanes.ring import LaneRing, check_known_answers

    check_known_answers()
    return LaneRing(modulus)


def run_shared(workers: Workers, function: Callable[..., Any], calls: Sequence[Call]) -> list[Any]:
    """Run calls dominated by products: in threads if these release Python's lock, or processes."""
    run = workers.run_here if has_lanes() else workers.run
    return run(function, calls)
