"""What all kinds of models have in common, and their documents of older formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Self

import numpy as np

from fedapp.trees.losses import PLAIN
from fedapp.trees.objective import check_classes, n_outputs
from fedapp.trees.sets import CategorySets

Kinds = tuple[str, ...]
BOOSTED, BAGGED, STACKED = "boosted", "bagged", "trees under a head"
LINEAR, DIVIDED = "linear", "parts"  # a divided model's document: where its parts are
PASSIVE, IN_FOREST, ACTIVE = "passive part", "forest part", "active part"
Fields = dict[str, Any]


def _without_numbers(kinds: Kinds) -> Kinds:
    return kinds if {*kinds} - {"number"} else ()


def _as_written(kinds: tuple[str, ...]) -> Kinds:
    return kinds


KindsOfColumns = Annotated[Kinds, _without_numbers, _as_written]  # none if all are numbers


def newer(document: Fields) -> Fields:
    """The fields of a document of format 1 (models) or 2 (parts) as format 3 has them."""
    if document["format"] == 2:
        return _newer_part(document)
    if "records" in document:
        raise ValueError("format must be 2 at least of a part, got 1: train the model again")
    fields = {"kind": BOOSTED, **_without(document, "format", "inputs")}
    kind = fields["kind"]
    width = n_outputs(fields["objective"], len(fields.get("classes", ())))
    if not isinstance(score := fields.get("base_score", []), list):
        fields["base_score"] = [score] * width
    if kind == BOOSTED:
        fields["margin_column"] = fields.pop("base_margin", "")
        fields["parameters"] = asdict(PLAIN) | fields.get("parameters", {})
        fields["trees"] = [_without(tree, "parent") for tree in fields["trees"]]
    elif kind == BAGGED:
        fields["values"] = [tree["value"] for tree in fields["trees"]]
        fields["trees"] = [_without(tree, "value") for tree in fields["trees"]]
    elif kind == STACKED:
        head = fields.pop("head")
        counts = [len(field["sizes"]) for field in fields["ensembles"]]
        sizes = {"n_parties": len(counts), "n_rounds": max(counts) // width, "n_outputs": width}
        fields |= {"shape": _without(head, "weights") | sizes, "weights": head["weights"]}
    return fields


def _newer_part(document: Fields) -> Fields:
    records = document["records"]
    columns, thresholds, defaults = ([record[field] for record in records] for field in range(3))
    widths = document.get("widths", [0] * len(records))
    sets = CategorySets.of_codes(document.get("sets", []))
    bits = sets.widened(np.array([width for width in widths if width], dtype=np.int64)).bits
    cuts = {"columns": columns, "thresholds": thresholds, "defaults": defaults}
    fields = _without(document, "format", "salt", "records", "widths", "sets", "base_margin")
    fields.setdefault("quantiles", [])
    fields |= {"kind": PASSIVE, "lookup": {**cuts, "widths": widths, "set_bits": bits.tolist()}}
    if fields.pop("active", False):
        model = newer(json.loads(fields["model"]))
        moved = {"kind": ACTIVE, "digests": fields.pop("parts"), "records": fields.pop("splits")}
        return {**fields, **moved, "model": model}
    fields.pop("name", None)
    if "trees" in fields:
        return {**fields, "kind": IN_FOREST}
    pairs = fields.get("nesting", [])
    trees, under = ([pair[field] for pair in pairs] for field in (0, 1))
    return {**fields, "nesting": {"trees": trees, "under": under}}


def _without(fields: Mapping[str, Any], *names: str) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


class Model:
    """Base of all kinds of models; a kind is a dataclass, see ``records.document``."""

    __slots__ = ()
    KIND: ClassVar[str]

    @staticmethod
    def newer(document: Fields) -> Fields:
        """The fields of a document of an older format as this one has them."""
        return newer(document)

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
