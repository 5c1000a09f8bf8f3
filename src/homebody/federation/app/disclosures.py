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
    summary = {
        "view": app.settings.view,
        "running": app.runs(),
        "delta": delta,
        "people": [_of_person(app, name, delta) for name in people if person in (None, name)],
    }
    return cast(dict[str, Any], jsonable(summary))


def _of_person(app: AppFolder, person: str, delta: float) -> dict[str, Any]:
    ledger, seen = app.ledger(person), app.seen(person)
    charged = ledger.releases()

    def series(question: SeenQuestion) -> tuple[str, str]:
        return question.run, question.what

    lines = []
    for (run, what), several in groupby(sorted(seen, key=series), key=series):
        questions = list(several)
        totals = {name: sum(getattr(entry, name) for entry in questions) for name in ("items", "received", "sent")}
        ends = {"first": questions[0].release, "last": questions[-1].release, "questions": len(questions)}
        lines.append({"run": run, "what": what, **ends, **totals, "at": questions[-1].at})
    return {
        "person": person,
        "features": sorted(app.features(person)),
        "seen": lines,
        "charged": charged,
        "epsilon": ledger.epsilons(delta).get("views", 0.0) if charged else 0.0,
    }
