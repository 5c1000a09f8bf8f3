"""Where a server's folder says that things are: for processes that need no more of its plan, and no torch."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import NamedTuple

from homebody.errors import HomebodyError

__all__ = ["FILE", "Place", "database_in"]

FILE = "server.toml"


def database_in(folder: Path, named: str) -> Path | str:
    """What to connect to: a file in the folder, an address, or env:NAME for one that the environment holds."""
    if named.startswith("env:"):
        name = named.removeprefix("env:")
        if not os.environ.get(name):
            raise HomebodyError(f"The server's database is in the environment's {name}, which is not set.")
        return os.environ[name]
    return named if "://" in named else folder / named


class Place(NamedTuple):
    """Where the intake listens, and what it writes to."""

    host: str
    port: int
    tls: bool
    database: Path | str

    @classmethod
    def read(cls, folder: Path) -> Place:
        """Of a plan that was checked when the server was started."""
        try:
            plan = tomllib.loads((folder / FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise HomebodyError(f"The server's plan {folder / FILE} cannot be read: {error}.") from error
        host, _, port = str(plan.get("reports", "")).rpartition(":")
        if not host:
            raise HomebodyError(f"The server in {folder} takes in no reports: its plan names no address for them.")
        return cls(host.strip("[]"), int(port), bool(plan.get("tls", True)), database_in(folder, plan["database"]))
