"""One person's city, job or age must not show in what everyone else's data or model looks like."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from homebody.core import Method
from homebody.data.codes import Code
from homebody.data.splits import Split
from homebody.data.vocabularies import Counted, discrete_laplace
from homebody.errors import HomebodyError
from homebody.privacy import Charge, Entry, Ledger, PureRelease, event_from_json
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.report.statement import MEMBERSHIP, UNRECORDED, statement
from homebody.rng import Rng
from homebody.run import execute, prepare, reopen, resume

VICTIM = 5
SMALL = {"factors": 4, "hidden": "4", "epochs": 1, "adapt_epochs": 2}
NOISE = ["clip:norm=1", "secure-sum", "gaussian:z=4"]
LISTED = {
    "city": "Bonn,Ulm",
    "age": "range:0:120",
    "hobbies": "many:chess,golf",
    "about": "text:hash:512",
    "weather": "sunny,rainy",
}
HASHED = {
    "city": "hash:64",
    "age": "number:40:20",
    "hobbies": "many:hash:64",
    "about": "text:hash:512",
    "weather": "hash:8",
}
AS_FOUND = {"*": "found"}


def written(folder: Path, *, strange: bool, people: int = 40) -> Recipe:
    """People with features and circumstances; the victim has values of their own, or such as others have."""
    folder.mkdir()
    interactions, described = ["user,item,weather"], ["user,city,age,hobbies,about"]
    for user in range(people):
        odd = strange and user == VICTIM
        for step in range(6):
            weather = "apocalyptic" if odd and step == 2 else ("sunny", "rainy")[(user + step) % 2]
            interactions.append(f"u{user:02},i{(user * 3 + step * 2) % 13},{weather}")
        own = "Atlantis,999.5,falconry|chess|fire,the only falconer of Atlantis"
        usual = (
            f"{('Bonn', 'Ulm')[user % 2]},{20.5 + user % 7},{('chess', 'golf')[user % 2]},number {user} who reads books"
        )
        described.append(f"u{user:02},{own if odd else usual}")
    for name, rows in (("mine.csv", interactions), ("users.csv", described)):
        (folder / name).write_text("\n".join(rows) + "\n")
    features = "city,age,hobbies,about,weather"
    return Recipe(
        "privrec",
        str(folder / "mine.csv"),
        rounds=1,
        fields={**SMALL, "features": features},
        user_features=str(folder / "users.csv"),
        split="held-out-users:test=0.1,valid=0",
        held_out="random",
    )


def shapes(method: Any, split: Split) -> dict[str, Any]:
    assert isinstance(method, Method)
    shared = method.init_shared(split.catalogue(), Rng.of(0))
    return {name: tuple(value.shape) for name, value in shared.items() if isinstance(value, torch.Tensor)}


def codes_of_others(split: Split) -> dict[str, list[Any]]:
    """Everyone's numbers but the victim's; what pads is left out."""
    owners = np.repeat(np.arange(split.n_users), split.population.lengths)
    found = {}
    for unit, who in (("users", np.arange(split.n_users)), ("contexts", owners)):
        for name, column in split.encoded[unit].columns.items():
            rows = column.values[who != VICTIM]
            found[name] = [[one for one in np.atleast_1d(row).tolist() if one != -1] for row in rows]
    return found


@pytest.mark.parametrize("vocabularies", [LISTED, HASHED], ids=["listed", "hashed"])
def test_one_persons_values_change_nothing_for_others(tmp_path: Path, vocabularies: dict[str, str]) -> None:
    pair = [
        prepare(replace(written(tmp_path / str(strange), strange=strange), vocabularies=vocabularies))
        for strange in (False, True)
    ]
    assert pair[0][1].learn[VICTIM], "the victim must be one of those who train"
    assert shapes(*pair[0]) == shapes(*pair[1])
    assert codes_of_others(pair[0][1]) == codes_of_others(pair[1][1])
    before, after = ([replace(c, width=1) for c in split.encoded["users"].codes.values()] for _, split in pair)
    assert before == after


def test_values_as_found_do(tmp_path: Path) -> None:
    """What the test above would find where nothing is declared: it can fail."""
    pair = [
        prepare(replace(written(tmp_path / str(strange), strange=strange), vocabularies=AS_FOUND))
        for strange in (False, True)
    ]
    assert shapes(*pair[0]) != shapes(*pair[1])
    assert codes_of_others(pair[0][1]) != codes_of_others(pair[1][1])


@pytest.mark.parametrize(("data", "column", "value"), [("ml-100k", "occupation", "spy"), ("ml-100k", "age", 117)])
def test_named_data_is_declared(real_data: Path, data: str, column: str, value: object) -> None:
    _, split = prepare(Recipe("privrec", data, rounds=1, fields=SMALL, data_dir=str(real_data)))
    people = split.population.user_features
    assert people is not None
    assert all(isinstance(people.declared[name], Code) for name in people.names)
    table = people.table.with_columns(people.table[column].scatter(VICTIM, value))  # type: ignore[arg-type]
    other = replace(split, population=replace(split.population, user_features=replace(people, table=table)))
    assert codes_of_others(other) == codes_of_others(split)
    assert other.encoded["users"].columns[column].size == split.encoded["users"].columns[column].size


def test_circumstances_of_named_data_are_declared(real_data: Path) -> None:
    _, split = prepare(Recipe("privrec", "frappe", rounds=1, fields=SMALL, data_dir=str(real_data), held_out="random"))
    around = split.population.contexts
    assert around is not None
    assert all(isinstance(around.declared[name], Code) for name in around.names)
    assert not any("vocabulary does not list" in note for note in split.encoded["contexts"].notes)
    mine = np.flatnonzero(np.repeat(np.arange(split.n_users), split.population.lengths) == VICTIM)
    table = around.table.with_columns(around.table["country"].scatter(mine, "Atlantis"))
    other = replace(split, population=replace(split.population, contexts=replace(around, table=table)))
    for name, column in other.encoded["contexts"].columns.items():
        before = split.encoded["contexts"].columns[name]
        assert column.size == before.size
        assert np.array_equal(np.delete(column.values, mine), np.delete(before.values, mine))


def test_a_finite_epsilon_over_values_that_nobody_declared_is_refused(tmp_path: Path) -> None:
    recipe = replace(written(tmp_path / "own", strange=True), stages=NOISE)
    with pytest.raises(HomebodyError) as refused:
        prepare(recipe)
    for option in (
        "city=hash:64",
        "age=range:LOW:HIGH",
        "hobbies=many:hash:64",
        "about=text:hash:4096",
        "weather=hash",
    ):
        assert f"--vocabulary {option}" in str(refused.value)
    prepare(replace(recipe, stages=[]))  # nothing is claimed
    prepare(replace(recipe, vocabularies=HASHED))
    prepare(replace(recipe, vocabularies=AS_FOUND))
    prepare(replace(recipe, fields={**SMALL, "features": "none"}))  # nothing of people is looked at


def test_the_statement_names_what_is_left(tmp_path: Path) -> None:
    recipe = replace(written(tmp_path / "own", strange=True), stages=NOISE)
    hashed, found = (
        statement(RunFolder.open(Path(execute(replace(recipe, vocabularies=said), tmp_path / "runs")["run"])))
        for said in (HASHED, {**HASHED, "city": "found", "weather": "found"})
    )
    catalogue = "The catalogue is derived from interactions: its 13 items and their features are known because somebody"
    for outside in (hashed["outside"], found["outside"]):
        assert MEMBERSHIP in outside
        assert any(line.startswith(catalogue) for line in outside)
    sentence = "The values of city, weather, and the scale of numbers, are those of the people who train"
    assert any(line.startswith(sentence) for line in found["outside"])
    assert not any("those of the people who train" in line for line in hashed["outside"])


def test_a_private_vocabulary_is_charged_once_before_training(tmp_path: Path) -> None:
    vocabularies = {**HASHED, "city": "private:8:1e-7", "weather": "private:6:1e-8"}
    recipe = replace(written(tmp_path / "own", strange=True), vocabularies=vocabularies, stages=NOISE)
    run = Path(execute(recipe, tmp_path / "runs")["run"])
    resume(run)  # a complete run says its result, and charges nothing
    ledger = Ledger(RunFolder.open(run).ledger_path)
    entries = ledger.entries()
    assert [entry.release for entry in entries[:6:3]] == ["vocabulary of city", "vocabulary of weather"]
    city = {entry.observer: event_from_json(entry.event) for entry in entries[:3]}
    assert city["public"] == city["clients"] == PureRelease(8.0, 1e-7)
    assert city["server"].kind == "not-private"
    rounds = [entry for entry in entries if entry.release.startswith("train/") and entry.observer == "public"]
    alone = Ledger()
    alone.charge("train/1", [_charge(entry) for entry in rounds])
    assert ledger.epsilon("public", delta=1e-6).epsilon > alone.epsilon("public", delta=1e-6).epsilon
    ledger.close()
    said = statement(RunFolder.open(run))
    assert {row["observer"]: row for row in said["certified"]}["public"]["epsilon_of_one_round"] < 8.0
    lines = said["ledger"]["lines"]
    assert [line["rounds"] for line in lines[:2]] == ["vocabulary of city", "vocabulary of weather"]


def _charge(entry: Entry) -> Charge:
    return Charge(entry.observer, entry.unit, event_from_json(entry.event), entry.part)


def test_a_budget_and_its_noise_count_private_vocabularies(tmp_path: Path) -> None:
    own = written(tmp_path / "own", strange=True)
    stages = ["clip:norm=1", "secure-sum", "gaussian"]
    found = {}
    for city in ("hash:64", "private:1"):
        recipe = replace(
            own, vocabularies={**HASHED, "city": city}, stages=stages, budget="eps=6,delta=1e-5", calibrate=True
        )
        result = execute(recipe, tmp_path / "runs")
        found[city] = result
        assert result["epsilon"]["public"] <= 6.0
        assert result["stopped"] is None
    noise = [float(one["stages"][-1].partition("z=")[2].partition(",")[0]) for one in found.values()]
    assert noise[1] > noise[0]
    hopeless = replace(own, vocabularies={**HASHED, "city": "private:9"}, stages=NOISE, budget="eps=6")
    with pytest.raises(HomebodyError, match="less than the first round"):
        prepare(hopeless)
    local = replace(hopeless, stages=["clip:norm=1,order=1", "laplace:b=4"], budget="eps=1e9,observer=server")
    with pytest.raises(HomebodyError, match="the server counts people's values of city before it adds noise"):
        prepare(local)


def test_a_private_vocabulary_holds_what_many_have_and_nothing_that_one_has(tmp_path: Path) -> None:
    """40 people at ε = 8: noise of scale 1/4, a threshold of 6, and 20 people in each city: by the seed."""
    recipe = replace(written(tmp_path / "own", strange=True), vocabularies={**HASHED, "city": "private:8"})
    _, split = prepare(recipe)
    assert split.encoded["users"].codes["city"].values == ("Bonn", "Ulm")
    recipe = replace(recipe, vocabularies={**HASHED, "weather": "private:8"})
    _, split = prepare(recipe)
    assert split.encoded["contexts"].codes["weather"].values == ("rainy", "sunny")


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
def test_the_private_vocabulary_is_as_private_as_it_is_charged(epsilon: float) -> None:
    """(ε, δ) under replace-one, by the exact probabilities of the released sets of two neighbouring data sets.

    A value is kept with P(count + noise ≥ threshold), by itself. Replacing a person takes one from one count and adds
    one to another. Hockey-stick divergence over the four outcomes of the two values, both ways.
    """
    delta = 1e-6
    private = Counted(epsilon, delta)

    def kept(count: int) -> float:
        if not count:
            return 0.0
        need = private.threshold - count
        tail = math.exp(-max(need, 1 - need) / private.scale) / (1 + math.exp(-1 / private.scale))
        return tail if need >= 1 else 1 - tail

    for one in (1, 2, 3, private.threshold - 1, private.threshold, private.threshold + 9):
        for other in (0, 1, 2, private.threshold - 1, private.threshold + 3):
            before, after = (kept(one), kept(other)), (kept(one - 1), kept(other + 1))
            for p, q in ((before, after), (after, before)):
                lost = 0.0
                for first in (True, False):
                    for second in (True, False):
                        had, has = (
                            math.prod(
                                prob if is_kept else 1 - prob
                                for prob, is_kept in zip(pair, (first, second), strict=True)
                            )
                            for pair in (p, q)
                        )
                        lost += max(0.0, had - math.exp(epsilon) * has)
                assert lost <= delta * (1 + 1e-9)


def test_noise_on_counts_has_the_distribution_that_the_threshold_counts_on() -> None:
    """By the seed: 200,000 draws, each of 5 tails within 5 standard errors."""
    drawn = discrete_laplace(2.0, 200_000, Rng.of(5))
    for k in (0, 1, 2, 5, 12):
        tail = math.exp(-k / 2) / (1 + math.exp(-1 / 2))
        assert float((drawn >= k).mean()) == pytest.approx(tail, abs=5 * math.sqrt(tail / 200_000))
        assert float((drawn <= -k).mean()) == pytest.approx(tail, abs=5 * math.sqrt(tail / 200_000))


def test_a_run_belongs_to_the_vocabulary_that_it_began_with(tmp_path: Path) -> None:
    """Also where nobody has the value that was added: the model has a row for it."""
    (tmp_path / "cities.txt").write_text("Bonn\nUlm\n")
    own = written(tmp_path / "own", strange=False)
    recipe = replace(own, vocabularies={**HASHED, "city": f"file:{tmp_path / 'cities.txt'}"})
    run = Path(execute(recipe, tmp_path / "runs")["run"])
    reopen(run)
    (tmp_path / "cities.txt").write_text("Bonn\nUlm\nAtlantis\n")
    with pytest.raises(HomebodyError, match="The data changed since"):
        reopen(run)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"city": "hash:0"}, "The vocabulary of 'city' is found, VALUE,VALUE"),
        ({"city": "range:0:1"}, "'city' of .* must hold numbers"),
        ({"*": "hash:9"}, "takes only the vocabulary 'found'"),
        ({"town": "hash:9"}, "There is no feature 'town'"),
        ({"city": "file:/no/such/file"}, "cannot be read"),
        ({"city": "private:0"}, "needs ε above 0"),
        ({"city": "private:1:1e-15"}, "needs ε above 0 and at most 15, and δ from 9e-12"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, said: dict[str, str], sentence: str) -> None:
    with pytest.raises(HomebodyError, match=sentence):
        prepare(replace(written(tmp_path / "own", strange=False), vocabularies=said))


def test_a_run_of_the_first_schema_opens_as_it_was(tmp_path: Path) -> None:
    """Its recipe says nothing of vocabularies: they were found, and the statement says that nobody wrote it down."""
    recipe = replace(written(tmp_path / "own", strange=True), vocabularies=AS_FOUND, stages=NOISE)
    run = Path(execute(recipe, tmp_path / "runs")["run"])
    lines = (run / "recipe.toml").read_text().replace("schema = 2", "schema = 1")
    (run / "recipe.toml").write_text(lines.replace('[vocabularies]\n"*" = "found"\n', ""))
    assert "found" not in (run / "recipe.toml").read_text()
    folder = RunFolder.open(run)
    environment = folder.read_json("environment.json")
    environment.pop("outside")
    folder.write_json("environment.json", environment)
    fitted, _ = reopen(run)
    assert fitted.shared
    assert UNRECORDED in statement(folder)["outside"]
