"""TimberStrike on runs of horizontal methods; the attack is ``fedapp.audit.timberstrike``."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedapp.audit.listening import trained
from fedapp.audit.timberstrike import TOLERANCE, Array, Rows, Target, matched, target_of
from fedapp.settings import load_settings
from simulations.attack import Attack, Outcome, Overrides

HESSIANS, VALUES = "hessians sent", "values known"  # options of the attack, not of a run


def attack_trees(overrides: Overrides) -> Outcome:
    """Training rows rebuilt from the trees of horizontal methods.

    Source: Di Gennaro et al. 2025, "TimberStrike: Dataset Reconstruction Attack Revealing Privacy
    Leakage in Federated Tree-Based Systems" (arXiv:2506.07605), and its public code.

    The leaves of a tree are boxes. Before a party's first tree all rows have the same margin, so
    the weight of a leaf and its sum of hessians reveal how many rows of each class it has. The
    attack starts with these rows, each in its leaf's box. It assigns them to the leaves of each
    later tree, every row to a leaf whose box intersects its own, so that the sums of gradients and
    hessians are as close as possible to those of the leaves. A row's box becomes the intersection,
    and the leaf's value is added to its margin. For a tree of another party, the margin changes by
    the mean of the leaves open to the row, weighted by their hessians. Departures:

    - The paper runs an integer solver for minutes for each tree. Here its problem is solved by
      shares of rows, at a vertex, where all but a few rows are in one leaf; the remaining shares
      are rounded.
    - A value is drawn uniformly from its range; the paper takes the middle. Rows with the same
      ranges then differ, and more of them are matched.
    - Without hessians, the rows of a leaf of the first tree are those with the nearest weight, and
      a leaf of a later tree gives one equation instead of two.

    Success is the paper's measure: the share of values, including labels, within 0.319 standard
    deviations of the true ones, when rebuilt and true rows are matched to maximise it. Chance
    is a guess without trees with the same background knowledge, in the same measure: the bounds of
    each column or, with ``VALUES``, as many similar rows.
    """
    options = {**HORIZONTAL, **overrides}
    has_hessians, knows_values = bool(options.pop(HESSIANS, True)), options.pop(VALUES, False)
    with trained(load_settings(options)) as run:
        target, reg_lambda = target_of(run, has_hessians), run.settings.reg_lambda
        if knows_values:
            shares = shares_by_values(target, reg_lambda)
        else:
            shares = target.shares(reg_lambda, np.random.default_rng(run.settings.seed))
        success, chance = (float(share.mean()) for share in shares)
        return Outcome(success, chance, run.score)


def shares_by_values(target: Target, reg_lambda: float) -> tuple[Array, Array]:
    """As ``Target.shares``, of an attacker with similar rows, which a guess takes unchanged."""
    tolerances = TOLERANCE * target.truth.std(axis=0)
    rows = (moved(target.rebuilt(reg_lambda), target.known), target.known)
    rebuilt, guess = (matched(guessed, target.truth, tolerances) for guessed in rows)
    return rebuilt, guess


def moved(rows: Rows, known_rows: Array) -> Array:
    """Move the nearest known row into each box; each known row is used once.

    Rows of the same label are preferred.
    """
    deviations = known_rows.std(axis=0)
    # A wrong label costs as much as 10 deviations in every column.
    distances = len(deviations) * 10.0 * (rows.labels[:, None] != known_rows[:, -1])
    for column, deviation in enumerate(deviations[:-1]):
        values = known_rows[:, column]
        gaps = np.maximum(rows.lows[:, [column]] - values, values - rows.highs[:, [column]])
        distances += np.maximum(0, gaps) / max(deviation, 1e-300)
    values_of_nearest = known_rows[linear_sum_assignment(distances)[1], :-1]
    return np.column_stack([np.clip(values_of_nearest, rows.lows, rows.highs), rows.labels])


HORIZONTAL = {"objective": "binary:logistic", "strategy": "bagging", "parties": 3}
HORIZONTAL |= {"valid-fraction": 0.0, "eta": 0.3, "num-boost-round": 50}
CYCLIC = {"strategy": "cyclic", "num-boost-round": 150}
FEDXGBLLR = {"strategy": "fedxgbllr"}
PAX_RUN = {"strategy": "pax"}
TIMBERSTRIKE = Attack(
    name="timberstrike",
    holder="whoever receives a party's trees (of PAX: the model) and the bounds of each column",
    measure="share of values rebuilt to 0.319 deviations, of matched rows; chance: "
    "a guess without the trees",
    data={
        "breast-cancer": {"data": "breast-cancer", "test-fraction": 0.5},
        "default-credit": {"data": "default-credit", "test-fraction": 0.97},
    },
    ways={
        "bagging": {},
        "bagging, values known": {VALUES: True},
        "bagging, no hessians": {HESSIANS: False},
        "bagging, max-depth=2": {"max-depth": 2},
        "bagging, min-child-weight=5": {"min-child-weight": 5.0},
        "bagging, gamma=2": {"gamma": 2.0},
        "bagging, 10 rounds": {"num-boost-round": 10},
        "cyclic": CYCLIC,
        "cyclic, values known": {**CYCLIC, VALUES: True},
        "cyclic, max-depth=2": {**CYCLIC, "max-depth": 2},
        "fedxgbllr": FEDXGBLLR,
        "fedxgbllr, values known": {**FEDXGBLLR, VALUES: True},
        "fedxgbllr, max-depth=2": {**FEDXGBLLR, "fedxgbllr.max-depth": 2},
        "pax": PAX_RUN,
        "pax, values known": {**PAX_RUN, VALUES: True},
        "pax under masks": {**PAX_RUN, "pax.aggregation": "secure"},
        "pax, least-bin-rows=5": {**PAX_RUN, "least-bin-rows": 5},
    },
    run=attack_trees,
)
