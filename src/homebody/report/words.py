"""How figures are written for people, the same on every page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from homebody.adversary.rates import Allowed
from homebody.screen import say

__all__ = [
    "ATTACKS",
    "NOT_COVERED",
    "NOT_COVERED_IN_SHORT",
    "OF_RUNS",
    "QUANTITIES",
    "VIEW_ATTACK",
    "EpsilonMeaning",
    "behind_proxy",
    "duration",
    "epsilon",
    "epsilon_meaning",
    "epsilon_meanings",
    "figure",
    "kilobytes",
    "measured",
    "metric_name",
    "number",
    "percent",
    "points",
    "say",
    "spread",
    "with_error",
]

MINUS = "−"
OF_RUNS = {
    "parameters": "parameters",
    "epochs": "epochs",
    "seconds": "seconds",
    "seconds_per_round": "seconds a round",
    "epsilon": "ε, server",
    "epsilon_public": "ε, public",
    "epsilon_views": "ε, views",
    "epsilon_query": "ε, a request",
    "chosen_round": "chosen round",
    "reports": "reports a round",
    "epsilon_report": "ε, a report",
    "epsilon_round": "ε, a round, unshuffled",
    "epsilon_total": "ε, in all, unshuffled",
    "bytes_down": "bytes down, a round",
    "bytes_up": "bytes up, a round",
    "bytes_sealed": "bytes up, sealed",
    "bytes_down_total": "bytes down, in all",
    "bytes_up_total": "bytes up, in all",
}
"""What a run has besides metrics, and what it is called; such figures have no scale."""
QUANTITIES = {**OF_RUNS, "people": "people", "count": "count", "noise_scale": "noise, its scale"}
"""Those, and what is counted without a run."""
ATTACKS = {
    "attack/accuracy": "the paper's attack: accuracy",
    "attack/ceiling": "the most it could reach",
    "lira/auc": "likelihood ratio: AUC",
    "lira/tpr@1%": "likelihood ratio: TPR at 1 % FPR",
    "attack/allowed": "accuracy that ε allows any attack",
}
"""What an attack on membership finds, and what it is called."""
VIEW_ATTACK = {
    "view/feature": "one feature guessed, of two",
    "view/feature, first tower": "the same with everyone's first tower",
    "view/feature, mean tower": "the same with others' mean tower",
    "view/most": "the most that noise allows, of two",
    "view/profile": "profile guessed, of ten",
    "view/profile, most": "the most that noise allows, of ten",
    "view/opposite": "opposite parts told apart",
    "view/error": "relative error of the gradient",
}
"""What an attack of one view on another finds, and what it is called."""


FALSE_POSITIVES = 0.01
"""The rate of false positives at which the best possible attack is stated."""
NOT_COVERED = (
    "Each ε is against one observer alone. Observers that pool what they see learn more, unless the bound names them.",
    "ε bounds how far the odds move, not where they end: an observer that knows a lot about somebody stays sure of it.",
    "ε is about one person's own data. What those of friends, a household or similar people say is not covered.",
    "δ is a slack: with a probability of δ everything about somebody may be told. Keep it far below 1 / people.",
    "Only what the ledger charges is counted: not times of messages, not network addresses, not what is known already.",
)
"""What no ε covers, a sentence each; a statement's own list says what this run leaves out beside that."""
NOT_COVERED_IN_SHORT = (
    "observers that pool what they see, what an observer knows already, what the data of similar people say, and δ"
)


class EpsilonMeaning(NamedTuple):
    """What an ε means for the person it is about: numbers, and the same in words."""

    odds: float
    """The factor by which an observer's odds about the person may move at most: e^ε, up to δ."""
    found: float
    """The largest share of true positives that any attack reaches at 1 % false positives."""
    cells: tuple[str, str]
    """The two numbers, for cells of a table."""
    short: str
    """Both in a few words."""
    sentence: str
    """For a terminal or a page."""


def epsilon_meaning(value: float | str, delta: float = 0.0, about: str = "one person") -> EpsilonMeaning:
    """What (ε, δ) means: how far an observer's odds move, and what that allows an attacker at best.

    An attacker sees what was released and decides between two data sets that differ in one person's data, or in what
    `about` says. At a false positive rate f its true positive rate is at most min(e^ε · f + δ, 1 − e^−ε (1 − δ − f)),
    whatever else it knows.

    >>> epsilon_meaning(1.0, 1e-5).short
    'odds × 2.72, finds 2.72 %'
    >>> epsilon_meaning(0.5).sentence.partition(";")[0]
    "ε = 0.5: an observer's odds about one person move by a factor of at most 1.65"
    >>> epsilon_meaning("inf").short, epsilon_meaning(0.0).short
    ('no bound', 'learns nothing')
    >>> round(epsilon_meaning(7.96, 1e-5).found, 4)
    0.9997
    """
    number, found = float(value), Allowed(float(value), delta).rate(FALSE_POSITIVES)
    odds = math.exp(number) if number <= 700 else math.inf
    if math.isinf(number):
        no_bound = f"ε = ∞: nothing bounds what an observer learns about {about}; an attack may find everybody."
        return EpsilonMeaning(math.inf, 1.0, ("∞", "all"), "no bound", no_bound)
    if number == 0 and delta == 0:
        nothing = f"ε = 0: nothing that an observer sees depends on {about}."
        return EpsilonMeaning(1.0, found, ("1", "1.00 %"), "learns nothing", nothing)
    slack = f", up to δ = {delta:g}" if delta else ""
    share = "all" if found > 0.99995 else f"{100 * found:.2f} %"
    most = "an attack may find nearly all" if share == "all" else f"no attack finds more than {share}"
    sentence = (
        f"ε = {epsilon(number)}: an observer's odds about {about} move by a factor of at most {_factor(number)}{slack};"
        f" at 1 % false positives {most} of those it is after."
    )
    if found > 0.5:
        sentence += " This bound alone rules out little; an audit measures what known attacks find."
    factor = _factor(number)
    return EpsilonMeaning(odds, found, (factor, share), f"odds × {factor}, finds {share}", sentence)


def epsilon_meanings(values: Mapping[str, float | str], delta: float) -> list[str]:
    """What the ε against each observer means, a sentence for all observers that it is the same for.

    >>> [line.partition(";")[0] for line in epsilon_meanings({"server": "inf", "clients": 0.5, "public": 0.5}, 0.0)]
    ['against server: ε = ∞: nothing bounds what an observer learns about one person', "against clients, public: ε = \
0.5: an observer's odds about one person move by a factor of at most 1.65"]
    """
    told: dict[float, list[str]] = {}
    for who, value in values.items():
        told.setdefault(float(value), []).append(who)
    return [
        f"against {', '.join(who)}: {epsilon_meaning(value, delta if value else 0.0).sentence}"
        for value, who in told.items()
    ]


def _factor(number: float) -> str:
    """e^ε; a large one is rounded up to a power of ten.

    >>> _factor(0.5), _factor(7.96), _factor(56.9), _factor(5000.0)
    ('1.65', '2,864', '10^25', '10^2,172')
    """
    return f"10^{math.ceil(number / math.log(10)):,}" if number > 13.8 else epsilon(math.exp(number))


def metric_name(metric: str) -> str:
    """A metric as papers write it.

    >>> metric_name("ndcg@10"), metric_name("full/hr@10"), metric_name("precision@5")
    ('NDCG@10', 'full HR@10', 'Precision@5')
    """
    named = {**QUANTITIES, **ATTACKS, **VIEW_ATTACK, "skew": "τ"}
    if metric in named:
        return named[metric]
    prefix, slash, name = metric.rpartition("/")
    word, at, k = name.partition("@")
    word = word.upper() if word in ("hr", "ndcg", "mrr", "auc", "map") else word.capitalize()
    return f"{prefix} {word}{at}{k}" if slash else f"{word}{at}{k}"


def number(value: float | None, scale: float = 1.0) -> str:
    """A metric, on the paper's scale, with four digits behind the point of one.

    >>> number(0.71625, 100), number(0.1681), number(None)
    ('71.62', '0.1681', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    return f"{value * scale:.{max(0, 4 - round(math.log10(scale)))}f}"


def figure(metric: str, value: float | str | None, scale: float = 1.0) -> str:
    """A metric or a quantity of a run.

    >>> figure("hr@10", 0.71625, 100), figure("parameters", 53857), figure("epochs", 61.5), figure("epsilon", "inf")
    ('71.62', '53,857', '61.5', '∞')
    >>> figure("seconds", 13585), figure("seconds", 23.54), figure("epochs", 61.0), figure("seconds", None)
    ('13,585', '23.5', '61', '–')
    >>> figure("seconds_per_round", 0.03125), figure("seconds_per_round", 12.5), figure("people", 6040.0)
    ('0.0312', '12.5', '6,040')
    >>> figure("noise_scale", 0.57432), figure("count", 230117.0)
    ('0.574', '230,117')
    """
    if metric not in QUANTITIES or value is None:
        return number(None if value is None else float(value), scale)
    if metric.startswith("epsilon"):
        return epsilon(value)
    if metric in ("seconds_per_round", "noise_scale"):
        return f"{float(value):.3g}"
    whole = (
        metric in ("parameters", "people", "count")
        or metric.startswith("bytes")
        or (metric == "seconds" and float(value) >= 100)
        or float(value) >= 1000
    )
    text = f"{float(value):,.{0 if whole else 1}f}"
    return text if metric == "seconds" else text.removesuffix(".0")


def spread(figures: Mapping[str, Any] | None, scale: float = 1.0, metric: str = "") -> str:
    """Mean and deviation over seeds, and an interval where there is one; a quantity that no seed changes has none.

    >>> spread({"mean": 0.729, "sd": 0.0012}, 100), spread({"mean": 0.5, "sd": None}), spread(None)
    ('72.90 ± 0.12', '0.5000', '–')
    >>> spread({"mean": 61.0, "sd": 4.25}, metric="epochs"), spread({"mean": 33.0, "sd": 0.0}, metric="parameters")
    ('61 ± 4.2', '33')
    >>> spread({"mean": 0.531, "sd": None, "interval": [0.512, 0.55]}, metric="lira/auc")
    '0.5310 [0.5120, 0.5500]'
    """
    if figures is None:
        return "–"
    mean = figure(metric, figures["mean"], scale)
    if figures["sd"] is not None and (figures["sd"] or metric not in QUANTITIES):
        mean = f"{mean} ± {figure(metric, figures['sd'], scale)}"
    ends = [figure(metric, end, scale) for end in figures.get("interval") or ()]
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def percent(part: float | None, sd: float | None = None) -> str:
    """A relative change and its deviation, in percent; a change above 100 % is printed without decimals.

    >>> percent(0.0993), percent(-0.2, 0.0125), percent(3.614, 0.099), percent(None)
    ('+9.93 %', '−20.00 % ± 1.25', '+361 % ± 10', '–')
    """
    if part is None:
        return "–"
    digits = 2 if abs(part) < 1 else 0
    text = f"{abs(100 * part):.{digits}f}"
    sign = "" if not float(text) else "+" if part > 0 else MINUS
    return f"{sign}{text} %" + ("" if sd is None else f" ± {100 * sd:.{digits}f}")


def points(difference: float | None) -> str:
    """A difference in hundredths, with its sign.

    >>> points(1.284), points(-0.5), points(-0.001)
    ('+1.28', '−0.50', '0.00')
    """
    if difference is None:
        return "–"
    text = f"{abs(difference):.2f}"
    return text if text == "0.00" else f"{'+' if difference > 0 else MINUS}{text}"


def measured(metrics: Mapping[str, float], errors: Mapping[str, float]) -> str:
    """Metrics in a line, each with the standard error of the noise in it, where there is any.

    >>> measured({"hr@10": 0.25, "ndcg@10": 0.0}, {"hr@10": 0.0854, "ndcg@10": 0.08})
    'hr@10 0.2500 ± 0.0854, ndcg@10 0.0000 ± 0.0800'
    >>> measured({"hr@10": 0.25}, {})
    'hr@10 0.2500'
    """
    return ", ".join(f"{name} {with_error(value, errors.get(name))}" for name, value in metrics.items())


def with_error(value: float, error: float | None) -> str:
    """A metric and its standard error."""
    return f"{float(value):.4f}" if error is None else f"{float(value):.4f} ± {float(error):.4f}"


def epsilon(value: float | str) -> str:
    """ε for people.

    >>> epsilon("inf"), epsilon(2.446), epsilon(4512.3)
    ('∞', '2.45', '4,512')
    """
    number = float(value)
    return "∞" if number == math.inf else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def behind_proxy(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """A footnote, where the ε of any of these runs counts on a shuffle.

    >>> run = {"method": "fmf-ldp", "reports": {"total": 5000.0, "sealed_bytes": 5337}}
    >>> behind_proxy([run, {"method": "fedmf", "reports": None}])
    ['ε of fmf-ldp holds behind a proxy that does not collude with the observer; by addition it is 5,000']
    """
    totals: dict[str, list[float]] = {}
    for result in results:
        reports = result.get("reports")
        if reports and "sealed_bytes" in reports:
            totals.setdefault(str(result["method"]).rpartition(":")[2], []).append(reports["total"])
    if not totals:
        return []
    added = {name: " to ".join(dict.fromkeys(map(epsilon, (min(of), max(of))))) for name, of in totals.items()}
    alike = len(set(added.values())) == 1
    sums = next(iter(added.values())) if alike else ", ".join(f"{value} ({name})" for name, value in added.items())
    whose = f"ε of {', '.join(totals)}"
    return [f"{whose} holds behind a proxy that does not collude with the observer; by addition it is {sums}"]


def kilobytes(count: float) -> str:
    """
    >>> kilobytes(56_445), kilobytes(24), kilobytes(0)
    ('56.4', '0.024', '0.0')
    """
    return f"{count / 1000:.3f}" if 0 < count < 50 else f"{count / 1000:,.1f}"


def duration(seconds: float) -> str:
    """
    >>> duration(4.21), duration(75), duration(7384)
    ('4.2 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
