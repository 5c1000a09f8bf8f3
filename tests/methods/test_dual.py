"""FedMF, FedNCF, FedRecon and PFedRec, with and without dual personalisation, against plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from homebody.core import Batch, Catalogue, Cohort, Data, Rows, Tree, Update
from homebody.data.partitions import leave_one_out
from homebody.data.population import Population
from homebody.data.splits import Split
from homebody.data.synthetic import Synthetic, synthetic
from homebody.errors import Diverged, HomebodyError
from homebody.methods.fedmf import FedMF
from homebody.methods.fedncf import FedNCF
from homebody.methods.fedrecon import FedRecon
from homebody.methods.item_table import ItemTable
from homebody.methods.kernels import Kernel, kernel_of
from homebody.methods.kernels.network import logits
from homebody.methods.pfedrec import Alone, PFedRec
from homebody.models.networks import ScoreFunction
from homebody.privacy import Channel, Clip, SecureSum
from homebody.progress import Round
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.run import Watcher, execute, resume
from homebody.simulation import Simulator
from homebody.training import choose, fit

FAST = {"factors": 6, "batch_size": 20, "epochs": 2, "item_rate": 3.0}


@cache
def people() -> Split:
    return leave_one_out(synthetic(Synthetic(users=30, items=50, mean=12, seed=2)), seed=2)


def own_data(split: Split, user: int) -> Data:
    padded = split.padded(np.array([user]))
    return Data(*(torch.from_numpy(part)[0] for part in padded), Catalogue(split.n_items))


class Scores(nn.Module):
    """A person's score function in ordinary PyTorch: a vector, layers, or both."""

    def __init__(self, method: ItemTable, shared: dict[str, Tensor], local: dict[str, Tensor]) -> None:
        super().__init__()
        self.user = nn.Parameter(local["user"].double().clone()) if "user" in local else None
        self.layers = nn.ModuleList()
        if isinstance(method, FedMF | FedRecon):
            return
        flat = shared["layers"] if "layers" in shared else torch.cat([shared["weight"], shared["bias"][None]])
        hidden = [int(width) for width in method.hidden.split(",") if width]  # type: ignore[attr-defined]
        widths = [method.factors * (2 if self.user is not None else 1), *hidden, 1]
        at = 0
        for low, high in pairwise(widths):
            layer = nn.Linear(low, high, dtype=torch.float64)
            with torch.no_grad():
                layer.weight.copy_(flat[at : at + low * high].view(low, high).T)
                layer.bias.copy_(flat[at + low * high : at + (low + 1) * high])
            self.layers.append(layer)
            at += (low + 1) * high
        assert at == len(flat)

    def forward(self, rows: Tensor) -> Tensor:
        if not len(self.layers):
            return rows @ self.user
        x = rows if self.user is None else torch.cat([self.user.expand(len(rows), -1), rows], dim=1)
        for number, layer in enumerate(self.layers):
            x = layer(x.relu() if number else x)
        return x.squeeze(1)


class Slow:
    """Everyone has a whole table and optimisers of their own."""

    def __init__(self, method: ItemTable, split: Split, seed: int) -> None:
        self.method, self.split, self.rng = method, split, Rng.of(seed, "train")
        self.shared = method.init_shared(Catalogue(split.n_items), self.rng.fold("shared"))
        self.table = self.shared["item"].double()
        self.functions: dict[int, Scores] = {}
        self.tables: dict[int, Tensor] = {}
        self.layers: dict[int, dict[str, Tensor]] = {}

    def function(self, user: int) -> Scores:
        if user not in self.functions:
            key = self.rng.fold("clients").fold("local").fold(user)
            local = self.method.init_local(self.shared, key)
            self.functions[user] = Scores(self.method, self.shared, local)
        return self.functions[user]

    def round(self, number: int, cohort: list[int]) -> None:
        before = {user: self.layers_of(self.function(user)) for user in cohort}
        for user in cohort:
            if not self.method.dual and self.layers:
                self.function(user).layers.load_state_dict(self.layers[0])
            self.client(user, number)
        self.table = torch.stack([self.tables[user] for user in cohort]).mean(0)
        if not self.method.dual and isinstance(self.method, FedNCF):
            assert before
            means = {
                name: torch.stack([self.layers_of(self.functions[user])[name] for user in cohort]).mean(0)
                for name in before[cohort[0]]
            }
            self.layers[0] = means

    def layers_of(self, function: Scores) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in function.layers.state_dict().items()}

    def client(self, user: int, number: int) -> None:
        method, function = self.method, self.function(user)
        embedding = nn.Embedding.from_pretrained(self.table.clone(), freeze=False)
        rate = method.learning_rate
        groups: list[dict[str, Any]] = [{"params": list(function.layers.parameters()), "lr": rate}]
        if function.user is not None:
            scale = getattr(method, "user_rate", 1.0)
            groups.append({"params": [function.user], "lr": rate * scale})
        score_sgd = torch.optim.SGD([group for group in groups if group["params"]])
        item_sgd = torch.optim.SGD(embedding.parameters(), lr=rate * self.split.n_items * method.item_rate)
        batch = method.prepare(own_data(self.split, user), self.rng.fold("round", number).fold(user))
        real = batch["valid"]
        items, labels = batch["index"][batch["slot"]][real], batch["label"][real].double()
        turns = [[score_sgd], [item_sgd]] if method.dual else [[score_sgd, item_sgd]]
        for _ in range(method.epochs):
            for some, target in zip(items.split(method.batch_size), labels.split(method.batch_size), strict=True):
                for turn in turns:
                    score_sgd.zero_grad()
                    item_sgd.zero_grad()
                    nn.BCEWithLogitsLoss()(function(embedding(some)), target).backward()
                    for sgd in turn:
                        sgd.step()
        self.tables[user] = embedding.weight.detach().clone()

    @torch.no_grad()
    def scores(self, user: int) -> Tensor:
        function = self.function(user)
        if not self.method.dual and self.layers:
            function.layers.load_state_dict(self.layers[0])
        table = self.tables.get(user, self.table) if self.method.dual else self.table
        return function(table)


FAMILY = {
    "fedmf": FedMF(**FAST),
    "fedmf+dual": FedMF(**FAST, dual=True),
    "fedncf": FedNCF(**FAST, hidden="5,3", user_rate=2.0),
    "fedncf+dual": FedNCF(**FAST, hidden="5,3", user_rate=2.0, dual=True),
    "pfedrec": PFedRec(**FAST),
    "pfedrec, two hidden layers": PFedRec(**FAST, hidden="4,3"),
    "pfedrec, joint": PFedRec(**FAST, dual=False),
}


@cache
def after_three_rounds(name: str, size: int | None) -> Slow:
    """The plain way, for the kernel and the vmapped client alike."""
    split = people()
    slow = Slow(FAMILY[name], split, seed=9)
    for number in (1, 2, 3):
        cohort = choose(np.arange(split.n_users), size, slow.rng.fold("cohort", number))
        slow.round(number, cohort.users.tolist())
    return slow


@pytest.mark.parametrize("fused", [True, False], ids=["kernel", "vmap"])
@pytest.mark.parametrize("size", [None, 12], ids=["everyone", "some"])
@pytest.mark.parametrize("name", FAMILY)
def test_three_rounds_equal_plain_per_client_pytorch(name: str, size: int | None, fused: bool) -> None:
    split, method = people(), FAMILY[name]
    slow = after_three_rounds(name, size)
    simulator = Simulator(split, fused=fused)
    fitted = fit(method, simulator, rounds=3, cohort=size, seed=9, evaluate_every=0)
    assert torch.allclose(fitted.shared["item"].double(), slow.table, rtol=1e-3, atol=1e-4)
    for user in range(split.n_users):
        own, fast = slow.scores(user), dict(fitted.ranked(user, k=split.n_items))
        assert fast == {item: pytest.approx(float(own[item]), rel=2e-3, abs=2e-3) for item in fast}, f"user {user}"


def test_what_each_sends_and_keeps() -> None:
    split = people()
    for name, method in FAMILY.items():
        shared = method.init_shared(Catalogue(split.n_items), Rng.of(0))
        local = method.init_local(shared, Rng.of(1))
        update, kept = method.client(shared, local, method.prepare(own_data(split, 3), Rng.of(2)))
        assert ("layers" in update) == (name == "fedncf"), name
        assert set(update) - {"layers"} == {"item"}, name
        assert ("item" in kept) == method.dual, name
        assert ("layers" in kept) == (name == "fedncf+dual"), name
        assert method.scoring.parameters == ("base" if method.dual else "latest")


def mirrored() -> Split:
    """Items in pairs; everyone has even ones, and each person's only negatives are the odd ones beside them."""
    histories = [[0, 2, 4, 6], [2, 4, 6, 0], [4, 6, 0, 2]]
    items = np.array([item for history in histories for item in history], dtype=np.int32)
    return leave_one_out(Population("mirrored", np.array([0, 4, 8, 12]), items, n_items=8), how="latest", negatives=1)


def test_pfedrec_is_fedmf_with_dual_personalisation() -> None:
    """They differ by the offset and the start. From the same start, on rows that mirror one another, the slopes of the
    offset cancel: then every number is the same, round after round."""
    split, fields = mirrored(), {"factors": 3, "item_rate": 0.5, "learning_rate": 0.3, "negatives": 1}
    half = torch.tensor([[0.3, -0.2, 0.5], [1.0, 0.1, -0.4], [-0.6, 0.2, 0.2], [0.4, 0.9, -0.1]])
    table = torch.stack([half, -half], dim=1).reshape(8, 3)
    weight = torch.tensor([0.2, -0.5, 0.3])
    pfedrec, fedmf = PFedRec(**fields), FedMF(**fields, dual=True)
    samples = torch.tensor([0, 1, 2, 3])
    batch = {
        "index": samples,
        "slot": samples,
        "label": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        "valid": torch.ones(4, dtype=torch.bool),
    }
    none = pfedrec.untuned({"item": table}, Rng.of(0))
    one, two = {"weight": weight, "bias": torch.tensor(0.0), **none}, {"user": weight, **none}
    shared = {"item": table}
    for _ in range(3):
        sent, one = pfedrec.client(shared, one, batch)
        sent_too, two = fedmf.client(shared, two, batch)
        torch.testing.assert_close(sent["item"].dense(), sent_too["item"].dense())
        torch.testing.assert_close(one["weight"], two["user"])
        assert abs(float(one["bias"])) < 1e-6
        everything = torch.arange(8)
        data = own_data(split, 0)
        torch.testing.assert_close(
            pfedrec.score(shared, one, data, everything), fedmf.score(shared, two, data, everything)
        )
        shared = {"item": shared["item"] + sent["item"].dense()}


def test_the_offset_is_one_more_factor_that_no_row_steps() -> None:
    """With rows that stay, PFedRec's score function is FedMF's user vector on rows with a 1 behind them."""
    split = people()
    pfedrec = PFedRec(factors=4, item_rate=0.0, batch_size=20, epochs=3)
    fedmf = FedMF(factors=5, item_rate=0.0, batch_size=20, epochs=3, dual=True)
    shared = pfedrec.init_shared(Catalogue(split.n_items), Rng.of(0))
    longer = {"item": torch.cat([shared["item"], torch.ones(split.n_items, 1)], dim=1)}
    one = pfedrec.init_local(shared, Rng.of(1))
    longer["user"] = torch.cat([shared["weight"], shared["bias"][None]])
    two = fedmf.init_local(longer, Rng.of(1))
    batch = pfedrec.prepare(own_data(split, 3), Rng.of(2))
    _, one = pfedrec.client(shared, one, batch)
    _, two = fedmf.client(longer, two, batch)
    torch.testing.assert_close(torch.cat([one["weight"], one["bias"][None]]), two["user"])


def test_the_papers_count_of_parameters() -> None:
    """Table 5: 53,857 for PFedRec and 86,753 for FedNCF on ML-100K, where everyone's vectors are counted."""
    function = PFedRec().function
    assert 1682 * 32 + function.size == 53_857
    assert (943 + 1682) * 32 + FedNCF().function.size == 86_753


def test_hidden_layers_are_read_with_care() -> None:
    assert PFedRec(hidden=" 16, 8 ").function.widths == (32, 16, 8, 1)
    for bad in ("16,", "x", "0", "-3", "8;4"):
        for method in (PFedRec, FedNCF):
            with pytest.raises(HomebodyError, match="widths of hidden layers"):
                method(hidden=bad)


class Rebuilds:
    """FedRecon for one client, in ordinary PyTorch."""

    def __init__(self, method: FedRecon, table: Tensor) -> None:
        self.method = method
        self.embedding = nn.Embedding.from_pretrained(table.double().clone(), freeze=False)
        self.user = nn.Parameter(torch.zeros(method.factors, dtype=torch.float64))

    def passes(self, items: Tensor, labels: Tensor, mine: Tensor, times: int, parameter: Tensor, rate: float) -> None:
        sgd = torch.optim.SGD([parameter], lr=rate)
        size = self.method.batch_size
        for _ in range(times):
            for some, target, part in zip(items.split(size), labels.split(size), mine.split(size), strict=True):
                if not part.any():
                    continue
                self.user.grad = self.embedding.weight.grad = None
                logit = self.embedding(some[part]) @ self.user
                nn.BCEWithLogitsLoss()(logit, target[part]).backward()
                sgd.step()

    def round(self, items: Tensor, labels: Tensor, support: Tensor, query: Tensor) -> None:
        method = self.method
        row_rate = method.learning_rate * len(self.embedding.weight) * method.item_rate
        self.passes(items, labels, support, method.rebuild, self.user, method.learning_rate)
        self.passes(items, labels, query, method.epochs, self.embedding.weight, row_rate)


@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("fused", [True, False], ids=["kernel", "vmap"])
def test_fedrecon_equals_plain_pytorch(dual: bool, fused: bool) -> None:
    split = people()
    method = FedRecon(factors=6, batch_size=20, epochs=2, rebuild=3, support=0.4, item_rate=3.0, dual=dual)
    rng = Rng.of(9, "train")
    table = method.init_shared(Catalogue(split.n_items), rng.fold("shared"))["item"].double()
    for number in (1, 2):
        tables = []
        for user in range(split.n_users):
            batch = method.prepare(own_data(split, user), rng.fold("round", number).fold(user))
            real = batch["valid"]
            items, labels = batch["index"][batch["slot"]][real], batch["label"][real].double()
            first = torch.arange(len(items)) < -(-4 * len(items) // 10)
            one = Rebuilds(method, table)
            one.round(items, labels, first, ~first)
            tables.append(one.embedding.weight.detach())
        table = torch.stack(tables).mean(0)
    fitted = fit(method, Simulator(split, fused=fused), rounds=2, seed=9, evaluate_every=0)
    assert torch.allclose(fitted.shared["item"].double(), table, rtol=1e-3, atol=1e-4)
    # It ranks with a vector rebuilt from all it has, with the latest table, and its tuned rows if dual.
    for user in (0, 7, 29):
        batch = method.prepare(own_data(split, user), rng.fold("clients").fold("adapt").fold(user))
        real = batch["valid"]
        items, labels = batch["index"][batch["slot"]][real], batch["label"][real].double()
        every = torch.ones(len(items), dtype=torch.bool)
        one = Rebuilds(method, fitted.shared["item"])
        one.round(items, labels, every, every)
        own = (one.embedding.weight if dual else fitted.shared["item"].double()) @ one.user
        fast = dict(fitted.ranked(user, k=split.n_items))
        assert fast == {item: pytest.approx(float(own[item].detach()), rel=1e-3, abs=1e-3) for item in fast}


def test_fedrecon_forgets_the_user_between_rounds() -> None:
    split, method = people(), FedRecon(factors=4)
    shared = method.init_shared(Catalogue(split.n_items), Rng.of(0))
    batch = method.prepare(own_data(split, 2), Rng.of(1))
    fresh = method.init_local(shared, Rng.of(2))
    other = {**fresh, "user": torch.full((4,), 9.0)}
    assert torch.equal(method.client(shared, fresh, batch)[1]["user"], method.client(shared, other, batch)[1]["user"])
    assert not fresh["user"].any()


def test_adapting_before_ranking_leaves_no_trace() -> None:
    split, method = people(), FedRecon(factors=4, dual=True)
    simulator = Simulator(split)
    simulator.begin(method, Rng.of(0))
    shared = method.init_shared(simulator.catalogue, Rng.of(1))
    everyone = np.arange(split.n_users)
    simulator.collect(method, shared, Cohort(everyone[:9], "fixed", 9, split.n_users), Rng.of(2), step=1)
    before = {name: value.clone() for name, value in simulator.state().items()}
    one, two = (simulator.evaluate(method, shared).metrics for _ in range(2))
    assert one == two
    after = simulator.state()
    assert sorted(before) == sorted(after)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_someone_alone_tells_nothing_and_hears_nothing() -> None:
    split, method = people(), Alone(**FAST)
    fitted = fit(method, Simulator(split), rounds=3, seed=4)
    start = method.init_shared(Catalogue(split.n_items), Rng.of(4, "train").fold("shared"))
    assert all(torch.equal(value, start[name]) for name, value in fitted.shared.items())
    assert fitted.epsilon == dict.fromkeys(("server", "clients", "public"), 0.0)
    # The same numbers when nobody else is there: one person's PFedRec, whose mean is its own table.
    items = split.population.history(5)
    single = leave_one_out(
        Population("one", np.array([0, len(items)]), items, n_items=split.n_items), how="latest", negatives=9
    )
    assert single.n_users == 1
    one = fit(Alone(**FAST), Simulator(single), rounds=3, seed=4)
    two = fit(replace(PFedRec(**FAST)), Simulator(single), rounds=3, seed=4)
    assert dict(one.ranked(0, 50)) == pytest.approx(dict(two.ranked(0, 50)), rel=1e-4, abs=1e-4)


def test_who_trains_alone_has_no_way_out_to_put_stages_on() -> None:
    for channel in (Channel(Clip(1.0)), Channel(asks_rows=True), Channel(SecureSum())):
        with pytest.raises(HomebodyError, match="Nothing leaves a device that trains alone"):
            Alone(**FAST, uplink=channel)


def test_training_alone_goes_on_after_a_kill(tmp_path: Path) -> None:
    recipe = Recipe("alone", "synthetic:users=30,items=40,mean=9", fields={"factors": 3}, rounds=4)
    whole = execute(recipe, tmp_path, name="whole")

    class Killed(Exception):
        pass

    def stop(line: Round) -> None:
        if line.step == 3:
            raise Killed

    with pytest.raises(Killed):
        execute(recipe, tmp_path, Watcher(on_round=stop), name="killed")
    again = resume(tmp_path / "killed")
    assert again["metrics"] == whole["metrics"]
    assert again["epsilon"] == dict.fromkeys(("server", "clients", "public"), 0.0)


def test_devices_that_lose_their_numbers_are_noticed() -> None:
    """Though a clip sends zeros for them, and nothing shared is touched."""
    for method in (
        Alone(factors=2, learning_rate=1e25),
        FedNCF(**FAST, learning_rate=1e3, dual=True, uplink=Channel(Clip(1.0))),
    ):
        with pytest.raises(Diverged, match="the devices' loss is no longer finite"):
            fit(method, Simulator(people()), rounds=9, evaluate_every=0)


def test_both_parts_of_fedrecon_get_something() -> None:
    for share in (0.0, 1.0):
        with pytest.raises(HomebodyError, match="above 0 and under 1"):
            FedRecon(support=share)


def test_fedrecon_keeps_no_rows_between_rounds() -> None:
    plain, dual = (
        fit(FedRecon(**FAST, dual=dual), Simulator(people()), rounds=3, evaluate_every=3) for dual in (False, True)
    )
    assert torch.equal(plain.shared["item"], dual.shared["item"]), "training is the same"
    assert plain.metrics != dual.metrics
    rows = [value for name, value in dual.runtime.state().items() if name.endswith("item#value")]
    assert rows
    assert all(value.shape[1] == 0 for value in rows)


@dataclass(frozen=True)
class Frozen(FedMF):
    """Its own round, which leaves everything as it is, beside a kernel of its parent."""

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        update, kept = super().client(shared, local, batch)
        return {"item": Rows(update["item"].index, 0 * update["item"].value, update["item"].size)}, kept


def test_a_round_that_was_written_anew_is_run_without_its_parents_kernel() -> None:
    assert kernel_of(FedMF()).train is not None
    assert kernel_of(Frozen()) == Kernel()
    fitted = fit(Frozen(**FAST), Simulator(people()), rounds=2, evaluate_every=0)
    start = Frozen(**FAST).init_shared(Catalogue(50), Rng.of(0, "train").fold("shared"))
    assert torch.equal(fitted.shared["item"], start["item"])


@pytest.mark.parametrize("items", [1, 255, 256, 257, 600])
@pytest.mark.parametrize("alike", [True, False], ids=["one network", "a network each"])
def test_scoring_in_one_pass_is_scoring_each(items: int, alike: bool) -> None:
    function = ScoreFunction(6, (5, 3), beside=4)
    rng = Rng.of(3)
    weights = torch.stack([function.start(rng.fold(n)) for n in range(3)])
    rows, person = rng.fold("rows").normal(items, 6), rng.fold("people").normal(3, 4)
    given = weights[0] if alike else weights
    fast = torch.func.vmap(lambda w, p: logits(function, w, rows, p), in_dims=(None if alike else 0, 0))(given, person)
    for n in range(3):
        slow = function.logit(weights[0] if alike else weights[n], rows, person[n])
        torch.testing.assert_close(fast[n], slow, rtol=1e-5, atol=1e-5)
    own = torch.stack([rows + n for n in range(3)])
    bare = ScoreFunction(6, (5,))
    theta = bare.start(rng)
    each = torch.func.vmap(lambda some: logits(bare, theta, some, None))(own)
    torch.testing.assert_close(each[2], bare.logit(theta, own[2]), rtol=1e-5, atol=1e-5)


def test_a_table_of_ones_own_counts_once(tmp_path: Path) -> None:
    recipe = Recipe("alone", "synthetic:users=30,items=40,mean=9", fields={"factors": 3}, rounds=1)
    assert execute(recipe, tmp_path)["parameters"] == {"shared": 124, "local": 124, "model": 124}
