"""Baselines of federated models, trained on the pooled rows and on each party's rows only.

They are trained by XGBoost, or by scikit-learn's random forest if the model is a forest.
`same_nodes` compares two models node for node.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp import metrics
from fedapp.arrays import Floats, Ints
from fedapp.data.labels import class_ids, class_names, positive_last
from fedapp.data.partition import SUBSETS, Split
from fedapp.data.table import Table
from fedapp.messages.fields import parameters_of
from fedapp.messages.methods import Memory, all_methods
from fedapp.messages.vertical import INNER
from fedapp.process import raise_interrupt
from fedapp.run_files import GAIN, TOTAL_GAIN
from fedapp.runs.tables import (
    PartRows,
    party_configs,
    resolve_objective,
    split_rows_of,
    stacked_tables,
)
from fedapp.settings import Settings
from fedapp.site.policy import lacking_memory
from fedapp.site.rows_to_predict import taken_by_id
from fedapp.site.table import Rows, read_columns, row_ids
from fedapp.trees.categories import (
    Categories,
    category_counts,
    chosen,
    recoded,
    side_by_side,
    trained_first,
)
from fedapp.trees.divided import joint_names
from fedapp.trees.limits import constraints_of, parse_weights, weights_of
from fedapp.trees.losses import REGRESSION, LossParameters
from fedapp.trees.objective import (
    balance,
    base_margin,
    base_score,
    has_quantile_leaves,
    is_ranking,
    label_sums,
    margins_of,
    n_outputs,
)
from fedapp.trees.ranking import grades_of, queries_of
from fedapp.trees.xgboost import for_xgboost, typed_columns, with_bounds
from strategies.run import load_strategy
from strategies.scoring import FINAL_BINS, half_range, scores_of

log = logging.getLogger("fedapp")
BY_ROWS, BY_COLUMNS = "rows", "columns"
MEMORY = Memory(value=16)  # rows of a subset as values, and as matrices of XGBoost
XGBOOST, FOREST = "XGBoost", "forest (scikit-learn)"
# Relative; and absolute for leaves near 0, where gradients cancel and only the last bit of the two
# libraries' float32 sigmoids is left.
LEAF_TOLERANCE = 1e-6
NEAR_ZERO = 1e-8


@dataclass(frozen=True, slots=True)
class BaselineKind:
    """The model that baselines train, and what parties share of a table."""

    model: str  # XGBOOST or FOREST
    split_by: str  # BY_ROWS or BY_COLUMNS

    @property
    def pooled(self) -> str:
        """Name of the model of all rows."""
        return f"pooled {self.model}"

    @property
    def short(self) -> str:
        """First word of the model's name."""
        return self.model.partition(" ")[0]

    @property
    def alone(self) -> str:
        """What a party has alone, and the model."""
        return f"{self.split_by} alone, {self.short}"

    @property
    def name(self) -> str:
        """Name for files."""
        return f"{self.short.lower()}-{self.split_by}"


def baselines_of(strategy: str) -> BaselineKind:
    """The baselines of a method."""
    load_strategy(strategy)
    method = all_methods()[strategy]
    model = FOREST if method.baseline == "forest" else XGBOOST
    return BaselineKind(model, BY_COLUMNS if method.family == "vertical" else BY_ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """All rows of a run in one place."""

    values: Floats  # (n_rows, n_columns)
    labels: Floats  # (n_rows,): class ids, or numbers
    weights: Floats  # (n_rows,)
    split: Split  # row numbers of each subset, in the order of the run
    columns: tuple[str, ...]
    categories: Categories = ()
    base_margins: Floats | None = None  # (n_rows,)
    is_weighted: bool = True  # by a column

    @property
    def widest(self) -> float:
        """Half the range of the labels, as a power of two: see ``strategies.scoring``."""
        return half_range(float(self.labels.min()), float(self.labels.max()))

    def matrix(self, kind: Any, rows: Rows, objective: str, **more: Any) -> Any:
        """Some rows as one of XGBoost's matrices, with labels, weights and base margins."""
        rows = rows[self.in_order_of(objective, rows)]
        labels, of_rows = self.labels[rows], self.types | more
        if self.base_margins is not None:
            of_rows["base_margin"] = self.base_margins[rows]
        if is_ranking(objective):  # whose weights are of queries
            of_rows["qid"] = queries_of(labels)
            labels = grades_of(labels).astype(np.float32)
        # Quantiles of unweighted rows are interpolated.
        elif self.is_weighted or not has_quantile_leaves(objective):
            of_rows["weight"] = self.weights[rows]
        matrix = kind(self.values[rows], labels, **of_rows)
        return with_bounds(matrix, labels, objective)

    def in_order_of(self, objective: str, rows: Rows) -> Rows:
        """Order that rows have in a matrix: that of their queries, if they are ranked."""
        if not is_ranking(objective):
            return np.arange(len(rows))
        return np.argsort(queries_of(self.labels[rows]), kind="stable")

    @property
    def types(self) -> dict[str, Any]:
        """Types of the columns, as arguments of XGBoost's matrices."""
        return typed_columns(category_counts(self.categories, len(self.columns)))

    def category_counts(self, of_training: bool) -> Ints:
        """Categories of each column, also those that no training row has, or only up to the last
        code that one has."""
        counts = category_counts(self.categories, len(self.columns))
        if of_training:
            codes = np.nan_to_num(self.values[self.split.train], nan=-1)
            counts = np.where(counts > 0, codes.max(axis=0, initial=-1) + 1, 0).astype(np.int64)
        return counts

    def in_table_order(self) -> Pooled:
        """Sort each subset by table order, as the last digits of a sum depend on the order."""
        subsets = (np.sort(getattr(self.split, subset)) for subset in SUBSETS)
        return replace(self, split=Split(*subsets))

    def coded_by_training_rows(self) -> Pooled:
        """Recode categories as vertical parties do: those of training rows first."""
        codes = trained_first(self.categories, self.values[self.split.train])[0]
        values = recoded(self.values, self.categories, codes, self.columns)[0]
        return replace(self, values=values, categories=codes)


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A trained baseline."""

    settings: Settings  # with an objective that is resolved
    rows: Pooled
    margins: Callable[[Rows], Floats]  # row numbers -> (n, n_outputs)
    center: float  # of the histogram of margins, see ``metrics.statistics``
    gains: npt.NDArray[np.float64]  # (n_columns,): total gain of the splits by column
    booster: Any = None  # if the model is XGBoost's

    def scores(self) -> dict[str, float]:
        """Scores on the test rows, computed like the run's.

        Horizontal parties add up histograms of margins; the active party of a vertical run has all
        margins. The threshold of two classes is chosen on the same rows as the run's.
        """
        split, eval_metrics = self.rows.split, self.settings.eval_metrics
        objective = self.settings.objective
        chosen = metrics.threshold_rows(len(split.valid) > 0)
        subsets = [subset for subset in (chosen, "test") if len(getattr(split, subset))]
        if baselines_of(self.settings.strategy).split_by == BY_COLUMNS:
            exact = {subset: self._rows(subset) for subset in subsets}
            return metrics.pooled_subsets(objective, exact, eval_metrics).get("test", {})
        sums = {subset: self._sums(subset) for subset in subsets}
        if "test" not in sums:
            return {}
        scores = scores_of(objective, sums["test"], eval_metrics)
        is_binary = objective == "binary:logistic"
        first = metrics.best_bin(sums[chosen]) if is_binary else None
        if scores and first is not None:
            scores |= metrics.scores_from_bin(sums["test"], first, self.center)
        return scores

    def curves(self) -> dict[str, Any]:
        """Curves on the test rows, from a run's number of bins; empty without weighted rows."""
        rows = self.rows
        if not rows.weights[rows.split.test].any():
            return {}
        sums, objective = self._sums("test"), self.settings.objective
        return metrics.curves(objective, sums, residual_range=rows.widest, center=self.center)

    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals of the scores on the test rows; none of weighted rows."""
        settings = self.settings
        return metrics.row_intervals(settings.objective, *self._rows("test"), settings.eval_metrics)

    def _sums(self, subset: str) -> metrics.Statistics:
        """The sums that horizontal parties would add up."""
        return metrics.statistics(
            self.settings.objective,
            *self._rows(subset),
            FINAL_BINS,
            self.rows.widest,
            self.center,
            extra=self.settings.eval_metrics,
        )

    def _rows(self, subset: str) -> tuple[Floats, Floats, Floats]:
        of = getattr(self.rows.split, subset)
        return self.margins(of), self.rows.labels[of], self.rows.weights[of]

    @property
    def importance(self) -> dict[str, dict[str, float]]:
        """``total_gain`` by column, largest first, for a forest its share; of XGBoost ``gain``."""
        by_kind = {TOTAL_GAIN: self.gains}
        if self.booster is not None:
            by_kind[GAIN] = gains_of(self.booster, GAIN, len(self.gains))
        orders = {kind: np.argsort(-gains, kind="stable") for kind, gains in by_kind.items()}
        return {
            kind: {self.rows.columns[c]: float(gains[c]) for c in orders[kind] if gains[c] > 0}
            for kind, gains in by_kind.items()
        }


def lacking_memory_of(settings: Settings) -> str:
    """Why the baselines, which copy all rows, cannot be trained; empty if they can be."""
    rows = baseline_rows(resolve_objective(settings))[0]
    rule = lacking_memory(MEMORY, *rows.values.shape)
    return rule and f"memory {rule}, as baselines copy them"


def run_baselines(settings: Settings, folder: Path | None = None) -> dict[str, Any]:
    """Train the baselines with the run's settings and score them on its test rows.

    XGBoost's cuts and last digits depend on the order of the rows. It is the run's for a single
    vertical run, so that SecureBoost's model is this one, and the table's in a comparison, where
    ``folder`` is None and methods share one baseline. If the folder has a lossless method's model,
    its trees are compared with the pooled ones.

    Returns ``{"pooled": scores, "alone": {party: scores}, "curves": {"pooled", "alone"},
    "intervals": {"pooled", "alone"}, "importance": {"pooled"}, "test_margins": {"pooled", "alone"},
    "same_nodes": [equal nodes, nodes]}``: intervals only for a run, and the last one only if trees
    were compared. Of vertical parties, only the one with the labels can train alone.
    """
    settings = resolve_objective(settings)
    kind = baselines_of(settings.strategy)
    if settings.calibration != "none":
        log.warning("baselines are not calibrated: compare their logloss with a run's without it")
    pooled, alone = baseline_rows(settings)
    if folder is None:
        pooled = pooled.in_table_order()
        alone = {name: rows.in_table_order() for name, rows in alone.items()}
    train = train_of(kind)
    of_all = train(settings, pooled)
    of_parties = {name: train(settings, rows) for name, rows in alone.items()}

    def of_each(facts: Callable[[Trained], Any]) -> dict[str, Any]:
        alone = {name: facts(trained) for name, trained in of_parties.items()}
        return {"pooled": facts(of_all), "alone": alone}

    baselines: dict[str, Any] = {
        **of_each(Trained.scores),
        "curves": of_each(Trained.curves),
        "importance": {"pooled": of_all.importance},
        "test_margins": of_each(lambda trained: encoded(trained.margins(trained.rows.split.test))),
    }
    if folder:  # a comparison has no use for them, and they are bootstrapped
        baselines["intervals"] = of_each(Trained.intervals)
    path = folder / "model.xgb.json" if folder else None
    is_lossless = kind.split_by == BY_COLUMNS or settings.parties == 1
    if of_all.booster is not None and is_lossless and path and path.exists():
        models = path.read_bytes(), of_all.booster.save_raw("json")
        baselines["same_nodes"] = same_nodes(*map(json.loads, models))
    return baselines


def train_of(kind: BaselineKind) -> Callable[[Settings, Pooled], Trained]:
    """The function that trains a kind of baseline."""
    return train_forest if kind.model == FOREST else train_boosted


def encoded(margins: Floats) -> str:
    """Margins as text, for a file."""
    return base64.b64encode(margins.astype("<f4").tobytes()).decode()


def decoded(text: str, n_rows: int) -> Floats:
    """Inverse of ``encoded``, (n_rows, n_outputs)."""
    return np.frombuffer(base64.b64decode(text), dtype="<f4").reshape(n_rows, -1)


def order_range(settings: Settings, metric: str, n_orders: int) -> tuple[float, float]:
    """Lowest and highest test score of pooled XGBoost over orders of the training rows."""
    settings = resolve_objective(settings)
    rows = baseline_rows(settings)[0]
    rng = np.random.default_rng(settings.seed)
    scores = []
    for _ in range(n_orders):
        shuffled = Split(rng.permutation(rows.split.train), rows.split.valid, rows.split.test)
        trained = train_boosted(settings, replace(rows, split=shuffled))
        scores.append(trained.scores().get(metric, np.nan))
    return min(scores), max(scores)


def baseline_rows(settings: Settings) -> tuple[Pooled, dict[str, Pooled]]:
    """All rows and columns of a run, and those that each party can train on alone."""
    kind = baselines_of(settings.strategy)
    if kind.split_by == BY_COLUMNS:
        joined, active, active_columns = join_tables(settings)
        alone = replace(
            joined,
            values=np.ascontiguousarray(joined.values[:, active_columns]),
            columns=joined.columns[active_columns],
            categories=chosen(joined.categories, range(len(joined.columns))[active_columns]),
        )
        if kind.model == XGBOOST:
            return joined.coded_by_training_rows(), {active: alone.coded_by_training_rows()}
        return joined.in_table_order(), {active: alone.in_table_order()}
    table, shares = stacked_tables(settings)
    test = np.concatenate([rows["test"] for rows in shares.values()])

    def of(parties: Iterable[PartRows]) -> Pooled:
        train, valid = (
            np.sort(np.concatenate([rows[subset] for rows in parties]))
            for subset in ("train", "valid")
        )
        return pooled_of(settings, table, Split(train, valid, test)).in_table_order()

    return of(shares.values()), {name: of([rows]) for name, rows in shares.items()}


def join_tables(settings: Settings) -> tuple[Pooled, str, slice]:
    """Join the tables of simulated vertical parties, on their common rows or as ``join`` says.

    The rows are in the order of the active party's table. Also returns the name of the party with
    the labels, and the slice of its columns.
    """
    configs = party_configs(settings)
    tables = [read_columns(config, settings.seed) for config in configs]
    ids = [row_ids(table, config, False) for table, config in zip(tables, configs, strict=True)]
    active = next(party for party, table in enumerate(tables) if table.labels is not None)
    rows = np.arange(len(ids[active]))
    if settings.join == INNER:
        rows = np.flatnonzero(
            np.all([np.isin(ids[active], party_ids) for party_ids in ids], axis=0)
        )
    taken = [
        taken_by_id(table, party_ids, ids[active][rows])
        for table, party_ids in zip(tables, ids, strict=True)
    ]
    joined = replace(
        taken[active],
        values=np.hstack([table.values for table in taken]),
        columns=joint_names({c.name: t.columns for c, t in zip(configs, taken, strict=True)}),
        categories=side_by_side((table.categories, len(table.columns)) for table in taken),
    )
    split = split_rows_of(settings, configs[active], tables[active], ids[active], rows)
    split = Split(*(np.searchsorted(rows, getattr(split, subset)) for subset in SUBSETS))
    first = sum(table.values.shape[1] for table in taken[:active])
    columns = slice(first, first + taken[active].values.shape[1])
    return pooled_of(settings, joined, split), configs[active].name, columns


def pooled_of(settings: Settings, table: Table, split: Split) -> Pooled:
    """Convert a table; its labels become numbers."""
    assert table.labels is not None
    classes = positive_last(
        class_names(table.labels, settings.objective),
        party_configs(settings)[0].positive_label,
        settings.objective,
    )
    labels = class_ids(table.labels, classes)
    weights = np.ones(table.n_rows, np.float32) if table.weights is None else table.weights
    return Pooled(
        table.values,
        labels,
        weights,
        split,
        table.columns,
        table.categories,
        table.base_margins,
        is_weighted=table.weights is not None,
    )


def train_boosted(settings: Settings, rows: Pooled) -> Trained:
    """Train XGBoost on the training rows."""
    import xgboost

    train, valid = rows.split.train, rows.split.valid
    # Vertical parties do not know the weights, so their cuts ignore them.
    is_divided = baselines_of(settings.strategy).split_by == BY_COLUMNS
    counts = rows.category_counts(of_training=is_divided)
    settings = settings.watching(len(valid)).splitting(counts.tolist())
    parameters = xgboost_parameters(settings, rows)

    def matrix(of: Rows) -> Any:
        return rows.matrix(xgboost.DMatrix, of, settings.objective)

    values = rows.values[train]
    how = {"max_bin": settings.max_bin, **rows.types}
    # Cuts of ranked rows are of the table's order too, not of that of its queries.
    has_cuts = is_divided or is_ranking(settings.objective)
    unweighted = xgboost.QuantileDMatrix(values, **how) if has_cuts else None
    how = {"max_bin": settings.max_bin, "ref": unweighted}
    binned = rows.matrix(xgboost.QuantileDMatrix, train, settings.objective, **how)
    weights = weights_of(parse_weights(settings.feature_weights), rows.columns)
    if len(weights):
        binned.set_info(feature_weights=weights.astype(np.float32))
    patience = settings.early_stopping_rounds if len(valid) else 0

    class Interruptible(xgboost.callback.TrainingCallback):
        def after_iteration(self, *_: object) -> bool:
            raise_interrupt()
            return False

    booster = xgboost.train(
        parameters,
        binned,
        settings.num_boost_round,
        evals=[(matrix(valid), "valid")] if patience else [],
        early_stopping_rounds=patience or None,
        verbose_eval=False,
        callbacks=[Interruptible()],
    )
    n_trees = booster.best_iteration + 1 if patience else 0

    def margins(of: Rows) -> Floats:
        predicted = booster.predict(matrix(of), output_margin=True, iteration_range=(0, n_trees))
        by_row = np.empty_like(predicted)
        by_row[rows.in_order_of(settings.objective, of)] = predicted
        return by_row.reshape(len(of), -1).astype(np.float32)

    best = booster[:n_trees] if n_trees else booster
    gains = gains_of(best, TOTAL_GAIN, rows.values.shape[1])
    with np.errstate(divide="ignore"):  # a party may have rows of one class only
        start = np.atleast_1d(np.float32(parameters.get("base_score", 0)))
        center = base_margin(settings.objective, start)
    return Trained(settings, rows, margins, float(center[0]), gains, best)


def gains_of(booster: Any, kind: str, n_columns: int) -> npt.NDArray[np.float64]:
    """XGBoost's importance of each column."""
    gains = np.zeros(n_columns)
    for name, gain in booster.get_score(importance_type=kind).items():
        gains[int(name[1:])] = gain  # f0, f1, ...
    return gains


def train_forest(settings: Settings, rows: Pooled) -> Trained:
    """Train scikit-learn's random forest on the training rows."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    section: Any = load_strategy(settings.strategy).section_settings(settings)
    is_regression = settings.objective == REGRESSION
    kind = RandomForestRegressor if is_regression else RandomForestClassifier
    limits = ("max_depth", "min_samples_split", "min_samples_leaf", "min_impurity_decrease")
    forest = kind(
        section.trees,
        criterion="squared_error" if is_regression else section.criterion_for(settings.objective),
        max_features=None if section.max_features == "all" else section.max_features,
        bootstrap=section.bootstrap,
        random_state=settings.seed % 2**32,
        **{name: getattr(section, name) for name in limits},
    )
    train = rows.split.train
    forest.fit(rows.values[train], rows.labels[train], sample_weight=rows.weights[train])

    def margins(of: Rows) -> Floats:
        values = rows.values[of]
        outputs = forest.predict(values)[:, None] if is_regression else forest.predict_proba(values)
        if settings.objective == "binary:logistic":
            outputs = outputs[:, 1:]
        return margins_of(settings.objective, outputs).astype(np.float32)

    gains = np.asarray(forest.feature_importances_, dtype=np.float64)
    return Trained(settings, rows, margins, 0.0, gains)


def xgboost_parameters(settings: Settings, rows: Pooled) -> dict[str, Any]:
    """The run's settings as parameters of ``xgboost.train``; the base score is of training rows."""
    n_classes, train = int(rows.labels.max()) + 1, rows.split.train
    width = n_outputs(settings.objective, n_classes)
    loss, more = LossParameters.of(settings), dict[str, Any]()
    # Quantiles XGBoost computes itself, of which it has one order. Those of several classes it sums
    # in an order that depends on its threads.
    if not has_quantile_leaves(settings.objective):
        weights = rows.weights[train]
        total = float(weights.sum(dtype=np.float64))
        sums = label_sums(settings.objective, rows.labels[train], weights, n_classes, loss)
        if not loss.scale_pos_weight:  # each baseline balances its own training rows
            loss = replace(loss, scale_pos_weight=balance(float(sums[0]), total))
        scores = base_score(settings.objective, sums, total, loss).tolist()
        more["base_score"] = scores if width > 1 else scores[0]
    monotone, groups = constraints_of(
        settings.monotone_constraints, settings.interaction_constraints, rows.columns
    )
    if len(monotone):
        more["monotone_constraints"] = tuple(monotone.tolist())
    if groups:  # a text has column numbers; a list would need names
        more["interaction_constraints"] = json.dumps([sorted(group) for group in groups])
    stopping = metrics.stopping_metric(settings.objective, settings.eval_metrics)
    return {
        **for_xgboost(settings.objective, width, parameters_of(settings), loss),
        **more,
        "num_parallel_tree": settings.num_parallel_tree,
        "multi_strategy": settings.multi_strategy,
        # XGBoost stops early by the last metric.
        "eval_metric": [metrics.for_xgboost(stopping, settings.objective)],
    }


def same_nodes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[int, int]:
    """Number of equal nodes of two models, and the larger number of nodes.

    Splits are equal if column, threshold or categories, default side and gain are, gains to the
    last bit; leaves if their values are close. Children are compared only below equal nodes.
    """
    models = [model["learner"]["gradient_booster"]["model"]["trees"] for model in (ours, theirs)]
    n_nodes = max(sum(len(tree["left_children"]) for tree in trees) for trees in models)
    return sum(_walk(mine, other) for mine, other in zip(*models, strict=False)), n_nodes


def _walk(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> int:
    """Count equal nodes from the root down, as nodes may be numbered differently."""
    pairs = [(0, 0)]
    n_same = 0
    sets = (_sets(ours), _sets(theirs))
    while pairs:
        mine, other = pairs.pop()
        if _node(ours, mine, sets[0]) != _node(theirs, other, sets[1]):
            continue
        if ours["left_children"][mine] == -1:
            value, other_value = _leaf(ours, mine), _leaf(theirs, other)
            n_same += bool(np.allclose(value, other_value, rtol=LEAF_TOLERANCE, atol=NEAR_ZERO))
            continue
        n_same += 1
        pairs += [
            (ours[side][mine], theirs[side][other]) for side in ("left_children", "right_children")
        ]
    return n_same


def _node(tree: Mapping[str, Any], node: int, sets: Mapping[int, list[int]]) -> tuple[Any, ...]:
    """The fields of a split that must be equal; empty for a leaf."""
    if tree["left_children"][node] == -1:
        return ()
    names = ("split_conditions", "loss_changes")
    threshold, gain = (np.float32(tree[name][node]) for name in names)
    if node in sets:
        threshold = np.float32(0)
    split = tree["split_indices"][node], int(tree["default_left"][node]), sets.get(node)
    return threshold, gain, *split


def _leaf(tree: Mapping[str, Any], leaf: int) -> Any:
    """The value of a leaf, or its vector."""
    size = int(tree["tree_param"]["size_leaf_vector"])
    if size < 2:
        return tree["split_conditions"][leaf]
    first = size * tree["right_children"][leaf]
    return tree["leaf_weights"][first : first + size]


def _sets(tree: Mapping[str, Any]) -> dict[int, list[int]]:
    """The categories that each categorical split sends right."""
    names = ("categories_nodes", "categories_segments", "categories_sizes")
    return {
        node: tree["categories"][start : start + size]
        for node, start, size in zip(*(tree[name] for name in names), strict=True)
    }
