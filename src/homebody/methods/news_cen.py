"""The centralised news recommender that PrivateRec (Liu et al., 2022) and FedRec (Qi et al., 2020) are compared with.

The encoders and the loss are those of `homebody.methods.fedrec`. Everyone's impressions and histories are in one place,
and Adam goes through them in batches of 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from homebody.core import About, Batch, Data, Shown, Tree, Users, param
from homebody.errors import HomebodyError
from homebody.methods.fedrec import FedRec, NewsSettings
from homebody.methods.kernels import news as kernel
from homebody.models.adam import adam_start, adam_step
from homebody.reference import Histories, LearntImpressions, Reference, Score
from homebody.rng import Rng
from homebody.settings import Range, common_params

__all__ = ["NewsCentral"]

PEOPLE_AT_ONCE = 1024


@dataclass(frozen=True)
class NewsCentral(NewsSettings, Reference):
    """FedRec's encoders, trained on everyone's impressions in one place.

    >>> import homebody as hb
    >>> from homebody.testing import impressed
    >>> model = hb.fit(hb.NewsCentral(encoder="id", d=8), impressed(), rounds=1, quiet=True)
    >>> model.epsilon
    {'server': inf, 'clients': inf, 'public': inf}
    """

    learning_rate: float = param(0.001, "learning rate of Adam", low=0, search=Range(1e-4, 0.03, log=True))
    batch_size: int = param(64, "impressions in a step", low=1)

    about: ClassVar[About] = About(
        title="FedRec's encoders on everyone's impressions, in one place",
        paper="Liu et al., PrivateRec: Differentially Private Training and Serving for Federated News Recommendation, "
        "2022",
        rounds=30,
    )

    @property
    def task(self) -> FedRec:
        """The method whose encoders and loss these are."""
        return FedRec(**common_params(self, FedRec))

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        if histories.shown is None:
            raise HomebodyError("There are no impressions to learn from.")
        task, rng = self.task, Rng.of(seed, "news-cen", device=histories.device)
        shared = task.init_shared(histories.catalogue, rng.fold("shared"))
        state = adam_start(shared)
        learnt = np.flatnonzero(histories.learn[histories.shown.users])
        for number in count():
            stream = rng.fold("pass", number)
            order = learnt[stream.bits(len(learnt)).argsort().cpu().numpy()]
            for start in range(0, len(order), self.batch_size):
                some = order[start : start + self.batch_size]
                data = _padded(histories, histories.shown, some, task.latest)
                streams = stream.fold(torch.from_numpy(some).to(histories.device))
                batches = _batches(task, histories, data, streams)
                gradient, _ = kernel.total(task, shared, {}, batches)
                mean = {name: value / len(some) for name, value in gradient.items()}
                shared, state = adam_step(shared, state, mean, task.rate, (0.9, 0.99))
            yield _scorer(task, {**shared, **kernel.index(task, shared, histories.catalogue)}, histories)


def _latest(histories: Histories, users: Users, before: Users, most: int) -> tuple[Tensor, Tensor]:
    """The last clicks of these people out of so many each, padded with the number of items; and which are real."""
    place = np.maximum(before - most, 0)[:, None] + np.arange(min(most, max(1, int(before.max(initial=0)))))
    real = place < before[:, None]
    entry = np.minimum(histories.indptr[users][:, None] + place, len(histories.items) - 1)
    history = np.where(real, histories.items[entry], histories.catalogue.n_items).astype(np.int64)
    return torch.from_numpy(history).to(histories.device), torch.from_numpy(real).to(histories.device)


def _padded(
    histories: Histories, shown: LearntImpressions, some: np.ndarray, latest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """These impressions with the last clicks before each: history, which of it is real, items, which were clicked."""
    history, real = _latest(histories, shown.users[some], shown.before[some], latest)
    width = np.diff(shown.indptr)[some]
    column = np.arange(int(width.max(initial=1)))
    there = column < width[:, None]
    entry = np.minimum(shown.indptr[some][:, None] + column, len(shown.items) - 1)
    items = np.where(there, shown.items[entry], histories.catalogue.n_items)
    clicked = there & shown.clicked[entry]
    asked, answers = torch.from_numpy(items.astype(np.int64)), torch.from_numpy(clicked)
    return history, real, asked.to(histories.device), answers.to(histories.device)


def _batches(task: FedRec, histories: Histories, data: tuple[Tensor, ...], streams: Rng) -> Batch:
    def prepare(key: Tensor, items: Tensor, valid: Tensor, shown: Tensor, clicked: Tensor) -> Batch:
        one = Shown(shown[None], clicked[None], valid.sum()[None])
        return task.prepare(Data(items, valid, items[:0], histories.catalogue, shown=one), Rng(key))

    return vmap(prepare)(streams.key, *data)


def _scorer(task: FedRec, shared: Tree, histories: Histories) -> Score:
    """How well items fit people, by all that is known of each."""
    length, stream = np.diff(histories.indptr), Rng.of(0, device=histories.device)

    def score(users: Users, items: Tensor) -> Tensor:
        starts = range(0, max(1, len(users)), PEOPLE_AT_ONCE)
        return torch.cat([some(users[at : at + PEOPLE_AT_ONCE], items) for at in starts])

    def some(users: Users, items: Tensor) -> Tensor:
        def person(own: Tensor, valid: Tensor) -> Tensor:
            news = task.vectors(shared, histories.catalogue, own)
            return task.asked(shared, news, valid, stream)

        people = vmap(person)(*_latest(histories, users, length[users], task.latest))
        return (people @ task.vectors(shared, histories.catalogue, items.to(histories.device)).T).cpu()

    return score
