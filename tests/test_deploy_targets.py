"""What `--target` renders: compose files, Kubernetes manifests and systemd units."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from fedapp.commands.site import federation_app
from fedapp.deploy.health import ALIVE
from fedapp.errors import ConfigError
from fedapp.site.settings import parse_node_config
from tests.conftest import WriteTable
from tests.deploy_folders import init_federation, init_site, invoke

PARSERS = {"superlink": _parse_args_run_superlink(), "supernode": _parse_args_run_supernode()}
Object = dict[str, Any]


def options_of(name: str, words: Sequence[str]) -> Any:
    """What Flower makes of the options with which its SuperLink or SuperNode is started."""
    assert list(words[:4]) == ["python", "-P", "-m", f"fedapp.deploy.{name}"]
    return PARSERS[name].parse_args(words[4:])


@pytest.fixture
def folders(tmp_path: Path, write_table: WriteTable) -> Iterator[Any]:
    """``folders(target, *options)``: a coordinator's and a site's; options are the site's."""
    table = write_table("rows")

    def init(target: str, *options: str) -> tuple[Path, Path]:
        coordinator, _ = init_federation(tmp_path, "--target", target)
        return coordinator, init_site(tmp_path, table, "--target", target, *options)[0]

    return init


def test_a_folder_holds_what_its_target_needs_and_nothing_of_the_others(folders: Any) -> None:
    own = {
        "scripts": ({"start-superlink.sh"}, {"start-supernode.sh"}),
        "compose": ({"compose.yaml", "Dockerfile"}, {"compose.yaml", "Dockerfile"}),
        "kubernetes": (
            {"manifest.yaml", "kustomization.yaml", "Dockerfile"},
            {"manifest.yaml", "kustomization.yaml", "Dockerfile"},
        ),
        "systemd": (
            {"fedapp-federation-superlink.service", "fedapp-federation-superexec.service"},
            {"fedapp-bank-supernode.service", "fedapp-bank-superexec.service"},
        ),
    }
    every = set().union(*(set().union(*pair) for pair in own.values()))
    for target, expected in own.items():
        for folder, names in zip(folders(target), expected, strict=True):
            assert {path.name for path in folder.iterdir()} & every == names
            shutil.rmtree(folder)


def test_a_target_that_is_none_is_refused(folders: Any) -> None:
    with pytest.raises(ConfigError, match=r"target must be scripts, compose, kubernetes, systemd"):
        folders("helm")


def test_a_name_that_no_namespace_may_bear_is_refused(folders: Any) -> None:
    with pytest.raises(ConfigError, match=r"name must be .* for --target kubernetes, got 'Bank_1'"):
        folders("kubernetes", "--name", "Bank_1")


# Compose


def composed(folder: Path) -> Object:
    return yaml.safe_load((folder / "compose.yaml").read_text())  # type: ignore[no-any-return]


def mounts(service: Mapping[str, Any]) -> dict[str, str]:
    """Path in the container -> how it is mounted."""
    found = {}
    for volume in service["volumes"]:
        outside, inside, *mode = volume.split(":")
        assert Path(outside).exists()
        found[inside] = mode[0] if mode else "rw"
    return found


def test_services_have_pinned_images_and_are_read_only_without_capabilities(folders: Any) -> None:
    for folder in folders("compose"):
        for service in composed(folder)["services"].values():
            assert service["image"].rpartition(":")[2][0].isdigit()
            assert service["read_only"]
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]


def test_what_a_service_is_told_to_read_is_mounted_and_flower_takes_its_options(
    folders: Any,
) -> None:
    for folder in folders("compose"):
        document = composed(folder)
        for name, service in document["services"].items():
            inside = [Path(path) for path in mounts(service)]
            for word in (word for word in service["command"] if word.startswith(str(folder))):
                assert any(Path(word).is_relative_to(path) for path in inside), word
            for other in service.get("depends_on", []):
                assert other in document["services"]
            for network in service.get("networks", []):
                assert network in document["networks"]
            if name in PARSERS:
                assert options_of(name, service["command"]).isolation == "process"


def test_the_process_that_reads_a_sites_rows_has_no_way_out_and_the_other_one_no_rows(
    folders: Any,
) -> None:
    _, folder = folders("compose")
    data = parse_node_config(str(folder / "site.toml"))["data"]
    document = composed(folder)
    supernode, superexec = (document["services"][name] for name in ("supernode", "superexec"))
    assert superexec["networks"] == ["inside"]
    assert superexec["dns"] == ["127.0.0.1"]
    assert document["networks"]["inside"] == {
        "internal": True,
        "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"},
    }
    assert mounts(superexec)[str(data)] == "ro"
    assert str(data) not in mounts(supernode)
    assert not any("supernode.key" in path for path in mounts(superexec))


def test_services_are_asked_for_their_health_where_they_listen(folders: Any) -> None:
    coordinator, site = folders("compose")
    checks = {}
    for folder in (coordinator, site):
        for name, service in composed(folder)["services"].items():
            if "healthcheck" in service:
                kind, *words = service["healthcheck"]["test"]
                assert (kind, words[:4]) == (
                    "CMD",
                    ["python", "-P", "-m", "fedapp.deploy.health"],
                )
                checks[folder.name, name] = words[4:]
    assert checks == {
        ("coordinator", "superlink"): ["https://localhost:8000", f"{coordinator}/ca.crt"],
        ("bank", "supernode"): ["http://127.0.0.1:9094"],
        ("bank", "superexec"): [f"{site}/home/{ALIVE}"],
    }


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="needs docker-compose")
def test_docker_compose_takes_the_files(folders: Any) -> None:
    for folder in folders("compose"):
        command = ["docker-compose", "--file", str(folder / "compose.yaml"), "config"]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert yaml.safe_load(shown)["services"].keys() == composed(folder)["services"].keys()


def test_what_runs_a_users_app_sees_no_key_and_no_password(folders: Any) -> None:
    for target in ("compose", "kubernetes", "systemd"):
        coordinator, site = folders(target)
        if target == "compose":
            names = {
                Path(path).name for path in mounts(composed(coordinator)["services"]["superexec"])
            }
        elif target == "kubernetes":
            names = set(of_kind(kustomized(coordinator), "Secret")["superexec"]["data"]) | {
                "flower",
                "home",
            }
        else:
            found = unit(coordinator / "fedapp-federation-superexec.service")
            hidden = set(found["InaccessiblePaths"][0].split())
            assert hidden == {f"{coordinator}/{name}" for name in ("ca.key", "server.key", "users")}
            continue
        assert names == {"ca.crt", "superexec.secret", "flower", "home"}
        shutil.rmtree(coordinator)
        shutil.rmtree(site)


# Kubernetes


def kustomized(folder: Path) -> list[Object]:
    """What ``kubectl apply -k`` sends, with a name alone for what a Secret holds."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    objects = []
    for resource in kustomization["resources"]:
        objects += list(yaml.safe_load_all((folder / resource).read_text()))
    for secret in kustomization["secretGenerator"]:
        assert all((folder / name).is_file() for name in secret["files"])
        named = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": secret["name"]}}
        objects.append(named | {"data": dict.fromkeys(secret["files"], "")})
    return objects


def of_kind(objects: list[Object], *kinds: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] in kinds}


def pods(objects: list[Object]) -> dict[str, Object]:
    """Label ``app`` -> pod."""
    found = {}
    for name, workload in of_kind(objects, "Deployment", "StatefulSet").items():
        template = workload["spec"]["template"]
        assert workload["apiVersion"] == "apps/v1"
        assert workload["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
        assert template["metadata"]["labels"] == {"app": name}
        found[name] = template["spec"]
    return found


def test_every_volume_secret_claim_and_port_that_a_pod_names_exists(folders: Any) -> None:
    for folder in folders("kubernetes"):
        objects = kustomized(folder)
        secrets, claims = of_kind(objects, "Secret"), of_kind(objects, "PersistentVolumeClaim")
        for pod in pods(objects).values():
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            for volume in volumes.values():
                if "secret" in volume:
                    assert volume["secret"]["secretName"] in secrets
                if "persistentVolumeClaim" in volume:
                    assert volume["persistentVolumeClaim"]["claimName"] in claims
            for container in pod["containers"]:
                held = {}
                for mount in container["volumeMounts"]:
                    volume = volumes.pop(mount["name"], None) or {"name": mount["name"]}
                    held[mount["mountPath"]] = secrets.get(
                        volume.get("secret", {}).get("secretName", ""), {}
                    ).get("data")
                for word in container["args"]:
                    place, _, name = word.rpartition("/")
                    if held.get(place):
                        assert name in held[place], word
                names = {port["name"] for port in container.get("ports", [])}
                probe = container.get("readinessProbe", {})
                for check in probe.values():
                    assert not isinstance(check, dict) or check["port"] in names
                words = container.get("livenessProbe", {"exec": {"command": []}})["exec"]["command"]
                assert words[:4] in ([], ["python", "-P", "-m", "fedapp.deploy.health"])
                if len(words) == 6:
                    assert Path(words[5]).name in held[str(Path(words[5]).parent)]
            # Each was mounted by a container, and tmp and state maybe by several.
            assert not volumes
        for service in of_kind(objects, "Service").values():
            pod = pods(objects)[service["spec"]["selector"]["app"]]
            open_ports = {
                port["containerPort"] for one in pod["containers"] for port in one.get("ports", [])
            }
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= open_ports


def test_pods_keep_to_the_restricted_standard_and_have_resources(folders: Any) -> None:
    for folder in folders("kubernetes"):
        objects = kustomized(folder)
        (namespace,) = of_kind(objects, "Namespace").values()
        labels = namespace["metadata"]["labels"]
        assert labels == {"pod-security.kubernetes.io/enforce": "restricted"}
        for pod in pods(objects).values():
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["securityContext"]["runAsUser"] > 0
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not pod["automountServiceAccountToken"]
            for container in pod["containers"]:
                guards = container["securityContext"]
                assert guards["readOnlyRootFilesystem"]
                assert not guards["allowPrivilegeEscalation"]
                assert guards["capabilities"] == {"drop": ["ALL"]}
                assert container["resources"]["requests"].keys() == {"cpu", "memory"}
                assert container["resources"]["limits"]["memory"]


def test_flower_takes_the_options_of_the_pods(folders: Any) -> None:
    found = set()
    for folder in folders("kubernetes"):
        for pod in pods(kustomized(folder)).values():
            for container in pod["containers"]:
                if (name := container["name"]) in PARSERS:
                    assert options_of(name, container["args"]).isolation == "process"
                    found.add(name)
    assert found == set(PARSERS)


def reached(objects: list[Object], app: str, way: str) -> list[Object]:
    """Rules of all policies that hold for a pod, ``Ingress`` or ``Egress``; denied by default."""
    policies = [one["spec"] for one in of_kind(objects, "NetworkPolicy").values()]
    mine = [
        one
        for one in policies
        if one["podSelector"] in ({}, {"matchLabels": {"app": app}}) and way in one["policyTypes"]
    ]
    assert any(one["podSelector"] == {} for one in mine)
    return [rule for one in mine for rule in one.get(way.lower(), [])]


def test_the_pod_that_reads_a_sites_rows_reaches_its_supernode_alone(folders: Any) -> None:
    _, folder = folders("kubernetes")
    objects = kustomized(folder)
    to_supernode = {"podSelector": {"matchLabels": {"app": "supernode"}}}
    port = {"protocol": "TCP", "port": 9094}
    assert reached(objects, "superexec", "Egress") == [{"to": [to_supernode], "ports": [port]}]
    assert reached(objects, "superexec", "Ingress") == []
    from_superexec = {"podSelector": {"matchLabels": {"app": "superexec"}}}
    (rule,) = reached(objects, "supernode", "Ingress")
    assert rule == {"from": [from_superexec], "ports": [port]}
    superexec, supernode = (pods(objects)[name] for name in ("superexec", "supernode"))
    claims = [volume for volume in supernode["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == []
    (container,) = superexec["containers"]
    address = container["args"][container["args"].index("--runtime-api-address") + 1]
    assert address == "$(SUPERNODE_SERVICE_HOST):9094"
    assert "supernode" in of_kind(objects, "Service")
    (tables,) = (one for one in container["volumeMounts"] if one["name"] == "tables")
    assert tables["readOnly"]
    data = parse_node_config(str(folder / "site.toml"))["data"]
    assert Path(str(data)).parent == Path(tables["mountPath"])


@pytest.mark.parametrize(
    ("superlink", "ways"),
    [
        ("fed.example.org:9092", [{"ports": [{"protocol": "TCP", "port": 9092}]}]),
        (
            "192.0.2.7:9092",
            [
                {
                    "to": [{"ipBlock": {"cidr": "192.0.2.7/32"}}],
                    "ports": [{"protocol": "TCP", "port": 9092}],
                }
            ],
        ),
    ],
)
def test_the_supernode_reaches_the_coordinator_and_the_names_server_alone(
    folders: Any, superlink: str, ways: list[Object]
) -> None:
    _, folder = folders("kubernetes", "--superlink", superlink)
    found = reached(kustomized(folder), "supernode", "Egress")
    dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    assert found == [*ways, *([] if superlink[0].isdigit() else [{"ports": dns}])]


def test_the_coordinators_pod_is_reached_by_nginxs_ports_and_reaches_nothing(folders: Any) -> None:
    coordinator, _ = folders("kubernetes")
    objects = kustomized(coordinator)
    ports = [{"protocol": "TCP", "port": port} for port in (9092, 9093)]
    assert reached(objects, "superlink", "Ingress") == [{"ports": ports}]
    assert reached(objects, "superlink", "Egress") == []


def test_an_operator_reaches_a_superlink_in_a_cluster_as_a_user(folders: Any) -> None:
    coordinator, _ = folders("kubernetes")
    config = tomllib.loads((coordinator / "flower" / "config.toml").read_text())
    address = config["superlink"]["federation"]["address"]
    assert re.fullmatch(r"operator:[0-9a-f]{64}@fed\.example\.org:9093", address)
    assert (coordinator / "nginx.users").read_text().startswith("operator:{SSHA}")
    shown = invoke(federation_app, "user", str(coordinator), "ann")
    assert f"kubectl apply -k {coordinator}" in shown
    assert len((coordinator / "nginx.users").read_text().splitlines()) == 2


def test_the_hosts_own_certificate_is_in_the_proxys_secret_alone(tmp_path: Path) -> None:
    for name in ("own.pem", "own-key.pem"):
        (tmp_path / name).write_text(name)
    given = ("--certificate", str(tmp_path / "own.pem"), "--key", str(tmp_path / "own-key.pem"))
    folder, _ = init_federation(tmp_path, "--target", "kubernetes", *given)
    assert (folder / "host.crt").read_text() == "own.pem"
    assert (folder / "host.key").read_text() == "own-key.pem"
    assert (folder / "host.key").stat().st_mode & 0o077 == 0
    secrets = of_kind(kustomized(folder), "Secret")
    holders = {name for name, one in secrets.items() if "host.key" in one["data"]}
    assert holders == {"nginx"}
    assert "server.key" not in secrets["nginx"]["data"]
    assert "ssl_certificate /etc/fedapp/host.crt;" in (folder / "nginx.conf").read_text()


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl")
def test_kustomize_makes_the_same_objects_in_the_namespace(folders: Any) -> None:
    for folder in folders("kubernetes"):
        command = ["kubectl", "kustomize", str(folder)]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        made = list(yaml.safe_load_all(shown))
        expected = kustomized(folder)
        assert sorted((one["kind"], one["metadata"]["name"]) for one in made) == sorted(
            (one["kind"], one["metadata"]["name"]) for one in expected
        )
        (namespace,) = of_kind(made, "Namespace")
        assert {one["metadata"].get("namespace", namespace) for one in made} == {namespace}
        for name, secret in of_kind(made, "Secret").items():
            assert secret["data"].keys() == of_kind(expected, "Secret")[name]["data"].keys()


# systemd


def unit(path: Path) -> dict[str, list[str]]:
    """Key -> values, in the order of the file."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals:
            found.setdefault(key, []).append(value)
    return found


def test_units_start_what_the_other_targets_start(folders: Any) -> None:
    coordinator, site = folders("systemd")
    for path, name in (
        (coordinator / "fedapp-federation-superlink.service", "superlink"),
        (site / "fedapp-bank-supernode.service", "supernode"),
    ):
        program, *words = shlex.split(unit(path)["ExecStart"][0])
        assert options_of(name, [Path(program).name, *words]).isolation == "process"


def test_a_unit_has_started_once_its_process_answers_and_metrics_are_off(folders: Any) -> None:
    coordinator, site = folders("systemd")
    asked = "python -P -m fedapp.deploy.health"
    for path, place in (
        (
            coordinator / "fedapp-federation-superlink.service",
            f"https://localhost:8000 {coordinator}/ca.crt",
        ),
        (site / "fedapp-bank-supernode.service", "http://127.0.0.1:9094"),
    ):
        (line,) = unit(path)["ExecStartPost"]
        assert line == f"/bin/sh -c 'until {asked} {place}; do sleep 1; done'"
    for path in (
        coordinator / "fedapp-federation-metrics.service",
        site / "fedapp-bank-metrics.service",
    ):
        found = unit(path)
        assert "FEDAPP_METRICS=" in found["Environment"]
        (condition,) = found["ExecCondition"]
        for port, status in (("", 1), ("9464", 0)):
            done = subprocess.run(shlex.split(condition), env={"FEDAPP_METRICS": port}, check=False)
            assert done.returncode == status
        assert found["ExecStart"][0].endswith("-m fedapp metrics --port ${FEDAPP_METRICS}")
        assert found["IPAddressDeny"] == ["any"]
    data = str(parse_node_config(str(site / "site.toml"))["data"])
    assert found["InaccessiblePaths"] == [f"-{site}/home/sites {data}"]


def test_a_sites_units_part_the_rows_from_the_network_and_end_together(folders: Any) -> None:
    _, folder = folders("systemd")
    data = str(parse_node_config(str(folder / "site.toml"))["data"])
    supernode = unit(folder / "fedapp-bank-supernode.service")
    superexec = unit(folder / "fedapp-bank-superexec.service")
    assert data in supernode["InaccessiblePaths"][0].split()
    assert f"{folder}/home" in supernode["InaccessiblePaths"][0].split()
    assert superexec["InaccessiblePaths"] == [f"{folder}/supernode.key"]
    assert superexec["IPAddressDeny"] == ["any"]
    assert superexec["IPAddressAllow"] == ["localhost"]
    assert supernode["PartOf"] == ["fedapp-bank-superexec.service"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_takes_the_units(folders: Any) -> None:
    for folder in folders("systemd"):
        units = [str(path) for path in folder.glob("*.service")]
        assert len(units) == 3
        command = ["systemd-analyze", "verify", *units]
        checked = subprocess.run(command, check=False, capture_output=True, text=True)
        assert (checked.returncode, str(folder) in checked.stderr) == (0, False), checked.stderr
