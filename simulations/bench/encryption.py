"""What encryption costs: SecureBoost's trees, and where their time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from clients.secureboost import active, passive
from clients.secureboost import round as round_of_trees
from fedapp.crypto.lanes import has_lanes
from fedapp.kernels import n_cores
from fedapp.settings import Settings, load_settings
from simulations.study import (
    BINARY,
    SEED,
    Row,
    compare_with_xgboost,
    measured,
    medians,
    peak_bytes,
)

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
    "read_jobs": active,
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


def settings_of(key_bits: int, n_trees: int, depth: int) -> Settings:
    config: dict[str, Any] = {"strategy": "secureboost", **BINARY, "data": DATA, "parties": 2}
    config |= {"columns": "sizes:" + ",".join(map(str, COLUMNS)), "align": "ordered"}
    config |= {"allow-export": True, "test-fraction": TEST_FRACTION, "num-boost-round": n_trees}
    config |= {"max-depth": depth, "max-bin": MAX_BIN, "secureboost.key-bits": key_bits}
    return load_settings({**config, "secureboost.insecure-small-key": True})


def train(settings: Settings) -> Row:
    """Train, and compare with XGBoost on the joined table."""
    with measured(settings) as (run, figures):
        figures |= {"rows": run.summary["matched_rows"]["train"]}
        return figures | {"same_nodes": compare_with_xgboost(settings, run.path)}


def secureboost(key_bits: int = 2048, checked_trees: int = CHECK_TREES) -> Row:
    """How long a tree of SecureBoost takes, and where the time goes.

    A run in this process of two parties with columns of default-credit: messages are encoded,
    sealed, checked and kept on the disk by both. First a run of deeper trees, and then the timed
    one itself, are compared with XGBoost on the joined table, node for node. A tree is timed from
    the encryption of its gradients to that of the next; its parts are the calls of
    ``fedapp.crypto`` that both parties make, never at the same time.

    ``side_by_side``: the processor multiplies eight numbers at a time, which ``NUMBA_ENABLE_AVX=0``
    in the environment disables.
    """
    checked, watch = train(settings_of(key_bits, checked_trees, CHECK_DEPTH)), Stopwatch()
    with watch.running():
        start = time.perf_counter()
        figures = train(settings_of(key_bits, N_TREES, DEPTH))
    same = {
        f"{checked_trees} trees of depth {CHECK_DEPTH}": checked["same_nodes"],
        f"{N_TREES} trees of depth {DEPTH}": figures.pop("same_nodes"),
    }
    first, *trees = watch.trees
    seconds = medians(trees)
    record: Row = {"data": DATA, "key_bits": key_bits, "side_by_side": has_lanes()}
    record |= {"cores": n_cores(), "columns": COLUMNS, "max_bin": MAX_BIN, "depth": DEPTH}
    record |= {"seed": SEED, "nodes_as_xgboost": same, "repeats": len(trees), **figures}
    record |= {"seconds_a_tree": seconds.pop("tree"), "parts": seconds}
    record |= {"seconds_of_first_tree": first["tree"], "seconds_before": watch.calls[0][1] - start}
    # The peak is of this process; each other worker holds tables of the same size.
    return {**record, "peak_bytes": peak_bytes()}
