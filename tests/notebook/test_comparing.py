"""`hb.compare` and `hb.leaderboard`: the commands' figures, on data in memory too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import homebody as hb
from homebody.data import Population
from homebody.recipe import Recipe
from homebody.report.comparison import summarise_runs
from homebody.run import execute

SOURCE = "synthetic:users=120,items=60,mean=10"


@pytest.fixture(scope="module")
def people() -> Population:
    return hb.load(SOURCE)


class TestCompare:
    def test_it_is_what_the_command_does(self, people: Population, tmp_path: Path) -> None:
        names = ["popularity", "fedials"]
        runs = [execute(Recipe(name, SOURCE, rounds=2, seed=seed), tmp_path) for name in names for seed in (0, 1)]
        expected = summarise_runs(runs)
        found = hb.compare(names, people, seeds=2, rounds=2, quiet=True)
        for row, theirs in zip(found.details["methods"], expected["methods"], strict=True):
            assert row["metrics"] == theirs["metrics"]
            assert row["p_against_best"] == theirs["p_against_best"]
        assert found.best == expected["best"]
        frame = found.frame
        assert frame["method"].to_list() == names
        assert frame["hr@10"].to_list() == [row["metrics"]["hr@10"]["mean"] for row in expected["methods"]]
        assert frame["p"].null_count() == 1
        assert frame["epsilon/server"].to_list() == [math.inf, math.inf]

    def test_one_method_with_several_settings(self, people: Population) -> None:
        methods = [hb.FedIALS(factors=4), "popularity", hb.FedIALS(factors=8)]
        found = hb.compare(methods, people, seeds=1, rounds=2, quiet=True)
        assert found.frame["method"].to_list() == ["fedials factors=4", "popularity", "fedials factors=8"]

    def test_records_are_kept_where_that_is_asked_for(self, people: Population, tmp_path: Path) -> None:
        kept = hb.compare(["popularity"], people, seeds=2, out=tmp_path, quiet=True).details["methods"][0]["runs"]
        assert sorted(map(str, tmp_path.iterdir())) == sorted(kept)
        assert hb.compare(["popularity"], people, seeds=1, quiet=True).details["methods"][0]["runs"] == []

    def test_names_of_ones_own_and_models_that_are_trained(self, people: Population) -> None:
        plain = hb.fit("fedmf", people, rounds=3, quiet=True)
        private = hb.fit("fedmf", people, rounds=3, stages=["clip:norm=1", "gaussian:z=2"], quiet=True)
        found = hb.compare({"plain": plain, "private": private, "pop": "popularity"}, people, seeds=1, quiet=True)
        assert found.frame["method"].to_list() == ["plain", "private", "pop"]
        assert found.frame["hr@10"].to_list()[:2] == [plain.metrics["hr@10"], private.metrics["hr@10"]]
        assert found.frame["epsilon/public"].to_list()[1] == pytest.approx(private.epsilon["public"])
        assert hb.compare([plain, hb.fit("ials", people, quiet=True)]).frame.height == 2

    @pytest.mark.parametrize(
        ("source", "settings", "sentence"),
        [
            (SOURCE, {"protocol": "published"}, "protocol is strict in mine and published in pop. Train both"),
            (SOURCE, {"split": "ratio"}, "split is leave-one-out in mine and ratio in pop"),
            (SOURCE, {"negatives": 20}, "negatives is 99 in mine and 20 in pop"),
            (f"{SOURCE},seed=3", {}, "interactions differ: mine has"),
            ("synthetic:users=40,items=60,mean=10", {}, "40 users"),
        ],
    )
    def test_a_model_beside_what_does_not_compare_is_refused_before_any_training(
        self, people: Population, source: str, settings: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mine = hb.fit("fedmf", people, rounds=1, quiet=True)
        monkeypatch.setattr("homebody.notebook.comparing.finish", lambda *args, **kwargs: pytest.fail("it trained"))
        with pytest.raises(hb.HomebodyError, match=sentence):
            hb.compare({"mine": mine, "pop": "popularity"}, hb.load(source), seeds=1, quiet=True, **settings)

    def test_models_of_other_data_or_of_settings_given_too_late_are_refused(self, people: Population) -> None:
        models = {name: hb.fit(name, people, rounds=1, quiet=True) for name in ("fedmf", "ials")}
        with pytest.raises(hb.HomebodyError, match="the data has"):
            hb.compare(models, hb.load(f"{SOURCE},seed=3"), quiet=True)
        with pytest.raises(hb.HomebodyError, match="trained already: leave out protocol"):
            hb.compare(models, protocol="strict", quiet=True)
        with pytest.raises(hb.HomebodyError, match="the seed of the split is 0 in fedmf and 3 in pop"):
            hb.compare({**models, "pop": "popularity"}, hb.split(people, seed=3), seeds=1, quiet=True)

    def test_rows_of_different_seeds_get_no_p_and_say_so(self, people: Population) -> None:
        mine = hb.fit("fedmf", people, rounds=1, seed=7, quiet=True)
        found = hb.compare({"mine": mine, "pop": "popularity"}, SOURCE, seeds=1, quiet=True)
        assert found.frame["p"].null_count() == 2
        assert "different seeds" in repr(found)
        assert "different seeds" in str(found)

    def test_a_split_a_simulator_and_stages_with_a_reference(self, people: Population) -> None:
        split = hb.split(people, "ratio:test=0.3")
        for data in (split, hb.Simulator(split)):
            settings: dict[str, Any] = {"seeds": 1, "rounds": 1, "stages": ["clip:norm=1", "gaussian:z=2"]}
            found = hb.compare(["popularity", "fedials"], data, quiet=True, **settings)
            assert found.frame["epsilon/public"].is_finite().to_list() == [False, True]
            assert any("stages and budget do not hold" in remark for remark in found.remarks)

    def test_how_it_shows_itself(self, people: Population, tmp_path: Path) -> None:
        found = hb.compare(["popularity", "fedials"], people, seeds=2, rounds=1, quiet=True)
        assert repr(found).startswith("<Comparison: 2 methods on synthetic")
        assert "\n" not in repr(found)
        assert "popularity" in str(found)
        html = found._repr_html_()
        assert html.count("<tr>") == 4
        assert "NDCG@10" in html
        assert "chance (reference)" in html
        assert "popularity 0." in found.plot().svg
        with pytest.raises(hb.HomebodyError, match="There is no metric 'hr@99'"):
            found.plot("hr@99")

    @pytest.mark.parametrize(
        ("call", "sentence"),
        [
            (lambda p: hb.compare("fedials", p), "takes a list of methods"),
            (lambda p: hb.compare(["fedials"]), "hb.compare\\(methods, data\\)"),
            (lambda p: hb.compare(["fedials", "fedials"], p), "stands twice"),
            (lambda p: hb.compare(["fedials", "nope"], p), "There is no method 'nope'"),
            (lambda p: hb.compare(["fedials"], p, seeds=0), "(?i)seeds must be"),
            (lambda p: hb.compare(["fedials"], p, seeds=[0, 1]), "seeds is how many seeds"),
            (lambda p: hb.compare(["fedials"], p, round=2), "did you mean 'rounds'"),
            (lambda p: hb.compare([p], "fedials"), "not a Population"),
            (
                lambda p: hb.compare(
                    {
                        "one": hb.fit("popularity", p, quiet=True),
                        "other": hb.fit("popularity", p, split="ratio", quiet=True),
                    }
                ),
                "split is leave-one-out in one and ratio in other",
            ),
        ],
    )
    def test_misuse_gets_a_sentence(self, people: Population, call: Any, sentence: str) -> None:
        with pytest.raises(hb.HomebodyError, match=sentence):
            call(people)


class TestLeaderboard:
    def test_all_that_fit_best_first(self, people: Population) -> None:
        names = ["popularity", "random", hb.FedIALS(factors=4)]
        found = hb.leaderboard(people, methods=names, seeds=1, rounds=2, quiet=True)
        assert sorted(found.frame["method"]) == ["fedials", "popularity", "random"]
        assert found.frame["ndcg@10"].is_sorted(descending=True)
        kinds = dict(found.frame.select("method", "kind").iter_rows())
        assert kinds == {"fedials": "federated", "popularity": "centralised", "random": "centralised"}
        assert "<th>" in found._repr_html_()

    def test_what_does_not_fit_or_fails_is_said(self, people: Population) -> None:
        methods = ["popularity", "fl-mv-dssm", hb.FedMF(learning_rate=1e30)]
        found = hb.leaderboard(people, methods=methods, seeds=1, rounds=3, quiet=True)
        assert found.frame["method"].to_list() == ["popularity"]
        remarks = " ".join(found.remarks)
        assert "fl-mv-dssm: needs" in remarks
        assert "fedmf: failed: Training diverged" in remarks

    def test_none_that_fits_is_refused(self, people: Population) -> None:
        with pytest.raises(hb.HomebodyError, match="No method fits this data"):
            hb.leaderboard(people, methods=["fl-mv-dssm"], quiet=True)


def test_frames_are_frames(people: Population) -> None:
    assert isinstance(hb.compare(["popularity"], people, seeds=1, quiet=True).frame, pl.DataFrame)
