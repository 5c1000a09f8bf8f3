"""DP-FedRec: FedRec with noise on each gradient and on the user vector of a request, the rival that PrivateRec (Liu et
al., 2022) compares with.

| paper                                                   | here                                                     |
|---------------------------------------------------------|----------------------------------------------------------|
| clip of the local gradient, θ = 0.005                   | `theta`; the channel's stage `Clip`                      |
| Laplace noise of scale 2θ / ε_t in each coordinate      | `guarantee="published"`: the stage `VectorLaplace`       |
| (its ℓ1 sensitivity is 2θ√n for n parameters)           | `guarantee="certified"`: scale 2θ√n / ε_t                |
| serving: the user vector, clipped to θ = 0.001          | `query="vector"`, `serving_theta`                        |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from homebody.core import About, param
from homebody.errors import HomebodyError
from homebody.methods.fedrec import FedRec
from homebody.privacy import Channel, Clip
from homebody.privacy.stages import VectorLaplace
from homebody.settings import Range

__all__ = ["DPFedRec"]


@dataclass(frozen=True)
class DPFedRec(FedRec):
    """FedRec whose clients clip their gradients and add Laplace noise to them.

    >>> import homebody as hb
    >>> from homebody.testing import impressed
    >>> model = hb.fit(hb.DPFedRec(encoder="id", d=8), impressed(), rounds=1, quiet=True)
    >>> model.method.uplink
    Channel(Clip(norm=0.005), VectorLaplace(epsilon=10.0))
    """

    epsilon: float = param(10.0, "ε_t, of one participation", above=0, search=Range(1, 20, log=True))
    theta: float = param(0.005, "ℓ2 norm that a gradient is clipped to", above=0)
    guarantee: str = param("certified", "noise that certifies ε, or as published", choices=("certified", "published"))

    about: ClassVar[About] = replace(
        FedRec.about,
        title="FedRec with Laplace noise on each gradient",
        paper="Liu et al., PrivateRec: Differentially Private Training and Serving for Federated News Recommendation, "
        "2022",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        own = Channel(Clip(self.theta), VectorLaplace(self.epsilon, self.guarantee))  # type: ignore[arg-type]
        if self.uplink.stages and [type(stage) for stage in self.uplink.stages] != [Clip, VectorLaplace]:
            raise HomebodyError("DP-FedRec has stages of its own: set epsilon, theta and guarantee, or train fedrec.")
        object.__setattr__(self, "uplink", own)
