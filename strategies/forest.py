"""What the settings of all random forests have in common."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from fedapp.errors import ConfigError
from fedapp.settings import Section, Settings
from fedapp.trees.forest.cart import Criterion
from fedapp.trees.losses import REGRESSION
from fedapp.trees.objective import AUTO

FOREST_OBJECTIVES = ("binary:logistic", "multi:softprob", REGRESSION)  # a forest takes means


class ForestSettings(Section):
    """Settings of a forest, in the section of every method that grows one."""

    trees: Annotated[int, Field(ge=1, le=10**5)]
    """Number of trees."""
    max_depth: Annotated[int, Field(ge=1, le=100)]
    """Largest depth of a tree."""
    criterion: Literal["auto", "gini", "entropy", "variance"]
    """Impurity that splits are chosen by; `auto` follows the labels."""
    min_samples_split: Annotated[int, Field(ge=2, le=10**6)]
    """Fewest rows of a node that is split."""
    min_samples_leaf: Annotated[int, Field(ge=1, le=10**6)]
    """Fewest rows of a leaf."""
    min_impurity_decrease: Annotated[float, Field(ge=0, le=1e38)]
    """Least decrease of a split."""
    max_features: Literal["all", "sqrt", "log2"] | Annotated[float, Field(gt=0, le=1)]
    """Columns that are drawn: a rule as in scikit-learn, or a share."""
    max_features_per: Literal["node", "tree"]
    """Whether columns are drawn for each node, or once for each tree."""
    bootstrap: bool
    """Whether a tree's rows are drawn with replacement."""

    def criterion_for(self, objective: str) -> Criterion:
        """The impurity that splits are chosen by."""
        if self.criterion != "auto":
            return self.criterion
        return "variance" if objective == REGRESSION else "gini"

    @classmethod
    def fitting(cls, settings: Settings) -> Self:
        """The section of a run; ConfigError if its criterion does not fit the objective."""
        section = cls.of(settings)
        is_variance = settings.objective == REGRESSION
        is_checked = section.criterion != "auto" and settings.objective != AUTO
        if is_checked and (section.criterion == "variance") != is_variance:
            fitting = "variance" if is_variance else "gini or entropy"
            rule = f"must be {fitting} for {settings.objective}"
            raise ConfigError(f"{cls.table}.criterion {rule}, got {section.criterion}")
        return section
