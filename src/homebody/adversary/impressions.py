"""What a report on an impression tells: a game between two people, or two clicks, and one report.

A device of a certified PrivateRec sends an interest, a pseudo-click and negatives, all randomised
(`homebody.privacy.ImpressionReport`). The attacker knows the shared parameters, the shown news, and two candidates for
what the person did. A fair coin decides which of them the device gets. The device reports as it would in training, and
the attacker computes the likelihood of that report under either candidate. No attack on one report is stronger than
the ratio of the two.

| question | the candidates differ in | certified |
|---|---|---|
| one past click | one news item of the history | ε |
| the click | which of the shown news was clicked | ε |
| a history | all of the history: two people's | ε′, of the noise without padding |
| a person | history and click | ε′ + ε |

Negatives are drawn evenly among the shown news that are not the pseudo-click, whatever the person did: they have no
part in the ratio. Candidates are not drawn blindly: of a few, the attacker takes the one whose exact interest is
farthest away. With padding the exact likelihood is a mean over all ways to hide news; it is estimated from `WAYS`. A
worse estimate makes a bound smaller, never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from homebody.adversary import bounds
from homebody.adversary.rates import Allowed, Figure, delong
from homebody.adversary.words import drawn
from homebody.core import Method, Tree, Update
from homebody.errors import HomebodyError
from homebody.methods.privaterec import PrivateRec
from homebody.models.news import encode_many
from homebody.privacy import Channel
from homebody.privacy.impressions import ImpressionReport
from homebody.privacy.queries import Attention, Mechanism, clipped, truth
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.text_vectors import news_inputs

__all__ = ["GameAnswer", "click_likelihood", "exact", "interest_likelihood", "report_stage", "tell_apart"]

TRIALS = 20_000
"""The interval of an AUC near 0.5 is then ± 0.008."""
USERS = 300
CANDIDATES = 8
"""Of so many, the attacker takes the candidate that is farthest from the first."""
WAYS = 64
"""Ways to hide news of a history over which a likelihood is estimated."""
NUMBERS_AT_ONCE = 1 << 24
"""Numbers of news vectors that are held at once."""
Step = Callable[[int, int], None]


def report_stage(channel: Channel) -> ImpressionReport | None:
    """The stage that makes reports on impressions, or None."""
    return next((stage for stage in channel.stages if isinstance(stage, ImpressionReport)), None)


@dataclass(frozen=True)
class GameAnswer:
    """How well one question was answered."""

    question: str
    auc: Figure
    """Of the likelihood ratio against the coin, with its interval of 95 %."""
    lower: bounds.Lower
    epsilon: float
    """What is certified for one report."""
    delta: float

    @property
    def contradicted(self) -> bool:
        return self.lower.epsilon > self.epsilon

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "question": self.question,
            "auc": list(self.auc),
            "allowed_auc": Allowed(self.epsilon, self.delta).auc,
            "lower": asdict(self.lower),
            "certified": self.epsilon,
            "at_delta": self.delta,
            "contradicted": self.contradicted,
        }


def tell_apart(
    method: Method,
    simulator: Simulator,
    shared: Tree,
    *,
    users: int = USERS,
    trials: int = TRIALS,
    confidence: float = 0.95,
    seed: int = 0,
    step: Step = lambda done, total: None,
) -> list[GameAnswer]:
    """Play the game on reports of a trained model's next round.

    users: people whose histories and impressions are used. trials: coins for each question. If the mechanism is right,
    a bound passes what is certified with a probability of at most 1 − confidence, over all questions together.
    """
    stage = report_stage(method.uplink)
    if stage is None or not isinstance(method, PrivateRec):
        raise HomebodyError(f"{type(method).__name__} sends no reports on impressions here.")
    if trials < 100:
        raise HomebodyError(f"So few trials show nothing: take at least 100, better {TRIALS:,}, not {trials}.")
    rng = Rng.of(seed, "reports")
    game = _Game.of(method, stage, simulator, shared, users, rng)
    coins: list[Tensor] = []
    scores: dict[str, list[Tensor]] = {}
    parts = list(game.parts(trials, rng))
    for done, (some, stream) in enumerate(parts, start=1):
        side = (stream.fold("coins").bits(some) & 1).bool()
        coins.append(side)
        for name, score in game.played(side, stream).items():
            scores.setdefault(name, []).append(score)
        step(done, len(parts))
    tossed = torch.cat(coins).numpy()
    found = {name: torch.cat(parts).double().numpy() for name, parts in scores.items()}
    sure = 1 - (1 - confidence) / len(found)
    answers = []
    for name, (epsilon, delta) in _certified(stage).items():
        lower = bounds.clopper_pearson(found[name], tossed, delta, sure)
        answers.append(GameAnswer(name, delong(found[name], tossed), lower, epsilon, delta))
    return answers


def _certified(stage: ImpressionReport) -> dict[str, tuple[float, float]]:
    """The (ε, δ) of one report, for each question."""
    query, delta = stage.query, stage.delta if stage.gaussian else 0.0
    return {
        "one past click": (stage.epsilon, delta),
        "the click": (stage.epsilon, 0.0),
        "a history": (query.epsilon, query.delta),
        "a person": (query.epsilon + stage.epsilon, query.delta),
    }


class _Side(NamedTuple):
    """Histories (n, L) of items, one a trial, and the places (n,) of what was clicked."""

    history: Tensor
    click: Tensor


@dataclass(frozen=True)
class _Game:
    """What all trials share."""

    method: PrivateRec
    stage: ImpressionReport
    shared: Tree
    news: Tensor
    """(items + 1, d) the vectors of all news; the last is no news."""
    histories: Tensor
    """(people, L) items, padded with the number of items."""
    shown: Tensor
    """(people, C) the items of their impressions, or the server's candidates, padded likewise; each has two or more."""

    @classmethod
    def of(
        cls, method: PrivateRec, stage: ImpressionReport, simulator: Simulator, shared: Tree, users: int, rng: Rng
    ) -> _Game:
        catalogue = simulator.catalogue
        generator = np.random.default_rng(int(rng.fold("users").key) % 2**64)
        drawn_users = generator.permutation(simulator.available())[:users].tolist()
        people = [drawn(method, simulator, shared, user, rng.fold("round")) for user in drawn_users]
        n_items = catalogue.n_items
        people = [one for one in people if int((one.shown < n_items).sum()) > 1 and bool((one.history < n_items).any())]
        if len(people) < 2:
            raise HomebodyError("The game takes two people with a history and two shown news each: there are fewer.")
        inputs = news_inputs(method.news, catalogue, shared["pad"].device)
        vectors = encode_many(method.news, shared, inputs)[0].cpu()
        padded = partial(pad_sequence, batch_first=True, padding_value=n_items)
        history, shown = (padded([getattr(one, name) for one in people]) for name in ("history", "shown"))
        if method.candidates:  # drawn by the server for everyone
            drawn_items = shared["candidates"].cpu().long()
            shown = torch.where(drawn_items < 0, n_items, drawn_items).expand(len(people), -1)
        return cls(method, stage, {name: value.cpu() for name, value in shared.items()}, vectors, history, shown)

    @property
    def nobody(self) -> int:
        """What pads items."""
        return len(self.news) - 1

    @property
    def size(self) -> int:
        """Trials that are played at once."""
        ways = max(CANDIDATES, 2 * WAYS if self.stage.padding else 0)
        return max(1, NUMBERS_AT_ONCE // (ways * self.histories.shape[1] * self.news.shape[1]))

    def parts(self, trials: int, rng: Rng) -> Iterator[tuple[int, Rng]]:
        """How many trials are played at once, and their stream."""
        for number, start in enumerate(range(0, trials, self.size)):
            yield min(self.size, trials - start), rng.fold("trials", number)

    def played(self, coins: Tensor, rng: Rng) -> dict[str, Tensor]:
        """The logarithm of the likelihood ratio of each trial, by question; positive speaks for a coin of True."""
        count = len(coins)
        person = rng.fold("person").integers(len(self.histories), count)
        shown = self.shown[person]
        real = shown < self.nobody
        # Clicks are drawn evenly: the mechanism must hide any of them.
        first = _Side(self.histories[person], _place_of(real, rng.fold("click")))
        others = self.histories[rng.fold("others").integers(len(self.histories), count, CANDIDATES)]
        free = real.scatter(1, first.click[:, None], False)
        other = _Side(self._farthest(first.history, others), _place_of(free, rng.fold("other click")))
        report = self._report(_chosen(coins, first, other), shown, rng.fold("report"))
        whole = self._interest_ratio(report, first.history, other.history, rng.fold("ways"))
        click = self._click_ratio(report, shown, first.click, other.click)
        neighbour = self._farthest(first.history, self._neighbours(first.history, rng.fold("neighbours")))
        near = first._replace(history=neighbour)
        again = self._report(_chosen(coins, first, near), shown, rng.fold("again"))
        return {
            "one past click": self._interest_ratio(again, first.history, neighbour, rng.fold("ways", "near")),
            "the click": click,
            "a history": whole,
            "a person": whole + click,
        }

    def _neighbours(self, history: Tensor, rng: Rng) -> Tensor:
        """(n, candidates, L) the same histories, each with another news item in one place."""
        count, width = history.shape
        keys = (history < self.nobody)[:, None] * rng.fold("place").uniform(count, CANDIDATES, width)
        place, item = keys.argmax(2, keepdim=True), rng.fold("item").integers(self.nobody, count, CANDIDATES, 1)
        return history[:, None].repeat(1, CANDIDATES, 1).scatter(2, place, item)

    def _farthest(self, history: Tensor, candidates: Tensor) -> Tensor:
        """(n, L) of each trial's candidates, the one whose exact interest is farthest from that of the history."""
        told = exact(self.stage.query, self._interest(candidates)).double()
        own = exact(self.stage.query, self._interest(history)).double()
        best = (told - own[:, None]).abs().sum(2).argmax(1)
        return candidates[torch.arange(len(best)), best]

    def _interest(self, history: Tensor, hidden: Tensor | None = None) -> Tensor:
        """(…, B) the interests of histories (…, L)."""
        flat = history.flatten(0, -2)
        covered = torch.zeros_like(flat, dtype=torch.bool) if hidden is None else hidden.flatten(0, -2)

        def one(items: Tensor, hidden: Tensor) -> Tensor:
            return self.method.interest(self.shared, self.news[items], items < self.nobody, hidden)

        found: Tensor = vmap(one)(flat, covered)
        return found.reshape(*history.shape[:-1], -1)

    def _hidden(self, rng: Rng, *shape: int) -> Tensor:
        return rng.uniform(*shape) < self.stage.padding

    def _report(self, side: _Side, shown: Tensor, rng: Rng) -> Update:
        """What devices send of these histories and clicks, through the run's own channel."""
        interest = self._interest(side.history, self._hidden(rng.fold("hidden"), *side.history.shape))
        given = {
            "interest": interest,
            "shown": torch.where(shown < self.nobody, shown, -1).float(),
            "click": torch.zeros(shown.shape).scatter(1, side.click[:, None], 1.0),
        }
        keys = rng.fold("device").fold(torch.arange(len(shown))).key
        return vmap(lambda key, update: self.method.uplink.device(update, Rng(key)))(keys, given)

    def _interest_ratio(self, report: Update, first: Tensor, other: Tensor, rng: Rng) -> Tensor:
        """log P[told | first] − log P[told | other]."""
        told, sides = report[self.stage.told], []
        for name, history in (("first", first), ("other", other)):
            ways = history[:, None].expand(-1, WAYS if self.stage.padding else 1, -1)
            interest = self._interest(ways, self._hidden(rng.fold(name), *ways.shape))
            sides.append(interest_likelihood(self.stage.query, told[:, None], interest).logsumexp(1))
        return sides[0] - sides[1]

    def _click_ratio(self, report: Update, shown: Tensor, first: Tensor, other: Tensor) -> Tensor:
        told, real = report["news"][:, 0], shown < self.nobody
        sides = [click_likelihood(self.stage.epsilon, told, shown, real, place) for place in (first, other)]
        return sides[0] - sides[1]


def _place_of(free: Tensor, rng: Rng) -> Tensor:
    """One of the places that are free in each row."""
    return (free * rng.uniform(*free.shape)).argmax(1)


def _chosen(coins: Tensor, first: _Side, other: _Side) -> _Side:
    """What the device gets: the first candidate where the coin is True."""
    return _Side(
        torch.where(coins[:, None], first.history, other.history), torch.where(coins, first.click, other.click)
    )


def exact(query: Mechanism, interest: Tensor) -> Tensor:
    """(…, B) what would be told of an interest without noise; a choice is 1 at its place.

    >>> from homebody.privacy.queries import Choice
    >>> exact(Choice(1.0, basis=2), torch.tensor([0.3, 0.1])).tolist()
    [1.0, 0.0]
    """
    if isinstance(query, Attention):
        return clipped(interest.nan_to_num().softmax(-1), query.theta)
    best = interest.nan_to_num().argmax(-1, keepdim=True)
    return (torch.arange(interest.shape[-1], device=interest.device) == best).float()


def interest_likelihood(query: Mechanism, told: Tensor, interest: Tensor) -> Tensor:
    """log P[told | interest], less what is the same for all interests (…, B)."""
    without = exact(query, interest).double()
    if not isinstance(query, Attention):
        size = torch.tensor(without.shape[-1])
        honest = float(truth(query.epsilon, size))
        right = without.gather(-1, told.long().expand(without.shape[:-1])[..., None])[..., 0] > 0.5
        return torch.where(right, math.log(honest), math.log((1 - honest) / (int(size) - 1)))
    apart = (told.double() - without).abs() / query.scale
    return -(apart if query.noise == "laplace" else apart**2 / 2).sum(-1)


def click_likelihood(epsilon: float, told: Tensor, shown: Tensor, real: Tensor, place: Tensor) -> Tensor:
    """log P[pseudo-click | the click is in this place], for impressions (n, C) of which some places are real."""
    count = real.sum(1)
    honest = truth(epsilon, count)
    single = (1 - honest) / (count - 1).clamp(min=1)
    return torch.where(told == shown.gather(1, place[:, None])[:, 0], honest, single).log()
