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
    sed -n 's/.*SuperNode \([0-9]*\) registered.*/\1/p' <<< "$shown" > "sites/$name.node"
    echo "$name is registered"
  elif [[ $shown == *"already in use"* ]]; then
    echo "$name was registered before"
  else
    echo "$shown" >&2
    status=1
  fi
done
exit "$status"
