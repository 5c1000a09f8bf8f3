"""Recommendations for somebody whom training never met: from a few items, with what they say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from homebody.core import Data, Method, Newcomer, Tree
from homebody.data import Population, load
from homebody.data.partitions import split
from homebody.data.population import Features
from homebody.data.splits import Split
from homebody.errors import Diverged, HomebodyError
from homebody.methods.fedials import FedIALS
from homebody.methods.fedmf import FedMF
from homebody.methods.fedncf import FedNCF
from homebody.methods.fedrecon import FedRecon
from homebody.methods.fmf_ldp import FMFLDP
from homebody.methods.pfedrec import PFedRec
from homebody.methods.privrec import PrivRec
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.run import execute
from homebody.simulation import Simulator
from homebody.simulation.newcomers import newcomer_split
from homebody.suggest import recommend_for, recommend_to
from homebody.training import Trained, fit

SMALL = PrivRec(factors=4, hidden="8", epochs=2, negatives=2)
METHODS: dict[str, Method] = {
    "privrec": SMALL,
    "fedmf": FedMF(factors=4, item_rate=1.0),
    "fedncf": FedNCF(),
    "fedrecon": FedRecon(factors=4),
    "pfedrec": PFedRec(factors=4, item_rate=1.0),
    "fedials": FedIALS(factors=4),
    "fmf-ldp": FMFLDP(factors=4),
}
CLICKS = [3, 14, 15, 9, 26]


@pytest.fixture(scope="module")
def people() -> Population:
    plain = load("synthetic:users=30,items=40,mean=12")
    rng = np.random.default_rng(0)
    who, what, when = plain.n_users, plain.n_items, plain.n_interactions
    return replace(
        plain,
        item_ids=pl.Series([f"i{n}" for n in range(what)]),
        item_names=pl.Series([f"Item, number {n}" for n in range(what)]),
        ratings=rng.integers(1, 6, when).astype(np.float32),
        user_features=Features(
            pl.DataFrame(
                {
                    "age": rng.integers(18, 60, who),
                    "job": rng.choice(["cook", "vet", "poet"], who),
                    "code": rng.choice([1, 25], who),
                    "hobbies": [["chess", "golf"] if n % 2 else ["golf"] for n in range(who)],
                }
            ),
            {"age": "numeric", "job": "categorical", "code": "categorical", "hobbies": "multi-hot"},
        ),
        item_features=Features(pl.DataFrame({"colour": rng.choice(["red", "blue"], what)}), {"colour": "categorical"}),
        contexts=Features(pl.DataFrame({"weather": rng.choice(["sunny", "rainy"], when)}), {"weather": "categorical"}),
    )


@pytest.fixture(scope="module")
def done(people: Population) -> Split:
    return split(people, "leave-one-out", seed=3)


@pytest.fixture(scope="module")
def fitted(done: Split) -> dict[str, Trained]:
    return {
        name: fit(method, Simulator(done), rounds=2, cohort=10, seed=1, evaluate_every=0)
        for name, method in METHODS.items()
    }


@pytest.mark.parametrize("name", METHODS)
def test_a_new_person_gets_what_they_do_not_have_and_the_same_each_time(fitted: dict[str, Trained], name: str) -> None:
    one = fitted[name].ranked_for(CLICKS, k=100)
    assert {item for item, _ in one.items} == set(range(40)) - set(CLICKS)
    scores = [score for _, score in one.items]
    assert scores == sorted(scores, reverse=True)
    assert one == fitted[name].ranked_for(CLICKS, k=100)
    assert one.items[:3] == fitted[name].ranked_for(CLICKS, k=3).items
    assert one.notes == ()


@pytest.mark.parametrize("name", METHODS)
def test_what_they_have_changes_what_they_get(fitted: dict[str, Trained], name: str) -> None:
    """Whoever never trained adapts, also with a method whose own people do not."""
    nothing, some, others = (dict(fitted[name].ranked_for(own, k=40).items) for own in ([], CLICKS, [7, 8, 20]))
    both = some.keys() & others.keys()
    assert any(abs(some[item] - nothing[item]) > 1e-6 for item in some)
    assert any(abs(some[item] - others[item]) > 1e-6 for item in both)


def test_texts_of_items_reach_a_new_person(people: Population) -> None:
    """An encoder that reads texts ranks for somebody new as for anybody."""
    titles = pl.DataFrame({"title": [f"storm number {item}" for item in range(people.n_items)]})
    training = split(replace(people, item_features=Features(titles, {"title": "sequence"})), "leave-one-out")
    made = newcomer_split(METHODS["fedmf"], training, Newcomer((3, 4), {}, {}))
    known, given = (one.catalogue().items["title"] for one in (training, made.split))
    assert given.texts == known.texts
    assert given.texts[3] == "storm number 3"
    assert torch.equal(given.values, known.values)


@pytest.mark.parametrize("name", METHODS)
def test_an_empty_history_ranks_with_the_common_start(fitted: dict[str, Trained], done: Split, name: str) -> None:
    method, shared = METHODS[name], fitted[name].shared
    none = torch.empty(0, dtype=torch.int64)
    rng = Rng.of(1, "train").fold("clients")
    local = method.init_local(shared, rng.fold("local").fold(done.n_users))
    unknown = {
        "age": torch.tensor(0.0),
        "job": torch.tensor(0),
        "code": torch.tensor(0),
        "hobbies": torch.tensor([-1, -1]),
    }
    ratings = none.float() if "ratings" in method.uses else None
    data = Data(none, none.bool(), none, done.catalogue(), unknown, {"weather": none}, ratings)
    scores = method.score(shared, local, data, torch.arange(40))
    told = dict(fitted[name].ranked_for([], k=40).items)
    assert told == {item: pytest.approx(float(scores[item]), rel=1e-4, abs=1e-5) for item in range(40)}


def test_they_adapt_as_the_method_does_with_their_features(fitted: dict[str, Trained], done: Split) -> None:
    """Worked out by hand: the codes are places in the sorted values of training."""
    shared = fitted["privrec"].shared
    ages = done.population.user_features.table["age"].to_numpy()  # type: ignore[union-attr]
    mine = {
        "age": torch.tensor((30 - ages.mean()) / ages.std(), dtype=torch.float32),
        "job": torch.tensor(3),  # cook, poet, vet
        "code": torch.tensor(2),
        "hobbies": torch.tensor([1, -1]),
    }
    items = torch.tensor(CLICKS)
    data = Data(
        *(items, torch.ones(5, dtype=torch.bool), items.sort().values, done.catalogue(), mine),
        {"weather": torch.zeros(5, dtype=torch.int64)},
    )
    rng = Rng.of(1, "train").fold("clients")
    adapted = SMALL.adapt(shared, {}, SMALL.prepare(data, rng.fold("adapt").fold(done.n_users)))
    features = {"age": "30", "job": "vet", "code": 25.0, "hobbies": ["chess"]}
    for now, code in (({}, {}), ({"weather": "sunny"}, {"weather": torch.tensor(2)})):
        wanted = SMALL.score(shared, adapted, data._replace(now=code), torch.arange(40))
        told = dict(fitted["privrec"].ranked_for(CLICKS, features, now, 40).items)
        assert told == {item: pytest.approx(float(wanted[item]), rel=1e-4, abs=1e-5) for item in told}


def test_what_is_said_changes_the_ranking_and_what_is_not_is_unknown(fitted: dict[str, Trained]) -> None:
    ask = fitted["privrec"].ranked_for
    bare = ask(CLICKS)
    assert ask(CLICKS, {"job": "vet"}) != bare
    assert ask(CLICKS, {"age": 40}) != bare
    assert ask(CLICKS, {"hobbies": "chess|golf"}) == ask(CLICKS, {"hobbies": ["golf", "chess"]}) != bare
    assert ask(CLICKS, {"job": None, "age": " "}) == bare
    assert ask(CLICKS, now={"weather": "sunny"}) != bare
    assert ask(CLICKS[:4]).items != bare.items


def test_an_unseen_category_counts_as_unknown_and_is_said(fitted: dict[str, Trained]) -> None:
    ask = fitted["privrec"].ranked_for
    odd = ask(CLICKS, {"job": "astronaut", "hobbies": "golf|go"}, {"weather": "hail"})
    assert odd.notes == (
        "'astronaut' is no job that training knows; it counts as unknown.",
        "'go' is no hobbies that training knows; left out.",
        "'hail' is no weather that training knows; it counts as unknown.",
    )
    without = ask(CLICKS, {"hobbies": ["golf"]}).items
    assert [item for item, _ in odd.items] == [item for item, _ in without]
    assert [score for _, score in odd.items] == pytest.approx([score for _, score in without], rel=1e-4)


def test_repeated_clicks_count_once_and_it_is_said(fitted: dict[str, Trained]) -> None:
    twice = fitted["privrec"].ranked_for([3, 14, 3])
    assert twice.items == fitted["privrec"].ranked_for([3, 14]).items
    assert twice.notes == ("1 repeated interaction was left out: each user's first with an item counts.",)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"items": [40]}, r"There is no item 40: items are numbered 0 to 39\."),
        ({"items": [-1]}, r"There is no item -1"),
        ({"features": {"jobb": "vet"}}, r"There is no feature of people 'jobb'; did you mean 'job'\? Known: age, code"),
        ({"now": {"wether": "sunny"}}, r"There is no circumstance 'wether'; did you mean 'weather'\?"),
        ({"features": {"age": "old"}}, r"age is a number, not 'old': give one, or leave it out\."),
        ({"features": {"age": "nan"}}, r"age is a number, not 'nan'"),
        ({"items": [1, 2], "ratings": [5.0]}, r"Each item needs a rating: 2 items were given, and 1 rating\."),
        ({"items": [1], "ratings": [float("nan")]}, r"A rating must be a finite number\."),
    ],
)
def test_what_cannot_be_taken_is_refused_in_a_sentence(
    fitted: dict[str, Trained], given: dict[str, object], sentence: str
) -> None:
    with pytest.raises(HomebodyError, match=sentence):
        fitted["privrec"].ranked_for(**given)  # type: ignore[arg-type]


def test_what_a_method_does_not_look_at_is_said(fitted: dict[str, Trained]) -> None:
    told = fitted["fedmf"].ranked_for([1, 2], {"job": "vet"}, {"weather": "sunny"}, ratings=[5, 4])
    assert told.notes == ("FedMF does not look at job, weather, ratings.",)
    assert told.items == fitted["fedmf"].ranked_for([1, 2]).items
    assert fitted["privrec"].ranked_for([1, 2], ratings=[5, 4]).notes == ("PrivRec does not look at ratings.",)


def test_ratings_are_adapted_to_where_they_are_predicted(done: Split) -> None:
    explicit = replace(SMALL, output="explicit", learning_rate=0.02)
    found = fit(explicit, Simulator(done), rounds=1, cohort=10, seed=1, evaluate_every=0)
    low, high = (found.ranked_for([1, 2, 3], ratings=[rated] * 3, k=40) for rated in (1.0, 5.0))
    assert np.mean([score for _, score in low.items]) < np.mean([score for _, score in high.items])
    assert low.notes == ()
    assert len(found.ranked_for([], k=40).items) == 40
    with pytest.raises(
        HomebodyError, match="predicts ratings here, so it adapts to those alone: give a rating of each"
    ):
        found.ranked_for([1, 2, 3])


def test_items_are_found_by_id_and_by_name(people: Population) -> None:
    assert people.item("i7") == 7
    assert people.item("item, NUMBER 7") == 7
    with pytest.raises(HomebodyError, match=r"There is no item 'Item number 7'.*did you mean i7, 'Item, number 7'\?"):
        people.item("Item number 7")
    with pytest.raises(HomebodyError, match="There is no item 'zzz' in this population; the first is called i0"):
        people.item("zzz")
    same = replace(people, item_names=pl.Series(["Emma"] * people.n_items))
    with pytest.raises(HomebodyError, match=r"Several items are called 'Emma': give an id \(i0, i1"):
        same.item("Emma")


def test_a_finished_run_recommends_by_the_sources_names(tmp_path: Path) -> None:
    recipe = Recipe("fedmf", "synthetic:users=40,items=30,mean=8", fields={"factors": 4}, rounds=1)
    result = execute(recipe, tmp_path)
    found = recommend_for(Path(result["run"]), ["3", "14"], k=4)
    assert len(found.items) == 4
    assert not {"3", "14"} & {row["item"] for row in found.items}
    assert found.items[0].keys() == {"item", "name", "score"}
    reference = execute(Recipe("popularity", recipe.data), tmp_path)
    with pytest.raises(HomebodyError, match="popularity is a centralised reference: its run keeps figures"):
        recommend_for(Path(reference["run"]), ["3"])


@pytest.mark.parametrize(
    ("features", "now", "sentence"),
    [
        ({"colour": "red"}, {}, "There is no feature of people 'colour': it belongs to items, and people have age, "),
        ({"colours": "red"}, {}, "'colours': 'colour' belongs to items, and people have age, code, hobbies, job."),
        (
            {"weather": "sunny"},
            {},
            "There is no feature of people 'weather': it is a circumstance, and people have age",
        ),
        ({}, {"job": "vet"}, "There is no circumstance 'job': it belongs to people, and circumstances are weather."),
        ({"agee": 3}, {}, "There is no feature of people 'agee'; did you mean 'age'?"),
    ],
)
def test_a_name_of_something_else_is_said_to_be_that(
    fitted: dict[str, Trained], features: dict[str, object], now: dict[str, object], sentence: str
) -> None:
    with pytest.raises(HomebodyError) as refused:
        fitted["privrec"].ranked_for(CLICKS, features, now)
    assert sentence in str(refused.value)


def test_one_of_the_runs_own_people_may_ask_in_circumstances(fitted: dict[str, Trained], done: Split) -> None:
    method, shared, runtime = SMALL, fitted["privrec"].shared, fitted["privrec"].runtime
    assert isinstance(runtime, Simulator)
    plain = runtime.recommend_in(method, shared, 3, 40, {})
    assert plain.items == fitted["privrec"].ranked(3, 40)
    sunny, rainy = (dict(runtime.recommend_in(method, shared, 3, 40, {"weather": w}).items) for w in ("sunny", "rainy"))
    assert sunny.keys() == rainy.keys() == dict(plain.items).keys()
    assert any(abs(sunny[item] - rainy[item]) > 1e-6 for item in sunny)
    hail = runtime.recommend_in(method, shared, 3, 40, {"weather": "hail"})
    assert len(hail.notes) == 1
    assert "hail" in hail.notes[0]
    other = fitted["fedmf"].runtime
    assert isinstance(other, Simulator)
    told = other.recommend_in(METHODS["fedmf"], fitted["fedmf"].shared, 3, 5, {"weather": "sunny"})
    assert told.notes == ("FedMF does not look at weather.",)
    assert told.items == fitted["fedmf"].ranked(3, 5)
    with pytest.raises(HomebodyError, match="There is no circumstance 'moon'"):
        runtime.recommend_in(method, shared, 3, 5, {"moon": "full"})


def test_scores_that_are_no_numbers_are_not_taken_for_having_everything(done: Split) -> None:
    """A device that adapts to ratings beyond all bounds leaves the finite numbers; that is no empty list."""
    method = replace(SMALL, output="explicit")
    fitted = fit(method, Simulator(done), rounds=1, cohort=10, seed=1, evaluate_every=0)
    with pytest.raises(Diverged, match=r"PrivRec adapted to this person until none of its scores was a number: check"):
        fitted.ranked_for([3, 14], ratings=[1e30, -3.0])


def test_what_is_no_number_does_not_push_the_others_out(done: Split) -> None:
    class Torn(PrivRec):
        def score(self, shared: Tree, local: Tree, data: Data, items: torch.Tensor) -> torch.Tensor:
            return torch.where(items % 2 == 0, torch.nan, super().score(shared, local, data, items))

    method = Torn(factors=4, hidden="8", epochs=1)
    fitted = fit(method, Simulator(done), rounds=1, cohort=10, seed=1, evaluate_every=0)
    assert {item for item, _ in fitted.ranked_for([3], k=10).items} < set(range(1, 40, 2)) - {3}
    assert len(fitted.ranked_for([3], k=10).items) == 10


@pytest.mark.parametrize("ask", [recommend_for, recommend_to])
def test_none_asked_for_is_no_answer(ask: Callable[..., object], tmp_path: Path) -> None:
    with pytest.raises(HomebodyError, match=r"^At least 1 item must be asked for, not 0\.$"):
        ask(tmp_path, "i1", k=0)
