"""Boosting state between rounds: the trees, and splits and leaf values not yet sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.categories import Categories
from fedapp.histograms.bins import Cuts
from fedapp.trees.boosted.grow import FREE, Growth, Shape
from fedapp.trees.boosted.limits import Limits
from fedapp.trees.boosted.routes import ROUTE, Routes
from fedapp.trees.model import (
    LEAF,
    NO_TREES,
    Ensemble,
    Grown,
    Tree,
    check_range,
    split_trees,
    stack_trees,
    together,
)
from fedapp.trees.objective import PLAIN, LossParameters, Objective, n_outputs
from fedapp.trees.sets import NO_SETS, CategorySets

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Random draws of a run."""

    seed: int
    colsample: float  # share of the columns each tree may split, in (0, 1]

    def columns(self, round_id: int, n_trees: int, n_columns: int) -> npt.NDArray[np.bool_]:
        """Columns of each tree, at least one; bool, shape (n_trees, n_columns)."""
        n_drawn = max(1, int(self.colsample * n_columns))
        if n_drawn == n_columns:
            return np.ones((n_trees, n_columns), dtype=bool)
        rng = np.random.default_rng([self.seed, round_id])
        allowed = np.zeros((n_trees, n_columns), dtype=bool)
        for tree in allowed:
            tree[rng.choice(n_columns, n_drawn, replace=False)] = True
        return allowed


@dataclass(slots=True, eq=False)
class Boosting:
    """Boosting, round by round."""

    # objective, base_score, columns, classes, categories, margin_column: as in ``Ensemble``
    objective: Objective
    base_score: npt.NDArray[np.float32]
    columns: tuple[str, ...]
    classes: tuple[str, ...]
    cuts: Cuts  # layout of the histograms
    shape: Shape  # limits of a tree
    sampling: Sampling
    categories: Categories = ()
    parameters: LossParameters = PLAIN  # of the objective
    limits: Limits = FREE  # of single nodes; the round's number is set for each round
    margin_column: str = ""
    grown: Grown = NO_TREES  # trees of all finished rounds, with their sets
    # routes, route_sets: splits of the last round that parties do not know yet, with their sets
    routes: Routes = field(default_factory=lambda: np.empty(0, dtype=ROUTE))
    route_sets: CategorySets = NO_SETS
    leaves_told: bool = True  # whether parties know the leaf values of the last round

    @property
    def width(self) -> int:
        """Trees per round."""
        return n_outputs(self.objective, len(self.classes))

    @property
    def n_rounds(self) -> int:
        """Finished rounds."""
        return len(self.grown.trees) // self.width

    @property
    def last_trees(self) -> tuple[Tree, ...]:
        """The trees of the last finished round."""
        return self.grown.trees[-self.width :]

    @property
    def model(self) -> Ensemble:
        """The model so far."""
        return Ensemble(
            self.objective,
            self.base_score,
            self.columns,
            self.classes,
            *self.grown,
            self.categories,
            self.parameters,
            self.margin_column,
        )

    def growth(self) -> Growth:
        """The trees of the next round, not yet grown."""
        n_columns = len(self.columns)
        allowed = self.sampling.columns(self.n_rounds, self.width, n_columns)
        limits = replace(self.limits, round_id=self.n_rounds)
        return Growth(self.width, self.cuts, allowed, self.shape, limits)

    def tell(self, routes: Routes, sets: CategorySets) -> None:
        """Store the splits of a level, not yet sent."""
        self.routes, self.route_sets = routes, sets

    def add(self, grown: Grown) -> None:
        """Finish a round; its last splits and leaf values are not yet sent."""
        check_range(grown.trees)
        self.grown = together([self.grown, grown])
        self.leaves_told = False

    def told(self) -> None:
        """Mark all splits and leaf values as sent."""
        self.routes, self.route_sets = np.empty(0, dtype=ROUTE), NO_SETS
        self.leaves_told = True

    def untold_leaves(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Unsent leaf values of the last round, one per node, and the start of each tree."""
        if self.leaves_told:
            return np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
        nodes, offsets = stack_trees(self.last_trees)
        return np.ascontiguousarray(nodes["value"]), offsets

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All that changes from round to round, and the cuts, for storage."""
        nodes, offsets = stack_trees(self.grown.trees)
        return {
            "base_score": self.base_score,
            "edges": self.cuts.edges,
            "offsets": self.cuts.offsets,
            "minima": self.cuts.minima,
            "categories": self.cuts.categories,
            "nodes": nodes,
            "tree_offsets": offsets,
            "sets": self.grown.sets.bits,
            "set_widths": self.grown.sets.widths,
            "routes": self.routes,
            "route_sets": self.route_sets.bits,
            "route_set_widths": self.route_sets.widths,
            "leaves_told": np.array(self.leaves_told),
        }

    def restore(self, arrays: Arrays) -> None:
        """Undo ``arrays``."""
        trees = split_trees(arrays["nodes"], arrays["tree_offsets"])
        self.grown = Grown(trees, CategorySets(arrays["sets"], arrays["set_widths"]))
        self.routes, self.leaves_told = arrays["routes"], bool(arrays["leaves_told"])
        self.route_sets = CategorySets(arrays["route_sets"], arrays["route_set_widths"])


def kept_cuts(arrays: Arrays) -> tuple[npt.NDArray[np.float32], Cuts]:
    """Base score and cuts from ``Boosting.arrays``."""
    cuts = Cuts(arrays["edges"], arrays["offsets"], arrays["minima"], arrays["categories"])
    return arrays["base_score"], cuts


def n_leaves(trees: Iterable[Tree]) -> int:
    """Number of leaves of some trees."""
    return sum(int((tree["left"] == LEAF).sum()) for tree in trees)
