"""Probes measure a trained model while its cell still has it. Each probe's answer is stored beside the cell's result.

- tables: how well clients rank with their own item table, with the shared one, and with another client's.
- embedding: one client's items in two dimensions, and how well its own items separate from the others.
- adaptation: how well one model serves people as their devices adapt it more or less; nothing is retrained.
- membership: whether attacks, as in `homebody audit`, can tell who was in the training.
- view: what one view of a person reads of another, as in `homebody audit`.
- serving: how well a model serves people whose requests are noised in another way; nothing is retrained.

A probe may have settings behind a colon, as in adaptation:adapt_epochs=0,5,20. Different settings are different probes.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.core import Catalogue, Recommender, Rows, Users
from homebody.data.splits import Split
from homebody.errors import HomebodyError, install, refuse_unknown
from homebody.methods.fl_mv_dssm import FLMVDSSM
from homebody.recipe import Recipe
from homebody.reference import federated
from homebody.report import RunFolder
from homebody.rng import Rng
from homebody.run import reopen
from homebody.simulation import Simulator
from homebody.simulation.ablations import ITEM, Borrowing, Unadapted, item_tables
from homebody.studies.serving import refuse_serving, serving
from homebody.training import Trained

__all__ = ["CHEAP", "TABLES", "ProbedRun", "file_of", "lacks", "probe_of", "probed", "refuse", "take"]

SCHEMA_VERSION = 1
TABLES = {
    "own": "its own tuned table",
    "global": "the latest shared table",
    "other": "the tuned table of another client, drawn at random",
}
MARKS = ("not touched", "drawn as a negative", "training item", "held out for validation", "held out for test")
"""What an item is to the person whose embedding is shown; `mark` counts from 0."""
SHOWN = 2000
"""Items in a plot: the person's own, and others drawn at random up to so many."""
PEOPLE = 256
"""Clients over which the separation is averaged: a single held-out item says little."""
DISTANCES_AT_ONCE = 1 << 24
PERPLEXITY = 30.0
CHEAP = ("tables", "embedding", "serving")
"""Probes that are taken while the model exists, even if the figure that shows them was not requested."""
ATTACK_DEFAULTS = {"shadows": 8, "people": 0}
"""Shadow models for the likelihood ratio; people whose membership is guessed, half of them members (0: everyone)."""

VIEW_DEFAULTS: dict[str, Any] = {"sigmas": [0, 1, 4], "participations": [1, 10, 100], "users": 30}
"""Noise multipliers, messages that are read before a guess, and people who are attacked by a view."""

Step = Callable[[int, int], None]
"""Receives how many of how many steps are done."""


def nothing(done: int, steps: int) -> None:
    """Ignore progress."""


class ProbedRun(NamedTuple):
    """A finished run, opened for a probe."""

    fitted: Trained
    recipe: Recipe
    """As it was run, with its rounds, its cohort and its noise."""
    settings: str = ""
    """The text behind the colon of the probe's name."""
    step: Step = nothing

    @property
    def runtime(self) -> Simulator:
        if not isinstance(self.fitted.runtime, Simulator):
            raise HomebodyError("Real devices keep their tables to themselves: only a simulation can be looked into.")
        return self.fitted.runtime


def file_of(path: Path, probe: str) -> Path:
    """Where a cell keeps what a probe found.

    >>> file_of(Path("cell"), "adaptation:adapt_epochs=0,5").name
    'probe-adaptation-adapt_epochs-0-5.json'
    """
    return path / f"probe-{re.sub(r'[^a-z0-9_.]+', '-', probe)}.json"


def take(path: Path, probes: Sequence[str], step: Step = nothing) -> dict[str, str]:
    """Probe the model of a finished run and store the answers. Returns the reasons of the probes that refused."""
    folder = RunFolder.open(path)
    recipe = Recipe.from_toml(folder.recipe_text())
    refused = {}
    fitted, _ = reopen(path)
    try:
        for name in probes:
            kind, _, settings = name.partition(":")
            try:
                answer = PROBES[kind](ProbedRun(fitted, recipe, settings, step))
            except HomebodyError as error:
                refused[name] = str(error)
                answer = {"refused": str(error)}
            folder.write_json(file_of(path, name).name, {"schema": SCHEMA_VERSION, **answer})
    finally:
        fitted.ledger.close()
    return refused


def probed(probe: str, results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The results of runs with the probe's answer, or the reason it refused; runs never probed are left out."""
    out: list[Mapping[str, Any]] = []
    for result in results:
        if "error" in result:
            out.append(result)
        elif why := result.get("refused", {}).get(probe):
            out.append({**result, "error": why})
        elif (file := file_of(Path(str(result["run"])), probe)).exists():
            answer = RunFolder.open(file.parent).read_json(file.name)
            out.append({**result, "error": answer["refused"]} if "refused" in answer else {**result, "probe": answer})
    return out


def probe_of(kind: str, vary: str, values: Sequence[int], attack: Mapping[str, Any]) -> str:
    """The probe that a study of this kind takes of its models; empty where it takes none."""
    if kind == "adaptation":
        return adaptation_probe(vary.partition(".")[2], values)
    if kind == "view-attack":
        return view_probe(attack)
    if kind == "serving":
        return ""  # each point of a row has its own: see `Study.probe_at`
    return membership_probe(attack) if kind == "membership" else kind if kind in PROBES else ""


def lacks(probe: str) -> str | None:
    """The package that a probe needs and that is not installed, as a sentence."""
    kind = probe.partition(":")[0]
    if kind in NEED_SKLEARN and importlib.util.find_spec("sklearn") is None:
        return f"{NEED_SKLEARN[kind]} needs scikit-learn: {install('report')}."
    return None


NEED_SKLEARN = {"embedding": "The plot of an embedding", "membership": "The paper's attack on membership"}


def refuse(probe: str, method: Recommender, name: str) -> None:
    """Raise, before anything is trained, if a probe cannot work on this method."""
    kind, _, settings = probe.partition(":")
    if kind == "adaptation":
        _refuse_adaptation(method, name, settings)
    elif kind == "serving":
        refuse_serving(method, name, settings)
    elif kind == "view":
        if not isinstance(method, FLMVDSSM):
            raise HomebodyError(f"{name} has no views that could attack one another: fl-mv-dssm has.")
    elif kind != "membership":
        _refuse_tables(kind, method, name)
    else:
        federated(method, name, "its run keeps no model that could be attacked")


def _refuse_adaptation(method: Recommender, name: str, settings: str) -> None:
    built = federated(method, name, "no device adapts its model")
    acting = built.phases[-1].method or built
    if acting.scoring.parameters != "adapted":
        raise HomebodyError(f"The devices of {name} do not adapt before they rank, so there is nothing to compare.")
    varied, _ = _read_adaptation(settings)
    known = [spec.name for spec in fields(acting) if type(getattr(acting, spec.name)) is int]  # type: ignore[arg-type]
    refuse_unknown(f"whole-number field of {name}", [varied], known)


def _refuse_tables(probe: str, method: Recommender, name: str) -> None:
    built = federated(method, name, "there is no client's item table to look at")
    if built.needs:
        return  # it cannot begin without its data; what it holds shows when it is trained
    acting = built.phases[-1].method or built
    shared = acting.init_shared(Catalogue(2), Rng.of(0))
    tuned = isinstance(acting.init_local(shared, Rng.of(0)).get(ITEM), Rows)
    _insist(probe, name, ITEM in shared, tuned)


def _insist(probe: str, name: str, shared: bool, tuned: bool) -> None:
    if not shared:
        raise HomebodyError(f"{name} shares no item table: this figure needs shared['{ITEM}'], one row an item.")
    if probe == "tables" and not tuned:
        raise HomebodyError(
            f"The clients of {name} tune no item table: comparing tables needs a method whose clients do, as pfedrec."
        )


def tables(run: ProbedRun) -> dict[str, Any]:
    """Test metrics with each client's own table, the shared one, and another client's."""
    fitted, runtime = run.fitted, run.runtime
    asked = runtime.split.asked()
    held = next(item_tables(runtime, fitted.method, fitted.shared, asked[:1]), None) if ITEM in fitted.shared else None
    tuned = held is not None and held.change is not None
    _insist("tables", type(fitted.method).__name__, ITEM in fitted.shared, tuned)
    if len(asked) < 2:
        raise HomebodyError("Nobody can borrow a table here: comparing tables needs at least two clients.")
    lender = np.arange(runtime.split.n_users)
    lender[asked] = others(asked, Rng.of(run.recipe.seed, "probe", "tables"))
    runtimes = {"own": runtime, "global": Borrowing(runtime, None), "other": Borrowing(runtime, lender)}
    measured = {name: clients.evaluate(fitted.method, fitted.shared) for name, clients in runtimes.items()}
    return {"clients": len(asked), "metrics": {name: _tested(value.metrics) for name, value in measured.items()}}


def _tested(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without the metrics of the validation part."""
    return {name: value for name, value in metrics.items() if not name.startswith("valid/")}


def others(users: Users, rng: Rng) -> Users:
    """For each of them one of the others, drawn at random, everyone once: a circle in random order.

    >>> others(np.array([3, 5, 8]), Rng.of(0)).tolist() in ([5, 8, 3], [8, 3, 5])
    True
    """
    circle = _order(len(users), rng)
    drawn = np.empty_like(users)
    drawn[circle] = users[np.roll(circle, -1)]
    return drawn


def _order(count: int, rng: Rng) -> npt.NDArray[np.int64]:
    return np.argsort(rng.bits(count).numpy(), kind="stable")


def embedding(run: ProbedRun) -> dict[str, Any]:
    """One random client's items in two dimensions; how far its own lie apart, for it and for others on average."""
    fitted, runtime, seed = run.fitted, run.runtime, run.recipe.seed
    split, population = runtime.split, runtime.split.population
    _insist("embedding", type(fitted.method).__name__, ITEM in fitted.shared, tuned=True)
    people = _tellable(split)
    if not len(people):
        raise HomebodyError(
            f"Nobody in {population.name} has two training items, one held out for test, and some never met."
        )
    rng = Rng.of(seed, "probe", "embedding")
    # The same people under every method and protocol, so that panels can be compared.
    people = people[_order(len(people), rng)][:PEOPLE]
    user = int(people[0])
    (held,) = item_tables(runtime, fitted.method, fitted.shared, people[:1])
    table = held.dense()[0].cpu().float().flatten(1)
    mark = _marks(split, user, None if held.change is None else held.change.index[0].cpu().numpy())
    items = _shown(mark, rng)
    x, y = _flat(table[torch.from_numpy(items)].numpy(), seed)
    training, test = separations(runtime, fitted, people)
    return {
        "user": user,
        "tuned": held.change is not None,
        "items": population.n_items,
        "touched": 0 if held.change is None else int((held.change.index[0] >= 0).sum()),
        "names": [population.item_name(item) for item in items.tolist()],
        "x": x.tolist(),
        "y": y.tolist(),
        "mark": mark[items].tolist(),
        "separation": {"training": float(training[0]), "held_out": float(test[0])},
        "people": {"count": len(people), "training": float(training.mean()), "held_out": float(test.mean())},
    }


def _tellable(split: Split) -> Users:
    """Clients with two different training items, a test item, and items that they have nothing to do with."""
    first, last = split.bounds[0], split.bounds[1] - 1
    several = np.flatnonzero((split.lengths >= 2) & (split.sizes("test") > 0))
    several = several[split.ordered[first[several]] != split.ordered[last[several]]]
    return several[(split.bounds[4] - split.bounds[0])[several] < split.n_items]


def _marks(split: Split, user: int, touched: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
    """(M,) a place in MARKS for each item; -1 for what is withheld from everything."""
    mark = np.zeros(split.n_items, dtype=np.int64)
    if touched is not None:
        mark[touched[touched >= 0]] = 1
    mark[split.part(user, "withheld")] = -1
    for number, part in ((4, "test"), (3, "valid"), (2, "train")):
        mark[split.part(user, part)] = number  # type: ignore[arg-type]
    return mark


def _shown(mark: npt.NDArray[np.int64], rng: Rng) -> npt.NDArray[np.int64]:
    """The person's own items and others drawn at random, ascending."""
    theirs, rest = np.flatnonzero(mark >= 2), np.flatnonzero((mark == 0) | (mark == 1))
    room = max(SHOWN - len(theirs), len(theirs))
    if len(rest) > room:
        rest = rest[_order(len(rest), rng)][:room]
    return np.sort(np.concatenate([theirs, rest]))


def _flat(table: npt.NDArray[np.float32], seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """t-SNE, on a grid of a thousand: finer than a dot."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    # One thread: with more, the sums and so the picture would depend on the machine.
    with threadpool_limits(1):
        perplexity = min(PERPLEXITY, (len(table) - 1) / 3)
        start = "pca" if min(table.shape) > 1 else "random"
        places = TSNE(perplexity=perplexity, init=start, random_state=seed, n_jobs=1).fit_transform(table)
    places -= places.min(axis=0)
    grid = np.round(1000 * places / max(float(places.max()), 1e-12)).astype(np.int64)
    return grid[:, 0], grid[:, 1]


def separations(runtime: Simulator, fitted: Trained, people: Users) -> tuple[Tensor, Tensor]:
    """How well nearness to what a client trained on tells its training items, and its test item, from all others.

    An item is as near as the nearest training item other than itself, in the table the client ranks with. The
    answer is an AUC: the share of the others that lie further away; 0.5 is chance. Each (people,).
    """
    split = runtime.split
    answers = torch.zeros(2, len(people), dtype=torch.float64)
    most = max(1, DISTANCES_AT_ONCE // (split.n_items * int(split.lengths[people].max())))
    for held in item_tables(runtime, fitted.method, fitted.shared, people, most):
        some = people[held.place]
        table = held.dense().flatten(2)
        items, valid, _ = (torch.from_numpy(part).to(table.device) for part in split.padded(some))
        near = _nearness(table, items, valid)
        asked = torch.from_numpy(split.relevant(some, "test")).to(table.device)
        rest = _strangers(split, some).to(table.device)
        areas = torch.stack([_auc(near, items, valid, rest), _auc(near, asked.clamp(min=0), asked >= 0, rest)])
        answers[:, torch.from_numpy(held.place)] = areas.cpu()
    return answers[0], answers[1]


def _nearness(table: Tensor, items: Tensor, valid: Tensor) -> Tensor:
    """(B, M) less the distance of each item to the nearest of `items` (B, L) other than itself."""
    known = table.gather(1, items[:, :, None].expand(-1, -1, table.shape[2]))
    # The fast way loses the distances between rows that lie close together.
    distance = torch.cdist(table, known, compute_mode="donot_use_mm_for_euclid_dist")
    column = torch.arange(distance.shape[1], device=table.device)
    itself = items[:, None, :] == column[:, None]
    return -distance.masked_fill(itself | ~valid[:, None, :], torch.inf).amin(2)


def _strangers(split: Split, users: Users) -> Tensor:
    """(B, M) which items a person has nothing to do with."""
    rest = np.ones((len(users), split.n_items + 1), dtype=np.bool_)  # the last column takes what pads
    for items in (split.seen(users, "test"), split.relevant(users, "test")):
        np.put_along_axis(rest, items, False, axis=1)
    return torch.from_numpy(rest[:, :-1].copy())


def _auc(near: Tensor, items: Tensor, valid: Tensor, rest: Tensor) -> Tensor:
    """(B,) the share of the rest that is further away than these items, ties half, on average over them."""
    score = near.gather(1, items)
    ordered = near.masked_fill(~rest, torch.inf).sort(dim=1).values
    below = torch.searchsorted(ordered, score) + torch.searchsorted(ordered, score, right=True)
    share = below.double() / (2 * rest.sum(1, keepdim=True))
    return (share * valid).sum(1) / valid.sum(1)


def adaptation_probe(field: str, values: Sequence[int]) -> str:
    """The name of the probe that varies this field of the method.

    >>> adaptation_probe("adapt_epochs", [0, 5]), _read_adaptation("adapt_epochs=0,5")
    ('adaptation:adapt_epochs=0,5', ('adapt_epochs', [0, 5]))
    """
    return f"adaptation:{field}={','.join(map(str, values))}"


def _read_adaptation(settings: str) -> tuple[str, list[int]]:
    name, _, values = settings.partition("=")
    return name, [int(value) for value in values.split(",")]


def adaptation(run: ProbedRun) -> dict[str, Any]:
    """Test metrics for each value of a field of the method; 0 is the shared model that no device has adapted."""
    method, shared, runtime = run.fitted.method, run.fitted.shared, run.runtime
    name, values = _read_adaptation(run.settings)
    metrics = {}
    for number, value in enumerate(values, 1):
        if value:
            evaluated = runtime.evaluate(replace(method, **{name: value}), shared)  # type: ignore[type-var]
        else:
            evaluated = Unadapted(runtime).evaluate(method, shared)
        metrics[str(value)] = _tested(evaluated.metrics)
        run.step(number, len(values))
    return {"people": len(runtime.split.asked()), "metrics": metrics}


def membership_probe(settings: Mapping[str, Any]) -> str:
    """The name of the probe that attacks with these settings.

    >>> membership_probe({"shadows": 16}), _read_attack("shadows=16,people=0")
    ('membership:shadows=16,people=0', {'shadows': [16], 'people': [0]})
    """
    refuse_unknown("setting of the attack", settings, ATTACK_DEFAULTS)
    for name, value in settings.items():
        if type(value) is not int:
            raise HomebodyError(f"attack.{name} must be a whole number, not {value!r}.")
    return "membership:" + ",".join(f"{name}={value}" for name, value in {**ATTACK_DEFAULTS, **settings}.items())


def membership(run: ProbedRun) -> dict[str, Any]:
    """What the attacks find: metrics with intervals, and the full answer."""
    from homebody.adversary.membership import Released, attack
    from homebody.adversary.shadows import trained_for

    fitted, recipe, split = run.fitted, run.recipe, run.runtime.split
    chosen = {name: int(value) for name, (value,) in _read_attack(run.settings).items()}
    if split.learn.all():
        raise HomebodyError(
            "Everyone is in the training here: for an attack on the run's model, split held-out-users, so that there "
            "are people who are not."
        )
    method = federated(recipe.build(), recipe.method)
    assert recipe.rounds is not None, "a run's recipe has its rounds"
    findings = attack(
        method,
        split,
        rounds=trained_for(method, recipe.rounds, fitted.chosen),
        cohort=recipe.cohort,
        released=Released(fitted.method, fitted.shared, recipe.seed, fitted.epsilon["public"]),
        shadows=chosen["shadows"],
        people=chosen["people"] or None,
        delta=recipe.stated_at,
        seed=recipe.seed,
        device=recipe.device,
        fused=recipe.fused,
        step=run.step,
    )
    return {**membership_figures(findings), "found": findings}


def membership_figures(findings: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a table, with an interval where there is one; nan for an attack that could not be tried."""
    lists, ratio = findings["lists"], findings["likelihood_ratio"]
    nothing_tried = [math.nan] * 3
    rate = next((point["true"] for point in ratio["rates"] if point["false_positives"] == 0.01), nothing_tried)
    figures = {"attack/accuracy": lists.get("accuracy", nothing_tried), "lira/auc": ratio["auc"], "lira/tpr@1%": rate}
    return {
        "metrics": {
            **{name: value for name, (value, _, _) in figures.items()},
            "attack/ceiling": lists.get("ceiling", math.nan),
            "attack/allowed": findings["allowed"]["accuracy"],
        },
        "intervals": {name: [low, high] for name, (_, low, high) in figures.items()},
    }


def _attack_settings(given: Mapping[str, Any]) -> dict[str, list[float]]:
    refuse_unknown("setting of the attack", given, VIEW_DEFAULTS)
    for name, value in given.items():
        numbers = value if isinstance(value, list) else [value]
        whole = int if name != "sigmas" else (int, float)
        if isinstance(value, list) != (name != "users") or not all(isinstance(number, whole) for number in numbers):
            raise HomebodyError(f"attack.{name} must be like {VIEW_DEFAULTS[name]}, not {value!r}.")
    every = {**VIEW_DEFAULTS, **given}
    return {name: value if isinstance(value, list) else [value] for name, value in every.items()}


def attacked_points(attack: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """The name of each point of an attack on views, its noise and its participations.

    >>> attacked_points({"sigmas": [1], "participations": [1, 10]})
    [('σ = 1, T = 1', 1.0, 1), ('σ = 1, T = 10', 1.0, 10)]
    """
    chosen = _attack_settings(attack)
    return [
        (f"σ = {sigma:g}, T = {length:g}", float(sigma), int(length))
        for sigma in chosen["sigmas"]
        for length in chosen["participations"]
    ]


def view_probe(attack: Mapping[str, Any]) -> str:
    """The name of the probe that attacks a view with these settings.

    >>> view_probe({"users": 5}), _read_attack("sigmas=0/1/4,participations=1/10/100,users=5")["sigmas"]
    ('view:sigmas=0/1/4,participations=1/10/100,users=5', [0, 1, 4])
    """
    chosen = _attack_settings(attack)
    return "view:" + ",".join(f"{name}={'/'.join(f'{number:g}' for number in some)}" for name, some in chosen.items())


def _read_attack(settings: str) -> dict[str, list[float]]:
    parts = (part.partition("=") for part in settings.split(","))
    return {name: [int(text) if text.isdigit() else float(text) for text in some.split("/")] for name, _, some in parts}


def view_attack(run: ProbedRun) -> dict[str, Any]:
    """What one view reads of another, for each noise and number of participations: metrics with intervals."""
    from homebody.adversary.views import FIRST, KNOWN, MEAN, read_view

    chosen = _read_attack(run.settings)
    findings = read_view(
        run.fitted.method,
        run.runtime,
        run.fitted.shared,
        sigmas=chosen["sigmas"],
        participations=[int(number) for number in chosen["participations"]],
        users=int(chosen["users"][0]),
        seed=run.recipe.seed,
        step=run.step,
    )
    keys = ("question", "tower", "sigma", "participations")
    guesses = {tuple(guess[key] for key in keys): guess for guess in findings["guesses"]}
    errors = {error["sigma"]: error["median"] for error in findings["errors"]}
    asked = {
        "view/feature": (findings["feature"], KNOWN),
        "view/feature, first tower": (findings["feature"], FIRST),
        "view/feature, mean tower": (findings["feature"], MEAN),
        "view/profile": ("profile", KNOWN),
        "view/opposite": ("opposite", KNOWN),
    }
    limits = {"view/most": "opposite", "view/profile, most": "profile"}
    points = {}
    for name, sigma, length in attacked_points({name: chosen[name] for name in ("sigmas", "participations")}):
        answers = {metric: guesses.get((*of, sigma, length)) for metric, of in asked.items()}
        most = {metric: guesses[question, KNOWN, sigma, length]["most"] for metric, question in limits.items()}
        metrics = {metric: math.nan if guess is None else guess["accuracy"] for metric, guess in answers.items()}
        points[name] = {
            "metrics": {**metrics, **most, "view/error": errors[sigma]},
            "intervals": {metric: guess["interval"] for metric, guess in answers.items() if guess is not None},
        }
    return {"points": points, "found": findings}


PROBES: dict[str, Callable[[ProbedRun], dict[str, Any]]] = {
    "tables": tables,
    "embedding": embedding,
    "adaptation": adaptation,
    "membership": membership,
    "serving": lambda run: serving(
        run.fitted.method, run.runtime, run.fitted.shared, run.settings, run.recipe.stated_at
    ),
    "view": view_attack,
}
