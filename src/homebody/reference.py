"""Centralised recommenders to compare with. They are not methods: they see everyone's history."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.core import About, Catalogue, Method, Recommender, Users
from homebody.errors import HomebodyError

__all__ = ["Histories", "LearntImpressions", "Products", "Reference", "Score", "ScoreNow", "federated"]

Score = Callable[[Users, Tensor], Tensor]
"""From users (B,) and items (N,) to how well each item fits each user (B, N)."""


@runtime_checkable
class ScoreNow(Protocol):
    """A score function that may be told the circumstances of each question; without them it is a plain one."""

    def __call__(self, users: Users, items: Tensor) -> Tensor: ...

    def now(self, users: Users, owner: Tensor, circumstances: Mapping[str, Tensor], items: Tensor) -> Tensor:
        """(Q, N): how well each item fits the person that `users[owner]` (Q,) names, in these circumstances (Q, …)."""


class LearntImpressions(NamedTuple):
    """The impressions that a reference may learn from, as compressed rows: impression n showed
    `items[indptr[n]:indptr[n + 1]]`."""

    users: npt.NDArray[np.int64]
    """The user of each impression, ascending: a row of the histories."""
    indptr: npt.NDArray[np.int64]
    items: npt.NDArray[np.int32]
    clicked: npt.NDArray[np.bool_]
    before: npt.NDArray[np.int64]
    """How many items of the user's history came before each impression."""


class Histories(NamedTuple):
    """Everyone's training items in one place, as compressed rows."""

    indptr: npt.NDArray[np.int64]
    items: npt.NDArray[np.int32]
    catalogue: Catalogue
    learn: npt.NDArray[np.bool_]
    """Whom the model may learn from. The others came later: what they have places them, and teaches nothing."""
    avoid: tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]] | None = None
    """What training negatives avoid, as compressed rows, ascending and distinct: the protocol's choice. None: the
    training items alone."""
    features: Mapping[str, npt.NDArray[Any]] = MappingProxyType({})
    """The users' features, one row each, in the columns of `catalogue.people`."""
    contexts: Mapping[str, npt.NDArray[Any]] = MappingProxyType({})
    """The circumstances of each of `items`, as `catalogue.contexts` names them."""
    shown: LearntImpressions | None = None
    """Impressions to learn from, if the split has some: of people who are learnt from alone."""
    device: torch.device = torch.device("cpu")
    """Where a reference that can train on a GPU is to train; `catalogue` is on the CPU."""

    @classmethod
    def of(cls, histories: Sequence[Sequence[int]], n_items: int) -> Histories:
        """Of a few people, all learnt from, whose negatives avoid what they have.

        >>> Histories.of([[2, 0], [1]], n_items=3).indptr.tolist()
        [0, 2, 3]
        """
        ends = np.cumsum([0, *map(len, histories)], dtype=np.int64)
        items = np.array([item for history in histories for item in history], dtype=np.int32)
        return cls(ends, items, Catalogue(n_items), np.ones(len(histories), dtype=np.bool_))


class Reference(Recommender):
    """A centralised recommender to compare with; the ledger says *raw data collected, ε = ∞*.

    >>> import homebody as hb
    >>> model = hb.fit("popularity", "synthetic:users=50,items=30,mean=6", quiet=True)
    >>> isinstance(model.method, hb.Reference), model.epsilon["server"]
    (True, inf)
    """

    about: ClassVar[About] = About(rounds=1)
    reads: ClassVar[bool] = True
    """Whether it looks at anyone's history. One that does not collects nothing, and is charged nothing."""

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        """Learn from the raw histories, one score function after each pass over them.

        It is asked for as many passes as the run has rounds; a score function is used before the next pass.
        """
        raise HomebodyError(f"{type(self).__name__} must define fit().")

    def trained(self, histories: Histories, seed: int = 0, rounds: int | None = None) -> Score:
        """The score function after these passes, by default as many as the reference takes."""
        *_, score = islice(self.fit(histories, seed), rounds or self.about.rounds)
        return score


@dataclass(frozen=True, eq=False)
class Products:
    """A score is the product of the user's row and the item's row."""

    users: Tensor
    items: Tensor

    def __call__(self, who: Users, some: Tensor) -> Tensor:
        return self.users[torch.from_numpy(who)] @ self.items[some].T


def federated(method: Recommender, name: str, why: str = "it has no clients") -> Method:
    """The same method; a reference is refused, and `why` ends the sentence."""
    if not isinstance(method, Method):
        raise HomebodyError(f"{name} is a centralised reference: {why}.")
    return method
