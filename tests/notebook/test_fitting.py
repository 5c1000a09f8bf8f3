"""`hb.fit`: from data to a model in one call, and what it refuses."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pytest

import homebody as hb
from homebody.core import About
from homebody.data import Population
from homebody.data.partitions import everything
from homebody.methods.baselines import Popularity
from homebody.notebook.progress import ProgressLine
from homebody.privacy import Budget, Channel, Clip, Gaussian, SecureSum
from homebody.recipe import Recipe
from homebody.run import execute
from homebody.training import fit as loop

SOURCE = "synthetic:users=120,items=60,mean=10"
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "biased_mf.py"


@pytest.fixture(scope="module")
def people() -> Population:
    return hb.load(SOURCE)


@dataclass(frozen=True)
class Newest(hb.Reference):
    """Ranks items by their number: a class of this module's own."""

    about: ClassVar[About] = About(title="the newest first", rounds=1)
    reads: ClassVar[bool] = False

    def fit(self, histories: Any, seed: int) -> Any:
        yield lambda users, items: items.float().expand(len(users), -1)


class TestWhatIsTaken:
    def test_a_name_a_class_and_an_object_are_the_same(self, people: Population) -> None:
        models = [hb.fit(method, people, rounds=2, quiet=True) for method in ("fedials", hb.FedIALS, hb.FedIALS())]
        assert models[0].metrics == models[1].metrics == models[2].metrics

    def test_it_is_what_the_command_does(self, people: Population, tmp_path: Path) -> None:
        result = execute(Recipe("fedmf", SOURCE, fields={"factors": 4}, rounds=3, cohort=50, seed=2), tmp_path)
        model = hb.fit(hb.FedMF(factors=4), people, rounds=3, cohort=50, seed=2, quiet=True)
        assert {name: model.metrics[name] for name in result["metrics"]} == result["metrics"]
        assert model.epsilon == {"server": math.inf, "clients": math.inf, "public": math.inf}
        assert model.result["bytes_up"] == result["bytes_up"]

    def test_it_is_what_the_loop_does_with_a_simulator(self, people: Population) -> None:
        split = hb.leave_one_out(people)
        direct = loop(hb.FedIALS(factors=4), hb.Simulator(split), rounds=2)
        simulator = hb.Simulator(split)
        model = hb.fit(hb.FedIALS(factors=4), simulator, rounds=2, quiet=True)
        assert model.metrics == direct.metrics
        assert model.runtime is simulator

    def test_names_files_people_splits_and_simulators_are_data(self, people: Population, tmp_path: Path) -> None:
        owner = np.repeat(np.arange(people.n_users), people.lengths)
        file = tmp_path / "clicks.csv"
        pl.DataFrame({"user": owner, "item": people.items}).write_csv(file)
        split = hb.split(people, "ratio:test=0.3")
        for data in (SOURCE, file, str(file), people, split, hb.Simulator(split, cutoffs=[3])):
            assert hb.fit("popularity", data, quiet=True).recommend(0, k=3).height == 3
        assert "hr@3" in hb.fit("fedials", hb.Simulator(split, cutoffs=[3]), rounds=1, quiet=True).metrics
        assert hb.fit("popularity", split, quiet=True).result["split"] == "ratio:test=0.3"
        assert hb.fit("popularity", people, split="ratio:test=0.3", quiet=True).result["split"] == "ratio:test=0.3"

    def test_files_with_a_method_and_classes_of_ones_own(self, people: Population) -> None:
        model = hb.fit(f"{EXAMPLE}:BiasedMF", people, rounds=2, quiet=True)
        assert type(model.method).__name__ == "BiasedMF"
        own = hb.fit(Newest(), people, quiet=True)
        assert own.recommend(3, k=1)["item"].item() >= people.n_items - 1 - len(people.history(3))

    def test_a_class_that_no_name_finds_is_refused(self, people: Population) -> None:
        @dataclass(frozen=True)
        class Hidden(Popularity):
            pass

        with pytest.raises(hb.HomebodyError, match="define the class at the top of a module"):
            hb.fit(Hidden(), people)

    def test_the_record_is_kept_where_that_is_asked_for(self, people: Population, tmp_path: Path) -> None:
        model = hb.fit("fedials", people, rounds=2, out=tmp_path / "runs", quiet=True)
        assert model.path.parent == tmp_path / "runs"
        assert Recipe.from_toml((model.path / "recipe.toml").read_text()).rounds == 2

    def test_else_it_goes_with_the_model(self, people: Population) -> None:
        model = hb.fit("popularity", people, quiet=True)
        folder = model.path
        assert folder.is_dir()
        del model
        assert not folder.parent.exists()

    def test_nothing_is_left_where_training_fails(
        self, people: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        with pytest.raises(hb.HomebodyError):
            hb.fit("fedmf", people, cohort=10_000)
        assert list(tmp_path.iterdir()) == []

    def test_an_error_names_the_record_only_where_it_stays(self, people: Population, tmp_path: Path) -> None:
        with pytest.raises(hb.HomebodyError, match="diverged") as gone:
            hb.fit(hb.FedMF(learning_rate=1e30), people, rounds=5, quiet=True)
        assert "recorded" not in str(gone.value)
        with pytest.raises(hb.HomebodyError, match=r"diverged.*The rounds before are recorded in"):
            hb.fit(hb.FedMF(learning_rate=1e30), people, rounds=5, out=tmp_path, quiet=True)


class TestPrivacy:
    def test_stages_and_budget_as_on_the_command_line(self, people: Population) -> None:
        stages = ["clip:norm=1", "gaussian:z=2"]
        model = hb.fit("fedmf", people, rounds=30, stages=stages, budget="eps=4,delta=1e-5", quiet=True)
        assert 0 < model.epsilon["public"] <= 4
        assert model.epsilon["server"] == math.inf
        assert model.delta == 1e-5
        assert "the budget is 4" in str(model.stopped)
        assert model.method.uplink == Channel(Clip(1), Gaussian(z=2))  # type: ignore[union-attr]

    def test_a_channel_and_a_budget_as_objects_and_a_bare_number(self, people: Population) -> None:
        method = hb.FedMF(factors=4, uplink=Channel(Clip(1), SecureSum(), Gaussian(z=2)))
        objects = hb.fit(method, people, rounds=5, budget=Budget(8.0), quiet=True)
        texts = ["clip:norm=1", "secure-sum", "gaussian:z=2"]
        typed = hb.fit(hb.FedMF(factors=4), people, rounds=5, stages=texts, budget=8, quiet=True)
        assert objects.epsilon == typed.epsilon
        assert objects.metrics == typed.metrics

    def test_noise_that_spends_the_budget_is_found(self, people: Population) -> None:
        stages = ["clip:norm=1", "gaussian"]
        model = hb.fit("fedmf", people, rounds=5, stages=stages, budget=6, calibrate=True, quiet=True)
        assert model.epsilon["public"] == pytest.approx(6, rel=2e-3)
        assert model.stopped is None

    def test_a_budget_that_no_round_fits_is_refused_before_anything_runs(self, people: Population) -> None:
        with pytest.raises(hb.HomebodyError, match="budget"):
            hb.fit("fedmf", people, budget=8)


class TestMisuse:
    @pytest.mark.parametrize(
        ("call", "sentence"),
        [
            (lambda p: hb.fit(p, "fedmf"), "A method is a name such as 'fedials'.*not a Population"),
            (lambda p: hb.fit("fedmf", hb.FedMF()), "the method comes first, then the data"),
            (lambda p: hb.fit("fedmff", p), "There is no method 'fedmff'; did you mean 'fedmf'"),
            (lambda p: hb.fit("fedmf", p, round=3), "There is no setting 'round'; did you mean 'rounds'"),
            (lambda p: hb.fit("fedmf", p, rounds="many"), "rounds must be a whole number"),
            (lambda p: hb.fit("fedmf", hb.leave_one_out(p), split="ratio"), "split is settled by a split"),
            (lambda p: hb.fit("fedmf", p, split=hb.leave_one_out(p)), "Give a split in the place of the data"),
            (lambda p: hb.fit("fedmf", hb.Simulator(hb.leave_one_out(p)), cutoffs=[3]), "settled by a Simulator"),
            (lambda p: hb.fit("fedmf", p, columns={"user_col": "u"}), "give it to hb.load"),
            (lambda p: hb.fit("ials", p, budget=8), "collects raw data, so ε is ∞"),
            (lambda p: hb.fit("fedmf", p, calibrate=True), "calibrate=True finds the noise.*give one, such as budget"),
            (lambda p: hb.fit("fedrec", p), "needs impressions.*give impressions FILE"),
            (
                lambda p: hb.fit(hb.FedMF(uplink=Channel(Clip(1))), p, stages=["clip:norm=2"]),
                "both name stages: give one of the two",
            ),
            (
                lambda p: hb.fit("fedmf", p, factors=8),
                r"factors is a setting of the method: give hb.FedMF\(factors=8\)",
            ),
            (lambda p: hb.fit("fedmf", p, stages="clip"), "The stage 'clip' needs norm"),
            (lambda p: hb.fit("fedmf", everything(p)), "The split 'everything' holds nothing out"),
            (lambda p: hb.fit("fedmf", None), "Data come from"),
            (lambda p: hb.fit("fedmf", p, cohort=1000), "A cohort has 1 to 120 clients"),
            (lambda p: hb.Simulator(p), "A Simulator runs the clients of a split, such as hb.leave_one_out"),
            (lambda p: hb.leave_one_out("ml-100k"), "A population is split, such as hb.load"),
            (lambda p: hb.split(hb.leave_one_out(p)), "A population is split, such as hb.load"),
            (lambda p: loop(hb.IALS(), hb.Simulator(hb.leave_one_out(p))), "IALS is a centralised reference"),
            (lambda p: loop(hb.FedMF(), hb.leave_one_out(p)), "a runtime, such as hb.Simulator.*not a Split"),
            (lambda p: loop("fedmf", hb.Simulator(hb.leave_one_out(p))), "an object such as hb.FedMF"),
        ],
    )
    def test_it_gets_a_sentence(self, people: Population, call: Any, sentence: str) -> None:
        with pytest.raises(hb.HomebodyError, match=sentence):
            call(people)

    @pytest.mark.parametrize(
        ("method", "sentence"),
        [
            (
                "Misspelt",
                r"Misspelt.client\(\) sends 'itme', and Misspelt.server\(\) changed nothing: did you mean 'item'",
            ),
            ("Strict", r"Strict.server\(\) reads 'item', and Strict.client\(\) sends 'itme'"),
        ],
    )
    def test_an_update_of_another_name_than_the_server_reads(
        self, people: Population, method: str, sentence: str
    ) -> None:
        with pytest.raises(hb.HomebodyError, match=sentence):
            loop(globals()[method](factors=2), hb.Simulator(hb.leave_one_out(people)), rounds=1)


class Misspelt(hb.FedMF):
    """A method whose client gives its update a name that its server does not know."""

    def client(self, shared: Any, local: Any, batch: Any) -> Any:
        update, kept = super().client(shared, local, batch)
        return {"itme": update["item"]}, kept


class Strict(Misspelt):
    """The same, with a server that fails on it."""

    def server(self, shared: Any, state: Any, total: Any) -> Any:
        return {"item": shared["item"] + total.mean["item"]}, state


class TestWhatIsShown:
    def test_a_quick_call_shows_nothing_and_a_long_one_a_line(
        self, people: Population, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hb.fit("fedials", people, rounds=10)
        assert "round" not in capsys.readouterr().err
        monkeypatch.setattr("homebody.notebook.progress.PATIENCE", 0.0)
        monkeypatch.setattr("homebody.notebook.progress.EVERY", 0.0)
        hb.fit("fedials", people, rounds=10)
        shown = capsys.readouterr()
        assert "fedials on synthetic" in shown.err
        assert "round 10 of 10" in shown.err
        assert shown.out == ""
        hb.fit("fedials", people, rounds=2, quiet=True)
        assert capsys.readouterr().err == ""

    def test_on_a_terminal_one_line_is_written_over(self, people: Population, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = io.StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stderr", terminal)
        line = ProgressLine()
        line.show("not yet")
        monkeypatch.setattr(line, "_last", line._last - 10)
        line.show("a long line")
        monkeypatch.setattr(line, "_last", line._last - 10)
        line.show("short")
        line.say("stays")
        line.say("stays")
        assert terminal.getvalue() == "a long line\rshort      \r     \rstays\n"

    def test_fewer_rounds_than_by_default_are_announced(
        self, people: Population, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hb.fit("fedmf", people, rounds=2)
        assert "Fewer rounds than by default: fedmf 2 of 100." in capsys.readouterr().err
        hb.fit("popularity", people)
        assert "ounds" not in capsys.readouterr().err
