"""Dates as people write them, as moments.

ISO dates are read first. Other forms are rewritten as ISO dates: with the names of months, the year last, a clock of 12
hours, a named zone. Where the year is last and no month is named, the day or the month may come first: the values say
which, if any of them goes beyond 12.
"""

from __future__ import annotations

import polars as pl

__all__ = ["EITHER_WAY", "compact", "day_first", "iso", "moments", "with_format"]

# After `T` and `Z` have been spelled out.
ISO_FORMATS = (
    "%Y-%m-%d %H:%M:%S%.f",
    "%Y-%m-%d %H:%M:%S%.f%:z",
    "%Y-%m-%d %H:%M:%S%.f%z",
    "%Y-%m-%d",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%d %H:%M%:z",
)
LATER_FORMATS = (*ISO_FORMATS, "%Y-%m-%d %H:%M:%S%.f %z", "%Y-%m-%d %I:%M:%S %p", "%Y-%m-%d %I:%M %p")
_NAMES = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
MONTHS = {name: number for number, name in enumerate(_NAMES, start=1)}
_CLOCK = r"((?:[ ,T:]+\d{1,2}:\d{2}.*)?)$"
_NUMBERS = r"^(\d{1,2})[/.-](\d{1,2})[/.-](\d{4}|\d{2})" + _CLOCK
_AMAZON = r"^(\d{1,2}) (\d{1,2}), (\d{4})$"
EITHER_WAY = ("%d/%m/%Y", "%m/%d/%Y")
"""Day first, or month first."""
COMPACT = r"^(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])$"


def moments(text: pl.Series, first_is_day: bool | None = None) -> pl.Series:
    """Moments in UTC; null where there is no date. first_is_day: of a date that ends in its year (`day_first`).

    >>> forms = ["2024-02-01T10:00:00Z", "2024/02/01", "1 Feb 2024", "Feb 1, 2024", "Thu Feb  1 10:00:00 2024"]
    >>> [str(moments(pl.Series([form]))[0]) for form in forms[:3]]
    ['2024-02-01 10:00:00', '2024-02-01 00:00:00', '2024-02-01 00:00:00']
    >>> str(moments(pl.Series(["1/2/2024 3:05 PM"]), first_is_day=True)[0])
    '2024-02-01 15:05:00'
    """
    found = iso(text)
    if found.null_count() == text.null_count():
        return found
    others = _parsed(_as_iso(text, first_is_day), LATER_FORMATS)
    return found.zip_with(found.is_not_null(), others)


def iso(text: pl.Series) -> pl.Series:
    """Moments in UTC of ISO dates; null where there is none.

    >>> str(iso(pl.Series(["2024-02-01T10:00:00+01:00"]))[0])
    '2024-02-01 09:00:00'
    """
    return _parsed(text.str.replace(r"^(\d{4}-\d{2}-\d{2})[Tt]", "$1 ").str.replace(r"[Zz]$", "+00:00"), ISO_FORMATS)


def day_first(text: pl.Series) -> bool | None:
    """Whether the day comes before the month in dates that end in their year; None where the values allow both.

    >>> day_first(pl.Series(["13/02/2024", "1/2/2024"])), day_first(pl.Series(["1.2.2024"]))
    (True, True)
    >>> day_first(pl.Series(["02/13/2024"])), day_first(pl.Series(["1/2/2024"]))
    (False, None)
    """
    parts = text.str.extract_groups(_NUMBERS).struct.unnest()
    first, second = (parts[name].cast(pl.Int32) for name in parts.columns[:2])
    if first.null_count() == len(first):
        return False  # nothing of this form
    if (first > 12).any() or (second > 12).any():
        return int((first > 12).sum()) >= int((second > 12).sum())
    # With points between them, the day comes first wherever such dates are written.
    return True if text.str.contains(r"^\d{1,2}\.\d{1,2}\.").any() else None


def compact(values: pl.Series) -> pl.Series | None:
    """Moments of dates that are written as one number, 20240201; None where they are not.

    >>> compact(pl.Series([20240201])).dt.year().to_list()
    [2024]
    """
    if not (values.dtype.is_integer() or values.dtype == pl.String):
        return None
    start = values.drop_nulls().head(100).cast(pl.String)
    if not len(start) or not start.str.contains(COMPACT).all():
        return None
    text = values.cast(pl.String)
    return text.str.to_datetime("%Y%m%d", time_unit="us", strict=False) if text.str.contains(COMPACT).all() else None


def with_format(text: pl.Series, form: str) -> pl.Series:
    """Moments in UTC by a format such as %d/%m/%Y; null where a value does not follow it.

    >>> with_format(pl.Series(["01/02/2024", "x"]), "%d/%m/%Y").dt.month().to_list()
    [2, None]
    """
    return _parsed(text, (form,))


def _parsed(text: pl.Series, forms: tuple[str, ...]) -> pl.Series:
    dates = pl.Series([None], dtype=pl.Datetime("us")).new_from_index(0, len(text))
    for form in forms:
        if dates.null_count() == text.null_count():
            break
        parsed = text.str.to_datetime(form, time_unit="us", strict=False)
        zoned = "z" in form.replace("%%", "")
        moment = parsed.dt.convert_time_zone("UTC").dt.replace_time_zone(None) if zoned else parsed
        dates = dates.zip_with(dates.is_not_null(), moment)
    return dates


def _as_iso(text: pl.Series, first_is_day: bool | None) -> pl.Series:
    """The same dates, with year, month and day in this order."""
    text = text.str.replace(r"^[A-Za-z]{3,9}, +", "")  # the day of the week
    text = text.str.replace(r" *\(?(?:UTC|GMT|Z)\)?$", "+0000").str.replace(r"(:\d{2}),(\d)", "$1.$2")
    # Thu Feb 01 10:00:00 +0000 2024
    text = text.str.replace(r"^[A-Za-z]{3} ([A-Za-z]{3}) +(\d{1,2}) ([\d:]{8})( [+-]\d{4})? (\d{4})$", "$2 $1 $5 $3$4")
    text = text.str.replace(r"^([A-Za-z]{3})[a-z]*\.? +(\d{1,2})(?:st|nd|rd|th)?,? +(\d{4})" + _CLOCK, "$2 $1 $3$4")
    named = text.str.extract_groups(r"^(\d{1,2})[ -/.]+([A-Za-z]{3})[a-z]*[ -/.,]+(\d{4})" + _CLOCK).struct.unnest()
    day, month, year, clock = (named[name] for name in named.columns)
    number = month.str.to_lowercase().replace_strict(MONTHS, default=None, return_dtype=pl.Int32)
    text = _iso(text, year, number, day, clock)
    text = text.str.replace(r"^(\d{4})[/.](\d{1,2})[/.](\d{1,2})", "$1-$2-$3")
    text = text.str.replace(_AMAZON, "$3-$1-$2")
    parts = text.str.extract_groups(_NUMBERS).struct.unnest()
    first, second, year, clock = (parts[name] for name in parts.columns)
    century = pl.select(
        pl.when(year.str.len_chars() == 4)
        .then(year)
        .when(year.cast(pl.Int32, strict=False) < 70)
        .then("20" + year)
        .otherwise("19" + year)
    ).to_series()
    day, month = (first, second) if first_is_day else (second, first)
    return _iso(text, century, month, day, clock)


def _iso(text: pl.Series, year: pl.Series, month: pl.Series, day: pl.Series, clock: pl.Series) -> pl.Series:
    """These parts as a date where they are known, otherwise the text."""
    date = year + "-" + month.cast(pl.String) + "-" + day
    whole = date + (" " + clock.str.strip_chars(" ,T:"))
    return whole.str.strip_chars().zip_with(whole.is_not_null(), text)
