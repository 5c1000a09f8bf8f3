"""Attacks on a run's model, as `homebody audit` makes them: can it be told who was in its training?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from homebody.core import Recommender
from homebody.data.splits import Split
from homebody.errors import HomebodyError, unknown_name
from homebody.fit import Fitted
from homebody.recipe import Recipe
from homebody.reference import federated

__all__ = ["DEFAULTS", "attacked", "read", "refuse", "written"]

DEFAULTS = {"shadows": 8, "people": 0}
"""Shadow models for the likelihood ratio; people who are asked about, half of them members, 0: all."""


def written(settings: dict[str, int]) -> str:
    """As a probe's settings.

    >>> written({"shadows": 16}), read("shadows=16,people=0")
    ('shadows=16,people=0', {'shadows': 16, 'people': 0})
    """
    for name, value in settings.items():
        if name not in DEFAULTS:
            raise unknown_name("setting of the attack", name, DEFAULTS)
        if type(value) is not int:
            raise HomebodyError(f"attack.{name} must be a whole number, not {value!r}.")
    return ",".join(f"{name}={value}" for name, value in {**DEFAULTS, **settings}.items())


def read(settings: str) -> dict[str, int]:
    return {name: int(value) for name, _, value in (part.partition("=") for part in settings.split(","))}


def refuse(method: Recommender, name: str) -> None:
    """Say before anything is trained that there is nobody to tell from others."""
    federated(method, name, "its run keeps no model that could be attacked")


def attacked(
    fitted: Fitted, split: Split, recipe: Recipe, settings: str, step: Callable[[int, int], None]
) -> dict[str, Any]:
    """What the attacks find, as metrics with intervals, and in full."""
    from homebody.audit.membership import Released, attack
    from homebody.audit.shadows import trained_for

    asked = read(settings)
    if split.learn.all():
        raise HomebodyError(
            "Everyone is in the training here: for an attack on the run's model, split held-out-users, so that there "
            "are people who are not."
        )
    method = federated(recipe.build(), recipe.method)
    assert recipe.rounds is not None, "a run's recipe has its rounds"
    found = attack(
        method,
        split,
        rounds=trained_for(method, recipe.rounds, fitted.chosen),
        cohort=recipe.cohort,
        released=Released(fitted.method, fitted.shared, recipe.seed, fitted.epsilon["public"]),
        shadows=asked["shadows"],
        people=asked["people"] or None,
        delta=recipe.stated_at,
        seed=recipe.seed,
        device=recipe.device,
        fused=recipe.fused,
        step=step,
    )
    return {**told(found), "found": found}


def told(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of a table: each with its interval where it has one, nan where the attack could not be tried."""
    lists, ratio = found["lists"], found["likelihood_ratio"]
    nothing = [math.nan] * 3
    rate = next((one["true"] for one in ratio["rates"] if one["false_positives"] == 0.01), nothing)
    figures = {"attack/accuracy": lists.get("accuracy", nothing), "lira/auc": ratio["auc"], "lira/tpr@1%": rate}
    return {
        "metrics": {
            **{name: value for name, (value, _, _) in figures.items()},
            "attack/ceiling": lists.get("ceiling", math.nan),
            "attack/allowed": found["allowed"]["accuracy"],
        },
        "intervals": {name: [low, high] for name, (_, low, high) in figures.items()},
    }
