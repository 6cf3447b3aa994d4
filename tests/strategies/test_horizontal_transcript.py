"""What the messages of each horizontal method hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fedapp.messages import fedavg_linear, fedxgbllr, handshake, local_boosting, pax
from fedapp.messages import scoring as booster
from fedapp.settings import Settings
from tests.transcript import check_declared, check_no_rows, listen, summary_of

MakeSettings = Callable[..., Settings]
HELLO = {
    "query.greet": (handshake.GreetRequest, handshake.GreetReply),
    "query.hello": (handshake.HelloRequest, handshake.HelloReply),
}
LABELS = {"query.labels": (handshake.LabelsRequest, handshake.LabelsReply)}
SCORES = {"evaluate.scoring_scores": (booster.EvaluateRequest, booster.EvaluateReply)}
KINDS: dict[str, dict[str, tuple[type, type]]] = {
    "pax": {
        **HELLO,
        "train.pax_sketch": (pax.SketchRequest, pax.SketchReply),
        "train.pax_grow": (pax.GrowRequest, pax.GrowReply),
        **SCORES,
    },
    "bagging": {
        **HELLO,
        **LABELS,
        "train.bagging_boost": (local_boosting.BagRequest, local_boosting.BagReply),
        **SCORES,
    },
    "cyclic": {
        **HELLO,
        **LABELS,
        "train.cyclic_turn": (local_boosting.TurnRequest, local_boosting.TurnReply),
        **SCORES,
    },
    "fedavg-linear": {
        **HELLO,
        "train.fedavg_linear_moments": (fedavg_linear.MomentsRequest, fedavg_linear.MomentsReply),
        "train.fedavg_linear_average": (fedavg_linear.AverageRequest, fedavg_linear.AverageReply),
        "evaluate.fedavg_linear_scores": (fedavg_linear.ScoreRequest, booster.EvaluateReply),
    },
    "fedxgbllr": {
        **HELLO,
        **LABELS,
        "train.fedxgbllr_fit": (fedxgbllr.FitRequest, fedxgbllr.FitReply),
        "train.fedxgbllr_share": (fedxgbllr.ShareRequest, fedxgbllr.ShareReply),
        "train.fedxgbllr_average": (fedxgbllr.AverageRequest, fedxgbllr.AverageReply),
        "evaluate.fedxgbllr_final": (fedxgbllr.FinalRequest, fedxgbllr.FinalReply),
    },
}
UNEVEN = "sizes:0.6,0.3,0.1"
# Two rounds, three parties; the sizes of no array of a reply grow with rows.
OWN: dict[str, dict[str, Any]] = {
    "pax": {"max_bin": 24, "max_depth": 3, "valid_fraction": 0.0},
    "bagging": {"valid_fraction": 0.0, "partition": UNEVEN},
    "cyclic": {"valid_fraction": 0.0, "partition": UNEVEN},
    "fedavg-linear": {"valid_fraction": 0.0, "partition": UNEVEN, "fedavg_linear__rounds": 2},
    "fedxgbllr": {
        "fedxgbllr__trees": 6,
        "fedxgbllr__rounds": 2,
        "fedxgbllr__epochs": 3,
        "fedxgbllr__channels": 8,
    },
}


@pytest.mark.parametrize("method", KINDS)
def test_messages_hold_what_their_modules_list_and_nothing_else(
    settings: MakeSettings, method: str
) -> None:
    _, app = listen(settings(strategy=method, **OWN[method]))
    check_declared(app, KINDS[method])


@pytest.mark.parametrize("method", KINDS)
def test_no_reply_is_as_long_as_the_rows(settings: MakeSettings, method: str) -> None:
    folder, app = listen(settings(strategy=method, **OWN[method]))
    check_no_rows(app, summary_of(folder))
