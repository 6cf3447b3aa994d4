"""Baselines tuned with the budget of a search: each has as many trials, from the same domains.

Without, a tuned federated model is compared with XGBoost at settings that nobody chose for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from fedapp.metrics import larger_is_better
from fedapp.report.summary import Trial
from fedapp.runs.baselines import (
    XGBOOST,
    Pooled,
    Trained,
    baseline_rows,
    baselines_of,
    train_boosted,
    train_forest,
)
from fedapp.runs.run_groups import best_of
from fedapp.runs.search_space import DEFAULT_SPACE, Space, domain, trial_draw
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
    pooled, alone = baseline_rows(first)
    how = first, baseline_space(first, given, space), search, n_trials, metric
    return {
        "pooled": _tuned(pooled, *how),
        "alone": {name: _tuned(rows, *how) for name, rows in alone.items()},
    }


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


def _tuned(
    rows: Pooled, first: Settings, space: Space, search: str, n_trials: int, metric: str
) -> dict[str, Any]:
    draw = trial_draw(search, space, first.seed, larger_is_better(metric))
    trials, models = list[Trial](), list[Trained]()
    while len(trials) < n_trials:
        settings = draw([one for one in trials if one.score is not None])
        models.append(_train(rows, first, settings))
        score = _scores(models[-1], rows, first, "valid").get(metric)
        trials.append(Trial(len(trials) + 1, "finished", settings, score, 0, 0))
    best = best_of(trials, metric) or trials[0]  # of a party without validation rows
    test = _scores(models[best.number - 1], rows, first, "test")
    return {"settings": best.settings, "valid": best.score, "test": test}


def _train(rows: Pooled, first: Settings, drawn: Mapping[str, Any]) -> Trained:
    is_boosted = baselines_of(first.strategy).model == XGBOOST
    settings = load_settings({**first.changed, **drawn})
    return (train_boosted if is_boosted else train_forest)(settings, rows)


def _scores(trained: Trained, rows: Pooled, first: Settings, subset: str) -> dict[str, float]:
    """Scores of a subset's rows, computed as those of the test rows are."""
    scored = replace(rows, split=replace(rows.split, test=getattr(rows.split, subset)))
    kind = baselines_of(first.strategy)
    return trained.scores(first.objective, scored, first.eval_metrics, kind.split_by)
