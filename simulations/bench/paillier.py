"""How long the encrypted steps of one SecureBoost tree take, beside phe.

The active party encrypts a packed pair of gradient and hessian a row; a passive party sums the root
level, packs the sums and re-randomises them; the active party checks, decrypts and unpacks. Every
run's sums are compared with those of the plain integers. phe encrypts, adds and decrypts a few
numbers in this process, and its times are scaled to as many as are needed.

With ``--workers 1`` seconds are those of the processor, which other programs change less. With
``NUMBA_ENABLE_AVX=0`` in the environment the same steps go by gmpy2's integers, one by one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from phe.paillier import EncryptedNumber

from fedapp.crypto.lanes import has_lanes
from fedapp.crypto.packing import FixedPoint, PairLayout
from fedapp.crypto.paillier import PrivateKey, check_ciphertexts, encrypt, generate_key
from fedapp.crypto.sums import pack_sums, read_sums, self_test, sum_rows
from fedapp.crypto.workers import Workers
from simulations.bench import peak_bytes, tell

N_ROWS, N_COLUMNS, N_BINS = 20_000, 11, 32
SEED, REPEATS, N_WORKERS = 42, 5, 2
PHE_PAIRS, PHE_ADDITIONS = 10, 1000


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Gradients of one tree, and bins of a passive party's columns, the last for missing values."""

    gradients: npt.NDArray[np.float32]
    codes: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    nodes: npt.NDArray[np.int32]

    @property
    def n_sums(self) -> int:
        return int(self.offsets[-1])


def draw_rows() -> Rows:
    """Logistic gradients, and bins of equal size; one row in 33 is missing."""
    rng = np.random.default_rng(SEED)
    predictions = rng.random(N_ROWS, dtype=np.float32)
    truth = (rng.random(N_ROWS) < predictions).astype(np.float32)
    gradients = np.stack([predictions - truth, predictions * (1 - predictions)], axis=-1)[:, None]
    codes = rng.integers(0, N_BINS + 1, (N_ROWS, N_COLUMNS)).astype(np.uint8)
    offsets = np.arange(N_COLUMNS + 1) * (N_BINS + 1)
    return Rows(gradients, codes, offsets, np.zeros(N_ROWS, np.int32))


def plain_sums(rows: Rows, scale: FixedPoint) -> npt.NDArray[np.float64]:
    """The expected sums, computed with integers of any length."""
    fields = scale.encode(rows.gradients)[:, 0].astype(object)
    sums = np.zeros((rows.n_sums, 2), dtype=object)
    for column, start in enumerate(rows.offsets[:-1]):
        np.add.at(sums, start + rows.codes[:, column].astype(np.int64), fields)
    return scale.decode(sums.tolist(), 1)


def time_tree(
    key: PrivateKey, rows: Rows, workers: Workers, clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds of every step of one root level; checks the sums."""
    seconds: dict[str, float] = {}

    def timed(step: str, function: Callable[..., Any], *arguments: Any) -> Any:
        start = clock()
        result = function(*arguments)
        seconds[step] = clock() - start
        return result

    public, layout = key.public, PairLayout(key.public.bits, N_ROWS)
    scale = FixedPoint.covering(rows.gradients)
    plaintexts = timed("encode", lambda: layout.pack(scale.encode(rows.gradients)))
    ciphertexts = timed("encrypt", encrypt, key, plaintexts, workers)
    timed("check", check_ciphertexts, public, ciphertexts)
    places = (rows.codes, rows.offsets, rows.nodes, 1, workers)
    sums = timed("sum", sum_rows, public, ciphertexts, *places)
    reply = timed("pack", pack_sums, public, sums, layout, workers)
    decrypted = timed("read", read_sums, key, reply, layout, scale, rows.n_sums, workers)
    if not np.array_equal(decrypted, plain_sums(rows, scale)):
        raise RuntimeError("decrypted sums must equal the plain ones, got others")
    seconds["level"] = sum(seconds[step] for step in ("sum", "pack", "read"))
    return seconds


def time_phe(key: PrivateKey, n_sums: int) -> dict[str, float]:
    """Extrapolated seconds of phe in one process, with one pair to a ciphertext."""
    public, private = key.to_phe().public_key, key.to_phe()
    start = time.perf_counter()
    numbers = [public.encrypt(1 << (100 + number)) for number in range(PHE_PAIRS)]
    encrypted = time.perf_counter()
    total = EncryptedNumber(public, 1)
    for number in range(PHE_ADDITIONS):
        total = total + numbers[number % PHE_PAIRS]
    added = time.perf_counter()
    for ciphertext in numbers:
        private.decrypt(ciphertext)
    decrypted = time.perf_counter()
    return {
        "encrypt": (encrypted - start) / PHE_PAIRS * N_ROWS,
        "sum": (added - encrypted) / PHE_ADDITIONS * N_ROWS * N_COLUMNS,
        "read": (decrypted - added) / PHE_PAIRS * n_sums,
    }


def measure(key_bits: int, n_workers: int) -> dict[str, Any]:
    """A first tree with cold workers, then medians of warm ones."""
    rows = draw_rows()
    key = generate_key(key_bits, insecure_small_key=True)
    self_test(key)
    with Workers(n_workers) as workers:
        clock = time.process_time if n_workers == 1 else time.perf_counter
        cold, *warm = [time_tree(key, rows, workers, clock) for _ in range(REPEATS + 1)]
    seconds = {step: statistics.median(one[step] for one in warm) for step in cold}
    layout, phe = PairLayout(key_bits, N_ROWS), time_phe(key, rows.n_sums)
    width = key.public.ciphertext_bytes
    return {
        "key_bits": key_bits,
        "workers": n_workers,
        "rows": N_ROWS,
        "columns": N_COLUMNS,
        "bins": N_BINS,
        "sums_per_ciphertext": layout.n_slots,
        "seed": SEED,
        "repeats": REPEATS,
        "seconds": seconds,
        "cold_seconds": cold,
        "clock": "cpu" if n_workers == 1 else "wall",
        "side_by_side": has_lanes(),
        "phe_seconds": phe,
        "phe_ratio": {step: phe[step] / seconds[step] for step in phe},
        "bytes": {"rows": N_ROWS * width, "reply": layout.n_plaintexts(rows.n_sums) * width},
        # Of this process; every other worker has tables of the same size.
        "peak_bytes": peak_bytes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--key-bits", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=N_WORKERS)
    options = parser.parse_args()
    record = measure(options.key_bits, options.workers)
    tell("paillier", ("fedapp", "gmpy2", "phe", "numpy"), **record)


if __name__ == "__main__":
    main()
