"""`homebody serve measure`: what each way to be served is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from homebody.cli import options
from homebody.errors import HomebodyError, unknown_name
from homebody.settings import parse

if TYPE_CHECKING:
    from homebody.privacy.queries import Query

__all__ = ["measure", "swept"]

SWEPT = ("epsilon", "interests", "rows")
"""What `measure` can sweep."""


def measure(
    run: options.Run,
    query: Annotated[
        list[str] | None,
        Option(help="What a device tells, such as choice:epsilon=5 or unit:epsilon=5; repeat."),
    ] = None,
    rows: Annotated[int, Option(help="Rows that a device is given.", min=2)] = 500,
    seeds: Annotated[int, Option(help="Draws of the noise of queries.", min=1)] = 5,
    sweep: Annotated[
        list[str] | None,
        Option(help=f"A curve over {', '.join(SWEPT)}, such as epsilon=1,2,5 or rows=100,300; repeat."),
    ] = None,
    own_rows: Annotated[
        bool,
        Option(
            "--own-rows/--no-own-rows",
            help="Whether a device has the rows of its own items, as one that trained has; otherwise only those of "
            "its items count that are in its part.",
        ),
    ] = True,
    canaries: Annotated[
        int, Option(help="Made-up people who ask by each query: what they tell bounds its ε from below.", min=0)
    ] = 0,
    trust_code: options.TrustCode = False,
    as_json: options.Json = False,
) -> None:
    """Measure each way to be served from a finished run, on its own people.

    The share is the part of the ten items that the device would rank first of the whole catalogue.

    Every query stands beside the same number of rows that are the same for everyone, which cost ε = 0.

    Example: homebody serve measure RUN --query choice:epsilon=5 --rows 500
    """
    from homebody.cli.progress import Bar
    from homebody.privacy.queries import Query
    from homebody.run import trust_folder
    from homebody.serving.measure import measure

    if trust_code:
        trust_folder(run, options.warn)
    queries, counts = swept([Query.parse(text) for text in query or ()], rows, sweep or ())
    bar = Bar("people", quiet=as_json)
    try:
        bar.start()
        result = measure(
            run,
            queries,
            rows=counts,
            seeds=seeds,
            own=own_rows,
            canaries=canaries,
            step=lambda done, of: bar.update("", f"{done:,} of {of:,} people", completed=done, total=of),
        )
    finally:
        bar.stop()
    options.answer(result, as_json, lambda: _print(result))


def swept(queries: Sequence[Query], rows: int, sweeps: Sequence[str]) -> tuple[list[Query], list[int]]:
    """The queries and the numbers of rows that are measured: those that are given, and those of each curve."""
    from dataclasses import replace

    found, counts = list(queries), [rows]
    for sweep in sweeps:
        name, equals, values = sweep.partition("=")
        if not equals:
            raise HomebodyError(f"A curve is NAME=VALUE,VALUE,…, as in epsilon=1,2,5, not '{sweep}'.")
        if name not in SWEPT:
            raise unknown_name("curve", name, SWEPT)
        for text in values.split(","):
            value: Any = parse(f"{name} of the curve '{sweep}'", text.strip(), float if name == "epsilon" else int)
            if name == "rows":
                counts.append(value)
            for asked in queries if name != "rows" else ():
                if name == "interests" and asked.kind not in ("choice", "attention"):
                    continue
                found.append(replace(asked, **{name: value}))
        if name != "rows" and not queries:
            raise HomebodyError(f"A curve over {name} needs a query: give --query, as in choice:epsilon=5.")
    return list(dict.fromkeys(found)), list(dict.fromkeys(counts))


def _print(result: dict[str, Any]) -> None:
    news = any("auc" in row["metrics"] for row in result["ways"])
    figures = {"AUC": "auc"} if news else {"share": "share", "HR@10": "hr@10", "NDCG@10": "ndcg@10"}
    numbers = ["rows", *figures, "τ", "kB"]
    free = options.table(["way", *numbers], right=numbers, title="Nothing is told: ε = 0")
    first, *others = figures
    spent = ["ε", "ε a month", *(["shown"] if any("epsilon_canaries" in row for row in result["ways"]) else [])]
    costs = options.table(["", "query", *spent], right=spent, title="Queries")
    numbers = ["rows", first, "ε = 0", "gain", "±", *others, "τ", "kB"]
    asked = options.table(["query", *numbers], right=numbers, title="With a query", tight=True)
    labels: dict[str, str] = {}
    for row in result["ways"]:
        means = {name: f"{row['metrics'][key]:.4f}" for name, key in figures.items()}
        rest = [f"{row['metrics']['tau']:.3f}", "" if row["bytes"] is None else f"{row['bytes'] / 1000:,.1f}"]
        count = "" if row["rows"] is None else f"{row['rows']:,}"
        if (query := row["query"]) is None:
            free.add_row(row["way"], count, *means.values(), *rest)
            continue
        if query not in labels:
            labels[query] = str(len(labels) + 1)
            costs.add_row(
                labels[query],
                query,
                *(f"{row[name]:.4g}" for name in ("epsilon", "epsilon_month", "epsilon_canaries") if name in row),
            )
        gain = [f"{row['at_zero'][figures[first]]:.4f}", f"{row['gain']:+.4f}", f"{row['gain_deviation']:.4f}"]
        asked.add_row(labels[query], count, means[first], *gain, *(means[name] for name in others), *rest)
    beside = "who is ranked for without knowing anything" if news else "with the same number of rows for everyone"
    told: list[Any] = [
        costs,
        asked,
        "ε: of one query, for a whole person; a month has 30.",
        *(["shown: a lower bound on ε from canaries, with a confidence of 95 %."] if spent[2:] else []),
        f"gain: over {'somebody' if news else 'the shelf'} {beside}; ±: its deviation over {result['seeds']} draws.",
    ]
    options.show(
        f"{result['method']} on {result['data']}: {result['people']:,} people, {result['items']:,} items",
        free,
        *(told if labels else []),
        *([] if news else ["share: of the ten items that the device ranks first of all, those in the list of ten."]),
        "τ: the share of places at which another item stands than in the device's own ranking.",
        "A device has the rows of its own items." if result["own_rows"] else "Own items count if they are in the part.",
    )
