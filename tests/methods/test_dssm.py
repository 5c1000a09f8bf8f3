"""The centralised DSSM: its loss, what it reads, and who teaches."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from homebody.core import Catalogue
from homebody.data.partitions import split
from homebody.errors import HomebodyError
from homebody.evaluation import measure
from homebody.methods.dssm import DSSM
from homebody.methods.kernels.mf import outside
from homebody.models.towers import Tower, cosine
from homebody.reference import Histories
from homebody.rng import Rng
from homebody.testing import described


def test_the_loss_is_that_of_the_paper() -> None:
    """−log of the positive's softmax among those that were drawn; an item that was not drawn counts for nothing."""
    rng = Rng.of(3)
    person, items = rng.normal(2, 4), rng.normal(2, 3, 4)
    real = torch.tensor([[True, True, True], [True, False, True]])
    found = DSSM(gamma=7.0)._loss(person, items, real)
    expected = []
    for number in range(2):
        near = [7.0 * float(cosine(person[number], items[number, k])) for k in range(3) if real[number, k]]
        expected.append(-np.log(np.exp(near[0]) / np.exp(near).sum()))
    assert float(found) == pytest.approx(np.mean(expected), rel=1e-5)


def test_a_step_is_adams_on_the_whole_network() -> None:
    """One batch of everything, against automatic differentiation through a dense first layer."""
    histories = described().histories()
    some = histories._replace(learn=np.arange(len(histories.learn)) == 7)
    model = DSSM(view="taste", widths="6,4", batch_size=10_000, negatives=3)
    people, tower = model._inputs(some), Tower((6, 4))
    start = {
        f"{whose}/{part}": value
        for whose, inside in (("user", people.shape[1]), ("item", 11))
        for part, value in tower.start(inside, Rng.of(0, "dssm").fold(whose)).items()
    }
    rows = torch.randint(0, 11, (described().n_items, 5), generator=torch.Generator().manual_seed(0))
    weights = torch.ones_like(rows, dtype=torch.float32)
    learnt = {name: start[name].clone().requires_grad_() for name in start}
    adam = torch.optim.Adam(learnt.values(), lr=0.01)
    model._train(some, tower, learnt, adam, people, (rows, weights), Rng.of(1))

    # The same samples, drawn in the same order.
    again = {name: value.clone().requires_grad_() for name, value in start.items()}
    optimiser = torch.optim.Adam(again.values(), lr=0.01)
    rng = Rng.of(1)
    first, last = some.indptr[7], some.indptr[8]
    places = np.arange(first, last)[rng.bits(int(last - first)).argsort().numpy()]
    drawn = torch.from_numpy(outside(some, np.full(len(places), 7), 3, rng))
    samples = torch.cat([torch.from_numpy(some.items[places].astype(np.int64))[:, None], drawn], 1)
    given = (again["item/first"][rows] * weights[..., None]).sum(1)[samples]
    person = tower.encode(again["user/layers"], people[[7] * len(places)] @ again["user/first"])
    model._loss(person, tower.encode(again["item/layers"], given), samples >= 0).backward()
    optimiser.step()
    for name, value in again.items():
        torch.testing.assert_close(learnt[name].detach(), value.detach(), rtol=1e-5, atol=1e-6)


def test_it_reads_the_views_that_are_named_and_no_other() -> None:
    histories = described().histories()
    taste, both = DSSM(view="taste")._inputs(histories), DSSM()._inputs(histories)
    assert taste.shape[1] == 3
    assert both.shape[1] == 3 + (histories.catalogue.people["kind"].size - 1)
    with pytest.raises(HomebodyError, match="There is no view of this data 'shop'"):
        DSSM(view="shop")._inputs(histories)


def test_somebody_of_whom_nothing_is_known_has_equal_scores() -> None:
    histories = described().histories()
    score = next(DSSM(view="profile").fit(histories, 0))
    # One in ten has no profile.
    scores = score(np.array([0, 10, 1]), torch.arange(described().n_items))
    assert not scores[:2].any()
    assert scores[2].std() > 0


def test_passes_improve_it() -> None:
    done = described()
    scores = list(islice(DSSM(view="taste", learning_rate=0.005).fit(done.histories(), 0), 4))
    first, last = (measure(done, score).metrics["valid/ndcg@10"] for score in (scores[0], scores[-1]))
    assert last > first


def test_new_items_are_ranked_by_their_features() -> None:
    done = split(described().population, "cold-items:test=0.2,valid=0.1", how="random")
    score = DSSM(view="taste", learning_rate=0.01).trained(done.histories(), rounds=5)
    assert measure(done, score).metrics["auc"] > 0.55


def test_items_without_features_are_refused() -> None:
    histories = described().histories()
    bare = histories._replace(catalogue=Catalogue(described().n_items, {}, histories.catalogue.people))
    with pytest.raises(HomebodyError, match="Items have no features"):
        next(DSSM().fit(bare, 0))
    with pytest.raises(HomebodyError, match="No feature of people is in a view"):
        next(DSSM().fit(Histories.of([[0]], 3), 0))
    with pytest.raises(HomebodyError, match="two layers or more"):
        DSSM(widths="64")
