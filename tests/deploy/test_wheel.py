"""What `pip wheel .` and a container image have: the app, complete, and what it requires."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution, requires, version
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedapp
from fedapp.deploy import targets
from fedapp.home import app_files, app_folder
from fedapp.kernels import ROOMS
from fedapp.site.bundle import installed_bundle
from tests.deployed import take_the_tour
from tests.unpacked import copy_compiled

WITHOUT_CHECKOUT = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
SMALL = "-c num-boost-round=2 -c max-depth=2 -c data=loans.csv -c label=default -c id=customer"
SMALL_KEY = "-c parties=2 -c secureboost.key-bits=1024 -c secureboost.insecure-small-key=true"
TABLE = """
import numpy
rows = numpy.random.default_rng(1).normal(size=(400, 3)).round(2)
for name, part in (("loans", rows[:300]), ("new-loans", rows[300:])):
    with open(f"{name}.csv", "w") as file:
        file.write("customer,age,income,debt,default\\n")
        for number, row in enumerate(part):
            file.write(f"c{number},{','.join(map(str, row))},{int(row.sum() > 0)}\\n")
"""


# Names


@pytest.fixture(params=["a wheel", "a checkout"])
def app(request, tmp_path):
    """The folder of fedapp's ``clients``, as its front looks for it; ``work`` has somebody's."""
    (package := tmp_path / "site" / "fedapp").mkdir(parents=True)
    shutil.copy(str(fedapp.__file__), package)
    folder = package / "_app" if request.param == "a wheel" else package.parent
    for place, text in ((folder, "fedapp"), (tmp_path / "work", "somebody")):
        (place / "clients").mkdir(parents=True)
        (place / "clients" / "__init__.py").write_text(f"OWNER = {text!r}\n")
    return folder


def python(tmp_path, code):
    """What code prints, errors included, in a folder with somebody's ``clients``."""
    given = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-c", code]
    work = tmp_path / "work"
    return subprocess.run(command, cwd=work, env=given, check=False, **output).stdout


def test_fedapp_imports_its_own_packages_or_names_another_one_that_is_there_already(app, tmp_path):
    for code, shown in {
        "import clients; print(clients.OWNER)": "somebody\n",
        "import fedapp, clients; print(clients.OWNER)": "fedapp\n",
        "import fedapp, sys; print(sys.path[0])": f"{app}\n",
    }.items():
        assert python(tmp_path, code) == shown
    *_, error = python(tmp_path, "import clients, fedapp").splitlines()
    there = f"<module 'clients' from '{tmp_path}/work/clients/__init__.py'>"
    assert error == (
        f"ImportError: clients must be fedapp's own package, got {there}; "
        "import fedapp first, or rename the other one"
    )


def test_where_nobody_else_has_the_names_the_path_stays_as_it_is():
    code = "import sys; before = [*sys.path]; import fedapp; assert sys.path == before"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_strategies_are_the_same_by_both_names():
    import fedapp.strategies as ours
    import strategies

    assert all(getattr(ours, name) is getattr(strategies, name) for name in strategies.__all__)


# The wheel itself


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The unpacked source distribution."""

    def ignored(folder, names):
        others = (".git", ".venv", "_build", "gallery", "__pycache__", "build", "runs")
        found = set(shutil.ignore_patterns(*others, "*.egg-info", ".*_cache")(folder, names))
        return found if Path(folder) == app_folder() else found - {"runs"}  # fedapp/runs is copied

    folder = tmp_path_factory.mktemp("sources")
    shutil.copytree(app_folder(), folder / "checkout", ignore=ignored)
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=folder / "checkout", check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(sources):
    """Built from the source distribution, after a build that left a module behind."""
    (left := sources / "build" / "lib" / "fedapp").mkdir(parents=True)
    (left / "removed.py").write_text("")
    pip(sources, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", "..", ".")
    (built,) = sources.parent.glob("*.whl")
    return built


def pip(folder, *words):
    """Run pip, which asks no index."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, "--no-index"]
    subprocess.run(command, cwd=folder, check=True, env=WITHOUT_CHECKOUT)


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Of processes that see the wheel, installed in an empty environment, and the packages that are
    installed here."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    pip(folder, "--python", str(python), "install", "--no-deps", str(wheel))
    (site,) = folder.glob("lib/python*/site-packages")
    for room in ROOMS:
        copy_compiled(site / "fedapp" / room, app_folder() / "fedapp" / room)
    # A path alone: what .pth files beside those packages add, a checkout for one, is not on it.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    for point in distribution("flwr").entry_points.select(group="console_scripts"):
        script = folder / "bin" / point.name
        script.write_text(f"#!{python}\nfrom {point.module} import {point.attr}\n{point.attr}()\n")
        script.chmod(0o755)
    own = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FEDAPP_HOME": str(folder / "home")}
    return {**WITHOUT_CHECKOUT, **own}


@pytest.fixture(scope="module")
def folder(environment, tmp_path_factory):
    """A working folder with two tables and somebody's package ``clients``."""
    made = tmp_path_factory.mktemp("work")
    run(made, environment, "python", "-c", TABLE)
    (made / "clients").mkdir()
    (made / "clients" / "__init__.py").write_text("raise ImportError('of somebody else')\n")
    return made


def run(folder, environment, *words):
    """What a command prints; it succeeds."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(words, cwd=folder, env=environment, check=False, **output)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_source_distribution_is_the_checkout(sources):
    checkout, n_files = sources.parents[1] / "checkout", 0
    patterns = ("**/*.py", "**/*.md", "*.lock", "*.txt", "*.toml", "*.cff", "Makefile", ".ci/*")
    for pattern in (*patterns, ".*e", ".*.yaml", ".github/**/*.yml"):
        for path in checkout.glob(pattern):
            name = path.relative_to(checkout)
            assert (sources / name).read_bytes() == path.read_bytes(), name
            n_files += 1
    assert n_files > 450


@pytest.mark.slow
def test_a_wheel_has_the_app_in_one_package_without_studies_and_tests(wheel):
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        (top,) = (name for name in names if name.endswith("/top_level.txt"))
        assert packed.read(top).decode().split() == ["fedapp"]
    assert {name.partition("/")[0] for name in names} == {"fedapp", top.partition("/")[0]}
    modules = {*app_files("fedapp/**/*.py"), "fedapp/py.typed", "fedapp/data/registry.toml"}
    modules |= {*app_files("fedapp/deploy/templates/*"), *app_files("fedapp/report/templates/*")}
    modules |= {"fedapp/deploy/warm/patches.toml"}
    files = {*app_files("strategies/**/*.py"), *app_files("clients/**/*.py")}
    files |= {"pyproject.toml", "LICENSE", "requirements.lock"}
    assert {name for name in names if name.startswith("fedapp/")} == {
        *modules,
        *(f"fedapp/_app/{name}" for name in files),
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's
def test_the_installed_app_has_the_hash_of_the_checkout(environment, folder):
    assert run(folder, environment, "fedapp", "site", "hash").strip() == installed_bundle()


@pytest.mark.slow
def test_an_installed_app_trains_by_both_engines_and_predicts_and_compares(environment, folder):
    small = SMALL.split()
    for engine in ("local", "simulation"):
        given = ("--engine", engine, *small, "-c", f"run-dir={engine}")
        run(folder, environment, "fedapp", "run", "pax", *given)
    models = [(folder / engine / "model.json").read_bytes() for engine in ("local", "simulation")]
    assert models[0] == models[1]
    scored = ("--data", "new-loans.csv", "--id", "customer", "--output", "scores.csv")
    run(folder, environment, "fedapp", "predict", "local", *scored)
    assert len((folder / "scores.csv").read_text().splitlines()) == 101
    given = (*small, *SMALL_KEY.split(), "-c", "run-dir=columns")
    run(folder, environment, "fedapp", "run", "secureboost", *given)
    shown = run(folder, environment, "fedapp", "compare", "pax", "bagging", *small)
    assert re.search(r"bagging .* 0[.]\d", shown)


@pytest.mark.slow
def test_the_python_lines_of_the_pages_run(environment, folder):
    pages = ("README.md", "docs/how-to/flower.md", "docs/how-to/use-the-model.md")
    text = "\n".join((app_folder() / page).read_text() for page in pages)
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    given = (*SMALL.split(), "-c", "run-dir=runs/20261121-101500-pax")
    run(folder, environment, "fedapp", "run", "pax", *given)
    run(folder, environment, "python", "-c", "\n".join(blocks))


@pytest.mark.slow
def test_sites_of_installed_apps_train_together(environment, tmp_path):
    take_the_tour(tmp_path, environment)


# The container image of a checkout


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
    machine = targets.Machine("/srv/site", "/usr/bin", "bank")
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
