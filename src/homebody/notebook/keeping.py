"""A model in a folder, whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from homebody.errors import HomebodyError
from homebody.files import insisting
from homebody.reference import Reference
from homebody.run import SPLIT, Finished, keep

__all__ = ["replacing_folder", "write_model"]


def write_model(done: Finished, path: Path, *, data: bool) -> None:
    """Write a model into a folder, all or nothing; a model that is there is replaced, and nothing else is."""
    if isinstance(done.method, Reference) and not data:
        raise HomebodyError(
            f"{type(done.method).__name__} is a centralised reference: it ranks from everybody's histories, so it is "
            "saved with them (data=True) or not at all."
        )
    if data and not done.split.population.n_interactions:
        raise HomebodyError("This model was saved without its people, so it cannot be saved with them: leave out data.")
    with replacing_folder(path, SPLIT) as scratch:
        scratch.rmdir()  # `keep` makes it, for its owner alone
        keep(done, scratch, people=data)


@contextmanager
def replacing_folder(path: Path, mark: str) -> Iterator[Path]:
    """A folder to fill, which then takes the place of `path`; where that fails, nothing changes.

    mark: a name that lies in every folder of this kind. What is there without it is somebody's own, and is refused.
    """
    if path.is_symlink() or (path.exists() and not (path / mark).exists() and (path.is_file() or any(path.iterdir()))):
        raise HomebodyError(f"{path} is there already, and was not written by this call: choose another name.")
    scratch, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.old")
    with insisting(f"{path} cannot be written"):
        for left in (scratch, old):
            shutil.rmtree(left, ignore_errors=True)
        try:
            scratch.mkdir(parents=True)
            yield scratch
            if path.exists():
                path.rename(old)
            scratch.rename(path)
        finally:
            for left in (scratch, old):
                shutil.rmtree(left, ignore_errors=True)
