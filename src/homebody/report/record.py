"""The record of a run: one folder that says what was run, what came of it, and from where to go on.

| file                | what                                                      |
|---------------------|-----------------------------------------------------------|
| recipe.toml         | everything needed to run it again                         |
| environment.json    | versions, machine class, threads                          |
| metrics.jsonl       | a line a round                                            |
| ledger.sqlite       | every privacy charge                                      |
| state.json          | names the last whole checkpoint, its round and checksum   |
| state-N.safetensors | that checkpoint: parameters and every simulated client    |
| ranks.parquet       | where each user's test item stood at the chosen round     |
| result.json         | the outcome; present once the run is complete             |
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import polars as pl
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from homebody.core import Evaluated
from homebody.data.fetch import sha256
from homebody.errors import HomebodyError, Unavailable, several
from homebody.files import appending, holding, insisting, private_folder, replacing
from homebody.progress import Best, Progress, Round
from homebody.report.listing import LATEST, RUNS, near_run

__all__ = ["Negatives", "Parameters", "Result", "RunFolder", "jsonable", "packed", "unpacked"]

SCHEMA_VERSION = 1
OVERHEAD = 0.05
"""Share of a run's time that checkpoints may take."""


class Parameters(TypedDict):
    """How many numbers a trained model has."""

    shared: int
    local: int
    """On a device that joins."""
    model: int
    """One device's model: shared and local numbers, each counted once."""


class Negatives(TypedDict):
    """How many items the held-out ones are ranked against in the sampled metrics, on test."""

    asked: int
    """That the recipe asks for."""
    least: int
    median: float
    short: int
    """Questions with fewer than were asked for: the catalogue has no more that the person does not know."""
    questions: int


class Result(TypedDict):
    """The outcome of a run, simulated or with real devices, as `result.json` holds it.

    In JSON an infinite or undefined number is a text. Fields that are not required are absent from records of older
    versions, or do not apply to one of the two kinds of runs.
    """

    method: str
    data: str
    protocol: str
    split: str
    meaning: str
    """What the metrics measure, in a sentence."""
    seed: int
    rounds: int
    default_rounds: NotRequired[int]
    """That the method takes unless the recipe gives a number."""
    planned_rounds: NotRequired[int]
    """Of this run. A budget may end it sooner."""
    chosen_round: int
    """The round with the best validation metric; its model is kept."""
    metrics: dict[str, float]
    """On test."""
    validation: dict[str, float]
    epsilon: dict[str, float]
    """Certified, for each observer, at `epsilon_delta`."""
    epsilon_unit: str
    epsilon_delta: float
    stages: Sequence[str] | None
    """That the recipe names; None: the method's own."""
    channel: list[str] | None
    """The stages that updates passed; None: centralised."""
    budget: str | None
    stopped: str | None
    """Why training ended before its last round."""
    bytes_up: int
    """Per client and round."""
    bytes_down: int
    seconds: float
    """Wall time of training and evaluation, without compilation."""
    seconds_per_round: float
    """The median over rounds, training only."""
    compile_seconds: NotRequired[float]
    """Wall time in which kernels were compiled. Older records have it within `seconds`."""
    peak_rss_mb: float
    notes: list[str]
    run: str
    """The run's folder."""
    passes: NotRequired[int]
    parameters: NotRequired[Parameters | None]
    reports: NotRequired[dict[str, float] | None]
    """Of randomised reports: how many, and ε of each and of all."""
    cpu_seconds: NotRequired[float]
    beyond: NotRequired[dict[str, Any] | None]
    """Coverage, novelty, diversity, popularity and gaps between groups; only of simulations."""
    references: NotRequired[dict[str, dict[str, float]]]
    """What `popularity` and `chance` get on the same test questions; known in a simulation only."""
    negatives: NotRequired[Negatives]
    cautions: NotRequired[list[str]]
    """What a reader must know before the figures: fewer rounds or items than usual, or a result below popularity."""
    errors: NotRequired[dict[str, float]]
    """The standard error that noise leaves in each metric."""
    unclipped: NotRequired[dict[str, float]]


class RunFolder:
    """A run's folder, open for writing or reading; it is also where `fit` keeps its checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint_every = 1.0
        self._saved = time.monotonic()

    @classmethod
    def create(cls, parent: Path, name: str, *, exact: bool = False) -> RunFolder:
        """A new folder below the parent, its name made unique by a number where needed and not `exact`."""
        with insisting(f"No run can be written below {parent}"):
            parent.mkdir(parents=True, exist_ok=True)
            for number in range(1, 10_000):
                path = parent / (name if number == 1 else f"{name}-{number}")
                try:
                    private_folder(path, exist_ok=False)
                except FileExistsError:
                    if exact:
                        raise HomebodyError(f"{path} is there already: a run is not written over another.") from None
                    continue
                return cls(path)
        raise HomebodyError(f"There are too many runs called {name} in {parent}.")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A run that exists. One that holds links is refused: what is written to it would land elsewhere."""
        with insisting(f"The run in {path} cannot be opened"):
            if not (path / "recipe.toml").is_file():
                if str(path) == LATEST:
                    raise HomebodyError(
                        f"There is no run in {RUNS} yet: train one with `homebody run`, or name a folder."
                    )
                within = max(path.glob("*/recipe.toml"), default=None)
                hint = f" Name a run inside it, such as {within.parent}." if within else near_run(path)
                raise HomebodyError(f"There is no run in {path}: a run's folder holds a recipe.toml.{hint}")
            links = sorted(file.name for file in path.iterdir() if file.is_symlink())
        if links:
            raise HomebodyError(f"{path / links[0]} is a link: a run's folder holds its files themselves.")
        return cls(path)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder: a second process that wants it is refused."""
        with holding(self.path / ".lock", f"Another process is working on {self.path}."):
            yield

    def recipe_text(self) -> str:
        return self._text("recipe.toml")

    @property
    def ledger_path(self) -> Path:
        return self.path / "ledger.sqlite"

    def write_text(self, name: str, text: str) -> None:
        """Replace a file, all or nothing."""
        with replacing(self.path / name) as file:
            file.write(text.encode())

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(jsonable(value), indent=2) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        if not (self.path / name).exists():
            raise HomebodyError(f"{self.path} has no {name}: the run is not complete; --resume continues it.")
        try:
            value = json.loads(self._text(name))
        except ValueError as error:
            raise HomebodyError(f"{self.path / name} is not readable as JSON: {error}.") from error
        if not isinstance(value, dict):
            raise HomebodyError(f"{self.path / name} holds no JSON object: it was changed or cut short.")
        return value

    def result(self) -> Result:
        """The outcome of a complete run, which may have been moved since."""
        return cast(Result, {**self.read_json("result.json"), "run": str(self.path)})

    def _text(self, name: str) -> str:
        try:
            with insisting(f"{self.path / name} cannot be read"):
                return (self.path / name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise HomebodyError(f"{self.path / name} is not a text: {error}.") from error

    def add_round(self, line: Round) -> None:
        with appending(self.path / "metrics.jsonl") as file:
            file.write(json.dumps(jsonable(asdict(line))).encode() + b"\n")

    def rounds(self) -> list[dict[str, Any]]:
        """Every recorded round; a line that a kill cut short is left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        whole, _, _ = self._text("metrics.jsonl").rpartition("\n")
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise HomebodyError(f"{path} has a line that is not JSON: {error}.") from error
        if not all(isinstance(line, dict) for line in lines):
            raise HomebodyError(f"{path} has a line that is no JSON object: it was changed.")
        return lines

    def check_rounds(self) -> None:
        """Refuse a record whose rounds end before its checkpoint."""
        step, _ = self.stands()
        if len(self.rounds()) < step:
            raise HomebodyError(
                f"{self.path / 'metrics.jsonl'} has {several(len(self.rounds()), 'whole round')}, but the checkpoint "
                f"stands at round {step}: the record was cut, so it cannot go on."
            )

    def add_ranks(self, evaluated: Evaluated) -> None:
        if evaluated.per_user:
            columns = {name.replace("/", "_"): value.numpy() for name, value in evaluated.per_user.items()}
            with replacing(self.path / "ranks.parquet") as file:
                content = io.BytesIO()  # polars has errors of its own for a full disk
                pl.DataFrame(columns).write_parquet(content)
                file.write(content.getbuffer())

    def ranks(self) -> pl.DataFrame:
        path = self.path / "ranks.parquet"
        try:
            return pl.read_parquet(path)
        except (pl.exceptions.PolarsError, OSError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise HomebodyError(f"{path} cannot be read: {why}.") from error

    def due(self) -> bool:
        return time.monotonic() - self._saved >= self.checkpoint_every

    def save(self, progress: Progress) -> None:
        began = time.monotonic()
        about, tensors = packed(progress)
        name = f"state-{progress.step}.safetensors"
        with replacing(self.path / name) as file:
            try:
                safetensors.torch.save_file(tensors, file.name)
            except SafetensorError as error:
                raise Unavailable(f"The checkpoint {self.path / name} cannot be written: {error}.") from error
            checksum = sha256(Path(file.name))
        self.write_json("state.json", {"schema": SCHEMA_VERSION, "file": name, "sha256": checksum, **about})
        self._keep_state(name)
        self._saved = time.monotonic()
        self.checkpoint_every = max(1.0, (self._saved - began) / OVERHEAD)

    def load(self) -> Progress | None:
        """The last checkpoint, to go on from; the rounds recorded after it are taken back, to be run again."""
        progress = self.read()
        pointer = self._pointer()
        for left in self.path.glob(".*.partial"):
            left.unlink()
        if (self.path / "metrics.jsonl").exists():
            lines = self.rounds()[: self.stands()[0]]
            self.write_text("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        self._keep_state(pointer["file"] if pointer else "")
        return progress

    def read(self) -> Progress | None:
        """The last checkpoint; nothing is written."""
        pointer = self._pointer()
        if pointer is None:
            return None
        path = self.path / pointer["file"]
        try:
            if sha256(path) != pointer["sha256"]:
                raise HomebodyError(
                    f"The checkpoint {path} is corrupt (its checksum is wrong); run the recipe beside it again."
                )
            tensors = safetensors.torch.load_file(path)
        except FileNotFoundError as error:
            raise HomebodyError(f"The checkpoint {path} cannot be read: it was deleted.") from error
        except (OSError, SafetensorError) as error:
            raise HomebodyError(f"The checkpoint {path} cannot be read: {error}.") from error
        return unpacked(pointer, tensors)

    def stands(self) -> tuple[int, str]:
        """The last checkpoint's round, and what it is bound to."""
        pointer = self._pointer() or {}
        return int(pointer.get("step", 0)), str(pointer.get("digest") or "")

    def _pointer(self) -> dict[str, Any] | None:
        """What names the last whole checkpoint; None before there is one."""
        if not (self.path / "state.json").exists():
            return None
        pointer: Any = self.read_json("state.json")
        shape = {"schema": int, "file": str, "sha256": str, "step": int}
        whole = isinstance(pointer, dict) and all(type(pointer.get(name)) is kind for name, kind in shape.items())
        if not whole or "best" not in pointer or "/" in pointer["file"]:
            raise HomebodyError(f"{self.path / 'state.json'} does not name a checkpoint: it was changed or cut short.")
        if pointer["schema"] > SCHEMA_VERSION:
            raise HomebodyError(f"{self.path} was written by a newer Homebody; update to resume it.")
        return dict(pointer)

    def _keep_state(self, name: str) -> None:
        for old in self.path.glob("state-*.safetensors"):
            if old.name != name:
                old.unlink()


def jsonable(value: Any) -> Any:
    """JSON knows no infinity and no NaN: they become texts.

    >>> jsonable({"epsilon": math.inf, "loss": [1.5, math.nan]})
    {'epsilon': 'inf', 'loss': [1.5, 'nan']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def packed(progress: Progress) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Progress as a few words for JSON and tensors for one file; what the best round has in common is there once."""
    tensors = _prefixed(shared=progress.shared, server=progress.server, clients=progress.clients)
    chosen = None
    if (best := progress.best) is not None:
        tensors |= _prefixed(best_users=best.evaluated.per_user)
        if best.step != progress.step:
            tensors |= _prefixed(best_shared=best.shared, best_clients=best.clients)
        measured = {name: getattr(best.evaluated, name) for name in ("metrics", "errors", "unclipped")}
        chosen = {"step": best.step, **measured}
    words = {"step": progress.step, "best": chosen, "digest": progress.digest, "charged": progress.charged}
    return words, _own_storage(tensors)


def unpacked(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Progress:
    """The inverse of `packed`."""
    parts = (_part(tensors, "shared"), _part(tensors, "server"), _part(tensors, "clients"))
    charged = int(about.get("charged") or 0)  # checkpoints of older versions do not count them
    progress = Progress(about["step"], *parts, digest=str(about.get("digest") or ""), charged=charged)
    if (best := about["best"]) is not None:
        users, noise = _part(tensors, "best_users"), (best.get("errors", {}), best.get("unclipped", {}))
        shared, clients = progress.shared, progress.clients
        if best["step"] != progress.step:
            shared, clients = _part(tensors, "best_shared"), _part(tensors, "best_clients")
        progress.best = Best(best["step"], Evaluated(best["metrics"], users, *noise), shared, clients)
    return progress


def _prefixed(**trees: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}:{name}": value for prefix, tree in trees.items() for name, value in tree.items()}


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(f"{prefix}:"): v for n, v in tensors.items() if n.startswith(f"{prefix}:")}


def _own_storage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share memory, and ones that are views: those few are copied."""
    seen: set[int] = set()
    out = {}
    for name, value in tensors.items():
        value = value.detach().cpu()
        storage = value.untyped_storage()
        if not value.is_contiguous() or storage.data_ptr() in seen or storage.nbytes() != value.nbytes:
            value = value.clone(memory_format=torch.contiguous_format)
        seen.add(value.untyped_storage().data_ptr())
        out[name] = value
    return out
