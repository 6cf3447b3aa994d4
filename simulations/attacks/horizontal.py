"""What is found in runs of horizontal methods: rows, values and members.

The attacks are ``fedapp.audit.pax_rows``, ``timberstrike`` and ``membership``.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedapp.arrays import Doubles, Ints
from fedapp.audit.listening import trained
from fedapp.audit.membership import SHADOWS, ScoredRows, above_usual, caught
from fedapp.audit.pax_rows import (
    MISSING,
    CuriousPAX,
    Level,
    Row,
    Sender,
    common_sketch,
    senders_of,
    true_rows,
)
from fedapp.audit.timberstrike import target_of
from fedapp.errors import ConfigError
from fedapp.histograms.build import add_histograms
from fedapp.histograms.sketch import Sketch
from fedapp.messages.secagg import EVERYONE
from fedapp.settings import Settings, load_settings
from simulations.attack import Attack, Outcome, Overrides
from simulations.study import Scored, check_names, mean_of, run_and_load, score

# pax_rows


def pax_rows(
    data: str = "breast-cancer",
    parties: int = 3,
    rounds: int = 50,
    max_bin: int = 256,
    least_bin_rows: int = 0,
    aggregation: str = "both",
) -> Iterator[dict[str, Any]]:
    """How many training rows a coordinator rebuilds from what honest parties send it in PAX.

    A bin of one row gives itself away: its sums are the row's gradient g and hessian h, and for
    logistic loss h = |g| (1 - |g|) holds for one row and for hardly any sum of several. As g is the
    same in every column of a round, it links the bins of a row; g < 0 reveals its label. Nodes that
    are not sent follow as the difference of their parent and sibling. The contributions of known
    rows are subtracted from all sums, which isolates other rows in their bins, until no new row is
    found. Where parties merge bins of few rows (``least-bin-rows``), a node that is not sent is
    also read between the bins that its sibling has sent, where the difference of both is exact.

    ``python -m simulations attacks pax_rows`` trains, reads each party's sums, then only their sums
    over all parties; then it trains under secure aggregation and reads what is visible there: sums
    over all parties in bins of all parties. ``--data`` has two classes, ``--least-bin-rows`` sets
    the minimum of all parties, ``--aggregation plain`` or ``secure`` skips one of the runs. It
    prints a line for each: training rows known in all columns, up to the width of a bin, with their
    label; and rebuilt rows that do not exist.
    """
    check_names("aggregation", [aggregation], ("plain", "secure", "both"))
    config = {"data": data, "objective": "binary:logistic", "parties": parties, "max-bin": max_bin}
    config |= {"num-boost-round": rounds, "least-bin-rows": least_bin_rows, "preset": "xgboost"}
    with tempfile.TemporaryDirectory() as folder:
        if aggregation != "secure":
            plain = load_settings({**config, "run-dir": f"{folder}/run"})
            yield from ({**config, **line} for line in attack_plain_sums(plain))
        if aggregation != "plain":
            masked = {"pax.aggregation": "secure", "run-dir": f"{folder}/run-secure"}
            yield {**config, **attack_masked_sums(load_settings({**config, **masked}))}


def attack_plain_sums(settings: Settings) -> Iterator[dict[str, Any]]:
    """Rebuild training rows from each party's sums, and from their sums over all parties.

    Yields ``seen`` (whose sums), ``rows``, ``rebuilt`` and ``wrong``; raises ConfigError if
    gradients do not link the bins of a row, by the objective or a share of columns.
    """
    coordinator = _trained(settings)
    senders, cuts = senders_of(coordinator), coordinator.cuts
    truth = true_rows(coordinator, senders)
    yield {"seen": "each party's sums", **_count(senders, truth)}
    assert cuts is not None
    levels, maps = coordinator.levels, coordinator.totals.state.places
    pooled = []
    for same_level in zip(*levels.values(), strict=True):
        # Add up the parties' sums in the layout of the common cuts.
        request = same_level[0].request
        total = np.zeros((len(request.wanted_nodes), len(cuts.edges), 2))
        for name, level in zip(levels, same_level, strict=True):
            add_histograms(total, level.histograms, maps[name])
        missing = np.sum([level.missing for level in same_level], axis=0)
        roots = np.sum([level.roots for level in same_level], axis=0)
        pooled.append(Level(request, total, missing, roots, same_level[0].turn))
    rows = [
        _moved(row, senders[name].sketch, maps[name], cuts.offsets)
        for name, party_rows in truth.items()
        for row in party_rows
    ]
    sums = Sender.of(coordinator, pooled, common_sketch(cuts))
    yield {"seen": "sums over all parties", **_count({EVERYONE: sums}, {EVERYONE: rows})}


def attack_masked_sums(settings: Settings) -> dict[str, Any]:
    """Rebuild training rows where sums are masked; returns what ``attack_plain_sums`` yields."""
    coordinator = _trained(settings)
    assert list(coordinator.levels) == [EVERYONE], "sums are of all parties"
    senders = senders_of(coordinator)
    return {"seen": "sums under masks", **_count(senders, true_rows(coordinator, senders))}


def _trained(settings: Settings) -> CuriousPAX:
    # Otherwise gradients do not link the bins of a row.
    if settings.objective != "binary:logistic" or settings.colsample_bytree < 1:
        raise ConfigError("the attacked run must have two classes and all columns, got another")
    coordinator = CuriousPAX.of_run(settings)
    with trained(settings, coordinator=coordinator):
        return coordinator


def _moved(row: Row, sketch: Sketch, common_bins: Ints, offsets: Ints) -> Row:
    """Translate a row from its party's bins to the common bins."""
    *bins, label = row
    present = np.array(bins) != MISSING  # a missing value has no bin
    common = common_bins[np.where(present, sketch.offsets[:-1] + bins, 0)] - offsets[:-1]
    return (*np.where(present, common, MISSING).tolist(), label)


def _count(senders: Mapping[str, Sender], truth: Mapping[str, list[Row]]) -> dict[str, int]:
    pairs = [(sender.rebuilt(), truth[name]) for name, sender in senders.items()]
    return {
        "rows": sum(len(rows) for _, rows in pairs),
        "rebuilt": sum(row in rebuilt_rows for rebuilt_rows, rows in pairs for row in rows),
        "wrong": sum(len(rebuilt_rows - set(rows)) for rebuilt_rows, rows in pairs),
    }


# membership

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
    scored = score(settings, model)
    n_rows = sum(len(subset.labels) for subset in scored.values())  # none validates
    margins, members = np.empty(n_rows), np.zeros(n_rows, dtype=bool)
    for subset in scored.values():
        margins[subset.row_ids] = own_margins(subset)
    members[scored["train"].row_ids] = True
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
    return {kind: mean_of(figures, kind) for kind in figures[0]}


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


# timberstrike

HESSIANS = "hessians sent"  # an option of the attack, not of a run


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
    is a guess without trees with the same background knowledge, the bounds of each column, in the
    same measure.
    """
    options = {**HORIZONTAL, **overrides}
    has_hessians = bool(options.pop(HESSIANS, True))
    with trained(load_settings(options)) as run:
        rng, reg_lambda = np.random.default_rng(run.settings.seed), run.settings.reg_lambda
        shares = target_of(run, has_hessians).shares(reg_lambda, rng)
        success, chance = (float(share.mean()) for share in shares)
        return Outcome(success, chance, run.score)


HORIZONTAL = {"objective": "binary:logistic", "strategy": "bagging", "parties": 3}
HORIZONTAL |= {"valid-fraction": 0.0, "eta": 0.3, "num-boost-round": 50}
CYCLIC = {"strategy": "cyclic", "num-boost-round": 150}
FEDXGBLLR = {"strategy": "fedxgbllr"}
PAX_RUN = {"strategy": "pax"}
TIMBERSTRIKE = Attack(
    holder="whoever receives a party's trees (of PAX: the model) and the bounds of each column",
    measure="share of values rebuilt to 0.319 deviations, of matched rows; chance: "
    "a guess without the trees",
    data={
        "breast-cancer": {"data": "breast-cancer", "test-fraction": 0.5},
        "default-credit": {"data": "default-credit", "test-fraction": 0.97},
    },
    ways={
        "bagging": {},
        "bagging, no hessians": {HESSIANS: False},
        "bagging, max-depth=2": {"max-depth": 2},
        "bagging, min-child-weight=5": {"min-child-weight": 5.0},
        "bagging, gamma=2": {"gamma": 2.0},
        "bagging, 10 rounds": {"num-boost-round": 10},
        "cyclic": CYCLIC,
        "cyclic, max-depth=2": {**CYCLIC, "max-depth": 2},
        "fedxgbllr": FEDXGBLLR,
        "fedxgbllr, max-depth=2": {**FEDXGBLLR, "fedxgbllr.max-depth": 2},
        "pax": PAX_RUN,
        "pax under masks": {**PAX_RUN, "pax.aggregation": "secure"},
        "pax, least-bin-rows=5": {**PAX_RUN, "least-bin-rows": 5},
    },
    run=attack_trees,
)
