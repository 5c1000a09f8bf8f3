"""What a proxy says of epochs: what it once heard from the next hop, and never anything else.

A server that gave each device a key or a model of its own could tell its reports by that. Devices ask here, and all
get the same answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from homebody.proxy.forward import Closed, NextHop, Unknown, Unreachable
from homebody.proxy.tables import Epoch
from homebody.proxy.writer import Writer
from homebody.runtime.logs import log
from homebody.runtime.web import Refusal

__all__ = ["Book"]

_ASKING = 4
"""Questions to the next hop at a time: whoever invents epochs must not make this proxy a nuisance to it."""
_REMEMBERED = 2.0
_MOST_REMEMBERED = 4096


class Book:
    """The epochs that are known here."""

    def __init__(
        self,
        epochs: dict[bytes, Epoch],
        writer: Writer,
        connect: Callable[[], NextHop],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._epochs, self._writer, self._connect, self._clock = epochs, writer, connect, clock
        self._asked: dict[bytes, asyncio.Task[Epoch]] = {}
        self._no: dict[bytes, tuple[float, int]] = {}
        self._trouble = ""

    async def find(self, epoch: bytes) -> Epoch:
        """An epoch that is open, or a refusal."""
        found = self._epochs.get(epoch)
        if found is None:
            self._refuse_again(epoch)
            if epoch not in self._asked:
                if len(self._asked) >= _ASKING:
                    raise Refusal(
                        429, "overload", "Too many epochs are being asked for; ask again later.", retry_after=1
                    )
                self._asked[epoch] = asyncio.create_task(self._ask(epoch))
                self._asked[epoch].add_done_callback(lambda task: self._answered(epoch, task))
            found = await asyncio.shield(self._asked[epoch])
        if not found.open or epoch in self._writer.closed or self._clock() >= found.closes:
            raise _closed()
        return found

    def _answered(self, epoch: bytes, task: asyncio.Task[Epoch]) -> None:
        del self._asked[epoch]
        if not task.cancelled():
            task.exception()  # whoever asked may be gone

    def _refuse_again(self, epoch: bytes) -> None:
        until, status = self._no.get(epoch, (0.0, 0))
        if time.monotonic() < until:
            raise _closed() if status == 410 else _unknown()

    async def _ask(self, epoch: bytes) -> Epoch:
        hop = self._connect()
        try:
            facts = await asyncio.to_thread(hop.epoch, epoch)
        except (Unknown, Closed) as error:
            if len(self._no) >= _MOST_REMEMBERED:
                self._no.clear()
            status = 410 if isinstance(error, Closed) else 404
            self._no[epoch] = (time.monotonic() + _REMEMBERED, status)
            raise _closed() if status == 410 else _unknown() from None
        except Unreachable as error:
            if str(error) != self._trouble:
                log("cannot ask the next hop", why=str(error))
            self._trouble = str(error)
            raise Refusal(
                503, "next hop away", "The next hop cannot be asked about this epoch now.", retry_after=5
            ) from None
        finally:
            hop.close()
        self._trouble = ""
        found: Epoch = await self._writer.call(lambda store: store.open_epoch(epoch, facts, self._clock()))
        self._epochs[epoch] = found
        log("epoch opened", epoch=epoch.hex(), closes=found.closes)
        return found


def _closed() -> Refusal:
    return Refusal(410, "epoch closed", "This epoch is closed: nothing is taken for it any more.")


def _unknown() -> Refusal:
    return Refusal(404, "unknown epoch", "The server knows no such epoch.")
