"""A saved model opens anywhere and ranks as it did; without its people it has nothing of theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import homebody as hb
from homebody.data import Population
from homebody.data.population import Features, UserItems
from homebody.data.stored import read_split, without_people, write_split
from homebody.suggest import recommend_for, recommend_to
from homebody.testing import described, impressed

SOURCE = "synthetic:users=80,items=50,mean=10"
MADE: dict[str, Any] = {
    "fedials": lambda: hb.fit("fedials", SOURCE, rounds=2, quiet=True),
    "noised": lambda: hb.fit(
        hb.FedIALS(factors=4), SOURCE, rounds=2, stages=["clip:norm=5", "gaussian:z=2"], quiet=True
    ),
    "fedmf": lambda: hb.fit("fedmf", SOURCE, rounds=5, cohort=30, seed=3, quiet=True),
    "pfedrec": lambda: hb.fit(hb.PFedRec(factors=4), SOURCE, rounds=4, quiet=True),
    "fedrecon": lambda: hb.fit("fedrecon", SOURCE, rounds=2, quiet=True),
    "features": lambda: hb.fit(hb.PrivRec(factors=4), described(), rounds=2, cohort=30, quiet=True),
    "impressions": lambda: hb.fit(hb.FedRec(encoder="id", d=8), impressed(), rounds=2, quiet=True),
    "phases": lambda: hb.fit("dp-privrec", SOURCE, rounds=2, public=0.2, quiet=True),
}


@pytest.fixture(params=["fedials", "noised", "fedmf", "pfedrec", "fedrecon", "features", "impressions"])
def model(request: pytest.FixtureRequest) -> hb.Fitted:
    made: hb.Fitted = MADE[request.param]()
    return made


class TestSaved:
    def test_with_its_people_it_is_the_same(self, model: hb.Fitted, tmp_path: Path) -> None:
        again = hb.open(model.save(tmp_path / "model", data=True))
        assert again.recommend("all", k=7).equals(model.recommend("all", k=7))
        assert again.recommend_for([3, 14], k=5).equals(model.recommend_for([3, 14], k=5))
        assert again.metrics == model.metrics
        assert again.epsilon == model.epsilon
        assert again.history.equals(model.history)
        assert again.ledger.entries() == model.ledger.entries()
        assert again.method == model.method
        assert repr(again) == repr(model)
        assert again.plot().svg == model.plot().svg
        assert again.runtime.evaluate(again.trained.method, again.shared).metrics == pytest.approx(model.metrics)

    def test_without_them_it_ranks_for_somebody_new(self, model: hb.Fitted, tmp_path: Path) -> None:
        again = hb.open(model.save(tmp_path / "model"))
        assert again.recommend_for([3, 14], k=5).equals(model.recommend_for([3, 14], k=5))
        assert again.recommend_for([], k=5).equals(model.recommend_for([], k=5))
        assert again.metrics == model.metrics
        assert again.history.equals(model.history)
        with pytest.raises(hb.HomebodyError, match=r"saved without its people: save\(path, data=True\)"):
            again.recommend(3)
        with pytest.raises(hb.HomebodyError, match="people"):
            again.save(tmp_path / "other", data=True)

    def test_without_them_it_has_nothing_of_theirs(self, model: hb.Fitted, tmp_path: Path) -> None:
        folder = model.save(tmp_path / "model")
        split = read_split(folder / "split")
        assert split.population.n_interactions == 0
        assert split.population.user_ids is split.population.user_features is split.population.contexts is None
        assert len(split.rows) == split.bounds.max() == 0
        assert not (folder / "ranks.parquet").exists()
        assert not (folder / "split" / "users.parquet").exists()
        whole = model.save(tmp_path / "whole", data=True)
        names = {path.name for path in whole.rglob("*")}
        assert "ranks.parquet" in names
        state = next(folder.glob("state-*.safetensors"))
        assert state.stat().st_size < next(whole.glob("state-*.safetensors")).stat().st_size

    def test_without_them_commands_and_audits_say_so(self, tmp_path: Path) -> None:
        folder = MADE["fedmf"]().save(tmp_path / "model")
        for ask in (
            lambda: hb.audit.interactions(hb.open(folder)),
            lambda: hb.audit.canary(folder),
            lambda: recommend_to(folder, "3"),
        ):
            with pytest.raises(hb.HomebodyError, match="saved without its people"):
                ask()
        assert len(recommend_for(folder, ["3", "14"], k=4).items) == 4
        assert hb.account.statement(folder).details["run"]["complete"]

    def test_a_person_s_items_and_names_stand_nowhere(self, tmp_path: Path) -> None:
        plain = hb.load(SOURCE)
        secret = pl.Series([f"agent-{number:07d}" for number in range(plain.n_users)])
        model = hb.fit("fedmf", Population(**{**vars(plain), "user_ids": secret}), rounds=2, quiet=True)
        for path in model.save(tmp_path / "model").rglob("*"):
            assert path.is_dir() or b"agent-" not in path.read_bytes(), path.name

    def test_a_new_process_opens_it(self, tmp_path: Path) -> None:
        model = MADE["fedials"]()
        folder = model.save(tmp_path / "model", data=True)
        code = f"import homebody as hb; print(hb.open({str(folder)!r}).recommend(5, k=3)['item'].to_list())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(model.recommend(5, k=3)["item"].to_list())

    def test_a_reference_is_saved_with_the_data_or_not_at_all(self, tmp_path: Path) -> None:
        model = hb.fit("ials", SOURCE, rounds=3, quiet=True)
        with pytest.raises(hb.HomebodyError, match="data=True"):
            model.save(tmp_path / "model")
        assert list(tmp_path.iterdir()) == []
        again = hb.open(model.save(tmp_path / "model", data=True))
        assert again.recommend("all", k=4).equals(model.recommend("all", k=4))

    def test_a_model_is_replaced_and_nothing_else(self, tmp_path: Path) -> None:
        MADE["fedials"]().save(tmp_path / "model", data=True)
        MADE["fedmf"]().save(tmp_path / "model")
        assert hb.open(tmp_path / "model").recipe.method == "fedmf"
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "mine.txt").write_text("mine")
        with pytest.raises(hb.HomebodyError, match="is there already, and was not written by this call"):
            MADE["fedials"]().save(tmp_path / "notes")
        assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"

    def test_nothing_is_left_where_it_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = MADE["fedials"]()

        def fails(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("homebody.run.write_split", fails)
        with pytest.raises(hb.HomebodyError, match="No space left"):
            model.save(tmp_path / "model")
        assert list(tmp_path.iterdir()) == []

    def test_only_its_owner_reads_it(self, tmp_path: Path) -> None:
        folder = MADE["fedials"]().save(tmp_path / "model", data=True)
        assert {oct(path.stat().st_mode & 0o077) for path in (folder, *folder.rglob("*"))} == {"0o0"}

    def test_what_was_changed_or_is_missing_is_refused(self, tmp_path: Path) -> None:
        folder = MADE["fedials"]().save(tmp_path / "model", data=True)
        numbers = folder / "split" / "numbers.safetensors"
        content = bytearray(numbers.read_bytes())
        content[-1] ^= 1
        numbers.write_bytes(content)
        with pytest.raises(hb.HomebodyError, match="is corrupt"):
            hb.open(folder)
        (folder / "split" / "split.json").write_text("{}")
        with pytest.raises(hb.HomebodyError, match="is not what Homebody wrote"):
            hb.open(folder)
        with pytest.raises(hb.HomebodyError, match="There is no run in"):
            hb.open(tmp_path / "nowhere")

    def test_it_was_trained_by_a_class_that_is_not_defined(self, tmp_path: Path) -> None:
        folder = MADE["fedials"]().save(tmp_path / "model")
        recipe = folder / "recipe.toml"
        recipe.write_text(recipe.read_text().replace('method = "fedials"', 'method = "__main__:Mine"'))
        with pytest.raises(hb.HomebodyError, match="There is no method '__main__:Mine'"):
            hb.open(folder)

    def test_the_phases_of_a_method(self, tmp_path: Path) -> None:
        model = MADE["phases"]()
        again = hb.open(model.save(tmp_path / "model", data=True))
        assert again.recommend("all", k=3).equals(model.recommend("all", k=3))


class TestSplits:
    @pytest.mark.parametrize("make", [described, impressed], ids=["described", "impressed"])
    def test_every_part_comes_back(self, make: Any, tmp_path: Path) -> None:
        split = make()
        write_split(split, tmp_path / "split")
        _same(read_split(tmp_path / "split"), split)

    def test_all_that_a_population_may_have(self, tmp_path: Path) -> None:
        plain = hb.load(SOURCE)
        rng = np.random.default_rng(0)
        count = plain.n_interactions
        people = Population(
            **{
                **vars(plain),
                "times": np.arange(count),
                "ratings": rng.integers(1, 6, count).astype(np.float32),
                "user_ids": pl.Series([f"u{number}" for number in range(plain.n_users)]),
                "item_ids": pl.Series(range(100, 100 + plain.n_items)),
                "item_names": pl.Series([f"title {number}" for number in range(plain.n_items)]),
                "contexts": Features(pl.DataFrame({"day": rng.choice(["a", "b"], count)}), {"day": "categorical"}),
                "elsewhere": UserItems.of(np.array([0, 3]), np.array([1, 2]), plain.n_users),
                "notes": ("a note",),
            }
        )
        for split in (
            hb.split(people, "cold-items", protocol="strict"),
            hb.split(people, protocol="isolated", seed=4),
            hb.split(people, public=0.2),
        ):
            write_split(split, tmp_path / split.way / split.protocol / str(split.seed))
            _same(read_split(tmp_path / split.way / split.protocol / str(split.seed)), split)

    def test_without_people_the_features_of_items_stay(self) -> None:
        bare = without_people(described())
        assert bare.encoded["items"].columns.keys() == described().encoded["items"].columns.keys()
        assert not any(column.values.any() for column in bare.encoded["users"].columns.values() if column.kind == "one")


def _same(one: Any, other: Any) -> None:
    """Equal, part by part."""
    if hasattr(other, "__dataclass_fields__"):
        names = [name for name in other.__dataclass_fields__ if name not in ("declared", "coded")]
        for name in names:
            _same(getattr(one, name), getattr(other, name))
    elif isinstance(other, pl.Series | pl.DataFrame):
        assert one.rename(other.name).equals(other) if isinstance(other, pl.Series) else one.equals(other)
    elif isinstance(other, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(other, dict):
        assert sorted(one) == sorted(other)
        for name, value in other.items():
            _same(one[name], value)
    elif isinstance(other, tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            _same(mine, theirs)
    else:
        assert one == other
