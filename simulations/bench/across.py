"""How long whole trainings take across three real sites on this machine.

``python -m simulations.bench.across`` splits breast-cancer among three sites and trains PAX on rows
and SecureBoost on columns, with the default settings, 50 trees of depth 6, through a SuperLink,
SuperNodes and TLS. Each model must equal that of the local engine on the same tables. Prints a JSON
line for each: minutes, exchanges, CPU of each program except the ServerApp, and the memory of each
site's processes between runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer

from simulations.bench import tell
from simulations.bench.exchange import SITES, cpu_used
from simulations.deployment import DRAWS, Deployment

IDLE_SECONDS = 45  # after which a site has ended the processes that answered
METHODS = ("pax", "secureboost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("methods", nargs="*", default=METHODS, help=" or ".join(METHODS))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--max-depth", type=int, default=6)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for method in options.methods:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FEDAPP_HOME"] = f"{folder}/home"
            settings = {
                "strategy": method,
                "parties": len(SITES),
                "num-boost-round": options.rounds,
                "early-stopping-rounds": 0,
                "max-depth": options.max_depth,
                "max-bin": 32 if method == "secureboost" else 256,
            }
            tell("across", ("fedapp", "flwr"), **settings, **timed(Path(folder), settings))


def timed(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Time one training, and compare its model with the local engine's.

    Raises
    ------
    AssertionError : scores or models differ.
    """
    nodes = tables(folder, by_columns=settings["strategy"] == "secureboost")
    deployment = Deployment(folder / "sites", nodes)
    local = deployment.locally(folder / "local", settings)
    with deployment.running():
        start, cpu = time.monotonic(), cpu_used(deployment)
        run = deployment.train(folder / "across", settings)
        minutes = (time.monotonic() - start) / 60
        time.sleep(IDLE_SECONDS)
        cpu = cpu_used(deployment) - cpu
        # Memory that processes do not share with others, in bytes
        idle = {
            name: sum(process.memory_full_info().uss for process in deployment.family(name))
            for name in SITES
        }
    summary, exchanges = run.summary, run.summary["exchanges"]
    assert summary["metrics"] == local.summary["metrics"], (
        "scores must be those of the local engine"
    )
    models = [(each.path / "model.json").read_bytes() for each in (run, local)]
    assert models[0] == models[1], "the model must be that of the local engine"
    return {
        "minutes": round(minutes, 2),
        "exchanges": exchanges,
        "seconds an exchange": round(summary["seconds"]["total"] / exchanges, 3),
        "CPU seconds an exchange": {
            program: round(seconds / exchanges, 3) for program, seconds in cpu.most_common()
        },
        "local seconds": local.summary["seconds"]["total"],
        "idle MB a site": {name: round(n_bytes / 2**20) for name, n_bytes in idle.items()},
    }


def tables(folder: Path, by_columns: bool) -> dict[str, dict[str, str]]:
    """Write the sites' tables; return their node configs."""
    data = load_breast_cancer()
    names = [name.replace(" ", "_") for name in data.feature_names]
    rows, columns = np.arange(len(data.data)), np.arange(len(names))
    nodes = {}
    for index, name in enumerate(SITES):
        site_rows = rows if by_columns else rows[index :: len(SITES)]
        site_columns = columns[index :: len(SITES)] if by_columns else columns
        has_label = not by_columns or index == 0
        header = ["patient", *(names[column] for column in site_columns)]
        lines = [",".join([*header, "benign"] if has_label else header)]
        for row in site_rows:
            fields = [f"p{row}", *(repr(float(data.data[row, column])) for column in site_columns)]
            lines.append(",".join([*fields, str(data.target[row])] if has_label else fields))
        path = folder / f"{name}.csv"
        path.write_text("\n".join(lines) + "\n")
        nodes[name] = {"data": str(path), "id": "patient", "allow-export": "true", **DRAWS}
        nodes[name]["allow"] = ",".join(METHODS)
        if has_label:
            nodes[name]["label"] = "benign"
    return nodes


if __name__ == "__main__":
    main()
