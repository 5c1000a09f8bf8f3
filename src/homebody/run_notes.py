"""What a run tells beside its figures: where it ran, what it is made of, and what was guessed, missing or left out."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from homebody.core import Evaluated, Method, Rows
from homebody.data.splits import Split
from homebody.fit import Fitted
from homebody.recipe import Recipe, fingerprint
from homebody.reference import Reference
from homebody.rng import Rng

__all__ = ["environment", "guessing", "notes_of", "parameters_of", "unheld"]


def environment(recipe: Recipe, method: Method | Reference, split: Split) -> dict[str, Any]:
    """What the numbers of a run may depend on."""
    file = sys.modules[type(method).__module__].__file__
    own = recipe.method.rpartition(":")[0].endswith(".py")
    return {
        "homebody": version("homebody"),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "numpy", "numba", "polars")},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if recipe.device.startswith("cuda") else "cpu",
        "randomness": "simulated: every number derives from the seed",
        "data_fingerprint": fingerprint(
            {name: np.ascontiguousarray(part).data for name, part in _parts(split, method)}
        ),
        "method_fingerprint": fingerprint({"file": Path(file).read_bytes()}) if own and file else "",
    }


def _parts(split: Split, method: Method | Reference) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Everything that a model could learn from or be asked."""
    yield from (("bounds", split.bounds), ("items", split.items))
    if getattr(method, "predicts", "") == "ratings" and (ratings := split.population.ratings) is not None:
        yield "ratings", ratings
    for unit, encoded in split.encoded.items():
        yield from ((f"{unit}/{name}", column.values) for name, column in encoded.columns.items())
    if split.shown is not None and (shown := split.population.impressions):
        yield from (("shown", shown.items), ("to", shown.users), ("in", shown.indptr), ("clicked", shown.clicked))


def notes_of(method: Method | Reference, split: Split) -> list[str]:
    """What was guessed, missing or left out on the way; of features, where the method looks at them."""
    looked_at = {"user features": "users", "item features": "items", "contexts": "contexts"}
    taken = dict.fromkeys((*method.needs, *getattr(method, "uses", ())))
    features = [note for need in taken if need in looked_at for note in split.encoded[looked_at[need]].notes]
    return [
        *split.population.notes,
        *split.notes,
        *features,
        *_taken_as_public(method, split),
        *claimed(method),
        *_own_notes(method),
    ]


def claimed(method: Method | Reference) -> list[str]:
    """That what a method tells is its own claim, where nothing derives it."""
    acting = [] if not isinstance(method, Method) else [method, *(one.method for one in method.phases if one.method)]
    return [
        f"{name} states itself what it tells each observer: that is its own claim, kept in the ledger's words. Nothing "
        "derives it, so nothing is certified: ε = ∞."
        for name in dict.fromkeys(one.stated_by for one in acting)
        if name
    ]


def _own_notes(method: Method | Reference) -> Sequence[str]:
    return getattr(method, "notes", ())


def _taken_as_public(method: Method | Reference, split: Split) -> list[str]:
    """What ε does not cover, where updates pass noise: the words that people are described in."""
    if not isinstance(method, Method) or not method.uplink.stages:
        return []
    taken = {"user features": "users", "contexts": "contexts"}
    units = [taken[need] for need in dict.fromkeys((*method.needs, *method.uses)) if need in taken]
    if not any(split.encoded[unit].columns for unit in units):
        return []
    said = "Which values the features of people and circumstances take, and the scale of numbers, count as known to "
    return [said + "everyone: ε does not cover them."]


def guessing(evaluated: Evaluated, split: Split) -> list[str]:
    """What predicted ratings stand beside: how wrong the mean of those in training is of those held out."""
    ratings = split.population.ratings
    if "rmse" not in evaluated.metrics or ratings is None:
        return []
    learnt, asked = (split.interactions(part) for part in ("train", "test"))
    mean = float(ratings[learnt].mean(dtype=np.float64))
    wrong = ratings[asked].astype(np.float64) - mean
    both = f"RMSE {np.sqrt((wrong**2).mean()):.4f}, MAE {np.abs(wrong).mean():.4f}"
    return [f"always guessing the mean of the training ratings, {mean:.3f}, has {both}"]


def unheld(recipe: Recipe, method: Method | Reference) -> list[str]:
    """What a recipe asks for that a reference cannot give: in a table it stands beside methods that can."""
    if isinstance(method, Method) or not (recipe.stages or recipe.budget):
        return []
    return [f"{recipe.method} is centralised and collects raw data: stages and budget do not hold for it"]


def parameters_of(fitted: Fitted, seed: int) -> dict[str, int]:
    """How many numbers are shared, how many a device that joins holds, and how many one device's model has of both.

    A device's own copy of a shared tensor counts once in the model, and rows of a table are part of the table.
    """
    shared = {name: value.cpu() for name, value in fitted.shared.items()}
    local = fitted.method.init_local(shared, Rng.of(seed, "parameters"))
    sizes = {name: value.numel() for name, value in local.items() if not isinstance(value, Rows)}
    known = {name: value.numel() for name, value in shared.items()}
    whole = {**known, **sizes}
    return {"shared": sum(known.values()), "local": sum(sizes.values()), "model": sum(whole.values())}
