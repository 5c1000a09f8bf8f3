"""Sixth attack: the server reads what a person clicked off the gradient of a news encoder.

A word vector gets a gradient if the word is in a news item that the client works on: one of the history, or one of the
impression. All other rows of the table are exactly zero. The server knows the catalogue, and what it showed. So the
rows that moved, without the words of the shown news, are the words of what the person clicked before. An encoder by id
has a row for each item, and so has any encoder with `ids`: these rows name the items themselves.

Where devices add noise every row moves. The attacker then takes the rows that moved farthest, and is told how many.

Reports of a certified PrivateRec have no rows: see `homebody.adversary.impressions`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.adversary.rates import mean_interval
from homebody.core import About, Batch, Catalogue, Data, Method, Tree, Update
from homebody.errors import HomebodyError
from homebody.methods.fedrec import FedRec, drawn_impression, last_items
from homebody.privacy import Channel
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.text_vectors import news_inputs

__all__ = ["TABLES", "Drawn", "WordReading", "drawn", "named", "read_words"]

USERS = 100
TABLES = {"news/word": "words", "news/item": "items", "news/own": "items"}
"""The tables that an encoder may have a row in for each thing that a person reads, and what their rows are."""


class Read(NamedTuple):
    """How many of some guesses are right, and how much of the truth they name."""

    precision: float
    recall: float

    @classmethod
    def of(cls, guessed: Tensor, truth: Tensor) -> Read:
        """
        >>> Read.of(torch.tensor([True, True, False]), torch.tensor([True, False, False]))
        Read(precision=0.5, recall=1.0)
        """
        right = int((guessed & truth).sum())
        return cls(right / max(1, int(guessed.sum())), right / int(truth.sum()))


@dataclass(frozen=True)
class WordReading:
    """How well the words, or the items, of some clients' histories were read."""

    table: str
    rule: str
    clients: tuple[Read, ...]
    frequent: tuple[Read, ...]
    """The same for as many guesses of what is most frequent in everyone's histories, without any message."""
    skipped: int
    """Clients without a word beyond those that they were shown."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        shares = {
            f"{guessed}{name}": list(mean_interval([getattr(one, name) for one in each]))
            for guessed, each in (("", self.clients), ("frequent_", self.frequent))
            for name in Read._fields
        }
        about = {"table": self.table, "kind": TABLES[self.table], "rule": self.rule}
        return {"reads": "gradients", **about, "users": len(self.clients), "skipped": self.skipped, **shares}


def read_words(
    method: Method,
    simulator: Simulator,
    shared: Tree,
    *,
    users: int = USERS,
    seed: int = 0,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> WordReading:
    """Attack the next round of a trained model; nothing of it is kept.

    users: how many clients are drawn. step: told how many messages of how many are read.
    """
    if not isinstance(method, FedRec):
        raise HomebodyError(f"{type(method).__name__} trains no encoder of news: --attack words is for those that do.")
    table = _table(method, shared)
    if users < 1:
        raise HomebodyError(f"The attack needs at least 1 user to read, not {users}.")
    rng = Rng.of(seed, "words")
    generator = np.random.default_rng(int(rng.fold("users").key) % 2**64)
    attacked = np.sort(generator.permutation(simulator.available())[:users])
    content = _NewsContent.of(method, simulator.catalogue, table, len(shared[table]))
    popular, noised = content.frequency(simulator.split.histories().items), method.uplink.facts.noise_on_device
    clients, frequent = [], []
    for done, user in enumerate(attacked.tolist(), start=1):
        about = drawn(method, simulator, shared, user, rng.fold("round"))
        shown = content.of_items(about.shown)
        truth = content.of_items(about.history[about.read]) & ~shown
        if bool(truth.any()):
            moved = _moved(method, simulator.message(method, shared, user, rng.fold("round")), table)
            # Under noise, as many of the rows that moved farthest as there are.
            guessed = _highest(moved, shown, int(truth.sum())) if noised else (moved > 0) & ~shown
            clients.append(Read.of(guessed, truth))
            frequent.append(Read.of(_highest(popular, shown, int(guessed.sum())), truth))
        step(done, len(attacked))
    if not clients:
        raise HomebodyError("Nobody's history has anything beyond what they were shown: there is nothing to read.")
    rule = "the rows that moved farthest, as many as there are" if noised else "the rows that moved at all"
    return WordReading(table, rule, tuple(clients), tuple(frequent), len(attacked) - len(clients))


def named(method: FedRec, simulator: Simulator, shared: Tree, user: int, rng: Rng, sent: Update) -> list[str]:
    """The words or items that the server reads off this client's message, as people call them.

    rng: the stream of the round in which it was sent. Empty where devices add noise.
    """
    if method.uplink.facts.noise_on_device:
        return []
    table = _table(method, shared)
    content = _NewsContent.of(method, simulator.catalogue, table, len(shared[table]))
    shown = content.of_items(drawn(method, simulator, shared, user, rng).shown)
    rows = ((_moved(method, sent, table) > 0) & ~shown).nonzero()[:, 0].tolist()
    if TABLES[table] == "items":
        return [simulator.split.population.item_name(row) for row in rows]
    words = method.news.words(simulator.catalogue)
    return [words[row - 1] for row in rows if row]  # row 0 is of words that training does not know


def _moved(method: FedRec, sent: Update, table: str) -> Tensor:
    """How far each row of the table moved."""
    return method.uplink.decoded(sent)[table].to("cpu", torch.float64).norm(dim=1)


def _table(method: FedRec, shared: Tree) -> str:
    """The table that is read."""
    if method.uplink.facts.hides_senders:
        raise HomebodyError("This attack reads the message of one client, and the server of this run gets a sum alone.")
    table = next((name for name in TABLES if name in shared), None)
    if table is None:
        raise HomebodyError(
            f"The encoder {method.encoder} trains no vectors of words or items: its gradient has no rows to read. "
            "--attack words is for the encoders nrms, naml and id, and for ids=true."
        )
    return table


def _highest(scores: Tensor, without: Tensor, count: int) -> Tensor:
    """The rows of the highest scores among those that are not left out."""
    best = torch.where(without, -torch.inf, scores).topk(min(count, int((~without).sum()))).indices
    return torch.zeros_like(without).index_fill(0, best, True)


@dataclass(frozen=True)
class _NewsContent:
    """What is in each news item of the catalogue, as rows of the table that is read."""

    rows: Tensor
    """(items + 1, n) row numbers; negative where there is none."""
    size: int

    @classmethod
    def of(cls, method: FedRec, catalogue: Catalogue, table: str, size: int) -> _NewsContent:
        inputs = news_inputs(method.news, catalogue)
        if TABLES[table] == "items":
            return cls(inputs[table.removeprefix("news/")][:, None].cpu(), size)
        texts = [value for name, value in inputs.items() if name.startswith("words/")]
        return cls(torch.cat(texts, 1).cpu(), size)

    def of_items(self, items: Tensor) -> Tensor:
        """(size,) which rows these items have."""
        rows = self.rows[items].flatten()
        return torch.zeros(self.size, dtype=torch.bool).index_fill(0, rows[rows >= 0], True)

    def frequency(self, items: npt.NDArray[np.integer[Any]]) -> Tensor:
        """(size,) how often each row is in these items; a word counts as often as a text has it."""
        times = np.bincount(items, minlength=len(self.rows)).astype(np.float64)
        weight = torch.from_numpy(times)[:, None].expand(self.rows.shape)
        real = self.rows >= 0
        return torch.zeros(self.size, dtype=torch.float64).index_add(0, self.rows[real], weight[real])


class Drawn(NamedTuple):
    """What a client works on in a round. The catalogue's size pads both."""

    shown: Tensor
    """(C,) the items of the impression that it drew."""
    clicked: Tensor
    """(C,) which of them were clicked; where the client tells one click, that one alone."""
    history: Tensor
    """(L,) the last items of its history before that impression."""
    read: Tensor
    """(L,) which of them it reads: neither padding nor hidden."""


def drawn(method: FedRec, simulator: Simulator, shared: Tree, user: int, rng: Rng) -> Drawn:
    """What this client works on in the round of this stream, by which `Simulator.message` gives what it sends."""
    # The simulator gives this method the same data and the same stream as the attacked one.
    found = simulator.message(_Revealed(method=method), shared, user, rng)
    return Drawn(*(found[name].cpu() for name in Drawn._fields))


@dataclass(frozen=True)
class _Revealed(Method):
    """A method whose clients tell what another method's clients work on."""

    uplink: Channel = Channel()
    method: FedRec = field(default_factory=FedRec)

    needs: ClassVar[tuple[str, ...]] = FedRec.needs
    about: ClassVar[About] = FedRec.about

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return self.method.init_local(shared, rng)

    def prepare(self, data: Data, rng: Rng) -> Batch:
        batch = self.method.prepare(data, rng)
        hidden, click = batch.get("hidden"), batch.get("click")
        items, clicked, before = drawn_impression(data.shown, rng.private.fold("impression"), data.items.device)
        history, real = last_items(data, before, self.method.latest)
        read = real if hidden is None else real & ~hidden
        return {"shown": items, "clicked": clicked if click is None else click > 0.5, "history": history, "read": read}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        return dict(batch), local
