"""How a device is served: what leaves it, what is charged, and what a kill at any step leaves behind."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from homebody.core import Catalogue, Rows
from homebody.errors import HomebodyError, Unavailable
from homebody.federation.device import client as client_module
from homebody.federation.device import serving as serving_module
from homebody.federation.device.disclosures import disclosure
from homebody.federation.device.home import Home
from homebody.federation.device.serving import Asker, Recommendation, recommend
from homebody.federation.device.store import HomeStore
from homebody.federation.wire import decode_letter, encode_letter, encode_tree
from homebody.methods import build
from homebody.methods.fedials import FedIALS
from homebody.privacy import Charge, Ledger, PureRelease
from homebody.privacy.queries import Query
from homebody.rng import Rng
from homebody.serving.client import Client, Offer, RefusedRequest, list_path, told_of
from homebody.serving.model import AtHome, Served, rank
from homebody.serving.rows import Part

DAY = 86_400
ITEMS, ROWS, FACTORS = 120, 20, 4


def model(seed: int = 0, query: str | None = "choice:epsilon=5,interests=16") -> Served:
    """A model whose items lie somewhere."""
    method, catalogue = FedIALS(factors=FACTORS), Catalogue(ITEMS)
    shared = method.init_shared(catalogue, Rng.of(seed))
    shared["item"] = Rng.of(seed, "items").normal(ITEMS, FACTORS)
    asked, ids = None if query is None else Query.parse(query), [f"i{item}" for item in range(ITEMS)]
    return Served.of("fedials", {"factors": FACTORS}, shared, catalogue, asked, ids=ids, names={"i3": "Three"})


class Shop(Client):
    """A service in this process, on the contract of the real one, which counts what it is asked."""

    def __init__(self, served: Served) -> None:
        self.served, self.version, self.away = served, 1, False
        self.asked: list[str] = []
        self.step: Callable[[], None] = lambda: None
        self.table_bytes, self.ways = 10_000, served.head.ways

    @property
    def lists(self) -> list[str]:
        """The lists that were asked for."""
        return [path for path in self.asked if path.startswith("/v1/lists/")]

    def close(self) -> None: ...

    def model(self) -> Offer:
        self._reached("/v1/model")
        query = self.served.head.query
        choices = len(self.served.head.interests)
        said = (self.served.digest, self.version, ITEMS, "" if query is None else str(query), self.ways)
        return Offer(*said, ROWS, choices, ROWS, self.table_bytes)

    def get(self, path: str, *, accept: str = "") -> bytes:
        self._reached(path)
        answer = self.answer(path)
        self.step()
        return answer

    def answer(self, path: str) -> bytes:
        served, (kind, *rest) = self.served, path.removeprefix("/v1/").split("/")
        if rest and rest[0] != served.digest:
            raise RefusedRequest(410, {"error": "It was replaced.", "model": served.digest})
        if kind == "models":
            return served.head.content
        if kind == "table":
            return served.rows().content
        if kind == "shelf":
            return served.rows(served.shelf(ROWS)).content
        return served.rows(served.lists(ROWS // 2)[int(rest[1])]).content

    def post(self, body: bytes, *, accept: str = "") -> bytes:
        header, told = told_of(body)
        self._reached(f"/v1/query {len(body)}")
        if header["model"] != self.served.digest:
            raise RefusedRequest(410, {"error": "It was replaced.", "model": self.served.digest})
        assert told is not None
        choice = told.dtype == "<i4"
        items, scores = self.served.ask(torch.from_numpy(told.copy())[0 if choice else slice(None)], ROWS)
        ranked = [f'{{"id": "i{item}", "score": {score}}}' for item, score in zip(items, scores, strict=True)]
        self.step()
        return f'{{"ranked": [{", ".join(ranked)}]}}'.encode()

    def _reached(self, path: str) -> None:
        self.step()
        if self.away:
            raise Unavailable("The service cannot be reached.")
        self.asked.append(path)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "DRAWING", 0.0)


@pytest.fixture
def shop() -> Shop:
    return Shop(model())


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home.create(tmp_path / "device", server="", budget="eps=1000") as made:
        furnish(made)
        yield made


def furnish(home: Home, mode: str = "query") -> None:
    """Ann has a history, bob has none, and cat takes no part."""
    for name in ("ann", "bob", "cat"):
        home.people.add(name)
    for number, item in enumerate(("i3", "i7", "i50", "unknown", "i3")):
        home.history.append("ann", item, time=number)
    home.history.append("cat", "i9", time=1)
    home.people.opt_out("cat")
    home.be_served("http://127.0.0.1:9", serving_mode=mode)


def asker(home: Home, shop: Shop, now: float | None = None) -> Asker:
    return Asker(home, client=shop, clock=time.time if now is None else lambda: now)


def best(home: Home, shop: Shop, who: str = "ann", k: int = 5) -> Recommendation:
    return recommend(home, home.people.find(who), k, asker=asker(home, shop))


def charged(home: Home, who: str) -> list[str]:
    return [entry.release for entry in home.ledger(who).entries()]


@pytest.mark.parametrize("mode", ["table", "shelf", "auto"])
def test_without_queries_everybody_asks_the_same_and_nothing_is_charged(home: Home, shop: Shop, mode: str) -> None:
    home.be_served(serving_mode=mode)
    found = best(home, shop)
    rows = "/v1/table" if mode in ("table", "auto") else "/v1/shelf"
    assert shop.asked == ["/v1/model", f"/v1/models/{shop.served.digest}", rows]
    assert (found.epsilon, found.spent, charged(home, "ann")) == (0, 0, [])
    part = Part.read(shop.answer(rows))
    alone = rank(shop.served.head, part, AtHome(("i3", "i7", "i50")), 5)
    assert [item.item for item in found.items] == [item for item, _ in alone.items]
    assert found.left_out == len({"i3", "i7", "i50", "unknown"} - set(part.ids))
    assert "nothing was told" in found.notes[-1]
    assert not asker(home, shop).wanted


def test_auto_takes_the_shelf_where_the_table_is_large(home: Home, shop: Shop) -> None:
    home.be_served(serving_mode="auto")
    for size in (65 << 20, 0):  # 0: larger than the service sends
        shop.table_bytes = size
        home.queries.hurry()
        assert best(home, shop).way == "shelf"
    home.be_served(serving_mode="table")
    assert best(home, shop).way == "table"


def test_of_a_table_only_what_changed_comes_again(home: Home, shop: Shop) -> None:
    home.be_served(serving_mode="table")
    first = {item.item for item in best(home, shop, k=ITEMS).items}
    assert len(first) == ITEMS - 3
    home.queries.hurry()
    best(home, shop)
    assert [path for path in shop.asked if "table" in path] == ["/v1/table"], "Nothing has changed."

    def changed(path: str) -> bytes:
        if path != "/v1/table?since=1":
            return Shop.answer(shop, path)
        header, parts = decode_letter(replace(shop.served, version=4).rows([5, 8]).content)
        return encode_letter({**header, "since": 1, "removed": ["i8", "i20", "never there"]}, parts)

    shop.answer, shop.version = changed, 4  # type: ignore[method-assign]
    home.queries.hurry()
    after = best(home, shop, k=ITEMS)
    assert {item.item for item in after.items} == first - {"i20"}
    table = home.received.get("table")
    assert table is not None
    assert table.version == 4


def test_a_query_brings_a_list_and_is_charged_once(home: Home, shop: Shop) -> None:
    found = best(home, shop)
    assert len(shop.lists) == 2, "Bob asks too, who has no history; cat does not."
    assert (found.way, found.epsilon, found.spent) == ("query", 5.0, 5.0)
    assert charged(home, "ann") == charged(home, "bob") == ["query/choice/1"]
    assert not home.ledger_file("cat").exists()
    again = best(home, shop)
    assert again.items == found.items
    assert len(shop.lists) == 2
    (query,) = home.queries.of("ann")
    brought = Part.read(query.answer or b"")
    assert query.answer in {shop.answer(path) for path in shop.lists}
    everyone = Part.read(shop.answer("/v1/shelf"))
    assert {item.item for item in found.items} <= {*everyone.ids, *brought.ids}
    assert best(home, shop, "cat").way == "shelf"
    assert len(shop.lists) == 2


def test_the_server_ranks_and_what_people_have_is_left_out(home: Home, shop: Shop) -> None:
    home.be_served(serving_mode="server")
    shop.ways = ("shelf", "server")
    found = best(home, shop, k=ROWS)
    assert found.way == "server"
    assert not {item.item for item in found.items} & {"i3", "i7", "i50"}
    assert len(found.items) >= ROWS - 3
    assert [path.partition(" ")[0] for path in shop.asked if "query" in path] == ["/v1/query"] * 2
    assert charged(home, "ann") == ["query/choice/1"]


@pytest.mark.parametrize(
    "query",
    [
        "unit:epsilon=5",
        "attention:epsilon=5,interests=5",
        "attention:epsilon=5,delta=1e-3,interests=5,guarantee=published",
        "vector:epsilon=5,delta=1e-3",
    ],
)
def test_every_mechanism_is_charged_as_what_it_costs(home: Home, query: str) -> None:
    shop = Shop(model(query=query))
    shop.ways = ("shelf", "server")
    home.be_served(serving_mode="server")
    found = best(home, shop)
    mechanism = shop.served.head.mechanism
    assert mechanism is not None
    cost = Ledger().epsilon("server", delta=1e-6, also=[Charge("server", "user", mechanism.event)]).epsilon
    assert (found.way, found.epsilon, found.spent) == ("server", cost, cost)
    if "published" in query or "vector" in query:
        assert cost > 5, "δ is 1e-6 here, and the published noise is for another distance."
    assert len({path for path in shop.asked if "query" in path}) == 1, "Ann's and Bob's have one length."
    assert charged(home, "ann") == [f"query/{query.partition(':')[0]}/1"]


def test_what_is_asked_has_one_length_and_names_no_item(home: Home, shop: Shop) -> None:
    for turn in range(12):
        asker(home, shop, turn * DAY).take_turn()
    assert len(shop.lists) == 24
    assert len(set(shop.lists)) > 2
    assert {len(path) for path in shop.lists} == {len(list_path(shop.served.digest, 0))}
    others = set(shop.asked) - set(shop.lists)
    assert others == {"/v1/model", f"/v1/models/{shop.served.digest}", "/v1/shelf"}


def test_rows_of_ones_own_that_came_with_earlier_lists_count(home: Home, shop: Shop) -> None:
    now = 0.0
    everyone = set(Part.read(shop.answer("/v1/shelf")).ids)
    seen: set[str] = set()
    for turn in range(6):
        now = turn * DAY
        asker(home, shop, now).take_turn()
        seen |= set(Part.read(home.queries.answers("ann", shop.served.digest)[0].answer or b"").ids)
    for item in sorted(seen - everyone):
        home.history.append("ann", item, time=100)
    asked = len(shop.asked)
    home.be_served(serving_every=366 * DAY)
    found = recommend(home, home.people.find("ann"), 5, asker=asker(home, shop, now))
    assert len(shop.asked) == asked
    assert found.left_out == len({"i3", "i7", "i50", "unknown"} - everyone - seen)


class Killed(BaseException):
    """Stands for the end of the process."""


@contextmanager
def killed_at(place: int, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """End the process at the n-th step: after each write to the store or a ledger, before each, and around requests."""
    steps = [0]

    def step() -> None:
        steps[0] += 1
        if steps[0] == place:
            raise Killed

    writing, charge = HomeStore.writing, Ledger.charge

    @contextmanager
    def stored(self: HomeStore, **options: Any) -> Iterator[Any]:
        inner = self.connection.in_transaction
        with writing(self, **options) as db:
            yield db
        if not inner:
            step()

    def noted(self: Ledger, *words: Any, **options: Any) -> None:
        step()
        charge(self, *words, **options)
        step()

    with monkeypatch.context() as patch:
        patch.setattr(HomeStore, "writing", stored)
        patch.setattr(Ledger, "charge", noted)
        shop.step = step
        try:
            yield steps
        except Killed:
            pass
        finally:
            shop.step = lambda: None


def test_a_kill_at_any_step_loses_no_charge_spends_none_twice_and_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, place, killed = model(query="choice:epsilon=0.5,interests=64"), 0, True
    memory = Path("/dev/shm")  # homes write through to the disk at every step
    folder = memory if memory.is_dir() else tmp_path
    folder = folder / tmp_path.name
    with Home.create(folder / "new", server="", budget="eps=1000") as new:
        furnish(new)
    try:
        while killed:
            place += 1
            here, shop = folder / f"killed{place}", Shop(served)
            shutil.copytree(folder / "new", here)
            with Home(here) as home, killed_at(place, shop, monkeypatch) as steps:
                asker(home, shop, 5.0).take_turn()
            killed = steps[0] == place
            with Home(here) as home:
                told, paid = len(set(shop.lists)), sum(len(charged(home, who)) for who in ("ann", "bob"))
                assert told <= paid, "Nothing leaves that was not charged."
                asker(home, shop, 6.0).take_turn()
                asker(home, shop, 7.0).take_turn()
                assert charged(home, "ann") == charged(home, "bob") == ["query/choice/1"]
                assert len(set(shop.lists)) <= 2, "What is sent again is the same."
                for who in ("ann", "bob"):
                    (query,) = home.queries.of(who)
                    assert query.state == "answered"
                    assert query.answer in {shop.answer(path) for path in shop.lists}
                assert not asker(home, shop, 8.0).wanted
            shutil.rmtree(here)
        assert place > 20
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_service_that_is_away_costs_nothing_and_what_came_before_is_used(home: Home, shop: Shop) -> None:
    shop.away = True
    with pytest.raises(Unavailable):
        best(home, shop)
    assert (charged(home, "ann"), home.queries.turn()) == ([], None)
    shop.away = False
    first = best(home, shop)
    home.queries.hurry()
    shop.away = True
    again = best(home, shop)
    assert again.items == first.items
    assert "cannot be reached" in again.notes[0]
    assert charged(home, "ann") == ["query/choice/1"]


def test_a_service_that_goes_away_between_is_told_the_same_later(home: Home, shop: Shop) -> None:
    reached = shop._reached

    def hang_up(path: str) -> None:
        reached(path)
        if path.startswith("/v1/lists/"):
            raise Unavailable("The answer was lost.")

    shop._reached = hang_up  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(Unavailable):
            asker(home, shop).take_turn()
    shop._reached = reached  # type: ignore[method-assign]
    asker(home, shop).take_turn()
    assert len(shop.lists) == 5
    assert len(set(shop.lists[:4])) == 1
    assert charged(home, "ann") == charged(home, "bob") == ["query/choice/1"]


def test_with_new_interests_a_fresh_query_is_charged_and_new_items_cost_nothing(home: Home, shop: Shop) -> None:
    asker(home, shop, 0).take_turn()
    shop.version += 1
    asker(home, shop, 10).take_turn()
    assert charged(home, "ann") == ["query/choice/1"]
    before = shop.served.digest
    reached = shop._reached

    def reload(path: str) -> None:
        reached(path)
        if path.startswith("/v1/lists/") and shop.served.digest == before:
            shop.served = model(seed=1)

    shop._reached = reload  # type: ignore[method-assign]
    asker(home, shop, DAY).take_turn()
    states = [(query.turn, query.model, query.state) for query in home.queries.of("ann")]
    after = shop.served.digest
    assert states == [(1, before, "answered"), (2, before, "gone"), (2, after, "answered")]
    assert charged(home, "ann") == ["query/choice/1", "query/choice/2", "query/choice/2#2"]
    assert charged(home, "bob") == ["query/choice/1", "query/choice/2"], "His query was not charged when it was gone."
    assert best(home, shop).way == "query"


def test_a_service_that_changes_its_model_all_the_time_is_told_twice_a_turn_at_most(home: Home, shop: Shop) -> None:
    reached = shop._reached

    def reload(path: str) -> None:
        reached(path)
        if path.startswith("/v1/lists/"):
            shop.served = model(seed=len(shop.lists))

    shop._reached = reload  # type: ignore[method-assign]
    for now in range(5):
        asker(home, shop, now).take_turn()
    assert charged(home, "ann") == ["query/choice/1", "query/choice/1#2"]
    assert not asker(home, shop, 6).wanted


def test_a_service_that_refuses_a_query_is_not_asked_it_again(home: Home, shop: Shop) -> None:
    def refuse(path: str) -> bytes:
        if path.startswith("/v1/lists/"):
            raise RefusedRequest(404, {"error": "No such choice."})
        return Shop.answer(shop, path)

    shop.answer = refuse  # type: ignore[method-assign]
    found = best(home, shop)
    assert {query.state for query in home.queries.of("ann")} == {"gone"}
    assert (found.way, len(shop.lists)) == ("shelf", 1)
    assert not asker(home, shop).wanted


def test_a_clock_that_is_set_back_spends_nothing(home: Home, shop: Shop) -> None:
    asker(home, shop, 100 * DAY).take_turn()
    for now in (5 * DAY, 5 * DAY + 10, 6 * DAY - 1):
        assert not asker(home, shop, now).wanted
        asker(home, shop, now).take_turn()
    assert charged(home, "ann") == ["query/choice/1"]
    asker(home, shop, 6 * DAY).take_turn()
    assert charged(home, "ann") == ["query/choice/1", "query/choice/2"]


def test_past_the_budget_the_last_answer_is_used_again(home: Home, shop: Shop) -> None:
    home.configure(budget="eps=11,observer=server")
    for turn in range(4):
        asker(home, shop, turn * DAY).take_turn()
    assert charged(home, "ann") == ["query/choice/1", "query/choice/2"]
    assert [query.state for query in home.queries.of("ann")] == ["answered", "answered", "refused", "refused"]
    assert len(shop.lists) == 4
    found = recommend(home, home.people.find("ann"), 5, asker=asker(home, shop, 3 * DAY))
    assert (found.way, found.epsilon, found.spent) == ("query", 5.0, 10.0)
    assert len(shop.lists) == 4
    queries = disclosure(home, "ann")["queries"]
    assert (queries["left"], queries["refused"], queries["kinds"]) == (2, 2, {"choice": 2})
    assert queries["lasts"]["queries"] == 0


def test_training_and_queries_share_the_budget(home: Home, shop: Shop) -> None:
    home.configure(budget="eps=8,observer=server")
    home.ledger("ann").charge("train/1", [Charge("server", "user", PureRelease(5.0))])
    found = best(home, shop)
    assert charged(home, "ann") == ["train/1"]
    assert charged(home, "bob") == ["query/choice/1"]
    assert (found.way, found.spent) == ("shelf", 5.0)
    assert "The budget allows no query." in found.notes


def test_the_ledger_says_how_long_the_budget_lasts(home: Home, shop: Shop) -> None:
    home.configure(budget="eps=23,observer=server")
    asker(home, shop).take_turn()
    queries = disclosure(home, "ann")["queries"]
    assert queries["lasts"]["queries"] >= 3
    assert queries["lasts"]["seconds"] == queries["lasts"]["queries"] * DAY
    home.configure(budget=None)
    assert 5 < disclosure(home, "ann")["queries"]["epsilon_in_30_days"] <= 31 * 5
    lines = disclosure(home, "ann")["ledger"]["lines"]
    assert [line["rounds"] for line in lines] == ["query/choice, round 1"]


def test_a_full_disk_sends_nothing_that_is_not_written_down(home: Home, shop: Shop) -> None:
    asker(home, shop, 0).take_turn()
    db = home.store.connection
    ((pages,),) = db.execute("PRAGMA page_count")
    db.execute(f"PRAGMA max_page_count = {pages}")
    home.history.append("ann", "x" * 900)
    lists = len(shop.lists)

    def go_on() -> None:
        for turn in range(1, 40):
            asker(home, shop, turn * DAY).take_turn()

    with pytest.raises(HomebodyError, match="full"):
        go_on()
    told = len(shop.lists) - lists
    assert told <= sum(len(charged(home, who)) for who in ("ann", "bob")) - 2
    db.execute("PRAGMA max_page_count = 1000000")
    asker(home, shop, 41 * DAY).take_turn()
    assert not home.queries.open(shop.served.digest)
    for who in ("ann", "bob"):
        left = [query for query in home.queries.of(who) if query.left is not None]
        assert len(charged(home, who)) == len(left)


def test_two_processes_of_a_device_tell_once(home: Home, shop: Shop) -> None:
    """Each has a connection of its own, as two processes have."""
    together, failed = threading.Barrier(2), list[BaseException]()

    def work() -> None:
        try:
            with Home(home.path) as own:
                together.wait(60)
                asker(own, shop, 5).take_turn()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed
    assert len(set(shop.lists)) <= 2
    assert charged(home, "ann") == charged(home, "bob") == ["query/choice/1"]
    assert [query.state for who in ("ann", "bob") for query in home.queries.of(who)] == ["answered"] * 2


def test_whoever_opts_out_while_the_service_is_asked_tells_nothing_more(home: Home, shop: Shop) -> None:
    reached = shop._reached

    def leave(path: str) -> None:
        reached(path)
        if path.startswith("/v1/lists/"):
            home.people.opt_out("bob")

    shop._reached = leave  # type: ignore[method-assign]
    asker(home, shop).take_turn()
    assert len(shop.lists) == 1
    assert [query.state for query in home.queries.of("bob")] == ["gone"]
    assert charged(home, "bob") == []


def test_a_mode_that_the_service_does_not_offer_is_refused_in_a_sentence(home: Home) -> None:
    shop = Shop(model(query=None))
    with pytest.raises(HomebodyError, match="--mode query: it offers table, shelf"):
        best(home, shop)
    home.be_served("")
    with pytest.raises(HomebodyError, match="has no service: give it one with"):
        recommend(home, home.people.find("ann"))


def test_a_device_that_trained_the_served_model_ranks_with_its_private_state(home: Home) -> None:
    """Its own numbers of items are others than the service's."""
    name, fields = "pfedrec", {"factors": FACTORS}
    method = build(name, fields)
    shared = method.init_shared(Catalogue(ITEMS), Rng.of(0))
    ids = [f"i{item}" for item in range(ITEMS)]
    shop = Shop(Served.of(name, fields, shared, Catalogue(ITEMS), None, ids=ids, run="devices"))
    home.be_served(serving_mode="shelf")
    home.items.add(0, [(item, "") for item in reversed(ids)])
    local = method.init_local(shared, Rng.of(1))
    own = Rng.of(2).normal(4, FACTORS)
    numbers = torch.tensor([3, 7, 50, 111])
    state = {**local, "item": Rows(ITEMS - 1 - numbers, own, ITEMS)}
    letter = encode_letter({"phase": "train"}, {"state": encode_tree(state)})
    home.models.put_state("ann", "devices", 4, None, letter)
    part = Part.read(shop.answer("/v1/shelf"))
    for run, trained in (("devices", True), ("another", False)):
        home.models.rank_with(json.dumps({"run": run}), "digest", "train/4", 4)
        found = best(home, shop)
        known = AtHome(["i3", "i7", "i50"], local={**local, "item": Rows(numbers, own, ITEMS)} if trained else None)
        assert [(item.item, item.score) for item in found.items] == rank(shop.served.head, part, known, 5).items


def test_what_a_service_sends_is_checked(home: Home, shop: Shop) -> None:
    for wrong, said in (
        (b"", "too short"),
        (b"HB\1\0\0\0\0\0", "header"),
        (model(1).head.content, "changed its model"),
    ):
        shop.answer = lambda path, wrong=wrong: wrong if "models" in path else Shop.answer(shop, path)  # type: ignore
        with pytest.raises(HomebodyError, match=said):
            best(home, shop)
    assert charged(home, "ann") == []


def test_a_running_client_asks_by_the_clock_and_tries_again(
    home: Home, shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop, waits = threading.Event(), list[float]()
    looks = iter([True, True, False, False])

    def wait(seconds: float) -> bool:
        """In the place of the event's: nothing is waited for."""
        waits.append(seconds)
        shop.away = next(looks, False)
        if len(waits) == 5:
            home.configure(paused=True)
            home.queries.hurry()
        if len(waits) == 8:
            stop.set()
        return stop.is_set()

    stop.wait = wait  # type: ignore[method-assign,assignment]
    shop.away = True
    monkeypatch.setattr(serving_module, "Client", lambda *_, **__: shop)
    client_module._keep_asking(home.path, stop)
    assert charged(home, "ann") == charged(home, "bob") == ["query/choice/1"]
    said = capsys.readouterr().err
    assert said.count("cannot be reached") == 1, "It is said once."
    assert said.count('"served"') == 1
    assert waits[:3] == [0.2, 0.4, 0.8]
    assert "i3" not in said
