"""How well a model's scores tell which rows trained it.

An attacker has the finished model and rows with their labels, half of which have trained it, and
takes those of small loss for these. Its advantage is the largest difference between the share of
training rows and the share of other rows that it takes, over all thresholds (Yeom et al. 2018,
"Privacy Risk in Machine Learning"). The second attack asks how much smaller a row's loss is than
under models that other rows have trained, as an attacker with rows like these can find out (Carlini
et al. 2022, "Membership Inference Attacks From First Principles", in its offline form, without the
normal distribution).

A threshold that is chosen by the rows it is judged by finds something in noise too: the advantage
of the threshold that fits one half of the rows is measured on the other half, and the mean over
many halves is told. Without anything to find it is 0 on average.

``python -m simulations.attacks.membership`` trains PAX plainly, under secure aggregation and with
an epsilon of 1 on half of a small table that it overfits, and prints a line for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.config import Settings
from simulations.rows import stacked_tables
from simulations.scored import Scored, score, trained

Doubles = npt.NDArray[np.float64]

USUAL = {"max-depth": 6, "num-boost-round": 50, "eta": 0.3, "parties": 3}
HOW: dict[str, dict[str, Any]] = {
    "plain": {"pax.aggregation": "plain"},
    "secure": {"pax.aggregation": "secure"},
    "epsilon 1": {"pax.aggregation": "secure", "privacy.epsilon": 1.0},
}
HALVES, SHADOWS = 200, 4


def losses(found: Scored) -> Doubles:
    """Log loss of each row, of two classes."""
    margins, labels = found.margins[:, 0].astype(np.float64), found.labels
    return np.logaddexp(0, margins) - labels * margins


def advantage(members: Doubles, others: Doubles, rng: np.random.Generator) -> float:
    """Share of members taken less that of others, for the threshold that fits other rows best.

    Parameters
    ----------
    members, others : float64: smaller says member.
    """
    found = []
    for _ in range(HALVES):
        first, second = _halves(members, rng), _halves(others, rng)
        places = np.sort(np.concatenate((first[0], second[0])))
        threshold = places[np.argmax([_taken(first[0], second[0], each) for each in places])]
        found.append(_taken(first[1], second[1], threshold))
    return statistics.mean(found)


def _taken(members: Doubles, others: Doubles, threshold: float) -> float:
    return float((members <= threshold).mean() - (others <= threshold).mean())


def _halves(rows: Doubles, rng: np.random.Generator) -> tuple[Doubles, Doubles]:
    shuffled = rng.permutation(rows)
    return shuffled[: len(rows) // 2], shuffled[len(rows) // 2 :]


def attacked(data: str, how: Mapping[str, Any], seed: int) -> dict[str, float]:
    """Advantages of both attacks on one model."""
    common = {"data": data, **USUAL, "test-fraction": 0.5, "valid-fraction": 0.0, **how}
    settings, model, _ = trained({**common, "seed": seed})
    found = score(settings, model)
    members, others = losses(found["train"]), losses(found["test"])
    usual = [np.zeros_like(members), np.zeros_like(others)]
    counts = [np.zeros_like(members), np.zeros_like(others)]
    for shadow in range(SHADOWS):
        # Other halves of the same rows; what a row's loss is where it has not trained.
        other_settings, other, _ = trained({**common, "seed": 1000 + SHADOWS * seed + shadow})
        outside = held_out(settings, other_settings)
        of_rows = score(settings, other)
        for place, subset in enumerate(("train", "test")):
            free = outside[subset]
            usual[place][free] += losses(of_rows[subset])[free]
            counts[place][free] += 1
    rng = np.random.default_rng(seed)
    known, unknown = (
        own[n > 0] - total[n > 0] / n[n > 0]
        for own, total, n in zip((members, others), usual, counts, strict=True)
    )
    return {
        "threshold": advantage(members, others, rng),
        "shadow": advantage(known, unknown, rng),
    }


def held_out(settings: Settings, other: Settings) -> dict[str, npt.NDArray[np.bool_]]:
    """Which rows of a run have not trained another one, by subset."""
    _, rows = stacked_tables(settings)
    _, other_rows = stacked_tables(other)
    trained_other = np.concatenate([each["train"] for each in other_rows.values()])
    return {
        subset: ~np.isin(np.concatenate([each[subset] for each in rows.values()]), trained_other)
        for subset in ("train", "test")
    }


def main() -> None:
    """Print a JSON line for each way to train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="breast-cancer")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    for name, how in HOW.items():
        found = [attacked(given.data, how, seed) for seed in range(given.seeds)]
        means = {kind: statistics.mean(each[kind] for each in found) for kind in found[0]}
        print(json.dumps({"attack": "membership", **vars(given), "how": name, **means}))


if __name__ == "__main__":
    main()
