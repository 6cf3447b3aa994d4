"""Rows scored over HTTP: as `fedapp predict` scores them, or a named refusal."""

import json
import logging
import re
import socket
import struct
import threading
from pathlib import Path

import numpy as np
import pyarrow.csv
import pytest
from starlette.applications import Starlette
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.errors import ConfigError
from fedapp.home import app_folder
from fedapp.process import versions
from fedapp.runs.local import run_local
from fedapp.runs.predict import warnings_on

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

from fedapp.serve.http import HANDLERS, Admission  # noqa: E402
from fedapp.serve.v2 import Answered, Asked, Tensor, routes  # noqa: E402
from tests.pages import blocks  # noqa: E402
from tests.serving import (  # noqa: E402
    SHORT,
    TOWNS,
    AppClient,
    Client,
    predicted,
    rows_of,
    serving,
)
from tests.tables import made_columns  # noqa: E402

PAGE = app_folder() / "docs" / "how-to" / "serve.md"
pytestmark = pytest.mark.usefixtures("own_folder")


FAR = r"column '{}': {} of {} values are far outside of the range that the model knows "
KINDS = {
    "fedavg-linear": {"fedavg_linear": {"rounds": 2}},
    "federated-forest": {
        "federated_forest": {"trees": 3, "master_keeps_model": True, "max_depth": 3},
        "allow_export": True,
    },
}


@pytest.mark.parametrize("strategy", KINDS)
def test_scores_are_those_that_predict_writes_and_far_values_are_known(strategy, table):
    run = fedapp.run(strategy, data=table, label="y", parties=2, **KINDS[strategy])
    missing = np.full((9, len(run.model.columns)), np.nan)
    assert warnings_on(run.model, [], missing) == []
    far = warnings_on(run.model, [], np.full_like(missing, -4e9))
    assert ["9 of 9 values are far outside" in text for text in far] == [True] * len(far)
    assert len(far) > 2
    client, rows = Client(run.path), rows_of(table)
    status, found = client.score({"rows": rows})
    assert (status, found["warnings"]) == (200, [])
    about = {name: found[name] for name in ("model", "version", "warnings")}
    assert client.score({"row": rows[3]}) == (200, about | found["rows"][3])
    for name, column in predicted(run, table).items():
        assert [row["scores"][name] for row in found["rows"]] == column
    assert [row["class"] for row in found["rows"]] == [str(one) for one in run.predict(table)]


def test_health_schema_and_openapi_describe_the_model(client):
    assert client.ask("GET", "/health")[1]["status"] == "ok"
    _, schema = client.ask("GET", "/schema")
    kinds = {column["name"]: column["kind"] for column in schema["columns"]}
    assert kinds == {
        **dict.fromkeys(("a", "b", "count"), "number"),
        "flag": "boolean",
        "day": "date",
        "town": "category",
    }
    status, scored = client.score({"row": schema["example"]})
    assert (status, scored["warnings"]) == (200, [])
    assert schema["columns"][-1]["categories"] == ["Bern", "Oslo", "Rome"]
    assert all(column["missing_allowed"] for column in schema["columns"])
    assert (schema["objective"], schema["classes"]) == ("binary:logistic", ["0", "1"])
    _, described = client.ask("GET", "/openapi.json")
    asked = described["paths"]["/score"]["post"]["requestBody"]["content"]["application/json"]
    one, several = (each["properties"] for each in asked["schema"]["oneOf"])
    assert one["row"]["required"] == several["rows"]["items"]["required"] == list(kinds)
    assert client.ask("GET", "/")[0] == 307  # to this document


@pytest.mark.parametrize(
    ("change", "error", "column"),
    [
        ({"twon": "Rome"}, "row 0 must have only columns of the model, got 'twon'; did", "twon"),
        ({"a": ...}, "row 0 must have all columns of the model (null: missing), lacks 'a'", "a"),
        ({"a": "1.5"}, "column 'a' must hold numbers, or null, got '1.5' in row 0", "a"),
        ({"a": True}, "column 'a' must hold numbers, or null, got true in row 0", "a"),
        ({"flag": 2}, "column 'flag' must hold yes or no, or null, got 2 in row 0", "flag"),
        ({"day": "1.2.2024"}, "column 'day' must hold dates, or null, got '1.2.2024' in", "day"),
        ({"a": 1e300}, "feature columns must be finite as float32, got 1 in 'a' inf", None),
        ({"a": 10**30}, "column 'a' must hold numbers below 2^63 or texts", "a"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused_by_name(client, table, change, error, column):
    row = {**rows_of(table)[0], **change}
    row = {name: value for name, value in row.items() if value is not ...}
    status, found = client.score({"row": row})
    assert status == 422
    assert found["error"].startswith(error)
    assert found.get("column") == column


def test_values_may_be_in_other_forms_and_an_unknown_category_counts_as_missing(client, table):
    row = {**rows_of(table)[0], "town": "\N{HOUSE BUILDING}", "a": 1, "count": 2, "flag": True}
    assert b"\\ud83c" in json.dumps(row).encode()  # a character in two halves
    status, found = client.score({"row": row})
    assert status == 200
    (warning,) = found["warnings"]
    assert warning.endswith("of 'town' are no category of the model, and count as missing")
    same = {**row, "town": None, "a": 1.0, "count": 2.0, "flag": 1}
    assert found["scores"] == client.score({"row": same})[1]["scores"]
    assert client.score({"rows": [row, same]})[0] == 200


def test_values_far_from_those_of_training_are_warned_of_everywhere(client, table):
    status, found = client.score({"row": {**rows_of(table)[0], "a": -4e4}})
    (warning,) = found["warnings"]
    assert status == 200
    known = r"\([-.0-9]+ to [-.0-9]+\), as -40000; see that units are the same"
    assert re.fullmatch(FAR.format("a", 1, 1) + known, warning)
    run, far = fedapp.load(client.path), table.with_name("far.csv")
    run.predict(table)  # warnings are errors
    frame = pyarrow.csv.read_csv(table)
    place = frame.column_names.index("b")
    pyarrow.csv.write_csv(frame.set_column(place, "b", [np.full(80, 4e4)]), far)
    with pytest.warns(UserWarning, match=FAR.format("b", 80, 80)):
        run.predict(far)
    words = ["predict", str(run.path), "--data", str(far), "--output", "far.parquet"]
    assert re.search("! column 'b': 80 of 80", CliRunner().invoke(cli, words).output)


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        *(("host", host, 200) for host in ("127.0.0.1", "localhost:8000", "[::1]:80", "LocalHost")),
        *(("host", host, 400) for host in ("localhost.evil.example:8000", "", "[::1")),
        ("origin", "http://localhost:8001", 403),
        ("origin", "http://localhost:8000", 200),
        ("content-type", "text/plain", 415),
    ],
)
def test_requests_for_other_hosts_pages_of_other_sites_and_forms_are_refused(
    client, table, header, value, status
):
    if header == "host":
        client.host = value.encode()
        assert client.ask("GET", "/openapi.json")[0] == status
    else:
        client.headers = {header.encode(): value.encode()}
    assert client.score({"row": rows_of(table)[0]})[0] == status


def test_the_command_says_which_other_names_are_answered(client, monkeypatch):
    apps = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **how: apps.append(app))
    words = ["--host", "127.0.0.7", "--port", "0", "--allow-host", "Scores.Bank.example"]
    assert CliRunner().invoke(cli, ["serve", str(client.path), *words]).exit_code == 0
    (client.app,) = apps
    for host, status in {"127.0.0.7:80": 200, "scores.bank.example": 200, "x": 400}.items():
        client.host = host.encode()
        assert client.ask("GET", "/health")[0] == status


def test_a_column_of_base_margins_belongs_to_every_row(write_table):
    path = write_table(n_rows=60, start=np.linspace(-1, 1, 60).round(2))
    run = fedapp.run("pax", data=path, label="y", base_margin="start", **SHORT)
    client = Client(run.path)
    _, schema = client.ask("GET", "/schema")
    assert schema["columns"][-1]["name"] == "start"
    _, found = client.score({"rows": rows_of(path)})
    expected = predicted(run, path)["probability_1"]
    assert [row["scores"]["probability_1"] for row in found["rows"]] == expected
    status, refused = client.score({"row": {**rows_of(path)[0], "start": None}})
    assert status == 422
    assert "base-margin column 'start' must be finite" in refused["error"]


def test_numbers_that_the_runs_schema_takes_for_missing_are_so(write_table):
    rng = np.random.default_rng(5)
    codes = np.where(rng.random(120) < 0.4, -9, rng.integers(0, 9, 120))
    path = write_table(n_rows=120, income=codes)
    Path("schema.toml").write_text('missing = ["-9"]\n')
    run = fedapp.run("pax", data=path, label="y", schema="schema.toml", **SHORT)
    _, found = Client(run.path).score({"rows": rows_of(path)})
    scores = [row["scores"]["probability_1"] for row in found["rows"]]
    assert (scores, found["warnings"]) == (predicted(run, path)["probability_1"], [])
    frame = pyarrow.csv.read_csv(path)
    assert np.array_equal(run.predict_proba(frame), run.predict_proba(path))


def test_what_is_missing_is_told_before_anything_is_served(monkeypatch):
    found = CliRunner().invoke(cli, ["serve", "nowhere"])
    assert str(found.exception).startswith("model must be a file of a run that has finished, got ")
    monkeypatch.setattr("fedapp.errors.find_spec", lambda name: None)
    found = CliRunner().invoke(cli, ["serve", "nowhere"])
    assert "pip install 'fedapp[serve]'" in str(found.exception)


@pytest.mark.skipif(not PAGE.is_file(), reason="a wheel has no documentation")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of uvicorn's own websockets
def test_the_page_asks_from_python(write_table, capsys):
    pytest.importorskip("httpx")
    (code,) = [text for kind, text in blocks(PAGE) if kind == "python"]
    texts = {"owner": ["yes", "no"], "town": TOWNS, "customer_since": ["2019-05-01", "2020-01-31"]}
    columns = {name: np.resize(values, 60) for name, values in texts.items()}
    numbers = {name: np.arange(60) for name in ("age", "income", "amount")}
    path = write_table(n_rows=60, a=None, b=None, **numbers, **columns)
    client = Client(fedapp.run("pax", data=path, label="y", **SHORT).path, most_rows=2)
    names = {}
    with serving(client.app) as address:
        code = code.replace("http://127.0.0.1:8000", address)
        exec(code, names)
        _, expected = client.score({"row": names["row"]})
        assert capsys.readouterr().out == f"{expected['scores']} {expected['class']}\n" * 2
        with pytest.raises(ValueError, match=r"^rows must be at most 2 in one request, got 3$"):
            exec(code.replace("[row, row]", "[row] * 3"), {})


@pytest.fixture(params=["h11", "httptools"])
def port(client, request):
    """Port of a server with one of uvicorn's two parsers, whose replies are of some megabytes."""
    pytest.importorskip(request.param)
    score, long = client.scorer.score, {"warnings": ["x" * 5_000_000]}
    client.scorer.score = lambda columns: (*score(columns)[:2], long)
    with serving(client.app, http=request.param) as address:
        yield int(address.rpartition(":")[2])


def begun(port, body, n_bytes):
    """A connection on which a request with this part of its body was sent."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: {n_bytes}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of uvicorn's own websockets
def test_a_slow_client_is_answered_408_and_its_connection_is_closed(port, monkeypatch):
    monkeypatch.setattr("fedapp.serve.http.BODY_SECONDS", 0.05)
    with begun(port, b'{"count"', 1000) as connection:
        received = b""
        while chunk := connection.recv(65536):  # until the server closes
            received += chunk
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in received.lower()
    assert b"body must arrive within 0.05 seconds, got 8 bytes by then" in received


@pytest.mark.by_default("h11-*", "httptools-in its body-*")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of uvicorn's own websockets
@pytest.mark.parametrize(
    ("when", "resets"),
    [("in its body", False), ("while it is scored", True), ("in the answer", True)],
)
def test_a_client_that_hangs_up_leaves_no_traceback(
    port, when, resets, table, client, monkeypatch, caplog
):
    body, score = json.dumps({"row": rows_of(table)[0]}).encode(), client.scorer.score
    scored, goes = threading.Event(), threading.Event()

    def watched(columns):
        scored.set()
        assert goes.wait(60)
        return score(columns)

    monkeypatch.setattr(client.scorer, "score", watched)
    connection = begun(port, body[:9] if when == "in its body" else body, len(body))
    if when != "in its body":
        assert scored.wait(60)
    if when == "in the answer":
        goes.set()
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
    if resets:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    goes.set()
    with begun(port, body, len(body)) as other:  # the server goes on
        assert other.recv(1000).startswith(b"HTTP/1.1 200 ")
    shown = [record for record in caplog.records if record.levelno > logging.INFO]
    assert not shown, [record.getMessage() for record in shown]


def test_a_model_whose_parts_are_at_the_parties_is_refused_with_what_can_be_done(settings):
    given = {"parties": 2, "federated_forest__trees": 2, "federated_forest__max_depth": 2}
    folder = run_local(settings(strategy="federated-forest", **given)).path
    error = CliRunner().invoke(cli, ["serve", str(folder)]).exception
    assert isinstance(error, ConfigError)
    rule = r"^model must be whole in the run's folder to be served, got one whose parts are at the "
    rule += (
        r"parties \(party-1 has the labels\): after fedapp federation activate RUN their fedapp "
    )
    assert re.match(rule + "serve --site scores rows", str(error))


# The Open Inference Protocol and `/score`

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
    status, reply = client.infer(client.scorer.name, body)
    assert status == 200
    scores = predicted(run, table)["probability_1"]
    assert reply == {
        "model_name": client.scorer.name,
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
        assert client.infer(client.scorer.name, {**body, "inputs": inputs}) == (200, reply)


def test_binary_data_are_those_of_json(client, table):
    rows, name = rows_of(table), client.scorer.name
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
    _, expected = client.infer(client.scorer.name, {"inputs": inputs_of(rows)})
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
        assert client.infer(client.scorer.name, *asked) == (200, expected), datatype


@pytest.mark.parametrize("label", ["y", "town"])
def test_an_additive_model_explains_its_scores_and_others_refuse(label, table):
    given = {**SHORT, "num_boost_round": 6, "pax": {"additive": True, "pairs": 2}}
    run = fedapp.run("pax", data=table, label=label, missing_label="drop", **given)
    rows = rows_of(table, label)
    status, found = Client(run.path).ask("POST", "/score?explain=1", {"rows": rows})
    assert status == 200, found
    margins = run.predict(table, output_margin=True)
    for row, margin in zip(found["rows"], margins, strict=True):
        if label == "y":
            row = {name: {"1": row[name]} for name in ("intercept", "contributions")}
        sums = [row["intercept"][k] + sum(of.values()) for k, of in row["contributions"].items()]
        assert np.allclose(sums, margin, atol=1e-5)
    assert any(" & " in name for of in row["contributions"].values() for name in of)
    assert "contributions" not in Client(run.path).score({"row": rows[0]})[1]
    deep = Client(fedapp.run("pax", data=table, label="y", parties=2, num_boost_round=2).path)
    status, found = deep.ask("POST", "/score?explain=1", {"row": rows_of(table)[0]})
    assert status == 422
    assert "explain must be left out for this model: every tree must split one" in found["error"]


@pytest.mark.parametrize("objective", ["multi:softprob", "reg:squarederror"])
def test_several_classes_and_regressions_are_served_as_well(made, trained_once, objective):
    run = made(objective=objective, n_rows=60, num_boost_round=1)
    folder, names = trained_once(run), "abcdef"
    client, columns = Client(folder.path), made_columns(objective, 60)
    values = np.array([columns[name] for name in names], object).T
    values[values != values] = None
    rows = [dict(zip(names, row, strict=True)) for row in values.tolist()]
    _, reply = client.infer(client.scorer.name, {"inputs": inputs_of(rows)})
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
    name, version = client.scorer.name, client.scorer.version
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
            for column in (*client.scorer.model.columns, client.scorer.margin)
            if column
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
    name = client.scorer.name
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
        (A, {"data": b"12345678" * 2}, "input 'a' must have as many values as shape [1], got 2"),
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
    status, reply = client.infer(client.scorer.name, *sent(inputs, False, **more))
    assert (status, reply.keys()) == (422, {"error"})
    assert error in reply["error"]


def test_the_length_of_the_json_must_fit_the_body(client, table):
    body = json.dumps({"inputs": inputs_of(rows_of(table)[:1])}).encode()
    rule = "Inference-Header-Content-Length must be a number of bytes within the body, got "
    for length in (len(body) + 1, -1, 10**12):
        status, reply = client.infer(client.scorer.name, body, length)
        assert (status, reply["error"]) == (422, f"{rule}{length}")
    _, reply = client.infer(client.scorer.name, body + b"123", len(body))
    assert reply["error"] == "binary data must be those of inputs, got 3 bytes more"


def test_rows_and_bytes_beyond_the_limits_are_refused(run, table):
    client, rows = Client(run.path, most_rows=5, most_bytes=9_000), rows_of(table)
    rule = "rows must be at most 5 in one request, got 6"
    assert client.score({"rows": rows[:6]}) == (413, {"error": rule})
    inputs = inputs_of(rows[:6])
    assert client.infer(client.scorer.name, {"inputs": inputs}) == (413, {"error": rule})
    rule = "body must have at most 9,000 bytes, got more"
    assert client.score(b" " * 9_001) == (413, {"error": rule})


def test_names_are_composed_as_those_of_the_model_are(write_table):
    run = fedapp.run("pax", data=write_table(n_rows=60, größe=range(60)), label="y", **SHORT)
    client, row = Client(run.path), {"a": 0.1, "b": 0.2, "gro\u0308ße": 3}
    _, expected = client.score({"row": {"a": 0.1, "b": 0.2, "größe": 3}})
    _, reply = client.infer(client.scorer.name, {"inputs": inputs_of([row])})
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
