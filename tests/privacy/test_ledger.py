"""The ledger: nothing is lost, nothing is changed, nothing is charged twice."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.warm import Nest

from homebody.errors import HomebodyError
from homebody.privacy import (
    OBSERVERS,
    Charge,
    GaussianRelease,
    Ledger,
    NonPrivate,
    Reports,
    Sampling,
    accountant,
)
from homebody.privacy import (
    ledger as ledgers,
)

PLAIN = [Charge(observer, "user", NonPrivate("plain updates")) for observer in OBSERVERS]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    ledger = Ledger(path)
    yield ledger
    ledger.close()


def bypass(path: Path, *statements: str) -> None:
    """Change the file as someone who knows SQLite would: without its triggers."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("DROP TRIGGER IF EXISTS charge_is_never_changed")
    database.execute("DROP TRIGGER IF EXISTS charge_is_never_removed")
    for statement in statements:
        database.execute(statement)
    database.close()


def filled(path: Path, releases: int = 3) -> list[str]:
    ledger = Ledger(path)
    for number in range(1, releases + 1):
        ledger.charge(f"train/{number}", PLAIN, repeat=True, number=number, code="Toy 1")
    hashes = [entry.hash for entry in ledger.entries()]
    ledger.close()
    return hashes


def test_an_empty_ledger_told_nobody_anything(ledger: Ledger) -> None:
    assert ledger.entries() == []
    assert ledger.epsilons() == {"server": 0.0, "clients": 0.0, "public": 0.0}


def test_a_charge_concerns_its_observer_alone(ledger: Ledger) -> None:
    ledger.charge("train/1", [Charge("server", "user", NonPrivate("plain updates"))])
    assert ledger.epsilons() == {"server": float("inf"), "clients": 0.0, "public": 0.0}


def test_charges_survive_the_process_and_are_not_repeated(path: Path) -> None:
    hashes = filled(path)
    assert len(hashes) == 9
    assert filled(path) == hashes


def test_the_chain_by_hand(path: Path) -> None:
    """Anyone can check a ledger with SHA-256 and the rows."""
    filled(path, releases=2)
    ledger = Ledger(path)
    entries = ledger.entries()
    ledger.close()
    previous = "0" * 64
    for number, entry in enumerate(entries):
        assert (entry.id, entry.release) == (number + 1, f"train/{number // 3 + 1}")
        assert (entry.observer, entry.unit) == (OBSERVERS[number % 3], "user")
        assert json.loads(entry.event) == {"kind": "not-private", "reason": "plain updates"}
        assert (entry.round, entry.code) == (number // 3 + 1, "Toy 1")
        about = [entry.round, "replace-one", "no sampling", "Toy 1", ""]
        row = [entry.release, "", entry.observer, entry.unit, entry.event, *about, previous]
        assert entry.previous == previous
        assert entry.hash == hashlib.sha256(json.dumps(row).encode()).hexdigest()
        previous = entry.hash


def test_the_same_release_with_another_event_is_refused_whole(ledger: Ledger) -> None:
    ledger.charge("train/1", PLAIN[1:2])
    other = [Charge(observer, "user", NonPrivate("raw data")) for observer in OBSERVERS]
    with pytest.raises(HomebodyError, match="Release train/1 is in the ledger with other events"):
        ledger.charge("train/1", other, repeat=True)
    assert [entry.observer for entry in ledger.entries()] == [OBSERVERS[1]]


def test_a_release_that_is_not_a_repetition_counts_again(ledger: Ledger) -> None:
    for _ in range(3):
        ledger.charge("train/1", PLAIN)
    ledger.charge("train/11", PLAIN)
    names = list(dict.fromkeys(entry.release for entry in ledger.entries()))
    assert names == ["train/1", "train/1#2", "train/1#3", "train/11"]
    assert ledger.releases() == 4
    ledger.verify()


def test_a_charge_that_fails_half_way_leaves_nothing(ledger: Ledger) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        ledger.charge("train/1", [*PLAIN, PLAIN[0]])
    assert ledger.entries() == []
    ledger.charge("train/1", PLAIN)
    assert ledger.releases() == 1


def test_a_release_may_have_parts(ledger: Ledger) -> None:
    both = [Charge("server", "user", NonPrivate("plain"), part=part) for part in ("item", "user")]
    ledger.charge("train/1", both)
    ledger.charge("train/1", both, repeat=True)
    assert [entry.part for entry in ledger.entries()] == ["item", "user"]
    assert ledger.releases() == 1


@pytest.mark.parametrize(
    "statement",
    ["UPDATE charge SET event = '{}'", "UPDATE charge SET release = 'x' WHERE id = 1", "DELETE FROM charge"],
)
def test_rows_are_neither_changed_nor_removed(path: Path, statement: str) -> None:
    hashes = filled(path)
    database = sqlite3.connect(path, isolation_level=None)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        database.execute(statement)
    database.close()
    assert filled(path) == hashes


@pytest.mark.parametrize(
    ("statement", "row"),
    [
        ("UPDATE charge SET event = replace(event, 'plain', 'quiet') WHERE id = 4", 4),
        ("UPDATE charge SET release = 'train/9' WHERE id = 2", 2),
        ("UPDATE charge SET observer = 'nobody' WHERE id = 1", 1),
        ("UPDATE charge SET unit = 'item' WHERE id = 9", 9),
        ("UPDATE charge SET part = 'item' WHERE id = 7", 7),
        ("UPDATE charge SET round = 7 WHERE id = 2", 2),
        ("UPDATE charge SET relation = 'add-remove' WHERE id = 3", 3),
        ("UPDATE charge SET sampling = 'a few' WHERE id = 4", 4),
        ("UPDATE charge SET code = 'Toy 2' WHERE id = 6", 6),
        ("UPDATE charge SET round = NULL, relation = NULL, sampling = NULL, code = NULL WHERE id = 8", 8),
        ("UPDATE charge SET previous = hash WHERE id = 3", 3),
        ("UPDATE charge SET hash = previous WHERE id = 5", 5),
        ("DELETE FROM charge WHERE id = 1", 2),
        ("DELETE FROM charge WHERE id = 5", 6),
        ("UPDATE charge SET id = 40 WHERE id = 4", 5),
    ],
)
def test_tampering_past_the_triggers_is_noticed(path: Path, statement: str, row: int) -> None:
    filled(path)
    bypass(path, statement)
    with pytest.raises(HomebodyError, match=f"tampered with: row {row} breaks its chain"):
        Ledger(path)


def test_a_row_that_was_hashed_but_not_chained_is_noticed(path: Path) -> None:
    filled(path)
    row = ("train/4", "", "server", "user", "{}", "0" * 64)
    own = hashlib.sha256(json.dumps(row).encode()).hexdigest()
    values = ", ".join(f"'{value}'" for value in (*row, own))
    bypass(path, f"INSERT INTO charge (release, part, observer, unit, event, previous, hash) VALUES ({values})")
    with pytest.raises(HomebodyError, match="row 10 breaks its chain"):
        Ledger(path)


def test_a_newer_ledger_is_refused(path: Path) -> None:
    filled(path)
    bypass(path, "PRAGMA user_version = 7")
    with pytest.raises(HomebodyError, match=r"newer Homebody \(schema 7\)"):
        Ledger(path)


@pytest.mark.parametrize(
    "content", [b"not a database at all, only text of some length", b"SQLite format 3\0" + b"\7" * 200]
)
def test_a_file_that_is_no_ledger_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(HomebodyError, match="cannot be opened"):
        Ledger(path)
    assert path.read_bytes() == content


def test_a_folder_that_does_not_exist_is_an_error(path: Path) -> None:
    with pytest.raises(HomebodyError, match="cannot be opened"):
        Ledger(path / "below")


CHARGING = """
import sys
from pathlib import Path
from homebody.privacy import OBSERVERS, Charge, Ledger, NonPrivate
path, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
charges = [Charge(observer, "user", NonPrivate("plain updates")) for observer in OBSERVERS]
print("ready", flush=True)
sys.stdin.readline()
ledger = Ledger(path)
for number in range(count):
    ledger.charge(f"{name}/{number}", charges)
    print(number, flush=True)
"""


def charging(warm: Nest, path: Path, name: str, count: int) -> subprocess.Popen[str]:
    """A process that charges in a loop once it is told to, and says so after each charge."""
    process: subprocess.Popen[str] = warm.popen(
        [sys.executable, "-c", CHARGING, str(path), name, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.stderr and process.stderr.read()
    return process


def start(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def test_writers_at_once_lose_nothing_and_keep_one_chain(path: Path, warm: Nest) -> None:
    """They even make the ledger at the same moment."""
    writers = [charging(warm, path, name, 100) for name in ("ann", "bob", "eve")]
    start(*writers)
    for writer in writers:
        output, errors = writer.communicate()
        assert writer.returncode == 0, errors
        assert len(output.split()) == 100
    ledger = Ledger(path)  # which verifies the chain
    releases = [entry.release for entry in ledger.entries()]
    ledger.close()
    assert len(releases) == 900
    assert set(releases) == {f"{name}/{number}" for name in ("ann", "bob", "eve") for number in range(100)}


FORKING = """
import os, sys
from pathlib import Path
from homebody.privacy import OBSERVERS, Charge, Ledger, NonPrivate
path, lives = Path(sys.argv[1]), int(sys.argv[2])
charges = [Charge(observer, "user", NonPrivate("plain updates")) for observer in OBSERVERS]
for life in range(lives):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        ledger = Ledger(path)
        for number in range(10**6):
            ledger.charge(f"{life}/{number}", charges)
            os.write(writing, b"%d\\n" % number)
        os._exit(1)
    os.close(writing)
    heard = b""
    while heard.count(b"\\n") < 1 + 7 * life % 12:
        heard += os.read(reading, 4096) or sys.exit("a child ended by itself")
    os.kill(child, 9)
    assert os.waitpid(child, 0)[1] == 9
    while part := os.read(reading, 4096):
        heard += part
    os.close(reading)
    print(life, heard.count(b"\\n"), flush=True)
"""


@pytest.mark.parametrize("lives", [50, pytest.param(1000, marks=pytest.mark.faults)])
def test_kills_lose_no_acknowledged_charge(path: Path, lives: int, warm: Nest) -> None:
    """A child charges without end and says so after each; it is killed in the middle, again and again on one ledger."""
    done = warm.run([sys.executable, "-c", FORKING, str(path), str(lives)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    acknowledged = dict(tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert list(acknowledged) == list(range(lives))
    ledger = Ledger(path)
    written: dict[str, list[str]] = {}
    for entry in ledger.entries():
        written.setdefault(entry.release.partition("/")[0], []).append(entry.release)
    ledger.close()
    for life, count in acknowledged.items():
        wanted = [f"{life}/{number}" for number in range(count) for _ in OBSERVERS]
        mine = written[str(life)]
        assert mine[: len(wanted)] == wanted
        assert len(mine) in (len(wanted), len(wanted) + 3)  # one may be written and not yet said, never in part


def test_a_writer_that_was_killed_holds_up_nobody(path: Path, warm: Nest) -> None:
    writer = charging(warm, path, "ann", 10**6)
    start(writer)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "0\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    ledger = Ledger(path)
    ledger.charge("bob/0", PLAIN)
    assert ledger.entries()[-1].release == "bob/0"
    ledger.close()


FIRST_SCHEMA = """
CREATE TABLE charge (
    id INTEGER PRIMARY KEY,
    release TEXT NOT NULL,
    part TEXT NOT NULL,
    observer TEXT NOT NULL,
    unit TEXT NOT NULL,
    event TEXT NOT NULL,
    previous TEXT NOT NULL,
    hash TEXT NOT NULL,
    UNIQUE (release, part, observer, unit)
);
CREATE TRIGGER charge_is_never_changed BEFORE UPDATE ON charge
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER charge_is_never_removed BEFORE DELETE ON charge
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
PRAGMA user_version = 1;
"""


def first_schema(path: Path, releases: int = 2) -> list[str]:
    """A ledger as the first version wrote it."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.executescript(FIRST_SCHEMA)
    previous, hashes = "0" * 64, []
    for number in range(1, releases + 1):
        for observer in OBSERVERS:
            event = '{"kind": "not-private", "reason": "plain updates"}'
            row = (f"train/{number}", "", observer, "user", event, previous)
            previous = hashlib.sha256(json.dumps(row).encode()).hexdigest()
            hashes.append(previous)
            names = "release, part, observer, unit, event, previous, hash"
            database.execute(f"INSERT INTO charge ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, previous))
    database.close()
    return hashes


def test_a_ledger_of_the_first_schema_goes_on(path: Path) -> None:
    """What an old row was shaped by is not known: the same name is charged once more, and then it is."""
    hashes = first_schema(path)
    for _ in range(2):
        ledger = Ledger(path)
        ledger.charge("train/2", PLAIN, repeat=True)
        ledger.charge("train/3", PLAIN, number=3, code="Toy 1", repeat=True)
        entries = ledger.entries()
        assert ledger.epsilons() == dict.fromkeys(OBSERVERS, float("inf"))
        ledger.close()
        assert [entry.hash for entry in entries[:6]] == hashes
        assert {(entry.round, entry.relation, entry.sampling, entry.code) for entry in entries[:6]} == {(None,) * 4}
        added = [("train/2#2", 0, "")] * 3 + [("train/3", 3, "Toy 1")] * 3
        assert [(entry.release, entry.round, entry.code) for entry in entries[6:]] == added
        assert entries[6].previous == hashes[-1]
    database = sqlite3.connect(path, isolation_level=None)
    assert database.execute("PRAGMA user_version").fetchone() == (3,)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        database.execute("UPDATE charge SET code = 'x'")
    database.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE charge SET code = 'someone' WHERE id = 2",
        "UPDATE charge SET event = replace(event, 'plain', 'quiet') WHERE id = 2",
    ],
)
def test_old_rows_are_still_verified(path: Path, statement: str) -> None:
    first_schema(path)
    Ledger(path).close()
    bypass(path, statement)
    with pytest.raises(HomebodyError, match="row 2 breaks its chain"):
        Ledger(path)


DRAWN = GaussianRelease(1, "replace-one", Sampling("fixed", cohort=30, population=4800))


def test_epsilon_is_what_the_accountant_derives(ledger: Ledger) -> None:
    told = [Charge("server", "user", NonPrivate("server noise")), Charge("public", "user", DRAWN)]
    for number in range(1, 21):
        ledger.charge(f"train/{number}", told, number=number)
    expected = accountant.epsilon([(DRAWN, 20)], 1e-5)
    assert ledger.epsilon("public", delta=1e-5) == expected
    assert ledger.epsilons(1e-5) == {"server": float("inf"), "clients": 0.0, "public": expected.epsilon}
    more = accountant.epsilon([(DRAWN, 21)], 1e-5).epsilon
    assert ledger.epsilon("public", delta=1e-5, also=told).epsilon == more
    assert ledger.within(more, "public", delta=1e-5, also=told)
    assert not ledger.within(more * 0.999, "public", delta=1e-5, also=told)
    assert "server noise" in ledger.epsilon("server").notes[0]


def test_another_ledger_on_the_same_file_is_counted(path: Path) -> None:
    one, two = Ledger(path), Ledger(path)
    told = [Charge("public", "user", GaussianRelease(2, "replace-one"))]
    one.charge("train/1", told)
    before = one.epsilons()["public"]
    two.charge("train/2", told)
    assert one.epsilons()["public"] > before > 0
    assert one.epsilon("public") == two.epsilon("public")
    one.close()
    two.close()


def test_epsilon_is_not_derived_again_while_nothing_is_charged(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.charge("train/1", [Charge("public", "user", GaussianRelease(3.14159, "replace-one"))])
    first = ledger.epsilon("public")
    monkeypatch.setattr(ledgers, "epsilon", None)
    assert ledger.epsilon("public") is first


def test_one_report_is_in_one_round_and_a_person_in_all(ledger: Ledger) -> None:
    """Twenty rounds of 10 reports of ε = 1: 200 for a person, 1 for a report. Never 1 for a person."""
    told = [Charge("server", "user", Reports(1.0, 10)), Charge("server", "report", Reports(1.0, 1))]
    for number in range(20):
        ledger.charge(f"train/{number}", told)
    assert ledger.epsilon("server", delta=0).epsilon == 200
    assert ledger.epsilon("server", "report", delta=0).epsilon == 1
    assert ledger.epsilon("server", "interaction", delta=0).epsilon == 200  # charged for the person who did it
    ledger.charge("train/20", [Charge("server", "user", Reports(1.0, 3))])
    assert ledger.epsilon("server", "report", delta=0).epsilon == 4  # nothing smaller was said of the last


def test_what_is_charged_for_people_who_come_and_go_says_nothing_of_their_parts(ledger: Ledger) -> None:
    ledger.charge("train/1", [Charge("public", "user", GaussianRelease(2, "add-remove"))])
    assert ledger.epsilon("public").epsilon < float("inf")
    assert ledger.epsilon("public", "interaction").epsilon == float("inf")


def test_events_that_cannot_be_read_are_not_private(path: Path) -> None:
    ledger = Ledger(path)
    ledger.charge("train/1", [Charge("public", "user", DRAWN)])
    ledger._counts.clear()
    ledger._db.execute("DROP TRIGGER charge_is_never_changed")
    ledger._db.execute('UPDATE charge SET event = \'{"kind": "magic"}\'')
    assert ledger.epsilon("public").epsilon == float("inf")
    ledger.close()


def test_what_is_charged_for_a_part_alone_bounds_nothing_about_the_whole() -> None:
    """A report's ε says nothing of a person who sent any number of them: ε fails closed."""
    alone = [Charge("server", "report", Reports(1.0))]
    both = [*alone, Charge("server", "user", Reports(1.0, 3))]
    ledger = Ledger()
    assert math.isinf(ledger.epsilon("server", also=alone).epsilon)
    assert math.isinf(ledger.epsilon("server", "interaction", also=alone).epsilon)
    assert not ledger.within(100.0, "server", delta=1e-6, also=alone)
    ledger.charge("first", both)
    assert ledger.epsilon("server", delta=0).epsilon == pytest.approx(3.0)
    assert ledger.epsilon("server", "report", delta=0).epsilon == pytest.approx(1.0)
    ledger.charge("second", alone)
    assert math.isinf(ledger.epsilon("server").epsilon)
    assert math.isinf(ledger.epsilons()["server"])
    assert ledger.epsilon("server", "report", delta=0).epsilon == pytest.approx(1.0)
