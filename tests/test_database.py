"""One door to two databases: the same behaviour of both, and one sentence where they fail."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from homebody.database import Conflict, Database, connect, statements
from homebody.errors import HomebodyError

LIST = "CREATE TABLE list (number INTEGER PRIMARY KEY, name TEXT NOT NULL, content BLOB);"


@pytest.fixture
def listed(database: Database) -> Database:
    database.migrate("list", [LIST])
    return database


@pytest.fixture
def another(where: Path | str) -> Iterator[Callable[[], Database]]:
    """More connections to the same database."""
    made: list[Database] = []

    def connected() -> Database:
        made.append(connect(where))
        return made[-1]

    yield connected
    for one in made:
        one.close()


def add(database: Database, number: int, name: str = "x") -> None:
    database.execute("INSERT INTO list (number, name) VALUES (?, ?)", (number, name))


def written(database: Database, *steps: int | str | BaseException) -> None:
    """One transaction: numbers to add, statements to run, an error to end with."""
    with database.transaction():
        for step in steps:
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, int):
                add(database, step)
            else:
                database.execute(step)


def numbers(database: Database) -> list[int]:
    return [number for (number,) in database.rows("SELECT number FROM list ORDER BY number")]


class TestBoth:
    def test_what_is_written_comes_back(self, listed: Database, another: Callable[[], Database]) -> None:
        content = bytes(range(256))
        rows = [(1, "50 % of ?", content), (2**62, "ä漢🏠 'quoted'", None), (3, "", b"")]
        listed.executemany("INSERT INTO list (number, name, content) VALUES (?, ?, ?)", rows)
        found = another().execute("SELECT number, name, content FROM list ORDER BY number").fetchall()
        assert sorted(rows, key=lambda row: row[0]) == [tuple(row) for row in found]
        assert listed.execute("SELECT name FROM list WHERE name LIKE '50 % of ?' AND number = ?", (1,)).fetchone()
        assert listed.execute("UPDATE list SET name = ? WHERE number < ?", ("y", 9)).rowcount == 2
        assert listed.execute("SELECT 1 FROM list WHERE number = 77").fetchone() is None

    def test_a_transaction_is_kept_whole_or_not_at_all(self, listed: Database, another: Callable[[], Database]) -> None:
        other = another()
        with listed.transaction():
            add(listed, 1)
            add(listed, 2)
            assert numbers(other) == []
        assert numbers(other) == [1, 2]
        with pytest.raises(KeyboardInterrupt):
            written(listed, 3, KeyboardInterrupt())
        assert numbers(listed) == numbers(other) == [1, 2]
        add(listed, 4)
        assert numbers(other) == [1, 2, 4]

    def test_a_part_that_fails_is_undone_alone(self, listed: Database) -> None:
        with listed.transaction():
            add(listed, 1)
            with pytest.raises(Conflict):
                written(listed, 2, 1)
            with listed.transaction():
                add(listed, 3)
                with pytest.raises(ZeroDivisionError):
                    written(listed, 4, ZeroDivisionError())
            add(listed, 5)
        assert numbers(listed) == [1, 3, 5]

    def test_a_part_is_undone_with_the_parts_within_it(self, listed: Database) -> None:
        def fail_after_a_failure() -> None:
            with listed.transaction():
                add(listed, 2)
                with pytest.raises(ZeroDivisionError):
                    written(listed, 3, ZeroDivisionError())
                written(listed, 4)
                raise KeyError

        with listed.transaction():
            add(listed, 1)
            with pytest.raises(KeyError):
                fail_after_a_failure()
        assert numbers(listed) == [1]

    def test_many_rows_are_written_whole_or_not_at_all(self, listed: Database) -> None:
        with pytest.raises(Conflict):
            listed.executemany("INSERT INTO list (number, name) VALUES (?, ?)", [(1, "a"), (2, "b"), (1, "c")])
        assert numbers(listed) == []

    @pytest.mark.parametrize(
        "statement",
        ["INSERT INTO list (number, name) VALUES (1, 'y')", "INSERT INTO list (number, name) VALUES (2, NULL)"],
    )
    def test_a_row_that_breaks_a_rule_is_a_conflict(self, listed: Database, statement: str) -> None:
        add(listed, 1)
        with pytest.raises(Conflict):
            listed.execute(statement)
        assert numbers(listed) == [1]

    def test_a_snapshot_stands_still_and_holds_up_nobody(
        self, listed: Database, another: Callable[[], Database]
    ) -> None:
        add(listed, 1)
        other = another()
        with listed.snapshot():
            assert numbers(listed) == [1]
            with other.transaction():
                add(other, 2)
            assert numbers(listed) == [1]
        assert numbers(listed) == [1, 2]

    def test_threads_take_turns(self, listed: Database) -> None:
        listed.execute("INSERT INTO list (number, name) VALUES (1, '0')")

        def work() -> None:
            for _ in range(50):
                with listed.transaction():
                    (text,) = listed.execute("SELECT name FROM list").fetchone()
                    listed.execute("UPDATE list SET name = ?", (str(int(text) + 1),))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert listed.execute("SELECT name FROM list").fetchone() == ("200",)

    def test_processes_take_turns(self, listed: Database, where: Path | str) -> None:
        """They read and write what they read plus one: nothing is lost only if nobody reads in between."""
        listed.execute("INSERT INTO list (number, name) VALUES (1, '0')")
        script = (
            "import sys; from pathlib import Path; from homebody.database import connect\n"
            "db = connect(sys.argv[1])\n"
            "for _ in range(100):\n"
            "    with db.transaction():\n"
            "        (text,) = db.execute('SELECT name FROM list').fetchone()\n"
            "        db.execute('UPDATE list SET name = ?', (str(int(text) + 1),))\n"
        )
        processes = [subprocess.Popen([sys.executable, "-c", script, str(where)]) for _ in range(3)]
        assert [process.wait() for process in processes] == [0, 0, 0]
        assert listed.execute("SELECT name FROM list").fetchone() == ("300",)

    def test_one_who_holds_it_too_long_is_named(
        self, listed: Database, where: Path | str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("base", "sqlite", "postgresql"):
            monkeypatch.setattr(f"homebody.database.{module}.PATIENCE", 0.2)
        other = connect(where)
        with listed.transaction():
            add(listed, 1)
            with pytest.raises(HomebodyError, match=r"Another process has held .* for more than 0\.2 seconds"):
                written(other, 2)
        written(other, 2)
        other.close()
        assert numbers(listed) == [1, 2]

    def test_what_a_killed_process_had_not_committed_is_gone(self, listed: Database, where: Path | str) -> None:
        script = (
            "import os, signal, sys; from homebody.database import connect\n"
            "db = connect(sys.argv[1])\n"
            "db.execute(\"INSERT INTO list (number, name) VALUES (1, 'x')\")\n"
            "with db.transaction():\n"
            "    db.execute(\"INSERT INTO list (number, name) VALUES (2, 'x')\")\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        assert subprocess.run([sys.executable, "-c", script, str(where)]).returncode == -9
        with listed.transaction():
            assert numbers(listed) == [1]


class TestSchemas:
    def test_steps_are_taken_once_and_in_order(self, database: Database) -> None:
        steps = [LIST, "ALTER TABLE list ADD COLUMN note TEXT;\nINSERT INTO list (number, name) VALUES (1, 'x');"]
        assert database.version("list") == 0
        database.migrate("list", steps[:1])
        assert database.version("list") == 1
        for _ in range(2):
            database.migrate("list", steps)
        assert database.version("list") == 2
        assert database.execute("SELECT number, note FROM list").fetchall() == [(1, None)]

    def test_components_have_versions_of_their_own(self, database: Database) -> None:
        database.migrate("list", [LIST])
        database.migrate("other", ["CREATE TABLE a (b INTEGER);", "CREATE TABLE c (d INTEGER);"], header=True)
        assert (database.version("list"), database.version("other", header=True)) == (1, 2)

    def test_a_newer_schema_is_refused(self, database: Database) -> None:
        database.migrate("list", [LIST, "CREATE TABLE more (a INTEGER);"])
        with pytest.raises(HomebodyError, match=r"The list .* was written by a newer Homebody \(schema 2\); update"):
            database.migrate("list", [LIST])

    def test_a_step_that_fails_leaves_nothing(self, database: Database) -> None:
        with pytest.raises(Exception, match="nonsense"):
            database.migrate("list", [LIST, "CREATE TABLE more (a INTEGER);\nINSERT INTO nonsense VALUES (1);"])
        assert database.version("list") == 0
        database.migrate("list", [LIST, "CREATE TABLE more (a INTEGER);"])

    def test_processes_may_make_it_at_the_same_moment(self, where: Path | str) -> None:
        script = (
            "import sys; from homebody.database import connect\n"
            "sys.stdin.readline()\n"
            f"connect(sys.argv[1]).migrate('list', [{LIST!r}])\n"
        )
        command = [sys.executable, "-c", script, str(where)]
        processes = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(4)]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            process.communicate()
        assert [process.returncode for process in processes] == [0] * 4

    def test_a_script_is_split_at_its_statements(self) -> None:
        script = "CREATE TABLE a (b);\nCREATE TRIGGER c BEFORE DELETE ON a\nBEGIN SELECT 1; END;\nSELECT 2"
        assert [line.split()[1] for line in statements(script)] == ["TABLE", "TRIGGER", "2"]


class TestSQLite:
    def test_writes_are_on_the_disk_when_they_are_told(self, tmp_path: Path) -> None:
        database = connect(tmp_path / "a.sqlite")
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert database.execute("PRAGMA synchronous").fetchone() == (2,)
        database.close()

    def test_a_text_is_a_path_too(self, tmp_path: Path) -> None:
        database = connect(str(tmp_path / "a.sqlite"))
        database.migrate("list", [LIST])
        database.close()
        assert database.name == str(tmp_path / "a.sqlite")
        assert (tmp_path / "a.sqlite").stat().st_size > 0

    def test_a_place_that_cannot_be_opened_is_a_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "text").write_bytes(b"not a database at all, only a text")
        for place in (tmp_path / "text", tmp_path / "no" / "folder", tmp_path):
            with pytest.raises(HomebodyError, match=rf"The diary {re.escape(str(place))} cannot be opened: .*\.$"):
                connect(place, what="diary")

    def test_a_damaged_page_is_a_sentence(self, tmp_path: Path) -> None:
        path = tmp_path / "a.sqlite"
        database = connect(path)
        database.migrate("list", [LIST])
        rows = [(number, "x" * 500) for number in range(200)]
        database.executemany("INSERT INTO list (number, name) VALUES (?, ?)", rows)
        database.close()
        content = bytearray(path.read_bytes())
        content[4096 * 8 :] = b"\xff" * (len(content) - 4096 * 8)
        path.write_bytes(content)
        database = connect(path)
        with pytest.raises(HomebodyError, match=r"cannot be used: .*malformed"):
            list(database.rows("SELECT number, name FROM list"))
        database.close()

    def test_a_full_database_is_a_sentence_and_keeps_what_it_had(self, tmp_path: Path) -> None:
        database = connect(tmp_path / "a.sqlite")
        database.migrate("list", [LIST])
        add(database, 1)
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count = {pages + 20}")
        large = f"INSERT INTO list (number, name) VALUES (3, '{'x' * 1_000_000}')"
        with pytest.raises(HomebodyError, match=r"The disk takes no more of .* \(database or disk is full\): nothing"):
            written(database, 2, large)
        assert numbers(database) == [1]
        add(database, 4)
        database.close()

    def test_what_was_undone_half_way_does_not_go_on(self, tmp_path: Path) -> None:
        """SQLite ends the whole transaction where the disk is full: what follows must not be kept by itself."""
        database = connect(tmp_path / "a.sqlite")
        database.migrate("list", [LIST])
        with pytest.raises(HomebodyError, match="was undone"):
            written(database, 1, "ROLLBACK", 2)
        with pytest.raises(HomebodyError, match="was undone"):
            written(database, 3, "ROLLBACK")
        assert numbers(database) == []
        database.close()

    def test_a_limit_on_the_file_is_a_sentence(self, tmp_path: Path) -> None:
        """As on a full disk: the kernel refuses to write on."""
        script = (
            "import resource, sys; from homebody.database import connect; from homebody.errors import HomebodyError\n"
            "db = connect(sys.argv[1])\n"
            f"db.migrate('list', [{LIST!r}])\n"
            "db.execute(\"INSERT INTO list (number, name) VALUES (1, 'kept')\")\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, -1))\n"
            "for _ in range(2):\n"
            "    try:\n"
            "        with db.transaction():\n"
            "            db.execute(\"INSERT INTO list (number, name) VALUES (2, 'lost')\")\n"
            "            db.execute('INSERT INTO list (number, name) VALUES (3, ?)', ('x' * 20_000_000,))\n"
            "    except HomebodyError as error:\n"
            "        print(error)\n"
            "db.execute(\"INSERT INTO list (number, name) VALUES (4, 'small')\")\n"
        )
        path = tmp_path / "a.sqlite"
        done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        sentences = done.stdout.splitlines()
        assert len(sentences) == 2
        assert all(re.match(r"The disk takes no more of .*nothing of this step was written", one) for one in sentences)
        database = connect(path)
        assert numbers(database) == [1, 4]
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        database.close()

    def test_it_needs_no_psycopg(self) -> None:
        script = (
            "import sys; import homebody.privacy.ledger, homebody.federation.server.records\n"
            "from homebody.database import connect\n"
            "connect(None).close(); assert 'psycopg' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", script], check=True)


class TestPostgreSQL:
    def test_text_is_compared_by_its_bytes(self, new_postgresql: str) -> None:
        database = connect(new_postgresql)
        database.migrate("list", [LIST])
        query = "SELECT collation_name FROM information_schema.columns WHERE table_name = 'list' AND data_type = 'text'"
        assert database.execute(query).fetchall() == [("C",)]
        database.close()

    def test_a_failure_that_was_overlooked_is_not_kept_quietly(self, new_postgresql: str) -> None:
        """PostgreSQL answers COMMIT with ROLLBACK after any failure."""
        database = connect(new_postgresql)
        database.migrate("list", [LIST])
        add(database, 1)

        def overlook() -> None:
            with database.transaction():
                add(database, 2)
                with suppress(Conflict):
                    add(database, 1)

        with pytest.raises(HomebodyError, match="was undone"):
            overlook()
        assert numbers(database) == [1]
        database.close()

    def test_a_lost_connection_is_one_sentence_and_then_made_anew(self, new_postgresql: str) -> None:
        database, other = connect(new_postgresql), connect(new_postgresql)
        database.migrate("list", [LIST])
        for number in range(3):
            (process,) = database.execute("SELECT pg_backend_pid()").fetchone()
            other.execute("SELECT pg_terminate_backend(?)", (process,))
            with pytest.raises(HomebodyError, match=r"^The connection to the database .* was lost; see that it runs"):
                add(database, number)
            add(database, 10 + number)
        assert numbers(database) == [10, 11, 12]
        assert database.execute("SHOW lock_timeout").fetchone() == ("30s",)
        database.close()
        other.close()

    def test_a_connection_lost_in_a_transaction_takes_it_along(self, new_postgresql: str) -> None:
        database, other = connect(new_postgresql), connect(new_postgresql)
        database.migrate("list", [LIST])
        (process,) = database.execute("SELECT pg_backend_pid()").fetchone()

        def go_on() -> None:
            with database.transaction():
                add(database, 1)
                other.execute("SELECT pg_terminate_backend(?)", (process,))
                with pytest.raises(HomebodyError, match="was lost"):
                    add(database, 2)
                add(database, 3)

        with pytest.raises(HomebodyError, match="was undone"):
            go_on()
        with database.transaction():
            add(database, 4)
        assert numbers(database) == numbers(other) == [4]
        database.close()
        other.close()

    def test_a_database_that_sorts_out_no_characters_is_refused(self, postgresql: str) -> None:
        server = connect(postgresql)
        server.execute("CREATE DATABASE plain ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
        with pytest.raises(HomebodyError, match="must hold UTF8, not SQL_ASCII"):
            connect(postgresql.replace("/postgres?", "/plain?"))
        server.execute("DROP DATABASE plain WITH (FORCE)")
        server.close()

    def test_what_it_refuses_is_a_sentence(self, new_postgresql: str) -> None:
        database = connect(new_postgresql)
        database.migrate("list", [LIST])
        with pytest.raises(HomebodyError, match=r"^The database postgresql://.* refused: .*NUL.*\.$"):
            add(database, 1, "a\0b")
        with pytest.raises(HomebodyError, match='refused: relation "nowhere" does not exist'):
            database.execute("SELECT 1 FROM nowhere")
        database.close()

    def test_details_of_a_conflict_stay_inside(self, new_postgresql: str) -> None:
        """PostgreSQL names the row; logs must not."""
        database = connect(new_postgresql)
        database.execute("CREATE TABLE film (title TEXT PRIMARY KEY)")
        title, insert = "Alien", "INSERT INTO film VALUES (?)"
        database.execute(insert, (title,))
        with pytest.raises(Conflict) as caught:
            database.execute(insert, (title,))
        assert title not in shown(caught.value)
        database.close()

    def test_commits_wait_for_the_disk_whatever_the_server_says(self, new_postgresql: str) -> None:
        first = connect(new_postgresql)
        (name,) = first.execute("SELECT current_database()").fetchone()
        for setting, kept in (("off", "on"), ("remote_apply", "remote_apply")):
            first.execute(f"ALTER DATABASE {name} SET synchronous_commit = {setting}")
            database = connect(new_postgresql)
            assert database.execute("SHOW synchronous_commit").fetchone() == (kept,)
            database.close()
        first.close()

    def test_without_psycopg_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        importing = builtins.__import__

        def refuse(name: str, *rest: Any, **more: Any) -> Any:
            if name.partition(".")[0] == "psycopg":
                raise ImportError(name)
            return importing(name, *rest, **more)

        monkeypatch.setattr(builtins, "__import__", refuse)
        with pytest.raises(
            HomebodyError, match=r"PostgreSQL needs the extra: pip install '\.\[deploy\]' in Homebody's clone\."
        ):
            connect("postgresql://host/name")


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


class TestPasswords:
    @pytest.mark.parametrize(
        "url",
        [
            "postgresql://ann:hush@localhost:1/db",
            "postgresql://ann:hush@localhost:1,localhost:2/db",
            "postgresql://ann@localhost:1/db?password=hush",
            "postgres://ann:hush@[::1]:1/db",
            "postgresql://ann:hu%zzsh@localhost/db",
            "postgresql://ann:hush hush@localhost/db",
            "postgresql://ann:hush/hush@localhost/db",
            "postgresql://ann:12/hush@localhost/db",
            "postgresql://ann:x@hush@localhost/db",
            "postgresql://ann:hush@localhost:port/db",
            "postgresql://ann:hush@localhost/db?nonsense=hush",
            "postgresql://ann:hu[sh@[::1/db",
            "postgresql:/ann:hush@localhost/db",
            "postgresql+psycopg://ann:hush@localhost/db",
            "mysql://ann:hush@localhost/db",
            Path("postgresql://ann:hush@localhost/db"),
        ],
    )
    def test_no_message_shows_one(self, url: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("psycopg")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(HomebodyError) as caught:
            connect(url)
        assert not any(secret in shown(caught.value) for secret in ("hush", "hu%zzsh", "hu[sh"))
        assert list(tmp_path.iterdir()) == []  # nor is it taken for a file's name

    def test_a_wrong_one_is_not_shown_either(self, postgresql: str) -> None:
        server = connect(postgresql)
        server.execute("CREATE ROLE locked LOGIN PASSWORD 'right'")
        url, wrong = postgresql.replace("postgres@", "locked:{}@"), "hush"
        with pytest.raises(HomebodyError, match="password authentication failed for user") as caught:
            connect(url.format(wrong))
        assert wrong not in shown(caught.value)
        database = connect(url.format("right"))
        assert "right" not in f"{database.name} {database!r}"
        assert database.name.startswith("postgresql://locked@/postgres?host=")
        database.close()
        server.execute("DROP ROLE locked")
        server.close()
