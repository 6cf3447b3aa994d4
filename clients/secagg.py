"""Secure aggregation at a party: the server sees only sums over all parties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

import numpy as np

from clients.handshake import Coded
from clients.scoring import Scored
from fedapp.arrays import Floats
from fedapp.data.partition import SUBSETS
from fedapp.data.scratch import batches
from fedapp.errors import ProtocolError
from fedapp.histograms.fixed_point import Bounds, Whole, power_above, to_fixed
from fedapp.messages.fields import Request, check_fields
from fedapp.messages.secagg import (
    KeysReply,
    KeysRequest,
    LeftReply,
    LeftRequest,
    Roster,
    RowSizes,
    UnmaskReply,
    UnmaskRequest,
)
from fedapp.site.mail import begin_session, box_key, run_key, store_peers
from fedapp.site.policy import check_parties, check_threshold
from fedapp.site.roles import Order, handlers, role
from fedapp.site.sums import begin_masks, has_roster, remaining, unmask
from fedapp.trees.losses import LOSSES
from fedapp.trees.objective import is_regression, label_power, measures, newton_terms, summed_labels

ROW_BYTES = 64  # that computing takes for a row, for each tree or column


@role
class Masked(Scored):
    """A horizontal party that may send its sums masked; roles of methods extend it."""

    order = Order({}, any_time={KeysRequest, UnmaskRequest, LeftRequest})

    def draw_keys(self, request: KeysRequest) -> KeysReply:
        """Draw a key of the run, and report the power of two that bounds the weights."""
        if has_roster(self.site.store):
            raise ProtocolError(self.name, "KeysRequest", "step", "must come before the first sums")
        begin_session(self.site.store)
        store = self.site.store
        sizes = weight_sizes(self.weights)
        return KeysReply(box_key=box_key(self.name), run_key=run_key(store), **sizes)

    def unmask(self, request: UnmaskRequest) -> UnmaskReply:
        """Shares that remove the masks of the last answers."""
        return unmask(self.name, self.site.store, request)

    def name_left(self, request: LeftRequest) -> LeftReply:
        """Parties of the last sum."""
        return LeftReply(tuple(remaining(self.site.store)))

    def join(self, roster: Roster) -> Bounds:
        """Store the parties to sum with, checked and trusted; now only sums leave the site."""
        store, config = self.site.store, self.config
        opening = cast(Request, roster)
        check_parties(config, roster.names)
        check_threshold(config, len(roster.names), roster.threshold)
        store_peers(config, store, roster.names, (roster.box_keys, roster.run_keys), opening)
        bounds = self.bounds_in(roster)
        begin_masks(store, bounds, roster.threshold, roster.names)
        return bounds

    def bounds_in(self, asked: RowSizes) -> Bounds:
        """Bounds on the rows of all parties; a ProtocolError if the party's exceed them."""
        bounds = Bounds(asked.n_rows, asked.heaviest, asked.largest)
        largest_label = 0  # of classes
        if is_regression(self.objective):
            labels = (measures(self.objective, self.labels[subset]) for subset in SUBSETS)
            largest = [np.abs(of_rows).max(initial=0) for of_rows in labels]
            largest_label = power_above(float(np.max(largest)))
        n_rows = sum(map(len, self.weights.values()))
        sizes = asdict(Bounds(n_rows, _heaviest(self.weights), largest_label)).items()
        rules = (
            (field, size <= getattr(bounds, field), f"must be >= {size}, that of {self.name}")
            for field, size in sizes
        )
        check_fields(self.name, cast(Request, asked), *rules)
        return bounds


def weight_sizes(weights: Mapping[str, Floats]) -> dict[str, Any]:
    """The fields of ``WeightSizes``, of weights by subset."""
    weighted = any((of_rows != 1).any() for of_rows in weights.values())
    return {"heaviest": _heaviest(weights), "weighted": bool(weighted)}


def _heaviest(weights: Mapping[str, Floats]) -> int:
    return power_above(float(np.max([of_rows.max(initial=0) for of_rows in weights.values()])))


def label_sums(rows: Coded, bounds: Bounds, is_private: bool = False) -> Whole:
    """Weighted sums of training labels, of softmax by class, and of the weights: int64.

    Where XGBoost starts from a Newton step, unless with noise, sums of ``newton_terms``.
    """
    objective, n_classes = rows.objective, len(rows.classes)
    loss = None if is_private else rows.loss
    exponent = bounds.exponent(label_power(objective, n_classes, bounds, loss))
    is_newton = not is_private and LOSSES[objective].newton
    sums = np.zeros(3 if is_newton else rows.n_outputs + 1, np.int64)
    for some in batches(len(rows.weights["train"]), ROW_BYTES):
        labels, weights = rows.labels["train"][some], rows.weights["train"][some]
        sums[-1] += to_fixed(weights, bounds.exponent(0)).sum()
        if is_newton:
            terms = newton_terms(objective, labels, weights, rows.loss)
            sums[:-1] += to_fixed(terms, exponent).sum(axis=0)
            continue
        summed, doubles = summed_labels(objective, labels), weights.astype(np.float64)
        if rows.n_outputs > 1:
            np.add.at(sums, summed.astype(np.int64), to_fixed(doubles, exponent))
        else:
            sums[0] += to_fixed(summed * doubles, exponent).sum()
    return sums


HANDLERS = handlers(Masked)
