"""A paper's recipe: found, read, and refused with the place of the mistake."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import homebody
from homebody.errors import HomebodyError
from homebody.methods import METHODS, trust
from homebody.studies import papers
from homebody.studies.papers import find_paper, list_papers, read_paper
from homebody.studies.plan import plan
from homebody.studies.study import COMPUTED, deviations, published

Write = Callable[..., Path]
DATA = "synthetic:users=40,items=60,mean=12"
ROOT = Path(__file__).parents[2]


class TestReading:
    def test_what_a_cell_runs(self, tmp_path: Path, write_paper: Write) -> None:
        paper = read_paper(write_paper(tmp_path))
        (table,) = paper.tables
        popularity, fedmf, absent = table.rows
        recipe = table.recipe(fedmf, DATA, "published", 1)
        assert (recipe.method, recipe.data, recipe.protocol, recipe.seed) == ("fedmf", DATA, "published", 1)
        assert recipe.fields == {"factors": 4, "learning_rate": 0.05}
        assert recipe.rounds == 3
        assert table.recipe(popularity, DATA, "strict", 0).rounds == 1
        assert absent.method is None
        assert (paper.name, paper.title, table.label, table.protocols) == (
            "tiny",
            "A tiny paper",
            "Table 1",
            ["published", "strict"],
        )

    def test_a_figure_takes_a_tables_rows_and_nothing_is_run_twice(self, tmp_path: Path, write_paper: Write) -> None:
        paper = read_paper(write_paper(tmp_path))
        figure = paper.figures[0]
        assert [row.name for row in figure.rows] == ["FedMF+<x>"]
        assert figure.rows[0].published == {}
        table = paper.tables[0]
        assert figure.recipe(figure.rows[0], DATA, "strict", 1) == table.recipe(table.rows[1], DATA, "strict", 1)

    def test_a_sweep_varies_one_field(self, tmp_path: Path, write_paper: Write) -> None:
        sweep = read_paper(write_paper(tmp_path)).figures[1]
        factors = [
            sweep.recipe(sweep.rows[0], DATA, "strict", 0, value).fields["factors"]
            for value in sweep.points(sweep.rows[0])
        ]
        assert factors == [2, 4]
        assert [published(sweep, sweep.rows[0], DATA, n) for n in (0, 1)] == [{"ndcg@10": 0.1}, {"ndcg@10": 0.2}]

    def test_a_sweep_may_vary_the_run(self, tmp_path: Path, write_paper: Write, tiny: str) -> None:
        text = tiny.replace('vary = "fields.factors"', 'vary = "run.cohort"')
        sweep = read_paper(write_paper(tmp_path, text)).figures[1]
        assert sweep.recipe(sweep.rows[0], DATA, "strict", 0, 4).cohort == 4

    def test_published_figures_are_parts_of_one_and_nan_is_none(self, tmp_path: Path, write_paper: Write) -> None:
        (table,) = read_paper(write_paper(tmp_path)).tables
        assert published(table, table.rows[0], DATA) == {"hr@10": pytest.approx(0.995)}
        assert math.isnan(table.rows[0].published[DATA][1])

    def test_a_metric_at_another_length_asks_for_it(self, tmp_path: Path, write_paper: Write, tiny: str) -> None:
        usual = read_paper(write_paper(tmp_path, name="usual")).tables[0]
        assert usual.recipe(usual.rows[0], DATA, "strict", 0).cutoffs == [5, 10, 20]
        text = tiny.replace('metrics = ["hr@10", "ndcg@10"]', 'metrics = ["hr@10", "ndcg@30"]')
        table = read_paper(write_paper(tmp_path, text)).tables[0]
        assert table.recipe(table.rows[0], DATA, "strict", 0).cutoffs == [5, 10, 20, 30]

    def test_settings_of_the_run(self, tmp_path: Path, write_paper: Write, tiny: str) -> None:
        text = tiny.replace("scale = 100\n", 'scale = 100\nrun = { held_out = "random", negatives = 20 }\n')
        text = text.replace("rounds = 1\n", "rounds = 1\nrun = { negatives = 10 }\n")
        table = read_paper(write_paper(tmp_path, text)).tables[0]
        recipes = [table.recipe(row, DATA, "strict", 0) for row in table.rows[:2]]
        assert [(recipe.held_out, recipe.negatives) for recipe in recipes] == [("random", 10), ("random", 20)]

    def test_a_method_of_the_authors_own_lies_beside_the_recipe(
        self, tmp_path: Path, write_paper: Write, tiny: str
    ) -> None:
        folder = write_paper(tmp_path, tiny.replace('method = "popularity"', 'method = "own.py:BiasedMF"'))
        shutil.copy(ROOT / "docs" / "examples" / "biased_mf.py", folder / "own.py")
        with pytest.raises(HomebodyError, match="which nobody here named"):
            read_paper(folder)
        (method, *_) = read_paper(folder, load=False).methods
        trust(method)
        row = read_paper(folder).tables[0].rows[0]
        assert row.method == f"{folder.resolve() / 'own.py'}:BiasedMF"

    def test_a_row_runs_once_its_method_exists(self, tmp_path: Path, write_paper: Write, tiny: str) -> None:
        later = tiny.replace('missing = "nobody wrote it"', 'method = "later"\nmissing = "nobody wrote it"')
        assert read_paper(write_paper(tmp_path, later)).tables[0].rows[2].method is None
        now = later.replace('method = "later"', 'method = "fedials"')
        assert read_paper(write_paper(tmp_path, now, "now")).tables[0].rows[2].method == "fedials"


BAD = {
    "an unknown key": ('docs = "', 'doc = "', "There is no key 'doc'; did you mean 'docs'?"),
    "a missing title": ('title = "A tiny paper"', 'titel = "A"', r"'title' is missing \(is 'titel' meant\?\)"),
    "an unknown key of a row": ("note = ", "remark = ", "table 1, row 'Popularity': There is no key 'remark'"),
    "an unknown method": ('"popularity"', '"popularty"', "row 'Popularity': There is no method 'popularty'; did you"),
    "no method": ('method = "popularity"\n', "", "row 'Popularity': 'method' is missing"),
    "too many figures": ("[50, 25]", "[50, 25, 12]", "row 'Absent': published.* has 3 figures, and the table 2"),
    "too few figures": ("[1.0, 0.5]", "[1.0]", "published.* has 1 figures, and the table 2 figures .hr@10, ndcg@10"),
    "a figure that is a text": ("[1.0, 0.5]", '[1.0, "x"]', "must be a list of 2 figures"),
    "figures for other data": (f'"{DATA}" = [50, 25]', "ml-1m = [50, 25]", "no data set of this table in 'published'"),
    "an unknown field": ("factors = 4 }", "factor = 4 }", "row 'FedMF.<x>': There is no field of fedmf 'factor'"),
    "a field out of bounds": ("factors = 4 }", "factors = 0 }", "row 'FedMF.<x>': factors must be at least 1"),
    "a field of a data set": ("learning_rate = 0.05", 'learning_rate = "x"', "learning_rate must be a number"),
    "an unknown protocol": (
        "seeds = 2\n",
        'seeds = 2\nprotocols = ["loose"]\n',
        "table 1: There is no protocol 'loose'",
    ),
    "seeds": ("seeds = 2", "seeds = 0", "table 1: seeds must be at least 1"),
    "seeds of the wrong kind": ("seeds = 2", 'seeds = "2"', "table 1: 'seeds' must be a whole number, not '2'"),
    "a scale": ("scale = 100", "scale = 0", "table 1: scale must be above 0"),
    "metrics": ('metrics = ["hr@10", "ndcg@10"]', "metrics = []", "'metrics' must be a list of at least one text"),
    "a setting": ("scale = 100\n", "scale = 100\nrun = { seed = 3 }\n", "There is no setting of a run 'seed'"),
    "a setting of the wrong kind": ("scale = 100\n", 'scale = 100\nrun = { cohort = "x" }\n', "cohort must be a whole"),
    "a repeated row": ('name = "Absent"', 'name = "Popularity"', "there are 2 rows named 'Popularity'"),
    "a repeated id": ('id = "3"', 'id = "2"', "there are 2 figures of id '2'"),
    "a figure of no table": ('table = "1"', 'table = "7"', "figure 1: There is no table before this one '7'"),
    "a figure of no row": (
        'rows = ["FedMF+<x>"]',
        'rows = ["FedMF"]',
        "There is no row of the table that this one builds on 'FedMF'",
    ),
    "a kind of figure": ('kind = "convergence"', 'kind = "pie"', "There is no kind of figure 'pie'"),
    "a sweep of nothing": ('vary = "fields.factors"', 'vary = "factors"', "vary must be fields.NAME or run.NAME"),
    "a sweep of an unknown field": ("fields.factors", "fields.width", "There is no field of fedmf 'width'"),
    "a sweep without values": ("values = [2, 4]", "values = []", "values must name at least one"),
    "a sweep's figures": ("[[0.1], [0.2]]", "[[0.1]]", "must have 2 lists, one for each value"),
    "a sweep of an ε without a budget": ("fields.factors", "run.epsilon", "To vary run.epsilon, give run a budget"),
    "a sweep of an ε of 0": (
        'vary = "fields.factors"\nvalues = [2, 4]',
        'vary = "run.epsilon"\nvalues = [0, 4]',
        "the values of run.epsilon must be numbers above 0, or inf",
    ),
    "a row's seeds": ('method = "popularity"', 'method = "popularity"\nseeds = 0', "seeds must be at least 1, not 0"),
    "TOML": ('title = "A tiny paper"', "title = ", "not valid TOML"),
    "a newer format": ('title = "A tiny paper"', 'schema = 9\ntitle = "A"', "newer Homebody"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_named_with_its_place(case: str, tmp_path: Path, write_paper: Write, tiny: str) -> None:
    old, new, expected = BAD[case]
    assert old in tiny
    with pytest.raises(HomebodyError, match=rf"^tiny/recipe.toml.*{expected}"):
        read_paper(write_paper(tmp_path, tiny.replace(old, new, 1)))


def test_a_paper_of_nothing_is_refused(tmp_path: Path, write_paper: Write) -> None:
    with pytest.raises(HomebodyError, match="neither a"):
        read_paper(write_paper(tmp_path, 'title = "A"\ncitation = "B"\n'))


class TestFinding:
    def test_here_first_then_the_sources(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_paper: Write
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert find_paper("pfedrec").resolve() == ROOT / "experiments" / "pfedrec"
        mine = write_paper(tmp_path / "experiments", name="pfedrec")
        assert find_paper("pfedrec").resolve() == mine.resolve()
        assert [folder.name for folder in list_papers()].count("pfedrec") == 1

    def test_a_folder_itself(self, tmp_path: Path, write_paper: Write) -> None:
        folder = write_paper(tmp_path / "somewhere")
        assert find_paper(str(folder)) == folder

    def test_the_installed_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_paper: Write) -> None:
        package = tmp_path / "lib" / "site" / "homebody"
        folder = write_paper(package / "experiments")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(homebody, "__file__", str(package / "__init__.py"))
        assert [found.resolve() for found in list_papers()] == [folder.resolve()]

    def test_a_name_that_is_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(HomebodyError, match="no paper 'pfedrek'; did you mean 'pfedrec'"):
            find_paper("pfedrek")
        with pytest.raises(HomebodyError, match=r"holds no recipe\.toml"):
            find_paper(str(tmp_path))


@pytest.mark.parametrize("folder", sorted((ROOT / "experiments").glob("*/")), ids=lambda folder: folder.name)
def test_every_paper_here_can_be_read(folder: Path) -> None:
    paper = read_paper(folder)
    assert paper.title
    page, _, anchor = paper.docs.partition("#")
    assert (ROOT / page).is_file()
    assert not anchor or f"## {anchor}" in (ROOT / page).read_text(encoding="utf-8")
    for study in paper.studies:
        assert study.kind in COMPUTED or any(row.method in METHODS for row in study.rows)


def test_the_recipe_in_the_docs_can_be_read(tmp_path: Path, write_paper: Write) -> None:
    page = (ROOT / "docs" / "reproducing.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    paper = read_paper(write_paper(tmp_path, recipe))
    assert [study.label for study in paper.tables] == [f"Table {number}" for number in (2, 3, 4, 5, 6)]
    assert [study.label for study in paper.figures] == ["Figure 3", "Figure 4"]


def test_pfedrec_has_its_table() -> None:
    """Every row of the paper's Table 1, with the figures for all four data sets."""
    table = read_paper(ROOT / "experiments" / "pfedrec").tables[0]
    assert len(table.rows) == 8
    assert all(set(row.published) == set(table.data) for row in table.rows)
    ours = {row.name: row for row in table.rows}
    assert published(table, ours["PFedRec"], "ml-1m") == {
        "hr@10": pytest.approx(0.7326),
        "ndcg@10": pytest.approx(0.4436),
    }
    rates = [table.recipe(ours["PFedRec"], data, "strict", 0).fields["learning_rate"] for data in table.data]
    assert rates == [0.1, 0.1, 0.05, 0.01]
    assert papers.SCHEMA_VERSION == 1


class TestPFedRec:
    """What the paper's recipe asks for, by the paper's own figures."""

    def test_every_table_and_figure_that_is_counted_here(self) -> None:
        paper = read_paper(ROOT / "experiments" / "pfedrec")
        assert [one.id for one in paper.tables] == ["1", "2", "5", "6", "7", "8", "10", "leak", "clip", "strict"]
        assert {"4", "5", "6"} <= {one.id for one in paper.figures}
        seeds = {one.label: one.seeds for one in paper.studies}
        assert [seeds[f"Table {number}"] for number in (1, 2, 5, 8, 10, 6, 7)] == [5, 5, 5, 5, 5, 3, 3]

    @pytest.mark.parametrize("number", ["2", "5", "8", "10"])
    def test_tables_that_show_the_runs_of_table_1(self, number: str) -> None:
        paper = read_paper(ROOT / "experiments" / "pfedrec")
        first = {one.id: one for one in paper.tables}["1"]
        other = {one.id: one for one in paper.tables}[number]
        for data in other.data:
            known = [first.recipe(row, data, "published", 0) for row in first.rows if row.method]
            recipes = [other.recipe(row, data, "published", 0) for row in other.rows if row.method]
            assert recipes
            assert all(recipe in known for recipe in recipes)

    def test_a_sweep_passes_through_the_run_of_table_1(self) -> None:
        paper = read_paper(ROOT / "experiments" / "pfedrec")
        studies = {one.label: one for one in paper.studies}
        first = studies["Table 1"]
        ours = next(row for row in first.rows if row.name == "PFedRec")
        for label, point in (("Table 6", 1), ("Table 7", 0), ("Figure 5", 2)):
            sweep = studies[label]
            value = sweep.points(sweep.rows[0])[point]
            expected = first.recipe(ours, "ml-1m", "strict", 2)
            assert sweep.recipe(sweep.rows[0], "ml-1m", "strict", 2, value).to_toml() == expected.to_toml()

    def test_the_papers_figures(self) -> None:
        tables = {one.id: one for one in read_paper(ROOT / "experiments" / "pfedrec").tables}
        six, seven, eight = (tables[number] for number in ("6", "7", "8"))
        assert published(six, six.rows[0], "ml-100k", 3) == pytest.approx({"hr@10": 0.7175, "ndcg@10": 0.4542})
        assert deviations(six, six.rows[0], "ml-100k", 3) == pytest.approx({"hr@10": 0.008, "ndcg@10": 0.0088})
        assert published(seven, seven.rows[0], "amazon-video", 5) == pytest.approx({"hr@10": 0.5906, "ndcg@10": 0.3734})
        assert published(eight, eight.rows[-1], "lastfm-2k") == pytest.approx(
            {"full/hr@10": 0.5665, "full/ndcg@10": 0.3311}
        )
        five = tables["5"]
        assert published(five, five.rows[-1], "ml-1m") == {"parameters": 118625, "epochs": 95, "seconds": 13585}

    def test_what_is_said_of_a_row_stands_in_the_tables_that_take_it_over(self) -> None:
        paper = read_paper(ROOT / "experiments" / "pfedrec")
        tables = {one.id: {row.name: row for row in one.rows} for one in paper.tables}
        said = tables["1"]["FedRecon"].note
        assert "not chosen on validation" in said
        assert said == tables["8"]["FedRecon"].note == tables["leak"]["FedRecon"].note
        assert tables["5"]["FedRecon"].note.startswith("The paper counts passes")
        assert not any(row.note for one in paper.figures for row in one.rows)

    def test_noise_as_published_and_with_a_bound(self) -> None:
        tables = {one.id: one for one in read_paper(ROOT / "experiments" / "pfedrec").tables}
        seven, clips = tables["7"], tables["clip"]
        (ours,) = seven.rows
        assert [seven.recipe(ours, "ml-1m", "strict", 0, one).stages for one in seven.points(ours)[:2]] == [
            [],
            ["laplace:b=0.1,unbounded=true"],
        ]
        for clipped, norm in zip(clips.rows, ("0.02", "1000"), strict=True):
            stages = [clips.recipe(clipped, "ml-100k", "published", 0, one).stages for one in clips.points(clipped)]
            assert {one[0] for one in stages} == {f"clip:norm={norm},order=1"}
            assert [one[1:] for one in stages] == [[], *([f"laplace:b={b}"] for b in (0.1, 0.2, 0.3, 0.4, 0.5))]

    def test_inactive_users_are_those_of_the_papers_table_9(self) -> None:
        ten = {one.id: one for one in read_paper(ROOT / "experiments" / "pfedrec").tables}["10"]
        full, inactive = ten.rows
        names = [inactive.metric_on(data, "hr@10") for data in ten.data]
        assert names == ["20-30/hr@10", "20-30/hr@10", "5-20/hr@10"]
        assert full.metric_on("ml-100k", "hr@10") == "hr@10"
        assert ten.recipe(inactive, "lastfm-2k", "strict", 0).slices == ["5-20"]


class TestNearby:
    """What the recipe of the private corner asks for."""

    def test_a_curve_passes_through_the_runs_of_table_1(self) -> None:
        paper = read_paper(ROOT / "experiments" / "nearby")
        table, curve = paper.tables[0], paper.figures[0]
        known = {row.name: row for row in table.rows}
        for row in curve.rows:
            value = None if row.fixed else curve.values[curve.labels.index("8")]
            assert curve.recipe(row, "ml-1m", "strict", 0, value) == table.recipe(known[row.name], "ml-1m", "strict", 0)

    def test_every_private_row_spends_the_same_against_the_server(self) -> None:
        paper = read_paper(ROOT / "experiments" / "nearby")
        own = {"features, nothing sent", "fmf-ldp, proxy", "popularity, collected", "ials", "fedials", "pfedrec"}
        for row in paper.tables[0].rows:
            recipe = paper.tables[0].recipe(row, "ml-1m", "strict", 0)
            assert recipe.held_out == "latest-random"
            assert (recipe.budget, recipe.calibrate) == (
                (None, False) if row.name in own else ("eps=8,delta=1e-6,observer=server", True)
            )

    def test_without_a_budget_there_is_no_noise(self) -> None:
        curve = read_paper(ROOT / "experiments" / "nearby").figures[0]
        recipes = [curve.recipe(curve.rows[0], "ml-1m", "strict", 0, value) for value in curve.values]
        assert [recipe.budget for recipe in recipes] == [
            *(f"eps={epsilon},delta=1e-6,observer=server" for epsilon in (1, 2, 4, 8)),
            None,
        ]
        assert [recipe.calibrate for recipe in recipes] == [True, True, True, True, False]
        assert recipes[-1].build().uplink.facts.noise_on_sum
        assert recipes[-1].build().uplink.deviation(10, 10) == 0

    def test_it_can_be_run_in_a_night(self) -> None:
        recipes = plan(read_paper(ROOT / "experiments" / "nearby"), data=["ml-1m"]).recipes
        assert len(recipes) <= 150


class TestTablesOfTables:
    def test_pairs_keep_what_was_published(self, tmp_path: Path, write_paper: Write, more: str) -> None:
        table = read_paper(write_paper(tmp_path, more)).tables[1]
        assert (table.label, table.kind, table.pairs) == ("Table 4", "pairs", [("Popularity", "FedMF+<x>")])
        assert [row.name for row in table.rows] == ["Popularity", "FedMF+<x>"]
        assert table.rows[1].published == {DATA: [1.0, 0.5]}

    def test_a_row_of_another_table(self, tmp_path: Path, write_paper: Write, more: str) -> None:
        paper = read_paper(write_paper(tmp_path, more))
        first, costs, noise = paper.tables[0], paper.tables[2], paper.tables[3]
        assert costs.recipe(costs.rows[0], DATA, "strict", 1) == first.recipe(first.rows[1], DATA, "strict", 1)
        assert published(costs, costs.rows[0], DATA) == {"parameters": 244, "epochs": 7, "seconds": 100}
        assert (costs.protocols, costs.seeds, noise.seeds, noise.protocols) == (
            ["published"],
            2,
            1,
            ["published", "strict"],
        )
        ours, own = noise.rows
        assert (
            noise.recipe(ours, DATA, "strict", 0, []).to_toml()
            == first.recipe(first.rows[1], DATA, "strict", 0).to_toml()
        )
        recipe = noise.recipe(own, DATA, "strict", 0, noise.points(own)[1])
        assert recipe.stages == ["clip:norm=1,order=1", "laplace:b=0.25"]
        assert recipe.fields == {"factors": 2, "learning_rate": 0.05, "item_rate": 3.0}
        assert own.published == {}

    def test_values_have_labels_and_deviations(self, tmp_path: Path, write_paper: Write, more: str) -> None:
        noise = read_paper(write_paper(tmp_path, more)).tables[3]
        assert (noise.form, noise.labels, noise.axis, noise.also) == ("table", ["none", "some"], "noise", ["epsilon"])
        assert published(noise, noise.rows[0], DATA, 0) == pytest.approx({"hr@10": 0.03, "ndcg@10": 0.02})
        assert published(noise, noise.rows[0], DATA, 1) == pytest.approx({"hr@10": 0.01})
        assert deviations(noise, noise.rows[0], DATA, 0) == pytest.approx({"hr@10": 0.005, "ndcg@10": 0.0025})
        assert deviations(noise, noise.rows[0], DATA, 1) == {}

    def test_a_slice_of_the_users(self, tmp_path: Path, write_paper: Write, more: str) -> None:
        paper = read_paper(write_paper(tmp_path, more))
        everyone, few = paper.tables[4].rows
        assert few.metric_on(DATA, "hr@10") == "-12/hr@10"
        assert few.metric_on(DATA, "seconds") == "seconds"
        assert everyone.metric_on(DATA, "hr@10") == "hr@10"
        assert paper.tables[4].recipe(few, DATA, "strict", 0).slices == ["-12"]

    def test_settings_by_data_set_are_those_of_the_table_below(
        self, tmp_path: Path, write_paper: Write, tiny: str
    ) -> None:
        text = tiny.replace("scale = 100\n", f'scale = 100\nrun_on = {{ "{DATA}" = {{ negatives = 9 }} }}\n')
        paper = read_paper(write_paper(tmp_path, text))
        for study in (paper.tables[0], paper.figures[0]):
            assert (
                study.recipe(study.rows[-1] if study.form == "figure" else study.rows[0], DATA, "strict", 0).negatives
                == 9
            )

    @pytest.mark.parametrize(
        ("old", "new", "expected"),
        [
            ('pairs = [["Popularity", "FedMF+<x>"]]', "pairs = []", "table 4: pairs must name at least one"),
            ('["Popularity", "FedMF+<x>"]', '["Popularity"]', "table 4: pairs must be lists of two rows"),
            ('["Popularity", "FedMF+<x>"]', '["Popularity", "Nobody"]', "table 4: There is no row of the table"),
            ('kind = "pairs"', 'kind = "pair"', "There is no kind of table 'pair'; did you mean 'pairs'"),
            ('of = "FedMF+<x>"\npublished', 'of = "FedMF"\npublished', "row 'FedMF': There is no row of the table"),
            ('labels = ["none", "some"]', 'labels = ["none"]', "table 6: labels must be 2 texts"),
            ('also = ["epsilon"]', 'also = ["epsilom"]', "table 6: There is no quantity of a run 'epsilom'"),
            ('values = [["clip:norm=2"], ', "values = [", "row 'Own noise': values are for a sweep, and as many"),
            ("[[0.5, 0.25], [nan, nan]]", "[[0.5, 0.25]]", "published_sd.* must have 2 lists"),
            ("[[0.5, 0.25], [nan, nan]]", "[[0.5], [nan, nan]]", "published_sd.* has 1 figures, and the table 2"),
            (
                '"-12" }\npub',
                '"-13" }\npub',
                "row 'Few': slice.* is -13, which its runs on .* do not report: add run_on",
            ),
            (f'run_on = {{ "{DATA}"', "run_on = { ml-1m", "table 10: There is no data set of this table in 'run_on'"),
            ("slices = [", "slice = [", "table 10, row 'Everyone': There is no setting of a run 'slice'"),
            ('"laplace:b=0.25"]', '"laplac:b=0.25"]', "row 'Own noise': There is no stage 'laplac'"),
            (
                'id = "5"\ntitle = "Costs"\ntable = "1"',
                'id = "5"\ntitle = "Costs"\ntable = "6"',
                "no table before this one '6'",
            ),
        ],
    )
    def test_a_mistake_is_named_with_its_place(
        self, old: str, new: str, expected: str, tmp_path: Path, write_paper: Write, more: str
    ) -> None:
        assert old in more
        with pytest.raises(HomebodyError, match=rf"^tiny/recipe.toml.*{expected}"):
            read_paper(write_paper(tmp_path, more.replace(old, new, 1)))
