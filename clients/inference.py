"""Inference with a divided model at a party: traverse or intersect, write and explain predictions.

Interactive inference asks the owners of splits for the sides of rows (``walk`` and ``answer``); so
does SecureBoost with the rows of an initial model. One-round prediction intersects the leaf sets of
all parties (``answer_leaf_sets`` and ``intersect``). Explanations show what a party sees anyway.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.scoring import prediction_scores
from clients.vertical import check_order
from fedapp.data.predictions import named_predictions, unmatched_note, write_predictions
from fedapp.errors import DataError, ProtocolError, as_protocol_error
from fedapp.home import write_atomically
from fedapp.messages.fields import Array, Request, check_sizes
from fedapp.messages.inference import (
    AnswerReply,
    AnswerRequest,
    Answers,
    ExplainReply,
    ExplainRequest,
    IntersectReply,
    IntersectRequest,
    LeafSets,
    LeafSetsReply,
    LeafSetsRequest,
    Questions,
    WalkReply,
    WalkRequest,
)
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store, part_digest, read_part, sent_bits
from fedapp.trees.categories import names_of
from fedapp.trees.divided import (
    Lookup,
    categories_of,
    compress,
    decompress,
    leaves_of,
    model_of,
    open_splits,
    party_sides,
    path_to,
    reachable_leaves,
    split_owners,
)
from fedapp.trees.forest.model import BaggedForest
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.predict import move_rows, rows_of, slots_of

log = logging.getLogger("fedapp.site")
OUTPUT = "predictions"
NAME = "explanation"
OPEN = (
    "splits that this party's other splits leave open to the row; whether it gets there is unseen"
)
REACHED = "splits that the row reaches"
Entry = dict[str, Any]
Asked = dict[str, list[tuple[int, int, int]]]  # by party: place of the tree, node, record
Rows = list[npt.NDArray[np.int32]]
Model = Ensemble | BaggedForest
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A party's part of a model; read once a step."""

    document: Mapping[str, Any]  # the file's content
    lookup: Lookup  # the party's splits


@dataclass(frozen=True, slots=True, eq=False)
class ActivePart(Part):
    """The active party's part: also structure, leaves, and the owner of each split."""

    model: Model  # without others' thresholds
    owners: list[list[str]]  # by tree and node; meaningless at leaves
    records: list[Ints]  # by tree and node: number of the split in its owner's lookup

    def check(self, party: str, digest: Array) -> None:
        """Raise a DataError if another party's part is not the one the model was trained with."""
        if digest.tobytes().hex() != self.document["parts"].get(party):
            raise DataError("model must be the one this run was trained with", party)


def read_party_part(site: Site, model: str = "") -> Part:
    """A party's part of the run's model, or of another one by its id."""
    document = read_part(_folder(site, model))
    return Part(document, Lookup.from_json(document))


def active_part(site: Site, model: str = "") -> ActivePart:
    """As ``read_party_part``, at the active party; raises a DataError if a party is missing."""
    document = read_part(_folder(site, model))
    if missing := sorted(document["parts"].keys() - site.store.facts["peers"].keys()):
        raise DataError(f"parties must be those of the model, got none named {', '.join(missing)}")
    trees, records = model_of(document), [np.array(one) for one in document["splits"]]
    owners = split_owners(trees, document)
    return ActivePart(document, Lookup.from_json(document), trees, owners, records)


def part_digest_array(site: Site, model: str = "") -> Array:
    """Digest of the party's part, for the active party; uint8, shape (32,)."""
    return np.frombuffer(part_digest(_folder(site, model)), dtype=np.uint8)


def predictions_by_sums(site: Site, part: ActivePart, sums: npt.NDArray[np.float64]) -> Array:
    """Predictions from sums of leaf terms, shape (n_rows, n_outputs)."""
    if isinstance(part.model, Ensemble):
        return part.model.predictions_of(sums, site.store.find("base_margins"))
    return part.model.predictions_of(sums)


def write_rows(site: Site, part: ActivePart, predictions: Array, suffix: str) -> None:
    """Write one prediction per row, in the order of the party's table; then drop the rows.

    ``predictions`` has shape (n_rows, n_outputs), in the common order. ``predictions.json`` has
    the unmatched ids, and scores where the table has labels. None of it leaves the party.
    """
    store, model = site.store, part.model
    order = np.argsort(store["places"], kind="stable")
    named = named_predictions(model.classes, predictions.shape[1], predictions[order])
    name = site.config.id_column or "row"
    write_predictions(store.folder / f"{OUTPUT}{suffix}", name, store["ids"][order], named)
    unmatched = store["unmatched"].tolist()
    if unmatched and not site.config.simulated:
        text = unmatched_note(len(unmatched), len(unmatched) + len(order))
        log.warning("%s: %s has their ids", text, f"{OUTPUT}.json")
    scores, note = dict[str, float](), ""
    if "labels" in store:
        scored_rows = predictions, store["labels"], store["weights"], part.document.get("threshold")
        scores, note = prediction_scores(model.objective, model.classes, *scored_rows)
    finite_scores = {name: None if np.isnan(value) else value for name, value in scores.items()}
    summary = {"rows": len(order), "not_matched": unmatched, "scores": finite_scores}
    text = json.dumps({**summary, "note": note}, indent=1) + "\n"
    write_atomically(store.folder / f"{OUTPUT}.json", text.encode())
    store.forget()


def _folder(site: Site, model: str) -> Path:
    return site.store.folder.parent / (model or str(site.store.facts["model"]))


def walk(site: Site, request: WalkRequest, mail: Mail) -> tuple[WalkReply, Letters]:
    """At the active party: route rows of ``trees_at_once`` trees as far as answers allow."""
    store, part = site.store, active_part(site)
    if "nodes" not in store:
        check_order(site, mail)
        begin_trees(store, part, 0, request.trees_at_once)
    else:
        take_answers(site, mail, part)
    letters = ask_on(site, part, request.trees_at_once)
    if not letters:
        leaves = leaves_reached(store)
        if isinstance(part.model, Ensemble):
            predictions = part.model.predictions(leaves, store.find("base_margins"))
        else:
            predictions = part.model.predictions(leaves)
        explain_scores(site, part, predictions, leaves)
        write_rows(site, part, predictions, request.suffix)
    return WalkReply(finished=not letters, n_trees=len(part.model.trees)), letters


def answer(site: Site, request: AnswerRequest, mail: Mail) -> tuple[AnswerReply, Letters]:
    """At a passive party: sides of the rows asked about; after the last, drop the rows."""
    store, active = site.store, site.store.facts["active"]
    if request.last:
        store.forget()
    questions = mail.all(Questions).get(active)
    if questions is None:
        return AnswerReply(), []
    part = read_party_part(site)
    bits, rows = answers(site, part, questions)
    explain_asked(site, part, questions.records, rows)
    return AnswerReply(), [(active, Answers(part_digest_array(site), bits))]


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


def answers(site: Site, part: Part, asked: Questions) -> tuple[npt.NDArray[np.uint8], Rows]:
    """At a passive party: packed sides of the rows asked about, and the rows of each split."""
    values, active = site.store["values"], site.store.facts["active"]
    n_records = len(part.lookup.columns)
    fits = (asked.rows < len(values)).all() and (asked.records < n_records).all()
    if not fits or not len(asked.rows):
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


# Source: Liu et al. 2019, "Federated Forest", Algorithms 3 and 4.
def answer_leaf_sets(
    site: Site, request: LeafSetsRequest, mail: Mail
) -> tuple[LeafSetsReply, Letters]:
    """Algorithm 3 at a passive party."""
    store, active = site.store, site.store.facts["active"]
    part = read_party_part(site)
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
        part_digest_array(site),
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
    check_sizes(name, letter, n_trees=n_trees)
    sets, ends = letter.sets.tobytes(), [0, *letter.ends.tolist()]
    return (sets[start:end] for start, end in pairwise(ends))


def note_explained(site: Site, request: ExplainRequest) -> ExplainReply:
    """Store the rows to explain; a passive party of a forest knows the structure already."""
    store = site.store
    index = {row: position for position, row in enumerate(store["ids"].tolist())}
    store.facts["explained"] = {row: index.get(row, -1) for row in request.rows}
    part = read_party_part(site)
    if "trees" in part.document:
        trees = part.document["trees"]
        pairs = ((np.array(tree["lefts"]), np.array(tree["records"])) for tree in trees)
        explain_open(site, part, pairs)
    elif store.facts["active"] != site.name:
        _write(site, REACHED, {row: {"splits": []} for row in _rows(site)})
    return ExplainReply(done=True)


# Every party sees its columns, the thresholds of its splits, and so the side of each that a row's
# value is on. In addition:
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
# files are ``explanation.json`` and ``explanation.txt`` in the site's folder.
def explain_open(site: Site, part: Part, trees: Iterable[tuple[Array, Array]]) -> None:
    """At a passive party: splits that its others leave open; ``trees``: left children, records."""
    entries: dict[str, Entry] = {row: {"splits": []} for row in _rows(site)}
    for number, (lefts, records) in enumerate(trees):
        for row, splits in _open(site, part, number, lefts, records).items():
            entries[row]["splits"] += [split for split in splits if "column" in split]
    _write(site, OPEN, entries)


def explain_asked(site: Site, part: Part, records: Array, rows: list[Array]) -> None:
    """At a passive party: its splits that a row has reached; ``rows`` per record asked about."""
    wanted = _rows(site)
    reached: dict[str, list[int]] = site.store.facts.get("reached", {})
    for record, rows_asked in zip(records.tolist(), rows, strict=True):
        for row, place in wanted.items():
            if (rows_asked == place).any():
                reached.setdefault(row, []).append(record)
    site.store.facts["reached"] = reached
    entries = {
        row: {"splits": [_split(site, part, one, place) for one in reached.get(row, [])]}
        for row, place in wanted.items()
    }
    _write(site, REACHED, entries)


def explain_scores(
    site: Site, part: ActivePart, predictions: Array, leaves: Array | None = None
) -> None:
    """At the active party: scores, with the rows' paths if leaves are known, else open splits."""
    rows, entries = _rows(site), dict[str, Entry]()
    seen: dict[str, list[Entry]] = {row: [] for row in rows}
    # Without leaves: splits that local splits leave open to each row, with their owners.
    for number, tree in enumerate(part.model.trees if leaves is None else ()):
        is_local = np.array(part.owners[number]) == site.name
        records = np.where(is_local & (tree["left"] != LEAF), part.records[number], -1)
        for row, splits in _open(site, part, number, tree["left"], records).items():
            seen[row] += [
                {**_owner_facts(part, number, split["node"]), **split} for split in splits
            ]
    for row, place in rows.items():
        named = named_predictions(part.model.classes, part.model.n_outputs, predictions[[place]])
        entries[row] = {"score": {name: float(value[0]) for name, value in named.items()}}
        if leaves is None:
            entries[row]["splits"] = seen[row]
        else:
            entries[row] |= _path(site, part, place, leaves[:, place].tolist())
    _write(site, OPEN if leaves is None else REACHED, entries)


def _rows(site: Site) -> dict[str, int]:
    """Rows to explain that the party has: id -> place in the common order."""
    explained: Mapping[str, int] = site.store.facts.get("explained", {})
    return {row: place for row, place in explained.items() if place >= 0}


def _split(site: Site, part: Part, record: int, place: int) -> Entry:
    lookup, column = part.lookup, int(part.lookup.columns[record])
    value = float(site.store["values"][place, column])
    is_left = bool(lookup.sides(record, site.store["values"], place))
    names = names_of(categories_of(part.document), column)
    cut: Entry = {"threshold": float(lookup.thresholds[record])}
    if names:
        goes_right = np.flatnonzero(lookup.sets.members(int(lookup.numbers[record])))
        cut = {"goes_right": sorted(names[code] for code in goes_right)}
    shown = value if names is None else names[int(np.nan_to_num(value))]
    return {
        "column": part.document["columns"][column],
        "value": None if np.isnan(value) else shown,
        **cut,
        "missing": "left" if lookup.defaults[record] else "right",
        "side": "left" if is_left else "right",
    }


def _open(
    site: Site, part: Part, tree: int, lefts: Array, records: Array
) -> dict[str, list[Entry]]:
    # records: -1 except at local splits
    local, open_by_row = np.flatnonzero(records >= 0), {}
    for row, place in _rows(site).items():
        sides = part.lookup.sides(records[local], site.store["values"], place)
        open_by_row[row] = [
            {"tree": tree, "node": node}
            | (_split(site, part, int(records[node]), place) if records[node] >= 0 else {})
            for node in open_splits(lefts, local, sides)
        ]
    return open_by_row


def _path(site: Site, part: ActivePart, place: int, leaves: list[int]) -> Entry:
    """All splits on a row's path, others' by their side only; and its leaf values."""
    splits = []
    for number, leaf in enumerate(leaves):
        for node, is_left in path_to(part.model.trees[number]["left"], leaf):
            split = {**_owner_facts(part, number, node), "side": "left" if is_left else "right"}
            if part.owners[number][node] == site.name:
                split |= _split(site, part, int(part.records[number][node]), place)
            splits.append(split)
    terms = [part.model.leaf_terms(number)[leaf].tolist() for number, leaf in enumerate(leaves)]
    return {"splits": splits, "leaves": terms}


def _owner_facts(part: ActivePart, number: int, node: int) -> Entry:
    """A split's owner; for a boosted model its gain and column name or number."""
    facts: Entry = {"tree": number, "node": node, "party": part.owners[number][node]}
    if isinstance(part.model, Ensemble):
        split = part.model.trees[number][node]
        facts |= {"column": part.model.columns[split["column"]], "gain": float(split["gain"])}
    return facts


def _write(site: Site, splits: str, rows: Mapping[str, Entry]) -> None:
    facts = site.store.facts
    if "explained" not in facts:
        return
    missing = [row for row, place in facts["explained"].items() if place < 0]
    document = {
        "format": 1,
        "model": facts["model"],
        "party": site.name,
        "splits": splits,
        "not_among_the_rows": missing,
        "rows": rows,
    }
    folder = site.store.folder
    write_atomically(folder / f"{NAME}.json", (json.dumps(document, indent=1) + "\n").encode())
    write_atomically(folder / f"{NAME}.txt", _text(document).encode())


def _text(document: Mapping[str, Any]) -> str:
    lines = [f"Model {document['model']}, as {document['party']} sees it: {document['splits']}."]
    for row, entry in document["rows"].items():
        score = "".join(f", {name} {value:.6g}" for name, value in entry.get("score", {}).items())
        lines += ["", f"Row {row}{score}"]
        lines += [f"  {_line(split)}" for split in entry["splits"]]
        lines += [
            f"  tree {number} ends in a leaf of {', '.join(f'{value:.6g}' for value in leaf)}"
            for number, leaf in enumerate(entry.get("leaves", []))
        ]
    if document["not_among_the_rows"]:
        lines += ["", f"Not among the rows: {', '.join(document['not_among_the_rows'])}"]
    return "\n".join(lines) + "\n"


def _line(split: Mapping[str, Any]) -> str:
    where = f"tree {split['tree']}, node {split['node']}: " if "tree" in split else ""
    if "goes_right" in split:
        rule = f"{split['column']} not in {', '.join(split['goes_right'])}"
        return f"{where}{rule}? {split['value'] or 'missing'}: {split['side']}"
    if "threshold" not in split:
        column = f", {split['column']}" if "column" in split else ""
        side = f": {split['side']}" if "side" in split else ""
        return f"{where}split of {split['party']}{column}{side}"
    value = "missing" if split["value"] is None else f"{split['value']:.6g}"
    rule = f"{split['column']} < {split['threshold']:.6g}"
    return f"{where}{rule}? {value}: {split['side']}"


HANDLERS: Mapping[type[Request], Handler] = {
    WalkRequest: walk,
    AnswerRequest: answer,
    LeafSetsRequest: answer_leaf_sets,
    IntersectRequest: intersect,
    ExplainRequest: note_explained,
}
