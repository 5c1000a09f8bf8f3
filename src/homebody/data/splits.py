"""What a model may learn from, and what it is asked afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from homebody.core import Catalogue, Column
from homebody.data import split_kernels as kernels
from homebody.data.encode import Encoded, EncodedColumn, encode
from homebody.data.population import Impressions, Population, UserItems, entries, pointers
from homebody.errors import HomebodyError, several
from homebody.markup import html
from homebody.reference import Histories, LearntImpressions
from homebody.rng import Rng

__all__ = ["PROTOCOLS", "Held", "How", "Padded", "PaddedShown", "Protocol", "ShownPart", "Split"]

Protocol = Literal["strict", "isolated", "published"]
How = Literal["latest", "latest-first", "latest-random", "random"]
"""Which are held out. Of a tie in time the last in the file is the latest; with latest-first, the first; with
latest-random, one that the seed draws."""
Held = Literal["valid", "test"]
Part = Literal["train", "valid", "test", "withheld"]
ShownPart = Literal["train", "valid", "test"]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Rows = Ints | Longs

PROTOCOLS: dict[str, str] = {
    "strict": "training negatives are any items outside the person's training items",
    "isolated": "diagnostic: training negatives avoid the held-out items and those they are ranked against",
    "published": "as in the papers: training negatives avoid the held-out items, which flatters every score",
}
PARTS: dict[Part, int] = {"train": 0, "valid": 1, "test": 2, "withheld": 3}
"""A user's interactions stand in this order; what is withheld is neither learnt from nor asked."""
NOTHING = np.empty(0, dtype=np.int32)
SORTED_AT_ONCE = 1 << 14
"""Users whose items are sorted together: sorting takes several times the memory of the items."""


class Padded(NamedTuple):
    """Some users' training data, one row a user."""

    items: Longs
    valid: Bools
    excluded: Longs


class PaddedShown(NamedTuple):
    """The impressions that some users learn from, in the form of `homebody.core.Shown`, one row a user."""

    items: Longs
    """(U, I, C)"""
    clicked: Bools
    """(U, I, C)"""
    before: Longs
    """(U, I)"""


@dataclass(frozen=True, eq=False)
class Split:
    """Each user's interactions in parts: training, validation, test, and what is withheld from all three.

    >>> from homebody.data.partitions import leave_one_out
    >>> toy = Population("toy", np.array([0, 4]), np.array([3, 0, 2, 1], dtype=np.int32), n_items=6)
    >>> split = leave_one_out(toy, how="latest")
    >>> split.part(0, "train").tolist(), split.part(0, "valid").tolist(), split.part(0, "test").tolist()
    ([3, 0], [2], [1])
    >>> split.padded(np.array([0])).excluded.tolist()
    [[0, 3]]
    >>> split
    <Split of toy by leave-one-out, strict: 1 person learns from 2 interactions; asked of 1 in validation, 1 in test>
    """

    population: Population
    way: str
    """How it was made, as `homebody.data.partitions.split` takes it."""
    protocol: Protocol
    how: How
    seed: int
    negatives: int
    """How many items the held-out ones are ranked against in the sampled metrics."""
    rows: Rows
    """Numbers of the population's interactions: user by user, part by part."""
    bounds: Longs
    """(5, users): part p of user u is rows[bounds[p, u]:bounds[p + 1, u]]."""
    learn: Bools
    """Who takes part in training; the others are known by what they have, if anything, when they are asked."""
    absent: Ints = field(default_factory=lambda: NOTHING)
    """Items that do not exist in training, ascending; they are never drawn as negatives."""
    unasked: Mapping[Held, Ints] | None = None
    """Items that a part does not rank, ascending, if it ranks only some: new items are ranked among new items,
    because training never lowers the score of an item it never met."""
    shown: Mapping[ShownPart, Longs] | None = None
    """Numbers of the impressions to evaluate, if impressions are evaluated instead of held-out items; under `train`,
    of those that may be learnt from, ascending."""
    before: Longs | None = None
    """How many of its user's interactions here came before each impression: it is asked with these alone. They may go
    on after the training part, with what is withheld. None: with the training part."""
    public: Bools = field(default_factory=lambda: np.zeros(1, dtype=np.bool_))
    """Users whose data is public: they neither train with others nor are evaluated. One flag for all, or one each."""
    numbers: Longs | None = None
    """Each user's number for drawing randomness, if it is not the position: on a device, the server's number."""
    notes: tuple[str, ...] = ()
    coded: Mapping[str, Encoded] | None = None
    """Features that are encoded already, in the form of `encoded`: of a user who was not in training."""
    _avoid: tuple[Longs, Ints] | None = field(default=None, repr=False)
    """The items that training negatives avoid, if they are more than the history: compressed sorted rows."""

    def __repr__(self) -> str:
        people, learnt = several(len(self.members()), "person", "people"), several(self._learnt, "interaction")
        verb = "learns" if people.startswith("1 ") else "learn"
        asked = ", ".join(f"{count:,} in {name}" for name, count in self._asked.items())
        name, what = self.population.name, "impressions shown" if self.shown is not None else "asked of"
        return f"<Split of {name} by {self.way}, {self.protocol}: {people} {verb} from {learnt}; {what} {asked}>"

    def _repr_html_(self) -> str:
        kind = "people are asked" if self.shown is None else "impressions are asked"
        rows = [("training", f"{len(self.members()):,} people learn from {self._learnt:,} interactions")]
        rows += [(name, f"{count:,} {kind}") for name, count in self._asked.items()]
        title = f"{self.population.name}, split by {self.way}"
        return html(title, ("part", ""), rows, (f"{self.protocol}: {PROTOCOLS[self.protocol]}", *self.notes))

    @property
    def _learnt(self) -> int:
        return int(self.lengths[self.learn].sum())

    @property
    def _asked(self) -> dict[str, int]:
        """Of how many people something is asked, or how many impressions are, by part."""
        parts: dict[str, Held] = {"validation": "valid", "test": "test"}
        if self.shown is not None:
            return {name: len(self.shown[part]) for name, part in parts.items()}
        return {name: int((self.sizes(part) > 0).sum()) for name, part in parts.items()}

    @cached_property
    def items(self) -> Ints:
        return self.population.items[self.rows]

    @cached_property
    def ordered(self) -> Ints:
        """The items, ascending within every part."""
        out = np.empty_like(self.items)
        for first in range(0, self.n_users, SORTED_AT_ONCE):
            bounds = self.bounds[:, first : first + SORTED_AT_ONCE]
            rows = slice(bounds[0, 0], bounds[-1, -1])
            sizes = np.diff(bounds, axis=0).T.ravel()  # of each user's parts, one after another
            offset = np.repeat(np.arange(len(sizes)) * self.n_items, sizes)
            out[rows] = np.sort(offset + self.items[rows]) - offset
        return out

    @property
    def n_users(self) -> int:
        return self.bounds.shape[1]

    @property
    def n_items(self) -> int:
        return self.population.n_items

    @property
    def lengths(self) -> Longs:
        """How many training items each user has; those who only come later have what they bring along."""
        return self.bounds[1] - self.bounds[0]

    def part(self, user: int, part: Part) -> Ints:
        """One user's items of one part; training items oldest first."""
        number = PARTS[part]
        return self.items[self.bounds[number, user] : self.bounds[number + 1, user]]

    def training(self, user: int) -> Ints:
        return self.part(user, "train")

    def sizes(self, part: Part) -> Longs:
        """How many interactions each user has in this part."""
        return self.bounds[PARTS[part] + 1] - self.bounds[PARTS[part]]

    def published(self, share: float) -> Split:
        """The same with the data of some of those who train made public, drawn by the seed: so many of all people."""
        if not 0 <= share < 1:
            raise HomebodyError(f"The share of public people must be at least 0 and under 1, not {share:g}.")
        if not share:
            return self
        some = np.flatnonzero(self.learn & (self.lengths > 0))
        keys = Rng.of(self.seed, "public").fold(torch.from_numpy(some)).key.numpy()
        chosen = some[np.argsort(keys, kind="stable")[: round(share * self.n_users)]]
        if not 0 < len(chosen) < len(some):
            raise HomebodyError(
                f"A share of {share:g} makes {len(chosen)} of {len(some):,} people public: "
                "choose one that makes some of them public, not all."
            )
        public = np.zeros(self.n_users, dtype=np.bool_)
        public[chosen] = True
        bounds = self.bounds.copy()
        bounds[2:4, public] = bounds[1, public]  # what was held out of theirs is withheld
        shown = self.shown
        if shown is not None:
            owner = self._impressions.users
            shown = {
                part: numbers if part == "train" else numbers[~public[owner[numbers]]]
                for part, numbers in shown.items()
            }
        note = f"{len(chosen):,} of {self.n_users:,} people's data is public: they train apart, and are not asked."
        return replace(
            self, bounds=bounds, learn=self.learn & ~public, shown=shown, public=public, notes=(*self.notes, note)
        )

    def histories(self) -> Histories:
        """Everyone's training items in one place: what a centralised reference collects."""
        position = np.arange(len(self.items)) - np.repeat(self.bounds[0], self.bounds[4] - self.bounds[0])
        kept = position < np.repeat(self.lengths, self.bounds[4] - self.bounds[0])
        return Histories(
            pointers(self.lengths),
            self.items[kept],
            self.catalogue(),
            self.learn,
            self._avoided(),
            {name: column.values for name, column in self.encoded["users"].columns.items()},
            {name: column.values[self.rows[kept]] for name, column in self.encoded["contexts"].columns.items()},
            self._impressions_learnt(),
        )

    def _impressions_learnt(self) -> LearntImpressions | None:
        """The impressions that a centralised reference may learn from."""
        if self._learnt_shown is None:
            return None
        numbers = self._learnt_shown[self.learn[self._impressions.users[self._learnt_shown]]]
        some = self._impressions.taken(numbers)
        return LearntImpressions(some.users, some.indptr, some.items, some.clicked, self.known_at(numbers))

    @property
    def _impressions(self) -> Impressions:
        assert self.population.impressions is not None
        return self.population.impressions

    @property
    def _learnt_shown(self) -> Longs | None:
        return None if self.shown is None else self.shown.get("train")

    def members(self, needs: Sequence[str] = ()) -> Longs:
        """Who trains a method with these needs: everyone with a training item, and with an impression to learn from
        if the method needs impressions."""
        return np.flatnonzero(self.learn & self._able(needs))

    def public_members(self, needs: Sequence[str] = ()) -> Longs:
        """The same of the people whose data is public."""
        return np.flatnonzero(self.public & self._able(needs))

    def _able(self, needs: Sequence[str]) -> Bools:
        able = self.lengths > 0
        if "impressions" in needs and self._learnt_shown is not None:
            if self.before is None:
                raise HomebodyError(
                    "Nothing says which clicks came before an impression, so its own click might be among those that "
                    "a model reads: give the interactions and the impressions times."
                )
            able &= np.bincount(self._impressions.users[self._learnt_shown], minlength=self.n_users) > 0
        return able

    @cached_property
    def most_shown(self) -> tuple[int, int]:
        """The most impressions that anybody learns from, and the most items of one of these: each at least 1."""
        shown, numbers = self.population.impressions, self._learnt_shown
        if shown is None or numbers is None:
            return 1, 1
        counts, widths = np.bincount(shown.users[numbers]), np.diff(shown.indptr)[numbers]
        return max(1, int(counts.max(initial=0))), max(1, int(widths.max(initial=0)))

    def padded_shown(self, users: Longs) -> PaddedShown:
        """The impressions that these users learn from, padded to a common number and width of at least 1.

        The catalogue's size pads items; what pads has no click, and nothing before it.
        """
        shown, numbers = self.population.impressions, self._learnt_shown
        if shown is None or numbers is None:
            empty = np.full((len(users), 1, 1), self.n_items, dtype=np.int64)
            return PaddedShown(empty, np.zeros(empty.shape, dtype=np.bool_), np.zeros((len(users), 1), dtype=np.int64))
        owner = shown.users[numbers]  # ascending, as the impressions are
        first, last = (np.searchsorted(owner, users, side=side) for side in ("left", "right"))
        count = last - first
        row = np.repeat(np.arange(len(users)), count)
        place = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        which = numbers[first[row] + place]
        width = np.diff(shown.indptr)[which]
        entry = entries(shown.indptr[which], width)
        size = len(users), max(1, int(count.max(initial=0))), max(1, int(width.max(initial=0)))
        items = np.full(size, self.n_items, dtype=np.int64)
        clicked = np.zeros(size, dtype=np.bool_)
        before = np.zeros(size[:2], dtype=np.int64)
        column = entry - np.repeat(shown.indptr[which], width)
        at = np.repeat(row, width), np.repeat(place, width), column
        items[at], clicked[at] = shown.items[entry], shown.clicked[entry]
        before[row, place] = self.known_at(which)
        return PaddedShown(items, clicked, before)

    @cached_property
    def encoded(self) -> dict[str, Encoded]:
        """Features as numbers, of `users`, `items` and `contexts`, by what those that training knows have."""
        if self.coded is not None:
            return dict(self.coded)
        known = np.ones(self.n_items, dtype=np.bool_)
        known[self.absent] = False
        people, items, contexts = (
            getattr(self.population, name) for name in ("user_features", "item_features", "contexts")
        )
        rng, nothing = Rng.of(self.seed), Encoded({}, ())
        around = nothing
        if contexts is not None:
            learnt = np.zeros(self.population.n_interactions, dtype=np.bool_)
            learnt[self.interactions("train")] = True
            owners = np.repeat(np.arange(self.n_users), self.population.lengths)
            around = encode(contexts, learnt, unit="interactions", owners=owners, rng=rng)
        return {
            "users": nothing if people is None else encode(people, self.learn, unit="users", rng=rng),
            "items": nothing if items is None else encode(items, known, unit="items"),
            "contexts": around,
        }

    def interactions(self, part: Part) -> Rows:
        """Numbers of the interactions in one part, of everyone; of training, what is learnt from alone."""
        whose = np.repeat(np.arange(self.n_users), self.bounds[4] - self.bounds[0])
        number, place = PARTS[part], np.arange(len(self.rows))
        inside = (place >= self.bounds[number][whose]) & (place < self.bounds[number + 1][whose])
        return self.rows[inside & self.learn[whose]] if part == "train" else self.rows[inside]

    def catalogue(self, device: torch.device | str = "cpu") -> Catalogue:
        """What everyone knows; of the users, which features they have."""
        items = {
            name: self._item_column(name, column, device) for name, column in self.encoded["items"].columns.items()
        }
        people, contexts = (
            {name: _column(column, device, rows=0) for name, column in self.encoded[unit].columns.items()}
            for unit in ("users", "contexts")
        )
        return Catalogue(self.n_items, items, people, contexts)

    def _item_column(self, name: str, column: EncodedColumn, device: torch.device | str) -> Column:
        if column.kind != "sequence":
            return _column(column, device)
        features = self.population.item_features
        texts = () if features is None else tuple(features.table[name].cast(pl.String).fill_null(""))
        return _column(column, device)._replace(words=self.encoded["items"].codes[name].values, texts=texts)

    def numbered(self, users: Longs) -> Longs:
        """The numbers that these users draw their random numbers by."""
        return users if self.numbers is None else self.numbers[users]

    def asked(self) -> Longs:
        """The users that are asked anything, in validation or test."""
        if self.shown is not None:
            return np.unique(self._impressions.users[self.asked_impressions])
        return np.flatnonzero(self.sizes("valid") + self.sizes("test") > 0)

    @property
    def asked_impressions(self) -> Longs:
        """The numbers of the impressions that are asked, those of validation first."""
        assert self.shown is not None
        return np.concatenate([self.shown["valid"], self.shown["test"]])

    def known_at(self, impressions: Longs) -> Longs:
        """How many interactions of its user each of these impressions is asked with."""
        return self.lengths[self._impressions.users[impressions]] if self.before is None else self.before[impressions]

    def padded(
        self, users: Longs, width: int | None = None, *, avoided: bool = True, known: Longs | None = None
    ) -> Padded:
        """These users' training items and what their negatives avoid, padded to a common width.

        avoided: whether anybody will ask for the latter; otherwise it is left empty.
        known: how many of each user's first interactions to give instead of the training part.
        """
        known = self.lengths[users] if known is None else known
        items, valid = _padded(self.items, self.bounds[0][users], known, width)
        if not avoided:
            return Padded(items, valid, np.empty((len(users), 0), dtype=np.int64))
        if self._avoid is not None:
            return Padded(items, valid, self._listed(users, self._avoid))
        parts: Sequence[Part] = ("train",) if self.protocol == "strict" else tuple(PARTS)
        return Padded(items, valid, self._and_elsewhere(users, self._merged(users, parts, also=self.absent)))

    def padded_rows(
        self, users: Longs, width: int | None = None, part: Part = "train", *, known: Longs | None = None
    ) -> Longs:
        """Where these users' interactions of one part stand in the population, padded to a common width with -1.

        known: how many of each user's first interactions of the part and those after it to give, instead of the part.
        """
        known = self.sizes(part)[users] if known is None else known
        rows, valid = _padded(self.rows, self.bounds[PARTS[part]][users], known, width)
        rows[~valid] = -1
        return rows

    @cached_property
    def repeats(self) -> bool:
        """Whether an item may be held out more than once of the same user: then each time is asked by itself."""
        whole = self.population
        return self.protocol == "published" and not kernels.first_only(whole.indptr, whole.items, whole.n_items).all()

    def relevant(self, users: Longs, held: Held) -> Longs:
        """These users' held-out items; -1 pads. A repeated one stands once."""
        out = self._merged(users, (held,))
        out[out == self.n_items] = -1
        return out

    def seen(self, users: Longs, held: Held) -> Longs:
        """What these users' full ranking leaves out; padded with the size of the catalogue.

        For test, everything of theirs that is not asked; for validation, also not what test will ask. Where only new
        items are asked about, all others. What they have elsewhere is always left out.
        """
        if self.unasked:
            seen = self._merged(users, (), also=self.unasked[held])
        elif held == "test":
            seen = self._merged(users, ("train", "valid", "withheld"), but=("test",))
        else:
            seen = self._merged(users, ("train", "withheld"), but=("valid", "test"))
        return self._and_elsewhere(users, seen)

    def candidates(self, users: Longs, held: Held) -> Longs:
        """The items each user's held-out ones are ranked against in the sampled metrics; -1 where too few.

        Never an item of the user's own; only the strict protocol lets validation meet the test items, as a
        device that does not know the future would.
        """
        if self.unasked:
            excluded = self._merged(users, (held,), also=self.unasked[held])
        else:
            future: Sequence[Part] = ("test",) if held == "valid" and self.protocol == "strict" else ()
            excluded = self._merged(users, [part for part in PARTS if part not in future], but=future)
        keys = Rng.of(self.seed, "candidates", held).fold(torch.from_numpy(self.numbered(users))).key.numpy()
        out = np.empty((len(users), self.negatives), dtype=np.int64)
        kernels.candidates(keys, self._and_elsewhere(users, excluded), self.n_items, out)
        return out

    @property
    def enough(self) -> bool:
        """Whether everyone has as many items to be ranked against as the sampled metrics take."""
        fresh = self.n_items if self.unasked is None else self.n_items - max(map(len, self.unasked.values()))
        lengths = self.bounds[4] - self.bounds[0]
        if (elsewhere := self.population.elsewhere) is not None:
            lengths = lengths + np.diff(elsewhere.indptr)
        return bool(fresh - int(lengths.max(initial=0)) >= self.negatives)

    def _merged(self, users: Longs, parts: Sequence[Part], but: Sequence[Part] = (), also: Ints = NOTHING) -> Longs:
        """The users' distinct items of these parts and the others given, ascending; the catalogue's size pads."""
        take, leave = (np.array([name in some for name in PARTS]) for some in (parts, but))
        width = int(sum((self.sizes(part)[users] for part in parts), start=np.zeros_like(users)).max(initial=0))
        out = np.full((len(users), width + len(also)), self.n_items, dtype=np.int32)
        starts = np.arange(len(users) + 1) * out.shape[1]
        kernels.merge(
            users, self.bounds, self.ordered, take, leave, also, starts, out.reshape(-1), np.empty_like(users)
        )
        return out.astype(np.int64)

    def _and_elsewhere(self, users: Longs, items: Longs) -> Longs:
        """Rows of distinct items, ascending and padded with the catalogue's size, and what the users have elsewhere."""
        if self.population.elsewhere is None:
            return items
        both = np.sort(np.concatenate([items, self._listed(users, self.population.elsewhere)], axis=1), axis=1)
        again = both[:, 1:] == both[:, :-1]
        both[:, 1:][again] = self.n_items
        return np.sort(both, axis=1)

    def _listed(self, users: Longs, table: tuple[Longs, Ints]) -> Longs:
        indptr, items = table
        out = np.empty((len(users), int(np.diff(indptr)[users].max(initial=0))), dtype=np.int64)
        kernels.pad_rows(users, indptr, items, self.n_items, out)
        return out

    def _avoided(self) -> tuple[Longs, Ints]:
        """What training negatives avoid, as compressed sorted rows."""
        if self._avoid is not None:
            return self._avoid
        users = np.arange(self.n_users)
        take = np.array([part == "train" or self.protocol != "strict" for part in PARTS])
        given = users, self.bounds, self.ordered, take, np.zeros_like(take), self.absent
        counts = np.zeros_like(users)
        kernels.merge(*given, counts, NOTHING, counts)
        indptr = pointers(counts)
        items = np.empty(indptr[-1], dtype=np.int32)
        if len(items):
            kernels.merge(*given, indptr, items, counts)
        if (elsewhere := self.population.elsewhere) is None:
            return indptr, items
        owner = np.concatenate([np.repeat(users, np.diff(indptr)), elsewhere.owners])
        return UserItems.of(owner, np.concatenate([items, elsewhere.items]), self.n_users)


def _padded(values: Rows, start: Longs, counts: Longs, width: int | None) -> tuple[Longs, Bools]:
    """So many values from each start on, a row each, padded to this width or the longest; and which are no padding."""
    width = int(counts.max(initial=0)) if width is None else width
    out, valid = np.empty((len(start), width), dtype=np.int64), np.empty((len(start), width), dtype=np.bool_)
    kernels.pad_items(np.arange(len(start)), start, start + counts, values, out, valid)
    return out, valid


def _column(column: EncodedColumn, device: torch.device | str, rows: int | None = None) -> Column:
    return Column(torch.from_numpy(column.values[:rows]).to(device), *column[1:])


def isolated(split: Split) -> tuple[Longs, Ints]:
    """Each user's history and everything a held-out item of theirs is ranked against, as compressed sorted rows."""
    users = np.arange(split.n_users)
    owners, items = [np.repeat(users, split.bounds[4] - split.bounds[0])], [split.items.astype(np.int64)]
    for held in ("valid", "test"):
        some = np.flatnonzero(split.sizes(held) > 0)
        drawn = split.candidates(some, held)
        owners.append(np.repeat(some, drawn.shape[1]))
        items.append(drawn.ravel())
    owners.append(np.repeat(users, len(split.absent)))
    items.append(np.tile(split.absent.astype(np.int64), split.n_users))
    if (elsewhere := split.population.elsewhere) is not None:
        owners.append(elsewhere.owners)
        items.append(elsewhere.items.astype(np.int64))
    owner, item = np.concatenate(owners), np.concatenate(items)
    return UserItems.of(owner[item >= 0], item[item >= 0], split.n_users)
