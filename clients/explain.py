"""Explanations of single rows, by each party for itself: what this party may see, and no more.

Every party sees its own columns, the thresholds of its own splits, and so on which side of them a
row's value is. Beside that:

- interactive: a passive party sees which of its splits a row reaches, because it is asked there.
  The active party sees the row's whole way through the trees: at others' splits whose they are and
  the side, at its own all of it; and the leaf.
- one-round: the active party sees the same. A passive party is not asked row by row; it knows the
  structure of a forest, so it sees which of its splits its other ones leave open to the row.
- eini: nobody sees a row's way. A passive party sees which of its splits its other ones leave open,
  from the structure that it gets; so does the active party, which also sees the score, and whose
  the other splits are.

Where parties share their columns' names, the active party has those of a boosted model's splits.
All of it lies in the site's folder as ``explanation.json`` and ``explanation.txt``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from clients.inference import ActivePart, OwnPart, own_part
from fedapp.data.categories import names_of
from fedapp.data.predictions import named_predictions
from fedapp.home import write_whole
from fedapp.messages.explain import ExplainReply, ExplainRequest
from fedapp.messages.fields import Array, Request
from fedapp.site.answer import Handler, Site
from fedapp.trees.divided.lookup import categories_of
from fedapp.trees.divided.paths import open_splits, path_to
from fedapp.trees.model import LEAF, Ensemble

NAME = "explanation"
Found = dict[str, Any]
OPEN = (
    "splits that this party's other splits leave open to the row; whether it gets there is unseen"
)
REACHED = "splits that the row reaches"


def begin(site: Site, request: ExplainRequest) -> ExplainReply:
    """Keep which rows are meant; of a forest a passive party knows the structure already."""
    store = site.store
    places = {row: place for place, row in enumerate(store["ids"].tolist())}
    store.facts["explained"] = {row: places.get(row, -1) for row in request.rows}
    part = own_part(site)
    if "trees" in part.document:
        trees = part.document["trees"]
        pairs = ((np.array(tree["lefts"]), np.array(tree["records"])) for tree in trees)
        explain_open(site, part, pairs)
    elif store.facts["active"] != site.name:
        _write(site, REACHED, {row: {"splits": []} for row in _rows(site)})
    return ExplainReply(done=True)


def explain_open(site: Site, part: OwnPart, trees: Iterable[tuple[Array, Array]]) -> None:
    """At a passive party: own splits that its other ones leave open to a row.

    Parameters
    ----------
    trees : left children of the nodes, and numbers of the own splits among them, -1 elsewhere.
    """
    found: dict[str, Found] = {row: {"splits": []} for row in _rows(site)}
    for number, (lefts, records) in enumerate(trees):
        for row, splits in _open(site, part, number, lefts, records).items():
            found[row]["splits"] += [split for split in splits if "column" in split]
    _write(site, OPEN, found)


def explain_asked(site: Site, part: OwnPart, records: Array, rows: list[Array]) -> None:
    """At a passive party that is asked: own splits that a row has reached.

    Parameters
    ----------
    records : splits that are asked about.
    rows : of each, which rows.
    """
    wanted = _rows(site)
    reached: dict[str, list[int]] = site.store.facts.get("reached", {})
    for record, inside in zip(records.tolist(), rows, strict=True):
        for row, place in wanted.items():
            if (inside == place).any():
                reached.setdefault(row, []).append(record)
    site.store.facts["reached"] = reached
    found = {
        row: {"splits": [_split(site, part, one, place) for one in reached.get(row, [])]}
        for row, place in wanted.items()
    }
    _write(site, REACHED, found)


def explain_scores(
    site: Site, part: ActivePart, predictions: Array, leaves: Array | None = None
) -> None:
    """At the active party: the scores, with the ways through the trees or what it knows of them.

    Parameters
    ----------
    predictions : shape (n_rows, n_outputs).
    leaves : int, shape (n_trees, n_rows), where they are known.
    """
    wanted, found = _rows(site), dict[str, Found]()
    seen = _active_open(site, part) if leaves is None else {}
    for row, place in wanted.items():
        named = named_predictions(part.model.classes, part.model.n_outputs, predictions[[place]])
        found[row] = {"score": {name: float(value[0]) for name, value in named.items()}}
        if leaves is None:
            found[row]["splits"] = seen[row]
        else:
            found[row] |= _way(site, part, place, leaves[:, place].tolist())
    _write(site, OPEN if leaves is None else REACHED, found)


def _rows(site: Site) -> dict[str, int]:
    """Ids of the rows to explain that the party has, and their places in the common order."""
    explained: Mapping[str, int] = site.store.facts.get("explained", {})
    return {row: place for row, place in explained.items() if place >= 0}


def _split(site: Site, part: OwnPart, record: int, place: int) -> Found:
    """One of the party's own splits, and a row there."""
    lookup, column = part.lookup, int(part.lookup.columns[record])
    value = float(site.store["values"][place, column])
    is_left = bool(lookup.sides(record, site.store["values"], place))
    names = names_of(categories_of(part.document), column)
    cut: Found = {"threshold": float(lookup.thresholds[record])}
    if names:
        goes_right = np.flatnonzero(lookup.sets.members(int(lookup.numbers[record])))
        cut = {"goes_right": sorted(names[code] for code in goes_right)}
    known = value if names is None else names[int(np.nan_to_num(value))]
    return {
        "column": part.document["columns"][column],
        "value": None if np.isnan(value) else known,
        **cut,
        "missing": "left" if lookup.defaults[record] else "right",
        "side": "left" if is_left else "right",
    }


def _open(
    site: Site, part: OwnPart, tree: int, lefts: Array, records: Array
) -> dict[str, list[Found]]:
    """Splits of a tree that are open to each row; ``records`` are -1 but at own splits."""
    own, found = np.flatnonzero(records >= 0), {}
    for row, place in _rows(site).items():
        sides = part.lookup.sides(records[own], site.store["values"], place)
        found[row] = [
            {"tree": tree, "node": node}
            | (_split(site, part, int(records[node]), place) if records[node] >= 0 else {})
            for node in open_splits(lefts, own, sides)
        ]
    return found


def _active_open(site: Site, part: ActivePart) -> dict[str, list[Found]]:
    """Splits that the own ones leave open to each row, and whose they are."""
    found: dict[str, list[Found]] = {row: [] for row in _rows(site)}
    for number, tree in enumerate(part.model.trees):
        is_own = np.array(part.owners[number]) == site.name
        records = np.where(is_own & (tree["left"] != LEAF), part.records[number], -1)
        for row, splits in _open(site, part, number, tree["left"], records).items():
            found[row] += [{**_whose(part, number, split["node"]), **split} for split in splits]
    return found


def _way(site: Site, part: ActivePart, place: int, leaves: list[int]) -> Found:
    """All splits on a row's way, of others' ones the side alone; and its leaves' values."""
    splits = []
    for number, leaf in enumerate(leaves):
        for node, is_left in path_to(part.model.trees[number]["left"], leaf):
            split = {**_whose(part, number, node), "side": "left" if is_left else "right"}
            if part.owners[number][node] == site.name:
                split |= _split(site, part, int(part.records[number][node]), place)
            splits.append(split)
    terms = [part.model.leaf_terms(number)[leaf].tolist() for number, leaf in enumerate(leaves)]
    return {"splits": splits, "leaves": terms}


def _whose(part: ActivePart, number: int, node: int) -> Found:
    """Whose a split is; of a boosted model its gain and the column's name, or number."""
    found: Found = {"tree": number, "node": node, "party": part.owners[number][node]}
    if isinstance(part.model, Ensemble):
        at = part.model.trees[number][node]
        found |= {"column": part.model.columns[at["column"]], "gain": float(at["gain"])}
    return found


def _write(site: Site, splits: str, rows: Mapping[str, Found]) -> None:
    """Write both files, whole, if rows are to be explained."""
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
    write_whole(folder / f"{NAME}.json", (json.dumps(document, indent=1) + "\n").encode())
    write_whole(folder / f"{NAME}.txt", _text(document).encode())


def _text(document: Mapping[str, Any]) -> str:
    """The explanation to read: a line a split."""
    lines = [f"Model {document['model']}, as {document['party']} sees it: {document['splits']}."]
    for row, found in document["rows"].items():
        score = "".join(f", {name} {value:.6g}" for name, value in found.get("score", {}).items())
        lines += ["", f"Row {row}{score}"]
        lines += [f"  {_line(split)}" for split in found["splits"]]
        lines += [
            f"  tree {number} ends in a leaf of {', '.join(f'{value:.6g}' for value in leaf)}"
            for number, leaf in enumerate(found.get("leaves", []))
        ]
    if document["not_among_the_rows"]:
        lines += ["", f"Not among the rows: {', '.join(document['not_among_the_rows'])}"]
    return "\n".join(lines) + "\n"


def _line(split: Mapping[str, Any]) -> str:
    """A split in words."""
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


HANDLERS: Mapping[type[Request], Handler] = {ExplainRequest: begin}
