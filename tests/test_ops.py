"""The building blocks against plain Python, and the compiled way against the plain-torch one."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from homebody import bags, ops
from homebody.core import Catalogue, Data, Rows
from homebody.rng import Rng

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**40)


@ops.for_cohort
def _both(rows: Tensor, by: Tensor, times: int) -> tuple[Tensor, Tensor]:
    assert rows.ndim == 2, "A cohort has one row per client."
    scaled = torch.from_numpy(rows.detach().numpy() * by.detach().numpy()[:, None] * times)
    return scaled, rows.sum(1)


class TestForCohort:
    rows, by = torch.arange(6.0).reshape(2, 3), torch.tensor([1.0, 10.0])
    expected = torch.tensor([[0.0, 2.0, 4.0], [60.0, 80.0, 100.0]])

    def test_alone(self) -> None:
        scaled, total = _both(self.rows[1], self.by[1], 2)
        assert torch.equal(scaled, self.expected[1])
        assert total == 12.0

    def test_for_all(self) -> None:
        scaled, total = vmap(lambda row, by: _both(row, by, 2))(self.rows, self.by)
        assert torch.equal(scaled, self.expected)
        assert total.tolist() == [3.0, 12.0]

    def test_clients_in_another_dimension_and_what_all_share(self) -> None:
        scaled, _ = vmap(lambda row: _both(row, torch.tensor(2.0), 1), in_dims=1)(self.rows.T)
        assert torch.equal(scaled, 2 * self.rows)

    @pytest.mark.parametrize("alone", [True, False])
    def test_no_gradient_passes(self, alone: bool) -> None:
        """Also where the slope is itself a slope's: what is given back is a constant."""

        def loss(row: Tensor, by: Tensor) -> Tensor:
            scaled, total = _both(row, by, 2)
            return (row * scaled).sum() + total

        def inner(row: Tensor, by: Tensor) -> Tensor:
            return grad(loss)(row, by).sum() + (row**2).sum()

        if alone:
            assert torch.equal(grad(loss)(self.rows[1], self.by[1]), self.expected[1])
            assert torch.equal(grad(inner)(self.rows[1], self.by[1]), 2 * self.rows[1])
        else:
            assert torch.equal(vmap(grad(loss))(self.rows, self.by), self.expected)
            assert torch.equal(vmap(grad(inner))(self.rows, self.by), 2 * self.rows)

    def test_plain_autograd_gets_no_gradient_either(self) -> None:
        row = self.rows[1].clone().requires_grad_()
        scaled, total = _both(row, self.by[1], 2)
        assert not scaled.requires_grad
        assert not total.requires_grad
        (row * scaled).sum().backward()  # type: ignore[no-untyped-call]
        assert row.grad is not None
        assert torch.equal(row.grad, self.expected[1])


class _Somewhere(str):
    """A device that torch takes for the CPU and `device.type` does not."""

    type = "elsewhere"


class Elsewhere(Tensor):
    """A tensor in this machine's memory that says it is not on the CPU, so that no compiled kernel is used."""

    @property
    def device(self) -> Any:
        return _Somewhere("cpu")

    @classmethod
    def of(cls, tensor: Tensor) -> Elsewhere:
        return tensor.as_subclass(cls)


def elsewhere(tensor: Tensor) -> Tensor:
    return Elsewhere.of(tensor)


def plain(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor)


WAYS: list[Callable[[Tensor], Tensor]] = [plain, elsewhere]
on_both_ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever still calls a compiled kernel is told."""

    class Forbidden:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the plain-torch way called the compiled {name}")

    monkeypatch.setattr(ops, "kernels", Forbidden())
    monkeypatch.setattr(bags, "kernels", Forbidden())


def limit(cells: int) -> float:
    """χ² exceeds this in one of a million seeds (Wilson and Hilferty); the seeds here are fixed."""
    freedom = cells - 1
    return freedom * (1 - 2 / (9 * freedom) + 4.753 * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(counts: Counter[Any], cells: int) -> float:
    expected = counts.total() / cells
    empty = cells - len(counts)
    return sum((count - expected) ** 2 / expected for count in counts.values()) + empty * expected


def someone(excluded: list[int], n_items: int, padding: int = 0) -> Data:
    owned = torch.tensor(excluded, dtype=torch.int64)
    padded = torch.cat([owned, owned.new_full((padding,), n_items)])
    return Data(owned, torch.ones(len(owned), dtype=torch.bool), padded, Catalogue(n_items))


@st.composite
def people(draw: st.DrawFn) -> Data:
    n_items = draw(st.integers(1, 40))
    excluded = draw(st.sets(st.integers(0, n_items - 1)))
    return someone(sorted(excluded), n_items, padding=draw(st.integers(0, 5)))


@st.composite
def positions(draw: st.DrawFn, n_items: int) -> tuple[list[int], list[bool]]:
    pairs = draw(st.lists(st.tuples(st.integers(0, n_items - 1), st.booleans()), max_size=50))
    return [item for item, _ in pairs], [valid for _, valid in pairs]


@on_both_ways
@given(data=people(), seed=seeds, count=st.integers(0, 30))
@quick
def test_negatives_are_never_excluded(way: Callable[[Tensor], Tensor], data: Data, seed: int, count: int) -> None:
    n_items = data.catalogue.n_items
    drawn = ops.negatives(Rng(way(Rng.of(seed).key)), data, count).tolist()
    allowed = set(range(n_items)) - set(data.excluded.tolist())
    assert len(drawn) == count
    assert set(drawn) <= (allowed or {-1})


@given(data=people(), seed=seeds, count=st.integers(1, 30), more=st.integers(0, 9))
@quick
def test_negatives_depend_on_neither_padding_nor_how_many_are_drawn(
    data: Data, seed: int, count: int, more: int
) -> None:
    one = ops.negatives(Rng.of(seed), data, count)
    pad = data.excluded.new_full((more,), data.catalogue.n_items)
    other = ops.negatives(Rng.of(seed), data._replace(excluded=torch.cat([data.excluded, pad])), count + more)
    assert torch.equal(one, other[:count])


@pytest.mark.parametrize("count", [1, 8])
@given(data=people(), seed=seeds)
@quick
def test_negatives_are_the_nth_free_items(data: Data, seed: int, count: int) -> None:
    """Few are searched for; where many are drawn from few items, the free ones are written down first."""
    n_items = data.catalogue.n_items
    free = sorted(set(range(n_items)) - set(data.excluded.tolist()))
    key = Rng.of(seed).next_key()
    drawn = ops.negatives(Rng.of(seed), data, count).tolist()
    # The same hash that `Rng.integers` makes, read as a place among the free items.
    places = _integers(key, len(free), count) if free else []
    assert drawn == ([free[place] for place in places] if free else [-1] * count)


def _integers(key: Tensor, high: int, count: int) -> list[int]:
    class Fixed(Rng):
        def next_key(self) -> Tensor:
            return key

    return Fixed(key).integers(high, count).tolist()


@on_both_ways
@pytest.mark.parametrize("excluded", [[], [0], [11], [3, 4, 5], [0, 2, 4, 6, 8, 10], list(range(11))])
def test_negatives_are_even(way: Callable[[Tensor], Tensor], excluded: list[int]) -> None:
    data = someone(excluded, n_items=12, padding=2)
    counts = Counter(ops.negatives(Rng(way(Rng.of(8).key)), data, 24_000).tolist())
    free = 12 - len(excluded)
    assert len(counts) == free
    assert free == 1 or chi_square(counts, free) < limit(free)


def test_clients_draw_their_own_negatives() -> None:
    data = someone([0], n_items=50)
    keys = Rng.of(1).fold(torch.arange(2)).key
    one, other = vmap(lambda key: ops.negatives(Rng(key), data, 100))(keys)
    assert not torch.equal(one, other)


@on_both_ways
@given(valid=st.lists(st.booleans(), max_size=60), seed=seeds)
@quick
def test_shuffled_is_an_order_of_the_valid_positions_and_then_the_others(
    way: Callable[[Tensor], Tensor], valid: list[bool], seed: int
) -> None:
    mask = torch.tensor(valid, dtype=torch.bool)
    order = ops.shuffled(Rng(way(Rng.of(seed).key)), mask).tolist()
    real = sum(valid)
    assert sorted(order[:real]) == [position for position, ok in enumerate(valid) if ok]
    assert order[real:] == [position for position, ok in enumerate(valid) if not ok]


@given(valid=st.lists(st.booleans(), max_size=40), seed=seeds, more=st.integers(0, 20))
@quick
def test_shuffled_does_not_depend_on_padding(valid: list[bool], seed: int, more: int) -> None:
    mask = torch.tensor(valid, dtype=torch.bool)
    longer = torch.cat([mask, torch.zeros(more, dtype=torch.bool)])
    real = sum(valid)
    assert torch.equal(ops.shuffled(Rng.of(seed), mask)[:real], ops.shuffled(Rng.of(seed), longer)[:real])


@on_both_ways
@pytest.mark.parametrize("length", [2, 3, 4])
def test_shuffled_gives_every_order_equally_often(way: Callable[[Tensor], Tensor], length: int) -> None:
    draws = 1_500 if way is elsewhere else 24_000
    mask = torch.ones(length, dtype=torch.bool)
    keys = Rng.of(2).fold(torch.arange(draws)).key
    if way is plain:
        orders = vmap(lambda key: ops.shuffled(Rng(key), mask))(keys).tolist()
    else:
        orders = [ops.shuffled(Rng(way(key)), mask).tolist() for key in keys]
    counts = Counter(map(tuple, orders))
    every = math.factorial(length)
    assert set(counts) == set(itertools.permutations(range(length)))
    assert chi_square(counts, every) < limit(every)


def test_shuffled_puts_every_position_everywhere_equally_often() -> None:
    length, draws = 17, 20_000
    mask = torch.ones(length, dtype=torch.bool)
    orders = vmap(lambda key: ops.shuffled(Rng(key), mask))(Rng.of(3).fold(torch.arange(draws)).key)
    for place in (0, 8, 16):
        assert chi_square(Counter(orders[:, place].tolist()), length) < limit(length)


@on_both_ways
@given(drawn=positions(n_items=70), spare=st.integers(0, 100))
@quick
def test_touched_is_the_sorted_set_and_each_ones_place_in_it(
    way: Callable[[Tensor], Tensor], drawn: tuple[list[int], list[bool]], spare: int
) -> None:
    items, valid = drawn
    n_items = 70 + spare
    distinct = sorted({item for item, ok in zip(items, valid, strict=True) if ok})
    index, slot = ops.touched(
        way(torch.tensor(items, dtype=torch.int64)), torch.tensor(valid, dtype=torch.bool), n_items
    )
    room = min(len(items), n_items)
    assert index.tolist() == distinct + [-1] * (room - len(distinct))
    expected = [distinct.index(item) if ok else 0 for item, ok in zip(items, valid, strict=True)]
    assert slot.tolist() == expected


@on_both_ways
def test_touched_needs_no_more_room_than_there_are_items(way: Callable[[Tensor], Tensor]) -> None:
    items = torch.arange(12) % 3
    index, slot = ops.touched(way(items), torch.ones(12, dtype=torch.bool), n_items=3)
    assert index.tolist() == [0, 1, 2]
    assert slot.tolist() == items.tolist()


@on_both_ways
@given(
    items=st.lists(st.integers(0, 19), max_size=30),
    tuned=st.dictionaries(st.integers(0, 19), st.integers(-50, 50), max_size=10),
    padding=st.integers(0, 4),
    shuffle=st.randoms(use_true_random=False),
)
@quick
def test_overlay_replaces_what_is_in_the_index(
    way: Callable[[Tensor], Tensor], items: list[int], tuned: dict[int, int], padding: int, shuffle: Any
) -> None:
    pairs = [*tuned.items(), *[(-1, 999)] * padding]
    shuffle.shuffle(pairs)
    base = torch.arange(len(items), dtype=torch.float32) + 100
    index = torch.tensor([pair[0] for pair in pairs], dtype=torch.int64)
    over = torch.tensor([float(pair[1]) for pair in pairs])
    out = ops.overlay(way(base), torch.tensor(items, dtype=torch.int64), index, over, 20)
    assert out.tolist() == [float(tuned.get(item, place + 100)) for place, item in enumerate(items)]
    out = ops.overlay(way(base), torch.tensor(items, dtype=torch.int64), index, over, 20, add=True)
    assert out.tolist() == [float(tuned.get(item, 0) + place + 100) for place, item in enumerate(items)]


@on_both_ways
@given(
    rows=st.lists(st.tuples(st.integers(-1, 6), st.integers(-99, 99)), max_size=40),
    width=st.sampled_from([1, 3, 16, 17, 40]),
)
@quick
def test_scatter_sum_adds_rows_and_drops_padding(
    way: Callable[[Tensor], Tensor], rows: list[tuple[int, int]], width: int
) -> None:
    table = torch.arange(7 * width, dtype=torch.float32).reshape(7, width)
    expected = table.tolist()
    for number, (target, value) in enumerate(rows):
        for column in range(width):
            if target >= 0:
                expected[target][column] += value + number * column
    index = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    steps = torch.arange(len(rows))[:, None] * torch.arange(width)
    value = torch.tensor([[float(row[1])] for row in rows]).reshape(-1, 1) + steps
    ops.scatter_sum(index, value, way(table))
    assert table.tolist() == expected


@pytest.mark.parametrize("shape", [(4,), (4, 2, 3)])
def test_scatter_sum_takes_rows_of_any_shape(shape: tuple[int, ...]) -> None:
    table = torch.zeros(shape)
    ops.scatter_sum(torch.tensor([1, -1, 1]), torch.ones(3, *shape[1:]), table)
    assert table[1].flatten().tolist() == [2.0] * table[1].numel()
    assert float(table.sum()) == float(table[1].sum())


def _compare(run: Callable[[Callable[[Tensor], Tensor]], Any]) -> None:
    compiled, in_torch = run(plain), run(elsewhere)
    for one, other in zip(compiled, in_torch, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(plain(one), plain(other))


@given(data=people(), seed=seeds, count=st.integers(0, 40))
@quick
def test_the_compiled_negatives_are_the_plain_ones(data: Data, seed: int, count: int) -> None:
    _compare(lambda way: [ops.negatives(Rng(way(Rng.of(seed).key)), data, count)])


@given(valid=st.lists(st.booleans(), max_size=80), seed=seeds)
@quick
def test_the_compiled_order_is_the_plain_one(valid: list[bool], seed: int) -> None:
    mask = torch.tensor(valid, dtype=torch.bool)
    _compare(lambda way: [ops.shuffled(Rng(way(Rng.of(seed).key)), mask)])


@given(drawn=positions(n_items=70), n_items=st.integers(70, 200))
@quick
def test_the_compiled_touched_rows_are_the_plain_ones(drawn: tuple[list[int], list[bool]], n_items: int) -> None:
    items, valid = torch.tensor(drawn[0], dtype=torch.int64), torch.tensor(drawn[1], dtype=torch.bool)
    _compare(lambda way: ops.touched(way(items), valid, n_items))


@given(data=people(), seed=seeds, valid=st.lists(st.booleans(), max_size=12), per_item=st.integers(1, 4))
@quick
def test_the_compiled_samples_are_the_plain_ones(data: Data, seed: int, valid: list[bool], per_item: int) -> None:
    mask = torch.tensor(valid, dtype=torch.bool)
    items = torch.arange(len(valid)) % data.catalogue.n_items

    def run(way: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        mine = data._replace(items=way(items), valid=mask)
        return ops.labelled(Rng(way(Rng.of(seed).key)), mine, per_item)

    _compare(run)


@on_both_ways
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(-9, 9), st.integers(-9, 9)), max_size=12),
    scale=st.sampled_from([1.0, -2.0, 0.5]),
)
@quick
def test_add_rows_adds_scaled_rows_to_a_copy(
    way: Callable[[Tensor], Tensor], rows: list[tuple[int, int, int]], scale: float
) -> None:
    table = torch.arange(8, dtype=torch.float32).reshape(4, 2)
    expected = table.tolist()
    for target, *values in rows:
        for column in (0, 1):
            expected[target][column] += scale * values[column]
    slot = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    value = torch.tensor([row[1:] for row in rows], dtype=torch.float32).reshape(-1, 2)
    assert ops.add_rows(way(table), slot, value, scale).tolist() == expected
    assert table.flatten().tolist() == list(range(8))


def test_add_rows_keeps_clients_apart() -> None:
    slot = torch.tensor([[0, 0, 2], [1, 2, 1]])
    value = torch.arange(12, dtype=torch.float32).reshape(2, 3, 2)
    for table, dim in ((torch.ones(2, 3, 2), 0), (torch.ones(3, 2), None)):
        together = vmap(ops.add_rows, in_dims=(dim, 0, 0))(table, slot, value)
        for client in range(2):
            own = torch.ones(3, 2).index_add(0, slot[client], value[client])
            assert torch.equal(together[client], own)


BAGS = (
    bags.Bags(
        torch.tensor([[[0, 1, 2]], [[3, 3, 0]]]),
        torch.tensor([[[0.5, 0.5, 2]], [[1, -1, 4]]]),
        torch.tensor([0, 0, 1]),
        2,
    ),
    bags.Bags(torch.tensor([[[1], [1]], [[2], [0]]]), torch.tensor([[[1.0], [2]], [[0], [3]]]), torch.tensor([0]), 1),
)


@on_both_ways
@pytest.mark.parametrize("few", [0, 1 << 20])
@pytest.mark.parametrize("shared", [True, False])
def test_rows_are_summed_by_block_and_change_with_the_sums(
    way: Callable[[Tensor], Tensor], few: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against autograd, client by client; for two of them at once, by their own tables or a common one."""
    monkeypatch.setattr(bags, "SMALL", few)
    tables = torch.arange(16, dtype=torch.float32).reshape(2, 4, 2) if not shared else torch.ones(4, 2)
    changes = [torch.arange(8, dtype=torch.float32).reshape(2, 1, 2, 2), -torch.ones(2, 2, 1, 2)]
    before = tables.clone()

    def own(client: int) -> Tensor:
        return before if shared else before[client]

    def bags_of(parts: tuple[Tensor, ...]) -> list[bags.Bags]:
        halves = zip(parts[::2], parts[1::2], BAGS, strict=True)
        return [bag._replace(row=row, weight=weight) for row, weight, bag in halves]

    def run(table: Tensor, parts: tuple[Tensor, ...], change: list[Tensor]) -> tuple[Any, Tensor]:
        return bags.sum_rows(table, *bags_of(parts)), bags.spread_rows(table, bags_of(parts), change)

    parts = tuple(part for bag in BAGS for part in bag[:2])
    sums, after = vmap(run, in_dims=(None if shared else 0, 0, 0))(way(tables), parts, changes)
    for client in range(2):
        table = own(client).clone().requires_grad_()
        expected = []
        for row, weight, block, blocks in BAGS:
            found = torch.zeros(row.shape[1], blocks, 2)
            for i, k in itertools.product(range(row.shape[1]), range(row.shape[2])):
                where = torch.zeros(found.shape)
                where[i, block[k]] = weight[client, i, k]
                found = found + where * table[row[client, i, k]]
            expected.append(found)
        total = sum((found * change[client]).sum() for found, change in zip(expected, changes, strict=True))
        (slope,) = torch.autograd.grad(total, table)
        for found, right in zip(sums, expected, strict=True):
            assert torch.equal(plain(found[client]), right.detach())
        assert torch.equal(plain(after[client]), own(client) + slope)
    if shared:
        assert torch.equal(tables, before)


@on_both_ways
@given(
    index=st.lists(st.lists(st.integers(-1, 5), min_size=4, max_size=4), min_size=1, max_size=3),
    ordered=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64]),
    shape=st.sampled_from([(), (2,), (2, 1)]),
)
@quick
def test_coalesced_rows_are_those_of_each_client(
    way: Callable[[Tensor], Tensor], index: list[list[int]], ordered: bool, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Also where they are in order already, and where padding has a value."""
    if ordered:
        index = [(sorted(set(own) - {-1}) + [-1] * 4)[:4] for own in index]
    whole = torch.tensor(index)
    value = torch.arange(1, 1 + 4 * len(index) * math.prod(shape)).view(len(index), 4, *shape).to(dtype)
    for zeroed in (value, torch.where((whole < 0).view(len(index), 4, *[1] * len(shape)), 0, value)):
        found = vmap(lambda own, of: ops.coalesced(Rows(own, of, 6)))(way(whole), way(zeroed))
        for client in range(len(index)):
            right = Rows(whole[client], zeroed[client], 6).coalesced()
            assert torch.equal(plain(found.index[client]), right.index)
            assert torch.equal(plain(found.value[client]), right.value)
            alone = ops.coalesced(Rows(way(whole[client]), way(zeroed[client]), 6))
            assert torch.equal(plain(alone.value), right.value)


def test_no_rows_are_coalesced() -> None:
    nothing = Rows(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2), 6)
    assert ops.coalesced(nothing) is nothing


@on_both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
@pytest.mark.parametrize("order", [1, 2])
def test_power_and_scale_by_hand(way: Callable[[Tensor], Tensor], dtype: torch.dtype, order: int) -> None:
    value = way(torch.tensor([[[3, -4]], [[0, 2]]], dtype=dtype))
    assert plain(vmap(lambda own: ops.power(own, order))(value)).tolist() == ([7.0, 2.0] if order == 1 else [25.0, 4.0])
    assert plain(ops.power(value[0], order)).item() == (7.0 if order == 1 else 25.0)
    factor = way(torch.tensor([0.5, 2.0], dtype=torch.float64))
    half = plain(vmap(ops.scaled)(value, factor))
    assert half.tolist() == [[[1.5, -2.0]], [[0.0, 4.0]]]
    assert half.dtype == torch.promote_types(dtype, torch.float32)
    assert plain(ops.scaled(value[0], factor[0])).tolist() == [[1.5, -2.0]]


@on_both_ways
def test_what_is_not_finite_shows_in_the_power_and_a_factor_of_zero_removes_it(way: Callable[[Tensor], Tensor]) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        value = way(torch.tensor([1.0, bad]))
        assert not math.isfinite(plain(ops.power(value, 2)).item())
        assert plain(ops.scaled(value, way(torch.tensor(0.0, dtype=torch.float64)))).tolist() == [0.0, 0.0]
    huge = way(torch.tensor([3e38, -3e38]))
    assert plain(ops.power(huge, 2)).item() == pytest.approx(2 * float(torch.tensor(3e38)) ** 2)
    tiny = plain(ops.scaled(huge, way(torch.tensor(1e-50, dtype=torch.float64))))
    assert tiny.tolist() == pytest.approx([3e-12, -3e-12])


@pytest.mark.usefixtures("no_kernels")
def test_the_plain_way_calls_no_kernel() -> None:
    data = someone([1, 2], n_items=5)
    key = elsewhere(Rng.of(0).key)
    ops.negatives(Rng(key), data, 3)
    ops.shuffled(Rng(key), data.valid)
    ops.touched(elsewhere(data.items), data.valid, 5)
    ops.overlay(elsewhere(torch.zeros(2)), data.items, torch.tensor([1]), torch.ones(1), 5)
    ops.labelled(Rng(key), data._replace(items=elsewhere(data.items)), 2)
    ops.add_rows(elsewhere(torch.zeros(3, 2)), torch.tensor([0]), torch.ones(1, 2))
    bag = bags.Bags(torch.tensor([[0]]), torch.ones(1, 1), torch.tensor([0]), 1)
    bags.spread_rows(elsewhere(torch.zeros(3, 2)), [bag], bags.sum_rows(elsewhere(torch.ones(3, 2)), bag))
    ops.scatter_sum(torch.tensor([0]), torch.ones(1, 2), elsewhere(torch.zeros(3, 2)))
    ops.coalesced(Rows(elsewhere(torch.tensor([0])), elsewhere(torch.ones(1, 2)), 3))
    ops.scaled(elsewhere(torch.ones(2)), ops.power(elsewhere(torch.ones(2)), 2))
    with pytest.raises(AssertionError, match="draw_negatives"):
        ops.negatives(Rng.of(0), data, 3)


@given(st.lists(people(), min_size=1, max_size=4), seeds)
@settings(max_examples=10, deadline=None)
def test_a_cohort_draws_what_each_client_draws_alone(clients: list[Data], seed: int) -> None:
    catalogue = Catalogue(40)
    clients = [data._replace(catalogue=catalogue) for data in clients]
    width = max(len(data.excluded) for data in clients)
    padded = torch.stack([_padded(data.excluded, width, 40) for data in clients])
    keys = Rng.of(seed).fold(torch.arange(len(clients))).key
    items = torch.arange(6)
    valid = torch.tensor([True, True, False, True, True, False])

    def one(key: Tensor, excluded: Tensor) -> tuple[Tensor, ...]:
        rng = Rng(key)
        drawn, label, real = ops.labelled(rng, Data(items, valid, excluded, catalogue), 3)
        index, slot = ops.touched(drawn, real, 40)
        base = torch.zeros(40)
        return drawn, label, real, index, slot, ops.overlay(base, torch.arange(40), index, index.float(), 40)

    together = vmap(one)(keys, padded)
    for row in range(len(clients)):
        for stacked, alone in zip(together, one(keys[row], padded[row]), strict=True):
            assert torch.equal(stacked[row], alone)


def _padded(excluded: Tensor, width: int, fill: int) -> Tensor:
    own = excluded[excluded < fill].sort().values
    return torch.cat([own, own.new_full((width - len(own),), fill)])


@given(
    valid=st.lists(st.booleans(), min_size=1, max_size=15),
    per_item=st.integers(1, 5),
    excluded=st.sets(st.integers(0, 24)),
    seed=seeds,
)
@quick
def test_labelled_is_every_item_once_and_so_many_negatives_each(
    valid: list[bool], per_item: int, excluded: set[int], seed: int
) -> None:
    items = torch.arange(len(valid))
    data = someone(sorted(excluded), 25)._replace(items=items, valid=torch.tensor(valid))
    drawn, label, real = (column.tolist() for column in ops.labelled(Rng.of(seed), data, per_item))
    assert len(drawn) == len(label) == len(real) == len(valid) * (1 + per_item)
    assert real == sorted(real, reverse=True), "padding stands behind what is real"
    samples = [(item, kind) for item, kind, ok in zip(drawn, label, real, strict=True) if ok]
    positives = sorted(item for item, kind in samples if kind == 1.0)
    negatives = [item for item, kind in samples if kind == 0.0]
    assert positives == [item for item, ok in enumerate(valid) if ok]
    assert len(negatives) == (len(positives) * per_item if len(excluded) < 25 else 0)
    assert not set(negatives) & excluded
    assert all(0 <= item < 25 for item in drawn), "padding, too, can be looked up in a table"


@given(size=st.integers(1, 9), length=st.integers(0, 30))
@quick
def test_minibatches_are_consecutive_and_complete(size: int, length: int) -> None:
    column = torch.arange(length)
    parts = list(ops.minibatches(size, column, column * 2))
    assert [value for part, _ in parts for value in part.tolist()] == list(range(length))
    assert all(len(part) == size for part, _ in parts[:-1])
    assert all(torch.equal(part * 2, double) for part, double in parts)


def test_without_torchs_own_parts_the_answers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, valid = torch.arange(3), torch.ones(3, 5, dtype=torch.bool)

    def shuffles() -> Tensor:
        return torch.func.vmap(lambda key, real: ops.shuffled(Rng(key), real))(keys, valid)

    quick = shuffles()
    monkeypatch.setattr(ops, "functorch", None)
    assert torch.equal(shuffles(), quick)


def test_a_dropout_mask_is_that_of_the_stream_s_bits_alone_or_for_many() -> None:
    keys = Rng.of(1).fold(torch.arange(5)).key
    many = vmap(lambda key: ops.dropout_mask(Rng(key), 0.3, 4, 2, 7))(keys)
    for key, mask in zip(keys, many, strict=True):
        parts = (Rng(key).bits(4, 4)[..., None] >> (16 * torch.arange(4))) & 0xFFFF
        kept = parts.flatten(1)[:, :14] >= round(0.3 * 65536)
        torch.testing.assert_close(mask, kept.view(4, 2, 7) / 0.7)
        assert torch.equal(mask, ops.dropout_mask(Rng(key), 0.3, 4, 2, 7))
