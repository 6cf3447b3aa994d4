"""SIMD arithmetic on big integers: eight at a time where the processor has AVX-512 IFMA.

The front decides by processor: ``has_lanes`` says whether it multiplies side by side, ``ring_of``
gives the faster ring of a modulus, ``run_shared`` the faster way to share work. ``registers``
wraps the instructions for numba, ``ring`` has residues modulo an odd number, ``field`` those modulo
2^255 - 19, and ``ristretto`` points of a curve over these. The room knows nothing of keys,
protocols or parties. Read ``registers`` first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from gmpy2 import mpz
from numba.core.codegen import get_host_cpu_features

from fedapp.crypto.rings import Ring
from fedapp.crypto.workers import Call, Workers
from fedapp.kernels import config


@functools.cache
def has_lanes() -> bool:
    """Whether code that numba compiles here multiplies big integers side by side."""
    features = config.CPU_FEATURES or get_host_cpu_features()  # type: ignore[no-untyped-call]
    has_all = {"+avx512f", "+avx512ifma"} <= set(str(features).split(","))
    return has_all and not config.DISABLE_JIT


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
