"""Studies: chosen on validation, told once, continued after a kill."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from homebody.cli import app
from homebody.errors import HomebodyError
from homebody.methods import trust
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.run import Watcher, execute
from homebody.settings import Range
from homebody.studies import CellProgress, cells
from homebody.studies.tune import Search, command, tune

DATA = "synthetic:users=60,items=40,mean=10"
FEDIALS = Recipe("fedials", DATA, fields={"init_scale": 0.2}, rounds=2)
SPACE = {"factors": (2, 4, 8), "regularisation": Range(0.1, 100.0, log=True)}
STUDY = Search(FEDIALS, SPACE, trials=4)
DIVERGING = Search(Recipe("fedmf", DATA, fields={"factors": 4}, rounds=2), {"learning_rate": (0.05, 1e30)}, trials=3)


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    trials = [{**trial, "seconds": trial["seconds"] is not None} for trial in record["trials"]]
    return {**record, "trials": trials, "study": ""}


def stored(record: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = json.loads((Path(record["study"]) / "study.json").read_text())
    return text


class Stop(BaseException):
    """Ends a study from inside, as Ctrl-C does."""


class TestSearch:
    def test_trials_begin_with_the_defaults_and_go_on_from_there(self) -> None:
        settings = STUDY.settings()
        assert settings[0] == {"factors": 16, "regularisation": 1.0}
        assert len(settings) == 4
        assert replace(STUDY, trials=9).settings()[:4] == settings
        assert replace(STUDY, trials=9).name == STUDY.name
        assert replace(STUDY, recipe=replace(FEDIALS, seed=1)).settings()[1:] != settings[1:]

    def test_what_is_asked_for_names_the_folder(self) -> None:
        others = [
            replace(STUDY, seeds=2),
            replace(STUDY, space={"factors": (2, 4)}),
            replace(STUDY, recipe=replace(FEDIALS, rounds=3)),
            replace(STUDY, recipe=replace(FEDIALS, fields={})),
        ]
        assert len({STUDY.name, *(study.name for study in others)}) == 5
        assert STUDY.name.startswith("tune-fedials-synthetic_users_60")

    def test_runs_have_the_fixed_and_the_varied_fields_and_a_seed_each(self) -> None:
        study = replace(STUDY, recipe=replace(FEDIALS, seed=5), seeds=2)
        first, second = study.recipes({"factors": 2, "regularisation": 3.0})
        assert first.fields == second.fields == {"init_scale": 0.2, "factors": 2, "regularisation": 3.0}
        assert (first.seed, second.seed) == (5, 6)


class TestTune:
    def test_the_best_on_validation_is_chosen_and_its_test_metrics_alone_are_told(self, tmp_path: Path) -> None:
        record = tune(STUDY, tmp_path)
        alone = [execute(STUDY.recipes(setting)[0], tmp_path / "alone") for setting in STUDY.settings()]
        values = [result["validation"]["ndcg@10"] for result in alone]
        assert [trial["validation"] for trial in record["trials"]] == values
        best = values.index(max(values))
        assert record["best"]["trial"] == best
        assert record["best"]["test"] == alone[best]["metrics"]
        assert "metrics" not in json.dumps(record["trials"])
        assert stored(record) == {name: value for name, value in record.items() if name != "study"}
        folder = Path(record["study"])
        assert Recipe.from_toml((folder / "best.toml").read_text()) == STUDY.recipes(STUDY.settings()[best])[0]
        for trial in record["trials"]:
            (run,) = trial["runs"]
            assert (folder / run / "result.json").exists()
            assert not list((folder / run).glob("state*"))

    def test_seeds_are_averaged(self, tmp_path: Path) -> None:
        record = tune(replace(STUDY, trials=2, seeds=2), tmp_path)
        for trial in record["trials"]:
            assert len(trial["by_seed"]) == len(set(trial["runs"])) == 2
            assert trial["validation"] == pytest.approx(sum(trial["by_seed"]) / 2)
        best = record["trials"][record["best"]["trial"]]
        results = [json.loads((Path(record["study"]) / run / "result.json").read_text()) for run in best["runs"]]
        mean = sum(result["metrics"]["hr@10"] for result in results) / 2
        assert record["best"]["test"]["hr@10"] == pytest.approx(mean)

    def test_ties_go_to_the_earlier_trial(self, tmp_path: Path) -> None:
        file = tmp_path / "same.py"
        file.write_text(
            "from dataclasses import dataclass\n"
            "from homebody.methods.baselines import Popularity\n"
            "from homebody.settings import param\n\n\n"
            "@dataclass(frozen=True)\nclass Same(Popularity):\n    number: int = param(4, 'nothing', low=1)\n"
        )
        study = Search(Recipe(trust(f"{file}:Same"), DATA), {"number": (1, 2, 3)}, trials=3)
        assert tune(study, tmp_path)["best"]["trial"] == 0

    def test_a_stopped_study_goes_on_and_ends_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def stop(progress: CellProgress, record: dict[str, Any]) -> None:
            if progress.cell == 2 and progress.done:
                raise Stop

        with pytest.raises(Stop):
            tune(STUDY, tmp_path / "stopped", watch=stop)
        study = tmp_path / "stopped" / STUDY.name
        partial = json.loads((study / "study.json").read_text())
        assert [trial["status"] for trial in partial["trials"]] == ["done", "done", "waiting", "waiting"]
        assert not partial["complete"]
        assert partial["best"]["test"] is None
        ran: list[str] = []
        monkeypatch.setattr(cells, "execute", counted(cells.execute, ran, "begun"))
        monkeypatch.setattr(cells, "run_cell", counted(cells.run_cell, ran, "asked"))
        resumed = tune(STUDY, tmp_path / "stopped")
        assert ran.count("asked") == 4
        assert ran.count("begun") == 1
        assert timeless(resumed) == timeless(tune(STUDY, tmp_path / "whole"))

    def test_more_trials_add_to_those_that_are_done(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        few = tune(STUDY, tmp_path)
        ran: list[str] = []
        monkeypatch.setattr(cells, "execute", counted(cells.execute, ran, "begun"))
        more = tune(replace(STUDY, trials=6), tmp_path)
        assert len(ran) == 2
        assert more["trials"][:4] == few["trials"]
        monkeypatch.setattr("homebody.studies.tune.prepare", counted(None, ran, "checked"))
        assert tune(replace(STUDY, trials=6), tmp_path) == more
        assert len(ran) == 2

    def test_what_diverges_is_a_failed_trial(self, tmp_path: Path) -> None:
        record = tune(DIVERGING, tmp_path)
        status = {trial["fields"]["learning_rate"]: trial["status"] for trial in record["trials"]}
        assert status == {0.1: "done", 0.05: "done", 1e30: "failed"}
        failed = next(trial for trial in record["trials"] if trial["status"] == "failed")
        assert "diverged" in failed["error"]
        assert failed["validation"] is None
        assert record["complete"]

    def test_a_study_of_failures_says_so(self, tmp_path: Path) -> None:
        recipe = replace(DIVERGING.recipe, fields={"factors": 4, "learning_rate": 1e38})
        with pytest.raises(HomebodyError, match="None of 2 trials came to an end; the first: Training diverged"):
            tune(Search(recipe, {"item_rate": (1e30, 1e31)}, trials=2), tmp_path)

    def test_processes_give_the_same_study(self, tmp_path: Path, warm_workers: None) -> None:
        assert timeless(tune(STUDY, tmp_path / "two", jobs=2)) == timeless(tune(STUDY, tmp_path / "one"))

    def test_a_small_space_is_tried_out(self, tmp_path: Path) -> None:
        said: list[str] = []
        study = replace(STUDY, space={"factors": (2, 16)}, trials=5)
        record = tune(study, tmp_path, watcher=Watcher(say=said.append))
        assert [trial["fields"]["factors"] for trial in record["trials"]] == [16, 2]
        assert said == ["There are only 2 different settings to try."]

    def test_no_second_process_works_on_it(self, tmp_path: Path) -> None:
        folder = tmp_path / STUDY.name
        folder.mkdir()
        with RunFolder(folder).alone(), pytest.raises(HomebodyError, match="Another process is working on"):
            tune(STUDY, tmp_path)

    @pytest.mark.parametrize(
        ("study", "sentence"),
        [
            (replace(STUDY, trials=0), "Trials must be at least 1, not 0."),
            (replace(STUDY, seeds=0), "Seeds must be at least 1, not 0."),
            (replace(STUDY, recipe=replace(FEDIALS, select="ndcg@10")), "Trials are chosen on validation"),
            (replace(STUDY, space={"init_scale": (1.0, 2.0)}), "init_scale is fixed and searched at once"),
            (Search(Recipe("popularity", DATA), {}), "There is nothing to vary in popularity"),
            (replace(STUDY, recipe=replace(FEDIALS, data="ml-10k")), "There is no dataset 'ml-10k'"),
        ],
    )
    def test_what_makes_no_sense_is_refused_before_anything_is_written(
        self, study: Search, sentence: str, tmp_path: Path
    ) -> None:
        with pytest.raises(HomebodyError) as error:
            tune(study, tmp_path / "out")
        assert str(error.value).startswith(sentence)
        assert not (tmp_path / "out").exists()


class TestCommand:
    def test_it_is_the_recipe(self, tmp_path: Path) -> None:
        """Parsed as the command line would, it gives the same run."""
        file = tmp_path / "my loans.csv"
        file.write_text("\n".join(["who,what", *(f"u{u},i{(u + i) % 9}" for u in range(9) for i in range(4))]))
        recipe = Recipe(
            "fedmf",
            str(file),
            fields={"factors": 4, "learning_rate": 0.05},
            rounds=2,
            seed=3,
            protocol="isolated",
            held_out="random",
            cohort=5,
            evaluate_every=2,
            fused=False,
            columns={"user_col": "who", "item_col": "what"},
        )
        words = [*shlex.split(command(recipe))[1:], "--json", "--out", str(tmp_path / "typed")]
        typed = CliRunner().invoke(app, words, catch_exceptions=False)
        assert typed.exit_code == 0
        (run,) = (tmp_path / "typed").iterdir()
        assert Recipe.from_toml((run / "recipe.toml").read_text()) == recipe

    def test_switches(self) -> None:
        assert command(Recipe("a.py:B", "ml-1m", fields={"fair": True})).endswith("--set fair=true")


def counted(function: Any, calls: list[str], name: str) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        return function(*arguments, **named)

    return call
