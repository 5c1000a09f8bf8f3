"""Reports on impressions: what a person is interested in, and what they clicked, both randomised on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from homebody.core import CALL, HEAD_BYTES, Cohort, Total, Tree, Update, Work
from homebody.errors import HomebodyError, several
from homebody.privacy.events import OBSERVERS, Charge, Event, PureRelease, Unit
from homebody.privacy.queries import Attention, Choice, Mechanism, before_padding, randomised
from homebody.privacy.stages import Facts, Stage, check_number
from homebody.rng import Rng

__all__ = ["ImpressionReport"]

LARGEST = 6e4
"""The largest weight that is sent: they take 16 bits each."""


@dataclass(frozen=True)
class ImpressionReport(Stage):
    """One report on one impression, instead of the update: an interest, a pseudo-click and negatives.

    A client hands over `interest` (B numbers), `shown` (the items of an impression, -1 pads) and `click` (1 at the
    true click). The device tells

    - the interest, as weights of B basis vectors (`attention`) or as the best of them (`choice`),
    - as `news`, a pseudo-click, drawn by randomised response over **all** C shown items, then `negatives` of the other
      C − 1, drawn evenly: the true click may be among them.

    `candidates` says what C is. 0: an impression's items, as the server ranked and showed them, so that it knows them.
    Else so many items that the server draws without reading any data, the same for everyone in a round: for lists that
    the server does not know. Then the click is one of them, or none.

    Who has no click among C, or none at all, tells one of them drawn evenly; whose B numbers are all alike, a choice
    drawn evenly. So nobody can tell such a report from another.

    Both halves of a report have ε. A click is in the history or in the label of an impression, so a report costs ε for
    one interaction; a person may change both, which costs 2ε. `padding` is the probability with which **the method
    hides each news of the history** before it computes the interest: for one interaction that is replaced by another
    at the same place it allows less noise at the same ε; a whole history is then covered by that noise alone. A method
    that states a padding must hide in `prepare`, as PrivateRec does: the stage cannot check it.

    The server reads each report and gets them all, stacked, as `Total.messages`, in an order that is theirs alone: it
    does not depend on who sent which.

    >>> stage = ImpressionReport(epsilon=50.0, basis=2, negatives=1)
    >>> one = {"interest": torch.tensor([0.0, 9.0]), "shown": torch.tensor([7.0, 5.0, -1.0]),
    ...     "click": torch.tensor([0.0, 1.0, 0.0])}
    >>> told = stage.device(one, Rng.of(0))
    >>> told["choice"].item(), told["news"].tolist()
    (1, [5, 7])
    """

    epsilon: float
    mechanism: Literal["choice", "attention"] = "choice"
    basis: int = 16
    theta: float = 1.0
    noise: Literal["laplace", "gaussian"] = "laplace"
    delta: float = 1e-3
    padding: float = 0.0
    negatives: int = 4
    candidates: int = 0

    reads = True

    def __post_init__(self) -> None:
        check_number("ε of a report", self.epsilon)
        check_number("θ, the norm of attention weights,", self.theta)
        for name, value, known in (
            ("mechanism", self.mechanism, ("choice", "attention")),
            ("noise", self.noise, ("laplace", "gaussian")),
        ):
            if value not in known:
                raise HomebodyError(f"The {name} of an impression report is {' or '.join(known)}, not '{value}'.")
        if type(self.basis) is not int or self.basis < 2:
            raise HomebodyError(f"An interest is among 2 basis vectors or more, not {self.basis!r}.")
        if type(self.negatives) is not int or self.negatives < 1:
            raise HomebodyError(f"A report has 1 negative or more, not {self.negatives!r}.")
        if type(self.candidates) is not int or not (self.candidates == 0 or self.candidates > self.negatives):
            raise HomebodyError(
                "The candidates of a report are 0, for what was shown, or more than its "
                f"{several(self.negatives, 'negative')}, not {self.candidates!r}."
            )
        if not 0 <= self.padding < 1:
            raise HomebodyError(
                f"padding, the chance that a news is hidden, is at least 0 and under 1, not {self.padding!r}."
            )
        if self.gaussian and not 0 < self.delta < 1:
            raise HomebodyError(f"δ of Gaussian noise is between 0 and 1, not {self.delta!r}.")

    @property
    def gaussian(self) -> bool:
        return self.mechanism == "attention" and self.noise == "gaussian"

    @property
    def query(self) -> Mechanism:
        """How the interest is told."""
        epsilon, delta = before_padding(self.epsilon, self.delta if self.gaussian else 0.0, self.padding)
        if self.mechanism == "choice":
            return Choice(epsilon, basis=self.basis)
        return Attention(epsilon, delta, self.theta, self.noise, size=self.basis)

    def place(self, facts: Facts) -> tuple[Self, Facts]:
        if facts.hidden:
            raise HomebodyError(f"Impression reports cannot follow {facts.hidden}: they are noise enough; keep one.")
        names_lists = facts.names_lists or not self.candidates
        return self, replace(facts, norms={}, hidden="impression reports", unknown="", names_lists=names_lists)

    def work(self, given: Work) -> Work:
        entries = given.bytes // 4
        return Work(given.memory + 64 * entries, given.operations + 2_000 * entries + 100 * CALL, HEAD_BYTES)

    def device(self, update: Update, rng: Rng) -> Update:
        interest = update["interest"]
        told = self.query.device(interest, rng.fold("interest"))
        if self.mechanism == "choice":
            known = interest.nan_to_num()
            alike = (known == known[:1]).all()
            told = torch.where(alike, rng.fold("any interest").integers(self.basis, 1)[0].to(told.dtype), told)
        if told.is_floating_point():
            told = told.clamp(-LARGEST, LARGEST).to(torch.float16)  # after the noise, so it tells no more
        return {self.told: told, "news": self._news(update["shown"], update["click"], rng)}

    @property
    def told(self) -> str:
        """The name under which the interest is sent."""
        return "choice" if self.mechanism == "choice" else "weights"

    def _news(self, shown: Tensor, click: Tensor, rng: Rng) -> Tensor:
        """(negatives + 1,) the pseudo-click, then others that were shown; -1 where there are too few."""
        items, real = shown.to(torch.int32), shown >= 0
        order = real.cumsum(0) - 1  # each item's number among those that are no padding
        true = order.gather(0, torch.where(real, click, -1.0).argmax(0, keepdim=True))[0].clamp(min=0)
        drawn = randomised(true, real.sum(), self.epsilon, rng.fold("click"))
        any_of_them = (((rng.fold("any click").bits(1)[0] >> 32) & 0xFFFFFFFF) * real.sum()) >> 32
        drawn = torch.where((real & (click > 0)).any(), drawn, any_of_them)
        chosen = real & (order == drawn)
        keys = torch.where(chosen, torch.inf, rng.fold("negatives").uniform(len(shown)))
        keys = torch.where(real, keys, -1.0)
        count = min(self.negatives + 1, len(shown))
        best, place = keys.topk(count)
        news = torch.where(best >= 0, items.gather(0, place), -1)
        return torch.cat([news, news.new_full((self.negatives + 1 - count,), -1)])

    def nothing(self, update: Update) -> Update:
        """No click, and an interest that is alike in all: both are told as uniform draws."""
        return {**super().nothing(update), "shown": update["shown"]}

    def admits(self, message: Update, n_items: int) -> bool:
        news = message["news"]
        inside = bool(((news >= -1) & (news < n_items)).all())
        return inside and ("choice" not in message or 0 <= int(message["choice"]) < self.basis)

    def read(self, messages: Update, sums: Tree) -> None:
        for name, value in messages.items():
            sums[name] = torch.cat([sums[name], value]) if name in sums else value

    def server(self, total: Total, rng: Rng) -> Total:
        return Total({}, total.clients, messages=_in_order(total.sum))

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        whole, click = self.query.event, PureRelease(self.epsilon)
        told: list[tuple[Unit, str, Event]]
        if isinstance(whole, PureRelease):
            told = [("user", "", PureRelease(whole.epsilon + self.epsilon)), ("interaction", "", click)]
        else:
            # A click may be in the history of one report and the label of another: both are charged, the safe side.
            hidden = PureRelease(self.epsilon, self.delta) if self.padding else whole
            told = [("user", "history", whole), ("user", "click", click)]
            told += [("interaction", "history", hidden), ("interaction", "click", click)]
        return [Charge(observer, unit, event, part) for observer in OBSERVERS for unit, part, event in told]


def _in_order(reports: Tree) -> Tree:
    """The reports in the order of their bytes: in any other, their places might tell who sent them.

    >>> _in_order({"choice": torch.tensor([2, 0]), "news": torch.tensor([[7], [5]])})["news"].tolist()
    [[5], [7]]
    """
    if not reports:
        return reports
    rows = [value.cpu().flatten(1) if value.dim() > 1 else value.cpu()[:, None] for _, value in sorted(reports.items())]
    whole = np.concatenate([part.contiguous().numpy().view(np.uint8) for part in rows], axis=1)
    order = np.lexsort(whole.T[::-1])
    return {name: value[torch.from_numpy(order).to(value.device)] for name, value in reports.items()}
