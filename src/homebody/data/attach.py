"""Attach files about a population's users, items and impressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl

from homebody.data.columns import FileColumn, known_kinds, listed, names_of_items, single, unmark_all, usual
from homebody.data.news import usable
from homebody.data.origins import Layout, LoadedTable, Origin, kind_option
from homebody.data.population import Features, Impressions, Kind, Population, pointers, whole_times
from homebody.data.published import rows_for
from homebody.data.readers import Source, origin_of, read
from homebody.data.roles import LIKELY_NAMES, USUAL_NAMES, likely
from homebody.errors import HomebodyError, refuse_unknown, several

__all__ = ["attach", "attach_view", "id_column", "impression_columns", "with_view"]

Role = Literal["user", "item"]
Say = Callable[[str], None]
IMPRESSION_NAMES = {
    "impression": ("impression", "impressionid"),
    **{role: USUAL_NAMES[role] for role in ("user", "item")},
    "clicked": ("clicked", "click"),
    "time": USUAL_NAMES["time"],
}
"""The usual names of the columns of a file of impressions."""
IMPRESSIONS = "the frame of impressions"


def attach(
    population: Population,
    *,
    user_features: Source | None = None,
    item_features: Source | None = None,
    kinds: Mapping[str, str] | None = None,
    impressions: Source | None = None,
    layout: Layout | None = None,
    time_format: str | None = None,
    say: Say | None = None,
) -> Population:
    """The population with features and impressions from files or data frames, and columns of the kinds given.

    A feature file has a row for each user (or item). The id is in a column of a usual name (user, user_id,
    id; item, item_id, movieId, id), otherwise in the first. The other columns are features, of the kinds that
    they look like (`FileColumn.guess`) unless `kinds` says otherwise. They stand beside the population's own features;
    one of the same name takes the other's place. Titles or names of items serve as their names where there are none.
    Items that nobody has join the population if an impression shows them and the file of items describes them.
    What is guessed, missing or left out is said, and counted.

    >>> import tempfile, numpy as np
    >>> two = Population("toy", np.array([0, 1, 2]), np.array([0, 0], dtype=np.int32), 1, user_ids=pl.Series([7, 9]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "users.csv").write_text("user,age\\n9,31.5\\n")
    ...     known = attach(two, user_features=Path(folder, "users.csv"), kinds={"age": "numeric"})
    >>> known.user_features.table["age"].to_list()
    [None, 31.5]
    """
    say, layout = say or (lambda message: None), layout or Layout()
    wanted = known_kinds(kinds or {})
    if item_features is not None and impressions is not None:
        population = _with_shown_items(population, item_features, impressions, layout, say)
    users, items, names = population.user_features, population.item_features, population.item_names
    if user_features is not None:
        users, _ = _described(population, "user", user_features, wanted, users, layout, say)
    if item_features is not None:
        items, titles = _described(population, "item", item_features, wanted, items, layout, say)
        names = titles if names is None else names
    # Kinds may also be given for what the source itself has.
    users, items, contexts = (_of_kinds(features, wanted) for features in (users, items, population.contexts))
    present = {name for features in (users, items, contexts) if features is not None for name in features.names}
    if wanted and not present:
        name, kind = next(iter(wanted.items()))
        raise HomebodyError(f"There is no feature '{name}' to declare as {kind}: {population.name} has no features.")
    refuse_unknown("feature", wanted, present)
    population = replace(population, user_features=users, item_features=items, contexts=contexts, item_names=names)
    return population if impressions is None else _attach_impressions(population, impressions, layout, time_format, say)


def attach_view(
    population: Population, name: str, path: Path, *, kinds: Mapping[str, str] | None = None, say: Say | None = None
) -> Population:
    """The population with a view from a file: a row for each person, their id and the view's features.

    The file is read as one of users' features. Its columns are named after the view: `x` of the view `taste` is
    `taste.x`, also in `kinds`. A person may be missing: nothing is known of their view. A number may not, nobody may
    stand twice, and each row has as many cells as the header.

    >>> import tempfile, numpy as np
    >>> two = Population("toy", np.array([0, 1, 2]), np.array([0, 0], dtype=np.int32), 1, user_ids=pl.Series([7, 9]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "taste.csv").write_text("user,x\\n9,31.5\\n")
    ...     known = attach_view(two, "taste", Path(folder, "taste.csv"))
    >>> known.user_features.table["taste.x"].to_list(), known.user_features.views
    ([None, 31.5], {'taste.x': 'taste'})
    """
    say = say or (lambda message: None)
    table = _told(path, read(path), say)
    if table.height == 0:
        raise HomebodyError(f"{path} has no rows below its header, so the view '{name}' describes nobody.")
    key = id_column(path, table.columns, "user", say)
    ids = FileColumn(table[key], "user", path).ids()
    twice = ids.filter(ids.is_duplicated())
    if len(twice):
        many = several(twice.n_unique(), "such user")
        raise HomebodyError(f"{path} has several rows about the user '{twice[0]}' ({many}): leave one row for each.")
    table = table.drop(key)
    table.columns = [f"{name}.{column}" for column in table.columns]
    wanted = {column: kind for column, kind in known_kinds(kinds or {}).items() if column in table.columns}
    for column in table.columns:
        if wanted.get(column, "numeric") == "numeric":  # in a column that is declared as codes or text it is a word
            remedy = "; leave out the rows of people without this view"
            FileColumn(table[column], "feature", path).refuse_not_finite(remedy)
    chosen = _guessed(path, table, wanted, "user", say)
    columns = []
    for column, kind in chosen.items():
        values = unmark_all(table[column]) if table[column].dtype == pl.String else table[column]
        given = FileColumn(values.alias(column), kind, path)
        if kind == "numeric":
            bad = given.numbers_or_nothing().is_null()
            given.refuse(bad, "a number in every row", "; leave out the rows of people without this view")
        columns.append(given.as_kind(kind))
    rows = _matched(path, pl.DataFrame(columns), ids, population.user_ids, population.n_users, "user", say)
    return with_view(population, name, Features(rows, chosen))


def with_view(population: Population, name: str, features: Features) -> Population:
    """The population with these features of its users as a view of this name, beside what it has."""
    old = population.user_features
    again = [column for column in features.names if old is not None and column in old.names]
    if again:
        raise HomebodyError(
            f"The view '{name}' has the column '{again[0]}', which {population.name} has already: give the view "
            "another name."
        )
    joined = replace(features, views=dict.fromkeys(features.names, name))
    return replace(population, user_features=joined if old is None else old.beside(joined))


def _told(path: Origin, table: LoadedTable, say: Say) -> pl.DataFrame:
    """The rows of a table, after what is to be said of how it was read. Its columns have names of their own."""
    for note in table.notes:
        say(note)
    headless = [name for name in table.rows.columns if name and not name.strip().lstrip("-").replace(".", "").isdigit()]
    if isinstance(path, Path) and not headless and table.rows.width:
        raise HomebodyError(f"{path} has numbers where its columns' names should be: give it a header line.")
    return table.rows


def _described(
    population: Population,
    role: Role,
    source: Source,
    wanted: Mapping[str, Kind],
    old: Features | None,
    layout: Layout,
    say: Say,
) -> tuple[Features, pl.Series | None]:
    """A row for each user or item, beside what was known of them, and the items' titles."""
    count = population.n_users if role == "user" else population.n_items
    known = population.user_ids if role == "user" else population.item_ids
    what = f"the frame of {role} features"
    path = origin_of(source, what)
    table = _told(path, read(source, layout=layout, what=what), say)
    if table.height == 0:
        raise HomebodyError(f"{path} has no rows below its header, so it says nothing about any {role}.")
    key = id_column(path, table.columns, role, say)
    ids = FileColumn(table[key], role, path).ids()
    table = table.drop(key)
    kinds = _guessed(path, table, wanted, role, say)
    table = pl.DataFrame([FileColumn(table[name], "feature", path).as_kind(kind) for name, kind in kinds.items()])
    rows = _matched(path, table, ids, known, count, role, say)
    titles = None if role == "user" else names_of_items(rows, known)
    if old is not None:
        again = [name for name in old.names if name in kinds]
        if again:
            say(f"{path.name} takes the place of the {role}s' {listed(again)} that {population.name} has already.")
        return old.only([name for name in old.names if name not in kinds]).beside(Features(rows, kinds)), titles
    return Features(rows, kinds), titles


def id_column(path: Origin, present: list[str], role: Role, say: Say) -> str:
    """The column of the ids: by its usual name, otherwise the first, which is said."""
    matches = usual(present, USUAL_NAMES[role]) or usual(present, ("id",))
    key = single(path, role, matches, "rename all but one")
    if key is None and (key := likely(present, role)) is not None:
        say(f"{path.name}: took '{key}' for the {role}s' ids.")
    if key is None:
        key = present[0]
        say(f"{path.name} has no column called {role}, so its first, '{key}', is taken for it.")
    if len(present) == 1:
        raise HomebodyError(f"{path} has only the column '{key}', so it says nothing about any {role}.")
    return key


def _guessed(path: Origin, table: pl.DataFrame, wanted: Mapping[str, Kind], role: Role, say: Say) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    guesses = []
    for name in table.columns:
        if not name.strip():
            say(f"{path.name}: left out a column without a name.")
            continue
        if name in wanted:
            kinds[name] = wanted[name]
            continue
        column = FileColumn(table[name], "feature", path)
        if column.looks_like_times():
            say(f"{path.name}: left out {name} (looks like times); {kind_option(path)} takes it all the same.")
            continue
        kinds[name] = column.guess() if role == "user" else column.guess_of_items()
        guesses.append(f"{name} as {kinds[name]}")
    if guesses:
        say(f"{path.name}: took {', '.join(guesses)} ({kind_option(path)} takes it otherwise).")
    if not kinds:
        raise HomebodyError(f"{path} has no column that can be a feature of {role}s, so it says nothing about them.")
    return kinds


def _matched(
    path: Origin, table: pl.DataFrame, ids: pl.Series, known: pl.Series | None, count: int, role: Role, say: Say
) -> pl.DataFrame:
    """The table's rows in the population's order; null for a user or item without a row."""
    place = _places(ids, known, count)
    strangers = place.null_count()
    if strangers == len(place):
        example = 0 if known is None else known[0]
        raise HomebodyError(
            f"{path} describes none of the population's {role}s: its first {role} is '{ids[0]}', and the population's "
            f"first is '{example}'."
        )
    if strangers:
        say(f"{path.name} has {several(strangers, 'row')} about {role}s that have no interactions; left out.")
    # A list is one value here, and two rows are the same if they look the same.
    looks = table.with_columns(pl.selectors.by_dtype(pl.List(pl.String)).list.join("\x1f"))
    rows = looks.with_columns(place.alias(" place"), ids.alias(" id"), pl.int_range(table.height).alias(" row"))
    rows = rows.filter(pl.col(" place").is_not_null())
    distinct = rows.unique([*table.columns, " place"], keep="first", maintain_order=True)
    repeated = distinct.filter(pl.col(" place").is_duplicated())
    if repeated.height:
        many = several(repeated[" place"].n_unique(), f"such {role}")
        raise HomebodyError(
            f"{path} has several different rows about the {role} '{repeated[' id'][0]}' ({many}); leave one row for "
            "each."
        )
    if distinct.height < rows.height:
        say(f"{path.name} repeats itself in {several(rows.height - distinct.height, 'row')}; the first of each counts.")
    if distinct.height < count:
        say(f"{path.name} misses {count - distinct.height:,} of {count:,} {role}s; nothing is known of them.")
    at = distinct.select(id=" place", row=" row")
    return table.select(pl.all().gather(rows_for(pl.int_range(count, eager=True), at)["row"]))


def _of_kinds(features: Features | None, wanted: Mapping[str, Kind]) -> Features | None:
    if features is None:
        return None
    changed = {name: wanted[name] for name, kind in features.kinds.items() if wanted.get(name, kind) != kind}
    table = features.table.with_columns(
        FileColumn(features.table[name], "feature", Path("the source")).as_kind(kind) for name, kind in changed.items()
    )
    # A vocabulary declared for another kind does not fit.
    declared = {name: given for name, given in features.declared.items() if name not in changed}
    return Features(table, {**features.kinds, **changed}, declared, features.views)


def _with_shown_items(
    population: Population, described: Source, impressions: Source, layout: Layout, say: Say
) -> Population:
    """The population with the items that one file describes and the other shows, though nobody has them yet."""
    if population.item_ids is None:
        return population
    path = origin_of(described)
    known = read(described, layout=layout).rows
    ids = FileColumn(known[id_column(path, known.columns, "item", lambda message: None)], "item", path).ids()
    where = origin_of(impressions, IMPRESSIONS)
    column: list[str] = []

    def choose(present: list[str]) -> list[str]:
        column.append(impression_columns(where, present)["item"])
        return column

    seen = read(impressions, choose, layout, IMPRESSIONS).rows
    shown = FileColumn(seen[column[0]], "item", where).ids().cast(pl.String).unique()
    old = population.item_ids.cast(pl.String)
    new = ids.cast(pl.String).unique(maintain_order=True)
    new = new.filter(new.is_in(shown.implode()) & ~new.is_in(old.implode())).sort()
    if not len(new):
        return population
    say(f"{several(len(new), 'item that nobody has is', 'items that nobody has are')} shown and described: known too.")
    alike = new.cast(population.item_ids.dtype, strict=False)
    # 007 is no number: then all ids are texts.
    same = (alike.cast(pl.String) == new).fill_null(False).all()
    item_ids = pl.concat([population.item_ids, alike] if same else [old, new])
    names, features = population.item_names, population.item_features
    if features is not None:
        features = replace(features, table=features.table.vstack(features.table.clear(len(new))))
    return replace(
        population,
        n_items=population.n_items + len(new),
        item_ids=item_ids,
        item_names=None if names is None else pl.concat([names, new.rename(names.name)]),
        item_features=features,
    )


def _attach_impressions(
    population: Population, source: Source, layout: Layout, time_format: str | None, say: Say
) -> Population:
    """The population with the file's impressions: columns impression, user, item, clicked, and perhaps time.

    What cannot be used is left out, counted and said: unknown users and items, an item that one impression
    shows twice (it was clicked if one of them was), impressions without a click or with nothing else.
    """
    roles: dict[str, str] = {}
    path = origin_of(source, IMPRESSIONS)

    def choose(present: list[str]) -> list[str]:
        roles.update(impression_columns(path, present))
        return list(roles.values())

    table = _told(path, read(source, choose, layout, IMPRESSIONS), say)
    if table.height == 0:
        raise HomebodyError(f"{path} has no rows below its header, so there are no impressions.")
    column = {role: FileColumn(table[name], role, path) for role, name in roles.items()}
    called = column["user"].ids()
    rows = pl.DataFrame(
        {
            "impression": column["impression"].ids().cast(pl.String),
            "user": _places(called, population.user_ids, population.n_users),
            "item": _places(column["item"].ids(), population.item_ids, population.n_items),
            "clicked": column["clicked"].flags(),
            "time": column["time"].times(time_format) if "time" in column else pl.repeat(0, table.height, eager=True),
            "called": called,
        }
    )
    _refuse_shared(rows, path)
    strangers = rows.filter(pl.col("user").is_null())["impression"].n_unique()
    if strangers:
        say(f"{path.name} has {several(strangers, 'impression')} of users who have no interactions; left out.")
        rows = rows.filter(pl.col("user").is_not_null())
    if unknown := rows["item"].null_count():
        many = several(unknown, "row")
        say(f"{path.name} shows items that the population does not have in {many}; those are left out.")
        rows = rows.filter(pl.col("item").is_not_null())
    lines = rows.group_by("impression", maintain_order=True).agg(
        pl.col("user").first(), pl.col("time").min(), pl.col("item"), pl.col("clicked")
    )
    impressions, said = usable(
        Impressions(
            users=lines["user"].to_numpy().astype(np.int64),
            indptr=pointers(lines["item"].list.len().to_numpy()),
            items=lines["item"].explode().cast(pl.Int32).to_numpy(),
            clicked=lines["clicked"].explode().to_numpy(),
            times=whole_times(lines["time"]) if "time" in column else None,
        ),
        population.n_items,
        str(path),
    )
    for sentence in said:
        say(f"{path.name}: {sentence}")
    if population.impressions is not None:
        say(f"{path.name} takes the place of the impressions that {population.name} has already.")
    return replace(population, impressions=impressions)


def _places(ids: pl.Series, known: pl.Series | None, count: int) -> pl.Series:
    """The number of the user (or item) with each id; null for an unknown id. 7 matches '7' but not '007'.

    >>> _places(pl.Series(["7", "007", "x"]), pl.Series([5, 7]), 2).to_list()
    [1, None, None]
    """
    names = pl.Series("id", range(count)) if known is None else known
    index = pl.DataFrame({"id": names.cast(pl.String), "place": pl.int_range(count, eager=True)})
    asked = ids.cast(pl.String).rename("id").to_frame()
    return asked.join(index, on="id", how="left", maintain_order="left")["place"]


def impression_columns(path: Origin, present: list[str], optional: Sequence[str] = ("time",)) -> dict[str, str]:
    """The columns of a file of impressions, by what they hold; refused where one is missing that is not optional."""
    roles = {}
    *needed, last = (role for role in IMPRESSION_NAMES if role not in optional)
    for role, names in IMPRESSION_NAMES.items():
        name = single(path, role, usual(present, names), "rename all but one") or _likely(present, role)
        if name is not None:
            roles[role] = name
        elif role not in optional:
            raise HomebodyError(
                f"{path} has no column '{role}': impressions need the columns {', '.join(needed)} and {last}, "
                f"and its columns are {listed(present)}."
            )
    return roles


def _likely(present: list[str], role: str) -> str | None:
    return likely(present, role) if role in LIKELY_NAMES else None


def _refuse_shared(rows: pl.DataFrame, path: Origin) -> None:
    people = rows.group_by("impression", maintain_order=True).agg(pl.col("called").n_unique())
    shared = people.filter(pl.col("called") > 1)
    if shared.height:
        raise HomebodyError(
            f"The impression '{shared['impression'][0]}' of {path} belongs to {shared['called'][0]} users "
            f"({several(shared.height, 'such impression')}); give each its own number."
        )
