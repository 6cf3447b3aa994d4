"""How a run opens and ends that predicts with a vertical model, in whichever way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedapp.config import Settings
from fedapp.conversation import Conversation, Model, Parties, ask
from fedapp.errors import ConfigError
from fedapp.messages.explain import MOST_ROWS, ExplainReply, ExplainRequest
from fedapp.messages.vertical import VerticalHelloReply
from strategies.alignment import Aligned, align
from strategies.base import Summary
from strategies.vertical import Mailbox


def check_model(settings: Settings) -> None:
    """Hold that there is a model to predict with, and that rows to be explained have names.

    Raises
    ------
    ConfigError : there is none, or a row has none.
    """
    if not settings.model:
        raise ConfigError("model must be the id of a trained model, got ''")
    if not all(ids := explained_rows(settings)) or len(ids) > MOST_ROWS:
        rule = f"must be ids of up to {MOST_ROWS} rows, parted by commas"
        raise ConfigError(f"explain {rule}, got {settings.explain!r}")


def explained_rows(settings: Settings) -> tuple[str, ...]:
    """Ids of the rows to explain."""
    if not settings.explain:
        return ()
    return tuple(one.strip() for one in settings.explain.split(","))


def align_all(
    parties: Parties[VerticalHelloReply], active: str, mailbox: Mailbox, settings: Settings
) -> Conversation[Aligned]:
    """Find the common rows, all of them to be predicted; say which ones are to be explained."""
    whole = settings.model_copy(update={"test_fraction": 0.0, "valid_fraction": 0.0})
    rows = yield from align(parties, active, mailbox, whole)
    if ids := explained_rows(settings):
        yield from ask(parties.all(ExplainRequest(ids)), ExplainReply)
    return rows


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
