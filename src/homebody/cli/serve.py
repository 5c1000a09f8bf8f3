"""`homebody serve`: recommendations from a catalogue that is too large for a device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, Typer

from homebody.cli import options, serve_measure
from homebody.cli.groups import Commands
from homebody.cli.options import Json, TrustCode
from homebody.errors import several
from homebody.serving.settings import ServiceSettings

if TYPE_CHECKING:
    from homebody.serving.operator import Source

__all__ = ["app"]

app = Typer(
    help="Serve recommendations to devices that rank at home, from a catalogue too large for them.",
    no_args_is_help=True,
)
items = Typer(help="Add and remove items of a service, also while it runs.", no_args_is_help=True)
token = Typer(help="Give and take away tokens of a service.", no_args_is_help=True)
app.command()(serve_measure.measure)
app.add_typer(items, name="items", cls=Commands)
app.add_typer(token, name="token", cls=Commands)

Dir = Annotated[Path, Argument(help="The service's folder.", metavar="DIR")]
Run = Annotated[
    Path,
    Option(
        "--run",
        help="The finished run whose model is served: its folder, its name in runs/, or latest; or a server's folder.",
        callback=options.run_named,
    ),
]
Name = Annotated[str, Argument(help="Whose it is.", metavar="NAME")]


@app.command()
@options.from_settings(ServiceSettings)
def init(
    folder: Annotated[Path, Argument(help="A folder that is empty or does not exist.", metavar="DIR")],
    run: Run,
    given: options.Given,
    host: Annotated[
        list[str] | None,
        Option(help="A name or address by which devices reach the service, for its certificate; repeat."),
    ] = None,
    cert: Annotated[Path | None, Option(help="Your own certificate, PEM; by default one is created.")] = None,
    key: Annotated[Path | None, Option(help="The key of your certificate, PEM.")] = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Create a service: its settings, its database, its certificate, and a copy of the run's model."""
    from homebody.serving.operator import init

    settings = ServiceSettings(**given.values())
    made = init(folder, _source(run, trust_code), settings, hosts=host or (), cert=cert, key=key)
    authority = folder / "keys" / "ca.pem"
    give = [f"Give {authority} to every device."] if settings.tls and cert is None else []
    options.answer(
        {"folder": str(folder), "listen": settings.listen, "model": made.model, "items": made.items},
        as_json,
        f"A service is in {folder}: {several(made.items, 'item')}, model {made.model}.",
        *give,
        f"Start it: homebody serve start {folder}",
    )


@app.command()
def start(folder: Dir) -> None:
    """Run the service until stopped (Ctrl-C, or SIGTERM)."""
    from homebody.serving.app import run

    run(folder)


@app.command()
def reload(
    folder: Dir,
    run: Run,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Serve another run. The service may be running: the model before answers for some minutes more."""
    from homebody.serving.operator import reload

    done = reload(folder, _source(run, trust_code))
    lost = (
        f"{several(len(done.lost), 'item')} came as a row of the model before, and is gone: {', '.join(done.lost[:5])}"
    )
    options.answer(
        {"model": done.model, "items": done.items, "carried": done.carried, "lost": done.lost},
        as_json,
        f"{folder} serves {several(done.items, 'item')}, model {done.model}.",
        *([f"{several(done.carried, 'item was', 'items were')} carried over."] if done.carried else []),
        *([f"{lost}. Add them again."] if done.lost else []),
    )


@app.command()
def status(folder: Dir, as_json: Json = False) -> None:
    """Show what a service has."""
    from homebody.serving.operator import report

    state = report(folder)
    alive = "running" if state["running"] else "not running"
    tokens = ", ".join(f"{name} ({kind})" for name, kind in state["tokens"].items()) or "none"
    options.answer(
        state,
        as_json,
        f"{folder}: {state['listen']} ({alive}), model {state['model']}",
        f"queries: {state['query'] or 'none'}",
        f"items: version {state['version']}; {state['added']:,} added, {state['removed']:,} removed",
        f"tokens: {tokens}" + ("" if state["asks_for_tokens"] else "; readers need none"),
    )


@items.command("add")
def add_items(
    folder: Dir,
    file: Annotated[Path, Argument(help="Items as JSON, or as a JSON object a line.", metavar="FILE")],
    as_json: Json = False,
) -> None:
    """Add items: each an object with id, and name, features (texts of news) or vector (a row of the item table)."""
    from homebody.serving.operator import add

    count, version = add(folder, file)
    options.answer({"added": count, "version": version}, as_json, f"{several(count, 'item')} added; version {version}.")


@items.command("remove")
def remove_items(
    folder: Dir,
    ids: Annotated[list[str], Argument(help="Ids of items.", metavar="ID...")],
    as_json: Json = False,
) -> None:
    """Remove items."""
    from homebody.serving.operator import remove

    version = remove(folder, ids)
    done = f"{several(len(ids), 'item')} removed; version {version}."
    options.answer({"removed": len(ids), "version": version}, as_json, done)


@token.command("add")
def add_token(
    folder: Dir,
    name: Name,
    operator: Annotated[bool, Option("--operator", help="It may add and remove items, too.")] = False,
    as_json: Json = False,
) -> None:
    """Make a token and print it. It is shown once: the service keeps a hash of it."""
    from homebody.serving.operator import add_token

    made = add_token(folder, name, operator=operator)
    options.answer({"name": name, "token": made}, as_json, made)


@token.command("remove")
def remove_token(folder: Dir, name: Name, as_json: Json = False) -> None:
    """Refuse a token from now on."""
    from homebody.serving.operator import remove_token

    remove_token(folder, name)
    options.answer({"removed": name}, as_json, f"'{name}' is refused from now on.")


def _source(run: Path, trust_code: bool) -> Source:
    """Where the model comes from."""
    from homebody.federation.server.plan import FILE as PLAN

    if (run / PLAN).exists():
        from homebody.federation.server.served import served_model

        return partial(served_model, run)
    from homebody.serving.model import Served

    return partial(Served.from_run, run, trust_code=trust_code)
