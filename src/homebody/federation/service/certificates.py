"""Certificates for services over TLS, and the keys by which a server knows its devices."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from homebody.errors import HomebodyError, install
from homebody.federation.service.text import read_file
from homebody.files import replacing, write_new

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
        load_ssh_private_key,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise HomebodyError(f"Certificates need an extra: {install('serve')}, or with '.[deploy]'.") from error

__all__ = [
    "make_authority",
    "make_certificates",
    "make_device_key",
    "make_signer_key",
    "read_public",
    "read_signer_key",
    "renew_certificate",
]

_LONGEST_KEY = 1 << 16
"""Bytes of a key file that are read."""

_HERE = ("localhost", "127.0.0.1", "::1")
# The authority is of this one server: a certificate that ends before it would only stop all devices one day.
_LIFE = timedelta(days=3650)


def make_certificates(hosts: Sequence[str] = ()) -> dict[str, bytes]:
    """An authority (ca.pem, ca.key) and its certificate (server.pem, server.key) for this machine and for `hosts`, by
    file name."""
    ca_key, ca_name = ec.generate_private_key(ec.SECP256R1()), _called("homebody authority")
    ca = (
        _certificate(ca_name, ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    return {
        "ca.pem": ca.public_bytes(Encoding.PEM),
        "ca.key": _private(ca_key),
        **_signed(ca_key, ca_name, hosts),
    }


def renew_certificate(folder: Path, hosts: Sequence[str] = ()) -> list[str]:
    """Replace server.pem and server.key by new ones for this machine and for `hosts`, signed by the authority in the
    folder, and return the names in the certificate. Whoever knows the authority (ca.pem) trusts it as it did before."""
    try:
        authority = x509.load_pem_x509_certificate(read_file(folder / "ca.pem"))
        ca_key = load_pem_private_key(read_file(folder / "ca.key"), password=None)
    except ValueError as error:
        raise HomebodyError(f"The authority in {folder} cannot be read: {error}.") from error
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise HomebodyError(f"{folder / 'ca.key'} is not the key of an authority that Homebody made.")
    for name, content in _signed(ca_key, authority.subject, hosts).items():
        with replacing(folder / name) as file:
            file.write(content)
    return list(dict.fromkeys((*_HERE, *hosts)))


def _signed(ca_key: ec.EllipticCurvePrivateKey, ca_name: x509.Name, hosts: Sequence[str]) -> dict[str, bytes]:
    """A certificate (server.pem, server.key) that this authority signs, for this machine and for `hosts`."""
    names = [_name(host) for host in dict.fromkeys((*_HERE, *hosts))]
    key = ec.generate_private_key(ec.SECP256R1())
    server = (
        _certificate(_called("homebody server"), ca_name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return {"server.pem": server.public_bytes(Encoding.PEM), "server.key": _private(key)}


def make_authority(folder: Path, hosts: Sequence[str] = ()) -> list[Path]:
    """Write the files of `make_certificates` and the operator's secret, readable by their owner only, and return their
    paths. Devices need ca.pem; the others stay with the operator."""
    return write_new(folder, {**make_certificates(hosts), "secret": secrets.token_hex(32).encode()})


def make_device_key(folder: Path) -> Path:
    """Write a device's key (device.key, which stays on it) and its public half for the operator, whose path is
    returned."""
    return _make_key(folder, "device")


def make_signer_key(folder: Path) -> Path:
    """Write a key that signs rosters (signer.key) and its public half for every device, whose path is returned."""
    return _make_key(folder, "signer")


def read_public(path: Path, kind: Literal["device", "signer"] = "device") -> bytes:
    """The public key of a device, or of whoever signs rosters, as OpenSSH text without its comment."""
    from homebody.federation.secure_sum.identities import load_public_key

    text = read_file(path, _LONGEST_KEY)
    if b"PRIVATE KEY" in text:
        whose = "its device" if kind == "device" else "whoever signs with it"
        raise HomebodyError(f"{path} is a private key, which must not leave {whose}: give the .pub file beside it.")
    try:
        return load_public_key(text).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    except HomebodyError as error:
        raise HomebodyError(
            f"{path} is no ECDSA P-384 public key as OpenSSH text: `homebody keys {kind}` makes one, {kind}.pub."
        ) from error


def read_signer_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key that signs rosters."""
    text = read_file(path, _LONGEST_KEY)
    wanted = f"{path} is no ECDSA P-384 private key as OpenSSH text: `homebody keys signer` makes one, signer.key."
    try:
        key = load_ssh_private_key(text, None)
    except TypeError as error:
        raise HomebodyError(
            f"{path} has a passphrase, which cannot be asked for here: give a key without one."
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise HomebodyError(wanted) from error
    if not (isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP384R1)):
        raise HomebodyError(wanted)
    return key


def _make_key(folder: Path, name: str) -> Path:
    """Write NAME.key and NAME.pub, and return the path of the second."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return write_new(folder, {f"{name}.key": private, f"{name}.pub": public + b"\n"})[1]


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _name(host: str) -> x509.GeneralName:
    """
    >>> _name("192.168.1.7"), _name("server.lan")
    (<IPAddress(value=192.168.1.7)>, <DNSName(value='server.lan')>)
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        label = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
        if not re.fullmatch(rf"(\*\.)?{label}(\.{label})*", host) or len(host) > 253:
            raise HomebodyError(
                f"'{host}' is not a host: give a name such as server.example.org, or an IP address, without a port."
            ) from None
        return x509.DNSName(host)


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Devices' clocks differ.
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _LIFE)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    ciphering = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    off = dict.fromkeys((*ciphering, "encipher_only", "decipher_only"), False)
    signs = signs_certificates
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **off)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
