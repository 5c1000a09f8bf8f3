"""The server's state: nothing acknowledged is lost, nothing is half there, in either database."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.warm import Nest

from homebody.core import Cohort, Evaluated
from homebody.database import Conflict, Database, connect
from homebody.errors import HomebodyError
from homebody.federation.server import records as module
from homebody.federation.server.admin import backup, restore
from homebody.federation.server.epochs import Epochs
from homebody.federation.server.records import COMPONENT, Records, RegisteredDevice
from homebody.privacy import Charge, NonPrivate
from homebody.progress import Best, Checkpoints, Progress, Round

TOLD = [Charge("server", "user", NonPrivate("plain updates"))]


@pytest.fixture
def records(database: Database) -> Records:
    return Records(database)


def progress(step: int = 4, best: int | None = 2) -> Progress:
    """Progress in which every tensor is different, some are views and some share memory."""
    table = torch.arange(12.0).reshape(3, 4) + step
    shared = {"item": table, "row": table[1], "across": table.T}
    clients = {"base_step": torch.tensor([1, -1])}
    chosen = None
    if best == step:
        chosen = Best(step, Evaluated({"ndcg@10": 0.25}, {"user": torch.tensor([0, 3])}), shared, clients)
    elif best is not None:
        evaluated = Evaluated({"ndcg@10": 0.1 + 0.2, "hr@10": 1e-17}, {"user": torch.tensor([0, 3])})
        chosen = Best(best, evaluated, {"item": table - 7}, {"base_step": torch.tensor([5, 6])})
    return Progress(step, shared, {"moment": torch.tensor(step * 1.5)}, clients, chosen)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def equal(left: Progress | None, right: Progress) -> bool:
    if left is None or left.step != right.step or (left.best is None) != (right.best is None):
        return False
    trees = [(left.shared, right.shared), (left.server, right.server), (left.clients, right.clients)]
    if left.best and right.best:
        if (left.best.step, left.best.evaluated.metrics) != (right.best.step, right.best.evaluated.metrics):
            return False
        trees.append((left.best.evaluated.per_user, right.best.evaluated.per_user))
        trees += [(left.best.shared, right.best.shared), (left.best.clients, right.best.clients)]
    return all(same(*pair) for pair in trees)


def line(step: int) -> Round:
    return Round("train", step, step, 3, None, {}, {"server": float("inf")}, 1, 2, 0.5, 0.25)


def whole(records: Records) -> dict[str, Any]:
    """Everything that is in the database."""
    found: dict[str, Any] = {}
    for table in ("device", "item", "open_round", "checkpoint", "checkpoint_part", "round", "counter", "note"):
        found[table] = sorted(map(tuple, records.database.execute(f"SELECT * FROM {table}").fetchall()))
    found["charge"] = records.ledger().entries()
    return found


def fill(records: Records) -> None:
    records.add_device("f0", b"key 0\xff", "kitchen", 3)
    records.add_device("f1", b"key 1", "study", 2)
    records.remove_device("kitchen")
    records.add_items([(f"i{number}", f"Item {number} ä") for number in range(1500)])
    records.open_round("train/4", Cohort(np.array([0, 3, 4]), "fixed", 3, 5))
    for step in (1, 2, 3):
        records.add_round(line(step))
        records.save(progress(step, best=1))
    ledger = records.ledger()
    for step in (1, 2, 3):
        ledger.charge(f"train/{step}", TOLD, number=step, code="Toy")
    records.count("refused: late", 7)
    records.note("phase", "train")


class TestDevices:
    def test_numbers_are_given_in_order_and_never_again(self, records: Records) -> None:
        assert records.add_device("f0", b"key 0", "kitchen", 5) == range(5)
        assert records.add_device("f1", b"key 1", "study", 1) == range(5, 6)
        gone = records.remove_device("study")
        assert (gone.fingerprint, gone.name, gone.first, gone.people) == ("f1", "study", 5, 1)
        assert gone.removed is not None
        assert records.add_device("f2", b"key 2", "study", 2) == range(6, 8)
        records.remove_device("f2")
        assert records.add_device("f3", b"key 3", "hall", 1) == range(8, 9)
        found = records.devices()
        assert [(one.name, one.first, one.people, one.removed is None) for one in found] == [
            ("kitchen", 0, 5, True),
            ("study", 5, 1, False),
            ("study", 6, 2, False),
            ("hall", 8, 1, True),
        ]
        assert found[0] == RegisteredDevice("f0", b"key 0", "kitchen", 0, 5, found[0].added, None)
        assert found[1] == gone

    def test_refusals_are_sentences_and_change_nothing(self, records: Records) -> None:
        records.add_device("f0", b"key 0", "kitchen", 1)
        records.add_device("f1", b"key 1", "study", 1)
        records.remove_device("study")
        before = records.devices()
        for device, sentence in (
            (("f0", b"key 0", "hall", 1), "The key of 'hall' is registered already, as 'kitchen'"),
            (("f1", b"key 1", "hall", 1), r"The key of 'hall' was removed on .* needs a new key"),
            (("f2", b"key 2", "kitchen", 1), "There is a device 'kitchen' already"),
            (("f2", b"key 2", "hall", 0), "A device holds 1 to 1,000,000 people, not 0"),
            (("f2", b"key 2", "hall", 10**7), "A device holds 1 to 1,000,000 people"),
            (("f2", b"key 2", "", 1), "A device's name has 1 to 500 characters, not 0"),
            (("f2", b"key 2", "a\0b", 1), "A device's name must be text"),
            (("f2", b"key 2", "x" * 501, 1), "not 501"),
        ):
            with pytest.raises(HomebodyError, match=sentence):
                records.add_device(*device)
        for which, sentence in (
            ("nobody", "There is no device 'nobody'"),
            ("study", "The device 'study' was removed already, on 2"),
            ("f1", "The device 'f1' was removed already"),
        ):
            with pytest.raises(HomebodyError, match=sentence):
                records.remove_device(which)
        assert records.devices() == before

    def test_the_database_itself_keeps_names_apart(self, records: Records) -> None:
        records.add_device("f0", b"key 0", "kitchen", 1)
        columns = "fingerprint, public_key, name, first, people, added"
        with pytest.raises(Conflict):
            records.database.execute(
                f"INSERT INTO device ({columns}) VALUES (?, ?, ?, ?, ?, ?)", ("f9", b"", "kitchen", 9, 1, "")
            )


class TestItems:
    def test_positions_never_change(self, records: Records) -> None:
        assert records.n_items() == 0
        assert records.items() == []
        assert records.add_items([("b", "Brazil"), ("a", "Alien")]) == (0, 2)
        assert records.add_items([("c", "Cube"), ("a", "Another"), ("c", "Cube again"), ("d", "")]) == (2, 2)
        assert records.add_items([("a", "Alien")]) == (4, 0)
        assert records.add_items([]) == (4, 0)
        assert records.items() == [("b", "Brazil"), ("a", "Alien"), ("c", "Cube"), ("d", "")]
        assert records.items(since=3) == [("d", "")]
        assert records.items(since=4) == []
        assert records.n_items() == 4
        assert records.counters() == {"items known already": 3}

    def test_more_than_one_question_can_hold(self, records: Records) -> None:
        assert records.add_items([(str(number), "x") for number in range(1200)]) == (0, 1200)
        assert records.add_items([(str(number), "x") for number in range(600, 1800)]) == (1200, 600)
        assert [int(identity) for identity, _ in records.items()] == list(range(1800))

    def test_one_that_cannot_be_kept_refuses_them_all(self, records: Records) -> None:
        for bad in (("", "x"), ("x" * 501, "x"), ("a\0", "x"), ("a", "\udc80"), ("a", "x" * 501)):
            with pytest.raises(HomebodyError, match=r"An item's (id|name)"):
                records.add_items([("fine", "Fine"), bad])
        assert records.n_items() == 0

    @given(st.lists(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=5), max_size=4))
    def test_any_batches_number_each_id_once(self, batches: list[list[tuple[str, str]]]) -> None:
        records = Records(connect(None))
        wanted: dict[str, str] = {}
        for batch in batches:
            batch = [(f"i{identity}", name) for identity, name in batch if "\0" not in identity + name]
            first, count = len(wanted), len({identity for identity, _ in batch} - wanted.keys())
            for identity, name in batch:
                wanted.setdefault(identity, name)
            assert records.add_items(batch) == (first, count)
        assert records.items() == list(wanted.items())
        records.database.close()


class TestOpenRounds:
    def test_a_round_comes_back_with_its_cohort(self, records: Records, where: Path | str) -> None:
        cohort = Cohort(np.array([1, 2**40, 7]), "fixed", 3, 100)
        records.open_round("train/1", cohort)
        other = connect(where)
        found = Records(other).opened("train/1")
        other.close()
        assert found is not None
        assert found.users.dtype == np.int64
        assert found.users.tolist() == [1, 2**40, 7]
        assert (found.sampling, found.size, found.population) == ("fixed", 3, 100)
        found.users[0] = 5  # it is the caller's own
        assert records.opened("train/2") is None

    def test_an_open_round_keeps_its_cohort(self, records: Records) -> None:
        cohort = Cohort(np.array([1, 2]), "all", 2, 2)
        records.open_round("train/1", cohort)
        records.open_round("train/1", cohort)
        with pytest.raises(HomebodyError, match="The round train/1 is open with another cohort"):
            records.open_round("train/1", Cohort(np.array([1, 3]), "all", 2, 2))


class TestSums:
    def test_an_attempt_comes_back_and_takes_the_place_of_others(self, records: Records, where: Path | str) -> None:
        assert records.sum("train/1") is None
        records.put_sum("train/1", {}, None, None)
        assert records.sum("train/1") == ({}, None, None)
        state, result = bytes(range(256)), b"\0the sum"
        records.put_sum("train/1", {0: 2, 7: 1}, state, None)
        with closing(connect(where)) as other:
            assert Records(other).sum("train/1") == ({0: 2, 7: 1}, state, None)
        records.put_sum("train/1", {0: 2}, None, result)
        assert records.sum("train/1") == ({0: 2}, None, result)
        records.put_sum("train/1/telemetry", {}, b"", None)
        assert records.sum("train/1/telemetry") == ({}, b"", None)
        assert records.sum("train/1") is None

    def test_a_backup_holds_no_sum(self, records: Records, tmp_path: Path) -> None:
        """It may have been opened since: the round that it is of is tried again, and charged again."""
        records.put_sum("train/1", {0: 2}, b"under way", None)
        backup(records, tmp_path / "backup.sqlite")
        with closing(connect(tmp_path / "new.sqlite")) as new:
            assert restore(tmp_path / "backup.sqlite", new).sum("train/1") is None


class TestCheckpoints:
    @pytest.mark.parametrize("best", [None, 2, 4])
    def test_a_checkpoint_comes_back_as_it_was(self, records: Records, where: Path | str, best: int | None) -> None:
        checkpoints: Checkpoints = records
        assert checkpoints.load() is None
        assert checkpoints.due()
        checkpoints.save(progress(best=best))
        other = connect(where)
        assert equal(Records(other).load(), progress(best=best))
        other.close()

    def test_the_last_two_are_kept(self, records: Records) -> None:
        for step in (1, 2, 3, 4):
            records.save(progress(step, best=1))
        kept = [json.loads(about)["step"] for (about,) in records.database.execute("SELECT about FROM checkpoint")]
        assert sorted(kept) == [3, 4]
        assert records.database.execute("SELECT COUNT(*) FROM checkpoint_part").fetchone() == (2,)

    def test_the_last_to_be_saved_counts_whatever_its_round(self, records: Records) -> None:
        records.save(progress(5))
        records.save(progress(3))
        assert equal(records.load(), progress(3))

    def test_one_larger_than_a_row_is_kept_in_parts(self, records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "PART", 100)
        for step in (1, 2, 3):
            records.save(progress(step))
        (parts,) = records.database.execute("SELECT COUNT(*) FROM checkpoint_part").fetchone()
        assert parts > 10
        assert equal(records.load(), progress(3))

    @pytest.mark.parametrize(
        "damage",
        [
            "UPDATE checkpoint_part SET content = ? WHERE checkpoint = 2",
            "UPDATE checkpoint SET about = replace(about, '4', '5') WHERE number = 2 AND ? IS NOT NULL",
            "UPDATE checkpoint SET size = size + 1 WHERE number = 2 AND ? IS NOT NULL",
            "DELETE FROM checkpoint_part WHERE checkpoint = 2 AND content <> ?",
        ],
    )
    def test_a_damaged_one_gives_way_to_the_one_before(self, records: Records, damage: str) -> None:
        for step in (1, 2, 3, 4):
            records.add_round(line(step))
        records.save(progress(3))
        records.save(progress(4))
        records.database.execute(damage, (b"damaged",))
        assert equal(records.load(), progress(3))
        assert records.counters() == {"checkpoints damaged": 1}
        assert [one["step"] for one in records.rounds()] == [1, 2, 3]
        assert equal(records.load(), progress(3))
        assert records.counters() == {"checkpoints damaged": 1}
        records.save(progress(4))
        assert equal(records.load(), progress(4))

    def test_without_a_whole_one_it_does_not_begin_anew(self, records: Records) -> None:
        records.add_round(line(1))
        records.save(progress(1))
        records.database.execute("UPDATE checkpoint_part SET content = ?", (b"damaged",))
        with pytest.raises(HomebodyError, match=r"No checkpoint in .* is whole"):
            records.load()
        assert len(records.rounds()) == 1

    def test_a_save_that_fails_leaves_the_ones_before(self, records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
        records.save(progress(1))
        records.save(progress(2))
        before = whole(records)
        execute = records.database.execute

        def refuse(sql: str, parameters: Any = ()) -> Any:
            if sql.startswith("DELETE FROM checkpoint "):
                raise OSError(28, "No space left on device")
            return execute(sql, parameters)

        monkeypatch.setattr(records.database, "execute", refuse)
        with pytest.raises(OSError, match="No space"):
            records.save(progress(3))
        monkeypatch.undo()
        assert whole(records) == before

    def test_a_full_disk_is_a_sentence_and_leaves_the_one_before(self, tmp_path: Path) -> None:
        database = connect(tmp_path / "state.sqlite")
        records = Records(database)
        records.save(progress(1))
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count = {pages + 10}")
        large = progress(2)
        large.shared["large"] = torch.zeros(1_000_000)
        with pytest.raises(HomebodyError, match="The disk takes no more"):
            records.save(large)
        assert equal(records.load(), progress(1))
        records.count("still there")
        database.close()


class TestRounds:
    def test_rounds_after_the_checkpoint_are_taken_back(self, records: Records) -> None:
        for step in range(1, 7):
            records.add_round(line(step))
        records.save(progress(4))
        assert len(records.rounds()) == 6
        records.load()
        found = records.rounds()
        assert [one["step"] for one in found] == [1, 2, 3, 4]
        assert found[0]["epsilon"] == {"server": "inf"}
        assert found[0].keys() == line(1).__dict__.keys()
        records.add_round(line(5))

    def test_without_a_checkpoint_all_are_taken_back(self, records: Records) -> None:
        records.add_round(line(1))
        assert records.load() is None
        assert records.rounds() == []

    def test_a_round_is_recorded_once(self, records: Records) -> None:
        records.add_round(line(1))
        with pytest.raises(HomebodyError, match="Round 1 is recorded already"):
            records.add_round(line(1))


def test_counters_and_notes(records: Records, where: Path | str) -> None:
    other = connect(where)
    for one in (records, Records(other), records):
        one.count("rounds abandoned")
        one.count("bytes up", 2**40)
        one.note("phase", f"{one is records}")
    assert records.counters() == {"bytes up": 3 * 2**40, "rounds abandoned": 3}
    records.note("error", "")
    assert Records(other).notes() == {"error": "", "phase": "True"}
    other.close()


class TestBackups:
    def test_it_holds_everything(self, records: Records, tmp_path: Path) -> None:
        fill(records)
        backup(records, tmp_path / "copy.sqlite")
        assert [path.name for path in tmp_path.iterdir() if "copy" in path.name or "backup" in path.name] == [
            "copy.sqlite"
        ]
        assert (tmp_path / "copy.sqlite").stat().st_mode & 0o777 == 0o600
        copy = connect(tmp_path / "copy.sqlite")
        assert whole(Records(copy)) == whole(records)
        copy.close()

    @pytest.mark.parametrize("origin", ["sqlite", "same"])
    def test_it_is_restored_into_either(
        self, database: Database, where: Path | str, tmp_path: Path, origin: str
    ) -> None:
        source = connect(tmp_path / "origin.sqlite") if origin == "sqlite" else database
        records = Records(source)
        fill(records)
        expected = whole(records)
        backup(records, tmp_path / "copy.sqlite")
        kept = (tmp_path / "copy.sqlite").read_bytes()
        target = database if origin == "sqlite" else connect(tmp_path / "new.sqlite")
        restored = restore(tmp_path / "copy.sqlite", target)
        assert whole(restored) == expected
        assert (tmp_path / "copy.sqlite").read_bytes() == kept
        assert equal(restored.load(), progress(3, best=1))
        restored.ledger().charge("train/4", TOLD)
        assert restored.add_device("f2", b"key 2", "hall", 1) == range(5, 6)
        assert restored.add_items([("new", "New")]) == (1500, 1)
        (source if target is database else target).close()

    def test_a_restored_ledger_is_still_append_only(self, database: Database, tmp_path: Path) -> None:
        source = Records(connect(None))
        fill(source)
        backup(source, tmp_path / "copy.sqlite")
        source.database.close()
        restore(tmp_path / "copy.sqlite", database)
        with pytest.raises(Conflict, match="append-only"):
            database.execute("DELETE FROM charge")

    def test_only_an_empty_database_is_filled(self, records: Records, tmp_path: Path) -> None:
        fill(records)
        backup(records, tmp_path / "copy.sqlite")
        before = whole(records)
        with pytest.raises(HomebodyError, match="is not empty: a backup is restored into a new one"):
            restore(tmp_path / "copy.sqlite", records.database)
        assert whole(records) == before
        other = connect(tmp_path / "other.sqlite")
        Records(other).note("phase", "train")
        with pytest.raises(HomebodyError, match="is not empty"):
            restore(tmp_path / "copy.sqlite", other)
        other.close()

    def test_a_backup_is_not_written_over_anything(self, tmp_path: Path) -> None:
        records = Records(connect(None))
        (tmp_path / "copy.sqlite").write_text("mine")
        with pytest.raises(HomebodyError, match="already exists"):
            backup(records, tmp_path / "copy.sqlite")
        assert (tmp_path / "copy.sqlite").read_text() == "mine"
        with pytest.raises(HomebodyError, match="No backup can be written to"):
            backup(records, tmp_path / "nowhere" / "copy.sqlite")
        records.database.close()

    def test_what_is_no_backup_is_refused_and_leaves_nothing(self, database: Database, tmp_path: Path) -> None:
        (tmp_path / "text").write_text("no database, but a text that is long enough to be one")
        (tmp_path / "empty").write_bytes(b"")
        ledger = sqlite3.connect(tmp_path / "other")
        ledger.execute("CREATE TABLE charge (id INTEGER)")
        ledger.close()
        for name, sentence in (
            ("nowhere", "There is no backup"),
            ("text", r"The backup .*text cannot be opened"),
            ("empty", "is not a backup of a Homebody server"),
            ("other", "is not a backup of a Homebody server"),
        ):
            with pytest.raises(HomebodyError, match=sentence) as caught:
                restore(tmp_path / name, database)
            assert str(tmp_path / name) in str(caught.value)
        assert database.version(COMPONENT) == 0

    def test_a_backup_whose_ledger_was_changed_is_refused(self, database: Database, tmp_path: Path) -> None:
        source = Records(connect(None))
        fill(source)
        backup(source, tmp_path / "copy.sqlite")
        source.database.close()
        changed = connect(tmp_path / "copy.sqlite")
        changed.execute("DROP TRIGGER charge_is_never_changed")
        changed.execute("UPDATE charge SET code = 'someone' WHERE id = 2")
        changed.close()
        with pytest.raises(HomebodyError, match="tampered with: row 2 breaks its chain"):
            restore(tmp_path / "copy.sqlite", database)
        assert database.version(COMPONENT) == 0

    def test_a_backup_that_fails_half_way_leaves_nothing(self, database: Database, tmp_path: Path) -> None:
        source = Records(connect(None))
        fill(source)
        backup(source, tmp_path / "copy.sqlite")
        source.database.close()
        changed = connect(tmp_path / "copy.sqlite")
        changed.execute("DROP INDEX device_name")
        changed.execute("UPDATE device SET name = 'study', removed = NULL")
        changed.close()
        with pytest.raises(HomebodyError, match=r"The backup .*copy\.sqlite is damaged"):
            restore(tmp_path / "copy.sqlite", database)
        assert database.version(COMPONENT) == 0
        assert Records(database).ledger().entries() == []

    def test_it_stands_at_one_moment_while_others_write(
        self, records: Records, where: Path | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A device and a charge that come while the copy is made are both in it or both not."""
        fill(records)
        expected = whole(records)
        other = connect(where)
        rows = records.database.rows

        def slowly(sql: str, parameters: Any = ()) -> Any:
            if "FROM device" in sql:  # charges are copied by now
                monkeypatch.undo()
                writer = Records(other)
                writer.add_device("f5", b"key", "cellar", 1)
                writer.ledger().charge("train/9", TOLD)
            return rows(sql, parameters)

        monkeypatch.setattr(records.database, "rows", slowly)
        backup(records, tmp_path / "copy.sqlite")
        assert Records(other).devices()[-1].name == "cellar"
        other.close()
        copy = connect(tmp_path / "copy.sqlite")
        assert whole(Records(copy)) == expected
        copy.close()


def test_a_database_without_proxies_is_brought_forward(database: Database) -> None:
    fill(Records(database))
    expected = whole(Records(database))
    database.execute("DROP TABLE proxy")
    database.execute("DROP TABLE sheet")
    database.execute("DROP TABLE fault")
    database.execute("DROP TABLE secure_sum")
    database.execute("DROP TABLE presence")
    database.execute("UPDATE homebody_schema SET version = 1 WHERE component = ?", (COMPONENT,))
    assert whole(Records(database)) == expected
    Records(database).add_proxy(b"key", "mixer")


def test_a_database_without_features_is_brought_forward(database: Database, tmp_path: Path) -> None:
    fill(Records(database))
    expected = whole(Records(database))
    database.execute("DROP TABLE sheet")
    database.execute("DROP TABLE fault")
    database.execute("DROP TABLE secure_sum")
    database.execute("DROP TABLE presence")
    database.execute("UPDATE homebody_schema SET version = 2 WHERE component = ?", (COMPONENT,))
    records = Records(database)
    assert (whole(records), records.features()) == (expected, None)
    records.put_features(b"colours")
    backup(records, tmp_path / "copy.sqlite")
    other = connect(tmp_path / "other.sqlite")
    assert restore(tmp_path / "copy.sqlite", other).features() == b"colours"
    other.close()


def test_a_backup_has_the_proxies_and_nothing_that_opens_reports(database: Database, tmp_path: Path) -> None:
    records = Records(database)
    records.add_proxy(b"p" * 32, "mixer")
    epoch = Epochs(records, tmp_path).open("run/train/1", "d", k=1, entries=5, seconds=60)
    secret = (tmp_path / "epochs" / f"{epoch.id.hex()}.key").read_bytes()
    backup(records, tmp_path / "copy.sqlite")
    assert secret not in (tmp_path / "copy.sqlite").read_bytes()
    other = connect(tmp_path / "other.sqlite")
    restored = restore(tmp_path / "copy.sqlite", other)
    assert restored.proxies() == records.proxies()
    assert Epochs(restored, tmp_path).named("run/train/1") is None
    other.close()


def test_a_newer_schema_is_refused(records: Records) -> None:
    records.database.execute("UPDATE homebody_schema SET version = 9 WHERE component = ?", (COMPONENT,))
    with pytest.raises(HomebodyError, match=r"was written by a newer Homebody \(schema 9\); update to read it"):
        Records(records.database)


def test_the_intake_needs_no_torch() -> None:
    heavy = {"torch", "scipy", "polars", "flwr"}
    script = f"import sys, homebody.federation.server.intake; assert not {heavy} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_stays_up_beside_training_needs_no_torch() -> None:
    script = (
        "import sys; from homebody.database import connect; from homebody.federation.server.records import Records\n"
        "records = Records(connect(None)); records.add_device('f', b'k', 'hall', 2); records.count('x')\n"
        "records.note('phase', 'train'); records.devices(), records.items(), records.rounds(), records.counters()\n"
        "assert not {'torch', 'numpy', 'scipy', 'polars'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


SERVING = """
import os, sys, tempfile
import numpy as np, torch
from homebody.core import Cohort
from homebody.database import connect
from homebody.federation.server.records import Records
from homebody.progress import Progress
from homebody.privacy import Charge, NonPrivate
torch.set_num_threads(1)  # a child that is forked must not wait for threads that stayed behind
where, lives = sys.argv[1], int(sys.argv[2])
told = [Charge("server", "user", NonPrivate("plain updates"))]
for life in range(lives):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        records = Records(connect(where))
        found, ledger = records.load(), records.ledger()
        for step in range(found.step + 1 if found else 1, 10**6):
            release = f"train/{step}"
            again = records.opened(release)
            users = again.users if again else np.array([life, step])
            records.open_round(release, Cohort(users, "all", 2, 2))
            ledger.charge(release, told, repeat=True)
            shared = {"item": torch.full((50_000,), float(step)), "users": torch.from_numpy(users)}
            records.save(Progress(step, shared))
            os.write(writing, b"%d\\n" % step)
        os._exit(1)
    os.close(writing)
    heard = b""
    while heard.count(b"\\n") < 1 + 7 * life % 4:
        heard += os.read(reading, 4096) or sys.exit("a child ended by itself")
    os.kill(child, 9)
    assert os.waitpid(child, 0)[1] == 9
    while part := os.read(reading, 4096):
        heard += part
    os.close(reading)
    database = connect(where)
    records = Records(database)
    found, last = records.load(), int(heard.split()[-1])
    assert found is not None and found.step in (last, last + 1), (found and found.step, last)
    assert bool((found.shared["item"] == found.step).all())
    charged = [entry.release for entry in records.ledger().entries()]
    assert charged[:last] == [f"train/{step}" for step in range(1, last + 1)]
    assert len(charged) in (found.step, found.step + 1), (len(charged), found.step)
    assert "checkpoints damaged" not in records.counters()
    database.close()
    print(life, last, flush=True)
"""


@pytest.mark.parametrize("lives", [20, pytest.param(300, marks=pytest.mark.faults)])
def test_kills_leave_no_broken_checkpoint_and_lose_no_charge(where: Path | str, lives: int, warm: Nest) -> None:
    """A server trains without end and is killed in the middle, again and again; every charge is there once."""
    command = [sys.executable, "-c", SERVING, str(where), str(lives)]
    with tempfile.TemporaryFile("w+") as errors:
        done = warm.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        errors.seek(0)
        assert done.returncode == 0, errors.read()
    steps = [int(text.split()[1]) for text in done.stdout.splitlines()]
    assert len(steps) == lives
    assert steps == sorted(steps)
    assert steps[-1] >= lives
