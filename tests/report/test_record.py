"""The folder of a run: whole files or none, and a checkpoint that is what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import torch
from tests.warm import Nest

from homebody.core import Evaluated
from homebody.errors import HomebodyError
from homebody.progress import Best, Progress, Round
from homebody.report import RunFolder, jsonable
from homebody.report import record as records


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "fedmf")


def progress(step: int = 4, best: int | None = 2) -> Progress:
    """Progress in which every tensor is different, some are views and some share memory."""
    table = torch.arange(12.0).reshape(3, 4) + step
    shared = {"item": table, "row": table[1], "across": table.T}
    clients = {"local/0/user": table + 50, "base_step": torch.tensor([1, -1])}
    chosen = None
    if best == step:
        chosen = Best(step, Evaluated({"ndcg@10": 0.25}, {"user": torch.tensor([0, 3])}), shared, clients)
    elif best is not None:
        chosen = Best(
            best,
            Evaluated({"ndcg@10": 0.1 + 0.2, "hr@10": 1e-17}, {"user": torch.tensor([0, 3])}),
            {"item": table - 7},
            {"local/0/user": table - 9},
        )
    return Progress(step, shared, {"moment": torch.tensor(step * 1.5)}, clients, chosen)


def lines(folder: RunFolder, count: int) -> None:
    for number in range(1, count + 1):
        folder.add_round(Round("train", number, number, 3, None, {}, {"server": float("inf")}, 1, 2, 0.5, 0.25))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("best", [None, 2, 4])
def test_a_checkpoint_comes_back_as_it_was(folder: RunFolder, best: int | None) -> None:
    saved = progress(best=best)
    folder.save(saved)
    loaded = RunFolder(folder.path).load()
    assert loaded is not None
    assert loaded.step == 4
    assert same(loaded.shared, saved.shared)
    assert same(loaded.server, saved.server)
    assert same(loaded.clients, saved.clients)
    assert (loaded.best is None) == (best is None)
    if saved.best and loaded.best:
        assert loaded.best.step == best
        assert loaded.best.evaluated.metrics == saved.best.evaluated.metrics
        assert same(loaded.best.evaluated.per_user, saved.best.evaluated.per_user)
        assert same(loaded.best.shared, saved.best.shared)
        assert same(loaded.best.clients, saved.best.clients)


def test_one_checkpoint_is_kept(folder: RunFolder) -> None:
    for step in (1, 2, 3):
        folder.save(progress(step, best=1))
    assert sorted(path.name for path in folder.path.iterdir()) == ["state-3.safetensors", "state.json"]


def test_no_checkpoint_is_no_progress(folder: RunFolder) -> None:
    lines(folder, 2)
    assert folder.load() is None
    assert folder.rounds() == []


def test_rounds_after_the_checkpoint_are_taken_back(folder: RunFolder) -> None:
    lines(folder, 6)
    before = (folder.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    folder.save(progress(4))
    folder.load()
    assert (folder.path / "metrics.jsonl").read_text() == "".join(before[:4])


def test_a_line_cut_short_is_no_round(folder: RunFolder) -> None:
    lines(folder, 5)
    file = folder.path / "metrics.jsonl"
    file.write_text(file.read_text()[:-9])
    assert [line["round"] for line in folder.rounds()] == [1, 2, 3, 4]
    folder.save(progress(4))
    folder.load()
    lines(folder, 1)
    assert [line["round"] for line in folder.rounds()] == [1, 2, 3, 4, 1]


def test_fewer_rounds_than_the_checkpoint_knows_is_an_error(folder: RunFolder) -> None:
    lines(folder, 3)
    folder.save(progress(4))
    with pytest.raises(HomebodyError, match=r"metrics\.jsonl has 3 whole rounds"):
        folder.check_rounds()


def test_a_line_that_is_no_json_is_an_error(folder: RunFolder) -> None:
    lines(folder, 2)
    file = folder.path / "metrics.jsonl"
    file.write_text(file.read_text().replace('"round": 1', '"round": '))
    with pytest.raises(HomebodyError, match=r"metrics\.jsonl"):
        folder.rounds()


def test_what_a_kill_left_half_written_is_cleared_away(folder: RunFolder) -> None:
    folder.save(progress(4))
    for name in (".state-5.safetensors.partial", ".state.json.partial", ".metrics.jsonl.partial"):
        (folder.path / name).write_bytes(b"half")
    folder.load()
    assert sorted(path.name for path in folder.path.iterdir()) == ["state-4.safetensors", "state.json"]


def test_a_checkpoint_written_whole_but_not_named_is_not_used(folder: RunFolder) -> None:
    """As after a kill between the two files."""
    folder.save(progress(4))
    state = (folder.path / "state-4.safetensors").read_bytes()
    (folder.path / "state-5.safetensors").write_bytes(state)
    loaded = folder.load()
    assert loaded is not None
    assert loaded.step == 4
    folder.save(progress(5))
    assert sorted(path.name for path in folder.path.glob("state-*")) == ["state-5.safetensors"]


@pytest.mark.parametrize("position", [0, 9, 200, -1])
def test_a_flipped_bit_is_noticed(folder: RunFolder, position: int) -> None:
    folder.save(progress())
    file = folder.path / "state-4.safetensors"
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)
    with pytest.raises(HomebodyError, match="corrupt"):
        folder.load()


@pytest.mark.parametrize("left", [0, 5, 100])
def test_a_truncated_checkpoint_is_noticed(folder: RunFolder, left: int) -> None:
    folder.save(progress())
    file = folder.path / "state-4.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(HomebodyError, match="corrupt"):
        folder.load()


def test_a_missing_checkpoint_is_noticed(folder: RunFolder) -> None:
    folder.save(progress())
    (folder.path / "state-4.safetensors").unlink()
    with pytest.raises(HomebodyError, match="cannot be read"):
        folder.load()


@pytest.mark.parametrize("text", ["", '{"schema": 1, "fi', "{}", "[]", '{"schema": "new"}', "\udcff"])
def test_a_pointer_that_says_nothing_is_noticed(folder: RunFolder, text: str) -> None:
    folder.save(progress())
    (folder.path / "state.json").write_text(text, errors="surrogateescape")
    with pytest.raises(HomebodyError, match=r"state\.json"):
        folder.load()


def test_a_newer_checkpoint_is_refused(folder: RunFolder) -> None:
    folder.save(progress())
    pointer = folder.read_json("state.json")
    folder.write_json("state.json", {**pointer, "schema": 2})
    with pytest.raises(HomebodyError, match="newer Homebody"):
        folder.load()


def test_a_checkpoint_that_fails_leaves_the_one_before(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.save(progress(3, best=None))

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.safetensors.torch, "save_file", full)
    with pytest.raises(HomebodyError, match=r"The disk takes no more of .*No space"):
        folder.save(progress(4))
    loaded = RunFolder(folder.path).load()
    assert loaded is not None
    assert loaded.step == 3


def test_a_file_is_replaced_whole_or_not_at_all(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("result.json", "before")
    reader = (folder.path / "result.json").open()

    def refuse(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("homebody.files.os.fsync", refuse)
    with pytest.raises(HomebodyError, match="cannot be written: Input/output error"):
        folder.write_text("result.json", "after, and longer than before")
    assert (folder.path / "result.json").read_text() == "before"
    monkeypatch.undo()
    folder.write_text("result.json", "after, and longer than before")
    assert reader.read() == "before"  # whoever had it open reads on in the old one
    reader.close()
    assert (folder.path / "result.json").read_text() == "after, and longer than before"
    assert [path.name for path in folder.path.iterdir()] == ["result.json"]


def test_checkpoints_take_a_twentieth_of_the_time_at_most(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(records.time, "monotonic", lambda: now[0])
    opened = RunFolder(folder.path)
    assert not opened.due()
    now[0] += 0.99
    assert not opened.due()
    now[0] += 0.02
    assert opened.due()

    def slow(tensors: dict[str, torch.Tensor], path: Path) -> None:
        Path(path).write_bytes(b"")
        now[0] += 0.5

    monkeypatch.setattr(records.safetensors.torch, "save_file", slow)
    opened.save(progress())
    now[0] += 9.9
    assert not opened.due()
    now[0] += 0.2
    assert opened.due()


def test_folders_never_meet(tmp_path: Path) -> None:
    names = [RunFolder.create(tmp_path, "fedmf").path.name for _ in range(3)]
    assert names == ["fedmf", "fedmf-2", "fedmf-3"]


def test_folders_that_cannot_be_made_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for parent in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(HomebodyError, match="No run can be written below"):
            RunFolder.create(parent, "fedmf")


def test_only_a_run_is_opened_as_one(tmp_path: Path) -> None:
    with pytest.raises(HomebodyError, match=r"no run in .*nowhere"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(HomebodyError, match=r"recipe\.toml\.$"):
        RunFolder.open(tmp_path)
    (tmp_path / "fedmf-1").mkdir()
    (tmp_path / "fedmf-1" / "recipe.toml").touch()
    with pytest.raises(HomebodyError, match=r"Name a run inside it, such as .*fedmf-1\.$"):
        RunFolder.open(tmp_path)


def test_a_folder_is_held_by_one_process_at_a_time(folder: RunFolder, warm: Nest) -> None:
    script = (
        "import sys; from pathlib import Path; from homebody.report import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).alone():\n"
        "    print('held', flush=True); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", script, str(folder.path)]
    other = warm.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(HomebodyError, match="Another process is working on"), folder.alone():
        pass
    other.kill()
    other.communicate()
    with folder.alone():  # a holder that was killed holds nothing
        assert (folder.path / ".lock").exists()
    with folder.alone():
        pass


def test_ranks_come_back(folder: RunFolder) -> None:
    per_user = {"user": torch.tensor([0, 2]), "rank": torch.tensor([5, 0]), "full/rank": torch.tensor([50, 1])}
    folder.add_ranks(Evaluated({}, per_user))
    assert folder.ranks().equals(pl.DataFrame({"user": [0, 2], "rank": [5, 0], "full_rank": [50, 1]}))
    assert [path.name for path in folder.path.iterdir()] == ["ranks.parquet"]


def test_what_is_written_is_json_for_everyone(folder: RunFolder) -> None:
    lines(folder, 1)
    folder.write_json("result.json", {"epsilon": float("inf"), "loss": [float("nan"), (1.0, -float("inf"))]})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    (text,) = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(text, parse_constant=refuse)["epsilon"] == {"server": "inf"}
    result = json.loads((folder.path / "result.json").read_text(), parse_constant=refuse)
    assert result == {"epsilon": "inf", "loss": ["nan", [1.0, "-inf"]]}
    assert jsonable({"a": 1, "b": None, "c": True}) == {"a": 1, "b": None, "c": True}
