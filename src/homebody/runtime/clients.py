"""Clients at work in this process, many at once: all those of a simulation, or the people of one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from homebody.core import Batch, Data, Evaluated, Method, Rows, Tree, Update, Users, written
from homebody.data.splits import Split
from homebody.errors import HomebodyError
from homebody.evaluation import CUTOFFS, Block, Question, questions, sliced, summarise
from homebody.privacy import Channel
from homebody.rng import Rng
from homebody.runtime.locals import LocalStore

__all__ = ["SAMPLES_AT_ONCE", "Clients", "usable_device"]

SAMPLES_AT_ONCE = 1 << 15
"""Padded interactions that clients work on together: large enough to be fast, small enough for caches."""
SCORES_AT_ONCE = 1 << 21
USERS_AT_ONCE = 24
"""Scored together at least, however large the catalogue."""
CACHED_BYTES = 256 << 20
"""Evaluation asks the same questions every round; they are kept up to this size."""


class Asked(NamedTuple):
    """Clients of similar length that are scored together."""

    users: Users
    data: tuple[Tensor, ...]
    questions: dict[str, Question]


class Clients:
    """Works for the clients of a split, vectorised over those of similar length; what becomes of it, others say.

    fused: use a method's own kernels where it has them; otherwise `client` under vmap.
    cutoffs, slices: which metrics `evaluate` gives, and for which groups of users beside everyone.
    """

    stream: type[Rng] = Rng
    """How a client draws its random numbers."""

    def __init__(
        self,
        split: Split,
        *,
        device: str = "cpu",
        fused: bool = True,
        cutoffs: Sequence[int] = CUTOFFS,
        slices: Sequence[str] = (),
    ) -> None:
        self.split = split
        self._cutoffs, self._slices = cutoffs, sliced(split.population, slices)
        self.device = usable_device(device)
        self.fused = fused
        self.catalogue = split.catalogue(self.device)
        self._features = {
            name: torch.from_numpy(column.values).to(self.device)
            for name, column in split.encoded["users"].columns.items()
        }
        self._members = np.flatnonzero(split.learn & (split.lengths > 0))
        self._store = LocalStore(split.lengths, np.union1d(self._members, split.asked()))
        self._rng = Rng.of(0)
        self._base_step = np.full(split.n_users, -1, dtype=np.int64)
        self._bases: dict[int, Tree] = {}
        self._kept: list[Asked] | None = None

    def begin(self, method: Method, rng: Rng) -> None:
        self._store.clear()
        self._rng = self._own(rng)
        self._base_step[:] = -1
        self._bases.clear()

    def message(self, method: Method, shared: Tree, user: int, rng: Rng) -> Update:
        """What one client would send in this round, after its half of the channel; nothing is kept of it."""
        update, *_ = self._work(method, shared, np.array([user]), None, self._own(rng))
        alone: Update = torch.utils._pytree.tree_map(lambda leaf: leaf[0], update)
        return alone

    def requests(self, method: Method, users: Users, rng: Rng) -> Iterator[tuple[Users, dict[str, Tensor]]]:
        """Which rows these clients would ask the server for in this round, in groups of clients; -1 pads."""
        rng = self._own(rng)
        for some, width in self._store.groups(users, SAMPLES_AT_ONCE):
            streams = self._streams(rng, some)
            yield some, vmap(method.asks)(self._batches(method, streams, self._data(some, width)))

    def _own(self, rng: Rng) -> Rng:
        """A stream that was handed in, as these clients draw from it and where they compute."""
        return self.stream(rng.key.to(self.device))

    def _streams(self, rng: Rng, users: Users) -> Rng:
        """A stream for each of these clients."""
        return rng.fold(self._tensor(self.split.numbered(users)))

    def _work(
        self, method: Method, shared: Tree, users: Users, width: int | None, rng: Rng, *, noise: bool = True
    ) -> tuple[Update, Tree, dict[str, Tensor]]:
        """A round of some clients: what leaves each of them, what it keeps, and which rows it asks for.

        noise: whether the devices add theirs; otherwise it must be added to their sum.
        """
        fused = self.fused and method.kernel_of("client", "cohort")
        work = method.cohort if fused else partial(Method.cohort, method)
        streams = self._streams(rng, users)
        data = self._data(users, width, avoided=method.draws_negatives)
        batches = self._batches(method, streams, data)
        update, kept = work(shared, self._locals(method, shared, users), batches)
        channel = method.uplink
        update = self._leave(channel, update, streams, noise=noise) if channel.stages else written(update)
        return update, kept, vmap(method.asks)(batches) if channel.asks else {}

    def _leave(self, channel: Channel, update: Update, streams: Rng, *, noise: bool) -> Update:
        """What these clients' updates become on their way out."""
        own = streams.private.fold("uplink")
        if noise and channel.samples and any(not isinstance(one, Tensor | Rows) for one in update.values()):
            return channel.devices(update, own)
        half = channel.device if noise else channel.before_noise
        left: Update = vmap(lambda key, one: half(one, Rng(key)))(own.key, written(update))
        return left

    def _batches(self, method: Method, streams: Rng, data: tuple[Tensor, ...]) -> Batch:
        """What clients work on in a round, or to adapt."""

        def prepare(key: Tensor, *own: Tensor) -> Batch:
            return method.prepare(self._client_data(*own), self.stream(key))

        prepared: Batch = vmap(prepare)(streams.key, *data)
        return prepared

    def evaluate(self, method: Method, shared: Tree) -> Evaluated:
        everything = torch.arange(self.catalogue.n_items, device=self.device)
        blocks = (
            Block(users, self._scores(method, shared, users, data, everything), asked)
            for users, data, asked in self._asked()
        )
        return summarise(blocks, self._cutoffs, self._slices)

    def recommend(self, method: Method, shared: Tree, user: int, k: int) -> list[tuple[int, float]]:
        if not 0 <= user < self.split.n_users:
            raise HomebodyError(f"There is no user {user}: users are numbered 0 to {self.split.n_users - 1}.")
        users = np.array([user])
        everything = torch.arange(self.catalogue.n_items, device=self.device)
        scores = self._scores(method, shared, users, self._data(users), everything)[0].cpu()
        scores[torch.from_numpy(self.split.population.history(user).astype(np.int64))] = -torch.inf
        best = torch.topk(scores, min(k, len(scores)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [(item, score) for item, score in pairs if score > -np.inf]

    def _remember(self, shared: Tree, users: Users, step: int) -> None:
        """These clients will rank with what they trained from; what nobody ranks with any more is let go."""
        self._base_step[users] = step
        self._bases[step] = shared
        in_use = set(np.unique(self._base_step).tolist())
        self._bases = {number: tree for number, tree in self._bases.items() if number in in_use}

    def _tensor(self, users: Users) -> Tensor:
        return torch.from_numpy(users).to(self.device)

    def _data(self, users: Users, width: int | None = None, *, avoided: bool = True) -> tuple[Tensor, ...]:
        """What these clients' devices hold: their interactions, then a column for each feature."""
        padded = (torch.from_numpy(part).to(self.device) for part in self.split.padded(users, width, avoided=avoided))
        return (*padded, *(values[self._tensor(users)] for values in self._features.values()))

    def _client_data(self, items: Tensor, valid: Tensor, excluded: Tensor, *features: Tensor) -> Data:
        return Data(items, valid, excluded, self.catalogue, dict(zip(self._features, features, strict=True)))

    def _locals(self, method: Method, shared: Tree, users: Users) -> Tree:
        """These clients' state; those that join now draw theirs."""
        new = ~self._store.holds(users)
        if new.all():
            return self._fresh(method, shared, users)
        if new.any():
            self._store.put(users[new], self._fresh(method, shared, users[new]))
        return self._store.get(users)

    def _fresh(self, method: Method, shared: Tree, users: Users) -> Tree:
        keys = self._streams(self._rng.fold("local"), users).key
        fresh: Tree = vmap(lambda key: method.init_local(shared, self.stream(key)))(keys)
        return fresh

    def _scores(self, method: Method, shared: Tree, users: Users, data: tuple[Tensor, ...], items: Tensor) -> Tensor:
        """(users, items) as each device would compute them, with the parameters it holds; items in chunks."""
        size = max(1, SCORES_AT_ONCE // len(users))
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        out = torch.empty(0)
        for chosen, tree, locals_ in self._holdings(method, shared, users, data):
            own = [part[chosen] for part in data]
            for number, chunk in enumerate(chunks):
                values: Tensor = vmap(partial(self._score_one, method, tree, chunk))(locals_, *own)
                if values.shape[1:] != chunk.shape:
                    name, found = type(method).__name__, tuple(values.shape[1:])
                    raise HomebodyError(
                        f"{name}.score() must give one number for each of {len(chunk)} items, not {found}."
                    )
                if isinstance(chosen, slice) and len(chunks) == 1:
                    return values
                out = out if len(out) else values.new_empty(len(users), len(items))
                out[chosen, number * size : number * size + len(chunk)] = values
        return out

    def _score_one(self, method: Method, tree: Tree, items: Tensor, local: Tree, *own: Tensor) -> Tensor:
        return method.score(tree, local, self._client_data(*own), items)

    def _holdings(
        self, method: Method, shared: Tree, users: Users, data: tuple[Tensor, ...]
    ) -> Iterator[tuple[slice | Tensor, Tree, Tree]]:
        """Which of these clients rank with which shared and local parameters; a slice stands for all of them."""
        newcomer, guest, returning = -2, -3, -4
        held = self._store.holds(users)
        steps = np.where(held, self._base_step[users], newcomer)
        adapts = ~self.split.learn[users] | (method.scores_from == "adapted")
        adapts &= self.split.lengths[users] > 0
        steps[adapts] = np.where(held[adapts], returning, guest)
        for step in np.unique(steps):
            chosen = np.flatnonzero(steps == step)
            some, where = users[chosen], slice(None) if len(chosen) == len(users) else self._tensor(chosen)
            fresh = step in (newcomer, guest)
            locals_ = self._fresh(method, shared, some) if fresh else self._store.get(some)
            if step in (guest, returning):
                locals_ = self._adapted(method, shared, some, locals_, tuple(part[where] for part in data))
            yield where, self._bases.get(int(step), shared), locals_

    def _adapted(self, method: Method, shared: Tree, users: Users, locals_: Tree, data: tuple[Tensor, ...]) -> Tree:
        """What clients hold once they have adapted to what they have; nothing of it is kept."""
        fused = self.fused and method.kernel_of("adapt", "adapt_cohort")
        work = method.adapt_cohort if fused else vmap(method.adapt, in_dims=(None, 0, 0))
        streams = self._streams(self._rng.fold("adapt"), users)
        adapted: Tree = work(shared, locals_, self._batches(method, streams, data))
        return adapted

    def _asked(self) -> Iterator[Asked]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Asked] = []
        size = 0
        most = max(USERS_AT_ONCE, SCORES_AT_ONCE // self.split.n_items)
        for users, width in self._store.groups(self.split.asked(), SAMPLES_AT_ONCE, most):
            block = Asked(users, self._data(users, width), questions(self.split, users, self.device))
            size += sum(part.nbytes for part in block.data)
            size += sum(part.nbytes for question in block.questions.values() for part in question if part is not None)
            if size <= CACHED_BYTES:
                kept.append(block)
            yield block
        if size <= CACHED_BYTES:
            self._kept = kept


def usable_device(name: str) -> torch.device:
    """The device of this name; refused, in a sentence, where it is not to be had."""
    try:
        device = torch.device(name)
        (torch.zeros(1, device=device) + 1).item()
    except (RuntimeError, AssertionError) as error:
        raise HomebodyError(
            f"The device '{name}' cannot be used here; give --device cpu, or cuda where there is a GPU."
        ) from error
    return device
