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
