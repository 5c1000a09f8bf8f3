"""What other programs get of a model: vectors, parameters, a network, a card; nothing of its people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import safetensors.numpy
import torch

import homebody as hb
from homebody.data import Population
from homebody.methods.serving import nobody

SOURCE = "synthetic:users=80,items=50,mean=10"


@pytest.fixture(scope="module")
def people() -> Population:
    plain = hb.load(SOURCE)
    titles = pl.Series([f"title {number}" for number in range(plain.n_items)])
    users = pl.Series([f"agent-{number:07d}" for number in range(plain.n_users)])
    return Population(**{**vars(plain), "item_names": titles, "user_ids": users})


class TestSimilarItems:
    @pytest.mark.parametrize("method", ["fedials", "fedmf", "fedrecon", "ials", "mf", "fedncf"])
    def test_they_have_the_largest_cosines(self, people: Population, method: str) -> None:
        model = hb.fit(method, people, rounds=2, quiet=True)
        frame = model.similar_items("title 7", k=4)
        vectors = model._vectors().double()
        cosines = torch.nn.functional.cosine_similarity(vectors, vectors[7:8])
        cosines[7] = -2
        best = cosines.argsort(descending=True)[:4]
        assert frame.columns == ["rank", "item", "name", "score"]
        assert frame["score"].to_list() == pytest.approx(cosines[best].tolist(), abs=1e-5)
        assert frame["name"].to_list() == [f"title {number}" for number in frame["item"]]
        assert "title 7" not in frame["name"]

    @pytest.mark.parametrize(
        ("method", "item", "sentence"),
        [
            ("popularity", 3, "Popularity has no vector for each item"),
            ("private-popularity", 3, "PrivatePopularity has no vector for each item"),
            ("dplcf", 3, "DPLCF has no vector for each item"),
            ("alone", 3, "Alone has no vector for each item"),
            ("fedials", "no such", "There is no item 'no such'"),
        ],
    )
    def test_misuse_gets_a_sentence(self, people: Population, method: str, item: Any, sentence: str) -> None:
        with pytest.raises(hb.HomebodyError, match=sentence):
            hb.fit(method, people, rounds=1, quiet=True).similar_items(item)

    def test_news_are_similar_by_what_the_model_reads(self) -> None:
        from homebody.testing import impressed

        model = hb.fit(hb.FedRec(encoder="id", d=8), impressed(), rounds=1, quiet=True)
        assert model.similar_items(3, k=2).height == 2


class TestExport:
    def test_vectors_and_parameters(self, people: Population, tmp_path: Path) -> None:
        model = hb.fit("fedmf", people, rounds=2, quiet=True)
        folder = model.export(tmp_path / "export")
        table = pl.read_parquet(folder / "items.parquet")
        assert table.columns == ["item", "name", "vector"]
        assert table["name"].to_list() == people.item_names.to_list()  # type: ignore[union-attr]
        vectors = safetensors.numpy.load_file(folder / "items.safetensors")["items"]
        np.testing.assert_array_equal(table["vector"].to_numpy(), vectors)
        np.testing.assert_array_equal(vectors, model.shared["item"].numpy())
        kept = safetensors.numpy.load_file(folder / "parameters.safetensors")
        assert {name: value.tolist() for name, value in kept.items()} == {
            name: value.tolist() for name, value in model.shared.items()
        }

    def test_the_card_has_figures_and_the_privacy_statement(self, people: Population, tmp_path: Path) -> None:
        stages = ["clip:norm=1", "gaussian:z=2"]
        model = hb.fit("fedmf", people, rounds=3, seed=987654, stages=stages, quiet=True)
        folder = model.export(tmp_path / "export")
        card = (folder / "MODEL_CARD.md").read_text()
        assert f"| HR@10 | {model.metrics['hr@10']:.4f} |" in card
        assert "Against the public, about one person" in card
        assert "popularity" in card
        assert "clip: Each device scales its update" in card
        assert "Outside of it:" in card
        stated = json.loads((folder / "statement.json").read_text())
        public = next(row for row in stated["certified"] if row["observer"] == "public")
        assert float(public["epsilon"]) == pytest.approx(model.epsilon["public"])
        for path in folder.iterdir():
            assert b"987654" not in path.read_bytes(), f"{path.name} names the seed"

    def test_nobody_stands_in_it(self, people: Population, tmp_path: Path) -> None:
        for method in ("fedncf", "ials"):
            for path in hb.fit(method, people, rounds=2, quiet=True).export(tmp_path / method).iterdir():
                assert b"agent-" not in path.read_bytes(), path.name

    def test_an_export_is_replaced_and_nothing_else(self, people: Population, tmp_path: Path) -> None:
        model = hb.fit("fedials", people, rounds=1, quiet=True)
        model.export(tmp_path / "export")
        hb.fit("fedmf", people, rounds=1, quiet=True).export(tmp_path / "export")
        assert "`fedmf`" in (tmp_path / "export" / "MODEL_CARD.md").read_text()
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("mine")
        with pytest.raises(hb.HomebodyError, match="choose another name"):
            model.export(tmp_path / "mine")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "mine"]

    def test_what_was_saved_without_people_is_exported_too(self, people: Population, tmp_path: Path) -> None:
        model = hb.fit("fedials", people, rounds=1, quiet=True)
        again = hb.open(model.save(tmp_path / "model"))
        one, other = model.export(tmp_path / "one"), again.export(tmp_path / "other")
        assert (one / "items.safetensors").read_bytes() == (other / "items.safetensors").read_bytes()
        assert (one / "MODEL_CARD.md").read_text() == (other / "MODEL_CARD.md").read_text()

    def test_who_has_no_vectors_is_not_exported(self, people: Population, tmp_path: Path) -> None:
        with pytest.raises(hb.HomebodyError, match="has no vector"):
            hb.fit("popularity", people, quiet=True).export(tmp_path / "export")
        assert list(tmp_path.iterdir()) == []


class TestOnnx:
    @pytest.mark.parametrize(
        "method",
        [
            hb.FedNCF(factors=6, hidden="8,4"),
            hb.FedNCF(factors=6, hidden="8,4", dual=True),
            hb.PFedRec(factors=5),
            hb.PFedRec(factors=5, dual=False),
        ],
        ids=["fedncf", "dual", "pfedrec", "single"],
    )
    def test_the_network_scores_as_a_device_does(self, people: Population, tmp_path: Path, method: Any) -> None:
        pytest.importorskip("onnx", reason="no onnx: the extra `onnx` is not installed")
        pytest.importorskip("onnxscript", reason="no onnxscript: the extra `onnx` is not installed")
        runtime = pytest.importorskip("onnxruntime", reason="no onnxruntime: the extra `onnx` is not installed")
        model = hb.fit(method, people, rounds=2, quiet=True)
        session = runtime.InferenceSession(model.export(tmp_path / "export", onnx=True) / "scorer.onnx")
        trained, simulator = model.trained, model.runtime
        local = simulator.private_state(trained.method, trained.shared, 5)
        everything = torch.arange(people.n_items)
        rows = trained.shared["item"]
        if "item" in local:  # the device's own rows stand beside the common ones
            tuned = local.pop("item")
            local["item"] = type(tuned)(tuned.index, torch.zeros_like(tuned.value), tuned.size)
        expected = trained.method.score(trained.shared, local, nobody(simulator.catalogue), everything)
        own = local.get("layers")
        if own is None and "weight" in local:
            own = torch.cat([local["weight"], local["bias"][None]])
        given = {"rows": rows, "user": local.get("user"), "layers": own}
        wanted = {each.name for each in session.get_inputs()}
        (scores,) = session.run(["score"], {name: given[name].numpy() for name in wanted})
        np.testing.assert_allclose(scores, expected.numpy(), rtol=1e-4, atol=1e-5)
        (some,) = session.run(
            ["score"], {name: (given[name][:7] if name == "rows" else given[name]).numpy() for name in wanted}
        )
        np.testing.assert_allclose(some, expected.numpy()[:7], rtol=1e-4, atol=1e-5)

    def test_without_the_packages_it_is_left_out_or_refused(
        self, people: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("homebody.notebook.exporting._has_onnx", lambda: False)
        model = hb.fit("fedncf", people, rounds=1, quiet=True)
        with pytest.raises(hb.HomebodyError, match=r"pip install '\.\[onnx\]'"):
            model.export(tmp_path / "export", onnx=True)
        assert list(tmp_path.iterdir()) == []
        folder = model.export(tmp_path / "export")
        assert not (folder / "scorer.onnx").exists()
        assert "pip install" in (folder / "MODEL_CARD.md").read_text()

    def test_a_method_without_a_network_has_none(self, people: Population, tmp_path: Path) -> None:
        model = hb.fit("fedials", people, rounds=1, quiet=True)
        with pytest.raises(hb.HomebodyError, match="without a network that ONNX could hold"):
            model.export(tmp_path / "export", onnx=True)
        assert not (model.export(tmp_path / "export") / "scorer.onnx").exists()
