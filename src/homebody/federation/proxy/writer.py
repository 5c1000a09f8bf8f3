"""The thread that writes: it commits many messages at once, and answers `accepted` once they are on the disk."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from homebody.errors import HomebodyError
from homebody.federation.proxy.forward import CLOSED
from homebody.federation.proxy.store import DATABASE, ProxyStore, SealedBatch, Sender, Ticked, VerifiedMessage
from homebody.federation.service.logs import log

__all__ = ["Writer"]

GROUP = 8192
"""Reports in one commit, at most."""
TICK = 0.25
"""Seconds between two ticks of the store."""
CHECKPOINT = 1.0
"""Seconds after which the write-ahead log is brought into the tables."""

Call = Callable[[ProxyStore], Any]


class Writer:
    """Owns the store while it runs; other threads ask it."""

    def __init__(
        self,
        folder: Path,
        store: ProxyStore,
        forward: Callable[[SealedBatch], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._store, self._forward, self._clock = folder / DATABASE, store, forward, clock
        self._changed = threading.Condition()
        self._messages: deque[tuple[VerifiedMessage, asyncio.Future[str]]] = deque()
        self._calls: deque[tuple[Call, asyncio.Future[Any]]] = deque()
        self._done: deque[tuple[SealedBatch, str]] = deque()
        self._counted: Counter[str] = Counter()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._checkpoints = threading.Thread(target=self._checkpoint_by_and_by, name="checkpoints", daemon=True)
        self._written, self._ended = threading.Event(), threading.Event()
        self._nearly = False
        self._ticked = self._swept = self._wrote = 0.0
        self._clean, self._more, self._sweeping = False, True, False
        self._log_due: float | None = None
        """When to empty the log, if an epoch has closed, or what is left of one was swept away."""
        self._seen = -1
        self.senders: dict[bytes, Sender] = {}
        self.servers: set[bytes] = set()
        """The marks of servers that may have secure sums opened."""
        self.closed: set[bytes] = set()
        """Epochs that closed while it ran."""
        self.failing = ""
        """Why nothing can be written now; empty if writing works."""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for batch in self._store.under_way():
            self._forward(batch)
        self._look_for_senders()
        self._store.tidy_secrets()
        self._thread.start()
        self._checkpoints.start()

    def stop(self) -> None:
        """Write what has arrived, and close the store."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._ended.set()
        self._thread.join()

    async def put(self, message: VerifiedMessage) -> str:
        """The outcome of a message, once it is on the disk; see `ProxyStore.accept`."""
        outcome: str = await self._queued(self._messages, message)
        return outcome

    async def call(self, call: Call) -> Any:
        """The result of a function of the store, once its changes are on the disk."""
        return await self._queued(self._calls, call)

    async def _queued(self, queue: deque[Any], what: Any) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        with self._changed:
            queue.append((what, future))
            self._changed.notify()
        return await future

    def done(self, batch: SealedBatch, outcome: str) -> None:
        """Note the final answer of the next hop."""
        with self._changed:
            self._done.append((batch, outcome))
            self._changed.notify()

    def count(self, name: str) -> None:
        """Count something that leaves no other trace."""
        with self._changed:
            self._counted[name] += 1

    def _run(self) -> None:
        while True:
            messages, calls, done = self._taken()
            if self._stopping and not (messages or calls or done):
                break
            try:
                self._commit(messages, calls, done)
                self._tidy()
                self.failing = ""
            except Exception as error:  # whatever it is, nobody was told `accepted`, and the next may go well
                self._fail(error, messages, calls, done)
        self._end()

    def _taken(self) -> tuple[list[Any], list[Any], list[Any]]:
        with self._changed:
            if not (self._messages or self._calls or self._done or self._stopping or self._more):
                self._changed.wait(TICK)
            messages: list[tuple[VerifiedMessage, asyncio.Future[str]]] = []
            size = 0
            while self._messages and (not messages or size + self._messages[0][0].envelope.size <= GROUP):
                messages.append(self._messages.popleft())
                size += messages[-1][0].envelope.size
            calls, done = list(self._calls), list(self._done)
            self._calls.clear()
            self._done.clear()
            return messages, calls, done

    def _commit(self, messages: list[Any], calls: list[Any], done: list[Any]) -> None:
        store, now = self._store, self._clock()
        ticking = time.monotonic() - self._ticked >= TICK
        ticked, counted, ended = Ticked([], {}, {}), Counter[str](), list[bytes]()
        with store.transaction():
            outcomes = store.accept([message for message, _ in messages], now)
            results = [call(store) for call, _ in calls]
            for batch, outcome in done:
                store.finish(batch, outcome)
                if outcome == CLOSED:
                    dropped = store.end_epoch(batch.epoch, outcome)  # nothing more, where another batch came before
                    ticked.closed[batch.epoch] = ticked.closed.get(batch.epoch, 0) + dropped
                    ticked.why[batch.epoch] = outcome
            if ticking:
                more, ended = store.tick(now), store.sums.tick(now)
                ticked = Ticked(more.released, {**ticked.closed, **more.closed}, {**ticked.why, **more.why})
                with self._changed:
                    counted = self._counted.copy()
            for name, amount in (counted + _sums(messages, outcomes)).items():
                store.count(name, amount)
            cut = self._cut(sum(message.envelope.size for message, _ in messages))
        with self._changed:
            self._counted -= counted
        self._more = bool(cut)
        for batch in cut:
            self._forward(batch)
        self._say(ticked)
        for epoch in ended:
            log("sum closed", epoch=epoch.hex())
        if messages or calls or done or cut or ticked.closed or counted or ended:
            self._wrote, self._clean = time.monotonic(), False
            self._written.set()
        if ticked.closed:
            self._log_due = 0.0
        self._tell([future for _, future in messages], outcomes)
        self._tell([future for _, future in calls], results)
        if ticking:
            self._ticked = time.monotonic()
            self._look_for_senders()

    def _cut(self, came: int) -> list[SealedBatch]:
        """Cut batches of released reports: at least one, and as many reports as arrived, so that no backlog grows."""
        cut: list[SealedBatch] = []
        while (not cut or sum(batch.size for batch in cut) < came) and (batch := self._store.cut()) is not None:
            cut.append(batch)
        return cut

    def _say(self, ticked: Ticked) -> None:
        for reports in ticked.released:
            log("released", reports=reports)
        for epoch, dropped in ticked.closed.items():
            if epoch not in self.closed:
                why = {"why": ticked.why[epoch]} if dropped else {}
                log("epoch closed", epoch=epoch.hex(), dropped=dropped, **why)
            self.closed.add(epoch)

    def _tell(self, futures: list[asyncio.Future[Any]], results: list[Any]) -> None:
        def tell() -> None:
            for future, result in zip(futures, results, strict=True):
                if not future.done():  # its request was given up
                    if isinstance(result, Exception):
                        future.set_exception(result)
                    else:
                        future.set_result(result)

        if futures:
            self._loop.call_soon_threadsafe(tell)

    def _fail(self, error: Exception, messages: list[Any], calls: list[Any], done: list[Any]) -> None:
        sentence = str(error) if isinstance(error, HomebodyError) else type(error).__name__
        if sentence != self.failing:
            log("cannot write", why=sentence)
        self.failing = sentence
        with self._changed:
            self._done.extendleft(reversed(done))
        self._tell([future for _, future in (*messages, *calls)], [error] * (len(messages) + len(calls)))
        time.sleep(0.1)

    def _look_for_senders(self) -> None:
        seen = self._store.changed_elsewhere()
        if seen != self._seen:
            self.senders, self.servers, self._seen = self._store.senders(), self._store.sums.servers(), seen

    def _tidy(self) -> None:
        """A little of the work that can wait, between two commits."""
        if self._nearly:
            self._nearly = False
            # What little was written since the other thread began; now the log starts from its beginning again.
            self._store.checkpoint("PASSIVE")
        if self._log_due is not None and time.monotonic() >= self._log_due:
            # However much there is to do: it tells what of a closed epoch was written together.
            emptied = self._store.checkpoint("TRUNCATE")
            self._log_due = None if emptied else time.monotonic() + CHECKPOINT
        if (self._messages or self._more) and time.monotonic() - self._swept < CHECKPOINT:
            return
        if time.monotonic() - self._swept > TICK or self._sweeping:
            before = self._sweeping
            with self._store.transaction():
                self._sweeping = self._store.sweep()
            if before and not self._sweeping:
                self._log_due = 0.0  # what is swept away stands in it, too
            self._swept = time.monotonic()
            self._clean = self._clean and not self._sweeping
        if not self._clean and time.monotonic() - self._wrote > CHECKPOINT:
            self._clean = self._store.checkpoint("TRUNCATE")

    def _checkpoint_by_and_by(self) -> None:
        """Checkpoint the write-ahead log, beside the thread that writes."""
        db, trouble = None, ""
        while not self._ended.wait(CHECKPOINT):
            if not self._written.is_set():
                continue
            self._written.clear()
            try:
                if db is None:
                    db = sqlite3.connect(self._path, timeout=30, isolation_level=None)
                    db.execute("PRAGMA synchronous = FULL")
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                self._nearly, trouble = True, ""
            except sqlite3.Error as error:
                if str(error) != trouble:
                    log("cannot checkpoint", why=str(error))
                trouble = str(error)
                self._written.set()  # what was written ahead is still there
                if db is not None:
                    db.close()
                    db = None
        if db is not None:
            db.close()

    def _end(self) -> None:
        try:
            with self._store.transaction():
                for name, amount in self._counted.items():
                    self._store.count(name, amount)
            self._checkpoints.join()
            self._store.checkpoint("TRUNCATE")
        except Exception as error:
            log("cannot write", why=str(error) if isinstance(error, HomebodyError) else type(error).__name__)
        self._store.close()


def _sums(messages: list[tuple[VerifiedMessage, Any]], outcomes: list[str]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for (message, _), outcome in zip(messages, outcomes, strict=True):
        if outcome == "accepted":
            sums["accepted_reports"] += message.envelope.size
            sums["accepted_messages" if not message.sender.proxy else "accepted_batches"] += 1
        elif outcome == "repeated":
            sums["repeated_messages" if not message.sender.proxy else "repeated_batches"] += 1
    return sums
