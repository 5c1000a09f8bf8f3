"""Turns and queries of a device: what is due, what is drawn once, and what is left when somebody opts out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homebody.errors import HomebodyError
from homebody.federation.device.home import Home
from homebody.federation.device.people import OptedOut
from homebody.federation.device.queries import KEPT_ANSWERS
from homebody.federation.device.received import ReceivedPart

ABOUT: dict[str, Any] = {"kind": "choice", "event": "{}", "at": 5}
DAY = 86_400


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home.create(tmp_path / "device", server="") as made:
        for name in ("ann", "bob"):
            made.people.add(name)
        yield made


def test_turns_come_by_the_clock(home: Home) -> None:
    queries = home.queries
    assert queries.due(100, DAY)
    assert queries.begin_turn(100, DAY) == (1, 100)
    assert queries.begin_turn(100 + DAY - 1, DAY) == (1, 100)
    assert not queries.due(100 + DAY - 1, DAY)
    assert queries.due(100 + DAY, DAY)
    assert queries.begin_turn(100 + DAY, DAY) == (2, 100 + DAY)


def test_a_clock_that_is_set_back_delays_the_next_turn_and_never_hurries_it(home: Home) -> None:
    queries = home.queries
    queries.begin_turn(1000 * DAY, DAY)
    assert not queries.due(10 * DAY, DAY)
    assert not queries.due(11 * DAY - 1, DAY)
    assert queries.due(11 * DAY, DAY)


def test_everyone_who_takes_part_wants_one_query_a_turn(home: Home) -> None:
    queries = home.queries
    home.people.opt_out("bob")
    assert queries.wanting(1, "m") == [0]
    with pytest.raises(OptedOut):
        queries.draw("bob", 1, model="m", told=b"told", **ABOUT)
    drawn = queries.draw("ann", 1, model="m", told=b"told", **ABOUT)
    assert drawn is not None
    with Home(home.path) as other:  # a second process comes too late
        assert other.queries.draw("ann", 1, model="m", told=b"other", **ABOUT) is None
    assert queries.wanting(1, "m") == queries.wanting(2, "m") == []
    assert [query.told for query in queries.open("m")] == [b"told"]
    queries.answer(queries.move(queries.move(drawn, "charged"), "sent", 7), b"answer")
    assert queries.wanting(1, "m") == []
    assert queries.wanting(2, "m") == [0]
    (answered,) = queries.answers("ann", "m")
    assert (answered.state, answered.left, answered.told, answered.answer) == ("answered", 7, None, b"answer")


def test_with_new_interests_a_query_is_due_at_most_once_more_in_a_turn(home: Home) -> None:
    queries = home.queries
    for model in ("m1", "m2"):
        assert 0 in queries.wanting(1, model)
        assert queries.draw("ann", 1, model=model, told=b"told", **ABOUT)
        queries.give_up("next")
    assert 0 not in queries.wanting(1, "m3")
    assert 0 in queries.wanting(2, "m3")
    assert {query.state for query in queries.of("ann")} == {"gone"}
    assert all(query.told is None for query in queries.of("ann"))


def test_a_refused_query_is_not_asked_for_again_in_its_turn(home: Home) -> None:
    queries = home.queries
    refused = queries.draw("ann", 1, model="m", told=None, **ABOUT)
    assert refused is not None
    assert (refused.state, refused.left) == ("refused", None)
    assert queries.wanting(1, "m") == [1]
    assert queries.open("m") == []
    with pytest.raises(HomebodyError, match="answered or given up"):
        queries.move(refused, "charged")


def test_the_last_answers_are_kept(home: Home) -> None:
    queries = home.queries
    for turn in range(KEPT_ANSWERS + 3):
        drawn = queries.draw("ann", turn, model="m", told=b"told", **ABOUT)
        assert drawn is not None
        queries.answer(drawn, b"answer %d" % turn)
    kept = [query.answer for query in queries.answers("ann", "m")]
    assert kept == [b"answer %d" % turn for turn in reversed(range(3, KEPT_ANSWERS + 3))]
    assert len(queries.of("ann")) == KEPT_ANSWERS + 3


def test_opting_out_deletes_what_is_told_and_answered(home: Home) -> None:
    queries = home.queries
    first = queries.draw("ann", 1, model="m", told=b"a secret told", **ABOUT)
    assert first is not None
    queries.answer(first, b"a secret answer")
    second = queries.draw("ann", 2, model="m", told=b"a secret told", **ABOUT)
    assert second is not None
    home.people.opt_out("ann")
    assert [(query.state, query.told, query.answer) for query in queries.of("ann")] == [
        ("answered", None, None),
        ("gone", None, None),
    ]
    assert queries.open("m") == []
    for late in (lambda: queries.move(second, "sent", 9), lambda: queries.answer(second, b"late")):
        with pytest.raises(OptedOut):
            late()
    files = b"".join(file.read_bytes() for file in home.path.rglob("*") if file.is_file())
    assert b"a secret" not in files


def test_another_service_begins_anew(home: Home, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc-123\n")
    home.be_served("https://one.example.org/", token_file=tmp_path / "token", serving_mode="query")
    assert (home.settings.serving, home.serving_token) == ("https://one.example.org", "abc-123")
    home.queries.begin_turn(5, DAY)
    home.queries.draw("ann", 1, model="m", told=b"told", **ABOUT)
    home.received.put({"head": ReceivedPart("m", 1, b"head")})
    home.be_served("https://one.example.org", serving_every=60)
    assert home.received.get("head", "m") == ("m", 1, b"head")
    assert home.received.get("head", "other") is None
    assert home.serving_token == "abc-123"
    home.be_served("https://two.example.org")
    assert (home.serving_token, home.received.get("head"), home.queries.turn()) == (None, None, None)
    assert [query.state for query in home.queries.of("ann")] == ["gone"]
    assert home.settings.serving_every == 60
    home.be_served("https://one.example.org")
    assert home.queries.begin_turn(6, DAY) == (2, 6)
    assert len(home.queries.wanting(2, "m")) == 2, "Ann asked the same service before, and asks again."


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "http://rec.example.org"}, "reached by https://"),
        ({"url": "rec.example.org"}, "must be https://HOST:PORT"),
        ({"serving_mode": "all"}, "no mode of being served 'all'"),
        ({"serving_every": 0}, "every second to every year"),
        ({"query_epsilon": float("nan")}, "is a number above 0, up to 100, not nan"),
        ({"ca": "token"}, "is not a certificate"),
        ({"token_file": "token"}, "give its address as --url"),
        ({"token_file": "empty"}, "holds no token"),
        ({"token_file": "missing"}, "cannot be read"),
    ],
)
def test_senseless_settings_change_nothing(home: Home, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    (tmp_path / "token").write_text("abc-123")
    (tmp_path / "empty").write_text(" \n")
    files = {name: tmp_path / settings[name] for name in ("ca", "token_file") if name in settings}
    before = home.settings
    with pytest.raises(HomebodyError, match=said):
        home.be_served(**{**settings, **files})
    assert home.settings == before
    assert (home.serving_ca, home.serving_token) == (None, None)
