"""`homebody inspect`: one message, for people and for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.typed import typed

DATA = ["--data", "synthetic:users=60,items=40,mean=10"]


def called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0
) -> tuple[str, str]:
    return typed(monkeypatch, capsys, "inspect", *arguments, code=code)


def test_a_table_in_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stages = ["--stage", "clip:norm=0.5", "--stage", "secure-sum", "--stage", "gaussian:z=1", "--cohort", "20"]
    text, _ = called(monkeypatch, capsys, "fedmf", *DATA, "--user", "3", *stages)
    table, _, rest = text.partition("Behind the secure sum")
    assert rest
    assert max(map(len, table.splitlines())) <= 80
    for words in ("one message of user 3, 5,120 bytes", "40 × 32", "int32", "Only the sum over the 20 people"):
        assert words in table
    assert "Gaussian noise, 1 × the ℓ2 sensitivity" in " ".join(table.split())
    assert "The server sees the sum of 14 of 20 parties or more, and never a single vector." in rest
    assert "Assumed: no more than 2 of 20 parties collude with the server." in rest


def test_a_round_has_as_many_people_as_a_run_of_the_method_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, people in ((), 30), (("--cohort", "20"), 20):
        text = " ".join(called(monkeypatch, capsys, "dp-privrec", *DATA, *given)[0].split())
        assert f"Only the sum over the {people} people" in text
        assert f"{people} of 60 drawn" in text


def test_a_request_for_rows_and_what_it_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asking = ["pfedrec", *DATA, "--set", "negatives=1", "--user", "3", "--stage", "ask-rows"]
    text, _ = called(monkeypatch, capsys, *asking)
    (request,) = json.loads(called(monkeypatch, capsys, *asking, "--json")[0])["requests"]
    table, _, rest = text.partition("The device asks for")
    assert max(map(len, table.splitlines())) <= 80
    assert f"{request['rows']} of 40 rows of 'item': {request['own']} are this person's own items" in rest
    assert "request for item" in table
    assert [line["rounds"] for line in request["always"]] == [1, 2, 3, 5, 10]
    shown = [line.split() for line in table.splitlines()]
    for line in request["always"]:
        figures = [str(line[name]) for name in ("rounds", "rows", "own")]
        assert [*figures, f"{line['precision']:.3f}", "1.000"] in shown


def test_one_json_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text, error = called(monkeypatch, capsys, "pfedrec", *DATA, "--set", "factors=2", "--seed", "5", "--json")
    assert error == ""
    found = json.loads(text)
    assert (found["method"], found["seed"], found["user"]) == ("pfedrec", 5, "0")
    (part,) = found["parts"]
    assert part["name"] == "item"
    assert part["bytes"] == found["bytes"] == part["shape"][0] * (4 + 2 * 4)
    assert list(found["observers"]) == ["server", "clients", "public"]
    other = json.loads(called(monkeypatch, capsys, "pfedrec", *DATA, "--set", "factors=2", "--user", "1", "--json")[0])
    assert other["parts"] != found["parts"]


def test_people_are_called_as_their_file_calls_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "loans.csv"
    rows = [f"{who},{book}" for who in ("ann", "bob", "cy") for book in "pqrst"]
    file.write_text("\n".join(["user,item", *rows]) + "\n")
    text, _ = called(monkeypatch, capsys, "fedmf", "--data", str(file), "--user", "bob", "--json")
    assert json.loads(text)["user"] == "bob"
    _, error = called(monkeypatch, capsys, "fedmf", "--data", str(file), "--user", "dan", code=2)
    assert error.strip().endswith("homebody: There is no user 'dan' in this population; the first is called ann.")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["popularity"], "popularity is a centralised reference: it collects whole histories"),
        (["fedmf", "--stage", "gaussian:z=1"], "Gaussian noise needs a bound on what one person can change"),
        (["fedmf", "--user", "600"], "There is no user '600' in this population"),
        (["fedmf", "--split", "held-out-users", "--user", "0"], "takes no part in training with this split"),
        (["fedials", "--stage", "ask-rows"], "FedIALS needs its shared parameters whole and cannot ask for rows"),
        (["fedfm"], "There is no method 'fedfm'; did you mean 'fedmf'?"),
    ],
)
def test_errors_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    if "--split" in arguments:  # whoever is held out depends on the seed: take one who is
        from homebody.recipe import Recipe
        from homebody.run import prepare

        _, split = prepare(Recipe("fedmf", DATA[1], split="held-out-users"))
        arguments = [*arguments[:-1], str(int((~split.learn).argmax()))]
    _, error = called(monkeypatch, capsys, *arguments, *DATA, code=2)
    last = error.strip().splitlines()[-1]
    assert last.startswith("homebody: ")
    assert sentence in last


def test_reports_bit_by_bit_in_80_columns_and_all_of_them_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["fmf-ldp", *DATA, "--user", "3", "--stage", "one-bit:epsilon=2.5,k=30", "--stage", "shuffle"]
    text, _ = called(monkeypatch, capsys, *asked)
    found = json.loads(called(monkeypatch, capsys, *asked, "--json")[0])["reports"]
    assert (found["k"], len(found["reports"]), found["entries"]) == (30, 30, 200)
    table, _, rest = text.partition("and 24 more; --json has all")
    assert max(map(len, table.splitlines())) <= 80
    assert "30 reports of one bit, ε = 2.5 each, about 200 entries" in table
    assert "30 of 200 entries" in table
    assert " rows" not in table
    first = next(one for one in found["reports"] if one["own"])
    assert first is not found["reports"][0]
    others = [one for one in found["reports"] if one is not first]
    lines = [bytes.fromhex(one["plain"]).hex(" ") for one in [first, *others[:5]]]
    assert sorted(lines, key=table.index) == lines
    assert "\nthe first is about an item that this person has\n" in rest
    assert f"bit by bit: {first['binary']}\n" in rest
    words = " ".join(rest.split())
    assert "30 sealed reports of 52 bytes, 1,697 bytes in all" in words
    assert "Reads 0 of them" in words
    assert "No sender" in words
    assert found["sealed"]["bytes"] == 1697
    few = ["fedmf", *DATA, "--stage", "one-bit:epsilon=1,k=4"]
    plain, _ = called(monkeypatch, capsys, *few)
    four = json.loads(called(monkeypatch, capsys, *few, "--json")[0])["reports"]
    assert "4 reports of one bit" in plain
    assert "sealed" not in plain
    assert ("the first is about an item" in plain) == any(one["own"] for one in four["reports"])
    assert "more; --json" not in plain
