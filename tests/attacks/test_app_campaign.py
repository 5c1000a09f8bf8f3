"""Spoilt frames to the desk of a device, and spoilt questions to an app, over a real Unix socket.

Whatever a peer sends, the desk goes on: it takes no gradient that is not of the right names, shapes and size, seats
nobody without the right token, and an honest app is answered afterwards. Whatever a device asks, an app answers with a
letter, and its folder stays whole.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.attacks.conftest import Campaign
from tests.attacks.test_letter_campaign import JUNK, Letters
from tests.federation.device.test_apps import SCHEMA, STAGES, Room, ann, method
from tests.processes import PATIENCE, wait_until

from homebody.core import Rows, Tree
from homebody.federation import wire
from homebody.federation.app.folder import AppFolder, AppSettings
from homebody.federation.app.process import App
from homebody.federation.device.desk import LARGEST, RELAY, Desk, SentQuestion
from homebody.federation.views import AppQuestion, hello, receive, send
from homebody.rng import Rng

PARTS = 4
"""Of each campaign, each with a seed of its own."""
SECRET = "taste.1"


@pytest.fixture
def room() -> Iterator[Room]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="hb", dir=memory if os.access(memory, os.W_OK) else None) as place:
        opened = Room(Path(place))
        yield opened
        opened.close()


def question(do: str = "gradient", step: int = 1, *, semi: bool = False) -> AppQuestion:
    """A question as a device writes it."""
    own = method(aggregate_users=not semi)
    shared = own.init_shared(SCHEMA.catalogue(12), Rng.of(0))
    batch = own.prepare(ann(), Rng.of(step))
    training = do == "gradient"
    return AppQuestion(
        do=do,
        run="feedbeef00",
        release=f"train/{step}",
        ask=f"ask{step}",
        step=step,
        keep=None,
        view="taste",
        person="ann",
        n_items=12,
        method="fl-mv-dssm",
        fields={
            "views": "profile,taste",
            "widths": "4,3",
            "batch_size": 4,
            "negatives": 2,
            "aggregate_users": not semi,
        },
        stages=[*STAGES, "view-noise:z=1"],
        phase="train",
        parts=["item/first", "item/layers"] if semi else ["item/first", "item/layers", "user/first", "user/layers"],
        shared={name: value for name, value in shared.items() if not name.startswith("profile/")},
        batch={name: value for name, value in batch.items() if not name.endswith("/input")} if training else {},
        schema=SCHEMA,
    )


def asked() -> SentQuestion:
    """What a device asks the app of `taste`, and what it accepts."""
    one = question()
    silence = method().silence("taste", one.shared | method().init_shared(SCHEMA.catalogue(12), Rng.of(0)))
    return SentQuestion(one.content(), wire.shapes(silence))


class Peer:
    """Somebody at the socket, with the token of an app or without."""

    def __init__(self, room: Room, seed: int, answer: Tree) -> None:
        self.room, self.answer = room, answer
        self.letters = Letters(seed, ["fcf"])
        self.rng = self.letters.rng

    def any(self, options: Any) -> Any:
        return self.letters.any(options)

    def first(self) -> bytes:
        """A hello that is not one, in one of many ways."""
        token = self.room.tokens["taste"]
        right = hello("taste", token)
        kind = int(self.rng.integers(6))
        if kind == 0:
            return hello(self.any(["taste", "profile", "", "nobody", "x" * 300]), self.any(["", "wrong", token[::-1]]))
        if kind == 1:
            header = {"hello": self.any(JUNK), "view": self.any(JUNK), "token": self.any(JUNK)}
            with suppress(wire.Malformed, ValueError, UnicodeError, TypeError):
                return wire.encode_letter(header)
            return b"{}"
        if kind == 2:
            return self.letters.bytes(right) + 16 * b"x"  # `frame` cuts up to one byte off: it must stay wrong
        if kind == 3:
            return self.rng.bytes(int(self.rng.integers(0, 5000)))
        if kind == 4:
            return hello("profile", token)
        return RELAY

    def frame(self, letter: bytes) -> bytes:
        """A letter with its length, which may lie; it may be cut."""
        length = len(letter) + int(self.any([0, 0, 0, 0, 1, -1, 7, 2**40, 2**62]))
        framed = struct.pack("<Q", max(0, length)) + letter
        return framed[: int(self.rng.integers(0, len(framed)))] if self.letters.chance(0.2) else framed

    def reply(self, to: bytes) -> bytes:
        """An answer to a question that went wrong on some layer; now and then it is as it should be."""
        update = dict(self.answer)
        header: dict[str, Any] = {"to": wire.digest(to)}
        kind = int(self.rng.integers(9))
        name = self.any(list(update))
        if kind == 0:
            update[name] = self._with(update[name], self.any([torch.nan, torch.inf, 1e9, -3e38, 2 * LARGEST]))
        elif kind == 1:
            update[name] = torch.zeros([int(side) for side in self.rng.integers(0, 9, int(self.rng.integers(0, 4)))])
        elif kind == 2:
            update = self.letters._tree()
        elif kind == 3:
            update.pop(name)
        elif kind == 4:
            value = update[name]
            wide = value.value if isinstance(value, Rows) else value
            other = wide.to(self.any([torch.int64, torch.float64, torch.bool, torch.float16]))
            update[name] = Rows(value.index, other, value.size) if isinstance(value, Rows) else other
        elif kind == 5:
            header[self.any(["to", "refused", "x"])] = self.any(JUNK)
        elif kind == 6:
            return self.letters.bytes(wire.encode_letter(header, {"update": wire.encode_tree(update)}))
        elif kind == 7:
            return self.rng.bytes(int(self.rng.integers(0, 3000)))
        try:
            return wire.encode_letter(header, {self.any(["update"] * 9 + ["other"]): wire.encode_tree(update)})
        except (wire.Malformed, ValueError, UnicodeError, TypeError):
            return b""

    def _with(self, value: Rows | torch.Tensor, fill: float) -> Rows | torch.Tensor:
        numbers = (value.value if isinstance(value, Rows) else value).clone()
        numbers.view(-1)[int(self.rng.integers(numbers.numel()))] = fill
        return Rows(value.index, numbers, value.size) if isinstance(value, Rows) else numbers


def knock(peer: Peer, outcomes: Counter[str]) -> None:
    """Say a spoilt hello. Whatever follows, nobody is seated."""
    with peer.room.connect() as connection, suppress(OSError):
        connection.settimeout(PATIENCE)
        connection.sendall(peer.frame(peer.first()))
        connection.shutdown(socket.SHUT_WR)
        said = b""
        while part := connection.recv(1 << 16):
            said += part
        outcomes["turned_away" if said else "hung_up_on"] += 1
        assert b"welcome" not in said
        return
    outcomes["hung_up_on"] += 1


def take_a_seat(room: Room) -> socket.socket:
    connection = room.connect()
    send(connection, hello("taste", room.tokens["taste"]), PATIENCE)
    header, _ = wire.decode_letter(receive(connection, 4096, PATIENCE))
    assert header == {"welcome": True}
    return connection


def misbehave(peer: Peer, connection: socket.socket) -> None:
    """Read one question, and answer with a spoilt frame, or hang up."""
    with connection, suppress(OSError, wire.Malformed):
        letter = receive(connection, 1 << 20, PATIENCE)
        connection.sendall(peer.frame(peer.reply(letter)))


def fits(update: Tree, wanted: SentQuestion) -> None:
    """What a device may take into its mean."""
    assert update.keys() == wanted.wanted.keys()
    for name, value in update.items():
        expected = wanted.wanted[name]
        numbers = value.value if isinstance(value, Rows) else value
        assert isinstance(value, Rows) == (expected.size is not None)
        assert tuple(numbers.shape[1:] if isinstance(value, Rows) else numbers.shape) == expected.shape
        assert numbers.dtype == expected.kind
        assert bool(torch.isfinite(numbers).all())
        assert float(numbers.abs().max()) <= LARGEST


def besiege(room: Room, count: int, seed: int) -> Counter[str]:
    """So many spoilt hellos, each followed by a question to a seated app that answers with something spoilt."""
    room.add("profile", "taste")
    # An app that vanishes is waited for until the time is up, once: then it is known to be away.
    desk = room.desk = Desk(room.home.path, seconds=PATIENCE, log=room.log)
    query, known = asked(), room.home.views.all()
    answer = wire.decode_tree(wire.decode_letter(honest(room).answer(query.letter))[1]["update"])
    peer, outcomes = Peer(room, seed, answer), Counter[str]()
    for _ in range(count):
        knock(peer, outcomes)
        with desk._changed:
            assert not desk._seats, "A spoilt hello was seated."
            desk._missed.add("taste")  # nobody else will come
        thread = threading.Thread(target=misbehave, args=(peer, take_a_seat(room)))
        wait_until(lambda: "taste" in desk._seats, "the app is seated")
        with desk._changed:
            desk._missed.add("taste")
        thread.start()
        reply = desk.ask({"taste": query}, known)["taste"]
        thread.join()
        outcomes[reply.outcome] += 1
        if reply.outcome == "answered":
            fits(reply.update, query)
        with desk._changed:
            if (seat := desk._seats.pop("taste", None)) is not None:
                seat.connection.close()
    wait_until(lambda: not desk._pending.total(), "every greeting ends")
    room.start("taste")
    wait_until(lambda: "taste" in desk._seats, "the honest app joins")
    after = desk.ask({"taste": query}, known)["taste"]
    assert (after.outcome, after.reason) == ("answered", "")
    assert not any(token in json.dumps(room.logs) for token in room.tokens.values())
    return outcomes


def honest(room: Room) -> App:
    """The app of `taste`, to be asked without a socket."""
    settings = AppSettings("taste", str(room.folder / "no"), os.getuid(), room.tokens.get("taste", "token"))
    folder = AppFolder.create(room.folder / "honest", settings)
    folder.describe({"ann": {"taste.1": "0.5", "taste.2": "-1.5"}})
    room.apps["honest"] = folder
    return App(folder, room.log)


def test_a_few_spoilt_frames(room: Room) -> None:
    outcomes = besiege(room, 60, seed=5)
    assert outcomes["nonsense"] > 20
    assert outcomes["answered"] > 2
    assert outcomes["turned_away"] > 5
    assert not outcomes["slow"]


@pytest.mark.attack
@pytest.mark.parametrize("part", range(PARTS))
def test_many_spoilt_frames(room: Room, campaign: Campaign, part: int) -> None:
    count = campaign.size(20_000 // PARTS)
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    outcomes = besiege(room, count, seed=31 + part)
    campaign.did(f"frames to a desk, part {part + 1} of {PARTS}", 2 * count, **outcomes)
    assert not outcomes["slow"]
    assert threading.active_count() <= threads + 8
    assert len(list(Path("/proc/self/fd").iterdir())) <= files + 40


class Questions(Letters):
    """Questions that begin as a device writes them, and then go wrong on every layer."""

    def one(self) -> bytes:
        whole = question(
            self.any(["gradient", "gradient", "scores"]), int(self.rng.integers(1, 5)), semi=self.chance(0.5)
        )
        header, parts = wire.decode_letter(whole.content())
        for _ in range(int(self.rng.integers(0, 4))):
            kind = int(self.rng.integers(5))
            if kind == 0 and header:
                header[self.any(list(header))] = self.any(JUNK)
            elif kind == 1 and header:
                del header[self.any(list(header))]
            elif kind == 2:
                header["fields"] = {**_fields(header), self.any(["widths", "views", "gamma", "nosuch"]): self.any(JUNK)}
            elif kind == 3:
                name = self.any(["shared", "batch", "schema"])
                parts[name] = self.bytes(parts.get(name, b""))
            else:
                self._spoil_tree(parts, self.any(["shared", "batch"]))
        try:
            body = wire.encode_letter(header, parts)
        except (wire.Malformed, ValueError, UnicodeError, RecursionError):
            body = self._last
        body = self.bytes(body) if self.chance(0.1) else body
        self._last = body
        return body

    def _spoil_tree(self, parts: dict[str, bytes], which: str) -> None:
        """Other shapes, other kinds, and numbers that lie beside every table."""
        try:
            tree = wire.decode_tree(parts.get(which, b""))
        except wire.Malformed:
            return
        if not tree:
            return
        name, kind = self.any(list(tree)), int(self.rng.integers(4))
        value = tree[name]
        if kind == 0:
            del tree[name]
        elif kind == 1 and value.numel():
            fill = (
                self.any([-2, -1, 0, 3, 10**6, 2**40]) if not value.is_floating_point() else self.any([1e30, torch.nan])
            )
            value.view(-1)[int(self.rng.integers(value.numel()))] = bool(fill) if value.dtype == torch.bool else fill
        elif kind == 2:
            tree[name] = value[: int(self.rng.integers(0, len(value) + 1))] if value.dim() else value
        else:
            tree[name] = value.to(self.any([torch.float32, torch.int64, torch.bool]))
        parts[which] = wire.encode_tree(tree)


def _fields(header: dict[str, Any]) -> dict[str, Any]:
    fields = header.get("fields")
    return dict(fields) if isinstance(fields, dict) else {}


def interrogate(room: Room, count: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    """So many spoilt questions to one app; how they were answered, and accidents that the app noted."""
    app, questions, outcomes, accidents = honest(room), Questions(seed, ["fcf"]), Counter[str](), Counter[str]()
    for number in range(count):
        letter = questions.one()
        room.logs.clear()
        header, parts = wire.decode_letter(app.answer(letter))
        assert header["to"] == wire.digest(letter)
        if "refused" in header:
            outcomes["refused"] += 1
            assert not parts
            assert SECRET not in header["refused"]
            assert str(room.folder) not in header["refused"]
            if header["refused"].startswith("The question cannot be worked on"):
                accidents[header["refused"]] += 1
        else:
            outcomes["answered"] += 1
            wire.decode_tree(parts["update"])
        if number % 50 == 0:
            for person in app.folder.people():
                app.folder.ledger(person).verify()
    after = wire.decode_letter(app.answer(question().content()))
    assert "update" in after[1], after[0]
    return outcomes, accidents


def test_a_few_spoilt_questions(room: Room) -> None:
    outcomes, accidents = interrogate(room, 400, seed=2)
    assert outcomes["refused"] > 100
    assert outcomes["answered"] > 50
    assert not accidents, accidents


@pytest.mark.attack
@pytest.mark.parametrize("part", range(PARTS))
def test_many_spoilt_questions(room: Room, campaign: Campaign, part: int) -> None:
    count = campaign.size(40_000 // PARTS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes, accidents = interrogate(room, count, seed=53 + part)
    campaign.did(f"questions to an app, part {part + 1} of {PARTS}", count, **outcomes)
    assert not accidents, accidents.most_common(20)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 1024, f"The app's memory grew by {grown:.0f} MB."


@pytest.mark.parametrize("place", [-1, 12, 10**6])
def test_a_place_beside_the_rows_is_refused(room: Room, place: int) -> None:
    """Compiled loops would read, and write, beside the table."""
    one = question()
    places = one.batch["place"].clone()
    places[0, 0] = place
    spoilt = replace(one, batch={**one.batch, "place": places})
    header, _ = wire.decode_letter(honest(room).answer(spoilt.content()))
    assert "samples" in header["refused"]


def test_a_table_shorter_than_the_items_features_is_refused(room: Room) -> None:
    one = question("scores")
    spoilt = replace(one, shared={**one.shared, "item/first": one.shared["item/first"][:1]})
    header, _ = wire.decode_letter(honest(room).answer(spoilt.content()))
    assert "tower" in header["refused"]
