"""Opening of a vertical run at a party: describe its table, find the common rows, draw a key.

Rows are matched by private set intersection: every party masks every list of ids, the active one
intersects them and sends the others their common rows; then all put these in one order.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from clients.handshake import relevant_versions, site_key, weights_of
from clients.vertical.party import Aligned, Subsets
from fedapp.arrays import Ints
from fedapp.crypto.psi import draw_scalar, intersect, mask, mask_ids, places
from fedapp.data.labels import auto_objective, class_names, note_on_measure, notes_on_queries
from fedapp.data.notes import Note, notes_on_numbered_ids
from fedapp.data.partition import LEFT_OUT, SUBSETS, Holdout, Split, split_numbered, split_queries
from fedapp.data.scratch import taken
from fedapp.data.table import Table, notes_on_leaks
from fedapp.errors import WITHHELD, ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.messages.fields import Array, check_fields, fields_of
from fedapp.messages.methods import method_of
from fedapp.messages.vertical import (
    ABSENT,
    INNER,
    LEFT,
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
from fedapp.messages.wire import from_bytes, from_content, to_bytes, to_content
from fedapp.site.account import account_of, planned
from fedapp.site.answer import MODEL_ID
from fedapp.site.labels import drawn_labels
from fedapp.site.mail import (
    Letters,
    Mail,
    begin_session,
    box_key,
    note_greeting,
    run_key,
    store_peers,
)
from fedapp.site.policy import check_memory, check_subsets
from fedapp.site.register import count_ids
from fedapp.site.roles import Order, role
from fedapp.site.rows_to_predict import check_range, quantiles, read_to_predict, unlike_columns
from fedapp.site.settings import SiteConfig
from fedapp.site.standing import new_rows
from fedapp.site.store import KEEP_DAYS, drop_abandoned, sent_bits
from fedapp.site.table import (
    common_order,
    drawn_subsets,
    fingerprint,
    notes_on_classes,
    order_digest,
    read_columns,
    row_ids,
    secret_order,
    split_common,
    split_ordered,
    texts_for_others,
    together,
    with_present_times,
)
from fedapp.trees.divided import ActivePart
from fedapp.trees.objective import AUTO
from fedapp.trees.ranking import queries_of

log = logging.getLogger("fedapp.site")
FEWEST_ROWS = 2  # to train
KEY_BYTES = 32
LEAST_MATCHED = 0.1  # of another party's ids; a site warns of fewer


@dataclass(frozen=True, slots=True, eq=False)
class Secret:
    """How a party hides ids."""

    order: Ints  # in which its own were sent
    scalar: bytes = field(repr=False)  # the mask


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
    introduction: bytes = b""  # the VerticalHelloReply that opened the run
    n_table: int  # rows of the table; of a version that is refreshed, with those it has
    ordered: bool  # the rows are in a common order already
    is_ranked: bool = False  # to train, at the active party: whether its rows are of queries
    # To train, at the active party: the subset of each row, where its group or time decides.
    drawn: npt.NDArray[np.uint8] | None = None
    holdout: Holdout
    sizes: Mapping[str, int]  # rows of each party's table
    join: str = INNER
    lists: tuple[str, ...] = ()  # owners of the lists that came
    secret: Secret  # of this party, until no list is masked any more

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
        store = self.site.store
        name = account_of(store).method
        method = method_of(name)
        fits = method is not None and bool(request.model) == method.uses_model
        rule = "must name a model to predict, and none to train"
        check_fields(self.name, request, ("model", fits, rule))
        if method and method.stands and not self.config.standing_address:
            rule = f"must be set in the node config of {self.name}: where its standing process"
            raise ConfigError(f"standing-address {rule} answers, as HOST:PORT")
        reply, table, ids = look(self.config, request)
        n_rows = len(ids)
        check_memory(self.config, name, request, n_rows, len(table.columns))
        if request.refreshes:
            rows = new_rows(self.name, ids)
            reply, table, ids = replace(reply, n_table=len(rows)), table.take(rows), ids[rows]
            if not len(ids):
                raise DataError("ids must have new ones to be matched, got none")
        if not self.introduction:
            note_greeting(store, request)
            begin_session(store)
            self.model = request.model
            self.introduction = to_bytes(to_content(reply, self.name))
            self.ids, self.values, self.base_margins = ids, table.values, table.base_margins
            self.n_table = n_rows
            if table.labels is not None:
                self.labels, self.weights = table.labels, weights_of(table)
                self.is_ranked = table.is_ranked and not request.model
                if not request.model:
                    holdout = Holdout(**fields_of(request, Holdout))
                    self.drawn = drawn_subsets(table, holdout, self.config.is_share)
            if not request.model:
                self.quantiles = quantiles(table.values)
            self.columns, self.kinds = table.columns, table.kinds
            self.categories = table.categories
        # A change of the table shows in its fingerprint only.
        content = from_bytes(self.introduction, self.name)
        opened = from_content(VerticalHelloReply, content, self.name)
        key, since = run_key(store), store.answered
        return replace(opened, fingerprint=reply.fingerprint, run_key=key, since=since)

    # passive list --(its mask)--> other passive parties in turn --> active --(its mask)--> all
    # active list  --(its mask)--> passive parties in turn ----------------> active         masks
    #
    #     active: which points are in all lists? --(bits)--> each passive party, for its list
    #
    # Only the active party sees lists under all masks, so no other party can compare lists. Only
    # its owner knows the order within a list. The subset of a row follows from its place in the
    # common order, which the ids determine; in a simulation with a shared table, from its place
    # there, as in a horizontal run. Of ranked rows, or where groups or times decide, the active
    # party draws, and sends the subset of each row.
    def open_run(self, request: OpenRequest) -> tuple[SentReply, Letters]:
        """Store the other parties' keys, and pass on the local ids, masked."""
        keys, names = (request.box_keys, request.run_keys), request.names
        store_peers(self.config, self.site.store, names, keys, request)
        has_all = request.n_rows[names.index(self.name)] == len(self.ids)
        joins = request.join == INNER or (request.join == LEFT and not request.ordered)
        check_fields(
            self.name,
            request,
            ("active", request.active in names, "must be among the names"),
            ("n_rows", has_all, "must be the number of local ids"),
            ("join", joins, f"must be {INNER}, or {LEFT} where rows are not ordered"),
        )
        self.active, self.ordered = request.active, request.ordered
        # Parties that share a table have the same rows.
        self.join = INNER if self.config.is_share else request.join
        if self.model:  # else a server could make any party the one that learns
            part = self.party_part()
            with as_protocol_error(self.name, "OpenRequest", "active"):
                part.check_active(request.active)
        self.sizes = dict(zip(names, request.n_rows.tolist(), strict=True))
        self._check_sizes()
        self.holdout = Holdout(**fields_of(request, Holdout))
        if request.ordered:
            return SentReply(), []
        self.secret = Secret(_shuffle(len(self.ids)), draw_scalar())
        points = mask_ids(self.ids[self.secret.order].tolist(), self.secret.scalar)
        _, receiver, *_ = _route(self.name, self.active, self.passive)
        return SentReply(), [(receiver, MaskedList(self.name, 1, points))]

    def mask_list(self, request: MaskRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """At a passive party: mask others' lists."""
        letters: Letters = []
        for sender, letter in mail.each(MaskedList):
            self._check_list(sender, letter)
            points, n_masks = _masked(sender, letter, self.secret.scalar), letter.n_masks + 1
            receiver = _route(letter.owner, self.active, self.passive)[n_masks]
            letters.append((receiver, MaskedList(letter.owner, n_masks, points)))
        return SentReply(), letters

    def match(self, request: MatchRequest, mail: Mail) -> tuple[MatchReply, Letters]:
        """At the active party: compare all lists, and keep the rows of the run."""
        entries = dict.fromkeys(self.passive, np.arange(len(self.ids)))
        if not self.ordered:
            entries = self._entries_of_others(mail)
        has_others = np.stack([of_list != ABSENT for of_list in entries.values()])
        is_common = np.asarray(np.all(has_others, axis=0))
        rows = self._rows_of_run(is_common)
        counts = {name: int((entries[name][rows] != ABSENT).sum()) for name in self.passive}
        if not self.ordered:
            self._warn_of_unmatched(counts)
        counts[self.name] = int(is_common.sum())
        split = None
        if self.is_ranked and self.labels is not None:
            split = split_queries(rows, queries_of(self.labels[rows]), self.holdout)
        elif self.drawn is not None:
            split = split_numbered(rows, self.drawn)
        self._keep(rows, split)
        key = np.frombuffer(secrets.token_bytes(KEY_BYTES), dtype=np.uint8)
        letters: Letters = [
            (name, self._common_rows(name, of_list, rows, key)) for name, of_list in entries.items()
        ]
        self.drawn = None
        n_matched = [counts[name] for name in self.peers if self.holdout.score_test]
        matched = np.array(n_matched, dtype=np.int64)
        return MatchReply(matched, *self.n_rows), letters

    def _entries_of_others(self, mail: Mail) -> dict[str, Ints]:
        """Of each row its place in each passive party's list, or ABSENT."""
        # This party masks the others' lists last. Its own comes back under all other masks.
        lists = dict[str, Array]()
        for sender, letter in mail.each(MaskedList):
            self._check_list(sender, letter)
            is_local = letter.owner == self.name
            points = letter.points if is_local else _masked(sender, letter, self.secret.scalar)
            lists[letter.owner] = points
        if missing := set(self.peers) - set(lists):
            culprit = min(missing - {self.name}, default=self.name)
            raise ProtocolError(culprit, "MaskedList", "owner", "must be every party once")
        for owner, points in lists.items():
            with as_protocol_error(owner, "MaskedList", "points"):
                intersect([points])
        local = lists.pop(self.name)
        entries = dict[str, Ints]()
        for name in self.passive:
            shared = intersect([local, lists[name]])
            entries[name] = np.full(len(self.ids), ABSENT, dtype=np.int64)
            rows = self.secret.order[places(local, shared)]
            entries[name][rows] = places(lists[name], shared)
        return entries

    # Two ways to join rows: those that all have, or all of the active party's with those of each
    # other party (``join=left``). By a left join a passive party gets, in the order of the run,
    # which of its rows each of the active party's rows is, or that it has none. All rows without
    # partner look alike to it, and their places say nothing of their ids: see ``secret_order``. To
    # predict, nobody else needs the order again.
    def _rows_of_run(self, is_common: npt.NDArray[np.bool_]) -> Ints:
        """Rows of the active party that are used, in an order; ``is_common``: which all have."""
        if self.join != LEFT:
            common = np.flatnonzero(is_common)
            return _in_order(common, self.ids, self.holdout.seed) if self._draws else common
        if self.model or self.labels is None:
            return _shuffle(len(self.ids))
        return secret_order(self.ids, self.values, self.labels, self.holdout.seed)

    def _common_rows(self, name: str, entries: Ints, rows: Ints, key: Array) -> CommonRows:
        """What a passive party gets of the rows; ``entries`` in its list, of each of the table."""
        bits, of_rows, subsets = (np.empty(0, kind) for kind in (np.uint8, np.int32, np.uint8))
        used, has = entries[rows], entries[self.places] != ABSENT
        ids = self.ids[has]
        if self.join == LEFT:
            of_rows, ids = used.astype(np.int32), np.where(has, self.ids, "")
        elif not self.ordered:
            is_common = np.zeros(self.sizes[name], dtype=bool)
            is_common[used[used != ABSENT]] = True
            bits = np.packbits(is_common)
        if self._draws:
            numbers = np.full(len(entries), LEFT_OUT, dtype=np.uint8)
            for number, subset in enumerate(SUBSETS):
                numbers[self.places[self.n_rows.of(subset)]] = number
            subsets = numbers[rows]
        self.digests = {**self.digests, name: _digest(ids, key)}
        return CommonRows(bits, of_rows, key, self.order_proof(self.name, name), subsets)

    def order_rows(self, request: OrderRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """At a passive party: keep the rows of the run, if the active one knows their ids."""
        letter, rows = mail.one(CommonRows, self.active), np.arange(len(self.ids))
        asked = self.others
        if self.join == LEFT:  # the others may not have these rows
            n_rows, order, asked = self.sizes[self.active], self.secret.order, [self.active]
            rows = _entries(letter, n_rows, order, self.active)
        elif not self.ordered:
            is_common = sent_bits(self.active, "CommonRows", "common", letter.common, len(rows))
            rows = self.secret.order[is_common]
        fits, has_subsets = len(letter.subsets) in (0, len(rows)), len(letter.subsets) > 0
        check_fields(self.active, letter, ("subsets", fits, "must be of all rows, or empty"))
        if not self.ordered:
            self._warn_of_unmatched(dict.fromkeys(asked, int((rows != ABSENT).sum())))
        split = None
        if has_subsets:
            if self.join != LEFT:
                rows = _in_order(rows, self.ids, self.holdout.seed)
            split = Split(*(rows[letter.subsets == number] for number in range(len(SUBSETS))))
        self._keep(rows, split)
        self.digests = dict.fromkeys(asked, _digest(self.ids, letter.key))
        self.check_proof(self.active, "CommonRows", letter.digest)
        return SentReply(), [
            (name, OrderDigest(self.order_proof(self.name, name))) for name in asked
        ]

    @property
    def _draws(self) -> bool:
        """Whether this party draws the rows' subsets, and sends them."""
        return self.is_ranked or self.drawn is not None

    def _keep(self, rows: Ints, split: Split | None = None) -> None:
        """Store these rows, in the common order: training, validation, test.

        Without a ``split`` they are drawn.
        """
        n_common = int((rows != ABSENT).sum())
        # A version may be of no new rows.
        if not planned(self.site.store)["refreshes"]:
            check_common(n_common, predicts=bool(self.model))
        if self.model and self.is_active:
            self.unmatched = np.delete(self.ids, rows)
        if split is None and self.join == LEFT:
            split = split_ordered(rows, self.holdout)
        elif split is None:
            split = split_common(rows, self.ids[rows].tolist(), self.holdout, self.config.is_share)
        subsets = {subset: getattr(split, subset) for subset in SUBSETS}
        counts = {name: int((rows != ABSENT).sum()) for name, rows in subsets.items()}
        fewest = 0 if self.model else self.config.min_rows
        rule = "ids must have {} {}rows in common at least ({} of {}), got {}"
        limit = "min-rows", self.name
        check_subsets(fewest, counts, rule.format("{}", "{} ", *limit, "{}"))
        if self.model and n_common < (fewest := self.config.predict_min_rows):
            raise DataError(rule.format(fewest, "", "predict-min-rows", self.name, n_common))
        self.n_rows = Subsets(*map(len, subsets.values()))
        rows = np.concatenate(list(subsets.values()))
        is_absent = rows == ABSENT
        self.places, self.ids = rows, np.where(is_absent, "", self.ids[rows])
        self.values = taken(self.values, rows)
        self.values[is_absent] = np.nan
        if self.labels is not None:
            self.labels, self.weights = self.labels[rows], self.weights[rows]
        if self.base_margins is not None:
            self.base_margins = self.base_margins[rows]
        # No list is masked any more.
        self.secret = Secret(np.empty(0, np.int64), b"")

    def _check_sizes(self) -> None:
        """Check that no list is larger than the opening and this site allow."""
        n_rows, ratio = self.n_table, self.config.align_most_ratio
        limits = {
            "most_rows of the run's opening": planned(self.site.store)["most_rows"],
            f"align-most-rows of {self.name}": self.config.align_most_rows,
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

    def _warn_of_unmatched(self, counts: Mapping[str, int]) -> None:
        """Warn, here, of lists of which few ids match: they may be invented."""
        for name, n_common in counts.items() if self._is_asked else ():
            if n_common < LEAST_MATCHED * self.sizes[name]:
                log.warning(
                    "%d ids of %s were matched with %d rows of %s, and only %d are common: "
                    "whoever invents ids learns in this way which of them the table has",
                    *(self.sizes[name], name, self.sizes[self.name], self.name, n_common),
                )

    def _check_list(self, sender: str, letter: MaskedList) -> None:
        # All parties before this one on the list's route have masked it, each once.
        last, to = letter.n_masks - 1, _route(letter.owner, self.active, self.passive)
        rule = "must be of all parties before this one, the sender the last of them"
        check_fields(sender, letter, ("n_masks", to[last : last + 2] == [sender, self.name], rule))
        got, n_rows = len(letter.points), self.sizes[letter.owner]
        rule = f"must be {n_rows}, as the opening has it of {letter.owner}, got {got}"
        is_first = letter.owner not in self.lists
        check_fields(
            sender,
            letter,
            ("owner", is_first, "must be one that had no list yet"),
            ("points", got == n_rows, rule),
        )
        if self._is_asked:
            count_ids(self.config, self.folder.name, letter.owner, got, self.n_table)
        self.lists = (*self.lists, letter.owner)


def _route(owner: str, active: str, passive: list[str]) -> list[str]:
    """Parties that get a list, in order: each passive one, then the active one.

    Nobody gets an unknown owner's.
    """
    if owner == active:
        return [active, *passive, active]
    if owner not in passive:
        return []
    first = passive.index(owner)
    return [*passive[first:], *passive[:first], active]


def _in_order(rows: Ints, ids: npt.NDArray[np.str_], seed: int) -> Ints:
    return rows[common_order(ids[rows].tolist(), seed)] if len(rows) else rows


def _entries(letter: CommonRows, n_rows: int, order: Ints, active: str) -> Ints:
    """Rows of a passive party's table, or ABSENT, by their places in its list."""
    entries, present = letter.places, letter.places[letter.places != ABSENT]
    is_once = len(np.unique(present)) == len(present)
    fits = len(entries) == n_rows and is_once and (present < len(order)).all()
    rule = f"must be of the {n_rows} rows of {active}, each of the list at most once"
    check_fields(active, letter, ("places", fits, rule))
    return np.where(entries == ABSENT, ABSENT, order[entries])


def _digest(ids: npt.NDArray[np.str_], key: Array) -> npt.NDArray[np.uint8]:
    return np.frombuffer(order_digest(ids.tolist(), key.tobytes()), dtype=np.uint8)


def look(
    config: SiteConfig, request: VerticalHelloRequest
) -> tuple[VerticalHelloReply, Table, npt.NDArray[np.str_]]:
    """Read a site's table and check it against the rules of a run; nothing is stored."""
    if not request.model:
        config = with_present_times(config, Holdout(**fields_of(request, Holdout)))
    table, active, n_unlike = _table(config, request)
    ids = row_ids(table, config, request.needs_ids)
    max_rows = min(request.most_rows, config.align_most_rows)
    if len(ids) > max_rows:
        rule = f"must be >= the rows of every party, {len(ids)} at {config.name}"
        raise ConfigError(f"align-most-rows {rule}, got {max_rows}")
    shares_names = config.shares_names or config.simulated
    notes, suggested = table.notes, ""
    on_labels = [*notes_on_leaks(table), *notes_on_classes(config, table.labels)]
    if table.is_ranked and table.labels is not None and not request.model:
        on_queries = notes_on_queries(table.labels)
        on_labels, notes = on_labels + on_queries, notes + tuple(on_queries * config.simulated)
    for note in () if config.simulated or request.model else on_labels:
        log.warning("%s: %s", config.name, note.text(shares_names=True))  # labels stay here
    are_measures = False
    if config.label_epsilon and table.labels is not None and not request.model:
        # From here on nothing sees the others.
        table = replace(table, labels=drawn_labels(config, table.labels, ids.tolist()))
        are_measures = bool(config.label_range)
        rule = "all labels are randomised, and so are those that scores and early stopping count"
        notes += (Note(f"{rule} (label-epsilon {config.label_epsilon:g})"),)
    if request.asks_objective and table.labels is not None:
        classes = () if are_measures else class_names(table.labels, AUTO)
        suggested = auto_objective([classes])[0]
        if doubt := note_on_measure(classes):
            log.warning("%s: %s", config.name, doubt)  # labels stay here
            notes += (Note(doubt),) if config.simulated else ()
    if table.ids is not None and request.needs_ids and not config.is_share:
        notes += tuple(notes_on_numbered_ids(config.id_column, table.ids))
    column = together(config, table) if active and not request.model else ""
    reply = VerticalHelloReply(
        name=config.name,
        n_table=table.n_rows,
        n_read=table.n_read,
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
        **texts_for_others(config, notes, shares_names),
        together=column if shares_names or not column else WITHHELD,
    )
    return reply, table, ids


def _table(config: SiteConfig, request: VerticalHelloRequest) -> tuple[Table, bool, int]:
    """The table, whether the party is active, and how many columns have drifted since training."""
    if not request.model:
        table = read_columns(config.naming(request.least_rows_per_name), request.seed)
        return table, table.labels is not None, 0
    is_id = MODEL_ID.fullmatch(request.model)
    check_fields(config.name, request, ("model", is_id, "must be 16 hex digits"))
    part, table = read_to_predict(config, request.model)
    trained = part.quantiles
    unlike: list[int] = []
    if len(trained):
        check_range(trained, table.values)
        unlike = unlike_columns(trained, table.values)
    if unlike and not config.simulated:
        names = ", ".join(table.columns[column] for column in unlike)
        log.warning("the table to predict has values unlike those trained on in: %s", names)
    return table, isinstance(part, ActivePart), len(unlike)


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
