"""From a recipe to a record: repeatable, resumable after a kill at any step, and refusing what was changed."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.warm import Nest

from homebody.errors import HomebodyError
from homebody.evaluation import beyond
from homebody.methods import trust
from homebody.privacy import Ledger
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.report.record import jsonable
from homebody.report.terminal import print_result
from homebody.run import Watcher, execute, reopen, resume
from homebody.simulation import Simulator

DATA = "synthetic:users=30,items=40,mean=8"
FEDMF = Recipe("fedmf", DATA, fields={"factors": 4}, rounds=5, cohort=12)
TIMES = {"seconds", "seconds_per_round", "evaluation_seconds", "cpu_seconds", "peak_rss_mb", "run"}


def told(path: Path) -> dict[str, Any]:
    """Everything a finished run says, its times and its place aside."""
    folder = RunFolder.open(path)
    ledger = Ledger(folder.ledger_path)
    entries = ledger.entries()
    ledger.close()

    def timeless(line: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in line.items() if name not in TIMES}

    return {
        "result": timeless(folder.read_json("result.json")),
        "rounds": [timeless(line) for line in folder.rounds()],
        "ledger": entries,
        "ranks": folder.ranks().to_dicts(),
        "files": sorted(file.name for file in path.iterdir()),
        "state": folder.read_json("state.json") if (path / "state.json").exists() else None,
    }


def the_run(parent: Path) -> Path:
    (path,) = parent.iterdir()
    return path


class Stop(BaseException):
    """Ends a run from inside, as Ctrl-C does."""


def stopping_after(rounds: int) -> Watcher:
    def on_round(line: Any) -> None:
        if line.round == rounds:
            raise Stop

    return Watcher(on_round=on_round)


def stopped(recipe: Recipe, parent: Path, rounds: int = 3, monkeypatch: pytest.MonkeyPatch | None = None) -> Path:
    """The folder of a run that was interrupted after some rounds; with `monkeypatch`, each has a checkpoint."""
    if monkeypatch:
        monkeypatch.setattr(RunFolder, "due", lambda self: True)
    with pytest.raises(Stop):
        execute(recipe, parent, stopping_after(rounds))
    return the_run(parent)


KILLING = '''
"""Runs a recipe again and again, killed at one step of writing after the other, and resumed each time."""
import os, sys
from pathlib import Path

import safetensors.torch
from homebody.privacy import Ledger
from homebody.methods import trust
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.run import execute, resume

RunFolder.due = lambda self: True
recipe, parent = Recipe.from_toml(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
offset, stride = int(sys.argv[3]), int(sys.argv[4])
step, fatal = 0, 0

def may_die(leave=lambda: None):
    global step
    step += 1
    if step == fatal:
        leave()
        os.kill(os.getpid(), 9)

def dying(owner, name):
    real = getattr(owner, name)
    def call(*args, **kwargs):
        may_die()
        out = real(*args, **kwargs)
        may_die()
        return out
    setattr(owner, name, call)

dying(Path, "replace"); dying(Path, "unlink"); dying(Ledger, "charge"); dying(RunFolder, "add_ranks")

save_file = safetensors.torch.save_file
def half_saving(tensors, path):
    may_die(lambda: Path(path).write_bytes(b"half"))
    save_file(tensors, path)
    may_die()
safetensors.torch.save_file = half_saving

add_round = RunFolder.add_round
def half_adding(self, line):
    def half():
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write('{"phase": "tr')
    may_die(half)
    add_round(self, line)
    may_die()
RunFolder.add_round = half_adding

def child(fatal_step, work):
    """Work in a process of its own, which is killed at a step; 0: never. Gives the status and the steps done."""
    global fatal, step
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            fatal, step = fatal_step, 0
            work()
            os.write(writing, b"%d" % step)
            os._exit(0)
        except BaseException as error:
            import traceback; traceback.print_exc()
            os._exit(1)
    os.close(writing)
    said = os.read(reading, 99)
    os.close(reading)
    return os.waitpid(pid, 0)[1], int(said or 0)

# Kernels are loaded once, here; polars, which must not be forked once it runs, is left to the children.
with_ranks, RunFolder.add_ranks = RunFolder.add_ranks, lambda self, evaluated: None
execute(recipe, parent / "warm")
RunFolder.add_ranks = with_ranks
status, steps = child(0, lambda: execute(recipe, parent / "whole"))
assert status == 0
print(steps)
for point in range(1 + offset, steps + 1, stride):
    place = parent / f"killed-{point}"
    status, _ = child(point, lambda: execute(recipe, place))
    assert status == 9, (point, status)
    runs = list(place.iterdir()) if place.exists() else []
    if not runs or not (runs[0] / "recipe.toml").exists():
        print("nothing", place.name)
        continue
    # Killed once more while it resumes, a few steps further.
    child(5 + point % 7, lambda: resume(runs[0]))
    status, _ = child(0, lambda: resume(runs[0]))
    print("resumed" if status == 0 else "failed", place.name)
'''


@pytest.mark.parametrize(
    ("recipe", "offset", "stride"),
    [
        (replace(FEDMF, rounds=2), 0, 4),
        (replace(FEDMF, rounds=2), 2, 4),
        (Recipe("pfedrec", DATA, fields={"factors": 4}, rounds=3, evaluate_every=2), 1, 4),
        (Recipe("popularity", DATA), 0, 1),
    ],
    ids=["fedmf", "fedmf, other steps", "pfedrec", "popularity"],
)
def test_a_run_killed_at_any_step_of_writing_and_again_while_resuming(
    tmp_path: Path, recipe: Recipe, offset: int, stride: int, warm: Nest
) -> None:
    """SIGKILL before and after each replacement, removal, charge and line, and amid checkpoints and lines."""
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    arguments = [str(tmp_path / "recipe.toml"), str(tmp_path), str(offset), str(stride)]
    # It forks itself, so it needs what the warm process has: one thread, and a threading layer that survives a fork.
    done = warm.run([sys.executable, "-c", KILLING, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps, *outcomes = done.stdout.splitlines()
    assert int(steps) >= 12
    expected = told(the_run(tmp_path / "whole"))
    assert not [line for line in outcomes if line.startswith("failed")], done.stderr[-3000:]
    resumed = [line.split()[1] for line in outcomes if line.startswith("resumed")]
    nothing = len(outcomes) - len(resumed)
    assert nothing <= 3  # before the recipe was there
    for name in resumed:
        assert (name, told(the_run(tmp_path / name))) == (name, expected)


def test_the_same_recipe_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        execute(replace(FEDMF, seed=seed), tmp_path / name)
    one, two, other = (told(the_run(tmp_path / name)) for name in ("one", "two", "other"))
    assert one == two
    assert one["result"]["metrics"] != other["result"]["metrics"]


def test_what_a_record_holds(tmp_path: Path) -> None:
    result = execute(FEDMF, tmp_path)
    path = the_run(tmp_path)
    assert sorted(file.name for file in path.iterdir()) == [
        ".lock",
        "environment.json",
        "ledger.sqlite",
        "metrics.jsonl",
        "ranks.parquet",
        "recipe.toml",
        "result.json",
        "state-5.safetensors",
        "state.json",
    ]
    assert Recipe.from_toml((path / "recipe.toml").read_text()) == FEDMF
    assert result["run"] == str(path)
    folder = RunFolder.open(path)
    lines = folder.rounds()
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert {line["clients"] for line in lines} == {12}
    assert result["bytes_up"] == round(sum(line["bytes_up"] for line in lines) / 60)
    assert result["bytes_down"] == (40 + 1) * 4 * 4
    assert (result["passes"], result["parameters"]) == (1, {"shared": 164, "local": 4, "model": 164})
    assert result["epsilon"] == {"server": "inf", "clients": "inf", "public": "inf"}
    best = max(lines, key=lambda line: line["metrics"]["valid/ndcg@10"])
    assert result["chosen_round"] == best["round"]
    assert result["metrics"] == {n: v for n, v in best["metrics"].items() if not n.startswith("valid/")}
    assert result["validation"]["ndcg@10"] == best["metrics"]["valid/ndcg@10"]
    assert len(folder.ranks()) == 30
    assert told(path)["ledger"][-1].release == "train/5"


def test_what_a_device_has_its_own_copy_of_counts_once(tmp_path: Path) -> None:
    """PFedRec: a table of 40 × 4, and a score function of 5 that is shared once and then kept."""
    recipe = Recipe("pfedrec", DATA, fields={"factors": 4, "epochs": 3}, rounds=1)
    result = execute(recipe, tmp_path)
    assert result["parameters"] == {"shared": 165, "local": 5, "model": 165}
    assert result["passes"] == 3
    assert execute(Recipe("fedrecon", DATA, fields={"factors": 4, "rebuild": 5}, rounds=1), tmp_path)["passes"] == 5
    assert execute(Recipe("popularity", DATA, rounds=1), tmp_path)["parameters"] is None


def test_the_environment_names_neither_people_nor_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import getpass
    import socket

    method = tmp_path / "mine.py"
    method.write_text("from homebody.methods.fedmf import FedMF\n\n\nclass Mine(FedMF):\n    mine = True\n")
    execute(replace(FEDMF, method=trust(f"{method}:Mine"), rounds=1), tmp_path / "runs")
    text = (the_run(tmp_path / "runs") / "environment.json").read_text()
    found = json.loads(text)
    assert {"homebody", "python", "packages", "system", "cores", "threads", "device", "randomness"} < set(found)
    assert found["method_fingerprint"]
    assert "/" not in text
    assert socket.gethostname() not in text
    assert getpass.getuser() not in text.lower()


@pytest.mark.parametrize(("name", "rounds"), [("popularity", 1), ("ials", 3)])
def test_a_reference_says_what_it_collected(tmp_path: Path, name: str, rounds: int) -> None:
    result = execute(Recipe(name, DATA, rounds=3), tmp_path)
    assert (result["rounds"], result["bytes_down"]) == (rounds, 0)
    lines = told(the_run(tmp_path))["rounds"]
    sent = 4 * sum(len(history) - 2 for history in histories())
    assert [line["bytes_up"] for line in lines] == [sent, 0, 0][:rounds]
    assert result["bytes_up"] == round(sent / len(histories()))
    best = max(lines, key=lambda line: line["metrics"]["valid/ndcg@10"])
    assert (result["chosen_round"], result["metrics"]["hr@10"]) == (best["round"], best["metrics"]["hr@10"])
    ledger = told(the_run(tmp_path))["ledger"]
    assert {json.loads(entry.event)["reason"] for entry in ledger} == {"raw data collected"}
    with pytest.raises(HomebodyError, match="keeps figures, not a model"):
        reopen(the_run(tmp_path))


def histories() -> list[Any]:
    from homebody.data import load

    population = load(DATA)
    return [population.history(user) for user in range(population.n_users)]


def test_an_interrupted_run_keeps_its_rounds_and_goes_on(tmp_path: Path) -> None:
    execute(FEDMF, tmp_path / "whole")
    path = stopped(FEDMF, tmp_path / "part")
    assert not (path / "result.json").exists()
    with pytest.raises(HomebodyError, match="not complete"):
        reopen(path)
    rounds: list[int] = []
    result = resume(path, Watcher(on_round=lambda line: rounds.append(line.round)))
    assert rounds == [1, 2, 3, 4, 5]  # no checkpoint was due yet
    assert told(path) == told(the_run(tmp_path / "whole"))
    assert resume(path) == result  # a finished run says its result again


def test_a_run_goes_on_after_its_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute(FEDMF, tmp_path / "whole")
    path = stopped(FEDMF, tmp_path / "part", 3, monkeypatch)
    rounds: list[int] = []
    resume(path, Watcher(on_round=lambda line: rounds.append(line.round)))
    assert rounds == [3, 4, 5]  # the third was recorded, but stopped before its checkpoint
    assert told(path) == told(the_run(tmp_path / "whole"))


def test_an_interruption_in_the_first_round_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from homebody.simulation import Simulator

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Simulator, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(FEDMF, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_killed_before_its_environment_was_written_goes_on(tmp_path: Path) -> None:
    """The recipe alone makes a folder a run, so from then on it must be resumable."""
    execute(FEDMF, tmp_path / "whole")
    path = tmp_path / "part" / "run"
    path.mkdir(parents=True)
    shutil.copy(the_run(tmp_path / "whole") / "recipe.toml", path)
    resume(path)
    assert told(path) == told(the_run(tmp_path / "whole"))


def test_a_finished_run_recommends_as_it_did_when_it_ended(tmp_path: Path) -> None:
    from homebody.data import load
    from homebody.data.partitions import leave_one_out
    from homebody.simulation import Simulator
    from homebody.training import fit

    execute(FEDMF, tmp_path)
    fitted, population = reopen(the_run(tmp_path))
    direct = fit(FEDMF.build(), Simulator(leave_one_out(load(DATA))), rounds=5, cohort=12)
    assert fitted.metrics == direct.metrics
    assert fitted.training == direct.training
    for user in range(population.n_users):  # those who never took part too
        assert fitted.ranked(user) == direct.ranked(user)
    fitted.ledger.close()


def test_a_finished_loop_recommends_to_newcomers_as_before(tmp_path: Path) -> None:
    """Someone who never took part draws the same start, whether the loop ran now or was found finished."""
    from homebody.data import load
    from homebody.data.partitions import leave_one_out
    from homebody.simulation import Simulator
    from homebody.training import fit

    split = leave_one_out(load(DATA))
    folder = RunFolder.create(tmp_path, "run")
    asked = {"rounds": 2, "cohort": 3, "seed": 4, "ledger": Ledger()}
    first = fit(FEDMF.build(), Simulator(split), **asked, checkpoints=folder)
    again = fit(FEDMF.build(), Simulator(split), **asked, checkpoints=RunFolder(folder.path))
    for user in range(30):
        assert again.ranked(user) == first.ranked(user)


@pytest.fixture
def mine(tmp_path: Path) -> Recipe:
    """A recipe of one's own method and one's own data, which can both be changed."""
    (tmp_path / "mine.py").write_text(
        "from homebody.methods.fedmf import FedMF\n\n\nclass Mine(FedMF):\n    mine = True\n"
    )
    rows = [f"u{user},i{item}" for user, history in enumerate(histories()) for item in history]
    (tmp_path / "my.csv").write_text("\n".join(["u,i", *rows]) + "\n")
    columns = {"user_col": "u", "item_col": "i"}
    return replace(FEDMF, method=trust(f"{tmp_path / 'mine.py'}:Mine"), data=str(tmp_path / "my.csv"), columns=columns)


def refused(path: Path, *parts: str) -> None:
    """The run is not resumed, in one sentence, and its folder stays as it is."""
    before = contents(path)
    with pytest.raises(HomebodyError) as caught:
        resume(path, trust_code=True)
    sentence = str(caught.value)
    assert "\n" not in sentence.strip()
    for part in parts:
        assert part in sentence
    assert contents(path) == before


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith((".", "ledger."))}


def test_a_resumed_run_needs_the_data_it_began_with(tmp_path: Path, mine: Recipe) -> None:
    path = stopped(mine, tmp_path / "runs")
    data = Path(mine.data)
    text = data.read_text()
    data.write_text(text + "u0,i39\nu0,new\n")
    refused(path, "The data changed")
    data.unlink()
    refused(path, "my.csv")
    data.write_text(text)
    assert resume(path)["rounds"] == 5


def test_a_resumed_run_needs_the_method_it_began_with(tmp_path: Path, mine: Recipe) -> None:
    path = stopped(mine, tmp_path / "runs")
    method = Path(mine.method.rpartition(":")[0])
    text = method.read_text()
    method.write_text(text + "    mine = 7\n")
    refused(path, "The method's file changed")
    method.unlink()
    refused(path, "mine.py")
    method.write_text(text)
    assert resume(path, trust_code=True)["rounds"] == 5


@pytest.mark.parametrize("change", ["more items", "other items"])
def test_recommending_needs_the_data_of_the_run(tmp_path: Path, mine: Recipe, change: str) -> None:
    execute(mine, tmp_path / "runs")
    data = Path(mine.data)
    rows = data.read_text().splitlines()
    rows = [*rows, "u0,new"] if change == "more items" else [rows[0], *reversed(rows[1:])]
    data.write_text("\n".join(rows) + "\n")
    with pytest.raises(HomebodyError, match="The data changed"):
        reopen(the_run(tmp_path / "runs"))


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a checkpoint after round 2 and a third round recorded."""
    path = stopped(FEDMF, tmp_path / "runs", 3, monkeypatch)
    assert (path / "state-2.safetensors").exists()
    return path


def test_a_corrupt_checkpoint_is_refused(broken: Path) -> None:
    checkpoint = broken / "state-2.safetensors"
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
    refused(broken, "state-2.safetensors", "corrupt")
    checkpoint.write_bytes(content[:100])
    refused(broken, "state-2.safetensors", "corrupt")
    checkpoint.unlink()
    refused(broken, "state-2.safetensors", "cannot be read")
    checkpoint.write_bytes(content)
    assert resume(broken)["rounds"] == 5


def test_a_truncated_pointer_is_refused(broken: Path) -> None:
    pointer = broken / "state.json"
    pointer.write_text(pointer.read_text()[:40])
    refused(broken, "state.json", "JSON")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text + "speed = 3\n", "There is no recipe field 'speed'"),
        (lambda text: text.replace("schema = 2", "schema = 3"), "newer Homebody"),
        (lambda text: text.replace("seed = 0", "seed = "), "not valid TOML"),
        (lambda text: text.replace('"fedmf"', '"fedmg"'), "did you mean 'fedmf'"),
        (lambda text: text.replace("factors", "factor"), "did you mean 'factors'"),
        (lambda text: text.replace("rounds = 5", 'rounds = "five"'), "rounds"),
    ],
    ids=["unknown field", "newer", "not TOML", "unknown method", "unknown setting", "not a number"],
)
def test_a_recipe_that_was_spoilt_is_refused(broken: Path, change: Any, said: str) -> None:
    recipe = broken / "recipe.toml"
    text = recipe.read_text()
    spoilt = change("speed = 3\n" + text if said.endswith("'speed'") else text)
    assert spoilt != text
    recipe.write_text(spoilt.removesuffix("speed = 3\n"))
    refused(broken, said)


def test_a_recipe_that_is_no_text_is_refused(broken: Path) -> None:
    (broken / "recipe.toml").write_bytes(b"method = '\xff\xfe'\n")
    refused(broken, "recipe")


def test_metrics_cut_mid_line_are_run_again(broken: Path, tmp_path: Path) -> None:
    metrics = broken / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-30])
    resume(broken)
    execute(FEDMF, tmp_path / "whole")
    assert told(broken) == told(the_run(tmp_path / "whole"))


def test_metrics_cut_below_the_checkpoint_are_refused(broken: Path) -> None:
    metrics = broken / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0] + lines[1][:50])
    refused(broken, "metrics.jsonl")


def test_metrics_that_are_no_json_are_refused(broken: Path) -> None:
    metrics = broken / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0][:50] + "\n" + lines[1] + lines[2])
    refused(broken, "metrics.jsonl")


def on_ledger(path: Path, *statements: str) -> None:
    database = sqlite3.connect(path / "ledger.sqlite", isolation_level=None)
    for statement in statements:
        database.execute(statement)
    database.close()


def test_a_ledger_that_was_changed_is_refused(broken: Path) -> None:
    on_ledger(
        broken,
        "DROP TRIGGER charge_is_never_changed",
        'UPDATE charge SET event = \'{"kind": "private"}\' WHERE id = 2',
    )
    refused(broken, "tampered with", "row 2")


def test_a_ledger_that_was_changed_is_refused_when_the_run_is_complete_too(tmp_path: Path) -> None:
    execute(FEDMF, tmp_path)
    path = the_run(tmp_path)
    on_ledger(path, "DROP TRIGGER charge_is_never_removed", "DELETE FROM charge WHERE id = 3")
    refused(path, "tampered with", "row 4")


def test_a_run_that_diverges_later_says_where_its_rounds_are(tmp_path: Path) -> None:
    with pytest.raises(HomebodyError, match="diverged in round 3") as caught:
        execute(replace(FEDMF, fields={"learning_rate": 30.0, "item_rate": 1e34}), tmp_path)
    path = the_run(tmp_path)
    assert str(caught.value).endswith(f"The rounds before are recorded in {path}.")
    assert len(RunFolder.open(path).rounds()) == 2


def test_a_newer_ledger_is_refused(broken: Path) -> None:
    on_ledger(broken, "PRAGMA user_version = 99")
    refused(broken, "ledger", "newer Homebody")


def test_a_ledger_that_is_none_is_refused(broken: Path) -> None:
    for file in broken.glob("ledger.sqlite*"):
        file.unlink()
    (broken / "ledger.sqlite").write_text("this is not a database, it is a text\n" * 20)
    refused(broken, "ledger")


@pytest.mark.parametrize("loss", ["all of it", "its last rows"])
def test_a_ledger_that_lost_charges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    """A checkpoint says that rounds were released; a ledger that does not know them would print too small an ε."""

    def full(self: RunFolder, evaluated: Any) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "add_ranks", full)
        with pytest.raises(Stop):
            execute(FEDMF, tmp_path)
    path = the_run(tmp_path)
    if loss == "all of it":
        for file in path.glob("ledger.sqlite*"):
            file.unlink()
    else:
        on_ledger(path, "DROP TRIGGER charge_is_never_removed", "DELETE FROM charge WHERE id > 6")
    refused(path, "ledger")


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe("fedmg", DATA), "did you mean 'fedmf'"),
        (Recipe("fedmf", "synthetics"), "did you mean 'synthetic'"),
        (replace(FEDMF, rounds=0), "Rounds must be at least 1, not 0"),
        (replace(FEDMF, rounds=-3), "Rounds must be at least 1, not -3"),
        (replace(FEDMF, cohort=0), "A cohort has 1 to 30 clients"),
        (replace(FEDMF, cohort=31), "A cohort has 1 to 30 clients"),
        (replace(FEDMF, protocol="strickt"), "did you mean 'strict'"),
        (replace(FEDMF, held_out="newest"), "There is no way to hold out 'newest'"),
        (replace(FEDMF, negatives=0), "at least 1 negative"),
        (replace(FEDMF, fields={"factors": 0}), "factors must be at least 1"),
        (replace(FEDMF, device="gpu"), "The device 'gpu' cannot be used"),
        (replace(FEDMF, evaluate_every=-1), "evaluate_every must be at least 0, not -1"),
        (replace(FEDMF, select="valid/ndgc@10"), "did you mean 'valid/ndcg@10'"),
        (replace(FEDMF, select="valid/ndcg@0"), "There is no metric to choose the round by 'valid/ndcg@0'"),
        (Recipe("ials", DATA, rounds=2, select="valid/ndgc@10"), "did you mean 'valid/ndcg@10'"),
        (Recipe("popularity", DATA, evaluate_every=-1), "evaluate_every must be at least 0, not -1"),
        (replace(FEDMF, cutoffs=[], select="valid/auc"), "The metrics need a cut-off"),
        (replace(FEDMF, cutoffs=[0]), "Each of the recipe's cutoffs must be at least 1, not 0"),
        (replace(FEDMF, cutoffs=[2.5]), "Each of the recipe's cutoffs must be a whole number, not 2.5"),
        (replace(FEDMF, slices=["many"]), "A slice of users is a range .* not 'many'"),
        (replace(FEDMF, slices=["900-"]), "No user of .* has 900- interactions"),
        (replace(FEDMF, split="ration"), "There is no split 'ration'; did you mean 'ratio'"),
        (replace(FEDMF, split="impressions"), "has no impressions"),
        (replace(FEDMF, split="held-out-users", cohort=22), "A cohort has 1 to 21 clients with this data, not 22"),
        (replace(FEDMF, seed=2**80), "seed"),
        (replace(FEDMF, columns={"user_col": "u"}), "--user-col is for a file of your own"),
        (replace(FEDMF, data="synthetic:users=4,items=2,mean=2"), "No user of .* has the 3 interactions"),
        (replace(FEDMF, fields={"learning_rate": 1e38}), "diverged in round 1"),
    ],
)
def test_what_cannot_be_run_leaves_nothing(tmp_path: Path, recipe: Recipe, said: str) -> None:
    with pytest.raises(HomebodyError, match=said):
        execute(recipe, tmp_path / "runs")
    assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []


def test_people_with_too_few_interactions_are_counted_and_reported(tmp_path: Path) -> None:
    rows = [f"u{user},i{item}" for user in range(6) for item in range(2 if user < 2 else 5)]
    (tmp_path / "my.csv").write_text("\n".join(["user,item", *rows]) + "\n")
    said: list[str] = []
    recipe = Recipe("fedmf", str(tmp_path / "my.csv"), rounds=1)
    result = execute(recipe, tmp_path / "runs", Watcher(say=said.append))
    assert result["notes"] == said
    assert "2 of 6 users have fewer than 3 interactions" in said[1]


def test_a_run_says_that_its_stages_leave_out_the_shuffle(tmp_path: Path) -> None:
    said: list[str] = []
    recipe = Recipe("fmf-ldp", "synthetic:users=20,items=30", rounds=1, stages=["one-bit:epsilon=1,k=5"])
    result = execute(recipe, tmp_path, Watcher(say=said.append))
    assert said == result["notes"] == ["fmf-ldp's own channel shuffles; these stages do not"]


def test_a_run_names_the_stages_of_a_methods_own_channel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe("private-popularity", "synthetic:users=20,items=30", rounds=1)
    result = execute(recipe, tmp_path)
    assert (result["stages"], result["channel"]) == ([], ["one-bit:epsilon=2.5,k=100", "shuffle"])
    print_result(result)
    assert "\nstages: one-bit:epsilon=2.5,k=100 → shuffle\n" in capsys.readouterr().out
    given = execute(replace(recipe, stages=["one-bit:epsilon=1,k=5", "shuffle"]), tmp_path)
    assert given["channel"] == given["stages"] == ["one-bit:epsilon=1,k=5", "shuffle"]
    assert execute(Recipe("popularity", recipe.data, rounds=1), tmp_path)["channel"] is None


@pytest.mark.parametrize("chosen", ["last", "earlier"])
def test_a_run_records_what_its_lists_are_like(tmp_path: Path, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the chosen round, whether its scores were at hand or are worked out again."""
    apart: list[bool] = []
    plain = Simulator.first_items

    def counted(self: Simulator, *arguments: Any) -> Any:
        apart.append(True)
        return plain(self, *arguments)

    monkeypatch.setattr(Simulator, "first_items", counted)
    rounds = 3
    if chosen == "earlier":  # training goes too far after a good round
        recipe = Recipe("fedmf", DATA, rounds=rounds, fields={"factors": 4, "learning_rate": 0.9}, evaluate_every=1)
        result = execute(recipe, tmp_path)
        if result["chosen_round"] == rounds:
            pytest.skip("the last round is the best here")
    else:
        result = execute(Recipe("fedmf", DATA, rounds=rounds, fields={"factors": 4}, evaluate_every=3), tmp_path)
        assert result["chosen_round"] == rounds
    assert bool(apart) == (chosen == "earlier")
    trained, _ = reopen(Path(result["run"]))
    runtime = trained.runtime
    assert isinstance(runtime, Simulator)
    lists = plain(runtime, trained.method, trained.shared)
    found = beyond(runtime.split, replace(trained.evaluated, lists=lists), trained.shared["item"])
    assert found is not None
    assert result["beyond"] == jsonable(found)


def test_a_reference_records_what_its_lists_are_like(tmp_path: Path) -> None:
    found = execute(Recipe("popularity", DATA), tmp_path)["beyond"]
    assert found is not None
    assert 0 < found["coverage"] < 1
    assert found["popularity_lift"] > 0
    assert "diversity" not in found
