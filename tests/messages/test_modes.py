"""What a run writes is for its owner only, and a crash writes nothing of what was in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.home import home
from tests.tables import made_columns, write_rows

SHORT = {"label": "y", "parties": 2, "num_boost_round": 2, "max_depth": 2, "max_bin": 16}
KEYS = {"key_bits": 512, "insecure_small_key": True}


@pytest.fixture
def data(tmp_path, own_folder):
    """A table, under the usual mask of files."""
    before = os.umask(0o022)
    yield write_rows(tmp_path / "made.csv", made_columns("binary:logistic", n_rows=120))
    os.umask(before)


def test_only_its_owner_reads_what_a_run_and_its_parties_write(data):
    parts = fedapp.run("secureboost", data=data, secureboost=KEYS, **SHORT)
    search = fedapp.tune("pax", data=data, runs=2, output="search", **SHORT)
    folds = fedapp.compare(["pax"], data=data, folds=2, **SHORT)
    (run, *_) = sorted(path.parent for path in search.path.rglob("model.json"))
    predict = ["predict", str(parts.path), "--data", str(data), "--output", "out.csv"]
    for words in (predict, ["export", str(run), "--to", "onnx"]):
        assert CliRunner().invoke(cli, words).exit_code == 0
    with pytest.raises(Exception, match="stopped"):
        fedapp.run("pax", data=data, run_dir="new/kept", on_round=lambda info: False, **SHORT)
    assert Path("new/kept/checkpoint").exists()
    assert (parts.path / "report.html").exists()
    assert (home() / "sites").is_dir()
    for folder in (parts.path.parent, Path("new"), home(), search.path, folds.path):
        for path in (folder, *folder.rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path
    assert Path("out.csv").stat().st_mode & 0o777 == 0o600


# What each process of a deployment does once it has begun, and where that is looked up.
BEGINS = {
    "fedapp.__main__": ("fedapp.commands", "main"),
    "fedapp.deploy.superexec": ("subprocess", "Popen"),
    "fedapp.deploy.coordinator": ("flwr.supercore.cli", "flower_superexec"),
    "fedapp.deploy.supernode": ("flwr.supernode.cli", "flower_supernode"),
    "fedapp.deploy.superlink": ("flwr.superlink.cli", "flower_superlink"),
    "fedapp.serve.standing": ("fedapp.serve.standing", "raise_file_limit"),
}
BEGUN = """
import os, resource, runpy, sys
from importlib import import_module
sys.argv[1:] = []
hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
begins = {begins}
found = {{name: import_module(where) for name, (where, _) in begins.items()}}
for name, (_, what) in begins.items():
    import_module(name)
    if os.fork() == 0:
        def shown(*_, **__):
            print(name, resource.getrlimit(resource.RLIMIT_CORE), flush=True)
            os._exit(0)
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
        setattr(found[name], what, shown)
        if stand := getattr(sys.modules[name], "stand", None):
            stand("", "", 0, print)
        runpy.run_module(name, run_name="__main__")
    os.wait()
"""


def test_no_process_leaves_its_memory_behind():
    pytest.importorskip("uvicorn")
    code = BEGUN.format(begins=BEGINS)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("fedapp.")]
    assert lines == [f"{name} (0, 0)" for name in BEGINS], done.stderr
