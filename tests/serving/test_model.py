"""A model that is served: what a device ranks with is what was trained, and whoever never trained is ranked for too."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from homebody.errors import HomebodyError
from homebody.federation.wire import Malformed, decode_letter, encode_letter
from homebody.methods import build
from homebody.privacy.queries import Query
from homebody.rng import Rng
from homebody.serving.model import AtHome, Head, Served, interest_of, rank
from homebody.serving.rows import Part, join
from homebody.simulation import Simulator
from homebody.testing import described, impressed
from homebody.training import Trained, fit

FIELDS = {
    "fedials": {"factors": 6},
    "fedmf": {"factors": 6},
    "pfedrec": {"factors": 6},
    "fedrecon": {"factors": 6, "rebuild": 2},
    "fedgnn": {"factors": 6},
    "fed-mvmf": {"factors": 4},
    "privrec": {"factors": 4, "hidden": "8", "adapt_epochs": 2},
    "private-popularity": {},
    "fl-mv-dssm": {"widths": "8,4"},
    "dplcf": {"neighbours": 5},
}

NEWS = {
    "fedrec": {"encoder": "id", "d": 6},
    "privaterec": {"encoder": "id", "d": 6, "basis": 4, "reports": 2, "steps": 2},
}


@cache
def trained(name: str) -> Trained:
    method = build(name, {**FIELDS, **NEWS}[name])
    people = impressed() if name in NEWS else described()
    return fit(method, Simulator(people), rounds=2, evaluate_every=0)


@cache
def served(name: str, query: str = "") -> Served:
    fitted = trained(name)
    count = fitted.runtime.catalogue.n_items
    ids = [f"i{number}" for number in range(count)]
    asked = Query.parse(query) if query else None
    return Served.of_fitted(fitted, name, {**FIELDS, **NEWS}[name], asked, ids=ids, names={"i0": "the first"})


def person(name: str, user: int) -> AtHome:
    """One of the simulation's people, as their device knows them."""
    fitted = trained(name)
    runtime, model = fitted.runtime, served(name)
    data = runtime._client_data(*(part[0] for part in runtime._data(torch.tensor([user]).numpy())))
    local = runtime.private_state(fitted.method, fitted.shared, user)
    table = runtime.split.population.user_features.table
    features = {column: table[column][user] for column in model.head.codes.get("people", {})}
    items = [model.ids[item] for item in data.items[data.valid].tolist()]
    return AtHome(items, features=features, local=local)


def whole(part: Part, model: Served) -> Part:
    """The part with rows as they are, without their rounding to 8 bits."""
    rows = model.head.serving.rows(model.method, model.shared, part.items)
    return Part(part.model, part.version, part.ids, part.items, rows, part.whole, part.features, part.names)


@pytest.mark.parametrize("name", FIELDS)
def test_a_device_ranks_all_rows_as_the_simulation_does(name: str) -> None:
    model, fitted = served(name), trained(name)
    head = Head.read(model.head.content)
    assert head.digest == model.digest
    for user in (0, 7):
        theirs = person(name, user)
        ranked = rank(head, whole(model.rows(), model), theirs, 120)
        assert not ranked.notes
        expected = fitted.runtime.scores(fitted.method, model.shared, user)
        scores = torch.tensor([score for _, score in ranked.items])
        same = expected[torch.tensor([model.ids.index(item) for item, _ in ranked.items])]
        assert len(ranked.items) == 120 - len(set(theirs.items))
        if fitted.method.scoring.parameters == "latest":
            torch.testing.assert_close(scores, same, rtol=1e-3, atol=1e-4)
        else:  # it adapts with its own random numbers, or ranks from where it trained
            assert torch.corrcoef(torch.stack([scores, same]))[0, 1] > 0.6


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("dplcf", "fl-mv-dssm")])
def test_a_shelf_and_ones_own_rows_are_scored_as_the_whole_table(name: str) -> None:
    model, theirs = served(name), person(name, 3)
    own = [model.ids.index(item) for item in theirs.items]
    shelf = join(whole(model.rows(model.shelf(20)), model), whole(model.rows(own), model))
    part = Part.read(shelf.content)
    torch.testing.assert_close(part.rows, shelf.rows)
    some, all_ = (dict(rank(model.head, rows, theirs, 120).items) for rows in (part, whole(model.rows(), model)))
    assert set(some) == {model.ids[item] for item in model.shelf(20)} - set(theirs.items)
    if trained(name).method.scoring.parameters != "adapted":
        for item, score in some.items():
            assert score == pytest.approx(all_[item], rel=1e-3, abs=1e-4)


def test_eight_bits_hardly_change_scores() -> None:
    model, theirs = served("fedials"), person("fedials", 3)
    parts = model.rows(), whole(model.rows(), model)
    rounded, exact = (dict(rank(model.head, part, theirs, 120).items) for part in parts)
    assert max(abs(rounded[item] - exact[item]) for item in exact) < 0.02 * max(map(abs, exact.values()))


def test_who_never_trained_adapts_as_a_newcomer_does() -> None:
    for name in ("fedials", "fedmf", "privrec"):
        model, fitted = served(name), trained(name)
        theirs = AtHome([model.ids[item] for item in (3, 9, 40)])
        newcomer = fitted.ranked_for([3, 9, 40], k=120)
        expected = dict(newcomer.items)
        ranked = rank(model.head, whole(model.rows(), model), theirs, 120)
        found = {model.ids.index(item): score for item, score in ranked.items}
        assert found.keys() == expected.keys()
        both = torch.tensor([[found[item], expected[item]] for item in expected]).T
        assert torch.corrcoef(both)[0, 1] > (0.999 if name == "fedials" else 0.8)


def test_own_items_without_rows_are_left_out_and_counted() -> None:
    model = served("fedials")
    ranked = rank(model.head, model.rows(model.shelf(10)), AtHome(["i0", "elsewhere"]), 5)
    missing = 1 if 0 in model.shelf(10) else 2
    assert ranked.notes == (f"{missing} of their 2 items had no rows here and did not count.",)
    assert len(ranked.items) == 5


def test_somebody_without_history_gets_the_shelf_and_tells_an_even_interest() -> None:
    model = served("fedials", "choice:epsilon=5,interests=4")
    part = model.rows(model.shelf(30))
    nothing = interest_of(model.head, part, AtHome())
    assert not nothing.any()
    told = torch.stack([model.head.tell(nothing, Rng.of(seed)) for seed in range(400)])
    # Each of four is told about 100 times; 40 is seven deviations away.
    assert torch.bincount(told, minlength=4).min() > 40
    assert [item for item, _ in rank(model.head, part, AtHome(), 5).items] == list(part.ids[:5])
    assert [item for item, _ in rank(model.head, part, AtHome(), 10).items] == list(part.ids[:10])


def test_an_interest_is_the_same_from_a_part_and_told_within_the_list() -> None:
    model, theirs = served("fedials", "choice:epsilon=5,interests=4"), person("fedials", 3)
    own = [model.ids.index(item) for item in theirs.items]
    few, all_ = (interest_of(model.head, whole(part, model), theirs) for part in (model.rows(own), model.rows()))
    torch.testing.assert_close(few, all_)
    lists = model.lists(10)
    assert lists.shape == (4, 10)
    assert not set(lists.flatten().tolist()) & set(model.shelf(10).tolist())
    fit = model.places @ model.head.interests.T
    kept = torch.ones(120, dtype=torch.bool)
    kept[model.shelf(10)] = False
    for choice in range(4):
        best = torch.where(kept, fit[:, choice], -torch.inf).argsort(descending=True, stable=True)[:10]
        assert lists[choice].tolist() == best.tolist()


@pytest.mark.parametrize(
    "query",
    [
        "choice:epsilon=50,interests=4",
        "unit:epsilon=80",
        "attention:epsilon=100,interests=4",
        "vector:epsilon=100,delta=1e-5",
    ],
)
def test_the_server_looks_where_a_query_points(query: str) -> None:
    model, theirs = served("fedials", query), person("fedials", 3)
    interest = interest_of(model.head, model.rows(), theirs)
    heard = model.head.heard(model.head.tell(interest, Rng.of(1)))
    assert heard.shape == interest.shape
    assert torch.nn.functional.cosine_similarity(heard, interest, dim=0) > 0.3
    best, scores = model.ask(model.head.tell(interest, Rng.of(1)), 7)
    assert scores.tolist() == sorted(scores.tolist(), reverse=True)
    assert len(set(best.tolist())) == 7


def test_who_trained_has_an_interest_without_any_rows() -> None:
    model, theirs = served("fedmf", "choice:epsilon=5,interests=4"), person("fedmf", 3)
    elsewhere = [item for item in range(120) if model.ids[item] not in theirs.items][:5]
    assert theirs.local is not None
    assert torch.equal(interest_of(model.head, model.rows(elsewhere), theirs), theirs.local["user"])
    assert not interest_of(model.head, model.rows(elsewhere), theirs._replace(local=None)).any()


def test_interests_are_of_the_model_and_not_of_its_items() -> None:
    one, other = (served("fedials", f"choice:epsilon={number},interests=4") for number in (5, 6))
    assert one.digest != other.digest
    assert served("fedials").digest not in (one.digest, other.digest)
    assert torch.equal(one.head.interests, other.head.interests)
    torch.testing.assert_close(one.head.interests.norm(dim=1), torch.ones(4))


@pytest.mark.parametrize(
    ("name", "query", "sentence"),
    [
        ("ials", "", "collects everyone's histories"),
        ("alone", "", "learns nothing from others"),
        ("dplcf", "choice:epsilon=5", "served by table alone"),
        ("mine.py:Mine", "", "come with Homebody"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(name: str, query: str, sentence: str) -> None:
    model = served("dplcf")
    asked = Query.parse(query) if query else None
    with pytest.raises(HomebodyError, match=sentence):
        Served.of(name, {}, model.shared, model.catalogue, asked, ids=model.ids)


def test_rows_of_another_model_are_refused() -> None:
    one, other = served("fedials"), served("fedmf")
    with pytest.raises(HomebodyError, match="another model"):
        rank(one.head, other.rows(), AtHome(), 5)
    with pytest.raises(HomebodyError, match="two models"):
        join(one.rows(), other.rows())


def test_another_training_or_another_catalogue_is_another_model() -> None:
    one = served("fedmf")
    about = ("fedmf", FIELDS["fedmf"])
    again = Served.of(*about, one.shared, one.catalogue, None, ids=one.ids, codes=one.head.codes)
    assert again.digest == one.digest
    longer = {**one.shared, "item": one.shared["item"] * 1.5}
    others = [
        Served.of(*about, longer, one.catalogue, None, ids=one.ids),
        Served.of(*about, one.shared, one.catalogue, None, ids=one.ids[::-1]),
        Served.of(*about, one.shared, one.catalogue, None, ids=one.ids, run="devices"),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 4
    assert Head.read(others[-1].head.content).run == "devices"


def test_a_model_or_part_that_was_changed_on_the_way_is_malformed() -> None:
    model = served("fedials", "choice:epsilon=5,interests=4")
    header, parts = decode_letter(model.head.content)
    for change in ({"method": 3.5, "fields": 1}, {"size": "many"}, {"query": None, "size": 2}):
        with pytest.raises((Malformed, HomebodyError)):
            Head.read(encode_letter({**header, **change}, parts))
    for count in (1, 1001):  # one is no choice; the choices of many would not all have three digits
        other = replace(model.head, interests=torch.zeros(count, model.head.size), levels=torch.zeros(count))
        with pytest.raises(Malformed, match="interests"):
            Head.read(other.content)
    header, parts = decode_letter(model.rows([1, 2]).content)
    for change in (
        {"ids": b'["a","a"]'},
        {"ids": b"[1,2]"},
        {"ids": b'["a"]'},
        {"rows": parts["whole"]},
        {"names": b"{}"},
    ):
        with pytest.raises(Malformed):
            Part.read(encode_letter(header, {**parts, **change}))


def test_the_letter_of_rows_takes_a_byte_a_number() -> None:
    model = served("fedials")
    part = model.rows()
    assert part.tables["item"].dtype == torch.int8
    assert len(part.content) < 120 * (6 + 4 + 4 + 10) + 2000
    assert part.names == {"i0": "the first"}
    assert Part.read(part.content).content == part.content


@pytest.mark.parametrize("name", ["fedncf", "pfedrec", "privrec", "fedials"])
def test_rows_of_other_shapes_are_refused_before_anything_reads_them(name: str) -> None:
    FIELDS.setdefault(name, {"factors": 6, "hidden": "8"})
    model, part = served(name), served(name).rows([1, 2, 3])
    narrow = replace(part, tables={"item": part.tables["item"][:, :2], "item:scale": part.tables["item:scale"]})
    strange = replace(part, tables={**part.tables, "more": part.tables["item"]})
    for wrong in (narrow, strange, replace(part, tables={})):
        with pytest.raises(HomebodyError, match="not those of the method"):
            rank(model.head, wrong, AtHome(), 2)
    if model.head.shared:
        first = next(iter(model.head.shared))
        head = replace(model.head, shared={**model.head.shared, first: torch.zeros(1)})
        with pytest.raises(HomebodyError, match="not those of the method"):
            rank(head, replace(part, model=head.digest), AtHome(), 2)
    if model.head.codes["items"]:
        codes = {feature: torch.full_like(values, 10**6) for feature, values in part.features.items()}
        with pytest.raises(HomebodyError, match="does not have"):
            rank(model.head, replace(part, features=codes), AtHome(), 2)


def test_a_state_of_another_model_counts_as_none() -> None:
    model, theirs = served("fedmf"), person("fedmf", 3)
    other = theirs._replace(local={"user": torch.zeros(3)})
    ranked = rank(model.head, model.rows(), other, 5)
    assert ranked.notes == ("Their state is of another model: they are ranked for as a newcomer.",)
    assert ranked.items == rank(model.head, model.rows(), theirs._replace(local=None), 5).items


@pytest.mark.parametrize("name", NEWS)
def test_news_are_ranked_from_the_vectors_that_their_encoder_made(name: str) -> None:
    model, fitted = served(name, "choice:epsilon=50"), trained(name)
    assert model.head.ways == ("table", "shelf", "query", "server")
    assert not any(part.startswith("news/") for part in model.head.shared)
    head, part = Head.read(model.head.content), whole(model.rows(), model)
    data = fitted.runtime._client_data(*(part[0] for part in fitted.runtime._data(torch.tensor([3]).numpy())))
    theirs = AtHome([model.ids[item] for item in data.items[data.valid].tolist()])
    expected = fitted.runtime.scores(fitted.method, model.shared, 3)
    if name == "fedrec":
        for item, score in rank(head, part, theirs, 20).items:
            assert score == pytest.approx(float(expected[model.ids.index(item)]), rel=1e-3, abs=1e-4)
    # The server ranks by the basis vector that a device chose, as the device itself does.
    told = head.tell(interest_of(head, part, theirs), Rng.of(2))
    best, scores = model.ask(told, 5)
    assert scores.tolist() == sorted(scores.tolist(), reverse=True)
    if name == "privaterec":
        assert head.own_basis
        assert best[0] == expected.argmax()
    assert rank(head, part, AtHome(), 3).items
