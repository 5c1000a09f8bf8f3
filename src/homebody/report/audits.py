"""What an audit found, as a table and remarks: one function for each attack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from homebody.adversary.canaries import Finding, Visible
from homebody.errors import several
from homebody.markup import html
from homebody.report.words import epsilon

__all__ = ["AuditTable", "canary", "game", "interactions", "linkage", "membership", "view", "words"]


class AuditTable(NamedTuple):
    """A table whose first column has names and the others numbers, and lines that explain it."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str]

    def html(self) -> str:
        return html(self.title, self.headings, self.rows, self.remarks)


def interactions(reading: dict[str, Any], method: str) -> AuditTable:
    low, high = reading["interval"]
    kind = "the sum" if reading["reads"].startswith("the sum") else "the message"
    listed = ", ".join(f"{who} {epsilon(value)}" for who, value in reading["epsilon"].items())
    unbounded = "∞ against the server: nothing bounds what it reads, whatever others are told"
    return AuditTable(
        f"{method}: whose items are whose? {several(reading['users'], 'client')}, one round",
        ("guessed from", "AUC", "95 % of the mean", f"above {reading['above']:g}"),
        (
            (kind, f"{reading['auc']:.3f}", f"{low:.3f} – {high:.3f}", f"{reading['share_above']:.0%}"),
            ("popularity alone", f"{reading['popularity_auc']:.3f}", "", ""),
        ),
        (
            f"the server reads {reading['reads']}: '{reading['table']}', {reading['rule']}",
            *_stages(reading),
            f"ε certified, one user, over the whole training: {listed}; δ = {reading['delta']:g}",
            *([unbounded] if reading["epsilon"]["server"] == "inf" else []),
        ),
    )


def _chance(result: Mapping[str, Any], right: str) -> str:
    error = 1 - result["confidence"]
    return f"if {right}, anything is contradicted with a probability of at most {error:.3g}"


def _stages(result: dict[str, Any]) -> list[str]:
    return [f"stages: {' → '.join(result['stages'])}"] if result["stages"] else []


def linkage(result: dict[str, Any], method: str) -> AuditTable:
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
    return AuditTable(
        f"{method}: which reports are of one device? {first['reports']:,} of {first['devices']:,} devices, one round",
        ("reports reach the server", "AUC, all\nit sees", "AUC, what\nthey say", "difference", "95 %"),
        rows,
        ("what they say: pairs scored by content alone, as from a bag of reports; 0.5 is chance", last),
    )


def canary(findings: list[Finding], facts: dict[str, Any], method: str) -> AuditTable:
    canaries, trainings = several(facts["canaries"], "canary", "canaries"), several(facts["trials"], "training")
    rows = []
    for finding in findings:
        lower, counted = finding.lower, finding.counted
        rows.append(
            (
                finding.observer,
                epsilon(facts["epsilon"][finding.observer]),
                epsilon(finding.certified),
                "–" if lower is None else f"{lower.epsilon:.2f}",
                "" if finding.gaussian is None else f"{finding.gaussian.epsilon:.2f}",
                "" if lower is None else f"{(counted or lower).guesses:,}",
                "" if lower is None else f"{(counted or lower).right:,}",
                "" if lower is None else "all" if counted is None else f"{counted.most:,}",
            )
        )
    bounds = ("ε, the\nrun", "ε, with\ncanaries", "at least\none run", "at least\nGaussian")
    return AuditTable(
        f"{method}: {canaries}, {trainings} of {several(facts['rounds'], 'round')}",
        ("observer", *bounds, "guesses", "right", "allowed"),
        rows,
        [*_remarks(findings, facts)],
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


def membership(result: dict[str, Any], method: str) -> AuditTable:
    """A line for each attack, beside the most that any attack could reach."""
    return AuditTable(
        f"{method}: who was in the training? {result['members']:,} members, {result['others']:,} others",
        ("attack", "reached", "95 %", "any attack,\nby certified ε"),
        [*_membership_rows(result)],
        [*_membership_remarks(result)],
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
    run = epsilon(result["epsilon"]["public"])
    yield (
        f"ε certified for the public, one user: {epsilon(most['epsilon'])} for the attacked model, {run} for the "
        f"run; δ = {result['delta']:g}"
    )
    yield from result["notes"]
    if result["contradicted"]:
        yield "CONTRADICTED: an attack gets further than the certified ε allows"


def words(result: dict[str, Any], method: str) -> AuditTable:
    frequent = f"most frequent {result['kind']}"
    rows = [
        (name, *_interval(result[f"{part}precision"]), *_interval(result[f"{part}recall"]))
        for name, part in (("the gradient", ""), (frequent, "frequent_"))
    ]
    skipped = f"; {several(result['skipped'], 'client')} without any left out" if result["skipped"] else ""
    against = epsilon(result["epsilon"]["server"])
    return AuditTable(
        f"{method}: which {result['kind']} were clicked? {several(result['users'], 'client')}, one message each",
        ("guessed from", "precision", "95 %", "recall", "95 %"),
        rows,
        (
            f"read from '{result['table']}': {result['rule']}, without those in the shown news",
            f"to be found: {result['kind']} of the history before the impression, not in the shown news{skipped}",
            f"{frequent}: as many guesses, by how often they are in everyone's histories",
            *_stages(result),
            f"ε certified against the server, one user, over the whole training: {against}",
        ),
    )


def game(result: dict[str, Any], method: str) -> AuditTable:
    rows = []
    for answer in result["questions"]:
        area, interval = _interval(answer["auc"])
        above = " ABOVE" if answer["contradicted"] else ""
        bounds = f"{answer['lower']['epsilon']:.3f}{above}", f"{answer['certified']:.4g}"
        rows.append((answer["question"], area, interval, f"{answer['allowed_auc']:.3f}", *bounds))
    return AuditTable(
        f"{method}: which of two is it? {result['trials']:,} reports for each question",
        ("the two differ in", "AUC", "95 %", "AUC,\nat most", "ε,\nat least", "ε,\ncertified"),
        rows,
        [*_game_remarks(result)],
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


def view(result: dict[str, Any], method: str) -> AuditTable:
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
    return AuditTable(
        f"{method}: what {' and '.join(result['attackers'])} reads of {result['target']}, "
        f"{several(result['people'], 'person', 'people')}",
        ("guessed", "σ", "T", "right", "±", "computed", "at most"),
        rows,
        [*_view_remarks(result)],
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
    certified = result["epsilon"].get("views")
    if certified is not None:
        yield f"ε certified against views, over the whole training: {epsilon(certified)}; δ = {result['delta']:g}"
    if result["contradicted"]:
        yield "CONTRADICTED: more guesses are right than the noise allows"
    yield _chance(result, "the noise is as stated")
