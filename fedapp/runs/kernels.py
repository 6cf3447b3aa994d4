"""Compile the kernels before a run needs them: ``python -m fedapp.runs.kernels``.

With ``-`` the process ends, and leaves no files, when its stdin closes, as when its parent ends.

numba compiles a kernel for the types of its arguments and caches it on the disk. Small runs call
the kernels here, with settings and tables that cover these types.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from signal import SIGTERM
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any
from unittest.mock import patch

import numpy as np

from fedapp.client_app import SiteApp
from fedapp.kernels import cache_folder, config
from fedapp.messages.methods import all_methods
from fedapp.process import handle_stopping, interrupt, leave_now
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.trees.limits import ONE_TREE
from strategies.run import load_strategy

N_ROWS = 900
SMALL = {
    "id": "id",
    "label": "y",
    "parties": 3,
    "num-boost-round": 2,
    "max-depth": 3,
    "fedavg-linear.rounds": 1,
    "federated-forest.trees": 4,
    "horizontal-forest.trees": 4,
    "secureboost.key-bits": 1024,
    "secureboost.insecure-small-key": True,
    "federated-forest.key-bits": 1024,
    "federated-forest.insecure-small-key": True,
}
# By number of classes. A bin id takes one byte with 16 bins, two with 400.
RUNS: Mapping[int, Mapping[str, Any]] = {
    2: {"objective": "binary:logistic", "max-bin": 16},
    3: {
        "objective": "multi:softprob",
        "max-bin": 400,
        "pax.aggregation": "secure",
        "horizontal-forest.aggregation": "secure",
        "federated-forest.labels": "paillier",
        "multi-strategy": ONE_TREE,
    },
}


def write_table(path: Path, n_classes: int) -> None:
    """Write a table of numbers; for two classes also with missing values and categories."""
    random = np.random.default_rng(0)
    values = random.normal(size=(N_ROWS, 4)).round(4)
    scores = values.sum(axis=1) + random.normal(size=N_ROWS)
    labels = np.digitize(scores, np.quantile(scores, np.arange(1, n_classes) / n_classes))
    columns = values.T.astype(str).astype(object)
    if n_classes == 2:
        columns[0, ::5] = ""
        columns[1] = [f"k{int(9 * value) % 9}" for value in values[:, 1]]
        columns[2] = [f"k{int(value > 0)}" for value in values[:, 2]]
    rows = zip(map(str, range(N_ROWS)), *columns, map(str, labels.tolist()), strict=True)
    path.write_text("\n".join(["id,a,b,c,d,y", *map(",".join, rows)]), encoding="utf-8")


def compile_kernels(folder: Path) -> None:
    """Train every method that needs no optional package, on every table."""
    for n_classes, options in RUNS.items():
        table = folder / f"{n_classes}.csv"
        write_table(table, n_classes)
        for name, method in all_methods().items():
            if method.uses_model or method.package:
                continue
            run_dir = str(folder / f"{name}-{n_classes}")
            paths = {"strategy": name, "data": str(table), "run-dir": run_dir}
            settings = load_settings({**SMALL, **options, **paths})
            if n_classes != 2 and "least-bin-rows" in load_strategy(name).settings_read(settings):
                settings = settings.model_copy(update={"least_bin_rows": 2})
            run_local(settings, client_app=SiteApp())


def compile_until_closed() -> None:
    """Compile all kernels; end early, without leaving files, when stdin closes."""

    def end_too() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), SIGTERM)

    handle_stopping(interrupt)
    Thread(target=end_too, daemon=True).start()
    try:
        main()
    except KeyboardInterrupt:
        leave_now()


def main() -> None:
    """Compile all kernels, unless they are compiled."""
    folder = None if config.DISABLE_JIT else cache_folder()
    if not folder or (done := folder / "complete").exists():  # it may be read-only, as in an image
        return
    with (folder / "compiling").open("w") as lock:
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():  # by a site that started at the same time
            return
        print("Compiling kernels, once: a minute at most", flush=True)
        logging.disable(logging.CRITICAL)
        with TemporaryDirectory() as name, patch.dict(os.environ, {"FEDAPP_HOME": f"{name}/home"}):
            compile_kernels(Path(name))
        done.touch()


if __name__ == "__main__":
    compile_until_closed() if sys.argv[1:] == ["-"] else main()
