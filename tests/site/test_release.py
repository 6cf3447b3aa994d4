"""Releases that a key has signed, and how sites know them."""

import io
import re
import zipfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.cli.build import build_fab_from_disk

from fedapp.errors import ConfigError
from fedapp.site.bundle import (
    CONTENT,
    MOST_BYTES,
    MOST_FILES,
    SIGNATURE,
    build_bundle,
    check_bundle,
    installed_bundle,
    load_key,
    signature_file,
    signed_at,
)
from fedapp.site.settings import SiteConfig, site_config
from tests.edited import edited_app

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's
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


def test_it_may_be_signed_again_and_packed_otherwise():
    again = signature_file(zipped(signed()), KEY, DATE)
    assert again.encode() == signed()[SIGNATURE]
    assert signed_at(zipped(dict(reversed(signed().items()))), public())


@pytest.mark.parametrize(
    "change",
    [
        {"fedapp/a.py": b"a = 2"},
        {"fedapp/b.py": b""},
        {"fedapp/a.py\n0 'fedapp/b.py": b""},
        {SIGNATURE: b"SIGNATURE = 1"},
        {SIGNATURE: b'SIGNATURE = "no hex"'},
        {SIGNATURE: b'SIGNATURE = "00"'},
        {SIGNATURE: b"import os"},
        {SIGNATURE: b"\xff"},
        {SIGNATURE: signed()[SIGNATURE].replace(b"2026", b"2027")},
        {CONTENT: b""},
        {CONTENT: b"fedapp/a.py,0,8"},
    ],
    ids=str,
)
def test_a_bundle_that_was_changed_is_not(change):
    assert not signed_at(zipped({**signed(), **change}), public())


def test_a_file_that_was_renamed_or_dropped_is_noticed():
    files = signed()
    content = files.pop("fedapp/a.py")
    assert not signed_at(zipped(files), public())
    assert not signed_at(zipped({**files, "fedapp/c.py": content}), public())


@pytest.mark.filterwarnings("ignore:Duplicate name")  # zipfile's
def test_a_path_that_is_there_twice_is_refused_whatever_it_holds():
    assert not signed_at(zipped(signed(), {"fedapp/a.py": b"a = 1"}), public())


def test_what_is_larger_than_bundles_are_is_not_read():
    large, many = {"large": bytes(MOST_BYTES + 1)}, {f"{i}.py": b"" for i in range(MOST_FILES)}
    with pytest.raises(ValueError, match="too large"):
        signature_file(zipped({**FILES, **large}), KEY)
    assert not signed_at(zipped({**signed(), **large}), public())
    assert not signed_at(zipped({**signed(), **many}), public())


def test_a_zip_that_claims_to_be_smaller_than_it_is_gives_no_more_than_it_claims():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("large", bytes(MOST_BYTES + 1))
    true, small = ((MOST_BYTES + n).to_bytes(4, "little") for n in (1, -MOST_BYTES + 100))
    bomb = content.getvalue().replace(true, small)
    assert bomb != content.getvalue()
    assert not signed_at(bomb, public())


@pytest.mark.parametrize("bundle", [b"", b"PK", zipped(signed())[:-30], zipped(signed())[30:]])
def test_what_is_no_zip_is_not_signed(bundle):
    assert not signed_at(bundle, public())


def test_an_encrypted_zip_is_not_signed():
    bundle = bytearray(zipped(signed()))
    for at, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        bundle[bundle.index(at) + flags] |= 1
    assert not signed_at(bytes(bundle), public())


# At a site, with the app itself


@pytest.mark.slow
def test_a_site_answers_another_release_that_its_trusted_key_has_signed(tmp_path):
    (key,) = public()
    node = {"name": "bank", "data": str(tmp_path / "rows.csv"), "release-keys": key}
    app = edited_app(tmp_path / "app", "version 9.0.0")
    (app / SIGNATURE).write_text(signature_file(build_fab_from_disk(app), KEY))
    sent = build_fab_from_disk(app)
    check_bundle(site_config(node, {}), sent)
    check_bundle(site_config(node, {}), build_bundle())
    del node["release-keys"]
    with pytest.raises(ConfigError, match=f"app must be {installed_bundle()}, which this site kno"):
        check_bundle(site_config(node, {}), sent)
    (app / "fedapp" / "names.py").write_text("edited = True\n")
    rule = "which this site knows or signed by one of release-keys, got"
    with pytest.raises(ConfigError, match=rule):
        check_bundle(site_config({**node, "release-keys": key}, {}), build_fab_from_disk(app))


@pytest.mark.by_default("0.2.0rc1")
@pytest.mark.parametrize("version", ["0.1.9", "0.2.0.dev1", "0.2.0rc1"])
def test_a_signed_release_older_than_the_installed_one_is_refused(version, tmp_path):
    (key,) = public()
    node = {"name": "bank", "data": str(tmp_path / "rows.csv"), "release-keys": key}
    app = edited_app(tmp_path / "app", f"version {version}")
    (app / SIGNATURE).write_text(signature_file(build_fab_from_disk(app), KEY))
    sent = build_fab_from_disk(app)
    rule = rf"^app must be 0\.2\.0 or later, .* got the signed release {re.escape(version)}; "
    with pytest.raises(ConfigError, match=rule):
        check_bundle(site_config(node, {}), sent)
    # The version is in what is signed.
    with zipfile.ZipFile(io.BytesIO(sent)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    project = files["pyproject.toml"].replace(f'"{version}"'.encode(), b'"0.3.0"')
    assert project != files["pyproject.toml"]
    forged = zipped({**files, "pyproject.toml": project})
    with pytest.raises(ConfigError, match=r"which this site knows or signed by one of release-key"):
        check_bundle(site_config(node, {}), forged)
    # A hash in the node config accepts it, signed or not.
    check_bundle(site_config({**node, "app": sha256(sent).hexdigest()}, {}), sent)
    check_bundle(site_config({**node, "app": sha256(forged).hexdigest()}, {}), forged)


@pytest.mark.parametrize(
    ("project", "got"),
    [
        (b'[project]\nversion = "0.2.0"', None),
        (b'[project]\nversion = "0.2.0.post1"', None),
        (b'[project]\nversion = "0.10"', None),
        (b'[project]\nversion = "0.1.99"', "0.1.99"),
        (b'[project]\nversion = "new"', "of no version"),
        (b"[project]\nversion = 1", "of no version"),
        (b"[project]", "of no version"),
        (b"project = 1", "of no version"),
        (b"\xff", "of no version"),
        (b"[project", "of no version"),
    ],
)
def test_versions_are_compared_as_python_does(project, got):
    config = SiteConfig("bank", "rows.csv", release_keys=public())
    sent = zipped(signed({**FILES, "pyproject.toml": project}))
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


def test_a_signed_bundle_without_a_project_is_refused():
    config = SiteConfig("bank", "rows.csv", release_keys=public())
    with pytest.raises(ConfigError, match=r"got the signed release of no version"):
        check_bundle(config, zipped(signed({"fedapp/a.py": b"a = 1"})))


def test_a_key_of_another_kind_does_not_sign(tmp_path):
    pem = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = tmp_path / "release.pem"
    path.write_bytes(KEY.private_bytes(*pem))
    assert load_key(path).private_bytes_raw() == KEY.private_bytes_raw()
    for content in (ec.generate_private_key(ec.SECP256R1()).private_bytes(*pem), b"no key"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"key must be an Ed25519 key, PEM .* -out release.p"):
            load_key(path)
