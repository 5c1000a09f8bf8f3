"""The local states of simulated clients, stored in buckets of clients with similar history lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.core import Rows, Tree, Users

__all__ = ["LocalStore"]

WASTE = 0.1
"""Share of a bucket that may be padding."""
SMALL = 1 << 12
"""Padding that is cheaper than one more bucket."""


INDEX, VALUE = "#index", "#value"
"""Suffixes of the names under which the two parts of `Rows` are stored. Indices take 32 bits, to save memory."""


class LocalStore:
    """Clients' local trees, stacked bucket by bucket: the clients of a bucket are padded to one length.

    A tensor handed out by `state` is never written to afterwards.
    """

    def __init__(self, lengths: npt.NDArray[np.int64], members: Users) -> None:
        self._buckets = _bucketed(lengths, members)
        self._widths = [int(lengths[users].max()) for users in self._buckets]
        self._bucket_of = np.full(len(lengths), -1, dtype=np.int64)
        self._place = np.zeros(len(lengths), dtype=np.int64)
        for number, users in enumerate(self._buckets):
            self._bucket_of[users] = number
            self._place[users] = np.arange(len(users))
        self._trees: dict[int, dict[str, Tensor]] = {}
        self._sizes: dict[str, int] = {}
        self._shared: set[int] = set()
        self._held = np.zeros(len(lengths), dtype=np.bool_)

    def clear(self) -> None:
        self._trees, self._sizes, self._shared = {}, {}, set()
        self._held = np.zeros_like(self._held)

    def holds(self, users: Users) -> npt.NDArray[np.bool_]:
        """Which of these clients have a state."""
        return self._held[users]

    def knows(self, users: Users) -> npt.NDArray[np.bool_]:
        """Which of these clients have a place here: those who train or are asked."""
        return self._bucket_of[users] >= 0

    def groups(
        self, users: Users, samples: int, most: int | None = None, *, mixed: bool = False
    ) -> Iterator[tuple[Users, int]]:
        """These clients by bucket, in pieces of at most `samples` padded interactions, with their padded length.

        mixed: a piece may go on with the clients of the next bucket, who are shorter.
        """
        users = users[self.knows(users)]
        users = users[np.lexsort((self._place[users], self._bucket_of[users]))]
        buckets = self._bucket_of[users]
        ends = np.full(len(users), len(users)) if mixed else np.searchsorted(buckets, buckets, side="right")
        start = 0
        while start < len(users):
            width = self._widths[buckets[start]]
            piece = max(1, samples // max(1, width))
            piece = piece if most is None else max(1, min(piece, most))
            end = min(start + piece, int(ends[start]))
            yield users[start:end], width
            start = end

    def order(self, users: Users, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions of these clients by bucket, then by these lengths, longest first. A client may stand twice."""
        return np.lexsort((self._place[users], -lengths, self._bucket_of[users]))

    def get(self, users: Users) -> Tree:
        """The stacked state of clients, in the order of `groups`."""
        pieces = [some for _, some in self._by_bucket(users)]
        found = [self._get(some) for some in pieces]
        return self._assemble(found[0] if len(found) == 1 else _stacked(found, [len(some) for some in pieces]))

    def put(self, users: Users, tree: Tree) -> None:
        """Keep the stacked state of clients, in the order of `groups`."""
        flat = self._flatten(tree)
        for where, some in self._by_bucket(users):
            self._put(some, flat if len(some) == len(users) else {name: value[where] for name, value in flat.items()})

    def _by_bucket(self, users: Users) -> list[tuple[slice, Users]]:
        """Clients of one bucket after another, with their places among all of these."""
        buckets = self._bucket_of[users]
        edges = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(users)]
        return [(slice(start, end), users[start:end]) for start, end in pairwise(edges)]

    def _get(self, users: Users) -> dict[str, Tensor]:
        tree = self._trees.get(int(self._bucket_of[users[0]]), {})
        where = self._where(users, tree)
        return {name: value[where] for name, value in tree.items()}

    def _put(self, users: Users, flat: dict[str, Tensor]) -> None:
        bucket = int(self._bucket_of[users[0]])
        self._held[users] = True
        if len(users) == len(self._buckets[bucket]) and _ascending(self._place[users]):
            self._trees[bucket] = flat
            self._shared.discard(bucket)
            return
        store = self._trees.setdefault(bucket, {})
        if bucket in self._shared:
            store.update({name: value.clone() for name, value in store.items()})
            self._shared.discard(bucket)
        where = self._where(users, flat)
        for name, value in flat.items():
            store[name] = _with_room(store.get(name), value, len(self._buckets[bucket]), _fill(name))
            if store[name].shape[1:] == value.shape[1:]:
                store[name][where] = value
            else:  # rows: fewer than others in the bucket have
                store[name][where] = _fill(name)
                store[name][where, : value.shape[1]] = value

    def state(self) -> dict[str, Tensor]:
        self._shared = set(self._trees)
        flat = {f"{bucket}/{name}": value for bucket, tree in self._trees.items() for name, value in tree.items()}
        sizes = {f"size/{name}": torch.tensor(size) for name, size in self._sizes.items()}
        return flat | {"held": torch.from_numpy(self._held.copy())} | sizes

    def load(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        self.clear()
        for name, value in state.items():
            if name == "held":
                self._held = value.numpy().copy()
            elif name.startswith("size/"):
                self._sizes[name.removeprefix("size/")] = int(value)
            else:
                bucket, key = name.split("/", 1)
                self._trees.setdefault(int(bucket), {})[key] = value.to(device)
        self._shared = set(self._trees)

    def _where(self, users: Users, tree: Mapping[str, Tensor]) -> slice | Tensor:
        """Clients of one bucket as positions: a slice when they are neighbours, so that nothing is copied."""
        place = self._place[users]
        if _ascending(place):
            return slice(int(place[0]), int(place[-1]) + 1)
        device = next(iter(tree.values())).device if tree else "cpu"
        return torch.from_numpy(place).to(device)

    def _flatten(self, tree: Tree) -> dict[str, Tensor]:
        flat = {}
        for name, value in tree.items():
            if isinstance(value, Rows):
                flat[name + INDEX], flat[name + VALUE] = value.index.to(torch.int32), value.value
                self._sizes[name] = value.size
            elif isinstance(value, Tensor):
                flat[name] = value
            else:
                raise TypeError(f"Local state is a flat dict of tensors and Rows, but '{name}' is {type(value)}.")
        return flat

    def _assemble(self, flat: Mapping[str, Tensor]) -> Tree:
        tree: Tree = {name: value for name, value in flat.items() if not name.endswith((INDEX, VALUE))}
        for name, size in self._sizes.items():
            tree[name] = Rows(flat[name + INDEX].to(torch.int64), flat[name + VALUE], size)
        return tree


def _fill(name: str) -> int:
    return -1 if name.endswith(INDEX) else 0


def _with_room(old: Tensor | None, value: Tensor, clients: int, fill: int) -> Tensor:
    """A tensor for a whole bucket, wide enough for the old one and for this value."""
    shape = [clients, *value.shape[1:]]
    if old is not None and value.ndim > 1:
        shape[1] = max(old.shape[1], shape[1])
    if old is not None and list(old.shape) == shape:
        return old
    room = torch.full(shape, fill, dtype=value.dtype, device=value.device)
    if old is not None:
        room[:, : old.shape[1]] = old
    return room


def _stacked(trees: list[dict[str, Tensor]], counts: list[int]) -> dict[str, Tensor]:
    """The states of several buckets, of so many clients each, as one.

    Where clients of a bucket have fewer rows, or nobody has something yet, padding fills up.
    """
    widest: dict[str, Tensor] = {}
    for name, value in ((name, value) for tree in trees for name, value in tree.items()):
        if name not in widest or (value.ndim > 1 and value.shape[1] > widest[name].shape[1]):
            widest[name] = value[:0]
    return {
        name: torch.cat(
            [_with_room(tree.get(name), value, count, _fill(name)) for tree, count in zip(trees, counts, strict=True)]
        )
        for name, value in widest.items()
    }


def _ascending(place: npt.NDArray[np.int64]) -> bool:
    return bool(place[-1] - place[0] == len(place) - 1) and bool((np.diff(place) == 1).all())


def _bucketed(lengths: npt.NDArray[np.int64], members: Users) -> list[Users]:
    """Group clients of similar length, the longest first, so that there are few buckets with little padding."""
    order = members[np.argsort(-lengths[members], kind="stable")]
    buckets = []
    start = 0
    ordered = lengths[order]
    while start < len(order):
        padding = np.cumsum(ordered[start] - ordered[start:])
        used = ordered[start] * np.arange(1, len(order) - start + 1)
        too_much = (padding > WASTE * used) & (padding > SMALL)
        end = start + int(np.argmax(too_much)) if too_much.any() else len(order)
        buckets.append(np.sort(order[start:end]))
        start = end
    return buckets
