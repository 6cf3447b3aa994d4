"""Models of stock XGBoost, from the JSON or UBJ file that its ``save_model`` writes.

XGBoost's own reader may crash on a damaged file of UBJ, so files are parsed here.

Sources: the model schema of XGBoost 3.2 (doc/model.schema) and files of XGBoost 3.3 and 3.4,
Universal Binary JSON, draft 12.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from fedapp.errors import ConfigError, DataError, as_plain
from fedapp.trees.categories import Categories, as_categories, names_of
from fedapp.trees.custom import CUSTOM
from fedapp.trees.losses import REGRESSION, LossParameters
from fedapp.trees.model import LEAF, MOST_NODES, Ensemble
from fedapp.trees.sets import CategorySets, category_counts
from fedapp.trees.size import ONE_TREE
from fedapp.trees.xgboost import (
    OTHER_BLOCK,
    PARAMETER_BLOCKS,
    names_for_xgboost,
    sets_of,
    tree_of_xgboost,
)

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
