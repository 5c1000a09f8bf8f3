"""`homebody client`: a device, and the histories of the people who live with it."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, Typer, echo

from homebody import screen
from homebody.cli import client_impressions, client_roster, client_serving, client_views, options
from homebody.cli.client_roster import Dir
from homebody.cli.groups import Commands
from homebody.errors import HomebodyError, several
from homebody.federation.secure_sum import FEWEST

if TYPE_CHECKING:
    from homebody.federation.device.home import Home

__all__ = ["app"]

app = Typer(help="Run a device; its people's histories stay on it.", no_args_is_help=True)
app.add_typer(client_views.app, name="views", cls=Commands)
app.add_typer(client_impressions.app, name="impressions", cls=Commands)

Name = Annotated[str, Argument(help="The person, by name.")]


@app.command()
def init(
    folder: Annotated[Path, Argument(help="A folder that is empty or does not exist.", metavar="DIR")],
    server: Annotated[
        str, Option(help="The server's address, HOST:PORT; leave it out for a device that is only served.")
    ] = "",
    ca: Annotated[
        Path | None, Option(help="The server's ca.pem; leave it out only for a server on this machine without TLS.")
    ] = None,
    name: Annotated[str, Option(help="A name for the device; the server does not learn it.")] = "",
    budget: Annotated[
        str | None, Option(help="Each person's privacy budget, such as eps=8,delta=1e-6,observer=server.")
    ] = None,
    proxy: Annotated[
        str, Option(help="The proxy that reports go through, https://HOST:PORT, for a method that shuffles.")
    ] = "",
    proxy_ca: Annotated[
        Path | None, Option(help="The proxy's ca.pem; without it, authorities that this system knows.")
    ] = None,
    limits: Annotated[
        list[str] | None,
        Option(
            "--limit", help="The most that a task may use: memory=2e9, operations=1e12, bytes=3e8, seconds=120; repeat."
        ),
    ] = None,
    roster_key: Annotated[
        Path | None,
        Option(help="The signer.pub of whoever signs the roster of devices: no other devices are believed in a sum."),
    ] = None,
    fewest: Annotated[int, client_roster.FEWEST_OPTION] = FEWEST,
    allow_method: Annotated[
        list[str] | None,
        Option(help="A method of an installed package that the server may name; repeat. Others come with Homebody."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Create a device: its folder, its keys and its empty store."""
    from homebody.federation.device.home import Home
    from homebody.federation.device.settings import read_certificate, server_certificate

    if server:
        options.insist_on_deploy("A device that takes part in training")
    certificate = server_certificate(server, ca)
    if proxy_ca is not None and not proxy.startswith("https://"):
        raise HomebodyError("--proxy-ca is the certificate of a proxy at https://…: give --proxy too.")
    proxys = None if proxy_ca is None else read_certificate(proxy_ca)

    def furnish(inside: Path) -> None:
        from homebody.federation.service.certificates import make_device_key

        if certificate is not None:
            (inside / "ca.pem").write_bytes(certificate)
        make_device_key(inside)
        if proxy:
            from homebody.federation.service.keys import make_report_key

            make_report_key(inside)
        if proxys is not None:
            (inside / "proxy-ca.pem").write_bytes(proxys)

    Home.create(
        folder,
        server=server,
        name=name,
        budget=budget,
        proxy=proxy,
        limits=_limits(limits),
        fewest=fewest,
        roster_key="" if roster_key is None else client_roster.signer_key(roster_key),
        methods=list(dict.fromkeys(allow_method or [])),
        furnish=furnish,
    ).close()
    key, report_key = folder / "device.pub", folder / "reports.pub"
    created = {"folder": str(folder), "server": server, "name": name, "public_key": str(key)}
    behind = (
        f"Give {report_key} to the proxy's operator, with the same number of people (`homebody proxy allow`): it is "
        "another key, so that the two operators know no device by the same name."
    )
    registered = (
        f"Give {key} to the server's operator, and say how many people live with it: they are registered "
        "together (`homebody keys add`). The other files are nobody else's."
    )
    served = f"Say who recommends with `homebody client serving {folder} --url https://HOST:PORT --ca ca.pem`."
    options.answer(
        {**created, "proxy": proxy, "reports_key": str(report_key)} if proxy else created,
        as_json,
        f"A device for {server} is in {folder}." if server else f"A device without a server is in {folder}.",
        registered if server else served,
        *([behind] if proxy else []),
        *([f"Give {key} to whoever signs the roster of devices too."] if roster_key else []),
        f"Bring in what they did with `homebody client import {folder} FILE`.",
    )


@app.command("import")
def import_history(
    folder: Dir,
    file: Annotated[Path, Argument(help="A CSV or Parquet file with one row per interaction.")],
    person: Annotated[str | None, Option(help="The person whose history it is; added if new.")] = None,
    only: Annotated[
        list[str] | None, Option(help="Only this person of a file of several; repeat for more, in order.")
    ] = None,
    user_col: Annotated[str | None, Option(help="The column of users; '' for none.")] = None,
    item_col: Annotated[str | None, Option(help="The column of items.")] = None,
    time_col: Annotated[str | None, Option(help="The column of times; '' for none.")] = None,
    rating_col: Annotated[str | None, Option(help="The column of ratings; '' for none.")] = None,
    as_json: options.Json = False,
) -> None:
    """Add the rows of a file to the histories, all or none; rows that are there already are not added again."""
    with _home(folder) as home:
        columns = {"user_col": user_col, "item_col": item_col, "time_col": time_col, "rating_col": rating_col}
        done = home.history.import_file(file, person, only=only or (), **columns)
    options.answer(
        {**done._asdict(), "new": [newcomer._asdict() for newcomer in done.new]},
        as_json,
        f"{several(done.added, 'interaction')} added, {done.repeated:,} known already.",
        *([f"{several(done.left_out, 'row')} of others left out."] if done.left_out else []),
        *(f"New: {newcomer.name} (slot {newcomer.slot})." for newcomer in done.new),
    )


@app.command()
def append(
    folder: Dir,
    person: Name,
    item: Annotated[str, Argument(help="The item's id.")],
    time: Annotated[str | None, Option(help="A number or an ISO date; by default now.")] = None,
    rating: Annotated[float | None, Option(help="The person's rating of the item.")] = None,
    as_json: options.Json = False,
) -> None:
    """Add one interaction to a person's history."""
    from homebody.federation.device.history import read_time

    with _home(folder) as home:
        noted = home.history.append(person, item, None if time is None else read_time(time), rating)
    options.answer(noted._asdict(), as_json, f"{noted.item} noted for {person}, time {noted.time}.")


@app.command()
def delete(
    folder: Dir,
    person: Name,
    item: Annotated[str | None, Argument(help="The item's id.")] = None,
    everything: Annotated[bool, Option("--all", help="The whole history.")] = False,
    before: Annotated[str | None, Option(help="Only what is older than this time.")] = None,
    as_json: options.Json = False,
) -> None:
    """Delete a person's interactions with an item, or all of them, and the impressions in which it was clicked."""
    from homebody.federation.device.history import read_time

    with _home(folder) as home:
        shown = len(home.impressions.of(person))
        count = home.history.delete(person, item, all=everything, before=None if before is None else read_time(before))
        shown -= len(home.impressions.of(person))
        learnt = home.models.has_states(person)
    and_shown = f", and {several(shown, 'impression')}" if shown else ""
    text = f"{several(count, 'interaction')} deleted{and_shown}."
    if learnt:
        text += f" What the private state learnt from them stays until `homebody client opt-out {folder} {person}`."
    options.answer({"deleted": count, "impressions": shown}, as_json, text)


@app.command()
def export(
    folder: Dir,
    file: Annotated[Path, Argument(help="The CSV file to write.")],
    person: Annotated[str | None, Option(help="Only this person's history.")] = None,
    as_json: options.Json = False,
) -> None:
    """Write the histories as a CSV file that `import` reads."""
    with _home(folder) as home:
        count = home.history.export(file, person)
    options.answer({"rows": count, "file": str(file)}, as_json, f"{several(count, 'interaction')} written to {file}.")


@app.command()
def people(
    folder: Dir,
    add: Annotated[list[str] | None, Option(help="Add a person who has no history yet; repeat.")] = None,
    as_json: options.Json = False,
) -> None:
    """List the people of the device, and who takes part."""
    with _home(folder) as home:
        for name in add or []:
            home.people.add(name)
        rows = _people(home)
    options.answer({"people": rows}, as_json, lambda: _print_people(rows))


@app.command()
def profile(
    folder: Dir,
    person: Name,
    settings: Annotated[
        list[str] | None, Option("--set", help="A feature of this person, such as age=25; repeat.")
    ] = None,
    forget: Annotated[list[str] | None, Option(help="A feature to remove; repeat.")] = None,
    as_json: options.Json = False,
) -> None:
    """Show or set a person's features. The model on this device uses them, and they never leave it."""
    from homebody.federation.schema import FeatureSchema

    said = options.pairs(settings, "--set")
    if both := sorted(said.keys() & set(forget or [])):
        raise HomebodyError(f"'{both[0]}' is in both --set and --forget: leave one out.")
    with _home(folder) as home:
        known = home.people.profile(person)
        for name in forget or []:
            if name not in known:
                raise HomebodyError(f"{person} has no feature '{name}' to remove.")
        content = home.items.schema()
        notes = [] if content is None else FeatureSchema.read(content).notes(said)
        if said or forget:
            known = home.people.describe(person, {**said, **dict.fromkeys(forget or [])})
    said_of = ", ".join(f"{name}={value}" for name, value in known.items()) or "nothing is said"
    described = {"person": person, "profile": known, "notes": notes}
    options.answer(described, as_json, f"{person}: {said_of}", *notes)


@app.command()
def ledger(
    folder: Dir,
    person: Annotated[str | None, Option(help="Only this person.")] = None,
    delta: Annotated[float | None, Option(help="The δ to state ε at; by default the budget's.")] = None,
    as_json: options.Json = False,
) -> None:
    """List what left the device, what it disclosed to whom, and the ε that was spent."""
    from homebody.federation.device.disclosures import disclosure

    with _home(folder) as home:
        whose = home.people.all() if person is None else [home.people.find(person)]
        disclosed = [disclosure(home, member, delta) for member in whose]
    nobody = [] if disclosed else ["Nobody lives with this device yet, so nothing has left it."]
    options.answer({"people": disclosed}, as_json, *nobody, *(partial(_print_disclosure, part) for part in disclosed))


@app.command()
def start(
    folder: Dir,
    socket: Annotated[
        Path | None, Option("--socket", help="Where apps reach the device; by default DIR.socket, beside DIR.")
    ] = None,
    view_seconds: Annotated[
        float, Option("--view-seconds", help="Seconds that apps have to answer in a round before they are left out.")
    ] = 5.0,
) -> None:
    """Take part: answer the server's rounds, and ask the service by the clock, until stopped (Ctrl-C, or SIGTERM)."""
    from homebody.federation.device.client import take_part

    take_part(folder, socket, view_seconds)


@app.command()
def limits(
    folder: Dir,
    settings: Annotated[
        list[str] | None,
        Option("--set", help="A new limit: memory=2e9, operations=1e12, bytes=3e8 or seconds=120; repeat."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show or set the limits of a task: memory, operations, bytes of an answer, seconds of work."""
    with _home(folder) as home:
        if settings:
            home.configure(limits=_limits(settings))
        current = home.settings.limits
    options.answer(current, as_json, "\n".join(f"{name}: {value:g}" for name, value in current.items()))


@app.command()
def server(
    folder: Dir,
    address: Annotated[
        str | None, Argument(help="The address that the server has now, HOST:PORT.", metavar="HOST:PORT")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show the server's address, or change it after the server moved. It is known by the same certificate as before.

    A client that runs must be started again.
    """
    from homebody.federation.device.settings import server_certificate

    with _home(folder) as home:
        if address is not None:
            if not home.settings.server:
                raise HomebodyError(f"{folder} is a device without a server: make another with `homebody client init`.")
            if not (folder / "ca.pem").exists():
                server_certificate(address, None)  # another machine is refused without a certificate
            home.configure(server=address, node=None)
        current = home.settings.server
    options.answer({"server": current}, as_json, current or "This device has no server.")


@app.command()
def methods(
    folder: Dir,
    allow: Annotated[
        list[str] | None, Option("--allow", help="A method of a package that the server may name from now on; repeat.")
    ] = None,
    forbid: Annotated[list[str] | None, Option("--forbid", help="One that it may name no longer; repeat.")] = None,
    as_json: options.Json = False,
) -> None:
    """Show or set which methods of installed packages a server may name. Code never travels: install the package here.

    Methods that come with Homebody need no permission.
    """
    from homebody.methods import METHODS
    from homebody.methods.packages import packaged, packaged_methods

    for name in allow or []:
        if name in METHODS:
            raise HomebodyError(f"{name} comes with Homebody, so every device runs it: leave out --allow {name}.")
    with _home(folder) as home:
        allowed = list(home.settings.methods)
        for name in forbid or []:
            if name not in allowed:
                raise HomebodyError(f"'{name}' is not allowed here, so it cannot be forbidden.")
            allowed.remove(name)
        if allow or forbid:
            allowed = list(home.configure(methods=list(dict.fromkeys([*allowed, *(allow or [])]))).methods)
    found = {name: packaged(name) for name in dict.fromkeys([*allowed, *packaged_methods()])}
    rows = [
        {"name": name, "allowed": name in allowed, "installed": None if one is None else one._asdict()}
        for name, one in found.items()
    ]
    lines = (
        f"{name}: {'allowed' if name in allowed else 'not allowed'}, {one or 'not installed on this machine'}"
        for name, one in found.items()
    )
    none = "No method of a package is allowed or installed; those that come with Homebody need no permission."
    options.answer({"methods": rows}, as_json, "\n".join(lines) or none)


app.command()(client_roster.roster)
app.command()(client_serving.serving)


@app.command()
def recommend(
    folder: Dir,
    person: Name,
    k: Annotated[int, Option("-k", help="How many items.", min=1)] = 10,
    socket: Annotated[Path | None, Option(help="Where apps reach the device, if not at DIR.socket.")] = None,
    source: Annotated[
        str | None,
        Option("--from", help="home: the model of the device's own training; server: what its service sent or ranked."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Recommend new items to a person, ranked on this device without a network. Apps give their views' scores.

    With --from server, by what the device's service sent; where no client runs, it is asked now if its turn has come.
    """
    with _home(folder) as home:
        if client_serving.is_served(home, source):
            client_serving.print_served(home, person, k, as_json)
            return

    from homebody.federation.device.apps import asking
    from homebody.federation.device.household import recommend as ranked

    def warn(event: str, view: str, reason: str, **_: Any) -> None:
        options.warn(f"Without the view '{view}'. {reason}")

    with _home(folder) as home, asking(home, socket, warn) as apps:
        best = ranked(home, home.people.find(person), k, apps)
        home.impressions.show(person, [item.item for item in best], "device")
    ranking = {"person": person, "items": [item._asdict() for item in best]}
    options.answer(ranking, as_json, lambda: options.show(options.ranking(f"For {person}", best)))


@app.command()
def pause(folder: Dir, as_json: options.Json = False) -> None:
    """Stop taking part until `resume`. A running client disconnects from the server."""
    _rest(folder, True, as_json, "Paused: no round is answered until `homebody client resume`.")


@app.command()
def resume(folder: Dir, as_json: options.Json = False) -> None:
    """Take part again after `pause`."""
    _rest(folder, False, as_json, "Resumed: rounds are answered while the client runs.")


@app.command("opt-out")
def opt_out(
    folder: Dir,
    person: Name,
    delete_history: Annotated[bool, Option("--delete-history", help="Also delete their history.")] = False,
    as_json: options.Json = False,
) -> None:
    """End a person's part, and delete their private state and stored answers. What they sent cannot be recalled."""
    with _home(folder) as home:
        member = home.people.opt_out(person, delete_history=delete_history)
        left = home.history.lengths()[member.slot]
    history = "the history too" if delete_history else f"the history stays ({several(left, 'interaction')})"
    options.answer(
        member._asdict(), as_json, f"{member.name} takes no part any more; the private state is deleted, {history}."
    )


@app.command("opt-in")
def opt_in(folder: Dir, person: Name, as_json: options.Json = False) -> None:
    """Let a person who opted out take part again."""
    with _home(folder) as home:
        member = home.people.opt_in(person)
    options.answer(member._asdict(), as_json, f"{member.name} takes part again.")


@app.command()
def status(folder: Dir, as_json: options.Json = False) -> None:
    """Show the device: its server, whether it runs or is paused, its people, and its model."""
    with _home(folder) as home:
        settings, model, rows = home.settings, home.models.ranking(), _people(home)
        running, items = home.store.client_runs(), len(home.items)
        reports, overruns = home.outbox.reports(), home.outbox.late()
    known = None if model is None else {**model._asdict(), "description": json.loads(model.description)}
    described = {"folder": str(folder), **asdict(settings), "running": running, "items": items, "model": known}
    rest = ", paused" if settings.paused else ""
    late = f"answers that left late, so that their time may tell something: {overruns:,}"
    options.answer(
        {**described, "reports": reports, "overruns": overruns, "people": rows},
        as_json,
        f"{settings.name or 'a device'} in {folder}: {'running' if running else 'not running'}{rest}",
        f"server: {settings.server or 'none'}",
        *([f"service: {settings.serving}, mode {settings.serving_mode}"] if settings.serving else []),
        *([f"proxy: {settings.proxy}, {several(reports, 'report')} sent"] if settings.proxy else []),
        f"budget of each person: {settings.budget or 'none'}",
        *([late] if overruns else []),
        f"catalogue: {several(items, 'item')}",
        "model: none yet" if model is None else f"model: as of {model.release}",
        lambda: _print_people(rows),
    )


def _home(folder: Path) -> Home:
    from homebody.federation.device.home import Home  # loads SQLite: not for --help

    return Home(folder)


def _limits(given: list[str] | None) -> dict[str, float]:
    """Limits as people write them, such as memory=2e9."""
    limits = {}
    for name, text in options.pairs(given, "--limit").items():
        try:
            limits[name] = float(text)
        except ValueError:
            raise HomebodyError(f"The limit of {name} must be a number, not '{text}'.") from None
    return limits


def _rest(folder: Path, paused: bool, as_json: bool, text: str) -> None:
    with _home(folder) as home:
        home.configure(paused=paused)
    options.answer({"paused": paused}, as_json, text)


def _people(home: Home) -> list[dict[str, Any]]:
    lengths, shown = home.history.lengths(), home.impressions.lengths()
    return [
        {**member._asdict(), "interactions": lengths[member.slot], "impressions": shown[member.slot]}
        for member in home.people.all()
    ]


def _print_people(rows: list[dict[str, Any]]) -> None:
    if not rows:
        echo("Nobody lives here yet; add someone with `homebody client import`.")
        return

    from rich.text import Text

    counted = ("interactions", "impressions") if any(row["impressions"] for row in rows) else ("interactions",)
    table = options.table(("slot", "person", *counted, "takes part"), right=("slot", *counted), overflow="fold")
    for row in rows:
        counts = (f"{row[heading]:,}" for heading in counted)
        # A name is never read as markup.
        table.add_row(str(row["slot"]), Text(row["name"]), *counts, "yes" if row["active"] else "no")
    options.show(table)


def _print_disclosure(disclosed: dict[str, Any]) -> None:
    """Print what left the device of one person: the answers, what each disclosed to whom, and ε."""
    from datetime import UTC, datetime

    console = screen.console()

    def say(text: str) -> None:
        screen.say(console, text)

    part = "" if disclosed["active"] else " (takes no part any more)"
    sent, ledger = disclosed["sent"], disclosed["ledger"]
    console.print(f"{disclosed['person']}{part}", style="bold", highlight=False, markup=False)
    through = f", with {several(sent['reports'], 'report')} for the proxy" if sent["reports"] else ""
    say(f"  {several(sent['answers'], 'answer')} left the device, {several(sent['bytes'], 'byte')} in all{through}.")
    for line in sent["lines"]:
        rounds = line["first"] if line["first"] == line["last"] else f"{line['first']} to {line['last']}"
        at = f"{datetime.fromtimestamp(line['at'], UTC):%Y-%m-%d %H:%M} UTC"
        say(
            f"    {rounds} of {line['run'][:8]}: {several(line['answers'], 'answer')}, "
            f"{several(line['bytes'], 'byte')}, the last on {at}"
        )
    client_serving.print_queries(disclosed["queries"], say)
    if not ledger["releases"]:
        say("  Nothing was charged: ε = 0 against everyone.")
        return

    from homebody.report.statement import figure  # loads torch: not before something is charged
    from homebody.report.words import epsilon_meanings

    say(f"  {several(ledger['releases'], 'release')} charged, each before it left:")
    for line in ledger["lines"]:
        say(f"    {line['rounds']}:")
        for charge in line["told"]:
            about = f"{charge['unit']}, {charge['part']}" if charge["part"] else charge["unit"]
            each = "each" if line["count"] > 1 else "once"
            say(
                f"      to {', '.join(charge['observers'])}, about one {about}: {charge['what']}; "
                f"ε = {figure(charge['epsilon_of_one'])} {each}"
            )
    table = options.table(["observer", "unit", "ε", "δ", "by"], ["ε", "δ"])
    for row in disclosed["certified"]:
        by = row["accountant"] if row["accountant"] != "none" else ""
        table.add_row(row["observer"], row["unit"], figure(row["epsilon"]), f"{disclosed['delta']:g}", by)
    screen.put(console, table)
    of_people = {row["observer"]: row["epsilon"] for row in disclosed["certified"] if row["unit"] == "user"}
    for sentence in epsilon_meanings(of_people, disclosed["delta"]):
        say(f"  {sentence}")
    told = [row for row in disclosed["certified"] if row["accountant"] != "none"]
    for note in dict.fromkeys(note for row in told or disclosed["certified"] for note in row["notes"]):
        say(f"  {note}")
    if budget := disclosed["budget"]:
        say(
            f"  Budget: ε = {figure(budget['spent'])} of {budget['epsilon']:g} is spent about one {budget['unit']}, "
            f"against the {budget['observer']}, at δ = {budget['delta']:g}."
        )
