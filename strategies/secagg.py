"""Secure aggregation at the server, which sees only sums over all parties."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from fedapp.conversation import Check, Conversation, ask
from fedapp.crypto.masking import n_words, recover_secret, unmasked_sum
from fedapp.errors import ConfigError, ProtocolError, as_protocol_error
from fedapp.histograms.fixed_point import SPARE_BITS, Bounds, Whole, power_above
from fedapp.messages import secagg as messages
from fedapp.messages.fields import Array, Reply, Request, check_sizes
from fedapp.metrics import is_custom
from fedapp.settings import Settings
from fedapp.trees.custom import CUSTOM
from strategies.handshake import Hellos

Seeds = tuple[list[bytes], list[bytes]]  # of masks that were added, and subtracted
R = TypeVar("R", bound=Reply)


def exchange_keys(
    parties: Hellos, threshold: int = 0
) -> Conversation[tuple[dict[str, Any], Bounds, bool]]:
    """The fields of a ``Roster``, bounds of all parties' rows, and whether any has weights.

    Sums need at least ``threshold`` parties; 0: all.
    """
    replies = yield from ask(parties.all(messages.KeysRequest()), messages.KeysReply)
    bounds = row_bounds(parties, max(reply.heaviest for reply in replies.values()))
    fields = {
        "names": tuple(replies),
        "box_keys": np.stack([reply.box_key for reply in replies.values()]),
        "run_keys": np.stack([reply.run_key for reply in replies.values()]),
        **asdict(bounds),
        "threshold": threshold,
    }
    return fields, bounds, any(reply.weighted for reply in replies.values())


def row_bounds(parties: Hellos, heaviest: int = 0) -> Bounds:
    """Bounds on the rows of all parties, whose weights are at most 2 to this power."""
    hellos = parties.values()
    n_rows = sum(hello.n_train + hello.n_valid + hello.n_test for hello in hellos)
    # For regression; where only sums leave, the parties have rounded the range to powers of two.
    largest = max(max(-hello.label_low, hello.label_high) for hello in hellos)
    return Bounds(n_rows, heaviest, power_above(largest))


@dataclass(frozen=True, slots=True)
class Form(Generic[R]):
    """What a request that sums rows is answered by, and how a masked sum is read as the same."""

    reply: type[R]
    shapes: Callable[[], Sequence[tuple[int, ...]]]  # of the sums over all parties
    read: Callable[[Sequence[Whole]], R]
    n_bytes: int = 8  # of each number
    part_of_others: bool = False  # see ``MaskedSums.add``
    # Whether lost parties are not asked for. A last sum that is repeated is over the same parties.
    without_lost: bool = False

    @classmethod
    def of(cls, reply: type[R], *shapes: tuple[int, ...], **more: Any) -> Form[R]:
        """Of a reply whose fields are the sums, one of each shape."""
        return cls(reply, lambda: shapes, lambda sums: reply(*sums), **more)


class PlainSums:
    """Sums of each party, which reach the server as they are."""

    def ask(
        self,
        parties: Hellos,
        request: Request,
        form: Form[R],
        check: Check | None = None,
        may_fail: int | None = None,
    ) -> Conversation[dict[str, R]]:
        """Send the same request to all parties; replies by party."""
        return (yield from ask(parties.all(request), form.reply, check, may_fail))


@dataclass(slots=True)
class MaskedSums:
    """Sums over the parties of a roster that are still present."""

    names: tuple[str, ...] = ()  # the parties of the next sum
    threshold: int = 0  # the smallest number of them; with 0 all must answer, in one exchange

    @property
    def among(self) -> tuple[str, ...]:
        """The parties of the next sum, as the field of a request."""
        return self.names if self.threshold else ()

    def ask(
        self,
        parties: Hellos,
        request: Request,
        form: Form[R],
        check: Check | None = None,
        may_fail: int | None = None,
    ) -> Conversation[dict[str, R]]:
        """As of ``PlainSums``: all parties answer as one, ``EVERYONE``; none if a sum lacks one."""
        if self.threshold and form.without_lost:
            self.names = tuple(name for name in self.names if name in parties)
        if isinstance(request, messages.Among):
            request = replace(request, among=self.among)
        sums = yield from self.add(
            parties,
            request,
            *form.shapes(),
            n_bytes=form.n_bytes,
            part_of_others=form.part_of_others,
            may_fail=may_fail,
        )
        if not sums:
            return {}
        reply = form.read(sums)
        if check is not None:
            check(messages.EVERYONE, reply)
        return {messages.EVERYONE: reply}

    def add(
        self,
        parties: Hellos,
        request: Request,
        *shapes: tuple[int, ...],
        n_bytes: int = 8,
        part_of_others: bool = False,
        may_fail: int | None = None,
    ) -> Conversation[list[Whole]]:
        """Send the same request to all parties, and sum the answers to arrays of these shapes.

        Parameters
        ----------
        n_bytes : of each number.
        part_of_others : whether the sum is a part of the last one, so that no party may be missing;
            if one is, the result is empty.
        may_fail : as of ``ask``.

        Raises
        ------
        ProtocolError : an answer has another length, masks do not cancel, or a party is lost whose
            seeds would remove the masks of one that was lost before.
        """
        sizes = [int(np.prod(shape)) for shape in shapes]
        n_values, n_others = n_words(sum(sizes), n_bytes), max(len(self.among) - 1, 0)
        check = partial(check_sizes, n_values=n_values, n_sealed=n_others)
        replies = yield from ask(parties.all(request), messages.MaskedReply, check, may_fail)
        seeds: Seeds = [], []
        if self.threshold:
            if part_of_others and len(replies) < len(self.names):
                return []
            seeds = yield from self._unmask(replies, may_fail)
        vectors = (reply.masked for reply in replies.values())
        summed = unmasked_sum(vectors, sum(sizes), n_bytes, *seeds)
        most = 2 ** (8 * n_bytes - SPARE_BITS)
        if summed.max(initial=0) > most or summed.min(initial=0) < -most:
            # What is left of a mask is uniform, and so almost surely beyond any sum of rows.
            rule = "must add up to sums of rows: parties are of different runs, or one is missing"
            raise ProtocolError(messages.EVERYONE, "MaskedReply", "masked", rule)
        return arrays_of(summed, shapes)

    def _unmask(
        self, replies: Mapping[str, messages.MaskedReply], may_fail: int | None
    ) -> Conversation[Seeds]:
        """Seeds of the masks that remain in the sum of these answers."""
        # An answer has two kinds of masks. The seed of the self-mask is secret-shared among all
        # parties, and recovered for those that have answered. Each other mask is shared with one
        # party and cancels, except those shared with lost parties: their peers send the seeds now.
        before, names = self.names, tuple(replies)
        lost = [name for name in before if name not in replies]

        def sealed_for(holder: str) -> Array:
            others = [name for name in names if name != holder]
            rows = [replies[name].sealed[_row_of(before, name, holder)] for name in others]
            return np.array(rows, dtype=np.uint8).reshape(-1, messages.SEALED_BYTES)

        requests = {name: messages.UnmaskRequest(names, sealed_for(name)) for name in names}
        check = partial(check_sizes, n_names=len(names), n_lost=len(lost))
        answers = yield from ask(requests, messages.UnmaskReply, check, may_fail)
        self.names = names
        if lost and (silent := [name for name in names if name not in answers]):
            rule = f"must have the masks shared with {', '.join(lost)}; the run can be resumed"
            raise ProtocolError(silent[0], "UnmaskReply", "seeds", rule)
        # Shares are numbered from 1 by the holder's place in the sum.
        holders = {before.index(name) + 1: reply for name, reply in answers.items()}
        enough = dict(list(holders.items())[: self.threshold])
        added, subtracted = list[bytes](), list[bytes]()
        for row, name in enumerate(names):
            with as_protocol_error(name, "UnmaskReply", "shares"):
                shares = {i: reply.shares[row].tobytes() for i, reply in enough.items()}
                added.append(recover_secret(shares))
        for name in names:
            for row, peer in enumerate(lost):
                seeds = added if name < peer else subtracted
                seeds.append(answers[name].seeds[row].tobytes())
        return added, subtracted


def arrays_of(values: Whole, shapes: Sequence[tuple[int, ...]]) -> list[Whole]:
    """Arrays of these shapes that were sent one after the other."""
    parts = np.split(values, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _row_of(names: tuple[str, ...], sender: str, holder: str) -> int:
    """Row of a holder's share in a sender's list, which has none for the sender itself."""
    row = names.index(holder)
    return row - (names.index(sender) < row)


def setting_of(settings: Settings) -> str:
    """Name of the setting that masks the sums of a run."""
    return f"{settings.strategy}.aggregation"


def check_secure_aggregation(settings: Settings) -> None:
    """Check that a run's sums may be masked, as ``setting_of`` asks.

    Raises
    ------
    ConfigError : min-parties is at most half; early stopping or a calibration would disclose one
        round's scores with and without a lost party; or a function has sums without known bounds.
    """
    fewest = settings.parties // 2 + 1
    masked = f"{setting_of(settings)}=secure"
    if settings.min_parties:
        if settings.asked_parties and settings.min_parties < fewest:
            rule = f"must be 0 or >= {fewest} of {settings.parties} with {masked}"
            raise ConfigError(f"min-parties {rule}, got {settings.min_parties}")
        if settings.early_stopping_rounds or settings.calibration != "none":
            other = "early-stopping-rounds" if settings.early_stopping_rounds else "calibration"
            rule = f"must be 0 with {masked} and {other}"
            raise ConfigError(f"min-parties {rule}, got {settings.min_parties}")
    if settings.objective == CUSTOM or any(map(is_custom, settings.eval_metrics)):
        raise ConfigError(
            f"{setting_of(settings)} must be plain where objective or eval-metric is a function, "
            "whose sums have no known bounds, got secure"
        )
