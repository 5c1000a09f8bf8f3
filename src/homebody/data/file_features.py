"""Features in the columns of an interactions file: whose they are, of what kind, and which say nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.columns import Column
from homebody.data.features import Features, Kind
from homebody.data.kinds import as_kind, guess, guess_of_items, names_of_items
from homebody.data.population import Population
from homebody.errors import HomebodyError, several

__all__ = ["describe"]

Longs = npt.NDArray[np.int64]
Owner = Literal["users", "items", "interactions"]
MUCH_MORE = 10
"""So many times as many rows must speak for items where a column could be of users too."""


class _Holders(NamedTuple):
    """The users, or the items: whom each row of the file is about."""

    of: Longs
    number: int


class _Whose(NamedTuple):
    owner: Owner
    picks: Longs | None = None
    """For each user or item, the row of the file whose value counts."""
    filled: int = 0
    """Rows without a value whose user or item has one in another row."""
    tied: bool = False
    """Whether it could as well be of items."""


@dataclass(frozen=True)
class _Feature:
    values: pl.Series
    kind: Kind
    whose: _Whose


def describe(
    population: Population,
    table: pl.DataFrame,
    path: Path,
    order: Longs,
    *,
    wanted: Mapping[str, Kind],
    asked: Collection[str] = (),
) -> Population:
    """The population with the columns of its own file for features; interaction r is the file's row `order[r]`.

    A column that is the same in all rows of each user is a feature of users, one that is the same in all rows of
    each item a feature of items, any other a context of interactions. One that is both is of users, unless hardly
    any of them has a second row to confirm it. If a column is neither, a missing value counts as what the user (or
    the item) has in other rows.

    Columns that were not `asked` for, and of which the kind is not `wanted`, are left out where they say nothing,
    as ids do, or cannot be used; the population's notes say so.

    >>> two = Population("toy", np.array([0, 2, 4]), np.array([0, 1, 0, 1], dtype=np.int32), 2)
    >>> more = pl.DataFrame({"job": ["cook", "cook", "vet", "cook"], "hour": [9.5, 8.5, 9.5, 7.5], "id": [1, 2, 3, 4]})
    >>> found = describe(two, more, Path("a.csv"), np.arange(4), wanted={})
    >>> found.contexts.names, found.notes[-1]
    (['job', 'hour'], 'a.csv: left out id (different in every row); --feature-cols NAMES takes it all the same.')
    """
    holders: dict[Owner, _Holders] = {
        "users": _Holders(
            _in_file(np.repeat(np.arange(population.n_users), population.lengths), order), population.n_users
        ),
        "items": _Holders(_in_file(population.items, order), population.n_items),
    }
    found: dict[str, _Feature] = {}
    left: dict[str, str] = {}
    refused: list[str] = []
    for name in table.columns:
        if not name.strip():
            left["a column"] = "without a name"
            continue
        column, insist = Column(table[name], "feature", path), name in asked or name in wanted
        try:
            feature = _feature(column, holders, wanted.get(name), insist=insist)
        except HomebodyError as error:
            if insist:
                raise
            # What nobody asked for must not keep them from what they did.
            refused.append(f"{str(error).rstrip('.')}; until then it is left out.")
            continue
        if isinstance(feature, str):
            left[name] = feature
        else:
            found[name] = feature
    users, items, contexts = (_table(found, owner) for owner in ("users", "items", "interactions"))
    return replace(
        population,
        user_features=users,
        item_features=items,
        item_names=None if items is None else names_of_items(items.table, population.item_ids),
        contexts=None if contexts is None else contexts.rows(order),
        notes=(*population.notes, *_notes(path, found, left), *refused),
    )


def _in_file(holders: npt.NDArray[np.integer], order: Longs) -> Longs:
    """From the population's order to the file's."""
    out = np.empty(len(order), dtype=np.int64)
    out[order] = holders
    return out


def _table(found: Mapping[str, _Feature], owner: Owner) -> Features | None:
    own = {name: feature for name, feature in found.items() if feature.whose.owner == owner}
    table = pl.DataFrame([feature.values.alias(name) for name, feature in own.items()])
    return Features(table, {name: feature.kind for name, feature in own.items()}) if own else None


def _feature(column: Column, holders: Mapping[Owner, _Holders], kind: Kind | None, *, insist: bool) -> _Feature | str:
    """What the column is, or why it is left out."""
    looks = _looks(column)
    if not insist and looks.null_count() == len(looks):
        return "empty"
    if not insist and looks.null_count() == 0 and (looks == looks[0]).all():
        return "the same in every row"
    whose = _whose(looks, holders)
    single = whose.picks is None
    if not insist and single and _all_different(looks) and not _fractions(looks):
        return "different in every row"
    own = column if whose.picks is None else Column(column.values.gather(whose.picks), column.role, column.path)
    kind = kind or (guess_of_items(own) if whose.owner == "items" else guess(own))
    if not insist and single and kind == "text":
        # Thousands of numbers for each interaction, and mostly written after it.
        return "free text about interactions"
    if not insist and kind == "categorical" and _all_different(own.bare()):
        return f"no two {whose.owner} share one"
    try:
        return _Feature(as_kind(own, kind), kind, whose)
    except HomebodyError:
        as_kind(column, kind)  # refuses the same, but by the file's rows
        raise


def _looks(column: Column) -> pl.Series:
    """Values that are equal if and only if they look the same; nothing is null."""
    if isinstance(column.values.dtype, pl.List | pl.Array):
        return as_kind(column, "multi-hot").list.join("\x1f")
    return column.bare()


def _whose(looks: pl.Series, holders: Mapping[Owner, _Holders]) -> _Whose:
    known = looks.is_not_null().to_numpy()
    rows = np.arange(len(looks))
    same: list[tuple[int, _Whose]] = []
    nearly: list[tuple[int, _Whose]] = []
    for owner, (of, number) in holders.items():
        picks = np.empty(number, dtype=np.int64)
        picks[of] = rows
        picks[of[known]] = rows[known]
        alike = looks.eq_missing(looks.gather(picks[of])).to_numpy()
        # How many rows say again what another said of the same user or item.
        confirmed = int(known.sum()) - int(known[picks].sum())
        if alike.all():
            same.append((confirmed, _Whose(owner, picks)))
        elif confirmed and (alike | ~known).all():
            nearly.append((confirmed, _Whose(owner, picks, int((~known & known[picks[of]]).sum()))))
    if nearly and looks.drop_nulls().n_unique() == 1:
        # A mark in some rows agrees with itself wherever it is: where it is missing is what it says.
        nearly = []
    fit = same or nearly
    if not fit:
        return _Whose("interactions")
    if len(fit) == 1:
        return fit[0][1]
    (of_users, users), (of_items, items) = fit
    if of_items > MUCH_MORE * of_users:
        return items
    return users._replace(tied=of_users > 0)


def _all_different(values: pl.Series) -> bool:
    known = values.drop_nulls()
    return len(known) > 1 and known.n_unique() == len(known)


def _fractions(values: pl.Series) -> bool:
    """Whether all are numbers, and not only whole ones: amounts, though no two be equal."""
    if values.dtype != pl.String and not values.dtype.is_numeric():
        return False
    number = values.cast(pl.Float64, strict=False)
    return number.null_count() == values.null_count() and bool((number != number.round()).any())


def _notes(path: Path, found: Mapping[str, _Feature], left: Mapping[str, str]) -> Iterable[str]:
    owners: tuple[Owner, ...] = ("users", "items", "interactions")
    taken = {
        owner: ", ".join(f"{name} as {one.kind}" for name, one in found.items() if one.whose.owner == owner)
        for owner in owners
    }
    if found:
        parts = "; ".join(f"of {owner} {names}" for owner, names in taken.items() if names)
        yield (
            f"{path.name}: took for features {parts} (--feature-cols NAMES takes others, or none, and "
            "--kind COLUMN=KIND takes one otherwise)."
        )
    for name, one in found.items():
        if one.whose.tied:
            yield (
                f"{path.name}: {name} is the same in all rows of each user, and of each item too; it is taken for a "
                "feature of users."
            )
    filled = [f"{name} ({several(one.whose.filled, 'row')})" for name, one in found.items() if one.whose.filled]
    if filled:
        yield f"{path.name}: where {', '.join(filled)} is missing, what other rows say of the same user or item counts."
    if left:
        why = ", ".join(f"{name} ({reason})" for name, reason in left.items())
        them = "it" if len(left) == 1 else "them"
        yield f"{path.name}: left out {why}; --feature-cols NAMES takes {them} all the same."
