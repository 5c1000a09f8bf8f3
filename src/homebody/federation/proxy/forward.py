"""The next hop: asking it about epochs, and sending it batches until it has them."""

from __future__ import annotations

import heapq
import http.client
import itertools
import json
import os
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from homebody.errors import HomebodyError
from homebody.federation.envelopes import Envelope, sign_envelope
from homebody.federation.epoch import Epoch
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import SealedBatch
from homebody.federation.service.logs import Trouble, log

__all__ = ["CLOSED", "EpochRefused", "Forwarder", "NextHop", "Unreachable"]

CLOSED = "closed by the next hop"
"""The outcome of a batch whose epoch the next hop has closed."""
SENDERS = 2
_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 60.0
_LARGEST_ANSWER = 64 << 10
_LONGEST_EPOCH = 8 * 86_400.0
"""Seconds from now to an epoch's end, at most: until then a proxy keeps who sent how much."""


class EpochRefused(Exception):
    """The next hop knows no such epoch (404), or has closed it (410)."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


class Unreachable(Exception):
    """The next hop does not answer, or its answer makes no sense."""


class NextHop:
    """A connection to the next hop; one thread uses it at a time."""

    def __init__(self, settings: ProxySettings, folder: Path, secret: bytes) -> None:
        self._parts, self._secret = urlsplit(settings.next), secret
        self._connection: http.client.HTTPConnection | None = None
        self._context = None
        if self._parts.scheme == "https":
            try:
                ca = folder / "next-ca.pem" if settings.next_ca else None
                self._context = ssl.create_default_context(cafile=ca)
            except (OSError, ssl.SSLError) as error:
                raise HomebodyError(f"The next hop's authority {ca} cannot be used: {error}.") from error

    def epoch(self, epoch: bytes) -> Epoch:
        """Its description of an epoch, checked: devices rely on it."""
        status, said = self._ask("GET", f"/v1/epochs/{epoch.hex()}")
        if status in (404, 410):
            raise EpochRefused(status)
        if status != 200:
            raise Unreachable(f"it answered {status}")
        try:
            described = Epoch.read(json.loads(said))
        except (ValueError, RecursionError):
            described = None
        if described is None or described.id != epoch:
            raise Unreachable("it described the epoch in a way that is not known here")
        if described.closes > time.time() + _LONGEST_EPOCH:
            raise Unreachable(f"it described an epoch that closes more than {_LONGEST_EPOCH / 86_400:g} days from now")
        return described

    def send(self, batch: SealedBatch) -> int:
        """The status that it answers a batch with."""
        envelope = Envelope("batch", batch.epoch, batch.number, batch.reports, len(batch.reports) // batch.size)
        body = sign_envelope(envelope, self._secret)
        return self._ask("POST", "/v1/batches", body)[0]

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        for fresh in (self._connection is None, True):
            try:
                return self._asked(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # A connection that was kept open may have been closed over there; a repetition is known as one.
                if fresh or isinstance(error, TimeoutError):
                    raise Unreachable(getattr(error, "strerror", None) or type(error).__name__) from error
        raise AssertionError

    def _asked(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        if self._connection is None:
            where = (self._parts.hostname or "", self._parts.port)
            self._connection = (
                http.client.HTTPSConnection(*where, timeout=_SECONDS, context=self._context)
                if self._context
                else http.client.HTTPConnection(*where, timeout=_SECONDS)
            )
        headers = {"content-type": "application/octet-stream"} if body is not None else {}
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        said = response.read(_LARGEST_ANSWER)
        if response.will_close or not response.isclosed():
            self.close()
        return response.status, said


class Forwarder:
    """Threads that send each batch until the next hop answers 2xx, 410 or 422. Anything else is tried again for ever,
    after a pause that grows with each failure."""

    def __init__(self, connect: Callable[[], NextHop], done: Callable[[SealedBatch, str], None]) -> None:
        self._connect, self._done = connect, done
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, SealedBatch, float]] = []
        self._numbers = itertools.count()
        self._stopping = False
        self._trouble = Trouble("cannot forward", "forwarding again")
        self._threads = [threading.Thread(target=self._run, name="forward", daemon=True) for _ in range(SENDERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, seconds: float = 5.0) -> None:
        """Stop sending. A batch in progress gets a little time; otherwise it is sent again at the next start."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def put(self, batch: SealedBatch, wait: float = 0.0, pause: float = _FIRST_PAUSE) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + wait, next(self._numbers), batch, pause))
            self._changed.notify()

    def _run(self) -> None:
        hop = self._connect()
        while (taken := self._next()) is not None:
            batch, pause = taken
            try:
                status = hop.send(batch)
                why = f"it answered {status}"
            except Unreachable as error:
                status, why = 0, str(error)
            if 200 <= status < 300:
                self._trouble.say("")
                self._done(batch, "forwarded")
            elif status == 410:
                self._done(batch, CLOSED)
            elif status == 422:
                log("batch refused", status=status, reports=batch.size)
                self._done(batch, "refused by the next hop")
            else:
                self._trouble.say(why)
                # Not all at the same moment.
                self.put(batch, pause * (0.5 + os.urandom(1)[0] / 512), min(2 * pause, _LONGEST_PAUSE))
        hop.close()

    def _next(self) -> tuple[SealedBatch, float] | None:
        with self._changed:
            while not self._stopping:
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is not None and wait <= 0:
                    _, _, batch, pause = heapq.heappop(self._due)
                    return batch, pause
                self._changed.wait(wait)
            return None
