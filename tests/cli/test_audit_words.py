"""`homebody audit RUN --attack words` and `homebody inspect` of news recommenders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.typed import typed

from homebody.privacy.impressions import ImpressionReport
from homebody.recipe import Recipe
from homebody.run import execute

PEOPLE, ITEMS = 60, 40
Call = Any


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interactions, titles and impressions: everyone clicks the first of six that they are shown."""
    folder, draw = tmp_path_factory.mktemp("news"), np.random.default_rng(0)
    clicks, shown = ["user,item,time"], ["impression,user,item,clicked,time"]
    for user in range(PEOPLE):
        items = draw.permutation(ITEMS)
        clicks += [f"u{user},n{item},{time}" for time, item in enumerate(items[:5])]
        clicks.append(f"u{user},n{items[5]},100")
        shown += [f"{user},u{user},n{item},{int(place == 0)},100" for place, item in enumerate(items[5:11])]
    titles = [f"n{item},{' '.join(f'w{word}' for word in draw.integers(300, size=5))}" for item in range(ITEMS)]
    for name, lines in (("clicks", clicks), ("shown", shown), ("news", ["item,title", *titles])):
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


def recipe(files: Path, method: str, **fields: object) -> Recipe:
    small = {"d": 8, "heads": 2, "words": "random", "encoder": "nrms"}
    small |= {} if fields.get("guarantee", "published") == "published" else {"encoder": "id", "steps": 2}
    return Recipe(
        method,
        str(files / "clicks.csv"),
        split="impressions-people:test=0.2,valid=0.2",
        rounds=1,
        item_features=str(files / "news.csv"),
        impressions=str(files / "shown.csv"),
        kinds={"title": "sequence"},
        fields={**small, **fields},
    )


@pytest.fixture(scope="module")
def runs(files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("runs")
    recipes = {
        "fedrec": recipe(files, "fedrec"),
        "published": recipe(files, "privaterec", guarantee="published"),
        "certified": recipe(files, "privaterec", guarantee="certified", epsilon=2.0),
        "other": Recipe("fedmf", "synthetic:users=60,items=40,mean=10", rounds=1, fields={"factors": 4}),
    }
    return {name: Path(execute(one, out, name=name)["run"]) for name, one in recipes.items()}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: object, code: int = 0) -> str:
        out, error = typed(monkeypatch, capsys, *arguments, code=code)
        return out if code != 2 else error

    return run


@pytest.mark.parametrize("name", ["fedrec", "published"])
def test_words_are_read_off_gradients(call: Call, runs: dict[str, Path], name: str) -> None:
    found = json.loads(call("audit", runs[name], "--attack", "words", "--users", 15, "--json"))
    assert (found["attack"], found["kind"], found["users"]) == ("words", "words", 15)
    assert found["precision"][0] >= 0.95
    assert found["recall"][0] >= 0.95
    assert found["epsilon"]["server"] == "inf"
    text = call("audit", runs[name], "--attack", "words", "--users", 15)
    assert "which words were clicked? 15 clients" in text
    assert "most frequent words" in text
    assert "…" not in text
    assert max(map(len, text.partition("read from")[0].splitlines())) <= 80


def test_reports_are_played_against_one_another(call: Call, runs: dict[str, Path]) -> None:
    options = ("--attack", "words", "--trials", 2000, "--confidence", 0.999)
    found = json.loads(call("audit", runs["certified"], *options, "--json"))
    assert [one["certified"] for one in found["questions"]] == [2.0, 2.0, 2.0, 4.0]
    assert all(one["lower"]["epsilon"] <= one["certified"] for one in found["questions"])
    assert not found["contradicted"]
    assert found["epsilon"]["server"] == pytest.approx(4.0)
    text = call("audit", runs["certified"], *options)
    assert "2,000 reports for each question" in text
    assert "CONTRADICTED" not in text
    assert "…" not in text
    assert max(map(len, text.partition("one past click:")[0].splitlines())) <= 80


def test_a_contradiction_ends_with_code_1(call: Call, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    right = ImpressionReport.device
    monkeypatch.setattr(ImpressionReport, "device", lambda self, told, rng: right(ImpressionReport(9.0), told, rng))
    text = call("audit", runs["certified"], "--attack", "words", "--trials", 2000, code=1)
    assert "ABOVE" in text
    assert "CONTRADICTED: a report tells more than its certified ε allows" in text


def test_canaries_report_too(call: Call, runs: dict[str, Path]) -> None:
    found = json.loads(call("audit", runs["certified"], "--attack", "canary", "--canaries", 300, "--json"))
    server, clients, public = found["observers"]
    assert 0.5 < server["at_least"] <= server["certified"] == pytest.approx(4.0)
    assert clients["lower"] is public["lower"] is None
    text = call("audit", runs["certified"], "--attack", "canary", "--canaries", 300)
    assert "clients: the final model does not hold updates as they were sent, so nothing is measured" in text
    assert "…" not in text


def test_refusals(call: Call, runs: dict[str, Path]) -> None:
    assert "FedMF trains no encoder of news" in call("audit", runs["other"], "--attack", "words", code=2)
    assert "Trials and confidence are for models that send reports" in call(
        "audit", runs["fedrec"], "--attack", "words", "--trials", 500, code=2
    )
    assert "--canaries is not for --attack words" in call(
        "audit", runs["fedrec"], "--attack", "words", "--canaries", 500, code=2
    )


class TestInspect:
    def shown(self, call: Call, files: Path, method: str, *settings: str) -> str:
        data = ("--data", files / "clicks.csv", "--split", "impressions-people:test=0.2,valid=0.2")
        data += (
            "--impressions",
            files / "shown.csv",
            "--item-features",
            files / "news.csv",
            "--kind",
            "title=sequence",
        )
        small = ("d=8", "heads=2", "words=random", *settings)
        return str(call("inspect", method, *data, *(part for one in small for part in ("--set", one))))

    def test_a_choice(self, call: Call, files: Path) -> None:
        text = " ".join(self.shown(call, files, "privaterec", "encoder=id").split())
        assert "found on the device" in text
        assert text.count(" of 16") >= 2
        assert "This report, in which interest and click are randomised, and whose it is." in text
        assert "It says: of 16 basis vectors, number" in text
        assert "true with probability 0.908, otherwise any other; ε = 5 whatever the history is" in text
        assert "It says: of 6 news that were shown," in text
        assert "it takes 143 bytes, whatever the history is" in text
        assert "One user: a mechanism of ε = 10" in text
        assert "One interaction: a mechanism of ε = 5" in text

    def test_weights(self, call: Call, files: Path) -> None:
        text = self.shown(call, files, "privaterec", "encoder=id", "mechanism=attention", "basis=5")
        assert "It says: the weights of 5 basis vectors are" in text
        assert "(Laplace noise of scale 0.4 in each; ε = 5 whatever the history is)" in text

    def test_what_a_published_gradient_tells(self, call: Call, files: Path) -> None:
        text = self.shown(call, files, "privaterec", "encoder=nrms", "guarantee=published")
        assert "words of this person's history off the rows that are not zero: w" in text
        items = self.shown(call, files, "privaterec", "encoder=id", "guarantee=published")
        assert "reads 5 news of this person's history" in items

    def test_noise_on_a_gradient(self, call: Call, files: Path) -> None:
        text = self.shown(call, files, "dp-fedrec", "encoder=id")
        assert "numbers has Laplace noise of scale" in text
        assert "clipped to an ℓ2 norm of 0.005" in text
        assert "history off the rows" not in text
