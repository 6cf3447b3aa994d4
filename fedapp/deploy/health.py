"""Health check of a process, for the units that start it.

``python -m fedapp.deploy.health URL [CA]`` asks a SuperLink or SuperNode. ``... health FILE``
checks when a SuperExec last asked for a task.
"""

from __future__ import annotations

import ssl
import sys
import time
from pathlib import Path
from urllib.request import urlopen

ALIVE = "superexec.alive"  # in the site's home
STALE = 120.0  # seconds; a SuperExec asks, or retries its SuperNode, every few seconds


def is_alive(target: str, ca: str | None = None) -> bool:
    """Whether a URL is healthy, or a file was touched in the last `STALE` seconds."""
    try:
        if not target.startswith("http"):
            return time.time() - Path(target).stat().st_mtime < STALE
        context = ssl.create_default_context(cafile=ca) if target.startswith("https") else None
        with urlopen(f"{target}/health", timeout=5, context=context) as response:
            return bool(response.status == 200)
    except OSError:  # no file, no connection, another certificate, another status
        return False


if __name__ == "__main__":
    sys.exit(not is_alive(*sys.argv[1:]))
