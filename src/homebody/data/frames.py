"""Data frames of other libraries as polars frames: pandas, Arrow tables, and whatever speaks one of their protocols.

pandas and pyarrow are not needed: a pandas frame is read column by column, from its arrays.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol, TypeAlias

import numpy as np
import polars as pl

from homebody.errors import HomebodyError

__all__ = ["Frame", "as_polars", "is_frame"]

SHORT = 12
"""Characters of texts that polars keeps without a place elsewhere."""


class _ArrowStream(Protocol):
    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


class _Interchange(Protocol):
    def __dataframe__(self, nan_as_null: bool = False, allow_copy: bool = True) -> Any: ...


Frame: TypeAlias = pl.DataFrame | pl.LazyFrame | _ArrowStream | _Interchange
"""A pandas or polars frame, an Arrow table, or anything with `__arrow_c_stream__` or `__dataframe__`."""


def is_frame(source: object) -> bool:
    """Whether this is a frame, and not a path or a name.

    >>> is_frame(pl.DataFrame()), is_frame("ml-100k")
    (True, False)
    """
    known = hasattr(source, "__arrow_c_stream__") or hasattr(source, "__dataframe__") or _from_pandas(source)
    return isinstance(source, pl.DataFrame | pl.LazyFrame) or (known and not isinstance(source, type))


def as_polars(frame: Any, what: str = "the frame") -> pl.DataFrame:
    """The same columns; nothing is copied where that can be avoided. An index of pandas with a name is a column.

    >>> as_polars(pl.LazyFrame({"user": [1]})).columns
    ['user']
    """
    if isinstance(frame, pl.DataFrame):
        return frame
    if isinstance(frame, pl.LazyFrame):
        return frame.collect()
    if _from_pandas(frame):
        return _of_pandas(frame, what)
    try:
        return pl.DataFrame(frame if hasattr(frame, "__arrow_c_stream__") else _interchanged(frame))
    except pl.exceptions.DuplicateError:
        raise HomebodyError(f"{what[:1].upper()}{what[1:]} has several columns of one name: rename them.") from None
    except HomebodyError:
        raise
    except Exception as error:  # whatever the other library raises
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise HomebodyError(
            f"{what[:1].upper()}{what[1:]} of type {type(frame).__name__} cannot be read as a table: {reason}."
        ) from error


def _from_pandas(source: object) -> bool:
    return type(source).__module__.partition(".")[0] == "pandas"


def _interchanged(frame: Any) -> Any:
    """Pyarrow reads the older of the two protocols, which polars no longer does."""
    try:
        interchange = importlib.import_module("pyarrow.interchange")
    except ImportError:
        raise HomebodyError(
            f"A frame of type {type(frame).__name__} speaks the dataframe interchange protocol alone: install what "
            "reads it "
            "(pip install pyarrow), or give it as an Arrow table or a polars frame."
        ) from None
    return interchange.from_dataframe(frame)


def _of_pandas(frame: Any, what: str) -> pl.DataFrame:
    if not hasattr(frame, "columns"):
        raise HomebodyError(
            f"{what[:1].upper()}{what[1:]} is a pandas {type(frame).__name__}: give a DataFrame, with a column of "
            "users "
            "and one of items."
        )
    if any(name is not None for name in frame.index.names):
        index = frame.index.to_frame(index=False)
        named = [at for at, name in enumerate(frame.index.names) if name is not None]
        parts = [
            (frame.index.names[at], index.iloc[:, at]) for at in named if frame.index.names[at] not in frame.columns
        ]
    else:
        parts = []
    parts += [(name, frame.iloc[:, at]) for at, name in enumerate(frame.columns)]
    names = ["_".join(map(str, name)) if isinstance(name, tuple) else str(name) for name, _ in parts]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise HomebodyError(f"{what[:1].upper()}{what[1:]} has two columns called '{twice}': rename one of them.")
    return pl.DataFrame([_read(column, name, what) for name, (_, column) in zip(names, parts, strict=True)])


def _read(values: Any, name: str, what: str) -> pl.Series:
    try:
        return _column(values).alias(name)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise HomebodyError(f"The column '{name}' of {what} cannot be read: {reason}. Leave it out.") from error


def _column(values: Any) -> pl.Series:
    """A column of pandas."""
    dtype = values.dtype
    kind = getattr(dtype, "kind", "O")
    if hasattr(values, "cat"):
        names = _column(values.cat.categories.to_series())
        names = names.cast(pl.Categorical) if names.dtype == pl.String else names
        codes = pl.Series(values.cat.codes.to_numpy().astype(np.int64))
        return names.gather(codes.set(codes < 0, None))
    if hasattr(dtype, "pyarrow_dtype") or getattr(dtype, "storage", None) == "pyarrow":
        return _from_arrow(values)
    if hasattr(values, "sparse"):
        return _column(values.sparse.to_dense())
    if kind == "M":
        if getattr(dtype, "tz", None) is not None:
            values = values.dt.tz_convert("UTC").dt.tz_localize(None)
        return pl.Series(values.to_numpy().astype("datetime64[us]"))
    if kind == "m":
        return pl.Series(values.to_numpy().astype("timedelta64[us]"))
    if isinstance(dtype, np.dtype) and kind in "iufb":
        return pl.Series(values.to_numpy())
    if kind in "iufb":  # with a mask
        missing = pl.Series(values.isna().to_numpy(dtype=np.bool_))
        plain = values.fillna(False if kind == "b" else 0).to_numpy(dtype=dtype.numpy_dtype)
        known = pl.Series(plain)
        return known.set(missing, None) if missing.any() else known
    return _of_objects(values)


def _from_arrow(values: Any) -> pl.Series:
    array: Any = values.array.__arrow_array__()
    series = pl.from_arrow(array)
    assert isinstance(series, pl.Series)
    return series


def _of_objects(values: Any) -> pl.Series:
    """Python objects: texts, dates or numbers; of a mixture, what each is written as."""
    if (texts := _short_texts(values)) is not None:
        return texts
    try:
        codes, distinct = values.factorize()
    except TypeError:  # lists, which have no hash
        missing = values.isna().to_numpy(dtype=np.bool_)
        return pl.Series([None if gone else value for gone, value in zip(missing, values.tolist(), strict=True)])
    listed = [_plain(value) for value in distinct.tolist()]
    try:
        names = pl.Series(listed, strict=True) if listed else pl.Series([], dtype=pl.String)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        names = pl.Series([str(value) for value in listed], dtype=pl.String)
    if names.dtype == pl.Object:
        names = pl.Series([str(value) for value in listed], dtype=pl.String)
    if names.dtype == pl.String:
        names = names.cast(pl.Categorical)  # each text stays where it is, once
    places = pl.Series(codes.astype(np.int64))
    return names.gather(places.set(places < 0, None) if (codes < 0).any() else places)


def _short_texts(values: Any) -> pl.Series | None:
    """Texts that polars keeps in 16 bytes each, which is faster than finding the distinct ones; None for others."""
    lengths = [len(text) for text in values.head(1000).tolist() if isinstance(text, str)]
    if not lengths or sum(lengths) > SHORT * len(lengths):
        return None
    for nothing in ({}, {"na_value": None}):  # to look for NaN takes as long as to read the texts
        try:
            return pl.Series(values.to_numpy(dtype=object, **nothing).tolist(), dtype=pl.String, strict=True)
        except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
            pass
    return None  # not texts alone


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
