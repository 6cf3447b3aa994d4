"""Membership: whether a row was trained on, from the model and the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Flags, Ints
from fedapp.audit.listening import trained
from fedapp.crypto.noise import randomised_classes
from fedapp.data.partition import Split
from fedapp.data.predictions import by_class
from fedapp.data.table import Table
from fedapp.runs.baselines import (
    FOREST,
    Pooled,
    baseline_rows,
    baselines_of,
    train_boosted,
    train_forest,
)
from fedapp.runs.predict import model_of_text, predict
from fedapp.sections import flatten
from fedapp.settings import Settings, load_settings
from fedapp.trees.categories import chosen, recoded
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import is_regression, measures, transform

SHADOWS, RARE = 16, 0.01
TINY = 1e-7  # the smallest share of a class: predictions are float32


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """A model's margins of the rows of a table."""

    margins: Doubles  # (n_rows,): of the row's label
    members: Flags  # (n_rows,): whether the row trained the model


def above_usual(model: ScoredRows, shadows: Sequence[ScoredRows]) -> ScoredRows:
    """Margins above the middle of a row's mean margins over shadow models with and without the row.

    Only rows that have both.
    """
    members = np.stack([shadow.members for shadow in shadows])
    both = members.any(axis=0) & ~members.all(axis=0)
    margins, within = np.stack([shadow.margins for shadow in shadows])[:, both], members[:, both]
    means = [margins.mean(axis=0, where=side) for side in (within, ~within)]
    return ScoredRows(model.margins[both] - np.mean(means, axis=0), model.members[both])


def caught(model: ScoredRows) -> float:
    """Share of members taken by the threshold that takes ``RARE`` of the others."""
    threshold = np.quantile(model.margins[~model.members], 1 - RARE)
    return float(np.mean(model.margins[model.members] > threshold))


def catches_planted(model: ScoredRows, *shadows: ScoredRows) -> bool:
    """Whether a row is caught whose margin is clearly larger in every model that it trained."""
    members = np.stack([shadow.members for shadow in shadows])
    both = members.any(axis=0) & ~members.all(axis=0)
    if not (both & model.members).any():
        return False
    planted = np.arange(members.shape[1]) == (both & model.members).argmax()
    step = 1 + 10 * np.ptp([model.margins, *(shadow.margins for shadow in shadows)])
    models = [
        ScoredRows(one.margins + step * (planted & one.members), one.members)
        for one in (model, *shadows)
    ]
    usual = above_usual(models[0], models[1:])
    alone = planted[both] | ~usual.members  # the row, among those that are no members
    return caught(ScoredRows(usual.margins[alone], usual.members[alone])) == 1


def certainty(predictions: npt.NDArray[Any], labels: npt.NDArray[Any], objective: str) -> Doubles:
    """Log odds of each row's label, or of numbers and times minus the absolute error.

    ``predictions`` has shape (n_rows, n_outputs).
    """
    if is_regression(objective):
        errors = predictions[:, 0].astype(np.float64) - measures(objective, labels)
        return np.asarray(-np.abs(errors))
    shares = by_class(predictions.astype(np.float64))[np.arange(len(labels)), labels.astype(int)]
    shares = np.clip(shares, TINY, 1 - TINY)
    return np.asarray(np.log(shares / (1 - shares)))


def learnt(predictions: npt.NDArray[Any], objective: str, is_member: bool) -> npt.NDArray[Any]:
    """Labels that a model has learnt by heart, if the rows are members: others have other labels.

    ``predictions`` as of ``certainty``.
    """
    if is_regression(objective):
        return np.asarray(predictions[:, 0].astype(np.float64) + (not is_member))
    shares = by_class(predictions.astype(np.float64))
    return np.asarray((shares.argmax(axis=1) + (not is_member)) % shares.shape[1])


def scored(settings: Settings, text: str, n_shadows: int, is_vertical: bool) -> list[ScoredRows]:
    """A run's model, then shadow models, which are trained on halves of its rows.

    Of horizontal parties each is a run. Of vertical ones XGBoost or scikit-learn trains them on the
    joined rows, in seconds: without GOSS, ``first-trees`` and ``label-epsilon`` SecureBoost's model
    is XGBoost's, node for node; elsewhere shadows differ from the method, which lowers the success.
    Labels are randomised as the site does it.
    """
    rows, rng = baseline_rows(settings)[0], np.random.default_rng(settings.seed)
    row_ids = np.sort(np.concatenate((rows.split.train, rows.split.test)))
    labels, numbers = rows.labels[row_ids], is_regression(settings.objective)

    def judged(shown: npt.NDArray[Any], train: Ints) -> ScoredRows:
        return ScoredRows(certainty(shown, labels, settings.objective), np.isin(row_ids, train))

    models = [judged(predictions(text, rows, row_ids), rows.split.train)]
    for number in range(n_shadows):
        if is_vertical:
            order = rng.permutation(row_ids)
            half, others = np.sort(order[::2]), np.sort(order[1::2])
            shown, epsilon = rows.labels, settings.label_epsilon
            if epsilon and not numbers:
                ids = list(map(str, range(len(shown))))
                classes = ids[: int(shown.max()) + 1]  # any names
                shown = randomised_classes(shown, classes, epsilon, ids, rng.bytes(32))
            is_forest = baselines_of(settings.strategy).model == FOREST
            train = train_forest if is_forest else train_boosted
            split = Split(half, half[:0], others)
            margins = train(settings, replace(rows, labels=shown, split=split)).margins(row_ids)
            models.append(judged(transform(settings.objective, margins), half))
        else:
            halved: dict[str, Any] = {"test-fraction": 0.5, "valid-fraction": 0.0}
            halved |= dict.fromkeys(("fold", "folds", "early-stopping-rounds"), 0)
            halved |= dict.fromkeys(("test-from", "valid-from"), "")
            halved["seed"] = settings.seed + 1 + number
            config = {**flatten(settings.as_config()), **halved, "calibration": "none"}
            shadow = load_settings(config)
            half = baseline_rows(shadow)[0].split.train
            with trained(shadow) as run:
                models.append(judged(predictions(run.model, rows, row_ids), half))
    return models


def predictions(text: str, rows: Pooled | Table, row_ids: Ints) -> npt.NDArray[Any]:
    """Predictions of a whole model for some rows of a table, shape (n_rows, n_outputs)."""
    model = model_of_text(text)
    if isinstance(model, Ensemble):
        model = replace(model, curve=None)  # an attacker undoes a calibration, shadows have none
    column_ids = [rows.columns.index(name) for name in model.columns]
    taken, entries = rows.values[row_ids][:, column_ids], chosen(rows.categories, column_ids)
    values = recoded(taken, entries, model.categories, model.columns)[0]
    margins = None if rows.base_margins is None else rows.base_margins[row_ids]
    return np.asarray(predict(model, values, margins))
