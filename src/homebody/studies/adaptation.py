"""How well people are served by one trained model, as their devices adapt it more or less. Nothing is trained anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from homebody.core import Method, Tree
from homebody.errors import HomebodyError, unknown_name
from homebody.reference import Reference
from homebody.simulation import Simulator
from homebody.simulation.ablations import Unadapted

__all__ = ["adapted", "read", "refuse", "written"]


def written(name: str, values: list[Any]) -> str:
    """A field and its values as a probe's settings.

    >>> written("adapt_epochs", [0, 5]), read("adapt_epochs=0,5")
    ('adapt_epochs=0,5', ('adapt_epochs', [0, 5]))
    """
    return f"{name}={','.join(map(str, values))}"


def read(settings: str) -> tuple[str, list[int]]:
    name, _, values = settings.partition("=")
    return name, [int(value) for value in values.split(",")]


def refuse(method: Method | Reference, name: str, settings: str) -> None:
    """Say before anything is trained that there is nothing to adapt, or not in this way."""
    if isinstance(method, Reference):
        raise HomebodyError(f"{name} is a centralised reference: no device adapts its model.")
    acting = method.phases[-1].method or method
    if acting.scoring.parameters != "adapted":
        raise HomebodyError(f"The devices of {name} do not adapt before they rank, so there is nothing to compare.")
    varied, _ = read(settings)
    known = [spec.name for spec in fields(acting) if type(getattr(acting, spec.name)) is int]  # type: ignore[arg-type]
    if varied not in known:
        raise unknown_name(f"whole-number field of {name}", varied, known)


def adapted(
    method: Method,
    runtime: Simulator,
    shared: Tree,
    settings: str,
    step: Callable[[int, int], None] = lambda done, steps: None,
) -> dict[str, Any]:
    """Test metrics with each value of a field of the method; 0 is the common start that no device has adapted."""
    name, values = read(settings)
    metrics = {}
    for number, value in enumerate(values, 1):
        if value:
            found = runtime.evaluate(replace(method, **{name: value}), shared)  # type: ignore[type-var]
        else:
            found = Unadapted(runtime).evaluate(method, shared)
        metrics[str(value)] = {one: figure for one, figure in found.metrics.items() if not one.startswith("valid/")}
        step(number, len(values))
    return {"people": len(runtime.split.asked()), "metrics": metrics}
