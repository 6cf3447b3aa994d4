"""PAX: party-adaptive histogram boosting.

Source: Ong et al. 2020, "Adaptive Histogram-Based Gradient Boosted Trees for Federated Learning",
Algorithm 1; line numbers are of that algorithm. Departures:

- Trees grow level by level from summed histograms, so a round takes an exchange a level; the
  paper leaves open how a tree grows between two fusions.
- The representatives are fused once, before the first tree, and not in every round: the surrogates
  do not change.
- Leaves that are quantiles of residuals (``reg:absoluteerror``, ``reg:quantileerror``) take four
  exchanges more a round, in which rows are counted by digits; see ``fedapp.trees.quantiles``.
- With ``pax.aggregation=secure`` (see ``strategies.pax_sums``) the server gets no surrogates or
  bins of single parties; with ``privacy.epsilon`` (``strategies.pax_dp``) no histograms.

Read ``fedapp.messages.pax``, this file, ``pax_sums``, ``clients.pax``, ``pax_secure``, ``pax_dp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Ints
from fedapp.conversation import Checkpoint, Conversation, Saved, ask
from fedapp.crypto.noise import Budget, budget_for
from fedapp.data.partition import WATCHED
from fedapp.errors import ConfigError, as_protocol_error
from fedapp.histograms.bins import Cuts
from fedapp.histograms.build import Histogram, add_histograms
from fedapp.histograms.sketch import BASE, N_DIGITS
from fedapp.kernels import frozen
from fedapp.messages import pax as messages
from fedapp.messages.fields import Reply, check_sizes, fields_of, parameters_of
from fedapp.messages.handshake import MOST_RESTARTS
from fedapp.metrics import survival
from fedapp.metrics.sums import margin_middles
from fedapp.metrics.survival import Cells
from fedapp.records.document import to_text
from fedapp.settings import Settings
from fedapp.trees.calibration import check_both_classes, fit
from fedapp.trees.categories import NO_SET, NO_SETS
from fedapp.trees.custom import CUSTOM
from fedapp.trees.grow import Growth, Shape
from fedapp.trees.limits import (
    Limits,
    check_without_categories,
    constraints_of,
    parse_weights,
    weights_of,
)
from fedapp.trees.losses import LossParameters
from fedapp.trees.model import LEAF, Ensemble, Tree, pack_trees, split_trees, stack_trees
from fedapp.trees.objective import (
    has_quantile_leaves,
    has_risk_sets,
    hide_class_shares,
    is_survival,
)
from fedapp.trees.quantiles import QuantileSearch, as_base_score, leaf_level
from fedapp.trees.rounds import Boosting
from fedapp.trees.structure import ROUTE
from fedapp.trees.survival import hazards_of
from strategies import method as methods
from strategies import pax_sums, scoring
from strategies.handshake import Hellos
from strategies.horizontal import HorizontalStrategy, mean_label
from strategies.pax_additive import Turns, check_additive, has_turns, planned_turns
from strategies.pax_dp import NoisedTotals, privacy_settings
from strategies.pax_sums import PaxState
from strategies.secagg import Form, check_secure_aggregation

CUTS = pax_sums.CutKinds(
    messages.SketchRequest, messages.SketchReply, messages.OpenRequest, messages.CountRequest
)


class PAX(HorizontalStrategy):
    """PAX: one boosted model from the histograms of parties with the same columns.

    Examples
    --------
    >>> from strategies import PAX
    >>> PAX(num_boost_round=10, max_depth=3, parties=2).num_rounds
    60
    """

    method = "pax"
    reads = methods.BOOSTING_SETTINGS | methods.GROWTH - {"multi-strategy"} | methods.CONSTRAINTS
    reads |= {"init-model", "base-margin", "calibration", "least-bin-rows"}
    objectives = (*methods.ALL_OBJECTIVES, CUSTOM)
    sections = frozenset(("privacy",))
    totals: pax_sums.Totals
    section: pax_sums.PaxSettings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.private = privacy_settings(self.settings, self.section.aggregation)
        is_additive = has_turns(self.settings, self.section)
        self.turns = Turns(self, self.section.pairs) if is_additive else None
        self._budget: Budget | None = None  # with epsilon, once the number of parties is known

    @classmethod
    def section_settings(cls, settings: Settings) -> pax_sums.PaxSettings:
        """``[pax]``, checked, also against what secure aggregation needs."""
        section = pax_sums.PaxSettings.of(settings)
        check_additive(settings, section)
        privacy_settings(settings, section.aggregation)
        if section.aggregation == "secure":
            check_secure_aggregation(settings)
            if settings.min_parties and has_quantile_leaves(settings.objective):
                rule = f"must be 0 with pax.aggregation=secure and {settings.objective}"
                why = "a quantile is of the rows of all parties"
                raise ConfigError(f"min-parties {rule}: {why}; got {settings.min_parties}")
        return section

    @classmethod
    def exchanges_a_round(cls, settings: Settings) -> int:
        """One a level, one to spare, one for risk sets, one a digit of quantiles; one of curves."""
        objective, section = settings.objective, pax_sums.PaxSettings.of(settings)
        if has_turns(settings, section) and not section.pairs:
            return 1
        more = has_risk_sets(objective) + N_DIGITS * has_quantile_leaves(objective)
        return settings.n_levels + 1 + more

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        """One round more is begun where the scores of the last are needed."""
        plan = super().planned(settings)
        needs_last = settings.early_stopping_rounds > 0 or settings.calibration != "none"
        plan["rounds"] += needs_last
        return plan | planned_turns(settings, pax_sums.PaxSettings.of(settings))

    def plan(self) -> dict[str, Any]:
        noise = dict[str, float]()
        if self.private.epsilon:
            rounds, n_parties = self.settings.num_boost_round, self.settings.parties
            # The least noise that provides epsilon and delta.
            budget = budget_for(self.private.epsilon, self.private.delta, rounds, n_parties)
            self._budget = budget
            names = "epsilon", "delta", "multiplier"
            noise = {name: getattr(budget, name) for name in names}
        return {**super().plan(), **noise}

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[methods.Outcome]:
        """Algorithm 1."""
        run = saved.read(PaxState) if saved else None
        self.agree(parties, run)
        self._limits()  # before any exchange
        if self.turns:
            width = {"num_parallel_tree": self.turns.n_trees}
            self.settings = self.settings.model_copy(update=width)
        kind: type[pax_sums.Totals] = (
            pax_sums.MaskedTotals if self.sees_only_sums else pax_sums.PlainTotals
        )
        if self.private.epsilon:
            kind = NoisedTotals
        # The one object by which the sums of a run differ.
        state = run.totals if run else pax_sums.TotalsState(budget=self._budget)
        self.totals = kind(self.settings, self.section, CUTS, self.table, state, self.warn_once)
        if run is None:
            boosting = yield from self._begin(parties)
            history = scoring.History.of(self.settings)
            run = PaxState(self.table, self.initial, history, self.totals.state, boosting)
            if self.private.epsilon:  # a resumed run must not release the same sums with new noise
                yield _checkpoint(run)
        else:
            yield from self.totals.resume(parties)
        history = run.history
        while run.n_added < history.most_rounds(self.settings) and not history.stops:
            by_level = (self.turns.grow if self.turns else self._grow)(parties, run)
            finished = yield from self.totals.add_round(
                parties, run.boosting, run.history, by_level
            )
            if finished:
                # Where parties may be lost, a round must not be asked again in another form.
                is_optional = not self.settings.min_parties
                yield replace(_checkpoint(run), is_optional=is_optional)
        return (yield from self._evaluate(parties, run))

    def _begin(self, parties: Hellos) -> Conversation[Boosting]:
        """Lines 2 to 7 and 21 to 26: every party's surrogates, and the cuts of all of them."""
        init_model = self.load_initial_model(self.settings.num_parallel_tree)
        labels, cuts = yield from self.totals.begin(parties, self.terms())
        self.store_unseen(labels)
        yield from self.balance(parties, labels)
        self.totals.settings = self.settings
        mean = mean_label(labels, len(self.table.classes), self.settings)
        if init_model is None and has_quantile_leaves(self.settings.objective):
            # Of labels. A party that is lost before the first tree ends the run.
            search = yield from self._search(parties, [np.zeros(1)], may_fail=0)
            n_rows = float(search.n_rows[0])
            mean = as_base_score(self.settings.objective, search.values()[0], n_rows)
        if self.private.epsilon:
            mean = hide_class_shares(mean)
        if init_model is None:
            return self._boosting(mean, cuts)
        boosting = self._boosting(init_model.base_score, cuts)
        boosting.grown = init_model.grown
        request = messages.InitRequest(
            base_margin=init_model.base_margin,
            at_cuts=_splits_at_cuts(init_model, cuts),
            **pack_trees(init_model.trees, sets=init_model.sets),
        )
        yield from ask(parties.all(request), messages.InitReply)
        return boosting

    def _limits(self) -> dict[str, Any]:
        """Limits of the table's columns; ConfigError if the settings name others."""
        settings, table = self.settings, self.table
        try:
            monotone, interactions = constraints_of(
                settings.monotone_constraints, settings.interaction_constraints, table.columns
            )
            check_without_categories(monotone, any(table.categories))
            weights = weights_of(parse_weights(settings.feature_weights), table.columns)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return {"monotone": monotone, "interactions": interactions, "weights": weights}

    def _boosting(self, mean: npt.NDArray[np.float32], cuts: Cuts) -> Boosting:
        settings, limits = self.settings, self._limits()
        # Where nodes merge their bins, a child's sums are not its parent's minus its sibling's.
        both = any(hello.merges_bins for hello in self.parties.values())
        return Boosting(
            self.bare_model(mean),
            cuts,
            Shape.of(parameters_of(settings), settings.num_parallel_tree),
            settings.colsample_bytree,
            Limits(
                seed=settings.seed,
                bylevel=settings.colsample_bylevel,
                bynode=settings.colsample_bynode,
                both_children=both,
                **limits,
            ),
        )

    def _grow(self, parties: Hellos, run: PaxState) -> Conversation[bool]:
        """Lines 12 to 26: one round. False where it restarts, or training stops before it."""
        boosting = run.boosting
        growth = boosting.growth()
        request = yield from self._first_request(parties, boosting, growth)
        while growth.growing:
            n_asked = len(parties)
            replies = yield from self.ask_to_grow(parties, request, boosting)
            if growth.level == 0:
                yield from self.record_scores(run, replies)
                if run.history.stops:
                    return False
            is_lost = len(parties) < n_asked
            if is_lost and self._may_restart(parties, run):
                return False
            # The sums no longer fit the parents' histograms, which the lost party is in. Under
            # masks a round must not restart: sums of the same gradients with and without the
            # party would disclose its part. So its trees end at the depth that they have.
            if not replies or (is_lost and growth.level and self.totals.restarts_rounds):
                break
            if growth.level == 0:
                sums = [reply.root_sums for reply in replies.values()]
                growth.set_roots(np.sum(sums, axis=0))
            merged = self.merge(replies, boosting, request)
            boosting.routes, boosting.route_sets = growth.split(*merged)
            if not self.totals.can_continue(parties):
                break
            request = self.request(boosting, growth)
        grown, positions = growth.grown(), growth.places()
        if has_quantile_leaves(boosting.bare.objective):
            n_asked = len(parties)
            yield from self._fit_leaves(parties, boosting, grown.trees, positions)
            if len(parties) < n_asked and self._may_restart(parties, run):
                return False
        boosting.add(grown, positions)
        return True

    def _may_restart(self, parties: Hellos, run: PaxState) -> bool:
        """Whether a round that has lost a party restarts, as often as sites answer that."""
        merges_bins = any(hello.merges_bins for hello in parties.values())
        if merges_bins or not self.totals.restarts_rounds or run.n_restarts == MOST_RESTARTS:
            return False
        run.n_restarts += 1
        return True

    def _fit_leaves(
        self, parties: Hellos, boosting: Boosting, trees: Sequence[Tree], positions: Sequence[Ints]
    ) -> Conversation[None]:
        """Set leaves to quantiles of the residuals of their rows, unless a party is lost."""
        nodes, offsets = stack_trees(trees)
        is_leaf = nodes["left"] == LEAF
        numbers = np.maximum(np.cumsum(is_leaf) - 1, 0)  # of a split, where no row is, any leaf
        ids = [numbers[start + at] for start, at in zip(offsets[:-1], positions, strict=True)]
        search = yield from self._search(parties, ids, boosting)
        if search.digit < N_DIGITS:
            return
        nodes["value"][is_leaf] = search.values() * np.float32(boosting.shape.eta)
        for tree, fitted in zip(trees, split_trees(nodes, offsets), strict=True):
            tree["value"] = fitted["value"]

    def _search(
        self,
        parties: Hellos,
        leaf_ids: Sequence[npt.NDArray[Any]],
        boosting: Boosting | None = None,
        may_fail: int | None = None,
    ) -> Conversation[QuantileSearch]:
        """Find quantiles by leaf, digit by digit; ends early if a party is lost.

        Rows count by their residuals, those of ``boosting``; without, by their labels, in the leaf
        of the only node.
        """
        n_asked = len(parties)
        level = leaf_level(self.settings.objective, LossParameters.of(self.settings))
        ids = np.concatenate(leaf_ids).astype(np.int32)
        search = QuantileSearch(int(ids.max()) + 1, level)

        def check(party: str, reply: messages.QuantilesReply) -> None:
            check_sizes(party, reply, n_prefixes=len(search.wanted()[0]))
            with as_protocol_error(party, "QuantilesReply", "counts"):
                search.check(party, reply.counts)

        while search.digit < N_DIGITS:
            prefixes, offsets = search.wanted()
            request = messages.QuantilesRequest(
                digit=search.digit,
                n_trees=len(leaf_ids),
                leaf_ids=ids,
                grown_offsets=np.append(0, np.cumsum([*map(len, leaf_ids)])),
                prefixes=prefixes,
                offsets=offsets,
                **_last_splits(boosting),
            )
            shape, n_bytes = (len(prefixes), BASE), self.totals.count_bytes
            form = Form.of(messages.QuantilesReply, shape, n_bytes=n_bytes)
            replies = yield from self.totals.sums.ask(parties, request, form, check, may_fail)
            if boosting is not None:
                boosting.mark_sent()
            if len(parties) < n_asked:
                break
            search.take(np.sum([reply.counts for reply in replies.values()], 0, np.int64))
        return search

    def _first_request(
        self, parties: Hellos, boosting: Boosting, growth: Growth
    ) -> Conversation[messages.GrowRequest]:
        """The request that starts a round, after the sums of risk sets if gradients need them."""
        request = self.request(boosting, growth)
        if not has_risk_sets(boosting.bare.objective):
            return request
        asking = messages.RisksRequest(**fields_of(request, messages.RisksRequest))
        sums = yield from self.totals.risks(parties, asking, boosting.cuts)
        boosting.mark_sent()
        return replace(self.request(boosting, growth), hazards=hazards_of(sums))

    def _open_round(
        self, parties: Hellos, boosting: Boosting
    ) -> Conversation[dict[str, messages.GrowReply]]:
        """Open another round, which brings the scores of the last one."""
        if self.turns:
            return (yield from self.turns.open(parties, boosting))[1]
        request = yield from self._first_request(parties, boosting, boosting.growth())
        return (yield from self.ask_to_grow(parties, request, boosting))

    def ask_to_grow(
        self,
        parties: Hellos,
        request: messages.GrowRequest,
        boosting: Boosting,
        sent: messages.TurnRequest | None = None,
    ) -> Conversation[dict[str, messages.GrowReply]]:
        def check_reply(party: str, reply: messages.GrowReply) -> None:
            n_bins = len(self._global_bins(party, request.columns, boosting.cuts))
            messages.check_grow(party, reply, request, n_bins)
            if request.level == 0:
                self.check_scores(party, reply, WATCHED)

        replies = yield from self.totals.grow(parties, request, boosting, check_reply, sent)
        boosting.mark_sent()
        if len(request.score_edges) and replies:
            watched = [
                scoring.pooled_statistics(replies.values(), subset).histogram for subset in WATCHED
            ]
            state = self.totals.state
            state.table, state.edges = watched[0] + watched[1], request.score_edges
            state.n_trees = len(boosting.grown.trees)
        return replies

    def request(self, boosting: Boosting, growth: Growth) -> messages.GrowRequest:
        """What the parties do not know yet, and the sums wanted next."""
        leaf_values, leaf_offsets = boosting.unsent_leaves()
        wanted = growth.wanted
        return messages.GrowRequest(
            round_id=boosting.n_rounds,
            level=growth.level,
            n_trees=boosting.width,
            num_parallel_tree=self.settings.num_parallel_tree,
            base_margin=boosting.bare.base_margin,
            subsample=self.settings.subsample,
            seed=self.settings.seed,
            score_bins=scoring.ROUND_BINS,
            **scoring.cell_fields(
                scoring.UNDIVIDED if growth.level else self.cells(boosting, scoring.ROUND_BINS)
            ),
            hazards=np.empty((0, 2)),
            **_last_splits(boosting),
            leaf_values=leaf_values,
            leaf_offsets=leaf_offsets,
            wanted_trees=wanted[:, 0],
            wanted_nodes=wanted[:, 1],
            columns=_drawn(growth),
        )

    def cells(self, boosting: Boosting, n_bins: int, n_trees: int | None = None) -> Cells:
        """Where scores divide times, and margins of the first ``n_trees``: by the last table of
        scores, moved by the mean leaves of the trees since then."""
        objective, state = self.settings.objective, self.totals.state
        if not is_survival(objective):
            return scoring.UNDIVIDED
        points = survival.quantile_points(state.times, np.ones(len(state.times)), n_bins)
        if len(state.edges):
            trees = boosting.grown.trees
            before, after = state.n_trees, len(trees) if n_trees is None else n_trees
            step = sum(map(_mean_leaf, trees[before:after]), 0.0)
            step -= sum(map(_mean_leaf, trees[after:before]), 0.0)
            edges = state.edges + (-step if has_risk_sets(objective) else step)
            return Cells(points, survival.next_edges(state.table, edges, n_bins))
        center = 0.0 if has_risk_sets(objective) else float(np.log(np.median(state.times)))
        return Cells(points, survival.first_edges(center, n_bins))

    def merge(
        self,
        replies: Mapping[str, messages.GrowReply],
        boosting: Boosting,
        request: messages.GrowRequest,
    ) -> tuple[Histogram, npt.NDArray[np.int32]]:
        """Line 25: sum the parties' histograms over the global cuts."""
        drawn, cuts, n_wanted = request.columns, boosting.cuts, len(request.wanted_nodes)
        # One row a wanted node, one column a global bin; sums of gradients and of hessians.
        histograms = np.zeros((n_wanted, len(cuts.edges), 2))
        missing = np.zeros((n_wanted, cuts.n_columns), dtype=np.int32)
        for party, reply in replies.items():
            added, bins = frozen(reply.histograms, self._global_bins(party, drawn, cuts))
            add_histograms(histograms, added, bins)
            missing[:, drawn] += reply.missing
        return histograms, missing

    def _global_bins(self, party: str, drawn: npt.NDArray[np.int32], cuts: Cuts) -> Ints:
        """Global bin of each of a party's bins of the drawn columns."""
        bins = self.totals.state.places[party]
        if len(drawn) == cuts.n_columns:
            return bins
        columns = np.searchsorted(cuts.offsets, bins, side="right") - 1
        return bins[np.isin(columns, drawn)]

    def _evaluate(self, parties: Hellos, run: PaxState) -> Conversation[methods.Outcome]:
        """Score the finished model, cut back to its best round under early stopping."""
        boosting, history = run.boosting, run.history
        model, best_round = boosting.model, None
        needs_last = history.patience or self.settings.calibration != "none"
        if needs_last and len(history) < run.n_added:
            replies = yield from self._open_round(parties, boosting)
            yield from self.record_scores(run, replies)
        if history.patience:
            best_round = history.best_round
            model = model.first_rounds(run.initial.n_rounds + best_round)
        yield _checkpoint(run)
        if run.validation is not None:
            margins = float(model.base_margin[0]) + margin_middles(scoring.ROUND_BINS)
            curve = fit(self.settings.calibration, margins, run.validation, self.table.n_valid)
            model = replace(model, curve=curve)
        if self.turns:
            self.turns.warn_of_no_pairs(model)
        cells = self.cells(boosting, scoring.FINAL_BINS, len(model.trees))
        scored, summary = yield from self.evaluate(parties, model, self.totals.score, cells=cells)
        yield from self.record_scores(run, scored)
        calibration = scoring.calibration_summary(self, model.curve is not None, self.table.n_valid)
        facts = scoring.boosted_facts(model, best_round)
        return {**summary, **facts, **calibration, **self.totals.summary()}

    def record_scores(self, run: PaxState, replies: Mapping[str, Reply]) -> Conversation[None]:
        """Add the scores of the trees so far, which come with the first reply of a round."""
        boosting, history = run.boosting, run.history
        is_due = yield from history.record_scores(
            replies, run.n_added, boosting.grown.trees, boosting.last_trees
        )
        is_best = is_due and (not history.patience or history.best_round == len(history))
        if self.settings.calibration != "none" and (is_best or not run.n_added):
            run.validation = scoring.pooled_statistics(replies.values(), "valid").histogram
            check_both_classes(self.settings.calibration, *run.validation.sum(axis=1))


def _splits_at_cuts(model: Ensemble, cuts: Cuts) -> bool:
    """Whether all thresholds are cuts, so that bins move as in the training of the model."""
    nodes = stack_trees(model.trees)[0]
    splits = nodes[(nodes["left"] != LEAF) & (nodes["set"] == NO_SET)]
    return all(
        np.isin(splits["threshold"][splits["column"] == column], cuts.column(column)).all()
        for column in range(cuts.n_columns)
    )


def _checkpoint(run: PaxState) -> Checkpoint:
    return Checkpoint(run, run.n_added, lambda: to_text(run.boosting.model))


def _mean_leaf(tree: Tree) -> float:
    """Mean of a tree's leaves, by their hessians."""
    leaves = tree[tree["left"] == LEAF]
    total = float(leaves["hessian"].sum())
    return float(leaves["hessian"] @ leaves["value"]) / total if total > 0 else 0.0


def _last_splits(boosting: Boosting | None) -> dict[str, Any]:
    """The splits that the parties do not know yet, as fields of ``SplitRows``."""
    routes = np.empty(0, dtype=ROUTE) if boosting is None else boosting.routes
    names = {"trees": "tree", "nodes": "node", "lefts": "left", "columns": "column"}
    fields = {f"split_{field}": routes[name] for field, name in names.items()}
    return {
        **fields,
        "split_thresholds": routes["threshold"],
        "split_defaults": routes["default_left"].astype(np.uint8),
        "split_sets": (NO_SETS if boosting is None else boosting.route_sets).bits,
    }


def _drawn(growth: Growth) -> npt.NDArray[np.int32]:
    """Columns that any tree of the round may split."""
    return np.flatnonzero(growth.allowed.any(axis=0)).astype(np.int32)


STRATEGIES = {PAX.method: PAX}
