"""Federated forests put together from their parts, and the same forest grown in one place."""

import json
from dataclasses import replace

import numpy as np

from fedapp.home import home
from fedapp.site.store import PART_FILE, read_part, write_part
from fedapp.trees.categories import side_by_side
from fedapp.trees.divided import PARTS, ActivePart
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.sets import CategorySets
from simulations.study import pooled_forest
from tests.federated import summary_of
from tests.pooled import Pooled
from tests.tables import made_columns, write_rows


def part_of(party, model_id):
    return json.loads((home() / "sites" / party / model_id / PART_FILE).read_text())


def read_part_of(party, model_id):
    return read_part(home() / "sites" / party / model_id, *PARTS)


def move_thresholds(folder):
    """Change the thresholds of a party's part; its checksum is right."""
    part = read_part(folder, *PARTS)
    lookup = replace(part.lookup, thresholds=part.lookup.thresholds + 1)
    write_part(folder, replace(part, lookup=lookup))


def parts_of(folder):
    """What each party keeps of a run, without salt."""
    summary = summary_of(folder)
    names = [party["name"] for party in summary["parties"]]
    return [without_salt(part_of(name, summary["model_id"])) for name in names]


def without_salt(part):
    """A part of a model without what differs each time: salt, and digests of parts with salt."""
    digests = dict.fromkeys(part.get("digests", {}), "")
    return {**part, "salt": "", **({"digests": digests} if digests else {})}


def forest_settings(make_settings, folder, n_rows, **usual):
    """``make(objective, parties, **more)``: settings of a forest of depth 3; words after ``own_``
    are the method's own."""

    def make(objective="binary:logistic", parties=2, **more):
        data = folder / f"{objective[:5]}.csv"
        if not data.exists():
            write_rows(data, made_columns(objective, n_rows))
        given = {"data": str(data), "label": "y", "objective": objective, "parties": parties}
        given |= {"own_max_depth": 3, "align": "ordered", **usual, **more}
        values = {name.replace("own_", "federated-forest__", 1): v for name, v in given.items()}
        return make_settings(strategy="federated-forest", **values)

    return make


def encrypted_forest(make_settings, folder):
    """`forest_settings` of 3 trees, labels under a small key."""
    own = {"own_labels": "paillier", "own_key_bits": 256, "own_insecure_small_key": True}
    return forest_settings(make_settings, folder, 200, own_trees=3, max_bin=16, **own)


def joined(folder):
    """The whole forest of a run, from the parts that lie with its parties."""
    summary = summary_of(folder)
    parties = [party["name"] for party in summary["parties"]]
    parts = {name: read_part_of(name, summary["model_id"]) for name in parties}
    active = parts[summary["active"]]
    assert isinstance(active, ActivePart)
    model = active.model
    assert isinstance(model, BaggedForest)
    firsts = dict(
        zip(parties, np.cumsum([0, *(len(p.columns) for p in parts.values())]), strict=False)
    )
    members = []
    for number, (tree, records) in enumerate(zip(model.trees, active.records, strict=True)):
        owners = active.owners(number)
        for node in np.flatnonzero(tree["left"] >= 0):
            lookup, record = parts[owners[node]].lookup, records[node]
            tree["column"][node] = lookup.columns[record] + firsts[owners[node]]
            tree["threshold"][node] = lookup.thresholds[record]
            tree["default_left"][node] = lookup.defaults[record]
            if lookup.widths[record]:
                tree["set"][node] = len(members)
                members.append(lookup.sets.members(lookup.numbers[record]))
    names = tuple(name for part in parts.values() for name in part.columns)
    categories = side_by_side((p.categories, len(p.columns)) for p in parts.values())
    found = model.trees, model.values, CategorySets.of(members), categories
    return BaggedForest(model.objective, names, model.classes, *found)


def pooled(settings):
    """The forest of the joined table by the same draws; what it grew from, and where rows ended."""
    whole = Pooled(settings)
    given = (array[whole.train] for array in (whole.values, whole.labels, whole.weights))
    return pooled_forest(settings, whole.columns, *given, whole.categories)
