"""The one way off the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch.func import vmap

from homebody.core import Cohort, Total, Tree, Update, Work, ships, written
from homebody.errors import HomebodyError
from homebody.markup import html
from homebody.privacy.events import OBSERVERS, Charge, NonPrivate, Observer
from homebody.privacy.ring import Numbers, Ring, finest, fitting, longest, reach_of_gaussian, reach_of_noise
from homebody.privacy.skellam import UNIT
from homebody.privacy.stages import Facts, Gaussian, Stage, mapped, summable
from homebody.rng import Rng

__all__ = ["Channel"]


@dataclass(frozen=True)
class Channel:
    """What every update passes on its way from a client to the server, written as the message travels.

    On each device the stages' halves run in the order they are listed. The messages are summed. On the server, what
    was done on the way out is undone in reverse; then the stages that act on the sum run in the order they are listed.

    Nonsense is refused here, before anything runs. Without stages it is a plain sum: the server could read each
    client's update, and nothing is private. What holds of its messages is in `facts`.

    With `asks_rows`, a device downloads only the rows that it works on in this round (PFedRec, appendix B.1). It has to
    say which: the request leaves the device as it is, and names everything that the person trains on among a few
    negatives. So ε = ∞ against the server, whatever the stages hide; the others never see the request. Only for methods
    that say what they ask for (`Method.asks`).

    >>> import numpy as np
    >>> from homebody.privacy import Clip, Gaussian, SecureSum
    >>> cohort = Cohort(np.arange(30), "fixed", size=30, population=4800)
    >>> channel = Channel(Clip(40), SecureSum(), Gaussian(z=1))
    >>> for charge in channel.charges(cohort):
    ...     print(charge.observer, "–", charge.event)
    server – not private: the server adds the noise itself: it sees the sum without it
    clients – Gaussian noise, 1 × the ℓ2 sensitivity (replace-one); 30 of 4,800 drawn without replacement
    public – Gaussian noise, 1 × the ℓ2 sensitivity (replace-one); 30 of 4,800 drawn without replacement
    >>> channel
    Channel(Clip(norm=40), SecureSum(), Gaussian(z=1))
    >>> channel.facts.secret, channel.facts.noise_on_sum, channel.facts.norms
    (True, True, {2: 40.0})
    >>> Channel(Gaussian(z=1))
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: Gaussian noise needs a bound on what one person can change: put a Clip of order 2 \
before it.
    """

    stages: tuple[Stage, ...] = ()
    asks_rows: bool = False
    asks_after: int = field(default=0, compare=False, repr=False)
    """How many stages a text names before `ask-rows`. It changes nothing; the channel is written as it was read."""
    facts: Facts = field(default=Facts(), compare=False, repr=False)

    def __init__(self, *stages: Stage, asks_rows: bool = False, asks_after: int = 0) -> None:
        placed: list[Stage] = []
        facts = Facts()
        for stage in stages:
            stage, facts = _placed(stage, facts)
            placed.append(stage)
        if asks_rows and facts.skellam:
            raise HomebodyError(
                "Devices that ask for rows tell the server what they work on, and Skellam noise is to hide it: leave "
                "out ask-rows or skellam."
            )
        object.__setattr__(self, "stages", tuple(placed))
        object.__setattr__(self, "asks_rows", asks_rows)
        object.__setattr__(self, "asks_after", min(asks_after, len(placed)))
        object.__setattr__(self, "facts", facts)

    def __repr__(self) -> str:
        asks = ["asks_rows=True"] if self.asks_rows else []
        return f"Channel({', '.join([*map(_typed, self.stages), *asks])})"

    def _repr_html_(self) -> str:
        def settings(stage: Stage) -> str:
            shown = [(each.name, getattr(stage, each.name)) for each in fields(stage) if each.repr]  # type: ignore[arg-type]
            return ", ".join(f"{name} = {value}" for name, value in shown if value is not None)

        stages = [(type(stage).__name__, settings(stage), _about(stage)) for stage in self.stages]
        asks = ["Devices ask for the rows that they work on, and that tells what these are."] if self.asks_rows else []
        plain = [] if stages else ["No stages: updates leave the device as they are, and are summed. ε = ∞."]
        headings = ("stage", "settings", "what it does") if stages else ()
        return html("Channel, as a message travels", headings, stages, [*plain, *asks])

    def with_stages(self, *stages: Stage) -> Channel:
        """A channel of other stages, whose devices ask for rows if those of this one do."""
        return Channel(*stages, asks_rows=self.asks_rows, asks_after=self.asks_after)

    def before(self, stage: Stage) -> Channel:
        """The channel up to this stage, without it."""
        return self.with_stages(*self.stages[: self.stages.index(stage)])

    def with_share(self, share: float) -> Channel:
        """This channel with a part of its budget: releases whose shares add up to 1 cost together what one release
        through this channel would.

        >>> from homebody.privacy import Clip, Gaussian
        >>> Channel(Clip(1.0), Gaussian(z=0.6)).with_share(0.25)
        Channel(Clip(norm=1.0), Gaussian(z=1.2))
        """
        if not 0 < share <= 1:
            raise HomebodyError(f"A release's share of a budget must be above 0 and at most 1, not {share:g}.")
        return self.with_stages(*(stage.with_share(share) for stage in self.stages))

    def for_views(self, count: int) -> Channel:
        """This channel for people with so many views: what `ViewNoise` adds depends on it."""
        joins = self.facts.views
        if joins is None or joins.count == count:
            return self
        return self.with_stages(*(replace(joins, count=count) if stage is joins else stage for stage in self.stages))

    def among(self, parties: int) -> Channel:
        """This channel for a round of so many parties: the noise that each adds depends on it.

        >>> from homebody.privacy import Clip, SecureSum, Skellam
        >>> channel = Channel(Clip(1), Skellam(z=1), SecureSum())
        >>> alone, one_of_many = channel.deviation(1000, 1), channel.among(100).deviation(1000, 1)
        >>> round((alone / one_of_many) ** 2)
        57
        """
        noise = self.facts.skellam
        if noise is None or noise.parties == parties:
            return self
        fitted = replace(noise, parties=parties)
        return self.with_stages(*(fitted if stage is noise else stage for stage in self.stages))

    def noised_elsewhere(self) -> Channel:
        """This channel for a sum to which the helper has added the noise: its server half adds none.

        >>> import torch
        >>> from homebody.privacy import Clip, Gaussian, SecureSum
        >>> channel = Channel(Clip(1), SecureSum(helper=True), Gaussian(z=1)).noised_elsewhere()
        >>> steps = {"w": torch.tensor([0, 3 << 18])}
        >>> channel.server(Total(steps, 5), Rng.of(0)).sum["w"].tolist()
        [0.0, 3.0]
        """
        if not self.facts.helped:
            return self
        return self.with_stages(
            *(replace(stage, added=True) if isinstance(stage, Gaussian) else stage for stage in self.stages)
        )

    def ring(self, entries: int, people: int) -> Ring:
        """The whole numbers in which parties add up messages of so many numbers, with the updates of so many people.

        A sum and its noise leave it with probability under 2⁻⁴⁰. Refused where nothing says how large a number may be.
        Before that, `among` must have fitted the noise to the round.

        >>> from homebody.privacy import Clip, SecureSum, Skellam
        >>> Channel(Clip(1), Skellam(z=1), SecureSum()).among(100).ring(54_000, people=100).width
        3
        >>> Channel(SecureSum(range=4)).ring(54_000, people=100)
        Ring(width=4, step=2.384185791015625e-07, whole=False, largest=4)
        """
        facts = self.facts
        if (noise := facts.skellam) is not None:
            steps = fitting(entries)
            moved = reach_of_noise(noise.parties * noise.units(entries) / UNIT, entries)
            return Ring.fitted(people * longest(steps, entries) + moved, noise.step(entries), whole=True)
        if self._unbounded:
            what = facts.unknown or facts.hidden
            raise HomebodyError(
                f"Parties add up whole numbers within a known range, and nothing bounds them after {what}: leave it "
                "out, or use Skellam noise."
            )
        largest = self._largest
        if largest is None:
            raise HomebodyError(
                "A secure sum needs to know how large a number may be: put a Clip before it, or give its range, as in "
                "secure-sum:range=4."
            )
        if facts.grid:
            noise_steps = reach_of_gaussian(2.0**facts.grid.depth, entries) if facts.helped else 0.0
            return Ring.fitted(people * largest / facts.grid.step + noise_steps, facts.grid.step, whole=True)
        steps = finest(people)
        return Ring.fitted(people * (steps + 1), largest / steps, largest=largest)

    @property
    def adds_up(self) -> bool:
        """Whether parties add up messages of this channel between them, in a secure sum. In a simulation a
        channel may promise a secure sum of numbers that no `ring` holds."""
        numbers = self.facts.skellam is not None or (self._largest is not None and not self._unbounded)
        return self.facts.secret and numbers

    @property
    def _largest(self) -> float | None:
        """The largest number of a message, if something bounds it."""
        given = self.facts.sum.range if self.facts.sum else None
        return min((*self.facts.norms.values(), *(() if given is None else (given,))), default=None)

    @property
    def _unbounded(self) -> bool:
        """Whether numbers of a message may leave any bound that was set before."""
        facts = self.facts
        return bool(facts.unknown or facts.noise_on_device or facts.reports or facts.responses)

    def party(self, updates: Iterable[Update], ring: Ring, rng: Rng) -> Numbers:
        """What one party gives to a secure sum: the updates of its people, added up, and its share of the noise.

        >>> import torch
        >>> from homebody.privacy import Clip, SecureSum
        >>> channel = Channel(Clip(9), SecureSum())
        >>> ring = channel.ring(entries=2, people=3)
        >>> people = [{"w": torch.tensor([2.0, -1.0])}, {"w": torch.tensor([0.5, 0.25])}]
        >>> ring.decode(channel.party(people, ring, Rng.of(0)), {"w": (2,)})["w"].round(decimals=5).tolist()
        [2.5, -0.75]
        """
        noise, total, empty = self.facts.skellam, np.zeros(0, dtype=np.uint64), dict[str, torch.Tensor]()
        for number, update in enumerate(updates):
            stream = rng.fold("person", number)
            sent = self.for_sum(update, stream) if noise else self.device(update, stream)
            numbers = ring.encode(sent, stream.fold("ring"))
            total = ring.add(total, numbers) if number else numbers
            empty = {name: torch.zeros_like(summable(value)) for name, value in sent.items()}
        if noise and empty:
            total = ring.add(total, ring.encode(noise.noise_of_many(empty, 1, rng.fold("noise")), rng))
        return total

    @property
    def dense(self) -> bool:
        """Whether devices send, or work on, whole tables: many clients at once then need much memory."""
        return any(stage.dense for stage in self.stages)

    @property
    def ends_in_noise(self) -> bool:
        """Whether the last change on a device is noise whose sum over many devices can be drawn at once."""
        return self._last_noise() is not None

    @property
    def reads(self) -> bool:
        """Whether the server must read each message before it sums them: see `read`."""
        return self.facts.reader is not None

    def read(self, messages: Update, sums: Tree) -> None:
        """Add to the sums what the server reads in these messages, stacked along the first dimension."""
        if self.facts.reader is None:
            raise HomebodyError("The messages of this channel are summed as they come: there is nothing to read.")
        self.facts.reader.read(messages, sums)

    def nothing(self, update: Update) -> Update:
        """What somebody hands to the channel who has nothing to learn from; `update` is anybody's."""
        return (*self.stages, Stage())[0].nothing(update)

    def device(self, update: Update, rng: Rng) -> Update:
        """The device's half: each stage in order."""
        for number, stage in enumerate(self.stages):
            update = stage.device(update, rng.fold(number))
        return update

    def devices(self, update: Update, rng: Rng) -> Update:
        """The device's half for many clients, stacked; a formula is evaluated only where the stages look at it."""
        for number, stage in enumerate(self.stages):
            streams = rng.fold(number)
            if number == 0 and self.samples:
                update = stage.devices(update, streams)
                continue
            half = stage.device
            update = vmap(lambda key, sent, half=half: half(sent, Rng(key)))(streams.key, written(update))
        return written(update)

    @property
    def samples(self) -> bool:
        """Whether a device looks at a few entries of its update alone: the rest need not be computed."""
        return bool(self.stages) and self.stages[0].samples

    def bounded(self, update: Update, clean: Callable[[Tree], Tree] = lambda tree: tree) -> Update:
        """An update as it came to the server, clipped once more: a device that leaves its clip out gains nothing.

        Only where nothing but clips happens on the device: what was added to a clipped update may exceed the clip.
        clean: what else the server does to the numbers before it clips them.

        >>> import torch
        >>> from homebody.privacy import Clip
        >>> Channel(Clip(1)).bounded({"w": torch.tensor([30.0, 40.0])})["w"].tolist()
        [0.59..., 0.79...]
        """
        if not self.facts.plain:
            return update
        grid = self.facts.grid
        known = clean(mapped(update, grid.doubles) if grid else update)
        for clip in self.facts.clips:
            known = clip.device(known, Rng.of(0))
        return mapped(known, grid.whole) if grid else known

    def for_sum(self, update: Update, rng: Rng) -> Update:
        """What one client adds to the sum of many, for simulations, where nobody looks at a single message.

        That is the device's half without what leaves the sum as it was, and without noise that `noise_of_many` adds.
        """
        for number, stage in self._for_sum:
            if number == self._last_noise():
                return stage.before_noise(update, rng.fold(number))
            update = stage.device(update, rng.fold(number))
        return update

    @property
    def sums_dense(self) -> bool:
        """Whether `for_sum` works on whole tables."""
        last = self._last_noise()
        return any(stage.dense for number, stage in self._for_sum if number != last)

    @property
    def fills(self) -> bool:
        """Whether devices fill the tables that they send, though a sum can do without: `for_sum` leaves that out."""
        return any(stage.dense and stage.keeps_sum for stage in self.stages)

    @property
    def _for_sum(self) -> list[tuple[int, Stage]]:
        return [(number, stage) for number, stage in enumerate(self.stages) if not stage.keeps_sum]

    def noise_of_many(self, sums: Tree, devices: int, rng: Rng) -> Tree:
        """Sums from `for_sum` with the noise of so many devices, drawn at once, for simulations.

        The distribution is the same as if each device had drawn its own.
        """
        number = self._last_noise()
        if number is None:
            raise HomebodyError("This channel does not end in noise on the device: there is none to be summed.")
        return self.stages[number].noise_of_many(sums, devices, rng.fold(number))

    def _last_noise(self) -> int | None:
        for number, stage in reversed(list(enumerate(self.stages))):
            if stage.noise_adds_up and not stage.on_sum:
                return number
            if not stage.keeps_sum:
                return None
        return None

    def work(self, given: Work) -> Work:
        """A device's work with its half of the channel."""
        for stage in self.stages:
            given = stage.work(given)
        return given

    def server(self, total: Total, rng: Rng) -> Total:
        """The server's half: what the devices did, undone in reverse; then what acts on the sum, in order."""
        numbered = list(enumerate(self.stages))
        undone = [(number, stage) for number, stage in reversed(numbered) if not stage.on_sum]
        for number, stage in (*undone, *((number, stage) for number, stage in numbered if stage.on_sum)):
            total = stage.server(total, rng.fold(number))
        return total

    def decoded(self, sums: Update) -> Tree:
        """A message, or a sum of messages, as the server decodes it before it adds noise of its own.

        >>> import torch
        >>> from homebody.privacy import OneBit
        >>> reports = Channel(OneBit(epsilon=20.0, k=400))
        >>> sent = reports.device({"w": torch.tensor([1.0, -1.0])}, Rng.of(0))
        >>> reports.decoded(sent)["w"].sign().tolist()
        [1.0, -1.0]
        """
        total = Total({name: summable(value) for name, value in sums.items()}, 1)
        for stage in reversed(self.stages):
            if not stage.on_sum:
                total = stage.server(total, Rng.of(0))
        grid = self.facts.grid
        return {name: grid.values(value) for name, value in total.sum.items()} if grid else total.sum

    def deviation(self, entries: int, clients: int) -> float:
        """The standard deviation of the noise in each number of a sum over so many clients, whose messages have so many
        numbers before they leave; NaN where a stage does not say.

        >>> from homebody.privacy import Clip, Gaussian
        >>> Channel(Clip(2), Gaussian(z=1.5)).deviation(entries=10, clients=100)
        6.0
        """
        return math.hypot(*(stage.deviation(entries, clients) for stage in self.stages))

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        """What one round through this channel tells each observer: as the last stage says that speaks of them.

        >>> import numpy as np
        >>> from homebody.privacy import ViewNoise, Views
        >>> cohort = Cohort(np.arange(1), "all", size=1, population=1)
        >>> [(charge.observer, charge.event.kind) for charge in Channel(Views(0.5), ViewNoise(z=1)).charges(cohort)]
        [('views', 'gaussian'), ('server', 'not-private'), ('clients', 'not-private'), ('public', 'not-private')]
        """
        charged: dict[Observer, list[Charge]] = {}
        for stage in reversed(self.stages):
            if _states_charges(type(stage)):
                stated: dict[Observer, list[Charge]] = {}
                for charge in stage.charges(cohort):
                    stated.setdefault(charge.observer, []).append(charge)
                charged = {**charged, **{who: charges for who, charges in stated.items() if who not in charged}}
        for observer in OBSERVERS:
            charged.setdefault(observer, [Charge(observer, "user", NonPrivate(self._unhidden))])
        return self.with_requests([charge for charges in charged.values() for charge in charges])

    @property
    def _unhidden(self) -> str:
        """Why nothing bounds what an observer is told of whom no stage speaks."""
        if self.facts.noise:
            return "noise covers a part of what leaves the device, and the next shared model is computed from all of it"
        if self != Channel():
            return "no noise is added to what leaves the device, and the next shared model is computed from the sum"
        return "updates leave the device as they are, and the next shared model is computed from their sum"

    def with_requests(self, charges: Sequence[Charge]) -> Sequence[Charge]:
        """These charges; where devices ask for rows, with the request in place of all that the server is told."""
        if not self.asks_rows:
            return charges
        request = NonPrivate("each device asks the server for the rows it trains on, its own items among them")
        known = [replace(charge, event=request) if charge.observer == "server" else charge for charge in charges]
        if any(charge.observer == "server" for charge in known):
            return known
        return [Charge("server", "user", request), *known]

    @property
    def stated_by(self) -> str | None:
        """The first class that does not ship with Homebody and states what a certified ε would rest on.

        That is a stage with `charges` or `place` of its own, or inherited: it may change the halves that they are
        about. A channel of one's own counts too. None: there is none.
        """
        kinds = [type(stage) for stage in self.stages]
        stating = (kind for kind in kinds if _states_charges(kind) or kind.place is not Stage.place)
        return next((kind.__name__ for kind in (type(self), *stating) if not ships(kind)), None)

    def claims(self, charges: Sequence[Charge], by: str) -> Sequence[Charge]:
        """Charges that somebody states and nothing derives: every observer may be told everything."""
        claimed = "; ".join(dict.fromkeys(f"to {each.observer}, of a {each.unit}: {each.event}" for each in charges))
        reason = f"{by} states itself what it tells, and nothing derives it; it claims {claimed or 'nothing'}"
        observers = dict.fromkeys((*OBSERVERS, *(charge.observer for charge in charges)))
        return [Charge(observer, "user", NonPrivate(reason)) for observer in observers]


def _states_charges(kind: type[Stage]) -> bool:
    return kind.charges is not Stage.charges


def _placed(stage: Stage, before: Facts) -> tuple[Stage, Facts]:
    """A stage in its place, and what is known of a message after it."""
    name = type(stage).__name__
    if not isinstance(stage, Stage):
        raise HomebodyError(f"A channel has stages, and {name} is not one: derive it from homebody.privacy.Stage.")
    if before.reader is not None:
        reader = before.hidden or type(before.reader).__name__
        raise HomebodyError(f"{name} cannot follow {reader}: the server reads each message as it left a device.")
    if before.acts_on_sum and not stage.on_sum:
        raise HomebodyError(
            f"{name} works on the device, so it cannot come after {before.acts_on_sum}, which acts on the sum."
        )
    if before.reports and not stage.on_sum and not stage.keeps_sum:
        raise HomebodyError(f"{name} cannot follow one-bit reports: they leave as they are, or through a Shuffle.")
    stage, after = stage.place(before)
    return stage, replace(
        after,
        plain=after.plain and (stage.on_sum or any(stage is clip for clip in after.clips)),
        reader=stage if stage.reads else after.reader,
        mechanism=stage if _states_charges(type(stage)) else after.mechanism,
        acts_on_sum=after.acts_on_sum or (name if stage.on_sum else ""),
    )


def _about(stage: Stage) -> str:
    """The first sentence of a stage's documentation, without what is literal in it."""
    return " ".join((type(stage).__doc__ or "").split("\n\n")[0].split()).replace("`", "")


def _typed(stage: Stage) -> str:
    """A stage as one types it: with the settings that are not its defaults."""
    values = [(each, getattr(stage, each.name)) for each in fields(stage) if each.repr and each.init]  # type: ignore[arg-type]
    return f"{type(stage).__name__}({', '.join(f'{each.name}={v!r}' for each, v in values if v != each.default)})"
