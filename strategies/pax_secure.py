"""Secure aggregation of PAX: sums over all parties, independent of how rows are split.

Departures from the paper, where each party summarises its rows at its resolution and the server
fuses the summaries: here the cuts are quantiles of all rows, at ``max-bin`` bins a column, so each
party counts by its weight; ``pax.bins`` and ``pax.fusion`` have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedapp.conversation import Check, Conversation, Parties
from fedapp.crypto.masking import SIZES
from fedapp.data.partition import WATCHED
from fedapp.errors import ConfigError
from fedapp.histograms.bins import Cuts, Ints, with_categories
from fedapp.histograms.fixed_point import from_fixed
from fedapp.histograms.sketch import BASE, N_DIGITS, Descent
from fedapp.messages.fields import fields_of
from fedapp.messages.handshake import HelloReply, LabelsReply
from fedapp.messages.pax import CountRequest, GrowReply, GrowRequest, GrowSumsRequest, OpenRequest
from fedapp.messages.secagg import EVERYONE
from fedapp.settings import Settings
from fedapp.trees.objective import LossParameters, gradient_exponents
from fedapp.trees.rounds import Boosting
from fedapp.trees.sets import category_counts
from strategies.horizontal import CommonTable
from strategies.pax_plain import PaxSettings
from strategies.secured import SecuredRun

WEIGHT_BITS = 12  # weights count to a 4096th of the heaviest
MOST_COUNTED = 2**30  # bytes of a party's counts in one exchange


class SecureSums:
    """All parties answer as one, named ``EVERYONE``; interface as of ``PlainSums``."""

    begins_anew = False

    def __init__(
        self, settings: Callable[[], Settings], own: PaxSettings, warn: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._run = run = SecuredRun(settings, "pax.aggregation", warn)
        self.resume, self.facts, self.score = run.resume, run.facts, run.score
        self.places: dict[str, Ints] = {}
        self.weights: dict[str, Any] = {}
        self._sent_cuts = False

    def begin(
        self, parties: Parties[HelloReply], table: CommonTable, terms: Mapping[str, Any]
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
                min_child_rows=self._settings().min_child_rows,
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
            if (needed := len(prefixes) * BASE * n_bytes) > MOST_COUNTED:
                rule = "must be less for so many columns with pax.aggregation=secure: counts of "
                rule += f"{needed:,} bytes a party are needed, {MOST_COUNTED:,} at most"
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
        self, parties: Parties[HelloReply], request: GrowRequest, boosting: Boosting, check: Check
    ) -> Conversation[dict[str, GrowReply]]:
        """Sums of one level; none where a lost party prevents them, and trees must end."""
        cuts = boosting.cuts
        n_wanted, n_drawn = len(request.wanted_nodes), len(request.columns)
        n_roots = request.n_trees if request.level == 0 else 0
        n_bins = int(cuts.widths[request.columns].sum())
        n_counted = n_wanted if self._settings().min_child_rows else 0
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
            (n_counted, n_bins),
            (n_roots, 2),
            *scores,
            part_of_others=request.level > 0,
        )
        if not summed:
            return {}
        histograms, missing, rows, root_sums, *of_scores = summed
        parameters = LossParameters.of(self._settings())
        exponents = np.array(gradient_exponents(boosting.objective, self._run.bounds, parameters))
        reply = GrowReply(
            from_fixed(histograms, exponents),
            missing.astype(np.int32),
            rows,
            from_fixed(root_sums, exponents),
            *self._run.scores(of_scores),
        )
        check(EVERYONE, reply)
        return {EVERYONE: reply}

    def goes_on(self, parties: Mapping[str, HelloReply]) -> bool:
        """Whether all parties of the last sum are still present."""
        return not self._run.sums.threshold or set(self._run.sums.names) <= set(parties)

    def restore(self, places: dict[str, Ints], facts: Mapping[str, Any]) -> None:
        """Undo ``facts``; the parties have the cuts."""
        self.places, self._sent_cuts = places, True
        self._run.restore(facts)
