"""What a standing process answers and refuses, each by a request to sites that all tests share."""

import asyncio
import json
import os
import re
import shutil
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
parser = pytest.importorskip("prometheus_client.parser")

from starlette.responses import Response  # noqa: E402

from fedapp.commands.site import site_app  # noqa: E402
from fedapp.errors import ConfigError  # noqa: E402
from fedapp.home import home  # noqa: E402
from fedapp.serve import joint, peers  # noqa: E402
from fedapp.serve.http import MOST_REQUESTS  # noqa: E402
from fedapp.serve.joint import LIVE_SECONDS, ROWS_SECONDS  # noqa: E402
from fedapp.serve.standing import serve  # noqa: E402
from fedapp.serve.versions import Site  # noqa: E402
from fedapp.site import clock  # noqa: E402
from fedapp.site.certificates import own_certificate  # noqa: E402
from fedapp.site.log import LOG, Audit  # noqa: E402
from fedapp.site.settings import read_node_config  # noqa: E402
from fedapp.site.standing import current, folder_of  # noqa: E402
from fedapp.trees import cells as cells_of_trees  # noqa: E402
from simulations.bench.sites import SERVICE  # noqa: E402
from tests.serve.standing import (  # noqa: E402
    FEW,
    Threads,
    as_peer,
    close_cut_off,
    ids,
    logged,
    nightly,
    scored,
    sites_in,
    tables,
    until,
)

ASKED = {"rows": [0], "purpose": "", "request": ""}
TABLES = ("binary:logistic", 3)
TIMEOUT = re.compile(r"httpx.*timeout=([0-9.]+)")


@pytest.fixture(scope="module", autouse=True)
def _own_home(tmp_path_factory):
    """One for all tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(tmp_path_factory.mktemp("standing") / "home"))
        yield


@pytest.fixture(scope="module")
def threads(tmp_path_factory):
    """The bank, which has the labels, the insurer and the shop."""
    sites = sites_in(tmp_path_factory.mktemp("sites"), *TABLES)
    model = sites.train(**FEW)
    sites.activate(model)
    threads = Threads(sites)
    threads.model = model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedapp.serve.standing.FILES_SECONDS", 0.05)
        threads.start()
        yield threads
    threads.close()


@pytest.fixture
def configure(threads):
    """``configure(site, key=value)``: its node config for the rest of a test."""
    paths = {name: threads.sites.config(name) for name in threads.sites.names}
    before = {name: path.read_text() for name, path in paths.items()}
    yield lambda site, **keys: threads.sites.configure(
        site, {key.replace("_", "-"): value for key, value in keys.items()}
    )
    for name, path in paths.items():
        _replace(path, before[name])


def _replace(path, text):
    """Another file in its place, as a process compares files by their times."""
    written = path.with_suffix(".new")
    written.write_text(text)
    written.rename(path)


def live(threads, names, **more):
    """Scores by the other sites' answers, whatever they have sent ahead."""
    return threads.score(names, way="live", **more)


# A table of requests to the bank

LIMIT = " (standing-rows-per-second in the node config of insurer), got 5"
LEAST = "rows must be >= {} different ones (standing-least-rows of insurer), got {}"
PURPOSE = "insurer: purpose must be one of credit, fraud (standing-purposes of insurer), got "
PURPOSES = {"standing_purposes": "credit,fraud"}
AHEAD = "insurer: standing-nightly must be {} in the node config of insurer, got {}"
WITHDRAWN = "allow in the node config of {} must have standing, got it withdrawn"
WITHDRAWS = {"allow": "secureboost"}
LONG = "purpose and id of a request must have at most 80 characters, got more"
UNKNOWN = "id must be of a row that all parties had when they matched, got 1 unknown, such as "
UNKNOWN += '"nobody": fedapp federation activate --refresh'
NIGHT = 'body must be {"ids": [id, ...]} or {"all": true}, got another'


def score(body, error="", status=422, **configs):
    return configs, "/score", body, status if error else 200, error


def night(body, error="", status=422, **insurer):
    return {"insurer": insurer, "shop": NIGHTLY}, "/nightly", body, status if error else 200, error


NIGHTLY, NAMED = {"standing_nightly": "all"}, {"standing_nightly": "named"}
SLOW, FEW_ROWS = {"standing_rows_per_second": 2}, {"standing_least_rows": 4}
NINE = {"ids": [*range(9)]}
# By what it is: body, in which numbers are places of ids, error, status, node configs.
REQUESTS = {
    "rows a second": score(
        {"ids": [*range(5)]}, f"insurer: rows must be <= 2{LIMIT}", 429, insurer=SLOW
    ),
    "one row twice": score(
        {"ids": [0, 1, 2, 2]}, f"insurer: {LEAST.format(4, 3)}", insurer=FEW_ROWS
    ),
    "a purpose": score({"id": 0, "purpose": "fraud"}, insurer=PURPOSES),
    "another purpose": score(
        {"id": 0, "purpose": "frod"}, f"{PURPOSE}'frod'; did you mean fraud?", insurer=PURPOSES
    ),
    "no purpose": score({"id": 0, "purpose": ""}, f"{PURPOSE}''", insurer=PURPOSES),
    "a peer withdraws": score(
        {"id": 0}, f"insurer: {WITHDRAWN.format('insurer')}", 403, insurer=WITHDRAWS
    ),
    "the bank withdraws": score({"id": 0}, WITHDRAWN.format("bank"), 503, bank=WITHDRAWS),
    "nobody": score({"ids": ["nobody"]}, UNKNOWN),
    "a long purpose": score({"id": 0, "purpose": "x" * 81}, LONG),
    "another way": score({"id": 0, "way": "fast"}, "way must be live or nightly, got fast"),
    "to be explained": ({}, "/score?explain=1", {"id": 0}, 422, "explain must be left out for a d"),
    "all, of none": night({"all": True}, AHEAD.format("named or all", "none"), 403),
    "all, of named": night({"all": True}, AHEAD.format("all", "named"), 403, **NAMED),
    "some, of named": night(NINE, **NAMED),
    "all, of all": night({"all": True}, **NIGHTLY),
    "few of named": night(NINE, f"insurer: {LEAST.format(10, 9)}", **NAMED, standing_least_rows=10),
    "all are not few": night({"all": True}, **NIGHTLY, standing_least_rows=10**6),
    "a text": night({"ids": "c1"}, NIGHT),
    "all and some": night({"all": True, "ids": ["c1"]}, NIGHT),
}


@pytest.mark.parametrize(
    ("keys", "path", "body", "status", "error"), REQUESTS.values(), ids=REQUESTS
)
def test_a_request_is_answered_or_refused_with_a_line(
    threads, configure, keys, path, body, status, error
):
    def named(value):
        if isinstance(value, list):
            return list(map(named, value))
        return ids()[value] if type(value) is int else value

    for site, changed in keys.items():
        configure(site, **changed)
    asked = {key: named(value) if key in ("id", "ids") else value for key, value in body.items()}
    asked = {"way": "live", **asked} if path == "/score" else asked
    n_lines = len(logged("insurer"))
    reply = threads.client.post(path, json=asked)
    refusal = reply.json().get("error", "")
    assert (reply.status_code, refusal[: len(error) or None]) == (status, error)
    asks_nobody = bool(error) and not error.startswith("insurer: ")
    assert (len(logged("insurer")) == n_lines) is asks_nobody
    if error in ("", NIGHT, WITHDRAWN.format("bank")):
        return
    for site in ["bank"] if asks_nobody else ["bank", "insurer"]:
        line = logged(site)[-1]
        assert line["outcome"].startswith("refused: ")
        assert "nobody" not in json.dumps(line)
        assert len(line.get("purpose", "")) <= 80


@pytest.mark.parametrize(
    ("headers", "status", "rule"),
    [
        ({"host": "evil.example"}, 400, "host must be one of 127.0.0.1, ::1, localhost (--allow-"),
        ({"origin": "https://evil.example"}, 403, "origin must be that of host {host}, or left ou"),
        ({"content-type": "text/plain"}, 415, "content-type must be application/json, got 'text"),
        ({"origin": "http://{host}", "content-type": "Application/JSON; charset=utf-8"}, 200, ""),
    ],
)
def test_a_page_of_another_site_gets_no_score_and_sends_nothing(threads, headers, status, rule):
    host = threads.client.base_url.netloc.decode()
    given = {name: value.format(host=host) for name, value in headers.items()}
    n_lines = len(logged("insurer"))
    asked = json.dumps({"id": ids()[0], "way": "live"}).encode()
    for path, body in (("/score", asked), ("/nightly", b'{"all": 1}')):
        reply = threads.client.post(path, content=body, headers=given)
        assert reply.status_code == (status if status != 200 or "score" in path else 422)
        assert reply.json().get("error", "").startswith(rule.format(host=host))
    assert len(logged("insurer")) == n_lines + (status == 200)
    health = threads.client.get("/health", headers={"host": given.get("host", host)})
    assert health.status_code == (400 if status == 400 else 200)


# Who is answered


NOT_OF = "version must be one that {} answers for this certificate, its active party's ({}), got "
TEXTS = "got texts of more than 80 characters or none"
TOO_LONG = "body must have at most 2,000,000 bytes, got more"
NOT_NOW = "standing-nightly must be named or all in the node config of insurer, got none"


@pytest.mark.parametrize(
    ("asker", "asked", "path", "body", "version", "status", "error"),
    [
        ("bank", "insurer", "cells", ASKED, "", 200, ""),
        ("bank", "insurer", "ahead", ASKED, "", 403, NOT_NOW),
        ("shop", "insurer", "cells", ASKED, "", 409, NOT_OF),
        ("shop", "insurer", "ahead", ASKED, "", 409, NOT_OF),
        ("insurer", "bank", "cells", ASKED, "", 409, NOT_OF),
        ("bank", "insurer", "cells", ASKED, "another", 409, NOT_OF),
        ("bank", "insurer", "cells", b" " * 2_000_001, "", 413, TOO_LONG),
        ("bank", "insurer", "cells", ASKED | {"purpose": "x" * 81}, "", 422, TEXTS),
        ("bank", "insurer", "cells", ASKED | {"request": "x" * 81}, "", 422, TEXTS),
    ],
    ids=lambda value: str(value)[:20],
)
def test_only_the_party_with_the_labels_is_answered(
    threads, asker, asked, path, body, version, status, error
):
    """A version that is named is not the active one."""
    active = current("bank")[0] if asker == "bank" else "none"
    content = body if isinstance(body, bytes) else json.dumps(body)
    with as_peer(threads, asker, asked) as client:
        reply = client.post(f"/{path}/{version or current('bank')[0]}", content=content)
        assert reply.status_code == status
        assert client.get("/alive").text == ("" if active == "none" else active)
    if error:
        refusal = reply.json()["error"]
        assert error.format(asked, active) in refusal
        assert refusal.endswith(version)
        assert logged(asked)[-1]["outcome"].startswith(f"refused: {refusal[:40]}")


def test_malformed_requests_are_refused_each_with_a_line(threads, monkeypatch):
    monkeypatch.setattr("fedapp.serve.versions.LISTED", 10**6)
    n_rows, path = len(ids()), f"/cells/{current('bank')[0]}"
    rule = "rows must be 1 to 10000 numbers of rows"
    rows = ([n_rows], [-1], [0.5], ["0"], [True], [], [0] * 10_001, "0", None)
    bodies = [(json.dumps(ASKED | {"rows": one}).encode(), rule) for one in rows]
    texts = (b"", b"[]", b"\xff", b"[" * 10**5, b'{"rows": [0], "purpose": 1, "request": ""}')
    with as_peer(threads) as client:
        for body, rule in [*bodies, *((text, "") for text in texts)]:
            count = len(logged("insurer"))
            reply = client.post(path, content=body)
            assert reply.status_code == 422
            assert reply.json()["error"].startswith(rule)
            assert " must " in reply.json()["error"]
            (line,) = logged("insurer")[count:]
            assert line["outcome"].startswith("refused")


def test_a_stranger_gets_no_connection(threads, tmp_path):
    pair = own_certificate("bank")
    (tmp_path / "tls.pem").write_bytes(pair.secret + pair.public)
    for certificate in (tmp_path / "tls.pem", None):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if certificate:
            context.load_cert_chain(certificate)
        with pytest.raises(httpx.TransportError):
            httpx.get(
                f"https://127.0.0.1:{threads.sites.peer_ports['insurer']}/alive", verify=context
            )


def test_who_begins_no_handshake_is_cut_off(threads, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("fedapp.serve.standing.HANDSHAKE_SECONDS", 0.2)
        threads.restart("shop")
        with socket.create_connection(("127.0.0.1", threads.sites.peer_ports["shop"])) as stranger:
            stranger.settimeout(30)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    threads.restart("shop")
    assert live(threads, ids()[0])[0] == 200


def test_a_body_that_comes_after_the_site_has_withdrawn_is_not_answered(
    threads, configure, monkeypatch
):
    site, read, asked = threads.site["bank"], peers.read_body, threading.Event()
    context = site.context_to(site.versions[site.current].agreed.peers["insurer"].certificate)
    body = json.dumps(ASKED).encode()
    head = f"POST /cells/{current('bank')[0]} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}"

    async def noted(*given):
        asked.set()
        return await read(*given)

    monkeypatch.setattr(peers, "read_body", noted)
    with monkeypatch.context() as patch:  # so that only a request finds that the file has changed
        patch.setattr("fedapp.serve.standing.FILES_SECONDS", 3600.0)
        threads.restart("insurer")
    address = "127.0.0.1", threads.sites.peer_ports["insurer"]
    with socket.create_connection(address) as raw, context.wrap_socket(raw) as secure:
        secure.sendall(head.encode() + b"\r\n\r\n" + body[:5])
        assert asked.wait(30)
        configure("insurer", allow="secureboost")
        secure.sendall(body[5:])
        received = secure.recv(100)
    configure("insurer", allow="secureboost,standing")
    threads.restart("insurer")
    assert received.startswith(b"HTTP/1.1 403")


def test_the_passive_party_has_no_scores_and_says_who_has(threads, configure):
    url = threads.sites.url("insurer")
    reply = httpx.post(f"{url}/score", json={"id": "c1"})
    assert reply.status_code == 404
    assert "scores are at bank, which has the labels" in reply.json()["error"]
    health = httpx.get(f"{url}/health")
    about = health.json()
    assert (health.status_code, about["status"], about["parties"]) == (200, "ok", {})
    assert about["rows"] == len(ids("insurer"))
    for site in ("insurer", "bank"):
        configure(site, allow="secureboost")
        health = httpx.get(f"{threads.sites.url(site)}/health")
        assert (health.status_code, health.json()["status"]) == (503, WITHDRAWN.format(site))


def test_a_party_that_is_gone_is_named_until_it_answers(threads):
    site, name = threads.site["bank"], ids()[0]
    address = site.versions[site.current].agreed.peers["shop"].address
    for path in folder_of("bank").glob("*/cells.*"):
        path.unlink()
    threads.restart("bank")
    threads.stop("shop")
    try:
        status, reply = live(threads, name)
        assert (status, reply["error"][:25]) == (504, f"shop must answer at {address}"[:25])
        health = threads.client.get("/health")
        assert health.status_code == 503
        assert health.json()["parties"]["shop"].startswith(f"must answer at {address}, got: ")
        assert threads.client.get("/v2/health/ready").status_code in (400, 503)
    finally:
        threads.start("shop")
    assert live(threads, name)[0] == 200
    everybody = dict.fromkeys(("insurer", "shop"), "answers")
    assert threads.client.get("/health").json()["parties"] == everybody


# Node configs, tables and versions that change


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text(path.read_text()[:40]),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["gone", "half", "not UTF-8", "a folder"],
)
def test_a_node_config_that_cannot_be_read_permits_nothing_until_it_can(threads, spoil):
    path, name = threads.sites.config("insurer"), ids()[0]
    before, text = path.stat(), path.read_text()
    spoil(path)
    assert live(threads, name)[0] == 502
    outcome = "refused: node config of insurer must be readable, got a fault that its process logs"
    assert logged("insurer")[-1]["outcome"] == outcome
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert live(threads, name)[0] == 200


def test_a_node_config_is_read_again_though_it_stays_as_it_is(threads, monkeypatch):
    """Such as where the process had no file descriptor left."""
    path, name = threads.sites.config("insurer"), ids()[0]

    def fails(config):
        if config == path:
            raise OSError("too many open files")
        return read_node_config(config)

    with monkeypatch.context() as patch:
        patch.setattr("fedapp.serve.versions.read_node_config", fails)
        path.touch()
        assert live(threads, name)[0] == 502
    until(lambda: live(threads, name)[0] == 200)


def test_what_a_table_lacks_is_refused_and_not_named_to_others(threads):
    names, whole = ids(), tables(*TABLES)["insurer"]
    lacks = next(name for name in whole.column_names if name not in ("id", "kind"))
    others = [name != names[0] for name in whole["id"].to_pylist()]
    due = {
        422: (whole.filter(others), "rows must be in the table that the site has now, got 1 that"),
        502: (whole.drop_columns([lacks, "kind"]), "version does not answer: table must have the"),
    }
    try:
        for status, (table, rule) in due.items():
            threads.sites.write_table("insurer", table)
            until(lambda status=status: live(threads, names[0])[0] == status)
            _, reply = live(threads, names[0])
            assert reply["error"].startswith(f"insurer: {rule}")
            assert "kind" not in reply["error"]
            assert logged("insurer")[-1]["outcome"].startswith("refused: ")
            assert live(threads, names[1])[0] == (200 if status == 422 else 502)
    finally:
        threads.sites.write_table("insurer", whole)
        until(lambda: live(threads, names[0])[0] == 200)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"version": "", "before": ""}', "none: fedapp federation activate RUN begins one"),
        ('{"version": "', "unreadable file current: activate again"),
    ],
)
def test_without_an_active_version_there_are_no_scores(threads, text, fault):
    path, name = folder_of("bank") / "current", ids()[0]
    before = path.read_text()
    _replace(path, text)
    try:
        for _ in range(2):  # also after the process has looked at its files by itself
            due = 503, {"error": f"version must be active at bank, got {fault}"}
            assert live(threads, name) == due
            threads.follow("bank")
    finally:
        _replace(path, before)
    assert live(threads, name)[0] == 200


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({"standing_address": ""}, r"standing-address in the node config must be where the other"),
        ({}, r"port \d+ must be free at 127\.0\.0\.1, got: address already in use; standing-port"),
    ],
)
def test_a_process_that_cannot_be_reached_does_not_start(threads, configure, keys, rule):
    configure("shop", **keys)
    site, port = Site(threads.sites.config("shop")), threads.sites.ports["bank"]
    with pytest.raises(ConfigError, match=f"(?i)^{rule}"):
        asyncio.run(serve(site, "", port, asyncio.Event(), lambda _: None))


# What is disclosed


def test_a_score_says_how_it_came_about_and_neither_peers_nor_metrics_learn_an_id(threads):
    names = ids()[:5]

    def value(shown, name, **labels):
        families = parser.text_string_to_metric_families(shown)
        samples = (sample for family in families for sample in family.samples)
        return sum(s.value for s in samples if (s.name, s.labels) == (name, labels))

    before = threads.client.get("/metrics").text
    _, reply = live(threads, names, purpose="care")
    assert (reply["model"], reply["version"]) == (SERVICE, current("bank")[0])
    assert (reply["way"], reply["parties"]) == ("live", ["bank", "insurer", "shop"])
    assert logged("bank")[-1]["request"] == reply["request"]
    for site in ("insurer", "shop"):
        line = logged(site)[-1]
        assert (line["peer"], line["purpose"], line["rows"]) == ("bank", "care", [[0, 4]])
        assert line["request"] == reply["request"]
        assert not [name for name in names if f'"{name}"' in json.dumps(line)]
    text, rows = threads.client.get("/metrics").text, "fedapp_scored_rows_total"
    assert value(text, rows, way="live") - value(before, rows, way="live") == 5
    assert value(text, "fedapp_peer_up", peer="insurer") == 1
    assert value(text, "fedapp_score_seconds_count") > value(before, "fedapp_score_seconds_count")
    assert not [name for name in names if f'"{name}"' in text]


def test_a_site_sees_beforehand_what_its_cells_show(threads, monkeypatch):
    sent, read = [], joint.Joint._read
    with monkeypatch.context() as patch:
        patch.setattr(joint.Joint, "_read", lambda *args: sent.append(read(*args)) or sent[-1])
        scored(threads, ids(), way="live")

    def shown_at(site):
        command = ["check", "--site", str(threads.sites.config(site)), "--json"]
        return json.loads(CliRunner().invoke(site_app, command).output)["cells_show"]

    # That of all its rows, of which these are nearly all.
    shares = [cells_of_trees.share_open(cells, len(ids())) for cells in sent]
    shown = [shown_at(site)[threads.model] for site in ("insurer", "shop")]
    assert sorted(shown) == pytest.approx(sorted(shares), abs=0.03)
    assert shown_at("bank") == {}


# Budgets of time


def test_callers_wait_longer_than_a_call_takes(threads):
    """Those of the pages, however many parties are silent."""
    pages = Path("docs").rglob("*.md")
    waits = [float(text) for page in pages for text in TIMEOUT.findall(page.read_text())]
    assert len(waits) >= 2
    # A tenth is for the computing.
    assert 0.9 * min(waits) >= LIVE_SECONDS + ROWS_SECONDS


@contextmanager
def stopped(threads, name):
    """A process that accepts connections, and is silent."""
    going = threading.Event()
    threads._running[name][1].call_soon_threadsafe(going.wait)
    try:
        yield
    finally:
        going.set()


# A handshake that is cut off leaves its socket to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_silent_party_is_waited_for_once_where_cells_serve(threads, sent_ahead, monkeypatch):
    asked, post = list[str](), joint.Joint._post

    def noted(self, name, *request):
        asked.append(name)
        return post(self, name, *request)

    monkeypatch.setattr(joint, "LIVE_SECONDS", 1.0)
    monkeypatch.setattr(joint.Joint, "_post", noted)
    with stopped(threads, "insurer"):
        for row_id in sent_ahead[:16]:
            status, reply = threads.score(row_id)
            assert (status, reply["way"]) == (200, "nightly")
            assert "must answer at" in reply["away"]
        assert asked.count("insurer") <= 2
        assert asked.count("shop") > 2  # as it may refuse
        assert threads.client.get("/health").status_code == 503  # not all rows have cells
    until(lambda: threads.score(sent_ahead[0])[1]["way"] == "live")
    close_cut_off()


def test_an_answer_for_which_nobody_waits_is_not_logged_as_one(threads, monkeypatch):
    monkeypatch.setattr(joint, "LIVE_SECONDS", 0.5)
    assert live(threads, ids()[0])[0] == 200
    n_lines = len(logged("insurer"))
    with stopped(threads, "insurer"):
        assert live(threads, ids()[0])[0] == 504
    until(lambda: len(logged("insurer")) > n_lines)
    refused = "refused: asker must wait for the answer, got one that has hung up"
    assert logged("insurer")[-1]["outcome"] == refused
    assert logged("insurer")[-1]["request"] == logged("bank")[-1]["request"]
    # The same of a caller, whose request comes while the process is stopped.
    body = json.dumps({"id": ids()[0], "way": "live"}).encode()
    head = "POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    until(lambda: live(threads, ids()[0])[0] == 200)
    n_lines = len(logged("bank"))
    with (
        stopped(threads, "bank"),
        socket.create_connection(("127.0.0.1", threads.sites.ports["bank"])) as caller,
    ):
        caller.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    until(lambda: len(logged("bank")) > n_lines)
    assert logged("bank")[-1]["outcome"] == refused


# What is said of the next request


def _full(monkeypatch, *sites):
    """Disks that take half a line."""
    write, logs = os.write, [str(home() / "sites" / site / LOG) for site in sites]

    def half(file, data):
        is_whole = os.readlink(f"/proc/self/fd/{file}") not in logs
        return write(file, data if is_whole else data[: len(data) // 2])

    monkeypatch.setattr("fedapp.site.log.os.write", half)


# By what is wrong: the node configs, the site whose disk is full, how much the clock of the bank
# is set, whether all rows were sent ahead; then status and text of /health.
TRUE = {
    "nothing": ({}, "", 0, False, 200, "ok"),
    "the bank's disk": ({}, "bank", 0, True, 503, "log of bank must take a line before"),
    "the insurer's disk": ({}, "insurer", 0, False, 503, "insurer: log of insurer must take"),
    "the insurer's disk, with cells": ({}, "insurer", 0, True, 200, "ok"),
    "the bank withdraws": ({"bank": WITHDRAWS}, "", 0, True, 503, WITHDRAWN.format("bank")),
    "the insurer withdraws": (
        *({"insurer": WITHDRAWS}, "", 0, True),
        *(503, f"insurer: {WITHDRAWN.format('insurer')}"),
    ),
    "the day is spent": (
        *({"insurer": {"standing_rows_per_day": 1}}, "", 0, True),
        *(503, "insurer: rows must be <= 1 (standing-rows-per-day in the node config of"),
    ),
    "the insurer's config": (
        *({"insurer": {"standing_days": "x"}}, "", 0, True),
        *(503, "insurer: node config of insurer must be readable"),
    ),
    "cells of tomorrow": ({}, "insurer", -86400, True, 503, "insurer: log of insurer must take"),
    "cells of yesterday": ({}, "insurer", 86401, True, 503, "insurer: log of insurer must take"),
}


@pytest.mark.parametrize(
    ("configs", "full", "seconds", "has_cells", "status", "text"), TRUE.values(), ids=TRUE
)
def test_health_says_what_the_next_request_gets(
    threads, configure, sent_ahead, monkeypatch, configs, full, seconds, has_cells, status, text
):
    if has_cells:
        for site in ("insurer", "shop"):
            configure(site, standing_nightly="all")
        assert nightly(threads, all=True)[0] == 200
    for site, keys in configs.items():
        configure(site, **keys)
    _full(monkeypatch, full)
    if seconds:
        read_clock = joint.read_clock
        monkeypatch.setattr(
            joint, "read_clock", lambda home: SimpleNamespace(shown=read_clock(home).now + seconds)
        )
    if "standing_rows_per_day" in configs.get("insurer", {}):
        assert threads.score(ids()[20])[0] == 200
    health = threads.client.get("/health")
    assert (health.status_code, health.json()["status"][: len(text)]) == (status, text)
    assert threads.score(ids()[21])[0] in ((200,) if status == 200 else (403, 429, 502, 503, 504))
    has_ready = threads.client.get("/v2/health/ready", headers={"host": "localhost"})
    assert has_ready.status_code == status
    if seconds:
        fault = "in the future: set the clock" if seconds < 0 else "are stale after 24 hours"
        assert fault in health.json()["nightly"]
        got, reply = threads.score(ids()[0], way="nightly")
        assert (got, fault in reply["error"]) == (404, True)


def test_a_flood_of_probes_is_limited_and_shares_pings(threads, monkeypatch):
    pinged, sent = list[float](), joint.Joint._sent

    async def noted(self, name, method, *request, **content):
        if (name, method) == ("insurer", "GET"):
            pinged.append(time.monotonic())
        return await sent(self, name, method, *request, **content)

    monkeypatch.setattr(joint, "PING_SECONDS", 0.1)
    monkeypatch.setattr(joint.Joint, "_sent", noted)
    with ThreadPoolExecutor(40) as pool:
        with stopped(threads, "insurer"):
            replies = [
                pool.submit(threads.client.get, path, headers={"host": "localhost"})
                for path in ("/health", "/v2/health/ready") * 20
            ]
            until(lambda: sum(reply.done() for reply in replies) == 40 - MOST_REQUESTS)
            assert threads.score("nobody")[0] == 422
        codes = [reply.result().status_code for reply in replies]
    assert sorted(codes) == [200] * MOST_REQUESTS + [503] * (40 - MOST_REQUESTS)
    assert len(pinged) <= 4
    for _ in range(4):
        assert threads.client.get("/health").status_code == 200
    assert np.diff(pinged).min() >= 0.05


def _clock(seconds):
    """The machine's, which somebody has set."""
    return SimpleNamespace(
        time=lambda: time.time() + seconds,
        monotonic=time.monotonic,
        perf_counter=time.perf_counter,
    )


@pytest.mark.parametrize("name", ["bank", "insurer"])
def test_a_site_that_stands_aside_says_that_its_disk_is_full(threads, monkeypatch, name):
    url = f"{threads.sites.url(name)}/health"
    assert httpx.get(url).status_code == 200
    with monkeypatch.context() as patch:
        _full(patch, name)
        health = httpx.get(url)
        assert health.status_code == 503
        assert health.json()["status"].startswith(f"log of {name} must take a line")
    n_lines = len(logged(name))
    assert httpx.get(url).status_code == 200
    assert len(logged(name)) == n_lines  # an attempt leaves nothing


def test_cells_grow_old_by_the_clock_that_shows_more():
    with pytest.MonkeyPatch.context() as patch:
        clocks = SimpleNamespace(time=lambda: wall, monotonic=lambda: real)
        patch.setattr(joint, "time", clocks)
        patch.setattr(joint, "read_clock", lambda _: SimpleNamespace(shown=of_home))
        wall = of_home = real = 1e9
        ahead = joint.Ahead.of([np.zeros((1, 1), np.uint8)], np.arange(8), 8, days=1)
        stale, hour = "are stale after 24 hours, got 24.0", 1e9 + 3600
        due = {  # wall clock, the home's time, that of the process
            (hour, hour, 1e9 + 86_401): stale,
            (1e9 + 86_401, hour, hour): stale,
            (hour, 1e9 + 86_401, hour): stale,
            (hour, hour, hour): "",
            (1e9 - 3600, hour, hour): "were sent 1.0 hours in the future: set the clock, fetch",
            (hour, 1e9 - 3600, hour): "were sent 1.0 hours in the future: set the clock, fetch",
        }
        for times, fault in due.items():
            wall, of_home, real = times
            assert (ahead.fault[: len(fault)], not ahead.fault) == (fault, not fault)


def test_a_clock_that_is_set_frees_no_rows_of_the_day(threads, configure, monkeypatch):
    configure("insurer", standing_rows_per_day=3)
    threads.restart("insurer")
    n_asked = 0
    while live(threads, ids()[n_asked])[0] == 200:
        n_asked += 1
    got = clock.reading()
    for days in (365, 2, 0):
        monkeypatch.setattr(peers, "time", _clock(days * 86_400))
        monkeypatch.setattr(
            clock, "reading", lambda days=days: got._replace(wall=got.wall + days * 86_400)
        )
        assert live(threads, ids()[n_asked])[0] == 429
        threads.restart("insurer")
    assert live(threads, ids()[n_asked])[0] == 429
    assert n_asked <= 3


def test_a_site_that_withdraws_has_its_cells_deleted(threads, configure, sent_ahead, monkeypatch):
    path = folder_of("bank") / current("bank")[0] / "cells.insurer"
    configure("insurer", **WITHDRAWS)
    with monkeypatch.context() as patch:  # no line before nothing is left, nor after a crash none
        _full(patch, "bank")
        assert threads.client.get("/health").status_code == 503
        assert path.read_bytes() == b""
    assert threads.client.get("/health").status_code == 503
    assert not path.exists()
    assert threads.score(sent_ahead[0], way="nightly")[0] == 404
    lines = [_last(site, "withdrawn") for site in ("bank", "insurer")]
    assert [(line["peer"], line["outcome"]) for line in lines] == [
        ("insurer", "cells that it has sent are deleted"),
        ("bank", "bank knows"),
    ]
    configure("insurer", allow="secureboost,standing")
    assert live(threads, sent_ahead[0])[0] == 200
    threads.restart("bank")
    assert threads.score(sent_ahead[0], way="nightly")[0] == 404


def _last(site, event):
    return [line for _, line in Audit(home() / "sites" / site / LOG) if line["event"] == event][-1]


# Cells that were sent ahead


def test_cells_of_the_version_before_are_read_once_and_only_where_they_fit(
    threads, sent_ahead, monkeypatch
):
    site, read = threads.site["bank"], list[Path]()
    version = site.versions[site.current]
    monkeypatch.setattr(joint.Ahead, "read", read.append)
    served = joint.Joint(site, version)
    for service, n_read in (("another", 0), (SERVICE, 2)):
        read.clear()
        before = replace(version, agreed=replace(version.agreed, service=service))
        for _ in range(3):
            served.look_back(before)
        assert len(read) == n_read


@pytest.fixture
def sent_ahead(threads, configure):
    """The first 20 ids, whose cells all have sent."""
    for site in ("insurer", "shop"):
        configure(site, standing_nightly="named")
    assert nightly(threads, ids=ids()[:20])[0] == 200
    return ids()[:20]


def test_cells_that_are_stale_or_of_other_rows_give_no_score(threads, configure, sent_ahead):
    rule = "way must be live for rows of which not all parties have sent cells, or where these "
    assert threads.score(sent_ahead, way="nightly")[1]["way"] == "nightly"
    status, reply = threads.score(ids()[20], way="nightly")
    assert (status, reply["error"].startswith(rule)) == (404, True)
    configure("shop", standing_days=0)
    assert nightly(threads, ids=sent_ahead)[0] == 200
    assert threads.score(sent_ahead, way="nightly")[0] == 404


def test_cells_of_the_night_replace_a_party_that_is_away_and_none_that_refuses(
    threads, configure, sent_ahead, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("fedapp.serve.joint.LIVE_SECONDS", 0.0)
        patch.setattr("fedapp.serve.joint.ROWS_SECONDS", 0.0)
        status, reply = threads.score(sent_ahead)
        assert (status, reply["way"]) == (200, "nightly")
        assert " within 0 s, got nothing" in reply["away"]
        status, reply = threads.score(sent_ahead, way="live")
        assert status == 504
        assert re.match(r"(insurer|shop) must answer at 127\.0\.0\.1:\d+ within 0", reply["error"])
        patch.setattr("fedapp.site.rows_to_predict.InTable.is_in_memory", False)
        rule = "database of bank must answer within 0 s, got nothing"
        assert threads.score(sent_ahead, way="nightly") == (504, {"error": rule})
    configure("insurer", allow="secureboost")
    until(lambda: threads.score(sent_ahead)[0] == 403)  # a ping has found that it is not away


def test_cells_of_the_night_that_are_torn_are_as_none(threads, sent_ahead):
    path = folder_of("bank") / current("bank")[0] / "cells.insurer"
    whole = path.read_bytes()
    for content in (b"", whole[:300], whole[:-30], b"other"):
        threads.stop("bank")
        path.write_bytes(content)
        threads.start("bank")
        assert threads.score(sent_ahead[0])[1]["way"] == "live"
        assert threads.score(sent_ahead[0], way="nightly")[0] == 404


def test_blocks_for_the_night_are_of_equal_size(threads, configure, monkeypatch):
    names = ids()[:168]
    monkeypatch.setattr(joint, "BLOCK", 64)
    for site in ("insurer", "shop"):  # as a site may refuse a block of few rows
        configure(site, standing_nightly="named", standing_least_rows=56)
    assert nightly(threads, ids=names)[0] == 200
    assert scored(threads, names, way="nightly") == scored(threads, names, way="live")


# What other parties answer


def replied(status, body):
    async def given(client, *request, **content):
        return httpx.Response(status), body

    return {"joint._replied": given}


def altered(change):
    return {"peers.compress": lambda cells: change(cells_of_trees.compress(cells))}


def cells_of(value):
    return lambda data: cells_of_trees.compress(np.full((10**4, 1), value, np.uint8))


# By what it is: what is in place of names in ``fedapp.serve``, status, error.
ANSWERS = {
    "no JSON": (replied(422, b"[" * 10**5), 422, "answered with status 422$"),
    "another place": (replied(302, b""), 502, "answered with status 302$"),
    "half a character": (replied(403, b'{"error": "\\ud800"}'), 403, r"\?$"),
    "no such path": (replied(404, b'{"error": "Not Found"}'), 502, "Not Found$"),
    "too long": (
        {"joint.MOST_ANSWER": 0, "joint.MOST_TIMES": 0},
        *(502, "answer must have at most 0 bytes, got more$"),
    ),
    "zeros": (altered(cells_of(0)), 502, "cells must leave every row one leaf"),
    "nothing": (altered(lambda data: b""), 502, "cells must"),
    "half": (altered(lambda data: data[: len(data) // 2]), 502, "cells must"),
}


@pytest.mark.parametrize(("changes", "status", "error"), ANSWERS.values(), ids=ANSWERS)
def test_a_partys_refusal_or_false_answer_is_passed_on_in_its_name(
    threads, monkeypatch, changes, status, error
):
    for name, value in changes.items():
        monkeypatch.setattr(f"fedapp.serve.{name}", value)
    got, reply = live(threads, ids()[0])
    assert got == status
    assert re.match(f"(insurer|shop): {error}", reply["error"])
    assert logged("bank")[-1]["outcome"] == f"refused: {reply['error']}"


@contextmanager
def in_place_of_the_insurer(threads, certificate, reply):
    """What a server of this certificate receives."""
    threads.stop("insurer")
    context, received = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), list[bytes]()
    context.load_cert_chain(certificate)
    server = socket.create_server(("127.0.0.1", threads.sites.peer_ports["insurer"]))

    def answer():
        while True:
            with suppress(ssl.SSLError, ConnectionError):
                try:
                    raw, _ = server.accept()
                except OSError:
                    return
                with raw, context.wrap_socket(raw, server_side=True) as secure:
                    received.append(secure.recv(65536))
                    secure.sendall(reply)
                    secure.unwrap()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()
        threads.start("insurer")


PACKED = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n"
PACKED += b"content-encoding: gzip\r\n\r\nhello"


@pytest.mark.parametrize(
    ("is_pinned", "reply", "status", "text"),
    [
        (True, b"SSH-2.0\r\n", 504, "insurer must answer at"),
        (True, PACKED, 502, "insurer: part of the model must be the one"),  # nothing is unpacked
        (False, PACKED, 504, "insurer must answer at"),  # the name alone proves nothing
    ],
    ids=["no HTTP", "packed, but not", "another certificate"],
)
def test_rows_go_to_the_pinned_certificate_only_and_an_answer_of_another_form_is_refused(
    threads, tmp_path, is_pinned, reply, status, text
):
    pair = own_certificate("insurer")
    (other := tmp_path / "tls.pem").write_bytes(pair.secret + pair.public)
    certificate = folder_of("insurer") / "tls.pem" if is_pinned else other
    with in_place_of_the_insurer(threads, certificate, reply) as received:
        got, content = live(threads, ids()[0])
        assert bool(received) == is_pinned
    assert (got, content["error"][: len(text)]) == (status, text)
    assert logged("bank")[-1]["outcome"] == f"refused: {content['error']}"


def test_another_part_of_the_model_gives_no_score(threads):
    path = home() / "sites" / "insurer" / threads.model / "part.json"
    text = path.read_text()
    for content in (text.replace("]", "] ", 1), text):
        path.write_text(content)
        threads.restart("insurer")
        status, reply = live(threads, ids()[0])
        assert status == (200 if content == text else 502)
        rule = "insurer: part of the model must be the one"
        assert reply.get("error", rule).startswith(rule)


@pytest.mark.parametrize("days", ["none", "soon", "nan", "-1"])
def test_days_that_are_no_number_and_cells_that_cannot_be_stored_are_refused(
    threads, configure, monkeypatch, days
):
    def answer(content, headers):
        given = {name: value for name, value in headers.items() if name != "fedapp-days"}
        return Response(content, headers=given | ({} if days == "none" else {"fedapp-days": days}))

    def full(*given):
        raise OSError(28, "No space left on device")

    for site in ("insurer", "shop"):
        configure(site, standing_nightly="all")
    with monkeypatch.context() as patch:
        patch.setattr("fedapp.serve.peers.Response", answer)
        rule = f"insurer: fedapp-days must be a number of days, got {days}"
        assert nightly(threads, all=True) == (502, {"error": rule})
    assert logged("bank")[-1]["outcome"] == f"refused: {rule}"
    monkeypatch.setattr("fedapp.serve.joint.Ahead.write", full)
    rule = "cells of insurer must be stored, got: No space left on device"
    assert nightly(threads, all=True) == (503, {"error": rule})


# The log


@pytest.mark.parametrize("site", ["bank", "insurer"])
def test_where_the_log_takes_no_line_there_is_no_answer(threads, site, monkeypatch):
    name, n_lines = ids()[0], len(logged(site))
    with monkeypatch.context() as patch:
        _full(patch, site)
        status, reply = live(threads, name)
    assert status in (502, 503, 504)
    assert f"log of {site} must take a line before an answer leaves" in reply["error"]
    assert len(logged(site)) == n_lines
    assert live(threads, name)[0] == 200
    assert len(logged(site)) == n_lines + 1


def test_what_fails_has_a_line(threads, monkeypatch):
    for place, site in (("joint", "bank"), ("peers", "insurer")):
        with monkeypatch.context() as patch:
            patch.setattr(f"fedapp.serve.{place}.open_cells", None)
            asked = {"id": ids()[0], "way": "live"}
            reply = httpx.post(f"{threads.sites.url()}/score", json=asked)
            assert reply.status_code in (500, 502)
        assert logged(site)[-1]["outcome"] == "failed: TypeError"


def test_a_refusal_is_a_short_line_whatever_is_asked(threads, configure):
    configure("insurer", standing_rows_per_second=1)
    path, line = home() / "sites" / "insurer" / LOG, f"/cells/{current('bank')[0]}"
    odd, rows = "\U0001f600" * 80, list(range(0, len(ids()), 2)) * 90
    asked = {"rows": rows, "purpose": odd, "request": odd}
    with as_peer(threads, "bank", "insurer") as client:
        before = path.stat().st_size
        assert client.post(line, json=asked).status_code == 429
    assert path.stat().st_size - before < 2000
    last = logged("insurer")[-1]
    assert last["n_rows"] == len(set(rows))
    assert "rows" not in last


def test_a_flood_of_refusals_is_counted_and_others_are_answered(threads, configure, monkeypatch):
    monkeypatch.setattr("fedapp.serve.versions.LISTED", 3)
    site, n_asked = threads.site["insurer"], 40
    site.note_refused()
    n_lines = len(logged("insurer"))
    with as_peer(threads, "shop", "insurer") as client:
        for _ in range(n_asked):
            assert client.post(f"/cells/{current('bank')[0]}", json=ASKED).status_code == 409
    assert live(threads, ids()[0])[0] == 200
    outcomes = [line["outcome"][:8] for line in logged("insurer")[n_lines:]]
    assert outcomes == [*["refused:"] * 3, "answered"]
    monkeypatch.setattr("fedapp.serve.versions.LISTED_SECONDS", 0.0)
    until(lambda: logged("insurer")[-1].get("n_refused") == n_asked - 3)
    assert logged("insurer")[-1]["outcome"] == f"refused: {n_asked - 3} more"
