"""What an operator does to a server's folder."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from homebody.errors import HomebodyError
from homebody.federation.server.admin import backup, make, opened, read_items, report, restored
from homebody.federation.server.plan import FILE, ServerPlan
from homebody.recipe import Recipe

RECIPE = Recipe("fedmf", "devices", {"factors": 3}, rounds=4)


@pytest.fixture
def items(tmp_path: Path) -> str:
    file = tmp_path / "items.csv"
    file.write_text("id,name\na,Alien\nb,Brazil\nc,\n")
    return str(file)


def test_a_server_is_made_whole(tmp_path: Path, items: str) -> None:
    folder = tmp_path / "deep" / "server"
    made = make(folder, ServerPlan(RECIPE, run="abc"), items, ["example.org"])
    assert made == {"folder": str(folder), "run": "abc", "items": 3, "listen": "127.0.0.1:9092"}
    assert {path.name for path in folder.iterdir()} >= {FILE, "keys", "server.sqlite"}
    assert all(not stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (folder, folder / FILE, folder / "keys"))
    with opened(folder) as (plan, records):
        assert plan.run == "abc"
        assert records.items() == [("a", "Alien"), ("b", "Brazil"), ("c", "c")]


def test_a_server_is_not_made_twice_nor_among_other_things(tmp_path: Path, items: str) -> None:
    make(tmp_path / "server", ServerPlan(RECIPE), items, [])
    before = {path: path.read_bytes() for path in (tmp_path / "server").rglob("*") if path.is_file()}
    with pytest.raises(HomebodyError, match="is not empty: a server gets a folder of its own"):
        make(tmp_path / "server", ServerPlan(RECIPE), items, [])
    assert before == {path: path.read_bytes() for path in (tmp_path / "server").rglob("*") if path.is_file()}
    with pytest.raises(HomebodyError, match="is a file"):
        make(Path(items), ServerPlan(RECIPE), items, [])
    with pytest.raises(HomebodyError, match=r"No server can be made in .*: Not a directory"):
        make(Path(items) / "below", ServerPlan(RECIPE), items, [])


@pytest.mark.parametrize(
    ("settings", "items", "said"),
    [
        ({}, "nosuch.csv", "nosuch"),
        ({"database": "env:HOMEBODY_TEST_NOWHERE"}, None, "which is not set"),
        ({"database": "nosuch://x"}, None, "nosuch"),
        ({"tls": False, "listen": "0.0.0.0:9092"}, None, "Other machines can reach 0.0.0.0: leave out --no-tls"),
        ({"tls": False, "listen": "127.0.0.1.example.org:9092"}, None, "Other machines can reach"),
        ({"tls": False, "link": "example.org:9092"}, None, "Other machines can reach example.org"),
    ],
)
def test_what_fails_leaves_nothing_behind(
    tmp_path: Path, settings: dict[str, Any], items: str | None, said: str
) -> None:
    with pytest.raises(HomebodyError) as refused:
        make(tmp_path / "server", ServerPlan(RECIPE, **settings), items, [])
    assert said in str(refused.value)
    assert not (tmp_path / "server").exists()


def test_keys_that_are_there_are_kept(tmp_path: Path, items: str) -> None:
    from homebody.federation.service.certificates import make_authority

    make_authority(tmp_path / "server" / "keys")
    before = (tmp_path / "server" / "keys" / "ca.pem").read_bytes()
    with pytest.raises(HomebodyError, match="nosuch"):
        make(tmp_path / "server", ServerPlan(RECIPE), "nosuch.csv", [])
    make(tmp_path / "server", ServerPlan(RECIPE), items, [])
    assert (tmp_path / "server" / "keys" / "ca.pem").read_bytes() == before


def test_a_database_that_is_somebodys_is_refused(tmp_path: Path, items: str) -> None:
    make(tmp_path / "first", ServerPlan(RECIPE), items, [])
    plan = ServerPlan(RECIPE, database=f"../first/{ServerPlan(RECIPE).database}")
    with pytest.raises(HomebodyError, match="belongs to a server already"):
        make(tmp_path / "second", plan, items, [])
    assert not (tmp_path / "second").exists()
    with opened(tmp_path / "first") as (_, records):
        assert records.counters() == {}


def csv(folder: Path, text: str) -> str:
    (folder / "read.csv").write_text(text)
    return str(folder / "read.csv")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("id\n7\n007\nNA\n", [("7", "7"), ("007", "007"), ("NA", "NA")]),
        ("title,Item_ID\nAlien, 1 \n,2\n", [("1", "Alien"), ("2", "2")]),
        ('movieId,title,genres\n1,"A, B",x\n', [("1", "A, B")]),
        ("NAME,ID\nx,ä\n", [("ä", "x")]),
    ],
)
def test_items_are_read_from_csv(tmp_path: Path, text: str, found: list[tuple[str, str]]) -> None:
    assert read_items(csv(tmp_path, text)) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read"),
        ("what,else\n1,2\n", "Which column of .* has the items' ids"),
        ("id,item\n1,2\n", "Which column of .* has the items' ids"),
        ("id,name\n1,a\n,b\n,c\n", "2 items of .* have no id: give every item an id"),
        ("id,name\n1,a\n,b\n", "1 item of .* has no id: give every item an id"),
        ('id\n"a\nb"\n', "An item's id must be one line"),
        ("id\n" + "x" * 501 + "\n", "An item's id must be one line of 1 to 500 characters"),
        ('id\n" "\n', "An item's id must be one line"),
    ],
)
def test_items_that_devices_could_not_take_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(HomebodyError, match=said):
        read_items(csv(tmp_path, text))


def test_items_are_read_from_parquet_as_devices_read_them(tmp_path: Path) -> None:
    file = tmp_path / "items.parquet"
    pl.DataFrame({"id": [7.0, 8.0], "name": ["a", None]}).write_parquet(file)
    assert read_items(str(file)) == [("7", "a"), ("8", "8")]
    pl.DataFrame({"item": [7, 8]}).write_parquet(file)
    assert read_items(str(file)) == [("7", "7"), ("8", "8")]
    pl.DataFrame({"id": [[1], [2]]}).write_parquet(file)
    with pytest.raises(HomebodyError, match="must be texts or numbers"):
        read_items(str(file))
    file.write_bytes(b"PAR1 nonsense")
    with pytest.raises(HomebodyError, match="cannot be read"):
        read_items(str(file))


def test_items_are_those_of_a_dataset() -> None:
    found = read_items("synthetic:users=5,items=9,mean=5")
    assert len(found) == len(dict(found)) == 9
    with pytest.raises(HomebodyError, match="nosuch"):
        read_items("nosuch")


def test_what_is_said_of_a_server(tmp_path: Path, items: str) -> None:
    make(tmp_path / "server", ServerPlan(RECIPE, run="abc"), items, [])
    with opened(tmp_path / "server") as (plan, records):
        records.add_device("ab" * 16, b"key", "kitchen", 3)
        records.count("refused: too late", 2)
        found = report(plan, records)
    (device,) = found.pop("devices")
    assert (device["name"], device["first"], device["people"], device["removed"]) == ("kitchen", 0, 3, None)
    assert found == {
        "method": "fedmf",
        "run": "abc",
        "doing": "not started yet",
        "waiting": None,
        "ended": None,
        "trouble": None,
        "budget": None,
        "history": [],
        "rounds": 0,
        "planned": 4,
        "items": 3,
        "epsilon": {"server": 0.0, "clients": 0.0, "public": 0.0},
        "delta": 1e-6,
        "proxies": [],
        "assumes": [],
        "roster": None,
        "resting": None,
        "measured": None,
        "selects": "valid/ndcg@10",
        "counters": {"refused: too late": 2},
    }


def test_a_backup_goes_into_an_empty_database_alone(tmp_path: Path, items: str) -> None:
    make(tmp_path / "server", ServerPlan(RECIPE), items, [])
    with opened(tmp_path / "server") as (_, records):
        backup(records, tmp_path / "backup.sqlite")
    with pytest.raises(HomebodyError):
        restored(tmp_path / "server", tmp_path / "backup.sqlite")
    (tmp_path / "server" / "server.sqlite").unlink()
    assert restored(tmp_path / "server", tmp_path / "backup.sqlite") == 0
    with opened(tmp_path / "server") as (_, records):
        assert records.n_items() == 3
    with pytest.raises(HomebodyError):
        restored(tmp_path / "server", tmp_path / "nosuch.sqlite")
