"""Real processes on the loopback: TLS, node authentication, a table at each of three sites.

``pytest -m slow tests/test_deployment.py`` runs the ones that take minutes.
"""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.config import load_settings
from fedapp.deploy.certificates import supernode_keys
from simulations.deployment import RUN_SECONDS, Deployment, ended, settings_of
from simulations.engines import run_local, site_contexts

SITES = ("bank", "insurer", "shop")
PAX = {"num-boost-round": 2, "max-depth": 1, "max-bin": 16, "parties": 3}
SECUREBOOST = {
    "num-boost-round": 1,
    "max-depth": 1,
    "max-bin": 8,
    "parties": 3,
    "secureboost.key-bits": 512,
    "secureboost.insecure-small-key": "true",
}
CLASSES = ("repaid-in-full", "went-bankrupt")


def write_csv(path: Path, columns: Mapping[str, Any]) -> str:
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join(",".join(map(str, row)) for row in [tuple(columns), *rows]) + "\n")
    return str(path)


def same_columns(folder: Path) -> dict[str, dict[str, str]]:
    """Node configs of sites with the same columns and rows of their own."""
    nodes = {}
    for seed, name in enumerate(SITES):
        a, b = np.random.default_rng(seed).normal(size=(2, 80)).round(3)
        ids = [f"customer-{name}-{number}" for number in range(80)]
        table = {"id": ids, "a": a, "b": b, "y": (a + b > 0).astype(int)}
        path = write_csv(folder / f"{name}-rows.csv", table)
        nodes[name] = {"data": path, "label": "y", "id": "id", "allow": "pax,secureboost"}
    return nodes


def same_rows(folder: Path) -> dict[str, dict[str, str]]:
    """Node configs of sites with columns of their own of the same rows; the bank has labels."""
    a, b, c = np.random.default_rng(5).normal(size=(3, 60)).round(3)
    ids = np.array([f"customer-common-{number}" for number in range(60)])
    labels = np.array(CLASSES)[(a + b + c > 0).astype(int)]
    own = {"bank": {"a": a, "outcome": labels}, "insurer": {"b": b}, "shop": {"c": c}}
    nodes = {}
    for seed, (name, columns) in enumerate(own.items()):
        order = np.random.default_rng(seed).permutation(60)
        table = {key: values[order] for key, values in {"id": ids, **columns}.items()}
        nodes[name] = {"data": write_csv(folder / f"{name}-columns.csv", table), "id": "id"}
    nodes["bank"]["label"] = "outcome"
    return nodes


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    deployment = Deployment(folder, same_columns(folder))
    try:
        deployment.start("coordinator", *SITES)
        deployment.register()
        yield deployment
    finally:
        deployment.close()


def use_tables(deployment: Deployment, nodes: Mapping[str, Mapping[str, str]]) -> None:
    """Give the sites these node configs, unless they have them already."""
    if all(deployment.node_config(name) == {"name": name, **nodes[name]} for name in SITES):
        return
    deployment.stop(*SITES)
    for name, node in nodes.items():
        deployment.change_site(name, node)
    deployment.start(*SITES)


@pytest.fixture
def local_model(deployment: Deployment, tmp_path: Path) -> bytes:
    """What the local engine makes of the same tables; the sites have them from now on."""
    use_tables(deployment, same_columns(deployment.folder))
    contexts = site_contexts(deployment.node_config(name) for name in SITES)
    folder = run_local(load_settings({**PAX, "run-dir": str(tmp_path / "local")}), contexts)
    return (folder.path / "model.json").read_bytes()


def secrets_of(deployment: Deployment) -> list[bytes]:
    """Paths, ids, labels and keys of all sites, in the forms in which they could be written."""
    found = [b"customer-", *(name.encode() for name in CLASSES)]
    for name in SITES:
        folder = deployment.folder / name
        found += [str(folder).encode(), str(deployment.node_config(name)["data"]).encode()]
        found += (folder / "supernode.key").read_bytes().splitlines()[1:-1]
        for key in folder.rglob("identity.key"):
            found += [key.read_bytes(), key.read_bytes().hex().encode()]
    return found


def test_pax_across_sites_is_the_model_of_the_local_engine_and_secrets_stay_at_the_sites(
    deployment: Deployment, local_model: bytes, tmp_path: Path
) -> None:
    deployment.fedapp(
        *("run", "pax", "--engine", "federation"),
        *settings_of({**PAX, "run-dir": tmp_path / "across"}),
    )
    assert (tmp_path / "across" / "model.json").read_bytes() == local_model
    no_secret_is_at_the_coordinator(deployment, tmp_path / "across")


def no_secret_is_at_the_coordinator(deployment: Deployment, run_dir: Path) -> None:
    files = [*deployment.coordinators_files()]
    files += [(path, path.read_bytes()) for path in run_dir.iterdir()]
    assert any(b"fleet" in content for _, content in files)
    for secret in secrets_of(deployment):
        assert secret
        assert [path.name for path, content in files if secret in content] == []


@pytest.mark.slow
def test_a_run_that_a_site_does_not_allow_ends_with_the_sites_words(
    deployment: Deployment,
) -> None:
    command = deployment.begin(
        *("run", "bagging", "--engine", "federation"), *settings_of({"parties": 3})
    )
    shown, _ = command.communicate(timeout=120)
    assert command.returncode == 1
    last = shown.splitlines()[-1]
    assert "strategy must be one that the site allows (pax, secureboost), got bagging" in last


@pytest.mark.slow
def test_a_site_with_a_key_that_is_not_registered_is_refused(deployment: Deployment) -> None:
    deployment.stop("shop")
    key = deployment.folder / "shop" / "supernode.key"
    own = key.read_bytes()
    key.write_bytes(supernode_keys("shop").secret)
    before = {name: deployment.size_of_log(name) for name in ("coordinator", "shop")}
    try:
        deployment.start("shop")
        deployment.wait_for("shop", "has ended; starting it again", before["shop"])
    finally:
        deployment.stop("shop")
        key.write_bytes(own)
        deployment.start("shop")
    refused = deployment.log("coordinator").read_bytes()[before["coordinator"] :]
    assert b'activate-node HTTP/1.1" 412' in refused


@pytest.mark.slow
def test_secureboost_across_sites_trains_and_predicts(
    deployment: Deployment, tmp_path: Path
) -> None:
    use_tables(deployment, same_rows(deployment.folder))
    run_dir = tmp_path / "run"
    deployment.fedapp(
        *("run", "secureboost", "--engine", "federation"),
        *settings_of({**SECUREBOOST, "run-dir": run_dir}),
    )
    deployment.fedapp(
        *("predict", str(run_dir), "--engine", "federation"),
        *("--data", "at-the-sites", "--output", "scores.csv"),
    )
    (written,) = (deployment.folder / "bank" / "home").rglob("predictions.csv")
    lines = list(csv.DictReader(written.read_text().splitlines()))
    assert {line["id"] for line in lines} == {f"customer-common-{number}" for number in range(60)}
    column = f"probability_{CLASSES[1]}"
    assert len({line[column] for line in lines}) == 2  # a tree of one split
    no_secret_is_at_the_coordinator(deployment, run_dir)


# Failures: the same model as without them


def killed(
    deployment: Deployment, run_dir: Path, place: str, program: str
) -> subprocess.Popen[str]:
    """A PAX run, one of whose processes is killed while trees grow."""
    settings = {**PAX, "resend-after": 15, "run-dir": run_dir}
    before = deployment.size_of_log("bank")
    run = deployment.begin("run", "pax", "--engine", "federation", *settings_of(settings))
    deployment.wait_for("bank", "train.pax_grow", before)
    assert deployment.kill(place, program)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "program"),
    [
        ("bank", "flwr-clientapp"),
        ("bank", "flower-superexec"),
        ("bank", "flower-supernode"),
        ("coordinator", "flower-superlink"),
    ],
)
def test_a_run_survives_the_death_of_a_process(
    deployment: Deployment, local_model: bytes, tmp_path: Path, place: str, program: str
) -> None:
    ended(killed(deployment, tmp_path / "across", place, program))
    assert (tmp_path / "across" / "model.json").read_bytes() == local_model


@pytest.mark.slow
@pytest.mark.parametrize("program", ["flower-superexec", "flwr-serverapp"])
def test_a_run_whose_server_dies_is_resumed_to_the_same_model(
    deployment: Deployment, local_model: bytes, tmp_path: Path, program: str
) -> None:
    run = killed(deployment, tmp_path / "across", "coordinator", program)
    run.communicate(timeout=RUN_SECONDS)
    assert run.returncode == 1
    resume = settings_of({"resume": tmp_path / "across"})
    deployment.fedapp("run", "pax", "--engine", "federation", *resume)
    assert (tmp_path / "across" / "model.json").read_bytes() == local_model
