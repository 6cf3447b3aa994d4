"""The example apps: own ServerApp, own ClientApp, own tables."""

import importlib
import os
import subprocess
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedapp.runs.flower import superlink
from fedapp.runs.local import LocalGrid

EXAMPLES = Path(__file__).parents[2] / "simulations" / "examples"
APPS = {"pax": 3, "secureboost": 2}


@pytest.mark.parametrize("name", ["pax", pytest.param("secureboost", marks=pytest.mark.slow)])
def test_an_example_trains_on_its_own_tables(name, capsys):
    app, n_parties = importlib.import_module(f"simulations.examples.{name}.app"), APPS[name]
    nodes = ({"partition-id": each, "num-partitions": n_parties} for each in range(n_parties))
    contexts = [
        Context(run_id=0, node_id=number, node_config=node, state=RecordDict(), run_config={})
        for number, node in enumerate(nodes, start=2)
    ]
    grid = LocalGrid(contexts, app.client)
    run = Context(0, 0, {}, RecordDict(), {"rounds": 2})
    try:
        app.server(grid, run)
    finally:
        grid.close()
    printed = capsys.readouterr().out
    assert "'round': 2" in printed
    assert "'test_auc': 0.9" in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", APPS)
def test_flwr_run_takes_an_examples_folder(name, tmp_path):
    with superlink() as link:
        lines = f'[superlink.here]\naddress = "{link.host}"\ninsecure = true\n'
        (tmp_path / "config.toml").write_text(lines)
        words = ["flwr", "run", str(EXAMPLES / name), "here", "--stream"]
        words += ["--run-config", "rounds=2", "--federation-config", "num-supernodes=2"]
        environment = {**os.environ, "FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0"}
        ran = subprocess.run(
            words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert "'test_auc': 0.9" in ran.stdout + ran.stderr, ran.stdout + ran.stderr
