"""`homebody proxy`: mix the reports of many devices on their way to the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from homebody.cli import options
from homebody.cli.options import Json
from homebody.errors import several
from homebody.federation.proxy.settings import ProxySettings

__all__ = ["app"]

app = Typer(
    help="Shuffle sealed reports of many devices, and forward them without their senders.", no_args_is_help=True
)

Dir = Annotated[Path, Argument(help="The proxy's folder.", metavar="DIR")]
Keys = Annotated[list[Path], Argument(help="The senders' reports.pub files.", metavar="KEY.pub...")]


@app.command()
@options.from_settings(ProxySettings)
def init(
    folder: Annotated[Path, Argument(help="A folder that is empty or does not exist.", metavar="DIR")],
    given: options.Given,
    next_ca: Annotated[Path | None, Option(help="The ca.pem that signed the next hop's certificate.")] = None,
    host: Annotated[
        list[str] | None,
        Option(help="A name or address by which devices reach the proxy, for its certificate; repeat."),
    ] = None,
    cert: Annotated[Path | None, Option(help="Your own certificate, PEM; by default one is created.")] = None,
    key: Annotated[Path | None, Option(help="The key of your certificate, PEM.")] = None,
    as_json: Json = False,
) -> None:
    """Create a proxy: its settings, its database, its certificate and its key."""
    from homebody.federation.proxy.admin import make

    settings = ProxySettings(**given.values(), next_ca=next_ca is not None)
    public = make(folder, settings, hosts=host or (), next_ca=next_ca, cert=cert, key=key)
    give = f"Give {folder / 'keys' / 'ca.pem'} to every device, and get its reports.pub:"
    next_hop = f" Give {public} to the operator of {settings.next}, who lets it send there." if settings.next else ""
    options.answer(
        {"folder": str(folder), "listen": settings.listen, "next": settings.next, "public": str(public)},
        as_json,
        f"A proxy is in {folder}.{next_hop}",
        *([give] if settings.tls and cert is None else []),
        f"  homebody proxy allow {folder} reports.pub",
        *(
            []
            if settings.next
            else [f"Let a server have its sums opened: homebody proxy allow {folder} KEY.pub --server"]
        ),
        f"Then start it: homebody proxy run {folder}",
    )


@app.command("key")
def make_key(
    folder: Annotated[Path, Argument(help="The folder for the key; created if missing.", metavar="DIR")],
    as_json: Json = False,
) -> None:
    """Create a key that signs a device's reports. A proxy gets its key from `homebody proxy init`."""
    from homebody.federation.service.keys import make_report_key

    options.made_key(make_report_key(folder), "Give {} to the proxy's operator; {} stays here.", as_json)


@app.command()
def allow(
    folder: Dir,
    keys: Keys,
    people: Annotated[
        int | None,
        Option(
            help="People on each device, who share its limit. With --proxy: the most devices that a batch counts for."
        ),
    ] = None,
    proxy: Annotated[bool, Option("--proxy", help="The keys are of proxies that forward to this one.")] = False,
    server: Annotated[
        bool, Option("--server", help="The keys are of servers, whose secure sums this proxy helps to open.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Let devices, or other proxies, send reports; or servers have secure sums opened. The proxy may be running."""
    from homebody.federation.proxy.admin import allow

    count = allow(folder, keys, people=people, proxy=proxy, server=server)
    whom = (
        f"{folder} opens secure sums of {several(count, 'server')}." if server else f"{count:,} may send to {folder}."
    )
    options.answer({"added": len(keys), "servers" if server else "senders": count}, as_json, whom)


@app.command()
def forbid(folder: Dir, keys: Keys, as_json: Json = False) -> None:
    """Refuse further reports, or requests of servers, from these keys. The proxy may be running."""
    from homebody.federation.proxy.admin import forbid

    count = forbid(folder, keys)
    options.answer({"removed": len(keys), "senders": count}, as_json, f"{count:,} may send to {folder}.")


@app.command()
def run(folder: Dir) -> None:
    """Run the proxy until stopped (Ctrl-C, or SIGTERM). Accepted reports survive a crash."""
    from homebody.federation.proxy.app import run

    run(folder)


@app.command()
def status(folder: Dir, as_json: Json = False) -> None:
    """Show how many reports are held, were forwarded, and were refused and why."""
    from homebody.federation.proxy.admin import report

    state = report(folder)
    alive = "running" if state["running"] else "not running"
    senders = f"{several(state['devices'], 'device')}, {several(state['proxies'], 'proxy', 'proxies')}"
    options.answer(
        state,
        as_json,
        f"{folder}: {state['listen']} to {state['next'] or 'nobody'} ({alive})",
        f"may send: {senders}; open epochs: {state['epochs']:,}",
        *([f"helps {several(state['servers'], 'server')}; open sums: {state['sums']:,}"] if state["servers"] else []),
        f"reports: {state['accepted']:,} accepted, {state['held']:,} held, {state['forwarded']:,} passed on, "
        f"{sum(state['dropped'].values()):,} dropped",
        *(f"{kind}, {why}: {count:,}" for kind in ("dropped", "refused") for why, count in state[kind].items()),
    )
