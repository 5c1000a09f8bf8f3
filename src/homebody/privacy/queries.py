"""What one device tells of a person's interest, once: the device's half, the server's half, and the event.

A person's interest is B numbers, how well each of B public basis vectors fits them, or a vector of d numbers.

| mechanism | the device tells | noise |
|---|---|---|
| `Attention` | softmax of the B numbers, clipped to θ in ℓ2 | Laplace or Gaussian, in each |
| `Choice` | which of the B is the largest | randomised response over B |
| `Vector` | d numbers, clipped to θ in ℓ2 | Laplace or Gaussian, in each |
| `PrivUnit` | a direction in d dimensions | another direction: in the cap around it with probability p, else outside |

Two attentions are non-negative, sum up to at most 1 and have norms of at most θ. So they are at most √2·min(θ, 1) apart
in ℓ2 (`attention_l2`), and `attention_l1` apart in ℓ1, whatever the two histories: noise for that distance covers a
whole person. docs/accounting.md derives both.

`guarantee="published"` is the noise that PrivateRec prints (Liu et al., 2022). It is set for a distance of θ, by the
classical formula of the Gaussian mechanism, which holds for ε ≤ 1 alone. Its event says what that noise really costs.

Noise is exact, as everywhere: see `homebody.privacy.grid`.

`Query` is what a service asks of devices, as text: `choice:epsilon=5,interests=16`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import torch
from scipy.optimize import minimize_scalar
from scipy.special import betainc, betaincinv, betaln, log_ndtr
from torch import Tensor

from homebody import ops, settings
from homebody.errors import HomebodyError, unknown_name
from homebody.privacy.events import Event, GaussianRelease, LaplaceRelease, PureRelease
from homebody.privacy.grid import COARSEST, Grid, gaussian, laplace
from homebody.rng import Rng
from homebody.settings import setting

__all__ = [
    "MANY",
    "Attention",
    "Cap",
    "Choice",
    "Mechanism",
    "PrivUnit",
    "Query",
    "Vector",
    "analytic_multiplier",
    "attention_l1",
    "attention_l2",
    "before_padding",
    "randomised",
    "truth",
]

Guarantee = Literal["published", "certified"]
Noise = Literal["laplace", "gaussian"]
_SHRUNK = 1 - 2**-20
"""Rounding to 32 bits must not carry a clipped vector over its bound, nor a chance over what ε allows."""


def attention_l2(theta: float) -> float:
    """How far apart two attentions can be in ℓ2: θ at one place, and θ at another.

    >>> attention_l2(2.0) == attention_l2(1.0) == 2**0.5
    True
    """
    return math.sqrt(2) * min(theta, 1.0)


def attention_l1(theta: float, basis: int) -> float:
    """How far apart two attentions over B places can be in ℓ1: they share no place, and each fills its own evenly.

    >>> round(attention_l1(0.6, 5), 3), attention_l1(3.0, 5)
    (1.849, 2.0)
    """

    def most(places: int) -> float:
        return min(1.0, theta * math.sqrt(places))

    return max(most(places) + most(basis - places) for places in range(1, basis))


def before_padding(epsilon: float, delta: float, padding: float) -> tuple[float, float]:
    """The (ε′, δ′) of a mechanism that is (ε, δ)-DP for one click once each click is hidden with this probability.

    >>> round(before_padding(1.0, 0.0, 0.5)[0], 3), before_padding(1.0, 0.001, 0.0)
    (1.49, (1.0, 0.001))
    """
    return epsilon + math.log1p(-padding * math.exp(-epsilon)) - math.log1p(-padding), delta / (1 - padding)


@lru_cache
def analytic_multiplier(epsilon: float, delta: float) -> float:
    """The noise of the analytic Gaussian mechanism (Balle and Wang, 2018), over the ℓ2 sensitivity.

    >>> round(analytic_multiplier(10.0, 1e-3) * 2**0.5, 4)
    0.5743
    """

    def excess(z: float) -> float:
        first, second = (float(log_ndtr(sign * 0.5 / z - epsilon * z)) for sign in (1, -1))
        return math.exp(first) - math.exp(min(epsilon + second, 0.0)) - delta

    low, high = 1e-6, 1.0
    while excess(high) > 0:
        low, high = high, 2 * high
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def truth(epsilon: float, places: Tensor) -> Tensor:
    """The probability of the true one of so many places in randomised response: e^ε / (e^ε + places − 1)."""
    many = places.to(torch.float64)
    return torch.maximum(_SHRUNK / (1 + (many - 1) * math.exp(-epsilon)), 1 / many.clamp(min=1))


def randomised(place: Tensor, places: Tensor, epsilon: float, rng: Rng) -> Tensor:
    """One of so many places, 0 and up: this one with probability `truth`, else another one, drawn evenly.

    >>> randomised(torch.tensor(3), torch.tensor(9), 50.0, Rng.of(0)).item()
    3
    """
    toss, other = ((bits >> 12) & (2**52 - 1) for bits in rng.bits(2))
    honest = (truth(epsilon, places) * 2**52).floor().to(torch.int64)
    # Of 2⁴⁴ numbers, each place gets its share, give or take one: `truth` is shrunk by far more than that. They are
    # multiplied in halves, as the whole product of a number and very many places has more than 64 bits.
    high, low, others = other >> 30, (other >> 8) & (2**22 - 1), (places - 1).clamp(min=1)
    step = 1 + ((high * others + ((low * others) >> 22)) >> 22)
    return torch.where((toss < honest) | (places < 2), place, (place + step) % places.clamp(min=1))


def _insist_on_size(interest: Tensor, size: int) -> None:
    """The best of more places than the randomised response knows would be told as it is."""
    if interest.shape[-1] != size:
        raise HomebodyError(f"An interest of {size} numbers was expected, not one of {interest.shape[-1]}.")


@dataclass(frozen=True)
class Mechanism:
    """What a device tells once, at (ε, δ) for whatever its person did."""

    epsilon: float
    delta: float = 0.0

    def device(self, interest: Tensor, rng: Rng) -> Tensor:
        """What is told of an interest. Runs under vmap; all noise comes from the stream."""
        raise HomebodyError(f"{type(self).__name__} must define device().")

    def server(self, told: Tensor) -> Tensor:
        """The interest that the server makes of it."""
        return told

    @property
    def event(self) -> Event:
        """What it costs a whole person, whatever it was set to."""
        return PureRelease(self.epsilon)


@dataclass(frozen=True)
class Choice(Mechanism):
    """Which of B fits best, by randomised response.

    >>> mechanism = Choice(epsilon=50.0, basis=3)
    >>> told = mechanism.device(torch.tensor([0.1, 0.7, 0.2]), Rng.of(0))
    >>> told.item(), mechanism.server(told).round(decimals=4).tolist()
    (1, [0.0, 1.0, 0.0])
    """

    basis: int = 16

    def device(self, interest: Tensor, rng: Rng) -> Tensor:
        _insist_on_size(interest, self.basis)
        places = torch.full((), self.basis, device=interest.device)
        return randomised(interest.nan_to_num().argmax(-1), places, self.epsilon, rng).to(torch.int32)

    def server(self, told: Tensor) -> Tensor:
        """The chance of each, where all are equally likely before."""
        true = float(truth(self.epsilon, torch.tensor(self.basis)))
        same = torch.arange(self.basis, device=told.device) == told[..., None]
        return torch.where(same, true, (1 - true) / (self.basis - 1)).to(torch.float32)


@dataclass(frozen=True)
class _Noisy(Mechanism):
    """Numbers that are clipped to θ in ℓ2, with noise in each."""

    theta: float = 1.0
    noise: Noise = "laplace"
    guarantee: Guarantee = "certified"
    size: int = 5
    """How many numbers."""

    @property
    def distances(self) -> tuple[float, float]:
        """How far two people can be apart in ℓ1 and ℓ2."""
        raise HomebodyError(f"{type(self).__name__} must define distances.")

    @property
    def printed(self) -> float:
        """The distance that the paper's noise is set for."""
        raise HomebodyError(f"{type(self).__name__} must define printed.")

    @property
    def scale(self) -> float:
        """The scale of Laplace noise, or the standard deviation of Gaussian noise."""
        l1, l2 = self.distances
        if self.guarantee == "certified":
            if self.noise == "laplace":
                return l1 / self.epsilon
            return l2 * analytic_multiplier(self.epsilon, self.delta)
        if self.noise == "laplace":
            return self.printed / self.epsilon
        return self.printed / self.epsilon * math.sqrt(2 * math.log(1.25 / self.delta))

    @property
    def event(self) -> Event:
        l1, l2 = self.distances
        if self.noise == "gaussian":
            return GaussianRelease(self.scale / l2, "replace-one")
        return (
            PureRelease(self.epsilon)
            if self.guarantee == "certified"
            else LaplaceRelease(self.scale / l1, "replace-one")
        )

    def _noised(self, clipped: Tensor, rng: Rng) -> Tensor:
        """Rounded toward zero to the grid, which keeps a vector within all its bounds, and noised."""
        _insist_on_size(clipped, self.size)
        grid = Grid.fitted(self.scale, self.theta, coarsest=COARSEST if self.noise == "laplace" else 0)
        draw = laplace if self.noise == "laplace" else gaussian
        steps = grid.whole(clipped.contiguous()).to(torch.int64)
        return grid.values(steps + draw(rng, grid.depth, self.size))


@dataclass(frozen=True)
class Attention(_Noisy):
    """GetPrivAttn's weights of B basis vectors. The server keeps what is positive, and normalises.

    activation: SoftPlus or ReLU, which makes noised weights positive.

    >>> mechanism = Attention(epsilon=1e4, size=2)
    >>> mechanism.server(mechanism.device(torch.tensor([2.0, 2.0]), Rng.of(0))).round(decimals=2).tolist()
    [0.5, 0.5]
    """

    activation: Literal["relu", "softplus"] = "relu"

    @property
    def distances(self) -> tuple[float, float]:
        return attention_l1(self.theta, self.size), attention_l2(self.theta)

    @property
    def printed(self) -> float:
        return self.theta

    def device(self, interest: Tensor, rng: Rng) -> Tensor:
        return self._noised(clipped(interest.nan_to_num().softmax(-1), self.theta), rng)

    def server(self, told: Tensor) -> Tensor:
        return normalised(told, self.activation)


@dataclass(frozen=True)
class Vector(_Noisy):
    """A vector of d numbers, as DP-FedRec sends it."""

    @property
    def distances(self) -> tuple[float, float]:
        return 2 * self.theta * math.sqrt(self.size), 2 * self.theta

    @property
    def printed(self) -> float:
        return 2 * self.theta

    def device(self, interest: Tensor, rng: Rng) -> Tensor:
        return self._noised(clipped(interest.nan_to_num(), self.theta), rng)


class Cap(NamedTuple):
    """The parameters of PrivUnit for a sphere in so many dimensions.

    A direction V that is drawn evenly has ⟨V, u⟩ ≥ γ with probability q. PrivUnit gives one of these with probability
    p, and one of the others with probability 1 − p. So no density is more than p/q, none less than (1 − p)/(1 − q), and
    e^ε is the ratio of the two.
    """

    gamma: float
    q: float
    p: float
    length: float
    """The mean of ⟨V, u⟩: what is told, divided by it, is u on average."""

    @classmethod
    @lru_cache
    def of(cls, epsilon: float, size: int) -> Cap:
        """The cap whose directions tell most at this ε: `length` is the largest.

        >>> cap = Cap.of(5.0, 16)
        >>> round(cap.gamma, 3), round(cap.p, 3), round(cap.length, 3)
        (0.445, 0.85, 0.445)
        >>> round(math.log(cap.p / cap.q * (1 - cap.q) / (1 - cap.p)), 6)
        5.0
        """

        def at(gamma: float) -> Cap:
            q = 0.5 * float(betainc(0.5 * (size - 1), 0.5, 1 - gamma * gamma))
            if q <= 0.0:
                return Cap(gamma, 0.0, 0.0, 0.0)
            p = 1 / (1 + math.exp(-epsilon) * (1 - q) / q)
            # ∫ t (1 − t²)^((d − 3)/2) dt over the cap, by its closed form.
            half = 0.5 * (size - 1)
            mass = math.exp(half * math.log1p(-gamma * gamma) - betaln(0.5, half)) / (size - 1)
            return Cap(gamma, q, p, mass * (p / q - (1 - p) / (1 - q)))

        highest = 1 - 1e-9
        grid = [at(highest * step / 256) for step in range(257)]
        best = max(range(257), key=lambda step: grid[step].length)
        low, high = (highest * min(max(step, 0), 256) / 256 for step in (best - 1, best + 1))
        found = minimize_scalar(lambda gamma: -at(gamma).length, bounds=(low, high), method="bounded")
        return max(grid[best], at(float(found.x)), key=lambda cap: cap.length)


@ops.for_cohort
def _along(tail: Tensor, size: int) -> Tensor:
    """⟨V, u⟩ of an even direction V, by the probability that it is no less."""
    mass = torch.minimum(tail, 1 - tail).numpy()
    square = torch.from_numpy(betaincinv(0.5 * (size - 1), 0.5, 2 * mass))
    return torch.where(tail <= 0.5, 1.0, -1.0) * (1 - square).clamp(min=0).sqrt()


STEP = 2.0**-20
"""The grid that a direction is rounded to. Doubles on a sphere lie closer by far, so what their last digits would show
of u is lost."""


@dataclass(frozen=True)
class PrivUnit(Mechanism):
    """A direction near the true one (Bhowmick et al., Protection Against Reconstruction and Its Applications in Private
    Federated Learning, 2018). A vector without a direction tells one that is drawn evenly.

    >>> mechanism = PrivUnit(epsilon=50.0, size=3)
    >>> told = mechanism.device(torch.tensor([0.0, 4.0, 0.0]), Rng.of(0))
    >>> bool(told[1] > 0.99), told.norm().round(decimals=3).item()
    (True, 1.0)
    """

    size: int = 16
    """How many numbers."""

    def __post_init__(self) -> None:
        if self.size < 2:
            raise HomebodyError(f"A direction needs at least 2 dimensions, not {self.size}: ask for a choice.")

    @cached_property
    def cap(self) -> Cap:
        return Cap.of(self.epsilon, self.size)

    def device(self, interest: Tensor, rng: Rng) -> Tensor:
        q, p = self.cap.q, self.cap.p
        toss, place = ((bits >> 12) & (2**52 - 1) for bits in rng.bits(2))
        share = (place.to(torch.float64) + 0.5) * 2.0**-52
        near = toss < math.floor(max(_SHRUNK * p, q) * 2**52)
        along = _along(torch.where(near, q * share, q + (1 - q) * share), self.size)
        given, blank, across = interest.nan_to_num().to(torch.float64), *rng.normal_doubles(2, self.size)
        norm = given.norm(dim=-1, keepdim=True)
        unit = torch.where(norm > 0, given, blank)
        unit = unit / unit.norm(dim=-1, keepdim=True)
        for _ in range(2):  # a second time for what rounding left of it
            across = across - (across * unit).sum(-1, keepdim=True) * unit
        across = across / across.norm(dim=-1, keepdim=True)
        told = along[..., None] * unit + (1 - along * along).clamp(min=0).sqrt()[..., None] * across
        return ((told / STEP).round() * STEP).to(torch.float32)

    def server(self, told: Tensor) -> Tensor:
        """The true direction on average."""
        return told / self.cap.length


MANY = 1000
"""The most interests: a choice is told in three digits, so that all that tell one have one length."""
FEWEST, MOST = 4, 256
"""Interests of a choice that says nothing of how many."""
OFTEN = 0.9
"""How often such a choice is the true one, at least, where the fewest allow it."""
BASIS = 5
"""Interests that attention weighs, as PrivateRec's authors have it."""
_FIELDS = {
    "choice": ("epsilon", "interests"),
    "unit": ("epsilon",),
    "attention": ("epsilon", "delta", "interests", "theta", "guarantee"),
    "vector": ("epsilon", "delta", "theta", "guarantee"),
}
"""The kinds of queries, and what may be said of each."""


@dataclass(frozen=True)
class Query:
    """What a service asks of a device, as people type it.

    >>> query = Query.parse("choice:epsilon=5")
    >>> str(query), query.count, query.mechanism(size=32)
    ('choice:epsilon=5', 17, Choice(epsilon=5.0, delta=0.0, basis=17))
    """

    kind: str = setting(doc="What is told of an interest.", choices=tuple(_FIELDS))
    epsilon: float = setting(doc="ε of a query, for a whole person.", above=0, high=100)
    delta: float = setting(0.0, "δ of Gaussian noise; 0: Laplace noise.", low=0, high=0.5)
    interests: int | None = setting(
        None,
        f"How many; none: as many, from {FEWEST} to {MOST}, as keep a choice true with probability {OFTEN}.",
        low=2,
        high=MANY,
    )
    theta: float = setting(1.0, "The ℓ2 norm that weights or vectors are clipped to.", above=0, high=1000)
    guarantee: str = setting(
        "certified", "Noise that certifies ε, or as published.", choices=("certified", "published")
    )

    def __post_init__(self) -> None:
        settings.check(self, "A query's ")
        for spec in ("delta", "interests", "theta", "guarantee"):
            default = getattr(type(self), spec)
            if spec not in _FIELDS[self.kind] and getattr(self, spec) != default:
                raise unknown_name(f"setting of a {self.kind} query", spec, _FIELDS[self.kind])
        if self.guarantee == "published" and not self.delta and self.kind == "vector":
            raise HomebodyError("A published vector query has Gaussian noise: give its delta, as in delta=1e-3.")

    @classmethod
    def parse(cls, text: str) -> Query:
        """From a text such as choice:epsilon=5,interests=16."""
        kind, _, rest = text.strip().partition(":")
        if kind not in _FIELDS:
            raise unknown_name("kind of query", kind, _FIELDS)
        given: dict[str, float | int | str] = {}
        for part in rest.split(",") if rest else []:
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or not name or not value:
                raise HomebodyError(f"A query is KIND:SETTING=VALUE,…, as in choice:epsilon=5, not '{text}'.")
            if name not in _FIELDS[kind]:
                raise unknown_name(f"setting of a {kind} query", name, _FIELDS[kind])
            if name in given:
                raise HomebodyError(f"The query '{text}' says twice what {name} is; leave one out.")
            typed = {"interests": int, "guarantee": str}.get(name, float)
            given[name] = settings.parse(f"{name} of the query '{text}'", value, typed)
        if "epsilon" not in given:
            raise HomebodyError(f"The query '{text}' does not say its ε: give it, as in {kind}:epsilon=5.")
        return cls(kind, **given)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """What `parse` reads."""
        said = {name: getattr(self, name) for name in _FIELDS[self.kind]}
        own = {name: value for name, value in said.items() if name == "epsilon" or value != getattr(type(self), name)}
        return f"{self.kind}:" + ",".join(f"{name}={str(value).removesuffix('.0')}" for name, value in own.items())

    @property
    def count(self) -> int:
        """How many interests a choice or weights are about; 0: none."""
        if "interests" not in _FIELDS[self.kind]:
            return 0
        if self.interests is not None:
            return self.interests
        if self.kind == "attention":
            return BASIS
        return min(max(1 + math.floor(math.exp(min(self.epsilon, 50.0)) * (1 / OFTEN - 1)), FEWEST), MOST)

    def mechanism(self, size: int, interests: int | None = None) -> Mechanism:
        """The mechanism for interests of so many numbers. interests: how many there are, where a model has its own."""
        noise: Noise = "gaussian" if self.delta else "laplace"
        guarantee: Guarantee = "published" if self.guarantee == "published" else "certified"
        if self.kind == "choice":
            return Choice(self.epsilon, basis=interests or self.count)
        if self.kind == "unit":
            return PrivUnit(self.epsilon, size=size)
        if self.kind == "attention":
            basis = interests or self.count
            return Attention(self.epsilon, self.delta, self.theta, noise, guarantee, basis, "softplus")
        return Vector(self.epsilon, self.delta, self.theta, noise, guarantee, size)


def clipped(vector: Tensor, theta: float) -> Tensor:
    """A vector within θ in ℓ2."""
    norm = vector.to(torch.float64).norm(dim=-1, keepdim=True)
    return (vector * (_SHRUNK * (theta / norm.clamp(min=theta)))).to(torch.float32)


def normalised(weights: Tensor, activation: str) -> Tensor:
    """Weights that are positive and sum up to 1: those of ReLU or SoftPlus; all alike if none is left.

    >>> normalised(torch.tensor([[3.0, 1.0, -1.0], [-1.0, -1.0, 0.0]]), "relu").tolist()
    [[0.75, 0.25, 0.0], [0.33..., 0.33..., 0.33...]]
    """
    kept = weights.relu() if activation == "relu" else torch.nn.functional.softplus(weights)
    whole = kept.sum(-1, keepdim=True)
    some = whole > 0
    return torch.where(some, kept / torch.where(some, whole, 1.0), 1.0 / weights.shape[-1])
