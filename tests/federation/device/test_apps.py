"""A device and the apps of its people, over a real Unix socket: what each of them sees, sends and may send."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.processes import wait_until

from homebody.core import Data, Rows, Tree, Update
from homebody.data.codes import Code
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.app.folder import AppFolder, AppSettings
from homebody.federation.app.process import App
from homebody.federation.device.apps import Apps
from homebody.federation.device.desk import RELAY, Desk, Relay, usual_socket
from homebody.federation.device.device import Device
from homebody.federation.device.home import Home
from homebody.federation.device.household import recommend
from homebody.federation.schema import FeatureSchema
from homebody.federation.views import AppQuestion, Vanished, hello, receive, send
from homebody.methods.fl_mv_dssm import FLMVDSSM
from homebody.privacy.specs import parse_channel
from homebody.rng import Rng

ITEMS = [(f"i{n}", f"Item {n}") for n in range(12)]
NUMBER = Code("number", view="taste")
SCHEMA = FeatureSchema(
    {"job": Code("one", ("cook", "vet"), view="profile"), "taste.1": NUMBER, "taste.2": NUMBER},
    {"tags": Code("many", ("new", "old", "odd"), width=2)},
    {"tags": np.tile(np.array([[1, -1], [1, 2], [3, 2]]), (4, 1))},
)
FIELDS = {"views": "profile,taste", "widths": "4,3", "batch_size": 4, "negatives": 2}
STAGES = ["views:clip=0.5"]
CODED = {"job": torch.tensor(2), "taste.1": torch.tensor(0.5), "taste.2": torch.tensor(-1.5)}
HISTORY = (7, 3, 5, 1, 10)
KNOWN = {"profile": {"job": "vet"}, "taste": {"taste.1": "0.5", "taste.2": "-1.5"}}


def method(stages: list[str] = STAGES, **fields: Any) -> FLMVDSSM:
    return FLMVDSSM(uplink=parse_channel(stages), **{**FIELDS, **fields})


def letter(shared: Tree, do: str = "train", step: int = 1, **more: Any) -> bytes:
    content = wire.encode_tree(shared)
    header = {
        "run": "feedbeef00",
        "method": "fl-mv-dssm",
        "fields": FIELDS,
        "stages": STAGES,
        "seed": 1,
        "protocol": "strict",
        "held_out": None,
        "negatives": 5,
        "cutoffs": [3],
        "measures": False,
        "features": SCHEMA.digest,
        "do": do,
        "release": f"train/{step}",
        "step": step,
        "key": 18 + step,
        "clients_key": 5,
        "keep": None,
        "n_items": 12,
        "half": False,
        "first": 40,
        "people": [40],
        "shared": wire.digest(content),
        **more,
    }
    parts = {"items": json.dumps([0, ITEMS]).encode(), "shared": content, "features": SCHEMA.content}
    return wire.encode_letter(header, parts)


def ann(held: int = 0) -> Data:
    items = torch.tensor(HISTORY[: len(HISTORY) - held])
    everything = torch.tensor(sorted(HISTORY))
    return Data(items, torch.ones(len(items), dtype=torch.bool), everything, SCHEMA.catalogue(12), CODED)


def alone(own: FLMVDSSM, shared: Tree, local: Tree, step: int = 1) -> tuple[Update, Tree]:
    """What the method computes where one process holds every view."""
    batch = own.prepare(ann(), Rng(torch.tensor(18 + step)).fold(torch.tensor(40)))
    update, kept = own.client(shared, local, batch)
    return own.uplink.device(update, Rng.of(0)), kept


class Room:
    """A device with a desk, and apps in threads of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.logs, self._stops = folder, list[dict[str, Any]](), list[tuple[Any, threading.Thread]]()
        self.home = Home.create(folder / "device", server="127.0.0.1:9092")
        self.home.people.add("ann")
        for time, item in enumerate(HISTORY):
            self.home.history.append("ann", f"i{item}", time=time)
        self.tokens: dict[str, str] = {}
        self.apps: dict[str, AppFolder] = {}
        self.desk: Desk | None = None

    def log(self, event: str, **facts: Any) -> None:
        self.logs.append({"event": event, **facts})

    def said(self, event: str, **facts: Any) -> list[dict[str, Any]]:
        return [one for one in self.logs if {"event": event, **facts}.items() <= one.items()]

    def add(self, *views: str) -> None:
        for view in views:
            self.tokens[view] = self.home.views.add(view, os.getuid(), same_user=True)

    def open(self, seconds: float = 60.0) -> Device:
        self.desk = Desk(self.home.path, seconds=seconds, log=self.log)
        return Device(self.home, self.log, desk=self.desk, sleep=lambda left: True)

    def start(self, view: str, kind: type[App] = App, **more: Any) -> None:
        if view not in self.apps:
            where = str(usual_socket(self.home.path))
            settings = AppSettings(view, where, os.getuid(), self.tokens[view])
            self.apps[view] = AppFolder.create(self.folder / view, settings)
            self.apps[view].describe({"ann": KNOWN.get(view, {})})
        stop = threading.Event()
        app = kind(self.apps[view], self.log)
        thread = threading.Thread(target=app.run, args=(stop,), daemon=True)
        thread.start()
        self._stops.append((stop, thread))

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(usual_socket(self.home.path)))
        return connection

    def close(self) -> None:
        for stop, _ in self._stops:
            stop.set()
        if self.desk is not None:
            self.desk.close()
        for _, thread in self._stops:
            thread.join()
        for app in self.apps.values():
            app.close()
        self.home.close()


@pytest.fixture
def room() -> Iterator[Room]:
    memory = Path("/dev/shm")  # homes write through to the disk at every step, and a socket's path is short
    with tempfile.TemporaryDirectory(prefix="hb", dir=memory if os.access(memory, os.W_OK) else None) as place:
        made = Room(Path(place))
        yield made
        made.close()


@pytest.fixture
def shared() -> Tree:
    return method().init_shared(SCHEMA.catalogue(12), Rng.of(0))


def update_of(answer: bytes) -> Tree:
    header, parts = wire.decode_letter(answer)
    assert "40" in parts, header
    return wire.decode_tree(parts["40"])


def near(found: Tree, wanted: Tree) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        one, other = (part.dense() if isinstance(part, Rows) else part for part in (found[name], value))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_two_apps_give_what_one_process_with_both_views_gives(room: Room, shared: Tree) -> None:
    room.add("profile", "taste")
    device = room.open()
    room.start("profile")
    room.start("taste")
    wanted, _ = alone(method(), shared, {})
    near(update_of(device.answer(letter(shared))), wanted)
    assert {view.name: view.answered for view in room.home.views.all()} == {"profile": 1, "taste": 1}


def test_towers_that_stay_home_stay_in_the_apps(room: Room) -> None:
    semi = method(aggregate_users=False)
    fields = {**FIELDS, "aggregate_users": False}
    room.add("profile", "taste")
    device = room.open()
    room.start("profile")
    room.start("taste")
    shared = semi.init_shared(SCHEMA.catalogue(12), Rng.of(0))
    local = semi.init_local(shared, Rng.of(0))
    for step in (1, 2, 3):
        wanted, kept = alone(semi, shared, local, step)
        found = update_of(device.answer(letter(shared, step=step, fields=fields)))
        near(found, wanted)
        assert set(found) == {"item/first", "item/layers"}
        local = {name: kept[name] for name in local}
        shared = {name: value + 0.01 for name, value in shared.items()}
    for view, app in room.apps.items():
        tower = app.tower("ann", "feedbeef00", 4)
        assert tower is not None
        near(tower, {name: value for name, value in local.items() if name.startswith(f"{view}/")})
    assert room.home.models.state("ann", "feedbeef00") is None


def test_a_round_that_is_asked_again_is_computed_from_the_same_tower(room: Room) -> None:
    semi = method(aggregate_users=False)
    room.add("profile", "taste")
    device = room.open()
    room.start("profile")
    room.start("taste")
    shared = semi.init_shared(SCHEMA.catalogue(12), Rng.of(0))
    ask = letter(shared, fields={**FIELDS, "aggregate_users": False})
    first = update_of(device.answer(ask))
    with room.home.store.writing() as db:  # as if the device had been killed before it wrote the answer down
        db.execute("DELETE FROM answer")
        db.execute("DELETE FROM mark")
    again = update_of(Device(room.home, room.log, desk=room.desk).answer(ask))
    near(again, first)
    for app in room.apps.values():
        assert len(app.ledger("ann").entries()) == 1
        assert len(app.seen("ann")) == 1


def test_a_tower_is_replaced_whole_or_not_at_all(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.apps["alone"] = folder = AppFolder.create(room.folder / "alone", AppSettings("taste", "", os.getuid(), ""))
    folder.put_tower("ann", "feedbeef00", 1, {"w": torch.ones(1)}, None)

    def killed(tree: Tree) -> bytes:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr("homebody.federation.app.folder.wire.encode_tree", killed)
        with pytest.raises(RuntimeError):
            folder.put_tower("ann", "feedbeef00", 1, {"w": torch.zeros(1)}, None)
    tower = folder.tower("ann", "feedbeef00", 2)
    assert tower is not None
    assert tower["w"].tolist() == [1.0]


def runs_of(app: AppFolder) -> set[str]:
    return {run for (run,) in app._database.execute("SELECT DISTINCT run FROM tower").fetchall()}


def test_towers_of_old_runs_go_once_the_device_ranks_with_a_newer_one(room: Room) -> None:
    fields = {**FIELDS, "aggregate_users": False}
    shared = method(aggregate_users=False).init_shared(SCHEMA.catalogue(12), Rng.of(0))
    room.add("taste")
    device = room.open()
    room.start("taste")
    app = room.apps["taste"]
    app.put_tower("bob", "feedbeef00", 1, {"w": torch.ones(1)}, None)  # of somebody who takes part no more
    update_of(device.answer(letter(shared, fields=fields)))
    assert runs_of(app) == {"feedbeef00"}
    model = room.home.models.ranking()
    assert model is not None
    assert json.loads(model.description)["run"] == "feedbeef00"
    newer = {"run": "feedbeef01", "fields": fields}
    # Until the first answer of the new run is written down, the device ranks with the old model: its towers stay.
    update_of(device.answer(letter(shared, **newer)))
    assert runs_of(app) == {"feedbeef00", "feedbeef01"}
    assert app.tower("ann", "feedbeef00", 9) is not None
    update_of(device.answer(letter(shared, step=2, **newer)))
    assert runs_of(app) == {"feedbeef01"}
    assert app.tower("bob", "feedbeef00", 9) is None
    (line,) = room.said("dropped towers of old runs")
    assert line["towers"] == 2


def test_a_device_killed_before_it_wrote_its_first_answer_of_a_run_still_ranks_with_the_old_towers(room: Room) -> None:
    fields = {**FIELDS, "aggregate_users": False}
    shared = method(aggregate_users=False).init_shared(SCHEMA.catalogue(12), Rng.of(0))
    room.add("taste")
    device = room.open()
    room.start("taste")
    app = room.apps["taste"]
    update_of(device.answer(letter(shared, fields=fields)))
    before = room.home.models.ranking()
    for step in (1, 2):
        device.answer(letter(shared, step=step, run="feedbeef01", fields=fields))
        assert before is not None
        room.home.models.rank_with(*before)  # as if it had been killed before that
        assert app.tower("ann", "feedbeef00", 9) is not None


def test_ranking_drops_no_tower(room: Room, shared: Tree) -> None:
    """With the model of an older run, while a newer one trains."""
    folder = AppFolder.create(room.folder / "alone", AppSettings("taste", "", os.getuid(), ""))
    room.apps["alone"] = folder
    for run in ("feedbeef00", "feedbeef01"):
        folder.put_tower("ann", run, 1, {"w": torch.ones(1)}, None)
    asked = AppQuestion(
        do="scores",
        run="feedbeef00",
        release="train/1",
        ask="a",
        step=1,
        keep=None,
        view="taste",
        person="ann",
        n_items=12,
        method="fl-mv-dssm",
        fields=FIELDS,
        stages=STAGES,
        phase="train",
        parts=[],
        batch={},
        schema=SCHEMA,
        ranks="feedbeef00",
        shared={name: value for name, value in shared.items() if not name.startswith("profile/")},
    )
    header, _ = wire.decode_letter(App(folder).answer(asked.content()))
    assert "refused" not in header
    assert runs_of(folder) == {"feedbeef00", "feedbeef01"}


def test_a_feature_that_the_model_cannot_read_is_logged_once(room: Room, shared: Tree) -> None:
    room.add("taste")
    room.apps["taste"] = AppFolder.create(
        room.folder / "taste",
        AppSettings("taste", str(usual_socket(room.home.path)), os.getuid(), room.tokens["taste"]),
    )
    room.apps["taste"].describe({"ann": {"1": "abc", "2": "-1.5", "colour": "red"}})
    device = room.open()
    room.start("taste")
    wait_until(lambda: room.desk is not None and "taste" in room.desk._seats, "the app joins")
    for step in (1, 2):
        device.answer(letter(shared, step=step))
    assert len(room.said("answered")) >= 2
    wrong, strange = sorted(one["reason"] for one in room.said("feature ignored"))
    assert "'taste.1' is a number in the server's model, and somebody's value is not" in wrong
    assert "no feature 'taste.colour'" in strange
    assert "abc" not in json.dumps(room.logs)


def test_the_device_works_on_a_view_that_is_no_app(room: Room, shared: Tree) -> None:
    room.home.people.describe("ann", KNOWN["profile"])
    room.add("taste")
    device = room.open()
    room.start("taste")
    wanted, _ = alone(method(), shared, {})
    near(update_of(device.answer(letter(shared))), wanted)


def test_an_app_sees_the_item_tower_its_own_tower_and_the_samples_alone(room: Room, shared: Tree) -> None:
    seen: list[AppQuestion] = []

    class Curious(App):
        def answer(self, letter: bytes) -> bytes:
            seen.append(AppQuestion.read(letter))
            return super().answer(letter)

    room.add("profile", "taste")
    device = room.open()
    room.start("profile")
    room.start("taste", Curious)
    device.answer(letter(shared))
    (asked,) = seen
    assert set(asked.shared) == {"item/first", "item/layers", "taste/user/first", "taste/user/layers"}
    assert set(asked.batch) == {"index", "place", "weight", "real"}
    assert set(asked.schema.people) == {"taste.1", "taste.2"}
    assert asked.person == "ann"


@pytest.mark.parametrize("silent", ["profile", "taste"])
def test_the_mean_divides_by_the_planned_number_where_an_app_is_away(room: Room, shared: Tree, silent: str) -> None:
    other = "taste" if silent == "profile" else "profile"
    room.add("profile", "taste")
    device = room.open(seconds=0.2)
    room.start(other)
    wait_until(lambda: room.said("view joined", view=other), "the app joins")
    found = update_of(device.answer(letter(shared)))
    own = method()
    batch = own.prepare(ann(), Rng(torch.tensor(19)).fold(torch.tensor(40)))
    parts = {f"{other}/{part}": value for part, value in own.view(other, shared, {}, batch).items()}
    parts |= {f"{silent}/{part}": value for part, value in own.silence(silent, shared).items()}
    near(found, own.uplink.device(parts, Rng.of(0)))
    whole = {part: value.dense() if isinstance(value, Rows) else value for part, value in parts.items()}
    common = {part: whole[f"{other}/item/{part}"] for part in ("first", "layers")}
    length = float(torch.stack([value.square().sum() for value in common.values()]).sum().sqrt())
    half = min(1.0, 0.5 * (1 - 2.0**-12) / length) / 2  # of two planned views, though one answered
    near(
        {name: found[name] for name in ("item/first", "item/layers")},
        {f"item/{n}": half * v for n, v in common.items()},
    )
    assert {view.name: view.away for view in room.home.views.all()} == {silent: 1, other: 0}
    (line,) = room.said("view left out")
    assert (line["view"], line["why"]) == (silent, "away")
    assert not torch.count_nonzero(found[f"{silent}/user/first"])


class Twisted(App):
    """An app that sends something else than its gradient."""

    twist: Callable[[bytes, Tree], bytes]

    def answer(self, letter: bytes) -> bytes:
        _, parts = wire.decode_letter(super().answer(letter))
        return type(self).twist(letter, wire.decode_tree(parts["update"]))


def reply(letter: bytes, update: Tree) -> bytes:
    return wire.encode_letter({"to": wire.digest(letter)}, {"update": wire.encode_tree(update)})


def with_layers(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[bytes, Tree], bytes]:
    return lambda letter, update: reply(letter, {**update, "item/layers": change(update["item/layers"])})


def outside(letter: bytes, update: Tree) -> bytes:
    rows = update["item/first"]
    return reply(letter, {**update, "item/first": Rows(rows.index, rows.value, rows.size + 1)})


NONSENSE: dict[str, tuple[Callable[[bytes, Tree], bytes], str]] = {
    "wrong shape": (with_layers(lambda one: one[:-1]), "has another shape"),
    "NaN": (with_layers(lambda one: one * torch.nan), "not finite"),
    "infinite": (with_layers(lambda one: one + torch.inf), "not finite"),
    "10⁹": (with_layers(lambda one: one + 1e9), "numbers over"),
    "another kind": (with_layers(lambda one: one.to(torch.int64)), "another kind"),
    "more rows": (outside, "another shape"),
    "no letter": (lambda letter, update: b"hello", "too short"),
    "no tree": (lambda letter, update: wire.encode_letter({"to": wire.digest(letter)}, {"update": b"x"}), "too short"),
    "another name": (lambda letter, update: reply(letter, {**update, "profile/item/first": torch.ones(2)}), "names"),
    "another question": (lambda letter, update: reply(letter + b"x", update), "another question"),
    "a refusal": (lambda letter, update: wire.encode_letter({"to": wire.digest(letter), "refused": "No."}), "No."),
    "too long": (lambda letter, update: b"\0" * (64 << 20), "longer than it may be"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_left_out_logged_and_counted(room: Room, shared: Tree, name: str) -> None:
    twist, reason = NONSENSE[name]
    room.add("profile", "taste")
    device = room.open()
    room.start("profile")
    room.start("taste", type("Wrong", (Twisted,), {"twist": staticmethod(twist)}))
    found = update_of(device.answer(letter(shared)))
    assert not torch.count_nonzero(found["taste/user/first"])
    assert torch.count_nonzero(found["profile/user/first"])
    (line,) = room.said("view left out")
    assert (line["view"], line["why"]) == ("taste", "nonsense")
    assert reason in line["reason"]
    assert {view.name: view.nonsense for view in room.home.views.all()} == {"profile": 0, "taste": 1}


def test_a_view_cannot_send_more_than_its_clip(room: Room, shared: Tree) -> None:
    def loud(letter: bytes, update: Tree) -> bytes:
        return reply(letter, {**update, "item/layers": update["item/layers"] * 0 + 1e5})

    room.add("profile", "taste")
    device = room.open()
    room.start("profile")
    room.start("taste", type("Loud", (Twisted,), {"twist": staticmethod(loud)}))
    found = update_of(device.answer(letter(shared)))
    norm = (
        sum(
            float((one.dense() if isinstance(one, Rows) else one).square().sum())
            for one in (found["item/first"], found["item/layers"])
        )
        ** 0.5
    )
    assert 0.2 < norm <= 0.5  # two views of at most 0.5, over 2


def test_a_slow_app_is_left_out(room: Room, shared: Tree) -> None:
    release = threading.Event()

    class Slow(App):
        def answer(self, letter: bytes) -> bytes:
            release.wait(60)
            return super().answer(letter)

    room.add("profile", "taste")
    device = room.open(seconds=1.0)
    room.start("profile")
    room.start("taste", Slow)
    wait_until(lambda: len(room.said("view joined")) == 2, "both apps join")
    found = update_of(device.answer(letter(shared)))
    release.set()
    assert not torch.count_nonzero(found["taste/user/first"])
    assert {view.name: view.slow for view in room.home.views.all()} == {"profile": 0, "taste": 1}


def test_an_app_that_is_killed_in_a_round_and_comes_back_is_asked_again(room: Room, shared: Tree) -> None:
    lives: list[int] = []

    class Mortal(App):
        def answer(self, letter: bytes) -> bytes:
            lives.append(1)
            if len(lives) == 1:
                raise ConnectionError  # the connection ends in the middle of the round
            return super().answer(letter)

    room.add("profile", "taste")
    device = room.open()
    room.start("profile")
    room.start("taste", Mortal)
    wanted, _ = alone(method(), shared, {})
    near(update_of(device.answer(letter(shared))), wanted)
    assert len(lives) == 2
    assert not room.said("view left out")


def test_an_app_that_was_missed_is_not_waited_for_until_it_comes_back(room: Room, shared: Tree) -> None:
    room.add("profile", "taste")
    device = room.open(seconds=0.5)
    room.start("profile")
    wait_until(lambda: room.said("view joined"), "the app joins")
    device.answer(letter(shared))
    assert room.desk is not None
    assert room.desk._missed == {"taste"}
    room.start("taste")
    wait_until(lambda: room.said("view joined", view="taste"), "the other joins")
    wanted, _ = alone(method(), shared, {}, 2)
    near(update_of(device.answer(letter(shared, step=2))), wanted)


def turned_away(room: Room, first: bytes) -> bool:
    connection = room.connect()
    try:
        with suppress(Vanished):  # a stranger is hung up on before anything is read
            send(connection, first, 10)
        header, _ = wire.decode_letter(receive(connection, 4096, 10))
        return "refused" in header
    finally:
        connection.close()


def test_nobody_poses_as_another_app(room: Room, shared: Tree) -> None:
    room.add("profile", "taste")
    room.open()
    taste = room.tokens["taste"]
    assert turned_away(room, hello("profile", taste))
    assert turned_away(room, hello("taste", taste[:-1]))
    assert turned_away(room, hello("taste", ""))
    assert turned_away(room, hello("hobby", taste))
    assert not room.said("view joined")
    room.start("taste")
    wait_until(lambda: room.said("view joined", view="taste"), "the true one joins")
    assert turned_away(room, hello("taste", "0" * 64))
    assert room.desk is not None
    assert set(room.desk._seats) == {"taste"}


def test_a_user_of_no_app_is_not_listened_to(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.tokens["taste"] = room.home.views.add("taste", os.getuid() + 1)
    room.open()
    assert turned_away(room, hello("taste", room.tokens["taste"]))
    assert "do not belong together" in room.logs.pop()["reason"]
    monkeypatch.setattr("homebody.federation.device.desk.peer_user", lambda connection: os.getuid() + 2)
    assert turned_away(room, hello("taste", room.tokens["taste"]))
    (line,) = room.said("view refused")
    assert "belongs to this user" in line["reason"]


def test_an_app_talks_to_no_other_user_than_its_devices(room: Room) -> None:
    room.add("taste")
    room.open()
    where = str(usual_socket(room.home.path))
    with AppFolder.create(room.folder / "taste", AppSettings("taste", where, os.getuid() + 1, "secret")) as folder:
        stop = threading.Event()
        thread = threading.Thread(target=App(folder, room.log).run, args=(stop,), daemon=True)
        thread.start()
        wait_until(lambda: room.said("away"), "the app goes away")
        stop.set()
        thread.join()
    assert "A process of another user listens" in room.said("away")[0]["reason"]
    assert not room.said("view joined")


def test_an_app_that_is_removed_is_asked_no_more(room: Room, shared: Tree) -> None:
    room.add("profile", "taste")
    device = room.open(seconds=0.3)
    room.start("profile")
    room.start("taste")
    wait_until(lambda: len(room.said("view joined")) == 2, "both apps join")
    room.home.views.remove("taste")
    found = update_of(device.answer(letter(shared)))
    assert not torch.count_nonzero(found["taste/user/first"])
    room.home.views.add("taste", os.getuid(), same_user=True)  # another token: the old connection counts no more
    found = update_of(device.answer(letter(shared, step=2)))
    assert not torch.count_nonzero(found["taste/user/first"])
    assert {view.name: view.away for view in room.home.views.all()} == {"profile": 0, "taste": 1}


def test_a_view_that_the_server_does_not_know_is_said_once(room: Room, shared: Tree) -> None:
    room.add("profile", "hobby")
    device = room.open()
    room.start("profile")
    for step in (1, 2):
        device.answer(letter(shared, step=step))
    (line,) = room.said("view unknown")
    assert line["reason"].startswith("The server's model has no view 'hobby' (it has profile, taste)")


def test_ledgers_charge_views_once(room: Room) -> None:
    stages = ["views:clip=0.5", "view-noise:z=4"]
    noised = method(stages)
    shared = noised.init_shared(SCHEMA.catalogue(12), Rng.of(0))
    room.add("profile", "taste")
    device = room.open()
    room.start("profile")
    room.start("taste")
    for step in (1, 2, 2):
        device.answer(letter(shared, step=step, stages=stages))
    mine = room.home.ledger("ann")
    assert mine.epsilons()["server"] == float("inf")
    epsilon = mine.epsilons(1e-3)["views"]
    assert 0 < epsilon < 10
    for app in room.apps.values():
        own = app.ledger("ann")
        assert {entry.observer for entry in own.entries()} == {"views"}
        assert own.releases() == 2
        assert own.epsilons(1e-3)["views"] == pytest.approx(epsilon)
        assert [(one.release, one.what, one.items) for one in app.seen("ann")] == [
            ("train/1", "gradient", 4),
            ("train/2", "gradient", 4),
        ]


def test_devices_measure_with_the_scores_of_their_apps(room: Room, shared: Tree) -> None:
    room.add("profile", "taste")
    device = room.open()
    room.start("profile")
    room.start("taste")
    metrics = update_of(device.answer(letter(shared, "evaluate", measures=True)))
    room.home.views.remove("profile")
    room.home.views.remove("taste")
    room.home.people.describe("ann", {**KNOWN["profile"], **KNOWN["taste"]})
    other = Device(room.home, room.log)
    wanted = update_of(other.answer(letter(shared, "evaluate", measures=True, key=99)))
    near(metrics, wanted)
    assert wanted["asked"].tolist() == [1.0]
    room.home.people.describe("ann", dict.fromkeys([*KNOWN["profile"], *KNOWN["taste"]]))
    unknown = update_of(other.answer(letter(shared, "evaluate", measures=True, key=100)))
    assert not torch.equal(unknown["metrics"], wanted["metrics"])


def test_a_device_ranks_with_its_apps_whether_it_runs_or_not(room: Room, shared: Tree) -> None:
    room.add("profile", "taste")
    device = room.open()
    room.start("profile")
    room.start("taste")
    device.answer(letter(shared, "adapt", people=[]))
    person = room.home.people.find("ann")
    assert room.desk is not None
    found = recommend(room.home, person, 12, Apps(room.home, room.desk, room.log))
    scores = method().score(shared, {}, ann(), torch.arange(12))
    wanted = {f"i{item}": float(scores[item]) for item in range(12) if item not in HISTORY}
    assert {one.item: one.score for one in found} == pytest.approx(wanted, abs=1e-6)
    # Another process of the device's asks through the one that runs.
    relayed = recommend(room.home, person, 12, Apps(room.home, Relay(usual_socket(room.home.path)), room.log))
    assert relayed == found
    room.home.views.remove("taste")
    less = recommend(room.home, person, 12, Apps(room.home, Relay(usual_socket(room.home.path)), room.log))
    assert less != found
    room.desk.close()
    with pytest.raises(HomebodyError, match="cannot be reached"):
        recommend(room.home, person, 12, Apps(room.home, Relay(usual_socket(room.home.path)), room.log))


def test_an_app_relays_nothing(room: Room, shared: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    room.add("profile", "taste")
    room.open()
    room.start("profile")
    wait_until(lambda: room.said("view joined"), "the app joins")
    monkeypatch.setattr("homebody.federation.device.desk.peer_user", lambda connection: os.getuid() + 1)
    assert turned_away(room, RELAY)


def test_folders_and_sockets_are_where_and_as_they_should_be(room: Room) -> None:
    room.add("taste")
    room.open()
    room.start("taste")
    for folder in (room.home.path, room.folder / "taste", room.folder / "taste" / "ledgers"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((room.folder / "taste" / "app.sqlite").stat().st_mode) == 0o600
    where = usual_socket(room.home.path)
    assert where.parent == room.home.path.parent
    assert stat.S_ISSOCK(where.stat().st_mode)
    with pytest.raises(HomebodyError, match="longer than 107 bytes"):
        Desk(room.home.path, Path("/tmp") / ("x" * 120))
    (room.folder / "file").write_text("mine")
    with pytest.raises(HomebodyError, match="is no socket"):
        Desk(room.home.path, room.folder / "file")
    assert (room.folder / "file").read_text() == "mine"


def test_two_views_of_one_user_are_refused(room: Room) -> None:
    room.home.views.add("profile", os.getuid() + 1)
    with pytest.raises(HomebodyError, match="'profile' and 'taste' would be processes of one user"):
        room.home.views.add("taste", os.getuid() + 1)
    with pytest.raises(HomebodyError, match="owns this device"):
        room.home.views.add("taste", os.getuid())
    with pytest.raises(HomebodyError, match="has a view 'profile' already"):
        room.home.views.add("profile", os.getuid() + 2)
    with pytest.raises(HomebodyError, match="The name of a view"):
        room.home.views.add("../taste", os.getuid() + 2)
    room.home.views.add("taste", os.getuid() + 1, same_user=True)
    assert [view.name for view in room.home.views.all()] == ["profile", "taste"]
