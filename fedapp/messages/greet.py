"""Ask for names before a run opens, so that its plan can name the parties.

Reveals: nothing of the table; a site need not have approved the run.

- The server learns each party's name.
- The server learns the fingerprint of the party's public key, which is the same in every run.
- The server learns the site's time, which Flower sends with each of its messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages.fields import Range, Reply, Request

GROUPS = {"greet": frozenset({"horizontal", "vertical", "inference"})}


@dataclass(frozen=True, slots=True)
class GreetRequest(Request):
    """Ask for the party's name. Not a step of a run: a site stores nothing."""

    kind: ClassVar[str] = "query.greet"
    doing: ClassVar[str] = "meeting the parties"
    leaves: ClassVar[str] = "nothing"
    is_step: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class GreetReply(Reply):
    """A party's name, and the fingerprint that ``fedapp key`` prints."""

    name: Annotated[str, Range(1, 64)]
    fingerprint: Annotated[str, Range(0, 64)]  # empty if simulated
