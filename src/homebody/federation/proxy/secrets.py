"""The secrets of open epochs: a file each, in no table.

SQLite's log keeps what was once written for longer than its tables do: a secret that stood in one could be read after
its epoch had closed. A file that is not there means that the epoch is closed.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from homebody.errors import Unavailable

__all__ = ["Secrets"]

_BYTES = 32


class Secrets:
    """Those of a proxy.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     secrets = Secrets(Path(folder))
    ...     secrets.make(b"epoch")
    ...     before = len(secrets.read(b"epoch"))
    ...     secrets.forget(b"epoch")
    ...     before, secrets.read(b"epoch")
    (32, b'')
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "epochs"

    def make(self, epoch: bytes) -> None:
        """Draw one; it is on the disk before anything that it keys. One that was left without an epoch is replaced."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with os.fdopen(os.open(self._path(epoch), flags, 0o600), "wb") as file:
                file.write(os.urandom(_BYTES))
                file.flush()
                os.fsync(file.fileno())
            self._sync()
        except OSError as error:
            raise Unavailable(f"An epoch's secret cannot be written to {self._folder}: {error.strerror}.") from error

    def read(self, epoch: bytes) -> bytes:
        """Empty where there is none: the epoch is closed."""
        try:
            return self._path(epoch).read_bytes()
        except FileNotFoundError:
            return b""

    def forget(self, epoch: bytes) -> None:
        self._path(epoch).unlink(missing_ok=True)
        if self._folder.exists():
            self._sync()

    def keep_only(self, epochs: Collection[bytes]) -> None:
        """Forget all others."""
        kept = {self._path(epoch) for epoch in epochs}
        for path in self._folder.glob("*.secret"):
            if path not in kept:
                path.unlink(missing_ok=True)

    def _path(self, epoch: bytes) -> Path:
        return self._folder / f"{epoch.hex()}.secret"

    def _sync(self) -> None:
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
