"""PAX with differential privacy: sums over all parties, to which each has added noise.

Source: Maddock et al. 2022 (arXiv:2210.02910); see ``fedapp.trees.rounds`` for the trees and
``fedapp.crypto.noise`` for what is released about a row. A tree takes one exchange: its structure
is drawn, and its leaves are summed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedapp.arrays import Ints
from fedapp.conversation import Check, Conversation, Progress
from fedapp.crypto.noise import Budget, check_installed
from fedapp.data.partition import HELD_OUT
from fedapp.errors import ConfigError
from fedapp.histograms.build import CLEAR
from fedapp.histograms.fixed_point import Whole, from_fixed
from fedapp.messages.fields import fields_of
from fedapp.messages.handshake import LabelsReply
from fedapp.messages.pax_secure import (
    COUNTED_ROWS,
    PrivateCountRequest,
    PrivateOpenRequest,
    PrivateScoresRequest,
    PrivateTreesRequest,
)
from fedapp.messages.scoring import EvaluateReply, EvaluateRequest, ScoreOrder
from fedapp.messages.secagg import EVERYONE
from fedapp.metrics import Statistics
from fedapp.metrics.adders import ClippedNumbers
from fedapp.metrics.sums import make_plausible
from fedapp.settings import NotNegative, Section, Settings
from fedapp.trees.losses import IDENTITY, LOSSES, REGRESSION, LossParameters
from fedapp.trees.model import LEAF, pack_trees
from fedapp.trees.objective import (
    RowBounds,
    has_quantile_leaves,
    is_of_rows,
    is_regression,
    label_power,
    row_bounds,
)
from fedapp.trees.rounds import Boosting, draw_trees, n_leaves, with_leaf_weights
from fedapp.trees.shown import not_counted
from strategies.handshake import Hellos
from strategies.pax_sums import FixedSettings, MaskedTotals, Opening, check_fixed
from strategies.scoring import History, check_scores
from strategies.secagg import MaskedSums, exchange_keys

MIN_PARTIES = 2
SCORE_BINS = 32  # at an epsilon of 1, the noise of more bins costs more AUC than they gain
# Of a leaf, before the learning rate; for squared errors it is the clip, for other objectives
# without a link the largest label.
LONGEST_STEP = 2.0
UNIT = "one row of one party, which counts for nothing in one of two tables that are told apart"
NOT_PROTECTED = (
    "numbers of rows",
    "names of columns, of classes (and which of them train), of categories that no schema gives",
    "the range of labels that are numbers and the largest weight, to powers of two",
    "settings chosen by looking at the same rows",
    "other runs over the same rows: their epsilons add up",
    "all rows of one person together",
)


# Settings that must have one value with epsilon, and why.
_FIXED: FixedSettings = (
    ("early_stopping_rounds", 0, "scores of every round would take noise, and so epsilon"),
    ("calibration", "none", "validation rows are scored once, by the finished model"),
    ("min_parties", 0, "the noise of every party is needed"),
    ("least_bin_rows", 0, "leaves have noise"),
    ("init_model", "", "the noise of its trees is unknown"),
    ("subsample", 1.0, "rows are drawn by a seed that all know, which hides none"),
    ("gamma", 0.0, "splits are drawn"),
    ("grow_policy", "depthwise", "splits are drawn"),
    ("max_leaves", 0, "splits are drawn"),
    ("num_parallel_tree", 1, "every tree takes noise"),
    ("colsample_bylevel", 1.0, "a tree splits one column"),
    ("colsample_bynode", 1.0, "a tree splits one column"),
    ("monotone_constraints", "", "leaves with noise do not keep them"),
    ("interaction_constraints", "", "no columns interact"),
)


class PrivacySettings(Section):
    """``[privacy]`` of the run config; see ``strategies.pax.PAX``."""

    table = "privacy"

    epsilon: NotNegative
    """Differential privacy of each row, with `pax.aggregation=secure`; 0: none."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Of the promise; below one over the number of training rows."""
    clip: NotNegative
    """Largest gradient of a row where the objective has no bound, in the unit of the label."""


def privacy_settings(settings: Settings, aggregation: str) -> PrivacySettings:
    """``[privacy]``, checked against the other settings; the accountant must be installed."""
    private = PrivacySettings.of(settings)
    if not private.epsilon:
        return private
    if not is_of_rows(settings.objective) or has_quantile_leaves(settings.objective):
        rule = "must be one without times, queries or quantiles with privacy.epsilon"
        raise ConfigError(f"objective {rule}: a row has no bound there, got {settings.objective}")
    if aggregation != "secure":
        raise ConfigError(
            "pax.aggregation must be secure with privacy.epsilon, whose noise is for sums over all "
            f"parties (-c pax.aggregation=secure), got {aggregation}"
        )
    check_fixed(settings, _FIXED, "privacy.epsilon")
    if settings.asked_parties and settings.parties < MIN_PARTIES:
        rule = f"must be >= {MIN_PARTIES} with privacy.epsilon"
        raise ConfigError(f"parties {rule}: noise must be of others too; got {settings.parties}")
    check_installed()
    return private


class NoisedTotals(MaskedTotals):
    """All parties answer as one, with noise; trees are drawn, and never grow level by level."""

    @cached_property
    def _private(self) -> PrivacySettings:
        return PrivacySettings.of(self.settings)

    @property
    def budget(self) -> Budget:
        """What the run may release."""
        assert self.state.budget is not None
        return self.state.budget

    def _open(self, parties: Hellos, terms: Mapping[str, Any]) -> Conversation[Opening]:
        """Exchange keys; the parties sum labels and weights."""
        settings, table, private = self.settings, self.table, self._private
        self._check_enough(parties, self._row_bounds())
        if (n_over := len(table.columns) - settings.num_boost_round) > 0:
            self.warn(
                f"trees take one column a round, so {n_over} of {len(table.columns)} columns are "
                "never split; num-boost-round may be larger"
            )
        if any(table.categories):
            self.warn(
                "names of categories are those in the tables, which privacy.epsilon does not "
                "cover; share-categories=10 of a site withholds those of fewer rows, and false all"
            )
        roster, bounds, _ = yield from exchange_keys(parties)
        self.state.bounds = bounds = replace(bounds, n_rows=COUNTED_ROWS)
        self.state.sums = MaskedSums(roster["names"])
        promise = asdict(self.budget)
        del promise["n_parties"]
        roster["n_rows"] = COUNTED_ROWS
        # A row is in one count of each column: sensitivity sqrt(n_numbers) in the 2-norm.
        sensitivity = math.sqrt(max(int((table.category_counts == 0).sum()), 1))
        most = math.ldexp(sensitivity, bounds.exponent(0) + bounds.heaviest)
        deviation = self.budget.deviation("counts", most)
        return Opening(
            PrivateOpenRequest(**roster, **terms, **promise, clip=private.clip),
            [(2 if self._width == 1 else 1,)],
            PrivateCountRequest,
            lightest=int(2 * CLEAR * deviation),
            deviation=deviation,
        )

    def _read_opening(self, sums: Sequence[Whole]) -> tuple[LabelsReply, Ints]:
        """Label sums, clipped to what labels can have; no unseen values or class shares."""
        objective = self.settings.objective
        n_classes = len(self.table.classes)
        power = label_power(objective, n_classes, self.state.bounds)
        exponents = np.array([self.state.bounds.exponent(power), self.state.bounds.exponent(0)])
        *label_sums, weight_sum = from_fixed(sums[0], exponents[-len(sums[0]) :]).tolist()
        row = math.ldexp(1.0, self.state.bounds.heaviest) / 2
        weight_sum = max(weight_sum, 2 * row)
        if self._width > 1:
            label_sums = [weight_sum / self._width] * self._width
        elif n_classes == 2:
            label_sums = [min(max(label_sums[0], row), weight_sum - row)]
        elif is_regression(objective):
            # Smallest and largest mean label that has a margin.
            largest, link = math.ldexp(1.0, self.state.bounds.largest), LOSSES[objective].link
            low = max(-largest, link.low + largest * 2.0**-20)
            high = min(largest, link.high - largest * 2.0**-20)
            label_sums = [min(max(label_sums[0], low * weight_sum), high * weight_sum)]
        unseen = np.zeros(self.table.n_coded_columns, dtype=np.int64)
        labels = LabelsReply(np.array(label_sums), weight_sum, unseen)
        return labels, self.table.category_counts

    def add_round(
        self, parties: Hellos, boosting: Boosting, history: History, by_level: Conversation[bool]
    ) -> Conversation[bool]:
        """Draw a round's trees, and sum their leaves; scores come at the end only."""
        settings = self.settings
        row = self._row_bounds()
        n_rounds = boosting.n_rounds
        values = [tree["value"][tree["left"] == LEAF] for tree in boosting.last_trees]
        allowed = boosting.growth().allowed
        grown = draw_trees(boosting.cuts, allowed, settings.max_depth, settings.seed, n_rounds)
        request = PrivateTreesRequest(
            **pack_trees(grown.trees, sets=grown.sets),
            round_id=n_rounds,
            base_margin=boosting.bare.base_margin,
            leaf_values=np.concatenate([*values, np.empty(0, dtype=np.float32)]),
        )
        (sums,) = yield from self.sums.add(parties, request, (n_leaves(grown.trees), 2))
        longest = LONGEST_STEP
        if LOSSES[settings.objective].link is IDENTITY:
            largest = math.ldexp(1.0, self.state.bounds.largest)
            longest = self._private.clip if settings.objective == REGRESSION else largest
        boosting.add(
            with_leaf_weights(
                grown,
                from_fixed(sums, np.array(row.exponents(self.state.bounds))),
                settings.eta,
                boosting.shape.penalties,
                self._leaf_deviation(row) / row.scale,
                longest,
            )
        )
        boosting.mark_sent()
        trees = boosting.grown.trees
        last = boosting.last_trees
        history.add({})
        yield Progress(boosting.n_rounds, len(trees), n_leaves(last), {}, {})
        return True

    def score(
        self, parties: Hellos, request: EvaluateRequest, check: Check
    ) -> Conversation[dict[str, EvaluateReply]]:
        """Noised sums of the finished model's scores, on rows that did not train it."""
        private = PrivateScoresRequest(
            **(fields_of(request, ScoreOrder) | {"score_bins": SCORE_BINS})
        )
        shapes = self._score_shapes(HELD_OUT, SCORE_BINS)
        summed = self._read_scores((yield from self.sums.add(parties, private, *shapes)))
        form = self._score_form(self._new_adder(), SCORE_BINS)
        nothing = form.sums * 0.0, form.histogram * 0.0
        scores = list(nothing)  # of training rows
        for subset, sums, cells in zip(HELD_OUT, summed[::2], summed[1::2], strict=True):
            likely = make_plausible(Statistics(sums, cells))
            has_rows = any(getattr(hello, f"n_{subset}") for hello in parties.values())
            scores += (likely.sums, likely.histogram) if has_rows else nothing
        reply = EvaluateReply(*[*scores, not_counted()])
        settings = self.settings
        objective, names = settings.objective, settings.scored_metrics
        check_scores(EVERYONE, reply, objective, self._width, names, n_bins=SCORE_BINS)
        return {EVERYONE: reply}

    def summary(self) -> dict[str, Any]:
        """Privacy guarantee and noise, for the run's summary."""
        adder = self._new_adder()
        self._score_form(adder)
        score_noise = self.budget.deviation("scores", adder.sensitivity)
        promise = {
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "unit": UNIT,
            "noise_multiplier": self.budget.multiplier,
            "leaf_noise": self._leaf_deviation(self._row_bounds()),
            "score_noise": math.ldexp(score_noise, -self.state.bounds.exponent(0)),
            "not_covered": list(NOT_PROTECTED),
        }
        return {"privacy": promise}

    def _new_adder(self) -> ClippedNumbers:
        return ClippedNumbers(self.state.bounds, self._private.clip)

    def _row_bounds(self) -> RowBounds:
        settings = self.settings
        try:
            return row_bounds(settings.objective, LossParameters.of(settings), self._private.clip)
        except ValueError as error:
            way = "; two standard deviations of the label do" if not self._private.clip else ""
            raise ConfigError(f"privacy.clip {error}{way}") from None

    def _leaf_deviation(self, row: RowBounds) -> float:
        """Standard deviation of the noise in a leaf's sum of gradients."""
        return self.budget.deviation("tree", row.norm) * math.ldexp(1.0, self.state.bounds.heaviest)

    def _check_enough(self, parties: Hellos, row: RowBounds) -> None:
        """Check that the leaves of a tree stand out from noise."""
        settings = self.settings
        n_rows = sum(hello.n_train for hello in parties.values())
        if self._private.delta * n_rows >= 1:
            raise ConfigError(
                f"privacy.delta must be below 1 / {n_rows}, the number of training rows, so that "
                f"no row may be sent as it is, got {self._private.delta:g}"
            )
        # The rows whose largest gradients add up to one standard deviation.
        rows = self.budget.deviation("tree", row.norm) / row.gradient
        ways = "a larger epsilon or a smaller num-boost-round"
        if rows > n_rows / 2:
            raise ConfigError(
                f"privacy.epsilon must be larger for so few rows: the noise of each leaf counts as "
                f"{rows:.0f} rows, and half of all training rows are {n_rows // 2}; {ways} helps, "
                f"got {self._private.epsilon:g}"
            )
        if rows > n_rows / 2**settings.max_depth:
            self.warn(
                f"the noise of each leaf counts as {rows:.0f} rows, more than leaves of max-depth "
                f"{settings.max_depth} have on average; {ways} or a smaller max-depth may help"
            )
