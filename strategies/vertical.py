"""What runs of vertical parties share: roles, and the parcels that the server passes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from fedapp.config import Settings
from fedapp.conversation import Check, Conversation, Model, Parties, ask
from fedapp.crypto.keys import SMALLEST_BITS
from fedapp.errors import ConfigError, DataError, FedappError, ProtocolError
from fedapp.messages.fields import Array, Reply, Request
from fedapp.messages.parcels import Parcel, Parcels, pack_parcels, unpack_parcels
from fedapp.messages.vertical import VerticalHelloReply, VerticalHelloRequest
from fedapp.trees.parts import PARTS
from strategies.base import TreeStrategy

FEWEST_PARTIES = 2

R = TypeVar("R", bound=Reply)


class VerticalStrategy(TreeStrategy[VerticalHelloReply]):
    """A strategy whose parties have different columns of the same rows; one has the labels."""

    introduction = VerticalHelloReply
    reads = frozenset(("columns", "align", "align-most-rows", "share-column-names"))

    def greeting(self) -> VerticalHelloRequest:
        """Read the table, and the ids by which rows are matched."""
        settings = self.settings
        return VerticalHelloRequest(
            settings.align == "psi", settings.align_most_rows, settings.seed, settings.model
        )

    def _leave_out(self, party: str, error: FedappError) -> None:
        """Stop: a model of columns cannot go on without some of them, whatever ``min-parties``."""
        raise error


def active_party(parties: Parties[VerticalHelloReply]) -> str:
    """Name of the party that has the labels.

    Raises
    ------
    ConfigError : there is one party only.
    DataError : none has labels, or several have, or a passive party has no columns.
    """
    if len(parties) < FEWEST_PARTIES:
        raise ConfigError(f"parties must be >= {FEWEST_PARTIES}, got {len(parties)}")
    active = [name for name, hello in parties.items() if hello.active]
    if len(active) != 1:
        found = ", ".join(active) if active else "none"
        raise DataError(f"label must be a column at one party, got {found}")
    for name, hello in parties.items():
        if not hello.n_columns and name != active[0]:
            raise DataError("table must have a feature, got none", name)
    return active[0]


def check_key_bits(key_bits: int, insecure_small_key: bool, section: str) -> None:
    """Refuse a key that could be broken, unless that is asked for.

    Raises
    ------
    ConfigError : fewer than 2048 bits.
    """
    if key_bits < SMALLEST_BITS and not insecure_small_key:
        rule = f"must be >= {SMALLEST_BITS} without {section}.insecure-small-key"
        raise ConfigError(f"{section}.key-bits {rule}, got {key_bits}")


class Mailbox:
    """Roles, and parcels on their way, by receiver, in the order in which they came.

    Parameters
    ----------
    parties : all; nobody else gets mail.

    Attributes
    ----------
    active : the party that has the labels.
    passive : the others, in the order of the names.

    Raises
    ------
    ConfigError, DataError : see ``active_party``.
    """

    def __init__(self, parties: Parties[VerticalHelloReply]) -> None:
        self.active = active_party(parties)
        self.passive = tuple(party for party in parties if party != self.active)
        self._waiting: dict[str, list[Parcel]] = {party: [] for party in parties}

    def relay(
        self,
        kind: Callable[..., Request],
        to: Iterable[str],
        reply: type[R],
        check: Check | None = None,
        seconds: float | None = None,
        **given: Any,
    ) -> Conversation[dict[str, R]]:
        """Pass on what waits for these parties, and take what they send.

        Parameters
        ----------
        kind : of the requests, which have the fields of ``Parcels`` and the given ones.
        reply, check, seconds : see ``fedapp.conversation.Exchange``.
        """
        requests = {party: kind(**self.fields_for(party), **given) for party in to}
        replies = yield from ask(requests, reply, check, seconds=seconds)
        self.collect(replies)
        return replies

    def collect(self, replies: Mapping[str, Reply]) -> None:
        """Take what parties have sent.

        Raises
        ------
        ProtocolError : parcels for nobody.
        """
        for sender, reply in replies.items():
            assert isinstance(reply, Parcels)
            try:
                for receiver, content in unpack_parcels(reply):
                    self._waiting[receiver].append((sender, content))
            except (ValueError, KeyError) as error:
                name = type(reply).__name__
                raise ProtocolError(sender, name, "parcels", "must be for parties") from error

    def fields_for(self, party: str) -> dict[str, Any]:
        """The fields of ``Parcels`` with all that waits for a party; it waits no more."""
        parcels, self._waiting[party] = self._waiting[party], []
        return pack_parcels(parcels)

    def clear(self) -> None:
        """Throw everything away."""
        for parcels in self._waiting.values():
            parcels.clear()

    def arrays(self) -> dict[str, Array]:
        """All that waits, to be kept in a checkpoint."""
        kept: dict[str, Array] = {}
        for receiver, parcels in self._waiting.items():
            for place, (sender, content) in enumerate(parcels):
                name = f"parcel {place:06d} {receiver} {sender}"
                kept[name] = np.frombuffer(content, dtype=np.uint8)
        return kept

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Undo ``arrays``; other names are left alone."""
        for name in sorted(arrays):
            if name.startswith("parcel "):
                _, _, receiver, sender = name.split(" ")
                self._waiting[receiver].append((sender, arrays[name].tobytes()))


def named_scores(names: tuple[str, ...], values: Array) -> dict[str, float]:
    """Scores by name; none where there are no rows."""
    return dict(zip(names, values.tolist(), strict=True)) if len(values) else {}


def parts_file(model_id: str, settings: Settings, active: str, passive: Sequence[str]) -> Model:
    """What the run's folder says of a model whose parts stay with the parties."""
    document = {
        "format": 1,
        "kind": PARTS,
        "method": settings.strategy,
        "model_id": model_id,
        "objective": settings.objective,
        "active": active,
        "passive": list(passive),
    }
    return Model({"model.json": json.dumps(document, separators=(",", ":")) + "\n"})
