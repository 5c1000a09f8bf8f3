"""What `homebody audit --attack membership` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["print_membership"]


def print_membership(found: dict[str, Any], method: str) -> None:
    """A line for each attack, beside what any could reach."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = f"{method}: who was in the training? {found['members']:,} members, {found['others']:,} others"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("attack")
    for heading in ("reached", "95 %", "any attack,\nby certified ε"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in _rows(found):
        table.add_row(*row)
    console.print(table)
    for line in _remarks(found):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    most, lists, ratio = found["allowed"], found["lists"], found["likelihood_ratio"]
    if "accuracy" in lists:
        yield ("lists, forest: accuracy", *_figure(lists["accuracy"]), _at_most(most["accuracy"]))
        yield ("lists, oracle: accuracy", f"{lists['ceiling']:.3f}", "", "")
    yield ("preference alone: AUC", *_figure(ratio["auc_without_shadows"]), _at_most(most["auc"]))
    yield ("likelihood ratio: AUC", *_figure(ratio["auc"]), _at_most(most["auc"]))
    if ratio["auc_took_part"] and found["took_part"] < found["trained_on"]:
        yield ("  of those in a round", *_figure(ratio["auc_took_part"]), "")
    for rate, bound in zip(ratio["rates"], most["rates"], strict=True):
        yield (f"  found at {100 * rate['false_positives']:g} % false", *_figure(rate["true"]), _at_most(bound))


def _figure(figure: list[float]) -> tuple[str, str]:
    value, low, high = figure
    return f"{value:.3f}", f"{low:.3f} – {high:.3f}"


def _at_most(bound: float) -> str:
    return f"{bound:.3f}"


def _remarks(found: dict[str, Any]) -> Iterator[str]:
    from homebody.report.words import epsilon as epsilon_text

    most, lists = found["allowed"], found["lists"]
    drawn = f"{found['took_part']:,} of {found['trained_on']:,} members were in a round"
    if found["target"] == "the run's model":
        yield f"attacked: the run's model as released; others are the people it held out; {drawn}"
    else:
        yield f"attacked: a model trained for the audit as the run's was, on half of the people; {drawn}"
    if "accuracy" in lists:
        yield (
            f"lists: features and top 10, {lists['distinct']:,} distinct among those asked about: no classifier passes "
            f"the oracle; shadow model on {lists['shadow_trained_on']:,} of {lists['shadow_people']:,} other people"
        )
    else:
        yield f"lists: {lists['skipped']}"
    yield f"likelihood ratio: {found['shadows']} shadow models on halves; {found['likelihood_ratio']['statistic']}"
    if found["stages"]:
        yield f"stages: {' → '.join(found['stages'])}"
    run = epsilon_text(found["epsilon"]["public"])
    yield (
        f"ε certified for the public, one user: {epsilon_text(most['epsilon'])} for the attacked model, {run} for the "
        f"run; δ = {found['delta']:g}"
    )
    yield from found["notes"]
    if found["contradicted"]:
        yield "CONTRADICTED: an attack gets further than the certified ε allows"
