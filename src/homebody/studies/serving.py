"""One trained model under other settings of its requests: what noise costs in accuracy, and what it certifies.

These settings are fields of the method that training does not read: `query`, and those that begin with `serving_`. So a
model is trained once, and is asked under each of them. Noise comes from a key in each client's local state: the same
model and settings give the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

import torch

from homebody.core import Method, Recommender, Tree
from homebody.errors import HomebodyError, refuse_unknown
from homebody.evaluation import Block
from homebody.evaluation.metrics import skew
from homebody.methods.fedrec import FedRec
from homebody.privacy.accountant import epsilon
from homebody.privacy.queries import Attention, before_padding
from homebody.reference import federated
from homebody.settings import KINDS, fits, parse
from homebody.simulation import Simulator

__all__ = ["PaddedRequest", "check_release", "read_serving", "refuse_serving", "serving", "serving_probe"]

SKEW = "skew"
"""τ: the share of places of a ranking at which noise puts another item."""


def serving_probe(settings: Mapping[str, Any]) -> str:
    """The name of the probe that asks a model under these settings.

    >>> serving_probe({"serving_epsilon": 10, "query": "attention"})
    'serving:query=attention,serving_epsilon=10'
    """
    texts = {name: f"{value:g}" if type(value) in (int, float) else str(value) for name, value in settings.items()}
    return "serving:" + ",".join(f"{name}={text}" for name, text in sorted(texts.items()))


def read_serving(method: Method, settings: str) -> dict[str, Any]:
    """The fields of the method that these settings name, and their values.

    >>> read_serving(FedRec(), "query=vector,serving_epsilon=10")
    {'query': 'vector', 'serving_epsilon': 10.0}
    """
    kinds = {
        spec.name: type(getattr(method, spec.name))
        for spec in fields(method)  # type: ignore[arg-type]
        if spec.name == "query" or spec.name.startswith("serving_")
    }
    given = dict(part.split("=", 1) for part in settings.split(","))
    refuse_unknown("field of a request", given, kinds)
    return {name: parse(name, text, kinds[name]) for name, text in given.items()}


def refuse_serving(method: Recommender, name: str, settings: str) -> None:
    """Raise, before anything is trained, if this method cannot be asked under these settings."""
    _asking(_newsreader(federated(method, name, "no device of its people sends a request"), name), settings)


def _newsreader(method: Method, name: str) -> FedRec:
    acting = method.phases[-1].method or method
    if not isinstance(acting, FedRec):
        raise HomebodyError(f"Requests of {name} have no settings: this needs a method with the field 'query'.")
    return acting


def _asking(method: FedRec, settings: str) -> tuple[FedRec, bool]:
    """The method as its devices ask under these settings, and whether they send their interest as it is.

    An ε of ∞ is no noise: the server ranks as the device itself would, which is how an empty query ranks.
    """
    given = read_serving(method, settings)
    if given.get("serving_epsilon") == math.inf:
        query = given.get("query", method.query)
        rest = {name: value for name, value in given.items() if name != "serving_epsilon"}
        return replace(replace(method, **rest), query=query if query == "nobody" else ""), query not in ("", "nobody")
    return replace(method, **given), False


def serving(method: Method, runtime: Simulator, shared: Tree, settings: str, delta: float) -> dict[str, Any]:
    """Test metrics of a model that is asked under these settings, its ranking skew, and ε of one request at δ."""
    reader = _newsreader(method, type(method).__name__)
    asking, bare = _asking(reader, settings)
    shares: list[torch.Tensor] = []

    def blocks() -> Iterator[Block]:
        plain = runtime.scored(replace(reader, query=""), shared)
        for block, without in zip(runtime.scored(asking, shared), plain, strict=True):
            shares.extend(_skews(without, block))
            yield block

    metrics = runtime.measured(blocks()).metrics
    if not shares:
        raise HomebodyError("Nobody is asked about an impression here: split impressions-people or impressions-later.")
    tested = {name: value for name, value in metrics.items() if not name.startswith("valid/")}
    cost = math.inf if bare else _cost(asking, delta)
    return {"metrics": {**tested, SKEW: float(torch.cat(shares).mean())}, "epsilon_query": cost, "delta": delta}


def _cost(method: FedRec, delta: float) -> float:
    """ε of one request, for a whole person, at this δ."""
    if method.query in ("", "nobody"):
        return 0.0
    return epsilon([(method.serving.event, 1)], delta).epsilon


def _skews(plain: Block, noised: Block) -> Iterable[torch.Tensor]:
    """τ of each test impression of these clients."""
    question = plain.asked.get("test")
    if question is None or not plain.impressions:
        return
    columns = torch.cat([question.relevant, question.candidates], 1)
    first, second = (block.scores[question.owner].gather(1, columns.clamp(min=0)) for block in (plain, noised))
    yield skew(first, second, columns >= 0).cpu()


def check_release(owner: type, given: Mapping[str, Any], what: str) -> None:
    """Refuse what a recipe says of a release, or a request, that this dataclass has no field of that type for."""
    kinds = get_type_hints(owner)
    refuse_unknown(f"setting of a {what}", given, kinds)
    for name, value in given.items():
        if not fits(value, kinds[name]):
            raise HomebodyError(f"release.{name} must be {KINDS[kinds[name]]}, not {value!r}.")


@dataclass(frozen=True)
class PaddedRequest:
    """Weights of a basis that a request sends, and the noise that they need once clicks of the history are hidden.

    >>> request = PaddedRequest.of({"epsilon": 10, "guarantee": "certified"})
    >>> round(request.scale(0.0), 3), round(request.scale(0.5), 3)
    (0.574, 0.525)
    """

    epsilon: float
    delta: float = 1e-3
    noise: str = "gaussian"
    guarantee: str = "published"
    theta: float = 1.0
    basis: int = 5

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> PaddedRequest:
        """From a recipe's table, checked."""
        check_release(cls, given, "request")
        choices = {"noise": ("gaussian", "laplace"), "guarantee": ("published", "certified")}
        for name, value in given.items():
            if name in choices:
                refuse_unknown(f"release.{name}", [value], choices[name])
            elif not value > 0:
                raise HomebodyError(f"release.{name} must be above 0, not {value}.")
        if "epsilon" not in given:
            raise HomebodyError("release.epsilon is missing: give it to the figure or to this row.")
        return cls(**given)

    def scale(self, padding: float) -> float:
        """Of the noise on each weight, where each click is hidden with this probability."""
        inside, small = before_padding(self.epsilon, self.delta, padding)
        return Attention(inside, small, self.theta, self.noise, self.guarantee, self.basis).scale  # type: ignore[arg-type]
