"""Where the held-out items stand, and what is made of that: per question, then per user, then on average."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.core import Evaluated, Users
from homebody.errors import Diverged
from homebody.evaluation import chance as by_chance
from homebody.evaluation import metric_kernels as kernels

__all__ = [
    "CUTOFFS",
    "ERRORS",
    "METRICS",
    "OF_IMPRESSIONS",
    "Block",
    "Measured",
    "Places",
    "Question",
    "beside_chance",
    "first_lists",
    "main_cutoff",
    "place",
    "skew",
    "sound",
    "summarise",
]

CUTOFFS = (5, 10, 20)
NOWHERE = 1 << 40
"""The rank of an item that is not there."""


class Question(NamedTuple):
    """What some users are asked: where do the held-out items stand? One row a question."""

    relevant: Tensor
    """(Q, P) the held-out items; -1 pads, and there is at least one."""
    candidates: Tensor
    """(Q, C) the items they are ranked against; -1 pads."""
    seen: Tensor | None
    """(Q, S) what the full ranking leaves out, ascending; the catalogue's size pads. None: no full ranking."""
    owner: Tensor
    """(Q,) whose question it is: a row of the scores."""
    rows: Tensor | None = None
    """(Q,) the interaction that each question is about, where each is asked by itself."""
    rated: Tensor | None = None
    """(Q, R) the items of held-out ratings, -1 pads, where scores are ratings; one may stand twice."""
    ratings: Tensor | None = None
    """(Q, R) what they were rated."""

    def taken(self, chosen: Tensor, owner: Tensor) -> Question:
        """The questions that are marked, with scores in these rows."""
        others = (self.seen, self.rows, self.rated, self.ratings)
        seen, *rest = (None if part is None else part[chosen] for part in others)
        return Question(self.relevant[chosen], self.candidates[chosen], seen, owner, *rest)


class Places(NamedTuple):
    """Where each question's relevant items stand."""

    rank: Tensor
    """(Q, P) from 0, the best first; `NOWHERE` pads."""
    relevant: Tensor
    """(Q,) how many there are."""
    auc: Tensor
    """(Q,) the chance that a relevant item scores higher than another one; ties count half."""


def place(scores: Tensor, question: Question) -> dict[str, Places]:
    """The relevant items among the candidates, and under `full/` in the whole catalogue.

    Given scores for (users, items). A relevant item stands behind everything that scores no less than it does
    and is not relevant itself; a score that is no number counts against the model on either side.

    >>> asked = Question(torch.tensor([[2]]), torch.tensor([[0, 1]]), torch.tensor([[3, 5]]), torch.tensor([0]))
    >>> found = place(torch.tensor([[0.5, 0.1, 0.5, 0.9, 0.7]]), asked)
    >>> found[""].rank.tolist(), found["full/"].rank.tolist(), found[""].auc.tolist()
    ([[1]], [[2]], [0.75])
    """
    return {kind: _places(counts) for kind, counts in _counted(scores, question).items()}


class _RankCounts(NamedTuple):
    """Of each question: its relevant items, and what the kernels count for them."""

    relevant: Tensor
    """(Q, P)"""
    above: Tensor
    """(Q, P) how many others score no less than each relevant item."""
    tied: Tensor
    """(Q, P) how many score the same."""
    others: Tensor
    """(Q,) how many others there are."""


def _counted(scores: Tensor, question: Question) -> dict[str, _RankCounts]:
    """What `place` counts, before it is turned into places."""
    count = kernels if scores.device.type == "cpu" else _Plain
    counted = {"": count.among(scores, question.owner, question.relevant, question.candidates)}
    if question.seen is not None:
        counted["full/"] = count.in_catalogue(scores, question.owner, question.relevant, question.seen)
    return {kind: _RankCounts(question.relevant, *counts) for kind, counts in counted.items()}


class _Plain:
    """What the kernels count, in plain torch: for other devices, and to check them by."""

    @staticmethod
    def among(scores: Tensor, owner: Tensor, relevant: Tensor, listed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        asked = scores[owner]
        others, there = asked.gather(1, listed.clamp(min=0)), listed >= 0
        return _Plain._count(asked.gather(1, relevant.clamp(min=0)), others, there)

    @staticmethod
    def in_catalogue(scores: Tensor, owner: Tensor, relevant: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        asked = scores[owner]
        there = torch.ones(asked.shape[0], asked.shape[1] + 1, dtype=torch.bool, device=asked.device)
        there.scatter_(1, torch.where(relevant < 0, asked.shape[1], relevant), False).scatter_(1, seen, False)
        return _Plain._count(asked.gather(1, relevant.clamp(min=0)), asked, there[:, :-1])

    @staticmethod
    def first(scores: Tensor, owner: Tensor, seen: Tensor, k: int) -> Tensor:
        asked = torch.nn.functional.pad(scores[owner], (0, max(1, k - scores.shape[1])), value=-torch.inf)
        asked = asked.nan_to_num(-torch.inf, torch.inf, -torch.inf).scatter(1, seen, -torch.inf)
        best = torch.sort(asked, dim=1, descending=True, stable=True)
        return torch.where(best.values[:, :k] > -torch.inf, best.indices[:, :k], -1)

    @staticmethod
    def _count(target: Tensor, others: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        columns = range(target.shape[1])
        above = [(~(others < target[:, j, None]) & there).sum(1) for j in columns]
        tied = [((others == target[:, j, None]) & there).sum(1) for j in columns]
        return torch.stack(above, 1), torch.stack(tied, 1), there.sum(1)


def _places(counts: _RankCounts) -> Places:
    relevant, above, tied, others = counts
    there = relevant >= 0
    count = there.sum(1)
    order = torch.arange(relevant.shape[1], device=relevant.device)
    rank = torch.where(there, above, NOWHERE).sort(dim=1).values + order
    wrong = torch.where(there, above.double() - 0.5 * tied, 0.0).sum(1)
    right = 1.0 - wrong / (count * others).clamp(min=1)
    return Places(rank, count, right)


def hit(places: Places, k: int) -> Tensor:
    """Whether any relevant item is among the first k.

    >>> hit(Places(torch.tensor([[0], [9], [10]]), torch.ones(3), torch.ones(3)), 10).tolist()
    [1.0, 1.0, 0.0]
    """
    return (places.rank[:, 0] < k).double()


def ndcg(places: Places, k: int) -> Tensor:
    """Normalised discounted cumulative gain: 1 where the relevant items stand first.

    >>> ndcg(Places(torch.tensor([[0], [2], [10]]), torch.ones(3), torch.ones(3)), 10).tolist()
    [1.0, 0.5, 0.0]
    """
    gain = torch.where(places.rank < k, 1.0 / torch.log2(places.rank.double() + 2.0), 0.0).sum(1)
    return gain / _best(k, gain.device)[(places.relevant.clamp(max=k) - 1).long()]


@lru_cache(maxsize=64)
def _best(k: int, device: torch.device) -> Tensor:
    """The gain of the first 1, 2, … k places together."""
    return (1.0 / torch.log2(torch.arange(k, device=device).double() + 2.0)).cumsum(0)


def precision(places: Places, k: int) -> Tensor:
    """How much of the first k is relevant."""
    return (places.rank < k).sum(1).double() / k


def recall(places: Places, k: int) -> Tensor:
    """How much of what is relevant is among the first k."""
    return (places.rank < k).sum(1).double() / places.relevant


def hits(places: Places, k: int) -> Tensor:
    """How many of the relevant items would be among the first k if each stood alone against the others.

    >>> hits(Places(torch.tensor([[0, 10, NOWHERE]]), torch.tensor([2]), torch.ones(1)), 10).tolist()
    [1.0]
    """
    return ((_alone(places) < k).sum(1)).double() / places.relevant


def gain(places: Places, k: int) -> Tensor:
    """The NDCG of each relevant item by itself, as `hits` counts it: the mean over them."""
    rank = _alone(places)
    return torch.where(rank < k, 1.0 / torch.log2(rank.double() + 2.0), 0.0).sum(1) / places.relevant


def _alone(places: Places) -> Tensor:
    """Ranks among the items that are not relevant."""
    return places.rank - torch.arange(places.rank.shape[1], device=places.rank.device)


def reciprocal_rank(places: Places, k: int) -> Tensor:
    """One over the place, from 1, of the first relevant item; 0 if that is not among the first k."""
    first = places.rank[:, 0]
    return torch.where(first < k, 1.0 / (first.double() + 1.0), 0.0)


def mean_reciprocal_rank(places: Places) -> Tensor:
    """The mean over all relevant items of one over the place, from 1: uncut, as news recommenders are measured.

    >>> two = Places(torch.tensor([[0, 3], [1, NOWHERE]]), torch.tensor([2, 1]), torch.ones(2))
    >>> mean_reciprocal_rank(two).tolist()
    [0.625, 0.5]
    """
    return torch.where(places.rank < NOWHERE, 1.0 / (places.rank.double() + 1.0), 0.0).sum(1) / places.relevant


def skew(plain: Tensor, noisy: Tensor, there: Tensor | None = None) -> Tensor:
    """τ of each row: the share of places at which noise puts another item. Both are scores (Q, C) of the same items.

    there: which entries are real. Items of equal score stand in the order in which they are given.

    >>> skew(torch.tensor([[3.0, 2, 1, 0]]), torch.tensor([[3.0, 1, 2, 0]])).tolist()
    [0.5]
    """
    there = torch.ones_like(plain, dtype=torch.bool) if there is None else there
    orders = [
        torch.where(there, scores, -torch.inf).argsort(dim=1, descending=True, stable=True) for scores in (plain, noisy)
    ]
    place = torch.arange(plain.shape[1], device=plain.device)
    count = there.sum(1)
    moved = (orders[0] != orders[1]) & (place < count[:, None])
    return moved.sum(1).double() / count.clamp(min=1)


METRICS: dict[str, Callable[[Places, int], Tensor]] = {
    "hr": hit,
    "ndcg": ndcg,
    "precision": precision,
    "recall": recall,
    "mrr": reciprocal_rank,
    "hits": hits,
    "gain": gain,
}
"""What is measured at each cut-off; the AUC needs none."""
OF_IMPRESSIONS: dict[str, Callable[[Places], Tensor]] = {
    "auc": lambda places: places.auc.double(),
    "mrr": mean_reciprocal_rank,
    "ndcg@5": lambda places: ndcg(places, 5),
    "ndcg@10": lambda places: ndcg(places, 10),
}
"""What is measured of each impression and averaged over all of them, as papers on news do: under `impressions/`."""
TOGETHER = 1 << 18
"""Ranks that are measured in one go, at most about: 2 MB."""
ERRORS = ("rmse", "mae")
"""Metrics of ratings, over all that are held out: less is better."""


def errors(scores: Tensor, question: Question) -> Tensor:
    """Of each question's ratings, and scores that are ratings: the sum of squared errors, of absolute ones, the count.

    >>> asked = Question(torch.tensor([[1]]), torch.tensor([[0]]), None, torch.tensor([0]), None,
    ...     torch.tensor([[1, 2, -1]]), torch.tensor([[4.0, 1.0, 0.0]]))
    >>> errors(torch.tensor([[9.0, 3.0, 3.0]]), asked).tolist()
    [[5.0, 3.0, 2.0]]
    """
    assert question.rated is not None
    assert question.ratings is not None
    there = question.rated >= 0
    predicted = scores[question.owner].gather(1, question.rated.clamp(min=0)).double()
    wrong = torch.where(there, predicted - question.ratings.double(), 0.0)
    return torch.stack([(wrong**2).sum(1), wrong.abs().sum(1), there.sum(1).double()], 1)


class Block(NamedTuple):
    """Some users' scores, and what they are asked."""

    users: Users
    """(B,) whose scores each row has; somebody may have several rows."""
    scores: Tensor
    """(B, N) for all items, or for those that the questions name by their column."""
    asked: Mapping[str, Question]
    impressions: bool = False
    """Whether each question is an impression."""


def sound(blocks: Iterable[Block]) -> Iterator[Block]:
    """The same blocks; refused where no score of any is a number: zeros everywhere would look like a poor model."""
    number, some = False, False
    for block in blocks:
        number, some = number or not bool(torch.isnan(block.scores).all()), some or block.scores.numel() > 0
        yield block
    if some and not number:
        raise Diverged("No score of anybody is a number.")


def summarise(
    blocks: Iterable[Block],
    cutoffs: Sequence[int] = CUTOFFS,
    slices: Mapping[str, npt.NDArray[np.bool_]] | None = None,
    *,
    lists: bool = False,
) -> Evaluated:
    """Metrics over blocks of users: test under bare names, other held-out parts prefixed by theirs.

    Impressions are averaged over each user's first, like all questions, and under `impressions/` over all of them.

    slices: groups of users, by name, whose means are given as well, prefixed by the name.
    lists: give what `first_lists` gives too.
    """
    summary = _Summary(cutoffs, slices)
    firsts: list[tuple[Users, Tensor]] = []
    for block in blocks:
        for held, question, counts in _asked(block):
            summary.add(block, held, question, counts)
        firsts += _first(block, cutoffs) if lists else []
    return replace(summary.evaluated(), lists=_joined(firsts))


def first_lists(blocks: Iterable[Block], cutoffs: Sequence[int] = CUTOFFS) -> dict[str, Tensor]:
    """The first items of each test question's full ranking, as many as the main cut-off: see `Evaluated.lists`.

    Of items with the same score the first is taken; one whose score is no number is never recommended.

    >>> asked = Question(torch.tensor([[2]]), torch.tensor([[0]]), torch.tensor([[3, 5]]), torch.tensor([0]))
    >>> scores = torch.tensor([[0.5, 0.1, 0.5, 0.9, 0.7]])
    >>> first_lists([Block(np.array([8]), scores, {"test": asked})], [3])
    {'user': tensor([8]), 'items': tensor([[4, 0, 2]], dtype=torch.int32)}
    """
    return _joined([pair for block in blocks for pair in _first(block, cutoffs)])


def _first(block: Block, cutoffs: Sequence[int]) -> list[tuple[Users, Tensor]]:
    """Whose test questions a block has, and their first items; empty if no question ranks the whole catalogue."""
    question = block.asked.get("test")
    if question is None or question.seen is None:
        return []
    count = kernels if block.scores.device.type == "cpu" else _Plain
    found = count.first(block.scores.detach(), question.owner, question.seen, main_cutoff(cutoffs))
    return [(block.users[question.owner.cpu().numpy()], found.to("cpu", torch.int32))]


def _joined(firsts: Sequence[tuple[Users, Tensor]]) -> dict[str, Tensor]:
    if not firsts:
        return {}
    users, items = zip(*firsts, strict=True)
    return {"user": torch.from_numpy(np.concatenate(users)), "items": torch.cat(items)}


class Measured(NamedTuple):
    """Scores, and what stands beside them on the same questions."""

    scores: dict[str, float]
    """The metrics of the scores."""
    chance: dict[str, float]
    """The expectation of the same metrics for a random order of the items."""
    against: npt.NDArray[np.int64]
    """Of each test question, how many items its held-out ones are ranked against."""


def beside_chance(
    blocks: Iterable[Block], cutoffs: Sequence[int] = CUTOFFS, slices: Mapping[str, npt.NDArray[np.bool_]] | None = None
) -> Measured:
    """`summarise`, with what chance gets, in one pass over the questions."""
    scores, chance, against = _Summary(cutoffs, slices), _Summary(cutoffs, slices, _ByChance), []
    for block in blocks:
        for held, question, counts in _asked(block):
            scores.add(block, held, question, counts)
            chance.add(block, held, question, counts)
            if held == "test":
                against.append(counts[""].others.cpu().numpy())
    counted = np.concatenate(against) if against else np.zeros(0, dtype=np.int64)
    return Measured(scores.evaluated().metrics, chance.evaluated().metrics, counted)


def _asked(block: Block) -> Iterator[tuple[str, Question, dict[str, _RankCounts]]]:
    """Each question of a block, and what is counted for it."""
    scores = block.scores.detach().contiguous()  # once for all questions
    for held, question in block.asked.items():
        yield held, question, _counted(scores, question)


class _Summary:
    """Means over questions that come block by block."""

    def __init__(
        self,
        cutoffs: Sequence[int],
        slices: Mapping[str, npt.NDArray[np.bool_]] | None,
        measured: type[_Measured] | None = None,
    ) -> None:
        self._cutoffs, self._slices, self._measured = cutoffs, slices or {}, measured or _Measured
        self._values: dict[str, dict[str, _Measured]] = {}
        self._users: dict[str, list[Users]] = {}
        self._wrong: dict[str, list[Tensor]] = {}

    def add(self, block: Block, held: str, question: Question, counted: Mapping[str, _RankCounts]) -> None:
        """The questions of one held-out part, of the users of a block."""
        self._users.setdefault(held, []).append(block.users[question.owner.cpu().numpy()])
        if question.ratings is not None:
            self._wrong.setdefault(held, []).append(errors(block.scores.detach(), question).cpu())
        for kind, counts in counted.items():
            kinds = self._values.setdefault(held, {})
            kinds.setdefault(kind, self._measured(self._cutoffs, block.impressions)).add(counts)

    def evaluated(self) -> Evaluated:
        metrics: dict[str, float] = {}
        per_user: dict[str, Tensor] = {}
        names = [*(f"{name}@{k}" for name in METRICS for k in self._cutoffs), "auc", "rank"]
        for held, kinds in self._values.items():
            prefix = "" if held == "test" else f"{held}/"
            owners = np.concatenate(self._users[held])
            columns: dict[str, Tensor] = {}
            every: dict[str, Tensor] = {}
            for kind, measured in kinds.items():
                rows = measured.table()
                columns |= {f"{kind}{name}": row for name, row in zip(names, rows, strict=False)}
                if measured.impressions:
                    found = zip(OF_IMPRESSIONS, rows[len(names) :], strict=True)
                    every |= {f"{kind}impressions/{name}": row for name, row in found}
            who, table = _per_user(owners, columns)
            if held == "test":
                per_user = {"user": torch.from_numpy(who), **_kept(table, self._cutoffs)}
            for group, inside in {"": None, **self._slices}.items():
                start = f"{prefix}{group}{'/' if group else ''}"
                chosen = slice(None) if inside is None else torch.from_numpy(inside[who])
                asked = slice(None) if inside is None else torch.from_numpy(inside[owners])
                for some, where in ((table, chosen), (every, asked)):
                    for name, column in some.items():
                        if not name.endswith("rank") and len(column[where]):
                            metrics[f"{start}{name}"] = float(column[where].mean())
                if held in self._wrong:
                    sums = torch.cat(self._wrong[held])[asked].sum(0)
                    if sums[2] > 0:
                        metrics[f"{start}rmse"] = float((sums[0] / sums[2]).sqrt())
                        metrics[f"{start}mae"] = float(sums[1] / sums[2])
        return Evaluated(metrics, per_user)


class _Measured:
    """Every metric at every cutoff, AUC, and the first relevant item's rank: a row each, a column for each question.

    impressions: the questions are impressions. The rows of `OF_IMPRESSIONS` follow.
    """

    def __init__(self, cutoffs: Sequence[int], impressions: bool = False) -> None:
        self._cutoffs, self.impressions = cutoffs, impressions
        self._waiting: list[_RankCounts] = []
        self._tables: list[Tensor] = []

    def add(self, counts: _RankCounts) -> None:
        """Blocks are measured together: a metric of few users takes as long as one of many. Those of another width
        are not, for sums over rows of zeros may round differently."""
        if self._waiting and counts.relevant.shape[1] != self._waiting[0].relevant.shape[1]:
            self._measure()
        self._waiting.append(counts)
        if sum(waiting.relevant.numel() for waiting in self._waiting) > TOGETHER:
            self._measure()

    def table(self) -> Tensor:
        self._measure()
        return torch.cat(self._tables, 1)

    def _measure(self) -> None:
        if self._waiting:
            self._tables.append(self._rows(_RankCounts(*map(torch.cat, zip(*self._waiting, strict=True)))).cpu())
            self._waiting = []

    def _rows(self, counts: _RankCounts) -> Tensor:
        places = _places(counts)
        at = [metric(places, k) for metric in METRICS.values() for k in self._cutoffs]
        each = [metric(places) for metric in OF_IMPRESSIONS.values()] if self.impressions else []
        return torch.stack([*at, places.auc.double(), places.rank[:, 0].double(), *each])


class _ByChance(_Measured):
    """What a random order gets on average, whatever the scores were; it has no rank."""

    def _rows(self, counts: _RankCounts) -> Tensor:
        relevant, others = (counts.relevant >= 0).sum(1).cpu(), counts.others.cpu()
        at = [metric(relevant, others, k) for metric in by_chance.BY_CHANCE.values() for k in self._cutoffs]
        of_impressions = by_chance.OF_IMPRESSIONS_BY_CHANCE.values() if self.impressions else ()
        each = [metric(relevant, others) for metric in of_impressions]
        area = by_chance.auc(relevant, others)
        return torch.stack([*at, area, torch.zeros_like(area), *each])


def _per_user(owners: Users, table: dict[str, Tensor]) -> tuple[Users, dict[str, Tensor]]:
    """The mean over each user's questions, users ascending."""
    who, inverse, counts = np.unique(owners, return_inverse=True, return_counts=True)
    means = torch.zeros(len(table), len(who), dtype=torch.float64)
    means.index_add_(1, torch.from_numpy(inverse), torch.stack(list(table.values())))
    return who, dict(zip(table, means / torch.from_numpy(counts).double(), strict=True))


def _kept(table: Mapping[str, Tensor], cutoffs: Sequence[int]) -> dict[str, Tensor]:
    """What a run keeps of every user: ranks, and NDCG at 10 or the cut-off nearest to it."""
    k = main_cutoff(cutoffs)
    return {
        name: column.long() if name.endswith("rank") else column
        for name, column in table.items()
        if name.removeprefix("full/") in ("rank", f"ndcg@{k}")
    }


def main_cutoff(cutoffs: Sequence[int]) -> int:
    """The cut-off that comparisons are made at.

    >>> main_cutoff([5, 10, 20]), main_cutoff([1, 30])
    (10, 1)
    """
    return min(cutoffs, key=lambda k: (abs(k - 10), k))
