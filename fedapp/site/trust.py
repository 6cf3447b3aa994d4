"""Whom a site trusts: pinned keys and certificates.

A fingerprint is pinned by ``trusted`` in the node config or by ``fedapp site trust``, which writes
it to ``$FEDAPP_HOME/trusted.toml``::

    "insurer" = "6668 7aad f862 bd77 6c8f c18b 8e9f 8e20"

Parties that share a home, as in simulation and the local engine, need no pins: anyone who could
replace a key there could also read it.

A standing process signs its certificate itself, and the others pin it as a whole. Those of a
federation are in ``fedapp.deploy.certificates``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedapp.crypto.sealed import KEY_BYTES, fingerprint_of, new_private_key, public_key
from fedapp.data.datasets import NAME
from fedapp.errors import ConfigError
from fedapp.home import PRIVATE, home, private_folder, read_toml, secret_at, write_atomically
from fedapp.messages.fields import check_fields
from fedapp.site.settings import SiteConfig, pinned_key

log = logging.getLogger("fedapp")
IDENTITY = "identity.key"
# Beside a new key, until the site has a register of runs; see ``fedapp.site.register``.
UNUSED = "identity.new"
PINNED = "trusted.toml"
LOG_KEY = b"fedapp log key v1"
YEARS = 5
WARNED_DAYS = 30  # before a certificate ends
CLOCK_SKEW = timedelta(hours=1)


def identity(name: str, site_home: Path | None = None) -> bytes:
    """The site's private key, 32 bytes, drawn on first use; `site_home` is the site's home."""
    folder = (site_home or home()) / "sites" / name
    if not (folder / IDENTITY).exists():
        private_folder(folder)
        (folder / UNUSED).touch(PRIVATE)
    return secret_at(folder / IDENTITY, new_private_key)


def site_fingerprint(name: str) -> str:
    """Fingerprint of the site's public key."""
    return fingerprint_of(public_key(identity(name)))


def signing_key(private: bytes) -> Ed25519PrivateKey:
    """The key that signs a site's log: Ed25519, derived from its private key, which cannot sign."""
    derived = HKDF(SHA256(), KEY_BYTES, None, LOG_KEY).derive(private)
    return Ed25519PrivateKey.from_private_bytes(derived)


def pins_in(folder: Path) -> dict[str, str]:
    """Fingerprints by name, as ``pin`` has written them; raises ConfigError."""
    path = folder / PINNED
    rule = f"{PINNED} must have a fingerprint for each name"
    pins = read_toml(path.read_text(), rule) if path.exists() else {}
    return dict(pinned_key(name, str(key), PINNED) for name, key in pins.items())


def pin(folder: Path, name: str, fingerprint: str) -> str:
    """Trust this key of a site from now on, and no other; raises ConfigError if it is invalid.

    `folder` is the home of the site that trusts. Returns the fingerprint that was pinned before,
    empty if there was none.
    """
    name, fingerprint = pinned_key(name, fingerprint, "fedapp site trust")
    pins = pins_in(folder)
    before = pins.get(name, "")
    entries = sorted({**pins, name: fingerprint}.items())
    lines = [f"{json.dumps(site)} = {json.dumps(key)}\n" for site, key in entries]
    private_folder(folder)
    write_atomically(folder / PINNED, "".join(lines).encode(), PRIVATE)
    return before


def trusted_keys(config: SiteConfig, names: Iterable[str]) -> dict[str, str]:
    """Fingerprints that the site trusts, by name.

    Keys of these parties in this home are trusted too, unless the node config sets ``trusted``.
    """
    pins = {**pins_in(home()), **config.trusted}
    if config.trusted:
        return pins
    files = {name: home() / "sites" / name / IDENTITY for name in names if NAME.fullmatch(name)}
    local = {
        name: fingerprint_of(public_key(path.read_bytes()))
        for name, path in files.items()
        if path.exists()
    }
    return {**local, **pins}


def check_trusted(config: SiteConfig, keys: dict[str, bytes]) -> None:
    """Check that the site trusts the public keys that the server forwards.

    Raises ProtocolError with the first unknown or different key, and the command to trust it.
    """
    site = config.name
    trusted = trusted_keys(config, keys)
    for name, key in keys.items():
        got, pinned = fingerprint_of(key), trusted.get(name, "")
        rule = f"must be one {site} trusts ({pinned or 'none is pinned'}), got {got}"
        way = f"run at {site}: fedapp site trust {name} {got} --site FOLDER"
        if name in config.trusted:
            way = f"change trusted in the node config of {site}"
        compare = f"if 'fedapp site key' prints that at {name}"
        check_fields(name, "parcel", ("key", got == pinned, f"{rule}; {compare}, {way}"))


# Certificates, by TLS's rules


@dataclass(frozen=True, slots=True)
class KeyPair:
    """File contents of a secret key and its public counterpart."""

    secret: bytes = field(repr=False)
    public: bytes


def days_left(path: Path, now: datetime | None = None) -> float:
    """Days until the first certificate of a PEM file ends; negative if it has."""
    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path.name} must be a PEM certificate: {error}") from None
    first = min(certificate.not_valid_after_utc for certificate in certificates)
    return (first - (now or datetime.now(UTC))) / timedelta(days=1)


def validity(path: Path) -> str:
    """How long a certificate is valid, in words, with advice if that is short."""
    days = days_left(path)
    way = "; the coordinator renews it (fedapp federation renew), and gives ca.crt to every site"
    return f"{path.name} ends in {days:.0f} days{way if days <= WARNED_DAYS else ''}"


def warn_of_expiry(arguments: Iterable[str]) -> None:
    """Log a warning for each ``.crt`` argument of a command that ends soon."""
    for path in (Path(argument) for argument in arguments if argument.endswith(".crt")):
        if path.is_file() and days_left(path) <= WARNED_DAYS:
            log.warning("%s", validity(path))


def own_certificate(name: str, now: datetime | None = None) -> KeyPair:
    """Generate a key and a certificate that it signs itself, PEM, to be pinned as a whole."""
    key = ec.generate_private_key(ec.SECP256R1())
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    # OpenSSL looks for a pinned certificate by its name; key ids tell a renewed one from the other.
    certificate = (
        builder(named(name), named(name), key, now)
        .add_extension(authority, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .sign(key, SHA384())
    )
    return pem(key, certificate)


def check_own_certificate(content: bytes) -> None:
    """Check that bytes are a single certificate, PEM, and nothing else; raises ValueError."""
    rule = "must be one certificate in PEM, and nothing else"
    try:
        certificate = x509.load_pem_x509_certificate(content)
    except ValueError as error:
        raise ValueError(f"{rule}, got: {error}") from None
    if certificate.public_bytes(Encoding.PEM) != content:
        raise ValueError(f"{rule}, got more")


def builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime | None = None,
) -> x509.CertificateBuilder:
    """A certificate of a key, valid from now on, without its uses and its signature."""
    now = now or datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=365 * YEARS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def named(common: str) -> x509.Name:
    """The name of a subject or issuer."""
    # X.509 limits a common name to 64 characters.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def pem(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> KeyPair:
    """A key and its certificate, PEM."""
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return KeyPair(secret, certificate.public_bytes(Encoding.PEM))
