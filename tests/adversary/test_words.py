"""Clicked words, read off the gradient of a news encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.adversary.news import SMALL, started

from homebody.adversary.words import drawn, named, read_words
from homebody.core import Tree, Update
from homebody.errors import HomebodyError
from homebody.methods.dp_fedrec import DPFedRec
from homebody.methods.fedmf import FedMF
from homebody.methods.fedrec import FedRec
from homebody.methods.privaterec import PrivateRec
from homebody.privacy import Channel, Clip, SecureSum
from homebody.rng import Rng


@pytest.mark.parametrize("encoder", ["nrms", "naml", "id"])
@pytest.mark.parametrize(
    "method",
    [FedRec(**SMALL), PrivateRec(**SMALL, guarantee="published"), FedRec(**SMALL, uplink=Channel(Clip(0.1)))],  # type: ignore[arg-type]
    ids=["fedrec", "published", "clipped"],
)
def test_the_server_reads_what_was_clicked(method: FedRec, encoder: str) -> None:
    method = replace(method, encoder=encoder)
    found = read_words(method, *started(method), users=20).as_dict()
    assert (found["users"], found["skipped"]) == (20, 0)
    assert found["table"] == ("news/item" if encoder == "id" else "news/word")
    assert found["precision"][0] >= 0.95
    assert found["recall"][0] >= 0.95
    assert found["frequent_precision"][0] < 0.6
    for name in ("precision", "recall", "frequent_recall"):
        value, low, high = found[name]
        assert low <= value <= high


def test_a_vector_of_each_news_item_gives_the_items_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A language model's vectors are not trained, and what is added to them is."""
    monkeypatch.setattr("homebody.text_vectors.text_vectors", lambda texts: Rng.of(2).normal(len(texts), 384))
    method = FedRec(**SMALL, encoder="plm", ids=True)  # type: ignore[arg-type]
    simulator, shared = started(method)
    found = read_words(method, simulator, shared, users=20).as_dict()
    assert (found["table"], found["kind"]) == ("news/own", "items")
    assert found["precision"][0] == found["recall"][0] == 1.0
    user, rng = int(simulator.available()[0]), Rng.of(8)
    about = drawn(method, simulator, shared, user, rng)
    read = set(about.history[about.read].tolist()) - set(about.shown.tolist())
    sent = simulator.message(method, shared, user, rng)
    assert set(named(method, simulator, shared, user, rng, sent)) == {
        simulator.split.population.item_name(item) for item in read
    }


def test_what_is_to_be_found_is_the_history_without_what_was_shown() -> None:
    """Worked out from the split's own tables, for one client."""
    method = FedRec(**SMALL, encoder="nrms", latest=3)  # type: ignore[arg-type]
    simulator, shared = started(method)
    user, rng = int(simulator.available()[4]), Rng.of(8)
    about = drawn(method, simulator, shared, user, rng)
    (items, clicked, before) = (part[0] for part in simulator.split.padded_shown(simulator.available()[4:5]))
    assert about.shown.tolist() == items[0].tolist()
    assert about.clicked.tolist() == clicked[0].tolist()
    last = simulator.split.training(user)[: int(before[0])][-3:]
    assert about.history[about.read].tolist() == last.tolist()
    assert simulator.split.population.item_features is not None
    titles = simulator.split.population.item_features.table["title"]
    expected = {word for item in last.tolist() for word in titles[item].split()}
    expected -= {word for item in items[0].tolist() for word in titles[item].split()}
    sent = simulator.message(method, shared, user, rng)
    assert set(named(method, simulator, shared, user, rng, sent)) == expected


def test_hidden_news_are_not_to_be_found() -> None:
    method = PrivateRec(**SMALL, encoder="id", guarantee="published", padding=0.6)  # type: ignore[arg-type]
    simulator, shared = started(method)
    hidden = [int((~one.read & (one.history < simulator.catalogue.n_items)).sum()) for one in (
        drawn(method, simulator, shared, int(user), Rng.of(8)) for user in simulator.available()[:20])]  # fmt: skip
    assert sum(hidden) > 20
    found = read_words(method, simulator, shared, users=20).as_dict()
    assert found["recall"][0] == found["precision"][0] == 1.0


def test_an_attack_that_misses_words_has_a_lower_recall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are of the message: half of its rows blanked, half of the words are gone."""
    method = FedRec(**SMALL, encoder="nrms")  # type: ignore[arg-type]
    simulator, shared = started(method)
    whole = type(simulator).message

    def blanked(self: Any, acting: Any, shared: Tree, user: int, rng: Rng) -> Update:
        sent = whole(self, acting, shared, user, rng)
        if acting is method:
            table = sent["news/word"]
            assert isinstance(table, torch.Tensor)
            sent["news/word"] = torch.where(torch.arange(len(table))[:, None] % 2 == 0, table, 0.0)
        return sent

    monkeypatch.setattr(type(simulator), "message", blanked)
    found = read_words(method, simulator, shared, users=20).as_dict()
    assert found["precision"][0] == 1.0
    assert 0.3 < found["recall"][0] < 0.7


def test_noise_on_the_device_leaves_little() -> None:
    for guarantee in ("published", "certified"):
        method = DPFedRec(**SMALL, encoder="nrms", guarantee=guarantee)  # type: ignore[arg-type]
        simulator, shared = started(method)
        found = read_words(method, simulator, shared, users=20).as_dict()
        assert found["rule"].startswith("the rows that moved farthest")
        assert found["recall"][0] < 0.5
        user = int(simulator.available()[0])
        sent = simulator.message(method, shared, user, Rng.of(8))
        assert named(method, simulator, shared, user, Rng.of(8), sent) == []


def test_the_same_seed_reads_the_same() -> None:
    method = FedRec(**SMALL, encoder="nrms")  # type: ignore[arg-type]
    first, again, other = (read_words(method, *started(method), users=5, seed=seed).as_dict() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_refusals() -> None:
    method = FedRec(**SMALL, encoder="nrms")  # type: ignore[arg-type]
    simulator, shared = started(method)
    with pytest.raises(HomebodyError, match="FedMF trains no encoder of news"):
        read_words(FedMF(), simulator, shared)
    with pytest.raises(HomebodyError, match="at least 1 user"):
        read_words(method, simulator, shared, users=0)
    with pytest.raises(HomebodyError, match="gets a sum alone"):
        read_words(replace(method, uplink=Channel(Clip(1.0), SecureSum())), simulator, shared)
    with pytest.raises(HomebodyError, match="encoder plm trains no vectors"):
        read_words(replace(method, encoder="plm"), simulator, {"pad": shared["pad"]})
