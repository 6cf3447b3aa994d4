"""What Flower says when it fails, in a sentence of ours."""

import hashlib
import json
import os
import re
import socket
from base64 import b64encode
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
from flwr.common.constant import AuthnType
from flwr.proto.control_pb2 import (
    ListNodesResponse,
    ListRunsRequest,
    ListRunsResponse,
    StartRunResponse,
    StreamLogsResponse,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.run_pb2 import Run, RunStatus
from flwr.supercore.credential_store import file_credential_store, get_credential_store
from flwr.supercore.error import ApiErrorCode
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.errors import ConfigError, RunFailedError, without_passwords
from fedapp.report.progress import QUIET, Silent
from fedapp.run_folder import RunFolder, Stage
from fedapp.runs import flower as flower_runs
from fedapp.runs.flower import check_program, sentence_for
from fedapp.runs.local import run_local
from fedapp.site import certificates
from fedapp.site.bundle import installed_bundle
from fedapp.superlinks import SuperLink, SuperLinkError, find_superlink

CONFIG = """\
[superlink]
default = "local"

[superlink.local]
address = ":local:"

[superlink.hospitals]
address = "127.0.0.1:{port}"
insecure = true
"""


@pytest.fixture
def nobody(tmp_path, monkeypatch):
    """A port where nobody listens, and Flower's configuration of a SuperLink there."""
    (port,) = flower_runs.free_ports(1)
    (flower := tmp_path / "flower").mkdir()
    (flower / "config.toml").write_text(CONFIG.format(port=port))
    monkeypatch.setenv("FLWR_HOME", str(flower))
    return port


def asked_of(link):
    """The fault of a question to a SuperLink."""
    with pytest.raises(SuperLinkError) as caught, link.client() as client:
        client.ListRuns(ListRunsRequest())
    assert caught.value.log_lines == []
    return str(caught.value)


def test_a_superlink_that_is_gone_is_named_with_its_address(nobody, settings):
    rule = rf"^the SuperLink 'hospitals' at 127\.0\.0\.1:{nobody} must answer, got no connection; "
    with pytest.raises(RunFailedError, match=f"{rule}.*start-superlink.sh") as caught:
        flower_runs.run_superlink(settings(), "hospitals")
    assert caught.value.log_lines == []


@contextmanager
def answering(port, status, body=""):
    """A server that gives every question the same answer; yields how they were authorized."""
    authorized = list[str]()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            authorized.append(self.headers.get("authorization", ""))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Answer) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield authorized
        server.shutdown()
        thread.join()


LOST, INVALID, BROKEN = (
    json.dumps({"detail": text, **more})
    for text, more in (
        ("Run ID not found.", {"code": ApiErrorCode.RUN_ID_NOT_FOUND}),
        ("Invalid run config.", {"code": ApiErrorCode.INVALID_RUN_CONFIG, "extra": "x=1"}),
        ("Internal server error.", {}),
    )
)


@pytest.mark.parametrize(
    ("status", "body", "rule"),
    [
        (401, "<html>", "must know the user, "),
        (502, "<html>", "must answer behind its nginx, got nginx alone: .*start-superlink"),
        (500, BROKEN, "must do as asked, got an .* sqlite3, .*/superlink.db back; then, at "),
        (500, "<center>nginx</center>", "must answer .* nginx's internal error, .*nginx.users"),
        (503, "<html>", "must answer behind its nginx, got nginx alone"),
        (404, LOST, "must have the database that the run began with, .*, or run again$"),
        (412, INVALID, r"must do as asked, got 412: Invalid run config\. x=1$"),
    ],
)
def test_a_refusal_is_a_sentence_by_its_code_and_shows_no_password(nobody, status, body, rule):
    link = SuperLink("clinics", {"address": f"ann:s3cret@127.0.0.1:{nobody}", "insecure": True})
    with answering(nobody, status, body):
        fault = asked_of(link)
    assert re.match(f"the SuperLink 'clinics' at 127.0.0.1:{nobody} {rule}", fault)
    assert "s3cret" not in f"{fault}{link}"


READABLE = "the certificate of the SuperLink 'clinics' must be readable, got"
CONFIGURED = "superlink.clinics in Flower's configuration must be a SuperLink's, got"


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"root-certificates": __file__}, f"{READABLE} {__file__}$"),
        ({"address": 9093}, f"{CONFIGURED}: .*expected str"),
        ({"address": ":local:"}, f"{CONFIGURED} .*:local:$"),
    ],
)
def test_a_superlink_that_is_configured_wrongly_is_refused(values, rule):
    link = SuperLink("clinics", {"address": "127.0.0.1:9", **values})
    assert re.match(rule, asked_of(link))


def test_a_user_is_known_by_the_password_of_the_address_or_by_flowers_login(nobody, monkeypatch):
    """As nginx asks for it, and as `flwr login` keeps it."""
    path = Path(os.environ["FLWR_HOME"]) / "credentials.yaml"
    monkeypatch.setattr(file_credential_store, "CREDENTIAL_FILE_PATH", path)
    host = f"127.0.0.1:{nobody}"
    stored = {
        AUTHN_TYPE_STORE_KEY: AuthnType.OIDC.encode(),
        ACCESS_TOKEN_STORE_KEY: b"the-token",
        REFRESH_TOKEN_STORE_KEY: b"another",
    }
    with answering(nobody, 200) as authorized:
        for address in (host, f"ann:s3cret@{host}", host):
            link = SuperLink("clinics", {"address": address, "insecure": True})
            with link.client() as client:
                assert not client.ListRuns(ListRunsRequest()).run_dict
            for key, value in stored.items():
                get_credential_store().set(key % host, value)
    basic = b64encode(b"ann:s3cret").decode()
    assert authorized == ["", f"Basic {basic}", "Bearer the-token"]


def test_what_a_process_logs_and_a_program_that_is_not_installed_become_sentences(tmp_path):
    bind = "ERROR: [Errno 98] error while attempting to bind on address ('127.0.0.1', 9093): "
    in_use = "port 9093 of 127.0.0.1 must be free for Flower, got one in use; the same command "
    assert sentence_for(f"{bind}address already in use") == f"{in_use}takes another"
    assert sentence_for("Some other error of Flower's") == ""
    rule = "^flower-superlink must be installed beside Python .pip install 'flwr.simulation.'., "
    with pytest.raises(RunFailedError, match=rule):
        check_program({"PATH": str(tmp_path)}, "flower-superlink")


def test_an_engine_that_there_is_not_is_refused_at_once_with_those_there_are(
    nobody, tmp_path, own_folder
):
    known = f"local, simulation, hospitals, or another SuperLink in {tmp_path}/flower/config.toml"
    for engine, hint in (
        ("hospital", "did you mean hospitals?"),
        ("xyz", "a coordinator first sources its own: . FOLDER/env.sh"),
    ):
        error = CliRunner().invoke(cli, ["run", "pax", "--engine", engine]).exception
        assert isinstance(error, ConfigError)
        assert str(error) == f"engine must be {known}, got {engine!r}; {hint}"
    assert not Path("runs").exists()


class Told(Silent):
    """A watcher that keeps what it is shown."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def begin(self, doing, ends=False):
        self.texts.append(doing)

    tell = begin


LOST_RUN = SuperLinkError("no connection", True)
RUNNING = "running", *[""] * 8
NOT_STARTED = (
    "^the ServerApp must start within 600 s, the run is starting; .* flwr stop 7 hospitals$"
)
ASKED = {  # a run's statuses, "" is no answer; what comes of it, and how many texts are shown
    "restarted": ([*RUNNING, *RUNNING, flower_runs.COMPLETED], flower_runs.COMPLETED, 4),
    "silent for two minutes": (["running"], flower_runs.UNKNOWN, 2),
    "never started": (["pending", *["starting"] * 100], (RunFailedError, NOT_STARTED), 2),
    "lost": (["running", LOST_RUN], (SuperLinkError, "^no connection$"), 1),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_superlink_is_asked_again_until_its_run_is_given_up(case, monkeypatch):
    statuses, outcome, n_shown = ASKED[case]
    clock, left, watcher = [0.0], iter(statuses), Told()

    def status_of(run_id, link):
        status = next(left, "") or SuperLinkError("no connection")
        if isinstance(status, SuperLinkError):
            raise status
        return status, ""

    monkeypatch.setattr(flower_runs, "_status_of", status_of)

    def sleep(seconds):
        clock[0] += 10.0

    faked = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr(flower_runs, "time", faked)
    is_error = isinstance(outcome, tuple)
    with pytest.raises(outcome[0], match=outcome[1]) if is_error else nullcontext():
        status, _ = flower_runs._wait_for(7, SuperLink("hospitals", {}), None, watcher)
        assert status == outcome
    assert len(watcher.texts) == n_shown
    silent = "no connection; the SuperLink 'hospitals' gives no status of the run; it is asked "
    if case in ("restarted", "silent for two minutes"):
        assert watcher.texts[1] == f"{silent}again for 120 s"


def fault_where(port, treated):
    """The fault of a question to a server that does this with its connection."""
    with socket.create_server(("127.0.0.1", port)) as server:
        thread = Thread(target=lambda: treated(server.accept()[0]))
        thread.start()
        fault = asked_of(find_superlink("hospitals"))
        thread.join()
    return fault


def test_a_superlink_that_accepts_and_does_not_answer_is_not_called_gone(nobody):
    rule = f"the SuperLink 'hospitals' at 127.0.0.1:{nobody} must answer, got a connection that "
    fault = fault_where(nobody, socket.socket.close)
    assert fault.startswith(f"{rule}ends without an answer: it is starting,")


def test_a_run_that_its_superlink_has_lost_is_told_from_a_refusal(nobody):
    for body, has_lost_run in ((LOST, True), (BROKEN, False)):
        with answering(nobody, 404, body), pytest.raises(SuperLinkError) as caught:
            flower_runs._status_of(7, find_superlink("hospitals"))
        assert caught.value.has_lost_run == has_lost_run


class Answers:
    """A SuperLink that starts run 7, and gives its statuses, its log, and its sites."""

    name, host, authority = "hospitals", "fed:9093", "clinic CA"

    def __init__(self, *statuses, log="", sites=(), **values):
        self.statuses, self.log, self.sites, self.values = list(statuses), log, sites, values
        self.asked_for = None

    @contextmanager
    def client(self):
        yield self

    def StartRun(self, request):
        self.asked_for = request
        return StartRunResponse(run_id=7)

    def ListRuns(self, request):
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return ListRunsResponse(run_dict={7: Run(run_id=7, status=status)})

    def ListNodes(self, request):
        nodes = (
            NodeInfo(node_id=number, name=name, status=status)
            for number, (name, status) in enumerate(self.sites, 1)
        )
        return ListNodesResponse(nodes_info=nodes)

    def StreamLogs(self, request):
        if self.log:
            yield StreamLogsResponse(log_output=self.log)


ENDED = RunStatus(status="finished", sub_status="completed")
FAILED = RunStatus(status="finished", sub_status="failed")


KNOWN = ("bank", "online"), ("shop", "offline"), ("gone", "unregistered")
OTHERS = "must be that of the sites east, west, got one with the sites bank, shop .offline.; each "


@pytest.mark.parametrize(
    ("ours", "known", "ca", "rule"),
    [
        ({}, KNOWN, "", ""),
        ({"bank": 1, "new": 9}, KNOWN, "ca.crt", ""),
        ({"east": 8, "west": 3}, KNOWN, "ca.crt", f"^the SuperLink .* at fed:9093 {OTHERS}"),
        ({"east": 8, "west": 3}, KNOWN, "clinic/ca.crt", ""),
        ({"east": 8}, (), "ca.crt", ""),
    ],
    ids=["a user", "its coordinator", "another coordinator", "a coordinator as user", "a new one"],
)
def test_a_run_says_whose_superlink_it_is_and_begins_at_no_other_coordinators(
    nobody, settings, tmp_path, ours, known, ca, rule
):
    (tmp_path / "sites").mkdir()
    for name, number in ours.items():
        (tmp_path / "sites" / f"{name}.node").write_text(f"{number}\n")
    link = Answers(ENDED, sites=known, **{"root-certificates": f"{tmp_path}/{ca}"})
    watcher = Told()
    given = settings(run_dir=str(tmp_path / "run")), None, watcher
    with pytest.raises(SuperLinkError, match=rule) if rule else nullcontext():
        flower_runs._train_at(link, *given)
    sites = "the sites bank, shop (offline)" if known else "no sites"
    said = f"the SuperLink 'hospitals' at fed:9093, that 'clinic CA' certifies, with {sites}"
    assert watcher.texts[1:2] == ([] if rule else [said])
    assert (link.asked_for is None) == bool(rule)


def test_the_authority_of_a_superlink_is_that_of_its_certificate(tmp_path):
    (path := tmp_path / "ca.crt").write_bytes(certificates.new_authority("clinic").files().public)
    (tmp_path / "broken.crt").write_text("none")
    for name, authority in ((path, "clinic CA"), (tmp_path / "broken.crt", ""), ("gone", "")):
        assert SuperLink("hospitals", {"root-certificates": str(name)}).authority == authority
    assert SuperLink("hospitals", {}).authority == ""


TOLD = "2026-11-29T12:00:00.000Z INFO fed serverapp run=7: the run is in"
PARTYS = "2026-11-29T12:00:01.000Z WARNING fed serverapp run=7: bank: the run is in"


@pytest.mark.parametrize("is_here", [True, False])
def test_a_run_whose_folder_the_serverapp_chose_is_named_and_read_where_it_is(
    settings, tmp_path, monkeypatch, is_here
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "summary.json").write_text("{}")  # of another run
    place = tmp_path / "runs" / "20261129-pax"
    if is_here:
        place.mkdir(parents=True)
        (place / "summary.json").write_text("{}")
    watcher, names = (
        Told(),
        f"{TOLD} /before\n{TOLD} {place}\n{PARTYS} /elsewhere\nINFO : end",
    )
    for log, run_dir in ((names, place if is_here else None), ("", None)):
        link = Answers(ENDED, log=log)
        monkeypatch.setattr(flower_runs, "find_superlink", lambda name, link=link: link)
        folder = flower_runs.run_superlink(settings(run_dir=""), "hospitals", watcher)
        assert (folder and folder.path) == run_dir
    named = [text for text in watcher.texts if " is in " in text]
    assert named == [f"run 7 of the SuperLink 'hospitals' is in {place}"]


@pytest.mark.parametrize("status", ["failed", "completed"])
def test_a_run_that_has_written_its_results_has_not_failed(settings, tmp_path, status):
    """A SuperLink that is killed before it has noted a run's end calls the run failed."""
    link = Answers(RunStatus(status="finished", sub_status=status))
    run = settings(run_dir=str(tmp_path)), None, (watcher := Told())
    if status != "completed":
        with pytest.raises(RunFailedError, match=r"^Flower says finished:failed$"):
            flower_runs._train_at(link, *run)
    (tmp_path / "summary.json").write_text("{}")
    flower_runs._train_at(link, *run)
    said = f"Flower says finished:{status}, but the run has written its results"
    assert (said in watcher.texts) == (status != "completed")
    assert watcher.texts[0] == "handing the app to the SuperLink 'hospitals' at fed:9093"
    assert link.asked_for.fab.hash_str == installed_bundle()
    assert hashlib.sha256(link.asked_for.fab.content).hexdigest() == installed_bundle()


def test_a_serverapp_that_dies_without_a_word_is_named(monkeypatch, settings, tmp_path):
    folder, watcher = RunFolder(tmp_path / "run"), Told()
    killed = RunStatus(status="finished", sub_status="failed", details="killed by signal 9")
    link = Answers(RunStatus(status="running"), killed)
    list_runs = link.ListRuns

    def lists(request):
        with folder.written():  # and dies
            folder.note(Stage("growing trees", 0.0))
            assert not folder.has_died
        return list_runs(request)

    monkeypatch.setattr(link, "ListRuns", lists)
    rule = rf"^{flower_runs.DIED} \(Flower says finished:failed: killed by signal 9\)"
    with pytest.raises(RunFailedError, match=f"{rule}$"):
        flower_runs._train_at(link, settings(run_dir=str(folder.path)), None, watcher)
    assert f"{flower_runs.DIED}; waiting for Flower to end the run" in watcher.texts


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_run_that_fails_at_a_superlink_after_a_checkpoint_names_the_way_on(
    settings, tmp_path, is_saved
):
    """Whatever has ended it: a site, a signal, the ServerApp's death, or what only Flower knows."""
    folder, how = RunFolder(tmp_path), settings(run_dir=str(tmp_path))
    way_on = f"; resume={tmp_path} resumes the run" if is_saved else ""
    if is_saved:
        (tmp_path / "checkpoint").touch()
    for error, message, said in (
        ("PartyError", "bank (step 7): broke", r"bank \(step 7\): broke"),
        ("SystemExit", "", "the ServerApp was stopped"),
        ("", "", "Flower says finished:failed"),
    ):
        folder.forget_failure()
        if error:
            folder.write_failure(error, message)
        with pytest.raises(RunFailedError, match=f"^{said}{way_on}$"):
            flower_runs._train_at(Answers(FAILED), how, None, QUIET)


def test_a_failed_run_is_explained_by_its_log(settings, tmp_path):
    log = "ERROR : An exception occured!! The current node timed out during startup. This could\n"
    link, run = Answers(FAILED, log=log + "more\n" * 50), settings(run_dir=str(tmp_path))
    with pytest.raises(RunFailedError, match=r"^Ray must start within 15 s, .* --engine local, "):
        flower_runs._train_at(link, run, None, QUIET)


@pytest.mark.slow
def test_a_simulation_whose_process_takes_40_s_to_start_ends(tmp_path, monkeypatch, settings):
    """Flower's own SuperExec lets the task expire after 30 s and starts it again, for ever."""
    late = (
        "import sys, time\nif 'flwr-simulation' in ' '.join(sys.orig_argv):\n    time.sleep(40)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(late)
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), path))))
    run = flower_runs.run_simulation(settings(parties=2, run_dir=str(tmp_path / "late")))
    local = run_local(settings(parties=2, run_dir=str(tmp_path / "local")))
    assert (run.path / "model.json").read_bytes() == (local.path / "model.json").read_bytes()


def test_a_simulation_joins_no_cluster_that_it_was_not_given(monkeypatch):
    for given in ("", "head:6379"):
        monkeypatch.setenv("RAY_ADDRESS", given)
        if not given:
            monkeypatch.delenv("RAY_ADDRESS")
        assert flower_runs._environment()["RAY_ADDRESS"] == (given or "local")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no begin at http://ann:secret@tracking:5000/api", "no begin at http://tracking:5000/api"),
        ("supergrid (ann:se(c)ret@link:9093) is down", "supergrid (link:9093) is down"),
        ("https://token@host and https://other/a@b", "https://host and https://other/a@b"),
        ("write to ann@host (at once)", "write to ann@host (at once)"),
    ],
)
def test_addresses_are_shown_without_names_and_passwords(text, shown):
    assert without_passwords(text) == shown
