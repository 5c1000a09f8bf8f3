"""The contract of the house: what a method is, what leaves a device, who computes.

A *Method* is one paper's mathematics for **one** client. A *Runtime* runs it for many. What a client sends is
an *Update*; it leaves through the method's channel, and the server sees a *Total*. `homebody.fit` is the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree

from homebody.errors import HomebodyError
from homebody.rng import Rng

if TYPE_CHECKING:
    from homebody.privacy.channel import Channel

__all__ = [
    "Batch",
    "Catalogue",
    "Collected",
    "Data",
    "Evaluated",
    "Histories",
    "Method",
    "Phase",
    "Reference",
    "Rows",
    "Runtime",
    "Total",
    "Tree",
    "Update",
    "Users",
    "param",
]


@dataclass(frozen=True)
class Rows:
    """Some rows of a table of `size` rows: what a client touches of a table it never copies.

    An index of -1 marks padding; its value counts for nothing.

    >>> Rows(torch.tensor([2, -1]), torch.tensor([[1.0], [9.0]]), size=3).dense().tolist()
    [[0.0], [0.0], [1.0]]
    """

    index: Tensor
    value: Tensor
    size: int

    def dense(self) -> Tensor:
        """The whole table, zero where there is no row."""
        slot = torch.where(self.index < 0, self.size, self.index)
        table = self.value.new_zeros(self.size + 1, *self.value.shape[1:])
        return table.index_add(0, slot, self.value)[:-1]


def _rebuild(leaves: Iterable[Tensor], size: Any) -> Rows:
    index, value = leaves
    return Rows(index, value, size)


# vmap takes Rows in and out like any other tree.
_pytree.register_pytree_node(
    Rows,
    lambda rows: ([rows.index, rows.value], rows.size),
    _rebuild,
    serialized_type_name="homebody.core.Rows",
)

Tree = dict[str, Any]
"""Named tensors; in updates and local states some may be `Rows` of a table."""
Update = Tree
"""What one client hands to its channel."""
Batch = Tree
"""What one client works on in one round, all its randomness drawn."""
Users = npt.NDArray[np.int64]
"""Numbers of clients."""
T = TypeVar("T")


class Histories(NamedTuple):
    """Everyone's training items in one place, which only a reference ever sees: compressed rows."""

    indptr: npt.NDArray[np.int64]
    items: npt.NDArray[np.int32]
    n_items: int


@dataclass(frozen=True)
class Catalogue:
    """What everyone knows of the items."""

    n_items: int


class Data(NamedTuple):
    """One client's own data, as its device holds it.

    A simulation pads it to a common length, so `valid` says which entries are real; the numbers a method
    computes must not depend on the padding.
    """

    items: Tensor
    """(L,) what this person interacted with, oldest first."""
    valid: Tensor
    """(L,) which of them are real."""
    excluded: Tensor
    """(K,) sorted: what is never drawn as a negative; padded with the size of the catalogue."""
    catalogue: Catalogue


@dataclass(frozen=True)
class Total:
    """What the server sees of a round: the sum over its cohort, and the cohort's planned size."""

    sum: Tree
    clients: int

    @property
    def mean(self) -> Tree:
        return {name: value / self.clients for name, value in self.sum.items()}


@dataclass(frozen=True)
class Phase:
    """One stage of training. Its method's shared parameters begin as those of the same name before it."""

    name: str
    method: Method | None = None
    rounds: int | None = None
    """None: the rounds the run was asked for."""


def param(default: T, doc: str, *, low: float | None = None, high: float | None = None) -> T:
    """A hyper-parameter: a dataclass field that knows its meaning and its bounds."""
    value: Any = field(default=default, metadata={"doc": doc, "low": low, "high": high})
    return value


class Method:
    """One paper's mathematics, written for one client: a frozen dataclass of the paper's hyper-parameters.

    Six functions make a method. `client` is pure and must run under `torch.func.vmap`; all its randomness
    comes from `prepare`. This one learns how popular each item is:

    >>> from homebody.privacy import Channel
    >>> @dataclass(frozen=True)
    ... class Counts(Method):
    ...     uplink: Channel = Channel()
    ...     def init_shared(self, catalogue, rng):
    ...         return {"count": torch.zeros(catalogue.n_items)}
    ...     def init_local(self, shared, rng):
    ...         return {}
    ...     def prepare(self, data, rng):
    ...         return {"index": torch.where(data.valid, data.items, -1)}
    ...     def client(self, shared, local, batch):
    ...         ones = torch.ones_like(batch["index"], dtype=torch.float32)
    ...         return {"count": Rows(batch["index"], ones, len(shared["count"]))}, local
    ...     def server(self, shared, state, total):
    ...         return {"count": total.sum["count"]}, state
    ...     def score(self, shared, local, data, items):
    ...         return shared["count"][items]
    >>> method, three = Counts(), Catalogue(n_items=3)
    >>> mine = Data(torch.tensor([1, 1]), torch.tensor([True, True]), torch.tensor([1]), three)
    >>> shared = method.init_shared(three, Rng.of(0))
    >>> update, _ = method.client(shared, {}, method.prepare(mine, Rng.of(0)))
    >>> update["count"].dense().tolist()
    [0.0, 2.0, 0.0]
    """

    uplink: Channel
    """The way out in training. Each method names its own."""
    query: Channel | None = None
    """The way out when serving; None: ranking stays on the device."""
    scores_from: ClassVar[Literal["latest", "base"]] = "latest"
    """Whether a device ranks with the latest shared parameters, or with those it last trained from."""
    default_rounds: ClassVar[int] = 100
    title: ClassVar[str] = ""
    """One line for people: what it is."""
    paper: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_params(self)

    @property
    def phases(self) -> Sequence[Phase]:
        """The stages of training, in order, all on one ledger."""
        return (Phase("train"),)

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        """What the server holds and sends."""
        raise _missing(self, "init_shared")

    def init_server(self, shared: Tree) -> Tree:
        """What the server keeps for itself: optimiser moments and the like."""
        return {}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        """What a client that joins now holds and never sends.

        An entry `loss` is shown while simulating, and only then.
        """
        raise _missing(self, "init_local")

    def prepare(self, data: Data, rng: Rng) -> Batch:
        """All of a round's randomness: negatives, orders, masks, noise."""
        raise _missing(self, "prepare")

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        """A round on the device: what it sends, and what it keeps."""
        raise _missing(self, "client")

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        """The server's step on what came through the channel."""
        raise _missing(self, "server")

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        """How well each of these items fits this person; on the device."""
        raise _missing(self, "score")

    def adapt(self, shared: Tree, local: Tree, data: Data, rng: Rng) -> Tree:
        """Personalise on the device, sending nothing: by default one round whose update is thrown away."""
        return self.client(shared, local, self.prepare(data, rng))[1]

    def cohort(self, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
        """`client` for many at once, stacked along the first dimension.

        A method may override it with a faster kernel that gives the same numbers, and only for that reason.
        """
        return torch.func.vmap(self.client, in_dims=(None, 0, 0))(shared, locals_, batches)


def _missing(method: object, name: str) -> TypeError:
    return TypeError(f"{type(method).__name__} must define {name}(); see homebody.core.Method.")


class Reference:
    """A centralised recommender to compare with: it collects everyone's history, so its ε is infinite.

    Like a method, a frozen dataclass of hyper-parameters. `fit` gives a function from users to their scores
    for all items.
    """

    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_params(self)

    def fit(self, histories: Histories, seed: int) -> Callable[[Users], Tensor]:
        """Learn from the raw histories."""
        raise _missing(self, "fit")


@dataclass(frozen=True)
class Collected:
    """What one round brought: the total the server sees, and what is counted beside it."""

    total: Total
    bytes_up: int
    bytes_down: int
    loss: float | None = None
    """Mean loss on the devices. Known in a simulation alone."""


@dataclass(frozen=True)
class Evaluated:
    """How good a model is."""

    metrics: dict[str, float]
    """Test under bare names, validation under `valid/`."""
    per_user: Tree = field(default_factory=dict)
    """Where each user's test item stood: known in a simulation alone."""


class Runtime(Protocol):
    """Who computes. `fit` asks it for clients, sends them work, and gets back totals; never one client's data."""

    catalogue: Catalogue
    device: torch.device

    def available(self) -> Users:
        """The clients that could take part now."""

    def begin(self, method: Method, rng: Rng) -> None:
        """Start a phase: no client holds any state yet; each draws its own from `rng` when it joins."""

    def collect(self, method: Method, shared: Tree, cohort: Users, rng: Rng, step: int) -> Collected:
        """One round: every client of the cohort works, its update leaves through the method's channel."""

    def evaluate(self, method: Method, shared: Tree) -> Evaluated:
        """How well every client is served by what it holds."""

    def recommend(self, method: Method, shared: Tree, user: int, k: int) -> list[tuple[int, float]]:
        """A client's best items that it does not have yet, with their scores; found on its device."""

    def state(self) -> Tree:
        """Every client's state, for a checkpoint or to come back to. Later rounds leave it as it is."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""


def check_params(owner: Any) -> None:
    """Refuse a hyper-parameter of the wrong type or out of its bounds, in a sentence."""
    for spec in fields(owner):
        if "doc" not in spec.metadata or spec.default is MISSING:
            continue
        value, low, high = getattr(owner, spec.name), spec.metadata["low"], spec.metadata["high"]
        wanted = type(spec.default)
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
            object.__setattr__(owner, spec.name, value)
        if type(value) is not wanted:
            raise HomebodyError(f"{spec.name} must be {_kind(wanted)}, not {value!r}.")
        if wanted is float and not np.isfinite(value):
            raise HomebodyError(f"{spec.name} must be a finite number, not {value}.")
        if low is not None and value < low:
            raise HomebodyError(f"{spec.name} must be at least {low}, not {value}.")
        if high is not None and value > high:
            raise HomebodyError(f"{spec.name} must be at most {high}, not {value}.")


def _kind(wanted: type) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(wanted, f"a {wanted.__name__}")
