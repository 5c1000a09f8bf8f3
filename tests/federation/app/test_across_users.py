"""A device and two apps, each under a user of its own, and one of the apps is malicious. Only root can start them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federation.device import test_apps as one_user
from tests.processes import PATIENCE

from homebody.federation import wire
from homebody.federation.app.folder import AppFolder, AppSettings
from homebody.federation.app.process import App
from homebody.federation.device.desk import Desk, usual_socket
from homebody.federation.device.device import Device
from homebody.federation.device.home import Home
from homebody.federation.views import AppQuestion, hello, hide_memory, receive, send
from homebody.rng import Rng

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="Only root can start processes of several users."),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # threads of this process have ended by then
]

USERS = {"device": 61_000, "taste": 61_001, "profile": 61_002}
FORK = multiprocessing.get_context("fork")
STAGES = ["views:clip=0.5", "view-noise:z=4"]
PTRACE_ATTACH, PROCESS_VM_READV, PIDFD_GETFD = 16, 310, 438


class Child:
    """A process of another user, which works for this one over a pipe."""

    def __init__(self, uid: int, work: Callable[..., None], *given: Any) -> None:
        self.pipe, far = FORK.Pipe()
        self.process = FORK.Process(target=_as_user, args=(uid, work, far, *given), daemon=True)
        self.process.start()
        far.close()

    def ask(self, *what: Any) -> Any:
        self.pipe.send(what)
        assert self.pipe.poll(PATIENCE)
        return self.pipe.recv()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE)
        return self.pipe.recv()


def _as_user(uid: int, work: Callable[..., None], pipe: Connection, *given: Any) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.umask(0o077)
    hide_memory()
    work(pipe, *given)


def device(pipe: Connection, folder: Path) -> None:
    """A device that answers the letters it gets over the pipe."""
    with Home.create(folder, server="127.0.0.1:9092") as home:
        home.people.add("ann")
        for time, item in enumerate(one_user.HISTORY):
            home.history.append("ann", f"i{item}", time=time)
        tokens = {view: home.views.add(view, USERS[view]) for view in ("taste", "profile")}
        with Desk(folder, seconds=PATIENCE) as desk:
            pipe.send(tokens)
            own = Device(home, desk=desk, sleep=lambda left: True)
            while (letter := pipe.recv()[0]) is not None:
                pipe.send(own.answer(letter))


def app(pipe: Connection, folder: Path, settings: AppSettings) -> None:
    """An app that notes what it is asked, and tries what it is told to over the pipe."""
    asked: list[bytes] = []

    class Curious(App):
        def answer(self, letter: bytes) -> bytes:
            asked.append(letter)
            return super().answer(letter)

    with AppFolder.create(folder, settings) as own:
        own.describe({"ann": one_user.KNOWN[settings.view]})
        threading.Thread(target=Curious(own).run, args=(threading.Event(),), daemon=True).start()
        pipe.send("ready")
        while (what := pipe.recv())[0] is not None:
            pipe.send(asked if what[0] == "asked" else tries(*what[1:]))


def tries(folder: Path, pid: int, where: str, view: str, tokens: list[str]) -> dict[str, str]:
    """What becomes of each attempt on another party: its folder, its process, its name."""
    libc = ctypes.CDLL(None, use_errno=True)

    def called(number: int, *given: int) -> None:
        if libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, given)) < 0:
            raise OSError(ctypes.get_errno(), "refused")

    # Processes that one process forked have the same addresses: there is something at this one.
    held, bytes_of = ctypes.create_string_buffer(8), ctypes.c_uint64 * 2
    into, out_of = bytes_of(ctypes.addressof(held), 8), bytes_of(id(one_user), 8)
    here, there = ctypes.addressof(into), ctypes.addressof(out_of)

    def memory() -> None:
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as file:
            file.seek(id(one_user))
            file.read(8)

    def attach() -> None:
        if libc.ptrace(PTRACE_ATTACH, pid, None, None) < 0:
            raise OSError(ctypes.get_errno(), "refused")
        os.waitpid(pid, 0)

    def pose(token: str) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(where)
            send(connection, hello(view, token), PATIENCE)
            if "welcome" not in wire.decode_letter(receive(connection, 4096, PATIENCE))[0]:
                raise PermissionError

    attempts: dict[str, Callable[[], object]] = {
        "list": lambda: list(folder.iterdir()),
        "app.sqlite": lambda: (folder / "app.sqlite").read_bytes(),
        "home.sqlite": lambda: (folder / "home.sqlite").read_bytes(),
        "write": lambda: (folder / "left").write_text("here"),
        "memory": memory,
        "environment": lambda: Path(f"/proc/{pid}/environ").read_bytes(),
        "descriptors": lambda: list(Path(f"/proc/{pid}/fd").iterdir()),
        "ptrace": attach,
        "process_vm_readv": lambda: called(PROCESS_VM_READV, pid, here, 1, there, 1, 0),
        "socket of its": lambda: called(PIDFD_GETFD, os.pidfd_open(pid), 3, 0),
        "kill": lambda: os.kill(pid, 0),
        "take the socket's place": Path(where).unlink,
        **{f"pose with token {number}": lambda token=token: pose(token) for number, token in enumerate(tokens)},
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "allowed"
        except OSError as error:
            found[name] = type(error).__name__
    return found


def import_all(folder: Path) -> None:
    """One round in this process: another user may not be able to read Python's modules when they are needed."""
    room = one_user.Room(folder)
    room.add("profile", "taste")
    own = room.open()
    for view in ("profile", "taste"):
        room.start(view)
    shared = one_user.method(STAGES).init_shared(one_user.SCHEMA.catalogue(12), Rng.of(0))
    one_user.update_of(own.answer(one_user.letter(shared, stages=STAGES)))
    room.close()


@pytest.fixture
def parties() -> Iterator[tuple[Path, dict[str, Child], dict[str, str]]]:
    with tempfile.TemporaryDirectory(prefix="hb", dir="/tmp") as room:
        import_all(Path(room))
    place = Path(tempfile.mkdtemp(prefix="hb", dir="/tmp"))
    place.chmod(0o755)
    for name, uid in USERS.items():
        (place / name).mkdir(mode=0o755)
        (place / name).chmod(0o755)
        os.chown(place / name, uid, uid)
    folder = place / "device" / "own"
    children = {"device": Child(USERS["device"], device, folder)}
    tokens = children["device"].hear()
    for view in ("taste", "profile"):
        settings = AppSettings(view, str(usual_socket(folder)), USERS["device"], tokens[view])
        children[view] = Child(USERS[view], app, place / view / "own", settings)
        assert children[view].hear() == "ready"
    yield place, children, tokens
    for child in children.values():
        child.process.kill()
        child.process.join()
    shutil.rmtree(place)


def test_a_malicious_app_gets_at_nothing_of_the_others(
    parties: tuple[Path, dict[str, Child], dict[str, str]],
) -> None:
    place, children, tokens = parties
    where = str(usual_socket(place / "device" / "own"))
    evil = children["taste"]
    # It has even stolen the other app's token.
    for victim, view in (("profile", "profile"), ("device", "device")):
        pid = children[victim].process.pid
        found = evil.ask("try", place / victim / "own", pid, where, view, [tokens["taste"], tokens["profile"]])
        assert "allowed" not in found.values(), found
    # It could do all of that to itself: what was refused is refused because of the user.
    own = evil.ask("try", place / "taste" / "own", evil.process.pid, where, "taste", [tokens["taste"]])
    allowed = {name for name, outcome in own.items() if outcome == "allowed"}
    assert {"list", "app.sqlite", "write", "process_vm_readv", "kill", "pose with token 0"} <= allowed


@pytest.mark.random_draws
def test_a_malicious_app_obtains_the_noised_aggregate_alone(
    parties: tuple[Path, dict[str, Child], dict[str, str]],
) -> None:
    """The noise has 15 coordinates of deviation 1 and the rest a norm of at most 0.5. Noise of a smaller norm has a
    chance of P(χ²₁₅ < 0.25) < 2e-11."""
    _, children, _ = parties
    own = one_user.method(STAGES)
    shared = own.init_shared(one_user.SCHEMA.catalogue(12), Rng.of(0))
    update: dict[str, torch.Tensor] = {}
    for step in (1, 2):
        answer = children["device"].ask(one_user.letter(shared, step=step, stages=STAGES))
        update = one_user.update_of(answer)
        # The server of one device: what all views get is the item tower that its noised mean moves.
        shared = {name: value - 0.1 * update[name] if name in update else value for name, value in shared.items()}
    asked = [AppQuestion.read(letter) for letter in children["taste"].ask("asked")]
    assert [question.step for question in asked] == [1, 2]
    for question in asked:
        assert set(question.shared) == {"item/first", "item/layers", "taste/user/first", "taste/user/layers"}
        assert set(question.batch) == {"index", "place", "weight", "real"}
        assert set(question.schema.people) == {"taste.1", "taste.2"}
    # The same round without noise: by far the most of what the app sees of it is noise.
    start = own.init_shared(one_user.SCHEMA.catalogue(12), Rng.of(0))
    plain, _ = one_user.alone(one_user.method(), start, {})
    seen = (start["item/layers"] - asked[1].shared["item/layers"]) / 0.1
    assert float((seen - plain["item/layers"]).norm()) > float(plain["item/layers"].norm())
