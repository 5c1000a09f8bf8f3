"""Second attack: canaries. People who do not exist take part in the training, each by a fair coin, and the attacker
guesses the coins from what an observer sees. Guesses better than (ε, δ) allows refute it.

A canary always sends the same update: a random direction, as long as the clip allows, or of ones where one-bit reports
project on [−1, 1]. What the coin decides is what the certified ε is about:

| relation | heads | tails |
|---|---|---|
| replace-one | the canary takes part | someone with the opposite update does, in its place |
| add-remove | the canary takes part | nobody does |

The training is the run's own: the same method, stages, rounds and cohort, with real clients beside the canaries. They
make the population larger, so ε of the audited training is derived anew, by its own ledger, and that is what the lower
bound is held against. An attacker among the clients sees every round's sum as it is released. It knows everyone else's
update too where all take part and the server adds the noise: ε covers that. The public sees the final model alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from homebody.audit.bounds import FEWEST, Lower, clopper_pearson, one_run
from homebody.audit.views import decoded, hides_senders, whole
from homebody.core import (
    Cohort,
    Collected,
    Evaluated,
    Method,
    Newcomer,
    Opened,
    Recommended,
    Total,
    Tree,
    Update,
    Users,
)
from homebody.errors import HomebodyError
from homebody.fit import fit
from homebody.privacy import OBSERVERS, AskRows, Channel, Charge, Clip, Gaussian, Laplace, NonPrivate, OneBit, SecureSum
from homebody.privacy.ledger import DELTA
from homebody.progress import Round
from homebody.rng import Rng
from homebody.runtime import Simulator

__all__ = ["Finding", "plant"]

ENTRIES_AT_ONCE = 1 << 23
"""Of canaries' messages that are worked on together."""
MOST_ENTRIES = 1 << 28
"""Of all canaries' directions."""
MEASURED = 25
"""Messages whose length a canary takes where no clip says one."""


@dataclass(frozen=True)
class Finding:
    """What guessing the coins says about one observer."""

    observer: str
    certified: float
    """ε of the audited training."""
    lower: Lower | None
    """None: nothing this observer sees can be held against the canaries' directions."""

    @property
    def contradicted(self) -> bool:
        """Whether the certified ε is refuted, at the bound's confidence."""
        return self.lower is not None and self.lower.epsilon > self.certified

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        certified = self.certified if math.isfinite(self.certified) else "inf"
        lower = None if self.lower is None else asdict(self.lower)
        return {"observer": self.observer, "certified": certified, "lower": lower, "contradicted": self.contradicted}


def plant(
    method: Method,
    simulator: Simulator,
    *,
    rounds: int,
    cohort: int | None = None,
    canaries: int = 200,
    trials: int = 1,
    confidence: float = 0.95,
    delta: float = DELTA,
    seed: int = 0,
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """Train with canaries, `trials` times anew, and bound ε from below for each observer.

    With several canaries in a training it is the one-run estimator, over the coins of all trials; with one, trials are
    independent and it is Clopper and Pearson's. on_round: told how many rounds of how many are done.
    """
    _check(method, canaries, trials)
    coins: list[Tensor] = []
    scores: dict[str, list[Tensor]] = {}
    certified: dict[str, float] = {}
    for trial in range(trials):
        own = Rng.of(seed, "canary", trial)
        nest = _Nest.of(method, simulator, canaries, own)
        watched = _Watched(simulator, nest)

        def tell(line: Round, trial: int = trial) -> None:
            on_round(trial * rounds + line.step, trials * rounds)

        fitted = fit(
            method,
            watched,
            rounds=rounds,
            cohort=cohort,
            seed=int(own.fold("training").key),
            delta=delta,
            evaluate_every=0,
            on_round=tell,
        )
        certified = fitted.ledger.epsilons(delta)
        coins.append(nest.coins)
        for observer, found in {**watched.scores, "public": nest.in_model(watched.before, fitted.shared)}.items():
            if found is not None:
                scores.setdefault(observer, []).append(found)
    truth = torch.cat(coins).numpy()
    estimate = clopper_pearson if canaries == 1 else one_run
    findings = []
    for observer in OBSERVERS:
        guessed = torch.cat(scores[observer]).numpy().astype(np.float64) if observer in scores else None
        lower = None if guessed is None else estimate(guessed, truth, delta, confidence)
        findings.append(Finding(observer, certified[observer], lower))
    return findings


@dataclass(frozen=True)
class _Nest:
    """All canaries: what each sends, entry by entry of the update laid out flat, and how its coin fell."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    places: Tensor | None
    """(canaries, n) the entries that each moves, no two the same; None: all of them."""
    values: Tensor
    """(canaries, n) by how much, after the clip."""
    coins: Tensor
    tails: int
    """What tails multiplies the update by."""
    channel: Channel

    @classmethod
    def of(cls, method: Method, simulator: Simulator, count: int, rng: Rng) -> _Nest:
        channel = method.uplink
        model, length = _model(method, simulator, rng)
        names, shapes = tuple(model), tuple(value.shape for value in model.values())
        size = sum(value.numel() for value in model.values())
        reports = any(isinstance(stage, OneBit) for stage in channel.stages)
        noise = [stage for stage in channel.stages if isinstance(stage, Laplace) and not stage.unbounded]
        if not reports and count > size:
            raise HomebodyError(
                f"An update has {size:,} entries, so at most {size:,} canaries keep apart, not {count}."
            )
        # Laplace noise is weakest where a whole update is in one entry; Gaussian noise is the same in any direction.
        each = size if reports else 1 if noise else size // count
        if count * each > MOST_ENTRIES:
            raise HomebodyError(
                f"{count:,} canaries of {each:,} entries each do not fit: give at most {MOST_ENTRIES // each:,}."
            )
        signs = 2.0 * (rng.fold("signs").bits(count, each) & 1) - 1.0
        places = None
        if not reports:
            order = np.random.default_rng(int(rng.fold("places").key) % 2**64).permutation(size)
            places = torch.from_numpy(order[: count * each].reshape(count, each))
        # Far over any bound, so that the clip, of the whole or of each tensor, brings it to exactly that.
        clipped = any(isinstance(stage, Clip) for stage in channel.stages)
        scale = 1e6 if clipped else 1.0 if reports else length * each**-0.5
        relations = {
            one.event.relation for one in method.releases(_everyone(simulator)) if not isinstance(one.event, NonPrivate)
        }
        nest = cls(
            names,
            shapes,
            places,
            (scale * signs).float(),
            (rng.fold("coins").bits(count) & 1).bool(),
            0 if relations == {"add-remove"} else -1,
            channel,
        )
        return replace(nest, values=nest._clipped()) if clipped else nest

    @property
    def size(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    @property
    def random(self) -> bool:
        """Whether a device adds noise: then a canary sends something else in each round."""
        return any(
            not isinstance(stage, AskRows | Clip | SecureSum | Gaussian) and not getattr(stage, "on_sum", False)
            for stage in self.channel.stages
        )

    def tree(self, flat: Tensor) -> Update:
        """Updates (…, entries) as the method's tensors."""
        parts = torch.split(flat, [shape.numel() for shape in self.shapes], dim=-1)
        return {
            name: part.reshape(*flat.shape[:-1], *shape)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def flat(self, tree: Tree, batched: bool = False) -> Tensor:
        """The inverse of `tree`."""
        start = 1 if batched else 0
        return torch.cat([tree[name].cpu().flatten(start) for name in self.names], dim=-1)

    def laid_out(self, which: Tensor) -> Tensor:
        """(len(which), entries) these canaries' updates, as if all coins were heads."""
        if self.places is None:
            return self.values[which]
        return torch.zeros(len(which), self.size).scatter_(1, self.places[which], self.values[which])

    def along(self, flat: Tensor, which: Tensor | None = None) -> Tensor:
        """How much of each canary's update is in one flat tree, or in a row of its own for each; 1 is all of it."""
        values = self.values if which is None else self.values[which]
        places = self.places if which is None or self.places is None else self.places[which]
        power = (values * values).sum(1).clamp(min=1e-30)
        if flat.ndim == 1:
            found = values @ flat if places is None else (values * flat[places]).sum(1)
        else:
            found = (values * (flat if places is None else flat.gather(1, places))).sum(1)
        return found / power

    def factor(self, which: Tensor) -> Tensor:
        """What the coins multiply these canaries' updates by."""
        return torch.where(self.coins[which], 1.0, float(self.tails))

    def chunks(self, which: Tensor) -> list[Tensor]:
        size = max(1, ENTRIES_AT_ONCE // self.size)
        return [which[start : start + size] for start in range(0, len(which), size)]

    def in_model(self, before: Tree, after: Tree) -> Tensor | None:
        """The canaries' share of how far the model moved; None where updates are not changes of what is shared."""
        moved = {}
        for name, shape in zip(self.names, self.shapes, strict=True):
            fits = name in before and before[name].shape == shape
            moved[name] = after[name] - before[name] if fits else torch.zeros(shape)
            if not fits and len(self.names) == 1:
                return None
        if not any(bool(part.any()) for part in moved.values()):
            return None
        return self.along(self.flat(moved))

    def _clipped(self) -> Tensor:
        """The values after every clip of the channel."""
        kept = []
        for some in self.chunks(torch.arange(len(self.values))):
            update = self.tree(self.laid_out(some))
            for stage in self.channel.stages:
                if isinstance(stage, Clip):
                    update = vmap(lambda own, clip=stage: clip.device(own, Rng.of(0)))(update)
            flat = self.flat(update, batched=True)
            kept.append(flat if self.places is None else flat.gather(1, self.places[some]))
        return torch.cat(kept)


class _Joined(Channel):
    """A channel whose sum other messages join before the server's half; it remembers the sum as the server had it."""

    def __init__(self, channel: Channel, messages: Update) -> None:
        super().__init__(*channel.stages)
        object.__setattr__(self, "_messages", messages)
        object.__setattr__(self, "joined", {})
        object.__setattr__(self, "others", {})

    joined: Tree
    others: Tree

    def server(self, total: Total, rng: Rng) -> Total:
        more: Update = self._messages  # type: ignore[attr-defined]
        self.others.update(total.sum)
        for name in dict.fromkeys((*total.sum, *more)):
            parts = [tree[name] for tree in (total.sum, more) if name in tree]
            self.joined[name] = parts[0] if len(parts) == 1 else parts[0] + parts[1].to(parts[0].device)
        return super().server(Total(dict(self.joined), total.clients), rng)


class _Watched:
    """A simulator with canaries among its clients, and with every observer's notes on them."""

    def __init__(self, inner: Simulator, nest: _Nest) -> None:
        self.inner, self.nest = inner, nest
        self.catalogue, self.device, self.simulated = inner.catalogue, inner.device, True
        self.first = inner.split.n_users
        self.before: Tree = {}
        self.scores: dict[str, Tensor] = {name: torch.zeros(len(nest.coins)) for name in ("server", "clients")}

    def available(self, *, public: bool = False) -> Users:
        if public:
            return self.inner.available(public=True)
        return np.concatenate([self.inner.available(), self.first + np.arange(len(self.nest.coins))])

    def begin(self, method: Method, rng: Rng) -> None:
        self.inner.begin(method, rng)

    def open(self, release: str, cohort: Cohort, shared: Tree) -> Opened:
        return self.inner.open(release, cohort, shared)

    def telemetry(self, method: Method) -> Sequence[Charge]:
        return ()

    def collect(self, method: Method, shared: Tree, cohort: Cohort, rng: Rng, step: int) -> Collected:
        self.before = self.before or shared
        drawn = torch.from_numpy(cohort.users[cohort.users >= self.first] - self.first)
        messages = self._messages(drawn, rng.private.fold("canaries"))
        joined = _Joined(method.uplink, messages)
        real = replace(cohort, users=cohort.users[cohort.users < self.first])
        got = self.inner.collect(replace(method, uplink=joined), shared, real, rng, step)  # type: ignore[type-var]
        if hides_senders(method.uplink):
            # The server has the sum, and knows who is in it.
            seen = self.nest.along(self.nest.flat(decoded(method.uplink, joined.joined)))
            self.scores["server"][drawn] += seen[drawn]
        shown = self.nest.flat(got.total.sum)
        if cohort.sampling == "all" and not self.nest.random and joined.others:
            # ε holds against those who know everyone else's data; who was drawn, or others' noise, they may not know.
            shown = shown - self.nest.flat(decoded(method.uplink, joined.others))
        rate = cohort.size / cohort.population if cohort.sampling == "fixed" else 1.0
        self.scores["clients"] += _evidence(self.nest.along(shown), rate, self.nest.tails)
        return got

    def evaluate(self, method: Method, shared: Tree) -> Evaluated:
        return Evaluated({})

    def recommend(self, method: Method, shared: Tree, user: int, k: int) -> list[tuple[int, float]]:
        return self.inner.recommend(method, shared, user, k)

    def recommend_for(self, method: Method, shared: Tree, newcomer: Newcomer, k: int) -> Recommended:
        return self.inner.recommend_for(method, shared, newcomer, k)

    def state(self, *, lasting: bool = False) -> dict[str, Tensor]:
        return self.inner.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.inner.load_state(state)

    def _messages(self, drawn: Tensor, rng: Rng) -> Update:
        """The sum of what these canaries send; the server's notes on each, where it sees them one by one."""
        nest, alone = self.nest, not hides_senders(self.nest.channel)
        total: Update = {}
        if not nest.random:
            flat, factor = torch.zeros(nest.size), nest.factor(drawn)
            if nest.places is not None:
                flat[nest.places[drawn]] = factor[:, None] * nest.values[drawn]
            else:
                flat = factor @ nest.values[drawn]
            if alone:
                self.scores["server"][drawn] += factor
            return nest.tree(flat)
        for some in nest.chunks(drawn):
            update = nest.tree(nest.factor(some)[:, None] * nest.laid_out(some))
            keys = rng.fold(some).key
            sent = vmap(lambda key, own: self._noised(own, Rng(key)))(keys, update)
            if alone:
                read = vmap(lambda own: decoded(nest.channel, own))(sent)
                self.scores["server"][some] += nest.along(nest.flat(read, batched=True), some)
            for name, value in vmap(_whole)(sent).items():
                total[name] = total[name] + value.sum(0) if name in total else value.sum(0)
        return total

    def _noised(self, update: Update, rng: Rng) -> Update:
        """What the devices do after the clip."""
        for number, stage in enumerate(self.nest.channel.stages):
            if not isinstance(stage, Clip):
                update = stage.device(update, rng.fold(number))
        return update


def _whole(update: Update) -> Update:
    return {name: whole(part) for name, part in update.items()}


def _evidence(shown: Tensor, rate: float, tails: int) -> Tensor:
    """The logarithm of how much likelier heads is: a canary is in the round's sum with probability `rate`.

    >>> _evidence(torch.tensor([1.0, -1.0]), rate=0.5, tails=-1).sign().tolist()
    [1.0, -1.0]
    """
    spread = max(float(shown.var()), 1e-12) if len(shown) > 1 else 1.0
    absent = torch.full_like(shown, math.log1p(-rate) if rate < 1 else -math.inf)

    def likelihood(times: int) -> Tensor:
        return torch.logaddexp((times * shown - times**2 / 2) / spread + math.log(rate), absent)

    return likelihood(1) - likelihood(tails)


def _model(method: Method, simulator: Simulator, rng: Rng) -> tuple[Update, float]:
    """An update before its channel, whole; and how long those of a few clients are."""
    plain: Method = replace(method, uplink=Channel())  # type: ignore[type-var]
    simulator.begin(plain, rng.fold("clients"))
    shared = plain.init_shared(simulator.catalogue, rng.fold("shared"))
    shared = {name: value.to(simulator.device) for name, value in shared.items()}
    people = simulator.available()[:MEASURED]
    trees = [
        {name: whole(value) for name, value in simulator.message(plain, shared, int(user), rng).items()}
        for user in people
    ]
    lengths = [math.sqrt(sum(float((value.double() ** 2).sum()) for value in tree.values())) for tree in trees]
    return trees[0], float(np.median(lengths)) or 1.0


def _everyone(simulator: Simulator) -> Cohort:
    everyone = simulator.available()
    return Cohort(everyone, "all", len(everyone), len(everyone), simulator.catalogue.n_items)


def _check(method: Method, canaries: int, trials: int) -> None:
    if canaries < 1 or trials < 1:
        raise HomebodyError(f"An audit takes at least 1 canary and 1 trial, not {canaries} and {trials}.")
    if canaries * trials < FEWEST:
        raise HomebodyError(
            f"{canaries * trials} coins can show nothing: let canaries × trials be at least {FEWEST}, better hundreds."
        )
    if method.uplink.reads:
        raise HomebodyError(
            f"{type(method).__name__}'s server reads each message, and canaries are found in sums: use --attack "
            "interactions."
        )
    if len(method.phases) > 1:
        raise HomebodyError(
            f"{type(method).__name__} trains in {len(method.phases)} phases; canaries are for methods with one."
        )
