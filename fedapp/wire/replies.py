"""What a party answered, read from the message that came back."""

from __future__ import annotations

from typing import TypeVar

from flwr.app import Error, Message

from fedapp.errors import DivergedError, FedappError, PartyError, as_plain, blaming
from fedapp.messages.fields import Reply
from fedapp.messages.parcels import Parcel
from fedapp.wire.codec import DIVERGED, FAILED, REFUSED, WAITING, from_records
from fedapp.wire.content import enclosed, put_together

R = TypeVar("R", bound=Reply)
LONGEST_REASON = 2000  # letters


def read_reply(
    message: Message, party: str, reply: type[R], model_id: str, step: int
) -> tuple[R, list[Parcel]]:
    """A party's reply, decoded and checked, and the parcels that came with it.

    Parameters
    ----------
    message : what came back.
    party : that was asked.
    reply : the class it must have.
    model_id, step : that it must answer.

    Raises
    ------
    PartyError : the party refused or failed, or answered another exchange.
    DivergedError : its gradients or trees have left float32.
    ProtocolError : the content breaks a rule of its class.
    """
    if message.has_error():
        raise _failure(message.error, party, step)
    envelope, content = from_records(message.content, party)
    if (envelope.model_id, envelope.step) != (model_id, step):
        raise PartyError(party, step, f"answered step {envelope.step} of another exchange")
    found = put_together(reply, content, party)
    with blaming(party, content.name, "parcels"):
        return found, enclosed(content)


def _failure(error: Error, party: str, step: int) -> FedappError:
    """Whose failure a reply in error tells of, and why."""
    reason = as_plain(error.reason or "", LONGEST_REASON)
    if error.code == DIVERGED:
        return DivergedError(reason)
    if error.code in (REFUSED, FAILED, WAITING):
        name, _, reason = reason.partition(": ")
        return PartyError(name, step, reason, refused=error.code == REFUSED)
    last_line = (error.reason or "").strip().rpartition("\n")[2]
    told = as_plain(last_line, LONGEST_REASON) or f"error code {error.code}"
    return PartyError(party, step, told)
