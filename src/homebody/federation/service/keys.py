"""Keys that sign reports: a device's to its proxy, and a proxy's to the next hop.

The server knows a device by another key, so that proxy and server cannot join their records. A key file is one line,
`homebody-reports` and the key in hexadecimal; a private one says `homebody-reports-secret`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from homebody.errors import HomebodyError
from homebody.federation.envelopes import signing_keys
from homebody.federation.service.text import read_file
from homebody.files import write_new

__all__ = ["make_report_key", "read_report_key", "read_report_pub"]

_LONGEST = 4096
"""Bytes of a key file that are read."""
_PUBLIC = re.compile(rb"\s*homebody-reports ([0-9a-f]{64})\s*")
_SECRET = re.compile(rb"\s*homebody-reports-secret ([0-9a-f]{64})\s*")


def make_report_key(folder: Path) -> Path:
    """Write a key (reports.key, which stays in the folder) and its public half for the proxy's operator; returns the
    path of the public half.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     public = make_report_key(Path(folder))
    ...     known, secret = read_report_key(public.with_suffix(".key"))
    ...     known == read_report_pub(public), len(secret)
    (True, 64)
    """
    seed = os.urandom(32)
    public, _ = signing_keys(seed)
    lines = {
        "reports.key": f"homebody-reports-secret {seed.hex()}\n",
        "reports.pub": f"homebody-reports {public.hex()}\n",
    }
    return write_new(folder, {name: line.encode() for name, line in lines.items()})[1]


def read_report_key(path: Path) -> tuple[bytes, bytes]:
    """The public key (32 bytes) and the secret that signs (64 bytes)."""
    match = _SECRET.fullmatch(read_file(path, _LONGEST))
    if not match:
        raise HomebodyError(
            f"{path} is not a key that signs reports, which is one line: homebody-reports-secret and hex."
        )
    return signing_keys(bytes.fromhex(match[1].decode()))


def read_report_pub(path: Path) -> bytes:
    """The public key (32 bytes) of a file reports.pub."""
    text = read_file(path, _LONGEST)
    if _SECRET.fullmatch(text):
        raise HomebodyError(f"{path} is a private key, which must not leave its device: give the .pub file beside it.")
    match = _PUBLIC.fullmatch(text)
    if not match:
        raise HomebodyError(
            f"{path} is not a public key for reports, which is one line: homebody-reports and 64 hex digits."
        )
    return bytes.fromhex(match[1].decode())
