"""Third attack: the server looks for reports that come from the same device.

Behind a shuffle the server has reports without senders. Two attackers score pairs of reports, *same device or not?*:

- one uses **everything** that the server sees: batches, order, times and content;
- one has the **bare multiset** of reports.

The second is above chance: a person's reports of one round share the private vector x, so bits about the same factor
are correlated. No shuffle can hide that; the ε of a report bounds it. A shuffle promises that the first attacker does
no better than the second.

Both judge content by the likelihood ratio of two bits under *same* and *different*, estimated from the updates of some
other people's devices. The first also learns from devices whose reports it knows how batch, place and time differ
between the two kinds of pairs. It is measured on the other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from homebody.adversary.rates import Figure
from homebody.core import Method, Tree, Update
from homebody.errors import HomebodyError
from homebody.federation.wire import report_numbers
from homebody.privacy import OneBit
from homebody.privacy.reports import counts_name
from homebody.privacy.stages import summable
from homebody.rng import Rng
from homebody.simulation import Simulator

__all__ = ["Linkage", "ReportBatch", "Reported", "as_they_come", "linkage", "reported"]

PAIRS = 20_000
"""Pairs of each kind, same and different device, to learn from and to measure on."""
FEWEST = 20
"""The fewest devices, half of which are measured."""
BINS = 24
BOOTSTRAPS = 400
AT_ONCE = 4096
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class ReportBatch(NamedTuple):
    """Reports that arrive at the server together."""

    arrived: float
    """The time of arrival."""
    pairs: Longs
    """Twice an entry's number plus the bit, in the order they stand in."""


@dataclass(frozen=True)
class Linkage:
    """How well pairs of one device are told from pairs of two: AUCs, with intervals from a bootstrap over devices."""

    devices: int
    reports: int
    batches: int
    everything: Figure
    content: Figure
    difference: Figure
    """Everything less content: what order, batches and times are worth."""

    @property
    def linked(self) -> bool:
        """Whether batches, order and times reveal more than the content of the reports."""
        return self.difference.low > 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {**plain, "linked": self.linked}


class Reported(NamedTuple):
    """A round of reports, as their devices sent them, and what the attacker knows of other people."""

    messages: list[Longs]
    """One for each attacked device."""
    worked_out: npt.NDArray[np.float32]
    """(people, entries): what some other devices compute, on [−1, 1]."""
    epsilon: float


def linkage(
    view: Sequence[ReportBatch],
    truth: Longs,
    worked_out: npt.NDArray[np.float32],
    epsilon: float,
    *,
    pairs: int = PAIRS,
    seed: int = 0,
) -> Linkage:
    """Attack a view. truth: which device sent each report, in the order of the view. The rest as in `Reported`.

    >>> generator = np.random.default_rng(0)
    >>> messages = [np.array([2 * entry + 1 for entry in generator.integers(50, size=10)]) for _ in range(60)]
    >>> view, truth = as_they_come(messages, together=20)
    >>> nothing = np.zeros((5, 50), dtype=np.float32)
    >>> result = linkage(view, truth, nothing, epsilon=1.0, pairs=2000)
    >>> result.everything.value > 0.95, result.content.value, result.linked
    (True, 0.5, True)
    """
    said = np.concatenate([batch.pairs for batch in view])
    if len(said) != len(truth):
        raise HomebodyError(f"The view has {len(said):,} reports, and the senders of {len(truth):,} are given.")
    devices = np.unique(truth)
    if len(devices) < FEWEST or len(said) < 2 * len(devices):
        raise HomebodyError(f"Reports are linked among at least {FEWEST} devices that send 2 or more each.")
    generator = np.random.default_rng(seed)
    known = generator.permutation(devices)[: len(devices) // 2]
    mine = np.isin(truth, known)
    place = np.arange(len(said))
    learnt, asked = (_drawn(truth, place[part], pairs, generator) for part in (mine, ~mine))
    content = _Content(worked_out, epsilon)
    sizes = [len(batch.pairs) for batch in view]
    marks = [np.repeat(np.arange(len(view)), sizes), place, np.repeat([batch.arrived for batch in view], sizes)]

    def columns(drawn: _Pairs) -> list[Floats]:
        apart = [np.abs(mark[drawn.first] - mark[drawn.second]).astype(np.float64) for mark in marks]
        return [content(said[drawn.first], said[drawn.second]), *apart]

    score, measured = _learnt(columns(learnt), learnt.same, generator), columns(asked)
    every, alone = (_Ranked(scores, asked.same) for scores in (score(measured), measured[0]))
    areas = np.array([(every.area(some), alone.area(some)) for some in _resampled(asked, truth, generator)]).T
    figures = (_area(areas[0]), _area(areas[1]), _area(areas[0] - areas[1]))
    return Linkage(len(devices), len(said), len(view), *figures)


def as_they_come(messages: Sequence[Longs], *, together: int = 1) -> tuple[list[ReportBatch], Longs]:
    """A view without a shuffle: so many messages in a batch, one behind the other; and who sent each report."""
    groups = [messages[start : start + together] for start in range(0, len(messages), together)]
    view = [ReportBatch(float(number), np.concatenate(group)) for number, group in enumerate(groups)]
    return view, np.repeat(np.arange(len(messages)), [len(message) for message in messages])


def reported(
    method: Method,
    simulator: Simulator,
    shared: Tree,
    *,
    users: int = 300,
    seed: int = 0,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> Reported:
    """The reports of some clients in the next round of a trained model, and what as many others work out."""
    stage = method.uplink.facts.reports
    if stage is None:
        raise HomebodyError("Only reports of one bit can be linked: this run's channel makes none.")
    if stage.k < 2:
        raise HomebodyError("A device that sends one report has nothing to link: k must be 2 or more.")
    rng = Rng.of(seed, "linkage")
    drawn = np.random.default_rng(int(rng.fold("users").key) % 2**64).permutation(simulator.available())
    attacked, others = drawn[:users], drawn[users : 2 * users]
    if len(others) < users:
        attacked, others = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    before: Method = replace(method, uplink=method.uplink.before(stage))  # type: ignore[type-var]
    messages, known = [], []
    for done, user in enumerate((*attacked, *others), start=1):
        if done <= len(attacked):
            messages.append(report_numbers(simulator.message(method, shared, int(user), rng.fold("round"))))
        else:
            known.append(_entries(simulator.message(before, shared, int(user), rng.fold("round")), stage))
        step(done, len(attacked) + len(others))
    return Reported(messages, np.stack(known), stage.epsilon)


def _entries(update: Update, stage: OneBit) -> npt.NDArray[np.float32]:
    """All entries, projected, in the order that reports number them in."""
    tables = {counts_name(name, summable(value).shape): summable(value) for name, value in update.items()}
    return torch.cat([stage.projected(table).float().flatten() for _, table in sorted(tables.items())]).cpu().numpy()


class _Pairs(NamedTuple):
    first: Longs
    second: Longs
    same: npt.NDArray[np.bool_]


def _drawn(truth: Longs, places: Longs, count: int, generator: np.random.Generator) -> _Pairs:
    """Pairs of the reports at these places: so many of one device, and as many of two."""
    places = places[np.argsort(truth[places], kind="stable")]
    _, starts, sizes = np.unique(truth[places], return_index=True, return_counts=True)
    # A device with n reports has n (n − 1) pairs.
    odds = sizes * (sizes - 1.0)
    owner = generator.choice(len(sizes), size=count, p=odds / odds.sum())
    first = generator.integers(sizes[owner])
    second = (first + 1 + generator.integers(sizes[owner] - 1)) % sizes[owner]
    left, right = (generator.integers(len(places), size=4 * count) for _ in range(2))
    other = np.flatnonzero(truth[places[left]] != truth[places[right]])[:count]
    return _Pairs(
        places[np.concatenate([starts[owner] + first, left[other]])],
        places[np.concatenate([starts[owner] + second, right[other]])],
        np.arange(count + len(other)) < count,
    )


class _Content:
    """The logarithm of P[two reports | one device] / P[the same | two devices], by what other people work out."""

    def __init__(self, worked_out: npt.NDArray[np.float32], epsilon: float) -> None:
        self._known, self._mean = worked_out.T.copy(), worked_out.mean(0, dtype=np.float64)
        self._bias = np.tanh(epsilon / 2)

    def __call__(self, first: Longs, second: Longs) -> Floats:
        out = np.empty(len(first))
        for start in range(0, len(first), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            a, b = (self._bias * (2.0 * (report[part] % 2) - 1) for report in (first, second))
            x, y = first[part] // 2, second[part] // 2
            both = np.einsum("ij,ij->i", self._known[x], self._known[y]) / self._known.shape[1]
            alone = (1 + a * self._mean[x]) * (1 + b * self._mean[y])
            out[part] = np.log((1 + a * self._mean[x] + b * self._mean[y] + a * b * both) / alone)
        return out


def _learnt(
    columns: list[Floats], same: npt.NDArray[np.bool_], generator: np.random.Generator
) -> Callable[[list[Floats]], Floats]:
    """A score from content and from how far two reports are apart, by pairs of which it is known what they are.

    Half of them say how much likelier a distance is in pairs of one device, the others what that is worth: what the
    first half shows by chance is worth nothing.
    """
    content, *apart = columns
    half = generator.random(len(same)) < 0.5
    tables = [_Table(column[half], same[half]) for column in apart]

    def matrix(given: list[Floats]) -> Floats:
        rows = [given[0], *(table(column) for table, column in zip(tables, given[1:], strict=True))]
        return np.stack([*rows, np.ones(len(given[0]))], axis=1)

    weights = _logistic(matrix([content[~half], *(column[~half] for column in apart)]), same[~half])
    return lambda given: matrix(given) @ weights


class _Table:
    """How much likelier a distance is between two reports of one device, by the logarithm, in a few bins."""

    def __init__(self, apart: Floats, same: npt.NDArray[np.bool_]) -> None:
        self._edges = np.unique(np.quantile(apart, np.linspace(0, 1, BINS + 1)[1:-1]))
        counts = [np.bincount(self._bin(apart[kind]), minlength=len(self._edges) + 1) + 0.5 for kind in (same, ~same)]
        self._ratio = np.log(counts[0] / counts[0].sum()) - np.log(counts[1] / counts[1].sum())

    def _bin(self, apart: Floats) -> Longs:
        return np.searchsorted(self._edges, apart)

    def __call__(self, apart: Floats) -> Floats:
        return self._ratio[self._bin(apart)]


def _logistic(rows: Floats, same: npt.NDArray[np.bool_]) -> Floats:
    """Logistic regression, by Newton's steps; a little ridge, for columns that never vary."""
    weights = np.zeros(rows.shape[1])
    for _ in range(25):
        chance = 1 / (1 + np.exp(-np.clip(rows @ weights, -30, 30)))
        slope = rows.T @ (same - chance) - weights
        curve = (rows * (chance * (1 - chance))[:, None]).T @ rows + np.eye(len(weights))
        weights = weights + np.linalg.solve(curve, slope)
    return weights


def _resampled(drawn: _Pairs, truth: Longs, generator: np.random.Generator) -> Iterator[Floats]:
    """Weights of the pairs: as they are, then with devices drawn anew, again and again."""
    there, both = np.unique(truth[np.stack([drawn.first, drawn.second])], return_inverse=True)
    first, second = both.reshape(2, -1)
    yield np.ones(len(first))
    for _ in range(BOOTSTRAPS):
        times = np.bincount(generator.integers(len(there), size=len(there)), minlength=len(there))
        yield np.where(drawn.same, times[first], times[first] * times[second]).astype(np.float64)


class _Ranked:
    """Scores in order, once and for all weights."""

    def __init__(self, scores: Floats, same: npt.NDArray[np.bool_]) -> None:
        _, self._rank = np.unique(scores, return_inverse=True)
        self._same = same

    def area(self, weights: Floats) -> float:
        """How often a pair of one device has the higher score; a tie is half."""
        mine = np.bincount(self._rank, weights * self._same)
        others = np.bincount(self._rank, weights * ~self._same, minlength=len(mine))
        below = np.cumsum(others) - others / 2
        return float((mine * below).sum() / (mine.sum() * others.sum()))


def _area(areas: Floats) -> Figure:
    low, high = np.quantile(areas[1:], [0.025, 0.975])
    return Figure(float(areas[0]), float(low), float(high))
