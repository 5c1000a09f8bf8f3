"""What a run records beside its rounds: its environment, its outcome, and notes on guesses and omissions."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import resource
import secrets
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from homebody.core import Evaluated, Method, Recommender, Rows, stated_by
from homebody.data.splits import Split
from homebody.data.views import outside
from homebody.data.vocabularies import Counted, Declaration, Found, found_in
from homebody.errors import HomebodyError, several
from homebody.evaluation import measure_beside_chance
from homebody.methods.baselines import Popularity
from homebody.privacy import OBSERVERS, Channel, Charge, NonPrivate, PureRelease
from homebody.privacy.specs import stage_texts
from homebody.recipe import Recipe, fingerprint
from homebody.reference import Reference
from homebody.report.comparison import cautions
from homebody.report.record import Negatives, Parameters, Result
from homebody.report.statement import VOCABULARY
from homebody.rng import Rng
from homebody.training import Trained

__all__ = [
    "PACKAGE",
    "changes",
    "code_fingerprint",
    "counted",
    "digest_of",
    "environment",
    "guessing",
    "measure_references",
    "notes_of",
    "parameters_of",
    "refuse_found",
    "result_of",
    "unheld",
]

PACKAGE = Path(__file__).resolve().parent


def environment(recipe: Recipe, method: Method | Reference, split: Split) -> dict[str, Any]:
    """Everything that the numbers of a run may depend on."""
    return {
        "homebody": version("homebody"),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "numpy", "numba", "polars")},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if recipe.device.startswith("cuda") else "cpu",
        # A GPU does not sum in the same order twice, so no process repeats the releases of another.
        "repeats": "bit by bit" if recipe.device == "cpu" else secrets.token_hex(8),
        "randomness": "simulated: every number derives from the seed",
        "data_fingerprint": fingerprint(
            {name: np.ascontiguousarray(part).data for name, part in _parts(split, method)}
        ),
        "outside": _outside(recipe, method, split),
        "method_fingerprint": _own_code(method),
        "recipe_fingerprint": fingerprint({"recipe": recipe.to_toml().encode()}),
        "code_fingerprint": code_fingerprint(),
    }


def digest_of(environment: Mapping[str, Any]) -> str:
    """A digest of everything that shapes a release. A round that is run again repeats it only under the same."""
    shapes = {name: value for name, value in environment.items() if name != "cores"}
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:32]


CHANGES = {
    "recipe_fingerprint": "the recipe",
    "code_fingerprint": "Homebody's code",
    "method_fingerprint": "the method's code",
    "data_fingerprint": "the data",
    "homebody": "Homebody's version",
    "packages": "the versions of packages",
    "repeats": "a GPU repeats nothing bit by bit",
}


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The parts of an environment that changed, in words; empty if none did.

    >>> changes({"threads": 1, "python": "3.11"}, {"threads": 2, "python": "3.11"})
    'threads'
    """
    return ", ".join(CHANGES.get(name, name) for name in now if then.get(name) != now[name])


@cache
def code_fingerprint() -> str:
    """A digest of this package's code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        code = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {len(code)}\n".encode())
        digest.update(code)
    return digest.hexdigest()[:16]


def _own_code(method: Method | Reference) -> str:
    """A digest of the files outside this package that a method's classes come from; empty if there are none."""
    classes = [kind for kind in type(method).__mro__ if issubclass(kind, Recommender)]
    modules = dict.fromkeys(kind.__module__ for kind in classes if not kind.__module__.startswith("homebody."))
    files = [file for name in modules if (file := getattr(sys.modules[name], "__file__", None))]
    parts = {f"file{number or ''}": Path(file).read_bytes() for number, file in enumerate(files)}
    return fingerprint(parts) if parts else ""


def _parts(split: Split, method: Method | Reference) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """All data that a model could learn from or be tested on."""
    yield from (("bounds", split.bounds), ("items", split.items))
    if method.scoring.predicts == "ratings" and (ratings := split.population.ratings) is not None:
        yield "ratings", ratings
    for unit, encoded in split.encoded.items():
        yield from ((f"{unit}/{name}", column.values) for name, column in encoded.columns.items())
        for name, vocabulary in _features(split, unit).items():
            if not isinstance(vocabulary, Found):
                # The vocabulary's size shapes the model, even if some values do not occur.
                text = json.dumps(replace(encoded.codes[name], view="").to_json())
                yield f"{unit}/{name}/vocabulary", np.frombuffer(text.encode(), dtype=np.uint8)
    if split.shown is not None and (shown := split.population.impressions):
        yield from (("shown", shown.items), ("to", shown.users), ("in", shown.indptr), ("clicked", shown.clicked))
        yield from (() if split.before is None else [("before", split.before)])
        yield from ((f"shown in {part}", numbers) for part, numbers in split.shown.items() if "train" in split.shown)
    if (elsewhere := split.population.elsewhere) is not None:
        yield from (("elsewhere", elsewhere.items), ("elsewhere of", elsewhere.indptr))


def notes_of(method: Method | Reference, split: Split) -> list[str]:
    """Notes on what was guessed, missing or left out; on features only if the method reads them."""
    looked_at = {"user features": "users", "item features": "items", "contexts": "contexts"}
    taken = dict.fromkeys((*method.needs, *method.uses))
    features = [note for need in taken if need in looked_at for note in split.encoded[looked_at[need]].notes]
    columns = _found(method, split) if isinstance(method, Method) and method.uplink != Channel() else {}
    return [
        *split.population.notes,
        *split.notes,
        *features,
        *_as_found(columns),
        *claimed(method),
        *(phase.note for phase in method.phases if phase.note),
    ]


def claimed(method: Method | Reference) -> list[str]:
    """A note for each method or stage that states its own charges, because Homebody does not derive them."""
    acting = [] if not isinstance(method, Method) else [method, *(each.method for each in method.phases if each.method)]
    return [
        f"{name} states itself what it tells each observer: that is its own claim, kept in the ledger's words. Nothing "
        "derives it, so nothing is certified: ε = ∞."
        for name in dict.fromkeys(map(stated_by, acting))
        if name
    ]


def _as_found(names: Collection[str]) -> list[str]:
    """A note that ε does not cover the vocabularies of these features."""
    if not names:
        return []
    listed = ", ".join(names)
    return [f"The values of {listed}, and the scale of numbers, are those of the people who train: ε leaves them out."]


def _features(split: Split, unit: str) -> Mapping[str, Declaration]:
    """The declared vocabularies of `users`, `items` or `contexts`."""
    tables = {"users": "user_features", "items": "item_features", "contexts": "contexts"}
    table = getattr(split.population, tables[unit])
    return {} if table is None else table.declared


def _taken(method: Method, split: Split) -> list[str]:
    """The features of people and contexts that any phase of the method reads."""
    known = split.catalogue()
    return list(dict.fromkeys(name for phase in method.phases for name in (phase.method or method).takes_in(known)))


def _found(method: Method, split: Split) -> dict[str, bool]:
    """The features of people whose vocabulary comes from training data, and whether the user accepted that."""
    population, taken = split.population, _taken(method, split)
    return {**found_in(population.user_features, taken), **found_in(population.contexts, taken)}


def refuse_found(method: Method, split: Split, planned: Sequence[Sequence[Charge]]) -> None:
    """Refuse a finite ε that would not cover the undeclared vocabularies of people's features."""
    bare = [name for name, said in _found(method, split).items() if not said]
    if not bare or not any(_bounded(planned, observer) for observer in OBSERVERS):
        return
    tables = (split.population.user_features, split.population.contexts)
    kinds = {name: kind for table in tables if table is not None for name, kind in table.kinds.items()}
    say = {"categorical": "hash:64", "multi-hot": "many:hash:64", "text": "text:hash:4096", "numeric": "range:LOW:HIGH"}
    options = " ".join(f"--vocabulary {name}={say[kinds[name]]}" for name in bare)
    raise HomebodyError(
        f"The values of {', '.join(bare)} would come from the people who train, which ε does not cover: a value that "
        f"one person alone has would show in the model's shape. Declare them ({options}), or accept it (--vocabulary "
        f"{bare[0]}=found); docs/your-own-data.md says how."
    )


def counted(method: Method, split: Split, planned: Sequence[Sequence[Charge]]) -> dict[str, list[Charge]]:
    """The charges for vocabularies that are counted with noise, by release. They are charged before training.

    The server sees people's values before it adds the noise.
    """
    declared, taken = {**_features(split, "users"), **_features(split, "contexts")}, _taken(method, split)
    private = {name: given for name, given in declared.items() if name in taken and isinstance(given, Counted)}
    relations = {charge.event.relation for charges in planned for charge in charges if charge.observer != "server"}
    out = {}
    for name, vocabulary in private.items():
        # The noise covers two counts that change. If a person is added or removed, only one does.
        event = PureRelease(vocabulary.epsilon, vocabulary.delta)
        if relations == {"add-remove"}:
            event = PureRelease(vocabulary.epsilon / 2, vocabulary.delta, "add-remove")
        raw = NonPrivate(f"the server counts people's values of {name} before it adds noise")
        out[f"{VOCABULARY}{name}"] = [Charge(who, "user", raw if who == "server" else event) for who in OBSERVERS]
    return out


def _bounded(planned: Sequence[Sequence[Charge]], observer: str) -> bool:
    """Whether this observer is charged for rounds, and every charge is for noise."""
    events = [charge.event for charges in planned for charge in charges if charge.observer == observer]
    return bool(events) and not any(isinstance(event, NonPrivate) for event in events)


def _outside(recipe: Recipe, method: Method | Reference, split: Split) -> list[str]:
    """Facts about the data that shape a model without being charged, for the privacy statement."""
    if not isinstance(method, Method):
        return []
    said = _as_found(_found(method, split))
    population = split.population
    users = population.user_features
    added = recipe.views or {}
    described = users is not None and any(users.views.get(name, "") not in added for name in users.names)
    columns = population.contexts is not None or described
    if columns and recipe.user_features is None and _taken(method, split) and Path(recipe.data).is_file():
        said.append("Which columns of the file describe people, items or interactions was read off its rows.")
    if recipe.data.partition(":")[0] != "synthetic" or recipe.filters:
        said.append(
            f"The catalogue is derived from interactions: its {several(split.n_items, 'item')} and their features are "
            "known because somebody interacted with them."
        )
    return [*said, *outside(recipe.views or {})]


def guessing(evaluated: Evaluated, split: Split) -> list[str]:
    """A baseline for predicted ratings: the error of always predicting the mean training rating."""
    ratings = split.population.ratings
    if "rmse" not in evaluated.metrics or ratings is None:
        return []
    learnt, asked = (split.interactions(part) for part in ("train", "test"))
    mean = float(ratings[learnt].mean(dtype=np.float64))
    wrong = ratings[asked].astype(np.float64) - mean
    both = f"RMSE {np.sqrt((wrong**2).mean()):.4f}, MAE {np.abs(wrong).mean():.4f}"
    return [f"always guessing the mean of the training ratings, {mean:.3f}, has {both}"]


def measure_references(recipe: Recipe, method: Method | Reference, split: Split, result: Result) -> None:
    """Add what chance and popularity get on the same test questions, how many items there were to be ranked against,
    and what a reader must know before the figures."""
    if not result["metrics"]:
        return
    in_context = "contexts" in (*method.needs, *method.uses) and bool(split.encoded["contexts"].columns)
    popular = Popularity().trained(split.histories())
    beside = measure_beside_chance(split, popular, recipe.measured(), recipe.slices, one_by_one=in_context)
    result["references"] = {"popularity": beside.scores, "chance": beside.chance}
    if split.shown is None and len(beside.against):
        result["negatives"] = Negatives(
            asked=split.negatives,
            least=int(beside.against.min()),
            median=float(np.median(beside.against)),
            short=int((beside.against < split.negatives).sum()),
            questions=len(beside.against),
        )
    result["cautions"] = cautions([result])


def unheld(recipe: Recipe, method: Method | Reference) -> list[str]:
    """A note that a reference ignores the recipe's stages and budget, for tables that show it beside methods."""
    if isinstance(method, Method) or not (recipe.stages or recipe.budget):
        return []
    return [f"{recipe.method} is centralised and collects raw data: stages and budget do not hold for it"]


def result_of(
    recipe: Recipe,
    method: Method | Reference,
    lines: Sequence[Mapping[str, Any]],
    evaluated: Evaluated,
    epsilon: dict[str, float],
    *,
    data: str,
    meaning: str,
    chosen: int,
    stopped: str | None,
    notes: list[str],
    run: Path,
) -> Result:
    """The outcome of a run, simulated or with real devices, from its recorded rounds and its chosen one."""
    metrics, answers = evaluated.metrics, max(1, sum(line["clients"] for line in lines))
    return {
        "method": recipe.method,
        "data": data,
        "protocol": recipe.protocol,
        "split": recipe.split,
        "meaning": meaning,
        "seed": recipe.seed,
        "rounds": len(lines),
        "default_rounds": method.about.rounds,
        "planned_rounds": recipe.rounds or method.about.rounds,
        "chosen_round": chosen,
        "metrics": {name: value for name, value in metrics.items() if not name.startswith("valid/")},
        "validation": {n.removeprefix("valid/"): v for n, v in metrics.items() if n.startswith("valid/")},
        "epsilon": epsilon,
        "epsilon_unit": "user",
        "epsilon_delta": recipe.stated_at,
        "stages": recipe.stages,
        "channel": stage_texts(method.uplink) if isinstance(method, Method) else None,
        "budget": recipe.budget,
        "stopped": stopped,
        "bytes_up": round(sum(line["bytes_up"] for line in lines) / answers),
        "bytes_down": round(sum(line["bytes_down"] for line in lines) / answers),
        "seconds": sum(line["seconds"] + line["evaluation_seconds"] for line in lines),
        "seconds_per_round": statistics.median([line["seconds"] for line in lines] or [0.0]),
        "compile_seconds": sum(line.get("compile_seconds", 0.0) for line in lines),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "notes": notes,
        "run": str(run),
    }


def parameters_of(fitted: Trained, seed: int) -> Parameters:
    """How many numbers are shared, how many a device that joins holds, and how many one device's model has of both.

    A device's own copy of a shared tensor counts once in the model, and rows of a table are part of the table.
    """
    shared = {name: value.cpu() for name, value in fitted.shared.items()}
    local = fitted.method.init_local(shared, Rng.of(seed, "parameters"))
    sizes = {name: value.numel() for name, value in local.items() if not isinstance(value, Rows)}
    known = {name: value.numel() for name, value in shared.items()}
    whole = {**known, **sizes}
    return {"shared": sum(known.values()), "local": sum(sizes.values()), "model": sum(whole.values())}
