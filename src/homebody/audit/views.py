"""What each observer sees of a round, by its channel."""

from __future__ import annotations

import torch
from torch import Tensor

from homebody.core import Cohort, Method, Rows, Total, Tree, Update
from homebody.errors import several
from homebody.privacy import Channel
from homebody.privacy.grid import STEPS
from homebody.rng import Rng

__all__ = ["decoded", "hides_senders", "sees", "whole"]


def hides_senders(channel: Channel) -> bool:
    """Whether the server gets a sum, or reports without senders, instead of each client's message."""
    return channel.facts.secret or channel.facts.shuffled


def whole(value: Tensor | Rows) -> Tensor:
    """A tensor, or the whole table that rows were sent of, in a type that can be summed."""
    table = value.value if isinstance(value, Rows) else value
    kind = torch.int64 if table.dtype in STEPS else torch.promote_types(table.dtype, torch.float32)
    numbers = table.to(kind)
    return Rows(value.index, numbers, value.size).dense() if isinstance(value, Rows) else numbers


def decoded(channel: Channel, sums: Update) -> Tree:
    """A message, or a sum of messages, as the server decodes it before it adds noise of its own.

    >>> from homebody.privacy import Channel, OneBit
    >>> reports = Channel(OneBit(epsilon=20.0, k=400))
    >>> sent = reports.device({"w": torch.tensor([1.0, -1.0])}, Rng.of(0))
    >>> decoded(reports, sent)["w"].sign().tolist()
    [1.0, -1.0]
    """
    total = Total({name: whole(value) for name, value in sums.items()}, 1)
    for stage in reversed(channel.stages):
        if not stage.on_sum:
            total = stage.server(total, Rng.of(0))
    grid = channel.facts.grid
    return {name: grid.values(value) for name, value in total.sum.items()} if grid else total.sum


def sees(method: Method, cohort: Cohort) -> dict[str, str]:
    """For each observer, what it sees of one client's message."""
    channel = method.uplink
    people = f"the {several(cohort.size, 'person', 'people')} of the round"
    if cohort.sampling == "fixed":
        people = f"{people}, drawn from {cohort.population:,}"
    summed = "the noised sum" if channel.facts.noise_on_sum else "the sum"
    told = {
        "server": _server(channel, cohort, people),
        "clients": f"the shared parameters of the next round, computed from {summed} over {people}; no one's message",
        "public": f"the final model alone, computed from every round's {summed.removeprefix('the ')}; no one's message",
    }
    sentences = {name: f"{text[0].upper()}{text[1:]}." for name, text in told.items()}
    if channel.asks_rows:
        sentences["server"] += " And before that, which rows this device asks for."
    return sentences


def _server(channel: Channel, cohort: Cohort, people: str) -> str:
    facts = channel.facts
    own = ", without the noise, which it adds itself" if channel.facts.noise_on_sum else ""
    if facts.shuffle is not None:
        among = cohort.size if facts.shuffle.users is None else facts.shuffle.users
        whose = several(among, "person", "people")
        return f"single randomised reports without a sender, among those of {whose}, if the proxy is honest"
    if facts.secret:
        return f"only the sum over {people}{own}, and who they are; not this message"
    if facts.reports is not None:
        return f"this message of {several(facts.reports.k, 'randomised bit')}, and whose it is"
    if facts.responses is not None:
        return f"this message of {cohort.items:,} randomised bits, one for each item, and whose it is"
    if facts.noise_on_device:
        return "this message, with the noise that was added on the device, and whose it is"
    return f"this message, every number of it, and whose it is{own}"
