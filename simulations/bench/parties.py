"""How seconds, bytes and exchanges grow with the number of parties.

A table of one size is split among more and more parties: its rows for PAX, its columns for
SecureBoost. Seconds are of training; CPU is of the whole run, including processes that it starts.
``growth`` is the exponent of the number of parties from one line of a method to the next: 1 if
costs double with the parties, 0 if they stay the same.

``python -m simulations.bench.parties`` prints a table and a JSON line; ``--quick`` takes fewer
rows, trees and key bits.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedapp.settings import Settings, load_settings
from simulations.bench import BINARY, cpu_seconds, exponent, show, tell
from simulations.bench.federated_forest import run_once
from simulations.bench.pax_speed import write_rows

MAX_BIN = 255
TEST_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a table and of the models trained on it."""

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
    """Costs and score of one run."""

    method: str
    parties: int
    seconds: float
    cpu_seconds: float
    exchanges: int
    messages: int
    n_bytes: int
    auc: float


def settings_of(data: str, method: str, sizes: Sizes, parties: int) -> Settings:
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
    """One line for each number of parties, after a warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_rows(Path(folder) / "rows.parquet", sizes.rows, sizes.columns)
        run_once(settings_of(data, method, sizes, sizes.parties[0]))
        for parties in sizes.parties:
            cpu_start = cpu_seconds()
            run = run_once(settings_of(data, method, sizes, parties))
            cpu, summary = cpu_seconds() - cpu_start, run.summary
            yield Line(
                method,
                parties,
                summary["seconds"]["train"],
                cpu,
                summary["exchanges"],
                len(run.ledger),
                sum(summary["bytes"].values()),
                summary["metrics"]["test"]["auc"],
            )


def growth(before: Line, after: Line, what: str) -> float:
    """Exponent with which a figure grows with the number of parties."""
    figures = getattr(before, what), getattr(after, what)
    return exponent(figures, (before.parties, after.parties))


def grown(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Lines with their growth since the previous one; None for the first of a method."""
    records = []
    for index, line in enumerate(lines):
        before = lines[index - 1] if index and lines[index - 1].method == line.method else None
        growths = {
            f"growth of {what}": round(growth(before, line, what), 2) if before else None
            for what in ("seconds", "cpu_seconds", "n_bytes")
        }
        records.append({**asdict(line), **growths})
    return records


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small tables and small keys")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args(words)
    sizes_of = QUICK if options.quick else METHODS
    lines = [line for method in options.only for line in measure(method, sizes_of[method])]
    records = grown(lines)
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
                *("" if value is None else f"{value:.2f}" for value in list(record.values())[-3:]),
            ]
            for line, record in zip(lines, records, strict=True)
        ),
    )
    sizes = {method: asdict(sizes_of[method]) for method in options.only}
    tell(
        "parties", ("fedapp", "flwr", "numpy"), by=["method", "parties"], lines=records, sizes=sizes
    )


if __name__ == "__main__":
    main()
