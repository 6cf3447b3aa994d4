"""A document is read back as it was written, or not at all; for every kind of model."""

import json
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedapp.errors import DataError, FedappError
from fedapp.records.document import form_of, from_document, from_text, to_text
from fedapp.runs.predict import model_of_text
from fedapp.trees.divided import (
    PARTS,
    ActivePart,
    DividedModel,
    ForestPart,
    Lookup,
    Nesting,
    PartTree,
    PassivePart,
)
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.linear import LinearModel, input_names
from fedapp.trees.losses import PLAIN, LossParameters
from fedapp.trees.model import LEAF, NODE, Ensemble
from fedapp.trees.sets import CategorySets, category_counts
from fedapp.trees.stacked import HeadShape, StackedModel

WHOLE = Ensemble, BaggedForest, StackedModel, LinearModel, DividedModel
KINDS = (*WHOLE, *PARTS)
LETTERS = [*'ab"\\\n\x01\x9b', "\u00e9", "\u2028", "\U0001f600"]
RNGS = st.builds(np.random.default_rng, st.integers(0, 2**32 - 1))


def texts(rng, n):
    return tuple("".join(rng.choice(LETTERS, rng.integers(5))) for _ in range(n))


def floats(rng, shape, dtype=np.float32):
    info = np.finfo(dtype)
    edges = [0, -0.0, 0.1, info.max, info.min, info.smallest_subnormal, *rng.normal(size=4)]
    return rng.choice(np.array(edges, dtype), shape)


def lefts_of(rng):
    """Left children of a tree that grew by splitting one leaf after the other."""
    lefts = [LEAF]
    for _ in range(rng.integers(4)):
        leaves = [node for node, left in enumerate(lefts) if left == LEAF]
        lefts[rng.choice(leaves)] = len(lefts)
        lefts += [LEAF, LEAF]
    return np.array(lefts, dtype=np.int32)


def grown_trees(rng, n_trees, n_columns, plain=False):
    """Trees; plain ones have thresholds of splits and values of leaves alone, as packed ones."""
    grown = []
    for lefts in [lefts_of(rng) for _ in range(n_trees)]:
        tree, inner = np.zeros(len(lefts), NODE), lefts != LEAF
        for name in ("threshold", "value", *(() if plain else ("gain", "hessian", "weight"))):
            tree[name] = floats(rng, len(lefts))
        if plain:
            tree["threshold"][~inner] = tree["value"][inner] = 0
        tree["left"] = lefts
        tree["column"][inner] = rng.integers(n_columns, size=inner.sum())
        tree["default_left"][inner] = rng.random(inner.sum()) < 0.5
        grown.append(tree)
    return tuple(grown)


def categories_of(rng, n_columns):
    names = [tuple(dict.fromkeys(texts(rng, rng.integers(1, 10)))) for _ in range(n_columns)]
    drawn = tuple(each if rng.random() < 0.5 else None for each in names)
    return drawn if rng.random() < 0.5 else ()


def sets_of(rng, widths):
    """Sets of splits by columns of these numbers of categories."""
    return CategorySets.of([rng.random(width) < 0.5 for width in widths.tolist() if width])


def sets_of_trees(rng, grown, categories, n_columns):
    columns = [tree["column"][tree["left"] != LEAF] for tree in grown]
    widths = category_counts(categories, n_columns)
    return sets_of(rng, widths[np.concatenate([*columns, np.empty(0, np.int32)])])


def header(rng):
    """Objective, classes, number of outputs, names, categories and kinds of columns."""
    counts = {"binary:logistic": 2, "multi:softprob": 3, "reg:squarederror": 0}
    objective = str(rng.choice([*counts]))
    columns, width = texts(rng, rng.integers(1, 4)), 3 if objective == "multi:softprob" else 1
    kinds = texts(rng, len(columns)) if rng.random() < 0.5 else ()
    named = columns, categories_of(rng, len(columns)), kinds
    return objective, texts(rng, counts[objective]), width, *named


def base_score(rng, width):
    return rng.uniform(0.125, 0.875, width).astype(np.float32)


def ensemble(rng):
    objective, classes, width, columns, categories, kinds = header(rng)
    grown = grown_trees(rng, width, len(columns)) * int(rng.integers(3))
    sets = sets_of_trees(rng, grown, categories, len(columns))
    parameters = LossParameters(rng.uniform(0.5, 9), 0.7, rng.uniform(1.1, 1.9))
    more = PLAIN if rng.random() < 0.5 else parameters, *texts(rng, 1), kinds
    given = base_score(rng, width), columns, classes, grown, sets, categories, *more
    return Ensemble(objective, *given).completed()


def forest(rng):
    objective, classes, width, columns, categories, kinds = header(rng)
    grown = grown_trees(rng, rng.integers(3), len(columns), plain=True)
    for tree in grown:
        tree["value"] = 0
    values = tuple(floats(rng, (len(tree), width), np.float64) for tree in grown)
    more = values, sets_of_trees(rng, grown, categories, len(columns)), categories, kinds
    return BaggedForest(objective, columns, classes, grown, *more).completed()


def stacked(rng):
    objective, classes, width, columns, categories, kinds = header(rng)
    parties = tuple(
        grown_trees(rng, n_trees * width, len(columns), plain=True)
        for n_trees in rng.integers(1, 3, rng.integers(1, 3))
    )
    grown = [tree for party in parties for tree in party]
    head, channels = str(rng.choice(["cnn", "cnn3", "fcnn"])), int(rng.integers(1, 3))
    shape = HeadShape.over(head, [len(party) for party in parties], width, channels)
    weights = np.full(shape.n_weights, 0.1, np.float32)
    model = columns, classes, np.float32(rng.uniform(0.5, 9)), parties, shape, weights
    more = sets_of_trees(rng, grown, categories, len(columns)), categories, kinds
    return StackedModel(objective, base_score(rng, width), *model, *more).completed()


def linear(rng):
    objective, classes, width, columns, categories, kinds = header(rng)
    n_inputs = len(input_names(columns, categories))
    shapes = n_inputs, (n_inputs, width), width
    means, weights, bias = (floats(rng, shape, np.float64) for shape in shapes)
    numbers = means, rng.uniform(0.1, 1e9, n_inputs), weights, bias
    return LinearModel(objective, columns, classes, *numbers, categories, kinds)


def divided(rng):
    return DividedModel(*texts(rng, 4), texts(rng, 2))


def part_fields(rng):
    columns, n = texts(rng, rng.integers(1, 4)), rng.integers(4)
    categories, of_records = categories_of(rng, len(columns)), rng.integers(len(columns), size=n)
    widths = category_counts(categories, len(columns))[of_records]
    cuts = floats(rng, n), rng.integers(2, size=n, dtype=np.uint8)
    quantiles = floats(rng, (len(columns), rng.integers(1, 4)))
    quantiles[rng.random(quantiles.shape) < 0.3] = np.nan
    return {
        "columns": columns,
        "active": "bank",
        "kinds": texts(rng, len(columns)) if rng.random() < 0.5 else (),
        "categories": categories,
        "quantiles": quantiles,
        "lookup": Lookup(of_records, *cuts, widths, sets_of(rng, widths).bits),
    }


def passive_part(rng):
    given = part_fields(rng)
    n = given["lookup"].n_records
    under = rng.integers(-1, max(0, 2 * n), n)
    return PassivePart(**given, nesting=Nesting(rng.integers(10, size=n), under))


def forest_part(rng):
    given, grown = part_fields(rng), []
    for lefts in [lefts_of(rng).astype(np.int64) for _ in range(rng.integers(3))]:
        records = np.full(len(lefts), -1)
        inner = np.flatnonzero(lefts != LEAF)[: given["lookup"].n_records]
        records[inner] = np.arange(len(inner))
        grown.append(PartTree(lefts, records))
    return ForestPart(**given, trees=tuple(grown))


def active_part(rng):
    model = (ensemble, forest)[rng.integers(2)](rng)
    records = []
    for tree in model.trees:  # all splits are another's
        inner = tree["left"] != LEAF
        records.append(np.where(inner, np.cumsum(inner) - 1, -1))
    return ActivePart(
        **part_fields(rng),
        name="bank",
        digests={"shop": rng.bytes(rng.integers(5))},
        model=model,
        records=tuple(records),
        n_columns={"bank": 0, "shop": len(model.columns)},
        threshold=None if rng.random() < 0.5 else float(floats(rng, 1, np.float64)[0]),
    )


MODELS = ensemble, forest, stacked, linear, divided, passive_part, forest_part, active_part


def random_model(rng):
    return MODELS[rng.integers(len(MODELS))](rng)


def bits(value):
    """A value with arrays as types, shapes and bytes, so that equal values are the same bits."""
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, value.tobytes()
    if is_dataclass(value):
        return type(value), [bits(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, tuple):
        return [bits(each) for each in value]
    if isinstance(value, dict):
        return [(name, bits(each)) for name, each in value.items()]
    return type(value), value


@examples(max_examples=60)
@given(RNGS)
def test_a_model_reads_back_to_the_same_bits(rng):
    model = random_model(rng)
    text = to_text(model)
    again = from_text(text, *KINDS)
    assert bits(again) == bits(model)
    assert to_text(again) == text
    assert json.loads(text)["kind"] == model.KIND


# What the declaration of a field forbids


def places(node, path=()):
    yield path
    if isinstance(node, dict | list):
        for key in node if isinstance(node, dict) else range(len(node)):
            yield from places(node[key], (*path, key))


# By the type of the value that they replace. A number or a list may be optional, so null replaces
# neither.
FORBIDDEN = {
    str: [1, None, [], {}, True],
    bool: [0, 1, "true", None],
    int: ["1", 0.5, True, None, 2**70, -(2**70), [], float("nan")],
    float: ["1", True, [], {}, float("nan"), float("inf"), -float("inf"), 10**400],
    list: [{}, "x", 1, [[{}]]],
    dict: [[], None, "x", 1, {"another": "x"}],
    type(None): [True, {}, "x", float("nan")],
}


def at(document, path):
    for key in path:
        document = document[key]
    return document


@examples(max_examples=40)
@given(RNGS, st.data())
def test_a_forbidden_value_is_refused_wherever_it_is(rng, data):
    document = json.loads(to_text(random_model(rng)))
    *way, last = data.draw(st.sampled_from([path for path in places(document) if path]))
    parent = at(document, tuple(way))
    parent[last] = data.draw(st.sampled_from(FORBIDDEN[type(parent[last])]))
    with pytest.raises(DataError, match=r"^model must be JSON of fedapp's format 3, got another: "):
        from_text(json.dumps(document), *KINDS)


def other_values(value):
    """Values of the same type, most of which do not fit the rest of a document."""
    if isinstance(value, list):
        return [value[1:], [*value, *value[-1:]], value[::-1]]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value + 1, value - 1, -value, 1000 * value]
    return ["", "other"] if isinstance(value, str) else [None, {}]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@examples(max_examples=60)
@given(RNGS, st.data())
def test_what_does_not_fit_together_is_refused_and_the_rest_is_read_and_predicts(rng, data):
    document = json.loads(to_text(random_model(rng)))
    paths = [path for path in places(document) if path not in ((), ("format",))]
    *way, last = data.draw(st.sampled_from(paths))
    parent = at(document, tuple(way))
    parent[last] = data.draw(st.sampled_from(other_values(parent[last])))
    refusal = ""
    try:
        again = from_document(document, *KINDS)
        if isinstance(again, Ensemble | LinearModel | BaggedForest):
            again, predict = model_of_text(json.dumps(document))
            margins = np.zeros(5, np.float32) if getattr(again, "margin_column", "") else None
            predict(again, np.zeros((5, len(again.columns)), np.float32), margins)
    except FedappError as error:
        refusal = str(error)
    else:
        assert bits(from_text(to_text(again), *KINDS)) == bits(again)
    assert "Error(" not in refusal  # a sentence for each


@examples(max_examples=30)
@given(RNGS, st.data())
def test_no_field_is_missing_or_unknown(rng, data):
    model = random_model(rng)
    document = json.loads(to_text(model))
    defaults = {each.name for each in fields(model) if each.default is not MISSING}
    name = data.draw(st.sampled_from(sorted(document.keys() - defaults)))
    less = {field: value for field, value in document.items() if field != name}
    rule = "another: model must have "
    with pytest.raises(DataError, match=rf"{rule}(no other fields, got .*)?{name}$"):
        from_document(less, *KINDS)
    with pytest.raises(DataError, match=rf"{rule}no other fields, got \['more'\]"):
        from_document({**document, "more": 1}, *KINDS)


@dataclass(frozen=True, slots=True)
class Declared:
    """One field of each rule."""

    KIND = "declared"
    sizes: Annotated[npt.NDArray[np.uint8], "n_sizes", "< 9"]
    ratio: Annotated[float, "> 0", "<= 1"] = 1.0

    @property
    def n_sizes(self):
        return 2


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("ratio", 0, "ratio must be > 0, got 0"),
        ("ratio", 1.5, "ratio must be <= 1, got 1.5"),
        ("ratio", True, "ratio must be finite, got True"),
        ("ratio", float("nan"), "ratio must be finite, got nan"),
        ("sizes", [1, 9], r"sizes must be < 9, got \[1, 9\]"),
        ("sizes", [1, -1], r"sizes must be whole numbers >= 0 of uint8, got \[1, -1\]"),
        ("sizes", [1, 256], r"sizes must be whole numbers >= 0 of uint8, got \[1, 256\]"),
        ("sizes", [1], r"sizes must be of shape \(2,\), got \(1,\)"),
    ],
)
def test_a_value_beyond_what_is_declared_is_refused(field, value, rule):
    read = form_of(Declared).read
    assert read({"kind": "declared", "sizes": [0, 8]}, "").sizes.tolist() == [0, 8]
    with pytest.raises(ValueError, match=f"^{rule}$"):
        read({"kind": "declared", "sizes": [0, 8], field: value}, "")


def test_a_type_without_a_form_is_refused_where_it_is_declared():
    with pytest.raises(TypeError, match=r"must be one that has a form, got <class 'set'>$"):
        form_of(set)
