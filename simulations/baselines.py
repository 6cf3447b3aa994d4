"""What a federated model is held against: pooled rows, and each party alone.

Both by XGBoost, or by scikit-learn's random forest where the model is a forest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp import metrics
from fedapp.config import Settings
from fedapp.data.categories import Categories, chosen, recoded, side_by_side, trained_first
from fedapp.data.labels import class_ids, class_names, positive_last
from fedapp.data.partition import SUBSETS, Split
from fedapp.data.table import Table
from fedapp.messages.methods import all_methods
from fedapp.messages.parameters import parameters_of
from fedapp.server_app import load_strategy
from fedapp.site.columns import read_columns, row_ids, split_common
from fedapp.site.rows import Rows
from fedapp.trees.base_score import base_margin, base_score, label_sums
from fedapp.trees.boosted.constraints import constraints_of
from fedapp.trees.boosted.from_xgboost import for_xgboost, typed_columns
from fedapp.trees.divided.lookup import joint_names
from fedapp.trees.forest.cart import Rules, bin_columns, code_columns
from fedapp.trees.forest.draws import column_seeds, n_features, row_counts
from fedapp.trees.forest.label_codes import class_codes, number_codes
from fedapp.trees.forest.levels import Rows as TreeRows
from fedapp.trees.forest.model import BaggedForest, grow, leaf_values
from fedapp.trees.objective import REGRESSION, LossParameters, margins_of, n_outputs
from fedapp.trees.sets import category_counts
from fedapp.trees.sides import Nodes
from simulations.rows import PartRows, party_configs, settled, stacked_tables
from simulations.same_trees import same_nodes
from strategies.scoring import FINAL_BINS, found_scores, half_range

Floats = npt.NDArray[np.float32]
BY_ROWS, BY_COLUMNS = "rows", "columns"
XGBOOST, FOREST = "XGBoost", "forest (scikit-learn)"


@dataclass(frozen=True, slots=True)
class BaselineKind:
    """What methods are held against.

    Parameters
    ----------
    model : that the baselines train.
    split_by : what the parties have of a table, "rows" or "columns".
    """

    model: str
    split_by: str

    @property
    def short(self) -> str:
        """The model in a word."""
        return self.model.partition(" ")[0]

    @property
    def name(self) -> str:
        """For a file."""
        return f"{self.short.lower()}-{self.split_by}"


def baselines_of(strategy: str) -> BaselineKind:
    """The baselines of a method.

    Raises
    ------
    ConfigError : there is no such method.
    """
    load_strategy(strategy)
    method = all_methods()[strategy]
    model = FOREST if method.baseline == "forest" else XGBOOST
    return BaselineKind(model, BY_COLUMNS if method.family == "vertical" else BY_ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """All rows of a run in one place.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns).
    labels : float32, shape (n_rows,): class ids, or numbers.
    weights : float32, shape (n_rows,).
    split : which rows are for what, each subset in the order of the run.
    columns : names of the columns.
    categories : of the columns.
    base_margins : float32, shape (n_rows,), where rows start from margins of their own.
    """

    values: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    split: Split
    columns: tuple[str, ...]
    categories: Categories = ()
    base_margins: npt.NDArray[np.float32] | None = None

    def of_rows(self, rows: Rows) -> dict[str, Any]:
        """What XGBoost's matrices take of some rows beside values and labels."""
        margins = {} if self.base_margins is None else {"base_margin": self.base_margins[rows]}
        return {"weight": self.weights[rows], **margins, **self.types}

    @property
    def widest(self) -> float:
        """Half the range of the labels, as a power of two: see ``strategies.scoring``."""
        return half_range(float(self.labels.min()), float(self.labels.max()))

    @property
    def types(self) -> dict[str, Any]:
        """Of the columns, as XGBoost's matrices take them."""
        return typed_columns(category_counts(self.categories, len(self.columns)))

    def in_table_order(self) -> Pooled:
        """Each subset in the order of the table, for the last digits of a sum follow the order."""
        subsets = (np.sort(getattr(self.split, subset)) for subset in SUBSETS)
        return replace(self, split=Split(*subsets))

    def coded_by_training_rows(self) -> Pooled:
        """With the codes that vertical parties give to categories."""
        codes = trained_first(self.categories, self.values[self.split.train])[0]
        values = recoded(self.values, self.categories, codes, self.columns)[0]
        return replace(self, values=values, categories=codes)


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A trained baseline.

    Parameters
    ----------
    margins : of rows by their numbers, float32, shape (n, n_outputs).
    center : of the histogram of margins, see ``metrics.statistics``.
    gains : float64, shape (n_columns,): what the splits of each column have gained.
    booster : the model, where it is XGBoost's.
    """

    margins: Callable[[Rows], npt.NDArray[np.float32]]
    center: float
    gains: npt.NDArray[np.float64]
    booster: Any = None

    def scores(
        self, objective: str, rows: Pooled, eval_metrics: Sequence[str], split_by: str
    ) -> dict[str, float]:
        """Scores on the test rows, computed as the run's are.

        Horizontal parties add up histograms of margins; the active party of a vertical run has all
        margins. A threshold of two classes is chosen on the rows that choose the run's.
        """
        chosen = metrics.threshold_rows(len(rows.split.valid) > 0)
        subsets = [one for one in (chosen, "test") if len(getattr(rows.split, one))]
        if split_by == BY_COLUMNS:
            given = {subset: self._rows(rows, subset) for subset in subsets}
            return metrics.pooled_subsets(objective, given, eval_metrics).get("test", {})
        sums = {subset: self._sums(objective, rows, subset, eval_metrics) for subset in subsets}
        if "test" not in sums:
            return {}
        scores = found_scores(objective, sums["test"], eval_metrics)
        first = metrics.best_bin(sums[chosen]) if objective == "binary:logistic" else None
        if scores and first is not None:
            scores |= metrics.scores_from_bin(sums["test"], first, self.center)
        return scores

    def curves(self, objective: str, rows: Pooled) -> dict[str, Any]:
        """Curves on the test rows, from as many bins as a run's; none where there are no rows."""
        if not rows.weights[rows.split.test].any():
            return {}
        found = self._sums(objective, rows, "test")
        return metrics.curves(objective, found, residual_range=rows.widest, center=self.center)

    def _sums(
        self, objective: str, rows: Pooled, subset: str, eval_metrics: Sequence[str] = ()
    ) -> metrics.Statistics:
        """What horizontal parties would add up."""
        given, how = self._rows(rows, subset), (FINAL_BINS, rows.widest, self.center)
        return metrics.statistics(objective, *given, *how, extra=eval_metrics)

    def _rows(self, rows: Pooled, subset: str) -> tuple[Floats, Floats, Floats]:
        """Margins, labels and weights of a subset."""
        of = getattr(rows.split, subset)
        return self.margins(of), rows.labels[of], rows.weights[of]

    def importance(self, columns: Sequence[str]) -> dict[str, dict[str, float]]:
        """Total gain by column, largest first, as a run has it; of a forest its share."""
        order = [c for c in np.argsort(-self.gains, kind="stable") if self.gains[c] > 0]
        return {"total_gain": {columns[c]: float(self.gains[c]) for c in order}}


def run_baselines(settings: Settings, folder: Path | None = None) -> dict[str, Any]:
    """Scores on the test rows of the run, by the run's own settings.

    XGBoost's cuts and last digits follow the order of the rows. Beside a vertical run they are in
    the order of the run, so that SecureBoost's model is this one; in a comparison of several
    methods, which has one baseline for all, in the table's.

    Parameters
    ----------
    folder : of the run, None in a comparison. Where it has the model of a method that grows
        XGBoost's trees, they are compared with the pooled ones.

    Returns
    -------
    ``{"pooled": scores, "alone": {party: scores}, "curves": {"pooled", "alone"}, "importance":
    {"pooled"}, "same_nodes": [equal nodes, nodes]}``, the last where nodes were compared; all rows
    and cuts are those of one machine. Of vertical parties the one that has the labels can train
    alone.

    Raises
    ------
    DataError, ConfigError : there is no such table.
    """
    settings = settled(settings)
    kind, (pooled, alone) = baselines_of(settings.strategy), baseline_rows(settings)
    if folder is None:
        pooled = pooled.in_table_order()
        alone = {name: rows.in_table_order() for name, rows in alone.items()}
    train = _forest if kind.model == FOREST else train_boosted
    of_all = train(settings, pooled)
    of_parties = {name: (train(settings, rows), rows) for name, rows in alone.items()}
    objective, scored_by = settings.objective, (settings.eval_metrics, kind.split_by)
    found = {
        "pooled": of_all.scores(objective, pooled, *scored_by),
        "alone": {
            name: one.scores(objective, rows, *scored_by)
            for name, (one, rows) in of_parties.items()
        },
        "curves": {
            "pooled": of_all.curves(objective, pooled),
            "alone": {
                name: one.curves(objective, rows) for name, (one, rows) in of_parties.items()
            },
        },
        "importance": {"pooled": of_all.importance(pooled.columns)},
    }
    path = folder / "model.xgb.json" if folder else None
    is_lossless = kind.split_by == BY_COLUMNS or settings.parties == 1
    if of_all.booster is not None and is_lossless and path and path.exists():
        models = path.read_bytes(), of_all.booster.save_raw("json")
        found["same_nodes"] = same_nodes(*map(json.loads, models))
    return found


def order_range(settings: Settings, metric: str, n_orders: int) -> tuple[float, float]:
    """Lowest and highest test score of XGBoost on all rows, over orders of the training rows."""
    settings = settled(settings)
    rows, rng = baseline_rows(settings)[0], np.random.default_rng(settings.seed)
    scores = []
    for _ in range(n_orders):
        shuffled = Split(rng.permutation(rows.split.train), rows.split.valid, rows.split.test)
        trained = train_boosted(settings, replace(rows, split=shuffled))
        split_by = baselines_of(settings.strategy).split_by
        found = trained.scores(settings.objective, rows, settings.eval_metrics, split_by)
        scores.append(found.get(metric, np.nan))
    return min(scores), max(scores)


def baseline_rows(settings: Settings) -> tuple[Pooled, dict[str, Pooled]]:
    """All rows and columns of a run, and those that a party can train on alone."""
    kind = baselines_of(settings.strategy)
    if kind.split_by == BY_COLUMNS:
        joined, active, own_columns = join_tables(settings)
        own = replace(
            joined,
            values=np.ascontiguousarray(joined.values[:, own_columns]),
            columns=joined.columns[own_columns],
            categories=chosen(joined.categories, range(len(joined.columns))[own_columns]),
        )
        if kind.model == XGBOOST:
            return joined.coded_by_training_rows(), {active: own.coded_by_training_rows()}
        return joined.in_table_order(), {active: own.in_table_order()}
    table, shares = stacked_tables(settings)
    test = np.concatenate([rows["test"] for rows in shares.values()])

    def of(parties: Iterable[PartRows]) -> Pooled:
        train, valid = (_all([rows[subset] for rows in parties]) for subset in ("train", "valid"))
        return _pooled(settings, table, Split(train, valid, test)).in_table_order()

    return of(shares.values()), {name: of([rows]) for name, rows in shares.items()}


def join_tables(settings: Settings) -> tuple[Pooled, str, slice]:
    """The tables of simulated vertical parties side by side.

    Returns
    -------
    The rows that all have, in the order of the first party's table; the name of the party that has
    the labels, and which columns are its own.
    """
    configs = party_configs(settings)
    tables = [read_columns(config, settings.seed) for config in configs]
    ids = [row_ids(table, config, False) for table, config in zip(tables, configs, strict=True)]
    known = set.intersection(*(set(each.tolist()) for each in ids))
    common = [name for name in ids[0].tolist() if name in known]
    places = [{name: row for row, name in enumerate(each.tolist())} for each in ids]
    rows = [np.array([found[name] for name in common]) for found in places]
    taken = [table.take(each) for table, each in zip(tables, rows, strict=True)]
    active = next(place for place, table in enumerate(taken) if table.labels is not None)
    joined = replace(
        taken[active],
        values=np.hstack([table.values for table in taken]),
        columns=joint_names({c.name: t.columns for c, t in zip(configs, taken, strict=True)}),
        categories=side_by_side((table.categories, len(table.columns)) for table in taken),
    )
    holdout = settings.holdout
    split = split_common(np.arange(len(common)), common, holdout, configs[active].is_share)
    first = sum(table.values.shape[1] for table in taken[:active])
    own = slice(first, first + taken[active].values.shape[1])
    return _pooled(settings, joined, split), configs[active].name, own


def _pooled(settings: Settings, table: Table, split: Split) -> Pooled:
    """A table with its labels as numbers."""
    assert table.labels is not None
    classes = positive_last(
        class_names(table.labels, settings.objective),
        party_configs(settings)[0].positive_label,
        settings.objective,
    )
    labels = class_ids(table.labels, classes)
    weights = np.ones(table.n_rows, np.float32) if table.weights is None else table.weights
    of_table = table.columns, table.categories, table.base_margins
    return Pooled(table.values, labels, weights, split, *of_table)


def _all(shares: Sequence[Rows]) -> Rows:
    return np.sort(np.concatenate(shares))


def train_boosted(settings: Settings, rows: Pooled) -> Trained:
    """XGBoost, trained on some rows."""
    import xgboost

    train, valid = rows.split.train, rows.split.valid
    settings = settings.watching(len(valid))
    parameters = xgboost_parameters(
        settings, rows.labels, rows.weights[train], rows.labels[train], rows.columns
    )

    def matrix(of: Rows) -> Any:
        return xgboost.DMatrix(rows.values[of], rows.labels[of], **rows.of_rows(of))

    values, how = rows.values[train], {"max_bin": settings.max_bin, **rows.types}
    # Vertical parties cut their columns without the weights, which they do not know.
    is_divided = baselines_of(settings.strategy).split_by == BY_COLUMNS
    unweighted = xgboost.QuantileDMatrix(values, **how) if is_divided else None
    binned = xgboost.QuantileDMatrix(
        values, rows.labels[train], ref=unweighted, **how | rows.of_rows(train)
    )
    stop = settings.early_stopping_rounds
    booster = xgboost.train(
        parameters,
        binned,
        settings.num_boost_round,
        evals=[(matrix(valid), "valid")] if stop and len(valid) else [],
        early_stopping_rounds=stop if stop and len(valid) else None,
        verbose_eval=False,
    )
    n_trees = booster.best_iteration + 1 if stop and len(valid) else 0

    def margins(of: Rows) -> npt.NDArray[np.float32]:
        found = booster.predict(matrix(of), output_margin=True, iteration_range=(0, n_trees))
        return found.reshape(len(of), -1).astype(np.float32)

    gains = np.zeros(rows.values.shape[1])
    kept = booster[:n_trees] if n_trees else booster
    for name, gain in kept.get_score(importance_type="total_gain").items():
        gains[int(name[1:])] = gain  # f0, f1, ...
    with np.errstate(divide="ignore"):  # of a party whose rows are all of one class
        told = np.array([parameters.get("base_score", 0)], dtype=np.float32)
        center = base_margin(settings.objective, told)
    return Trained(margins, float(center[0]), gains, kept)


def forest_scores(settings: Settings, rows: Pooled) -> dict[str, float]:
    """Train scikit-learn's random forest on some rows and score it on the test rows."""
    rows = rows.in_table_order()
    return _forest(settings, rows).scores(settings.objective, rows, (), BY_COLUMNS)


def _forest(settings: Settings, rows: Pooled) -> Trained:
    """scikit-learn's random forest, trained on some rows."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    own = _own_settings(settings)
    is_regression = settings.objective == REGRESSION
    kind = RandomForestRegressor if is_regression else RandomForestClassifier
    criterion = "squared_error" if is_regression else own.criterion_for(settings.objective)
    forest = kind(
        own.trees,
        criterion=criterion,
        max_depth=own.max_depth,
        min_samples_split=own.min_samples_split,
        min_samples_leaf=own.min_samples_leaf,
        min_impurity_decrease=own.min_impurity_decrease,
        max_features=None if own.max_features == "all" else own.max_features,
        bootstrap=own.bootstrap,
        random_state=settings.seed % 2**32,
    )
    train = rows.split.train
    forest.fit(rows.values[train], rows.labels[train], sample_weight=rows.weights[train])

    def margins(of: Rows) -> npt.NDArray[np.float32]:
        values = rows.values[of]
        found = forest.predict(values)[:, None] if is_regression else forest.predict_proba(values)
        if settings.objective == "binary:logistic":
            found = found[:, 1:]
        return margins_of(settings.objective, found).astype(np.float32)

    return Trained(margins, 0.0, np.asarray(forest.feature_importances_, dtype=np.float64))


def _own_settings(settings: Settings) -> Any:
    """The method's own section."""
    return load_strategy(settings.strategy).own_settings(settings)


def pooled_forest(
    settings: Settings,
    columns: Sequence[str],
    values: npt.NDArray[np.float32],
    labels: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    categories: Categories = (),
) -> tuple[BaggedForest, TreeRows, Nodes]:
    """The forest of a run by the same draws, grown where all columns lie in one place.

    Parameters
    ----------
    columns : names of all columns, parties in turn.
    values, labels, weights : of the training rows, in the run's order.
    categories : of the columns.

    Returns
    -------
    The forest, what it grew from, and the leaf of each row in each tree.
    """
    own, is_numbers = _own_settings(settings), settings.objective == REGRESSION
    n_rows, n_columns = values.shape
    codes, unit = number_codes(labels) if is_numbers else (class_codes(labels), 1.0)
    widths = category_counts(categories, n_columns)
    bins = bin_columns(values, settings.max_bin, widths)
    counts = row_counts(own.bootstrap, settings.seed, own.trees, n_rows)
    exact_weights = weights.astype(np.float64)
    rows = TreeRows(code_columns(values, bins), bins, codes, exact_weights, counts)
    n_classes = 0 if is_numbers else int(labels.max()) + 1
    rules = Rules(
        own.criterion_for(settings.objective),
        n_classes,
        own.min_samples_split,
        own.min_samples_leaf,
        own.min_impurity_decrease / unit**2,
    )
    seeds = column_seeds(settings.seed, n_columns)
    drawn = n_features(own.max_features, n_columns)
    trees, sets, nodes = grow(rows, values, seeds, drawn, own.max_depth, rules)
    sizes, width = np.array([len(tree) for tree in trees]), n_outputs(settings.objective, n_classes)
    leaves = leaf_values(nodes, counts, exact_weights, labels, sizes, n_classes, width)
    classes = tuple(map(str, range(n_classes)))
    names = tuple(columns), classes
    model = BaggedForest(settings.objective, *names, trees, leaves, sets, categories)
    return model, rows, nodes


def xgboost_parameters(
    settings: Settings, labels: Any, weights: Any, drawn: Any, columns: Sequence[str] = ()
) -> dict[str, Any]:
    """The run's settings as ``xgboost.train`` takes them.

    Parameters
    ----------
    labels : of all rows, for the number of classes.
    weights, drawn : weights and labels of the training rows, for the base score.
    columns : names, for the constraints.
    """
    n_classes = int(labels.max()) + 1
    width, loss = n_outputs(settings.objective, n_classes), LossParameters.of(settings)
    begins = {}  # several classes by XGBoost's own default
    if width == 1:
        total = float(weights.sum(dtype=np.float64))
        sums = label_sums(settings.objective, drawn, weights, n_classes)
        begins["base_score"] = float(base_score(settings.objective, sums, total, loss)[0])
    return {
        **for_xgboost(settings.objective, width, parameters_of(settings), loss),
        **begins,
        **_constraints(settings, columns),
        # XGBoost stops by the last one.
        "eval_metric": [metrics.stopping_metric(settings.objective, settings.eval_metrics)],
    }


def _constraints(settings: Settings, columns: Sequence[str]) -> dict[str, Any]:
    """Constraints of columns as ``xgboost.train`` takes them; nothing where there are none."""
    if not columns:
        return {}
    monotone, groups = constraints_of(
        settings.monotone_constraints, settings.interaction_constraints, columns
    )
    held = {"monotone_constraints": tuple(monotone.tolist())} if len(monotone) else {}
    # As a text, whose numbers are of columns; a list would have to name them.
    text = json.dumps([sorted(group) for group in groups])
    return held | ({"interaction_constraints": text} if groups else {})
