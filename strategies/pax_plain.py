"""Plain aggregation of PAX, as in the paper: the server sees each party's histograms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from fedapp.conversation import Check, Conversation, Parties, ask
from fedapp.errors import as_protocol_error
from fedapp.histograms.bins import Cuts, Ints, with_categories
from fedapp.histograms.sketch import Sketch, bin_map, fuse_sketches, used_categories
from fedapp.messages.fields import fields_of
from fedapp.messages.handshake import HelloReply, LabelsReply
from fedapp.messages.pax import GrowReply, GrowRequest, SketchReply, SketchRequest, check_sketch
from fedapp.settings import Section, Settings
from fedapp.trees.objective import is_regression, n_outputs
from fedapp.trees.rounds import Boosting, Doubles, HistogramChecks
from fedapp.trees.sets import category_counts
from strategies.horizontal import CommonTable
from strategies.scoring import ask_to_score

FEWEST_BINS = 2
MANY_PARTIES = 10  # where bins=auto becomes equal: shares of fewer parties cost little accuracy
FEW_BINS = 32  # fewer cost much accuracy in all measurements


class PaxSettings(Section):
    """``[pax]`` of the run config; see ``strategies.pax.PAX``."""

    bins: Literal["auto", "share", "equal"]
    fusion: Literal["auto", "finest", "coarsest"]
    aggregation: Literal["plain", "secure"]


def share_bins(max_bin: int, n_rows: Mapping[str, int]) -> dict[str, int]:
    """Bins of each party: its share of ``max_bin`` by rows, at least 2 (line 36: 1/epsilon_i)."""
    total = sum(n_rows.values())
    return {
        party: max(FEWEST_BINS, round(max_bin * count / total)) for party, count in n_rows.items()
    }


class PlainSums:
    """Each party's sums reach the server; ``settings`` returns the current settings."""

    begins_anew = True  # whether a round restarts when a party is lost; else its trees end

    def __init__(
        self, settings: Callable[[], Settings], own: PaxSettings, warn: Callable[[str], None]
    ) -> None:
        self._settings, self._own, self._warn, self._bins = settings, own, warn, own.bins
        self.places: dict[str, Ints] = {}  # global bin of each bin of a reply, by party
        self.weights: dict[str, Doubles] = {}  # of a party's bins and all its rows, see ``Claims``
        self._claims: dict[str, HistogramChecks] = {}

    def begin(
        self, parties: Parties[HelloReply], table: CommonTable, terms: Mapping[str, Any]
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
        rules = {"min_child_rows": self._settings().min_child_rows, **terms}
        categories = category_counts(table.categories, len(table.columns))
        sketches = yield from ask(
            {party: SketchRequest(n_bins=n_bins[party], **rules) for party in parties},
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
        coarsest = self._own.fusion == "coarsest"
        if self._own.fusion == "auto":
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
        self, parties: Parties[HelloReply], request: GrowRequest, boosting: Boosting, check: Check
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

    def goes_on(self, parties: Mapping[str, HelloReply]) -> bool:
        """Whether a tree may grow from the last sums after a loss; here rounds restart instead."""
        return True

    def resume(self, parties: Parties[HelloReply]) -> Conversation[None]:
        """Nothing to ask for."""
        yield from ()

    def facts(self) -> dict[str, Any]:
        """Fields for a checkpoint beside ``places``."""
        return {"bins": self._bins}

    def restore(self, places: dict[str, Ints], facts: Mapping[str, Any]) -> None:
        """Undo ``facts``."""
        self.places, self._bins = places, facts["bins"]
