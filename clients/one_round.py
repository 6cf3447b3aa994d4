"""One-round prediction at a party: leaf sets of its own splits, or the intersection of all.

Source: Liu et al. 2019, "Federated Forest", Algorithms 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.alignment import check_order
from clients.interactive import model_folder, write_rows
from fedapp.errors import DataError, ProtocolError
from fedapp.messages.fields import Request
from fedapp.messages.one_round import (
    IntersectReply,
    IntersectRequest,
    LeafSets,
    WalkReply,
    WalkRequest,
)
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import Mail, read_mail, write_mail
from fedapp.trees.leaf_sets import Sets, compress, decompress, leaves_of, own_sides, walk
from fedapp.trees.parts import Lookup, model_of, part_digest, read_part, split_owners


def answer(site: Site, request: WalkRequest) -> WalkReply:
    """Algorithm 3 at a passive party."""
    store, active = site.store, site.store.facts["active"]
    read_mail(site, request)
    part = read_part(model_folder(store))
    if "trees" not in part:
        raise DataError(
            "model must be a forest for one-round: of a boosted model a passive party does not "
            "know the structure; interactive and eini predict with it"
        )
    lookup, columns = Lookup.from_json(part), np.ascontiguousarray(store["values"].T)
    sets = []
    for tree in part["trees"]:
        lefts, records = np.array(tree["lefts"]), np.array(tree["records"])
        sets.append(compress(walk(lefts, own_sides(records, lookup, columns), columns.shape[1])))
    letter = LeafSets(
        np.frombuffer(part_digest(model_folder(store)), dtype=np.uint8),
        np.cumsum([len(each) for each in sets], dtype=np.int64),
        np.frombuffer(b"".join(sets), dtype=np.uint8),
    )
    return WalkReply(**write_mail(site, [(active, letter)]))


def intersect(site: Site, request: IntersectRequest) -> IntersectReply:
    """Algorithm 4 at the active party, which has walked the trees too."""
    store, mail = site.store, read_mail(site, request)
    check_order(site, mail)
    part = read_part(model_folder(store))
    model, lookup = model_of(part), Lookup.from_json(part)
    columns = np.ascontiguousarray(store["values"].T)
    owners, n_rows = split_owners(model, part), len(store["ids"])
    others = {name: _sets(mail, name, part) for name in part["parts"]}
    leaves = np.empty((len(model.trees), n_rows), dtype=np.int32)
    for number, (tree, splits) in enumerate(zip(model.trees, part["splits"], strict=True)):
        lefts, is_own = tree["left"], np.array(owners[number]) == part["name"]
        records = np.where(is_own & (lefts >= 0), splits, -1)
        found = walk(lefts, own_sides(records, lookup, columns), n_rows)
        for name, sets in others.items():
            found &= _read(name, next(sets), len(found), n_rows)
        leaves[number] = _leaves(site, found, lefts, n_rows)
    write_rows(site, model.predictions(leaves), model.classes, request.suffix)
    return IntersectReply(**write_mail(site, []), n_trees=len(model.trees))


def _sets(mail: Mail, name: str, part: Mapping[str, Any]) -> Iterator[bytes]:
    """A passive party's leaf sets, tree after tree, compressed."""
    letter, n_trees = mail.one(LeafSets, name), len(part["splits"])
    if letter.part.tobytes().hex() != part["parts"][name]:
        raise DataError("model must be the one this run was trained with", name)
    content, ends = letter.sets.tobytes(), [0, *letter.ends.tolist()]
    if len(letter.ends) != n_trees or ends[-1] != len(content) or ends != sorted(ends):
        rule = f"must be of {n_trees} trees, and rise to {len(content)}"
        raise ProtocolError(name, "LeafSets", "ends", rule)
    return (content[start:end] for start, end in pairwise(ends))


def _read(name: str, data: bytes, n_leaves: int, n_rows: int) -> Sets:
    try:
        return decompress(data, n_leaves, n_rows)
    except ValueError as error:
        raise ProtocolError(name, "LeafSets", "sets", str(error)) from error


def _leaves(
    site: Site, sets: Sets, lefts: npt.NDArray[np.int32], n_rows: int
) -> npt.NDArray[np.int32]:
    try:
        return leaves_of(sets, lefts, n_rows)
    except ValueError as error:
        raise ProtocolError(site.name, "LeafSets", "sets", str(error)) from error


HANDLERS: Mapping[type[Request], Handler] = {WalkRequest: answer, IntersectRequest: intersect}
