"""Centralised recommenders to compare with. They are not methods: they see everyone's history."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from homebody.core import Catalogue, Users
from homebody.errors import HomebodyError
from homebody.params import check_params

__all__ = ["Histories", "Reference"]


class Histories(NamedTuple):
    """Everyone's training items in one place, as compressed rows."""

    indptr: npt.NDArray[np.int64]
    items: npt.NDArray[np.int32]
    catalogue: Catalogue


class Reference:
    """A frozen dataclass of hyper-parameters, like a method; the ledger says *raw data collected, ε = ∞*."""

    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_params(self)

    def fit(self, histories: Histories, seed: int) -> Callable[[Users], Tensor]:
        """Learn from the raw histories; answer a function from users to their scores for all items."""
        raise HomebodyError(f"{type(self).__name__} must define fit().")
