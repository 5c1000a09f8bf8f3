"""`homebody client views`: apps that hold views of a device's people."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, Typer

from homebody.cli import options
from homebody.cli.client_roster import Dir

__all__ = ["app"]

app = Typer(help="Manage the apps that hold views of this device's people.", no_args_is_help=True)


@app.command("add")
def add(
    folder: Dir,
    name: Annotated[str, Argument(help="The view that the app holds, by its name on the server.")],
    user: Annotated[str, Option("--uid", help="The user that the app's process belongs to, by number or name.")],
    same_user: Annotated[
        bool, Option("--same-user", help="Allow a user who can read this device or another app of it.")
    ] = False,
    socket: Annotated[
        Path | None, Option("--socket", help="Where the device listens, if not at DIR.socket, beside DIR.")
    ] = None,
    invitation: Annotated[
        Path | None, Option("--invitation", help="The file to write for the app; by default NAME.invitation.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Let an app hold a view of this device's people, and write an invitation (with a token) for its user."""
    from homebody.federation.device.desk import invite
    from homebody.federation.device.home import Home
    from homebody.federation.device.views import user_number

    file, uid = invitation or Path(f"{name}.invitation"), user_number(user)
    with Home(folder) as home:
        first = not home.views.all()
        owned = invite(home, name, uid, file, same_user=same_user, where=socket)
        restart = first and home.store.client_runs()
    options.answer(
        {"view": name, "uid": uid, "invitation": str(file)},
        as_json,
        f"User {uid} may be the app of the view '{name}'. {file} holds its token: whoever has it and is user {uid} can "
        "be that app.",
        *([] if owned else [f"Give {file} to user {uid}, and let nobody else read it."]),
        f"As user {uid}: homebody view init APP {file}",
        *(["Start the device anew: it listens for apps from then on."] if restart else []),
    )


@app.command("list")
def list_views(folder: Dir, as_json: options.Json = False) -> None:
    """List the apps that hold views of this device's people, and how often each answered or was left out."""
    from homebody.federation.device.home import Home

    with Home(folder) as home:
        known = home.views.all()
    rows = [{name: value for name, value in view._asdict().items() if name != "token"} for view in known]
    nobody = "No app holds a view of this device's people; add one with `homebody client views add`."
    options.answer({"views": rows}, as_json, partial(_print_views, rows) if rows else nobody)


@app.command("remove")
def remove(folder: Dir, name: Annotated[str, Argument(help="The view.")], as_json: options.Json = False) -> None:
    """Remove the app of a view; its token becomes invalid."""
    from homebody.federation.device.home import Home

    with Home(folder) as home:
        home.views.remove(name)
    options.answer({"removed": name}, as_json, f"The app of the view '{name}' is asked no more.")


def _print_views(rows: list[dict[str, Any]]) -> None:
    numbers = ("user", "answered", "away", "slow", "nonsense")
    table = options.table(("view", *numbers), numbers, overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    options.show(table)
