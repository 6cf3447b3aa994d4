"""Which app bundles a site answers, and that it runs none of them."""

import hashlib
import io
import re
import subprocess
import sys
import zipfile

import pytest
from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_disk, build_fab_from_files
from flwr.cli.utils import collect_files
from flwr.supercore.constant import MAX_FILE_BYTES, MAX_FILE_COUNT, MAX_TOTAL_BYTES, TaskType
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResultStatus
from typer.testing import CliRunner

from fedapp.client_app import SiteApp
from fedapp.commands import cli
from fedapp.deploy.superexec import Bundle, SiteExecutor
from fedapp.errors import ConfigError
from fedapp.messages.wire import REFUSED
from fedapp.runs.local import LocalGrid, site_contexts
from fedapp.site.bundle import build_bundle, check_bundle, installed_bundle, main
from fedapp.site.log import HEAD, LOG
from fedapp.site.settings import site_config
from simulations.deployment import settings_of
from tests.deployed import CUSTOMER, PAX, no_secret_is_at_the_coordinator, started
from tests.edited import edited_app
from tests.unpacked import app_sources

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's
OTHER, ANOTHER = (hashlib.sha256(text).hexdigest() for text in (b"other", b"another"))


def node(tmp_path, **more):
    return {"name": "bank", "data": str(tmp_path / "rows.csv"), **more}


# The hash


@pytest.mark.slow
def test_the_command_prints_the_hash_by_which_flower_knows_what_flwr_run_sends():
    shown = CliRunner().invoke(cli, ["site", "hash"]).output
    with app_sources() as app:
        assert shown == hashlib.sha256(build_fab_from_disk(app)).hexdigest() + "\n"


def test_the_command_copies_what_flwr_makes_the_same_bundle_of(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bundle", "copy", str(tmp_path / "app")])
    main()
    sent = build_fab_from_disk(tmp_path / "app")
    assert hashlib.sha256(sent).hexdigest() == installed_bundle()
    with pytest.raises(ConfigError, match=f"^folder must be new or empty, got {tmp_path}/app$"):
        main()


def test_a_bundle_is_stored_uncompressed_so_that_no_library_of_a_machine_changes_its_hash():
    with app_sources() as app:
        sent = build_fab_from_disk(app)
    with zipfile.ZipFile(io.BytesIO(sent)) as bundle:
        assert {entry.compress_type for entry in bundle.infolist()} == {zipfile.ZIP_STORED}


def test_a_bundle_is_one_that_flower_hub_takes_without_tests_and_studies():
    with app_sources() as app:
        bundle, made = build_fab_from_files(collect_files(app))
        assert all(path.stat().st_size <= MAX_FILE_BYTES for path in app.rglob("*.*"))
    assert (made.fab_format_version, made.flwr_version_min) == (1, "1.41")
    assert made.flwr_version_target in {"1.41.0", "1.42.0"}
    assert len(bundle) < MAX_TOTAL_BYTES
    with zipfile.ZipFile(io.BytesIO(bundle)) as sent:
        names = sent.namelist()
    assert len(names) < MAX_FILE_COUNT
    assert {name.partition("/")[0] for name in names} == {
        *("fedapp", "strategies", "clients"),
        *("pyproject.toml", "LICENSE", ".info"),
    }


@pytest.mark.parametrize("changed", ["an answer", "version 0.0.9", "version 99.0.0"])
def test_an_edited_app_and_another_version_have_other_hashes(tmp_path, changed):
    app = edited_app(tmp_path / "app", changed)
    assert hashlib.sha256(build_fab_from_disk(app)).hexdigest() != installed_bundle()


# What a site answers


def test_a_site_knows_the_bundle_of_its_own_fedapp_alone(tmp_path):
    config = site_config(node(tmp_path), {})
    check_bundle(config, build_bundle())
    rule = rf"app must be {installed_bundle()}, which this site knows, got {OTHER}; install the "
    with pytest.raises(ConfigError, match=rule):
        check_bundle(config, b"other")


def test_a_site_that_names_bundles_knows_these_and_no_other(tmp_path):
    config = site_config(node(tmp_path, app=f"{OTHER}, {ANOTHER}"), {})
    check_bundle(config, b"other")
    check_bundle(config, b"another")
    with pytest.raises(ConfigError, match=f"app must be {ANOTHER} or {OTHER}, which"):
        check_bundle(config, build_bundle())


def test_a_message_of_another_bundle_is_refused_by_the_sites_name_before_it_is_read(tmp_path):
    grid = LocalGrid(site_contexts([node(tmp_path)]), SiteApp(b"other"))
    (answer,) = grid.send_and_receive([Message(RecordDict(), 2, "query.nothing")])
    grid.close()
    error = answer.error
    assert error.code == REFUSED
    assert error.reason.startswith(f"bank: app must be {installed_bundle()}, which")
    folder = tmp_path / "home" / "sites" / "bank"
    assert sorted(path.name for path in folder.iterdir()) == [HEAD, LOG]


# What a site runs


def test_of_a_bundle_nothing_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    content = build_fab_from_disk(edited_app(tmp_path / "app", "an answer"))
    bundle = Bundle()
    bundle.hold(content, skip_prompt=True)
    app = bundle.loader(default_app_ref="", app_path=None, multi_app=True)("id", "1", "a claim")
    assert type(app) is SiteApp
    assert bundle.content == content
    assert not (tmp_path / "flower").exists()


@pytest.mark.slow
def test_where_flower_unpacks_bundles_by_other_means_no_message_is_answered():
    code = "from flwr.supernode.runtime import run_clientapp; del run_clientapp.install_from_fab\n"
    code += "from fedapp.deploy.superexec import answer_message; answer_message()"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    rule = r"flwr must be 1\.41\.0 or 1\.42\.0, got [\d.]+: it has no flwr\S+\.install_from_fab"
    assert re.fullmatch(rule, ended.stderr.strip())


@pytest.mark.parametrize("kind", sorted(set(TaskType) - {TaskType.CLIENT_APP}))
def test_a_site_starts_nothing_but_its_own_client_app(kind):
    spec = ExecutionSpec(kind, "127.0.0.1:1", "token", True, None, False, 1, True, 1)
    result = SiteExecutor().launch(spec)
    assert result.status == LaunchResultStatus.FAILED
    assert result.message == f"a site runs no {kind}, only its ClientApp"


# The same with real processes


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with started(tmp_path_factory.mktemp("bundles")) as deployment:
        yield deployment


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["an answer", "version 0.0.9", "version 99.0.0"])
def test_an_app_that_the_coordinator_has_edited_gets_no_row_and_is_refused_by_name_and_hash(
    deployment, tmp_path, changed
):
    app = edited_app(tmp_path / "app", changed)
    sent = hashlib.sha256(build_fab_from_disk(app)).hexdigest()
    given = settings_of({**PAX, "run-dir": tmp_path / "run"})
    command = deployment.begin("run", "pax", "--engine", "federation", *given, app=app)
    shown, _ = command.communicate(timeout=300)
    assert command.returncode == 1
    site = r"error: (bank|insurer|shop) \(step 0\)"
    rule = f"{site}: app must be {installed_bundle()}, which this site knows, got {sent};"
    assert re.match(rule, shown.splitlines()[-1])
    assert CUSTOMER not in shown
    no_secret_is_at_the_coordinator(deployment, tmp_path / "run")
