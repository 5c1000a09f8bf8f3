"""The secure sum, and noise that its parties add between them, so that it holds against the server too.

The sum of independent Skellam variables is a Skellam variable, whose variance is the sum of theirs. So each party of a
secure sum adds a share, and the sum has the noise of all of them. Discrete Gaussian noise has no such sums.

| in the literature | here |
|---|---|
| n parties, of which t must answer | `Channel.among(n)`, `SecureSum.threshold(n)` |
| Sk(μ), μ = (mΔ₂)² (Agarwal, Kairouz and Liu 2021) | m is `Skellam.z`, Δ₂ the longest rounded update, once or twice |

A party's variance is μ/h. h is how many honest parties are in the sum at least: those that must answer, less those that
may tell the server their noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self, get_args

import torch

from homebody.core import Cohort, Total, Tree, Update, Work
from homebody.errors import HomebodyError
from homebody.privacy.events import OBSERVERS, Charge, Relation, Sampling, SkellamRelease
from homebody.privacy.mechanisms import EVERYONE
from homebody.privacy.ring import COARSEST, entries_of, fitting, longest, rounded
from homebody.privacy.skellam import UNIT, skellam
from homebody.privacy.stages import (
    Facts,
    NoiseStage,
    Stage,
    check_known,
    check_number,
    dense,
    passed,
    placed,
    real,
    sampling,
    touched,
)
from homebody.rng import Rng

__all__ = ["SecureSum", "Skellam"]

LEAST, COLLUDING = 2 / 3, 0.1
"""The share of a secure sum's parties that must answer, and the share that may collude with the server, by default."""
COMPLETE = 128
"""Up to this many parties, all mask with one another; with more, each masks with a few neighbours."""
SEMI_HONEST = (
    f"In a secure sum of more than {COMPLETE} parties each masks with a few neighbours: that holds against a server "
    "that follows the protocol, and not against one that departs from it."
)
HELPER = (
    "Who takes part in a round: server and helper know it. And a helper that sees the shared parameters can take its "
    "own noise off them: it then knows the sum of a round, though no single update."
)
_NORMAL = 1 << 20
"""From this variance on, a simulation draws the noise of many devices as a rounded normal variable: the fourth moments
of the two differ by a factor of 1 + 1 / (3 × the variance)."""


def threshold(parties: int, least: float) -> int:
    """How many parties must answer, if this share of them must."""
    return max(1, math.ceil(least * parties - 1e-9))


def honest(parties: int, least: float, colluding: float) -> int:
    """The least number of parties whose noise in a sum the server does not know.

    >>> honest(100, 2 / 3, 0.1), honest(100, 1, 0), honest(1, 2 / 3, 0.1)
    (57, 100, 1)
    """
    return threshold(parties, least) - math.floor(colluding * parties + 1e-9)


def check_shares(least: float, colluding: float, *, helper: bool = False) -> None:
    """Refuse shares with which parties could be made to open two sums: any two sets of answers must have an honest
    party in common. A helper opens one sum alone, so with it the shares are free."""
    check_number("The share of parties that may collude", colluding, zero=True)
    check_number("The share of parties that must answer", least)
    if least > 1:
        raise HomebodyError(f"The share of parties that must answer is at most 1, not {least:g}.")
    if not helper and not 2 * least > 1 + colluding:
        raise HomebodyError(
            f"With least={least:.4g} and colluding={colluding:.4g} two sums could be opened that no honest party is in "
            f"twice: let least be above {(1 + colluding) / 2:.4g}, or colluding smaller."
        )


@dataclass(frozen=True)
class Skellam(NoiseStage):
    """Noise that the parties of a round add between them, of z × the ℓ2 sensitivity, in every coordinate of the sum.

    It comes after a clip and before a `SecureSum`. The update is rounded at random to whole numbers of steps, and
    its message holds whole numbers. Behind the secure sum the noise holds against the server too. Without a secure sum,
    the server reads each message, and what is charged is the noise of one party.

    Parties and people are the same in a simulation. `Channel.among` says how many there are in a round; until then the
    noise is that of one party alone, which is all of it.

    >>> import homebody as hb
    >>> channel = hb.Channel(hb.Clip(1.0), hb.Skellam(z=4), hb.SecureSum())
    >>> channel, channel.facts.secret
    (Channel(Clip(norm=1.0), Skellam(z=4), SecureSum()), True)
    >>> round(hb.account.skellam(4.0, rounds=2)["epsilon"].item(), 2)
    1.66
    """

    z: float
    relation: Relation = "replace-one"
    least: float = LEAST
    """The share of a round's parties that must answer."""
    colluding: float = COLLUDING
    """The share of them that may tell the server their noise."""
    sensitivity: float | None = field(default=None, kw_only=True, repr=False)
    """ℓ2, under the relation, before anything is rounded; a channel takes it from its clip."""
    parties: int = field(default=1, kw_only=True, repr=False, compare=False)
    """How many add their noise; see `Channel.among`."""

    dense = True
    noise_adds_up = True
    noise_field = "z"

    def __post_init__(self) -> None:
        check_number("z, the noise multiplier of Skellam noise,", self.z)
        check_known("relation", self.relation, get_args(Relation))
        check_shares(self.least, self.colluding)
        if type(self.parties) is not int or self.parties < 1:
            raise HomebodyError(f"A round has a whole number of parties from 1, not {self.parties!r}.")

    @property
    def scale(self) -> float:
        """The standard deviation of the noise that is counted on in a sum, before anything is rounded."""
        return self.z * placed(self.sensitivity, "Skellam noise")

    @property
    def norm(self) -> float:
        """The norm that an update is clipped to."""
        return placed(self.sensitivity, "Skellam noise") / self._times

    def place(self, facts: Facts) -> tuple[Self, Facts]:
        bound = facts.bound(2, "Skellam noise")
        known = replace(self, sensitivity=self._times * bound)
        return known, replace(facts, hidden="Skellam noise", noise="skellam", noise_on_sum=False, skellam=known)

    def device(self, update: Update, rng: Rng) -> Update:
        return self.noise_of_many(self.before_noise(update, rng), 1, rng)

    def before_noise(self, update: Update, rng: Rng) -> Update:
        entries = entries_of(update)
        steps = fitting(entries)
        return rounded(update, rng.fold("rounding"), steps / self.norm, longest(steps, entries))

    def noise_of_many(self, sums: Tree, devices: int, rng: Rng) -> Tree:
        """These sums of whole numbers with the noise of so many parties, in whole numbers too.

        The sum of Skellam variables is a Skellam variable. A simulation draws the noise of several at once; where its
        variance is large, it draws a rounded normal variable instead.
        """
        units = devices * self.units(entries_of(sums))
        out: Tree = {}
        for name, value in sums.items():
            whole, stream = dense(value).to(torch.int64), rng.fold(name)
            if devices > 1 and units >= _NORMAL * UNIT:
                deviation = math.sqrt(units / UNIT)
                noise = (deviation * stream.normal_doubles(*whole.shape)).round().to(torch.int64)
            else:
                noise = skellam(stream, units, *whole.shape)
            out[name] = whole + noise.to(whole.device)
        return out

    def server(self, total: Total, rng: Rng) -> Total:
        step = self.step(entries_of(total.sum))
        scaled = {name: (dense(value).double() * step).to(torch.float32) for name, value in total.sum.items()}
        return replace(total, sum=scaled)

    def deviation(self, entries: int, clients: int) -> float:
        return self.step(entries) * math.sqrt(clients * self.units(entries) / UNIT)

    def step(self, entries: int) -> float:
        """What a step is worth in a message of so many numbers."""
        return self.norm / fitting(entries)

    def units(self, entries: int) -> int:
        """The variance of one party's noise, in steps², as a whole number of 1 / UNIT; never too small."""
        moved = self._times * longest(fitting(entries), entries)
        return math.ceil(UNIT * (1 + 2**-40) * (self.z * moved) ** 2 / honest(self.parties, self.least, self.colluding))

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        """Without a secure sum: the server, and whoever it tells, knows each message."""
        share = self.z / math.sqrt(honest(cohort.parties, self.least, self.colluding))
        drawn = {who: EVERYONE if who == "server" else sampling(cohort) for who in OBSERVERS}
        return [Charge(who, "user", self._release(share, drawn[who])) for who in OBSERVERS]

    def charges_of_sum(self, cohort: Cohort) -> Sequence[Charge]:
        """Behind a secure sum. A client that takes part knows its own noise, so for clients one party colludes; and it
        learns who else takes part, so that drawing people hides nothing from it."""
        parties, known = honest(cohort.parties, self.least, self.colluding), self.z
        if cohort.parties > 1 and honest(cohort.parties, self.least, 0.0) == parties:
            known *= math.sqrt((parties - 1) / parties)
        to = {"server": self._release(self.z), "clients": self._release(known)}
        return [Charge(who, "user", to.get(who, self._release(self.z, sampling(cohort)))) for who in OBSERVERS]

    def _release(self, multiplier: float, drawn: Sampling = EVERYONE) -> SkellamRelease:
        # For any number of entries, and the fewest steps there may be: more steps cost no more.
        return SkellamRelease(multiplier, self._times * COARSEST, 0, self.relation, drawn)

    @property
    def _times(self) -> int:
        """How many times the length of an update one person moves a sum."""
        return 1 if self.relation == "add-remove" else 2


@dataclass(frozen=True)
class SecureSum(Stage):
    """Declares that the server learns the sum over the cohort and no single update.

    The sum itself is exact: without noise ε stays ∞. With Skellam noise before it, which the devices add between them,
    ε is finite against the server too. So it is with a helper that opens the sum and adds Gaussian noise, as long as
    server and helper do not collude. Whole tables are summed, since which rows a device sends would tell what it
    touched. A simulation just sums. Parties of a real sum add whole numbers, as `Channel.ring` defines them.

    >>> import homebody as hb
    >>> channel = hb.Channel(hb.Clip(1.0), hb.SecureSum())
    >>> channel.facts.secret
    True
    """

    range: float | None = None
    """Numbers of an update beyond this are cut off. By default none are, and the clip's norm is the range of the whole
    numbers that parties add."""
    least: float | None = None
    """The share of a round's parties that must answer: by default that of Skellam noise, or `LEAST`."""
    colluding: float | None = None
    """The share of them that may collude with the server: by default that of Skellam noise, or `COLLUDING`."""
    helper: bool = False
    """Whether a helper opens the sum, and adds the noise of a `Gaussian` after it. It is a party that does not collude
    with the server: a proxy, as for `Shuffle`."""
    noise: Skellam | None = field(default=None, kw_only=True, repr=False, compare=False)
    """The noise in the sum that devices added; a channel takes it from the stage before."""

    on_sum = True
    dense = True
    keeps_sum = True

    def __post_init__(self) -> None:
        if self.range is not None:
            check_number("The range of a secure sum", self.range)
            object.__setattr__(self, "keeps_sum", False)  # what is cut off is not in the sum
        if self.helper and self.colluding is not None:
            raise HomebodyError(
                "With a helper it does not matter how many devices collude with the server: leave colluding out of "
                "secure-sum."
            )
        check_shares(*self.shares, helper=self.helper)

    @property
    def shares(self) -> tuple[float, float]:
        """The share of the parties that must answer, and the share that may collude with the server."""
        least, colluding = (self.noise.least, self.noise.colluding) if self.noise else (LEAST, COLLUDING)
        return (least if self.least is None else self.least, colluding if self.colluding is None else self.colluding)

    def threshold(self, parties: int) -> int:
        """How many of so many parties must answer.

        >>> SecureSum().threshold(100), SecureSum(least=0.9).threshold(4)
        (67, 4)
        """
        return threshold(parties, self.shares[0])

    def place(self, facts: Facts) -> tuple[Self, Facts]:
        if facts.secret:
            raise HomebodyError("A second SecureSum has nothing left to sum: leave one out.")
        if facts.shuffled:
            raise HomebodyError("A Shuffle and a SecureSum both hide who sent what: keep one of them.")
        if facts.mechanism and facts.mechanism.on_sum:
            noise = type(facts.mechanism).__name__
            raise HomebodyError(f"SecureSum makes the sum that {noise} adds noise to: put it before.")
        if facts.skellam and self.helper:
            raise HomebodyError(
                "With a helper, the helper adds all of the noise: leave out skellam, and put gaussian after secure-sum."
            )
        if facts.skellam and (self.least, self.colluding, self.range) != (None, None, None):
            raise HomebodyError(
                "With Skellam noise, least and colluding are settings of skellam, and its clip is the range: leave "
                "them out of secure-sum."
            )
        if facts.hidden and self.range is not None:
            raise HomebodyError(f"A range bounds updates, and here is {facts.hidden}: leave range out of secure-sum.")
        known = replace(self, noise=facts.skellam)
        return known, replace(facts, sum=known)

    def deviation(self, entries: int, clients: int) -> float:
        return 0.0

    def work(self, given: Work) -> Work:
        """With a helper there is one mask; without, one for each of up to 127 neighbours."""
        return (touched if self.helper else passed)(given)

    def device(self, update: Update, rng: Rng) -> Update:
        whole = {name: dense(value) for name, value in update.items()}
        if (most := self.range) is None:
            return whole
        return {name: real(value).nan_to_num(0.0, most, -most).clamp(-most, most) for name, value in whole.items()}

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        """The charges of noise in the sum; without noise, those of the stages before apply."""
        return self.noise.charges_of_sum(cohort) if self.noise else ()
