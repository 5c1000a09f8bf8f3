"""What a service has loaded: its models, and for each the answers that may be kept; brought up to date beside requests.

A request reads what is there at the moment. A change makes new answers beside the old ones, and then puts them in
their place. A model that was replaced goes on for a while with what it had.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from homebody.errors import HomebodyError
from homebody.federation.service import web
from homebody.federation.service.logs import log
from homebody.serving.additions import MadeItem
from homebody.serving.client import LETTER
from homebody.serving.model_file import Model
from homebody.serving.settings import ServiceSettings
from homebody.serving.stock import Answers, Stock
from homebody.serving.store import KnownModel, ServiceStore

__all__ = ["JSON", "KeptAnswer", "Live", "Loaded", "Receive", "Scope", "Send"]

JSON = "application/json"
_CHUNK = 1 << 18

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class KeptAnswer:
    """An answer that is the same for everybody: its bytes, and how long they may be kept."""

    def __init__(self, body: bytes, kind: str, cache: str, etag: str = "") -> None:
        self._body, self._etag = body, f'"{etag}"'.encode() if etag else b""
        named = [(b"cache-control", cache.encode()), (b"vary", b"accept"), *([(b"etag", self._etag)] if etag else [])]
        length = (b"content-length", str(len(body)).encode())
        self._start = {"type": "http.response.start", "status": 200}
        self._start["headers"] = [(b"content-type", kind.encode()), length, *named]
        self._same = {"type": "http.response.start", "status": 304, "headers": named}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._etag and any(name == b"if-none-match" and self._etag in value for name, value in scope["headers"]):
            await send(self._same)
            await send({"type": "http.response.body", "body": b""})
            return
        await send(self._start)
        body = b"" if scope["method"] == "HEAD" else self._body
        for first in range(0, max(1, len(body)), _CHUNK):  # whoever is slow holds a piece, and not a copy of all
            more = first + _CHUNK < len(body)
            await send({"type": "http.response.body", "body": body[first : first + _CHUNK], "more_body": more})


@dataclass(eq=False)
class Live:
    """A model that is served, with its answers at one version."""

    known: KnownModel
    stock: Stock
    answers: Answers
    kept: dict[tuple[str, bool], KeptAnswer]
    """By path and query, and whether as a letter."""


class Loaded:
    """The models that answer. One thread at a time may call `look`."""

    def __init__(self, store: ServiceStore, settings: ServiceSettings, clock: Callable[[], float]) -> None:
        self._store, self._settings, self._clock = store, settings, clock
        self.live: dict[str, Live] = {}
        """By digest; the first is the one that is served."""
        self.tokens: dict[bytes, bool] = {}
        """Hashes of tokens: whether they are an operator's."""
        self._gone: frozenset[str] = frozenset()
        self._seen = -1
        self.look()
        self.tidy()

    @property
    def now(self) -> Live:
        """The model that is served."""
        return next(iter(self.live.values()))

    def of(self, digest: str) -> Live:
        """The model of this digest, or why there is none."""
        if (live := self.live.get(digest)) is not None:
            return live
        now = self.now.stock.model
        if digest in self._gone:
            raise web.Refusal(410, "model replaced", f"This model was replaced by {now}: fetch that one.", model=now)
        raise web.Refusal(404, "unknown model", f"There is no such model here; {now} is served.", model=now)

    def find(self, path: str, letter: bool) -> KeptAnswer | None:
        """The answer of a path with its query, as a letter or as JSON where there are both."""
        for live in self.live.values():
            kept = live.kept.get((path, letter))
            if kept is None and not letter and path in live.answers.letters:  # made when somebody asks for it
                kept = live.kept[path, False] = self.keep(live.answers.as_json(path), JSON, live)
            kept = kept or live.kept.get((path, not letter))
            if kept is not None:
                return kept
        return None

    def look_again(self) -> None:
        """Look, though nobody else has changed anything."""
        self._seen = -1
        self.look()

    def look(self) -> None:
        """Bring what is served up to date, if something changed."""
        now, seen = self._clock(), self._store.changed_elsewhere()
        late = [live for live in self.live.values() if self._is_over(live.known, now)]
        if seen == self._seen and not late:
            return
        tokens, current, models = self._store.hashes(), self._store.current(), self._store.models()
        wanted = [current, *(known for known in models if known.replaced is not None and not self._is_over(known, now))]
        self.live = {known.digest: live for known in wanted if (live := self._brought(known))}
        self._gone = frozenset(known.digest for known in models) - set(self.live)
        self.tokens, self._seen = tokens, seen
        if late:
            self.tidy()

    def _is_over(self, known: KnownModel, now: float) -> bool:
        """Whether a model that was replaced answers no more; also where the clock was set back meanwhile."""
        return known.replaced is not None and not known.replaced <= now < known.replaced + self._settings.retire

    def _brought(self, known: KnownModel) -> Live | None:
        """A model with all changes up to now; None if it is one before, and damaged."""
        before = self.live.get(known.digest)
        if before is not None and before.known.file == known.file and before.known.version == known.version:
            stock, since = before.stock, before.answers.version
        else:
            try:
                model = Model.read(self._store.read_model(known.file))
            except HomebodyError as error:
                if known.replaced is None:
                    raise
                log("model before cannot be read", model=known.digest, why=str(error))
                return None
            stock, since = Stock(model, self._settings), -1
            log("model loaded", model=known.digest, items=len(stock))
        changes = self._store.changes(since)
        if before is not None and stock is before.stock and changes.version == since:
            return Live(known, stock, before.answers, before.kept)
        stock.remove(changes.removed)
        if known.replaced is None:
            made = [MadeItem.read(item.id, str(item.given.get("name", "")), item.row) for item in changes.added]
            stock.add(made, [item.number for item in changes.added], [item.version for item in changes.added])
        answers = Answers(stock, changes.version, self._settings)
        live = Live(known, stock, answers, {})
        live.kept.update(self._kept_of(live))
        return live

    def _kept_of(self, live: Live) -> Iterable[tuple[tuple[str, bool], KeptAnswer]]:
        """Every answer that is the same for everybody. Of a model that was replaced, those that name it."""
        digest, head = live.stock.model, live.stock.head
        forever = f"{'private' if self._settings.tokens else 'public'}, max-age=31536000, immutable"
        yield (f"/v1/models/{digest}", True), KeptAnswer(head.content, LETTER, forever, digest)
        for path, letter in live.answers.letters.items():
            if live.known.replaced is None or path.startswith("/v1/lists/"):
                yield (path, True), self.keep(letter, LETTER, live, "l")
        if live.known.replaced is None:
            offer = (json.dumps(self._offered(live)) + "\n").encode()
            yield ("/v1/model", False), KeptAnswer(offer, JSON, "no-cache", f"{digest}-{live.answers.version}")

    def _offered(self, live: Live) -> dict[str, Any]:
        stock, head, size = live.stock, live.stock.head, live.stock.table_bytes
        sent = size <= self._settings.table_bytes
        return {
            "model": stock.model,
            "version": live.answers.version,
            "items": len(stock),
            "query": "" if head.query is None else str(head.query),
            "ways": [way for way in head.ways if way != "table" or sent],
            "rows": self._settings.rows,
            "choices": stock.choices,
            "answers": self._settings.answers if "server" in head.ways else 0,
            "table_bytes": size if sent else 0,
        }

    def keep(self, body: bytes, kind: str, live: Live, name: str = "j") -> KeptAnswer:
        """An answer of a model at its version."""
        whose = "private" if self._settings.tokens else "public"
        etag = f"{live.stock.model}-{live.answers.version}-{name}"
        return KeptAnswer(body, kind, f"{whose}, max-age={self._settings.max_age}", etag)

    def tidy(self) -> None:
        """Delete the files of models that nobody is served any more; the next time, if one is being written."""
        with suppress(HomebodyError, OSError), self._store.changing_model(patience=0.0):
            self._store.tidy(live.known.file for live in self.live.values())
