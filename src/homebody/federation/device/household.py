"""The people of one real device, each a client of its own."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils._pytree import tree_map

from homebody.core import Method, Rows, Tree, Update, written
from homebody.errors import HomebodyError
from homebody.evaluation import Block, questions, summarise
from homebody.privacy import Channel
from homebody.rng import DeviceRng, Rng, SystemRng
from homebody.simulation.clients import Clients

__all__ = ["Household", "grown"]


class Household(Clients):
    """Works for one person at a time; what is private is drawn from the operating system.

    Users are counted as the split counts them; where numbers are drawn that everybody could draw, `split.numbers`
    says what the server calls them.
    """

    stream = DeviceRng

    def hold(self, user: int, state: Tree, base: Tree | None = None) -> None:
        """This person's own state, and the shared parameters it was trained from where those are ranked with."""
        users = np.array([user])
        self._store.put(users, tree_map(lambda leaf: leaf[None], state))
        if base is not None:
            self._remember(base, users, step=user)

    def train(self, method: Method, shared: Tree, user: int, rng: Rng) -> tuple[Update, Tree]:
        """One round of one person: what leaves the device, and what stays; both are finite, or it raises."""
        update, kept, _ = self._work(method, shared, np.array([user]), None, self._own(rng))
        _refuse_endless(kept if method.uplink.stages else {**kept, **{f"update/{n}": u for n, u in update.items()}})
        return _alone(update), _alone(kept)

    def measure(self, method: Method, shared: Tree, user: int) -> dict[str, float]:
        """How well this person is served by what they hold; empty where there is nothing to ask."""
        users = np.array([user])
        asked = questions(self.split, users, self.device)
        if not asked:
            return {}
        everything = torch.arange(self.catalogue.n_items, device=self.device)
        scores = self._scores(method, shared, users, self._data(users), everything)
        return summarise([Block(users, scores, asked)], self._cutoffs).metrics

    def _leave(self, channel: Channel, update: Update, streams: Rng, *, summed: bool) -> Update:
        own = _alone(written(update))
        _refuse_endless(own)
        left: Update = tree_map(lambda leaf: leaf[None], channel.device(own, SystemRng()))
        return left


def _refuse_endless(tree: Tree) -> None:
    """Refuse numbers that are not finite: no channel bounds them, and a state that has some never recovers."""
    for value in tree.values():
        if not bool(torch.isfinite(value.value if isinstance(value, Rows) else value).all()):
            raise HomebodyError("The round led out of the finite numbers.")


def _alone(stacked: Tree) -> Tree:
    """The tree of the one client in a stack."""
    alone: Tree = tree_map(lambda leaf: leaf[0], stacked)
    return alone


def grown(state: Tree, shared: Tree) -> Tree:
    """A state whose tables are as long as the shared ones are now: the catalogue may have grown since."""
    return {
        name: Rows(value.index, value.value, len(shared[name])) if isinstance(value, Rows) and name in shared else value
        for name, value in state.items()
    }
