"""What left a device, for people to read."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from homebody.counts import several

__all__ = ["print_told"]


def print_told(found: Mapping[str, Any]) -> None:
    """One person: the answers that left, what each told whom, and ε."""
    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    part = "" if found["active"] else " (takes no part any more)"
    sent, ledger = found["sent"], found["ledger"]
    console.print(f"{found['person']}{part}", style="bold", highlight=False, markup=False)
    through = f", with {several(sent['reports'], 'report')} for the proxy" if sent["reports"] else ""
    say(f"  {several(sent['answers'], 'answer')} left the device, {several(sent['bytes'], 'byte')} in all{through}.")
    for line in sent["lines"]:
        rounds = line["first"] if line["first"] == line["last"] else f"{line['first']} to {line['last']}"
        at = f"{datetime.fromtimestamp(line['at'], UTC):%Y-%m-%d %H:%M} UTC"
        say(
            f"    {rounds} of {line['run'][:8]}: {several(line['answers'], 'answer')}, "
            f"{several(line['bytes'], 'byte')}, the last on {at}"
        )
    if not ledger["releases"]:
        say("  Nothing was charged: ε = 0 against everyone.")
        return

    from homebody.report.statement import figure

    say(f"  {several(ledger['releases'], 'release')} charged, each before it left:")
    for line in ledger["lines"]:
        say(f"    {line['rounds']}:")
        for told in line["told"]:
            about = f"{told['unit']}, {told['part']}" if told["part"] else told["unit"]
            each = "each" if line["count"] > 1 else "once"
            say(
                f"      to {', '.join(told['observers'])}, about one {about}: {told['what']}; "
                f"ε = {figure(told['epsilon_of_one'])} {each}"
            )
    table = Table("observer", "unit", "ε", "δ", "by", box=box.SIMPLE_HEAD)
    for row in found["certified"]:
        by = row["accountant"] if row["accountant"] != "none" else ""
        table.add_row(row["observer"], row["unit"], figure(row["epsilon"]), f"{found['delta']:g}", by)
    console.print(table)
    for note in dict.fromkeys(note for row in found["certified"] for note in row["notes"]):
        say(f"  {note}")
    if budget := found["budget"]:
        say(
            f"  Budget: ε = {figure(budget['spent'])} of {budget['epsilon']:g} is spent about one {budget['unit']}, "
            f"against the {budget['observer']}, at δ = {budget['delta']:g}."
        )
