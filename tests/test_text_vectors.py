"""Words and texts as vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import homebody.text_vectors as module
from homebody.core import Catalogue, Column
from homebody.data.pretrained import pretrained_at
from homebody.data.wordpiece import WordPiece
from homebody.errors import HomebodyError
from homebody.models.minilm import through_layers, whole
from homebody.models.news import NAML, NRMS, PLM, NewsById
from homebody.rng import Rng
from homebody.text_vectors import news_inputs, news_start, text_states, text_vectors, top_layers, word_vectors

RNG = Rng.of(0)
# As `BertTokenizerFast` and `BertModel` of transformers 4.49 compute it from the package's files, with the mean over
# the pieces, of length 1: the pieces, and every 16th number of the vector.
RECORDED = {
    "Homebody keeps every history at home.": (
        [
            *(101, 2188, 23684, 7906, 2296, 2381, 2012, 2188, 1012, 102),
        ],
        [
            *(0.027179, 0.009925, -0.017956, 0.104241, 0.087117, -0.056782, -0.078581, 0.009441),
            *(0.048625, -0.089096, 0.004253, -0.028348, -0.038126, 0.0138, -0.034428, -0.00606),
            *(-0.032433, -0.032567, 0.024494, -0.088207, -0.002686, 0.050105, 0.065798, 0.010893),
        ],
    ),
    "Privacy-preserving news recommendation: naïve café, 2021 — Zürich 東京!": (
        [
            *(101, 9394, 1011, 15224, 2739, 12832, 1024, 15743, 7668, 1010, 25682, 1517),
            *(10204, 1879, 1755, 999, 102),
        ],
        [
            *(0.001497, 0.039407, -0.020465, -0.022651, -0.011706, 0.005226, 0.008738, -0.036573),
            *(0.004152, 0.026312, 0.032795, 0.019924, -0.022631, 0.086955, -0.048001, 0.056928),
            *(-0.000188, -0.03625, 0.009753, 0.006504, 0.030625, 0.017137, -0.019637, 0.057349),
        ],
    ),
    "Tokenisation of unbelievablyverylongnonsensewordxyz": (
        [
            *(101, 19204, 6648, 1997, 4895, 8671, 2666, 3567, 6321, 27900, 10052, 8540),
            *(5054, 3366, 18351, 18037, 2480, 102),
        ],
        [
            *(-0.054593, -0.018932, 0.023568, -0.057032, 0.006001, 0.014449, 0.021455, -0.012593),
            *(-0.097713, -0.060163, -0.041269, 0.051537, 0.017457, 0.012324, -0.073689, 0.064023),
            *(-0.071082, 0.030819, 0.095502, 0.031908, 0.013817, -0.056435, -0.068927, 0.046979),
        ],
    ),
    "it's 50% off; don't panic\u0000 \u200b end": (
        [
            *(101, 2009, 1005, 1055, 2753, 1003, 2125, 1025, 2123, 1005, 1056, 6634),
            *(2203, 102),
        ],
        [
            *(0.082895, 0.056621, 0.047576, 0.068002, 0.024119, 0.02793, -0.041409, -0.001494),
            *(-0.021048, 0.009997, 0.037212, 0.059162, 0.005781, 0.041287, -0.057782, 0.085494),
            *(0.031919, 0.026453, 0.095385, 0.006189, -0.029769, -0.034107, 0.029511, 0.013564),
        ],
    ),
}


def at_hand(name: str) -> Path:
    folder = pretrained_at(name)
    if folder is None:
        pytest.skip(f"{name} is not on this machine: homebody.data.pretrained.pretrained('{name}') fetches it")
    return folder


class TestLanguageModel:
    def test_pieces_equal_recorded_ones(self) -> None:
        pieces = WordPiece.read(at_hand("all-minilm-l6-v2") / "vocab.txt")
        assert {text: pieces.of(text) for text in RECORDED} == {text: known for text, (known, _) in RECORDED.items()}
        cut = pieces.of(" ".join(f"word{number} news" for number in range(200)))
        assert (len(cut), cut[-3:]) == (256, [2683, 2739, 102])

    def test_vectors_equal_recorded_ones_and_are_kept(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        folder = at_hand("all-minilm-l6-v2")
        monkeypatch.setattr(module, "pretrained", lambda name: folder)
        monkeypatch.setattr(module, "cache_dir", lambda: tmp_path)
        texts = [*RECORDED, " "]
        vectors = text_vectors(texts)
        for vector, (_, known) in zip(vectors[:-1], RECORDED.values(), strict=True):
            assert_close(vector[::16], torch.tensor(known), atol=1e-4, rtol=0)
            assert vector.norm().item() == pytest.approx(1, abs=1e-5)
        assert not vectors[-1].any()
        monkeypatch.setattr(module, "pretrained", None)  # nobody asks for the model again
        assert torch.equal(text_vectors(texts), vectors)

    def test_states_below_the_top_layers_lead_to_the_same_vectors(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        folder = at_hand("all-minilm-l6-v2")
        monkeypatch.setattr(module, "cache_dir", lambda: tmp_path)
        monkeypatch.setattr(module, "pretrained", lambda name: folder)
        texts = ["", *RECORDED]
        states, real = text_states(texts, 2)
        assert real.sum(1).tolist() == [0, *(len(pieces) for pieces, _ in RECORDED.values())]
        found = whole(through_layers(top_layers(2), states, real, range(4, 6)), real)
        assert_close(found, text_vectors(texts), atol=1e-3, rtol=0)  # states are kept with 16 bits
        monkeypatch.setattr(module, "_by_length", None)  # kept: nothing is computed again
        assert all(torch.equal(*both) for both in zip(text_states(texts, 2), (states, real), strict=True))

    def test_damaged_kept_vectors_are_not_read(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(module, "cache_dir", lambda: tmp_path)
        kept = module._kept_at(["a", "b"])
        kept.parent.mkdir()
        for content in (b"", b"not vectors", module.save({"vectors": torch.ones(3, 384)}), module.save({})):
            kept.write_bytes(content)
            assert module._kept(kept, {"vectors": (2, 384)}) is None
        kept.write_bytes(module.save({"vectors": torch.ones(2, 384)}))
        assert torch.equal(text_vectors(["a", "b"]), torch.ones(2, 384))


class TestWordVectors:
    def test_glove(self) -> None:
        at_hand("glove-6b-50d")
        table = word_vectors(["the", "qqzzx", "cat"], "glove", RNG)
        assert table.shape == (4, 50)
        assert_close(table[1, :5], torch.tensor([0.418, 0.24968, -0.41242, 0.1217, 0.34527]))
        cat, dog, law = word_vectors(["cat", "dog", "law"], "glove", RNG)[1:]
        assert torch.cosine_similarity(cat, dog, 0) > 0.8 > torch.cosine_similarity(cat, law, 0)

    def test_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "vectors.txt"
        file.write_text("cat 1 2.5\nelk 3 4\ndog -1 0\n")
        table = word_vectors(["ash", "cat", "dog"], str(file), Rng.of(0))
        assert table[2:].tolist() == [[1.0, 2.5], [-1.0, 0.0]]
        assert table[:2].ne(0).all()
        assert torch.equal(table, word_vectors(["ash", "cat", "dog"], str(file), Rng.of(0)))
        file.write_text("2 2\ncat 1 2.5\ndog -1 0\n")
        assert word_vectors(["cat"], str(file), RNG)[1].tolist() == [1.0, 2.5]

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ("cat 1 2\ndog 1\n", "line 2 has 1 numbers and not 2"),
            ("cat\n", "line 1 has 0 numbers and not some"),
            ("cat 1 x\n", "could not convert string to float: 'x'"),
            ("elk 1 2\n", "None of the catalogue's 2 words has a vector in"),
            ("cat 1 nan\n", "have a number that is not finite"),
        ],
    )
    def test_a_malformed_file_is_refused(self, content: str, reason: str, tmp_path: Path) -> None:
        (tmp_path / "vectors.txt").write_text(content)
        with pytest.raises(HomebodyError) as refused:
            word_vectors(["cat", "dog"], str(tmp_path / "vectors.txt"), RNG)
        assert reason in str(refused.value)

    def test_a_missing_file_is_refused(self) -> None:
        with pytest.raises(HomebodyError, match=r"no/such cannot be read \(No such file.*: give glove, random, or a"):
            word_vectors(["cat"], "no/such", RNG)


class TestEncoders:
    title = Column(torch.tensor([[1, 2], [2, -1]]), 3, "sequence", True, words=("cat", "dog"), texts=("A cat", "Dog"))

    def test_they_start_from_word_vectors_of_their_words(self, tmp_path: Path) -> None:
        (tmp_path / "vectors.txt").write_text("cat 1 2\nbee 5 6\n")
        body = Column(torch.tensor([[2, 1], [-1, -1]]), 3, "sequence", True, words=("bee", "cat"))
        two = Catalogue(2, {"title": self.title, "body": body})
        encoder = NAML(d=4, width=2)
        shared = news_start(encoder, two, RNG, str(tmp_path / "vectors.txt"))
        assert encoder.words(two) == ("bee", "cat", "dog")
        assert shared["news/word"][1:3].tolist() == [[5.0, 6.0], [1.0, 2.0]]
        assert news_inputs(encoder, two)["words/title"].tolist() == [[2, 3], [3, -1], [-1, -1]]
        assert news_inputs(encoder, two)["words/body"].tolist() == [[2, 1], [-1, -1], [-1, -1]]
        assert news_start(NRMS(d=4, heads=2, width=6), two, RNG, "random")["news/word"].shape == (3, 6)
        assert list(news_start(NewsById(4), two, RNG)) == ["news/item"]

    def test_inputs_are_computed_once(self) -> None:
        two = Catalogue(2, {"title": self.title})
        assert news_inputs(NRMS(), two) is news_inputs(NRMS(), two)
        assert news_inputs(NRMS(), two) is not news_inputs(NRMS(), Catalogue(2, {"title": self.title}))

    def test_a_language_models_inputs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[str, ...]] = []
        monkeypatch.setattr(module, "text_vectors", lambda texts: asked.append(texts) or torch.ones(2, 384))
        two = Catalogue(2, {"title": self.title})
        given = news_inputs(PLM(d=4), two)["plm"]
        assert (asked, given.shape, given[2].any().item()) == ([("A cat", "Dog")], (3, 384), False)

    def test_a_language_models_layers_as_inputs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[tuple[str, ...], int]] = []

        def states(texts: tuple[str, ...], layers: int) -> tuple[torch.Tensor, torch.Tensor]:
            asked.append((texts, layers))
            return torch.ones(2, 3, 384), torch.ones(2, 3, dtype=torch.bool)

        monkeypatch.setattr(module, "text_states", states)
        two = Catalogue(2, {"title": self.title})
        given = news_inputs(PLM(d=4, layers=2), two)
        assert (asked, given["plm/states"].shape) == ([(("A cat", "Dog"), 2)], (3, 3, 384))
        assert given["plm/real"].tolist() == [[True] * 3, [True] * 3, [False] * 3]
        shapes = news_start(PLM(d=4, layers=1), two, Rng.of(0, device="meta"))
        assert shapes["news/encoder.layer.5.intermediate.dense.weight"].shape == (1536, 384)
        assert sum(value.numel() for value in shapes.values()) == 1_774_464 + 384 * 4 + 4

    def test_news_without_text_are_refused(self) -> None:
        with pytest.raises(HomebodyError, match="The encoder plm reads the text 'title' of news"):
            news_inputs(PLM(), Catalogue(2))
        with pytest.raises(HomebodyError, match="only their words are known here"):
            news_inputs(PLM(), Catalogue(2, {"title": self.title._replace(texts=())}))
        with pytest.raises(HomebodyError, match="The encoder naml reads the text 'title' of news"):
            news_start(NAML(), Catalogue(2), RNG)
