"""Queries that wait for a pass of the ranking."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from homebody.federation.service import web
from homebody.serving.stock import Stock

__all__ = ["Waiting"]

_MOST_WAITING = 2048
"""More are refused."""
_AT_ONCE = 64
"""Queries of a pass, at most."""


class Waiting:
    """Queries that wait for a pass over all items; those that wait when one begins are answered by it together."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "rank")
        self._queue: list[tuple[Stock, npt.NDArray[np.float32], int, asyncio.Future[Any]]] = []
        self._running: asyncio.Task[None] | None = None
        self.counted: Counter[str] = Counter()

    async def best(self, stock: Stock, told: npt.NDArray[np.float32], k: int) -> Any:
        """The best items and their scores."""
        if len(self._queue) >= _MOST_WAITING:
            raise web.Refusal(429, "overload", "The service is overloaded; send it again later.", retry_after=1)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._queue.append((stock, told, k, future))
        if self._running is None:
            self._running = loop.create_task(self._run())
        return await future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            stock, _, k, _ = self._queue[0]
            taken = [entry for entry in self._queue if entry[0] is stock and entry[2] == k][:_AT_ONCE]
            chosen = set(map(id, taken))
            self._queue = [entry for entry in self._queue if id(entry) not in chosen]
            told = torch.from_numpy(np.stack([entry[1] for entry in taken]))
            try:
                ranked = await loop.run_in_executor(self._pool, stock.best, told, k)
                for (*_, future), items, scores in zip(taken, ranked.items, ranked.scores, strict=True):
                    if not future.done():
                        future.set_result((items, scores))
            except Exception as error:
                for *_, future in taken:
                    if not future.done():
                        future.set_exception(error)
            self.counted["passes"] += 1
        self._running = None

    def close(self) -> None:
        self._pool.shutdown()
