"""What a standing process refuses, each by a request to sites that all tests of this file share."""

import asyncio
import json
import os
import re
import socket
import ssl
import threading
from contextlib import contextmanager

import pytest

pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from starlette.responses import Response  # noqa: E402

from fedapp.crypto.certificates import own_certificate  # noqa: E402
from fedapp.errors import ConfigError  # noqa: E402
from fedapp.home import home  # noqa: E402
from fedapp.serve.standing import serve  # noqa: E402
from fedapp.serve.versions import Site  # noqa: E402
from fedapp.site.log import LOG  # noqa: E402
from fedapp.site.standing import current, folder_of  # noqa: E402
from tests.serve.standing import FEW, Threads, ids, logged, sites_in, tables, until  # noqa: E402

ASKED = {"rows": [0], "purpose": "", "request": ""}
TABLES = ("binary:logistic", 3)


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
    sites.activate(sites.train(**FEW))
    threads = Threads(sites)
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


def nightly(threads, **body):
    reply = threads.client.post("/nightly", json=body)
    return reply.status_code, reply.json()


@contextmanager
def as_peer(threads, asker, asked):
    """A client with one site's certificate, towards another."""
    site = threads.site[asker]
    peer = site.versions[site.current].agreed.peers[asked]
    context = site.context_to(peer.certificate)
    with httpx.Client(verify=context, base_url=f"https://{peer.address}") as client:
        yield client


# Limits of the party that is asked


@pytest.mark.parametrize(
    ("keys", "places", "fit", "status", "rule"),
    [
        (
            {"standing_rows_per_second": 2},
            *(range(5), range(2), 429),
            r"rows must be <= 2 \(standing-rows-per-second in the node config of insurer\), got 5",
        ),
        (
            {"standing_least_rows": 4},
            *((0, 1, 2, 2), range(4), 422),
            r"rows must be >= 4 different ones \(standing-least-rows of insurer\), got 3$",
        ),
    ],
    ids=["rows a second", "different rows"],
)
def test_rows_beyond_a_limit_are_not_answered(threads, configure, keys, places, fit, status, rule):
    names = ids()
    configure("insurer", **keys)
    got, reply = live(threads, [names[place] for place in places])
    assert got == status
    assert re.match(f"insurer: {rule}", reply["error"])
    assert logged("insurer")[-1]["outcome"].startswith("refused: rows must be ")
    assert live(threads, [names[place] for place in fit])[0] == 200


@pytest.mark.parametrize(
    ("purpose", "status", "got"),
    [("fraud", 200, ""), ("frod", 422, "'frod'; did you mean fraud?"), ("", 422, "''")],
)
def test_rows_are_answered_for_purposes_of_the_site(threads, configure, purpose, status, got):
    configure("insurer", standing_purposes="credit,fraud")
    answered, reply = live(threads, ids()[0], purpose=purpose)
    rule = "insurer: purpose must be one of credit, fraud (standing-purposes of insurer), got "
    assert (answered, reply.get("error", "")) == (status, rule + got if got else "")


@pytest.mark.parametrize(
    ("keys", "body", "status", "rule"),
    [
        ({}, {"all": True}, 403, "standing-nightly must be named or all in the node config of"),
        ({}, {"ids": 9}, 403, "standing-nightly must be named or all in the node config of"),
        ({"standing_nightly": "named"}, {"all": True}, 403, "standing-nightly must be all in the"),
        ({"standing_nightly": "named"}, {"ids": 9}, 200, ""),
        ({"standing_nightly": "all"}, {"all": True}, 200, ""),
        (
            {"standing_nightly": "named", "standing_least_rows": 10},
            *({"ids": 9}, 422, "rows must be >= 10 different ones (standing-least-rows of"),
        ),
        ({"standing_nightly": "all", "standing_least_rows": 10**6}, {"all": True}, 200, ""),
    ],
)
def test_cells_are_sent_ahead_as_the_site_permits(threads, configure, keys, body, status, rule):
    configure("shop", standing_nightly="all")
    configure("insurer", **keys)
    got, reply = nightly(threads, **({"ids": ids()[:9]} if "ids" in body else body))
    assert got == status
    assert reply.get("error", "").startswith(f"insurer: {rule}" if rule else "")


def test_a_site_that_withdraws_answers_neither_peers_nor_callers(threads, configure):
    rule = "allow in the node config of {} must have standing, got it withdrawn"
    for site, status, before in (("insurer", 403, "insurer: "), ("bank", 503, "")):
        configure(site, allow="secureboost")
        got, reply = live(threads, ids()[0])
        assert (got, reply["error"]) == (status, before + rule.format(site))
        health = threads.client.get("/health").json()
        assert (health["status"] == rule.format("bank")) == (site == "bank")
        configure(site, allow="secureboost,standing")
        assert live(threads, ids()[0])[0] == 200


def test_a_node_config_that_cannot_be_read_permits_nothing(threads, configure):
    path = threads.sites.config("insurer")
    _replace(path, path.read_text()[:40])
    assert live(threads, ids()[0])[0] == 403
    assert logged("insurer")[-1]["outcome"].startswith("refused: allow in the node config of")


# Who is answered


def test_only_the_party_with_the_labels_is_answered(threads):
    version = current("bank")[0]
    for asker, asked, status in (
        ("bank", "insurer", 200),
        ("shop", "insurer", 409),
        ("insurer", "bank", 409),
    ):
        with as_peer(threads, asker, asked) as client:
            for path in (f"/cells/{version}", f"/ahead/{version}"):
                reply = client.post(path, json=ASKED)
                if status == 409:
                    rule = f"version must be one that {asked} answers for this certificate, its "
                    assert reply.json()["error"].startswith(f"{rule}active party's (none), got")
                    assert logged(asked)[-1]["outcome"].startswith("refused: version must be one")
                assert reply.status_code == (status if "cells" in path or status == 409 else 403)
            assert client.get("/alive").text == (version if status == 200 else "")


def test_another_version_or_too_long_a_body_is_refused(threads):
    with as_peer(threads, "bank", "insurer") as client:
        reply = client.post("/cells/another", json=ASKED)
        assert (reply.status_code, reply.json()["error"][-13:]) == (409, ", got another")
        reply = client.post(f"/cells/{current('bank')[0]}", content=b" " * 2_000_001)
        assert (reply.status_code, reply.json()["error"]) == (
            413,
            "body must have at most 2,000,000 bytes, got more",
        )
        for text in ("purpose", "request"):
            reply = client.post(f"/cells/{current('bank')[0]}", json=ASKED | {text: "x" * 81})
            assert reply.status_code == 422
            assert reply.json()["error"].endswith("got texts of more than 80 characters or none")


def test_a_site_gives_rows_to_no_other_certificate_than_the_pinned_one(threads, tmp_path):
    pair = own_certificate("insurer")  # the name alone proves nothing
    (tmp_path / "tls.pem").write_bytes(pair.secret + pair.public)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.pem")
    site = threads.site["bank"]
    pinned = site.versions[site.current].agreed.peers["insurer"].certificate
    received = []

    def accept():
        raw, _ = server.accept()
        fails = pytest.raises((ssl.SSLError, ConnectionError))
        with raw, fails, context.wrap_socket(raw, server_side=True) as secure:
            received.append(secure.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept)
        thread.start()
        address = "https://{}:{}".format(*server.getsockname())
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.post(address, json=ASKED, verify=site.context_to(pinned))
        thread.join()
    assert received == []


# Rows and versions that are not there


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
        status, reply = live(threads, name)
    finally:
        _replace(path, before)
    assert (status, reply) == (503, {"error": f"version must be active at bank, got {fault}"})
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


# Callers


LONG = "purpose and id of a request must have at most 80 characters, got more"
UNKNOWN = "id must be of a row that all parties had when they matched, got 1 unknown"


@pytest.mark.parametrize(
    ("asked", "status", "error"),
    [
        (
            {"ids": ["nobody"]},
            422,
            f'{UNKNOWN}, such as "nobody": fedapp federation activate --refresh',
        ),
        (
            {"ids": ["", "nobody"]},
            422,
            f'{UNKNOWN}, such as "nobody": fedapp federation activate --refresh',
        ),
        ({"id": "", "purpose": "x" * 81}, 422, LONG),
        ({"id": "", "way": "fast"}, 422, "way must be live or nightly, got fast"),
    ],
)
def test_a_caller_that_breaks_a_rule_is_refused_without_asking(threads, asked, status, error):
    named = {"id": ids()[0]} if "id" in asked else {}
    if "ids" in asked:
        named = {"ids": [name or ids()[0] for name in asked["ids"]]}
    n_lines = len(logged("insurer"))
    reply = threads.client.post("/score", json=asked | named)
    assert (reply.status_code, reply.json()["error"][: len(error)]) == (status, error)
    assert len(logged("insurer")) == n_lines
    line = logged("bank")[-1]
    assert line["outcome"].startswith("refused: ")
    assert "nobody" not in json.dumps(line)
    assert len(line["purpose"]) <= 80


@pytest.mark.parametrize(
    "body",
    [
        *({}, {"ids": []}, {"ids": "c1"}, {"ids": [1]}, {"all": False}, {"all": 1}),
        {"all": True, "ids": ["c1"]},
    ],
)
def test_a_night_of_another_form_is_refused(threads, body):
    rule = 'body must be {"ids": [id, ...]} or {"all": true}, got another'
    assert nightly(threads, **body) == (422, {"error": rule})


def test_a_caller_from_another_page_is_refused(threads):
    rule = "host must be one of 127.0.0.1, ::1, localhost (--allow-host adds another), got "
    reply = threads.client.get("/health", headers={"host": "evil.example"})
    assert (reply.status_code, reply.json()) == (400, {"error": f"{rule}'evil.example'"})
    for host in ("localhost:80", "[::1]"):
        assert threads.client.get("/metrics", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status", "rule"),
    [
        ({"origin": "https://evil.example"}, 403, "origin must be that of host {host}, or left ou"),
        ({"origin": "null"}, 403, "origin must be that of host {host}, or left out, got 'null'"),
        ({"content-type": "text/plain"}, 415, "content-type must be application/json, got 'text"),
        (
            {"content-type": "application/x-www-form-urlencoded"},
            *(415, "content-type must be application/json, got 'application/x-www"),
        ),
        ({"origin": "http://{host}", "content-type": "Application/JSON; charset=utf-8"}, 200, ""),
        ({}, 200, ""),
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


def test_neither_the_other_sites_nor_the_metrics_learn_an_id(threads):
    names = ids()[:5]
    assert live(threads, names, purpose="care")[0] == 200
    for site in ("insurer", "shop"):
        line = logged(site)[-1]
        assert (line["peer"], line["purpose"], line["rows"]) == ("bank", "care", [[0, 4]])
        assert not [name for name in names if f'"{name}"' in json.dumps(line)]
    shown = threads.client.get("/metrics").text
    assert 'fedapp_scored_rows_total{way="live"}' in shown
    assert not [name for name in names if f'"{name}"' in shown]


# Cells that were sent ahead


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
        status, reply = threads.score(sent_ahead)
        assert (status, reply["way"]) == (200, "nightly")
        assert " within 0 s, got nothing" in reply["away"]
        status, reply = threads.score(sent_ahead, way="live")
        assert status == 504
        assert re.match(r"(insurer|shop) must answer at 127\.0\.0\.1:\d+ within 0", reply["error"])
        patch.setattr("fedapp.site.features.InTable.is_in_memory", False)
        rule = "database of bank must answer within 0 s, got nothing"
        assert threads.score(sent_ahead, way="nightly") == (504, {"error": rule})
    configure("insurer", allow="secureboost")
    assert threads.score(sent_ahead)[0] == 403


# What other parties answer


REPLIES = {
    "no JSON": (422, b"[" * 10**5, 422, "answered with status 422"),
    "no error": (429, b"[]", 429, "answered with status 429"),
    "another place": (302, b"", 502, "answered with status 302"),
    "half a character": (403, b'{"error": "\\ud800"}', 403, "?"),
    "no such path": (404, b'{"error": "Not Found"}', 502, "Not Found"),
}


@pytest.mark.parametrize(("due", "body", "status", "error"), REPLIES.values(), ids=REPLIES)
def test_a_partys_refusal_is_passed_on_in_its_name(threads, monkeypatch, due, body, status, error):
    async def replied(client, *given, **content):
        return httpx.Response(due), body

    monkeypatch.setattr("fedapp.serve.joint._replied", replied)
    got, reply = live(threads, ids()[0])
    assert got == status
    assert reply["error"] in (f"insurer: {error}", f"shop: {error}")
    assert logged("bank")[-1]["outcome"] == f"refused: {reply['error']}"


def test_an_answer_that_is_too_long_is_not_read(threads, monkeypatch):
    monkeypatch.setattr("fedapp.serve.joint.MOST_ANSWER", 0)
    monkeypatch.setattr("fedapp.serve.joint.MOST_TIMES", 0)
    status, reply = live(threads, ids()[0])
    rule = "answer must have at most 0 bytes, got more"
    assert status == 502
    assert reply["error"] in (f"insurer: {rule}", f"shop: {rule}")


@pytest.mark.parametrize("days", ["none", "soon", "nan", "inf", "-1"])
def test_days_that_are_no_number_are_refused(threads, configure, monkeypatch, days):
    def answer(content, headers):
        given = {name: value for name, value in headers.items() if name != "fedapp-days"}
        return Response(content, headers=given | ({} if days == "none" else {"fedapp-days": days}))

    for site in ("insurer", "shop"):
        configure(site, standing_nightly="all")
    monkeypatch.setattr("fedapp.serve.peers.Response", answer)
    rule = f"insurer: fedapp-days must be a number of days, got {days}"
    assert nightly(threads, all=True) == (502, {"error": rule})
    assert logged("bank")[-1]["outcome"] == f"refused: {rule}"


def test_cells_that_cannot_be_stored_do_not_count(threads, configure, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    for site in ("insurer", "shop"):
        configure(site, standing_nightly="all")
    monkeypatch.setattr("fedapp.serve.ahead.Ahead.write", full)
    rule = "cells of insurer must be stored, got: No space left on device"
    assert nightly(threads, all=True) == (503, {"error": rule})


# The log


@contextmanager
def full_disk(site):
    """A log that takes half a line more."""
    write, is_log = os.write, str(home() / "sites" / site / LOG)

    def short(file, data):
        if os.readlink(f"/proc/self/fd/{file}") != is_log:
            return write(file, data)
        return write(file, data[: len(data) // 2])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedapp.site.log.os.write", short)
        yield


@pytest.mark.parametrize("site", ["bank", "insurer"])
def test_where_the_log_takes_no_line_there_is_no_answer(threads, site):
    name, n_lines = ids()[0], len(logged(site))
    with full_disk(site):
        status, reply = live(threads, name)
    assert status in (502, 503, 504)
    assert f"log of {site} must take a line before an answer leaves" in reply["error"]
    assert len(logged(site)) == n_lines
    assert live(threads, name)[0] == 200
    assert len(logged(site)) == n_lines + 1


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
