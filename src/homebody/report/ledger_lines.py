"""A ledger, read line by line: rows by release, and equal rounds that follow one another as one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from homebody.privacy import Charge, Entry, Ledger, Observer, Unit, event_from_json

__all__ = ["VOCABULARY", "Release", "lines_of", "releases_of"]

VOCABULARY = "vocabulary of "
"""How releases begin that are no rounds: counts of people's values, before training."""
_ROUND = re.compile(r"(?P<phase>.+)/(?P<round>\d+)(?:#(?P<again>\d+))?")


@dataclass(frozen=True)
class Release:
    """All rows of one release; two that told the same have the same `told`."""

    name: str
    told: tuple[tuple[str, str, str, str], ...]
    """Part, observer, unit and event."""
    code: str | None

    def charges(self) -> list[Charge]:
        """The rows, as they were charged."""
        return [
            Charge(cast(Observer, who), cast(Unit, unit), event_from_json(event), part)
            for part, who, unit, event in self.told
        ]


def releases_of(entries: Iterable[Entry]) -> Iterator[Release]:
    """The rows by release, oldest first."""
    rows: dict[str, list[Entry]] = {}
    for entry in entries:
        rows.setdefault(entry.release, []).append(entry)
    for name, own in rows.items():
        told = tuple((entry.part, entry.observer, entry.unit, entry.event) for entry in own)
        yield Release(name, told, own[0].code)


def lines_of(releases: Sequence[Release], delta: float) -> list[dict[str, Any]]:
    """The ledger with equal rounds that follow one another put into one line."""
    lines: list[dict[str, Any]] = []
    last: tuple[object, ...] = ()
    for release in releases:
        match = _ROUND.fullmatch(release.name)
        phase, number, again = (match["phase"], int(match["round"]), match["again"]) if match else ("", 0, None)
        key = (phase, again, release.told, release.code)
        if match and last == (*key, number - 1):
            lines[-1]["last"], lines[-1]["count"] = number, lines[-1]["count"] + 1
        else:
            lines.append(
                {
                    "release": release.name,
                    "phase": phase or release.name,
                    "first": number if match else None,
                    "last": number if match else None,
                    "time": int(again) if again else 1,
                    "count": 1,
                    "code": release.code,
                    "told": _told(release, delta),
                }
            )
        last = (*key, number)
    for line in lines:
        line["rounds"] = _rounds(line)
    return lines


def _rounds(line: Mapping[str, Any]) -> str:
    """Which releases a line is about, in words."""
    if line["first"] is None:
        return str(line["release"])
    if line["first"] == line["last"]:
        text = f"{line['phase']}, round {line['first']:,}"
    else:
        text = f"{line['phase']}, rounds {line['first']:,}–{line['last']:,}"
    return text if line["time"] == 1 else f"{text}, released again (time {line['time']})"


def _told(release: Release, delta: float) -> list[dict[str, Any]]:
    """What one release tells, once for all observers who are told the same."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for part, who, unit, text in release.told:
        groups.setdefault((part, unit, text), []).append(who)
    out = []
    for (part, unit, text), observers in groups.items():
        event = event_from_json(text)
        alone = Charge("server", cast(Unit, unit), event)
        out.append(
            {
                "observers": observers,
                "unit": unit,
                "part": part,
                "what": str(event),
                "relation": event.relation,
                "sampling": str(event.sampling),
                "epsilon_of_one": Ledger().epsilon("server", cast(Unit, unit), delta=delta, also=[alone]).epsilon,
            }
        )
    return out
