"""App bundles that a site answers: by default only the one its installed fedapp builds.

A site runs its installed code, so a bundle only identifies the coordinator's fedapp. A run of
another one ends before its first message is read.

It also answers every bundle that a key signed which its node config pins (``release-keys``), if its
version is the installed one or later, and no release of that version is known that was signed
later: by the installed signature, or as the site has answered one (``releases.json``).
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tomllib
import zipfile
import zlib
from argparse import ArgumentParser
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from packaging.version import Version

from fedapp.errors import ConfigError, in_words
from fedapp.home import (
    Kind,
    app_files,
    app_folder,
    begins_with,
    check_output,
    check_output_folder,
    home,
    private_folder,
    write_atomically,
    write_new,
)
from fedapp.site.settings import SiteConfig

# A .py file that pyproject.toml lists, so Flower requires it in unsigned bundles too.
SIGNATURE = "fedapp/signature.py"
OURS = Kind("a signature", (".py",), begins_with(b'DATE = "', b"SIGNATURE = "))
PUBLIC = 0o644
CONTENT = ".info/CONTENT"  # Flower's list of what is in the bundle: path, SHA-256 and bits
RELEASES = "releases.json"  # in a site's folder: when the latest release of a version was signed
MOST_BYTES, MOST_FILES = 20_000_000, 2_000  # twice what Flower takes
# Errors for a zip that is truncated, encrypted or uses an unknown compression.
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


def build_bundle() -> bytes:
    """The bundle (FAB) that ``flwr run`` builds from the installed sources."""
    from flwr.cli.build import build_fab_from_files

    return build_fab_from_files(_sources())[0]


@cache
def installed_bundle() -> str:
    """SHA-256 of ``build_bundle``, 64 hex digits."""
    return hashlib.sha256(build_bundle()).hexdigest()


def copy_sources(folder: Path) -> None:
    """Copy the sources that ``flwr run`` bundles."""
    for name, path in _sources().items():
        (copy := folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_new(copy, path.read_bytes(), PUBLIC)


def _sources() -> dict[str, Path]:
    """The installed files that go into the bundle, by path in the app's folder."""
    with (app_folder() / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["flwr"]["app"]["fab-include"]
    files: dict[str, Path] = {}
    for pattern in ("pyproject.toml", ".gitignore", *patterns):
        files |= app_files(pattern.removeprefix("/"))
    return files


def check_bundle(config: SiteConfig, bundle: bytes) -> None:
    """Check that the site accepts a run's bundle, by hash or signature; else ConfigError."""
    accepted = config.bundles or {installed_bundle()}
    got = hashlib.sha256(bundle).hexdigest()
    if got in accepted:
        return
    date = signed_at(bundle, config.release_keys)
    if date is None:
        signed = " or signed by one of release-keys" if config.release_keys else ""
        raise ConfigError(
            f"app must be {' or '.join(sorted(accepted))}, which this site knows{signed}, got {got}"
            "; install the same fedapp at coordinator and site (fedapp site hash), "
            "or name both hashes in the site's node config (app)"
        )
    # Otherwise a coordinator could go back to a release whose faults are known.
    installed = _version((app_folder() / "pyproject.toml").read_bytes())
    sent = release(bundle)
    if installed and (sent is None or sent < installed):
        raise ConfigError(
            f"app must be {installed} or later, which this site has installed, got the signed "
            f"release {sent or 'of no version'}; app in the site's node config may name its hash"
        )
    _check_date(config, str(sent), date, sent == installed)


def _check_date(config: SiteConfig, version: str, date: datetime, is_installed: bool) -> None:
    """Check that no later release of a version is known, and remember this one."""
    path = home() / "sites" / config.name / RELEASES
    releases = json.loads(path.read_text()) if path.exists() else {}
    dates = [datetime.fromisoformat(releases[version])] if version in releases else []
    if is_installed and (of_installed := _installed_date(config.release_keys)):
        dates.append(of_installed)
    latest = max([date, *dates])
    if date < latest:
        raise ConfigError(
            f"app must be release {version} as signed at {latest.isoformat()} or later, which "
            f"{config.name} knows, got one of {date.isoformat()}; app in the site's node config "
            "may name its hash"
        )
    if date not in dates:
        private_folder(path.parent)
        write_atomically(path, json.dumps({**releases, version: date.isoformat()}).encode())


@cache
def _installed_date(keys: frozenset[str]) -> datetime | None:
    return signed_at(build_bundle(), keys)


def load_key(path: Path) -> Ed25519PrivateKey:
    """Read a release key; ConfigError if the file has no Ed25519 key."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if isinstance(key, Ed25519PrivateKey):
        return key
    way = f"openssl genpkey -algorithm ed25519 -out {path.name}"
    raise ConfigError(f"key must be an Ed25519 key, PEM without a password ({way}), got {path}")


def signature_file(bundle: bytes, key: Ed25519PrivateKey, date: datetime | None = None) -> str:
    """Content of ``SIGNATURE`` for a bundle; an existing signature is not signed over.

    By default its date is now.
    """
    text = (date or datetime.now(UTC)).isoformat(timespec="seconds")
    signature = key.sign(_signed(_files(bundle), text)).hex()
    return f'DATE = "{text}"\nSIGNATURE = "{signature}"  # noqa: E501\n'


@lru_cache(maxsize=4)  # called for every message of a run
def signed_at(bundle: bytes, keys: frozenset[str]) -> datetime | None:
    """When one of the public keys, 64 hex digits each, signed a bundle; None if none has."""
    for key in keys:
        with suppress(InvalidSignature, KeyError, TypeError, ValueError, *_BROKEN):
            files = _files(bundle)
            fields = tomllib.loads(files[SIGNATURE].decode())
            signature, date = bytes.fromhex(fields["SIGNATURE"]), fields["DATE"]
            public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
            public.verify(signature, _signed(files, date))
            if sorted(files[CONTENT].decode().split()) == sorted(_content(files)):
                return datetime.fromisoformat(date)
    return None


@lru_cache(maxsize=4)
def release(bundle: bytes) -> Version | None:
    """Version of a bundle, from its pyproject.toml, which is signed; None if that has none."""
    return _version(_files(bundle).get("pyproject.toml", b""))


def _version(project: bytes) -> Version | None:
    with suppress(KeyError, TypeError, ValueError):  # of TOML and of versions too
        return Version(tomllib.loads(project.decode())["project"]["version"])
    return None


def _files(bundle: bytes) -> dict[str, bytes]:
    """Contents of a bundle by path; ValueError if it is too large or repeats a path."""
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        entries = archive.infolist()
        if len(entries) > MOST_FILES or sum(entry.file_size for entry in entries) > MOST_BYTES:
            raise ValueError("too large")
        if len({entry.filename for entry in entries}) < len(entries):
            raise ValueError("a path twice")
        return {entry.filename: archive.read(entry) for entry in entries}


def _content(files: dict[str, bytes]) -> list[str]:
    """Lines that Flower's list has of the files of a bundle."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return [f"{name},{digests[name]},{8 * len(files[name])}" for name in files.keys() - {CONTENT}]


def _signed(files: dict[str, bytes], date: str) -> bytes:
    """The bytes that are signed: the date, and path and hash of each file.

    What depends on the signature is left out: ``CONTENT`` is checked to follow from the files.
    """
    names = sorted(files.keys() - {SIGNATURE, CONTENT})
    lines = (f"{hashlib.sha256(files[name]).hexdigest()} {name!r}" for name in names)
    return "\n".join(["fedapp release v2", date, *lines]).encode()


def main() -> None:
    """Copy the app for ``flwr run FOLDER``, or sign it as a release, which sites answer."""
    parser = ArgumentParser(prog="python -m fedapp.site.bundle", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("copy").add_argument("folder", type=Path, help="New or empty.")
    about = "Ed25519 private key, PEM; keep it off this machine."
    commands.add_parser("sign").add_argument("key", type=Path, help=about)
    options = parser.parse_args()
    if options.command == "copy":
        folder = options.folder
        check_output_folder(folder, lambda _: False, "folder")
        copy_sources(folder)
        return
    private, path = load_key(options.key), Path(__file__).parents[2] / SIGNATURE
    check_output(path, OURS, [options.key])
    write_atomically(path, signature_file(build_bundle(), private).encode(), PUBLIC)
    print(f"signed in {path}, which is part of what a coordinator sends; sites pin:")
    print(f'release-keys = "{private.public_key().public_bytes_raw().hex()}"')


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {in_words(error) if isinstance(error, OSError) else error}")
