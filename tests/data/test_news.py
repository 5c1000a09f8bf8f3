"""News with impressions: MIND, EB-NeRD and IBM's articles, from small files in their formats."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from homebody.data import load
from homebody.data.ebnerd import read_ebnerd
from homebody.data.ibm import read_ibm_articles
from homebody.data.mind import read_mind
from homebody.data.partitions import split
from homebody.data.population import Population
from homebody.errors import HomebodyError
from homebody.evaluation import measure
from homebody.methods.baselines import Popularity

BEHAVIOURS = [
    "1\tU2\t11/12/2019 2:14:46 PM\tN1 N2 N1\tN3-0 N4-1 N5-0",
    "2\tU1\t11/13/2019 5:53:12 AM\t\tN3-1 N1-0",
    "3\tU2\t11/11/2019 12:00:01 AM\tN1 N2 N1\tN5-1 N4-0",
]
NEWS = [
    "N1\tnews\tnewsus\tFirst title\tIts abstract\thttps://x\t[]\t[]",
    "N2\tsports\tgolf\t\t\thttps://x\t[]\t[]",
    "N3\tnews\tnewsus\tThird \"quoted\t\thttps://x\t[]\t[]",
    "N9\tnews\tnewsus\tNobody saw it\t\thttps://x\t[]\t[]",
]  # fmt: skip


def mind(folder: Path, behaviours: list[str] = BEHAVIOURS, news: list[str] = NEWS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "behaviors.tsv").write_text("\n".join(behaviours) + "\n")
    (folder / "news.tsv").write_text("\n".join(news) + "\n")
    return folder


def lines(people: Population) -> list[tuple[str, int, list[str], list[str]]]:
    """Of each impression: the user, how much came before, what was clicked and what was not."""
    shown, before = people.impressions, people.before_impressions()
    assert shown is not None
    assert before is not None
    assert people.user_ids is not None
    found = []
    for number, user in enumerate(shown.users.tolist()):
        part = slice(*shown.indptr[number : number + 2])
        names = [people.item_id(item) for item in shown.items[part].tolist()]
        marks = shown.clicked[part].tolist()
        sides = [[name for name, mark in zip(names, marks, strict=True) if mark == side] for side in (True, False)]
        found.append((str(people.user_ids[user]), int(before[number]), *sides))
    return found  # type: ignore[return-value]


class TestMind:
    def test_lines_become_histories_and_impressions(self, tmp_path: Path) -> None:
        people = read_mind(mind(tmp_path))
        assert people.user_ids is not None
        assert people.user_ids.to_list() == ["U1", "U2"]
        assert [people.item_id(item) for item in people.history(1).tolist()] == ["N1", "N2", "N1"]
        assert people.history(0).tolist() == []
        assert lines(people) == [
            ("U1", 0, ["N3"], ["N1"]),
            ("U2", 3, ["N5"], ["N4"]),
            ("U2", 3, ["N4"], ["N3", "N5"]),
        ]
        assert people.impressions is not None
        assert people.impressions.times is not None
        when = [datetime(2019, 11, 13, 5, 53, 12), datetime(2019, 11, 11, 0, 0, 1), datetime(2019, 11, 12, 14, 14, 46)]
        assert people.impressions.times.tolist() == [pl.Series([at]).dt.epoch("s")[0] for at in when]

    def test_texts_and_categories_are_features(self, tmp_path: Path) -> None:
        people = read_mind(mind(tmp_path))
        assert people.item_features is not None
        table = people.item_features.table
        assert people.item_features.kinds == {
            "category": "categorical", "subcategory": "categorical", "title": "sequence", "abstract": "sequence"
        }  # fmt: skip
        assert table["title"].to_list() == ["First title", None, 'Third "quoted', None, None]
        assert table["category"].to_list() == ["news", "sports", "news", None, None]
        assert people.item_name(0) == "First title"
        assert people.item_name(1) == "N2"
        unknown, silent = people.notes
        assert unknown.startswith("2 news items are in histories or impressions and not in ")
        assert silent == f"1 news item of {tmp_path / 'news.tsv'} has no text."

    def test_chunks_give_what_the_whole_file_gives(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = read_mind(mind(tmp_path))
        monkeypatch.setattr("homebody.data.mind.CHUNK_BYTES", 70)
        parts = read_mind(tmp_path)
        assert lines(parts) == lines(whole)
        assert parts.items.tolist() == whole.items.tolist()

    def test_two_parts_are_one_history(self, tmp_path: Path) -> None:
        mind(tmp_path / "train")
        mind(tmp_path / "dev", ["1\tU2\t11/20/2019 2:14:46 PM\tN2 N1 N4\tN3-0 N5-1"], ["N4\tnews\tx\tFourth\t"])
        people = load(tmp_path)
        assert [people.item_id(item) for item in people.history(1).tolist()] == ["N1", "N2", "N1", "N4"]
        assert [line[:2] for line in lines(people)] == [("U1", 0), ("U2", 3), ("U2", 3), ("U2", 4)]

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ("1\tU2\t11/12/2019 2:14:46 PM\tN1", r"Line 2 of .*behaviors.tsv has 4 columns: an impression has 5"),
            ("1\tU2\t2019-11-12\tN1\tN3-1 N4-0", r"Line 2 .* is malformed: its time is not like 11/15/2019"),
            ("1\tU2\t11/12/2019 2:14:46 PM\tN1\tN3-1 N4", r"Line 2 .* malformed: what it shows is not like N123-1"),
            ("1\tU2\t11/12/2019 2:14:46 PM\tN1\t", r"Line 2 .* malformed: it shows nothing"),
            ("1\t\t11/12/2019 2:14:46 PM\tN1\tN3-1 N4-0", r"Line 2 .* malformed: it names no user"),
        ],
    )
    def test_a_malformed_impression_is_a_sentence(self, tmp_path: Path, line: str, problem: str) -> None:
        with pytest.raises(HomebodyError, match=problem) as caught:
            read_mind(mind(tmp_path, [BEHAVIOURS[0], line]))
        assert "\n" not in str(caught.value)

    def test_no_news_and_other_news_and_news_without_text_are_sentences(self, tmp_path: Path) -> None:
        folder = mind(tmp_path)
        for news, problem in (
            (["N77\tnews\tx\tOther\t"], "describes none of the 5 news that people read or were shown, such as 'N1'"),
            ([f"{line.split(chr(9))[0]}\tnews\tx\t\t" for line in NEWS], "No news item of .* has a text"),
            (["N1\tnews"], "Line 1 of .*news.tsv has too few columns"),
        ):
            mind(tmp_path, news=news)
            with pytest.raises(HomebodyError, match=problem):
                read_mind(folder)
        (folder / "news.tsv").unlink()
        with pytest.raises(HomebodyError, match=r"has no news.tsv, which says what the news in behaviors.tsv are"):
            read_mind(folder)
        (folder / "behaviors.tsv").unlink()
        with pytest.raises(HomebodyError, match=r"has no behaviors.tsv"):
            read_mind(folder)

    def test_what_asks_nothing_is_left_out_and_said(self, tmp_path: Path) -> None:
        asked = ("N3-0", "N3-1", "N3-0 N5-0 N3-1")
        more = [f"{number}\tU3\t11/12/2019 2:14:46 PM\tN1\t{shown}" for number, shown in enumerate(asked)]
        people = read_mind(mind(tmp_path, [*BEHAVIOURS, *more]))
        assert lines(people)[-1] == ("U3", 1, ["N3"], ["N5"])
        assert len(lines(people)) == 4
        said = " ".join(people.notes)
        assert "1 item is shown again in the same impression" in said
        assert "1 impression has no click" in said
        assert "1 impression has nothing that was not clicked" in said

    def test_the_real_sample(self, real_data: Path) -> None:
        folder = real_data / "mind-sample"
        if not folder.exists():
            pytest.skip("no published data: HOMEBODY_DATA has no folder mind-sample")
        people = load(str(folder))
        assert people.impressions is not None
        assert (people.n_users, people.n_items, len(people.impressions.users)) == (4637, 22_592, 5000)
        assert any(note.startswith("21,754 news items are in histories or impressions") for note in people.notes)


def ebnerd(folder: Path) -> Path:
    def at(day: int) -> datetime:
        return datetime(2023, 5, day)

    folder.mkdir(exist_ok=True)
    read = {
        "train": [(7, [1, 2, 3], [30, 10, 20]), (5, [1], [10])],
        "validation": [(7, [2, 3, 11], [10, 20, 40]), (9, [3], [30])],
    }
    shown = {
        "train": [(7, 12, [40, 50], [40]), (5, 10, [10, 20, 40], [20, 40])],
        "validation": [(7, 21, [50, 60], [60]), (9, 20, [60, 50], [50])],
    }
    for week in read:
        pl.DataFrame(
            {
                "user_id": [user for user, _, _ in read[week]],
                "impression_time_fixed": [[at(day) for day in days] for _, days, _ in read[week]],
                "article_id_fixed": [items for _, _, items in read[week]],
            }
        ).write_parquet(folder / f"{week}_history.parquet")
        pl.DataFrame(
            {
                "user_id": [user for user, *_ in shown[week]],
                "impression_time": [at(day) for _, day, _, _ in shown[week]],
                "article_ids_inview": [items for _, _, items, _ in shown[week]],
                "article_ids_clicked": [items for *_, items in shown[week]],
            }
        ).write_parquet(folder / f"{week}_behaviors.parquet")
    return folder


class TestEbnerd:
    def test_histories_are_as_of_each_week(self, tmp_path: Path) -> None:
        people = read_ebnerd(ebnerd(tmp_path))
        assert people.user_ids is not None
        assert people.user_ids.to_list() == [5, 7, 9]
        assert [people.item_id(item) for item in people.history(1).tolist()] == ["30", "10", "20", "40"]
        # What user 7 read on day 11 came after the first week's history, and before the second week.
        assert lines(people) == [
            ("5", 1, ["20", "40"], ["10"]),
            ("7", 3, ["40"], ["50"]),
            ("7", 4, ["60"], ["50"]),
            ("9", 1, ["50"], ["60"]),
        ]
        assert any("known by id alone" in note for note in people.notes)

    def test_articles_give_texts(self, tmp_path: Path) -> None:
        texts = {"title": ["T"] * 6, "subtitle": [""] * 6, "body": ["B"] * 6, "category_str": ["krimi"] * 6}
        articles = pl.DataFrame({"article_id": [10, 20, 30, 40, 50, 60], **texts})
        articles.write_parquet(ebnerd(tmp_path) / "articles.parquet")
        people = read_ebnerd(tmp_path)
        assert people.item_features is not None
        assert people.item_features.table.row(0) == ("krimi", "T", None, "B")

    def test_malformed_files_are_sentences(self, tmp_path: Path) -> None:
        path = ebnerd(tmp_path) / "train_behaviors.parquet"
        table = pl.read_parquet(path)
        table.with_columns(article_ids_clicked=pl.Series([[40], [99]])).write_parquet(path)
        with pytest.raises(HomebodyError, match=r"Row 2 of .* is malformed: .* its clicks are among them"):
            read_ebnerd(tmp_path)
        table.drop("article_ids_inview").write_parquet(path)
        with pytest.raises(HomebodyError, match=r"train_behaviors.parquet needs the columns .*article_ids_inview"):
            read_ebnerd(tmp_path)
        (tmp_path / "train_history.parquet").unlink()
        with pytest.raises(HomebodyError, match=r"history.parquet is missing"):
            read_ebnerd(tmp_path)
        with pytest.raises(HomebodyError, match=r"has no train/behaviors.parquet"):
            read_ebnerd(tmp_path / "elsewhere")

    def test_the_demo(self, real_data: Path) -> None:
        if not (real_data / "ebnerd-demo").exists():
            pytest.skip("no published data: HOMEBODY_DATA has no folder ebnerd-demo")
        people = load("ebnerd", data_dir=real_data)
        assert people.impressions is not None
        assert (people.n_users, len(people.impressions.users)) == (1935, 24_724 + 25_356)


def popularity(people: Population) -> float:
    done = split(people, "impressions-people:test=0.5", seed=0)
    return measure(done, Popularity().trained(done.histories())).metrics["impressions/auc"]


class TestIbm:
    @pytest.fixture
    def folder(self, real_data: Path) -> Path:
        if not (real_data / "ibm-articles").exists():
            pytest.skip("no published data: HOMEBODY_DATA has no folder ibm-articles")
        return real_data / "ibm-articles"

    def test_impressions_are_drawn_by_popularity_and_the_seed_and_said(self, folder: Path) -> None:
        people, again, other = (read_ibm_articles(folder, seed=seed) for seed in (0, 0, 1))
        shown = people.impressions
        assert shown is not None
        assert again.impressions is not None
        assert other.impressions is not None
        assert shown.items.tolist() == again.impressions.items.tolist()
        assert shown.items.tolist() != other.impressions.items.tolist()
        assert (people.n_users, people.n_items, people.n_interactions) == (5148, 714, 45_976)
        assert np.diff(shown.indptr).tolist() == [20] * 22_091
        assert shown.before is not None
        assert shown.asked is not None
        assert np.bincount(shown.users[shown.asked]).max() == 1  # one of each person is asked
        assert len(np.unique(shown.users)) == shown.asked.sum() == 2_315
        for number, user in enumerate(shown.users[:500].tolist()):
            part, history = slice(*shown.indptr[number : number + 2]), people.history(user)
            (click,) = shown.items[part][shown.clicked[part]]
            earlier, later = np.split(history, [shown.before[number]])
            assert later[0] == click
            assert click not in earlier
            assert len(set(earlier.tolist())) >= 3
            assert not set(history.tolist()) & set(shown.items[part][~shown.clicked[part]].tolist())
            if shown.asked[number]:
                assert set(later.tolist()) == {click}
        for user in np.unique(shown.users)[:100].tolist():
            assert (shown.users == user).sum() == len(set(people.history(user).tolist())) - 3
        assert any(
            "(seed 0): 2,315 people with 4 different articles or more get one for each" in n for n in people.notes
        )
        assert people.item_features is not None
        assert people.item_features.table["title"].null_count() == 0

    def test_popularity_knows_little_and_would_know_much_of_an_even_draw(self, folder: Path) -> None:
        assert 0.48 < popularity(read_ibm_articles(folder)) < 0.54
        assert popularity(read_ibm_articles(folder, by_popularity=False)) > 0.78
