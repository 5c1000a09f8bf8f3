"""The logistic loss of implicit feedback."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

__all__ = ["logistic"]


def logistic(logit: Tensor, label: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy over the real samples: the slope of its mean at each logit, and its sum.

    >>> slope, loss = logistic(torch.zeros(3), torch.tensor([1.0, 0.0, 0.0]), torch.tensor([True, True, False]))
    >>> slope.tolist(), round(loss.item(), 4)
    ([-0.25, 0.25, 0.0], 1.3863)
    """
    slope = (torch.sigmoid(logit) - label) / valid.sum().clamp(min=1)
    loss = softplus(logit) - label * logit
    return torch.where(valid, slope, 0.0), torch.where(valid, loss, 0.0).sum()
