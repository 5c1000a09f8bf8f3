"""The runs of a folder: which there are, how they ended, and which one a name stands for.

It reads texts alone, so that a list is there at once: `homebody.report.record`, which opens a run, needs torch.
"""

from __future__ import annotations

import json
import operator
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from homebody.errors import HomebodyError, unknown_name
from homebody.files import is_held

__all__ = ["LATEST", "RUNS", "ListedRun", "kept", "listed", "named_run", "near_run", "ordered"]

RUNS = Path("runs")
"""Where runs are, unless --out says otherwise."""
LATEST = "latest"
"""The name of the run that was begun last."""
LARGE_IS_GOOD = ("hr@", "ndcg@", "precision@", "recall@", "mrr", "auc", "begun")
"""What is sorted from large to small; anything else from small to large."""
COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}


@dataclass(frozen=True)
class ListedRun:
    """A run as a list shows it. `facts` holds all that runs are filtered and sorted by, under one name each: the
    recipe's fields, the method's, metrics, ε as `epsilon/OBSERVER`, and what is known of the run itself."""

    path: Path
    facts: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.facts.get(name)


def listed(folder: Path) -> list[ListedRun]:
    """Every run of a folder, in the order in which they were begun."""
    if not folder.is_dir():
        raise HomebodyError(
            f"There is no folder {folder}: train something with `homebody run`, or name another folder."
        )
    return sorted(map(_read, _folders(folder)), key=lambda run: (run["begun"], run["name"]))


def named_run(name: Path, folder: Path = RUNS) -> Path:
    """The folder that a name stands for: a path as it is, a run of `runs`, or the latest one if there is any.

    >>> named_run(Path("elsewhere/fedmf-ml-100k-strict-seed0"))
    PosixPath('elsewhere/fedmf-ml-100k-strict-seed0')
    """
    if name.exists() or len(name.parts) != 1:
        return name
    if str(name) == LATEST:
        return max(_folders(folder), key=lambda run: (_begun(run), run.name), default=name)
    return folder / name if (folder / name / "recipe.toml").is_file() else name


def near_run(name: Path, folder: Path = RUNS) -> str:
    """What may have been meant, as the end of a sentence; empty where nothing is near.

    >>> near_run(Path("lastest"))
    " Did you mean 'latest'?"
    """
    known = [LATEST, *(run.name for run in _folders(folder))] if len(name.parts) == 1 else []
    near = get_close_matches(str(name), known, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def kept(runs: Sequence[ListedRun], conditions: Sequence[str]) -> list[ListedRun]:
    """The runs that satisfy every condition, such as method=fedmf, factors=16 or ndcg@10>=0.2.

    >>> runs = [ListedRun(Path("a"), {"method": "fedmf", "ndcg@10": 0.3}), ListedRun(Path("b"), {"method": "ncf"})]
    >>> [str(run.path) for run in kept(runs, ["ndcg@10>0.2"])], [str(run.path) for run in kept(runs, ["method=ncf"])]
    (['a'], ['b'])
    """
    for condition in conditions:
        match = re.fullmatch(r"(.+?)(<=|>=|!=|<|>|=)(.*)", condition.strip())
        if match is None:
            raise HomebodyError(
                f"--where takes NAME=VALUE or a comparison, such as method=fedmf or ndcg@10>=0.2, not '{condition}'."
            )
        name, sign, text = (part.strip() for part in match.groups())
        _refuse_unknown(name, runs)
        runs = [run for run in runs if _holds(run[name], sign, text)]
    return list(runs)


def ordered(runs: Sequence[ListedRun], by: str) -> list[ListedRun]:
    """The best first where the name is a metric, otherwise the smallest, or the latest; runs that lack it come last.

    >>> runs = [ListedRun(Path("a"), {"hr@10": 0.1}), ListedRun(Path("b"), {}), ListedRun(Path("c"), {"hr@10": 0.3})]
    >>> [str(run.path) for run in ordered(runs, "hr@10")]
    ['c', 'a', 'b']
    """
    _refuse_unknown(by, runs)
    there = [run for run in runs if run[by] is not None]
    # Numbers and texts of one name do not compare: numbers come first.
    there.sort(key=lambda run: (not _numeric(run[by]), run[by] if _numeric(run[by]) else str(run[by])))
    if by.rpartition("/")[2].startswith(LARGE_IS_GOOD):
        there.reverse()
    return [*there, *(run for run in runs if run[by] is None)]


def _folders(folder: Path) -> Iterator[Path]:
    return (file.parent for file in folder.glob("*/recipe.toml") if not file.parent.is_symlink())


def _begun(run: Path) -> float:
    """A recipe is written when its run begins, and not again."""
    return (run / "recipe.toml").stat().st_mtime


def _read(run: Path) -> ListedRun:
    recipe, result = _table(run / "recipe.toml", tomllib.loads), _table(run / "result.json", json.loads)
    fields = recipe.pop("fields", {})
    facts: dict[str, Any] = {name: value for name, value in recipe.items() if name != "schema"}
    facts |= fields if isinstance(fields, dict) else {}
    facts["method"] = str(recipe.get("method", "?")).rpartition(":")[2]
    facts |= {"name": run.name, "begun": f"{datetime.fromtimestamp(_begun(run), UTC):%Y-%m-%dT%H:%M:%SZ}"}
    facts |= {name: result[name] for name in ("rounds", "chosen_round", "seconds", "stopped") if name in result}
    facts |= result.get("metrics", {})
    facts |= {f"valid/{name}": value for name, value in result.get("validation", {}).items()}
    facts |= {f"epsilon/{who}": _finite(value) for who, value in result.get("epsilon", {}).items()}
    if result:
        facts["state"] = "finished"
    else:
        facts["state"] = "running" if is_held(run / ".lock") else "not complete"
        facts["rounds"] = _lines(run / "metrics.jsonl")
    return ListedRun(run, facts)


def _table(file: Path, read: Callable[[str], Any]) -> dict[str, Any]:
    """What a file of a run holds; nothing where it is missing or damaged, which `homebody show` explains."""
    try:
        value = read(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _lines(file: Path) -> int:
    try:
        return file.read_bytes().count(b"\n")
    except OSError:
        return 0


def _finite(value: Any) -> Any:
    return float(value) if value in ("inf", "nan") else value


def _numeric(value: Any) -> bool:
    return isinstance(value, int | float)


def _holds(value: Any, sign: str, text: str) -> bool:
    """Whether a value stands so to what was typed: as numbers where both are, otherwise as texts."""
    if value is None:
        return False
    wanted: Any = text
    if _numeric(value) and not isinstance(value, bool):
        try:
            wanted = float(text)
        except ValueError:
            return sign == "!="
        value = float(value)
    elif isinstance(value, bool):
        value = str(value).lower()
    else:
        value = str(value)
    return COMPARISONS[sign](value, wanted)


def _refuse_unknown(name: str, runs: Sequence[ListedRun]) -> None:
    known = {key for run in runs for key in run.facts}
    if not runs or name in known:
        return
    near = get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    usual = ("name", "method", "data", "begun", "state", "rounds", "seconds", "ndcg@10", "epsilon/server")
    raise unknown_name("figure or setting of these runs called", name, {*near, *(key for key in usual if key in known)})
