"""How a run opens and ends that predicts with a vertical model, in whichever way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedapp.config import Settings
from fedapp.conversation import Conversation, Model, Parties
from fedapp.errors import ConfigError
from fedapp.messages.vertical import VerticalHelloReply
from strategies.alignment import Aligned, align
from strategies.base import Summary
from strategies.vertical import Mailbox


def check_model(settings: Settings) -> None:
    """Hold that there is a model to predict with.

    Raises
    ------
    ConfigError : there is none.
    """
    if not settings.model:
        raise ConfigError("model must be the id of a trained model, got ''")


def align_all(
    parties: Parties[VerticalHelloReply], active: str, mailbox: Mailbox, settings: Settings
) -> Conversation[Aligned]:
    """Find the common rows; all of them are to be predicted."""
    whole = settings.model_copy(update={"test_fraction": 0.0, "valid_fraction": 0.0})
    return (yield from align(parties, active, mailbox, whole))


def predicted(
    settings: Settings, active: str, rows: Aligned, n_trees: int, more: Mapping[str, Any]
) -> Conversation[Summary]:
    """What the run's folder says: which model, of which rows; the predictions lie elsewhere."""
    yield Model({"model.json": f'{{"format":1,"kind":"model","id":"{settings.model}"}}\n'})
    return {
        "metrics": {},
        "active": active,
        "matched_rows": {"predicted": rows.n_train},
        "trees": n_trees,
        **more,
        "best_round": None,
        "importance": {},
    }
