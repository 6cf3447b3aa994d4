"""Certificates of TLS: how long they are valid, and those that a site makes for its own process.

A standing process signs its certificate itself, and the others pin it as a whole. Those of a
federation are in ``fedapp.deploy.certificates``. The processes of Flower that stay up for months
import this file, so it imports no tables and no compiler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedapp.errors import ConfigError

log = logging.getLogger("fedapp")
YEARS = 5
WARNED_DAYS = 30  # before a certificate ends
CLOCK_SKEW = timedelta(hours=1)


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
