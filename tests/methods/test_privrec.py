"""PrivRec against a network written a second time: a module, autograd and torch's SGD, one sample at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from homebody.core import Batch, Catalogue, Column, Data, Method, Tree
from homebody.methods.kernels import adapt_many, train_many
from homebody.methods.privrec import PrivRec
from homebody.models.dssm import Vocabulary
from homebody.models.networks import ScoreFunction
from homebody.rng import Rng

N_ITEMS = 30


def catalogue() -> Catalogue:
    generator = torch.Generator().manual_seed(1)
    genres = torch.randint(0, 5, (N_ITEMS, 3), generator=generator)
    genres[::3, 1:] = -1
    genres[7] = -1
    year = torch.randn(N_ITEMS, generator=generator)
    empty = torch.empty(0)
    return Catalogue(
        N_ITEMS,
        {
            "genres": Column(genres, 5, "many"),
            "year": Column(year, 1, "number"),
            "maker": Column(torch.arange(N_ITEMS) % 18, 18, "one"),
        },
        {"age": Column(empty, 4, "one"), "langs": Column(empty, 3, "many")},
        {"hour": Column(empty, 6, "one"), "heat": Column(empty, 1, "number")},
    )


def person(length: int, padding: int = 3, *, seed: int = 0, age: int = 2, excluded: int | None = None) -> Data:
    """One client with so many interactions; padding holds item 0."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.randperm(N_ITEMS, generator=generator)[:length]
    own = items.sort().values if excluded is None else torch.arange(excluded)
    pad = torch.zeros(padding, dtype=torch.int64)
    whole = length + padding
    return Data(
        torch.cat([items, pad]),
        torch.arange(whole) < length,
        torch.cat([own, torch.full((N_ITEMS + 2 - len(own),), N_ITEMS)]),
        catalogue(),
        {"age": torch.tensor(age), "langs": torch.tensor([1, 2] if seed % 2 else [0, -1])},
        {"hour": torch.arange(whole) % 6, "heat": torch.randn(whole, generator=generator)},
        torch.randint(1, 6, (whole,), generator=generator).float(),
    )


class Second(nn.Module):
    """The paper's network, written from its description: embeddings side by side, then layers."""

    def __init__(self, method: PrivRec, shared: Tree, known: Catalogue) -> None:
        super().__init__()
        self.known, self.factors = known, method.factors
        self.item = nn.Parameter(shared["item"].clone())
        self.feature = nn.Parameter(shared["feature"].clone())
        wanted = method.features.split(",") if method.features else None
        of = (known.people, known.contexts, known.items)
        self.names = [[name for name in columns if wanted is None or name in wanted] for columns in of]
        sizes = [columns[name].size for columns, names in zip(of, self.names, strict=True) for name in names]
        ends = [sum(sizes[:n]) for n in range(len(sizes))]
        self.begins = dict(zip([name for names in self.names for name in names], ends, strict=True))
        widths = [(1 + len(sizes)) * method.factors, *map(int, filter(None, method.hidden.split(","))), 1]
        layers: list[nn.Module] = []
        at, flat = 0, shared["layers"]
        for low, high in pairwise(widths):
            layer = nn.Linear(low, high)
            layer.weight.data = flat[at : at + low * high].reshape(low, high).T.clone()
            layer.bias.data = flat[at + low * high : at + (low + 1) * high].clone()
            at += (low + 1) * high
            layers += [layer, nn.ReLU() if method.activation == "relu" else nn.Sigmoid()]
        assert at == len(flat)
        self.network = nn.Sequential(*layers[:-1])

    def block(self, column: Column, name: str, value: Any) -> Tensor:
        begin = self.begins[name]
        if column.kind == "number":
            return self.feature[begin] * float(value)
        if column.kind == "one":
            return self.feature[begin + int(value)]
        there = [begin + code for code in value.tolist() if code >= 0]
        return self.feature[there].mean(0) if there else torch.zeros(self.factors)

    def forward(self, data: Data, place: int, item: int) -> Tensor:
        people, contexts, items = self.names
        parts = [self.block(self.known.people[name], name, data.features[name]) for name in people]
        parts += [self.block(self.known.contexts[name], name, data.contexts[name][place]) for name in contexts]
        parts += [self.item[item]]
        parts += [self.block(self.known.items[name], name, self.known.items[name].values[item]) for name in items]
        return self.network(torch.cat(parts))[0]

    def tree(self) -> Tree:
        linear = [one for one in self.network if isinstance(one, nn.Linear)]
        flat = torch.cat([part for one in linear for part in (one.weight.T.flatten(), one.bias)])
        return {"item": self.item.detach(), "feature": self.feature.detach(), "layers": flat.detach()}


def trained(method: PrivRec, shared: Tree, data: Data, batch: Batch, epochs: int, rate: float, latest: int) -> Any:
    """Mini-batches by torch's own SGD, sample by sample; where it leads, and the mean loss of the last pass."""
    model = Second(method, shared, data.catalogue)
    others = [one for name, one in model.named_parameters() if name != "item"]
    own = {"params": [model.item], "lr": rate * method.item_rate}
    optimiser = torch.optim.SGD([own, {"params": others}], lr=rate)
    n = int(data.valid.sum())
    total, told = 0.0, 0
    for epoch in range(epochs):
        order = batch["order"][epoch, :n].tolist()
        size = method.batch_size or max(1, n)
        total, told = 0.0, 0
        for chosen in (order[start : start + size] for start in range(0, n, size)):
            losses = []
            for place in chosen:
                if latest and place < n - latest:
                    continue
                said = model(data, place, int(data.items[place]))
                if method.output == "explicit":
                    assert data.ratings is not None
                    losses.append(0.5 * (said - data.ratings[place]) ** 2)
                    continue
                losses.append(-nn.functional.logsigmoid(said))
                drawn = [item for item in batch["negative"][place, epoch].tolist() if item >= 0]
                losses += [-nn.functional.logsigmoid(-model(data, place, item)) for item in drawn]
            if not losses:
                continue
            optimiser.zero_grad()
            torch.stack(losses).mean().backward()
            optimiser.step()
            total, told = total + float(torch.stack(losses).detach().sum()), told + len(losses)
    return model.tree(), total / max(1, told)


SMALL = PrivRec(
    learning_rate=0.5,
    factors=4,
    hidden="6,5",
    epochs=3,
    adapt_epochs=2,
    adapt_rate=0.3,
    batch_size=4,
    negatives=2,
    init_scale=1,
)
SETTINGS = {
    "as it is": SMALL,
    "no hidden layer": replace(SMALL, hidden=""),
    "widths of whole vectors and more": replace(SMALL, factors=19, hidden="64,33,16", activation="sigmoid"),
    "ratings": replace(SMALL, output="explicit", hidden="6", learning_rate=0.05),
    "sigmoid": replace(SMALL, activation="sigmoid", learning_rate=1.0),
    "a step of their own for items' rows": replace(SMALL, item_rate=0.25),
    "one step": replace(SMALL, epochs=1, batch_size=0),
    "the latest alone": replace(SMALL, adapt_items=3),
    "no features": replace(SMALL, features="none"),
    "features of items": replace(SMALL, features="genres,maker"),
    "circumstances": replace(SMALL, features="hour,heat"),
}


def everyone() -> list[Data]:
    """As many as there are threads and more: of one length, of none, of an unknown kind, with nothing to draw."""
    return [
        person(11, 1, seed=0),
        person(5, 7, seed=1, age=0),
        person(0, 12, seed=2),
        person(12, 0, seed=3, excluded=N_ITEMS),
        person(1, 11, seed=4),
    ]


def prepared(method: Method, people: list[Data]) -> tuple[list[Batch], Batch]:
    each = [method.prepare(one, Rng.of(5, number)) for number, one in enumerate(people)]
    return each, {name: torch.stack([one[name] for one in each]) for name in each[0]}


def alike(found: Tensor, expected: Tensor) -> None:
    """But for rounding: a change is the difference of larger numbers."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * scale + 1e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_kernel_is_what_a_module_and_an_optimiser_come_to(name: str) -> None:
    method, people = SETTINGS[name], everyone()
    shared = method.init_shared(catalogue(), Rng.of(3))
    shared["layers"] *= 2.0  # so that what is learnt shows in the rows too
    before = {name: value.clone() for name, value in shared.items()}
    each, batches = prepared(method, people)
    (update, kept), adapted = train_many(method, shared, {}, batches), adapt_many(method, shared, {}, batches)
    plain = torch.func.vmap(method.client, in_dims=(None, 0, 0))(shared, {}, batches)
    for number, data in enumerate(people):
        for part, change in plain[0].items():
            alike(update[part][number], change[number])
        after, loss = trained(method, shared, data, each[number], method.epochs, method.learning_rate, 0)
        for part, value in after.items():
            alike(update[part][number], value - shared[part])
        assert float(kept["loss"][number]) == pytest.approx(loss, rel=1e-4, abs=1e-6)
        passes, rate = method.adapt_passes, method.adapt_step
        tuned, _ = trained(method, shared, data, each[number], passes, rate, method.adapt_items)
        for part, value in tuned.items():
            alike(adapted[part][number] - shared[part], value - shared[part])
    assert all(torch.equal(shared[name], value) for name, value in before.items())


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
@pytest.mark.parametrize("hidden", [(), (6, 5)])
@pytest.mark.parametrize("people", [1, 7])
def test_the_slopes_of_a_score_function_are_those_of_autograd(
    activation: Any, hidden: tuple[int, ...], people: int
) -> None:
    network = ScoreFunction(4, hidden, 3, activation)
    parts = network.parts(network.start(Rng.of(1)))
    rows, person, slope = Rng.of(2).normal(7, 4), Rng.of(3).normal(people, 3), Rng.of(4).normal(7, 1)

    def through(parts: list[Tensor], rows: Tensor, person: Tensor) -> Tensor:
        return (network.inputs(parts, rows, person)[-1][:, 0] * slope[:, 0]).sum()

    expected = torch.func.grad(through, argnums=(0, 1, 2))(parts, rows, person)
    found = network.slopes(parts, network.inputs(parts, rows, person), person, slope)
    torch.testing.assert_close(found[0], list(expected[0]))
    torch.testing.assert_close(found[1:], expected[1:])


def test_who_has_nothing_changes_nothing() -> None:
    shared = SMALL.init_shared(catalogue(), Rng.of(3))
    _, batches = prepared(SMALL, [person(0, 4)])
    update, kept = train_many(SMALL, shared, {}, batches)
    assert all(float(change.abs().max()) == 0 for change in update.values())
    assert float(kept["loss"]) == 0


def test_only_rows_that_were_met_move() -> None:
    shared = SMALL.init_shared(catalogue(), Rng.of(3))
    _, batches = prepared(SMALL, [person(6, 0)])
    update, _ = train_many(SMALL, shared, {}, batches)
    met = torch.cat([batches["item"][0], batches["negative"][0, :, : SMALL.epochs].flatten()]).unique()
    assert update["item"][0].abs().sum(1).nonzero()[:, 0].tolist() == met.tolist()
    ages = update["feature"][0, :4].abs().sum(1)
    assert ages.nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("now", [{}, {"hour": torch.tensor(4), "heat": torch.tensor(0.5)}])
@pytest.mark.parametrize("hidden", ["6,5", ""])
def test_a_score_is_what_the_module_says(now: dict[str, Tensor], hidden: str) -> None:
    """Of a moment nothing is known of, too: that is the unknown hour, and the mean heat."""
    method = replace(SMALL, hidden=hidden)
    data = person(5)._replace(now=now)
    shared = method.init_shared(catalogue(), Rng.of(3))
    other = {name: value * 1.5 for name, value in shared.items()}
    around = {"hour": torch.tensor([4 if now else 0]), "heat": torch.tensor([0.5 if now else 0.0])}
    items = torch.tensor([3, 7, 29])
    for local in ({}, other):
        model = Second(method, local or shared, data.catalogue)
        expected = torch.stack([model(data._replace(contexts=around), 0, int(item)) for item in items]).detach()
        torch.testing.assert_close(method.score(shared, local, data, items), expected)


def test_a_cohort_is_scored_like_each_of_it() -> None:
    """More items at once than are scored together, some again and again; parameters of each, and of all."""
    people = everyone()
    shared = SMALL.init_shared(catalogue(), Rng.of(3))
    items = torch.arange(700) % N_ITEMS
    local = {name: torch.stack([value * (1 + n / 7) for n in range(len(people))]) for name, value in shared.items()}
    features = {name: torch.stack([one.features[name] for one in people]) for name in people[0].features}

    def score(features: dict[str, Tensor], local: Tree) -> Tensor:
        return SMALL.score(shared, local, people[0]._replace(features=features), items)

    found, common = torch.func.vmap(score)(features, local), torch.func.vmap(lambda one: score(one, {}))(features)
    for number, one in enumerate(people):
        own = {name: value[number] for name, value in local.items()}
        for given, held in ((found, own), (common, shared)):
            model = Second(SMALL, held, one.catalogue)
            moment = {"hour": torch.tensor([0]), "heat": torch.tensor([0.0])}
            expected = [model(one._replace(contexts=moment), 0, item) for item in range(N_ITEMS)]
            torch.testing.assert_close(given[number], torch.stack(expected).detach()[items])


@pytest.mark.parametrize("left", ["items", "people", "contexts"])
def test_the_plain_client_does_without_features_of_any_side(left: str) -> None:
    method = PrivRec(factors=4, hidden="6", epochs=2, batch_size=2, negatives=2)
    known = replace(catalogue(), **{left: {}})
    data = person(5)._replace(catalogue=known)
    own = {"people": "features", "contexts": "contexts"}
    data = data._replace(**{own[left]: {}}) if left in own else data
    shared = method.init_shared(known, Rng.of(0))
    _, stacked = prepared(method, [data])
    plain, fused = train_many(method, shared, {}, stacked, fused=False)[0], train_many(method, shared, {}, stacked)[0]
    for name in shared:
        alike(fused[name], plain[name])


def test_what_is_unknown_is_where_the_features_are() -> None:
    elsewhere = {"hour": Column(torch.empty(0, device="meta"), 6, "one")}
    known = Vocabulary.of(Catalogue(N_ITEMS, {}, {}, elsewhere))
    assert {part.device.type for part in known.around({})} == {"meta"}
    assert {part.device.type for part in known.person({}).on(torch.device("meta"))} == {"meta"}


def test_each_of_a_cohort_may_be_asked_about_items_of_its_own() -> None:
    people = everyone()
    shared = SMALL.init_shared(catalogue(), Rng.of(3))
    items = torch.stack([(torch.arange(9) * (n + 2)) % N_ITEMS for n in range(len(people))])
    features = {name: torch.stack([one.features[name] for one in people]) for name in people[0].features}

    def score(features: dict[str, Tensor], items: Tensor) -> Tensor:
        return SMALL.score(shared, {}, people[0]._replace(features=features), items)

    found = torch.func.vmap(score)(features, items)
    for number, one in enumerate(people):
        torch.testing.assert_close(found[number], score(dict(one.features), items[number]))
