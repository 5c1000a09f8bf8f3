"""What a device and the apps of its people say to one another, over a Unix socket.

An app says hello with its view and its token. The system tells the device which user the app's process belongs to. Then
the device asks and the app answers, letter by letter, in the format of `wire`. A letter is preceded by its length.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any, Self

from homebody.core import Batch, Method, Tree
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.schema import FeatureSchema
from homebody.federation.task import MOST_ITEMS, json_kinds
from homebody.methods.fl_mv_dssm import FLMVDSSM

__all__ = ["AppQuestion", "Vanished", "hello", "hide_memory", "peer_user", "receive", "send", "views_of"]

PROTOCOL = 1
HELLO_BYTES = 4096
QUESTION_BYTES = 1 << 30
"""The longest question: the item tower and the schema of features of the largest catalogue."""
_LENGTH = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")
_NOT_IN_HEADER = frozenset({"shared", "batch", "schema", "ranks"})
_PR_SET_DUMPABLE = 4


class Vanished(ConnectionError):
    """The other side closed the connection."""


def views_of(method: Method) -> FLMVDSSM | None:
    """The method as one for people with several views, if it is one."""
    return method if isinstance(method, FLMVDSSM) else None


@dataclass(frozen=True)
class AppQuestion:
    """What a device asks an app: its gradient for some samples, or its scores of all items."""

    do: str
    """gradient or scores."""
    run: str
    release: str
    ask: str
    """The name of all that the device's answer depends on."""
    step: int
    keep: int | None
    """A round that may be gone back to."""
    view: str
    person: str
    n_items: int
    method: str
    fields: dict[str, Any]
    stages: list[str]
    phase: str
    parts: list[str]
    """The parts of a gradient that the device takes."""
    shared: Tree
    """The item tower and the app's own tower."""
    batch: Batch
    """The samples of a gradient, which all views have in common."""
    schema: FeatureSchema
    """How the view's features are written in numbers; for scores, what the items are like too."""
    ranks: str = ""
    """The run whose model the device ranks with; empty: it has none, or is older than this field."""

    def content(self) -> bytes:
        """As it travels."""
        header = {name: getattr(self, name) for name in (*_KINDS, *(["ranks"] if self.ranks else []))}
        parts = {"shared": wire.encode_tree(self.shared), "batch": wire.encode_tree(self.batch)}
        return wire.encode_letter(header, {**parts, "schema": self.schema.content})

    @classmethod
    def read(cls, letter: bytes) -> Self:
        """The question of a letter, with every field checked."""
        header, parts = wire.decode_letter(letter)
        for name, kind in _KINDS.items():
            value = header.get(name)
            if name not in header or not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise wire.Malformed(f"The question's '{name}' is missing or of another kind.")
        steps = [header["step"], 0 if header["keep"] is None else header["keep"]]
        if not all(0 <= step < 2**53 for step in steps) or not 0 <= header["n_items"] < MOST_ITEMS:
            raise wire.Malformed("The question's round, or its number of items, is out of range.")
        if not all(isinstance(one, str) for one in (*header["stages"], *header["parts"])):
            raise wire.Malformed("The question's stages, or the parts it asks for, are not texts.")
        ranks = header.get("ranks", "")
        if not isinstance(ranks, str):
            raise wire.Malformed("The question's 'ranks' is of another kind.")
        if header["do"] not in ("gradient", "scores"):
            raise wire.Malformed("The device asks for something that this app does not know: update it.")
        return cls(
            **{name: header[name] for name in _KINDS},
            shared=wire.decode_tree(parts.get("shared", b"")),
            batch=wire.decode_tree(parts.get("batch", b"")),
            schema=FeatureSchema.read(parts.get("schema", b"")),
            ranks=ranks,
        )


_KINDS = {name: kind for name, kind in json_kinds(AppQuestion).items() if name not in _NOT_IN_HEADER}
"""The type of each field in a header, in order."""


def hello(view: str, token: str) -> bytes:
    """An app's first letter."""
    return wire.encode_letter({"hello": PROTOCOL, "view": view, "token": token})


def read_hello(letter: bytes) -> tuple[str, str]:
    """The view and the token of an app's first letter."""
    header, _ = wire.decode_letter(letter)
    if header.get("hello") != PROTOCOL:
        raise wire.Malformed("The app speaks another version of this protocol: update the older side.")
    view, token = header.get("view"), header.get("token")
    if not isinstance(view, str) or not isinstance(token, str):
        raise wire.Malformed("The app names no view, or shows no token.")
    return view, token


def send(connection: socket.socket, letter: bytes, seconds: float) -> None:
    """Send a letter within so many seconds, or raise TimeoutError."""
    try:
        connection.settimeout(max(seconds, 1e-3))
        connection.sendall(_LENGTH.pack(len(letter)) + letter)
    except TimeoutError:
        raise TimeoutError("it does not read") from None
    except OSError:
        raise Vanished("it hung up") from None


def receive(connection: socket.socket, longest: int, seconds: float | None) -> bytes:
    """A letter of at most so many bytes, which must be whole within so many seconds; None: whenever it comes."""
    until = None if seconds is None else time.monotonic() + seconds
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, until))
    if length > longest:
        raise wire.Malformed("The letter is longer than it may be.")
    return _exactly(connection, length, until)


def _exactly(connection: socket.socket, count: int, until: float | None) -> bytes:
    parts = []
    while count:
        try:
            connection.settimeout(None if until is None else max(until - time.monotonic(), 1e-3))
            part = connection.recv(min(count, 1 << 20))
        except TimeoutError:
            raise TimeoutError("it took too long") from None
        except OSError:
            raise Vanished("it hung up") from None
        if not part:
            raise Vanished("it hung up")
        if until is not None and time.monotonic() > until:
            raise TimeoutError("it took too long")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def peer_user(connection: socket.socket) -> int:
    """The user whose process is at the other end, as the system knows it."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise HomebodyError("This system cannot tell which user is at the other end of a socket: use Linux.")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


def hide_memory() -> None:
    """Let no other process of the same user read this one's memory, nor a crash write it to a file."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
