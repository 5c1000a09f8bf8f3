"""A run's privacy statement: what it certifies, to whom, about what, and what that rests on.

Nothing in it is typed in. Every ε is derived anew from the ledger, whose chain is verified first, and the ledger is
held against the rounds that the run recorded. The statement names no path and no seed: whoever knows the seed can
take the noise of a simulation away again.
"""

from __future__ import annotations

import contextlib
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from homebody import __version__
from homebody.core import Cohort, Method, releases
from homebody.errors import HomebodyError, several
from homebody.methods import METHODS, build, find
from homebody.privacy import OBSERVERS, Budget, Charge, Entry, Ledger, NonPrivate, Observer, Unit, event_from_json
from homebody.privacy.accountant import Bound
from homebody.privacy.assumptions import ROSTER
from homebody.privacy.budget import check_delta
from homebody.privacy.ledger import DELTA
from homebody.privacy.papers import PAPERS, paper
from homebody.privacy.secure_sum import HELPER, SEMI_HONEST, SecureSum
from homebody.privacy.specs import ASK_ROWS, parse_channel, split_stage, stage_texts, with_noise
from homebody.reference import Reference
from homebody.report.record import RunFolder, jsonable
from homebody.report.words import NOT_COVERED, epsilon_meaning

__all__ = ["VOCABULARY", "Release", "figure", "lines_of", "recipe_of", "releases_of", "stated_at", "statement"]

SCHEMA_VERSION = 1
VOCABULARY = "vocabulary of "
"""How releases begin that are no rounds: counts of people's values, before training."""
_ROUND = re.compile(r"(?P<phase>.+)/(?P<round>\d+)(?:#(?P<again>\d+))?")
SEES = {
    "server": "everything that leaves the devices; it picks the cohort",
    "clients": "the shared parameters, every round",
    "views": "what a person's other views tell this one",
    "public": "the final model",
}
UNITS = {
    "report": "one report of a device",
    "interaction": "one click, rating or view",
    "user": "one person, with everything they did",
}
ABOUT = {"report": "one report", "interaction": "one interaction", "user": "one person"}
RELATIONS = {
    "replace-one": "ε compares two data sets of the same size in which one unit is another (replace-one).",
    "add-remove": "ε compares a data set with one unit and the same without it (add-remove).",
}
SELECTION = (
    "Evaluation, the choice of the round by validation, and any tuning of hyper-parameters read people's data and are "
    "not charged: they are outside the guarantee."
)
MEMBERSHIP = (
    "Membership of the population: how many people there are, and that somebody is one of them, counts as known. "
    "Filters and splits read people's data to choose them."
)
UNRECORDED = (
    "This run's record does not say where vocabularies and scales of features come from: if from the people who train, "
    "they are outside the guarantee. So is a catalogue that is derived from interactions."
)
PARTICIPANTS = (
    "Who takes part in a round: the noise that devices add hides what they send, not that they send it. The server "
    "knows who takes part, and the parties of a secure sum learn it of each other."
)
SHOWN = (
    "What each person was shown, which impression a report is about, and that something in it was clicked: ε is about "
    "which of the shown items were clicked, then and before."
)
FOLDER = "The run's own folder holds every simulated client's state, losses and counts: it is as private as the data."
SIMULATED = (
    "This was a simulation: its noise derives from the seed, and whoever knows the seed can remove it. Runs of the "
    "same seed share their noise, which cancels out where two of their models are compared. ε is that of the same "
    "mechanisms with secret randomness, in this run alone."
)


def statement(folder: RunFolder, delta: float | None = None) -> dict[str, Any]:
    """Everything that can be said of a run's privacy, at this δ or the one the run was stated at.

    A ledger that was changed, or lost charges of rounds that were recorded, is refused.
    """
    recipe = recipe_of(folder)
    delta = stated_at(recipe) if delta is None else delta
    check_delta(delta)
    if not folder.ledger_path.is_file():
        raise HomebodyError(f"{folder.path} has no ledger.sqlite: nothing says what this run told whom.")
    with contextlib.closing(Ledger(folder.ledger_path)) as ledger:
        entries = ledger.entries()
        _insist_on_charges(folder, recipe, entries)
        return _gathered(folder, recipe, ledger, entries, delta)


def recipe_of(folder: RunFolder) -> dict[str, Any]:
    """The recipe of the run, as it was recorded."""
    try:
        recipe = tomllib.loads(folder.recipe_text())
    except tomllib.TOMLDecodeError as error:
        raise HomebodyError(f"The recipe of {folder.path} is not valid TOML: {error}.") from error
    for name in ("method", "data"):
        if not isinstance(recipe.get(name), str):
            raise HomebodyError(f"The recipe of {folder.path} names no {name}.")
    return recipe


def stated_at(recipe: Mapping[str, Any]) -> float:
    """The δ that a run's ε is stated at: its budget's, or its own.

    >>> stated_at({"budget": "eps=8,delta=1e-5"}), stated_at({"delta": 0.001}), stated_at({})
    (1e-05, 0.001, 1e-06)
    """
    if recipe.get("budget"):
        return Budget.parse(recipe["budget"]).delta
    return float(recipe.get("delta", DELTA))


def figure(value: float | str) -> str:
    """ε with four significant digits.

    >>> figure("inf"), figure(5000.0), figure(2.44595)
    ('∞', '5,000', '2.446')
    """
    number = float(value)
    return "∞" if math.isinf(number) else f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def _gathered(
    folder: RunFolder, recipe: Mapping[str, Any], ledger: Ledger, entries: Sequence[Entry], delta: float
) -> dict[str, Any]:
    complete = (folder.path / "result.json").exists()
    environment = folder.read_json("environment.json") if (folder.path / "environment.json").exists() else {}
    result = folder.read_json("result.json") if complete else {}
    central = any(entry.release == "collection" for entry in entries)
    releases = list(releases_of(entries))
    kinds = list({release.rows: release for release in releases}.values())
    rows = _observed(ledger, releases, kinds, delta)
    simulated = str(environment.get("randomness", "simulated")).startswith("simulated")
    outside = [SELECTION, *([] if central else [MEMBERSHIP, *environment.get("outside", [UNRECORDED])])]
    stages = [] if central else _stages(recipe)
    outside += [PARTICIPANTS, SEMI_HONEST] if any(stage["stage"] == "skellam" for stage in stages) else []
    helped = {bool(stage["settings"].get("helper")) for stage in stages if stage["stage"] == "secure-sum"}
    outside += [ROSTER] if False in helped else []
    outside += [HELPER] if True in helped else []
    lists = (stage["settings"]["candidates"] for stage in stages if stage["stage"] == "impression-report")
    outside += [SHOWN] if 0 in lists else []
    outside += [SIMULATED] if simulated and not central else []
    outside += [FOLDER]
    stated = {
        "schema": SCHEMA_VERSION,
        "document": "homebody privacy statement",
        "run": {
            "method": Path(recipe["method"].rpartition(":")[2]).name,
            "data": Path(recipe["data"]).name if _is_file(recipe["data"]) else recipe["data"],
            "kind": "centralised" if central else "federated",
            "complete": complete,
            "rounds": len(folder.rounds()),
            "planned": recipe.get("rounds"),
            "cohort": recipe.get("cohort"),
            "simulated": simulated,
            "data_fingerprint": environment.get("data_fingerprint"),
        },
        "versions": {
            "ran": environment.get("homebody"),
            "code": sorted({entry.code for entry in entries if entry.code}),
            "derived": __version__,
        },
        "delta": delta,
        "certified": rows,
        "not_covered": list(NOT_COVERED),
        "stages": stages,
        "ledger": {
            "verified": True,
            "rows": len(entries),
            "releases": len(releases),
            "hash": entries[-1].hash if entries else None,
            "lines": lines_of(releases, delta),
        },
        "budget": _budget(recipe, ledger, kinds, result, central),
        "paper": _paper(recipe["method"], ledger, kinds),
        "assumptions": list(dict.fromkeys(_assumptions(rows))),
        "outside": outside,
    }
    return cast(dict[str, Any], jsonable(stated))


def _is_file(data: str) -> bool:
    """Whether the data are a file: a dataset's name has no slash and no suffix such as .csv."""
    return "/" in data or "\\" in data or Path(data).suffix in (".csv", ".parquet") or Path(data).is_file()


def _insist_on_charges(folder: RunFolder, recipe: Mapping[str, Any], entries: Sequence[Entry]) -> None:
    """Refuse a ledger that was cut off at its end: each recorded round must have its charge."""
    charged = {entry.release for entry in entries}
    lines = folder.rounds()
    silent = _silent(recipe) if any("charged" not in line for line in lines) else set()
    for line in lines:
        release = f"{line.get('phase')}/{line.get('round')}"
        due = line.get("charged", line.get("phase") not in silent)
        if due and release not in charged and "collection" not in charged:
            raise HomebodyError(
                f"The ledger {folder.ledger_path} has no charge for {release}, which the run recorded: it lost "
                "charges, and its ε would be too small."
            )


def _silent(recipe: Mapping[str, Any]) -> set[str]:
    """The phases that tell nobody anything, for records whose rounds do not say whether they were charged.

    Only of methods that come with Homebody: the recipe may be a stranger's, and no code of theirs is run here.
    """
    if recipe["method"] not in METHODS:
        return set()
    try:
        method = find(recipe["method"])(**recipe.get("fields", {}))
        if isinstance(method, Reference):
            return set() if method.reads else {"fit"}
        anyone = Cohort(np.zeros(1, dtype=np.int64), "all", 1, 1, 1)
        return {phase.name for phase in method.phases if phase.public or not releases(phase.method or method, anyone)}
    except (HomebodyError, TypeError):  # a recipe that was changed: then every round is due
        return set()


def _observed(
    ledger: Ledger, releases: Sequence[Release], kinds: Sequence[Release], delta: float
) -> list[dict[str, Any]]:
    """A row for each observer and each unit that was charged: ε in total and of one round, and what gave it."""
    there = {(who, unit) for release in kinds for _, who, unit, _ in release.rows}
    return [
        _certified(ledger, releases, kinds, observer, unit, delta)
        for observer in get_args(Observer)
        for unit in get_args(Unit)[::-1]
        if (observer, unit) in there
        or (unit == "user" and (observer in OBSERVERS or any(who == observer for who, _ in there)))
    ]


def _certified(
    ledger: Ledger, releases: Sequence[Release], kinds: Sequence[Release], observer: Observer, unit: Unit, delta: float
) -> dict[str, Any]:
    total = _total(ledger, kinds, observer, unit, delta)
    each = [
        Ledger().epsilon(observer, unit, delta=delta, also=release.charges() + _unstated(release, observer, unit))
        for release in kinds
        if not release.name.startswith(VOCABULARY)
    ]
    events = {
        text: event_from_json(text)
        for release in kinds
        for _, who, charged, text in release.rows
        if who == observer and charged == unit
    }
    meaning = epsilon_meaning(total.epsilon, delta if total.epsilon else 0.0, ABOUT[unit])
    return {
        "observer": observer,
        "sees": SEES[observer],
        "unit": unit,
        "means": UNITS[unit],
        "relation": total.relation,
        "epsilon": total.epsilon,
        "delta": delta,
        "odds": meaning.odds,
        "found_at_1_percent": meaning.found,
        "allows": meaning.sentence,
        "accountant": total.accountant,
        "other_bounds": {name: value for name, value in total.bounds.items() if name != total.accountant},
        "epsilon_of_one_round": max((bound.epsilon for bound in each), default=0.0),
        "releases": sum(any(who == observer for _, who, _, _ in release.rows) for release in releases),
        "mechanisms": list(dict.fromkeys(str(event) for event in events.values())),
        "sampling": list(dict.fromkeys(str(event.sampling) for event in events.values())),
        "notes": list(total.notes),
    }


def _total(ledger: Ledger, kinds: Iterable[Release], observer: Observer, unit: Unit, delta: float) -> Bound:
    """ε over all releases."""
    missing = [charge for release in kinds for charge in _unstated(release, observer, unit)]
    return ledger.epsilon(observer, unit, delta=delta, also=missing)


def _unstated(release: Release, observer: Observer, unit: Unit) -> list[Charge]:
    """Charges without a bound, for releases charged for a part of a person's data only."""
    if unit != "user":
        return []
    about: dict[str, set[str]] = {}
    for part, who, charged, _ in release.rows:
        if who == observer:
            about.setdefault(part, set()).add(charged)
    reason = "a release was charged for a part of a person's data alone, which says nothing about the whole"
    return [Charge(observer, "user", NonPrivate(reason), part) for part, units in about.items() if "user" not in units]


def _assumptions(rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for row in rows:
        if math.isfinite(row["epsilon"]) and row["epsilon"] > 0:
            yield RELATIONS[row["relation"]]
            yield from row["notes"]
    yield "The devices and the server ran the stages as they are stated here; the ledger records, it does not enforce."


def _stages(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each message passes on its way out: as the recipe says it, or else by the method's own channel."""
    specs = list(recipe.get("stages") or _own_stages(recipe))
    channel = parse_channel(with_noise(specs) if recipe.get("calibrate") else specs)
    out, stages, helped = [], iter(channel.stages), channel.facts.helped
    for spec in specs:
        name, _ = split_stage(spec)
        if name == ASK_ROWS:
            out.append({"stage": name, "settings": {}, "means": _means(name, {})})
            continue
        stage = next(stages)
        values = {field.name: getattr(stage, field.name) for field in fields(cast(Any, stage)) if field.compare}
        settings = {
            key: value for key, value in values.items() if value is not None and (key, value) != ("helper", False)
        }
        if "sensitivity" in settings and hasattr(stage, "scale"):
            settings["scale"] = stage.scale
        about = {"helped": helped, "shares": stage.shares if isinstance(stage, SecureSum) else None}
        out.append({"stage": name, "settings": settings, "means": _means(name, {**settings, **about})})
    return out


def _own_stages(recipe: Mapping[str, Any]) -> list[str]:
    """The stages of a shipped method's own channel."""
    if recipe["method"] not in METHODS:
        return []
    built = build(recipe["method"], recipe.get("fields") or {})
    return stage_texts(built.uplink) if isinstance(built, Method) else []


def _means(name: str, values: Mapping[str, Any]) -> str:
    """A stage in a sentence."""
    if name == "clip":
        norm = values["norm"]
        most = f"{norm:g}" if not isinstance(norm, Mapping) else ", ".join(f"{n} {v:g}" for n, v in norm.items())
        what = "each tensor of its update" if isinstance(norm, Mapping) else "its update"
        return f"Each device scales {what} down to an ℓ{values['order']} norm of at most {most}."
    if name == "gaussian":
        who = "The helper" if values["helped"] else "The server"
        return (
            f"{who} adds Gaussian noise of standard deviation {values['scale']:g} to every coordinate of the sum: "
            f"{values['z']:g} × the ℓ2 sensitivity of {values['sensitivity']:g} ({values['relation']})."
        )
    if name == "laplace":
        who = "Each device adds" if values["where"] == "device" else "The server adds"
        to = "its update" if values["where"] == "device" else "the sum"
        against = "nothing bounds what it hides"
        if not values["unbounded"]:
            against = f"the ℓ1 sensitivity is {values['sensitivity']:g} ({values['relation']})"
        return f"{who} Laplace noise of scale {values['b']:g} to every coordinate of {to}; {against}."
    if name == "vector-laplace":
        scale = "2θ√n / ε" if values["guarantee"] == "certified" else "2θ / ε, as published"
        return (
            f"Each device adds Laplace noise of scale {scale} to every coordinate of its update, for a norm of at most "
            f"θ, n coordinates and ε = {values['epsilon']:g}."
        )
    if name == "impression-report":
        how = "the best of" if values["mechanism"] == "choice" else "noised weights of"
        count = values.get("candidates", 0)
        among = f"{several(count, 'item')} that the server drew for everyone" if count else "all that was shown"
        return (
            f"Each device sends one report on an impression instead of its update: {how} {values['basis']} basis "
            f"vectors, a pseudo-click by randomised response over {among}, and "
            f"{several(values['negatives'], 'negative')}, each half with ε = {values['epsilon']:g}."
        )
    if name == "one-bit":
        return (
            f"Each device sends {several(values['k'], 'report')} of one bit instead of its update, "
            f"each randomised on the device with ε = {values['epsilon']:g}."
        )
    if name == "randomised-response":
        return (
            "Each device sends one bit for each number of its update, whether it is above ½, each randomised on the "
            f"device with ε = {values['epsilon']:g}."
        )
    if name == "shuffle":
        among = f"at least {several(values['users'], 'person', 'people')}" if "users" in values else "the whole cohort"
        return (
            f"A proxy passes single reports on in random order, mixed with those of {among}; a simulation declares it."
        )
    if name == "views":
        drawn = f"{values['sample']} views, drawn in each round" if values["sample"] else "all views"
        return (
            f"Each device scales the part of each view of a person down to an ℓ2 norm of at most {values['clip']:g}, "
            f"and sends the mean over {drawn}; the device does so, not the app."
        )
    if name == "view-noise":
        return (
            f"Each device adds Gaussian noise to the mean over the views of a person, {values['z']:g} × what one view "
            f"can change in it ({values['relation']}); it covers what the views share, and nothing else."
        )
    if name == "skellam":
        return (
            "The devices of a round add Skellam noise between them. In every coordinate of their sum its standard "
            f"deviation is {values['scale']:g} at least, {values['z']:g} × the ℓ2 sensitivity of "
            f"{values['sensitivity']:g} ({values['relation']}), if {values['least']:.0%} of them answer and no more "
            f"than {values['colluding']:.0%} tell the server their noise."
        )
    if name == "secure-sum":
        opened = " A helper opens it, one sum a round, and learns no update either." if "helper" in values else ""
        cut = f" Numbers beyond ±{values['range']:g} are cut off." if "range" in values else ""
        if not opened:
            least, colluding = values["shares"]
            opened = (
                f" It opens if {least:.0%} of the parties answer, and holds if no more than {colluding:.0%} collude "
                "with the server. The parties learn who takes part."
            )
        return (
            "The server learns the sum over the cohort and no single update; a simulation declares it, and just sums."
            f"{opened}{cut}"
        )
    if name == ASK_ROWS:
        return "Each device tells the server which rows of the shared tables it works on, and downloads only those."
    return f"The stage {name}."


def _budget(
    recipe: Mapping[str, Any], ledger: Ledger, kinds: Sequence[Release], result: Mapping[str, Any], central: bool
) -> dict[str, Any] | None:
    if not recipe.get("budget"):
        return None
    budget = Budget.parse(recipe["budget"])
    spent = _total(ledger, kinds, budget.observer, budget.unit, budget.delta).epsilon
    stopped = result.get("stopped")
    spending = f"ε = {figure(spent)} of {budget.epsilon:g} is spent for {budget.who}"
    if central:
        state = f"A centralised reference collects raw data, so the budget does not hold for it: {spending}."
    elif spent > budget.epsilon:
        state = f"The budget is broken: {spending}."
    elif stopped:
        state = str(stopped)
    else:
        state = f"All rounds ran within it: {spending}." if result else f"The run is not complete: {spending} so far."
    return {
        **{name: getattr(budget, name) for name in ("epsilon", "delta", "unit", "observer")},
        "spent": spent,
        "stopped": bool(stopped),
        "state": state,
    }


def _paper(method: str, ledger: Ledger, kinds: Sequence[Release]) -> dict[str, Any] | None:
    """What the method's paper claims, beside what its mechanism and this run certify at the same δ."""
    if method not in PAPERS:
        return None
    published = paper(method)
    observers = {who for release in kinds for _, who, _, _ in release.rows}
    rows = []
    for claim in published.claims:
        here = _total(ledger, kinds, claim.observer, claim.unit, claim.delta).epsilon
        rows.append({**claim.as_dict(), "this_run": here if claim.observer in observers else None})
    return {"id": published.id, "title": published.title, "rows": rows}


@dataclass(frozen=True)
class Release:
    """All rows of one release; two that disclosed the same have the same `rows`."""

    name: str
    rows: tuple[tuple[str, str, str, str], ...]
    """Part, observer, unit and event."""
    code: str | None

    def charges(self) -> list[Charge]:
        """The rows, as they were charged."""
        return [
            Charge(cast(Observer, who), cast(Unit, unit), event_from_json(event), part)
            for part, who, unit, event in self.rows
        ]


def releases_of(entries: Iterable[Entry]) -> Iterator[Release]:
    """The rows by release, oldest first."""
    rows: dict[str, list[Entry]] = {}
    for entry in entries:
        rows.setdefault(entry.release, []).append(entry)
    for name, charges in rows.items():
        disclosed = tuple((entry.part, entry.observer, entry.unit, entry.event) for entry in charges)
        yield Release(name, disclosed, charges[0].code)


def lines_of(releases: Sequence[Release], delta: float) -> list[dict[str, Any]]:
    """The ledger with equal rounds that follow one another put into one line."""
    lines: list[dict[str, Any]] = []
    last: tuple[object, ...] = ()
    for release in releases:
        match = _ROUND.fullmatch(release.name)
        phase, number, again = (match["phase"], int(match["round"]), match["again"]) if match else ("", 0, None)
        key = (phase, again, release.rows, release.code)
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
                    "told": _disclosed(release, delta),
                }
            )
        last = (*key, number)
    for line in lines:
        line["rounds"] = _rounds(line)
    return lines


def _rounds(line: Mapping[str, Any]) -> str:
    """Which releases a line is about, in words."""
    first, last = line["first"], line["last"]
    if first is None:
        return str(line["release"])
    text = f"{line['phase']}, round {first:,}" if first == last else f"{line['phase']}, rounds {first:,}–{last:,}"
    return text if line["time"] == 1 else f"{text}, released again (time {line['time']})"


def _disclosed(release: Release, delta: float) -> list[dict[str, Any]]:
    """What one release tells, once for all observers who are told the same."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for part, who, unit, text in release.rows:
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
