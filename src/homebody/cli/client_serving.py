"""What a device's commands say of the service that recommends from its catalogue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from homebody.cli import options
from homebody.cli.client_roster import Dir
from homebody.errors import several, unknown_name

if TYPE_CHECKING:
    from homebody.federation.device.home import Home

__all__ = ["is_served", "print_queries", "print_served", "serving"]


def serving(
    folder: Dir,
    url: Annotated[str | None, Option(help="The service's address, https://HOST:PORT; '' for none any more.")] = None,
    ca: Annotated[
        Path | None, Option(help="The service's ca.pem; without it, authorities that this system knows.")
    ] = None,
    token_file: Annotated[
        Path | None, Option(help="The file with the token that the service knows this device by.")
    ] = None,
    mode: Annotated[
        str | None,
        Option(
            help="table: all rows; shelf: those that everyone gets; query: also a list for a noised interest; server: "
            "the service ranks by one; auto: the table up to 64 MB, else the shelf."
        ),
    ] = None,
    every: Annotated[
        str | None, Option(help="How often everyone's device asks, used or not, such as 24h or 7d.")
    ] = None,
    epsilon: Annotated[
        float | None, Option(help="What one query may cost a person, at most; the service says how it is drawn.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show or set the service that recommends from its catalogue, and how this device asks it."""
    from homebody.federation.device.home import Home  # loads SQLite: not for --help
    from homebody.federation.service.text import read_span, span

    changes: dict[str, Any] = {} if mode is None else {"serving_mode": mode}
    changes |= {} if every is None else {"serving_every": read_span(every)}
    changes |= {} if epsilon is None else {"query_epsilon": epsilon}
    with Home(folder) as home:
        home.be_served(url, ca=ca, token_file=token_file, **changes)
        settings, lines = home.settings, _lines(home)
        token = home.serving_token is not None
    shown = {"url": settings.serving, "mode": settings.serving_mode, "every": settings.serving_every}
    shown |= {"epsilon": settings.query_epsilon, "token": token}
    if not settings.serving:
        options.answer(shown, as_json, "No service: give one with --url https://HOST:PORT --ca ca.pem.")
        return
    from homebody.report.statement import figure

    asks = (
        f"Asked every {span(settings.serving_every)} for everybody who takes part, while `homebody client start` runs."
    )
    most = f"A query costs ε = {figure(settings.query_epsilon)} at most."
    told = most if settings.serving_mode in ("query", "server") else "Nothing of anybody is told: ε = 0."
    options.answer(shown, as_json, f"{settings.serving}, mode {settings.serving_mode}.", asks, told, *lines)


def _lines(home: Home) -> list[str]:
    """What should be known of these settings."""
    if home.settings.serving_mode in ("query", "server") and home.settings.budget is None:
        return ["No budget: ε grows with every query. `homebody client init --budget` makes a device with one."]
    return []


def is_served(home: Home, source: str | None) -> bool:
    """Whether recommendations come from the service: as is said, or else where the device has it alone."""
    if source not in (None, "home", "server"):
        raise unknown_name("source of recommendations", source, ("home", "server"))
    if source is None:
        return bool(home.settings.serving) and not home.settings.server
    return source == "server"


def print_served(home: Home, person: str, k: int, as_json: bool) -> None:
    """Print what is recommended by what the service sent, and how it came about."""
    from homebody.federation.device.serving import recommend

    best = recommend(home, home.people.find(person), k)
    # What the service ranked it knows, but not which of it the person has already: so all of it counts as shown.
    shown, by = (best.listed, "server") if best.listed else ([item.item for item in best.items], "device")
    home.impressions.show(person, shown, by)
    said = {name: value for name, value in best._asdict().items() if name not in ("items", "listed")}
    ranking = {"person": person, "items": [item._asdict() for item in best.items], **said}
    table = options.ranking(f"For {person}", best.items)
    options.answer(ranking, as_json, lambda: options.show(table, *best.notes))


def print_queries(queries: dict[str, Any], say: Callable[[str], None]) -> None:
    """Say what queries left the device, and how long the budget lasts."""
    from datetime import UTC, datetime

    from homebody.federation.service.text import span

    if not queries["left"] and not queries["refused"]:
        return
    kinds = ", ".join(f"{count:,} of kind {kind}" for kind, count in queries["kinds"].items())
    said = f"  {several(queries['left'], 'query', 'queries')} left for the service"
    if queries["left"]:
        said += f": {kinds}, the last on {datetime.fromtimestamp(queries['at'], UTC):%Y-%m-%d %H:%M} UTC"
    say(f"{said}.")
    pace = f"one query every {span(queries['every'])}"
    if "epsilon_in_30_days" in queries:
        from homebody.report.statement import figure

        say(f"  No budget: at {pace}, ε against the server is {figure(queries['epsilon_in_30_days'])} in 30 days.")
    elif lasts := queries.get("lasts"):
        if not lasts["queries"]:
            say("  The budget allows no further query: the last answer is used again.")
        else:
            least = "at least " if lasts["more"] else ""
            more = several(lasts["queries"], "further query", "further queries")
            say(f"  At {pace}, without training, the budget lasts for {least}{more}: {span(lasts['seconds'])}.")
