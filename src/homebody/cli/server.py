"""`homebody server`: train over real devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, Typer, echo

from homebody.cli import options
from homebody.errors import several
from homebody.federation.server.plan import ServerPlan

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Dir", "Hosts", "app"]

app = Typer(help="Train over real devices: run the server.", no_args_is_help=True)

Dir = Annotated[Path, Argument(help="The server's folder.", metavar="DIR")]
Hosts = Annotated[
    list[str] | None,
    Option("--host", help="A name or address by which devices reach the server, for its certificate; repeat."),
]


@app.command()
@options.from_settings(ServerPlan)
def init(
    folder: Annotated[Path, Argument(help="A folder that is empty or does not exist.", metavar="DIR")],
    method: Annotated[str, Option(help="The method to train; `homebody methods` lists them.")],
    given: options.Given,
    items: Annotated[
        str | None,
        Option(help="The catalogue: a CSV or Parquet file (id, name), or a dataset's name; `server items` adds more."),
    ] = None,
    host: Hosts = None,
    settings: options.Settings = None,
    stages: Annotated[list[str] | None, options.of_recipe("stages")] = None,
    rounds: Annotated[int | None, options.of_recipe("rounds", min=1)] = None,
    cohort: Annotated[
        int | None, Option(help="People drawn for each round; by default everyone connected.", min=1)
    ] = None,
    seed: Annotated[
        int, Option(help="The seed of negatives and cohorts; privacy noise comes from the system's generator.")
    ] = 0,
    budget: Annotated[str | None, options.of_recipe("budget")] = None,
    delta: Annotated[float, options.of_recipe("delta")] = 1e-6,
    evaluate_every: Annotated[
        int, Option(help="Devices evaluate every this many rounds, which the ledger charges; 0: never.", min=0)
    ] = 1,
    held_out: Annotated[
        str | None,
        Option(
            help="What devices hold out for evaluation: latest (the default), latest-first, latest-random or random."
        ),
    ] = None,
    person_features: Annotated[
        list[str] | None,
        Option(
            "--person-feature",
            help="A feature that people may have, and its values: gender=F,M, hobbies=many:chess,golf or "
            "age=number:MEAN:SPREAD; repeat. A named dataset declares its own.",
        ),
    ] = None,
    kinds: Annotated[
        list[str] | None,
        Option(
            "--kind",
            help="How to take a column of --items: COLUMN=KIND, such as title=sequence for its words in their order; "
            "repeat.",
        ),
    ] = None,
    views: Annotated[
        list[str] | None,
        Option("--view", help="A view that apps on devices hold, and the size of its vectors: taste=30; repeat."),
    ] = None,
    helper_ca: Annotated[Path | None, Option(help="The ca.pem that signed the helper's certificate.")] = None,
    as_json: options.Json = False,
) -> None:
    """Create a server: its plan, its database, its catalogue and its keys."""
    options.insist_on_deploy("A server of real devices")  # first: what is imported would name only its own part

    from homebody.federation.server.admin import make
    from homebody.federation.service.text import read_authority
    from homebody.recipe import Recipe, parse_fields

    typed: dict[str, Any] = {"rounds": rounds, "seed": seed, "held_out": held_out, "cohort": cohort}
    typed |= {"evaluate_every": evaluate_every, "stages": stages or [], "budget": budget, "delta": delta}
    recipe = Recipe(method, "devices", fields=parse_fields(method, settings or []), **typed)
    plan = ServerPlan(recipe, **given.values())
    authority = None if helper_ca is None else read_authority(helper_ca)
    of_columns = options.pairs(kinds, "--kind")
    server = make(folder, plan, items, host or [], person_features or [], views or [], authority, of_columns)
    lines = [f"A server for {method} is in {folder}; its catalogue has {several(server['items'], 'item')}."]
    if features := server.get("features"):
        whose = (f"{', '.join(names) or 'nothing'} of {whom}" for whom, names in features.items())
        lines.append(
            f"The feature schema for devices has {' and '.join(whose)}; the method's settings say which of "
            "them its model reads. What people say of themselves stays on their devices."
        )
    if plan.tls:
        lines.append(f"Give {folder / 'keys' / 'ca.pem'} to every device, and get its device.pub:")
    lines.append(f"  homebody keys add {folder} device.pub --name NAME --people N")
    if plan.helper:
        lines.append(f"Give {server['helper_key']} to the operator of {plan.helper}, who lets it have sums opened:")
        lines.append("  homebody proxy allow PROXY reports.pub --server")
    if plan.reports:
        lines.append(f"Give the same ca.pem to the proxy, whose next is {server['next']}, and get its reports.pub:")
        lines.append(f"  homebody keys add {folder} reports.pub --name NAME --proxy")
        among = server.get("shuffled_among")
        lines.append(
            f"The ledger counts on {several(among, 'person', 'people')} whose reports are shuffled together "
            "(--least × --quorum): have the proxy wait for devices of as many (--least-devices)."
            if among
            else "The ledger counts on no shuffle: each report is charged as if the server knew whose it is."
        )
    options.answer(server, as_json, *lines, f"Then start it: homebody server start {folder}")


@app.command()
def start(
    folder: Dir,
    once: Annotated[bool, Option("--once", help="Exit when training ends, and print the result.")] = False,
) -> None:
    """Run the server: it trains, resumes if it was stopped, and then serves the final model."""
    options.insist_on_deploy("A server of real devices", to_start=True)

    from homebody.federation.server.supervisor import supervise

    sys.exit(supervise(folder, once=once))


@app.command()
def status(
    folder: Dir,
    rounds: Annotated[int, Option(help="How many of the last rounds to show.", min=0)] = 10,
    as_json: options.Json = False,
) -> None:
    """Show what the server does or why training ended, who is connected, budget, quality by round, and refusals."""
    from homebody.federation.server.admin import report, running
    from homebody.federation.server.plan import opened

    with opened(folder) as (plan, records):
        alive = running(folder)
        state = {**report(plan, records, rounds), "running": alive}
        if not alive:  # whoever was connected to a server that was killed is not
            state["devices"] = [{**device, "connected": False, "refuses": None} for device in state["devices"]]
    options.answer(state, as_json, lambda: options.show(*_status_parts(folder, state)))


@app.command()
def readmit(folder: Dir, which: Annotated[str, Argument(help="The device's name or its key's fingerprint.")]) -> None:
    """Readmit a device that was set aside for broken answers. The server may be running."""
    from homebody.federation.server.plan import opened

    with opened(folder) as (_, records):
        back = records.readmit_device(which)
    echo(f"{back.name} takes part again.")


@app.command()
def items(
    folder: Dir,
    source: Annotated[str, Argument(help="A CSV or Parquet file (id, name), or a dataset's name.")],
    as_json: options.Json = False,
) -> None:
    """Add items to the catalogue; known items are unchanged. The server may be running."""
    from homebody.federation.server.admin import read_items
    from homebody.federation.server.plan import opened

    catalogue = read_items(source)
    with opened(folder) as (_, records):
        _, count = records.add_items(catalogue)
        total, featured = records.n_items(), records.features() is not None
    text = f"{count:,} of {several(len(catalogue), 'item is', 'items are')} new; the catalogue has {total:,}."
    if featured and count:
        text += " Their features are unknown to the model, which got its own when the server was made."
    options.answer({"added": count, "items": total}, as_json, text)


@app.command()
def roster(
    folder: Dir,
    file: Annotated[
        Path | None,
        Argument(help="A roster that `homebody keys sign-roster` wrote; without one, the present roster is shown."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Give devices a signed roster: in secure sums, only its devices take part from now on. The server may be running.

    Devices that know the signer's key check it; the server only passes it on.
    """
    from homebody.federation.secure_sum.roster import LONGEST
    from homebody.federation.server.plan import opened
    from homebody.federation.server.rosters import put_roster, stored_roster, unlisted
    from homebody.federation.service.text import read_file

    with opened(folder) as (_, records):
        if file is not None:
            put_roster(records, read_file(file, LONGEST + 1))
        current = stored_roster(records)
        others = [] if current is None else [device.name for device in unlisted(current, records.devices())]
    if current is None:
        options.answer(
            {"roster": None},
            as_json,
            f"No roster: devices with a roster key take no part in a secure sum. Give one: homebody server roster "
            f"{folder} roster.signed",
        )
        return
    held = {"number": current.number, "run": current.run, "digest": current.digest, "devices": len(current.devices)}
    options.answer(
        {"roster": held, "unlisted": others},
        as_json,
        f"Roster {current.number} of {several(len(current.devices), 'device')}, digest {current.digest}.",
        *([f"Not in it, and not asked in secure sums: {', '.join(others)}."] if others else []),
    )


@app.command()
def backup(folder: Dir, file: Annotated[Path, Argument(help="The file to write; it must not exist.")]) -> None:
    """Back up the server's state to one SQLite file. The server may be running."""
    from homebody.federation.server.admin import backup
    from homebody.federation.server.plan import opened

    with opened(folder) as (_, records):
        backup(records, file)
    echo(f"The server's state is in {file}; {folder / 'server.toml'} and {folder / 'keys'} are not: keep them too.")


@app.command()
def restore(folder: Dir, file: Annotated[Path, Argument(help="A file that `homebody server backup` wrote.")]) -> None:
    """Restore a backup into a server whose database is empty.

    Rounds that ran after the backup are missing from its ledger, so the ε it states would be too small for them.
    """
    from homebody.federation.server.admin import restored

    count = restored(folder, file)
    echo(f"{folder} stands after round {count} again.")


def _status_parts(folder: Path, state: dict[str, Any]) -> Iterator[str | Table]:
    from homebody.report.words import epsilon, measured

    alive = "running" if state["running"] else "not running"
    certified = ", ".join(f"{who} {epsilon(value)}" for who, value in state["epsilon"].items())
    yield f"{folder}: {state['method']}, {state['doing']} ({alive})"
    yield f"rounds {state['rounds']} of {state['planned']}; {several(state['items'], 'item')}"
    if state["ended"]:
        yield f"training ended: {state['ended']}"
    elif state["trouble"]:
        yield f"the last attempt ended: {state['trouble']}"
    if state["running"] and (lacking := state["waiting"]):
        yield f"waits for people: {lacking['present']} are connected, and {lacking['least']} are needed (--least)"
        if "devices" in lacking:
            yield f"waits for devices: {lacking['devices']} of the {lacking['least_devices']} that a secure sum needs"
    yield f"ε certified, one user, so far: {certified}; δ = {state['delta']:g}"
    if budget := state["budget"]:
        spent, left = (epsilon(budget[name]) for name in ("spent", "left"))
        yield f"budget: ε {budget['epsilon']:g} for {budget['who']}; {spent} spent, {left} left"
    yield from state["assumes"]
    if last := state["measured"]:
        shown = [name for name in (state["selects"], "hr@10", "ndcg@10") if name in last["metrics"]]
        said = measured({name: last["metrics"][name] for name in shown}, last["errors"])
        yield f"measured after round {last['round']}: {said}"
        if clipped := len(last["unclipped"]):
            of = f"{several(clipped, 'metric')} of {len(last['metrics'])}"
            yield f"{of} clipped to 0 … 1: noise carried the estimate beyond"
    if state["history"]:
        yield _history(state)
    table = options.table(["device", "clients", "last seen", "added", "key"])
    for device in state["devices"]:
        last = device["first"] + device["people"] - 1
        numbers = str(device["first"]) if device["people"] == 1 else f"{device['first']}–{last}"
        added = "removed" if device["removed"] else _minute(device["added"])
        seen = "connected" if device["connected"] else _minute(device["seen"]) if device["seen"] else "never"
        table.add_row(device["name"], numbers, seen, added, device["fingerprint"][:12])
    yield table
    there = [device for device in state["devices"] if device["connected"]]
    if state["running"]:
        who = several(sum(device["active"] for device in there), "person", "people")
        yield f"connected: {several(len(there), 'device')} with {who} who take part"
    yield from (f"{device['name']} refuses: {device['refuses']}" for device in there if device["refuses"])
    for device in state["devices"]:
        if device["set_aside"] and not device["removed"]:
            since = f"{device['name']} is set aside since {device['set_aside']}: {several(device['faults'], 'answer')}"
            mend = f"once it is mended: homebody server readmit {folder} '{device['name']}'"
            yield f"{since} of it could not be read; {mend}"
    yield from (f"proxy {proxy['name']}: added {proxy['added']}" for proxy in state["proxies"])
    if state["running"] and (rest := state["resting"]):
        who = f"{several(rest['people'], 'person', 'people')} {'is' if rest['people'] == 1 else 'are'}"
        until = f"{who} left alone until {rest['until']} at most"
        yield f"{until}: they declined, or what they sent was refused"
    yield from (f"{name}: {amount:,}" for name, amount in state["counters"].items())


def _history(state: dict[str, Any]) -> Table:
    """The last rounds: who answered, what was measured, and ε against the server up to then."""
    from homebody.report.words import epsilon

    measured = [name for name in (state["selects"], "hr@10", "ndcg@10") if state["measured"]]
    headings = ["round", "clients", "seconds", *measured, "ε, server"]
    table = options.table(headings, right=headings)
    for line in state["history"]:
        figures = (line["metrics"].get(name) for name in measured)
        shown = ("–" if figure is None else f"{float(figure):.4f}" for figure in figures)
        spent = epsilon(line["epsilon"]["server"]) if "server" in line["epsilon"] else "–"
        table.add_row(str(line["step"]), f"{line['clients']:,}", f"{line['seconds']:.1f}", *shown, spent)
    return table


def _minute(moment: str) -> str:
    """
    >>> _minute("2026-11-19T20:14:02Z")
    '2026-11-19 20:14'
    """
    return moment[:16].replace("T", " ")
