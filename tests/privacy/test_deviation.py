"""The noise that a channel says is left in a sum is the noise that is."""

from __future__ import annotations

import pytest
import torch
from tests.federation.test_task import HEADER

from homebody.core import Total, Tree
from homebody.federation.server.aggregate import LetterRoute
from homebody.federation.server.answers import Answer
from homebody.federation.server.records import RegisteredDevice
from homebody.federation.task import Task
from homebody.federation.wire import shapes
from homebody.privacy import Channel, Clip, Gaussian, Laplace, OneBit, SecureSum, Shuffle
from homebody.rng import Rng

ENTRIES, CLIENTS, TIMES = 20, 5, 400
TASK = Task.read(HEADER)
DEVICE = RegisteredDevice("ab12", b"", "kitchen", first=0, people=CLIENTS, added="", removed=None)


def summed(route: LetterRoute, sent: list[Tree]) -> Tree:
    """What the server adds up, if these people answer."""
    talk = route.talk(TASK, list(range(len(sent))), len(sent))
    next(talk)
    with pytest.raises(StopIteration) as ended:
        talk.send([(DEVICE, Answer(updates=dict(enumerate(sent))))])
    total: Tree = ended.value.value.sum
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    "channel",
    [
        Channel(Clip(9), Gaussian(z=0.5)),
        Channel(Clip(9), SecureSum(), Gaussian(z=0.5)),
        Channel(Clip(9, order=1), Laplace(b=2.0)),
        Channel(Clip(9, order=1), Laplace(b=2.0, where="sum")),
        Channel(OneBit(1.0, k=7)),
        Channel(OneBit(4.0, k=50), Shuffle()),
    ],
    ids=["gaussian", "secure sum", "laplace", "laplace on the sum", "one-bit", "shuffled"],
)
def test_the_standard_deviation_of_a_sum_is_what_the_channel_says(channel: Channel) -> None:
    """8,000 draws from a seed: the deviation found is off by 1 % or so."""
    own = {"w": torch.linspace(-0.2, 0.2, ENTRIES)}
    found = []
    for number in range(TIMES):
        rng = Rng.of(3, number)
        sent = [channel.device(own, rng.fold("device", client)) for client in range(CLIENTS)]
        route = LetterRoute(shapes(sent[0]), (1e9, None), lambda tree: tree)
        total = summed(route, sent)
        found.append(channel.server(Total(total, CLIENTS), rng.fold("server")).sum["w"] - CLIENTS * own["w"])
    deviation = channel.deviation(ENTRIES, CLIENTS)
    noise = torch.stack(found)
    assert float(noise.square().mean().sqrt()) == pytest.approx(deviation, rel=0.05)
    assert abs(float(noise.mean())) < 5 * deviation / noise.numel() ** 0.5


def test_what_adds_no_noise_leaves_none() -> None:
    assert Channel().deviation(10, 10) == Channel(Clip(1)).deviation(10, 10) == 0
