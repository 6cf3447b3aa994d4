"""What the container image of a checkout is made of."""

import re
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fedapp.deploy import targets
from fedapp.deploy.targets import Machine
from fedapp.home import app_folder


def test_an_image_is_made_of_the_app_and_of_nothing_that_lies_beside_it():
    folder = app_folder()
    lines = (folder / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    made = tomllib.loads((folder / "pyproject.toml").read_text())
    packages = made["tool"]["setuptools"]["packages"]["find"]["include"]
    files = ["pyproject.toml", "constraints.txt", "requirements.lock", "setup.py", ".gitignore"]
    files += [made["project"]["readme"], made["project"]["license"]["file"]]
    wanted = {*(name.rstrip("*") for name in packages), *files}
    assert rules[0] == "*"
    assert {rule.removeprefix("!") for rule in rules if rule.startswith("!")} == wanted
    assert [rule for rule in rules[1:] if not rule.startswith("!")] == ["**/__pycache__"]
    assert all((folder / name).exists() for name in wanted)


def locked():
    """Name -> version, marker and hashes, as the lock has them."""
    text = (app_folder() / "requirements.lock").read_text()
    entries = re.sub(r" \\\n +", " ", text).splitlines()
    found = {}
    for entry in (line for line in entries if not line.startswith("#")):
        requirement, *hashes = entry.split(" --hash=sha256:")
        pin, _, marker = requirement.partition(" ; ")
        name, version = pin.split("==")
        found[name] = (version, marker, hashes)
    return found


def pinned():
    lines = (app_folder() / "constraints.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins}


def test_flowers_environments_get_the_versions_of_the_constraints():
    made = tomllib.loads((app_folder() / "pyproject.toml").read_text())
    given = dict(pin.split("==") for pin in made["tool"]["uv"]["constraint-dependencies"])
    pins = {"xgboost": pinned()["xgboost-cpu"], **pinned()}
    assert given == {name: pins[name] for name in given}
    needed = {re.split(r"[\[<>=; ]", one)[0] for one in made["project"]["dependencies"]}
    assert given.keys() == needed - {"flwr"} | {"llvmlite"}


def test_the_lock_has_the_versions_of_the_constraints_with_hashes_and_no_place_of_a_machine():
    lock, pins = locked(), pinned()
    for name, (locked_version, marker, hashes) in lock.items():
        if name in pins or not marker.endswith("== 'win32'"):
            assert pins.get(name) == locked_version, name
        assert hashes
        assert all(re.fullmatch("[0-9a-f]{64}", one) for one in hashes)
    text = (app_folder() / "requirements.lock").read_text()
    assert not re.findall(r"://|(?<!\S)[./~]\S*|--(?!hash=sha256:)\S+", text)


def test_the_lock_is_what_the_app_requires_and_all_that_requires():
    lock = locked()
    project = tomllib.loads((app_folder() / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["build-system"]["requires"]
    waiting, found = [Requirement(each) for each in wanted], set()
    while waiting:
        required = waiting.pop()
        name = canonicalize_name(required.name)
        given = [{"extra": extra} for extra in ("", *required.extras)]
        if required.marker and not any(map(required.marker.evaluate, given)):
            continue
        assert required.specifier.contains(lock[name][0]), required
        if (name, *required.extras) not in found and name != "setuptools":
            found.add((name, *required.extras))
            for each in map(Requirement, requires(name) or []):
                if not each.marker or any(map(each.marker.evaluate, given)):
                    each.marker = None
                    waiting.append(each)
    here = {
        name for name, (_, marker, _) in lock.items() if not marker or Marker(marker).evaluate()
    }
    assert {name for name, *_ in found} | {"setuptools"} == here


def test_an_image_installs_what_the_lock_has_and_nothing_else(monkeypatch):
    machine = Machine("/srv/site", "/usr/bin", "bank")
    text, _ = machine.dockerfile()["Dockerfile"]
    dependencies, app = [line.split() for line in text.splitlines() if "pip install" in line]
    assert {"--require-hashes", "/opt/fedapp/requirements.lock"} <= set(dependencies)
    assert dependencies[dependencies.index("--only-binary") + 1] == ":all:"
    assert {"--no-deps", "--no-build-isolation", "/opt/fedapp"} <= set(app)
    # Of a wheel, that and its own lock.
    monkeypatch.setattr(targets, "app_folder", lambda: Path("/site-packages/fedapp/_app"))
    text, _ = machine.dockerfile()["Dockerfile"]
    wheel = f"fedapp-{version('fedapp')}-py3-none-any.whl"
    assert "--file /srv/site/Dockerfile FOLDER_OF_THE_WHEEL\n" in text
    assert f"\nCOPY {wheel} /opt/\n" in text
    app, dependencies = text.split("RUN pip install ")[1:]
    assert {"--no-deps", f"/opt/{wheel}"} <= set(app.split())
    assert {"--only-binary", "--require-hashes", "-r"} <= set(dependencies.split())
    assert "/_app/requirements.lock" in dependencies
    assert "{" not in text
