"""`homebody audit`: attack a run, and compare the outcome with the ε that is certified."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Exit, Option

from homebody.cli import options
from homebody.cli.progress import Bar
from homebody.errors import HomebodyError, refuse_unknown, several

if TYPE_CHECKING:
    from homebody.audit.canaries import Finding, Visible
    from homebody.recipe import Recipe
    from homebody.simulation import Simulator
    from homebody.training import Fitted

__all__ = ["audit"]

PATIENCE = 2.0
"""Seconds before the progress bar appears."""


def audit(
    run: Annotated[Path, Argument(help="A finished run's folder.")],
    attack: Annotated[
        str,
        Option(
            help="interactions: the server guesses interactions from uploads; canary: synthetic people take part, and "
            "observers detect them, which tests the ledger's ε; linkage: the server links the reports of one device "
            "behind the proxy; membership: anyone infers from the final model who was in its training; view: one app "
            "infers what another app of the same person knows; words: the server reads clicked words off the gradient "
            "of a news encoder, or tells two people apart by a certified report."
        ),
    ],
    users: Annotated[
        int | None,
        Option(
            help="interactions, linkage, view, words: clients to attack.",
            show_default="100, 300, 30, 100; 300 with reports",
        ),
    ] = None,
    canaries: Annotated[
        int | None,
        Option(
            help="canary: synthetic people per training; more of them detect a smaller error in ε.",
            show_default="1,000, or as many as an update has entries",
        ),
    ] = None,
    trials: Annotated[
        int | None,
        Option(
            help="canary: how many times to train; words: reports for each question, of a certified run.",
            show_default="1, 20,000",
        ),
    ] = None,
    confidence: Annotated[
        float | None,
        Option(
            help="canary, view, words: the probability that a correct ledger passes.", show_default="0.95, 0.99, 0.95"
        ),
    ] = None,
    people: Annotated[
        int | None, Option(help="membership: people to test, half of them members.", show_default="all")
    ] = None,
    shadows: Annotated[int | None, Option(help="membership: shadow models to train.", show_default="8")] = None,
    rounds: Annotated[
        int | None,
        Option(
            help="membership: rounds of every model, the attacked one included; fewer for a quick try.",
            show_default="the run's",
        ),
    ] = None,
    attacked: Annotated[
        str | None,
        Option("--target", help="view: the view to attack.", show_default="the first with a feature of few values"),
    ] = None,
    feature: Annotated[
        str | None, Option(help="view: the feature of the target to guess.", show_default="that with fewest values")
    ] = None,
    sigma: Annotated[
        str | None, Option(help="view: noise multipliers to try.", show_default="0,1,4 and the run's")
    ] = None,
    participations: Annotated[
        str | None, Option(help="view: how many messages are read before the guess.", show_default="1,10,100")
    ] = None,
    seed: Annotated[int, Option(help="The seed of all randomness in the attack.")] = 0,
    trust_code: options.TrustCode = False,
    as_json: options.Json = False,
) -> None:
    """Attack a finished run as an observer would, and compare with the certified ε. See docs/auditing.md.

    Exit code 1: a measured lower bound exceeds the certified ε, or an attack does better than that ε allows.
    """
    refuse_unknown("attack", [attack], ATTACKS)
    make, own = ATTACKS[attack]
    typed: dict[str, Any] = {"users": users, "canaries": canaries, "trials": trials, "confidence": confidence}
    typed |= {"people": people, "shadows": shadows, "rounds": rounds}
    typed |= {"target": attacked, "feature": feature, "sigma": sigma, "participations": participations}
    given = {name: value for name, value in typed.items() if value is not None}
    for name in given:
        if name not in own:
            raise HomebodyError(f"--{name} is not for --attack {attack}: leave it out.")
    if trust_code:
        from homebody.run import trust_folder

        trust_folder(run, options.warn)
    target = _reopened(run, seed, as_json)
    result, show = make(target, given)
    recipe, fitted = target.recipe, target.fitted
    result |= {
        "method": recipe.method,
        "data": Path(recipe.data).name if Path(recipe.data).is_file() else recipe.data,
        "stages": recipe.stages,
        "epsilon": {who: value if math.isfinite(value) else "inf" for who, value in fitted.epsilon.items()},
        "delta": fitted.delta,
        "assumes": _assumed(target),
    }
    said = {"attack": attack, "run": str(run), "seed": seed, **result}
    options.answer(said, as_json, lambda: show(result, recipe.short_method), *result["assumes"])
    if result.get("contradicted") or any(observer["contradicted"] for observer in result.get("observers", [])):
        raise Exit(1)


class Target(NamedTuple):
    """A finished run to attack: what was trained, its simulated people, and its recipe."""

    run: Path
    fitted: Fitted
    runtime: Simulator
    recipe: Recipe
    seed: int
    quiet: bool


def _assumed(target: Target) -> list[str]:
    """What a secure sum of the run shows to whom, and what that rests on; nothing without one."""
    from homebody.privacy.assumptions import assumptions

    parties = target.recipe.cohort or len(target.runtime.available())
    return list(assumptions(target.fitted.method.uplink, parties))


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
    coins = next(finding.lower.coins for finding in findings if finding.lower is not None)
    settings = {"canaries": coins // wanted["trials"], **wanted, "rounds": rounds}
    return {**settings, "observers": [finding.as_dict() for finding in findings]}, partial(_print_findings, findings)


def _linkage(target: Target, given: dict[str, Any]) -> Attacked:
    from homebody.audit.linkage import ReportBatch, as_they_come, linkage, reported
    from homebody.federation.proxy.rehearsal import rehearse_reports

    _, fitted, runtime, _, seed, quiet = target
    with _bar("messages made", quiet) as step:
        round_ = reported(fitted.method, runtime, fitted.shared, seed=seed, step=step, **given)
    views = {"as they come": as_they_come(round_.messages)}
    if fitted.method.uplink.facts.hides_senders:
        batches, whose = rehearse_reports(round_.messages)
        mixed = [ReportBatch(float(at), batch) for at, batch in enumerate(batches)]
        views = {"through a proxy": (mixed, whose), **views}
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
        result = attack(
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
        result = {**result, "notes": [*result["notes"], fewer]}
    return result, _print_membership


def _view(target: Target, given: dict[str, Any]) -> Attacked:
    from homebody.audit.views import PARTICIPATIONS, SIGMAS, read_view

    _, fitted, runtime, _, seed, quiet = target
    noise = fitted.method.uplink.facts.view_noise
    sigmas = _numbers("sigma", given.pop("sigma", None)) or [*SIGMAS, *([noise.z] if noise else [])]
    lengths = _numbers("participations", given.pop("participations", None)) or PARTICIPATIONS
    if any(length != int(length) for length in lengths):
        raise HomebodyError("--participations takes whole numbers, such as 1,10,100.")
    wanted = {"sigmas": sigmas, "participations": [int(length) for length in lengths], **given}
    with _bar("people read", quiet) as step:
        return read_view(fitted.method, runtime, fitted.shared, seed=seed, step=step, **wanted), _print_view


def _words(target: Target, given: dict[str, Any]) -> Attacked:
    from homebody.audit.impressions import report_stage, tell_apart
    from homebody.audit.words import read_words

    _, fitted, runtime, _, seed, quiet = target
    if (stage := report_stage(fitted.method.uplink)) is None:
        for name in ("trials", "confidence"):
            if name in given:
                raise HomebodyError(f"--{name} is for runs that send reports on impressions: leave it out.")
        with _bar("messages read", quiet) as step:
            reading = read_words(fitted.method, runtime, fitted.shared, seed=seed, step=step, **given)
        return reading.as_dict(), _print_words
    with _bar("parts of the game", quiet) as step:
        answers = tell_apart(fitted.method, runtime, fitted.shared, seed=seed, step=step, **given)
    result: dict[str, Any] = {"reads": "reports", "mechanism": stage.mechanism, "padding": stage.padding}
    result |= {"confidence": given.get("confidence", 0.95), "trials": answers[0].lower.coins}
    result |= {"questions": [answer.as_dict() for answer in answers]}
    return {**result, "contradicted": any(answer.contradicted for answer in answers)}, _print_game


ATTACKS: dict[str, tuple[Callable[[Target, dict[str, Any]], Attacked], tuple[str, ...]]] = {
    "interactions": (_interactions, ("users",)),
    "canary": (_canary, ("canaries", "trials", "confidence")),
    "linkage": (_linkage, ("users",)),
    "membership": (_membership, ("people", "shadows", "rounds")),
    "view": (_view, ("users", "target", "feature", "sigma", "participations", "confidence")),
    "words": (_words, ("users", "trials", "confidence")),
}
"""How each attack is made, and its options."""


def _numbers(name: str, text: str | None) -> list[float]:
    try:
        return [float(number) for number in text.split(",")] if text else []
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
    table = options.table(headings, headings[1:], title=title, no_wrap=no_wrap)
    for row in rows:
        table.add_row(*row)
    options.show(table, *lines)


def _print_reading(reading: dict[str, Any], method: str) -> None:
    low, high = reading["interval"]
    kind = "the sum" if reading["reads"].startswith("the sum") else "the message"
    epsilon = ", ".join(f"{who} {_epsilon(value)}" for who, value in reading["epsilon"].items())
    unbounded = "∞ against the server: nothing bounds what it reads, whatever others are told"
    _print(
        f"{method}: whose items are whose? {several(reading['users'], 'client')}, one round",
        ("guessed from", "AUC", "95 % of the mean", f"above {reading['above']:g}"),
        (
            (kind, f"{reading['auc']:.3f}", f"{low:.3f} – {high:.3f}", f"{reading['share_above']:.0%}"),
            ("popularity alone", f"{reading['popularity_auc']:.3f}", "", ""),
        ),
        (
            f"the server reads {reading['reads']}: '{reading['table']}', {reading['rule']}",
            *_stages(reading),
            f"ε certified, one user, over the whole training: {epsilon}; δ = {reading['delta']:g}",
            *([unbounded] if reading["epsilon"]["server"] == "inf" else []),
        ),
    )


def _epsilon(value: float | str) -> str:
    from homebody.report.words import epsilon

    return epsilon(value)


def _chance(result: Mapping[str, Any], right: str) -> str:
    error = 1 - result["confidence"]
    return f"if {right}, anything is contradicted with a probability of at most {error:.3g}"


def _stages(result: dict[str, Any]) -> list[str]:
    return [f"stages: {' → '.join(result['stages'])}"] if result["stages"] else []


def _print_linkage(result: dict[str, Any], method: str) -> None:
    first = next(iter(result["views"].values()))
    rows = []
    for name, view in result["views"].items():
        apart, low, high = view["difference"]
        areas = (f"{view[kind][0]:.3f}" for kind in ("everything", "content"))
        rows.append((name, *areas, f"{apart:+.3f}", f"{low:+.3f} – {high:+.3f}"))
    mixed = result["views"].get("through a proxy")
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


def _print_findings(findings: list[Finding], facts: dict[str, Any], method: str) -> None:
    canaries, trainings = several(facts["canaries"], "canary", "canaries"), several(facts["trials"], "training")
    rows = []
    for finding in findings:
        lower, counted = finding.lower, finding.counted
        rows.append(
            (
                finding.observer,
                _epsilon(facts["epsilon"][finding.observer]),
                _epsilon(finding.certified),
                "–" if lower is None else f"{lower.epsilon:.2f}",
                "" if finding.gaussian is None else f"{finding.gaussian.epsilon:.2f}",
                "" if lower is None else f"{(counted or lower).guesses:,}",
                "" if lower is None else f"{(counted or lower).right:,}",
                "" if lower is None else "all" if counted is None else f"{counted.most:,}",
            )
        )
    bounds = ("ε, the\nrun", "ε, with\ncanaries", "at least\none run", "at least\nGaussian")
    _print(
        f"{method}: {canaries}, {trainings} of {several(facts['rounds'], 'round')}",
        ("observer", *bounds, "guesses", "right", "allowed"),
        rows,
        _remarks(findings, facts),
        no_wrap=True,
    )


COINS = {
    "replace-one": "the canary takes part, or someone with the opposite update in its place (replace-one)",
    "add-remove": "the canary takes part, or its seat stays empty (add-remove)",
}


def _remarks(findings: list[Finding], facts: dict[str, Any]) -> Iterator[str]:
    yield f"a fair coin for each canary: {COINS[findings[0].relation]}"
    one = facts["canaries"] == 1
    how = "Clopper and Pearson's error rates" if one else "Steinke, Nasr and Jagielski's one-run bound"
    yield (
        f"at least: lower bounds on ε with canaries, by {how} and by how far Gaussian noise leaves the two sides of "
        f"the coins apart; δ = {facts['delta']:g}"
    )
    yield "allowed: the right guesses that the ledger's ε leaves possible, at this δ and at all others"
    yield _chance(facts, "the ledger is right")
    yield from _stages(facts)
    if any(finding.certified == float("inf") for finding in findings):
        yield "where ∞ is certified, any lower bound agrees with it"
    for finding in findings:
        if finding.lower is None:
            yield f"{finding.observer}: the final model does not hold updates as they were sent, so nothing is measured"
        elif finding.contradicted:
            yield f"{finding.observer}: CONTRADICTED: {_reason(finding)}"
        elif finding.visible is not None:
            yield f"{finding.observer}: not contradicted; {_would_be_found(finding.visible)}"
    if any(finding.contradicted and not finding.in_sight for finding in findings):
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
    """The smallest violation that this audit would have detected."""
    if visible.share is None:
        return "so large an ε allows every guess to be right, so that nothing could be"
    noise = "" if visible.noise is None else f"noise of {visible.noise:.2f} × the stated scale, or "
    return (
        f"with probability 90 % this would have found {noise}guesses that are right in {visible.share:.1%} of all "
        f"cases, where {visible.allowed:.1%} are allowed"
    )


def _print_membership(result: dict[str, Any], method: str) -> None:
    """A line for each attack, beside the most that any attack could reach."""
    _print(
        f"{method}: who was in the training? {result['members']:,} members, {result['others']:,} others",
        ("attack", "reached", "95 %", "any attack,\nby certified ε"),
        _membership_rows(result),
        _membership_remarks(result),
        no_wrap=True,
    )


def _membership_rows(result: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    most, lists, ratio = result["allowed"], result["lists"], result["likelihood_ratio"]
    if "accuracy" in lists:
        yield ("lists, forest: accuracy", *_interval(lists["accuracy"]), f"{most['accuracy']:.3f}")
        yield ("lists, oracle: accuracy", f"{lists['ceiling']:.3f}", "", "")
    yield ("preference alone: AUC", *_interval(ratio["auc_without_shadows"]), f"{most['auc']:.3f}")
    yield ("likelihood ratio: AUC", *_interval(ratio["auc"]), f"{most['auc']:.3f}")
    if ratio["auc_took_part"] and result["took_part"] < result["trained_on"]:
        yield ("  of those in a round", *_interval(ratio["auc_took_part"]), "")
    for rate, bound in zip(ratio["rates"], most["rates"], strict=True):
        yield (f"  found at {100 * rate['false_positives']:g} % false", *_interval(rate["true"]), f"{bound:.3f}")


def _interval(figure: list[float]) -> tuple[str, str]:
    value, low, high = figure
    return f"{value:.3f}", f"{low:.3f} – {high:.3f}"


def _membership_remarks(result: dict[str, Any]) -> Iterator[str]:
    most, lists = result["allowed"], result["lists"]
    drawn = f"{result['took_part']:,} of {result['trained_on']:,} members were in a round"
    if result["target"] == "the run's model":
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
    yield f"likelihood ratio: {result['shadows']} shadow models on halves; {result['likelihood_ratio']['statistic']}"
    yield from _stages(result)
    run = _epsilon(result["epsilon"]["public"])
    yield (
        f"ε certified for the public, one user: {_epsilon(most['epsilon'])} for the attacked model, {run} for the "
        f"run; δ = {result['delta']:g}"
    )
    yield from result["notes"]
    if result["contradicted"]:
        yield "CONTRADICTED: an attack gets further than the certified ε allows"


def _print_words(result: dict[str, Any], method: str) -> None:
    frequent = f"most frequent {result['kind']}"
    rows = [
        (name, *_interval(result[f"{part}precision"]), *_interval(result[f"{part}recall"]))
        for name, part in (("the gradient", ""), (frequent, "frequent_"))
    ]
    skipped = f"; {several(result['skipped'], 'client')} without any left out" if result["skipped"] else ""
    epsilon = _epsilon(result["epsilon"]["server"])
    _print(
        f"{method}: which {result['kind']} were clicked? {several(result['users'], 'client')}, one message each",
        ("guessed from", "precision", "95 %", "recall", "95 %"),
        rows,
        (
            f"read from '{result['table']}': {result['rule']}, without those in the shown news",
            f"to be found: {result['kind']} of the history before the impression, not in the shown news{skipped}",
            f"{frequent}: as many guesses, by how often they are in everyone's histories",
            *_stages(result),
            f"ε certified against the server, one user, over the whole training: {epsilon}",
        ),
        no_wrap=True,
    )


def _print_game(result: dict[str, Any], method: str) -> None:
    rows = []
    for answer in result["questions"]:
        area, interval = _interval(answer["auc"])
        above = " ABOVE" if answer["contradicted"] else ""
        bounds = f"{answer['lower']['epsilon']:.3f}{above}", f"{answer['certified']:.4g}"
        rows.append((answer["question"], area, interval, f"{answer['allowed_auc']:.3f}", *bounds))
    _print(
        f"{method}: which of two is it? {result['trials']:,} reports for each question",
        ("the two differ in", "AUC", "95 %", "AUC,\nat most", "ε,\nat least", "ε,\ncertified"),
        rows,
        _game_remarks(result),
        no_wrap=True,
    )


def _game_remarks(result: dict[str, Any]) -> Iterator[str]:
    yield "one past click: one news item of the history is another; the click: another of the shown news was clicked"
    yield "a history: another person's; a person: another history and another click"
    yield "guessed by the likelihood ratio of one report; 0.5 is chance; at most: what certified ε allows any attack"
    if result["padding"]:
        yield "with padding the likelihood is estimated; an exact one could tell more"
    deltas = sorted({answer["at_delta"] for answer in result["questions"]} - {0.0})
    if deltas:
        yield f"ε of a history is at δ = {', '.join(f'{delta:.3g}' for delta in deltas)}"
    yield "certified: for one report; over a training reports add up"
    yield from _stages(result)
    if result["contradicted"]:
        yield "CONTRADICTED: a report tells more than its certified ε allows"
    yield _chance(result, "the reports are as stated")


TOWERS = {
    "known": "",
    "the first": ", with the tower of the start",
    "mean of others": ", with the mean of ten others' towers",
}
"""What the attacker has in place of the attacked view's tower, for a line of the table."""


def _print_view(result: dict[str, Any], method: str) -> None:
    """A line for each question, noise and number of participations."""
    rows = []
    for guess in result["guesses"]:
        among = f" of {guess['candidates']}" if guess["candidates"] > 2 else ""
        rows.append(
            (
                f"{guess['question']}{among}{TOWERS[guess['tower']]}",
                f"{guess['sigma']:g}",
                f"{guess['participations']:,}",
                f"{guess['accuracy']:.3f}",
                f"{guess['deviation']:.3f}",
                "" if guess["computed"] is None else f"{guess['computed']:.3f}",
                f"{guess['most']:.3f}" + (" ABOVE" if guess["above"] else ""),
            )
        )
    _print(
        f"{method}: what {' and '.join(result['attackers'])} reads of {result['target']}, "
        f"{several(result['people'], 'person', 'people')}",
        ("guessed", "σ", "T", "right", "±", "computed", "at most"),
        rows,
        _view_remarks(result),
        no_wrap=True,
    )


def _view_remarks(result: dict[str, Any]) -> Iterator[str]:
    for error in result["errors"]:
        yield (
            f"σ = {error['sigma']:g}: relative error of the gradient that is read {error['median']:.2g}, at most "
            f"{error['largest']:.2g}"
        )
    yield f"T: messages read; σ: noise over the clip of {result['clip']:g}, which cut {result['clipped']:.0%} of parts"
    yield "right: of guesses whose truth is drawn among the candidates; ±: deviation over people"
    yield "computed: from how far apart two candidates' gradients are; at most: Φ(Φ⁻¹(1/K) + √T/σ), whatever the attack"
    yield "opposite: two parts as far apart as the device allows, to test the noise itself"
    epsilon = result["epsilon"].get("views")
    if epsilon is not None:
        yield f"ε certified against views, over the whole training: {_epsilon(epsilon)}; δ = {result['delta']:g}"
    if result["contradicted"]:
        yield "CONTRADICTED: more guesses are right than the noise allows"
    yield _chance(result, "the noise is as stated")


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
