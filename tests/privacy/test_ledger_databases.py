"""The ledger's promises in both databases, each shared with others who use it too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm import Nest

from homebody.database import Conflict, Database, connect
from homebody.errors import HomebodyError
from homebody.privacy import OBSERVERS, Charge, GaussianRelease, Ledger, NonPrivate, Reports

PLAIN = [Charge(observer, "user", NonPrivate("plain updates")) for observer in OBSERVERS]
TOLD = [Charge("public", "user", GaussianRelease(4, "replace-one")), Charge("server", "report", Reports(1.0))]


def fill(ledger: Ledger, releases: int = 3) -> list[str]:
    for number in range(1, releases + 1):
        ledger.charge(f"train/{number}", PLAIN, repeat=True, number=number, code="Toy 1")
    return [entry.hash for entry in ledger.entries()]


def tamper(database: Database, statement: str) -> None:
    """As someone would who may do anything in the database."""
    if database.dialect == "postgresql":
        database.execute("ALTER TABLE charge DISABLE TRIGGER ALL")
    else:
        database.execute("DROP TRIGGER IF EXISTS charge_is_never_changed")
        database.execute("DROP TRIGGER IF EXISTS charge_is_never_removed")
    database.execute(statement)


def test_the_chain_is_the_same_in_every_database(database: Database) -> None:
    ledger, memory = Ledger(database), Ledger()
    for one in (ledger, memory):
        fill(one)
        one.charge("train/2", TOLD)
        one.charge("ä#漢", TOLD, number=7, code="Toy 2")
    assert ledger.entries() == memory.entries()
    assert [entry.id for entry in ledger.entries()] == list(range(1, 14))
    assert ledger.epsilons(1e-5) == memory.epsilons(1e-5)
    assert ledger.epsilon("server", "report", delta=0) == memory.epsilon("server", "report", delta=0)
    assert ledger.releases() == 5
    memory.close()


def test_charges_are_found_again_and_not_repeated(database: Database, where: Path | str) -> None:
    hashes = fill(Ledger(database))
    other = connect(where)
    again = Ledger(other)
    assert fill(again) == hashes
    assert again.knows("train/3")
    assert not again.knows("train/4")
    other.close()


def test_the_database_stays_open_and_the_place_has_a_name(database: Database) -> None:
    ledger = Ledger(database)
    ledger.close()
    assert ledger.path == database.name
    assert database.execute("SELECT COUNT(*) FROM charge").fetchone() == (0,)


def test_a_release_that_is_not_a_repetition_counts_again(database: Database) -> None:
    ledger = Ledger(database)
    for _ in range(3):
        ledger.charge("train/1", PLAIN)
    ledger.charge("train/11", PLAIN)
    names = list(dict.fromkeys(entry.release for entry in ledger.entries()))
    assert names == ["train/1", "train/1#2", "train/1#3", "train/11"]


def test_a_charge_that_fails_half_way_leaves_nothing(database: Database) -> None:
    ledger = Ledger(database)
    with pytest.raises(Conflict):
        ledger.charge("train/1", [*PLAIN, PLAIN[0]])
    assert ledger.entries() == []
    ledger.charge("train/1", PLAIN)
    other = [Charge(observer, "user", NonPrivate("raw data")) for observer in OBSERVERS]
    with pytest.raises(HomebodyError, match="with other events"):
        ledger.charge("train/1", other, repeat=True)
    assert [entry.id for entry in ledger.entries()] == [1, 2, 3]


def test_a_charge_is_undone_with_the_transaction_around_it(database: Database) -> None:
    ledger = Ledger(database)

    def charge_and_fail() -> None:
        with database.transaction():
            ledger.charge("train/1", PLAIN)
            assert ledger.epsilons() == dict.fromkeys(OBSERVERS, float("inf"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        charge_and_fail()
    assert ledger.entries() == []
    assert ledger.epsilons() == dict.fromkeys(OBSERVERS, 0.0)


def test_what_was_undone_is_not_taken_for_what_came_in_its_place(database: Database) -> None:
    """Rows of the same numbers, which tell more."""
    ledger = Ledger(database)
    quiet = [Charge("public", "user", GaussianRelease(400, "replace-one"))]
    ledger.charge("train/1", quiet)

    def charge_and_fail() -> None:
        with database.transaction():
            ledger.charge("train/2", quiet)
            assert ledger.epsilons()["public"] < 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        charge_and_fail()
    before = ledger.epsilons()["public"]
    ledger.charge("train/2", PLAIN)
    assert ledger.epsilons()["public"] == float("inf") > before


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE charge SET event = '{}'",
        "DELETE FROM charge WHERE id = 2",
        "UPDATE charge SET id = 40",
        "TRUNCATE charge",
    ],
)
def test_rows_are_neither_changed_nor_removed(database: Database, statement: str) -> None:
    if statement.startswith("TRUNCATE") and database.dialect == "sqlite":
        statement = "DELETE FROM charge"  # it knows no other way
    hashes = fill(Ledger(database))
    with pytest.raises(Conflict, match="the ledger is append-only"):
        database.execute(statement)
    assert fill(Ledger(database)) == hashes


@pytest.mark.parametrize(
    ("statement", "row"),
    [
        ("UPDATE charge SET event = replace(event, 'plain', 'quiet') WHERE id = 4", 4),
        ("UPDATE charge SET round = NULL, relation = NULL, sampling = NULL, code = NULL WHERE id = 8", 8),
        ("UPDATE charge SET hash = previous WHERE id = 5", 5),
        ("DELETE FROM charge WHERE id = 5", 6),
    ],
)
def test_tampering_is_noticed(database: Database, statement: str, row: int) -> None:
    fill(Ledger(database))
    tamper(database, statement)
    with pytest.raises(HomebodyError, match=f"tampered with: row {row} breaks its chain"):
        Ledger(database)


def test_a_newer_ledger_is_refused(database: Database) -> None:
    fill(Ledger(database))
    newer = "PRAGMA user_version = 7" if database.dialect == "sqlite" else "UPDATE homebody_schema SET version = 7"
    database.execute(newer)
    with pytest.raises(HomebodyError, match=r"The ledger .* was written by a newer Homebody \(schema 7\)"):
        Ledger(database)


CHARGING = """
import sys
from homebody.database import connect
from homebody.privacy import OBSERVERS, Charge, Ledger, NonPrivate
charges = [Charge(observer, "user", NonPrivate("plain updates")) for observer in OBSERVERS]
print("ready", flush=True)
sys.stdin.readline()
ledger = Ledger(connect(sys.argv[1]))
for number in range(100):
    ledger.charge(f"{sys.argv[2]}/{number}", charges)
"""


def test_writers_at_once_lose_nothing_and_keep_one_chain(where: Path | str, warm: Nest) -> None:
    """They even make the ledger at the same moment."""
    writers = [
        warm.popen(
            [sys.executable, "-c", CHARGING, str(where), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in ("ann", "bob")
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    database = connect(where)
    releases = [entry.release for entry in Ledger(database).entries()]  # which verifies the chain
    database.close()
    assert len(releases) == 600
    assert set(releases) == {f"{name}/{number}" for name in ("ann", "bob") for number in range(100)}
