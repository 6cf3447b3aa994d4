"""``python -m fedapp.deploy.warm [PROCESS]`` compares the installed Flower with the known versions.

Exit status 1 if a process would run unpatched.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from fedapp.deploy.warm import SERVER, SIMULATION, SITE, SUPERLINK, digest

every = (SITE, SUPERLINK, SERVER, SIMULATION)
n_differing = 0
for parts in [parts for parts in every if parts.process in sys.argv[1:]] or every:
    versions, functions = parts.nearest()
    n_differing += len(functions)
    differ = f"{len(functions)} differ from" if functions else "as in"
    print(f"flwr {version('flwr')}, {parts.process}: {differ} {' and '.join(versions)}")
    print("".join(f"  {function}={digest(function)}\n" for function in functions), end="")
raise SystemExit(n_differing > 0)
