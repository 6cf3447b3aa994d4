"""What encryption costs: SecureBoost's trees, and the steps of one of them beside phe.

``python -m simulations bench secureboost`` and ``paillier``; see the function of each.
"""

from __future__ import annotations

import json
import secrets
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from gmpy2 import mpz
from phe.paillier import EncryptedNumber

from clients.secureboost import passive
from clients.secureboost import round as round_of_trees
from fedapp.crypto.lanes import has_lanes
from fedapp.crypto.packing import FixedPoint, PairLayout
from fedapp.crypto.paillier import check_ciphertexts, encrypt, to_phe
from fedapp.crypto.paillier_keys import PrivateKey, generate_key
from fedapp.crypto.sums import pack_sums, read_jobs, self_test, sum_rows
from fedapp.crypto.workers import Workers
from fedapp.kernels import n_cores
from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import baseline_rows, train_boosted
from fedapp.runs.clean import forget_model
from fedapp.runs.local import run_local
from fedapp.settings import Settings, load_settings
from simulations.study import BINARY, SEED, Row, count_same_nodes, peak_bytes, repeated

DATA, COLUMNS = "default-credit", (12, 11)  # active, passive
TEST_FRACTION, MAX_BIN = 1 / 3, 32
CHECK_TREES, CHECK_DEPTH = 10, 4
# Excluded: the first tree, in which tables of masks are computed, and the last one, which no
# encryption follows.
N_TREES, DEPTH = 7, 3
PARTS = {  # function of ``fedapp.crypto``, where it is called
    "encrypt": round_of_trees,
    "check_ciphertexts": passive,
    "sum_rows": passive,
    "pack_sums": passive,
    "read_jobs": round_of_trees,
}


@dataclass(frozen=True, slots=True, eq=False)
class Stopwatch:
    """Times every call of the arithmetic that the two parties make: part, start and end."""

    calls: list[tuple[str, float, float]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in PARTS.items():
                timed = partial(self._call, name, getattr(module, name))
                stack.enter_context(patch.object(module, name, timed))
            yield

    def _call(self, part: str, function: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments)
        self.calls.append((part, start, time.perf_counter()))
        return result

    @property
    def trees(self) -> list[dict[str, float]]:
        """Seconds of all trees by part, but of the last tree, which no encryption follows."""
        starts = [index for index, (part, _, _) in enumerate(self.calls) if part == "encrypt"]
        trees = []
        for first, last in pairwise(starts):
            spent = dict.fromkeys(PARTS, 0.0)
            for part, start, end in self.calls[first:last]:
                spent[part] += end - start
            tree = self.calls[last][1] - self.calls[first][1]
            trees.append({"tree": tree, **spent, "rest": tree - sum(spent.values())})
        return trees


def settings_of(key_bits: int, n_trees: int, depth: int, run_dir: str) -> Settings:
    config: dict[str, Any] = {"strategy": "secureboost", **BINARY, "data": DATA, "parties": 2}
    config |= {"columns": "sizes:" + ",".join(map(str, COLUMNS)), "align": "ordered"}
    config |= {"allow-export": True, "test-fraction": TEST_FRACTION, "num-boost-round": n_trees}
    config |= {"max-depth": depth, "max-bin": MAX_BIN, "secureboost.key-bits": key_bits}
    config |= {"secureboost.insecure-small-key": True, "run-dir": run_dir}
    return load_settings(config)


def run_both(settings: Settings) -> tuple[int, RunFolder]:
    """Train, compare with XGBoost on the joined table; return the number of nodes and the run."""
    run = run_local(settings)
    forget_model(run.summary["model_id"])
    booster = train_boosted(settings, baseline_rows(settings)[0]).booster
    model = json.loads((run.path / "model.xgb.json").read_text())
    return count_same_nodes(model, json.loads(booster.save_raw("json"))), run


def traffic(run: RunFolder) -> tuple[int, int]:  # median bytes and messages of a timed tree
    files = run.files
    by_step = Counter(line["step"] for line in files.ledger)
    sizes, numbers = [], []
    for before, after in pairwise(files.rounds[:-1]):
        steps = range(before["exchanges"] + 1, after["exchanges"] + 1)
        numbers.append(sum(by_step[step] for step in steps))
        sizes.append(sum(after["bytes"].values()))
    return int(statistics.median(sizes)), int(statistics.median(numbers))


def product_seconds(bits: int) -> float:
    """Seconds of one product of two random numbers modulo another of ``bits`` bits."""
    modulus = mpz(secrets.randbits(bits)) | 1 | mpz(1) << (bits - 1)
    left, right = ([mpz(secrets.randbelow(int(modulus))) for _ in range(2000)] for _ in range(2))

    def seconds() -> float:
        start = time.perf_counter()
        [first * second % modulus for first, second in zip(left, right, strict=True)]
        return time.perf_counter() - start

    return statistics.median(repeated([seconds])[0]) / len(left)


def medians(dicts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(values[name] for values in dicts) for name in dicts[0]}


def secureboost(key_bits: int = 2048, checked_trees: int = CHECK_TREES) -> Row:
    """How long a tree of SecureBoost takes, and where the time goes.

    A run in this process of two parties with columns of default-credit: messages are encoded,
    sealed, checked and kept on the disk by both. First a run of deeper trees, and then the timed
    one itself, are compared with XGBoost on the joined table, node for node. A tree is timed from
    the encryption of its gradients to that of the next; its parts are the calls of
    ``fedapp.crypto`` that both parties make, never at the same time.

    ``products_a_row`` compares machines: the seconds of a tree as products of two numbers modulo
    n^2 by gmpy2 on one core, for each row. It is smaller where the processor multiplies eight
    numbers at a time (``side_by_side``; ``NUMBA_ENABLE_AVX=0`` in the environment disables that).
    """
    watch, same, start = Stopwatch(), {}, 0.0
    with tempfile.TemporaryDirectory() as folder:
        if checked_trees:
            checked = settings_of(key_bits, checked_trees, CHECK_DEPTH, f"{folder}/checked")
            same[f"{checked_trees} trees of depth {CHECK_DEPTH}"], _ = run_both(checked)
        with watch.running():
            start = time.perf_counter()
            timed = settings_of(key_bits, N_TREES, DEPTH, f"{folder}/timed")
            same[f"{N_TREES} trees of depth {DEPTH}"], run = run_both(timed)
        n_bytes, n_messages = traffic(run)
        summary = run.summary
    first, *trees = watch.trees
    seconds, n_rows = medians(trees), summary["matched_rows"]["train"]
    a_tree, product = seconds.pop("tree"), product_seconds(2 * key_bits)
    record: Row = {"data": DATA, "key_bits": key_bits, "side_by_side": has_lanes()}
    record |= {"cores": n_cores(), "rows": n_rows, "columns": COLUMNS, "max_bin": MAX_BIN}
    record |= {"depth": DEPTH, "seed": SEED, "nodes_as_xgboost": same, "repeats": len(trees)}
    record |= {"seconds_a_tree": a_tree, "seconds": seconds}
    record |= {"seconds_of_first_tree": first["tree"], "seconds_before": watch.calls[0][1] - start}
    record |= {"bytes_a_tree": n_bytes, "messages_a_tree": n_messages}
    record |= {"product_seconds": product, "products_a_row": a_tree / product / n_rows}
    # Of this process; each other worker holds tables of the same size.
    record |= {"peak_bytes": peak_bytes(), "auc": summary["metrics"]["test"]["auc"]}
    return record


# paillier

N_ROWS, N_COLUMNS, N_BINS = 20_000, 11, 32
REPEATS, N_WORKERS = 5, 2
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
    sums = timed(
        "sum", sum_rows, public, ciphertexts, rows.codes, rows.offsets, rows.nodes, 1, workers
    )
    reply = timed("pack", pack_sums, public, sums, layout, workers)
    jobs = [(layout, np.ones(rows.n_sums, dtype=bool))]
    decrypted = timed("read", lambda: scale.decode(read_jobs(key, reply, jobs, workers)[0], 1))
    if not np.array_equal(decrypted, plain_sums(rows, scale)):
        raise RuntimeError("decrypted sums must equal the plain ones, got others")
    seconds["level"] = sum(seconds[step] for step in ("sum", "pack", "read"))
    return seconds


def time_phe(key: PrivateKey, n_sums: int) -> dict[str, float]:
    """Extrapolated seconds of phe in one process, with one pair to a ciphertext."""
    private = to_phe(key)
    public = private.public_key
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


def paillier(key_bits: int = 2048, workers: int = N_WORKERS) -> Row:
    """How long the encrypted steps of one SecureBoost tree take, beside phe.

    The active party encrypts a packed pair of gradient and hessian a row; a passive party sums the
    root level, packs the sums and re-randomises them; the active party checks, decrypts and
    unpacks. Every run's sums are compared with those of the plain integers. phe encrypts, adds and
    decrypts a few numbers in this process, and its times are scaled to as many as are needed.

    The first tree has cold workers, the others give medians. With ``--workers 1`` seconds are those
    of the processor, which other programs change less. With ``NUMBA_ENABLE_AVX=0`` in the
    environment the same steps go by gmpy2's integers, one by one.
    """
    rows, key = draw_rows(), generate_key(key_bits, insecure_small_key=True)
    self_test(key)
    clock = time.process_time if workers == 1 else time.perf_counter
    with Workers(workers) as pool:
        cold, *warm = [time_tree(key, rows, pool, clock) for _ in range(REPEATS + 1)]
    seconds, phe = medians(warm), time_phe(key, rows.n_sums)
    layout, width = PairLayout(key_bits, N_ROWS), key.public.ciphertext_bytes
    record: Row = {"key_bits": key_bits, "workers": workers, "rows": N_ROWS, "columns": N_COLUMNS}
    record |= {"bins": N_BINS, "sums_per_ciphertext": layout.n_slots, "seed": SEED}
    record |= {"repeats": REPEATS, "seconds": seconds, "cold_seconds": cold}
    record |= {"clock": "cpu" if workers == 1 else "wall", "side_by_side": has_lanes()}
    record |= {"phe_seconds": phe, "phe_ratio": {step: phe[step] / seconds[step] for step in phe}}
    sizes = {"rows": N_ROWS * width, "reply": layout.n_plaintexts(rows.n_sums) * width}
    # Peak of this process; every other worker has tables of the same size.
    return {**record, "bytes": sizes, "peak_bytes": peak_bytes()}
