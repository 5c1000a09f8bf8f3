"""`homebody recommend`: what a trained run recommends to one of its simulated people, or to somebody new."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from homebody.cli import options
from homebody.errors import HomebodyError, several

__all__ = ["recommend"]


def recommend(
    run: options.Run,
    user: Annotated[str | None, Option(help="The person, as the data set calls them.")] = None,
    clicks: Annotated[
        str | None,
        Option(
            help="For a new person: the items they have, by id or name, oldest first and separated by commas; "
            "'' for none."
        ),
    ] = None,
    feature: Annotated[
        list[str] | None, Option(help="A feature of a new person, such as age=25; repeat. Others count as unknown.")
    ] = None,
    now: Annotated[list[str] | None, Option(help="The context of the request, such as weather=sunny; repeat.")] = None,
    ratings: Annotated[str | None, Option(help="Ratings of the items in --clicks, in the same order: 5,3.5,4.")] = None,
    to_view: Annotated[
        str | None,
        Option(
            help="Give the list to this view of theirs, as NAME or NAME:clip=0.05,z=4: scores are noised, and the "
            "run's ledger charges the views. With --user or --clicks, for fl-mv-dssm."
        ),
    ] = None,
    everyone: Annotated[
        bool, Option("--all", help="Rank for all of the run's people, and write the lists to the file of --out.")
    ] = False,
    out: Annotated[
        Path | None, Option(help="With --all: the file to write, .parquet or .csv, a row for each person and item.")
    ] = None,
    k: Annotated[int, Option("-k", help="How many items.", min=1)] = 10,
    trust_code: options.TrustCode = False,
    as_json: options.Json = False,
) -> None:
    """Recommend new items to a person, ranked as their own device would; also to someone who was not in training.

    Examples: homebody recommend RUN --clicks 260,1196,1210 --feature age=25 --feature gender=F;
    homebody recommend RUN --all -k 20 --out lists.parquet
    """
    from homebody.run import trust_folder
    from homebody.suggest import recommend_for, recommend_to, recommend_to_view

    if everyone or out is not None:
        alone = {"--user": user, "--clicks": clicks, "--feature": feature, "--ratings": ratings, "--to-view": to_view}
        if extra := next((name for name, value in alone.items() if value is not None), None):
            raise HomebodyError(f"--all and --out are for everybody at once: leave out {extra}.")
        if not everyone or out is None:
            raise HomebodyError("The lists of everybody go into a file: give --all and --out lists.parquet together.")
        _everyone(run, out, k, options.pairs(now, "--now"), trust_code=trust_code, as_json=as_json)
        return
    if (user is None) == (clicks is None):
        raise HomebodyError(
            "Give the person: --user NAME for one of the run's people, or --clicks ITEM,ITEM for somebody new."
        )
    if trust_code:
        trust_folder(run, options.warn)
    if to_view is not None and now:
        raise HomebodyError("Only fl-mv-dssm ranks by views, and it reads no circumstances: leave out --now.")
    around = options.pairs(now, "--now")
    if user is not None:
        said = {"--feature": feature, "--ratings": ratings}
        if extra := next((name for name, value in said.items() if value), None):
            raise HomebodyError(f"{extra} is for somebody new: leave it out, or give --clicks in place of --user.")
        new: dict[str, Any] = {}
        answer: dict[str, Any] = {"user": user}
        title = f"For {user}"
    else:
        new = {"clicks": _listed(clicks or ""), "features": options.pairs(feature, "--feature")}
        answer, title = {**new}, f"For somebody with {several(len(new['clicks']), 'item')}"
        new["ratings"] = _ratings(ratings)
    if to_view is not None:
        best = recommend_to_view(run, user, to_view, k, **new)
        title += ", as one of their views may see it"
        answer["to_view"] = to_view
    elif user is not None:
        best = recommend_to(run, user, around, k)
    else:
        best = recommend_for(run, now=around, k=k, **new)
    answer |= {"now": around, "items": best.items, "notes": list(best.notes)}
    rows = ((row["item"], row["name"], row["score"]) for row in best.items)
    shown = [options.ranking(title, rows)] if best.items else []
    options.answer(answer, as_json, lambda: options.show(*shown, *best.notes))


def _everyone(run: Path, out: Path, k: int, now: dict[str, str], *, trust_code: bool, as_json: bool) -> None:
    """Write everybody's list into a file, whole or not at all."""
    from homebody.notebook import fitted
    from homebody.notebook.tables import check_frame_file, write_frame
    from homebody.run import trust_folder

    check_frame_file(out)
    if trust_code:
        trust_folder(run, options.warn)
    model = fitted.open(run)
    lists = model.recommend("all", k, now=now)
    write_frame(lists, out)
    people = lists["user"].n_unique()
    answer = {"out": str(out), "people": people, "rows": lists.height, "k": k, "now": now}
    options.answer(
        answer, as_json, lambda: options.show(f"{several(people, 'list')}, {several(lists.height, 'row')}: {out}")
    )


def _listed(text: str) -> list[str]:
    """Items with commas between them; one whose name has a comma stands in double quotes.

    >>> _listed('260, "Matrix, The (1999)"'), _listed("")
    (['260', 'Matrix, The (1999)'], [])
    """
    try:
        parts = next(csv.reader([text], skipinitialspace=True), [])
    except csv.Error:
        raise HomebodyError("--clicks takes items with commas between them, in one line.") from None
    return [part.strip() for part in parts if part.strip()]


def _ratings(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise HomebodyError(f"--ratings takes numbers with commas between them, such as 5,3.5, not '{text}'.") from None
