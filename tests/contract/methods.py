"""What the contract asks about: a row for each way to train and to predict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xgboost
from sklearn.linear_model import LinearRegression, LogisticRegression

from fedapp import metrics
from fedapp.data.datasets import read_source
from fedapp.data.labels import class_ids, class_names
from fedapp.data.schema import Roles
from fedapp.records.document import from_text, load, model_text, to_text
from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import baseline_rows, xgboost_parameters
from fedapp.runs.local import run_local
from fedapp.settings import Settings, load_settings
from fedapp.site.table import Holdout, share_rows
from fedapp.trees.linear import LinearModel, predict_linear, standardised
from fedapp.trees.model import Ensemble
from fedapp.trees.predict import predict_margins
from fedapp.trees.stacked import StackedModel
from tests.federated import model_bytes, summary_of
from tests.forests import assert_pooled, joined, parts_of, pooled
from tests.pooled import Pooled, assert_xgboosts, pooled_booster, tables_of
from tests.reference import compare_trees
from tests.transcript import ORDERED, predicted_rows

# What a run gives, compared as a whole: the model's bytes, the parts of a divided model, or scores.
ROUNDS = 2
CLASSES, MEASURES = "binary:logistic", "reg:squarederror"
OBJECTIVES = CLASSES, "multi:softprob", MEASURES
SMALL_KEY = {"key_bits": 512, "insecure_small_key": True}
HELLO = {"query.greet", "query.hello"}
SCORES = "evaluate.scoring_scores"
ROW_STEPS = "sketch", "cells", "split"
MASKED = {*HELLO, "query.secure_keys"}


@dataclass(frozen=True)
class Method:
    """A way to train or to predict, and what is known of its runs.

    Parameters
    ----------
    strategy, settings : of a short run; settings of the method's own are in ``own``.
    objectives : those compared with the reference.
    kinds : all messages of a run.
    exchanges : of a run of two rounds, by the numbers of parties and levels.
    equals_pooled : checks a run against its reference, a training on the rows of all parties.
    trained : the method whose model it predicts with; none for a method that trains.
    depth : the setting that limits a tree's levels.
    keeps_divided : whether its model is divided among the parties, and nothing else has it.
    may_lose : whether a run may go on without a party.
    stops_early : whether early stopping cuts the model back to its best round.
    counts_all : whether the bytes of its rounds are those of the run; else some are of no round.
    """

    strategy: str
    kinds: set[str]
    exchanges: Callable[[int, int], int]
    equals_pooled: Callable[[Settings, RunFolder], None]
    settings: Mapping[str, Any]
    trained: str = ""
    depth: str = "max_depth"
    keeps_divided: bool = False
    may_lose: bool = False
    stops_early: bool = False
    counts_all: bool = False
    is_vertical: bool = False
    objectives: tuple[str, ...] = OBJECTIVES

    def result(self, folder):
        """What a run gives."""
        if self.trained:
            return predicted_rows(folder).tolist()
        return parts_of(folder) if self.keeps_divided else model_bytes(folder)


def own(section, **values):
    """Settings of a method's own section."""
    return {f"{section}__{name}": value for name, value in values.items()}


# References


def is_xgboosts_for_one_party(settings, folder):
    """Of one party that has all rows the trees are XGBoost's."""
    alone = alone_of(settings, subsample=1.0)
    model = load(run_local(alone).path / "model.json", Ensemble)
    found = compare_trees(model, pooled_booster(alone))
    assert (found.differing, found.n_trees) == (0, len(model.trees))
    assert found.n_nodes > 2 * found.n_trees
    assert found.leaf_error <= 1e-6


def is_xgboosts_sum_of_curves(settings, folder):
    """Of one party each tree is XGBoost's of its column alone, on the gradients of its round."""
    alone = alone_of(settings)
    model, rows = load(run_local(alone).path / "model.json", Ensemble), baseline_rows(alone)[0]
    train, n_columns, width = rows.split.train, len(model.columns), model.n_outputs
    share = {"eta": alone.eta / n_columns, "colsample_bytree": 1 / n_columns}
    matrix = rows.matrix(xgboost.QuantileDMatrix, train, alone.objective, max_bin=alone.max_bin)
    n_splits = np.zeros(n_columns, np.int64)
    for number in range(0, len(model.trees), width):
        start, column = divmod(number // width, n_columns)
        matrix.set_base_margin(predict_margins(model.first_rounds(start), rows.values[train]))
        matrix.set_info(feature_weights=np.eye(n_columns)[column])
        booster = xgboost.train(xgboost_parameters(alone, rows) | share, matrix, 1)
        trees = model.trees[number : number + width]
        found = compare_trees(replace(model, trees=trees, num_parallel_tree=1), booster)
        assert (found.differing, found.n_trees) == (0, width)
        assert found.leaf_error <= 1e-6
        n_splits[column] += found.n_nodes - width
    assert len(model.trees) == ROUNDS * n_columns * width
    assert n_splits.all()


def alone_of(settings, **more):
    """The same run of one party that has all rows."""
    given = {"parties": 1, "run-dir": settings.run_dir + "-alone", **more}
    return load_settings({**settings.as_config(), **given})


def is_that_of_one_party(settings, folder):
    """Sums have no order: the model is, byte for byte, that of one party with all rows."""
    fewest = 2 if settings.sections["privacy"]["epsilon"] else 1  # noise must be of others too
    assert model_bytes(folder) == model_bytes(run_local(alone_of(settings, parties=fewest)))


def has_xgboosts_trees_of_one_party(settings, folder):
    """Of one party that has all rows, the trees under the head are XGBoost's."""
    alone = alone_of(settings)
    section = alone.sections["fedxgbllr"]
    model = from_text(model_text(run_local(alone).path / "model.json"), StackedModel)
    given = {name: section[name] for name in ("eta", "max-depth")}
    boosted = {**given, "strategy": "pax", "num-boost-round": section["trees"]}
    ensemble = Ensemble(
        *(model.objective, model.base_score, model.columns, model.classes, model.ensembles[0])
    )
    booster, values = pooled_booster(alone_of(settings, **boosted)), train_rows(settings)[0]
    matrix = xgboost.DMatrix(values, feature_names=list(model.columns))
    theirs = booster.predict(matrix, output_margin=True).reshape(len(values), -1)
    np.testing.assert_allclose(predict_margins(ensemble, values), theirs, rtol=1e-5, atol=1e-5)


def scores_as_scikit_learn(settings, folder):
    """After more rounds the loss on the training rows is that of scikit-learn's solver."""
    section = {**settings.sections["fedavg-linear"], "rounds": 40}
    update = {"sections": {**settings.sections, "fedavg-linear": section}}
    run = settings.model_copy(update={**update, "run_dir": settings.run_dir + "-long"})
    model = from_text(model_text(run_local(run).path / "model.json"), LinearModel)
    values, truth = train_rows(settings)
    inputs, ones = standardised(values, model.means, model.scales), np.ones(len(values), np.float32)
    if settings.objective == "reg:squarederror":
        margins = LinearRegression().fit(inputs, truth).predict(inputs)
    else:
        l2 = settings.sections["fedavg-linear"]["l2"]
        logistic = LogisticRegression(C=1 / (float(l2) * len(values)), max_iter=3000)
        margins = logistic.fit(inputs, truth).decision_function(inputs)
    found = predict_linear(model, values), margins.reshape(len(values), -1).astype(np.float32)
    ours, theirs = (metrics.pooled(settings.objective, each, truth, ones) for each in found)
    for name in {"logloss", "mlogloss", "rmse"} & set(ours):
        assert ours[name] <= theirs[name] * 1.01


def train_rows(settings):
    """Values and labels of all parties' training rows."""
    table = read_source(settings.data, Roles(label=settings.label))
    assert table.labels is not None
    holdout = Holdout(settings.test_fraction, settings.valid_fraction, settings.seed)
    shares = share_rows(table, holdout, settings.partition, settings.parties)
    rows = np.sort(np.concatenate(shares["train"]))
    names = class_names(table.labels, settings.objective)
    return table.values[rows], class_ids(table.labels, names)[rows]


def is_xgboosts_joined(settings, folder):
    """The joined model is XGBoost's on the joined columns."""
    assert_xgboosts(folder, Pooled(settings))


def is_the_joined_forest(settings, folder):
    """The parts are those of the forest that one place grows from the joined columns."""
    model = pooled(settings)[0]
    assert sum(map(len, model.trees)) > 2 * len(model.trees)
    assert to_text(joined(folder)) == to_text(model)


def predicts_as_the_joined_forest(settings, folder):
    """The scores are those of the joined forest."""
    model = joined(RunFolder(Path(settings.run_dir).parent / "trained"))
    tables = tables_of(settings.model_copy(update={"label": "y"}))
    values = np.concatenate([table.values for table in tables], axis=1)
    expected = model.predictions(model.leaves(values))
    np.testing.assert_allclose(predicted_rows(folder), expected, rtol=0, atol=1e-9)
    assert summary_of(folder)["matched_rows"] == {"predicted": len(values)}


BOOSTED = dict.fromkeys(("may_lose", "stops_early", "counts_all"), True)
PREDICTED = {
    "is_vertical": True,
    "equals_pooled": predicts_as_the_joined_forest,
    "depth": "federated_forest__max_depth",
}
METHODS = {
    "pax": Method(
        "pax",
        {*HELLO, "train.pax_sketch", "train.pax_grow", SCORES},
        lambda parties, depth: 3 + ROUNDS * depth + 1,
        is_xgboosts_for_one_party,
        {"subsample": 0.8, "max_bin": 64},
        **BOOSTED,
    ),
    "pax, secure": Method(
        "pax",
        {*MASKED, *(f"train.pax_{step}" for step in ("open", "count", "grow"))} | {SCORES},
        lambda parties, depth: 3 + 4 + ROUNDS * depth + 1,
        is_that_of_one_party,
        {"pax__aggregation": "secure"},
        stops_early=True,
        counts_all=True,
    ),
    "pax, additive": Method(
        "pax",
        {*HELLO, "train.pax_sketch", "train.pax_turn", SCORES},
        lambda parties, depth: 3 + ROUNDS + 1,
        is_xgboosts_sum_of_curves,
        {"pax__additive": True, "max_bin": 64},
        may_lose=True,
        counts_all=True,
    ),
    "pax, private": Method(
        "pax",
        {*MASKED, *(f"train.private_{step}" for step in ("open", "count", "trees"))}
        | {"evaluate.private_scores"},
        lambda parties, depth: 3 + 4 + ROUNDS + 1,
        is_that_of_one_party,
        {"pax__aggregation": "secure", "privacy__epsilon": 20.0, "privacy__clip": 8.0},
    ),
    "fedxgbllr": Method(
        "fedxgbllr",
        {*HELLO, "query.labels", "evaluate.fedxgbllr_final"}
        | {f"train.fedxgbllr_{step}" for step in ("fit", "share", "average")},
        lambda parties, depth: 5 + ROUNDS + 2,
        has_xgboosts_trees_of_one_party,
        own("fedxgbllr", trees=5, rounds=ROUNDS, epochs=2, channels=4, max_depth=3),
        depth="fedxgbllr__max_depth",
        may_lose=True,
        objectives=(CLASSES, MEASURES),  # its trees start from shares of classes, XGBoost's do not
    ),
    "bagging": Method(
        "bagging",
        {*HELLO, "query.labels", "train.bagging_boost", SCORES},
        lambda parties, depth: 3 + ROUNDS + 1,
        is_xgboosts_for_one_party,
        {"subsample": 0.8},
        **BOOSTED,
    ),
    "cyclic": Method(
        "cyclic",
        {*HELLO, "query.labels", "train.cyclic_turn", SCORES},
        lambda parties, depth: 3 + ROUNDS + 1,
        is_xgboosts_for_one_party,
        {"subsample": 0.8},
        **BOOSTED,
    ),
    "fedavg-linear": Method(
        "fedavg-linear",
        {*HELLO, *(f"train.fedavg_linear_{step}" for step in ("moments", "average"))}
        | {"evaluate.fedavg_linear_scores"},
        lambda parties, depth: 3 + ROUNDS + 1,
        scores_as_scikit_learn,
        own("fedavg_linear", rounds=ROUNDS),
        depth="",
        may_lose=True,
        stops_early=True,
        counts_all=True,
    ),
    "horizontal-forest": Method(
        "horizontal-forest",
        {*HELLO, SCORES} | {f"train.horizontal_forest_{step}" for step in ROW_STEPS},
        lambda parties, depth: 3 + 2 * depth + 1,
        assert_pooled,
        own("horizontal_forest", trees=4, bins="equal"),
        depth="horizontal_forest__max_depth",
        may_lose=True,
    ),
    "horizontal-forest, secure": Method(
        "horizontal-forest",
        {*MASKED, SCORES}
        | {f"train.horizontal_forest_{step}" for step in ("open", "count", "cells", "split")},
        lambda parties, depth: 3 + 4 + 2 * depth + 1,
        assert_pooled,
        own("horizontal_forest", trees=4, aggregation="secure"),
        depth="horizontal_forest__max_depth",
    ),
    "secureboost": Method(
        "secureboost",
        {*ORDERED, *(f"evaluate.secureboost_{step}" for step in ("handover", "finish"))}
        | {f"train.secureboost_{step}" for step in ("setup", "begin", "sum", "split", "partition")},
        lambda parties, depth: 9 + ROUNDS * (2 + 2 * depth if parties == 2 else 1 + 3 * depth),
        is_xgboosts_joined,
        {
            "align": "ordered",
            "allow_export": True,
            "max_bin": 16,
            **own("secureboost", **SMALL_KEY),
        },
        stops_early=True,
        is_vertical=True,
    ),
    "federated-forest, encoded": Method(
        "federated-forest",
        {*ORDERED, "evaluate.federated_forest_finish"}
        | {f"train.federated_forest_{step}" for step in ("setup", "level", "partition")},
        lambda parties, depth: 5 + 2 + 2 * depth,
        is_the_joined_forest,
        {"align": "ordered", **own("federated_forest", trees=4)},
        depth="federated_forest__max_depth",
        keeps_divided=True,
        is_vertical=True,
    ),
    "federated-forest, paillier": Method(
        "federated-forest",
        {*ORDERED, "evaluate.federated_forest_finish"}
        | {f"train.federated_forest_{step}" for step in ("setup", "sum", "split", "partition")},
        lambda parties, depth: 5 + (3 + 2 * depth if parties == 2 else 2 + 3 * depth),
        is_the_joined_forest,
        {"align": "ordered", "max_bin": 8}
        | own("federated_forest", trees=2, labels="paillier", **SMALL_KEY),
        depth="federated_forest__max_depth",
        keeps_divided=True,
        is_vertical=True,
    ),
    "interactive": Method(
        "interactive",
        {*ORDERED, "evaluate.interactive_walk", "evaluate.interactive_answer"},
        lambda parties, depth: 5 + 2 + 2 * depth,
        settings={},
        trained="federated-forest, encoded",
        **PREDICTED,
    ),
    "one-round": Method(
        "one-round",
        {*ORDERED, "evaluate.one_round_walk", "evaluate.one_round_intersect"},
        lambda parties, depth: 5 + 2,
        settings={},
        trained="federated-forest, encoded",
        **PREDICTED,
    ),
    "eini": Method(
        "eini",
        {*ORDERED, "evaluate.eini_step"},
        lambda parties, depth: 5 + parties + 1,
        settings=own("eini", unguarded=True, **SMALL_KEY),
        trained="federated-forest, encoded",
        **PREDICTED,
    ),
}
