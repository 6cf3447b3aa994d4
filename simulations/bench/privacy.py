"""What an epsilon costs PAX: scores on test rows, by epsilon and by how trees are drawn.

Each cell trains the private model of several seeds, each of which holds other rows back, and scores
it on the held-back rows themselves; the scores that a run tells have noise of their own. Beside
them stand the model under secure aggregation without noise, at PAX's usual settings, and the same
trees at an epsilon of 1000, which is what drawing alone costs.

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

from fedapp.home import write_whole
from fedapp.packages import versions
from fedapp.report.canvas import add_legend, line_style, new_canvas, new_pens, to_png
from simulations import bench
from simulations.scored import Scored, score, trained

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
    """What is trained: which trees, how deep, and of how many rounds; scores of so many seeds."""

    trees: Sequence[str]
    epsilons: Sequence[float]
    rounds: int
    depth: int
    eta: float
    seeds: int


def cells(data: str, plan: Plan) -> Iterator[Cell]:
    """All cells of one table."""
    usual = {"num-boost-round": 50, "max-depth": 6, "eta": 0.3}
    own = {name: value for name, value in DATA[data].items() if not name.startswith("privacy.")}
    yield _cell(data, "greedy, no noise", 0.0, {**own, **usual}, plan.seeds)
    shape = {"num-boost-round": plan.rounds, "max-depth": plan.depth, "eta": plan.eta}
    for trees in plan.trees:
        for epsilon in (*plan.epsilons, NO_NOISE):
            promised = {"privacy.epsilon": epsilon, "privacy.delta": DELTA, **HOW[trees]}
            yield _cell(data, trees, epsilon, {**DATA[data], **shape, **promised}, plan.seeds)


def _cell(data: str, trees: str, epsilon: float, given: dict[str, Any], seeds: int) -> Cell:
    scores = []
    for seed in range(seeds):
        common = {"data": data, "parties": PARTIES, "seed": seed, "pax.aggregation": "secure"}
        settings, model, _ = trained({**common, **given})
        metric, value = test_score(score(settings, model)["test"], bool(model.classes))
        scores.append(value)
    spread = statistics.stdev(scores) if seeds > 1 else 0.0
    return Cell(data, trees, epsilon, metric, statistics.mean(scores), spread)


def test_score(found: Scored, has_classes: bool) -> tuple[str, float]:
    """AUC of two classes, RMSE of numbers."""
    if has_classes:
        return "auc", float(roc_auc_score(found.labels, found.margins[:, 0]))
    return "rmse", float(np.sqrt(np.mean((found.labels - found.margins[:, 0]) ** 2)))


def drawing(found: Sequence[Cell]) -> Figure:
    """A line for each way to draw trees, over epsilon; one table a row of axes."""
    names = list(dict.fromkeys(cell.data for cell in found))
    figure, _ = new_canvas(height=2.6 * len(names), rows=len(names))
    for ax, name in zip(figure.axes, names, strict=True):
        own = [cell for cell in found if cell.data == name]
        without = next(cell for cell in own if not cell.epsilon)
        for trees, (color, dash) in zip(HOW, new_pens(), strict=False):
            if not any(cell.trees == trees for cell in own):
                continue
            line = [cell for cell in own if cell.trees == trees and cell.epsilon < NO_NOISE]
            points = [cell.epsilon for cell in line]
            style = {"color": color, "linestyle": dash, **line_style(points)}
            ax.errorbar(
                points,
                [cell.mean for cell in line],
                [cell.deviation for cell in line],
                label=trees,
                capsize=2,
                **style,
            )
        ax.axhline(without.mean, color="#555555", linewidth=1, label="without noise, greedy")
        ax.set_xscale("log", base=2)
        ax.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        ax.set_xlabel("epsilon")
        ax.set_ylabel(f"{name}, test {without.metric}")
    add_legend(figure.axes[0])
    return figure


def show(found: Sequence[Cell]) -> None:
    """Print a line for each table and way to draw trees."""
    epsilons = list(dict.fromkeys(cell.epsilon for cell in found if cell.epsilon))
    header, rows = ["data", "trees", "no noise", *(f"{one:g}" for one in epsilons)], []
    for data in dict.fromkeys(cell.data for cell in found):
        own = [cell for cell in found if cell.data == data]
        for trees in (name for name in HOW if any(cell.trees == name for cell in own)):
            line = {cell.epsilon: cell for cell in own if cell.trees == trees or not cell.epsilon}
            shown = [line[epsilon] for epsilon in (0.0, *epsilons)]
            texts = [f"{cell.mean:.4f} ± {cell.deviation:.4f}" for cell in shown]
            rows.append([f"{data}, {own[0].metric}", trees, *texts])
    bench.show("", header, rows)


def main() -> None:
    """Print the table and one JSON line; write both the line and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=list(DATA))
    parser.add_argument("--epsilons", nargs="*", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("."), help="folder of the two files")
    parser.add_argument("--trees", nargs="*", default=list(HOW), choices=list(HOW))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("--eta", type=float, default=ETA)
    given = parser.parse_args()
    shape = {name: getattr(given, name) for name in ("rounds", "depth", "eta")}
    plan = Plan(given.trees, given.epsilons, seeds=given.seeds, **shape)
    found = [cell for data in given.data for cell in cells(data, plan)]
    show(found)
    shape |= {"delta": DELTA, "parties": PARTIES}
    made = versions(("fedapp", "numpy", "dp-accounting", "flwr"))
    lines = {"cells": [asdict(cell) for cell in found], "seeds": given.seeds, **shape}
    text = json.dumps({"bench": "privacy", **lines, "versions": made})
    print(text)
    given.output.mkdir(parents=True, exist_ok=True)
    write_whole(given.output / "privacy.json", text.encode())
    write_whole(given.output / "privacy.png", to_png(drawing(found)))


if __name__ == "__main__":
    main()
