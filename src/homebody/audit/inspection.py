"""The exact message a device would send, and who sees what of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.core import Cohort, Method, Rows, Update
from homebody.errors import HomebodyError
from homebody.rng import Rng
from homebody.runtime import Simulator

__all__ = ["Inspection", "Part", "encode", "inspect"]

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
class Inspection:
    """A message, taken apart."""

    user: int
    parts: tuple[Part, ...]
    bytes: int
    sees: dict[str, str]
    """What each observer sees of it, in a sentence."""
    tells: tuple[str, ...]
    """What can be read from it as it is."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def inspect(
    method: Method, simulator: Simulator, user: int, *, cohort: int | None = None, seed: int = 0, round_: int = 1
) -> Inspection:
    """What this client sends in a first round with this seed: bit by bit what a run would sum."""
    if user not in simulator.available():
        raise HomebodyError(f"User {user} takes no part in training with this split: there is nothing to send.")
    acting = method.phases[0].method or method
    rng = Rng.of(seed, method.phases[0].name)
    simulator.begin(acting, rng.fold("clients"))
    shared = acting.init_shared(simulator.catalogue, rng.fold("shared"))
    shared = {name: value.to(simulator.device) for name, value in shared.items()}
    update = simulator.message(acting, shared, user, rng.fold("round", round_))
    parts = tuple(_part(name, value) for name, value in update.items())
    everyone = simulator.available()
    chosen = Cohort(everyone, "all", len(everyone), len(everyone)) if cohort is None else Cohort(
        everyone[:cohort], "fixed", cohort, len(everyone)
    )  # fmt: skip
    told: dict[str, list[str]] = {}
    for charge in acting.charges(chosen):
        told.setdefault(charge.observer, []).append(f"{charge.event} (one {charge.unit})")
    return Inspection(
        user,
        parts,
        sum(part.bytes for part in parts),
        {observer: "; ".join(dict.fromkeys(events)) for observer, events in told.items()},
        tuple(_told(update)),
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


def _part(name: str, value: Tensor | Rows) -> Part:
    data = encode(value)
    rows = isinstance(value, Rows)
    numbers = value.value[value.index >= 0] if isinstance(value, Rows) else value
    return Part(
        name,
        tuple(numbers.shape),
        str(numbers.dtype).removeprefix("torch."),
        value.size if isinstance(value, Rows) and rows else None,
        len(data),
        data[:EXCERPT].hex(" ", 4),
    )


def _told(update: Update) -> list[str]:
    """What a message gives away by its form alone."""
    lines = []
    for name, value in update.items():
        if isinstance(value, Rows):
            count = int((value.index >= 0).sum())
            lines.append(
                f"'{name}' names {count:,} of {value.size:,} rows: whoever reads this message knows which they are."
            )
        elif value.ndim and bool((value == 0).any()) and bool((value != 0).any()):
            zero = int((value.flatten(1) == 0).all(1).sum()) if value.ndim > 1 else int((value == 0).sum())
            if zero:
                lines.append(f"'{name}' is zero in {zero:,} of {len(value):,} rows: the others were worked on.")
    return lines
