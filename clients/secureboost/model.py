"""The boosted model at the active party: trees and margins so far, and the whole model at the end.

A tree is without thresholds: of another party's split this one knows the column's number and the
record id, by which the owner finds the threshold in its lookup table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from clients.secureboost.joint import Ints, Joint
from fedapp.data.columns import check_kinds
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.messages.secureboost import Records
from fedapp.messages.vertical import read_splits
from fedapp.trees.categories import NO_SET, Categories, category_counts
from fedapp.trees.divided import Lookup, joint_names, whole_model
from fedapp.trees.grow import without_padding
from fedapp.trees.model import LEAF, Ensemble, Tree, split_trees, stack_trees
from fedapp.trees.predict import Nodes
from fedapp.trees.structure import Structure

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Best:
    """The round with the best validation score, the first of equals."""

    score: float  # larger is better
    n_rounds: int
    margins: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Boosted:
    """The model after some rounds, and the margins of all rows."""

    base_score: Floats  # (n_outputs,)
    margins: Floats  # (n_rows, n_outputs)
    nodes: npt.NDArray[np.void]  # of all trees
    offsets: Ints  # the start of each tree, and the end
    records: Ints  # record id of each node's split in its owner's lookup, -1 at leaves
    n_made: Ints  # (n_parties,): splits of each, by which records are numbered
    best: Best | None = None
    n_parallel: int = 1  # trees a round of each output
    first_round: int = 0  # not 0 if the run continues another model

    @property
    def n_rounds(self) -> int:
        """Finished rounds, with those of the initial model."""
        has_one_tree = self.nodes["value"].ndim > 1
        width = 1 if has_one_tree else self.n_parallel * int(self.margins.shape[1])
        return (len(self.offsets) - 1) // width

    @property
    def trees(self) -> tuple[Tree, ...]:
        """Trees of all rounds."""
        return split_trees(self.nodes, self.offsets)

    def first_trees(self, n_trees: int) -> tuple[tuple[Tree, ...], tuple[Ints, ...]]:
        """The first trees, and the record ids of their nodes."""
        pairs = pairwise(self.offsets[: n_trees + 1])
        return self.trees[:n_trees], tuple(self.records[a:b] for a, b in pairs)

    def plus(
        self, padded: Sequence[tuple[Tree, Ints]], structure: Structure, nodes: Nodes
    ) -> Boosted:
        """The model after one more round.

        Parameters
        ----------
        padded : its trees, and of each node its number in ``structure``: where the order of splits
            is not that of levels, the model's nodes have other numbers.
        nodes : shape (n_trees, n_rows): where the rows are in ``structure``.
        """
        splits, trees, records, steps = structure.splits, list[Tree](), list[Ints](), []
        ids = splits.spread(self.n_made[splits.owners] + splits.records, structure.n_nodes, -1)
        for (tree, numbers), of_tree, of_rows in zip(padded, ids, nodes, strict=True):
            trees.append(tree.copy())
            trees[-1]["set"] = NO_SET  # sets are in the lookup tables
            records.append(of_tree[numbers])
            steps.append(tree["value"][np.argsort(numbers)[of_rows]])
        stacked, offsets = stack_trees((*self.trees, *trees))
        margins = self.margins
        n_rows, n_outputs = margins.shape
        of_trees = np.stack(steps, axis=1).reshape(n_rows, self.n_parallel, n_outputs)
        for number in range(self.n_parallel):  # one after the other, as XGBoost's float32 sums
            margins = margins + of_trees[:, number]
        return replace(
            self,
            margins=margins,
            nodes=stacked,
            offsets=offsets,
            records=np.concatenate((self.records, *records)),
            n_made=self.n_made + np.bincount(splits.owners, minlength=len(self.n_made)),
        )

    def scored(self, score: float) -> Boosted:
        """The model with the last round as the best, if none before has this score."""
        if score > (self.best.score if self.best else -np.inf):  # never true for NaN
            return replace(self, best=Best(float(score), self.n_rounds, self.margins))
        return self

    def margins_after(self, n_rounds: int, party: str) -> Floats:
        """Margins after all rounds, or after the best; raises a ProtocolError for others."""
        if n_rounds == self.n_rounds:
            return self.margins
        if self.best is None or n_rounds != self.best.n_rounds:
            best = self.best.n_rounds if self.best else None
            rule = f"must be {self.n_rounds} or {best}, got {n_rounds}"
            raise ProtocolError(party, "FinishRequest", "best_round", rule)
        return self.best.margins


def trimmed(model: Ensemble, records: Sequence[Ints]) -> tuple[Ensemble, tuple[Ints, ...]]:
    """A model without splits that were dropped, and the record ids of its nodes."""
    trees = tuple(map(without_padding, model.trees))
    ids = (
        np.where(tree["left"] == LEAF, -1, of_tree[: len(tree)])
        for of_tree, tree in zip(records, trees, strict=True)
    )
    return replace(model, trees=trees), tuple(ids)


def joined(
    model: Ensemble, records: Sequence[Ints], joint: Joint, letters: Mapping[str, Records]
) -> Ensemble:
    """The whole model, from all parties' splits; raises a ProtocolError if some do not fit."""
    parts = {party: _read_records(party, letters[party], joint) for party in joint.widths}
    owners = [joint.owners(tree["column"])[0] for tree in model.trees]
    # Each party must have sent every split that it has made.
    for number, (party, (table, _)) in enumerate(parts.items()):
        of_party = [ids[by == number] for ids, by in zip(records, owners, strict=True)]
        n_made = 1 + max((int(ids.max(initial=-1)) for ids in of_party), default=-1)
        if n_made > len(table.thresholds):
            rule = f"must be {n_made} at least, got {len(table.thresholds)}"
            raise ProtocolError(party, "Records", "thresholds", rule)
    names = joint_names({party: letters[party].names for party in parts})
    n_columns = [len(widths) for widths in joint.widths.values()]
    kinds = tuple(kind for party in parts for kind in letters[party].kinds)
    return whole_model(model, records, owners, list(parts.values()), n_columns, names, kinds)


def _read_records(party: str, letter: Records, joint: Joint) -> tuple[Lookup, Categories]:
    """A party's splits, and the categories of its columns."""
    n_columns = len(joint.widths[party])
    if len(letter.names) != n_columns:
        rule = f"must be {n_columns}, got {len(letter.names)}"
        raise ProtocolError(party, "Records", "names", rule)
    rule = "must be of the party's columns and their categories"
    lookup, categories = read_splits(party, letter, n_columns, rule)
    n_bins = np.where(joint.categorical[party], joint.widths[party], 0)
    # Includes categories in no training row.
    if (category_counts(categories, n_columns) < n_bins).any():
        raise ProtocolError(party, "Records", "widths", rule)
    with as_protocol_error(party, "Records", "kinds"):
        check_kinds(letter.kinds, n_columns)
    return lookup, categories
