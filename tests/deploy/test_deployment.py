"""Real processes on the loopback: TLS, node authentication, a table at each of three sites."""

import csv
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version
from unittest.mock import patch

import psutil
import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.commands.federation import federation_app
from fedapp.commands.site import site_app
from fedapp.errors import ConfigError
from fedapp.home import home
from fedapp.records.document import to_text
from fedapp.run_folder import RunFolder
from fedapp.runs.flower import free_ports, log_of
from fedapp.site.certificates import new_authority
from fedapp.site.log import Audit
from fedapp.site.store import PART_FILE
from fedapp.superlinks import find_superlink
from fedapp.trees.divided import DividedModel
from simulations.bench import faults
from simulations.bench.faults_of_runs import ROUND, START
from simulations.deployment import (
    RUN_SECONDS,
    STOP_SECONDS,
    SUPEREXEC,
    WORKER,
    flower_with,
    settings_of,
    wait_for_output,
)
from strategies.handshake import registered_sites
from tests.deploy_folders import invoke
from tests.deployed import (
    CLASSES,
    CUSTOMER,
    PAX,
    SITES,
    local_pax,
    model_in,
    no_secret_is_at_the_coordinator,
    same_columns,
    same_rows,
    started,
    use_tables,
    wait_for_line,
)
from tests.forests import without_salt
from tests.tables import write_rows

SECUREBOOST = {
    "num-boost-round": 1,
    "max-depth": 2,
    "max-bin": 8,
    "parties": 3,
    "secureboost.key-bits": 512,
    "secureboost.insecure-small-key": "true",
}
# All columns at each node: which ones are drawn there is no affair of the run's seed.
FOREST = {
    "parties": 3,
    "align": "ordered",
    "max-bin": 8,
    "federated-forest.trees": 3,
    "federated-forest.max-depth": 1,
    "federated-forest.max-features": "all",
}
EINI = {"eini.key-bits": 512, "eini.insecure-small-key": "true", "eini.unguarded": "true"}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with started(tmp_path_factory.mktemp("deployment")) as deployment:
        yield deployment
        no_secret_is_at_the_coordinator(deployment)


def begun(deployment, method, run_dir, settings):
    given = settings_of({**settings, "run-dir": run_dir})
    return deployment.begin("run", method, "--engine", "federation", *given)


# What is said before anything starts


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (
            "federation --data new.csv",
            r"^--data must be omitted with --engine federation: the sites' node configs name the "
            r"tables \(predict-data\), got new\.csv$",
        ),
        (
            "federation --output out.csv",
            r"^--output must be omitted with --engine federation: .*, got out\.csv$",
        ),
        ("local --output out.csv", "^--data must name a file, got none$"),
        ("local --data new.csv", "^--output must name a file, got none$"),
        ("federation", "^engine must be local for a model that is whole in the run's folder, got"),
        (
            "federation --inference fast",
            "^inference must be one of eini, interactive, one-round, got 'fast'$",
        ),
    ],
)
def test_a_prediction_that_cannot_be_made_says_why(tmp_path, given, rule):
    parts = DividedModel("secureboost", "0123456789abcdef", "binary:logistic", "bank", ("shop",))
    (tmp_path / "model.json").write_text("{}" if given == "federation" else to_text(parts))
    command = ["predict", str(tmp_path), "--engine", *given.split()]
    error = CliRunner().invoke(cli, command).exception
    assert isinstance(error, ConfigError)
    assert re.search(rule, str(error))


# A site that is stopped


def test_a_site_that_is_stopped_while_it_compiles_leaves_no_process_and_no_file(tmp_path):
    own = {name: tmp_path / name for name in ("TMPDIR", "NUMBA_CACHE_DIR", "FEDAPP_HOME")}
    own["TMPDIR"].mkdir()
    environment = {**os.environ, **{name: str(path) for name, path in own.items()}}
    superexec = psutil.Popen([sys.executable, "-P", "-m", SUPEREXEC], env=environment)
    while not list(own["TMPDIR"].glob("*/*.csv")):
        assert superexec.poll() is None
        time.sleep(0.02)
    (compiling,) = superexec.children()
    superexec.terminate()  # as systemd, a script or Docker does
    superexec.wait(STOP_SECONDS)
    compiling.wait(STOP_SECONDS)
    assert [*own["TMPDIR"].iterdir(), *own["NUMBA_CACHE_DIR"].rglob("complete")] == []


# Sites that join, leave, or have a new key


def shown_sites(deployment):
    """What ``fedapp federation list`` shows, by name."""
    words = ["list", str(deployment.coordinator), "--json"]
    document = json.loads(CliRunner().invoke(federation_app, words).stdout)
    assert not document["fault"]
    return {site["name"]: site for site in document["sites"]}


@pytest.mark.slow
def test_sites_and_keys_and_certificates_change_and_the_model_is_the_same(tmp_path):
    settings = {**PAX, "num-boost-round": 12, "resend-after": 15}
    (tmp_path / "life").mkdir()
    with started(tmp_path / "life") as deployment:
        folder = deployment.coordinator
        local = deployment.locally(tmp_path / "local", {**settings, "strategy": "pax"})
        host, _, port = deployment.superlink.rpartition(":")
        presented = partial(  # what a site sees that has the first ``ca.crt``
            ssl.get_server_certificate,
            (host, int(port)),
            ca_certs=str(deployment.folder / "bank" / "ca.crt"),
            timeout=RUN_SECONDS,
        )

        # During a run a fourth site joins, and the certificates are renewed.
        run = begun(deployment, "pax", tmp_path / "across", settings)
        while (stage := RunFolder(tmp_path / "across").stage) is None or not stage.round:
            assert run.poll() is None
            time.sleep(0.05)
        before = presented()
        assert "the SuperLink starts again" in invoke(federation_app, "renew", str(folder))
        (deployment.ports["late"],) = free_ports(1)
        deployment.add_site("late", same_columns(tmp_path)["shop"])
        shutil.copy(deployment.folder / "late" / "late.pub", folder / "sites")
        deployment.register()
        deployment.start("late")
        wait_for_output(run)
        assert model_in(tmp_path / "across") == model_in(local.path)
        assert presented() == (folder / "server.crt").read_text() != before
        wait_for_line(deployment, "late", "SuperNode ID:")
        assert shown_sites(deployment)["late"]["status"] == "online"

        # The fourth site leaves, whose key stays out, and another one has a new key.
        invoke(federation_app, "remove", str(folder), "late")
        place, removed = folder / "sites" / "late.pub", folder / "sites" / "late.pub.removed"
        for key, rule in (
            (removed.read_bytes(), r"late\.pub must be a new key, got one that was removed"),
            ((folder / "sites" / "bank.pub").read_bytes(), r"must be the key of late, got that of"),
        ):
            place.write_bytes(key)
            with pytest.raises(ConfigError, match=rule):
                invoke(federation_app, "add", str(folder), "late")
        invoke(federation_app, "remove", str(folder), "late")
        invoke(site_app, "key", "--new", "supernode", "--site", str(deployment.folder / "bank"))
        shutil.copy(deployment.folder / "bank" / "bank.pub", folder / "sites")
        invoke(federation_app, "add", str(folder), "bank")
        deployment.stop("bank", "late")
        size = deployment.log("late").stat().st_size
        deployment.start("bank", "late")
        wait_for_line(deployment, "late", "does not know this site's key any more", size)
        again = begun(deployment, "pax", tmp_path / "again", settings)
        wait_for_output(again)
        assert model_in(tmp_path / "again") == model_in(local.path)
        assert shown_sites(deployment).keys() == {*SITES}


# The same columns


@pytest.mark.slow
def test_pax_across_sites_is_the_model_of_the_local_engine_and_secrets_stay_at_the_sites(
    deployment, tmp_path
):
    expected = local_pax(deployment, tmp_path / "local")
    before = {name: deployment.log(name).stat().st_size for name in ("coordinator", *SITES)}
    wait_for_output(begun(deployment, "pax", tmp_path / "across", PAX))
    assert model_in(tmp_path / "across") == expected
    assert not any(deployment.process(name, WORKER) for name in SITES)
    known = registered_sites(deployment.coordinator / "flower")
    assert sorted(known.values()) == sorted(SITES)
    summary = json.loads((tmp_path / "across" / "summary.json").read_text())
    for name in SITES:
        audit = Audit.of_site(deployment.home(name) / "sites" / name)
        events = [line["event"] for _, line in audit]
        audit.check()
        assert events.count("answered") >= summary["exchanges"]
        assert events.count("ended") >= 1
    for name, size in before.items():
        lines = deployment.log(name).read_bytes()[size:].decode().splitlines()
        form = rf"\S+Z (DEBUG|INFO|WARNING|ERROR) {name} \w+( run=\d+)?: |    |$"
        assert not [line for line in lines if not re.match(form, line)]
        # What is said of each message is shown at DEBUG alone.
        shown = "\n".join(line for line in lines if " DEBUG " not in line)
        assert "[RUN" not in shown
        assert "PushMessages" not in shown
    no_secret_is_at_the_coordinator(deployment, tmp_path / "across")


@pytest.mark.slow
def test_a_site_whose_flower_lacks_a_patch_is_named_at_once_and_the_model_is_the_same(
    deployment, tmp_path
):
    settings = {**PAX, "num-boost-round": 1}
    use_tables(deployment, same_columns(deployment.folder))
    local = deployment.locally(tmp_path / "local", {**settings, "strategy": "pax"})
    deployment.stop("shop")
    launch = "supercore/superexec/plugin/base_exec_plugin.py", "if task_type is None:"
    changed = flower_with(tmp_path, *launch, "if not task_type:")
    try:
        with patch.dict(os.environ, PYTHONPATH=changed):
            deployment.start("shop")
        shown = wait_for_output(begun(deployment, "pax", tmp_path / "across", settings))
    finally:
        deployment.stop("shop")
        deployment.start("shop")
    assert model_in(tmp_path / "across") == model_in(local.path)
    warnings = RunFolder(tmp_path / "across").summary["warnings"]
    (warning,) = (text for text in warnings if "flwr" in text)
    lacks = rf"shop: flwr {version('flwr')}: .*launch_task differs; .* times as long"
    assert re.match(lacks, warning)
    assert "shop: flwr " in (tmp_path / "across" / "report.html").read_text()
    assert f"! {warning}" in shown[: shown.index("round 1/1")]
    (run_id,) = set(re.findall(r"waiting for Flower to start run (\d+)", shown))
    with patch.dict(os.environ, FLWR_HOME=str(deployment.coordinator / "flower")):
        log = log_of(int(run_id), find_superlink("federation"))
    assert len(re.findall(rf"WARNING .*: {re.escape(warning)}$", log, re.MULTILINE)) == 1
    assert f"the run is in {tmp_path / 'across'}" in log


SAME_COLUMNS = {
    "fedxgbllr": {
        "fedxgbllr.trees": 3,
        "fedxgbllr.max-depth": 2,
        "fedxgbllr.rounds": 1,
        "fedxgbllr.epochs": 2,
    },
    "bagging": {"num-boost-round": 2, "max-depth": 2, "subsample": 0.7},
    "cyclic": {"num-boost-round": 3, "max-depth": 2},
    "fedavg-linear": {"fedavg-linear.rounds": 2},
    "horizontal-forest": {"horizontal-forest.trees": 3, "horizontal-forest.max-depth": 2},
    "pax": {"num-boost-round": 2, "max-depth": 1, "pax.aggregation": "secure"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "given"), SAME_COLUMNS.items(), ids=SAME_COLUMNS)
def test_a_method_across_sites_makes_the_model_of_the_local_engine_and_predicts(
    deployment, tmp_path, method, given
):
    nodes = same_columns(deployment.folder)
    if method == "pax":
        nodes["bank"]["least-parties"] = "3"
    use_tables(deployment, nodes)
    bins = {} if method == "fedavg-linear" else {"max-bin": 16}
    settings = {"parties": 3, **bins, **given}
    local = deployment.locally(tmp_path / "local", {**settings, "strategy": method})
    wait_for_output(begun(deployment, method, tmp_path / "across", settings))
    assert model_in(tmp_path / "across") == model_in(local.path)
    if method == "pax":
        no_secret_is_at_the_coordinator(deployment, tmp_path / "across")
    new = write_rows(tmp_path / "new.csv", {"id": ["n1", "n2"], "a": [-1.0, 1.0], "b": [-1.0, 1.0]})
    scores = tmp_path / "scores.csv"
    given = ("--data", str(new), "--id", "id", "--output", str(scores))
    deployment.fedapp("predict", str(tmp_path / "across"), *given)
    lines = list(csv.DictReader(scores.read_text().splitlines()))
    assert [line["id"] for line in lines] == ["n1", "n2"]
    assert float(lines[0]["probability_1"]) < float(lines[1]["probability_1"])


# Different columns of the same rows


def makes_the_same_parts(deployment, method, folder, settings):
    """Train across sites and by the local engine; the id of the local model."""
    use_tables(deployment, same_rows(deployment.folder))
    local = deployment.locally(folder / "local", {**settings, "strategy": method})
    wait_for_output(begun(deployment, method, folder / "across", settings))
    models = [json.loads(model_in(path)) for path in (folder / "across", local.path)]
    across, expected = (model.pop("model_id") for model in models)
    assert models[0] == models[1]
    splits = 0
    for name in SITES:
        there, here = (
            without_salt(json.loads((place / "sites" / name / model / PART_FILE).read_text()))
            for place, model in ((deployment.home(name), across), (home(), expected))
        )
        assert there == here
        splits += len(there["lookup"]["columns"]) * (name != "bank")
    assert splits
    return str(expected)


def predicts_the_same(deployment, folder, model, inference, settings):
    """Predict across sites; the bank gets what it gets from the local engine."""
    bank = deployment.home("bank") / "sites" / "bank"
    before = set(bank.glob("*/predictions.csv"))
    given = {**(EINI if inference == "eini" else {}), "align": settings.get("align", "psi")}
    ways = ("--engine", "federation", "--inference", inference)
    deployment.fedapp("predict", str(folder / "across"), *ways, *settings_of(given))
    (written,) = set(bank.glob("*/predictions.csv")) - before
    wanted = {**given, "parties": 3, "strategy": inference, "model": model}
    local = deployment.locally(folder / f"local-{inference}", wanted)
    summary = json.loads((local.path / "summary.json").read_text())
    if inference == "eini":
        assert summary["entries"] > 0
    expected = home() / "sites" / "bank" / summary["model_id"] / "predictions.csv"
    assert written.read_bytes() == expected.read_bytes()
    lines = list(csv.DictReader(written.read_text().splitlines()))
    assert {line["id"] for line in lines} == {f"{CUSTOMER}-common-{number}" for number in range(60)}
    assert len({line[f"probability_{CLASSES[1]}"] for line in lines}) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings", "ways"),
    [
        ("federated-forest", FOREST, ("one-round", "interactive", "eini")),
        ("secureboost", SECUREBOOST, ("interactive", "eini")),
    ],
    ids=["forest", "secureboost"],
)
def test_a_vertical_method_across_sites_makes_the_parts_of_the_local_engine_and_predicts_the_same(
    deployment, tmp_path, method, settings, ways
):
    model = makes_the_same_parts(deployment, method, tmp_path, settings)
    for inference in ways:
        predicts_the_same(deployment, tmp_path, model, inference, settings)
    no_secret_is_at_the_coordinator(deployment, tmp_path / "across")


# Faults: the same model as without them, or a clear error


QUICKEST = {
    "pax": {
        *("kill-superlink", "kill-serverapp", "kill-coordinator", "kill-superexec", "kill-worker"),
        *("stop-supernode", "stop-worker", "late-workers", "late-serverapp", "full-disk"),
    },
    "secureboost": {"kill-supernode", "kill-worker"},
    "standing": {"silent-peer", "withdrawn", "full-log", "peer-clock"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "names"), QUICKEST.items(), ids=QUICKEST)
def test_a_run_with_a_fault_ends_in_the_same_model_or_names_it_and_is_resumed(
    tmp_path, method, names
):
    """``python -m simulations bench faults`` has all."""
    chosen = [
        fault
        for fault in faults.FAULTS
        if fault.method == method
        and fault.name in names
        and (
            method == "standing"
            or fault.phase == (START if fault.name.startswith("late") else ROUND)
        )
    ]
    lines = list(faults.disturbed(tmp_path, method, chosen))
    tried = [line for line in lines if not line["outcome"].startswith(faults.NOT_TRIED)]
    assert [line for line in tried if line["outcome"] not in faults.GOOD] == []
    # Only a full disk needs a right that not everybody has.
    assert {line["fault"] for line in tried} >= {"none", *names} - {"full-disk", "full-log"}


@pytest.mark.slow
def test_a_site_refuses_a_wrong_certificate_and_the_run_names_it(deployment, tmp_path):
    use_tables(deployment, same_columns(deployment.folder))
    path = deployment.folder / "shop" / "ca.crt"
    own = path.read_bytes()
    deployment.stop("shop")
    path.write_bytes(new_authority("other").files().public)
    before = deployment.log("shop").stat().st_size
    given = {**PAX, "start-deadline": 10}
    try:
        deployment.start("shop")
        wait_for_line(deployment, "shop", "is of CN=other CA", before)
        run = begun(deployment, "pax", tmp_path / "across", given)
        shown, _ = run.communicate(timeout=RUN_SECONDS)
        deployment.stop("shop")
    finally:
        path.write_bytes(own)
        before = deployment.log("shop").stat().st_size
        deployment.start("shop")
        wait_for_line(deployment, "shop", "SuperNode ID:", before)
    rule = "parties must be 3, got 2 within 10 s (start-deadline); waited for shop, not connected"
    assert run.returncode == 1
    assert shown.splitlines()[-1].endswith(f"{rule}: the site's own log says why")


# What a process imports


@pytest.mark.slow
def test_a_process_that_answers_imports_nothing_heavy():
    code = """
import sys, fedapp.client_app
from fedapp.messages.methods import message_kinds
from fedapp.site.answer import find_handler
[find_handler(kind, "bank") for kind in message_kinds()]
print({"ray", "torch", "xgboost", "sklearn", "pandas", "matplotlib"} & set(sys.modules))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert shown.stdout.strip() == b"set()"
