"""What clients keep, stored by groups of similar length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from homebody.core import Rows, Tree, Users
from homebody.simulation import states
from homebody.simulation.states import LocalStore

LENGTHS = np.array([4, 0, 2, 4, 3, 1])
MEMBERS = np.flatnonzero(LENGTHS)


def tree(users: Users, step: int, width: int = 4) -> Tree:
    """A state that tells whose it is and when it was kept."""
    mark = torch.from_numpy(users) * 10.0 + step
    index = torch.arange(width).expand(len(users), width)
    return {"mark": mark, "own": Rows(index.clone(), mark[:, None, None].expand(-1, width, 2).clone(), size=9)}


def marks(store: LocalStore, user: int) -> float:
    state = store.get(np.array([user]))
    assert set(state["own"].value.flatten().tolist()) == {float(state["mark"])}
    return float(state["mark"])


def test_nobody_holds_anything_at_first() -> None:
    assert not LocalStore(LENGTHS, MEMBERS).holds(np.arange(6)).any()


@given(st.lists(st.sets(st.sampled_from(MEMBERS.tolist()), min_size=1), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_everyone_gets_back_what_they_last_put(cohorts: list[set[int]]) -> None:
    store, last = LocalStore(LENGTHS, MEMBERS), {}
    states = []
    for step, cohort in enumerate(cohorts):
        users = np.array(sorted(cohort))
        store.put(users, tree(users, step))
        last |= {user: user * 10.0 + step for user in cohort}
        states.append((store.state(), {name: value.clone() for name, value in store.state().items()}))
    assert np.flatnonzero(store.holds(np.arange(6))).tolist() == sorted(last)
    assert {user: marks(store, user) for user in last} == last
    for taken, then in states:
        assert all(torch.equal(taken[name], then[name]) for name in then)
    other = LocalStore(LENGTHS, MEMBERS)
    other.load(store.state(), torch.device("cpu"))
    assert {user: marks(other, user) for user in last} == last
    users = np.array(sorted(last))
    other.put(users, tree(users, 9))
    assert {user: marks(store, user) for user in last} == last


def test_rows_may_grow_wider_from_round_to_round() -> None:
    store = LocalStore(LENGTHS, MEMBERS)
    store.put(np.array([0, 3]), tree(np.array([0, 3]), 1, width=2))
    store.put(np.array([3, 4]), tree(np.array([3, 4]), 2, width=4))
    state = store.get(np.array([0, 3, 4]))
    assert state["mark"].tolist() == [1.0, 32.0, 42.0]
    assert state["own"].index.tolist() == [[0, 1, -1, -1], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert state["own"].size == 9


def test_a_narrower_value_leaves_the_others_whole() -> None:
    """Someone who joins has no rows yet, next to people who have some."""
    store = LocalStore(LENGTHS, MEMBERS)
    store.put(np.array([0, 3]), tree(np.array([0, 3]), 1, width=4))
    store.put(np.array([4]), tree(np.array([4]), 2, width=0))
    state = store.get(np.array([0, 3, 4]))
    assert state["mark"].tolist() == [1.0, 31.0, 42.0]
    assert state["own"].index.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [-1, -1, -1, -1]]


@pytest.mark.parametrize("mixed", [False, True], ids=["by length", "mixed"])
@pytest.mark.parametrize("samples", [1, 5, 1000])
def test_groups_name_every_member_once_and_fit_the_room(samples: int, mixed: bool) -> None:
    lengths = np.random.default_rng(0).integers(0, 50, size=400)
    store = LocalStore(lengths, np.flatnonzero(lengths))
    cohort = np.random.default_rng(1).permutation(400)[:150]
    seen = []
    for users, width in store.groups(cohort, samples, mixed=mixed):
        assert (lengths[users] <= width).all()
        assert len(users) == 1 or len(users) * width <= samples
        seen += users.tolist()
    assert sorted(seen) == sorted(user for user in cohort if lengths[user])


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """Everyone in a bucket with those of the same length alone: 0 and 3, 4, 2, 5."""
    monkeypatch.setattr(states, "SMALL", 0)
    monkeypatch.setattr(states, "WASTE", 0.0)
    store = LocalStore(LENGTHS, MEMBERS)
    assert [users.tolist() for users in store._buckets] == [[0, 3], [4], [2], [5]]
    return store


def test_a_mixed_group_goes_on_with_those_who_are_shorter(apart: LocalStore) -> None:
    groups = [(users.tolist(), width) for users, width in apart.groups(np.arange(6), 12, mixed=True)]
    assert groups == [([0, 3, 4], 4), ([2, 5], 2)]


@given(st.lists(st.sets(st.sampled_from(MEMBERS.tolist()), min_size=1), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mixed_group_gets_back_what_its_members_last_put(apart: LocalStore, cohorts: list[set[int]]) -> None:
    apart.clear()
    last: dict[int, float] = {}
    for step, cohort in enumerate(cohorts):
        for users, width in apart.groups(np.array(sorted(cohort)), 12, mixed=True):
            apart.put(users, tree(users, step, width))
        last |= {user: user * 10.0 + step for user in cohort}
        for users, _ in apart.groups(np.array(sorted(last)), 12, mixed=True):
            state = apart.get(users)
            assert state["mark"].tolist() == [last[user] for user in users]
            own = state["own"]
            assert own.value.shape[:2] == own.index.shape
            for mark, index, value in zip(state["mark"], own.index, own.value, strict=True):
                assert set(value[index >= 0].flatten().tolist()) == {float(mark)}
                assert not value[index < 0].any()


def test_a_mixed_group_may_hold_what_some_of_its_buckets_lack(apart: LocalStore) -> None:
    apart.put(np.array([0, 3]), {"mark": torch.tensor([1.0, 31.0])})
    apart.put(np.array([4]), {})
    assert apart.get(np.array([0, 3, 4]))["mark"].tolist() == [1.0, 31.0, 0.0]
    assert apart.get(np.array([3, 4]))["mark"].tolist() == [31.0, 0.0]


def test_groups_are_no_larger_than_asked() -> None:
    store = LocalStore(np.full(10, 3), np.arange(10))
    assert [len(users) for users, _ in store.groups(np.arange(10), 1000, most=4)] == [4, 4, 2]


def test_little_of_a_bucket_is_padding() -> None:
    lengths = np.random.default_rng(0).lognormal(3, 1, size=20_000).astype(np.int64) + 1
    store = LocalStore(lengths, np.arange(20_000))
    groups = list(store.groups(np.arange(20_000), 10**12))
    padded = sum(len(users) * width for users, width in groups)
    assert padded < 1.3 * lengths.sum()
    assert len(groups) < 60
