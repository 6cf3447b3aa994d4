"""Parts that runs with secure aggregation share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fedapp import metrics
from fedapp.conversation import Check, Conversation, Parties, ask
from fedapp.data.partition import SUBSETS
from fedapp.errors import ConfigError
from fedapp.histograms.fixed_point import Bounds, Whole, from_fixed
from fedapp.messages.fields import fields_of
from fedapp.messages.handshake import HelloReply, LabelsReply
from fedapp.messages.scoring import EvaluateReply, EvaluateRequest, SumScoresRequest
from fedapp.messages.secagg import EVERYONE, LeftReply, LeftRequest
from fedapp.metrics import is_custom
from fedapp.metrics.sums import WholeNumbers, read_sums
from fedapp.settings import Settings
from fedapp.trees.objective import CUSTOM, label_power, n_outputs
from strategies.secure import MaskedSums, exchange_keys

FEWEST_PRIVATE = 3  # parties: of two, each can subtract its part from the sum


def check_secured(settings: Settings, setting: str) -> None:
    """Check that a run's sums may be masked; ``setting`` is the one that asks for it.

    Raises
    ------
    ConfigError : min-parties is at most half; early stopping would disclose one round's scores
        with and without a lost party; or a function has sums without known bounds.
    """
    fewest, masked = settings.parties // 2 + 1, f"{setting}=secure"
    if settings.min_parties:
        if settings.asked_parties and settings.min_parties < fewest:
            rule = f"must be 0 or >= {fewest} of {settings.parties} with {masked}"
            raise ConfigError(f"min-parties {rule}, got {settings.min_parties}")
        if settings.early_stopping_rounds:
            rule = f"must be 0 with {masked} and early-stopping-rounds"
            raise ConfigError(f"min-parties {rule}, got {settings.min_parties}")
    if settings.objective == CUSTOM or any(map(is_custom, settings.eval_metrics)):
        raise ConfigError(
            f"{setting} must be plain where objective or eval-metric is a function, whose "
            "sums have no known bounds, got secure"
        )


def secured_plan(settings: Settings, aggregation: str) -> dict[str, Any]:
    """The fields of a run's plan about secure aggregation."""
    threshold = settings.min_parties if aggregation == "secure" else 0
    return {"aggregation": aggregation, "threshold": threshold}


class SecuredRun:
    """Secure aggregation of a run, from the handshake to the scores of its model.

    ``settings`` returns the current settings; ``setting`` names the one that asks for masks.
    """

    def __init__(
        self, settings: Callable[[], Settings], setting: str, warn: Callable[[str], None]
    ) -> None:
        self._settings, self._setting, self._warn = settings, setting, warn
        self.bounds = Bounds(1)  # of the rows of all parties
        self.sums = MaskedSums()  # over the parties that are still present
        self._n_classes = 0

    def meet(
        self, parties: Parties[HelloReply], n_classes: int
    ) -> Conversation[tuple[dict[str, Any], bool]]:
        """The fields of a ``Roster``, and whether any party has weights."""
        if len(parties) < FEWEST_PRIVATE:
            self._warn(
                f"{self._setting}=secure hides little among {len(parties)}: the coordinator and "
                "all parties but one see what that one sends; three or more hide it better"
            )
        threshold = self._settings().min_parties
        roster, self.bounds, weighted = yield from exchange_keys(parties, threshold)
        self.sums, self._n_classes = MaskedSums(roster["names"], threshold), n_classes
        return roster, weighted

    def resume(self, parties: Parties[HelloReply]) -> Conversation[None]:
        """In a resumed run, exclude parties that any party reports as lost."""
        if not self.sums.threshold:
            return
        replies = yield from ask(parties.all(LeftRequest()), LeftReply)
        for name in tuple(parties):
            if any(name not in reply.names for reply in replies.values()):
                parties.leave(name)
                self._warn(f"{name} was lost before the run was resumed, and stays excluded")

    def facts(self) -> dict[str, Any]:
        """Bounds and parties, for a checkpoint."""
        return {
            "bounds": asdict(self.bounds),
            "n_classes": self._n_classes,
            "names": self.sums.names,
            "threshold": self.sums.threshold,
        }

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Undo ``facts``."""
        self.sums = MaskedSums(tuple(facts["names"]), facts["threshold"])
        self.bounds, self._n_classes = Bounds(**facts["bounds"]), facts["n_classes"]

    @property
    def n_outputs(self) -> int:
        """Margins of a row."""
        return n_outputs(self._settings().objective, self._n_classes)

    def labels(self, sums: Whole, unseen: Whole) -> LabelsReply:
        """A reply from sums of labels and weights, shape (n_outputs + 1,), and unseen values."""
        power = label_power(self._settings().objective, self._n_classes, self.bounds)
        label_sums = from_fixed(sums[:-1], self.bounds.exponent(power))
        (weight_sum,) = from_fixed(sums[-1:], self.bounds.exponent(0)).tolist()
        return LabelsReply(label_sums, weight_sum, unseen)

    def score_shapes(self, subsets: Sequence[str], n_bins: int) -> list[tuple[int, ...]]:
        """Shapes of the sums and the histogram of each subset's scores."""
        form, _ = self._form(n_bins)
        return [form.sums.shape, form.histogram.shape] * len(subsets)

    def scores(self, arrays: Sequence[Whole]) -> list[Any]:
        """Score sums and histograms as doubles; empty arrays where none were asked for."""
        if not arrays[0].size:
            return [np.empty(array.shape) for array in arrays]
        _, adder = self._form(n_bins=2)
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        return [array for sums, cells in pairs for array in read_sums(sums, adder, cells)]

    def score(
        self,
        parties: Parties[HelloReply],
        request: EvaluateRequest,
        check: Check,
        masked: type[SumScoresRequest] = SumScoresRequest,
    ) -> Conversation[dict[str, EvaluateReply]]:
        """Sums of the finished model's scores; ``masked`` is the class that asks for them."""
        shapes = self.score_shapes(SUBSETS, request.score_bins)
        asking = masked(**fields_of(request), among=self.sums.among)
        summed = yield from self.sums.ask(parties, asking, *shapes)
        reply = EvaluateReply(*self.scores(summed))
        check(EVERYONE, reply)
        return {EVERYONE: reply}

    def _form(self, n_bins: int) -> tuple[metrics.Statistics, WholeNumbers]:
        """Statistics of no rows, whose shapes are those of any, and the adder for them."""
        settings, adder = self._settings(), WholeNumbers(self.bounds)
        nothing = np.empty((0, self.n_outputs), np.float32), *(np.empty(0, np.float32),) * 2
        extra = settings.eval_metrics
        form = metrics.statistics(settings.objective, *nothing, n_bins, extra=extra, adder=adder)
        return form, adder
