"""docs/devices.md, copied and pasted: a server and four devices, killed and started again, end with the right table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.pages import Section
from tests.warm import Nest

from homebody.data import Population
from homebody.data.partitions import leave_one_out
from homebody.federation.device.home import Home
from homebody.federation.server.admin import opened
from homebody.methods.pfedrec import PFedRec
from homebody.simulation import Simulator
from homebody.training import fit

SECTION = Section("devices.md", "Four devices on one machine")
ROUNDS = 12


def words(text: str) -> list[str]:
    """Without numbers that a slower machine, or one that rounds otherwise, prints differently."""
    return re.sub(r"[\d.,]+", "", text).split()


def rows(table: str) -> dict[str, list[float]]:
    """The figures of a printed table, by the name of the row."""
    found = re.findall(r"^ (\w.+?) {2,}([\d.]+) +([\d.]+) +([\d.]+)\b", table, re.MULTILINE)
    return {name: [float(value) for value in values] for name, *values in found}


def test_the_page_by_copy_and_paste(real_data: Path, twenty: Population, tmp_path: Path, warm: Nest) -> None:
    simulated, *_, killed, recommended, told, _ = SECTION.paste(tmp_path, real_data, warm, ports=(9092, 9464))

    # The server was killed, and a device: the table is that of an undisturbed simulation.
    wanted = fit(PFedRec(), Simulator(leave_one_out(twenty, seed=0)), rounds=ROUNDS, seed=0)
    found = rows(killed)
    assert rows(simulated).keys() == found.keys()
    for title, name in (("HR, sampled", "hr"), ("NDCG, sampled", "ndcg"), ("HR, full catalogue", "full/hr")):
        assert found[title] == pytest.approx([wanted.metrics[f"{name}@{k}"] for k in (5, 10, 20)], abs=1e-3)
    assert f"rounds {ROUNDS}, chosen {wanted.chosen};" in killed

    # It is what the page shows.
    table, shown = SECTION.blocks("text")
    assert words(killed) == words(table)
    assert words(recommended) == words(shown)

    lines = [json.loads(line) for line in (tmp_path / "server.log").read_text().splitlines() if line.startswith("{")]
    assert [line["event"] for line in lines].count("started") == 2
    abandoned = [line["release"] for line in lines if line["event"] == "abandoned"]
    with opened(tmp_path / "server") as (_, records):
        assert [line["clients"] for line in records.rounds()] == [20] * ROUNDS
        releases = {entry.release for entry in records.ledger().entries()}
        assert records.counters().get("rounds_abandoned", 0) == len(abandoned)
    rounds = {f"train/{number}" for number in range(1, ROUNDS + 1)}
    again = {f"{base}#{int(number or 1) + 1}" for base, _, number in (name.partition("#") for name in abandoned)}
    # Every round is charged once, and every abandoned attempt once more.
    assert {name for name in releases if "telemetry" not in name} == rounds | again
    assert {name.partition("#")[0] for name in releases if "telemetry" in name} == {f"{n}/telemetry" for n in rounds}

    # A person's own ledger is charged once for each, whatever was asked again.
    with Home(tmp_path / "device0") as home:
        marks = home.outbox.sent("1")
        assert {mark.release for mark in marks if "telemetry" not in mark.release} == rounds
        assert len({entry.release for entry in home.ledger("1").entries()}) == len(marks)
        assert not home.store.client_runs()
    assert f"{len(marks)} answers left the device" in told
    assert "pfedrec, finished" in told
