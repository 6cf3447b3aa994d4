"""Rounds of a boosted model: their scores, a part of them, and a model whose rounds come first."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp import metrics
from fedapp.arrays import Floats
from fedapp.errors import ConfigError
from fedapp.records.document import to_text
from fedapp.run_files import Scores
from fedapp.run_folder import INITIAL_MODEL, RunFolder
from fedapp.runs.predict import PredictedRows
from fedapp.trees.model import Ensemble, importance, ordered_sets
from fedapp.trees.objective import transform
from fedapp.trees.predict import add_trees, find_leaves, predict_margins
from fedapp.trees.xgboost import to_xgboost_json
from strategies.scoring import History

log = logging.getLogger("fedapp")
Range = tuple[int, int]


def filled(rows: Any) -> npt.NDArray[Any]:
    """Sparse rows as an array; entries that are absent are missing, as in XGBoost's DMatrix."""
    entries = rows.tocoo()
    values = np.full(rows.shape, np.nan, rows.dtype)
    values[entries.row, entries.col] = entries.data
    return values


def path_of_model(model: Any, folder: Path) -> Path:
    """Path of a model to continue; a booster, or a fitted estimator's, is written to ``folder``."""
    if isinstance(model, str | PathLike):
        return Path(model).resolve()
    booster = model.get_booster() if hasattr(model, "get_booster") else model
    if not hasattr(booster, "save_model"):
        rule = "must be a path, a fitted estimator or an xgboost.Booster"
        raise ConfigError(f"init-model {rule}, got {type(model).__name__}")
    path = folder / INITIAL_MODEL
    booster.save_model(path)
    return path


def round_ends(folder: RunFolder) -> list[int]:
    """Number of trees after each round, those of the model that the run continued first."""
    initial = folder.summary.get("init_model", {"rounds": 0, "trees": 0})
    a_round = initial["trees"] // max(initial["rounds"], 1)
    lines = folder.rounds
    ends = [a_round * n for n in range(1, initial["rounds"] + 1)]
    return [*ends, *(line["trees"] for line in lines)]


def only_rounds(folder: RunFolder, rows: PredictedRows, iteration_range: Range) -> PredictedRows:
    """The rows with a model of some rounds, and its predictions; an end of 0 means all rounds."""
    if not isinstance(model := rows.model, Ensemble):
        rule = "must be omitted for other models than boosted trees"
        raise ConfigError(f"iteration_range {rule}, got {iteration_range}")
    # Early stopping has removed the last rounds of those trained.
    ends = [0, *(end for end in round_ends(folder) if end <= len(model.trees))]
    first, end = iteration_range if iteration_range[1] else (0, len(ends) - 1)
    if not 0 <= first <= end < len(ends):
        rule = f"must be two numbers of rounds, the first <= the second <= {len(ends) - 1}"
        raise ConfigError(f"iteration_range {rule}, got {iteration_range}")
    if model.curve is not None and end - first < len(ends) - 1:
        log.warning("predictions of some rounds are not calibrated: the curve is of all rounds")
    model = model.with_trees(ordered_sets(model.trees[ends[first] : ends[end]], model.sets))
    margins = predict_margins(model, rows.table.values, rows.table.base_margins)
    margins = model.calibrated(margins)
    return replace(rows, model=model, predictions=transform(model.objective, margins))


def leaves_of(rows: PredictedRows) -> npt.NDArray[np.int32]:
    """Number of each row's leaf in each tree; int32, shape (n_rows, n_trees)."""
    if not isinstance(model := rows.model, Ensemble):
        raise ConfigError("apply must be of boosted trees, got another model")
    return find_leaves(model.trees, rows.table.values, model.sets).T


def evaluate_rounds(
    folder: RunFolder, sets: Sequence[tuple[PredictedRows, Floats]], patience: int
) -> tuple[Sequence[Sequence[Scores]], int]:
    """Score every round on each set and find the best round on the last set.

    ``sets`` are rows and their labels; if empty, the run's validation scores are read. The search
    for the best round stops after ``patience`` rounds without a better score, 0: never; with
    patience the model in ``folder`` is cut back to the best round. Returns one list of scores by
    round for each set, and the best round from 1; 0 if there are no scores.
    """
    summary, lines = folder.summary, folder.rounds
    history = History(summary["objective"], patience, (), tuple(summary["eval_metrics"]))
    ends, valid = [line["trees"] for line in lines], [line["valid"] for line in lines]
    if not sets:
        metric_values = np.array([scores.get(history.metric) for scores in valid], dtype=float)
        history = History(history.objective, 0, tuple(metric_values), history.eval_metrics)
        return [valid], history.best_round if valid and all(valid) else 0
    if not isinstance(model := sets[0][0].model, Ensemble):
        raise ValueError(f"eval_set must be for boosted trees, got {summary['strategy']}")
    margins = [model.starts(len(y)) for _, y in sets]
    scores: list[list[dict[str, float]]] = [[] for _ in sets]
    for first, last in pairwise([0, *ends]):
        for index, (rows, labels) in enumerate(sets):
            trees, before = model.trees[first:last], margins[index]
            margins[index] = after = add_trees(before, trees, rows.table.values, model.sets)
            pooled = after, labels, np.ones_like(labels)
            scores[index].append(metrics.pooled(model.objective, *pooled, history.eval_metrics))
        history.add(scores[-1][-1])
        if history.stops:
            break
    if patience:
        best = history.best_round
        model = model.with_trees(ordered_sets(model.trees[: ends[best - 1]], model.sets))
        folder.write("model.json", to_text(model))
        folder.write("model.xgb.json", to_xgboost_json(model))
        at_best = {"train": lines[best - 1]["train"], "valid": scores[-1][best - 1], "test": {}}
        facts = {"trees": len(model.trees), "importance": importance(model), "best_round": best}
        folder.add_to_summary({**facts, "threshold": {}, "metrics": {**at_best, "by_party": {}}})
    return scores, history.best_round
