"""What noise costs, what a budget asks for, what papers claim, and what a run's ledger certifies.

`homebody account` prints the same. The functions of mechanisms take a noise and give its ε, or an ε and give the noise
that it needs; several rounds or δ give a row each. See docs/accounting.md.

>>> import homebody as hb
>>> drawn = {"cohort": 30, "population": 4800}
>>> costs = hb.account.gaussian(1.0, rounds=[100, 1000], **drawn)
>>> [round(value, 2) for value in costs["epsilon"]]
[1.39, 2.45]
>>> round(hb.account.gaussian(epsilon=2.446, rounds=1000, **drawn)["noise"].item(), 2)
1.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, cast

import polars as pl

from homebody.errors import HomebodyError
from homebody.federation.secure_sum.cost import cost
from homebody.markup import html
from homebody.notebook.fitted import Fitted
from homebody.privacy import Charge, Event, Ledger, Relation, Reports, Sampling, ShuffledReports, SkellamRelease
from homebody.privacy.accountant import epsilon as certified
from homebody.privacy.budget import calibrate_events, check_delta
from homebody.privacy.events import GaussianRelease, LaplaceRelease, event_from_json
from homebody.privacy.ledger import DELTA
from homebody.privacy.papers import paper as published
from homebody.privacy.ring import fitting
from homebody.privacy.secure_sum import COMPLETE, SEMI_HONEST
from homebody.report import RunFolder, statement_page
from homebody.report.statement import figure, lines_of, releases_of
from homebody.report.statement import statement as stated
from homebody.report.words import EpsilonMeaning, epsilon_meaning
from homebody.training import Trained

__all__ = [
    "Statement",
    "gaussian",
    "laplace",
    "ledger",
    "meaning",
    "onebit",
    "paper",
    "repeated",
    "secure_sum",
    "shuffle",
    "skellam",
    "statement",
]


def __dir__() -> list[str]:
    """What TAB offers."""
    return sorted(__all__)


Several = int | Sequence[int]
Deltas = float | Sequence[float]


def gaussian(
    noise: float | None = None,
    *,
    epsilon: float | None = None,
    rounds: Several = 1,
    delta: Deltas = DELTA,
    cohort: int | None = None,
    population: int | None = None,
    relation: str = "replace-one",
    sampling: str | None = None,
    group: int = 1,
) -> pl.DataFrame:
    """Gaussian noise of `noise` × the ℓ2 sensitivity under the relation: its ε, or the noise that an ε needs.

    cohort, population: clients in a round, and whom they are drawn from; None: everyone is in every round. relation:
    how neighbouring data sets differ, `replace-one` or `add-remove`. sampling: how the cohort is drawn, `fixed`,
    `poisson` or `none`; None: the kind that fits the relation. group: people who are protected together.

    A row has ε with the accountant that gave it, ε of one round, what ε allows (`meaning`), all valid bounds that were
    derived, and notes.

    >>> frame = gaussian(2.0, rounds=100)
    >>> round(frame["epsilon"].item(), 1), frame["accountant"].item()
    (35.6, 'analytic')
    """
    drawn = _sampling(sampling, cohort, population, relation)
    event = partial(GaussianRelease, relation=cast("Relation", relation), sampling=drawn)
    return _answered("gaussian", _drawn(relation, drawn), noise, epsilon, event, rounds, delta, group)


def laplace(
    noise: float | None = None,
    *,
    epsilon: float | None = None,
    rounds: Several = 1,
    delta: Deltas = 0.0,
    cohort: int | None = None,
    population: int | None = None,
    relation: str = "replace-one",
    sampling: str | None = None,
    group: int = 1,
) -> pl.DataFrame:
    """Laplace noise of scale `noise` × the ℓ1 sensitivity: its ε, or the noise that an ε needs. As `gaussian`.

    >>> laplace(2.0, rounds=10)["epsilon"].item()
    5.0
    """
    drawn = _sampling(sampling, cohort, population, relation)
    event = partial(LaplaceRelease, relation=cast("Relation", relation), sampling=drawn)
    return _answered("laplace", _drawn(relation, drawn), noise, epsilon, event, rounds, delta, group)


def skellam(
    noise: float | None = None,
    *,
    epsilon: float | None = None,
    rounds: Several = 1,
    delta: Deltas = DELTA,
    cohort: int | None = None,
    population: int | None = None,
    relation: str = "replace-one",
    sampling: str | None = None,
    entries: int = 0,
    steps: int | None = None,
    group: int = 1,
) -> pl.DataFrame:
    """Skellam noise of `noise` × the ℓ2 sensitivity, of which each party of a secure sum adds a share. As `gaussian`.

    entries: numbers in an update; 0: a bound for any size. steps: the sensitivity in integer steps; None: what rounding
    needs.

    >>> round(skellam(1.0, entries=54_000)["epsilon"].item(), 2)
    5.22
    """
    drawn = _sampling(sampling, cohort, population, relation)
    if steps is None:
        steps = fitting(max(0, entries)) * (1 if relation == "add-remove" else 2)
    event = partial(SkellamRelease, steps=steps, entries=entries, relation=cast("Relation", relation), sampling=drawn)
    about = {**_drawn(relation, drawn), "steps": steps, **({"entries": entries} if entries else {})}
    notes = (SEMI_HONEST,) if (cohort or 0) > COMPLETE else ()
    return _answered("skellam", about, noise, epsilon, event, rounds, delta, group, notes=notes)


def onebit(
    report_epsilon: float | None = None,
    *,
    epsilon: float | None = None,
    reports: int = 1,
    rounds: Several = 1,
    delta: Deltas = 0.0,
    group: int = 1,
) -> pl.DataFrame:
    """Reports randomised on the device, `reports` of each person a round: their ε together, or that of one report.

    >>> onebit(2.5, reports=100, rounds=20)["epsilon"].item()
    5000.0
    >>> round(onebit(epsilon=10, reports=100, rounds=20)["report_epsilon"].item(), 3)
    0.005
    """
    about = {"relation": "replace-one", "reports": reports}
    event = partial(Reports, count=reports)
    return _answered("onebit", about, report_epsilon, epsilon, event, rounds, delta, group, name="report_epsilon")


def shuffle(
    users: int,
    report_epsilon: float | None = None,
    *,
    epsilon: float | None = None,
    reports: int = 1,
    rounds: Several = 1,
    delta: Deltas = DELTA,
    group: int = 1,
) -> pl.DataFrame:
    """Reports randomised on the device, then shuffled among so many people by a proxy that does not collude.

    >>> round(shuffle(100_000, 4.0)["epsilon"].item(), 2)
    0.17
    """
    about = {"relation": "replace-one", "reports": reports, "users": users}
    event = partial(ShuffledReports, count=reports, users=users)
    return _answered("shuffle", about, report_epsilon, epsilon, event, rounds, delta, group, name="report_epsilon")


def secure_sum(
    parties: int,
    *,
    entries: int = 54_000,
    width: int = 4,
    least: float | None = None,
    colluding: float | None = None,
) -> pl.DataFrame:
    """The cost of a secure sum among so many devices: neighbours, shares, bytes, and the odds of a failure; one row.

    entries, width: numbers in an update, and bytes of each. least: the share of parties that must stay to the end;
    None: 2/3. colluding: the share of them that may collude; None: 0.1. `exchanges` lists the bytes of each.

    >>> row = secure_sum(1000).row(0, named=True)
    >>> row["degree"], row["threshold"], row["exchanges"][2]["sent"]
    (96, 37, 216105)
    """
    return pl.DataFrame([cost(parties, entries, width, least, colluding)])


def paper(name: str) -> pl.DataFrame:
    """What a paper claims, beside what its mechanisms certify: privrec, fl-mv-dssm, pfedrec, fmf-ldp or privaterec.

    >>> paper("fmf-ldp").select("what", "claimed", "certified").row(2)
    ('20 epochs', 250.0, 5000.0)
    """
    found = published(name)
    rows = [
        {**claim.as_dict(), "relation": claim.certified().relation, "event": str(claim.event), "count": claim.count}
        for claim in found.claims
    ]
    about = [pl.lit(found.id).alias("paper"), pl.lit(found.title).alias("title")]
    return pl.DataFrame(rows, schema_overrides={"claimed": pl.Float64, "certified": pl.Float64}).with_columns(*about)


def meaning(epsilon: float, delta: float = DELTA) -> EpsilonMeaning:
    """What an ε means: how far an observer's odds about one person may move, and what an attacker finds at best.

    >>> what = meaning(1.0)
    >>> round(what.odds, 2), round(what.found, 4), what.short
    (2.72, 0.0272, 'odds × 2.72, finds 2.72 %')
    """
    check_delta(delta)
    return epsilon_meaning(epsilon, delta)


def ledger(model: Fitted | Trained | Ledger | str | Path, delta: float | None = None) -> pl.DataFrame:
    """A ledger line by line: which releases told whom what, about which unit, and the ε of one of them.

    model: a fitted model, the folder of a run, or a ledger. Equal rounds that follow one another are one line. delta:
    the δ of `epsilon_of_one`; None: the model's. The hashes of the ledger are verified first.

    >>> from homebody import Channel, FedIALS, Simulator, leave_one_out, load
    >>> from homebody.privacy import Clip, Gaussian
    >>> from homebody.training import fit
    >>> few = leave_one_out(load("synthetic:users=80,items=60,mean=12"))
    >>> model = fit(FedIALS(factors=4, uplink=Channel(Clip(1.0), Gaussian(z=2))), Simulator(few), rounds=5)
    >>> ledger(model).select("rounds", "count", "observers").rows()
    [('train, rounds 1–5', 5, ['server']), ('train, rounds 1–5', 5, ['clients', 'public'])]
    """
    if not isinstance(model, Fitted | Trained | Ledger):
        return statement(model, delta).ledger
    charged = model if isinstance(model, Ledger) else model.ledger
    if delta is None:
        delta = DELTA if isinstance(model, Ledger) else model.delta
    check_delta(delta)
    charged.verify()
    return _lines(lines_of([*releases_of(charged.entries())], delta))


def repeated(
    model: Fitted | Trained | Ledger | str | Path, times: Several = (1, 2, 4, 12), delta: float | None = None
) -> pl.DataFrame:
    """What a training costs that is released so many times, with the same people: ε about one person by observer.

    model, delta: as in `ledger`. A release that comes after others may use what they told: that costs no more.

    >>> from homebody import Channel, FedIALS, Simulator, leave_one_out, load
    >>> from homebody.privacy import Clip, Gaussian
    >>> from homebody.training import fit
    >>> few = leave_one_out(load("synthetic:users=80,items=60,mean=12"))
    >>> model = fit(FedIALS(factors=4, uplink=Channel(Clip(1.0), Gaussian(z=20))), Simulator(few), rounds=5)
    >>> repeated(model, [1, 12]).select("times", "server", "public").rows()
    [(1, inf, 0.447...), (12, inf, 1.704...)]
    """
    if isinstance(model, Fitted | Trained | Ledger):
        charged = model if isinstance(model, Ledger) else model.ledger
        delta = delta if delta is not None else DELTA if isinstance(model, Ledger) else model.delta
        check_delta(delta)
        charged.verify()
        return _repeated(charged, _listed("times", times, Integral), delta)
    stated = statement(model, delta).details  # refuses a ledger that was changed
    charged = Ledger(RunFolder.open(Path(model)).ledger_path)
    try:
        return repeated(charged, times, stated["delta"])
    finally:
        charged.close()


def _repeated(charged: Ledger, times: Sequence[int], delta: float) -> pl.DataFrame:
    if (least := min(times)) < 1:
        raise HomebodyError(f"A training is released at least once, not {least} times.")
    once = [Charge(row.observer, row.unit, event_from_json(row.event), row.part) for row in charged.entries()]  # type: ignore[arg-type]
    return pl.DataFrame(
        [
            {
                "times": count,
                **{
                    who: charged.epsilon(who, delta=delta, also=once * (count - 1)).epsilon
                    for who in charged.observers()
                },
                "delta": delta,
            }
            for count in times
        ]
    )


def statement(model: Fitted | str | Path, delta: float | None = None) -> Statement:
    """What a run certifies, to whom, about what, and what that rests on: every ε derived anew from its ledger.

    model: a model of `hb.fit`, or the folder of a run. delta: the δ to state ε at; None: the run's. A ledger that was
    changed, or that lost charges of rounds that were recorded, is refused.

    >>> statement("nowhere")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no run in nowhere...
    """
    path: object = model.path if isinstance(model, Fitted) else model
    if not isinstance(path, str | Path):
        kind = type(model).__name__
        raise HomebodyError(f"A statement is made of a model of hb.fit, or of the folder of a run, not of this {kind}.")
    return Statement(stated(RunFolder.open(Path(path)), delta))


@dataclass(frozen=True, eq=False)
class Statement:
    """A privacy statement. `details` is all of it, as `homebody account --run RUN --json` prints it."""

    details: Mapping[str, Any]

    @property
    def certified(self) -> pl.DataFrame:
        """ε by observer and unit: in total, of one round, by which accountant, and what it means for a person."""
        rows = []
        for row in self.details["certified"]:
            total = float(row["epsilon"])
            means = epsilon_meaning(total, row["delta"]) if row["unit"] == "user" else None
            rows.append(
                {
                    **{name: row[name] for name in ("observer", "unit")},
                    "epsilon": total,
                    "delta": row["delta"],
                    "epsilon_of_one_round": float(row["epsilon_of_one_round"]),
                    **{name: row[name] for name in ("accountant", "relation", "releases")},
                    "odds": means and means.odds,
                    "found_at_1_percent": means and means.found,
                    **{name: row[name] for name in ("mechanisms", "sampling", "notes")},
                }
            )
        return pl.DataFrame(rows, schema_overrides={"odds": pl.Float64, "found_at_1_percent": pl.Float64})

    @property
    def ledger(self) -> pl.DataFrame:
        """The ledger line by line, as `homebody.account.ledger` gives it."""
        return _lines(self.details["ledger"]["lines"])

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write statement.json and statement.html, a page that needs nothing else, into a folder."""
        return statement_page.write_statement(self.details, Path(folder))

    def __repr__(self) -> str:
        held = ", ".join(f"{row['observer']} {figure(row['epsilon'])}" for row in self._of_people())
        return f"<Statement: {statement_page.heading(self.details)}; ε {held}; δ = {self.details['delta']:g}>"

    def _repr_html_(self) -> str:
        said = self.details
        rows = [
            (
                row["observer"],
                row["sees"],
                *((figure(row["epsilon"]), figure(row["epsilon_of_one_round"])) if row["releases"] else ("–", "–")),
                row["releases"],
                epsilon_meaning(row["epsilon"], row["delta"]).short,
            )
            for row in self._of_people()
        ]
        columns = ("observer", "sees", "ε in total", "ε of one round", "releases", "means at most")
        title = f"{statement_page.heading(said)}, about one person, at δ = {said['delta']:g}"
        above = html(title, columns, rows, [said["budget"]["state"]] if said["budget"] else [])
        lines = [
            (line["rounds"], ", ".join(told["observers"]), told["what"], figure(told["epsilon_of_one"]))
            for line in said["ledger"]["lines"]
            for told in line["told"]
        ]
        below = html("The ledger", ("releases", "told to", "what happened", "ε of one"), lines)
        rests = html("What it assumes", lines=said["assumptions"]) + html("Outside of it", lines=said["outside"])
        return f"{above}{below}{rests}"

    def _of_people(self) -> list[Mapping[str, Any]]:
        return [row for row in self.details["certified"] if row["unit"] == "user"]


def _lines(lines: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    about = ("rounds", "phase", "first", "last", "count")
    rows = [
        {
            **{name: line[name] for name in about},
            **told,
            "epsilon_of_one": float(told["epsilon_of_one"]),
            "code": line["code"],
        }
        for line in lines
        for told in line["told"]
    ]
    schema: dict[str, pl.DataType] = {"rounds": pl.String(), "phase": pl.String()}
    schema |= dict.fromkeys(("first", "last", "count"), pl.Int64())
    schema |= {"observers": pl.List(pl.String())}
    schema |= dict.fromkeys(("unit", "part", "what", "relation", "sampling"), pl.String())
    return pl.DataFrame(rows, schema={**schema, "epsilon_of_one": pl.Float64(), "code": pl.String()})


def _sampling(kind: str | None, cohort: int | None, population: int | None, relation: str) -> Sampling:
    if cohort is None and population is None:
        if kind not in (None, "none"):
            raise HomebodyError(f"The sampling '{kind}' needs a cohort, and a population that it is drawn from.")
        return Sampling()
    if cohort is None or population is None:
        missing = "cohort" if cohort is None else "population"
        raise HomebodyError(f"A cohort and a population go together: give the {missing} as well.")
    if kind is None:
        kind = "fixed" if relation == "replace-one" else "poisson"
    drawn = Sampling(kind if kind != "none" else "fixed", cohort, population)  # type: ignore[arg-type]
    return Sampling() if kind == "none" else drawn


def _drawn(relation: str, drawn: Sampling) -> dict[str, Any]:
    sizes = {} if drawn.kind == "none" else {"cohort": drawn.cohort, "population": drawn.population}
    return {"relation": relation, "sampling": drawn.kind, **sizes}


def _answered(
    mechanism: str,
    about: Mapping[str, Any],
    given: float | None,
    target: float | None,
    event: Callable[[float], Event],
    rounds: Several,
    delta: Deltas,
    group: int,
    *,
    name: str = "noise",
    notes: Sequence[str] = (),
) -> pl.DataFrame:
    """A row for each number of rounds and each δ: ε for what was given, or what must be given for ε."""
    what = "a noise" if name == "noise" else "the ε of one report"
    if (given is None) == (target is None):
        raise HomebodyError(f"Give either {what}, to learn the ε of all rounds, or that ε, to learn what it takes.")
    counts, deltas = _listed("rounds", rounds, Integral), _listed("delta", delta, Real)
    _listed(name if target is None else "epsilon", [given if target is None else target], Real)
    for count in counts:
        if count < 1:
            raise HomebodyError(f"The number of rounds must be at least 1, not {count}.")
    for each in deltas:
        check_delta(each)
    if target is not None and mechanism in ("gaussian", "skellam") and 0 in deltas:
        raise HomebodyError(f"{mechanism.capitalize()} noise has no ε at δ = 0: give a δ above 0, or use laplace.")
    about = {"mechanism": mechanism, **about, **({"group": group} if group > 1 else {})}
    rows = []
    for count in counts:
        for each in deltas:
            value = given if given is not None else _calibrated(event, name, cast(float, target), count, each, group)
            total = certified([(event(value), count)], each, group=group)
            means = epsilon_meaning(total.epsilon, each)
            rows.append(
                {
                    name: float(value),
                    "rounds": count,
                    "delta": float(each),
                    "epsilon": total.epsilon,
                    "accountant": total.accountant,
                    "epsilon_of_one_round": certified([(event(value), 1)], each, group=group).epsilon,
                    "odds": means.odds,
                    "found_at_1_percent": means.found,
                    **about,
                    "bounds": [{"by": by, "bound": bound} for by, bound in total.bounds.items()],
                    "notes": [*total.notes, *notes],
                }
            )
    kinds = {"bounds": pl.List(pl.Struct({"by": pl.String, "bound": pl.Float64})), "notes": pl.List(pl.String)}
    return pl.DataFrame(rows, infer_schema_length=None, schema_overrides=kinds)


def _listed(name: str, given: Any, kind: type) -> list[Any]:
    """One number or several, as a list."""
    many = list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else [given]
    for each in many:
        if not isinstance(each, kind) or isinstance(each, bool):
            what = "whole numbers" if kind is Integral else "numbers"
            raise HomebodyError(f"{name} takes {what}, not {each!r}.")
    return many


def _calibrated(
    event: Callable[[float], Event], name: str, target: float, count: int, delta: float, group: int
) -> float:
    def value(noise: float) -> float:
        # The less of a report's ε, the more noise.
        return noise if name == "noise" else 1 / noise

    return value(calibrate_events(lambda z: [(event(value(z)), count)], target, delta, group=group))
