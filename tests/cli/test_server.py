"""`homebody server` and `homebody keys add`: a server from the command line."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.processes import PATIENCE
from typer.testing import CliRunner

from homebody.cli import app
from homebody.errors import HomebodyError
from homebody.federation.server.admin import opened
from homebody.federation.server.records import Presence
from homebody.federation.service.certificates import make_device_key
from homebody.federation.service.keys import make_report_key
from homebody.privacy import OBSERVERS, Charge, Reports
from homebody.progress import Round

HELPED = ["--stage", "clip:norm=1", "--stage", "secure-sum:helper=true", "--stage", "gaussian:z=2"]
SHUFFLED = ["--stage", "one-bit:epsilon=1,k=5", "--stage", "shuffle", "--evaluate-every", "0"]


def said(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "200"})
    if isinstance(done.exception, HomebodyError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def answered(*arguments: object) -> Any:
    return json.loads(said(*arguments, "--json"))


def refused(*arguments: object) -> str:
    with pytest.raises(HomebodyError) as raised:
        said(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def alone(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command as a person types it, on a machine whose flwr cannot be imported."""
    (folder / "path" / "flwr").mkdir(parents=True, exist_ok=True)
    (folder / "path" / "flwr" / "__init__.py").write_text("raise ImportError('no flwr here')\n")
    path = os.pathsep.join(filter(None, (str(folder / "path"), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-P", "-c", "from homebody.cli import main; main()", *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.fixture
def items(tmp_path: Path) -> Path:
    file = tmp_path / "items.csv"
    file.write_text("id,name\na,Alien\nb,Brazil\n")
    return file


@pytest.fixture
def server(tmp_path: Path, items: Path) -> Path:
    made = answered("server", "init", tmp_path / "server", "--method", "fedmf", "--set", "factors=3", "--items", items)
    assert made["items"] == 2
    return tmp_path / "server"


def test_a_server_says_what_to_do_next(tmp_path: Path, items: Path) -> None:
    text = said("server", "init", tmp_path / "server", "--method", "pfedrec", "--items", items, "--rounds", 7)
    assert "A server for pfedrec is in" in text
    assert "its catalogue has 2 items" in text
    assert f"homebody keys add {tmp_path / 'server'} device.pub --name NAME --people N" in text.replace("\n", "")
    with opened(tmp_path / "server") as (plan, _):
        assert (plan.recipe.rounds, plan.tls, plan.recipe.evaluate_every) == (7, True, 1)


def test_every_option_reaches_the_plan(tmp_path: Path) -> None:
    options = {
        "--method": "fedmf",
        "--listen": "127.0.0.1:7001",
        "--host": "example.org",
        "--database": "other.sqlite",
        "--metrics": "",
        "--stage": "one-bit:epsilon=1,k=1",
        "--rounds": 3,
        "--cohort": 4,
        "--seed": 9,
        "--budget": "eps=8,delta=1e-6,observer=public",
        "--evaluate-every": 2,
        "--held-out": "random",
        "--deadline": 12.5,
        "--quorum": 0.75,
        "--least": 6,
    }
    words = [word for pair in options.items() for word in pair]
    made = answered("server", "init", tmp_path / "server", *words, "--no-tls", "--half")
    assert made["listen"] == "127.0.0.1:7001"
    with opened(tmp_path / "server") as (plan, _):
        recipe = plan.recipe
    assert (plan.database, plan.metrics, plan.tls, plan.half, plan.least) == ("other.sqlite", "", False, True, 6)
    assert (plan.deadline, plan.quorum) == (12.5, 0.75)
    assert (recipe.stages, recipe.rounds, recipe.cohort, recipe.seed) == (["one-bit:epsilon=1,k=1"], 3, 4, 9)
    assert (recipe.budget, recipe.evaluate_every, recipe.held_out) == (options["--budget"], 2, "random")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--method", "fedmd"], "There is no method 'fedmd'; did you mean 'fedmf'?"),
        (["--method", "popularity"], "popularity collects raw data: it cannot be trained on devices."),
        (["--method", "fedmf", "--set", "factor=3"], "There is no field of fedmf 'factor'"),
        (["--method", "fedmf", "--stage", "secure-sum"], "A secure sum needs to know how large a number may be"),
        (["--method", "fedmf", "--stage", "gauss:z=1"], "There is no stage 'gauss'"),
        (["--method", "fedmf", "--budget", "8"], "budget"),
        (["--method", "fedmf", "--budget", "eps=8"], "A budget of ε = 8 cannot hold: from the first round ε is ∞"),
        (["--method", "fedmf", "--listen", "example.org"], "An address is HOST:PORT"),
        (["--method", "fedmf", "--quorum", 2], "The server's quorum must be at most 1, not 2.0."),
        (["--method", "fedmf", "--deadline", 0], "The server's deadline must be at least 1 second, not 0.0."),
        (["--method", "fedmf", "--items", "nosuch.csv"], "nosuch.csv"),
        (["--method", "fedmf", "--held-out", "nosuch"], "There is no way to hold out 'nosuch'"),
        (["--method", "fedmf", "--no-tls", "--listen", "0.0.0.0:9092"], "leave out --no-tls"),
        (["--method", "fedmf", "--host", "not a host"], "not a host"),
        (["--method", "fedmf", *SHUFFLED], "give the server an address for reports (--reports 127.0.0.1:9093)"),
        (["--method", "fedmf", "--reports", "127.0.0.1:9093"], "fedmf sends no reports through a proxy"),
        (["--method", "fedmf", *SHUFFLED, "--no-tls", "--reports", "0.0.0.0:9093"], "leave out --no-tls"),
        (["--method", "fedmf", "--delta", 2], "2"),
        (["--method", "fedmf", *HELPED], "give the server its address (--helper https://HOST:PORT)"),
        (["--method", "fedmf", "--helper", "https://127.0.0.1:9445"], "leave out --helper"),
        (["--method", "fedmf", *HELPED, "--helper", "127.0.0.1:9445"], "must be https://HOST:PORT"),
        (["--method", "fedmf", "--helper-ca", "nosuch.pem"], "nosuch.pem"),
    ],
)
def test_a_bad_setting_is_refused_in_a_sentence_and_makes_nothing(
    tmp_path: Path, arguments: list[object], sentence: str
) -> None:
    assert sentence in refused("server", "init", tmp_path / "server", *arguments)
    assert not (tmp_path / "server").exists()


def test_a_server_for_reports_says_what_its_proxy_needs(tmp_path: Path, items: Path) -> None:
    folder = tmp_path / "server"
    words = ["--method", "fedmf", *SHUFFLED, "--items", items, "--reports", "0.0.0.0:9093", "--host", "rec.example.org"]
    text = said("server", "init", folder, *words, "--least", 40, "--quorum", 0.5, "--reports-wait", 7)
    assert "proxy, whose next is https://rec.example.org:9093" in text
    assert "The ledger counts on 20 people" in text
    assert f"homebody keys add {folder} reports.pub --name NAME --proxy" in text
    with opened(folder) as (plan, _):
        assert (plan.reports, plan.reports_wait) == ("0.0.0.0:9093", 7)


def test_a_server_with_a_helper_says_what_the_helper_needs(tmp_path: Path, items: Path) -> None:
    proxy, folder = tmp_path / "proxy", tmp_path / "server"
    text = said("proxy", "init", proxy, "--next", "")
    assert f"homebody proxy allow {proxy} KEY.pub --server" in text
    words = ["--method", "fedmf", *HELPED, "--items", items, "--helper", "https://127.0.0.1:9445"]
    ca = proxy / "keys" / "ca.pem"
    assert "give --helper, or leave it out" in refused(
        "server", "init", folder, "--method", "fedmf", "--items", items, "--helper-ca", ca
    )
    key = folder / "keys" / "reports.pub"
    text = said("server", "init", folder, *words, "--helper-ca", ca)
    assert f"Give {key} to the operator of https://127.0.0.1:9445, who lets it have sums opened:" in text
    assert (folder / "keys" / "helper-ca.pem").read_bytes() == ca.read_bytes()
    assert (folder / "keys" / "reports.key").stat().st_mode & 0o777 == 0o600
    with opened(folder) as (plan, _):
        assert plan.helper == "https://127.0.0.1:9445"
    assert answered("proxy", "allow", proxy, key, "--server") == {"added": 1, "servers": 1}
    assert "helps 1 server; open sums: 0" in said("proxy", "status", proxy)
    assert "give --server alone" in refused("proxy", "allow", proxy, key, "--server", "--people", 3)
    assert answered("proxy", "forbid", proxy, key) == {"removed": 1, "senders": 0}
    assert "is not registered" in refused("proxy", "forbid", proxy, key)


def test_a_proxy_is_let_in_and_out(server: Path, tmp_path: Path) -> None:
    key = make_report_key(tmp_path / "proxy")
    assert answered("keys", "add", server, key, "--name", "mixer", "--proxy") == {"name": "mixer", "proxy": True}
    assert "is registered already, as 'mixer'" in refused("keys", "add", server, key, "--name", "b", "--proxy")
    other = make_report_key(tmp_path / "other")
    assert "There is a proxy 'mixer' already" in refused("keys", "add", server, other, "--name", "mixer", "--proxy")
    assert "mixer" in [one["name"] for one in answered("server", "status", server)["proxies"]]
    assert "proxy mixer: added" in said("server", "status", server)
    secret = key.with_suffix(".key")
    assert "is a private key" in refused("keys", "add", server, secret, "--name", "b", "--proxy")
    assert "is no ECDSA P-384 public key" in refused("keys", "add", server, key, "--name", "b")
    assert "mixer may bring reports no more" in said("keys", "remove", server, "mixer", "--proxy")
    assert "There is no proxy 'mixer' here" in refused("keys", "remove", server, "mixer", "--proxy")
    said("keys", "add", server, key, "--name", "mixer", "--proxy")  # it may come back


def test_a_server_is_made_once(server: Path, items: Path) -> None:
    assert "is not empty" in refused("server", "init", server, "--method", "fedmf", "--items", items)


@pytest.mark.parametrize("command", ["status", "start", "items", "backup", "restore"])
def test_a_folder_without_a_server_is_named(tmp_path: Path, command: str, items: Path) -> None:
    more = {"items": [items], "backup": [tmp_path / "b"], "restore": [items]}.get(command, [])
    sentence = refused("server", command, tmp_path / "nowhere", *more)
    assert f"There is no server in {tmp_path / 'nowhere'}" in sentence
    assert not (tmp_path / "nowhere").exists()


def test_items_are_added_and_counted(server: Path, tmp_path: Path) -> None:
    (tmp_path / "more.csv").write_text("id,name\nb,Brazil\nc,Casablanca\n")
    assert answered("server", "items", server, tmp_path / "more.csv") == {"added": 1, "items": 3}
    assert "0 of 2 items are new; the catalogue has 3." in said("server", "items", server, tmp_path / "more.csv")
    pl.DataFrame({"id": ["d"], "name": ["Dracula"]}).write_parquet(tmp_path / "more.parquet")
    assert answered("server", "items", server, tmp_path / "more.parquet") == {"added": 1, "items": 4}
    assert answered("server", "items", server, "synthetic:users=5,items=6,mean=5")["added"] == 6
    assert "nosuch" in refused("server", "items", server, "nosuch")
    with opened(server) as (_, records):
        assert records.items(2)[:2] == [("c", "Casablanca"), ("d", "Dracula")]


def test_devices_are_added_and_removed(server: Path, tmp_path: Path) -> None:
    first, second = (make_device_key(tmp_path / name) for name in ("one", "two"))
    assert "kitchen may take part: clients 0 to 4." in said(
        "keys", "add", server, first, "--name", "kitchen", "--people", 5
    )
    found = answered("keys", "add", server, second, "--name", "study")
    assert (found["first"], found["people"], found["name"]) == (5, 1, "study")
    assert "registered already, as 'kitchen'" in refused("keys", "add", server, first, "--name", "attic")
    assert "There is a device 'study' already" in refused(
        "keys", "add", server, make_device_key(tmp_path / "three"), "--name", "study"
    )
    assert "study takes part no more." in said("keys", "remove", server, "study")
    assert "There is no device 'cellar'" in refused("keys", "remove", server, "cellar")
    status = answered("server", "status", server)
    assert [(one["name"], one["first"], bool(one["removed"])) for one in status["devices"]] == [
        ("kitchen", 0, False),
        ("study", 5, True),
    ]
    text = said("server", "status", server)
    assert "0–4" in text
    assert "removed" in text


def test_a_device_that_was_set_aside_is_shown_and_readmitted(server: Path, tmp_path: Path) -> None:
    said("keys", "add", server, make_device_key(tmp_path / "one"), "--name", "kitchen")
    (device,) = answered("server", "status", server)["devices"]
    assert (device["faults"], device["set_aside"]) == (0, None)
    assert "The device 'kitchen' is not set aside." in refused("server", "readmit", server, "kitchen")
    with opened(server) as (_, records):
        assert [records.add_fault(device["fingerprint"], 3) for _ in range(4)] == [False, False, True, False]
    (device,) = answered("server", "status", server)["devices"]
    assert device["faults"] == 4
    text = said("server", "status", server)
    assert f"kitchen is set aside since {device['set_aside']}: 4 answers of it could not be read" in text
    assert f"homebody server readmit {server} 'kitchen'" in text
    assert "kitchen takes part again." in said("server", "readmit", server, "kitchen")
    assert answered("server", "status", server)["devices"][0]["set_aside"] is None
    said("keys", "remove", server, "kitchen")
    assert "was removed on" in refused("server", "readmit", server, "kitchen")
    assert "There is no device 'cellar'" in refused("server", "readmit", server, "cellar")


def test_what_devices_measured_is_shown_with_its_standard_error(server: Path) -> None:
    assert answered("server", "status", server)["measured"] is None
    metrics, errors = {"ndcg@10": 1.0, "valid/ndcg@10": 0.25}, {"ndcg@10": 0.125, "valid/ndcg@10": 0.0854}
    with opened(server) as (_, records):
        records.add_round(
            Round("train", 1, 1, 3, None, metrics, {}, 1, 2, 0.5, 0.25, errors=errors, unclipped={"ndcg@10": 1.5})
        )
    assert answered("server", "status", server)["measured"]["unclipped"] == {"ndcg@10": 1.5}
    text = said("server", "status", server)
    assert "measured after round 1: valid/ndcg@10 0.2500 ± 0.0854, ndcg@10 1.0000 ± 0.1250" in text
    assert "1 metric of 2 clipped to 0 … 1" in text


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff\xfe", b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE x"])
def test_a_wrong_file_is_no_key(server: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "wrong.pub").write_bytes(content)
    assert "wrong.pub" in refused("keys", "add", server, tmp_path / "wrong.pub", "--name", "x")
    assert answered("server", "status", server)["devices"] == []


def test_a_private_key_or_no_file_is_no_public_key(server: Path, tmp_path: Path) -> None:
    private = make_device_key(tmp_path / "one").with_suffix(".key")
    sentence = refused("keys", "add", server, private, "--name", "x")
    assert "device.key" in sentence
    assert "BEGIN" not in sentence
    assert "nosuch.pub" in refused("keys", "add", server, tmp_path / "nosuch.pub", "--name", "x")
    assert refused("keys", "add", server, tmp_path, "--name", "x")


def test_what_the_server_does(server: Path) -> None:
    with opened(server) as (_, records):
        records.note("doing", "round 3 of 100 is done")
        records.count("refused: someone else's number", 2)
    status = answered("server", "status", server)
    assert (status["doing"], status["planned"], status["items"]) == ("round 3 of 100 is done", 100, 2)
    assert status["counters"] == {"refused: someone else's number": 2}
    text = said("server", "status", server)
    assert "fedmf, round 3 of 100 is done" in text
    assert "rounds 0 of 100; 2 items" in text
    assert "refused: someone else's number: 2" in text


def test_what_an_operator_asks(tmp_path: Path, server: Path) -> None:
    """Who is connected, since when others are not, the budget, the quality by round, and why training ended."""
    for number, name in enumerate(("kitchen", "study", "attic")):
        make_device_key(tmp_path / name)
        said("keys", "add", server, tmp_path / name / "device.pub", "--name", name, "--people", number + 1)
    with opened(server) as (_, records):
        marks = [device.fingerprint for device in records.devices()]
        records.note_presence({marks[0]: Presence("2026-11-19T20:14:02Z", True, 1, "")})
        records.note_presence({marks[1]: Presence("2026-11-18T08:00:30Z", False, 0, "")})
        for step in (1, 2, 3):
            measured = {"valid/ndcg@10": step / 8, "hr@10": 0.5, "ndcg@10": 0.25} if step != 2 else {}
            records.add_round(Round("train", step, step, 4, metrics=measured, epsilon={"server": 0.5 * step}))
        records.note("waiting", json.dumps({"present": 1, "least": 6}))
        records.note("trouble", "3 of 6 clients answered.")
        records.ledger().charge("train/1", [Charge(who, "user", Reports(2.0, 1)) for who in OBSERVERS])
    file, budget = server / "server.toml", 'budget = "eps=5,delta=1e-06,unit=user,observer=public"'
    text = file.read_text().replace("stages = []", 'stages = ["clip:norm=0.5", "gaussian:z=4"]')
    file.write_text(text.replace("[recipe]", f"[recipe]\n{budget}"))

    status = answered("server", "status", server, "--rounds", 2)
    assert status["budget"]["epsilon"] == 5
    assert (status["budget"]["spent"], status["budget"]["left"]) == pytest.approx((2, 3))
    assert [line["step"] for line in status["history"]] == [2, 3]
    assert [device["connected"] for device in status["devices"]] == [False] * 3, "The server does not run."
    assert (status["ended"], status["trouble"]) == (None, "3 of 6 clients answered.")
    text = said("server", "status", server)
    assert "waits for" not in text
    assert "the last attempt ended: 3 of 6 clients answered." in text
    assert "budget: ε 5 for one user, against the public, at δ = 1e-06; 2 spent, 3 left" in text

    with (server / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = said("server", "status", server)
        assert "waits for people: 1 are connected, and 6 are needed (--least)" in text
        assert "connected: 1 device with 1 person who take part" in text
        rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
        assert ["kitchen", "0", "connected"] in [row[:3] for row in rows]
        assert ["study", "1–2", "2026-11-18 08:00"] in [row[:3] for row in rows]
        assert ["attic", "3–5", "never"] in [row[:3] for row in rows]
        assert ["2", "4", "0.0", "–", "–", "–", "1"] in rows
        assert ["3", "4", "0.0", "0.3750", "0.5000", "0.2500", "1.5"] in rows
        with opened(server) as (_, records):
            records.note_presence({marks[0]: Presence("2026-11-19T20:15:02Z", True, 0, "It is too large.")})
            records.note("result", json.dumps({"rounds": 3, "stopped": "Training stopped before round 4."}))
        text = said("server", "status", server)
        assert "kitchen refuses: It is too large." in text
        assert "training ended: Training stopped before round 4." in text
        assert "the last attempt" not in text
    with opened(server) as (_, records):
        records.forget_connections()
        assert not any(seen.connected for seen in records.presence().values())


@pytest.mark.parametrize(("people", "told"), [(1, "1 person is"), (4321, "4,321 people are")])
def test_who_is_left_alone_and_until_when(server: Path, people: int, told: str) -> None:
    with opened(server) as (_, records):
        records.note("resting", json.dumps({"60": 7, "32503680000": people}))
    assert answered("server", "status", server)["resting"] == {"people": people, "until": "3000-01-01 00:00 UTC"}
    assert "left alone" not in said("server", "status", server), "A server that does not run asks nobody."
    with (server / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = said("server", "status", server)
    assert f"{told} left alone until 3000-01-01 00:00 UTC at most: they declined, or what they sent was" in text


def test_a_large_epsilon_is_written_as_in_the_ledger(server: Path) -> None:
    with opened(server) as (_, records):
        records.ledger().charge("train/1", [Charge(who, "user", Reports(3409.0, 1)) for who in OBSERVERS])
    assert "so far: server 3,409, clients 3,409, public 3,409; δ" in said("server", "status", server)


def test_a_backup_is_made_and_restored(server: Path, tmp_path: Path) -> None:
    device = make_device_key(tmp_path / "one")
    said("keys", "add", server, device, "--name", "kitchen", "--people", 2)
    backup = tmp_path / "backup.sqlite"
    assert "The server's state is in" in said("server", "backup", server, backup)
    assert "backup.sqlite" in refused("server", "backup", server, backup)
    before = answered("server", "status", server)
    assert "is not empty" in refused("server", "restore", server, backup)
    for file in server.glob("server.sqlite*"):
        file.unlink()
    assert "stands after round 0 again" in said("server", "restore", server, backup)
    assert answered("server", "status", server) == before
    (tmp_path / "nonsense").write_bytes(b"no backup" * 500)
    for file in server.glob("server.sqlite*"):
        file.unlink()
    assert "nonsense" in refused("server", "restore", server, tmp_path / "nonsense")
    assert "nosuch" in refused("server", "restore", server, tmp_path / "nosuch")


def test_without_the_extra_a_sentence_says_what_is_missing(server: Path, tmp_path: Path) -> None:
    """flwr is there and cannot be imported: the link says so, and the server does not try for ever."""
    done = alone(tmp_path, "server", "start", server)
    assert done.returncode == 2
    assert "needs the extra: pip install '.[deploy]' in Homebody's clone." in done.stderr
    assert "Traceback" not in done.stderr
    key = make_device_key(tmp_path / "one")
    done = alone(tmp_path, "keys", "add", server, key, "--name", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().endswith("needs the extra: pip install '.[deploy]' in Homebody's clone.")
    assert len(done.stderr.strip().splitlines()) == 1
    assert alone(tmp_path, "server", "status", server, "--json").returncode == 0
    assert alone(tmp_path, "server", "--help").returncode == 0


@pytest.mark.parametrize("name", ["flwr", "uvicorn", "httpx"])
def test_a_server_is_not_started_without_what_it_needs(
    server: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    sentence = "A server of real devices needs the extra: pip install '.[deploy]' in Homebody's clone."
    assert refused("server", "start", server) == sentence
    assert refused("server", "init", server.with_name("other"), "--method", "fedmf") == sentence
    assert not server.with_name("other").exists()
