"""How seconds, bytes and exchanges grow with the number of parties.

A table of one size is split among more and more parties: its rows for PAX, its columns for
SecureBoost. Seconds are of the training; CPU is of the whole run, processes that it starts
included. ``growth`` is the exponent of the number of parties from one line of a method to its next:
1 where twice as many parties take twice as much, 0 where they take the same.

``python -m simulations.bench.parties`` prints a table and a JSON line; ``--quick`` takes fewer
rows, trees and bits of the key.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedapp.config import Settings, load_settings
from simulations.bench import BINARY, cpu_seconds, exponent, show, tell
from simulations.bench.federated_forest import run_once
from simulations.bench.pax_speed import write_rows

MAX_BIN = 255
TEST_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a table and of the models that are trained on it."""

    rows: int
    columns: int
    trees: int
    depth: int
    parties: tuple[int, ...]
    max_bin: int
    own: Mapping[str, Any]  # further settings


METHODS = {
    "pax, share": Sizes(20_000, 23, 10, 6, (3, 10, 50, 100), MAX_BIN, {"pax.bins": "share"}),
    "pax, equal": Sizes(20_000, 23, 10, 6, (3, 10, 50, 100), MAX_BIN, {"pax.bins": "equal"}),
    "secureboost": Sizes(5_000, 24, 3, 3, (2, 4, 8), 32, {"secureboost.key-bits": 2048}),
}
SMALL_KEY = {"secureboost.key-bits": 512, "secureboost.insecure-small-key": True}
QUICK = {
    "pax, share": Sizes(4_000, 10, 3, 4, (3, 10, 50, 100), 64, {"pax.bins": "share"}),
    "pax, equal": Sizes(4_000, 10, 3, 4, (3, 10, 50, 100), 64, {"pax.bins": "equal"}),
    "secureboost": Sizes(1_000, 16, 2, 3, (2, 4, 8), 16, SMALL_KEY),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One run."""

    method: str
    parties: int
    seconds: float
    cpu_seconds: float
    exchanges: int
    messages: int
    n_bytes: int
    auc: float


def settings_of(data: str, method: str, sizes: Sizes, parties: int) -> Settings:
    """A run's settings."""
    strategy = method.partition(",")[0]
    by_columns = {"columns": "even", "align": "ordered"} if strategy == "secureboost" else {}
    return load_settings(
        {
            "strategy": strategy,
            "data": data,
            "label": "label",
            **BINARY,
            "parties": parties,
            "num-boost-round": sizes.trees,
            "max-depth": sizes.depth,
            "max-bin": sizes.max_bin,
            "test-fraction": TEST_FRACTION,
            **by_columns,
            **sizes.own,
        }
    )


def measure(method: str, sizes: Sizes) -> Iterator[Line]:
    """A line for each number of parties, after a run that warms up."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_rows(Path(folder) / "rows.parquet", sizes.rows, sizes.columns)
        run_once(settings_of(data, method, sizes, sizes.parties[0]))
        for parties in sizes.parties:
            began = cpu_seconds()
            run = run_once(settings_of(data, method, sizes, parties))
            used, summary = cpu_seconds() - began, run.summary
            yield Line(
                method,
                parties,
                summary["seconds"]["train"],
                used,
                summary["exchanges"],
                len(run.ledger),
                sum(summary["bytes"].values()),
                summary["metrics"]["test"]["auc"],
            )


def growth(before: Line, after: Line, what: str) -> float:
    """The exponent of the number of parties by which a figure grows from one line to another."""
    figures = getattr(before, what), getattr(after, what)
    return exponent(figures, (before.parties, after.parties))


def grown(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Lines with their growth since the one before, None for the first of a method."""
    found = []
    for place, line in enumerate(lines):
        before = lines[place - 1] if place and lines[place - 1].method == line.method else None
        growths = {
            f"growth of {what}": round(growth(before, line, what), 2) if before else None
            for what in ("seconds", "cpu_seconds", "n_bytes")
        }
        found.append({**asdict(line), **growths})
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small tables and small keys")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    given = parser.parse_args(words)
    every = QUICK if given.quick else METHODS
    lines = [line for method in given.only for line in measure(method, every[method])]
    found = grown(lines)
    header = ["method", "parties", "seconds", "CPU", "exchanges", "messages", "MB", "AUC"]
    header += ["growth of seconds", "of CPU", "of bytes"]
    show(
        "a table of one size, split among so many",
        header,
        (
            [
                line.method,
                str(line.parties),
                f"{line.seconds:.2f}",
                f"{line.cpu_seconds:.2f}",
                str(line.exchanges),
                str(line.messages),
                f"{line.n_bytes / 1e6:.1f}",
                f"{line.auc:.4f}",
                *("" if value is None else f"{value:.2f}" for value in list(told.values())[-3:]),
            ]
            for line, told in zip(lines, found, strict=True)
        ),
    )
    sizes = {method: asdict(every[method]) for method in given.only}
    tell("parties", ("fedapp", "flwr", "numpy"), by=["method", "parties"], lines=found, sizes=sizes)


if __name__ == "__main__":
    main()
