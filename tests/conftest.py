"""Every test has a home of its own and sees no data but its own."""

import gc
import os
import shutil
from fnmatch import fnmatchcase
from hashlib import sha256
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from fedapp.messages.methods import missing_extra

REAL_DATA = os.environ.get("FEDAPP_DATA", "")
TORCH_IS_MISSING = bool(missing_extra("fedxgbllr"))
needs_torch = pytest.mark.skipif(TORCH_IS_MISSING, reason="needs torch")
collect_ignore = ["trees/test_head.py"] if TORCH_IS_MISSING else []


# What starts Flower's servers; a worker starts its SuperLink of simulations once.
SERVERS = {"simulate", "deployment"}
# A file system in memory, and the bytes that it must have free: tests write many small files.
MEMORY, ROOM = Path("/dev/shm"), 8 << 30


def pytest_configure():
    """Temporary folders lie in memory, where there is room."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_xdist_auto_num_workers():
    """One worker more than there are cores, as some tests wait for processes that they start."""
    from fedapp.kernels import n_cores

    return n_cores() + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that train FedXGBllr bear its name, in a file's or a parameter's; those on Flower's
    servers come first, as they take longest. Of a test whose parameters' values need not all be
    combined, cases in which each value stands once stay, or those that it names; the others are
    slow."""
    for marker, beyond in (("each_value_once", beyond_each_value), ("by_default", beyond_named)):
        thinned = {}
        for item in items:
            marks_of_all = {mark.name for mark in getattr(item.function, "pytestmark", ())}
            if item.get_closest_marker(marker) and "slow" in marks_of_all:
                raise pytest.UsageError(f"{item.nodeid} is slow: {marker} would have no effect")
            if item.get_closest_marker(marker) and not item.get_closest_marker("slow"):
                thinned.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for cases in thinned.values():
            for item in beyond(cases):
                item.add_marker(pytest.mark.slow)
    for item in items:
        if "fedxgbllr" in item.nodeid:
            item.add_marker(needs_torch)
    items.sort(key=lambda item: not SERVERS & set(getattr(item, "fixturenames", ())))


def beyond_each_value(cases):
    """Cases that can be left away: each of their parameters' values stands in another one."""
    values = [{(name, id(value)) for name, value in case.callspec.params.items()} for case in cases]
    missing = set().union(*values)
    kept = set()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(values[number] & missing))
        missing -= values[best]
        kept.add(best)
    return [case for number, case in enumerate(cases) if number not in kept]


def beyond_named(cases):
    """Cases whose ids the marker's patterns do not name; none where they name no case at all, as
    where only others were asked for."""
    unnamed = [
        case
        for case in cases
        if not any(
            fnmatchcase(case.callspec.id, pattern)
            for marker in case.iter_markers("by_default")
            for pattern in marker.args
        )
    ]
    return unnamed if len(unnamed) < len(cases) else []


def pytest_collection_finish():
    """What was imported stays: no garbage collection need look through it again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDAPP_DATA", raising=False)


@pytest.fixture(scope="session", autouse=True)
def _brief_runs():
    """A run in this process stores every checkpoint, also those of brief rounds, waits for no
    further simulated node, draws few samples for its scores' intervals, and starts no other
    processes for big integers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strategies.drive.CHECKPOINT_SECONDS", 0.0)
        patch.setattr("strategies.handshake.QUIET_SECONDS", 0.0)
        patch.setattr(import_module("fedapp.metrics.intervals"), "N_DRAWS", 50)
        patch.setattr("fedapp.kernels.n_cores", lambda: 1)
        yield


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory):
    """``trained_once(settings)``: a run by the local engine, made for the first test that asks."""
    from tests.federated import train_once

    return train_once(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def _superlink(tmp_path_factory):
    """Flower's SuperLink for all simulations of a session, and its sites' home."""
    from fedapp.runs.flower import superlink
    from tests.unpacked import unpack_compiled

    home = tmp_path_factory.mktemp("simulated")
    unpack_compiled(home / "flower")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(home))
        patch.delenv("FEDAPP_DATA", raising=False)
        running = superlink()
        link = running.__enter__()
    try:
        yield link, home
    finally:
        running.__exit__(None, None, None)


@pytest.fixture(scope="session")
def two_nodes():
    """The address of a Ray cluster of two nodes with a CPU each."""
    from simulations.ray_nodes import started

    with started() as (address, _):
        yield address


@pytest.fixture
def simulate(_own_home, _superlink, monkeypatch):
    """``simulate(settings)``: a run in Flower's simulation; models trained in process are kept at
    the same sites."""
    from fedapp.runs.flower import run_simulated

    link, home = _superlink
    monkeypatch.setenv("FEDAPP_HOME", str(home))
    return lambda settings: run_simulated(settings, link)


@pytest.fixture
def real_data(_own_home, monkeypatch):
    """The folder of the registry's files, for the tests that read them."""
    if not REAL_DATA:
        pytest.skip("needs $FEDAPP_DATA")
    monkeypatch.setenv("FEDAPP_DATA", REAL_DATA)
    return Path(REAL_DATA)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """The working folder, to which runs go, is the test's."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _pages(request, monkeypatch):
    """Runs' pages are empty, but in tests/report and where their figures are undrawn: to write
    one takes longer than a short run."""
    if "undrawn" not in request.fixturenames:
        monkeypatch.setattr("fedapp.report.page.run_page", lambda run: "")


@pytest.fixture
def undrawn(monkeypatch):
    """The figures of a page are made, but not drawn, which takes most of its time."""
    monkeypatch.setattr(
        "fedapp.report.plots.Figure.savefig",
        lambda figure, buffer, **how: buffer.write("<svg></svg>"),
    )


@pytest.fixture
def write_table(tmp_path):
    """``write_table(name, n_rows, seed, **columns)``: a CSV file of a, b and a label y that follows
    them; a column given replaces the one of its name, or goes last, and None leaves one out."""
    from tests.tables import write_rows

    def write(name="rows", n_rows=40, seed=0, **columns):
        rng = np.random.default_rng(seed)
        a, b = rng.normal(size=(2, n_rows)).round(3)
        noise = rng.normal(size=n_rows)
        table = {"a": a, "b": b, "y": (a + b + noise > 0).astype(int), **columns}
        table = {key: list(column) for key, column in table.items() if column is not None}
        return write_rows(tmp_path / f"{name}.csv", table)

    return write


@pytest.fixture
def settings(tmp_path):
    """``settings(**overrides)``: a short run into a new folder; _ stands for -, __ for a dot."""

    from fedapp.settings import load_settings

    def make(**overrides):
        n_runs = len(list(tmp_path.glob("run-*")))
        given = {
            "run_dir": str(tmp_path / f"run-{n_runs + 1}"),
            "objective": "binary:logistic",
            "num_boost_round": 2,
            "eta": 0.3,
            "early_stopping_rounds": 0,
            "max_depth": 2,
            "max_bin": 16,
            **overrides,
        }
        return load_settings(
            {name.replace("__", ".").replace("_", "-"): value for name, value in given.items()}
        )

    return make


@pytest.fixture
def vertical(settings):
    """``settings`` of a SecureBoost run under a small key on rows in order, whose model is joined
    at the end."""

    def make(**overrides):
        given = {
            "strategy": "secureboost",
            "parties": 2,
            "align": "ordered",
            "secureboost__key_bits": 512,
            "secureboost__insecure_small_key": True,
            "allow_export": True,
            "max_bin": 32,
            **overrides,
        }
        return settings(**given)

    return make


@pytest.fixture
def made(settings, vertical, tmp_path):
    """``made(strategy, objective, n_rows, columns, **overrides)``: a run of trees of depth 3 into a
    folder of its own, on a table of an objective or of the columns given; SecureBoost's under a
    small key."""
    from tests.tables import made_columns, write_rows

    def make(strategy="pax", objective="binary:logistic", n_rows=400, columns=None, **more):
        table = write_rows(tmp_path / "made.csv", columns or made_columns(objective, n_rows))
        table = table.rename(tmp_path / f"{sha256(table.read_bytes()).hexdigest()[:8]}.csv")
        (folder := tmp_path / f"made-{len(list(tmp_path.glob('made-*'))) + 1}").mkdir()
        given = {"run_dir": str(folder), "data": str(table), "label": "y", "max_depth": 3, **more}
        kind = vertical if strategy == "secureboost" else settings
        return kind(strategy=strategy, objective=objective, **given)

    return make


@pytest.fixture
def sites():
    """``sites({"name": ..., "data": ...}, ...)``: see ``tests.sites.site_contexts``."""
    from tests.sites import site_contexts

    return site_contexts


@pytest.fixture
def three(write_table):
    """``three(bank={...})``: sites with rows of their own; what more their node configs say."""
    from tests.sites import site_contexts

    def make(**more):
        return site_contexts(
            *(
                {"name": name, "data": write_table(name, seed=place), **more.get(name, {})}
                for place, name in enumerate(("bank", "insurer", "shop"))
            )
        )

    return make
