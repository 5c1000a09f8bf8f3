"""News and their readers as vectors of d numbers: the encoders of news recommenders.

- `NewsById`: a row of a table for each news item.
- `NRMS`: words attend to one another, then to a query (Wu et al., Neural News Recommendation with Multi-Head
  Self-Attention, EMNLP 2019).
- `NAML`: title, body and categories are views, joined by attention; a convolution reads words (Wu et al., Neural News
  Recommendation with Attentive Multi-View Learning, IJCAI 2019).
- `PLM`: a layer on the vector that a language model has of the title, which stays as it is, or whose top layers are
  trained too (after Wu et al., Empowering News Recommendation with Pre-trained Language Models, SIGIR 2021).

A user encoder is `NRMSUser`, `NAMLUser` or `MeanUser` of the news vectors of a history, whose empty places count for
nothing. Parameters are flat dictionaries of tensors, under `news/…` and `user/…`. Everything runs under vmap and is
differentiable. Nothing is random: dropout masks are drawn in `prepare` (`NewsEncoder.masks`) and are part of what an
encoder is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vjp

from homebody.core import Catalogue, Column, Tree
from homebody.errors import HomebodyError
from homebody.models.minilm import HEADS, LAYERS, WIDTH, through_layers, whole
from homebody.models.networks import glorot
from homebody.ops import dropout_mask
from homebody.rng import Rng

__all__ = [
    "ENCODERS",
    "NAML",
    "NRMS",
    "PLM",
    "USER_ENCODERS",
    "MeanUser",
    "NAMLUser",
    "NRMSUser",
    "NewsById",
    "NewsEncoder",
    "UserEncoder",
    "encode_many",
    "filled",
    "item_numbers",
    "text_column",
]

NEVER = -1e30
"""Added to the fit of a place that does not count: finite, so that no gradient is undefined."""
WINDOW = 3
"""Words that NAML's convolution reads together."""
KEPT = 1 << 28
"""Up to so many numbers are kept for the gradient: 1 GB."""
CATEGORY_WIDTH = 100
"""Numbers of a category's vector in NAML."""
STRETCH = 1.25
"""How long the principal axes of texts are where `PLM` starts from them."""


def principal_axes(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The mean of rows (N, d), and up to so many axes (d, k) along which they differ most, the first most of all.

    >>> mean, axes = principal_axes(torch.tensor([[0.0, 3.0], [0.0, -1.0]]), 1)
    >>> mean.tolist(), axes.tolist()
    ([0.0, 1.0], [[0.0], [1.0]])
    """
    wide = rows.double()
    mean = wide.mean(0)
    axes = torch.linalg.eigh((wide - mean).T @ (wide - mean)).eigenvectors.flip(1)[:, :most]
    # An axis has no direction of its own: its largest number is positive.
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return mean.float(), (axes * largest.sign()).float()


def looked_up(table: Tensor, codes: Tensor) -> Tensor:
    """(…, d) the rows of a table at these codes (…); 0 where a code is -1.

    Not `table[codes]`: its gradient is added up by all threads at once, in another order each time, and slowly.

    >>> looked_up(torch.tensor([[1.0], [2.0]]), torch.tensor([[1, -1]])).tolist()
    [[[2.0], [0.0]]]
    """
    rows = table.index_select(0, codes.clamp(min=0).flatten()).view(*codes.shape, table.shape[1])
    return torch.where(codes[..., None] >= 0, rows, 0.0)


def shares(fit: Tensor, real: Tensor) -> Tensor:
    """Softmax over the last dimension among the real places; all places alike where none is.

    >>> shares(torch.zeros(2, 4), torch.tensor([[True, True, False, False], [False] * 4])).tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]
    """
    return (fit + torch.where(real, 0.0, NEVER)).softmax(-1)


def pooled(x: Tensor, part: Mapping[str, Tensor], name: str, real: Tensor) -> Tensor:
    """Additive attention: the mean of x (…, T, d) over its real places, weighted by tanh(x V + v) q; 0 if none is."""
    fit = (x @ part[f"{name}/weight"] + part[f"{name}/offset"]).tanh() @ part[f"{name}/query"]
    return (shares(fit, real)[..., None, :] @ x).squeeze(-2) * real.any(-1, keepdim=True)


def pooling(rng: Rng, name: str, d: int, query: int) -> Tree:
    """The parameters of `pooled` that have this name."""
    stream = rng.fold(name)
    return {
        f"{name}/weight": glorot(stream.fold(0), d, query),
        f"{name}/offset": torch.zeros(query, device=rng.key.device),
        f"{name}/query": glorot(stream.fold(1), query, 1).squeeze(1),
    }


def attended(x: Tensor, weight: Tensor, heads: int, real: Tensor) -> Tensor:
    """Multi-head self-attention (…, T, d) over the real places of x (…, T, e).

    weight: (e, 3d), the queries', keys' and values' side by side. The heads stand side by side, and no layer follows.
    """
    query, key, value = (x @ weight).reshape(*x.shape[:-1], 3, heads, -1).movedim(-3, 0).transpose(-2, -3)
    fit = (query * query.shape[-1] ** -0.5) @ key.mT
    return (shares(fit, real[..., None, None, :]) @ value).transpose(-2, -3).flatten(-2)


def convolved(x: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
    """A convolution (…, T, d) over windows of words of x (…, T, e), zeros at both ends; weight: (window · e, d)."""
    side = WINDOW // 2
    ends = torch.zeros_like(x[..., :1, :]).expand(*x.shape[:-2], side, x.shape[-1])
    wide = torch.cat([ends, x, ends], -2)
    length = x.shape[-2]
    return torch.cat([wide[..., place : place + length, :] for place in range(WINDOW)], -1) @ weight + offset


def text_column(catalogue: Catalogue, name: str, encoder: str) -> Column:
    """The column of a text whose words stand in their order; news without one are refused."""
    column = catalogue.items.get(name)
    if column is None or column.kind != "sequence":
        state = "have none" if column is None else "have it without the order of its words"
        raise HomebodyError(
            f"The encoder {encoder} reads the text '{name}' of news as a sequence of words, and these items {state}: "
            f"give --item-features FILE with that column and --kind {name}=sequence, or choose the encoder id."
        )
    return column


def _seen(x: Tensor, given: Mapping[str, Tensor], mask: str) -> Tensor:
    """x after dropout, if a mask was drawn."""
    return x * given[mask] if mask in given else x


@dataclass(frozen=True)
class NewsEncoder(ABC):
    """From what is known of news to their vectors of d numbers.

    `inputs` is what it reads of the whole catalogue; rows of them, with the masks, are what `encode` is given.

    >>> encoder = PLM(d=4, ids=True)
    >>> shared = {**encoder.start(Catalogue(2), Rng.of(0)), "news/own": torch.ones(2, 4)}
    >>> encoder.encode(shared, {"plm": torch.zeros(2, 384), "own": torch.tensor([1, -1])})[:, 0].tolist()
    [1.0, 0.0]
    """

    d: int = 400
    ids: bool = False
    """Whether `encode` adds a vector of each news item's own, `news/own`, to what its text says. It starts at 0: a news
    item that nobody was shown is what its text says."""
    user: ClassVar[str]
    """The user encoder that belongs to it."""
    light: ClassVar[bool] = False
    """Whether a news item takes little work: padding then costs more than working on fewer clients at once."""

    def words(self, catalogue: Catalogue) -> tuple[str, ...]:
        """The words of all texts that it reads, sorted; code c is in place c - 1."""
        return ()

    @abstractmethod
    def inputs(self, catalogue: Catalogue) -> Tree:
        """A row for each news item, and one more, the last, for no news: its vector is 0."""

    @abstractmethod
    def start(self, catalogue: Catalogue, rng: Rng, words: Tensor | None = None) -> Tree:
        """The parameters. words: the vectors (V + 1, e) that an encoder of words starts from."""

    def masks(self, rng: Rng, rate: float, given: Mapping[str, Tensor]) -> Tree:
        """Dropout masks for n news items whose rows of `inputs` are `given`, to be joined to those."""
        return {}

    def room(self, given: Mapping[str, Tensor]) -> int:
        """Numbers that one news item takes on the way to its vector and back, roughly."""
        return 8 * self.d

    def encode(self, shared: Tree, given: Mapping[str, Tensor]) -> Tensor:
        """(…, n, d) of rows (…, n) of `inputs`; with `ids`, `own` is the number of each, -1 for none."""
        content = self.content(shared, given)
        return content + looked_up(shared["news/own"], given["own"]) if self.ids else content

    @abstractmethod
    def content(self, shared: Tree, given: Mapping[str, Tensor]) -> Tensor:
        """The same without vectors of their own."""


def item_numbers(catalogue: Catalogue) -> Tensor:
    """The number of each news item, and -1 for none."""
    number = torch.arange(catalogue.n_items + 1)
    return torch.where(number < catalogue.n_items, number, -1)


@dataclass(frozen=True)
class NewsById(NewsEncoder):
    """A vector for each news item, whatever it says.

    >>> encoder = NewsById(d=4)
    >>> three = Catalogue(3)
    >>> encoder.encode(encoder.start(three, Rng.of(0)), encoder.inputs(three)).shape
    torch.Size([4, 4])
    """

    user: ClassVar[str] = "mean"
    light: ClassVar[bool] = True

    def inputs(self, catalogue: Catalogue) -> Tree:
        return {"item": item_numbers(catalogue)}

    def start(self, catalogue: Catalogue, rng: Rng, words: Tensor | None = None) -> Tree:
        return {"news/item": 0.1 * rng.fold("news/item").normal(catalogue.n_items, self.d)}

    def content(self, shared: Tree, given: Mapping[str, Tensor]) -> Tensor:
        return looked_up(shared["news/item"], given["item"])


@dataclass(frozen=True)
class _OfWords(NewsEncoder):
    """What encoders of words have in common: one table of word vectors for all texts, `news/word`."""

    query: int = 200
    width: int = 50
    """Numbers of a word's vector."""
    title: str = "title"

    name: ClassVar[str]

    def texts(self, catalogue: Catalogue) -> dict[str, Column]:
        """The texts that it reads."""
        return {self.title: text_column(catalogue, self.title, self.name)}

    def words(self, catalogue: Catalogue) -> tuple[str, ...]:
        columns = self.texts(catalogue).values()
        return tuple(sorted({word for column in columns for word in column.words}))

    def inputs(self, catalogue: Catalogue) -> Tree:
        place = {word: number for number, word in enumerate(self.words(catalogue), 1)}
        rows = {}
        for name, column in self.texts(catalogue).items():
            common = torch.tensor([0, *(place[word] for word in column.words)], device=column.values.device)
            codes = torch.where(column.values >= 0, common[column.values.clamp(min=0)], -1)
            rows[f"words/{name}"] = torch.cat([codes, torch.full_like(codes[:1], -1)])
        return rows

    def _table(self, words: Tensor | None) -> Tensor:
        if words is None:
            raise HomebodyError(f"The encoder {self.name} starts from word vectors: give some.")
        if words.shape[1] != self.width:
            raise HomebodyError(
                f"The word vectors have {words.shape[1]} numbers, and the encoder {self.name} reads {self.width}: "
                f"set its width to {words.shape[1]}."
            )
        return words

    def masks(self, rng: Rng, rate: float, given: Mapping[str, Tensor]) -> Tree:
        drawn: Tree = {}
        for name in (name.removeprefix("words/") for name in given if name.startswith("words/")):
            count, length = given[f"words/{name}"].shape
            drawn[f"keep/words/{name}"] = dropout_mask(rng.fold("words", name), rate, count, length, self.width)
            drawn[f"keep/seen/{name}"] = dropout_mask(rng.fold("seen", name), rate, count, length, self.d)
        return drawn

    def room(self, given: Mapping[str, Tensor]) -> int:
        words = sum(value.shape[-1] for name, value in given.items() if name.startswith("words/"))
        return words * 8 * (self.d + self.width)

    def _vectors(self, shared: Tree, given: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
        """A text's word vectors (…, W, e), 0 for padding, and which places are real."""
        codes = given[f"words/{name}"]
        return _seen(looked_up(shared["news/word"], codes), given, f"keep/words/{name}"), codes >= 0


@dataclass(frozen=True)
class NRMS(_OfWords):
    """Self-attention among a title's words, then additive attention.

    >>> title = Column(torch.tensor([[1, 2], [2, -1]]), 3, "sequence", True, words=("cat", "dog"))
    >>> two, encoder = Catalogue(2, {"title": title}), NRMS(d=6, heads=3, width=4)
    >>> shared = encoder.start(two, Rng.of(0), torch.ones(3, 4))
    >>> encoder.encode(shared, encoder.inputs(two)).shape
    torch.Size([3, 6])
    """

    heads: int = 20

    name: ClassVar[str] = "nrms"
    user: ClassVar[str] = "nrms"

    def __post_init__(self) -> None:
        _refuse_heads(self.d, self.heads)

    def start(self, catalogue: Catalogue, rng: Rng, words: Tensor | None = None) -> Tree:
        table = self._table(words)
        attention = _attention(rng.fold("news/attention"), table.shape[1], self.d)
        return {"news/word": table, "news/attention": attention, **pooling(rng, "news/pool", self.d, self.query)}

    def content(self, shared: Tree, given: Mapping[str, Tensor]) -> Tensor:
        vectors, real = self._vectors(shared, given, self.title)
        seen = attended(vectors, shared["news/attention"], self.heads, real)
        return pooled(_seen(seen, given, f"keep/seen/{self.title}"), shared, "news/pool", real)


@dataclass(frozen=True)
class NAML(_OfWords):
    """Views of news: the title, the body and each category that there is, joined by additive attention.

    A text is a convolution with ReLU and additive attention; a category is a vector and a layer with ReLU. A view that
    a news item does not have counts for nothing. `bodies` and `categories` are names of columns; those that the data
    does not have are left out.

    >>> title = Column(torch.tensor([[1, 2], [2, -1]]), 3, "sequence", True, words=("cat", "dog"))
    >>> two = Catalogue(2, {"title": title, "category": Column(torch.tensor([1, 0]), 2, "one")})
    >>> encoder = NAML(d=6, width=4)
    >>> shared = encoder.start(two, Rng.of(0), torch.ones(3, 4))
    >>> encoder.encode(shared, encoder.inputs(two)).shape
    torch.Size([3, 6])
    """

    bodies: tuple[str, ...] = ("abstract", "body")
    categories: tuple[str, ...] = ("category", "subcategory")

    name: ClassVar[str] = "naml"
    user: ClassVar[str] = "naml"

    def texts(self, catalogue: Catalogue) -> dict[str, Column]:
        columns = {name: catalogue.items[name] for name in self.bodies if name in catalogue.items}
        bodies = {name: column for name, column in columns.items() if column.kind == "sequence"}
        return {**super().texts(catalogue), **bodies}

    def _categories(self, catalogue: Catalogue) -> dict[str, Column]:
        columns = {name: catalogue.items[name] for name in self.categories if name in catalogue.items}
        return {name: column for name, column in columns.items() if column.kind == "one"}

    def inputs(self, catalogue: Catalogue) -> Tree:
        rows = super().inputs(catalogue)
        for name, column in self._categories(catalogue).items():
            rows[f"category/{name}"] = torch.cat([column.values, torch.full_like(column.values[:1], -1)])
        return rows

    def start(self, catalogue: Catalogue, rng: Rng, words: Tensor | None = None) -> Tree:
        table, d, device = self._table(words), self.d, rng.key.device
        shared: Tree = {"news/word": table}
        for name in self.texts(catalogue):
            view = f"news/{name}"
            shared[f"{view}/filter"] = glorot(rng.fold(view), WINDOW * table.shape[1], d)
            shared[f"{view}/offset"] = torch.zeros(d, device=device)
            shared |= pooling(rng, f"{view}/pool", d, self.query)
        for name, column in self._categories(catalogue).items():
            view = f"news/{name}"
            shared[f"{view}/table"] = 0.1 * rng.fold(view, "table").normal(column.size, CATEGORY_WIDTH)
            shared[f"{view}/weight"] = glorot(rng.fold(view), CATEGORY_WIDTH, d)
            shared[f"{view}/offset"] = torch.zeros(d, device=device)
        return shared | pooling(rng, "news/views", d, self.query)

    def content(self, shared: Tree, given: Mapping[str, Tensor]) -> Tensor:
        views, there = [], []
        for name in (name.removeprefix("words/") for name in given if name.startswith("words/")):
            vectors, real = self._vectors(shared, given, name)
            seen = convolved(vectors, shared[f"news/{name}/filter"], shared[f"news/{name}/offset"]).relu()
            views.append(pooled(_seen(seen, given, f"keep/seen/{name}"), shared, f"news/{name}/pool", real))
            there.append(real.any(-1))
        for name in (name.removeprefix("category/") for name in given if name.startswith("category/")):
            code = given[f"category/{name}"]
            rows = looked_up(shared[f"news/{name}/table"], code)
            views.append((rows @ shared[f"news/{name}/weight"] + shared[f"news/{name}/offset"]).relu())
            there.append(code >= 0)
        return pooled(torch.stack(views, -2), shared, "news/views", torch.stack(there, -1))


@dataclass(frozen=True)
class PLM(NewsEncoder):
    """One layer on the vectors that a language model has of titles.

    layers: how many of the language model's own layers, from the top, are trained too. Without any, its inputs are
    `plm` (N + 1, 384), the finished vectors; else `plm/states` (N + 1, T, 384), what the layers below make of each
    piece of a title, and `plm/real`. See `homebody.text_vectors`, which computes them.
    axes: whether the layer starts with the principal axes of the texts' vectors, not at random: what news have in
    common is left out from the start, and little of what tells them apart is lost.

    >>> encoder = PLM(d=4)
    >>> encoder.encode(encoder.start(Catalogue(2), Rng.of(0)), {"plm": torch.ones(5, 384)}).shape
    torch.Size([5, 4])
    """

    title: str = "title"
    layers: int = 0
    axes: bool = False

    user: ClassVar[str] = "mean"

    @property
    def light(self) -> bool:  # type: ignore[override]
        return not self.layers

    @property
    def trained(self) -> range:
        """The numbers of the language model's layers that are trained."""
        return range(LAYERS - self.layers, LAYERS)

    def inputs(self, catalogue: Catalogue) -> Tree:
        raise HomebodyError("The encoder plm reads a language model's vectors: see homebody.text_vectors.news_inputs.")

    def start(self, catalogue: Catalogue, rng: Rng, words: Tensor | None = None) -> Tree:
        """words: the language model's vectors (N, 384) of all texts, where the layer starts with their axes."""
        weight = glorot(rng.fold("news/weight"), WIDTH, self.d)
        if words is None:
            return {"news/weight": weight, "news/offset": torch.zeros(self.d, device=rng.key.device)}
        mean, axes = principal_axes(words, self.d)
        weight = torch.cat([STRETCH * axes, weight[:, axes.shape[1] :]], 1)
        return {"news/weight": weight, "news/offset": -(mean @ weight)}

    def masks(self, rng: Rng, rate: float, given: Mapping[str, Tensor]) -> Tree:
        count = len(next(iter(given.values())))
        return {"keep/plm": dropout_mask(rng.fold("plm"), rate, count, WIDTH)}

    def room(self, given: Mapping[str, Tensor]) -> int:
        pieces = given["plm/real"].shape[-1] if self.layers else 0
        return super().room(given) + self.layers * pieces * (24 * WIDTH + 3 * HEADS * pieces)

    def content(self, shared: Tree, given: Mapping[str, Tensor]) -> Tensor:
        if self.layers:
            own = {name.removeprefix("news/"): value for name, value in shared.items() if "encoder.layer" in name}
            states, real = given["plm/states"], given["plm/real"]
            text, there = whole(through_layers(own, states, real, self.trained), real), real.any(-1, keepdim=True)
        else:
            text, there = given["plm"], (given["plm"] != 0).any(-1, keepdim=True)
        vectors = _seen(text, given, "keep/plm") @ shared["news/weight"] + shared["news/offset"]
        return torch.where(there, vectors, 0.0)


def encode_many(
    encoder: NewsEncoder, shared: Tree, given: Mapping[str, Tensor], at_once: int = 128
) -> tuple[Tensor, Callable[[Tensor], Tree]]:
    """The vectors (n, d) of many news items, and what turns the gradient in them into that in the parameters `news/…`.

    Where they would take too much memory, those of a part are encoded together, and once more for the gradient: the
    memory holds one part at a time.

    >>> encoder, three = NewsById(d=2), Catalogue(3)
    >>> shared = encoder.start(three, Rng.of(0))
    >>> vectors, slopes = encode_many(encoder, shared, encoder.inputs(three), at_once=2)
    >>> slopes(torch.ones_like(vectors))["news/item"].tolist()
    [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    """
    own = {name: value for name, value in shared.items() if name.startswith("news/")}
    count = len(next(iter(given.values())))
    if count * (encoder.room(given) + encoder.ids * encoder.d) <= KEPT:
        whole, pull = vjp(lambda parameters: encoder.encode(parameters, given), own)[:2]
        return whole.detach(), lambda slope: pull(slope)[0]
    parts = [slice(first, first + at_once) for first in range(0, count, at_once)]

    def rows(part: slice) -> dict[str, Tensor]:
        return {name: value[part] for name, value in given.items()}

    def slopes(slope: Tensor) -> Tree:
        total = {name: torch.zeros_like(value) for name, value in own.items()}
        for part in parts:
            some = rows(part)
            pull = vjp(lambda parameters, some=some: encoder.encode(parameters, some), own)[1]
            (change,) = pull(slope[part])
            for name, value in change.items():
                total[name] += value
        return total

    with torch.no_grad():
        vectors = [encoder.encode(own, rows(part)) for part in parts]
    return torch.cat(vectors), slopes


def filled(news: Tensor, real: Tensor, pad: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A history's vectors (…, L, d) with the padding news r₀ where one is hidden, and which places count.

    Padding of a simulation counts for nothing. Somebody without any news has one: r₀.

    >>> news, real = filled(torch.ones(2, 1), torch.tensor([False, False]), torch.tensor([7.0]))
    >>> news.tolist(), real.tolist()
    ([[7.0], [7.0]], [True, False])
    """
    shown = real if hidden is None else real & ~hidden
    first = torch.arange(real.shape[-1], device=real.device) == 0
    counts = real | (first & ~real.any(-1, keepdim=True))
    return torch.where(shown[..., None], news, pad), counts


@dataclass(frozen=True)
class UserEncoder(ABC):
    """From the vectors of a history's news (…, L, d) to the reader's own (…, d)."""

    d: int = 400

    @abstractmethod
    def start(self, rng: Rng) -> Tree:
        """The parameters."""

    @abstractmethod
    def encode(self, shared: Tree, news: Tensor, real: Tensor) -> Tensor:
        """The reader, given which places of the history count; see `filled`."""


@dataclass(frozen=True)
class MeanUser(UserEncoder):
    """The mean of the news: without parameters.

    >>> MeanUser(d=1).encode({}, torch.tensor([[2.0], [4.0], [9.0]]), torch.tensor([True, True, False])).tolist()
    [3.0]
    """

    def start(self, rng: Rng) -> Tree:
        return {}

    def encode(self, shared: Tree, news: Tensor, real: Tensor) -> Tensor:
        weight = real.to(news.dtype)
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=1)
        return (weight[..., None, :] @ news).squeeze(-2)


@dataclass(frozen=True)
class NAMLUser(UserEncoder):
    """Additive attention over the news."""

    query: int = 200

    def start(self, rng: Rng) -> Tree:
        return pooling(rng, "user/pool", self.d, self.query)

    def encode(self, shared: Tree, news: Tensor, real: Tensor) -> Tensor:
        return pooled(news, shared, "user/pool", real)


@dataclass(frozen=True)
class NRMSUser(NAMLUser):
    """Self-attention among the news, then additive attention."""

    heads: int = 20

    def __post_init__(self) -> None:
        _refuse_heads(self.d, self.heads)

    def start(self, rng: Rng) -> Tree:
        return {"user/attention": _attention(rng.fold("user/attention"), self.d, self.d), **super().start(rng)}

    def encode(self, shared: Tree, news: Tensor, real: Tensor) -> Tensor:
        return super().encode(shared, attended(news, shared["user/attention"], self.heads, real), real)


def _attention(rng: Rng, low: int, d: int) -> Tensor:
    return torch.cat([glorot(rng.fold(part), low, d) for part in range(3)], 1)


def _refuse_heads(d: int, heads: int) -> None:
    if heads < 1 or d % heads:
        raise HomebodyError(f"{d} numbers cannot be shared out among {heads} heads: choose a divisor of {d}.")


ENCODERS: dict[str, type[NewsEncoder]] = {"id": NewsById, "nrms": NRMS, "naml": NAML, "plm": PLM}
USER_ENCODERS: dict[str, type[UserEncoder]] = {"mean": MeanUser, "naml": NAMLUser, "nrms": NRMSUser}
