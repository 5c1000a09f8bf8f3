"""The process that receives reports from proxies, opens them and adds them up.

Only registered proxies may send. Each report is opened with the key of its epoch; reports that cannot be opened or name
no entry are counted and dropped. A batch is answered once it is on the disk. No sender of a report is known here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from homebody.database import connect
from homebody.errors import HomebodyError, Unavailable
from homebody.federation.envelopes import (
    EPOCH_BYTES,
    REPORT_BYTES,
    envelope_bytes,
    named_sender,
    unseal_contents,
    unseal_reports,
)
from homebody.federation.epoch import BIT_BYTES, SEAL_BYTES
from homebody.federation.server.epochs import Added, EpochRecord, Epochs, Over
from homebody.federation.server.monitor import counters
from homebody.federation.server.plan import FILE, database_in
from homebody.federation.server.records import Records
from homebody.federation.service import web
from homebody.federation.service.logs import follow_parent, log

__all__ = ["MOST_REPORTS", "Intake", "main"]

MOST_REPORTS = 1 << 16
"""The most reports of one batch."""
MOST_BYTES = envelope_bytes(MOST_REPORTS)
ROOM = 1 << 26
"""Bytes that all batches may hold at one time."""
SLICE = 256
"""Reports that one thread opens before another may."""
TELL_SECONDS = 1.0
"""Between two writes of the counts of refused requests."""
_UNREADABLE = 2**32 - 1


class Intake:
    """The endpoints. Threads do the work: sealed boxes are opened outside of the interpreter's lock."""

    def __init__(self, epochs: Epochs, threads: int | None = None) -> None:
        self._epochs, self._records = epochs, epochs.records
        self._openers = ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="opener")
        self._handlers = ThreadPoolExecutor(4, thread_name_prefix="handler")
        self._refused: Counter[str] = Counter()
        self._lock, self._room = threading.Lock(), web.RequestMemory(ROOM)

    def app(self) -> web.Starlette:
        routes = [
            web.Route("/v1/batches", self._batches, methods=["POST"]),
            web.Route("/v1/epochs/{epoch}", self._epochs_of, methods=["GET"]),
            web.Route("/health", self._health, methods=["GET"]),
            web.Route("/metrics", self._metrics, methods=["GET"]),
        ]
        return web.refusals(web.Starlette(routes=routes, lifespan=self._living), self.count)

    @asynccontextmanager
    async def _living(self, app: web.Starlette) -> AsyncIterator[None]:
        async def telling() -> None:
            while True:
                await asyncio.sleep(TELL_SECONDS)
                await self._threaded(self.tell)

        task = asyncio.create_task(telling())
        yield
        task.cancel()
        self._handlers.shutdown()
        self._openers.shutdown()
        self.tell()

    async def _batches(self, request: web.Request) -> web.Response:
        size = web.declared(request, MOST_BYTES)
        with self._room.holding() as share:
            body = await web.read_body(request, size, share)
            answered: web.Response = await self._threaded(self.take, body)
            web.proved(request, named_sender(body))
            return answered

    async def _epochs_of(self, request: web.Request) -> web.Response:
        return await self._threaded(self._epoch, request.path_params["epoch"])

    async def _health(self, request: web.Request) -> web.Response:
        return web.answer(200, {"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        web.only_from_here(request)
        return await self._threaded(lambda: web.PlainTextResponse(counters(self._records)))

    async def _threaded(self, work: Callable[..., Any], *given: Any) -> Any:
        """Work in a thread, since it may wait for the database. If that is away, the proxy is asked to come back."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._handlers, work, *given)
        except Unavailable as error:
            log("unavailable", reason=str(error))
            raise web.Refusal(
                503, "unavailable", "The server cannot write this down now; send it again later.", retry_after=1
            ) from error

    def _epoch(self, text: str) -> web.Response:
        epoch = self._known(bytes.fromhex(text) if re.fullmatch("[0-9a-fA-F]{32}", text) else b"")
        if not self._epochs.takes(epoch):
            raise _closed()
        return web.answer(200, epoch.to_json())

    def _known(self, identity: bytes) -> EpochRecord:
        epoch = self._epochs.find(identity) if len(identity) == EPOCH_BYTES else None
        if epoch is None:
            raise web.Refusal(404, "unknown epoch", "There is no such epoch.")
        return epoch

    def take(self, body: bytes) -> web.Response:
        """Check a batch, open its reports, and store them."""
        sender, batch = web.opened_envelope(body)
        if sender not in {proxy.public_key for proxy in self._records.proxies()}:
            raise web.Refusal(401, "unknown proxy", "The server does not know this proxy: register it with --proxy.")
        if batch.kind != "batch":
            raise web.Refusal(422, "wrong kind", "Devices report to a proxy, not to the server.")
        if not batch.size:
            raise web.Refusal(400, "malformed", "The batch is empty.")
        epoch = self._known(batch.epoch)
        before = self._epochs.repeated(batch.epoch, batch.number)
        if before is not None:
            self._records.count("batches_repeated")
            return _outcome(before)
        secret = self._epochs.secret(epoch)
        if secret is None:
            raise _closed()
        if batch.each != epoch.size + SEAL_BYTES:
            raise web.Refusal(422, "wrong size", "The epoch's reports are of another length.")
        again = ~_first(batch.reports, batch.each)
        if epoch.size == BIT_BYTES:
            pairs: npt.NDArray[Any] = self._opened(batch.reports, epoch.key, secret)
            unreadable, inside = pairs == _UNREADABLE, pairs < 2 * epoch.entries
        else:
            contents = self._contents(batch.reports, batch.each, epoch.key, secret)
            unreadable = np.array([content is None for content in contents])
            pairs, inside = np.array([content or b"" for content in contents], dtype=f"V{epoch.size}"), ~unreadable
        usable = inside & ~again
        reasons = {
            "copied": int(again.sum()),
            "unreadable": int((unreadable & ~again).sum()),
            "out of range": int((~inside & ~unreadable & ~again).sum()),
        }
        refused = {reason: count for reason, count in reasons.items() if count}
        try:
            return _outcome(self._epochs.add(batch.epoch, batch.number, pairs[usable], refused))
        except Over as error:
            raise _closed() from error

    def _contents(self, reports: bytes, each: int, public: bytes, secret: bytes) -> list[bytes | None]:
        step = SLICE * each
        slices = [reports[at : at + step] for at in range(0, len(reports), step)]
        opened = self._openers.map(lambda part: unseal_contents(part, each, public, secret), slices)
        return [content for part in opened for content in part]

    def _opened(self, reports: bytes, public: bytes, secret: bytes) -> npt.NDArray[np.uint32]:
        step = SLICE * REPORT_BYTES
        slices = [reports[at : at + step] for at in range(0, len(reports), step)]
        return np.concatenate(list(self._openers.map(lambda part: unseal_reports(part, public, secret), slices)))

    def count(self, reason: str) -> None:
        """A request that was refused."""
        with self._lock:
            self._refused[f"intake_refused: {reason}"] += 1

    def end(self) -> None:
        """End with the supervisor, at once: a batch that was not answered is sent again."""
        self.tell()
        os._exit(0)

    def tell(self) -> None:
        """Store the counts of refused requests; not at each one, since strangers could keep the database busy."""
        with self._lock:
            refused, self._refused = self._refused, Counter()
        try:
            for name in list(refused):
                self._records.count(name, refused[name])
                del refused[name]
        except HomebodyError:
            with self._lock:
                self._refused.update(refused)


def _first(reports: bytes, each: int = REPORT_BYTES) -> npt.NDArray[np.bool_]:
    """Which sealed reports are the first of their bytes in a batch: no two are sealed alike, so a copy is a proxy's."""
    rows = np.frombuffer(reports, dtype=np.dtype((np.void, each)))
    first = np.zeros(len(rows), dtype=np.bool_)
    first[np.unique(rows, return_index=True)[1]] = True
    return first


def _closed() -> web.Refusal:
    return web.Refusal(410, "closed epoch", "The epoch is closed.")


def _outcome(added: Added) -> web.Response:
    said = {"accepted": added.accepted, "refused": added.refused}
    if not added.accepted:
        return web.answer(422, {**said, "error": "None of the batch's reports could be used."})
    return web.answer(200, said)


def _plan_in(folder: Path) -> dict[str, Any]:
    """The plan, which was checked when the server was started: what it says for the next start is not looked at."""
    try:
        plan = tomllib.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HomebodyError(f"The server's plan {folder / FILE} cannot be read: {error}.") from error
    if not str(plan.get("reports", "")).rpartition(":")[0]:
        raise HomebodyError(f"The server in {folder} takes in no reports: its plan names no address for them.")
    return plan


def _elsewhere(folder: Path) -> str:
    """What to do where the address is taken."""
    from homebody.federation.server.plan import ServerPlan

    return ServerPlan.elsewhere(folder, "reports")


def main(given: list[str] | None = None) -> None:
    """The process. Exit code 2: something a person must put right; anything else: start it again."""
    parser = argparse.ArgumentParser("homebody.federation.server.intake", description="Take in reports from proxies.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--follow-parent", action="store_true", help="End when standard input does.")
    asked = parser.parse_args(given)
    os.umask(0o077)
    try:
        plan = _plan_in(asked.folder)
        host, _, port = str(plan["reports"]).rpartition(":")
        listening = web.listen(host.strip("[]"), int(port), _elsewhere(asked.folder))
        records = Records(connect(database_in(asked.folder, plan["database"]), what="server's database"))
        intake = Intake(Epochs(records, asked.folder))
        if asked.follow_parent:
            follow_parent(intake.end)
        web.serve(intake.app(), listening, asked.folder / "keys" if plan.get("tls", True) else None, intake.count)
    except Unavailable as error:
        log("intake interrupted", reason=str(error))
        sys.exit(75)
    except HomebodyError as error:
        sys.stderr.write(f"homebody: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
