"""The machine that a folder is written on, and the format of its files."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

import yaml

from fedapp.settings import app_folder

SECRET, PUBLIC, SCRIPT = 0o600, 0o644, 0o700
# File name -> (content, mode).
Texts = dict[str, tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and folder that processes run from."""

    folder: str  # absolute path
    programs: str  # absolute path of the folder of installed programs
    name: str  # of the site, or "coordinator"

    @property
    def image(self) -> str:
        """The container image of this version."""
        return f"fedapp:{version('fedapp')}"

    def dockerfile(self) -> Texts:
        """Dockerfile of the image; ``BASE`` may be any image with the same Python version."""
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
    """Replace each ``{NAME}`` of a template; other braces stay."""
    return re.sub(r"\{([A-Z_]+)\}", lambda match: values[match[1]], template)


def as_yaml(comment: str, *documents: object) -> str:
    """YAML documents after a comment."""
    # The JSON round trip copies shared objects, which YAML would write as references.
    separate = json.loads(json.dumps(documents))
    return comment + str(yaml.safe_dump_all(separate, sort_keys=False, width=100))
