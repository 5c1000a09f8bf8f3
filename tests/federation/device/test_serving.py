"""How a device is served: what leaves it, what is charged, and what a kill at any step leaves behind."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import PATIENCE, wait_until
from tests.serving.conftest import Running, films, made, news

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
from homebody.privacy import Charge, Ledger, PureRelease
from homebody.rng import Rng
from homebody.serving.client import Client, Offer, RefusedRequest, list_path
from homebody.serving.model import AtHome, Head, Served, rank
from homebody.serving.model_file import Model
from homebody.serving.operator import install, remove
from homebody.serving.rows import Part
from homebody.serving.store import ServiceStore

DAY = 86_400
ITEMS, ROWS, FACTORS = 120, 20, 16
WIDE = "choice:epsilon=0.5,interests=64"
"""Choices that are all alike, so that a second draw would be another one."""


def model(seed: int = 0, query: str = "choice:epsilon=5,interests=16") -> Model:
    """A model whose items lie somewhere."""
    return films(ITEMS, query, seed)


class Shop(Client):
    """A client of a real service on a socket, which counts what it asks. away: nothing reaches the service. reached:
    called with every path once the service has answered. steps: called before each request and after it."""

    def __init__(self, running: Running, asked: list[str] | None = None) -> None:
        super().__init__(running.url)
        self.running, self.away = running, False
        self.asked: list[str] = [] if asked is None else asked
        self.reached: Callable[[str], None] = lambda path: None
        self.step: Callable[[], None] = lambda: None
        self.says: dict[str, Any] = {}
        """What the offer says instead."""

    @property
    def served(self) -> Served:
        """What the service was made from last."""
        with closing(ServiceStore(self.running.folder)) as store:
            return Model.read(store.read_model(store.current().file)).served

    @property
    def lists(self) -> list[str]:
        """The lists that were asked for."""
        return [path for path in self.asked if path.startswith("/v1/lists/")]

    def model(self) -> Offer:
        return super().model()._replace(**self.says)

    def answer(self, path: str) -> bytes:
        """What the service answers somebody else."""
        with Client(self.running.url) as other:
            return other.get(path)

    def serve(self, model: Model) -> None:
        """Serve another model from now on."""
        install(self.running.folder, model)
        with Client(self.running.url) as other:
            wait_until(lambda: other.model().model == model.digest, "the service has the other model")

    def _ask(self, method: str, path: str, body: bytes | None, *rest: Any) -> Any:
        self.step()
        if self.away:
            raise Unavailable("The service cannot be reached.")
        self.asked.append(path if body is None else f"{path} {len(body)}")
        answer = super()._ask(method, path, body, *rest)
        self.reached(path)
        self.step()
        return answer


@pytest.fixture
def shops(tmp_path: Path) -> Iterator[Callable[[Model], Shop]]:
    """Start services of models."""
    opened: list[Shop] = []

    def start(model: Model) -> Shop:
        folder = tmp_path / f"service{len(opened)}"
        opened.append(Shop(Running(folder, made(folder, model, rows=ROWS, answers=ROWS, retire=0))))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
        one.running.close()


@pytest.fixture
def shop(shops: Callable[[Model], Shop]) -> Shop:
    return shops(model())


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "DRAWING", 0.0)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home.create(tmp_path / "device", server="", budget="eps=1000") as made:
        furnish(made)
        yield made


def furnish(home: Home, mode: str = "query") -> None:
    """Ann has a history, bob has none, and cat takes no part."""
    for name in ("ann", "bob", "cat"):
        home.people.add(name)
    for number, item in enumerate(("film-3", "film-7", "film-50", "unknown", "film-3")):
        home.history.append("ann", item, time=number)
    home.history.append("cat", "film-9", time=1)
    home.people.opt_out("cat")
    home.be_served("http://127.0.0.1:9", serving_mode=mode)


def asker(home: Home, shop: Shop, now: float | None = None) -> Asker:
    return Asker(home, client=shop, clock=time.time if now is None else lambda: now)


def best(home: Home, shop: Shop, who: str = "ann", k: int = 5, now: float | None = None) -> Recommendation:
    return recommend(home, home.people.find(who), k, asker=asker(home, shop, now))


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
    alone = rank(shop.served.head, part, AtHome(("film-3", "film-7", "film-50")), 5)
    assert [item.item for item in found.items] == [item for item, _ in alone.items]
    assert found.left_out == len({"film-3", "film-7", "film-50", "unknown"} - set(part.ids))
    assert "nothing was told" in found.notes[-1]
    assert not asker(home, shop).wanted


def test_auto_takes_the_shelf_where_the_table_is_large(home: Home, shop: Shop) -> None:
    home.be_served(serving_mode="auto")
    for turn, size in enumerate((65 << 20, 0)):  # 0: larger than the service sends
        shop.says = {"table_bytes": size}
        assert best(home, shop, now=turn * DAY).way == "shelf"
    home.be_served(serving_mode="table")
    assert best(home, shop, now=DAY).way == "table", "Other rows are asked for at once."
    assert home.queries.turn() == (2, DAY)


def test_of_a_table_only_what_changed_comes_again(home: Home, shop: Shop) -> None:
    home.be_served(serving_mode="table")
    first = {item.item for item in best(home, shop, k=ITEMS, now=0).items}
    assert len(first) == ITEMS - 3
    best(home, shop, now=DAY)
    assert [path for path in shop.asked if "table" in path] == ["/v1/table"], "Nothing has changed."
    version = shop.model().version
    remove(shop.running.folder, ["film-20", "film-21"])
    wait_until(lambda: shop.model().version > version, "the items are gone")
    after = best(home, shop, k=ITEMS, now=2 * DAY)
    assert shop.asked[-1] == f"/v1/table?since={version}"
    assert {item.item for item in after.items} == first - {"film-20", "film-21"}
    table = home.received.get("table")
    assert table is not None
    assert len(table.bytes) > len(shop.answer(shop.asked[-1]))


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


@pytest.mark.parametrize("query", ["choice:epsilon=5", "attention:epsilon=5,interests=5", "unit:epsilon=5"])
def test_the_service_ranks_news_for_what_is_told(home: Home, shops: Callable[[Model], Shop], query: str) -> None:
    """As the mechanism that its model was trained with has it, or another."""
    shop, own = shops(news(query=query)), [f"n{number}" for number in range(10)]
    home.be_served(serving_mode="server")
    for item in own:
        home.history.append("ann", item, time=100)
    found = best(home, shop, k=ROWS)
    assert found.way == "server"
    assert not {item.item for item in found.items} & set(own)
    assert ROWS - len(own) <= len(found.items) <= ROWS
    # What counts as shown is what the service ranked: which of it Ann has already, it does not know.
    assert len(found.listed) == ROWS
    assert [item for item in found.listed if item not in own] == [item.item for item in found.items]
    sent = [path for path in shop.asked if "query" in path]
    assert len(sent) == 2
    assert len(set(sent)) == 1, "Ann's and Bob's have one length."
    mechanism = shop.served.head.mechanism
    assert mechanism is not None
    cost = Ledger().epsilon("server", delta=1e-6, also=[Charge("server", "user", mechanism.event)]).epsilon
    assert (found.epsilon, found.spent) == (cost, cost)
    assert charged(home, "ann") == charged(home, "bob") == [f"query/{query.partition(':')[0]}/1"]


def test_noise_as_published_is_charged_as_what_it_costs(home: Home, shops: Callable[[Model], Shop]) -> None:
    shop = shops(news(query="attention:epsilon=5,delta=1e-3,interests=5,guarantee=published"))
    home.be_served(serving_mode="server", query_epsilon=20)
    assert best(home, shop).spent > 8, "δ is 1e-6 here, and the noise is for another distance."


@pytest.mark.parametrize("query", ["unit:epsilon=5", "vector:epsilon=5,delta=1e-6", "attention:epsilon=5,interests=6"])
def test_other_queries_than_choices_bring_rows_too(home: Home, shops: Callable[[Model], Shop], query: str) -> None:
    shop = shops(model(query=query))
    found = best(home, shop)
    assert (found.way, found.epsilon, shop.lists) == ("query", pytest.approx(5.0), [])
    brought = Part.read(home.queries.of("ann")[0].answer or b"")
    everyone = Part.read(shop.answer("/v1/shelf"))
    assert (len(brought), {*brought.ids} & {*everyone.ids[: ROWS // 2]}) == (ROWS - ROWS // 2, set())
    assert {item.item for item in found.items} <= {*everyone.ids, *brought.ids}
    sent = [path for path in shop.asked if "query" in path]
    assert (len(sent), len(set(sent))) == (2, 1), "Ann's and Bob's have one length."
    assert charged(home, "ann") == charged(home, "bob") == [f"query/{query.partition(':')[0]}/1"]


def test_no_query_is_drawn_where_none_is_answered(home: Home, shops: Callable[[Model], Shop]) -> None:
    shop = shops(model(query=""))
    with pytest.raises(HomebodyError, match="--mode query: it offers table, shelf"):
        best(home, shop)
    home.be_served(serving_mode="shelf")
    assert best(home, shop).way == "shelf"
    home.be_served(serving_mode="server")
    found = best(home, shop)
    assert "--mode server: it offers table, shelf" in found.notes[0]
    assert (found.way, charged(home, "ann"), home.queries.of("ann")) == ("shelf", [], [])


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
    found = best(home, shop, now=now)
    assert len(shop.asked) == asked
    assert found.left_out == len({"film-3", "film-7", "film-50", "unknown"} - everyone - seen)


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shops: Callable[[Model], Shop]
) -> None:
    first, place, killed = shops(model(query=WIDE)), 0, True
    memory = Path("/dev/shm")  # homes write through to the disk at every step
    folder = memory if memory.is_dir() else tmp_path
    folder = folder / tmp_path.name
    with Home.create(folder / "new", server="", budget="eps=1000") as new:
        furnish(new)
    try:
        while killed:
            place += 1
            here, shop = folder / f"killed{place}", Shop(first.running)
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
            shop.close()
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
    first = best(home, shop, now=0)
    shop.away = True
    again = best(home, shop, now=DAY)
    assert again.items == first.items
    assert "cannot be reached" in again.notes[0]
    assert charged(home, "ann") == ["query/choice/1"]


def hang_up(path: str) -> None:
    """The answer to a query is lost."""
    if path.startswith("/v1/lists/"):
        raise Unavailable("The answer was lost.")


def test_a_service_that_goes_away_between_is_told_the_same_later(home: Home, shops: Callable[[Model], Shop]) -> None:
    shop = shops(model(query=WIDE))
    shop.reached = hang_up
    for _ in range(3):
        with pytest.raises(Unavailable):
            asker(home, shop).take_turn()
    shop.reached = lambda path: None
    asker(home, shop).take_turn()
    assert len(shop.lists) == 5
    assert len(set(shop.lists[:4])) == 1
    assert charged(home, "ann") == charged(home, "bob") == ["query/choice/1"]


def test_with_new_interests_a_fresh_query_is_charged_and_new_items_cost_nothing(home: Home, shop: Shop) -> None:
    before, after = shop.served.digest, model(seed=1)
    asker(home, shop, 0).take_turn()
    version = shop.model().version
    remove(shop.running.folder, ["film-20"])
    wait_until(lambda: shop.model().version > version, "the item is gone")
    asker(home, shop, 10).take_turn()
    assert charged(home, "ann") == ["query/choice/1"]

    def reload(path: str) -> None:
        if path == "/v1/shelf" and shop.served.digest == before:
            shop.serve(after)

    shop.reached = reload
    asker(home, shop, DAY).take_turn()
    states = [(query.turn, query.model, query.state) for query in home.queries.of("ann")]
    assert states == [(1, before, "answered"), (2, before, "gone"), (2, after.digest, "answered")]
    assert charged(home, "ann") == ["query/choice/1", "query/choice/2", "query/choice/2#2"]
    assert charged(home, "bob") == ["query/choice/1", "query/choice/2"], "His query was not charged when it was gone."
    assert best(home, shop, now=DAY).way == "query"


def test_a_service_that_changes_its_model_all_the_time_is_told_twice_a_turn_at_most(home: Home, shop: Shop) -> None:
    seeds = iter(range(1, 10))

    def reload(path: str) -> None:
        if path == "/v1/shelf":
            shop.serve(model(seed=next(seeds)))

    shop.reached = reload
    for now in range(5):
        asker(home, shop, now).take_turn()
    assert charged(home, "ann") == ["query/choice/1", "query/choice/1#2"]
    assert not asker(home, shop, 6).wanted


def test_a_service_that_refuses_a_query_is_not_asked_it_again(home: Home, shop: Shop) -> None:
    def refuse(path: str) -> None:
        if path.startswith("/v1/lists/"):
            raise RefusedRequest(404, {"error": "No such choice."})

    shop.reached = refuse
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
    found = best(home, shop, now=3 * DAY)
    assert (found.way, found.epsilon, found.spent) == ("query", 5.0, 10.0)
    assert len(shop.lists) == 4
    queries = disclosure(home, "ann")["queries"]
    assert (queries["left"], queries["refused"], queries["kinds"]) == (2, 2, {"choice": 2})
    assert queries["lasts"]["queries"] == 0


def test_a_service_learns_no_more_at_once_than_the_owner_agreed_to(home: Home, shop: Shop) -> None:
    """Whatever the budget would allow, and whatever the service calls its noise."""
    home.configure(budget=None)
    shop.serve(model(query="choice:epsilon=6,interests=16"))
    found = best(home, shop)
    assert (found.way, found.spent, shop.lists) == ("shelf", 0, [])
    assert "asks for queries at ε = 6, and this device allows 5 (--epsilon)." in found.notes[-2]
    home.be_served(query_epsilon=6)
    assert best(home, shop, now=time.time() + DAY).spent == 6


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
            with Home(home.path) as own, Shop(shop.running, shop.asked) as client:
                together.wait(PATIENCE)
                asker(own, client, 5).take_turn()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failed
    assert len(set(shop.lists)) <= 2
    assert charged(home, "ann") == charged(home, "bob") == ["query/choice/1"]
    assert [query.state for who in ("ann", "bob") for query in home.queries.of(who)] == ["answered"] * 2


def test_whoever_opts_out_while_the_service_is_asked_tells_nothing_more(home: Home, shop: Shop) -> None:
    def leave(path: str) -> None:
        if path.startswith("/v1/lists/"):
            home.people.opt_out("bob")

    shop.reached = leave
    asker(home, shop).take_turn()
    assert len(shop.lists) == 1
    assert [query.state for query in home.queries.of("bob")] == ["gone"]
    assert charged(home, "bob") == []


def test_a_mode_that_the_service_does_not_offer_is_refused_in_a_sentence(
    home: Home, shops: Callable[[Model], Shop]
) -> None:
    shop = shops(model(query=""))
    with pytest.raises(HomebodyError, match="--mode query: it offers table, shelf"):
        best(home, shop)
    home.be_served("")
    with pytest.raises(HomebodyError, match="has no service: give it one with"):
        recommend(home, home.people.find("ann"))


def test_a_device_that_trained_the_served_model_ranks_with_its_private_state(
    home: Home, shops: Callable[[Model], Shop]
) -> None:
    """Its own numbers of items are others than the service's."""
    name, fields = "pfedrec", {"factors": FACTORS}
    method = build(name, fields)
    shared = method.init_shared(Catalogue(ITEMS), Rng.of(0))
    ids = [f"film-{item}" for item in range(ITEMS)]
    shop = shops(Model.of(Served.of(name, fields, shared, Catalogue(ITEMS), None, ids=ids, run="devices")))
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
        known = AtHome(
            ["film-3", "film-7", "film-50"], local={**local, "item": Rows(numbers, own, ITEMS)} if trained else None
        )
        assert [(item.item, item.score) for item in found.items] == rank(shop.served.head, part, known, 5).items


def test_a_damaged_ledger_holds_up_nobody_else(home: Home, shop: Shop) -> None:
    home.ledger("ann").charge("train/1", [Charge("server", "user", PureRelease(5.0))])
    file = home.ledger_file("ann")
    home.close()
    file.write_bytes(b"no ledger" * 100)
    with Home(home.path) as again:
        found = best(again, shop, "bob")
        assert found.way == "query"
        assert "ledger" in found.notes[0]
        assert len(shop.lists) == 1
        assert again.queries.of("ann") == []


def test_a_model_that_would_exhaust_the_device_is_refused(home: Home, shops: Callable[[Model], Shop]) -> None:
    """A service says how large the layers are that a device makes for itself."""
    shop, get = shops(model(query="")), Client.get
    large = replace(shop.served.head, name="fedncf", fields={"hidden": "200000,200000"})
    home.be_served(serving_mode="shelf")
    offer = shop.model()._replace(model=large.digest)

    def answer(path: str, **options: Any) -> bytes:
        if path.startswith("/v1/models/"):
            return large.content
        header, parts = decode_letter(get(shop, path, **options))
        return encode_letter({**header, "model": large.digest}, parts)

    shop.get = answer  # type: ignore[method-assign]
    shop.model = lambda: offer  # type: ignore[method-assign]
    with pytest.raises(HomebodyError, match="of memory, and this device allows"):
        best(home, shop)
    assert home.received.model == ""


def test_a_service_cannot_time_how_long_a_history_is(home: Home, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how an interest is computed. Both tell something, at the moment at which they would have anyway."""
    free, began, sent = threading.Event(), list[float](), list[float]()

    def interest(head: Head, part: Part, person: AtHome) -> torch.Tensor:
        if "film-7" in person.items:
            free.wait(60)
        return torch.ones(head.size)

    shop.reached = lambda path: (sent if path.startswith("/v1/lists/") else began).append(time.monotonic())
    monkeypatch.setattr(serving_module, "DRAWING", 0.5)
    monkeypatch.setattr("homebody.serving.model.interest_of", interest)
    asker(home, shop).take_turn()
    free.set()
    assert len(sent) == 2
    assert 1.0 <= sent[0] - began[-1] < 60
    assert charged(home, "ann") == charged(home, "bob") == ["query/choice/1"]


def test_a_model_that_fits_no_row_learns_of_nobody_whether_they_have_one(home: Home, shop: Shop) -> None:
    """Who has none of the rows has no interest, and so none of the wrong size: a query that fails would tell them."""
    head = shop.served.head
    wide = replace(head, size=FACTORS + 1, interests=torch.eye(16, FACTORS + 1))
    offer, get = shop.model()._replace(model=wide.digest), Client.get

    def answer(path: str, **options: Any) -> bytes:
        if path.startswith("/v1/models/"):
            return wide.content
        shop.asked.append(path)
        header, parts = decode_letter(get(shop, path.replace(wide.digest, head.digest), **options))
        return encode_letter({**header, "model": wide.digest}, parts)

    shop.get = answer  # type: ignore[method-assign]
    shop.model = lambda: offer  # type: ignore[method-assign]
    asker(home, shop).take_turn()
    assert charged(home, "ann") == charged(home, "bob") == ["query/choice/1"]
    assert len([path for path in shop.asked if path.startswith(f"/v1/lists/{wide.digest}")]) == 2


def test_a_list_that_does_not_go_with_the_shelf_is_not_kept(home: Home, shop: Shop) -> None:
    bad = replace(
        shop.served.rows([50]), tables={"item": torch.zeros(1, 3, dtype=torch.int8), "item:scale": torch.ones(1)}
    )
    get = shop.get
    shop.get = lambda path, **k: bad.content if path.startswith("/v1/lists/") else get(path, **k)  # type: ignore[method-assign]
    assert best(home, shop, now=0).way == "shelf"
    with pytest.raises(HomebodyError, match="other tables or features"):
        asker(home, shop, 0).take_turn()
    shop.get = get  # type: ignore[method-assign]
    assert best(home, shop, now=0).way == "query"
    assert charged(home, "ann") == ["query/choice/1"]


def test_what_a_service_sends_is_checked(
    home: Home, shop: Shop, shops: Callable[[Model], Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, get = shops(model(seed=1)), shop.get
    for path, wrong, said in (
        ("/v1/models", b"", "too short"),
        ("/v1/models", b"HB\1\0\0\0\0\0", "header"),
        ("/v1/models", other.served.head.content, "changed its model"),
        ("/v1/shelf", other.answer("/v1/shelf"), "changed its model"),
    ):
        monkeypatch.setattr(shop, "get", lambda at, p=path, w=wrong, **k: w if at.startswith(p) else get(at, **k))
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
    assert "film-3" not in said
