"""What nobody honest sends ends in an answer or an error of fedapp's, by whatever field it differs.

Messages of recorded runs are changed by their declared forms: values that keep the form of the
field, so that they reach the handlers, and values at its edges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedapp.client_app import SiteApp
from fedapp.errors import FedappError
from fedapp.home import home
from fedapp.messages.fields import Form, OneOf, Range
from fedapp.messages.wire import (
    REFUSED,
    Content,
    from_bytes,
    from_content,
    from_records,
    to_bytes,
    to_records,
)
from fedapp.runs.local import run_local
from fedapp.runs.predict import model_of_text
from fedapp.site.answer import ON_DISK
from fedapp.site.database import DATABASE
from fedapp.site.log import HEAD, LOG
from tests.messages.declared import example, kinds
from tests.moments import RUNS, listen
from tests.network import run

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
SMALL_KEY = {"secureboost__key_bits": 512, "secureboost__insecure_small_key": True}
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
def heard(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heard")
    return cache(lambda method: listen(folder, method))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("method", "n_cases"),
    [("pax", 40), ("secureboost", 40)]
    + [pytest.param(method, 2000, marks=pytest.mark.slow) for method in RUNS],
)
def test_changed_requests_and_letters_end_in_an_answer_or_a_named_error(
    heard, tmp_path, method, n_cases
):
    moments = heard(method).moments

    @examples(max_examples=n_cases, **PATIENT)
    @given(st.data())
    def change(data: st.DataObject) -> None:
        moment = data.draw(st.sampled_from(moments).map(lambda one: one), label="moment")
        names = [type(moment.request).wire_name, *(one.name for _, one in moment.letters)]
        name = data.draw(st.sampled_from(names))
        # Requests and letters of several methods have one name.
        read = {one.name: [*one.whole, KINDS[one.name]][0] for _, one in moment.letters}
        forms = (type(moment.request) if name == names[0] else read[name]).forms
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
def test_changed_bytes_are_refused_or_give_another_message(kind, data):
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@examples(max_examples=200, **PATIENT)
@given(data=st.data())
def test_a_changed_model_is_refused_or_predicts(heard, data):
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


class Preceded(SiteApp):
    """Sites of which each message is preceded by a changed one.

    Parameters
    ----------
    rng : draws what is changed.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self._rng, self.n_refused, self.n_answered = rng, 0, 0

    def __call__(self, message: Message, context: Context) -> Message:
        envelope, content = from_records(message.content, "server")
        folder = home() / "sites" / str(context.node_config["name"])
        if envelope.step > 1 and (changed := self._changed(content)):
            before = contents_of(folder)
            other = Message(to_records(changed, envelope), 1, message.metadata.message_type)
            reply = super().__call__(other, context)
            if reply.has_error():
                assert reply.error.code == REFUSED, reply.error.reason
                assert contents_of(folder) == before, reply.error.reason
                *_, last = (folder / LOG).read_text().splitlines()
                assert json.loads(last)["event"] == "refused"
                self.n_refused += 1
            else:  # as an attacker who is answered: the honest run goes on without it
                self.n_answered += 1
                restore(folder, before)
        return super().__call__(message, context)

    def _changed(self, content: Content) -> Content | None:
        """The message with one field changed, as its form allows or not."""
        kind = next((one for one in KINDS.values() if one.wire_name == content.name), None)
        fields = {**content.scalars, **content.arrays}
        forms = {*kind.forms, "parcels"} if kind else set()
        names = [name for name in sorted(forms & fields.keys() - WORK) if np.size(fields[name])]
        if kind is None or not names:
            return None
        name = names[self._rng.integers(len(names))]
        value = fields[name]
        if name == "parcels":  # a letter that is changed on the way
            value = value.copy()
            value[self._rng.integers(len(value))] ^= 1
        elif isinstance(value, np.ndarray):
            ways = [value[:-1], value[::-1], np.repeat(value, 2, axis=0), np.zeros_like(value)]
            value = np.ascontiguousarray(ways[self._rng.integers(len(ways))])
        elif isinstance(value, bool):
            value = not value
        elif isinstance(value, int | float):
            value = type(value)(value + self._rng.integers(-2, 3))
        else:
            value = value[:-1]
        scalars, arrays = dict(content.scalars), dict(content.arrays)
        (arrays if name in arrays else scalars)[name] = value
        return Content(content.name, scalars, arrays)


def contents_of(folder: Path) -> dict[str, bytes]:
    """All files of a site but its locks, its register's journal, and its log."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.name not in ("lock", LOG, HEAD) and not path.name.startswith(DATABASE)
    }


def restore(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Give a site the files that it had."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        name = str(path.relative_to(folder))
        if path.name != "lock" and not path.name.startswith(DATABASE) and name not in contents:
            path.unlink()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    ON_DISK._journals.clear()


@pytest.mark.by_default("pax")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "more",
    [
        {"strategy": "pax"},
        {"strategy": "secureboost", **SMALL_KEY},
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in (
                {"strategy": "pax", "pax__aggregation": "secure", "parties": 3},
                {"strategy": "bagging"},
                {"strategy": "cyclic"},
                {"strategy": "fedavg-linear"},
                {"strategy": "fedxgbllr", "fedxgbllr__trees": 4, "fedxgbllr__rounds": 2},
                {"strategy": "federated-forest", "federated_forest__trees": 3},
            )
        ),
    ],
    ids=lambda more: "-".join(map(str, [more["strategy"], *list(more)[1:2]])),
)
def test_a_refused_message_changes_nothing_on_disk(settings, sites, write_table, more):
    """Each message to sites with tables of their own comes changed first, by three attackers."""
    ids = [f"c{number}" for number in range(60)]
    is_vertical = more["strategy"] in ("secureboost", "federated-forest")
    names = ("bank", "insurer", "shop")[: more.get("parties", 2)]
    nodes: list[dict[str, object]] = [
        {"name": name, "data": write_table(name, n_rows=60, seed=seed, id=ids), "id": "id"}
        for seed, name in enumerate(names)
    ]
    if is_vertical:
        nodes[1] |= {"data": write_table("shop", n_rows=60, seed=1, id=ids, y=None), "label": ""}
    for node in nodes:
        node["runs-per-day"] = 9
    given = {"parties": len(names), "num_boost_round": 2, **more}
    whole = run_local(settings(**given), sites(*nodes))
    for seed in range(3):
        app = Preceded(np.random.default_rng(seed))
        folder = run(settings(**given), sites(*nodes), app)
        assert app.n_refused >= 3
        if not is_vertical:
            model = (folder.path / "model.json").read_bytes()
            assert model == (whole.path / "model.json").read_bytes()
