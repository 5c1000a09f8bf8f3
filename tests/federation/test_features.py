"""Features on devices: people's are encoded there and stay there, items' come from the server."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from homebody.cli import app
from homebody.core import Data, Tree
from homebody.data import load
from homebody.data.codes import Code, Scale
from homebody.data.partitions import everything
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.device.device import Device
from homebody.federation.device.home import Home
from homebody.federation.device.household import recommend
from homebody.federation.schema import FeatureSchema
from homebody.federation.server.admin import backup, make, opened, person_code
from homebody.federation.server.plan import ServerPlan
from homebody.methods.privrec import PrivRec
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.training import fit

FIELDS = {"factors": 3, "hidden": "4", "epochs": 2, "negatives": 2}
METHOD = PrivRec(factors=3, hidden="4", epochs=2, negatives=2)
ITEMS = [(f"i{n}", f"Item {n}") for n in range(12)]
SHEET = FeatureSchema(
    {
        "job": Code("one", ("cook", "vet")),
        "hobbies": Code("many", ("chess", "golf")),
        "age": Code("number", scale=Scale(1.0, 40.0, 10.0)),
    },
    {"colour": Code("one", ("blue", "red")), "tags": Code("many", ("new", "old"), width=2)},
    {"colour": np.arange(12) % 3, "tags": np.tile(np.array([[1, -1], [1, 2]]), (6, 1))},
)
MINE = {"job": "vet", "hobbies": "golf|go", "age": "55"}
CODED = {"job": torch.tensor(2), "hobbies": torch.tensor([2]), "age": torch.tensor(1.5)}
DESCRIBED = {
    "run": "feedbeef00",
    "method": "privrec",
    "fields": FIELDS,
    "stages": [],
    "seed": 1,
    "protocol": "strict",
    "held_out": None,
    "negatives": 5,
    "cutoffs": [3],
    "measures": False,
    "features": SHEET.digest,
}


def letter(do: str, shared: Tree, *, sheet: bytes | None = SHEET.content, **more: Any) -> bytes:
    content = wire.encode_tree(shared)
    parts = {"items": json.dumps([0, ITEMS]).encode(), "shared": content}
    header = {
        **DESCRIBED,
        "do": do,
        "release": "train/1",
        "step": 1,
        "key": 18,
        "clients_key": 5,
        "keep": None,
        "n_items": 12,
        "half": False,
        "first": 40,
        "people": [40],
        "shared": wire.digest(content),
        **more,
    }
    return wire.encode_letter(header, parts if sheet is None else {**parts, "features": sheet})


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home.create(tmp_path / "device", server="127.0.0.1:9092") as home:
        home.people.add("ann")
        for time, item in enumerate((7, 3, 5, 1, 10)):
            home.history.append("ann", f"i{item}", time=time)
        yield home


@pytest.fixture
def shared() -> Tree:
    return METHOD.init_shared(SHEET.catalogue(12), Rng.of(0))


def ann() -> Data:
    items = torch.tensor([7, 3, 5, 1, 10])
    return Data(items, torch.ones(5, dtype=torch.bool), items.sort().values, SHEET.catalogue(12), CODED)


def test_a_person_trains_with_their_features_and_none_of_them_leaves(home: Home, shared: Tree) -> None:
    home.people.describe("ann", MINE)
    header, parts = wire.decode_letter(answer := Device(home).answer(letter("train", shared)))
    update = wire.decode_tree(parts["40"])
    batch = METHOD.prepare(ann(), Rng(torch.tensor(18)).fold(torch.tensor(40)))
    wanted, _ = METHOD.client(shared, {}, batch)
    for name, value in wanted.items():
        torch.testing.assert_close(update[name], value, rtol=0, atol=1e-6)
    assert header["holds"] == [wire.digest(wire.encode_tree(shared)), SHEET.digest]
    assert not any(word in answer for word in (b"vet", b"golf", b"job", b"55", b"ann"))


def test_what_is_said_changes_the_update_and_what_is_not_is_unknown(home: Home, shared: Tree) -> None:
    def told(**profile: str) -> Tree:
        fields = {name: profile.get(name) for name in ("job", "hobbies", "age", "shoe")}
        home.people.describe("ann", fields)
        with home.store.writing():  # asked the same it would give the answer of before
            for table in ("answer", "mark", "begun"):
                home.store.connection.execute(f"DELETE FROM {table}")
        return wire.decode_tree(wire.decode_letter(Device(home).answer(letter("train", shared)))[1]["40"])

    bare = told()
    assert torch.equal(told(shoe="43", job="astronaut", age="old")["feature"], bare["feature"])
    assert not torch.equal(told(job="vet")["feature"], bare["feature"])
    assert not torch.equal(told(age="55")["layers"], bare["layers"])


def test_a_new_person_gets_recommendations_from_five_clicks_without_training(home: Home, shared: Tree) -> None:
    home.people.describe("ann", MINE)
    Device(home).answer(letter("adapt", shared, people=[]))
    assert not home.outbox.sent("ann")
    best = recommend(home, home.people.find("ann"), 12)
    rng = Rng(torch.tensor(5))
    adapted = METHOD.adapt(shared, {}, METHOD.prepare(ann(), rng.fold("adapt").fold(torch.tensor(40))))
    scores = METHOD.score(shared, adapted, ann(), torch.arange(12))
    assert {one.item for one in best} == {f"i{n}" for n in (0, 2, 4, 6, 8, 9, 11)}
    for one in best:
        assert one.score == pytest.approx(float(scores[int(one.item[1:])]), abs=1e-5)
    home.people.describe("ann", {"age": None})
    assert recommend(home, home.people.find("ann"), 12) != best


def test_without_any_clicks_the_common_start_ranks(home: Home, shared: Tree) -> None:
    home.people.add("bob")
    Device(home).answer(letter("adapt", shared, people=[]))
    unknown = {"job": torch.tensor(0), "hobbies": torch.tensor([-1]), "age": torch.tensor(0.0)}
    scores = METHOD.score(shared, {}, ann()._replace(features=unknown), torch.arange(12))
    assert {one.item: one.score for one in recommend(home, home.people.find("bob"), 12)} == pytest.approx(
        {f"i{n}": float(score) for n, score in enumerate(scores)}, abs=1e-5
    )


def test_a_device_says_that_it_lacks_the_features_and_takes_no_others(home: Home, shared: Tree) -> None:
    device = Device(home)
    assert wire.decode_letter(device.answer(letter("train", shared, sheet=None)))[0]["lacks"] == "features"
    other = replace(SHEET, people={}).content
    assert "not the one that the letter names" in str(
        wire.decode_letter(device.answer(letter("train", shared, sheet=other)))
    )
    assert home.items.schema() is None
    assert "lacks" not in wire.decode_letter(device.answer(letter("train", shared)))[0]
    assert "lacks" not in wire.decode_letter(device.answer(letter("adapt", shared, sheet=None)))[0]
    bare = METHOD.init_shared(replace(SHEET, people={}).catalogue(12), Rng.of(0))
    assert "another shape than the method's" in str(wire.decode_letter(device.answer(letter("train", bare))))


@pytest.mark.parametrize(
    "numbers",
    [
        {"colour": np.full(12, 3), "tags": SHEET.numbers["tags"]},
        {"colour": np.full(12, -1), "tags": SHEET.numbers["tags"]},
        {"colour": np.zeros(12, dtype=np.float32), "tags": SHEET.numbers["tags"]},
        {"colour": SHEET.numbers["colour"], "tags": np.full((12, 2), 3)},
        {"colour": SHEET.numbers["colour"], "tags": np.full((12, 3), -1)},
        {"colour": SHEET.numbers["colour"]},
        {"colour": SHEET.numbers["colour"][:5], "tags": SHEET.numbers["tags"]},
    ],
)
def test_a_sheet_whose_numbers_do_not_fit_is_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(wire.Malformed):
        FeatureSchema.read(replace(SHEET, numbers=numbers).content)


@pytest.mark.parametrize(
    "codes",
    [b"nonsense", b"[]", b'{"people": {}, "items": {"a": {"kind": "odd"}}}', b'{"people": {"a": 1}, "items": {}}'],
)
def test_a_sheet_that_is_none_is_refused(codes: bytes) -> None:
    with pytest.raises(wire.Malformed):
        FeatureSchema.read(wire.encode_letter({}, {"codes": codes, "items": wire.encode_tree({})}))


def test_items_that_came_later_have_unknown_features() -> None:
    found = SHEET.catalogue(14).items
    assert found["colour"].values.tolist()[-3:] == [2, 0, 0]
    assert found["tags"].values.tolist()[-3:] == [[1, 2], [-1, -1], [-1, -1]]
    assert SHEET.catalogue(3).items["colour"].values.tolist() == [0, 1, 2]


def test_profiles_are_set_read_and_taken_back(home: Home, shared: Tree) -> None:
    def call(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["client", "profile", str(home.path), *words])
        return done.exit_code, done.output if done.exception is None else f"{done.output}{done.exception}"

    assert call("ann") == (0, "ann: nothing is said\n")
    assert call("ann", "--set", "age=55", "--set", "job=astronaut") == (0, "ann: age=55, job=astronaut\n")
    Device(home).answer(letter("adapt", shared, people=[]))
    _, text = call("ann", "--set", "job=spy", "--set", "shoe=43", "--json")
    told = json.loads(text)
    assert told["profile"] == {"age": "55", "job": "spy", "shoe": "43"}
    assert told["notes"] == [
        "The server's model has no feature 'shoe' (it has job, hobbies, age): it counts for nothing.",
        "'spy' is no job that training knows; it counts as unknown.",
    ]
    assert call("ann", "--forget", "shoe", "--forget", "job") == (0, "ann: age=55\n")
    assert "ann has no feature 'shoe' to remove" in call("ann", "--forget", "shoe")[1]
    assert "in both --set and --forget" in call("ann", "--forget", "age", "--set", "age=3")[1]
    assert "no person 'eve'" in call("eve", "--set", "age=3")[1]
    home.people.opt_out("ann", delete_history=True)
    assert home.people.profile("ann") == {}


def test_an_operator_says_which_features_there_are(tmp_path: Path) -> None:
    items = tmp_path / "items.csv"
    items.write_text("id,name,colour,tags\na,A,red,new|old\nb,B,,old\na,A,blue,new\nc,C,blue,\n")
    plan = ServerPlan(Recipe("privrec", "devices", fields=FIELDS, rounds=1, evaluate_every=0))
    made = make(tmp_path / "server", plan, str(items), [], ["gender=F,M", "age=number:40:10", "hobbies=many:chess"])
    assert made["features"] == {"people": ["gender", "age", "hobbies"], "items": ["colour", "tags"]}
    with opened(tmp_path / "server") as (_, records):
        content = records.features()
        backup(records, tmp_path / "copy.sqlite")
    assert content is not None
    found = FeatureSchema.read(content)
    assert found.people["age"].of("age", 60)[0] == 2.0
    assert found.catalogue(3).items["colour"].values.tolist() == [2, 0, 1]  # the first of two rows of a counts
    assert found.catalogue(3).items["tags"].values.tolist() == [[1, 2], [2, -1], [-1, -1]]
    copied = sqlite3.connect(tmp_path / "copy.sqlite").execute("SELECT content FROM sheet").fetchone()
    assert bytes(copied[0]) == content


def test_what_cannot_be_is_refused_when_a_server_is_made(tmp_path: Path) -> None:
    plain = ServerPlan(Recipe("fedmf", "devices", rounds=1))
    with pytest.raises(HomebodyError, match="fedmf does not look at features: leave out --person-feature"):
        make(tmp_path / "a", plain, None, [], ["gender=F,M"])
    assert "features" not in make(tmp_path / "b", plain, "synthetic:users=5,items=9,mean=5", [])
    with pytest.raises(HomebodyError, match="There is no feature of this data 'genre'"):
        make(
            tmp_path / "c",
            ServerPlan(Recipe("privrec", "devices", fields={"features": "genre"})),
            None,
            [],
            ["gender=F,M"],
        )
    with pytest.raises(HomebodyError, match="--person-feature gives a feature twice"):
        make(tmp_path / "d", ServerPlan(Recipe("privrec", "devices")), None, [], ["gender=F,M", "gender=F"])
    with pytest.raises(HomebodyError, match="devices measure rankings alone: leave out --set output=explicit"):
        make(tmp_path / "e", ServerPlan(Recipe("privrec", "devices", fields={"output": "explicit"})), None, [])
    for text in ("gender", "=F", "gender=", "age=number:40", "age=number:40:0", "age=number:a:b", "gender=F,,M"):
        with pytest.raises(HomebodyError, match="--person-feature takes NAME=VALUE,VALUE"):
            person_code(text)


def test_privrec_trains_over_devices_with_features_and_serves_a_newcomer(world: Callable[..., Any]) -> None:
    population = load("synthetic:users=5,items=14,mean=6")
    colours = [("red", "blue")[n % 2] for n in range(14)]
    recipe = Recipe("privrec", "devices", fields=FIELDS, rounds=2, evaluate_every=0, seed=3)
    there = world(
        *(population, 2, recipe),
        columns={"colour": colours},
        person_features=["job=cook,vet", "age=number:40:10"],
        least=4,
    )
    profiles = [{"job": "vet"}, {"age": "70"}, {"job": "cook", "age": "20"}, {}, {"job": "poet"}]
    for folder in there.devices:
        with Home(folder) as home:
            for person in home.people.all():
                home.people.describe(person, profiles[int(person.name.rpartition(" ")[2])])
    newcomer = there._device(2, [0])
    with opened(there.server) as (_, records):
        content = records.features()
    assert content is not None
    there.start("server", "device0", "device1")
    there.wait_for("server", "published")
    there.start("device2")
    there.wait_for("device2", "answered", do="adapt")
    shared = there.shared()
    there.stop()
    sheet = FeatureSchema.read(content)
    split = replace(everything(population, seed=3), coded=sheet.encoded(profiles, 14))
    wanted = fit(recipe.build(), Simulator(split), rounds=2, seed=3, evaluate_every=0)  # type: ignore[arg-type]
    for name, value in wanted.shared.items():
        torch.testing.assert_close(shared[name], value, rtol=0, atol=1e-5)
    with Home(newcomer) as home:
        before = recommend(home, home.people.find(0), 20)
        assert {one.item for one in before} == {f"i{n}" for n in range(14) if n not in population.history(0)}
        home.people.describe(0, {"job": "vet", "age": "30"})
        assert recommend(home, home.people.find(0), 20) != before
