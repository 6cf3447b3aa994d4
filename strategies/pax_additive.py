"""PAX as a sum of curves (``pax.additive``): the rounds of trees that split one column each.

A round has a tree of every column, all grown from the sums of one exchange, since a node of such a
tree has whole bins of its column (``fedapp.trees.additive``). In the first round of the second half
the strongest ``pax.pairs`` are chosen; from the next on they have trees too, of two columns, which
grow level by level. Until then these trees are single leaves of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Ints
from fedapp.conversation import Conversation
from fedapp.errors import ConfigError
from fedapp.histograms.bins import Cuts
from fedapp.histograms.build import Histogram
from fedapp.messages.pax import GrowReply, GrowRequest, TurnRequest
from fedapp.metrics.survival import Cells
from fedapp.settings import Settings
from fedapp.trees.additive import Marginals, pair_strengths, strongest
from fedapp.trees.grow import Growth, leaves_under
from fedapp.trees.model import Ensemble, Grown, concatenated, pack_trees
from fedapp.trees.objective import has_quantile_leaves, has_risk_sets
from fedapp.trees.rounds import Boosting
from strategies.common_table import CommonTable
from strategies.handshake import Hellos
from strategies.pax_sums import FixedSettings, PaxSettings, PaxState, Totals, check_fixed
from strategies.scoring import ROUND_BINS, cell_fields

Replies = Mapping[str, GrowReply]
Sums = tuple[Histogram, npt.NDArray[np.int32]]  # of nodes, and how many values are missing

# Settings that must have one value with curves, and why.
_FIXED: FixedSettings = (
    ("num_parallel_tree", 1, "a round has a tree of each column"),
    ("subsample", 1.0, "all trees of a round are grown from one sum; runs of other seeds vary"),
    ("colsample_bytree", 1.0, "a round has a tree of each column"),
    ("colsample_bylevel", 1.0, "a tree splits one column"),
    ("colsample_bynode", 1.0, "a tree splits one column"),
    ("interaction_constraints", "", "pax.pairs says which columns interact"),
    ("init_model", "", "its trees may be of several columns"),
)
MOST_PARALLEL = 1000  # trees whose roots are summed to find pairs


def has_turns(settings: Settings, section: PaxSettings) -> bool:
    """Whether rounds are of curves; with noise all trees split one column each in any case."""
    return section.additive and not settings.sections["privacy"]["epsilon"]


def planned_turns(settings: Settings, section: PaxSettings) -> dict[str, Any]:
    """Fields of the run's ``Plan``: without pairs no nodes below the roots are summed."""
    if not has_turns(settings, section):
        return {}
    below = {"trees": MOST_PARALLEL} if section.pairs else {"levels": 0}
    return {"additive": True, "pairs": section.pairs, **below}


def check_additive(settings: Settings, section: PaxSettings) -> None:
    """Check the settings of a run against ``pax.additive`` and ``pax.pairs``."""
    if not section.additive:
        if section.pairs:
            rule = f"must be true with pax.pairs={section.pairs}"
            raise ConfigError(f"pax.additive {rule}, got false; or set pax.pairs=0")
        return
    if not has_turns(settings, section):
        if section.pairs:
            rule = "must be 0 with privacy.epsilon: their choice would take epsilon"
            raise ConfigError(f"pax.pairs {rule}; got {section.pairs}")
        return
    objective = settings.objective
    if has_risk_sets(objective) or has_quantile_leaves(objective):
        rule = "must be one without risk sets or quantiles with pax.additive"
        raise ConfigError(f"objective {rule}: these take more exchanges a round; got {objective}")
    if section.pairs and (n_levels := settings.n_levels) < 2:
        rule = "must be >= 2 with pax.pairs, whose trees split two columns"
        raise ConfigError(f"max-depth {rule}; got {n_levels}")
    check_fixed(settings, _FIXED, "pax.additive")


class Rounds(Protocol):
    """What PAX has for its rounds."""

    settings: Settings
    table: CommonTable
    totals: Totals

    @property
    def n_outputs(self) -> int: ...
    def warn_once(self, text: str) -> None: ...
    def cells(self, boosting: Boosting, n_bins: int) -> Cells: ...
    def request(self, boosting: Boosting, growth: Growth) -> GrowRequest: ...
    def merge(self, replies: Replies, boosting: Boosting, request: GrowRequest) -> Sums: ...
    def record_scores(self, run: PaxState, replies: Replies) -> Conversation[None]: ...
    def ask_to_grow(
        self,
        parties: Hellos,
        request: GrowRequest,
        boosting: Boosting,
        sent: TurnRequest | None = None,
    ) -> Conversation[dict[str, GrowReply]]: ...


@dataclass(frozen=True, slots=True)
class Turns:
    """The rounds of an additive model, in place of those that grow level by level."""

    pax: Rounds
    n_pairs: int

    @property
    def n_columns(self) -> int:
        """Columns, each of which has a tree a round."""
        return len(self.pax.table.columns)

    @property
    def n_trees(self) -> int:
        """Trees of a round for each output, which share ``eta``."""
        most = self.n_columns * (self.n_columns - 1) // 2 * (self.n_columns <= MOST_PARALLEL)
        if self.n_pairs > most:
            of_columns = f"with {self.n_columns} columns"
            raise ConfigError(f"pax.pairs must be <= {most} {of_columns}, got {self.n_pairs}")
        return self.n_columns + self.n_pairs

    def grow(self, parties: Hellos, run: PaxState) -> Conversation[bool]:
        """One round: a tree of each column, and of each pair. False if training stops before it."""
        boosting, n_outputs, pairs = run.boosting, self.pax.n_outputs, run.pairs
        has_pairs = self.n_pairs > 0 and 2 * run.n_added >= self.pax.settings.num_boost_round
        columns = np.arange(self.n_columns, dtype=np.int64)[:, None]
        deeper = columns if pairs is None else pairs  # columns of trees whose children are summed
        n_parallel = len(deeper) if has_pairs else 1
        request, replies = yield from self.open(parties, boosting, n_parallel)
        yield from self.pax.record_scores(run, replies)
        if run.history.stops:
            return False
        root_sums = np.sum([reply.root_sums for reply in replies.values()], axis=0)
        histograms, missing = self.pax.merge(replies, boosting, request)
        growth = self._growth(boosting, columns)
        growth.set_roots(np.tile(root_sums[:n_outputs], (self.n_columns, 1)))
        marginals = Marginals(boosting.cuts, histograms, missing)
        while growth.growing:
            marginals.move(*growth.split(*marginals.of(growth.wanted)))
        curves, of_pairs = growth.grown(), Grown((leaves_under([-1]),) * (self.n_pairs * n_outputs))
        if has_pairs:
            growth = self._growth(boosting, deeper)
            growth.set_roots(root_sums)
            roots = np.tile(histograms, (n_parallel, 1, 1)), np.tile(missing, (n_parallel, 1))
            sums = yield from self._below(parties, boosting, growth, request, roots)
            if pairs is None:
                run.pairs = sums and self._strongest(boosting.cuts, roots[0], sums[0], growth)
            else:
                while sums:
                    sums = yield from self._below(parties, boosting, growth, request, sums)
                of_pairs = growth.grown()
        boosting.add(concatenated([curves, of_pairs]))
        return True

    def open(
        self, parties: Hellos, boosting: Boosting, n_parallel: int = 1
    ) -> Conversation[tuple[GrowRequest, dict[str, GrowReply]]]:
        """Send the last round's trees; sums at the roots, ``n_parallel`` times each output."""
        trees = () if boosting.leaves_sent else boosting.last_trees
        packed: dict[str, Any] = pack_trees(trees, sets=boosting.grown.sets)
        sent = TurnRequest(
            **packed,
            **cell_fields(self.pax.cells(boosting, ROUND_BINS)),
            round_id=boosting.n_rounds,
            num_parallel_tree=n_parallel,
            base_margin=boosting.bare.base_margin,
            score_bins=ROUND_BINS,
        )
        request = sent.opened(self.n_columns)
        return request, (yield from self.pax.ask_to_grow(parties, request, boosting, sent))

    def _growth(self, boosting: Boosting, columns: Ints) -> Growth:
        """Trees of the next round, for each output one of each row of columns."""
        allowed = np.zeros((len(columns), boosting.cuts.n_columns), dtype=bool)
        np.put_along_axis(allowed, columns, True, axis=1)
        allowed = np.repeat(allowed, self.pax.n_outputs, axis=0)
        limits = replace(boosting.limits, round_id=boosting.n_rounds)
        return Growth(len(allowed), boosting.cuts, allowed, boosting.shape, limits)

    def _below(
        self, parties: Hellos, boosting: Boosting, growth: Growth, roots: GrowRequest, sums: Sums
    ) -> Conversation[Sums | None]:
        """Split nodes by their sums; those of the next level, None after the last or a loss."""
        boosting.routes, boosting.route_sets = growth.split(*sums)
        if not growth.growing or not self.pax.totals.can_continue(parties):
            return None
        n_asked, names = len(parties), ("n_trees", "num_parallel_tree", "columns")
        of_roots = {name: getattr(roots, name) for name in names}
        request = replace(self.pax.request(boosting, growth), **of_roots)
        replies = yield from self.pax.ask_to_grow(parties, request, boosting)
        return None if len(parties) < n_asked else self.pax.merge(replies, boosting, request)

    def _strongest(self, cuts: Cuts, roots: Histogram, below: Histogram, growth: Growth) -> Ints:
        """The strongest pairs, by the sums of a child of each column's first split."""
        trees, places = np.unique(growth.wanted[:, 0], return_index=True)
        columns = trees.astype(np.int64) // self.pax.n_outputs
        reg_lambda = self.pax.settings.reg_lambda
        strengths = pair_strengths(cuts, roots[trees], below[places], columns, reg_lambda)
        return strongest(strengths, self.n_pairs)

    def warn_of_no_pairs(self, model: Ensemble) -> None:
        """Warn if pairs were asked for, and no tree splits one."""
        n_curves, width = (n * self.pax.n_outputs for n in (self.n_columns, self.n_trees))
        of_pairs = (tree for at, tree in enumerate(model.trees) if at % width >= n_curves)
        if self.n_pairs and all(len(tree) == 1 for tree in of_pairs):
            why = "they are chosen after half of num-boost-round, and may gain nothing"
            way = "fewer rounds, or no early stopping, may give it some"
            self.pax.warn_once(f"the model has none of pax.pairs={self.n_pairs}: {why}; {way}")
