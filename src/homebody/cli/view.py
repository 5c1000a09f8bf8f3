"""`homebody view`: an app that holds one view of a device's people, as a process of a user of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, Typer, echo

from homebody.cli import options
from homebody.errors import several

__all__ = ["app"]

app = Typer(help="Run an app that holds one view of a device's people, separate from other apps.", no_args_is_help=True)

App = Annotated[Path, Argument(help="The app's folder.", metavar="APP")]


@app.command()
def init(
    folder: Annotated[Path, Argument(help="A folder that is empty or does not exist.", metavar="APP")],
    invitation: Annotated[Path, Argument(help="The file that `homebody client views add` wrote.")],
    as_json: options.Json = False,
) -> None:
    """Create an app from a device's invitation. Only the user who runs this can open its folder."""
    from homebody.federation.app.folder import AppFolder, AppSettings

    settings = AppSettings.read(invitation)
    AppFolder.create(folder, settings).close()
    options.answer(
        {"folder": str(folder), "view": settings.view, "socket": settings.socket},
        as_json,
        f"The app of the view '{settings.view}' is in {folder}. {invitation} is not needed any more: delete it.",
        f"Bring in what it knows of people with `homebody view import {folder} FILE`.",
    )


@app.command("import")
def import_features(
    folder: App,
    file: Annotated[Path, Argument(help="A CSV or Parquet file with one row per person: name and features.")],
    as_json: options.Json = False,
) -> None:
    """Import people's features from a file; they replace what the app knew about those people."""
    from homebody.federation.app.features import read_features
    from homebody.federation.app.folder import AppFolder

    notes: list[str] = []
    people = read_features(file, notes.append)
    with AppFolder(folder) as app:
        app.describe(people)
    names = sorted({name for features in people.values() for name in features})
    options.answer(
        {"people": len(people), "features": names, "notes": notes},
        as_json,
        *notes,
        f"{several(len(people), 'person', 'people')} described by {several(len(names), 'feature')}.",
    )


@app.command()
def start(folder: App) -> None:
    """Answer the device, until stopped (Ctrl-C, or SIGTERM)."""
    from homebody.federation.app.process import take_part

    take_part(folder)


@app.command()
def ledger(
    folder: App,
    person: Annotated[str | None, Option("--person", help="Only this person.")] = None,
    delta: Annotated[float, Option("--delta", help="The δ to state ε at.")] = 1e-6,
    as_json: options.Json = False,
) -> None:
    """List what the device showed this app, and the ε spent by people's other views."""
    from homebody.federation.app.disclosures import disclosure
    from homebody.federation.app.folder import AppFolder

    with AppFolder(folder) as app:
        shown = disclosure(app, person, delta)
    running = "running" if shown["running"] else "not running"
    nobody = [] if shown["people"] else ["It knows nobody yet: bring features in with `homebody view import`."]
    options.answer(
        shown,
        as_json,
        f"The app of the view '{shown['view']}' in {folder}: {running}",
        *nobody,
        *(partial(_print_person, who, shown["delta"]) for who in shown["people"]),
    )


def _print_person(who: dict[str, Any], delta: float) -> None:
    from homebody.report.statement import figure

    echo(f"{who['person']}: {several(len(who['features']), 'feature')}")
    for line in who["seen"]:
        rounds = line["first"] if line["first"] == line["last"] else f"{line['first']} to {line['last']}"
        what = "samples to learn from" if line["what"] == "gradient" else "all items, to rank them"
        echo(
            f"  {rounds} of {line['run'][:8]}: {several(line['questions'], 'question')} ({what}); "
            f"{several(line['items'], 'item')} of this person named, {several(line['received'], 'byte')} seen, "
            f"{several(line['sent'], 'byte')} sent"
        )
    if who["charged"]:
        echo(
            f"  {several(who['charged'], 'round')} charged: ε = {figure(who['epsilon'])} about this person's other "
            f"views, at δ = {delta:g}"
        )
