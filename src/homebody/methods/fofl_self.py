"""FOFL-SELF: A Simple and Efficient Federated Recommender System (Jalalirad, Scavuzzo, Capota and Sprague, BDCAT 2019).

REPTILE on the ids of items alone: PrivRec without any feature, as its authors compare with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from homebody.core import About, param
from homebody.methods.privrec import PrivRec

__all__ = ["FOFLSelf"]


@dataclass(frozen=True)
class FOFLSelf(PrivRec):
    """A network on items' own rows, and a start from which each device adapts it quickly."""

    features: str = param("none", "features it takes in, such as age,genres; none: items' own rows")

    about: ClassVar[About] = replace(
        PrivRec.about,
        title="PrivRec on the ids of items alone: a common start that each device adapts (REPTILE)",
        paper="Jalalirad et al., A Simple and Efficient Federated Recommender System, BDCAT 2019",
    )
