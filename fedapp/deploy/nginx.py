"""nginx in front of a coordinator's SuperLink.

The SuperLink serves all its routes on one port and does not authenticate users who start runs. So
it listens on the loopback only, and nginx forwards two path prefixes, each on its own port:
``/v1/fleet/`` to sites, which the SuperLink knows by their keys, and ``/v1/control/`` to users with
a password.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from base64 import b64encode
from pathlib import Path

from fedapp.deploy.machine import PUBLIC, Machine, Texts, fill
from fedapp.deploy.processes import Federation

IMAGE = "nginx:1.28.0"

# The SuperLink closes a connection that was silent for 5 s; nginx closes it first.
_SERVERS = """\
upstream {UPSTREAM} {
    server 127.0.0.1:{PORT};
    keepalive 32;
    keepalive_timeout 4s;
}

# The sites.
server {
    listen {PUBLIC_PORT} ssl;
{TLS}

    location /v1/fleet/ {
{PASS}
        proxy_request_buffering off;
    }
    location / {
        return 403;
    }
}

# Users, who start runs and register sites; their names and passwords by `fedapp federation user`.
server {
    listen {USERS_PORT} ssl;
{TLS}

    location /v1/control/ {
        auth_basic fedapp;
        auth_basic_user_file {USERS};
        proxy_set_header Authorization "";
{PASS}
        proxy_buffering off;
    }
    location / {
        return 403;
    }
}
"""

_TLS = """\
    server_name {HOST};
    ssl_certificate {CERTIFICATE};
    ssl_certificate_key {KEY};
    ssl_protocols TLSv1.2 TLSv1.3;
    keepalive_requests 1000000;
    client_max_body_size 64m;"""

_PASS = """\
        proxy_pass https://{UPSTREAM};
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_ssl_verify on;
        proxy_ssl_trusted_certificate {CA};
        proxy_ssl_name localhost;
        proxy_read_timeout 300s;"""

# A whole configuration for an nginx without root that can write to /tmp only.
_WHOLE = """\
# Without root it stays who it is anyway.
user root root;
worker_processes 1;
pid /tmp/nginx.pid;
error_log stderr;
events {
}
http {
    access_log off;
    client_body_temp_path /tmp/nginx-body;
    proxy_temp_path /tmp/nginx-proxy;
    fastcgi_temp_path /tmp/nginx-fastcgi;
    uwsgi_temp_path /tmp/nginx-uwsgi;
    scgi_temp_path /tmp/nginx-scgi;

{SERVERS}}
"""


def for_host(machine: Machine, federation: Federation) -> Texts:
    """Configuration for the http block of the host's nginx."""
    # nginx workers cannot read the coordinator's folder, so the users file is elsewhere.
    users = f"/etc/nginx/fedapp-{federation.name}.users"
    text = _servers(federation, certificate_of(machine, federation), machine.folder, users)
    return {"nginx.conf": (text, PUBLIC)}


def certificate_of(machine: Machine, federation: Federation) -> tuple[str, str]:
    """Paths of the certificate that nginx presents and of its key."""
    generated = (f"{machine.folder}/server.crt", f"{machine.folder}/server.key")
    return (federation.certificate, federation.key) if federation.certificate else generated


def users_path(config: Path) -> str:
    """Path of the users file that an nginx configuration names."""
    return str(re.findall(r"auth_basic_user_file (\S+);", config.read_text())[0])


def for_container(federation: Federation, folder: str, certificate: tuple[str, str]) -> Texts:
    """A whole configuration for a container that finds the other files in `folder`."""
    text = _servers(federation, certificate, folder, f"{folder}/nginx.users")
    return {"nginx.conf": (fill(_WHOLE, {"SERVERS": text}), PUBLIC)}


def container_words(folder: str) -> list[str]:
    """Command that runs nginx in a container."""
    return ["nginx", "-c", f"{folder}/nginx.conf", "-g", "daemon off;"]


def _servers(federation: Federation, certificate: tuple[str, str], folder: str, users: str) -> str:
    values = {
        "UPSTREAM": f"fedapp-{federation.name}",
        "HOST": federation.host,
        "PUBLIC_PORT": str(federation.public_port),
        "USERS_PORT": str(federation.users_port),
        "PORT": str(federation.port),
        "CERTIFICATE": certificate[0],
        "KEY": certificate[1],
        "CA": f"{folder}/ca.crt",
        "USERS": users,
    }
    return fill(_SERVERS.replace("{TLS}", _TLS).replace("{PASS}", _PASS), values)


def user_line(name: str) -> tuple[str, str]:
    """A new random password for a user, and the user's line in nginx's users file."""
    # A salted SHA-1 is enough for 256 random bits, and every build of nginx supports it.
    password, salt = secrets.token_hex(32), secrets.token_bytes(16)
    digest = hashlib.sha1(password.encode() + salt).digest()
    return password, f"{name}:{{SSHA}}{b64encode(digest + salt).decode()}\n"
