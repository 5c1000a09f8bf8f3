"""`homebody tune`: look for better hyper-parameters, and keep every trial."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from homebody.cli import options
from homebody.cli.progress import watching_trials
from homebody.errors import install, several

__all__ = ["tune"]

TOP = 10
"""Trials that the table shows."""


@options.recipe_options
def tune(
    given: options.Given,
    method: Annotated[str, options.METHOD],
    trials: Annotated[int, Option(help="Settings to try; the first is the defaults.")] = 8,
    search: Annotated[
        list[str] | None,
        Option(help="The range of a field: field=low:high, field=low:high:log or field=a,b,c; repeat."),
    ] = None,
    settings: Annotated[
        list[str] | None, Option("--set", help="A field that is fixed in every trial, field=value; repeat.")
    ] = None,
    strategy: Annotated[
        str | None,
        Option(
            help="adaptive: Optuna chooses each trial from those before it and ends the hopeless early. even: settings "
            "are spread evenly. By default adaptive where Optuna is installed."
        ),
    ] = None,
    seed: Annotated[int, Option(help="The seed of the search and of each trial's first run.")] = 0,
    seeds: Annotated[int, Option(help="Runs of each trial; validation is averaged.")] = 1,
    jobs: Annotated[int | None, Option(help="Trials in parallel; by default one per processor.")] = None,
    out: options.Out = Path("runs"),
    as_json: options.Json = False,
) -> None:
    """Search a method's settings and choose the best on validation; test metrics are shown for that one only.

    The same command continues an interrupted search; with more --trials it adds to the finished ones.
    """
    from homebody.methods import find
    from homebody.studies.space import parse_search, search_space, space_text
    from homebody.studies.tune import Search, strategy_of
    from homebody.studies.tune import tune as run_trials
    from homebody.studies.workers import cores

    recipe = given.recipe(method, settings, seed=seed)
    chosen = find(recipe.method)
    asked = parse_search(chosen, search or [])
    space, declared = search_space(chosen)
    varied = {**{name: where for name, where in space.items() if name not in recipe.fields}, **asked}
    wanted = Search(recipe, varied, trials, seeds, strategy_of(strategy))
    with watching_trials(recipe.short_method, recipe.selects(), quiet=as_json) as (watcher, watch):
        if not declared and varied:
            looked = ", ".join(f"{name} {space_text(where)}" for name, where in varied.items())
            watcher.say(f"{chosen.__name__} declares no search ranges; looking around its defaults: {looked}.")
        if strategy is None and wanted.strategy == "even":
            watcher.say(f"Settings are spread evenly. With Optuna, trials learn from one another: {install('tune')}.")
        record = run_trials(wanted, out, jobs=jobs if jobs is not None else cores(), watch=watch, watcher=watcher)
    options.answer(record, as_json, lambda: _print(record))


def _print(record: dict[str, Any]) -> None:
    from homebody.evaluation.metrics import ERRORS
    from homebody.studies.adaptive import STORAGE

    spec, best = record["spec"], record["best"]
    sign = 1.0 if spec["select"].rpartition("/")[2] in ERRORS else -1.0
    done = [trial for trial in record["trials"] if trial["status"] == "done"]
    done.sort(key=lambda trial: (sign * trial["validation"], trial["trial"]))
    title = (
        f"{spec['recipe']['method'].rpartition(':')[2]} on {spec['data']}, {several(len(record['trials']), 'trial')}, "
        f"{spec['strategy']}"
    )
    headings = ("trial", *spec["search"], spec["select"].replace("/", "/\n"), "s")
    table = options.table(headings, right=headings, title=title, tight=True, overflow="fold")
    for trial in done[:TOP]:
        values = (str(trial["fields"][name]) for name in spec["search"])
        table.add_row(str(trial["trial"]), *values, f"{trial['validation']:.4f}", f"{trial['seconds']:.1f}")
    failed = [trial for trial in record["trials"] if trial["status"] == "failed"]
    pruned = sum(trial["status"] == "pruned" for trial in record["trials"])
    stored = Path(record["study"]) / STORAGE
    cut = spec["select"].partition("@")[2]
    test = {name: value for name, value in best["test"].items() if name.partition("@")[2] in ("", cut)}
    over = f", mean of {spec['seeds']} seeds" if spec["seeds"] > 1 else ""
    options.show(
        table,
        *([f"the best {TOP} of {len(done)} are shown"] if len(done) > TOP else []),
        *([f"{several(pruned, 'trial')} ended early, in the lowest quarter at the same round"] if pruned else []),
        *([f"{len(failed)} failed; trial {failed[0]['trial']}: {failed[0]['error']}"] if failed else []),
        f"chosen on validation{over}: trial {best['trial']}"
        + (" (the defaults)" if best["trial"] == 0 and not spec["recipe"]["fields"] else ""),
        "its test metrics: " + ", ".join(f"{name} {value:.4f}" for name, value in test.items()),
        f"run it: {best['command']}",
        f"record: {record['study']}",
        *([f"charts: optuna-dashboard sqlite:///{stored}"] if spec.get("strategy") == "adaptive" else []),
    )
