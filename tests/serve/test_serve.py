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
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.errors import ConfigError
from fedapp.home import app_folder
from fedapp.runs.local import run_local
from fedapp.runs.predict import warnings_on

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

from tests.pages import blocks  # noqa: E402
from tests.serving import SHORT, TOWNS, Client, predicted, rows_of, serving  # noqa: E402

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
