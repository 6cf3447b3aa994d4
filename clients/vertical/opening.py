"""Opening of a vertical run at a party: describe its table, find the common rows, draw a key.

Rows are matched by private set intersection: every party masks every list of ids, the active one
intersects them and sends the others their common rows; then all put these in one order.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from clients.handshake import relevant_versions, site_key, weights_of
from clients.vertical.party import Aligned
from fedapp.crypto.psi import draw_scalar, intersect, mask, mask_ids, places
from fedapp.data.labels import auto_objective, class_names, note_on_measure
from fedapp.data.partition import SUBSETS, Holdout, Split
from fedapp.data.table import Note, Table, notes_on_leaks, notes_on_numbered_ids
from fedapp.errors import ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.messages.fields import Array, fields_of
from fedapp.messages.methods import method_of
from fedapp.messages.vertical import (
    CommonRows,
    MaskedList,
    MaskRequest,
    MatchReply,
    MatchRequest,
    OpenRequest,
    OrderDigest,
    OrderRequest,
    SentReply,
    VerticalHelloReply,
    VerticalHelloRequest,
)
from fedapp.site.account import account_of, planned
from fedapp.site.answer import MODEL_ID
from fedapp.site.mail import (
    Letters,
    Mail,
    begin_session,
    box_key,
    note_greeting,
    run_key,
    store_peers,
)
from fedapp.site.policy import check_subsets
from fedapp.site.register import count_ids
from fedapp.site.roles import Order, role
from fedapp.site.settings import SiteConfig
from fedapp.site.standing import new_rows
from fedapp.site.store import KEEP_DAYS, drop_abandoned, read_part, sent_bits
from fedapp.site.table import (
    check_range,
    common_order,
    fingerprint,
    notes_on_classes,
    order_digest,
    quantiles,
    read_columns,
    read_to_predict,
    row_ids,
    split_common,
    text_for_others,
    unlike_columns,
)
from fedapp.trees.divided import PARTS, ActivePart
from fedapp.trees.objective import AUTO

log = logging.getLogger("fedapp.site")
FEWEST_ROWS = 2  # to train
KEY_BYTES = 32
LEFT_OUT = len(SUBSETS)  # in place of a subset's number, of rows that are not used
LEAST_MATCHED = 0.1  # of another party's ids; a site warns of fewer


@dataclass(frozen=True, slots=True)
class Described:
    """What a party reports of its table; a change of the table shows in its fingerprint only."""

    n_table: int
    n_columns: int
    active: bool
    objective: str
    n_unlike: int
    simulated: bool
    versions: tuple[str, ...]
    pairwise: bool
    notes: tuple[str, ...]


@role
class Opening(Aligned):
    """State of a party from the greeting to the common order of its rows."""

    title = "a party that aligns its rows"
    order = Order(
        {
            VerticalHelloRequest: {OpenRequest},
            OpenRequest: {MaskRequest, MatchRequest, OrderRequest},
            MaskRequest: {MaskRequest, OrderRequest},
        },
        any_time={VerticalHelloRequest},
    )
    described: Described | None = None
    n_table: int  # rows of the table; of a version that is refreshed, with those it has
    ordered: bool  # the rows are in a common order already
    holdout: Holdout
    sizes: Mapping[str, int]  # rows of each party's table
    lists: tuple[str, ...] = ()  # owners of the lists that were masked here, and who sent them
    shuffle: npt.NDArray[np.int64]  # order in which the ids were sent
    scalar: bytes  # the mask

    def hello(self, request: VerticalHelloRequest) -> VerticalHelloReply:
        """Open a run at a site, or answer the handshake again after the server restarted."""
        drop_abandoned(self.folder.parent, KEEP_DAYS)
        try:
            return self._introduce(request)
        except DataError as error:
            if self.config.simulated:
                raise
            log.error("%s", error)
            raise error.for_others(self.config.shares_names) from None

    def _introduce(self, request: VerticalHelloRequest) -> VerticalHelloReply:
        store, first = self.site.store, self.described
        method = method_of(account_of(store).method)
        if method is None or bool(request.model) != method.uses_model:
            rule = "must name a model to predict, and none to train"
            raise ProtocolError(self.name, "VerticalHelloRequest", "model", rule)
        if method.stands and not self.config.standing_address:
            rule = f"must be set in the node config of {self.name}: where its standing process"
            raise ConfigError(f"standing-address {rule} answers, as HOST:PORT")
        reply, table, ids = look(self.config, request)
        if reply.pairwise and not method.pairs:
            rule = "must be one of rows that all parties have, got one of pairs of parties"
            raise ConfigError(f"model {rule}: predict with it interactively")
        n_rows, pairwise = len(ids), reply.pairwise or (method.trains and method.pairs)
        reply = replace(reply, pairwise=pairwise)
        if request.refreshes:
            rows = new_rows(self.name, ids)
            reply, table, ids = replace(reply, n_table=len(rows)), table.take(rows), ids[rows]
            if not len(ids):
                raise DataError("ids must have new ones to be matched, got none")
        if first is None:
            note_greeting(store, request)
            begin_session(store)
            self.model, self.pairwise = request.model, pairwise
            first = self.described = Described(**fields_of(reply, Described))
            self.ids, self.values, self.base_margins = ids, table.values, table.base_margins
            self.n_table = n_rows
            if table.labels is not None:
                self.labels, self.weights = table.labels, weights_of(table)
            if not request.model:
                self.quantiles = quantiles(table.values)
            self.columns, self.kinds = table.columns, table.kinds
            self.categories = table.categories
        key, since = run_key(store), store.answered
        return replace(reply, run_key=key, since=since, **fields_of(first))

    # passive list --(its mask)--> other passive parties in turn --> active --(its mask)--> all
    # active list  --(its mask)--> passive parties in turn ----------------> active         masks
    #
    #     active: which points are in all lists? --(bits)--> each passive party, for its list
    #
    # Pair by pair, the active list goes to each passive party and back, and nowhere else a passive
    # one: it keeps the rows that it shares with the active party, which has those of all pairs.
    #
    # Only the active party sees lists under all masks, so no other party can compare lists. Only
    # its owner knows the order within a list. The subset of a row follows from its place in the
    # common order, which the ids determine; in a simulation with a shared table, from its place
    # there, as in a horizontal run.
    def open_run(self, request: OpenRequest) -> tuple[SentReply, Letters]:
        """Store the other parties' keys, and pass on the local ids, masked."""
        keys, names = (request.box_keys, request.run_keys), request.names
        store_peers(self.config, self.site.store, names, keys, request)
        if request.active not in names:
            raise ProtocolError(self.name, "OpenRequest", "active", "must be among the names")
        if request.n_rows[names.index(self.name)] != len(self.ids):
            rule = "must be the number of local ids"
            raise ProtocolError(self.name, "OpenRequest", "n_rows", rule)
        self.active, self.ordered = request.active, request.ordered
        if self.model:  # else a server could make any party the one that learns
            part = read_part(self.folder.parent / self.model, *PARTS)
            with as_protocol_error(self.name, "OpenRequest", "active"):
                part.check_active(request.active)
        self.sizes = dict(zip(names, request.n_rows.tolist(), strict=True))
        self._check_sizes()
        self.holdout = Holdout(**fields_of(request, Holdout))
        if request.ordered:
            return SentReply(), []
        self.shuffle, self.scalar = _shuffle(len(self.ids)), draw_scalar()
        points = mask_ids(self.ids[self.shuffle].tolist(), self.scalar)
        letter = MaskedList(self.name, 1, points)
        if self.pairwise:
            return SentReply(), self.to_others(letter)
        return SentReply(), [self._passed_on(letter)]

    def mask_list(self, request: MaskRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """At a passive party: mask others' lists."""
        letters: Letters = []
        for sender, letter in mail.each(MaskedList):
            self._check_list(sender, letter)
            points = _masked(sender, letter, self.scalar)
            letters.append(self._passed_on(MaskedList(letter.owner, letter.n_masks + 1, points)))
        return SentReply(), letters

    def match(self, request: MatchRequest, mail: Mail) -> tuple[MatchReply, Letters]:
        """At the active party: intersect all lists, and keep the common rows."""
        everything, n_rows = np.arange(len(self.ids)), len(self.ids)
        rows = dict.fromkeys(self.passive, everything)  # common with each of the others
        bits = dict.fromkeys(self.passive, np.empty(0, np.uint8))
        for group, lists in () if self.ordered else self._lists(mail):
            for name, points in lists.items():
                with as_protocol_error(name, "MaskedList", "points"):
                    intersect([points])
            shared = intersect(list(lists.values()))
            for name in group:
                rows[name] = self.shuffle[places(lists[self.name], shared)]
                is_common = np.zeros(len(lists[name]), dtype=bool)
                is_common[places(lists[name], shared)] = True
                bits[name] = np.packbits(is_common)
        ordered = {name: self._in_order(rows[name]) for name in self.passive if self.pairwise}
        self._keep(self._drawn(everything if self.pairwise else rows[self.passive[0]]))
        key = np.frombuffer(secrets.token_bytes(KEY_BYTES), dtype=np.uint8)
        if self.pairwise:
            self.matched = {
                name: np.flatnonzero(np.isin(self.places, rows[name])) for name in self.passive
            }
            for name, pair in self.matched.items():
                self._check_pair(name, pair)
            self.digests = {name: self._digest(key, pair) for name, pair in self.matched.items()}
        else:
            self.digests = dict.fromkeys(self.passive, self._digest(key))
        subsets = np.full(n_rows, LEFT_OUT, dtype=np.uint8)
        for number, subset in enumerate(SUBSETS):
            subsets[self.places[self.rows_of(subset)]] = number
        letters: Letters = []
        for name in self.passive:
            proof, of_pair = self.order_proof(self.name, name), subsets[ordered.get(name, [])]
            letters.append((name, CommonRows(bits[name], key, proof, of_pair)))
        return MatchReply(self.n_train, self.n_valid, self.n_test), letters

    def _lists(self, mail: Mail) -> Iterator[tuple[list[str], dict[str, Array]]]:
        """All lists under the same masks, with the passive parties that they are common to."""
        # This party masks the others' lists last.
        local, lists = dict[str, Array](), dict[str, Array]()
        for sender, letter in mail.each(MaskedList):
            self._check_list(sender, letter)
            if letter.owner == self.name:
                local[sender] = letter.points
            else:
                lists[letter.owner] = _masked(sender, letter, self.scalar)
        groups = [[name] for name in self.passive] if self.pairwise else [self.passive]
        due, got = {*self.passive}, {*lists}
        is_whole = len(local) == len(groups) and all(
            len(points) == len(self.ids) for points in local.values()
        )
        if got != due or not is_whole:
            missing = min(due - got, default=self.name)
            raise ProtocolError(missing, "MaskedList", "owner", "must be every party once, whole")
        for group in groups:
            # The local list comes back from the last party that has masked it.
            named = {self.name: local[group[-1]], **{name: lists[name] for name in group}}
            yield group, {name: named[name] for name in self.peers if name in named}

    def order_rows(self, request: OrderRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """At a passive party: keep the common rows, if the active one knows their ids."""
        letter, rows = mail.one(CommonRows, self.active), np.arange(len(self.ids))
        if not self.ordered:
            sent = self.active, "CommonRows", "common", letter.common
            rows = self.shuffle[sent_bits(*sent, len(rows))]
        if len(letter.subsets) != self.pairwise * len(rows):
            rule = "must be of the rows of a pair"
            raise ProtocolError(self.active, "CommonRows", "subsets", rule)
        if self.pairwise:
            ordered = self._in_order(rows)
            parts = [ordered[letter.subsets == number] for number in range(len(SUBSETS))]
            self._keep(Split(*parts))
        else:
            self._keep(self._drawn(rows))
        self.digests = {name: self._digest(letter.key) for name in self.partners}
        self.check_proof(self.active, "CommonRows", letter.digest)
        return SentReply(), [
            (name, OrderDigest(self.order_proof(self.name, name))) for name in self.partners
        ]

    def _in_order(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return rows[common_order(self.ids[rows].tolist(), self.holdout.seed)] if len(rows) else rows

    def _drawn(self, rows: npt.NDArray[np.int64]) -> Split:
        """The rows that all have, training, validation and test rows, in the common order."""
        return split_common(rows, self.ids[rows].tolist(), self.holdout, self.config.is_share)

    def _keep(self, split: Split) -> None:
        """Store these rows, in the common order: training, validation, test."""
        rows = np.concatenate([getattr(split, subset) for subset in SUBSETS])
        n_rows = {subset: len(getattr(split, subset)) for subset in SUBSETS}
        if not self.model:
            self._check_counts(n_rows)
        elif not (self.pairwise or planned(self.site.store)["refreshes"]):  # else it may be none
            check_common(len(rows), predicts=True)
        if self.model and self.is_active:
            self.unmatched = np.delete(self.ids, rows)
        if self.model and len(rows) < (fewest := self.config.predict_min_rows):
            limit = f"predict-min-rows of {self.name}"
            rule = f"ids must have {fewest} rows in common at least ({limit}), got {len(rows)}"
            raise DataError(rule)
        if not (self.pairwise and self.is_active):
            self._warn_of_unmatched(len(rows), self.others)
        self.n_train, self.n_valid, self.n_test = n_rows.values()
        self.places, self.ids, self.values = rows, self.ids[rows], self.values[rows]
        if self.labels is not None:
            self.labels, self.weights = self.labels[rows], self.weights[rows]
        if self.base_margins is not None:
            self.base_margins = self.base_margins[rows]
        # No list is masked any more.
        self.shuffle, self.scalar = np.empty(0, np.int64), b""

    def _check_counts(self, n_rows: Mapping[str, int]) -> None:
        """Check that there are enough training rows, and no subset of a few rows."""
        check_common(sum(n_rows.values()), predicts=False)
        fewest = max(self.config.min_rows, int(self.pairwise))
        rule = "ids must have {} {} rows in common at least (min-rows of "
        check_subsets(fewest, n_rows, f"{rule}{self.name}), got {{}}")

    def _check_pair(self, name: str, rows: npt.NDArray[np.int64]) -> None:
        """At the active party: the same of its rows that another one has."""
        if not self.model:
            ends = np.cumsum([self.n_train, self.n_valid, self.n_test])
            counts = np.diff(np.searchsorted(rows, [0, *ends]))
            self._check_counts(dict(zip(SUBSETS, counts.tolist(), strict=True)))
        self._warn_of_unmatched(len(rows), [name])

    def _check_sizes(self) -> None:
        """Check that no list is larger than the opening and this site allow."""
        n_rows, ratio = self.n_table, self.config.align_most_ratio
        limits = {
            "most_rows of the run's opening": planned(self.site.store)["most_rows"],
            f"align-most-rows of {self.name}": self.config.limits["align-most-rows"],
        }
        if self._is_asked:
            limits[f"{ratio} x {n_rows} rows, align-most-ratio of {self.name}"] = ratio * n_rows
        limit = min(limits, key=limits.__getitem__)
        for name in self.others:
            if self.sizes[name] > limits[limit]:
                rule = f"rows of {name} must be <= {limits[limit]} ({limit})"
                raise ConfigError(f"{rule}, got {self.sizes[name]}")

    @property
    def _is_asked(self) -> bool:
        """Whether others may try invented ids on the table.

        An active party that predicts chooses which rows, often few, to match with whole tables.
        """
        return not self.config.simulated and not (self.model and self.is_active)

    def _warn_of_unmatched(self, n_common: int, parties: Sequence[str]) -> None:
        """Warn, here, of lists of which few ids match: they may be invented."""
        for name in parties if self._is_asked and not self.ordered else ():
            if n_common < LEAST_MATCHED * self.sizes[name]:
                log.warning(
                    "%d ids of %s were matched with %d rows of %s, and only %d are common to all: "
                    "whoever invents ids learns in this way which of them the table has",
                    *(self.sizes[name], name, self.sizes[self.name], self.name, n_common),
                )

    def _check_list(self, sender: str, letter: MaskedList) -> None:
        route = self._route(letter.owner, self.name if sender == self.active else sender)
        # All parties before this one on the list's route have masked it, each once.
        masked_by = route[: letter.n_masks]
        if masked_by[-1:] != [sender] or route[letter.n_masks : letter.n_masks + 1] != [self.name]:
            rule = "must be of all parties before this one, the sender the last of them"
            raise ProtocolError(sender, "MaskedList", "n_masks", rule)
        if (masked := f"{letter.owner} {sender}") in self.lists:
            rule = "must be one that had no list yet"
            raise ProtocolError(sender, "MaskedList", "owner", rule)
        if (got := len(letter.points)) != (n_rows := self.sizes[letter.owner]):
            rule = f"must be {n_rows}, as the opening has it of {letter.owner}, got {got}"
            raise ProtocolError(sender, "MaskedList", "points", rule)
        if self._is_asked:
            count_ids(self.config, self.folder.name, letter.owner, got, self.n_table)
        self.lists = (*self.lists, masked)

    def _route(self, owner: str, passive: str) -> list[str]:
        """Parties that get a list, in order: each passive one, then the active one.

        Of a pair only ``passive`` gets it, and the active one; nobody gets an unknown owner's.
        """
        among = [passive] if self.pairwise else self.passive
        if owner == self.active:
            return [self.active, *among, self.active]
        if owner not in among:
            return []
        first = among.index(owner)
        return [*among[first:], *among[:first], self.active]

    def _passed_on(self, letter: MaskedList) -> tuple[str, MaskedList]:
        return self._route(letter.owner, self.name)[letter.n_masks], letter

    def _digest(
        self, key: Array, rows: npt.NDArray[np.int64] | slice = slice(None)
    ) -> npt.NDArray[np.uint8]:
        digest = order_digest(self.ids[rows].tolist(), key.tobytes())
        return np.frombuffer(digest, dtype=np.uint8)


def look(
    config: SiteConfig, request: VerticalHelloRequest
) -> tuple[VerticalHelloReply, Table, npt.NDArray[np.str_]]:
    """Read a site's table and check it against the rules of a run; nothing is stored."""
    table, active, n_unlike, pairwise = _table(config, request)
    ids = row_ids(table, config, request.needs_ids)
    max_rows = min(request.most_rows, config.limits["align-most-rows"])
    if len(ids) > max_rows:
        rule = f"must be >= the rows of every party, {len(ids)} at {config.name}"
        raise ConfigError(f"align-most-rows {rule}, got {max_rows}")
    shares_names = config.shares_names or config.simulated
    notes, suggested = table.notes, ""
    if request.asks_objective and table.labels is not None:
        classes = class_names(table.labels, AUTO)
        suggested = auto_objective([classes])[0]
        if doubt := note_on_measure(classes):
            log.warning("%s: %s", config.name, doubt)  # labels stay here
            notes += (Note(doubt),) if config.simulated else ()
    on_labels = [*notes_on_leaks(table), *notes_on_classes(config, table.labels)]
    for note in () if config.simulated or request.model else on_labels:
        log.warning("%s: %s", config.name, note.text(shares_names=True))  # labels stay here
    if config.label_epsilon and table.labels is not None and not request.model:
        rule = "all labels are randomised, and so are those that scores and early stopping count"
        notes += (Note(f"{rule} (label-epsilon {config.label_epsilon:g})"),)
    if table.ids is not None and request.needs_ids and not config.is_share:
        notes += tuple(notes_on_numbered_ids(config.id_column, table.ids))
    reply = VerticalHelloReply(
        name=config.name,
        n_table=table.n_rows,
        n_columns=len(table.columns),
        columns=table.columns if config.shares_names else (),
        active=active,
        objective=suggested,
        n_unlike=n_unlike,
        box_key=box_key(config.name),
        run_key=np.zeros(32, dtype=np.uint8),  # drawn when the run is stored
        simulated=config.simulated,
        fingerprint=fingerprint({"all": table}, site_key(config.name)),
        versions=tuple(relevant_versions()),
        pairwise=pairwise,
        notes=tuple(text_for_others(config, note, shares_names) for note in notes),
    )
    return reply, table, ids


def _table(config: SiteConfig, request: VerticalHelloRequest) -> tuple[Table, bool, int, bool]:
    """The table, whether the party is active, and how many columns have drifted since training.

    Also whether the model is of pairs of parties.
    """
    if not request.model:
        table = read_columns(config.naming(request.least_rows_per_name), request.seed)
        return table, table.labels is not None, 0, False
    if not MODEL_ID.fullmatch(request.model):
        raise ProtocolError(config.name, "VerticalHelloRequest", "model", "must be 16 hex digits")
    part, table = read_to_predict(config, request.model)
    trained = part.quantiles
    unlike: list[int] = []
    if len(trained):
        check_range(trained, table.values)
        unlike = unlike_columns(trained, table.values)
    if unlike and not config.simulated:
        names = ", ".join(table.columns[column] for column in unlike)
        log.warning("the table to predict has values unlike those trained on in: %s", names)
    return table, isinstance(part, ActivePart), len(unlike), part.pairwise


def check_common(n_rows: int, predicts: bool) -> None:
    """Raise a DataError if the parties have too few rows in common."""
    min_rows = 1 if predicts else FEWEST_ROWS
    if n_rows < min_rows:
        rule = f"ids must have {min_rows} rows in common at least, got {n_rows}"
        raise DataError(f"{rule}: see that all parties write them alike; 7 and 007 differ")


def _masked(sender: str, letter: MaskedList, scalar: bytes) -> Array:
    with as_protocol_error(sender, "MaskedList", "points"):
        return mask(letter.points, scalar)


def _shuffle(n_rows: int) -> npt.NDArray[np.int64]:
    # Sorted by 128 random bits each: the order is secret, so not from a seeded generator.
    drawn = np.frombuffer(secrets.token_bytes(16 * n_rows), dtype=np.uint64)
    return np.lexsort(drawn.reshape(2, n_rows))
