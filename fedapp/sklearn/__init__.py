"""scikit-learn estimators: a classifier and a regressor for each method.

``fit`` is a run of the method with simulated parties on this machine. It trains on all rows, as
scikit-learn's tools hold test rows back; ``valid_fraction`` holds some back for early stopping.
Frames are read through Arrow, so columns may have categories, dates and booleans; arrays must have
numbers. The estimator has the model; the run's folder is deleted with the estimator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from fedapp.data.predictions import by_class
from fedapp.sklearn.base import COLUMNS, SMALL_KEY, Arrays, Federated, Horizontal, Vertical
from fedapp.sklearn.rounds import Range
from fedapp.trees.custom import CUSTOM, ObjectiveFunction
from fedapp.trees.objective import is_ranking

if TYPE_CHECKING:  # scikit-learn has no types; these are the ones used here

    class _Scored:
        def score(self, X: object, y: object, sample_weight: object = None) -> float: ...

    class ClassifierMixin(_Scored): ...

    class RegressorMixin(_Scored): ...

else:
    from sklearn.base import ClassifierMixin, RegressorMixin


class BaseClassifier(ClassifierMixin, Federated):
    """Base class of the classifiers."""

    example_of: ClassVar = {"data": "load_breast_cancer", "score": 0.8}
    class_weight: Mapping[Any, float] | str | None = None  # type: ignore[misc]

    def _targets(self, y: object) -> tuple[Arrays, dict[str, Any]]:
        labels = column_or_1d(y, warn=True)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            name = type(self).__name__
            raise ValueError(f"{name} needs two classes, but the data contain only one class")
        objective = "binary:logistic" if len(self.classes_) == 2 else "multi:softprob"
        return codes, {"objective": objective}

    def predict_proba(
        self, X: object, base_margin: object = None, iteration_range: Range | None = None
    ) -> Arrays:
        """Probability of each class, shape (n_rows, n_classes); rounds as in `apply`."""
        return by_class(np.asarray(self._rows(X, base_margin, iteration_range).predictions))

    def predict(
        self, X: object, base_margin: object = None, iteration_range: Range | None = None
    ) -> Arrays:
        """The class of the largest probability, shape (n_rows,)."""
        chosen = self.predict_proba(X, base_margin, iteration_range).argmax(axis=1)
        return np.asarray(self.classes_[chosen])


class BaseRegressor(RegressorMixin, Federated):
    """Base class of the regressors."""

    example_of: ClassVar = {"data": "load_diabetes", "score": 0.2}
    objective: str | ObjectiveFunction | None = None

    def _targets(self, y: object) -> tuple[Arrays, dict[str, Any]]:
        labels = column_or_1d(y, warn=True).astype(np.float64)
        if not np.isfinite(labels).all():
            raise ValueError("Input y contains NaN or infinity")
        named = CUSTOM if callable(self.objective) else self.objective
        if is_ranking(str(named)):
            way = "fedapp.run(..., qid=...) ranks the rows of a table's queries"
            raise ValueError(f"objective must be one without queries, got {named}: {way}")
        return labels, {"objective": named or "reg:squarederror"}

    def predict(
        self, X: object, base_margin: object = None, iteration_range: Range | None = None
    ) -> Arrays:
        """Predictions, shape (n_rows,); rounds as in `apply`."""
        return np.asarray(self._rows(X, base_margin, iteration_range).predictions)[:, 0]


class PAXClassifier(BaseClassifier, Horizontal, method="pax"):
    """Party-adaptive histogram boosting: one boosted classifier of all parties' rows."""


class PAXRegressor(BaseRegressor, Horizontal, method="pax"):
    """Party-adaptive histogram boosting: one boosted regressor of all parties' rows."""


class FedBaggingClassifier(BaseClassifier, Horizontal, method="bagging"):
    """Mean of the parties' XGBoost steps, for classes."""


class FedBaggingRegressor(BaseRegressor, Horizontal, method="bagging"):
    """Mean of the parties' XGBoost steps, for numbers."""


class FedCyclicClassifier(BaseClassifier, Horizontal, method="cyclic"):
    """XGBoost steps of the parties in turn, for classes."""


class FedCyclicRegressor(BaseRegressor, Horizontal, method="cyclic"):
    """XGBoost steps of the parties in turn, for numbers."""


class FedXGBllrClassifier(BaseClassifier, Horizontal, method="fedxgbllr"):
    """Every party's trees for classes, weighted by a network that all train; needs PyTorch."""


class FedXGBllrRegressor(BaseRegressor, Horizontal, method="fedxgbllr"):
    """Every party's trees for numbers, weighted by a network that all train; needs PyTorch."""


class FedAvgLinearClassifier(BaseClassifier, Horizontal, method="fedavg-linear"):
    """A linear classifier by federated averaging."""


class FedAvgLinearRegressor(BaseRegressor, Horizontal, method="fedavg-linear"):
    """A linear regressor by federated averaging."""


class HorizontalForestClassifier(BaseClassifier, Horizontal, method="horizontal-forest"):
    """A random forest classifier on the rows of several parties."""


class HorizontalForestRegressor(BaseRegressor, Horizontal, method="horizontal-forest"):
    """A random forest regressor on the rows of several parties."""


class SecureBoostClassifier(BaseClassifier, Vertical, method="secureboost"):
    """A boosted classifier on the columns of several parties; gradients are encrypted.

    The example's small keys are insecure.
    """

    example = f"{COLUMNS}, n_estimators=6, {SMALL_KEY}"


class SecureBoostRegressor(BaseRegressor, Vertical, method="secureboost"):
    """A boosted regressor on the columns of several parties; gradients are encrypted.

    The example's small keys are insecure.
    """


class FederatedForestClassifier(BaseClassifier, Vertical, method="federated-forest"):
    """A random forest classifier on the columns of several parties."""

    example = f"{COLUMNS}, n_estimators=5"


class FederatedForestRegressor(BaseRegressor, Vertical, method="federated-forest"):
    """A random forest regressor on the columns of several parties."""
