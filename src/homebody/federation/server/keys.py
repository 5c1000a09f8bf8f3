"""Who is who: an authority and a certificate for the server, a secret for its operator, a key for every device."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from homebody.errors import HomebodyError
from homebody.federation.service.certificates import make_certificates
from homebody.federation.service.files import write_new

try:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_ssh_public_key,
    )
except ImportError as error:
    raise HomebodyError("Keys need the extra: pip install 'homebody[deploy]'.") from error

__all__ = ["make_authority", "make_device_key", "read_public"]


def make_authority(folder: Path, hosts: Sequence[str] = ()) -> list[Path]:
    """Write an authority (ca.pem, ca.key), the server's certificate (server.pem, server.key), which holds for this
    machine by its own names and for `hosts`, and the operator's secret. Gives the files, readable by their owner
    alone; devices need ca.pem, and nobody else the others."""
    return write_new(folder, {**make_certificates(hosts), "secret": secrets.token_hex(32).encode()})


def make_device_key(folder: Path) -> Path:
    """Write a device's key (device.key, which never leaves it) and its public half, whose path is given: that goes
    to the operator, who registers it."""
    key = ec.generate_private_key(ec.SECP384R1())
    _, public = write_new(
        folder,
        {
            "device.key": key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
            "device.pub": key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n",
        },
    )
    return public


def read_public(path: Path) -> bytes:
    """A device's public key as OpenSSH text, without what was written beside it."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise HomebodyError(f"{path} cannot be read: {error.strerror}.") from error
    if b"PRIVATE KEY" in text:
        raise HomebodyError(f"{path} is a private key, which must not leave its device: give the .pub file beside it.")
    wanted = f"{path} is no ECDSA P-384 public key as OpenSSH text: `homebody keys device` makes one, device.pub."
    try:
        key = load_ssh_public_key(text)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise HomebodyError(wanted) from error
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)):
        raise HomebodyError(wanted)
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
