#!/usr/bin/env bash
# SuperLink and the SuperExec that starts the ServerApp, each started again when it ends.
# In process isolation a run survives a SuperLink that comes back.
set -u
umask 077
cd {DIR}
. ./env.sh
pause=1 node=
trap 'kill $(jobs -p) 2>/dev/null; wait; exit 0' TERM INT
{KEEP}keep {SUPERLINK} &
until {HEALTH} > /dev/null; do sleep 1; done
keep {SUPEREXEC} &
[ -z "$FEDAPP_METRICS" ] || keep {METRICS} &
wait
