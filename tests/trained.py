"""Models trained once a session, and copied to the tests that ask for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from shutil import copytree

import pytest

from fedapp.home import home
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.settings import Settings

TrainOnce = Callable[[Settings], RunFolder]


def train_once(folder: Path) -> TrainOnce:
    """``train_once(folder)(settings)``: the run and the sites of these settings and this table's
    content, for the test's own; ``folder`` keeps what is copied."""

    def train(settings: Settings) -> RunFolder:
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
