"""``python -m fedapp.deploy.warm [PROCESS]``: which patches fit the installed Flower.

Below a patch that does not are the functions that differ, with their digests. Exit status 1 if any
falls back.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from fedapp.deploy.warm import BUNDLES, PATCHES, PROCESSES, differing, digest, fall_backs

every = list(dict.fromkeys(PROCESSES.values()))
n_faults = 0
for process in [process for process in every if process in sys.argv[1:]] or every:
    faults = {fall_back.patch.name: fall_back for fall_back in fall_backs(process)}
    n_faults += len(faults)
    print(f"{process}, flwr {version('flwr')}")
    for patch in (*PATCHES, BUNDLES):
        if process in patch.processes:
            print(f"  {patch.name}: {faults.get(patch.name, 'as known')}")
            for function in differing(patch, process):
                print(f"    {function}={digest(function)}")
raise SystemExit(n_faults > 0)
