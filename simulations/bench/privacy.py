"""What an epsilon costs PAX: scores on test rows, by epsilon and by how trees are drawn.

Each cell trains the private model with several seeds, each of which holds out other rows, and
scores it on these rows without noise (the scores that a run reports are noisy). References: the
model under secure aggregation without noise, with PAX's usual settings; and the same trees at an
epsilon of 1000, which shows what drawing them costs.

``python -m simulations.bench.privacy`` writes ``privacy.json`` and ``privacy.png``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score

from fedapp.home import write_atomically
from fedapp.packages import versions
from fedapp.report.plots import add_legend, line_style, new_canvas, new_pens, to_png
from fedapp.runs.baselines import Scored, run_and_load, score
from simulations import bench

DATA: dict[str, dict[str, Any]] = {
    "adult": {},
    "default-credit": {},
    "abalone": {"objective": "reg:squarederror", "privacy.clip": 5.0},
}
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
NO_NOISE = 1000.0
HOW: dict[str, dict[str, Any]] = {
    "cyclic": {"privacy.trees": "cyclic"},
    "random": {"privacy.trees": "random"},
    "greedy": {"privacy.trees": "greedy"},
}
ROUNDS, DEPTH, ETA, DELTA, PARTIES = 100, 4, 0.2, 1e-5, 3


@dataclass(frozen=True, slots=True)
class Cell:
    """Mean score over seeds, and its standard deviation; ``epsilon`` is 0 without noise."""

    data: str
    trees: str
    epsilon: float
    metric: str
    mean: float
    deviation: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Which trees are trained, their shape, and the number of seeds."""

    trees: Sequence[str]
    epsilons: Sequence[float]
    rounds: int
    depth: int
    eta: float
    seeds: int


def cells(data: str, plan: Plan) -> Iterator[Cell]:
    baseline = {"num-boost-round": 50, "max-depth": 6, "eta": 0.3}
    data_settings = {
        name: value for name, value in DATA[data].items() if not name.startswith("privacy.")
    }
    yield _cell(data, "greedy, no noise", 0.0, {**data_settings, **baseline}, plan.seeds)
    shape = {"num-boost-round": plan.rounds, "max-depth": plan.depth, "eta": plan.eta}
    for trees in plan.trees:
        for epsilon in (*plan.epsilons, NO_NOISE):
            privacy = {"privacy.epsilon": epsilon, "privacy.delta": DELTA, **HOW[trees]}
            yield _cell(data, trees, epsilon, {**DATA[data], **shape, **privacy}, plan.seeds)


def _cell(
    data: str, trees: str, epsilon: float, settings_of_cell: dict[str, Any], seeds: int
) -> Cell:
    scores = []
    for seed in range(seeds):
        common = {"data": data, "parties": PARTIES, "seed": seed, "pax.aggregation": "secure"}
        loaded, model, _ = run_and_load({**common, **settings_of_cell})
        metric, value = test_score(score(loaded, model)["test"], bool(model.classes))
        scores.append(value)
    spread = statistics.stdev(scores) if seeds > 1 else 0.0
    return Cell(data, trees, epsilon, metric, statistics.mean(scores), spread)


def test_score(scored: Scored, has_classes: bool) -> tuple[str, float]:
    """AUC of two classes, RMSE of numbers."""
    if has_classes:
        return "auc", float(roc_auc_score(scored.labels, scored.margins[:, 0]))
    return "rmse", float(np.sqrt(np.mean((scored.labels - scored.margins[:, 0]) ** 2)))


def drawing(cells: Sequence[Cell]) -> Figure:
    """Plot scores over epsilon: one line for each way to draw trees, one table a row of axes."""
    names = list(dict.fromkeys(cell.data for cell in cells))
    figure, _ = new_canvas(height=2.6 * len(names), rows=len(names))
    for ax, name in zip(figure.axes, names, strict=True):
        of_data = [cell for cell in cells if cell.data == name]
        without = next(cell for cell in of_data if not cell.epsilon)
        for trees, (color, dash) in zip(HOW, new_pens(), strict=False):
            if not any(cell.trees == trees for cell in of_data):
                continue
            line = [cell for cell in of_data if cell.trees == trees and cell.epsilon < NO_NOISE]
            points = [cell.epsilon for cell in line]
            style = {"color": color, "linestyle": dash, **line_style(points)}
            means, deviations = [cell.mean for cell in line], [cell.deviation for cell in line]
            ax.errorbar(points, means, deviations, label=trees, capsize=2, **style)
        ax.axhline(without.mean, color="#555555", linewidth=1, label="without noise, greedy")
        ax.set_xscale("log", base=2)
        ax.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        ax.set_xlabel("epsilon")
        ax.set_ylabel(f"{name}, test {without.metric}")
    add_legend(figure.axes[0])
    return figure


def show(cells: Sequence[Cell]) -> None:
    epsilons = list(dict.fromkeys(cell.epsilon for cell in cells if cell.epsilon))
    header, rows = ["data", "trees", "no noise", *(f"{epsilon:g}" for epsilon in epsilons)], []
    for data in dict.fromkeys(cell.data for cell in cells):
        of_data = [cell for cell in cells if cell.data == data]
        for trees in (name for name in HOW if any(cell.trees == name for cell in of_data)):
            line = {
                cell.epsilon: cell for cell in of_data if cell.trees == trees or not cell.epsilon
            }
            shown = [line[epsilon] for epsilon in (0.0, *epsilons)]
            texts = [f"{cell.mean:.4f} ± {cell.deviation:.4f}" for cell in shown]
            rows.append([f"{data}, {of_data[0].metric}", trees, *texts])
    bench.show("", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=list(DATA))
    parser.add_argument("--epsilons", nargs="*", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("."), help="folder of the two files")
    parser.add_argument("--trees", nargs="*", default=list(HOW), choices=list(HOW))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("--eta", type=float, default=ETA)
    options = parser.parse_args()
    shape = {name: getattr(options, name) for name in ("rounds", "depth", "eta")}
    plan = Plan(options.trees, options.epsilons, seeds=options.seeds, **shape)
    all_cells = [cell for data in options.data for cell in cells(data, plan)]
    show(all_cells)
    shape |= {"delta": DELTA, "parties": PARTIES}
    package_versions = versions(("fedapp", "numpy", "dp-accounting", "flwr"))
    lines = {"cells": [asdict(cell) for cell in all_cells], "seeds": options.seeds, **shape}
    text = json.dumps({"bench": "privacy", **lines, "versions": package_versions})
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output / "privacy.json", text.encode())
    write_atomically(options.output / "privacy.png", to_png(drawing(all_cells)))


if __name__ == "__main__":
    main()
