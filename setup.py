"""Where a wheel puts ``strategies`` and ``clients``; pyproject.toml says the rest.

In site-packages these names could clash with other packages, so they go into ``fedapp/_app``, which
``import fedapp`` puts on the path. Beside them is what the app and its container image are built
from.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOMS = ("strategies", "clients")
FILES = ("pyproject.toml", "LICENSE", "requirements.lock")


class BuildApp(build_py):
    """Builds the packages, and moves those with common names into ``fedapp/_app``."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)  # modules of an earlier build
        super().run()
        app = Path(self.build_lib, "fedapp", "_app")
        app.mkdir()
        for room in ROOMS:
            shutil.move(Path(self.build_lib, room), app / room)
        for name in filter(Path.is_file, map(Path, FILES)):  # Flower Hub takes no .lock file
            shutil.copyfile(name, app / name)


class App(Distribution):
    """A distribution whose only top-level package is ``fedapp``."""

    def iter_distribution_names(self) -> Iterator[str]:
        yield "fedapp"


setup(distclass=App, cmdclass={"build_py": BuildApp})
