"""The process that takes in reports: it opens what proxies pass on, and adds it up.

Only registered proxies may send; every report is opened by itself with the key of its epoch, and what cannot be opened
or names no entry is counted and dropped. An answer is given once the batch is on the disk. Nothing here knows a sender.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from homebody.database import connect
from homebody.deploy.epochs import Added, Epoch, Epochs, Over
from homebody.deploy.logs import log
from homebody.deploy.places import Place
from homebody.deploy.records import Records
from homebody.errors import HomebodyError, Unavailable
from homebody.runtime.sealed import (
    EPOCH_BYTES,
    HEAD_BYTES,
    REPORT_BYTES,
    SIGNATURE_BYTES,
    BadEnvelope,
    open_envelope,
    unseal_reports,
)

__all__ = ["MOST_REPORTS", "Intake", "main"]

MOST_REPORTS = 1 << 16
"""Of one batch."""
MOST_BYTES = HEAD_BYTES + MOST_REPORTS * REPORT_BYTES + SIGNATURE_BYTES
MOST_AT_ONCE = 16
"""Batches that are read or opened at one time; whoever comes then is told to come back."""
SLICE = 256
"""Reports that one thread opens before another may."""
READ_SECONDS = 30.0
"""For a batch to arrive."""
TELL_SECONDS = 1.0
"""Between two writings of what was refused unread."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Refused(Exception):
    """A request that is not as it should be: the status, the sentence, and what it is counted as."""

    def __init__(self, status: int, sentence: str, reason: str, **more: Any) -> None:
        super().__init__(sentence)
        self.status, self.reason, self.more = status, reason, more


class Intake:
    """The application. Its work is done in threads: sealed boxes are opened outside of the interpreter's lock."""

    def __init__(self, epochs: Epochs, threads: int | None = None) -> None:
        self._epochs, self._records = epochs, epochs.records
        self._openers = ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="opener")
        self._handlers = ThreadPoolExecutor(4, thread_name_prefix="handler")
        self._refused: Counter[str] = Counter()
        self._lock, self._busy = threading.Lock(), 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        more: dict[str, str] = {}
        try:
            status, said = await self._answer(scope, receive)
        except Refused as refusal:
            status, said = refusal.status, {"error": str(refusal), **refusal.more}
            self._count(refusal.reason)
            if status in (429, 503):
                more["retry-after"] = "1"
        body = json.dumps(said).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **more}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Message, receive: Receive) -> tuple[int, dict[str, Any]]:
        method, path = scope["method"], scope["path"]
        if method == "GET" and path == "/health":
            return 200, {"status": "ok"}
        if method == "GET" and path.startswith("/v1/epochs/"):
            return await self._threaded(self._epoch, path.removeprefix("/v1/epochs/"))
        if path == "/v1/batches":
            if method != "POST":
                raise Refused(405, "Batches are posted.", "another method")
            if self._busy >= MOST_AT_ONCE:
                raise Refused(429, "Too many batches come at once: send this one again later.", "too many at once")
            self._busy += 1
            try:
                return await self._threaded(self._batch, await self._read(scope, receive))
            finally:
                self._busy -= 1
        raise Refused(404, "There are /v1/batches, /v1/epochs/… and /health here.", "another path")

    async def _threaded(self, work: Callable[..., Any], *given: Any) -> Any:
        """In a thread: the database may have to be waited for. Where it is away, the proxy comes back."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._handlers, work, *given)
        except Unavailable as error:
            log("unavailable", reason=str(error))
            raise Refused(503, "The server cannot write this down now: send it again later.", "unavailable") from error

    async def _read(self, scope: Message, receive: Receive) -> bytes:
        """The body; of a stranger, and of what is too long, no more than its beginning."""
        sizes = [value for name, value in scope["headers"] if name == b"content-length"]
        if any(not size.isdigit() or int(size) > MOST_BYTES for size in sizes):
            raise Refused(413, f"A batch has at most {MOST_REPORTS:,} reports.", "oversized")
        body, known = bytearray(), False
        try:
            async with asyncio.timeout(READ_SECONDS):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "The batch ends before its end.", "malformed")
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > MOST_BYTES:
                        raise Refused(413, f"A batch has at most {MOST_REPORTS:,} reports.", "oversized")
                    if not known and more and len(body) >= HEAD_BYTES:
                        await self._threaded(self._admit, bytes(body[HEAD_BYTES - 32 : HEAD_BYTES]))
                        known = True
        except TimeoutError as error:
            raise Refused(408, f"The batch did not arrive within {READ_SECONDS:g} s.", "too slow") from error
        return bytes(body)

    def _admit(self, sender: bytes) -> None:
        if sender not in {one.public_key for one in self._records.proxies() if not one.removed}:
            raise Refused(401, "Only registered proxies send batches: `homebody keys add` registers.", "unknown proxy")

    def _epoch(self, text: str) -> tuple[int, dict[str, Any]]:
        try:
            identity = bytes.fromhex(text) if len(text) == 2 * EPOCH_BYTES else b""
        except ValueError:
            identity = b""
        epoch = self._known(identity)
        if not self._epochs.takes(epoch):
            raise Refused(410, "The epoch is closed.", "closed epoch")
        return 200, epoch.told()

    def _known(self, identity: bytes) -> Epoch:
        epoch = self._epochs.find(identity) if identity else None
        if epoch is None:
            raise Refused(404, "There is no such epoch.", "unknown epoch")
        return epoch

    def _batch(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Check, open, write down."""
        try:
            sender, batch = open_envelope(body)
        except BadEnvelope as error:
            if "signature" in str(error):
                raise Refused(401, str(error), "bad signature") from error
            raise Refused(400, str(error), "malformed") from error
        self._admit(sender)
        if batch.kind != "batch":
            raise Refused(422, "Devices report to a proxy, not to the server.", "wrong kind")
        if not batch.size:
            raise Refused(400, "The batch is empty.", "malformed")
        epoch = self._known(batch.epoch)
        before = self._epochs.repeated(batch.epoch, batch.number)
        if before is not None:
            self._records.count("batches_repeated")
            return _told(before)
        secret = self._epochs.secret(epoch)
        if secret is None or not self._epochs.takes(epoch):
            raise Refused(410, "The epoch is closed.", "closed epoch")
        pairs = self._opened(batch.reports, epoch.public, secret)
        unreadable = pairs == 2**32 - 1
        usable = pairs < 2 * epoch.entries
        reasons = {"unreadable": int(unreadable.sum()), "out of range": int((~usable & ~unreadable).sum())}
        try:
            refused = {reason: count for reason, count in reasons.items() if count}
            return _told(self._epochs.add(batch.epoch, batch.number, pairs[usable], refused))
        except Over as error:
            raise Refused(410, "The epoch is closed.", "closed epoch") from error

    def _opened(self, reports: bytes, public: bytes, secret: bytes) -> np.ndarray[Any, np.dtype[np.uint32]]:
        step = SLICE * REPORT_BYTES
        slices = [reports[at : at + step] for at in range(0, len(reports), step)]
        return np.concatenate(list(self._openers.map(lambda one: unseal_reports(one, public, secret), slices)))

    def _count(self, reason: str) -> None:
        with self._lock:
            self._refused[f"batches_refused: {reason}"] += 1

    def tell(self) -> None:
        """Write down what was refused since: not at once, for strangers could keep the database busy with it."""
        with self._lock:
            refused, self._refused = self._refused, Counter()
        try:
            for name, count in refused.items():
                self._records.count(name, count)
                refused[name] = 0
        except HomebodyError:
            with self._lock:
                self._refused.update(refused)

    def close(self) -> None:
        self._handlers.shutdown()
        self._openers.shutdown()
        self.tell()


def _told(added: Added) -> tuple[int, dict[str, Any]]:
    said = {"accepted": added.accepted, "refused": added.refused}
    if not added.accepted:
        return 422, {**said, "error": "None of the batch's reports could be used."}
    return 200, said


def _serve(folder: Path, follow_parent: bool) -> None:
    place = Place.read(folder)
    try:
        import uvicorn
    except ImportError as error:
        raise HomebodyError("Taking in reports needs the extra: pip install 'homebody[deploy]'.") from error

    listening = place.listen()
    epochs = Epochs(Records(connect(place.database, what="server's database")), folder)
    intake = Intake(epochs)
    server = uvicorn.Server(
        uvicorn.Config(
            intake,
            ssl_certfile=folder / "keys" / "server.pem" if place.tls else None,
            ssl_keyfile=folder / "keys" / "server.key" if place.tls else None,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
        )
    )
    done = threading.Event()

    def tell() -> None:
        while not done.wait(TELL_SECONDS):
            intake.tell()

    def follow() -> None:
        while os.read(0, 4096):
            pass
        server.should_exit = True

    threading.Thread(target=tell, daemon=True).start()
    if follow_parent:
        threading.Thread(target=follow, daemon=True).start()
    with listening:
        server.run(sockets=[listening])
    done.set()
    intake.close()


def main(given: list[str] | None = None) -> None:
    """The process. Exit code 2: something a person must put right; anything else: start it again."""
    parser = argparse.ArgumentParser("homebody.deploy.intake", description="Take in reports from proxies.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--follow-parent", action="store_true", help="End when standard input does.")
    asked = parser.parse_args(given)
    os.umask(0o077)
    try:
        _serve(asked.folder, asked.follow_parent)
    except Unavailable as error:
        log("intake interrupted", reason=str(error))
        sys.exit(75)
    except HomebodyError as error:
        sys.stderr.write(f"homebody: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
