"""Federated forests: put together from their parts, and grown in one place from all rows."""

import json
import zlib
from dataclasses import replace

import numpy as np

from fedapp.data.datasets import read_source
from fedapp.data.labels import class_ids, class_names
from fedapp.data.schema import Roles
from fedapp.home import home
from fedapp.records.document import load
from fedapp.site.store import PART_FILE, read_part, write_part
from fedapp.site.table import Holdout, share_rows
from fedapp.trees.categories import CategorySets, category_counts, side_by_side
from fedapp.trees.divided import PARTS, ActivePart
from fedapp.trees.forest import bagged
from fedapp.trees.forest.bagged import BaggedForest, grow_forest, leaf_values
from fedapp.trees.forest.cart import Rules, bin_columns, code_columns
from fedapp.trees.objective import n_outputs
from simulations.study import pooled_forest
from strategies.run import load_strategy
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


# Of parties with different rows


def pooled_rows(settings):
    """Values, labels and weights of all parties' training rows, and how often trees draw each."""
    section = load_strategy(settings.strategy).section_settings(settings)
    table = read_source(settings.data, Roles(settings.label, weight=settings.weight))
    assert table.labels is not None
    holdout = Holdout(settings.test_fraction, settings.valid_fraction, settings.seed)
    shares = share_rows(table, holdout, settings.partition, settings.parties)["train"]
    rows = np.concatenate(shares)
    draws = []
    for number, share in enumerate(shares):
        name = zlib.crc32(f"party-{number + 1}".encode())
        seed = int(np.random.default_rng([settings.seed, 0, name]).integers(2**63))
        draws.append(bagged.row_counts(section.bootstrap, seed, section.trees, len(share)))
    labels = class_ids(table.labels, class_names(table.labels, settings.objective))
    weights = np.ones(len(labels), np.float32) if table.weights is None else table.weights
    return table.values[rows], labels[rows], weights[rows], np.concatenate(draws, axis=1)


def forest_of_rows(settings, model):
    """The forest of the same draws from all rows, a bin each value; and where their rows end."""
    section = load_strategy(settings.strategy).section_settings(settings)
    values, labels, weights, draws = pooled_rows(settings)
    n_classes, n_columns = len(model.classes), values.shape[1]
    bins = bin_columns(values, 65535, category_counts(model.categories, n_columns))
    exact = weights.astype(np.float64)
    rows = bagged.Rows(code_columns(values, bins), bins, labels.astype(np.float64), exact, draws)
    fewest = section.min_samples_split, section.min_samples_leaf
    criterion = section.criterion_for(settings.objective)
    rules = Rules(criterion, n_classes, *fewest, section.min_impurity_decrease)
    seeds = bagged.column_seeds(settings.seed, n_columns)
    n_drawn = bagged.n_features(section.max_features, n_columns)
    trees, sets, nodes = grow_forest(
        rows, values, seeds, n_drawn, section.max_depth, rules, section.max_features_per
    )
    sizes, width = np.array([len(tree) for tree in trees]), n_outputs(settings.objective, n_classes)
    leaves = leaf_values(nodes, draws, exact, labels, sizes, n_classes, width)
    run = model.objective, model.columns, model.classes
    return BaggedForest(*run, trees, leaves, sets, model.categories), nodes


def assert_pooled(settings, folder):
    """The run's forest is the pooled one, node for node: columns, sides, drawn rows and values."""
    model = load(folder.path / "model.json", BaggedForest)
    expected, nodes = forest_of_rows(settings, model)
    assert sum(map(len, model.trees)) > 2 * len(model.trees)
    for ours, theirs in zip(model.trees, expected.trees, strict=True):
        for name in ("left", "column", "default_left"):
            np.testing.assert_array_equal(ours[name], theirs[name])
        assert ((ours["set"] >= 0) == (theirs["set"] >= 0)).all()
    values, _, weights, draws = pooled_rows(settings)
    # Where a row that a tree has not drawn goes depends on where in a gap the threshold is.
    is_drawn = (draws > 0) & (weights > 0)
    np.testing.assert_array_equal(model.leaves(values)[is_drawn], nodes[is_drawn])
    for ours, theirs in zip(model.values, expected.values, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
    return model
