"""The app where Flower unpacks it, with what has been compiled of it here."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab

from fedapp.config import app_folder
from fedapp.deploy.bundle import app_sources


def unpack_compiled(flower_home: Path) -> None:
    """Unpack the app as Flower would, which leaves it as it is, with bytecode and numba's kernels:
    both are known by the time and size of their source, and kernels take seconds to compile."""
    with app_sources() as app:
        unpacked = install_from_fab(build_fab_from_disk(app), flower_home, skip_prompt=True)
    for source in unpacked.rglob("*.py"):
        mine = app_folder() / source.relative_to(unpacked)
        found = mine.stat()
        os.utime(source, ns=(found.st_atime_ns, found.st_mtime_ns))
        (cache := source.parent / "__pycache__").mkdir(exist_ok=True)
        for path in (mine.parent / "__pycache__").glob(f"{mine.stem}.*"):
            shutil.copy(path, cache)
