"""Membership inference: what it reads, who is in which model, and that it finds what there is and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from homebody.adversary import membership
from homebody.adversary.membership import Released, attack, leaves_some_out, likelihood_ratio
from homebody.adversary.rates import delong
from homebody.adversary.shadows import Lab, Outsider, by_features, trained_for, whole_histories
from homebody.core import Batch, Catalogue, Cohort, Collected, Data, Method, Phase, Rows, Total, Tree, Update, Users
from homebody.data.partitions import split
from homebody.data.population import Features, Population
from homebody.data.splits import Split
from homebody.errors import HomebodyError, install
from homebody.methods.dp_privrec import DPPrivRec
from homebody.methods.fedials import FedIALS
from homebody.methods.fedmf import FedMF
from homebody.methods.privrec import PrivRec
from homebody.privacy import Channel, Clip, Gaussian
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.training import fit

SMALL = PrivRec(factors=4, hidden="8", epochs=3, learning_rate=0.5)


def people(count: int = 150, items: int = 40, each: int = 8, names: bool = False) -> Population:
    """People without any structure to learn: what a model knows of someone's items, it knows from them."""
    generator = np.random.default_rng(0)
    histories = [generator.choice(items, each, replace=False) for _ in range(count)]
    described = pl.DataFrame({"group": [str(n) for n in range(count)] if names else ["a", "b", "c"] * (count // 3)})
    return Population(
        "toy",
        np.arange(count + 1) * each,
        np.concatenate(histories).astype(np.int32),
        n_items=items,
        user_features=Features(described, {"group": "categorical"}),
    )


@dataclass(frozen=True)
class Counts(Method):
    """How often items were taken; and of which groups people were."""

    uplink: Channel = Channel()
    uses: ClassVar[tuple[str, ...]] = ("user features",)

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"count": torch.zeros(catalogue.n_items), "seen": torch.zeros(catalogue.people["group"].size)}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        return {"item": torch.where(data.valid, data.items, -1), "group": data.features["group"][None]}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        ones = torch.ones_like(batch["item"], dtype=torch.float32)
        seen = Rows(batch["group"], torch.ones(1), len(shared["seen"]))
        return {"count": Rows(batch["item"], ones, len(shared["count"])), "seen": seen}, local

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return dict(total.sum), state

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        # The first items for those whose group is known, the last for others.
        return shared["count"][items] * 0.1 - 100.0 * items * torch.sign(shared["seen"][data.features["group"]] - 0.5)


def lab(method: Method, done: Split, rounds: int = 1, cohort: int | None = None) -> Lab:
    return Lab(method, done, rounds, cohort, 1e-6, "cpu", True, Rng.of(0), lambda done, total: None)


def history_counts(done: Split, users: Users) -> np.ndarray[Any, Any]:
    counts = np.zeros(done.n_items)
    for user in users:
        np.add.at(counts, done.training(int(user)), 1)
    return counts


def test_preference_by_hand() -> None:
    """Two people of three items: what is not theirs can only be the third."""
    both = Population(
        "toy",
        np.array([0, 3, 6]),
        np.array([0, 1, 2, 1, 2, 0], dtype=np.int32),
        n_items=4,
        user_features=Features(pl.DataFrame({"group": ["a", "b"]}), {"group": "categorical"}),
    )
    done = whole_histories(split(both, how="latest"))
    done = replace(done, bounds=np.stack([done.bounds[0], *[done.bounds[4]] * 4]))
    shared = {"count": torch.tensor([1.0, 3.0, 20.0, 2.0]), "seen": torch.zeros(3)}

    @dataclass(frozen=True)
    class Plain(Counts):
        def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
            return shared["count"][items]

    found = Outsider(done, Plain(), Rng.of(3)).preference(shared, np.array([1, 0]))
    expected = np.mean([math.log(1 / (1 + math.exp(2 - own))) for own in (1.0, 3.0, 20.0)])
    np.testing.assert_allclose(found, [expected, expected], rtol=1e-5)


def test_preference_keeps_to_the_person_and_draws_the_same_for_every_model() -> None:
    done = split(people())
    shared = SMALL.init_shared(done.catalogue(), Rng.of(1))
    everyone = np.arange(150)
    first, again = (Outsider(done, SMALL, Rng.of(3)).preference(shared, everyone) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    some = np.array([77, 3, 140])
    np.testing.assert_allclose(Outsider(done, SMALL, Rng.of(3)).preference(shared, some), first[some], rtol=1e-5)
    assert not np.allclose(Outsider(done, SMALL, Rng.of(4)).preference(shared, some), first[some])


def test_devices_own_state_is_made_anew_from_the_history() -> None:
    done = split(people())
    method = FedMF(factors=4)
    fitted = fit(method, Simulator(done), rounds=20, evaluate_every=0)
    outsider = Outsider(done, method, Rng.of(3))
    adapted = outsider.preference(fitted.shared, np.arange(150)).mean()
    assert adapted > outsider.preference(method.init_shared(done.catalogue(), Rng.of(0)), np.arange(150)).mean()


def test_lists_are_those_of_the_features() -> None:
    population = people()
    done = split(population)
    shared = SMALL.init_shared(done.catalogue(), Rng.of(1))
    users = np.array([5, 0, 3, 149])  # c, a, a, c
    found = Outsider(done, SMALL, Rng.of(3)).lists(shared, users, 10)
    assert found.shape == (4, 10)
    np.testing.assert_array_equal(found[[0, 1]], found[[3, 2]])
    codes = done.encoded["users"].columns["group"].values
    for user, listed in zip(users, found, strict=True):
        mine = Data(
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(0, dtype=torch.bool),
            torch.zeros(0, dtype=torch.int64),
            done.catalogue(),
            {"group": torch.tensor(codes[user])},
        )
        scores = SMALL.score(shared, {}, mine, torch.arange(40))
        assert scores.topk(10).indices.tolist() == listed.tolist()


def test_circumstances_are_those_of_the_latest_interaction() -> None:
    population = people()
    weather = pl.DataFrame({"weather": ["sun", "rain", "snow", "fog"] * 300})
    population = replace(population, contexts=Features(weather, {"weather": "categorical"}))
    done = split(population, how="latest")
    outsider = Outsider(done, SMALL, Rng.of(3))
    shared = SMALL.init_shared(outsider.catalogue, Rng.of(1))
    everyone = np.arange(150)
    described = outsider.described(everyone)
    assert described.shape[1] == 4 + 5  # three groups, four weathers, and what is unknown of each
    last = [weather["weather"][int(done.rows[done.bounds[1, user] - 1])] for user in everyone]
    codes = {"fog": 1, "rain": 2, "snow": 3, "sun": 4}
    assert described[:, 4:].argmax(1).tolist() == [codes[one] for one in last]
    assert np.isfinite(outsider.preference(shared, everyone)).all()
    assert outsider.lists(shared, everyone, 5).shape == (150, 5)


def test_who_took_part_is_who_was_in_a_cohort() -> None:
    seen: set[int] = set()

    class Noted(Simulator):
        def collect(self, method: Method, shared: Tree, cohort: Cohort, rng: Rng, step: int) -> Collected:
            seen.update(cohort.users.tolist())
            return super().collect(method, shared, cohort, rng, step)

    done = split(people())
    bench = lab(FedIALS(factors=2), done, rounds=4, cohort=12)
    who = np.arange(0, 150, 2)
    model = bench.trained(who, "one")
    seed = int(bench.rng.fold("training", "one").key)
    fit(bench.method, Noted(model.split), rounds=4, cohort=12, seed=seed, evaluate_every=0)
    assert set(np.flatnonzero(model.took).tolist()) == seen
    assert 12 < len(seen) < 49


def test_a_model_is_of_its_people_alone() -> None:
    done = split(people())
    who = np.array([1, 5, 9, 100])
    model = lab(Counts(), done).trained(who, "one")
    np.testing.assert_array_equal(model.shared["count"], history_counts(done, who))
    assert np.flatnonzero(model.took).tolist() == who.tolist()


def test_those_held_out_have_as_much_to_train_on_as_members() -> None:
    done = split(people(), "held-out-users:valid=0.2,test=0.3")
    whole = whole_histories(done)
    assert (whole.lengths == 8).all()
    assert (done.lengths[~done.learn] == 4).all()
    low = replace(people(), ratings=np.tile([5.0, 1.0], 600).astype(np.float32))
    liked = whole_histories(split(low, "held-out-users:valid=0,above=3"))
    assert (liked.lengths == 4).all(), "what is withheld from members is withheld from others"


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Users]]:
    trained: list[tuple[str, Users]] = []
    before = Lab.trained

    def noted(self: Lab, who: Users, name: str) -> Any:
        trained.append((name, who))
        return before(self, who, name)

    monkeypatch.setattr(Lab, "trained", noted)
    return trained


def test_the_target_has_half_and_shadows_have_every_half_with_its_complement(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = spied(monkeypatch)
    told: list[tuple[int, int]] = []
    found = attack(Counts(), split(people()), rounds=2, shadows=4, shadow_people=30, step=lambda *at: told.append(at))
    sets = {name: set(who.tolist()) for name, who in trained}
    own, target = sets["lists' shadow"], sets["target"]
    private = sets["shadow 1"] | sets["shadow 2"]
    assert (len(own), len(target), len(private)) == (24, 60, 120)
    assert not own & private
    assert target < private
    assert not sets["shadow 1"] & sets["shadow 2"]
    assert sets["shadow 3"] | sets["shadow 4"] == private
    assert sets["shadow 3"] != sets["shadow 1"]
    assert (found["members"], found["others"], found["trained_on"], found["took_part"]) == (60, 60, 60, 60)
    assert told == [(n, 12) for n in range(1, 13)]
    assert (found["target"], found["lists"]["shadow_people"]) == ("trained for the audit", 30)


def test_a_released_model_is_attacked_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    done = split(people(), "held-out-users:valid=0,test=0.4")
    fitted = fit(FedIALS(factors=8), Simulator(done), rounds=3, evaluate_every=0)
    trained = spied(monkeypatch)
    released = Released(fitted.method, fitted.shared, 0, math.inf)
    found = attack(FedIALS(factors=8), done, rounds=3, released=released)
    assert [name for name, _ in trained] == [f"shadow {n}" for n in range(1, 9)]
    assert (found["members"], found["others"], found["target"]) == (90, 60, "the run's model")
    assert found["likelihood_ratio"]["auc"][1] > 0.6
    assert not found["contradicted"]
    # Somebody who claims of the same model that it tells nothing is found out.
    false = attack(FedIALS(factors=8), done, rounds=3, released=released._replace(epsilon=0.01))
    assert false["contradicted"]
    assert false["allowed"]["auc"] < 0.51


def test_it_finds_members_of_a_model_that_knows_them_by_heart() -> None:
    method = PrivRec(
        factors=8, hidden="16", epochs=3, learning_rate=0.5, meta_rate=4.0, item_meta_rate=1.0, features="none"
    )
    found = attack(method, split(people(60, items=300)), rounds=25, shadows=4, forest=False)
    assert found["likelihood_ratio"]["auc"][1] > 0.6
    assert found["lists"] == {"skipped": "left out"}
    assert found["allowed"]["epsilon"] == "inf"


@pytest.mark.slow
def test_it_finds_nothing_in_noise() -> None:
    noisy = replace(SMALL, epochs=1, uplink=Channel(Clip(1.0), Gaussian(z=30.0)))
    done = split(people())
    found = [attack(noisy, done, rounds=1, shadows=4, shadow_people=40, seed=seed) for seed in range(6)]
    areas = np.array([one["likelihood_ratio"]["auc"] for one in found])
    guesses = np.array([one["lists"]["accuracy"] for one in found])
    for figures in (areas, guesses):
        # One interval in twenty misses; two of six or more do once in 30 times, and the seeds are fixed.
        assert ((figures[:, 1] < 0.5) & (figures[:, 2] > 0.5)).sum() >= 5
    # Labels at random: 55 against 55 people have a deviation of 0.055.
    assert abs(areas[:, 0].mean() - 0.5) < 4 * 0.055 / 6**0.5
    assert all(one["allowed"]["epsilon"] < 1 and not one["contradicted"] for one in found)


def test_the_forest_reads_lists_that_tell_and_never_passes_the_oracle() -> None:
    found = attack(Counts(), split(people(names=True)), rounds=1, shadows=4)["lists"]
    assert found["accuracy"][0] == pytest.approx(1.0)
    assert found["ceiling"] == pytest.approx(1.0)
    assert found["distinct"] == 100
    groups = attack(Counts(), split(people()), rounds=1, shadows=4)["lists"]
    assert groups["distinct"] == 3
    assert 0.5 <= groups["ceiling"] < 0.65
    assert groups["accuracy"][0] <= groups["ceiling"]


def test_the_attacker_of_a_released_model_has_some_of_the_others_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    done = split(people(names=True), "held-out-users:valid=0,test=0.4")
    fitted = fit(Counts(), Simulator(done), rounds=1, evaluate_every=0)
    trained = spied(monkeypatch)
    found = attack(Counts(), done, rounds=1, shadows=4, released=Released(fitted.method, fitted.shared, 0, math.inf))
    own = dict(trained)["lists' shadow"]
    assert not done.learn[own].any()
    assert (found["members"], found["others"], found["lists"]["shadow_people"], len(own)) == (90, 30, 30, 24)
    assert found["lists"]["accuracy"][0] == pytest.approx(1.0)


def test_the_forest_does_not_say_of_everyone_what_most_of_its_own_people_are() -> None:
    done = split(people())
    bench = lab(Counts(), done)
    target = bench.trained(np.arange(60, 105), "target")
    guesses, kinds, used = membership._from_lists(bench, target, np.arange(60), np.arange(60, 150))
    assert used == 48
    assert 0 < guesses.sum() < 90
    assert all(len(np.unique(guesses[kinds == kind])) == 1 for kind in np.unique(kinds))


def test_fewer_people_may_be_asked_about() -> None:
    found = attack(FedIALS(factors=4), split(people()), rounds=1, shadows=4, people=60)
    assert (found["members"], found["others"], found["trained_on"]) == (30, 30, 75)
    assert "by their features alone" in found["lists"]["skipped"]
    assert found["likelihood_ratio"]["rates"] == []


def test_members_in_no_round_left_no_trace() -> None:
    found = attack(FedIALS(factors=8), split(people(240)), rounds=1, cohort=30, shadows=8)
    assert (found["trained_on"], found["took_part"]) == (120, 30)
    alone, every = found["likelihood_ratio"]["auc_took_part"][0], found["likelihood_ratio"]["auc"][0]
    assert alone > 0.8
    # A quarter of the members can be found, the others cannot.
    assert every == pytest.approx(0.25 * alone + 0.75 * 0.5, abs=0.08)
    assert len(found["likelihood_ratio"]["rates"]) == 1


def test_a_cohort_that_does_not_fit_is_said() -> None:
    found = attack(Counts(), split(people()), rounds=1, cohort=40, shadows=4, shadow_people=30)
    assert found["notes"] == ["The lists' shadow model has 24 people, so all are in a round, not 40."]


def simulated(shift: float, own: float, seed: int, took_target: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(seed)
    count = len(took_target)
    level, extra = generator.normal(size=(count, 1)) * 2, generator.normal(size=(count, 1)) * own + shift
    took = np.tile([True, False], (count, 4)) ^ (generator.random((count, 1)) < 0.5)
    # A model may do better altogether.
    known = level + took * extra + generator.normal(size=(count, 8)) + 10 * generator.normal(size=8)
    seen = level[:, 0] + took_target * extra[:, 0] + generator.normal(size=count) - 5.0
    return likelihood_ratio(seen, known, took)


def test_the_likelihood_ratio_is_nearly_as_good_as_knowing_everything() -> None:
    members = np.arange(4000) < 2000
    # Had one known each level, two normals two deviations apart would remain: AUC 0.921.
    assert 0.89 < delong(simulated(2.0, 0.0, 0, members), members).value < 0.925
    # People who are moved this way or that can be told although nobody is moved on average.
    assert delong(simulated(0.0, 3.0, 1, members), members).value > 0.75
    assert delong(simulated(0.0, 0.0, 2, members), members).low < 0.5
    odds = simulated(2.0, 0.0, 3, members)
    near = np.abs(odds - 1.0) < 0.5
    share = members[near].mean()
    assert share == pytest.approx(math.e / (1 + math.e), abs=0.08), "odds are what they say"


def test_nobody_in_any_shadow_gives_no_odds() -> None:
    odds = likelihood_ratio(np.arange(5.0), np.zeros((5, 4)), np.zeros((5, 4), dtype=np.bool_))
    assert np.isfinite(odds).all()


def test_which_methods_rank_by_features() -> None:
    catalogue = split(people()).catalogue()
    assert by_features(SMALL, catalogue)
    assert not by_features(FedMF(factors=2), catalogue)
    assert not by_features(FedIALS(factors=2), catalogue)


def test_a_training_is_as_long_as_the_released_models() -> None:
    @dataclass(frozen=True)
    class Twice(Counts):
        first: int | None = 5

        @property
        def phases(self) -> tuple[Phase, ...]:
            return (Phase("one", Counts(), self.first), Phase("two"))

    assert trained_for(Twice(), planned=10, chosen=12) == 7
    assert trained_for(Twice(first=None), planned=10, chosen=12) == 10


def test_who_can_be_compared() -> None:
    assert not leaves_some_out(split(people()))
    assert leaves_some_out(split(people(), "held-out-users:test=0.3"))
    assert leaves_some_out(split(people(), "cold-users:test=0.3"))
    assert not leaves_some_out(split(people(), "held-out-users:test=0.1,valid=0.1"))
    assert not leaves_some_out(split(people(), "cold-both:test=0.3,valid=0.1"))


def test_scikit_learn_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Callable[[str], Any] = membership.importlib.util.find_spec
    monkeypatch.setattr(membership.importlib.util, "find_spec", lambda name: None if name == "sklearn" else known(name))
    found = attack(Counts(), split(people()), rounds=1, shadows=4)
    assert found["lists"] == {"skipped": f"The attack from lists needs scikit-learn: {install('report')}."}
    assert found["members"] == 75


def test_refusals() -> None:
    done = split(people())
    with pytest.raises(HomebodyError, match="at least 4 shadow models, not 2"):
        attack(Counts(), done, rounds=1, shadows=2)
    with pytest.raises(HomebodyError, match="at least 40 people, half of them members, not 10"):
        attack(Counts(), done, rounds=1, people=10)
    with pytest.raises(HomebodyError, match="here are 10 and 10: use more people"):
        attack(Counts(), split(people(30)), rounds=1)


def test_people_whose_data_is_public_are_neither_members_nor_others(monkeypatch: pytest.MonkeyPatch) -> None:
    done = split(people(), public=0.4)
    assert not leaves_some_out(done)
    asked = spied(monkeypatch)
    attack(FedMF(factors=4), done, rounds=1, shadows=4, forest=False)
    assert all(not done.public[who].any() for _, who in asked)


def test_cohorts_of_public_people_have_no_members_in_them() -> None:
    done = split(people(), public=0.4)
    method = DPPrivRec(factors=4, hidden="4", epochs=1, pretrain_rounds=9, pretraining="public", pretrain_steps=1)
    who = np.flatnonzero(done.learn)
    assert lab(method, done, rounds=2, cohort=5).trained(who, "one").took.sum() <= 10
