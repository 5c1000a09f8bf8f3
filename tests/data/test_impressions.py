"""Impressions that are learnt from and asked: what came before them, who is asked what, what a client gets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from homebody.data.filters import apply
from homebody.data.partitions import split
from homebody.data.population import Impressions, Population
from homebody.data.views import MadeView, move_elsewhere
from homebody.errors import HomebodyError


def shown(*lines: tuple[int, list[int], list[int]], **known: list[int]) -> Impressions:
    """Impressions from (user, clicked, not clicked), users ascending."""
    items = [[*clicked, *others] for _, clicked, others in lines]
    return Impressions(
        np.array([user for user, _, _ in lines]),
        np.concatenate([[0], np.cumsum([len(row) for row in items])]),
        np.array([item for row in items for item in row], dtype=np.int32),
        np.array([item in line[1] for row, line in zip(items, lines, strict=True) for item in row]),
        **{name: np.array(values) for name, values in known.items()},
    )


def people(*histories: list[int], n_items: int = 9, times: list[int] | None = None, **known: object) -> Population:
    items = np.array([item for history in histories for item in history], dtype=np.int32)
    indptr = np.concatenate([[0], np.cumsum([len(history) for history in histories])])
    return Population("toy", indptr, items, n_items, None if times is None else np.array(times), **known)  # type: ignore[arg-type]


FOUR = people(
    [0, 1, 0, 2, 3], [4], [5, 6], [7, 8],
    times=[10, 20, 30, 40, 50, 10, 10, 60, 10, 20],
    impressions=shown(
        (0, [1], [8]), (0, [2], [8]), (0, [3], [7, 8]), (1, [0], [8]), (2, [6], [1]), (3, [1], [0, 2]),
        times=[15, 35, 45, 30, 55, 41],
    ),
)  # fmt: skip


def test_what_came_before_is_known_by_the_times_or_as_the_source_says() -> None:
    before = FOUR.before_impressions()
    assert before is not None
    assert before.tolist() == [1, 3, 4, 1, 1, 2]
    assert FOUR.impressions is not None
    stated = replace(FOUR, impressions=replace(FOUR.impressions, before=np.zeros(6, dtype=np.int64)))
    found = stated.before_impressions()
    assert found is not None
    assert found.tolist() == [0] * 6
    assert replace(FOUR, times=None).before_impressions() is None
    with pytest.raises(HomebodyError, match="after more interactions than its user has"):
        replace(FOUR, impressions=replace(FOUR.impressions, before=np.full(6, 3)))
    with pytest.raises(HomebodyError, match="has 1 times for 6 impressions"):
        replace(FOUR, impressions=replace(FOUR.impressions, times=np.array([1])))


def test_later_impressions_are_asked_and_what_came_since_is_withheld() -> None:
    done = split(FOUR, "impressions-later:test=0.34,valid=0.17")
    assert done.shown is not None
    assert {part: numbers.tolist() for part, numbers in done.shown.items()} == {
        "train": [0, 1, 3], "valid": [5], "test": [2, 4]
    }  # fmt: skip
    # Item 0 counts once, so two came before the impression at time 35, and three before that at 45.
    assert done.before is not None
    assert done.before.tolist() == [1, 2, 3, 1, 1, 2]
    # The first that is asked is of time 41: items of times 50 and 60 are not learnt from.
    assert [done.part(user, "train").tolist() for user in range(4)] == [[0, 1, 2], [4], [5], [7, 8]]
    assert [done.part(user, "withheld").tolist() for user in range(4)] == [[3], [], [6], []]
    assert any("2 interactions are withheld from training" in note for note in done.notes)
    assert "3 impressions of 2 users can be learnt from." in done.notes
    assert done.members().tolist() == [0, 1, 2, 3]
    assert done.members(["impressions"]).tolist() == [0, 1]
    tied = replace(FOUR.impressions, times=np.array([61, 62, 62, 62, 62, 62]))  # type: ignore[type-var]
    later = split(replace(FOUR, impressions=tied), "impressions-later:valid=0").shown
    assert later is not None
    assert later["test"].tolist() == [1, 2, 3, 4, 5]  # what is shown at the same time is not torn apart


def test_impressions_without_times_cannot_be_later() -> None:
    timeless = replace(FOUR, impressions=replace(FOUR.impressions, times=None))  # type: ignore[type-var]
    with pytest.raises(HomebodyError, match="have no times, so none is later than others: choose impressions-people"):
        split(timeless, "impressions-later")
    tied = replace(FOUR.impressions, times=np.zeros(6, dtype=np.int64))  # type: ignore[type-var]
    with pytest.raises(HomebodyError, match="leaves no impression of toy to learn from"):
        split(replace(FOUR, impressions=tied), "impressions-later")


def test_held_out_people_are_asked_with_what_they_had() -> None:
    done = split(FOUR, "impressions-people:test=0.25,valid=0.25", seed=3)
    assert done.shown is not None
    assert FOUR.impressions is not None
    owner = {part: set(FOUR.impressions.users[numbers].tolist()) for part, numbers in done.shown.items()}
    assert owner["train"] == set(np.flatnonzero(done.learn).tolist())
    assert sum(map(len, owner.values())) == 4
    assert len(owner["valid"]) == len(owner["test"]) == 1
    first = {0: 1, 1: 1, 2: 1, 3: 2}  # items that each had before their first impression
    for user in range(4):
        whole = len(set(FOUR.history(user).tolist()))
        assert done.lengths[user] == (whole if user in owner["train"] else first[user])
    assert set(done.asked().tolist()) == owner["valid"] | owner["test"]
    other = split(FOUR, "impressions-people:test=0.25,valid=0.25", seed=4)
    assert (done.learn != other.learn).any()


def test_a_history_that_the_source_cuts_is_not_learnt_from_in_the_plain_split_either() -> None:
    assert FOUR.impressions is not None
    stated = replace(FOUR, impressions=replace(FOUR.impressions, before=np.array([1, 1, 1, 1, 1, 2])))
    assert split(stated, "impressions").lengths.tolist() == [1, 1, 1, 2]
    assert split(FOUR, "impressions").lengths.tolist() == [4, 1, 2, 2]


def test_what_clients_learn_from_is_padded() -> None:
    done = split(FOUR, "impressions-later:test=0.34,valid=0.17")
    some = done.padded_shown(np.array([1, 0, 3]))
    assert some.items.tolist() == [[[0, 8], [9, 9]], [[1, 8], [2, 8]], [[9, 9], [9, 9]]]
    assert some.clicked.tolist() == [[[True, False], [False] * 2], [[True, False]] * 2, [[False] * 2] * 2]
    assert some.before.tolist() == [[1, 0], [1, 2], [0, 0]]
    assert done.most_shown == (2, 2)
    assert split(FOUR, "leave-one-out").most_shown == (1, 1)
    nothing = split(FOUR, "leave-one-out").padded_shown(np.array([0, 1]))
    assert nothing.items.tolist() == [[[9]], [[9]]]
    learnt = done.histories().shown
    assert learnt is not None
    assert (learnt.users.tolist(), learnt.indptr.tolist(), learnt.before.tolist()) == (
        [0, 0, 1],
        [0, 2, 4, 6],
        [1, 2, 1],
    )
    assert learnt.items[learnt.clicked].tolist() == [1, 2, 0]
    assert split(FOUR, "leave-one-out").histories().shown is None


def test_filters_and_views_count_again_what_came_before() -> None:
    assert FOUR.impressions is not None
    stated = replace(FOUR, impressions=replace(FOUR.impressions, before=np.array([1, 3, 5, 1, 1, 2])))
    part = apply(stated, {"top_items": 1})  # item 0, which only user 0 has, twice
    assert part.impressions is None or len(part.impressions.users) == 0
    part = apply(stated, {"min_user": 2})
    assert part.impressions is not None
    assert part.impressions.before is not None
    assert part.impressions.before.tolist() == [1, 3, 5, 1, 2]
    assert part.impressions.times is not None
    assert part.impressions.times.tolist() == [15, 35, 45, 55, 41]
    rated = replace(stated, ratings=np.array([1, 0, 1, 1, 1, 1, 1, 1, 1, 1], dtype=np.float32))
    part = apply(rated, {"min_rating": 1})
    assert part.impressions is not None
    assert part.impressions.before is not None
    assert part.impressions.before.tolist() == [1, 2, 4, 1, 1, 2]
    left, taken = move_elsewhere(stated, "taste", MadeView("svd"))
    assert left.impressions is not None
    assert left.impressions.before is not None
    gone = {user: set(taken.items[taken.indptr[user] : taken.indptr[user + 1]].tolist()) for user in range(4)}
    for user, before, time in zip(
        left.impressions.users.tolist(), left.impressions.before.tolist(), left.impressions.times.tolist(), strict=True  # type: ignore[union-attr]
    ):  # fmt: skip
        raw = stated.impressions.before[stated.impressions.times.tolist().index(time)]  # type: ignore[union-attr,index]
        assert before == sum(item not in gone[user] for item in stated.history(user)[:raw].tolist())


class TestAsked:
    """Impressions that a model may be asked about, among others that are for learning alone."""

    marks = (False, True, False, True, True, False)

    @property
    def people(self) -> Population:
        assert FOUR.impressions is not None
        return replace(FOUR, impressions=replace(FOUR.impressions, asked=np.array(self.marks)))

    def test_only_those_are_asked(self) -> None:
        done = split(self.people, "impressions")
        assert done.shown is not None
        assert sorted(np.concatenate([done.shown["valid"], done.shown["test"]]).tolist()) == [1, 3, 4]
        assert "train" not in done.shown

    def test_held_out_people_are_asked_about_those_and_the_others_learn_from_all(self) -> None:
        for seed in range(6):
            done = split(self.people, "impressions-people:test=0.25,valid=0.25", seed=seed)
            if done.learn[3]:
                break
        assert done.shown is not None
        assert FOUR.impressions is not None
        learners = np.flatnonzero(done.learn)
        assert done.shown["train"].tolist() == np.flatnonzero(np.isin(FOUR.impressions.users, learners)).tolist()
        held = np.concatenate([done.shown["valid"], done.shown["test"]])
        assert set(held.tolist()) == {1, 3, 4} & set(np.flatnonzero(~done.learn[FOUR.impressions.users]).tolist())
        # Whoever is asked has what came before that: user 0 had two articles before the impression of number 1.
        for number in held.tolist():
            user = FOUR.impressions.users[number]
            assert done.lengths[user] == [1, 2, 3, 1, 1, 2][number]

    def test_of_later_impressions_only_those_are_asked(self) -> None:
        done = split(self.people, "impressions-later:test=0.5,valid=0")
        assert done.shown is not None
        assert {part: numbers.tolist() for part, numbers in done.shown.items()} == {
            "train": [0, 1, 3], "valid": [], "test": [4]
        }  # fmt: skip

    def test_filters_and_views_keep_the_marks(self) -> None:
        part = apply(self.people, {"min_user": 2}).impressions
        assert part is not None
        assert part.asked is not None
        assert part.asked.tolist() == [False, True, False, True, False]
        left, _ = move_elsewhere(self.people, "taste", MadeView("svd"))
        assert left.impressions is not None
        assert left.impressions.asked is not None
        assert left.impressions.times is not None
        marks = dict(zip([15, 35, 45, 30, 55, 41], self.marks, strict=True))
        assert left.impressions.asked.tolist() == [marks[time] for time in left.impressions.times.tolist()]

    def test_a_mark_for_each_is_needed(self) -> None:
        assert FOUR.impressions is not None
        with pytest.raises(HomebodyError, match="has 2 marks of what is asked for 6 impressions"):
            replace(FOUR, impressions=replace(FOUR.impressions, asked=np.array([True, False])))
