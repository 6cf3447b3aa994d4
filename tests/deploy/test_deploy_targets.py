"""What `--target` renders: compose files and systemd units."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from fedapp.deploy.health import ALIVE, REACHED
from fedapp.site.settings import parse_node_config
from tests.deploy_folders import init_federation, init_site

PARSERS = {"superlink": _parse_args_run_superlink(), "supernode": _parse_args_run_supernode()}


def options_of(name, words):
    """What Flower makes of the options with which its SuperLink or SuperNode is started."""
    assert list(words[:4]) == ["python", "-P", "-m", f"fedapp.deploy.{name}"]
    return PARSERS[name].parse_args(words[4:])


@pytest.fixture
def folders(tmp_path, write_table):
    """``folders(target, *options)``: a coordinator's and a site's; options are the site's."""
    table = write_table("rows")

    def init(target, *options):
        coordinator, _ = init_federation(tmp_path, "--target", target)
        return coordinator, init_site(tmp_path, table, "--target", target, *options)[0]

    return init


def test_a_folder_holds_what_its_target_needs_and_nothing_of_the_others(folders):
    own = {
        "scripts": ({"start-superlink.sh"}, {"start-supernode.sh"}),
        "compose": ({"compose.yaml", "Dockerfile"}, {"compose.yaml", "Dockerfile"}),
        "systemd": (
            {"fedapp-federation-superlink.service", "fedapp-federation-superexec.service"},
            {"fedapp-bank-supernode.service", "fedapp-bank-superexec.service"},
        ),
    }
    every = set().union(*(set().union(*pair) for pair in own.values()))
    for target, expected in own.items():
        for folder, names in zip(folders(target), expected, strict=True):
            assert {path.name for path in folder.iterdir()} & every == names
            if "start-supernode.sh" in names:
                script = (folder / "start-supernode.sh").read_text()
                assert f"fedapp serve \\\n  --site {folder}/site.toml" in script
            shutil.rmtree(folder)


# Compose


def composed(folder):
    return yaml.safe_load((folder / "compose.yaml").read_text())


def mounts(service):
    """Path in the container -> how it is mounted."""
    found = {}
    for volume in service["volumes"]:
        outside, inside, *mode = volume.split(":")
        assert Path(outside).exists()
        found[inside] = mode[0] if mode else "rw"
    return found


def test_services_are_confined_and_read_what_is_mounted_and_flower_takes_their_options(folders):
    for folder in folders("compose"):
        document = composed(folder)
        for name, service in document["services"].items():
            assert service["image"].rpartition(":")[2][0].isdigit()
            assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
            assert service["security_opt"] == ["no-new-privileges:true"]
            inside = [Path(path) for path in mounts(service)]
            for word in (word for word in service["command"] if word.startswith(str(folder))):
                assert any(Path(word).is_relative_to(path) for path in inside), word
            for other in service.get("depends_on", []):
                assert other in document["services"]
            for network in service.get("networks", []):
                assert network in document["networks"]
            if name in PARSERS:
                assert options_of(name, service["command"]).isolation == "process"
            if name == "standing":
                assert service["profiles"] == ["standing"]


def test_the_process_that_reads_a_sites_rows_has_no_way_out_and_others_no_rows_or_keys(folders):
    coordinator, folder = folders("compose")
    inside = mounts(composed(coordinator)["services"]["superexec"])
    assert {Path(path).name for path in inside} == {"ca.crt", "superexec.secret", "flower", "home"}
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


def test_services_are_asked_for_their_health_where_they_listen(folders):
    coordinator, site = folders("compose")
    checks = {}
    for folder in (coordinator, site):
        for name, service in composed(folder)["services"].items():
            if "healthcheck" in service:
                kind, *words = service["healthcheck"]["test"]
                assert (kind, words[:4]) == ("CMD", ["python", "-P", "-m", "fedapp.deploy.health"])
                checks[folder.name, name] = words[4:]
    assert checks == {
        ("coordinator", "superlink"): ["https://localhost:8000", f"{coordinator}/ca.crt"],
        ("bank", "supernode"): [f"{site}/flower/{REACHED}"],
        ("bank", "superexec"): [f"{site}/home/{ALIVE}"],
    }


COMPOSE = ["docker", "compose"]
HAS_COMPOSE = bool(shutil.which("docker")) and not subprocess.call(
    [*COMPOSE, "version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
)


@pytest.mark.skipif(not HAS_COMPOSE, reason="needs docker compose")
def test_docker_compose_takes_the_files(folders):
    for folder in folders("compose"):
        command = [*COMPOSE, "--file", str(folder / "compose.yaml"), "config"]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert yaml.safe_load(shown)["services"].keys() == composed(folder)["services"].keys()


# systemd


def unit(path):
    """Key -> values, in the order of the file."""
    found = {}
    for line in path.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals:
            found.setdefault(key, []).append(value)
    return found


def test_a_unit_starts_what_the_other_targets_start_until_it_answers_and_metrics_are_off(folders):
    coordinator, site = folders("systemd")
    hidden = unit(coordinator / "fedapp-federation-superexec.service")["InaccessiblePaths"][0]
    names = ("ca.key", "server.key", "users")
    assert set(hidden.split()) == {f"{coordinator}/{name}" for name in names}
    asked = "python -P -m fedapp.deploy.health"
    for path, place in (
        (
            coordinator / "fedapp-federation-superlink.service",
            f"https://localhost:8000 {coordinator}/ca.crt",
        ),
        (site / "fedapp-bank-supernode.service", "http://127.0.0.1:9094"),
    ):
        program, *words = shlex.split(unit(path)["ExecStart"][0])
        name = path.stem.rpartition("-")[2]
        assert options_of(name, [Path(program).name, *words]).isolation == "process"
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
        assert found["ExecStart"][0].endswith("-m fedapp serve --metrics --port ${FEDAPP_METRICS}")
        assert found["IPAddressDeny"] == ["any"]
    data = str(parse_node_config(str(site / "site.toml"))["data"])
    assert found["InaccessiblePaths"] == [f"-{site}/home/sites {data}"]


def test_a_sites_units_part_the_rows_from_the_network_and_end_together(folders):
    _, folder = folders("systemd")
    data = str(parse_node_config(str(folder / "site.toml"))["data"])
    supernode = unit(folder / "fedapp-bank-supernode.service")
    superexec = unit(folder / "fedapp-bank-superexec.service")
    assert data in supernode["InaccessiblePaths"][0].split()
    assert f"{folder}/home" in supernode["InaccessiblePaths"][0].split()
    hidden = f"{folder}/supernode.key -{folder}/supernode.key.old"  # after a rekey
    assert superexec["InaccessiblePaths"] == [hidden]
    assert superexec["IPAddressDeny"] == ["any"]
    assert superexec["IPAddressAllow"] == ["localhost"]
    assert supernode["PartOf"] == ["fedapp-bank-superexec.service"]


def test_a_standing_process_starts_where_the_node_config_has_an_address(folders):
    _, folder = folders("systemd")
    standing = unit(folder / "fedapp-bank-standing.service")
    assert f"{folder}/supernode.key" in standing["InaccessiblePaths"][0].split()
    assert f"{folder}/home" in standing["ReadWritePaths"]
    condition = shlex.split(standing["ExecCondition"][0])
    lines_that_start = ('standing-address = "bank.org:9443"', "standing-address='[::1]:9443'")
    lines_that_do_not = ("# none", 'standing-address = ""', '# standing-address = "bank.org:9443"')
    starting = dict.fromkeys(lines_that_start, True) | dict.fromkeys(lines_that_do_not, False)
    for line, starts in starting.items():
        lines = (folder / "site.toml").read_text().splitlines()
        kept = [one for one in lines if "standing-address" not in one]
        (folder / "site.toml").write_text("\n".join([*kept, line, ""]))
        assert (subprocess.run(condition, check=False).returncode == 0) == starts


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_takes_the_units(folders):
    for folder in folders("systemd"):
        units = [str(path) for path in folder.glob("*.service")]
        assert len(units) == (4 if (folder / "site.toml").exists() else 3)
        command = ["systemd-analyze", "verify", *units]
        checked = subprocess.run(command, check=False, capture_output=True, text=True)
        assert (checked.returncode, str(folder) in checked.stderr) == (0, False), checked.stderr
