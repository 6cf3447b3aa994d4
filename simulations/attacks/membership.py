"""Membership on halves of tables; the attack is ``fedapp.audit.membership``."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedapp.audit.membership import SHADOWS, Doubles, ScoredRows, above_usual, caught
from fedapp.runs.tables import stacked_tables
from simulations.passing import Scored, run_and_load, score

HALVES = 200  # of rows, over which an advantage is averaged
USUAL = {"max-depth": 6, "num-boost-round": 50, "eta": 0.3, "parties": 3}
HALF = {"test-fraction": 0.5, "valid-fraction": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"pax.aggregation": "plain"},
    "secure": {"pax.aggregation": "secure"},
    "epsilon 1": {"pax.aggregation": "secure", "privacy.epsilon": 1.0},
    "one party": {"parties": 1},  # the model that SecureBoost exports, node for node
}


def own_margins(scored: Scored) -> Doubles:
    """Margin of each row's label, of two classes: the larger, the smaller the loss."""
    return np.where(scored.labels == 1, 1.0, -1.0) * scored.margins[:, 0]


def score_rows(data: str, how: Mapping[str, Any], seed: int) -> ScoredRows:
    """Train on the half of a table that follows from the seed."""
    settings, model, _ = run_and_load({"data": data, **USUAL, **HALF, **how, "seed": seed})
    _, rows = stacked_tables(settings)
    scored = score(settings, model)
    row_ids_of = {
        subset: np.concatenate([by_subset[subset] for by_subset in rows.values()])
        for subset in ("train", "test")
    }
    n_rows = sum(map(len, row_ids_of.values()))
    margins, members = np.empty(n_rows), np.zeros(n_rows, dtype=bool)
    for subset, row_ids in row_ids_of.items():
        margins[row_ids] = own_margins(scored[subset])
    members[row_ids_of["train"]] = True
    return ScoredRows(margins, members)


def advantage(model: ScoredRows, rng: np.random.Generator) -> float:
    """Share of members taken minus that of others, by the threshold that fits other rows best."""
    members, others = model.margins[model.members], model.margins[~model.members]
    differences = []
    for _ in range(HALVES):
        first, second = halves(members, rng), halves(others, rng)
        threshold = best_threshold(first[0], second[0])
        differences.append(np.mean(first[1] >= threshold) - np.mean(second[1] >= threshold))
    return float(np.mean(differences))


def best_threshold(members: Doubles, others: Doubles) -> float:
    values = np.concatenate((members, others))
    order = np.argsort(-values)
    shares = np.repeat([1 / len(members), -1 / len(others)], [len(members), len(others)])
    ends = np.append(np.diff(values[order]) != 0, True)  # equal values are taken together
    return float(values[order][np.where(ends, shares[order].cumsum(), -1).argmax()])


def halves(rows: Doubles, rng: np.random.Generator) -> tuple[Doubles, Doubles]:
    shuffled = rng.permutation(rows)
    return shuffled[: len(rows) // 2], shuffled[len(rows) // 2 :]


def attack_membership(data: str, how: Mapping[str, Any], seeds: int) -> dict[str, float]:
    """Figures of both attacks, means over models of ``seeds`` seeds."""
    shadows = [score_rows(data, how, 1000 + number) for number in range(SHADOWS)]
    figures = []
    for seed in range(seeds):
        model, rng = score_rows(data, how, seed), np.random.default_rng(seed)
        relative = above_usual(model, shadows)
        figures.append(
            {
                "threshold": advantage(model, rng),
                "shadow": advantage(relative, rng),
                "threshold, caught": caught(model),
                "shadow, caught": caught(relative),
            }
        )
    return {kind: statistics.mean(figure[kind] for figure in figures) for kind in figures[0]}


def membership(
    data: tuple[str, ...] = ("breast-cancer", "default-credit"), seeds: int = 5
) -> Iterator[dict[str, Any]]:
    """How well a model's scores reveal which rows trained it.

    An attacker has the finished model and labelled rows, half of which trained it. The first attack
    takes the rows of whose labels the model is most certain (Yeom et al. 2018, "Privacy Risk in
    Machine Learning"). The second compares this certainty with what is usual for the row, under
    models of other halves of the rows, as an attacker with similar rows can train them (LiRA:
    Carlini et al. 2022, "Membership Inference Attacks From First Principles", arXiv:2112.03570).
    The margin of a row's label is normally distributed over models that the row trained, and again
    over the others. Departure: there are only ``SHADOWS`` models, enough for no more than two means
    of each row. With one variance and one distance of the means for all rows, the likelihood ratio
    grows with the distance of a margin from the middle of its row's two means.

    Two figures are reported. The advantage is the largest difference between the share of training
    rows and the share of other rows that are taken, over all thresholds. A threshold chosen on the
    rows that it is judged by finds something in noise too, so the one that fits one half of the
    rows is measured on the other half, averaged over many halves; it is 0 on average if there is
    nothing to find. The other figure is the share of training rows taken by the threshold that
    takes 1 % of the others: what is identified almost with certainty; 0.01 if there is nothing to
    find.

    ``python -m simulations attacks membership`` trains PAX plainly, under secure aggregation, with
    an epsilon of 1 and with one party on half of each table, and prints a line for each. One
    party's model is pooled XGBoost's, and so the one that SecureBoost exports.
    """
    for name, (kind, how) in itertools.product(data, MODELS.items()):
        start = time.perf_counter()
        figures = attack_membership(name, how, seeds)
        seconds = round(time.perf_counter() - start)
        yield {"data": name, "seeds": seeds, "how": kind, **figures, "seconds": seconds}
