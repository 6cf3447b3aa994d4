"""What the exporter shows Prometheus of a coordinator's and a site's files."""

import os
import re
import ssl
import subprocess
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from flwr.app import Message, RecordDict
from flwr.supercore.routers import health as flowers
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.deploy.exporter import METRICS, SiteLog, registry_of_folders
from fedapp.deploy.health import ALIVE, REACHED, STALE, health
from fedapp.errors import ConfigError
from fedapp.home import home
from fedapp.run_folder import RunFolder, Stage
from fedapp.runs.local import LocalGrid, run_local, site_contexts
from fedapp.site.certificates import YEARS, days_left, validity, warn_of_expiry
from fedapp.site.log import LOG, append, drop_old
from tests.deploy_folders import init_federation
from tests.site.office import set_clock


def page(runs):
    """What Prometheus reads: values by name and labels."""
    text, values = generate_latest(registry_of_folders([runs])).decode(), dict[str, float]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            values[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return values


def test_a_finished_run_is_shown_as_its_summary_has_it(settings, tmp_path):
    run = run_local(settings(num_boost_round=1, run_dir=str(tmp_path / "runs" / "first")))
    found, summary = page(tmp_path / "runs"), run.summary
    assert found['fedapp_run_exchanges_total{run="first"}'] == summary["exchanges"]
    for direction, key in (("to_party", "to_parties"), ("to_server", "to_server")):
        sizes = [n for name, n in found.items() if f'direction="{direction}"' in name]
        assert sum(sizes) == summary["bytes"][key]
    assert found['fedapp_run_state{run="first",state="finished"}'] == 1
    assert found['fedapp_run_seconds{run="first"}'] >= 0


def test_a_run_names_whom_it_waits_for_and_its_error_without_a_word_of_it(tmp_path):
    run = RunFolder(tmp_path / "runs" / "first")
    run.path.mkdir(parents=True)
    (run.path / "config.toml").touch()
    run.note(Stage("growing trees; waiting for bank", 0.0, waiting=["bank"]))
    waiting = 'fedapp_run_waiting{party="bank",run="first"}'
    with run.written():
        found = page(tmp_path / "runs")
        assert found['fedapp_run_state{run="first",state="running"}'] == 1
        assert found[waiting] == 1
    run.write_json("failure.json", {"error": "PartyError", "message": "bank: a secret"})
    found = page(tmp_path / "runs")
    assert waiting not in found
    assert found['fedapp_run_failed{error="PartyError",run="first"}'] == 1
    assert "secret" not in str(found)


def test_a_sites_answers_and_refusals_are_counted_with_their_bytes(tmp_path):
    node = {"name": "bank", "data": str(tmp_path / "rows.csv")}
    grid = LocalGrid(site_contexts([node]))
    for _ in range(2):
        grid.send_and_receive([Message(RecordDict(), 2, "query.nothing")])
    grid.close()
    path = home() / "sites" / "bank" / LOG
    with path.open("a") as file:
        file.write('{"time": 1')  # what is half written is not read yet
    found = page(tmp_path / "runs")
    assert found['fedapp_site_answers_total{outcome="refused",site="bank"}'] == 2
    assert found['fedapp_site_bytes_total{direction="sent",site="bank"}'] == 0
    assert found['fedapp_site_seconds_total{site="bank"}'] > 0
    assert path.stat().st_mode & 0o077 == 0


def test_lines_are_counted_once_also_where_old_ones_have_gone_or_files_are_closed(monkeypatch):
    folder, now = home() / "sites" / "bank", time.time()
    collector = SiteLog(folder / LOG)
    for age in (9, 8, 1):
        set_clock(monkeypatch, now - age * 24 * 60 * 60)
        append(folder, "repeated", received=1, sent=2)
        assert collector.read()["answers", "answered"] == 10 - age - (age == 1) * 6
    drop_old(folder, 3)
    append(folder, "answered", seconds=0.5, received=1, sent=2)
    append(folder, "score", outcome="answered")
    assert collector.read()["answers", "answered"] == 4
    assert collector.read()["bytes", "sent"] == 8
    assert SiteLog(folder / LOG).read()["answers", "answered"] == 2
    monkeypatch.setattr("fedapp.site.log.CLOSED_BYTES", 180)
    for number in range(5, 12):
        append(folder, "repeated", received=1, sent=2)
        if number != 8:
            assert collector.read()["answers", "answered"] == number
    assert SiteLog(folder / LOG).read()["bytes", "sent"] == 18


def test_certificates_are_counted_down_and_warned_of(tmp_path, monkeypatch, caplog):
    folder, _ = init_federation(tmp_path)
    monkeypatch.setenv("FEDAPP_HOME", str(folder / "home"))
    found = page(tmp_path / "runs")
    for name in ("ca.crt", "server.crt"):
        days = found[f'fedapp_certificate_days{{file="{name}"}}']
        assert 365 * YEARS - 1 < days < 365 * YEARS + 1
    words = ["--ssl-certfile", str(folder / "server.crt"), "--port", "1"]
    warn_of_expiry(words)
    assert not caplog.messages
    monkeypatch.setattr("fedapp.site.certificates.WARNED_DAYS", 365 * YEARS + 1)
    warn_of_expiry(words)
    assert [text.partition(";")[2] for text in caplog.messages] == [
        " the coordinator renews it (fedapp federation renew), and gives ca.crt to every site"
    ]
    assert validity(folder / "ca.crt").startswith("ca.crt ends in 182")
    (folder / "ca.crt").write_text("a certificate")
    with pytest.raises(ConfigError, match=r"ca\.crt must be a PEM certificate"):
        days_left(folder / "ca.crt")


@pytest.mark.parametrize(
    ("place", "metric", "event"),
    [
        (f"home/{ALIVE}", "fedapp_superexec_idle_seconds", "a task was asked for"),
        (f"flower/{REACHED}", "fedapp_superlink_reached_seconds", "the SuperLink was reached"),
    ],
    ids=["SuperExec", "SuperNode"],
)
def test_a_process_is_alive_while_it_touches_its_file(tmp_path, monkeypatch, place, metric, event):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    path = tmp_path / place
    assert health(str(path)) == (False, f"{event} never")
    path.parent.mkdir(exist_ok=True)
    path.touch()
    now = path.stat().st_mtime
    for seconds, is_alive in ((0, True), (STALE + 60, False)):
        os.utime(path, (now - seconds, now - seconds))
        is_healthy, sentence = health(str(path))
        assert is_healthy == is_alive
        assert re.fullmatch(rf"{event} \d+ s ago" + ", not since" * (not is_alive), sentence)
    assert page(tmp_path)[metric] > STALE


def test_a_server_is_alive_while_it_answers_by_its_certificate(tmp_path, monkeypatch):
    folder, _ = init_federation(tmp_path)
    (tmp_path / "health").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    ca, context = str(folder / "ca.crt"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"https://localhost:{server.server_port}"
        for url in (place, f"{place}/health"):
            assert health(url, ca) == (True, f"{place}/health answers 200")
        assert "404" in health(f"{place}/nowhere", ca)[1]
        assert "CERTIFICATE_VERIFY_FAILED" in health(place)[1]  # by the system's certificates
        server.shutdown()
    is_healthy, sentence = health(place, ca)
    assert (is_healthy, "refused" in sentence) == (False, True)
    routes = [route for route in flowers.router.routes if isinstance(route, APIRoute)]
    assert {route.path for route in routes} == {"/health"}  # where Flower answers


def test_no_label_holds_a_row_or_an_id():
    labels = {label for _, names in METRICS.values() for label in names}
    assert labels == {*("file", "run", "state", "party", "direction", "error", "site", "outcome")}


@pytest.mark.parametrize(
    ("way", "rule"),
    [
        ("--metrics", r"for fedapp serve --metrics \(pip install 'fedapp\[metrics\]'\)"),
        ("--site=site.toml", r"for standing scores \(pip install 'fedapp\[serve\]'\)"),
    ],
)
@pytest.mark.usefixtures("own_folder")
def test_without_prometheus_client_the_command_says_what_to_install(monkeypatch, way, rule):
    Path("site.toml").touch()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    error = CliRunner().invoke(cli, ["serve", way]).exception
    with pytest.raises(ConfigError, match=f"^prometheus-client must be installed {rule}"):
        raise error


@pytest.mark.parametrize(
    ("module", "more"),
    [("deploy.supernode", {"numpy"}), ("deploy.superlink", {"numpy"}), ("messages.fields", set())],
)
def test_a_process_that_stays_up_loads_no_tables_and_no_compiler_of_its_own(module, more):
    code = f"import fedapp.{module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numba", "pyarrow", "pandas", *more} & set(done.stdout.split())
