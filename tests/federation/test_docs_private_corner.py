"""docs/private-corner.md, "On real devices", copied and pasted: two rounds, rankings at home, and a newcomer."""

from __future__ import annotations

import re
from pathlib import Path

from tests.federation.test_docs_secure_sum import words
from tests.pages import Section
from tests.warm import Nest

from homebody.federation.device.home import Home
from homebody.federation.server.admin import opened

SECTION = Section("private-corner.md", "On real devices")
SPENT = r"server ([\d.]+), clients ([\d.]+), public ([\d.]+)"


def test_the_page_by_copy_and_paste(real_data: Path, tmp_path: Path, warm: Nest) -> None:
    *_, trained, told, ranked, late, _ = SECTION.paste(tmp_path, real_data, warm, ports=(9092, 9445, 9464), columns=200)
    table, ledger, _ = SECTION.blocks("text")
    assert words(trained) == words(table)
    assert words(told) == words(ledger)
    assert re.findall(SPENT, trained) == re.findall(SPENT, table)
    with opened(tmp_path / "server") as (_, records):
        assert [line["clients"] for line in records.rounds()] == [20, 20]
        assert records.counters() == {}
    before, after = (rows(part) for part in ranked.split("For 1\n")[1:])
    assert len(before) == len(after) == 3
    assert before != after
    assert len(rows(late)) == 3
    assert "0 answers left the device, 0 bytes in all." in late
    for name, person, sent in (("device0", "1", 2), ("late", "21", 0)):
        with Home(tmp_path / name) as home:
            assert len(home.outbox.sent(person)) == sent
            assert home.ledger(person).epsilons(1e-6).get("server", 0.0) <= 8


def rows(printed: str) -> list[str]:
    """The lines of a ranking."""
    return re.findall(r"^ \d +\d+ .*$", printed, re.MULTILINE)
