"""Contracts for the tests of methods and references: inherit, name yours, and run pytest.

A method that keeps `MethodContract` runs in any runtime: its numbers depend neither on padding, nor on who
else is in the cohort, nor on how the cohort is computed. The clients it is tried on (`client`) have histories of very
different lengths and features of every kind, some of them unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, FrozenInstanceError, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.func import vmap
from torch.testing import assert_close

from homebody.core import Catalogue, Column, Data, Method, Rows, Shown, Total, Tree, plain_work, written
from homebody.data.partitions import leave_one_out
from homebody.data.partitions import split as split_people
from homebody.data.population import Features, Impressions
from homebody.data.splits import Split
from homebody.data.synthetic import Synthetic, synthetic
from homebody.errors import HomebodyError
from homebody.evaluation import measure
from homebody.federation.wire import encode_tree
from homebody.methods.kernels import adapt_many, indexed, train_many
from homebody.methods.serving import check as serving_check
from homebody.methods.serving import part_of_catalogue, renumbered, serving_of
from homebody.reference import Histories, Reference, Score
from homebody.rng import Rng
from homebody.settings import params
from homebody.simulation import Simulator
from homebody.training import fit

__all__ = [
    "CATALOGUE",
    "MethodContract",
    "ReferenceContract",
    "chance",
    "client",
    "data_of",
    "described",
    "impressed",
    "population",
    "stack",
]

N_ITEMS = 30
_colours = torch.arange(N_ITEMS) % 4
_tags = torch.stack([torch.arange(N_ITEMS) % 3, torch.where(torch.arange(N_ITEMS) % 5 > 0, 3, -1)], 1)

CATALOGUE = Catalogue(
    N_ITEMS,
    items={
        "colour": Column(_colours, 4, "one"),
        "tags": Column(_tags, 4, "many"),
        "price": Column(torch.linspace(-1.5, 1.5, N_ITEMS), 1, "number"),
    },
    people={
        "job": Column(torch.empty(0, dtype=torch.int64), 3, "one", view="profile"),
        "hobbies": Column(torch.empty(0, 2, dtype=torch.int64), 4, "many", view="habits"),
        "age": Column(torch.empty(0), 1, "number", view="profile"),
    },
    contexts={"weather": Column(torch.empty(0, dtype=torch.int64), 3, "one")},
)
_PEOPLE: dict[str, list[Any]] = {
    "job": [1, 0, 2, 1, 0, 2],
    "hobbies": [[1, 2], [-1, -1], [3, -1], [2, 3], [1, -1], [-1, -1]],
    "age": [0.3, -1.2, 0.0, 2.0, -0.5, 0.9],
}


def client(items: list[int], number: int = 0) -> Data:
    """Someone who has these items; what else is known of them, their number says."""
    owned = torch.tensor(items, dtype=torch.int64)
    return Data(
        owned,
        torch.ones_like(owned, dtype=torch.bool),
        torch.tensor(sorted(set(items)), dtype=torch.int64),
        CATALOGUE,
        {name: torch.tensor(rows[number % len(rows)]) for name, rows in _PEOPLE.items()},
        {"weather": (owned + number) % 3},
        1.0 + (owned + number) % 5,
        shown=_shown(len(items), number),
    )


def _shown(length: int, number: int) -> Shown:
    """One to three impressions of three or four different items each, of which the second was clicked."""
    count, width = 1 + number % 3, 3 + number % 2
    first = 5 * torch.arange(count)[:, None] + number
    items = (first + 2 * torch.arange(width)) % N_ITEMS
    clicked = (torch.arange(width) == 1).expand(count, width).clone()
    return Shown(items, clicked, (length * (torch.arange(count) + 1)) // count)


def stack(clients: list[Data], extra: int = 0) -> tuple[Tensor, ...]:
    """Everyone padded to the longest and a bit more: what `data_of` takes, one row a client."""

    def pad(rows: list[Tensor], value: float) -> Tensor:
        width = max(map(len, rows)) + extra
        return torch.stack([torch.cat([row, row.new_full((width - len(row),), value)]) for row in rows])

    return (
        pad([data.items for data in clients], 0),
        pad([data.valid for data in clients], False),
        pad([data.excluded for data in clients], N_ITEMS),
        *(torch.stack([data.features[name] for data in clients]) for name in CATALOGUE.people),
        *(pad([data.contexts[name] for data in clients], 0) for name in CATALOGUE.contexts),
        pad([data.ratings for data in clients if data.ratings is not None], 0.0),
        *_stacked_shown([data.shown for data in clients if data.shown is not None], extra),
    )


def _stacked_shown(every: list[Shown], extra: int) -> Shown:
    count, width = (max(shown.items.shape[side] for shown in every) + extra for side in (0, 1))
    items = torch.full((len(every), count, width), N_ITEMS)
    clicked, before = torch.zeros_like(items, dtype=torch.bool), torch.zeros_like(items[:, :, 0])
    for row, shown in enumerate(every):
        there = row, slice(len(shown.items)), slice(shown.items.shape[1])
        items[there], clicked[there], before[there[:2]] = shown
    return Shown(items, clicked, before)


def data_of(items: Tensor, valid: Tensor, excluded: Tensor, *others: Tensor) -> Data:
    others, shown = others[:-3], Shown(*others[-3:])
    features = dict(zip(CATALOGUE.people, others, strict=False))
    contexts = dict(zip(CATALOGUE.contexts, others[len(features) :], strict=False))
    return Data(items, valid, excluded, CATALOGUE, features, contexts, others[-1], shown=shown)


SELECT = "valid/ndcg@10"


@cache
def population() -> Split:
    """A small synthetic population with structure to learn, and something held out of it.

    >>> population().n_users, population().n_items
    (300, 120)
    """
    people = synthetic(Synthetic(users=300, items=120, mean=16, factors=4, seed=5))
    # For methods that predict ratings: some people are kinder than others, and some items better.
    owner = np.repeat(np.arange(people.n_users), people.lengths)
    return leave_one_out(replace(people, ratings=(1 + (owner + people.items) % 5).astype(np.float32)), seed=5)


@cache
def impressed() -> Split:
    """The same people, nearly all with an impression: an item of theirs, drawn, among nine that they do not have.

    These are drawn evenly, so that what is popular is more often the click: there is something to learn. The person has
    the clicked item last, after the impression.

    >>> split = impressed()
    >>> len(split.shown["train"]), len(split.shown["valid"]), len(split.shown["test"])
    (149, 90, 60)
    """
    people, draw = population().population, np.random.default_rng(5)
    items, users, shown = people.items.copy(), list[int](), list[list[int]]()
    for user in range(people.n_users):
        own = items[people.indptr[user] : people.indptr[user + 1]]
        own[:] = draw.permutation(own)
        others = np.setdiff1d(np.arange(people.n_items), own)
        if len(others) >= 9:
            users.append(user)
            shown.append([own[-1], *draw.choice(others, 9, replace=False)])
    impressions = Impressions(
        np.array(users),
        np.arange(len(users) + 1) * 10,
        np.concatenate(shown).astype(np.int32),
        np.tile(np.arange(10) == 0, len(users)),
        before=people.lengths[users] - 1,
    )
    shuffled = replace(people, items=items, ratings=None, impressions=impressions)
    return split_people(shuffled, "impressions-people:test=0.2,valid=0.3", seed=5)


@cache
def described() -> Split:
    """The same people, with features: two views of each, and two features of every item.

    They are made of what people have in training, so that there is something to learn from them: the view `taste` is
    three numbers, the view `profile` the kind of items that someone has most of. One in ten has no `profile`.

    >>> sorted(described().catalogue().views), sorted(described().catalogue().items)
    (['profile', 'taste'], ['kind', 'title'])
    """
    split = population()
    users, items = split.n_users, split.n_items
    has = np.zeros((users, items))
    for user in range(users):
        has[user, split.training(user)] = 1.0
    left, strength, right = np.linalg.svd(has - has.mean(0), full_matrices=False)
    kind = np.argmax(np.abs(right[:4]), axis=0) * 2 + (right[:4].max(0) > -right[:4].min(0))
    most = np.argmax(has @ np.eye(8)[kind], axis=1)
    numbers = left[:, :3] * strength[:3]
    about_people = {
        "kind": [None if user % 10 == 0 else f"k{number}" for user, number in enumerate(most)],
        **{f"taste.{place + 1}": numbers[:, place] for place in range(3)},
    }
    about_items = {"kind": [f"k{number}" for number in kind], "title": [f"word{number} item" for number in kind]}
    views = {"kind": "profile", **{f"taste.{place + 1}": "taste" for place in range(3)}}
    kinds = {name: "categorical" if name == "kind" else "numeric" for name in about_people}
    people = Features(pl.DataFrame(about_people), kinds, views=views)  # type: ignore[arg-type]
    titles = Features(pl.DataFrame(about_items), {"kind": "categorical", "title": "text"})
    return leave_one_out(replace(split.population, user_features=people, item_features=titles), seed=5)


def chance(split: Split, k: int = 10) -> tuple[float, float]:
    """The validation NDCG@k, over the sampled items, of random scores; and its standard error.

    Of impressions, over what was shown; each has one click.

    >>> mean, error = chance(population())
    >>> 0.04 < mean < 0.06, error < 0.02
    (True, True)
    """
    if split.shown is not None and split.population.impressions is not None:
        places = np.diff(split.population.impressions.indptr)[split.shown["valid"]]
    else:
        places = (split.candidates(split.asked(), "valid") >= 0).sum(axis=1) + 1
    gain = 1.0 / np.log2(np.arange(k) + 2.0)
    reached = np.arange(k)[None, :] < places[:, None]
    mean = (gain * reached).sum(axis=1) / places
    square = (gain**2 * reached).sum(axis=1) / places
    return float(mean.mean()), float(np.sqrt((square - mean**2).sum())) / len(places)


class MethodContract:
    """The contract of every method, as tests to inherit.

    >>> from homebody.methods.fedmf import FedMF
    >>> class TestFedMF(MethodContract):
    ...     def method(self):
    ...         return FedMF(factors=4, batch_size=16)
    >>> TestFedMF().test_a_client_is_the_same_alone_and_in_a_padded_cohort()

    Choose small sizes, and a batch size at which a client takes several steps.
    """

    tolerance = 1e-5
    """How far two ways to compute the same may differ, relative to the largest number among them."""
    rounds = 10
    """How many rounds are enough to learn something from `homebody.testing.population`."""

    def method(self) -> Method:
        """The method under test."""
        raise NotImplementedError(f"{type(self).__name__} must define method(): the method it tests.")

    def learner(self) -> Method:
        """The method with settings that learn in a few rounds; by default the one under test."""
        return self.method()

    def people(self) -> Split:
        """Those whom it is trained on; by default `population`, who have no features."""
        return population()

    def total(self, update: Tree) -> Tree:
        """What the server is given of a stacked update: its sum, or what the method's channel reads in it besides."""
        return _sum(update)

    def round(self, total: Tree) -> Total:
        """What the server is given of a round; by default, `total` is the sum."""
        return Total(total, len(self.clients()), catalogue=CATALOGUE)

    def clients(self) -> list[Data]:
        """People of very different lengths: one item, nearly all items, all items, the same item twice."""
        everything = list(range(CATALOGUE.n_items))
        owned = [[7], [3, 29, 0], [5, 8, 13, 21, 5, 1], [*everything[9:], 2, 4], everything[::-1], [0, 1, 2, 3, 4]]
        return [client(items, number) for number, items in enumerate(owned)]

    def test_the_kernel_equals_the_vmapped_client(self) -> None:
        method, shared, locals_ = self._start()
        for number in (1, 2):
            batches = self._batches(number)
            update, after = _cohort(method, shared, locals_, batches)
            plain_update, plain_after = train_many(method, shared, locals_, batches, fused=False)
            self._same(update, plain_update, f"update of round {number}")
            self._same(after, plain_after, f"local state of round {number}")
            shared = self._serve(method, shared, plain_update)
            locals_ = plain_after

    def test_adapting_many_equals_adapting_each(self) -> None:
        method, shared, locals_ = self._start()
        batches = self._batches()
        adapted = adapt_many(method, shared, locals_, batches)
        for number in range(len(self.clients())):
            adapted_alone = method.adapt(shared, _row(locals_, number), _row(batches, number))
            self._same(adapted_alone, _row(adapted, number), f"client {number} after adapting")

    def test_the_vmapped_client_equals_a_loop_over_clients(self) -> None:
        method, shared, locals_ = self._start()
        stacked, keys, batches = stack(self.clients()), _keys(1, len(self.clients())), self._batches()
        trained = train_many(method, shared, locals_, batches, fused=False)
        for number in range(len(keys)):
            batch = method.prepare(data_of(*(part[number] for part in stacked)), Rng(keys[number]))
            self._same(batch, _row(batches, number), f"batch of client {number}")
            self._same_client(method.client(shared, _row(locals_, number), batch), trained, number)

    def test_a_client_is_the_same_alone_and_in_a_padded_cohort(self) -> None:
        method, shared, locals_ = self._start()
        clients, everything = self.clients(), torch.arange(CATALOGUE.n_items)
        keys, stacked = _keys(1, len(clients)), stack(clients, extra=5)
        trained = train_many(method, shared, locals_, _prepare(method, stacked, keys), fused=False)
        score = lambda local, *parts: method.score(shared, local, data_of(*parts), everything)  # noqa: E731
        scores = vmap(score)(trained[1], *stacked)
        for number, data in enumerate(clients):
            own = method.client(shared, _row(locals_, number), method.prepare(data, Rng(keys[number])))
            self._same_client(own, trained, number)
            own_scores = method.score(shared, own[1], data, everything)
            self._same({"": own_scores}, {"": scores[number]}, f"scores of client {number}")

    def test_inputs_are_left_as_they_are_and_calling_twice_gives_the_same(self) -> None:
        method, shared, locals_ = self._start()
        stacked, keys = stack(self.clients()), _keys(1, len(self.clients()))
        batches = _prepare(method, stacked, keys)
        _identical(batches, _prepare(method, stacked, keys), "prepare, called twice")
        data = self.clients()[3]
        given = {name: value for name, value in data._asdict().items() if name != "catalogue"}
        _unmoved("prepare", lambda parts: method.prepare(data._replace(**parts), Rng.of(1)), given)
        _unmoved("cohort", partial(_cohort, method), shared, locals_, batches)
        _unmoved("client", method.client, shared, _row(locals_, 3), _row(batches, 3))
        items = torch.arange(CATALOGUE.n_items)
        _unmoved("score", lambda s, local: {"": method.score(s, local, data, items)}, shared, _row(locals_, 3))
        _unmoved("init_local", lambda s: method.init_local(s, Rng.of(2)), shared)

    def test_updates_are_finite_floats_under_the_same_names(self) -> None:
        method, shared, locals_ = self._start()
        names: set[tuple[str, ...]] = set()
        for number in (1, 2):
            update, locals_ = _cohort(method, shared, locals_, self._batches(number))
            names.add(tuple(sorted(update)))
            for name, value in update.items():
                tensor = value.value if isinstance(value, Rows) else value
                assert tensor.dtype == torch.float32, f"update '{name}' is {tensor.dtype}, not float32"
                assert bool(torch.isfinite(tensor).all()), f"update '{name}' is not finite"
                if isinstance(value, Rows):
                    assert value.index.dtype == torch.int64, f"update '{name}' has indices of {value.index.dtype}"
                    assert _inside(value), f"update '{name}' has an index outside its table"
            if "loss" in locals_:
                assert locals_["loss"].shape == (len(self.clients()),), "the loss is one number a client"
                assert bool(torch.isfinite(locals_["loss"]).all()), "the loss is not finite"
            shared = self._serve(method, shared, update)
        assert len(names) == 1, f"the names in an update change from round to round: {names}"

    def test_no_parameters_make_a_client_fail(self) -> None:
        """A server chooses shared parameters and fields: a client that failed on some would tell what it has.

        What is not finite is sent as zero, so that numbers may be anything, and nothing may be raised.
        """
        method, shared, _ = self._start()
        for hostile in _hostile(shared):
            self._withstands(method, hostile)
        for other in _extreme(method):
            for hostile in _hostile(other.init_shared(CATALOGUE, Rng.of(3)))[:HARSHEST]:
                self._withstands(other, hostile)

    def _withstands(self, method: Method, shared: Tree) -> None:
        clients = self.clients()[1:4]
        stacked, keys = stack(clients), _keys(1, len(clients))
        locals_ = vmap(lambda key: method.init_local(shared, Rng(key)))(keys)
        batches = _prepare(method, stacked, keys)
        for name, update in (
            ("cohort", _cohort(method, shared, locals_, batches)[0]),
            ("client", method.client(shared, _row(locals_, 0), method.prepare(clients[0], Rng(keys[0])))[0]),
        ):
            for value in update.values():
                outside = isinstance(value, Rows) and not _inside(value)
                assert not outside, f"{name} of hostile parameters names a row outside its table"
        method.score(shared, _row(locals_, 0), clients[0], torch.arange(CATALOGUE.n_items))

    def test_the_estimate_of_its_work_holds(self) -> None:
        """A device refuses a task by it, and times its answers by it."""
        method, shared, _ = self._start()
        data = max(self.clients(), key=lambda client: len(client.items))
        bound = method.work(CATALOGUE, len(data.items))
        key = Rng.of(2).key[None]

        def ranked() -> Tensor:
            local = method.adapt(shared, method.init_local(shared, Rng.of(1)), method.prepare(data, Rng.of(2)))
            return method.score(shared, local, data, torch.arange(CATALOGUE.n_items))

        def trained() -> Tree:
            locals_ = vmap(lambda stream: method.init_local(shared, Rng(stream)))(key)
            return _cohort(method, shared, locals_, _prepare(method, stack([data]), key))[0]

        shared_numbers = sum(value.numel() for value in shared.values())
        assert 4 * shared_numbers <= bound.memory, f"there are {shared_numbers} shared numbers"
        if type(method).work is Method.work:
            exact = plain_work(shared_numbers, CATALOGUE, len(data.items))
            assert bound == exact, f"there are {shared_numbers} shared numbers: the estimate is {bound}, not {exact}"
        if stated := getattr(method, "shared_numbers", None):
            assert shared_numbers <= stated(CATALOGUE), f"there are {shared_numbers} shared numbers"
        update, whole = _row(trained(), 0), method.uplink.work(bound)
        sent = method.uplink.device(update, Rng.of(3))
        for what, size, most in (
            ("an update", len(encode_tree(update)), bound.bytes),
            ("what is sent", len(encode_tree(sent)), whole.bytes),
        ):
            assert size <= most, f"{what} has {size} bytes, and the estimate is {most}"
        for name, work, most in (
            ("a round", trained, bound.memory),
            ("ranking", ranked, bound.memory),
            ("the channel", lambda: method.uplink.device(update, Rng.of(3)), whole.memory),
        ):
            held = _held(work)
            assert held <= most, f"{name} holds {held} bytes, and the estimate is {most}"

    def test_the_estimate_of_huge_work_costs_nothing(self) -> None:
        """It is made before anything is refused: for a billion items it must not hold a byte of them."""
        method = self.method()
        sizes = {name: column._replace(values=column.values[:0]) for name, column in CATALOGUE.items.items()}
        huge = Catalogue(10**9, sizes, CATALOGUE.people, CATALOGUE.contexts)
        assert method.work(huge, 10**6).memory > 10**9
        assert _held(lambda: method.work(huge, 10**6)) < 10**6

    def test_the_server_keeps_names_and_shapes_and_leaves_its_inputs_as_they_are(self) -> None:
        method, shared, locals_ = self._start()
        update, _ = _cohort(method, shared, locals_, self._batches())
        total, state = self.total(update), method.init_server(shared)
        _unmoved("server", lambda s, held, sums: method.server(s, held, self.round(sums)), shared, state, total)
        after, state_after = method.server(shared, state, self.round(total))
        for before, now, whose in ((shared, after, "shared"), (state, state_after, "the server's")):
            assert sorted(before) == sorted(now), f"{whose} parameters change their names: {sorted(now)}"
            for name, value in before.items():
                # What the server remembers of earlier rounds begins empty.
                begun = slice(0 if len(value) or whose == "shared" else 1, None) if value.ndim else slice(None)
                same = value.shape[begun] == now[name].shape[begun]
                assert same, f"'{name}' changes its shape to {tuple(now[name].shape)}"
                assert value.dtype == now[name].dtype, f"'{name}' changes its type to {now[name].dtype}"

    def test_a_score_is_one_number_an_item_whatever_the_order_of_items(self) -> None:
        method, shared, locals_ = self._start()
        _, locals_ = _cohort(method, shared, locals_, self._batches())
        everything = torch.arange(CATALOGUE.n_items)
        for number, data in enumerate(self.clients()):
            scores = method.score(shared, _row(locals_, number), data, everything)
            shape = f"the scores of {len(everything)} items have the shape {tuple(scores.shape)}"
            assert scores.shape == everything.shape, shape
            assert scores.is_floating_point(), f"scores are {scores.dtype}"
            assert bool(torch.isfinite(scores).all()), "scores are not finite"
            for items in (everything.flip(0), everything[4:9], torch.tensor([6, 6, 0])):
                some = method.score(shared, _row(locals_, number), data, items)
                self._same({"": some}, {"": scores[items]}, f"scores of items {items.tolist()}")

    def test_a_part_of_the_shared_parameters_scores_as_the_whole(self) -> None:
        """A device that is served gets the rows of some items, in any order, and its own are among them."""
        method, shared, locals_ = self._start()
        try:
            serving = serving_of(method)
        except HomebodyError:
            return  # it is not served, and says why
        _, locals_ = _cohort(method, shared, locals_, self._batches())
        shared = indexed(method, shared, CATALOGUE)
        serving_check(method, shared, CATALOGUE)
        everything = torch.arange(CATALOGUE.n_items)
        for name, values, shape in (
            ("common", serving.common(method, shared, CATALOGUE), (CATALOGUE.n_items,)),
            ("places", serving.places(method, shared, CATALOGUE) if "query" in serving.ways else everything, None),
        ):
            assert shape is None or values.shape == shape, f"{name} has the shape {tuple(values.shape)}"
            assert len(values) == CATALOGUE.n_items, f"{name} has {len(values)} rows"
            assert bool(torch.isfinite(values).all()), f"{name} is not finite"
        for number, data in enumerate(self.clients()):
            local = _row(locals_, number)
            own = set(data.items.tolist())
            some = everything.flip(0)[torch.tensor([item in own or item % 3 > 0 for item in range(29, -1, -1)])]
            items = everything if serving.ways == ("table",) else some
            part, place = serving.part(method, shared, items), items.argsort()
            here = place[torch.searchsorted(items[place], data.items)]
            at_home = data._replace(items=here, catalogue=part_of_catalogue(CATALOGUE, items))
            mine = renumbered(local, items)
            scores = method.score(part, mine, at_home, torch.arange(len(items)))
            whole = method.score(shared, local, data, items)
            self._same({"": scores}, {"": whole}, f"scores of client {number} on a part")
            if "query" in serving.ways:
                interest = serving.interest(method, part, mine, at_home)
                there = serving.interest(method, shared, local, data)
                self._same({"": interest}, {"": there}, f"interest of client {number} on a part")
                assert interest.shape == serving.places(method, shared, CATALOGUE).shape[1:], "an interest is a place"

    def test_training_finds_what_there_is_to_learn(self) -> None:
        split, losses = self.people(), list[float | None]()
        runtime = Simulator(split)
        method = self.learner()
        # What an untrained model gives, from the same seed.
        seed = Rng.of(0, "train")
        runtime.begin(method, seed.fold("clients"))
        before = runtime.evaluate(method, method.init_shared(runtime.catalogue, seed.fold("shared"))).metrics
        # The last round alone is evaluated: the best of several would be better than chance more often.
        every = self.rounds
        fitted = fit(method, runtime, rounds=every, evaluate_every=every, on_round=lambda r: losses.append(r.loss))
        mean, error = chance(split)
        # Random scores come this far about once in 30,000 seeds, and the seed is fixed.
        assert fitted.metrics[SELECT] > mean + 4 * error, f"{fitted.metrics[SELECT]:.3f} is no better than chance"
        assert fitted.metrics[SELECT] > before[SELECT], "the trained model is no better than the untrained"
        if losses[0] is not None and losses[-1] is not None:
            assert losses[-1] < losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"

    def test_a_fit_repeats_bit_by_bit(self) -> None:
        for cohort in (None, 70):
            a, b = (fit(self.method(), Simulator(self.people()), rounds=2, cohort=cohort, seed=4) for _ in range(2))
            assert a.metrics == b.metrics, "two runs from one seed differ in their metrics"
            _identical(a.shared, b.shared, "the shared parameters of two runs from one seed")
            assert a.ranked(user=3) == b.ranked(user=3), "two runs from one seed recommend differently"

    def test_someone_who_joins_late_is_served_like_the_others(self) -> None:
        """With few clients a round, some are new, some come back, some are absent."""
        split, losses = self.people(), list[float | None]()
        method = self.method()
        some = len(split.members(method.needs)) // 2
        fitted = fit(
            method, Simulator(split), rounds=4, cohort=some, evaluate_every=4, on_round=lambda r: losses.append(r.loss)
        )
        assert all(loss is None or math.isfinite(loss) for loss in losses)
        assert all(len(fitted.ranked(user=user, k=3)) == 3 for user in range(0, split.n_users, 29))

    def test_hyper_parameters_cannot_be_assigned_or_senseless(self) -> None:
        _check_fields(self.method())

    def _start(self) -> tuple[Method, Tree, Tree]:
        """The method, shared parameters, and the stacked state of clients that just joined."""
        method = self.method()
        shared = method.init_shared(CATALOGUE, Rng.of(3, "shared"))
        locals_ = vmap(lambda key: method.init_local(shared, Rng(key)))(_keys(0, len(self.clients())))
        return method, shared, locals_

    def _batches(self, number: int = 1) -> Tree:
        """What every client works on in the round of this number, stacked."""
        return _prepare(self.method(), stack(self.clients()), _keys(number, len(self.clients())))

    def _same_client(self, own: tuple[Tree, Tree], trained: tuple[Tree, Tree], number: int) -> None:
        for what, mine, every in zip(("update", "local state"), own, trained, strict=True):
            self._same(mine, _row(every, number), f"{what} of client {number}")

    def _serve(self, method: Method, shared: Tree, update: Tree) -> Tree:
        return method.server(shared, method.init_server(shared), self.round(self.total(update)))[0]

    def _same(self, actual: Tree, expected: Tree, what: str) -> None:
        """Equal up to rounding; rows of a table in any order, with any padding."""
        assert sorted(actual) == sorted(expected), f"{what}: {sorted(actual)} and {sorted(expected)}"
        for name in expected:
            left, other = _whole(actual[name]), _whole(expected[name])
            scale = float(other.abs().max()) if other.numel() and other.is_floating_point() else 0.0
            near = self.tolerance if other.is_floating_point() else 0.0
            apart = f"{what}, '{name}': off by up to {_apart(left, other):.3g}, numbers up to {scale:.3g}"
            assert_close(left, other, rtol=near, atol=near * max(scale, 1e-3), msg=apart)


_LEARNED: dict[type, Score] = {}
"""What the reference of a suite has learnt from everyone."""


class ReferenceContract:
    """The contract of every centralised reference, as tests to inherit.

    >>> from homebody.methods.baselines import Popularity
    >>> class TestPopularity(ReferenceContract):
    ...     def reference(self):
    ...         return Popularity()
    >>> TestPopularity().test_it_is_better_than_chance()
    """

    passes: int | None = None
    """How many passes are enough to learn something from `people`; None: as many as the reference takes."""

    def reference(self) -> Reference:
        """The reference under test."""
        raise NotImplementedError(f"{type(self).__name__} must define reference(): the reference it tests.")

    def people(self) -> Split:
        """Those whom it learns from; by default `population`, who have no features."""
        return population()

    def trained(self, histories: Histories | None = None) -> Score:
        """What it learns in `passes` from these histories; what it learns from everyone's is kept for other tests."""
        if histories is None:
            if type(self) not in _LEARNED:
                _LEARNED[type(self)] = self.trained(self.people().histories())
            return _LEARNED[type(self)]
        return self.reference().trained(histories, rounds=self.passes)

    def test_scores_are_finite_and_one_row_a_user(self) -> None:
        score, every = self.trained(), torch.arange(self.people().n_items)
        scores = score(np.array([4, 0, 299]), every)
        assert scores.shape == (3, self.people().n_items), f"scores of 3 users have the shape {tuple(scores.shape)}"
        assert scores.dtype == torch.float32, f"scores are {scores.dtype}, not float32"
        assert bool(torch.isfinite(scores).all()), "scores are not finite"
        assert score(np.empty(0, dtype=np.int64), every).shape == (0, len(every)), "nobody has no scores"
        some = torch.tensor([7, 2])
        assert_close(score(np.array([4, 0, 299]), some), scores[:, some], msg="an item's score depends on the others")

    def test_a_users_scores_do_not_depend_on_who_else_is_asked(self) -> None:
        score, every = self.trained(), torch.arange(self.people().n_items)
        everyone = score(np.arange(self.people().n_users), every)
        some = np.array([17, 3, 17, 250])
        assert_close(score(some, every), everyone[torch.from_numpy(some)])

    def test_it_repeats_bit_by_bit_and_leaves_the_histories_as_they_are(self) -> None:
        given = self.people().histories()
        indptr, items = given.indptr.copy(), given.items.copy()
        users, every = np.arange(self.people().n_users), torch.arange(self.people().n_items)
        left, right = (score(users, every) for score in (self.trained(), self.trained(given)))
        assert torch.equal(left, right), "two fits from one seed differ"
        unchanged = np.array_equal(indptr, given.indptr) and np.array_equal(items, given.items)
        assert unchanged, "fit changes the histories it is given"

    def test_it_is_better_than_chance(self) -> None:
        _better_than_chance(self.people(), self.trained(), "")

    def test_late_comers_teach_nothing(self) -> None:
        given = self.people().histories()
        late = np.arange(self.people().n_users) >= 200
        other = given.items.copy()
        first = given.indptr[200]
        other[first:] = (other[first:] + 1) % self.people().n_items
        users, every = np.arange(200), torch.arange(self.people().n_items)
        left, right = (
            self.trained(given._replace(items=items, learn=~late))(users, every) for items in (given.items, other)
        )
        assert torch.equal(left, right), "what late-comers have changes the scores of those who were there"

    def test_late_comers_are_scored(self) -> None:
        split = self.people()
        late = np.arange(split.n_users) % 2 == 0
        score = self.trained(split.histories()._replace(learn=~late))
        _better_than_chance(split, score, "with half of the users late, ")

    def test_hyper_parameters_cannot_be_assigned_or_senseless(self) -> None:
        _check_fields(self.reference())


def _better_than_chance(split: Split, score: Score, when: str) -> None:
    mean, error = chance(split)
    reached = measure(split, score).metrics[SELECT]
    assert reached > mean + 4 * error, f"{when}{reached:.3f} is no better than chance"


def _keys(number: int, count: int) -> Tensor:
    return Rng.of(11, "round", number).fold(torch.arange(count)).key


def _prepare(method: Method, stacked: tuple[Tensor, ...], keys: Tensor) -> Tree:
    return vmap(lambda key, *parts: method.prepare(data_of(*parts), Rng(key)))(keys, *stacked)


def _cohort(method: Method, shared: Tree, locals_: Tree, batches: Tree) -> tuple[Tree, Tree]:
    """A round by the method's own kernel, with formulas worked out."""
    update, after = train_many(method, shared, locals_, batches)
    return written(update), after


def _row(tree: Tree, number: int) -> Tree:
    """One client's part of a stacked tree."""
    return {
        name: Rows(value.index[number], value.value[number], value.size) if isinstance(value, Rows) else value[number]
        for name, value in tree.items()
    }


def _sum(update: Tree) -> Tree:
    """The sum over a stacked update's clients, as the server sees it."""
    return {
        name: Rows(value.index.flatten(), value.value.flatten(0, 1), value.size).dense()
        if isinstance(value, Rows)
        else value.sum(0)
        for name, value in update.items()
    }


def _inside(rows: Rows) -> bool:
    return bool(((rows.index >= -1) & (rows.index < rows.size)).all())


def _whole(value: Tensor | Rows) -> Tensor:
    if not isinstance(value, Rows):
        return value
    if value.index.ndim == 1:
        return value.dense()
    return torch.stack([Rows(*row, value.size).dense() for row in zip(value.index, value.value, strict=True)])


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.shape == b.shape and a.numel() else math.nan


def _flat(tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree, or of a tuple of trees, by path."""
    if isinstance(tree, Tensor):
        return {"": tree}
    if tree is None:
        return {}
    if isinstance(tree, Rows):
        return {".index": tree.index, ".value": tree.value}
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {f"{name}/{path}": value for name, part in inner for path, value in _flat(part).items()}


LARGE = 1e300
"""More than a number of 32 bits can be."""
HARSHEST = 3
"""Of hostile parameters, those that extreme fields are tried with too."""


def _hostile(shared: Tree) -> list[Tree]:
    """Shared parameters that no honest server would send: singular, huge, zero, no numbers, and indices of no row."""
    alternating = (1.0, -1.0)
    values = (0.0, 1.0, 1e30, -1e-30, 3e38, math.nan, math.inf)

    def filled(tensor: Tensor, *numbers: float) -> Tensor:
        if not tensor.is_floating_point():
            limits = torch.iinfo(tensor.dtype)
            numbers = (limits.max, -1, limits.min, 0) if any(numbers) else (0,)
            return torch.tensor(numbers, dtype=tensor.dtype).repeat(tensor.numel())[: tensor.numel()].view(tensor.shape)
        return torch.tensor(numbers).repeat(tensor.numel() // len(numbers) + 1)[: tensor.numel()].view(tensor.shape)

    return [
        {name: filled(tensor, *numbers) for name, tensor in shared.items()}
        for numbers in (*((value,) for value in values), alternating)
    ]


def _extreme(method: Any) -> list[Any]:
    """The method with each of its real fields as small and as large as it may be."""
    ends: dict[str, tuple[float, float]] = {}
    for spec in params(method):
        if isinstance(spec.default, float):
            low, high = spec.metadata["low"], spec.metadata["high"]
            ends[spec.name] = -LARGE if low is None else float(low), LARGE if high is None else float(high)
    variants = []
    single = [{name: value} for name, both in ends.items() for value in both]
    for fields in (*single, {name: high for name, (_, high) in ends.items()}):
        try:
            variants.append(replace(method, **fields))
        except HomebodyError:
            continue  # a bound that the method leaves out
    return variants


def _held(work: Callable[[], Any]) -> int:
    """The most bytes of tensors that were held at once while this worked, beside those that were there before."""
    # Not torch.profiler.profile, which works out a table of all operations first: that takes ten times as long.
    with profile(profile_memory=True) as profiled:
        result = work()
    del result
    assert profiled.kineto_results is not None
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(0, *accumulate(changes)) if changes else 0


def _identical(first: Any, other: Any, what: str) -> None:
    left, right = _flat(first), _flat(other)
    assert sorted(left) == sorted(right), f"{what}: {sorted(left)} and {sorted(right)}"
    for name, value in left.items():
        assert torch.equal(value, right[name]), f"{what}: '{name.strip('/')}' differs"


def _unmoved(what: str, call: Callable[..., Any], *inputs: Tree) -> None:
    """The call changes none of its inputs, nor what it gave before when it is made again."""
    before = [{path: value.clone() for path, value in _flat(tree).items()} for tree in inputs]
    first = call(*inputs)
    copy = {path: value.clone() for path, value in _flat(first).items()}
    second = call(*inputs)
    for tree, old in zip(inputs, before, strict=True):
        _identical(_flat(tree), old, f"{what} changes its input")
    _identical(_flat(first), copy, f"{what} changes what it gave before")
    _identical(_flat(second), copy, f"{what}, called twice")


def _check_fields(owner: Any) -> None:
    for spec in params(owner):
        _refused(FrozenInstanceError, f"assigning {spec.name}", setattr, owner, spec.name, getattr(owner, spec.name))
        for value in _senseless(spec):
            _refused(HomebodyError, f"{spec.name}={value!r}", type(owner), **{spec.name: value})
    _refused(FrozenInstanceError, "a new attribute", setattr, owner, "surely_not_a_field", 1)


def _senseless(spec: Field[Any]) -> list[Any]:
    default: Any = spec.default
    low, high = spec.metadata["low"], spec.metadata["high"]
    values: list[Any] = [None, [1]]
    if isinstance(default, float):
        values += [math.nan, math.inf]
    values += [] if low is None else [type(default)(low - 1)]
    return values if high is None else [*values, type(default)(high + 1)]


def _refused(error: type[Exception], what: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    try:
        call(*arguments, **named)
    except error:
        return
    raise AssertionError(f"{what} is not refused with {error.__name__}")
