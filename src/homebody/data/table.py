"""A table of one's own, one row an interaction: a file, a database's answer or a data frame.

Its other columns may be features: of users, of items or of interactions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.columns import TEXTS, FileColumn, known_kinds, listed, names_of_items, usual
from homebody.data.delimited import suggested
from homebody.data.origins import Layout, Origin, features_option, kind_option, option
from homebody.data.population import Features, Kind, Population, build
from homebody.data.readers import Source, origin_of, read
from homebody.data.roles import USUAL_NAMES, choose_columns, said
from homebody.errors import HomebodyError, several

__all__ = ["describe", "read_table"]

Longs = npt.NDArray[np.int64]
Owner = Literal["users", "items", "interactions"]
MUCH_MORE = 10
"""A column that fits users and items belongs to items if this many times as many rows support it."""

TIMES = "looks like times"


def read_table(
    source: Source,
    *,
    user_col: str | None = None,
    item_col: str | None = None,
    time_col: str | None = None,
    rating_col: str | None = None,
    feature_cols: str | Sequence[str] | None = None,
    kinds: Mapping[str, str] | None = None,
    layout: Layout | None = None,
    time_format: str | None = None,
) -> Population:
    """The population in a table: a text file, Parquet, Excel or JSON lines, a database's answer, or a data frame.

    A column that is not named is found by what people call it, in any spelling of case, `_` and `-`
    (`homebody.data.roles`), and the population's notes say which was taken. Times and ratings may be absent, and an
    empty name (`rating_col=""`) leaves one out. Times are numbers or dates (`homebody.data.dates`), or written as
    `time_format` says; dates without a zone are UTC.

    All other columns are features, of users, items or interactions as they look (`describe`),
    and of the `kinds` given or guessed. `feature_cols` names those to take instead, as a list or with commas
    between them; empty, there are none. `layout` says how a file is written, and whether rows that miss a user, an
    item, a time or a rating are left out.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "loans.csv")
    ...     _ = file.write_text("reader;book;day\\nann;emma;2024-02-01\\nann;ulysses;2023-12-31\\n")
    ...     loans = read_table(file)
    >>> loans.item_ids.gather(loans.history(0)).to_list(), loans.notes[0].partition(" (")[0]
    (['ulysses', 'emma'], 'loans.csv: took reader for users, book for items, day for times')
    """
    layout, path = layout or Layout(main=True), origin_of(source)
    given = {"user": user_col, "item": item_col, "time": time_col, "rating": rating_col}
    wanted = known_kinds(kinds or {})
    names: dict[str, str] = {}
    others: list[str] = []

    def choose(present: list[str]) -> list[str]:
        headless = not layout.header
        names.update(choose_columns(path, present, given, separator=suggested(present), headless=headless))
        others.extend(_features(path, present, names, given, feature_cols))
        return [*names.values(), *others]

    table, notes = read(source, choose, layout)
    if table.height == 0:
        rows = "no rows" if getattr(path, "typed", True) is False else "no rows below its header"
        raise HomebodyError(f"{path} has {rows}, so there is nobody to learn from.")
    if not layout.header and item_col is None and FileColumn(table[names["item"]], "item", path).looks_like_times():
        raise HomebodyError(
            f"Which column of {path} is the item? Column {names['item']} looks like times: name the item's with "
            f"{option(path, 'item_col')}."
        )
    guesses = {role: FileColumn(table[names[role]], role, path) for role in ("time", "rating") if role in names}
    # What is only probably of a role is something else if its values are.
    unfit: dict[str, str] = {
        role: names.pop(role) for role, each in guesses.items() if given[role] is None and not _fits(each)
    }
    others += unfit.values() if feature_cols is None else ()
    notes = [*said(path, names, given), *_unfit(path, unfit), *notes]
    if layout.drop:
        table = _complete(table, names, path, notes)
    column = {role: FileColumn(table[name], role, path) for role, name in names.items()}
    try:
        with ThreadPoolExecutor(2) as both:
            users, items = both.map(FileColumn.numbered, (column["user"], column["item"]))
        population = build(
            path.stem,
            users,
            items,
            times=column["time"].times(time_format) if "time" in column else None,
            ratings=column["rating"].numbers() if "rating" in column else None,
            # The numbers of the file's rows end up in the population's order.
            contexts=Features(pl.DataFrame({"row": np.arange(table.height)}), {"row": "numeric"}) if others else None,
        )
    except HomebodyError:
        _refuse_missing(column, path)
        raise
    population = replace(population, notes=tuple(notes))
    if population.contexts is None:
        return population
    order = population.contexts.table["row"].to_numpy()
    asked = others if feature_cols is not None else ()
    with_times = "time" in names or given["time"] == ""
    return describe(population, table.select(others), path, order, wanted=wanted, asked=asked, with_times=with_times)


def _fits(column: FileColumn) -> bool:
    """Whether a column of a likely name holds what the name says; one of a usual name does, or is wrong."""
    if usual([column.values.name], USUAL_NAMES[column.role]):
        return True
    few = FileColumn(column.values.drop_nulls().head(1000), column.role, column.path)
    return few.mostly_numbers() or (column.role == "time" and few.mostly_times())


def _unfit(path: Origin, names: Mapping[str, str]) -> Iterable[str]:
    """Why columns with likely names are not what the names say."""
    for role, name in names.items():
        needs = "numbers or dates" if role == "time" else "numbers"
        insisting = option(path, f"{role}_col", name)
        yield f"{path.name}: {name} is not taken for {role}s, as most of it is not {needs} ({insisting} insists)."


def _missing(column: FileColumn) -> pl.Series:
    plain = column.values.dtype not in TEXTS and not column.values.dtype.is_float()
    return column.values.is_null() if plain else column.bare().is_null()


def _complete(table: pl.DataFrame, names: Mapping[str, str], path: Origin, notes: list[str]) -> pl.DataFrame:
    """The rows that miss nothing of a role; the others are counted by the first thing that they miss."""
    kept = pl.Series([True]).new_from_index(0, table.height)
    counts = []
    for role, name in names.items():
        missing = _missing(FileColumn(table[name], role, path))
        if lost := int((missing & kept).sum()):
            counts.append(f"{lost:,} without a{'n' if role == 'item' else ''} {role}")
        kept &= ~missing
    if not counts:
        return table
    lost = table.height - int(kept.sum())
    if lost == table.height:
        raise HomebodyError(f"No row of {path} is complete: {', '.join(counts)}.")
    notes.append(f"{path.name}: left out {several(lost, 'row')}, {', '.join(counts)} ({option(path, 'drop_missing')}).")
    return table.filter(kept)


def _refuse_missing(columns: Mapping[str, FileColumn], path: Origin) -> None:
    for role, column in columns.items():
        an = "an" if role == "item" else "a"
        missing = _missing(column)
        if missing.any():
            column.refuse(
                missing, f"{an} {role} in every row", f"; {option(path, 'drop_missing')} leaves such rows out"
            )


def _features(
    path: Origin,
    present: list[str],
    names: Mapping[str, str],
    given: Mapping[str, str | None],
    wanted: str | Sequence[str] | None,
) -> list[str]:
    """The columns to take for features, in the file's order."""
    roles = {name: role for role, name in names.items()}
    if wanted is None:
        # What was left out by an empty name is not wanted in another way either.
        refused = [name for role, col in given.items() if col == "" for name in usual(present, USUAL_NAMES[role])]
        return [name for name in present if name not in roles and name not in refused]
    if isinstance(wanted, str):
        whole = wanted and wanted in present
        wanted = [wanted] if whole else [name.strip() for name in wanted.split(",") if name.strip()]
    for name in wanted:
        if name not in present:
            raise HomebodyError(
                f"{path} has no column '{name}' ({option(path, 'feature_cols')}); its columns are {listed(present)}."
            )
        if name in roles:
            raise HomebodyError(
                f"The column '{name}' of {path} has the {roles[name]}s, so it cannot be a feature too; leave it out of "
                f"{option(path, 'feature_cols')}."
            )
    return [name for name in present if name in wanted]


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
    path: Origin,
    order: Longs,
    *,
    wanted: Mapping[str, Kind],
    asked: Collection[str] = (),
    with_times: bool = True,
) -> Population:
    """The population with the columns of its own file for features; interaction r is the file's row `order[r]`.

    A column that is the same in all rows of each user is a feature of users, one that is the same in all rows of
    each item a feature of items, any other a context of interactions. One that is both is of users, unless hardly
    any of them has a second row to confirm it. If a column is neither, a missing value counts as what the user (or
    the item) has in other rows.

    Columns that were not `asked` for, and of which the kind is not `wanted`, are left out where they say nothing,
    as ids do, look like times, or cannot be used; the population's notes say so. with_times: the times of interactions
    are known, or not wanted; otherwise a column that looks like them is proposed.

    >>> from pathlib import Path
    >>> two = Population("toy", np.array([0, 2, 4]), np.array([0, 1, 0, 1], dtype=np.int32), 2)
    >>> more = pl.DataFrame({"job": ["cook", "cook", "vet", "cook"], "hour": [9.5, 8.5, 9.5, 7.5], "id": [1, 2, 3, 4]})
    >>> described = describe(two, more, Path("a.csv"), np.arange(4), wanted={})
    >>> described.contexts.names, described.notes[-1]
    (['job', 'hour'], 'a.csv: left out id (different in every row); --feature-cols NAMES takes it all the same.')
    """
    holders: dict[Owner, _Holders] = {
        "users": _Holders(
            _in_file(np.repeat(np.arange(population.n_users), population.lengths), order), population.n_users
        ),
        "items": _Holders(_in_file(population.items, order), population.n_items),
    }
    features: dict[str, _Feature] = {}
    left: dict[str, str] = {}
    refused: list[str] = []
    nameless = [name for name in table.columns if not name.strip()]
    if nameless:
        # No option can name it.
        refused.append(f"{path.name}: left out {several(len(nameless), 'column')} without a name.")
    for name in table.columns:
        if name in nameless:
            continue
        column, insist = FileColumn(table[name], "feature", path), name in asked or name in wanted
        if not insist and column.looks_like_times():
            whose = _whose(_looks(column), holders)
            # One row for each user or item says nothing about whose the dates are.
            own = whose.picks is not None and len(whose.picks) < table.height
            left[name] = f"dates of {whose.owner}" if own else TIMES
            continue
        try:
            feature = _feature(column, holders, wanted.get(name), insist=insist)
        except HomebodyError as error:
            if insist:
                raise
            # A bad column that nobody asked for must not stop the others.
            refused.append(f"{str(error).rstrip('.')}; until then it is left out.")
            continue
        if isinstance(feature, str):
            left[name] = feature
        else:
            features[name] = feature
    users, items, contexts = (_table(features, owner) for owner in get_args(Owner))
    return replace(
        population,
        user_features=users,
        item_features=items,
        item_names=None if items is None else names_of_items(items.table, population.item_ids),
        contexts=None if contexts is None else contexts.rows(order),
        notes=(*population.notes, *_proposal(path, left, with_times), *_notes(path, features, left), *refused),
    )


def _in_file(holders: npt.NDArray[np.integer], order: Longs) -> Longs:
    """From the population's order to the file's."""
    out = np.empty(len(order), dtype=np.int64)
    out[order] = holders
    return out


def _table(features: Mapping[str, _Feature], owner: Owner) -> Features | None:
    owned = {name: feature for name, feature in features.items() if feature.whose.owner == owner}
    table = pl.DataFrame([feature.values.alias(name) for name, feature in owned.items()])
    return Features(table, {name: feature.kind for name, feature in owned.items()}) if owned else None


def _feature(
    column: FileColumn, holders: Mapping[Owner, _Holders], kind: Kind | None, *, insist: bool
) -> _Feature | str:
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
    values = column if whose.picks is None else FileColumn(column.values.gather(whose.picks), column.role, column.path)
    kind = kind or (values.guess_of_items() if whose.owner == "items" else values.guess())
    if not insist and single and kind == "text":
        # Thousands of numbers for each interaction, and mostly written after it.
        return "free text about interactions"
    if not insist and kind == "categorical" and _all_different(values.bare()):
        return f"no two {whose.owner} share one"
    try:
        return _Feature(values.as_kind(kind), kind, whose)
    except HomebodyError:
        column.as_kind(kind)  # refuses the same, but by the file's rows
        raise


def _looks(column: FileColumn) -> pl.Series:
    """Values that are equal if and only if they look the same; nothing is null."""
    if isinstance(column.values.dtype, pl.List | pl.Array):
        return column.as_kind("multi-hot").list.join("\x1f")
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
        # A mark in some rows is constant wherever it is set: its information is where it is missing.
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


def _proposal(path: Origin, left: Mapping[str, str], with_times: bool) -> Iterable[str]:
    likely = [name for name, why in left.items() if why == TIMES]
    if likely and not with_times:
        look, it = ("looks", "it") if len(likely) == 1 else ("look", "the first")
        yield (
            f"{path.name}: no column is called time, but {listed(likely[:3])} {look} like times: "
            f"{option(path, 'time_col', likely[0])} takes {it} for them."
        )


def _notes(path: Origin, features: Mapping[str, _Feature], left: Mapping[str, str]) -> Iterable[str]:
    taken: dict[Owner, list[str]] = {owner: [] for owner in get_args(Owner)}
    for name, each in features.items():
        taken[each.whose.owner].append(f"{name} as {each.kind}")
    if features:
        parts = "; ".join(f"of {owner} {', '.join(names)}" for owner, names in taken.items() if names)
        yield (
            f"{path.name}: took for features {parts} ({features_option(path)} takes others, or none, and "
            f"{kind_option(path)} takes one otherwise)."
        )
    for name, feature in features.items():
        if feature.whose.tied:
            yield (
                f"{path.name}: {name} is the same in all rows of each user, and of each item too; it is taken for a "
                "feature of users."
            )
    filled = [f"{name} ({several(each.whose.filled, 'row')})" for name, each in features.items() if each.whose.filled]
    if filled:
        yield f"{path.name}: where {', '.join(filled)} is missing, what other rows say of the same user or item counts."
    if left:
        why = ", ".join(f"{name} ({reason})" for name, reason in left.items())
        them = "it" if len(left) == 1 else "them"
        yield f"{path.name}: left out {why}; {features_option(path)} takes {them} all the same."
