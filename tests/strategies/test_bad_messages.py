"""Values that no honest party or coordinator sends end the run by a named error."""

import numpy as np
import pytest

from fedapp.client_app import SiteApp
from fedapp.errors import FedappError
from fedapp.messages.wire import from_records, to_records
from tests.moments import changed
from tests.network import run
from tests.tampering import refuses, rewrite_letters

BINARY, NUMBERS = "binary:logistic", "reg:squarederror"
RUNS = {
    "secureboost": {},
    "federated-forest": {"align": "ordered", "federated_forest__trees": 2},
    "fedavg-linear": {"fedavg_linear__rounds": 1},
    "fedxgbllr": {"fedxgbllr__trees": 2, "fedxgbllr__rounds": 1, "fedxgbllr__channels": 2},
}


class Rewriting(SiteApp):
    """Sites whose requests of a kind arrive with other fields, or whose replies do.

    Parameters
    ----------
    kind : how the kind of the message ends.
    changes : of fields of the message of a class.
    """

    def __init__(self, kind, name, changes):
        super().__init__()
        self._kind, self._name, self._changes = kind, name, changes

    def __call__(self, message, context):
        is_it = message.metadata.message_type.endswith(self._kind)
        if is_it:
            self._rewrite(message)
        reply = super().__call__(message, context)
        if is_it and not reply.has_error():
            self._rewrite(reply)
        return reply

    def _rewrite(self, message):
        envelope, content = from_records(message.content, "sender")
        message.content = to_records(changed(content, self._name, self._changes), envelope)


def all_are(value):
    """Every number of an array has this value."""
    return lambda array: np.full_like(array, value)


# Of a method and objective: kind and class of a message, its fields' changes, and the error.
REFUSED = {
    "a model of other bytes": (
        *("secureboost", BINARY, "_finish", "FinishReply", {"model": all_are(255)}),
        "^party-1: FinishReply.model .*can't decode byte",
    ),
    "a criterion that is none": (
        *("federated-forest", BINARY, "_setup", "SetupRequest", {"criterion": lambda _: "gin"}),
        "^party-1.*: SetupRequest.criterion must be one of",
    ),
    "means past all columns": (
        *("fedavg-linear", BINARY, "_moments", "MomentsReply", {"means": all_are(1e308)}),
        "^party-1: MomentsReply.means must be within float32",
    ),
    "means past all rows": (
        *("fedavg-linear", NUMBERS, "_average", "AverageRequest"),
        {"means": all_are(1e308), "scales": all_are(1e-300)},
        "^party-1: gradients must be finite",
    ),
    "a bias past float32": (
        *("fedavg-linear", NUMBERS, "_average", "AverageRequest", {"bias": all_are(1e300)}),
        "^party-1: gradients must be finite",
    ),
    "a head past float32": (
        *("fedxgbllr", NUMBERS, "_average", "AverageRequest", {"weights": all_are(3e38)}),
        "^party-1.*: message.model margins must be finite",
    ),
    "a unit of nothing": (
        *("fedxgbllr", NUMBERS, "_share", "ShareRequest", {"unit": lambda _: 1e-320}),
        "^party-1.*: ShareRequest.unit must be 1e-37 to",
    ),
    "a base score of 1": (
        *("fedxgbllr", BINARY, "_share", "ShareRequest", {"base_score": all_are(1)}),
        "^party-1.*: ShareRequest.base_score must be between 0 and 1",
    ),
    "rates past all": (
        *("fedxgbllr", BINARY, "_final", "FinalReply", {"rates": all_are(1e308)}),
        r"^party-1: FinalReply.rates must be within 1e\+100",
    ),
}


@pytest.mark.by_default("secureboost-*", "federated-forest-*", "fedavg-linear-*", "fedxgbllr-a *")
@pytest.mark.parametrize(
    ("strategy", "objective", "kind", "name", "changes", "match"),
    REFUSED.values(),
    ids=[f"{row[0]}-{name}" for name, row in REFUSED.items()],
)
def test_values_that_nobody_honest_sends_end_the_run_by_a_named_error(
    made, strategy, objective, kind, name, changes, match
):
    with pytest.raises(FedappError, match=match):
        run(
            made(strategy, objective, 60, parties=2, **RUNS[strategy]),
            app=Rewriting(kind, name, changes),
        )


def test_codes_of_labels_past_all_are_refused_by_their_receiver(made, monkeypatch):
    rewrite_letters(monkeypatch, "Labels", "codes", all_are(1e300))
    refuses(
        "^party-1.*: Labels.codes must be",
        made(
            "federated-forest", NUMBERS, 60, parties=2, align="ordered", federated_forest__trees=2
        ),
    )
