"""A document is read back as it was written, or not at all; for every kind of model."""

import json
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pytest

from fedapp.errors import DataError, FedappError
from fedapp.home import home
from fedapp.records.document import form_of, from_document, from_text, to_text
from fedapp.runs.predict import model_of_text, predict
from fedapp.site.store import PART_FILE
from fedapp.trees.divided import PARTS, DividedModel
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.linear import LinearModel
from fedapp.trees.losses import LossParameters
from fedapp.trees.model import Ensemble
from fedapp.trees.stacked import StackedModel
from tests.tables import made_columns

WHOLE = Ensemble, BaggedForest, StackedModel, LinearModel, DividedModel
KINDS = (*WHOLE, *PARTS)
RUNS = {
    "pax": {},
    "horizontal-forest": {"horizontal_forest__trees": 2},
    "fedavg-linear": {"fedavg_linear__rounds": 1},
    "fedxgbllr": {f"fedxgbllr__{name}": 4 for name in ("trees", "rounds", "epochs")},
    "secureboost": {"allow_export": False},
    "federated-forest": {
        "parties": 2,
        "federated_forest__trees": 2,
        "federated_forest__key_bits": 512,
        "federated_forest__insecure_small_key": True,
    },
}
by_run = pytest.mark.parametrize("strategy", RUNS)
WITHOUT_TORCH = pytest.mark.by_default(*(RUNS.keys() - {"fedxgbllr"}))


@pytest.fixture
def models(made, trained_once):
    """``models(strategy)``: the model of a run on numbers and categories, and its parts."""

    def read(strategy):
        columns = made_columns("binary:logistic", 120)
        columns = {"g": ["red", "blue", "green", ""] * 30, **columns}
        given = {"num_boost_round": 2, **RUNS[strategy]}
        run = trained_once(made(strategy, "auto", columns=columns, **given))
        paths = [run.path / "model.json", *sorted(home().glob(f"sites/*/*/{PART_FILE}"))]
        documents = [json.loads(path.read_text()) for path in paths]
        for document in documents:
            document.pop("salt", "")  # of a part, beside the document
        return [from_document(document, *KINDS) for document in documents]

    return read


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


def edges(dtype, shape):
    info = np.finfo(dtype)
    numbers = [0, -0.0, 0.1, info.max, info.min, info.smallest_subnormal, 1 / 3]
    return np.resize(np.array(numbers, dtype), shape)


def with_odd_values(model):
    """A model of odd names and numbers, and without a default among fields that any may have."""
    odd = {"margin_column": "m", "parameters": LossParameters(2.5, 0.7, 1.3), "threshold": 0.1}
    given = {each.name: odd[each.name] for each in fields(model) if each.name in odd}
    if hasattr(model, "columns"):
        given["columns"] = tuple(f'{name}"\\\n\x9b\u2028\u00e9' for name in model.columns)
    if isinstance(model, Ensemble):
        given["trees"] = tuple(tree.copy() for tree in model.trees)
        for tree in given["trees"]:
            tree["gain"] = edges(np.float32, len(tree))
    if isinstance(model, LinearModel):
        given["bias"] = edges(np.float64, model.bias.shape)
        given["weights"] = edges(np.float64, model.weights.shape)
    return replace(model, **given)


@WITHOUT_TORCH
@by_run
def test_a_model_reads_back_to_the_same_bits(models, strategy):
    for given in models(strategy):
        for model in (given, with_odd_values(given)):
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


def changed(model, values_of, n_changes=25):
    """Documents of a model in which one value is another."""
    document = json.loads(to_text(model))
    paths = [path for path in places(document) if path not in ((), ("format",))]
    for seed in range(n_changes):
        rng, other = np.random.default_rng(seed), deepcopy(document)
        *way, last = paths[rng.integers(len(paths))]
        parent = at(other, tuple(way))
        values = values_of(parent[last])
        parent[last] = values[rng.integers(len(values))]
        yield other


@WITHOUT_TORCH
@by_run
def test_a_forbidden_value_is_refused_wherever_it_is(models, strategy):
    for model in models(strategy):
        for document in changed(model, lambda value: FORBIDDEN[type(value)]):
            rule = r"^model must be JSON of fedapp's format 3, got another: "
            with pytest.raises(DataError, match=rule):
                from_text(json.dumps(document), *KINDS)


def other_values(value):
    """Values of the same type, most of which do not fit the rest of a document."""
    if isinstance(value, list):
        return [value[1:], [*value, *value[-1:]], value[::-1]]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value + 1, value - 1, -value, 1000 * value]
    return ["", "other"] if isinstance(value, str) else [None, {}]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@WITHOUT_TORCH
@by_run
def test_what_does_not_fit_together_is_refused_and_the_rest_is_read_and_predicts(models, strategy):
    for model in models(strategy):
        for document in changed(model, other_values):
            refusal = ""
            try:
                again = from_document(document, *KINDS)
                if isinstance(again, Ensemble | LinearModel | BaggedForest):
                    again = model_of_text(json.dumps(document))
                    predict(again, np.zeros((5, len(again.columns)), np.float32))
            except FedappError as error:
                refusal = str(error)
            else:
                assert bits(from_text(to_text(again), *KINDS)) == bits(again)
            assert "Error(" not in refusal  # a sentence for each


@WITHOUT_TORCH
@by_run
def test_no_field_is_missing_or_unknown(models, strategy):
    for model in models(strategy):
        document = json.loads(to_text(model))
        defaults = {each.name for each in fields(model) if each.default is not MISSING}
        rule = "another: model must have "
        for name in document.keys() - defaults:
            less = {field: value for field, value in document.items() if field != name}
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
