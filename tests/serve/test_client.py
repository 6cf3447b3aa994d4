"""`fedapp.Scorer`: scores over a network, or within a deadline an error that says why."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

import fedapp
from tests.runs.test_packages import without
from tests.serving import SHORT, Client, predicted, rows_of, serving

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

pytestmark = [
    pytest.mark.usefixtures("own_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of uvicorn's own websockets
]

ONE = {"scores": {"prediction": 0.5}}
GOOD = {"model": "m", "version": "1", "rows": [ONE], "warnings": []}
FOREVER = 60.0  # longer than a test waits for


class Scripted(ThreadingHTTPServer):
    """Answers requests one by one as a script says, and counts connections.

    A step is a status and content, or what the server does instead: hang, die or drip.
    """

    daemon_threads = True

    def __init__(self, *script: Any) -> None:
        self.script, self.asked, self.n_connections = list(script), list[Any](), 0
        self.ends = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = "http://{}:{}".format(*self.server_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def setup(self) -> None:
        super().setup()
        self.server.n_connections += 1

    def log_message(self, *words: Any) -> None:
        pass

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, json.loads(content)))
        step = self.server.script.pop(0)
        if step == "hang":
            self.server.ends.wait(FOREVER)
        if step in ("hang", "die"):
            self.close_connection = True
            return
        status, content = (200, GOOD) if step == "drip" else step
        text = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if step == "drip":
            for byte in text:
                self.wfile.write(bytes([byte]))
                if self.server.ends.wait(0.02):
                    return
        else:
            self.wfile.write(text)


@contextmanager
def scripted(*script: Any) -> Iterator[Scripted]:
    with Scripted(*script) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.ends.set()
            server.shutdown()
            thread.join()


def error_of(address: str, row: Any = "c1", **given: Any) -> fedapp.FedappError:
    with fedapp.Scorer(address, **given) as scorer, pytest.raises(fedapp.FedappError) as refused:
        scorer.score(row)
    return refused.value


@pytest.fixture
def run(table, settings, trained_once) -> fedapp.Run:
    return fedapp.load(trained_once(settings(data=str(table), label="y", **SHORT)).path)


@pytest.mark.slow
def test_scores_are_those_that_predict_writes(run, table):
    rows, client = rows_of(table), Client(run.path)
    with serving(client.app) as address, fedapp.Scorer(address, deadline=FOREVER) as scorer:
        assert scorer.ready()
        scores = scorer.score_all(rows)
        assert [one.scores["probability_1"] for one in scores] == (
            predicted(run, table)["probability_1"]
        )
        assert [one.label for one in scores] == [str(one) for one in run.predict(table)]
        for row, expected in zip(rows[:3], scores, strict=False):
            missing = {name: math.nan if value is None else value for name, value in row.items()}
            for same in (row, missing):
                assert scorer.score(same) == expected
        assert expected.version == client.scorer.version
        plain = {**rows[0], "a": 0.5, "count": 2, "day": "2024-01-31"}
        typed = {**plain, "a": np.float32(0.5), "count": np.int64(2), "day": date(2024, 1, 31)}
        assert scorer.score(typed) == scorer.score(plain)
        warned = scorer.score({**plain, "town": "Paris"})
        assert warned.warnings == warned.raw["warnings"]
        assert "no category of the model" in warned.warnings[0]
        assert scorer.score_all([]) == []


@pytest.mark.slow
def test_a_row_at_fault_is_refused_with_the_servers_words(run, table):
    row = rows_of(table)[0]
    with serving(Client(run.path, most_rows=2).app) as address:
        with fedapp.Scorer(address, deadline=FOREVER) as scorer:
            for error, rows in {
                "column 'a' must hold numbers, or null, got 'x' in row 1": [row, {**row, "a": "x"}],
                "rows must be at most 2 in one request, got 3": [row] * 3,
            }.items():
                with pytest.raises(fedapp.DataError) as refused:
                    scorer.score_all(rows)
                assert str(refused.value) == f"{address}: {error}"
        refused = error_of(address.replace("127.0.0.1", "localhost.example@127.0.0.1"))
        assert isinstance(refused, fedapp.DataError)
        assert "localhost.example" not in str(refused)  # a user's name or password
        elsewhere = error_of(f"{address}/elsewhere")
    assert isinstance(elsewhere, fedapp.ScoringError)
    rule = "/elsewhere must answer with scores, got status 404: Not Found"
    assert str(elsewhere).endswith(rule)
    assert elsewhere.status == 404


def test_what_is_asked_and_answered_of_a_divided_model():
    facts = {"parties": ["bank"], "way": "eini", "age_seconds": 0.5, "request": 3}
    reply = {**GOOD, **facts, "rows": [{"scores": {"probability_1": 0.25}, "class": "0"}]}
    with scripted((200, reply)) as server, fedapp.Scorer(server.address) as scorer:
        score = scorer.score("c1", purpose="care")
    assert server.asked == [("/score", {"ids": ["c1"], "purpose": "care"})]
    assert (score.scores, score.label, score.version) == ({"probability_1": 0.25}, "0", "1")
    assert (score.parties, score.way, score.age_seconds) == (["bank"], "eini", 0.5)
    assert (score.request, score.warnings) == (3, [])
    assert score.raw["class"] == "0"


@pytest.mark.by_default("failure0", "die")
@pytest.mark.parametrize("failure", [(503, {"error": "busy"}), (502, "<html>"), (504, ""), "die"])
def test_a_failure_that_may_pass_is_retried(failure):
    with scripted(failure, failure, (200, GOOD)) as server:
        with fedapp.Scorer(server.address, deadline=FOREVER) as scorer:
            assert scorer.score("c1").scores == ONE["scores"]
        assert len(server.asked) == 3


@pytest.mark.slow
def test_retries_end():
    with scripted(*[(503, {"error": "busy"})] * 2) as server:
        error = error_of(server.address, retries=1, deadline=FOREVER)
    assert isinstance(error, fedapp.ScoringError)
    assert error.status == 503
    assert str(error) == f"{server.address} must answer with scores, got status 503: busy"
    with scripted(*["die"] * 2) as server:
        error = error_of(server.address, retries=1, deadline=FOREVER)
    assert error.status == 0
    rule = f"{server.address} must answer with scores, got Server disconnected"
    assert str(error).startswith(rule)
    refused = error_of(server.address, deadline=FOREVER)  # nobody listens any more
    assert "must answer with scores, got [Errno 111] Connection refused" in str(refused)


@pytest.mark.parametrize("status", [400, 404, 422, 500])
def test_other_failures_are_not_retried(status):
    with scripted((status, {"error": "no"})) as server:
        error = error_of(server.address, deadline=FOREVER)
        assert len(server.asked) == 1
    assert isinstance(error, fedapp.DataError if status == 422 else fedapp.ScoringError)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["hang", "drip"])
def test_a_server_that_does_not_end_its_reply_is_left_at_the_deadline(step):
    started = time.monotonic()
    with scripted(step) as server:
        error = error_of(server.address, deadline=0.2)
    assert time.monotonic() - started < FOREVER / 2
    got = "no reply within deadline=0.2 seconds"
    assert str(error) == f"{server.address} must answer with scores, got {got}"


@pytest.mark.slow
def test_one_deadline_is_for_all_retries():
    with scripted((503, {"error": "busy"}), "hang") as server:
        error = error_of(server.address, deadline=1.5)
        assert len(server.asked) == 2
    assert str(error).endswith('deadline=1.5 seconds; before that: {"error": "busy"}')


@pytest.mark.parametrize(
    "content",
    [
        "<html>",
        "",
        "[]",
        "1",
        {"rows": []},
        {"rows": [{}]},
        {"rows": [1]},
        {"rows": [ONE] * 2},
        {"version": "1", "rows": [{"scores": 1}]},
    ],
)
def test_a_reply_without_scores_is_refused(content):
    with scripted((200, content)) as server:
        error = error_of(server.address, deadline=FOREVER)
    assert isinstance(error, fedapp.ScoringError)
    assert str(error).startswith(f"{server.address} must answer with scores, got status 200: ")


@pytest.mark.slow
def test_a_connection_stays_open():
    with scripted(*[(200, GOOD)] * 5) as server, fedapp.Scorer(server.address) as scorer:
        for _ in range(5):
            scorer.score("c1")
        assert server.n_connections == 1


def test_a_server_that_is_away_is_not_ready():
    with scripted() as server:
        pass
    with fedapp.Scorer(server.address) as scorer:
        assert not scorer.ready()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"url": "127.0.0.1:8000"}, "url must begin with http:// or https://, got 127.0.0.1:8000"),
        ({"url": "http://[::1"}, r"url must be an address, got http://\[::1: "),
        ({"url": "x://u:secret@h"}, "url must begin with http:// or https://, got x://h"),
        ({"deadline": 0}, "deadline must be > 0 and <= 86400 seconds, got 0"),
        ({"deadline": math.nan}, "deadline must be > 0 and <= 86400 seconds, got nan"),
        ({"retries": -1}, "retries must be >= 0, got -1"),
    ],
)
def test_a_setting_that_breaks_its_rule_is_refused(given, error):
    with pytest.raises(fedapp.ConfigError, match=f"^{error}"):
        fedapp.Scorer(**{"url": "http://127.0.0.1:8000", **given})


@pytest.mark.parametrize("rows", ["c1", {"a": 1}, ["c1", {"a": 1}]])
def test_rows_of_no_list_or_of_two_kinds_are_refused(rows):
    rule = "^rows must be a list of ids, or of rows by column names, got others$"
    scorer = fedapp.Scorer("http://127.0.0.1:8000")
    with scorer, pytest.raises(fedapp.ConfigError, match=rule):
        scorer.score_all(rows)


@pytest.mark.parametrize("value", [math.inf, object(), b"1"])
def test_a_value_that_json_does_not_have_is_refused(value):
    rule = "^rows must hold numbers, texts and dates, got: "
    scorer = fedapp.Scorer("http://127.0.0.1:8000")
    with scorer, pytest.raises(fedapp.DataError, match=rule):
        scorer.score({"a": value})


def test_without_httpx_it_says_what_to_install():
    ended = without("httpx", "import fedapp\nfedapp.Scorer('http://127.0.0.1')\n")
    rule = "httpx must be installed for fedapp.Scorer (pip install 'fedapp[serve]'), got none"
    assert rule in ended.stderr
