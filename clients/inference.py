"""Inference with a divided model at a party: traverse or intersect, write and explain predictions.

Interactive inference asks the owners of splits for the sides of rows (``walk`` and ``answer``); so
does SecureBoost with the rows of an initial model. One-round prediction intersects the cells of all
parties (``answer_cells`` and ``intersect``). Explanations show what a party sees anyway.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.scoring import prediction_scores
from clients.vertical.growing import rows_after
from clients.vertical.party import Aligned
from fedapp.data.predictions import named_predictions, unmatched_note, write_predictions
from fedapp.errors import as_protocol_error
from fedapp.home import write_atomically
from fedapp.messages.fields import Array, check_fields
from fedapp.messages.inference import (
    AnswerReply,
    AnswerRequest,
    Answers,
    Cells,
    CellsReply,
    CellsRequest,
    ExplainReply,
    ExplainRequest,
    IntersectReply,
    IntersectRequest,
    Questions,
    WalkReply,
    WalkRequest,
)
from fedapp.messages.vertical import MatchRequest, OrderRequest
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, handlers, role
from fedapp.trees.categories import names_of
from fedapp.trees.cells import Crossing, compress, open_cells
from fedapp.trees.divided import ActivePart, ForestPart, Part, open_splits, path_to, way_down
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.predict import Nodes, rows_of
from fedapp.trees.structure import SplitNodes

log = logging.getLogger("fedapp.site")
OUTPUT = "predictions"
OPEN = (
    "splits that this party's other splits leave open to the row; whether it gets there is unseen"
)
REACHED = "splits that the row reaches"
Entry = dict[str, Any]
AskedSplit = tuple[int, int, int]  # index of the tree, node, record
Rows = list[npt.NDArray[np.int32]]


@dataclass(frozen=True, slots=True, eq=False)
class Traversal:
    """Rows on their way down the trees of a model, some trees at once; at the active party."""

    nodes: Nodes  # (n_trees, n_rows): of the trees in progress
    leaves: tuple[Nodes, ...]  # of the trees before, the same
    asked: Mapping[str, tuple[AskedSplit, ...]]  # splits that were asked about, by party

    @property
    def first(self) -> int:
        """Number of the first tree in progress."""
        return sum(map(len, self.leaves))

    @classmethod
    def of(
        cls, part: ActivePart, n_rows: int, at_once: int, leaves: tuple[Nodes, ...] = ()
    ) -> Traversal:
        """All rows at the roots of the next ``at_once`` trees; 0: of all trees."""
        n_trees = len(part.model.trees[sum(map(len, leaves)) :][: at_once or None])
        return cls(np.zeros((n_trees, n_rows), dtype=np.int32), leaves, {})

    def ask_on(self, part: ActivePart, values: Array, at_once: int) -> tuple[Traversal, Letters]:
        """Route rows as far as local splits allow; and questions, none at the end."""
        walk = self._walk_local(part, values)
        # These trees, and the next ones while no question is left.
        while not walk.asked and walk.first + len(walk.nodes) < len(part.model.trees):
            walked, n_rows = (*walk.leaves, walk.nodes), walk.nodes.shape[1]
            walk = Traversal.of(part, n_rows, at_once, walked)._walk_local(part, values)
        letters: Letters = []
        for name, splits in walk.asked.items():
            rows = [rows_of(walk.nodes, tree, node) for tree, node, _ in splits]
            records = np.array([record for _, _, record in splits], dtype=np.int64)
            sizes = np.array([len(row) for row in rows], dtype=np.int64)
            letters.append((name, Questions(records, sizes, np.concatenate(rows).astype(np.int32))))
        return walk, letters

    def _walk_local(self, part: ActivePart, values: Array) -> Traversal:
        """Route rows by local splits until all are at leaves or others' splits, to be asked."""
        nodes, asked = np.array(self.nodes), dict[str, tuple[AskedSplit, ...]]()
        for index, tree_nodes in enumerate(nodes):
            number = self.first + index
            lefts, records = part.model.trees[number]["left"], part.records[number]
            owners = part.owners(number)
            # Children come after their parents, so one pass takes a row all the way.
            for node in np.flatnonzero(lefts != LEAF).tolist():
                rows = np.flatnonzero(tree_nodes == node)
                if len(rows) and owners[node] == part.name:
                    sides = part.lookup.sides(records[node], values, rows)
                    tree_nodes[rows] = lefts[node] + ~sides  # the right child follows the left
                elif len(rows):
                    split = index, node, int(records[node])
                    asked[owners[node]] = (*asked.get(owners[node], ()), split)
        return replace(self, nodes=nodes, asked=asked)

    def answered(self, part: ActivePart, mail: Mail) -> Traversal:
        """Move the rows that were asked about."""
        asked = [split for of_party in self.asked.values() for split in of_party]
        trees, nodes = (np.array([split[k] for split in asked], dtype=np.int32) for k in (0, 1))
        sides: dict[str, Array] = {}
        for party in self.asked:
            letter = mail.one(Answers, party)
            part.check(party, letter.part)
            sides[party] = letter.bits
        walked = part.model.trees[self.first :]
        lefts = np.array([walked[tree]["left"][node] for tree, node, _ in asked], dtype=np.int32)
        owners = np.repeat(np.arange(len(self.asked)), list(map(len, self.asked.values())))
        splits = SplitNodes(trees, nodes, lefts, owners)
        moved = rows_after(self.nodes, splits, list(self.asked), sides, "Answers")
        return replace(self, nodes=moved, asked={})

    def reached(self) -> Nodes:
        """Leaf of each row in each tree, at the end; shape (n_trees, n_rows)."""
        return np.concatenate((*self.leaves, self.nodes))


# Explanations. Every party sees its columns, the thresholds of its splits, and so the side of each
# that a row's value is on. In addition:
#
# - interactive: a passive party is asked about a row at its splits, so it sees which of them the
#   row reaches. The active party sees the row's whole path: the owner and side of others' splits,
#   everything about its splits, and the leaf.
# - one-round: the active party sees the same. A passive party is not asked; it knows a forest's
#   structure, so it sees which of its splits its other splits leave open to the row.
# - eini: nobody sees a row's path. Each party sees which of its splits its other splits leave open;
#   the active party also the score, and the owners of the other splits.
#
# Where parties share column names, the active party has those of a boosted model's splits. The
# file is ``explanation.json`` in the site's folder.
@role
class Predicting(Aligned):
    """State of a party while a divided model predicts."""

    explained: Mapping[str, int] | None = None  # row to explain -> place in the common order, or -1
    reached: Mapping[str, tuple[int, ...]] = {}  # row to explain -> local splits that it reached

    def write_rows(self, part: ActivePart, predictions: Array, suffix: str) -> None:
        """Write one prediction per row, in the order of the party's table; then drop the rows.

        ``predictions`` has shape (n_rows, n_outputs), in the common order. ``predictions.json`` has
        the unmatched ids, and scores where the table has labels. None of it leaves the party.
        """
        model = part.model
        order = np.argsort(self.places, kind="stable")
        named = named_predictions(model.classes, predictions.shape[1], predictions[order])
        name = self.config.id_column or "row"
        write_predictions(self.folder / f"{OUTPUT}{suffix}", name, self.ids[order], named)
        unmatched = self.unmatched.tolist()
        if unmatched and not self.config.simulated:
            text = unmatched_note(len(unmatched), len(unmatched) + len(order))
            log.warning("%s: %s has their ids", text, f"{OUTPUT}.json")
        scores, note = dict[str, float](), ""
        if self.labels is not None:
            scores, note = prediction_scores(
                model, predictions, self.labels, self.weights, part.threshold
            )
        finite_scores = {name: None if np.isnan(value) else value for name, value in scores.items()}
        summary = {"rows": len(order), "not_matched": unmatched, "scores": finite_scores}
        self._write_json(OUTPUT, {**summary, "note": note})
        self.end()

    def _write_json(self, name: str, document: Entry) -> None:
        text = json.dumps(document, indent=1) + "\n"
        write_atomically(self.folder / f"{name}.json", text.encode())

    def explain(self, request: ExplainRequest) -> ExplainReply:
        """Store the rows to explain; a passive party of a forest knows the structure already."""
        index = {row: position for position, row in enumerate(self.ids.tolist())}
        self.explained = {row: index.get(row, -1) for row in request.rows}
        part = self.party_part()
        if isinstance(part, ForestPart):
            self.explain_open(part, ((tree.lefts, tree.records) for tree in part.trees))
        elif not self.is_active:
            self._write(REACHED, {row: {"splits": []} for row in self._rows()})
        return ExplainReply(done=True)

    def explain_open(self, part: Part, trees: Iterable[tuple[Array, Array]]) -> None:
        """At a passive party: splits that its others leave open; ``trees``: lefts, records."""
        entries: dict[str, Entry] = {row: {"splits": []} for row in self._rows()}
        for number, (lefts, records) in enumerate(trees):
            for row, splits in self._open(part, number, lefts, records).items():
                entries[row]["splits"] += [split for split in splits if "column" in split]
        self._write(OPEN, entries)

    def explain_asked(self, part: Part, records: Array, rows: list[Array]) -> None:
        """At a passive party: its splits that a row has reached; ``rows`` of each record."""
        entries, asked = dict[str, Entry](), list(zip(records.tolist(), rows, strict=True))
        for row, position in self._rows().items():
            reached = [record for record, rows_asked in asked if (rows_asked == position).any()]
            self.reached = {**self.reached, row: (*self.reached.get(row, ()), *reached)}
            splits = [self._split(part, record, position) for record in self.reached[row]]
            entries[row] = {"splits": splits}
        self._write(REACHED, entries)

    def explain_scores(
        self, part: ActivePart, predictions: Array, leaves: Array | None = None
    ) -> None:
        """At the active party: scores, with paths if leaves are known, else open splits."""
        rows, entries = self._rows(), dict[str, Entry]()
        seen: dict[str, list[Entry]] = {row: [] for row in rows}
        # Without leaves: splits that local splits leave open to each row, with their owners.
        for number, tree in enumerate(part.model.trees if leaves is None else ()):
            is_local = np.array(part.owners(number)) == self.name
            records = np.where(is_local & (tree["left"] != LEAF), part.records[number], -1)
            for row, splits in self._open(part, number, tree["left"], records).items():
                seen[row] += [_owner_facts(part, number, split["node"]) | split for split in splits]
        for row, position in rows.items():
            model, of_row = part.model, predictions[[position]]
            named = named_predictions(model.classes, model.n_outputs, of_row)
            entries[row] = {"score": {name: float(value[0]) for name, value in named.items()}}
            if leaves is None:
                entries[row]["splits"] = seen[row]
            else:
                entries[row] |= self._path(part, position, leaves[:, position].tolist())
        self._write(OPEN if leaves is None else REACHED, entries)

    def _rows(self) -> dict[str, int]:
        """Rows to explain that the party has: id -> position in the common order."""
        return {row: position for row, position in (self.explained or {}).items() if position >= 0}

    def _split(self, part: Part, record: int, position: int) -> Entry:
        lookup, column = part.lookup, int(part.lookup.columns[record])
        value = float(self.values[position, column])
        is_left = bool(lookup.sides(record, self.values, position))
        names = names_of(part.categories, column)
        cut: Entry = {"threshold": float(lookup.thresholds[record])}
        if names:
            goes_right = np.flatnonzero(lookup.sets.members(int(lookup.numbers[record])))
            cut = {"goes_right": sorted(names[code] for code in goes_right)}
        shown = value if names is None else names[int(np.nan_to_num(value))]
        default = "left" if lookup.defaults[record] else "right"
        seen = {"column": part.columns[column], "value": None if np.isnan(value) else shown}
        return {**seen, **cut, "missing": default, "side": "left" if is_left else "right"}

    def _open(self, part: Part, tree: int, lefts: Array, records: Array) -> dict[str, list[Entry]]:
        # records: -1 except at local splits
        local, open_by_row = np.flatnonzero(records >= 0), {}
        for row, position in self._rows().items():
            sides = part.lookup.sides(records[local], self.values, position)
            open_by_row[row] = [
                {"tree": tree, "node": node}
                | (self._split(part, int(records[node]), position) if records[node] >= 0 else {})
                for node in open_splits(lefts, local, sides)
            ]
        return open_by_row

    def _path(self, part: ActivePart, position: int, leaves: list[int]) -> Entry:
        """All splits on a row's path, others' by their side only; and its leaf values."""
        splits = []
        for number, leaf in enumerate(leaves):
            for node, is_left in path_to(part.model.trees[number]["left"], leaf):
                split = {**_owner_facts(part, number, node), "side": "left" if is_left else "right"}
                if part.owners(number)[node] == self.name:
                    split |= self._split(part, int(part.records[number][node]), position)
                splits.append(split)
        terms = [part.model.leaf_terms(number)[leaf].tolist() for number, leaf in enumerate(leaves)]
        return {"splits": splits, "leaves": terms}

    def _write(self, splits: str, rows: Mapping[str, Entry]) -> None:
        if self.explained is None:
            return
        missing = [row for row, position in self.explained.items() if position < 0]
        of_run = {"format": 1, "model": self.model, "party": self.name, "splits": splits}
        document = {**of_run, "not_among_the_rows": missing, "rows": rows}
        self._write_json("explanation", document)


@role
class Active(Predicting):
    """State of the active party in interactive and one-round inference."""

    title = "the active party"
    order = Order(
        {MatchRequest: {WalkRequest, IntersectRequest}, WalkRequest: {WalkRequest}},
        any_time={ExplainRequest},
    )
    traversal: Traversal | None = None  # where the rows are

    def walk(self, request: WalkRequest, mail: Mail) -> tuple[WalkReply, Letters]:
        """Route rows of ``trees_at_once`` trees as far as answers allow."""
        part, at_once = self.active_part(), request.trees_at_once
        if self.follows(MatchRequest):
            self.check_order(mail)
        walk = self.traversal or Traversal.of(part, len(self.ids), at_once)
        walk = walk.answered(part, mail) if walk.asked else walk
        self.traversal, letters = walk.ask_on(part, self.values, at_once)
        if not letters:
            self._predict(part, self.traversal.reached(), request.suffix)
        return WalkReply(finished=not letters, n_trees=len(part.model.trees)), letters

    def _predict(self, part: ActivePart, leaves: Nodes, suffix: str) -> None:
        """Write predictions and explanations by the leaves of the rows."""
        predictions = part.model.predictions(leaves, self.base_margins)
        self.explain_scores(part, predictions, leaves)
        self.write_rows(part, predictions, suffix)

    # Source: Liu et al. 2019, "Federated Forest", Algorithms 3 and 4.
    def intersect(self, request: IntersectRequest, mail: Mail) -> tuple[IntersectReply, Letters]:
        """Algorithm 4: a row's leaf is the one whose cells all parties leave open to it."""
        part = self.active_part()
        self.check_order(mail)
        crossing, n_rows = Crossing.of(part), len(self.ids)
        cells = {self.name: open_cells(crossing.nestings[self.name], part.lookup, self.values)}
        for name in part.digests:
            letter = mail.one(Cells, name)
            part.check(name, letter.part)
            with as_protocol_error(name, "Cells", "cells"):
                cells[name] = crossing.read(name, letter.cells.tobytes(), n_rows)
        leaves = crossing.leaves(cells, n_rows)
        self._predict(part, leaves, request.suffix)
        return IntersectReply(len(part.model.trees)), []


@role
class Passive(Predicting):
    """State of a passive party in interactive and one-round inference."""

    title = "a passive party"
    order = Order(
        {OrderRequest: {AnswerRequest, CellsRequest}, AnswerRequest: {AnswerRequest}},
        any_time={ExplainRequest},
    )
    last_answers: Nodes | None = None  # see ``fedapp.trees.divided.way_down``

    def answer(self, request: AnswerRequest, mail: Mail) -> tuple[AnswerReply, Letters]:
        """Sides of the rows asked about; after the last, drop the rows."""
        if self.follows(OrderRequest):
            self.check_order(mail)
        if request.last:
            self.end()
        questions = mail.all(Questions).get(self.active)
        if questions is None:
            return AnswerReply(), []
        part = self.party_part()
        bits, rows, self.last_answers = answers(self, part, questions, self.last_answers)
        self.explain_asked(part, questions.records, rows)
        return AnswerReply(), [(self.active, Answers(self.part_digest(), bits))]

    def answer_cells(self, request: CellsRequest, mail: Mail) -> tuple[CellsReply, Letters]:
        """Algorithm 3: which rows the local splits leave open to which leaves."""
        self.check_order(mail)
        part = self.party_part()
        cells = compress(open_cells(part.nesting, part.lookup, self.values))
        letter = Cells(self.part_digest(), np.frombuffer(cells, dtype=np.uint8))
        self.end()
        return CellsReply(), [(self.active, letter)]


def answers(
    party: Aligned, part: Part, asked: Questions, last: Nodes | None
) -> tuple[npt.NDArray[np.uint8], Rows, Nodes]:
    """At a passive party: packed sides of the rows asked about, and the rows of each split.

    ``last`` are the answers before, as in ``way_down``; those after are returned too.

    Only what a traversal of the trained trees asks is answered. A server that goes back cannot have
    another way of a row asked: the account of the run accepts the same letter only.
    """
    values, active = party.values, party.active
    n_records = len(part.lookup.columns)
    fits = (asked.rows < len(values)).all() and (asked.records < n_records).all()
    rule = "must be of this table and these splits"
    check_fields(active, asked, ("rows", fits and len(asked.rows), rule))
    records = np.repeat(asked.records, asked.sizes)
    with as_protocol_error(active, "Questions", "rows"):
        slots, last = way_down(part.nesting, last, len(values), records, asked.rows)
    rows = np.split(asked.rows, np.cumsum(asked.sizes)[:-1])
    pairs = zip(asked.records, rows, strict=True)
    sides = np.concatenate([part.lookup.sides(record, values, at) for record, at in pairs])
    last.ravel()[slots] = 2 * records + sides
    return np.packbits(sides), rows, last


def _owner_facts(part: ActivePart, number: int, node: int) -> Entry:
    """A split's owner; for a boosted model its gain and column name or number."""
    facts: Entry = {"tree": number, "node": node, "party": part.owners(number)[node]}
    if isinstance(part.model, Ensemble):
        split = part.model.trees[number][node]
        facts |= {"column": part.model.columns[split["column"]], "gain": float(split["gain"])}
    return facts


HANDLERS = handlers(Active, Passive)
