"""Means of linear models over all parties together, of which the server sees no party's own.

Parties send whole numbers under masks: first how large the values of each column are, to powers of
two; then sums of the inputs, and of squared deviations from the means of all rows; and after each
round their models, each by its share of the weight of all rows. So the standardisation is the same
for any split of the rows, and a round's mean does not depend on the order of the parties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedapp.config import Settings
from fedapp.conversation import Check, Conversation, Parties
from fedapp.crypto.fixed_point import power_above
from fedapp.data.partition import WATCHED
from fedapp.errors import DataError
from fedapp.linear_sums import (
    N_POWERS,
    largest_powers,
    of_inputs,
    read_model,
    read_squares,
    read_values,
)
from fedapp.messages.fedavg_linear import (
    AverageReply,
    AverageRequest,
    AverageSumsRequest,
    MeansRequest,
    MomentsReply,
    MomentsRequest,
    OpenRequest,
    ScoreRequest,
    ScoreSumsRequest,
    SpreadsRequest,
)
from fedapp.messages.fields import fields_of
from fedapp.messages.hello import HelloReply
from fedapp.messages.scoring import EvaluateReply
from fedapp.messages.secure import EVERYONE
from fedapp.trees.sets import category_counts
from strategies.horizontal import CommonTable
from strategies.secured import SecuredRun


class MaskedAverages:
    """All parties together answer as one, in whose name stands ``EVERYONE``; methods as of
    ``PlainAverages``, arguments as of ``SecuredRun``."""

    def __init__(
        self, settings: Callable[[], Settings], setting: str, warn: Callable[[str], None]
    ) -> None:
        self._settings, self._run = settings, SecuredRun(settings, setting, warn)
        self._weight_power = 0

    def begin(
        self,
        parties: Parties[HelloReply],
        table: CommonTable,
        request: MomentsRequest,
        check: Check,
    ) -> Conversation[dict[str, MomentsReply]]:
        """Meet; then means, then spreads around them. A party that is lost here ends the run."""
        roster, _ = yield from self._run.meet(parties, len(table.classes))
        sums, bounds = self._run.sums, self._run.bounds
        is_number = category_counts(table.categories, len(table.columns)) == 0
        terms = fields_of(request)
        of_labels, unseen, counts = yield from sums.ask(
            parties,
            OpenRequest(**roster, **terms),
            (self._run.n_outputs + 1,),
            (table.n_coded_columns,),
            (int(is_number.sum()), N_POWERS),
            may_fail=0,
        )
        labels, powers = self._run.labels(of_labels, unseen), largest_powers(counts, is_number)
        self._weight_power = power_above(labels.weight_sum)
        of_each = of_inputs(powers, table.categories)
        wanted = MeansRequest(powers)
        (values,) = yield from sums.ask(parties, wanted, (2, 2, len(of_each)), may_fail=0)
        weights, means = read_values(values, of_each, bounds)
        around = SpreadsRequest(means)
        (squares,) = yield from sums.ask(parties, around, (2, len(of_each)), may_fail=0)
        reply = MomentsReply(
            label_sums=labels.label_sums,
            weight_sum=labels.weight_sum,
            unseen=labels.unseen,
            counts=weights,
            means=means,
            squares=read_squares(squares, of_each, bounds),
        )
        check(EVERYONE, reply)
        return {EVERYONE: reply}

    def train(
        self, parties: Parties[HelloReply], request: AverageRequest, check: Check
    ) -> Conversation[dict[str, AverageReply]]:
        """The mean of the models of those that are left."""
        run = self._run
        run.sums.without_lost(parties)
        told = fields_of(request)
        n_inputs, width = request.weights.shape
        weight, models, *scores = yield from run.sums.ask(
            parties,
            AverageSumsRequest(**told, among=run.sums.among, weight_power=self._weight_power),
            (1,),
            (n_inputs + 1, width),
            *run.score_shapes(WATCHED, request.score_bins),
        )
        if not weight[0] > 0:
            raise DataError("weight must be > 0 in some row of some party")
        rest = self._weight_power, self._settings().objective, run.bounds
        theta = read_model(models, int(weight[0]), *rest)
        reply = AverageReply(theta[:-1], theta[-1], *run.scores(scores))
        check(EVERYONE, reply)
        return {EVERYONE: reply}

    def score(
        self, parties: Parties[HelloReply], request: ScoreRequest, check: Check
    ) -> Conversation[dict[str, EvaluateReply]]:
        """Sums of the finished model's scores."""
        return (yield from self._run.score(parties, request, check, ScoreSumsRequest))

    def resume(self, parties: Parties[HelloReply]) -> Conversation[None]:
        """Go on with those who were there when the last start of the server ended."""
        yield from self._run.resume(parties)

    def facts(self) -> dict[str, Any]:
        """What follows from what the parties have said of their rows, and who they are."""
        return {**self._run.facts(), "weight_power": self._weight_power}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Undo ``facts``."""
        self._run.restore(facts)
        self._weight_power = facts["weight_power"]
