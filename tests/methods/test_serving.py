"""Every method is served or refused in a sentence. What a part must keep is in `MethodContract`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from homebody.core import Catalogue, Column, Data, Method, Rows, Stateless, Tree
from homebody.errors import HomebodyError
from homebody.methods import METHODS, build
from homebody.methods.dplcf import DPLCF
from homebody.methods.fedials import FedIALS
from homebody.methods.fedmf import FedMF
from homebody.methods.serving import (
    _SHIPPED,
    WAYS,
    Serving,
    check,
    nobody,
    part_of_catalogue,
    register,
    renumbered,
    serving_of,
)
from homebody.privacy import Channel
from homebody.reference import Reference
from homebody.rng import Rng

FIVE = Catalogue(5)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_served_or_refused_in_a_sentence(name: str) -> None:
    method = build(name, {})
    acting = method.phases[-1].method or method if isinstance(method, Method) else method
    if isinstance(method, Reference) or name == "alone":
        with pytest.raises(HomebodyError, match=r"\.$"):
            serving_of(acting)
        return
    serving = serving_of(acting)
    assert isinstance(method, Method)
    assert set(serving.ways) <= set(WAYS)
    assert "table" in serving.ways
    kind = type(acting)
    assert f"{kind.__module__.removeprefix('homebody.methods.')}.{kind.__qualname__}" in _SHIPPED, "it is named"


@dataclass(frozen=True)
class Counts(Stateless):
    """Items by their number, over that of all items: a part of the table gives other scores."""

    uplink: Channel = Channel()

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"item": rng.normal(catalogue.n_items, 2)}

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return shared["item"][items].sum(1) / shared["item"].sum()


@dataclass(frozen=True)
class Plain(Counts):
    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return shared["item"][items].sum(1)


def test_a_class_that_nobody_registered_is_tried() -> None:
    shared = Plain().init_shared(FIVE, Rng.of(1))
    check(Plain(), shared, FIVE)
    with pytest.raises(HomebodyError, match=r"scores items otherwise .* Register a Serving"):
        check(Counts(), shared, FIVE)
    with pytest.raises(HomebodyError, match="shares no table 'item'"):
        check(Plain(), {"count": torch.zeros(5)}, FIVE)


def test_what_is_registered_is_for_that_class_alone() -> None:
    @dataclass(frozen=True)
    class Mine(Counts):
        pass

    register(Mine, Serving(ways=("table",)))
    assert serving_of(Mine()).ways == ("table",)
    assert serving_of(Counts()).ways != ("table",)


def test_neighbours_are_by_number_so_their_table_stays_whole() -> None:
    method = DPLCF(neighbours=2)
    shared = method.init_shared(FIVE, Rng.of(1))
    assert serving_of(method).part(method, shared, torch.arange(5))["weight"].shape == (5, 2)
    for items in (torch.arange(4), torch.tensor([1, 0, 2, 3, 4])):
        with pytest.raises(HomebodyError, match="take all rows"):
            serving_of(method).part(method, shared, items)


def test_a_part_says_what_is_summed_over_all_items() -> None:
    method = FedIALS(factors=2)
    shared = {"item": torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])}
    part = serving_of(method).part(method, shared, torch.tensor([2]))
    assert part["item"].tolist() == [[3.0, 0.0]]
    assert part["whole/gram"].tolist() == [[10.0, 0.0], [0.0, 4.0]]
    assert part["whole/size"] == 3
    again = serving_of(method).part(method, part, torch.tensor([0]))  # a part of a part
    assert again["whole/gram"].tolist() == part["whole/gram"].tolist()
    assert again["whole/size"] == 3


def test_a_step_on_rows_is_as_large_on_a_part() -> None:
    method = FedMF(factors=2)
    shared = method.init_shared(Catalogue(50), Rng.of(1))
    part = serving_of(method).part(method, shared, torch.tensor([4, 8]))
    assert method.row_rate(part) == method.row_rate(shared)


def test_rows_of_a_state_find_their_places_in_any_part() -> None:
    local = {"item": Rows(torch.tensor([8, 3, -1, 5]), torch.arange(4.0)[:, None], 9), "user": torch.ones(2)}
    for items in ([5, 8, 0], [], [3], [0, 1, 2, 3, 4, 5, 6, 7, 8]):
        mine = renumbered(local, torch.tensor(items, dtype=torch.int64))
        rows = zip(mine["item"].index.tolist(), mine["item"].value[:, 0].tolist(), strict=True)
        found = {items[place]: value for place, value in rows if place >= 0}
        expected = {item: value for item, value in ((8, 0.0), (3, 1.0), (5, 3.0)) if item in items}
        assert found == expected
        assert mine["item"].size == len(items)
        assert mine["user"] is local["user"]


def test_a_part_of_a_catalogue_has_its_features_and_texts() -> None:
    words = Column(torch.tensor([[1], [2], [1]]), 3, "sequence", words=("a", "b"), texts=("a x", "b y", "a z"))
    part = part_of_catalogue(Catalogue(3, {"title": words}), torch.tensor([2, 0]))
    assert part.n_items == 2
    assert part.items["title"].values.tolist() == [[1], [1]]
    assert part.items["title"].texts == ("a z", "a x")


def test_of_nobody_nothing_is_known() -> None:
    hobby = Column(torch.empty(0, 2, dtype=torch.int64), 3, "many")
    data = nobody(Catalogue(3, {}, {"age": Column(torch.empty(0), 1, "number"), "hobby": hobby}))
    assert not data.valid.any()
    assert data.features["age"] == 0.0
    assert data.features["hobby"].tolist() == [-1, -1]
