"""Why a SuperLink cannot be reached: each cause has its sentence, whose remedy, carried out, cures.

The SuperLink is Flower's, in a thread and behind TLS; the folders are those of the commands.
"""

import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from functools import partialmethod
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest
import tomli_w
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.control_pb2 import ListRunsRequest
from flwr.supercore.control import ControlHttpClient
from flwr.superlink import main
from flwr.superlink.main import create_app
from flwr.supernode import fleet_http_connection

from fedapp.commands.federation import federation_app
from fedapp.commands.site import site_app
from fedapp.deploy.folders import renew_certificates
from fedapp.deploy.health import REACHED
from fedapp.deploy.warm import connection
from fedapp.site import certificates
from fedapp.site.certificates import new_authority
from fedapp.superlinks import SuperLink, SuperLinkError, note_reached, site_fault
from tests.deploy_folders import init_federation, invoke
from tests.serving import serving

HOST, CONNECT = "127.0.0.1", ControlHttpClient.__init__


@contextmanager
def treating(treat: Callable[[socket.socket], object]) -> Iterator[int]:
    """The port of a server that does this with each connection."""
    with socket.create_server((HOST, 0)) as server:

        def accept() -> object:
            kept = list[socket.socket]()
            while True:
                try:
                    kept.append(server.accept()[0])
                except OSError:
                    return [connection.close() for connection in kept]
                treat(kept[-1])

        thread = Thread(target=accept)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


class Scene:
    """A coordinator's SuperLink; a user and a site, who have a ``ca.crt`` of their own."""

    def __init__(self, folder: Path, table: str, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.ends, self.late = patch, ExitStack(), 0.0
        self.folder, _ = init_federation(folder, "--host", HOST, "--sites", "bank")
        self.ca = folder / "ca.crt"
        self.roots: str | None = str(self.ca)
        self.take_ca()
        self.site = folder / "bank"
        words = ("--name", "bank", "--superlink", f"{HOST}:9", "--data", table)
        invoke(site_app, "init", str(self.site), *words, "--ca", str(self.ca))
        self.reached = self.site / "flower" / REACHED
        patch.setattr(httpx.Client, "send", httpx.Client.send)
        note_reached(self.reached)
        self.host = HOST
        self.app = create_app()
        self.app.state.enable_supernode_auth = True
        patch.setenv("FEDAPP_NAME", "bank")
        self.start()

    def take_ca(self) -> None:
        """The user and the site have the coordinator's ca.crt."""
        self.ca.write_bytes((self.folder / "ca.crt").read_bytes())

    def start(self, **_: Any) -> None:
        """The SuperLink is started again, with the certificates of its folder."""
        self.ends.close()
        pair = {"certfile": "server.crt", "keyfile": "server.key"}
        files = {f"ssl_{key}": str(self.folder / name) for key, name in pair.items()}
        headers = [("date", formatdate(time.time() - self.late, usegmt=True))]
        clock = {"date_header": False, "headers": headers}
        address = self.ends.enter_context(serving(self.app, ws="none", **files, **clock))
        self.port = int(address.rpartition(":")[2])
        path = self.folder / "flower" / "config.toml"
        link = {"address": f"{HOST}:{self.port}", "root-certificates": str(self.folder / "ca.crt")}
        path.write_text(tomli_w.dumps({"superlink": {"default": "fed", "fed": link}}))

    def instead(self, treat: Callable[[socket.socket], object]) -> None:
        """The SuperLink's process does this with each connection."""
        self.ends.close()
        self.port = self.ends.enter_context(treating(treat))

    def of_user(self) -> str:
        """What a user is told; empty with a connection."""
        values: dict[str, Any] = {"address": f"{self.host}:{self.port}"}
        values |= {"root-certificates": self.roots} if self.roots else {}
        try:
            with SuperLink("fed", values).client() as client:
                client.ListRuns(ListRunsRequest())
        except SuperLinkError as error:
            return str(error)
        return ""

    def of_site(self) -> str:
        """What a site logs; empty with a connection."""
        key = self.site / "supernode.key"
        words = ["--superlink", f"{self.host}:{self.port}"]
        words += ["--root-certificates", self.roots] if self.roots else []
        words += ["--auth-supernode-private-key", str(key)]
        private = load_ssh_private_key(key.read_bytes(), None)
        errors = []

        def end(*_: object) -> None:
            errors.append(sys.exc_info()[1])

        self.patch.setattr(fleet_http_connection, "flwr_exit", end)
        roots = Path(self.roots).read_bytes() if self.roots else None
        given = words[1], False, roots, (private, private.public_key()), 0
        try:
            with fleet_http_connection.http_request_response(*given):
                pass
        except RuntimeError:  # it has not connected
            return site_fault(errors[0], words, self.reached)
        return ""


class Cause(NamedTuple):
    """What has happened, the sentence, and the remedy."""

    strike: Callable[[Scene], object]
    sentence: str
    cure: Callable[[Scene], object]


def ended(scene: Scene) -> None:
    """The certificates have ended a moment ago."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "YEARS", 0)
        renew_certificates(scene.folder)


def expire(scene: Scene) -> None:
    ended(scene)
    scene.take_ca()
    scene.start()


def renew(scene: Scene) -> None:
    invoke(federation_app, "renew", str(scene.folder))
    scene.take_ca()
    scene.start()


def expire_earlier(scene: Scene) -> None:
    """The coordinator has renewed, and the ca.crt here is the one before."""
    ended(scene)
    scene.take_ca()
    renew_certificates(scene.folder)
    scene.start()


def clock_ahead(scene: Scene) -> None:
    """By the SuperLink's clock, half an hour behind this machine's, the certificates are valid."""
    scene.late = 1800.0
    expire(scene)


def set_clock(scene: Scene) -> None:
    """Both clocks show a time at which the certificates are valid."""
    scene.late = 0.0
    renew_certificates(scene.folder)
    scene.take_ca()
    scene.start()


def another_ca(scene: Scene) -> None:
    scene.ca.write_bytes(new_authority("other").files().public)


def public(scene: Scene) -> None:
    """The certificate is one that every machine trusts."""
    scene.patch.setenv("SSL_CERT_FILE", str(scene.folder / "ca.crt"))
    another_ca(scene)


def omit_roots(scene: Scene) -> None:
    scene.roots = None


def give_roots(scene: Scene) -> None:
    scene.roots = str(scene.ca)


def by_address(scene: Scene) -> None:
    scene.host = "127.1"  # which is 127.0.0.1, and no name of the certificate's


def by_name(scene: Scene) -> None:
    scene.host = "nobody.invalid"


def by_own_address(scene: Scene) -> None:
    scene.host = HOST


def stop(scene: Scene) -> None:
    scene.ends.close()


REFUSED = r"a certificate that is refused \(.+\)"
SHARED = {
    "ended": Cause(
        expire, f"{REFUSED}; at the coordinator: fedapp federation renew FOLDER; then put .*", renew
    ),
    "ended here": Cause(
        expire_earlier,
        rf"{REFUSED}: \S+ca.crt is an earlier one; put the coordinator's .* in its place",
        Scene.take_ca,
    ),
    "clock": Cause(
        clock_ahead,
        f"{REFUSED}: this machine's clock is 1[78].. s ahead of the SuperLink's; set it, as .*",
        set_clock,
    ),
    "another CA": Cause(
        another_ca,
        rf"{REFUSED}: CN=\S+ CA has signed it, \S+ca.crt is of CN=other CA or .*; put the .* place",
        Scene.take_ca,
    ),
    "public CA": Cause(public, f"{REFUSED}; it is a public .*: omit the root .*", omit_roots),
    "no CA": Cause(omit_roots, f"{REFUSED}; give the coordinator's FOLDER/ca.crt .*", give_roots),
    "another host": Cause(
        by_address,
        f"{REFUSED}; its address must be one of the certificate's: 127.0.0.1, .*",
        by_own_address,
    ),
    "no host": Cause(
        by_name, r"no host of that name \(.+\): its address must be right", by_own_address
    ),
    "gone": Cause(
        stop, "no connection; at the coordinator: start-superlink.sh of FOLDER.*", Scene.start
    ),
    "starting": Cause(
        lambda scene: scene.instead(socket.socket.close),
        "a connection that ends without an answer: .*, or stopped; .*: start-superlink.sh of .*",
        Scene.start,
    ),
}


@pytest.fixture
def scene(tmp_path, write_table, monkeypatch):
    scene = Scene(tmp_path, str(write_table(n_rows=5)), monkeypatch)
    yield scene
    scene.ends.close()


@pytest.mark.parametrize("cause", SHARED)
def test_a_cause_has_its_sentence_and_the_remedy_cures(scene, cause):
    """For a user and for a site, and no other cause's sentence fits."""
    assert (scene.of_user(), cause) == ("", cause)
    SHARED[cause].strike(scene)
    for said, before in ((scene.of_user(), "must answer, got"), (scene.of_site(), "gives")):
        link, _, sentence = said.partition(f" {before} ")
        assert link.startswith("the SuperLink ")
        fits = [name for name, row in SHARED.items() if re.fullmatch(row.sentence, sentence)]
        assert (fits, sentence) == ([cause], sentence)
    SHARED[cause].cure(scene)
    assert scene.of_user() == ""


def test_a_superlink_that_hangs_is_to_be_ended_and_is_not_called_gone(scene):
    scene.instead(lambda connection: None)
    scene.patch.setattr(ControlHttpClient, "__init__", partialmethod(CONNECT, timeout=0.2))
    rule = "a connection without an answer: it is overloaded, or hangs; at .*: end its process, .*"
    assert re.search(f" must answer, got {rule}", scene.of_user())
    scene.start()
    assert scene.of_user() == ""


def registered(scene: Scene) -> None:
    """The coordinator has the site's key, and has registered it."""
    (scene.folder / "sites" / "bank.pub").write_bytes((scene.site / "bank.pub").read_bytes())
    invoke(federation_app, "add", str(scene.folder), "bank")


@pytest.mark.parametrize("interval", [connection.HEARTBEAT, 30], ids=["patched", "Flower's"])
def test_a_site_whose_key_is_not_known_is_told_whose_turn_it_is(scene, interval, monkeypatch):
    """New, connected, ended a moment ago, removed, and with a new key."""
    monkeypatch.setattr("flwr.supercore.heartbeat.HEARTBEAT_DEFAULT_INTERVAL", interval)
    last = rf"the SuperLink .* still has this site's last SuperNode, for {3 * interval} s at most"
    new = r".* does not know this site's key; at the coordinator: put \S+/bank/bank.pub into .*bank"
    removed = ".* does not know this site's key any more, .* here: fedapp site key --new supernode;"
    assert re.fullmatch(new, scene.of_site())
    registered(scene)
    assert scene.of_site() == ""
    invoke(federation_app, "remove", str(scene.folder), "bank")
    assert re.fullmatch(last, scene.of_site())
    for ago, said in ((2.5 * interval, last), (3.5 * interval, removed)):
        for path, seconds in ((scene.site / "supernode.key", 900.0), (scene.reached, ago)):
            os.utime(path, (time.time() - seconds,) * 2)
        assert re.match(said, scene.of_site())
    invoke(site_app, "key", "--new", "supernode", "--site", str(scene.site))
    assert re.fullmatch(new, scene.of_site())
    registered(scene)
    assert scene.of_site() == ""


@pytest.mark.parametrize("status", [500, 502, 503, 504, 404])
def test_a_refusal_at_a_site_is_a_sentence_by_its_code(tmp_path, status):
    for body in ("{}", "<center>nginx</center>"):
        response = httpx.Response(status, text=body)
        request = httpx.Request("POST", "https://fed")
        error = httpx.HTTPStatusError("what", request=request, response=response)
        said = site_fault(error, ["--superlink", "fed:9092"], tmp_path / REACHED)
        rule = {500: "must do as asked, got an internal error", 404: "answers what"}
        if body != "{}":
            rule[500] = "must answer behind its nginx, got nginx's internal error"
        rule = rule.get(status, "must answer behind its nginx, got nginx alone")
        assert said.startswith(f"the SuperLink at fed:9092 {rule}")


@pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # Alembic's
@pytest.mark.parametrize("is_database", [True, False])
def test_an_internal_error_is_cured_by_what_the_superlinks_log_says_of_it(
    is_database, tmp_path, write_table, monkeypatch, caplog
):
    path = tmp_path / "superlink.db"
    monkeypatch.setattr(main, "get_ee_linkstate_db", lambda: str(path))
    scene = Scene(tmp_path, str(write_table(n_rows=5)), monkeypatch)
    with scene.ends:
        assert scene.of_user() == ""
        if is_database:
            scene.app.state.linkstate_factory.state()._engine.dispose()
            kept = path.rename(f"{path}.kept")
            path.mkdir()
        else:
            scene.app.state.linkstate_factory = SimpleNamespace(state=object)
        monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
        for said in (scene.of_user(), scene.of_site()):
            assert re.search("an internal error: .* sqlite3, .* disk, or put FOLDER/.*; then", said)
        errors = [text for text in caplog.messages if text.startswith("[/v1/")]  # a SuperLink's
        assert ["sqlite3" in text for text in errors] == [is_database] * len(errors) != []
        if is_database:
            path.rmdir()
            kept.rename(path)
        scene.app = create_app()
        scene.start()
        assert scene.of_user() == ""
