"""Figures 4 to 6 of the Federated Forest paper: one-round against classical prediction.

Source: Liu et al. 2019 (arXiv:1905.10053v1), section 5.4. ``federated_forest`` runs it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
from matplotlib.ticker import FixedLocator

from fedapp.data.datasets import find_dataset, read_source
from fedapp.data.partition import split_rows
from fedapp.data.table import Table
from fedapp.report.plots import line_style, new_canvas, new_pens, to_png
from fedapp.report.summary import read_run
from fedapp.runs.compare import Engine, finished_cell
from fedapp.runs.engines import run_local, run_simulation
from fedapp.settings import load_settings
from fedapp.trees.objective import REGRESSION
from simulations.papers.fed_eini import run_and_keep, spent
from simulations.papers.fedxgbllr import OBJECTIVES
from simulations.papers.tables import Row, console, grouped, new_grid

Point = tuple[int, int, float]  # trees, depth, share of the rows

SEED, EXACT = 42, 65535  # EXACT bins: a cut at every value
COMMON: Row = {"strategy": "federated-forest", "parties": 2, "align": "ordered"}
COMMON |= {"valid-fraction": 0.0, "max-bin": EXACT}

PREDICTED, TEST = ("spambase", "waveform"), 0.4
FIGURES: dict[str, tuple[str, list[Point]]] = {
    "figure_4": ("trees", [(trees, 4, 0.2) for trees in (8, 16, 24, 32)]),
    "figure_5": ("depth", [(8, depth, 0.2) for depth in (4, 6, 8, 10, 12, 14, 16)]),
    "figure_6": ("share", [(8, 4, share) for share in (0.1, 0.2, 0.3, 0.4)]),
}
AXES = {"trees": "trees", "depth": "maximum depth", "share": "share of the rows"}
ONE_ROUND, CLASSICAL, AT_ONCE = "one-round", "classical", "all trees at once"
WAYS = {  # method, trees at once
    ONE_ROUND: ("one-round", 0),
    CLASSICAL: ("interactive", 1),
    AT_ONCE: ("interactive", 0),
}
COMPARED = ONE_ROUND, CLASSICAL
IN_PROCESS, SIMULATION = "in process", "simulation"
ENGINES: dict[str, Engine] = {IN_PROCESS: run_local, SIMULATION: run_simulation}
TIMED, QUICK_TIMED = {IN_PROCESS: 5, SIMULATION: 1}, {IN_PROCESS: 3, SIMULATION: 1}
FASTER = 10  # times: the target in the simulation engine


def write_rows(path: Path, table: Table, rows: npt.NDArray[Any], labelled: bool = True) -> str:
    """Write some rows of a table as Parquet, with the label y; return the setting ``data``."""
    columns = zip(table.columns, table.values[rows].T, strict=True)
    arrays: Row = {name: np.ascontiguousarray(column) for name, column in columns}
    if labelled:
        assert table.labels is not None
        arrays["y"] = table.labels[rows]
    pa.parquet.write_table(pa.table(arrays), path)
    return str(path.resolve())


def own_settings(objective: str, trees: int, depth: int) -> Row:
    """Settings that grow a forest."""
    config = {**COMMON, "objective": objective, "federated-forest.trees": trees}
    config["federated-forest.max-features"] = "all" if objective == REGRESSION else "sqrt"
    return config | {"federated-forest.max-depth": depth}


def model_of(data: str, trees: int, depth: int, output: Path) -> str:
    """Id of the model of a set, which is trained unless it exists."""
    config = own_settings(OBJECTIVES[find_dataset(data).task], trees, depth)
    more = {"data": data, "columns": "even", "test-fraction": TEST, "seed": SEED}
    folder, tell = output / f"{data}-{trees}-{depth}", partial(console.print, f"{data}:")
    summary = finished_cell(load_settings({**config, **more}), folder, run_local, tell)
    return str(summary["model_id"])


def predicted(data: str, point: Point, way: str, engine: str, n: int, output: Path) -> Row:
    """Median seconds of one way at one point over ``n`` runs, and the folder of its predictions."""
    trees, depth, share = point
    table, (method, at_once) = read_source(data), WAYS[way]
    test = split_rows(table.n_rows, TEST, 0.0, SEED).test
    rows = np.random.default_rng(SEED).permutation(test)[: round(share * table.n_rows)]
    path = output / f"{data}-{share}.parquet"
    config = {**COMMON, "strategy": method, "data": write_rows(path, table, rows, labelled=False)}
    config |= {"model": model_of(data, trees, depth, output), "output": ".parquet"}
    config |= {"interactive.trees-at-once": at_once}
    names = data, *map(str, point), way.replace(" ", "-"), engine.replace(" ", "-")
    folder, costs = output / "-".join(names), []
    tell = partial(
        console.print, f"{data}, {trees} trees, depth {depth}, {share}, {way}, {engine}:"
    )
    for seed in range(SEED, SEED + n):
        keep = partial(run_and_keep, ENGINES[engine])
        finished_cell(load_settings({**config, "seed": seed}), folder, keep, tell)
        costs.append(spent(read_run(folder / f"{method}-{seed}").ledger))
    path.unlink()
    row = {"data": data, "engine": engine, "way": way, "rows": len(rows), "repeats": n}
    row |= dict(zip(AXES, point, strict=True)) | {"bytes": costs[0]["bytes"]}
    row |= {"seconds": statistics.median(one["seconds"] for one in costs)}
    return {**row, "exchanges": costs[0]["exchanges"], "folder": str(folder / f"{method}-{SEED}")}


def check_same(rows: Sequence[Row]) -> None:
    """Check that all ways and engines predict the same at each point.

    Raises
    ------
    ValueError : two do not.
    """
    for point, group in grouped(rows, "data", *AXES).items():
        first, *others = (
            pa.parquet.read_table(Path(row["folder"]) / "predictions.parquet") for row in group
        )
        for row, other in zip(group[1:], others, strict=True):
            if not other.equals(first):
                raise ValueError(f"predictions must be alike, got others {row['way']} at {point}")


def planned(quick: bool) -> list[tuple[str, Point, str, str, int]]:
    """All points of the figures, once each: set, point, way, engine, runs."""
    timed, runs = QUICK_TIMED if quick else TIMED, []
    for engine, data in ((engine, data) for engine in ENGINES for data in PREDICTED):
        is_cut = quick and engine != IN_PROCESS
        if is_cut and data != PREDICTED[0]:
            continue
        ways = [way for way in WAYS if not (is_cut and way == AT_ONCE)]
        points = dict.fromkeys(p for name in FIGURES for p in points_of(name, quick))
        runs += [(data, p, way, engine, timed[engine]) for p in points for way in ways]
    return runs


def points_of(figure: str, quick: bool) -> list[Point]:
    """Points of a figure; with --quick its ends."""
    points = FIGURES[figure][1]
    return [points[0], points[-1]] if quick else points


def rows_of(figure: str, rows: Sequence[Row]) -> list[Row]:
    """Rows measured at a figure's points, in order."""
    name, points = FIGURES[figure]
    own_rows = [row for row in rows if tuple(row[axis] for axis in AXES) in points]
    return sorted(own_rows, key=lambda row: row[name])


def show_figures(rows: Sequence[Row]) -> None:
    """Print seconds of all ways, and how much faster one round is."""
    names = ("figure", "data", "engine", "at", "rows", ONE_ROUND, CLASSICAL, "ratio", "at once")
    grid = new_grid("Figures 4 to 6: seconds of a prediction, exchanges", names, 4)
    for figure, (name, _) in FIGURES.items():
        groups = grouped(rows_of(figure, rows), "data", "engine", name)
        for (data, engine, value), group in groups.items():
            ways = {row["way"]: row for row in group}
            shown = {way: f"{row['seconds']:.3f} ({row['exchanges']})" for way, row in ways.items()}
            ratio = f"{ways[CLASSICAL]['seconds'] / ways[ONE_ROUND]['seconds']:.1f}"
            cells = [shown[ONE_ROUND], shown[CLASSICAL], ratio, shown.get(AT_ONCE, "-")]
            grid.add_row(figure[-1], data, engine, f"{name} {value}", str(group[0]["rows"]), *cells)
    console.print(grid)


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """By engine: how much faster one round is at least, and how seconds grow with the axes."""
    verdict_rows = []
    for (engine,), group in grouped(rows, "engine").items():
        ratios = {}
        for point, of_point in grouped(group, "data", *AXES).items():
            seconds = {row["way"]: row["seconds"] for row in of_point}
            ratios[point] = seconds[CLASSICAL] / seconds[ONE_ROUND]
        row = {"engine": engine, "least": min(ratios.values()), "most": max(ratios.values())}
        row |= {"least_at": min(ratios, key=ratios.__getitem__), "growth": {}}
        for figure, (name, _) in FIGURES.items():
            for way in COMPARED:
                lines = grouped((r for r in rows_of(figure, group) if r["way"] == way), "data")
                ends = [line[-1]["seconds"] / line[0]["seconds"] for line in lines.values()]
                row["growth"][f"{way}, {name}"] = max(ends)
        verdict_rows.append(row)
    return verdict_rows


def show_verdicts(rows: Sequence[Row]) -> None:
    """Print whether one round is as fast as the target."""
    for row in rows:
        met = f", target {FASTER}: {'met' if row['least'] >= FASTER else 'missed'}"
        target = met if row["engine"] == SIMULATION else ""
        data, trees, depth, share = row["least_at"]
        times = f"{row['least']:.1f} ({data}, {trees} trees, depth {depth}, share {share})"
        times += f" to {row['most']:.1f} times faster than classical{target}"
        console.print(f"{row['engine']}: one-round is {times}", soft_wrap=True)
        for axis, (name, points) in enumerate(FIGURES.values()):
            growth = [f"{way} x {row['growth'][f'{way}, {name}']:.2f}" for way in COMPARED]
            ends = f"{name} {points[0][axis]} to {points[-1][axis]}"
            console.print(f"  seconds, {ends}: {', '.join(growth)} at most")


def draw(figure: str, rows: Sequence[Row]) -> bytes:
    """Plot seconds of all ways, one set below the other, as PNG."""
    name, sets = FIGURES[figure][0], grouped(rows_of(figure, rows), "data")
    canvas, _ = new_canvas(7.5, 3.2 * len(sets), rows=len(sets))
    pens = dict(
        zip(((way, engine) for engine in ENGINES for way in WAYS), new_pens(), strict=False)
    )
    for ax, ((data,), of_data) in zip(canvas.axes, sets.items(), strict=True):
        for (way, engine), line in grouped(of_data, "way", "engine").items():
            color, dash = pens[way, engine]
            positions, seconds = [row[name] for row in line], [row["seconds"] for row in line]
            ax.plot(
                positions, seconds, dash, color=color, label=f"{way}, {engine}", **line_style(line)
            )
            ax.xaxis.set_major_locator(FixedLocator(positions))
        ax.set(yscale="log", xlabel=f"{AXES[name]}, {data}", ylabel="seconds")
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return to_png(canvas)
