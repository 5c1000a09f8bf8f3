"""What a run tells beside its figures: where it ran, what it is made of, and what was guessed, missing or left out."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
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

__all__ = [
    "PACKAGE",
    "changes",
    "code_fingerprint",
    "digest_of",
    "environment",
    "guessing",
    "notes_of",
    "parameters_of",
    "unheld",
]

PACKAGE = Path(__file__).resolve().parent


def environment(recipe: Recipe, method: Method | Reference, split: Split) -> dict[str, Any]:
    """What the numbers of a run may depend on."""
    return {
        "homebody": version("homebody"),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "numpy", "numba", "polars")},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if recipe.device.startswith("cuda") else "cpu",
        # A GPU does not sum in the same order twice, so no process repeats the releases of another.
        "repeats": "bit by bit" if recipe.device == "cpu" else secrets.token_hex(8),
        "randomness": "simulated: every number derives from the seed",
        "data_fingerprint": fingerprint(
            {name: np.ascontiguousarray(part).data for name, part in _parts(split, method)}
        ),
        "method_fingerprint": _own_code(method),
        "recipe_fingerprint": fingerprint({"recipe": recipe.to_toml().encode()}),
        "code_fingerprint": code_fingerprint(),
    }


def digest_of(environment: Mapping[str, Any]) -> str:
    """A name for everything that shapes a release. Only under the same one is a round that is run again a repeat."""
    shapes = {name: value for name, value in environment.items() if name != "cores"}
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:32]


CHANGES = {
    "recipe_fingerprint": "the recipe",
    "code_fingerprint": "Homebody's code",
    "method_fingerprint": "the method's code",
    "data_fingerprint": "the data",
    "homebody": "Homebody's version",
    "packages": "the versions of packages",
    "repeats": "a GPU repeats nothing bit by bit",
}


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What of an environment is not as it was, in words; empty where all is.

    >>> changes({"threads": 1, "python": "3.11"}, {"threads": 2, "python": "3.11"})
    'threads'
    """
    return ", ".join(CHANGES.get(name, name) for name in now if then.get(name) != now[name])


@cache
def code_fingerprint() -> str:
    """Of this package's own code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        code = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {len(code)}\n".encode())
        digest.update(code)
    return digest.hexdigest()[:16]


def _own_code(method: Method | Reference) -> str:
    """Of the files that a method's classes come from, where they are not this package's; otherwise empty."""
    classes = [one for one in type(method).__mro__ if issubclass(one, Method | Reference)]
    modules = dict.fromkeys(one.__module__ for one in classes if not one.__module__.startswith("homebody."))
    files = [file for name in modules if (file := getattr(sys.modules[name], "__file__", None))]
    parts = {f"file{number or ''}": Path(file).read_bytes() for number, file in enumerate(files)}
    return fingerprint(parts) if parts else ""


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
    return [*split.population.notes, *split.notes, *features, *_taken_as_public(method, split), *_own_notes(method)]


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
