"""The logistic loss of implicit feedback."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn.functional import softplus

__all__ = ["logistic", "slopes"]


def logistic(logit: Tensor, label: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy over the real samples: the gradient of its mean at each logit, and its sum.

    >>> slope, loss = logistic(torch.zeros(3), torch.tensor([1.0, 0.0, 0.0]), torch.tensor([True, True, False]))
    >>> slope.tolist(), round(loss.item(), 4)
    ([-0.25, 0.25, 0.0], 1.3863)
    """
    slope = (torch.sigmoid(logit) - label) / valid.sum().clamp(min=1)
    loss = softplus(logit) - label * logit
    return torch.where(valid, slope, 0.0), torch.where(valid, loss, 0.0).sum()


def slopes(logit: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    """The gradient of the mean loss in each of the logit's arguments, then the sum of the losses.

    The last two of what is given are labels and which samples are real.

    >>> label, valid = torch.tensor([1.0, 1.0]), torch.tensor([True, True])
    >>> of_weight, of_rows, loss = slopes(lambda w, rows: rows @ w, torch.ones(1), torch.zeros(2, 1), label, valid)
    >>> of_weight.abs().tolist(), of_rows.tolist(), round(loss.item(), 4)
    ([0.0], [[-0.25], [-0.25]], 1.3863)
    """
    *arguments, label, valid = given

    def loss(*at: Tensor) -> Tensor:
        value = logit(*at)
        return torch.where(valid, softplus(value) - label * value, 0.0).sum()

    found, total = grad_and_value(loss, argnums=tuple(range(len(arguments))))(*arguments)
    count = valid.sum().clamp(min=1)
    return (*(one / count for one in found), total)
