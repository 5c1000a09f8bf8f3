"""`homebody proxy`: mix the reports of many devices on their way to the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from homebody.cli import options
from homebody.cli.options import Json
from homebody.federation.proxy.settings import ProxySettings

__all__ = ["app"]

app = Typer(help="Mix sealed reports of many devices, and pass them on without their senders.", no_args_is_help=True)

Dir = Annotated[Path, Argument(help="The proxy's folder.", metavar="DIR")]
Keys = Annotated[list[Path], Argument(help="Files reports.pub.", metavar="KEY.pub...")]


@app.command()
@options.from_settings(ProxySettings)
def init(
    folder: Annotated[Path, Argument(help="A folder that is empty, or not there yet.", metavar="DIR")],
    given: options.Given,
    next_ca: Annotated[Path | None, Option(help="The authority of the next hop's certificate, ca.pem.")] = None,
    host: Annotated[
        list[str] | None,
        Option(help="A name or address by which devices reach the proxy, for its certificate; repeat."),
    ] = None,
    cert: Annotated[Path | None, Option(help="A certificate of your own, PEM; by default one is made.")] = None,
    key: Annotated[Path | None, Option(help="The key of your certificate, PEM.")] = None,
    as_json: Json = False,
) -> None:
    """Make a proxy: its settings, its database, its certificate and its key."""
    from homebody.federation.proxy.admin import make

    settings = ProxySettings(**given.values(), next_ca=next_ca is not None)
    public = make(folder, settings, hosts=host or (), next_ca=next_ca, cert=cert, key=key)
    give = f"Give {folder / 'keys' / 'ca.pem'} to every device, and get its reports.pub:"
    options.answer(
        {"folder": str(folder), "listen": settings.listen, "next": settings.next, "public": str(public)},
        as_json,
        f"A proxy is in {folder}. Give {public} to the operator of {settings.next}, who lets it send there.",
        *([give] if settings.tls and cert is None else []),
        f"  homebody proxy allow {folder} reports.pub",
        f"Then start it: homebody proxy run {folder}",
    )


@app.command("key")
def make_key(
    folder: Annotated[Path, Argument(help="Where to put it; made if it is not there.", metavar="DIR")],
    as_json: Json = False,
) -> None:
    """Make a key that signs a device's reports; a proxy gets its own from `homebody proxy init`."""
    from homebody.federation.service.keys import make_report_key

    options.made_key(make_report_key(folder), "proxy", as_json)


@app.command()
def allow(
    folder: Dir,
    keys: Keys,
    people: Annotated[
        int | None,
        Option(
            help="People of each device, who share its limit; of a proxy, devices that a batch counts for, at most."
        ),
    ] = None,
    proxy: Annotated[bool, Option("--proxy", help="They are keys of proxies before this one.")] = False,
    as_json: Json = False,
) -> None:
    """Let devices, or proxies before this one, send; also while it runs."""
    from homebody.federation.proxy.admin import allow

    count = allow(folder, keys, people=people, proxy=proxy)
    options.answer({"added": len(keys), "senders": count}, as_json, f"{count:,} may send to {folder}.")


@app.command()
def forbid(folder: Dir, keys: Keys, as_json: Json = False) -> None:
    """Let these send no more; also while it runs."""
    from homebody.federation.proxy.admin import forbid

    count = forbid(folder, keys)
    options.answer({"removed": len(keys), "senders": count}, as_json, f"{count:,} may send to {folder}.")


@app.command()
def run(folder: Dir) -> None:
    """Run the proxy until it is told to stop. What was accepted survives, however it ends."""
    from homebody.federation.proxy.app import run

    run(folder)


@app.command()
def status(folder: Dir, as_json: Json = False) -> None:
    """What is held, what was passed on, and what was refused and why."""
    from homebody.errors import several
    from homebody.federation.proxy.admin import report

    state = report(folder)
    alive = "running" if state["running"] else "not running"
    senders = f"{several(state['devices'], 'device')}, {several(state['proxies'], 'proxy', 'proxies')}"
    options.answer(
        state,
        as_json,
        f"{folder}: {state['listen']} to {state['next']} ({alive})",
        f"may send: {senders}; open epochs: {state['epochs']:,}",
        f"reports: {state['accepted']:,} accepted, {state['held']:,} held, {state['forwarded']:,} passed on, "
        f"{sum(state['dropped'].values()):,} dropped",
        *(f"{kind}, {why}: {count:,}" for kind in ("dropped", "refused") for why, count in state[kind].items()),
    )
