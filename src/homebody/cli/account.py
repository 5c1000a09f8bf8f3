"""`homebody account`: what ε a mechanism costs, what noise a budget asks for, what papers claim and runs certify."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from click.exceptions import NoArgsIsHelpError
from typer import Context, Option, Typer

from homebody.cli import options
from homebody.errors import HomebodyError, install

if TYPE_CHECKING:
    import polars as pl

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


ALLOWS = (
    "odds ×: the factor by which an observer's odds about {} may move; found: the most true positives of any attack at "
    "1 % false ones"
)


@app.callback(invoke_without_command=True)
def account(
    context: Context,
    paper: Annotated[
        str | None,
        Option(
            help="Compare a paper's claimed ε with the certified: privrec, fl-mv-dssm, pfedrec, fmf-ldp or privaterec."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        Option(
            help="A run's folder, its name in runs/, or latest: explain its ledger line by line.",
            callback=options.run_named,
        ),
    ] = None,
    delta: Annotated[float | None, Option(help="With --run: the δ to state ε at; by default the run's.")] = None,
    statement: Annotated[
        Path | None, Option(help="With --run: a folder to write statement.json and statement.html into.")
    ] = None,
    times: Annotated[
        list[int] | None,
        Option(help="With --run: ε if the same people's data is trained on so many times; repeat for a table."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compute the ε of a mechanism or the noise for a budget; compare papers' claims; explain a run's ledger."""
    given = {"--paper": paper, "--run": run, "--delta": delta, "--statement": statement, "--times": times or None}
    said = [name for name, value in given.items() if value is not None]
    if context.invoked_subcommand is not None:
        if said:
            raise HomebodyError(f"{said[0]} does not go with a mechanism: leave out '{context.invoked_subcommand}'.")
        return
    if run is None and (said := [name for name in said if name != "--paper"]):
        raise HomebodyError(f"{said[0]} needs a run: give its folder with --run.")
    if paper is not None and run is not None:
        raise HomebodyError("--paper and --run cannot be combined: leave one out.")
    if times and statement is not None:
        raise HomebodyError("--times and --statement cannot be combined: leave one out.")
    if run is not None and times:
        _print_times(run, times, delta, as_json)
    elif run is not None:
        _explain(run, delta, statement, as_json)
    elif paper is not None:
        _print_paper(paper, as_json)
    else:
        raise NoArgsIsHelpError(context)


def _explain(run: Path, delta: float | None, into: Path | None, as_json: bool) -> None:
    from homebody.account import statement
    from homebody.report.statement_page import print_statement

    stated = statement(run, delta)
    written = stated.save(into) if into is not None else ()
    lines = (f"statement: {file}" for file in written)
    options.answer(stated.details, as_json, lambda: print_statement(stated.details), *lines)


def _print_times(run: Path, times: list[int], delta: float | None, as_json: bool) -> None:
    from homebody.account import repeated
    from homebody.report.record import jsonable
    from homebody.report.statement import figure

    rows = repeated(run, times, delta).to_dicts()
    observers = [name for name in rows[0] if name not in ("times", "delta")]

    def show() -> None:
        table = options.table(["times", *observers], ["times", *observers])
        for row in rows:
            table.add_row(f"{row['times']:,}", *(figure(row[name]) for name in observers))
        at = f"δ = {rows[0]['delta']:g}"
        options.show(f"ε of one person, if the training of {run.name} is released so many times; {at}", table)

    options.answer(jsonable({"rows": rows}), as_json, show)


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
        from homebody import account

        drawn = {"cohort": cohort, "population": population, "relation": relation, "sampling": sampling}
        ask = partial(getattr(account, name), delta=delta, group=group, **drawn)
        _answer(ask, noise, epsilon, rounds, plot, as_json)

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
    from homebody import account

    drawn = {"cohort": cohort, "population": population, "relation": relation, "sampling": sampling}
    ask = partial(account.skellam, delta=delta, group=group, entries=entries, steps=steps, **drawn)  # type: ignore[arg-type]
    _answer(ask, noise, epsilon, rounds, plot, as_json)


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
    from homebody import account

    frame = account.secure_sum(parties, entries=entries, width=width, least=least, colluding=colluding)
    found = frame.row(0, named=True)
    options.answer(found, as_json, lambda: _print_cost(found))


def _print_cost(found: dict[str, Any]) -> None:
    figures = options.table(["of a secure sum", ""], [""])
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
    sizes = ["bytes that a party sends", "bytes that it receives"]
    traffic = options.table(["exchange", *sizes], sizes)
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
    from homebody import account

    ask = partial(account.onebit, reports=reports, delta=delta, group=group)
    _answer(ask, report_epsilon, epsilon, rounds, plot, as_json, "report_epsilon")


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
    from homebody import account

    ask = partial(account.shuffle, users, reports=reports, delta=delta, group=group)
    _answer(ask, report_epsilon, epsilon, rounds, plot, as_json, "report_epsilon")


OF_A_ROW = (
    *("epsilon", "accountant", "rounds", "delta", "epsilon_of_one_round"),
    *("odds", "found_at_1_percent", "bounds", "notes"),
)
"""What differs between the rows of one answer, beside the noise."""


def _answer(
    ask: Callable[..., pl.DataFrame],
    given: float | None,
    target: float | None,
    rounds: list[int],
    plot: Path | None,
    as_json: bool,
    name: str = "noise",
) -> None:
    """A row for each number of rounds and each δ: ε for what was given, or what must be given for ε."""
    from homebody.report.record import jsonable

    option = "--" + name.replace("_", "-")
    if (given is None) == (target is None):
        raise HomebodyError(f"Give either {option}, to learn ε, or --epsilon, to learn {option}.")
    rows = ask(**{name: given}, epsilon=target, rounds=rounds).to_dicts()
    for row in rows:
        row["bounds"] = {each["by"]: each["bound"] for each in row["bounds"]}
    if plot is not None:
        _draw(plot, partial(ask, **{name: rows[0][name]}), max(rounds))
    common = {key: value for key, value in rows[0].items() if key not in (*OF_A_ROW, name)}
    rows = [{key: value for key, value in row.items() if key not in common} for row in rows]
    options.answer(
        jsonable(common | (rows[0] if len(rows) == 1 else {"rows": rows})),
        as_json,
        lambda: _print_rows(common, name, rows),
        *([f"ε over rounds: {plot}"] if plot is not None else []),
    )


def _print_rows(about: dict[str, Any], name: str, rows: list[dict[str, Any]]) -> None:
    from homebody.report.statement import figure
    from homebody.report.words import NOT_COVERED_IN_SHORT, epsilon_meaning

    whom = f"a group of {about['group']}" if "group" in about else "one person"
    meanings = [epsilon_meaning(row["epsilon"], row["delta"], whom) for row in rows]
    numbers = [name.replace("_", " "), "rounds", "δ", "ε", "ε of one round", "odds ×", "found"]
    table = options.table([*numbers[:4], "by", *numbers[4:], "other valid bounds"], numbers)
    for row, meaning in zip(rows, meanings, strict=True):
        others = ", ".join(f"{who} {figure(e)}" for who, e in row["bounds"].items() if who != row["accountant"])
        table.add_row(
            *(f"{row[name]:.4g}", f"{row['rounds']:,}", f"{row['delta']:g}", figure(row["epsilon"]), row["accountant"]),
            *(figure(row["epsilon_of_one_round"]), *meaning.cells, others),
        )
    asked = ", ".join(f"{key} {value}" for key, value in about.items())
    notes = dict.fromkeys(note for row in rows for note in row["notes"])
    said = [meanings[0].sentence] if len(rows) == 1 else [ALLOWS.format(whom)]
    options.show(asked, table, *said, f"not covered: {NOT_COVERED_IN_SHORT}", *notes)


def _print_paper(name: str, as_json: bool) -> None:
    from homebody import account
    from homebody.report.record import jsonable

    rows = account.paper(name).to_dicts()
    about = {key: rows[0][key] for key in ("paper", "title")}
    rows = [{key: value for key, value in row.items() if key not in about} for row in rows]
    options.answer(jsonable(about | {"rows": rows}), as_json, lambda: _print_claims(about["title"], rows))


def _print_claims(title: str, rows: list[dict[str, Any]]) -> None:
    from homebody.report.statement import figure

    reasons = list(dict.fromkeys(row["why"] for row in rows))
    numbers = ("δ", "claimed ε", "certified ε")
    table = options.table(["what", "observer", "unit", *numbers, "by", "why"], numbers, title=title)
    for row in rows:
        claimed = "none" if row["claimed"] is None else f"{row['claimed']:g}".replace("inf", "∞")
        table.add_row(
            *(row["what"], row["observer"], row["unit"], f"{row['delta']:g}", claimed, figure(row["certified"])),
            *(row["accountant"], str(reasons.index(row["why"]) + 1)),
        )
    numbered = (f"{number}. {why}" for number, why in enumerate(reasons, start=1))
    options.show(table, *numbered)


def _draw(file: Path, ask: Callable[..., pl.DataFrame], most: int) -> None:
    """A page that needs nothing else: ε over rounds, a line for each δ."""
    if file.suffix != ".html":
        raise HomebodyError(f"--plot writes a page, {file.stem}.html, not '{file.name}'.")
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise HomebodyError(f"--plot needs Plotly: {install('report')}.") from error
    from homebody.files import SHARED, replacing

    curve = ask(rounds=sorted({max(1, round(most ** (step / 24))) for step in range(25)}))
    figure = graph_objects.Figure()
    for (delta,), line in curve.group_by("delta", maintain_order=True):
        name = f"δ = {delta:g}"
        figure.add_scatter(x=line["rounds"].to_list(), y=line["epsilon"].to_list(), name=name, mode="lines+markers")
    figure.update_layout(title=curve["mechanism"][0], xaxis_title="rounds", yaxis_title="certified ε", showlegend=True)
    with replacing(file, mode=SHARED) as page:
        page.write(figure.to_html(include_plotlyjs=True).encode())
