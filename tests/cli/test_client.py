"""`homebody client`: a device from the command line."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from homebody.cli import options
from homebody.cli.client import app
from homebody.errors import HomebodyError
from homebody.federation.device.home import Home
from homebody.federation.device.models import PrivateState
from homebody.federation.service.keys import read_report_pub
from homebody.privacy import OBSERVERS, Charge, GaussianRelease, NonPrivate, PureRelease

LIGHT = {"torch", "numba", "scipy", "dp_accounting"}
HEAVY = {*LIGHT, "numpy", "polars", "safetensors", "sqlite3"}


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
    return str(raised.value)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Keys of no worth: what makes real ones is tested where it is."""

    def make_device_key(folder: Path) -> Path:
        (folder / "device.key").touch(mode=0o600)
        (folder / "device.pub").write_text("ecdsa-sha2-nistp384 AAAA")
        return folder / "device.pub"

    stub = types.ModuleType("homebody.federation.service.certificates")
    stub.make_device_key = make_device_key  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "homebody.federation.service.certificates", stub)
    return make_device_key


@pytest.fixture
def device(tmp_path: Path, keys: object) -> Path:
    said("init", tmp_path / "device", "--server", "127.0.0.1:9092")
    return tmp_path / "device"


@pytest.fixture
def filled(device: Path, tmp_path: Path) -> Path:
    (tmp_path / "rows.csv").write_text("user,item,time\nann,emma,1\nann,ulysses,2\nbob,emma,3\n")
    said("import", device, tmp_path / "rows.csv")
    return device


def test_init_makes_a_device_and_says_what_to_hand_on(tmp_path: Path, keys: object) -> None:
    folder = tmp_path / "device"
    text = said("init", folder, "--server", "localhost:9092", "--name", "hall", "--budget", "eps=8,delta=1e-5")
    assert f"Give {folder / 'device.pub'} to the server's operator" in text
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    found = answered("status", folder)
    assert {name: found[name] for name in ("name", "server", "budget", "paused", "running", "items", "model")} == {
        "name": "hall",
        "server": "localhost:9092",
        "budget": "eps=8,delta=1e-05,unit=user,observer=server",
        "paused": False,
        "running": False,
        "items": 0,
        "model": None,
    }
    assert "is a device already" in refused("init", folder, "--server", "localhost:9092")


def test_a_device_is_not_made_for_a_server_that_it_cannot_answer(
    tmp_path: Path, keys: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    assert refused("init", tmp_path / "d", "--server", "127.0.0.1:9092") == (
        "A device that takes part in training needs the extra: pip install '.[deploy]' in Homebody's clone."
    )
    assert not (tmp_path / "d").exists()
    assert "without a server" in said("init", tmp_path / "d")


def test_limits_of_a_task_are_set_and_shown(tmp_path: Path, keys: object) -> None:
    folder = tmp_path / "device"
    said("init", folder, "--server", "localhost:9092", "--limit", "memory=5e8", "--limit", "seconds=2.5")
    usual = {"memory": 500_000_000, "operations": 10**12, "bytes": 256 << 20, "seconds": 2.5}
    assert answered("limits", folder) == usual
    assert answered("limits", folder, "--set", "bytes=1e6") == {**usual, "bytes": 1_000_000}
    assert answered("limits", folder) == {**usual, "bytes": 1_000_000}
    assert "memory: 5e+08" in said("limits", folder)
    assert "There is no limit of a device 'time'" in refused("limits", folder, "--set", "time=3")
    assert "must be a number, not 'much'" in refused("limits", folder, "--set", "memory=much")
    assert "must be a whole number above 0" in refused("limits", folder, "--set", "memory=0.5")
    assert answered("limits", folder) == {**usual, "bytes": 1_000_000}


def test_answers_that_left_late_are_counted_in_the_status(device: Path) -> None:
    assert answered("status", device)["overruns"] == 0
    assert "left late" not in said("status", device)
    with Home(device) as home:
        home.outbox.note_late()
        home.outbox.note_late()
    assert answered("status", device)["overruns"] == 2
    assert "answers that left late, so that their time may tell something: 2" in said("status", device)


def test_init_takes_the_servers_certificate(tmp_path: Path, keys: object) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("hello")
    folder = tmp_path / "device"
    assert "is not a certificate" in refused("init", folder, "--server", "example.org:9092", "--ca", ca)
    assert "another machine" in refused("init", folder, "--server", "example.org:9092")
    assert not folder.exists()
    ca.write_text(CERTIFICATE)
    said("init", folder, "--server", "example.org:9092", "--ca", ca)
    assert (folder / "ca.pem").read_text() == CERTIFICATE


def test_a_server_that_moved_gets_another_address(tmp_path: Path, keys: object) -> None:
    here, there, alone = tmp_path / "here", tmp_path / "there", tmp_path / "alone"
    ca = tmp_path / "ca.pem"
    ca.write_text(CERTIFICATE)
    said("init", here, "--server", "localhost:9092")
    said("init", there, "--server", "old.example.org:9092", "--ca", ca)
    said("init", alone)
    assert said("server", there).strip() == "old.example.org:9092"
    assert answered("server", there, "new.example.org:9999") == {"server": "new.example.org:9999"}
    assert answered("status", there)["server"] == "new.example.org:9999"
    assert answered("server", here, "127.0.0.1:9093") == {"server": "127.0.0.1:9093"}
    assert "new.example.org is another machine" in refused("server", here, "new.example.org:9092")
    assert "HOST:PORT" in refused("server", there, "nowhere")
    assert "a device without a server" in refused("server", alone, "localhost:9092")
    assert answered("server", there) == {"server": "new.example.org:9999"}


def test_methods_of_packages_are_allowed_by_name(tmp_path: Path, keys: object) -> None:
    folder = tmp_path / "device"
    said("init", folder, "--server", "localhost:9092", "--allow-method", "mine", "--allow-method", "mine")
    assert said("methods", folder).strip() == "mine: allowed, not installed on this machine"
    found = answered("methods", folder, "--allow", "other", "--forbid", "mine")["methods"]
    assert found == [{"name": "other", "allowed": True, "installed": None}]
    assert "'mine' is not allowed here" in refused("methods", folder, "--forbid", "mine")
    assert "fedmf comes with Homebody" in refused("methods", folder, "--allow", "fedmf")
    for wrong in ("my.method", "./mine.py", "mine.py:Mine", ""):
        assert "A device allows a method by its name" in refused("methods", folder, "--allow", wrong)
    assert [one["name"] for one in answered("methods", folder)["methods"]] == ["other"]
    said("methods", folder, "--forbid", "other")
    assert said("methods", folder).startswith("No method of a package is allowed or installed")


def test_init_with_a_proxy_makes_another_key(tmp_path: Path, keys: object) -> None:
    folder, ca = tmp_path / "device", tmp_path / "proxy-ca.pem"
    ca.write_text(CERTIFICATE)
    words = ("init", folder, "--server", "localhost:9092", "--proxy", "https://mix.example.org:9445")
    text = said(*words, "--proxy-ca", ca).replace("\n", "")
    assert f"Give {folder / 'reports.pub'} to the proxy's operator" in text
    assert (folder / "proxy-ca.pem").read_text() == CERTIFICATE
    assert (folder / "reports.key").stat().st_mode & 0o777 == 0o600
    assert len(read_report_pub(folder / "reports.pub")) == 32
    found = answered("status", folder)
    assert (found["proxy"], found["reports"]) == ("https://mix.example.org:9445", 0)
    assert "proxy: https://mix.example.org:9445, 0 reports sent" in said("status", folder)
    made = answered("init", tmp_path / "other", *words[2:4], "--proxy", "http://localhost:9445")
    assert made["reports_key"] == str(tmp_path / "other" / "reports.pub")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--proxy", "mix.example.org:9445"], "must be https://HOST:PORT"),
        (["--proxy", "http://mix.example.org"], "is reached by https://"),
        (["--proxy-ca", "ca.pem"], "--proxy-ca is the certificate of a proxy at https://"),
        (["--proxy", "https://mix.example.org", "--proxy-ca", "nosuch.pem"], "nosuch.pem cannot be read"),
    ],
)
def test_init_refuses_a_bad_proxy_and_makes_nothing(
    tmp_path: Path, keys: object, options: list[str], sentence: str
) -> None:
    assert sentence in refused("init", tmp_path / "device", "--server", "localhost:9092", *options)
    assert not (tmp_path / "device").exists()


def test_reports_that_left_are_counted(filled: Path) -> None:
    with Home(filled) as home:
        for number in (1, 2):
            home.outbox.finish(0, "run", f"train/{number}", "d", None, b"sealed", reports=20)
        home.outbox.finish(1, "run", "train/1", "d", None, b"plain")
    assert answered("status", filled)["reports"] == 40
    ann, bob = answered("ledger", filled)["people"]
    assert (ann["sent"]["reports"], ann["sent"]["lines"][0]["reports"], bob["sent"]["reports"]) == (40, 40, 0)
    assert "2 answers left the device, 12 bytes in all, with 40 reports for the proxy." in said("ledger", filled)


def test_a_life_of_a_history(device: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user,item,time\nann,emma,1\nann,ulysses,2\nbob,emma,3\n")
    first = answered("import", device, tmp_path / "rows.csv")
    assert first == {
        "added": 3,
        "repeated": 0,
        "left_out": 0,
        "new": [{"slot": 0, "name": "ann", "active": True}, {"slot": 1, "name": "bob", "active": True}],
    }
    assert said("import", device, tmp_path / "rows.csv") == "0 interactions added, 3 known already.\n"
    assert "2 rows of others left out.\n" in said("import", device, tmp_path / "rows.csv", "--only", "bob")
    assert "New: zoe (slot 2)." in said("import", device, tmp_path / "rows.csv", "--person", "zoe", "--user-col", "")
    noted = answered("append", device, "ann", "persuasion", "--time", "2024-01-01", "--rating", "4.5")
    assert noted == {"item": "persuasion", "time": 1704067200, "rating": 4.5}
    assert "emma noted for bob" in said("append", device, "bob", "emma")
    assert answered("delete", device, "ann", "emma") == {"deleted": 1, "impressions": 0}
    assert said("delete", device, "zoe", "--all", "--before", "3") == "2 interactions deleted.\n"
    assert answered("export", device, tmp_path / "ann.csv", "--person", "ann")["rows"] == 2
    assert (tmp_path / "ann.csv").read_text() == (
        "user,item,time,rating\nann,ulysses,2,\nann,persuasion,1704067200,4.5\n"
    )
    assert said("export", device, tmp_path / "all.csv") == f"5 interactions written to {tmp_path / 'all.csv'}.\n"
    rows = answered("people", device, "--add", "eve")["people"]
    assert [(row["name"], row["interactions"]) for row in rows] == [("ann", 2), ("bob", 2), ("zoe", 1), ("eve", 0)]
    assert "ann" in said("people", device)


def test_pausing_and_opting_out(filled: Path) -> None:
    assert said("pause", filled).startswith("Paused")
    assert answered("status", filled)["paused"] is True
    assert "not running, paused" in said("status", filled)
    assert answered("resume", filled) == {"paused": False}
    assert answered("status", filled)["paused"] is False
    with Home(filled) as home:
        home.outbox.finish("ann", "r", "train/1", "d", PrivateState(1, None, b"state"), b"answer")
    assert "stays until" in said("delete", filled, "ann", "emma")
    assert "the history stays (1 interaction)" in said("opt-out", filled, "ann")
    assert [row["active"] for row in answered("people", filled)["people"]] == [False, True]
    assert "stays until" not in said("delete", filled, "ann", "emma")
    assert answered("opt-in", filled, "ann") == {"slot": 0, "name": "ann", "active": True}
    assert "the history too" in said("opt-out", filled, "bob", "--delete-history")
    assert [row["interactions"] for row in answered("people", filled)["people"]] == [1, 0]


def test_status_tells_of_the_model_and_of_a_client_that_runs(filled: Path) -> None:
    with Home(filled) as home, home.store.only_client():
        home.models.rank_with('{"method": "pfedrec"}', "d", "train/7", 7)
        home.items.add(0, [("emma", "Emma")])
        found = answered("status", filled)
        text = said("status", filled)
    assert found["model"] == {"description": {"method": "pfedrec"}, "digest": "d", "release": "train/7", "step": 7}
    assert found["running"] is True
    assert found["items"] == 1
    assert f"a device in {filled}: running\n" in text
    assert "model: as of train/7\n" in text


def test_the_ledger_of_a_device_that_told_nothing(filled: Path) -> None:
    found = answered("ledger", filled)["people"]
    assert [(one["person"], one["sent"]["answers"], one["ledger"]["releases"]) for one in found] == [
        ("ann", 0, 0),
        ("bob", 0, 0),
    ]
    assert "ε = 0 against everyone" in said("ledger", filled, "--person", "bob")


def test_the_ledger_tells_what_left_and_what_it_cost(filled: Path) -> None:
    told = [Charge(who, "user", GaussianRelease(4, "replace-one")) for who in OBSERVERS[1:]]
    told.append(Charge("server", "user", NonPrivate("plain updates")))
    with Home(filled) as home:
        home.configure(budget="eps=8,delta=1e-5,observer=public")
        for step in (1, 2, 3):
            home.ledger("ann").charge(f"train/{step}", told, number=step)
            home.outbox.finish("ann", "r", f"train/{step}", "d", PrivateState(step, None, b"state"), bytes(100 * step))
    (found,) = answered("ledger", filled, "--person", "ann")["people"]
    assert found["delta"] == 1e-5
    assert {name: found["sent"][name] for name in ("answers", "bytes")} == {"answers": 3, "bytes": 600}
    assert [mark["bytes"] for mark in found["sent"]["each"]] == [100, 200, 300]
    (line,) = found["sent"]["lines"]
    assert (line["first"], line["last"], line["answers"], line["bytes"]) == ("train/1", "train/3", 3, 600)
    (line,) = found["ledger"]["lines"]
    assert (line["rounds"], line["count"]) == ("train, rounds 1–3", 3)
    epsilons = {row["observer"]: row["epsilon"] for row in found["certified"]}
    assert epsilons["server"] == "inf"
    assert epsilons["public"] == epsilons["clients"] == found["budget"]["spent"]
    assert 1.5 < epsilons["public"] < 3
    (looser,) = answered("ledger", filled, "--person", "ann", "--delta", "0.01")["people"]
    assert {row["observer"]: row["epsilon"] for row in looser["certified"]}["public"] < epsilons["public"]
    text = said("ledger", filled)
    assert "3 answers left the device, 600 bytes in all." in text
    assert "train, rounds 1–3:" in text
    assert "plain updates; ε = ∞ each" in text
    assert "of 8 is spent about one user, against the public, at δ = 1e-05." in text
    assert "bob" in text
    assert "δ must be" in refused("ledger", filled, "--delta", "2")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("append", "zoe", "emma"), "There is no person 'zoe'"),
        (("append", "ann", ""), "An item id must be"),
        (("append", "ann", "emma", "--time", "noon"), "A time must be a number or an ISO date"),
        (("append", "ann", "emma", "--rating", "nan"), "A rating must be"),
        (("delete", "ann"), "either an item, or --all"),
        (("delete", "ann", "emma", "--all"), "either an item, or --all"),
        (("import", "no/such.csv", "--person", "ann"), "There is no file no/such.csv"),
        (("people", "--add", "ann"), "There is a person 'ann' already"),
        (("opt-out", "zoe"), "There is no person 'zoe'"),
        (("ledger", "--person", "zoe"), "There is no person 'zoe'"),
    ],
)
def test_bad_input_is_a_sentence_and_changes_nothing(filled: Path, arguments: tuple[str, ...], expected: str) -> None:
    before = answered("people", filled)
    command, *rest = arguments
    assert expected in refused(command, filled, *rest)
    assert answered("people", filled) == before


def test_a_folder_that_is_no_device_is_refused_by_every_command(tmp_path: Path) -> None:
    for command, *rest in (("status",), ("people",), ("pause",), ("ledger",), ("append", "ann", "emma")):
        assert "There is no device in" in refused(command, tmp_path, *rest)
    assert list(tmp_path.iterdir()) == []


def loaded(*arguments: object) -> set[str]:
    """Which modules the command takes in a process of its own."""
    text = (
        "import sys; from homebody.cli.client import app\n"
        "try:\n    app(sys.argv[1:])\nexcept SystemExit as end:\n    code = end.code\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", text, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_daily_commands_start_without_torch(filled: Path, tmp_path: Path) -> None:
    assert not loaded("--help") & HEAVY
    daily = (("status",), ("pause",), ("append", "ann", "emma"), ("ledger",), ("export", tmp_path / "e"), ("serving",))
    for command, *rest in daily:
        assert not loaded(command, filled, *rest) & LIGHT


CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBdDCCARugAwIBAgIUHTcYhDJ/aD7YxC4+N9LpgRxNiOgwCgYIKoZIzj0EAwIw
DzENMAsGA1UEAwwEdGVzdDAgFw0yNjExMTUxODA0MDlaGA8yMTI2MTAyMjE4MDQw
OVowDzENMAsGA1UEAwwEdGVzdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABIhx
pqMStMnGWgdj+O7FV0DdJsbMWupYjlo+zSOPJmhyZsUCHlRL+00pEbLJRJYz2pSe
ssZE2+ITVBdQVuqvQPijUzBRMB0GA1UdDgQWBBTogk3A7/dnCgyykNwy537vD5Py
DzAfBgNVHSMEGDAWgBTogk3A7/dnCgyykNwy537vD5PyDzAPBgNVHRMBAf8EBTAD
AQH/MAoGCCqGSM49BAMCA0cAMEQCIEG7s23EqTy+/jxNR5yiTy6k3ZzkZpLJWaX0
1vyhTOFEAiAzrPdozLfjYTLIAXeCLjcF/MqbPtrxTcjUug53z7x6OA==
-----END CERTIFICATE-----
"""


def test_a_device_is_told_of_a_service(filled: Path, tmp_path: Path) -> None:
    assert "No service: give one with --url" in said("serving", filled)
    (tmp_path / "token").write_text("abc\n")
    text = said("serving", filled, "--url", "https://rec.example.org:9443/", "--token-file", tmp_path / "token")
    assert "https://rec.example.org:9443, mode auto.\nAsked every 1d for everybody" in text
    told = answered("serving", filled, "--mode", "query", "--every", "12h", "--epsilon", "4")
    about = {"mode": "query", "every": 43_200, "epsilon": 4.0}
    assert told == {"url": "https://rec.example.org:9443", "token": True, **about}
    assert "A query costs ε = 4 at most." in said("serving", filled)
    assert "No budget: ε grows with every query" in said("serving", filled)
    assert "service: https://rec.example.org:9443, mode query" in said("status", filled)
    for arguments, sentence in (
        (("--every", "often"), "A span of time is a number with s, m, h or d"),
        (("--mode", "tables"), "did you mean 'table'?"),
        (("--epsilon", "0"), "The ε of a query is a number above 0, up to 100, not 0.0."),
        (("--url", "rec.example.org"), "must be https://HOST:PORT"),
    ):
        assert sentence in refused("serving", filled, *arguments)
        assert answered("serving", filled) == told
    assert "no source of recommendations 'cloud'" in refused("recommend", filled, "ann", "--from", "cloud")
    assert answered("serving", filled, "--url", "") == {"url": "", "token": False, **about}
    assert "has no service: give it one with" in refused("recommend", filled, "ann", "--from", "server")


def test_a_device_without_a_server_is_served_alone(tmp_path: Path, keys: Callable[[Path], Path]) -> None:
    text = said("init", tmp_path / "d")
    assert "A device without a server" in text
    assert "homebody client serving" in text
    assert "server: none" in said("status", tmp_path / "d")
    said("people", tmp_path / "d", "--add", "ann")
    assert "This device has no model yet" in refused("recommend", tmp_path / "d", "ann")
    said("serving", tmp_path / "d", "--url", "http://127.0.0.1:9")
    assert "cannot be reached" in refused("recommend", tmp_path / "d", "ann"), "It is what the device has."
    assert "give its address as --server" in refused("init", tmp_path / "e", "--ca", tmp_path / "d")


def test_the_ledger_tells_of_queries_and_how_long_the_budget_lasts(filled: Path) -> None:
    charge = Charge("server", "user", PureRelease(5.0))
    with Home(filled) as home:
        home.configure(budget="eps=21,observer=server")
        home.be_served("https://rec.example.org", serving_mode="query", serving_every=3600)
        for turn in (1, 2):
            about = ("ann", turn, "choice", "digest", charge.as_json())
            drawn = home.queries.draw(*about, told=b"told", at=turn)
            assert drawn is not None
            home.ledger("ann").charge(f"query/choice/{turn}", [charge], number=turn)
            home.queries.answer(home.queries.move(drawn, "sent", turn), b"answer")
    text = said("ledger", filled, "--person", "ann")
    assert "2 queries left for the service: 2 of kind choice, the last on 1970-01-01 00:00 UTC." in text
    assert "At one query every 1h, without training, the budget lasts for 2 further queries: 2h." in text
    assert "query/choice, rounds 1–2:" in text
    assert "Nothing was released" not in text
    assert "queries left" not in said("ledger", filled, "--person", "bob")
    with Home(filled) as home:
        home.configure(budget="eps=11,observer=server")
    assert "The budget allows no further query" in said("ledger", filled, "--person", "ann")
    with Home(filled) as home:
        home.configure(budget=None)
    assert "No budget: at one query every 1h, ε against the server is" in said("ledger", filled, "--person", "ann")


def test_names_of_items_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A server or service says what items are called, and what went wrong."""
    options.show(options.ranking("For ann", [("i1", "a\x1b[2J cat\x9b", 1.0)]), "The service refused: \x1b]0;it\x07.")
    options.warn("\x1b[2J")
    said = "".join(capsys.readouterr())
    assert "a\ufffd[2J cat" in said
    assert not {"\x1b", "\x9b", "\x07"} & set(said)
