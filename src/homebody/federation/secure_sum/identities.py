"""Public keys of devices in a fixed form, and signatures (ECDSA, P-384) of statements.

Light: commands that list keys load nothing that trains.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from homebody.errors import HomebodyError, install
from homebody.federation.secure_sum import SIGNATURE_BYTES

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
except ImportError as error:
    raise HomebodyError(f"A secure sum among devices needs the extra: {install('deploy')}.") from error

__all__ = ["fingerprint_of", "holds", "identity_in", "identity_of", "load_public_key", "new_key", "sign_statement"]


def identity_of(key: ec.EllipticCurvePublicKey) -> bytes:
    """A device's public key in 49 bytes: a compressed point of P-384.

    >>> len(identity_of(ec.generate_private_key(ec.SECP384R1()).public_key()))
    49
    """
    if not isinstance(key.curve, ec.SECP384R1):
        raise HomebodyError("A device's key is an elliptic one (ECDSA P-384): `homebody keys device` makes one.")
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def new_key() -> ec.EllipticCurvePrivateKey:
    """A key such as a device signs with."""
    return ec.generate_private_key(ec.SECP384R1())


def fingerprint_of(identity: bytes) -> str:
    """The key's fingerprint, as `homebody server status` and logs show it: SHA-256 of its DER form, in hexadecimal."""
    try:
        key = _public(identity)
    except ValueError as error:
        raise HomebodyError("A device's key is damaged: it is no point of the curve P-384.") from error
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def load_public_key(text: bytes) -> ec.EllipticCurvePublicKey:
    """A public key of OpenSSH text, such as the content of device.pub; refused unless it is ECDSA P-384."""
    try:
        key = load_ssh_public_key(text)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise HomebodyError("This is no public key as OpenSSH text.") from error
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)):
        raise HomebodyError("The public key is of another kind than ECDSA P-384.")
    return key


@lru_cache(maxsize=4096)
def identity_in(text: bytes) -> bytes:
    """As `identity_of`, for a public key as `load_public_key` takes it."""
    return identity_of(load_public_key(text))


def sign_statement(key: ec.EllipticCurvePrivateKey, statement: bytes) -> bytes:
    """A signature in 96 bytes."""
    parts = decode_dss_signature(key.sign(statement, ec.ECDSA(hashes.SHA384())))
    return b"".join(part.to_bytes(SIGNATURE_BYTES // 2, "big") for part in parts)


def holds(identity: bytes, signature: bytes, statement: bytes) -> bool:
    """Whether the owner of this key signed the statement."""
    half = SIGNATURE_BYTES // 2
    der = encode_dss_signature(int.from_bytes(signature[:half], "big"), int.from_bytes(signature[half:], "big"))
    try:
        _public(identity).verify(der, statement, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=4096)
def _public(identity: bytes) -> ec.EllipticCurvePublicKey:
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), identity)
