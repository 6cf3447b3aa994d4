"""Sums over all parties, of PAX and other methods, and three ways to get them: ``Totals``.

- ``PlainTotals``: each party's sums reach the server, as in the paper, over that party's bins.
- ``MaskedTotals``: the server sees only sums over all parties, which answer as one, ``EVERYONE``.
- ``NoisedTotals`` (``strategies.pax_dp``): masked, and each party has added noise.

Under masks the cuts are quantiles of all rows, counted digit by digit, so they do not depend on how
rows are split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field

from fedapp import metrics
from fedapp.arrays import Doubles, Ints
from fedapp.conversation import Check, Conversation, ask
from fedapp.crypto.masking import SIZES
from fedapp.crypto.noise import Budget
from fedapp.data.partition import SUBSETS, WATCHED
from fedapp.errors import ConfigError, as_protocol_error
from fedapp.histograms.bins import Cuts, with_categories
from fedapp.histograms.build import make_consistent
from fedapp.histograms.fixed_point import Bounds, Whole, from_fixed
from fedapp.histograms.sketch import (
    BASE,
    N_DIGITS,
    Descent,
    Sketch,
    bin_map,
    fuse_sketches,
    used_categories,
)
from fedapp.messages.cuts import SketchReply, check_sketch
from fedapp.messages.fields import Array, Reply, Request, check_sizes, fields_of
from fedapp.messages.handshake import HelloReply, LabelsReply
from fedapp.messages.pax import GrowReply, GrowRequest, RisksReply, RisksRequest, TurnRequest
from fedapp.messages.scoring import EvaluateReply, EvaluateRequest
from fedapp.messages.secagg import EVERYONE, LeftReply, LeftRequest
from fedapp.metrics import survival
from fedapp.metrics.adders import WholeNumbers, read_sums
from fedapp.settings import Section, Settings
from fedapp.trees import objective as objectives
from fedapp.trees.histogram_checks import HistogramChecks
from fedapp.trees.losses import LossParameters
from fedapp.trees.rounds import Boosting
from fedapp.trees.shown import WHAT
from fedapp.trees.survival import N_SUMS
from strategies.common_table import CommonTable
from strategies.handshake import Hellos
from strategies.horizontal import HorizontalState
from strategies.scoring import FINAL_BINS, History, score_form
from strategies.secagg import Form, MaskedSums, PlainSums, exchange_keys, setting_of

R = TypeVar("R", bound=Reply)
MIN_BINS = 2
# bins=auto is equal if a party has a fifth of the rows or less: its few bins would cost accuracy if
# it has most rows of a class (simulations/papers/pax.md).
SMALL_PARTY = 5
FEW_BINS = 32  # fewer cost much accuracy in all measurements
WEIGHT_BITS = 12  # weights count to a 4096th of the heaviest
MAX_COUNT_BYTES = 2**30  # bytes of a party's counts in one exchange
MIN_PRIVATE_PARTIES = 3  # of two, each can subtract its part from the sum


class SumSettings(Section):
    """Settings of sums, in the section of every method that has them."""

    bins: Literal["auto", "share", "equal"]
    """How bins are dealt to parties: `share` by rows, or `equal`; `auto`: equal where a party has a
    fifth of the rows or less, so from 5 parties on."""
    fusion: Literal["auto", "finest", "coarsest"]
    """The party whose resolution the global cuts have; `auto` is the paper's."""
    aggregation: Literal["plain", "secure"]
    """`secure`: the coordinator sees only sums over all parties, under masks."""


class PaxSettings(SumSettings, Section):
    """``[pax]`` of the run config; see ``strategies.pax.PAX``."""

    table = "pax"

    additive: bool
    """A sum of curves: each tree splits one column, and a round has a tree of each, which share
    `eta` (`auto`: 0.5). Without `max-depth`, `max-leaves` and `grow-policy` they have 3 leaves."""
    pairs: Annotated[int, Field(ge=0, le=100)]
    """Pairs of columns that get trees too, the strongest ones, with `pax.additive`."""


FixedSettings = tuple[tuple[str, Any, str], ...]  # fields of settings, their one value, and why


def check_fixed(settings: Settings, fixed: FixedSettings, name: str) -> None:
    """Raise ConfigError for the first of some settings that has another value than it must with a
    setting of this name."""
    for field_name, required, why in fixed:
        if (value := getattr(settings, field_name)) != required:
            shown = required if required != "" else "empty"
            rule = f"must be {shown} with {name}: {why}"
            raise ConfigError(f"{field_name.replace('_', '-')} {rule}; got {value}")


@dataclass(frozen=True, slots=True)
class CutKinds:
    """A method's messages by which cuts are agreed on."""

    sketch: Callable[..., Request]
    sketched: type[SketchReply]
    open: Callable[..., Request]
    count: Callable[..., Request]


@dataclass(slots=True, eq=False)
class TotalsState:
    """What the sums of a run depend on at a checkpoint; each ``Totals`` sets what it uses."""

    # By party: common bin of each bin of a reply; weights of the bins and all rows, for the checks.
    places: Mapping[str, Ints] = field(default_factory=dict)
    weights: Mapping[str, Doubles] = field(default_factory=dict)
    bins: str = ""  # the rule by which bins are dealt
    bounds: Bounds = field(default_factory=lambda: Bounds(0))  # of the rows of all parties
    weighted: bool = False  # whether a row has a weight other than 1
    sums: MaskedSums = field(default_factory=MaskedSums)  # over the parties still present
    has_sent_cuts: bool = False
    budget: Budget | None = None
    # Where scores divide times; the last round's table of times and margins, its edges and trees.
    times: Array = field(default_factory=lambda: np.empty(0))
    table: Array = field(default_factory=lambda: np.empty((0, 0)))
    edges: Array = field(default_factory=lambda: np.empty(0))
    n_trees: int = 0


@dataclass(slots=True, eq=False)
class PaxState(HorizontalState):
    """What a run has at a checkpoint."""

    totals: TotalsState
    boosting: Boosting
    # With a calibration: weights of validation rows by class and bin, of the model to calibrate
    validation: Doubles | None = None
    n_restarts: int = 0  # rounds that began again without a lost party
    pairs: Ints | None = None  # (n_pairs, 2): columns, once they are chosen

    @property
    def n_added(self) -> int:
        """Finished rounds of this run, without those of the initial model."""
        return self.boosting.n_rounds - self.initial.n_rounds


@dataclass(eq=False)
class Totals(ABC):
    """How the server gets sums over all parties; ``warn`` shows the user a text once."""

    restarts_rounds: ClassVar[bool]  # whether a round may restart when a party is lost

    settings: Settings
    section: SumSettings
    kinds: CutKinds
    table: CommonTable
    state: TotalsState
    warn: Callable[[str], None]

    @cached_property
    def _width(self) -> int:
        return objectives.n_outputs(self.settings.objective, len(self.table.classes))

    @abstractmethod
    def begin(
        self, parties: Hellos, terms: Mapping[str, Any]
    ) -> Conversation[tuple[Mapping[str, LabelsReply], Cuts]]:
        """Lines 2 to 7 and 21 to 26: sums of the labels, and the common cuts.

        ``terms`` are the fields of a ``RunCoding``.
        """

    def add_round(
        self, parties: Hellos, boosting: Boosting, history: History, by_level: Conversation[bool]
    ) -> Conversation[bool]:
        """Add a round's trees, by default level by level; returns whether it is finished."""
        return (yield from by_level)

    @property
    def _categories(self) -> Ints:
        """Categories of each column; times are a last one, which is never split."""
        n_times = int(objectives.is_survival(self.settings.objective))
        return np.pad(self.table.category_counts, (0, n_times))

    def _divide_times(self, times: Array, masses: Array) -> None:
        """Divide times by their quantiles, for scores."""
        values, places = np.unique(times, return_inverse=True)
        of_values = np.bincount(places, masses).astype(np.float64)
        self.state.times = survival.quantile_points(values, of_values, FINAL_BINS)

    @property
    @abstractmethod
    def sums(self) -> PlainSums | MaskedSums:
        """How to ask for a sum."""

    def shared(self, cuts: Cuts) -> dict[str, Any]:
        """Fields of ``SharedCuts``: the cuts, where they were not sent and parties need them."""
        return {}

    def risks(self, parties: Hellos, request: RisksRequest, cuts: Cuts) -> Conversation[Whole]:
        """Sums of hazard ratios and events by common bin of times, (n_time_bins, N_SUMS)."""
        shape = int(cuts.widths[-1]), N_SUMS

        def check(party: str, reply: RisksReply) -> None:
            check_sizes(party, reply, n_time_bins=len(self._times(party, cuts)))

        form = Form.of(RisksReply, shape, without_lost=True)
        request = replace(request, **self.shared(cuts))
        replies = yield from self.sums.ask(parties, request, form, check)
        summed = np.zeros(shape, dtype=np.int64)
        for party, reply in replies.items():
            np.add.at(summed, self._times(party, cuts), reply.risks)
        return summed

    def _times(self, party: str, cuts: Cuts) -> Ints:
        """The common bin of each of a party's bins of times."""
        bins = self.state.places[party]
        times: Ints = bins[bins >= cuts.offsets[-2]] - int(cuts.offsets[-2])
        return times

    @abstractmethod
    def grow(
        self,
        parties: Hellos,
        request: GrowRequest,
        boosting: Boosting,
        check: Check,
        sent: TurnRequest | None = None,
    ) -> Conversation[dict[str, GrowReply]]:
        """Lines 12 to 16: sums of one level; ``sent`` asks for them in other words."""

    def score(
        self, parties: Hellos, request: EvaluateRequest, check: Check
    ) -> Conversation[dict[str, EvaluateReply]]:
        """Sums of the finished model's scores."""
        form = self.scores(EvaluateReply, SUBSETS, request.score_bins, (len(WHAT),))
        return (yield from self.sums.ask(parties, request, form, check))

    def scores(
        self,
        reply: type[R],
        subsets: Sequence[str],
        n_bins: int,
        *others: tuple[int, ...],
        part_of_others: bool = False,
    ) -> Form[R]:
        """The form of a reply with scores of some subsets, and then of sums of other shapes."""
        n_arrays = 2 * len(subsets)
        return Form(
            reply,
            lambda: [*self._score_shapes(subsets, n_bins), *others],
            lambda sums: reply(*self._read_scores(sums[:n_arrays]), *sums[n_arrays:]),
            part_of_others=part_of_others,
        )

    def _new_adder(self) -> WholeNumbers:
        return WholeNumbers(self.state.bounds)

    def _score_form(self, adder: WholeNumbers, n_bins: int = 2) -> metrics.Statistics:
        """Statistics of no rows, whose shapes are those of any; the adder learns its units."""
        settings = self.settings
        return score_form(settings.objective, self._width, n_bins, settings.scored_metrics, adder)

    def _score_shapes(self, subsets: Sequence[str], n_bins: int) -> list[tuple[int, ...]]:
        form = self._score_form(self._new_adder(), n_bins)
        return [form.sums.shape, form.histogram.shape] * len(subsets)

    def _read_scores(self, arrays: Sequence[Whole]) -> list[Array]:
        """Score sums and histograms as doubles."""
        adder = self._new_adder()
        self._score_form(adder)
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        return [array for sums, cells in pairs for array in read_sums(sums, adder, cells)]

    @property
    def count_bytes(self) -> int:
        """The fewest bytes that can count whole rows, or weights to WEIGHT_BITS."""
        bounds = self.state.bounds
        least = WEIGHT_BITS - bounds.heaviest if self.state.weighted else 0
        return next((n for n in SIZES if bounds.exponent(0, n) >= least), max(SIZES))

    def can_continue(self, parties: Mapping[str, HelloReply]) -> bool:
        """Whether a tree may grow from the last sums after a loss."""
        return True

    def resume(self, parties: Hellos) -> Conversation[None]:
        """In a resumed run, exclude parties that any party reports as lost; by default none."""
        yield from ()

    def summary(self) -> dict[str, Any]:
        """The summary's part."""
        return {}


@dataclass(eq=False)
class PlainTotals(Totals):
    """Each party's sums reach the server."""

    restarts_rounds = True
    sums = PlainSums()
    _claims: dict[str, HistogramChecks] = field(init=False, default_factory=dict)

    def begin(
        self, parties: Hellos, terms: Mapping[str, Any]
    ) -> Conversation[tuple[Mapping[str, LabelsReply], Cuts]]:
        """Every party's surrogates, and their fusion."""
        bins, fusion = self.section.bins, self.section.fusion
        table = self.table
        objective = self.settings.objective
        max_bin = self.settings.max_bin
        n_rows = {name: hello.n_train for name, hello in parties.items()}
        if bins == "auto":
            is_small = min(n_rows.values()) * SMALL_PARTY <= sum(n_rows.values())
            bins = "equal" if is_small else "share"
        n_bins = dict.fromkeys(parties, max_bin)  # of a column, at most
        if bins == "share":
            n_bins = share_bins(max_bin, n_rows)
        categories = self._categories
        n_classes = len(table.classes)
        sketches = yield from ask(
            {party: self.kinds.sketch(n_bins=n_bins[party], **terms) for party in parties},
            self.kinds.sketched,
            lambda party, reply: check_sketch(
                party,
                reply,
                categories,
                n_classes,
                objectives.n_label_sums(objective, n_classes),
                n_bins[party],
                table.n_coded_columns,
            ),
        )
        summaries = {party: Sketch(**fields_of(reply, Sketch)) for party, reply in sketches.items()}
        # Global cuts are as many as those of the party with the fewest, or with the most.
        coarsest = fusion == "coarsest"
        if fusion == "auto":
            coarsest = objectives.is_regression(objective)
        resolution = (min if coarsest else max)(n_bins[party] for party in sketches)
        if resolution < min(FEW_BINS, max_bin):
            extreme, remedy = "the most", f"{self.section.table}.bins=equal"
            if coarsest:
                extreme = "the fewest"
                remedy = f"{remedy}, {self.section.table}.fusion=finest"
            self.warn(
                f"only {resolution} bins a column are left of max-bin {max_bin}: the share rule "
                f"divides them among the parties, and {extreme} of any party are kept; "
                f"{remedy} or a larger max-bin gives more"
            )
        every = tuple(summaries.values())
        used = used_categories(every, categories)
        cuts = with_categories(fuse_sketches(every, resolution), categories, used)
        places = dict[str, Ints]()
        weights = dict[str, Doubles]()
        for party, summary in summaries.items():
            whole = summary.with_categories(categories)
            weight = sketches[party].weight_sum
            places[party] = bin_map(whole, cuts)
            coded = np.repeat(categories > 0, np.diff(whole.offsets)) | parties[party].merges_bins
            weights[party] = np.append(np.where(coded, weight, whole.masses), weight)
        self.state.places, self.state.weights, self.state.bins = places, weights, bins
        if objectives.is_survival(objective):
            columns = [summary.column(len(categories) - 1) for summary in every]
            self._divide_times(*map(np.concatenate, zip(*columns, strict=True)))
        return sketches, cuts

    def grow(
        self,
        parties: Hellos,
        request: GrowRequest,
        boosting: Boosting,
        check: Check,
        sent: TurnRequest | None = None,
    ) -> Conversation[dict[str, GrowReply]]:
        """Check that a party's sums agree with its earlier ones."""
        bare = boosting.bare

        def check_claims(party: str, reply: GrowReply) -> None:
            check(party, reply)
            if party not in self._claims:
                state = self.state
                self._claims[party] = HistogramChecks(
                    boosting.cuts,
                    state.places[party],
                    state.weights[party],
                    parties[party].merges_bins,
                    bare.objective,
                    bare.parameters,
                )
            with as_protocol_error(party, "GrowReply", "histograms"):
                self._claims[party].check(request, reply, boosting.routes, boosting.route_sets)

        requests: dict[str, Request] = parties.all(sent or request)
        for name in parties if len(request.hazards) else ():
            hazards = request.hazards[self._times(name, boosting.cuts)]
            requests[name] = replace(request, hazards=hazards)
        return (yield from ask(requests, GrowReply, check_claims))

    def summary(self) -> dict[str, Any]:
        return {"bins": self.state.bins}


@dataclass(frozen=True, slots=True)
class Opening:
    """The first request under masks, and how its counts of values go on."""

    request: Request
    shapes: Sequence[tuple[int, ...]]  # of its sums, before the counts
    count: Callable[..., Request]  # asks for the counts by each further digit
    lightest: int  # weight of a prefix that is not resolved further
    n_bytes: int = 8  # of a count
    deviation: float | None = None  # of the noise of a count

    def consistent(self, counts: Whole, masses: Whole | None) -> Whole:
        """Counts as a ``Descent`` takes them."""
        if self.deviation is None:
            return counts
        return make_consistent(counts, masses, self.deviation)


# Departures from the paper, where each party summarises its rows at its resolution and the server
# fuses the summaries: here the cuts are quantiles of all rows, at ``max-bin`` bins a column, so
# each party counts by its weight; ``pax.bins`` and ``pax.fusion`` have no effect.
class MaskedTotals(Totals):
    """All parties answer as one, named ``EVERYONE``, in whole numbers whose masks cancel."""

    restarts_rounds = False

    def begin(
        self, parties: Hellos, terms: Mapping[str, Any]
    ) -> Conversation[tuple[Mapping[str, LabelsReply], Cuts]]:
        """Exchange keys, sum the labels, and find the quantiles of every column digit by digit."""
        categories = self._categories
        opening = yield from self._open(parties, terms)
        descent = Descent(categories == 0, self.settings.max_bin, opening.lightest)
        shapes = *opening.shapes, (int((categories == 0).sum()), BASE)
        # Counts refine the earlier ones: a party that is lost here ends the run.
        masked = self.state.sums
        *sums, counts = yield from masked.add(parties, opening.request, *shapes, may_fail=0)
        descent.take(opening.consistent(counts, None))
        while descent.digit < N_DIGITS:
            prefixes, offsets = descent.wanted()
            shape, n_bytes = (len(prefixes), BASE), opening.n_bytes
            if (needed := len(prefixes) * BASE * n_bytes) > MAX_COUNT_BYTES:
                rule = f"must be less for so many columns with {setting_of(self.settings)}=secure: "
                most = f"{MAX_COUNT_BYTES:,} at most"
                rule += f"counts of {needed:,} bytes a party are needed, {most}"
                raise ConfigError(f"max-bin {rule}")
            request = opening.count(descent.digit, prefixes, offsets)
            (counts,) = yield from masked.add(parties, request, shape, n_bytes=n_bytes, may_fail=0)
            descent.take(opening.consistent(counts, descent.masses))
        labels, used = self._read_opening(sums)
        cuts = with_categories(descent.cuts(), categories, used)
        self.state.places = {EVERYONE: np.arange(len(cuts.edges))}
        if objectives.is_survival(self.settings.objective):
            self._divide_times(*descent.last_column())
        return {EVERYONE: labels}, cuts

    def _open(self, parties: Hellos, terms: Mapping[str, Any]) -> Conversation[Opening]:
        """Exchange keys; the parties sum labels and weights, unseen values, rows by category."""
        if len(parties) < MIN_PRIVATE_PARTIES:
            self.warn(
                f"{setting_of(self.settings)}=secure hides little among {len(parties)}: the "
                "coordinator and all parties but one see what that one sends; three or more hide "
                "it better"
            )
        threshold = self.settings.min_parties
        roster, self.state.bounds, weighted = yield from exchange_keys(parties, threshold)
        self.state.weighted = weighted
        self.state.sums = MaskedSums(roster["names"], threshold)
        n_bytes = self.count_bytes
        n_categories = int(self.table.category_counts.sum())
        n_sums = objectives.n_label_sums(self.settings.objective, len(self.table.classes))
        return Opening(
            self.kinds.open(count_bytes=n_bytes, **roster, **terms),
            [(n_sums + 1,), (self.table.n_coded_columns,), (n_categories,)],
            self.kinds.count,
            # Without weights every row counts the same.
            0 if weighted else 2 ** self.state.bounds.exponent(0, n_bytes),
            n_bytes,
        )

    def _read_opening(self, sums: Sequence[Whole]) -> tuple[LabelsReply, Ints]:
        """Sums of the labels, and how many categories of each column occur."""
        labels, unseen, by_category = sums
        objective, n_classes = self.settings.objective, len(self.table.classes)
        loss = LossParameters.of(self.settings)
        power = objectives.label_power(objective, n_classes, self.state.bounds, loss)
        label_sums = from_fixed(labels[:-1], self.state.bounds.exponent(power))
        (weight_sum,) = from_fixed(labels[-1:], self.state.bounds.exponent(0)).tolist()
        # Up to the highest that occurs.
        by_column = np.split(by_category, np.cumsum(self.table.category_counts)[:-1])
        used = [np.flatnonzero(counts).max(initial=-1) + 1 for counts in by_column]
        used += [0] * int(objectives.is_survival(objective))
        return LabelsReply(label_sums, weight_sum, unseen), np.array(used, dtype=np.int64)

    @property
    def sums(self) -> MaskedSums:
        return self.state.sums

    def shared(self, cuts: Cuts) -> dict[str, Any]:
        if self.state.has_sent_cuts:
            return {}
        self.state.has_sent_cuts = True
        return {"edges": cuts.edges, "edge_offsets": cuts.offsets}

    def grow(
        self,
        parties: Hellos,
        request: GrowRequest,
        boosting: Boosting,
        check: Check,
        sent: TurnRequest | None = None,
    ) -> Conversation[dict[str, GrowReply]]:
        is_part = request.level > 0
        n_wanted, n_bins = len(request.wanted_nodes), boosting.cuts.widths[request.columns].sum()
        shapes = [(n_wanted, int(n_bins), 2), (n_wanted, len(request.columns))]
        if not is_part:
            shapes += (request.n_trees, 2), *self._score_shapes(WATCHED, request.score_bins)
        model = boosting.bare
        exponents = np.array(
            objectives.gradient_exponents(model.objective, self.state.bounds, model.parameters)
        )

        def read(sums: Sequence[Whole]) -> GrowReply:
            histograms, missing, *of_roots = sums
            first = from_fixed(histograms, exponents), missing.astype(np.int32)
            if is_part:
                return GrowReply(*first)
            root_sums, *scores = of_roots
            return GrowReply(*first, from_fixed(root_sums, exponents), *self._read_scores(scores))

        form = Form(
            GrowReply, lambda: shapes, read, part_of_others=is_part, without_lost=not is_part
        )
        asked: Request = replace(sent or request, **self.shared(boosting.cuts))
        return (yield from self.sums.ask(parties, asked, form, check))

    def can_continue(self, parties: Mapping[str, HelloReply]) -> bool:
        """Whether all parties of the last sum are still present."""
        return not self.state.sums.threshold or set(self.state.sums.names) <= set(parties)

    def resume(self, parties: Hellos) -> Conversation[None]:
        if not self.state.sums.threshold:
            return
        replies = yield from ask(parties.all(LeftRequest()), LeftReply)
        for name in tuple(parties):
            if any(name not in reply.names for reply in replies.values()):
                parties.leave(name)
                self.warn(f"{name} was lost before the run was resumed, and stays excluded")


def share_bins(max_bin: int, n_rows: Mapping[str, int]) -> dict[str, int]:
    """Bins of each party: its share of ``max_bin`` by rows, at least 2 (line 36: 1/epsilon_i)."""
    total = sum(n_rows.values())
    return {party: max(MIN_BINS, round(max_bin * count / total)) for party, count in n_rows.items()}
