"""Interactive inference at a party: answer for own splits, or walk the trees and ask.

Source: Cheng et al. 2019, Figure 3.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clients.alignment import check_order
from clients.explain import explain_asked, explain_scores
from clients.inference import (
    ActivePart,
    active_part,
    own_digest,
    own_part,
    predictions_by_leaves,
    write_rows,
)
from fedapp.errors import ProtocolError
from fedapp.messages.fields import Request
from fedapp.messages.interactive import (
    AnswerReply,
    AnswerRequest,
    Answers,
    Questions,
    WalkReply,
    WalkRequest,
)
from fedapp.site.answer import Handler, Site
from fedapp.site.bits import sent_bits
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store
from fedapp.trees.model import LEAF
from fedapp.trees.sides import moved, rows_of, slots_of

Asked = dict[str, list[tuple[int, int, int]]]  # by party: place of the tree, node, record


def walk(site: Site, request: WalkRequest, mail: Mail) -> tuple[WalkReply, Letters]:
    """At the active party: move rows as far as the answers and the own splits allow.

    Of so many trees at once as the request says; the next ones begin when these are done.
    """
    store, part = site.store, active_part(site)
    if "nodes" not in store:
        check_order(site, mail)
        _begin_trees(store, part, 0, request.trees_at_once)
    else:
        _take_answers(site, mail, part)
    asked = _walk_on(site, part, request.trees_at_once)
    letters: Letters = [(name, _questions(store, places)) for name, places in asked.items()]
    store.facts["asked"] = asked
    if not asked:
        leaves = np.concatenate([store[f"leaves.{first}"] for first in store.facts["done"]])
        predictions = predictions_by_leaves(site, part, leaves)
        explain_scores(site, part, predictions, leaves)
        write_rows(site, part, predictions, request.suffix)
    return WalkReply(finished=not asked, n_trees=len(part.model.trees)), letters


def answer(site: Site, request: AnswerRequest, mail: Mail) -> tuple[AnswerReply, Letters]:
    """At a passive party: the side of each row asked about; in the end, forget the rows."""
    store, active = site.store, site.store.facts["active"]
    if request.last:
        store.forget()
    questions = mail.all(Questions).get(active)
    if questions is None:
        return AnswerReply(), []
    part, values = own_part(site), store["values"]
    n_records = len(part.lookup.columns)
    fits = (questions.rows < len(values)).all() and (questions.records < n_records).all()
    if not fits or not len(questions.rows) or questions.sizes.sum() != len(questions.rows):
        raise ProtocolError(active, "Questions", "rows", "must be of this table and these splits")
    rows = np.split(questions.rows, np.cumsum(questions.sizes)[:-1])
    asked = zip(questions.records, rows, strict=True)
    found = [part.lookup.sides(record, values, at) for record, at in asked]
    explain_asked(site, part, questions.records, rows)
    letter = Answers(own_digest(site), np.packbits(np.concatenate(found)))
    return AnswerReply(), [(active, letter)]


def _begin_trees(store: Store, part: ActivePart, first: int, at_once: int) -> None:
    """Put all rows at the roots of the next trees; 0 at once: of all trees."""
    n_trees = len(part.model.trees[first:][: at_once or None])
    store["nodes"] = np.zeros((n_trees, len(store["ids"])), dtype=np.int32)
    store.facts["first_tree"] = first


def _walk_on(site: Site, part: ActivePart, at_once: int) -> Asked:
    """Walk these trees, and the next ones while nothing is left to ask; what is to be asked."""
    store = site.store
    while not (asked := _walk_own(site, part)):
        first = store.facts["first_tree"]
        end = first + len(store["nodes"])
        store[f"leaves.{first}"] = store["nodes"]
        store.facts["done"] = [*store.facts.get("done", []), first]
        if end >= len(part.model.trees):
            break
        _begin_trees(store, part, end, at_once)
    return asked


def _walk_own(site: Site, part: ActivePart) -> Asked:
    """Walk until every row is at a leaf or at another's split; which splits those are."""
    store, asked = site.store, Asked()
    nodes, values = np.array(store["nodes"]), store["values"]
    for place, inside in enumerate(nodes):
        number = store.facts["first_tree"] + place
        lefts, records = part.model.trees[number]["left"], part.records[number]
        owners = part.owners[number]
        # Children stand behind their parents, so one pass takes a row all the way.
        for node in np.flatnonzero(lefts != LEAF).tolist():
            rows = np.flatnonzero(inside == node)
            if len(rows) and owners[node] == site.name:
                sides = part.lookup.sides(records[node], values, rows)
                inside[rows] = lefts[node] + ~sides
            elif len(rows):
                asked.setdefault(owners[node], []).append((place, node, int(records[node])))
    store["nodes"] = nodes
    return asked


def _questions(store: Store, places: list[tuple[int, int, int]]) -> Questions:
    """What one party is asked."""
    rows = [rows_of(store["nodes"], tree, node) for tree, node, _ in places]
    return Questions(
        np.array([record for _, _, record in places], dtype=np.int64),
        np.array([len(each) for each in rows], dtype=np.int64),
        np.concatenate(rows).astype(np.int32),
    )


def _take_answers(site: Site, mail: Mail, part: ActivePart) -> None:
    """Move the rows that were asked about."""
    store, asked = site.store, site.store.facts["asked"]
    places = [place for own in asked.values() for place in own]
    trees, nodes = (np.array([place[k] for place in places], dtype=np.int32) for k in (0, 1))
    slots, sizes = slots_of(store["nodes"], trees, nodes)
    sides, end = [np.empty(0, dtype=bool)], 0
    for party, own in asked.items():
        letter, start, end = mail.one(Answers, party), end, end + len(own)
        part.check(party, letter.part)
        n_rows = int(sizes[start:end].sum())
        sides += sent_bits(party, "Answers", "bits", letter.bits, [n_rows])
    known = part.model.trees[store.facts["first_tree"] :]
    lefts = np.array([known[tree]["left"][node] for tree, node, _ in places], dtype=np.int32)
    firsts = np.cumsum(sizes) - sizes
    store["nodes"] = moved(store["nodes"], lefts, slots, firsts, np.concatenate(sides))


HANDLERS: Mapping[type[Request], Handler] = {WalkRequest: walk, AnswerRequest: answer}
