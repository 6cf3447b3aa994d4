"""Texts of the files a deployment consists of; ``{NAME}`` is filled in by ``fill``."""

from __future__ import annotations

import re
from collections.abc import Mapping

ENVIRONMENT = """\
export PATH={BIN}:"$PATH"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
# Flower's SuperExec asks for work every second by default.
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.05
export FLWR_HOME={DIR}/flower FEDAPP_HOME={DIR}/home
"""

# A shell function: what ends is started again, what is told to stop stops what it has started.
KEEP = """\
keep() {
  trap 'kill $(jobs -p) 2>/dev/null; wait; exit 0' TERM INT
  while true; do
    "$@" & child=$!
    wait "$child"
    echo "$1 has ended; starting it again in $pause s" >&2
    [ -z "$node" ] || pkill -KILL -P "$node"
    sleep "$pause" & child=$!
    wait "$child"
  done
}
"""

START_SUPERLINK = (
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
    + KEEP
    + """\
keep flower-superlink --isolation process --database {DIR}/superlink.db \\
  --host 127.0.0.1 --port {PORT} --enable-supernode-auth \\
  --ssl-ca-certfile {DIR}/ca.crt --ssl-certfile {DIR}/server.crt --ssl-keyfile {DIR}/server.key \\
  --superexec-auth-secret-file {DIR}/superexec.secret &
keep flower-superexec --runtime-api-address 127.0.0.1:{PORT} --root-certificates {DIR}/ca.crt \\
  --superexec-auth-secret-file {DIR}/superexec.secret &
wait
"""
)

START_SUPERNODE = (
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
    + KEEP
    + """\
keep flower-supernode --superlink {SUPERLINK} {ROOT} \\
  --auth-supernode-private-key {DIR}/supernode.key \\
  --isolation process --superexec-auth-secret-file {DIR}/superexec.secret \\
  --host 127.0.0.1 --port {PORT} --node-config {DIR}/site.toml &
# A SuperExec that dies takes the process along that reads the rows, for whose answer Flower's
# SuperNode then waits for ever: so it is ended too.
pause=1 node=$!
keep python -P -m fedapp.deploy.superexec --insecure --runtime-api-address 127.0.0.1:{PORT} \\
  --superexec-auth-secret-file {DIR}/superexec.secret &
wait
"""
)

REGISTER_SITES = """\
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
  elif shown=$(flwr supernode register "sites/$name.pub" {NAME} --name "$name" 2>&1); then
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

UNIT = """\
[Unit]
Description=fedapp: {WHAT}
Wants=network-online.target
After=network-online.target

[Service]
User={USER}
ExecStart={DIR}/{SCRIPT}
Restart=always
RestartSec=5
UMask=0077
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=strict
ReadWritePaths={DIR}

[Install]
WantedBy=multi-user.target
"""

NGINX = """\
# For nginx's http block. Sites reach the fleet routes and nothing else: the same port also has the
# routes that start runs and register sites, and the open-source SuperLink asks nobody who they are.
server {
    listen {PUBLIC_PORT} ssl;
    server_name {HOST};
    ssl_certificate {CERTIFICATE};
    ssl_certificate_key {KEY};
    ssl_protocols TLSv1.2 TLSv1.3;
    client_max_body_size 64m;

    location /v1/fleet/ {
        proxy_pass https://127.0.0.1:{PORT};
        proxy_http_version 1.1;
        proxy_ssl_verify on;
        proxy_ssl_trusted_certificate {DIR}/ca.crt;
        proxy_ssl_name localhost;
        proxy_read_timeout 300s;
        proxy_request_buffering off;
    }
    location / {
        return 403;
    }
}
"""

FLOWER_CONFIG = """\
[superlink]
default = "{NAME}"

[superlink.{NAME}]
address = "127.0.0.1:{PORT}"
root-certificates = "{DIR}/ca.crt"
"""

DOCKERFILE = """\
# docker build --tag {IMAGE} --file {DIR}/Dockerfile {APP}
FROM python:{PYTHON}-slim
COPY . /opt/fedapp
RUN pip install --no-cache-dir --constraint /opt/fedapp/constraints.txt --editable /opt/fedapp
"""

COMPOSE_FEDERATION = """\
# docker compose up --detach; the host's network, so that all listens on the loopback but nginx.
x-fedapp: &fedapp
  image: {IMAGE}
  network_mode: host
  restart: always
  user: "{UID}:{GID}"
  environment: &environment
    FLWR_TELEMETRY_ENABLED: "0"
    FLWR_DISABLE_UPDATE_CHECK: "1"
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION: "1"
    FLWR_SUPEREXEC_TASK_POLL_INTERVAL: "0.05"
    FLWR_HOME: {DIR}/flower
    FEDAPP_HOME: {DIR}/home
  volumes: ["{DIR}:{DIR}"]

services:
  superlink:
    <<: *fedapp
    command: >-
      flower-superlink --isolation process --database {DIR}/superlink.db
      --host 127.0.0.1 --port {PORT} --enable-supernode-auth
      --ssl-ca-certfile {DIR}/ca.crt --ssl-certfile {DIR}/server.crt --ssl-keyfile {DIR}/server.key
      --superexec-auth-secret-file {DIR}/superexec.secret
  superexec:
    <<: *fedapp
    depends_on: [superlink]
    command: >-
      flower-superexec --runtime-api-address 127.0.0.1:{PORT} --root-certificates {DIR}/ca.crt
      --superexec-auth-secret-file {DIR}/superexec.secret
  nginx:
    image: nginx:1.28.0
    network_mode: host
    restart: always
    volumes:
      - {DIR}/nginx.conf:/etc/nginx/conf.d/default.conf:ro
      - {DIR}/ca.crt:{DIR}/ca.crt:ro
      - {CERTIFICATE}:{CERTIFICATE}:ro
      - {KEY}:{KEY}:ro
"""

COMPOSE_SITE = """\
# docker compose up --detach. The SuperNode has the network and the key, but no rows; the process
# that reads the rows has no network but to the SuperNode. A superexec that died is started again,
# but Flower's SuperNode waits for the answer of what died with it: docker compose restart supernode
x-fedapp: &fedapp
  image: {IMAGE}
  restart: always
  user: "{UID}:{GID}"
  environment:
    FLWR_TELEMETRY_ENABLED: "0"
    FLWR_DISABLE_UPDATE_CHECK: "1"
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION: "1"
    FLWR_SUPEREXEC_TASK_POLL_INTERVAL: "0.05"
    FLWR_HOME: {DIR}/flower
    FEDAPP_HOME: {DIR}/home

services:
  supernode:
    <<: *fedapp
    networks: [outside, inside]
    volumes: {KEY_VOLUMES}
    command: >-
      flower-supernode --superlink {SUPERLINK} {ROOT}
      --auth-supernode-private-key {DIR}/supernode.key
      --isolation process --superexec-auth-secret-file {DIR}/superexec.secret
      --host 0.0.0.0 --port 9094 --node-config {DIR}/site.toml
  superexec:
    <<: *fedapp
    depends_on: [supernode]
    networks: [inside]
    volumes:
      - {DIR}/home:{DIR}/home
      - {DIR}/flower:{DIR}/flower
      - {DIR}/superexec.secret:{DIR}/superexec.secret:ro
      - {DATA}:{DATA}:ro  # the same for the table of predict-data
    command: >-
      python -P -m fedapp.deploy.superexec --insecure --runtime-api-address supernode:9094
      --superexec-auth-secret-file {DIR}/superexec.secret

networks:
  outside: {}
  inside:
    internal: true
"""


def fill(template: str, values: Mapping[str, str]) -> str:
    """A template with its ``{NAME}`` filled in; braces around anything else stay."""
    return re.sub(r"\{([A-Z_]+)\}", lambda found: values[found[1]], template)
