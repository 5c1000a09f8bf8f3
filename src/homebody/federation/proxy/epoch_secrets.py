"""The secrets of a proxy's epochs: files that are deleted when an epoch closes."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from homebody.errors import Unavailable
from homebody.files import sync_folder, write_synced

__all__ = ["Secrets"]

_SECRET_BYTES = 32


class Secrets:
    """The secrets of open epochs, each in a file.

    SQLite's log keeps deleted rows longer than its tables do, so a secret in a table could be read after its epoch
    closed. An epoch without a file is closed.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     secrets = Secrets(Path(folder))
    ...     secrets.make(b"epoch")
    ...     before = len(secrets.read(b"epoch"))
    ...     secrets.forget(b"epoch")
    ...     before, secrets.read(b"epoch")
    (32, b'')
    """

    def __init__(self, folder: Path, name: str = "epochs") -> None:
        self._folder = folder / name

    def make(self, epoch: bytes) -> None:
        """Draw a secret and write it to the disk, in place of one that was left without an epoch."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_synced(self._path(epoch), os.urandom(_SECRET_BYTES), over=True)
        except OSError as error:
            raise Unavailable(f"An epoch's secret cannot be written to {self._folder}: {error.strerror}.") from error

    def read(self, epoch: bytes) -> bytes:
        """The secret; empty if the epoch is closed."""
        try:
            return self._path(epoch).read_bytes()
        except FileNotFoundError:
            return b""

    def forget(self, epoch: bytes) -> None:
        self._path(epoch).unlink(missing_ok=True)
        if self._folder.exists():
            sync_folder(self._folder)

    def keep_only(self, epochs: Collection[bytes]) -> None:
        """Delete the secrets of all other epochs."""
        kept = {self._path(epoch) for epoch in epochs}
        for path in self._folder.glob("*.secret"):
            if path not in kept:
                path.unlink(missing_ok=True)

    def _path(self, epoch: bytes) -> Path:
        return self._folder / f"{epoch.hex()}.secret"
