"""`homebody serve measure`: what each way is worth agrees with putting parts together and ranking them one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from homebody.cli import app
from homebody.cli.serve_measure import swept
from homebody.errors import HomebodyError
from homebody.privacy.queries import Query
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.run import execute, reopen
from homebody.serving.measure import measure
from homebody.serving.model import AtHome, Served, interest_of, rank
from homebody.serving.rows import join
from homebody.simulation import Simulator

ASKED = "choice:epsilon=3,interests=4"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = Recipe("fedials", "synthetic:users=60,items=80,mean=14", rounds=3, fields={"factors": 6})
    return Path(execute(recipe, tmp_path_factory.mktemp("runs"))["run"])


def ways(result: dict) -> dict[tuple[str, int | None, str | None], dict]:
    return {(row["way"], row["rows"], row["query"]): row for row in result["ways"]}


def test_figures_are_those_of_parts_that_are_ranked_one_by_one(run: Path) -> None:
    """Every person's part is put together as a device would have it, its own rows included, and ranked by itself."""
    found = ways(measure(run, [Query.parse(ASKED)], rows=[20], seeds=1))
    fitted, population = reopen(run)
    runtime = fitted.runtime
    assert isinstance(runtime, Simulator)
    ids = [population.item_id(item) for item in range(80)]
    model = Served.of_fitted(fitted, "fedials", {"factors": 6}, Query.parse(ASKED), ids=ids)
    shares: dict[str, list[float]] = {"shelf": [], "query": []}
    hits: dict[str, list[float]] = {"shelf": [], "query": []}
    half, lists, number = model.shelf(10), model.lists(10), 0
    for users, *_ in runtime._question_groups():
        for user in users.tolist():
            held = {part: runtime.split.relevant(torch.tensor([user]).numpy(), part)[0] for part in ("valid", "test")}
            mine = [item for item in population.history(user).tolist() if item not in (*held["valid"], *held["test"])]
            person = AtHome([ids[item] for item in mine], local={})
            own = model.rows(mine)
            interest = interest_of(model.head, own, person)
            told = model.head.tell(interest, Rng.of(0, "measure").private.fold(torch.tensor(number)))
            number += 1
            parts = {
                "shelf": model.rows(model.shelf(20)),
                "query": join(model.rows(half), model.rows(lists[int(told)])),
            }
            known = {ids[item] for item in held["valid"]}
            whole = [item for item, _ in rank(model.head, model.rows(), person, 80).items if item not in known]
            for way, part in parts.items():
                given = {*part.ids}
                best = [item for item, _ in rank(model.head, join(part, own), person, 80).items]
                best = [item for item in best if item in given and item not in known][:10]
                shares[way].append(len({*whole[:10]} & {*best}) / 10)
                hits[way].append(float(ids[held["test"][0]] in best))
    for way in ("shelf", "query"):
        row = found[way, 20, ASKED if way == "query" else None]
        # Rows in 8 bits may put another item into the last of ten places.
        assert row["metrics"]["share"] == pytest.approx(sum(shares[way]) / len(shares[way]), abs=0.01)
        assert row["metrics"]["hr@10"] == pytest.approx(sum(hits[way]) / len(hits[way]), abs=0.02)


def test_a_query_stands_beside_as_many_rows_for_everyone(run: Path) -> None:
    result = measure(run, [Query.parse(ASKED), Query.parse("unit:epsilon=3")], rows=[10, 30], seeds=3)
    found = ways(result)
    assert json.loads(json.dumps(result))
    assert found["device", None, None]["metrics"]["share"] == 1.0
    assert found["device", None, None]["metrics"]["tau"] == 0.0
    assert found["table", None, None]["metrics"]["share"] > 0.95
    for rows in (10, 30):
        shelf = found["shelf", rows, None]
        assert shelf["epsilon"] == shelf["epsilon_month"] == 0.0
        for query in (ASKED, "unit:epsilon=3"):
            row = found["query", rows, query]
            assert row["at_zero"] == shelf["metrics"]
            assert row["gain"] == pytest.approx(row["metrics"]["share"] - shelf["metrics"]["share"])
            assert row["epsilon"] == pytest.approx(3.0, abs=0.01)
            assert row["epsilon_month"] <= 90.0
            assert row["bytes"] > shelf["bytes"]
    assert found["shelf", 10, None]["metrics"]["share"] < found["shelf", 30, None]["metrics"]["share"]


def test_without_own_rows_only_items_of_the_part_count(run: Path) -> None:
    kept, left = (ways(measure(run, [Query.parse(ASKED)], rows=[40], seeds=1, own=own)) for own in (True, False))
    for way, query in (("shelf", None), ("query", ASKED)):
        assert left[way, 40, query]["metrics"]["share"] < kept[way, 40, query]["metrics"]["share"]
    everything = ways(measure(run, [], rows=[80], own=False))["shelf", 80, None]
    assert everything["metrics"]["share"] > 0.95


def test_a_method_served_by_its_table_alone_has_no_shelf(tmp_path: Path) -> None:
    recipe = Recipe("dplcf", "synthetic:users=30,items=40,mean=10", rounds=1)
    path = Path(execute(recipe, tmp_path)["run"])
    assert [row["way"] for row in measure(path, [], rows=[5])["ways"]] == ["device", "table"]
    with pytest.raises(HomebodyError, match="leave out --query"):
        measure(path, [Query.parse(ASKED)])


def test_curves_are_queries_and_rows() -> None:
    one, other = Query.parse(ASKED), Query.parse("unit:epsilon=1")
    queries, rows = swept([one, other], 100, ["epsilon=1,2", "rows=50,100", "interests=8"])
    assert rows == [100, 50]
    assert [str(query) for query in queries] == [
        ASKED,
        "unit:epsilon=1",
        "choice:epsilon=1,interests=4",
        "choice:epsilon=2,interests=4",
        "unit:epsilon=2",
        "choice:epsilon=3,interests=8",
    ]
    for text, sentence in (("rows", "NAME=VALUE"), ("size=3", "no curve 'size'"), ("epsilon=x", "a number")):
        with pytest.raises(HomebodyError, match=sentence):
            swept([one], 100, [text])
    with pytest.raises(HomebodyError, match="needs a query"):
        swept([], 100, ["epsilon=1"])


def test_the_command_prints_both_or_one_json_object(run: Path) -> None:
    given = ["serve", "measure", str(run), "--query", ASKED, "--rows", "20", "--seeds", "2"]
    shown = CliRunner().invoke(app, given)
    assert shown.exit_code == 0, shown.output
    assert "Nothing is told: ε = 0" in shown.output
    assert "gain: over the shelf with the same number of rows for everyone" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 120
    told = CliRunner().invoke(app, [*given, "--canaries", "500", "--json"])
    rows = json.loads(told.stdout)["ways"]
    assert [row["way"] for row in rows] == ["device", "table", "shelf", "query"]
    assert 0.5 < rows[3]["epsilon_canaries"] <= rows[3]["epsilon"]
