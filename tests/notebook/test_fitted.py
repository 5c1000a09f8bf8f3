"""A fitted model: its frames say users and items as the data does, and equal what devices would rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import homebody as hb
from homebody.data import Population
from homebody.data.population import Features, UserItems, build


@pytest.fixture(scope="module")
def people() -> Population:
    """120 people with names, 60 items with ids and titles."""
    plain = hb.load("synthetic:users=120,items=60,mean=10")
    owner = np.repeat(np.arange(plain.n_users), plain.lengths)
    users = pl.Series([f"u{user:03d}" for user in owner])
    made = build("shop", users, pl.Series(plain.items * 10), times=pl.Series(np.arange(len(owner))))
    titles = pl.Series([f"title {item}" for item in range(made.n_items)])
    return Population(**{**vars(made), "item_names": titles})


@pytest.fixture(scope="module", params=["fedials", "fedmf", "pfedrec", "fedrecon"])
def model(request: pytest.FixtureRequest, people: Population) -> hb.Fitted:
    return hb.fit(request.param, people, rounds=3, cohort=60, quiet=True)


class TestRecommend:
    def test_a_block_of_people_gets_what_each_alone_gets(self, model: hb.Fitted, people: Population) -> None:
        frame = model.recommend("all", k=5)
        assert frame.columns == ["user", "rank", "item", "name", "score"]
        assert frame["user"].unique(maintain_order=True).to_list() == people.user_ids.to_list()  # type: ignore[union-attr]
        for user in range(0, people.n_users, 7):
            alone = model.trained.ranked(user, k=people.n_items)
            theirs = frame.filter(pl.col("user") == f"u{user:03d}")
            assert theirs["rank"].to_list() == [1, 2, 3, 4, 5]
            scores = dict(alone)
            numbers = [people.item(str(item)) for item in theirs["item"]]
            assert theirs["score"].to_list() == pytest.approx([scores[item] for item in numbers], rel=1e-3, abs=1e-4)
            assert theirs["score"].to_list() == pytest.approx([s for _, s in alone[:5]], rel=1e-3, abs=1e-4)
            assert theirs["name"].to_list() == [people.item_name(item) for item in numbers]

    def test_nobody_gets_what_they_have(self, model: hb.Fitted, people: Population) -> None:
        frame = model.recommend("all", k=people.n_items)
        for user in (0, 50, 119):
            items = frame.filter(pl.col("user") == f"u{user:03d}")["item"].to_list()
            had = {int(people.item_id(item)) for item in people.history(user)}
            assert not had & set(items)
            assert len(items) == people.n_items - len(had)

    def test_one_some_and_in_the_order_asked_for(self, model: hb.Fitted) -> None:
        one = model.recommend("u007", k=3)
        some = model.recommend(["u009", "u007", "u009"], k=3)
        assert some["user"].to_list() == ["u009"] * 3 + ["u007"] * 3 + ["u009"] * 3
        assert some[3:6]["item"].to_list() == one["item"].to_list()
        assert model.recommend(pl.Series(["u007"]), k=3).equals(one)
        assert model.recommend([], k=3).height == 0

    @pytest.mark.parametrize(
        ("asked", "sentence"),
        [
            (lambda m: m.recommend("nobody"), "There is no user 'nobody'"),
            (lambda m: m.recommend(["u001", "nobody"]), "There is no user 'nobody'"),
            (lambda m: m.recommend(3), "There is no user '3'.*the first is called u000"),
            (lambda m: m.recommend("u001", k=0), "At least 1 item"),
            (lambda m: m.recommend_for(["no such thing"]), "There is no item 'no such thing'"),
            (lambda m: m.recommend("u001", now={"weather": "sunny"}), "circumstance"),
        ],
    )
    def test_what_is_not_there_gets_a_sentence(self, model: hb.Fitted, asked: Any, sentence: str) -> None:
        with pytest.raises(hb.HomebodyError, match=sentence):
            asked(model)

    def test_somebody_new(self, model: hb.Fitted, people: Population) -> None:
        frame = model.recommend_for([30, "title 5"], k=4)
        expected = model.trained.ranked_for([people.item("30"), 5], k=4).items
        assert frame.columns == ["rank", "item", "name", "score"]
        assert [people.item(str(item)) for item in frame["item"]] == [item for item, _ in expected]
        assert frame["score"].to_list() == pytest.approx([score for _, score in expected])
        assert model.recommend_for("30", k=4).equals(model.recommend_for([30], k=4))

    def test_what_is_ignored_is_a_warning(self, people: Population) -> None:
        model = hb.fit("fedials", people, rounds=1, quiet=True)
        with pytest.warns(UserWarning, match="FedIALS does not look at ratings"):
            model.recommend_for([30], ratings=[5])

    def test_users_and_items_without_names_are_numbers(self) -> None:
        model = hb.fit("fedials", "synthetic:users=60,items=40,mean=8", rounds=1, quiet=True)
        frame = model.recommend([5, "7"], k=2)
        assert frame.columns == ["user", "rank", "item", "score"]
        assert frame["user"].to_list() == [5, 5, 7, 7]

    def test_in_a_context(self, people: Population) -> None:
        rng = np.random.default_rng(0)
        weather = pl.DataFrame({"weather": rng.choice(["sunny", "rainy"], people.n_interactions)})
        around = Population(**{**vars(people), "contexts": Features(weather, {"weather": "categorical"})})
        described = {"age": Features(pl.DataFrame({"age": rng.integers(18, 60, people.n_users)}), {"age": "numeric"})}
        around = Population(**{**vars(around), "user_features": described["age"]})
        model = hb.fit(hb.PrivRec(factors=4), around, rounds=2, cohort=30, quiet=True)
        sunny = model.recommend("all", k=3, now={"weather": "sunny"})
        assert not sunny.equals(model.recommend("all", k=3))
        one = model.runtime.recommend_in(model.trained.method, model.shared, 4, 3, {"weather": "sunny"}).items
        theirs = sunny.filter(pl.col("user") == sunny["user"].unique(maintain_order=True)[4])
        assert theirs["score"].to_list() == pytest.approx([score for _, score in one], rel=1e-4)

    def test_what_lies_in_another_app_is_left_out(self, people: Population) -> None:
        there = UserItems.of(np.array([0, 0, 5]), np.array([1, 2, 3]), people.n_users)
        elsewhere = Population(**{**vars(people), "elsewhere": there})
        model = hb.fit("fedials", elsewhere, rounds=1, quiet=True)
        first = model.recommend("u000", k=people.n_items)["name"].to_list()
        assert not {"title 1", "title 2"} & set(first)


class TestReferences:
    def test_they_recommend_by_the_chosen_pass(self, people: Population) -> None:
        model = hb.fit("ials", people, rounds=4, quiet=True)
        again = hb.fit("ials", people, rounds=model.chosen, quiet=True)
        frame = model.recommend("all", k=4)
        assert frame.equals(again.recommend("all", k=4))
        assert frame.height == 4 * people.n_users

    def test_popularity_is_popularity(self, people: Population) -> None:
        model = hb.fit("popularity", people, quiet=True)
        best = model.recommend("u000", k=1)["item"].item()
        counts = np.bincount(model.split.histories().items, minlength=people.n_items).astype(float)
        counts[people.history(0)] = -1
        assert counts[people.item(str(best))] == counts.max()

    @pytest.mark.parametrize("ask", [lambda m: m.recommend_for([30]), lambda m: m.shared, lambda m: m.runtime])
    def test_what_they_have_not_gets_a_sentence(self, people: Population, ask: Any) -> None:
        with pytest.raises(hb.HomebodyError, match="centralised reference"):
            ask(hb.fit("popularity", people, quiet=True))


class TestTheRecord:
    def test_history_has_a_row_a_round(self, people: Population) -> None:
        settings: dict[str, Any] = {"stages": ["clip:norm=1", "gaussian:z=2"], "evaluate_every": 2}
        model = hb.fit("fedmf", people, rounds=5, quiet=True, **settings)
        assert model.history["round"].to_list() == [1, 2, 3, 4, 5]
        assert model.history["hr@10"].null_count() == 2
        assert model.history["epsilon/public"].is_sorted()
        assert model.history["epsilon/public"][-1] == pytest.approx(model.epsilon["public"])
        assert (model.history["epsilon/server"] == math.inf).all()
        chosen = model.history.filter(pl.col("step") == model.chosen)
        assert chosen["valid/ndcg@10"].item() == model.metrics["valid/ndcg@10"]

    def test_its_repr_is_one_line_and_its_html_a_table(self, people: Population) -> None:
        model = hb.fit("fedials", people, rounds=1, quiet=True)
        assert repr(model).startswith("Fitted(fedials on shop: HR@10 0.")
        assert "\n" not in repr(model)
        html = model._repr_html_()
        assert html.startswith("<div><b>fedials on shop</b><table>")
        assert "ε, server" in html

    def test_names_in_html_are_text(self, people: Population) -> None:
        odd = Population(**{**vars(people), "name": "<script>x"})
        assert "<script>" not in hb.fit("popularity", odd, quiet=True)._repr_html_()

    def test_shared_parameters_and_charges(self, people: Population) -> None:
        model = hb.fit("fedials", people, rounds=2, quiet=True)
        assert isinstance(model.shared["item"], torch.Tensor)
        assert model.ledger.releases() == 2

    def test_accounting_and_audits_take_it(self, people: Population) -> None:
        model = hb.fit("fedmf", people, rounds=3, stages=["clip:norm=1", "gaussian:z=2"], quiet=True)
        stated = hb.account.statement(model)
        public = next(row for row in stated.details["certified"] if row["observer"] == "public")
        assert public["epsilon"] == pytest.approx(model.epsilon["public"])
        assert hb.account.ledger(model)["count"].to_list()[0] == 3
        assert hb.audit.interactions(model, users=5).frame.height == 2
