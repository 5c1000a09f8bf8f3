"""What `homebody data info` prints: a summary's numbers, and a chart of how active people are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from homebody import screen
from homebody.data.summary import Bin, FeatureSummary, Summary

__all__ = ["print_summary"]

BAR = 32
"""Columns of the longest bar; with its labels it fits 80."""


def print_summary(summary: Summary, notes: Sequence[str] = ()) -> None:
    """To standard output; the notes, which say what was guessed or left out, first."""
    console = screen.console()
    screen.say(console, *notes, *([""] if notes else []))
    table = Table(show_header=False, box=None)
    for label, value in _lines(summary):
        table.add_row(label, Text(value))
    screen.show(console, table)
    screen.say(console, "", " users by number of interactions")
    block = "█" if console.encoding.lower().startswith("utf") else "#"
    screen.show(console, Padding(_chart(summary.activity, block), (0, 0, 0, 2)))
    sections = {"user features": summary.user_features, "item features": summary.item_features}
    for title, columns in {**sections, "contexts": summary.contexts}.items():
        if columns:
            screen.say(console, "", f" {title}")
            screen.show(console, Padding(_columns(columns), (0, 0, 0, 2)))


def _chart(bins: Sequence[Bin], block: str) -> Table:
    """A bar for each bin from the first that has someone."""
    first = next(place for place, bin_ in enumerate(bins) if bin_.users)
    most = max(bin_.users for bin_ in bins)
    table = Table(show_header=False, box=None)
    table.add_column(justify="right")
    table.add_column(justify="right")
    for bin_ in bins[first:]:
        span = f"{bin_.least:,}" if bin_.least == bin_.most else f"{bin_.least:,} to {bin_.most:,}"
        # Whoever is there is seen, however few.
        length = max(round(BAR * bin_.users / most), int(bin_.users > 0))
        table.add_row(span, f"{bin_.users:,}", block * length)
    return table


def _columns(columns: Sequence[FeatureSummary]) -> Table:
    table = Table(show_header=False, box=None)
    for column in columns:
        missing = f"{column.missing:.1%} missing" if column.missing else ""
        view = f"view {column.view}" if column.view else ""
        table.add_row(Text(column.name), column.kind, f"{column.distinct:,} distinct", missing, view)
    return table


def _lines(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "population", summary.name
    yield "users", f"{summary.users:,}"
    unseen = f" ({summary.unseen_items:,} that nobody touched)" if summary.unseen_items else ""
    yield "items", f"{summary.items:,}{unseen}"
    yield "interactions", f"{summary.interactions:,} ({summary.duplicates:,} repeat an item)"
    if summary.elsewhere:
        yield "elsewhere", f"{summary.elsewhere:,} interactions in another app: not learnt from, asked or ranked"
    yield "sparsity", f"{summary.sparsity:.2%} of user-item pairs never met"
    middle = f"median {summary.median:,.1f}, mean {summary.mean:,.1f}"
    yield "per user", f"least {summary.shortest:,}, {middle}, most {summary.longest:,}"
    yield "popularity", f"the top tenth of items has {summary.top_tenth:.1%} of the interactions"
    if summary.tied_users is not None and summary.first_time is not None and summary.last_time is not None:
        first, last = _moments(summary.first_time, summary.last_time)
        yield "times", f"{first} to {last}"
        yield "tied times", f"{summary.tied_users:.1%} of users; their order is the file's"
    else:
        yield "times", "none"
    yield "ratings", "none" if summary.ratings is None else f"{summary.ratings[0]:g} to {summary.ratings[1]:g}"
    if summary.names:
        yield "most popular", "; ".join(summary.names)
    for title, columns in (("user features", summary.user_features), ("item features", summary.item_features)):
        if not columns:
            yield title, "none"
    if summary.impressions is not None:
        shown = summary.impressions
        clicks = f"{shown.clicked:,} of {shown.shown:,} items clicked"
        yield "impressions", f"{shown.impressions:,} of {shown.users:,} users; {clicks}"


def _moments(first: int, last: int) -> tuple[str, str]:
    """Dates where the last is plainly in seconds, or thousandths of seconds and so on, since 1970; otherwise numbers.

    >>> _moments(-428_720_400, 1_304_892_000), _moments(3, 70)
    (('1956-05-31 23:00', '2011-05-08 22:00'), ('3', '70'))
    >>> _moments(1_704_067_200_000, 1_721_260_800_000)
    ('2024-01-01 00:00', '2024-07-18 00:00')
    """
    for unit in (1, 10**3, 10**6, 10**9):
        # Above one second, only times of 1992 to 2039 are plainly such.
        least, most = (10**8, 10**10) if unit == 1 else (int(7e8), int(2.2e9))
        if least < last // unit < most and first // unit > -(10**10):
            epoch = datetime(1970, 1, 1, tzinfo=UTC)
            start, end = (f"{epoch + timedelta(seconds=time // unit):%Y-%m-%d %H:%M}" for time in (first, last))
            return start, end
    return f"{first:,}", f"{last:,}"
