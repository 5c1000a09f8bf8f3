"""What each mechanism costs, as the two accountants of `dp-accounting` see it.

An event becomes terms: the few mechanisms that everything here is made of. A term gives its Rényi divergences (RDP)
and its privacy loss distribution (PLD), and both are kept, since the loop asks after every round. `dp-accounting` is
imported when a bound is first asked for: it takes a second.

Two of its traps are avoided by never going near them. A multiplier here is always relative to the sensitivity under
the event's own relation, so a PLD is always built as if for add/remove, which takes the multiplier as it is; under
replace-one it would double the sensitivity again. And terms compose by `self_compose`, never by
`PLDAccountant.compose(RandomizedResponseDpEvent(…), count)`, which forgets its count.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from homebody.privacy.events import (
    Event,
    GaussianRelease,
    HelpedRelease,
    LaplaceRelease,
    NonPrivate,
    PureRelease,
    Relation,
    Reports,
    Sampling,
    ShuffledReports,
    SkellamRelease,
)
from homebody.privacy.shuffle import clone_losses, split_on_grid

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "GaussianTerm",
    "LaplaceTerm",
    "PureTerm",
    "ShuffledTerm",
    "SkellamTerm",
    "Term",
    "Terms",
    "amplified",
    "composed_pld",
    "pld_epsilon",
    "rdp",
    "rdp_orders",
    "shuffle_spread",
    "terms",
]

EVERYONE = Sampling()
_DISCRETE = 1 + 2.0**-22
"""Discrete Laplace noise of multiplier m on a grid of step g and scale t steps is, by its privacy losses, no worse than
continuous noise of multiplier m / (1 + 1/4t), and t is at least 2²⁰ (`homebody.privacy.grid`). Alone it is as good."""
BETWEEN_PARTIES = (
    "Skellam noise is added by the parties of a round between them. It holds if as many of them answer as must "
    "(least), no more than stated collude with the observer (colluding), and the roster of parties comes from somebody "
    "else than the observer."
)
_EXACT = 256
"""Up to this order `dp-accounting` bounds what a sample of fixed size tells by differences; above, more coarsely."""
HIDES_NOTHING = 30.0
"""Above this ε a report has a clone with probability under 1e-13: its shuffle is not counted."""


@dataclass(frozen=True)
class GaussianTerm:
    """Noise of `multiplier` × the sensitivity; sampled only where the accountants know how."""

    multiplier: float
    sampling: Sampling = EVERYONE


@dataclass(frozen=True)
class LaplaceTerm:
    """Noise of scale `multiplier` × the ℓ1 sensitivity, each unit taking part with probability `rate`."""

    multiplier: float
    rate: float = 1.0

    @property
    def epsilon(self) -> float:
        return amplified(1 / self.multiplier, self.rate)


@dataclass(frozen=True)
class SkellamTerm:
    """Whole numbers of ℓ2 sensitivity `steps`, with noise of `multiplier` × that; `entries` of them, 0: any number."""

    multiplier: float
    steps: int
    entries: int = 0
    sampling: Sampling = EVERYONE


@dataclass(frozen=True)
class PureTerm:
    """Any mechanism that is (ε, δ)-DP."""

    epsilon: float
    delta: float = 0.0


@dataclass(frozen=True)
class ShuffledTerm:
    """One report of ε, shuffled among `users` people who each sent one."""

    epsilon: float
    users: int


Term = GaussianTerm | LaplaceTerm | SkellamTerm | PureTerm | ShuffledTerm
Terms = dict[Term, int]


def terms(events: Iterable[tuple[Event, int]], relation: Relation, notes: set[str]) -> Terms:
    """The mechanisms behind the events and how often each ran, under a relation that all of them can be stated in.

    Assumptions and losses are added to the notes.
    """
    counts: Terms = {}
    for event, count in events:
        if isinstance(event, NonPrivate):
            raise TypeError("what is not private has no terms")
        term, times = _term(event, notes)
        if event.relation != relation:
            notes.add(
                "Events under add-remove count twice, as one removal and one addition, to compose with replace-one."
            )
            term = _twice(term)
        counts[term] = counts.get(term, 0) + times * count
    return counts


def _term(event: Event, notes: set[str]) -> tuple[Term, int]:
    sampling, rate = _usable(event, notes)
    match event:
        case GaussianRelease():
            return GaussianTerm(event.multiplier, sampling), 1
        case HelpedRelease():
            notes.add(
                "Gaussian noise is added by a helper. It holds against the server while server and helper do not "
                "collude."
            )
            return GaussianTerm(event.multiplier, sampling), 1
        case LaplaceRelease() if sampling.kind == "fixed":
            return PureTerm(amplified(1 / event.multiplier, rate)), 1
        case LaplaceRelease():
            return LaplaceTerm(event.multiplier, rate), 1
        case SkellamRelease():
            notes.add(BETWEEN_PARTIES)
            return SkellamTerm(event.multiplier, event.steps, event.entries, sampling), 1
        case PureRelease():
            return PureTerm(amplified(event.epsilon, rate), rate * event.delta), 1
        case Reports() if sampling.amplifies:
            return PureTerm(amplified(event.epsilon * event.count, rate)), 1
        case Reports():
            return PureTerm(event.epsilon), event.count
        case ShuffledReports():
            notes.add(
                "Shuffling amplifies only behind a proxy that does not collude with the observer, and only if all "
                "the people it counts reported as they should."
            )
            if event.epsilon > HIDES_NOTHING:
                return PureTerm(event.epsilon), event.count
            return ShuffledTerm(event.epsilon, event.users), event.count
        case _:
            raise TypeError(f"there is no mechanism behind {event!r}")


def _usable(event: Event, notes: set[str]) -> tuple[Sampling, float]:
    """The sampling that a theorem covers: Poisson under add/remove, and a fixed size under replace-one.

    Poisson under replace-one would need to know how far one person alone moves the release, which the multiplier
    does not say. Leaving the amplification out is valid: what is not in the cohort tells nothing.
    """
    sampling = event.sampling
    if not sampling.amplifies:
        return EVERYONE, 1.0
    if sampling.kind == "poisson" and event.relation == "replace-one":
        notes.add("Poisson sampling is not counted under replace-one; state the noise under add-remove to count it.")
        return EVERYONE, 1.0
    if sampling.kind == "poisson" and isinstance(event, SkellamRelease):
        notes.add("Poisson sampling is not counted for Skellam noise: no theorem is at hand here.")
        return EVERYONE, 1.0
    notes.add("Sampling amplifies only against an observer who does not learn who took part.")
    return sampling, sampling.rate


def _twice(term: Term) -> Term:
    """What a term under add/remove costs where one person is replaced: removed, and another added."""
    match term:
        case GaussianTerm():
            # Without the sampling, as for Poisson under replace-one above.
            return GaussianTerm(term.multiplier / 2)
        case SkellamTerm():
            return SkellamTerm(term.multiplier / 2, 2 * term.steps, term.entries)
        case LaplaceTerm(rate=1.0):
            return LaplaceTerm(term.multiplier / 2)
        case LaplaceTerm():
            return PureTerm(2 * term.epsilon)
        case PureTerm():
            growth = 1 + math.exp(min(term.epsilon, 700.0))
            return PureTerm(2 * term.epsilon, min(1.0, term.delta * growth))
        case ShuffledTerm():
            raise TypeError("shuffled reports are always under replace-one")


def amplified(epsilon: float, rate: float) -> float:
    """ε of a release of which each unit is a part with probability `rate`: log(1 + rate (e^ε − 1)).

    >>> round(amplified(1.0, 0.01), 4)
    0.017
    """
    if rate == 1:
        return epsilon
    # The same, without e^ε where it would overflow.
    return min(epsilon, math.log1p(rate * math.expm1(epsilon)) if epsilon < 700 else epsilon + math.log(rate) + 1e-9)


@lru_cache(maxsize=256)
def rdp(term: Term) -> NDArray[np.float64] | None:
    """The Rényi divergence at each order; nothing where no theorem gives it.

    It is a logarithm divided by order − 1, and may be off by the rounding of that. Where it is so small that nothing
    else is left, it may even be negative, which `dp-accounting` takes for ε = 0: so that much is added.
    """
    curve, orders = _rdp(term), rdp_orders()
    return None if curve is None else np.maximum(curve, 0.0) + 1e-14 * (1 + 1 / (orders - 1))


def _rdp(term: Term) -> NDArray[np.float64] | None:
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    orders = rdp_orders()
    match term:
        case GaussianTerm(sampling=Sampling(kind="none")):
            event = dp.GaussianDpEvent(term.multiplier)
        case GaussianTerm(sampling=Sampling(kind="poisson")):
            event = dp.PoissonSampledDpEvent(term.sampling.rate, dp.GaussianDpEvent(term.multiplier))
        case GaussianTerm():
            with _quiet():
                return _rdp_of_sampled_gaussian(term, orders)
        case LaplaceTerm(rate=1.0):
            event = dp.LaplaceDpEvent(term.multiplier / _DISCRETE)
        case LaplaceTerm() | PureTerm():
            return _rdp_of_pure(term.epsilon, orders)
        case SkellamTerm():
            return _rdp_of_skellam(term, orders)
        case ShuffledTerm():
            return None
    with _quiet():
        accountant = RdpAccountant(orders, dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
        curve: NDArray[np.float64] = accountant.compose(event).rdp
    return curve


@contextmanager
def _quiet() -> Iterator[None]:
    """Say nothing of orders at which a series does not converge: they count as ∞, and others are there."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(over="ignore"):
            yield
    finally:
        logger.setLevel(before)


def _rdp_of_sampled_gaussian(term: GaussianTerm, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """What `dp-accounting` gives for a cohort of fixed size, to the last digit, in a fifth of the time.

    Wang, Balle and Kasiviswanathan 2019, Theorem 27, at whole orders; in between, the moments are interpolated. The
    differences of a function of the noise are the same for all orders: `dp-accounting` works them out for each anew,
    and adds up one term at a time.
    """
    from dp_accounting.rdp.rdp_privacy_accountant import _get_forward_diffs
    from scipy.special import gammaln

    doubled = 2.0 * term.multiplier**2
    log_rate, log_2, log_4 = np.log(term.sampling.cohort / term.sampling.population), np.log(2), np.log(4)
    factorials = gammaln(np.arange(int(orders.max()) + 2))  # of n − 1, at n
    i = np.arange(2, int(orders.max()) + 1)
    plain = log_2 + (i - 1) * 1.0 * i / doubled
    differences, _ = _get_forward_diffs(lambda x: x * 1.0 * (x + 1) / doubled, _EXACT)
    few = i[: _EXACT - 1]
    fine = log_4 + 0.5 * (differences[few // 2 * 2 - 1] + differences[(few + 1) // 2 * 2 - 1])
    fine = np.minimum(fine, plain[: _EXACT - 1])
    second = 2.0 / doubled
    first = np.minimum(log_4 + second + math.log1p(-np.exp(-second)), second + log_2)

    @cache
    def log_moment(order: int) -> float:
        if order == 1:
            return 0.0
        j = i[: order - 1]
        chosen = factorials[order + 1] - factorials[j + 1] - factorials[order - j + 1]
        if order <= _EXACT:
            logs = fine[: order - 1] + (j * log_rate + chosen)
        else:
            logs = plain[: order - 1] + j * log_rate + chosen
        logs[0] = 2 * log_rate + chosen[0] + first
        return float(np.logaddexp.reduce(logs, initial=0.0))

    def divergence(order: float) -> float:
        below, above = math.floor(order), math.ceil(order)
        if below == above:
            return log_moment(below) / (order - 1)
        part = order - below
        return ((1 - part) * log_moment(below) + part * log_moment(above)) / (order - 1)

    return np.array([divergence(order) for order in orders.tolist()])


def _rdp_of_pure(epsilon: float, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every ε-DP mechanism is computed from binary randomised response: its divergence bounds theirs."""
    log_true, log_false = -np.log1p(np.exp(-epsilon)), -epsilon - np.log1p(np.exp(-epsilon))
    first = orders * log_true + (1 - orders) * log_false
    second = orders * log_false + (1 - orders) * log_true
    return np.minimum(np.logaddexp(first, second) / (orders - 1), epsilon)


def _rdp_of_skellam(term: SkellamTerm, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """At whole orders; at one between two of them, the larger's, since divergences grow with the order."""
    above = np.maximum(np.ceil(orders), 2).astype(np.int64)
    curve = skellam_rdp(term.multiplier, term.steps, term.entries, np.arange(2, above.max() + 1))
    if not term.sampling.amplifies:
        return curve[above - 2]
    return np.array([sampled_rdp(curve, term.sampling.rate, int(order)) for order in above])


def skellam_rdp(multiplier: float, steps: int, entries: int, orders: NDArray[Any]) -> NDArray[np.float64]:
    """Agarwal, Kairouz and Liu 2021, "The Skellam Mechanism for Differentially Private Federated Learning": at whole
    orders from 2, Δ₂ the ℓ2 sensitivity, Δ₁ the ℓ1 sensitivity, μ the variance,

        αΔ₂²/2μ + min(((2α − 1)Δ₂² + 6Δ₁)/4μ², 3Δ₁/2μ).

    In whole numbers Δ₁ is at most Δ₂², and at most √entries × Δ₂.
    """
    moved = float(steps)
    variance = (multiplier * moved) ** 2
    absolute = min(moved**2, math.sqrt(entries) * moved) if entries else moved**2
    fine = ((2 * orders - 1) * moved**2 + 6 * absolute) / (4 * variance**2)
    return orders * moved**2 / (2 * variance) + np.minimum(fine, 3 * absolute / (2 * variance))


def sampled_rdp(curve: NDArray[np.float64], rate: float, order: int) -> float:
    """The divergence of a release of a sample of fixed size: Wang, Balle and Kasiviswanathan 2019, Theorem 9.

    curve: that of the release itself at orders 2, 3, …; order: a whole one. The release has no ε at δ = 0.
    """
    from scipy.special import gammaln, logsumexp

    own = curve[: order - 1]
    j = np.arange(2, order + 1)
    chosen = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
    logs = j * math.log(rate) + chosen + (j - 1) * own + math.log(2)
    # 4 (e^ε(2) − 1) or 2 e^ε(2), whichever is less.
    logs[0] = min(logs[0], 2 * math.log(rate) + chosen[0] + math.log(4 * math.expm1(min(own[0], 700.0))))
    return min(float(own[-1]), float(logsumexp(np.append(logs, 0.0))) / (order - 1))


@lru_cache(maxsize=1)
def rdp_orders() -> NDArray[np.float64]:
    """The orders `dp-accounting` tries, and some above them for small ε."""
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

    return np.array([*DEFAULT_RDP_ORDERS, 2048, 4096, 16384], dtype=np.float64)


def composed_pld(ran: Terms, interval: float) -> Any:
    """The privacy loss distribution of all terms together; nothing where one has none."""
    return _composed_pld(tuple(ran.items()), interval)


@lru_cache(maxsize=4)
def _composed_pld(ran: tuple[tuple[Term, int], ...], interval: float) -> Any:
    total = None
    for term, count in ran:
        part = _repeated_pld(term, count, interval)
        if part is None:
            return None
        total = part if total is None else total.compose(part)
    return total


def pld_epsilon(total: Any, delta: float) -> float:
    """The smallest ε of a privacy loss distribution at this δ.

    It is found in logarithms. The search of `dp-accounting` needs e^−ε as a float, which has none above ε = 700.
    """
    return max(_smallest(total._pmf_remove, delta), _smallest(total._pmf_add, delta))


def _smallest(given: Any, delta: float) -> float:
    """Where Σ p (1 − e^(ε − loss)), over the losses above ε, is δ."""
    pmf = given.to_dense_pmf()
    if pmf._infinity_mass > delta:
        return math.inf
    mass = np.maximum(pmf._probs[::-1], 0.0)  # from the largest loss down
    losses = (pmf._lower_loss + np.arange(len(mass), dtype=np.float64)[::-1]) * pmf._discretization
    upper = pmf._infinity_mass + np.cumsum(mass)
    first = int(np.searchsorted(upper, delta, side="right"))
    end = first
    while end < len(mass):
        end = min(len(mass), 2 * end + 1000)  # what lies far below ε is not needed
        with np.errstate(divide="ignore"):
            lower = np.logaddexp.accumulate(np.log(mass[:end]) - losses[:end])[first:]
        epsilons = np.log(upper[first:end] - delta) - lower
        below = np.append(losses, -np.inf)[first + 1 : end + 1]
        if (held := epsilons >= below).any():
            return max(0.0, float(epsilons[np.argmax(held)]))
    return 0.0


@lru_cache(maxsize=256)
def shuffle_spread(term: ShuffledTerm) -> tuple[float, float]:
    """The mean and the standard deviation of one shuffle's privacy loss."""
    losses, masses = clone_losses(term.epsilon, term.users)
    mean = float(masses @ losses)
    return mean, math.sqrt(float(masses @ (losses - mean) ** 2))


@lru_cache(maxsize=8)
def _repeated_pld(term: Term, count: int, interval: float) -> Any:
    if isinstance(term, GaussianTerm) and not term.sampling.amplifies:
        # Gaussians compose to a Gaussian.
        return _pld(GaussianTerm(term.multiplier / math.sqrt(count)), interval)
    loss = _pld(term, interval)
    return loss if loss is None or count == 1 else loss.self_compose(count)


@lru_cache(maxsize=16)
def _pld(term: Term, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as distributions
    from dp_accounting.pld.pld_pmf import DensePLDPmf
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    match term:
        case GaussianTerm(sampling=Sampling(kind="fixed")) | SkellamTerm():
            return None
        case GaussianTerm() if not term.sampling.amplifies:
            loss = GaussianPrivacyLoss(term.multiplier)
            return _all_at_once(loss, interval, GaussianPrivacyLoss.inverse_privacy_loss)
        case GaussianTerm():
            rate = term.sampling.rate
            return distributions.from_gaussian_mechanism(
                term.multiplier, value_discretization_interval=interval, sampling_prob=rate
            )
        case LaplaceTerm(rate=1.0):
            return _laplace_pld(term.multiplier / _DISCRETE, interval)
        case LaplaceTerm():
            return distributions.from_laplace_mechanism(
                term.multiplier / _DISCRETE, value_discretization_interval=interval, sampling_prob=term.rate
            )
        case PureTerm():
            true = 1 / (1 + math.exp(-term.epsilon))
            losses, masses = np.array([term.epsilon, -term.epsilon]), np.array([true, 1 - true]) * (1 - term.delta)
            lowest, mass = split_on_grid(losses, masses, interval)
            infinity = term.delta
        case ShuffledTerm():
            lowest, mass = split_on_grid(*clone_losses(term.epsilon, term.users), interval)
            infinity = 0.0
    pmf = DensePLDPmf(interval, lowest, mass, infinity, True)
    # Both directions are alike: exchanging the two bits exchanges the two worlds.
    return distributions.PrivacyLossDistribution(pmf)


def _laplace_pld(scale: float, interval: float) -> Any:
    from dp_accounting.pld.privacy_loss_mechanism import LaplacePrivacyLoss

    def inverse(_: Any, losses: NDArray[np.float64]) -> NDArray[np.float64]:
        """Where the loss is as large: at one place between the two means, beyond them at all or at none."""
        scaled = losses * scale
        return np.where(scaled > 1, -np.inf, np.where(scaled <= -1, np.inf, 0.5 * (-1 - scaled)))

    return _all_at_once(LaplacePrivacyLoss(scale), interval, inverse)


def _all_at_once(loss: Any, interval: float, inverse: Callable[[Any, Any], Any]) -> Any:
    """What `from_gaussian_mechanism` and `from_laplace_mechanism` give, to the last digit.

    They invert each of up to a million losses in a call of its own. inverse: of all losses, in one call.
    """
    from dp_accounting.pld import privacy_loss_distribution as distributions

    def deltas(epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
        cutoff = inverse(loss, epsilon)
        delta: NDArray[np.float64] = loss.mu_upper_cdf(cutoff) - np.exp(epsilon + loss.mu_lower_log_cdf(cutoff))
        return np.clip(delta, 0, 1)

    loss.get_delta_for_epsilon = deltas
    pmf = distributions._create_pld_pmf_from_monotone_privacy_loss(
        loss, value_discretization_interval=interval, use_connect_dots=True
    )
    return distributions.PrivacyLossDistribution(pmf)
