"""Which column is which: what people call users, items, times and ratings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Literal

from homebody.data.columns import listed, single, usual
from homebody.data.origins import Origin, option
from homebody.errors import HomebodyError

__all__ = ["LIKELY_NAMES", "USUAL_NAMES", "Role", "choose_columns", "likely", "said"]

Role = Literal["user", "item", "time", "rating"]
USUAL_NAMES = {
    "user": ("user", "userid"),
    "item": ("item", "itemid", "movieid"),
    "time": ("time", "timestamp"),
    "rating": ("rating",),
}
"""Names that say what a column is. Two of them in one file must be told apart by its owner."""


def _ids(names: str) -> str:
    return " ".join(f"{name}id" for name in names.split())


_THINGS = (
    "product article movie film book news track song artist album video game app anime recipe restaurant business "
    "venue poi listing offer course podcast beer content document doc page post story joke paper repo hotel event"
)
_PEOPLE = (
    "customer reviewer person member visitor client account reader listener viewer player student subscriber buyer "
    "shopper borrower patron profile author people"
)
_LIKELY = {
    "user": f"uid usr useridx userno usernumber usercode userkey userhash userindex {_ids(_PEOPLE)} username custid "
    f"customerno customernumber {_PEOPLE} sessionid session deviceid",
    "item": "iid itemidx itemno itemnumber itemcode itemkey itemindex asin parentasin isbn sku ean gtin "
    f"stockcode productcode goodsid adid urlid {_ids(_THINGS)} {_THINGS} itemname url",
    "time": "ts datetime unixtime unixtimestamp unixreviewtime eventtime eventtimestamp timestampms timems createdat "
    "created createdate creationdate ratedat ratingtime reviewtime purchasedat orderedat viewedat watchedat readat "
    "playedat clickedat visitedat occurredat happenedat updatedat invoicedate orderdate purchasedate transactiondate "
    "reviewdate ratingdate eventdate dateadded tdat at date day when",
    "rating": "ratings stars star score overall grade userrating reviewrating bookrating starrating ratingscore "
    "userscore reviewscore ratingvalue",
}
LIKELY_NAMES = {role: names.split() for role, names in _LIKELY.items()}
"""Names that probably say so; the first that a file has is taken."""


def likely(present: list[str], role: str) -> str | None:
    """The column that is probably of this role, by a name that people often give it.

    >>> likely(["reviewerID", "asin", "unixReviewTime", "reviewTime"], "time")
    'unixReviewTime'
    """
    return next((found[0] for name in LIKELY_NAMES[role] if (found := usual(present, {name}))), None)


def choose_columns(
    path: Origin,
    present: list[str],
    given: Mapping[str, str | None],
    *,
    required: Collection[str] = ("user", "item"),
    separator: str | None = None,
    headless: bool = False,
) -> dict[str, str]:
    """The column of each role: as given, or by its usual or likely names. Columns that are not required may be missing.

    headless: the file has no header, so that its first column has the users and its second the items, if nothing else
    is said. separator: one that the only column's name may hold, for the error.

    >>> from pathlib import Path
    >>> roles = ("user", "item", "time", "rating")
    >>> choose_columns(Path("a.csv"), ["customer", "asin", "date", "stars"], dict.fromkeys(roles))
    {'user': 'customer', 'item': 'asin', 'time': 'date', 'rating': 'stars'}
    """
    chosen: dict[str, str] = {}
    missing: list[str] = []
    taken = {name for name in given.values() if name}
    for role, name in given.items():
        if name and name not in present:
            raise HomebodyError(
                f"{path} has no column '{name}' ({option(path, f'{role}_col')}); its columns are {listed(present)}."
            )
        if name is None:
            free = [each for each in present if each not in taken or each in usual(present, USUAL_NAMES[role])]
            remedy = f"name one with {option(path, f'{role}_col')}"
            name = single(path, role, usual(free, USUAL_NAMES[role]), remedy)
            name = name or likely([each for each in free if each not in chosen.values()], role)
            if name is None and headless and role in ("user", "item"):
                place = ("user", "item").index(role)
                name = present[place] if place < len(present) and present[place] not in taken else None
        if name:
            chosen[role] = name
        elif role in required:
            missing.append(role)
    if missing:
        raise _unknown(path, present, missing, separator)
    for role, other in combinations(chosen, 2):
        if chosen[role] == chosen[other]:
            raise HomebodyError(
                f"The {role} and the {other} of {path} cannot both be in the column '{chosen[role]}'; name two with "
                f"{option(path, f'{role}_col')} and {option(path, f'{other}_col')}."
            )
    return chosen


def _unknown(path: Origin, present: list[str], roles: Sequence[str], separator: str | None) -> HomebodyError:
    hint = ""
    if separator is not None:
        word = {" ": "space", "\t": "tab", "\x01": "\\x01", "\x1f": "\\x1f"}.get(separator, separator)
        hint = f" (if that is one line of several values, give {option(path, 'separator', word)})"
    elif any(_is_value(name) for name in present):
        hint = f" (if the file has no header line, give {option(path, 'no_header')})"
    options = " and ".join(option(path, f"{role}_col") for role in roles)
    which, them = ("Which column", "it") if len(roles) == 1 else ("Which columns", "them")
    what = f"{'is' if len(roles) == 1 else 'are'} the {' and the '.join(roles)}"
    return HomebodyError(
        f"{which} of {path} {what}? Name {them} with {options}; its columns are {listed(present)}{hint}."
    )


def _is_value(name: str) -> bool:
    """Whether this looks like a number or a date rather than like the name of a column."""
    bare = name.strip().lstrip("-")
    return bool(bare) and bare[0].isdigit() and sum(char.isalpha() for char in bare) <= 1


def said(path: Origin, chosen: Mapping[str, str], given: Mapping[str, str | None]) -> Iterable[str]:
    """The sentence on the columns that were found by their names.

    >>> from pathlib import Path
    >>> print(*said(Path("a.csv"), {"user": "who", "item": "asin"}, {"user": "who", "item": None}))
    a.csv: took asin for items (--item-col takes another).
    """
    found = {role: name for role, name in chosen.items() if not given.get(role)}
    if not found:
        return
    parts = ", ".join(f"{name} for {role}s" for role, name in found.items())
    options = [option(path, f"{role}_col") for role in found]
    takes = (
        f"{', '.join(options[:-1])} and {options[-1]} take others"
        if len(options) > 1
        else f"{options[0]} takes another"
    )
    yield f"{path.name}: took {parts} ({takes})."
