"""From what people hand over to a recipe: a method as a name, a class or an object; data as a name, a frame or people.

Settings are those of `homebody run`, under the same names, and are checked as a recipe's are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from homebody.core import Method
from homebody.data import Population, load
from homebody.data.partitions import WAYS
from homebody.data.splits import Split
from homebody.errors import HomebodyError, unknown_name
from homebody.evaluation.metrics import main_cutoff
from homebody.methods import build, find, recipe_name, trust
from homebody.privacy.specs import stage_text, stage_texts
from homebody.privacy.stages import Stage
from homebody.recipe import COLUMNS, Recipe
from homebody.reference import Reference
from homebody.run import OF_DATA, InMemory, Watcher, population_of
from homebody.settings import declared, params, plain
from homebody.simulation import Simulator

__all__ = ["MethodSettings", "Named", "data_of", "loaded", "method_of", "population_in", "recipe_of"]

Named = str | Method | Reference | type[Method] | type[Reference]
"""A method or a centralised reference: its name, its class, or itself with its settings."""
OWN = ("method", "data", "fields", "views")
"""Fields of a recipe that are no settings of a call: they have a place of their own, or belong to the data."""
OF_FILES = ("columns", *OF_DATA)
OF_SPLIT = ("split", "protocol", "held_out", "negatives", "public")
OF_RUNTIME = (*OF_SPLIT, "device", "fused", "cutoffs", "slices")

USUAL: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("epochs", "n_epochs", "num_epochs", "max_iter", "n_iter", "iterations"), ("epochs", "rounds")),
    **dict.fromkeys(("n_factors", "num_factors", "latent_dim", "embedding_dim", "dim", "rank"), ("factors", "size")),
    **dict.fromkeys(("lr", "alpha", "eta"), ("learning_rate",)),
    **dict.fromkeys(("random_state", "random_seed"), ("seed",)),
    **dict.fromkeys(("verbose", "progress", "show_progress"), ("quiet",)),
    **dict.fromkeys(("k", "top_k", "topk"), ("cutoffs",)),
}
"""Settings as other packages call them, and as they may be called here."""


class MethodSettings(NamedTuple):
    """A method as a recipe writes it down."""

    name: str
    fields: dict[str, Any]
    stages: list[str]


def method_of(given: Named) -> MethodSettings:
    """A method as a recipe writes it down.

    >>> from homebody.methods.fedmf import FedMF
    >>> method_of(FedMF(factors=8))
    MethodSettings(name='fedmf', fields={'factors': 8}, stages=[])
    >>> method_of("ials").name, method_of(FedMF).name
    ('ials', 'fedmf')
    """
    if isinstance(given, str):
        name = trust(given)  # whoever calls has named the file
        find(name)
        return MethodSettings(name, {}, [])
    if isinstance(given, type) and issubclass(given, Method | Reference):
        return MethodSettings(recipe_name(given), {}, [])
    if not isinstance(given, Method | Reference):
        raise HomebodyError(
            f"A method is a name such as 'fedials', or an object such as hb.FedIALS(factors=16), not {_kind(given)}."
        )
    name = recipe_name(type(given))
    own = {spec.name: getattr(given, spec.name) for spec in params(given)}
    changed = {spec.name: own[spec.name] for spec in params(type(given)) if own[spec.name] != spec.default}
    stages = stage_texts(given.uplink) if isinstance(given, Method) else []
    for tried in ([], stages):
        try:
            if build(name, changed, tried) == given:
                return MethodSettings(name, changed, tried)
        except HomebodyError:  # stages that follow from fields cannot be given
            continue
    raise HomebodyError(
        f"{type(given).__name__} has settings that a recipe cannot write down: give its way out as "
        "stages=['clip:norm=1', …], or as the class's own default."
    )


def data_of(given: object, watcher: Watcher) -> InMemory | str:
    """The data to learn from: a name, or what is in memory."""
    if isinstance(given, Population | Split | Simulator):
        return given
    if isinstance(given, str | Path):
        return str(given)
    if isinstance(given, Method | Reference):
        raise HomebodyError(f"Data was expected, not {_kind(given)}: the method comes first, then the data.")
    if hasattr(given, "collect") and hasattr(given, "catalogue"):
        raise HomebodyError(
            f"{type(given).__name__} is no simulation: homebody.training.fit(method, runtime) trains with a runtime "
            "of its own kind."
        )
    return load(given, say=watcher.say)  # type: ignore[arg-type]  # a frame; it refuses what it cannot read


def recipe_of(method: MethodSettings, data: InMemory | str, settings: Mapping[str, Any]) -> Recipe:
    """The recipe of a call; each setting is checked by name, type and bounds.

    >>> recipe_of(method_of("fedmf"), "ml-100k", {"rounds": 5, "stages": ["clip:norm=1"]}).options()
    ['--data', 'ml-100k', '--rounds', '5', '--stage', 'clip:norm=1']
    >>> recipe_of(method_of("fedmf"), "ml-100k", {"round": 5})
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no setting 'round'; did you mean 'rounds'? Known: budget, ...
    """
    given = {name: plain(value) for name, value in settings.items() if value is not None}
    _refuse_unknown(method, given)
    if "budget" in given and not isinstance(given["budget"], str):
        number = isinstance(given["budget"], int | float)
        given["budget"] = f"eps={given['budget']}" if number else str(given["budget"])  # a `Budget`
    for name in ("stages", "slices", "cutoffs"):
        if name in given:
            several = isinstance(given[name], Iterable) and not isinstance(given[name], str)
            given[name] = [_as_text(each) for each in (given[name] if several else [given[name]])]
    if isinstance(given.get("split"), Split):
        raise HomebodyError("Give a split in the place of the data: hb.fit(method, split).")
    if method.stages:
        if given.get("stages"):
            raise HomebodyError("The method's own uplink and stages= both name stages: give one of the two.")
        given["stages"] = method.stages
    given |= _said_by(data, given)
    if isinstance(data, Simulator) and 10 not in data.cutoffs and find(method.name)().scoring.predicts == "ranking":
        given.setdefault("select", f"valid/ndcg@{main_cutoff(data.cutoffs)}")
    name = data if isinstance(data, str) else population_in(data).name
    recipe = Recipe(method.name, name, fields=method.fields, **given)
    recipe.check()
    return recipe


def _as_text(value: Any) -> Any:
    """A stage as a recipe writes it down, and a number as Python's own."""
    return stage_text(value) if isinstance(value, Stage) else plain(value)


def _refuse_unknown(method: MethodSettings, given: Mapping[str, Any]) -> None:
    """Refuse what is no setting of a call, and say where it belongs."""
    known = [name for name in declared(Recipe) if name not in OWN]
    own = [spec.name for spec in params(find(method.name))]
    for name in given:
        if name in known:
            continue
        if name in (*COLUMNS, "columns"):
            raise HomebodyError(f"{name} is a setting of the data: give it to hb.load, and its result here.")
        meant = next((each for each in (name, *USUAL.get(name, ())) if each in own), None)
        if meant:
            kind = find(method.name).__name__
            raise HomebodyError(f"{name} is a setting of the method: give hb.{kind}({meant}={given[name]!r}).")
        if meant := next((each for each in USUAL.get(name, ()) if each in (*known, "quiet")), None):
            raise HomebodyError(f"There is no setting '{name}'; did you mean '{meant}'?")
        raise unknown_name("setting", name, known)


def loaded(recipe: Recipe, data: InMemory | str, watcher: Watcher) -> InMemory:
    """What a recipe learns from, read if it is a name."""
    return population_of(recipe, watcher) if isinstance(data, str) else data


def _said_by(data: InMemory | str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that data in memory has already."""
    if isinstance(data, str):
        return {}
    _refuse_repeated(OF_FILES, given, "data that is loaded already: give it to hb.load")
    if isinstance(data, Population):
        return {}
    split = data if isinstance(data, Split) else data.split
    if split.way.partition(":")[0] not in WAYS:
        raise HomebodyError(
            f"The split '{split.way}' holds nothing out, so nothing says which round is best: hb.split(people) makes "
            "one that does. homebody.training.fit trains on this one."
        )
    said: dict[str, Any] = {
        "split": split.way,
        "protocol": split.protocol,
        "held_out": split.how,
        "negatives": split.negatives,
    }
    if isinstance(data, Split):
        _refuse_repeated(OF_SPLIT, given, "a split: give it to hb.split")
        return said
    _refuse_repeated(OF_RUNTIME, given, "a Simulator: give it to hb.Simulator")
    more = {"device": str(data.device), "fused": data.fused}
    return {**said, **more, "cutoffs": list(data.cutoffs), "slices": list(data.slices)}


def _refuse_repeated(names: Any, given: Mapping[str, Any], where: str) -> None:
    if repeated := [name for name in names if name in given]:
        raise HomebodyError(f"{repeated[0]} is settled by {where}, and leave it out here.")


def population_in(data: InMemory) -> Population:
    """The people and items of data in memory."""
    split = data.split if isinstance(data, Simulator) else data
    return split.population if isinstance(split, Split) else split


def _kind(given: object) -> str:
    name = type(given).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
