"""Runs of tests: trained once a session, and what they leave behind."""

import json
from hashlib import sha256
from pathlib import Path
from shutil import copytree

import pytest

from fedapp.home import home
from fedapp.records.document import load
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.trees.model import Ensemble


def train_once(folder):
    """``train_once(folder)(settings)``: the run and the sites of these settings and this table's
    content, for the test's own; ``folder`` keeps what is copied."""

    def train(settings):
        table = Path(settings.data)
        content = table.read_bytes() if table.is_file() else settings.data.encode()
        given = settings.model_dump(mode="json", exclude={"run_dir", "data"})
        key = json.dumps([given, sha256(content).hexdigest()], sort_keys=True)
        kept = folder / sha256(key.encode()).hexdigest()
        if not (kept / "run" / "summary.json").exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FEDAPP_HOME", str(kept / "home"))
                run_local(settings.model_copy(update={"run_dir": str(kept / "run")}))
        copytree(kept / "home", home(), dirs_exist_ok=True)
        return RunFolder(Path(copytree(kept / "run", settings.run_dir, dirs_exist_ok=True)))

    return train


def summary_of(folder):
    return json.loads((folder.path / "summary.json").read_text())


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def model_bytes(run):
    """The model's file of a run's folder or settings."""
    return _model(run).read_bytes()


def model_of(run, kind=Ensemble):
    """The model of a run's folder or settings."""
    return load(_model(run), kind)


def _model(run):
    return (run.path if hasattr(run, "path") else Path(run.run_dir)) / "model.json"
