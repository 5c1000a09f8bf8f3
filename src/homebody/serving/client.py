"""A client of a service that recommends: what it serves, by HTTP.

Answers that may be kept are asked for again by their ETag, and come anew only if they have changed. Nothing of the
environment is read: a proxy named there would learn every query.
"""

from __future__ import annotations

import http.client
import json
import math
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import numpy as np
from torch import Tensor

from homebody.errors import HomebodyError, Unavailable
from homebody.federation.service.text import check_proxy, one_line, read_authority
from homebody.federation.wire import decode_letter, encode_letter
from homebody.serving.model import Head
from homebody.serving.rows import Part

__all__ = [
    "LETTER",
    "Client",
    "Offer",
    "RefusedRequest",
    "ServedTable",
    "head_path",
    "list_path",
    "query_body",
    "ranking",
    "shelf_path",
    "table_path",
    "told_of",
]

LETTER = "application/x-homebody-letter"
"""What a client accepts to get rows as a letter, and what it sends a query as."""
TIMEOUT = 30.0
"""Seconds that the service may be silent."""
LONGEST = 1 << 30
"""Bytes of an answer, at most."""
QUERY = "/v1/query"


class RefusedRequest(HomebodyError):
    """The service refused a request; the message is its sentence."""

    def __init__(self, status: int, said: dict[str, Any]) -> None:
        sentence = said.get("error")
        super().__init__(f"The service refused: {sentence if isinstance(sentence, str) else f'it answered {status}.'}")
        self.status = status
        self.model = said.get("model") if isinstance(said.get("model"), str) else None
        """The model that the service has now, where the request named another."""


class Offer(NamedTuple):
    """What a service offers, as /v1/model says it."""

    model: str
    """The digest of its model."""
    version: int
    """Of its items; it grows with each change."""
    items: int
    """How many there are."""
    query: str
    """The mechanism that devices ask by, such as choice:epsilon=5; empty: none."""
    ways: tuple[str, ...]
    """Of table, shelf, query and server."""
    rows: int
    """Rows of a shelf, or of half a shelf and half a list together."""
    choices: int
    """Lists that there are; 0: none."""
    answers: int
    """Items that the service ranks for a query."""
    table_bytes: int
    """Of the whole table; 0: it is larger than the service sends."""

    @classmethod
    def read(cls, said: Any) -> Self:
        """From JSON; an error if it is not that of a service."""
        kinds = {"model": str, "query": str, "ways": list}
        fit = isinstance(said, dict) and all(type(said.get(name)) is kinds.get(name, int) for name in cls._fields)
        if not fit or not all(isinstance(way, str) for way in said["ways"]):
            raise HomebodyError("The service describes itself in a way that is not known here: update the older side.")
        return cls._make(tuple(said[name]) if name == "ways" else said[name] for name in cls._fields)


class ServedTable(NamedTuple):
    """All rows, or what changed since a version."""

    part: Part
    since: int | None
    """None: these are all rows. The service sends them, too, where it cannot say what changed."""
    removed: tuple[str, ...]
    """Items that went since then."""

    @classmethod
    def read(cls, letter: bytes) -> Self:
        """From a letter."""
        part, header = Part.read(letter), decode_letter(letter)[0]
        since, removed = header.get("since"), header.get("removed", [])
        if not (since is None or type(since) is int) or not isinstance(removed, list):
            raise HomebodyError("The table does not say what it is: update the older side.")
        return cls(part, since, tuple(map(str, removed)))


def head_path(model: str) -> str:
    """Where a model's head is."""
    return f"/v1/models/{model}"


def table_path(since: int | None = None) -> str:
    """Where the table is, or what changed in it since a version."""
    return "/v1/table" if since is None else f"/v1/table?since={since}"


def shelf_path(*, half: bool = False) -> str:
    """Where the shelf is, or its better half."""
    return "/v1/shelf?half=1" if half else "/v1/shelf"


def list_path(model: str, choice: int) -> str:
    """Where a choice's list is. All of a model's have one length.

    >>> list_path("ab", 7)
    '/v1/lists/ab/007'
    """
    return f"/v1/lists/{model}/{choice:03d}"


def query_body(model: str, told: Tensor) -> bytes:
    """A query: what a mechanism tells. All of a model's have one length."""
    choice = not told.is_floating_point()
    numbers = told.detach().cpu().numpy().reshape(-1).astype("<i4" if choice else "<f4")
    return encode_letter({"model": model}, {"choice" if choice else "told": numbers.tobytes()})


class Client:
    """A service at an address. ca: the file of the authority that signed its certificate, if that is not a system's
    one. token: what its operator gave, if it asks for tokens."""

    def __init__(self, url: str, *, ca: Path | str | None = None, token: str = "") -> None:
        check_proxy(url, "A service")
        self.url, self._parts = url.rstrip("/"), urlsplit(url)
        self._headers = {"user-agent": "homebody", "accept-encoding": "identity"}
        if token:
            self._headers["authorization"] = f"Bearer {one_line(token, 'A token', 200)}"
        self._context: ssl.SSLContext | None = None
        if self._parts.scheme == "https":
            known = None if ca is None else read_authority(Path(ca)).decode("ascii")
            self._context = ssl.create_default_context(cadata=known)
        self._connection: http.client.HTTPConnection | None = None
        self._kept: dict[str, tuple[str, bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def model(self) -> Offer:
        """What the service offers now."""
        return Offer.read(_json(self.get("/v1/model", accept="application/json")))

    def head(self, model: str) -> Head:
        """All that a device needs of a model apart from rows."""
        return Head.read(self.get(head_path(model)))

    def table(self, since: int | None = None) -> ServedTable:
        """Every row, or the rows that came and the items that went since a version."""
        return ServedTable.read(self.get(table_path(since)))

    def shelf(self, *, half: bool = False) -> Part:
        """The rows that are the same for all, the best first, or the better half of them."""
        return Part.read(self.get(shelf_path(half=half)))

    def list(self, model: str, choice: int) -> Part:
        """The rows of a choice's list that are not in the better half of the shelf."""
        return Part.read(self.get(list_path(model, choice)))

    def query(self, model: str, told: Tensor) -> Sequence[tuple[str, float]]:
        """The items that the service ranks best for what a mechanism told, with their scores."""
        return ranking(self.post(query_body(model, told)))

    def chosen(self, model: str, told: Tensor) -> Part:
        """The rows that fit best what a mechanism told, where that is no choice: those that are not in the better half
        of the shelf."""
        return Part.read(self.post(query_body(model, told), accept=LETTER))

    def get(self, path: str, *, accept: str = LETTER) -> bytes:
        """The answer of a path as it came, or as it was kept."""
        # Of a list that did not change the short answer would show the network that the choice is one of before.
        keeps = not path.startswith("/v1/lists/")
        etag, kept = self._kept.get(path, ("", b""))
        status, answer, headers = self._ask("GET", path, None, accept, {"if-none-match": etag} if etag else {})
        if status == 304 and etag:
            return kept
        if keeps and (etag := headers.get("etag", "")):
            self._kept[path] = (etag, answer)
        return answer

    def post(self, body: bytes, *, accept: str = "application/json") -> bytes:
        """The answer to a query as it came: a ranking, or rows as a letter."""
        return self._ask("POST", QUERY, body, accept, {"content-type": LETTER})[1]

    def _ask(
        self, method: str, path: str, body: bytes | None, accept: str, headers: dict[str, str]
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        for fresh in (self._connection is None, True):
            try:
                status, answer, told = self._asked(method, path, body, {**self._headers, "accept": accept, **headers})
                break
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # A connection that was kept open may have been closed over there; to ask twice changes nothing.
                if fresh or isinstance(error, TimeoutError):
                    raise self._away(error) from error
        if status not in (200, 304):
            said = _json(answer) if told.get_content_type() == "application/json" else {}
            raise RefusedRequest(status, said if isinstance(said, dict) else {})
        return status, answer, told

    def _asked(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        if self._connection is None:
            where = (self._parts.hostname or "", self._parts.port)
            self._connection = (
                http.client.HTTPSConnection(*where, timeout=TIMEOUT, context=self._context)
                if self._context
                else http.client.HTTPConnection(*where, timeout=TIMEOUT)
            )
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        if (response.length or 0) > LONGEST:
            raise http.client.HTTPException("too long an answer")
        answer = response.read(LONGEST)
        if response.length:
            raise http.client.HTTPException("the answer broke off")
        if response.will_close or not response.isclosed():
            self.close()
        return response.status, answer, response.headers

    def _away(self, error: Exception) -> HomebodyError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return HomebodyError(
                f"{self.url} shows another certificate than is trusted: give the ca.pem that signed it."
            )
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Unavailable(
            f"The service {self.url} cannot be reached ({why}): see that it runs (`homebody serve start`)."
        )


def ranking(answer: bytes) -> list[tuple[str, float]]:
    """The ids and scores of an answer to a query."""
    said = _json(answer)
    try:
        ranked = [(str(entry["id"]), float(entry["score"])) for entry in said["ranked"]]
    except (KeyError, TypeError, ValueError):
        ranked = [("", math.nan)]
    if not all(math.isfinite(score) for _, score in ranked):
        raise HomebodyError("The service answers in a way that is not known here: update the older side.")
    return ranked


def told_of(letter: bytes) -> tuple[dict[str, Any], np.ndarray[Any, Any] | None]:
    """The header of a query's letter, and what it tells: whole numbers for a choice; None if it has neither."""
    header, parts = decode_letter(letter)
    for name, kind in (("choice", "<i4"), ("told", "<f4")):
        if parts.keys() == {name} and len(parts[name]) % 4 == 0:
            return header, np.frombuffer(parts[name], dtype=kind)
    return header, None


def _json(answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None
