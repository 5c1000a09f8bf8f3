"""What is known of users, items or interactions beside who met what: columns, and what kind each one is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.errors import HomebodyError, unknown_name

if TYPE_CHECKING:
    from homebody.data.vocabularies import Declaration

__all__ = ["KINDS", "Features", "Kind"]

Kind = Literal["categorical", "multi-hot", "numeric", "text"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, eq=False)
class Features:
    """A table, one row for each user, item or interaction, and the kind of every column.

    Categorical columns hold texts or whole numbers, multi-hot ones lists of texts, numeric ones numbers, and
    text ones texts, of which the character 3-grams are taken. Null means that nothing is known.

    >>> ages = Features(pl.DataFrame({"age": [25, None]}), {"age": "numeric"})
    >>> len(ages), ages.names
    (2, ['age'])
    """

    table: pl.DataFrame
    kinds: Mapping[str, Kind]
    declared: Mapping[str, Declaration] = field(default_factory=dict)
    """Where the vocabulary of a column, or the scale of its numbers, comes from; without one, from those who train."""

    def __post_init__(self) -> None:
        if list(self.kinds) != self.table.columns:
            raise HomebodyError(
                f"The features {', '.join(self.table.columns)} need a kind each, not {', '.join(self.kinds)}."
            )
        for kind in self.kinds.values():
            if kind not in KINDS:
                raise unknown_name("kind of feature", kind, KINDS)

    def __len__(self) -> int:
        return self.table.height

    @property
    def names(self) -> list[str]:
        return self.table.columns

    def rows(self, numbers: npt.NDArray[np.integer[Any]]) -> Features:
        """These rows, in this order."""
        return Features(self.table[numbers], self.kinds, self.declared)
