"""A population: everyone's interactions as flat arrays, and what is known of users, items and interactions besides."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.errors import HomebodyError, refuse_unknown, several
from homebody.markup import html

if TYPE_CHECKING:
    from homebody.data.vocabularies import Declaration

__all__ = [
    "KINDS",
    "Features",
    "Impressions",
    "Kind",
    "Numbered",
    "Population",
    "UserItems",
    "build",
    "entries",
    "pointers",
    "whole_times",
]

Kind = Literal["categorical", "multi-hot", "numeric", "text", "sequence"]
KINDS: tuple[Kind, ...] = get_args(Kind)
NEEDS = ("ratings", "times", "user features", "item features", "impressions")
"""What a method may say it needs of the data."""
AT_ONCE = 1 << 20
"""Rows of which copies are made at once."""
MATCHED = 20_000
"""Names of items that a wrong one is compared with at most."""
Clock = npt.NDArray[np.int64] | npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Features:
    """A table, one row for each user, item or interaction, and the kind of every column.

    Categorical columns hold texts or whole numbers, multi-hot ones lists of texts, numeric ones numbers, text ones
    texts, of which the character 3-grams are taken, and sequences texts, of which the words are taken in their order.
    Null means that nothing is known.

    >>> ages = Features(pl.DataFrame({"age": [25, None]}), {"age": "numeric"})
    >>> len(ages), ages.names
    (2, ['age'])
    """

    table: pl.DataFrame
    kinds: Mapping[str, Kind]
    declared: Mapping[str, Declaration] = field(default_factory=dict)
    """Where a column's vocabulary or scale comes from; an unlisted column takes it from the training users."""
    views: Mapping[str, str] = field(default_factory=dict)
    """The view of each column that is in one: which app of a person's holds it."""

    def __post_init__(self) -> None:
        if list(self.kinds) != self.table.columns:
            raise HomebodyError(
                f"The features {', '.join(self.table.columns)} need a kind each, not {', '.join(self.kinds)}."
            )
        refuse_unknown("kind of feature", self.kinds.values(), KINDS)
        refuse_unknown("feature that could be in a view", self.views, self.kinds)

    def __len__(self) -> int:
        return self.table.height

    def __repr__(self) -> str:
        return (
            f"<Features: {several(len(self), 'row')}; {', '.join(f'{name} ({k})' for name, k in self.kinds.items())}>"
        )

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    @property
    def names(self) -> list[str]:
        return self.table.columns

    def only(self, names: Collection[str]) -> Features:
        """These columns, in the order of the table."""
        kept = [name for name in self.names if name in names]
        return Features(
            self.table.select(kept),
            {name: self.kinds[name] for name in kept},
            {name: self.declared[name] for name in kept if name in self.declared},
            {name: self.views[name] for name in kept if name in self.views},
        )

    def beside(self, others: Features) -> Features:
        """These columns, then others about the same rows."""
        return Features(
            self.table.hstack(others.table),
            {**self.kinds, **others.kinds},
            {**self.declared, **others.declared},
            {**self.views, **others.views},
        )

    def rows(self, numbers: npt.NDArray[np.integer[Any]]) -> Features:
        """These rows, in this order."""
        return replace(self, table=self.table[numbers])


def pointers(sizes: npt.NDArray[np.integer[Any] | np.bool_]) -> npt.NDArray[np.int64]:
    """Where parts of these sizes begin in a flat array, one after another, and where the last one ends.

    >>> pointers(np.array([2, 0, 1])).tolist()
    [0, 2, 2, 3]
    """
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def entries(starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The places in a flat array of parts that begin at these and have these sizes, one after another.

    >>> entries(np.array([7, 2]), np.array([2, 3])).tolist()
    [7, 8, 2, 3, 4]
    """
    return np.arange(int(sizes.sum())) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)


class UserItems(NamedTuple):
    """Users' items in compressed rows: user u's are `items[indptr[u]:indptr[u + 1]]`, ascending and distinct."""

    indptr: npt.NDArray[np.int64]
    items: npt.NDArray[np.int32]

    @classmethod
    def of(cls, users: npt.NDArray[np.integer[Any]], items: npt.NDArray[np.integer[Any]], n_users: int) -> UserItems:
        """From pairs of a user and an item, in any order; a pair may stand several times.

        >>> UserItems.of(np.array([1, 0, 1]), np.array([7, 3, 7]), n_users=3).indptr.tolist()
        [0, 1, 2, 2]
        """
        most = int(items.max(initial=0)) + 1
        owner, item = np.divmod(np.unique(users.astype(np.int64) * most + items), most)
        return cls(pointers(np.bincount(owner, minlength=n_users)), item.astype(np.int32))

    @property
    def owners(self) -> npt.NDArray[np.int64]:
        """The user of each entry of `items`."""
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))


@dataclass(frozen=True, eq=False)
class Impressions:
    """What users were shown and what they clicked: impression n showed `items[indptr[n]:indptr[n + 1]]`.

    They stand beside the histories. Which of them are asked of a model, and which are learnt from, is for the split.
    """

    users: npt.NDArray[np.int64]
    """The user of each impression, ascending; one user's impressions are in time order if times are known."""
    indptr: npt.NDArray[np.int64]
    items: npt.NDArray[np.int32]
    clicked: npt.NDArray[np.bool_]
    times: npt.NDArray[np.int64] | None = None
    """When each impression was shown, in the source's unit."""
    before: npt.NDArray[np.int64] | None = None
    """How many of the user's interactions came before each impression, if the source says so."""
    asked: npt.NDArray[np.bool_] | None = None
    """Which of them a model may be asked about; the others are for learning alone. None: all."""

    def __repr__(self) -> str:
        count, shown = several(len(self.users), "impression"), several(len(self.items), "item")
        return f"<Impressions: {count} of {several(len(np.unique(self.users)), 'user')}, {shown} shown>"

    @property
    def owners(self) -> npt.NDArray[np.int64]:
        """The impression of each entry of `items`."""
        return np.repeat(np.arange(len(self.users)), np.diff(self.indptr))

    def taken(self, chosen: npt.NDArray[np.integer[Any]]) -> Impressions:
        """These impressions, in this order.

        >>> two = Impressions(np.array([0, 3]), np.array([0, 2, 4]), np.array([7, 8, 8, 9], dtype=np.int32),
        ...     np.array([True, False, False, True]), times=np.array([5, 6]))
        >>> later = two.taken(np.array([1]))
        >>> later.items.tolist(), later.indptr.tolist(), later.times.tolist()
        ([8, 9], [0, 2], [6])
        """
        lengths = np.diff(self.indptr)[chosen]
        which = entries(self.indptr[chosen], lengths)
        return Impressions(
            self.users[chosen],
            pointers(lengths),
            self.items[which],
            self.clicked[which],
            None if self.times is None else self.times[chosen],
            None if self.before is None else self.before[chosen],
            None if self.asked is None else self.asked[chosen],
        )


@dataclass(frozen=True, eq=False)
class Population:
    """Users' interactions in compressed rows: user u's are `items[indptr[u]:indptr[u + 1]]`.

    Within a user, interactions stand in time order, ties in file order; without times, in file order.
    An item may stand twice in a history: that is for the split to settle, not for the loader.

    >>> import numpy as np
    >>> two = Population("toy", np.array([0, 2, 3]), np.array([4, 1, 4], dtype=np.int32), n_items=5)
    >>> two.n_users, two.n_interactions, two.history(0).tolist()
    (2, 3, [4, 1])
    >>> two.lengths.tolist(), two.popularity.tolist()
    ([2, 1], [0, 1, 0, 0, 2])
    >>> two
    <Population toy: 2 users, 5 items, 3 interactions>
    >>> Population("toy", np.array([0, 2]), np.array([4, 1], dtype=np.int32), n_items=4)
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: The population 'toy' has 4 items, so they are numbered 0 to 3, not 1 to 4.
    """

    name: str
    indptr: npt.NDArray[np.int64]
    items: npt.NDArray[np.int32]
    n_items: int
    times: npt.NDArray[np.int64] | None = None
    """When each interaction happened, in the source's unit (dates: seconds since 1970)."""
    ratings: npt.NDArray[np.float32] | None = None
    user_ids: pl.Series | None = None
    """The source's id of user u, in row u; None if users are only numbered."""
    item_ids: pl.Series | None = None
    item_names: pl.Series | None = None
    """A name for display (a title), in row i."""
    user_features: Features | None = None
    """Row u describes user u."""
    item_features: Features | None = None
    contexts: Features | None = None
    """Row r describes the circumstances of interaction r."""
    impressions: Impressions | None = None
    notes: tuple[str, ...] = ()
    """What was guessed, missing or left out when it was put together, in sentences."""
    elsewhere: UserItems | None = None
    """What users have in another app of theirs, from which a view is made: it is in no history, and is neither learnt
    from, asked, drawn as a negative nor ranked."""

    def __post_init__(self) -> None:
        problem = self._row_problem() or self._size_problem() or self._kind_problem()
        if problem:
            raise HomebodyError(f"The population '{self.name}' {problem}.")

    def __repr__(self) -> str:
        counts = [several(number, name) for name, number in self._counts.items()]
        known = [f"{name} ({', '.join(table.names)})" for name, table in self._tables.items()]
        return f"<Population {self.name}: {', '.join([*counts, *self._columns, *known])}>"

    def _repr_html_(self) -> str:
        rows = [(f"{name}s", f"{number:,}") for name, number in self._counts.items()]
        rows += [("with each interaction", ", ".join(self._columns) or "nothing else")]
        rows += [
            (name, ", ".join(f"{column} ({kind})" for column, kind in table.kinds.items()))
            for name, table in self._tables.items()
        ]
        return html(self.name, ("population", ""), rows, self.notes)

    @property
    def _counts(self) -> dict[str, int]:
        shown = {} if self.impressions is None else {"impression": len(self.impressions.users)}
        return {"user": self.n_users, "item": self.n_items, "interaction": self.n_interactions, **shown}

    @property
    def _columns(self) -> list[str]:
        return [name for name, column in (("times", self.times), ("ratings", self.ratings)) if column is not None]

    @property
    def _tables(self) -> dict[str, Features]:
        """What is known of users, items and interactions besides."""
        tables = {
            "user features": self.user_features,
            "item features": self.item_features,
            "circumstances": self.contexts,
        }
        return {name: table for name, table in tables.items() if table is not None}

    @property
    def n_users(self) -> int:
        return len(self.indptr) - 1

    @property
    def n_interactions(self) -> int:
        return len(self.items)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """How many interactions each user has."""
        return np.diff(self.indptr)

    @property
    def popularity(self) -> npt.NDArray[np.int64]:
        """How many interactions each item has."""
        return np.bincount(self.items, minlength=self.n_items)

    def history(self, user: int) -> npt.NDArray[np.int32]:
        """One user's items, in their order; an index from the end would be someone else's."""
        number: object = user
        if not isinstance(number, Integral):
            raise HomebodyError(f"A user's number is asked for, as user({str(user)!r}) gives it, not {user!r}.")
        if not 0 <= user < self.n_users:
            raise HomebodyError(f"There is no user {user}: users are numbered 0 to {self.n_users - 1}.")
        return self.items[self.indptr[user] : self.indptr[user + 1]]

    def user(self, name: str) -> int:
        """The number of the user that the source calls by this name."""
        return _number(name, self.user_ids, self.n_users, "user")

    def item(self, name: str) -> int:
        """The number of the item that the source calls by this id, or else of the one that has this name.

        >>> two = Population("toy", np.array([0, 1]), np.array([1], dtype=np.int32), n_items=2, \
item_ids=pl.Series(["a1", "b2"]), item_names=pl.Series(["Emma", "Dracula"]))
        >>> two.item("b2"), two.item("emma")
        (1, 0)
        """
        try:
            return _number(name, self.item_ids, self.n_items, "item")
        except HomebodyError:
            called = self.item_ids if self.item_names is None else self.item_names
            if called is None:
                raise
            lower = called.cast(pl.String).str.to_lowercase()
            matches = (lower == name.strip().lower()).fill_null(False).arg_true().to_list()
            if len(matches) == 1:
                return int(matches[0])
            if matches:
                several = ", ".join(self.item_id(item) for item in matches[:5])
                raise HomebodyError(f"Several items are called '{name}': give an id ({several}).") from None
            near = difflib.get_close_matches(name.strip().lower(), lower.drop_nulls().to_list()[:MATCHED], n=1)
            if not near:
                raise
            likely = int((lower == near[0]).arg_true()[0])
            known = self.item_id(likely) + ("" if self.item_names is None else f", '{self.item_name(likely)}'")
            raise HomebodyError(f"There is no item '{name}' in this population; did you mean {known}?") from None

    def item_id(self, item: int) -> str:
        """What the source calls this item."""
        return str(item) if self.item_ids is None else str(self.item_ids[int(item)])

    def item_name(self, item: int) -> str:
        """A name of this item for people."""
        return self.item_id(item) if self.item_names is None else str(self.item_names[int(item)])

    def before_impressions(self) -> npt.NDArray[np.int64] | None:
        """How many of its user's interactions came before each impression: as the source says, or by the times.

        An interaction at the time of an impression counts as later: it may be the click. None if nothing is known.

        >>> shown = Impressions(np.array([0, 0]), np.array([0, 2, 4]), np.array([0, 1, 0, 1], dtype=np.int32),
        ...     np.array([True, False, True, False]), times=np.array([20, 31]))
        >>> Population("toy", np.array([0, 3]), np.array([0, 1, 0], dtype=np.int32), 2, times=np.array([10, 20, 30]),
        ...     impressions=shown).before_impressions().tolist()
        [1, 3]
        """
        shown = self.impressions
        if shown is None or shown.before is not None:
            return None if shown is None else shown.before
        if self.times is None or shown.times is None:
            return None
        rank = np.unique(np.concatenate([self.times, shown.times]), return_inverse=True)[1]
        own, asked = rank[: len(self.times)], rank[len(self.times) :]
        owner = np.repeat(np.arange(self.n_users), self.lengths)
        # One number orders by user, then time, as the interactions stand.
        place = np.searchsorted(owner * len(rank) + own, shown.users * len(rank) + asked, side="left")
        return place - self.indptr[shown.users]

    def lacks(self, needs: Sequence[str]) -> str | None:
        """The first of these that this population does not have.

        >>> two = Population("toy", np.array([0, 2]), np.array([4, 1], dtype=np.int32), n_items=5)
        >>> two.lacks(["times", "ratings"])
        'times'
        """
        refuse_unknown("kind of data that a method may need", needs, NEEDS)
        return next((need for need in needs if getattr(self, need.replace(" ", "_")) is None), None)

    def _row_problem(self) -> str | None:
        if self.items.dtype != np.int32 or self.indptr.dtype != np.int64:
            return f"needs int32 items and int64 row pointers, not {self.items.dtype} and {self.indptr.dtype}"
        if len(self.indptr) == 0 or self.indptr[0] != 0 or self.indptr[-1] != len(self.items):
            return f"needs row pointers that run from 0 to its {len(self.items)} interactions"
        if np.any(self.indptr[1:] < self.indptr[:-1]):
            return "has row pointers that go backwards"
        if len(self.items) and not 0 <= self.items.min() <= self.items.max() < self.n_items:
            low, high = self.items.min(), self.items.max()
            return f"has {self.n_items} items, so they are numbered 0 to {self.n_items - 1}, not {low} to {high}"
        if self.elsewhere is not None and int(self.elsewhere.items.max(initial=0)) >= self.n_items:
            return f"has {self.n_items} items, and an item elsewhere that is not one of them"
        return None if self.impressions is None else self._impression_problem(self.impressions)

    def _impression_problem(self, shown: Impressions) -> str | None:
        for label, column in (
            ("times", shown.times),
            ("counts of earlier interactions", shown.before),
            ("marks of what is asked", shown.asked),
        ):
            if column is not None and len(column) != len(shown.users):
                return f"has {len(column)} {label} for {len(shown.users)} impressions"
        if shown.before is not None and np.any((shown.before < 0) | (shown.before > self.lengths[shown.users])):
            return "has an impression that came after more interactions than its user has"
        return None

    def _size_problem(self) -> str | None:
        columns = (
            ("times", self.times, self.n_interactions, "interactions"),
            ("ratings", self.ratings, self.n_interactions, "interactions"),
            ("contexts", self.contexts, self.n_interactions, "interactions"),
            ("user ids", self.user_ids, self.n_users, "users"),
            ("user features", self.user_features, self.n_users, "users"),
            ("items elsewhere", self.elsewhere and self.elsewhere.indptr[1:], self.n_users, "users"),
            ("item ids", self.item_ids, self.n_items, "items"),
            ("item names", self.item_names, self.n_items, "items"),
            ("item features", self.item_features, self.n_items, "items"),
        )
        for label, column, expected, unit in columns:
            if column is not None and len(column) != expected:
                return f"has {len(column)} rows of {label} for {expected} {unit}"
        return None

    def _kind_problem(self) -> str | None:
        """Words in their order are read of items alone, whose texts are public."""
        for features in (self.user_features, self.contexts):
            for name, kind in {} if features is None else features.kinds.items():
                if kind == "sequence":
                    return f"has '{name}' as a sequence of words, which only items have: give --kind {name}=text"
        return None


def _number(name: str, ids: pl.Series | None, count: int, kind: str) -> int:
    if ids is None:
        matches = [int(name)] if name.isdecimal() and int(name) < count else []
        known = f"they are numbered 0 to {count - 1}"
    else:
        matches = (ids.cast(pl.String) == name).arg_true().to_list()
        known = f"the first is called {ids[0]}"
    if not matches:
        raise HomebodyError(f"There is no {kind} '{name}' in this population; {known}.")
    return matches[0]


class Numbered(NamedTuple):
    """Ids of rows: the distinct ones, sorted, and for each row the place of its own among them."""

    ids: pl.Series
    rows: npt.NDArray[np.int32]

    @classmethod
    def of(cls, ids: pl.Series) -> Numbered:
        """From one id a row.

        >>> Numbered.of(pl.Series(["b", "a", "b"])).rows.tolist(), Numbered.of(pl.Series([30, -7])).rows.tolist()
        ([1, 0, 1], [1, 0])
        """
        if ids.dtype in (pl.String, pl.Categorical, pl.Enum):
            names, codes = _grouped(ids)
            order = names.arg_sort().to_numpy()
            rank = np.empty(len(order), dtype=np.int32)
            rank[order] = np.arange(len(order), dtype=np.int32)
            return cls(names.gather(order).alias(ids.name), rank[codes])
        if ids.dtype in (pl.Int32, pl.Int64) and len(ids):
            values, low = ids.to_numpy(), cast(int, ids.min())
            span = cast(int, ids.max()) - low + 1
            if span <= 4 * len(values) + 1024:
                there = np.zeros(span, dtype=np.bool_)
                there[values - values.dtype.type(low)] = True
                place = np.cumsum(there, dtype=np.int32) - np.int32(1)
                return cls(pl.Series(ids.name, np.flatnonzero(there) + low), place[values - values.dtype.type(low)])
        distinct = ids.unique().sort()
        known = distinct.cast(pl.Int64) if ids.dtype == pl.Int32 else distinct
        return cls(known, (ids.rank("dense").cast(pl.Int32) - 1).to_numpy())

    def of_rows(self, rows: npt.NDArray[np.int32]) -> Numbered:
        """Where these ids were taken from rows that are numbered: the ids of those rows."""
        return Numbered(self.ids, self.rows[rows])


def _grouped(texts: pl.Series) -> tuple[pl.Series, npt.NDArray[np.int32]]:
    """The distinct texts, and for each row the place of its own among them.

    >>> names, codes = _grouped(pl.Series(["b", "a", "b"]))
    >>> names.gather(codes).to_list()
    ['b', 'a', 'b']
    """
    if texts.dtype == pl.String and len(texts):
        # Rows of one text stand together once their hashes are sorted, which is faster than any table of texts.
        bits = max(1, len(texts) - 1).bit_length()
        packed = texts.hash().to_numpy() >> np.uint64(bits) << np.uint64(bits)
        packed |= np.arange(len(texts), dtype=np.uint64)
        packed.sort()
        order = (packed & np.uint64((1 << bits) - 1)).view(np.int64)
        packed >>= np.uint64(bits)
        first = np.concatenate([[True], packed[1:] != packed[:-1]])
        del packed
        codes = np.empty(len(texts), dtype=np.int32)
        codes[order] = np.cumsum(first, dtype=np.int32) - np.int32(1)
        names = texts.gather(order[first])
        parts = (slice(start, start + AT_ONCE) for start in range(0, len(texts), AT_ONCE))
        if all((names.gather(codes[part]) == texts[part]).all() for part in parts):  # no two texts have one hash
            return names, codes
    coded = texts.cast(pl.Categorical) if texts.dtype == pl.String else texts
    used = coded.unique()
    place = Numbered.of(pl.concat([used.to_physical(), coded.to_physical()]).cast(pl.Int64)).rows
    places = np.empty(len(used), dtype=np.int32)
    places[place[: len(used)]] = np.arange(len(used), dtype=np.int32)
    return used.cast(pl.String), places[place[len(used) :]]


def build(
    name: str,
    users: pl.Series | Numbered,
    items: pl.Series | Numbered,
    *,
    times: pl.Series | None = None,
    ratings: pl.Series | None = None,
    contexts: Features | None = None,
) -> Population:
    """A population from one row per interaction, none of them missing a user, an item or a time.

    Users and items are numbered in the sorted order of their ids (numbers as numbers), so the same rows
    give the same population whatever order people first appear in. Times may be numbers or dates; they
    order a history at full precision, then are kept as whole numbers (dates as seconds since 1970). Rows of
    equal time keep their order. Row r of `contexts` goes with row r, wherever that ends up.

    >>> toy = build("toy", pl.Series([7, 7, 3]), pl.Series(["b", "a", "b"]), times=pl.Series([9, 5, 1]))
    >>> toy.user_ids.to_list(), toy.item_ids.to_list(), toy.indptr.tolist(), toy.items.tolist()
    ([3, 7], ['a', 'b'], [0, 1, 3], [1, 0, 1])
    """
    if len(users.rows if isinstance(users, Numbered) else users) == 0:
        raise HomebodyError(f"'{name}' has no rows: a population needs at least one interaction.")
    user_ids, row_user = users if isinstance(users, Numbered) else Numbered.of(users)
    item_ids, row_item = items if isinstance(items, Numbered) else Numbered.of(items)
    order = _order(row_user, None if times is None else times.to_physical().to_numpy())
    return Population(
        name,
        pointers(np.bincount(row_user, minlength=len(user_ids))),
        row_item[order],
        n_items=len(item_ids),
        times=None if times is None else whole_times(times)[order],
        ratings=None if ratings is None else ratings.cast(pl.Float32).to_numpy()[order],
        user_ids=user_ids,
        item_ids=item_ids,
        contexts=None if contexts is None else contexts.rows(order),
    )


def _order(row_user: npt.NDArray[np.int32], clock: Clock | None) -> npt.NDArray[np.int64]:
    """The rows by user, then time; rows of equal time keep the order of the file."""
    by_time = None if clock is None else _ascending(clock)
    people = row_user if by_time is None else row_user[by_time]
    by_user = _ascending(people)
    return by_user if by_time is None else by_time[by_user]


def _ascending(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The places of the values in ascending order; equal ones keep their order.

    >>> _ascending(np.array([3, 1, 3, 0])).tolist()
    [3, 1, 0, 2]
    """
    bits = max(1, len(values) - 1).bit_length()
    if values.dtype.kind == "i" and len(values):
        low = int(values.min())
        if (int(values.max()) - low).bit_length() + bits < 63:
            # Value and place in one number: numbers are sorted much faster than places.
            packed = (values - np.int64(low)) << np.int64(bits)
            packed |= np.arange(len(values))
            packed.sort()
            packed &= (1 << bits) - 1
            return packed
    return np.argsort(values, kind="stable")


def whole_times(times: pl.Series) -> npt.NDArray[np.int64]:
    """Times as whole numbers: dates as seconds since 1970."""
    if times.dtype.is_temporal():
        return times.dt.epoch("s").to_numpy()
    if times.dtype.is_float():
        times = times.floor()
    return times.cast(pl.Int64).to_numpy()
