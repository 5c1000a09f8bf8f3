"""Second attack: canaries. Invented people take part in the training, each by a fair coin, and the attacker guesses the
coins from what an observer sees. If it guesses better than the ledger allows, the ledger is refuted.

A canary always sends the same update: a random direction, as long as the clip allows, or ±1 in every entry if devices
send one-bit reports. No two canaries move the same entry, so noise on one says nothing about another. What the coin
decides depends on the relation of the certified ε:

| relation | heads | tails |
|---|---|---|
| replace-one | the canary takes part | someone with the opposite update does, in its place |
| add-remove | the canary takes part | its seat stays empty |

The training is the run's own (method, stages, phases, rounds and cohort), with real clients beside the canaries, and
each canary's message passes the whole channel. Canaries enlarge the population, so the audited training has its own
ledger and ε, and every bound is compared with that. Each coin is one neighbouring pair, for which the claim must hold
whatever the others do: many canaries do not weaken it.

An attacker among the clients sees every released sum and knows everyone else's update, as ε assumes. It does not know
which canaries were drawn into a cohort. The public sees the final model only.

Devices that send reports on impressions have canaries of their own: see `homebody.adversary.report_canaries`.

`draw_releases` is the short form for a single release: no training, no other people, many draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from homebody.adversary import bounds
from homebody.adversary.impressions import report_stage
from homebody.adversary.report_canaries import WatchedReports, WithCanaries
from homebody.core import Cohort, Collected, Method, Rows, Total, Tree, Update, releases
from homebody.errors import HomebodyError
from homebody.privacy import OBSERVERS, Channel, GaussianRelease, HelpedRelease, Ledger, NonPrivate, Relation
from homebody.privacy.events import event_from_json
from homebody.privacy.ledger import DELTA
from homebody.privacy.stages import summable
from homebody.progress import Round
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.simulation.simulator import add_messages
from homebody.training import choose, fit

__all__ = ["Finding", "Visible", "draw_releases", "plant"]

CANARIES = 1000
"""The default number of canaries in a training, if there is room for them."""
ENTRIES_AT_ONCE = 1 << 23
"""The most entries of canaries' messages that are processed together."""
MOST_ENTRIES = 1 << 28
"""The most entries of all canaries' directions."""
FAR_OVER = 1000.0
"""A canary is so many times as long as the clip allows before it is clipped."""
MEASURED = 25
"""Without a clip, a canary is as long as the median of so many real messages."""
DELTAS = (1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
"""The ledger certifies an ε at each of these δ too, beside the run's own."""


@dataclass(frozen=True)
class Visible:
    """The smallest violation that an audit detects with probability 90 %."""

    allowed: float
    """The share of right guesses that the ledger allows on average."""
    share: float | None
    """The smallest share that would have refuted it; None: even perfect guesses would not."""
    noise: float | None = None
    """For Gaussian noise: the largest share of the stated scale that would have been found too little."""


@dataclass(frozen=True)
class Finding:
    """What guessing the coins says about one observer."""

    observer: str
    certified: float
    """ε of the audited training."""
    lower: bounds.Lower | None
    """None: nothing that this observer sees can be compared with the canaries' directions."""
    gaussian: bounds.Lower | None = None
    """Set if the observer is charged for nothing but Gaussian noise on sums over everyone."""
    counted: bounds.CountedGuesses | None = None
    """Right guesses beside what the ledger allows at all δ together; None: it allows any number."""
    visible: Visible | None = None
    relation: Relation = "replace-one"
    """Which two data sets a coin decides between."""
    in_sight: bool = False
    """Whether the ledger counts on secret sampling, although this observer sees who is drawn: always a violation."""

    @property
    def at_least(self) -> float | None:
        """The largest lower bound on ε."""
        return max((bound.epsilon for bound in (self.lower, self.gaussian) if bound is not None), default=None)

    @property
    def contradicted(self) -> bool:
        """Whether the ledger's claim is refuted."""
        above = self.at_least is not None and self.at_least > self.certified
        return above or self.in_sight or (self.counted is not None and self.counted.too_many)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = {name: getattr(self, name) for name in ("lower", "gaussian", "counted", "visible")}
        return {
            "observer": self.observer,
            "relation": self.relation,
            "certified": self.certified if math.isfinite(self.certified) else "inf",
            "at_least": self.at_least,
            **{name: None if part is None else asdict(part) for name, part in parts.items()},
            "in_sight": self.in_sight,
            "contradicted": self.contradicted,
        }


def plant(
    method: Method,
    simulator: Simulator,
    *,
    rounds: int,
    cohort: int | None = None,
    canaries: int | None = None,
    trials: int = 1,
    confidence: float = 0.95,
    delta: float = DELTA,
    seed: int = 0,
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """Train with canaries, `trials` times anew, and bound ε from below for each observer.

    canaries: None takes 1,000, or as many as there is room for. If the ledger is right, something is contradicted with
    probability at most 1 − confidence. on_round: called with the number of rounds done and of all rounds.
    """
    count = _check(method, simulator, canaries, trials, Rng.of(seed, "room"))
    ends = [phase.rounds or rounds for phase in method.phases]
    coins: list[Tensor] = []
    scores: dict[str, list[Tensor]] = {}
    straight: list[Tensor] = []
    for trial in range(trials):
        rng = Rng.of(seed, "canary", trial)
        tossed, stage = (rng.fold("coins").bits(count) & 1).bool(), report_stage(method.uplink)
        # Canaries that send reports on impressions are people, not directions of an update.
        watched = (
            _Watched(simulator, tossed, rng)
            if stage is None
            else WatchedReports(simulator, method.uplink, stage, tossed, rng)
        )

        def tell(line: Round, trial: int = trial) -> None:
            on_round(trial * sum(ends) + line.step, trials * sum(ends))

        key = int(rng.fold("training").key)
        fitted = fit(
            method, watched, rounds=rounds, cohort=cohort, seed=key, delta=delta, evaluate_every=0, on_round=tell
        )
        coins.append(watched.coins)
        for observer, evidence in {**watched.evidence, "public": watched.in_model(fitted.shared)}.items():
            if evidence is not None:
                scores.setdefault(observer, []).append(evidence)
        if watched.straight is not None:
            straight.append(watched.straight)
    truth = torch.cat(coins).numpy()
    seen = {name: torch.cat(parts).numpy().astype(np.float64) for name, parts in scores.items()}
    sums = torch.cat(straight).numpy().astype(np.float64) if len(straight) == trials else None
    ledger, relation = fitted.ledger, watched.relation
    wanted = (delta, *(larger for larger in DELTAS if larger > delta))
    curves = [(ledger.epsilons(other), other) for other in wanted]
    certified = curves[0][0]
    claims = {
        name: [(epsilons[name], other) for epsilons, other in curves if math.isfinite(epsilons[name])]
        for name in OBSERVERS
        if name in seen and math.isfinite(certified[name])
    }
    error = (1 - confidence) / max(1, len(claims))
    estimate = bounds.clopper_pearson if count == 1 else bounds.one_run
    findings = []
    for observer in OBSERVERS:
        rows = [entry for entry in ledger.entries() if (entry.observer, entry.unit) == (observer, "user")]
        charged = [event_from_json(entry.event) for entry in rows]
        hidden = any(event.sampling.amplifies for event in charged)
        # The server draws every cohort.
        finding = Finding(
            observer, certified[observer], None, relation=relation, in_sight=observer == "server" and hidden
        )
        if observer in claims:
            gaussian = bool(charged) and all(isinstance(event, GaussianRelease | HelpedRelease) for event in charged)
            normal = sums if observer != "public" and gaussian and not hidden else None
            sure = 1 - error / (2 if normal is None else 3)
            finding = replace(
                finding,
                lower=estimate(seen[observer], truth, delta, sure),
                gaussian=None if normal is None else bounds.gaussian(normal, truth, delta, sure),
                counted=bounds.count_guesses(seen[observer], truth, claims[observer], sure),
                visible=Visible(
                    *bounds.share_found(claims[observer], len(truth), sure),
                    None if normal is None else bounds.noise_found(certified[observer], len(truth), delta, sure),
                ),
            )
        elif observer in seen:
            finding = replace(finding, lower=estimate(seen[observer], truth, delta, confidence))
        findings.append(finding)
    return findings


@dataclass(frozen=True)
class _Nest:
    """All canaries: what each sends, as entries of the flattened update, and how its coin fell."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    places: Tensor | None
    """(canaries, n) the entries that each canary moves, all different; None: each moves all entries."""
    values: Tensor
    """(canaries, n) by how much it moves them, before the channel."""
    clipped: Tensor
    """The same after the clip, as far as the grid reaches: the signal that the attacker looks for."""
    coins: Tensor
    tails: int
    """The factor of the update if the coin is tails: −1 or 0."""
    channel: Channel

    @classmethod
    def of(cls, method: Method, simulator: Simulator, coins: Tensor, rng: Rng) -> _Nest:
        channel, count = method.uplink, len(coins)
        model, length = _model(method, simulator, rng)
        names, shapes = tuple(model), tuple(value.shape for value in model.values())
        size = sum(value.numel() for value in model.values())
        if count > (most := _room(channel, size)):
            why = "they would not fit" if _reports(channel) else "no two may move the same entry"
            raise HomebodyError(f"An update of {size:,} entries has room for {most:,} canaries, not {count:,}: {why}.")
        each = _entries_each(channel, size, count)
        signs = 2.0 * (rng.fold("signs").bits(count, each) & 1) - 1.0
        places = None
        if not _reports(channel):
            draw = np.random.default_rng(int(rng.fold("places").key) % 2**64)
            # Every canary moves entries of every tensor that has enough of them.
            ranks = [np.argsort(draw.permutation(n)) / n for n in map(math.prod, shapes)]
            order = np.argsort(np.concatenate(ranks), kind="stable")
            places = torch.from_numpy(order[: count * each].reshape(count, each))
        # Far over any bound, so that the clip, of the whole or of each tensor, brings it to exactly that.
        clipped, bounds = bool(channel.facts.clips), channel.facts.norms.values()
        long = FAR_OVER * max(bounds, default=1.0) if clipped else length
        scale = 1.0 if _reports(channel) else long * each**-0.5
        everyone = choose(simulator.available(), None, rng, simulator.catalogue.n_items)
        events = [charge.event for charge in releases(method, everyone)]
        relations = {event.relation for event in events if not isinstance(event, NonPrivate)}
        values, tails = (scale * signs).float(), 0 if relations == {"add-remove"} else -1
        nest = cls(names, shapes, places, values, values, coins, tails, channel)
        return replace(nest, clipped=nest._clipped()) if clipped else nest

    @property
    def relation(self) -> Relation:
        """Which two data sets a coin decides between."""
        return "replace-one" if self.tails else "add-remove"

    @property
    def size(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    @property
    def sparse(self) -> bool:
        """Whether messages are of the entries alone that canaries move: only their sum is read, and each row of a table
        is one number. They take no more room then than the update of one canary that is laid out."""
        flat = all(len(shape) == 1 for shape in self.shapes)
        return self.places is not None and flat and self.channel.facts.secret and not self.channel.sums_dense

    @property
    def random(self) -> bool:
        """Whether a device adds noise: then a canary sends something else in each round."""
        return not self.channel.facts.plain

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

    def updates(self, which: Tensor, factor: Tensor | float = 1.0) -> Update:
        """These canaries' updates before the channel, stacked and each multiplied by its factor."""
        if self.places is None or not self.sparse:
            return self.tree(factor * self.laid_out(which))
        value, start, out = factor * self.values[which], 0, {}
        for name, shape in zip(self.names, self.shapes, strict=True):
            index = self.places[which] - start
            out[name] = Rows(torch.where((index >= 0) & (index < shape[0]), index, -1), value.clone(), shape[0])
            start += shape[0]
        return out

    def laid_out(self, which: Tensor) -> Tensor:
        """(len(which), entries) these canaries' updates, as if all coins were heads."""
        if self.places is None:
            return self.values[which]
        return torch.zeros(len(which), self.size).scatter_(1, self.places[which], self.values[which])

    def along(self, flat: Tensor, which: Tensor | None = None) -> Tensor:
        """The share of each canary's update in one flat tree, or in its own row of several; 1 is all of it."""
        values = self.clipped if which is None else self.clipped[which]
        places = self.places if which is None or self.places is None else self.places[which]
        power = (values * values).sum(1).clamp(min=1e-30)
        if flat.ndim == 1:
            along = values @ flat if places is None else (values * flat[places]).sum(1)
        else:
            along = (values * (flat if places is None else flat.gather(1, places))).sum(1)
        return along / power

    def factor(self, which: Tensor) -> Tensor:
        """What the coins multiply these canaries' updates by."""
        return torch.where(self.coins[which], 1.0, float(self.tails))

    def told_by(self, share: Tensor) -> Tensor:
        """What a round says of the coins: Laplace noise tells no more beyond what the two sides would send."""
        return share.clamp(float(self.tails), 1.0) if self.channel.facts.noise == "laplace" else share

    def beside(self, sums: Tree, known: Tensor) -> list[Tensor]:
        """Tensors released beside the update's own that have the shape of one, laid out in its place.

        The part of each that follows from what is known is taken out.
        """
        out = []
        for other, value in sums.items():
            for name, shape in zip(self.names, self.shapes, strict=True):
                if other not in self.names and value.shape == shape:
                    blank = {each: torch.zeros(side) for each, side in zip(self.names, self.shapes, strict=True)}
                    there = self.flat({**blank, name: torch.ones(shape)}) * known
                    laid_out = self.flat({**blank, name: value})
                    out.append(laid_out - there * ((laid_out @ there) / (there @ there).clamp(min=1e-30)))
        return out

    def precision(self, channel: Channel, clients: int) -> Tensor | float:
        """What each canary's share of a round's sum weighs beside its share of others: by the noise that is stated."""
        noise = channel.deviation(self.size, clients)
        return (self.clipped * self.clipped).sum(1) / noise**2 if noise > 0 else 1.0

    def chunks(self, which: Tensor) -> list[Tensor]:
        size = max(1, ENTRIES_AT_ONCE // (self.values.shape[1] if self.sparse else self.size))
        return [which[start : start + size] for start in range(0, len(which), size)]

    def _clipped(self) -> Tensor:
        """The values after every clip of the channel."""
        clipped, grid = [], self.channel.facts.grid
        for some in self.chunks(torch.arange(len(self.values))):
            update = self.updates(some)
            for clip in self.channel.facts.clips:
                update = vmap(lambda message, clip=clip: clip.device(message, Rng.of(0)))(update)
            if self.places is not None and self.sparse:
                clipped.append(self._read(update, self.places[some]))
                continue
            flat = self.flat(update, batched=True)
            clipped.append(flat if self.places is None else flat.gather(1, self.places[some]))
        values = torch.cat(clipped)
        return grid.values(grid.whole(values)) if grid else values

    def _read(self, rows: Update, places: Tensor) -> Tensor:
        """(canaries, n) the numbers at these places of stacked `Rows` whose indices are all different."""
        out, start = torch.zeros(places.shape), 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            index, order = torch.where(rows[name].index < 0, shape[0], rows[name].index).sort(1)
            value, wanted = rows[name].value.gather(1, order), places - start
            at = torch.searchsorted(index, wanted).clamp(max=index.shape[1] - 1)
            out += torch.where((index.gather(1, at) == wanted) & (wanted < shape[0]), value.gather(1, at), 0.0)
            start += shape[0]
        return out


class _Joined(Channel):
    """A channel whose sum other messages join before the server's half; it remembers the sum as the server had it."""

    def __init__(self, channel: Channel, messages: Sequence[Update]) -> None:
        super().__init__(*channel.stages, asks_rows=channel.asks_rows)
        vars(self).update(messages=messages, joined={}, others={})

    messages: Sequence[Update]
    joined: Tree
    others: Tree

    def server(self, total: Total, rng: Rng) -> Total:
        self.others.update({name: value.clone() for name, value in total.sum.items()})
        self.joined.update(total.sum)
        for stacked in self.messages:
            if self.reads:
                self.read(stacked, self.joined)
                continue
            for name, value in stacked.items():
                there = self.joined.get(name)
                self.joined[name] = value if there is None else there + value.to(there.device)
        return super().server(Total(dict(self.joined), total.clients), rng)


class _Watched(WithCanaries):
    """It keeps each observer's scores of the coins."""

    def __init__(self, inner: Simulator, coins: Tensor, rng: Rng) -> None:
        super().__init__(inner, coins)
        self.inner, self.rng = inner, rng
        self.before: Tree = {}
        self.evidence: dict[str, Tensor] = {name: torch.zeros(len(coins)) for name in ("server", "clients")}
        self.straight: Tensor | None = torch.zeros(len(coins))
        """The mean of each canary's shares of all rounds' sums; those with more noise weigh less. None: sampling or
        devices' noise makes it not normal."""
        self.weight: Tensor | float = 0.0
        self.phases = 0
        self._repeated: tuple[list[Update], Tensor] | None = None
        """The messages of all canaries and the server's reading of each, if these are the same in every round."""

    nest: _Nest

    @property
    def relation(self) -> Relation:
        """Which two data sets a coin decides between."""
        return self.nest.relation

    def begin(self, method: Method, rng: Rng) -> None:
        self.phases += 1
        self.nest = _Nest.of(method, self.inner, self.coins, self.rng.fold("phase", self.phases))
        self.before, self._repeated = {}, None
        super().begin(method, rng)

    def collect(self, method: Method, shared: Tree, cohort: Cohort, rng: Rng, step: int) -> Collected:
        self.before = self.before or shared
        fitted = method.uplink.among(cohort.size)
        if fitted is not method.uplink:
            method = replace(method, uplink=fitted)  # type: ignore[type-var]
            self.nest = replace(self.nest, channel=fitted)
        drawn, real = self.parted(cohort)
        messages = self._messages(drawn, rng.private.fold("canaries"))
        joined = _Joined(method.uplink, messages)
        got = super().collect(replace(method, uplink=joined), shared, real, rng, step)  # type: ignore[type-var]
        # ε holds against those who know everyone else's data, if not their noise.
        nest, known = self.nest, torch.zeros(self.nest.size)
        if not self.nest.random and joined.others:
            known = nest.flat(method.uplink.decoded(joined.others))
        shown = nest.flat(got.total.sum) - known
        rate = cohort.size / cohort.population if cohort.sampling == "fixed" else 1.0
        share = nest.along(shown)
        if method.uplink.facts.hides_senders:
            # The server has the sum, and knows who is in it. A helper adds the noise before the server gets it.
            helped = method.uplink.facts.helped
            seen = share if helped else nest.along(nest.flat(method.uplink.decoded(joined.joined)) - known)
            self.evidence["server"][drawn] += _evidence(nest.told_by(seen[drawn]), 1.0, nest.tails)
        self.evidence["clients"] += _evidence(nest.told_by(share), rate, nest.tails)
        for flat in nest.beside(got.total.sum, known):
            self.evidence["clients"] += _evidence(nest.along(flat), rate, nest.tails)
        if self.straight is not None:
            weight = nest.precision(method.uplink, cohort.size)
            self.weight = self.weight + weight
            straight = self.straight + (share - self.straight) * weight / self.weight
            self.straight = straight if rate == 1 and not nest.random else None
        return got

    def in_model(self, after: Tree) -> Tensor | None:
        """The canaries' share of how far the last phase moved the model; None where updates are not changes of it."""
        nest, moved = self.nest, {}
        for name, shape in zip(nest.names, nest.shapes, strict=True):
            fits = name in self.before and self.before[name].shape == shape
            moved[name] = after[name] - self.before[name] if fits else torch.zeros(shape)
            if not fits and len(nest.names) == 1:
                return None
        if not any(bool(part.any()) for part in moved.values()):
            return None
        return nest.along(nest.flat(moved))

    def _messages(self, drawn: Tensor, rng: Rng) -> list[Update]:
        """The messages of these canaries: summed, or stacked if the server reads each. Notes the server's scores."""
        nest, everyone = self.nest, len(drawn) == len(self.coins)
        sent, read = self._repeated if self._repeated and everyone else self._sent(drawn, rng)
        if everyone and not nest.random:
            self._repeated = sent, read
        if not nest.channel.facts.hides_senders:
            self.evidence["server"][drawn] += nest.told_by(read)
        return sent

    def _sent(self, drawn: Tensor, rng: Rng) -> tuple[list[Update], Tensor]:
        nest, channel = self.nest, self.nest.channel
        stacks: list[Update] = []
        total: Update = {}
        notes = []
        for some in nest.chunks(drawn):
            update = nest.updates(some, nest.factor(some)[:, None])
            keys = rng.fold(some).key
            half = channel.for_sum if nest.sparse else channel.device
            sent = vmap(lambda key, message, half=half: half(message, Rng(key)))(keys, update)
            if not channel.facts.hides_senders:
                read = vmap(channel.decoded)(sent)
                notes.append(nest.along(nest.flat(read, batched=True), some))
            if channel.reads:
                stacks.append(sent)
            else:
                add_messages(sent, total)
        if nest.sparse and channel.ends_in_noise:
            total = channel.noise_of_many(total, len(drawn), rng.fold("noise"))
        return stacks if channel.reads else [total], torch.cat(notes) if notes else torch.zeros(0)


def _whole(update: Update) -> Update:
    return {name: summable(part) for name, part in update.items()}


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


def _reports(channel: Channel) -> bool:
    """Whether devices tell bits of their entries, each on its own."""
    return channel.facts.reports is not None or channel.facts.responses is not None


def _entries_each(channel: Channel, size: int, count: int) -> int:
    """How many entries a canary moves: all if it sends bits of them; one under Laplace noise, which hides that least.

    Gaussian noise is the same in any direction.
    """
    if _reports(channel):
        return size
    return 1 if channel.facts.noise == "laplace" and channel.facts.norms else size // count


def _room(channel: Channel, size: int) -> int:
    """How many canaries an update of so many entries has room for."""
    return MOST_ENTRIES // size if _reports(channel) else size


def _model(method: Method, simulator: Simulator, rng: Rng) -> tuple[Update, float]:
    """A whole update before its channel, and the median length of a few clients' updates if nothing bounds it.

    If the server reads each message, a message has the shape of the update.
    """
    plain: Method = method if method.uplink.reads else replace(method, uplink=Channel())  # type: ignore[type-var]
    simulator.begin(plain, rng.fold("clients"))
    shared = plain.init_shared(simulator.catalogue, rng.fold("shared"))
    shared = {name: value.to(simulator.device) for name, value in shared.items()}
    bounded = bool(method.uplink.facts.clips) or _reports(method.uplink)
    people = simulator.available()[: 1 if bounded else MEASURED]
    trees = [_whole(simulator.message(plain, shared, int(user), rng)) for user in people]
    lengths = [math.sqrt(sum(float((value.double() ** 2).sum()) for value in tree.values())) for tree in trees]
    return trees[0], float(np.median(lengths)) or 1.0


def _check(method: Method, simulator: Simulator, canaries: int | None, trials: int, rng: Rng) -> int:
    """How many canaries there are in a training."""
    if canaries is None and report_stage(method.uplink) is not None:
        canaries = CANARIES
    elif canaries is None:
        stages = [phase.method or method for phase in method.phases if not phase.public]
        models = [(stage.uplink, _model(stage, simulator, rng)[0]) for stage in stages]
        rooms = [_room(channel, sum(part.numel() for part in model.values())) for channel, model in models]
        canaries = min(CANARIES, *rooms)
    if canaries < 1 or trials < 1:
        raise HomebodyError(f"An audit takes at least 1 canary and 1 trial, not {canaries} and {trials}.")
    if (coins := canaries * trials) < (least := bounds.FEWEST):
        raise HomebodyError(
            f"{coins} coins can show nothing: let canaries × trials be at least {least}, better hundreds."
        )
    return canaries


def draw_releases(
    channel: Channel, *, draws: int = 100_000, delta: float = DELTA, confidence: float = 0.95, seed: int = 0
) -> list[Finding]:
    """Lower bounds on ε of a single release through this channel, by Clopper and Pearson, beside the certified ones.

    One person sends the largest update that the channel allows, or its opposite (or nothing, under add-remove), and
    nobody else takes part. A fair coin decides in each draw, and the observers guess it.

    >>> from homebody.privacy import Channel, Clip, Gaussian
    >>> server, clients, public = draw_releases(Channel(Clip(1.0), Gaussian(z=2)), draws=2000, delta=1e-5)
    >>> server.certified, round(clients.certified, 2), clients.contradicted
    (inf, 1.99, False)
    """
    clips = [clip for clip in channel.facts.clips if not isinstance(clip.norm, dict)]
    if not clips and channel.facts.reports is None:
        raise HomebodyError(
            "One release is drawn at the bound of its channel: it needs a Clip with one norm, or OneBit."
        )
    if draws < 100:
        raise HomebodyError(f"So few draws show nothing: take at least 100, better 100,000, not {draws}.")
    rng, alone = Rng.of(seed, "release"), Cohort(np.arange(1), "all", 1, 1)
    charges = channel.charges(alone)
    relations = {charge.event.relation for charge in charges if not isinstance(charge.event, NonPrivate)}
    coins = (rng.fold("coins").bits(draws) & 1).bool()
    most = min((clip.whole for clip in clips), default=1.0)
    given = torch.where(coins, most, 0.0 if relations == {"add-remove"} else -most)

    def release(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        update: Update = {"value": value[None]}
        sent = channel.device(update, Rng(key).fold("device"))
        after = channel.server(Total(_whole(sent), 1), Rng(key).fold("server"))
        return channel.decoded(sent)["value"][0], after.sum["value"][0]

    keys = rng.fold("draws").fold(torch.arange(draws)).key
    first, after = vmap(release, chunk_size=1 << 14)(keys, given)
    ledger = Ledger()
    ledger.charge("release", charges)
    findings = []
    for observer in OBSERVERS:
        shown = (first if observer == "server" and not channel.facts.helped else after).double().numpy()
        lower = bounds.clopper_pearson(shown, coins.numpy(), delta, confidence)
        findings.append(Finding(observer, ledger.epsilon(observer, delta=delta).epsilon, lower))
    ledger.close()
    return findings
