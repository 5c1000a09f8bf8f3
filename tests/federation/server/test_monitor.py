"""What an operator's tools ask: `/metrics` as Prometheus reads it, and `/health`."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.processes import PATIENCE

from homebody.database import connect
from homebody.errors import HomebodyError
from homebody.federation.server.monitor import Monitor, RoundSums, exposition, health
from homebody.federation.server.plan import ServerPlan
from homebody.federation.server.records import Presence, Records
from homebody.privacy import Budget
from homebody.progress import Round
from homebody.recipe import Recipe

SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Prometheus' text format (version 0.0.4), read strictly."""
    assert text.endswith("\n")
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helped, f"{name} is explained twice"
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds, f"{name} has two types"
            assert kind in ("counter", "gauge")
            assert kind != "counter" or name.endswith("_total")
            kinds[name] = kind
        else:
            sample = SAMPLE.fullmatch(line)
            assert sample, line
            labels = sample["labels"] or ""
            assert "".join(match.group() for match in LABEL.finditer(labels)) == labels, line
            key = (sample["name"], tuple(LABEL.findall(labels)))
            assert sample["name"] in kinds, f"{line} comes before its type"
            assert key not in found, f"{line} is there twice"
            found[key] = float(sample["value"].replace("Inf", "inf"))
    return found


def line(step: int, **more: Any) -> Round:
    facts: dict[str, Any] = {
        "phase": "train",
        "round": step,
        "step": step,
        "clients": 6,
        "loss": None,
        "metrics": {},
        "epsilon": {"server": float("inf"), "clients": 1.5, "public": 1e-7},
        "bytes_up": 100,
        "bytes_down": 2000,
        "seconds": 0.25,
        "evaluation_seconds": 0.0,
    }
    return Round(**{**facts, **more})


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    database = connect(tmp_path / "server.sqlite")
    yield Records(database)
    database.close()


def test_a_server_that_has_done_nothing(records: Records) -> None:
    found = parsed(exposition(RoundSums(records)))
    assert found["homebody_rounds_total", ()] == 0
    assert found["homebody_devices", ()] == 0
    assert ("homebody_round_seconds", ()) not in found
    assert health(RoundSums(records)) == {"status": "ok", "doing": "starting", "rounds": 0, "connected": 0}


def test_what_prometheus_reads(records: Records) -> None:
    records.add_items([("a", "A"), ("b", "B")])
    records.add_items([("a", "A")])
    records.add_device("ab12", b"key", "kitchen", 3)
    records.add_device("cd34", b"key", "study", 2)
    records.remove_device("study")
    records.add_round(line(1))
    measured = {"metrics": {"hr@10": 1.0}, "errors": {"hr@10": 0.125}, "unclipped": {"hr@10": 1.25}}
    records.add_round(line(2, clients=4, seconds=1.5, **measured))
    records.count("answers_missing", 3)
    for reason in ("too late", 'a "quoted" \\ one', "two\nlines", "x=1,y={2}"):
        records.count(f"refused: {reason}")
    records.note("doing", "round 2 of 5 is done")
    records.note_presence({"ab12": Presence("2026-01-01T00:01:40Z", True, 2, "It is too large.")})
    records.note_presence({"cd34": Presence("2026-01-01T00:00:00Z", True, 2, "")})
    records.note("waiting", json.dumps({"present": 2, "least": 4}))
    records.note("result", json.dumps({"rounds": 2, "stopped": None}))
    found = parsed(exposition(RoundSums(records), Budget(2.0, 1e-6, "user", "clients")))
    assert found == {
        ("homebody_rounds_total", ()): 2,
        ("homebody_devices", ()): 1,
        ("homebody_devices_aside", ()): 0,
        ("homebody_people", ()): 3,
        ("homebody_devices_connected", ()): 1,
        ("homebody_people_connected", ()): 2,
        ("homebody_devices_refusing", ()): 1,
        ("homebody_device_seen_timestamp_seconds", (("device", "kitchen"),)): 1767225700.0,
        ("homebody_training_ended", ()): 1,
        ("homebody_budget_epsilon", (("observer", "clients"),)): 2.0,
        ("homebody_budget_spent_epsilon", (("observer", "clients"),)): 1.5,
        ("homebody_items", ()): 2,
        ("homebody_bytes_up_total", ()): 200,
        ("homebody_bytes_down_total", ()): 4000,
        ("homebody_round_clients", ()): 4,
        ("homebody_round_seconds", ()): 1.5,
        ("homebody_measured", (("metric", "hr@10"),)): 1.0,
        ("homebody_measured_error", (("metric", "hr@10"),)): 0.125,
        ("homebody_epsilon", (("observer", "server"),)): float("inf"),
        ("homebody_epsilon", (("observer", "clients"),)): 1.5,
        ("homebody_epsilon", (("observer", "public"),)): 1e-7,
        ("homebody_answers_missing_total", ()): 3,
        ("homebody_items_known_already_total", ()): 1,
        ("homebody_refused_total", (("reason", "too late"),)): 1,
        ("homebody_refused_total", (("reason", 'a \\"quoted\\" \\\\ one'),)): 1,
        ("homebody_refused_total", (("reason", "two lines"),)): 1,
        ("homebody_refused_total", (("reason", "x=1,y={2}"),)): 1,
    }
    assert health(RoundSums(records)) == {
        "status": "ok",
        "doing": "round 2 of 5 is done",
        "rounds": 2,
        "connected": 2,
        "waiting": {"present": 2, "least": 4},
        "ended": "All 2 rounds are done.",
    }


def test_an_answer_reads_each_round_once(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """RoundSums are measured after they are recorded, and taken back after a crash."""
    monkeypatch.setattr("homebody.federation.server.monitor._PAGE", 3)
    rounds, read = RoundSums(records), 0
    recorded = records.rounds

    def counted(*given: Any, **named: Any) -> list[dict[str, Any]]:
        nonlocal read
        read += len(found := recorded(*given, **named))
        return found

    monkeypatch.setattr(records, "rounds", counted)
    for step in range(1, 21):
        records.add_round(line(step))
        if step % 5 == 0:
            records.add_round(line(step, metrics={"hr@10": step / 100}))
        found = parsed(exposition(rounds))
        assert found["homebody_rounds_total", ()] == step
        assert found["homebody_bytes_up_total", ()] == 100 * step
        assert found.get(("homebody_measured", (("metric", "hr@10"),))) == (step // 5 / 20 or None)
    assert read <= 3 * 20
    records.database.execute("DELETE FROM round WHERE step > 18")
    assert health(rounds)["rounds"] == 18
    assert parsed(exposition(rounds)) == parsed(exposition(RoundSums(records)))
    records.database.execute("DELETE FROM round")
    assert health(rounds)["rounds"] == 0


def asked(where: str) -> tuple[int, str, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{where}", timeout=PATIENCE) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def free(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:
        return int(listening.getsockname()[1])


def plan(at: str) -> ServerPlan:
    return ServerPlan(Recipe("fedmf", "devices"), metrics=at)


def test_it_answers_while_the_server_trains(records: Records, tmp_path: Path) -> None:
    where = f"127.0.0.1:{free()}"
    with Monitor(plan(where), tmp_path):
        status, kind, text = asked(f"{where}/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert parsed(text)["homebody_rounds_total", ()] == 0
        records.add_round(line(1))
        assert parsed(asked(f"{where}/metrics?name=x")[2])["homebody_rounds_total", ()] == 1
        status, kind, text = asked(f"{where}/health")
        assert (status, kind, json.loads(text)["status"]) == (200, "application/json", "ok")
        assert asked(f"{where}/other")[0] == 404
        place = re.escape(str(tmp_path / "server.toml"))
        said = f"/metrics cannot be served on {where}: .*another address as metrics in {place}, where --metrics of"
        with pytest.raises(HomebodyError, match=said):
            Monitor(plan(where), tmp_path)
    with pytest.raises(urllib.error.URLError):
        asked(f"{where}/health")


def test_it_says_so_where_something_is_wrong(records: Records, tmp_path: Path) -> None:
    where = f"127.0.0.1:{free()}"
    with Monitor(plan(where), tmp_path):
        assert asked(f"{where}/health")[0] == 200
        records.database.execute("DROP TABLE round")
        for path in ("health", "metrics"):
            status, _, text = asked(f"{where}/{path}")
            assert (status, json.loads(text)["status"]) == (503, "failing")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "server.sqlite").write_bytes(b"this is no database" * 100)
    with pytest.raises(HomebodyError, match="is not a database"):
        Monitor(plan(where), tmp_path / "other")


def test_it_may_be_nowhere_or_on_the_newer_internet(records: Records, tmp_path: Path) -> None:
    with Monitor(plan(""), tmp_path):
        pass
    try:
        port = free("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with Monitor(plan(f"[::1]:{port}"), tmp_path):
        assert asked(f"[::1]:{port}/health")[0] == 200
