"""The plan of a `homebody reproduce` command: which runs it needs, and to which row each result belongs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product

from homebody.data.sources import find
from homebody.errors import refuse_unknown, unknown_name
from homebody.recipe import Recipe
from homebody.settings import check_counts
from homebody.studies import probes
from homebody.studies.papers import Paper
from homebody.studies.provenance import command_text
from homebody.studies.study import Row, Study

__all__ = ["Cell", "Plan", "plan"]


@dataclass(frozen=True)
class Cell:
    """One run of a study, and the row, protocol and point that its result belongs to."""

    study: Study
    row: Row
    data: str
    protocol: str
    point: int
    run: int
    """Its place in the plan's `recipes`, then `others`: two studies may show the same run."""


@dataclass(frozen=True)
class Plan:
    """What a command asks for: studies of a paper, their data sets, and the recipes to run."""

    paper: Paper
    studies: list[tuple[Study, list[str]]]
    recipes: list[Recipe]
    """What is run."""
    others: list[Recipe]
    """Recipes under protocols that were not asked for: shown if they were run before."""
    cells: list[Cell]
    command: str
    rounds: int | None
    protocols: list[str]
    probes: list[list[str]]
    """For each of the recipes that are run, the probes of its model."""
    data_dir: str | None = None
    asked_for: str | None = None
    """The table or figure that was named; None for all of them."""


def plan(
    paper: Paper,
    *,
    table: str | None = None,
    figure: str | None = None,
    data: Sequence[str] = (),
    protocols: Sequence[str] = (),
    seeds: int | None = None,
    rounds: int | None = None,
    device: str | None = None,
    data_dir: str | None = None,
) -> Plan:
    """The plan of a command. Without a table or a figure it has all of them; `device` overrules the recipe's."""
    check_counts(seeds=seeds, rounds=rounds)
    chosen = _named("table", table, paper.tables, figure is None)
    chosen += _named("figure", figure, paper.figures, table is None)
    under = {name for study in chosen for name in study.protocols}
    known = {name for study in chosen for name in study.data}
    refuse_unknown("data set of this part of the paper", data, known)
    refuse_unknown("protocol of this part of the paper", protocols, under)
    studies = []
    for study in chosen:
        optional = () if data else study.optional
        absent = {name for name in optional if not _at_hand(name, data_dir)}
        wanted = [name for name in study.data if (not data or name in data) and name not in absent]
        if wanted and (not protocols or set(protocols) & set(study.protocols)):
            studies.append((_with_seeds(study, seeds), wanted))
    asked = list(protocols) or sorted(under)
    every = _Numbered(rounds, device, data_dir)
    cells = every.cells(studies, asked)
    recipes = list(every.recipes)
    cells += every.cells(studies, under.difference(asked))
    options = {"table": table, "figure": figure, "data": data, "protocol": protocols, "seeds": seeds, "rounds": rounds}
    command = command_text(f"homebody reproduce {paper.name}", {**options, "device": device})
    looked = _probes(paper, {study.label for study, _ in studies}, every, seeds)[: len(recipes)]
    others = every.recipes[len(recipes) :]
    return Plan(paper, studies, recipes, others, cells, command, rounds, asked, looked, data_dir, table or figure)


def _at_hand(name: str, data_dir: str | None) -> bool:
    """Whether a data set is on this machine; a synthetic one is made anew each time."""
    return name.partition(":")[0] != "synthetic" and find(name, data_dir=data_dir, quick=True) is not None


def _with_seeds(study: Study, seeds: int | None) -> Study:
    """The study with as many seeds as were asked for, in all rows."""
    if seeds is None:
        return study
    return replace(study, seeds=seeds, rows=[replace(row, seeds=None) for row in study.rows])


def _probes(paper: Paper, asked: Collection[str], every: _Numbered, seeds: int | None) -> list[list[str]]:
    """The probes of each recipe, including cheap ones of figures that were not asked for: the model exists now."""
    wanted: list[list[str]] = [[] for _ in every.recipes]
    for study in paper.studies:
        unasked = study.label not in asked
        if unasked and study.kind not in probes.CHEAP:
            continue
        for name, row, protocol in product(study.data, study.rows, study.protocols):
            for point, value in enumerate(study.points(row)) if row.method is not None else ():
                probe = study.probe_at(row, point)
                if not probe or (unasked and probes.lacks(probe)):
                    continue
                for seed in range(seeds or study.seeds_of(row)):
                    place = every.known(study.recipe(row, name, protocol, seed, value))
                    if place is not None and probe not in wanted[place]:
                        wanted[place].append(probe)
    return wanted


class _Numbered:
    """The recipes of a plan, each once, in the order in which they are first needed."""

    def __init__(self, rounds: int | None, device: str | None, data_dir: str | None) -> None:
        self.rounds, self.device, self.data_dir = rounds, device, data_dir
        self.recipes: list[Recipe] = []
        self.places: dict[str, int] = {}

    def cells(self, studies: Sequence[tuple[Study, Sequence[str]]], protocols: Collection[str]) -> list[Cell]:
        return [
            Cell(study, row, name, protocol, point, self._place(study.recipe(row, name, protocol, seed, value)))
            for study, names in studies
            for name, row, protocol in product(names, study.rows, study.protocols)
            if protocol in protocols and row.method is not None
            for (point, value), seed in product(enumerate(study.points(row)), range(study.seeds_of(row)))
        ]

    def known(self, recipe: Recipe) -> int | None:
        """Which of them this one is, if any."""
        return self.places.get(self._as_run(recipe).to_toml())

    def _as_run(self, recipe: Recipe) -> Recipe:
        rounds, device = self.rounds or recipe.rounds, self.device or recipe.device
        return replace(recipe, rounds=rounds, device=device, data_dir=self.data_dir)

    def _place(self, recipe: Recipe) -> int:
        recipe = self._as_run(recipe)
        place = self.places.setdefault(recipe.to_toml(), len(self.recipes))
        if place == len(self.recipes):
            self.recipes.append(recipe)
        return place


def _named(kind: str, wanted: str | None, studies: Sequence[Study], otherwise: bool) -> list[Study]:
    if wanted is None:
        return list(studies) if otherwise else []
    named = [study for study in studies if study.id == wanted]
    # A figure of several parts, as 3-rounds and 3-epochs, is asked for by its number too.
    named = named or [study for study in studies if study.id.startswith(f"{wanted}-")]
    if not named:
        raise unknown_name(kind, wanted, [study.id for study in studies])
    return named
