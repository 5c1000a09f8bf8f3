"""`homebody inspect`: exactly what leaves a device, and who sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from typer import Option

from homebody.cli import options
from homebody.errors import several

if TYPE_CHECKING:
    from rich.table import Table

    from homebody.adversary.inspection import ClientReports, Inspection, Report, Request, ToldImpression

__all__ = ["inspect"]

SHOWN = 6
"""Reports in the table."""


@options.recipe_options
def inspect(
    given: options.Given,
    method: Annotated[str, options.METHOD],
    user: Annotated[str | None, Option(help="The person, as the data set calls them; by default the first.")] = None,
    seed: Annotated[int, Option(help="The seed of the run whose first message is shown.")] = 0,
    settings: options.Settings = None,
    as_json: options.Json = False,
) -> None:
    """Show the message that one person's device would send in the first round: fields, bytes, and who learns what."""
    from homebody.audit import inspected
    from homebody.cli.progress import watching

    recipe = given.recipe(method, settings, seed=seed)
    with watching(recipe.short_method, quiet=as_json) as watcher:
        inspection = inspected(recipe, user, watcher)
    said = {"method": recipe.method, "data": given.typed["data"], "seed": seed, **inspection.as_dict()}
    options.answer(said, as_json, lambda: options.show(*_parts(inspection, recipe.short_method)))


def _parts(inspection: Inspection, method: str) -> Iterator[str | Table]:
    title = f"{method}: one message of user {inspection.user}, {inspection.bytes:,} bytes"
    headings = ("part", "shape", "type", "bytes", "begins")
    table = options.table(headings, right=("bytes",), title=title, tight=True, overflow="fold")
    for part in inspection.parts:
        shape = " × ".join(f"{side:,}" for side in part.shape) or "1"
        whole = f" of {part.rows_of:,} rows" if part.rows_of is not None else ""
        if inspection.reports and part.rows_of is not None:
            whole = f" of {part.rows_of // 2:,} entries"  # of the two rows that each has, one for either bit
        table.add_row(part.name, shape + whole, part.dtype, f"{part.bytes:,}", part.hex)
    yield table
    views = options.table(("observer", "sees of it, and is charged each round"))
    for observer, view in inspection.observers.items():
        views.add_row(observer, "\n".join((view.sees, *(f"{event[0].upper()}{event[1:]}." for event in view.charged))))
        views.add_section()
    yield views
    if inspection.reports:
        yield from _reports(inspection.reports)
    if inspection.impression:
        yield _impression(inspection.impression)
    yield from (_always(request) for request in inspection.requests if request.always)
    yield from (*inspection.tells, *inspection.assumes)


def _impression(report: ToldImpression) -> Table:
    """What the device found, beside what it tells."""
    table = options.table(("the report", "found on the device", "told"), title="one report on one impression")

    def interest(numbers: tuple[float, ...]) -> str:
        if report.mechanism == "choice":
            return f"choice {numbers[0]:g} of {report.basis}"
        return " ".join(f"{number:.2f}" for number in numbers)

    table.add_row("interest", interest(report.found), interest(report.told))
    table.add_section()
    table.add_row("click", report.click or "none", report.pseudo_click or "none")
    table.add_section()
    table.add_row("negatives", "", "\n".join(report.negatives))
    return table


def _reports(sent: ClientReports) -> Iterator[str | Table]:
    """The first few, bit by bit; and on their way through a proxy."""
    title = f"{several(sent.k, 'report')} of one bit, ε = {sent.epsilon:g} each, about {sent.entries:,} entries"
    numeric = ("value", "on [−1, 1]", "P[1]", "bit")
    headings = ("entry", "item · factor", *numeric, "4 bytes")
    table = options.table(headings, right=("entry", *numeric), title=title, tight=True)
    # One about an item that the person has says most; the others follow as they were drawn.
    telling = next((report for report in sent.reports if report.own), sent.reports[0])
    shown = [telling, *(report for report in sent.reports if report is not telling)]
    for report in shown[:SHOWN]:
        numbers = (f"{report.value:.4g}", f"{report.projected:.4g}", f"{report.chance:.4f}", str(report.bit))
        table.add_row(f"{report.entry:,}", _about(report), *numbers, bytes.fromhex(report.plain).hex(" "))
    yield table
    first = shown[0]
    if len(sent.reports) > SHOWN:
        yield f"and {len(sent.reports) - SHOWN:,} more; --json has all"
    if first.own:
        yield "the first is about an item that this person has"
    yield f"the first, bit by bit: {first.binary}"
    yield f"                       entry {first.entry:,}, then the bit {first.bit}; lowest byte first on the wire"
    if sent.note:
        yield sent.note
    if not sent.sealed or first.sealed is None:
        return
    way = sent.sealed
    hops = options.table(("on the way", "sees"))
    hops.add_row("the first, sealed", f"{way.report_bytes} bytes:\n{bytes.fromhex(first.sealed).hex(' ', 4)}")
    hops.add_section()
    hops.add_row(
        "proxy",
        f"Device key {way.device[:16]}…, epoch {way.epoch[:16]}…, {several(sent.k, 'sealed report')} of "
        f"{way.report_bytes} bytes, {several(way.bytes, 'byte')} in all, and when.\n"
        f"Reads {way.proxy_opened:,} of them: it does not have the server's key.",
    )
    hops.add_section()
    opened = "; ".join(f"entry {entry:,}, bit {bit}" for entry, bit in way.server_opened[:3])
    more = "; …" if len(way.server_opened) > 3 else ""
    hops.add_row(
        "server",
        f"Batches of the proxy's, with these among the others' in a random order: {opened}{more}\n"
        "No sender, and nothing that two of them have in common but what they say.",
    )
    yield hops
    yield "The keys were made for this page, and nobody has them."


def _about(report: Report) -> str:
    """What an entry is, in few words."""
    if report.item is None:
        return f"{report.table}[{', '.join(map(str, report.place))}]"
    rest = f" · {', '.join(str(side + 1) for side in report.place[1:])}" if len(report.place) > 1 else ""
    return f"{report.title or report.item}{rest}"


def _always(request: Request) -> Table:
    title = f"rows of '{request.table}' asked for in every round"
    headings = ("rounds", "rows", "own items", "precision", "recall")
    table = options.table(headings, right=headings, title=title, tight=True)
    for line in request.always:
        counts = (f"{line[name]:,}" for name in ("rounds", "rows", "own"))
        table.add_row(*counts, f"{line['precision']:.3f}", f"{line['recall']:.3f}")
    return table
