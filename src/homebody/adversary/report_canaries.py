"""Canaries that send reports on impressions.

A canary has the strongest interest that there is, and a click. If its coin is tails, someone with another such interest
and another click takes its place: no two people are easier to tell apart. Both halves of its report pass the run's own
channel, and the server adds up the logarithms of the likelihood ratios of all its reports.

Other clients and the public see a model that the server trains on all reports. They are charged as the server is, and
see less: nothing is measured for them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from homebody.adversary.impressions import click_likelihood, interest_likelihood
from homebody.adversary.queries import farthest
from homebody.core import Cohort, Collected, Evaluated, Method, Tree, Update, Users
from homebody.privacy import Channel, Relation
from homebody.privacy.impressions import ImpressionReport
from homebody.rng import Rng
from homebody.simulation import Simulator

__all__ = ["WatchedReports", "WithCanaries", "opposites"]


def opposites(stage: ImpressionReport) -> Tensor:
    """(2, B) two interests whose exact reports are as far apart as any: they share no place.

    >>> opposites(ImpressionReport(1.0, "attention", basis=4, theta=0.6)).tolist()
    [[10000.0, 10000.0, 0.0, 0.0], [0.0, 0.0, 10000.0, 10000.0]]
    """
    return farthest(stage.query)


class WithCanaries(Simulator):
    """A simulator with canaries among its clients, one for each coin; they have the numbers after the last user's."""

    def __init__(self, inner: Simulator, coins: Tensor) -> None:
        inner.share_with(self)
        self.coins, self.first = coins, inner.split.n_users

    def available(self, *, public: bool = False) -> Users:
        real = super().available(public=public)
        return real if public else np.concatenate([real, self.first + np.arange(len(self.coins))])

    def parted(self, cohort: Cohort) -> tuple[Tensor, Cohort]:
        """The places of the canaries in a cohort, and the cohort without them."""
        canary = cohort.users >= self.first
        return torch.from_numpy(cohort.users[canary] - self.first), replace(cohort, users=cohort.users[~canary])

    def evaluate(self, method: Method, shared: Tree) -> Evaluated:
        return Evaluated({})


class WatchedReports(WithCanaries):
    """It keeps what the canaries' reports say of the coins."""

    relation: ClassVar[Relation] = "replace-one"
    straight: None = None

    def __init__(self, inner: Simulator, channel: Channel, stage: ImpressionReport, coins: Tensor, rng: Rng) -> None:
        super().__init__(inner, coins)
        self.channel, self.stage = channel, stage
        self.evidence: dict[str, Tensor] = {"server": torch.zeros(len(coins), dtype=torch.float64)}
        # Two items are the fewest among which a click can be hidden.
        items = rng.fold("shown").integers(self.catalogue.n_items // 2, len(coins))
        self.shown = torch.stack([2 * items, 2 * items + 1], 1)

    def collect(self, method: Method, shared: Tree, cohort: Cohort, rng: Rng, step: int) -> Collected:
        drawn, real = self.parted(cohort)
        got = super().collect(method, shared, real, rng, step)
        reports = self._reports(drawn, rng.private.fold("canaries"))
        self.evidence["server"][drawn] += self._ratio(reports, drawn)
        joined = {name: torch.cat([got.total.messages[name].cpu(), value]) for name, value in reports.items()}
        messages = {name: value.to(self.device) for name, value in joined.items()}
        return replace(got, total=replace(got.total, messages=messages))

    def _reports(self, drawn: Tensor, rng: Rng) -> dict[str, Tensor]:
        """What these canaries send."""
        side = (~self.coins[drawn]).long()
        update = {
            "interest": opposites(self.stage)[side],
            "shown": self.shown[drawn].float(),
            "click": torch.eye(2)[side],
        }

        def send(key: Tensor, update: Update) -> Update:
            return self.channel.device(update, Rng(key))

        sent: dict[str, Tensor] = vmap(send)(rng.fold(drawn).key, update)
        return sent

    def _ratio(self, reports: dict[str, Tensor], drawn: Tensor) -> Tensor:
        """How much likelier heads is than tails, as a logarithm."""
        heads, tails = opposites(self.stage)
        told, shown, query = reports[self.stage.told], self.shown[drawn], self.stage.query
        sides = []
        for side, interest in enumerate((heads, tails)):
            same = interest.expand(len(drawn), -1)
            place = torch.full((len(drawn),), side)
            click = click_likelihood(self.stage.epsilon, reports["news"][:, 0], shown, shown >= 0, place)
            sides.append(interest_likelihood(query, told, same) + click)
        return sides[0] - sides[1]

    def in_model(self, after: Tree) -> None:
        """Nothing: the model does not hold reports as they were sent."""
