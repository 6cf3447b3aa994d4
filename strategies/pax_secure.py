"""PAX's sums over all parties together, in bins of all parties, exact whatever the split of rows.

Departures from the paper: it has each party summarise its rows at a resolution of its own, by its
share of them, and fuses what they send. Here no party sends anything of its own to fuse. The cuts
are quantiles of all rows, at ``max-bin`` bins a column, so each party's share counts by its weight;
``pax.bins`` and ``pax.fusion`` have nothing to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedapp.config import Settings
from fedapp.conversation import Check, Conversation, Parties
from fedapp.crypto.fixed_point import Whole, from_whole
from fedapp.crypto.pairwise import SIZES
from fedapp.data.partition import WATCHED
from fedapp.errors import ConfigError
from fedapp.histograms.bins import Cuts, Ints, with_categories
from fedapp.histograms.descent import BASE, N_DIGITS, Descent
from fedapp.messages.fields import fields_of
from fedapp.messages.hello import HelloReply
from fedapp.messages.labels import LabelsReply
from fedapp.messages.pax import CountRequest, GrowReply, GrowRequest, GrowSumsRequest, OpenRequest
from fedapp.messages.scoring import EvaluateReply, EvaluateRequest
from fedapp.messages.secure import EVERYONE
from fedapp.trees.boosted.rounds import Boosting
from fedapp.trees.objective import LossParameters, gradient_exponents
from fedapp.trees.sets import category_counts
from strategies.horizontal import CommonTable
from strategies.pax_plain import PaxSettings
from strategies.secured import SecuredRun

WEIGHT_BITS = 12
MOST_COUNTED = 2**30  # bytes of a party's counts in one exchange


class SecureSums:
    """All parties together answer as one, in whose name stands ``EVERYONE``; arguments and methods
    as of ``PlainSums``."""

    begins_anew = False

    def __init__(
        self, settings: Callable[[], Settings], own: PaxSettings, warn: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._run = run = SecuredRun(settings, "pax.aggregation", warn)
        self.resume, self.facts = run.resume, run.facts
        self.places: dict[str, Ints] = {}
        self.weights: dict[str, Any] = {}
        self._told = False

    def begin(
        self, parties: Parties[HelloReply], table: CommonTable, terms: Mapping[str, Any]
    ) -> Conversation[tuple[Mapping[str, LabelsReply], Cuts]]:
        """Meet, sum the labels, and go down to the quantiles of every column."""
        roster, weighted = yield from self._run.meet(parties, len(table.classes))
        bounds, sums_of = self._run.bounds, self._run.sums
        categories = category_counts(table.categories, len(table.columns))
        # Whole rows fit in a count, or weights to a 4096th of the heaviest.
        least = WEIGHT_BITS - bounds.heaviest if weighted else 0
        n_bytes = next((n for n in SIZES if bounds.exponent(0, n) >= least), max(SIZES))
        # Without weights it is known what a row alone counts.
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
            # Parts of the counts before: a party that is lost here ends the run.
            (counts,) = yield from sums_of.ask(parties, request, shape, n_bytes=n_bytes, may_fail=0)
            descent.take(counts)
        cuts = with_categories(descent.cuts(), categories, _used(by_category, categories))
        self.places = {EVERYONE: np.arange(len(cuts.edges))}
        return {EVERYONE: self._run.labels(sums, unseen)}, cuts

    def grow(
        self, parties: Parties[HelloReply], request: GrowRequest, boosting: Boosting, check: Check
    ) -> Conversation[dict[str, GrowReply]]:
        """Sums of one level."""
        cuts = boosting.cuts
        n_wanted, n_drawn = len(request.wanted_nodes), len(request.columns)
        n_roots = request.n_trees if request.level == 0 else 0
        n_bins = int(cuts.widths[request.columns].sum())
        n_counted = n_wanted if self._settings().min_child_rows else 0
        scores = self._run.score_shapes(WATCHED, request.score_bins) if n_roots else _NO_SCORES
        if request.level == 0:
            self._run.sums.without_lost(parties)
        summed = yield from self._run.sums.ask(
            parties,
            self._with_cuts(request, cuts),
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
            from_whole(histograms, exponents),
            missing.astype(np.int32),
            rows,
            from_whole(root_sums, exponents),
            *self._run.scores(of_scores),
        )
        check(EVERYONE, reply)
        return {EVERYONE: reply}

    def score(
        self, parties: Parties[HelloReply], request: EvaluateRequest, check: Check
    ) -> Conversation[dict[str, EvaluateReply]]:
        """Sums of the finished model's scores."""
        return (yield from self._run.score(parties, request, check))

    def goes_on(self, parties: Mapping[str, HelloReply]) -> bool:
        """Whether all are there still whose rows are in the last sum."""
        return not self._run.sums.threshold or set(self._run.sums.names) <= set(parties)

    def restore(self, places: dict[str, Ints], facts: Mapping[str, Any]) -> None:
        """Undo ``facts``; the parties were told the cuts."""
        self.places, self._told = places, True
        self._run.restore(facts)

    def _with_cuts(self, request: GrowRequest, cuts: Cuts) -> GrowSumsRequest:
        """A request for sums, with the cuts where they are not told yet."""
        told = fields_of(request)
        edges, offsets = cuts.edges, cuts.offsets
        if self._told:
            edges, offsets = edges[:0], offsets[:0]
        self._told = True
        return GrowSumsRequest(
            **told, among=self._run.sums.among, edges=edges, edge_offsets=offsets
        )


_NO_SCORES: list[tuple[int, ...]] = [(0,), (0, 0)] * len(WATCHED)


def _used(by_category: Whole, categories: Ints) -> Ints:
    """How many categories of each column there are up to the highest that occurs."""
    ends = np.cumsum(categories)
    return np.array(
        [
            np.flatnonzero(by_category[end - width : end]).max(initial=-1) + 1
            for end, width in zip(ends.tolist(), categories.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
