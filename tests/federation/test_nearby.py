"""`nearby` on devices: both of its phases through a secure sum that a helper opens, and rankings at home."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from tests.federation.world import few_people
from tests.processes import COMMAND

from homebody.core import Catalogue, Total, Tree
from homebody.data import Population
from homebody.data.partitions import everything
from homebody.federation.device.home import Home
from homebody.federation.device.household import recommend
from homebody.federation.device.limits import answering_seconds, estimate, refuse_larger
from homebody.federation.device.people import Person
from homebody.federation.device.settings import HomeSettings
from homebody.federation.server.admin import opened
from homebody.methods.nearby import Nearby, NearbyPopularity
from homebody.recipe import Recipe
from homebody.simulation import Simulator
from homebody.training import fit

PLAN = Recipe(
    "nearby",
    "devices",
    {"rank": 4},
    stages=["clip:norm=1", "secure-sum:helper=true"],
    rounds=1,
    seed=5,
    evaluate_every=0,
)
BOTH = ["popularity/1", "pairs/1"]
UNLIKELY = 5e-10


def items_of(population: Population, user: int) -> torch.Tensor:
    return torch.from_numpy(population.items[slice(*population.indptr[user : user + 2])].astype(np.int64))


def scores(shared: Tree, own: torch.Tensor) -> dict[str, Any]:
    """The scores of all new items for somebody with these items, by their definition."""
    popularity, mine = shared["popularity"], torch.zeros(shared["item"].shape[1])
    recent = [place**-1.1 for place in range(1, len(own) + 1)]
    for weight, item in zip(recent, own.flip(0).tolist(), strict=True):
        mine += weight / max(float(popularity[item]), 1.0) ** 0.5 * shared["item"][item]
    mine[:-1] *= 0.33 * sum(recent) ** 2 / (sum(weight**2 for weight in recent) or 1)
    found = shared["item"] @ mine if len(own) else popularity
    return {
        f"item-{item}": pytest.approx(float(found[item]), rel=1e-4, abs=1e-6)
        for item in range(len(found))
        if item not in own.tolist()
    }


def ranked(home: Home, person: Person) -> dict[str, float]:
    """The scores of all items that a device ranks for a person, best first."""
    found = recommend(home, person, 10_000)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    return {one.item: one.score for one in found}


@pytest.mark.parametrize("fields", [{}, {"buckets": 50}, {"items": 9}])
def test_devices_learn_what_a_simulation_learns(village: Callable[..., Any], fields: dict[str, Any]) -> None:
    one = village(replace(PLAN, fields={**PLAN.fields, **fields}))
    fitted = one.fit()
    one.near(fitted.shared, one.simulated().shared, tolerance=1e-4)
    assert one.told() == BOTH
    assert [line["clients"] for line in one.records.rounds()] == [7, 7]


@pytest.mark.random_draws
def test_each_sum_has_the_noise_of_its_share_of_the_budget(
    village: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A phase's channel is not the method's: both sides must fit it to the phase."""
    seen: list[tuple[Any, Tree, Total]] = []
    for kind in (NearbyPopularity, Nearby):

        def served(self: Any, shared: Tree, state: Tree, total: Total, step: Any = kind.server) -> tuple[Tree, Tree]:
            seen.append((self, shared, total))
            after: tuple[Tree, Tree] = step(self, shared, state, total)
            return after

        monkeypatch.setattr(kind, "server", served)
    population = people(items=200)
    one = village(replace(PLAN, stages=[]), population=population)
    one.fit()
    deviations = []
    for method, shared, total in seen:
        ((name, told),) = total.sum.items()
        for user in range(population.n_users):
            own = items_of(population, user)
            told = told - method.client(shared, {}, {"items": own, "valid": own >= 0})[0][name].dense()
        deviations.append(method.uplink.deviation(len(told), 1))
        square = float(told.double().square().sum()) / deviations[-1] ** 2
        assert chi2.ppf(UNLIKELY, len(told)) < square < chi2.isf(UNLIKELY, len(told))
    popularity, pairs = deviations
    assert popularity == pytest.approx(3 * pairs, rel=1e-3)  # a tenth of the budget, and nine tenths
    for ledger in (one.records.ledger(), one.homes[0].ledger(0), one.homes[3].ledger(0)):
        assert ledger.epsilons(1e-6)["server"] == pytest.approx(7.995, abs=0.001)


def test_a_device_that_joins_later_ranks_and_has_sent_nothing(village: Callable[..., Any], people: Any) -> None:
    one, population = village(PLAN, quorum=0.5), people()
    one.mail.offline.add("mark3")
    runtime = one.runtime()
    fitted = one.fit(runtime)
    assert [line["clients"] for line in one.records.rounds()] == [6, 6]
    one.mail.offline.clear()
    known = runtime.publish(fitted.method, fitted.shared, fitted.chosen, set())
    assert known == {"mark0", "mark1", "mark2", "mark3"}
    home = one.homes[3]
    person = home.people.find(0)
    assert ranked(home, person) == scores(fitted.shared, items_of(population, 6))
    assert home.ledger(0).entries() == []
    assert home.outbox.sent(0) == []
    # Nobody is asked again.
    before = len(one.mail.letters)
    assert runtime.publish(fitted.method, fitted.shared, fitted.chosen, known) == known
    assert len(one.mail.letters) == before
    # What a person takes next counts at once, and no letter says so.
    home.history.append(person, "item-2", time=10**6)
    mine = torch.cat([items_of(population, 6), torch.tensor([2])])
    assert ranked(home, person) == scores(fitted.shared, mine)


@pytest.mark.parametrize("timed", [True, False])
def test_histories_of_every_kind_have_a_part_and_a_ranking(
    village: Callable[..., Any], people: Callable[..., Any], timed: bool
) -> None:
    """One item, none, one time for all, or no times."""
    population = people(lengths=(1, 6, 9, 0, 12, 7, 5))
    same = slice(*population.indptr[2:4])
    population.times[same] = population.times[same][0]
    if not timed:
        population = replace(population, times=None)
    one = village(PLAN, population=population)
    runtime = one.runtime()
    fitted = one.fit(runtime)
    assert [line["clients"] for line in one.records.rounds()] == [7, 7]
    assert one.said("failed") == []
    runtime.publish(fitted.method, fitted.shared, fitted.chosen, set())
    for user in range(7):
        home, person = one.homes[user // 2], one.homes[user // 2].people.find(user % 2)
        found = ranked(home, person)
        assert len(found) == 30 - int(population.lengths[user])
        if user != 2 and (timed or user in (0, 3)):  # ties are in an order of the device's own
            assert found == scores(fitted.shared, items_of(population, user))


def test_items_that_come_between_the_sums_and_after_them(village: Callable[..., Any], people: Any) -> None:
    """They are in no pair that was counted, and rank last."""
    one, population = village(PLAN), people()
    runtime, added = one.runtime(), []

    def grows(line: Any) -> None:
        one.records.add_round(line)
        if not added:
            added.append(one.grow(35))

    fitted = one.fit(runtime, on_round=grows)
    one.near({name: value[:30] for name, value in fitted.shared.items()}, one.simulated().shared, tolerance=1e-4)
    one.grow(40)
    assert len(runtime.publish(fitted.method, fitted.shared, fitted.chosen, set())) == 4
    late = {f"item-{item}": 0.0 for item in range(30, 40)}
    known = scores({name: value[:30] for name, value in fitted.shared.items()}, items_of(population, 0))
    assert ranked(one.homes[0], one.homes[0].people.find(0)) == known | late


@pytest.mark.parametrize(("items", "buckets", "megabytes"), [(3_706, 0, 27.5), (3_706, 500_000, 2.0), (10**5, 0, 32.0)])
def test_a_device_takes_part_within_its_limits_and_answers_in_time(items: int, buckets: int, megabytes: float) -> None:
    """Also for a household of five with the longest histories that a server asks for by default."""
    for phase in Nearby(buckets=buckets).phases:
        assert phase.method is not None
        work = estimate(phase.method, Catalogue(items), 5_000, 5)
        refuse_larger(work, HomeSettings(server="localhost:9092"))
        assert answering_seconds(work, 5) < 60  # a server's deadline
    assert 1e6 * megabytes <= work.bytes


def test_real_devices_train_and_rank_without_their_server(world: Callable[..., Any]) -> None:
    """Two rounds; then a newcomer gets the model; then the server and the helper are gone."""
    population = few_people()
    federation = world(population, 4, replace(PLAN, fields={"rank": 4, "features": False}, rounds=None), helping=True)
    federation.start()
    federation.wait_for("server", "finished")
    wanted = fit(PLAN.build(), Simulator(everything(population, seed=5)), rounds=1, seed=5, evaluate_every=0).shared
    for name, value in wanted.items():
        torch.testing.assert_close(federation.shared()[name], value, rtol=0, atol=1e-4)
    newcomer = federation._device(4, [7])
    federation.start(newcomer.name)

    def has_model() -> bool:
        with Home(newcomer) as home:
            return home.models.ranking() is not None

    federation.wait(has_model, "the newcomer has the model")
    for name in ("server", "proxy"):
        federation.kill(name)
    with opened(federation.server) as (_, records):
        assert [line["clients"] for line in records.rounds()] == [8, 8]
        assert list(dict.fromkeys(entry.release for entry in records.ledger().entries())) == BOTH
    known = {name: one.expected for name, one in scores(wanted, items_of(population, 7)).items()}
    for folder, sent in ((newcomer, 0), (federation.devices[3], 2)):
        printed = offline(folder, "person 7")
        assert len(printed) == 5
        assert [score for _, score in printed] == pytest.approx(sorted(known.values())[:-6:-1], abs=1e-3)
        assert all(score == pytest.approx(known[f"item-{item[1:]}"], abs=1e-3) for item, score in printed)
        with Home(folder) as home:
            assert len(home.outbox.sent("person 7")) == sent
            assert bool(home.ledger("person 7").entries()) == bool(sent)


def offline(folder: Path, person: str) -> list[tuple[str, float]]:
    """The items that `homebody client recommend` prints, in order, with their scores."""
    done = subprocess.run(
        [*COMMAND, "client", "recommend", str(folder), person, "-k", "5"], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    return [(row[1], float(row[-1])) for row in rows if row and row[0].isdecimal()]
