"""The app where Flower unpacks it, with what has been compiled of it here."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab

from fedapp.home import app_folder
from fedapp.site.bundle import copy_sources


def unpack_compiled(flower_home):
    """Unpack the app as Flower would, unchanged, with what is compiled of it here."""
    with TemporaryDirectory(prefix="fedapp-") as app:
        copy_sources(Path(app))
        unpacked = install_from_fab(build_fab_from_disk(Path(app)), flower_home, skip_prompt=True)
    copy_compiled(unpacked, app_folder())


def copy_compiled(folder, compiled):
    """Copy bytecode of a folder to a copy of its sources; it is known by its source's time and
    size."""
    for source in [*folder.rglob("*.py")]:
        mine = compiled / source.relative_to(folder)
        found = mine.stat()
        os.utime(source, ns=(found.st_atime_ns, found.st_mtime_ns))
        if (cache := mine.parent / "__pycache__").is_dir():
            shutil.copytree(cache, source.parent / "__pycache__", dirs_exist_ok=True)
