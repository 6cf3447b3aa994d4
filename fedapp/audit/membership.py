"""Membership: whether a row was trained on, from the model and the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]

HALVES, SHADOWS, RARE = 200, 16, 0.01


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """A model's margins of the rows of a table."""

    margins: Doubles  # (n_rows,): of the row's label
    members: Flags  # (n_rows,): whether the row trained the model


def above_usual(model: ScoredRows, shadows: Sequence[ScoredRows]) -> ScoredRows:
    """Margins above the middle of a row's mean margins over shadow models with and without the row.

    Only rows that have both.
    """
    members = np.stack([each.members for each in shadows])
    both = members.any(axis=0) & ~members.all(axis=0)
    margins, within = np.stack([each.margins for each in shadows])[:, both], members[:, both]
    means = [margins.mean(axis=0, where=side) for side in (within, ~within)]
    return ScoredRows(model.margins[both] - np.mean(means, axis=0), model.members[both])


def advantage(model: ScoredRows, rng: np.random.Generator) -> float:
    """Share of members taken minus that of others, by the threshold that fits other rows best."""
    members, others = model.margins[model.members], model.margins[~model.members]
    differences = []
    for _ in range(HALVES):
        first, second = _halves(members, rng), _halves(others, rng)
        threshold = _best_threshold(first[0], second[0])
        differences.append(np.mean(first[1] >= threshold) - np.mean(second[1] >= threshold))
    return float(np.mean(differences))


def _best_threshold(members: Doubles, others: Doubles) -> float:
    values = np.concatenate((members, others))
    order = np.argsort(-values)
    each = np.repeat([1 / len(members), -1 / len(others)], [len(members), len(others)])
    ends = np.append(np.diff(values[order]) != 0, True)  # equal values are taken together
    return float(values[order][np.where(ends, each[order].cumsum(), -1).argmax()])


def _halves(rows: Doubles, rng: np.random.Generator) -> tuple[Doubles, Doubles]:
    shuffled = rng.permutation(rows)
    return shuffled[: len(rows) // 2], shuffled[len(rows) // 2 :]


def caught(model: ScoredRows) -> float:
    """Share of members taken by the threshold that takes ``RARE`` of the others."""
    threshold = np.quantile(model.margins[~model.members], 1 - RARE)
    return float(np.mean(model.margins[model.members] > threshold))
