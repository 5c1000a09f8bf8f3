"""Tables and figures that need no run: what an accountant certifies, and how long people's histories are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from homebody.data.population import Population
from homebody.errors import HomebodyError, unknown_name
from homebody.privacy import GaussianRelease, Sampling
from homebody.privacy.accountant import epsilon
from homebody.recipe import Recipe
from homebody.run import population_of
from homebody.settings import KINDS
from homebody.studies.made import without_paths
from homebody.studies.study import Study, deviations, published

__all__ = ["LINES", "MEANINGS", "accounting", "lengths"]

MEANINGS = {
    "certified": (
        "ε of one person against the public, who sees every model and not who took part, composed over all rounds by "
        "our accountants: the smallest of their bounds"
    ),
    "counted": "the data set itself, whole, before any split",
}
"""What stands in place of a protocol, and what it means."""


@dataclass(frozen=True)
class Release:
    """What a round tells: a sum of clipped updates with Gaussian noise, of a cohort out of a population.

    >>> Release.of({"noise": 1, "cohort": 30, "population": 4800}).epsilon(1000, 0.0)
    inf
    """

    noise: float
    """Of the sensitivity under this relation."""
    cohort: int = 1
    population: int = 1
    """Without sampling neither says anything."""
    relation: str = "replace-one"
    sampling: str = "fixed"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Release:
        """From a recipe's table, checked."""
        kinds = {"noise": float, "cohort": int, "population": int, "relation": str, "sampling": str}
        for name, value in given.items():
            if name not in kinds:
                raise unknown_name("setting of a release", name, kinds)
            if type(value) is not kinds[name] and not (kinds[name] is float and type(value) is int):
                raise HomebodyError(f"release.{name} must be {KINDS[kinds[name]]}, not {value!r}.")
        drawn = given.get("sampling") != "none"
        for name in ("noise", *(("cohort", "population") if drawn else ())):
            if name not in given:
                raise HomebodyError(f"release.{name} is missing: give it to the table or to this row.")
        found = cls(**given)
        found.event()
        return found

    def event(self) -> GaussianRelease:
        size = (1, 1) if self.sampling == "none" else (self.cohort, self.population)
        drawn = Sampling(self.sampling, *size)  # type: ignore[arg-type]
        return GaussianRelease(self.noise, self.relation, drawn)  # type: ignore[arg-type]

    def epsilon(self, rounds: int, delta: float) -> float:
        """Certified, of so many rounds."""
        return epsilon([(self.event(), rounds)], delta).epsilon


class Asked(NamedTuple):
    """A computed table or figure, on one data set."""

    study: Study
    data: str
    data_dir: str | None


def accounting(asked: Asked) -> list[dict[str, Any]]:
    """A line a release, with a point for each δ."""
    study = asked.study
    lines = []
    for row in study.rows:
        release = Release.of({**study.release, **row.release})
        rounds = row.rounds or study.rounds or 1
        points = [
            {
                **_point(delta, label, "certified", study.metrics[0], release.epsilon(rounds, delta)),
                "published": published(study, row, asked.data, place),
                "published_sd": deviations(study, row, asked.data, place),
            }
            for place, (delta, label) in enumerate(zip(study.values, study.labels, strict=True))
        ]
        lines.append({"name": row.name, "note": row.note_on(asked.data), "missing": "", "points": points})
    return lines


def lengths(asked: Asked) -> list[dict[str, Any]]:
    """Two lines, of interactions and of different items: how many people have so many."""
    study, data = asked.study, asked.data
    recipe = Recipe("popularity", data, data_dir=asked.data_dir, **{**study.run, **study.run_on.get(data, {})})
    try:
        population = population_of(recipe)
    except HomebodyError as error:  # the rest of the paper is made all the same
        failed = {"note": "", "missing": "", "points": [], "errors": [without_paths(str(error))]}
        return [{"name": "interactions", **failed}]
    lines = []
    for name, counts in (("different items", different(population)), ("interactions", population.lengths)):
        people = binned(counts, study.values)
        points = [
            # By its label: bins of different widths stand side by side.
            {**_point(label, label, "counted", study.metrics[0], float(count)), "published": {}, "published_sd": {}}
            for label, count in zip(study.labels, people, strict=True)
        ]
        note = f"{population.n_users:,} people, the one in the middle with {np.median(counts):,.0f}."
        lines.append({"name": name, "note": note, "missing": "", "points": points})
    return lines


def different(population: Population) -> npt.NDArray[np.int64]:
    """How many different items each person met.

    >>> different(Population("toy", np.array([0, 3, 3, 5]), np.array([4, 4, 1, 0, 2], dtype=np.int32), n_items=5))
    array([2, 0, 2])
    """
    users = np.repeat(np.arange(population.n_users), population.lengths)
    pairs = np.unique(users * population.n_items + population.items)
    return np.bincount(pairs // population.n_items, minlength=population.n_users)


def binned(counts: npt.NDArray[np.int64], least: Sequence[int]) -> list[int]:
    """How many of the counts lie from each of these numbers to under the next; the last is open.

    >>> binned(np.array([1, 9, 10, 25, 400]), [1, 10, 20])
    [2, 1, 2]
    """
    found = np.histogram(counts, [*least, max(int(counts.max(initial=0)), least[-1]) + 1])[0]
    return [int(count) for count in found]


def _point(value: Any, label: str, source: str, metric: str, found: float) -> dict[str, Any]:
    spread = {"mean": found, "sd": None, "values": [found]}
    obtained = {source: {"n": 1, "metrics": {metric: spread}, "errors": [], "cells": []}}
    return {"value": value, "label": label, "obtained": obtained, "difference": {}, "short": []}


LINES: dict[str, Callable[[Asked], list[dict[str, Any]]]] = {"accounting": accounting, "lengths": lengths}
"""How each kind makes its lines."""
