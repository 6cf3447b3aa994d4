"""Sites of a deployment: their tables, and what the local engine makes of the same tables."""

import os
import secrets
import signal
import subprocess
import time
from contextlib import contextmanager, suppress

import numpy as np

from fedapp.home import app_folder
from simulations.deployment import DRAWS, START_SECONDS, Deployment
from tests.pages import blocks, commands_in
from tests.tables import write_rows
from tests.unpacked import unpack_compiled

SITES = ("bank", "insurer", "shop")
HORIZONTAL = "pax,fedxgbllr,bagging,cyclic,fedavg-linear,horizontal-forest,describe-rows"
VERTICAL = "secureboost,federated-forest,describe-columns,interactive,one-round,eini"
MANY = {"runs-per-day": "1000"}  # of all tests that share a deployment
# Drawn, so that they are not in the app itself, which the coordinator has.
CUSTOMER = f"customer-{secrets.token_hex(8)}"
CLASSES = (f"repaid-{secrets.token_hex(8)}", f"unpaid-{secrets.token_hex(8)}")
PAX = {"num-boost-round": 2, "max-depth": 1, "max-bin": 16, "parties": 3}


def same_columns(folder):
    """Node configs of sites with the same columns and rows of their own."""
    nodes = {}
    for seed, name in enumerate(SITES):
        a, b = np.random.default_rng(seed).normal(size=(2, 80)).round(3)
        ids = [f"{CUSTOMER}-{name}-{number}" for number in range(80)]
        table = {"id": ids, "a": a, "b": b, "y": (a + b > 0).astype(int)}
        path = str(write_rows(folder / f"{name}-rows.csv", table))
        nodes[name] = {"data": path, "label": "y", "id": "id", "allow": HORIZONTAL, **MANY, **DRAWS}
    return nodes


def same_rows(folder):
    """Node configs of sites with columns of their own of the same rows; the bank has labels, which
    go by the others' columns for the most part."""
    a, b, c = np.random.default_rng(5).normal(size=(3, 60)).round(3)
    ids = np.array([f"{CUSTOMER}-common-{number}" for number in range(60)])
    labels = np.array(CLASSES)[(a + 3 * b + 3 * c > 0).astype(int)]
    own = {"bank": {"a": a, "outcome": labels}, "insurer": {"b": b}, "shop": {"c": c}}
    nodes = {}
    for seed, (name, columns) in enumerate(own.items()):
        order = np.random.default_rng(seed).permutation(60)
        table = {key: values[order] for key, values in {"id": ids, **columns}.items()}
        path = str(write_rows(folder / f"{name}-columns.csv", table))
        nodes[name] = {"data": path, "id": "id", "allow": VERTICAL, "allow-insecure": "true"}
        nodes[name] |= {**MANY, **DRAWS}
    nodes["bank"]["label"] = "outcome"
    return nodes


@contextmanager
def started(folder):
    """A coordinator and three sites with the same columns, running."""
    deployment = Deployment(folder, same_columns(folder))
    unpack_compiled(deployment.coordinator / "flower")
    try:
        deployment.start("coordinator")
        deployment.register()
        deployment.start(*SITES)  # one that was not registered yet would end and be started again
        yield deployment
    finally:
        deployment.close()


def use_tables(deployment, nodes):
    """Give the sites these node configs, unless they have them already."""
    if all(deployment.node_config(name) == {"name": name, **nodes[name]} for name in SITES):
        return
    deployment.stop(*SITES)
    for name, node in nodes.items():
        deployment.change_site(name, node)
    deployment.start(*SITES)


def local_pax(deployment, run_dir):
    """The PAX model of the sites' own rows."""
    use_tables(deployment, same_columns(deployment.folder))
    return model_in(deployment.locally(run_dir, PAX).path)


def wait_for_line(deployment, name, text, since=0):
    """Wait until a script's log has a text after byte ``since``."""
    log, deadline = deployment.log(name), time.monotonic() + START_SECONDS
    while text.encode() not in log.read_bytes()[since:]:
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)


def model_in(run_dir):
    return (run_dir / "model.json").read_bytes()


def no_secret_is_at_the_coordinator(deployment, *run_dirs):
    """Paths, ids, labels and keys of all sites, in the forms in which they could be written."""
    secret_texts = [CUSTOMER.encode(), *(name.encode() for name in CLASSES)]
    for name in SITES:
        folder = deployment.folder / name
        node = deployment.node_config(name)
        secret_texts += [
            str(told).encode() for told in (folder, node["data"], node["draws-secret"])
        ]
        secret_texts += (folder / "supernode.key").read_bytes().splitlines()[1:-1]
        for key in folder.rglob("identity.key"):
            secret_texts += [key.read_bytes(), key.read_bytes().hex().encode()]
    keys = {"ca.key", "server.key", "superexec.secret"}
    paths = [deployment.log("coordinator"), *deployment.coordinator.rglob("*")]
    files = [
        (path, path.read_bytes())
        for path in paths
        if path.is_file() and path.name not in keys and "apps" not in path.parts
    ]
    files += [(path, path.read_bytes()) for run_dir in run_dirs for path in run_dir.iterdir()]
    assert any(b"fleet" in content for _, content in files)
    for secret in secret_texts:
        assert secret
        assert [path.name for path, content in files if secret in content] == []


# Approves at each site what waits there, until the run has ended.
APPROVING = """
until [ -e pax/summary.json ]; do
  sleep 5
  for site in north south west; do (
    . $site/env.sh
    for run in $(fedapp site approve | awk '/first asked/ {print $1}'); do
      fedapp site approve $run --yes
    done
  ) done
done > approvals.log 2>&1
"""


def take_the_tour(folder, environment):
    """Run the commands of docs/tutorials/three-sites.md, whose programs ``environment`` finds,
    without those that approve a run."""
    shown = blocks(app_folder() / "docs" / "tutorials" / "three-sites.md")
    (tables,) = (text for kind, text in shown if kind == "python")
    commands = [
        line for _, text in shown if "site approve" not in text for line in commands_in(text)
    ]
    tour = "\n".join([f"cat > tables.py <<'END'\n{tables}END", *commands, "wait"])
    started, waiting, rest = tour.partition(". coordinator/env.sh\n")
    with subprocess.Popen(
        ["bash", "-ec", f"{started}({APPROVING}) &\n{waiting}{rest}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment,
        start_new_session=True,
    ) as script:
        try:
            shown, _ = script.communicate(timeout=900)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGTERM)
    assert script.returncode == 0, shown
    assert '"patient","probability_1"' in shown
    assert len((folder / "new-scores.csv").read_text().splitlines()) == 70
