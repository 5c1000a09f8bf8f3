"""A service's process: its endpoints, and the items and models that change beside them.

One thread changes what is served, and one ranks: all queries that wait then, in one pass. Requests read what is there
at the moment; a change makes new answers beside the old ones, and then puts them in their place. Nothing of a query is
kept or logged.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from homebody.errors import HomebodyError, Unavailable
from homebody.federation import wire
from homebody.federation.service import web
from homebody.federation.service.logs import counts, log, samples
from homebody.files import holding
from homebody.serving.additions import Lacking, read_items
from homebody.serving.changes import Taken, add_items, remove_item
from homebody.serving.client import LETTER, told_of
from homebody.serving.live import JSON, KeptAnswer, Live, Loaded, Receive, Scope, Send
from homebody.serving.model_file import Model
from homebody.serving.openapi import ENDPOINTS, TEXT, Endpoint, document, page
from homebody.serving.operator import LOCK
from homebody.serving.settings import ServiceSettings
from homebody.serving.store import ServiceStore, hashed
from homebody.serving.waiting import Waiting

__all__ = ["Service", "run"]

BODY_BYTES = 64 << 10
"""Of a request, at most."""
LARGEST = 1e9
"""The largest number that a query may tell."""
_TABLES = 16
"""Tables since different versions that are kept, at most."""
_LOOK_SECONDS = 0.2
"""Between two looks for changes."""
_FAREWELL = 10.0
"""Seconds for a service that was just killed to end."""
_PRIVATE = "no-store"


class Service:
    """A service's endpoints and its parts, put together; it is an ASGI app, which starts and stops the others."""

    def __init__(self, folder: Path, settings: ServiceSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._store = ServiceStore(folder)
        self.counted: Counter[str] = Counter()
        self.room = web.RequestMemory(settings.queue)
        self._changing = ThreadPoolExecutor(1, "change")
        self._waiting = Waiting()
        self._loaded = Loaded(self._store, settings, clock)
        self._failing = ""
        self._tables: dict[tuple[str, int, int | None], KeptAnswer] = {}
        """Tables that were asked for at the present version: by model, version, and since when."""
        self._pages = {
            "/openapi.json": KeptAnswer((json.dumps(document(settings.tokens)) + "\n").encode(), JSON, "no-cache"),
            "/docs": KeptAnswer(page(settings.tokens).encode(), "text/html; charset=utf-8", "no-cache"),
        }
        self.routes = [web.Route(each.route, self._handler(each), methods=[each.method]) for each in ENDPOINTS]
        self._routed = web.refusals(web.Starlette(routes=self.routes, lifespan=self._life), self.refused)

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what is asked most without a detour; everything else by its route."""
        if scope["type"] == "http":
            if scope["method"] == "GET":
                query = scope["query_string"]
                path = scope["path"] if not query else f"{scope['path']}?{query.decode('latin-1')}"
                kept = self._find(path, scope)
                if kept is not None and self._may(scope, operator=False):
                    self.counted["answered: kept"] += 1
                    await kept(scope, receive, send)
                    return
            elif scope["path"] == "/v1/query" and scope["method"] == "POST" and self._may(scope, operator=False):
                request = web.Request(scope, receive)
                answer: KeptAnswer | web.Response
                try:
                    answer = await self._query(request)
                except web.Refusal as error:
                    answer = await web.refusal(request, error, self.refused)
                except web.Gone:
                    return
                await answer(scope, receive, send)
                return
        await self._routed(scope, receive, send)

    def refused(self, reason: str) -> None:
        self.counted[f"refused: {reason}"] += 1

    def _handler(self, endpoint: Endpoint) -> Callable[[web.Request], Awaitable[Any]]:
        handle = getattr(self, f"_{endpoint.name}")

        async def guarded(request: web.Request) -> Any:
            if not endpoint.open and not self._may(request.scope, operator=endpoint.operator):
                whose = "an operator's token" if endpoint.operator else "a token"
                raise web.Refusal(
                    401,
                    "no token",
                    f"This needs {whose}: send it as Authorization: Bearer TOKEN. One that is unknown or removed is "
                    "refused.",
                )
            return await handle(request)

        return guarded

    def _may(self, scope: Mapping[str, Any], *, operator: bool) -> bool:
        if not operator and not self._settings.tokens:
            return True
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                known = self._loaded.tokens.get(hashed(value[7:].decode("latin-1").strip()))
                return known is not None and (known or not operator)
        return False

    def _find(self, path: str, scope: Scope) -> KeptAnswer | None:
        """What is kept of an answer, as it is accepted."""
        letter = any(name == b"accept" and LETTER.encode() in value for name, value in scope["headers"])
        return self._loaded.find(path, letter)

    # Endpoints that are read

    async def _offer(self, request: web.Request) -> KeptAnswer:
        return self._kept_or_none(request)

    async def _head(self, request: web.Request) -> KeptAnswer:
        self._loaded.of(request.path_params["model"])
        return self._kept_or_none(request)

    async def _shelf(self, request: web.Request) -> KeptAnswer:
        if str(request.url.query) not in ("", "half=1"):
            raise web.Refusal(400, "malformed", "A shelf is asked for as it is, or as ?half=1.")
        return self._kept_or_none(request)

    async def _list(self, request: web.Request) -> KeptAnswer:
        live = self._loaded.of(request.path_params["model"])
        if request.path_params["choice"] not in _choices(live.stock.choices):
            many = f"000 to {live.stock.choices - 1:03d}" if live.stock.choices else "of which there are none here"
            raise web.Refusal(404, "unknown choice", f"Lists are named by three digits, {many}.")
        return self._kept_or_none(request)

    def _kept_or_none(self, request: web.Request) -> KeptAnswer:
        query = request.url.query
        kept = self._find(request.url.path + (f"?{query}" if query else ""), request.scope)
        if kept is None:
            raise web.Refusal(404, "no such request", "There is nothing here by this name.")
        return kept

    async def _table(self, request: web.Request) -> KeptAnswer:
        live, asked = self._loaded.now, request.query_params.get("since")
        if {*request.query_params} - {"since"}:
            raise web.Refusal(400, "malformed", "A table is asked for as it is, or as ?since=VERSION.")
        if asked is not None and not (asked.isascii() and asked.isdecimal() and len(asked) <= 15):
            raise web.Refusal(400, "malformed", "A version of the items is a whole number, as /v1/model gives it.")
        since = None if asked is None else int(asked)
        if since is not None and not live.known.version <= since <= live.answers.version:
            since = None  # it was another model's: nothing that the caller has is of use
        if since is None and live.stock.table_bytes > self._settings.table_bytes:
            size, most = live.stock.table_bytes, self._settings.table_bytes
            raise web.Refusal(
                413, "table too large", f"The table has about {size:,} bytes, and {most:,} are sent: take the shelf."
            )
        return await self._in_thread(self._table_of, live, since)

    def _table_of(self, live: Live, since: int | None) -> KeptAnswer:
        version = live.answers.version
        name = (live.stock.model, version, since)
        if (kept := self._tables.get(name)) is not None:
            return kept
        header, parts = wire.decode_letter(live.stock.whole_part(version, since).content)
        if since is not None:
            header |= {"since": since, "removed": self._store.changes(since).removed}
        kept = self._loaded.keep(wire.encode_letter(header, parts), LETTER, live, f"table-{since}")
        others = {key: table for key, table in self._tables.items() if key[:2] == name[:2]}
        self._tables = {**(others if len(others) < _TABLES else {}), name: kept}
        return kept

    async def _openapi(self, request: web.Request) -> KeptAnswer:
        return self._pages["/openapi.json"]

    async def _docs(self, request: web.Request) -> KeptAnswer:
        return self._pages["/docs"]

    async def _health(self, request: web.Request) -> web.Response:
        if self._failing:
            return web.answer(503, {"status": "failing"}, retry_after="5")
        return web.answer(200, {"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        web.only_from_here(request)
        live = self._loaded.now
        figures = {"items": len(live.stock), "items_version": live.answers.version, "models": len(self._loaded.live)}
        lines = [
            line for name, amount in figures.items() for line in samples(f"serve_{name}", "gauge", name, {"": amount})
        ]
        lines += counts(self.counted, "serve_", lambda _: "Counted since the service was started.")
        lines += counts(self._waiting.counted, "serve_", lambda _: "Counted since the service was started.")
        return web.Response("\n".join(lines) + "\n", headers={"content-type": TEXT})

    # Queries

    async def _query(self, request: web.Request) -> KeptAnswer:
        said, numbers = await self._said(request)
        if not isinstance(said.get("model"), str):
            raise web.Refusal(400, "malformed", "A query names its model, by the digest that /v1/model gives.")
        live = self._loaded.of(said["model"])
        stock, as_rows = live.stock, LETTER in request.headers.get("accept", "")
        if ("query" if as_rows else "server") not in stock.head.ways:
            raise web.Refusal(422, "not ranked here", "Nothing is ranked here: take the table, the shelf or a list.")
        if as_rows and stock.choices:
            raise web.Refusal(422, "not ranked here", "The rows of a choice are a list: take /v1/lists.")
        if stock.choices:
            body = live.answers.ranked[_choice(numbers, stock.choices)]
        elif as_rows:
            items, _ = await self._waiting.best(stock, _told(numbers, stock.told), self._settings.rows)
            body = live.answers.chosen(items)
        else:
            items, scores = await self._waiting.best(stock, _told(numbers, stock.told), self._settings.answers)
            body = live.answers.ranking(items, scores)
        self.counted["answered: query"] += 1
        return KeptAnswer(body, LETTER if as_rows else JSON, _PRIVATE)

    async def _said(self, request: web.Request) -> tuple[Mapping[str, Any], npt.NDArray[Any] | None]:
        """What a query says, and what it tells."""
        body = await self._body(request)
        if request.headers.get("content-type", "").startswith(LETTER):
            try:
                return told_of(body)
            except wire.Malformed as error:
                raise web.Refusal(400, "malformed", str(error)) from None
        said = _json_object(body)
        if strange := set(said) - {"model", "choice", "told"}:
            raise web.Refusal(
                400, "malformed", f"A query has a model, and choice or told, and no '{min(strange)[:40]}'."
            )
        given = said.get("choice", said.get("told"))
        listed: list[Any] = given if isinstance(given, list) else [given]
        kinds = (int,) if "choice" in said else (int, float)
        if ("choice" in said) == ("told" in said) or not all(type(number) in kinds for number in listed):
            raise web.Refusal(400, "malformed", "A query tells a choice, a whole number, or told, a list of numbers.")
        if not all(abs(number) <= LARGEST for number in listed):
            raise web.Refusal(422, "not what is told", f"No number that is told is beyond {LARGEST:,.0f}.")
        return said, np.array(listed, dtype=np.int64 if "choice" in said else np.float64)

    async def _body(self, request: web.Request) -> bytes:
        size = web.declared(request, BODY_BYTES)
        with self.room.holding() as share:
            return await web.read_body(request, size, share)

    # Changes

    async def _add_items(self, request: web.Request) -> web.Response:
        said = _json_object(await self._body(request))
        if set(said) != {"items"}:
            raise web.Refusal(400, "malformed", 'Items come as {"items": [{"id": …}, …]}.')
        try:
            items = read_items(said["items"])
            version = await self._changed(lambda model: add_items(self._store, model, items))
        except Lacking as error:
            raise web.Refusal(422, "cannot be encoded", str(error)) from None
        except Taken as error:
            raise web.Refusal(409, "there already", str(error)) from None
        except Unavailable:
            raise _cannot_write() from None
        except HomebodyError as error:
            raise web.Refusal(400, "malformed", str(error)) from None
        return web.answer(200, {"added": len(items), "version": version})

    async def _remove_item(self, request: web.Request) -> web.Response:
        id_ = request.path_params["id"]
        try:
            version = await self._changed(lambda model: remove_item(self._store, model, id_))
        except Unavailable:
            raise _cannot_write() from None
        except HomebodyError as error:
            raise web.Refusal(404, "no such item", str(error)) from None
        return web.answer(200, {"removed": 1, "version": version})

    async def _changed(self, change: Callable[[Model], int]) -> int:
        """Make a change and bring it into the answers; the version of the items then."""

        def work() -> int:
            version = change(self._loaded.now.stock.source)
            self._loaded.look_again()
            return version

        version: int = await self._in_thread(work)
        return version

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._changing, work, *arguments)

    @asynccontextmanager
    async def _life(self, _: web.Starlette) -> AsyncIterator[None]:
        log("started", items=len(self._loaded.now.stock))
        looking = asyncio.create_task(self._looking())
        yield
        looking.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self.close)
        log("stopped")

    def close(self) -> None:
        self._changing.shutdown()
        self._waiting.close()
        self._store.close()

    async def _looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._in_thread(self._loaded.look)
                why = ""
            except Exception as error:  # what is served stays; it is tried again
                why = str(error) if isinstance(error, HomebodyError) else type(error).__name__
            if why != self._failing:
                log("cannot read changes" if why else "reads changes again", **({"why": why} if why else {}))
                self._failing = why


def _choices(count: int) -> list[str]:
    return [f"{choice:03d}" for choice in range(count)]


def _choice(numbers: npt.NDArray[Any] | None, count: int) -> int:
    if numbers is None or numbers.shape != (1,) or numbers.dtype.kind != "i" or not 0 <= int(numbers[0]) < count:
        raise web.Refusal(
            422, "not what is told", f"This service asks for a choice, a whole number from 0 to {count - 1}."
        )
    return int(numbers[0])


def _told(numbers: npt.NDArray[Any] | None, size: int) -> npt.NDArray[np.float32]:
    if (
        numbers is None
        or numbers.shape != (size,)
        or numbers.dtype.kind != "f"
        or not bool((np.abs(numbers) <= LARGEST).all())  # which a NaN is not
    ):
        raise web.Refusal(422, "not what is told", f"This service asks for told, a list of {size} finite numbers.")
    return numbers.astype(np.float32)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise web.Refusal(400, "malformed", "The body must be a JSON object, with numbers that are finite.")
    return said


def _no_constant(name: str) -> float:
    """JSON knows no NaN and no infinity, whatever Python makes of them."""
    raise ValueError(name)


def _cannot_write() -> web.Refusal:
    return web.Refusal(503, "cannot write", "Nothing can be written here now; send it again later.", retry_after=5)


def run(folder: Path) -> None:
    """Run a service until it is told to stop."""
    settings = ServiceSettings.read(folder)
    alone = holding(folder / LOCK, f"A service runs in {folder} already.", patience=_FAREWELL)
    with alone, web.listen(settings.host, settings.port, settings.elsewhere(folder, "listen")) as listening:
        service = Service(folder, settings)
        web.serve(service, listening, folder / "keys" if settings.tls else None, service.refused)
