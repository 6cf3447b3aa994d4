"""Explanations of single rows, from what each party may see anyway.

Every party sees its columns, the thresholds of its splits, and so the side of each that a row's
value is on. In addition:

- interactive: a passive party is asked about a row at its splits, so it sees which of them the row
  reaches. The active party sees the row's whole path: the owner and side of others' splits,
  everything about its splits, and the leaf.
- one-round: the active party sees the same. A passive party is not asked; it knows a forest's
  structure, so it sees which of its splits its other splits leave open to the row.
- eini: nobody sees a row's path. Each party sees which of its splits its other splits leave open;
  the active party also the score, and the owners of the other splits.

Where parties share column names, the active party has those of a boosted model's splits. The files
are ``explanation.json`` and ``explanation.txt`` in the site's folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from clients.inference import ActivePart, OwnPart, own_part
from fedapp.data.predictions import named_predictions
from fedapp.home import write_atomically
from fedapp.messages.fields import Array, Request
from fedapp.messages.inference import ExplainReply, ExplainRequest
from fedapp.site.answer import Handler, Site
from fedapp.trees.divided import categories_of, open_splits, path_to
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.sets import names_of

NAME = "explanation"
Entry = dict[str, Any]
OPEN = (
    "splits that this party's other splits leave open to the row; whether it gets there is unseen"
)
REACHED = "splits that the row reaches"


def begin(site: Site, request: ExplainRequest) -> ExplainReply:
    """Store the rows to explain; a passive party of a forest knows the structure already."""
    store = site.store
    index = {row: position for position, row in enumerate(store["ids"].tolist())}
    store.facts["explained"] = {row: index.get(row, -1) for row in request.rows}
    part = own_part(site)
    if "trees" in part.document:
        trees = part.document["trees"]
        pairs = ((np.array(tree["lefts"]), np.array(tree["records"])) for tree in trees)
        explain_open(site, part, pairs)
    elif store.facts["active"] != site.name:
        _write(site, REACHED, {row: {"splits": []} for row in _rows(site)})
    return ExplainReply(done=True)


def explain_open(site: Site, part: OwnPart, trees: Iterable[tuple[Array, Array]]) -> None:
    """At a passive party: splits that its others leave open; ``trees``: left children, records."""
    entries: dict[str, Entry] = {row: {"splits": []} for row in _rows(site)}
    for number, (lefts, records) in enumerate(trees):
        for row, splits in _open(site, part, number, lefts, records).items():
            entries[row]["splits"] += [split for split in splits if "column" in split]
    _write(site, OPEN, entries)


def explain_asked(site: Site, part: OwnPart, records: Array, rows: list[Array]) -> None:
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


def _split(site: Site, part: OwnPart, record: int, place: int) -> Entry:
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
    site: Site, part: OwnPart, tree: int, lefts: Array, records: Array
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


HANDLERS: Mapping[type[Request], Handler] = {ExplainRequest: begin}
