"""FL-MV-DSSM by hand and beside torch: gradients, isolation of views, the server's step, ranking."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from torch.testing import assert_close

from homebody.core import Batch, Catalogue, Column, Rows, Total, Tree
from homebody.errors import HomebodyError
from homebody.methods.fl_mv_dssm import FLMVDSSM
from homebody.methods.kernels import train_many
from homebody.models.towers import item_rows
from homebody.privacy import Channel, Views
from homebody.rng import Rng
from homebody.simulation import Simulator, states
from homebody.testing import CATALOGUE, client, described
from homebody.training import fit

METHOD = FLMVDSSM(widths="6,5,3", negatives=3, batch_size=4, gamma=7.0)


def started(method: FLMVDSSM = METHOD, number: int = 2) -> tuple[Tree, Tree, Batch]:
    shared = method.init_shared(CATALOGUE, Rng.of(1))
    batch = method.prepare(client([3, 8, 12, 20, 25], number), Rng.of(2))
    return shared, method.init_local(shared, Rng.of(3)), batch


def encoded(x: Tensor, tower: Tree) -> Tensor:
    """Eq. 3 with a dense first layer, for towers of widths 6, 5, 3."""
    flat = tower["layers"]
    second, third = (flat[:30].view(6, 5), flat[30:35]), (flat[35:50].view(5, 3), flat[50:53])
    return ((x @ tower["first"] @ second[0] + second[1]).tanh() @ third[0] + third[1]).tanh()


def dense_samples(method: FLMVDSSM, batch: Batch) -> Tensor:
    """(samples, inputs): the items of a batch as dense vectors, from which rows they add up."""
    rows = torch.where(batch["index"] >= 0, batch["index"], 0)[batch["place"]]
    size = sum(column.size for column in method.items(CATALOGUE).values())
    return torch.zeros(len(rows), size).scatter_add(1, rows, batch["weight"])


class TestGradient:
    @pytest.mark.parametrize("weighting", ["clients", "samples"])
    def test_it_is_what_autograd_gives_for_the_loss_of_the_paper(self, weighting: str) -> None:
        method = replace(METHOD, weighting=weighting, batch_size=8)
        shared, local, batch = started(method)
        towers = {name: value.clone().requires_grad_() for name, value in shared.items()}
        items = encoded(dense_samples(method, batch), {part: towers[f"item/{part}"] for part in ("first", "layers")})
        per = len(batch["real"]) if weighting == "clients" else 8
        update, _ = method.client(shared, local, batch)
        for view in ("profile", "habits"):
            own = {part: towers[f"{view}/user/{part}"] for part in ("first", "layers")}
            person = encoded(batch[f"{view}/input"], own)
            fit = 7.0 * cosine_similarity(person[None], items, dim=1).view(batch["real"].shape)
            loss = cross_entropy(fit, torch.zeros(len(fit), dtype=torch.int64), reduction="sum") / per
            wanted = ["item/first", "item/layers", f"{view}/user/first", f"{view}/user/layers"]
            expected = torch.autograd.grad(loss, [towers[name] for name in wanted], retain_graph=True)
            for name, one in zip(wanted, expected, strict=True):
                found = update[f"{view}/{name}" if name.startswith("item/") else name]
                assert_close(found.dense() if isinstance(found, Rows) else found, one, rtol=1e-4, atol=1e-6)

    def test_samples_are_positives_and_items_that_a_person_has_not(self) -> None:
        mine = client([3, 8, 12, 20, 25])
        batch = METHOD.prepare(mine, Rng.of(2))
        row, weight = item_rows(METHOD.items(CATALOGUE))
        vectors = torch.zeros(30, 8).scatter_add(1, row, weight)
        drawn = dense_samples(METHOD, batch).view(4, 4, 8)
        own = {tuple(one) for one in vectors[mine.items].tolist()}
        others = {tuple(vectors[item].tolist()) for item in range(30) if item not in mine.items.tolist()}
        assert all(tuple(sample[0].tolist()) in own for sample in drawn)
        assert all(tuple(one.tolist()) in others for sample in drawn for one in sample[1:])

    def test_numbers_of_items_are_read_if_they_are_named(self) -> None:
        method = replace(METHOD, features="price")
        shared, local, batch = started(method)
        assert shared["item/first"].shape == (1, 6)
        update, _ = method.client(shared, local, batch)
        assert float(update["profile/item/first"].dense().abs().sum()) > 0

    def test_someone_with_every_item_still_takes_part(self) -> None:
        batch = METHOD.prepare(client(list(range(30))), Rng.of(2))
        assert not batch["real"][:, 1:].any()
        update, kept = METHOD.client(METHOD.init_shared(CATALOGUE, Rng.of(1)), {}, batch)
        assert float(update["profile/item/layers"].abs().sum()) == 0
        assert kept["loss"].item() == 0


class TestIsolation:
    def test_a_view_reads_its_own_input_and_towers_alone(self) -> None:
        shared, local, batch = started()
        whole = METHOD.view("profile", shared, local, batch)
        alone = METHOD.view(
            "profile",
            {name: value for name, value in shared.items() if name.startswith(("item/", "profile/"))},
            {},
            {name: value for name, value in batch.items() if name != "habits/input"},
        )
        assert sorted(alone) == ["item/first", "item/layers", "user/first", "user/layers"]
        for name, value in alone.items():
            other = whole[name]
            one = (value.dense(), other.dense()) if isinstance(value, Rows) else (value, other)
            assert torch.equal(*one)

    def test_a_client_is_made_of_its_views(self) -> None:
        shared, local, batch = started()
        update, _ = METHOD.client(shared, local, batch)
        for view in ("profile", "habits"):
            for name, value in METHOD.view(view, shared, local, batch).items():
                found = update[f"{view}/{name}"]
                pair = (found.dense(), value.dense()) if isinstance(value, Rows) else (found, value)
                assert_close(*pair)

    def test_a_view_that_knows_nothing_of_someone_sends_zeros_and_ranks_nothing(self) -> None:
        shared, local, batch = started(number=1)  # whose hobbies are unknown
        assert float(batch["habits/input"].abs().sum()) == 0
        update, kept = METHOD.client(shared, local, batch)
        assert all(float(value.abs().sum()) == 0 for name, value in _dense(update).items() if "habits/" in name)
        found = METHOD.probabilities(shared, kept, client([3], 1))
        assert_close(found["habits"], torch.full((30,), 1 / 30))
        assert len(found["profile"].unique()) > 1

    def test_silence_is_a_gradient_of_zero_in_the_same_shapes(self) -> None:
        shared, local, batch = started()
        spoken, silent = METHOD.view("habits", shared, local, batch), METHOD.silence("habits", shared)
        assert {name: value.shape for name, value in _dense(spoken).items()} == {
            name: value.shape for name, value in _dense(silent).items()
        }
        assert all(float(value.abs().sum()) == 0 for value in _dense(silent).values())


class TestServer:
    def test_it_steps_as_adam_does(self) -> None:
        shared, local, batch = started()
        state = METHOD.init_server(shared)
        theirs = {name: value.clone().requires_grad_() for name, value in shared.items()}
        adam = torch.optim.Adam(theirs.values(), lr=0.001)
        for number in range(3):
            batch = METHOD.prepare(client([3, 8, 12, 20, 25]), Rng.of(number))
            update = _dense(METHOD.client(shared, local, batch)[0])
            shared, state = METHOD.server(shared, state, Total(update, 1))
            for name, value in theirs.items():
                parts = [update[f"{view}/{name}"] for view in ("profile", "habits") if f"{view}/{name}" in update]
                value.grad = torch.stack(parts).mean(0) if parts else update[name]
            adam.step()
        for name, value in theirs.items():
            assert_close(shared[name], value.detach(), rtol=1e-5, atol=1e-6)

    def test_the_stage_joins_as_the_server_would(self) -> None:
        shared, local, batch = started()
        update, _ = METHOD.client(shared, local, batch)
        joined = Channel(Views(clip=1e6)).device(update, Rng.of(0))
        state = METHOD.init_server(shared)
        apart, together = (METHOD.server(shared, state, Total(_dense(one), 1))[0] for one in (update, joined))
        for name, value in apart.items():
            assert_close(together[name], value)

    def test_towers_that_stay_home_step_there_and_are_not_sent(self) -> None:
        method = replace(METHOD, aggregate_users=False)
        shared, local, batch = started(method)
        update, kept = method.client(shared, local, batch)
        assert all("/item/" in name for name in update)
        gradient = method.view("profile", shared, local, batch)
        stepped = local["profile/user/first"] - 0.2 * gradient["user/first"]
        assert_close(kept["profile/user/first"], stepped)
        after, _ = method.server(shared, method.init_server(shared), Total(_dense(update), 1))
        assert torch.equal(after["profile/user/first"], shared["profile/user/first"])
        assert not torch.equal(after["item/first"], shared["item/first"])


class TestRanking:
    def test_the_views_probabilities_are_summed(self) -> None:
        shared, local, _ = started()
        mine, items = client([3, 8]), torch.tensor([4, 9, 4])
        each = METHOD.probabilities(shared, local, mine)
        assert_close(torch.stack(list(each.values())).sum(1), torch.ones(2))
        assert_close(METHOD.score(shared, local, mine, items), sum(one[items] for one in each.values()))

    def test_a_new_item_is_ranked_by_its_features(self) -> None:
        shared, local, _ = started()
        twin = {
            name: one._replace(values=torch.cat([one.values, one.values[4:5]])) for name, one in CATALOGUE.items.items()
        }
        mine = client([3, 8])
        later = mine._replace(catalogue=Catalogue(31, twin, CATALOGUE.people))
        scores = METHOD.score(shared, local, later, torch.arange(31))
        assert scores[30] == scores[4]


class TestRefusals:
    def test_what_the_data_lacks(self) -> None:
        without = Catalogue(30, CATALOGUE.items, {"age": Column(torch.empty(0), 1, "number")})
        with pytest.raises(HomebodyError, match="No feature of people is in a view"):
            METHOD.init_shared(without, Rng.of(0))
        with pytest.raises(HomebodyError, match="Items have no features"):
            METHOD.init_shared(Catalogue(30, {}, CATALOGUE.people), Rng.of(0))
        with pytest.raises(HomebodyError, match="did you mean 'habits'"):
            replace(METHOD, views="habit").init_shared(CATALOGUE, Rng.of(0))
        with pytest.raises(HomebodyError, match="There is no feature of items 'titel'"):
            replace(METHOD, features="titel").init_shared(CATALOGUE, Rng.of(0))

    @pytest.mark.parametrize("fields", [{"views": "a,a"}, {"views": "item"}, {"widths": "64"}])
    def test_senseless_fields(self, fields: dict[str, str]) -> None:
        with pytest.raises(HomebodyError):
            FLMVDSSM(**fields)  # type: ignore[arg-type]


def test_the_kernel_trims_padding_and_nothing_else() -> None:
    """Clients that touch very different numbers of rows; the contract compares the numbers."""
    people = [client([3]), client([3, 8, 12, 20, 25])]
    shared = METHOD.init_shared(CATALOGUE, Rng.of(1))
    batches = [_padded(METHOD.prepare(one, Rng.of(2))) for one in people]
    stacked = {name: torch.stack([batch[name] for batch in batches]) for name in batches[0]}
    fused, _ = train_many(METHOD, shared, {}, stacked)
    assert fused["profile/item/first"].index.shape[1] <= batches[1]["index"].shape[0]
    for number, batch in enumerate(batches):
        own = METHOD.client(shared, {}, batch)[0]["profile/item/first"]
        rows = fused["profile/item/first"]
        assert_close(Rows(rows.index[number], rows.value[number], rows.size).dense(), own.dense())


def test_the_kernel_weighs_numbers_of_items() -> None:
    """Titles and genres count once each; a number counts as itself, on the way there and back."""
    prices = Column(torch.linspace(-2, 3, CATALOGUE.n_items), 1, "number")
    catalogue = replace(CATALOGUE, items={**CATALOGUE.items, "price": prices})
    method = replace(METHOD, features=",".join(catalogue.items))
    data = client([3, 8, 12, 20, 25])._replace(catalogue=catalogue)
    shared = method.init_shared(catalogue, Rng.of(1))
    batch = method.prepare(data, Rng.of(2))
    assert not set(batch["weight"].flatten().tolist()) <= {0.0, 1.0}
    fused, _ = train_many(method, shared, {}, {name: value[None] for name, value in batch.items()})
    for name, value in method.client(shared, {}, batch)[0].items():
        one = fused[name]
        own = Rows(one.index[0], one.value[0], one.size).dense() if isinstance(one, Rows) else one[0]
        assert_close(own, value.dense() if isinstance(value, Rows) else value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [False, True], ids=["FL-MV", "SEMI"])
def test_people_of_all_lengths_in_one_group_train_as_those_of_similar_length_do(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes them together, plain `client` by length; few take part, so that a round mixes old and new."""
    monkeypatch.setattr(states, "SMALL", 8)
    method = FLMVDSSM(widths="6,5,3", negatives=3, batch_size=4, aggregate_users=not own)
    found = []
    for fused in (True, False):
        simulator = Simulator(described(), fused=fused)
        assert len(simulator._store._buckets) > 3
        fitted = fit(method, simulator, rounds=6, cohort=20, evaluate_every=0)
        locals_ = {
            user: simulator.private_state(method, fitted.shared, user) for user in range(simulator.split.n_users)
        }
        found.append((fitted.shared, locals_))
    assert_close(*found, rtol=1e-5, atol=1e-5)


def _padded(batch: Batch) -> Batch:
    """A batch of 4 positives, whoever has fewer."""
    short = 4 - len(batch["real"])

    def more(value: Tensor, rows: int, fill: float) -> Tensor:
        return torch.cat([value, value.new_full((rows, *value.shape[1:]), fill)])

    drawn = batch["real"].shape[1]
    return {
        **batch,
        "index": more(batch["index"], 8 - len(batch["index"]), -1),
        "place": more(batch["place"], short * drawn, 0),
        "weight": more(batch["weight"], short * drawn, 0.0),
        "real": more(batch["real"], short, False),
    }


def _dense(tree: Tree) -> Tree:
    return {name: value.dense() if isinstance(value, Rows) else value for name, value in tree.items()}
