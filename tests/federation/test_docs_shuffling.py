"""docs/shuffling.md, copied and pasted: a server, a proxy and three devices train over sealed reports."""

from __future__ import annotations

import re
from pathlib import Path

from tests.pages import Section
from tests.warm import Nest

from homebody.federation.device.home import Home
from homebody.federation.server.admin import opened
from homebody.federation.service.keys import read_report_pub

SECTION = Section("shuffling.md", "A server, a proxy and three devices on one machine")
ROUNDS, PEOPLE, K = 4, 12, 100


def words(text: str) -> list[str]:
    """Without numbers, which chance and the machine decide, and without a run's name."""
    return re.sub(r"\b[0-9a-f]{8}\b|[\d.,:]+", "", text).split()


def test_the_page_by_copy_and_paste(real_data: Path, tmp_path: Path, warm: Nest) -> None:
    *_, trained, told, known, _ = SECTION.paste(tmp_path, real_data, warm, ports=(9092, 9093, 9445, 9464), columns=200)
    table, ledger = SECTION.blocks("text")
    assert words(trained) == words(table)
    assert words(ledger) == words(told[told.index("\n1\n") + 1 :])[: len(words(ledger))]
    assert f"{4 * ROUNDS * K:,} reports sent" in told
    assert f"reports: {PEOPLE * ROUNDS * K:,} accepted, 0 held, {PEOPLE * ROUNDS * K:,} passed on, 0 dropped" in known
    with opened(tmp_path / "server") as (_, records):
        assert [line["clients"] for line in records.rounds()] == [PEOPLE] * ROUNDS
        assert records.counters()["reports_accepted"] == PEOPLE * ROUNDS * K
    with Home(tmp_path / "device0") as home:
        assert len({entry.release for entry in home.ledger("1").entries()}) == ROUNDS
        assert home.outbox.reports() == 4 * ROUNDS * K
    # Neither of the two knows a device by what the other knows it by, and nobody writes an address down.
    for number in range(3):
        other = read_report_pub(tmp_path / f"device{number}" / "reports.pub")
        for file in (tmp_path / "server").rglob("*"):
            assert not file.is_file() or (other not in (held := file.read_bytes()) and other.hex().encode() not in held)
        own = (tmp_path / f"device{number}" / "device.pub").read_bytes().split()[1]
        assert not any(own in file.read_bytes() for file in (tmp_path / "proxy").rglob("*") if file.is_file())
    for name in ("server.log", "proxy.log"):
        assert "127.0.0.1" not in (tmp_path / name).read_text()
