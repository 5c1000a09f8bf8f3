"""What a device showed an app, and what that tells of people's other views."""

from __future__ import annotations

from itertools import groupby
from typing import Any, cast

from homebody.errors import unknown_name
from homebody.federation.app.folder import AppFolder, SeenQuestion
from homebody.privacy.budget import check_delta
from homebody.report import jsonable

__all__ = ["disclosure"]


def disclosure(app: AppFolder, person: str | None = None, delta: float = 1e-6) -> dict[str, Any]:
    """What was shown of each person, or of one, and ε at this δ. The values fit into JSON: ∞ is a text."""
    check_delta(delta)
    people = app.people()
    if person is not None and person not in people:
        raise unknown_name("person", person, people)
    found = {
        "view": app.settings.view,
        "running": app.runs(),
        "delta": delta,
        "people": [_of_person(app, name, delta) for name in people if person in (None, name)],
    }
    return cast(dict[str, Any], jsonable(found))


def _of_person(app: AppFolder, person: str, delta: float) -> dict[str, Any]:
    ledger, seen = app.ledger(person), app.seen(person)
    charged = ledger.releases()

    def series(one: SeenQuestion) -> tuple[str, str]:
        return one.run, one.what

    lines = []
    for (run, what), several in groupby(sorted(seen, key=series), key=series):
        own = list(several)
        totals = {name: sum(getattr(one, name) for one in own) for name in ("items", "received", "sent")}
        line = {"run": run, "what": what, "first": own[0].release, "last": own[-1].release, "questions": len(own)}
        lines.append({**line, **totals, "at": own[-1].at})
    return {
        "person": person,
        "features": sorted(app.features(person)),
        "seen": lines,
        "charged": charged,
        "epsilon": ledger.epsilons(delta).get("views", 0.0) if charged else 0.0,
    }
