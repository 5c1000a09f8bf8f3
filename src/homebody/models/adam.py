"""Adam on the server (Kingma and Ba, 2015): FedAdam, where the gradient is the mean of what clients sent."""

from __future__ import annotations

from collections.abc import Callable

import torch

from homebody.core import Tree

__all__ = ["adam_start", "adam_step"]

EPS = 1e-8


def adam_start(shared: Tree) -> Tree:
    """The moments of these parameters, and the number of steps."""
    moments = {f"{kind}/{name}": torch.zeros_like(value) for kind in ("m", "v") for name, value in shared.items()}
    return {**moments, "step": torch.zeros((), device=next(iter(shared.values())).device)}


def adam_step(
    shared: Tree,
    state: Tree,
    gradient: Tree,
    rate: float | Callable[[str], float],
    betas: tuple[float, float] = (0.9, 0.999),
) -> tuple[Tree, Tree]:
    """The parameters and the state after a step along this gradient. Parameters that it does not name stay.

    rate: of all parameters, or of each by its name.

    >>> shared = {"w": torch.tensor([1.0, 1.0])}
    >>> after, _ = adam_step(shared, adam_start(shared), {"w": torch.tensor([5.0, -0.1])}, rate=0.5)
    >>> after["w"].round(decimals=4).tolist()
    [0.5, 1.5]
    """
    first, second = betas
    step = state["step"] + 1
    after, kept = dict(shared), {**state, "step": step}
    for name, slope in gradient.items():
        m = first * state[f"m/{name}"] + (1 - first) * slope
        v = second * state[f"v/{name}"] + (1 - second) * slope**2
        own = rate(name) if callable(rate) else rate
        after[name] = shared[name] - own * (m / (1 - first**step)) / ((v / (1 - second**step)).sqrt() + EPS)
        kept |= {f"m/{name}": m, f"v/{name}": v}
    return after, kept
