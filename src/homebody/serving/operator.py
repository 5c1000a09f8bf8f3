"""What an operator does to a service's folder, beside the service."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from homebody.errors import HomebodyError
from homebody.federation.service.listening import certificate_files, refuse_occupied
from homebody.federation.service.text import making, one_line, read_file
from homebody.files import is_held, write_new
from homebody.privacy.queries import Query
from homebody.serving.additions import read_items
from homebody.serving.changes import add_items, carried, remove_item
from homebody.serving.model import Served
from homebody.serving.model_file import Model
from homebody.serving.settings import FILE, ServiceSettings
from homebody.serving.store import ServiceStore, create

__all__ = ["LOCK", "Reloaded", "add", "add_token", "init", "reload", "remove", "remove_token", "report"]

LOCK = ".lock"
"""Held while a service runs."""
LONGEST_FILE = 1 << 30
"""Bytes of a file of items, at most."""
AT_ONCE = 1000
"""Items that are one version."""


class Reloaded(NamedTuple):
    """What came of another model."""

    model: str
    items: int
    carried: int
    """Items that were added to the model before, and that the new one made rows of."""
    lost: list[str]
    """Those of which it made none."""


Source = Callable[[Query | None], Served]
"""Where a model comes from: a run's folder or a server's, and how devices ask."""


def init(
    folder: Path,
    source: Source,
    settings: ServiceSettings,
    *,
    hosts: Sequence[str] = (),
    cert: Path | None = None,
    key: Path | None = None,
) -> Reloaded:
    """Make a service's folder: whole, or not at all."""
    files = certificate_files(settings.listen, settings.tls, hosts, cert, key)
    refuse_occupied(folder, "service")
    model = Model.of(source(settings.asked))
    with making(folder, "service"):
        if files:
            write_new(folder / "keys", files)
        write_new(folder, {FILE: settings.to_toml().encode()})
        create(folder)
        return install(folder, model)


def reload(folder: Path, source: Source) -> Reloaded:
    """Serve another model, also while the service runs. Devices ask as the settings say."""
    return install(folder, Model.of(source(ServiceSettings.read(folder).asked)))


def install(folder: Path, model: Model) -> Reloaded:
    """Serve this model from now on."""
    with _opened(folder) as store, store.changing_model():
        file = store.write_model(model.content)
        with store.transaction():
            kept, lost = carried(store, model)
            store.replace_model(model.digest, file, time.time(), kept)
    return Reloaded(model.digest, len(model.served.ids), len(kept), lost)


def add(folder: Path, file: Path) -> tuple[int, int]:
    """Add the items of a file, JSON or a JSON object a line: how many, and the version of the items then."""
    items = read_items(_items_of(file))
    with _opened(folder) as store:
        model = Model.read(store.read_model(store.current().file))
        with store.transaction():
            for first in range(0, len(items), AT_ONCE):
                version = add_items(store, model, items[first : first + AT_ONCE])
    return len(items), version


def _items_of(file: Path) -> Any:
    content = read_file(file, LONGEST_FILE)
    try:
        text = content.decode()
        try:
            return json.loads(text)
        except ValueError:
            return [_item_of(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    except (ValueError, RecursionError) as error:
        raise HomebodyError(f"{file} is neither JSON nor a JSON object a line: {error}.") from error


def _item_of(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is not JSON ({error})") from error


def remove(folder: Path, ids: Sequence[str]) -> int:
    """Remove items, all or none; the version of the items then."""
    with _opened(folder) as store:
        model = Model.read(store.read_model(store.current().file))
        with store.transaction():
            return [remove_item(store, model, id_) for id_ in ids][-1]


def add_token(folder: Path, name: str, *, operator: bool = False) -> str:
    """A new token, which is shown once and kept nowhere."""
    with _opened(folder) as store:
        return store.add_token(one_line(name, "A token's name", 100), operator=operator)


def remove_token(folder: Path, name: str) -> None:
    with _opened(folder) as store:
        store.remove_token(name)


def report(folder: Path) -> dict[str, Any]:
    """What `homebody serve status` says."""
    settings = ServiceSettings.read(folder)
    with _opened(folder) as store:
        current, counts = store.current(), store.counts()
        return {
            "folder": os.fspath(folder),
            "running": is_held(folder / LOCK),
            "listen": settings.listen,
            "query": settings.query,
            "model": current.digest,
            "version": store.version,
            "added": counts["added"],
            "removed": counts["removed"],
            "models_before": counts["models"] - 1,
            "asks_for_tokens": settings.tokens,
            "tokens": {name: "operator" if operator else "reader" for name, operator in store.tokens().items()},
        }


@contextmanager
def _opened(folder: Path) -> Iterator[ServiceStore]:
    ServiceSettings.read(folder)
    with closing(ServiceStore(folder)) as store:
        yield store
