"""What a letter asks, read and checked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.task import DO, Task, acting
from homebody.methods.fedmf import FedMF
from homebody.methods.packages import PackagedMethod

HEADER: dict[str, Any] = {
    "do": "train",
    "run": "run",
    "release": "train/3",
    "step": 3,
    "key": -(2**63),
    "clients_key": 2**63 - 1,
    "n_items": 12,
    "half": False,
    "method": "fedmf",
    "fields": {"factors": 3},
    "stages": [],
    "seed": 0,
    "protocol": "strict",
    "held_out": None,
    "negatives": 99,
    "cutoffs": [5, 10],
    "measures": True,
    "keep": None,
    "first": 4,
    "people": [4, 5],
    "shared": "abc",
}
OPTIONAL = {"first", "people", "shared", "held_out", "keep"}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("do", DO)
def test_a_letter_is_read(do: str) -> None:
    task = Task.read({**HEADER, "do": do, "unknown": "from a newer server"})
    assert (task.do, task.step, task.people, task.first, task.phase) == (do, 3, [4, 5], 4, "train")
    assert task.acting == FedMF(factors=3)


@pytest.mark.parametrize("name", sorted(HEADER.keys() - OPTIONAL))
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(wire.Malformed, match=f"'{name}' is missing or of another kind"):
        Task.read({key: value for key, value in HEADER.items() if key != name})


def test_what_may_be_missing() -> None:
    task = Task.read({key: value for key, value in HEADER.items() if key not in OPTIONAL})
    assert (task.first, task.people, task.shared, task.held_out, task.keep) == (0, [], "", None, None)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(HEADER)), json_values)
def test_any_value_is_read_or_refused_and_nothing_else(name: str, value: Any) -> None:
    try:
        task = Task.read({**HEADER, name: value})
        _ = task.acting, task.ask
    except (wire.Malformed, HomebodyError):
        return
    assert all(type(number) is int for number in (*task.people, *task.cutoffs, task.step, task.first, task.n_items))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key", 5),
        ("clients_key", 5),
        ("seed", 5),
        ("half", True),
        ("step", 4),
        ("shared", "other"),
        ("stages", ["clip:norm=1"]),
        ("fields", {"factors": 4}),
        ("method", "pfedrec"),
        ("run", "other"),
        ("do", "evaluate"),
        ("measures", False),
        ("cutoffs", [5]),
        ("first", 3),
    ],
)
def test_what_an_answer_depends_on_is_in_its_name(name: str, value: Any) -> None:
    assert Task.read({**HEADER, name: value}).ask != Task.read(HEADER).ask


@pytest.mark.parametrize(("name", "value"), [("people", [4]), ("keep", 1), ("n_items", 13), ("more", 1)])
def test_what_it_does_not_depend_on_is_not(name: str, value: Any) -> None:
    """Who else is asked, what else is kept; the items are in the shared parameters' name."""
    assert Task.read({**HEADER, name: value}).ask == Task.read(HEADER).ask


@pytest.mark.parametrize("name", ["mine.py:Mine", "/tmp/x", "a.b", "..", "../../etc"])
def test_no_code_is_named_by_a_server(name: str) -> None:
    with pytest.raises(HomebodyError, match="methods that come with Homebody"):
        acting({"method": name, "fields": {}, "stages": []}, "train")


@pytest.mark.parametrize(("allowed", "refusal"), [((), "allows none of that name"), (("mine",), "same package")])
def test_a_method_of_a_package_is_not_loaded_unless_it_is_allowed_and_the_server_s(
    allowed: tuple[str, ...], refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> None:
        raise AssertionError("the package's code was loaded")

    monkeypatch.setattr("homebody.federation.task.packaged", lambda name: PackagedMethod(name, "ours", "1.0", "aa"))
    monkeypatch.setattr("homebody.federation.task.build", build)
    described = {"method": "mine", "fields": {}, "stages": [], "code": "ours 1.0 bb"}
    with pytest.raises(HomebodyError, match=refusal):
        acting(described, "train", allowed)
