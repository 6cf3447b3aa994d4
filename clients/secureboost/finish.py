"""The end of SecureBoost at the active party: its part of the model, scores, the whole model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from clients.handshake import stored_categories
from clients.scoring import score_arrays, warn_if_local_is_better
from clients.secureboost.active import ActiveState, Ints, margins_after, scores_of
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.messages.fields import Array
from fedapp.messages.handshake import read_categories
from fedapp.messages.secureboost import FinishReply, FinishRequest, PartKept, Records
from fedapp.site.answer import Site
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store, write_part
from fedapp.trees.divided import Lookup, joint_names, whole_model
from fedapp.trees.model import Ensemble, importance, split_trees, to_json
from fedapp.trees.sets import Categories, CategorySets, category_counts, side_by_side


def finish(site: Site, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
    """Truncate the model to its best round, score and store it; join the parts if all allow it."""
    view, store = ActiveState.read(site), site.store
    model, records = _first_rounds(view, request.best_round)
    if "base_margins" in store:
        model = replace(model, margin_column=site.config.base_margin)
    margins = margins_after(view, request.best_round)
    scores = scores_of(view, margins)
    warn_if_local_is_better(site, view.objective, margins, view.parameters)
    part = {
        **store.record(Lookup, "lookup").to_json(
            store.facts["columns"], store["quantiles"], stored_categories(store)
        ),
        "active": True,
        "threshold": scores["train"].get("threshold"),
        "name": site.name,
        "parts": {n: mail.one(PartKept, n).digest.tobytes().hex() for n in view.passive},
        "model": to_json(model),
        "splits": [each.tolist() for each in records],
        "n_columns": {name: len(widths) for name, widths in view.joint.widths.items()},
        **({"base_margin": model.margin_column} if model.margin_column else {}),
    }
    write_part(store.folder, part)
    columns, gains, counts = _importance(store, model)
    whole = _whole(view, mail, model, records)
    order = list(view.joint.widths) if len(whole) else []
    kinds_here = {view.name: store.facts["kinds"]}
    kinds = [
        kinds_here[name] if name in kinds_here else mail.one(Records, name).kinds for name in order
    ]
    reply = FinishReply(
        n_trees=len(model.trees),
        **score_arrays(scores),
        column_names=columns,
        column_gains=gains,
        column_counts=counts,
        model=whole,
        kinds=tuple(kind for each in kinds for kind in each),
    )
    store.forget()
    return reply, []


def _first_rounds(view: ActiveState, n_rounds: int) -> tuple[Ensemble, list[Ints]]:
    """The first rounds without thresholds, and the record ids of each tree's nodes."""
    store, n_trees = view.store, n_rounds * view.width
    offsets = store["model.offsets"]
    records = [store["model.records"][a:b] for a, b in pairwise(offsets)]
    shared = store.facts["shared_names"]
    names = {
        party: shared[party] or [f"{party} column {column + 1}" for column in range(len(widths))]
        for party, widths in view.joint.widths.items()
    }
    classes, mean = tuple(store.facts["classes"]), np.array(store["base_score"])
    trees = split_trees(store["model.nodes"], offsets)[:n_trees]
    columns, parameters = joint_names(names), view.parameters
    model = Ensemble(view.objective, mean, columns, classes, trees, parameters=parameters)
    return model, records[:n_trees]


def _importance(
    store: Store, model: Ensemble
) -> tuple[tuple[str, ...], npt.NDArray[np.float64], Ints]:
    if not all(store.facts["shared_names"].values()):
        return (), np.empty(0), np.empty(0, dtype=np.int64)
    by_column = importance(model)
    gains, counts = by_column["total_gain"], by_column["count"]
    return (
        tuple(gains),
        np.array(list(gains.values()), dtype=np.float64),
        np.array(list(counts.values()), dtype=np.int64),
    )


def _whole(view: ActiveState, mail: Mail, model: Ensemble, records: list[Ints]) -> Array:
    """The whole model as JSON if every party allows it; else empty."""
    store, order = view.store, list(view.joint.widths)
    if not store.facts["export"]:
        return np.empty(0, dtype=np.uint8)
    parts = {name: _records(view, mail, name) for name in view.passive}
    lookup, categories = store.record(Lookup, "lookup"), stored_categories(store)
    parts[view.name] = lookup, list(store.facts["columns"]), categories
    lookups = [parts[party][0] for party in order]
    owners = [
        np.array([order.index(owner) for owner, _ in view.owners(tree["column"])])
        for tree in model.trees
    ]
    # Each party must have sent every split that it has made.
    for number, (party, table) in enumerate(zip(order, lookups, strict=True)):
        own_records = [ids[by == number] for ids, by in zip(records, owners, strict=True)]
        n_made = 1 + max((int(ids.max(initial=-1)) for ids in own_records), default=-1)
        if n_made > len(table.thresholds):
            rule = f"must be {n_made} at least, got {len(table.thresholds)}"
            raise ProtocolError(party, "Records", "thresholds", rule)
    names = joint_names({party: parts[party][1] for party in order})
    coded = side_by_side((parts[party][2], len(parts[party][1])) for party in order)
    text = to_json(whole_model(model, records, owners, lookups, names, coded))
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _records(view: ActiveState, mail: Mail, party: str) -> tuple[Lookup, list[str], Categories]:
    letter, n_columns = mail.one(Records, party), len(view.joint.widths[party])
    if len(letter.names) != n_columns:
        rule = f"must be {n_columns}, got {len(letter.names)}"
        raise ProtocolError(party, "Records", "names", rule)
    categories = read_categories(party, letter, n_columns)
    n_bins = np.where(view.joint.categorical[party], view.joint.widths[party], 0)
    counts = category_counts(categories, n_columns)  # includes those in no training row
    fits = bool((counts >= n_bins).all()) and len(letter.widths) == len(letter.columns)
    fits = fits and bool((letter.columns < n_columns).all())
    if not fits or not np.array_equal(letter.widths, counts[letter.columns]):
        rule = "must be of the party's columns and their categories"
        raise ProtocolError(party, "Records", "widths", rule)
    with as_protocol_error(party, "Records", "set_bits"):
        sets = CategorySets(letter.set_bits, letter.widths[letter.widths > 0])
    lookup = Lookup.of(letter.columns, letter.thresholds, letter.defaults, letter.widths, sets)
    return lookup, list(letter.names), categories
