"""What nobody honest sends ends in an answer or an error of fedapp's, by whatever field it differs.

Messages of recorded runs are changed by their declared forms: values that keep the form of the
field, so that they reach the handlers, and values at its edges.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedapp.errors import FedappError
from fedapp.messages.fields import Form, Message, OneOf, Range
from fedapp.messages.wire import Content, from_bytes, from_content, to_bytes
from fedapp.runs.predict import model_of_text
from tests.messages.declared import example, kinds
from tests.moments import RUNS, Listener, listen

# Fields that set how much work a run is: any value is honest.
WORK = {
    "epochs",
    "n_rounds",
    "trees",
    "key_bits",
    "channels",
    "round_id",
    "max_depth",
    "batch_rows",
}
KINDS = {kind.wire_name: kind for kind in kinds()}
PATIENT = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@st.composite
def other_values(draw: st.DrawFn, form: Any, value: Any) -> Any:
    """Another value of a field, most of them such as its form allows."""
    if isinstance(value, np.ndarray):
        return draw(other_arrays(form, value))
    if isinstance(value, bool):
        return not value
    if isinstance(form, OneOf):
        return draw(st.sampled_from(form.values))
    if isinstance(value, int | float):
        low, high = (form.low, form.high) if isinstance(form, Range) else (-(2**31), 2**31)
        near = [low, high, value - 1, value + 1, 0, 1, min(high, 1000)]
        return type(value)(draw(st.sampled_from(near)))
    if isinstance(value, str):
        return draw(st.sampled_from([value[:-1], f"{value}x", "", "../x", "0" * 16]))
    texts = list(value)
    return draw(st.sampled_from([[], texts[:-1], texts[::-1], texts * 2, [*texts, "new"]]))


@st.composite
def other_arrays(draw: st.DrawFn, form: Form, value: np.ndarray) -> np.ndarray:
    """An array with some values changed, or with other rows."""
    rows = np.arange(len(value))
    choices = [rows, rows, rows, rows[:-1], rows[:0], rows[::-1], np.repeat(rows, 2)]
    changed = np.ascontiguousarray(value[draw(st.sampled_from(choices))])
    info: Any = np.finfo(form.dtype) if form.dtype.kind == "f" else np.iinfo(form.dtype)
    low, high = (info.min if one is None else one for one in (form.low, form.high))
    high = info.max if form.high is None else form.high
    edges = [low, high, low + 1, 0, 1, min(high, 7), min(high, 2**31 - 1)]
    for _ in range(draw(st.integers(0, 3)) if changed.size else 0):
        place = draw(st.integers(0, changed.size - 1))
        edge = np.clip(draw(st.sampled_from(edges)), info.min, info.max)
        changed.flat[place] = np.asarray(edge).astype(form.dtype)
    return changed


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Listener]:
    folder = tmp_path_factory.mktemp("heard")
    return cache(lambda method: listen(folder, method))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("method", "n_cases"),
    [("pax", 40), ("secureboost", 40)]
    + [pytest.param(method, 2000, marks=pytest.mark.slow) for method in RUNS],
)
def test_changed_requests_and_letters_end_in_an_answer_or_a_named_error(
    heard: Callable[[str], Listener], tmp_path: Path, method: str, n_cases: int
) -> None:
    moments = heard(method).moments

    @examples(max_examples=n_cases, **PATIENT)
    @given(st.data())
    def change(data: st.DataObject) -> None:
        moment = data.draw(st.sampled_from(moments).map(lambda one: one), label="moment")
        names = [type(moment.request).wire_name, *(one.name for _, one in moment.letters)]
        forms = KINDS[name := data.draw(st.sampled_from(names))].forms
        fields = sorted(forms.keys() - WORK)
        if not fields:
            return
        field = data.draw(st.sampled_from(fields))
        form = forms[field][1]
        with suppress(FedappError):
            moment.answer(
                tmp_path, name, {field: lambda value: data.draw(other_values(form, value))}
            )

    change()


@examples(max_examples=200, **PATIENT)
@given(st.sampled_from(kinds()), st.data())
def test_changed_bytes_are_refused_or_give_another_message(
    kind: type[Message], data: st.DataObject
) -> None:
    values = example(kind)
    arrays = {name: one for name, one in values.items() if isinstance(one, np.ndarray)}
    scalars = {name: one for name, one in values.items() if name not in arrays}
    lists = {name: list(one) for name, one in scalars.items() if isinstance(one, tuple)}
    whole = bytearray(to_bytes(Content(kind.wire_name, scalars | lists, arrays)))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(FedappError):
        assert isinstance(from_content(kind, from_bytes(bytes(whole), "bank"), "bank"), kind)


EDGES = [None, True, "", "x", -1, 0, 1, 2, 2**31, 2**63, 10**30, 1e300, -0.5, [], {}, [[]] * 9]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@examples(max_examples=200, **PATIENT)
@given(data=st.data())
def test_a_changed_model_is_refused_or_predicts(
    heard: Callable[[str], Listener], data: st.DataObject
) -> None:
    document = json.loads(heard("pax").model)
    node: Any = document
    while True:
        places = sorted(node) if isinstance(node, dict) else range(len(node))
        place = data.draw(st.sampled_from(places))
        if not (isinstance(node[place], dict | list) and node[place]) or data.draw(st.booleans()):
            break
        node = node[place]
    node[place] = data.draw(st.sampled_from(EDGES))
    with suppress(FedappError):
        model, predict = model_of_text(json.dumps(document))
        predict(model, np.zeros((5, len(model.columns)), dtype=np.float32), None)
