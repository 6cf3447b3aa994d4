"""What Flower says when it fails, in a sentence of ours."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.crypto import certificates
from fedapp.errors import ConfigError, RunFailedError, without_passwords
from fedapp.run_folder import RunFolder, Stage
from fedapp.runs import flower as flower_runs
from fedapp.runs.flower import check_programs, failed, sentence_for
from fedapp.runs.local import run_local

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


# In full, with what Flower prints today.


@pytest.mark.slow
def test_a_superlink_that_is_gone_is_named_with_its_address(nobody, settings):
    rule = rf"^the SuperLink 'hospitals' must answer at 127\.0\.0\.1:{nobody}, got no connection; "
    with pytest.raises(RunFailedError, match=f"{rule}.*start-superlink.sh$") as caught:
        flower_runs.run_superlink(settings(), "hospitals")
    assert caught.value.log_lines == []


@pytest.mark.slow
def test_a_superlink_that_flower_does_not_know_is_looked_for_in_env_sh(nobody, settings):
    rule = r"^engine must be a SuperLink in \S+/flower/config.toml, got 'clinics'; .*/env.sh$"
    with pytest.raises(RunFailedError, match=rule):
        flower_runs.run_superlink(settings(), "clinics")


@pytest.mark.slow
def test_a_port_in_use_is_named(monkeypatch, settings):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(flower_runs, "free_ports", lambda n: [port] * n)
        with pytest.raises(RunFailedError, match=rf"^port {port} of 127.0.0.1 must be free"):
            flower_runs.run_simulation(settings())


def test_an_nginx_whose_superlink_is_gone_is_named_and_no_password_is_printed():
    printed = (
        "Using SuperLink: hospitals (ann:s3cret@fed:9093)\n\nServer error '{0}' for url "
        "'https://ann:s3cret@fed:9093/v1/control/start-run'"
    )
    gone = failed(printed.format("502 Bad Gateway"), "hospitals", "no run")
    assert str(gone).startswith("the SuperLink 'hospitals' must answer behind fed:9093, got its")
    assert gone.log_lines == []
    other = failed(printed.format("500 Internal Server Error"), "hospitals", "no run")
    assert (str(other), other.log_lines) == (
        "no run",
        [
            "Using SuperLink: hospitals (fed:9093)",
            "",
            "Server error '500 Internal Server Error' for url "
            "'https://fed:9093/v1/control/start-run'",
        ],
    )


@pytest.mark.parametrize(
    ("printed", "rule"),
    [
        (
            "Using SuperLink: hospitals (127.0.0.1:9)\\n\\nFailed to read certificate file "
            "`/etc/ca.crt`: [Errno 2] No such file or directory: '/etc/ca.crt'\"}",
            "the certificate of the SuperLink 'hospitals' must be readable, got /etc/ca.crt",
        ),
        (
            "SuperLink connection 'hospitals' not found in the Flower configuration file (/a.toml)",
            "engine must be a SuperLink in /a.toml, got 'hospitals'; a coordinator first sources "
            "its own: . FOLDER/env.sh",
        ),
        (
            "ERROR: [Errno 98] error while attempting to bind on address ('127.0.0.1', 9093): "
            "address already in use",
            "port 9093 of 127.0.0.1 must be free for Flower, got one in use; the same command "
            "takes another",
        ),
        ("Some other error of Flower's", ""),
    ],
    ids=["no certificate", "no such SuperLink", "a port in use", "another error"],
)
def test_what_flower_prints_becomes_a_sentence_where_it_is_one_of_ours(printed, rule):
    assert sentence_for(printed, "hospitals") == rule


def test_a_program_that_is_not_installed_is_named(tmp_path):
    rule = "^flwr must be installed beside Python .pip install 'flwr.simulation.'., got none on the"
    with pytest.raises(RunFailedError, match=rule):
        check_programs({"PATH": str(tmp_path)}, "flwr")


@pytest.mark.parametrize(
    ("engine", "hint"),
    [
        ("simulator", "did you mean simulation?"),
        ("hospital", "did you mean hospitals?"),
        ("xyz", "a coordinator first sources its own: . FOLDER/env.sh"),
    ],
)
def test_an_engine_that_there_is_not_is_refused_at_once_with_those_there_are(
    nobody, engine, hint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(cli, ["run", "pax", "--engine", engine]).exception
    assert isinstance(error, ConfigError)
    known = f"local, simulation, hospitals, or another SuperLink in {tmp_path}/flower/config.toml"
    assert str(error) == f"engine must be {known}, got {engine!r}; {hint}"
    assert not (tmp_path / "runs").exists()


def asked(
    monkeypatch: pytest.MonkeyPatch,
    statuses: list[str],
    pause: float = 10.0,
    silence: str = "Connection refused",
) -> tuple[str, list[str]]:
    """What a run's status is found to be, and what is told meanwhile; "" is no answer."""
    clock, left = [0.0], iter(statuses)

    def flwr_list(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        status = next(left, "")
        runs = f'{{"runs": [{{"status": "{status}"}}]}}' if status else silence
        return subprocess.CompletedProcess(command, 0, runs, "")

    monkeypatch.setattr(flower_runs, "subprocess", SimpleNamespace(run=flwr_list))
    monkeypatch.setattr(flower_runs, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(flower_runs, "_pause", lambda *given: clock.append(clock.pop() + pause))
    told: list[str] = []
    status, _ = flower_runs._wait_for(
        "7", "hospitals", {}, None, lambda doing, ends=False: told.append(doing)
    )
    return status, told


def test_a_superlink_that_is_restarted_is_asked_again_and_the_run_is_not_called_unknown(
    monkeypatch,
):
    statuses = ["running", *[""] * 8, "running", *[""] * 8, "finished:completed"]
    status, told = asked(monkeypatch, statuses)
    assert status == "finished:completed"
    running = "the run is running, says Flower"
    silent = "the SuperLink 'hospitals' gives no status of the run; it is asked again for 120 s"
    assert told == [running, silent, running, silent]


def test_a_superlink_that_stays_silent_is_given_up_after_two_minutes(monkeypatch):
    status, told = asked(monkeypatch, ["running"])
    assert status == flower_runs.UNKNOWN
    assert len(told) == 2


def test_a_run_that_does_not_start_is_given_up_with_the_way_to_stop_it(monkeypatch):
    statuses = ["pending", *["starting"] * 99]
    rule = r"^the ServerApp must start within 600 s, the run is starting; .* flwr stop 7 hospitals$"
    with pytest.raises(RunFailedError, match=rule):
        asked(monkeypatch, statuses)
    assert asked(monkeypatch, [*statuses[:50], "finished:completed"])[0] == flower_runs.COMPLETED


def test_a_superlink_that_accepts_and_does_not_answer_is_not_called_gone(nobody, monkeypatch):
    monkeypatch.setattr("fedapp.runs.superlinks.LONGEST_HANDSHAKE", 0.2)
    config = Path(os.environ["FLWR_HOME"]) / "config.toml"
    config.write_text(CONFIG.format(port=nobody).replace("insecure = true", ""))
    printed = f"Using SuperLink: hospitals (127.0.0.1:{nobody})\nConnection to the SuperLink is "
    rule = f"the SuperLink 'hospitals' must answer at 127.0.0.1:{nobody}, got "
    with socket.create_server(("127.0.0.1", nobody)):
        got = sentence_for(f"{printed}unavailable", "hospitals")
        assert got.startswith(f"{rule}a connection without an answer: it is starting, stopped or")
    assert sentence_for(f"{printed}unavailable", "hospitals").startswith(f"{rule}no connection; ")


@pytest.mark.parametrize("fault", ["certificate has expired", "self-signed certificate"])
def test_a_superlink_whose_certificate_is_refused_is_named_with_the_reason(
    nobody, fault, tmp_path, monkeypatch
):
    if "expired" in fault:
        monkeypatch.setattr(certificates, "YEARS", -1)
        monkeypatch.setattr(certificates, "CLOCK_SKEW", timedelta(days=400))
    authority = certificates.new_authority("clinic")
    server = certificates.server_certificate(authority, ["127.0.0.1"])
    files = {"ca.crt": authority.files().public, "pair.pem": server.secret + server.public}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    link = f'root-certificates = "{tmp_path}/ca.crt"' if "expired" in fault else ""
    config = CONFIG.format(port=nobody).replace("insecure = true", link)
    (Path(os.environ["FLWR_HOME"]) / "config.toml").write_text(config)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair.pem")
    printed = f"Using SuperLink: hospitals (127.0.0.1:{nobody})\nConnection to the SuperLink is "
    with socket.create_server(("127.0.0.1", nobody)) as server_socket:

        def refuse() -> None:
            with suppress(OSError), context.wrap_socket(server_socket.accept()[0], True):
                pass

        (thread := Thread(target=refuse)).start()
        got = sentence_for(f"{printed}unavailable", "hospitals")
        thread.join()
    assert "a certificate that is refused (" in got
    assert got.endswith("; at the coordinator: fedapp federation renew FOLDER")
    assert ("certificate has expired" in got) == ("expired" in fault)


PRINTED = "Using SuperLink: hospitals (fed:9093)\\n Displaying ...\\n\\n"


def test_a_superlink_that_has_lost_its_database_ends_the_command_at_once(monkeypatch):
    lost = f'{{"error-message": "{PRINTED}[code: 16] Run ID not found."}}'
    rule = "^the SuperLink 'hospitals' at fed:9093 must have the database that the run began with, "
    with pytest.raises(RunFailedError, match=rule):
        asked(monkeypatch, ["running"], silence=lost)


def test_a_superlink_that_cannot_use_its_database_is_told_of_at_once_and_asked_again(monkeypatch):
    broken = f'{{"error-message": "{PRINTED}Internal server error."}}'
    statuses = ["running", "", "running", "finished:completed"]
    status, told = asked(monkeypatch, statuses, silence=broken)
    assert (status, len(told)) == ("finished:completed", 3)
    assert told[1].startswith("the SuperLink 'hospitals' at fed:9093 must be able to use its data")
    assert flower_runs.STATUS_POLL_SECONDS + 2 < 10  # a question takes 2 s


@pytest.mark.parametrize(
    ("device", "n_gpus", "n_cores", "share"),
    [("cpu", 1, 4, 0.0), ("cuda", 0, 4, 0.0), ("cuda", 1, 3, 0.3333), ("cuda", 4, 2, 1.0)],
)
def test_actors_share_the_gpus_where_a_run_asks_for_them(
    monkeypatch, settings, device, n_gpus, n_cores, share
):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(flower_runs, "n_cores", lambda: n_cores)
    run = settings(strategy="fedxgbllr", fedxgbllr__device=device)
    assert flower_runs._gpus_of_actor(run) == share


@pytest.mark.parametrize("status", ["finished:failed", "finished:completed"])
def test_a_run_that_has_written_its_results_has_not_failed(monkeypatch, settings, tmp_path, status):
    """A SuperLink that is killed before it has noted a run's end calls the run failed."""

    def flwr(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        answer = {"run": '{"run-id": "7"}', "list": f'{{"runs": [{{"status": "{status}"}}]}}'}
        return subprocess.CompletedProcess(command, 0, answer.get(command[1], ""), "")

    monkeypatch.setattr(flower_runs.subprocess, "run", flwr)
    asked_for, told = settings(run_dir=str(tmp_path)), list[str]()
    run = ("hospitals", {}, {}, lambda doing, ends=False: told.append(doing))
    if not status.endswith("completed"):
        with pytest.raises(RunFailedError, match=r"^Flower says finished:failed$"):
            flower_runs._flwr_run(asked_for, *run)
    (tmp_path / "summary.json").write_text("{}")
    flower_runs._flwr_run(asked_for, *run)
    said = f"Flower says {status}, but the run has written its results"
    assert (said in told) == (status != flower_runs.COMPLETED)


def test_a_serverapp_that_dies_without_a_word_is_named_with_the_way_to_resume(
    monkeypatch, settings, tmp_path
):
    folder, told = RunFolder(tmp_path / "run"), list[str]()
    failed = {"status": "finished:failed", "status-details": "killed by signal 9"}
    statuses = iter([{"status": "running"}, failed])

    def flwr(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        if command[1] == "run":
            return subprocess.CompletedProcess(command, 0, '{"run-id": "7"}', "")
        with folder.written():  # and dies
            folder.note(Stage("growing trees", 0.0))
            assert not folder.has_died
        answer = {"runs": [next(statuses, failed)]}
        return subprocess.CompletedProcess(command, 0, json.dumps(answer), "")

    monkeypatch.setattr(flower_runs.subprocess, "run", flwr)
    asked_for = settings(run_dir=str(folder.path))
    rule = rf"^{flower_runs.DIED} \(Flower says finished:failed: killed by signal 9\); -c resume="
    with pytest.raises(RunFailedError, match=rf"{rule}{folder.path} resumes the run$"):
        flower_runs._flwr_run(
            asked_for, "hospitals", {}, {}, lambda doing, ends=False: told.append(doing)
        )
    assert f"{flower_runs.DIED}; waiting for Flower to end the run" in told


@pytest.mark.slow
def test_a_failed_run_is_explained_by_its_log(monkeypatch, settings, tmp_path):
    log = "ERROR : An exception occured!! The current node timed out during startup. This could\n"

    def flwr(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        status = '{"runs": [{"status": "finished:failed"}]}'
        answer = {"run": '{"run-id": "7"}', "list": status, "log": log + "more\n" * 50}
        return subprocess.CompletedProcess(command, 0, answer[command[1]], "")

    monkeypatch.setattr(flower_runs.subprocess, "run", flwr)
    run = (settings(run_dir=str(tmp_path)), "local", {}, {})
    with pytest.raises(RunFailedError, match=r"^Ray must start within 15 s, .* --engine local, "):
        flower_runs._flwr_run(*run, lambda doing, ends=False: None)


@pytest.mark.slow
def test_a_ray_that_cannot_start_is_named(tmp_path, monkeypatch, settings):
    late = "import sys, time\nif 'ray/dashboard/agent.py' in ' '.join(sys.orig_argv):\n"
    (tmp_path / "sitecustomize.py").write_text(f"{late}    time.sleep(40)\n")
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), path))))
    with pytest.raises(RunFailedError, match=r"^Ray must start within 15 s, got a machine too "):
        flower_runs.run_simulation(settings(parties=2))


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


@pytest.mark.parametrize("writes", [False, True])
def test_bytecode_of_a_simulation_is_compiled_once(tmp_path, writes):
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
            patch.delenv(name, raising=False)
        patch.setattr(flower_runs.sys, "dont_write_bytecode", not writes)
        patch.setenv("FEDAPP_HOME", str(tmp_path))
        changed = flower_runs._environment()
        environment |= {name: changed[name] for name in changed if name.startswith("PYTHON")}
    (source := tmp_path / "module.py").write_text("")
    subprocess.run(
        [sys.executable, "-c", "import module"], cwd=tmp_path, env=environment, check=True
    )
    cached = [path.name for path in (tmp_path / "flower" / "bytecode").rglob("module.*.pyc")]
    assert len(cached) == (not writes)
    assert (source.parent / "__pycache__").exists() == writes


def test_a_simulation_joins_no_cluster_that_it_was_not_given(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert flower_runs._environment()["RAY_ADDRESS"] == "local"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert flower_runs._environment()["RAY_ADDRESS"] == "head:6379"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no begin at http://ann:secret@tracking:5000/api", "no begin at http://tracking:5000/api"),
        ("supergrid (ann:se(c)ret@link:9093) is down", "supergrid (link:9093) is down"),
        ("https://token@host and https://other/a@b", "https://host and https://other/a@b"),
        ("write to ann@host (at once)", "write to ann@host (at once)"),
    ],
)
def test_addresses_are_shown_without_names_and_passwords(text: str, shown: str) -> None:
    assert without_passwords(text) == shown
