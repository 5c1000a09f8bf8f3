"""`homebody client impressions`: what a device's people were shown, and what of it they clicked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, Typer

from homebody.cli import options
from homebody.cli.client_roster import Dir
from homebody.errors import several

if TYPE_CHECKING:
    from rich.table import Table

    from homebody.federation.device.impressions import Impression

__all__ = ["app"]

app = Typer(
    help="Manage what people were shown and clicked, which methods for news learn from; it stays on the device.",
    no_args_is_help=True,
)

Name = Annotated[str, Argument(help="The person, by name.")]
RankedBy = Annotated[
    str,
    Option(
        "--ranked-by",
        help="Who put the lists in order: 'server' if the server knows them; 'device' otherwise. Of a list that the "
        "server does not know, no report names an item.",
    ),
]


@app.command("import")
def import_impressions(
    folder: Dir,
    file: Annotated[Path, Argument(help="A CSV or Parquet file: impression, user, item, clicked, time.")],
    person: Annotated[str | None, Option(help="The person whose impressions they are; added if new.")] = None,
    only: Annotated[
        list[str] | None, Option(help="Only this person of a file of several; repeat for more, in order.")
    ] = None,
    ranked_by: RankedBy = "device",
    as_json: options.Json = False,
) -> None:
    """Add the impressions of a file, all or none; those that are there already are not added again."""
    from homebody.federation.device.home import Home

    with Home(folder) as home:
        done = home.impressions.import_file(file, person, ranked=ranked_by, only=only or ())
    options.answer(
        {**done._asdict(), "new": [newcomer._asdict() for newcomer in done.new]},
        as_json,
        f"{several(done.added, 'impression')} added, {done.repeated:,} known already.",
        *([f"{several(done.left_out, 'impression')} of others left out."] if done.left_out else []),
        *(f"New: {newcomer.name} (slot {newcomer.slot})." for newcomer in done.new),
    )


@app.command()
def append(
    folder: Dir,
    person: Name,
    shown: Annotated[list[str], Option(help="An item that was shown; repeat, in the order of the list.")],
    clicked: Annotated[list[str] | None, Option(help="An item of these that was clicked; repeat.")] = None,
    time: Annotated[str | None, Option(help="A number or an ISO date; by default now.")] = None,
    ranked_by: RankedBy = "device",
    as_json: options.Json = False,
) -> None:
    """Add one impression. What was clicked joins the person's history too."""
    from homebody.federation.device.history import read_time
    from homebody.federation.device.home import Home

    with Home(folder) as home:
        when = None if time is None else read_time(time)
        noted = home.impressions.append(person, shown, clicked or (), when, ranked_by)
    text = f"{several(len(noted.shown), 'item')} shown to {person}, {several(len(noted.clicked), 'click')}."
    options.answer(noted._asdict(), as_json, text)


@app.command()
def click(
    folder: Dir,
    person: Name,
    item: Annotated[str, Argument(help="The item's id, of the list that `homebody client recommend` showed last.")],
    as_json: options.Json = False,
) -> None:
    """Note a click in the list that a person was shown last: it becomes an impression, and joins their history."""
    from homebody.federation.device.home import Home

    with Home(folder) as home:
        noted = home.impressions.click(person, item)
    options.answer(noted._asdict(), as_json, f"{person} clicked {noted.item}.")


@app.command("list")
def list_impressions(folder: Dir, person: Name, as_json: options.Json = False) -> None:
    """List a person's impressions."""
    from homebody.federation.device.home import Home

    with Home(folder) as home:
        known = home.impressions.of(person)
    options.answer({"impressions": [one._asdict() for one in known]}, as_json, lambda: options.show(_table(known)))


@app.command()
def export(
    folder: Dir,
    file: Annotated[Path, Argument(help="The CSV file to write.")],
    person: Annotated[str | None, Option(help="Only this person's impressions.")] = None,
    as_json: options.Json = False,
) -> None:
    """Write the impressions as a CSV file that `import` reads."""
    from homebody.federation.device.home import Home

    with Home(folder) as home:
        count = home.impressions.export(file, person)
    options.answer(
        {"impressions": count, "file": str(file)}, as_json, f"{several(count, 'impression')} written to {file}."
    )


def _table(known: list[Impression]) -> Table:
    table = options.table(("time", "ranked by", "shown", "clicked"), overflow="fold")
    for one in known:
        table.add_row(str(one.time), one.ranked, ", ".join(one.shown), ", ".join(one.clicked))
    return table
