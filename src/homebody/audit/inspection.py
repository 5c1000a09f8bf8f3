"""The exact message a device would send, and who sees what of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.audit.views import hides_senders, sees
from homebody.core import Cohort, Method, Rows, Update
from homebody.errors import HomebodyError
from homebody.privacy import Channel, OneBit, SecureSum
from homebody.rng import Rng
from homebody.runtime import Simulator

__all__ = ["Inspection", "Part", "View", "encode", "inspect"]

EXCERPT = 24
"""Bytes of each part that are shown."""


@dataclass(frozen=True)
class Part:
    """One tensor of a message."""

    name: str
    shape: tuple[int, ...]
    """Of the rows sent, where it is rows of a table."""
    dtype: str
    rows_of: int | None
    """How many rows the table has of which these are some; None: it is sent whole."""
    bytes: int
    hex: str
    """How it begins."""


@dataclass(frozen=True)
class View:
    """One observer's view of the message."""

    sees: str
    """In a sentence."""
    charged: tuple[str, ...]
    """What the ledger writes down for it in each round, by unit."""


@dataclass(frozen=True)
class Inspection:
    """A message, taken apart."""

    user: str
    """As the data calls them."""
    parts: tuple[Part, ...]
    bytes: int
    observers: dict[str, View]
    tells: tuple[str, ...]
    """What can be read from it as it is."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def inspect(method: Method, simulator: Simulator, user: int, *, cohort: int | None = None, seed: int = 0) -> Inspection:
    """What this client sends in the first round of a run with this seed: bit by bit what the run would sum."""
    ids = simulator.split.population.user_ids
    called = str(user if ids is None else ids[user])
    if user not in simulator.available():
        raise HomebodyError(f"User {called} takes no part in training with this split: there is nothing to send.")
    phase = method.phases[0]
    acting = phase.method or method
    rng = Rng.of(seed, phase.name)
    simulator.begin(acting, rng.fold("clients"))
    shared = acting.init_shared(simulator.catalogue, rng.fold("shared"))
    shared = {name: value.to(simulator.device) for name, value in shared.items()}
    update = simulator.message(acting, shared, user, rng.fold("round", 1))
    everyone = simulator.available()
    drawn = len(everyone) if cohort is None else cohort
    planned = Cohort(everyone[:drawn], "all" if cohort is None else "fixed", drawn, len(everyone))
    charged: dict[str, list[str]] = {}
    for charge in acting.charges(planned):
        charged.setdefault(charge.observer, []).append(f"one {charge.unit}: {charge.event}")
    told = sees(acting, planned)
    return Inspection(
        called,
        tuple(_part(name, value) for name, value in update.items()),
        -(-sum(map(_bits, update.values())) // 8),
        {who: View(told[who], tuple(events)) for who, events in charged.items()},
        tuple(_told(update, acting.uplink)),
    )


def encode(value: Tensor | Rows) -> bytes:
    """A tensor as it is counted: row numbers in 32 bits, numbers as they are, truths as single bits.

    >>> encode(Rows(torch.tensor([2, -1]), torch.tensor([[1.0], [9.0]]), size=3)).hex()
    '020000000000803f'
    >>> encode(torch.tensor([True, False, True])).hex()
    'a0'
    """
    if isinstance(value, Rows):
        real = value.index >= 0
        return value.index[real].to(torch.int32).cpu().numpy().tobytes() + encode(value.value[real])
    array: npt.NDArray[Any] = value.detach().cpu().numpy()
    return np.packbits(array).tobytes() if array.dtype == np.bool_ else array.tobytes()


def _bits(value: Tensor | Rows) -> int:
    """Parts of single bits share their last byte, as in the simulator's count."""
    numbers = value.value if isinstance(value, Rows) else value
    width = 1 if numbers.dtype == torch.bool else 8 * numbers.element_size()
    if isinstance(value, Rows):
        return int((value.index >= 0).sum()) * (32 + width * math.prod(numbers.shape[1:]))
    return width * numbers.numel()


def _part(name: str, value: Tensor | Rows) -> Part:
    data = encode(value)
    numbers = value.value[value.index >= 0] if isinstance(value, Rows) else value
    return Part(
        name,
        tuple(numbers.shape),
        str(numbers.dtype).removeprefix("torch."),
        value.size if isinstance(value, Rows) else None,
        len(data),
        data[:EXCERPT].hex(" ", 4),
    )


def _told(update: Update, channel: Channel) -> list[str]:
    """What a message gives away by its form alone."""
    if any(isinstance(stage, SecureSum) for stage in channel.stages):
        return ["Behind the secure sum nobody reads this message alone; a simulation just sums it."]
    if any(isinstance(stage, OneBit) for stage in channel.stages):
        entries = "Each report is the number of an entry, drawn without looking at the data, and a randomised bit of it"
        return [f"{entries}{'; the proxy sends them on one by one.' if hides_senders(channel) else '.'}"]
    lines = []
    for name, value in update.items():
        if isinstance(value, Rows):
            count = len(torch.unique(value.index[value.index >= 0]))
            lines.append(f"'{name}' names {count:,} of {value.size:,} rows: whoever reads it knows which they are.")
        elif value.ndim and (idle := int((value.reshape(len(value), -1) == 0).all(1).sum())):
            lines.append(f"'{name}' is zero in {idle:,} of {len(value):,} rows: the others were worked on.")
    return lines
