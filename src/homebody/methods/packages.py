"""Methods that installed packages bring, by entry points of the group `homebody.methods`; what tells their code apart.

Nothing here imports a package: what is installed is seen from its metadata and its files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from homebody.errors import HomebodyError

__all__ = ["GROUP", "PackagedMethod", "entry_point", "packaged", "packaged_methods"]

GROUP = "homebody.methods"
_KNOWN: dict[tuple[str, Path], PackagedMethod] = {}
"""What this process has seen, by name and place."""
SHOWN = 12
"""Characters of a fingerprint in a sentence."""


class PackagedMethod(NamedTuple):
    """A method of a package, and the code behind it."""

    name: str
    package: str
    version: str
    fingerprint: str
    """Of all Python files of the package, in hexadecimal digits."""

    def __str__(self) -> str:
        return f"{self.package} {self.version} (code {self.fingerprint[:SHOWN]})"

    @property
    def code(self) -> str:
        """Package, version and fingerprint in a line, as a letter names them."""
        return f"{self.package} {self.version} {self.fingerprint}"

    @classmethod
    def of_code(cls, name: str, code: str) -> PackagedMethod:
        """The inverse of `code`.

        >>> PackagedMethod.of_code("mine", "my-package 1.0 0123456789abcdef").version
        '1.0'
        """
        package, _, rest = code.partition(" ")
        version, _, fingerprint = rest.partition(" ")
        return cls(name, package, version, fingerprint)


def entry_point(name: str) -> EntryPoint | None:
    """The entry point of this name; None if no package has one. Two packages must not have the same."""
    known = {point.value: point for point in entry_points(group=GROUP, name=name)}
    if len(known) > 1:
        brought = " and ".join(sorted(_distribution(point)[0] for point in known.values()))
        raise HomebodyError(f"Two packages bring a method '{name}', {brought}: uninstall one of them.")
    return next(iter(known.values()), None)


def packaged(name: str) -> PackagedMethod | None:
    """What is installed under this name, without importing it.

    It stays what it was when this process first looked: code that was imported does not change with its files.
    """
    if (point := entry_point(name)) is None:
        return None
    files = _files(point)
    key = (name, next(iter(files.values()), Path()))
    if key not in _KNOWN:
        _KNOWN[key] = PackagedMethod(name, *_distribution(point), _fingerprint(files))
    return _KNOWN[key]


def packaged_methods() -> list[str]:
    """The names of all methods that installed packages bring."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def _distribution(point: EntryPoint) -> tuple[str, str]:
    found = point.dist
    return ("an unnamed package", "unknown") if found is None else (found.name, found.version)


def _files(point: EntryPoint) -> dict[str, Path]:
    """The Python files of the package that the entry point is in, by their paths within it."""
    top = point.module.partition(".")[0]
    spec = find_spec(top)  # of a package without a parent: it is found, not imported
    if spec is None:
        raise HomebodyError(f"The method '{point.name}' is in the module {point.module}, which is not installed.")
    if spec.submodule_search_locations is None:
        return {Path(spec.origin).name: Path(spec.origin)} if spec.origin else {}
    places = map(Path, spec.submodule_search_locations)
    return {file.relative_to(place).as_posix(): file for place in places for file in sorted(place.rglob("*.py"))}


def _fingerprint(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        content = file.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:32]
