from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.testing import assert_close

from homebody.core import Batch, Total, Tree
from homebody.errors import HomebodyError
from homebody.methods.kernels import privrec as kernels
from homebody.methods.kernels import train_many
from homebody.methods.nn_self import NNSelf
from homebody.methods.privrec import PrivRec
from homebody.rng import Rng
from homebody.testing import CATALOGUE, client

TINY = NNSelf(factors=3, hidden="4", activation="sigmoid", epochs=2, negatives=2, learning_rate=0.5, init_scale=0.5)
OWN = [5, 8, 13, 21, 2]


def start(method: NNSelf) -> Tree:
    return method.init_shared(CATALOGUE, Rng.of(3))


def prepared(method: NNSelf, items: list[int], seed: int = 1) -> Batch:
    return method.prepare(client(items, 3), Rng.of(seed))


def logits(tree: Tree, batch: Batch, place: int, items: list[int]) -> Tensor:
    """The network with one sigmoid layer, on one interaction and its negatives, as anyone would write it."""

    def described(name: str, at: int | None = None) -> Tensor:
        row, weight = (batch[f"{name}/{part}"] for part in ("row", "weight"))
        row, weight = (row, weight) if at is None else (row[at], weight[at])
        rows = tree["feature"][row] * weight[:, None]
        return torch.cat([rows[one > 0].sum(0) for one in batch[f"{name}/block"]])

    values = []
    for item in items:
        x = torch.cat([described("person"), described("around", place), tree["item"][item], described("items", item)])
        first, offset, last, end = tree["layers"].split([len(x) * 4, 4, 4, 1])
        values.append(torch.sigmoid(x @ first.reshape(len(x), 4) + offset) @ last + end[0])
    return torch.stack(values)


def loss_of(tree: Tree, batch: Batch, places: list[int], negatives: Tensor) -> Tensor:
    """The mean over these interactions and their negatives."""
    values, labels = [], []
    for place in places:
        drawn = negatives[place].tolist()
        values.append(logits(tree, batch, place, [int(batch["item"][place]), *drawn]))
        labels.append(torch.tensor([1.0] + [0.0] * len(drawn)))
    return binary_cross_entropy_with_logits(torch.cat(values), torch.cat(labels))


def by_hand(method: NNSelf, shared: Tree, batch: Batch, *, create_graph: bool) -> tuple[Tree, float]:
    """MAML with torch.autograd, on whole tables."""
    support = batch["support/place"][batch["support/valid"]].tolist()
    query = batch["query/place"][batch["query/valid"]].tolist()
    first = {name: value.clone().requires_grad_() for name, value in shared.items()}
    tree = dict(first)
    for epoch in range(method.epochs):
        loss = loss_of(tree, batch, support, batch["negative"][:, epoch])
        slopes = torch.autograd.grad(loss, list(tree.values()), create_graph=create_graph)
        tree = {name: value - method.learning_rate * s for (name, value), s in zip(tree.items(), slopes, strict=True)}
    loss = loss_of(tree, batch, query, batch["query/negative"])
    slopes = torch.autograd.grad(loss, list(first.values()))
    return dict(zip(first, slopes, strict=True)), float(loss.detach())


def sent(method: NNSelf, items: list[int]) -> tuple[Tree, float]:
    update, kept = method.client(start(method), {}, prepared(method, items))
    return {**update, "item": update["item"].dense()}, float(kept["loss"])


@pytest.mark.parametrize("first_order", [False, True])
def test_a_device_sends_the_gradient_through_its_steps(first_order: bool) -> None:
    method = replace(TINY, first_order=first_order)
    update, loss = sent(method, OWN)
    slopes, expected = by_hand(method, start(method), prepared(method, OWN), create_graph=not first_order)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, slope in slopes.items():
        assert_close(update[name], -slope, rtol=1e-4, atol=1e-6)


def test_without_second_derivatives_it_is_another_gradient() -> None:
    second, first = (sent(replace(TINY, first_order=flag), OWN)[0] for flag in (False, True))
    for name in second:
        apart = (second[name] - first[name]).abs().max()
        assert apart > 0.01 * second[name].abs().max(), name


def test_a_batch_of_the_support_set_is_a_step() -> None:
    """Two of two support interactions, one after the other: twice as many steps, another gradient."""
    whole, halves = (replace(TINY, epochs=1, batch_size=size) for size in (0, 1))
    assert not torch.allclose(sent(whole, OWN)[0]["layers"], sent(halves, OWN)[0]["layers"], rtol=1e-3)
    assert_close(sent(replace(whole, batch_size=2), OWN)[0]["layers"], sent(whole, OWN)[0]["layers"])


def test_the_server_steps_down_the_mean_gradient() -> None:
    shared = start(TINY)
    update, _ = sent(TINY, OWN)
    after, _ = replace(TINY, meta_rate=0.5).server(shared, {}, Total(update, 4))
    slopes, _ = by_hand(TINY, shared, prepared(TINY, OWN), create_graph=True)
    assert_close(after["layers"], shared["layers"] - 0.5 * slopes["layers"] / 4, rtol=1e-4, atol=1e-6)


def test_who_has_a_single_interaction_sends_zeros() -> None:
    update, loss = sent(TINY, [7])
    assert loss == 0.0
    assert all(not value.any() for value in update.values())
    assert any(value.any() for value in sent(TINY, [7, 9])[0].values())


@given(st.integers(0, 40), st.integers(0, 7), st.floats(0.01, 0.99))
def test_support_and_query_share_what_there_is(count: int, padding: int, share: float) -> None:
    method = replace(TINY, support=share)
    data = client([*range(count % 30), *range(count - count % 30)])
    padded = [torch.nn.functional.pad(part, (0, padding)) for part in (data.items, data.valid)]
    contexts = {name: torch.nn.functional.pad(one, (0, padding)) for name, one in data.contexts.items()}
    batch = method.prepare(data._replace(items=padded[0], valid=padded[1], contexts=contexts), Rng.of(count))
    support, query = (batch[f"{part}/place"][batch[f"{part}/valid"]].tolist() for part in ("support", "query"))
    if count < 2:
        assert not support
        assert not query
        return
    assert sorted(support + query) == list(range(count))
    assert support
    assert query
    assert abs(len(support) - share * count) <= 1


def test_the_parts_are_drawn_anew_each_round() -> None:
    drawn = {tuple(prepared(TINY, OWN, seed)["support/place"].tolist()) for seed in range(20)}
    assert len(drawn) > 5


def test_a_device_adapts_to_all_it_has_as_privrec_does() -> None:
    shared, fields = start(TINY), ("factors", "hidden", "activation", "epochs", "negatives", "learning_rate")
    plain = PrivRec(batch_size=0, **{name: getattr(TINY, name) for name in fields})
    data = client(OWN, 3)
    mine, same = (one.adapt(shared, {}, one.prepare(data, Rng.of(1))) for one in (TINY, plain))
    for name in shared:
        assert_close(mine[name], same[name])
        assert not torch.equal(mine[name], shared[name])


def test_few_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Rng.of(4).fold(torch.arange(5)).key
    batches = torch.func.vmap(lambda key: TINY.prepare(client(OWN, 3), Rng(key)))(keys)
    together, _ = train_many(TINY, start(TINY), {}, batches, fused=False)
    monkeypatch.setattr(kernels, "NUMBERS_AT_ONCE", 1)
    apart, _ = train_many(TINY, start(TINY), {}, batches)
    assert_close(apart["layers"], together["layers"])
    assert torch.equal(apart["item"].index, together["item"].index)


@pytest.mark.parametrize("share", [0, 1])
def test_a_share_that_leaves_a_part_empty_is_refused(share: float) -> None:
    with pytest.raises(HomebodyError, match="support must be above 0 and under 1"):
        NNSelf(support=share)


def test_items_own_rows_have_their_own_step_in_training_too() -> None:
    method = NNSelf(factors=3, hidden="4", epochs=2, negatives=2, learning_rate=0.5, init_scale=0.5)
    shared, batch = start(method), prepared(method, [1, 4, 2, 7])
    sent = [replace(method, item_rate=rate).client(shared, {}, batch)[0]["layers"] for rate in (1.0, 10.0)]
    assert not torch.equal(*sent)
