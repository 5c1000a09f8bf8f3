"""docs/views.md, copied and pasted: a server, a device and three apps, two of the processes killed, lose nothing."""

from __future__ import annotations

import re
from pathlib import Path

from tests.pages import Section
from tests.warm import Nest

from homebody.federation.app.folder import AppFolder
from homebody.federation.device.home import Home
from homebody.federation.server.admin import opened

SECTION = Section("views.md", "Apps on a device")
ROUNDS = 12


def words(text: str) -> list[str]:
    """Without numbers, which chance and the machine decide, and without a run's name."""
    return re.sub(r"\b[0-9a-f]{8}\b|[\d.,]+", "", text).split()


def test_the_page_by_copy_and_paste(real_data: Path, tmp_path: Path, warm: Nest) -> None:
    *_, seen, told, _ = SECTION.paste(tmp_path, real_data, warm, ports=(9092, 9464), columns=200)
    _, shown = SECTION.blocks("text")
    assert words(seen) == words(shown)
    assert (spent := re.search(rf"\b{ROUNDS} rounds charged: ε = \d.*", shown))
    assert spent.group() in seen
    assert "For 1" in told
    assert re.search(r"views +user +\d", told)

    rounds = {f"train/{number}" for number in range(1, ROUNDS + 1)}
    with opened(tmp_path / "server") as (_, records):
        assert [line["clients"] for line in records.rounds()] == [2] * ROUNDS
        releases = {entry.release for entry in records.ledger().entries()}
        assert {name for name in releases if "telemetry" not in name} == rounds
    with Home(tmp_path / "device") as home:
        known = {view.name: view for view in home.views.all()}
        assert known.keys() == {"hobby", "profile", "taste"}
        assert all((view.away, view.slow, view.nonsense) == (0, 0, 0) for view in known.values())
        for person in ("1", "2"):
            entries = home.ledger(person).entries()
            assert len({(entry.release, entry.observer) for entry in entries}) == len(entries)
            charged = {entry.release for entry in entries if entry.observer == "views"}
            assert len(charged) == ROUNDS
    for view in ("profile", "taste", "hobby"):
        with AppFolder(tmp_path / f"app-{view}") as app:
            for person in ("1", "2"):
                trained = [one.release for one in app.seen(person) if one.what == "gradient"]
                assert len(trained) == len(set(trained)) == app.ledger(person).releases()
                assert set(trained) == rounds if view != "hobby" else set(trained) < rounds
