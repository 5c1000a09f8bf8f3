"""A proxy's process: its endpoints and its parts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from homebody.errors import several
from homebody.federation.envelopes import envelope_bytes
from homebody.federation.epoch import MESSAGE_REPORTS
from homebody.federation.proxy.epochs import Book, epoch_closed, epoch_unknown
from homebody.federation.proxy.forward import Forwarder, NextHop
from homebody.federation.proxy.helper import HelperDesk
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import BATCH_REPORTS, ProxyStore, VerifiedMessage
from homebody.federation.proxy.writer import Writer
from homebody.federation.service import web
from homebody.federation.service.keys import read_report_key
from homebody.federation.service.logs import counts, log, samples
from homebody.files import holding, is_held

__all__ = ["BATCH_REPORTS", "Proxy", "exposition", "run", "running"]

_FAREWELL = 10.0
"""Seconds for a proxy that was just killed to end."""


class Proxy:
    """A proxy's endpoints and its parts, put together. `app` is what is served; it starts and stops the others."""

    def __init__(self, folder: Path, settings: ProxySettings, clock: Callable[[], float] = time.time) -> None:
        _, secret = read_report_key(folder / "reports.key")
        store = self._store = ProxyStore(folder, settings)
        self._settings, self._mark, self.room = settings, store.mark, web.RequestMemory(settings.queue)

        def connect() -> NextHop:
            return NextHop(settings, folder, secret)

        connect()  # an authority that cannot be read is said now
        self.forwarder = Forwarder(connect, lambda batch, outcome: self.writer.done(batch, outcome))
        self.writer = Writer(folder, store, self.forwarder.put, clock)
        self._book = Book(store.epochs(), self.writer, connect, clock, settings.next)
        forwarding = [
            web.Route("/v1/reports", self._reports, methods=["POST"]),
            web.Route("/v1/batches", self._batches, methods=["POST"]),
            web.Route("/v1/epochs/{epoch}", self._epoch, methods=["GET"]),
        ]
        routes = [
            *(forwarding if settings.next else ()),
            *HelperDesk(store.mark, self.writer, self.room, clock).routes(),
            web.Route("/health", self._health, methods=["GET"]),
            web.Route("/metrics", self._metrics, methods=["GET"]),
        ]
        self.app = web.refusals(web.Starlette(routes=routes, lifespan=self._life), self.refused)

    @asynccontextmanager
    async def _life(self, _: web.Starlette) -> AsyncIterator[None]:
        self.writer.start()
        self.forwarder.start()
        log("started")
        senders, least = self.writer.senders.values(), self._settings.least_devices
        if self._settings.next and len(senders) < least and not any(sender.proxy for sender in senders):
            log("too few may send: nothing is passed on", devices=len(senders), least_devices=least)
        yield
        self.forwarder.stop()
        self.writer.stop()
        log("stopped")

    def refused(self, reason: str) -> None:
        self.writer.count(f"refused: {reason}")

    async def _reports(self, request: web.Request) -> web.Response:
        message = await self._take(request, "message", MESSAGE_REPORTS)
        return web.answer(200, {"accepted": message.envelope.size})

    async def _batches(self, request: web.Request) -> web.Response:
        message = await self._take(request, "batch", BATCH_REPORTS)
        return web.answer(200, {"accepted": message.envelope.size, "refused": {}})

    async def _take(self, request: web.Request, kind: Literal["message", "batch"], most: int) -> VerifiedMessage:
        """Accept an envelope, once it is on the disk."""
        size = web.declared(request, envelope_bytes(most))
        with self.room.holding() as share:
            message = self._opened(await web.read_body(request, size, share), kind)
            web.proved(request, message.key)
            epoch = await self._book.find(message.envelope.epoch, known=True)
            try:
                outcome = await self.writer.put(message)
            except Exception:  # why, the log says
                raise _cannot_keep() from None
        if outcome not in ("accepted", "repeated"):
            raise self._refusal(outcome, message, epoch.k)
        return message

    def _opened(self, body: bytes, kind: Literal["message", "batch"]) -> VerifiedMessage:
        key, envelope = web.opened_envelope(body)
        if envelope.kind != kind:
            raise web.Refusal(422, "wrong kind", f"This is for a {kind}, not for a {envelope.kind}.")
        if not envelope.size:
            raise web.Refusal(400, "malformed", "The envelope holds no report.")
        sender = self.writer.senders.get(self._mark(key))
        if sender is None or sender.proxy != (kind == "batch"):
            raise web.Refusal(401, "unknown sender", "The sender is not registered with this proxy.")
        return VerifiedMessage(key, sender, envelope)

    def _refusal(self, outcome: str, message: VerifiedMessage, k: int) -> web.Refusal:
        if outcome == "limit":
            most = message.sender.people * min(k, self._settings.most)
            sentence = f"This device may send {several(most, 'report')} in this epoch, and no more."
            return web.Refusal(429, "over its limit", sentence, limit=True)
        if outcome == "full":
            return web.Refusal(429, "full", "As many reports are held as may be; send it again later.", retry_after=5)
        if outcome == "conflict":
            return web.Refusal(409, "conflict", "Another message had this number before.")
        if outcome == "other size":
            return web.Refusal(422, "wrong size", "The epoch's reports are of another length.")
        return epoch_closed() if outcome == "closed" else epoch_unknown()

    async def _epoch(self, request: web.Request) -> web.Response:
        name = web.named_epoch(request, "An epoch")
        try:
            epoch = await self._book.find(name)
        except web.Refusal:
            raise
        except Exception:
            raise _cannot_keep() from None
        return web.answer(200, epoch.to_json())

    async def _health(self, _: web.Request) -> web.Response:
        if self.writer.failing:
            return web.answer(503, {"status": "failing"}, retry_after="5")
        return web.answer(200, {"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        web.only_from_here(request)
        text = await self.writer.call(exposition)
        return web.PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _cannot_keep() -> web.Refusal:
    return web.Refusal(503, "cannot write", "Nothing can be kept here now; send it again later.", retry_after=5)


def exposition(store: ProxyStore) -> str:
    """Counts, as Prometheus reads them."""
    lines = samples("proxy_held_reports", "gauge", "Reports on the disk.", {"": store.held()})
    lines += counts(store.counters(), "proxy_", lambda _: "Counted since the proxy was made.")
    return "\n".join(lines) + "\n"


def run(folder: Path) -> None:
    """Run a proxy until it is told to stop."""
    settings = ProxySettings.read(folder)
    alone = holding(folder / ".lock", f"A proxy runs in {folder} already.", patience=_FAREWELL)
    with alone, web.listen(settings.host, settings.port, settings.elsewhere(folder, "listen")) as listening:
        proxy = Proxy(folder, settings)
        web.serve(proxy.app, listening, folder / "keys" if settings.tls else None, proxy.refused)


def running(folder: Path) -> bool:
    """Whether a proxy holds the folder."""
    return is_held(folder / ".lock")
