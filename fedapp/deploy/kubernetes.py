"""Kubernetes manifests for ``kubectl apply -k``: one namespace per coordinator or site.

No manifest contains a key: kustomize makes a Secret for each container from the files beside it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedapp.deploy import nginx
from fedapp.deploy.machine import PUBLIC, SECRET, Machine, Texts, as_yaml
from fedapp.deploy.processes import Federation, Site, sealed_environment

Object = dict[str, Any]
# Mount paths of keys, state and a site's tables.
_KEYS, _STATE, TABLES = "/etc/fedapp", "/var/lib/fedapp", "/tables"
_USER_ID = 10001
_COMMENT = "# kubectl apply -k FOLDER\n"
# Requested CPU and memory, and memory limit; a relay only forwards messages.
_RELAY, _TRAINING = ("100m", "512Mi", "2Gi"), ("500m", "1Gi", "8Gi")
_PROXY = ("50m", "32Mi", "256Mi")
_DNS_PORTS = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]


def manifests_federation(machine: Machine, federation: Federation) -> Texts:
    """Manifests of SuperLink, SuperExec and nginx, which share the loopback of one pod."""
    ports = {"sites": federation.public_port, "users": federation.users_port}
    superlink = federation.superlink(_KEYS, _STATE)
    superexec = federation.superexec(_KEYS)
    containers = [
        _fedapp(machine, "superlink", superlink, _RELAY, [_mount("state", _STATE, "superlink")])
        | {"livenessProbe": _alive(federation.health(_KEYS))},
        _fedapp(machine, "superexec", superexec, _TRAINING, [_mount("state", _STATE, "superexec")]),
        _container("nginx", nginx.IMAGE, nginx.container_words(_KEYS), _PROXY)
        | {
            "ports": [{"name": who, "containerPort": port} for who, port in ports.items()],
            "readinessProbe": {"tcpSocket": {"port": "sites"}},
        },
    ]
    workload = _workload("StatefulSet", "superlink", containers, {"state": _claimed("state")})
    workload["spec"]["serviceName"] = "sites"
    objects = [
        _namespace(federation.name),
        _claim("state"),
        *(_service(who, "superlink", port) for who, port in ports.items()),
        workload,
        _policy("nobody", ""),
        _policy("superlink", "superlink", ingress=[{"ports": [_tcp(p) for p in ports.values()]}]),
    ]
    # Copy the host's certificate: kustomize reads only files of its folder.
    host_files = {"host.crt": federation.certificate, "host.key": federation.key}
    copies = {name: (Path(path).read_text(), SECRET) for name, path in host_files.items() if path}
    certificate, key = copies or ("server.crt", "server.key")
    secrets = {
        "superlink": ["ca.crt", "server.crt", "server.key", "superexec.secret"],
        "superexec": ["ca.crt", "superexec.secret"],
        "nginx": ["ca.crt", certificate, key, "nginx.conf", "nginx.users"],
    }
    return {
        **_texts(machine, federation.name, objects, secrets),
        **nginx.for_container(federation, _KEYS, (f"{_KEYS}/{certificate}", f"{_KEYS}/{key}")),
        **copies,
    }


def manifests_site(machine: Machine, site: Site) -> Texts:
    """Manifests of SuperNode and SuperExec in separate pods, with network policies."""
    supernode = _fedapp(
        machine,
        "supernode",
        site.supernode(_KEYS, listens="0.0.0.0"),
        _RELAY,
        [_mount("state", _STATE)],
    ) | {
        "ports": [{"name": "superexec", "containerPort": site.port}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "superexec"}},
        "livenessProbe": _alive(site.health()),
    }
    # Kubernetes fills in the Service's address, since the pod has no DNS.
    superexec = _fedapp(
        machine,
        "superexec",
        site.superexec(_KEYS, supernode="$(SUPERNODE_SERVICE_HOST)"),
        _TRAINING,
        [_mount("state", _STATE), _mount("tables", TABLES) | {"readOnly": True}],
    ) | {"livenessProbe": _alive(site.superexec_health(_STATE))}
    claims = {name: _claimed(name) for name in ("state", "tables")}
    between = [_tcp(site.port)]
    objects = [
        _namespace(site.name),
        *(_claim(name) for name in claims),
        _service("supernode", "supernode", site.port),
        _workload("Deployment", "supernode", [supernode], {"state": {"emptyDir": {}}}),
        _workload("Deployment", "superexec", [superexec], claims),
        _policy("nobody", ""),
        _policy(
            "supernode",
            "supernode",
            ingress=[{"from": [_pods("superexec")], "ports": between}],
            egress=_to(site.superlink),
        ),
        _policy("superexec", "superexec", egress=[{"to": [_pods("supernode")], "ports": between}]),
    ]
    secrets = {"supernode": site.key_files(), "superexec": ["superexec.secret"]}
    return _texts(machine, site.name, objects, secrets)


def _texts(
    machine: Machine, name: str, objects: Sequence[Object], secrets: Mapping[str, Sequence[str]]
) -> Texts:
    """The manifest, and a kustomization that makes Secrets from the files beside it."""
    image, _, tag = machine.image.partition(":")
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": _namespace(name)["metadata"]["name"],
        "resources": ["manifest.yaml"],
        "images": [{"name": image, "newName": image, "newTag": tag}],
        # Without a hash in their names, changed Secrets reach pods without a restart: adding a
        # user does not end a run.
        "generatorOptions": {"disableNameSuffixHash": True},
        "secretGenerator": [
            {"name": secret, "files": list(files)} for secret, files in secrets.items()
        ],
    }
    return {
        "manifest.yaml": (as_yaml(_COMMENT, *objects), PUBLIC),
        "kustomization.yaml": (as_yaml("", kustomization), PUBLIC),
        **machine.dockerfile(),
    }


def _object(api: str, kind: str, name: str, **body: Any) -> Object:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, **body}


def _namespace(name: str) -> Object:
    namespace = _object("v1", "Namespace", f"fedapp-{name}")
    # Pods that ask for privileges are refused.
    namespace["metadata"]["labels"] = {"pod-security.kubernetes.io/enforce": "restricted"}
    return namespace


def _claim(name: str) -> Object:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}}
    return _object("v1", "PersistentVolumeClaim", name, spec=spec)


def _service(name: str, app: str, port: int) -> Object:
    ports = [{"port": port, "targetPort": port}]
    return _object("v1", "Service", name, spec={"selector": {"app": app}, "ports": ports})


def _workload(
    kind: str, name: str, containers: Sequence[Object], volumes: Mapping[str, Object]
) -> Object:
    """A workload of one pod, stopped before its successor starts: a SuperNode key allows one."""
    labels = {"app": name}
    sources = {"tmp": {"emptyDir": {}}, **volumes}
    for container in containers:
        secret = {"secretName": container["name"], "defaultMode": 0o440}
        sources[f"{container['name']}-keys"] = {"secret": secret}
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), _USER_ID),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": list(containers),
        "volumes": [{"name": volume, **source} for volume, source in sources.items()],
    }
    spec: Object = {"replicas": 1, "selector": {"matchLabels": labels}}
    if kind == "Deployment":
        spec["strategy"] = {"type": "Recreate"}
    spec["template"] = {"metadata": {"labels": labels}, "spec": pod}
    return _object("apps/v1", kind, name, spec=spec)


def _fedapp(
    machine: Machine,
    name: str,
    command: Sequence[str],
    size: tuple[str, str, str],
    mounts: Sequence[Object],
) -> Object:
    container = _container(name, machine.image, command, size)
    container["volumeMounts"] += mounts
    environment = sealed_environment(_STATE, machine.name)
    return container | {
        "env": [{"name": key, "value": value} for key, value in environment.items()]
    }


def _container(name: str, image: str, command: Sequence[str], size: tuple[str, str, str]) -> Object:
    """A container without privileges that can write to its volumes only."""
    cpu, memory, limit = size
    return {
        "name": name,
        "image": image,
        "args": list(command),
        "volumeMounts": [_mount("tmp", "/tmp", name), _mount(f"{name}-keys", _KEYS)],
        "resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": limit}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _alive(command: Sequence[str]) -> Object:
    """A probe that ends a container after five minutes; a site may compile that long."""
    timing = {"periodSeconds": 30, "timeoutSeconds": 10, "failureThreshold": 10}
    return {"exec": {"command": list(command)}, **timing}


def _mount(volume: str, path: str, part: str = "") -> Object:
    """`part` is a folder of the volume."""
    return {"name": volume, "mountPath": path} | ({"subPath": part} if part else {})


def _claimed(name: str) -> Object:
    return {"persistentVolumeClaim": {"claimName": name}}


def _policy(name: str, app: str, **rules: Sequence[Object]) -> Object:
    """Network policy of an app's pods, or of all; what no rule allows is denied."""
    spec = {
        "podSelector": {"matchLabels": {"app": app}} if app else {},
        "policyTypes": ["Ingress", "Egress"],
        **rules,
    }
    return _object("networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)


def _pods(app: str) -> Object:
    return {"podSelector": {"matchLabels": {"app": app}}}


def _tcp(port: int) -> Object:
    return {"protocol": "TCP", "port": port}


def _to(superlink: str) -> list[Object]:
    """Egress to the coordinator: its address, or for a host name its port and DNS."""
    host, _, port = superlink.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return [{"ports": [_tcp(int(port))]}, {"ports": _DNS_PORTS}]
    block = {"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}
    return [{"to": [block], "ports": [_tcp(int(port))]}]
