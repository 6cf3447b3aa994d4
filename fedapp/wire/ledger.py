"""Record of traffic: what was sent, to which party, how many bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedapp.home import open_private

SERVER = "server"


@dataclass(slots=True)
class Ledger:
    """A line a message, appended to ``ledger.jsonl`` (not if None), and sums over all of them.

    ``to_parties`` and ``to_server`` are bytes so far.
    """

    path: Path | None = None
    to_parties: int = 0
    to_server: int = 0
    _lines: list[dict[str, Any]] = field(default_factory=list)
    _start: float = field(default_factory=time.perf_counter)

    def sent(self, step: int, kind: str, party: str, n_bytes: int) -> None:
        """Note a request."""
        self.to_parties += n_bytes
        self._note(step, kind, SERVER, party, n_bytes)

    def received(self, step: int, kind: str, party: str, n_bytes: int) -> None:
        """Note a reply."""
        self.to_server += n_bytes
        self._note(step, kind, party, SERVER, n_bytes)

    def flush(self, names: Mapping[str, str] | None = None) -> None:
        """Write the lines noted since the last time, with ``names`` in place of earlier names."""
        names = names or {}
        if self.path is not None:
            with open_private(self.path, "a") as file:
                for line in self._lines:
                    for end in ("from", "to"):
                        line[end] = names.get(line[end], line[end])
                    file.write(json.dumps(line) + "\n")
        self._lines.clear()

    def _note(self, step: int, kind: str, source: str, target: str, n_bytes: int) -> None:
        seconds = round(time.perf_counter() - self._start, 4)
        line = {"step": step, "type": kind, "from": source, "to": target}
        self._lines.append({**line, "bytes": n_bytes, "seconds": seconds})
