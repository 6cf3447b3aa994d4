"""Bash scripts that start the processes and restart them when they end."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from fedapp.deploy import nginx
from fedapp.deploy.machine import SCRIPT, SECRET, Machine, Texts, fill
from fedapp.deploy.processes import METRICS, Federation, Site, environment

_ENVIRONMENT = """\
export PATH={BIN}:"$PATH"
{EXPORTS}
"""

# A shell function that restarts its command when that ends, and stops it on TERM.
_KEEP = """\
keep() {
  trap 'kill $(jobs -p) 2>/dev/null; wait; exit 0' TERM INT
  while true; do
    "$@" & child=$!
    wait "$child"
    echo "$(date -u +%FT%TZ) WARNING $FEDAPP_NAME ${4##*.}: ended; restarted in $pause s" >&2
    [ -z "$node" ] || python -P -m fedapp.deploy.warm site || pkill -KILL -P "$node"
    sleep "$pause" & child=$!
    wait "$child"
  done
}
"""

_START_SUPERLINK = (
    """\
#!/usr/bin/env bash
# SuperLink and the SuperExec that starts the ServerApp, each started again when it ends.
# In process isolation a run survives a SuperLink that comes back.
set -u
umask 077
cd {DIR}
. ./env.sh
pause=1 node=
trap 'kill $(jobs -p) 2>/dev/null; wait; exit 0' TERM INT
"""
    + _KEEP
    + """\
keep {SUPERLINK} &
until {HEALTH}; do sleep 1; done
keep {SUPEREXEC} &
[ -z "$FEDAPP_METRICS" ] || keep {METRICS} &
wait
"""
)

_START_SUPERNODE = (
    """\
#!/usr/bin/env bash
# The site's SuperNode and the SuperExec that starts the process which reads the rows, each started
# again when it ends. This SuperExec runs the fedapp that is installed here; Flower's own would run
# whatever the coordinator sends. After a crash the SuperLink refuses the same key for about 60 s,
# until it takes the old SuperNode for gone; so it is tried again until it works.
set -u
umask 077
cd {DIR}
. ./env.sh
pause=5 node=
trap 'kill $(jobs -p) 2>/dev/null; wait; exit 0' TERM INT
"""
    + _KEEP
    + """\
keep {SUPERNODE} &
# A SuperExec that dies takes the process along that reads the rows. The next one tells the
# SuperNode so. With another Flower than the tested one the SuperNode would wait for the answer for
# ever; so it is ended too.
pause=1 node=$!
keep {SUPEREXEC} &
[ -z "$FEDAPP_METRICS" ] || node= keep {METRICS} &
wait
"""
)

_REGISTER_SITES = """\
#!/usr/bin/env bash
# Tell the SuperLink the public keys of the sites, one sites/NAME.pub each; it may be run again.
# Flower lists SuperNodes by number alone, so sites/NAME.node keeps whose number is whose.
set -u
cd {DIR}
. ./env.sh
status=0
for name in {SITES}; do
  if [ ! -f "sites/$name.pub" ]; then
    echo "sites/$name.pub is missing" >&2
    status=1
  elif shown=$(flwr supernode register "sites/$name.pub" {FEDERATION} --name "$name" 2>&1); then
    sed -n 's/.*SuperNode \\([0-9]*\\) registered.*/\\1/p' <<< "$shown" > "sites/$name.node"
    echo "$name is registered"
  elif [[ $shown == *"already in use"* ]]; then
    echo "$name was registered before"
  else
    echo "$shown" >&2
    status=1
  fi
done
exit "$status"
"""


def scripts_federation(machine: Machine, federation: Federation) -> Texts:
    """Start script of SuperLink and SuperExec; nginx is the host's."""
    folder = machine.folder
    values = {
        "DIR": folder,
        "SUPERLINK": _command(federation.superlink(folder, folder)),
        "SUPEREXEC": _command(federation.superexec(folder)),
        "HEALTH": shlex.join(federation.health(folder)),
        "METRICS": " ".join(METRICS),
    }
    start = {"start-superlink.sh": (fill(_START_SUPERLINK, values), SCRIPT)}
    return start | nginx.for_host(machine, federation)


def scripts_site(machine: Machine, site: Site) -> Texts:
    """Start script of SuperNode and SuperExec."""
    folder = machine.folder
    values = {
        "DIR": folder,
        "SUPERNODE": _command(site.supernode(folder)),
        "SUPEREXEC": _command(site.superexec(folder)),
        "METRICS": " ".join(METRICS),
    }
    return {"start-supernode.sh": (fill(_START_SUPERNODE, values), SCRIPT)}


def env_script(machine: Machine) -> Texts:
    """Environment that a shell sources before it uses a folder."""
    variables = environment(machine.folder, machine.name)
    exports = [f"export {key}={value}" for key, value in variables.items()]
    values = {"BIN": machine.programs, "EXPORTS": "\n".join(exports)}
    return {"env.sh": (fill(_ENVIRONMENT, values), SECRET)}


def register_script(machine: Machine, federation: Federation) -> Texts:
    """Script that registers the sites' public keys with the SuperLink."""
    values = {
        "DIR": machine.folder,
        "FEDERATION": federation.name,
        "SITES": " ".join(federation.sites),
    }
    return {"register-sites.sh": (fill(_REGISTER_SITES, values), SCRIPT)}


def _command(words: Sequence[str]) -> str:
    """A shell command with one option per line."""
    return shlex.join(words).replace(" --", " \\\n  --")
