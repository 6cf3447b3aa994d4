"""Vertical runs: the parties' roles, and the parcels that the server relays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self, TypeVar, cast

import numpy as np
from pydantic import Field

from fedapp.conversation import Check, Conversation, Parties, SavedModel, ask
from fedapp.crypto.paillier_keys import SMALLEST_BITS
from fedapp.data.labels import SUGGESTED
from fedapp.data.partition import SUBSETS, Holdout
from fedapp.errors import ConfigError, DataError, check_rules
from fedapp.messages.fields import MOST_DEPTH, Array, Reply, Request, check_fields, fields_of
from fedapp.messages.vertical import (
    INNER,
    LEFT,
    FinalScores,
    MaskRequest,
    MatchReply,
    MatchRequest,
    OpenRequest,
    OrderRequest,
    Parcel,
    SentReply,
    VerticalHelloReply,
    VerticalHelloRequest,
    block_rows,
)
from fedapp.metrics import rarer_share, threshold_rows
from fedapp.records.codec import IN_FILE
from fedapp.records.document import to_text
from fedapp.sections import HasSections, setting_names
from fedapp.settings import Section, Settings, VerticalSettings
from fedapp.trees.divided import DividedModel
from fedapp.trees.losses import Objective
from fedapp.trees.model import importance_of
from fedapp.trees.objective import AUTO
from strategies.method import TreeStrategy
from strategies.scoring import few_summary, threshold_note

MIN_PARTIES = 2
MANY_PARTIES = 100  # assumed by ``num_rounds`` where ``parties`` is 0
# Which rows are which, and which names of categories leave a party.
HOLDOUT = (
    *("test_fraction", "valid_fraction", "fold", "folds", "score_test"),
    *("group", "test_from", "valid_from", "least_rows_per_name"),
)

R = TypeVar("R", bound=Reply)
Hellos = Parties[VerticalHelloReply]


class VerticalStrategy(TreeStrategy[VerticalHelloReply]):
    """A strategy whose parties have different columns of the same rows; one has the labels."""

    introduction = VerticalHelloReply
    reads = setting_names(VerticalSettings)
    # Whatever ``min-parties``: a lost party's columns cannot be replaced.
    may_lose = False

    @classmethod
    def check_settings(cls, settings: Settings) -> None:
        """As usual; and ``join=left`` needs rows that are matched."""
        super().check_settings(settings)
        rule = "be inner with align=ordered, where all parties have the same rows"
        check_rules(("join", settings.join == INNER or settings.align == "psi", rule, LEFT))

    def greeting(self) -> VerticalHelloRequest:
        """Ask for the table's description, and for the ids by which rows are matched."""
        settings = self.settings
        return VerticalHelloRequest(
            settings.align == "psi",
            settings.align_most_rows,
            settings.seed,
            settings.model,
            asks_objective=settings.objective == AUTO and not settings.model,
            join=settings.join,
            **self.plan(),
            **{name: getattr(settings, name) for name in HOLDOUT if not settings.model},
        )

    @classmethod
    def exchanges_around(cls, settings: Settings) -> int:
        """With the matching of rows, and the traversal of an initial model."""
        n_parties = settings.asked_parties or MANY_PARTIES
        return super().exchanges_around(settings) + n_parties + 2 * MOST_DEPTH

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        """Parties write to each other in sealed letters."""
        return {**super().planned(settings), "aggregation": "sealed"}

    def resolve_objective(self) -> None:
        """As usual; between sites only the party with the labels may set ``positive-label``."""
        if self.settings.positive_label and not self.simulated:
            rule = "must be in the node config or schema of the party with the labels"
            raise ConfigError(f"positive-label {rule}, got it in the run config")
        super().resolve_objective()

    def suggested_objective(self) -> tuple[Objective, str]:
        active = active_party(self.parties)
        objective = cast(Objective, self.parties[active].objective)
        is_one, rule = objective in SUGGESTED, f"must be one of {', '.join(SUGGESTED)}"
        check_fields(active, self.introduction, ("objective", is_one, rule))
        return objective, f"the label at {active} has {SUGGESTED[objective]}"

    def match_rows(self, parties: Hellos) -> Conversation[tuple[Mailbox, dict[str, int]]]:
        """Align the rows; a mailbox with the digests of their order, and the rows by subset."""
        mailbox = Mailbox.of(parties)
        rows = yield from align(parties, mailbox, self.settings, self.settings.holdout)
        self.check_held_out(rows["test"])
        self.warn_of_few_matched(
            {name: counts["matched"] for name, counts in mailbox.matching.items()}
        )
        return mailbox, rows

    def warn_of_few_matched(self, matched: Mapping[str, int]) -> None:
        """Warn of fewer than half of the active party's rows.

        ``matched`` are rows by party, as ``MatchReply.n_matched``.
        """
        n_rows = {name: hello.n_table for name, hello in self.parties.items()}
        most = n_rows[active_party(self.parties)]
        for n_matched in matched.values():
            if n_matched < most / 2:
                counts = ", ".join(f"{count:,} of {party}" for party, count in n_rows.items())
                rule = f"only {n_matched:,} rows are matched, fewer than half, of {counts}"
                self.warn_once(f"{rule}: see that all parties write ids alike (7 and 007 differ)")


def active_party(parties: Hellos) -> str:
    """Name of the only party that has labels; all others must have columns."""
    if len(parties) < MIN_PARTIES:
        raise ConfigError(f"parties must be >= {MIN_PARTIES}, got {len(parties)}")
    active = [name for name, hello in parties.items() if hello.active]
    if len(active) != 1:
        got = ", ".join(active) if active else "none"
        raise DataError(f"label must be a column at one party, got {got}")
    for name, hello in parties.items():
        if not hello.n_columns and name != active[0]:
            raise DataError("table must have a feature, got none", name)
    return active[0]


class KeySettings(Section):
    """Settings of a Paillier key, in the section of every method that has one."""

    key_bits: Annotated[int, Field(ge=256, le=8192)]
    """Bits of Paillier's modulus."""
    insecure_small_key: bool
    """Whether fewer than 2048 bits are allowed, for trials."""

    @classmethod
    def of(cls, settings: HasSections) -> Self:
        """The section; a key that could be broken is refused, unless the settings allow it."""
        section = super().of(settings)
        if section.key_bits < SMALLEST_BITS and not section.insecure_small_key:
            rule = f"must be >= {SMALLEST_BITS} without {cls.table}.insecure-small-key"
            raise ConfigError(f"{cls.table}.key-bits {rule}, got {section.key_bits}")
        return section

    def block_rows(self, n_receivers: int) -> int:
        """Most rows of which each of the receivers gets a ciphertext in one message."""
        return block_rows(-(-self.key_bits // 4), n_receivers)


@dataclass(slots=True, eq=False)
class Mailbox:
    """Roles of the parties, and parcels in transit."""

    active: str
    passive: tuple[str, ...]  # in the order of their names
    waiting: Mapping[str, tuple[tuple[str, Annotated[bytes, IN_FILE]], ...]]  # by receiver
    # Of each party, its rows, those that are matched and, where they were aggregated, those that
    # were read; empty where test rows are left out, which must not be counted.
    matching: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, parties: Hellos) -> Mailbox:
        """An empty mailbox."""
        active = active_party(parties)
        passive = tuple(party for party in parties if party != active)
        return cls(active, passive, dict.fromkeys(parties, ()))

    def relay(
        self,
        kind: Callable[..., Request],
        to: Iterable[str],
        reply: type[R],
        check: Check | None = None,
        **given: Any,
    ) -> Conversation[dict[str, R]]:
        """Send the same request to these parties, with their waiting parcels, and collect theirs.

        ``given`` are the fields of the requests, of class ``kind``; for the other arguments see
        ``fedapp.conversation.Exchange``.
        """
        return (yield from self.relay_each(dict.fromkeys(to, kind(**given)), reply, check))

    def ask_active(
        self,
        kind: Callable[..., Request],
        reply: type[R],
        check: Check | None = None,
        **given: Any,
    ) -> Conversation[R]:
        """As ``relay``, of the active party only; its reply."""
        return (yield from self.relay(kind, [self.active], reply, check, **given))[self.active]

    def relay_each(
        self,
        requests: Mapping[str, Request],
        reply: type[R],
        check: Check | None = None,
    ) -> Conversation[dict[str, R]]:
        """As ``relay``, with a request for each party."""
        return (yield from ask(requests, reply, check, relay=self))

    def relay_blocks(
        self, encrypt: type[Request], take: type[Request], n_blocks: int
    ) -> Conversation[None]:
        """Have the active party encrypt more blocks than the one that waits, the others take all
        but the last."""
        requests: dict[str, Request] = dict.fromkeys(self.passive, take())
        for _ in range(n_blocks):
            # One block is encrypted while the last is taken.
            requests[self.active] = encrypt()
            yield from self.relay_each(requests, SentReply)

    def take(self, receiver: str) -> list[Parcel]:
        """Remove and return all that waits for a party."""
        parcels, self.waiting = self.waiting[receiver], {**self.waiting, receiver: ()}
        return list(parcels)

    def collect(self, sender: str, parcels: Iterable[Parcel]) -> None:
        """Take what a party has sent; refuse parcels for nobody."""
        waiting = dict(self.waiting)
        for receiver, content in parcels:
            if receiver not in waiting:
                raise ValueError("parcels must be for parties")
            waiting[receiver] = (*waiting[receiver], (sender, content))
        self.waiting = waiting

    def clear(self) -> None:
        """Discard all parcels."""
        self.waiting = dict.fromkeys(self.waiting, ())


def named_scores(names: tuple[str, ...], values: Array) -> dict[str, float]:
    """Scores by name; none where there are no rows."""
    if len(values) not in (0, len(names)):
        raise DataError(f"score_names must be {len(values)}, one a score, got {len(names)}")
    return dict(zip(names, values.tolist(), strict=False)) if len(values) else {}


def final_summary(
    reply: FinalScores, mailbox: Mailbox, rows: Mapping[str, int], few: Iterable[Array]
) -> dict[str, Any]:
    """A finished model's part of the summary.

    ``rows`` are the matched rows by subset, ``few`` what parts that have left show of few rows.
    """
    names, gains, counts = reply.column_names, reply.column_gains, reply.column_counts
    if names and len(names) != len(gains):
        raise DataError(f"column_names must be {len(gains)}, one a column, got {len(names)}")
    scores = {
        subset: named_scores(reply.score_names, getattr(reply, f"{subset}_scores"))
        for subset in SUBSETS
    }
    # Of the rarer of two classes in the validation rows, where scores show it.
    share = rarer_share(scores["valid"]) if rows["valid"] else None
    spanned, spans = reply.interval_names, reply.intervals.tolist()
    if len(spanned) != len(spans):
        raise DataError(f"interval_names must be {len(spans)}, got {len(spanned)}")
    return {
        "metrics": scores,
        "intervals": dict(zip(spanned, spans, strict=True)),
        "threshold": threshold_note(scores, threshold_rows(bool(rows["valid"]))),
        **({} if share is None else {"rarer_class": share}),
        "active": mailbox.active,
        "matched_rows": rows,
        "matching": mailbox.matching,
        "importance": importance_of(names, gains, counts) if names else {},
        "few": few_summary(few),
    }


def parts_file(
    model_id: str, settings: Settings, active: str, passive: Sequence[str]
) -> SavedModel:
    """The run folder's file for a model that is divided among the parties."""
    method, objective = settings.strategy, settings.objective
    model = DividedModel(method, model_id, objective, active, tuple(passive))
    return SavedModel({"model.json": to_text(model)})


def align(
    parties: Hellos, mailbox: Mailbox, settings: Settings, holdout: Holdout
) -> Conversation[dict[str, int]]:
    """Private set intersection: every list of ids is masked by every party.

    Takes ``len(parties) + 2`` exchanges. The digests of the order are in the mailbox afterwards:
    each party checks those of the passive ones with the next request that brings it letters.
    Returns the number of common rows by subset.
    """
    ordered = settings.align == "ordered"
    active, passive = mailbox.active, mailbox.passive
    opening = OpenRequest(
        tuple(parties),
        active,
        np.stack([hello.box_key for hello in parties.values()]),
        np.stack([hello.run_key for hello in parties.values()]),
        np.array([hello.n_rows for hello in parties.values()]),
        ordered,
        **fields_of(holdout),
        join=settings.join,
    )
    yield from mailbox.relay_each(parties.all(opening), SentReply)
    for _ in () if ordered else passive:
        yield from mailbox.relay(MaskRequest, passive, SentReply)
    reply = yield from mailbox.ask_active(MatchRequest, MatchReply)
    mailbox.matching = _matching(parties, active, reply)
    yield from mailbox.relay(OrderRequest, passive, SentReply)
    return {subset: getattr(reply, f"n_{subset}") for subset in SUBSETS}


def _matching(parties: Hellos, active: str, reply: MatchReply) -> dict[str, dict[str, int]]:
    counts = reply.n_matched.tolist()
    rule = f"must be {len(parties)}, one a party, got {len(counts)}"
    check_fields(active, reply, ("n_matched", len(counts) in (0, len(parties)), rule))
    return {
        name: {"rows": hello.n_table, "matched": count}
        | ({"read": hello.n_read} if hello.n_read else {})
        for (name, hello), count in zip(parties.items(), counts, strict=False)
    }
