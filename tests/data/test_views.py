"""Views from files, views that are made of interactions, and what is elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from homebody.cli import app
from homebody.data import load
from homebody.data.attach import attach_view
from homebody.data.export import export, export_elsewhere, export_view
from homebody.data.filters import apply
from homebody.data.partitions import split
from homebody.data.population import Features, Impressions, Population, UserItems
from homebody.data.views import MadeView, attach_views, move_elsewhere, outside, parse_views
from homebody.errors import HomebodyError
from homebody.methods.fedials import FedIALS
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.report.statement import statement
from homebody.run import execute, population_of, prepare, reopen
from homebody.run_notes import environment
from homebody.simulation import Simulator
from homebody.training import fit
from homebody.view_vectors import WAYS, make_views

SYNTHETIC = "synthetic:users=80,items=60,mean=12"


@pytest.fixture
def people() -> Population:
    profile = Features(pl.DataFrame({"age": [1.0, 2.0, 3.0]}), {"age": "numeric"}, views={"age": "profile"})
    return Population(
        "toy",
        np.array([0, 4, 8, 9]),
        np.array([0, 1, 2, 3, 2, 3, 4, 5, 0], dtype=np.int32),
        n_items=6,
        user_ids=pl.Series([7, 8, 9]),
        user_features=profile,
        ratings=np.arange(9, dtype=np.float32),
    )


def written(folder: Path, text: str) -> Path:
    path = folder / "taste.csv"
    path.write_text(text, encoding="utf-8")
    return path


class TestFiles:
    def test_numbers_codes_and_missing_people(self, people: Population, tmp_path: Path) -> None:
        file = written(tmp_path, "user,x,tags,town\n9,0.25,a|b,Ulm\n7,-1.5,b,Ulm\n")
        said: list[str] = []
        found = attach_view(people, "shop", file, say=said.append).user_features
        assert found is not None
        assert found.kinds == {
            "age": "numeric",
            "shop.x": "numeric",
            "shop.tags": "multi-hot",
            "shop.town": "categorical",
        }
        assert found.views == {"age": "profile", **dict.fromkeys(["shop.x", "shop.tags", "shop.town"], "shop")}
        assert found.table["shop.x"].to_list() == [-1.5, None, 0.25]
        assert any("misses 1 of 3 users" in note for note in said)
        catalogue = split(attach_view(people, "shop", file), "ratio:test=0.4,valid=0", how="random").catalogue()
        assert catalogue.views == {"profile": ("age",), "shop": ("shop.x", "shop.tags", "shop.town")}

    def test_kinds_go_by_the_column_in_its_view(self, people: Population, tmp_path: Path) -> None:
        file = written(tmp_path, "user,x\n7,1\n8,2\n")
        found = attach_view(people, "shop", file, kinds={"shop.x": "categorical"}).user_features
        assert found is not None
        assert found.kinds["shop.x"] == "categorical"

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            (
                "user,x,y\n7,0.5,1.5\n8,NaN,2.5\n",
                "'taste.x' of .* must hold no NaN and nothing infinite, but row 2 has 'NaN'",
            ),
            ("user,x,y\n7,0.5,1.5\n8,inf,2.5\n9,1.5,2.5\n", "'taste.x' .* nothing infinite, but row 2 has 'inf'"),
            ("user,x\n7,0.5\n8,inf\n", "'taste.x' .* nothing infinite, but row 2 has 'inf'"),
            ("user,x\n7,3\n8,3\n9,-Infinity\n", "row 3 has '-Infinity'"),
            ("user,x,y\n7,0.5,1.5\n8,,2.5\n", "'taste.x' of .* must hold a number in every row, but row 2 has nothing"),
            ("user,x,y\n7,0.5,1.5\n8,2.5\n", "Line 3 of .*taste.csv has 2 cells, and the header has 3: correct it"),
            ("user,x,y\n7,0.5,1.5\n8,2.5,3,4\n", "Line 3 of .*taste.csv has 4 cells, and the header has 3"),
            ("user,x\n7,0.5\n7,0.5\n8,1.5\n", "several rows about the user '7' .1 such user.: leave one row"),
            ("user,x\n70,0.5\n80,1.5\n", "describes none of the population's users"),
            ("user\n7\n8\n", "has only the column 'user'"),
            ("user,x\n", "describes nobody"),
        ],
    )
    def test_bad_files_are_one_sentence(self, people: Population, tmp_path: Path, text: str, sentence: str) -> None:
        with pytest.raises(HomebodyError, match=sentence) as error:
            attach_view(people, "taste", written(tmp_path, text))
        assert "\n" not in str(error.value)

    def test_a_column_declared_as_codes_may_hold_the_word(self, people: Population, tmp_path: Path) -> None:
        file = written(tmp_path, "user,x\n7,Infinity\n8,Ulm\n")
        found = attach_view(people, "shop", file, kinds={"shop.x": "categorical"}).user_features
        assert found is not None
        assert found.table["shop.x"].to_list() == ["Infinity", "Ulm", None]

    def test_cells_are_counted_as_they_are_quoted(self, people: Population, tmp_path: Path) -> None:
        found = attach_view(people, "shop", written(tmp_path, 'user,x\n7,"a, b"\n8,"c\n""d"""\n')).user_features
        assert found is not None
        assert found.table["shop.x"].to_list() == ["a, b", 'c\n"d"', None]

    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            ({"profile": "taste.csv"}, "toy has a view 'profile' already"),
            ({"profile": "svd"}, "toy has a view 'profile' already"),
            ({"a/b": "taste.csv"}, "The name of a view is"),
            ({"taste": "svd:sizes=3"}, "did you mean 'size'"),
            ({"taste": "svd:size=x"}, "takes size as a number, not 'x'"),
            ({"taste": "svd:size=0"}, "a size of at least 1, not 0"),
            ({"taste": "fedials:share=1"}, "a share between 0 and 1, not 1"),
            ({"taste": "no.csv"}, "There is no file no.csv"),
        ],
    )
    def test_bad_requests_are_one_sentence(self, people: Population, given: dict[str, str], sentence: str) -> None:
        with pytest.raises(HomebodyError, match=sentence):
            attach_views(people, parse_views(given))

    def test_a_column_that_is_there_is_not_replaced(self, people: Population, tmp_path: Path) -> None:
        once = attach_view(people, "taste", written(tmp_path, "user,x\n7,0.5\n"))
        with pytest.raises(HomebodyError, match=r"'taste\.x', which toy has already"):
            attach_view(once, "taste", tmp_path / "taste.csv")


class TestElsewhere:
    def test_a_share_of_each_person_goes_and_one_item_stays(self, people: Population) -> None:
        left, taken = move_elsewhere(people, "taste", MadeView("svd", share=0.5), seed=3)
        assert left.lengths.tolist() == [2, 2, 1]
        for user in range(3):
            own = taken.items[taken.indptr[user] : taken.indptr[user + 1]]
            assert sorted([*own, *left.history(user)]) == sorted(people.history(user))
        assert left.ratings is not None
        assert people.ratings is not None
        # Ratings go with their interactions.
        rated = {
            (user, item): people.ratings[people.indptr[user] + place]
            for user in range(3)
            for place, item in enumerate(people.history(user))
        }
        assert [rated[user, item] for user in range(3) for item in left.history(user)] == left.ratings.tolist()

    def test_repeats_of_an_item_go_together(self) -> None:
        again = Population("toy", np.array([0, 6]), np.array([0, 1, 0, 1, 0, 2], dtype=np.int32), n_items=3)
        for seed in range(5):
            left, taken = move_elsewhere(again, "taste", MadeView("svd"), seed)
            assert not set(left.items) & set(taken.items)

    def test_the_seed_and_the_name_decide(self) -> None:
        people = load(SYNTHETIC)
        taken = {
            (name, seed, own): move_elsewhere(people, name, MadeView("svd", seed=own), seed)[1].items.tobytes()
            for name in ("a", "b")
            for seed in (0, 1)
            for own in (None, 5)
        }
        assert taken["a", 0, 5] == taken["a", 1, 5]
        assert len({taken["a", 0, None], taken["a", 1, None], taken["b", 0, None], taken["a", 0, 5]}) == 4

    def test_two_views_take_different_interactions(self) -> None:
        people = load(SYNTHETIC)
        both = make_views(people, {"a": "svd:size=3,share=0.3", "b": "svd:size=3,share=0.3"})
        once = make_views(people, {"a": "svd:size=3,share=0.3"})
        assert both.elsewhere is not None
        assert once.elsewhere is not None
        assert len(both.elsewhere.items) + both.n_interactions == people.n_interactions
        assert len(both.elsewhere.items) > len(once.elsewhere.items)
        first, second = (
            np.stack([table[f"a.{n}"] for n in (1, 2, 3)])
            for table in (both.user_features.table, once.user_features.table)
        )  # type: ignore[union-attr]
        np.testing.assert_array_equal(first, second)

    def test_filters_keep_what_is_left_of_it(self, people: Population) -> None:
        there = replace(people, elsewhere=UserItems.of(np.array([0, 1, 2]), np.array([4, 0, 5]), 3))
        part = apply(there, {"min_user": 2})
        assert part.n_users == 2
        assert part.elsewhere is not None
        assert part.elsewhere.indptr.tolist() == [0, 1, 2]
        assert part.item_ids is None
        # Items 0 to 5 are all left: they keep their numbers.
        assert part.elsewhere.items.tolist() == [4, 0]

    def test_impressions_do_not_show_it(self, people: Population) -> None:
        shown = Impressions(
            np.array([0, 1]),
            np.array([0, 4, 8]),
            np.array([0, 1, 2, 3, 2, 3, 4, 5], dtype=np.int32),
            np.array([True, True, True, True, False, False, False, False]),
        )
        left, taken = move_elsewhere(replace(people, impressions=shown), "taste", MadeView("svd"))
        assert left.impressions is not None
        assert len(left.impressions.users) == 0  # nothing that was clicked, or nothing else, is left
        assert len(taken.items) == 4

    @pytest.mark.parametrize("protocol", ["strict", "isolated", "published"])
    @pytest.mark.parametrize("way", ["leave-one-out", "ratio:test=0.2,valid=0.1", "cold-items:valid=0.2", "cold-users"])
    def test_it_is_neither_learnt_asked_drawn_nor_ranked(self, way: str, protocol: str) -> None:
        people = make_views(load(SYNTHETIC), {"taste": "svd:size=3,share=0.4"})
        done = split(people, way, protocol=protocol, how="random", negatives=10)
        own = people.elsewhere
        assert own is not None
        users = np.arange(people.n_users)
        padded = done.padded(users)
        avoid_indptr, avoid = done.histories().avoid or (None, None)
        for user in users:
            there = set(own.items[own.indptr[user] : own.indptr[user + 1]].tolist())
            assert not there & set(people.history(user).tolist())
            assert there <= set(padded.excluded[user].tolist())
            assert sorted(set(padded.excluded[user])) == [
                item for n, item in enumerate(padded.excluded[user]) if n == 0 or item != padded.excluded[user][n - 1]
            ]
            assert avoid_indptr is not None
            assert avoid is not None
            assert there <= set(avoid[avoid_indptr[user] : avoid_indptr[user + 1]].tolist())
        for held in ("valid", "test"):
            asked = np.flatnonzero(done.sizes(held) > 0)
            seen, candidates = done.seen(asked, held), done.candidates(asked, held)
            for place, user in enumerate(asked):
                there = set(own.items[own.indptr[user] : own.indptr[user + 1]].tolist())
                assert there <= set(seen[place].tolist())
                assert not there & set(candidates[place].tolist())
                assert not set(done.relevant(np.array([user]), held)[0].tolist()) & set(seen[place].tolist())

    def test_a_ratio_is_of_everything_that_people_have(self) -> None:
        people = load(SYNTHETIC)
        whole = split(people, "ratio:test=0.2,valid=0", how="random")
        part = split(make_views(people, {"taste": "svd:size=3,share=0.5"}), "ratio:test=0.2,valid=0", how="random")
        np.testing.assert_array_equal(whole.sizes("test"), np.maximum(part.sizes("test"), whole.sizes("test")))
        assert (part.sizes("test") == whole.sizes("test")).mean() > 0.9  # the others keep one item to learn from
        assert part.sizes("train").sum() < 0.45 * whole.sizes("train").sum()

    def test_it_is_not_recommended(self) -> None:
        people = make_views(load(SYNTHETIC), {"taste": "svd:size=3,share=0.4"})
        done = split(people, "ratio:valid=0", how="random")
        method, simulator = FedIALS(factors=3), Simulator(done)
        fitted = fit(method, simulator, rounds=1)
        best = {item for item, _ in fitted.ranked(0, k=people.n_items)}
        assert people.elsewhere is not None
        there = set(people.elsewhere.items[: people.elsewhere.indptr[1]].tolist())
        assert best == set(range(people.n_items)) - there - set(people.history(0).tolist())

    def test_an_item_that_there_is_not_is_refused(self, people: Population) -> None:
        with pytest.raises(HomebodyError, match="an item elsewhere that is not one of them"):
            replace(people, elsewhere=UserItems.of(np.array([0]), np.array([6]), 3))
        with pytest.raises(HomebodyError, match="2 rows of items elsewhere for 3 users"):
            replace(people, elsewhere=UserItems.of(np.array([0]), np.array([1]), 2))


class TestMade:
    @pytest.mark.parametrize("way", ["svd", "fedials"])
    def test_vectors_come_from_what_is_elsewhere_alone(self, way: str) -> None:
        people = load(SYNTHETIC)
        _, taken = move_elsewhere(people, "taste", MadeView(way, 4), 0)  # type: ignore[arg-type]
        made = make_views(people, {"taste": f"{way}:size=4"})
        again = WAYS[way](taken, 60, MadeView(way, 4), 0)  # type: ignore[index,arg-type]
        assert made.user_features is not None
        known = np.diff(taken.indptr) > 0
        found = made.user_features.table.fill_null(0.0).to_numpy()
        np.testing.assert_allclose(found[known], again[known], rtol=1e-5, atol=1e-6)
        assert (found[~known] == 0).all()

    def test_svd_is_that_of_the_matrix(self) -> None:
        people = load(SYNTHETIC)
        _, taken = move_elsewhere(people, "taste", MadeView("svd", 4), 0)
        made = make_views(people, {"taste": "svd:size=4"})
        matrix = np.zeros((people.n_users, people.n_items))
        matrix[taken.owners, taken.items] = 1.0
        left, _, _ = np.linalg.svd(matrix, full_matrices=False)
        assert made.user_features is not None
        found = made.user_features.table.fill_null(0.0).to_numpy() / np.sqrt(people.n_users)
        np.testing.assert_allclose(np.abs((found * left[:, :4]).sum(axis=0)), 1.0, atol=1e-4)

    def test_numbers_reach_a_method_as_they_are(self) -> None:
        people = make_views(load(SYNTHETIC), {"taste": "svd:size=2"})
        done = split(people, "ratio:valid=0", how="random")
        assert people.user_features is not None
        assert done.catalogue().views == {"taste": ("taste.1", "taste.2")}
        for name in ("taste.1", "taste.2"):
            expected = people.user_features.table[name].fill_null(0.0).to_numpy()
            np.testing.assert_array_equal(done.encoded["users"].columns[name].values, expected)

    def test_an_svd_that_is_too_large_is_refused(self) -> None:
        with pytest.raises(HomebodyError, match="too few vectors for a view of 60: take a smaller size"):
            make_views(load(SYNTHETIC), {"taste": "svd:size=60"})

    def test_histories_that_are_too_short_are_refused(self) -> None:
        one = Population("toy", np.array([0, 1]), np.array([0], dtype=np.int32), n_items=2)
        with pytest.raises(HomebodyError, match="takes nothing of toy for the view 'taste'"):
            move_elsewhere(one, "taste", MadeView("svd"))


class TestRuns:
    def recipe(self, **rest: object) -> Recipe:
        views = {"taste": "svd:size=3,share=0.4"}
        return Recipe("fedials", SYNTHETIC, rounds=2, split="ratio:valid=0", views=views, **rest)  # type: ignore[arg-type]

    def test_a_recipe_without_views_is_written_as_it_was(self) -> None:
        assert "view" not in Recipe("fedmf", "ml-100k").to_toml()

    def test_a_recipe_keeps_its_views(self) -> None:
        recipe = self.recipe()
        assert Recipe.from_toml(recipe.to_toml()) == recipe
        assert "--view taste=svd:size=3,share=0.4" in " ".join(recipe.options())

    def test_a_recipe_with_a_bad_view_is_refused(self) -> None:
        with pytest.raises(HomebodyError, match="There is no setting of the view taste 'sise'"):
            Recipe.from_toml('schema = 2\nmethod = "fedmf"\ndata = "ml-100k"\n[views]\ntaste = "svd:sise=3"\n')

    def test_the_record_and_the_statement_say_who_saw_it(self, tmp_path: Path) -> None:
        result = execute(self.recipe(), tmp_path)
        assert any("whoever computed it saw all of them" in note for note in result["notes"])
        folder = RunFolder.open(Path(result["run"]))
        (said,) = outside({"taste": "svd:size=3,share=0.4"})
        assert said in statement(folder)["outside"]
        assert "40% of everyone's interactions" in said

    def test_a_run_folder_opens_again_with_its_views(self, tmp_path: Path) -> None:
        result = execute(self.recipe(), tmp_path)
        fitted, population = reopen(Path(result["run"]))
        assert population.elsewhere is not None
        there = population.elsewhere.items[: population.elsewhere.indptr[1]]
        assert not set(there.tolist()) & {item for item, _ in fitted.ranked(0, k=60)}

    def test_views_follow_the_seed(self) -> None:
        first, second = (population_of(self.recipe(seed=seed)).elsewhere for seed in (0, 1))
        assert first is not None
        assert second is not None
        assert first.items.tobytes() != second.items.tobytes()

    def test_another_view_is_other_data(self, tmp_path: Path) -> None:
        file = written(tmp_path, "user,x\n" + "".join(f"{user},{user % 7}.5\n" for user in range(80)))
        prints = set()
        for text in (str(file), "svd:size=3,share=0.4", "svd:size=3,share=0.3"):
            recipe = replace(self.recipe(), views={"taste": text})
            prints.add(environment(recipe, *prepare(recipe))["data_fingerprint"])
        assert len(prints) == 3

    def test_federated_vectors_say_what_holds(self) -> None:
        (said,) = outside({"taste": "fedials:share=0.25"})
        assert "25%" in said
        assert "stayed on the devices" in said
        assert "without noise" in said


class TestExport:
    def test_a_view_is_found_again(self, tmp_path: Path) -> None:
        made = make_views(load(SYNTHETIC), {"taste": "svd:size=3"})
        file = tmp_path / "taste.csv"
        rows, columns = export_view(made, "taste", file)
        assert columns == 3
        again = attach_view(load(SYNTHETIC), "taste", file)
        assert made.user_features is not None
        assert again.user_features is not None
        assert again.user_features.table.cast(pl.Float32).equals(made.user_features.table)
        assert rows == made.user_features.table["taste.1"].count()

    def test_parts_are_written_apart(self, tmp_path: Path) -> None:
        made = make_views(load(SYNTHETIC), {"taste": "svd:size=3"})
        here, there = export(made, tmp_path / "here.csv"), export_elsewhere(made, tmp_path / "there.csv")
        assert here + there == load(SYNTHETIC).n_interactions
        some = export_elsewhere(made, tmp_path / "some.csv", np.array([3]))
        table = pl.read_csv(tmp_path / "some.csv")
        assert table["user"].unique().to_list() == [3]
        assert table.height == some
        with pytest.raises(HomebodyError, match="nothing elsewhere"):
            export_elsewhere(load(SYNTHETIC), tmp_path / "none.csv")
        with pytest.raises(HomebodyError, match="There is no view 'shop'"):
            export_view(made, "shop", tmp_path / "shop.csv")

    def test_texts_and_lists(self, people: Population, tmp_path: Path) -> None:
        file = written(tmp_path, "user,tags,town\n7,a|b,=Ulm\n8,c,Ulm\n")
        seen = attach_view(people, "shop", file, kinds={"shop.town": "categorical"})
        export_view(seen, "shop", tmp_path / "again.csv")
        assert "'=Ulm" in (tmp_path / "again.csv").read_text()
        again = attach_view(people, "shop", tmp_path / "again.csv", kinds={"shop.town": "categorical"})
        assert seen.user_features is not None
        assert again.user_features is not None
        assert again.user_features.table.equals(seen.user_features.table)


class TestCommands:
    def test_info_counts_views_and_what_is_elsewhere(self) -> None:
        runner = CliRunner()
        found = runner.invoke(app, ["data", "info", SYNTHETIC, "--view", "taste=svd:size=3,share=0.4", "--json"])
        summary = json.loads(found.stdout)
        assert [one["view"] for one in summary["user_features"]] == ["taste"] * 3
        assert summary["elsewhere"] + summary["interactions"] == load(SYNTHETIC).n_interactions
        shown = runner.invoke(app, ["data", "info", SYNTHETIC, "--view", "taste=svd:size=3,share=0.4"]).stdout
        assert "view taste" in shown
        assert "elsewhere" in shown

    def test_export_writes_a_view(self, tmp_path: Path) -> None:
        file = tmp_path / "taste.csv"
        command = ["data", "export", SYNTHETIC, str(file), "--view", "taste=svd:size=3", "--part", "taste", "--json"]
        told = json.loads(CliRunner().invoke(app, command).stdout)
        assert told["columns"] == 3
        assert file.read_text().startswith("user,1,2,3\n")

    def test_a_name_that_is_given_twice_is_refused(self) -> None:
        command = ["data", "info", SYNTHETIC, "--view", "taste=svd", "--view", "taste=svd:size=4"]
        error = CliRunner().invoke(app, command).exception
        assert "--view gives 'taste' twice" in str(error)


def test_a_view_says_nothing_of_the_columns_of_the_file(tmp_path: Path) -> None:
    """A file of interactions alone, and a view beside it: no column of the file describes anybody."""
    rows = "".join(f"{user},{(user * 7 + n * 3) % 20}\n" for user in range(30) for n in range(6))
    data, view = tmp_path / "clicks.csv", tmp_path / "taste.csv"
    data.write_text("user,item\n" + rows, encoding="utf-8")
    view.write_text("user,x\n" + "".join(f"{user},{user % 7}.5\n" for user in range(30)), encoding="utf-8")
    titles = tmp_path / "titles.csv"
    titles.write_text("item,genre\n" + "".join(f"{item},{'ab'[item % 2]}\n" for item in range(20)), encoding="utf-8")
    recipe = Recipe(
        "fed-mvmf",
        str(data),
        split="ratio:valid=0",
        views={"taste": str(view)},
        item_features=str(titles),
        negatives=5,
    )
    said = environment(recipe, *prepare(recipe))["outside"]
    assert not any("Which columns of the file" in one for one in said)
