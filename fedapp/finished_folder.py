"""The folder of a run, a search or a cross-validation that has finished."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from fedapp.errors import ConfigError
from fedapp.home import RUNS, shown
from fedapp.names import near_path


class FinishedFolder:
    """What has finished, by its folder.

    Parameters
    ----------
    path : of the folder.

    Raises
    ------
    ConfigError : the folder holds none that has finished.
    """

    _kind: ClassVar[str]
    # What the folder of one that has finished has; the summary first.
    _files: ClassVar[tuple[str, ...]]

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path).resolve()
        missing = [name for name in self._files if not (self.path / name).is_file()]
        if missing:
            rule = f"path must be the folder of a {self._kind} that has finished"
            hint = near_path(Path(path), RUNS)
            raise ConfigError(f"{rule}, got {shown(self.path)} without {missing[0]}{hint}")

    @property
    def summary(self) -> dict[str, Any]:
        """The content of its summary: of a run ``summary.json``, of a comparison
        ``comparison.json``, of a search ``tune.json``, of folds ``folds.json``."""
        found: dict[str, Any] = json.loads((self.path / self._files[0]).read_text())
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self.path)!r})"
