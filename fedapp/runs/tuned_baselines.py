"""Baselines tuned with the budget of a search: each has as many trials, from the same domains.

Without, a tuned federated model is compared with XGBoost at settings that nobody chose for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from fedapp.metrics import larger_is_better
from fedapp.runs.baselines import (
    XGBOOST,
    Pooled,
    baseline_rows,
    baselines_of,
    train_boosted,
    train_forest,
)
from fedapp.runs.search_space import (
    DEFAULT_SPACE,
    Space,
    domain,
    finished_trials,
    new_study,
    new_trial,
    settings_of_trial,
)
from fedapp.settings import Settings, load_settings


def tuned_baselines(
    first: Settings,
    given: Collection[str],
    space: Space,
    search: str,
    n_trials: int,
    metric: str,
) -> dict[str, Any]:
    """Search settings of the pooled rows' baseline and of each party's by validation rows.

    Parameters
    ----------
    first : of the federated search's first trial, whose rows and fixed settings hold here too.
    given, space : names of the settings that are not searched, and the federated search's domains.

    Returns
    -------
    ``{"pooled": result, "alone": {party: result}}``; a result is the best trial's settings, its
    score of the validation rows, and all scores of the test rows.
    """
    kind = baselines_of(first.strategy)
    train = train_boosted if kind.model == XGBOOST else train_forest
    searched = baseline_space(first, given, space)

    def tuned(rows: Pooled) -> dict[str, Any]:
        study, results = new_study(larger_is_better(metric)), list[dict[str, Any]]()
        for number in range(1, n_trials + 1):
            trial = new_trial(study, search, searched, first.seed, number)
            settings = settings_of_trial(trial)
            model = train(load_settings({**first.changed, **settings}), rows)
            valid = replace(rows, split=replace(rows.split, test=rows.split.valid))
            scores, test = (
                model.scores(first.objective, scored_rows, first.eval_metrics, kind.split_by)
                for scored_rows in (valid, rows)
            )
            results.append({"settings": settings, "valid": scores.get(metric), "test": test})
            if results[-1]["valid"] is not None:  # a party may be without validation rows
                study.tell(trial, results[-1]["valid"])
        return results[study.best_trial.number if finished_trials(study) else 0]

    pooled, alone = baseline_rows(first)
    return {"pooled": tuned(pooled), "alone": {name: tuned(rows) for name, rows in alone.items()}}


def baseline_space(first: Settings, given: Collection[str], space: Space) -> Space:
    """The domains of a search that its baselines read; XGBoost's usual ones where it has none."""
    if baselines_of(first.strategy).model != XGBOOST:
        return space
    usual = {
        name: domain(name, text)
        for name, text in DEFAULT_SPACE.items()
        if "." not in name and name not in given
    }
    return {**usual, **{name: values for name, values in space.items() if "." not in name}}
