"""Events: read back to the bit, and what cannot be read is not private."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homebody.errors import HomebodyError
from homebody.privacy.events import (
    Charge,
    Event,
    GaussianRelease,
    LaplaceRelease,
    NonPrivate,
    PureRelease,
    Reports,
    Sampling,
    ShuffledReports,
    event_as_json,
    event_from_json,
)

positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
counts = st.integers(1, 10**9)
relations = st.sampled_from(["add-remove", "replace-one"])


@st.composite
def samplings(draw: st.DrawFn, fixed: bool = True) -> Sampling:
    kind = draw(st.sampled_from(["none", "poisson", "fixed"] if fixed else ["none", "poisson"]))
    if kind == "none":
        return Sampling()
    population = draw(counts)
    return Sampling(kind, draw(st.integers(1, population)), population)


@st.composite
def noises(draw: st.DrawFn) -> Event:
    relation = draw(relations)
    kind = draw(st.sampled_from([GaussianRelease, LaplaceRelease]))
    return kind(draw(positive), relation, draw(samplings(fixed=relation == "replace-one")))


events = st.one_of(
    noises(),
    st.builds(PureRelease, positive, st.floats(0, 1, exclude_max=True), st.just("replace-one"), samplings()),
    st.builds(Reports, positive, counts, samplings()),
    st.builds(ShuffledReports, positive, counts, counts),
    st.builds(NonPrivate, st.text()),
)


@given(events)
def test_an_event_reads_back_exactly(event: Event) -> None:
    assert event_from_json(event_as_json(event)) == event
    assert Charge("views", "report", event).as_json() == event_as_json(event)


def test_the_text_is_the_same_for_a_whole_number() -> None:
    assert event_as_json(Reports(1)) == event_as_json(Reports(1.0))


def test_the_text_of_what_is_not_private_has_not_changed() -> None:
    assert event_as_json(NonPrivate("why")) == '{"kind": "not-private", "reason": "why"}'


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "gauss"},
        {"kind": None},
        {"multiplier": 0.0},
        {"multiplier": -1.0},
        {"multiplier": True},
        {"multiplier": "1"},
        {"relation": "edit"},
        {"sampling": None},
        {"sampling": {"kind": "fixed", "cohort": 5, "population": 4}},
        {"sampling": {"kind": "fixed"}},
        {"surplus": 1},
    ],
)
def test_what_cannot_be_read_is_not_private(change: dict[str, Any]) -> None:
    text = event_as_json(GaussianRelease(1, "replace-one", Sampling("fixed", 30, 4800)))
    assert isinstance(event_from_json(json.dumps(json.loads(text) | change)), NonPrivate)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", "{}", '{"kind": "gaussian", "multiplier": NaN}', '{"kind": []}']
)
def test_neither_is_other_text(text: str) -> None:
    assert isinstance(event_from_json(text), NonPrivate)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: GaussianRelease(0, "add-remove"),
        lambda: GaussianRelease(float("inf"), "add-remove"),
        lambda: GaussianRelease(float("nan"), "add-remove"),
        lambda: GaussianRelease(1, "either"),  # type: ignore[arg-type]
        lambda: LaplaceRelease(-1, "add-remove"),
        lambda: LaplaceRelease(1, "add-remove", Sampling("fixed", 1, 2)),
        lambda: PureRelease(0),
        lambda: PureRelease(1, 1.0),
        lambda: PureRelease(1, -1e-9),
        lambda: Reports(1, 0),
        lambda: Reports(1, 1.5),  # type: ignore[arg-type]
        lambda: ShuffledReports(1, 1, 0),
        lambda: Sampling("fixed", 31, 30),
        lambda: Sampling("poisson", 0, 30),
        lambda: Sampling("none", 1, 30),
        lambda: Sampling("shuffled"),  # type: ignore[arg-type]
        lambda: Charge("nobody", "user", NonPrivate("")),  # type: ignore[arg-type]
        lambda: Charge("server", "household", NonPrivate("")),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_refused_in_one_sentence(wrong: Any) -> None:
    with pytest.raises(HomebodyError) as refused:
        wrong()
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (Reports(2.5, 1), "1 locally randomised report of ε = 2.5; no sampling"),
        (Reports(2.5, 1200), "1,200 locally randomised reports of ε = 2.5 each; no sampling"),
        (ShuffledReports(2.5, 1, 30), "1 report of ε = 2.5, shuffled among 30 people"),
        (ShuffledReports(2.5, 7, 1), "7 reports of ε = 2.5 each, shuffled among 1 person"),
    ],
)
def test_reports_in_words(event: Event, told: str) -> None:
    assert str(event) == told
