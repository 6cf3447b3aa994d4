"""What all kinds of models have in common."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from fedapp.trees.objective import check_classes

Kinds = tuple[str, ...]
BOOSTED, BAGGED, STACKED = "boosted", "bagged", "trees under a head"
LINEAR, DIVIDED = "linear", "parts"  # a divided model's document: where its parts are
PASSIVE, IN_FOREST, ACTIVE = "passive part", "forest part", "active part"


def _without_numbers(kinds: Kinds) -> Kinds:
    return kinds if {*kinds} - {"number"} else ()


def _as_written(kinds: tuple[str, ...]) -> Kinds:
    return kinds


KindsOfColumns = Annotated[Kinds, _without_numbers, _as_written]  # none if all are numbers


class Model:
    """Base of all kinds of models; a kind is a dataclass, see ``records.document``."""

    __slots__ = ()
    KIND: ClassVar[str]

    @property
    def margin_column(self) -> str:
        """Column whose values the margins of rows start from; empty for none."""
        return ""

    def completed(self) -> Self:
        """The model with what follows from its fields; ValueError if they do not fit together."""
        model: Any = self
        if hasattr(model, "classes"):
            check_classes(model.objective, len(model.classes))
        n_columns = len(getattr(model, "columns", ()))
        for name in ("categories", "kinds", "quantiles"):
            if (n := len(getattr(model, name, ()))) not in (0, n_columns):
                raise ValueError(f"{name} must be {n_columns}, one a column, got {n}")
        for names in getattr(model, "categories", ()):
            if names is not None and len({*names}) < len(names):
                raise ValueError("categories must differ within a column")
        return self
