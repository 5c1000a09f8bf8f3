"""Every method and reference that is shipped keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import polars as pl
import pytest
import torch
from tests.methods.news import SMALL, made_up_vectors, texts, worded
from torch.func import vmap

from homebody.core import Method, Rows, Total, Tree
from homebody.data.partitions import leave_one_out
from homebody.data.splits import Split
from homebody.evaluation import measure
from homebody.methods import METHODS, find
from homebody.methods.baselines import Chance, Popularity, PrivatePopularity
from homebody.methods.dp_als import DPALS
from homebody.methods.dp_fedrec import DPFedRec
from homebody.methods.dp_privrec import DPPrivRec
from homebody.methods.dplcf import DPLCF
from homebody.methods.dssm import DSSM
from homebody.methods.fcf import FCF
from homebody.methods.fed_mvmf import FedMVMF
from homebody.methods.fedgnn import FedGNN
from homebody.methods.fedials import FedIALS
from homebody.methods.fedmf import FedMF
from homebody.methods.fedncf import FedNCF
from homebody.methods.fedrec import FedRec
from homebody.methods.fedrecon import FedRecon
from homebody.methods.fl_mv_dssm import FLMVDSSM
from homebody.methods.fmf_ldp import FMFLDP
from homebody.methods.ials import IALS
from homebody.methods.mf import MF
from homebody.methods.ncf import NCF
from homebody.methods.nearby import Nearby, NearbyPopularity, PublicFeatures
from homebody.methods.news_cen import NewsCentral
from homebody.methods.nn_self import FOFLSelf, NNSelf
from homebody.methods.pfedrec import Alone, PFedRec
from homebody.methods.privaterec import PrivateRec
from homebody.methods.privrec import PrivRec
from homebody.methods.privrec_cen import PrivRecCEN
from homebody.privacy import Channel, Clip, Gaussian, SecureSum
from homebody.reference import Reference
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.testing import MethodContract, ReferenceContract, chance, described, impressed, population
from homebody.training import fit


class TestPFedRec(MethodContract):
    def method(self) -> Method:
        return PFedRec(factors=5, batch_size=16, epochs=2, item_rate=2.0)

    def learner(self) -> Method:
        return PFedRec(factors=8)


class TestPrivRec(MethodContract):
    def method(self) -> Method:
        return PrivRec(factors=4, hidden="6,5", epochs=3, adapt_epochs=2, batch_size=4, negatives=2, init_scale=0.1)

    def learner(self) -> Method:
        return PrivRec(factors=8, hidden="16", epochs=5, learning_rate=0.5, init_scale=0.3)


class TestPrivRecRatings(MethodContract):
    def method(self) -> Method:
        return PrivRec(
            output="explicit", factors=4, hidden="6", activation="sigmoid", epochs=2, batch_size=0, init_scale=0.1
        )

    test_training_finds_what_there_is_to_learn = None  # Ratings rank nothing; `TestPrivRec` learns to rank.


class TestFLMVDSSM(MethodContract):
    def method(self) -> Method:
        return FLMVDSSM(widths="8,6,4", batch_size=4, negatives=3)

    def learner(self) -> Method:
        return FLMVDSSM(widths="16,8", server_rate=0.02)

    def people(self) -> Split:
        return titled()


class TestFLMVDSSMSemi(TestFLMVDSSM):
    def method(self) -> Method:
        return FLMVDSSM(widths="8,6", batch_size=0, negatives=2, aggregate_users=False, weighting="samples")

    def learner(self) -> Method:
        return FLMVDSSM(widths="16,8", server_rate=0.02, aggregate_users=False)


class TestFLDSSM(TestFLMVDSSM):
    """With one view."""

    def method(self) -> Method:
        return FLMVDSSM(views="profile", widths="8,6,4", batch_size=4)

    def learner(self) -> Method:
        return FLMVDSSM(views="taste", widths="16,8", server_rate=0.02)


class TestFedMVMF(MethodContract):
    def method(self) -> Method:
        return FedMVMF(factors=4, view_weight=0.5, item_weight=2.0)

    def learner(self) -> Method:
        return FedMVMF(factors=8, confidence=2.0, item_weight=1.0, regularisation=1.0)

    def people(self) -> Split:
        return described()


class TestFOFLSelf(MethodContract):
    def method(self) -> Method:
        return FOFLSelf(factors=4, hidden="6,5", epochs=3, batch_size=4, negatives=2)

    def learner(self) -> Method:
        return FOFLSelf(factors=8, hidden="16", epochs=5, learning_rate=0.5, init_scale=0.3)


class TestNNSelf(MethodContract):
    rounds = 5

    def method(self) -> Method:
        return NNSelf(factors=4, hidden="6,5", epochs=2, adapt_epochs=3, batch_size=16, negatives=2)

    def learner(self) -> Method:
        return NNSelf(factors=8, hidden="16", learning_rate=0.5, init_scale=0.3, meta_rate=5.0)


class TestNNSelfRatings(MethodContract):
    def method(self) -> Method:
        return NNSelf(output="explicit", factors=4, hidden="6", activation="sigmoid", epochs=2, first_order=True)

    test_training_finds_what_there_is_to_learn = None  # Ratings rank nothing; `TestNNSelf` learns to rank.


class TestDPPrivRec(MethodContract):
    """In one stage; stage 1 and the joint loss are in test_dp_privrec.py."""

    def method(self) -> Method:
        return DPPrivRec(factors=4, hidden="6,5", epochs=3, adapt_epochs=2, batch_size=4, negatives=2, init_scale=0.1)

    def learner(self) -> Method:
        quiet = Channel(Clip(5.0), SecureSum(), Gaussian(z=0.2))
        return DPPrivRec(uplink=quiet, factors=8, hidden="16", epochs=5, learning_rate=0.5, init_scale=0.3)


class TestFedMF(MethodContract):
    def method(self) -> Method:
        return FedMF(factors=5, batch_size=16, epochs=2, item_rate=2.0)

    def learner(self) -> Method:
        return FedMF(factors=8)


class TestFedMFDual(MethodContract):
    def method(self) -> Method:
        return FedMF(factors=5, batch_size=16, epochs=2, item_rate=2.0, dual=True)

    def learner(self) -> Method:
        return FedMF(factors=8, dual=True)


class TestPFedRecHidden(MethodContract):
    def method(self) -> Method:
        return PFedRec(factors=5, hidden="6,3", batch_size=16, epochs=2, item_rate=2.0)

    def learner(self) -> Method:
        return PFedRec(factors=8, hidden="8", learning_rate=0.5)


class TestPFedRecJoint(MethodContract):
    def method(self) -> Method:
        return PFedRec(factors=5, batch_size=16, epochs=2, item_rate=2.0, dual=False)

    def learner(self) -> Method:
        return PFedRec(factors=8, dual=False)


class TestFedNCF(MethodContract):
    def method(self) -> Method:
        return FedNCF(factors=5, hidden="6,3", batch_size=16, epochs=2, item_rate=2.0)

    def learner(self) -> Method:
        return FedNCF(factors=8, hidden="8,4")


class TestFedNCFDual(MethodContract):
    def method(self) -> Method:
        return FedNCF(factors=5, hidden="6,3", batch_size=16, epochs=2, item_rate=2.0, dual=True)

    def learner(self) -> Method:
        return FedNCF(factors=8, hidden="8,4", dual=True)


class TestFedRecon(MethodContract):
    def method(self) -> Method:
        return FedRecon(factors=5, batch_size=16, epochs=2, rebuild=2, item_rate=2.0)

    def learner(self) -> Method:
        return FedRecon(factors=8)


class TestFedReconDual(MethodContract):
    def method(self) -> Method:
        return FedRecon(factors=5, batch_size=16, epochs=2, rebuild=2, item_rate=2.0, dual=True)

    def learner(self) -> Method:
        return FedRecon(factors=8, dual=True)


class TestAlone(MethodContract):
    def method(self) -> Method:
        return Alone(factors=5, batch_size=16, epochs=2, item_rate=2.0)

    def test_training_finds_what_there_is_to_learn(self) -> None:
        """Who hears nothing from others learns nothing of items they never met."""
        mean, error = chance(population())
        losses = list[float | None]()
        fitted = fit(
            Alone(factors=8),
            Simulator(population()),
            rounds=4,
            evaluate_every=4,
            on_round=lambda r: losses.append(r.loss),
        )
        assert abs(fitted.metrics["valid/ndcg@10"] - mean) < 4 * error
        assert losses[0] is not None
        assert losses[-1] is not None
        assert losses[-1] < losses[0] / 2  # it has learnt their own items by heart


class TestFedIALS(MethodContract):
    rounds = 3

    def method(self) -> Method:
        return FedIALS(factors=4)


class TestDPALS(MethodContract):
    rounds = 3

    # With this relation, a cohort may be drawn; there is little noise, since there are few people.
    uplink = Channel(Clip(1.0), SecureSum(helper=True), Gaussian(z=0.05))

    def method(self) -> Method:
        return DPALS(factors=4, sampled=4, uplink=self.uplink)


class TestNearby(MethodContract):
    rounds = 1

    # There is little noise, since there are few people.
    uplink = Channel(Clip(1.0), SecureSum(helper=True), Gaussian(z=0.01))

    def method(self) -> Method:
        return Nearby(rank=8, uplink=self.uplink)


class TestNearbySketched(TestNearby):
    def method(self) -> Method:
        return Nearby(rank=8, buckets=500, uplink=self.uplink)


class TestNearbyPopularity(TestNearby):
    def method(self) -> Method:
        return NearbyPopularity(rank=8, uplink=self.uplink)


class TestPublicFeatures(TestNearby):
    def method(self) -> Method:
        return PublicFeatures(rank=8)

    def people(self) -> Split:
        return described()

    def test_training_finds_what_there_is_to_learn(self) -> None:
        """Items of one kind are all alike here, and ties count against it: what it finds is their kind."""
        split = self.people()
        fitted = fit(self.method(), Simulator(split), rounds=1)
        has = split.catalogue().items["kind"].values
        ((best, _),) = fitted.ranked(user=3, k=1)
        assert int(has[best]) in has[split.training(3)].tolist()


class TestDPALSWithSquares(TestDPALS):
    def method(self) -> Method:
        return DPALS(factors=4, squares=0.5, uplink=self.uplink)


class TestFCF(MethodContract):
    def method(self) -> Method:
        return FCF(factors=4)


class TestFedGNN(MethodContract):
    def method(self) -> Method:
        return FedGNN(factors=5, steps=3)

    def learner(self) -> Method:
        return FedGNN(factors=8)


class TestFMFLDP(MethodContract):
    def method(self) -> Method:
        return FMFLDP(factors=4)


class TestDPLCF(MethodContract):
    rounds = 1

    def method(self) -> Method:
        return DPLCF(neighbours=6)

    def total(self, update: Tree) -> Tree:
        histories = torch.stack([Rows(*one, update["history"].size).dense() for one in _each(update["history"])])
        taken = (histories > 0).float()
        return {"history": taken.sum(0), "history²": taken.T @ taken}


def _each(rows: Rows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(rows.index, rows.value, strict=True)


class TestPrivatePopularity(MethodContract):
    def method(self) -> Method:
        return PrivatePopularity()


class TestFedRec(MethodContract):
    def method(self) -> Method:
        return FedRec(encoder="id", d=4, latest=6, negatives=2)

    def learner(self) -> Method:
        return FedRec(encoder="id", d=8, learning_rate=0.05)

    def people(self) -> Split:
        return impressed()


class TestFedRecNRMS(TestFedRec):
    """On titles, which the contract's own catalogue does not have."""

    encoder = "nrms"

    @pytest.fixture(autouse=True)
    def with_texts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("homebody.testing.CATALOGUE", texts())
        made_up_vectors(monkeypatch)

    def method(self) -> Method:
        return FedRec(encoder=self.encoder, **SMALL)

    def learner(self) -> Method:
        return FedRec(encoder=self.encoder, d=8, heads=2, words="random", learning_rate=0.02)

    def people(self) -> Split:
        return worded()


class TestFedRecNAML(TestFedRecNRMS):
    encoder = "naml"


class TestFedRecPLM(TestFedRecNRMS):
    encoder = "plm"

    def learner(self) -> Method:
        return FedRec(encoder="plm", d=8, learning_rate=0.003)


class TestDPFedRec(TestFedRec):
    def method(self) -> Method:
        return DPFedRec(encoder="id", d=4, latest=6, negatives=2)

    def learner(self) -> Method:
        return DPFedRec(encoder="id", d=8, learning_rate=0.05, theta=1.0, epsilon=500.0, guarantee="published")


class TestPrivateRecPublished(TestFedRec):
    def method(self) -> Method:
        return PrivateRec(guarantee="published", encoder="id", d=4, latest=6, negatives=2, basis=3, padding=0.3)

    def learner(self) -> Method:
        return PrivateRec(guarantee="published", encoder="id", d=8, learning_rate=0.05, epsilon=20.0)


class TestPrivateRecChoice(TestFedRec):
    """The server reads reports, not a sum."""

    def method(self) -> Method:
        return PrivateRec(encoder="id", d=4, latest=6, negatives=2, basis=3, padding=0.3, steps=2)

    def learner(self) -> Method:
        return PrivateRec(encoder="id", d=8, learning_rate=0.05, epsilon=20.0)

    def total(self, update: Tree) -> Tree:
        channel, count = self.method().uplink, len(self.clients())
        keys, told = Rng.of(7).fold(torch.arange(count)).key, dict[str, torch.Tensor]()
        channel.read(vmap(lambda key, one: channel.device(one, Rng(key)))(keys, update), told)
        return channel.server(Total(told, count), Rng.of(0)).messages

    def round(self, total: Tree) -> Total:
        return replace(super().round({}), messages=total)

    def _same(self, actual: Tree, expected: Tree, what: str) -> None:
        """What was shown may be padded on its way to the channel, which tells the same of it."""
        super()._same(widened(actual), widened(expected), what)


def widened(update: Tree) -> Tree:
    """An update with room for 20 items that were shown."""
    pads = {"shown": -1.0, "click": 0.0}
    return {
        name: torch.nn.functional.pad(value, (0, 20 - value.shape[-1]), value=pads[name]) if name in pads else value
        for name, value in update.items()
    }


class TestPrivateRecAttention(TestPrivateRecChoice):
    def method(self) -> Method:
        return PrivateRec(mechanism="attention", encoder="id", d=4, latest=6, negatives=2, basis=3, steps=2)

    def learner(self) -> Method:
        return PrivateRec(mechanism="attention", encoder="id", d=8, learning_rate=0.05, epsilon=20.0, basis=5)


class TestPopularity(ReferenceContract):
    def reference(self) -> Reference:
        return Popularity()


class TestIALS(ReferenceContract):
    def reference(self) -> Reference:
        return IALS(factors=4)


@cache
def titled() -> Split:
    """The same, with titles that tell items apart: towers on nothing but eight kinds cannot rank far above chance."""
    split = described()
    assert split.population.item_features is not None
    titles = pl.Series([f"x{item}y" for item in range(split.n_items)])
    features = split.population.item_features
    features = replace(features, table=features.table.with_columns(titles.alias("title")))
    return leave_one_out(replace(split.population, item_features=features), seed=5)


class TestDSSM(ReferenceContract):
    passes = 1

    def reference(self) -> Reference:
        return DSSM(view="taste", learning_rate=0.01, widths="16,8")

    def people(self) -> Split:
        return titled()


class TestMF(ReferenceContract):
    passes = 10

    def reference(self) -> Reference:
        return MF(factors=8, learning_rate=0.01, batch_size=64)


class TestNCF(ReferenceContract):
    passes = 5

    def reference(self) -> Reference:
        return NCF(factors=4, layers="8,4", learning_rate=0.01)


class TestGMF(ReferenceContract):
    passes = 5

    def reference(self) -> Reference:
        return NCF(model="gmf", factors=8, learning_rate=0.02)


class TestNewsCentral(ReferenceContract):
    passes = 5

    def reference(self) -> Reference:
        return NewsCentral(encoder="id", d=8, learning_rate=0.05)

    def people(self) -> Split:
        return impressed()


class TestPrivRecCEN(ReferenceContract):
    passes = 2

    def reference(self) -> Reference:
        return PrivRecCEN(factors=8, hidden="16", learning_rate=0.01, batch_size=32, adapt_epochs=3)


class TestChance(ReferenceContract):
    def reference(self) -> Reference:
        return Chance()

    def test_it_is_better_than_chance(self) -> None:
        """It is no better, and no worse."""
        mean, error = chance(population())
        found = measure(population(), Chance().trained(population().histories())).metrics["valid/ndcg@10"]
        assert abs(found - mean) < 4 * error

    def test_late_comers_are_scored(self) -> None:
        late = population().histories()._replace(learn=np.zeros(population().n_users, dtype=np.bool_))
        everyone, every = np.arange(population().n_users), torch.arange(population().n_items)
        scores = [Chance().trained(given)(everyone, every) for given in (late, population().histories())]
        assert torch.equal(*scores)


def test_every_known_name_is_under_contract() -> None:
    covered = {
        type(suite.method()) if isinstance(suite, MethodContract) else type(suite.reference())
        for suite in (
            TestPFedRec(),
            TestPrivRec(),
            TestFOFLSelf(),
            TestNNSelf(),
            TestPrivRecCEN(),
            TestDPPrivRec(),
            TestFedMF(),
            TestFedNCF(),
            TestFedRecon(),
            TestDPALS(),
            TestNearby(),
            TestNearbyPopularity(),
            TestPublicFeatures(),
            TestFCF(),
            TestFedGNN(),
            TestFLMVDSSM(),
            TestFedMVMF(),
            TestDSSM(),
            TestFedIALS(),
            TestFMFLDP(),
            TestAlone(),
            TestPrivatePopularity(),
            TestDPLCF(),
            TestFedRec(),
            TestDPFedRec(),
            TestPrivateRecChoice(),
            TestNewsCentral(),
            TestPopularity(),
            TestChance(),
            TestIALS(),
            TestMF(),
            TestNCF(),
        )
    }
    assert covered == {find(name) for name in METHODS}


class TestUnnamed:
    def test_a_contract_without_a_method_says_what_to_define(self) -> None:
        with pytest.raises(NotImplementedError, match="must define method"):
            MethodContract().method()
        with pytest.raises(NotImplementedError, match="must define reference"):
            ReferenceContract().reference()
