"""Adaptive searches: learnt from the trials before, ended early where hopeless, and continued after a kill."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.studies.test_tune import DATA, DIVERGING, FEDIALS, SPACE, Stop, counted, timeless

from homebody.errors import HomebodyError
from homebody.evaluation.metrics import ERRORS
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.settings import Range
from homebody.studies import CellProgress, cells
from homebody.studies.adaptive import EVEN, FINISHED, STORAGE, Adaptive, adaptive
from homebody.studies.space import Space
from homebody.studies.tune import Search, tune

optuna = pytest.importorskip("optuna", reason="no optuna: the extra `tune` is not installed")

STUDY = Search(FEDIALS, SPACE, trials=8, strategy="adaptive")
RATE: Space = {"learning_rate": Range(0.0001, 0.4, log=True)}
PRUNED = Search(Recipe("fedmf", DATA, fields={"factors": 4}, rounds=20), RATE, trials=10, strategy="adaptive")
BOWL: Space = {"x": Range(-1.0, 1.0), "y": Range(-1.0, 1.0)}


def best_of(folder: Path, space: Space, trials: int, value: Any, *, seed: int = 0, larger: bool = True) -> float:
    """The best of a search by a function in place of a method."""
    found = []
    first = {name: where.low if isinstance(where, Range) else where[0] for name, where in space.items()}
    with adaptive(folder, "toy", first, space, trials, seed=seed, metric="m", larger=larger) as search:
        while (fields := search.ask()) is not None:
            found.append(value(**fields))
            search.tell(len(found) - 1, found[-1])
    return (max if larger else min)(found)


def stored_trials(record: dict[str, Any]) -> list[Any]:
    (name,) = optuna.study.get_all_study_names(storage := f"sqlite:///{record['study']}/{STORAGE}")
    return optuna.load_study(study_name=name, storage=storage).trials


class TestAdaptive:
    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_it_learns(self, tmp_path: Path, sign: float) -> None:
        """Sixteen points spread evenly over 4 square units are half a unit apart; it comes a tenth as near."""
        best = best_of(tmp_path, BOWL, 16, lambda x, y: sign * ((x - 0.3) ** 2 + (y + 0.4) ** 2), larger=sign < 0)
        assert abs(best) < 0.05**2

    def test_a_search_of_few_settings_tries_each_once(self, tmp_path: Path) -> None:
        space: Space = {"size": (2, 4, 8), "depth": Range(1, 4), "fair": (True, False)}
        tried: list[tuple[Any, ...]] = []
        best_of(tmp_path, space, 99, lambda **fields: tried.append(tuple(fields.values())) or 0.0)
        assert len(tried) == len(set(tried)) == 24
        assert all(type(size) is int and type(fair) is bool for size, _, fair in tried)

    def test_defaults_outside_the_space_are_tried_first(self, tmp_path: Path) -> None:
        with adaptive(tmp_path, "toy", {"size": 16}, {"size": (2, 4)}, 9, seed=0, metric="m", larger=True) as search:
            asked = []
            while (fields := search.ask()) is not None:
                asked.append(fields["size"])
                search.tell(len(asked) - 1, 1.0)
        assert sorted(asked[1:]) == [2, 4]
        assert asked[0] == 16

    def test_a_trial_is_ended_when_it_is_below_the_lowest_quarter(self, tmp_path: Path) -> None:
        space: Space = {"x": Range(0.0, 1.0)}
        with adaptive(tmp_path, "toy", {"x": 0.5}, space, 99, seed=0, metric="m", larger=True) as search:

            def ended(level: float) -> int | None:
                """The round after which a trial at this level is ended."""
                search.ask()
                number = len(search.known()) - 1
                for step in range(1, 41):
                    if search.report(number, {step: level}, 40):
                        search.tell(number, None)
                        return step
                search.tell(number, level)
                return None

            assert [ended(level) for level in (0.5, 0.1, 0.4, 0.3)] == [None] * FINISHED
            assert ended(0.2) == 10  # a quarter of its rounds is left in peace
            assert ended(0.6) is None
            assert search.pruned() == {4: 0.2}

    def test_what_is_reported_is_the_best_so_far(self, tmp_path: Path) -> None:
        with adaptive(tmp_path, "toy", {"x": 0.5}, {"x": Range(0.0, 1.0)}, 2, seed=0, metric="m", larger=True) as one:
            one.ask()
            one.report(0, {step: 1.0 / step for step in range(1, 101)}, 100)
            (trial,) = one._study.trials
            assert trial.intermediate_values == dict.fromkeys(range(5, 100, 5), 1.0)

    def test_a_trial_that_diverged_says_so_and_warns_the_sampler(self, tmp_path: Path) -> None:
        with adaptive(tmp_path, "toy", {"x": 0.5}, {"x": Range(0.0, 1.0)}, 2, seed=0, metric="m", larger=True) as one:
            one.ask()
            one.tell(0, None, "Training diverged.")
            assert one._study.trials[0].state == optuna.trial.TrialState.PRUNED
            assert one._study.trials[0].user_attrs == {"diverged": "Training diverged."}
            assert one.pruned() == {}

    def test_the_seed_and_the_trials_before_settle_what_comes_next(self, tmp_path: Path) -> None:
        def search(folder: str, seed: int = 0) -> Any:
            (tmp_path / folder).mkdir(exist_ok=True)
            return adaptive(tmp_path / folder, "toy", {"x": 0.0, "y": 0.0}, BOWL, 9, seed=seed, metric="m", larger=True)

        def tell(one: Adaptive, number: int) -> None:
            one.tell(number, one.known()[number]["x"] - one.known()[number]["y"] ** 2)

        def whole(folder: str, seed: int = 0) -> list[dict[str, Any]]:
            with search(folder, seed) as one:
                while one.ask() is not None:
                    tell(one, len(one.known()) - 1)
                return one.known()

        for number in (3, 7):  # killed while a trial is under way
            with search("cut") as one:
                for _ in range(len(one.known()), number + 1):
                    one.ask()
                    if len(one.known()) <= number:
                        tell(one, len(one.known()) - 1)
            with search("cut") as one:
                assert len(one.known()) == number + 1
                tell(one, number)
        assert whole("cut") == whole("whole")
        assert whole("other", seed=1)[1:] != whole("whole")[1:]


class TestTune:
    def test_it_is_chosen_and_told_as_by_an_even_search(self, tmp_path: Path) -> None:
        record = tune(STUDY, tmp_path)
        even = tune(replace(STUDY, strategy="even", trials=EVEN), tmp_path)
        assert record["study"] != even["study"]
        assert [trial["fields"] for trial in record["trials"][:EVEN]] == [trial["fields"] for trial in even["trials"]]
        done = [trial for trial in record["trials"] if trial["status"] == "done"]
        assert record["best"]["validation"] == max(trial["validation"] for trial in done)
        (run,) = record["trials"][record["best"]["trial"]]["runs"]
        assert (
            record["best"]["test"] == json.loads((Path(record["study"]) / run / "result.json").read_text())["metrics"]
        )
        assert record["complete"]

    def test_optunas_file_has_the_trials_and_nothing_of_the_test_items(self, tmp_path: Path) -> None:
        record = tune(STUDY, tmp_path)
        stored = stored_trials(record)
        assert [trial.value for trial in stored] == [trial["validation"] for trial in record["trials"]]
        # The defaults are outside the space here, and Optuna knows only what is within.
        assert [trial.params for trial in stored[1:]] == [trial["fields"] for trial in record["trials"][1:]]
        with sqlite3.connect(Path(record["study"]) / STORAGE) as database:
            text = "\n".join(database.iterdump())
        assert all(f"{value!r}" not in text for name, value in record["best"]["test"].items() if name == "ndcg@10")

    def test_hopeless_trials_are_ended_early(self, tmp_path: Path) -> None:
        record = tune(PRUNED, tmp_path)
        pruned = [trial for trial in record["trials"] if trial["status"] == "pruned"]
        assert pruned
        assert record["best"]["validation"] > max(trial["validation"] for trial in pruned)
        for trial in pruned:
            folder = RunFolder(Path(record["study"]) / trial["runs"][0])
            assert 5 <= len(folder.rounds()) < 20
            assert not (folder.path / "result.json").exists()
            assert not list(folder.path.glob("state*"))
        assert tune(PRUNED, tmp_path) == record

    def test_a_stopped_search_goes_on_and_ends_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def stop(progress: CellProgress, record: dict[str, Any]) -> None:
            if progress.cell == 6 and progress.done == 3:
                raise Stop

        with pytest.raises(Stop):
            tune(PRUNED, tmp_path / "stopped", watch=stop)
        ran: list[str] = []
        monkeypatch.setattr(cells, "execute", counted(cells.execute, ran, "begun"))
        resumed = tune(PRUNED, tmp_path / "stopped")
        assert len(ran) <= 4  # the last three trials, and this one where it had no checkpoint yet
        assert timeless(resumed) == timeless(tune(PRUNED, tmp_path / "whole"))

    def test_more_trials_add_to_those_that_are_done(self, tmp_path: Path) -> None:
        few = tune(STUDY, tmp_path)
        more = tune(replace(STUDY, trials=10), tmp_path)
        assert more["trials"][:8] == few["trials"]
        assert len(more["trials"]) == 10
        again = tune(STUDY, tmp_path)
        assert again["trials"] == few["trials"]

    def test_a_trial_that_is_not_ended_by_its_first_seed_runs_all(self, tmp_path: Path) -> None:
        record = tune(replace(PRUNED, seeds=2), tmp_path)
        for trial in record["trials"]:
            runs = {"done": 2, "pruned": 1}[trial["status"]]
            assert len(trial["runs"]) == runs
            assert sum((Path(record["study"]) / run).exists() for run in trial["runs"]) == runs
        assert {trial["status"] for trial in record["trials"]} == {"done", "pruned"}

    def test_what_diverges_is_a_failed_trial(self, tmp_path: Path) -> None:
        search = replace(DIVERGING, strategy="adaptive")
        record = tune(search, tmp_path)
        status = {trial["fields"]["learning_rate"]: trial["status"] for trial in record["trials"]}
        assert status == {0.1: "done", 0.05: "done", 1e30: "failed"}
        assert timeless(tune(search, tmp_path)) == timeless(record)

    def test_several_processes_work_on_it(self, tmp_path: Path, warm_workers: None) -> None:
        record = tune(PRUNED, tmp_path, jobs=2)
        assert record["complete"]
        assert {trial["status"] for trial in record["trials"]} <= {"done", "pruned"}
        fields = [json.dumps(trial["fields"]) for trial in record["trials"]]
        assert len(fields) == len(set(fields)) == 10
        assert record["best"]["validation"] == max(
            trial["validation"] for trial in record["trials"] if trial["status"] == "done"
        )

    def test_errors_are_the_smaller_the_better(self, tmp_path: Path) -> None:
        assert "rmse" in ERRORS
        with adaptive(tmp_path, "toy", {"x": 0.0}, {"x": Range(0.0, 1.0)}, 3, seed=0, metric="m", larger=False) as one:
            assert isinstance(one, Adaptive)
            assert one._study.direction == optuna.study.StudyDirection.MINIMIZE
        assert not Search(replace(FEDIALS, select="valid/rmse"), SPACE).larger


def test_a_damaged_storage_is_refused_in_a_sentence_and_kept(tmp_path: Path) -> None:
    (tmp_path / STORAGE).write_bytes(b"no database" * 200)
    space: Space = {"factors": Range(2, 8)}
    with (
        pytest.raises(HomebodyError, match=r"optuna.db cannot be read or written \(file is not a database\)"),
        adaptive(tmp_path, "study", {"factors": 4}, space, 2, seed=0, metric="ndcg@10", larger=True),
    ):
        pass
    assert (tmp_path / STORAGE).exists()
