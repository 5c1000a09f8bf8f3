"""A proxy's process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from homebody.federation.proxy.app import Proxy
from homebody.federation.proxy.epochs import Book
from homebody.federation.proxy.forward import Forwarder, NextHop
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import ProxyStore
from homebody.federation.proxy.tables import ReportBatch
from homebody.federation.proxy.writer import Writer
from homebody.federation.service.keys import read_report_key
from homebody.federation.service.logs import log
from homebody.federation.service.web import listen, serve
from homebody.files import holding, is_held

__all__ = ["Service", "run", "running"]

_FAREWELL = 10.0
"""Seconds for one that was just killed to be gone."""


class Service:
    """The parts of a proxy, put together. `app` is what is served; it starts and stops the others."""

    def __init__(self, folder: Path, settings: ProxySettings, clock: Callable[[], float] = time.time) -> None:
        _, secret = read_report_key(folder / "reports.key")
        store = self._store = ProxyStore(folder, settings)
        self._least = settings.least_devices

        def connect() -> NextHop:
            return NextHop(settings, folder, secret)

        connect()  # an authority that cannot be read is said now
        self.forwarder = Forwarder(connect, self._done)
        self.writer = Writer(folder, store, self.forwarder.put, clock)
        book = Book(store.epochs(), self.writer, connect, clock, settings.next)
        proxy = Proxy(settings, store.mark, self.writer, book)
        self.refused, self.room = proxy.refused, proxy.room
        self.app = proxy.app(self._start, self._stop)

    def _done(self, batch: ReportBatch, outcome: str) -> None:
        self.writer.done(batch, outcome)

    def _start(self) -> None:
        self.writer.start()
        self.forwarder.start()
        log("started")
        senders, least = self.writer.senders.values(), self._least
        if len(senders) < least and not any(sender.proxy for sender in senders):
            log("too few may send: nothing is passed on", devices=len(senders), least_devices=least)

    def _stop(self) -> None:
        self.forwarder.stop()
        self.writer.stop()
        log("stopped")


def run(folder: Path) -> None:
    """Run a proxy until it is told to stop."""
    settings = ProxySettings.read(folder)
    alone = holding(folder / ".lock", f"A proxy runs in {folder} already.", patience=_FAREWELL)
    with alone, listen(settings.host, settings.port) as listening:
        service = Service(folder, settings)
        keys = folder / "keys"
        cert, key = (keys / "server.pem", keys / "server.key") if settings.tls else (None, None)
        serve(service.app, listening, cert=cert, key=key, counted=service.refused)


def running(folder: Path) -> bool:
    """Whether a proxy holds the folder."""
    return is_held(folder / ".lock")
