"""Texts of items as words in their order."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch

from homebody.data.codes import Code
from homebody.data.encode import encode
from homebody.data.partitions import split
from homebody.data.population import Features, Population
from homebody.data.vocabularies import Words, declare, kinds_of, parse
from homebody.errors import HomebodyError
from homebody.federation.schema import FeatureSchema
from homebody.models.dssm import Vocabulary
from homebody.models.towers import item_rows

TITLES = ["The cat sat; the DOG ran.", None, "Café naïve: a cat", "…"]


def news(titles: list[str | None] = TITLES, **declared: object) -> Features:
    return Features(pl.DataFrame({"title": pl.Series(titles, dtype=pl.String)}), {"title": "sequence"}, declared)


def people(features: Features) -> Population:
    items = np.array([0, 1, 2, 0, 2, 1], dtype=np.int32)
    return Population("toy", np.array([0, 3, 6]), items, n_items=len(features), item_features=features)


def test_words_stand_in_the_order_of_the_text() -> None:
    found = encode(news(), np.ones(4, dtype=np.bool_), unit="items")
    column, code = found.columns["title"], found.codes["title"]
    assert code.values == ("a", "café", "cat", "dog", "naïve", "ran", "sat", "the")
    assert column.values.tolist() == [[8, 3, 7, 8, 4, 6], [-1] * 6, [2, 5, 1, 3, -1, -1], [-1] * 6]
    assert (column.size, column.kind, column.text, code.width) == (9, "sequence", True, 6)
    assert found.notes == ("2 of 4 items have no words of 'title'.",)


def test_texts_that_nobody_met_in_training_are_public_too() -> None:
    found = encode(news(), np.zeros(4, dtype=np.bool_), unit="items")
    assert found.columns["title"].values[0].tolist() == [8, 3, 7, 8, 4, 6]


def test_thirty_words_unless_another_number_is_declared() -> None:
    long = " ".join(f"w{number:02}" for number in range(40))
    assert encode(news([long]), np.ones(1, dtype=np.bool_)).columns["title"].values.shape == (1, 30)
    found = encode(news([long], title=Words(5)), np.ones(1, dtype=np.bool_))
    assert found.columns["title"].values.tolist() == [[1, 2, 3, 4, 5]]
    assert found.codes["title"].values == ("w00", "w01", "w02", "w03", "w04")


def test_a_listed_vocabulary_leaves_other_words_unknown() -> None:
    listed = Code("sequence", ("cat", "dog"), text=True, width=3)
    found = encode(news(title=listed), np.ones(4, dtype=np.bool_), unit="items")
    assert found.columns["title"].values.tolist() == [[0, 1, 0], [-1] * 3, [0, 0, 0], [-1] * 3]
    assert "2 of 4 items have a word of 'title' that its vocabulary does not list" in found.notes[1]


def test_a_code_reads_a_later_text_as_training_did() -> None:
    found = encode(news(), np.ones(4, dtype=np.bool_))
    for title, row in zip(TITLES, found.columns["title"].values, strict=True):
        assert found.codes["title"].of("title", title)[0].tolist() == row.tolist()
    row, note = found.codes["title"].of("title", "a spy, a cat and a dog and more")
    assert row.tolist() == [1, 0, 1, 3, 0, 1]
    assert note == "2 of 6 words of title are unknown to training."
    assert Code.from_json(found.codes["title"].to_json()) == found.codes["title"]


def test_a_catalogue_has_the_words_and_the_texts() -> None:
    column = split(people(news())).catalogue().items["title"]
    assert column.words[column.values[0, 1] - 1] == "cat"
    assert column.texts == ("The cat sat; the DOG ran.", "", "Café naïve: a cat", "…")
    assert (column.several, column.width) == (True, 6)


def test_words_are_declared_by_their_number() -> None:
    assert parse("title", "words:12") == Words(12)
    assert kinds_of({"title": "words:12"}, {}) == {"title": "sequence"}
    declared = declare(people(news()), {"title": "words:2"}).item_features
    assert declared is not None
    assert declared.declared == {"title": Words(2)}
    for wrong in ("words:0", "words:-3", "words:many", "words"):
        with pytest.raises(HomebodyError, match=r"words"):
            assert parse("title", wrong) is None


def test_only_items_have_words_in_their_order() -> None:
    bios = Features(pl.DataFrame({"bio": ["a spy", "a cook"]}), {"bio": "sequence"})
    items = np.array([0, 0], dtype=np.int32)
    with pytest.raises(HomebodyError, match="which only items have: give --kind bio=text"):
        Population("toy", np.array([0, 1, 2]), items, n_items=1, user_features=bios)


def test_a_schema_carries_words_to_devices() -> None:
    found = encode(news(), np.ones(4, dtype=np.bool_))
    schema = FeatureSchema({}, found.codes, {"title": found.columns["title"].values})
    column = FeatureSchema.read(schema.content).catalogue(5).items["title"]
    assert torch.equal(column.values[:4], torch.from_numpy(found.columns["title"].values))
    assert column.values[4].tolist() == [-1] * 6
    assert column.words == found.codes["title"].values


def test_towers_read_a_sequence_as_a_bag_of_words() -> None:
    listed = Code("sequence", ("cat", "the"), text=True, width=4)
    catalogue = split(people(news(title=listed))).catalogue()
    row, weight = item_rows(catalogue.items)
    assert (row * weight).tolist() == [[2, 1, 0, 2], [0] * 4, [0, 0, 0, 1], [0] * 4]
    described = Vocabulary.of(catalogue, "title").items(catalogue.items)
    assert described.weight[0].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
