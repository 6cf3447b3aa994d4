"""``python -m fedapp.deploy.warm [PROCESS]`` compares the installed Flower with the known versions.

Its status is 1 where a process would use Flower's own ways.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from fedapp.deploy.warm import SERVER, SIMULATION, SITE, SUPERLINK, digest

asked = [one for one in (SITE, SUPERLINK, SERVER, SIMULATION) if one.process in sys.argv[1:]]
n_differing = 0
for parts in asked or (SITE, SUPERLINK, SERVER, SIMULATION):
    versions, places = parts.nearest()
    n_differing += len(places)
    differ = f"{len(places)} differ from" if places else "as in"
    print(f"flwr {version('flwr')}, {parts.process}: {differ} {' and '.join(versions)}")
    print("".join(f"  {place}={digest(place)}\n" for place in places), end="")
raise SystemExit(n_differing > 0)
