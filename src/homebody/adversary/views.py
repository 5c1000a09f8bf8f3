"""Fifth attack: one app of a person reads what another app gave.

All views but one send nulls and read the aggregate that the device hands back: what is left in it is the part of the
attacked view, and noise. Every view has the samples, as in Algorithm 1 of FL-MV-DSSM, so the attacker computes what
each candidate for the other view's features would have given, and picks the one that is nearest to what it read over T
participations: a matched filter. Where user towers are aggregated it has the attacked view's tower; where they stay
home (SEMI) it has none but the one that everybody started with.

Three questions are asked, each with a truth that is drawn among its candidates, so that guessing without reading is
worth nothing:

- one **feature**, such as gender: everything else about the person is known;
- the whole **profile**: the person's own, and those of others;
- two **opposite** parts, as long as the device allows: nothing can be easier to tell apart, and it shows whether the
  noise is what it is said to be.

A view's part lies in a ball of radius C, and the noise has σC in each coordinate. So K candidates are told apart in no
more than Φ(Φ⁻¹(1/K) + √T/σ) of all cases, by whatever attack: a test that takes Q(A) of the pure noise takes at most
Φ(Φ⁻¹(Q(A)) + √T/σ) of the noise around any point of the ball; the K regions share a Q of 1; and that is concave. For
two candidates it is Φ(√T/σ).

The noise is drawn by the device's own stages, in every coordinate. It does not depend on what it covers, so one message
serves all questions: what the message shows beyond the part that went in is the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import vmap

from homebody.adversary.rates import clopper_pearson_interval
from homebody.core import Batch, Column, Method, Tree, Update
from homebody.errors import HomebodyError, refuse_unknown
from homebody.methods.fl_mv_dssm import FLMVDSSM
from homebody.models.towers import inputs
from homebody.privacy import Channel, ViewNoise, Views
from homebody.privacy.stages import dense, mapped
from homebody.rng import Rng
from homebody.simulation import Simulator

__all__ = ["CANDIDATES", "FIRST", "KNOWN", "MEAN", "PARTICIPATIONS", "SIGMAS", "Guess", "most_right", "read_view"]

SIGMAS = (0.0, 1.0, 4.0)
"""Noise multipliers, beside the run's own: none, the paper's experiments, the paper's example."""
PARTICIPATIONS = (1, 10, 100)
USERS = 30
CANDIDATES = 10
"""Profiles to choose from, the true one among them, if there are so many."""
CONFIDENCE = 0.99
"""That noise which is as stated is not contradicted."""
KNOWN, FIRST, MEAN = "known", "the first", "mean of others"
"""What the attacker has of the attacked view's tower: itself; that which everyone began with; the mean of those of a
few devices that it runs itself."""
OWN_DEVICES = 10
HUGE = 1e6
"""A gradient times this is longer than any clip, so that the device cuts it."""
Floats = npt.NDArray[np.float64]
Step = Callable[[int, int], None]


def most_right(sigma: float, participations: int, candidates: int = 2) -> float:
    """The largest share of right guesses that noise of this multiplier allows.

    >>> round(most_right(4, 1), 4), round(most_right(4, 100), 4), most_right(0, 1), round(most_right(4, 1, 10), 4)
    (0.5987, 0.9938, 1.0, 0.1511)
    """
    if not sigma:
        return 1.0
    normal = NormalDist()
    return normal.cdf(normal.inv_cdf(1 / candidates) + math.sqrt(participations) / sigma)


@dataclass(frozen=True)
class Guess:
    """How often a question was answered rightly, over people and their participations."""

    question: str
    tower: str
    """What the attacker has of the attacked view's tower."""
    sigma: float
    participations: int
    candidates: int
    right: int
    trials: int
    deviation: float
    """Of the share, over people."""
    computed: float | None
    """The share that the distances of the candidates' parts give, without drawing noise; for two candidates."""
    error: float
    """The probability with which a share at the limit is called above it."""

    @property
    def most(self) -> float:
        return most_right(self.sigma, self.participations, self.candidates)

    @property
    def above(self) -> bool:
        """Whether more is right than noise allows, beyond what chance explains."""
        return clopper_pearson_interval(self.right, self.trials, 2 * self.error).low > self.most

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        share, low, high = clopper_pearson_interval(self.right, self.trials)
        said = {name: value for name, value in asdict(self).items() if name not in ("right", "error")}
        return {**said, "accuracy": share, "interval": [low, high], "most": self.most, "above": self.above}


def read_view(
    method: Method,
    simulator: Simulator,
    shared: Tree,
    *,
    target: str | None = None,
    feature: str | None = None,
    sigmas: Sequence[float] = SIGMAS,
    participations: Sequence[int] = PARTICIPATIONS,
    users: int = USERS,
    candidates: int = CANDIDATES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
    step: Step = lambda done, total: None,
) -> dict[str, Any]:
    """Attack one view of some people in the next rounds of a trained model; what was found, ready for JSON.

    target: the attacked view; None: the first with a feature of a few values. feature: what is guessed; None: the
    feature of the target with the fewest values. sigmas: noise multipliers, in place of the run's. participations: how
    many messages are read before a guess. The model stays as it is, and the samples are drawn anew for each message.
    step: receives how many people of how many are done.
    """
    _check(sigmas, participations, users, candidates, confidence)
    attack = _Attack.of(method, simulator, shared, target, feature)
    rng = Rng.of(seed, "view")
    generator = np.random.default_rng(int(rng.fold("people").key) % 2**64)
    known = attack.people(generator)
    people, assumed = known[:users], attack.assumed((known[users:] or known)[:OWN_DEVICES])
    candidates = min(candidates, len(attack.profiles))
    lengths, sigmas = sorted(set(participations)), sorted({float(one) for one in sigmas})
    seen = []
    for done, user in enumerate(people, start=1):
        given = attack.inputs(user, candidates, generator)
        seen.append(attack.read(user, given, sigmas, lengths[-1], assumed, rng.fold("round")))
        step(done, len(people))
    asked = [
        (question, tower, sigma, length)
        for tower, questions in seen[0].answers.items()
        for question in questions
        for sigma in sigmas
        for length in lengths
    ]
    guesses = []
    for question, tower, sigma, length in asked:
        blocks = [one.answers[tower][question].blocks(sigmas.index(sigma), length) for one in seen]
        of = (question, tower, sigma, length)
        guesses.append(_guess(of, blocks, attack.stage.clip, (1 - confidence) / len(asked), generator))
    return {
        "target": attack.target,
        "attackers": attack.others,
        "feature": attack.feature,
        "people": len(people),
        "candidates": candidates,
        "clip": attack.stage.clip,
        "clipped": float(np.mean([one.clipped for one in seen])),
        "errors": [
            {"sigma": sigma, "median": float(np.median(errors)), "largest": float(np.max(errors))}
            for sigma, errors in zip(sigmas, np.concatenate([one.errors for one in seen], axis=1), strict=True)
        ],
        "guesses": [one.as_dict() for one in guesses],
        "confidence": confidence,
        "contradicted": any(one.above for one in guesses),
    }


class _ViewAnswers(NamedTuple):
    """What decides one question: for each message, products of the candidates' parts with what the attacker expects.

    The nearest candidate is the one with the largest (part + noise) · expected − |expected|² / 2.
    """

    cross: Floats
    """(messages, K, K) the part that each candidate gives, times what is expected of each."""
    own: Floats
    """(messages, K) |expected|²."""
    noise: Floats
    """(σ, messages, K) the noise times what is expected; (1, messages, K) where a σ is chosen."""

    def of(self, candidates: Sequence[int]) -> _ViewAnswers:
        """The question which of these it is."""
        some = list(candidates)
        return _ViewAnswers(self.cross[:, some][:, :, some], self.own[:, some], self.noise[:, :, some])

    def opposite(self) -> _ViewAnswers:
        """The question whether it is the last candidate's part or the opposite of it."""
        signs = np.array([1.0, -1.0])
        cross = self.cross[:, -1:, -1:] * np.outer(signs, signs)
        return _ViewAnswers(cross, self.own[:, [-1, -1]], self.noise[:, :, -1:] * signs)

    def blocks(self, sigma: int, length: int) -> _ViewAnswers:
        """With one σ, and with messages summed by so many, which are guessed from together."""
        count = len(self.own) // length

        def summed(values: Floats) -> Floats:
            total: Floats = values[: count * length].reshape(count, length, *values.shape[1:]).sum(1)
            return total

        return _ViewAnswers(summed(self.cross), summed(self.own), summed(self.noise[sigma])[None])


def _guess(
    of: tuple[str, str, float, int],
    blocks: Sequence[_ViewAnswers],
    clip: float,
    error: float,
    generator: np.random.Generator,
) -> Guess:
    """Guess from each block of each person's messages. of: question, tower, σ and participations."""
    _, tower, sigma, _ = of
    rights = [_right(one, generator) for one in blocks]
    shares = [float(one.mean()) for one in rights]
    return Guess(
        *of,
        candidates=blocks[0].own.shape[1],
        right=int(sum(one.sum() for one in rights)),
        trials=sum(map(len, rights)),
        deviation=float(np.std(shares, ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0,
        computed=_computed(blocks, sigma * clip) if tower == KNOWN else None,
        error=error,
    )


def _right(answers: _ViewAnswers, generator: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Whether each guess is right. The truth is drawn among the candidates."""
    count, candidates = answers.own.shape
    truth = generator.integers(candidates, size=count)
    scores = answers.cross[np.arange(count), truth] + answers.noise[0] - answers.own / 2
    right: npt.NDArray[np.bool_] = scores.argmax(1) == truth
    return right


def _computed(some: Sequence[_ViewAnswers], scale: float) -> float | None:
    """The share of right guesses between two candidates, from how far apart their parts are."""
    if some[0].own.shape[1] != 2:
        return None
    apart = np.concatenate([one.own.sum(1) - one.cross[:, 0, 1] - one.cross[:, 1, 0] for one in some])
    distance = np.sqrt(np.maximum(apart, 0.0))
    if not scale:
        return float(np.mean(np.where(distance > 0, 1.0, 0.5)))
    normal = NormalDist()
    return float(np.mean([normal.cdf(one / (2 * scale)) for one in distance]))


class _Seen(NamedTuple):
    """What was read of one person."""

    answers: dict[str, dict[str, _ViewAnswers]]
    """By what the attacker has of the tower, and by question."""
    errors: Floats
    """(σ, messages) relative errors of the part that was read."""
    clipped: float
    """The share of the messages whose part was longer than the clip."""


@dataclass(frozen=True)
class _Attack:
    """The attacked view, and the views that attack it."""

    method: FLMVDSSM
    simulator: Simulator
    shared: Tree
    target: str
    others: list[str]
    feature: str
    """What is guessed; empty where no feature of the target has a few values."""
    stage: Views

    @classmethod
    def of(cls, method: Method, simulator: Simulator, shared: Tree, target: str | None, feature: str | None) -> _Attack:
        if not isinstance(method, FLMVDSSM):
            raise HomebodyError(f"{type(method).__name__} has no views: --attack view is for runs of fl-mv-dssm.")
        stage = method.uplink.facts.views
        if stage is None:
            raise HomebodyError("Nothing joins the views in this run's channel: train it with --stage views:clip=0.5.")
        views = method.people(simulator.catalogue)
        if len(views) < 2:
            raise HomebodyError("A single view has no other to attack: train with two views or more.")
        if target is None:
            target = next((name for name, columns in views.items() if _few(columns)), next(iter(views)))
        refuse_unknown("view of this run", [target], views)
        few = _few(views[target])
        asked = [] if feature is None else [feature]
        refuse_unknown(f"feature of '{target}' with one value of several", asked, few)
        if feature is None:
            feature = min(few, key=lambda name: few[name].size, default="")
        others = [name for name in views if name != target]
        # Drawing views changes how often a view takes part, not what a message of it tells.
        return cls(method, simulator, shared, target, others, feature, replace(stage, sample=0, count=len(views)))

    @property
    def columns(self) -> dict[str, Column]:
        return self.method.people(self.simulator.catalogue)[self.target]

    def values(self, user: int) -> dict[str, Tensor]:
        """What the attacked view knows of a person."""
        known = self.simulator.split.encoded["users"].columns
        return {name: torch.as_tensor(known[name].values[user]) for name in self.columns}

    def people(self, generator: np.random.Generator) -> list[int]:
        """Those of whom the attacked view knows what is asked, in random order."""
        found = []
        for user in generator.permutation(self.simulator.available()).tolist():
            own = self.values(user)
            if bool(inputs(self.columns, own).any()) and (not self.feature or int(own[self.feature]) > 0):
                found.append(user)
        if not found:
            raise HomebodyError(f"The view '{self.target}' knows of nobody in training what the attack asks.")
        return found

    @cached_property
    def profiles(self) -> Tensor:
        """(distinct, width) all inputs of the attacked view among people who train."""
        every = torch.stack([inputs(self.columns, self.values(user)) for user in self.simulator.available().tolist()])
        distinct = torch.from_numpy(np.unique(every[every.any(1)].numpy(), axis=0))
        if len(distinct) < 2:
            raise HomebodyError(f"The view '{self.target}' is the same for everyone: there is nothing to guess.")
        return distinct

    def inputs(self, user: int, count: int, generator: np.random.Generator) -> Tensor:
        """(K, width) the person's own input, other people's, and last the own with another value of the feature."""
        own = self.values(user)
        mine = inputs(self.columns, own)
        others = self.profiles[(self.profiles != mine).any(1)]
        found = [mine[None], others[torch.from_numpy(generator.permutation(len(others))[: count - 1])]]
        if self.feature:
            codes = [one for one in range(1, self.columns[self.feature].size) if one != int(own[self.feature])]
            other = torch.as_tensor(int(generator.choice(codes)), dtype=own[self.feature].dtype)
            found.append(inputs(self.columns, {**own, self.feature: other})[None])
        return torch.cat(found).to(self.simulator.device)

    def read(
        self, user: int, given: Tensor, sigmas: Sequence[float], count: int, assumed: Mapping[str, Tree], rng: Rng
    ) -> _Seen:
        """Read so many messages of a person, under each noise. assumed: towers in place of the person's."""
        batches = self.simulator.participations(self.method, user, rng, count)
        towers = {KNOWN: self.simulator.private_state(self.method, self.shared, user), **assumed}
        channels = [Channel(self.stage, ViewNoise(sigma)) if sigma else Channel(self.stage) for sigma in sigmas]
        lines: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in towers}
        errors, clipped = [], 0
        for number in range(count):
            batch = {name: value[number] for name, value in batches.items()}
            raw = self._gradient(given[0], towers[KNOWN], batch)
            parts = self._parts(given, towers[KNOWN], batch)
            own = rng.fold("noise", user).fold(number)
            read = [self._aggregate(raw, channel, own.fold(place)) for place, channel in enumerate(channels)]
            noise = torch.stack(read) - parts[0]
            errors.append(noise.norm(dim=1) / parts[0].norm().clamp(min=1e-30))
            clipped += bool(_flat(raw).norm() > self.stage.clip)
            for name, tower in towers.items():
                expected = parts if name == KNOWN else self._parts(given, tower, batch)
                lines[name].append((parts @ expected.T, (expected**2).sum(1), noise @ expected.T))
        found = {name: self._answers(one, len(given), name) for name, one in lines.items()}
        return _Seen(found, torch.stack(errors, 1).cpu().numpy(), clipped / count)

    def _answers(self, lines: Sequence[tuple[Tensor, ...]], given: int, tower: str) -> dict[str, _ViewAnswers]:
        cross, own, noise = (torch.stack(one).cpu().numpy() for one in zip(*lines, strict=True))
        whole = _ViewAnswers(cross, own, noise.transpose(1, 0, 2))
        profiles = given - bool(self.feature)
        found = {self.feature: whole.of([0, profiles])} if self.feature else {}
        found["profile"] = whole.of(range(profiles))
        return {**found, "opposite": whole.opposite()} if tower == KNOWN else found

    def assumed(self, helpers: Sequence[int]) -> dict[str, Tree]:
        """What the attacker has in place of the attacked view's tower, where it is not given it."""
        if self.method.aggregate_users:
            return {}
        states = [self.simulator.private_state(self.method, self.shared, user) for user in helpers]
        start = {name: self.shared[name] for name in states[0] if name in self.shared}
        return {FIRST: start, MEAN: {name: torch.stack([one[name] for one in states]).mean(0) for name in start}}

    def _gradient(self, given: Tensor, tower: Tree, batch: Batch) -> Update:
        """The attacked view's gradient of the item tower, if this is what it knows of the person."""
        own = self.method.view(self.target, self.shared, tower, {**batch, f"{self.target}/input": given})
        return {f"{self.target}/{name}": one for name, one in own.items() if name.startswith("item/")}

    def _parts(self, given: Tensor, tower: Tree, batch: Batch) -> Tensor:
        """(K + 1, numbers) each candidate's gradient as the device bounds it, and last the longest that it lets by."""
        alone = replace(self.stage, count=1)

        def bounded(own: Tensor, times: Tensor) -> Tensor:
            gradient = mapped(self._gradient(own, tower, batch), lambda one: one * times)
            return _flat(alone.device(gradient, Rng.of(0)))

        times = torch.ones(len(given) + 1, device=given.device)
        times[-1] = HUGE
        found: Tensor = vmap(bounded)(torch.cat([given, given[:1]]), times)
        return found.double()

    def _aggregate(self, raw: Update, channel: Channel, rng: Rng) -> Tensor:
        """What the attacker reads, times the number of views: all but the attacked one send nulls."""
        nulls = {
            f"{view}/{name}": one
            for view in self.others
            for name, one in self.method.silence(view, self.shared).items()
            if name.startswith("item/")
        }
        return _flat(channel.device({**raw, **nulls}, rng)).double() * (1 + len(self.others))


def _flat(update: Update) -> Tensor:
    return torch.cat([dense(one).flatten() for one in update.values()])


def _few(columns: Mapping[str, Column]) -> dict[str, Column]:
    """The features that have one value of two or more."""
    return {name: column for name, column in columns.items() if column.kind == "one" and column.size > 2}


def _check(
    sigmas: Sequence[float], participations: Sequence[int], users: int, candidates: int, confidence: float
) -> None:
    if not sigmas or not all(math.isfinite(one) and one >= 0 for one in sigmas):
        raise HomebodyError(f"Noise multipliers are numbers from 0 on, not {list(sigmas)}.")
    if not participations or min(participations) < 1:
        raise HomebodyError(f"A guess takes at least 1 participation, not {list(participations)}.")
    if users < 1:
        raise HomebodyError(f"The attack needs at least 1 person to read, not {users}.")
    if candidates < 2:
        raise HomebodyError(f"A profile is guessed among at least 2 candidates, not {candidates}.")
    if not 0 < confidence < 1:
        raise HomebodyError(f"A confidence lies between 0 and 1, not {confidence:g}.")
