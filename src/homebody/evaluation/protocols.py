"""From a split to the questions a model is asked, and how to say what a number means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from homebody.core import Evaluated, Users
from homebody.data.partitions import WAYS, settings_of
from homebody.data.population import Population
from homebody.data.splits import PROTOCOLS, Held, Split
from homebody.errors import HomebodyError
from homebody.evaluation.metrics import CUTOFFS, Block, Measured, Question, beside_chance, sound, summarise
from homebody.reference import Score, ScoreNow

__all__ = [
    "HELD",
    "AskedAt",
    "ImpressionRows",
    "describe",
    "measure",
    "measure_beside_chance",
    "questions",
    "sliced",
]

HELD: tuple[Held, ...] = ("valid", "test")
SCORES_AT_ONCE = 1 << 22
TIES = {
    "latest-first": "latest (of a tie in time, the first in the file)",
    "latest-random": "latest (of a tie in time, one at random)",
}
"""Which of the latest are held out, where it is not the last in the file."""


def questions(
    split: Split,
    users: Users,
    device: torch.device | str = "cpu",
    one_by_one: bool = False,
    rated: bool = False,
    parts: Sequence[Held] = HELD,
) -> dict[str, Question]:
    """What these users are asked, for validation and for test; whoever is not asked has no row.

    one_by_one: each held-out interaction is a question of its own, for it has circumstances of its own. So it is where
    a protocol keeps repeats.
    rated: what each held-out item was rated is asked as well.
    parts: the held-out parts that are asked about.
    """
    one_by_one = one_by_one or split.repeats
    if split.shown is not None:
        shown = {held: _about_impressions(split, split.shown[held], users, device) for held in parts}
        return {held: question for held, question in shown.items() if len(question.owner)}
    asked: dict[str, Question] = {}
    for held in parts:
        owner = np.flatnonzero(split.sizes(held)[users] > 0)
        some = users[owner]
        if len(some):
            about = (split.relevant(some, held), split.candidates(some, held), split.seen(some, held), owner)
            asked[held] = Question(*(torch.from_numpy(part).to(device) for part in about))
            if one_by_one:
                asked[held] = _apart(asked[held], split, some, held)
            if rated:
                asked[held] = _rated(asked[held], split, some, held)
    return asked


def _apart(question: Question, split: Split, users: Users, held: Held) -> Question:
    """A question for each held-out interaction: the others are still not what it is ranked against."""
    table = split.padded_rows(users, part=held)
    whose, place = np.nonzero(table >= 0)
    rows = table[whose, place]
    item = split.population.items[rows].astype(np.int64)
    device = question.owner.device
    relevant, number = torch.from_numpy(item)[:, None].to(device), torch.from_numpy(whose).to(device)
    apart = question.taken(number, question.owner[number])
    seen = apart.seen
    if seen is not None:
        # What else is held out of theirs is theirs: never interacted with is neither.
        others = torch.where(apart.relevant == relevant, -1, apart.relevant)
        others = torch.where(others < 0, split.n_items, others)
        seen = torch.cat([seen, others], 1).sort(dim=1).values
    return apart._replace(relevant=relevant, seen=seen, rows=torch.from_numpy(rows).to(device))


def _rated(question: Question, split: Split, users: Users, held: Held) -> Question:
    """The same, with what was rated how: of each held-out interaction, be it one of several with an item."""
    ratings = split.population.ratings
    assert ratings is not None
    device = question.owner.device
    rows = split.padded_rows(users, part=held) if question.rows is None else question.rows.cpu().numpy()[:, None]
    item = np.where(rows >= 0, split.population.items[rows], -1).astype(np.int64)
    value = np.where(rows >= 0, ratings[rows], 0.0).astype(np.float32)
    return question._replace(rated=torch.from_numpy(item).to(device), ratings=torch.from_numpy(value).to(device))


class AskedAt(NamedTuple):
    """People as they were when they are asked about impressions: what they had by then, and what they were shown."""

    users: Users
    """(R,) somebody may have several rows."""
    known: npt.NDArray[np.int64]
    """(R,) how many of their interactions they had."""
    items: npt.NDArray[np.int64]
    """(R, W) what all the impressions of a row show, each item once; item 0 pads, and is asked nothing."""
    questions: dict[str, Question]
    """Each impression: the columns of `items` that were clicked, and those that were not."""


class ImpressionRows:
    """The impressions of a split that are asked, by their users and what these had at the time."""

    def __init__(self, split: Split) -> None:
        shown = split.population.impressions
        assert shown is not None
        assert split.shown is not None
        self._split, self._shown, self._numbers = split, shown, split.asked_impressions
        self._valid = len(split.shown["valid"])
        known = split.known_at(self._numbers)
        most = int(known.max(initial=0)) + 1
        rows, self._row = np.unique(shown.users[self._numbers] * most + known, return_inverse=True)
        self.users, self.known = rows // most, rows % most

    def pieces(self, order: npt.NDArray[np.int64], samples: int, scores: int) -> Iterator[npt.NDArray[np.int64]]:
        """The rows in this order, in pieces of at most so many padded interactions and so many scores, but at least
        one row."""
        widest = np.bincount(self._row, np.diff(self._shown.indptr)[self._numbers], len(self.users)).astype(np.int64)
        start, length, width = 0, 0, 0
        for end, row in enumerate(order.tolist()):
            longer, wider = max(length, int(self.known[row])), max(width, int(widest[row]))
            if end > start and ((end - start + 1) * longer > samples or (end - start + 1) * wider > scores):
                yield order[start:end]
                start, longer, wider = end, int(self.known[row]), int(widest[row])
            length, width = longer, wider
        if start < len(order):
            yield order[start:]

    def asked(self, rows: npt.NDArray[np.int64], device: torch.device | str = "cpu") -> AskedAt:
        """These rows, and the questions that are asked of them."""
        place = np.full(len(self.users), -1)
        place[rows] = np.arange(len(rows))
        owner = place[self._row]
        chosen = np.flatnonzero(owner >= 0)
        shown = self._shown.taken(self._numbers[chosen])
        n_items, lengths = self._split.n_items, np.diff(shown.indptr)
        key = np.repeat(owner[chosen], lengths) * n_items + shown.items
        distinct, where = np.unique(key, return_inverse=True)
        whose = distinct // n_items
        first = np.searchsorted(whose, np.arange(len(rows)))
        column = np.arange(len(distinct)) - first[whose]
        items = np.zeros((len(rows), int(column.max(initial=-1)) + 1), dtype=np.int64)
        items[whose, column] = distinct % n_items
        table = _laid_out(column[where.reshape(-1)], lengths)
        clicked = _laid_out(shown.clicked.astype(np.int64), lengths) > 0
        late = chosen >= self._valid
        questions = {
            held: _clicked_among(table[part], clicked[part], owner[chosen[part]], device)
            for held, part in (("valid", ~late), ("test", late))
            if part.any()
        }
        return AskedAt(self.users[rows], self.known[rows], items, questions)


def _laid_out(values: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Values one row after another as a table, padded with -1."""
    there = np.arange(int(lengths.max(initial=0))) < lengths[:, None]
    out = np.full(there.shape, -1, dtype=np.int64)
    out[there] = values
    return out


def _clicked_among(
    shown: npt.NDArray[np.int64],
    clicked: npt.NDArray[np.bool_],
    owner: npt.NDArray[np.int64],
    device: torch.device | str,
) -> Question:
    """Each row is a question: what was clicked among what was shown."""
    relevant, others = (_to_the_left(np.where(wanted, shown, -1)) for wanted in (clicked, ~clicked))
    asked, against, whose = (torch.from_numpy(part).to(device) for part in (relevant, others, owner))
    return Question(asked, against, None, whose)


def _about_impressions(
    split: Split, numbers: npt.NDArray[np.int64], users: Users, device: torch.device | str
) -> Question:
    """Each impression of these users is a question."""
    shown = split.population.impressions
    assert shown is not None
    order = np.argsort(users, kind="stable")
    place = np.searchsorted(users[order], shown.users[numbers])
    inside = place < len(users)
    inside[inside] = users[order][place[inside]] == shown.users[numbers][inside]
    some, owner = shown.taken(numbers[inside]), order[place[inside]]
    lengths = np.diff(some.indptr)
    table = _laid_out(some.items.astype(np.int64), lengths)
    return _clicked_among(table, _laid_out(some.clicked.astype(np.int64), lengths) > 0, owner, device)


def _to_the_left(table: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Rows with their -1 at the end, as narrow as they can be."""
    table = np.take_along_axis(table, np.argsort(table < 0, axis=1, kind="stable"), axis=1)
    return table[:, : int((table >= 0).sum(axis=1).max(initial=0))]


def sliced(population: Population, slices: Sequence[str]) -> dict[str, npt.NDArray[np.bool_]]:
    """Groups of users by how many interactions they have: 20-30 from 20 to under 30, -20 under 20, 50- from 50 on.

    The upper end is left out, so that neighbours share nobody: so PFedRec's authors count (their table 9).

    >>> two = Population("toy", np.array([0, 2, 5]), np.array([0, 1, 1, 1, 0], dtype=np.int32), n_items=2)
    >>> sliced(two, ["-3", "2-9"])
    {'-3': array([ True, False]), '2-9': array([ True,  True])}
    """
    groups = {}
    for text in slices:
        match = re.fullmatch(r"(\d*)-(\d*)", str(text))
        if not match or not any(match.groups()):
            raise HomebodyError(f"A slice of users is a range of interactions such as 20-30, -20 or 50-, not '{text}'.")
        low, high = (int(end or default) for end, default in zip(match.groups(), (0, 2**62), strict=True))
        inside = (population.lengths >= low) & (population.lengths < high)
        if not inside.any():
            raise HomebodyError(f"No user of {population.name} has {text} interactions.")
        groups[text] = inside
    return groups


def measure(split: Split, score: Score, cutoffs: Sequence[int] = CUTOFFS, slices: Sequence[str] = ()) -> Evaluated:
    """What scores for (users, items) are worth on everything that a split asks, block by block.

    Where interactions have circumstances, and the scores may be told them, each held-out one is a question of its own.
    """
    everything, asked = torch.arange(split.n_items), split.asked()
    size = max(1, SCORES_AT_ONCE // split.n_items)
    groups = sliced(split.population, slices)
    if split.shown is not None:
        return summarise(sound(_shown(split, score, asked, size)), cutoffs, groups, lists=True)
    if isinstance(score, ScoreNow) and split.encoded["contexts"].columns:
        most = max(1, int(max(split.sizes(held).max(initial=0) for held in HELD)))
        size = max(1, size // most)
        return summarise(sound(_in_context(split, score, asked, size)), cutoffs, groups, lists=True)
    blocks = (
        Block(users, score(users, everything), questions(split, users))
        for users in (asked[start : start + size] for start in range(0, len(asked), size))
    )
    return summarise(sound(blocks), cutoffs, groups, lists=True)


def measure_beside_chance(
    split: Split, score: Score, cutoffs: Sequence[int] = CUTOFFS, slices: Sequence[str] = (), one_by_one: bool = False
) -> Measured:
    """What scores are worth on the test part, and what chance gets on the same questions.

    one_by_one: as in `questions`.
    """
    everything, asked = torch.arange(split.n_items), split.asked()
    size = max(1, SCORES_AT_ONCE // split.n_items)
    if split.shown is not None:
        blocks = _shown(split, score, asked, size, ("test",))
    else:
        blocks = (
            Block(users, score(users, everything), questions(split, users, one_by_one=one_by_one, parts=("test",)))
            for users in (asked[start : start + size] for start in range(0, len(asked), size))
        )
    return beside_chance(blocks, cutoffs, sliced(split.population, slices))


def _shown(split: Split, score: Score, asked: Users, size: int, held_out: Sequence[Held] = HELD) -> Iterator[Block]:
    """Blocks of impressions: only items that were shown to somebody of a block are scored."""
    for users in (asked[start : start + size] for start in range(0, len(asked), size)):
        about = questions(split, users, parts=held_out)
        if not about:
            continue
        parts = [part for question in about.values() for part in (question.relevant, question.candidates)]
        items = torch.from_numpy(np.unique(np.concatenate([part[part >= 0].numpy() for part in parts])))
        column = torch.full((split.n_items + 1,), -1)  # the last entry is for padding, -1
        column[items] = torch.arange(len(items))
        named = {
            held: question._replace(relevant=column[question.relevant], candidates=column[question.candidates])
            for held, question in about.items()
        }
        yield Block(users, score(users, items), named, impressions=True)


def _in_context(split: Split, score: ScoreNow, asked: Users, size: int) -> Iterator[Block]:
    """Blocks of questions, each asked in its own circumstances."""
    everything = torch.arange(split.n_items)
    columns = split.encoded["contexts"].columns
    for users in (asked[start : start + size] for start in range(0, len(asked), size)):
        about = questions(split, users, one_by_one=True)
        owner = torch.cat([question.owner for question in about.values()])
        rows = torch.cat([question.rows for question in about.values() if question.rows is not None]).numpy()
        now = {name: torch.from_numpy(column.values[rows]) for name, column in columns.items()}
        counts = [len(question.owner) for question in about.values()]
        for (name, question), scores in zip(
            about.items(), torch.split(score.now(users, owner, now, everything), counts), strict=True
        ):
            order = torch.arange(len(question.owner))
            yield Block(users[question.owner.numpy()], scores, {name: question.taken(order, order)})


def describe(
    protocol: str, how: str = "latest", negatives: int = 99, way: str = "leave-one-out", enough: bool = True
) -> str:
    """One line to stand beside every number. enough: whether everyone has so many items to be ranked against.

    >>> print(describe("strict"))
    protocol strict: training negatives are any items outside the person's training items; split leave-one-out (one
    interaction of each user for validation, one for test), latest held out; ranked against 99 sampled negatives
    (full/: the whole catalogue); round chosen on validation
    """
    name = way.partition(":")[0]
    count = negatives if enough else f"at most {negatives}"
    if name.startswith("impressions"):
        against = "ranked among what was shown"
    elif name in ("cold-items", "cold-both"):
        against = f"ranked against {count} sampled new items (full/: all new ones)"
    else:
        against = (
            f"{TIES.get(how, how)} held out; ranked against {count} sampled negatives (full/: the whole catalogue)"
        )
    return f"protocol {protocol}: {PROTOCOLS[protocol]}; split {way} ({WAYS[name].title}), {against}; " + (
        "the last round" if settings_of(way).get("valid") == 0 else "round chosen on validation"
    )
