"""What each way to be served is worth: `homebody serve measure`.

A finished run's own people are served from its model, all of them at once. The device's own ranking of the whole table
is what every way is held against: `share` is the part of its first ten items that are among the ten of the way.

A device keeps the rows of its own items, which it had when it trained or was served before. `own=False` measures the
other case: a person's items count only as far as their rows are in the part.

Scores on a part are those on the whole table (`homebody.methods.serving`), so nobody's part is put together: items
that are not in it are left out of the ranking. Methods that adapt before they rank adapt against the whole table here.
Circumstances of requests are unknown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from homebody.adversary.queries import bound
from homebody.core import Method, Tree, Users
from homebody.errors import HomebodyError
from homebody.evaluation import Question
from homebody.evaluation.metrics import NOWHERE, Places, hit, ndcg, place, skew
from homebody.privacy.accountant import epsilon
from homebody.privacy.queries import Choice, Query
from homebody.rng import Rng
from homebody.run import reopen
from homebody.serving.interests import lists
from homebody.serving.model import Served, acting, item_ids
from homebody.simulation import Simulator
from homebody.simulation.clients import QuestionGroup

__all__ = ["measure"]

TEN = 10
"""The list that a person is shown."""
MONTH = 30
"""Queries in a month, at one a day."""
OWN_FEW = 2
"""A part has at least so many rows: a query takes half of them."""


@dataclass
class _Plan:
    """A way that is measured, with all its draws of noise."""

    way: str
    rows: int | None
    model: Served
    seeds: int
    """Draws of the query's noise; 0: nothing is asked."""
    common: Tensor | None = None
    """The numbers of the items that everyone gets; None: all."""
    lists: Tensor | None = None
    """(B, k) the numbers of those that each choice adds."""
    sums: list[dict[str, float]] = field(default_factory=list)
    """Of each draw: the sums of figures over questions."""
    count: int = 0

    def __post_init__(self) -> None:
        self.sums = [{} for _ in range(max(1, self.seeds))]

    @property
    def query(self) -> Query | None:
        return self.model.head.query if self.seeds else None

    def add(self, seed: int, figures: dict[str, Tensor]) -> None:
        """Take in the figures of some questions."""
        sums = self.sums[seed]
        for name, values in figures.items():
            sums[name] = sums.get(name, 0.0) + float(values.double().sum())
        self.count += len(next(iter(figures.values()))) if not seed else 0

    def figures(self) -> list[dict[str, float]]:
        """The mean of each figure over all questions, of each draw."""
        return [{name: total / self.count for name, total in sums.items()} for sums in self.sums]


class _AtHome(Simulator):
    """The same clients, who rank with what they are served, whatever they trained from."""

    def __init__(self, inner: Simulator, given: Tree) -> None:
        inner.share_with(self)
        self.given = given

    def _holdings(
        self, method: Method, shared: Tree, users: Users, data: tuple[Tensor, ...]
    ) -> Iterator[tuple[slice | Tensor, Tree, Tree]]:
        for where, _, locals_ in super()._holdings(method, self.given, users, data):
            yield where, self.given, locals_

    def interests(self, model: Served, group: _Group, valid: Tensor | None = None) -> Tensor:
        """(users, r) where each of them looks; zeros for somebody without a history.

        valid: which of their items count; None: all.
        """
        users, data = group.users, group.data
        if valid is not None:
            data = (data[0], valid, *data[2:])
        method, serving = model.method, model.head.serving
        out = torch.zeros(len(users), model.head.size)
        for where, tree, locals_ in self._holdings(method, self.given, users, data):
            columns = [part[where] for part in data]

            def one(local: Tree, *mine: Tensor, tree: Tree = tree) -> Tensor:
                return serving.interest(method, tree, local, self._client_data(*mine))

            out[where] = vmap(one)(locals_, *columns).float()
        return torch.where(group.data[1].any(1)[:, None], out, 0.0)


class _Group(NamedTuple):
    """Some people, and what they are asked."""

    users: Users
    data: tuple[Tensor, ...]
    question: Question
    shown: Tensor | None
    first: int
    """How many people came before: each draws noise of their own."""


def measure(
    path: Path,
    queries: Sequence[Query],
    *,
    rows: Sequence[int] = (500,),
    seeds: int = 5,
    own: bool = True,
    canaries: int = 0,
    trust_code: bool = False,
    step: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """The figures of each way to be served from a finished run: of each number of rows, and of each query.

    own: whether a device has the rows of its own items. canaries: how many made-up people ask by each query, to bound
    its ε from below. step: is told how many people are done, of how many.
    """
    from homebody.recipe import Recipe
    from homebody.report.record import RunFolder

    if seeds < 1:
        raise HomebodyError(f"A query is measured with at least 1 seed, not {seeds}.")
    for count in rows:
        if count < OWN_FEW:
            raise HomebodyError(f"A part has at least {OWN_FEW} rows, not {count}.")
    fitted, population = reopen(path, trust_code=trust_code)
    recipe = Recipe.from_toml(RunFolder.open(path).recipe_text())
    runtime = fitted.runtime
    assert isinstance(runtime, Simulator)
    plain = Served.of_fitted(fitted, recipe.method, recipe.fields, None, ids=item_ids(population))
    models = [plain.asking(query) for query in queries]
    impressions = runtime.split.shown is not None
    plans = [*_plain_plans(plain, rows, impressions)]
    for model in models:
        plans += _query_plans(model, rows, seeds, impressions)
    method = acting(fitted.method)
    device = {**plain.shared, **fitted.shared}  # with the index, and what devices did not train from
    with torch.no_grad():
        home = _AtHome(runtime, served_tree(plain))
        total = len(runtime.split.asked())
        for group in _groups(runtime):
            _measure(group, runtime, home, method, device, plain, plans, own=own)
            step(group.first + len(group.users), total)
    return {
        "run": str(path),
        "method": recipe.method,
        "data": recipe.data,
        "people": len(runtime.split.asked()),
        "items": population.n_items,
        "seeds": seeds,
        "own_rows": own,
        "model_bytes": len(plain.head.content),
        "ways": _ways(plans, recipe.stated_at, impressions, canaries),
    }


def _groups(runtime: Simulator) -> Iterator[_Group]:
    first = 0
    groups: Iterator[QuestionGroup] = runtime._question_groups()
    for users, data, asked, shown in groups:
        if (question := asked.get("test")) is not None:
            yield _Group(users, data, question, shown, first)
        first += len(users)


def _plain_plans(model: Served, rows: Sequence[int], impressions: bool) -> Iterator[_Plan]:
    """The ways that ask nothing. The first is the device's own ranking, and the second the whole table in 8 bits."""
    yield _Plan("device", None, model, 0)
    if "table" in model.head.serving.ways:
        yield _Plan("table", None, model, 0)
    if "shelf" not in model.head.serving.ways:
        return
    if impressions:
        yield _Plan("nobody", None, model, 0)
        return
    for count in rows:
        yield _Plan("shelf", count, model, 0, common=model.shelf(count))


def _query_plans(model: Served, rows: Sequence[int], seeds: int, impressions: bool) -> Iterator[_Plan]:
    if impressions:
        yield _Plan("server", None, model, seeds)
        return
    for count in rows:
        half = count // 2
        plan = _Plan("query", count, model, seeds, common=model.shelf(half))
        if isinstance(model.head.mechanism, Choice):
            plan.lists = lists(model.places, model.head.interests, count - half, model.shelf(half))
        yield plan


def _measure(
    group: _Group,
    runtime: Simulator,
    home: _AtHome,
    method: Method,
    device: Tree,
    model: Served,
    plans: list[_Plan],
    *,
    own: bool,
) -> None:
    """Take some people's figures into all plans."""
    items = torch.arange(len(model.ids)) if group.shown is None else group.shown
    truth = runtime._scores(method, device, group.users, group.data, items)
    rounded = home._scores(method, home.given, group.users, group.data, items)
    asked = (own or group.shown is not None) and any(plan.query is not None for plan in plans)
    interests = home.interests(model, group) if asked else None
    if group.shown is not None:
        common = model.head.serving.common(method, model.shared, model.catalogue)[group.shown]
        given = {"device": truth, "table": rounded, "nobody": common}
        for plan in plans:
            for seed in range(max(1, plan.seeds)):
                scores = _by_server(group, plan, seed, interests) if plan.seeds else given[plan.way]
                plan.add(seed, _of_impressions(group, truth, scores))
        return
    best = _Best.of(truth, group.question)
    for plan in plans:
        for seed in range(max(1, plan.seeds)):
            if plan.common is None:
                scores = truth if plan.way == "device" else rounded
                places, first = place(scores.contiguous(), group.question)["full/"], best.ten(scores)
            else:
                columns, scores = _on_part(group, home, method, plan, seed, rounded, interests, own=own)
                places, first = best.among(columns, scores)
            plan.add(seed, best.figures(places, first))


class _Best(NamedTuple):
    """What each question is about, and the ten items that the device itself would put first."""

    question: Question
    seen: Tensor
    """(Q, N) what is not new to the person."""
    truth: Tensor
    """(people, N) the device's own scores."""
    own: Tensor
    """(Q, 10) the scores of its ten, best first; −∞ where there are fewer."""

    @classmethod
    def of(cls, truth: Tensor, question: Question) -> _Best:
        assert question.seen is not None
        seen = torch.zeros(len(question.owner), truth.shape[1] + 1, dtype=torch.bool)
        seen = seen.scatter_(1, question.seen, True)[:, :-1]
        blank = cls(question, seen, truth, truth)
        return blank._replace(own=blank.scored(blank.ten(truth)))

    def scored(self, items: Tensor) -> Tensor:
        """The device's own scores of these items (Q, 10); −∞ for −1."""
        own = self.truth[self.question.owner].gather(1, items.clamp(min=0))
        return torch.where(items < 0, -torch.inf, own)

    def ten(self, scores: Tensor) -> Tensor:
        """The ten new items of the highest scores (people, N)."""
        return _ten(torch.where(self.seen, -torch.inf, scores[self.question.owner]))

    def among(self, columns: Tensor, scores: Tensor) -> tuple[Places, Tensor]:
        """Where the held-out items stand in each person's part, and its ten best; columns (people, K) names the part's
        items, and scores theirs. What is not in a part stands nowhere."""
        items, values, relevant = columns[self.question.owner], scores[self.question.owner], self.question.relevant
        new = ~self.seen.gather(1, items)
        held = (items[:, :, None] == relevant[:, None, :]).any(2)
        ranks = []
        for one in relevant.T:
            here = items == one[:, None]
            score = torch.where(here, values, torch.inf).amin(1, keepdim=True)
            before = (~(values < score) & new & ~held).sum(1)
            ranks.append(torch.where(here.any(1), before, NOWHERE))
        rank = torch.stack(ranks, 1).sort(dim=1).values
        rank = torch.where(rank < NOWHERE, rank + torch.arange(rank.shape[1]), NOWHERE)
        best = _ten(torch.where(new, values, -torch.inf))
        named = torch.where(best < 0, -1, items.gather(1, best.clamp(min=0)))
        return Places(rank, (relevant >= 0).sum(1), rank[:, 0].float()), named

    def figures(self, places: Places, first: Tensor) -> dict[str, Tensor]:
        """How good a ranking is, and how its first ten differ from the device's own. Items that the device scores
        alike stand for one another."""
        there = self.own > -torch.inf
        first = torch.nn.functional.pad(first, (0, self.own.shape[1] - first.shape[1]), value=-1)
        found, least = self.scored(first), torch.where(there, self.own, torch.inf).amin(1, keepdim=True)
        count = there.sum(1).clamp(min=1)
        return {
            f"hr@{TEN}": hit(places, TEN),
            f"ndcg@{TEN}": ndcg(places, TEN),
            "share": (found >= least).sum(1) / count,
            "tau": ((found != self.own) & there).sum(1) / count,
        }


def _ten(scores: Tensor) -> Tensor:
    """(Q, 10) the columns of the highest scores; −1 where there are fewer."""
    best = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).topk(min(TEN, scores.shape[1]), dim=1)
    return torch.where(best.values > -torch.inf, best.indices, -1)


def served_tree(model: Served) -> Tree:
    """The shared parameters as a device has them that was given all rows in 8 bits."""
    part = model.rows()
    return model.head.serving.joined(model.head.shared, part.rows, part.whole)


def _by_server(group: _Group, plan: _Plan, seed: int, interests: Tensor | None) -> Tensor:
    """The server's scores of what these people are shown, by what they told it."""
    assert group.shown is not None
    assert interests is not None
    model = plan.model
    heard = vmap(model.head.heard)(_told(model, interests, group.first, seed))
    return (model.places[group.shown] @ heard[:, :, None])[:, :, 0]


def _told(model: Served, interests: Tensor, first: int, seed: int) -> Tensor:
    """What each of these people tells."""
    streams = Rng.of(seed, "measure").private.fold(first + torch.arange(len(interests)))
    told: Tensor = vmap(lambda interest, key: model.head.tell(interest, Rng(key)))(interests, streams.key)
    return told


def _on_part(
    group: _Group,
    home: _AtHome,
    method: Method,
    plan: _Plan,
    seed: int,
    scores: Tensor,
    interests: Tensor | None,
    *,
    own: bool,
) -> tuple[Tensor, Tensor]:
    """(people, K) the items of each person's part, and their scores.

    interests: where each person looks, by all of their items; None: only by those whose rows are in the part.
    """
    assert plan.common is not None
    chosen = plan.common.expand(len(group.users), -1)
    items, valid, *others = group.data
    if plan.query is not None:
        looks = interests
        if looks is None:
            looks = home.interests(plan.model, group, valid & _inside(items, chosen))
        told = _told(plan.model, looks, group.first, seed)
        if plan.lists is not None:
            added = plan.lists[told.long()]
        else:
            assert plan.rows is not None
            fit = vmap(plan.model.head.heard)(told) @ plan.model.places.T
            fit[:, plan.common] = -torch.inf
            added = fit.topk(min(plan.rows - plan.rows // 2, fit.shape[1] - len(plan.common)), dim=1).indices
        chosen = torch.cat([chosen, added], 1)
    if own:
        return chosen, scores.gather(1, chosen)
    partly = (items, valid & _inside(items, chosen), *others)
    return chosen, home._scores(method, home.given, group.users, partly, chosen)


def _inside(items: Tensor, chosen: Tensor) -> Tensor:
    """(people, L) which of each one's items are among those chosen for them."""
    ordered = chosen.sort(dim=1).values
    place = torch.searchsorted(ordered, items.contiguous()).clamp(max=ordered.shape[1] - 1)
    return ordered.gather(1, place) == items


def _of_impressions(group: _Group, truth: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """The figures of each impression: how good these scores are, and how they differ from the device's own."""
    question = group.question
    columns = torch.cat([question.relevant, question.candidates], 1)
    own, other = (table[question.owner].gather(1, columns.clamp(min=0)) for table in (truth, scores))
    return {"auc": place(scores.contiguous(), question)[""].auc, "tau": skew(own, other, columns >= 0)}


def _ways(plans: list[_Plan], delta: float, impressions: bool, canaries: int) -> list[dict[str, Any]]:
    """A row for each plan, each with the figure at ε = 0 that it is held against."""
    main = "auc" if impressions else "share"
    rows = []
    without: dict[int | None, dict[str, float]] = {}
    shown: dict[Query, float] = {}
    for plan in plans:
        each = plan.figures()
        means = {name: sum(figures[name] for figures in each) / len(each) for name in each[0]}
        row: dict[str, Any] = {"way": plan.way, "rows": plan.rows, "query": None, "epsilon": 0.0, "epsilon_month": 0.0}
        if plan.way in ("shelf", "nobody"):
            without[plan.rows] = means
        if plan.query is not None:
            mechanism = plan.model.head.mechanism
            assert mechanism is not None
            at = plan.query.delta or delta
            row |= {
                "query": str(plan.query),
                "interests": len(plan.model.head.interests) or None,
                "delta": at,
                "epsilon": epsilon([(mechanism.event, 1)], at).epsilon,
                "epsilon_month": epsilon([(mechanism.event, MONTH)], at).epsilon,
            }
            if canaries and plan.query not in shown:
                found = bound(mechanism, plan.query.delta, Rng.of(0, "canaries"), canaries)
                shown[plan.query] = found.epsilon
            row |= {"epsilon_canaries": shown[plan.query]} if canaries else {}
            beside = without[plan.rows]
            gains = [figures[main] - beside[main] for figures in each]
            middle = sum(gains) / len(gains)
            spread = math.sqrt(sum((gain - middle) ** 2 for gain in gains) / max(1, len(gains) - 1))
            row |= {"gain": middle, "gain_deviation": spread, "at_zero": beside}
        rows.append({**row, "metrics": means, "bytes": _bytes(plan)})
    return rows


def _bytes(plan: _Plan) -> int | None:
    """What a device is sent."""
    model = plan.model
    if plan.way == "table":
        return len(model.rows().content)
    if plan.way == "shelf":
        return len(model.rows(model.shelf(plan.rows or 0)).content)
    if plan.way == "query" and plan.rows:
        half = plan.rows // 2
        rest = model.order[half : plan.rows]  # as many rows, whichever they are
        return len(model.rows(model.shelf(half)).content) + len(model.rows(rest).content)
    if plan.way == "server":
        return len(json.dumps([{"item": item, "score": 0.123456} for item in model.ids[:100]]))
    return None
