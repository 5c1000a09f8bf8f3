"""A model in a folder, whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

from homebody.errors import HomebodyError
from homebody.files import insisting
from homebody.reference import Reference
from homebody.run import SPLIT, Finished, keep

__all__ = ["write_model"]


def write_model(done: Finished, path: Path, *, data: bool) -> None:
    """Write a model into a folder, all or nothing; a model that is there is replaced, and nothing else is."""
    if isinstance(done.method, Reference) and not data:
        raise HomebodyError(
            f"{type(done.method).__name__} is a centralised reference: it ranks from everybody's histories, so it is "
            "saved with them (data=True) or not at all."
        )
    if data and not done.split.population.n_interactions:
        raise HomebodyError("This model was saved without its people, so it cannot be saved with them: leave out data.")
    if path.is_symlink() or (path.exists() and not (path / SPLIT).is_dir() and (path.is_file() or any(path.iterdir()))):
        raise HomebodyError(f"{path} is there already and is no saved model: choose another name.")
    scratch, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.old")
    with insisting(f"{path} cannot be written"):
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        try:
            keep(done, scratch, people=data)
            if path.exists():
                path.rename(old)
            scratch.rename(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
