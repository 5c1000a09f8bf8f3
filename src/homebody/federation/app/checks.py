"""What an app checks of a question before it computes: compiled loops do not check bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from homebody.core import Batch, Tree, Update
from homebody.federation import wire
from homebody.models.towers import Tower

__all__ = ["check_finite", "check_samples", "check_towers"]

_KINDS = {"index": torch.int64, "place": torch.int64, "weight": torch.float32, "real": torch.bool}


def check_samples(batch: Batch, rows: int) -> None:
    """Refuse samples that do not fit together, or that name rows beyond the item tower's."""
    fit = {name: getattr(value, "dtype", None) for name, value in batch.items()} == _KINDS
    if fit:
        index, place, weight, real = (batch[name] for name in _KINDS)
        fit = (index.dim(), place.dim(), real.dim()) == (1, 2, 2)
        fit = fit and place.shape == weight.shape and real.numel() == len(place) and real.shape[1] > 0
        fit = fit and _within(index, -1, rows) and _within(place, 0, len(index)) and bool(weight.isfinite().all())
    if not fit:
        raise wire.Malformed("The question's samples do not fit together, or name rows that there are not.")


def check_towers(shared: Tree, tower: Tower, view: str, inputs: int, rows: int | None = None) -> None:
    """Refuse towers of another shape. inputs: of the view's tower. rows: of the item tower, if known."""
    first = shared.get("item/first")
    rows = len(first) if rows is None and isinstance(first, Tensor) and first.dim() else rows
    wanted = {
        "item/first": (rows, tower.widths[0]),
        "item/layers": (tower.size,),
        f"{view}/user/first": (inputs, tower.widths[0]),
        f"{view}/user/layers": (tower.size,),
    }
    for name, shape in wanted.items():
        value = shared.get(name)
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or tuple(value.shape) != shape:
            raise wire.Malformed("The question's towers are missing, or of another shape than the method's.")
    check_finite(shared, "The question's towers")


def check_finite(numbers: Update, what: str) -> None:
    """Refuse numbers that are not finite: they would stay in a tower for good."""
    for value in numbers.values():
        if not bool(torch.isfinite(value if isinstance(value, Tensor) else value.value).all()):
            raise wire.Malformed(f"{what} hold numbers that are not finite.")


def _within(values: Tensor, least: int, end: int) -> bool:
    return not values.numel() or (int(values.min()) >= least and int(values.max()) < end)
