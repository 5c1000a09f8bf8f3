"""docs/secure-sum.md, copied and pasted: four devices add up, and ε against the server is finite."""

from __future__ import annotations

import re
from pathlib import Path

from tests.pages import Section
from tests.warm import Nest

from homebody.federation.device.home import Home
from homebody.federation.server.admin import opened

SECTION = Section("secure-sum.md", "Four devices on one machine")
ROUNDS = 8


def words(text: str) -> list[str]:
    """Without numbers, which the machine decides, and without a run's name."""
    return re.sub(r"\b[0-9a-f]{8}\b|[\d.,:]+", "", text).split()


def test_the_page_by_copy_and_paste(real_data: Path, tmp_path: Path, warm: Nest) -> None:
    *_, trained, told, known, _ = SECTION.paste(tmp_path, real_data, warm, ports=(9092, 9464), columns=200)
    table, ledger = SECTION.blocks("text")
    assert words(trained) == words(table)
    assert words(told) == words(ledger)
    (spent,) = re.findall(r"server ([\d.]+), clients ([\d.]+), public ([\d.]+)", trained)
    assert spent == re.findall(r"server ([\d.]+), clients ([\d.]+), public ([\d.]+)", table)[0]
    assert f"server {spent[0]}" in known
    with opened(tmp_path / "server") as (_, records):
        assert [line["clients"] for line in records.rounds()] == [20] * ROUNDS
        entries = records.ledger().entries()
        assert records.counters() == {}
        # Nothing is kept by which a sum was opened.
        assert list(records.database.rows("SELECT attempt FROM secure_sum WHERE state IS NOT NULL")) == []
    assert {entry.release for entry in entries} == {f"train/{number}" for number in range(1, ROUNDS + 1)}
    with Home(tmp_path / "device0") as home:
        assert len(home.outbox.sent("1")) == ROUNDS
        # Parties vouched for by somebody else: the person counts on the noise of all of them, as the server does.
        assert f"{home.ledger('1').epsilons(1e-6)['server']:.3g}" == spent[0]
