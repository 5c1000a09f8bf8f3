"""Errors are sentences for the person who reads them. Numbers in a sentence agree with their words."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

__all__ = [
    "Abandoned",
    "Diverged",
    "HomebodyError",
    "Unavailable",
    "in_short",
    "install",
    "refuse_unknown",
    "several",
    "unknown_name",
]


class HomebodyError(Exception):
    """Something the person at the keyboard can put right; the command line exits with code 2.

    >>> raise HomebodyError("Rounds must be at least 1, not 0.")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: Rounds must be at least 1, not 0.
    """


class Diverged(HomebodyError):
    """Training left the finite numbers; the same recipe would do it again."""


class Abandoned(HomebodyError):
    """Too few devices answered a round in time: what came is thrown away, and the round may be tried again."""


class Unavailable(HomebodyError):
    """Something is wanting that may come back by itself, such as room on a disk: the same may work later."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> HomebodyError:
    """An error that names what was given, the nearest known name, and all the others.

    >>> print(unknown_name("method", "pfedrek", ["pfedrec", "fedmf"]))
    There is no method 'pfedrek'; did you mean 'pfedrec'? Known: fedmf, pfedrec.
    >>> print(unknown_name("method", "FedMF", ["pfedrec", "fedmf"]))
    There is no method 'FedMF'; did you mean 'fedmf'? Known: fedmf, pfedrec.
    """
    names = sorted(known)
    lower = {each.lower(): each for each in reversed(names)}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.5)
    hint = f"; did you mean '{lower[near[0]]}'?" if near else "."
    return HomebodyError(f"There is no {kind} '{name}'{hint} Known: {', '.join(names)}.")


def refuse_unknown(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise `unknown_name` for the first of these names that is not known.

    >>> refuse_unknown("method", ["pfedrec"], {"pfedrec", "fedmf"})
    """
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)


def in_short(given: object) -> str:
    """What was given, for a sentence: itself if that is short, otherwise its type.

    >>> in_short("synthetic"), in_short([0] * 100)
    ("'synthetic'", 'this list')
    """
    text = repr(given)
    return text if len(text) <= 60 and "\n" not in text else f"this {type(given).__name__}"


def install(extra: str) -> str:
    """The command that installs an extra, and where to give it. The package is on no index: it is never asked for by
    its name.

    >>> print(f"Spreadsheets need the extra: {install('files')}.")
    Spreadsheets need the extra: pip install '.[files]' in Homebody's clone.
    """
    return f"pip install '.[{extra}]' in Homebody's clone"


def several(count: float, what: str, many: str = "") -> str:
    """So many of something; `many` is the plural, or the rest of the sentence where a verb agrees too.

    >>> several(1, "report"), several(1200, "report"), several(2, "person", "people")
    ('1 report', '1,200 reports', '2 people')
    >>> several(1, "user has", "users have"), several(3, "user has", "users have")
    ('1 user has', '3 users have')
    """
    return f"{count:,} {what if count == 1 else many or what + 's'}"
