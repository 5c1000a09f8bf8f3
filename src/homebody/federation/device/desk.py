"""The desk of a device: the apps of its people connect to it, and it asks them.

The desk listens on a Unix socket outside the device's folder. It knows an app by the user of its process, which the
system states, and by a token. An app that is away, slow or sends nonsense is left out of the round: the device goes on
without it. An app gets the item tower, its own tower and the samples, and nothing of another view.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from homebody.core import Rows, Tree
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.device.home import Home
from homebody.federation.device.store import HomeStore
from homebody.federation.device.views import KnownView, KnownViews, Outcome
from homebody.federation.views import HELLO_BYTES, QUESTION_BYTES, Vanished, peer_user, read_hello, receive, send
from homebody.files import write_synced

__all__ = ["LARGEST", "AppReply", "Desk", "Relay", "SentQuestion", "invite", "usual_socket"]

SECONDS = 5.0
"""How long an app may take, unless the device says otherwise."""
LARGEST = 1e6
"""The largest number that a gradient may hold: those of towers are below 100."""
HELLO_SECONDS = 5.0
RELAY = wire.encode_letter({"relay": 1})
"""The first message of another process of the device."""
PENDING = 4
"""The most connections of one user that have not said hello yet."""
LONGEST_PATH = 107
"""The most bytes of a socket's path that the system accepts."""


def usual_socket(folder: Path) -> Path:
    """Where a device listens for apps: beside its folder, which no app can enter.

    >>> usual_socket(Path("/srv/kitchen"))
    PosixPath('/srv/kitchen.socket')
    """
    whole = folder.resolve()
    return whole.with_name(f"{whole.name}.socket")


def invite(home: Home, name: str, uid: int, file: Path, *, same_user: bool = False, where: Path | None = None) -> bool:
    """Let a user's process be the app of a view, and write what it needs to know into a new file.

    Returns whether the file belongs to that user. Nobody but its owner can read it.
    """
    home.views.refuse_taken(name)
    if file.exists():
        raise HomebodyError(f"{file} is there already: give another with --invitation.")
    token = home.views.add(name, uid, same_user=same_user)
    socket_path = (where or usual_socket(home.path)).absolute()
    about = {"view": name, "socket": str(socket_path), "device_user": home.path.stat().st_uid, "token": token}
    try:
        write_synced(file, json.dumps(about).encode())
        if uid != os.geteuid() and os.geteuid() == 0:
            os.chown(file, uid, -1)
    except OSError as error:
        home.views.remove(name)
        raise HomebodyError(f"{file} cannot be written: {error.strerror or error}.") from error
    return file.stat().st_uid == uid


class SentQuestion(NamedTuple):
    """A question to one app, and what its answer must be like."""

    letter: bytes
    wanted: Mapping[str, wire.Expected]

    @property
    def longest(self) -> int:
        """Bytes that no answer exceeds."""
        return wire.HEADER_BYTES + wire.longest(self.wanted)

    def read(self, letter: bytes) -> AppReply:
        """An answer, checked: names, shapes, kinds, and numbers that are finite and not too large."""
        header, parts = wire.decode_letter(letter)
        if header.get("to") != wire.digest(self.letter):
            raise wire.Malformed("The answer is to another question.")
        if "refused" in header:
            raise wire.Malformed(f"The app refused: {str(header['refused'])[:300]}")
        update = wire.decode_update(parts.get("update", b""), self.wanted, LARGEST)
        return AppReply("answered", {name: _as(value, self.wanted[name].kind) for name, value in update.items()})


class Relayed(NamedTuple):
    """A question from another process of the device, which checks the answer itself."""

    letter: bytes
    longest: int

    def read(self, letter: bytes) -> AppReply:
        return AppReply("answered", {}, letter=letter)


class AppReply(NamedTuple):
    """What came of a question: an answer, or why there is none."""

    outcome: Outcome
    update: Tree
    reason: str = ""
    letter: bytes = b""
    """A relayed answer, as it came."""


class _Seat(NamedTuple):
    """An app that is there."""

    view: KnownView
    connection: socket.socket


class Desk(AbstractContextManager["Desk"]):
    """Asks the apps of one device.

    seconds: how long all apps together may take to answer one question. The desk waits as long for an
    app that is not there, but only once: after that it does not wait until the app has come back.
    """

    def __init__(
        self,
        folder: Path,
        where: Path | None = None,
        *,
        seconds: float = SECONDS,
        log: Callable[..., None] = lambda event, **facts: None,
    ) -> None:
        if not 0 < seconds <= 3600:
            raise HomebodyError(f"An app may take more than 0 and at most 3600 seconds, not {seconds:g}.")
        self.folder, self.where, self.seconds, self._log = folder, where or usual_socket(folder), seconds, log
        self._changed = threading.Condition()
        self._seats: dict[str, _Seat] = {}
        self._missed: set[str] = set()
        self._pending: Counter[int] = Counter()
        self._asking = threading.Lock()
        self._closed = False
        self._listening = self._bound()
        self._thread = threading.Thread(target=self._accept, name="desk", daemon=True)
        self._thread.start()

    def _bound(self) -> socket.socket:
        path = str(self.where)
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise HomebodyError(
                f"The path of the socket {path} is longer than {LONGEST_PATH} bytes: give a shorter one with --socket."
            )
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if self.where.exists() or self.where.is_symlink():
                # One device has one process (`HomeStore.only_client`): a socket that is there was left by a killed one.
                if not stat.S_ISSOCK(self.where.lstat().st_mode):
                    raise HomebodyError(f"{path} is there and is no socket: give another path with --socket.")
                self.where.unlink()
            listening.bind(path)
            self.where.chmod(0o666)  # who may speak is decided by user and token
            listening.listen(64)
        except OSError as error:
            listening.close()
            raise HomebodyError(
                f"The device cannot listen for apps at {path} ({error.strerror or error}): give another path with "
                "--socket."
            ) from error
        except BaseException:
            listening.close()
            raise
        return listening

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # too many files are open
                continue
            threading.Thread(target=self._greet, args=(connection,), name="greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Find out which app this is; a process of an unknown user is refused before it is read."""
        try:
            uid = peer_user(connection)
            with closing(HomeStore(self.folder)) as store:  # of this thread's own
                views = {view.name: view for view in KnownViews(store).all()}
            if uid != os.geteuid() and not any(view.uid == uid for view in views.values()):
                self._turn_away(connection, "no app of this device belongs to this user")
                return
            with self._changed:
                if self._pending[uid] >= PENDING:
                    connection.close()
                    return
                self._pending[uid] += 1
            try:
                first = receive(connection, HELLO_BYTES, HELLO_SECONDS)
            finally:
                with self._changed:
                    self._pending[uid] -= 1
            if uid == os.geteuid() and first == RELAY:
                self._relay(connection, list(views.values()))
                return
            name, token = read_hello(first)
            view = views.get(name)
            if view is None or not view.admits(uid, token):
                self._turn_away(connection, "its user, view and token do not belong together")
                return
            send(connection, wire.encode_letter({"welcome": True}), HELLO_SECONDS)
        except (OSError, HomebodyError, wire.Malformed, KeyError, TypeError, ValueError):
            connection.close()
            return
        with self._changed:
            if self._closed:
                connection.close()
                return
            before = self._seats.get(name)
            self._seats[name] = _Seat(view, connection)
            self._missed.discard(name)
            self._changed.notify_all()
        if before is not None:
            before.connection.close()
        self._log("view joined", view=name)

    def _relay(self, connection: socket.socket, known: Sequence[KnownView]) -> None:
        """Ask apps on behalf of another process of the device, such as one that ranks."""
        with connection:
            header, parts = wire.decode_letter(receive(connection, QUESTION_BYTES, HELLO_SECONDS))
            longest = header["longest"]
            replies = self.ask({name: Relayed(letter, int(longest[name])) for name, letter in parts.items()}, known)
            outcomes = {name: [reply.outcome, reply.reason] for name, reply in replies.items()}
            answers = {name: reply.letter for name, reply in replies.items()}
            send(connection, wire.encode_letter({"outcomes": outcomes}, answers), HELLO_SECONDS)

    def _turn_away(self, connection: socket.socket, why: str) -> None:
        self._log("view refused", reason=why)
        refusal = "This device does not know this app: its operator adds it with `homebody client views add`."
        with suppress(Vanished):
            send(connection, wire.encode_letter({"refused": refusal}), HELLO_SECONDS)
        connection.close()

    def ask(self, queries: Mapping[str, SentQuestion | Relayed], known: Sequence[KnownView]) -> dict[str, AppReply]:
        """Ask these views' apps, all at once, and wait until the time is up.

        known: the apps as they are registered now. An app removed or added again since it connected counts as away.
        """
        registered, replies = {view.name: view for view in known}, dict[str, AppReply]()
        with self._asking:
            until = time.monotonic() + self.seconds

            def ask_view(name: str) -> None:
                replies[name] = self._ask(queries[name], registered[name], until)

            threads = [threading.Thread(target=ask_view, args=[n], name=f"view {n}", daemon=True) for n in queries]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return replies

    def _ask(self, query: SentQuestion | Relayed, view: KnownView, until: float) -> AppReply:
        while (seat := self._seat(view, until)) is not None:
            try:
                send(seat.connection, query.letter, until - time.monotonic())
                return query.read(receive(seat.connection, query.longest, until - time.monotonic()))
            except Vanished:
                self._leave(seat)  # killed in the round: it is asked again if it comes back in time
            except TimeoutError:
                self._leave(seat)
                return AppReply("slow", {}, f"Its app took longer than {self.seconds:g} seconds.")
            except wire.Malformed as error:
                self._leave(seat)
                return AppReply("nonsense", {}, str(error))
        return AppReply("away", {}, "Its app is not there.")

    def _seat(self, view: KnownView, until: float) -> _Seat | None:
        """The app of a view; waits for it unless it was missed before."""
        with self._changed:
            while (left := until - time.monotonic()) > 0:
                seat = self._seats.get(view.name)
                if seat is not None and seat.view[:3] == view[:3]:
                    return seat
                if view.name in self._missed or self._closed:
                    return None
                self._changed.wait(left)
            self._missed.add(view.name)
            return None

    def _leave(self, seat: _Seat) -> None:
        seat.connection.close()
        with self._changed:
            if self._seats.get(seat.view.name) is seat:
                del self._seats[seat.view.name]

    def close(self) -> None:
        """Hang up on all apps, and listen no more."""
        with self._changed:
            self._closed = True
            seats = list(self._seats.values())
            self._seats.clear()
            self._changed.notify_all()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for seat in seats:
            seat.connection.close()
        with suppress(OSError):
            self.where.unlink()

    def __exit__(self, *_: object) -> None:
        self.close()


class Relay:
    """Asks apps through the desk of the device's running process."""

    def __init__(self, where: Path, seconds: float = 60.0) -> None:
        self._where, self._seconds = where, seconds

    def ask(self, queries: Mapping[str, SentQuestion], known: Sequence[KnownView]) -> dict[str, AppReply]:
        """As `Desk.ask`; the desk looks up which apps there are."""
        parts = {name: query.letter for name, query in queries.items()}
        asked = wire.encode_letter({"longest": {name: query.longest for name, query in queries.items()}}, parts)
        most = sum(query.longest for query in queries.values()) + wire.HEADER_BYTES
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(str(self._where))
                if peer_user(connection) != os.geteuid():
                    raise HomebodyError(f"A process of another user listens at {self._where}: stop that process.")
                send(connection, RELAY, self._seconds)
                send(connection, asked, self._seconds)
                header, answers = wire.decode_letter(receive(connection, most, self._seconds))
        except OSError as error:
            raise HomebodyError(
                f"The running device cannot be reached at {self._where}: give its socket with --socket."
            ) from error
        return {name: self._read(query, header["outcomes"][name], answers[name]) for name, query in queries.items()}

    def _read(self, query: SentQuestion, outcome: tuple[Outcome, str], letter: bytes) -> AppReply:
        if outcome[0] != "answered":
            return AppReply(outcome[0], {}, outcome[1])
        try:
            return query.read(letter)
        except wire.Malformed as error:
            return AppReply("nonsense", {}, str(error))


def _as(value: Rows | Tensor, kind: torch.dtype) -> Rows | Tensor:
    """In the precision that the method computes in: 16 bits may have been sent."""
    return Rows(value.index, value.value.to(kind), value.size) if isinstance(value, Rows) else value.to(kind)
