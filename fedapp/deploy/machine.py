"""The machine that a folder is written on, and how its files are written."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from getpass import getuser
from importlib.metadata import version

import yaml

from fedapp.config import app_folder

SECRET, PUBLIC, SCRIPT = 0o600, 0o644, 0o700
# Name in the folder -> content and mode.
Texts = dict[str, tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a folder lies, and what runs from it.

    Parameters
    ----------
    folder : absolute path.
    programs : folder of the installed programs.
    name : of the site, or ``coordinator``.
    """

    folder: str
    programs: str
    name: str

    @property
    def user(self) -> str:
        """Who owns the folder."""
        return getuser()

    @property
    def ids(self) -> str:
        """User and group by number."""
        return f"{os.getuid()}:{os.getgid()}"

    @property
    def image(self) -> str:
        """The container image of this version."""
        return f"fedapp:{version('fedapp')}"

    def dockerfile(self) -> Texts:
        """What makes the image; ``BASE`` may be any with the same Python."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        app, steps = shlex.quote(str(app_folder())), _OF_CHECKOUT
        if app_folder().name == "_app":
            app, steps = "FOLDER_OF_THE_WHEEL", _OF_WHEEL
        values = {"IMAGE": self.image, "DIR": self.folder, "APP": app, "PYTHON": python}
        values["WHEEL"] = f"fedapp-{version('fedapp')}-py3-none-any.whl"
        return {"Dockerfile": (fill(_DOCKERFILE + steps, values), PUBLIC)}


_DOCKERFILE = """\
# docker build --tag {IMAGE} --file {DIR}/Dockerfile {APP}
ARG BASE=python:{PYTHON}-slim
FROM $BASE
"""
_OF_WHEEL = """\
COPY {WHEEL} /opt/
RUN pip install --no-cache-dir --no-deps /opt/{WHEEL}
# No file is installed but those of the wheel's lock.
RUN pip install --no-cache-dir --only-binary :all: --require-hashes \
-r "$(python -c 'import fedapp; print(fedapp.__path__[0])')/_app/requirements.lock"
"""
_OF_CHECKOUT = """\
COPY . /opt/fedapp
# No file is installed but those of the lock, and nothing built but the app, by its setuptools.
RUN pip install --no-cache-dir --only-binary :all: --require-hashes -r /opt/fedapp/requirements.lock
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable /opt/fedapp
# Containers cannot write there: what is not compiled now is compiled by every process.
RUN python -m compileall -q /opt/fedapp/fedapp /opt/fedapp/strategies /opt/fedapp/clients
"""


def fill(template: str, values: Mapping[str, str]) -> str:
    """A template with its ``{NAME}`` filled in; braces around anything else stay."""
    return re.sub(r"\{([A-Z_]+)\}", lambda found: values[found[1]], template)


def as_yaml(comment: str, *documents: object) -> str:
    """YAML documents under a comment of lines that start with ``#``."""
    # As JSON and back, so that what stands twice is written twice, without YAML's references.
    separate = json.loads(json.dumps(documents))
    return comment + str(yaml.safe_dump_all(separate, sort_keys=False, width=100))
