"""How long whole trainings take across three real sites on this machine.

``python -m simulations.bench.across`` gives each of three sites its share of breast-cancer, trains
PAX on rows and SecureBoost on columns with the default settings, 50 trees of depth 6, through a
SuperLink, SuperNodes and TLS, and holds each model against that of the local engine on the same
tables. Prints a JSON line for each: minutes, exchanges, CPU of each program but the ServerApp, and
the memory of each site's processes between runs.
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
import psutil
from sklearn.datasets import load_breast_cancer

from simulations.bench import tell
from simulations.bench.exchange import SITES, cpu_used
from simulations.deployment import DRAWS, Deployment

IDLE_SECONDS = 45  # after which a site has let go of what answered
METHODS = ("pax", "secureboost")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("methods", nargs="*", default=METHODS, help=" or ".join(METHODS))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--max-depth", type=int, default=6)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for method in given.methods:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FEDAPP_HOME"] = f"{folder}/home"
            settings = {
                "strategy": method,
                "parties": len(SITES),
                "num-boost-round": given.rounds,
                "early-stopping-rounds": 0,
                "max-depth": given.max_depth,
                "max-bin": 32 if method == "secureboost" else 256,
            }
            tell("across", ("fedapp", "flwr"), **settings, **timed(Path(folder), settings))


def timed(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """One training, and what it is held against.

    Raises
    ------
    AssertionError : the model is another one than the local engine's.
    """
    nodes = tables(folder, by_columns=settings["strategy"] == "secureboost")
    deployment = Deployment(folder / "sites", nodes)
    local = deployment.locally(folder / "local", settings)
    with deployment.running():
        began, used = time.monotonic(), cpu_used(deployment)
        run = deployment.train(folder / "across", settings)
        minutes = (time.monotonic() - began) / 60
        time.sleep(IDLE_SECONDS)
        used = cpu_used(deployment) - used
        idle = {name: idle_bytes(deployment.family(name)) for name in SITES}
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
            program: round(seconds / exchanges, 3) for program, seconds in used.most_common()
        },
        "local seconds": local.summary["seconds"]["total"],
        "idle MB a site": {name: round(found / 2**20) for name, found in idle.items()},
    }


def idle_bytes(processes: list[psutil.Process]) -> int:
    """Memory that processes do not share with others."""
    return sum(process.memory_full_info().uss for process in processes)


def tables(folder: Path, by_columns: bool) -> dict[str, dict[str, str]]:
    """Node configs of the sites, whose tables are written here."""
    data = load_breast_cancer()
    names = [name.replace(" ", "_") for name in data.feature_names]
    rows, columns = np.arange(len(data.data)), np.arange(len(names))
    nodes = {}
    for place, name in enumerate(SITES):
        own_rows = rows if by_columns else rows[place :: len(SITES)]
        own_columns = columns[place :: len(SITES)] if by_columns else columns
        has_label = not by_columns or place == 0
        header = ["patient", *(names[column] for column in own_columns)]
        lines = [",".join([*header, "benign"] if has_label else header)]
        for row in own_rows:
            fields = [f"p{row}", *(repr(float(data.data[row, column])) for column in own_columns)]
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
