"""The loop, with clients that are numbers: what it asks of whom, in which order, and what survives a stop."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from homebody.core import (
    Catalogue,
    Cohort,
    Collected,
    Evaluated,
    Method,
    Newcomer,
    Opened,
    Phase,
    Recommended,
    Total,
    Tree,
    Users,
)
from homebody.core import releases as round_charges
from homebody.errors import Abandoned, HomebodyError
from homebody.privacy import Budget, Channel, Charge, Clip, Laplace, Ledger
from homebody.progress import Progress, Round
from homebody.rng import Rng
from homebody.stopwatch import Lap
from homebody.training import carry, choose, fit, reopened

training = importlib.import_module("homebody.training")

CLIENTS = 12


@dataclass(frozen=True)
class Toy(Method):
    """The server adds up what it hears, and counts the rounds for itself."""

    uplink: Channel = Channel()
    start: float = 0.0

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"w": torch.tensor([self.start]), "first": rng.uniform(2)}

    def init_server(self, shared: Tree) -> Tree:
        return {"rounds": torch.zeros(())}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        rounds = state["rounds"] + 1
        return {**shared, "w": shared["w"] + total.mean["w"] / rounds}, {"rounds": rounds}


@dataclass(frozen=True)
class Second(Toy):
    """Shares `w` with the phase before it; its `first` is longer, and `second` is its own."""

    start: float = 100.0

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"w": torch.tensor([self.start]), "first": torch.full((3,), 7.0), "second": torch.ones(1)}


@dataclass(frozen=True)
class InTwo(Toy):
    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("warm"), Phase("main", Second(), rounds=2))


class Clients:
    """A runtime whose clients count the rounds they took part in; what they send depends on that count."""

    def __init__(self, valid: Mapping[int, float] | None = None, test: Mapping[int, float] | None = None) -> None:
        self.catalogue = Catalogue(5)
        self.device = torch.device("cpu")
        self.simulated = True
        self.log: list[tuple[str, object]] = []
        self.cohorts: list[list[int]] = []
        self.given: list[Tree] = []
        self.count = torch.zeros(CLIENTS)
        self.fail_at: int | None = None
        self.people = np.arange(CLIENTS)
        self._valid, self._test, self._step = valid or {}, test or {}, 0

    def available(self) -> Users:
        return self.people

    def begin(self, method: Method, rng: Rng) -> None:
        self.log.append(("begin", type(method).__name__))
        self.count = rng.fold(torch.arange(CLIENTS)).key % 7 * 1.0

    def collect(self, method: Method, shared: Tree, cohort: Cohort, rng: Rng, step: int) -> Collected:
        users = cohort.users
        self.log.append(("collect", step))
        self.cohorts.append(users.tolist())
        self.given.append(shared)
        self._step = step
        if step == self.fail_at:
            raise ConnectionError("the network is gone")
        self.count = self.count.clone()
        self.count[users] += 1
        sent = self.count[users].sum() * float(rng.uniform(1))
        return Collected(Total({"w": sent[None]}, cohort.size), 3 * len(users), 5 * len(users), loss=float(sent))

    def evaluate(self, method: Method, shared: Tree) -> Evaluated:
        self.log.append(("evaluate", self._step))
        metrics = {"valid/ndcg@10": self._valid.get(self._step, 0.0), "ndcg@10": self._test.get(self._step, 0.0)}
        return Evaluated(metrics, {"user": torch.tensor([self._step])})

    def recommend(self, method: Method, shared: Tree, user: int, k: int) -> list[tuple[int, float]]:
        return [(user, float(self.count[user] + shared["w"]))] * k

    def recommend_for(self, method: Method, shared: Tree, newcomer: Newcomer, k: int) -> Recommended:
        return Recommended([(item, float(shared["w"])) for item in newcomer.items][:k])

    def open(self, release: str, cohort: Cohort, shared: Tree) -> Opened:
        return Opened(release, cohort, again=False)

    def telemetry(self, method: Method) -> Sequence[Charge]:
        return ()

    def state(self, *, lasting: bool = False) -> Tree:
        return {"count": self.count}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.count = state["count"]


class Memory:
    """Checkpoints that outlive a loop; what is saved and what is loaded share nothing with it."""

    def __init__(self, due: bool = True) -> None:
        self.kept: Progress | None = None
        self.saved: list[int] = []
        self._due = due

    def load(self) -> Progress | None:
        return deepcopy(self.kept)

    def due(self) -> bool:
        return self._due

    def save(self, progress: Progress) -> None:
        self.saved.append(progress.step)
        self.kept = deepcopy(progress)


class Watched(Ledger):
    """A ledger that also writes into the runtime's log, so that the order can be read."""

    def __init__(self, log: list[tuple[str, object]]) -> None:
        super().__init__()
        self._log = log

    def charge(self, release: str, charges: Sequence[Charge], **options: Any) -> None:
        super().charge(release, charges, **options)
        self._log.append(("charge", release))


def same(left: Tree, right: Tree) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_each_round_is_charged_before_it_is_collected_and_evaluated_after() -> None:
    runtime = Clients()
    fit(Toy(), runtime, rounds=2, ledger=Watched(runtime.log))
    assert runtime.log == [
        ("begin", "Toy"),
        ("charge", "train/1"),
        ("collect", 1),
        ("evaluate", 1),
        ("charge", "train/2"),
        ("collect", 2),
        ("evaluate", 2),
    ]


def test_a_round_that_fails_was_charged() -> None:
    runtime, ledger = Clients(), Ledger()
    runtime.fail_at = 2
    with pytest.raises(ConnectionError):
        fit(Toy(), runtime, rounds=3, ledger=ledger)
    assert [entry.release for entry in ledger.entries()] == ["train/1"] * 3 + ["train/2"] * 3
    assert ledger.epsilon("server").epsilon == float("inf")


def test_a_charge_that_is_refused_stops_the_round_before_anything_is_collected() -> None:
    class Refusing(Ledger):
        def charge(self, release: str, charges: Sequence[Charge], **options: Any) -> None:
            raise HomebodyError("The budget is spent.")

    runtime = Clients()
    with pytest.raises(HomebodyError, match="budget"):
        fit(Toy(), runtime, rounds=3, ledger=Refusing())
    assert runtime.cohorts == []


@pytest.mark.parametrize(("simulated", "kept"), [(True, True), (True, False), (False, True)])
def test_only_a_simulation_that_resumes_repeats_a_release(simulated: bool, kept: bool) -> None:
    """Its second attempt is the first one bit by bit; any other tells something new, and is charged anew."""
    checkpoints, ledger = Memory(due=False) if kept else None, Ledger()
    for fail_at in (2, None):
        runtime = Clients()
        runtime.simulated, runtime.fail_at = simulated, fail_at
        if fail_at:
            with pytest.raises(ConnectionError):
                fit(Toy(), runtime, rounds=2, ledger=ledger, checkpoints=checkpoints, digest="same")
        else:
            fit(Toy(), runtime, rounds=2, ledger=ledger, checkpoints=checkpoints, digest="same")
    # What came of a round on real devices is kept at once, before anybody sees it: that one is not run again.
    again = [] if simulated and kept else ["train/2#2"] if kept else ["train/1#2", "train/2#2"]
    assert list(dict.fromkeys(entry.release for entry in ledger.entries())) == ["train/1", "train/2", *again]


def test_the_server_step_by_hand() -> None:
    """Three rounds of everyone: w is the sum of the means over the round's number, as the method says."""
    runtime = Clients()
    fitted = fit(Toy(), runtime, rounds=3, seed=5, evaluate_every=0)
    rng = Rng.of(5, "train")
    count = rng.fold("clients").fold(torch.arange(CLIENTS)).key % 7 * 1.0
    w = 0.0
    for number in (1, 2, 3):
        count = count + 1
        w += float(count.sum()) * float(rng.fold("round", number).uniform(1)) / CLIENTS / number
    assert float(fitted.shared["w"]) == pytest.approx(w, rel=1e-6)
    assert torch.equal(fitted.shared["first"], rng.fold("shared").uniform(2))


VALID = {1: 0.1, 2: 0.5, 3: 0.5, 4: 0.2}
TEST = {1: 0.9, 2: 0.3, 3: 0.8, 4: 0.7}


def test_the_round_is_chosen_on_validation_and_all_of_it_comes_back() -> None:
    """Round 1 is best on test and round 3 ties with 2: the first best on validation counts."""
    runtime = Clients(VALID, TEST)
    fitted = fit(Toy(), runtime, rounds=4, cohort=4, seed=1)
    then = Clients(VALID, TEST)
    fit(Toy(), then, rounds=2, cohort=4, seed=1, evaluate_every=0)
    assert fitted.chosen == 2
    assert fitted.metrics == {"valid/ndcg@10": 0.5, "ndcg@10": 0.3}
    assert torch.equal(runtime.count, then.count)
    assert fitted.evaluated.per_user["user"].tolist() == [2]
    again = fit(Toy(), Clients(), rounds=2, cohort=4, seed=1, evaluate_every=0)
    assert same(fitted.shared, again.shared)
    assert fitted.ranked(3, k=2) == again.ranked(3, k=2)


def test_another_metric_may_choose_the_round() -> None:
    assert fit(Toy(), Clients(VALID, TEST), rounds=4, select="ndcg@10").chosen == 1


@pytest.mark.parametrize("rounds", [1, 3])
def test_an_unknown_metric_to_choose_by_is_an_error(rounds: int) -> None:
    with pytest.raises(HomebodyError, match="did you mean 'valid/ndcg@10'"):
        fit(Toy(), Clients(VALID, TEST), rounds=rounds, select="valid/ndcg@1")


@pytest.mark.parametrize(("every", "evaluated"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (9, [5]), (0, [])])
def test_evaluation_every_so_many_rounds_and_at_the_end(every: int, evaluated: list[int]) -> None:
    runtime = Clients({5: 1.0})
    lines: list[Round] = []
    fitted = fit(Toy(), runtime, rounds=5, evaluate_every=every, on_round=lines.append)
    assert [step for what, step in runtime.log if what == "evaluate"] == evaluated
    assert [line.round for line in lines if line.metrics] == evaluated
    assert fitted.chosen == 5


def test_without_evaluation_the_last_round_is_kept() -> None:
    fitted = fit(Toy(), Clients({1: 1.0}), rounds=3, evaluate_every=0)
    assert (fitted.chosen, fitted.metrics) == (3, {})


def test_what_is_told_of_a_round() -> None:
    lines: list[Round] = []
    fit(Toy(), Clients(VALID, TEST), rounds=2, cohort=4, on_round=lines.append)
    first, second = lines
    assert (first.phase, first.round, second.round, second.step, first.clients) == ("train", 1, 2, 2, 4)
    assert (first.bytes_up, first.bytes_down) == (12, 20)
    assert first.metrics == {"valid/ndcg@10": 0.1, "ndcg@10": 0.9}
    assert first.epsilon == {"server": np.inf, "clients": np.inf, "public": np.inf}
    assert first.loss is not None


def test_a_cohort_has_a_fixed_size_without_repeats_and_differs_between_rounds_and_seeds() -> None:
    first, again, other = Clients(), Clients(), Clients()
    fit(Toy(), first, rounds=30, cohort=5, seed=3)
    fit(Toy(), again, rounds=30, cohort=5, seed=3)
    fit(Toy(), other, rounds=30, cohort=5, seed=4)
    assert first.cohorts == again.cohorts
    assert first.cohorts != other.cohorts
    assert all(len(set(cohort)) == 5 for cohort in first.cohorts)
    assert all(cohort == sorted(cohort) for cohort in first.cohorts)
    assert len({tuple(cohort) for cohort in first.cohorts}) > 20
    assert set().union(*first.cohorts) == set(range(CLIENTS))


def test_a_cohort_depends_on_its_round_and_not_on_those_before() -> None:
    short, long = Clients(), Clients()
    fit(Toy(), short, rounds=2, cohort=5)
    fit(Toy(), long, rounds=5, cohort=5)
    assert long.cohorts[:2] == short.cohorts


def test_everyone_is_equally_likely_to_be_chosen() -> None:
    """4,000 draws of 3 from 12: each client 1,000 times; 5.5 deviations are missed once in two million runs."""
    rng = Rng.of(0)
    chosen = np.concatenate([choose(np.arange(12), 3, rng.fold(number)).users for number in range(4000)])
    deviation = np.sqrt(4000 * 0.25 * 0.75)
    assert np.abs(np.bincount(chosen, minlength=12) - 1000).max() < 5.5 * deviation


@pytest.mark.parametrize("size", [0, -1, CLIENTS + 1])
def test_an_impossible_cohort_is_an_error(size: int) -> None:
    with pytest.raises(HomebodyError, match=f"1 to {CLIENTS} clients here, not {size}"):
        fit(Toy(), Clients(), rounds=1, cohort=size)


def test_nobody_to_train_with_is_an_error() -> None:
    runtime = Clients()
    runtime.people = np.arange(0)
    with pytest.raises(HomebodyError, match="No client is available"):
        fit(Toy(), runtime, rounds=1)


def test_impossible_numbers_of_rounds_are_errors() -> None:
    with pytest.raises(HomebodyError, match="Rounds must be at least 1, not 0"):
        fit(Toy(), Clients(), rounds=0)
    with pytest.raises(HomebodyError, match="evaluate-every"):
        fit(Toy(), Clients(), rounds=1, evaluate_every=-1)


def test_a_model_that_is_no_longer_finite_is_an_error_and_never_recorded() -> None:
    @dataclass(frozen=True)
    class Exploding(Toy):
        def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
            shared, state = super().server(shared, state, total)
            return {**shared, "w": shared["w"] / (state["rounds"] < 3)}, state

    lines: list[Round] = []
    checkpoints = Memory()
    with pytest.raises(HomebodyError, match="diverged in round 3: 'w' is no longer finite"):
        fit(Exploding(), Clients(), rounds=5, on_round=lines.append, checkpoints=checkpoints)
    assert [line.round for line in lines] == [1, 2]
    assert checkpoints.saved == [1, 2]


def test_phases_carry_what_has_the_same_name_and_shape_and_share_one_ledger() -> None:
    runtime, ledger = Clients({1: 0.9, 4: 0.2, 5: 0.1}), Ledger()
    lines: list[Round] = []
    fitted = fit(InTwo(), runtime, rounds=3, ledger=ledger, on_round=lines.append)
    before, after = runtime.given[2], runtime.given[3]
    assert float(after["w"]) == pytest.approx(float(third_round(before["w"])), rel=1e-6)
    assert after["first"].tolist() == [*before["first"].tolist(), 7.0]
    assert after["second"].tolist() == [1.0]
    assert list(dict.fromkeys(entry.release for entry in ledger.entries())) == [
        "warm/1",
        "warm/2",
        "warm/3",
        "main/1",
        "main/2",
    ]
    assert [(line.step, line.phase, line.round) for line in lines] == [
        (1, "warm", 1),
        (2, "warm", 2),
        (3, "warm", 3),
        (4, "main", 1),
        (5, "main", 2),
    ]
    assert isinstance(fitted.method, Second)
    assert fitted.chosen == 4  # the best of the last phase, whatever the first one reached
    assert [what for what in runtime.log if what[0] == "begin"] == [("begin", "InTwo"), ("begin", "Second")]


def third_round(w: Tensor) -> Tensor:
    """The last round of the first phase by hand, from what its clients were given."""
    rng = Rng.of(0, "warm")
    count = rng.fold("clients").fold(torch.arange(CLIENTS)).key % 7 * 1.0 + 3
    return w + count.sum() * float(rng.fold("round", 3).uniform(1)) / CLIENTS / 3


def test_optimiser_state_begins_anew_in_a_phase() -> None:
    checkpoints = Memory()
    fit(InTwo(), Clients(), rounds=3, checkpoints=checkpoints)
    assert checkpoints.kept is not None
    assert float(checkpoints.kept.server["rounds"]) == 2


@pytest.mark.parametrize("stopped", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kept", [True, False])
def test_a_loop_that_stopped_in_any_round_goes_on_as_if_it_had_not(stopped: int, kept: bool) -> None:
    """Five rounds in two phases; checkpoints after every round, or at the ends of phases alone."""
    valid = {1: 0.3, 2: 0.1, 4: 0.8, 5: 0.2}
    whole, all_lines = Clients(valid), []
    asked = {"rounds": 3, "cohort": 4, "digest": "same"}
    expected = fit(InTwo(), whole, **asked, ledger=Ledger(), on_round=all_lines.append)

    checkpoints, ledger = Memory(due=kept), Ledger()
    broken = Clients(valid)
    broken.fail_at = stopped
    lines: list[Round] = []
    with pytest.raises(ConnectionError):
        fit(InTwo(), broken, **asked, ledger=ledger, on_round=lines.append, checkpoints=checkpoints)
    done = (checkpoints.kept or Progress()).step
    lines = lines[:done]
    runtime = Clients(valid)
    fitted = fit(InTwo(), runtime, **asked, ledger=ledger, on_round=lines.append, checkpoints=checkpoints)

    assert done == (stopped - 1 if kept else 3 * (stopped > 3))
    assert [step for what, step in runtime.log if what == "collect"] == list(range(done + 1, 6))
    assert runtime.cohorts == whole.cohorts[done:]
    assert same(fitted.shared, expected.shared)
    assert torch.equal(runtime.count, whole.count)
    assert fitted.chosen == expected.chosen == 4
    assert fitted.metrics == expected.metrics
    assert ledger.entries() == expected.ledger.entries()
    told = [(line.phase, line.round, line.loss, line.metrics, line.bytes_up) for line in lines]
    assert told == [(line.phase, line.round, line.loss, line.metrics, line.bytes_up) for line in all_lines]


def test_checkpoints_are_written_when_due_and_at_the_end_of_each_phase() -> None:
    always, never = Memory(), Memory(due=False)
    fit(InTwo(), Clients(), rounds=3, checkpoints=always)
    fit(InTwo(), Clients(), rounds=3, checkpoints=never)
    assert always.saved == [1, 2, 3, 4, 5]
    assert never.saved == [3, 5]


@pytest.mark.parametrize("every", [1, 0])
def test_a_finished_loop_answers_from_its_checkpoint_alone(every: int) -> None:
    checkpoints, ledger = Memory(), Ledger()
    asked = {"rounds": 4, "cohort": 4, "evaluate_every": every, "ledger": ledger, "checkpoints": checkpoints}
    expected = fit(Toy(), Clients(VALID), **asked)
    runtime = Clients(VALID)
    fitted = fit(Toy(), runtime, **asked)
    assert runtime.cohorts == []
    assert fitted.chosen == expected.chosen
    assert same(fitted.shared, expected.shared)
    assert fitted.ranked(1) == expected.ranked(1)


@pytest.mark.parametrize("lost", [1, 4])
def test_a_ledger_that_knows_fewer_rounds_than_were_done_is_refused(lost: int) -> None:
    checkpoints = Memory()
    fit(Toy(), Clients(), rounds=4, checkpoints=checkpoints, ledger=Ledger())
    short, runtime = Ledger(), Clients()
    for number in range(1, 5 - lost):
        short.charge(f"train/{number}", [])
    with pytest.raises(HomebodyError, match="lost charges"):
        fit(Toy(), runtime, rounds=5, checkpoints=checkpoints, ledger=short)
    assert runtime.cohorts == []


def test_a_phase_that_ranks_nothing_yet_is_not_evaluated() -> None:
    @dataclass(frozen=True)
    class Quiet(Toy):
        @property
        def phases(self) -> tuple[Phase, ...]:
            return (Phase("warm", evaluated=False), Phase("main", Second(), rounds=2))

    runtime = Clients({1: 0.9, 5: 0.5})
    assert fit(Quiet(), runtime, rounds=3).chosen == 5
    assert [step for what, step in runtime.log if what == "evaluate"] == [4, 5]


def test_phases_of_one_name_are_an_error() -> None:
    @dataclass(frozen=True)
    class Twice(Toy):
        @property
        def phases(self) -> tuple[Phase, ...]:
            return (Phase("main"), Phase("main", Second()))

    with pytest.raises(HomebodyError, match="need different names, not main, main"):
        fit(Twice(), Clients(), rounds=1)


def test_parameters_that_do_not_fit_the_next_phase_are_an_error() -> None:
    for old, new in ((torch.ones(3, 2), torch.ones(2, 2)), (torch.ones(3, 2), torch.ones(3, 4))):
        with pytest.raises(HomebodyError, match="'item' was \\(3, 2\\) and cannot go on"):
            carry({"item": old}, {"item": new})


def test_a_cohort_says_how_it_came_about() -> None:
    drawn, everyone = choose(np.arange(7), 3, Rng.of(0)), choose(np.arange(7), None, Rng.of(0))
    assert (drawn.sampling, drawn.size, drawn.population) == ("fixed", 3, 7)
    assert (everyone.sampling, everyone.size, everyone.population) == ("all", 7, 7)
    assert everyone.users.tolist() == list(range(7))


class Devices(Clients):
    """Clients that may leave a round unanswered, under names of its attempts, and may be asked what they measure."""

    def __init__(self, failing: Mapping[int, int] | None = None, **more: Any) -> None:
        super().__init__(**more)
        self.simulated = False
        self.failing = dict(failing or {})
        self.attempts: dict[str, int] = {}
        self.opened: dict[str, Cohort] = {}
        self.told: Sequence[Charge] = ()

    def open(self, release: str, cohort: Cohort, shared: Tree) -> Opened:
        tried = self.attempts.get(release, 0)
        name = release if not tried else f"{release}#{tried + 1}"
        again = name in self.opened
        self.log.append(("open", name))
        self._name = release
        return Opened(name, self.opened.setdefault(name, cohort), again)

    def collect(self, method: Method, shared: Tree, cohort: Cohort, rng: Rng, step: int) -> Collected:
        if self.failing.get(step, 0) > self.attempts.get(self._name, 0):
            self.attempts[self._name] = self.attempts.get(self._name, 0) + 1
            raise Abandoned("Nobody answered.")
        return replace(super().collect(method, shared, cohort, rng, step), loss=None, answered=len(cohort.users) - 1)

    def telemetry(self, method: Method) -> Sequence[Charge]:
        return self.told


def releases(ledger: Ledger) -> list[str]:
    return list(dict.fromkeys(entry.release for entry in ledger.entries()))


def test_an_abandoned_round_is_charged_and_tried_again_under_another_name() -> None:
    runtime, ledger, lines = Devices({2: 2}), Ledger(), list[Round]()
    fit(Toy(), runtime, rounds=3, ledger=ledger, evaluate_every=0, on_round=lines.append)
    assert releases(ledger) == ["train/1", "train/2", "train/2#2", "train/2#3", "train/3"]
    assert [line.round for line in lines] == [1, 2, 3]
    assert [line.clients for line in lines] == [CLIENTS - 1] * 3


def test_after_five_attempts_the_loop_gives_up() -> None:
    runtime, ledger = Devices({2: 99}), Ledger()
    with pytest.raises(HomebodyError, match=r"Nobody answered\. Given up after 5 attempts at round 2\."):
        fit(Toy(), runtime, rounds=3, ledger=ledger, evaluate_every=0)
    assert releases(ledger) == ["train/1", *("train/2" + more for more in ("", "#2", "#3", "#4", "#5"))]


def test_attempts_end_with_the_budget() -> None:
    """Two releases of ε = 1 fit: the first round, and one attempt at the second."""
    method = Toy(uplink=Channel(Clip(1.0, order=1), Laplace(2.0)))
    runtime, ledger = Devices({2: 99}), Ledger()
    budget = Budget.parse("eps=2.5,delta=0,observer=server")
    fitted = fit(method, runtime, rounds=3, ledger=ledger, evaluate_every=0, budget=budget)
    assert releases(ledger) == ["train/1", "train/2"]
    assert fitted.stopped is not None
    assert "before round 2 of 3" in fitted.stopped
    assert runtime.cohorts == [list(range(CLIENTS))]


def test_a_round_that_was_open_is_with_its_own_cohort_and_not_charged_again() -> None:
    runtime, ledger = Devices(), Ledger()
    mine = Cohort(np.array([1, 4]), "fixed", 2, CLIENTS)
    runtime.opened["train/1"] = mine
    ledger.charge("train/1", round_charges(Toy(), mine))
    fit(Toy(), runtime, rounds=2, cohort=5, ledger=ledger, evaluate_every=0)
    assert runtime.cohorts[0] == [1, 4]
    assert len(runtime.cohorts[1]) == 5
    assert releases(ledger) == ["train/1", "train/2"]


def test_what_devices_measure_is_charged_before_they_are_asked_unless_the_budget_is_spent() -> None:
    method = Toy(uplink=Channel(Clip(1.0, order=1), Laplace(2.0)))
    runtime = Devices(valid={1: 0.5, 2: 0.9})
    runtime.told = method.uplink.charges(Cohort(np.arange(CLIENTS), "all", CLIENTS, CLIENTS))
    ledger = Watched(runtime.log)
    budget = Budget.parse("eps=3.5,delta=0,observer=server")
    fitted = fit(method, runtime, rounds=2, ledger=ledger, budget=budget)
    asked = [what for what in runtime.log if what[0] in ("charge", "evaluate")]
    assert asked == [
        ("charge", "train/1"),
        ("charge", "train/1/telemetry"),
        ("evaluate", 1),
        ("charge", "train/2"),
    ]
    assert fitted.chosen == 1


@dataclass(frozen=True)
class Table(Toy):
    """One row an item, of which the server keeps count."""

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"w": torch.zeros(1), "item": rng.uniform(catalogue.n_items, 2)}

    def init_server(self, shared: Tree) -> Tree:
        return {"rounds": torch.zeros(()), "seen": torch.zeros(len(shared["item"]))}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return {**shared, "item": shared["item"] + 1}, {**state, "seen": state["seen"] + 1}


def test_tables_grow_between_rounds_and_new_rows_are_as_new() -> None:
    class Growing(Devices):
        def available(self) -> Users:
            self.catalogue = Catalogue(5 + 2 * len(self.cohorts))
            return super().available()

    runtime, checkpoints = Growing(), Memory()
    fitted = fit(Table(), runtime, rounds=3, evaluate_every=0, checkpoints=checkpoints)
    start = Table().init_shared(Catalogue(9), Rng.of(0, "train").fold("shared"))["item"]
    steps = torch.tensor([3.0, 3.0, 3.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0])
    torch.testing.assert_close(fitted.shared["item"], start + steps[:, None])
    assert checkpoints.kept is not None
    assert checkpoints.kept.server["seen"].tolist() == [3, 3, 3, 3, 3, 2, 2, 1, 1]


@pytest.mark.parametrize("function", [training.fit, training._phase, training._round])
def test_the_loop_fits_on_a_screen(function: Any) -> None:
    assert len(inspect.getsource(function).splitlines()) <= 40


def test_a_round_counts_compilation_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of training, of which 0.75 are compilation; then a second to evaluate, of which 0.25 are."""
    laps = [Lap(0.25, 0.75), Lap(0.75, 0.25)]
    monkeypatch.setattr(training, "Stopwatch", lambda: SimpleNamespace(lap=lambda: laps.pop(0)))
    lines: list[Round] = []
    fit(Toy(), Clients(), rounds=1, on_round=lines.append)
    assert [(line.seconds, line.evaluation_seconds, line.compile_seconds) for line in lines] == [(0.25, 0.75, 1.0)]


def test_a_training_that_ended_is_reopened_without_asking_anybody() -> None:
    memory, ledger, runtime = Memory(), Ledger(), Clients()
    fitted = fit(Toy(), runtime, rounds=3, ledger=ledger, checkpoints=memory)
    assert memory.kept is not None
    assert memory.kept.charged == 3
    later = Clients()
    known = {"rounds": 3, "seed": 0, "ledger": ledger, "delta": 1e-6}
    again = reopened(Toy(), later, deepcopy(memory.kept), **known, stopped="The budget is spent.")
    assert same(again.shared, fitted.shared)
    assert (again.chosen, again.metrics, again.stopped) == (fitted.chosen, fitted.metrics, "The budget is spent.")
    assert later.log == [("begin", "Toy")]
    assert ledger.releases() == 3
