"""PAX with differential privacy: sums over all parties, to which each has added noise.

Source: Maddock et al. 2022 (arXiv:2210.02910); see ``fedapp.trees.rounds`` for the trees and
``fedapp.crypto.noise`` for what is released about a row. A tree takes one exchange: its structure
is drawn, and its leaves are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedapp.conversation import Check, Conversation, Progress
from fedapp.crypto.noise import Budget, budget_for, check_installed
from fedapp.data.partition import HELD_OUT
from fedapp.errors import ConfigError
from fedapp.histograms.bins import Cuts, Ints, with_categories
from fedapp.histograms.build import CLEAR, make_consistent
from fedapp.histograms.fixed_point import Bounds, from_fixed, power_above
from fedapp.histograms.sketch import BASE, N_DIGITS, Descent
from fedapp.messages.fields import fields_of
from fedapp.messages.handshake import LabelsReply
from fedapp.messages.pax_secure import (
    COUNTED_ROWS,
    PrivateCountRequest,
    PrivateOpenRequest,
    PrivateScoresRequest,
    PrivateTreesRequest,
)
from fedapp.messages.scoring import EvaluateReply, EvaluateRequest
from fedapp.messages.secagg import EVERYONE
from fedapp.metrics import Statistics, statistics
from fedapp.metrics.sums import ClippedNumbers, make_plausible, read_sums
from fedapp.settings import NotNegative, Section, Settings
from fedapp.trees.model import LEAF, pack_trees
from fedapp.trees.objective import (
    LossParameters,
    RowBounds,
    base_margin,
    is_regression,
    n_outputs,
    row_bounds,
)
from fedapp.trees.rounds import (
    CYCLIC,
    Boosting,
    Kind,
    draw_trees,
    n_leaves,
    with_leaf_weights,
)
from fedapp.trees.sets import category_counts
from strategies.handshake import Hellos
from strategies.horizontal import CommonTable
from strategies.secagg import MaskedSums, exchange_keys

MIN_PARTIES = 2
SCORE_BINS = 32  # at an epsilon of 1, the noise of more bins costs more AUC than they gain
LONGEST_STEP = 2.0  # of a leaf, before the learning rate; for squared errors it is the clip
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
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("early_stopping_rounds", 0, "scores of every round would take noise, and so epsilon"),
    ("min_parties", 0, "the noise of every party is needed"),
    ("least_bin_rows", 0, "leaves have noise"),
    ("init_model", "", "the noise of its trees is unknown"),
    ("subsample", 1.0, "rows are drawn by a seed that all know, which hides none"),
    ("gamma", 0.0, "splits are drawn"),
    ("colsample_bylevel", 1.0, "privacy.trees chooses what may be split"),
    ("colsample_bynode", 1.0, "privacy.trees chooses what may be split"),
    ("monotone_constraints", "", "leaves with noise do not keep them"),
    ("interaction_constraints", "", "privacy.trees=cyclic lets no columns interact"),
)


class PrivacySettings(Section, table="privacy"):
    """``[privacy]`` of the run config; see ``strategies.pax.PAX``."""

    epsilon: NotNegative
    """Differential privacy of each row, with `pax.aggregation=secure`; 0: none."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Of the promise; below one over the number of training rows."""
    trees: Kind
    """`cyclic`: each tree is of one column, in turn; `random`: each split of any."""
    clip: NotNegative
    """Largest gradient of a row where the objective has no bound, in the unit of the label."""


def privacy_settings(settings: Settings, aggregation: str) -> PrivacySettings:
    """``[privacy]``, checked against the other settings; the accountant must be installed."""
    private = PrivacySettings.of(settings)
    if not private.epsilon:
        return private
    if aggregation != "secure":
        raise ConfigError(
            "pax.aggregation must be secure with privacy.epsilon, whose noise is for sums over all "
            f"parties (-c pax.aggregation=secure), got {aggregation}"
        )
    for name, required, why in _FIXED:
        if (value := getattr(settings, name)) != required:
            shown, setting = required if required != "" else "empty", name.replace("_", "-")
            raise ConfigError(f"{setting} must be {shown} with privacy.epsilon: {why}; got {value}")
    if settings.asked_parties and settings.parties < MIN_PARTIES:
        rule = f"must be >= {MIN_PARTIES} with privacy.epsilon"
        raise ConfigError(f"parties {rule}: noise must be of others too; got {settings.parties}")
    check_installed()
    return private


class NoisedSums:
    """All parties answer as one, with noise; as ``SecureSums``, with ``add_round`` for ``grow``."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        private: PrivacySettings,
        warn: Callable[[str], None],
    ) -> None:
        self._settings, self._private, self._warn = settings, private, warn
        self.places: dict[str, Ints] = {}
        self._bounds, self._n_classes = Bounds(1), 0
        self.budget = Budget(private.epsilon, private.delta, 1.0, 1, MIN_PARTIES)

    def begin(
        self, parties: Hellos, table: CommonTable, terms: Mapping[str, Any]
    ) -> Conversation[tuple[Mapping[str, LabelsReply], Cuts]]:
        """Exchange keys, sum the labels, and find the approximate quantiles of every column."""
        private, rounds = self._private, self._settings().num_boost_round
        row = self._row_bounds()
        self._check_enough(parties, row)
        if private.trees == CYCLIC and rounds < len(table.columns):
            self._warn(
                f"cyclic trees take one column a round, so {len(table.columns) - rounds} of "
                f"{len(table.columns)} columns are never split; num-boost-round may be larger, or "
                "privacy.trees random"
            )
        if any(table.categories):
            self._warn(
                "names of categories are those in the tables, which privacy.epsilon does not "
                "cover; sites with share-categories=false send none that a schema does not give"
            )
        roster, bounds, _ = yield from exchange_keys(parties)
        self._bounds = Bounds(COUNTED_ROWS, bounds.heaviest, bounds.largest)
        self._n_classes = len(table.classes)
        promise = asdict(self.budget)
        del promise["n_parties"]
        request = PrivateOpenRequest(
            **(roster | {"n_rows": COUNTED_ROWS}), **terms, **promise, clip=private.clip
        )
        categories = category_counts(table.categories, len(table.columns))
        n_numbers = int((categories == 0).sum())
        # A row is in one count of each column: sensitivity sqrt(n_numbers) in the 2-norm.
        sensitivity, bounds = math.sqrt(max(n_numbers, 1)), self._bounds
        most = math.ldexp(sensitivity, bounds.exponent(0) + bounds.heaviest)
        deviation = self.budget.deviation("counts", most)
        lightest = int(2 * CLEAR * deviation)
        descent = Descent(categories == 0, self._settings().max_bin, lightest)
        n_sums = 2 if self._width == 1 else 1
        sums, counts = yield from MaskedSums().ask(parties, request, (n_sums,), (n_numbers, BASE))
        descent.take(make_consistent(counts, None, deviation))
        while descent.digit < N_DIGITS:
            prefixes, offsets = descent.wanted()
            count = PrivateCountRequest(descent.digit, prefixes, offsets)
            (counts,) = yield from MaskedSums().ask(parties, count, (len(prefixes), BASE))
            descent.take(make_consistent(counts, descent.masses, deviation))
        cuts = with_categories(descent.cuts(), categories, categories)
        return {EVERYONE: self._labels(sums, table.n_coded_columns)}, cuts

    def promise(self, n_parties: int) -> dict[str, Any]:
        """The least noise that provides epsilon and delta, as fields of a ``Plan``."""
        private, settings = self._private, self._settings()
        rounds = settings.num_boost_round
        self.budget = budget = budget_for(private.epsilon, private.delta, rounds, n_parties)
        names = ("epsilon", "delta", "multiplier")
        return {name: getattr(budget, name) for name in names}

    def add_round(self, parties: Hellos, boosting: Boosting) -> Conversation[Progress]:
        """Draw a round's trees, and sum their leaves."""
        settings, row = self._settings(), self._row_bounds()
        exponents = np.array(row.exponents(self._bounds))
        values = [tree["value"][tree["left"] == LEAF] for tree in boosting.last_trees]
        no_values = np.empty(0, dtype=np.float32)
        fields: dict[str, Any] = {
            "round_id": boosting.n_rounds,
            "base_margin": base_margin(boosting.objective, boosting.base_score),
            "leaf_values": np.concatenate([*values, no_values]),
        }
        allowed, depth = boosting.growth().allowed, settings.max_depth
        seed, n_rounds = settings.seed, boosting.n_rounds
        grown = draw_trees(self._private.trees, boosting.cuts, allowed, depth, seed, n_rounds)
        fields |= pack_trees(grown.trees, sets=grown.sets)
        request = PrivateTreesRequest(**fields)
        (sums,) = yield from MaskedSums().ask(parties, request, (n_leaves(grown.trees), 2))
        boosting.add(
            with_leaf_weights(
                grown,
                from_fixed(sums, exponents),
                settings.eta,
                boosting.shape.penalties,
                self._leaf_deviation(row) / row.scale,
                self._private.clip if boosting.objective == "reg:squarederror" else LONGEST_STEP,
            )
        )
        boosting.mark_sent()
        trees, last = boosting.grown.trees, boosting.last_trees
        return Progress(boosting.n_rounds, len(trees), n_leaves(last), {}, {})

    def score(
        self, parties: Hellos, request: EvaluateRequest, check: Check
    ) -> Conversation[dict[str, EvaluateReply]]:
        """Noised sums of the finished model's scores, on rows that did not train it."""
        adder, form = self._form()
        shapes = [form.sums.shape, form.histogram.shape] * len(HELD_OUT)
        private = PrivateScoresRequest(**(fields_of(request) | {"score_bins": SCORE_BINS}))
        summed = yield from MaskedSums().ask(parties, private, *shapes)
        scores: dict[str, Any] = {
            "train_sums": form.sums * 0.0,
            "train_scores": form.histogram * 0.0,
        }
        for place, subset in enumerate(HELD_OUT):
            sums, cells = read_sums(summed[2 * place], adder, summed[2 * place + 1])
            n_rows = sum(getattr(hello, f"n_{subset}") for hello in parties.values())
            likely = make_plausible(self._settings().objective, Statistics(sums, cells))
            scores[f"{subset}_sums"] = likely.sums if n_rows else sums * 0.0
            scores[f"{subset}_scores"] = likely.histogram if n_rows else cells * 0.0
        reply = EvaluateReply(**scores)
        check(EVERYONE, reply)
        return {EVERYONE: reply}

    def facts(self) -> dict[str, Any]:
        """Bounds and budget, for a checkpoint."""
        bounds, budget = asdict(self._bounds), asdict(self.budget)
        return {"bounds": bounds, "n_classes": self._n_classes, "budget": budget}

    def restore(self, places: dict[str, Ints], facts: Mapping[str, Any]) -> None:
        self._bounds, self._n_classes = Bounds(**facts["bounds"]), facts["n_classes"]
        self.budget = Budget(**facts["budget"])

    @property
    def _width(self) -> int:
        return n_outputs(self._settings().objective, self._n_classes)

    def summary(self) -> dict[str, Any]:
        """Privacy guarantee and noise, for the run's summary."""
        adder, _ = self._form()
        score_noise = self.budget.deviation("scores", adder.sensitivity)
        return {
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "unit": UNIT,
            "noise_multiplier": self.budget.multiplier,
            "leaf_noise": self._leaf_deviation(self._row_bounds()),
            "score_noise": math.ldexp(score_noise, -self._bounds.exponent(0)),
            "trees": self._private.trees,
            "not_covered": list(NOT_PROTECTED),
        }

    def _row_bounds(self) -> RowBounds:
        settings = self._settings()
        try:
            return row_bounds(settings.objective, LossParameters.of(settings), self._private.clip)
        except ValueError as error:
            way = "; two standard deviations of the label do" if not self._private.clip else ""
            raise ConfigError(f"privacy.clip {error}{way}") from None

    def _leaf_deviation(self, row: RowBounds) -> float:
        """Standard deviation of the noise in a leaf's sum of gradients."""
        return self.budget.deviation("tree", row.norm) * math.ldexp(1.0, self._bounds.heaviest)

    def _check_enough(self, parties: Hellos, row: RowBounds) -> None:
        """Check that the leaves of a tree stand out from noise."""
        settings, n_rows = self._settings(), sum(hello.n_train for hello in parties.values())
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
            self._warn(
                f"the noise of each leaf counts as {rows:.0f} rows, more than leaves of max-depth "
                f"{settings.max_depth} have on average; {ways} or a smaller max-depth may help"
            )

    def _labels(self, sums: Any, n_coded_columns: int) -> LabelsReply:
        """Label sums, clipped to what labels can have; no unseen values or class shares."""
        regression = is_regression(self._settings().objective)
        power = self._bounds.largest if regression else power_above(self._n_classes)
        exponents = np.array([self._bounds.exponent(power), self._bounds.exponent(0)])
        *label_sums, weight_sum = from_fixed(sums, exponents[-len(sums) :]).tolist()
        row = math.ldexp(1.0, self._bounds.heaviest) / 2
        weight_sum = max(weight_sum, 2 * row)
        if self._width > 1:
            label_sums = [weight_sum / self._width] * self._width
        elif self._n_classes == 2:
            label_sums = [min(max(label_sums[0], row), weight_sum - row)]
        elif regression:
            # Smallest and largest mean label that has a margin.
            objective, largest = self._settings().objective, math.ldexp(1.0, self._bounds.largest)
            low, high = largest * 2.0**-20, largest
            if objective == "reg:squarederror":
                low = -largest
            elif objective == "reg:logistic":
                high = 1 - low
            label_sums = [min(max(label_sums[0], low * weight_sum), high * weight_sum)]
        return LabelsReply(
            np.array(label_sums), weight_sum, np.zeros(n_coded_columns, dtype=np.int64)
        )

    def _form(self) -> tuple[ClippedNumbers, Statistics]:
        """The adder of the scores' statistics, and statistics of no rows for their shapes."""
        settings, clip = self._settings(), self._private.clip
        adder = ClippedNumbers(self._bounds, power_above(clip) if clip else 0)
        nothing = np.empty((0, self._width), np.float32), *(np.empty(0, np.float32),) * 2
        extra = settings.eval_metrics
        form = statistics(settings.objective, *nothing, SCORE_BINS, extra=extra, adder=adder)
        return adder, form
