"""What breaks standing scores, or gets more out of a site than it permits, is refused by a rule."""

import asyncio
import os
import shutil
import socket
import ssl
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from clients.standing import Agreeing  # noqa: E402
from clients.vertical.opening import Opening  # noqa: E402
from fedapp.crypto import certificates  # noqa: E402
from fedapp.errors import PartyError  # noqa: E402
from fedapp.messages.standing import Address  # noqa: E402
from fedapp.serve import joint, peers, versions  # noqa: E402
from fedapp.serve.http import RefusedError  # noqa: E402
from fedapp.site.settings import SiteConfig, is_address, parse_node_config  # noqa: E402
from fedapp.site.standing import certificate, current, folder_of, switch  # noqa: E402
from tests.serve.standing import (  # noqa: E402
    FEW,
    Threads,
    bits,
    ids,
    logged,
    scored,
    sites_in,
    tables,
    until,
)

ASKED = {"rows": [0], "purpose": "", "request": ""}


# Who is answered, and when


@contextmanager
def connection(threads):
    """One of the bank to the insurer."""
    site = threads.site["bank"]
    context = site.context_to(site.versions[site.current].agreed.peers["insurer"].certificate)
    port = threads.sites.peer_ports["insurer"]
    with socket.create_connection(("127.0.0.1", port)) as raw, context.wrap_socket(raw) as secure:
        yield secure


def test_a_body_that_comes_after_the_site_has_withdrawn_is_not_answered(stand):
    sites, threads, _ = stand()
    body = b'{"rows": [0], "purpose": "", "request": ""}'
    head = f"POST /cells/{current('bank')[0]} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}"
    with connection(threads) as secure:
        secure.sendall(head.encode() + b"\r\n\r\n" + body[:5])
        time.sleep(0.2)
        sites.configure("insurer", {"allow": "secureboost"})
        secure.sendall(body[5:])
        assert secure.recv(100).startswith(b"HTTP/1.1 403")


# Answers of a party that breaks the rules


@contextmanager
def in_place_of_the_insurer(threads, reply):
    """A server with the insurer's certificate."""
    threads.stop("insurer")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder_of("insurer") / "tls.pem")
    server = socket.create_server(("127.0.0.1", threads.sites.peer_ports["insurer"]))

    def answer():
        while True:
            with suppress(ssl.SSLError, ConnectionError):
                try:
                    raw, _ = server.accept()
                except OSError:
                    return
                with raw, context.wrap_socket(raw, server_side=True) as secure:
                    secure.recv(65536)
                    secure.sendall(reply)
                    secure.unwrap()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def http(status, body, *headers):
    head = "\r\n".join([f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers])
    return head.encode() + b"\r\n\r\n" + body


REPLIES = {
    "no HTTP": (b"SSH-2.0\r\n", 504, "insurer must answer at"),
    "packed, but not": (http("200 OK", b"hello", "content-encoding: gzip"), 502, "part of the"),
    "too long": (http("200 OK", bytes(10**7)), 502, "answer must have at most 1,"),
    "deep": (http("422 X", b'{"error": ' + b"[" * 10**5), 422, "answered with status 422"),
    "half a character": (http("422 X", b'{"error": "\\ud800"}'), 422, "insurer: ?"),
    "another place": (http("302 X", b"", "location: http://x/"), 502, "answered with status 302"),
}


@pytest.mark.slow
def test_an_answer_of_another_form_is_refused_with_a_line(stand):
    _, threads, _ = stand()
    for reply, status, text in REPLIES.values():
        name, n_lines = ids()[0], len(logged("bank"))
        with in_place_of_the_insurer(threads, reply):
            got, content = threads.score(name)
        assert (got, text in content["error"]) == (status, True), content
        (line,) = logged("bank")[n_lines:]
        assert line["outcome"] == f"refused: {content['error']}"
        threads.start("insurer")


FORMS = {
    "no certificate": ({"certificate": "none"}, "must be one certificate in PEM"),
    "two": ({"certificate": "two"}, "must be one certificate in PEM, and nothing else, got more"),
    "another party's": ({"certificate": "one"}, "must be of one party"),
    "no port": ({"address": "insurer.org"}, "must be HOST:PORT, got 'insurer.org'"),
    "a path": ({"address": "insurer.org/x:1"}, "must be HOST:PORT"),
}


@pytest.mark.parametrize(("change", "rule"), FORMS.values(), ids=FORMS)
def test_addresses_that_would_stop_a_site_are_refused_before_they_are_stored(
    tmp_path, monkeypatch, change, rule
):
    sites = sites_in(tmp_path)
    model, bank = sites.train(**FEW), certificate("bank")

    def sent(address, content, *more):
        if address.endswith(str(sites.peer_ports["insurer"])):
            contents = {"one": bank, "two": bytes(content) + bank, "none": b"hello"}
            content = np.frombuffer(contents.get(change.get("certificate", ""), content), np.uint8)
            address = change.get("address", address)
        return Address(address, content, *more)

    prepare = Agreeing.prepare

    def prepared(self, request, mail):
        with monkeypatch.context() as patch:
            patch.setattr("clients.standing.Address", sent)
            return prepare(self, request, mail)

    monkeypatch.setattr(Agreeing, "prepare", prepared)
    with pytest.raises(PartyError, match=rule):
        sites.activate(model)
    assert current("bank") == ("", "")


@pytest.mark.parametrize(
    ("text", "due"),
    [
        *((text, 1) for text in ("a.org:1", "[::1]:9", "1.2.3.4:65535")),
        *((text, 0) for text in ("a:0", "a:65536", "[:]:1", "a b:1", "a@b:1", "a?b:1", "%%:1")),
    ],
)
def test_an_address_has_a_host_and_a_port(text, due):
    assert is_address(text) == due
    if due:
        httpx.URL(f"https://{text}")


@pytest.mark.slow
def test_a_refresh_of_other_rows_than_those_of_now_is_refused(tmp_path, monkeypatch):
    sites = sites_in(tmp_path)
    model = sites.train(**FEW)
    sites.activate(model)
    version, match = current("bank")[0], Opening.match
    for name, table in tables("binary:logistic", 2, 260).items():
        sites.write_table(name, table)

    def after_another(self, request, mail):
        with monkeypatch.context() as patch:
            patch.setattr(Opening, "match", match)
            if current("bank")[0] == version:
                sites.activate(model, refresh=True)
        return match(self, request, mail)

    monkeypatch.setattr(Opening, "match", after_another)
    with pytest.raises(PartyError, match="got some that another activation has matched meanwhile"):
        sites.activate(model, refresh=True)
    assert len(set(ids())) == len(ids())
    switch("insurer", version)
    with pytest.raises(PartyError, match=r"Address\.refreshed must be .*: activate without it"):
        sites.activate(model, refresh=True)


# Changes under load


@pytest.mark.slow
def test_who_is_being_answered_is_answered_while_the_table_changes(stand, monkeypatch):
    sites, threads, model = stand()
    expected = bits(sites.predicted(model))
    names, cells = list(expected), peers._cells
    asked, may_end = threading.Event(), threading.Event()

    async def late(version, rows):
        if rows[0] == first:
            asked.set()
            await asyncio.to_thread(may_end.wait)
        return await cells(version, rows)

    first = ids().index(names[0])
    monkeypatch.setattr(peers, "_cells", late)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(scored(threads, names[:1])))
    asking.start()
    asked.wait()
    site = threads.site["bank"]
    before = site.versions[site.current]
    sites.write_table("bank", tables()["bank"].slice(0))
    until(lambda: site.versions[site.current] is not before)
    reply = httpx.post(f"{sites.url()}/score", json={"id": names[1]})
    assert reply.status_code == 200
    may_end.set()
    asking.join()
    assert answers == [{names[0]: expected[names[0]]}]


@pytest.mark.slow
def test_a_version_that_is_slow_to_load_delays_nobody_for_long(stand, monkeypatch):
    sites, threads, model = stand()
    name, before = ids()[0], current("bank")[0]
    load, may_load = versions.Version.load, threading.Event()

    def slow(config, version):
        assert version == before or may_load.wait(20)
        return load(config, version)

    monkeypatch.setattr(versions.Version, "load", slow)
    monkeypatch.setattr(versions, "WAIT_SECONDS", 0.1)
    sites.activate(model)
    for _ in range(3):
        status, reply = threads.score(name)
        assert (status, reply["version"]) == (200, before)
    may_load.set()
    until(lambda: threads.score(name)[1]["version"] == current("bank")[0])


@pytest.mark.slow
def test_activations_that_end_halfway_leave_the_version_that_answers(stand, monkeypatch):
    sites, threads, model = stand()
    name, before, switched = ids()[0], current("bank")[0], Agreeing.switch_version

    def halfway(self, request):
        if self.name == "bank":
            raise OSError("no power")
        return switched(self, request)

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(Agreeing, "switch_version", halfway)
            with pytest.raises(PartyError, match="bank"):
                sites.activate(model)
        assert current("insurer")[1] == before
        status, reply = threads.score(name)
        assert (status, reply["version"]) == (200, before)
    until(lambda: threads.client.get("/health").json()["status"] == "ok")
    sites.activate(model)
    assert threads.score(name)[1]["version"] == current("bank")[0] != before
    assert len([*folder_of("insurer").glob("*/agreed.json")]) == 2


@pytest.mark.slow
def test_a_process_that_runs_learns_of_the_first_version_and_of_new_certificates(tmp_path):
    sites = sites_in(tmp_path)
    model = sites.train(**FEW)
    threads = Threads(sites)
    threads.start()
    try:
        sites.activate(model)
        until(lambda: threads.score(ids()[0])[0] == 200)
        pair = certificates.own_certificate("bank")
        (folder_of("bank") / "tls.pem").write_bytes(pair.secret + pair.public)
        sites.activate(model)
        until(lambda: threads.score(ids()[0])[0] == 200)
    finally:
        threads.close()


@pytest.mark.slow
def test_a_certificate_that_ends_soon_is_renewed_by_an_activation_only(tmp_path, monkeypatch):
    sites = sites_in(tmp_path)
    model = sites.train(**FEW)
    with monkeypatch.context() as patch:
        short = lambda days: timedelta(min(days, 20))  # noqa: E731
        patch.setattr("fedapp.crypto.certificates.timedelta", short)
        for name in sites.names:
            certificate(name)
    with monkeypatch.context() as patch:
        patch.setattr("fedapp.site.standing.WARNED_DAYS", 0)
        sites.activate(model)
    paths = [folder_of(name) / "tls.pem" for name in sites.names]
    before = [path.read_bytes() for path in paths]
    assert all(timedelta(days=certificates.days_left(path)) < timedelta(days=21) for path in paths)
    threads = Threads(sites)
    threads.start()
    try:
        assert threads.score(ids()[0])[0] == 200
        assert [path.read_bytes() for path in paths] == before
        with monkeypatch.context() as patch:
            patch.setattr("clients.standing.numbered", None)
            with pytest.raises(PartyError):
                sites.activate(model)
        assert threads.score(ids()[0])[0] == 200
        sites.activate(model)
        until(lambda: threads.score(ids()[0])[0] == 200)
        assert not [path for path in paths if path.read_bytes() in before]
    finally:
        threads.close()


UNREADABLE = {
    "gone": lambda path: path.unlink(),
    "half": lambda path: path.write_text(path.read_text()[:40]),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.slow
def test_a_node_config_that_cannot_be_read_permits_nothing_until_it_can(stand):
    sites, threads, _ = stand()
    path, name = sites.config("insurer"), ids()[0]
    before, text = path.stat(), path.read_text()
    for spoil in UNREADABLE.values():
        spoil(path)
        assert threads.score(name)[0] == 403
        assert logged("insurer")[-1]["outcome"].startswith("refused: allow")
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.write_text(text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert threads.score(name)[0] == 200


@pytest.mark.slow
def test_a_node_config_is_read_again_though_it_stays_as_it_is(stand, monkeypatch):
    """Such as where the process had no file descriptor left."""
    sites, threads, _ = stand()
    name, read = ids()[0], parse_node_config

    def fails(text):
        if text == str(sites.config("insurer")):
            raise OSError("too many open files")
        return read(text)

    with monkeypatch.context() as patch:
        patch.setattr("fedapp.serve.versions.parse_node_config", fails)
        sites.config("insurer").touch()
        assert threads.score(name)[0] == 403
    until(lambda: threads.score(name)[0] == 200, 5)


# Limits


@given(st.lists(st.tuples(st.floats(0, 0.6), st.integers(1, 6)), max_size=30))
def test_no_second_has_more_rows_than_allowed(gaps):
    allowance, now, answered = peers.Allowance(), 0.0, list[tuple[float, int]]()
    config = SiteConfig("insurer", "rows.csv", standing_rows_per_second=6)
    for gap, n_rows in gaps:
        now += gap
        in_second = sum(rows for when, rows in answered if when > now - 1)
        try:
            allowance.check_second(config, "bank", n_rows, now)
        except RefusedError:
            assert in_second + n_rows > 6
        else:
            assert in_second + n_rows <= 6
            answered.append((now, n_rows))


@pytest.mark.slow
def test_rows_that_are_named_for_the_night_count_as_others_do(stand):
    sites, threads, _ = stand()
    names = ids()
    limits = {"standing-least-rows": 10, "standing-rows-per-day": 20}

    def fetch(**body):
        reply = threads.client.post("/nightly", json=body)
        return reply.status_code, reply.text

    for nightly in ("named", "all"):
        sites.configure("insurer", {"standing-nightly": nightly, **limits})
        status, text = fetch(ids=names[:1])
        assert (status, "rows must be >= 10 different ones" in text) == (422, True)
    assert fetch(all=True)[0] == 200
    for _ in range(2):  # all rows do not count, neither now nor after a restart
        assert threads.score(names[:15])[0] == 200
        assert fetch(ids=names[:21])[0] == 429
        threads.restart("insurer")
    assert fetch(ids=names[:20])[0] == 200
    threads.restart("insurer")
    assert threads.score(names[11:21])[0] == 429


@pytest.mark.slow
def test_blocks_for_the_night_are_of_equal_size(stand, monkeypatch):
    sites, threads, model = stand()
    expected = bits(sites.predicted(model))
    monkeypatch.setattr(joint, "BLOCK", 64)
    n_least = len(expected) // (-(-len(expected) // 64)) // 8 * 8
    sites.configure("insurer", {"standing-nightly": "named", "standing-least-rows": n_least})
    assert threads.client.post("/nightly", json={"ids": list(expected)}).status_code == 200
    assert scored(threads, list(expected), way="nightly") == expected


@pytest.mark.slow
def test_a_limit_at_the_party_with_the_labels_lets_it_start_again(stand):
    _, threads, _ = stand(node={"standing-rows-per-day": 5})
    assert threads.score(ids()[0])[0] == 200
    threads.restart("bank")
    assert threads.score(ids()[0])[0] == 200


@pytest.mark.slow
def test_what_fails_has_a_line(stand, monkeypatch):
    _, threads, _ = stand()
    name = ids()[0]
    for place, site in (("joint", "bank"), ("peers", "insurer")):
        with monkeypatch.context() as patch:
            patch.setattr(f"fedapp.serve.{place}.open_cells", None)
            reply = httpx.post(f"{threads.sites.url()}/score", json={"id": name})
            assert reply.status_code in (500, 502)
        assert logged(site)[-1]["outcome"] == "failed: TypeError"


@pytest.mark.slow
def test_who_begins_no_handshake_is_cut_off(stand, monkeypatch):
    monkeypatch.setattr("fedapp.serve.standing.HANDSHAKE_SECONDS", 0.2)
    sites, threads, _ = stand()
    with socket.create_connection(("127.0.0.1", sites.peer_ports["insurer"])) as stranger:
        stranger.settimeout(10)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert threads.score(ids()[0])[0] == 200
