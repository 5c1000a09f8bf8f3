"""Looking into models: what is found, that it is kept, and what is refused."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from homebody.core import Batch, Catalogue, Data, Evaluated, Method, Rows, Tree, Update
from homebody.data import Population, load
from homebody.data.partitions import leave_one_out
from homebody.errors import HomebodyError, install
from homebody.methods.pfedrec import PFedRec
from homebody.privacy import Channel, Ledger
from homebody.recipe import Recipe
from homebody.report.terminal import print_reproduction
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.simulation.ablations import item_tables
from homebody.studies import cells, probes, reproduce, run_cells
from homebody.studies.papers import read_paper
from homebody.studies.reproduce import plan
from homebody.training import Trained, Training, fit

DATA = "synthetic:users=40,items=60,mean=12"
PFEDREC = Recipe("pfedrec", DATA, fields={"factors": 4, "item_rate": 1.0}, rounds=3)
BOTH = ["tables", "embedding"]
PAPER = f"""
title = "Within models"
citation = "Nobody, Nowhere 2020"

[[table]]
id = "1"
title = "Two methods"
metrics = ["hr@10", "ndcg@10"]
scale = 100
data = ["{DATA}"]
seeds = 2
rounds = 2

[[table.row]]
name = "FedMF"
method = "fedmf"
fields = {{ factors = 4, item_rate = 1.0 }}

[[table.row]]
name = "PFedRec<x>"
method = "pfedrec"
fields = {{ factors = 4, item_rate = 1.0 }}

[[figure]]
id = "2"
kind = "embedding"
title = "How items lie"
table = "1"
seeds = 1

[[figure]]
id = "3"
kind = "tables"
title = "Whose table"
table = "1"
rows = ["PFedRec<x>"]
protocols = ["published", "isolated", "strict"]
"""


@dataclass(frozen=True)
class Fixed(Method):
    """Items on a line, where this says; the client of user 0 has moved item 5 next to item 0."""

    uplink: Channel = Channel()

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"item": torch.tensor([0.0, 1.0, 1.5, 0.75, 4.0, 9.0, -2.0])[:, None]}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"item": Rows(torch.tensor([5]), torch.tensor([[-8.9]]), 7)}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        return {}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        raise AssertionError("nothing is trained")

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return shared["item"][items, 0]


@dataclass(frozen=True)
class Untuned(Fixed):
    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"user": torch.zeros(1)}


@dataclass(frozen=True)
class Tableless(Untuned):
    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"count": torch.zeros(7)}


def held(method: Method) -> Trained:
    """One person: trains on items 0, 1 and 2, item 6 for validation, 3 for test; 4 and 5 are strangers."""
    items = np.array([0, 1, 2, 6, 3], dtype=np.int32)
    runtime = Simulator(leave_one_out(Population("toy", np.array([0, 5]), items, n_items=7), how="latest"))
    runtime.begin(method, Rng.of(0))
    shared = method.init_shared(runtime.catalogue, Rng.of(0))
    return Trained(method, runtime, shared, Evaluated({}), 0, Ledger(), Training(method, 1, None, 0))


def read(folder: Path, probe: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(probes.file_of(folder, probe).read_text())
    return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that were begun, by the names of their folders."""
    begun: list[str] = []
    execute = cells.execute

    def counting(recipe: Any, out: Path, *arguments: Any, **named: Any) -> Any:
        begun.append(named["name"])
        return execute(recipe, out, *arguments, **named)

    monkeypatch.setattr(cells, "execute", counting)
    return begun


@given(st.sets(st.integers(0, 10_000), min_size=2, max_size=60), st.integers(0, 2**40))
def test_everyone_gets_somebody_else(users: set[int], seed: int) -> None:
    asked = np.array(sorted(users))
    lenders = probes.others(asked, Rng.of(seed))
    assert sorted(lenders.tolist()) == asked.tolist()
    assert not (lenders == asked).any()
    assert np.array_equal(lenders, probes.others(asked, Rng.of(seed)))


def test_who_lends_depends_on_the_seed() -> None:
    assert len({tuple(probes.others(np.arange(30), Rng.of(seed))) for seed in range(5)}) == 5


def test_separation_by_hand() -> None:
    # Nearest other training item: 0 → 1 (1), 1 → 2 (0.5), 2 → 1 (0.5); test item 3 → 1 (0.25). The strangers:
    # 4 → 2 (2.5), and 5 → 2 (7.5), or moved to 0.1: → 0 (0.1), nearer than any other.
    fitted = held(Untuned())
    training, test = probes.separations(fitted.runtime, fitted, np.array([0]))  # type: ignore[arg-type]
    assert (training.tolist(), test.tolist()) == ([1.0], [1.0])
    fitted = held(Fixed())
    training, test = probes.separations(fitted.runtime, fitted, np.array([0]))  # type: ignore[arg-type]
    assert (training.tolist(), test.tolist()) == ([0.5], [0.5])


def test_separations_of_many_against_a_plain_loop() -> None:
    split = leave_one_out(load(DATA))
    runtime = Simulator(split)
    fitted = fit(PFedRec(factors=4, item_rate=1.0), runtime, rounds=2, cohort=15, evaluate_every=0)
    people = probes._tellable(split)[[5, 0, 3, 11, 7, 20]]
    assert len(set(split.lengths[people])) > 3
    training, test = probes.separations(runtime, fitted, people)
    for place, user in enumerate(people.tolist()):
        (own,) = item_tables(runtime, fitted.method, fitted.shared, np.array([user]))
        table = own.dense()[0].double()
        known, (asked,) = split.training(user).tolist(), split.part(user, "test").tolist()
        strangers = sorted(set(range(60)) - set(split.population.history(user).tolist()))

        def far(item: int, known: list[int] = known, table: Tensor = table) -> float:
            return min(float((table[item] - table[other]).norm()) for other in known if other != item)

        def auc(item: int, strangers: list[int] = strangers, far: Callable[[int], float] = far) -> float:
            return sum(far(other) > far(item) for other in strangers) / len(strangers)

        assert strangers
        assert float(training[place]) == pytest.approx(np.mean([auc(item) for item in known]))
        assert float(test[place]) == pytest.approx(auc(asked))


def test_ties_count_half() -> None:
    near = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    rest = torch.tensor([[False, False, True, True]])
    items, real = torch.tensor([[0, 1, 3]]), torch.tensor([[True, True, False]])
    assert probes._auc(near, items, real, rest).tolist() == [(1.0 + 0.75) / 2]


def test_what_a_panel_shows() -> None:
    for method, touched in ((Fixed(), 1), (Untuned(), 0)):
        found = probes.embedding(probes.ProbedRun(held(method), PFEDREC))
        assert (found["user"], found["items"], found["touched"], found["tuned"]) == (0, 7, touched, bool(touched))
        assert [probes.MARKS[mark] for mark in found["mark"]] == [
            *["training item"] * 3,
            "held out for test",
            "not touched",
            "drawn as a negative" if touched else "not touched",
            "held out for validation",
        ]
        assert found["names"] == [str(item) for item in range(7)]
        assert len(found["x"]) == len(found["y"]) == 7
        assert (min(found["x"]), min(found["y"])) == (0, 0)
        assert max(found["x"] + found["y"]) == 1000
        assert found["separation"]["training"] == found["people"]["training"] == (0.5 if touched else 1.0)


def test_a_large_catalogue_is_shown_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = np.array([2, 0, 1, 0, 0, 4, -1, 3, 0, 0])
    assert probes._shown(mark, Rng.of(0)).tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    monkeypatch.setattr(probes, "SHOWN", 7)
    some = probes._shown(mark, Rng.of(0)).tolist()
    assert {0, 5, 7} < set(some)
    assert 6 not in some
    assert len(some) == 7
    assert some == sorted(some) == probes._shown(mark, Rng.of(0)).tolist()


def test_what_is_found_is_kept_with_the_run(tmp_path: Path, counted: list[str]) -> None:
    (result,) = run_cells([PFEDREC], tmp_path, probes=[BOTH], keep_state=False)
    folder = Path(result["run"])
    assert not list(folder.glob("state*"))
    tables = read(folder, "tables")
    assert tables["clients"] == 40
    assert list(tables["metrics"]) == list(probes.TABLES)
    assert tables["metrics"]["own"] == result["metrics"]
    assert len({metrics["ndcg@10"] for metrics in tables["metrics"].values()}) == 3
    before = {name: probes.file_of(folder, name).stat().st_mtime_ns for name in BOTH}
    assert run_cells([PFEDREC], tmp_path, probes=[BOTH], keep_state=False) == [result]
    assert {name: probes.file_of(folder, name).stat().st_mtime_ns for name in BOTH} == before
    assert len(counted) == 1


def test_a_model_that_is_gone_is_trained_beside_what_there_is(
    tmp_path: Path, counted: list[str], warm_workers: None
) -> None:
    (result,) = run_cells([PFEDREC], tmp_path / "a", keep_state=False)
    kept = {file.name: file.read_bytes() for file in Path(result["run"]).iterdir()}
    (again,) = run_cells([PFEDREC], tmp_path / "a", probes=[BOTH], keep_state=False)
    assert again == result
    assert counted == [Path(result["run"]).name, f"{Path(result['run']).name}-again"]
    now = {file.name: file.read_bytes() for file in Path(result["run"]).iterdir()}
    assert now.keys() - kept.keys() == {"probe-tables.json", "probe-embedding.json"}
    assert {name: now[name] for name in kept} == kept
    assert not (tmp_path / "a" / counted[1]).exists()
    # The same is found as in a model that was there, in another process too.
    (other,) = run_cells([PFEDREC], tmp_path / "b", probes=[BOTH], jobs=2, keep_state=False)
    for name in BOTH:
        assert read(Path(other["run"]), name) == read(Path(result["run"]), name)


def test_a_model_that_is_there_is_looked_into(tmp_path: Path, counted: list[str]) -> None:
    (result,) = run_cells([PFEDREC], tmp_path)
    run_cells([PFEDREC], tmp_path, probes=[["tables"]])
    assert read(Path(result["run"]), "tables")["metrics"]["own"] == result["metrics"]
    assert len(counted) == 1


def test_other_processes_look_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_workers: None) -> None:
    (result,) = run_cells([PFEDREC], tmp_path)

    def forbidden(*_: Any) -> Any:
        raise AssertionError("it was looked for in this process")

    monkeypatch.setattr(probes, "take", forbidden)
    run_cells([PFEDREC], tmp_path, probes=[["tables"]], jobs=2)
    assert read(Path(result["run"]), "tables")["metrics"]["own"] == result["metrics"]


def test_the_same_people_and_items_in_every_panel(tmp_path: Path) -> None:
    fedmf = Recipe("fedmf", DATA, fields={"factors": 4, "item_rate": 1.0}, rounds=1, protocol="published")
    results = run_cells([PFEDREC, fedmf], tmp_path, probes=[["embedding"]] * 2)
    tuned, shared = (read(Path(result["run"]), "embedding") for result in results)
    assert (tuned["tuned"], shared["tuned"]) == (True, False)
    assert (tuned["user"], tuned["names"]) == (shared["user"], shared["names"])
    assert tuned["touched"] > shared["touched"] == 0
    assert [mark > 1 for mark in tuned["mark"]] == [mark > 1 for mark in shared["mark"]]


@pytest.mark.parametrize(
    ("probe", "method", "expected"),
    [
        ("tables", Untuned(), "The clients of Untuned tune no item table"),
        ("tables", Tableless(), "Tableless shares no item table"),
        ("embedding", Tableless(), "Tableless shares no item table"),
        ("tables", Fixed(), "at least two clients"),
    ],
)
def test_nothing_to_look_at(probe: str, method: Method, expected: str) -> None:
    fitted = held(method)
    with pytest.raises(HomebodyError, match=expected):
        probes.PROBES[probe](probes.ProbedRun(fitted, PFEDREC))


@pytest.mark.parametrize(
    ("method", "kind", "expected"),
    [
        ("fedmf", "tables", "row 'PFedRec<x>': The clients of fedmf tune no item table"),
        ("popularity", "tables", "popularity is a centralised reference: there is no client's item table"),
        ("popularity", "embedding", "popularity is a centralised reference"),
    ],
)
def test_refused_before_anything_is_trained(
    tmp_path: Path, write_paper: Callable[..., Path], method: str, kind: str, expected: str
) -> None:
    text = PAPER.replace('method = "pfedrec"\nfields = { factors = 4, item_rate = 1.0 }', f'method = "{method}"')
    text = text.replace('kind = "tables"', f'kind = "{kind}"').replace("[[figure]]", "[[gone]]", 1)
    text = text[: text.index("[[gone]]")] + text[text.index("[[figure]]") :]
    with pytest.raises(HomebodyError, match=expected):
        read_paper(write_paper(tmp_path, text))


def test_without_scikit_learn_only_the_plot_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_paper: Callable[..., Path], counted: list[str]
) -> None:
    found = probes.importlib.util.find_spec
    paper = read_paper(write_paper(tmp_path, PAPER))
    out = tmp_path / "runs"
    with monkeypatch.context() as without:
        without.setattr(probes.importlib.util, "find_spec", lambda name: None if name == "sklearn" else found(name))
        assert {name for names in plan(paper, table="1").probes for name in names} == {"tables"}
        result = reproduce.reproduce(plan(paper, seeds=1), out)
    _, figure, swaps = result["studies"]
    for row in figure["data"][DATA]["rows"]:
        assert row["errors"] == [f"The plot of an embedding needs scikit-learn: {install('report')}."]
    assert swaps["data"][DATA]["rows"][0]["points"][0]["obtained"]["strict"]["n"] == 1
    assert "needs scikit-learn" in (out / "reproduce" / "tiny" / "RESULTS.md").read_text(encoding="utf-8")
    # The models wait until it is there.
    begun = len(counted)
    result = reproduce.reproduce(plan(paper, seeds=1), out)
    assert len(counted) == begun
    assert all(len(row["panels"]) == 2 for row in result["studies"][1]["data"][DATA]["rows"])
    assert not list((out / "cells").glob("*/state*"))


def test_figures_from_the_runs_of_a_table(tmp_path: Path, write_paper: Callable[..., Path], counted: list[str]) -> None:
    paper = read_paper(write_paper(tmp_path, PAPER))
    out = tmp_path / "runs"
    reproduce.reproduce(plan(paper, table="1"), out)
    assert len(counted) == 8
    reproduce.reproduce(plan(paper, figure="2"), out)
    assert len(counted) == 8, "the models were there when the table was made"
    result = reproduce.reproduce(plan(paper, figure="3"), out)
    assert len(counted) == 10, "only the isolated protocol is new"

    assert all(
        panel["n"] == 1 for row in result["studies"][1]["data"][DATA]["rows"] for panel in row["panels"].values()
    )

    table, figure, swaps = (study["data"][DATA]["rows"] for study in result["studies"])
    (row,) = swaps
    assert [point["value"] for point in row["points"]] == ["own", "global", "other"]
    for protocol in ("published", "strict"):
        own = row["points"][0]["obtained"][protocol]
        assert own["metrics"] == table[1]["obtained"][protocol]["metrics"]
        for point in row["points"]:
            found = point["obtained"][protocol]
            files = [read(out / "cells" / name, "tables")["metrics"][point["value"]] for name in found["cells"]]
            assert found["metrics"]["hr@10"]["values"] == [one["hr@10"] for one in files]
            assert found["metrics"]["hr@10"]["sd"] is not None
    markdown = (out / "reproduce" / "tiny" / "RESULTS.md").read_text(encoding="utf-8")
    assert "| method | metric | source | own | global | other |" in markdown
    assert "| PFedRec&lt;x> | HR@10 | obtained, strict |" in markdown
    assert markdown.count("| FedMF | published | shared |") == 1
    page = (out / "reproduce" / "tiny" / "index.html").read_text(encoding="utf-8")
    charts = json.loads(page.split('id="charts">')[1].split("</script>")[0])
    panels = [chart for chart in charts if chart["kind"] == "scatter"]
    assert len(panels) == 2
    for chart, of in zip(panels, figure, strict=True):
        for protocol in ("published", "strict"):
            view, panel = chart["views"][protocol], of["panels"][protocol]
            assert (view["x"], view["y"]) == (panel["x"], panel["y"])
            assert sorted(n for group in view["groups"] for n in group["at"]) == list(range(60))
            places = {n: group["place"] for group in view["groups"] for n in group["at"]}
            assert [places[n] for n in range(60)] == panel["mark"]
    assert "Figure 2 on" in page
    assert "Figure 2 on synthetic:users=40,items=60,mean=12 <span class=soft>1 seed</span></caption>" in page, (
        "it has no scale"
    )
    figure[1]["name"] = "A rather long name"
    for panel in figure[1]["panels"].values():
        panel["people"]["held_out"]["sd"] = panel["people"]["training"]["sd"] = 0.0123
    console = Console(width=80, file=io.StringIO())
    print_reproduction(result, out / "reproduce" / "tiny", ["Figure 2", "Figure 3"], console)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in told
    assert f"{figure[1]['panels']['strict']['people']['held_out']['mean']:.3f} ± 0.012" in told
    assert f"{100 * row['points'][2]['obtained']['strict']['metrics']['ndcg@10']['mean']:.2f}" in told
    bars = [chart for chart in charts if chart["kind"] == "bars"]
    assert [bar["name"] for bar in bars[0]["views"]["all"]["bars"]] == ["published", "isolated", "strict"]
    own = row["points"][0]["obtained"]["published"]["metrics"]["hr@10"]
    assert bars[0]["views"]["all"]["bars"][0]["y"][0] == pytest.approx(100 * own["mean"])


def test_several_seeds_of_a_plot(tmp_path: Path, write_paper: Callable[..., Path], counted: list[str]) -> None:
    paper = read_paper(write_paper(tmp_path, PAPER))
    out = tmp_path / "runs"
    reproduce.reproduce(plan(paper, table="1"), out)
    del counted[:]
    result = reproduce.reproduce(plan(paper, figure="2", seeds=2), out)
    # The table's second seed was not looked into: no figure of the recipe asks for it.
    assert len(counted) == 4
    assert all(name.endswith("-again") for name in counted)
    for row, method in zip(result["studies"][1]["data"][DATA]["rows"], ("fedmf", "pfedrec"), strict=True):
        for protocol, panel in row["panels"].items():
            runs = sorted((out / "cells").glob(f"{method}-*-{protocol}-seed*"))
            files = [read(run, "embedding") for run in runs]
            assert len(files) == panel["n"] == 2
            assert (panel["x"], panel["user"], panel["count"]) == (files[0]["x"], files[0]["user"], 39)
            values = [one["people"]["held_out"] for one in files]
            assert panel["people"]["held_out"]["values"] == values
            assert panel["people"]["held_out"]["sd"] == pytest.approx(statistics.stdev(values))


def test_runs_that_nobody_looked_into_are_left_out(tmp_path: Path) -> None:
    probes.file_of(tmp_path, "tables").write_text('{"metrics": {}}')
    (tmp_path / "recipe.toml").touch()
    there, never = {"run": str(tmp_path)}, {"run": str(tmp_path / "other")}
    failed, refused = {"error": "It broke."}, {"run": str(tmp_path), "refused": {"tables": "It has none."}}
    assert probes.probed("tables", [never, there, failed, refused]) == [
        {**there, "probe": {"metrics": {}}},
        failed,
        {**refused, "error": "It has none."},
    ]
    assert probes.probed("embedding", [refused]) == []


def test_a_refusal_is_kept_and_trains_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[str]
) -> None:
    run_cells([PFEDREC], tmp_path, keep_state=False)

    def refusing(*_: Any) -> Any:
        raise HomebodyError("There is nothing to see.")

    monkeypatch.setitem(probes.PROBES, "tables", refusing)
    for _ in range(3):
        (result,) = run_cells([PFEDREC], tmp_path, keep_state=False, probes=[["tables"]])
        assert "error" not in result
        assert probes.probed("tables", [result])[0]["error"] == "There is nothing to see."
    assert len(counted) == 2  # the run, and once more for the probe
