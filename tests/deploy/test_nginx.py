"""nginx as `fedapp federation init` configures it, before a SuperLink: real processes of both."""

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import tomllib
from base64 import b64encode
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path

import pytest
import yaml
from flwr.proto.control_pb2 import ListRunsRequest, ListRunsResponse

from fedapp.commands.federation import federation_app
from fedapp.errors import ConfigError, RunFailedError
from fedapp.runs.flower import free_ports, run_superlink
from fedapp.runs.session import describe_engine
from tests.deploy_folders import init_federation, invoke

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
START_SECONDS = 120
pytestmark = pytest.mark.skipif(not NGINX, reason="needs nginx")


@dataclass(frozen=True)
class Coordinator:
    folder: Path
    sites: int
    users: int
    superlink: int

    def ask(self, port, path, body=b"", **headers):
        """Status and body of an answer."""
        given = {"content-type": "application/protobuf", "accept": "application/protobuf"}
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        connection = HTTPSConnection("localhost", port, context=context, timeout=START_SECONDS)
        with closing(connection):
            connection.request("POST", path, body, given | headers)
            response = connection.getresponse()
            return response.status, response.read()


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    """SuperLink and nginx by the commands of the compose file."""
    parent = tmp_path_factory.mktemp("nginx")
    sites, users, superlink = free_ports(3)
    options = ("--host", "localhost", "--target", "compose", "--public-port", str(sites))
    options += ("--users-port", str(users), "--port", str(superlink))
    folder, _ = init_federation(parent, *options)
    config = folder / "nginx.conf"
    config.write_text(config.read_text().replace(" /tmp/nginx", f" {parent}/nginx"))
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in the image
    with (parent / "log").open("wb") as log:
        processes = [
            subprocess.Popen(
                services[name]["command"],
                env={**os.environ, "PATH": path, **services[name].get("environment", {})},
                stdout=log,
                stderr=log,
                executable=NGINX if name == "nginx" else None,
            )
            for name in ("superlink", "nginx")
        ]
    try:
        deadline = time.monotonic() + START_SECONDS
        for port in (superlink, sites, users):
            while not is_open(port):
                assert time.monotonic() < deadline, (parent / "log").read_text()[-2000:]
                time.sleep(0.1)
        yield Coordinator(folder, sites, users, superlink)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def is_open(port):
    with socket.socket() as asking:
        return not asking.connect_ex(("127.0.0.1", port))


@pytest.fixture(scope="module")
def ann(coordinator):
    """A user's configuration of Flower, as TOML says it."""
    invoke(federation_app, "add", str(coordinator.folder), "--user", "ann")
    text = (coordinator.folder / "users" / "ann.toml").read_text()
    return tomllib.loads(text)["superlink"]["federation"]


def basic(link):
    userinfo, _, _ = link["address"].rpartition("@")
    return f"Basic {b64encode(userinfo.encode()).decode()}"


LIST = "/v1/control/list-runs"


def test_a_site_reaches_the_fleet_routes_without_a_password(coordinator):
    path = "/v1/fleet/pull-messages"
    status, body = coordinator.ask(coordinator.superlink, path)
    assert b"nginx" not in body
    assert coordinator.ask(coordinator.sites, path) == (status, body)


@pytest.mark.parametrize(
    "path",
    [
        LIST,
        "/v1/runtime/acquire-task",
        "/health",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/..%2fcontrol/list-runs",
        "//v1//control/list-runs",
    ],
)
def test_a_site_reaches_nothing_else(coordinator, ann, path):
    for headers in ({}, {"authorization": basic(ann)}):
        status, body = coordinator.ask(coordinator.sites, path, **headers)
        assert status == 403
        assert b"nginx" in body


def test_the_control_routes_alone_take_users_who_have_a_password(coordinator, ann):
    body = ListRunsRequest().SerializeToString()
    wrong = {"address": "ann:0@"}
    for headers in ({}, {"authorization": basic(wrong)}, {"authorization": "Bearer x"}):
        assert coordinator.ask(coordinator.users, LIST, body, **headers)[0] == 401
    given = {"authorization": basic(ann)}
    status, answer = coordinator.ask(coordinator.users, LIST, body, **given)
    assert status == coordinator.ask(coordinator.superlink, LIST, body)[0] == 200
    assert not ListRunsResponse.FromString(answer).run_dict
    for path in ("/v1/fleet/pull-messages", "/v1/runtime/acquire-task", "/"):
        assert coordinator.ask(coordinator.users, path, **given)[0] == 403


def test_flowers_own_command_speaks_to_the_superlink_as_a_user(coordinator, ann, tmp_path):
    shutil.copy(coordinator.folder / "users" / "ann.toml", tmp_path / "config.toml")
    listed = subprocess.run(
        [f"{Path(sys.executable).parent}/flwr", "list", "federation", "--format", "json"],
        env={**os.environ, "FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(listed.stdout)["success"], listed.stdout + listed.stderr


def test_a_run_by_a_user_with_a_wrong_password_is_refused_and_no_password_is_shown(
    coordinator, ann, tmp_path, monkeypatch, settings
):
    text = (coordinator.folder / "users" / "ann.toml").read_text()
    (tmp_path / "config.toml").write_text(text.replace(":", ":0", 1))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    rule = rf"at localhost:{coordinator.users} must know the user, .* federation add FOLDER --user"
    with pytest.raises(RunFailedError, match=rule) as caught:
        run_superlink(settings(), "federation")
    assert caught.value.log_lines == []
    place = f"the SuperLink at localhost:{coordinator.users}"
    assert describe_engine("federation") == f"engine federation: {place}"


def test_a_name_is_given_to_one_user_and_the_password_is_kept_by_its_hash_alone(coordinator, ann):
    with pytest.raises(ConfigError, match=r"name must be new, got ann"):
        invoke(federation_app, "add", str(coordinator.folder), "--user", "ann")
    password = ann["address"].rpartition("@")[0].partition(":")[2]
    assert len(bytes.fromhex(password)) == 32
    assert password not in (coordinator.folder / "nginx.users").read_text()
    assert (coordinator.folder / "users" / "ann.toml").stat().st_mode & 0o077 == 0
