"""Sums of PAX: each party's, as in the paper, or by secure aggregation only those over all parties.

Both classes answer ``strategies.pax`` alike: ``begin`` agrees on the cuts, ``grow`` returns a
level's sums by party. Under masks the cuts are quantiles of all rows, counted digit by digit, so
they do not depend on how rows are split; all parties then answer as one, named ``EVERYONE``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from fedapp.conversation import Check, Conversation, ask
from fedapp.crypto.masking import SIZES
from fedapp.data.partition import WATCHED
from fedapp.errors import ConfigError, as_protocol_error
from fedapp.histograms.bins import Cuts, Ints, with_categories
from fedapp.histograms.fixed_point import from_fixed
from fedapp.histograms.sketch import (
    BASE,
    N_DIGITS,
    Descent,
    Sketch,
    bin_map,
    fuse_sketches,
    used_categories,
)
from fedapp.messages.fields import fields_of
from fedapp.messages.handshake import HelloReply, LabelsReply
from fedapp.messages.pax import (
    CountRequest,
    GrowReply,
    GrowRequest,
    GrowSumsRequest,
    OpenRequest,
    SketchReply,
    SketchRequest,
    check_sketch,
)
from fedapp.messages.secagg import EVERYONE
from fedapp.settings import Section, Settings
from fedapp.trees.objective import LossParameters, gradient_exponents, is_regression, n_outputs
from fedapp.trees.rounds import Boosting, Doubles, HistogramChecks
from fedapp.trees.sets import category_counts
from strategies.handshake import Hellos
from strategies.horizontal import CommonTable
from strategies.scoring import ask_to_score
from strategies.secagg import SecuredRun

MIN_BINS = 2
MANY_PARTIES = 10  # where bins=auto becomes equal: shares of fewer parties cost little accuracy
FEW_BINS = 32  # fewer cost much accuracy in all measurements
WEIGHT_BITS = 12  # weights count to a 4096th of the heaviest
MAX_COUNT_BYTES = 2**30  # bytes of a party's counts in one exchange


class PaxSettings(Section, table="pax"):
    """``[pax]`` of the run config; see ``strategies.pax.PAX``."""

    bins: Literal["auto", "share", "equal"]
    """How bins are dealt to parties: `share` by rows, or `equal`; `auto`: equal from 10 on."""
    fusion: Literal["auto", "finest", "coarsest"]
    """The party whose resolution the global cuts have; `auto` is the paper's."""
    aggregation: Literal["plain", "secure"]
    """`secure`: the coordinator sees only sums over all parties, under masks."""


class PlainSums:
    """Each party's sums reach the server; ``settings`` returns the current settings."""

    restarts_rounds = True  # whether a round restarts when a party is lost; else its trees end

    def __init__(
        self, settings: Callable[[], Settings], section: PaxSettings, warn: Callable[[str], None]
    ) -> None:
        self._settings, self._warn = settings, warn
        self._fusion, self._bins = section.fusion, section.bins
        self.places: dict[str, Ints] = {}  # global bin of each bin of a reply, by party
        self.weights: dict[str, Doubles] = {}  # of a party's bins and all its rows, for the checks
        self._claims: dict[str, HistogramChecks] = {}

    def begin(
        self, parties: Hellos, table: CommonTable, terms: Mapping[str, Any]
    ) -> Conversation[tuple[Mapping[str, LabelsReply], Cuts]]:
        """Lines 2 to 7 and 21 to 26: sums of the labels, surrogates, and the cuts from all of them.

        ``terms`` are the fields of ``Terms``.
        """
        if self._bins == "auto":
            self._bins = "equal" if len(parties) >= MANY_PARTIES else "share"
        max_bin = self._settings().max_bin
        n_bins = dict.fromkeys(parties, max_bin)  # of a column, at most
        if self._bins == "share":
            n_bins = share_bins(max_bin, {name: hello.n_train for name, hello in parties.items()})
        categories = category_counts(table.categories, len(table.columns))
        sketches = yield from ask(
            {party: SketchRequest(n_bins=n_bins[party], **terms) for party in parties},
            SketchReply,
            lambda party, reply: check_sketch(
                party,
                reply,
                categories,
                len(table.classes),
                n_outputs(self._settings().objective, len(table.classes)),
                n_bins[party],
                table.n_coded_columns,
            ),
        )
        summaries = {party: Sketch(**fields_of(reply, Sketch)) for party, reply in sketches.items()}
        # Global cuts are as many as those of the party with the fewest, or with the most.
        coarsest = self._fusion == "coarsest"
        if self._fusion == "auto":
            coarsest = is_regression(self._settings().objective)
        resolution = (min if coarsest else max)(n_bins[party] for party in sketches)
        if resolution < min(FEW_BINS, max_bin):
            extreme, remedy = "the most", "pax.bins=equal"
            if coarsest:
                extreme, remedy = "the fewest", f"{remedy}, pax.fusion=finest"
            self._warn(
                f"only {resolution} bins a column are left of max-bin {max_bin}: the share rule "
                f"divides them among the parties, and {extreme} of any party are kept; "
                f"{remedy} or a larger max-bin gives more"
            )
        every = tuple(summaries.values())
        used = used_categories(every, categories)
        cuts = with_categories(fuse_sketches(every, resolution), categories, used)
        for party, summary in summaries.items():
            whole, weight = summary.with_categories(categories), sketches[party].weight_sum
            self.places[party] = bin_map(whole, cuts)
            coded = np.repeat(categories > 0, np.diff(whole.offsets)) | parties[party].merges_bins
            self.weights[party] = np.append(np.where(coded, weight, whole.masses), weight)
        return sketches, cuts

    def grow(
        self, parties: Hellos, request: GrowRequest, boosting: Boosting, check: Check
    ) -> Conversation[dict[str, GrowReply]]:
        """Lines 12 to 16; checks that a party's sums agree with its earlier ones."""
        loss = boosting.objective, boosting.parameters

        def check_claims(party: str, reply: GrowReply) -> None:
            check(party, reply)
            if party not in self._claims:
                bins = self.places[party], self.weights[party], parties[party].merges_bins
                self._claims[party] = HistogramChecks(boosting.cuts, *bins, loss)
            with as_protocol_error(party, "GrowReply", "histograms"):
                self._claims[party].check(request, reply, boosting.routes, boosting.route_sets)

        return (yield from ask(parties.all(request), GrowReply, check_claims))

    score = staticmethod(ask_to_score)

    def can_continue(self, parties: Mapping[str, HelloReply]) -> bool:
        """Whether a tree may grow from the last sums after a loss; here rounds restart instead."""
        return True

    def resume(self, parties: Hellos) -> Conversation[None]:
        """Nothing to ask for."""
        yield from ()

    def facts(self) -> dict[str, Any]:
        """Fields for a checkpoint beside ``places``."""
        return {"bins": self._bins}

    def restore(self, places: dict[str, Ints], facts: Mapping[str, Any]) -> None:
        self.places, self._bins = places, facts["bins"]


# Departures from the paper, where each party summarises its rows at its resolution and the server
# fuses the summaries: here the cuts are quantiles of all rows, at ``max-bin`` bins a column, so
# each party counts by its weight; ``pax.bins`` and ``pax.fusion`` have no effect.
class SecureSums:
    """All parties answer as one, named ``EVERYONE``; methods as of ``PlainSums``."""

    restarts_rounds = False

    def __init__(
        self, settings: Callable[[], Settings], section: PaxSettings, warn: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._run = run = SecuredRun(settings, warn)
        self.resume, self.facts, self.score = run.resume, run.facts, run.score
        self.places: dict[str, Ints] = {}
        self.weights: dict[str, Any] = {}
        self._sent_cuts = False

    def begin(
        self, parties: Hellos, table: CommonTable, terms: Mapping[str, Any]
    ) -> Conversation[tuple[Mapping[str, LabelsReply], Cuts]]:
        """Exchange keys, sum the labels, and find the quantiles of every column digit by digit."""
        roster, weighted = yield from self._run.meet(parties, len(table.classes))
        bounds, sums_of = self._run.bounds, self._run.sums
        categories = category_counts(table.categories, len(table.columns))
        # The fewest bytes that can count whole rows, or weights to WEIGHT_BITS.
        least = WEIGHT_BITS - bounds.heaviest if weighted else 0
        n_bytes = next((n for n in SIZES if bounds.exponent(0, n) >= least), max(SIZES))
        # Without weights every row counts the same.
        lightest = 0 if weighted else 2 ** bounds.exponent(0, n_bytes)
        descent = Descent(categories == 0, self._settings().max_bin, lightest)
        sums, unseen, by_category, counts = yield from sums_of.ask(
            parties,
            OpenRequest(
                count_bytes=n_bytes,
                **roster,
                **terms,
            ),
            (self._run.n_outputs + 1,),
            (table.n_coded_columns,),
            (int(categories.sum()),),
            (int((categories == 0).sum()), BASE),
            may_fail=0,
        )
        descent.take(counts)
        while descent.digit < N_DIGITS:
            prefixes, offsets = descent.wanted()
            request = CountRequest(descent.digit, prefixes, offsets)
            shape = len(prefixes), BASE
            if (needed := len(prefixes) * BASE * n_bytes) > MAX_COUNT_BYTES:
                rule = "must be less for so many columns with pax.aggregation=secure: counts of "
                rule += f"{needed:,} bytes a party are needed, {MAX_COUNT_BYTES:,} at most"
                raise ConfigError(f"max-bin {rule}")
            # These refine the earlier counts: a party that is lost here ends the run.
            (counts,) = yield from sums_of.ask(parties, request, shape, n_bytes=n_bytes, may_fail=0)
            descent.take(counts)
        # Categories of each column up to the highest that occurs.
        by_column = np.split(by_category, np.cumsum(categories)[:-1])
        used = [np.flatnonzero(counts).max(initial=-1) + 1 for counts in by_column]
        cuts = with_categories(descent.cuts(), categories, np.array(used, dtype=np.int64))
        self.places = {EVERYONE: np.arange(len(cuts.edges))}
        return {EVERYONE: self._run.labels(sums, unseen)}, cuts

    def grow(
        self, parties: Hellos, request: GrowRequest, boosting: Boosting, check: Check
    ) -> Conversation[dict[str, GrowReply]]:
        """Sums of one level; none where a lost party prevents them, and trees must end."""
        cuts = boosting.cuts
        n_wanted, n_drawn = len(request.wanted_nodes), len(request.columns)
        n_roots = request.n_trees if request.level == 0 else 0
        n_bins = int(cuts.widths[request.columns].sum())
        scores: list[tuple[int, ...]] = [(0,), (0, 0)] * len(WATCHED)
        if n_roots:
            scores = self._run.score_shapes(WATCHED, request.score_bins)
        if request.level == 0:
            self._run.sums.without_lost(parties)
        new = slice(0 if self._sent_cuts else None)  # only the first request carries the cuts
        self._sent_cuts = True
        summed = yield from self._run.sums.ask(
            parties,
            GrowSumsRequest(
                **fields_of(request),
                among=self._run.sums.among,
                edges=cuts.edges[new],
                edge_offsets=cuts.offsets[new],
            ),
            (n_wanted, n_bins, 2),
            (n_wanted, n_drawn),
            (n_roots, 2),
            *scores,
            part_of_others=request.level > 0,
        )
        if not summed:
            return {}
        histograms, missing, root_sums, *of_scores = summed
        parameters = LossParameters.of(self._settings())
        exponents = np.array(gradient_exponents(boosting.objective, self._run.bounds, parameters))
        reply = GrowReply(
            from_fixed(histograms, exponents),
            missing.astype(np.int32),
            from_fixed(root_sums, exponents),
            *self._run.scores(of_scores),
        )
        check(EVERYONE, reply)
        return {EVERYONE: reply}

    def can_continue(self, parties: Mapping[str, HelloReply]) -> bool:
        """Whether all parties of the last sum are still present."""
        return not self._run.sums.threshold or set(self._run.sums.names) <= set(parties)

    def restore(self, places: dict[str, Ints], facts: Mapping[str, Any]) -> None:
        """Undo ``facts``; the parties have the cuts."""
        self.places, self._sent_cuts = places, True
        self._run.restore(facts)


def share_bins(max_bin: int, n_rows: Mapping[str, int]) -> dict[str, int]:
    """Bins of each party: its share of ``max_bin`` by rows, at least 2 (line 36: 1/epsilon_i)."""
    total = sum(n_rows.values())
    return {party: max(MIN_BINS, round(max_bin * count / total)) for party, count in n_rows.items()}
