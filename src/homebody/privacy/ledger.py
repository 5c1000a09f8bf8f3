"""The append-only record of every privacy charge, each row chained to the one before it by a hash."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from homebody.database import Database, connect
from homebody.errors import HomebodyError, several
from homebody.markup import html
from homebody.privacy.accountant import Bound, epsilon, within
from homebody.privacy.events import OBSERVERS, Charge, Event, NonPrivate, Observer, Unit, event_from_json
from homebody.settings import DELTA

__all__ = ["DELTA", "Entry", "Ledger"]

_GENESIS = "0" * 64
_COLUMNS = "id, release, part, observer, unit, event, round, relation, sampling, code, digest, previous, hash"
_INSERT = f"INSERT INTO charge ({_COLUMNS}) VALUES ({', '.join('?' * (_COLUMNS.count(',') + 1))})"
_TABLE = """
CREATE TABLE charge (
    id INTEGER PRIMARY KEY,
    release TEXT NOT NULL,
    part TEXT NOT NULL,
    observer TEXT NOT NULL,
    unit TEXT NOT NULL,
    event TEXT NOT NULL,
    previous TEXT NOT NULL,
    hash TEXT NOT NULL,
    UNIQUE (release, part, observer, unit)
);
"""
_SCHEMA = f"""{_TABLE}
CREATE TRIGGER charge_is_never_changed BEFORE UPDATE ON charge
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER charge_is_never_removed BEFORE DELETE ON charge
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
"""
_SECOND = """
ALTER TABLE charge ADD COLUMN round INTEGER;
ALTER TABLE charge ADD COLUMN relation TEXT;
ALTER TABLE charge ADD COLUMN sampling TEXT;
ALTER TABLE charge ADD COLUMN code TEXT;
"""
_THIRD = "ALTER TABLE charge ADD COLUMN digest TEXT;"
_STEPS = (_SCHEMA, _SECOND, _THIRD)
"""The statements that carry each schema forward to the next."""
_IN_POSTGRESQL = f"""{_TABLE}
CREATE FUNCTION charge_is_append_only() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE 'the ledger is append-only' USING ERRCODE = 'integrity_constraint_violation'; END $$;
CREATE TRIGGER charge_is_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON charge
EXECUTE FUNCTION charge_is_append_only();
"""


class Entry(NamedTuple):
    """One row: which release told whom what.

    Rows of the first schema have no round, relation, sampling or code; those of the first two have no digest.
    """

    id: int
    release: str
    part: str
    observer: str
    unit: str
    event: str
    """The event as JSON, relation and sampling included; ε is derived from it alone."""
    round: int | None
    """The number of the round within its phase; 0: the release is not a round."""
    relation: str | None
    sampling: str | None
    code: str | None
    """What caused it: method and version."""
    digest: str | None
    """A digest of everything that shapes the release; None: not recorded."""
    previous: str
    hash: str


class Ledger:
    """Charged before anything is released; answers ε for an observer.

    A release has a name; a name that is known counts again, under a number. Only one that repeats an earlier
    release bit by bit, as a resumed simulation does, tells nothing more: it must have the same digest, which stands
    for everything that shapes it.

    >>> from homebody.privacy import GaussianRelease
    >>> ledger = Ledger()
    >>> ledger.epsilon("server").epsilon
    0.0
    >>> charges = [
    ...     Charge("server", "user", NonPrivate("plain updates")),
    ...     Charge("public", "user", GaussianRelease(4, "replace-one")),
    ... ]
    >>> ledger.charge("train/1", charges, digest="factors=8")
    >>> ledger.charge("train/1", charges, digest="factors=8", repeat=True)
    >>> ledger.charge("train/1", charges, digest="factors=9", repeat=True)
    >>> [entry.release for entry in ledger.entries() if entry.observer == "public"]
    ['train/1', 'train/1#2']
    >>> {who: round(value, 2) for who, value in ledger.epsilons(delta=1e-5).items()}
    {'server': inf, 'clients': 0.0, 'public': 1.36}
    >>> ledger.charge("train/2", [Charge("views", "user", GaussianRelease(1, "add-remove"))])
    >>> ledger.observers()
    ('server', 'clients', 'public', 'views')
    >>> ledger
    <Ledger: 5 charges for 3 releases; ε of one person at δ = 1e-06: server ∞, clients 0, public 1.54, views 4.89>
    """

    def __init__(self, path: Path | Database | None = None) -> None:
        """path: a file, created if missing; or a database that the caller shares and closes; None: in memory."""
        self._counts: dict[tuple[str, str], _Counts] = {}
        self._own, self._closed = not isinstance(path, Database), False
        self._db = path if isinstance(path, Database) else connect(path, what="ledger")
        self.path = path.name if isinstance(path, Database) else path
        self._undone = self._db.undone
        try:
            self._db.migrate("ledger", _STEPS, postgresql=(_IN_POSTGRESQL, _SECOND, _THIRD), header=True)
            self.verify()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        if self._closed:
            return "<Ledger: closed>"
        held = ", ".join(f"{who} {_text(value)}" for who, value in self.epsilons().items())
        return f"<Ledger: {self._size()}; ε of one person at δ = {DELTA:g}: {held}>"

    def _repr_html_(self) -> str:
        if self._closed:
            return html("Ledger: closed")
        title = f"Ledger: {self._size()}"
        rows = []
        for observer in self.observers():
            bound = self.epsilon(observer)
            by = bound.accountant if bound.accountant != "none" else ""
            rows.append((observer, _text(bound.epsilon), by, " ".join(bound.notes)))
        return html(title, ("observer", f"ε of one person, δ = {DELTA:g}", "by", "what it rests on"), rows)

    def _size(self) -> str:
        (charges,) = self._db.execute("SELECT COUNT(*) FROM charge").fetchone()
        return f"{several(int(charges), 'charge')} for {several(self.releases(), 'release')}"

    def charge(
        self,
        release: str,
        charges: Sequence[Charge],
        *,
        repeat: bool = False,
        number: int = 0,
        code: str = "",
        digest: str = "",
    ) -> None:
        """Write down what the release will tell, before it happens: all of it, or nothing.

        repeat: if this release is known with this digest, it is the same one, run again bit by bit; otherwise it is
        charged in full. digest: of everything that shapes the release. number, code: which round it is, and what
        causes it.
        """
        with self._db.transaction():
            if repeat and (same := self._same(release, digest)):
                self._check_same(same, charges)
                return
            known = self._times(release)
            name = f"{release}#{known + 1}" if known else release
            last = self._db.execute("SELECT id, hash FROM charge ORDER BY id DESC LIMIT 1").fetchone()
            before, previous = last or (0, _GENESIS)
            for place, charge in enumerate(charges, before + 1):
                what = (charge.event.relation, str(charge.event.sampling), code, digest)
                row = (name, charge.part, charge.observer, charge.unit, charge.as_json(), number, *what, previous)
                previous = _hash(*row)
                self._db.execute(_INSERT, (place, *row, previous))

    def knows(self, release: str) -> bool:
        """Whether a release of this name was charged."""
        return self._times(release) > 0

    def repeats(self, release: str, digest: str = "") -> bool:
        """Whether `charge` with `repeat` would add nothing: this release was charged with this digest."""
        return self._same(release, digest) is not None

    def digests(self) -> list[str]:
        """The digests of its releases, each once, in the order of their first charges; "" stands for none recorded."""
        query = "SELECT COALESCE(digest, '') FROM charge GROUP BY COALESCE(digest, '') ORDER BY MIN(id)"
        return [digest for (digest,) in self._db.execute(query).fetchall()]

    def entries(self) -> list[Entry]:
        """Every row, oldest first."""
        return [Entry(*row) for row in self._rows()]

    def releases(self) -> int:
        """How many releases were charged."""
        (count,) = self._db.execute("SELECT COUNT(DISTINCT release) FROM charge").fetchone()
        return int(count)

    def epsilon(
        self, observer: Observer, unit: Unit = "user", *, delta: float = DELTA, also: Sequence[Charge] = ()
    ) -> Bound:
        """The ε certified against this observer over everything released so far, and over `also`.

        A person's releases compose. One report is in one release alone, so ε for a report is that of the worst one.
        What was charged for a person holds for each of their interactions and reports, unless those were charged too.
        """
        return max((_epsilon(events, delta) for events in self._about(observer, unit, also)), key=lambda b: b.epsilon)

    def epsilons(self, delta: float = DELTA) -> dict[str, float]:
        """ε for each observer, about one person."""
        return {observer: _value(*self._about(observer, "user", ()), delta) for observer in self.observers()}

    def observers(self) -> tuple[Observer, ...]:
        """Those whom every run has, and whoever else was charged."""
        charged = {who for (who,) in self._db.execute("SELECT DISTINCT observer FROM charge").fetchall()}
        return (*OBSERVERS, *(who for who in get_args(Observer) if who in charged and who not in OBSERVERS))

    def within(
        self, target: float, observer: Observer, unit: Unit = "user", *, delta: float, also: Sequence[Charge] = ()
    ) -> bool:
        """Whether ε stays within the target: what `epsilon` would say, by the cheapest accountant that can tell."""
        return all(within(dict(events).items(), target, delta) for events in self._about(observer, unit, also))

    def copy_to(self, path: Path) -> None:
        """Write all charges, with their hashes, into a new ledger file."""
        copy = Ledger(path)
        try:
            with copy._db.transaction():
                for row in self._rows():
                    copy._db.execute(_INSERT, row)
            copy.verify()
        finally:
            copy.close()

    def verify(self) -> None:
        """Refuse a ledger whose chain is broken."""
        previous = _GENESIS
        for place, *row, chained, digest in self._rows():
            if chained != previous or digest != _hash(*row, chained):
                raise HomebodyError(f"The ledger {self.path} was tampered with: row {place} breaks its chain.")
            previous = digest

    def close(self) -> None:
        """Close the file; a shared database stays open."""
        if self._own:
            self._closed = True
            self._db.close()

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        return self._db.rows(f"SELECT {_COLUMNS} FROM charge ORDER BY id")

    def _times(self, release: str) -> int:
        """How many releases have this name, numbered ones included."""
        row = self._db.execute("SELECT 1 FROM charge WHERE release = ? LIMIT 1", (release,)).fetchone()
        if not row:
            return 0
        again = "SELECT COUNT(DISTINCT release) FROM charge WHERE release > ? AND release < ?"
        (count,) = self._db.execute(again, (f"{release}#", f"{release}$")).fetchone()  # $ is next after #
        return 1 + int(count)

    def _same(self, release: str, digest: str) -> str | None:
        """The release of this name, or of one of its numbers, that has this digest."""
        query = (
            "SELECT release FROM charge WHERE digest = ? AND (release = ? OR (release > ? AND release < ?)) "
            "ORDER BY id LIMIT 1"
        )
        row = self._db.execute(query, (digest, release, f"{release}#", f"{release}$")).fetchone()
        return row[0] if row else None

    def _about(self, observer: Observer, unit: Unit, also: Sequence[Charge]) -> list[_Events]:
        """The events that ε is composed of; several lists if ε is the largest of several."""
        known = self._caught_up(observer, unit)
        counts, single = known.composed.copy(), set(known.single)
        named = {charge.part for charge in also if (charge.observer, charge.unit) == (observer, unit)}
        for charge in also:
            if charge.observer != observer:
                continue
            if charge.unit == unit == "report":
                single.add(charge.event)
            elif charge.unit == unit:
                counts[charge.event] += 1
            elif charge.unit == "user" and charge.part not in named:
                counts[_for_part(charge.event)] += 1
            elif charge.unit in _SMALLER[unit] and not _covered(charge, unit, also):
                counts[_PART_ALONE] += 1
        if not single:
            return [frozenset(counts.items())]
        return [frozenset((counts + Counter([event])).items()) for event in single]

    def _caught_up(self, observer: Observer, unit: Unit) -> _Counts:
        """Count the rows added since. They are never changed, but can be rolled back until they are committed."""
        if self._undone != self._db.undone:
            self._undone = self._db.undone
            self._counts.clear()
        known = self._counts.setdefault((observer, unit), _Counts())
        (last,) = self._db.execute("SELECT COALESCE(MAX(id), 0) FROM charge").fetchone()
        if last == known.last:
            return known
        named = (
            "EXISTS (SELECT 1 FROM charge AS own WHERE own.release = charge.release AND own.part = charge.part "
            "AND own.observer = charge.observer AND own.unit = ?)"
        )
        query = (
            "SELECT event, unit, COUNT(*) FROM charge WHERE id > ? AND id <= ? AND observer = ? "
            f"AND (unit = ? OR (unit = 'user' AND NOT {named})) GROUP BY event, unit"
        )
        for text, charged, count in self._db.execute(query, (known.last, last, observer, unit, unit)):
            event = event_from_json(text)
            if charged == unit == "report":
                known.single.add(event)
            else:
                known.composed[event if charged == unit else _for_part(event)] += count
        for smaller in _SMALLER[unit]:
            alone = (
                f"SELECT COUNT(*) FROM charge WHERE id > ? AND id <= ? AND observer = ? AND unit = ? AND NOT {named} "
                f"AND NOT {named}"
            )
            (count,) = self._db.execute(alone, (known.last, last, observer, smaller, unit, "user")).fetchone()
            if count:
                known.composed[_PART_ALONE] += count
        known.last = last
        return known

    def _check_same(self, release: str, charges: Sequence[Charge]) -> None:
        query = "SELECT part, observer, unit, event FROM charge WHERE release = ? ORDER BY id"
        before = self._db.execute(query, (release,)).fetchall()
        if before != [(charge.part, charge.observer, charge.unit, charge.as_json()) for charge in charges]:
            raise HomebodyError(f"Release {release} is in the ledger with other events than it would have now.")


_Events = frozenset[tuple[Event, int]]


class _Counts:
    """What an observer learnt about a unit, up to row `last`."""

    def __init__(self) -> None:
        self.last = 0
        self.composed: Counter[Event] = Counter()
        self.single: set[Event] = set()


@lru_cache(maxsize=256)
def _epsilon(events: _Events, delta: float) -> Bound:
    return epsilon(dict(events).items(), delta)


@lru_cache(maxsize=256)
def _value(events: _Events, delta: float) -> float:
    """ε alone. Skips the slower accountants if one is known to be exact: a loop asks after every round."""
    if not any(event.sampling.amplifies for event, _ in events):
        exact = epsilon(dict(events).items(), delta, only=("optimal", "analytic"))
        if exact.accountant != "none":
            return exact.epsilon
    return _epsilon(events, delta).epsilon


def _text(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"


_SMALLER: dict[Unit, tuple[Unit, ...]] = {"user": ("interaction", "report"), "interaction": ("report",), "report": ()}
_PART_ALONE = NonPrivate("it was charged for a part of what people did alone, which bounds nothing about the whole")


def _covered(charge: Charge, unit: Unit, charges: Sequence[Charge]) -> bool:
    """Whether the same part of a release is also charged for the larger unit."""
    return any(
        (paid.observer, paid.part) == (charge.observer, charge.part) and paid.unit in (unit, "user") for paid in charges
    )


def _for_part(event: Event) -> Event:
    """An event about a person, as it concerns a part of what they did: replacing a part replaces the person."""
    if event.relation == "replace-one":
        return event
    return NonPrivate("it was charged for whole people, with or without them, which says nothing about a part")


def _hash(*row: object) -> str:
    """The hash of a row's columns as JSON, without its own hash; a row of an earlier schema has fewer columns."""
    *first, number, relation, sampling, code, digest, previous = row
    if number is relation is sampling is code is digest is None:
        row = (*first, previous)
    elif digest is None:
        row = (*first, number, relation, sampling, code, previous)
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()
