"""Thousands of clients at once, in this process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from homebody import ops
from homebody.core import Cohort, Collected, Method, Opened, Rows, Total, Tree, Users
from homebody.errors import HomebodyError, several
from homebody.methods.kernels import kernel_of
from homebody.privacy import Channel, Charge
from homebody.privacy.grid import STEPS, summed_steps
from homebody.privacy.ring import Numbers, entries_of
from homebody.privacy.stages import values_of
from homebody.rng import Rng
from homebody.simulation.clients import SAMPLES_AT_ONCE, Clients

__all__ = ["Simulator", "add_messages", "bits_of"]

DENSE_BYTES = 64 << 20
"""Memory for the dense updates of clients that work at once, if their channel makes updates dense."""
FORMULAS_AT_ONCE = 1 << 20
"""Padded interactions at once of clients whose updates are formulas: these take no memory until they are read."""


class Simulator(Clients):
    """Runs a method for a whole population.

    fused: also draw the sum of all devices' noise at once, which has the same distribution as the sum of each one's.
    Without it, clients of a secure sum mask their messages and open the sum as devices do, each a party of its own.

    >>> import homebody as hb
    >>> clients = hb.Simulator(hb.leave_one_out(hb.load("synthetic:users=50,items=30,mean=6")))
    >>> clients
    <Simulator of synthetic:users=50,items=30,mean=6: 50 clients on cpu>
    >>> hb.fit("fedials", clients, rounds=2, quiet=True).metrics["hr@10"] > 0
    True
    """

    simulated = True

    def __repr__(self) -> str:
        people = several(self.split.n_users, "client")
        return f"<{type(self).__name__} of {self.split.population.name}: {people} on {self.device}>"

    def available(self, *, public: bool = False) -> Users:
        return self._public if public else self._members

    def open(self, release: str, cohort: Cohort, shared: Tree) -> Opened:
        return Opened(release, cohort, again=False)

    def telemetry(self, method: Method) -> Sequence[Charge]:
        return ()

    def collect(self, method: Method, shared: Tree, cohort: Cohort, rng: Rng, step: int) -> Collected:
        rng = self._own(rng)
        uplink = method.uplink.among(cohort.size)
        if uplink is not method.uplink:
            method = replace(method, uplink=uplink)  # type: ignore[type-var]
        sums: Tree = {}
        bytes_up, requests, losses = 0, 0, []
        tables = sum(value.nbytes for value in shared.values())
        bytes_down = tables * len(cohort.users)
        at_once = self.fused and method.uplink.ends_in_noise
        kernel = kernel_of(method, self.device)
        formulas = self.fused and kernel.formulas and method.uplink.samples
        reads = method.uplink.reads
        summed = self.fused and not reads
        added = summed and self._added(method) is not None
        whole = method.about.dense or (uplink.sums_dense if summed else uplink.dense)
        dense = whole and not formulas and not added
        # A message that is read has an entry for each item, and drawing an entry takes several numbers of 8 bytes.
        wide = 32 * self.catalogue.n_items if reads else tables
        limits = [max(1, DENSE_BYTES // max(1, wide)) if dense else None, self._most_shown]
        most = min((limit for limit in limits if limit is not None), default=None)
        together = FORMULAS_AT_ONCE if formulas else SAMPLES_AT_ONCE
        mixed = self.fused and kernel.mixed(method)
        rounding = rng.private.fold("ring")
        vectors: list[Numbers] | None = [] if not self.fused and uplink.adds_up else None
        for users, width in self._store.groups(cohort.users, together, most, mixed=mixed):
            update, state, request = self._work(method, shared, users, width, rng, summed=summed)
            self._store.put(users, state)
            if "loss" in state:
                losses.append(state["loss"].sum())
            if vectors is not None:
                vectors += _vectors(uplink, update, cohort.size, rounding)
            sent = add_messages(update, {} if reads or vectors is not None else sums, whole=method.uplink.fills)
            bytes_up += sent * (len(users) if added else 1)
            if reads:
                method.uplink.read(update, sums)
            rows, spared = _requested(request, shared)
            requests, bytes_down = requests + 4 * rows, bytes_down - spared
        if method.scoring.parameters == "base":
            self._remember(shared, cohort.users, step)
        if vectors:
            sums = _added_up(uplink, vectors, cohort.size, {name: value.shape[1:] for name, value in update.items()})
        if at_once:
            sums = method.uplink.noise_of_many(sums, len(cohort.users), rng.private.fold("uplink"))
            # Each device would have sent its noise in every coordinate.
            bytes_up = len(cohort.users) * sum(value.nbytes for value in sums.values())
        if sums and uplink.facts.skellam:
            entries = entries_of(sums)
            bytes_up = len(cohort.users) * entries * uplink.ring(entries, cohort.size).width
        total = method.uplink.server(Total(sums, cohort.size), rng.private.fold("server"))
        loss = float(sum(losses)) / len(cohort.users) if losses else None
        return Collected(total, bytes_up + requests, bytes_down, loss)

    def state(self, *, lasting: bool = False) -> Tree:
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

    def copy(self, method: Method) -> Simulator:
        """The same clients once more, with what they hold for this method: nothing that the copy does changes these."""
        other = Simulator(self.split, device=str(self.device), fused=self.fused)
        other.begin(method, self._rng)
        other.load_state(self.state())
        return other


def _vectors(channel: Channel, messages: Tree, people: int, rng: Rng) -> list[Numbers]:
    """What each of these clients gives to a secure sum, as a party of its own: its message in whole numbers."""
    clients = len(next(iter(messages.values())))
    each = [{name: value[at] for name, value in messages.items()} for at in range(clients)]
    ring = channel.ring(entries_of(each[0]), people)
    return [ring.encode(message, Rng(rng.next_key())) for message in each]


def _added_up(channel: Channel, vectors: Sequence[Numbers], people: int, shapes: Mapping[str, tuple[int, ...]]) -> Tree:
    """The sum that a server opens, by the conversation that devices have."""
    from homebody.federation.secure_sum.together import add_up, add_up_with_helper

    assert channel.facts.sum is not None
    ring, shares = channel.ring(len(vectors[0]), people), channel.facts.sum.shares
    helped = channel.facts.helped
    opened = add_up_with_helper(vectors, ring.width, shares[0]) if helped else add_up(vectors, ring.width, shares)
    return ring.decode(opened, shapes)


def bits_of(value: Tensor | Rows, *, whole: bool = False) -> int:
    """The bits of a part of a message, or of several stacked: row numbers take 32 bits, truths a single one.

    whole: each of several clients sends the whole table.
    """
    numbers = values_of(value)
    width = 1 if numbers.dtype == torch.bool else 8 * numbers.element_size()
    if not isinstance(value, Rows):
        return width * numbers.numel()
    row = width * math.prod(numbers.shape[value.index.ndim :])
    return len(numbers) * value.size * row if whole else int((value.index >= 0).sum()) * (32 + row)


def add_messages(update: Tree, sums: Tree, *, whole: bool = False) -> int:
    """Add a stacked update to the sums. Return how many bytes its clients send; whole: each sends whole tables."""
    bits = 0
    for name, value in update.items():
        rows = values_of(value)
        # Whole steps of a channel's grid stay whole: their sum is exact.
        kind = torch.int64 if rows.dtype in STEPS else torch.promote_types(rows.dtype, torch.float32)
        if isinstance(value, Rows):
            if value.index.numel() and int(value.index.max()) >= value.size:
                raise HomebodyError(
                    f"The update's '{name}' has a row {int(value.index.max())}, but its table has {value.size} rows."
                )
            total = sums.setdefault(name, rows.new_zeros((value.size, *rows.shape[2:]), dtype=kind))
            ops.scatter_sum(value.index.flatten(), rows.flatten(0, 1), total)
        else:
            summed = summed_steps(rows) if kind == torch.int64 else rows.sum(0, dtype=kind)
            sums[name] = sums[name] + summed if name in sums else summed
        bits += bits_of(value, whole=whole)
    return -(-bits // 8)


def _requested(request: Mapping[str, Tensor], shared: Tree) -> tuple[int, int]:
    """How many rows these clients request, and how many bytes that saves of the whole tables."""
    rows = spared = 0
    for name, index in request.items():
        if name not in shared:
            raise HomebodyError(f"A device asks for rows of '{name}', but what is shared is {', '.join(shared)}.")
        count, table = int((index >= 0).sum()), shared[name]
        rows += count
        spared += len(index) * table.nbytes - count * (table.nbytes // len(table))
    return rows, spared
