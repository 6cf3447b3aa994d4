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
from hypothesis.extra.numpy import arrays

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

texts = st.text(st.characters(codec="utf-8"), max_size=4)
singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
doubles = st.floats(allow_nan=False, allow_infinity=False)
names = st.lists(texts, min_size=1, max_size=3).map(tuple)


def floats(shape, numbers=singles, dtype=np.float32):
    return arrays(dtype, shape, elements=numbers)


@st.composite
def lefts_of_trees(draw):
    """Left children of a tree that grew by splitting one leaf after the other."""
    lefts = [LEAF]
    for _ in range(draw(st.integers(0, 3))):
        leaves = [node for node, left in enumerate(lefts) if left == LEAF]
        lefts[draw(st.sampled_from(leaves))] = len(lefts)
        lefts += [LEAF, LEAF]
    return np.array(lefts, dtype=np.int32)


@st.composite
def trees(draw, n_columns, dtype, plain=False):
    lefts = draw(lefts_of_trees())
    tree = np.zeros(len(lefts), dtype=dtype)
    inner = lefts != LEAF
    for name in dtype.names:
        if dtype[name] == np.float32 and not (plain and name in ("gain", "hessian", "weight")):
            tree[name] = draw(floats(len(lefts)))
    if plain:  # packed: thresholds of splits, values of leaves
        tree["threshold"][~inner] = tree["value"][inner] = 0
    tree["left"] = lefts
    columns = arrays(np.int32, int(inner.sum()), elements=st.integers(0, n_columns - 1))
    tree["column"][inner] = draw(columns)
    tree["default_left"][inner] = draw(arrays(np.bool_, int(inner.sum())))
    return tree


@st.composite
def categories_of(draw, n_columns):
    if draw(st.booleans()):
        return ()
    column = st.none() | st.lists(texts, min_size=1, max_size=9, unique=True).map(tuple)
    return draw(st.tuples(*[column] * n_columns))


@st.composite
def sets_of(draw, widths):
    """Sets of splits by columns of these numbers of categories."""
    members = [draw(arrays(np.bool_, int(width))) for width in widths if width]
    return CategorySets.of(members)


def set_widths(grown, categories, n_columns):
    widths = category_counts(categories, n_columns)
    columns = [tree["column"][tree["left"] != LEAF] for tree in grown]
    return widths[np.concatenate([*columns, np.empty(0, np.int32)])]


@st.composite
def headers(draw):
    """Objective, classes, number of outputs, names, categories and kinds of columns."""
    objective = draw(st.sampled_from(["binary:logistic", "multi:softprob", "reg:squarederror"]))
    n_classes = {"binary:logistic": 2, "multi:softprob": 3}.get(objective, 0)
    classes = draw(st.tuples(*[texts] * n_classes))
    columns = draw(names)
    kinds = draw(st.just(()) | st.tuples(*[texts] * len(columns)))
    width = 3 if objective == "multi:softprob" else 1
    return objective, classes, width, columns, draw(categories_of(len(columns))), kinds


def base_scores(width):
    return floats(width, st.floats(0.125, 0.875, width=32))


@st.composite
def ensembles(draw):
    objective, classes, width, columns, categories, kinds = draw(headers())
    many = st.lists(trees(len(columns), NODE), min_size=width, max_size=width)
    grown = tuple(draw(many)) * draw(st.integers(0, 2))
    sets = draw(sets_of(set_widths(grown, categories, len(columns))))
    parameters = LossParameters(draw(st.floats(0.5, 9.0)), 0.7, draw(st.floats(1.1, 1.9)))
    more = draw(st.sampled_from([PLAIN, parameters])), draw(texts), kinds
    score = draw(base_scores(width))
    return Ensemble(objective, score, columns, classes, grown, sets, categories, *more).completed()


@st.composite
def forests(draw):
    objective, classes, width, columns, categories, kinds = draw(headers())
    grown = tuple(draw(st.lists(trees(len(columns), NODE, plain=True), max_size=2)))
    for tree in grown:
        tree["value"] = 0
    values = tuple(draw(floats((len(tree), width), doubles, np.float64)) for tree in grown)
    sets = draw(sets_of(set_widths(grown, categories, len(columns))))
    more = grown, values, sets, categories, kinds
    return BaggedForest(objective, columns, classes, *more).completed()


@st.composite
def stacked_models(draw):
    objective, classes, width, columns, categories, kinds = draw(headers())
    one = trees(len(columns), NODE, plain=True)
    counts = draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))
    parties = tuple(tuple(draw(one) for _ in range(n * width)) for n in counts)
    grown = [tree for party in parties for tree in party]
    sets = draw(sets_of(set_widths(grown, categories, len(columns))))
    head, channels = draw(st.sampled_from(["cnn", "cnn3", "fcnn"])), draw(st.integers(1, 2))
    shape = HeadShape.over(head, [len(party) for party in parties], width, channels)
    unit = np.float32(draw(st.floats(0.5, 9.0, width=32)))
    score, weights = draw(base_scores(width)), draw(floats(shape.n_weights, st.just(0.1)))
    model = objective, score, columns, classes, unit, parties, shape, weights
    return StackedModel(*model, sets, categories, kinds).completed()


@st.composite
def linear_models(draw):
    objective, classes, width, columns, categories, kinds = draw(headers())
    n_inputs = len(input_names(columns, categories))
    shapes = n_inputs, (n_inputs, width), width
    means, weights, bias = (draw(floats(shape, doubles, np.float64)) for shape in shapes)
    scales = draw(floats(n_inputs, st.floats(0.1, 1e9), np.float64))
    numbers = means, scales, weights, bias
    return LinearModel(objective, columns, classes, *numbers, categories, kinds)


divided = st.builds(DividedModel, texts, texts, texts, texts, names)


@st.composite
def part_fields(draw):
    columns = draw(names)
    categories, n = draw(categories_of(len(columns))), draw(st.integers(0, 3))
    of_records = draw(arrays(np.int64, n, elements=st.integers(0, len(columns) - 1)))
    widths = category_counts(categories, len(columns))[of_records]
    sets = draw(sets_of(widths))
    cuts = draw(floats(n)), draw(arrays(np.uint8, n, elements=st.integers(0, 1)))
    numbers = singles | st.just(float("nan"))
    return {
        "columns": columns,
        "active": "bank",
        "kinds": draw(st.just(()) | st.tuples(*[texts] * len(columns))),
        "categories": categories,
        "quantiles": draw(floats((len(columns), draw(st.integers(1, 3))), numbers)),
        "lookup": Lookup(of_records, *cuts, widths, sets.bits),
    }


@st.composite
def passive_parts(draw):
    given = draw(part_fields())
    n = given["lookup"].n_records
    under = draw(arrays(np.int64, n, elements=st.integers(-1, max(-1, 2 * n - 1))))
    numbers = draw(arrays(np.int64, n, elements=st.integers(0, 9)))
    return PassivePart(**given, nesting=Nesting(numbers, under))


def records_of(lefts, n_records):
    """Record ids of splits of one party, as many as it has."""
    records = np.full(len(lefts), -1, dtype=np.int64)
    inner = np.flatnonzero(lefts != LEAF)[:n_records]
    records[inner] = np.arange(len(inner))
    return records


@st.composite
def forest_parts(draw):
    given, lefts = draw(part_fields()), draw(st.lists(lefts_of_trees(), max_size=2))
    n = given["lookup"].n_records
    whole = [each.astype(np.int64) for each in lefts]
    return ForestPart(**given, trees=tuple(PartTree(one, records_of(one, n)) for one in whole))


@st.composite
def active_parts(draw):
    model = draw(st.one_of(ensembles(), forests()))
    others = {"bank": 0, "shop": len(model.columns)}  # all splits are another's
    return ActivePart(
        **draw(part_fields()),
        name="bank",
        digests={"shop": draw(st.binary(max_size=4))},
        model=model,
        records=tuple(records_of(tree["left"], len(tree)) for tree in model.trees),
        n_columns=others,
        threshold=draw(st.none() | doubles),
    )


models = {
    "boosted": ensembles(),
    "bagged": forests(),
    "stacked": stacked_models(),
    "linear": linear_models(),
    "divided": divided,
    "passive": passive_parts(),
    "in a forest": forest_parts(),
    "active": active_parts(),
}


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


MODELS = st.sampled_from(sorted(models)).flatmap(models.get)


@examples(max_examples=60)
@given(MODELS)
def test_a_model_reads_back_to_the_same_bits(model):
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
@given(MODELS, st.data())
def test_a_forbidden_value_is_refused_wherever_it_is(model, data):
    document = json.loads(to_text(model))
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
@given(MODELS, st.data())
def test_what_does_not_fit_together_is_refused_and_the_rest_is_read_and_predicts(model, data):
    document = json.loads(to_text(model))
    paths = [path for path in places(document) if path not in ((), ("format",))]
    *way, last = data.draw(st.sampled_from(paths))
    parent = at(document, tuple(way))
    parent[last] = data.draw(st.sampled_from(other_values(parent[last])))
    refusal = ""
    try:
        again = from_document(document, *KINDS)
        if isinstance(again, Ensemble | LinearModel | BaggedForest):
            again, predict = model_of_text(json.dumps(document))
            predict(again, np.zeros((5, len(again.columns)), np.float32), None)
    except FedappError as error:
        refusal = str(error)
    else:
        assert bits(from_text(to_text(again), *KINDS)) == bits(again)
    assert "Error(" not in refusal  # a sentence for each


@examples(max_examples=30)
@given(MODELS, st.data())
def test_no_field_is_missing_or_unknown(model, data):
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
