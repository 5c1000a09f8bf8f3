"""What an operator does to a proxy's folder, beside the proxy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from homebody.errors import HomebodyError
from homebody.federation.proxy.app import running
from homebody.federation.proxy.settings import FILE, ProxySettings
from homebody.federation.proxy.store import ProxyStore, Sender, create
from homebody.federation.service.keys import make_report_key, read_report_pub
from homebody.federation.service.listening import certificate_files, refuse_occupied
from homebody.federation.service.text import making, read_authority
from homebody.files import write_new

__all__ = ["allow", "forbid", "make", "report"]


def make(
    folder: Path,
    settings: ProxySettings,
    *,
    hosts: Sequence[str] = (),
    next_ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
) -> Path:
    """A proxy's folder: whole, or not at all. Gives the public key by which the next hop will know it."""
    files = certificate_files(settings.listen, settings.tls, hosts, cert, key)
    authority = None if next_ca is None else read_authority(next_ca)
    refuse_occupied(folder, "proxy")
    with making(folder, "proxy"):
        if files:
            write_new(folder / "keys", files)
        write_new(folder, {**({"next-ca.pem": authority} if authority else {}), FILE: settings.to_toml().encode()})
        public = make_report_key(folder)
        create(folder)
    return public


def _opened(folder: Path) -> AbstractContextManager[ProxyStore]:
    return closing(ProxyStore(folder, ProxySettings.read(folder)))


def allow(
    folder: Path, files: Sequence[Path], *, people: int | None = None, proxy: bool = False, server: bool = False
) -> int:
    """Let these send, also while the proxy runs; how many may send now. All of them, or none.

    server: they are servers, which may have sums opened; how many of those there are now.
    """
    if server and (proxy or people is not None):
        raise HomebodyError("A server has no people and is no proxy: give --server alone.")
    if people is not None and not 1 <= people <= 1_000_000:
        raise HomebodyError(f"The people of a device are 1 to 1,000,000, not {people}.")
    keys = [read_report_pub(file) for file in files]
    with _opened(folder) as store:
        with store.transaction():
            for key in keys if server else ():
                store.sums.allow(store.mark(key))
            for key in () if server else keys:
                store.allow(key, Sender(proxy, people or (0 if proxy else 1)))
        return len(store.sums.servers() if server else store.senders())


def forbid(folder: Path, files: Sequence[Path]) -> int:
    """Let these send no more; how many may send now."""
    keys = {file: read_report_pub(file) for file in files}
    with _opened(folder) as store:
        with store.transaction():
            for file, key in keys.items():
                if not (store.forbid(key) | store.sums.forbid(store.mark(key))):
                    raise HomebodyError(f"The key {file} is not registered with the proxy {folder}.")
        return len(store.senders())


def report(folder: Path) -> dict[str, Any]:
    """What `homebody proxy status` says."""
    settings = ProxySettings.read(folder)
    with _opened(folder) as store:
        senders, counters = store.senders().values(), store.counters()
        return {
            "folder": os.fspath(folder),
            "running": running(folder),
            **{name: getattr(settings, name) for name in ("listen", "next", "hold", "least_devices")},
            "devices": sum(not sender.proxy for sender in senders),
            "proxies": sum(sender.proxy for sender in senders),
            "servers": len(store.sums.servers()),
            "sums": store.sums.count(),
            "epochs": sum(epoch is not None for epoch in store.epochs().values()),
            "held": store.held(),
            "accepted": counters.get("accepted_reports", 0),
            "forwarded": counters.get("forwarded_reports", 0),
            **{
                kind: {name.partition(": ")[2]: amount for name, amount in counters.items() if name.startswith(kind)}
                for kind in ("dropped", "refused")
            },
        }
