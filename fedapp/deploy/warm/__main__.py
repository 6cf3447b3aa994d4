"""``python -m fedapp.deploy.warm [PROCESS]`` compares the installed Flower with the known versions.

Exit status 1 if a process would run unpatched.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from fedapp.deploy.warm import SERVER, SIMULATION, SITE, SUPERLINK, digest

every = (SITE, SUPERLINK, SERVER, SIMULATION)
n_differing = 0
for parts in [one for one in every if one.process in sys.argv[1:]] or every:
    versions, places = parts.nearest()
    n_differing += len(places)
    differ = f"{len(places)} differ from" if places else "as in"
    print(f"flwr {version('flwr')}, {parts.process}: {differ} {' and '.join(versions)}")
    print("".join(f"  {place}={digest(place)}\n" for place in places), end="")
raise SystemExit(n_differing > 0)
