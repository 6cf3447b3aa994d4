"""XGBoost on the joined table of vertical parties, its rows in the order of their run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import xgboost

from fedapp.data.datasets import read_source
from fedapp.data.labels import class_ids, class_names
from fedapp.data.partition import partition_columns
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.data.table import Table
from fedapp.records.document import load
from fedapp.runs.baselines import xgboost_parameters
from fedapp.site.table import (
    Holdout,
    common_order,
    secret_order,
    split_common,
    split_ordered,
)
from fedapp.trees.categories import chosen, in_secret_order, recoded, side_by_side
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.sets import category_counts
from fedapp.trees.xgboost import typed_columns
from tests.reference import compare_trees


def tables_of(settings):
    """Tables of the simulated parties of a run, coded as theirs, their rows in the order of the
    first one's."""

    def coded(table):
        values, categories = in_secret_order(table.values, table.categories, settings.seed)
        return replace(table, values=values, categories=categories)

    files = settings.data.split(",")
    if len(files) > 1:
        labels = [settings.label, *[""] * (len(files) - 1)]
        return in_order(
            [
                coded(load_table(Path(file), Roles(label=label, id_column=settings.id)))
                for file, label in zip(files, labels, strict=True)
            ],
            settings.join == "left",
        )
    roles = Roles(
        settings.label,
        weight=settings.weight,
        drop=settings.dropped,
        base_margin=settings.base_margin,
    )
    table = read_source(settings.data, roles)
    rng = np.random.default_rng(settings.seed)
    shares = partition_columns(settings.columns, len(table.columns), settings.parties, rng)
    ids = np.arange(table.n_rows).astype(str)
    return [
        coded(
            Table(
                tuple(table.columns[column] for column in share),
                table.values[:, share],
                labels=None if place else table.labels,
                weights=None if place else table.weights,
                base_margins=None if place else table.base_margins,
                ids=ids,
                categories=chosen(table.categories, share),
            )
        )
        for place, share in enumerate(shares)
    ]


def in_order(tables, left=False):
    """The rows that all tables have, in the order of the first one's; or all of the first one's,
    with missing values of those that others lack."""
    lists = []
    for table in tables:
        assert table.ids is not None
        lists.append(table.ids.tolist())
    known = set(lists[0]) if left else set.intersection(*map(set, lists))
    common = [name for name in lists[0] if name in known]
    places = [{name: place for place, name in enumerate(ids)} for ids in lists]
    taken = []
    for table, place in zip(tables, places, strict=True):
        rows = np.array([place.get(name, -1) for name in common], dtype=np.int64)
        values = table.values[rows]
        values[rows < 0] = np.nan
        taken.append(replace(table.take(rows), values=values))
    return taken


class Pooled:
    """The joined table of a run, and XGBoost on its training rows; cuts take no weights.

    Parameters
    ----------
    settings : of the run.
    tables : of the parties in the order of their names, the same rows in each; by default those of
        simulated parties, which share one table or have files of their own.
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
        self.parameters = xgboost_parameters(
            settings, self.labels, self.weights[self.train], self.labels[self.train], self.columns
        )

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
    model = load(folder.path / "model.json", Ensemble)
    whole.code_as(model)
    found = compare_trees(model, booster or whole.booster())
    assert set(whole.owners(splits_of(model)["column"])) == set(range(len(whole.tables)))
    assert found.n_nodes > 3 * found.n_trees
    assert found.differing == 0
    assert found.leaf_error <= 1e-6
