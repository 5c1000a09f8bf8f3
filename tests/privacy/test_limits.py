"""Budgets: training stops before the round that would break one, and noise can be found that spends one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homebody.cli import main
from homebody.core import Cohort
from homebody.data import load
from homebody.data.partitions import leave_one_out
from homebody.data.splits import Split
from homebody.errors import HomebodyError
from homebody.methods.fedmf import FedMF
from homebody.privacy import Budget, Channel, Clip, Gaussian, Laplace, Ledger, OneBit, SecureSum
from homebody.privacy.accountant import within
from homebody.privacy.budget import calibrated
from homebody.progress import Progress
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.run import Watcher, execute, resume
from homebody.simulation import Simulator
from homebody.training import Trained, fit

PEOPLE = "synthetic:users=40,items=60,mean=12"
BUDGET = "eps=4,delta=1e-5,unit=user,observer=public"
NOISY = ["clip:norm=0.5", "secure-sum", "gaussian:z=2"]
RECIPE = Recipe("fedmf", PEOPLE, {"factors": 2}, rounds=12, cohort=10, stages=NOISY, budget=BUDGET)


@pytest.fixture(scope="module")
def split() -> Split:
    return leave_one_out(load(PEOPLE))


def test_a_budget_as_text() -> None:
    assert Budget.parse("eps=8") == Budget(8.0, 1e-6, "user", "public")
    full = Budget.parse("observer=server,eps=0.5,unit=report,delta=0")
    assert full == Budget(0.5, 0.0, "report", "server")
    assert Budget.parse(str(full)) == full


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "A budget reads"),
        ("8", "A budget reads"),
        ("eps=8,eps=9", "A budget reads"),
        ("epsilon=8", "A budget reads"),
        ("delta=1e-5", "says no eps"),
        ("eps=much", "eps must be a number, not 'much'"),
        ("eps=0", "above 0, not 0"),
        ("eps=-1", "above 0, not -1"),
        ("eps=inf", "finite"),
        ("eps=nan", "finite"),
        ("eps=8,delta=1", "under 1, not 1"),
        ("eps=8,delta=-0.1", "at least 0"),
        ("eps=8,delta=nan", "at least 0"),
        ("eps=8,unit=person", "no unit 'person'"),
        ("eps=8,observer=god", "no observer 'god'"),
    ],
)
def test_text_that_is_no_budget_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(HomebodyError, match=sentence):
        Budget.parse(text)


def trained(split: Split, budget: Budget | None, uplink: Channel, **options: Any) -> Trained:
    return fit(FedMF(factors=2, uplink=uplink), Simulator(split), budget=budget, cohort=10, **options)


def test_training_stops_before_the_round_that_would_break_the_budget(split: Split) -> None:
    budget, uplink = Budget(6.0, 1e-5), Channel(Clip(0.5), Gaussian(2.0))
    event = uplink.charges(Cohort(np.arange(10), "fixed", 10, len(Simulator(split).available())))[2].event
    allowed = max(rounds for rounds in range(1, 31) if within([(event, rounds)], 6.0, 1e-5))
    assert 2 <= allowed < 30
    fitted = trained(split, budget, uplink, rounds=30)
    assert fitted.ledger.releases() == allowed
    assert fitted.epsilon["public"] <= 6.0
    assert not budget.allows(fitted.ledger, uplink.charges(Cohort(np.arange(10), "fixed", 10, 40)))
    assert fitted.stopped is not None
    assert f"stopped before round {allowed + 1} of 30" in fitted.stopped
    assert "against the public, at δ = 1e-05, and the budget is 6;" in fitted.stopped
    assert fitted.metrics
    assert 1 <= fitted.chosen <= allowed
    exact = trained(split, budget, uplink, rounds=allowed)
    assert exact.stopped is None
    assert exact.metrics == fitted.metrics  # the best so far stands


def test_the_last_round_before_a_stop_is_asked(split: Split) -> None:
    """Even where its number is not due: a run without a single evaluation would be worth nothing."""
    fitted = trained(split, Budget(6.0, 1e-5), Channel(Clip(0.5), Gaussian(2.0)), rounds=30, evaluate_every=29)
    assert fitted.metrics
    assert fitted.chosen == fitted.ledger.releases()
    never = trained(split, Budget(6.0, 1e-5), Channel(Clip(0.5), Gaussian(2.0)), rounds=30, evaluate_every=0)
    assert never.metrics == {}


def test_a_budget_of_another_observer_or_unit_is_its_own(split: Split) -> None:
    reports = Channel(OneBit(0.5, k=4))
    server = trained(split, Budget(7.0, 0.0, observer="server"), reports, rounds=9)
    assert server.ledger.releases() == 3  # of 4 × 0.5 each
    single = trained(split, Budget(0.5, 0.0, "report", "server"), reports, rounds=9)
    assert single.ledger.releases() == 9
    assert single.stopped is None


class Memory:
    """Checkpoints of every so many rounds."""

    def __init__(self, every: int) -> None:
        self.kept: Progress | None = None
        self._rounds, self._every = 0, every

    def load(self) -> Progress | None:
        return self.kept

    def due(self) -> bool:
        self._rounds += 1
        return self._rounds % self._every == 0

    def save(self, progress: Progress) -> None:
        self.kept = replace(progress)


class Stop(Exception):
    pass


@pytest.mark.parametrize("every", [3, 1000])
@pytest.mark.parametrize("before_the_end", [0, 1, 4])
def test_a_resumed_run_stops_at_the_same_round_and_pays_once(split: Split, before_the_end: int, every: int) -> None:
    """Even where the whole budget was charged, and rounds that were paid for are run again."""
    budget, uplink = Budget(6.0, 1e-5), Channel(Clip(0.5), Gaussian(2.0))
    whole = trained(split, budget, uplink, rounds=30)

    def failing(line: Any) -> None:
        if line.step == whole.ledger.releases() - before_the_end:
            raise Stop

    ledger = Ledger()
    kept: dict[str, Any] = {"rounds": 30, "ledger": ledger, "checkpoints": Memory(every), "digest": "same"}
    with pytest.raises(Stop):
        trained(split, budget, uplink, on_round=failing, **kept)
    resumed, again = (trained(split, budget, uplink, **kept) for _ in range(2))
    for one in (resumed, again):
        assert one.stopped == whole.stopped
        assert one.metrics == whole.metrics
    names = [entry.release for entry in ledger.entries()]
    assert names == [entry.release for entry in whole.ledger.entries()]


def test_a_run_keeps_why_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    result = execute(RECIPE, tmp_path, Watcher(say=said.append))
    assert result["rounds"] < 12
    assert result["stopped"] in said
    assert result["stopped"].startswith(f"Training stopped before round {result['rounds'] + 1} of 12")
    assert result["epsilon"]["server"] == "inf"
    assert result["epsilon"]["public"] == result["epsilon"]["clients"] <= 4.0
    assert result["epsilon_delta"] == 1e-5
    folder = RunFolder.open(Path(result["run"]))
    assert all(line["delta"] == 1e-5 for line in folder.rounds())
    ledger = Ledger(folder.ledger_path)
    assert ledger.entries()[-1].code.startswith("FedMF, homebody ")  # type: ignore[union-attr]
    assert ledger.entries()[-1].round == result["rounds"]
    ledger.close()

    monkeypatch.setattr(RunFolder, "due", lambda self: True)

    def stopping(line: Any) -> None:
        if line.step == 2:
            raise Stop

    with pytest.raises(Stop):
        execute(RECIPE, tmp_path / "cut", Watcher(on_round=stopping))
    (cut,) = (tmp_path / "cut").iterdir()
    resumed = resume(cut)
    for name in ("stopped", "rounds", "chosen_round", "metrics", "epsilon"):
        assert resumed[name] == result[name]


def test_without_stages_a_run_is_as_it_was(tmp_path: Path) -> None:
    plain = replace(RECIPE, stages=[], budget=None, rounds=2)
    result = execute(plain, tmp_path)
    assert result["stopped"] is None
    assert result["epsilon"] == dict.fromkeys(("server", "clients", "public"), "inf")
    assert result["epsilon_delta"] == 1e-6


def planned(cohort: int, population: int, rounds: int) -> Any:
    some = Cohort(np.arange(cohort), "fixed", cohort, population)
    return lambda channel: [(channel.charges(some), rounds)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "channel",
    [Channel(Clip(40.0), SecureSum(), Gaussian(9.0)), Channel(Clip(3.0, order=1), Laplace(1.0))],
)
def test_calibrated_noise_spends_the_budget_and_no_more(channel: Channel) -> None:
    budget, plan = Budget(2.0, 1e-6), planned(30, 4800, 100)
    noise = calibrated(channel, budget, plan)
    last = channel.stages[-1]
    for part, allowed in ((1.0, True), (0.99, False)):
        changed = replace(last, **{"z" if isinstance(last, Gaussian) else "b": noise * part})  # type: ignore[type-var]
        ledger = Ledger()
        charges = plan(Channel(*channel.stages[:-1], changed))[0][0]
        for number in range(100):
            ledger.charge(f"train/{number}", charges)
        spent = budget.spent(ledger)
        assert (spent <= 2.0) is allowed
        assert spent == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize(
    ("channel", "budget", "sentence"),
    [
        (Channel(), Budget(8.0), "needs one gaussian, laplace, skellam or view-noise stage"),
        (Channel(OneBit(1.0)), Budget(8.0), "needs one gaussian, laplace, skellam or view-noise stage"),
        (Channel(Clip(1.0), Gaussian(1.0)), Budget(8.0, observer="server"), "adds the noise itself"),
        (Channel(Clip(1.0), Gaussian(1.0)), Budget(8.0, unit="report"), "for unit=user"),
        (Channel(Clip(1.0), Gaussian(1.0)), Budget(8.0, 0.0), "from the first round ε is ∞"),
        (Channel(Laplace(1.0, unbounded=True)), Budget(8.0), "nothing bounds"),
    ],
)
def test_noise_that_cannot_be_found_is_an_error(channel: Channel, budget: Budget, sentence: str) -> None:
    with pytest.raises(HomebodyError, match=sentence):
        calibrated(channel, budget, planned(30, 4800, 100))


def test_a_calibrated_run_spends_its_budget_and_keeps_the_noise(tmp_path: Path) -> None:
    said: list[str] = []
    asked = replace(RECIPE, stages=["clip:norm=0.5", "gaussian"], calibrate=True)
    result = execute(asked, tmp_path, Watcher(say=said.append))
    assert (result["stopped"], result["rounds"]) == (None, 12)
    assert 4.0 * 0.998 <= result["epsilon"]["public"] <= 4.0
    kept = Recipe.from_toml((Path(result["run"]) / "recipe.toml").read_text())
    assert not kept.calibrate
    assert kept.stages[1].startswith("gaussian:z=")
    assert any(kept.stages[1] in text for text in said)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"budget": "eps=0"}, "above 0"),
        ({"budget": "eps=8,delta=1"}, "under 1"),
        ({"delta": 1.5}, "under 1"),
        ({"delta": math.nan}, "must be a finite number, not nan"),
        ({"cohort": 41}, "A cohort has 1 to 40 clients"),
        ({"stages": ["clip:norm=0.5", "gaussian:z=0"]}, "z = 0 is no noise"),
        ({"stages": []}, "from the first round ε is ∞ for one user, against the public"),
        ({"budget": "eps=8,observer=server"}, "adds the noise itself"),
        ({"budget": "eps=8,observer=views"}, "Nothing is released to the observer 'views'"),
        ({"budget": "eps=0.01"}, "less than the first round alone takes"),
        ({"stages": ["gaussian:z=1"]}, "needs a bound"),
        ({"stages": ["clip:norm=1", "gaussian"]}, "needs z"),
        ({"stages": ["clip:norm=1", "gaussian:z=1,relation=add-remove"]}, "accounted under replace-one"),
        ({"stages": [3]}, "Each of the recipe's stages must be a text, not 3"),
        ({"budget": None, "calibrate": True}, "give one, such as --budget eps=8"),
    ],
)
def test_bad_values_get_one_sentence_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(HomebodyError, match=sentence):
        execute(replace(RECIPE, **change), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_reference_stands_beside_methods_with_a_budget_and_says_so(tmp_path: Path) -> None:
    result = execute(replace(RECIPE, method="popularity", fields={}, cohort=None, rounds=1), tmp_path)
    assert result["epsilon"]["public"] == "inf"
    assert "popularity is centralised and collects raw data: stages and budget do not hold for it" in result["notes"]


def test_a_recipe_with_stages_is_written_and_typed_again() -> None:
    recipe = replace(RECIPE, calibrate=True, delta=1e-7)
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    words = " ".join(recipe.options())
    assert "--stage clip:norm=0.5 --stage secure-sum --stage gaussian:z=2" in words
    assert f"--budget {BUDGET} --calibrate --delta 1e-07" in words
    assert Recipe.from_toml('method = "fedmf"\ndata = "x"\ndelta = 0').delta == 0


def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The exit code of a command, and what it prints and complains."""
    monkeypatch.setattr("sys.argv", ["homebody", *words])
    code = 0
    try:
        main()
    except SystemExit as left:
        code = int(left.code or 0)
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_command_that_this_is_for(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "run",
        "fedmf",
        "--data",
        "ml-100k",
        "--data-dir",
        str(real_data),
        "--cohort",
        "100",
        "--out",
        str(tmp_path),
    ]
    words += ["--stage", "clip:norm=1", "--stage", "gaussian:z=0.8", "--evaluate-every", "50"]
    words += ["--budget", "eps=8,delta=1e-5,unit=user,observer=public"]
    code, printed, said = typed(monkeypatch, capsys, *words)
    assert code == 0
    assert "Training stopped before round" in said
    flat = " ".join(printed.split())
    assert "and the budget is 8;" in flat
    assert "over the whole training: server ∞, clients 7." in flat
    assert "δ = 1e-05" in flat
    assert "stages: clip:norm=1 → gaussian:z=0.8" in flat
    (run,) = tmp_path.iterdir()
    code, printed, _ = typed(monkeypatch, capsys, "show", str(run))
    flat = " ".join(printed.split())
    assert "to server: not private: the server adds the noise itself" in flat
    assert "to clients, public: Gaussian noise, 0.8 × the ℓ2 sensitivity (replace-one); 100 of 943 drawn" in flat


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--budget", "eps=0"], "A budget's eps must be a finite number above 0, not 0."),
        (["--delta", "1"], "δ must be at least 0 and under 1, not 1."),
        (["--stage", "shuffle"], "put OneBit right before it."),
        (["--calibrate"], "--calibrate finds the noise that spends a budget: give one, such as --budget eps=8."),
    ],
)
def test_a_command_that_makes_no_sense_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    code, printed, said = typed(
        monkeypatch, capsys, "run", "fedmf", "--data", PEOPLE, "--out", str(tmp_path / "runs"), *words
    )
    assert (code, printed) == (2, "")
    assert said.strip().endswith(sentence)
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_reference_is_not_run_with_a_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = typed(monkeypatch, capsys, "run", "popularity", "--data", PEOPLE, "--budget", "eps=8")
    assert code == 2
    assert "centralised reference" in said


def test_a_comparison_says_epsilon_by_observer_with_its_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "popularity", "fedmf", "--data", PEOPLE, "--seeds", "1", "--rounds", "2", "--cohort", "10"]
    words += ["--stage", "clip:norm=0.5,order=1", "--stage", "laplace:b=2", "--delta", "0", "--out", str(tmp_path)]
    _, printed, _ = typed(monkeypatch, capsys, *words)
    row = next(line for line in printed.splitlines() if line.strip().startswith("fedmf"))
    # Two rounds of ε = 1/2 each against the server; others do not know who was drawn.
    assert f" 1 {2 * math.log1p(0.25 * math.expm1(0.5)):.3g} " in row
    assert "ε: certified, one user, whole training; δ = 0; ∞ means no bound" in printed
    assert "ε against other clients: as against the public" in printed
