"""FedRec: Privacy-Preserving News Recommendation Model Learning (Qi et al., Findings of EMNLP 2020), as PrivateRec (Liu
et al., 2022) compares with it.

| PrivateRec                                          | here                                                        |
|-----------------------------------------------------|-------------------------------------------------------------|
| Θ_N, the news model; r, d = 400                     | `encoder`: `homebody.models.news`; `d`                      |
| Θ_U, the user model; u                              | the user encoder that belongs to it; `reader`               |
| r₀, the padding news                                | `shared["pad"]`, a vector that is learnt                    |
| N_h, at most 50 clicks                              | `latest` items before the impression                        |
| N_c with C candidates, k = 4 that were not clicked  | an impression of `Data.shown`, `negatives`                  |
| s = uᵀr′, the loss over k + 1 candidates (line 24)  | `fit`, `loss`                                               |
| FedAdam (line 10), β = 0.9, 0.99                    | `server`, `learning_rate`                                   |
| dropout 0.2                                         | `dropout`; the masks are drawn in `prepare`                 |

A client takes one of its impressions in a round, one click of it and k others that were shown, and sends the gradient
of all parameters. Somebody without any click reads r₀ alone.

`query` says what a request for recommendations sends, in a simulation: nothing (the device ranks by itself), `vector`
(the clipped and noised user vector, as in DP-FedRec), or `nobody` (nothing; the server ranks for somebody of whom it
knows nothing). Noise of a request is drawn from a key of the device's own, so the same history asks the same question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad_and_value

from homebody.core import (
    About,
    Batch,
    Catalogue,
    Data,
    Method,
    Scoring,
    Shown,
    Total,
    Tree,
    Update,
    Work,
    param,
    plain_work,
)
from homebody.errors import HomebodyError
from homebody.models.adam import adam_start, adam_step
from homebody.models.news import ENCODERS, USER_ENCODERS, NewsEncoder, UserEncoder, filled
from homebody.privacy import Channel
from homebody.privacy.queries import Mechanism, Vector
from homebody.rng import GOLDEN, Rng, mix
from homebody.settings import Range
from homebody.text_vectors import news_inputs, news_start

__all__ = ["INDEX", "FedRec", "NewsSettings", "drawn_impression", "last_items"]

INDEX = "index/news"
"""The name of all news vectors among the shared parameters, where they are computed once for everyone."""
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The whole numbers of so many bytes."""
HASHED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class NewsSettings:
    """What FedRec and the centralised recommender have in common: how news become vectors, and what a person reads."""

    encoder: str = param("plm", "how news become vectors", choices=tuple(ENCODERS))
    d: int = param(400, "numbers of a news vector and of a user vector", low=1)
    heads: int = param(20, "attention heads of nrms; a divisor of d", low=1)
    ids: bool = param(True, "whether a vector of each news item's own is added to what an encoder makes of its text")
    layers: int = param(0, "top layers of the language model that are trained too, with encoder=plm", low=0, high=6)
    layers_rate: float = param(1e-5, "learning rate of these layers", low=0)
    words: str = param(
        "glove", "word vectors that nrms and naml start from: glove, random, or a file in GloVe's format"
    )
    latest: int = param(50, "clicks before an impression that a user vector is made of", low=1)
    negatives: int = param(4, "items of an impression that were not clicked, for each click", low=1)
    dropout: float = param(0.2, "share of word vectors and attention outputs that training leaves out", low=0, high=0.9)

    needs: ClassVar[tuple[str, ...]] = ("impressions",)
    uses: ClassVar[tuple[str, ...]] = ("item features",)


@dataclass(frozen=True)
class FedRec(NewsSettings, Method):
    """A news encoder and a user encoder, trained on gradients of clicks in impressions.

    >>> import homebody as hb
    >>> from homebody.testing import impressed
    >>> model = hb.fit(hb.FedRec(encoder="id", d=8), impressed(), rounds=1, quiet=True)
    >>> model.epsilon
    {'server': inf, 'clients': inf, 'public': inf}
    """

    uplink: Channel = Channel()
    learning_rate: float = param(0.001, "learning rate of the server's Adam", low=0, search=Range(1e-4, 0.03, log=True))
    query: str = param("", "what a request for recommendations sends; empty: nothing", choices=("", "vector", "nobody"))
    serving_epsilon: float = param(10.0, "ε of a request", above=0)
    serving_delta: float = param(1e-3, "δ of a request with Gaussian noise", above=0, high=0.5)
    serving_noise: str = param("gaussian", "noise of a request", choices=("gaussian", "laplace"))
    serving_theta: float = param(0.001, "ℓ2 norm that the vector of a request is clipped to", above=0)
    serving_guarantee: str = param(
        "certified", "noise of a request that certifies ε, or as published", choices=("certified", "published")
    )

    uses: ClassVar[tuple[str, ...]] = ("item features", "texts")
    about: ClassVar[About] = About(
        title="news recommendation on gradients of clicks in impressions",
        paper="Qi et al., Privacy-Preserving News Recommendation Model Learning, Findings of EMNLP 2020",
        rounds=300,
        cohort=128,
        evaluate_every=10,
        draws_negatives=False,
        dense=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.news  # refuses heads that do not divide d

    @property
    def scoring(self) -> Scoring:
        return Scoring(predicts="clicks", numbers=self.d, adapts=False)

    @cached_property
    def news(self) -> NewsEncoder:
        if self.layers and self.encoder != "plm":
            raise HomebodyError(
                f"The encoder {self.encoder} has no language model whose layers could be trained: set encoder=plm."
            )
        own = {"nrms": {"heads": self.heads}, "plm": {"layers": self.layers, "axes": self._axes}}.get(self.encoder, {})
        return ENCODERS[self.encoder](d=self.d, ids=self.ids and self.encoder != "id", **own)

    @property
    def _axes(self) -> bool:
        """Whether `plm` starts with the principal axes of the texts."""
        return False

    @cached_property
    def user(self) -> UserEncoder:
        kind = USER_ENCODERS[self.news.user]
        return kind(d=self.d, heads=self.heads) if self.news.user == "nrms" else kind(d=self.d)  # type: ignore[call-arg]

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        news = news_start(self.news, catalogue, rng.fold("news"), self.words)
        return {**news, **self.user.start(rng.fold("user")), "pad": 0.1 * rng.fold("pad").normal(self.d)}

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        with torch.device("meta"):
            shared = replace(self, words="random").init_shared(catalogue, Rng.of(0, device="meta"))
        bound = plain_work(sum(value.numel() for value in shared.values()), catalogue, longest)
        # Every news of a history and of an impression becomes a row of inputs, masks and vectors.
        rows = min(self.latest, longest) + self.negatives + 1
        bound += Work.of(rows * 200 * (self.d + 400), rows * 200 * (self.d + 400) ** 2, calls=2_000, sent=0)
        # To rank, a device encodes all news there are.
        words = sum(column.width for column in catalogue.items.values() if column.kind == "sequence")
        each = self.d + 400 if self.news.light else words * (6 * self.d + 400 + 2 * self.heads * words)
        each += self.layers * words * 5_000
        held, operations = 4 * catalogue.n_items * each, 4 * catalogue.n_items * each * (self.d + 400)
        return bound + Work(held, operations, ranking=operations)

    def init_server(self, shared: Tree) -> Tree:
        return adam_start(shared)

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"key": rng.private.fold("query").next_key()}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        items, clicked, before = drawn_impression(data.shown, rng.private.fold("impression"), data.items.device)
        candidate, there = self._candidates(items, clicked, data.catalogue.n_items, rng.private)
        history, real = last_items(data, before, self.latest)
        batch = {"real": real, "there": there, "shown": (items < data.catalogue.n_items).sum()}
        for name, some in (("history", history), ("candidate", candidate)):
            rows = self._rows(data.catalogue, some)
            masks = self.news.masks(rng.fold(name), self.dropout, rows) if self.dropout else {}
            batch |= {f"{name}:{part}": value for part, value in {**rows, **masks}.items()}
        return batch

    def _rows(self, catalogue: Catalogue, items: Tensor) -> Tree:
        """What the encoder reads of these items."""
        inputs = news_inputs(self.news, catalogue, items.device)
        return {name: value[items] for name, value in inputs.items()}

    def _candidates(self, items: Tensor, clicked: Tensor, n_items: int, rng: Rng) -> tuple[Tensor, Tensor]:
        """(k + 1,) a click of an impression, drawn evenly, then k others that were not clicked; and which are real."""
        real = items < n_items
        chance = rng.fold("click").uniform(len(items))
        click = torch.where(clicked, chance, -1.0).argmax(0, keepdim=True)
        others = torch.where(real & ~clicked, rng.fold("negatives").uniform(len(items)), -1.0)
        best, place = others.topk(min(self.negatives, len(items)))
        spare = self.negatives - len(best)
        place = torch.cat([click, place, place.new_zeros(spare)])
        there = torch.cat([clicked.any(0, keepdim=True), best >= 0, clicked.new_zeros(spare)])
        return torch.where(there, items.gather(0, place), n_items), there

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        def loss(parameters: Tree) -> Tensor:
            history, candidates = (
                self.news.encode(parameters, given(batch, name)) for name in ("history", "candidate")
            )
            return self.loss(parameters, history, candidates, batch)

        update, value = grad_and_value(loss)(shared)
        return update, {**local, "loss": value}

    def loss(self, parameters: Tree, history: Tensor, candidates: Tensor, batch: Batch) -> Tensor:
        """−log of the softmax of the click among the candidates (k + 1, d); 0 for somebody without an impression."""
        fit = candidates @ self.reader(parameters, history, batch)
        there = batch["there"]
        first = torch.arange(len(fit), device=fit.device) == 0
        fit = torch.where(there | first, fit, -torch.inf)
        return torch.where(there[0], fit.logsumexp(0) - fit[0], 0.0)

    def reader(self, parameters: Tree, history: Tensor, batch: Batch) -> Tensor:
        """The user vector in training, of the news vectors (H, d) of a history."""
        return self.user.encode(parameters, *filled(history, batch["real"], parameters["pad"]))

    def adapt(self, shared: Tree, local: Tree, batch: Batch) -> Tree:
        """Nothing: a history is all that `score` reads."""
        return local

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return adam_step(shared, state, total.mean, self.rate, (0.9, 0.99))

    def rate(self, name: str) -> float:
        """The learning rate of a parameter: the layers of a language model have one of their own."""
        return self.layers_rate if "encoder.layer" in name else self.learning_rate

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        history, real = last_items(data, data.valid.sum(), self.latest)
        news = self.vectors(shared, data.catalogue, history)
        person = self.asked(shared, news, real, self._request(shared, local, history, real, data.valid.sum()))
        return self.vectors(shared, data.catalogue, items) @ person

    def person(self, shared: Tree, data: Data) -> Tensor:
        """The user vector of a person's latest news, before anything is asked of anybody."""
        history, real = last_items(data, data.valid.sum(), self.latest)
        return self.user.encode(shared, *filled(self.vectors(shared, data.catalogue, history), real, shared["pad"]))

    def _request(self, shared: Tree, local: Tree, history: Tensor, real: Tensor, count: Tensor) -> Rng:
        """The stream of a request: the same noise under two models, settings or histories would cancel out."""
        stream = Rng(local["key"])
        if self.query in ("", "nobody"):
            return stream  # nothing is drawn from it
        place = torch.arange(1, len(history) + 1, device=history.device)
        read = torch.where(real, mix(history + place * GOLDEN), 0).sum()
        return stream.fold(repr(self.serving), model_hash(shared), count, read)

    def vectors(self, shared: Tree, catalogue: Catalogue, items: Tensor) -> Tensor:
        """The vectors of these items, from the index if there is one."""
        if INDEX in shared:
            return shared[INDEX][items]
        return self.news.encode(shared, self._rows(catalogue, items))

    def asked(self, shared: Tree, news: Tensor, real: Tensor, rng: Rng) -> Tensor:
        """The user vector by which items are ranked, of the news vectors (H, d) of a history."""
        if self.query == "nobody":
            real = torch.zeros_like(real)
        person = self.user.encode(shared, *filled(news, real, shared["pad"]))
        if self.query != "vector":
            return person
        mechanism = self.serving
        return mechanism.server(mechanism.device(person, rng))

    @property
    def serving(self) -> Mechanism:
        """The mechanism of a request."""
        return Vector(
            self.serving_epsilon,
            self.serving_delta,
            self.serving_theta,
            self.serving_noise,  # type: ignore[arg-type]
            self.serving_guarantee,  # type: ignore[arg-type]
            self.d,
        )


def model_hash(shared: Tree) -> Tensor:
    """A hash of all bits of a model, whatever its numbers are; two models share it once in 2⁶⁴.

    >>> one, other = ({"w": torch.tensor(row)} for row in ([0.5, torch.nan], [torch.nan, 0.5]))
    >>> torch.equal(model_hash(one), model_hash(one)), torch.equal(model_hash(one), model_hash(other))
    (True, False)
    """
    stream = Rng.of(0, device=next(iter(shared.values())).device)
    for name in sorted(shared.keys() - {INDEX}):
        bits = shared[name].detach().flatten().contiguous().view(WHOLE[shared[name].element_size()])
        start, total = 0, torch.zeros((), dtype=torch.int64, device=bits.device)
        for part in bits.split(HASHED_AT_ONCE):
            place = torch.arange(start + 1, start + len(part) + 1, device=bits.device)
            total, start = total + mix(part.to(torch.int64) ^ mix(place * GOLDEN)).sum(), start + len(part)
        stream = stream.fold(name, total)
    return stream.key


def given(batch: Batch, name: str) -> Mapping[str, Tensor]:
    """What the encoder is given of the history, or of the candidates."""
    return {part.removeprefix(f"{name}:"): value for part, value in batch.items() if part.startswith(f"{name}:")}


def drawn_impression(shown: Shown | None, rng: Rng, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The items (C,) of one of a client's impressions, drawn evenly, which were clicked, and what came before it.

    A client that has none gets one of nothing.

    >>> one = Shown(torch.tensor([[4, 5]]), torch.tensor([[False, True]]), torch.tensor([3]))
    >>> [part.tolist() for part in drawn_impression(one, Rng.of(0), torch.device("cpu"))]
    [[4, 5], [False, True], 3]
    """
    if shown is None:
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        return nothing, nothing > 0, nothing[0]
    asks = shown.clicked.any(1)
    drawn = torch.where(asks, rng.uniform(len(asks)), -1.0).argmax(0, keepdim=True)
    row = drawn[:, None].expand(1, shown.items.shape[1])
    return shown.items.gather(0, row)[0], shown.clicked.gather(0, row)[0], shown.before.gather(0, drawn)[0]


def last_items(data: Data, before: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The last items of the first `before` of a history, oldest first, and which of them are real.

    There is always a place, real or not, where somebody who read nothing reads r₀.

    >>> data = Data(torch.tensor([5, 6, 7, 8]), torch.ones(4) > 0, torch.tensor([]), Catalogue(9))
    >>> items, real = last_items(data, torch.tensor(3), most=2)
    >>> items.tolist(), real.tolist()
    ([6, 7], [True, True])
    """
    width = data.items.shape[0]
    place = (before - most).clamp(min=0) + torch.arange(max(1, min(most, width)), device=data.items.device)
    real = place < before
    items = data.items.gather(0, place.clamp(max=width - 1)) if width else place
    return torch.where(real, items, data.catalogue.n_items), real
