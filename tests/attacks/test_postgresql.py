"""A PostgreSQL server that is cut off, stopped, full, read-only or slow.

What was acknowledged stays, nothing is charged twice, whoever asks hears one sentence, and everything goes on once the
database is back. The ledger, the server's records and the epochs of the intake can live there; a proxy's store and a
device's home are SQLite files.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, LiteralString

import numpy as np
import pytest
import torch
from tests.attacks.conftest import Campaign
from tests.conftest import PostgresServer
from tests.federation.world import World

from homebody.core import Cohort
from homebody.data import Population
from homebody.database import Database, connect
from homebody.errors import HomebodyError, Unavailable
from homebody.federation.server.admin import opened
from homebody.federation.server.epochs import Epochs
from homebody.federation.server.records import Records
from homebody.privacy import OBSERVERS, Charge, Ledger, NonPrivate
from homebody.progress import Progress, Round
from homebody.recipe import Recipe

PLAIN = [Charge(observer, "user", NonPrivate("plain updates")) for observer in OBSERVERS]


class Line:
    """A line to PostgreSQL's socket that is cut after so many pieces, before or after the last has arrived."""

    def __init__(self, url: str) -> None:
        self._target = url.partition("host=")[2]
        self.folder = mkdtemp(prefix="hb-")
        self.url = url.replace(self._target, self.folder)
        self.left, self.arrives = -1, True
        """Pieces that still pass; below zero: all of them. Whether the one that is cut reaches the server."""
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"{self.folder}/.s.PGSQL.5432")
        self._listening.listen()
        threading.Thread(target=self._take, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        shutil.rmtree(self.folder)

    def _take(self) -> None:
        while True:
            try:
                near = self._listening.accept()[0]
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(f"{self._target}/.s.PGSQL.5432")
            threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, asking: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                if asking and self.left == 0:
                    self.left = -1  # before anybody hears of it and asks again
                    if self.arrives:
                        # The way back is cut first: the server does what it was asked, and nobody hears of it.
                        source.shutdown(socket.SHUT_RDWR)
                        sink.sendall(piece)
                    break
                self.left -= asking and self.left > 0
                sink.sendall(piece)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        source.close()


@pytest.fixture
def line(new_postgresql: str) -> Iterator[Line]:
    made = Line(new_postgresql)
    yield made
    made.close()


def a_round(step: int) -> Round:
    return Round("train", step, step, 3, None, {}, {}, 1, 1, 0.1, 0.0, 1e-6)


def charges(database: Database, number: int) -> None:
    Ledger(database).charge(f"train/{number}", PLAIN, repeat=True, number=number, code="Toy 1")


def opens(database: Database, number: int) -> None:
    Records(database).open_round(f"train/{number}", Cohort(np.arange(3), "all", 3, 3))


def records_round(database: Database, number: int) -> None:
    records = Records(database)
    if number not in [line["step"] for line in records.rounds()]:  # as after a restart
        records.add_round(a_round(number))


def saves(database: Database, number: int) -> None:
    records = Records(database)
    known = records.load()
    if known is None or known.step < number:
        records.save(Progress(step=number, shared={"item": torch.ones(3)}))


def seen(database: Database, what: Callable[[Database, int], None]) -> list[Any]:
    if what is charges:
        return [entry.release for entry in Ledger(database).entries()]
    records = Records(database)
    if what is opens:
        return [row[0] for row in database.rows("SELECT release FROM open_round ORDER BY release")]
    if what is records_round:
        return [line["step"] for line in records.rounds()]
    return [number for (number,) in database.rows("SELECT number FROM checkpoint ORDER BY number")]


@pytest.mark.parametrize("what", [charges, opens, records_round, saves])
@pytest.mark.parametrize("arrives", [True, False])
def test_a_line_that_is_cut_at_any_moment_of_a_step(
    line: Line, new_postgresql: str, what: Callable[[Database, int], None], arrives: bool
) -> None:
    """The step is there whole or not at all, whatever the caller heard; done again, it is there once."""
    watcher, number, cuts = connect(new_postgresql), 0, 0
    database = connect(line.url)
    what(database, number)
    once = len(seen(watcher, what))
    for pieces in range(60):
        number += 1
        before = seen(watcher, what)
        line.left, line.arrives = pieces, arrives
        try:
            what(database, number)
        except Unavailable as error:
            cuts += 1
            said = str(error)
            assert "was lost" in said or "was undone" in said or "cannot be opened" in said, said
            assert "\n" not in said
        else:
            if line.left > 0:  # the whole step was shorter
                line.left = -1
                break
        line.left = -1
        after = seen(watcher, what)
        assert len(after) - len(before) in (0, once), "A step is done whole, or not at all."
        with suppress(Unavailable):  # the connection that was lost is noticed once more at most
            what(database, number)
        what(database, number)
        assert len(seen(watcher, what)) == min(len(before) + once, 2 if what is saves else 10_000)
    assert cuts > 3
    Ledger(watcher).verify()
    database.close()
    watcher.close()


def test_a_batch_whose_acknowledgement_is_cut_is_counted_once(line: Line, new_postgresql: str, tmp_path: Path) -> None:
    pairs = np.array([1, 4], dtype="<u4")
    watcher = connect(new_postgresql)
    epochs = Epochs(Records(connect(line.url)), tmp_path)
    epoch = epochs.open("run/train/1", "ab" * 16, k=2, entries=3, seconds=3600)
    told = cuts = 0
    for pieces in range(60):
        batch = pieces.to_bytes(16)
        line.left, line.arrives = pieces, True
        for _ in range(3):
            try:
                epochs.add(epoch.id, batch, pairs, {})
                break
            except Unavailable:
                cuts += 1
        told += 2
        if line.left > 0:
            break
        assert Epochs(Records(watcher), tmp_path).arrived("run/train/1") == told
    assert cuts > 3
    line.left = -1
    assert epochs.close("run/train/1", people=1).counts.sum() == told
    epochs.records.database.close()
    watcher.close()


REFUSING = """
CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE 'it cannot' USING ERRCODE = '{code}'; END $$;
CREATE TRIGGER refusing BEFORE INSERT ON charge EXECUTE FUNCTION refuses();
"""


@pytest.mark.parametrize(
    "code", ["53100", "53200", "53300", "53400", "57014", "40001", "40P01", "58030", "58P01", "25006", "55P03", "08006"]
)
def test_what_may_pass_is_told_from_what_a_person_must_mend(new_postgresql: str, code: str) -> None:
    """A trainer starts again after the one, and gives up after the other."""
    database = connect(new_postgresql, what="server's database")
    ledger = Ledger(database)
    ledger.charge("train/1", PLAIN)
    for statement in REFUSING.format(code=code).split("\nCREATE TRIGGER"):
        database.execute(statement if "FUNCTION refuses()" in statement[:30] else f"CREATE TRIGGER{statement}")
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"^[^\n]*server's database postgresql://[^\n]*\.$"):
            ledger.charge("train/2", PLAIN)
    assert [entry.release for entry in ledger.entries()] == ["train/1"] * 3
    database.execute("DROP TRIGGER refusing ON charge")
    ledger.charge("train/2", PLAIN)
    assert ledger.releases() == 2
    database.close()


def test_a_read_only_server_is_waited_for(new_postgresql: str) -> None:
    """A standby, or a disk that an operator protects."""
    database = connect(new_postgresql)
    ledger = Ledger(database)
    database.execute("SET default_transaction_read_only = on")
    with pytest.raises(Unavailable, match=r"read-only transaction.*nothing of this step was written"):
        ledger.charge("train/1", PLAIN)
    assert ledger.epsilons()["server"] == 0.0
    database.execute("SET default_transaction_read_only = off")
    ledger.charge("train/1", PLAIN)
    database.close()


def test_a_statement_that_takes_too_long_is_undone_and_said(new_postgresql: str) -> None:
    database = connect(new_postgresql)
    ledger = Ledger(database)
    database.execute(
        "CREATE FUNCTION waits() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(30); RETURN NULL; END $$"
    )
    database.execute("CREATE TRIGGER waiting BEFORE INSERT ON charge EXECUTE FUNCTION waits()")
    database.execute("SET statement_timeout = 100")  # as an operator may have set it
    with pytest.raises(Unavailable, match="statement timeout"):
        ledger.charge("train/1", PLAIN)
    database.execute("DROP TRIGGER waiting ON charge")
    ledger.charge("train/1", PLAIN)
    assert len(ledger.entries()) == 3
    database.close()


@pytest.mark.parametrize("lock", ["SELECT pg_advisory_xact_lock(1752132965)", "LOCK TABLE charge IN EXCLUSIVE MODE"])
def test_a_lock_that_somebody_holds_is_not_waited_for_for_ever(
    new_postgresql: str, monkeypatch: pytest.MonkeyPatch, lock: LiteralString
) -> None:
    import psycopg

    monkeypatch.setattr("homebody.database.postgresql.PATIENCE", 0.2)
    database = connect(new_postgresql)
    ledger = Ledger(database)
    with psycopg.connect(new_postgresql) as other:
        other.execute(lock)
        with pytest.raises(Unavailable, match="Another process has held the database"):
            ledger.charge("train/1", PLAIN)
    ledger.charge("train/1", PLAIN)
    assert len(ledger.entries()) == 3
    database.close()


def test_a_client_that_froze_in_a_transaction_gives_way(new_postgresql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine may be gone for good; the server would keep its lock for hours."""
    monkeypatch.setattr("homebody.database.postgresql._IDLE", 0.2)
    frozen, other = connect(new_postgresql), connect(new_postgresql)
    ledger = Ledger(other)

    def freeze() -> None:
        with frozen.transaction():
            ledger.charge("train/1", PLAIN)  # waits for its turn, and gets it
            frozen.execute("SELECT 1")

    with pytest.raises(Unavailable, match="was lost"):
        freeze()
    assert len(ledger.entries()) == 3
    assert frozen.execute("SELECT 1").fetchone() == (1,)
    frozen.close()
    other.close()


def test_a_server_that_takes_no_more_clients_is_waited_for(postgresql: str, new_postgresql: str) -> None:
    server = connect(postgresql)
    server.execute("CREATE ROLE crowded LOGIN CONNECTION LIMIT 1")
    url = new_postgresql.replace("postgres@", "crowded@")
    first = connect(url)
    with pytest.raises(Unavailable, match=r"cannot be opened: .*too many connections"):
        connect(url)
    first.close()
    server.execute("DROP ROLE crowded")
    server.close()


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that may be stopped: no other test uses it."""
    server = PostgresServer()
    yield server
    server.remove()


def test_a_server_that_is_stopped_and_started_keeps_what_was_acknowledged(own_server: PostgresServer) -> None:
    database = connect(own_server.url)
    ledger, told = Ledger(database), []
    for number, mode in enumerate(["immediate", "fast", "immediate"]):
        for step in range(20):
            ledger.charge(f"train/{number}/{step}", PLAIN, repeat=True)
            told.append(f"train/{number}/{step}")
        own_server.stop(mode)
        for expected in ("was lost", "cannot be opened"):
            with pytest.raises(Unavailable, match=expected):
                ledger.charge("train/again", PLAIN, repeat=True)
        own_server.start()
        ledger.charge("train/again", PLAIN, repeat=True)
        if not number:
            told.append("train/again")
        ledger.verify()
        assert list(dict.fromkeys(entry.release for entry in ledger.entries())) == told
    database.close()


@pytest.fixture
def small_disk(own_server: PostgresServer) -> Iterator[Path]:
    """A disk of four megabytes that PostgreSQL may write to."""
    place = own_server.folder / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    options = "size=4m,mode=0777"
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", options, "none", place]).returncode:
        pytest.skip("a small disk can be mounted by root alone")
    shutil.chown(place, "nobody")
    yield place
    own_server.stop("immediate")
    subprocess.run(["umount", "-l", place], check=True)


def test_a_tablespace_that_is_full(own_server: PostgresServer, small_disk: Path) -> None:
    server = connect(own_server.url)
    server.execute(f"CREATE TABLESPACE small LOCATION '{small_disk}'")
    server.execute("CREATE DATABASE crowded TABLESPACE pg_default")
    url = own_server.url.replace("/postgres?", "/crowded?")
    database = connect(url, what="server's database")
    ledger = Ledger(database)
    for table in ("charge", "charge_pkey"):
        kind = "TABLE" if table == "charge" else "INDEX"
        database.execute(f"ALTER {kind} {table} SET TABLESPACE small")
    done, full = [], None
    for number in range(10_000):
        told = [Charge(observer, "user", NonPrivate("x" * 3000 + str(number))) for observer in OBSERVERS]
        try:
            ledger.charge(f"train/{number}", told)
        except HomebodyError as error:
            full = error
            break
        done.append(f"train/{number}")
    assert isinstance(full, Unavailable), full
    assert "The disk takes no more of the server's database" in str(full)
    assert list(dict.fromkeys(entry.release for entry in ledger.entries())) == done
    assert len(done) > 10
    for table in ("charge", "charge_pkey"):  # somebody makes room
        kind = "TABLE" if table == "charge" else "INDEX"
        database.execute(f"ALTER {kind} {table} SET TABLESPACE pg_default")
    ledger.charge(f"train/{len(done)}", PLAIN)
    ledger.verify()
    assert ledger.releases() == len(done) + 1
    database.close()
    server.close()


@pytest.mark.attack
def test_a_federation_whose_database_is_stopped_read_only_and_locked(
    own_server: PostgresServer,
    few: Population,
    world: Callable[..., World],
    campaign: Campaign,
) -> None:
    """Real devices, a real server: it ends with the model and the charges of an undisturbed run."""
    times = campaign.size(60, least=3)
    recipe = Recipe("pfedrec", "devices", rounds=3 * times + 3, seed=4, evaluate_every=0)
    federation = world(few, 2, recipe, database=own_server.url)
    federation.start(once=True)
    rng = np.random.default_rng(11)
    kinds = {"stopped": 0, "read_only": 0, "sessions_ended": 0}
    for number in range(times):
        federation.wait(lambda count=3 * number + 1: federation.rounds() >= count, "rounds go on", 300)
        kind = list(kinds)[number % 3]
        kinds[kind] += 1
        if kind == "stopped":
            own_server.stop("immediate" if rng.random() < 0.5 else "fast")
            threading.Event().wait(rng.uniform(0, 1))
            own_server.start()
        else:
            operator = connect(own_server.url)
            if kind == "read_only":
                for state in ("on", "off"):
                    operator.execute(f"ALTER SYSTEM SET default_transaction_read_only = {state}")
                    operator.execute("SELECT pg_reload_conf()")
                    threading.Event().wait(rng.uniform(0, 1))
            else:
                operator.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                    "AND application_name = 'homebody'"
                )
            operator.close()
    federation.wait(lambda: federation.rounds() == recipe.rounds, "all rounds are done", 600)
    assert federation.finish() == 0
    federation.check()
    assert "Traceback" not in (federation.folder / "server.log").read_text()
    with opened(federation.server) as (_, records):
        records.ledger().verify()
    campaign.did("PostgreSQL taken from under a federation", times, **kinds)
