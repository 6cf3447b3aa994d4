"""Scores of a SecureBoost model at the active party, and the margins of its best round."""

from __future__ import annotations

import numpy as np

from clients.secureboost.view import View
from clients.vertical_scores import rows_of
from fedapp import metrics
from fedapp.data.partition import SUBSETS
from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array


def scores_of(view: View, margins: Array) -> dict[str, dict[str, float]]:
    """Scores by subset; none for a subset without rows."""
    labels, weights = view.store["labels"], view.store["weights"]
    places = {subset: rows_of(view.store, subset) for subset in SUBSETS}
    rows = {
        subset: (margins[of_subset], labels[of_subset], weights[of_subset])
        for subset, of_subset in places.items()
    }
    return metrics.pooled_subsets(view.objective, rows, view.eval_metrics)


def note_best(view: View, valid: dict[str, float]) -> None:
    """Store the margins of the round with the best validation score, the first of equals."""
    name = metrics.stopping_metric(view.objective, view.eval_metrics)
    facts = view.store.facts
    score = valid.get(name, float("nan"))
    signed = score if metrics.larger_is_better(name) else -score
    if signed > facts.get("best_score", -np.inf):  # never true for NaN
        facts |= {"best_score": signed, "best_round": facts["n_rounds"]}
        view.store["best.margins"] = view.store["margins"]


def margins_after(view: View, n_rounds: int) -> Array:
    """Margins after ``n_rounds``: all of them, or the best; raises a ProtocolError for others."""
    store, facts = view.store, view.store.facts
    if n_rounds == facts["n_rounds"]:
        return store["margins"]
    if n_rounds != facts.get("best_round"):
        rule = f"must be {facts['n_rounds']} or {facts.get('best_round')}, got {n_rounds}"
        raise ProtocolError(view.name, "FinishRequest", "best_round", rule)
    return store["best.margins"]
