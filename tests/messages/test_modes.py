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

SHORT = {"num_boost_round": 2, "max_depth": 2, "max_bin": 16}
KEYS = {"key_bits": 512, "insecure_small_key": True}


@pytest.fixture(autouse=True)
def _usual_mask(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o022)
    yield
    os.umask(before)


def readable(folder):
    """What others than the owner may read or enter, of a folder and all that is in it."""
    found = [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]
    return sorted(str(path.relative_to(folder)) for path in found)


@pytest.mark.slow
def test_only_its_owner_reads_what_a_run_and_its_parties_write(tmp_path):
    data = write_rows(tmp_path / "made.csv", made_columns("binary:logistic", n_rows=120))
    whole = fedapp.run("pax", data=data, label="y", parties=2, **SHORT)
    parts = fedapp.run("secureboost", data=data, label="y", parties=2, secureboost=KEYS, **SHORT)
    words = ["predict", str(parts.path), "--data", str(data), "--output", "out.csv"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert CliRunner().invoke(cli, ["export", str(whole.path), "--to", "onnx"]).exit_code == 0
    assert (whole.path / "report.html").exists()
    assert (home() / "sites").is_dir()
    assert readable(whole.path.parent) == []
    assert readable(parts.path) == []
    assert readable(home()) == []
    assert Path("out.csv").stat().st_mode & 0o777 == 0o600


def test_only_its_owner_reads_a_search_and_a_comparison(tmp_path):
    data = write_rows(tmp_path / "made.csv", made_columns("binary:logistic", n_rows=120))
    search = fedapp.tune("pax", data=data, label="y", parties=2, runs=2, output="search", **SHORT)
    folds = fedapp.compare(["pax"], data=data, label="y", parties=2, folds=2, **SHORT)
    assert readable(search.path) == []
    assert readable(folds.path) == []


def test_a_run_that_is_kept_to_go_on_is_its_owners_too(tmp_path):
    data = write_rows(tmp_path / "made.csv", made_columns("binary:logistic", n_rows=120))
    given = {"data": data, "label": "y", "parties": 2, "run_dir": "new/kept", **SHORT}
    with pytest.raises(Exception, match="stopped"):
        fedapp.run("pax", on_round=lambda info: False, **given)
    assert Path("new/kept/checkpoint").exists()
    assert readable(Path("new")) == []


BEGUN = """
import resource, sys
hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
import {module} as module
def shown(*_, **__):
    print(resource.getrlimit(resource.RLIMIT_CORE))
    raise SystemExit
{replaced} = shown
module.main({given})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "replaced", "given"),
    [
        ("fedapp.__main__", "import fedapp.commands; fedapp.commands.main", ""),
        ("fedapp.deploy.superexec", "module.subprocess.run", ""),  # the first that it does
        ("fedapp.deploy.supernode", "import flwr.supernode.cli as cli; cli.flower_supernode", ""),
        ("fedapp.deploy.superlink", "import flwr.superlink.cli as cli; cli.flower_superlink", ""),
    ],
)
def test_no_process_leaves_its_memory_behind(module, replaced, given):
    code = BEGUN.format(module=module, replaced=replaced, given=given)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "(0, 0)"
