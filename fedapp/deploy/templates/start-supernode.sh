#!/usr/bin/env bash
# The site's SuperNode and the SuperExec that starts the process which reads the rows; and where
# site.toml has a standing-address, the process that scores between runs. Each is started again when
# it ends. This SuperExec runs the fedapp that is installed here; Flower's own would run
# whatever the coordinator sends. After a crash the SuperLink refuses the same key for up to 20 s,
# until it takes the old SuperNode for gone; so it is tried again until it works.
set -u
umask 077
cd {DIR}
. ./env.sh
pause=5 node=
trap 'kill $(jobs -p) 2>/dev/null; wait; exit 0' TERM INT
{KEEP}keep {SUPERNODE} &
# A SuperExec that dies takes the process along that reads the rows. The next one tells the
# SuperNode so. With another Flower than the tested one the SuperNode would wait for the answer for
# ever; so it is ended too.
pause=1 node=$!
keep {SUPEREXEC} &
[ -z "$FEDAPP_METRICS" ] || node= keep {METRICS} &
if grep -q {STANDS} site.toml; then node= keep {STANDING} & fi
wait
