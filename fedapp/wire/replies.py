"""Read a party's reply from the message received."""

from __future__ import annotations

from typing import TypeVar

from flwr.app import Error, Message

from fedapp.errors import DivergedError, FedappError, PartyError, as_plain, as_protocol_error
from fedapp.messages.fields import Reply
from fedapp.messages.vertical import Parcel
from fedapp.messages.wire import (
    DIVERGED,
    FAILED,
    REFUSED,
    WAITING,
    from_content,
    from_records,
    parcels_of,
)

R = TypeVar("R", bound=Reply)
LONGEST_REASON = 2000  # characters


def read_reply(
    message: Message, party: str, reply: type[R], model_id: str, step: int
) -> tuple[R, list[Parcel]]:
    """A party's reply, decoded and checked, and the parcels that came with it.

    Raises a PartyError if the party refused, failed or answered another exchange, a DivergedError
    if its gradients or trees have left float32.
    """
    if message.has_error():
        raise _failure(message.error, party, step)
    envelope, content = from_records(message.content, party)
    if (envelope.model_id, envelope.step) != (model_id, step):
        raise PartyError(party, step, f"answered step {envelope.step} of another exchange")
    decoded = from_content(reply, content, party)
    with as_protocol_error(party, content.name, "parcels"):
        return decoded, parcels_of(content)


def _failure(error: Error, party: str, step: int) -> FedappError:
    reason = as_plain(error.reason or "", LONGEST_REASON)
    if error.code == DIVERGED:
        return DivergedError(reason)
    if error.code in (REFUSED, FAILED, WAITING):
        name, _, reason = reason.partition(": ")
        return PartyError(name, step, reason, refused=error.code == REFUSED)
    # Flower's reason is a traceback; its last line is the error.
    last_line = (error.reason or "").strip().rpartition("\n")[2]
    text = as_plain(last_line, LONGEST_REASON) or f"error code {error.code}"
    return PartyError(party, step, text)
