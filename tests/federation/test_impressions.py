"""Rounds of reports on impressions over real devices: what devices tell of their impressions, the server trains on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from tests.federation.test_reports import Mixer

from homebody.core import Cohort, Tree
from homebody.data import Population
from homebody.data.codes import Code
from homebody.data.partitions import everything
from homebody.data.population import Impressions, pointers
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.device.household import Household, recommend
from homebody.federation.device.reporter import Reporter
from homebody.federation.envelopes import Envelope, open_envelope, sign_envelope
from homebody.federation.epoch import SEAL_BYTES
from homebody.federation.schema import FeatureSchema
from homebody.federation.server.epochs import Epochs
from homebody.federation.server.plan import ServerPlan
from homebody.federation.server.runtime import Flower
from homebody.privacy import Ledger
from homebody.privacy.events import event_from_json
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.simulation.clients import Clients
from homebody.training import fit

ITEMS = 30
FIELDS: dict[str, Any] = {"encoder": "id", "d": 4, "basis": 3, "latest": 6, "negatives": 2, "steps": 3, "dropout": 0.0}
People = Callable[..., Any]
SCHEMA = FeatureSchema(
    items={"title": Code("sequence", tuple(f"w{n}" for n in range(9)), text=True, width=4)},
    numbers={"title": np.random.default_rng(5).integers(0, 10, (ITEMS, 4)).astype(np.int64)},
)


def plan(**fields: Any) -> Recipe:
    return Recipe("privaterec", "devices", rounds=2, seed=3, evaluate_every=0, fields={**FIELDS, **fields})


def shown_to(people: Population, without: Sequence[int] = ()) -> Population:
    """The same people, each with two impressions of five items, one of them clicked, between their interactions."""
    rng, users, items, clicked, times = np.random.default_rng(9), [], [], [], []
    for user in set(range(people.n_users)) - set(without):
        for count in (2, people.lengths[user]):
            users.append(user)
            items.append(rng.choice(ITEMS, 5, replace=False))
            clicked.append(np.arange(5) == rng.integers(5))
            times.append(100 * user + count)
    shown = Impressions(
        np.array(users, dtype=np.int64),
        pointers(np.array([5] * len(users))),
        np.concatenate(items).astype(np.int32),
        np.concatenate(clicked),
        np.array(times, dtype=np.int64),
    )
    return replace(people, impressions=shown)


def imported(one: Any, population: Population, ranked: str = "server") -> None:
    """Bring everyone's impressions to their device, from files as `--impressions` takes them."""
    shown = population.impressions
    assert shown is not None
    rows = {"impression": shown.owners, "item": shown.items, "clicked": shown.clicked}
    table = pl.DataFrame(rows).with_columns(
        user="person-" + pl.Series(shown.users[shown.owners]).cast(pl.String),
        item="item-" + pl.col("item").cast(pl.String),
        clicked=pl.col("clicked").cast(pl.Int8),
        time=pl.Series(shown.times[shown.owners]),
    )
    for home in one.homes:
        file = home.path / "shown.csv"
        table.write_csv(file)
        names = [person.name for person in home.people.all()]
        known = [name for name in names if name in set(table["user"])]
        if known:
            home.impressions.import_file(file, ranked=ranked, only=known)


def drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private draws come from the system on a device; here they are those of a simulation."""
    monkeypatch.setattr(Household, "_leave", Clients._leave)
    monkeypatch.setattr(Household, "stream", Clients.stream)


def told(one: Any) -> list[Tree]:
    """What each person sent, in letters."""
    letters = [wire.decode_letter(body)[1] for _, kind, body in one.mail.answers if kind == "train"]
    return [wire.decode_tree(part) for letter in letters for part in letter.values()]


@pytest.mark.parametrize(
    "fields",
    [{}, {"candidates": 12}, {"mechanism": "attention", "noise": "gaussian", "padding": 0.3}, {"encoder": "nrms"}],
    ids=["choice", "candidates", "attention", "nrms"],
)
def test_the_model_is_that_of_a_simulation_whose_devices_draw_the_same(
    town: Callable[..., Any], people: People, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    drawn_alike(monkeypatch)
    worded = fields.get("encoder") == "nrms"
    recipe = plan(**fields, **({"words": "random", "heads": 2} if worded else {}))
    population = shown_to(people())
    one = town(population, (3, 1, 3), recipe)
    imported(one, population)
    schema = SCHEMA if worded else FeatureSchema()
    if worded:
        one.records.put_features(schema.content)
    found = one.fit(Flower(one.mail, one.records, one.plan, schema=schema, log=one.log))
    split = everything(population, seed=recipe.seed)
    if worded:
        split = replace(split, coded=schema.encoded([{}] * population.n_users, ITEMS))
    ledger = Ledger()
    wanted = fit(recipe.build(), Simulator(split), rounds=2, seed=3, evaluate_every=0, ledger=ledger)
    one.near(found.shared, wanted.shared)
    fresh = recipe.build().init_shared(split.catalogue(), Rng.of(0))
    assert not torch.allclose(fresh["basis"], wanted.shared["basis"], atol=1e-3)
    # Each person is charged on the device what the simulation charges, one participation a round.
    for number, home in enumerate(one.homes):
        assert one.own(number, 0) == ["train/1", "train/2"]
        for unit in ("user", "interaction"):
            for delta in (1e-3, 1e-6):
                own = home.ledger(0).epsilon("server", unit, delta=delta)
                assert own.epsilon == pytest.approx(ledger.epsilon("server", unit, delta=delta).epsilon)


def test_what_devices_read_of_impressions_is_what_a_simulation_reads(town: Callable[..., Any], people: People) -> None:
    population = shown_to(people(), without=[4])
    one = town(population, (3, 4), plan())
    imported(one, population)
    split = everything(population)
    for home, users in zip(one.homes, ([0, 1, 2], [3, 4, 5, 6]), strict=True):
        home.items.add(0, [(f"item-{item}", "") for item in range(ITEMS)])
        described = {**one.plan.describe(), "first": 0, "clients_key": 0}
        household = Household.of(home, home.people.all(), described, ITEMS, learns=one.recipe.build())
        for number, user in enumerate(users):
            places = ((household.split, number), (split, user))
            here, there = (some.padded_shown(np.array([which])) for some, which in places)
            for mine, wanted in zip(here, there, strict=True):
                np.testing.assert_array_equal(mine, wanted)
        # The latest interactions alone: what came before an impression is counted among them.
        few = Household.of(home, home.people.all(), described, ITEMS, longest=2, learns=one.recipe.build())
        shown = few.split.padded_shown(np.array([0]))
        assert shown.before.max() <= 2


def test_lists_that_a_device_ranked_are_told_of_among_candidates_alone(
    town: Callable[..., Any], people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a huge ε a device tells its click: of a list that the server ranked, or of one among the candidates."""
    population = shown_to(people())
    shown = population.impressions
    assert shown is not None
    lists = [set(shown.items[a:b].tolist()) for a, b in zip(shown.indptr, shown.indptr[1:], strict=False)]
    for ranked, candidates in (("server", 0), ("device", 0), ("device", ITEMS)):
        recipe = replace(plan(epsilon=60.0, candidates=candidates, steps=1), rounds=1)
        one = town(population, (3, 1, 3), recipe)
        imported(one, population, ranked)
        one.fit()
        clicks = {int(item) for item in shown.items[shown.clicked]}
        reports = [set(message["news"].tolist()) for message in told(one)]
        assert len(reports) == 7
        if ranked == "server":
            assert all(any(report <= items for items in lists) for report in reports)
        first = [int(message["news"][0]) for message in told(one)]
        if ranked == "server" or candidates:
            assert set(first) <= clicks
        if not candidates and ranked == "device":
            # Three news of thirty, of a list of five among 14: all seven are within one with a chance below 1e-9.
            assert not all(any(report <= items for items in lists) for report in reports)


def test_who_has_no_click_sends_what_cannot_be_told_apart(town: Callable[..., Any], people: People) -> None:
    """Nobody has an impression or, of one device, anything: their reports have candidates and choices like others."""
    recipe = replace(plan(candidates=12), rounds=1)
    one = town(people((6, 0, 9, 0)), (2, 2), recipe, least=4)
    one.fit()
    (letter,) = [body for mark, kind, body in one.mail.letters if (mark, kind) == ("mark0", "train")][-1:]
    sent = one.homes[0].models.shared(wire.decode_letter(letter)[0]["shared"])
    candidates = set(wire.decode_tree(sent)["candidates"].tolist())
    assert len(candidates) == 12
    assert len(told(one)) == 4
    for message in told(one):
        assert message.keys() == {"choice", "news"}
        assert set(message["news"].tolist()) <= candidates
        assert len(set(message["news"].tolist())) == 3
    assert one.own(1, 0) == one.own(1, 1) == ["train/1"]


def test_a_report_of_what_there_is_not_is_refused(
    town: Callable[..., Any], people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device is blamed, and the others train: an item of no number would be read beside a table."""
    monkeypatch.setattr("homebody.training.ATTEMPTS", 1)
    population = shown_to(people())
    news, choice = torch.tensor([0, 1, ITEMS]), torch.tensor(3)
    for wrong in ({"news": news.to(torch.int32)}, {"choice": choice.to(torch.int32)}):
        one = town(population, (3, 1, 3), replace(plan(), rounds=1), quorum=0.5)
        imported(one, population)

        def twist(kind: str, body: bytes, given: bytes, wrong: Tree = wrong) -> bytes:
            header, parts = wire.decode_letter(given)
            lies = {name: wire.encode_tree({**wire.decode_tree(part), **wrong}) for name, part in parts.items()}
            return wire.encode_letter(header, lies)

        one.mail.twisted["mark1"] = twist
        one.fit()
        assert [line["clients"] for line in one.records.rounds()] == [6]
        assert one.said("refused")[0]["reason"] == "The message says what no device of this method says."


def test_a_device_ranks_with_what_was_trained_and_notes_what_is_clicked(
    town: Callable[..., Any], people: People
) -> None:
    population = shown_to(people())
    one = town(population, (3, 4), plan())
    imported(one, population)
    runtime = one.runtime()
    fitted = one.fit(runtime)
    runtime.publish(one.recipe.build(), fitted.shared, fitted.chosen, set())
    home = one.homes[0]
    person = home.people.find(0)
    best = recommend(home, person, 5)
    assert len(best) == 5
    home.impressions.show(person, [item.item for item in best], "device")
    home.impressions.click(person, best[2].item)
    last = home.impressions.of(person)[-1]
    assert (last.shown, last.clicked, last.ranked) == (tuple(one.item for one in best), (best[2].item,), "device")
    assert home.history.of(person)[-1].item == best[2].item


@pytest.mark.parametrize(
    ("method", "fields", "more", "problem"),
    [
        ("privaterec", {}, {"evaluate_every": 1}, "which privaterec predicts: give --evaluate-every 0"),
        ("fedrec", {"encoder": "id"}, {}, "which fedrec predicts: give --evaluate-every 0"),
        ("news-cen", {"encoder": "id"}, {"evaluate_every": 0}, "news-cen collects raw data"),
        ("dplcf", {}, {"evaluate_every": 0}, "which is not done with devices"),
    ],
)
def test_what_devices_cannot_do_is_said(
    method: str, fields: dict[str, Any], more: dict[str, Any], problem: str
) -> None:
    with pytest.raises(HomebodyError, match=problem):
        ServerPlan(Recipe(method, "devices", fields=fields, **more)).method()


@pytest.mark.parametrize(("method", "fields"), [("fedrec", {}), ("privaterec", {"guarantee": "published", "basis": 3})])
def test_gradients_of_impressions_leave_in_letters_too(
    town: Callable[..., Any], people: People, monkeypatch: pytest.MonkeyPatch, method: str, fields: dict[str, Any]
) -> None:
    """As published nothing bounds what they tell, and every ledger says so."""
    drawn_alike(monkeypatch)
    own = {"encoder": "id", "d": 4, "latest": 6, "negatives": 2, "dropout": 0.0, **fields}
    recipe = Recipe(method, "devices", rounds=2, seed=3, evaluate_every=0, fields=own)
    population = shown_to(people())
    one = town(population, (3, 4), recipe)
    imported(one, population, "device")
    found, wanted = one.fit(), one.simulated()
    one.near(found.shared, wanted.shared)
    assert one.homes[0].ledger(0).epsilon("server", "user", delta=1e-6).epsilon == float("inf")


class Mixed:
    """A town whose devices report through a mixer, which is in the same process."""

    def __init__(self, town: Callable[..., Any], population: Population, recipe: Recipe, **more: Any) -> None:
        self.one = town(population, (3, 1, 3), recipe, reports="127.0.0.1:9093", least=7, **more)
        self.one.folder = self.one.homes[0].path.parent
        self.mixer = Mixer(self.one)
        for number, home in enumerate(self.one.homes):
            self.one.mail.devices[f"mark{number}"] = self.one.device(home, self.mixer.reporter([]))

    def fit(self, **more: Any) -> Any:
        one = self.one
        runtime = Flower(one.mail, one.records, one.plan, epochs=self.mixer.epochs, log=one.log)
        return one.fit(runtime, **more)


@pytest.mark.parametrize("mechanism", ["choice", "attention"])
def test_reports_come_through_a_proxy_and_nobody_knows_whose_they_are(
    town: Callable[..., Any], people: People, monkeypatch: pytest.MonkeyPatch, mechanism: str
) -> None:
    drawn_alike(monkeypatch)
    recipe, population = plan(candidates=12, mechanism=mechanism), shown_to(people())
    mixed = Mixed(town, population, recipe)
    one = mixed.one
    imported(one, population, "device")
    found = mixed.fit()
    wanted = fit(recipe.build(), Simulator(everything(population, seed=3)), rounds=2, seed=3, evaluate_every=0)
    one.near(found.shared, wanted.shared)
    # A letter says that its people reported, and nothing of what; a report is one of seven of one length.
    parts = [wire.decode_letter(body)[1] for _, kind, body in one.mail.answers if kind == "train"]
    assert all(part == wire.encode_tree({}) for letter in parts for part in letter.values())
    epoch = mixed.mixer.epochs.named(f"{one.plan.run}/train/2")
    assert epoch is not None
    assert (epoch.arrived, epoch.people, epoch.among) == (7, 7, 7)
    assert epoch.size == 3 * 4 + (4 if mechanism == "choice" else 3 * 2)
    sizes = {open_envelope(body)[1].each for body in mixed.mixer.numbers.values()}
    assert sizes == {epoch.size + SEAL_BYTES}
    assert one.homes[0].outbox.reports() == 3 * 2
    # The ledger counts on no shuffle.
    charged = recipe.build().uplink.charges(Cohort(np.arange(7), "all", 7, 7))
    told_server = {
        event_from_json(entry.event) for entry in one.records.ledger().entries() if entry.observer == "server"
    }
    assert told_server == {charge.event for charge in charged}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", ["open", "close"])
def test_a_trainer_that_is_killed_gets_the_same_reports(
    town: Callable[..., Any], people: People, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    recipe, population = plan(candidates=12), shown_to(people())
    mixed = Mixed(town, population, recipe)
    imported(mixed.one, population, "device")
    real = getattr(Epochs, after)

    def dies(*given: Any, **more: Any) -> Any:
        real(*given, **more)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Epochs, after, dies)
        with pytest.raises(Killed):
            mixed.fit(rounds=1)
    mixed.fit(rounds=1)
    assert mixed.one.told() == mixed.one.own(0, 0) == ["train/1"]
    assert mixed.one.records.counters()["reports_accepted"] == 7


def test_what_no_device_reports_is_dropped_at_the_intake_or_after(
    town: Callable[..., Any], people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One report names an item that there is not, another cannot be opened: the round goes on with five of seven."""
    recipe, population = replace(plan(candidates=12), rounds=1), shown_to(people())
    mixed = Mixed(town, population, recipe, quorum=0.5)
    imported(mixed.one, population, "device")
    seal, number = Reporter.sealed_message, iter(range(99))

    def lying(self: Reporter, epoch: Any, content: bytes) -> bytes:
        at = next(number)
        if at == 0:
            content = content[:4] + (ITEMS + 7).to_bytes(4, "little") + content[8:]
        sealed = seal(self, epoch, content)
        return bytes(len(sealed)) if at == 1 else sealed

    monkeypatch.setattr(Reporter, "sealed_message", lying)
    monkeypatch.setattr(Mixer, "release", released)
    mixed.fit()
    counters = mixed.one.records.counters()
    assert counters["reports_refused: unreadable"] == 1
    assert counters["reports_refused: no message of this method"] == 1
    assert len(mixed.one.records.load().server["told/news"]) == 5


def released(self: Mixer) -> None:
    for epoch, reports in self.held.items():
        known = self.epochs.find(epoch)
        assert known is not None
        batch = Envelope("batch", epoch, os.urandom(16), reports, known.size + SEAL_BYTES)
        assert self.intake.take(sign_envelope(batch, self._secret)).status_code in (200, 422)
    self.held.clear()


def test_a_proxy_that_hides_nobody_is_refused_and_so_is_a_device_without_one(
    town: Callable[..., Any], people: People
) -> None:
    with pytest.raises(HomebodyError, match="so a proxy hides nobody: give --set candidates=100"):
        ServerPlan(plan(), reports="127.0.0.1:9093").method()
    ServerPlan(plan(candidates=12), reports="127.0.0.1:9093").method()
    population = shown_to(people())
    mixed = Mixed(town, population, replace(plan(candidates=12), rounds=1), quorum=0.5)
    mixed.one.mail.devices["mark1"] = mixed.one.device(mixed.one.homes[1])
    mixed.fit()
    assert [line["clients"] for line in mixed.one.records.rounds()] == [6]
    assert any("go through a proxy, and this device has none" in line["reason"] for line in mixed.one.said("refused"))
