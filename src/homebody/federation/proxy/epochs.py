"""The epochs that a proxy knows, as the next hop first described them.

A server that gave each device its own key or model could recognise its reports. All devices ask the proxy and get the
same answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from homebody.federation.epoch import Epoch
from homebody.federation.proxy.forward import EpochRefused, NextHop, Unreachable
from homebody.federation.proxy.writer import Writer
from homebody.federation.service.logs import Trouble, log
from homebody.federation.service.web import Refusal

__all__ = ["Book", "epoch_closed", "epoch_unknown"]

_ASKING = 4
"""Questions to the next hop at a time, for strangers and for registered senders each: invented epochs must not make
the proxy flood it."""
_MOST_WAITING = 4096
"""Questions of each kind that may wait: as many as there can be connections."""
_TURN_SECONDS = 10.0
_UNKNOWN_SECONDS = 60.0
"""Between two lines in the log that say that the next hop knows no such epoch."""
_REMEMBERED = 2.0
_MOST_REMEMBERED = 4096


class Book:
    """The epochs that are known here."""

    def __init__(
        self,
        epochs: dict[bytes, Epoch | None],
        writer: Writer,
        connect: Callable[[], NextHop],
        clock: Callable[[], float] = time.time,
        where: str = "",
    ) -> None:
        self._epochs, self._writer, self._connect, self._clock = epochs, writer, connect, clock
        self._next = where
        self._asked: dict[bool, dict[bytes, asyncio.Task[Epoch | None]]] = {True: {}, False: {}}
        self._turns = {known: asyncio.Semaphore(_ASKING) for known in (True, False)}
        self._no: dict[bytes, tuple[float, int]] = {}
        self._trouble = Trouble("cannot ask the next hop", "the next hop answers again", next=where)
        self._said_unknown = -_UNKNOWN_SECONDS

    async def find(self, epoch: bytes, *, known: bool = False) -> Epoch:
        """An epoch that is open, or a refusal. known: a registered sender asks; strangers wait in another queue."""
        if epoch not in self._epochs:
            until, status = self._no.get(epoch, (0.0, 0))
            if time.monotonic() < until:
                raise epoch_closed() if status == 410 else epoch_unknown()
            asked = self._asked[known]
            if epoch not in asked:
                if len(asked) >= _MOST_WAITING:
                    raise _overload()
                asked[epoch] = asyncio.create_task(self._in_turn(epoch, known))
                asked[epoch].add_done_callback(lambda task: self._answered(epoch, known, task))
            described = await asyncio.shield(asked[epoch])
        else:
            described = self._epochs[epoch]
        if described is None or epoch in self._writer.closed or self._clock() >= described.closes:
            raise epoch_closed()
        return described

    def _answered(self, epoch: bytes, known: bool, task: asyncio.Task[Epoch | None]) -> None:
        del self._asked[known][epoch]
        if not task.cancelled():
            task.exception()  # whoever asked may be gone

    async def _in_turn(self, epoch: bytes, known: bool) -> Epoch | None:
        """Ask the next hop in turn, first come, first served."""
        try:
            async with asyncio.timeout(_TURN_SECONDS):
                await self._turns[known].acquire()
        except TimeoutError:
            raise _overload() from None
        try:
            # The other kind may have asked meanwhile.
            return self._epochs[epoch] if epoch in self._epochs else await self._ask(epoch)
        finally:
            self._turns[known].release()

    async def _ask(self, epoch: bytes) -> Epoch | None:
        hop = self._connect()
        try:
            described = await asyncio.to_thread(hop.epoch, epoch)
        except EpochRefused as error:
            self._trouble.say("")
            if error.status == 404:
                self._say_unknown(epoch)
            if len(self._no) >= _MOST_REMEMBERED:
                self._no.clear()
            self._no[epoch] = (time.monotonic() + _REMEMBERED, error.status)
            raise epoch_closed() if error.status == 410 else epoch_unknown() from None
        except Unreachable as error:
            self._trouble.say(str(error))
            raise Refusal(
                503, "next hop away", "The next hop cannot be asked about this epoch now.", retry_after=5
            ) from None
        finally:
            hop.close()
        self._trouble.say("")
        opened: Epoch | None = await self._writer.call(lambda store: store.open_epoch(described, self._clock()))
        self._epochs[epoch] = opened
        if opened is not None:
            log("epoch opened", epoch=epoch.hex(), closes=opened.closes)
        return opened

    def _say_unknown(self, epoch: bytes) -> None:
        """Log it from time to time only: strangers may ask for any number of epochs."""
        if time.monotonic() - self._said_unknown >= _UNKNOWN_SECONDS:
            self._said_unknown = time.monotonic()
            log("the next hop knows no such epoch", next=self._next, epoch=epoch.hex())


def _overload() -> Refusal:
    return Refusal(429, "overload", "Too many epochs are being asked for; ask again later.", retry_after=1)


def epoch_closed() -> Refusal:
    """The answer about an epoch that takes nothing more."""
    return Refusal(410, "epoch closed", "This epoch is closed: nothing is taken for it any more.")


def epoch_unknown() -> Refusal:
    """The answer about an epoch that does not exist."""
    return Refusal(404, "unknown epoch", "The server knows no such epoch.")
