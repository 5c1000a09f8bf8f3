"""Attacks on a finished run or a fitted model, beside what its ledger certifies; `homebody audit` prints the same.

Each function attacks as one observer could, on clients of its own: the model stays as it is. See docs/auditing.md.

>>> import homebody as hb
>>> from homebody.training import fit
>>> few = hb.leave_one_out(hb.load("synthetic:users=80,items=60,mean=12"))
>>> model = fit(hb.FedMF(factors=4), hb.Simulator(few), rounds=2)
>>> found = hb.audit.interactions(model, users=20)
>>> found.frame["guessed_from"].to_list(), found.contradicted
(['the message', 'popularity alone'], False)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from homebody.adversary.inspection import Inspection
from homebody.adversary.inspection import inspect as take_apart
from homebody.core import Method
from homebody.data.stored import insist_on_people
from homebody.errors import HomebodyError, several
from homebody.methods import recipe_name
from homebody.notebook.asking import Named, data_of, loaded, method_of, recipe_of
from homebody.notebook.fitted import Fitted
from homebody.privacy.assumptions import assumptions
from homebody.privacy.specs import stage_texts
from homebody.recipe import Recipe
from homebody.reference import Reference, federated
from homebody.report import RunFolder, audits
from homebody.report.audits import AuditTable
from homebody.run import QUIET, InMemory, Watcher, cohort_of, prepare, reopen, simulator
from homebody.simulation import Simulator
from homebody.training import Trained

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Audit", "canary", "inspect", "inspected", "interactions", "linkage", "membership", "view", "words"]


def __dir__() -> list[str]:
    """What TAB offers."""
    return sorted(__all__)


Model = Fitted | Trained | str | Path
"""A fitted model, or the folder of a finished run."""
Step = Callable[[int, int], None]
"""Told how many steps of how many are done."""


def _quiet(done: int, total: int) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Audit:
    """What an attack found.

    `frame` has the figures, `details` everything that `homebody audit --json` prints. In a notebook it is shown as the
    command shows it, with what the figures mean.
    """

    details: Mapping[str, Any]
    frame: pl.DataFrame
    shown: AuditTable

    @property
    def attack(self) -> str:
        return str(self.details["attack"])

    @property
    def contradicted(self) -> bool:
        """Whether the attack got further than the certified ε allows: then the ledger or the code is wrong."""
        observers = self.details.get("observers", [])
        return bool(self.details.get("contradicted")) or any(each["contradicted"] for each in observers)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the figures mean, and what they rest on, in sentences."""
        return (*self.shown.remarks, *self.details["assumes"])

    def __repr__(self) -> str:
        ends = "CONTRADICTED" if self.contradicted else "not contradicted"
        return f"<Audit: {self.shown.title}; {several(self.frame.height, 'row')}; {ends}>"

    def _repr_html_(self) -> str:
        return self.shown._replace(remarks=self.remarks).html()


def interactions(model: Model, *, users: int = 100, seed: int = 0, step: Step = _quiet) -> Audit:
    """The server guesses whose items are whose, from the uploads of the next round.

    users: clients to attack. The frame has the AUC of an own item against all others, with an interval of 95 % of the
    mean, beside what popularity alone gives; 0.5 is chance.

    >>> from homebody import FedMF, Simulator, leave_one_out, load
    >>> from homebody.training import fit
    >>> few = leave_one_out(load("synthetic:users=80,items=60,mean=12"))
    >>> found = interactions(fit(FedMF(factors=4), Simulator(few), rounds=2), users=20)
    >>> found.frame["auc"][0] > 0.9
    True
    """
    from homebody.adversary.interactions import read_interactions

    target = _target(model, seed)
    reading = read_interactions(*target.next_round, cohort=target.cohort, users=users, seed=seed, step=step).as_dict()
    low, high = reading["interval"]
    read = {"auc": reading["auc"], "low": low, "high": high, "share_above": reading["share_above"]}
    kind = "the sum" if reading["reads"].startswith("the sum") else "the message"
    rows = [{"guessed_from": kind, **read}, {"guessed_from": "popularity alone", "auc": reading["popularity_auc"]}]
    return target.audit("interactions", reading, rows, audits.interactions)


def canary(
    model: Model,
    *,
    canaries: int | None = None,
    trials: int = 1,
    confidence: float = 0.95,
    seed: int = 0,
    step: Step = _quiet,
) -> Audit:
    """Synthetic people take part in a training like the model's, and observers detect them: this bounds ε from below.

    canaries: how many; None: 1,000, or as many as there is room for. trials: how many times to train. confidence: the
    probability that a correct ledger passes. The frame has, for each observer, what the ledger certifies for the
    audited training and the lower bound that was measured (`at_least`).

    >>> from homebody import Channel, FedMF, Simulator, leave_one_out, load
    >>> from homebody.privacy import Clip, Gaussian
    >>> from homebody.training import fit
    >>> few = leave_one_out(load("synthetic:users=80,items=60,mean=12"))
    >>> method = FedMF(factors=4, uplink=Channel(Clip(1.0), Gaussian(z=2)))
    >>> found = canary(fit(method, Simulator(few), rounds=2), canaries=200)
    >>> public = found.frame.row(2, named=True)
    >>> public["observer"], public["at_least"] < public["certified"], found.contradicted
    ('public', True, False)
    """
    from homebody.adversary.canaries import plant

    target = _target(model, seed)
    rounds, delta = target.rounds, target.fitted.delta
    findings = plant(
        target.method,
        target.clients,
        rounds=rounds,
        cohort=target.cohort,
        canaries=canaries,
        trials=trials,
        confidence=confidence,
        delta=delta,
        seed=seed,
        on_round=step,
    )
    coins = next(finding.lower.coins for finding in findings if finding.lower is not None)
    details: dict[str, Any] = {
        "canaries": coins // trials,
        "trials": trials,
        "confidence": confidence,
        "rounds": sum(phase.rounds or rounds for phase in target.method.phases),
    }
    details |= {"observers": [finding.as_dict() for finding in findings]}
    rows = [
        {
            "observer": finding.observer,
            "certified_for_run": target.fitted.epsilon[finding.observer],
            "certified": finding.certified,
            "at_least": finding.at_least,
            "one_run": finding.lower and finding.lower.epsilon,
            "gaussian": finding.gaussian and finding.gaussian.epsilon,
            "guesses": finding.lower and (finding.counted or finding.lower).guesses,
            "right": finding.lower and (finding.counted or finding.lower).right,
            "allowed": finding.counted and finding.counted.most,
            "contradicted": finding.contradicted,
        }
        for finding in findings
    ]
    return target.audit("canary", details, rows, partial(audits.canary, findings))


def linkage(model: Model, *, users: int = 300, seed: int = 0, step: Step = _quiet) -> Audit:
    """The server looks for the reports of one device among everybody's, with and without the proxy that mixes them.

    users: devices that report. For methods that send reports of one bit. The frame has a row for each way that reports
    reach the server: AUCs of pairs from one device against pairs from two, by all that it sees and by content alone.

    >>> from homebody import FMFLDP, Simulator, leave_one_out, load
    >>> from homebody.training import fit
    >>> few = leave_one_out(load("synthetic:users=80,items=60,mean=12"))
    >>> found = linkage(fit(FMFLDP(factors=2), Simulator(few), rounds=1), users=20)
    >>> found.frame["reach_the_server"].to_list()
    ['through a proxy', 'as they come']
    """
    from homebody.adversary.linkage import ReportBatch, as_they_come, reported
    from homebody.adversary.linkage import linkage as attack
    from homebody.federation.proxy.rehearsal import rehearse_reports

    target = _target(model, seed)
    round_ = reported(*target.next_round, users=users, seed=seed, step=step)
    views = {"as they come": as_they_come(round_.messages)}
    if target.fitted.method.uplink.facts.hides_senders:
        batches, whose = rehearse_reports(round_.messages)
        mixed = [ReportBatch(float(at), batch) for at, batch in enumerate(batches)]
        views = {"through a proxy": (mixed, whose), **views}
    found = {
        name: attack(*seen, worked_out=round_.worked_out, epsilon=round_.epsilon, seed=seed).as_dict()
        for name, seen in views.items()
    }
    rows = [
        {
            "reach_the_server": name,
            **{key: each[key] for key in ("devices", "reports", "batches")},
            **{key: each[key][0] for key in ("everything", "content", "difference")},
            **dict(zip(("low", "high"), each["difference"][1:], strict=True)),
            "linked": each["linked"],
        }
        for name, each in found.items()
    ]
    return target.audit("linkage", {"views": found}, rows, audits.linkage)


def membership(
    model: Model,
    *,
    people: int | None = None,
    shadows: int = 8,
    rounds: int | None = None,
    seed: int = 0,
    step: Step = _quiet,
) -> Audit:
    """Anyone infers from the final model who was in its training.

    people: how many are asked about, half of them members; None: all. shadows: models that the attacker trains.
    rounds: of every model, the attacked one included, for a quick try; None: those of the model. The frame has what
    each attack reached, with an interval of 95 %, beside the most that the certified ε allows any attack.

    >>> from homebody import FedMF, Simulator, leave_one_out, load
    >>> from homebody.training import fit
    >>> few = leave_one_out(load("synthetic:users=160,items=60,mean=12"))
    >>> found = membership(fit(FedMF(factors=4), Simulator(few), rounds=3), people=60, shadows=4)
    >>> found.frame.filter(attack="likelihood ratio", figure="AUC")["allowed"].to_list()
    [1.0]
    """
    from homebody.adversary.membership import Released, attack, leaves_some_out
    from homebody.adversary.shadows import trained_for

    target = _target(model, seed)
    fitted, split, method = target.fitted, target.clients.split, target.method
    released = None
    if rounds is None and leaves_some_out(split):
        released = Released(fitted.method, fitted.shared, fitted.training.seed, fitted.epsilon["public"])
    found = attack(
        method,
        split,
        rounds=trained_for(method, fitted.training.rounds, fitted.chosen) if rounds is None else rounds,
        cohort=target.cohort,
        released=released,
        shadows=shadows,
        people=people,
        delta=fitted.delta,
        device=str(target.clients.device),
        fused=target.clients.fused,
        seed=seed,
        step=step,
    )
    if rounds is not None:
        fewer = f"Every model had {several(rounds, 'round')}, and the run's had {fitted.chosen:,}."
        found = {**found, "notes": [*found["notes"], fewer]}
    return target.audit("membership", found, _membership_rows(found), audits.membership)


def _membership_rows(found: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    lists, ratio, most = found["lists"], found["likelihood_ratio"], found["allowed"]

    def row(attack: str, figure: str, values: Sequence[float], allowed: float | None) -> dict[str, Any]:
        interval = dict(zip(("value", "low", "high"), values, strict=False))  # one value has none
        return {"attack": attack, "figure": figure, **interval, "allowed": allowed}

    if "accuracy" in lists:
        yield row("lists", "accuracy", lists["accuracy"], most["accuracy"])
        yield row("lists, oracle", "accuracy", [lists["ceiling"]], None)
    yield row("preference alone", "AUC", ratio["auc_without_shadows"], most["auc"])
    yield row("likelihood ratio", "AUC", ratio["auc"], most["auc"])
    if ratio["auc_took_part"]:
        yield row("likelihood ratio, of those in a round", "AUC", ratio["auc_took_part"], None)
    for rate, bound in zip(ratio["rates"], most["rates"], strict=True):
        share = f"true positives at {100 * rate['false_positives']:g} % false ones"
        yield row("likelihood ratio", share, rate["true"], bound)


def view(
    model: Model,
    *,
    target: str | None = None,
    feature: str | None = None,
    sigma: Sequence[float] | None = None,
    participations: Sequence[float] = (1, 10, 100),
    users: int = 30,
    confidence: float = 0.99,
    seed: int = 0,
    step: Step = _quiet,
) -> Audit:
    """One app infers what another app of the same person knows. For models of several views, such as `fl-mv-dssm`.

    target: the view to attack; None: the first with a feature of few values. feature: what to guess; None: that with
    fewest values. sigma: noise multipliers to try; None: 0, 1, 4 and the run's. participations: how many messages are
    read before the guess. The frame has, for each of them, the share of right guesses and the most that noise allows.

    >>> from homebody import FedMF, Simulator, leave_one_out, load
    >>> from homebody.training import fit
    >>> few = leave_one_out(load("synthetic:users=80,items=60,mean=12"))
    >>> view(fit(FedMF(factors=4), Simulator(few), rounds=1))
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: ...
    """
    from homebody.adversary.views import SIGMAS, read_view

    if any(length != int(length) for length in participations):
        raise HomebodyError("Participations are whole numbers, such as 1, 10 and 100.")
    attacked = _target(model, seed)
    noise = attacked.fitted.method.uplink.facts.view_noise
    found = read_view(
        *attacked.next_round,
        target=target,
        feature=feature,
        sigmas=sigma or [*SIGMAS, *([noise.z] if noise else [])],
        participations=[int(length) for length in participations],
        users=users,
        confidence=confidence,
        seed=seed,
        step=step,
    )
    rows = [
        {
            **{name: value for name, value in guess.items() if name != "interval"},
            **dict(zip(("low", "high"), guess["interval"], strict=True)),
        }
        for guess in found["guesses"]
    ]
    return attacked.audit("view", found, rows, audits.view)


def words(
    model: Model,
    *,
    users: int = 100,
    trials: int | None = None,
    confidence: float | None = None,
    seed: int = 0,
    step: Step = _quiet,
) -> Audit:
    """The server reads clicked words off the gradient of a news encoder, or tells two people apart by a report.

    users: clients to attack. trials, confidence: for models that send certified reports on impressions: reports for
    each question (20,000), and the probability that a correct ledger passes (0.95). The frame has precision and recall
    of the words, or, of reports, how well each question is answered beside what ε allows.

    >>> from homebody import FedMF, Simulator, leave_one_out, load
    >>> from homebody.training import fit
    >>> few = leave_one_out(load("synthetic:users=80,items=60,mean=12"))
    >>> words(fit(FedMF(factors=4), Simulator(few), rounds=1))
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: FedMF trains no encoder of news: --attack words is for those that do.
    """
    from homebody.adversary.impressions import report_stage, tell_apart
    from homebody.adversary.words import read_words

    target = _target(model, seed)
    given = {"trials": trials, "confidence": confidence}
    given = {name: value for name, value in given.items() if value is not None}
    stage = report_stage(target.fitted.method.uplink)
    if stage is None:
        if given:
            raise HomebodyError(
                "Trials and confidence are for models that send reports on impressions: leave them out."
            )
        read = read_words(*target.next_round, users=users, seed=seed, step=step).as_dict()
        rows = [
            {"guessed_from": name, **_parts(read, f"{part}precision"), **_parts(read, f"{part}recall")}
            for name, part in (("the gradient", ""), (f"most frequent {read['kind']}", "frequent_"))
        ]
        return target.audit("words", read, rows, audits.words)
    answers = tell_apart(*target.next_round, users=users, seed=seed, step=step, **given)  # type: ignore[arg-type]
    found: dict[str, Any] = {"reads": "reports", "mechanism": stage.mechanism, "padding": stage.padding}
    found |= {"confidence": given.get("confidence", 0.95), "trials": answers[0].lower.coins}
    found |= {"questions": [answer.as_dict() for answer in answers]}
    found |= {"contradicted": any(answer.contradicted for answer in answers)}
    rows = [
        {
            "question": each["question"],
            **dict(zip(("auc", "low", "high"), each["auc"], strict=True)),
            "allowed": each["allowed_auc"],
            "at_least": each["lower"]["epsilon"],
            "certified": each["certified"],
            "delta": each["at_delta"],
            "contradicted": each["contradicted"],
        }
        for each in found["questions"]
    ]
    return target.audit("words", found, rows, audits.game)


def _parts(read: Mapping[str, Any], name: str) -> dict[str, float]:
    """A figure and the ends of its interval, as columns."""
    kind = name.removeprefix("frequent_")
    return dict(zip((kind, f"{kind}_low", f"{kind}_high"), read[name], strict=True))


def inspect(
    model: Model | Named, data: Any = None, *, user: object = None, seed: int = 0, **settings: Any
) -> Inspection:
    """The message that one person's device would send in the first round: fields, bytes, and who learns what.

    model: a fitted model, the folder of a finished run, or, with data, what `hb.fit` trains: a method by name or with
    its settings. user: the person, as the data calls them; None: the first. settings: any of `hb.fit`, such as cohort,
    stages or split.

    >>> import homebody as hb
    >>> message = hb.audit.inspect("fedials", "synthetic:users=80,items=60,mean=12", user=3)
    >>> message.frame["part"].to_list(), message.bytes
    (['gram', 'item'], ...)
    >>> private = hb.audit.inspect("fedmf", hb.load("synthetic"), stages=["one-bit:epsilon=1,k=5"])
    >>> private.observers["server"].charged
    ('one user: 5 locally randomised reports of ε = 1 each; no sampling', ...)
    """
    if data is not None:
        given = data_of(data, QUIET)
        recipe = recipe_of(method_of(cast("Named", model)), given, {**settings, "seed": seed})
        return inspected(recipe, user, data=loaded(recipe, given, QUIET))
    if isinstance(model, Method | Reference | type):
        raise HomebodyError("A method sends nothing without people: give data as well, inspect(method, data).")
    if settings:
        raise HomebodyError(f"A trained model has its settings already: leave out {next(iter(settings))}.")
    target = _target(model, seed)
    return _message(target.method, target.clients, user, target.cohort, target.fitted.training.seed)


def inspected(
    recipe: Recipe, user: object = None, watcher: Watcher = QUIET, data: InMemory | None = None
) -> Inspection:
    """The same of a recipe. data: taken instead of what the recipe names."""
    why = "it collects whole histories, no device sends it any"
    federated(recipe.build(), recipe.method, why)
    prepared, split = prepare(recipe, watcher, data)
    method = federated(prepared, recipe.method, why)
    return _message(method, simulator(recipe, split), user, cohort_of(recipe, method, split), recipe.seed)


def _message(method: Method, clients: Simulator, user: object, cohort: int | None, seed: int) -> Inspection:
    split = clients.split
    number = int(split.members(method.needs)[0]) if user is None else split.population.user(str(user))
    return take_apart(method, clients, number, cohort=cohort, seed=seed)


class _Target(NamedTuple):
    """A trained model to attack, with clients that the attack may use up."""

    fitted: Trained
    clients: Simulator
    seed: int
    about: Mapping[str, Any]
    """Which method and data it is, by what stages: for the record."""
    run: str | None
    name: str

    @property
    def method(self) -> Method:
        """As it was trained, all phases of it."""
        return self.fitted.training.method

    @property
    def cohort(self) -> int | None:
        return self.fitted.training.cohort

    @property
    def next_round(self) -> tuple[Method, Simulator, Any]:
        return self.fitted.method, self.clients, self.fitted.shared

    @property
    def rounds(self) -> int:
        """How many rounds a phase had that does not say it itself: fewer than planned where a budget ended it."""
        phases = {phase.name for phase in self.method.phases if not phase.rounds}
        charged = (entry for entry in self.fitted.ledger.entries() if entry.release.rpartition("/")[0] in phases)
        return max((entry.round or 0 for entry in charged), default=0) or self.fitted.training.rounds

    def audit(
        self,
        attack: str,
        found: Mapping[str, Any],
        rows: Iterable[Mapping[str, Any]],
        show: Callable[[dict[str, Any], str], AuditTable],
    ) -> Audit:
        import polars as pl
        from polars import selectors

        fitted = self.fitted
        parties = self.cohort or len(self.clients.available())
        details = {
            "attack": attack,
            "run": self.run,
            "seed": self.seed,
            **found,
            **self.about,
            "epsilon": {who: value if math.isfinite(value) else "inf" for who, value in fitted.epsilon.items()},
            "delta": fitted.delta,
            "assumes": list(assumptions(fitted.method.uplink, parties)),
        }
        frame = pl.DataFrame([*rows], infer_schema_length=None)
        frame = frame.with_columns(selectors.by_dtype(pl.Null).cast(pl.Float64))
        return Audit(details, frame, show(details, self.name))


def _target(model: object, seed: int) -> _Target:
    if isinstance(model, Fitted):
        model = model.trained
    if isinstance(model, Trained):
        fitted, run, method = model, None, _called(model.training.method)
        data, stages = "", stage_texts(fitted.training.method.uplink)
    elif isinstance(model, str | Path):
        run = str(model)
        fitted, _ = reopen(Path(model))
        recipe = Recipe.from_toml(RunFolder.open(Path(model)).recipe_text())
        method, stages = recipe.method, recipe.stages
        data = Path(recipe.data).name if Path(recipe.data).is_file() else recipe.data
    else:
        raise HomebodyError(
            f"An audit takes a model of hb.fit, or the folder of a finished run, not this {type(model).__name__}."
        )
    if not isinstance(fitted.runtime, Simulator):
        raise HomebodyError("A model that real devices trained is not audited here: their data are not at hand.")
    insist_on_people(fitted.runtime.split.population)
    clients = fitted.runtime.copy(fitted.method)
    about = {"method": method, "data": data or clients.split.population.name, "stages": stages}
    return _Target(fitted, clients, seed, about, run, method.rpartition(":")[2])


def _called(method: Method) -> str:
    """The name of a method, or of its class where no name leads to that."""
    try:
        return recipe_name(type(method))
    except HomebodyError:
        return type(method).__name__
