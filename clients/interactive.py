"""Interactive inference at a party: answer for own splits, or walk the trees and ask.

Source: Cheng et al. 2019, Figure 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.alignment import check_order
from fedapp.data.predictions import named_predictions, write_predictions
from fedapp.errors import DataError, ProtocolError
from fedapp.messages.fields import Array, Request
from fedapp.messages.interactive import (
    AnswerReply,
    AnswerRequest,
    Answers,
    Questions,
    WalkReply,
    WalkRequest,
)
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import Mail, read_mail, write_mail
from fedapp.site.store import Store
from fedapp.trees.bagged import BaggedForest
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.partition import goes_left, move_rows, rows_of
from fedapp.trees.parts import Lookup, model_of, part_digest, read_part, split_owners

OUTPUT = "predictions"
Model = Ensemble | BaggedForest
Asked = dict[str, list[tuple[int, int, int]]]  # by party: tree, node, record


def walk(site: Site, request: WalkRequest) -> WalkReply:
    """At the active party: move all rows as far as the answers and the own splits allow."""
    store, mail = site.store, read_mail(site, request)
    part = read_part(model_folder(store))
    model = model_of(part)
    if "nodes" not in store:
        check_order(site, mail)
        store["nodes"] = np.zeros((len(model.trees), len(store["ids"])), dtype=np.int32)
    else:
        _take_answers(site, mail, model, part)
    asked = _walk_own(store, model, part)
    letters = [(name, _questions(store, places)) for name, places in asked.items()]
    store.facts["asked"] = asked
    reply = WalkReply(**write_mail(site, letters), finished=not asked, n_trees=len(model.trees))
    if not asked:
        predictions = model.predictions(store["nodes"])
        write_rows(site, predictions, model.classes, request.suffix)
    return reply


def answer(site: Site, request: AnswerRequest) -> AnswerReply:
    """At a passive party: the side of each row asked about."""
    store, mail, active = site.store, read_mail(site, request), site.store.facts["active"]
    lookup, folder = Lookup.from_json(read_part(model_folder(store))), model_folder(store)
    questions = mail.all(Questions).get(active)
    if questions is None:
        return AnswerReply(**write_mail(site, []))
    n_rows, n_records = len(store["ids"]), len(lookup.columns)
    fits = (questions.rows < n_rows).all() and (questions.records < n_records).all()
    if not fits or questions.sizes.sum() != len(questions.rows):
        raise ProtocolError(active, "Questions", "rows", "must be of this table and these splits")
    sides = np.empty(len(questions.rows), dtype=bool)
    end = 0
    for record, size in zip(questions.records, questions.sizes, strict=True):
        start, end = end, end + size
        column, is_left = lookup.columns[record], bool(lookup.defaults[record])
        values = store["values"][questions.rows[start:end], column]
        sides[start:end] = goes_left(values, lookup.thresholds[record], is_left)
    digest = np.frombuffer(part_digest(folder), dtype=np.uint8)
    letter = Answers(digest, np.packbits(sides))
    return AnswerReply(**write_mail(site, [(active, letter)]))


def model_folder(store: Store) -> Path:
    """Where the party's part of the model lies."""
    return store.folder.parent / str(store.facts["model"])


def _walk_own(store: Store, model: Model, part: Mapping[str, Any]) -> Asked:
    """Walk until every row is at a leaf or at another's split; which splits those are."""
    lookup, asked = Lookup.from_json(part), Asked()
    nodes = np.array(store["nodes"])
    owners = split_owners(model, part)
    for number, (tree, records) in enumerate(zip(model.trees, part["splits"], strict=True)):
        # Children stand behind their parents, so one pass takes a row all the way.
        for node in np.flatnonzero(tree["left"] != LEAF).tolist():
            rows = rows_of(nodes, number, node)
            if not len(rows):
                continue
            owner, record = owners[number][node], records[node]
            if owner != part["name"]:
                asked.setdefault(owner, []).append((number, node, record))
                continue
            column, is_left = lookup.columns[record], bool(lookup.defaults[record])
            sides = goes_left(store["values"][rows, column], lookup.thresholds[record], is_left)
            left = int(tree["left"][node])
            nodes[number, rows] = np.where(sides, left, left + 1)
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


def _take_answers(site: Site, mail: Mail, model: Model, part: Mapping[str, Any]) -> None:
    """Move the rows that were asked about."""
    store, lefts = site.store, {}
    for party, places in store.facts["asked"].items():
        letter = mail.one(Answers, party)
        if letter.part.tobytes().hex() != part["parts"][party]:
            raise DataError("model must be the one this run was trained with", party)
        rows = [rows_of(store["nodes"], tree, node) for tree, node, _ in places]
        n_asked = sum(map(len, rows))
        if len(letter.bits) != -(-n_asked // 8):
            rule = f"must be {-(-n_asked // 8)} bytes for {n_asked} rows, got {len(letter.bits)}"
            raise ProtocolError(party, "Answers", "bits", rule)
        sides = np.unpackbits(letter.bits)[:n_asked].astype(bool)
        ends = np.cumsum([len(each) for each in rows])[:-1]
        for (tree, node, _), bits in zip(places, np.split(sides, ends), strict=True):
            lefts[tree, node] = (int(model.trees[tree]["left"][node]), bits)
    store["nodes"] = move_rows(store["nodes"], lefts)


def write_rows(site: Site, predictions: Array, classes: Sequence[str], suffix: str) -> None:
    """Write a line for every row, in the order of the party's table; forget the rows.

    Parameters
    ----------
    predictions : shape (n_rows, n_outputs), rows in the common order.
    """
    store = site.store
    order = np.argsort(store["places"], kind="stable")
    named = named_predictions(classes, predictions.shape[1], predictions[order])
    name = site.config.id_column or "row"
    ids: npt.NDArray[np.str_] = store["ids"][order]
    write_predictions(store.folder / f"{OUTPUT}{suffix}", name, ids, named)
    store.forget()


HANDLERS: Mapping[type[Request], Handler] = {WalkRequest: walk, AnswerRequest: answer}
