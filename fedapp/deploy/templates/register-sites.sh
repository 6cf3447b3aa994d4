#!/usr/bin/env bash
# Register the public keys of the sites, one sites/NAME.pub each; it may be run again.
. {DIR}/env.sh
exec fedapp federation add {DIR}
