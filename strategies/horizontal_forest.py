"""A random forest over the rows of several parties, grown from sums of rows by bin.

Source: Breiman 2001, "Random Forests", by scikit-learn's rules, as in Federated Forest (Liu et al.
2019), for parties with the same columns and different rows. Cuts and sums are PAX's
(``strategies.pax_sums``): common cuts once, then all trees level by level. Departures from
scikit-learn, beside those of ``fedapp.trees.forest.summed``:

- Each party draws as many of its rows as it has, so a tree draws the same share of every party.
- A column has at most ``max-bin`` bins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedapp.arrays import Ints
from fedapp.conversation import Checkpoint, Conversation, Progress, Saved
from fedapp.crypto.masking import SIZES
from fedapp.data.partition import WATCHED
from fedapp.errors import ConfigError, DataError
from fedapp.histograms.bins import Cuts
from fedapp.histograms.fixed_point import Whole
from fedapp.messages import horizontal_forest as messages
from fedapp.messages.fields import MOST_DEPTH, Array, check_fields, check_sizes
from fedapp.messages.secagg import EVERYONE
from fedapp.settings import Section, Settings
from fedapp.trees.categories import sets_of_rows
from fedapp.trees.forest import summed
from fedapp.trees.forest.bagged import (
    PER_NODE,
    BaggedForest,
    by_tree,
    column_seeds,
    columns_of,
    n_features,
)
from fedapp.trees.forest.cart import Rules
from fedapp.trees.model import importance_of
from fedapp.trees.predict import Places
from fedapp.trees.structure import Structure, joined
from strategies import pax_sums
from strategies.forest import FOREST_OBJECTIVES, ForestSettings
from strategies.handshake import Hellos
from strategies.horizontal import HorizontalState, HorizontalStrategy, mean_label
from strategies.method import Outcome
from strategies.scoring import ROUND_BINS, History, pooled_statistics, scores_of
from strategies.secagg import Form, check_secure_aggregation, row_bounds

CUTS = pax_sums.CutKinds(
    messages.SketchRequest, messages.SketchReply, messages.OpenRequest, messages.CountRequest
)
PART_CELLS = 2**22  # cells that are asked for at once, of two trees at least
Nodes = tuple[Places, Places]  # trees and nodes


class HorizontalForestSettings(ForestSettings, pax_sums.SumSettings, Section):
    """``[horizontal-forest]`` of the run config; see ``HorizontalForest``."""

    table = "horizontal-forest"

    max_depth: Annotated[int, Field(ge=1, le=MOST_DEPTH)]
    """Largest depth of a tree."""


@dataclass(slots=True, eq=False)
class ForestState(HorizontalState):
    """What a run has at a checkpoint."""

    totals: pax_sums.TotalsState
    cuts: Cuts
    structure: Structure
    root_sums: Whole  # (n_trees, n_sums); none before the first level
    levels: tuple[summed.Splits, ...] = ()


class HorizontalForest(HorizontalStrategy):
    """A random forest over rows: one forest from sums of all parties' rows by bin.

    Examples
    --------
    >>> from strategies import HorizontalForest
    >>> HorizontalForest(horizontal_forest={"trees": 10, "max_depth": 3}, parties=2).num_rounds
    56
    """

    method = "horizontal-forest"
    reads = frozenset(("max-bin", "eval-metric"))
    round_name = "level"
    objectives = FOREST_OBJECTIVES
    sections = frozenset(("privacy",))
    section: HorizontalForestSettings
    totals: pax_sums.Totals

    @classmethod
    def section_settings(cls, settings: Settings) -> HorizontalForestSettings:
        section = HorizontalForestSettings.fitting(settings)
        if epsilon := settings.sections["privacy"]["epsilon"]:
            rule = "must be 0 for horizontal-forest: every bin of every node of every tree would "
            rule += "take noise; pax has an epsilon"
            raise ConfigError(f"privacy.epsilon {rule}, got {epsilon}")
        if section.aggregation == "secure":
            check_secure_aggregation(settings)
        return section

    @classmethod
    def most_rounds(cls, settings: Settings) -> int:
        return cls.section_settings(settings).max_depth

    @classmethod
    def exchanges_a_round(cls, settings: Settings) -> int:
        """Parts of a level, some of them twice, and the splits."""
        return cls.section_settings(settings).trees + 2

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        section = cls.section_settings(settings)
        forest = {name: getattr(section, name) for name in ("trees", "max_depth", "bootstrap")}
        return {**super().planned(settings), "rounds": 0, **forest}

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[Outcome]:
        """Level by level: sums of the open nodes, their best splits, the rows moved."""
        run = saved.read(ForestState) if saved else None
        self.agree(parties, run)
        kind: type[pax_sums.Totals] = (
            pax_sums.MaskedTotals if self.sees_only_sums else pax_sums.PlainTotals
        )
        state = run.totals if run else pax_sums.TotalsState()
        self.totals = kind(self.settings, self.section, CUTS, self.table, state, self.warn_once)
        if run is None:
            run = yield from self._begin(parties)
        else:
            yield from self.totals.resume(parties)
        while run.structure.level < self.section.max_depth and len(self._open(run)[0]):
            yield Checkpoint(run)
            splits = yield from self._search(parties, run)
            if splits is None or not len(splits.nodes):
                break
            replies = yield from self._split(parties, run, splits)
            yield self._progress(run, replies)
            if not self.totals.can_continue(parties):
                break
        yield Checkpoint(run)
        return (yield from self._finish(parties, run))

    def _begin(self, parties: Hellos) -> Conversation[ForestState]:
        """Agree on the cuts of all columns; bounds of rows, from which units follow."""
        labels, cuts = yield from self.totals.begin(parties, self.terms())
        self.store_unseen(labels)
        mean_label(labels, len(self.table.classes), self.settings)  # both classes must occur
        state = self.totals.state
        if sketches := [
            reply for reply in labels.values() if isinstance(reply, messages.SketchReply)
        ]:
            state.bounds = row_bounds(parties, max(reply.heaviest for reply in sketches))
            state.weighted = any(reply.weighted for reply in sketches)
        structure = Structure.roots(self.section.trees)
        no_sums = np.empty((0, 0), dtype=np.int64)
        history = History.of(self.settings)
        return ForestState(self.table, self.initial, history, state, cuts, structure, no_sums)

    @property
    def _rules(self) -> Rules:
        section = self.section
        return Rules(
            section.criterion_for(self.settings.objective),
            len(self.table.classes),
            section.min_samples_split,
            section.min_samples_leaf,
            section.min_impurity_decrease,
        )

    @property
    def _powers(self) -> Ints:
        state = self.totals.state
        return summed.exponents(len(self.table.classes), state.bounds, state.weighted)

    def _values(self, sums: Whole) -> npt.NDArray[np.float64]:
        return summed.node_values(sums, self._powers, len(self.table.classes), self.n_outputs)

    def _open(self, run: ForestState) -> Nodes:
        """Nodes that may be split next, as far as their sums show."""
        trees, nodes = run.structure.open_nodes
        if not run.levels:
            return trees, nodes
        sums = run.levels[-1].sums
        is_open = summed.may_split(sums.reshape(-1, sums.shape[-1]), self._rules)
        return trees[is_open], nodes[is_open]

    def _search(self, parties: Hellos, run: ForestState) -> Conversation[summed.Splits | None]:
        """The best split of each open node; None if a party was lost whose sums are needed.

        Where no drawn column differs in a node, the first other one in drawing order that does
        takes their place, as in scikit-learn.
        """
        trees, nodes = self._open(run)
        n_columns = run.cuts.n_columns
        n_drawn = n_features(self.section.max_features, n_columns)
        drawn = slice(0, n_drawn)
        searched = yield from self._sweep(parties, run, (trees, nodes), drawn)
        if searched is None:
            return None
        if not run.levels:
            run.root_sums = searched.totals
            if not summed.node_weights(run.root_sums, self._powers, self._rules.n_classes).all():
                raise DataError("weight must be > 0 in some row that each tree draws")
        splits = searched.splits
        again = np.flatnonzero(searched.is_constant)
        if len(again) and n_drawn < n_columns and self.section.max_features_per == PER_NODE:
            others = slice(n_drawn, n_columns)
            rest = yield from self._sweep(parties, run, (trees[again], nodes[again]), others)
            if rest is None:
                return None
            splits = joined([splits, rest.splits.of_nodes(again)]).in_order()
        if len(splits.nodes):
            split = trees[splits.nodes], nodes[splits.nodes]
            run.structure = run.structure.split(*split, splits.nodes * 0)
            run.levels = (*run.levels, splits)
        return splits

    def _sweep(
        self, parties: Hellos, run: ForestState, nodes: Nodes, positions: slice
    ) -> Conversation[summed.Searched | None]:
        """Search some nodes for the columns at some positions of their drawing order, in parts."""
        seeds = column_seeds(self.settings.seed, run.cuts.n_columns)
        n_asked = len(range(*positions.indices(len(seeds))))
        parts, first, per = [], 0, self.section.max_features_per
        n_all = np.array([len(seeds)])
        for end in _ends(nodes[0], n_asked * (int(run.cuts.widths.max()) + 1)):
            part = nodes[0][first:end], nodes[1][first:end]
            orders = [
                columns_of(seeds, int(part[0][a]), part[1][a:b], n_all, per)[0]
                for a, b in by_tree(part[0])
            ]
            columns = np.concatenate(orders)[:, positions].astype(np.int32)
            sums = yield from self._ask(parties, run, part, np.ascontiguousarray(columns))
            if sums is None:
                return None
            of_roots = run.root_sums[part[0]] if len(run.root_sums) else None
            searched = summed.search_sums(
                sums,
                summed.CellLayout(columns, run.cuts.widths),
                run.cuts,
                self._powers,
                self._rules,
                of_roots,
                first_only=positions.start > 0,
            )
            parts.append(searched)
            first = end
        return summed.Searched.joined(parts)

    def _ask(
        self, parties: Hellos, run: ForestState, nodes: Nodes, columns: Array
    ) -> Conversation[Whole | None]:
        """Sums of all parties' rows over the cells of some columns of some nodes."""
        state, section = self.totals.state, self.section
        n_bytes = max(SIZES)
        if len(self.table.classes) and not state.weighted:  # they count rows
            n_bytes = next(n for n in SIZES if state.bounds.exponent(0, n) >= 0)
        layout, n_sums = summed.CellLayout(columns, run.cuts.widths), len(self._powers) + 1
        form = Form(
            messages.CellsReply,
            lambda: [(layout.n_cells, n_sums)],
            lambda sums: messages.CellsReply(np.arange(layout.n_cells), sums[0]),
            n_bytes,
            part_of_others=state.has_sent_cuts,
        )
        request = messages.CellsRequest(
            **asdict(state.bounds),
            level=run.structure.level,
            trees=section.trees,
            bootstrap=section.bootstrap,
            seed=self.settings.seed,
            weighted=state.weighted,
            wanted_trees=nodes[0].astype(np.int32),
            wanted_nodes=nodes[1].astype(np.int32),
            columns=columns,
            sum_bytes=n_bytes,
            **self.totals.shared(run.cuts),
        )
        local = {name: summed.CellLayout(columns, self._widths(run, name)) for name in state.places}

        def check_reply(party: str, reply: messages.CellsReply) -> None:
            if party != EVERYONE:
                n_classes = len(self.table.classes)
                check_cells(party, reply, local[party], n_classes, parties[party].n_train)

        replies = yield from self.totals.sums.ask(parties, request, form, check_reply)
        if not replies:
            return None
        if EVERYONE in replies:  # of all cells
            return replies[EVERYONE].sums
        sums = np.zeros((layout.n_cells, n_sums), dtype=np.int64)
        for party, reply in replies.items():
            cells = local[party].moved(reply.cells, layout, state.places[party])
            np.add.at(sums, cells, reply.sums)
        return sums

    def _widths(self, run: ForestState, party: str) -> Ints:
        """Bins that a party has of each column."""
        columns = np.searchsorted(run.cuts.offsets, self.totals.state.places[party], side="right")
        widths: Ints = np.bincount(columns - 1, minlength=run.cuts.n_columns)
        return widths

    def _split(
        self, parties: Hellos, run: ForestState, splits: summed.Splits
    ) -> Conversation[dict[str, messages.SplitReply]]:
        """Have the parties move their rows, and score the forest so far."""
        last = run.structure.last
        roots = self._values(run.root_sums)
        request = messages.SplitRequest(
            split_trees=last.trees,
            split_nodes=last.nodes,
            split_lefts=last.lefts,
            split_columns=splits.columns.astype(np.int32),
            split_thresholds=splits.thresholds,
            split_defaults=splits.defaults,
            split_sets=sets_of_rows(splits.widths, np.packbits(splits.rights, axis=1))[1].bits,
            n_trees=self.section.trees,
            root_values=roots if run.structure.level == 1 else roots[:0],
            child_values=self._values(splits.sums),
            score_bins=ROUND_BINS,
        )

        def check_reply(party: str, reply: messages.SplitReply) -> None:
            self.check_scores(party, reply, WATCHED)

        form = self.totals.scores(messages.SplitReply, WATCHED, ROUND_BINS, part_of_others=True)
        return (yield from self.totals.sums.ask(parties, request, form, check_reply))

    def _progress(self, run: ForestState, replies: Mapping[str, messages.SplitReply]) -> Progress:
        objective, more = self.settings.objective, self.settings.eval_metrics
        pooled = (pooled_statistics(replies.values(), subset) for subset in WATCHED)
        scores = (scores_of(objective, sums, more) for sums in pooled) if replies else ({}, {})
        train, valid = scores
        n_trees, n_splits = self.section.trees, len(run.structure.splits.trees)
        return Progress(run.structure.level, n_trees, n_trees + n_splits, train, valid)

    def _finish(self, parties: Hellos, run: ForestState) -> Conversation[Outcome]:
        grown, values = summed.forest_of(run.structure, run.levels, run.root_sums, self._values)
        table = self.table
        model = BaggedForest(
            self.settings.objective,
            table.columns,
            table.classes,
            grown.trees,
            values,
            grown.sets,
            table.categories,
            table.kinds,
        )
        _, summary = yield from self.evaluate(parties, model, self.totals.score)
        return {
            **summary,
            "importance": importance_of(table.columns, *self._importance(run)),
            "trees": self.section.trees,
            "best_round": None,
            **self.totals.summary(),
        }

    def _importance(self, run: ForestState) -> tuple[npt.NDArray[np.float64], Ints]:
        """Each column's decrease of impurity, by a tree's weight and the trees; and its splits."""
        gains, counts = np.zeros((2, run.cuts.n_columns))
        weights = summed.node_weights(run.root_sums, self._powers, len(self.table.classes))
        for nodes, splits in zip(run.structure.levels, run.levels, strict=True):
            worth = splits.improvements / weights[nodes.trees] / self.section.trees
            np.add.at(gains, splits.columns, worth)
            np.add.at(counts, splits.columns, 1)
        return np.maximum(gains, 0.0), counts.astype(np.int64)


def _ends(trees: Places, most_cells: int) -> Iterator[int]:
    """Ends of parts of open nodes: some whole trees, two at least, of ``PART_CELLS`` together."""
    first = 0
    for number, (_, end) in enumerate(ranges := by_tree(trees)):
        n_more = ranges[number + 1][1] - first if number + 1 < len(ranges) else 0
        n_trees = len(np.unique(trees[first:end]))
        is_full = n_more * most_cells > PART_CELLS and n_trees > 1
        if is_full or number + 1 == len(ranges):
            yield end
            first = end


def check_cells(
    party: str, reply: messages.CellsReply, layout: summed.CellLayout, n_classes: int, n_rows: int
) -> None:
    """Check a party's sums: of rows that it has, the same in every column of a node."""
    n_sums = (n_classes or 2) + 1
    check_sizes(party, reply, n_cells=layout.n_cells, n_sums=n_sums)
    counts, weights = reply.sums[:, -1], reply.sums[:, : n_classes or 1]
    totals = np.zeros((len(layout.sizes), n_sums), dtype=np.int64)
    np.add.at(totals, np.searchsorted(layout.starts, reply.cells, side="right") - 1, reply.sums)
    by_column = totals.reshape(*layout.columns.shape, n_sums)
    rules = {
        "must be of 1 row or more, and no more than the party has": (
            (counts > 0) & (counts <= n_rows)
        ),
        f"must be below 2^{summed.EXACT_BITS}": np.abs(reply.sums) < 2**summed.EXACT_BITS,
        "must be of weights > 0": (weights >= 0).all(axis=1) & weights.any(axis=1),
        "must have the same total in every column of a node": by_column == by_column[:, :1],
    }
    check_fields(party, reply, *(("sums", holds.all(), rule) for rule, holds in rules.items()))


STRATEGIES = {HorizontalForest.method: HorizontalForest}
