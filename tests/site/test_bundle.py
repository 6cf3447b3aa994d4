"""Which app bundles and signed releases a site answers, and that it runs none of them."""

import io
import zipfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResultStatus

from fedapp.client_app import SiteApp
from fedapp.deploy.superexec import Bundle, SiteExecutor, answer_message
from fedapp.errors import ConfigError
from fedapp.messages.wire import REFUSED
from fedapp.runs.local import LocalGrid, site_contexts
from fedapp.site.bundle import (
    CONTENT,
    MOST_BYTES,
    MOST_FILES,
    SIGNATURE,
    build_bundle,
    check_bundle,
    installed_bundle,
    load_key,
    main,
    signature_file,
    signed_at,
)
from fedapp.site.log import HEAD, LOG
from fedapp.site.settings import SiteConfig, site_config

OTHER, ANOTHER = (sha256(text).hexdigest() for text in (b"other", b"another"))


def node_of(tmp_path, **more):
    return {"name": "bank", "data": str(tmp_path / "rows.csv"), **more}


def test_the_command_copies_what_flwr_makes_the_same_bundle_of(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bundle", "copy", str(tmp_path / "app")])
    main()
    sent = build_fab_from_disk(tmp_path / "app")
    assert sha256(sent).hexdigest() == installed_bundle()
    with pytest.raises(ConfigError, match=f"^folder must be a new or an empty .* {tmp_path}/app, "):
        main()


def test_a_site_knows_the_bundle_of_its_own_fedapp_or_those_that_it_names(tmp_path):
    config = site_config(node_of(tmp_path), {})
    check_bundle(config, build_bundle())
    rule = rf"app must be {installed_bundle()}, which this site knows, got {OTHER}; install the "
    with pytest.raises(ConfigError, match=rule):
        check_bundle(config, b"other")
    config = site_config(node_of(tmp_path, app=f"{OTHER}, {ANOTHER}"), {})
    check_bundle(config, b"other")
    check_bundle(config, b"another")
    with pytest.raises(ConfigError, match=f"app must be {ANOTHER} or {OTHER}, which"):
        check_bundle(config, build_bundle())


def test_a_message_of_another_bundle_is_refused_by_the_sites_name_before_it_is_read(tmp_path):
    grid = LocalGrid(site_contexts([node_of(tmp_path)]), SiteApp(b"other"))
    (answer,) = grid.send_and_receive([Message(RecordDict(), 2, "query.nothing")])
    grid.close()
    error = answer.error
    assert error.code == REFUSED
    assert error.reason.startswith(f"bank: app must be {installed_bundle()}, which")
    folder = tmp_path / "home" / "sites" / "bank"
    assert sorted(path.name for path in folder.iterdir()) == [HEAD, LOG]


def test_of_a_bundle_nothing_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    content, bundle = zipped(FILES), Bundle()
    bundle.hold(content, skip_prompt=True)
    app = bundle.loader(default_app_ref="", app_path=None, multi_app=True)("id", "1", "a claim")
    assert type(app) is SiteApp
    assert bundle.content == content
    assert not (tmp_path / "flower").exists()


def test_where_flower_unpacks_bundles_by_other_means_no_message_is_answered(monkeypatch):
    monkeypatch.setattr("fedapp.deploy.superexec.start_log", lambda name: None)
    monkeypatch.delattr("flwr.supernode.runtime.run_clientapp.install_from_fab")
    rule = "install_from_fab'; without it a bundle's code could be read, and the site does not"
    with pytest.raises(SystemExit, match=rule):
        answer_message()


@pytest.mark.parametrize("kind", sorted(set(TaskType) - {TaskType.CLIENT_APP}))
def test_a_site_starts_nothing_but_its_own_client_app(kind):
    spec = ExecutionSpec(kind, "127.0.0.1:1", "token", True, None, False, 1, True, 1)
    result = SiteExecutor().launch(spec)
    assert result.status == LaunchResultStatus.FAILED
    assert result.message == f"a site runs no {kind}, only its ClientApp"


KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))  # in the names of tests
DATE = datetime(2026, 11, 28, tzinfo=UTC)
FILES = {"pyproject.toml": b"[project]", "fedapp/a.py": b"a = 1"}


def public(key=KEY):
    return frozenset({key.public_key().public_bytes_raw().hex()})


def zipped(files, more=None):
    """A bundle with Flower's list; what is in ``more`` is added even where it is there already."""
    lines = [f"{name},{sha256(text).hexdigest()},{8 * len(text)}" for name, text in files.items()]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        listed = {CONTENT: "\n".join(lines).encode(), **files}
        for name, text in [*listed.items(), *(more or {}).items()]:
            archive.writestr(name, text)
    return content.getvalue()


def signed(files=FILES, key=KEY, date=DATE):
    return {**files, SIGNATURE: signature_file(zipped(files), key, date).encode()}


def test_a_bundle_that_a_pinned_key_has_signed_is_known():
    other = Ed25519PrivateKey.generate()
    assert signed_at(zipped(signed()), public()) == DATE
    assert signed_at(zipped(signed()), public() | public(other)) == DATE
    assert not signed_at(zipped(signed()), public(other))
    assert not signed_at(zipped(signed()), frozenset())
    assert not signed_at(zipped(FILES), public())
    # It may be signed again, and packed otherwise.
    again = signature_file(zipped(signed()), KEY, DATE)
    assert again.encode() == signed()[SIGNATURE]
    assert signed_at(zipped(dict(reversed(signed().items()))), public())


def changed(**files):
    return zipped({**signed(), **files})


def encrypted():
    bundle = bytearray(zipped(signed()))
    for at, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        bundle[bundle.index(at) + flags] |= 1
    return bytes(bundle)


WHOLE = zipped(signed())
LATER = signed()[SIGNATURE].replace(b"2026", b"2027")
UNSIGNED = {
    "a file": changed(**{"fedapp/a.py": b"a = 2"}),
    "a file's name": changed(**{"fedapp/a.py\n0 'fedapp/b.py": b""}),
    "a dropped file": zipped({name: text for name, text in signed().items() if name[-1] != "y"}),
    **{
        f"signature {number}": changed(**{SIGNATURE: text})
        for number, text in enumerate(
            (
                *(b"SIGNATURE = 1", b'SIGNATURE = "no hex"', b'SIGNATURE = "00"', b"import os"),
                *(b"\xff", LATER),
            )
        )
    },
    "no list": changed(**{CONTENT: b""}),
    "another list": changed(**{CONTENT: b"fedapp/a.py,0,8"}),
    "many files": changed(**{f"{i}.py": b"" for i in range(MOST_FILES)}),
    **dict(zip("abcd", (b"", b"PK", WHOLE[:-30], WHOLE[30:]), strict=True)),
    "encrypted": encrypted(),
}


@pytest.mark.parametrize("change", UNSIGNED)
def test_a_bundle_that_was_changed_is_not(change):
    assert not signed_at(UNSIGNED[change], public())


@pytest.mark.filterwarnings("ignore:Duplicate name")  # zipfile's
def test_a_path_that_is_there_twice_and_what_is_too_large_is_refused_whatever_it_holds():
    assert not signed_at(zipped(signed(), {"fedapp/a.py": b"a = 1"}), public())
    large = {"large": bytes(MOST_BYTES + 1)}
    with pytest.raises(ValueError, match="too large"):
        signature_file(zipped({**FILES, **large}), KEY)
    assert not signed_at(changed(**large), public())


def test_a_zip_that_claims_to_be_smaller_than_it_is_gives_no_more_than_it_claims():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("large", bytes(MOST_BYTES + 1))
    true, small = ((MOST_BYTES + n).to_bytes(4, "little") for n in (1, -MOST_BYTES + 100))
    bomb = content.getvalue().replace(true, small)
    assert bomb != content.getvalue()
    assert not signed_at(bomb, public())


@pytest.mark.parametrize(
    ("project", "got"),
    [
        (b'[project]\nversion = "0.2.0"', None),
        (b'[project]\nversion = "0.10"', None),
        (b'[project]\nversion = "0.2.0rc1"', "0.2.0rc1"),
        (b'[project]\nversion = "new"', "of no version"),
        (b"[project]\nversion = 1", "of no version"),
        (b"project = 1", "of no version"),
        (b"\xff", "of no version"),
        (None, "of no version"),
    ],
)
def test_versions_are_compared_as_python_does(project, got):
    config = SiteConfig("bank", "rows.csv", release_keys=public())
    others = {name: text for name, text in FILES.items() if name != "pyproject.toml"}
    sent = zipped(signed(others if project is None else {**FILES, "pyproject.toml": project}))
    if got is None:
        check_bundle(config, sent)
        return
    with pytest.raises(
        ConfigError, match=rf"^app must be 0\.2\.0 or later, .* release {got}; app "
    ):
        check_bundle(config, sent)


NEXT = DATE + timedelta(seconds=1)


def dated(date, version="0.3.0"):
    project = f'[project]\nversion = "{version}"'.encode()
    return zipped(signed({**FILES, "pyproject.toml": project}, date=date))


def test_a_release_that_was_signed_before_a_known_one_of_its_version_is_refused():
    config = SiteConfig("bank", "rows.csv", release_keys=public())
    for sent in (dated(DATE), dated(NEXT), dated(NEXT), dated(DATE, "0.3.1")):
        check_bundle(config, sent)
    rule = (
        r"^app must be release 0\.3\.0 as signed at 2026-11-28T00:00:01\+00:00 or later, which "
        r"bank knows, got one of 2026-11-28T00:00:00\+00:00; app in the site's node config may name"
    )
    with pytest.raises(ConfigError, match=rule):
        check_bundle(config, dated(DATE))
    check_bundle(replace(config, bundles=frozenset({sha256(dated(DATE)).hexdigest()})), dated(DATE))
    check_bundle(replace(config, name="shop"), dated(DATE))


def test_a_release_that_was_signed_before_the_installed_one_is_refused(monkeypatch):
    config = SiteConfig("bank", "rows.csv", release_keys=public(Ed25519PrivateKey.generate()))
    monkeypatch.setattr("fedapp.site.bundle.build_bundle", lambda: dated(NEXT, "0.2.0"))
    config = replace(config, release_keys=config.release_keys | public())
    check_bundle(config, dated(NEXT, "0.2.0"))
    with pytest.raises(ConfigError, match=r"^app must be release 0\.2\.0 as signed at 2026"):
        check_bundle(replace(config, name="shop"), dated(DATE, "0.2.0"))


def test_a_signature_replaces_only_a_signature(tmp_path, monkeypatch):
    key, written = tmp_path / "release.pem", tmp_path / SIGNATURE
    key.write_bytes(KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    monkeypatch.setattr("sys.argv", ["bundle", "sign", str(key)])
    monkeypatch.setattr("fedapp.site.bundle.__file__", str(tmp_path / "fedapp/site/bundle.py"))
    with pytest.raises(ConfigError, match=r"^output must be in a folder that exists, got "):
        main()
    written.parent.mkdir()
    main()
    main()
    assert written.read_bytes().startswith(b'DATE = "')
    written.write_text("mine")
    with pytest.raises(ConfigError, match=r"^output must be a new file, or a signature that "):
        main()
    assert written.read_text() == "mine"


def test_a_key_of_another_kind_does_not_sign(tmp_path):
    pem = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = tmp_path / "release.pem"
    path.write_bytes(KEY.private_bytes(*pem))
    assert load_key(path).private_bytes_raw() == KEY.private_bytes_raw()
    for content in (ec.generate_private_key(ec.SECP256R1()).private_bytes(*pem), b"no key"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"key must be an Ed25519 key, PEM .* -out release.p"):
            load_key(path)
