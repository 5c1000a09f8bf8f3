"""Keys that two parties agree on, and masks that are drawn from them.

A mask is a stream of AES-256 in counter mode. Its key is derived (HKDF, SHA-256) from what two parties agree on
(X25519), the attempt, the purpose and the direction, and is used once.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from homebody.errors import HomebodyError, install
from homebody.privacy.ring import Numbers, Ring

try:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise HomebodyError(f"A secure sum among devices needs the extra: {install('deploy')}.") from error

__all__ = ["KEY_BYTES", "MaskedSum", "agree", "derive", "public_half", "round_key", "stream"]

KEY_BYTES = 32
_LABEL = b"homebody secure sum 1"
_DIRECTION = struct.Struct("<II")
_NATIVE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def derive(secret: bytes, attempt: bytes, purpose: str, sender: int, receiver: int) -> bytes:
    """A key for one purpose and direction in one attempt; `attempt` is `Terms.digest`."""
    info = b"\0".join([_LABEL, purpose.encode(), attempt + _DIRECTION.pack(sender, receiver)])
    return HKDF(hashes.SHA256(), KEY_BYTES, None, info).derive(secret)


def stream(key: bytes, length: int) -> bytes:
    """So many pseudo-random bytes."""
    return Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(length))


def round_key(secret: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(secret)


def public_half(secret: bytes) -> bytes:
    return round_key(secret).public_key().public_bytes_raw()


def agree(key: X25519PrivateKey, public: bytes) -> bytes | None:
    """What the owners of two round keys have in common; None if the public one is of no use (of low order)."""
    try:
        return key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return None


class MaskedSum:
    """A vector of a ring, to which vectors and masks are added.

    Masks are drawn in whole machine words, which are as uniform modulo a smaller power of two and need no unpacking.

    >>> sums = MaskedSum(entries=3, width=3)
    >>> sums.add_packed(bytes([1, 0, 0, 2, 0, 0, 255, 255, 255]))
    >>> sums.add(b"k" * 32)
    >>> sums.subtract(b"k" * 32)
    >>> sums.numbers().tolist()
    [1, 2, 16777215]
    """

    def __init__(self, entries: int, width: int) -> None:
        self._ring = Ring(width, 1.0)
        words = _NATIVE[min(size for size in _NATIVE if size >= width)]
        self._sum: npt.NDArray[np.unsignedinteger] = np.zeros(entries, dtype=words)
        self._zeros = bytes(self._sum.nbytes)
        self._drawn = bytearray(self._sum.nbytes + 15)  # a cipher wants room for one block less a byte
        self._words = np.frombuffer(self._drawn, dtype=np.dtype(words).newbyteorder("<"), count=entries)

    def add(self, key: bytes) -> None:
        """Add the mask of this key."""
        self._draw(key)
        np.add(self._sum, self._words, out=self._sum)

    def subtract(self, key: bytes) -> None:
        """Take away the mask of this key."""
        self._draw(key)
        np.subtract(self._sum, self._words, out=self._sum)

    def add_numbers(self, numbers: Numbers) -> None:
        self._sum += numbers.astype(self._sum.dtype)

    def add_packed(self, packed: bytes) -> None:
        """Add a vector as it is sent."""
        if self._ring.width == self._sum.itemsize:
            np.add(self._sum, np.frombuffer(packed, dtype=self._words.dtype), out=self._sum)
        else:
            self.add_numbers(self._ring.unpack(packed))

    def numbers(self) -> Numbers:
        return self._sum.astype(np.uint64) & self._ring.mask

    def packed(self) -> bytes:
        return self._ring.pack(self.numbers())

    def _draw(self, key: bytes) -> None:
        Cipher(AES(key), CTR(bytes(16))).encryptor().update_into(self._zeros, self._drawn)
