"""docs/operations.md, copied and pasted: a server is backed up, restored elsewhere and serves a newcomer; and the
schemas that the page names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.pages import DOCS, Section
from tests.warm import Nest

from homebody.database import connect
from homebody.federation import wire
from homebody.federation.device import store
from homebody.federation.proxy import store as proxy
from homebody.federation.server import epochs, records
from homebody.privacy import ledger
from homebody.recipe import SCHEMA_VERSION as RECIPE
from homebody.report.record import SCHEMA_VERSION as RUN
from homebody.serving import store as service


def test_the_page_by_copy_and_paste(tmp_path: Path, warm: Nest) -> None:
    printed = Section("operations.md", "Back up, restore and move").paste(
        tmp_path, tmp_path, warm, ports=(9092, 9464), columns=120
    )
    before, _, _, after, newcomer, *_ = printed
    for status in (before, after):
        assert "training ended: All 3 rounds are done." in status
        assert re.search(r"hall +0–1 +connected", status)
        assert "connected: 1 device with 2 people who take part" in status
    assert "For ann" in after
    assert "For cleo" in newcomer
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == []
    assert (tmp_path / "saved.csv").read_text().count("\n") == 17
    assert (tmp_path / "monday.sqlite").stat().st_mode & 0o777 == 0o600


def test_from_sqlite_to_postgresql(
    tmp_path: Path, warm: Nest, new_postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOMEBODY_DATABASE", new_postgresql)
    (printed,) = Section("operations.md", "From SQLite to PostgreSQL").paste(tmp_path, tmp_path, warm, ports=())
    assert "40 items" in printed.rpartition("moved:")[2]
    assert not list((tmp_path / "moved").glob("*.sqlite"))
    database = connect(new_postgresql)
    assert records.Records(database).n_items() == 40
    database.close()


def test_the_schemas_that_the_page_names(tmp_path: Path) -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([\d, ]+) \| .* \|$", text, re.MULTILINE))
    assert rows == {
        "a server's database": str(len(records._STEPS)),
        "reports at a server": str(len(epochs._STEPS)),
        "a ledger": str(len(ledger._STEPS)),
        "a device's home": str(store.SCHEMA_VERSION),
        "a proxy's database": str(len(proxy._STEPS)),
        "a service's database": str(len(service._STEPS)),
        "a run's folder": str(RUN),
        "a recipe, a server's plan": f"{RECIPE}, 1",
    }
    assert f"have a version too ({wire.VERSION})" in text
