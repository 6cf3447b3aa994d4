"""The forest of parties with different rows, grown in one place from their pooled rows."""

import zlib

import numpy as np

from fedapp.data.datasets import read_source
from fedapp.data.labels import class_ids, class_names
from fedapp.data.schema import Roles
from fedapp.records.document import load
from fedapp.site.table import Holdout, share_rows
from fedapp.trees.forest import levels
from fedapp.trees.forest.bagged import BaggedForest, grow_forest, leaf_values
from fedapp.trees.forest.cart import Rules, bin_columns, code_columns
from fedapp.trees.objective import n_outputs
from fedapp.trees.sets import category_counts
from strategies.run import load_strategy


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
        draws.append(levels.row_counts(section.bootstrap, seed, section.trees, len(share)))
    labels = class_ids(table.labels, class_names(table.labels, settings.objective))
    weights = np.ones(len(labels), np.float32) if table.weights is None else table.weights
    return table.values[rows], labels[rows], weights[rows], np.concatenate(draws, axis=1)


def pooled_forest(settings, model):
    """The forest of the same draws from all rows, a bin each value; and where their rows end."""
    section = load_strategy(settings.strategy).section_settings(settings)
    values, labels, weights, draws = pooled_rows(settings)
    n_classes, n_columns = len(model.classes), values.shape[1]
    bins = bin_columns(values, 65535, category_counts(model.categories, n_columns))
    exact = weights.astype(np.float64)
    rows = levels.Rows(code_columns(values, bins), bins, labels.astype(np.float64), exact, draws)
    fewest = section.min_samples_split, section.min_samples_leaf
    criterion = section.criterion_for(settings.objective)
    rules = Rules(criterion, n_classes, *fewest, section.min_impurity_decrease)
    seeds = levels.column_seeds(settings.seed, n_columns)
    n_drawn = levels.n_features(section.max_features, n_columns)
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
    expected, nodes = pooled_forest(settings, model)
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
