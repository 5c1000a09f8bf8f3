"""`homebody account`: what ε a mechanism costs, what noise a budget asks for, what papers claim and runs certify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Context, Option, Typer, echo

from homebody.cli import options
from homebody.errors import HomebodyError

if TYPE_CHECKING:
    from homebody.privacy.events import Event, Relation, Sampling

__all__ = ["app"]

app = Typer()

Rounds = Annotated[list[int], Option(help="Number of rounds; repeat for a table.")]
Delta = Annotated[list[float], Option(help="δ, the probability with which the bound ε may fail; repeat for a table.")]
Target = Annotated[float | None, Option("--epsilon", help="A target ε: compute the noise it needs.")]
Noise = Annotated[float | None, Option(help="The noise multiplier: noise divided by the sensitivity.")]
Cohort = Annotated[int | None, Option(help="Clients in a round; by default everyone.")]
Population = Annotated[int | None, Option(help="Clients that the cohort is drawn from.")]
How = Annotated[
    str | None,
    Option(
        "--sampling",
        help="How the cohort is drawn: fixed, poisson or none; by default the kind that fits the relation.",
    ),
]
Compared = Annotated[str, Option(help="How neighbouring datasets differ: replace-one or add-remove.")]
Group = Annotated[int, Option(help="The size of the group that is protected together.")]
Plot = Annotated[Path | None, Option(help="Draw ε over rounds into this .html file.")]
ReportEpsilon = Annotated[float | None, Option("--report-epsilon", help="ε of one report.")]
Sent = Annotated[int, Option("--reports", help="Reports of one person in a round.")]


@dataclass(frozen=True)
class Inquiry:
    """A question about the ε of a mechanism, or about the noise for an ε."""

    about: dict[str, Any]
    name: str
    """What is given, or looked for: `noise`, or `report_epsilon`."""
    given: float | None
    target: float | None
    event: Callable[[float], Event]
    rounds: list[int]
    deltas: list[float]
    group: int
    notes: tuple[str, ...] = ()
    """What is said beside what the accountant says."""


@app.callback(invoke_without_command=True)
def account(
    context: Context,
    paper: Annotated[
        str | None,
        Option(
            help="Compare a paper's claimed ε with the certified: privrec, fl-mv-dssm, pfedrec, fmf-ldp or privaterec."
        ),
    ] = None,
    run: Annotated[Path | None, Option(help="A run's folder: explain its ledger line by line.")] = None,
    delta: Annotated[float | None, Option(help="With --run: the δ to state ε at; by default the run's.")] = None,
    statement: Annotated[
        Path | None, Option(help="With --run: a folder to write statement.json and statement.html into.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compute the ε of a mechanism or the noise for a budget; compare papers' claims; explain a run's ledger."""
    given = {"--paper": paper, "--run": run, "--delta": delta, "--statement": statement}
    said = [name for name, value in given.items() if value is not None]
    if context.invoked_subcommand is not None:
        if said:
            raise HomebodyError(f"{said[0]} does not go with a mechanism: leave out '{context.invoked_subcommand}'.")
        return
    if run is None and (said := [name for name in said if name != "--paper"]):
        raise HomebodyError(f"{said[0]} needs a run: give its folder with --run.")
    if paper is not None and run is not None:
        raise HomebodyError("--paper and --run cannot be combined: leave one out.")
    if run is not None:
        _explain(run, delta, statement, as_json)
    elif paper is not None:
        _print_paper(paper, as_json)
    else:
        echo(context.get_help())


def _explain(run: Path, delta: float | None, into: Path | None, as_json: bool) -> None:
    from homebody.report import RunFolder
    from homebody.report.statement import statement
    from homebody.report.statement_page import print_statement, write_statement

    stated = statement(RunFolder.open(run), delta)
    written = write_statement(stated, into) if into is not None else ()
    options.answer(stated, as_json, lambda: print_statement(stated), *(f"statement: {file}" for file in written))


def _noise(name: str, about: str, deltas: list[float]) -> None:
    """A command for a mechanism that adds noise."""

    def command(
        noise: Noise = None,
        epsilon: Target = None,
        rounds: Rounds = [1],  # noqa: B006
        delta: Delta = deltas,
        cohort: Cohort = None,
        population: Population = None,
        relation: Compared = "replace-one",
        sampling: How = None,
        group: Group = 1,
        plot: Plot = None,
        as_json: options.Json = False,
    ) -> None:
        from homebody.privacy.events import GaussianRelease, LaplaceRelease

        drawn = _sampling(sampling, cohort, population, relation)
        release = GaussianRelease if name == "gaussian" else LaplaceRelease
        event = partial(release, relation=cast("Relation", relation), sampling=drawn)
        _answer(
            Inquiry(_about(name, relation, drawn), "noise", noise, epsilon, event, rounds, delta, group), plot, as_json
        )

    app.command(name, help=about)(command)


_noise("gaussian", "Gaussian noise of NOISE × the ℓ2 sensitivity under the relation.", [1e-6])
_noise("laplace", "Laplace noise of scale NOISE × the ℓ1 sensitivity under the relation.", [0.0])


@app.command()
def skellam(
    noise: Noise = None,
    epsilon: Target = None,
    rounds: Rounds = [1],  # noqa: B006
    delta: Delta = [1e-6],  # noqa: B006
    cohort: Cohort = None,
    population: Population = None,
    relation: Compared = "replace-one",
    sampling: How = None,
    entries: Annotated[int, Option(help="Numbers in an update; 0: a bound for any size.")] = 0,
    steps: Annotated[
        int | None, Option(help="The sensitivity in integer steps; by default what rounding needs.")
    ] = None,
    group: Group = 1,
    plot: Plot = None,
    as_json: options.Json = False,
) -> None:
    """Skellam noise of NOISE × the ℓ2 sensitivity: each party of a secure sum adds a share of it."""
    from homebody.privacy.events import SkellamRelease
    from homebody.privacy.ring import fitting
    from homebody.privacy.secure_sum import COMPLETE, SEMI_HONEST

    drawn = _sampling(sampling, cohort, population, relation)
    if steps is None:
        steps = fitting(max(0, entries)) * (1 if relation == "add-remove" else 2)
    event = partial(SkellamRelease, steps=steps, entries=entries, relation=cast("Relation", relation), sampling=drawn)
    said = _about("skellam", relation, drawn) | {"steps": steps} | ({"entries": entries} if entries else {})
    notes = (SEMI_HONEST,) if (cohort or 0) > COMPLETE else ()
    _answer(Inquiry(said, "noise", noise, epsilon, event, rounds, delta, group, notes), plot, as_json)


@app.command("secure-sum")
def secure_sum(
    parties: Annotated[int, Option(help="Devices that are asked to take part.")],
    entries: Annotated[int, Option(help="Numbers in an update.")] = 54_000,
    width: Annotated[int, Option(help="Bytes per number in the channel's integer ring.")] = 4,
    least: Annotated[
        float | None, Option(help="The share of parties that must stay to the end; by default 2/3.")
    ] = None,
    colluding: Annotated[float | None, Option(help="The share of parties that may collude; by default 0.1.")] = None,
    as_json: options.Json = False,
) -> None:
    """Show the cost of a secure sum among PARTIES devices: neighbours, shares, bytes, and the failure probability."""
    from homebody.federation.secure_sum.cost import cost

    found = cost(parties, entries, width, least, colluding)
    options.answer(found, as_json, lambda: _print_cost(found))


def _print_cost(found: dict[str, Any]) -> None:
    from rich.table import Table

    figures = Table("of a secure sum", "")
    for name, text in (
        ("parties", f"{found['parties']:,}"),
        ("of them must stay to the end", f"{found['quorum']:,}"),
        ("of them may collude with the server", f"{found['colluders']:,}"),
        ("neighbours of a party", f"{found['degree']:,}{' (everyone else)' if found['complete'] else ''}"),
        ("shares that open a secret", f"{found['threshold']:,}"),
        ("odds that it is not private", _odds(found["privacy"])),
        ("odds that it does not open", _odds(found["failure"])),
        ("noise beyond what is counted on, √(n/h)", f"{found['excess_noise']:.3f} ×"),
    ):
        figures.add_row(name, text)
    traffic = Table("exchange", "bytes that a party sends", "bytes that it receives")
    for row in found["exchanges"]:
        traffic.add_row(row["exchange"], f"{row['sent']:,}", f"{row['received']:,}")
    options.show(figures, traffic, *found["notes"])


def _odds(value: float) -> str:
    from math import log2

    return f"{value:.2g} (2^{log2(value):.1f})" if value else "0"


@app.command()
def onebit(
    report_epsilon: ReportEpsilon = None,
    reports: Sent = 1,
    epsilon: Target = None,
    rounds: Rounds = [1],  # noqa: B006
    delta: Delta = [0.0],  # noqa: B006
    group: Group = 1,
    plot: Plot = None,
    as_json: options.Json = False,
) -> None:
    """Reports randomised on the device: each person sends REPORTS per round, and their privacy losses compose."""
    from homebody.privacy.events import Reports

    about = {"mechanism": "onebit", "relation": "replace-one", "reports": reports}
    event = partial(Reports, count=reports)
    _answer(Inquiry(about, "report_epsilon", report_epsilon, epsilon, event, rounds, delta, group), plot, as_json)


@app.command()
def shuffle(
    users: Annotated[int, Option(help="People whose reports are shuffled together.")],
    report_epsilon: ReportEpsilon = None,
    reports: Sent = 1,
    epsilon: Target = None,
    rounds: Rounds = [1],  # noqa: B006
    delta: Delta = [1e-6],  # noqa: B006
    group: Group = 1,
    plot: Plot = None,
    as_json: options.Json = False,
) -> None:
    """Reports randomised on the device, then shuffled among USERS people by a proxy that does not collude."""
    from homebody.privacy.events import ShuffledReports

    about = {"mechanism": "shuffle", "relation": "replace-one", "reports": reports, "users": users}
    event = partial(ShuffledReports, count=reports, users=users)
    _answer(Inquiry(about, "report_epsilon", report_epsilon, epsilon, event, rounds, delta, group), plot, as_json)


def _sampling(kind: str | None, cohort: int | None, population: int | None, relation: str) -> Sampling:
    from homebody.privacy.events import Sampling

    if cohort is None and population is None:
        if kind not in (None, "none"):
            raise HomebodyError(f"--sampling {kind} needs --cohort and --population.")
        return Sampling()
    if cohort is None or population is None:
        missing = "--cohort" if cohort is None else "--population"
        raise HomebodyError(f"--cohort and --population go together: give {missing} as well.")
    if kind is None:
        kind = "fixed" if relation == "replace-one" else "poisson"
    drawn = Sampling(kind if kind != "none" else "fixed", cohort, population)  # type: ignore[arg-type]
    return Sampling() if kind == "none" else drawn


def _about(mechanism: str, relation: str, drawn: Sampling) -> dict[str, Any]:
    sizes = {} if drawn.kind == "none" else {"cohort": drawn.cohort, "population": drawn.population}
    return {"mechanism": mechanism, "relation": relation, "sampling": drawn.kind, **sizes}


def _answer(asked: Inquiry, plot: Path | None, as_json: bool) -> None:
    """A row for each number of rounds and each δ: ε for what was given, or what must be given for ε."""
    from homebody.report.record import jsonable

    option = "--" + asked.name.replace("_", "-")
    if (asked.given is None) == (asked.target is None):
        raise HomebodyError(f"Give either {option}, to learn ε, or --epsilon, to learn {option}.")
    for count in asked.rounds:
        if count < 1:
            raise HomebodyError(f"--rounds must be at least 1, not {count}.")
    for delta in asked.deltas:
        if not 0 <= delta < 1:
            raise HomebodyError(f"--delta must be at least 0 and under 1, not {delta}.")
    rows = [_row(asked, count, delta) for count in asked.rounds for delta in asked.deltas]
    if plot is not None:
        _draw(plot, asked, rows[0][asked.name])
    common = asked.about | ({"group": asked.group} if asked.group > 1 else {})
    options.answer(
        jsonable(common | (rows[0] if len(rows) == 1 else {"rows": rows})),
        as_json,
        lambda: _print_rows(common, asked.name, rows),
        *([f"ε over rounds: {plot}"] if plot is not None else []),
    )


def _row(asked: Inquiry, count: int, delta: float) -> dict[str, Any]:
    from homebody.privacy.accountant import epsilon

    value = asked.given if asked.given is not None else _calibrated(asked, count, delta)
    total = epsilon([(asked.event(value), count)], delta, group=asked.group)
    return {
        "epsilon": total.epsilon,
        "accountant": total.accountant,
        asked.name: value,
        "rounds": count,
        "delta": delta,
        "epsilon_of_one_round": epsilon([(asked.event(value), 1)], delta, group=asked.group).epsilon,
        "bounds": dict(total.bounds),
        "notes": [*total.notes, *asked.notes],
    }


def _calibrated(asked: Inquiry, count: int, delta: float) -> float:
    from homebody.privacy.budget import calibrate_events

    name = asked.about["mechanism"]
    if name in ("gaussian", "skellam") and delta == 0:
        raise HomebodyError(f"{name.capitalize()} noise has no ε at δ = 0: give a --delta above 0, or use laplace.")
    assert asked.target is not None

    def value(noise: float) -> float:
        # The less of a report's ε, the more noise.
        return noise if asked.name == "noise" else 1 / noise

    noise = calibrate_events(lambda z: [(asked.event(value(z)), count)], asked.target, delta, group=asked.group)
    return value(noise)


def _print_rows(about: dict[str, Any], name: str, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from homebody.report.statement import figure

    table = Table(name.replace("_", " "), "rounds", "δ", "ε", "by", "ε of one round", "other valid bounds")
    for row in rows:
        others = ", ".join(f"{who} {figure(e)}" for who, e in row["bounds"].items() if who != row["accountant"])
        table.add_row(
            *(f"{row[name]:.4g}", f"{row['rounds']:,}", f"{row['delta']:g}", figure(row["epsilon"]), row["accountant"]),
            *(figure(row["epsilon_of_one_round"]), others),
        )
    asked = ", ".join(f"{key} {value}" for key, value in about.items())
    notes = dict.fromkeys(note for row in rows for note in row["notes"])
    options.show(asked, table, *notes)


def _print_paper(name: str, as_json: bool) -> None:
    from homebody.privacy.papers import paper
    from homebody.report.record import jsonable

    published = paper(name)
    rows = [
        {**claim.as_dict(), "relation": claim.certified().relation, "event": str(claim.event), "count": claim.count}
        for claim in published.claims
    ]
    answer = {"paper": published.id, "title": published.title, "rows": rows}
    options.answer(jsonable(answer), as_json, lambda: _print_claims(published.title, rows))


def _print_claims(title: str, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from homebody.report.statement import figure

    reasons = list(dict.fromkeys(row["why"] for row in rows))
    table = Table("what", "observer", "unit", "δ", "claimed ε", "certified ε", "by", "why", title=title)
    for row in rows:
        claimed = "none" if row["claimed"] is None else f"{row['claimed']:g}".replace("inf", "∞")
        table.add_row(
            *(row["what"], row["observer"], row["unit"], f"{row['delta']:g}", claimed, figure(row["certified"])),
            *(row["accountant"], str(reasons.index(row["why"]) + 1)),
        )
    numbered = (f"{number}. {why}" for number, why in enumerate(reasons, start=1))
    options.show(table, *numbered)


def _draw(file: Path, asked: Inquiry, value: float) -> None:
    """A page that needs nothing else: ε over rounds, a line for each δ."""
    if file.suffix != ".html":
        raise HomebodyError(f"--plot writes a page, {file.stem}.html, not '{file.name}'.")
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise HomebodyError("--plot needs plotly: pip install 'homebody[report]'.") from error
    from homebody.files import SHARED, replacing
    from homebody.privacy.accountant import epsilon

    most, event = max(asked.rounds), asked.event(value)
    counts = sorted({max(1, round(most ** (step / 24))) for step in range(25)})
    figure = graph_objects.Figure()
    for delta in asked.deltas:
        values = [epsilon([(event, count)], delta, group=asked.group).epsilon for count in counts]
        figure.add_scatter(x=counts, y=values, name=f"δ = {delta:g}", mode="lines+markers")
    figure.update_layout(title=str(event), xaxis_title="rounds", yaxis_title="certified ε", showlegend=True)
    with replacing(file, mode=SHARED) as page:
        page.write(figure.to_html(include_plotlyjs=True).encode())
