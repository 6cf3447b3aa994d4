"""Score every round of a run: on its validation rows, or on an ``eval_set``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fedapp import metrics
from fedapp.run_folder import RunFolder
from fedapp.runs.predict import PredictedRows
from fedapp.trees.model import Ensemble, importance, ordered_sets, to_json
from fedapp.trees.objective import Array
from fedapp.trees.predict import add_trees
from fedapp.trees.xgboost import to_xgboost_json
from strategies.scoring import History


def evaluate_rounds(
    folder: RunFolder, sets: Sequence[tuple[PredictedRows, Array]], patience: int
) -> tuple[list[list[dict[str, float]]], int]:
    """Score every round on each set and find the best round on the last set.

    Parameters
    ----------
    folder : of a finished run; with patience its model is cut back to the best round.
    sets : rows and their labels; if empty, the run's validation scores are read.
    patience : rounds without a better score after which the search for the best stops; 0: never.

    Returns
    -------
    One list of scores by round for each set, and the best round from 1; 0 if there are no scores.
    """
    summary, lines = folder.summary, [*map(json.loads, folder.rounds.read_text().splitlines())]
    history = History(summary["objective"], patience, (), summary["eval_metrics"])
    ends, scores = [line["trees"] for line in lines], [[line["valid"] for line in lines]]
    if not sets:
        metric_values = [one.get(history.metric) for one in scores[0]]
        history = History(history.objective, 0, metric_values, history.eval_metrics)
        return scores, history.best_round if all(scores[0]) else 0
    if not isinstance(model := sets[0][0].model, Ensemble):
        raise ValueError(f"eval_set must be for boosted trees, got {summary['strategy']}")
    margins, scores = [model.starts(len(y)) for _, y in sets], [[] for _ in sets]
    for first, last in pairwise([0, *ends]):
        for place, (rows, labels) in enumerate(sets):
            new_trees = model.trees[first:last], rows.table.values, model.sets
            margins[place] = add_trees(margins[place], *new_trees)
            arguments = margins[place], labels, np.ones_like(labels)
            scores[place].append(metrics.pooled(model.objective, *arguments, history.eval_metrics))
        history.add(scores[-1][-1])
        if history.stops:
            break
    if patience:
        best = history.best_round
        model = model.with_trees(ordered_sets(model.trees[: ends[best - 1]], model.sets))
        folder.write("model.json", to_json(model))
        folder.write("model.xgb.json", to_xgboost_json(model))
        at_best = {"train": lines[best - 1]["train"], "valid": scores[-1][best - 1], "test": {}}
        facts = {"trees": len(model.trees), "importance": importance(model), "best_round": best}
        folder.add_to_summary({**facts, "threshold": {}, "metrics": {**at_best, "by_party": {}}})
    return scores, history.best_round
