"""Ranking with an item table from elsewhere, against whole tables put together by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from homebody.core import Batch, Catalogue, Cohort, Data, Method, Rows, Scoring, Total, Tree, Update
from homebody.data import Population, load
from homebody.data.partitions import leave_one_out
from homebody.data.splits import Split
from homebody.evaluation import measure
from homebody.methods import find
from homebody.methods.pfedrec import PFedRec
from homebody.privacy import Channel
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.simulation import states as stores
from homebody.simulation.ablations import Borrowing, item_tables
from homebody.training import Trained, fit


@dataclass(frozen=True)
class Wish(Method):
    """Each client raises the item two after its first one, and ranks by its table; the last client upside down."""

    uplink: Channel = Channel()

    @property
    def scoring(self) -> Scoring:
        return Scoring(parameters="base")

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"item": -torch.arange(float(catalogue.n_items))[:, None]}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"sign": torch.ones(()), "item": Rows(rng.integers(1, 0), shared["item"][:0], len(shared["item"]))}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        return {"index": data.items[:1] + 2, "sign": torch.where(data.items[0] == 6, -1.0, 1.0)}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        rows = Rows(batch["index"], 100 * batch["sign"].reshape(1, 1), len(shared["item"]))
        return {"item": rows}, {"sign": batch["sign"], "item": rows}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return {"item": -shared["item"]}, state  # whoever takes the base for the latest ranks the wrong way round

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return local["sign"] * (shared["item"] + local["item"].dense())[items, 0]


def by_hand() -> tuple[Wish, Simulator, Tree]:
    """Three people with items 0 1 2, 3 4 5 and 6 7 8: the third of each is for test; one round of everyone."""
    items = np.arange(9, dtype=np.int32)
    split = leave_one_out(Population("toy", np.array([0, 3, 6, 9]), items, n_items=9), how="latest")
    method, runtime = Wish(), Simulator(split, cutoffs=(1, 4))
    runtime.begin(method, Rng.of(0))
    shared = method.init_shared(runtime.catalogue, Rng.of(0))
    everyone = runtime.available()
    got = runtime.collect(method, shared, Cohort(everyone, "all", 3, 3), Rng.of(1), 1)
    return method, runtime, method.server(shared, {}, got.total)[0]


def ranks(runtime: Simulator, method: Method, shared: Tree) -> list[int]:
    return runtime.evaluate(method, shared).per_user["full/rank"].tolist()


def test_three_people_by_hand() -> None:
    method, runtime, shared = by_hand()
    # Its own table: everyone's test item is on top (the last one's is lowered, and it ranks upside down).
    assert ranks(runtime, method, shared) == [0, 0, 0]
    # The latest table rises with the number: among what is not their own, 2 is below 3…8 (6 items), 5 is below
    # 6, 7, 8, and the last one, upside down, has 0…5 above 8.
    assert ranks(Borrowing(runtime, None), method, shared) == [6, 3, 6]
    # A table of someone else is the base, which falls with the number: the first, with the second's, has 5 raised
    # above 2; the second, with the last's, has 8 at the bottom and 0, 1, 2 above 5; the last, upside down and with
    # the first's, has 2 at the bottom, so that 8 is the best.
    assert ranks(Borrowing(runtime, np.array([1, 2, 0])), method, shared) == [1, 3, 0]
    # The simulator itself is as it was.
    assert ranks(runtime, method, shared) == [0, 0, 0]


def test_one_s_own_table_lent_to_oneself_changes_nothing() -> None:
    method, runtime, shared = by_hand()
    same = Borrowing(runtime, np.arange(3)).evaluate(method, shared)
    assert same.metrics == runtime.evaluate(method, shared).metrics


def test_tables_are_told_in_the_order_they_were_asked_for() -> None:
    method, runtime, shared = by_hand()
    asked = np.array([2, 0, 1])
    found = torch.zeros(3, 9)
    for held in item_tables(runtime, method, shared, asked):
        found[torch.from_numpy(held.place)] = held.dense()[:, :, 0]
    base = -torch.arange(9.0).repeat(3, 1)
    base[0, 8] -= 100
    base[1, 2] += 100
    base[2, 5] += 100
    assert torch.equal(found, base)


@pytest.fixture(scope="module")
def split() -> Split:
    return leave_one_out(load("synthetic:users=40,items=60,mean=12"))


@pytest.fixture(scope="module", params=[None, 7], ids=["everyone", "a few a round"])
def fitted(request: pytest.FixtureRequest, split: Split) -> Trained:
    method = PFedRec(factors=4, item_rate=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "SMALL", 8)
        runtime = Simulator(split)
    assert len(runtime._store._buckets) > 3
    return fit(method, runtime, rounds=4, cohort=request.param, evaluate_every=0)


def whole(fitted: Trained) -> tuple[Tensor, Tensor, Tensor]:
    """Everyone's tuned table, weights and bias, one client at a time; whoever never took part has the latest."""
    runtime = fitted.runtime
    assert isinstance(runtime, Simulator)
    tables, weights, biases = [], [], []
    for user in range(runtime.split.n_users):
        one = np.array([user])
        if runtime._store.holds(one)[0]:
            local = runtime._store.get(one)
            base = runtime._bases[int(runtime._base_step[user])]["item"]
            rows = local["item"]
            tables.append(base + Rows(rows.index[0], rows.value[0], rows.size).dense())
            weights.append(local["weight"][0])
            biases.append(local["bias"][0])
        else:
            tables.append(fitted.shared["item"])
            weights.append(fitted.shared["weight"])
            biases.append(fitted.shared["bias"])
    return torch.stack(tables), torch.stack(weights), torch.stack(biases)


def expected(fitted: Trained, table_of: Callable[[int], Tensor]) -> dict[str, float]:
    _, weights, biases = whole(fitted)

    def score(users: np.ndarray, items: Tensor) -> Tensor:
        return torch.stack([table_of(int(user))[items] @ weights[user] + biases[user] for user in users])

    runtime = fitted.runtime
    assert isinstance(runtime, Simulator)
    return measure(runtime.split, score).metrics


@pytest.mark.parametrize("name", ["fedmf", "fedncf", "fedrecon"])
def test_every_dual_method_lends(name: str, split: Split) -> None:
    """Also one whose clients adapt before they rank: what they lend is what they rank with."""
    method = find(name)(factors=4, item_rate=1.0, dual=True)  # type: ignore[call-arg]
    assert isinstance(method, Method)
    runtime = Simulator(split)
    shared = fit(method, runtime, rounds=2, evaluate_every=0).shared
    own = runtime.evaluate(method, shared).metrics
    assert Borrowing(runtime, np.arange(40)).evaluate(method, shared).metrics == own
    lender = np.roll(np.arange(40), 7)
    assert Borrowing(runtime, lender).evaluate(method, shared).metrics != own
    tables = torch.zeros(40, 60, 4)
    for held in item_tables(runtime, method, shared, lender):
        tables[torch.from_numpy(held.place)] = held.dense()
    items = torch.arange(60)
    for user in range(0, 40, 6):
        one = np.array([user])
        data = runtime._data(one)
        ((_, tree, local),) = runtime._holdings(method, shared, one, data)
        kept = {key: value[0] for key, value in local.items() if key != "item"}
        nothing = Rows(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4), 60)
        mine = runtime._client_data(*(part[0] for part in data))
        for runs, table in ((Borrowing(runtime, lender), tables[user]), (Borrowing(runtime, None), shared["item"])):
            wanted = method.score({**tree, "item": table}, {**kept, "item": nothing}, mine, items)
            found = runs._scores(method, shared, one, data, items)[0]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_against_whole_tables(fitted: Trained) -> None:
    """Several buckets, and several bases where a few take part in a round."""
    runtime, (tables, _, _) = fitted.runtime, whole(fitted)
    assert isinstance(runtime, Simulator)
    lender = np.roll(np.arange(40), 7)
    own = runtime.evaluate(fitted.method, fitted.shared).metrics
    shared = Borrowing(runtime, None).evaluate(fitted.method, fitted.shared).metrics
    other = Borrowing(runtime, lender).evaluate(fitted.method, fitted.shared).metrics
    assert own == pytest.approx(expected(fitted, lambda user: tables[user]))
    assert shared == pytest.approx(expected(fitted, lambda user: fitted.shared["item"]))
    assert other == pytest.approx(expected(fitted, lambda user: tables[lender[user]]))
    assert len({metrics["ndcg@10"] for metrics in (own, shared, other)}) == 3
