"""A proxy as the helper of secure sums: it makes a key for each sum, and opens one set of sealed seeds.

Only a registered server may ask, and only messages of registered devices are opened. What a sum is, and how a set is
checked, is in `homebody.federation.secure_sum.helped`; that needs torch, and is imported when the first server asks.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from homebody.errors import HomebodyError
from homebody.federation.proxy.store import ProxyStore
from homebody.federation.proxy.sums import MOST_OPEN, EpochSum
from homebody.federation.proxy.writer import Writer
from homebody.federation.secure_sum.requests import (
    OVERHEAD,
    ROW_BYTES,
    BadRequest,
    ForgedRequest,
    HelperRequest,
    Kind,
    open_request,
)
from homebody.federation.service import web
from homebody.federation.service.logs import log

if TYPE_CHECKING:
    from homebody.federation.secure_sum.helped import HelpedTerms

__all__ = ["LONGEST_SECONDS", "MOST_VECTOR", "HelperDesk"]

SECONDS = struct.Struct("<d")
"""The first part of a request for an epoch: for how long it is open. The rest are its terms."""
LONGEST_SECONDS = 86_400.0
MOST_VECTOR = 1 << 26
"""Bytes of a vector, at most."""
_MOST_TERMS = 1024
_MOST_WAITING = 64
"""Questions about sums that are not known in memory, at a time."""


class HelperDesk:
    """The endpoints of a helper. mark: how a key is stored. room: the memory for requests."""

    def __init__(
        self,
        mark: Callable[[bytes], bytes],
        writer: Writer,
        room: web.RequestMemory,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._mark, self._writer, self._room, self._clock = mark, writer, room, clock
        self._turn = asyncio.Lock()
        """One set is opened at a time: that takes memory and a processor."""
        self._open_sums: dict[bytes, EpochSum] = {}
        """Those that were looked up here, so that devices' questions do not wait for the disk."""
        self._waiting = 0

    def routes(self) -> list[web.Route]:
        return [
            web.Route("/v1/sums", self._begin, methods=["POST"]),
            web.Route("/v1/sums/{epoch}", self._describe, methods=["GET"]),
            web.Route("/v1/sums/{epoch}/set", self._open, methods=["POST"]),
        ]

    async def _begin(self, request: web.Request) -> web.Response:
        """Begin an epoch; the same request again is answered the same."""
        with self._room.holding() as share:
            asked = await self._asked(request, "epoch", OVERHEAD + SECONDS.size + _MOST_TERMS, share)
        (seconds,) = SECONDS.unpack_from(asked.content.ljust(SECONDS.size, b"\0"))
        if not 1 <= seconds <= LONGEST_SECONDS:
            raise web.Refusal(422, "bad sum", f"A sum is open for 1 to {LONGEST_SECONDS:g} seconds.")
        terms = asked.content[SECONDS.size :]
        await asyncio.to_thread(_terms, terms)
        closes, server = self._clock() + seconds, self._mark(asked.server)
        outcome = await self._stored(lambda store: store.sums.open(asked.epoch, server, terms, closes))
        if outcome == "conflict":
            log("sum refused", epoch=asked.epoch.hex(), why="the epoch has other terms")
            raise web.Refusal(409, "conflict", "There is a sum of this number with other terms.")
        if outcome == "full":
            raise web.Refusal(429, "full", "As many sums are open as may be; ask again later.", retry_after=5)
        known = await self._found(asked.epoch)
        self._open_sums = {
            number: other
            for number, other in self._open_sums.items()
            if other.server != server and self._clock() < other.closes
        }
        log("sum opened", epoch=asked.epoch.hex(), closes=known.closes)
        return _description(known)

    async def _describe(self, request: web.Request) -> web.Response:
        """What devices compare with the server's words, each over a connection of its own."""
        epoch = web.named_epoch(request, "A sum")
        known = self._open_sums.get(epoch)
        if known is None or self._clock() >= known.closes:
            known = await self._looked_up(epoch)
            if len(self._open_sums) < 2 * MOST_OPEN:
                self._open_sums[epoch] = known._replace(secret=b"", answer=None)
        return _description(known)

    async def _looked_up(self, epoch: bytes) -> EpochSum:
        """As `_found`, for anybody: invented epochs must not keep the disk busy."""
        if self._waiting >= _MOST_WAITING:
            raise web.Refusal(429, "overload", "Too many sums are being asked for; ask again later.", retry_after=1)
        self._waiting += 1
        try:
            return await self._found(epoch)
        finally:
            self._waiting -= 1

    async def _open(self, request: web.Request) -> web.Response:
        epoch = web.named_epoch(request, "A sum")
        known = await self._looked_up(epoch)
        rows = (await asyncio.to_thread(_terms, known.terms)).parties  # one for each device that was asked
        most = OVERHEAD + ROW_BYTES * rows
        with self._room.holding() as share:
            asked = await self._asked(request, "set", most, share)
            if asked.epoch != epoch or self._mark(asked.server) != known.server:
                self._refused(epoch, "another server asks, or about another sum")
                raise web.Refusal(401, "unknown server", "Another server has asked for this sum.")
            async with self._turn:
                known = await self._found(epoch)  # another request may have opened a set meanwhile
                answer = await self._answer(known, asked.content)
        return web.Response(answer, 200, media_type="application/octet-stream")

    async def _answer(self, known: EpochSum, rows: bytes) -> bytes:
        """The answer, once it is on the disk."""
        opened, answer = known.opened, known.answer
        if opened is None or answer is None:
            computed = await asyncio.to_thread(self._computed, known, rows)
            digest = hashlib.sha256(rows).digest()
            stored = await self._stored(lambda store: store.sums.keep(known.epoch, digest, computed))
            if stored is None:
                raise _closed()
            opened, answer = stored
            await self._stored(lambda store: store.sums.forget_secret(known.epoch))
            log("set opened", epoch=known.epoch.hex(), devices=len(rows) // ROW_BYTES)
        if opened != hashlib.sha256(rows).digest():
            self._refused(known.epoch, "another set was opened")
            raise web.Refusal(409, "second set", "One set of an epoch is opened, and another one was.")
        assert answer is not None
        return answer

    def _computed(self, known: EpochSum, rows: bytes) -> bytes:
        from homebody.federation.secure_sum.helped import Helper, HelperEpoch, SetRefused

        epoch = HelperEpoch(known.epoch, known.key, _terms(known.terms), known.closes)
        try:
            return Helper(epoch, known.secret, self._is_device).open(rows)
        except SetRefused as error:
            self._refused(known.epoch, str(error), faulty=len(error.faulty))
            faulty = {str(place): why for place, why in error.faulty.items()}
            raise web.Refusal(422, "set refused", str(error), faulty=faulty) from None

    def _is_device(self, key: bytes) -> bool:
        sender = self._writer.senders.get(self._mark(key))
        return sender is not None and not sender.proxy

    def _refused(self, epoch: bytes, why: str, **facts: Any) -> None:
        log("set refused", epoch=epoch.hex(), why=why, **facts)

    async def _asked(self, request: web.Request, kind: Kind, most: int, share: web.Share) -> HelperRequest:
        body = await web.read_body(request, web.declared(request, most), share)
        try:
            asked = open_request(body, kind)
        except ForgedRequest as error:
            raise web.Refusal(401, "bad signature", str(error)) from None
        except BadRequest as error:
            raise web.Refusal(400, "malformed", str(error)) from None
        if self._mark(asked.server) not in self._writer.servers:
            raise web.Refusal(401, "unknown server", "The server is not registered with this helper.")
        web.proved(request, asked.server)
        return asked

    async def _found(self, epoch: bytes) -> EpochSum:
        found: EpochSum | str = await self._stored(lambda store: store.sums.find(epoch, self._clock()))
        if isinstance(found, str):
            raise _closed() if found == "closed" else web.Refusal(404, "unknown epoch", "There is no such sum.")
        return found

    async def _stored(self, call: Callable[[ProxyStore], Any]) -> Any:
        try:
            return await self._writer.call(call)
        except Exception:  # why, the log says
            raise web.Refusal(
                503, "cannot write", "Nothing can be kept here now; ask again later.", retry_after=5
            ) from None


def _closed() -> web.Refusal:
    return web.Refusal(410, "epoch closed", "The sum is closed: its key is gone.")


def _description(known: EpochSum) -> web.Response:
    said = {"epoch": known.epoch.hex(), "key": known.key.hex(), "terms": known.terms.hex(), "closes": known.closes}
    return web.answer(200, said)


def _terms(content: bytes) -> HelpedTerms:
    """Terms; refused where they make no sum, or a vector that is too large."""
    from homebody.federation.secure_sum.helped import HelpedTerms

    try:
        terms = HelpedTerms.decode(content)
    except HomebodyError as error:
        raise web.Refusal(422, "bad sum", str(error)) from None
    if terms.entries * terms.width > MOST_VECTOR:
        raise web.Refusal(422, "bad sum", f"A vector has at most {MOST_VECTOR:,} bytes here.")
    return terms
