from __future__ import annotations

from dataclasses import dataclass
from inspect import get_annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from homebody.core import Catalogue, Data, Method, Phase, Rows, Total, param
from homebody.errors import HomebodyError
from homebody.methods.kernels import train_many
from homebody.reference import Reference
from homebody.rng import Rng


@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(-9, 9)), max_size=12))
@settings(deadline=None)
def test_dense_adds_up_rows_and_drops_padding(pairs: list[tuple[int, int]]) -> None:
    expected = [0] * 5
    for index, value in pairs:
        if index >= 0:
            expected[index] += value
    index = torch.tensor([pair[0] for pair in pairs], dtype=torch.int64)
    value = torch.tensor([[float(pair[1])] * 2 for pair in pairs]).reshape(-1, 2)
    assert Rows(index, value, size=5).dense().tolist() == [[float(number)] * 2 for number in expected]


def test_rows_of_plain_numbers_are_dense_too() -> None:
    assert Rows(torch.tensor([1, -1]), torch.tensor([3.0, 8.0]), size=2).dense().tolist() == [0.0, 3.0]


def test_rows_pass_through_vmap() -> None:
    index = torch.tensor([[0, 2], [1, -1]])
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    doubled = vmap(lambda rows: Rows(rows.index, rows.value * 2, rows.size))(Rows(index, value, 3))
    assert isinstance(doubled, Rows)
    assert doubled.size == 3
    assert torch.equal(doubled.index, index)
    assert torch.equal(doubled.value, value * 2)
    assert vmap(lambda rows: rows.dense())(doubled).tolist() == [[2.0, 0.0, 4.0], [0.0, 6.0, 0.0]]


def test_a_mean_divides_by_the_planned_cohort() -> None:
    total = Total({"item": torch.tensor([6.0, 0.0]), "count": torch.tensor(3.0)}, clients=4)
    assert total.mean["item"].tolist() == [1.5, 0.0]
    assert total.mean["count"].item() == 0.75


@dataclass(frozen=True)
class Settings(Reference):
    size: int = param(3, "how many", low=1, high=9)
    rate: float = param(0.5, "how fast", low=0)
    warm: bool = param(False, "whether")
    kind: str = param("plain", "which")
    free: int = 5


def test_sensible_settings_are_taken_and_whole_numbers_become_floats() -> None:
    settings = Settings(size=9, rate=2, warm=True, kind="other", free=-1)
    assert (settings.size, settings.rate, settings.warm, settings.kind) == (9, 2.0, True, "other")
    assert type(settings.rate) is float
    assert Settings(size=1, rate=0).size == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"size": 0}, "size must be at least 1, not 0."),
        ({"size": 10}, "size must be at most 9, not 10."),
        ({"size": 2.0}, "size must be a whole number, not 2.0."),
        ({"size": True}, "size must be a whole number, not True."),
        ({"size": "3"}, "size must be a whole number, not '3'."),
        ({"rate": -0.1}, "rate must be at least 0, not -0.1."),
        ({"rate": float("nan")}, "rate must be a finite number, not nan."),
        ({"rate": float("inf")}, "rate must be a finite number, not inf."),
        ({"rate": True}, "rate must be a number, not True."),
        ({"rate": None}, "rate must be a number, not None."),
        ({"warm": 1}, "warm must be true or false, not 1."),
        ({"kind": 1}, "kind must be a text, not 1."),
    ],
)
def test_a_senseless_setting_is_refused_in_a_sentence(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(HomebodyError) as caught:
        Settings(**given)  # type: ignore[arg-type]
    assert str(caught.value) == sentence


@dataclass(frozen=True)
class Nothing(Method):
    pass


def test_what_a_method_must_define_is_named() -> None:
    method, catalogue, rng = Nothing(), Catalogue(2), Rng.of(0)
    data = Data(torch.tensor([0]), torch.tensor([True]), torch.tensor([0]), catalogue)
    calls = {
        "init_shared": lambda: method.init_shared(catalogue, rng),
        "init_local": lambda: method.init_local({}, rng),
        "prepare": lambda: method.prepare(data, rng),
        "client": lambda: method.client({}, {}, {}),
        "server": lambda: method.server({}, {}, Total({}, 1)),
        "score": lambda: method.score({}, {}, data, torch.tensor([0])),
    }
    for name, call in calls.items():
        with pytest.raises(HomebodyError, match=rf"Nothing must define {name}\(\)"):
            call()
    with pytest.raises(HomebodyError, match=r"Nothing must define fit\(\)"):
        type("Nothing", (Reference,), {"__post_init__": lambda self: None})().fit(None, 0)


@dataclass(frozen=True)
class Adds(Method):
    """Sends its items' number, keeps the sum of what it ever sent."""

    def prepare(self, data: Data, rng: Rng) -> dict[str, torch.Tensor]:
        return {"count": data.valid.sum().float() + 0 * rng.uniform()}

    def client(self, shared, local, batch):  # type: ignore[no-untyped-def]
        return {"count": batch["count"]}, {"sent": local["sent"] + batch["count"] + shared["start"]}


def test_the_defaults_are_one_phase_no_server_state_and_adapting_by_a_round() -> None:
    method = Adds()
    assert list(method.phases) == [Phase("train")]
    assert method.init_server({"start": torch.tensor(1.0)}) == {}
    data = Data(torch.tensor([0, 1]), torch.tensor([True, True]), torch.tensor([0, 1]), Catalogue(3))
    batch = method.prepare(data, Rng.of(0))
    local = method.adapt({"start": torch.tensor(10.0)}, {"sent": torch.tensor(5.0)}, batch)
    assert local["sent"].item() == 17.0


def test_a_cohort_is_the_client_for_each() -> None:
    update, local = train_many(
        Adds(), {"start": torch.tensor(1.0)}, {"sent": torch.tensor([0.0, 5.0])}, {"count": torch.tensor([2.0, 3.0])}
    )
    assert update["count"].tolist() == [2.0, 3.0]
    assert local["sent"].tolist() == [3.0, 9.0]


def test_the_contract_of_a_method_stays_small() -> None:
    members = {name for name in (*dir(Method), *get_annotations(Method)) if not name.startswith("_")}
    assert len(members) <= 18, sorted(members)
