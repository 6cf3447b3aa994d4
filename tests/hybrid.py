"""HybridTree in one place: slow and obvious, on the rows of all parties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedapp.data.labels import class_ids, class_names
from fedapp.data.table import Table
from fedapp.histograms.sketch import quantile_cuts
from fedapp.run_folder import RunFolder
from fedapp.settings import Settings
from fedapp.site.table import Holdout, split_common
from fedapp.trees.divided import ActivePart
from fedapp.trees.losses import LossParameters
from fedapp.trees.model import LEAF
from fedapp.trees.objective import base_margin, base_score, gradients, label_sums, n_outputs
from tests.forests import read_part_of
from tests.transcript import summary_of

HOST = ""
Tree = dict[str, Any]  # a leaf has only its value


@dataclass
class Reference:
    """The trees of the host and of each guest, and the margins of the host's rows, in its order.

    Parameters
    ----------
    tables : by party, the first is the host.
    """

    settings: Settings
    tables: Mapping[str, Table]
    is_share: bool = False
    trees: dict[str, list[Tree]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s, (host, *self.guests) = self.settings, self.tables
        table = self.tables[host]
        assert table.labels is not None
        classes = class_names(table.labels, s.objective)
        labels = class_ids(table.labels, classes).astype(np.float32)
        ids = [str(name) for name in table.ids] if table.ids is not None else []
        holdout = Holdout(s.test_fraction, s.valid_fraction, s.seed)
        train = split_common(np.arange(len(ids)), ids, holdout, self.is_share).train
        self.is_train = np.isin(np.arange(len(ids)), train)
        # Values by party and row of the host; of rows that a party lacks nothing is used.
        self.values, self.has = {HOST: table.values}, {HOST: np.ones(len(ids), dtype=bool)}
        for name in self.guests:
            of_guest = self.tables[name]
            assert of_guest.ids is not None
            places = {str(row): place for place, row in enumerate(of_guest.ids)}
            self.has[name] = np.array([row in places for row in ids])
            taken = np.array([places.get(row, 0) for row in ids])
            self.values[name] = of_guest.values[taken]
        self.cuts = {
            name: quantile_cuts(self.values[name][self.has[name] & self.is_train], None, s.max_bin)
            for name in (HOST, *self.guests)
        }
        loss = LossParameters.of(s)
        ones = np.ones(len(train), np.float32)
        sums = label_sums(s.objective, labels[train], ones, len(classes), loss)
        score = base_score(s.objective, sums, float(len(train)), loss)
        width = n_outputs(s.objective, len(classes))
        start = np.tile(base_margin(s.objective, score), (len(ids), 1)).astype(np.float32)
        self.parts = dict.fromkeys((HOST, *self.guests), start)
        self.trees = {name: [] for name in self.parts}
        for _ in range(s.num_boost_round):
            self._round(labels, width, loss)

    @property
    def margins(self) -> Any:
        """The mean over the guests that have a row, else the host's."""
        count = sum(self.has[name].astype(np.float32) for name in self.guests)[:, None]
        total = sum(self.has[name][:, None] * self.parts[name] for name in self.guests)
        return np.where(count > 0, total / np.maximum(count, 1), self.parts[HOST])

    def _round(self, labels: Any, width: int, loss: LossParameters) -> None:
        ones, depth = np.ones(len(labels), np.float32), self.settings.max_depth
        pairs = gradients(self.settings.objective, self.margins, labels, ones, loss)
        steps = {name: np.zeros_like(part) for name, part in self.parts.items()}
        low = self.settings.sections["hybrid-tree"]["guest-depth"]
        for output in range(width):
            of_output = pairs[:, output].astype(np.float64)
            everything = np.ones(len(labels), dtype=bool)
            upper = self._grow(HOST, everything, of_output, depth - low)
            self.trees[HOST].append(self._spread(upper, everything, steps[HOST][:, output]))
            for name in self.guests:
                tree = self._below(upper, name, self.has[name], of_output, low)
                self.trees[name].append(tree)
                self._spread(tree, self.has[name], steps[name][:, output])
        self.parts = {name: part + steps[name] for name, part in self.parts.items()}

    def _below(self, tree: Tree, name: str, rows: Any, pairs: Any, depth: int) -> Tree:
        """A copy of the host's tree, with a guest's layers in place of each leaf."""
        if "left" not in tree:
            if not (rows & self.is_train).any():
                return tree
            grown = self._grow(name, rows, pairs, depth)
            return grown if "left" in grown else tree
        left = self._sides(tree, rows)
        below = {"left": (left, "left"), "right": (rows & ~left, "right")}
        return tree | {
            side: self._below(tree[way], name, part, pairs, depth)
            for side, (part, way) in below.items()
        }

    def _grow(self, name: str, rows: Any, pairs: Any, depth: int) -> Tree:
        """A tree over one party's columns of some rows."""
        train = rows & self.is_train
        split = self._best(name, train, pairs) if depth else None
        if split is None:
            return {"value": self._value(pairs[train].sum(axis=0))}
        left = self._sides(split, rows)
        split["left"] = self._grow(name, left, pairs, depth - 1)
        split["right"] = self._grow(name, rows & ~left, pairs, depth - 1)
        return split

    def _best(self, name: str, rows: Any, pairs: Any) -> Tree | None:
        best: Tree | None = None
        s, total = self.settings, pairs[rows].sum(axis=0)
        for column in range(self.values[name].shape[1]):
            values, edges = self.values[name][:, column], self.cuts[name].column(column)
            cuts = [(edge, False) for edge in edges]
            if np.isnan(values[rows]).any():
                cuts += [(cut, True) for cut in (*edges[:-1][::-1], self.cuts[name].minima[column])]
            for threshold, missing_left in cuts:
                split = {"party": name, "column": column, "threshold": threshold}
                split["missing_left"] = missing_left
                left = pairs[rows & self._sides(split, rows)].sum(axis=0)
                right = total - left
                if min(left[1], right[1]) < s.min_child_weight or not min(left[1], right[1]) > 0:
                    continue
                parts = np.float32(self._score(left) + self._score(right))
                gain = np.float32(parts - self._score(total))
                if gain > max(np.float32(1e-6), best["gain"] if best else 0):
                    best = split | {"gain": gain}
        return best

    def _sides(self, split: Tree, rows: Any) -> Any:
        values = self.values[split["party"]][:, split["column"]]
        left = np.where(np.isnan(values), split["missing_left"], values < split["threshold"])
        return rows & left

    def _score(self, sums: Any) -> Any:
        return np.float32(sums[0] ** 2) / np.float32(sums[1] + self.settings.reg_lambda)

    def _value(self, sums: Any) -> Any:
        weight = 0.0
        if sums[1] >= self.settings.min_child_weight and sums[1] > 0:
            weight = -sums[0] / (sums[1] + self.settings.reg_lambda)
        return np.float32(weight) * np.float32(self.settings.eta)

    def _spread(self, tree: Tree, rows: Any, steps: Any) -> Tree:
        """Add a tree's values to the steps of its rows; returns the tree."""
        if "left" not in tree:
            steps[rows] += tree["value"]
            return tree
        left = self._sides(tree, rows)
        self._spread(tree["left"], left, steps)
        self._spread(tree["right"], rows & ~left, steps)
        return tree


def trees_of(folder: RunFolder) -> dict[str, list[Tree]]:
    """The trees of a run as the reference has them, from the parts of all parties."""
    summary = summary_of(folder)
    parts = {
        party["name"]: read_part_of(party["name"], summary["model_id"])
        for party in summary["parties"]
    }
    host = parts[summary["active"]]
    assert isinstance(host, ActivePart)

    def below(pair: ActivePart, number: int, node: int) -> Tree:
        tree, owner = pair.model.trees[number], pair.owners(number)[node]
        if tree["left"][node] == LEAF:
            return {"value": tree["value"][node]}
        lookup, record = parts[owner].lookup, pair.records[number][node]
        return {
            "party": HOST if owner == host.name else owner,
            "column": lookup.columns[record],
            "threshold": lookup.thresholds[record],
            "missing_left": bool(lookup.defaults[record]),
            "gain": tree["gain"][node],
            "left": below(pair, number, tree["left"][node]),
            "right": below(pair, number, tree["left"][node] + 1),
        }

    return {
        name: [below(host.pair(name), number, 0) for number in range(len(host.pair(name).records))]
        for name in host.shared_with
    }


def assert_same(trees: Mapping[str, Sequence[Tree]], expected: Mapping[str, Sequence[Tree]]) -> int:
    """Compare node for node; returns the number of splits of guests."""
    assert trees.keys() == expected.keys()
    n_splits = 0
    for name, of_party in trees.items():
        pairs = list(zip(of_party, expected[name], strict=True))
        for one, other in pairs:  # the list grows in the loop
            assert one.keys() == other.keys(), name
            if "left" not in one:
                np.testing.assert_allclose(one["value"], other["value"], rtol=1e-5, atol=1e-7)
                continue
            for fact in ("party", "column", "threshold", "missing_left"):
                assert one[fact] == other[fact], (name, fact)
            np.testing.assert_allclose(one["gain"], other["gain"], rtol=1e-4, atol=1e-5)
            n_splits += one["party"] != HOST
            pairs += [(one[side], other[side]) for side in ("left", "right")]
    return n_splits
