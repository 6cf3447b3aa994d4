"""Strategies side by side: the same rows, several seeds, one table.

Every cell is an ordinary run in a folder of its own, ``<output>/<strategy>-<seed>``; a cell that is
finished is not run again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.config import Settings, Value, flatten, load_settings
from fedapp.errors import ConfigError
from fedapp.metrics import BETTER, default_metric
from fedapp.report.summary import read_run
from fedapp.run_folder import RunFolder
from simulations.baselines import run_baselines

POOLED = "pooled XGBoost"
Engine = Callable[[Settings], RunFolder]
# Settings that name a run but do not change what it finds.
NO_MATTER = {"run-dir", "resume"}


@dataclass(frozen=True, slots=True)
class Line:
    """One strategy over all seeds.

    Parameters
    ----------
    name : of the strategy, or of a baseline.
    scores : test scores by seed, of the metric that early stopping follows.
    seconds, exchanges, n_bytes : means of a run: train seconds, exchanges, bytes both ways; None
        for a baseline, which sends nothing.
    """

    name: str
    scores: tuple[float, ...]
    seconds: float | None = None
    exchanges: float | None = None
    n_bytes: float | None = None

    @property
    def mean(self) -> float:
        """Mean score."""
        return float(np.mean(self.scores))

    @property
    def spread(self) -> float:
        """Standard deviation of the score over the seeds; 0 for one seed."""
        return float(np.std(self.scores, ddof=1)) if len(self.scores) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Lines of the table, best first, and the metric they are ordered by."""

    metric: str
    seeds: tuple[int, ...]
    lines: tuple[Line, ...]


def compare(
    strategies: Sequence[str],
    overrides: Mapping[str, Value],
    n_seeds: int,
    output: Path,
    engine: Engine,
    tell: Callable[[str], None] = lambda text: None,
    begin: Callable[[str], None] = lambda doing: None,
) -> Comparison:
    """Run every strategy with every seed, and the baselines, on the same rows.

    Parameters
    ----------
    strategies : names of methods.
    overrides : settings of all runs; the seeds are ``seed``, ``seed`` + 1, ...
    n_seeds : >= 1.
    output : folder of the cells; may hold finished ones.
    engine : runs one cell.
    tell : told of every cell.
    begin : told what is done next.

    Raises
    ------
    ConfigError : a setting breaks its rule, or ``output`` holds cells of other settings.
    """
    if n_seeds < 1:
        raise ConfigError(f"seeds must be >= 1, got {n_seeds}")
    first = load_settings({**overrides, "strategy": strategies[0]})
    seeds = tuple(range(first.seed, first.seed + n_seeds))
    metric = default_metric(first.objective)
    lines = []
    for strategy in dict.fromkeys(strategies):
        cells = []
        for seed in seeds:
            given = {**overrides, "strategy": strategy, "seed": seed}
            begin(f"{strategy}, seed {seed}")
            cells.append(finished_cell(load_settings(given), output, engine, tell))
        lines.append(_line(strategy, cells, metric))
    lines += _baselines(first, seeds, output, metric, tell, begin)
    ordered = sorted(lines, key=lambda line: line.mean, reverse=BETTER[metric])
    found = Comparison(metric, seeds, tuple(ordered))
    RunFolder(output).write_json("comparison.json", asdict(found))
    return found


def finished_cell(
    settings: Settings, output: Path, engine: Engine, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The summary of one run, which is made unless it is there."""
    name = f"{settings.strategy}-{settings.seed}"
    folder = (output / name).resolve()
    if (folder / "summary.json").exists():
        _check_same(settings, folder)
        tell(f"{name}: finished before")
    else:
        # What is left of a run that was interrupted, or that failed.
        shutil.rmtree(folder, ignore_errors=True)
        engine(settings.model_copy(update={"run_dir": str(folder)}))
        tell(f"{name}: done")
    return dict(read_run(folder).summary)


def _check_same(settings: Settings, folder: Path) -> None:
    """Hold that a finished cell was run with these settings."""
    asked = flatten(settings.as_config())
    ran = flatten(read_run(folder).config)
    others = sorted(name for name in {*asked, *ran} - NO_MATTER if asked.get(name) != ran.get(name))
    if others:
        raise ConfigError(
            f"output must hold runs of the same settings, "
            f"got another {others[0]} in {folder.name}: {ran.get(others[0])!r}"
        )


def _line(name: str, cells: Sequence[Mapping[str, Any]], metric: str) -> Line:
    """A strategy's runs as one line."""

    def mean(of: Callable[[Mapping[str, Any]], float]) -> float:
        return float(np.mean([of(cell) for cell in cells]))

    return Line(
        name,
        tuple(_score(cell["metrics"].get("test", {}), metric) for cell in cells),
        mean(lambda cell: cell["seconds"]["train"]),
        mean(lambda cell: cell["exchanges"]),
        mean(lambda cell: sum(cell["bytes"].values())),
    )


def _score(scores: Mapping[str, float | None], metric: str) -> float:
    value = scores.get(metric)
    return float("nan") if value is None else value


def _baselines(
    settings: Settings,
    seeds: Sequence[int],
    output: Path,
    metric: str,
    tell: Callable[[str], None],
    begin: Callable[[str], None],
) -> list[Line]:
    """Pooled XGBoost and each party alone, on the same rows."""
    scores: dict[str, list[float]] = {}
    for seed in seeds:
        path = output / f"baselines-{seed}.json"
        if not path.exists():
            begin(f"training the baselines, seed {seed}")
            found = run_baselines(settings.model_copy(update={"seed": seed}))
            RunFolder(output).write_json(path.name, found)
            tell(f"baselines-{seed}: done")
        found = json.loads(path.read_text())
        for name, values in {POOLED: found["pooled"], **_alone(found)}.items():
            scores.setdefault(name, []).append(_score(values, metric))
    return [Line(name, tuple(values)) for name, values in scores.items()]


def _alone(found: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    return {f"{party} alone": scores for party, scores in found["alone"].items()}
