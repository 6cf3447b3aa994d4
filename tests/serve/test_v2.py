"""The Open Inference Protocol and `/score`: the scores of `fedapp predict`, or a named refusal."""

import json
import struct

import numpy as np
import pytest

import fedapp
from fedapp.process import versions

pytest.importorskip("fastapi")

from starlette.applications import Starlette

from fedapp.serve.http import HANDLERS, Admission
from fedapp.serve.v2 import Answered, Asked, Tensor, routes
from tests.serving import SHORT, AppClient, Client, predicted, rows_of
from tests.tables import made_columns

pytestmark = pytest.mark.usefixtures("own_folder")

WIDTHS = [(kind, size) for kind in ("FP", "INT", "UINT") for size in (1, 2, 4, 8)]
DATATYPES = {"flag": "BOOL", "day": "BYTES", "town": "BYTES"}  # of others FP64
FORMS = {f"{kind}{8 * size}": f"<{kind[0].lower()}{size}" for kind, size in WIDTHS} | {"BOOL": "?"}


@pytest.fixture
def run(table, settings, trained_once):
    return fedapp.load(trained_once(settings(data=str(table), label="y", **SHORT)).path)


@pytest.fixture
def client(run):
    return Client(run.path, most_rows=80)


def inputs_of(rows, **changed):
    """Rows as inputs of the protocol."""
    return [
        {
            "name": name,
            "shape": [len(rows)],
            "datatype": DATATYPES.get(name, "FP64"),
            "data": [row[name] for row in rows],
            **changed,
        }
        for name in rows[0]
    ]


def packed(datatype, values):
    if form := FORMS.get(datatype):
        return np.array([np.nan if one is None else one for one in values], form).tobytes()
    texts = [(text or "").encode() for text in values]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def sent(inputs, is_binary=True, /, **more):
    """The body of a request, and the length of its JSON where values are binary."""
    inputs, tail = [dict(each) for each in inputs], b""
    for each in inputs:
        values = each.get("data")
        if is_binary or isinstance(values, bytes):
            del each["data"]
            binary = values if isinstance(values, bytes) else packed(each["datatype"], values)
            each["parameters"] = {"binary_data_size": len(binary)}
            tail += binary
    head = json.dumps({"inputs": inputs, **more}).encode()
    return head + tail, len(head) if tail else None


def test_infer_has_the_scores_and_classes_that_predict_writes(client, run, table):
    body = {"id": "x1", "inputs": inputs_of(rows_of(table))}
    status, reply = client.infer(client.scorer.run, body)
    assert status == 200
    scores = predicted(run, table)["probability_1"]
    assert reply == {
        "model_name": client.scorer.run,
        "model_version": client.scorer.version,
        "id": "x1",
        "parameters": {"warnings": "[]"},
        "outputs": [
            {"name": "probability_1", "shape": [80], "datatype": "FP32", "data": scores},
            {
                "name": "class",
                "shape": [80],
                "datatype": "BYTES",
                "data": [str(one) for one in run.predict(table)],
            },
        ],
    }
    for nested in (lambda data: [[value] for value in data], list):
        inputs = [
            {**each, "shape": [80, 1], "data": nested(each["data"])} for each in body["inputs"]
        ]
        assert client.infer(client.scorer.run, {**body, "inputs": inputs}) == (200, reply)


def test_binary_data_are_those_of_json(client, table):
    rows, name = rows_of(table), client.scorer.run
    inputs = inputs_of([{**row, "flag": bool(row["flag"])} for row in rows])  # BOOL has no null
    _, expected = client.infer(name, {"inputs": inputs})
    assert client.infer(name, *sent(inputs)) == (200, expected)
    outputs = [{"name": "class", "parameters": {"binary_data": False}}, {"name": "probability_1"}]
    asked = sent(inputs, parameters={"binary_data_output": True}, outputs=outputs)
    status, reply = client.infer(name, *asked)
    assert status == 200
    scores, classes = expected["outputs"]
    _, reply_json = client.infer(name, {"inputs": inputs, "outputs": [{"name": "class"}]})
    assert reply_json["outputs"] == [classes]
    binary = packed("FP32", scores["data"])
    assert reply.endswith(binary)
    size = {"parameters": {"binary_data_size": len(binary)}}
    outputs = json.loads(reply[: -len(binary)])["outputs"]
    assert outputs == [classes, {"name": scores["name"], "shape": [80], "datatype": "FP32", **size}]


@pytest.mark.parametrize("is_binary", [False, True])
def test_numbers_may_be_of_any_type_and_booleans_words(client, table, is_binary):
    whole = {"a": 1.0, "b": 0.0, "count": 2.0, "flag": True, "day": "2024-01-31", "town": "Oslo"}
    rows = [{name: whole[name] for name in rows_of(table)[0]}, {**rows_of(table)[0], **whole}]
    _, expected = client.infer(client.scorer.run, {"inputs": inputs_of(rows)})
    numbers = ("FP16", "FP32", "INT8", "INT16", "INT64", "UINT8", "UINT16", "UINT64")
    flags = {"BYTES": ["yes", "TRUE"], "BOOL": [True if is_binary else "y", True], "INT32": [1, 1]}
    for datatype in (*numbers, *flags):
        inputs = inputs_of(rows)
        for each in inputs:
            if each["datatype"] == "FP64" and datatype in numbers:
                values = map(int, each["data"]) if "INT" in datatype else each["data"]
                each.update(datatype=datatype, data=list(values))
            elif each["name"] == "flag" and datatype in flags:
                each.update(datatype=datatype, data=flags[datatype])
        asked = sent(inputs, is_binary)
        assert client.infer(client.scorer.run, *asked) == (200, expected), datatype


@pytest.mark.parametrize("objective", ["multi:softprob", "reg:squarederror"])
def test_several_classes_and_regressions_are_served_as_well(made, trained_once, objective):
    run = made(objective=objective, n_rows=60, num_boost_round=1)
    folder, names = trained_once(run), "abcdef"
    client, columns = Client(folder.path), made_columns(objective, 60)
    values = np.array([columns[name] for name in names], object).T
    values[values != values] = None
    rows = [dict(zip(names, row, strict=True)) for row in values.tolist()]
    _, reply = client.infer(client.scorer.run, {"inputs": inputs_of(rows)})
    outputs = {one["name"]: one["data"] for one in reply["outputs"]}
    assert ("class" in outputs) == (objective == "multi:softprob")
    classes = outputs.pop("class", None)
    assert outputs == predicted(folder, run.data)
    _, reply = client.score({"rows": rows})
    assert [row.get("class") for row in reply["rows"]] == (classes or [None] * len(rows))
    assert [row["scores"] for row in reply["rows"]] == [
        dict(zip(outputs, each, strict=True)) for each in zip(*outputs.values(), strict=True)
    ]


def test_the_server_and_the_model_are_described(client):
    name, version = client.scorer.run, client.scorer.version
    about = {"name": "fedapp", "version": versions()["fedapp"]}
    assert client.ask("GET", "/v2") == (200, {**about, "extensions": ["binary_tensor_data"]})
    assert client.ask("GET", "/v2/health/live") == (200, {"live": True})
    assert client.ask("GET", "/v2/health/ready") == (200, {"ready": True})
    for path in (f"/v2/models/{name}", f"/v2/models/{name}/versions/{version}"):
        assert client.ask("GET", f"{path}/ready") == (200, {"name": name, "ready": True})
        status, model = client.ask("GET", path)
        assert status == 200
        assert model.pop("inputs") == [
            {"name": column, "datatype": DATATYPES.get(column, "FP64"), "shape": [-1]}
            for column in client.scorer.columns
        ]
        assert model == {
            "name": name,
            "versions": [version],
            "platform": "fedapp",
            "outputs": [
                {"name": "probability_1", "datatype": "FP32", "shape": [-1]},
                {"name": "class", "datatype": "BYTES", "shape": [-1]},
            ],
        }


def test_another_model_version_path_or_method_is_refused(client, run):
    name = client.scorer.run
    wrong = {"error": f"model name must be {name!r}, got 'x'"}
    assert client.ask("GET", "/v2/models/x") == (404, wrong)
    assert client.ask("GET", "/v2/models/x/ready") == (404, wrong)
    assert client.infer("x", {}) == (404, wrong)
    wrong = {"error": f"model version must be {client.scorer.version!r}, got '0'"}
    assert client.ask("GET", f"/v2/models/{name}/versions/0") == (404, wrong)
    assert client.ask("GET", "/v2/models") == (404, {"error": "Not Found"})
    assert client.ask("GET", "/score") == (405, {"error": "Method Not Allowed"})
    model = run.path / "model.json"
    model.write_text(model.read_text() + "\n")  # another content
    assert Client(run.path).scorer.version != client.scorer.version


A, FLAG, TOWN, ALL = 0, 3, 5, None  # places of inputs


@pytest.mark.parametrize(
    ("place", "change", "error"),
    [
        (A, {"name": "aa"}, "inputs must be those of the model, once each, got 'aa'"),
        (A, {"name": "b"}, "inputs must be those of the model, once each, got 'b'; did you mean"),
        (A, {"datatype": "BYTES"}, "input 'a' must be FP64, got BYTES"),
        (A, {"datatype": "INT64", "data": [0.5]}, "input 'a' must hold INT64 or null, got 0.5 in"),
        (A, {"datatype": "UINT8", "data": [-1]}, "input 'a' must hold UINT8 or null, got -1 "),
        (FLAG, {"data": ["maybe"]}, "column 'flag' must hold yes or no, or null, got 'maybe'"),
        (A, {"shape": [True]}, "input 'a' must have shape [n] or [n, 1], n >= 1, got [True]"),
        (A, {"shape": []}, "input 'a' must have shape [n] or [n, 1], n >= 1, got []"),
        (A, {"data": [True]}, "input 'a' must hold FP64 or null, got true in row 0"),
        (A, {"data": [10**400]}, "input 'a' must hold FP64 or null, got 1000000000"),
        (A, {"data": ...}, "input 'a' must have data or binary_data_size >= 0, got neither"),
        (A, {"parameters": {"binary_data_size": 8}}, "binary_data_size >= 0, got both"),
        (A, {"shape": [2], "data": [1, 2]}, "inputs must be all of the model's, of equally many"),
        (A, {"bytes": 1}, "inputs[0] must be an object with fields of name, datatype, shape, par"),
        (A, {"parameters": {"shared_memory_region": "r"}}, "got a field 'shared_memory_region'"),
        (A, {"data": b"1234567"}, "input 'a' must have FP64 as binary data, got 7 bytes that are"),
        (TOWN, {"data": b"\5\0\0\0Rome"}, "'town' must have BYTES as binary data, got 8 bytes"),
        (TOWN, {"data": b"\5\0\0"}, "'town' must have BYTES as binary data, got 3 bytes"),
        (TOWN, {"data": b"\1\0\0\0\xff"}, "'town' must have BYTES as binary data, got 5 bytes"),
        (TOWN, ..., "inputs must be all of the model's, of equally many rows, got {"),
        (ALL, {"outputs": [{"name": "clas"}]}, "outputs must be of probability_1, class, got 'cla"),
        (ALL, {"outputs": [{"name": "class", "parameters": {"classification": 2}}]}, "'classifica"),
        (ALL, {"parameters": {"timeout": 1}}, "must be an object with fields of purpose, way, bin"),
        (ALL, {"inputs": []}, "inputs must be all of the model's, of equally many rows, got {'a':"),
        (ALL, {"more": 1}, "request must be an object with fields of model_name, id, parameters, "),
        (ALL, {"model_name": "x"}, "model_name must be "),
        (ALL, {"outputs": [{}]}, "outputs[0]: name must be of type str, got none"),
        (
            ALL,
            {"inputs": [None]},
            "inputs[0] must be an object with fields of name, datatype, shape",
        ),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused(client, table, place, change, error):
    inputs, more = inputs_of(rows_of(table)[:1]), {}
    if change is ...:
        del inputs[place]
    elif place is ALL:
        more = change
    else:
        changed = {**inputs[place], **change}
        inputs[place] = {name: value for name, value in changed.items() if value is not ...}
    status, reply = client.infer(client.scorer.run, *sent(inputs, False, **more))
    assert (status, reply.keys()) == (422, {"error"})
    assert error in reply["error"]


def test_the_length_of_the_json_must_fit_the_body(client, table):
    body = json.dumps({"inputs": inputs_of(rows_of(table)[:1])}).encode()
    rule = "Inference-Header-Content-Length must be a number of bytes within the body, got "
    for length in (len(body) + 1, -1, 10**12):
        status, reply = client.infer(client.scorer.run, body, length)
        assert (status, reply["error"]) == (422, f"{rule}{length}")
    _, reply = client.infer(client.scorer.run, body + b"123", len(body))
    assert reply["error"] == "binary data must be those of inputs, got 3 bytes more"


def test_rows_and_bytes_beyond_the_limits_are_refused(run, table):
    client, rows = Client(run.path, most_rows=5, most_bytes=9_000), rows_of(table)
    rule = "rows must be at most 5 in one request, got 6"
    assert client.score({"rows": rows[:6]}) == (413, {"error": rule})
    inputs = inputs_of(rows[:6])
    assert client.infer(client.scorer.run, {"inputs": inputs}) == (413, {"error": rule})
    rule = "body must have at most 9,000 bytes, got more"
    assert client.score(b" " * 9_001) == (413, {"error": rule})


def test_names_are_composed_as_those_of_the_model_are(write_table):
    run = fedapp.run("pax", data=write_table(n_rows=60, größe=range(60)), label="y", **SHORT)
    client, row = Client(run.path), {"a": 0.1, "b": 0.2, "gro\u0308ße": 3}
    _, expected = client.score({"row": {"a": 0.1, "b": 0.2, "größe": 3}})
    _, reply = client.infer(client.scorer.run, {"inputs": inputs_of([row])})
    assert reply["outputs"][0]["data"] == [expected["scores"]["probability_1"]]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"{", "got no JSON"),
        (b"[" * 100_000, "got no JSON"),
        (rb'{"row": {"a": "\ud800"}}', "got half a character (a lone surrogate)"),
        (b'{"row": {"a": 1, "b": 2, "a": 1}}', "must have each name of an object once, got 'a'"),
        ({"row": {"größe": 1, "gro\u0308ße": 1}}, "each name of an object once, got 'größe' twice"),
        (b"[]", "body must be an object with one of row, rows, and maybe purpose and way, got l"),
        ({}, "and maybe purpose and way, got none"),
        ({"row": {}, "rows": []}, "and maybe purpose and way, got row, rows"),
        ({"row": {}, "purpose": 1}, "with one of row, rows, and maybe purpose"),
        ({"row": 1}, "row must be by column names, got others"),
        ({"rows": []}, "rows must be a list of one or more, got list"),
    ],
)
def test_a_question_of_people_that_breaks_a_rule_is_refused(client, body, error):
    status, reply = client.score(body)
    assert status == 422
    assert error in reply["error"]


def test_a_purpose_is_refused_by_a_whole_model_and_a_row_at_fault_is_named(client, table):
    row = rows_of(table)[0]
    rule = "purpose must be left out for a model that is whole, got 'care'"
    assert client.score({"row": row, "purpose": "care"}) == (422, {"error": rule})
    _, reply = client.score({"rows": [{**row, "a": value} for value in (None, 1, "x")]})
    rule = "column 'a' must hold numbers, or null, got 'x' in row 2"
    assert reply == {"error": rule, "column": "a", "row": 2}


class Fake:
    """A divided model, as a room above would serve it: rows by id, and facts of each answer."""

    name, version = "loans", "7"
    inputs = (Tensor("id", "BYTES"), Tensor("n", "INT64"), Tensor("x", "FP32"))
    outputs = (Tensor("probability_1", "FP32"), Tensor("class", "BYTES"))

    def __init__(self, n_inputs=3, reason="", admission=None):
        self.inputs, self.reason = self.inputs[:n_inputs], reason
        app = Starlette(routes=routes(self, 4, 10_000, admission), exception_handlers=HANDLERS)
        self.client, self.asked = AppClient(app), Asked({})

    async def ready(self):
        return self.reason

    async def answer(self, asked):
        self.asked = asked
        n_rows = len(asked.columns["id"])
        facts = {"parties": ["bank", "shop"], "way": "interactive", "age_seconds": 0.5}
        scores = {"probability_1": np.full(n_rows, 0.1, np.float32)}
        return Answered(scores, ["0"] * n_rows, facts)


def test_a_model_by_id_answers_with_its_facts():
    fake = Fake(1)
    score = float(np.float32(0.1))
    facts = {"parties": ["bank", "shop"], "way": "interactive", "age_seconds": 0.5}
    one = {"scores": {"probability_1": score}, "class": "0"}
    about = {"model": "loans", "version": "7"}
    for body in ({"id": "c1"}, {"row": {"id": "c1"}}):
        assert fake.client.score({**body, "purpose": "care"}) == (200, {**about, **one, **facts})
        assert fake.asked == Asked({"id": ["c1"]}, "care")
    _, reply = fake.client.score({"ids": ["c1", "c2"]})
    assert reply == {**about, "rows": [one, one], **facts}
    status, reply = fake.client.score({"ids": ["c1", 2]})
    assert (status, reply["error"]) == (422, "id must hold BYTES or null, got 2 in row 1")
    inputs = [{"name": "id", "shape": [1], "datatype": "BYTES", "data": ["c1"]}]
    body = {"id": "q", "parameters": {"purpose": "care"}, "inputs": inputs}
    _, reply = fake.client.infer("loans", body)
    assert fake.asked == Asked({"id": ["c1"]}, "care", request="q")
    assert reply["parameters"] == facts | {"parties": '["bank", "shop"]'}


@pytest.mark.parametrize("is_binary", [False, True])
def test_values_have_the_precision_of_their_datatype(is_binary):
    fake = Fake()
    columns = {"id": ["c1", "c2"], "n": [2**62 + 1, -1], "x": [0.1, None]}

    def asked(columns):
        inputs = [
            {"name": name, "datatype": kind, "shape": [2], "data": columns[name]}
            for name, kind in (("id", "BYTES"), ("n", "INT64"), ("x", "FP32"))
        ]
        return fake.client.infer("loans", *sent(inputs, is_binary))

    assert asked(columns)[0] == 200
    assert fake.asked.columns == {**columns, "x": [float(np.float32(0.1)), None]}
    if not is_binary:
        rule = "input 'n' must hold INT64 or null, got 9223372036854775808 in row 0"
        assert asked({**columns, "n": [2**63, 1]}) == (422, {"error": rule})
        rule = "input 'x' must hold FP32 or null, got 1e+300 in row 1"
        assert asked({**columns, "x": [0.5, 1e300]}) == (422, {"error": rule})


def test_a_model_that_cannot_answer_yet_says_why():
    client = Fake(reason="bank has not answered").client
    why = {"ready": False, "error": "bank has not answered"}
    assert client.ask("GET", "/v2/health/ready") == (503, why)
    assert client.ask("GET", "/v2/models/loans/ready") == (503, {"name": "loans", **why})
    assert client.ask("GET", "/v2/health/live")[0] == 200


def test_requests_beyond_those_admitted_at_once_are_refused():
    admission = Admission(1)
    client = Fake(1, admission=admission).client
    with admission:
        rule = "requests must be <= 1 at once, got more"
        assert client.score({"id": "c1"}) == (503, {"error": rule})
    assert client.score({"id": "c1"})[0] == 200
    assert client.score({"id": 1})[0] == 422
    assert admission.n_requests == 0
