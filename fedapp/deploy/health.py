"""Health check of a process, for the units that start it; prints what it found.

``python -m fedapp.deploy.health URL [CA]`` asks a SuperLink or SuperNode. ``... health FILE``
checks when a SuperExec last asked for a task, or a SuperNode last reached its SuperLink.
"""

from __future__ import annotations

import ssl
import sys
import time
from pathlib import Path
from urllib.request import urlopen

ALIVE = "superexec.alive"  # in the site's home
REACHED = "superlink.reached"  # in Flower's home
EVENTS = {ALIVE: "a task was asked for", REACHED: "the SuperLink was reached"}
STALE = 120.0  # seconds; a SuperExec asks, and a SuperNode reaches out, every few seconds


def health(target: str, ca: str | None = None) -> tuple[bool, str]:
    """Whether a URL answers, or a file was touched in the last `STALE` seconds; and a sentence."""
    path = Path(target)
    event = EVENTS.get(path.name, target)
    try:
        if not target.startswith("http"):
            age = time.time() - path.stat().st_mtime
            return abs(age) < STALE, f"{event} {age:.0f} s ago" + ", not since" * (age >= STALE)
        context = ssl.create_default_context(cafile=ca) if target.startswith("https") else None
        url = target.removesuffix("/health") + "/health"
        with urlopen(url, timeout=5, context=context) as response:
            return response.status == 200, f"{url} answers {response.status}"
    except FileNotFoundError:
        return False, f"{event} never"
    except OSError as error:  # no connection, another certificate, another status
        return False, f"{target}: {error}"


if __name__ == "__main__":
    is_healthy, sentence = health(*sys.argv[1:])
    print(sentence)
    sys.exit(not is_healthy)
