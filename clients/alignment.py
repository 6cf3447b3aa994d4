"""Find the rows that all parties have, and keep them in the common order.

::

    table --(random order)--> own list --(masked by all in turn)--> own list, all masks
                                                                        |
    rows of all, by digest of id  <--(common points)--  active  <-------+

The order within the list is known to its owner alone; the active party gets other parties' lists
in another order once more. Rows train, validate or test by their place in the common order.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fedapp.crypto.psi import draw_scalar, hash_to_group, intersect, mask, places
from fedapp.data.partition import split_rows
from fedapp.errors import DataError, ProtocolError
from fedapp.messages.alignment import (
    CommonRows,
    MaskedList,
    MaskRequest,
    MatchReply,
    MatchRequest,
    OpenRequest,
    OrderDigest,
    OrderRequest,
    SentReply,
)
from fedapp.messages.fields import Array, Request
from fedapp.site.answer import Handler, Site
from fedapp.site.columns import common_order, order_digest
from fedapp.site.mail import Mail, know, read_mail, write_mail

FEWEST_ROWS = 2  # to train
KEY_BYTES = 32
ROWS = ("ids", "values", "labels", "weights")


def open_run(site: Site, request: OpenRequest) -> SentReply:
    """Meet the others, and pass on the own ids under the own mask."""
    store = site.store
    know(store, request.names, request.box_keys)
    store.facts["active"], store.facts["ordered"] = request.active, request.ordered
    store.facts["holdout"] = [request.test_fraction, request.valid_fraction, request.seed]
    if request.ordered:
        return SentReply(**write_mail(site, []))
    ids = store["ids"]
    store["shuffle"] = _shuffle(len(ids))
    store["scalar"] = np.frombuffer(draw_scalar(), dtype=np.uint8)
    points = mask(hash_to_group(ids[store["shuffle"]].tolist()), store["scalar"].tobytes())
    return SentReply(**write_mail(site, [(_next(site), MaskedList(site.name, points))]))


def mask_list(site: Site, request: MaskRequest) -> SentReply:
    """Put the own mask on another's list."""
    store, active = site.store, site.store.facts["active"]
    letters = []
    for sender, letter in read_mail(site, request).all(MaskedList).items():
        points, owner = _masked(sender, letter, store["scalar"].tobytes()), letter.owner
        if not request.last:
            letters.append((_next(site), MaskedList(owner, points)))
            continue
        letters.append((owner, MaskedList(owner, points)))
        if site.name == active:
            store[f"list {owner}"] = points
        elif owner != active:
            letters.append((active, MaskedList(owner, points[_shuffle(len(points))])))
    if request.last:
        store.drop("scalar")
    return SentReply(**write_mail(site, letters))


def match(site: Site, request: MatchRequest) -> MatchReply:
    """At the active party: what all have in common, and the own rows of it."""
    store, mail = site.store, read_mail(site, request)
    common = np.empty((0, 32), dtype=np.uint8)
    rows = np.arange(len(store["ids"]))
    if not store.facts["ordered"]:
        lists = _lists(site, mail)
        common = intersect(list(lists.values()))
        rows = store["shuffle"][places(lists[site.name], common)]
    _keep(site, rows)
    key = secrets.token_bytes(KEY_BYTES)
    store["digest"] = _digest(site, key)
    letter = CommonRows(common, np.frombuffer(key, dtype=np.uint8))
    passive = [name for name in store.facts["peers"] if name != site.name]
    sizes = {f"n_{part}": store.facts[f"n_{part}"] for part in ("train", "valid", "test")}
    return MatchReply(**write_mail(site, [(name, letter) for name in passive]), **sizes)


def order(site: Site, request: OrderRequest) -> SentReply:
    """At a passive party: the own rows of what all have in common."""
    store, mail, active = site.store, read_mail(site, request), site.store.facts["active"]
    letter = mail.one(CommonRows, active)
    rows = np.arange(len(store["ids"]))
    if not store.facts["ordered"]:
        own = next((one for one in mail.all(MaskedList).values() if one.owner == site.name), None)
        if own is None:
            raise ProtocolError(active, "MaskedList", "owner", f"must be {site.name} once")
        try:
            rows = store["shuffle"][places(own.points, letter.points)]
        except ValueError as error:
            raise ProtocolError(active, "CommonRows", "points", str(error)) from error
    _keep(site, rows)
    return SentReply(
        **write_mail(site, [(active, OrderDigest(_digest(site, letter.key.tobytes())))])
    )


def check_order(site: Site, mail: Mail) -> None:
    """Hold, at the active party, that all others have the same ids in the same order.

    Raises
    ------
    DataError : names a party that has not.
    """
    digests = mail.all(OrderDigest)
    for name in site.store.facts["peers"]:
        if name == site.name:
            continue
        if name not in digests or (digests[name].digest != site.store["digest"]).any():
            raise DataError(f"ids must be those of {site.name}, in the same order", name)
    site.store.drop("digest")


def _keep(site: Site, rows: npt.NDArray[np.int64]) -> None:
    """Keep these rows, in the common order: those that train, that validate, that test."""
    store = site.store
    test_fraction, valid_fraction, seed = store.facts["holdout"]
    fewest = 1 if "model" in store.facts else FEWEST_ROWS
    if len(rows) < fewest:
        raise DataError(f"ids must have {fewest} rows in common at least, got {len(rows)}")
    rows = rows[common_order(store["ids"][rows].tolist(), seed)]
    split = split_rows(len(rows), test_fraction, valid_fraction, seed)
    for part in ("train", "valid", "test"):
        store.facts[f"n_{part}"] = len(getattr(split, part))
    rows = rows[np.concatenate((split.train, split.valid, split.test))]
    store["places"] = rows  # in the party's own table
    for name in ROWS:
        if name in store:
            store[name] = np.ascontiguousarray(store[name][rows])
    store.drop("shuffle", *(f"list {owner}" for owner in store.facts["peers"]))


def _lists(site: Site, mail: Mail) -> dict[str, Array]:
    """Every party's list under all masks, by its owner."""
    names = set(site.store.facts["peers"])
    lists = {name: site.store[f"list {name}"] for name in names if f"list {name}" in site.store}
    lists |= {letter.owner: letter.points for letter in mail.all(MaskedList).values()}
    if set(lists) != names:
        missing = min(names - set(lists), default=site.name)
        raise ProtocolError(missing, "MaskedList", "owner", "must be every party once")
    return lists


def _masked(sender: str, letter: MaskedList, scalar: bytes) -> Array:
    try:
        return mask(letter.points, scalar)
    except ValueError as error:
        raise ProtocolError(sender, "MaskedList", "points", str(error)) from error


def _digest(site: Site, key: bytes) -> Array:
    return np.frombuffer(order_digest(site.store["ids"].tolist(), key), dtype=np.uint8)


def _next(site: Site) -> str:
    """The party that masks a list after this one."""
    names = list(site.store.facts["peers"])
    return str(names[(names.index(site.name) + 1) % len(names)])


def _shuffle(n_rows: int) -> npt.NDArray[np.int64]:
    """A secret order."""
    return np.random.default_rng(secrets.randbits(256)).permutation(n_rows)


HANDLERS: Mapping[type[Request], Handler] = {
    OpenRequest: open_run,
    MaskRequest: mask_list,
    MatchRequest: match,
    OrderRequest: order,
}
