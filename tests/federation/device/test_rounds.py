"""What a device keeps to take part: the catalogue, models, states by round, and answers that are given again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homebody.errors import HomebodyError
from homebody.federation.device.home import Home
from homebody.federation.device.models import PrivateState, RankingModel


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home.create(tmp_path / "device", server="127.0.0.1:9092") as made:
        for name in ("ann", "bob"):
            made.people.add(name)
        yield made


def test_a_catalogue_grows_without_gaps(home: Home) -> None:
    assert home.items.add(0, [("emma", "Emma"), ("ulysses", "")]) == 2
    with pytest.raises(HomebodyError, match="the next unknown one is number 2"):
        home.items.add(3, [("ada", "Ada")])
    with pytest.raises(HomebodyError, match="the next unknown one is number 2"):
        home.items.add(-1, [("ada", "Ada")])
    assert home.items.add(1, [("ulysses", "Ulysses"), ("ada", "Ada")]) == 1
    assert len(home.items) == 3
    assert home.items.all() == [("emma", "Emma"), ("ulysses", "Ulysses"), ("ada", "Ada")]
    assert home.items.add(3, []) == 0


@pytest.mark.parametrize(
    ("first", "items", "said"),
    [
        (0, [("ada", "")], "Item number 0 is 'emma' here and 'ada' now"),
        (1, [("ulysses", ""), ("emma", "")], "'emma' cannot have two numbers"),
        (2, [("new", ""), ("new", "")], "'new' cannot have two numbers"),
        (2, [("new", ""), ("", "")], "An item id must be"),
    ],
)
def test_another_catalogue_is_refused_whole(home: Home, first: int, items: list[tuple[str, str]], said: str) -> None:
    home.items.add(0, [("emma", "Emma"), ("ulysses", "Ulysses")])
    with pytest.raises(HomebodyError, match=said):
        home.items.add(first, items)
    assert len(home.items) == 2
    assert home.items.all() == [("emma", "Emma"), ("ulysses", "Ulysses")]


def test_a_population_of_those_who_take_part(home: Home) -> None:
    home.people.add("zoe")
    home.items.add(0, [(item, "") for item in "abc"])
    for who, item, when, rating in (
        ("zoe", "b", 7.9, 1),
        ("zoe", "unknown", 1, 1),
        ("zoe", "unknown", 2, 1),
        ("ann", "c", -0.5, 2),
        ("ann", "a", -3, 3),
        ("bob", "a", 1, 1),
    ):
        home.history.append(who, item, when, rating)
    home.people.opt_out("bob")
    found = home.history.population()
    assert found.user_ids is not None
    assert found.user_ids.to_list() == ["ann", "zoe"]
    assert [found.history(u).tolist() for u in (0, 1)] == [[0, 2], [1]]
    assert found.n_items == 3
    assert found.times is not None
    assert found.times.tolist() == [-3, -1, 7]
    assert found.ratings is not None
    assert found.ratings.tolist() == [3.0, 2.0, 1.0]
    assert found.notes == ("2 of 5 interactions are with 1 item that the catalogue does not know: left out.",)
    assert home.history.population([home.people.find("bob")]).items.tolist() == [0]


def test_times_and_ratings_only_where_all_have_them(home: Home, tmp_path: Path) -> None:
    home.items.add(0, [("a", ""), ("b", "")])
    home.history.append("ann", "a", 1, 5)
    home.history.append("bob", "b", 1)
    (tmp_path / "rows.csv").write_text("item\nb\n")
    home.history.import_file(tmp_path / "rows.csv", "ann")
    found = home.history.population()
    assert found.times is found.ratings is None
    assert found.items.tolist() == [1, 0, 1]
    assert found.notes == (
        "Times are left out: 1 of 3 interactions has none.",
        "Ratings are left out: 2 of 3 interactions have none.",
    )


def test_a_population_of_nobody_or_of_nothing(home: Home) -> None:
    assert home.history.population().indptr.tolist() == [0, 0, 0]
    home.people.opt_out("ann")
    home.people.opt_out("bob")
    assert home.history.population().n_users == 0
    assert home.history.population().items.dtype == np.int32


def test_shared_parameters_are_kept_while_something_refers_to_them(home: Home) -> None:
    for digest in "abcd":
        home.models.put_shared(digest, digest.encode())
    home.models.rank_with('{"method": "pfedrec"}', "a", "train/3", 3)
    home.models.put_state("ann", "r", 3, "b", b"state")
    assert home.models.drop_unused({"c"}) == 1
    assert [home.models.shared(digest) for digest in "abcd"] == [b"a", b"b", b"c", None]
    home.models.rank_with('{"method": "pfedrec"}', "c", "train/4", 4)
    home.models.put_state("ann", "r", 3, "c", b"state")
    assert home.models.drop_unused(set()) == 2
    assert home.models.shared("c") == b"c"
    assert home.models.ranking() == RankingModel('{"method": "pfedrec"}', "c", "train/4", 4)


def test_nonsense_about_models_is_refused(home: Home) -> None:
    with pytest.raises(HomebodyError, match="must be JSON"):
        home.models.rank_with("pfedrec", "a", "train/1", 1)
    with pytest.raises(HomebodyError, match="A digest must be"):
        home.models.put_shared("", b"x")
    for step in (-1, 1.5, True):
        with pytest.raises(HomebodyError, match="A round's number"):
            home.models.rank_with("{}", "a", "train/1", step)  # type: ignore[arg-type]
        with pytest.raises(HomebodyError, match="A round's number"):
            home.models.put_state("ann", "r", step, None, b"")  # type: ignore[arg-type]
    assert home.models.ranking() is None


def test_a_round_begins_from_the_latest_state_before_it(home: Home) -> None:
    assert home.models.state("ann", "r") is None
    for step in (1, 2, 4):
        home.models.put_state("ann", "r", step, f"b{step}", b"s%d" % step)
    home.models.put_state("ann", "other", 9, None, b"")
    home.models.put_state("bob", "r", 8, None, b"")
    assert home.models.state("ann", "r") == PrivateState(4, "b4", b"s4")
    assert home.models.state("ann", "r", before=5) == PrivateState(4, "b4", b"s4")
    assert home.models.state("ann", "r", before=4) == PrivateState(2, "b2", b"s2")
    assert home.models.state("ann", "r", before=1) is None
    home.models.put_state("ann", "r", 4, None, b"again")
    assert home.models.state("ann", "r") == PrivateState(4, None, b"again")
    home.models.put_state("ann", "r", 2, None, b"again")
    assert home.models.state("ann", "r") == PrivateState(2, None, b"again")  # what came later is being done again
    assert home.models.state("ann", "other") == PrivateState(9, None, b"")
    assert home.models.state("bob", "r") == PrivateState(8, None, b"")


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(st.integers(0, 12), unique=True, max_size=8),
    wanted=st.lists(st.integers(0, 12), max_size=4),
)
def test_which_states_are_kept(tmp_path_factory: pytest.TempPathFactory, steps: list[int], wanted: list[int]) -> None:
    with Home.create(tmp_path_factory.mktemp("home") / "d", server="127.0.0.1:9092") as home:
        home.people.add("ann")
        home.people.add("bob")
        for step in sorted(steps):
            home.models.put_state("ann", "r", step, None, b"")
        for other in (("bob", "r"), ("ann", "q")):
            for step in (1, 2):
                home.models.put_state(*other, step, None, b"")
        expected = {*sorted(steps)[-2:], *(max(s for s in steps if s <= w) for w in wanted if min([*steps, 99]) <= w)}
        assert home.models.keep_states("r", wanted) == len(steps) - len(expected)
        kept, before = set(), None
        while (found := home.models.state("ann", "r", before)) is not None:
            kept.add(found.step)
            before = found.step
        assert kept == expected
        assert home.models.state("bob", "r", 2) is not None
        assert home.models.state("ann", "q", 2) is not None


def finish(home: Home, who: str, step: int, digest: str = "d", answer: bytes = b"answer", run: str = "r") -> None:
    home.outbox.finish(who, run, f"train/{step}", digest, PrivateState(step, None, b"state %d" % step), answer)


def test_an_answer_is_given_again_word_for_word_while_it_is_among_the_last_two(home: Home) -> None:
    for step in (1, 2, 3):
        finish(home, "ann", step, answer=b"%d" % step)
        finish(home, "ann", step, "e", answer=b"%d e" % step)
    finish(home, "bob", 1, answer=b"bob")
    answers = {
        (step, digest): home.outbox.answer("ann", "r", f"train/{step}", digest)
        for step in (1, 2, 3)
        for digest in "def"
    }
    assert {key: found for key, found in answers.items() if found is not None} == {
        (2, "d"): b"2", (2, "e"): b"2 e", (3, "d"): b"3", (3, "e"): b"3 e"
    }  # fmt: skip
    assert home.outbox.answer("ann", "other", "train/3", "d") is None
    assert home.outbox.answer("bob", "r", "train/1", "d") == b"bob"
    assert home.outbox.answered("ann", "r", "train/1") == {"d", "e"}
    assert home.outbox.answered("ann", "r", "train/9") == set()
    assert home.outbox.answered("ann", "other", "train/1") == set()
    assert [(mark.release, mark.digest, mark.bytes) for mark in home.outbox.sent("ann")] == [
        (f"train/{step}", digest, size) for step in (1, 2, 3) for digest, size in (("d", 1), ("e", 3))
    ]


def test_another_answer_to_the_same_is_refused_while_the_first_is_here(home: Home) -> None:
    finish(home, "ann", 1)
    finish(home, "ann", 1)
    assert len(home.outbox.sent("ann")) == 1
    with pytest.raises(HomebodyError, match="train/1 already has a different answer"):
        home.outbox.finish("ann", "r", "train/1", "d", PrivateState(1, None, b"other state"), b"other answer")
    assert home.models.state("ann", "r") == PrivateState(1, None, b"state 1")
    assert home.outbox.answer("ann", "r", "train/1", "d") == b"answer"
    # Once it was dropped it leaves anew, and that is counted.
    finish(home, "ann", 2)
    finish(home, "ann", 3)
    finish(home, "ann", 1, answer=b"anew")
    assert [mark.release for mark in home.outbox.sent("ann")] == ["train/1", "train/2", "train/3", "train/1"]
    assert home.outbox.answer("ann", "r", "train/1", "d") == b"anew"
    assert home.outbox.answer("ann", "r", "train/2", "d") is None


@pytest.mark.parametrize("wrong", [{"run": ""}, {"release": ""}, {"digest": "a\nb"}, {"step": -1}, {"who": "zoe"}])
def test_a_round_of_nonsense_leaves_nothing(home: Home, wrong: dict[str, Any]) -> None:
    given = {"who": "ann", "run": "r", "release": "train/1", "digest": "d", "step": 1, **wrong}
    state = PrivateState(given.pop("step"), None, b"state")
    with pytest.raises(HomebodyError):
        home.outbox.finish(**given, state=state, answer=b"answer")
    assert not home.models.has_states("ann")
    assert home.outbox.sent("ann") == []
