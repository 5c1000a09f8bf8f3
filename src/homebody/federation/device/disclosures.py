"""What left a device about a person: answers and queries, what each release disclosed to whom, and the ε of it."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast, get_args

from homebody.federation.device.home import Home
from homebody.federation.device.outbox import SentAnswer
from homebody.federation.device.people import Person, Who
from homebody.federation.device.queries import OPEN

if TYPE_CHECKING:
    from homebody.privacy import Budget, Ledger
    from homebody.report.statement import Release

__all__ = ["disclosure"]

DAY = 86_400
AHEAD = 30 * DAY
"""How far ahead ε is said where no budget bounds it."""
MOST_QUERIES = 4096
"""How many more queries are counted that a budget allows."""


def disclosure(home: Home, who: Who, delta: float | None = None) -> dict[str, Any]:
    """What was sent about a person and what it disclosed, at this δ, or the budget's, or the default. The values fit
    into JSON: ∞ is a text. A ledger that was tampered with is refused. ε is 0 before the first charge."""
    person, budget = home.people.find(who), None
    record: dict[str, Any] = {"person": person.name, "slot": person.slot, "active": person.active}
    record["sent"] = _sent(home.outbox.sent(person))
    record["queries"] = _queries(home, person)
    if not home.ledger_file(person).exists():
        empty: dict[str, Any] = {"rows": 0, "releases": 0, "hash": None, "lines": []}
        return {**record, "delta": delta, "ledger": empty, "certified": [], "budget": None}

    from homebody.privacy import Budget
    from homebody.privacy.budget import check_delta
    from homebody.privacy.ledger import DELTA
    from homebody.report import jsonable
    from homebody.report.statement import lines_of, releases_of

    text = home.settings.budget
    if text is not None:
        budget = Budget.parse(text)
    if delta is None:
        delta = DELTA if budget is None else budget.delta
    check_delta(delta)
    ledger = home.ledger(person)
    entries = ledger.entries()
    releases = list(releases_of(entries))
    whole = {
        **record,
        "delta": delta,
        "ledger": {
            "rows": len(entries),
            "releases": len(releases),
            "hash": entries[-1].hash if entries else None,
            "lines": lines_of(_by_kind(releases), delta),
        },
        "certified": _certified(
            ledger, {(entry.observer, entry.unit) for entry in entries}, delta, rostered=home.roster.required
        ),
        "budget": None if budget is None else {**asdict(budget), "spent": budget.spent(ledger)},
    }
    whole["queries"] = {**record["queries"], **_pace(home, person, ledger, budget, delta)}
    return cast(dict[str, Any], jsonable(whole))


def _kind(release: str) -> tuple[str, int]:
    """The series that a release belongs to, and its round. Measurements are a series of their own.

    >>> _kind("train/12"), _kind("train/12/telemetry")
    (('train', 12), ('train, measured', 12))
    """
    name = release.removesuffix("/telemetry")
    phase, _, number = name.rpartition("/")
    if not phase or not number.isdecimal():
        return release, 0
    return phase if name == release else f"{phase}, measured", int(number)


def _by_kind(releases: list[Release]) -> list[Release]:
    """A device's releases, series by series, named without run and digest."""
    rows = []
    for place, release in enumerate(releases):
        run, _, rest = release.name.partition("/")
        name, at, digest = rest.partition("@")
        kind, number = _kind(name)
        again = digest.partition("#")[2]
        shown = f"{kind}/{number}{f'#{again}' if again else ''}" if at and number else release.name
        rows.append(((run, kind), place, replace(release, name=shown)))
    return [release for *_, release in sorted(rows, key=lambda row: row[:2])]


def _sent(marks: list[SentAnswer]) -> dict[str, Any]:
    """The answers: totals, one line for each series, and each answer."""

    def series(mark: SentAnswer) -> tuple[str, str]:
        return mark.run, _kind(mark.release)[0]

    lines = []
    for (run, phase), several in groupby(sorted(marks, key=series), key=series):
        answers = list(several)
        line = {"run": run, "phase": phase, "first": answers[0].release, "last": answers[-1].release}
        lines.append({**line, **_totals(answers), "at": answers[-1].at})
    return {**_totals(marks), "lines": lines, "each": [mark._asdict() for mark in marks]}


def _queries(home: Home, person: Person) -> dict[str, Any]:
    """A person's queries to the service: how many left, what they were, and when."""
    settings, queries = home.settings, home.queries.of(person)
    left = [query for query in queries if query.left is not None]
    kinds = {kind: sum(query.kind == kind for query in left) for kind in dict.fromkeys(query.kind for query in left)}
    each = [{"kind": query.kind, "model": query.model, "state": query.state, "at": query.left} for query in left]
    return {
        "service": settings.serving,
        "every": settings.serving_every,
        "left": len(left),
        "kinds": kinds,
        "at": left[-1].left if left else None,
        "open": sum(query.state in OPEN for query in queries),
        "refused": sum(query.state == "refused" for query in queries),
        "each": each,
    }


def _pace(home: Home, person: Person, ledger: Ledger, budget: Budget | None, delta: float) -> dict[str, Any]:
    """How long the budget lasts if a query like the last one leaves in every turn; without a budget, what ε will be."""
    from homebody.privacy import Charge
    from homebody.privacy.events import event_from_json

    queries, every = home.queries.of(person), home.settings.serving_every
    if not queries:
        return {}
    charge = Charge("server", "user", event_from_json(queries[-1].event))
    if budget is None:
        also = [charge] * max(1, AHEAD // every)
        return {"epsilon_in_30_days": ledger.epsilon("server", delta=delta, also=also).epsilon}
    low, high = 0, 1
    while high <= MOST_QUERIES and budget.allows(ledger, [charge] * high):
        low, high = high, 2 * high
    while high - low > 1 and low < MOST_QUERIES:
        middle = (low + high) // 2
        low, high = (middle, high) if budget.allows(ledger, [charge] * middle) else (low, middle)
    return {"lasts": {"queries": low, "seconds": low * every, "more": low >= MOST_QUERIES}}


def _totals(marks: list[SentAnswer]) -> dict[str, int]:
    size, reports = sum(mark.bytes for mark in marks), sum(mark.reports for mark in marks)
    return {"answers": len(marks), "bytes": size, "reports": reports}


def _certified(ledger: Ledger, charged: set[tuple[str, str]], delta: float, *, rostered: bool) -> list[dict[str, Any]]:
    """ε against each observer, about a person and about each unit that was charged.

    rostered: whether the device has a key for rosters, and so counts on other parties' noise.
    """
    from homebody.privacy import OBSERVERS, Observer, Unit
    from homebody.privacy.assumptions import OWN_NOISE
    from homebody.privacy.mechanisms import BETWEEN_PARTIES
    from homebody.privacy.secure_sum import SEMI_HONEST

    rows = []
    for observer in get_args(Observer):
        for unit in get_args(Unit)[::-1]:
            if (observer, unit) not in charged and (unit != "user" or observer not in OBSERVERS):
                continue
            bound = ledger.epsilon(observer, unit, delta=delta)
            row = {"observer": observer, "unit": unit, "epsilon": bound.epsilon, "accountant": bound.accountant}
            rests_on = [BETWEEN_PARTIES, SEMI_HONEST] if rostered else [OWN_NOISE]
            notes = [each for note in bound.notes for each in (rests_on if note == BETWEEN_PARTIES else [note])]
            rows.append({**row, "notes": notes})
    return rows
