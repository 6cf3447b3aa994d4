"""scikit-learn estimators: a classifier and a regressor for each method.

``fit`` is a run of the method with simulated parties on this machine. It trains on all rows, as
scikit-learn's tools hold test rows back; ``valid_fraction`` holds some back for early stopping.
Frames are read through Arrow, so columns may have categories, dates and booleans; arrays must have
numbers. The estimator has the model; the run's folder is deleted with the estimator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from fedapp.estimators import Classes, Federated, Horizontal, Numbers, Vertical
from fedapp.trees.objective import MetricFunction

Metrics = str | MetricFunction | Sequence[str | MetricFunction] | None
Constraints = Mapping[str, int] | str | None
PARAMETERS = {
    "n_estimators": "boosting rounds; trees of a forest, or of each party (FedXGBllr).",
    "max_depth": "levels of a tree.",
    "learning_rate": "by which each tree's leaves, or each step, are multiplied.",
    "reg_lambda": "L2 penalty on leaves.",
    "reg_alpha": "L1 penalty on leaves.",
    "gamma": "least gain of a split.",
    "min_child_weight": "least sum of hessians on both sides of a split.",
    "max_delta_step": "longest step of a leaf.",
    "scale_pos_weight": "weight of the rows of the second of two classes.",
    "subsample": "share of the rows that a tree sees.",
    "colsample_bytree": "share of the columns that a tree sees.",
    "colsample_bylevel": "share of the columns that a level sees.",
    "colsample_bynode": "share of the columns that a node sees.",
    "max_bin": "bins of a column.",
    "monotone_constraints": "-1 or 1 by column.",
    "interaction_constraints": "lists of columns that may meet in a tree.",
    "early_stopping_rounds": "without a better score; needs eval_set in fit, or valid_fraction, "
    "with which it is on by default.",
    "valid_fraction": "share of the rows that are held back to be scored in every round.",
    "objective": "loss by XGBoost's name, or a function (fedapp.run); reg:squarederror by default.",
    "eval_metric": "further scores, by XGBoost's names, or a function as in fedapp.run.",
    "bins": "how bins are dealt out to parties: share, or equal.",
    "min_child_rows": "fewest rows of all parties on each side of a split; 0: any.",
    "fusion": "of the parties' cuts: auto, finest or coarsest.",
    "aggregation": "plain, or secure: the coordinator learns only sums over all parties.",
    "local_rounds": "rounds of a party before its trees are joined with the others'.",
    "rounds": "exchanges of the common network or linear model.",
    "epochs": "passes over its rows that a party makes in a round.",
    "local_epochs": "passes over its rows that a party makes in a round.",
    "batch_size": "rows of a step.",
    "head": "of the common network: cnn or fcnn.",
    "channels": "of the common network.",
    "head_learning_rate": "of the common network.",
    "l2": "penalty on weights.",
    "columns": "of each party by its name, the first has the labels; None deals them out evenly.",
    "key_bits": "of Paillier keys.",
    "insecure_small_key": "whether fewer than 2048 key_bits are allowed.",
    "first_trees": "trees of the first party's columns only (Completely SecureBoost).",
    "criterion": "gini, entropy or variance; auto takes the one for the label.",
    "min_samples_split": "fewest rows of a node that is split.",
    "min_samples_leaf": "fewest rows of a leaf.",
    "max_features": "columns that a tree sees: sqrt, log2, all, a share or a number.",
    "bootstrap": "whether a tree's rows are drawn with replacement.",
    "parties": "number of parties that share the rows or columns; default: that of ``groups``.",
    "engine": "local, in this process, or simulation, by Flower's runtime.",
    "random_state": "seed of all random draws.",
    "log": "tools that also log the run: mlflow, wandb, and with run_dir tensorboard.",
    "class_weight": "balanced, or a weight by class; multiplies the rows' weights.",
    "settings": 'other settings of the run, as for fedapp.run: {"privacy": {"epsilon": 1}}.',
    "run_dir": "new folder for the run; by default one that is deleted with the estimator.",
}
Federated.told = PARAMETERS
COLUMNS = 'columns={"bank": range(20), "insurer": range(20, 30)}, '  # of an example


class _Boosted(Federated):
    """Boosted trees."""

    renamed: ClassVar = {"n_estimators": "num-boost-round", "learning_rate": "eta"}

    n_estimators: int | None = None
    max_depth: int | None = None
    learning_rate: float | None = None
    reg_lambda: float | None = None
    reg_alpha: float | None = None
    gamma: float | None = None
    min_child_weight: float | None = None
    max_delta_step: float | None = None
    subsample: float | None = None
    colsample_bytree: float | None = None
    colsample_bylevel: float | None = None
    colsample_bynode: float | None = None
    max_bin: int | None = None
    early_stopping_rounds: int | None = None
    eval_metric: Metrics = None
    valid_fraction: float = 0.0


class _Constrained(Federated):
    """Trees with monotone and interaction constraints."""

    monotone_constraints: Constraints = None
    interaction_constraints: Sequence[Sequence[str]] | str | None = None


class _BoostedClasses(Classes):
    """Boosted trees of classes."""

    scale_pos_weight: float | None = None


class _PAX(_Constrained, _Boosted, Horizontal):
    method = "pax"
    example = "n_estimators=5, parties=2"

    min_child_rows: int | None = None
    bins: str | None = None
    fusion: str | None = None
    aggregation: str | None = None


class _Bagging(_Boosted, Horizontal):
    method = "bagging"
    example = "n_estimators=5, parties=2"

    local_rounds: int | None = None


class _Cyclic(_Boosted, Horizontal):
    method = "cyclic"
    example = "n_estimators=6, parties=2"


class _FedXGBllr(Horizontal):
    method = "fedxgbllr"
    example = "n_estimators=10, rounds=2, epochs=5, parties=2"
    renamed: ClassVar = {
        "n_estimators": "trees",
        "learning_rate": "eta",
        "head_learning_rate": "learning-rate",
    }

    n_estimators: int | None = None
    max_depth: int | None = None
    learning_rate: float | None = None
    rounds: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    head_learning_rate: float | None = None
    head: str | None = None
    channels: int | None = None
    valid_fraction: float = 0.0


class _Linear(Horizontal):
    method = "fedavg-linear"
    example = "rounds=5, parties=2"

    rounds: int | None = None
    local_epochs: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    l2: float | None = None
    aggregation: str | None = None
    valid_fraction: float = 0.0


class _SecureBoost(_Constrained, _Boosted, Vertical):
    method = "secureboost"
    example = "parties=2, n_estimators=2, max_bin=16, key_bits=512, insecure_small_key=True"

    key_bits: int | None = None
    insecure_small_key: bool | None = None
    first_trees: int | None = None


class _Forest(Vertical):
    method = "federated-forest"
    example = "parties=2, n_estimators=5"
    renamed: ClassVar = {"n_estimators": "trees"}
    importance = "total_gain"
    always: ClassVar = {**Vertical.always, "federated-forest.master-keeps-model": True}

    n_estimators: int | None = None
    max_depth: int | None = None
    criterion: str | None = None
    min_samples_split: int | None = None
    min_samples_leaf: int | None = None
    max_features: str | float | int | None = None
    bootstrap: bool | None = None
    max_bin: int | None = None


class PAXClassifier(_BoostedClasses, _PAX):
    """Party-adaptive histogram boosting: one boosted classifier of all parties' rows."""


class PAXRegressor(Numbers, _PAX):
    """Party-adaptive histogram boosting: one boosted regressor of all parties' rows."""


class FedBaggingClassifier(_BoostedClasses, _Bagging):
    """Mean of the parties' XGBoost steps, for classes."""


class FedBaggingRegressor(Numbers, _Bagging):
    """Mean of the parties' XGBoost steps, for numbers."""


class FedCyclicClassifier(_BoostedClasses, _Cyclic):
    """XGBoost steps of the parties in turn, for classes."""


class FedCyclicRegressor(Numbers, _Cyclic):
    """XGBoost steps of the parties in turn, for numbers."""


class FedXGBllrClassifier(Classes, _FedXGBllr):
    """Every party's trees for classes, weighted by a network that all train; needs PyTorch."""


class FedXGBllrRegressor(Numbers, _FedXGBllr):
    """Every party's trees for numbers, weighted by a network that all train; needs PyTorch."""


class FedAvgLinearClassifier(Classes, _Linear):
    """A linear classifier by federated averaging."""


class FedAvgLinearRegressor(Numbers, _Linear):
    """A linear regressor by federated averaging."""


class SecureBoostClassifier(_BoostedClasses, _SecureBoost):
    """A boosted classifier on the columns of several parties; gradients are encrypted.

    The example's small keys are insecure.
    """

    example = COLUMNS + "n_estimators=6, max_bin=16, key_bits=512, insecure_small_key=True"


class SecureBoostRegressor(Numbers, _SecureBoost):
    """A boosted regressor on the columns of several parties; gradients are encrypted.

    The example's small keys are insecure.
    """


class FederatedForestClassifier(Classes, _Forest):
    """A random forest classifier on the columns of several parties."""

    example = COLUMNS + "n_estimators=5"


class FederatedForestRegressor(Numbers, _Forest):
    """A random forest regressor on the columns of several parties."""
