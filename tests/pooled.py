"""XGBoost on the joined table of vertical parties, its rows in the order of their run."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import xgboost

from fedapp.data.labels import class_ids, class_names
from fedapp.runs.baselines import baseline_rows, train_boosted, xgboost_parameters
from fedapp.runs.local import run_local
from fedapp.runs.tables import party_configs
from fedapp.site.table import (
    Holdout,
    common_order,
    read_columns,
    secret_order,
    split_common,
    split_ordered,
)
from fedapp.trees.categories import category_counts, recoded, side_by_side
from fedapp.trees.model import LEAF
from fedapp.trees.xgboost import typed_columns
from tests.federated import model_of
from tests.reference import compare_trees


def tables_of(settings):
    """Tables of the simulated parties of a run, coded as theirs, their rows in the order of the
    first one's."""
    tables = [read_columns(config, settings.seed) for config in party_configs(settings)]
    numbers = np.arange(tables[0].n_rows).astype(str)
    tables = [table if table.ids is not None else replace(table, ids=numbers) for table in tables]
    return in_order(tables, settings.join == "left")


def in_order(tables, left=False):
    """The rows that all tables have, in the order of the first one's; or all of the first one's,
    with missing values of those that others lack."""
    lists = [table.ids.tolist() for table in tables]
    known = set(lists[0]) if left else set.intersection(*map(set, lists))
    common = [name for name in lists[0] if name in known]
    taken = []
    for table, ids in zip(tables, lists, strict=True):
        places = {name: place for place, name in enumerate(ids)}
        rows = np.array([places.get(name, -1) for name in common], dtype=np.int64)
        values = table.values[rows]
        values[rows < 0] = np.nan
        taken.append(replace(table.take(rows), values=values))
    return taken


class Pooled:
    """The joined table of a run, and XGBoost on its training rows; cuts take no weights.

    ``tables`` are those of the parties in the order of their names, the same rows in each; by
    default those of simulated parties, which share one table or have files of their own.
    """

    def __init__(self, settings, tables=()):
        self.settings, self.tables = settings, tables or tables_of(settings)
        self.columns = tuple(name for table in self.tables for name in table.columns)
        self.values = np.concatenate([table.values for table in self.tables], axis=1)
        parts = ((table.categories, len(table.columns)) for table in self.tables)
        self.categories = side_by_side(parts)
        active = next(table for table in self.tables if table.labels is not None)
        assert active.labels is not None
        assert active.ids is not None
        classes = class_names(active.labels, settings.objective)
        self.labels = class_ids(active.labels, classes)
        ones = np.ones(len(self.labels), np.float32)
        self.weights = ones if active.weights is None else active.weights
        self.base_margins = active.base_margins
        holdout = Holdout(settings.test_fraction, settings.valid_fraction, settings.seed)
        ids, is_share = active.ids.tolist(), not tables and "," not in settings.data
        split = split_common(np.arange(len(ids)), ids, holdout, is_share)
        if settings.join == "left":
            order = secret_order(active.ids, active.values, active.labels, settings.seed)
            split = split_ordered(order, holdout)
        self.order = common_order(ids, settings.seed)
        self.train, self.valid = split.train, split.valid
        widths = category_counts(self.categories, len(self.columns))
        trained = [values[~np.isnan(values)] for values in self.values[self.train].T]
        counts = np.where(widths > 0, [len(np.unique(values)) for values in trained], 0)
        settings = settings.splitting(counts.tolist())
        self.split = SimpleNamespace(train=self.train)
        self.parameters = xgboost_parameters(settings, self)

    def matrix(self, values):
        """The training rows, with ``values`` in place of the table's."""
        widths = category_counts(self.categories, len(self.columns))
        given = {"max_bin": self.settings.max_bin, **typed_columns(widths)}
        rows, margins = values[self.train], self.base_margins
        return xgboost.QuantileDMatrix(
            rows,
            self.labels[self.train],
            weight=self.weights[self.train],
            base_margin=None if margins is None else margins[self.train],
            ref=xgboost.QuantileDMatrix(rows, **given),
            **given,
        )

    def code_as(self, model):
        """Put the codes of a model's categories, which occur in training rows, in place of the
        tables'."""
        self.values, _ = recoded(self.values, self.categories, model.categories)
        self.categories = model.categories

    def booster(self, **more):
        """Trained by the settings of the run."""
        n_rounds = self.settings.num_boost_round
        return xgboost.train(self.parameters, self.matrix(self.values), n_rounds, **more)

    def owners(self, columns):
        """Number of the party that has each column."""
        ends = np.cumsum([len(table.columns) for table in self.tables])
        return np.searchsorted(ends, columns, side="right")


def splits_of(model):
    """All nodes of a model that are split."""
    return np.concatenate([tree[tree["left"] != LEAF] for tree in model.trees])


def assert_xgboosts(folder, whole, booster=None):
    """The joined model of a run, to which all parties add, is XGBoost's, node for node."""
    model = model_of(folder)
    whole.code_as(model)
    assert set(whole.owners(splits_of(model)["column"])) == set(range(len(whole.tables)))
    assert_same(model, booster or whole.booster())


def pooled_booster(settings):
    """XGBoost on all training rows of a run whose rows lie at several parties."""
    return train_boosted(settings, baseline_rows(settings)[0]).booster


def assert_exact(settings):
    """A run's model is XGBoost's on all rows, node for node, and starts as that does; the model."""
    model, booster = model_of(run_local(settings)), pooled_booster(settings)
    assert_same(model, booster)
    start = json.loads(booster.save_config())["learner"]["learner_model_param"]["base_score"]
    assert model.base_score.tolist() == np.float32(json.loads(start)).tolist()
    return model


def assert_same(model, booster):
    found = compare_trees(model, booster)
    assert found.n_nodes > 3 * found.n_trees
    assert found.differing == 0
    assert found.leaf_error <= 1e-6
