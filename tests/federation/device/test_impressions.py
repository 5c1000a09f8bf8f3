"""What a device's people were shown and clicked: brought in, noted, taken out, deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from homebody.cli import app
from homebody.data.sources import load
from homebody.errors import HomebodyError
from homebody.federation.device.home import Home
from homebody.federation.device.impressions import Impression

SHOWN = """impression,user,item,clicked,time
1,ann,n1,0,10
1,ann,n2,1,10
1,ann,n2,0,10
2,ben,n3,1,1767571200
2,ben,n1,0,1767571200
3,ann,n9,1,30.5
3,ann,n1,0,30.5
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home.create(tmp_path / "device", server="127.0.0.1:9092") as made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "shown.csv").write_text(SHOWN)
    return tmp_path / "shown.csv"


def test_a_file_of_impressions_is_brought_in_once(home: Home, file: Path) -> None:
    done = home.impressions.import_file(file, ranked="server")
    assert (done.added, done.repeated, [person.name for person in done.new]) == (3, 0, ["ann", "ben"])
    assert home.impressions.of("ann") == [
        Impression(10.0, "server", ("n1", "n2"), ("n2",)),
        Impression(30.5, "server", ("n9", "n1"), ("n9",)),
    ]
    assert home.impressions.of("ben") == [Impression(1767571200, "server", ("n3", "n1"), ("n3",))]
    again = home.impressions.import_file(file, ranked="server")
    assert (again.added, again.repeated) == (0, 3)
    assert home.impressions.lengths() == {0: 2, 1: 1}


def test_some_of_a_file_and_one_persons_own(home: Home, file: Path, tmp_path: Path) -> None:
    done = home.impressions.import_file(file, only=["ben"])
    assert (done.added, done.left_out) == (1, 2)
    own = tmp_path / "own.csv"
    own.write_text("impression,item,clicked,time\na,n1,1,1\na,n2,0,1\n")
    assert home.impressions.import_file(own, "cleo").added == 1
    assert home.impressions.of("cleo") == [Impression(1, "device", ("n1", "n2"), ("n1",))]


def test_what_is_written_is_read_again(home: Home, file: Path, tmp_path: Path) -> None:
    home.impressions.import_file(file)
    assert home.impressions.export(tmp_path / "out.csv") == 3
    with Home.create(tmp_path / "other", server="127.0.0.1:9092") as other:
        other.impressions.import_file(tmp_path / "out.csv")
        assert [other.impressions.of(name) for name in ("ann", "ben")] == [
            home.impressions.of(name) for name in ("ann", "ben")
        ]
    # It is a file of impressions for `homebody data` and `run` too.
    (tmp_path / "reads.csv").write_text("user,item,time\nann,n1,1\nann,n2,2\nann,n9,3\nben,n3,1\n")
    from homebody.data.attach import attach

    known = attach(load(str(tmp_path / "reads.csv")), impressions=tmp_path / "out.csv").impressions
    assert known is not None
    assert known.users.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "impression,user,item,clicked\n1,ann,n1,1\n",
            "has no column 'time': impressions need the columns",
        ),
        ("impression,user,item,clicked,time\n1,ann,n1,1,\n", "must hold a time in every row, but row 1 has nothing"),
        ("impression,user,item,clicked,time\n1,ann,n1,perhaps,3\n", r"1 or 0 \(or true or false\)"),
        ("impression,user,item,clicked,time\n1,ann,n1,1,3\n1,ben,n2,0,3\n", "belongs to several users"),
        ("impression,user,item,clicked,time\n", "has no rows below its header"),
    ],
)
def test_a_bad_file_is_refused_whole(home: Home, tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(HomebodyError, match=problem):
        home.impressions.import_file(tmp_path / "bad.csv")
    assert home.people.all() == []


def test_what_happens_is_noted_and_clicks_join_the_history(home: Home) -> None:
    ann = home.people.add("ann")
    home.impressions.append(ann, ["n1", "n2", "n3"], ["n3"], time=7)
    assert [(one.item, one.time) for one in home.history.of(ann)] == [("n3", 7)]
    # A list is an impression once something in it was clicked; the next one takes its place until then.
    home.impressions.show(ann, ["n4", "n5"], "server")
    home.impressions.show(ann, ["n6", "n7", "n8"], "device")
    assert home.impressions.lengths() == {0: 1}
    home.impressions.click(ann, "n8")
    home.impressions.click(ann, "n6")
    home.impressions.show(ann, ["n9"], "device")
    assert [one.clicked for one in home.impressions.of(ann)] == [("n3",), ("n8", "n6"), ()]
    assert [one.item for one in home.history.of(ann)] == ["n3", "n8", "n6"]


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (lambda shown: shown.append("ann", ["n1"], ["n2"]), "'n2' was clicked and not shown"),
        (lambda shown: shown.append("ann", ["n1", "n1"]), "shows 1 to 10,000 different items"),
        (lambda shown: shown.append("ann", []), "shows 1 to 10,000 different items"),
        (lambda shown: shown.append("ann", ["n1"], ranked="me"), "no one who ranks a list 'me'"),
        (lambda shown: shown.click("ann", "n1"), "was shown no list yet"),
        (lambda shown: (shown.show("ann", ["n1"], "device"), shown.click("ann", "n2")), "is not in the list"),
        (
            lambda shown: (shown.show("ann", ["n1"], "device"), shown.click("ann", "n1"), shown.click("ann", "n1")),
            "clicked 'n1' already",
        ),
    ],
)
def test_what_cannot_be_noted_is_said(home: Home, act: Any, problem: str) -> None:
    home.people.add("ann")
    with pytest.raises(HomebodyError, match=problem):
        act(home.impressions)


def test_impressions_go_with_the_history(home: Home, file: Path) -> None:
    home.impressions.import_file(file)
    for item, time in (("n2", 10), ("n9", 31)):
        home.history.append("ann", item, time=time)
    home.history.delete("ann", "n2")
    assert [one.clicked for one in home.impressions.of("ann")] == [("n9",)]
    home.history.delete("ann", all=True, before=30)
    assert [one.clicked for one in home.impressions.of("ann")] == [("n9",)]
    home.history.delete("ann", all=True)
    assert (home.impressions.of("ann"), len(home.impressions.of("ben"))) == ([], 1)
    home.people.opt_out("ben", delete_history=True)
    assert home.impressions.of("ben") == []
    assert b"n9" not in b"".join(part.read_bytes() for part in home.path.rglob("home.sqlite*"))


def test_the_commands(home: Home, file: Path, tmp_path: Path) -> None:
    def said(*arguments: object) -> str:
        done = CliRunner().invoke(app, ["client", *map(str, arguments)])
        assert done.exit_code == 0, done.output
        return done.stdout

    folder = home.path
    home.close()
    assert "3 impressions added, 0 known already." in said(
        "impressions", "import", folder, file, "--ranked-by", "server"
    )
    shown = ("--shown", "n1", "--shown", "n2", "--clicked", "n2", "--time", "40")
    assert "2 items shown to ann, 1 click." in said("impressions", "append", folder, "ann", *shown)
    assert "3 impressions written" in said("impressions", "export", folder, tmp_path / "ann.csv", "--person", "ann")
    assert "n9, n1" in said("impressions", "list", folder, "ann")
    assert "impressions" in said("people", folder)
    assert "1 interaction deleted, and 3 impressions." in said("delete", folder, "ann", "--all")
    with Home(folder) as again:
        again.impressions.show("ann", ["n5"], "device")
    assert "ann clicked n5." in said("impressions", "click", folder, "ann", "n5")
