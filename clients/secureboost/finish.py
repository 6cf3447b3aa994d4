"""The end of SecureBoost at the active party: its part of the model, scores, the whole model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from clients.handshake import stored_categories
from clients.scoring import score_arrays, warn_if_local_is_better
from clients.secureboost.active import ActiveState, Ints, margins_after, scores_of
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.messages.fields import Array
from fedapp.messages.handshake import read_categories
from fedapp.messages.secureboost import FinishReply, FinishRequest, PartKept, Records
from fedapp.site.answer import Site
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import write_part
from fedapp.trees.categories import Categories, side_by_side
from fedapp.trees.divided import Lookup, joint_names, whole_model
from fedapp.trees.model import Ensemble, importance, split_trees, to_json
from fedapp.trees.sets import CategorySets, category_counts


def finish(site: Site, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
    """Truncate the model to its best round, score and store it; join the parts if all allow it."""
    state, store = ActiveState.read(site), site.store
    model, records = _first_rounds(state, request.best_round)
    if "base_margins" in store:
        model = replace(model, margin_column=site.config.base_margin)
    margins = margins_after(state, request.best_round)
    scores = scores_of(state, margins)
    warn_if_local_is_better(site, state.objective, margins, state.parameters)
    part = {
        **store.record(Lookup, "lookup").to_json(
            store.facts["columns"], store["quantiles"], stored_categories(store)
        ),
        "active": True,
        "threshold": scores["train"].get("threshold"),
        "name": site.name,
        "parts": {n: mail.one(PartKept, n).digest.tobytes().hex() for n in state.passive},
        "model": to_json(model),
        "splits": [each.tolist() for each in records],
        "n_columns": {name: len(widths) for name, widths in state.joint.widths.items()},
        **({"base_margin": model.margin_column} if model.margin_column else {}),
    }
    write_part(store.folder, part)
    is_shared = all(store.facts["shared_names"].values())
    by_column = importance(model) if is_shared else {"total_gain": {}, "count": {}}
    whole = _whole(state, mail, model, records)
    kinds = [
        store.facts["kinds"] if name == state.name else mail.one(Records, name).kinds
        for name in (state.joint.widths if len(whole) else ())
    ]
    reply = FinishReply(
        n_trees=len(model.trees),
        **score_arrays(scores),
        column_names=tuple(by_column["total_gain"]),
        column_gains=np.array(list(by_column["total_gain"].values()), dtype=np.float64),
        column_counts=np.array(list(by_column["count"].values()), dtype=np.int64),
        model=whole,
        kinds=tuple(kind for each in kinds for kind in each),
    )
    store.forget()
    return reply, []


def _first_rounds(state: ActiveState, n_rounds: int) -> tuple[Ensemble, list[Ints]]:
    """The first rounds without thresholds, and the record ids of each tree's nodes."""
    store, n_trees = state.store, n_rounds * state.width
    offsets = store["model.offsets"]
    records = [store["model.records"][a:b] for a, b in pairwise(offsets)]
    shared = store.facts["shared_names"]
    names = {
        party: shared[party] or [f"{party} column {column + 1}" for column in range(len(widths))]
        for party, widths in state.joint.widths.items()
    }
    classes, mean = tuple(store.facts["classes"]), np.array(store["base_score"])
    trees = split_trees(store["model.nodes"], offsets)[:n_trees]
    columns, parameters = joint_names(names), state.parameters
    model = Ensemble(state.objective, mean, columns, classes, trees, parameters=parameters)
    return model, records[:n_trees]


def _whole(state: ActiveState, mail: Mail, model: Ensemble, records: list[Ints]) -> Array:
    """The whole model as JSON if every party allows it; else empty."""
    store, order = state.store, list(state.joint.widths)
    if not store.facts["export"]:
        return np.empty(0, dtype=np.uint8)
    parts = {name: _records(state, mail, name) for name in state.passive}
    lookup, categories = store.record(Lookup, "lookup"), stored_categories(store)
    parts[state.name] = lookup, list(store.facts["columns"]), categories
    lookups = [parts[party][0] for party in order]
    owners = [
        np.array([order.index(owner) for owner, _ in state.owners(tree["column"])])
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


def _records(state: ActiveState, mail: Mail, party: str) -> tuple[Lookup, list[str], Categories]:
    letter, n_columns = mail.one(Records, party), len(state.joint.widths[party])
    if len(letter.names) != n_columns:
        rule = f"must be {n_columns}, got {len(letter.names)}"
        raise ProtocolError(party, "Records", "names", rule)
    categories = read_categories(party, letter, n_columns)
    n_bins = np.where(state.joint.categorical[party], state.joint.widths[party], 0)
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
