"""Numbers of things, in words that agree with them."""

from __future__ import annotations

__all__ = ["several"]


def several(count: float, what: str, many: str = "") -> str:
    """So many of something; `many` is the plural, or the rest of the sentence where a verb agrees too.

    >>> several(1, "report"), several(1200, "report"), several(2, "person", "people")
    ('1 report', '1,200 reports', '2 people')
    >>> several(1, "user has", "users have"), several(3, "user has", "users have")
    ('1 user has', '3 users have')
    """
    return f"{count:,} {what if count == 1 else many or what + 's'}"
