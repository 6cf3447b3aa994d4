"""Tree traversal across parties: the active party asks for sides of rows, the others answer.

Source: Cheng et al. 2019, Figure 3.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clients.inference import ActivePart, OwnPart
from fedapp.errors import ProtocolError
from fedapp.messages.inference import Answers, Questions
from fedapp.site.answer import Site
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store, sent_bits
from fedapp.trees.model import LEAF
from fedapp.trees.predict import move_rows, rows_of, slots_of

Asked = dict[str, list[tuple[int, int, int]]]  # by party: place of the tree, node, record
Rows = list[npt.NDArray[np.int32]]


def ask_on(site: Site, part: ActivePart, at_once: int) -> Letters:
    """At the active party: route rows as far as its splits allow; questions, none at the end."""
    store = site.store
    # These trees, and the next ones while no question is left.
    while not (asked := _walk_local(site, part)):
        first = store.facts["first_tree"]
        end = first + len(store["nodes"])
        store[f"leaves.{first}"] = store["nodes"]
        store.facts["done"] = [*store.facts.get("done", []), first]
        if end >= len(part.model.trees):
            break
        begin_trees(store, part, end, at_once)
    store.facts["asked"] = asked
    letters: Letters = []
    for name, places in asked.items():
        rows = [rows_of(store["nodes"], tree, node) for tree, node, _ in places]
        records = np.array([record for _, _, record in places], dtype=np.int64)
        sizes = np.array([len(each) for each in rows], dtype=np.int64)
        letters.append((name, Questions(records, sizes, np.concatenate(rows).astype(np.int32))))
    return letters


def leaves_reached(store: Store) -> npt.NDArray[np.int32]:
    """Leaf of each row in each tree, at the end; shape (n_trees, n_rows)."""
    return np.concatenate([store[f"leaves.{first}"] for first in store.facts["done"]])


def answers(site: Site, part: OwnPart, asked: Questions) -> tuple[npt.NDArray[np.uint8], Rows]:
    """At a passive party: packed sides of the rows asked about, and the rows of each split."""
    values, active = site.store["values"], site.store.facts["active"]
    n_records = len(part.lookup.columns)
    fits = (asked.rows < len(values)).all() and (asked.records < n_records).all()
    if not fits or not len(asked.rows) or asked.sizes.sum() != len(asked.rows):
        raise ProtocolError(active, "Questions", "rows", "must be of this table and these splits")
    rows = np.split(asked.rows, np.cumsum(asked.sizes)[:-1])
    places = zip(asked.records, rows, strict=True)
    sides = [part.lookup.sides(record, values, at) for record, at in places]
    return np.packbits(np.concatenate(sides)), rows


def begin_trees(store: Store, part: ActivePart, first: int, at_once: int) -> None:
    """Put all rows at the roots of the next ``at_once`` trees; 0: of all trees."""
    n_trees = len(part.model.trees[first:][: at_once or None])
    store["nodes"] = np.zeros((n_trees, len(store["ids"])), dtype=np.int32)
    store.facts["first_tree"] = first


def _walk_local(site: Site, part: ActivePart) -> Asked:
    """Route rows by local splits until all are at leaves or others' splits; returns the latter."""
    store, asked = site.store, Asked()
    nodes, values = np.array(store["nodes"]), store["values"]
    for index, tree_nodes in enumerate(nodes):
        number = store.facts["first_tree"] + index
        lefts, records = part.model.trees[number]["left"], part.records[number]
        owners = part.owners[number]
        # Children come after their parents, so one pass takes a row all the way.
        for node in np.flatnonzero(lefts != LEAF).tolist():
            rows = np.flatnonzero(tree_nodes == node)
            if len(rows) and owners[node] == site.name:
                sides = part.lookup.sides(records[node], values, rows)
                tree_nodes[rows] = lefts[node] + ~sides  # the right child follows the left
            elif len(rows):
                asked.setdefault(owners[node], []).append((index, node, int(records[node])))
    store["nodes"] = nodes
    return asked


def take_answers(site: Site, mail: Mail, part: ActivePart) -> None:
    """Move the rows that were asked about."""
    store, asked = site.store, site.store.facts["asked"]
    places = [place for splits in asked.values() for place in splits]
    trees, nodes = (np.array([place[k] for place in places], dtype=np.int32) for k in (0, 1))
    slots, sizes = slots_of(store["nodes"], trees, nodes)
    sides, end = [np.empty(0, dtype=bool)], 0
    for party, splits in asked.items():
        letter, start, end = mail.one(Answers, party), end, end + len(splits)
        part.check(party, letter.part)
        n_rows = int(sizes[start:end].sum())
        sides += sent_bits(party, "Answers", "bits", letter.bits, [n_rows])
    trees_walked = part.model.trees[store.facts["first_tree"] :]
    lefts = np.array([trees_walked[tree]["left"][node] for tree, node, _ in places], dtype=np.int32)
    firsts = np.cumsum(sizes) - sizes
    store["nodes"] = move_rows(store["nodes"], lefts, slots, firsts, np.concatenate(sides))
