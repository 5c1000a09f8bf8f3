"""The contract of the house: what a method is, what leaves a device, who computes.

A *Method* is one paper's mathematics for **one** client. A *Runtime* runs it for many. What a client sends is
an *Update*; it leaves through the method's channel, and the server sees a *Total*. `homebody.training` is the loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree

from homebody.errors import HomebodyError, in_short, refuse_unknown
from homebody.rng import Rng
from homebody.settings import check_params, param, params

if TYPE_CHECKING:
    from homebody.privacy import Channel, Charge

__all__ = [
    "WHOLE",
    "About",
    "Batch",
    "Catalogue",
    "Cohort",
    "Collected",
    "Column",
    "Computed",
    "Data",
    "Evaluated",
    "Method",
    "Newcomer",
    "Opened",
    "Phase",
    "Recommended",
    "Recommender",
    "Rows",
    "Runtime",
    "Scoring",
    "Shown",
    "Stateless",
    "Total",
    "Tree",
    "Update",
    "Users",
    "Work",
    "gram",
    "param",
    "plain_work",
    "releases",
    "ships",
    "stated_by",
    "table_size",
    "written",
]


Tree = dict[str, Any]
"""Named tensors, flat; in updates and local states some may be `Rows` of a table."""
Update = Tree
"""What one client hands to its channel. By convention update[name] is a change of shared[name]."""
Batch = dict[str, Tensor]
"""What one client works on in one round, all its randomness drawn."""
Users = npt.NDArray[np.int64]
"""Numbers of clients."""
CALL = 50_000
"""Operations that one call on tensors counts as, however small they are: about 50 µs on a slow device."""
HEAD_BYTES = 4_096
"""An upper bound on the bytes that the names and shapes of an update take."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a table of `size` rows: what a client touches of a table it never copies.

    Rows of the same index add up. An index of -1 marks padding; its value counts for nothing.

    >>> Rows(torch.tensor([2, 2, -1]), torch.tensor([[1.0], [2.0], [9.0]]), size=3).dense().tolist()
    [[0.0], [0.0], [3.0]]
    """

    index: Tensor
    value: Tensor
    size: int

    def dense(self) -> Tensor:
        """The whole table, zero where there is no row."""
        return _summed(torch.where(self.index < 0, self.size, self.index), self.value, self.size + 1)[:-1]

    def coalesced(self) -> Rows:
        """The same table with each index once, in ascending order, and padding behind them.

        >>> rows = Rows(torch.tensor([2, 0, 2, -1]), torch.tensor([1.0, 5.0, 2.0, 9.0]), size=3).coalesced()
        >>> rows.index.tolist(), rows.value.tolist()
        ([0, 2, -1, -1], [5.0, 3.0, 0.0, 0.0])
        """
        if not self.index.shape[0]:
            return self
        ordered, origin = torch.where(self.index < 0, self.size, self.index).sort(stable=True)
        new = torch.cat([torch.ones_like(ordered[:1]), (ordered[1:] != ordered[:-1]).to(ordered.dtype)])
        place = new.cumsum(0) - 1
        value = self.value[origin]
        real = (ordered < self.size).view(-1, *[1] * (value.dim() - 1))
        # Each place is written by rows of one index alone, so whichever comes last writes the same.
        index = torch.full_like(ordered, self.size).scatter(0, place, ordered)
        return Rows(
            torch.where(index < self.size, index, -1),
            _summed(place, torch.where(real, value, 0), len(ordered)),
            self.size,
        )


def _summed(slot: Tensor, value: Tensor, places: int) -> Tensor:
    """(places, …) with each row of `value` added at its slot; in an order that is always the same, also under vmap."""
    table = value.new_zeros(places, *value.shape[1:])
    if value.device.type == "cpu":
        return table.scatter_add(0, slot.view(-1, *[1] * (value.dim() - 1)).expand_as(value), value)
    return table.index_put((slot,), value, accumulate=True)  # it sorts first


def _rebuild(leaves: Iterable[Tensor], size: Any) -> Rows:
    index, value = leaves
    return Rows(index, value, size)


# vmap takes Rows in and out like any other tree.
_pytree.register_pytree_node(
    Rows, lambda rows: ([rows.index, rows.value], rows.size), _rebuild, serialized_type_name="homebody.core.Rows"
)


WHOLE = "whole/"
"""Begins the names of what a part of the shared parameters says of the whole: see `table_size` and `gram`."""


def table_size(shared: Tree, name: str = "item") -> int:
    """How many rows a table has, also where only some of its rows are here: then `whole/size` says it.

    >>> table_size({"item": torch.zeros(3, 2)}), table_size({"item": torch.zeros(3, 2), "whole/size": torch.tensor(9)})
    (3, 9)
    """
    whole = shared.get(f"{WHOLE}size")
    return len(shared[name]) if whole is None else int(whole)


def gram(shared: Tree, name: str = "item") -> Tensor:
    """The sum of the outer products of a table's rows, also where only some of its rows are here: `whole/gram`."""
    whole: Tensor | None = shared.get(f"{WHOLE}gram")
    return shared[name].T @ shared[name] if whole is None else whole


@runtime_checkable
class Computed(Protocol):
    """The tables of several clients, each worked out only where it is looked at: whole they would take too much room.

    A fused kernel may give one in the place of a stacked tensor; it is the same numbers.
    """

    shape: tuple[int, ...]
    """Of one client's table."""

    def at(self, entries: Tensor) -> Tensor:
        """Each client's values, (clients, k), at these places (clients, k) of its flattened table."""

    def dense(self) -> Tensor:
        """All of it: (clients, *shape)."""


def written(update: dict[str, Any]) -> dict[str, Any]:
    """Stacked updates with every formula worked out."""
    return {name: value if isinstance(value, Tensor | Rows) else value.dense() for name, value in update.items()}


@dataclass(frozen=True)
class Work:
    """Upper bounds on the resources that a task takes on a device, known before it starts.

    >>> Work(8, 100, 4) + Work(2, 50, 1)
    Work(memory=10, operations=150, bytes=5, ranking=0)
    """

    memory: int = 0
    """Bytes held at once."""
    operations: int = 0
    """Arithmetic operations."""
    bytes: int = 0
    """Bytes that are sent."""
    ranking: int = 0
    """Of the operations, those that ranking afterwards takes: the answer to a round does not wait for them."""

    @classmethod
    def of(cls, held: int, operations: int, calls: int, sent: int) -> Work:
        """For a client that holds and sends so many numbers of 4 bytes, and makes so many calls on tensors."""
        return cls(4 * held, operations + calls * CALL, 4 * sent + HEAD_BYTES)

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


class Column(NamedTuple):
    """One feature as numbers, a row for each item or user; values that training never saw are unknown.

    - one: (N,) codes below `size`; 0 is unknown.
    - many: (N, W) codes below `size`, then -1.
    - number: (N,) standardised; 0, the mean, where it is missing.
    - sequence: (N, W) codes below `size` in the order of a text's words, then -1; 0 is an unknown word.
    """

    values: Tensor
    size: int
    kind: Literal["one", "many", "number", "sequence"]
    text: bool = False
    """Whether the codes are words of a text, so that there may be very many."""
    view: str = ""
    """The view that holds it, if any: which app of a person's. Only features of people are in views."""
    words: tuple[str, ...] = ()
    """Of a sequence: the word of code c is in place c - 1."""
    texts: tuple[str, ...] = ()
    """Of a sequence: each item's text as the data has it, where the data is at hand; "" where an item has none."""

    def __repr__(self) -> str:
        return f"<Column of kind {self.kind}: {len(self.values):,} rows, size {self.size:,}>"

    @property
    def several(self) -> bool:
        """Whether a row has several codes, then -1."""
        return self.kind in ("many", "sequence")

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.values.shape[1] if self.several else 1


@dataclass(frozen=True, eq=False)
class Catalogue:
    """What everyone knows: the items, their features, and which features people and interactions have."""

    n_items: int
    items: Mapping[str, Column] = field(default_factory=dict)
    """The items' features, by name."""
    people: Mapping[str, Column] = field(default_factory=dict)
    """The users' features, by name: sizes and kinds alone; the values stay with each user (`Data.features`)."""
    contexts: Mapping[str, Column] = field(default_factory=dict)
    """The circumstances of interactions, likewise (`Data.contexts`)."""

    def __repr__(self) -> str:
        known = {"items": self.items, "people": self.people, "circumstances": self.contexts}
        about = [f"{name}: {', '.join(columns)}" for name, columns in known.items() if columns]
        return f"<Catalogue: {'; '.join([f'{self.n_items:,} items', *about])}>"

    @property
    def views(self) -> dict[str, tuple[str, ...]]:
        """The names of each view's columns of `people`. Views and columns stand in the order of the data.

        >>> age, taste = Column(torch.empty(0), 1, "number", view="profile"), Column(torch.empty(0), 1, "number")
        >>> Catalogue(3, {}, {"age": age, "taste.1": taste._replace(view="taste")}).views
        {'profile': ('age',), 'taste': ('taste.1',)}
        """
        columns: dict[str, tuple[str, ...]] = {}
        for name, column in self.people.items():
            if column.view:
                columns[column.view] = (*columns.get(column.view, ()), name)
        return columns


class Shown(NamedTuple):
    """The impressions that one client learns from: what it was shown, and what of it was clicked.

    A simulation pads both dimensions. An impression that is padding shows nothing: its row has no real item and no
    click. There is always at least one row and one column, real or not.
    """

    items: Tensor
    """(I, C) the items of each impression, in the order in which the source lists them; `n_items` pads."""
    clicked: Tensor
    """(I, C) which of them were clicked; False for padding."""
    before: Tensor
    """(I,) how many entries of `Data.items` came before each impression: it may read `Data.items[:before]`."""


class Data(NamedTuple):
    """One client's own data, as its device holds it.

    A simulation pads it to a common length, so `valid` says which entries are real; the numbers a method
    computes must not depend on the padding, which holds item 0.
    """

    items: Tensor
    """(L,) the items that this person interacted with, oldest first."""
    valid: Tensor
    """(L,) which of them are real."""
    excluded: Tensor
    """(K,) the items that are never drawn as negatives, sorted; padded with the size of the catalogue."""
    catalogue: Catalogue
    features: Mapping[str, Tensor] = MappingProxyType({})
    """This person's row of each feature that `catalogue.people` names."""
    contexts: Mapping[str, Tensor] = MappingProxyType({})
    """The circumstances of each interaction, (L,) or (L, W), as `catalogue.contexts` names them."""
    ratings: Tensor | None = None
    """(L,) this person's ratings, if the method uses ratings."""
    now: Mapping[str, Tensor] = MappingProxyType({})
    """The circumstances in which items are ranked; empty if nothing is known of them."""
    shown: Shown | None = None
    """The impressions to learn from, if the method needs or uses impressions and the split learns from some."""


@dataclass(frozen=True)
class Newcomer:
    """A person who took no part in training, as they describe themselves."""

    items: Sequence[int] = ()
    """Their items, oldest first."""
    features: Mapping[str, object] = field(default_factory=dict)
    """Their features; missing ones are unknown."""
    now: Mapping[str, object] = field(default_factory=dict)
    """The circumstances in which they ask."""
    ratings: Sequence[float] | None = None
    """Their rating of each item."""


class Recommended(NamedTuple):
    """The best items that a person does not have, with their scores, and notes on what was unknown or ignored."""

    items: list[tuple[int, float]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cohort:
    """Who takes part in a round, and how they were sampled: accounting depends on it."""

    users: Users
    sampling: Literal["all", "fixed"]
    """Everyone, or a fixed number drawn without replacement."""
    size: int
    """The planned number of clients. Means divide by it, whoever answers."""
    population: int
    items: int = 0
    """The number of items, for methods whose clients report on each; 0: not stated."""
    devices: int = 0
    """How many devices these people are on, who add up between them in a secure sum; 0: each is on one of their own."""
    divided: bool = True
    """Whether what the server computes depends on how many there are: see `About.divides`."""

    @property
    def parties(self) -> int:
        """How many parties a secure sum of the round has."""
        return self.devices or self.size


@dataclass(frozen=True)
class Total:
    """What the server sees of a round: the sum over its cohort, and the cohort's planned size."""

    sum: Tree
    clients: int
    told: Tree = field(default_factory=dict)
    """If devices report single entries: the mean of the reports on each entry, or of the whole table's for an entry
    without any. The number of reports on an entry is random. The sum assumes the expected number, and inherits that
    error."""
    messages: Tree = field(default_factory=dict)
    """If the server reads each message (`Stage.reads`) and needs them one by one: all of them, stacked."""
    catalogue: Catalogue | None = None
    """The items, as everyone knows them; `fit` fills it in."""

    @property
    def mean(self) -> Tree:
        return {name: value / self.clients for name, value in self.sum.items()}


@dataclass(frozen=True)
class About:
    """What people and runtimes know of a method or reference before it runs.

    A subclass changes some of it by `replace`:

    >>> from dataclasses import replace
    >>> replace(About("matrix factorisation", rounds=50), title="with a bias").rounds
    50
    """

    title: str = ""
    """What it is, in one line."""
    paper: str = ""
    """Authors, title, venue and year."""
    rounds: int = 100
    """Rounds of training, or passes of a reference, by default."""
    cohort: int | None = None
    """Clients a round, by default; None: everyone."""
    evaluate_every: int = 1
    """Rounds from one evaluation to the next, by default: more for methods that are slow to evaluate."""
    diagnostic: bool = False
    """Whether it demonstrates something and is not meant to recommend: a leaderboard has it only if it is named."""
    draws_negatives: bool = True
    """Whether it reads `Data.excluded`; if not, a simulation leaves that empty in training."""
    sends: bool = True
    """Whether its clients send anything; if not, an update is empty, and nothing is charged."""
    divides: bool = True
    """Whether the server's step reads how many took part, such as to divide a sum by it. If not, somebody who leaves
    changes the sum by what they sent and nothing else."""
    dense: bool = False
    """Whether an update is as large as the shared parameters: a simulation computes fewer clients at once."""


class Scoring(NamedTuple):
    """What scores are, and what a device computes them from."""

    predicts: Literal["ranking", "ratings", "clicks"] = "ranking"
    """How well items fit, which orders them; the ratings that a person would give; or what they click among what they
    are shown."""
    parameters: Literal["latest", "base", "adapted"] = "latest"
    """The latest shared parameters; those that the device last trained from; or the latest, after `adapt`."""
    numbers: int = 1
    """How many numbers `score` holds at once for an item, roughly: a simulation scores so many fewer together."""
    adapts: bool = True
    """Whether somebody whom training never met adapts before they rank; if not, `score` reads all that there is."""

    @property
    def select(self) -> str:
        """The metric that the round is chosen by, by default."""
        return {"ratings": "valid/rmse", "clicks": "valid/impressions/auc"}.get(self.predicts, "valid/ndcg@10")


class _FieldSignature:
    """The signature that help and completion show: the fields, not what `__new__` takes."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        whole = inspect.signature(owner.__init__)  # type: ignore[misc]  # of the class itself
        return whole.replace(parameters=[*whole.parameters.values()][1:])


class Recommender:
    """What methods and references have in common: a frozen dataclass of the paper's hyper-parameters."""

    about: ClassVar[About] = About()
    needs: ClassVar[tuple[str, ...]] = ()
    """What the data must have: ratings, times, user features, item features, impressions."""
    uses: ClassVar[tuple[str, ...]] = ()
    """What it reads if the data has it: as `needs`, contexts, and texts among the features."""

    __signature__: ClassVar[Any] = _FieldSignature()

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        # The TypeError of a dataclass would not say which fields there are.
        taken = cls.__signature__.parameters
        if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
            refuse_unknown(f"field of {cls.__name__}", settings, taken)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_params(self)

    @property
    def scoring(self) -> Scoring:
        """What its scores are."""
        return Scoring()

    @property
    def phases(self) -> Sequence[Phase]:
        """The phases of federated training, in order, all on one ledger; a reference has none."""
        return ()


class Method(Recommender):
    """One paper's mathematics, written for one client: a frozen dataclass of the paper's hyper-parameters.

    Six functions make a method. They are pure: they give new trees and write nothing in place. `client` must
    run under `torch.func.vmap`; all its randomness comes from `prepare`. This one learns how popular items are:

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
    """The channel that updates pass in training. Each method declares its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        uplink = getattr(self, "uplink", None)
        if uplink is not None and not hasattr(uplink, "with_stages"):
            example = next((f" Settings go by name, such as {each.name}={each.default}." for each in params(self)), "")
            raise HomebodyError(
                f"The uplink of {type(self).__name__} is a Channel, such as hb.Channel(hb.Clip(1.0)), not "
                f"{in_short(uplink)}.{example}"
            )
        if type(self).asks is Method.asks and getattr(getattr(self, "uplink", None), "asks_rows", False):
            raise HomebodyError(
                f"{type(self).__name__} needs its shared parameters whole and cannot ask for rows: leave out ask-rows."
            )

    @property
    def phases(self) -> Sequence[Phase]:
        return (Phase("train"),)

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        """What the server holds and sends."""
        raise _missing(self, "init_shared")

    def init_server(self, shared: Tree) -> Tree:
        """What the server keeps for itself, such as optimiser moments."""
        return {}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        """The state of a client that joins now; it is never sent."""
        raise _missing(self, "init_local")

    def prepare(self, data: Data, rng: Rng) -> Batch:
        """All of a round's randomness: negatives, orders, masks; noise from `rng.private`."""
        raise _missing(self, "prepare")

    def asks(self, batch: Batch) -> dict[str, Tensor]:
        """The rows of shared tables that a round reads, each once, padded with -1. Empty: it reads whole tables."""
        return {}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        """A round on the device: what it sends, and what it keeps.

        It never raises, whatever numbers it is given: a failure would reveal something of the data. An update that is
        not finite leaves a device as zeros. If it keeps a `loss`, a simulation shows the mean; a real device does not
        send it.
        """
        raise _missing(self, "client")

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        """The server's step on the total that came through the channel; `state` is that of `init_server` at first."""
        raise _missing(self, "server")

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        """How well each of these items fits this person, computed on the device."""
        raise _missing(self, "score")

    def adapt(self, shared: Tree, local: Tree, batch: Batch) -> Tree:
        """Personalise on the device without sending anything: by default one round whose update is discarded."""
        return self.client(shared, local, batch)[1]

    def takes_in(self, catalogue: Catalogue) -> tuple[str, ...]:
        """The features of people and circumstances that it reads: all of them, if it needs or uses any."""
        taken = (*self.needs, *self.uses)
        people = catalogue.people if "user features" in taken else ()
        return (*people, *(catalogue.contexts if "contexts" in taken else ()))

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        """Upper bounds for a client with `longest` interactions: a round, adapting and ranking, without its channel.

        It reads the catalogue's sizes, never its values. The default holds for a client that passes over its data and
        the shared parameters a fixed number of times; it has torch work out the parameters' shapes, which is slow at
        first. A method overrides it if its fields say how often a client passes over them, or if a client holds more
        than a few copies of them; `plain_work` is the default for a known number of shared parameters.
        """
        with torch.device("meta"):  # only shapes are worked out
            shared = self.init_shared(catalogue, Rng.of(0, device="meta"))
        return plain_work(sum(value.numel() for value in shared.values()), catalogue, longest)

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        """What one round tells each observer: what its channel derives, unless the method states it."""
        if not self.about.sends:
            return ()
        return self.uplink.charges(replace(cohort, divided=self.about.divides))


class Stateless(Method):
    """A method whose clients begin with nothing of their own."""

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {}


def releases(method: Method, cohort: Cohort) -> Sequence[Charge]:
    """All that one round tells each observer: the method's `charges`, and which rows its devices ask for.

    Charges that Homebody does not derive are a claim, and are charged as not private. A method cannot override this.
    """
    charges = method.uplink.with_requests(method.charges(cohort))
    claimant = stated_by(method)
    return charges if claimant is None else method.uplink.claims(charges, claimant)


def stated_by(method: Method) -> str | None:
    """The method or stage that states its own charges and does not ship with Homebody, or None.

    A class that inherits such `charges`, or says that it sends nothing or reads no number of people, counts too: it may
    tell more.
    """
    kind = type(method)
    says = not method.about.sends or not method.about.divides
    if not ships(kind) and (kind.charges is not Method.charges or says):
        return kind.__name__
    return method.uplink.stated_by


def plain_work(numbers: int, catalogue: Catalogue, longest: int) -> Work:
    """Bounds for a client that passes over its data and so many shared numbers a fixed number of times."""
    width = numbers // max(1, catalogue.n_items) + 1
    touched = numbers + longest * (width + 8)
    return Work.of(16 * touched, 400 * touched, calls=400, sent=numbers + longest * (width + 1))


def ships(kind: type) -> bool:
    """Whether a class comes with Homebody.

    >>> ships(Method), ships(dict)
    (True, False)
    """
    return kind.__module__.partition(".")[0] == "homebody"


def _missing(method: object, name: str) -> HomebodyError:
    return HomebodyError(f"{type(method).__name__} must define {name}(); see homebody.core.Method.")


@dataclass(frozen=True)
class Phase:
    """One phase of training. Its shared parameters start as those of the same name in the phase before."""

    name: str
    method: Method | None = None
    rounds: int | None = None
    """None: the rounds the run was asked for."""
    evaluated: bool = True
    """Whether this phase already ranks items."""
    public: bool = False
    """Whether it learns only from people whose data is public: nothing is charged for it."""
    note: str = ""
    """What readers of a run's record must know of how this phase was set."""


class Opened(NamedTuple):
    """A round that is about to be charged."""

    release: str
    """Its name in the ledger. Each attempt after an abandoned one has a new name."""
    cohort: Cohort
    again: bool
    """Whether it continues a round that was cut short: devices repeat their answers, which reveals nothing more."""


@dataclass(frozen=True)
class Collected:
    """The outcome of one round: the total that the server sees, and what it cost."""

    total: Total
    bytes_up: int
    bytes_down: int
    loss: float | None = None
    """Mean loss on the devices; known only in a simulation."""
    answered: int | None = None
    """How many clients took part; None: the whole cohort."""
    spoiled: Callable[[str], None] | None = None
    """Called with a reason if the server's step fails on this total; set by runtimes whose clients may lie."""


@dataclass(frozen=True)
class Evaluated:
    """How good a model is."""

    metrics: dict[str, float]
    """Test under bare names, validation under `valid/`."""
    per_user: dict[str, Tensor] = field(default_factory=dict)
    """The rank of each user's test item; known only in a simulation."""
    errors: dict[str, float] = field(default_factory=dict)
    """The standard error of each metric to which noise was added."""
    unclipped: dict[str, float] = field(default_factory=dict)
    """The estimates of those metrics that noise carried beyond their range, before they were clipped to it."""
    lists: dict[str, Tensor] = field(default_factory=dict)
    """The first items of each test question's full ranking, best first and padded with -1, as `items` (Q, k), and whose
    they are, as `user` (Q,); known only in a simulation, of the chosen round."""


class Runtime(Protocol):
    """Runs clients. `fit` gives them work and receives totals, never the data of one client."""

    catalogue: Catalogue
    device: torch.device
    simulated: bool
    """Whether a round that is run again gives the same bits, so that it reveals nothing more."""

    def available(self, *, public: bool = False) -> Users:
        """The clients that could take part now. The catalogue may grow during this call.

        public: only people whose data is public; they take part in no other round.
        """

    def begin(self, method: Method, rng: Rng) -> None:
        """Start a phase, or resume it. Clients hold no state until `load_state` or their first round."""

    def open(self, release: str, cohort: Cohort, shared: Tree) -> Opened:
        """The name and cohort of a round that is about to be charged: this cohort, or that of the round cut short."""

    def collect(self, method: Method, shared: Tree, cohort: Cohort, rng: Rng, step: int) -> Collected:
        """Run one round: every client of the cohort works, and its update leaves through the method's channel.

        Raises `Abandoned` if too few clients answer.
        """

    def telemetry(self, method: Method) -> Sequence[Charge]:
        """The charges for what `evaluate` reveals to each observer; none in a simulation."""

    def evaluate(self, method: Method, shared: Tree) -> Evaluated:
        """Metrics of the recommendations that every client computes from the parameters it holds."""

    def recommend(self, method: Method, shared: Tree, user: int, k: int) -> list[tuple[int, float]]:
        """The best new items for a simulated client. Real devices keep their rankings, so their runtime refuses."""

    def recommend_for(self, method: Method, shared: Tree, newcomer: Newcomer, k: int) -> Recommended:
        """The best new items for a person who took no part in training, after adapting to the items they have."""

    def state(self, *, lasting: bool = False) -> dict[str, Tensor]:
        """Every client's state, or a mark that refers to it. Later rounds do not change it.

        lasting: it can be loaded after any number of rounds; otherwise it is for a checkpoint.
        """

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go back to a state that `state` returned."""
