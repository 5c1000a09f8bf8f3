"""`homebody audit`: attack a run, and compare the outcome with the ε that is certified."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Exit, Option

from homebody.cli import options
from homebody.cli.progress import Bar
from homebody.errors import HomebodyError, several, unknown_name

if TYPE_CHECKING:
    from homebody.audit.canaries import Finding, Visible
    from homebody.fit import Fitted
    from homebody.recipe import Recipe
    from homebody.simulation import Simulator

__all__ = ["audit"]

PATIENCE = 2.0
"""Seconds before the progress bar appears."""
OWN = {
    "interactions": ("users",),
    "canary": ("canaries", "trials", "confidence"),
    "linkage": ("users",),
    "membership": ("people", "shadows", "rounds"),
    "view": ("users", "target", "feature", "sigma", "participations", "confidence"),
}
"""The options of each attack."""


def audit(
    run: Annotated[Path, Argument(help="A finished run's folder.")],
    attack: Annotated[
        str,
        Option(
            help="interactions: the server reads uploads; canary: is the ledger's ε true? made-up people take part, "
            "and observers look for them; linkage: the server looks for reports of one device behind the proxy; "
            "membership: the public asks of the final model whether someone was in its training; view: one app of a "
            "person reads what another gave."
        ),
    ],
    users: Annotated[
        int | None, Option(help="interactions, linkage, view: clients to attack.", show_default="100, 300, 30")
    ] = None,
    canaries: Annotated[
        int | None,
        Option(
            help="canary: made-up people in a training; the more, the smaller a mistake is found.",
            show_default="1,000, or as many as an update has entries",
        ),
    ] = None,
    trials: Annotated[int | None, Option(help="canary: how many times to train.", show_default="1")] = None,
    confidence: Annotated[
        float | None, Option(help="canary, view: that a right ledger is not contradicted.", show_default="0.95, 0.99")
    ] = None,
    people: Annotated[
        int | None, Option(help="membership: people to ask about, half of them members.", show_default="all")
    ] = None,
    shadows: Annotated[int | None, Option(help="membership: models to compare with.", show_default="8")] = None,
    rounds: Annotated[
        int | None,
        Option(help="membership: for a quick try, of every model, the attacked one too.", show_default="the run's"),
    ] = None,
    attacked: Annotated[
        str | None,
        Option("--target", help="view: the attacked one.", show_default="the first with a feature of few values"),
    ] = None,
    feature: Annotated[
        str | None, Option(help="view: the target's feature that is guessed.", show_default="that with fewest values")
    ] = None,
    sigma: Annotated[
        str | None, Option(help="view: noise multipliers to try.", show_default="0,1,4 and the run's")
    ] = None,
    participations: Annotated[
        str | None, Option(help="view: messages read before a guess.", show_default="1,10,100")
    ] = None,
    seed: Annotated[int, Option(help="All of the attack's randomness derives from it.")] = 0,
    trust_code: options.TrustCode = False,
    as_json: options.Json = False,
) -> None:
    """Attack a finished run as an observer would, beside the ε that is certified against each. See docs/auditing.md.

    Exit code 1: a lower bound on ε is above the certified one, or an attack gets further than that allows.
    """
    if attack not in OWN:
        raise unknown_name("attack", attack, OWN)
    typed: dict[str, Any] = {"users": users, "canaries": canaries, "trials": trials, "confidence": confidence}
    typed |= {"people": people, "shadows": shadows, "rounds": rounds}
    typed |= {"target": attacked, "feature": feature, "sigma": sigma, "participations": participations}
    given = {name: value for name, value in typed.items() if value is not None}
    for name in given:
        if name not in OWN[attack]:
            raise HomebodyError(f"--{name} is not for --attack {attack}: leave it out.")
    if trust_code:
        from homebody.run import trust_folder

        trust_folder(run, options.warn)
    attacks = {"interactions": _interactions, "canary": _canary, "linkage": _linkage, "membership": _membership}
    attacks |= {"view": _view}
    target = _reopened(run, seed, as_json)
    found, show = attacks[attack](target, given)
    recipe, fitted = target.recipe, target.fitted
    found |= {
        "method": recipe.method,
        "data": Path(recipe.data).name if Path(recipe.data).is_file() else recipe.data,
        "stages": recipe.stages,
        "epsilon": {who: value if math.isfinite(value) else "inf" for who, value in fitted.epsilon.items()},
        "delta": fitted.delta,
    }
    said = {"attack": attack, "run": str(run), "seed": seed, **found}
    options.answer(said, as_json, lambda: show(found, recipe.short_method))
    if found.get("contradicted") or any(one["contradicted"] for one in found.get("observers", [])):
        raise Exit(1)


class Target(NamedTuple):
    """A finished run to attack: what was trained, its simulated people, and its recipe."""

    run: Path
    fitted: Fitted
    runtime: Simulator
    recipe: Recipe
    seed: int
    quiet: bool


Attacked = tuple[dict[str, Any], Callable[[dict[str, Any], str], None]]
"""What an attack found, and what prints it for a method."""


def _interactions(target: Target, given: dict[str, Any]) -> Attacked:
    from homebody.audit.interactions import read_interactions

    _, fitted, runtime, recipe, seed, quiet = target
    with _bar("messages read", quiet) as step:
        reading = read_interactions(
            fitted.method, runtime, fitted.shared, cohort=recipe.cohort, seed=seed, step=step, **given
        )
    return reading.as_dict(), _print_reading


def _canary(target: Target, given: dict[str, Any]) -> Attacked:
    from homebody.audit.canaries import plant
    from homebody.reference import federated
    from homebody.report import RunFolder

    run, fitted, runtime, recipe, seed, quiet = target
    rounds = int(RunFolder.open(run).read_json("result.json")["rounds"])
    method = federated(recipe.build(), recipe.method)
    wanted = {"trials": 1, "confidence": 0.95, **given}
    with _bar("rounds with canaries", quiet) as step:
        findings = plant(
            method, runtime, rounds=rounds, cohort=recipe.cohort, delta=fitted.delta, seed=seed, on_round=step, **wanted
        )
    coins = next(one.lower.coins for one in findings if one.lower is not None)
    found = {"canaries": coins // wanted["trials"], **wanted, "rounds": rounds}
    return {**found, "observers": [one.as_dict() for one in findings]}, partial(_print_findings, findings)


def _linkage(target: Target, given: dict[str, Any]) -> Attacked:
    from homebody.audit.linkage import ReportBatch, as_they_come, linkage, reported
    from homebody.federation.proxy.rehearsal import rehearse_reports

    _, fitted, runtime, _, seed, quiet = target
    with _bar("messages made", quiet) as step:
        round_ = reported(fitted.method, runtime, fitted.shared, seed=seed, step=step, **given)
    views = {"as they come": as_they_come(round_.messages)}
    if fitted.method.uplink.facts.hides_senders:
        batches, whose = rehearse_reports(round_.messages)
        views = {"through a proxy": ([ReportBatch(float(at), one) for at, one in enumerate(batches)], whose), **views}
    attack = partial(linkage, worked_out=round_.worked_out, epsilon=round_.epsilon, seed=seed)
    return {"views": {name: attack(*view).as_dict() for name, view in views.items()}}, _print_linkage


def _membership(target: Target, given: dict[str, Any]) -> Attacked:
    from homebody.audit.membership import Released, attack, leaves_some_out
    from homebody.audit.shadows import trained_for
    from homebody.reference import federated

    _, fitted, runtime, recipe, seed, quiet = target
    method = federated(recipe.build(), recipe.method)
    assert recipe.rounds is not None
    released, cut = None, given.pop("rounds", None)
    if cut is None and leaves_some_out(runtime.split):
        released = Released(fitted.method, fitted.shared, recipe.seed, fitted.epsilon["public"])
    with _bar("rounds of the attacked and of shadow models", quiet) as step:
        found = attack(
            method,
            runtime.split,
            rounds=trained_for(method, recipe.rounds, fitted.chosen) if cut is None else cut,
            cohort=recipe.cohort,
            released=released,
            delta=fitted.delta,
            device=recipe.device,
            fused=recipe.fused,
            seed=seed,
            step=step,
            **given,
        )
    if cut is not None:
        fewer = f"Every model had {several(cut, 'round')}, and the run's had {fitted.chosen:,}."
        found = {**found, "notes": [*found["notes"], fewer]}
    return found, _print_membership


def _view(target: Target, given: dict[str, Any]) -> Attacked:
    from homebody.audit.views import PARTICIPATIONS, SIGMAS, read_view

    _, fitted, runtime, _, seed, quiet = target
    noise = fitted.method.uplink.facts.view_noise
    sigmas = _numbers("sigma", given.pop("sigma", None)) or [*SIGMAS, *([noise.z] if noise else [])]
    lengths = _numbers("participations", given.pop("participations", None)) or PARTICIPATIONS
    if any(one != int(one) for one in lengths):
        raise HomebodyError("--participations takes whole numbers, such as 1,10,100.")
    wanted = {"sigmas": sigmas, "participations": [int(one) for one in lengths], **given}
    with _bar("people read", quiet) as step:
        return read_view(fitted.method, runtime, fitted.shared, seed=seed, step=step, **wanted), _print_view


def _numbers(name: str, text: str | None) -> list[float]:
    try:
        return [float(one) for one in text.split(",")] if text else []
    except ValueError:
        raise HomebodyError(f"--{name} takes numbers separated by commas, not '{text}'.") from None


def _reopened(run: Path, seed: int, quiet: bool) -> Target:
    from homebody.recipe import Recipe
    from homebody.report import RunFolder
    from homebody.run import reopen
    from homebody.simulation import Simulator

    fitted, _ = reopen(run)
    assert isinstance(fitted.runtime, Simulator)
    recipe = Recipe.from_toml(RunFolder.open(run).recipe_text())
    return Target(run, fitted, fitted.runtime, recipe, seed, quiet)


def _print(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], lines: Iterable[str], *, no_wrap: bool = False
) -> None:
    """A table whose first column has names and the others numbers, and lines that explain it."""
    from rich.console import Console

    from homebody.report.words import say

    console, table = Console(), options.table(headings, headings[1:], title=title, no_wrap=no_wrap)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    say(console, *lines)


def _print_reading(found: dict[str, Any], method: str) -> None:
    from homebody.report.words import epsilon as epsilon_text

    low, high = found["interval"]
    kind = "the sum" if found["reads"].startswith("the sum") else "the message"
    epsilon = ", ".join(f"{who} {epsilon_text(value)}" for who, value in found["epsilon"].items())
    unbounded = "∞ against the server: nothing bounds what it reads, whatever others are told"
    _print(
        f"{method}: whose items are whose? {several(found['users'], 'client')}, one round",
        ("guessed from", "AUC", "95 % of the mean", f"above {found['above']:g}"),
        (
            (kind, f"{found['auc']:.3f}", f"{low:.3f} – {high:.3f}", f"{found['share_above']:.0%}"),
            ("popularity alone", f"{found['popularity_auc']:.3f}", "", ""),
        ),
        (
            f"the server reads {found['reads']}: '{found['table']}', {found['rule']}",
            *_stages(found),
            f"ε certified, one user, over the whole training: {epsilon}; δ = {found['delta']:g}",
            *([unbounded] if found["epsilon"]["server"] == "inf" else []),
        ),
    )


def _stages(found: dict[str, Any]) -> list[str]:
    return [f"stages: {' → '.join(found['stages'])}"] if found["stages"] else []


def _print_linkage(found: dict[str, Any], method: str) -> None:
    first = next(iter(found["views"].values()))
    rows = []
    for name, one in found["views"].items():
        apart, low, high = one["difference"]
        areas = (f"{one[kind][0]:.3f}" for kind in ("everything", "content"))
        rows.append((name, *areas, f"{apart:+.3f}", f"{low:+.3f} – {high:+.3f}"))
    mixed = found["views"].get("through a proxy")
    if mixed is None:
        last = "without a shuffle stage nothing mixes them"
    else:
        tell = "MORE than the reports do" if mixed["linked"] else "nothing"
        last = f"behind the proxy order and batches tell {tell}"
    _print(
        f"{method}: which reports are of one device? {first['reports']:,} of {first['devices']:,} devices, one round",
        ("reports reach the server", "AUC, all\nit sees", "AUC, what\nthey say", "difference", "95 %"),
        rows,
        ("what they say: pairs scored by content alone, as from a bag of reports; 0.5 is chance", last),
    )


def _print_findings(findings: list[Finding], found: dict[str, Any], method: str) -> None:
    from homebody.report.words import epsilon as epsilon_text

    canaries, trainings = several(found["canaries"], "canary", "canaries"), several(found["trials"], "training")
    rows = []
    for one in findings:
        lower, counted = one.lower, one.counted
        rows.append(
            (
                one.observer,
                epsilon_text(found["epsilon"][one.observer]),
                epsilon_text(one.certified),
                "not measured" if lower is None else f"{lower.epsilon:.2f}",
                "" if one.gaussian is None else f"{one.gaussian.epsilon:.2f}",
                "" if lower is None else f"{(counted or lower).guesses:,}",
                "" if lower is None else f"{(counted or lower).right:,}",
                "" if lower is None else "all" if counted is None else f"{counted.most:,}",
            )
        )
    bounds = ("ε, the\nrun", "ε, with\ncanaries", "at least\none run", "at least\nGaussian")
    _print(
        f"{method}: {canaries}, {trainings} of {several(found['rounds'], 'round')}",
        ("observer", *bounds, "guesses", "right", "allowed"),
        rows,
        _remarks(findings, found),
        no_wrap=True,
    )


COINS = {
    "replace-one": "the canary takes part, or someone with the opposite update in its place (replace-one)",
    "add-remove": "the canary takes part, or its seat stays empty (add-remove)",
}


def _remarks(findings: list[Finding], found: dict[str, Any]) -> Iterator[str]:
    yield f"a fair coin for each canary: {COINS[findings[0].relation]}"
    how = (
        "Clopper and Pearson's error rates" if found["canaries"] == 1 else "Steinke, Nasr and Jagielski's one-run bound"
    )
    yield (
        f"at least: lower bounds on ε with canaries, by {how} and by how far Gaussian noise leaves the two sides of "
        f"the coins apart; δ = {found['delta']:g}"
    )
    yield "allowed: the right guesses that the ledger's ε leaves possible, at this δ and at all others"
    error = 1 - found["confidence"]
    yield f"if the ledger is right, anything is contradicted with a probability of at most {error:.3g}"
    yield from _stages(found)
    if any(one.certified == float("inf") for one in findings):
        yield "where ∞ is certified, any lower bound agrees with it"
    for one in findings:
        if one.lower is None:
            yield f"{one.observer}: the final model does not hold updates as they were sent, so nothing is measured"
        elif one.contradicted:
            yield f"{one.observer}: CONTRADICTED: {_reason(one)}"
        elif one.visible is not None:
            yield f"{one.observer}: not contradicted; {_would_be_found(one.visible)}"
    if any(one.contradicted and not one.in_sight for one in findings):
        yield "to rule out chance, repeat it with another --seed and --confidence 0.999"


def _reason(finding: Finding) -> str:
    if finding.in_sight:
        return "it is charged as if a draw hid who takes part, and it draws them itself"
    if finding.at_least is not None and finding.at_least > finding.certified:
        return f"ε is at least {finding.at_least:.2f}, and {finding.certified:.2f} is certified"
    assert finding.counted is not None
    right, guesses, most = finding.counted.right, finding.counted.guesses, finding.counted.most
    return f"{right:,} of {guesses:,} guesses are right, and the ledger allows {most:,}"


def _would_be_found(visible: Visible) -> str:
    """The smallest violation that would have shown."""
    if visible.share is None:
        return "so large an ε allows every guess to be right, so that nothing could be"
    noise = "" if visible.noise is None else f"noise of {visible.noise:.2f} × the stated scale, or "
    return (
        f"with probability 90 % this would have found {noise}guesses that are right in {visible.share:.1%} of all "
        f"cases, where {visible.allowed:.1%} are allowed"
    )


def _print_membership(found: dict[str, Any], method: str) -> None:
    """A line for each attack, beside what any could reach."""
    _print(
        f"{method}: who was in the training? {found['members']:,} members, {found['others']:,} others",
        ("attack", "reached", "95 %", "any attack,\nby certified ε"),
        _membership_rows(found),
        _membership_remarks(found),
        no_wrap=True,
    )


def _membership_rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    most, lists, ratio = found["allowed"], found["lists"], found["likelihood_ratio"]
    if "accuracy" in lists:
        yield ("lists, forest: accuracy", *_interval(lists["accuracy"]), f"{most['accuracy']:.3f}")
        yield ("lists, oracle: accuracy", f"{lists['ceiling']:.3f}", "", "")
    yield ("preference alone: AUC", *_interval(ratio["auc_without_shadows"]), f"{most['auc']:.3f}")
    yield ("likelihood ratio: AUC", *_interval(ratio["auc"]), f"{most['auc']:.3f}")
    if ratio["auc_took_part"] and found["took_part"] < found["trained_on"]:
        yield ("  of those in a round", *_interval(ratio["auc_took_part"]), "")
    for rate, bound in zip(ratio["rates"], most["rates"], strict=True):
        yield (f"  found at {100 * rate['false_positives']:g} % false", *_interval(rate["true"]), f"{bound:.3f}")


def _interval(figure: list[float]) -> tuple[str, str]:
    value, low, high = figure
    return f"{value:.3f}", f"{low:.3f} – {high:.3f}"


def _membership_remarks(found: dict[str, Any]) -> Iterator[str]:
    from homebody.report.words import epsilon as epsilon_text

    most, lists = found["allowed"], found["lists"]
    drawn = f"{found['took_part']:,} of {found['trained_on']:,} members were in a round"
    if found["target"] == "the run's model":
        yield f"attacked: the run's model as released; others are the people it held out; {drawn}"
    else:
        yield f"attacked: a model trained for the audit as the run's was, on half of the people; {drawn}"
    if "accuracy" in lists:
        yield (
            f"lists: features and top 10, {lists['distinct']:,} distinct among those asked about: no classifier passes "
            f"the oracle; shadow model on {lists['shadow_trained_on']:,} of {lists['shadow_people']:,} other people"
        )
    else:
        yield f"lists: {lists['skipped']}"
    yield f"likelihood ratio: {found['shadows']} shadow models on halves; {found['likelihood_ratio']['statistic']}"
    yield from _stages(found)
    run = epsilon_text(found["epsilon"]["public"])
    yield (
        f"ε certified for the public, one user: {epsilon_text(most['epsilon'])} for the attacked model, {run} for the "
        f"run; δ = {found['delta']:g}"
    )
    yield from found["notes"]
    if found["contradicted"]:
        yield "CONTRADICTED: an attack gets further than the certified ε allows"


TOWERS = {
    "known": "",
    "the first": ", with the tower of the start",
    "mean of others": ", with the mean of ten others' towers",
}
"""What the attacker has in place of the attacked view's tower, for a line of the table."""


def _print_view(found: dict[str, Any], method: str) -> None:
    """A line for each question, noise and number of participations."""
    rows = []
    for one in found["guesses"]:
        among = f" of {one['candidates']}" if one["candidates"] > 2 else ""
        rows.append(
            (
                f"{one['question']}{among}{TOWERS[one['tower']]}",
                f"{one['sigma']:g}",
                f"{one['participations']:,}",
                f"{one['accuracy']:.3f}",
                f"{one['deviation']:.3f}",
                "" if one["computed"] is None else f"{one['computed']:.3f}",
                f"{one['most']:.3f}" + (" ABOVE" if one["above"] else ""),
            )
        )
    _print(
        f"{method}: what {' and '.join(found['attackers'])} reads of {found['target']}, "
        f"{several(found['people'], 'person', 'people')}",
        ("guessed", "σ", "T", "right", "±", "computed", "at most"),
        rows,
        _view_remarks(found),
        no_wrap=True,
    )


def _view_remarks(found: dict[str, Any]) -> Iterator[str]:
    from homebody.report.words import epsilon as epsilon_text

    for one in found["errors"]:
        yield (
            f"σ = {one['sigma']:g}: relative error of the gradient that is read {one['median']:.2g}, at most "
            f"{one['largest']:.2g}"
        )
    yield f"T: messages read; σ: noise over the clip of {found['clip']:g}, which cut {found['clipped']:.0%} of parts"
    yield "right: of guesses whose truth is drawn among the candidates; ±: deviation over people"
    yield "computed: from how far apart two candidates' gradients are; at most: Φ(Φ⁻¹(1/K) + √T/σ), whatever the attack"
    yield "opposite: two parts as far apart as the device allows, to test the noise itself"
    epsilon = found["epsilon"].get("views")
    if epsilon is not None:
        yield f"ε certified against views, over the whole training: {epsilon_text(epsilon)}; δ = {found['delta']:g}"
    error = 1 - found["confidence"]
    if found["contradicted"]:
        yield "CONTRADICTED: more guesses are right than the noise allows"
    yield f"if the noise is as stated, anything is contradicted with a probability of at most {error:.3g}"


@contextmanager
def _bar(label: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar once the work takes longer than a moment."""
    bar, began = Bar(label, quiet=quiet), time.monotonic()

    def step(done: int, total: int) -> None:
        if time.monotonic() - began > PATIENCE:
            bar.start()
        bar.update("", f"{label}: {done} of {total}", completed=done, total=total)

    try:
        yield step
    finally:
        bar.stop()
