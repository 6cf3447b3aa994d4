"""Scores of a run's rounds: of its validation rows, or of rows that only its model has seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fedapp import metrics
from fedapp.predict import PredictedRows
from fedapp.run_folder import RunFolder
from fedapp.trees.boosted.xgboost_json import to_xgboost_json
from fedapp.trees.model import Ensemble, importance, in_order, to_json
from fedapp.trees.objective import Array
from fedapp.trees.predict import add_trees
from strategies.scoring import History


def evaluate_rounds(
    folder: RunFolder, sets: Sequence[tuple[PredictedRows, Array]], patience: int
) -> tuple[list[list[dict[str, float]]], int]:
    """Scores of each set, a round each, and the best round by the last set, from 1; 0: no scores.

    Parameters
    ----------
    folder : of a finished run; with patience its model is cut back to the best round.
    sets : rows and their labels; none: the run's validation rows.
    patience : rounds without a better score that end the search for the best one; 0: none do.
    """
    summary, lines = folder.summary, [*map(json.loads, folder.rounds.read_text().splitlines())]
    history = History(summary["objective"], patience, (), summary["eval_metrics"])
    ends, found = [line["trees"] for line in lines], [[line["valid"] for line in lines]]
    if not sets:
        scores = [one.get(history.metric) for one in found[0]]
        history = History(history.objective, 0, scores, history.eval_metrics)
        return found, history.best_round if all(found[0]) else 0
    if not isinstance(model := sets[0][0].model, Ensemble):
        raise ValueError(f"eval_set must be for boosted trees, got {summary['strategy']}")
    margins, found = [model.starts(len(y)) for _, y in sets], [[] for _ in sets]
    for first, last in pairwise([0, *ends]):
        for place, (rows, labels) in enumerate(sets):
            grown = model.trees[first:last], rows.table.values, model.sets
            margins[place] = add_trees(margins[place], *grown)
            scored = margins[place], labels, np.ones_like(labels)
            found[place].append(metrics.pooled(model.objective, *scored, history.eval_metrics))
        history.add(found[-1][-1])
        if history.stops:
            break
    if patience:
        best = history.best_round
        model = model.with_trees(in_order(model.trees[: ends[best - 1]], model.sets))
        folder.write("model.json", to_json(model))
        folder.write("model.xgb.json", to_xgboost_json(model))
        at_best = {"train": lines[best - 1]["train"], "valid": found[-1][best - 1], "test": {}}
        kept = {"trees": len(model.trees), "importance": importance(model), "best_round": best}
        folder.add_to_summary({**kept, "threshold": {}, "metrics": {**at_best, "by_party": {}}})
    return found, history.best_round
