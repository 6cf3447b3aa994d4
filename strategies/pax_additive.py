"""PAX as a sum of curves (``pax.additive``): the rounds of trees that split one column each.

A round has a tree of every column, all grown from the sums of one exchange, since a node of such a
tree has whole bins of its column (``fedapp.trees.additive``). From the second half of the rounds on
``pax.pairs`` have trees too, of two columns, which grow level by level; until then these are empty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedapp.conversation import Conversation
from fedapp.errors import ConfigError
from fedapp.histograms.bins import Ints
from fedapp.histograms.build import Histogram
from fedapp.messages.pax import GrowReply, GrowRequest, TurnRequest
from fedapp.settings import Settings
from fedapp.trees.additive import (
    Bools,
    Marginals,
    of_pairs,
    one_column_each,
    pair_strengths,
    strongest,
)
from fedapp.trees.grow import Growth, leaves_under
from fedapp.trees.model import Grown, concatenated, pack_trees
from fedapp.trees.objective import has_quantile_leaves, has_risk_sets
from fedapp.trees.rounds import Boosting
from strategies.handshake import Hellos
from strategies.pax_sums import PaxSettings
from strategies.scoring import ROUND_BINS, cell_fields

if TYPE_CHECKING:
    from strategies.pax import PAX, PaxState

Missing = npt.NDArray[np.int32]

# Settings that must have one value with curves, and why.
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("num_parallel_tree", 1, "a round has a tree of each column"),
    ("subsample", 1.0, "all trees of a round are grown from one sum; runs of other seeds vary"),
    ("colsample_bytree", 1.0, "a round has a tree of each column"),
    ("colsample_bylevel", 1.0, "a tree splits one column"),
    ("colsample_bynode", 1.0, "a tree splits one column"),
    ("interaction_constraints", "", "pax.pairs says which columns interact"),
    ("feature_weights", "", "a round has a tree of each column"),
    ("init_model", "", "its trees may be of several columns"),
)
MOST_PARALLEL = 1000  # trees whose roots are summed to find pairs


def check_additive(settings: Settings, section: PaxSettings) -> None:
    """Check the settings of a run against ``pax.additive`` and ``pax.pairs``."""
    epsilon = settings.sections["privacy"]["epsilon"]
    if not section.additive:
        if section.pairs:
            raise ConfigError(f"pax.pairs must be 0 without pax.additive=true, got {section.pairs}")
        return
    if section.pairs and epsilon:
        why = "their choice would take epsilon"
        raise ConfigError(f"pax.pairs must be 0 with privacy.epsilon: {why}; got {section.pairs}")
    objective = settings.objective
    if has_risk_sets(objective) or has_quantile_leaves(objective):
        rule = "must be one without risk sets or quantiles with pax.additive"
        raise ConfigError(f"objective {rule}: these take more exchanges a round; got {objective}")
    for name, required, why in () if epsilon else _FIXED:
        if (value := getattr(settings, name)) != required:
            shown = required if required != "" else "empty"
            rule = f"must be {shown} with pax.additive: {why}"
            raise ConfigError(f"{name.replace('_', '-')} {rule}; got {value}")


@dataclass(frozen=True, slots=True)
class Roots:
    """Sums over all parties at the roots of a round's trees."""

    sums: npt.NDArray[np.float64]  # (n_trees, 2)
    histograms: Histogram  # (n_trees, n_bins, 2)
    missing: Missing  # (n_trees, n_columns)

    def first(self, n_trees: int) -> Roots:
        """Those of the first trees."""
        return Roots(self.sums[:n_trees], self.histograms[:n_trees], self.missing[:n_trees])

    def curves(self, growth: Growth) -> Grown:
        """Trees of one column each, one after the other for all outputs."""
        marginals = Marginals(growth.cuts, self.histograms, self.missing)
        n_outputs = len(self.sums)
        growth.set_roots(np.tile(self.sums, (len(growth.allowed) // n_outputs, 1)))
        while growth.growing:
            marginals.move(*growth.split(*marginals.of(growth.wanted)))
        return growth.grown()


@dataclass(frozen=True, slots=True)
class Turns:
    """The rounds of an additive model, in place of those that grow level by level."""

    pax: PAX
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
        boosting, n_pairs, n_outputs = run.boosting, self.n_pairs, self.pax.n_outputs
        has_pairs = n_pairs > 0 and 2 * run.n_added >= self.pax.settings.num_boost_round
        chooses = has_pairs and run.pairs is None
        n_parallel = 1 if not has_pairs else self.n_columns if chooses else n_pairs
        request, replies = yield from self.open(parties, boosting, n_parallel)
        yield from self.pax.record_scores(run, replies)
        if run.history.stops:
            return False
        sums = np.sum([reply.root_sums for reply in replies.values()], axis=0)
        roots = Roots(sums, *self.pax.merge(replies, boosting, request))
        curves = self._growth(boosting, one_column_each(self.n_columns, n_outputs))
        grown = roots.first(n_outputs).curves(curves)
        if chooses:
            run.pairs = yield from self._choose(parties, boosting, request, roots)
        if has_pairs and not chooses and run.pairs is not None:
            of_pairs = yield from self._grow_pairs(parties, boosting, request, roots, run.pairs)
        else:
            of_pairs = Grown((leaves_under([-1]),) * (n_pairs * n_outputs))
        boosting.add(concatenated([grown, of_pairs]))
        return True

    def open(
        self, parties: Hellos, boosting: Boosting, n_parallel: int = 1
    ) -> Conversation[tuple[GrowRequest, dict[str, GrowReply]]]:
        """Send the last round's trees; sums at the roots, ``n_parallel`` times each output."""
        trees = () if boosting.leaves_sent else boosting.last_trees
        packed: dict[str, Any] = pack_trees(trees, sets=boosting.grown.sets)
        cells = self.pax.cells(boosting, ROUND_BINS)
        sent = TurnRequest(
            **packed,
            **cell_fields(cells),
            round_id=boosting.n_rounds,
            num_parallel_tree=n_parallel,
            base_margin=boosting.bare.base_margin,
            score_bins=ROUND_BINS,
        )
        request = sent.opened(self.n_columns)
        replies = yield from self.pax.ask_to_grow(parties, request, boosting, sent)
        boosting.mark_sent()
        return request, replies

    def _growth(self, boosting: Boosting, allowed: Bools) -> Growth:
        """Trees of the next round that may split these columns."""
        more = boosting.cuts.n_columns - allowed.shape[1]  # of times, split by no tree
        allowed = np.pad(allowed, ((0, 0), (0, more)))
        limits = replace(boosting.limits, round_id=boosting.n_rounds)
        return Growth(len(allowed), boosting.cuts, allowed, boosting.shape, limits)

    def _ask_below(
        self, parties: Hellos, boosting: Boosting, growth: Growth, roots: GrowRequest
    ) -> Conversation[tuple[Histogram, Missing] | None]:
        """Sums of the next level of some trees; None if a party is lost."""
        n_asked = len(parties)
        names = "n_trees", "num_parallel_tree", "columns"
        of_roots = {name: getattr(roots, name) for name in names}
        request = replace(self.pax.request(boosting, growth), **of_roots)
        replies = yield from self.pax.ask_to_grow(parties, request, boosting)
        return None if len(parties) < n_asked else self.pax.merge(replies, boosting, request)

    def _choose(
        self, parties: Hellos, boosting: Boosting, request: GrowRequest, roots: Roots
    ) -> Conversation[Ints | None]:
        """The strongest pairs, by the sums of both sides of each column's first cut."""
        growth = self._growth(boosting, one_column_each(self.n_columns, self.pax.n_outputs))
        growth.set_roots(roots.sums)
        boosting.routes, boosting.route_sets = growth.split(roots.histograms, roots.missing)
        if not growth.growing:
            return np.empty((0, 2), dtype=np.int64)
        trees, places = np.unique(growth.wanted[:, 0], return_index=True)
        below = yield from self._ask_below(parties, boosting, growth, request)
        if below is None:
            return None
        strengths = pair_strengths(
            boosting.cuts,
            roots.histograms[trees],
            below[0][places],
            trees.astype(np.int64) // self.pax.n_outputs,
            self.pax.settings.reg_lambda,
        )
        return strongest(strengths, self.n_pairs)

    def _grow_pairs(
        self,
        parties: Hellos,
        boosting: Boosting,
        request: GrowRequest,
        roots: Roots,
        pairs: Ints,
    ) -> Conversation[Grown]:
        """A tree of each pair, level by level; it ends at the depth that it has if one is lost."""
        growth = self._growth(boosting, of_pairs(pairs, self.n_columns, self.pax.n_outputs))
        growth.set_roots(roots.sums)
        merged: tuple[Histogram, Missing] | None = (roots.histograms, roots.missing)
        while merged is not None:
            boosting.routes, boosting.route_sets = growth.split(*merged)
            if not growth.growing or not self.pax.totals.can_continue(parties):
                break
            merged = yield from self._ask_below(parties, boosting, growth, request)
        return growth.grown()
