"""Certificates of TLS and keys of SuperNodes: of a federation, and of a site's standing process.

A federation has one CA and one server certificate, PEM. SuperNodes authenticate with an EC key on
P-384 in OpenSSH format, which Flower 1.41 reads. A standing process signs its certificate itself,
and the others pin it as a whole. The processes of Flower that stay up for months import this file,
so it imports no tables and no compiler.
"""

from __future__ import annotations

import ipaddress
import logging
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedapp.errors import ConfigError

log = logging.getLogger("fedapp")
YEARS = 5
WARNED_DAYS = 30  # before a certificate ends
CLOCK_SKEW = timedelta(hours=1)
CRITICAL = (x509.BasicConstraints, x509.KeyUsage)  # extensions that no client may ignore


@dataclass(frozen=True, slots=True)
class KeyPair:
    """File contents of a secret key and its public counterpart."""

    secret: bytes = field(repr=False)
    public: bytes


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate authority of one federation."""

    key: ec.EllipticCurvePrivateKey = field(repr=False)
    certificate: x509.Certificate

    def files(self) -> KeyPair:
        """Key and certificate, PEM."""
        return _pem(self.key, self.certificate)


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


def new_authority(name: str) -> Authority:
    """Generate a federation's self-signed certificate authority."""
    return _signed_by_itself(ec.generate_private_key(ec.SECP384R1()), _named(f"{name} CA"))


def renewed_authority(files: KeyPair) -> Authority:
    """The same authority with a new certificate for its existing key; ConfigError if they do not
    match.

    Until the old certificate ends, sites that trust it accept what the authority signs.
    """
    try:
        key = load_pem_private_key(files.secret, None)
        certificate = x509.load_pem_x509_certificate(files.public)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"ca.key and ca.crt must be PEM: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"ca.key must be an EC key, got {type(key).__name__}")
    if key.public_key() != certificate.public_key():
        raise ConfigError("ca.crt must be of the key in ca.key, got another one's")
    return _signed_by_itself(key, certificate.subject)


def hosts_of(certificate: bytes) -> tuple[str, ...]:
    """Host names and addresses of a server certificate; ConfigError if it is none, or names no
    host."""
    try:
        extensions = x509.load_pem_x509_certificate(certificate).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"server.crt must be a certificate for a host: {error}") from None
    return tuple(str(name.value) for name in names)


def server_certificate(authority: Authority, hosts: Sequence[str]) -> KeyPair:
    """Generate a server's key and certificate, PEM; `hosts[0]` is the common name."""
    key = ec.generate_private_key(ec.SECP384R1())
    extensions = (
        x509.BasicConstraints(ca=False, path_length=None),
        _usage(digital_signature=True),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
        x509.SubjectAlternativeName([_san(host) for host in hosts]),
    )
    issuer = authority.certificate.subject
    return _pem(key, _certificate(key, _named(hosts[0]), authority.key, issuer, extensions))


def own_certificate(name: str, now: datetime | None = None) -> KeyPair:
    """Generate a key and a certificate that it signs itself, PEM, to be pinned as a whole."""
    key = ec.generate_private_key(ec.SECP256R1())
    # OpenSSL looks for a pinned certificate by its name; key ids tell a renewed one from the other.
    extensions = (
        x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()),
        x509.BasicConstraints(ca=False, path_length=None),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
    )
    return _pem(key, _certificate(key, _named(name), key, _named(name), extensions, now))


def check_own_certificate(content: bytes) -> None:
    """Check that bytes are a single certificate, PEM, and nothing else; raises ValueError."""
    rule = "must be one certificate in PEM, and nothing else"
    try:
        certificate = x509.load_pem_x509_certificate(content)
    except ValueError as error:
        raise ValueError(f"{rule}, got: {error}") from None
    if certificate.public_bytes(Encoding.PEM) != content:
        raise ValueError(f"{rule}, got more")


def supernode_keys(name: str) -> KeyPair:
    """Generate a SuperNode's OpenSSH key pair; the site's name is the comment."""
    key = ec.generate_private_key(ec.SECP384R1())
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return KeyPair(secret, public + f" {name}\n".encode())


def public_key_in(path: Path) -> ec.EllipticCurvePublicKey:
    """The public key of a SuperNode in OpenSSH format; ConfigError if the file has another."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} must be NAME.pub of a site's folder, got: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path} must be an EC key, got {type(key).__name__}")
    return key


def key_fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Fingerprint of a SuperNode's public key, as ``ssh-keygen -lf`` prints it."""
    blob = b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return f"SHA256:{b64encode(sha256(blob).digest()).decode().rstrip('=')}"


def _signed_by_itself(key: ec.EllipticCurvePrivateKey, subject: x509.Name) -> Authority:
    uses = _usage(key_cert_sign=True, crl_sign=True)
    extensions = (x509.BasicConstraints(ca=True, path_length=0), uses)
    return Authority(key, _certificate(key, subject, key, subject, extensions))


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    extensions: Iterable[x509.ExtensionType],
    now: datetime | None = None,
) -> x509.Certificate:
    """A certificate of a key, valid from now on."""
    now = now or datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=365 * YEARS))
    )
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    for extension in (key_id, *extensions):
        builder = builder.add_extension(extension, critical=isinstance(extension, CRITICAL))
    return builder.sign(signer, SHA384())


def _named(common: str) -> x509.Name:
    # X.509 limits a common name to 64 characters.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _pem(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> KeyPair:
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return KeyPair(secret, certificate.public_bytes(Encoding.PEM))


def _usage(**uses: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{**dict.fromkeys(names, False), **uses})


def _san(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
