"""Files that are written once: all of them or none, for their owner's eyes alone."""

from __future__ import annotations

import os
from pathlib import Path

from homebody.errors import HomebodyError

__all__ = ["write_new"]


def write_new(folder: Path, files: dict[str, bytes]) -> list[Path]:
    """All of them or none; never over a file that is there."""
    paths = {folder / name: content for name, content in files.items()}
    written: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in paths:
            if path.exists():
                raise FileExistsError(0, "File exists", str(path))
        for path, content in paths.items():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                written.append(path)
                file.write(content)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise HomebodyError(
                f"{error.filename} is there already, and whoever trusts it would be locked out: choose another folder, "
                "or take it away first."
            ) from error
        raise HomebodyError(f"The keys cannot be written to {folder}: {error.strerror}.") from error
    return list(paths)
