"""The ways to split beside leave-one-out, against what they say in sets."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from homebody.data.partitions import WAYS, split
from homebody.data.population import Impressions, Population
from homebody.data.splits import Split
from homebody.errors import HomebodyError, several

PARTS = ("train", "valid", "test", "withheld")
PROTOCOLS = ("strict", "isolated", "published")
quick = settings(max_examples=60, deadline=None)
crossed = settings(max_examples=30, deadline=None)
"""Of each way, under any protocol: an example has ten users or more."""
every_way = pytest.mark.parametrize("way", sorted(WAYS))
any_protocol = st.sampled_from(PROTOCOLS)
every_new_way = pytest.mark.parametrize("way", sorted(set(WAYS) - {"leave-one-out"}))
BY_USER = pytest.mark.parametrize("way", ["held-out-users", "cold-users", "cold-both"])
BY_ITEM = pytest.mark.parametrize("way", ["cold-items", "cold-both"])


def people(*histories: list[int], n_items: int = 12) -> Population:
    items = np.array([item for history in histories for item in history], dtype=np.int32)
    indptr = np.concatenate([[0], np.cumsum([len(history) for history in histories])])
    return Population("toy", indptr, items, n_items=n_items)


def shown(*lines: tuple[int, list[int], list[int]]) -> Impressions:
    """Impressions from (user, clicked, not clicked), users ascending."""
    items = [[*clicked, *others] for _, clicked, others in lines]
    return Impressions(
        np.array([user for user, _, _ in lines]),
        np.concatenate([[0], np.cumsum([len(row) for row in items])]),
        np.array([item for row in items for item in row], dtype=np.int32),
        np.array([item in line[1] for row, line in zip(items, lines, strict=True) for item in row]),
        times=np.arange(len(lines)),
    )


@st.composite
def populations(draw: st.DrawFn, repeats: bool = True) -> Population:
    """At least ten users and ten items, half the users with long histories; each has been shown something twice."""
    n_items = draw(st.integers(10, 30))
    history = st.lists(st.integers(0, n_items - 1), max_size=14, unique=not repeats)
    histories = draw(st.lists(history, min_size=3, max_size=7))
    whole = draw(st.permutations(range(n_items)))
    for turn in range(7):
        histories.insert(2 * turn, [*whole[turn:], *whole[:turn]])
    lines = [(user, [user % n_items], [(user + 1) % n_items]) for user in range(len(histories)) for _ in range(2)]
    return replace(people(*histories, n_items=n_items), impressions=shown(*lines))


def made(population: Population, way: str, **options: object) -> Split:
    """The split; a population that cannot be split so is passed over: it is refused in a sentence, as tested below."""
    try:
        return split(population, way, **options)  # type: ignore[arg-type]
    except HomebodyError as error:
        if "leaves nothing" in str(error) or "leaves no user" in str(error):
            reject()
        raise


def parts(done: Split, user: int) -> dict[str, list[int]]:
    return {part: done.part(user, part).tolist() for part in PARTS}  # type: ignore[arg-type]


def tell(done: Split) -> list[dict[str, list[int]]]:
    return [parts(done, user) for user in range(done.n_users)]


def tell_all(done: Split) -> tuple[list[dict[str, list[int]]], dict[str, list[int]]]:
    """Also which impressions are in which part."""
    return tell(done), {name: numbers.tolist() for name, numbers in (done.shown or {}).items()}


def own(population: Population, user: int, protocol: str) -> list[int]:
    """What counts of a user's history."""
    history = population.history(user).tolist()
    return history if protocol == "published" else list(dict.fromkeys(history))


def listed(row: np.ndarray, n_items: int) -> list[int]:
    """What is not padding, which stands at the end."""
    found = [item for item in row.tolist() if 0 <= item < n_items]
    assert row.tolist()[len(found) :] == [n_items] * (len(row) - len(found))
    return found


def nearest(share: float, count: int) -> int:
    """A share of a count to the nearest whole number, halves up."""
    return math.floor(share * count + 0.5)


def is_in_order(some: list[int], history: list[int]) -> bool:
    rest = iter(history)
    return all(item in rest for item in some)


@every_way
@given(
    population=populations(),
    protocol=any_protocol,
    seed=st.integers(0, 2**31),
    how=st.sampled_from(["latest", "random"]),
)
@crossed
def test_nothing_is_lost_nor_stands_twice_and_training_keeps_its_order(
    way: str, protocol: str, population: Population, how: str, seed: int
) -> None:
    done = made(population, way, protocol=protocol, how=how, seed=seed, negatives=5)
    for user in range(population.n_users):
        history, found = own(population, user, protocol), parts(done, user)
        assert Counter(item for part in PARTS for item in found[part]) == Counter(history)
        assert is_in_order(found["train"], history)
        if how == "latest" and way in ("ratio", "held-out-users", "cold-users", "leave-one-out"):
            assert found["train"] + found["valid"] + found["test"] == history
        for part in ("valid", "test", "withheld"):
            assert how == "random" or is_in_order(found[part], history)
        assert done.lengths[user] == len(found["train"])
        for part in PARTS:
            assert done.sizes(part)[user] == len(found[part])  # type: ignore[arg-type]
    if not way.startswith("impressions"):
        asked = [user for user in range(done.n_users) if parts(done, user)["valid"] + parts(done, user)["test"]]
        assert done.asked().tolist() == asked


@every_new_way
def test_the_seed_decides_and_decides_alone(way: str) -> None:
    lines = [(user, [1], [2]) for user in range(40) for _ in range(3)]
    population = replace(people(*[list(range(30))] * 40, n_items=60), impressions=shown(*lines))
    one, again, other = (tell_all(split(population, way, how="random", seed=seed)) for seed in (1, 1, 2))
    assert one == again
    assert (one == other) == (way in ("impressions", "impressions-later"))  # time decides there, not the seed


@pytest.mark.parametrize("way", ["held-out-users", "cold-users", "cold-items", "cold-both"])
def test_who_is_chosen_depends_on_the_seed_even_where_the_latest_are_held_out(way: str) -> None:
    population = people(*[list(range(30))] * 40, n_items=60)
    one, other = (split(population, way, how="latest", seed=seed) for seed in (1, 2))
    assert tell(one) != tell(other)


@given(
    population=populations(),
    test=st.sampled_from([0.1, 0.2, 0.25, 0.5, 0.85]),
    valid=st.sampled_from([0.05, 0.1, 0.125]),
    protocol=any_protocol,
)
@quick
def test_a_ratio_takes_its_share_of_each_user_and_leaves_one_to_learn_from(
    population: Population, test: float, valid: float, protocol: str
) -> None:
    done = made(population, f"ratio:test={test},valid={valid}", protocol=protocol, negatives=3)
    whole = 0
    for user in range(population.n_users):
        length = len(own(population, user, protocol))
        in_test = min(nearest(test, length), max(length - 1, 0))
        in_valid = min(nearest(valid, length), max(length - 1, 0) - in_test)
        found = parts(done, user)
        assert (len(found["test"]), len(found["valid"])) == (in_test, in_valid)
        assert not length or found["train"]
        whole += bool(length) and in_test + in_valid == 0
    said = f"{several(whole, 'user has', 'users have')} too few interactions to be asked; they train."
    assert (said in done.notes) == bool(whole)
    assert done.learn.all()
    assert not len(done.absent)


def test_a_ratio_by_hand() -> None:
    """Ten: two for test, one for validation. Five: one and one. Three: one and none. Two: all for training."""
    population = people(list(range(10)), [3, 1, 4, 0, 5], [2, 7, 8], [6, 9])
    done = split(population, "ratio", how="latest")
    assert tell(done)[0] == {"train": [0, 1, 2, 3, 4, 5, 6], "valid": [7], "test": [8, 9], "withheld": []}
    assert tell(done)[1] == {"train": [3, 1, 4], "valid": [0], "test": [5], "withheld": []}
    assert tell(done)[2] == {"train": [2, 7], "valid": [], "test": [8], "withheld": []}
    assert tell(done)[3] == {"train": [6, 9], "valid": [], "test": [], "withheld": []}
    assert done.notes == ("1 user has too few interactions to be asked; they train.",)
    assert done.asked().tolist() == [0, 1, 2]
    assert done.relevant(np.array([2, 0]), "test").tolist() == [[8, -1], [8, 9]]
    assert done.relevant(np.array([2, 0]), "valid").tolist() == [[-1], [7]]


def test_a_user_who_is_asked_in_validation_alone_is_not_said_to_be_asked_nothing() -> None:
    done = split(people([3, 1, 4, 0], list(range(10))), "ratio:test=0.1,valid=0.125", how="latest")
    assert tell(done)[0] == {"train": [3, 1, 4], "valid": [0], "test": [], "withheld": []}
    assert done.notes == ()


def counts(population: Population, way: str, what: str, settings_: dict[str, float]) -> tuple[int, int]:
    number = population.n_users if what == "users" else population.n_items
    return max(1, nearest(settings_["test"], number)), max(1, nearest(settings_["valid"], number))


@BY_USER
@given(population=populations(), seed=st.integers(0, 99), share=st.sampled_from([0.1, 0.2, 0.34]))
@quick
def test_a_share_of_the_users_is_set_aside(way: str, population: Population, seed: int, share: float) -> None:
    done = made(population, f"{way}:test={share},valid=0.15", seed=seed)
    test, valid = counts(population, way, "users", {"test": share, "valid": 0.15})
    assert (~done.learn).sum() == test + valid
    in_test = np.flatnonzero(done.sizes("test"))
    in_valid = np.flatnonzero(done.sizes("valid"))
    assert len(in_test) <= test
    assert len(in_valid) <= valid
    assert not set(in_test) & set(in_valid)
    assert not done.learn[in_test].any()
    assert not done.learn[in_valid].any()
    silent = 0
    for user in range(done.n_users):
        found, history = parts(done, user), own(population, user, "strict")
        if way == "held-out-users":
            assert not done.learn[user] or found["train"] == history
            asked = found["valid"] + found["test"]
            assert done.learn[user] or len(asked) == math.floor(0.5 * len(history))
            silent += not done.learn[user] and not asked
        elif not done.learn[user]:
            assert found["train"] == []
        if way == "cold-users":
            assert sorted(map(len, found.values()))[:3] == [0, 0, 0]
    if way != "cold-both":
        how = "with no history at all" if way == "cold-users" else "after adapting to the rest of what they have"
        said = (
            f"{several(len(in_valid), 'user is', 'users are')} asked in validation and {len(in_test):,} in test, {how}."
        )
        assert said in done.notes
    few = f"{several(silent, 'held-out user has', 'held-out users have')} too few interactions to be asked anything."
    assert (few in done.notes) == bool(silent)


@pytest.mark.parametrize(("asked", "expected"), [(0.2, 2), (0.5, 5), (0.89, 8)])
def test_held_out_users_are_asked_about_their_share(asked: float, expected: int) -> None:
    done = split(people(*[list(range(10))] * 20), f"held-out-users:asked={asked}", how="latest")
    assert Counter(done.sizes("test").tolist()) == {0: 16, expected: 4}
    assert Counter(done.sizes("valid").tolist()) == {0: 18, expected: 2}
    for user in done.asked().tolist():
        found = parts(done, user)
        assert found["train"] == list(range(10 - expected))
        assert found["valid"] + found["test"] == list(range(10 - expected, 10))
    assert done.notes == (
        "2 users are asked in validation and 4 in test, after adapting to the rest of what they have.",
    )


@BY_ITEM
@given(population=populations(), seed=st.integers(0, 99), protocol=any_protocol)
@quick
def test_cold_items_are_nobodys_in_training(way: str, population: Population, seed: int, protocol: str) -> None:
    done = made(population, way, seed=seed, protocol=protocol, negatives=4)
    test, valid = counts(population, way, "items", {"test": 0.1, "valid": 0.1})
    assert len(done.absent) == test + valid
    assert done.absent.tolist() == sorted(set(done.absent.tolist()))
    gone = set(done.absent.tolist())
    found = tell(done)
    in_test, in_valid = ({item for one in found for item in one[held]} for held in ("test", "valid"))
    assert in_test | in_valid <= gone
    assert not in_test & in_valid
    assert len(in_test) <= test
    assert len(in_valid) <= valid
    for user, one in enumerate(found):
        assert not gone & set(one["train"])
        if way == "cold-items":
            assert one["withheld"] == []
        else:
            assert not done.learn[user] or one["valid"] + one["test"] == []
            assert done.learn[user] or one["train"] == []
    assert done.notes[-1 - len(idle(done)) - bool(withheld(done))] == (
        f"{several(valid, 'item appears', 'items appear')} in validation and {test:,} in test alone: "
        "in training nobody has them, nor meets them as negatives; they are ranked among themselves."
    )
    assert (f"{withheld(done):,} interactions are in no part." in done.notes) == bool(withheld(done))


def withheld(done: Split) -> int:
    return int(done.sizes("withheld").sum())


def idle(done: Split) -> list[str]:
    count = sum(bool(learns) and not len(done.training(user)) for user, learns in enumerate(done.learn))
    if count == 1:
        return ["1 user has no training items and takes no part."]
    return [f"{count:,} users have no training items and take no part."] if count else []


@every_way
@given(population=populations(), seed=st.integers(0, 9))
@crossed
def test_those_without_training_items_are_counted(way: str, population: Population, seed: int) -> None:
    done = made(population, way, seed=seed)
    assert [note for note in done.notes if "no training items" in note] == idle(done)


def test_cold_both_asks_new_users_about_new_items_of_their_own_group_alone() -> None:
    population = people(*[list(range(20))] * 30, n_items=20)
    done, items = split(population, "cold-both", seed=4), split(population, "cold-items", seed=4)
    assert np.array_equal(done.absent, items.absent)
    group = dict.fromkeys(range(20), 0)
    group |= dict.fromkeys(parts(items, 0)["valid"], 1) | dict.fromkeys(parts(items, 0)["test"], 2)
    assert Counter(group.values()) == {0: 16, 1: 2, 2: 2}
    kinds: Counter[int] = Counter()
    for user, found in enumerate(tell(done)):
        kind = 0 if done.learn[user] else 1 if found["valid"] else 2
        kinds[kind] += 1
        mine = [item for item in range(20) if group[item] == kind]
        assert found[PARTS[kind]] == mine
        assert found["withheld"] == [item for item in range(20) if group[item] != kind]
    assert kinds == {0: 24, 1: 3, 2: 3}
    told = (
        "2 items appear in validation and 2 in test alone: in training nobody has them, nor meets them as negatives; "
    )
    assert done.notes == (
        told + "they are ranked among themselves.",
        f"{24 * 4 + 3 * 18 + 3 * 18:,} interactions are in no part.",
    )


def excluded_in_sets(done: Split, population: Population, user: int) -> set[int]:
    """What a user's training negatives avoid, as the protocols say it."""
    gone = set(done.absent.tolist())
    if done.protocol == "strict":
        return gone | set(done.training(user).tolist())
    history = set(population.history(user).tolist())
    if done.protocol == "published":
        return gone | history
    ranked = {
        item
        for held in ("valid", "test")
        if len(done.part(user, held))  # type: ignore[arg-type]
        for item in done.candidates(np.array([user]), held)[0].tolist()  # type: ignore[arg-type]
        if item >= 0
    }
    return gone | history | ranked


@every_way
@given(protocol=any_protocol, population=populations(), seed=st.integers(0, 99))
@crossed
def test_negatives_avoid_what_the_protocol_says_and_references_are_told_the_same(
    way: str, protocol: str, population: Population, seed: int
) -> None:
    done = made(population, way, protocol=protocol, seed=seed, negatives=4)
    users = np.arange(done.n_users)[::-1].copy()
    padded, histories = done.padded(users), done.histories()
    assert histories.learn.tolist() == done.learn.tolist()
    assert histories.catalogue.n_items == done.n_items
    for row, user in enumerate(users.tolist()):
        mine = done.training(user).tolist()
        avoided = listed(padded.excluded[row], done.n_items)
        assert avoided == sorted(excluded_in_sets(done, population, user))
        assert padded.items[row][padded.valid[row]].tolist() == mine
        assert padded.valid[row].tolist() == [True] * len(mine) + [False] * (padded.valid.shape[1] - len(mine))
        assert histories.items[histories.indptr[user] : histories.indptr[user + 1]].tolist() == mine
        assert histories.avoid is not None
        start, stop = histories.avoid[0][user : user + 2]
        assert histories.avoid[1][start:stop].tolist() == avoided


@every_way
@given(protocol=any_protocol, population=populations(), seed=st.integers(0, 99), negatives=st.sampled_from([1, 5, 99]))
@crossed
def test_candidates_are_distinct_and_never_the_users_own(
    way: str, protocol: str, population: Population, seed: int, negatives: int
) -> None:
    done = made(population, way, protocol=protocol, seed=seed, negatives=negatives)
    if way.startswith("impressions"):
        return
    for held in ("valid", "test"):
        users = np.flatnonzero(done.sizes(held))
        for row, user in zip(done.candidates(users, held).tolist(), users.tolist(), strict=True):
            mine = set(population.history(user).tolist())
            if held == "valid" and protocol == "strict":
                mine -= set(done.part(user, "test").tolist())
            free = set(range(done.n_items)) - mine
            if way in ("cold-items", "cold-both"):
                free &= asked_about(done, held)
            drawn = [item for item in row if item >= 0]
            assert len(set(drawn)) == len(drawn) == min(negatives, len(free))
            assert set(drawn) <= free
            assert row == drawn + [-1] * (negatives - len(drawn))


@every_way
@given(protocol=any_protocol, population=populations(), seed=st.integers(0, 99))
@crossed
def test_what_is_asked_and_what_a_full_ranking_leaves_out(
    way: str, protocol: str, population: Population, seed: int
) -> None:
    done = made(population, way, protocol=protocol, seed=seed, negatives=2)
    users = np.arange(done.n_users)
    for held in ("valid", "test"):
        relevant, seen = done.relevant(users, held), done.seen(users, held)
        for user in users.tolist():
            found = {part: set(items) for part, items in parts(done, user).items()}
            asked = [item for item in relevant[user].tolist() if item >= 0]
            assert asked == sorted(found[held])
            left_out = found["train"] | found["withheld"]
            left_out = left_out | found["valid"] if held == "test" else left_out - found["valid"]
            expected = left_out - found["test"]
            if way in ("cold-items", "cold-both"):
                expected = set(range(done.n_items)) - asked_about(done, held)
            assert listed(seen[user], done.n_items) == sorted(expected)


def asked_about(done: Split, held: str) -> set[int]:
    """The new items of a part: as many as it should have, and all that anyone is asked about in it."""
    assert done.unasked is not None
    fresh = set(range(done.n_items)) - set(done.unasked[held].tolist())  # type: ignore[index]
    assert fresh <= set(done.absent.tolist())
    assert all(set(done.part(user, held).tolist()) <= fresh for user in range(done.n_users))  # type: ignore[arg-type]
    other = set(range(done.n_items)) - set(done.unasked["test" if held == "valid" else "valid"].tolist())
    assert not fresh & other
    assert fresh | other == set(done.absent.tolist())
    return fresh


def test_repeats_that_published_keeps_are_asked_once() -> None:
    done = split(
        people([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], [1, 2, 3]), "ratio:test=0.2", protocol="published", how="latest"
    )
    assert done.part(0, "test").tolist() == [9, 9]
    assert done.relevant(np.array([0]), "test").tolist() == [[9, -1]]
    assert done.notes[0] == "1 repeated interaction is kept: a held-out item may stand in training too."


@given(lines=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=20), share=st.sampled_from([0.3, 0.5, 0.9]))
@quick
def test_a_users_first_impressions_validate_and_the_others_test(lines: list[tuple[int, bool]], share: float) -> None:
    told = sorted([(0, True), (0, True), (1, True), (1, True), (1, True), (1, True), *lines], key=lambda line: line[0])
    impressions = shown(*[(user, [1, 2] if clicked else [], [3, 4]) for user, clicked in told])
    population = replace(people(*[[0, 1, 5]] * 5), impressions=impressions)
    done = split(population, f"impressions:valid={share}")
    assert done.shown is not None
    valid, test, alone = [], [], 0
    for user in range(5):
        numbers = [n for n, line in enumerate(told) if line == (user, True)]
        early = math.floor(share * len(numbers))
        if len(numbers) == 1:  # in turn
            early = math.floor(share * (alone + 1)) - math.floor(share * alone)
            alone += 1
        valid += numbers[:early]
        test += numbers[early:]
    assert done.shown["valid"].tolist() == valid
    assert done.shown["test"].tolist() == test
    assert done.asked().tolist() == sorted({user for user, clicked in told if clicked})
    silent = sum(not clicked for _, clicked in told)
    said = f"{silent:,} impressions are not asked: nothing or everything in them was clicked."
    if silent == 1:
        said = "1 impression is not asked: nothing or everything in it was clicked."
    asked = [len({told[n][0] for n in numbers}) for numbers in (valid, test)]
    counts = (
        f"{several(asked[0], 'user is', 'users are')} asked about {several(len(valid), 'impression')} in validation, "
        f"{asked[1]:,} about {len(test):,} in test."
    )
    assert done.notes == ((said, counts) if silent else (counts,))
    assert [done.training(user).tolist() for user in range(5)] == [[0, 1, 5]] * 5
    assert done.learn.all()


def test_an_impression_in_which_everything_was_clicked_asks_nothing() -> None:
    impressions = shown((0, [1], [2]), (0, [1, 2], []), (0, [3], [4]))
    done = split(replace(people([0, 1, 5]), impressions=impressions), "impressions")
    assert done.shown is not None
    assert (done.shown["valid"].tolist(), done.shown["test"].tolist()) == ([0], [2])
    assert done.notes[0] == "1 impression is not asked: nothing or everything in it was clicked."


MANY = [list(range(10))] * 10


@pytest.mark.parametrize(
    ("way", "histories", "said"),
    [
        ("ratio:test=2", MANY, r"The split's test must be a share between 0 and 1, not 2\."),
        ("ratio:test=0", MANY, r"The split's test must be a share between 0 and 1, not 0\."),
        ("ratio:test=1", MANY, r"The split's test must be a share between 0 and 1, not 1\."),
        ("ratio:test=-0.1", MANY, "must be a share between 0 and 1, not -0.1"),
        ("ratio:test=nan", MANY, "must be a share between 0 and 1, not nan"),
        ("ratio:tset=0.1", MANY, "There is no setting of the split ratio 'tset'; did you mean 'test'"),
        ("ratio:test=some", MANY, r"The split takes test as a share such as test=0.2, not 'test=some'\."),
        ("ratio:test", MANY, "The split takes test as a share such as test=0.2, not 'test'"),
        ("ratio:test=0.6,valid=0.4", MANY, "leave nothing to train on: give shares whose sum is below 1"),
        ("cold-items:test=0.9", MANY, "leave nothing to train on: give shares whose sum is below 1"),
        ("leave-one-out:test=0.2", MANY, "The split leave-one-out has no settings: leave out ':test=0.2'"),
        ("cold-user", MANY, "There is no split 'cold-user'; did you mean 'cold-users'"),
        ("rato:test=0.2", MANY, "There is no split 'rato'; did you mean 'ratio'"),
        ("", MANY, "There is no split ''"),
        ("impressions", MANY, "toy has no impressions, which this split needs; give a file with --impressions FILE"),
        ("held-out-users", [[1, 2]] * 2, "toy has 2 users: too few to hold 2 out"),
        ("held-out-users:test=0.5,valid=0.49", MANY, "toy has 10 users: too few to hold 10 out"),
        ("cold-users", [[1, 2]] * 2, "toy has 2 users: too few to hold 2 out"),
        ("held-out-users", [[1]] * 9, "The split held-out-users leaves nothing of toy for validation"),
        ("ratio", [[1, 2, 3]] * 3, "The split ratio leaves nothing of toy for validation: it has too few"),
        ("ratio:test=0.01", MANY, "The split ratio:test=0.01 leaves nothing of toy for test: it has too few"),
        ("ratio", [[]] * 3, "The split ratio leaves no user of toy with an interaction to train on"),
    ],
)
def test_what_cannot_be_split_is_refused_in_a_sentence(way: str, histories: list[list[int]], said: str) -> None:
    with pytest.raises(HomebodyError, match=said):
        split(people(*histories), way)


def test_too_few_items_or_impressions_are_refused() -> None:
    with pytest.raises(HomebodyError, match="toy has 2 items: too few to hold 2 out"):
        split(people([0, 1], [1], n_items=2), "cold-items")
    empty = replace(people(*MANY), impressions=shown())
    with pytest.raises(HomebodyError, match="toy has no impressions"):
        split(empty, "impressions")
    with pytest.raises(HomebodyError, match="leaves nothing of toy for validation"):
        split(replace(people(*MANY), impressions=shown((0, [1], [2]))), "impressions")


def test_spaces_around_settings_do_not_matter() -> None:
    population = people(*MANY)
    assert tell(split(population, "ratio: test = 0.3 , valid=0.1")) == tell(
        split(population, "ratio:test=0.3,valid=0.1")
    )


def test_every_way_says_what_it_is() -> None:
    assert set(WAYS) == {
        "leave-one-out", "ratio", "held-out-users", "cold-users", "cold-items", "cold-both",
        "impressions", "impressions-later", "impressions-people",
    }  # fmt: skip
    shares = [share for way in WAYS.values() for name, share in way.settings.items() if name != "above"]
    assert all(way.title for way in WAYS.values())
    assert all(0 < share < 1 for share in shares)


def test_what_is_rated_low_is_withheld() -> None:
    population = replace(
        people(*MANY), ratings=np.tile([5, 3, 4], 1000)[: people(*MANY).n_interactions].astype(np.float32)
    )
    made = split(population, "held-out-users:test=0.4,valid=0,above=3", how="random")
    low = population.ratings <= 3  # type: ignore[operator]
    for user in range(population.n_users):
        own = slice(*made.bounds[[0, 4], user])
        parts = np.repeat(np.arange(4), np.diff(made.bounds[:, user]))
        np.testing.assert_array_equal(low[made.rows[own]], parts == 3)
        asked = made.part(user, "test")
        if made.learn[user]:
            assert not len(asked)
        else:
            assert len(asked) == (parts < 3).sum() // 2
            assert not set(made.part(user, "withheld")) & set(made.candidates(np.array([user]), "test")[0])
            assert set(made.part(user, "withheld")) <= set(made.seen(np.array([user]), "test")[0])
    assert not len(made.part(0, "valid"))
    assert any("Nobody is asked in validation" in note for note in made.notes)
    with pytest.raises(HomebodyError, match="no ratings"):
        split(people(*MANY), "held-out-users:above=3")
    for way in ("ratio:test=0", "impressions:valid=0", "cold-users:test=0"):
        with pytest.raises(HomebodyError, match="share between 0 and 1"):
            split(people(*MANY), way)


@pytest.mark.parametrize("way", ["ratio", "held-out-users", "cold-users", "cold-items", "cold-both"])
def test_nothing_need_be_held_out_for_validation(way: str) -> None:
    population = people(*MANY)
    done = split(population, f"{way}:test=0.2,valid=0", how="random", negatives=3)
    assert not done.sizes("valid").any()
    assert done.sizes("test").any()
    assert len(done.relevant(done.asked(), "test"))
    both = split(population, f"{way}:test=0.2,valid=0.2", how="random", negatives=3)
    # What would have been asked in validation trains.
    assert done.sizes("train")[done.learn].sum() > both.sizes("train")[both.learn].sum()


@pytest.mark.parametrize("way", WAYS)
@given(population=populations(), seed=st.integers(0, 5))
@quick
def test_nobody_public_is_asked_or_learns_with_the_others(way: str, population: Population, seed: int) -> None:
    without, done = made(population, way, seed=seed), made(population, way, seed=seed, public=0.2)
    count = round(0.2 * done.n_users)
    assert done.public.sum() == count
    assert (without.learn & (without.lengths > 0))[done.public].all()
    assert (done.learn == without.learn & ~done.public).all()
    assert (done.lengths == without.lengths).all()
    others = without.asked()[~done.public[without.asked()]]
    assert done.asked().tolist() == others.tolist()
    assert f"{count:,} of {done.n_users:,} people's data is public" in " ".join(done.notes)
    for user in np.flatnonzero(~done.public):
        for part in ("train", "valid", "test", "withheld"):
            assert done.part(user, part).tolist() == without.part(user, part).tolist()
