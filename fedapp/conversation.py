"""The engine-free form of a protocol: a generator that asks parties and receives their replies.

::

    counts = yield from ask(parties.all(CountRequest()), CountReply)

Nothing here does I/O, so the same protocol runs under Flower, in process, or in a test that answers
by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fedapp.messages.fields import Array, Reply, Request
from fedapp.messages.parcels import Parcel

R = TypeVar("R", bound=Reply)
Check = Callable[[str, Any], None]  # party, reply
T = TypeVar("T")


class Relay(Protocol):
    """Passes parcels on, from the replies of parties to the next requests to others."""

    def take(self, receiver: str) -> list[Parcel]:
        """All that waits for a party; it waits no more."""

    def collect(self, sender: str, parcels: Iterable[Parcel]) -> None:
        """What a party has sent. Raises a ValueError where some is for nobody."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """Requests that go out together, and the class of the replies.

    Parameters
    ----------
    requests : one a party, by name.
    reply : the class all replies must have.
    check : raises a ProtocolError where a party's reply does not fit its request.
    may_fail : replies that may be missing; None leaves it to the settings of the run.
    seconds : the exchange may take, with those of the same phase that follow; None where only one
        like it before could tell.
    relay : of the letters that the messages carry, where parties write to each other.
    """

    requests: Mapping[str, Request]
    reply: type[Reply]
    check: Check | None = None
    may_fail: int | None = None
    seconds: float | None = None
    relay: Relay | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """All a protocol needs to go on from here: arrays by name, and facts that JSON can hold.

    ``model`` gives the model so far as ``model.json`` has it; None where the server has no model.
    """

    arrays: Mapping[str, Array]
    facts: Mapping[str, Any]
    model: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Scores after a boosting round, numbered from 1."""

    round: int
    n_trees: int
    n_leaves: int
    train: Mapping[str, float]
    valid: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class ModelFiles:
    """The finished model: text files of the run's folder by name, the model itself first."""

    files: Mapping[str, str]


Step = Exchange | Checkpoint | Progress | ModelFiles
Conversation = Generator[Step, Mapping[str, Reply], T]


def ask(
    requests: Mapping[str, Request],
    reply: type[R],
    check: Check | None = None,
    may_fail: int | None = None,
    seconds: float | None = None,
    relay: Relay | None = None,
) -> Conversation[dict[str, R]]:
    """Send requests and wait for the replies.

    Parameters
    ----------
    requests, reply, check, may_fail, seconds, relay : see ``Exchange``.

    Returns
    -------
    Replies by party, in the order of the names. A party that was excluded is not among them.
    """
    replies = yield Exchange(requests, reply, check, may_fail, seconds, relay)
    found = {}
    for party in sorted(replies):
        answer = replies[party]
        assert isinstance(answer, reply), f"{party} answered {type(answer).__name__}"
        found[party] = answer
    return found


class Parties(Mapping[str, T]):
    """The parties of a run in the order of their names, each with what it said of itself.

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
        """Go on without a party."""
        del self._members[name]
