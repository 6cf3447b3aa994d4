"""Protocols without an engine: generators that send requests to parties and receive their replies.

::

    counts = yield from ask(parties.all(CountRequest()), CountReply)

Nothing here does I/O, so the same protocol runs under Flower, in process, or in a test that answers
by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fedapp.messages.fields import Reply, Request
from fedapp.messages.vertical import Parcel

R = TypeVar("R", bound=Reply)
Check = Callable[[str, Any], None]  # party, reply
S = TypeVar("S")
T = TypeVar("T")


class Relay(Protocol):
    """Passes parcels from the replies of parties to the next requests to others."""

    def take(self, receiver: str) -> list[Parcel]:
        """Remove and return all parcels that wait for a party."""

    def collect(self, sender: str, parcels: Iterable[Parcel]) -> None:
        """Accept a party's parcels. Raises a ValueError if one has no receiver."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """Requests that are sent together, and the class of the replies."""

    requests: Mapping[str, Request]
    reply: type[Reply]
    check: Check | None = None  # raises a ProtocolError where a party's reply does not fit
    may_fail: int | None = None  # replies that may be missing; None: by the settings of the run
    relay: Relay | None = None  # of the letters between parties in these messages


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """All a protocol needs to resume.

    Parameters
    ----------
    state : a record (``fedapp.records.codec``). What its fields refer to is never changed in place;
        fields may be assigned afterwards.
    rounds : finished rounds, with which a run may end that diverges afterwards; 0 if with none.
    model : gives the model so far as in ``model.json``; None where the server has no model.
    is_optional : whether it need not be stored if the last one is recent.
    """

    state: object
    rounds: int = 0
    model: Callable[[], str] | None = None
    is_optional: bool = False


class Saved(Protocol):
    """The state of the last checkpoint of an earlier attempt."""

    def read(self, kind: type[S]) -> S:
        """The state, of this class; raises DataError if another version of fedapp wrote it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Scores after a boosting round, numbered from 1."""

    round: int
    n_trees: int
    n_leaves: int
    train: Mapping[str, float]
    valid: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class SavedModel:
    """The finished model: text files of the run's folder by name, first the model itself."""

    files: Mapping[str, str]


Step = Exchange | Checkpoint | Progress | SavedModel
Conversation = Generator[Step, Mapping[str, Reply], T]


def ask(
    requests: Mapping[str, Request],
    reply: type[R],
    check: Check | None = None,
    may_fail: int | None = None,
    relay: Relay | None = None,
) -> Conversation[dict[str, R]]:
    """Send requests and wait for the replies; parameters as of ``Exchange``.

    Returns replies by party, in the order of the names, without parties that were excluded.
    """
    replies = yield Exchange(requests, reply, check, may_fail, relay)
    checked = {}
    for party in sorted(replies):
        answer = replies[party]
        assert isinstance(answer, reply), f"{party} answered {type(answer).__name__}"
        checked[party] = answer
    return checked


class Parties(Mapping[str, T]):
    """The parties of a run in the order of their names, each with its introduction.

    A party that fails may leave; it never comes back.
    """

    def __init__(self, members: Mapping[str, T]) -> None:
        self._members = {name: members[name] for name in sorted(members)}

    def __getitem__(self, name: str) -> T:
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._members))

    def __len__(self) -> int:
        return len(self._members)

    def all(self, request: Request) -> dict[str, Request]:
        """The same request for every party."""
        return dict.fromkeys(self, request)

    def leave(self, name: str) -> None:
        """Continue without a party."""
        del self._members[name]
