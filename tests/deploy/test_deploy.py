"""What `fedapp federation init` and `fedapp site init` write."""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import ssl
import stat
import subprocess
import time
import tomllib
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode
from typer.testing import CliRunner

from fedapp.commands.federation import federation_app
from fedapp.commands.site import site_app
from fedapp.deploy import members
from fedapp.deploy.health import ALIVE, REACHED
from fedapp.errors import ConfigError, FedappError
from fedapp.home import app_folder
from fedapp.site import certificates
from fedapp.site.bundle import installed_bundle
from fedapp.site.settings import read_node_config, site_config
from tests.deploy_folders import init_federation, init_site, invoke

# All that others may read; the folder itself keeps them out.
PUBLIC = {"ca.crt", "server.crt", "bank.pub", "nginx.conf", "nginx.users", "sites/names.txt"}
SECRETS = ("ca.key", "server.key", "superexec.secret", "supernode.key")


@pytest.fixture
def federation(tmp_path):
    return partial(init_federation, tmp_path)


@pytest.fixture
def site(tmp_path, write_table):
    return partial(init_site, tmp_path, write_table("rows"))


def modes(folder):
    return {
        path.relative_to(folder).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in [folder, *folder.rglob("*")]
    }


# Who can read what


@pytest.mark.parametrize("name", ["federation", "site"])
@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_nothing_but_what_is_public_is_printed_or_can_be_read_by_others(request, name, umask):
    before = os.umask(umask)
    try:
        folder, shown = request.getfixturevalue(name)()
    finally:
        os.umask(before)
    found = modes(folder)
    assert found["."] == 0o700
    assert {path for path, mode in found.items() if mode & 0o077} <= PUBLIC
    secret = [path for path in SECRETS if path in found]
    assert {found[path] for path in secret} == {0o600}
    public = shown + "".join(path.read_text() for path in folder.rglob("*") if path.name in PUBLIC)
    for path in secret:
        lines = [line for line in (folder / path).read_text().splitlines() if "-----" not in line]
        assert lines
        assert not any(line in public for line in lines)
    pair = repr(certificates.supernode_keys("bank"))
    assert "secret" not in pair
    assert "PRIVATE" not in pair


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_that_exists_is_overwritten_but_by_the_command_that_is_named(federation, site):
    for init, way in (
        (federation, "a site joins by fedapp federation add"),
        (site, "fedapp site key --new supernode"),
    ):
        folder, _ = init()
        before = contents(folder)
        with pytest.raises(ConfigError, match=f"must be an empty folder or a new one; .*{way}"):
            init()
        assert before == contents(folder)


# Certificates and keys


def test_renewed_certificates_end_later_and_are_good_by_the_old_ca_and_the_new(
    federation, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("fedapp.site.certificates.YEARS", 1)
        folder, _ = federation()
    old = tmp_path / "old.crt"
    old.write_bytes((folder / "ca.crt").read_bytes())
    kept = {name: (folder / name).read_bytes() for name in ("ca.key", "superexec.secret")}
    shake_hands(folder, old, "localhost")
    shown = invoke(federation_app, "renew", str(folder))
    ends = [
        x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
        for path in (old, folder / "ca.crt", folder / "server.crt")
    ]
    assert min(ends[1:]) - ends[0] > timedelta(days=3 * 365)
    assert f"{ends[1]:%Y-%m-%d}" in shown
    assert kept == {name: (folder / name).read_bytes() for name in kept}
    assert modes(folder)["server.key"] == 0o600
    for ca in (old, folder / "ca.crt"):
        for host in ("fed.example.org", "localhost", "127.0.0.1"):
            shake_hands(folder, ca, host)
    for host in ("other.example.org", "127.0.0.2"):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(folder, folder / "ca.crt", host)


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("ca.key", None, "ca.key must be a file"),
        ("ca.key", b"no key", "ca.key and ca.crt must be PEM"),
        ("ca.key", certificates.new_authority("other").files().secret, "ca.crt must be of the key"),
        ("ca.crt", b"no certificate", "ca.key and ca.crt must be PEM"),
        ("server.crt", b"no certificate", "server.crt must be a certificate for a host"),
    ],
    ids=["no key", "no PEM", "another key", "no certificate", "no server's"],
)
def test_certificates_that_are_broken_are_not_renewed(federation, name, content, rule):
    folder, _ = federation()
    (folder / name).unlink()
    if content:
        (folder / name).write_bytes(content)
    before = contents(folder)
    with pytest.raises(ConfigError, match=rule):
        invoke(federation_app, "renew", str(folder))
    assert before == contents(folder)


def shake_hands(folder, ca, host):
    """A TLS handshake with a folder's server, as strict as Python can be."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    client = ssl.create_default_context(cafile=str(ca))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(back, there, server_hostname=host),
        server.wrap_bio(there, back, server_side=True),
    ]
    for side in (*sides, sides[0]):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    assert sides[0].version()


def test_a_new_key_of_a_site_replaces_the_old_one_which_stays_as_a_file(site):
    folder, _ = site()
    public_key(folder)
    files = ("supernode.key", "bank.pub")
    old = {name: (folder / name).read_bytes() for name in files}
    shown = invoke(site_app, "key", "--new", "supernode", "--site", str(folder))
    assert old == {name: (folder / f"{name}.old").read_bytes() for name in files}
    assert certificates.key_fingerprint(public_key(folder)) in shown
    assert (folder / "bank.pub").read_bytes() != old["bank.pub"]
    assert modes(folder)["supernode.key"] == modes(folder)["supernode.key.old"] == 0o600


def public_key(folder):
    """A site's public key, of P-384 in OpenSSH's form, which is that of its secret one."""
    secret = load_ssh_private_key((folder / "supernode.key").read_bytes(), None)
    public = load_ssh_public_key((folder / "bank.pub").read_bytes())
    assert isinstance(secret.curve, ec.SECP384R1)
    assert secret.public_key() == public
    return public


def test_the_hosts_own_certificate_is_for_the_sites_and_a_made_one_for_the_loopback(
    federation, tmp_path
):
    for name in ("own.crt", "own.key"):
        (tmp_path / name).write_text(name)
    folder, _ = federation(
        "--certificate", str(tmp_path / "own.crt"), "--key", str(tmp_path / "own.key")
    )
    assert f"ssl_certificate {tmp_path}/own.crt;" in (folder / "nginx.conf").read_text()
    assert f"ssl_certificate_key {tmp_path}/own.key;" in (folder / "nginx.conf").read_text()
    assert f"--ssl-certfile {folder}/server.crt" in (folder / "start-superlink.sh").read_text()


# What Flower reads


def test_a_node_config_says_what_was_asked_for_to_flower_too(site):
    options = ("--label", "y", "--id", "a", "--allow", "pax,secureboost", "--min-rows", "30")
    folder, _ = site(*options)
    node = read_node_config(folder / "site.toml")
    assert node == parse_config_args([str(folder / "site.toml")])
    config = site_config(node, {})
    assert (config.name, config.label, config.id_column) == ("bank", "y", "a")
    assert (config.allowed, config.min_rows) == ({"pax", "secureboost"}, 30)
    assert Path(config.data).is_absolute()


def options_in(script, name):
    """What Flower makes of the options with which a script, which is bash, starts it."""
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text().replace("\\\n", " ")
    lines = [line.partition("&")[0].split() for line in text.splitlines()]
    (words,) = (words for words in lines if f"fedapp.deploy.{name}" in words)
    return options_of(name, words[1:])


def test_flower_takes_the_options_of_the_superlinks_script_and_finds_it_by_its_name(federation):
    folder, _ = federation("--name", "trial", "--port", "18000")
    given = options_in(folder / "start-superlink.sh", "superlink")
    assert given.isolation == "process"
    assert given.database == f"{folder}/superlink.db"
    assert given.enable_supernode_auth
    assert (given.host, given.port) == ("127.0.0.1", 18000)
    found = tomllib.loads((folder / "flower" / "config.toml").read_text())["superlink"]["trial"]
    assert found == {"address": "127.0.0.1:18000", "root-certificates": f"{folder}/ca.crt"}


def test_flower_takes_the_options_of_the_supernodes_script(site):
    folder, _ = site("--port", "18094", "--ca", "")
    given = options_in(folder / "start-supernode.sh", "supernode")
    assert given.superlink == "fed.example.org:9092"
    assert given.root_certificates is None
    assert given.node_config == f"{folder}/site.toml"
    assert (given.host, given.port) == ("127.0.0.1", 18094)


# Scripts


def test_a_script_starts_its_process_again_until_it_is_told_to_stop(site, tmp_path):
    folder, _ = site()
    starts, stub = tmp_path / "starts", tmp_path / "python"
    starts.touch()
    noted = f"case $3 in *.supernode) echo $$ >> {starts};; esac"
    stub.write_text(f"#!/bin/sh\n{noted}\nexec sleep 60\n")
    stub.chmod(0o700)
    script = folder / "start-supernode.sh"
    script.write_text(script.read_text().replace("pause=5", "pause=0.1"))
    with (folder / "env.sh").open("a") as file:
        file.write(f'export PATH={tmp_path}:"$PATH"\n')

    def started(number):
        deadline = time.monotonic() + 10
        while len(lines := starts.read_text().splitlines()) < number:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return int(lines[number - 1])

    process = subprocess.Popen([str(script)], stderr=subprocess.DEVNULL)
    try:
        os.kill(started(1), signal.SIGKILL)
        second = started(2)
    finally:
        process.terminate()
    assert process.wait(timeout=5) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


# What is refused


@pytest.mark.parametrize(
    ("kind", "options", "rule"),
    [
        ("federation", "--host=a b", "host must be a host name or an address, got 'a b'"),
        ("federation", "--name=../x", "name must be"),
        ("federation", "--target=helm", "target must be scripts, compose, systemd"),
        ("federation", "--sites=bank,$(id)", r"name must be .* got '\$\(id\)'"),
        ("federation", "--certificate=x.crt", "--certificate and --key must be given together"),
        ("federation", "--certificate=x.crt --key=x.key", "x.crt must be a file"),
        ("site", "--name=a b", "name must be"),
        ("site", "--superlink=fed.example.org", "superlink must be HOST:PORT, got fed.example.org"),
        ("site", "--data=gone.csv", "gone.csv must be a file"),
        ("site", "--ca=gone.crt", "gone.crt must be a file"),
        ("site", "--allow=pax,scureboost", "allow must name methods"),
    ],
)
def test_what_breaks_a_rule_is_refused_and_nothing_is_written(
    request, tmp_path, kind, options, rule
):
    words = [word for one in options.split(" --") for word in f"--{one.lstrip('-')}".split("=")]
    with pytest.raises(ConfigError, match=rule):
        request.getfixturevalue(kind)(*words)
    assert not [*tmp_path.glob("bank/*"), *tmp_path.glob("coordinator/*")]
    with pytest.raises(ConfigError, match="path must be letters, digits and"):
        init_federation(tmp_path / "my folder")
    assert not (tmp_path / "my folder").exists()


# What the sites are sent


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's
def test_the_app_that_sites_are_sent_has_nothing_of_what_else_lies_in_its_folder(tmp_path):
    app = tmp_path / "app"
    (app / "tour").mkdir(parents=True)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(app_folder() / name, app)
    for name in ("fedapp", "strategies", "clients"):
        shutil.copytree(app_folder() / name, app / name)
    for stray in ("tour/site.toml", "notes.py", "notes.json"):
        (app / stray).write_text("")
    assert hashlib.sha256(build_fab_from_disk(app)).hexdigest() == installed_bundle()


# Sites that join, leave, or have a new key; with a SuperLink: test_deployment.py


def test_a_site_joins_by_name_and_its_key_is_asked_for(federation):
    folder, _ = federation()
    shown = invoke(federation_app, "add", str(folder), "shop")
    assert f"{folder}/sites/shop.pub is missing" in shown
    assert members.names_in(folder) == ["bank", "insurer", "shop"]
    failed = CliRunner().invoke(federation_app, ["add", str(folder)])  # as register-sites.sh
    assert re.findall(r"sites/(\w+)\.pub is missing", failed.output) == ["bank", "insurer", "shop"]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("add", "$(id)"), r"name must be .*, got '\$\(id\)'"),
        (("add", "bank"), r"sites/bank\.pub must be NAME\.pub of a site's folder, got: "),
        (
            ("add", "insurer"),
            r"the SuperLink .* at 127\.0\.0\.1:8000 must answer, got .*; at the c",
        ),
        (("remove", "bnk"), r"name must be a site of .* \(bank, insurer\), got bnk; did you mean"),
        (("remove", "bank"), r"the SuperLink .* at 127\.0\.0\.1:8000 must answer"),
    ],
)
def test_a_change_of_sites_that_cannot_be_made_is_refused(federation, words, rule):
    folder, _ = federation()
    (folder / "sites" / "bank.pub").write_bytes((folder / "ca.crt").read_bytes())
    (folder / "sites" / "insurer.pub").write_bytes(certificates.supernode_keys("insurer").public)
    with pytest.raises(FedappError, match=rule):
        invoke(federation_app, words[0], str(folder), words[1])
    assert members.names_in(folder) == ["bank", "insurer"]
    with pytest.raises(ConfigError, match=r"^folder must be one of fedapp federation init, got "):
        invoke(federation_app, words[0], str(folder / "sites"), words[1])


def test_a_list_shows_what_the_folder_has_if_the_superlink_does_not_answer(federation):
    folder, _ = federation()
    pair = certificates.supernode_keys("bank")
    (folder / "sites" / "bank.pub").write_bytes(pair.public)
    invoke(federation_app, "add", str(folder), "--user", "ann")
    shown = json.loads(CliRunner().invoke(federation_app, ["list", str(folder), "--json"]).stdout)
    sites = [(site["name"], site["status"]) for site in shown["sites"]]
    assert sites == [("bank", "unknown"), ("insurer", "unknown")]
    assert shown["users"] == ["ann"]
    assert shown["certificate_days"] == dict.fromkeys(("ca.crt", "server.crt"), 1825)
    assert "must answer" in shown["fault"]
    keygen = ["ssh-keygen", "-lf", str(folder / "sites" / "bank.pub")]
    if shutil.which("ssh-keygen"):
        printed = subprocess.run(keygen, check=True, capture_output=True, text=True).stdout
        assert printed.split()[1] == shown["sites"][0]["fingerprint"]


# What `--target` renders: compose files and systemd units

PARSERS = {"superlink": _parse_args_run_superlink(), "supernode": _parse_args_run_supernode()}


def options_of(name, words):
    """What Flower makes of the options with which its SuperLink or SuperNode is started."""
    assert list(words[:4]) == ["python", "-P", "-m", f"fedapp.deploy.{name}"]
    return PARSERS[name].parse_args(words[4:])


@pytest.fixture
def both(tmp_path, write_table):
    """``both(target, *options)``: a coordinator's and a site's; options are the site's."""
    table = write_table("rows")

    def init(target, *options):
        coordinator, _ = init_federation(tmp_path, "--target", target)
        return coordinator, init_site(tmp_path, table, "--target", target, *options)[0]

    return init


def test_a_folder_holds_what_its_target_needs_and_nothing_of_the_others(both):
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
        for folder, names in zip(both(target), expected, strict=True):
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


def test_services_are_confined_and_read_what_is_mounted_and_flower_takes_their_options(both):
    for folder in both("compose"):
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


def test_the_process_that_reads_a_sites_rows_has_no_way_out_and_others_no_rows_or_keys(both):
    coordinator, folder = both("compose")
    inside = mounts(composed(coordinator)["services"]["superexec"])
    assert {Path(path).name for path in inside} == {"ca.crt", "superexec.secret", "flower", "home"}
    data = read_node_config(folder / "site.toml")["data"]
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


def test_services_are_asked_for_their_health_where_they_listen(both):
    coordinator, site = both("compose")
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
def test_docker_compose_takes_the_files(both):
    for folder in both("compose"):
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


def test_a_unit_starts_what_the_other_targets_start_until_it_answers_and_metrics_are_off(both):
    coordinator, site = both("systemd")
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
    data = str(read_node_config(site / "site.toml")["data"])
    assert found["InaccessiblePaths"] == [f"-{site}/home/sites {data}"]


def test_a_sites_units_part_the_rows_from_the_network_and_end_together(both):
    _, folder = both("systemd")
    data = str(read_node_config(folder / "site.toml")["data"])
    supernode = unit(folder / "fedapp-bank-supernode.service")
    superexec = unit(folder / "fedapp-bank-superexec.service")
    assert data in supernode["InaccessiblePaths"][0].split()
    assert f"{folder}/home" in supernode["InaccessiblePaths"][0].split()
    hidden = f"{folder}/supernode.key -{folder}/supernode.key.old"  # after a rekey
    assert superexec["InaccessiblePaths"] == [hidden]
    assert superexec["IPAddressDeny"] == ["any"]
    assert superexec["IPAddressAllow"] == ["localhost"]
    assert supernode["PartOf"] == ["fedapp-bank-superexec.service"]


def test_a_standing_process_starts_where_the_node_config_has_an_address(both):
    _, folder = both("systemd")
    standing = unit(folder / "fedapp-bank-standing.service")
    assert f"{folder}/supernode.key" in standing["InaccessiblePaths"][0].split()
    assert f"{folder}/home" in standing["ReadWritePaths"]
    condition, config = shlex.split(standing["ExecCondition"][0]), folder / "site.toml"
    kept = [one for one in config.read_text().splitlines() if "standing-address" not in one]
    for line, starts in {
        'standing-address = "bank.org:9443"': True,
        "standing-address='[::1]:9443'": True,
        "# none": False,
        'standing-address = ""': False,
        '# standing-address = "bank.org:9443"': False,
    }.items():
        config.write_text("\n".join([*kept, line, ""]))
        assert (subprocess.run(condition, check=False).returncode == 0) == starts


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_a_unit_reaches_the_head_of_a_cluster_by_the_lines_of_the_page(both):
    _, folder = both("systemd")
    path = folder / "fedapp-bank-superexec.service"
    (folder / f"{path.name}.d").mkdir()
    page = Path("docs/how-to/a-site-on-a-cluster.md").read_text()
    reached = []
    for lines in ("", page.partition("```ini\n")[2].partition("```")[0]):
        (folder / f"{path.name}.d" / "override.conf").write_text(lines)
        for words in (["verify"], ["security", "--offline=true"]):
            command = ["systemd-analyze", *words, str(path)]
            checked = subprocess.run(command, check=True, capture_output=True, text=True)
            assert str(folder) not in checked.stderr
        reached += re.findall("IP address allow list with (only|non-localhost)", checked.stdout)
    assert reached == ["only", "non-localhost"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_takes_the_units(both):
    for folder, n_units in zip(both("systemd"), (3, 4), strict=True):
        units = [str(path) for path in folder.glob("*.service")]
        assert len(units) == n_units
        command = ["systemd-analyze", "verify", *units]
        checked = subprocess.run(command, check=False, capture_output=True, text=True)
        assert (checked.returncode, str(folder) in checked.stderr) == (0, False), checked.stderr
