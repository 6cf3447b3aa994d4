"""What the active party keeps of a SecureBoost run, read as what it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedapp import metrics
from fedapp.crypto.keys import PrivateKey
from fedapp.crypto.packing import FixedPoint, PairLayout, grouped_layouts
from fedapp.data.partition import SUBSETS
from fedapp.errors import ProtocolError
from fedapp.histograms.joint import JointColumns
from fedapp.messages.fields import Array
from fedapp.site.answer import Site
from fedapp.site.store import Store
from fedapp.trees.boosted.grow import Growth, Shape
from fedapp.trees.divided.lookup import Lookup, joined, joint_names
from fedapp.trees.model import Ensemble, Tree, split_trees, stack_trees, to_json
from fedapp.trees.objective import Objective, n_outputs

Ints = npt.NDArray[np.int64]
# State of a round that is under way.
GROWTH = (
    *("level", "wanted", "open", "nodes", "tree_offsets", "summed", "sums"),
    *("parents", "parent_histograms", "parent_missing"),
)


@dataclass(frozen=True, slots=True)
class Kept:
    """The active party's view of a run.

    Parameters
    ----------
    site : whose store holds it.
    """

    site: Site

    @property
    def store(self) -> Store:
        """Where everything lies."""
        return self.site.store

    @property
    def boost(self) -> dict[str, Any]:
        """Settings of the run, by the names of ``SetupRequest``."""
        return cast(dict[str, Any], self.store.facts["boost"])

    @property
    def objective(self) -> Objective:
        """Of the run."""
        return cast(Objective, self.boost["objective"])

    @property
    def n_train(self) -> int:
        """Training rows: the first ones."""
        return int(self.store.facts["n_train"])

    @property
    def n_rounds(self) -> int:
        """Finished rounds."""
        return int(self.store.facts["n_rounds"])

    @property
    def width(self) -> int:
        """Trees of a round."""
        return n_outputs(self.objective, len(self.store.facts["classes"]))

    @property
    def passive(self) -> list[str]:
        """Names of the other parties."""
        return [name for name in self.store.facts["peers"] if name != self.site.name]

    @property
    def shape(self) -> Shape:
        """Limits of a tree."""
        return Shape.of(self.boost)

    @property
    def joint(self) -> JointColumns:
        """Columns of all parties."""
        widths = self.store.facts["widths"]
        return JointColumns({name: np.array(w, dtype=np.int64) for name, w in widths.items()})

    @property
    def key(self) -> PrivateKey:
        """Of this run."""
        return PrivateKey.from_array(self.store["key"])

    @property
    def layouts(self) -> tuple[PairLayout, ...]:
        """How gradients are packed, by group of trees."""
        return grouped_layouts(self.key.public.bits, self.n_train, self.width)

    @property
    def scale(self) -> FixedPoint:
        """Of the gradients of the round."""
        first, second = self.store.facts["scale"]
        return FixedPoint((first, second))

    def growth(self) -> Growth:
        """The round that is under way."""
        arrays = {name: self.store[f"growth.{name}"] for name in GROWTH}
        allowed = self.store["allowed"].astype(bool)
        return Growth.restored(arrays, self.joint.cuts, allowed, self.shape)

    def keep_growth(self, growth: Growth) -> None:
        """Keep how far the round is."""
        for name, array in growth.arrays().items():
            self.store[f"growth.{name}"] = array

    def drawn(self, party: str) -> Ints:
        """A party's columns that any tree of the round may split, under its own numbers."""
        return self.joint.own(party, np.flatnonzero(self.store["allowed"].any(axis=0)))

    @property
    def trees(self) -> tuple[Tree, ...]:
        """Of all finished rounds; a threshold is the number of bins that go left."""
        return split_trees(self.store["model.nodes"], self.store["model.offsets"])

    def add_trees(self, trees: tuple[Tree, ...], records: Array) -> None:
        """Finish a round; ``records``: tree, node and record id of each split."""
        store = self.store
        found = [np.full(len(tree), -1, dtype=np.int64) for tree in trees]
        for tree, node, record in records:
            found[tree][node] = record
        store["model.nodes"], store["model.offsets"] = stack_trees((*self.trees, *trees))
        store["model.records"] = np.concatenate((store["model.records"], *found))
        store.facts["n_rounds"] += 1

    def model(self, n_rounds: int) -> tuple[Ensemble, list[Ints]]:
        """The first rounds without thresholds, and of each tree the record ids of its nodes."""
        store, kept = self.store, n_rounds * self.width
        records = [store["model.records"][a:b] for a, b in pairwise(store["model.offsets"])]
        names = joint_names({party: self.column_names(party) for party in self.joint.widths})
        classes, mean = tuple(store.facts["classes"]), np.float32(store.facts["base_score"])
        trees = self.trees[:kept]
        return Ensemble(self.objective, mean, names, classes, trees), records[:kept]

    def column_names(self, party: str) -> list[str]:
        """Names where they are shared, numbers where not."""
        shared: list[str] = self.store.facts["shared_names"][party]
        n_columns = len(self.joint.widths[party])
        return shared or [f"{party} column {number}" for number in range(1, n_columns + 1)]

    def part(
        self,
        model: Ensemble,
        records: list[Ints],
        parts: dict[str, str],
        threshold: float | None,
    ) -> dict[str, Any]:
        """The active party's part of the model: structure, leaf weights, own thresholds.

        Parameters
        ----------
        parts : digests of the others' parts.
        threshold : of two classes, a probability, for scores.
        """
        return {
            **Lookup.kept(self.store).to_json(self.store.facts["columns"], self.store["quantiles"]),
            "active": True,
            "threshold": threshold,
            "name": self.site.name,
            "parts": parts,
            "model": to_json(model),
            "splits": [each.tolist() for each in records],
            "n_columns": {name: len(widths) for name, widths in self.joint.widths.items()},
        }

    def joined(
        self,
        model: Ensemble,
        records: list[Ints],
        lookups: dict[str, Lookup],
        names: dict[str, list[str]],
    ) -> Ensemble:
        """The whole model.

        Parameters
        ----------
        lookups, names : splits and columns by party.

        Raises
        ------
        ProtocolError : a party has told of fewer splits than it has made.
        """
        joint = self.joint
        order = list(joint.widths)
        owners = [
            np.array([order.index(joint.owner(int(column))[0]) for column in tree["column"]])
            for tree in model.trees
        ]
        for number, party in enumerate(order):
            own = [ids[by == number] for ids, by in zip(records, owners, strict=True)]
            n_made = 1 + max((int(ids.max(initial=-1)) for ids in own), default=-1)
            if n_made > len(lookups[party].thresholds):
                rule = f"must be {n_made} at least, got {len(lookups[party].thresholds)}"
                raise ProtocolError(party, "Records", "thresholds", rule)
        columns = joint_names({party: names[party] for party in order})
        return joined(model, records, owners, [lookups[party] for party in order], columns)

    def scores(self, margins: Array) -> dict[str, dict[str, float]]:
        """Scores by subset of the rows; nothing for one without rows."""
        store, rows, start = self.store, dict[str, tuple[Array, Array, Array]](), 0
        for subset in SUBSETS:
            own = slice(start, start + store.facts[f"n_{subset}"])
            rows[subset] = margins[own], store["labels"][own], store["weights"][own]
            start = own.stop
        return metrics.pooled_subsets(self.objective, rows)

    def note_best(self, valid: dict[str, float]) -> None:
        """Keep the margins of the round with the best validation score, the first of equals."""
        name = metrics.default_metric(self.objective)
        score = valid.get(name, float("nan"))
        signed = score if metrics.BETTER[name] else -score
        if signed > self.store.facts.get("best_score", -np.inf):  # NaN is not
            self.store.facts["best_score"] = signed
            self.store.facts["best_round"] = self.n_rounds
            self.store["best.margins"] = self.store["margins"]

    def margins(self, n_rounds: int) -> Array:
        """Margins after so many rounds: all, or the best.

        Raises
        ------
        ProtocolError : another round.
        """
        if n_rounds == self.n_rounds:
            return self.store["margins"]
        best = self.store.facts.get("best_round")
        if n_rounds != best:
            rule = f"must be {self.n_rounds} or {best}, got {n_rounds}"
            raise ProtocolError(self.site.name, "FinishRequest", "best_round", rule)
        return self.store["best.margins"]
