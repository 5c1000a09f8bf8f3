"""`homebody view` and `homebody client views`: what they write, print and refuse."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from homebody.cli import app
from homebody.data.codes import Code
from homebody.errors import HomebodyError
from homebody.federation.app.features import read_features
from homebody.federation.app.folder import AppFolder, AppSettings, SeenQuestion
from homebody.federation.device.home import Home
from homebody.federation.schema import FeatureSchema
from homebody.federation.server.admin import make, opened
from homebody.federation.server.plan import ServerPlan
from homebody.privacy import Charge, GaussianRelease
from homebody.recipe import Recipe


def call(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(done.exception, HomebodyError):
        raise done.exception
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


@pytest.fixture
def device(tmp_path: Path) -> Path:
    folder = tmp_path / "device"
    with Home.create(folder, server="127.0.0.1:9092") as home:
        home.people.add("ann")
    return folder


def test_an_app_is_invited_made_filled_and_listed(device: Path, tmp_path: Path) -> None:
    file = tmp_path / "taste.invitation"
    uid = os.getuid()
    with pytest.raises(HomebodyError, match="--same-user"):
        call("client", "views", "add", device, "taste", "--uid", uid, "--invitation", file)
    with pytest.raises(HomebodyError, match="no user 'nobody at all'"):
        call("client", "views", "add", device, "taste", "--uid", "nobody at all", "--invitation", file)
    assert not file.exists()
    text = call("client", "views", "add", device, "taste", "--uid", uid, "--same-user", "--invitation", file)
    assert f"homebody view init APP {file}" in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    about = json.loads(file.read_text())
    assert about["token"] not in text
    assert (about["socket"], about["device_user"]) == (str(device.with_name("device.socket")), uid)
    with pytest.raises(HomebodyError, match="is there already"):
        call("client", "views", "add", device, "hobby", "--uid", uid, "--same-user", "--invitation", file)
    with pytest.raises(HomebodyError, match="has a view 'taste' already"):
        call("client", "views", "add", device, "taste", "--uid", uid, "--same-user", "--invitation", file)

    folder = tmp_path / "app"
    assert "The app of the view 'taste'" in call("view", "init", folder, file)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    table = tmp_path / "taste.csv"
    table.write_text("user,1,2\nann,0.5,-1\nbob,2,\n")
    assert call("view", "import", folder, table) == "2 people described by 2 features.\n"
    with AppFolder(folder) as found:
        assert found.features("ann") == {"1": "0.5", "2": "-1"}
        assert found.features("bob") == {"1": "2"}
        assert found.settings.token == about["token"]

    assert json.loads(call("client", "views", "list", device, "--json"))["views"] == [
        {"name": "taste", "uid": uid, "answered": 0, "away": 0, "slow": 0, "nonsense": 0}
    ]
    assert "taste" in call("client", "views", "list", device)
    call("client", "views", "remove", device, "taste")
    assert "No app holds a view" in call("client", "views", "list", device)
    with pytest.raises(HomebodyError, match="no view of this device"):
        call("client", "views", "remove", device, "taste")


def test_the_ledger_of_an_app_shows_what_it_saw(tmp_path: Path) -> None:
    with AppFolder.create(tmp_path / "app", AppSettings("taste", "/nowhere", 0, "secret")) as folder:
        folder.describe({"ann": {"1": "2"}})
        for step in (1, 2):
            charge = [Charge("views", "user", GaussianRelease(4.0, "add-remove"))]
            for _ in range(2):
                folder.ledger("ann").charge(f"run/train/{step}@x", charge, repeat=True, digest=f"digest {step}")
                folder.note(
                    "ann", f"gradient {step}", SeenQuestion("cafe" * 8, f"train/{step}", "gradient", 20, 1000, 10, 5)
                )
    text = call("view", "ledger", tmp_path / "app", "--delta", 1e-3)
    assert "not running" in text
    assert "train/1 to train/2 of cafecafe: 2 questions" in text
    assert "40 items of this person named, 2,000 bytes seen, 20 bytes sent" in text
    assert "2 rounds charged: ε = " in text
    (ann,) = json.loads(call("view", "ledger", tmp_path / "app", "--person", "ann", "--json"))["people"]
    assert ann["charged"] == 2
    assert 0 < ann["epsilon"] < 10
    with pytest.raises(HomebodyError, match="no person 'eve'"):
        call("view", "ledger", tmp_path / "app", "--person", "eve")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("user,x\nann,nan\n", "'x' of .* must hold no NaN and nothing infinite, but row 1 has 'nan'"),
        ("user,x,y\n1,0.5,1\n2,1\n3,1,2\n", "has 2 cells, and the header has 3"),
        ("x,y\n1,2\n1,3\n", "several rows about the user '1'"),
        ("user,x\nann,1\nbob,-inf\n", "row 2 has '-inf'"),
        ("user,x\nann,1\nann,2\n", "several rows about the user 'ann'"),
        ("user,x\nann,1,2\n", "has 3 cells, and the header has 2: correct it."),
        ("user\nann\n", "only the column 'user'"),
        ("user,x\nann,\n", "no value in any column but 'user'"),
        ("user,x\n", "no rows below its header"),
        ("user,x\n,1\n", "a user in every row"),
        ("", "is empty"),
    ],
)
def test_files_of_features_that_are_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "view.csv"
    file.write_text(text)
    with pytest.raises(HomebodyError, match=why):
        read_features(file)


def test_a_first_column_that_is_taken_for_ids_is_said(tmp_path: Path) -> None:
    AppFolder.create(tmp_path / "app", AppSettings("taste", "/nowhere", 0, "secret")).close()
    file = tmp_path / "view.csv"
    file.write_text("who,x\nann,1\nbob,2\n")
    note = "view.csv has no column called user, so its first, 'who', is taken for it."
    assert call("view", "import", tmp_path / "app", file) == f"{note}\n2 people described by 1 feature.\n"
    assert json.loads(call("view", "import", tmp_path / "app", file, "--json"))["notes"] == [note]


def test_a_text_among_numbers_is_said(tmp_path: Path) -> None:
    file, said = tmp_path / "view.csv", list[str]()
    file.write_text("user,x,y,town\nann,0.5,1,Ulm\nbob,abc,2,7\neve,-2,,Bonn\n")
    assert read_features(file, said.append)["bob"] == {"x": "abc", "y": "2", "town": "7"}
    (note,) = said
    assert note.startswith("view.csv: most of 'x' are numbers, but row 2 has 'abc';")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"view": 1, "socket": "x", "device_user": 0, "token": "y"}'])
def test_a_file_that_is_no_invitation_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "invitation"
    file.write_text(text)
    with pytest.raises(HomebodyError, match="is no invitation"):
        call("view", "init", tmp_path / "app", file)
    assert not (tmp_path / "app").exists()


def test_an_app_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "mine").write_text("x")
    with pytest.raises(HomebodyError, match="is not empty"):
        AppFolder.create(tmp_path / "app", AppSettings("taste", "/nowhere", 0, "secret"))
    assert [file.name for file in (tmp_path / "app").iterdir()] == ["mine"]
    with pytest.raises(HomebodyError, match="There is no app in"):
        call("view", "start", tmp_path / "none")


def plan(method: str = "fl-mv-dssm", **fields: Any) -> ServerPlan:
    return ServerPlan(Recipe(method, "devices", rounds=1, evaluate_every=0, fields=fields), metrics="")


@pytest.fixture
def items(tmp_path: Path) -> Path:
    file = tmp_path / "items.csv"
    file.write_text("id,name,genres\na,Emma,Drama|War\nb,Ulysses,Drama\nc,Dubliners,War\n")
    return file


def schema_of(folder: Path) -> FeatureSchema:
    with opened(folder) as (_, records):
        content = records.features()
    assert content is not None
    return FeatureSchema.read(content)


def test_a_server_declares_views_and_carries_the_codes_of_texts(tmp_path: Path, items: Path) -> None:
    make(tmp_path / "server", plan(), str(items), [], ["job=cook,vet"], ["taste=2", "hobby=1"])
    schema = schema_of(tmp_path / "server")
    assert schema.catalogue(3).views == {"taste": ("taste.1", "taste.2"), "hobby": ("hobby.1",)}
    assert schema.people["taste.1"] == Code("number", view="taste")
    assert schema.items["name"].text
    assert {"#em", "emm", "mma", "ma#"} <= set(schema.items["name"].values)


def test_a_number_of_items_goes_to_devices_and_is_not_said_to_be_read(tmp_path: Path) -> None:
    file = tmp_path / "items.csv"
    file.write_text("id,name,genres,year\na,Emma,Drama|War,1815.5\nb,Ulysses,Drama,1922\nc,Dubliners,War,1914\n")
    words = ("--method", "fl-mv-dssm", "--items", file, "--view", "taste=1", "--rounds", 1)
    said = call("server", "init", tmp_path / "server", *words)
    assert "The feature schema for devices has taste.1 of people and genres, year, name of items" in said
    assert "takes in" not in said
    catalogue = schema_of(tmp_path / "server").catalogue(3)
    assert set(plan().method().items(catalogue)) == {"name", "genres"}  # type: ignore[attr-defined]


def test_a_method_that_reads_no_texts_gets_none(tmp_path: Path, items: Path) -> None:
    make(tmp_path / "server", plan("privrec"), str(items), [], ["job=cook,vet"])
    assert set(schema_of(tmp_path / "server").items) == {"genres"}


@pytest.mark.parametrize(
    ("views", "fields", "why"),
    [
        (["taste=0"], {}, "--view takes NAME=SIZE"),
        (["taste"], {}, "--view takes NAME=SIZE"),
        (["../x=3"], {}, "--view takes NAME=SIZE"),
        (["taste=99999"], {}, "--view takes NAME=SIZE"),
        (["taste=2", "taste=3"], {}, "There is a view 'taste' already"),
        (["item=2"], {}, "A view cannot be called item"),
        (["taste=2"], {"views": "taste,hobby"}, "no view of this data 'hobby'"),
        ([], {}, "No feature of people is in a view"),
    ],
)
def test_views_that_a_server_refuses(
    tmp_path: Path, items: Path, views: list[str], fields: dict[str, str], why: str
) -> None:
    with pytest.raises(HomebodyError, match=why):
        make(tmp_path / "server", plan(**fields), str(items), [], [], views)
    assert not (tmp_path / "server").exists()


def test_a_secure_sum_of_views_without_a_range_is_refused(tmp_path: Path, items: Path) -> None:
    stages = ["views:clip=0.5", "secure-sum"]
    recipe = Recipe("fl-mv-dssm", "devices", rounds=1, evaluate_every=0, stages=stages, fields={"views": "taste"})
    with pytest.raises(HomebodyError, match="put a Clip before it, or give its range"):
        make(tmp_path / "server", ServerPlan(recipe, metrics=""), str(items), [], [], ["taste=2"])


@pytest.mark.parametrize("method", ["privrec", "fedmf"])
def test_views_are_refused_where_the_method_has_none(tmp_path: Path, items: Path, method: str) -> None:
    with pytest.raises(HomebodyError, match="leave out --view"):
        make(tmp_path / "server", plan(method), str(items), [], [], ["taste=2"])
