"""A synthetic population of any size, from a latent-factor model with skewed popularity.

Item i has a popularity b_i = (rank of i)^-skew (Zipf's law; ranks are a random permutation of the ids) and
belongs to the factors by shares ψ_i = softmax(3 q_i), q_ik ~ N(0, 1). Factor k draws items with probability

    φ_k(i) ∝ b_i ψ_ik

User u weighs the factors by θ_u = softmax(3 z_u), z_uk ~ N(0, 1), so most people have one or two tastes, and
draws items without repetition from the mixture

    p(i | u) = Σ_k θ_uk φ_k(i)

which is a non-negative factorisation of rank `factors`: what to recommend is learnable from others. History
lengths are 5 (or the number of items, if fewer) plus a log-normal number of scale σ = 1, cut at the number of
items, with its location solved so that the cut distribution has the stated mean. Someone who has exhausted
what they like goes on to unseen items next to random ones.

Every number is a hash of (seed, user, draw): user u's history depends on neither the number of users nor the
number of threads. There are no times: each history stands in ascending order of item id, so its last item is
no later than the others; hold out a random one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from homebody import settings
from homebody.data.population import Population
from homebody.errors import HomebodyError, refuse_unknown

__all__ = ["Synthetic", "synthetic"]

SHORTEST = 5
SIGMA = 1.0
SHARPNESS = 3.0
LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Synthetic:
    """What a synthetic population is made from; `parse` reads it as people type it.

    >>> Synthetic.parse("synthetic:users=1_000_000,items=20000,mean=50")
    Synthetic(users=1000000, items=20000, mean=50.0, seed=0, factors=8, skew=1.0)
    >>> Synthetic.parse("synthetic:user=10")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no setting of a synthetic population 'user'; did you mean 'users'?
    Known: factors, items, mean, seed, skew, users.
    """

    users: int = 1000
    items: int = 500
    mean: float = 30.0
    seed: int = 0
    factors: int = 8
    skew: float = 1.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("users", 1, LARGEST),
            ("items", 1, LARGEST),
            ("mean", self.shortest, self.items),
            ("seed", 0, 2**63 - 1),
            ("factors", 1, 1000),
            ("skew", 0, 10),
        ):
            value = getattr(self, name)
            if not low <= value <= high:  # which NaN also fails
                raise HomebodyError(
                    f"A synthetic population of {self.items} items needs {name} from {low} to {high}, not {value:g}."
                )

    @classmethod
    def parse(cls, text: str) -> Synthetic:
        """From `synthetic` or `synthetic:users=…,items=…,mean=…,seed=…,factors=…,skew=…`, any left out."""
        kinds = {field.name: float if field.type == "float" else int for field in fields(cls)}
        chosen: dict[str, int | float] = {}
        for setting in filter(str.strip, text.partition(":")[2].split(",")):
            name, equals, value = (part.strip() for part in setting.partition("="))
            refuse_unknown("setting of a synthetic population", [name], kinds)
            if not equals or name in chosen:
                raise HomebodyError(f"Give {name} once, as {name}=number, in '{text}'.")
            chosen[name] = settings.parse(name, value, kinds[name])
        return cls(**chosen)  # type: ignore[arg-type]

    @property
    def shortest(self) -> int:
        """The length of the shortest history."""
        return min(SHORTEST, self.items)

    def __str__(self) -> str:
        """As `parse` reads it; only what differs from the defaults.

        >>> str(Synthetic(users=20)), str(Synthetic())
        ('synthetic:users=20', 'synthetic')
        """
        changed = [
            f"{field.name}={str(getattr(self, field.name)).removesuffix('.0')}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return "synthetic" + (":" + ",".join(changed) if changed else "")


def synthetic(spec: Synthetic | None = None) -> Population:
    """Make the population.

    >>> people = synthetic(Synthetic(users=50, items=40, mean=8))
    >>> people.n_users, people.n_items, int(people.lengths.min()) >= 5
    (50, 40, True)
    """
    from homebody.data.synthetic_kernels import alias_tables, draw_histories, draw_lengths

    spec = spec or Synthetic()
    try:
        indptr = np.zeros(spec.users + 1, dtype=np.int64)
        extra = spec.items - spec.shortest
        location = _location(spec.mean - spec.shortest, extra)
        draw_lengths(np.uint64(spec.seed), spec.shortest, extra, location, SIGMA, indptr[1:])
        np.cumsum(indptr, out=indptr)
        keep, other = alias_tables(_factor_weights(spec))
        items = np.empty(indptr[-1], dtype=np.int32)
        draw_histories(np.uint64(spec.seed), indptr, keep, other, SHARPNESS, items)
    except MemoryError:
        raise HomebodyError(
            f"{spec} has about {spec.users * spec.mean:,.0f} interactions, more than the memory here holds."
        ) from None
    return Population(str(spec), indptr, items, n_items=spec.items)


def _factor_weights(spec: Synthetic) -> npt.NDArray[np.float64]:
    """φ up to scale, one factor a row; drawn from the seed alone, so that users can be added."""
    rng = np.random.default_rng([spec.seed, spec.items, spec.factors])
    rank = rng.permutation(spec.items) + 1.0
    place = np.exp(SHARPNESS * rng.standard_normal((spec.factors, spec.items)))
    weights: npt.NDArray[np.float64] = rank**-spec.skew * place / place.sum(axis=0)
    return weights


def _location(mean: float, most: int) -> float:
    """The μ at which a log-normal number cut at `most` has this mean, by bisection.

    >>> round(_location(45.0, 10**9), 3) == round(math.log(45) - SIGMA**2 / 2, 3)
    True
    """
    low, high = -50.0, 50.0
    for _ in range(100):
        middle = (low + high) / 2
        if _cut_mean(middle, most) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _cut_mean(location: float, most: int) -> float:
    if most == 0:
        return 0.0

    def below(bound: float) -> float:
        return 0.5 * math.erfc(-bound / math.sqrt(2))

    bound = (math.log(most) - location) / SIGMA
    return math.exp(location + SIGMA**2 / 2) * below(bound - SIGMA) + most * below(-bound)
