"""`homebody audit`: attack a run, and compare the outcome with the ε that is certified."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from homebody.cli import options
from homebody.cli.progress import Bar
from homebody.errors import HomebodyError, refuse_unknown

if TYPE_CHECKING:
    from homebody.audit import Audit

__all__ = ["audit"]

PATIENCE = 2.0
"""Seconds before the progress bar appears."""


def audit(
    run: options.Run,
    attack: Annotated[
        str,
        Option(
            help="interactions: the server guesses interactions from uploads; canary: synthetic people take part, and "
            "observers detect them, which tests the ledger's ε; linkage: the server links the reports of one device "
            "behind the proxy; membership: anyone infers from the final model who was in its training; view: one app "
            "infers what another app of the same person knows; words: the server reads clicked words off the gradient "
            "of a news encoder, or tells two people apart by a certified report."
        ),
    ],
    users: Annotated[
        int | None,
        Option(
            help="interactions, linkage, view, words: clients to attack.",
            show_default="100, 300, 30, 100; 300 with reports",
        ),
    ] = None,
    canaries: Annotated[
        int | None,
        Option(
            help="canary: synthetic people per training; more of them detect a smaller error in ε.",
            show_default="1,000, or as many as an update has entries",
        ),
    ] = None,
    trials: Annotated[
        int | None,
        Option(
            help="canary: how many times to train; words: reports for each question, of a certified run.",
            show_default="1, 20,000",
        ),
    ] = None,
    confidence: Annotated[
        float | None,
        Option(
            help="canary, view, words: the probability that a correct ledger passes.", show_default="0.95, 0.99, 0.95"
        ),
    ] = None,
    people: Annotated[
        int | None, Option(help="membership: people to test, half of them members.", show_default="all")
    ] = None,
    shadows: Annotated[int | None, Option(help="membership: shadow models to train.", show_default="8")] = None,
    rounds: Annotated[
        int | None,
        Option(
            help="membership: rounds of every model, the attacked one included; fewer for a quick try.",
            show_default="the run's",
        ),
    ] = None,
    attacked: Annotated[
        str | None,
        Option("--target", help="view: the view to attack.", show_default="the first with a feature of few values"),
    ] = None,
    feature: Annotated[
        str | None, Option(help="view: the feature of the target to guess.", show_default="that with fewest values")
    ] = None,
    sigma: Annotated[
        str | None, Option(help="view: noise multipliers to try.", show_default="0,1,4 and the run's")
    ] = None,
    participations: Annotated[
        str | None, Option(help="view: how many messages are read before the guess.", show_default="1,10,100")
    ] = None,
    seed: Annotated[int, Option(help="The seed of all randomness in the attack.")] = 0,
    trust_code: options.TrustCode = False,
    as_json: options.Json = False,
) -> None:
    """Attack a finished run as an observer would, and compare with the certified ε. See docs/auditing.md.

    Exit code 1: a measured lower bound exceeds the certified ε, or an attack does better than that ε allows.
    """
    from inspect import signature

    from homebody import audit as attacks
    from homebody.run import trust_folder

    refuse_unknown("attack", [attack], ATTACKS)
    typed: dict[str, Any] = {"users": users, "canaries": canaries, "trials": trials, "confidence": confidence}
    typed |= {"people": people, "shadows": shadows, "rounds": rounds, "target": attacked, "feature": feature}
    typed |= {"sigma": sigma, "participations": participations}
    given = {name: value for name, value in typed.items() if value is not None}
    make = getattr(attacks, attack)
    own = signature(make).parameters
    for name in given:
        if name not in own:
            raise HomebodyError(f"--{name} is not for --attack {attack}: leave it out.")
    for name in LISTS & given.keys():
        given[name] = _numbers(name, given[name])
    if trust_code:
        trust_folder(run, options.warn)
    with _bar(ATTACKS[attack], as_json) as step:
        found = make(run, seed=seed, step=step, **given)
    options.answer(found.details, as_json, lambda: _print(found))
    if found.contradicted:
        raise Exit(1)


ATTACKS = {
    "interactions": "messages read",
    "canary": "rounds with canaries",
    "linkage": "messages made",
    "membership": "rounds of the attacked and of shadow models",
    "view": "people read",
    "words": "messages read, or parts of the game",
}
"""The functions of `homebody.audit`, and what each counts while it works."""
LISTS = {"sigma", "participations"}
"""Options that take several numbers."""


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise HomebodyError(f"--{name} takes numbers separated by commas, not '{text}'.") from None


def _print(found: Audit) -> None:
    """A table whose first column has names and the others numbers, and lines that explain it."""
    title, headings, rows, _ = found.shown
    table = options.table(headings, headings[1:], title=title, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    options.show(table, *found.remarks)


@contextmanager
def _bar(label: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar once the work takes longer than a moment."""
    bar, began = Bar(label, quiet=quiet), time.monotonic()

    def step(done: int, total: int) -> None:
        if time.monotonic() - began > PATIENCE:
            bar.start()
        bar.update("", f"{label}: {done} of {total}", completed=done, total=total)

    try:
        yield step
    finally:
        bar.stop()
