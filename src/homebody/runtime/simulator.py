"""Thousands of clients at once, in this process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from homebody import ops
from homebody.core import Batch, Cohort, Collected, Data, Evaluated, Method, Rows, Total, Tree, Update, Users
from homebody.data.splits import Split
from homebody.errors import HomebodyError
from homebody.evaluation import CUTOFFS, Block, Question, questions, sliced, summarise
from homebody.rng import Rng
from homebody.runtime.locals import LocalStore

__all__ = ["Simulator", "usable_device"]

SAMPLES_AT_ONCE = 1 << 15
"""Padded interactions that clients work on together: large enough to be fast, small enough for caches."""
SCORES_AT_ONCE = 1 << 21
USERS_AT_ONCE = 24
"""Scored together at least, however large the catalogue."""
CACHED_BYTES = 256 << 20
"""Evaluation asks the same questions every round; they are kept up to this size."""
DENSE_BYTES = 64 << 20
"""Of whole tables that clients fill at once, where their channel makes them."""


class Asked(NamedTuple):
    """Clients of similar length that are scored together."""

    users: Users
    data: tuple[Tensor, ...]
    questions: dict[str, Question]


class Simulator:
    """Runs a method for a whole population, vectorised over clients of similar length.

    fused: use a method's own `cohort` kernel where it has one, and draw the noise that devices add as one sum over all
    of them, which has the same distribution; otherwise `client` under vmap, and each device's noise by itself.
    cutoffs, slices: which metrics `evaluate` gives, and for which groups of users beside everyone.
    """

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
        self.simulated = True
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

    def available(self) -> Users:
        return self._members

    def begin(self, method: Method, rng: Rng) -> None:
        self._store.clear()
        self._rng = Rng(rng.key.to(self.device))
        self._base_step[:] = -1
        self._bases.clear()

    def collect(self, method: Method, shared: Tree, cohort: Cohort, rng: Rng, step: int) -> Collected:
        rng = Rng(rng.key.to(self.device))
        sums: Tree = {}
        bytes_up, requests, losses = 0, 0, []
        tables = sum(value.nbytes for value in shared.values())
        bytes_down = tables * len(cohort.users)
        at_once = self.fused and method.uplink.ends_in_noise
        most = max(1, DENSE_BYTES // max(1, tables)) if method.uplink.dense and not at_once else None
        for users, width in self._store.groups(cohort.users, SAMPLES_AT_ONCE, most):
            update, kept, request = self._work(method, shared, users, width, rng, noise=not at_once)
            self._store.put(users, kept)
            if "loss" in kept:
                losses.append(kept["loss"].sum())
            bytes_up += _add(update, sums)
            rows, spared = _asked(request, shared)
            requests, bytes_down = requests + 4 * rows, bytes_down - spared
        if method.scores_from == "base":
            self._remember(shared, cohort.users, step)
        if at_once:
            sums = method.uplink.noise_of_many(sums, len(cohort.users), rng.private.fold("uplink"))
            # Each device would have sent its noise in every coordinate.
            bytes_up = len(cohort.users) * sum(value.nbytes for value in sums.values())
        total = method.uplink.server(Total(sums, cohort.size), rng.private.fold("server"))
        loss = float(sum(losses)) / len(cohort.users) if losses else None
        return Collected(total, bytes_up + requests, bytes_down, loss)

    def message(self, method: Method, shared: Tree, user: int, rng: Rng) -> Update:
        """What one client would send in this round, after its half of the channel; nothing is kept of it."""
        update, *_ = self._work(method, shared, np.array([user]), None, Rng(rng.key.to(self.device)))
        alone: Update = torch.utils._pytree.tree_map(lambda leaf: leaf[0], update)
        return alone

    def requests(self, method: Method, users: Users, rng: Rng) -> Iterator[tuple[Users, dict[str, Tensor]]]:
        """Which rows these clients would ask the server for in this round, in groups of clients; -1 pads."""
        rng = Rng(rng.key.to(self.device))
        for some, width in self._store.groups(users, SAMPLES_AT_ONCE):
            streams = rng.fold(self._tensor(some))
            yield some, vmap(method.asks)(self._batches(method, streams, self._data(some, width)))

    def _work(
        self, method: Method, shared: Tree, users: Users, width: int | None, rng: Rng, *, noise: bool = True
    ) -> tuple[Update, Tree, dict[str, Tensor]]:
        """A round of some clients: what leaves each of them, what it keeps, and which rows it asks for.

        noise: whether the devices add theirs; otherwise it must be added to their sum.
        """
        fused = self.fused and method.kernel_of("client", "cohort")
        work = method.cohort if fused else partial(Method.cohort, method)
        streams = rng.fold(self._tensor(users))
        batches = self._batches(method, streams, self._data(users, width))
        update, kept = work(shared, self._locals(method, shared, users), batches)
        channel = method.uplink
        if channel.stages:
            half = channel.device if noise else channel.before_noise
            keys = streams.private.fold("uplink").key
            update = vmap(lambda key, own: half(own, Rng(key)))(keys, update)
        return update, kept, vmap(method.asks)(batches) if channel.asks else {}

    def _batches(self, method: Method, streams: Rng, data: tuple[Tensor, ...]) -> Batch:
        """What clients work on in a round, or to adapt."""
        prepared: Batch = vmap(lambda key, *own: method.prepare(self._client_data(*own), Rng(key)))(streams.key, *data)
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

    def state(self) -> Tree:
        state = {f"local/{name}": value for name, value in self._store.state().items()}
        state["base_step"] = torch.from_numpy(self._base_step.copy())
        for step, tree in self._bases.items():
            state |= {f"base/{step}/{name}": value for name, value in tree.items()}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        local = {name.removeprefix("local/"): value for name, value in state.items() if name.startswith("local/")}
        self._store.load(local, self.device)
        self._base_step = state["base_step"].numpy().copy()
        self._bases = {}
        for name, value in state.items():
            if name.startswith("base/"):
                _, step, key = name.split("/", 2)
                self._bases.setdefault(int(step), {})[key] = value.to(self.device)

    def _remember(self, shared: Tree, users: Users, step: int) -> None:
        """These clients will rank with what they trained from; what nobody ranks with any more is let go."""
        self._base_step[users] = step
        self._bases[step] = shared
        in_use = set(np.unique(self._base_step).tolist())
        self._bases = {number: tree for number, tree in self._bases.items() if number in in_use}

    def _tensor(self, users: Users) -> Tensor:
        return torch.from_numpy(users).to(self.device)

    def _data(self, users: Users, width: int | None = None) -> tuple[Tensor, ...]:
        """What these clients' devices hold: their interactions, then a column for each feature."""
        padded = (torch.from_numpy(part).to(self.device) for part in self.split.padded(users, width))
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
        keys = self._rng.fold("local").fold(self._tensor(users)).key
        fresh: Tree = vmap(lambda key: method.init_local(shared, Rng(key)))(keys)
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
        streams = self._rng.fold("adapt").fold(self._tensor(users))
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


def _add(update: Tree, sums: Tree) -> int:
    """Add a stacked update to the sums; answer how many bytes its clients send."""
    bits = 0
    for name, value in update.items():
        rows = value.value if isinstance(value, Rows) else value
        kind = torch.promote_types(rows.dtype, torch.float32)
        width = 1 if rows.dtype == torch.bool else 8 * rows.element_size()
        if isinstance(value, Rows):
            if value.index.numel() and int(value.index.max()) >= value.size:
                raise HomebodyError(
                    f"The update's '{name}' has a row {int(value.index.max())}, but its table has {value.size} rows."
                )
            total = sums.setdefault(name, rows.new_zeros((value.size, *rows.shape[2:]), dtype=kind))
            ops.scatter_sum(value.index.flatten(), rows.flatten(0, 1).to(kind), total)
            bits += int((value.index >= 0).sum()) * (32 + width * math.prod(rows.shape[2:]))
        else:
            summed = rows.sum(0, dtype=kind)
            sums[name] = sums[name] + summed if name in sums else summed
            bits += width * rows.numel()
    return -(-bits // 8)


def _asked(request: Mapping[str, Tensor], shared: Tree) -> tuple[int, int]:
    """How many rows these clients ask for, and how many bytes they are spared of the tables that they ask rows of."""
    rows = spared = 0
    for name, index in request.items():
        if name not in shared:
            raise HomebodyError(f"A device asks for rows of '{name}', but what is shared is {', '.join(shared)}.")
        count, table = int((index >= 0).sum()), shared[name]
        rows += count
        spared += len(index) * table.nbytes - count * (table.nbytes // len(table))
    return rows, spared


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
