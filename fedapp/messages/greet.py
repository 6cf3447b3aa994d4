"""Who is there: asked before a run opens, so that its plan can name the parties.

Reveals: the server learns each party's name and the fingerprint of its public key, which is the
same in every run; and the site's time, which Flower sends with each of its messages. Nothing of the
table; a site need not have approved the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages.fields import Range, Reply, Request

GROUPS = {"greet": frozenset({"horizontal", "vertical", "inference"})}


@dataclass(frozen=True, slots=True)
class GreetRequest(Request):
    """Send your name. It is no step of a run: a site keeps nothing of it."""

    kind: ClassVar[str] = "query.greet"
    doing: ClassVar[str] = "meeting the parties"
    leaves: ClassVar[str] = "nothing"
    is_step: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class GreetReply(Reply):
    """A party's name, and the fingerprint that ``fedapp key`` prints."""

    name: Annotated[str, Range(1, 64)]
    fingerprint: Annotated[str, Range(0, 64)]  # empty if simulated
