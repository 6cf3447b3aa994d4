"""Secure aggregation at a party: the server sees only sums over all parties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from clients.handshake import CLASSES
from fedapp.data.partition import SUBSETS
from fedapp.errors import ProtocolError
from fedapp.histograms.fixed_point import Bounds, Whole, power_above, to_fixed
from fedapp.messages.fields import Request
from fedapp.messages.secagg import (
    KeysReply,
    KeysRequest,
    LeftReply,
    LeftRequest,
    Roster,
    UnmaskReply,
    UnmaskRequest,
)
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import begin_session, box_key, run_key, store_peers
from fedapp.site.settings import check_parties, check_threshold
from fedapp.site.store import Store
from fedapp.site.sums import AMONG, BOUNDS, THRESHOLD, unmask
from fedapp.trees.objective import is_regression, label_power, n_outputs


def keys(site: Site, request: KeysRequest) -> KeysReply:
    """Draw a key of the run, and report the power of two that bounds the weights."""
    if BOUNDS in site.store.facts:
        raise ProtocolError(site.name, "KeysRequest", "step", "must come before the first sums")
    begin_session(site.store)
    weighted = any((site.store[f"{subset}.weights"] != 1).any() for subset in SUBSETS)
    public_keys = box_key(site.name), run_key(site.store)
    return KeysReply(*public_keys, heaviest=_heaviest(site.store), weighted=bool(weighted))


def unmasking(site: Site, request: UnmaskRequest) -> UnmaskReply:
    """Shares that remove the masks of the last answers."""
    return unmask(site.name, site.store, request)


def left(site: Site, request: LeftRequest) -> LeftReply:
    """Parties of the last sum."""
    return LeftReply(tuple(site.store.facts[AMONG]))


def join(site: Site, request: Request, roster: Roster) -> Bounds:
    """Store the parties to sum with, checked and trusted; from here on only sums leave the site."""
    check_parties(site.config, roster.names)
    check_threshold(site.config, len(roster.names), roster.threshold)
    store_peers(site.config, site.store, roster.names, (roster.box_keys, roster.run_keys), request)
    bounds = Bounds(roster.n_rows, roster.heaviest, roster.largest)
    store = site.store
    n_rows = sum(len(store[f"{subset}.weights"]) for subset in SUBSETS)
    largest_label = 0  # of classes
    if is_regression(store.facts["objective"]):
        largest = [np.abs(store[f"{subset}.labels"]).max(initial=0) for subset in SUBSETS]
        largest_label = power_above(float(np.max(largest)))
    sizes = {
        "n_rows": (bounds.n_rows, n_rows),
        "heaviest": (bounds.heaviest, _heaviest(store)),
        "largest": (bounds.largest, largest_label),
    }
    for field, (bound, size) in sizes.items():
        if size > bound:
            rule = f"must be >= {size}, that of {site.name}"
            raise ProtocolError(site.name, type(request).__name__, field, rule)
    site.store.facts[BOUNDS] = asdict(bounds)
    site.store.facts[THRESHOLD] = roster.threshold
    # A party lost before this site resumed stays lost.
    site.store.facts.setdefault(AMONG, sorted(roster.names))
    return bounds


def _heaviest(store: Store) -> int:
    weights = [store[f"{subset}.weights"].max(initial=0) for subset in SUBSETS]
    return power_above(float(np.max(weights)))


def label_sums(store: Store, bounds: Bounds) -> Whole:
    """Weighted sums of the training labels, of softmax by class, and of the weights: int64."""
    run = store.facts["objective"], len(store.facts[CLASSES])
    labels, weights = (store[f"train.{name}"].astype(np.float64) for name in ("labels", "weights"))
    exponent, sums = bounds.exponent(label_power(*run, bounds)), np.zeros(n_outputs(*run), np.int64)
    if len(sums) > 1:
        np.add.at(sums, labels.astype(np.int64), to_fixed(weights, exponent))
    else:
        sums += to_fixed(labels * weights, exponent).sum()
    return np.append(sums, to_fixed(weights, bounds.exponent(0)).sum())


HANDLERS: Mapping[type[Request], Handler] = {
    KeysRequest: keys,
    UnmaskRequest: unmasking,
    LeftRequest: left,
}
