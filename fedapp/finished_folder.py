"""Base class of finished runs, searches and cross-validations."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from fedapp.errors import ConfigError, did_you_mean_path
from fedapp.home import RUNS, display_path


class FinishedFolder:
    """A finished run, search or cross-validation; raise ConfigError if it has not finished."""

    _kind: ClassVar[str]
    _files: ClassVar[tuple[str, ...]]  # that exist once it has finished; the summary is the first

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path).resolve()
        missing = [name for name in self._files if not (self.path / name).is_file()]
        if missing:
            rule = f"path must be the folder of a {self._kind} that has finished"
            hint = did_you_mean_path(Path(path), RUNS)
            raise ConfigError(f"{rule}, got {display_path(self.path)} without {missing[0]}{hint}")

    @property
    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json``, ``comparison.json``, ``tune.json`` or ``folds.json``."""
        content: dict[str, Any] = json.loads((self.path / self._files[0]).read_text())
        return content

    def __repr__(self) -> str:
        return f"{type(self).__name__}({display_path(self.path)!r})"
