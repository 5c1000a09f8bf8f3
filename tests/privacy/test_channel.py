"""The one door off the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from homebody.core import Cohort, Total, Update
from homebody.privacy import OBSERVERS, Channel
from homebody.rng import Rng


@dataclass(frozen=True)
class Scale:
    """Multiplies on the device, adds on the server: the order of stages can be read from the result."""

    by: float

    def device(self, update: Update, rng: Rng) -> Update:
        return {name: value * self.by + 1 for name, value in update.items()}

    def server(self, total: Total, rng: Rng) -> Total:
        return Total({name: value / self.by - 1 for name, value in total.sum.items()}, total.clients)


def test_without_stages_everything_passes_as_it_is() -> None:
    update, total = {"w": torch.tensor([1.5])}, Total({"w": torch.tensor([3.0])}, 2)
    assert Channel().device(update, Rng.of(0)) is update
    assert Channel().server(total, Rng.of(0)) is total
    assert total.mean["w"].tolist() == [1.5]


def test_stages_run_in_order_on_the_device_and_in_reverse_on_the_server() -> None:
    channel = Channel(Scale(2.0), Scale(10.0))
    assert channel.device({"w": torch.tensor([3.0])}, Rng.of(0))["w"].tolist() == [71.0]
    assert channel.server(Total({"w": torch.tensor([80.0])}, 1), Rng.of(0)).sum["w"].tolist() == [2.5]


def test_a_plain_channel_charges_every_observer_as_not_private() -> None:
    charges = Channel().charges(Cohort(np.arange(3), "all", size=3, population=3))
    assert [charge.observer for charge in charges] == list(OBSERVERS)
    assert {charge.event.kind for charge in charges} == {"not-private"}
    assert {charge.unit for charge in charges} == {"user"}
    assert all(charge.event.reason for charge in charges)


def test_channels_are_equal_by_what_they_do() -> None:
    assert Channel(Scale(2.0)) == Channel(Scale(2.0))
    assert Channel(Scale(2.0)) != Channel()
