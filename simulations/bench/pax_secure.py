"""What secure aggregation costs PAX: seconds and bytes a tree, beside plain sums.

Bins by shares of the rows (``share``) send less than ``max-bin`` bins at every party (``equal``),
which masked sums need. Runs of all three variants take turns, so that other load on the machine
affects all alike. First, the model under masks is checked to equal that of one party with all rows.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedapp.settings import Settings, load_settings
from simulations.bench import BINARY, show, tell
from simulations.bench.pax_speed import run_pax, write_rows

MAX_BIN, DEPTH = 255, 6
PLAIN, EQUAL, SECURE = "plain, share", "plain, equal", "secure"
HOW = {
    PLAIN: {"pax.aggregation": "plain", "pax.bins": "share"},
    EQUAL: {"pax.aggregation": "plain", "pax.bins": "equal"},
    SECURE: {"pax.aggregation": "secure"},
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of one way of summing; ``begin_``: before the first tree."""

    sums: str
    seconds_a_tree: float
    bytes_a_tree: float
    begin_seconds: float
    begin_bytes: float
    exchanges: int
    auc: float


def settings_of(data: str, sums: str, parties: int, trees: int) -> Settings:
    return load_settings(
        {
            "data": data,
            "label": "label",
            **BINARY,
            "parties": parties,
            "num-boost-round": trees,
            "max-depth": DEPTH,
            "max-bin": MAX_BIN,
            "test-fraction": 0.1,
            **HOW[sums],
        }
    )


def measure(data: str, parties: int, trees: int, repeats: int) -> Iterator[Cost]:
    """Medians after a warm-up; runs of one tree and of all trees separate the set-up from trees."""
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for repeat in range(repeats + 1):
        for sums in HOW:
            for n_trees in (1, trees):
                summary = run_pax(settings_of(data, sums, parties, n_trees))[0]
                if repeat:
                    runs.setdefault((sums, n_trees), []).append(summary)
    for sums in HOW:
        first, last = runs[sums, 1], runs[sums, trees]
        short, whole = (
            statistics.median(summary["seconds"]["train"] for summary in each)
            for each in (first, last)
        )
        sent, all_sent = (sum(each[0]["bytes"].values()) for each in (first, last))
        a_tree, bytes_a_tree = (whole - short) / (trees - 1), (all_sent - sent) / (trees - 1)
        set_up = short - a_tree, sent - bytes_a_tree
        auc = last[0]["metrics"]["test"]["auc"]
        yield Cost(sums, a_tree, bytes_a_tree, *set_up, last[0]["exchanges"], auc)


def rows_of(costs: list[Cost]) -> Iterator[list[str]]:
    by_name = {cost.sums: cost for cost in costs}
    for cost in costs:
        ratios = [cost.seconds_a_tree / by_name[plain].seconds_a_tree for plain in (PLAIN, EQUAL)]
        sent = [f"{cost.bytes_a_tree / 1e3:.0f}", f"{cost.begin_seconds:.2f}"]
        sent += [f"{cost.begin_bytes / 1e6:.1f}", str(cost.exchanges), f"{cost.auc:.4f}"]
        each = f"{cost.seconds_a_tree * 1e3:.1f}", *(f"{ratio:.2f}" for ratio in ratios)
        yield [cost.sums, *each, *sent]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--columns", type=int, default=23, help="5 or more")
    parser.add_argument("--parties", type=int, default=3)
    parser.add_argument("--trees", type=int, default=20, help="2 or more")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = write_rows(Path(folder) / "rows.parquet", options.rows, options.columns)
        models = [run_pax(settings_of(data, SECURE, n, 2))[1] for n in (1, options.parties)]
        if models[0] != models[1]:
            parties = options.parties
            raise RuntimeError(f"the model must be that of one party, got another with {parties}")
        costs = list(measure(data, options.parties, options.trees, options.repeats))
    header = ["sums", "ms a tree", "/ share", "/ equal", "kB a tree", "s before", "MB before"]
    heading = f"{options.parties} parties, {options.rows:,} x {options.columns}, depth {DEPTH}"
    show(heading, [*header, "exchanges", "AUC"], rows_of(costs))
    lines = [asdict(cost) for cost in costs]
    packages = "fedapp", "numpy", "cryptography", "flwr"
    tell("pax_secure", packages, **vars(options), by=["sums"], lines=lines)


if __name__ == "__main__":
    main()
