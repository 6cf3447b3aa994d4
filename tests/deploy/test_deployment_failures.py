"""Failures of a deployment of real processes: the same model as without them, or a clear error.

``pytest -m slow tests/deploy/test_deployment_failures.py`` takes some 20 minutes.
"""

import json
import os
import subprocess
import time
from collections import Counter

import pytest

from fedapp.crypto.certificates import new_authority, supernode_keys
from fedapp.run_folder import RunFolder
from fedapp.site.log import LOG, Audit
from simulations.bench import faults
from simulations.deployment import (
    RUN_SECONDS,
    START_SECONDS,
    SUPEREXEC,
    SUPERNODE,
    WORKER,
    settings_of,
    wait_for_output,
)
from strategies.delivery import RULE
from tests.deployed import PAX, local_pax, model_in, no_secret_is_at_the_coordinator, started

pytestmark = pytest.mark.slow
RESEND_SECONDS = 15


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with started(tmp_path_factory.mktemp("failures")) as deployment:
        yield deployment
        no_secret_is_at_the_coordinator(deployment)


def begun(deployment, run_dir, **more):
    """A PAX run."""
    settings = {**PAX, "resend-after": RESEND_SECONDS, **more, "run-dir": run_dir}
    return deployment.begin("run", "pax", "--engine", "federation", *settings_of(settings))


def growing(deployment, run_dir):
    """A PAX run whose trees grow now."""
    run, deadline = begun(deployment, run_dir), time.monotonic() + START_SECONDS
    while (stage := RunFolder(run_dir).stage) is None or not stage.round:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return run


def last_words(run):
    """The last line of a run that must fail."""
    try:
        shown, _ = run.communicate(timeout=RUN_SECONDS)
    finally:
        run.kill()
    assert run.returncode == 1, shown
    return shown.splitlines()[-1]


# Processes that die


def test_a_run_with_a_fault_ends_in_the_same_model_or_names_it_and_is_resumed(tmp_path):
    # The quickest; ``python -m simulations bench faults`` has all.
    names = {"kill-superlink", "kill-serverapp", "kill-coordinator", "kill-worker", "full-disk"}
    chosen = [each for each in faults.FAULTS if each.name in names and each.phase == faults.ROUND]
    lines = list(faults.disturbed(tmp_path, "pax", [one for one in chosen if one.method == "pax"]))
    tried = [line for line in lines if not line["outcome"].startswith(faults.NOT_TRIED)]
    assert [line for line in tried if line["outcome"] not in faults.GOOD] == []
    # Only a full disk needs a right that not everybody has.
    assert {line["fault"] for line in tried} >= {"none", *names} - {"full-disk"}


def test_a_superexec_that_dies_leaves_its_supernode_as_it_is(deployment, tmp_path):
    supernode = deployment.process("bank", SUPERNODE)
    run = growing(deployment, tmp_path / "across")
    assert deployment.kill("bank", SUPEREXEC)
    wait_for_output(run)
    assert deployment.process("bank", SUPERNODE) == supernode


def test_a_run_waits_for_processes_that_take_long_to_start(deployment, tmp_path, monkeypatch):
    """Longer than the 30 s, and the 60 s, that Flower gives a process until its first heartbeat."""
    local_model = local_pax(deployment, tmp_path / "local")
    places = ("coordinator", *deployment.ports)
    sleeping = "import sys, time\nfor name, seconds in {!r}.items():\n"
    sleeping += "    time.sleep(seconds * any(name in word for word in sys.orig_argv))\n"
    slow = {"flwr-serverapp": 35, WORKER: 70}
    (tmp_path / "sitecustomize.py").write_text(sleeping.format(slow))
    deployment.stop(*places)
    before = {name: deployment.size_of_log(name) for name in places}
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        deployment.start(*places)
    deployment.wait_until_listening()
    wait_for_output(begun(deployment, tmp_path / "across", **{"exchange-deadline": 600}))
    assert model_in(tmp_path / "across") == local_model
    for name, size in before.items():
        assert b"token authentication failed" not in deployment.log(name).read_bytes()[size:]
    deployment.stop(*places)
    deployment.start(*places)


def test_why_a_serverapp_has_died_is_in_the_details_of_its_run(deployment, tmp_path):
    run = growing(deployment, tmp_path / "across")
    assert deployment.kill("coordinator", "flwr-serverapp")
    last_words(run)
    listing = f". {deployment.coordinator}/env.sh; flwr list federation --format json"
    shown = subprocess.run(["bash", "-c", listing], capture_output=True, text=True, check=True)
    newest = json.loads(shown.stdout)["runs"][0]
    assert newest["status"] == "finished:failed"
    assert newest["status-details"] == "flwr-serverapp was killed by SIGKILL"


# Sites that are slow, or late


def n_answers(deployment):
    """Messages that the bank has answered, the same one twice among them."""
    path = deployment.home("bank") / "sites" / "bank" / LOG
    events = [line["event"] for _, line in Audit(path)] if path.exists() else []
    return sum(event in ("answered", "repeated", "refused", "failed") for event in events)


@pytest.mark.parametrize("program", [WORKER, SUPERNODE])
def test_a_slow_site_is_asked_again_and_answers_twice_and_no_tree_grows_twice(
    deployment, tmp_path, program
):
    local_model = local_pax(deployment, tmp_path / "local")
    before, run_dir = n_answers(deployment), tmp_path / "across"
    run = growing(deployment, run_dir)
    process = deployment.caught("bank", program)
    assert process
    process.suspend()
    time.sleep(RESEND_SECONDS + 3)
    process.resume()
    wait_for_output(run)
    assert model_in(run_dir) == local_model
    sent = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    asked, answered = (  # how often at each step
        Counter(line["step"] for line in sent if (line["from"], line["to"]) == way)
        for way in (("server", "bank"), ("bank", "server"))
    )
    assert max(asked.values()) > 1
    assert set(answered.values()) == {1}
    # Besides one answer a step, the greeting's and one more: a copy that Flower reports as lost
    # meanwhile is not answered.
    assert n_answers(deployment) - before > 1 + len(asked)


# Sites that are refused


@pytest.mark.parametrize(
    ("file", "wrong", "refusal"),
    [
        (
            "supernode.key",
            lambda: supernode_keys("shop").secret,
            "Failed to activate SuperNode",
        ),
        ("ca.crt", lambda: new_authority("other").files().public, "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_a_site_with_a_wrong_key_or_certificate_is_refused_and_the_run_names_it(
    deployment, tmp_path, file, wrong, refusal
):
    path = deployment.folder / "shop" / file
    own = path.read_bytes()
    deployment.stop("shop")
    path.write_bytes(wrong())
    before = deployment.size_of_log("shop")
    try:
        deployment.start("shop")
        deployment.wait_for("shop", refusal, before)
        last = last_words(begun(deployment, tmp_path / "across", **{"start-deadline": 10}))
        deployment.stop("shop")
    finally:
        path.write_bytes(own)
        before = deployment.size_of_log("shop")
        deployment.start("shop")
        deployment.wait_for("shop", "SuperNode ID:", before)
    rule = "parties must be 3, got 2 within 10 s (start-deadline); not connected: shop"
    assert last.endswith(f"{rule}, whose own log says why; {RULE}")
