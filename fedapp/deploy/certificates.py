"""Certificates and keys of a federation, in the forms that Flower 1.41 reads.

TLS: PEM, one CA and one server certificate. SuperNodes authenticate with an EC key on P-384 in
OpenSSH format.
"""

from __future__ import annotations

import ipaddress
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedapp.errors import ConfigError
from fedapp.site.certificates import KeyPair, builder, named, pem


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate authority of one federation."""

    key: ec.EllipticCurvePrivateKey = field(repr=False)
    certificate: x509.Certificate

    def files(self) -> KeyPair:
        """Key and certificate, PEM."""
        return pem(self.key, self.certificate)


def new_authority(name: str) -> Authority:
    """Generate a federation's self-signed certificate authority."""
    return _signed_by_itself(ec.generate_private_key(ec.SECP384R1()), named(f"{name} CA"))


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


def _signed_by_itself(key: ec.EllipticCurvePrivateKey, subject: x509.Name) -> Authority:
    usage = _usage(key_cert_sign=True, crl_sign=True)
    certificate = (
        builder(subject, subject, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, SHA384())
    )
    return Authority(key, certificate)


def server_certificate(authority: Authority, hosts: Sequence[str]) -> KeyPair:
    """Generate a server's key and certificate, PEM; `hosts[0]` is the common name."""
    key = ec.generate_private_key(ec.SECP384R1())
    issuer = authority.certificate.subject
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    certificate = (
        builder(named(hosts[0]), issuer, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.SubjectAlternativeName([_san(host) for host in hosts]), critical=False)
        .sign(authority.key, SHA384())
    )
    return pem(key, certificate)


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


def _usage(**uses: bool) -> x509.KeyUsage:
    """A KeyUsage with only the given uses."""
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
