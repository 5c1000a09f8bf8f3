"""Recommendations of a finished run, with the source's item names, also for a user who was not in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from homebody.core import Newcomer, Recommended
from homebody.data import Population
from homebody.data.stored import insist_on_people
from homebody.errors import HomebodyError, refuse_unknown
from homebody.methods.fl_mv_dssm import FLMVDSSM
from homebody.privacy import Channel
from homebody.privacy.views import ToView
from homebody.recipe import Recipe
from homebody.report.record import RunFolder
from homebody.report.statement import figure
from homebody.rng import SystemRng
from homebody.run import reopen
from homebody.simulation import Simulator
from homebody.simulation.clients import Clients
from homebody.simulation.rankings import best_of

__all__ = ["Suggested", "recommend_for", "recommend_to", "recommend_to_view"]


class Suggested(NamedTuple):
    """Recommendations for one user: items by the source's names, and notes on what was unknown or left out."""

    items: list[dict[str, Any]]
    """The best first: item, name, score."""
    notes: tuple[str, ...]


def recommend_for(
    path: Path,
    clicks: Sequence[str],
    features: Mapping[str, object] | None = None,
    now: Mapping[str, object] | None = None,
    k: int = 10,
    *,
    ratings: Sequence[float] | None = None,
    trust_code: bool = False,
) -> Suggested:
    """What a finished run recommends to somebody whom it never met, from a few items by the source's ids or names.

    trust_code: run the file that the run's recipe names as its method; without it, such a run is refused.
    """
    _refuse_few(k)
    fitted, population = reopen(path, trust_code=trust_code)
    items = [population.item(name) for name in clicks]
    best = fitted.ranked_for(items, features, now, k, ratings=ratings)
    return _shown(population, best)


def recommend_to(
    path: Path, user: str, now: Mapping[str, object] | None = None, k: int = 10, *, trust_code: bool = False
) -> Suggested:
    """What a finished run recommends to one of its own people, in the circumstances in which they ask.

    trust_code: as in `recommend_for`.
    """
    _refuse_few(k)
    fitted, population = reopen(path, trust_code=trust_code)
    insist_on_people(population)
    runtime = fitted.runtime
    assert isinstance(runtime, Simulator)
    best = runtime.recommend_in(fitted.method, fitted.shared, population.user(user), k, now or {})
    return _shown(population, best)


def recommend_to_view(
    path: Path,
    user: str | None,
    to_view: str,
    k: int = 10,
    *,
    clicks: Sequence[str] = (),
    features: Mapping[str, object] | None = None,
    ratings: Sequence[float] | None = None,
    trust_code: bool = False,
) -> Suggested:
    """What a finished run recommends to somebody, as one of their views may see it: clipped, noised, charged.

    The charge is written to the run's ledger first. Every call is a release with noise of its own. Items that the
    person has in this app are left out, and every view knows those; what lies in another app is not.

    user: one of the run's people; None: somebody new, with these clicks, features and ratings as in `recommend_for`.
    Their lists are charged to the run's ledger too: it bounds whoever was shown the most.
    to_view: the view's name, or NAME:clip=0.05,z=4. trust_code: as in `recommend_for`.
    """
    _refuse_few(k)
    fitted, population = reopen(path, trust_code=trust_code)
    method, runtime = fitted.method, fitted.runtime
    assert isinstance(runtime, Simulator)
    if not isinstance(method, FLMVDSSM):
        raise HomebodyError("Only fl-mv-dssm ranks by views: leave out --to-view.")
    views, facts = list(method.people(runtime.catalogue)), method.uplink.facts
    release = ToView.parse(
        to_view, clip=facts.views.clip if facts.views else 0.5, z=facts.view_noise.z if facts.view_noise else None
    )
    refuse_unknown("view of this run", [release.view], views)
    if len(views) == 1:
        raise HomebodyError(f"{release.view} is the only view: there is nothing to hide from it. Leave out --to-view.")
    client: Clients = runtime
    notes: tuple[str, ...] = ()
    if user is None:
        items = [population.item(name) for name in clicks]
        client, encoded = runtime.newcomer(method, Newcomer(tuple(items), dict(features or {}), {}, ratings))
        who, number, notes = "somebody new", 0, encoded.notes
    else:
        insist_on_people(population)
        who, number = user, population.user(user)
        items = population.history(number).tolist()
    budget = Recipe.from_toml(RunFolder.open(path).recipe_text()).allowed()
    if budget and not budget.allows(fitted.ledger, release.charges()):
        raise HomebodyError(
            f"This list would bring ε to {budget.spent(fitted.ledger, release.charges()):.4g} for {budget.who}, and "
            f"the run's budget is {budget.epsilon:g}: nothing is given to {release.view}."
        )
    fitted.ledger.charge(f"prediction of {who} to {release.view}", release.charges(), code="homebody recommend")
    each = []
    for name in views:  # someone new adapts in each view by itself, with its towers alone
        own = {part: value for part, value in fitted.shared.items() if part.startswith(("item/", f"{name}/"))}
        each.append(client.scores(replace(method, views=name, uplink=Channel()), own, number))
    scores = release.sum(torch.stack(each), SystemRng())
    scores[torch.tensor(items, dtype=torch.int64)] = -torch.inf
    spent = fitted.ledger.epsilons(fitted.delta)["views"]
    note = (
        f"Noise of {release.z * release.clip:g} in every score, charged to the views: ε = {figure(spent)} so far, at "
        f"δ = {fitted.delta:g}."
    )
    return _shown(population, Recommended(best_of(scores, k), (*notes, note)))


def _refuse_few(k: int) -> None:
    if k < 1:
        raise HomebodyError(f"At least 1 item must be asked for, not {k}.")


def _shown(population: Population, best: Recommended) -> Suggested:
    """Items with their scores, as the source calls them."""
    items = [{"item": population.item_id(i), "name": population.item_name(i), "score": s} for i, s in best.items]
    nothing = () if items else (f"Nothing is left to recommend: they have all {population.n_items:,} items.",)
    return Suggested(items, (*best.notes, *nothing))
