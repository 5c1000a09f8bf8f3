"""First attack: the server reads the messages of one round and guesses which items a client interacted with.

It knows the method, the channel, the shared parameters, and the items of a few devices of its own. One client's item
rows move along one direction, its private vector: rows of its own items one way, rows of sampled negatives the other;
untouched rows are not sent. The attack finds that direction as the first singular vector of the rows. On its own
devices it tries which way is which, or whether the length of the move says more. Several rounds would reveal more.

`read_requests` is the simpler attack on devices that ask for rows: a device's own items are in every request, while
negatives are drawn anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.adversary.rates import mean_interval
from homebody.core import Method, Rows, Total, Tree, Update, Users
from homebody.errors import HomebodyError
from homebody.privacy.stages import summable
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.training import choose

__all__ = ["ROUNDS", "RULES", "Always", "ItemReading", "area", "read_interactions", "read_requests"]

OWN_DEVICES = 10
"""Clients that the attacker runs itself, to find out which rule reads best."""
HIGH = 0.9
"""A client above this AUC counts as read."""
ROUNDS = (1, 2, 3, 5, 10)
"""Numbers of requests after which the server guesses."""
CELLS = 1 << 26
"""The most people × items whose requests are counted together."""
Scores = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ItemReading:
    """How well the items of some clients were told from all others."""

    reads: str
    """What the attacker had."""
    table: str
    """The tensor that was read."""
    rule: str
    """How, of `RULES`."""
    auc: Scores
    """Of each client: its training items against every other item."""
    popularity: Scores
    """The same by how popular items are among all clients: what one can guess without any message."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        mean, low, high = mean_interval(self.auc)
        return {
            **{name: getattr(self, name) for name in ("reads", "table", "rule")},
            "users": len(self.auc),
            "auc": mean,
            "interval": [low, high],
            "above": HIGH,
            "share_above": float((self.auc > HIGH).mean()),
            "popularity_auc": float(self.popularity.mean()),
        }


def read_interactions(
    method: Method,
    simulator: Simulator,
    shared: Tree,
    *,
    cohort: int | None = None,
    users: int = 100,
    seed: int = 0,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> ItemReading:
    """Attack the next round of a trained model; nothing of it is kept.

    users: how many clients are drawn; behind a secure sum or a shuffle they are drawn from one round's cohort.
    step: told how many messages of how many are read.
    """
    if users < 1:
        raise HomebodyError(f"The attack needs at least 1 user to read, not {users}.")
    rng = Rng.of(seed, "interactions")
    summed = method.uplink.facts.hides_senders
    members = choose(simulator.available(), cohort if summed else None, rng.fold("cohort")).users
    if len(members) < 2:
        raise HomebodyError("The attack needs a device of its own beside one to read: the round has 1 client.")
    generator = np.random.default_rng(int(rng.fold("users").key) % 2**64)
    drawn = generator.permutation(members)
    helpers = min(OWN_DEVICES, len(members) // 2)
    attacked = np.concatenate([drawn[:helpers], np.sort(drawn[helpers : helpers + users])])
    read, n_items = partial(_read, method, n_items=simulator.catalogue.n_items), simulator.catalogue.n_items
    seen: list[Seen] = []
    total: Tree = {}
    listed = members if summed else attacked
    for done, user in enumerate(listed, start=1):
        update = simulator.message(method, shared, int(user), rng.fold("round"))
        if summed:
            for name, value in update.items():
                total[name] = total[name] + summable(value) if name in total else summable(value)
        else:
            seen.append(read(update))
        step(done, len(listed))
    if summed:
        noised = method.uplink.facts.helped
        sums = method.uplink.server(Total(total, len(members)), rng.fold("helper")).sum if noised else None
        seen = [read(total, sums=sums)] * len(attacked)
    padded = simulator.split.padded(attacked)
    histories = [np.unique(items[valid]) for items, valid in zip(padded.items, padded.valid, strict=True)]
    by_rule = {
        rule: [area(score(message.table, message.sent), mine) for message, mine in zip(seen, histories, strict=True)]
        for rule, score in RULES.items()
    }
    rule = max(by_rule, key=lambda name: sum(by_rule[name][:helpers]))
    popular = np.bincount(simulator.split.histories().items, minlength=n_items).astype(np.float64)
    by_popularity = np.array([area(popular, mine) for mine in histories[helpers:]])
    reads = f"the sum over a cohort of {len(members):,}" if summed else "each client's own message"
    helped = method.uplink.facts.helped
    reads += f", {'with the noise that the helper adds' if helped else 'before any noise that the server adds'}"
    return ItemReading(reads, seen[0].name, rule, np.array(by_rule[rule][helpers:]), by_popularity)


class Seen(NamedTuple):
    """What the attacker has of one client: a row for each item, and which rows were sent, where that is told."""

    name: str
    table: Tensor
    sent: Tensor | None


def _read(method: Method, update: Update, n_items: int, sums: Tree | None = None) -> Seen:
    """The largest tensor with a row for each item. sums: what the server gets in place of the message."""
    sums = method.uplink.decoded(update) if sums is None else sums
    fitting = {name: value for name, value in sums.items() if value.ndim and len(value) == n_items}
    if not fitting:
        raise HomebodyError(
            f"{type(method).__name__} sends nothing with a row for each item, so this attack has nothing to read."
        )
    name = max(fitting, key=lambda key: fitting[key].numel())
    table = fitting[name].reshape(n_items, -1).to("cpu", torch.float64)
    return Seen(name, table, _named(update.get(name), n_items))


def _fewer(table: Tensor, sent: Tensor | None) -> Scores:
    """How far rows move along their common direction, the way that fewer of them move.

    >>> vector = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    >>> rows = torch.tensor([[0.0], [-0.1], [0.5], [-0.1], [-0.2]]) * vector
    >>> _fewer(rows, rows.any(dim=1)).argsort()[::-1].tolist()
    [2, 1, 3, 4, 0]
    """
    along = table @ torch.linalg.eigh(table.T @ table).eigenvectors[:, -1]
    return _sent(-along if along.sign().sum() > 0 else along, sent)


def _sent(scores: Tensor, sent: Tensor | None) -> Scores:
    """Rows that are not in the message come last."""
    return (scores if sent is None else torch.where(sent, scores, scores.min() - 1)).numpy()


RULES: dict[str, Callable[[Tensor, Tensor | None], Scores]] = {
    "the way that fewer rows move": _fewer,
    "the way that more rows move": lambda table, sent: _sent(-torch.from_numpy(_fewer(table, None)), sent),
    "how far rows move": lambda table, sent: _sent(table.norm(dim=1), sent),
}
"""What an item's score may be, given the table and which rows were sent."""


def area(scores: Scores, items: npt.NDArray[np.int64]) -> float:
    """AUC: how often an own item has a higher score than another one; a tie is half.

    >>> area(np.array([3.0, 1.0, 2.0, 1.0]), np.array([0, 1]))
    0.625
    """
    from scipy.stats import rankdata

    mine, others = len(items), len(scores) - len(items)
    if not others:
        raise HomebodyError("A client has every item of the catalogue: there is nothing to tell apart.")
    return float((rankdata(scores)[items].sum() - mine * (mine + 1) / 2) / (mine * others))


def _named(value: Rows | Tensor | None, n_items: int) -> Tensor | None:
    """Which rows of the table a message reveals: those it lists, or those that are not exactly zero."""
    if isinstance(value, Rows) and value.size == n_items:
        named = torch.zeros(n_items, dtype=torch.bool)
        named[value.index[value.index >= 0].cpu()] = True
        return named
    if isinstance(value, Tensor) and len(value) == n_items:
        touched = value.reshape(n_items, -1).cpu().any(dim=1)
        return None if touched.all() else touched
    return None


@dataclass(frozen=True)
class Always:
    """Rows that people asked for in every one of some rounds, beside the items that they train on."""

    rounds: int
    rows: Counts
    """(people,) how many."""
    own: Counts
    """(people,) how many of these are the person's own items."""
    items: Counts
    """(people,) how many items they train on."""

    @property
    def precision(self) -> float:
        """How many of these rows are someone's own; the mean over people."""
        return float((self.own / self.rows).mean())

    @property
    def recall(self) -> float:
        """How many of someone's items are among these rows; the mean over people."""
        return float((self.own / self.items).mean())

    @property
    def read(self) -> float:
        """The share of people whose history is exactly these rows."""
        return float(((self.own == self.items) & (self.rows == self.items)).mean())

    def as_dict(self) -> dict[str, Any]:
        """For JSON; of one person, in whole numbers."""
        alone = {"rows": int(self.rows[0]), "own": int(self.own[0])} if len(self.rows) == 1 else {"read": self.read}
        return {"rounds": self.rounds, **alone, "precision": self.precision, "recall": self.recall}


def read_requests(
    method: Method, simulator: Simulator, shared: Tree, users: Users, rng: Rng, rounds: Sequence[int] = ROUNDS
) -> dict[str, list[Always]]:
    """By table: what the server learns from the requests of these clients after so many rounds with them.

    It guesses that the rows asked for every time are the history. Only tables with a row for each item are read.
    `rng.fold("round", number)` is the stream of a round.
    """
    n_items = simulator.catalogue.n_items
    tables = [name for name in shared if shared[name].ndim and len(shared[name]) == n_items]
    parts: dict[str, list[list[Always]]] = {}
    size = max(1, CELLS // n_items)
    for start in range(0, len(users), size):
        for name, read in _always(method, simulator, tables, users[start : start + size], rng, rounds).items():
            parts.setdefault(name, []).append(read)
    return {name: [_together(same) for same in zip(*lists, strict=True)] for name, lists in parts.items()}


def _always(
    method: Method, simulator: Simulator, tables: Sequence[str], users: Users, rng: Rng, rounds: Sequence[int]
) -> dict[str, list[Always]]:
    """`read_requests` for people who fit into memory together, with a cell for each person and item."""
    n_items = simulator.catalogue.n_items
    place = np.full(simulator.split.n_users, -1)
    place[users] = np.arange(len(users))
    theirs = torch.zeros(len(users), n_items, dtype=torch.bool)
    padded = simulator.split.padded(users)
    who, entry = np.nonzero(padded.valid)
    theirs[torch.from_numpy(who), torch.from_numpy(padded.items[who, entry].astype(np.int64))] = True
    times: dict[str, Tensor] = {}
    out: dict[str, list[Always]] = {}
    for number in range(1, max(rounds) + 1):
        for some, request in simulator.requests(method, users, rng.fold("round", number)):
            where = torch.from_numpy(place[some])
            for name in (table for table in tables if table in request):
                counts = times.setdefault(name, torch.zeros(len(users), n_items + 1, dtype=torch.int16))
                # Padding is counted in a column of its own.
                rows = torch.where(request[name] < 0, n_items, request[name]).cpu()
                counts[where] = counts[where].scatter_add(1, rows, torch.ones_like(rows, dtype=torch.int16))
        if number in rounds:
            for name, counts in times.items():
                always = counts[:, :-1] == number
                sums = (always.sum(1), (always & theirs).sum(1), theirs.sum(1))
                out.setdefault(name, []).append(Always(number, *(counts.numpy() for counts in sums)))
    return out


def _together(some: Sequence[Always]) -> Always:
    names = ("rows", "own", "items")
    return Always(some[0].rounds, *(np.concatenate([getattr(part, name) for part in some]) for name in names))
