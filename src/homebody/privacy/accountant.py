"""ε from events: every valid bound is derived, and the tightest is reported with the accountant that gave it.

| accountant | what it covers |
|---|---|
| `basic` | anything: ε and δ of every release add up; the only one at δ = 0 |
| `optimal` | one (ε, δ)-DP mechanism many times: Kairouz, Oh and Viswanath, exactly |
| `analytic` | Gaussian noise without sampling, exactly (Balle and Wang); one sampled Gaussian release |
| `closed-form shuffle` | shuffles alone, within the condition of their theorem |
| `rdp` | Rényi divergences of `dp-accounting`: all but shuffles |
| `pld` | privacy loss distributions of `dp-accounting`: all but Gaussian noise on fixed cohorts, and Skellam noise |
| `by parts` | what has no PLD beside something else: each part by its best bound, with a share of δ |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Literal, get_args

import numpy as np

from homebody.errors import HomebodyError
from homebody.privacy.events import Event, NonPrivate, Relation
from homebody.privacy.mechanisms import (
    GaussianTerm,
    LaplaceTerm,
    PureTerm,
    ShuffledTerm,
    SkellamTerm,
    Term,
    Terms,
    amplified,
    composed_pld,
    pld_epsilon,
    rdp,
    rdp_orders,
    shuffle_spread,
    terms,
)
from homebody.privacy.shuffle import closed_form

__all__ = ["Accountant", "Bound", "epsilon", "within"]

Accountant = Literal["basic", "optimal", "analytic", "rdp", "pld", "by parts", "closed-form shuffle", "none"]
_CHEAP: tuple[Accountant, ...] = ("basic", "optimal", "analytic", "rdp")
_SAMPLER = 2.0**-64
"""Of δ, kept back for the sampler of Gaussian noise: a draw is off by under 2⁻²⁴⁰, which covers 2³⁶ draws at ε ≤ 96."""
_TABLE = 2.0**-48
"""Of δ, kept back for the sampler of Skellam noise: a draw is off by under 2⁻¹⁰⁷, which covers 2³⁶ draws at ε ≤ 15."""
_SMALLEST = 1e-11
"""A PLD is composed by Fourier transforms, whose rounding may reach this: no smaller δ is read off it."""


@dataclass(frozen=True)
class Bound:
    """A certified ε, and what it rests on."""

    epsilon: float
    delta: float
    relation: Relation
    accountant: Accountant
    """The accountant that gave the bound; `none`: nothing was released, or nothing bounds it."""
    bounds: dict[Accountant, float] = field(default_factory=dict)
    """Every bound that was derived, by accountant. All of them hold."""
    notes: tuple[str, ...] = ()
    """What the bound assumes, and what it leaves uncounted."""


def epsilon(
    events: Iterable[tuple[Event, int]], delta: float, *, group: int = 1, only: tuple[Accountant, ...] | None = None
) -> Bound:
    """The smallest certified ε at this δ for everything released, each event with how many times it happened.

    group: how many units change together, for instance the interactions of one person; their order of release does
    not matter. only: leave the other accountants out.

    >>> from homebody.privacy import GaussianRelease, Sampling
    >>> event = GaussianRelease(1, "replace-one", Sampling("fixed", cohort=30, population=4800))
    >>> bound = epsilon([(event, 1000)], delta=1e-6)
    >>> round(bound.epsilon, 3), bound.accountant
    (2.446, 'rdp')
    >>> epsilon([(event, 1000), (NonPrivate("item vectors without noise"), 1)], delta=1e-6).epsilon
    inf
    """
    counted = _counted(events)
    _check(delta, group)
    notes: set[str] = set()
    relation: Relation = "add-remove"
    if not counted or any(event.relation == "replace-one" for event in counted):
        relation = "replace-one"
    if not counted:
        return Bound(0.0, delta, relation, "none", {}, ("Nothing was released.",))
    reasons = {event.reason for event in counted if isinstance(event, NonPrivate)}
    if reasons:
        return Bound(math.inf, delta, relation, "none", {}, tuple(f"Not private: {why}." for why in sorted(reasons)))
    ran = terms(counted.items(), relation, notes)
    left = delta
    for kind, kept in ((GaussianTerm, _SAMPLER), (SkellamTerm, _TABLE)):
        left = max(0.0, left - kept) if any(isinstance(term, kind) for term in ran) else left
    bounds = _of_group(ran, left, group, only) if group > 1 else _all(ran, left, only)
    if group > 1:
        notes.add(f"For {group} units that change together.")
    smallest = min(bounds.values(), default=math.inf)
    if math.isinf(smallest):
        notes.add("No accountant bounds this at this δ.")
        return Bound(smallest, delta, relation, "none", bounds, tuple(sorted(notes)))
    # Of those that differ by rounding alone, the simplest.
    best = next(name for name, value in bounds.items() if value <= smallest * (1 + 1e-6))
    return Bound(bounds[best], delta, relation, best, bounds, tuple(sorted(notes)))


def within(events: Iterable[tuple[Event, int]], target: float, delta: float) -> bool:
    """Whether everything together stays within ε = target. The cheap accountants go first, for loops that ask often.

    >>> from homebody.privacy import GaussianRelease, Sampling
    >>> event = GaussianRelease(1, "replace-one", Sampling("fixed", cohort=30, population=4800))
    >>> within([(event, 1000)], 2.5, 1e-6), within([(event, 1100)], 2.5, 1e-6)
    (True, False)
    """
    counted = list(events)
    return any(epsilon(counted, delta, only=accountants).epsilon <= target for accountants in (_CHEAP, None))


def _counted(events: Iterable[tuple[Event, int]]) -> dict[Event, int]:
    counted: dict[Event, int] = {}
    for event, count in events:
        if type(count) is not int or count < 1:
            raise HomebodyError(f"An event happens a whole number of times from 1, not {count!r}.")
        counted[event] = counted.get(event, 0) + count
    return counted


def _check(delta: float, group: int) -> None:
    if not 0 <= delta < 1:
        raise HomebodyError(f"δ must be at least 0 and under 1, not {delta}.")
    if group < 1:
        raise HomebodyError(f"A group has at least 1 member, not {group}.")


def _all(ran: Terms, delta: float, only: tuple[Accountant, ...] | None = None) -> dict[Accountant, float]:
    """Every bound that applies, by accountant."""
    derive: dict[Accountant, Callable[[Terms, float], float | None]] = {
        "basic": _basic,
        "optimal": _optimal,
        "analytic": _analytic,
        "closed-form shuffle": _closed_form,
        "rdp": _rdp,
        "pld": _pld,
        "by parts": partial(_parts, only=only),
    }
    figures = {name: rule(ran, delta) for name, rule in derive.items() if only is None or name in only}
    return {name: value for name, value in figures.items() if value is not None and not math.isnan(value)}


def _basic(ran: Terms, delta: float) -> float | None:
    """ε and δ add up; what has no δ of its own shares evenly what the others leave."""
    if any(isinstance(term, SkellamTerm) for term in ran):
        return None
    failed = sum(count * term.delta for term, count in ran.items() if isinstance(term, PureTerm))
    normal = sum(count for term, count in ran.items() if isinstance(term, GaussianTerm))
    if failed > delta * (1 + 1e-12) or (normal and failed >= delta):
        return None
    spent = 0.0
    for term, count in ran.items():
        assert not isinstance(term, SkellamTerm)
        each = _alone(term, (delta - failed) / normal) if isinstance(term, GaussianTerm) else term.epsilon
        spent += count * each
    return spent


def _optimal(ran: Terms, delta: float) -> float | None:
    """The exact ε of one (ε₀, δ₀)-DP mechanism, k times: Kairouz, Oh and Viswanath 2015, Theorem 3.3.

    Its worst case answers k times truly with probability e^ε₀/(1+e^ε₀); j lies make the loss (k − 2j)ε₀.
    """
    (term, count), *others = ran.items()
    if others or delta == 0 or not isinstance(term, PureTerm):
        return None
    left = delta if term.delta == 0 else _left(delta, term.delta, count)
    if left <= 0:
        return None
    from scipy import special, stats

    lies = np.arange(count + 1)
    losses = (count - 2 * lies) * term.epsilon
    log_mass = stats.binom.logpmf(lies, count, special.expit(-term.epsilon))

    def fails(total: float) -> float:
        over = losses > total
        return float(np.sum(-np.expm1(total - losses[over]) * np.exp(log_mass[over])))

    low, high = 0.0, count * term.epsilon
    if fails(low) <= left:
        return 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fails(middle) <= left else (middle, high)
    return high


def _left(delta: float, each: float, count: int) -> float:
    """What is left of δ for the others where each of `count` mechanisms fails outright with probability `each`."""
    log_kept = -math.inf if each >= 1 else count * math.log1p(-each)
    log_wanted = math.log1p(-delta)
    return -math.expm1(log_wanted - log_kept) if log_wanted < log_kept else 0.0


def _analytic(ran: Terms, delta: float) -> float | None:
    """Balle and Wang 2018. Gaussians compose to one Gaussian: the squares of their 1/multiplier add up."""
    if delta == 0:
        return None
    precision = 0.0
    for term, count in ran.items():
        if not isinstance(term, GaussianTerm):
            return None
        if term.sampling.amplifies:
            return _alone(term, delta) if sum(ran.values()) == 1 else None
        precision += count / term.multiplier**2
    return _alone(GaussianTerm(1 / math.sqrt(precision)), delta)


def _alone(term: GaussianTerm, delta: float) -> float:
    """One Gaussian release, exactly; one of a sample by Balle, Barthe and Gaboardi 2018."""
    from dp_accounting import get_epsilon_gaussian

    rate = term.sampling.rate if term.sampling.amplifies else 1.0
    with np.errstate(divide="ignore"):  # noise so large that the logarithm of its δ is -∞
        return amplified(float(get_epsilon_gaussian(term.multiplier, min(delta / rate, 1.0))), rate)


def _rdp(ran: Terms, delta: float) -> float | None:
    failed = sum(count * term.delta for term, count in ran.items() if isinstance(term, PureTerm))
    if delta - failed <= 0:
        return None
    total = np.zeros(len(rdp_orders()))
    for term, count in ran.items():
        curve = rdp(term)
        if curve is None:
            return None
        total = total + count * curve
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    return float(compute_epsilon(rdp_orders(), total, delta - failed)[0])


def _pld(ran: Terms, delta: float) -> float | None:
    if delta < _SMALLEST:
        return None
    for term, count in ran.items():
        if isinstance(term, PureTerm) and _left(delta, term.delta, count) <= 0:
            return None
    return _kept_pld(tuple(ran.items()), delta)


@lru_cache(maxsize=4096)
def _kept_pld(ran: tuple[tuple[Term, int], ...], delta: float) -> float | None:
    """A number is kept for long: a distribution may take 8 MB, and only the last few of them are kept."""
    total = composed_pld(dict(ran), _interval(dict(ran)))
    return None if total is None else pld_epsilon(total, delta)


def _interval(ran: Terms) -> float:
    """The grid step of the privacy loss: fine, without too many steps; coarser if nothing is composed step by step."""
    reach, steps = 0.0, 2e5
    for term, count in ran.items():
        match term:
            case GaussianTerm():
                spread = term.sampling.rate * math.sqrt(count) / term.multiplier
                reach += spread * (spread / 2 + 10) + 50 / term.multiplier
                steps = 1e6 if term.sampling.amplifies else steps
            case LaplaceTerm() | PureTerm():
                reach, steps = reach + count * term.epsilon, 1e6
            case ShuffledTerm():
                mean, deviation = shuffle_spread(term)
                reach, steps = reach + term.epsilon + count * mean + 10 * math.sqrt(count) * deviation, 1e6
    return max(1e-4, 2.0 ** math.ceil(math.log2(max(reach, 1e-9) / steps)))


def _parts(ran: Terms, delta: float, only: tuple[Accountant, ...] | None = None) -> float | None:
    """Part by part, each by whatever bounds it best with its share of δ: no accountant is good at everything.

    Gaussian noise on cohorts of fixed size and Skellam noise have no PLD, and shuffles no Rényi divergence. What has
    both is bounded beside the one or beside the other: all of it, or Gaussian noise beside the one and the rest beside
    the other.
    """
    sampled: Terms = {
        term: n
        for term, n in ran.items()
        if isinstance(term, SkellamTerm) or (isinstance(term, GaussianTerm) and term.sampling.kind == "fixed")
    }
    if not sampled or len(ran) == 1:
        return None
    gaussian: Terms = {term: n for term, n in ran.items() if isinstance(term, GaussianTerm | SkellamTerm)}
    divergent: Terms = {term: n for term, n in ran.items() if not isinstance(term, ShuffledTerm)}
    ways = [[part, {term: n for term, n in ran.items() if term not in part}] for part in (sampled, gaussian, divergent)]
    ways.append([*({term: n} for term, n in sampled.items()), ways[0][1]])
    ways.append([{term: n} for term, n in ran.items()])
    return min(
        sum(_best(tuple(part.items()), delta * share, only) for part, share in zip(parts, shares, strict=True))
        for parts in ([part for part in way if part] for way in ways)
        if len(parts) > 1
        for shares in _shares(len(parts))
    )


@lru_cache(maxsize=256)
def _best(part: tuple[tuple[Term, int], ...], delta: float, only: tuple[Accountant, ...] | None) -> float:
    """The smallest bound of a part. It is kept: of most parts nothing is added in a round."""
    rules = tuple(name for name in only or get_args(Accountant) if name != "by parts")
    return min(_all(dict(part), delta, rules).values(), default=math.inf)


def _shares(parts: int) -> list[tuple[float, ...]]:
    """Ways to share δ: evenly; among few parts, also half or a quarter for one of them.

    >>> _shares(2)
    [(0.5, 0.5), (0.25, 0.75), (0.75, 0.25)]
    """
    shares: list[tuple[float, ...]] = [(1 / parts,) * parts]
    if parts == 2:
        shares += [(0.25, 0.75), (0.75, 0.25)]
    if parts == 3:
        shares += [(0.5, 0.25, 0.25), (0.25, 0.5, 0.25), (0.25, 0.25, 0.5)]
    return shares


def _closed_form(ran: Terms, delta: float) -> float | None:
    """Shuffles alone, each by its closed form with half of δ between them, then composed with the other half."""
    if delta == 0 or not all(isinstance(term, ShuffledTerm) for term in ran):
        return None
    shuffles = sum(ran.values())
    if shuffles == 1:
        ((term, _),) = ran.items()
        assert isinstance(term, ShuffledTerm)
        return closed_form(term.epsilon, term.users, delta)
    each = delta / (2 * shuffles)
    known: Terms = {}
    for term, count in ran.items():
        assert isinstance(term, ShuffledTerm)
        after = closed_form(term.epsilon, term.users, each)
        if after is None:
            return None
        _add(known, PureTerm(after, each), count)
    return min(_all(known, delta, ("basic", "optimal", "rdp")).values())


def _of_group(
    ran: Terms, delta: float, group: int, only: tuple[Accountant, ...] | None = None
) -> dict[Accountant, float]:
    """Several units at once. Exact where sensitivities scale; otherwise (ε, δ′) for one is (gε, δ′ Σ e^jε) for g."""
    scaled: Terms = {}
    for term, count in ran.items():
        match term:
            case GaussianTerm() if not term.sampling.amplifies:
                _add(scaled, GaussianTerm(term.multiplier / group), count)
            case SkellamTerm() if not term.sampling.amplifies:
                _add(scaled, SkellamTerm(term.multiplier / group, group * term.steps, term.entries), count)
            case LaplaceTerm(rate=1.0):
                _add(scaled, LaplaceTerm(term.multiplier / group), count)
            case PureTerm(delta=0.0):
                _add(scaled, PureTerm(term.epsilon * group), count)
            case _:
                return _by_steps(ran, delta, group, only)
    return _all(scaled, delta, only)


def _add(ran: Terms, term: Term, count: int) -> None:
    """Add to a term's count; different terms can become the same."""
    ran[term] = ran.get(term, 0) + count


def _by_steps(ran: Terms, delta: float, group: int, only: tuple[Accountant, ...] | None) -> dict[Accountant, float]:
    best: dict[Accountant, float] = {}
    # How much smaller δ′ must be is not known beforehand: try, and keep what fits.
    for smaller in [delta * 10.0**-exponent for exponent in np.arange(0, 14, 0.25)] if delta else [0.0]:
        for name, epsilon in _all(ran, smaller, only).items():
            growth = math.exp(min(epsilon * (group - 1), 700)) * group if epsilon else group
            if epsilon > 0 and epsilon * group < 700:
                growth = math.expm1(group * epsilon) / math.expm1(epsilon)
            if smaller * growth <= delta:
                best[name] = min(best.get(name, math.inf), group * epsilon)
    return best
