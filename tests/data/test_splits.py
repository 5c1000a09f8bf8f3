from __future__ import annotations

import math
from collections import Counter

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homebody.data.partitions import leave_one_out
from homebody.data.partitions import split as split_population
from homebody.data.population import Population, build
from homebody.data.splits import PROTOCOLS, Split
from homebody.errors import HomebodyError

PROTOCOL_NAMES = ["strict", "isolated", "published"]
every_protocol = pytest.mark.parametrize("protocol", PROTOCOL_NAMES)
quick = settings(max_examples=60, deadline=None)


def people(*histories: list[int], n_items: int = 12, times: bool = True) -> Population:
    lengths = np.array([len(history) for history in histories])
    items = np.array([item for history in histories for item in history], dtype=np.int32)
    return Population(
        "toy",
        np.concatenate([[0], np.cumsum(lengths)]),
        items,
        n_items=n_items,
        times=np.arange(len(items)) if times else None,
    )


def listed(row: np.ndarray, n_items: int) -> list[int]:
    """What is not padding."""
    return [item for item in row.tolist() if 0 <= item < n_items]


def held_out(split: Split, user: int) -> tuple[int, int]:
    """The item for validation and the one for test; -1 where there is none."""
    parts = [split.part(user, held).tolist() for held in ("valid", "test")]
    assert all(len(part) <= 1 for part in parts)
    assert split.part(user, "withheld").tolist() == []
    return tuple(part[0] if part else -1 for part in parts)  # type: ignore[return-value]


def all_held_out(split: Split) -> list[tuple[int, int]]:
    return [held_out(split, user) for user in range(split.n_users)]


def first_only(history: list[int]) -> list[int]:
    return list(dict.fromkeys(history))


@st.composite
def populations(draw: st.DrawFn) -> Population:
    n_items = draw(st.integers(4, 30))
    history = st.lists(st.integers(0, n_items - 1), max_size=12)
    histories = draw(st.lists(history, min_size=1, max_size=6))
    # Someone who can be asked, under any protocol.
    histories.append(draw(st.permutations(range(n_items)))[: draw(st.integers(3, n_items))])
    return people(*histories, n_items=n_items, times=draw(st.booleans()))


def test_the_latest_is_for_test_and_the_one_before_for_validation() -> None:
    split = leave_one_out(people([5, 1, 9, 2], [3, 8, 0]))
    assert split.how == "latest"
    assert split.training(0).tolist() == [5, 1]
    assert split.training(1).tolist() == [3]
    assert all_held_out(split) == [(9, 2), (8, 0)]
    assert split.relevant(np.array([1, 0]), "valid").tolist() == [[8], [9]]
    assert split.relevant(np.array([1, 0]), "test").tolist() == [[0], [2]]
    assert split.sizes("train").tolist() == [2, 1]
    assert split.learn.tolist() == [True, True]
    assert (split.way, split.absent.tolist(), split.shown) == ("leave-one-out", [], None)
    assert split.lengths.tolist() == [2, 1]
    assert split.asked().tolist() == [0, 1]
    assert split.notes == ()


def test_ties_in_time_are_broken_by_file_order() -> None:
    # Rows out of time order; the last three of user "a" happen at once.
    rows = [("a", 40, 7), ("b", 10, 1), ("a", 30, 7), ("a", 10, 2), ("a", 20, 7), ("b", 30, 1), ("b", 20, 1)]
    users, items, times = (pl.Series(column) for column in zip(*rows, strict=True))
    split = leave_one_out(build("ties", users, items, times=times))
    # Items 10, 20, 30, 40 are numbered 0 to 3: "a" saw 10, then 40, 30, 20; "b" saw 10, 30, 20.
    assert split.training(0).tolist() == [0, 3]
    assert split.training(1).tolist() == [0]
    assert all_held_out(split) == [(2, 1), (2, 1)]


@every_protocol
@given(population=populations(), how=st.sampled_from(["latest", "random"]), seed=st.integers(0, 2**31))
@quick
def test_nothing_is_lost_and_nothing_is_held_out_twice(
    protocol: str, population: Population, how: str, seed: int
) -> None:
    split = leave_one_out(population, protocol=protocol, how=how, seed=seed)
    for user in range(population.n_users):
        history = population.history(user).tolist()
        history = history if protocol == "published" else first_only(history)
        kept = split.training(user).tolist()
        if len(history) < 3:
            assert kept == history
            assert held_out(split, user) == (-1, -1)
            continue
        held = list(held_out(split, user))
        assert Counter(kept + held) == Counter(history)
        if how == "latest":
            assert kept + held == history
        else:
            rest = iter(history)
            assert all(item in rest for item in kept), "training items keep their order"
    assert split.asked().tolist() == [user for user in range(population.n_users) if held_out(split, user)[1] >= 0]


def test_without_times_a_random_one_is_held_out_and_every_pair_equally_often() -> None:
    users = 12_000
    split = leave_one_out(people(*[[0, 1, 2, 3]] * users, times=False))
    assert split.how == "random"
    counts = Counter(all_held_out(split))
    assert len(counts) == 12
    # Five standard errors for each of twelve cells: one false alarm in a hundred thousand seeds; this one is fixed.
    share = 1 / 12
    assert all(abs(n / users - share) < 5 * math.sqrt(share * (1 - share) / users) for n in counts.values())


def test_the_seed_decides_what_is_held_out_at_random() -> None:
    population = people(*[list(range(12))] * 50)
    one, again, other = (leave_one_out(population, how="random", seed=seed) for seed in (1, 1, 2))
    assert all_held_out(one) == all_held_out(again)
    assert [pair[1] for pair in all_held_out(one)] != [pair[1] for pair in all_held_out(other)]


@every_protocol
def test_people_with_too_few_interactions_train_and_are_counted(protocol: str) -> None:
    split = leave_one_out(people([4, 5], [1, 2, 3], [7], []), protocol=protocol)
    assert split.notes == (
        "3 of 4 users have fewer than 3 interactions: they take part in training and are not evaluated.",
        "1 user has no training items and takes no part.",
    )
    assert split.training(0).tolist() == [4, 5]
    assert split.training(2).tolist() == [7]
    assert split.training(3).tolist() == []
    assert split.asked().tolist() == [1]
    # What they have is never their negative, though they are asked nothing.
    excluded = split.padded(np.array([0, 2])).excluded
    assert listed(excluded[0], 12) == [4, 5]
    assert listed(excluded[1], 12) == [7]


@pytest.mark.parametrize("protocol", ["strict", "isolated"])
def test_repeats_are_left_out_and_the_first_counts(protocol: str) -> None:
    split = leave_one_out(people([1, 2, 1, 3, 2, 4], [5, 5, 5, 6]), protocol=protocol)
    assert split.training(0).tolist() == [1, 2]
    assert held_out(split, 0) == (3, 4)
    assert split.training(1).tolist() == [5, 6]
    assert held_out(split, 1) == (-1, -1)
    assert split.notes[0] == "4 repeated interactions were left out: each user's first with an item counts."
    assert split.notes[1].startswith("1 of 2 users has fewer than 3 interactions")


def test_published_keeps_repeats_and_says_so() -> None:
    split = leave_one_out(people([1, 2, 1, 3, 2, 1], [5, 5, 5, 6]), protocol="published")
    assert split.training(0).tolist() == [1, 2, 1, 3]
    assert held_out(split, 0) == (2, 1)
    assert split.training(1).tolist() == [5, 5]
    assert split.notes == ("5 repeated interactions are kept: a held-out item may stand in training too.",)
    # The held-out item is asked about, in training or not, and is never what it is ranked against.
    assert 1 not in split.seen(np.array([0]), "test")[0].tolist()
    assert listed(split.seen(np.array([0]), "test")[0], 12) == [2, 3]


def naive_excluded(split: Split, user: int) -> set[int]:
    """What the protocols say, in sets."""
    training = set(split.training(user).tolist())
    held = set(held_out(split, user)) - {-1}
    if split.protocol == "strict":
        return training
    if split.protocol == "published" or not held:
        return training | held
    ranked = {
        item
        for part in ("valid", "test")
        for item in split.candidates(np.array([user]), part)[0].tolist()  # type: ignore[arg-type]
        if item >= 0
    }
    return training | held | ranked


@every_protocol
@given(population=populations(), seed=st.integers(0, 99), negatives=st.sampled_from([1, 3, 99]))
@quick
def test_negatives_avoid_what_the_protocol_says(
    protocol: str, population: Population, seed: int, negatives: int
) -> None:
    split = leave_one_out(population, protocol=protocol, seed=seed, negatives=negatives)
    users = np.arange(split.n_users)[::-1].copy()
    padded = split.padded(users)
    for row, user in enumerate(users.tolist()):
        excluded = listed(padded.excluded[row], split.n_items)
        assert excluded == sorted(naive_excluded(split, user))
        assert padded.excluded[row].tolist() == excluded + [split.n_items] * (padded.excluded.shape[1] - len(excluded))
        mine = split.training(user).tolist()
        assert padded.items[row, : len(mine)].tolist() == mine
        assert padded.valid[row].tolist() == [True] * len(mine) + [False] * (padded.valid.shape[1] - len(mine))


def test_the_three_protocols_differ_where_they_should() -> None:
    history = [0, 1, 2, 3, 4]
    wide = {name: leave_one_out(people(history, n_items=400), protocol=name) for name in PROTOCOL_NAMES}
    excluded = {name: set(listed(split.padded(np.array([0])).excluded[0], 400)) for name, split in wide.items()}
    assert excluded["strict"] == {0, 1, 2}
    assert excluded["published"] == {0, 1, 2, 3, 4}
    assert excluded["isolated"] > excluded["published"]
    assert 5 + 99 < len(excluded["isolated"]) <= 5 + 2 * 99
    assert set(PROTOCOLS) == set(PROTOCOL_NAMES)


def test_a_given_width_pads_further() -> None:
    padded = leave_one_out(people([5, 1, 9, 2])).padded(np.array([0]), width=4)
    assert padded.items.tolist() == [[5, 1, 0, 0]]
    assert padded.valid.tolist() == [[True, True, False, False]]


@every_protocol
@given(population=populations(), seed=st.integers(0, 99), negatives=st.sampled_from([1, 5, 99]))
@quick
def test_candidates_are_distinct_and_never_the_persons_own(
    protocol: str, population: Population, seed: int, negatives: int
) -> None:
    split = leave_one_out(population, protocol=protocol, seed=seed, negatives=negatives)
    for held in ("valid", "test"):
        rows = split.candidates(split.asked(), held)
        assert rows.shape == (len(split.asked()), negatives)
        for row, user in zip(rows.tolist(), split.asked().tolist(), strict=True):
            own = set(population.history(user).tolist())
            if held == "valid" and protocol == "strict":
                own.discard(held_out(split, user)[1])
            drawn = [item for item in row if item >= 0]
            assert len(set(drawn)) == len(drawn) == min(negatives, split.n_items - len(own))
            assert not set(drawn) & own
            assert all(item < split.n_items for item in drawn)
            assert row == drawn + [-1] * (negatives - len(drawn))


def test_candidates_come_from_the_seed_and_the_person_alone() -> None:
    population = people(*[[0, 1, 2, 3]] * 20, n_items=300)
    one, again, other = (leave_one_out(population, seed=seed) for seed in (3, 3, 4))
    everyone = np.arange(20)
    drawn = one.candidates(everyone, "test")
    assert drawn.shape == (20, 99)
    assert np.array_equal(drawn, again.candidates(everyone, "test"))
    assert np.array_equal(drawn[[7, 2]], one.candidates(np.array([7, 2]), "test"))
    assert not np.array_equal(drawn, other.candidates(everyone, "test"))
    assert not np.array_equal(drawn, one.candidates(everyone, "valid"))
    assert len({tuple(row) for row in drawn.tolist()}) == 20


def test_candidates_are_even() -> None:
    users = 4_000
    split = leave_one_out(people(*[[0, 5, 9]] * users, n_items=12), negatives=3)
    counts = Counter(split.candidates(np.arange(users), "test").ravel().tolist())
    assert sorted(counts) == [1, 2, 3, 4, 6, 7, 8, 10, 11]
    # Three of nine: five standard errors for each item, less than one false alarm in 200,000 seeds; this one is fixed.
    assert all(abs(n / users - 1 / 3) < 5 * math.sqrt(2 / 9 / users) for n in counts.values())


def test_in_strict_validation_alone_the_test_item_may_be_a_candidate() -> None:
    population = people(*[[0, 1, 2, 3]] * 30, n_items=20)
    for protocol in PROTOCOL_NAMES:
        split = leave_one_out(population, protocol=protocol)
        met = bool((split.candidates(np.arange(30), "valid") == 3).any())
        assert met == (protocol == "strict")
        assert not (split.candidates(np.arange(30), "test") == 3).any()


@every_protocol
@given(population=populations())
@quick
def test_a_full_ranking_leaves_out_what_was_known_before(protocol: str, population: Population) -> None:
    split = leave_one_out(population, protocol=protocol)
    for user in split.asked().tolist():
        training, (valid, test) = set(split.training(user).tolist()), held_out(split, user)
        seen = {held: listed(split.seen(np.array([user]), held)[0], split.n_items) for held in ("valid", "test")}
        assert seen["test"] == sorted((training | {valid}) - {test})
        assert seen["valid"] == sorted(training - {valid, test})


def test_what_cannot_be_split_is_refused_in_a_sentence() -> None:
    with pytest.raises(HomebodyError, match=r"No user of toy has the 3 interactions .* the longest history has 2\."):
        leave_one_out(people([1, 2], [3]))
    with pytest.raises(HomebodyError, match="No user of toy has the 3 interactions"):
        leave_one_out(people([1, 1, 1, 2]), protocol="strict")
    with pytest.raises(HomebodyError, match="There is no protocol 'stric'; did you mean 'strict'"):
        leave_one_out(people([1, 2, 3]), protocol="stric")
    with pytest.raises(HomebodyError, match="There is no way to hold out 'newest'"):
        leave_one_out(people([1, 2, 3]), how="newest")
    with pytest.raises(HomebodyError, match="at least 1 negative, not 0"):
        leave_one_out(people([1, 2, 3]), negatives=0)


@every_protocol
def test_leave_one_out_is_the_split_by_default(protocol: str) -> None:
    population = people(*[list(range(12))] * 9, times=False)
    named, default = (
        leave_one_out(population, protocol=protocol, seed=3),
        split_population(population, protocol=protocol, seed=3),
    )
    assert all_held_out(named) == all_held_out(default)
    assert named.way == default.way == "leave-one-out"


def test_what_is_held_out_stays_what_it_was() -> None:
    """Fixed once: a published figure must not move because a split is made another way."""
    split = leave_one_out(people(*[list(range(12))] * 4, n_items=40, times=False), seed=5, negatives=3)
    assert all_held_out(split) == [(7, 10), (0, 2), (3, 0), (4, 11)]
    expected = [[30, 24, 14], [23, 20, 18], [16, 12, 24], [29, 13, 38]]
    assert split.candidates(np.arange(4), "test").tolist() == expected
