"""One-round prediction at a party: leaf sets by local splits, or the intersection of all.

Source: Liu et al. 2019, "Federated Forest", Algorithms 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np

from clients.alignment import check_order
from clients.explain import explain_scores
from clients.inference import ActivePart, active_part, own_digest, own_part, write_rows
from fedapp.errors import DataError, ProtocolError, as_protocol_error
from fedapp.messages.fields import Request
from fedapp.messages.inference import (
    IntersectReply,
    IntersectRequest,
    LeafSets,
    LeafSetsReply,
    LeafSetsRequest,
)
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import Letters, Mail
from fedapp.trees.divided import compress, decompress, leaves_of, party_sides, reachable_leaves


def answer(site: Site, request: LeafSetsRequest, mail: Mail) -> tuple[LeafSetsReply, Letters]:
    """Algorithm 3 at a passive party."""
    store, active = site.store, site.store.facts["active"]
    part = own_part(site)
    if "trees" not in part.document:
        raise DataError(
            "model must be a forest for one-round: of a boosted model a passive party does not "
            "know the structure; interactive and eini predict with it"
        )
    columns = np.ascontiguousarray(store["values"].T)
    sets = []
    for tree in part.document["trees"]:
        sides = party_sides(np.array(tree["records"]), part.lookup, columns)
        sets.append(compress(reachable_leaves(np.array(tree["lefts"]), sides, columns.shape[1])))
    letter = LeafSets(
        own_digest(site),
        np.cumsum([len(each) for each in sets], dtype=np.int64),
        np.frombuffer(b"".join(sets), dtype=np.uint8),
    )
    store.forget()
    return LeafSetsReply(), [(active, letter)]


def intersect(site: Site, request: IntersectRequest, mail: Mail) -> tuple[IntersectReply, Letters]:
    """Algorithm 4 at the active party, whose leaf sets are among those intersected."""
    store, part = site.store, active_part(site)
    check_order(site, mail)
    columns, n_rows = np.ascontiguousarray(store["values"].T), len(store["ids"])
    others = {name: _sets(mail, name, part) for name in part.document["parts"]}
    leaves = np.empty((len(part.model.trees), n_rows), dtype=np.int32)
    for number, tree in enumerate(part.model.trees):
        lefts, is_local = tree["left"], np.array(part.owners[number]) == site.name
        records = np.where(is_local & (lefts >= 0), part.records[number], -1)
        leaf_sets = reachable_leaves(lefts, party_sides(records, part.lookup, columns), n_rows)
        for name, sets in others.items():
            with as_protocol_error(name, "LeafSets", "sets"):
                leaf_sets &= decompress(next(sets), len(leaf_sets), n_rows)
        with as_protocol_error(site.name, "LeafSets", "sets"):
            leaves[number] = leaves_of(leaf_sets, lefts, n_rows)
    predictions = part.model.predictions(leaves)
    explain_scores(site, part, predictions, leaves)
    write_rows(site, part, predictions, request.suffix)
    return IntersectReply(len(part.model.trees)), []


def _sets(mail: Mail, name: str, part: ActivePart) -> Iterator[bytes]:
    letter, n_trees = mail.one(LeafSets, name), len(part.model.trees)
    part.check(name, letter.part)
    sets, ends = letter.sets.tobytes(), [0, *letter.ends.tolist()]
    if len(letter.ends) != n_trees or ends[-1] != len(sets) or ends != sorted(ends):
        rule = f"must be of {n_trees} trees, and rise to {len(sets)}"
        raise ProtocolError(name, "LeafSets", "ends", rule)
    return (sets[start:end] for start, end in pairwise(ends))


HANDLERS: Mapping[type[Request], Handler] = {LeafSetsRequest: answer, IntersectRequest: intersect}
