"""A model of several ensembles under one head, and its form on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt

from fedapp.data.categories import Categories
from fedapp.trees.base_score import base_margin, read_base_score
from fedapp.trees.model import Ensemble, Tree, with_sets
from fedapp.trees.objective import Objective, n_outputs
from fedapp.trees.packed import TREES, pack_trees, unpack_trees
from fedapp.trees.sets import NO_SETS, CategorySets, category_counts
from fedapp.trees.stacked.head import Floats, HeadShape, Kind, head_margins, weights_in_unit
from fedapp.trees.stacked.outputs import tree_outputs
from fedapp.trees.text import (
    Opening,
    exact,
    read_categories,
    read_model,
    write_model,
    written_categories,
)

KIND = "trees under a head"
PREDICT_NUMBERS = 2**23  # tree outputs in memory at once


@dataclass(frozen=True, slots=True, eq=False)
class StackedModel:
    """Ensembles with a head that turns tree outputs into margins.

    ``margin = base_margin + unit * head(tree outputs / unit)``
    """

    # objective, base_score, columns, classes, categories: as in ``Ensemble``
    objective: Objective
    base_score: Floats
    columns: tuple[str, ...]
    classes: tuple[str, ...]
    unit: np.float32  # > 0: scale of the margins; 1 for classification
    ensembles: tuple[tuple[Tree, ...], ...]  # trees of each party, by party name
    shape: HeadShape
    weights: Floats  # (shape.n_weights,)
    sets: CategorySets = NO_SETS  # of all trees, one party after the other
    categories: Categories = ()

    @property
    def n_outputs(self) -> int:
        """Margins per row."""
        return self.shape.n_outputs

    @property
    def trees(self) -> tuple[Tree, ...]:
        """Trees of all parties, one party after the other."""
        return tuple(tree for trees in self.ensembles for tree in trees)

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """Number of trees of each party."""
        return np.array([len(trees) for trees in self.ensembles], dtype=np.int32)

    @property
    def bare(self) -> Ensemble:
        """The trees without the head, for statistics over trees."""
        return Ensemble(
            self.objective,
            self.base_score,
            self.columns,
            self.classes,
            self.trees,
            self.sets,
            self.categories,
        )

    def predict_margins(self, values: Floats) -> Floats:
        """Margins of rows, in batches; ``values`` is float32, NaN where missing."""
        size = max(1, PREDICT_NUMBERS // self.shape.n_columns)
        batches = [
            self.margins(
                tree_outputs(
                    self.ensembles, self.shape.n_trees, values[start : start + size], self.sets
                )
            )
            for start in range(0, len(values), size)
        ]
        return np.concatenate([*batches, np.empty((0, self.n_outputs), dtype=np.float32)])

    def margins(self, outputs: Floats) -> Floats:
        """Margins of tree outputs, float32, shape (n_rows, shape.n_columns)."""
        weights = weights_in_unit(self.shape, self.weights, self.unit)
        base = base_margin(self.objective, self.base_score)
        return base + head_margins(self.shape, weights, outputs)


def to_arrays(model: StackedModel) -> dict[str, npt.NDArray[Any]]:
    """Everything that was trained, for storage."""
    return {
        **pack_trees(model.trees, ["gains"], model.sets),
        "counts": model.counts,
        "base_score": model.base_score,
        "unit": np.array(model.unit),
        "weights": model.weights,
    }


def from_arrays(
    arrays: Mapping[str, npt.NDArray[Any]],
    objective: Objective,
    columns: tuple[str, ...],
    classes: tuple[str, ...],
    head: tuple[Kind, int],
    categories: Categories = (),
) -> StackedModel:
    """Undo ``to_arrays``; ``head`` is its kind and channels. ValueError if arrays do not match."""
    named = {name: arrays[name] for name in (*TREES, "gains")}
    grown = unpack_trees(named, category_counts(categories, len(columns)))
    ensembles = split_ensembles(grown.trees, arrays["counts"])
    width = n_outputs(objective, len(classes))
    return StackedModel(
        objective,
        arrays["base_score"],
        columns,
        classes,
        np.float32(arrays["unit"]),
        ensembles,
        HeadShape.over(head[0], arrays["counts"].tolist(), width, head[1]),
        arrays["weights"],
        grown.sets,
        categories,
    )


def rates_by_party(
    model: StackedModel, names: Sequence[str], rates: npt.NDArray[np.float64]
) -> dict[str, dict[str, Any]]:
    """The learned rate of each tree, and the weight Z of each party.

    Source: Ma et al. 2023, section 3.3 and Figure 3, where a tree counts Z times W. A network has
    only these products; Z is taken as their mean over the party's trees. ``rates`` come from
    ``learned_rates``. Returns ``{"trees": {name: [Z W of each tree]}, "parties": {name: Z}}``.
    """
    rows = zip(names, rates, model.counts, strict=True)
    by_party = {name: tree_rates[:count] for name, tree_rates, count in rows}
    return {
        "trees": {name: tree_rates.tolist() for name, tree_rates in by_party.items()},
        "parties": {name: float(tree_rates.mean()) for name, tree_rates in by_party.items()},
    }


def split_ensembles(
    trees: Sequence[Tree], counts: npt.NDArray[np.int32]
) -> tuple[tuple[Tree, ...], ...]:
    """Divide trees by party; raises ValueError if the counts do not match."""
    ends = np.cumsum(counts, dtype=np.int64)
    if not len(ends) or (counts < 0).any() or ends[-1] != len(trees):
        raise ValueError(f"counts must divide {len(trees)} trees")
    return tuple(tuple(trees[end - n : end]) for end, n in zip(ends, counts, strict=True))


def to_json(model: StackedModel) -> str:
    """The model as text; deterministic."""
    content = {
        **written_categories(model.categories, model.sets),
        "unit": exact(model.unit),
        "head": {
            "kind": model.shape.kind,
            "channels": model.shape.channels,
            "weights": [exact(weight) for weight in model.weights],
        },
        "ensembles": [
            {
                name: [exact(value) for value in array]
                for name, array in pack_trees(trees).items()
                if name != "sets"
            }
            for trees in model.ensembles
        ],
    }
    return write_model(KIND, model, content, model.base_score)


def from_json(text: str) -> StackedModel:
    """Read a model that ``to_json`` wrote; raises DataError for any other text."""
    return read_model(text, KIND, _model)


def _model(header: Opening, document: Mapping[str, Any]) -> StackedModel:
    """Build the model, and check its parts against each other."""
    head, width = document["head"], n_outputs(header.objective, len(header.classes))
    if head["kind"] not in get_args(Kind):
        raise ValueError(f"head {head['kind']}")
    no_categories = category_counts((), len(header.columns))  # sets come from the document
    ensembles = [
        unpack_trees(
            {name: np.array(arrays.get(name, []), dtype=kind) for name, kind in TREES.items()},
            no_categories,
        ).trees
        for arrays in document["ensembles"]
    ]
    counts = [len(trees) for trees in ensembles]
    categories = read_categories(document, len(header.columns))
    grown = with_sets(
        [tree for trees in ensembles for tree in trees],
        document.get("sets", []),
        category_counts(categories, len(header.columns)),
    )
    shape = HeadShape.over(cast(Kind, head["kind"]), counts, width, int(head["channels"]))
    weights = np.array(head["weights"], dtype=np.float32)
    if weights.shape != (shape.n_weights,):
        raise ValueError(f"{len(weights)} weights of a head that has {shape.n_weights}")
    mean, unit = read_base_score(document["base_score"], width), np.float32(document["unit"])
    return StackedModel(
        header.objective,
        mean,
        header.columns,
        header.classes,
        unit,
        split_ensembles(grown.trees, np.array(counts, dtype=np.int32)),
        shape,
        weights,
        grown.sets,
        categories,
    )
