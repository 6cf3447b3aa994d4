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


BEGUN = """
import resource, sys
hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
import {module} as module
def shown(*_, **__):
    print(resource.getrlimit(resource.RLIMIT_CORE))
    raise SystemExit
{replaced} = shown
module.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "replaced"),
    [
        ("fedapp.__main__", "import fedapp.commands; fedapp.commands.main"),
        ("fedapp.deploy.superexec", "module.subprocess.run"),  # the first that it does
        ("fedapp.deploy.supernode", "import flwr.supernode.cli as cli; cli.flower_supernode"),
        ("fedapp.deploy.superlink", "import flwr.superlink.cli as cli; cli.flower_superlink"),
    ],
)
def test_no_process_leaves_its_memory_behind(module, replaced):
    code = BEGUN.format(module=module, replaced=replaced)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "(0, 0)"
