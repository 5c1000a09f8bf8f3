"""A device's home: who lives there, what it was told, who may look, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes import PATIENCE

from homebody.errors import HomebodyError
from homebody.federation.device.home import Home
from homebody.federation.device.models import PrivateState
from homebody.federation.device.people import OptedOut
from homebody.federation.device.settings import HomeSettings, server_certificate


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home.create(tmp_path / "device", server="127.0.0.1:9092") as made:
        yield made


def script(text: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    return out


def everything(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_a_new_home_keeps_its_settings(tmp_path: Path) -> None:
    with Home.create(tmp_path / "d", server="example.org:9092", name="it's the hall", budget="eps=8") as made:
        # A person means the server, unless they say another.
        whole = "eps=8,delta=1e-06,unit=user,observer=server"
        assert made.settings == HomeSettings("example.org:9092", "it's the hall", whole)
        made.configure(paused=True, node=2**64 - 1)
    with Home(tmp_path / "d") as again:
        assert again.settings == HomeSettings("example.org:9092", "it's the hall", whole, True, 2**64 - 1)
        assert again.people.all() == []
        assert len(again.items) == 0
        assert again.models.ranking() is None


def test_settings_are_changed_together_or_not_at_all(home: Home) -> None:
    before = home.settings
    with pytest.raises(HomebodyError, match="HOST:PORT"):
        home.configure(paused=True, server="nowhere")
    with pytest.raises(HomebodyError, match="says no eps"):
        home.configure(paused=True, budget="delta=1e-6")
    assert home.settings == before


@pytest.mark.parametrize(
    "server", ["example.org", ":9092", "example.org:0", "example.org:65536", "a b:1", "http://a:1"]
)
def test_an_address_without_host_or_port_is_refused(tmp_path: Path, server: str) -> None:
    with pytest.raises(HomebodyError, match="must be HOST:PORT"):
        Home.create(tmp_path / "d", server=server)
    assert not (tmp_path / "d").exists()


def test_nothing_remains_of_a_home_that_could_not_be_made(tmp_path: Path) -> None:
    def furnish(folder: Path) -> None:
        (folder / "device.key").write_text("half")
        raise HomebodyError("No key today.")

    (tmp_path / "there").mkdir()
    for name in ("absent", "there"):
        with pytest.raises(HomebodyError, match="No key today"):
            Home.create(tmp_path / name, server="127.0.0.1:9092", furnish=furnish)
        with pytest.raises(HomebodyError, match="says no eps"):
            Home.create(tmp_path / name, server="127.0.0.1:9092", budget="delta=1e-6")
    assert [file.name for file in tmp_path.rglob("*")] == ["there"]


def test_a_name_that_no_folder_can_have_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(HomebodyError, match=r"No device can be made in .*: File name too long"):
        Home.create(tmp_path / ("x" * 300), server="127.0.0.1:9092")


def test_what_is_there_is_never_overwritten(tmp_path: Path, home: Home) -> None:
    home.people.add("ann")
    with pytest.raises(HomebodyError, match="is a device already"):
        Home.create(home.path, server="127.0.0.1:9092")
    assert [one.name for one in home.people.all()] == ["ann"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(HomebodyError, match="is not empty"):
        Home.create(tmp_path / "mine", server="127.0.0.1:9092")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_a_home_of_a_newer_schema_is_refused_and_untouched(home: Home) -> None:
    home.close()
    database = sqlite3.connect(home.store.file)
    database.execute("PRAGMA user_version = 99")
    database.close()
    before = home.store.file.read_bytes()
    with pytest.raises(HomebodyError, match=r"newer Homebody \(schema 99\)"):
        Home(home.path)
    assert home.store.file.read_bytes() == before


ADDED = {
    2: "ALTER TABLE mark DROP COLUMN reports; DROP TABLE message; DELETE FROM setting WHERE name = 'proxy'",
    3: "DROP TABLE profile; DROP TABLE sheet",
    4: "DROP TABLE view",
    5: "DROP TABLE secure_sum",
    6: "DROP TABLE impression",
    7: "DROP TABLE received; DROP TABLE turn; DROP TABLE query; DELETE FROM setting WHERE name LIKE 'serving%'",
}
"""What undoes each schema."""


def of_schema(home: Home, version: int) -> None:
    """Make the closed home one of an earlier schema."""
    database = sqlite3.connect(home.store.file)
    undone = (text for added, text in ADDED.items() if added > version)
    database.executescript("; ".join([*undone, f"PRAGMA user_version = {version}"]))
    database.close()


def test_a_home_of_the_first_schema_is_brought_forward(home: Home) -> None:
    ann = home.people.add("ann")
    home.outbox.finish(ann, "run", "train/1", "d", None, b"answer")
    home.close()
    of_schema(home, 1)
    for _ in range(2):
        with Home(home.path) as again:
            assert [mark.reports for mark in again.outbox.sent(ann)] == [0]
            assert (again.settings.proxy, again.outbox.reports()) == ("", 0)
    with Home(home.path) as again:
        again.outbox.finish(ann, "run", "train/2", "d", None, b"sealed", reports=7)
        again.configure(proxy="https://mix.example.org")
        assert (again.settings.proxy, again.outbox.reports()) == ("https://mix.example.org", 7)


def test_a_home_without_views_is_brought_forward(home: Home) -> None:
    home.close()
    of_schema(home, 3)
    with Home(home.path) as again:
        assert again.views.all() == []
        again.views.add("taste", 4321)
    with Home(home.path) as again:
        assert [view.name for view in again.views.all()] == ["taste"]


def test_a_home_without_profiles_is_brought_forward(home: Home) -> None:
    ann = home.people.add("ann")
    home.close()
    of_schema(home, 2)
    with Home(home.path) as again:
        assert (again.people.profile(ann), again.items.schema()) == ({}, None)
        again.people.describe(ann, {"age": "25", "job": "vet"})
        assert again.people.describe(ann, {"age": None}) == {"job": "vet"}
        with pytest.raises(HomebodyError, match="A feature must be one line"):
            again.people.describe(ann, {"job": "spy\nvet"})
    with Home(home.path) as again:
        assert again.people.profile(ann) == {"job": "vet"}


def test_a_home_without_queries_is_brought_forward(home: Home) -> None:
    home.people.add("ann")
    home.close()
    of_schema(home, 6)
    for _ in range(2):
        with Home(home.path) as again:
            assert (again.queries.turn(), again.queries.of("ann"), again.received.get("head")) == (None, [], None)
            assert (again.settings.serving, again.settings.serving_mode, again.settings.serving_every) == (
                ("", "auto", 86_400)
            )
    with Home(home.path) as again:
        again.queries.begin_turn(5, every=10)
        again.configure(serving="https://rec.example.org", serving_mode="query")
    with Home(home.path) as again:
        assert again.queries.turn() == (1, 5)
        assert again.settings.serving_mode == "query"


def test_what_is_no_home_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HomebodyError, match="There is no device in"):
        Home(tmp_path)
    (tmp_path / "home.sqlite").write_bytes(b"dear diary, " * 100)
    with pytest.raises(HomebodyError, match="cannot be opened: file is not a database"):
        Home(tmp_path)
    (tmp_path / "home.sqlite").write_bytes(b"")
    with pytest.raises(HomebodyError, match="is not a device's store"):
        Home(tmp_path)


def test_nobody_else_reads_it(tmp_path: Path) -> None:
    """Whatever the person's umask is."""
    (tmp_path / "open").mkdir(mode=0o777)
    before = os.umask(0)
    try:
        for folder in (tmp_path / "open", tmp_path / "new"):
            with Home.create(folder, server="127.0.0.1:9092") as home, home.store.only_client():
                home.people.add("ann")
                home.history.append("ann", "emma", 1)
                home.history.export(folder / "mine.csv")
                home.ledger("ann")
                found = {file.name: stat.S_IMODE(file.stat().st_mode) for file in [folder, *folder.rglob("*")]}
            assert {"home.sqlite", "home.sqlite-wal", "0.sqlite", "mine.csv", "running.lock"} <= set(found)
            wrong = {name: oct(mode) for name, mode in found.items() if mode & 0o077}
            assert not wrong
    finally:
        os.umask(before)


def test_people_have_slots_in_order_and_for_ever(home: Home) -> None:
    assert [home.people.add(name).slot for name in ("zoe", " ann ")] == [0, 1]
    home.people.opt_out("zoe", delete_history=True)
    assert home.people.add("bob").slot == 2
    assert [(one.slot, one.name, one.active) for one in home.people.all()] == [
        (0, "zoe", False),
        (1, "ann", True),
        (2, "bob", True),
    ]
    assert [one.name for one in home.people.active()] == ["ann", "bob"]
    assert home.people.opt_in(0).active
    assert home.people.find("ann") == home.people.find(1) == home.people.find(home.people.all()[1])


def test_nonsense_about_people_is_refused(home: Home) -> None:
    with pytest.raises(HomebodyError, match="Nobody lives in"):
        home.people.find("ann")
    home.people.add("ann")
    for name in ("", "  ", "a\nb", "x" * 201):
        with pytest.raises(HomebodyError, match="A person's name must be one line"):
            home.people.add(name)
    with pytest.raises(HomebodyError, match="There is a person 'ann' already"):
        home.people.add("ann")
    with pytest.raises(HomebodyError, match=r"no person 'an'; did you mean 'ann'\?"):
        home.history.of("an")
    with pytest.raises(HomebodyError, match="no person in slot 1"):
        home.history.of(1)
    assert [one.name for one in home.people.all()] == ["ann"]


def test_opting_out_deletes_what_was_private_and_keeps_what_was_told(home: Home) -> None:
    for name in ("ann", "bob"):
        home.people.add(name)
        home.history.append(name, f"secret-{name}", 1)
        home.outbox.finish(
            name, "r", "train/1", "d", PrivateState(1, None, f"state of {name}".encode()), f"answer of {name}".encode()
        )
    home.people.opt_out("ann")
    assert home.models.state("ann", "r") is None
    assert home.outbox.answer("ann", "r", "train/1", "d") is None
    assert home.outbox.answered("ann", "r", "train/1") == {"d"}
    assert len(home.outbox.sent("ann")) == 1
    assert home.history.lengths() == {0: 1, 1: 1}
    left = everything(home.path)
    assert b"state of ann" not in left
    assert b"answer of ann" not in left
    home.people.opt_out("ann", delete_history=True)
    assert home.history.lengths() == {0: 0, 1: 1}
    assert b"secret-ann" not in everything(home.path)
    assert home.models.state("bob", "r") is not None
    assert home.outbox.answer("bob", "r", "train/1", "d") == b"answer of bob"
    assert b"state of bob" in everything(home.path)


def test_a_round_that_ends_after_its_person_opted_out_leaves_nothing(home: Home) -> None:
    home.people.add("ann")
    with Home(home.path) as other:
        other.people.opt_out("ann")
    with pytest.raises(OptedOut, match="ann opted out"):
        home.outbox.finish("ann", "r", "train/1", "d", PrivateState(1, None, b"state"), b"answer")
    with pytest.raises(OptedOut):
        home.models.put_state("ann", "r", 1, None, b"state")
    assert home.outbox.sent("ann") == []
    home.people.opt_in("ann")
    home.outbox.finish("ann", "r", "train/1", "d", PrivateState(1, None, b"state"), b"answer")
    assert home.outbox.answer("ann", "r", "train/1", "d") == b"answer"


def test_changes_rise_with_whatever_a_population_is_made_of(home: Home, tmp_path: Path) -> None:
    (tmp_path / "more.csv").write_text("item\nemma\n")
    steps = [
        lambda: home.people.add("ann"),
        lambda: home.history.append("ann", "emma", 1),
        lambda: home.history.import_file(tmp_path / "more.csv", "ann"),
        lambda: home.history.delete("ann", "emma"),
        lambda: home.items.add(0, [("emma", "Emma")]),
        lambda: home.people.opt_out("ann"),
        lambda: home.people.opt_in("ann"),
    ]
    with Home(home.path) as other:
        for step in steps:
            before = other.store.changes
            step()
            assert other.store.changes == before + 1
        before = other.store.changes
        home.configure(paused=True)
        home.models.put_shared("d", b"x")
        home.outbox.finish("ann", "r", "train/1", "d", PrivateState(1, None, b"state"), b"answer")
        assert other.store.changes == before


HOLDING = """
import sys
from homebody.federation.device.home import Home
with Home(sys.argv[1]) as home, home.store.only_client():
    print("in", flush=True)
    sys.stdin.read()
"""


def test_one_client_runs_at_a_time(home: Home) -> None:
    assert not home.store.client_runs()
    holder = script(HOLDING, home.path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "in\n"
    assert home.store.client_runs()
    with pytest.raises(HomebodyError, match=r"A client is running in .* already"), home.store.only_client():
        pass
    home.people.add("ann")  # others work beside it
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    assert not home.store.client_runs()
    with home.store.only_client():
        assert home.store.client_runs()
        with Home(home.path) as other, pytest.raises(HomebodyError, match="already"), other.store.only_client():
            pass
    assert not home.store.client_runs()


WRITING = """
import sys
from pathlib import Path
from homebody.federation.device.home import Home
from homebody.federation.device.models import PrivateState
with Home(sys.argv[1]) as home:
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(60):
        if sys.argv[2] == "import":
            home.history.import_file(sys.argv[3], "ann")
        else:
            home.history.append("ann", f"{sys.argv[2]}/{number}", number)
            home.outbox.finish("ann", sys.argv[2], f"train/{number}", "d", PrivateState(number, None, b"s"), b"a")
"""


def test_several_processes_write_at_once(home: Home, tmp_path: Path) -> None:
    home.people.add("ann")
    (tmp_path / "rows.csv").write_text("item,time\n" + "".join(f"i{n},{n}\n" for n in range(50)))
    writers = [script(WRITING, home.path, kind, tmp_path / "rows.csv") for kind in ("a", "b", "import", "import")]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdin is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    while any(writer.poll() is None for writer in writers):
        mine = home.history.of("ann")  # a reader is never held up, and never sees half an import
        assert sum(one.item.startswith("i") for one in mine) in (0, 50)
    for writer in writers:
        finished(writer)
    found = [one.item for one in home.history.of("ann")]
    assert len(found) == len(set(found)) == 60 + 60 + 50
    assert len(home.outbox.sent("ann")) == 120
    assert home.store.changes == 1 + 2 * 60 + 2 * 60


FINISHING = """
import os, signal, sys
from homebody.federation.device.home import Home
from homebody.federation.device.models import PrivateState

def die_at(home, statement):
    seen = 0
    def step(_):
        nonlocal seen
        seen += 1
        if seen == statement:
            os.kill(os.getpid(), signal.SIGKILL)
    home.store.connection.set_trace_callback(step)

def work(statement):
    with Home(sys.argv[1]) as home:
        die_at(home, statement)
        home.outbox.finish("ann", "r", "train/9", "d9", PrivateState(9, "b9", b"state 9"), b"answer 9")

statement, status = 0, 9
while status == 9:
    statement += 1
    child = os.fork()
    if not child:
        work(statement)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    with Home(sys.argv[1]) as home:
        outbox = home.outbox
        print(statement, status, home.models.state("ann", "r").step,
              outbox.answer("ann", "r", "train/9", "d9") is not None,
              outbox.answer("ann", "r", "train/7", "d7") is not None, len(outbox.answered("ann", "r", "train/9")))
sys.exit(status)
"""


def test_a_kill_before_any_statement_of_finish_leaves_all_or_nothing(home: Home) -> None:
    home.people.add("ann")
    for step in (7, 8):
        home.outbox.finish("ann", "r", f"train/{step}", f"d{step}", PrivateState(step, None, b"state"), b"answer")
    lines = [line.split() for line in finished(script(FINISHING, home.path)).splitlines()]
    before, after = ["8", "False", "True", "0"], ["9", "True", "False", "1"]
    assert len(lines) > 8
    killed = [line[2:] for line in lines if line[1] == "9"]
    assert all(found == before for found in killed)
    assert lines[-1][1:] == ["0", *after]


IMPORTING = (
    FINISHING.partition("def work")[0]
    + """
statement = int(sys.argv[3])
with Home(sys.argv[1]) as home:
    die_at(home, statement)
    home.history.import_file(sys.argv[2])
"""
)


def test_a_kill_in_the_middle_of_an_import_leaves_nothing_of_it(home: Home, tmp_path: Path) -> None:
    rows = [f"{user},{user}{n},{n}\n" for user in ("ann", "bob") for n in range(40)]
    (tmp_path / "rows.csv").write_text("user,item,time\n" + "".join(rows))
    home.history.import_file(tmp_path / "rows.csv", only=["ann"])
    # The first statements read; then 80 rows, of which 40 are new, are written one by one, and committed.
    for statement in (1, 2, 5, 8, 20, 40):
        dying = script(IMPORTING, home.path, tmp_path / "rows.csv", statement)
        dying.communicate(timeout=300)
        assert dying.returncode == -signal.SIGKILL
        assert [one.name for one in home.people.all()] == ["ann"]
        assert home.history.lengths() == {0: 40}
    finished(script(IMPORTING, home.path, tmp_path / "rows.csv", 10**6))
    assert home.history.lengths() == {0: 40, 1: 40}


LOOPING = """
import itertools, sys
from homebody.federation.device.home import Home
from homebody.federation.device.models import PrivateState
with Home(sys.argv[1]) as home:
    for step in itertools.count(int(sys.argv[2])):
        state = PrivateState(step, None, b"s%d" % step * 20000)
        home.outbox.finish("ann", "r", f"train/{step}", "d", state, b"a%d" % step * 20000)
        print(step, flush=True)
"""


def test_kills_lose_no_answer_that_was_given(home: Home) -> None:
    """A child answers without end and says so after each round; it is killed, again and again on one home."""
    home.people.add("ann")
    last = 0
    for _ in range(8):
        child = script(LOOPING, home.path, last + 1)
        assert child.stdout is not None
        for _ in range(3):
            said = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        said = max([said, *map(int, child.stdout.read().split())])
        child.communicate()
        state = home.models.state("ann", "r")
        assert state is not None
        last = state.step
        assert last in (said, said + 1)  # one may be written and not yet said
        assert state.bytes == b"s%d" % last * 20000
        assert home.outbox.answer("ann", "r", f"train/{last}", "d") == b"a%d" % last * 20000
        assert [mark.release for mark in home.outbox.sent("ann")] == [f"train/{step}" for step in range(1, last + 1)]


FULL = """
import resource, sys
from homebody.federation.device.home import Home
from homebody.federation.device.models import PrivateState
from homebody.errors import HomebodyError
with Home(sys.argv[1]) as home:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    try:
        home.outbox.finish("ann", "r", "train/2", "d", PrivateState(2, None, bytes(3_000_000)), b"answer")
    except HomebodyError as error:
        print(error)
    print(home.models.state("ann", "r").step, home.outbox.answered("ann", "r", "train/2"))
"""


OUT = """
import resource, sys
from homebody.federation.device.home import Home
from homebody.errors import HomebodyError
with Home(sys.argv[1]) as home:
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    try:
        home.people.opt_out("ann")
    except HomebodyError as error:
        print(error)
    print(home.people.find("ann").active)
"""


def test_a_disk_that_fills_up_after_a_change_does_not_deny_it(home: Home) -> None:
    """The change fits into the log of writes; what it frees lies beyond what may be written of the store."""
    home.people.add("bob")
    home.outbox.finish("bob", "r", "train/1", "d", PrivateState(1, None, bytes(400_000)), b"answer")
    home.people.add("ann")
    home.outbox.finish("ann", "r", "train/1", "d", PrivateState(1, None, bytes(40_000)), b"answer")
    home.store.scrub()
    said, active = finished(script(OUT, home.path)).splitlines()
    assert "cannot be cleared of what was deleted" in said
    assert "nothing was changed" not in said
    assert active == "False"


def test_a_full_disk_is_a_sentence_and_changes_nothing(home: Home) -> None:
    home.people.add("ann")
    home.outbox.finish("ann", "r", "train/1", "d", PrivateState(1, None, b"state"), b"answer")
    said, left = finished(script(FULL, home.path)).splitlines()
    assert "cannot be written: " in said
    assert said.endswith(", so nothing was changed.")
    assert left == "1 set()"
    state = home.models.state("ann", "r")
    assert state is not None
    assert state.bytes == b"state"


def test_a_ledger_a_person(home: Home) -> None:
    from homebody.privacy import Charge, NonPrivate

    home.people.add("ann")
    home.people.add("bob")
    assert not home.ledger_file("ann").exists()
    home.ledger("bob").charge("train/1", [Charge("server", "user", NonPrivate("plain updates"))])
    assert home.ledger(1) is home.ledger("bob")
    home.close()
    with Home(home.path) as again:
        assert again.ledger("bob").knows("train/1")
        assert not again.ledger("ann").knows("train/1")


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


def test_which_certificate_a_device_takes(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text(CERTIFICATE)
    assert server_certificate("example.org:9092", file) == CERTIFICATE.encode()
    assert server_certificate("[::1]:9092", None) is None
    with pytest.raises(HomebodyError, match=r"example\.org is another machine"):
        server_certificate("example.org:9092", None)
    with pytest.raises(HomebodyError, match=r"none\.pem cannot be read: No such file"):
        server_certificate("example.org:9092", tmp_path / "none.pem")
    for wrong in ("hello", "", CERTIFICATE.replace("M", "N"), "ä"):
        file.write_text(wrong)
        with pytest.raises(HomebodyError, match="is not a certificate in PEM form"):
            server_certificate("example.org:9092", file)
    file.write_text(CERTIFICATE + "-----BEGIN PRIVATE KEY-----")
    with pytest.raises(HomebodyError, match="holds a private key"):
        server_certificate("example.org:9092", file)


def test_a_home_is_opened_without_torch(home: Home) -> None:
    text = (
        "import sys; from homebody.federation.device.home import Home\n"
        "from homebody.federation.device.models import PrivateState\nwith Home(sys.argv[1]) as home:\n"
        "    home.people.add('ann'); home.history.append('ann', 'emma', 1); home.configure(paused=True)\n"
        "    home.outbox.finish('ann', 'r', 'train/1', 'd', PrivateState(1, None, b's'), b'a')\n"
        "print(sorted({'torch', 'numpy', 'polars'} & set(sys.modules)))\nhome = Home(sys.argv[1])\n"
        "home.history.export(sys.argv[2]); home.history.population(); home.close()\nprint('torch' in sys.modules)"
    )
    assert finished(script(text, home.path, home.path / "mine.csv")) == "[]\nFalse\n"


def test_a_home_without_impressions_is_brought_forward(home: Home) -> None:
    ann = home.people.add("ann")
    home.close()
    of_schema(home, 5)
    with Home(home.path) as again:
        assert again.impressions.of(ann) == []
        again.impressions.append(ann, ["emma", "ulysses"], ["emma"], time=5)
    with Home(home.path) as again:
        assert again.impressions.lengths() == {0: 1}
