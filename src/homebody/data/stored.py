"""A split in a folder: what it was made of, with its people or without them.

Numbers are in one file of safetensors, texts and tables in Parquet, the rest in JSON, which has the checksum of the
numbers. Without people, what remains is what a device is given: the catalogue, and how features become numbers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from homebody.data.codes import Code
from homebody.data.encode import Encoded, EncodedColumn
from homebody.data.fetch import sha256
from homebody.data.population import Features, Impressions, Population, UserItems
from homebody.data.splits import Split
from homebody.errors import HomebodyError, Unavailable
from homebody.files import insisting, private_folder, replacing

__all__ = ["insist_on_people", "read_split", "without_people", "write_split"]

SCHEMA_VERSION = 1
ABOUT, NUMBERS = "split.json", "numbers.safetensors"
USERS, ITEMS, CONTEXTS = "users.parquet", "items.parquet", "contexts.parquet"
Arrays = dict[str, npt.NDArray[Any]]
OF_PEOPLE = ("indptr", "items", "times", "ratings")
OF_IMPRESSIONS = ("users", "indptr", "items", "clicked", "times", "before", "asked")
OF_SPLIT = ("rows", "bounds", "learn", "absent", "before", "public", "numbers")
SAID = ("way", "protocol", "how", "seed", "negatives")
ID, NAME, FEATURE = "id", "name", "feature/"
"""Columns of ids and of names in the tables, and how those of features begin."""


def without_people(split: Split) -> Split:
    """The same catalogue and the same numbers of features, and as many people, of whom nothing is known.

    >>> from homebody.data import load
    >>> from homebody.data.partitions import leave_one_out
    >>> bare = without_people(leave_one_out(load("synthetic:users=30,items=20,mean=6")))
    >>> bare.n_users, bare.n_items, bare.population.n_interactions
    (30, 20, 0)
    """
    whole, count = split.population, split.n_users
    nothing = np.empty(0, dtype=np.int32)
    population = Population(
        whole.name,
        np.zeros(count + 1, dtype=np.int64),
        nothing,
        whole.n_items,
        ratings=None if whole.ratings is None else np.empty(0, dtype=np.float32),
        item_ids=whole.item_ids,
        item_names=whole.item_names,
        item_features=whole.item_features,
    )
    coded = dict(split.encoded)
    for unit in ("users", "contexts"):
        rows = count if unit == "users" else 0
        numbers = {name: np.asarray(code.unknown(rows)) for name, code in coded[unit].codes.items()}
        coded[unit] = coded[unit].rows(numbers)
    return Split(
        population,
        split.way,
        split.protocol,
        split.how,
        split.seed,
        split.negatives,
        rows=np.empty(0, dtype=np.int64),
        bounds=np.zeros((5, count), dtype=np.int64),
        learn=np.zeros(count, dtype=np.bool_),
        absent=split.absent,
        coded=coded,
    )


def insist_on_people(population: Population) -> None:
    """Refuse a population of `without_people`, of whom nothing can be asked."""
    if not population.n_interactions:
        raise HomebodyError(
            "This model was saved without its people: save(path, data=True) keeps them. It ranks for somebody who says "
            "what they have (recommend_for, or homebody recommend RUN --clicks)."
        )


def write_split(split: Split, folder: Path) -> None:
    """Write a split into a new folder that only its owner reads."""
    people = split.population
    with insisting(f"{folder} cannot be written"):
        private_folder(folder, exist_ok=False)
    try:
        save_file({name: np.ascontiguousarray(values) for name, values in _arrays(split)}, folder / NUMBERS)
    except SafetensorError as error:
        raise Unavailable(f"{folder / NUMBERS} cannot be written: {error}.") from error
    (folder / NUMBERS).chmod(0o600)
    _write_table(folder / USERS, people.user_ids, None, people.user_features)
    _write_table(folder / ITEMS, people.item_ids, people.item_names, people.item_features)
    _write_table(folder / CONTEXTS, None, None, people.contexts)
    features = {"users": people.user_features, "items": people.item_features, "contexts": people.contexts}
    about = {
        "schema": SCHEMA_VERSION,
        "sha256": sha256(folder / NUMBERS),
        "name": people.name,
        "n_items": people.n_items,
        "population_notes": list(people.notes),
        "notes": list(split.notes),
        **{name: getattr(split, name) for name in SAID},
        "features": {
            unit: {"kinds": dict(table.kinds), "views": dict(table.views)}
            for unit, table in features.items()
            if table is not None
        },
        "codes": {
            unit: {"notes": list(encoded.notes), "columns": {n: code.to_json() for n, code in encoded.codes.items()}}
            for unit, encoded in split.encoded.items()
        },
    }
    with replacing(folder / ABOUT) as file:
        file.write(json.dumps(about).encode())


def read_split(folder: Path) -> Split:
    """The inverse of `write_split`; a folder that was changed is refused."""
    try:
        with insisting(f"{folder} cannot be read"):
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            if about["schema"] > SCHEMA_VERSION:
                raise HomebodyError(f"{folder} was written by a newer Homebody; update to open it.")
            if sha256(folder / NUMBERS) != about["sha256"]:
                raise HomebodyError(f"{folder / NUMBERS} is corrupt: its checksum is wrong. Save the model again.")
            numbers = load_file(folder / NUMBERS)
            return _split(about, numbers, folder)
    except (SafetensorError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError) as error:
        raise HomebodyError(f"{folder} is not what Homebody wrote: {error}.") from error


def _arrays(split: Split) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    people, shown, there = split.population, split.population.impressions, split.population.elsewhere
    named: list[tuple[str, Any]] = [(f"people/{name}", getattr(people, name)) for name in OF_PEOPLE]
    named += [(f"split/{name}", getattr(split, name)) for name in OF_SPLIT]
    named += [(f"shown/{name}", getattr(shown, name)) for name in OF_IMPRESSIONS if shown is not None]
    named += [] if there is None else [("elsewhere/indptr", there.indptr), ("elsewhere/items", there.items)]
    named += [(f"unasked/{held}", items) for held, items in (split.unasked or {}).items()]
    named += [(f"part/{part}", numbers) for part, numbers in (split.shown or {}).items()]
    named += [(f"avoid/{place}", values) for place, values in enumerate(split._avoid or ())]
    for unit, encoded in split.encoded.items():
        named += [(f"coded/{unit}/{name}", column.values) for name, column in encoded.columns.items()]
    yield from ((name, values) for name, values in named if values is not None)


def _split(about: Mapping[str, Any], numbers: Arrays, folder: Path) -> Split:
    shown, there = _part(numbers, "shown"), _part(numbers, "elsewhere")
    user_ids, _, user_features = _read_table(folder / USERS, about["features"].get("users"))
    item_ids, item_names, item_features = _read_table(folder / ITEMS, about["features"].get("items"))
    *_, contexts = _read_table(folder / CONTEXTS, about["features"].get("contexts"))
    arrays: dict[str, Any] = _part(numbers, "people")
    people = Population(
        about["name"],
        **arrays,
        n_items=about["n_items"],
        user_ids=user_ids,
        item_ids=item_ids,
        item_names=item_names,
        user_features=user_features,
        item_features=item_features,
        contexts=contexts,
        impressions=Impressions(**shown) if shown else None,
        elsewhere=UserItems(**there) if there else None,
        notes=tuple(about["population_notes"]),
    )
    avoid = _part(numbers, "avoid")
    fields: dict[str, Any] = {name: about[name] for name in SAID} | _part(numbers, "split")
    coded = {unit: _encoded(told, _part(numbers, f"coded/{unit}")) for unit, told in about["codes"].items()}
    return Split(
        people,
        **fields,
        unasked=_part(numbers, "unasked") or None,  # type: ignore[arg-type]
        shown=_part(numbers, "part") or None,  # type: ignore[arg-type]
        notes=tuple(about["notes"]),
        coded=coded,
        _avoid=(avoid["0"], avoid["1"]) if avoid else None,
    )


def _encoded(told: Mapping[str, Any], numbers: Arrays) -> Encoded:
    codes = {name: Code.from_json(code) for name, code in told["columns"].items()}
    columns = {
        name: EncodedColumn(numbers[name], code.size, code.kind, code.text, code.view) for name, code in codes.items()
    }
    return Encoded(columns, tuple(told["notes"]), codes)


def _part(numbers: Arrays, prefix: str) -> Arrays:
    return {n.removeprefix(f"{prefix}/"): values for n, values in numbers.items() if n.startswith(f"{prefix}/")}


def _write_table(path: Path, ids: pl.Series | None, names: pl.Series | None, features: Features | None) -> None:
    columns = [series.alias(name) for name, series in ((ID, ids), (NAME, names)) if series is not None]
    columns += [] if features is None else [series.alias(FEATURE + series.name) for series in features.table]
    if columns:
        content = io.BytesIO()  # polars has errors of its own for a full disk
        pl.DataFrame(columns).write_parquet(content)
        with replacing(path) as file:
            file.write(content.getbuffer())


def _read_table(
    path: Path, told: Mapping[str, Any] | None
) -> tuple[pl.Series | None, pl.Series | None, Features | None]:
    if not path.exists():
        return None, None, None
    table = pl.read_parquet(path)
    ids, names = (table[column] if column in table.columns else None for column in (ID, NAME))
    if told is None:
        return ids, names, None
    columns = [table[FEATURE + name].alias(name) for name in told["kinds"]]
    return ids, names, Features(pl.DataFrame(columns), told["kinds"], views=told["views"])
