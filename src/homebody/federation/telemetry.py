"""What devices measure of themselves, as both sides know it: names, order, and shapes on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from homebody.core import Method, Tree
from homebody.errors import HomebodyError
from homebody.evaluation.metrics import METRICS
from homebody.federation import wire
from homebody.rng import Rng

__all__ = ["measurements", "metric_names", "telemetry"]


def metric_names(cutoffs: Sequence[int]) -> list[str]:
    """What devices measure, in the order that they send it."""
    at = [*(f"{name}@{k}" for name in METRICS for k in cutoffs), "auc"]
    return [f"{held}{kind}{name}" for held in ("", "valid/") for kind in ("", "full/") for name in at]


def measurements(metrics: Mapping[str, float], cutoffs: Sequence[int]) -> Tree:
    """One person's metrics as an update, before the channel; zeros where nothing could be measured."""
    values = torch.tensor([metrics.get(name, 0.0) for name in metric_names(cutoffs)], dtype=torch.float32)
    return {"metrics": values, "asked": torch.tensor([1.0 if metrics else 0.0])}


def telemetry(method: Method, cutoffs: Sequence[int]) -> dict[str, wire.Expected]:
    """The shapes of a person's measurements after the method's channel; refused where they cannot pass it."""
    try:
        return wire.shapes(method.uplink.device(measurements({}, cutoffs), Rng.of(0)))
    except HomebodyError as error:
        raise HomebodyError(f"What devices measure cannot leave this way: {error} Or measure never.") from error
