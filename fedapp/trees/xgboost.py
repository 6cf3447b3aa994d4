"""Trees grown by XGBoost, as arrays of ``NODE``, and its parameter names.

Source: the model schema of XGBoost 3.2 (doc/model.schema).
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from fedapp.arrays import Flags, Floats, Ints
from fedapp.errors import ConfigError, DataError, as_plain
from fedapp.trees.categories import (
    NO_SET,
    Categories,
    CategorySets,
    as_categories,
    category_counts,
    names_of,
)
from fedapp.trees.custom import CUSTOM
from fedapp.trees.limits import ONE_TREE
from fedapp.trees.losses import LOSSES, PLAIN, REGRESSION, LossParameters, Objective
from fedapp.trees.model import (
    LEAF,
    MOST_NODES,
    NO_TREES,
    NODE,
    Ensemble,
    Grown,
    Tree,
    trees_with_sets,
)
from fedapp.trees.objective import gradients, has_risk_sets, is_survival, n_outputs

XGBOOST_NAMES = {"reg_lambda": "lambda", "reg_alpha": "alpha"}  # all others are equal


def for_xgboost(
    objective: Objective,
    width: int,
    parameters: Mapping[str, float],
    loss: LossParameters = PLAIN,
) -> dict[str, Any]:
    """Parameters for ``xgboost.train``, from a run's settings; ``width`` is the trees per round."""
    loss_parameters = {name: getattr(loss, name) for name in LOSSES[objective].reads}
    renamed = {XGBOOST_NAMES.get(name, name): value for name, value in parameters.items()}
    classes = {"num_class": width} if width > 1 else {}
    return {**renamed, **loss_parameters, "objective": objective, "tree_method": "hist", **classes}


def grow_trees(
    objective: Objective,
    n_classes: int,
    parameters: Mapping[str, float],
    rows: tuple[Floats, Floats, Floats],
    margins: Floats,
    n_rounds: int,
    widths: Ints,
    loss: LossParameters = PLAIN,
) -> Grown:
    """Boost some rounds on one party's rows, from given margins.

    The margins are XGBoost's ``base_margin``, so the trees are bit for bit those of a booster that
    continues from there, and no base score is estimated.

    Parameters
    ----------
    n_classes : 0 for regression.
    parameters : a run's settings, with ``max_bin``.
    rows : values, float32, shape (n_rows, n_columns), NaN where missing; labels and weights,
        float32, shape (n_rows,).
    margins : float32, shape (n_rows, n_outputs).
    widths : int64, shape (n_columns,): number of categories of each column, 0 for a numeric one.

    Returns
    -------
    ``n_rounds * n_outputs`` trees; with k outputs, tree i adds to output ``i % k``.
    """
    import xgboost

    if not n_rounds:
        return NO_TREES
    values, labels, weights = rows
    width = n_outputs(objective, n_classes)
    matrix = xgboost.QuantileDMatrix(
        values,
        labels,
        weight=weights,
        base_margin=margins if width > 1 else margins[:, 0],
        max_bin=int(parameters["max_bin"]),
        **typed_columns(widths),
    )
    fixed = {"base_score": 0.5, "verbosity": 0}
    settings = for_xgboost(objective, width, parameters, loss) | fixed

    def custom_objective(margins: Floats, matrix: Any) -> tuple[Floats, Floats]:
        pairs = gradients(CUSTOM, margins.reshape(-1, 1), labels, weights, loss)
        return pairs[:, 0, 0], pairs[:, 0, 1]

    if objective == CUSTOM:
        settings["objective"] = REGRESSION
    custom = custom_objective if objective == CUSTOM else None
    return trees_from_xgboost(xgboost.train(settings, matrix, n_rounds, obj=custom), widths)


def with_bounds(matrix: Any, labels: Floats, objective: str) -> Any:
    """One of XGBoost's matrices; of ``survival:aft`` with lower and upper bounds of times."""
    if is_survival(objective) and not has_risk_sets(objective):
        times = np.abs(labels)
        matrix.set_float_info("label_lower_bound", times)
        matrix.set_float_info("label_upper_bound", np.where(labels > 0, times, np.float32(np.inf)))
    return matrix


def typed_columns(widths: Ints) -> dict[str, Any]:
    """Arguments of XGBoost's matrices so that codes are read as categories."""
    if not widths.any():
        return {}
    return {"feature_types": feature_types(widths), "enable_categorical": True}


def feature_types(widths: Ints) -> list[str]:
    """XGBoost's column types, from the number of categories of each column."""
    return ["c" if width else "float" for width in widths.tolist()]


def trees_from_xgboost(booster: Any, widths: Ints) -> Grown:
    """The trees of an ``xgboost.Booster`` in its order, every float32 to the bit.

    ``booster`` has trees with one value per leaf, grown by ``tree_method="hist"``. Raises
    ValueError for pruned nodes, or categorical splits that do not match ``widths``.
    """
    document = json.loads(booster.save_raw("json"))
    trees = document["learner"]["gradient_booster"]["model"]["trees"]
    parsed = [tree_of_xgboost(fields, widths) for fields in trees]
    codes = tuple(tuple(set_codes) for fields in trees for set_codes in sets_of(fields).values())
    return trees_with_sets(parsed, CategorySets.of_codes(codes), widths)


def sets_of(fields: Mapping[str, Any]) -> dict[int, list[int]]:
    """The categories that each categorical split of a tree sends right, by node, ascending."""
    segments = sorted(zip(*(fields[name] for name in PER_SET), strict=True))
    return {node: fields["categories"][start : start + size] for node, start, size in segments}


def tree_of_xgboost(fields: Mapping[str, Any], widths: Ints) -> Tree:
    """One tree; see ``trees_from_xgboost``. A leaf has its value in place of a threshold."""
    lefts = np.array(fields["left_children"], dtype=np.int32)
    rights = np.array(fields["right_children"], dtype=np.int32)
    is_leaf = lefts == LEAF
    if (rights[~is_leaf] != lefts[~is_leaf] + 1).any():
        raise ValueError("a tree must have no pruned nodes")
    columns = np.where(is_leaf, 0, np.array(fields["split_indices"], dtype=np.int64))
    by_set = np.array(fields["split_type"], dtype=bool)
    if ((widths[columns] > 0) != by_set)[~is_leaf].any():
        raise ValueError("a tree must split columns of categories by sets, and no others")
    conditions = np.array(fields["split_conditions"], dtype=np.float32)
    tree = np.zeros(len(lefts), dtype=NODE)
    tree["left"] = lefts
    tree["column"] = columns
    tree["threshold"] = np.where(is_leaf | by_set, np.float32(0), conditions)
    tree["default_left"] = np.array(fields["default_left"], dtype=bool) & ~is_leaf
    tree["gain"], tree["hessian"] = fields["loss_changes"], fields["sum_hessian"]
    tree["weight"] = fields["base_weights"]
    tree["value"] = np.where(is_leaf, conditions, np.float32(0))
    return tree


# A model as XGBoost JSON, for prediction, SHAP and importance with stock XGBoost.

VERSION = [3, 1, 0]  # the first version whose base_score is a vector
NO_PARENT = 2147483647
NO_THRESHOLD = np.finfo(np.float32).smallest_subnormal  # of a categorical split, as in XGBoost
# Objective: its block of parameters and the names in it; all others are as for logistic loss.
OTHER_BLOCK = "reg_loss_param", "scale_pos_weight"
PARAMETER_BLOCKS: dict[str, tuple[str, ...]] = {
    "count:poisson": ("poisson_regression_param", "max_delta_step"),
    "reg:pseudohubererror": ("pseudo_huber_param", "huber_slope"),
    "reg:quantileerror": ("quantile_loss_param", "quantile_alpha"),
    "reg:tweedie": ("tweedie_regression_param", "tweedie_variance_power"),
    **dict.fromkeys(("rank:ndcg", "rank:pairwise"), ("lambdarank_param",)),
    "survival:aft": (
        "aft_loss_param",
        "aft_loss_distribution",
        "aft_loss_distribution_scale",
    ),
}


def to_xgboost_json(model: Ensemble) -> str:
    """The model as XGBoost would save it; a category is its code and has no name."""
    n_trees, width, n_parallel = len(model.trees), model.n_outputs, model.num_parallel_tree
    order = in_xgboosts_order(model)
    booster = {
        "cats": {"enc": [], "feature_segments": [], "sorted_idx": []},
        "gbtree_model_param": {"num_parallel_tree": str(n_parallel), "num_trees": str(n_trees)},
        "iteration_indptr": list(range(0, n_trees + 1, model.width)),
        "tree_info": [
            0 if model.multi_strategy == ONE_TREE else number % width for number in order
        ],
        "trees": [
            _tree_as_json(tree_id, model.trees[at], model) for tree_id, at in enumerate(order)
        ],
    }
    # For information only: the base-margin column, whose values XGBoost takes with the rows,
    # whether the objective was a function, and who edited curves.
    attributes = {"base_margin": model.margin_column} if model.margin_column else {}
    attributes |= {"objective": CUSTOM} if model.objective == CUSTOM else {}
    attributes |= {"edits": "; ".join(map(str, model.edits))} if model.edits else {}
    document = {
        "learner": {
            "attributes": attributes,
            "feature_names": names_for_xgboost(model.columns),
            "feature_types": feature_types(category_counts(model.categories, len(model.columns))),
            "gradient_booster": {"model": booster, "name": "gbtree"},
            "learner_model_param": {
                "base_score": "[" + ",".join(map(str, model.base_score)) + "]",
                "boost_from_average": "0",
                "num_class": str(width if width > 1 else 0),
                "num_feature": str(len(model.columns)),
                "num_target": "1",
            },
            "objective": _objective(model),
        },
        "version": VERSION,
    }
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False) + "\n"


def in_xgboosts_order(model: Ensemble) -> list[int]:
    """Numbers of the trees in XGBoost's order: of a round, all of the first output come first."""
    shape = -1, model.num_parallel_tree, model.width // model.num_parallel_tree
    order: list[int] = (
        np.arange(len(model.trees)).reshape(shape).transpose(0, 2, 1).ravel().tolist()
    )
    return order


def names_for_xgboost(columns: Sequence[str]) -> list[str]:
    """Names of columns, each once and without [, ] and <, which XGBoost forbids."""
    taken, names = set(columns), list[str]()
    for column in columns:
        name = re.sub(r"[\[\]<]", "_", column)
        while name != column and name in taken:
            name += "_"
        taken.add(name)
        names.append(name)
    return names


def _objective(model: Ensemble) -> dict[str, Any]:
    """The loss with its parameters."""
    if model.objective == "multi:softprob":
        return {
            "name": model.objective,
            "softmax_multiclass_param": {"num_class": str(model.n_outputs)},
        }
    # XGBoost also saves its default objective for a function; predictions are margins.
    objective_name = REGRESSION if model.objective == CUSTOM else model.objective
    block, *names = PARAMETER_BLOCKS.get(model.objective, OTHER_BLOCK)
    values = {name: getattr(model.parameters, name) for name in names}
    texts = {name: _text(value) for name, value in values.items()}
    if model.objective == "reg:quantileerror":  # of which XGBoost has a list
        texts = {name: f"[{text}]" for name, text in texts.items()}
    return {"name": objective_name, block: texts}


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{np.float32(value):.9g}"


def _tree_as_json(tree_id: int, tree: Tree, model: Ensemble) -> dict[str, Any]:
    """One tree; a leaf's value takes the place of a split's threshold."""
    is_leaf = tree["left"] == LEAF
    by_set = np.flatnonzero(tree["set"] != NO_SET) if len(model.sets) else np.empty(0, np.int64)
    codes_by_split = model.sets.take(tree["set"][by_set]).codes()
    sizes = [len(codes) for codes in codes_by_split]
    thresholds = tree["threshold"].copy()
    thresholds[by_set] = NO_THRESHOLD
    has_vectors = tree["value"].ndim > 1
    weights = np.where(is_leaf[:, None] if has_vectors else is_leaf, tree["value"], tree["weight"])
    in_leaves = NO_THRESHOLD if has_vectors else tree["value"]
    return {
        "base_weights": _floats(weights.ravel()),
        "categories": [code for codes in codes_by_split for code in codes],
        "categories_nodes": by_set.tolist(),
        "categories_segments": np.cumsum([0, *sizes])[:-1].tolist(),
        "categories_sizes": sizes,
        "default_left": tree["default_left"].astype(int).tolist(),
        "id": tree_id,
        "left_children": tree["left"].tolist(),
        "loss_changes": _floats(tree["gain"]),
        "parents": np.where(tree["parent"] < 0, NO_PARENT, tree["parent"]).tolist(),
        "right_children": np.where(is_leaf, LEAF, tree["left"] + 1).tolist(),
        "split_conditions": _floats(np.where(is_leaf, in_leaves, thresholds)),
        "split_indices": tree["column"].tolist(),
        "split_type": np.isin(np.arange(len(tree)), by_set).astype(int).tolist(),
        "sum_hessian": _floats(tree["hessian"]),
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(len(model.columns)),
            "num_nodes": str(len(tree)),
            "size_leaf_vector": str(model.n_outputs if has_vectors else 1),
        },
        **(_vectors_as_json(tree, is_leaf) if has_vectors else {}),
    }


def _vectors_as_json(tree: Tree, is_leaf: Flags) -> dict[str, Any]:
    """What differs in a tree of vectors: a leaf's place among them is its right child."""
    return {
        "leaf_weights": _floats(tree["value"][is_leaf].ravel()),
        "parents": tree["parent"].tolist(),
        "right_children": np.where(is_leaf, np.cumsum(is_leaf) - 1, tree["left"] + 1).tolist(),
    }


def _floats(values: Any) -> list[float]:
    """Numbers that read back to the same float32."""
    return [float(str(value)) for value in values]


Warn = Callable[[str], None]
Recoding = Mapping[int, list[int]]  # by column: the run's code of each of the file's codes
Json = Any
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
BEGINNING = 64  # bytes within which a file names its first field
NUMBERS = {"i": ">i1", "U": ">u1", "I": ">i2", "l": ">i4", "L": ">i8", "d": ">f4", "D": ">f8"}
PER_NODE = (
    *("left_children", "right_children", "base_weights", "default_left", "loss_changes"),
    *("split_conditions", "split_indices", "split_type", "sum_hessian"),
)
PER_SET = "categories_nodes", "categories_segments", "categories_sizes"


def is_xgboost(beginning: bytes) -> bool:
    """Whether a file begins as those of XGBoost's ``save_model``."""
    return b"learner" in beginning[:BEGINNING]


def stock_ensemble(content: bytes, run: Ensemble, warn: Warn) -> Ensemble:
    """Read a model that a run is to continue.

    ``run`` is the run's model without trees. What a file of XGBoost lacks is the run's: classes,
    kinds of columns and, if need be, their names, the base-margin column, the order of categories.

    Raises
    ------
    ConfigError : no run of the objective, classes and number of columns grows such a model.
    DataError : the file is damaged.
    """
    with _as_damaged(), np.errstate(over="ignore"):  # what leaves float32 is refused
        return _ensemble(_learner(content), run, warn)


def stock_classes(content: bytes) -> tuple[str, ...]:
    """Names of a file's classes, which are their numbers; DataError if it is damaged."""
    with _as_damaged():
        return tuple(map(str, range(int(_learner(content)["learner_model_param"]["num_class"]))))


def _learner(content: bytes) -> Json:
    document = json.loads(content) if content[1:2] in b'" \n\r\t' else from_ubj(content)
    return document["learner"]


@contextmanager
def _as_damaged() -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        rule = "init-model must be a whole file of XGBoost's save_model, got a damaged one"
        reason = f": {error}" if type(error) is ValueError else ""
        raise DataError(as_plain(rule + reason)) from None


def from_ubj(content: bytes) -> Json:
    """Parse UBJ as XGBoost writes it; KeyError or ValueError where the content ends early."""
    read = io.BytesIO(content).read

    def numbers(marker: bytes, count: int = 1) -> list[Any]:
        dtype = np.dtype(NUMBERS[marker.decode()])
        part = read(count * dtype.itemsize)
        values: list[Any] = np.frombuffer(part, dtype, count).tolist() if count else []
        return values

    def text(marker: bytes) -> str:
        return read(numbers(marker)[0]).decode()

    def value(marker: bytes) -> Json:
        if marker == b"{":
            pairs = {}
            while (marker := read(1)) != b"}":
                name = text(marker)
                pairs[name] = value(read(1))
            return pairs
        if marker == b"[":  # [$ type # length: numbers of one type; [# length: values
            kind = read(2)[:1] if read(1) == b"$" else b""
            (length,) = numbers(read(1))
            return numbers(kind, length) if kind else [value(read(1)) for _ in range(length)]
        return text(read(1)) if marker == b"S" else numbers(marker)[0]

    return value(read(1))


def _ensemble(learner: Mapping[str, Any], run: Ensemble, warn: Warn) -> Ensemble:
    booster, parameters = learner["gradient_booster"], learner["learner_model_param"]
    _check("booster", "gbtree", booster["name"])
    model = booster["model"]
    # XGBoost 3.3 and later save dart as a gbtree whose trees have weights.
    drops = booster.get("weight_drop", model.get("weight_drop", ()))
    _check("booster", "gbtree", "gbtree" if all(weight == 1 for weight in drops) else "dart")
    _check("num_parallel_tree", 1, run.num_parallel_tree)  # trees come in another order
    _check("num_parallel_tree", 1, int(model["gbtree_model_param"]["num_parallel_tree"]))
    _check("num_target", 1, int(parameters.get("num_target", 1)))
    sizes = (int(tree["tree_param"]["size_leaf_vector"]) for tree in model["trees"])
    has_one_tree = max(sizes, default=1) > 1
    _check(
        "multi_strategy", run.multi_strategy, ONE_TREE if has_one_tree else "one_output_per_tree"
    )
    objective = learner["objective"]["name"].replace("multi:softmax", "multi:softprob")
    # XGBoost saves its default objective for a function.
    due = REGRESSION if run.objective == CUSTOM else run.objective
    _check("objective", due, objective, way_of_objective(objective))
    _check("num_class", run.n_outputs, max(int(parameters["num_class"]), 1))
    _check("num_feature", len(run.columns), int(parameters["num_feature"]))
    columns = tuple(learner.get("feature_names", ()))
    if not columns:
        warn("init-model has no names of columns: they must be the table's, in their order")
    names = dict(zip(names_for_xgboost(run.columns), run.columns, strict=True))
    # Names that differ in forbidden characters only depend on the order of the columns.
    backwards = dict(zip(names_for_xgboost(run.columns[::-1]), run.columns[::-1], strict=True))
    if columns == tuple(names) or (names == backwards and sorted(columns) == sorted(names)):
        columns = tuple(names[name] for name in columns)
    columns = columns or run.columns
    run = run.in_order(columns)
    categories, recoding = _categories(learner, run)
    widths = category_counts(categories, len(columns))
    trees, codes = [], []
    for fields in map(_without_deleted, model["trees"]):
        tree = tree_of_xgboost(fields, widths)
        if not all(np.isfinite(tree[field]).all() for field in tree.dtype.names or ()):
            raise ValueError("numbers of trees must be finite")
        if len(tree) > MOST_NODES:
            rule = f"trees of init-model must have at most {MOST_NODES:,} nodes"
            raise ConfigError(f"{rule}, got {len(tree):,}: train it with a smaller max_depth")
        trees.append(tree)
        for node, set_codes in sets_of(fields).items():
            run_codes = recoding.get(int(tree["column"][node]))
            codes.append(
                tuple(set_codes if run_codes is None else [run_codes[code] for code in set_codes])
            )
    n_rounds, attributes = len(trees) // run.n_outputs, learner.get("attributes", {})
    best = int(attributes.get("best_iteration", n_rounds - 1)) + 1
    if best < n_rounds:
        way = f"to continue the best one, save booster[:{best}]"
        warn(f"init-model is continued after all its {n_rounds} rounds, as by XGBoost: {way}")
    # XGBoost 3.1 and later have a list.
    scores = np.array(json.loads(parameters["base_score"]), np.float32)
    ensemble = replace(
        run,
        base_score=np.broadcast_to(scores, run.n_outputs).copy(),
        columns=columns,
        trees=tuple(trees),
        sets=CategorySets.of_codes(tuple(codes)),
        categories=categories,
        parameters=_loss_parameters(learner["objective"], run),
        margin_column=attributes.get("base_margin", run.margin_column),
    )
    return ensemble.completed()


def way_of_objective(of_model: str) -> str:
    """What to do where a model's objective is not the run's."""
    is_multi = of_model == "multi:softprob"
    return "; where the rows lack classes of it, set objective=multi:softprob" * is_multi


def _check(name: str, due: object, got: object, way: str = "") -> None:
    if got != due:
        raise ConfigError(as_plain(f"{name} of init-model must be {due!r}, got {got!r}{way}"))


def _categories(learner: Mapping[str, Any], run: Ensemble) -> tuple[Categories, Recoding]:
    """Names of the categories, in the run's order if it has the same, and the codes in that."""
    dictionaries = learner["gradient_booster"]["model"].get("cats", {}).get("enc", [])
    entries: list[tuple[str, ...] | None] = [None] * len(run.columns)
    recoding = dict[int, list[int]]()
    for column, kind in enumerate(learner.get("feature_types", ())):
        if kind != "c":
            continue
        names = _category_names(dictionaries[column]) if dictionaries else ()
        if not names or not "".join(names).isascii():
            rule = "init-model must have names of its categories in ASCII, got others or none"
            way = "train it on a frame, with XGBoost 3.1 or later, which cuts other names short"
            raise ConfigError(f"{rule}: {way}")
        entries[column], run_names = names, names_of(run.categories, column)
        if run_names and sorted(run_names) == sorted(names):
            entries[column] = run_names
            recoding[column] = [run_names.index(name) for name in names]
    return as_categories(entries), recoding


def _category_names(dictionary: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a column's categories by code: whole numbers, or texts one after the other."""
    if "offsets" not in dictionary:
        return tuple(map(str, dictionary["values"]))
    content = np.array(dictionary["values"], np.int8).tobytes().decode("latin-1")
    return tuple(content[begin:end] for begin, end in pairwise(dictionary["offsets"]))


def _without_deleted(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tree without nodes that XGBoost has pruned, the others in their order by level."""
    if int(fields["tree_param"]["num_deleted"]) == 0:
        return fields
    sides = "left_children", "right_children"
    order = [0]
    for node in order:  # which grows meanwhile
        order += [fields[side][node] for side in sides if fields[side][node] != LEAF]
        if len(order) > len(fields[sides[0]]):
            raise ValueError("nodes must be reached once")
    places = {node: number for number, node in enumerate(order)} | {LEAF: LEAF}
    sets = [at for at, node in enumerate(fields["categories_nodes"]) if node in places]
    reached = {name: [fields[name][node] for node in order] for name in PER_NODE}
    reached |= {name: [fields[name][at] for at in sets] for name in PER_SET}
    numbers = {name: [places[node] for node in reached[name]] for name in (*sides, PER_SET[0])}
    return {**fields, **reached, **numbers}


def _loss_parameters(objective: Mapping[str, Any], run: Ensemble) -> LossParameters:
    """Parameters of the objective, the run's if they are equal as float32."""
    block, *names = PARAMETER_BLOCKS.get(objective["name"], OTHER_BLOCK)
    others = dict[str, Any]()
    for name in names:
        due = getattr(run.parameters, name)
        text = str(objective.get(block, {}).get(name, due))
        value = type(due)(text.strip("[]"))  # of quantiles XGBoost has a list
        is_text = isinstance(due, str)
        if value != due if is_text else np.float32(value) != np.float32(due):
            others[name] = value
    return replace(run.parameters, **others)
