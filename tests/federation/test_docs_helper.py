"""docs/secure-sum.md, "With a helper", copied and pasted: four devices, a server, and a proxy that opens the sums."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.federation.test_docs_secure_sum import words
from tests.pages import Section
from tests.warm import Nest

from homebody.federation.device.home import Home
from homebody.federation.server.admin import opened
from homebody.federation.service.keys import read_report_pub

SECTION = Section("secure-sum.md", "With a helper")
ROUNDS = 9


def test_the_page_by_copy_and_paste(real_data: Path, tmp_path: Path, warm: Nest) -> None:
    *_, trained, known, _ = SECTION.paste(tmp_path, real_data, warm, ports=(9092, 9445, 9464), columns=200)
    table, ledger = SECTION.blocks("text")
    assert words(trained) == words(table)
    assert words(known) == words(ledger)
    observers = r"server ([\d.]+), clients ([\d.]+), public ([\d.]+)"
    (spent,) = re.findall(observers, trained)
    assert spent == re.findall(observers, table)[0]
    with opened(tmp_path / "server") as (_, records):
        assert [line["clients"] for line in records.rounds()] == [20] * ROUNDS
        assert records.counters() == {}
    with Home(tmp_path / "device0") as home:
        assert len(home.outbox.sent("1")) == ROUNDS
        assert f"{home.ledger('1').epsilons(1e-6)['server']:.3g}" == spent[0]
    lines = [json.loads(line) for line in (tmp_path / "proxy.log").read_text().splitlines()]
    assert [line["devices"] for line in lines if line["event"] == "set opened"] == [4] * ROUNDS
    # Neither of the two knows a device by what the other knows it by, and nobody writes an address down.
    for number in range(4):
        other = read_report_pub(tmp_path / f"device{number}" / "reports.pub")
        for file in (tmp_path / "server").rglob("*"):
            assert not file.is_file() or (other not in (held := file.read_bytes()) and other.hex().encode() not in held)
        own = (tmp_path / f"device{number}" / "device.pub").read_bytes().split()[1]
        assert not any(own in file.read_bytes() for file in (tmp_path / "proxy").rglob("*") if file.is_file())
    for name in ("server.log", "proxy.log"):
        assert "127.0.0.1" not in (tmp_path / name).read_text()
