"""Opening of a vertical run at a party: describe its table, find the common rows, draw a key.

Rows are matched by private set intersection: every party masks every list of ids, the active one
intersects them and sends the others their common rows; then all put these in one order.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt

from clients.handshake import relevant_versions, site_key, store_categories, weights_of
from fedapp.crypto.paillier import PrivateKey, PublicKey, generate_key
from fedapp.crypto.psi import draw_scalar, intersect, mask, mask_ids, places
from fedapp.crypto.sums import self_test
from fedapp.data.labels import Labels, auto_objective, class_names
from fedapp.data.partition import SUBSETS, Holdout
from fedapp.data.table import Table, notes_on_leaks, notes_on_numbered_ids
from fedapp.errors import ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.home import home
from fedapp.messages.fields import Array, Request, fields_of, method_of
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
from fedapp.site.answer import METHOD, MODEL_ID, Handler, Site
from fedapp.site.mail import (
    Letters,
    Mail,
    begin_session,
    box_key,
    hold_once,
    note_greeting,
    run_key,
    store_peers,
)
from fedapp.site.roles import IN_FILE, LAST, Role, role
from fedapp.site.settings import SiteConfig, check_subsets
from fedapp.site.store import KEEP_DAYS, drop_abandoned, read_part, sent_bits
from fedapp.site.table import (
    check_range,
    fingerprint,
    order_digest,
    quantiles,
    read_columns,
    read_rows_to_predict,
    row_ids,
    split_common,
    unlike_columns,
)
from fedapp.site.trust import keep_plan
from fedapp.trees.categories import Categories
from fedapp.trees.divided import categories_of, quantiles_of
from fedapp.trees.objective import AUTO

log = logging.getLogger("fedapp.site")
FEWEST_ROWS = 2  # to train
KEY_BYTES = 32
ROWS = ("ids", "values", "labels", "weights", "base_margins")  # arrays of the store, one row each
# Fixed for a run. The table may change later, which its fingerprint shows.
FIXED = (
    "n_table",
    "n_columns",
    "active",
    "objective",
    "n_unlike",
    "simulated",
    "versions",
    "notes",
)


@role
class Aligned(Role):
    """What the opening of a vertical run leaves; roles of its methods extend it.

    Arrays have a row for each of the party's rows that all parties have, in the common order:
    training, validation, test.
    """

    active: str  # name of the party that has the labels
    columns: tuple[str, ...]
    kinds: tuple[str, ...]  # of the columns
    categories: Annotated[Categories, IN_FILE]  # that code the values
    n_train: int
    n_valid: int
    n_test: int
    model: str = ""  # id of the model to predict with; empty to train
    ids: npt.NDArray[np.str_]
    values: npt.NDArray[np.float32]  # (n_rows, n_columns); NaN is missing
    places: npt.NDArray[np.int64]  # rows of the party's table
    # At the active party, and where a table to predict has labels: as in a ``Table``
    labels: Labels | None = None
    weights: npt.NDArray[np.float32]  # with the labels
    base_margins: npt.NDArray[np.float32] | None = None
    quantiles: npt.NDArray[np.float32]  # of the columns, to train
    unmatched: npt.NDArray[np.str_]  # to predict, at the active party: ids that not all have
    digest: npt.NDArray[np.uint8] | None = None  # of the order, until it has been checked

    @property
    def peers(self) -> list[str]:
        """Names of all parties, in the run's order."""
        return list(self.site.store.facts["peers"])

    @property
    def others(self) -> list[str]:
        """Names of the other parties."""
        return self.site.others

    def rows_of(self, subset: str) -> slice:
        """Rows of a subset."""
        counts = {"train": self.n_train, "valid": self.n_valid, "test": self.n_test}
        start = sum(counts[name] for name in SUBSETS[: SUBSETS.index(subset)])
        return slice(start, start + counts[subset])


def hello(site: Site, request: VerticalHelloRequest) -> VerticalHelloReply:
    """Open a run at a site, or answer the handshake again after the server restarted."""
    drop_abandoned(site.store.folder.parent, KEEP_DAYS)
    keep_plan(site.config, site.store, request)
    try:
        return _introduction(site, request)
    except DataError as error:
        if site.config.simulated:
            raise
        log.error("%s", error)
        raise error.for_others(site.config.shares_names) from None


def _introduction(site: Site, request: VerticalHelloRequest) -> VerticalHelloReply:
    store = site.store
    if "hello" in store.facts and request.model != store.facts.get("model", ""):
        rule = "must be that of the run's first request"
        raise ProtocolError(site.name, "VerticalHelloRequest", "model", rule)
    method = method_of(store.facts[METHOD])
    if method is None or bool(request.model) == method.trains:
        rule = "must name a model to predict, and none to train"
        raise ProtocolError(site.name, "VerticalHelloRequest", "model", rule)
    reply, table, ids = look(site.config, request)
    if "hello" not in store.facts:
        note_greeting(store, request)
        begin_session(store)
        if request.model:
            store.facts["model"] = request.model
        store["ids"], store["values"] = ids, table.values
        if table.labels is not None:
            store["labels"], store["weights"] = table.labels, weights_of(table)
        if table.base_margins is not None:
            store["base_margins"] = table.base_margins
        if not request.model:
            store["quantiles"] = quantiles(table.values)
        store.facts["columns"], store.facts["kinds"] = list(table.columns), list(table.kinds)
        store_categories(store, table.categories)
        store.facts["hello"] = {name: getattr(reply, name) for name in FIXED}
    fixed: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in store.facts["hello"].items()
    }
    return replace(reply, run_key=run_key(store), since=store.answered, **fixed)


def look(
    config: SiteConfig, request: VerticalHelloRequest
) -> tuple[VerticalHelloReply, Table, npt.NDArray[np.str_]]:
    """Read a site's table and check it against the rules of a run; nothing is stored."""
    table, active, n_unlike = _table(config, request)
    ids = row_ids(table, config, request.needs_ids)
    max_rows = min(request.most_rows, config.limits["align-most-rows"])
    if len(ids) > max_rows:
        rule = f"must be >= the rows of every party, {len(ids)} at {config.name}"
        raise ConfigError(f"align-most-rows {rule}, got {max_rows}")
    shares_names = config.shares_names or config.simulated
    notes, suggested = table.notes, ""
    if request.asks_objective and table.labels is not None:
        suggested = auto_objective([class_names(table.labels, AUTO)])[0]
    for leak in () if config.simulated or request.model else notes_on_leaks(table):
        log.warning("%s: %s", config.name, leak.text(shares_names=True))  # labels stay here
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
        notes=tuple(note.text(shares_names) for note in notes),
    )
    return reply, table, ids


def _table(config: SiteConfig, request: VerticalHelloRequest) -> tuple[Table, bool, int]:
    """The table, whether the party is active, and how many columns have drifted since training."""
    if not request.model:
        table = read_columns(config, request.seed)
        return table, table.labels is not None, 0
    if not MODEL_ID.fullmatch(request.model):
        raise ProtocolError(config.name, "VerticalHelloRequest", "model", "must be 16 hex digits")
    part = read_part(home() / "sites" / config.name / request.model)
    active = bool(part.get("active", False))
    model_columns = part["columns"], categories_of(part), active, part.get("base_margin", "")
    table = read_rows_to_predict(config, *model_columns)
    trained = quantiles_of(part)
    unlike: list[int] = []
    if len(trained):
        check_range(trained, table.values)
        unlike = unlike_columns(trained, table.values)
    if unlike and not config.simulated:
        names = ", ".join(table.columns[column] for column in unlike)
        log.warning("the table to predict has values unlike those trained on in: %s", names)
    return table, active, len(unlike)


# passive list --(its mask)--> other passive parties in turn --> active --(its mask)--> all masks
# active list  --(its mask)--> passive parties in turn ----------------> active         all masks
#
#     active: which points are in all lists? --(bits)--> each passive party, for its list
#
# Only the active party sees lists under all masks, so no other party can compare lists. Only its
# owner knows the order within a list. The subset of a row follows from its place in the common
# order, which the ids determine; in a simulation with a shared table, from its place there, as in a
# horizontal run.
def open_run(site: Site, request: OpenRequest) -> tuple[SentReply, Letters]:
    """Store the other parties' keys, and pass on the local ids, masked."""
    store = site.store
    keys = (request.box_keys, request.run_keys)
    store_peers(site.config, store, request.names, keys, request)
    if request.active not in request.names:
        raise ProtocolError(site.name, "OpenRequest", "active", "must be among the names")
    if request.n_rows[request.names.index(site.name)] != len(store["ids"]):
        raise ProtocolError(site.name, "OpenRequest", "n_rows", "must be the number of local ids")
    store.facts["active"], store.facts["ordered"] = request.active, request.ordered
    store.facts["holdout"] = list(fields_of(request, Holdout).values())
    if request.ordered:
        return SentReply(), []
    ids = store["ids"]
    store["shuffle"] = _shuffle(len(ids))
    store["scalar"] = np.frombuffer(draw_scalar(), dtype=np.uint8)
    points = mask_ids(ids[store["shuffle"]].tolist(), store["scalar"].tobytes())
    masked = MaskedList(site.name, 1, points)
    return SentReply(), [(_next(site, masked), masked)]


def mask_list(site: Site, request: MaskRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """At a passive party: mask others' lists."""
    letters: Letters = []
    for sender, letter in mail.each(MaskedList):
        _check_list(site, sender, letter)
        points = _masked(sender, letter, site.store["scalar"].tobytes())
        masked = MaskedList(letter.owner, letter.n_masks + 1, points)
        letters.append((_next(site, masked), masked))
    return SentReply(), letters


def match(site: Site, request: MatchRequest, mail: Mail) -> tuple[MatchReply, Letters]:
    """At the active party: intersect all lists, and keep the common rows."""
    store = site.store
    rows, common = np.arange(len(store["ids"])), dict[str, Array]()  # bits by list's owner
    if not store.facts["ordered"]:
        # Every party's list under all masks; this party masks the others' lists last.
        lists: dict[str, Array] = {}
        for sender, letter in mail.each(MaskedList):
            _check_list(site, sender, letter)
            is_local, scalar = letter.owner == site.name, store["scalar"].tobytes()
            lists[letter.owner] = letter.points if is_local else _masked(sender, letter, scalar)
        peers = set(store.facts["peers"])
        if set(lists) != peers or len(lists[site.name]) != len(store["ids"]):
            missing = min(peers - set(lists), default=site.name)
            raise ProtocolError(missing, "MaskedList", "owner", "must be every party once, whole")
        lists = {name: lists[name] for name in store.facts["peers"]}
        for name, points in lists.items():
            with as_protocol_error(name, "MaskedList", "points"):
                intersect([points])
        shared = intersect(list(lists.values()))
        rows = store["shuffle"][places(lists[site.name], shared)]
        for name, points in lists.items():
            is_common = np.zeros(len(points), dtype=bool)
            is_common[places(points, shared)] = True
            common[name] = np.packbits(is_common)
    _keep(site, rows)
    key = np.frombuffer(secrets.token_bytes(KEY_BYTES), dtype=np.uint8)
    store["digest"] = _digest(site, key.tobytes())
    letters: Letters = [
        (name, CommonRows(common.get(name, np.empty(0, np.uint8)), key)) for name in _passive(site)
    ]
    sizes = {f"n_{subset}": store.facts[f"n_{subset}"] for subset in SUBSETS}
    return MatchReply(**sizes), letters


def order(site: Site, request: OrderRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """At a passive party: keep the common rows."""
    store, active = site.store, site.store.facts["active"]
    letter = mail.one(CommonRows, active)
    rows = np.arange(len(store["ids"]))
    if not store.facts["ordered"]:
        common = sent_bits(active, "CommonRows", "common", letter.common, [len(rows)])
        rows = store["shuffle"][common[0]]
    _keep(site, rows)
    digest = OrderDigest(_digest(site, letter.key.tobytes()))
    return SentReply(), [(active, digest)]


def check_order(site: Site, mail: Mail) -> None:
    """Check, at the active party, that all others have the same ids in the same order."""
    digests = mail.all(OrderDigest)
    for name in site.store.facts["peers"]:
        if name == site.name:
            continue
        if name not in digests or (digests[name].digest != site.store["digest"]).any():
            raise DataError(f"ids must be those of {site.name}, in the same order", name)
    site.store.drop("digest")


def check_common(n_rows: int, predicts: bool) -> None:
    """Raise a DataError if the parties have too few rows in common."""
    min_rows = 1 if predicts else FEWEST_ROWS
    if n_rows < min_rows:
        rule = f"ids must have {min_rows} rows in common at least, got {n_rows}"
        raise DataError(f"{rule}: see that all parties write them alike; 7, 007 and 7.0 differ")


def _keep(site: Site, rows: npt.NDArray[np.int64]) -> None:
    """Store these rows, in the common order: training, validation, test."""
    store = site.store
    check_common(len(rows), predicts="model" in store.facts)
    if "model" in store.facts and store.facts["active"] == site.name:
        store["unmatched"] = np.delete(store["ids"], rows)
    ids, holdout = store["ids"][rows].tolist(), Holdout(*store.facts["holdout"])
    split = split_common(rows, ids, holdout, site.config.is_share)
    n_rows = {subset: len(getattr(split, subset)) for subset in SUBSETS}
    rule = "ids must have {} {} rows in common at least (min-rows of " + f"{site.name}), got {{}}"
    check_subsets(0 if "model" in store.facts else site.config.min_rows, n_rows, rule)
    store.facts |= {f"n_{subset}": count for subset, count in n_rows.items()}
    rows = np.concatenate([getattr(split, subset) for subset in SUBSETS])
    store["places"] = rows  # rows of the party's table
    for name in ROWS:
        if name in store:
            store[name] = np.ascontiguousarray(store[name][rows])
    store.drop("shuffle", "scalar")
    is_active = store.facts["active"] == site.name
    store.facts[LAST] = (MatchRequest if is_active else OrderRequest).__name__


def _check_list(site: Site, sender: str, letter: MaskedList) -> None:
    route = _route(site, letter.owner) if letter.owner in site.store.facts["peers"] else []
    # All parties before this one on the list's route have masked it, each once.
    masked_by = route[: letter.n_masks]
    if masked_by[-1:] != [sender] or route[letter.n_masks : letter.n_masks + 1] != [site.name]:
        rule = "must be of all parties before this one, the sender the last of them"
        raise ProtocolError(sender, "MaskedList", "n_masks", rule)
    owners = site.store.facts.get("lists", [])
    if letter.owner in owners:
        raise ProtocolError(sender, "MaskedList", "owner", "must be one that had no list yet")
    max_rows = site.config.limits["align-most-rows"]
    if len(letter.points) > max_rows:
        rule = f"must be <= {max_rows} (align-most-rows of {site.name}), got {len(letter.points)}"
        raise ProtocolError(sender, "MaskedList", "points", rule)
    hold_once(sender, site.store, letter, f"{site.name} masked the list of {letter.owner}")
    site.store.facts["lists"] = [*owners, letter.owner]


def _masked(sender: str, letter: MaskedList, scalar: bytes) -> Array:
    with as_protocol_error(sender, "MaskedList", "points"):
        return mask(letter.points, scalar)


def _digest(site: Site, key: bytes) -> Array:
    return np.frombuffer(order_digest(site.store["ids"].tolist(), key), dtype=np.uint8)


def _passive(site: Site) -> list[str]:
    return [name for name in site.store.facts["peers"] if name != site.store.facts["active"]]


def _route(site: Site, owner: str) -> list[str]:
    """Parties that get a list, in order: each passive one, then the active one."""
    passive, active = _passive(site), str(site.store.facts["active"])
    if owner == active:
        return [active, *passive, active]
    first = passive.index(owner)
    return [*passive[first:], *passive[:first], active]


def _next(site: Site, letter: MaskedList) -> str:
    return _route(site, letter.owner)[letter.n_masks]


def _shuffle(n_rows: int) -> npt.NDArray[np.int64]:
    # Sorted by 128 random bits each: the order is secret, so not from a seeded generator.
    drawn = np.frombuffer(secrets.token_bytes(16 * n_rows), dtype=np.uint64)
    return np.lexsort(drawn.reshape(2, n_rows))


class KeyOrder(Protocol):
    """A request that sets the key's size."""

    @property
    def key_bits(self) -> int: ...
    @property
    def insecure_small_key(self) -> bool: ...


def draw_key(
    site: Site, request: KeyOrder, section: str, fits: Callable[[PublicKey], object]
) -> PrivateKey:
    """Draw the Paillier key and test it; ``fits`` raises a ValueError if it is too small."""
    try:
        key = generate_key(
            request.key_bits,
            insecure_small_key=request.insecure_small_key,
            full_masks=site.config.full_masks,
        )
        fits(key.public)
    except ValueError as error:
        raise ConfigError(f"{section}.{error}") from error
    self_test(key)
    return key


HANDLERS: Mapping[type[Request], Handler] = {
    VerticalHelloRequest: hello,
    OpenRequest: open_run,
    MaskRequest: mask_list,
    MatchRequest: match,
    OrderRequest: order,
}
