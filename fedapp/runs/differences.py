"""Differences of a run's model to other models, on the same test rows in one process.

A model that is divided among parties is joined first, if all of its parts are on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedapp import metrics
from fedapp.runs.baselines import Floats, Pooled, baseline_rows, decoded, values_of
from fedapp.runs.predict import joined_model, load_model, parts_of, predict
from fedapp.settings import Settings
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import margins_of
from fedapp.trees.predict import predict_margins

Span = tuple[float, float, float]  # difference, and the ends of its 95 % interval


def differences(settings: Settings, run_dir: Path, margins: Mapping[str, Any]) -> dict[str, Any]:
    """Scores of the run's model less those of the baselines, see ``metrics.paired``.

    ``margins`` are those of ``run_baselines`` ("test_margins"). Returns
    ``{"pooled": {metric: span}, "alone": {party: {...}}}``; {} for a model with a part elsewhere,
    without test rows, or with weights.
    """
    if (scored := scored_rows(settings, run_dir, baseline_rows(settings)[0])) is None:
        return {}

    def less(text: str) -> dict[str, Span]:
        return scored.less(decoded(text, len(scored.labels)))

    alone = {name: less(text) for name, text in margins["alone"].items()}
    return {"pooled": less(margins["pooled"]), "alone": alone}


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """Margins of a run's test rows, by its own model."""

    settings: Settings
    margins: Floats  # (n_rows, n_outputs)
    labels: Floats  # (n_rows,)

    def less(self, others: Floats) -> dict[str, Span]:
        """Scores of the model less those of the margins of another one, on the same rows."""
        settings, rows = self.settings, (self.labels, np.ones_like(self.labels))
        return metrics.paired(
            settings.objective, self.margins, others, *rows, settings.eval_metrics
        )


def scored_rows(settings: Settings, run_dir: Path, rows: Pooled) -> ScoredRows | None:
    """The test rows of a run, in the order of ``rows``; None for a model with a part elsewhere,
    without test rows, or with weights."""
    test = rows.split.test
    if not len(test) or (rows.weights[test] != 1).any():
        return None
    margins = model_margins(run_dir, rows)
    return None if margins is None else ScoredRows(settings, margins, rows.labels[test])


def model_margins(run_dir: Path, rows: Pooled) -> Floats | None:
    """Margins of the test rows by a run's whole or joined model, (n_rows, n_outputs); None for one
    with a part elsewhere."""
    whole = joined_model(run_dir)
    if whole is None and parts_of(run_dir):
        return None
    model = whole or load_model(run_dir / "model.json")
    values, of = values_of(model, rows, rows.split.test), rows.base_margins
    starts = None if of is None else of[rows.split.test]
    if isinstance(model, Ensemble):
        return model.calibrated(predict_margins(model, values, starts))
    return margins_of(model.objective, predict(model, values, starts))
