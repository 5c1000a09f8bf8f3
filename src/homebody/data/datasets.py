"""The datasets known by name: what they are, where they come from, and the checksums they must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from homebody.data.ebnerd import WEEKS, read_ebnerd
from homebody.data.fetch import sha256
from homebody.data.ibm import read_ibm_articles
from homebody.data.mind import PARTS, read_mind
from homebody.data.movielens import read_ml_1m, read_ml_100k, read_ml_large
from homebody.data.population import Population
from homebody.data.published import read_amazon_video, read_book_crossing, read_frappe, read_lastfm_2k

__all__ = ["DATASETS", "Dataset", "PackageCopy"]


@dataclass(frozen=True)
class PackageCopy:
    """A published package that happens to carry the files, for machines that reach only a package index."""

    requirement: str
    sha256: str
    members: Mapping[str, str]
    """Which members of the package become which files."""
    from_source: bool = False


@dataclass(frozen=True)
class Dataset:
    """A dataset with a name. A folder holds it in one of several layouts, told by a layout's first file.

    >>> DATASETS["ml-100k"].users
    943
    """

    name: str
    description: str
    licence: str
    url: str
    """The official source: what is fetched, or for one that must be supplied or comes in a package, its page."""
    layouts: tuple[tuple[str, ...], ...]
    read: Callable[[Path], Population]
    users: int | None = None
    """None, as are items and interactions: it is published in several sizes, each of which is accepted."""
    items: int | None = None
    interactions: int | None = None
    megabytes: float | None = None
    """What fetching it costs; None if it has several sizes."""
    sums: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of the files that are read. A file without one is accepted only by its counts, when it is read."""
    official: Mapping[str, str] = field(default_factory=dict)
    """Which members of the official archive become which files; if empty, the archive itself is the file."""
    package: PackageCopy | None = None
    in_package: bool = False
    """Whether the package alone is known to carry the files: nothing is fetched from `url`."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The bytes of files too large to hash only to list them."""
    folders: tuple[str, ...] = ()
    """Other names of a folder that holds it, beside its own."""
    supply: str | None = None
    """Why it cannot be fetched and where its files come from, as part of a sentence; None if it can."""

    def layout(self, folder: Path) -> tuple[str, ...] | None:
        """The layout this folder has, or None where it does not hold the dataset."""
        return next((layout for layout in self.layouts if (folder / layout[0]).is_file()), None)

    def damaged(self, folder: Path, *, quick: bool = False) -> Path | None:
        """The first file that is there but is not the published one; `quick` judges large ones by their size."""
        files = [folder / name for name in self.layout(folder) or ()]
        return next((file for file in files if file.exists() and not self._as_published(file, quick)), None)

    def complete(self, folder: Path) -> bool:
        """Whether the folder holds every file of a layout, each as published."""
        layout = self.layout(folder)
        return layout is not None and all((folder / name).is_file() for name in layout) and self.damaged(folder) is None

    def pinned(self, folder: Path) -> bool:
        """Whether every file of the folder's layout has a checksum to be held against."""
        return all(name in self.sums for name in self.layout(folder) or ())

    def checked(self, folder: Path) -> str:
        """What a quick look held the folder's files against: sha256, size, names, or nothing until they are read."""
        names = self.layout(folder) or ()
        if self.users is None:
            return "names of files"
        if not self.pinned(folder):
            return "counts, when read"
        return "size" if any(name in self.sizes for name in names) else "sha256"

    def supplied_how(self) -> str | None:
        """For one that cannot be fetched, a sentence that says why and what to put where."""
        if self.supply is None:
            return None
        return (
            f"{self.name} cannot be fetched: {self.supply.format(url=self.url)}; put "
            f"{' and '.join(self.layouts[0])} in FOLDER/{self.name} and give --data-dir FOLDER (in Python, data_dir)."
        )

    def problem(self, population: Population) -> str | None:
        """How the population's counts differ from the published ones, if they do, as part of a sentence."""
        counts = population.n_interactions, population.n_users, population.n_items
        if self.interactions is None or self.users is None or self.items is None:
            return None
        published = self.interactions, self.users, self.items
        if counts == published:
            return None
        have, should = (
            f"{rows:,} rows, {users:,} users and {items:,} items" for rows, users, items in (counts, published)
        )
        return f"has {have}, and the published {self.name} has {should}"

    def _as_published(self, file: Path, quick: bool) -> bool:
        if quick and file.name in self.sizes:
            return file.stat().st_size == self.sizes[file.name]
        return file.name not in self.sums or sha256(file) == self.sums[file.name]


GROUPLENS = "GroupLens: research only, not to be passed on"
GROUPLENS_LATER = "GroupLens: research only, on the terms of its README"

DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            name="ml-100k",
            description="MovieLens-100K: movie ratings of 1997-98, with titles, genres, ages and occupations",
            licence=GROUPLENS,
            users=943,
            items=1682,
            interactions=100_000,
            megabytes=4.9,
            url="https://files.grouplens.org/datasets/movielens/ml-100k.zip",
            official={f"ml-100k/{name}": name for name in ("u.data", "u.item", "u.user")},
            package=PackageCopy(
                "recbole==1.2.1",
                "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
                {
                    f"recbole/dataset_example/ml-100k/{name}": name
                    for name in ("ml-100k.inter", "ml-100k.item", "ml-100k.user")
                },
            ),
            layouts=(("u.data", "u.item", "u.user"), ("ml-100k.inter", "ml-100k.item", "ml-100k.user")),
            sums={
                "u.data": "06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490",
                "u.item": "553841ebc7de3a0fd0d6b62a204ea30c1e651aacfb2814c7a6584ac52f2c5701",
                "u.user": "f120e114da2e8cf314fd28f99417c94ae9ddf1cb6db8ce0e4b5995d40e90e62c",
                "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
                "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
                "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
            },
            read=read_ml_100k,
        ),
        Dataset(
            name="ml-1m",
            description="MovieLens-1M: movie ratings of 2000-03, with titles, genres, ages and occupations",
            licence=GROUPLENS,
            users=6040,
            items=3706,
            interactions=1_000_209,
            megabytes=5.9,
            url="https://files.grouplens.org/datasets/movielens/ml-1m.zip",
            package=PackageCopy(
                "scikit_rec==0.3.0",
                "949b0ea7b79047b85e49d08466c49837fb74dd1f7d61ce6557f4caf6d680f7fd",
                {"scikit_rec-0.3.0/examples/data/movielens-1m/ml-1m.zip": "ml-1m.zip"},
                from_source=True,
            ),
            layouts=(("ml-1m.zip",), ("ratings.dat", "users.dat", "movies.dat")),
            sums={
                "ml-1m.zip": "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
                "ratings.dat": "506d64ca44484487c11dc2d9a28de5c54948213e6b96285e298afe28d6ea4e0f",
                "users.dat": "1dc3a95300cb19f7c10e027daf29b8cdf1d908dab65b5edfb45950aa389a10a3",
                "movies.dat": "0140fc2356357c1a851d0f52e893a1e4d3696df632c4141cea8d5bc3d621f0b9",
            },
            read=read_ml_1m,
        ),
        # The SHA-256 of these two are as public projects give them for the archives that have GroupLens' own MD5.
        Dataset(
            name="ml-20m",
            description="MovieLens-20M: movie ratings of 1995-2015, with titles and genres",
            licence=GROUPLENS_LATER,
            users=138_493,
            items=26_744,
            interactions=20_000_263,
            megabytes=198.7,
            url="https://files.grouplens.org/datasets/movielens/ml-20m.zip",
            layouts=(("ml-20m.zip",), ("ratings.csv", "movies.csv")),
            sums={"ml-20m.zip": "96f243c338a8665f6bcc89c53edf6ee39162a846940de6b7c8c48aeada765ff3"},
            sizes={"ml-20m.zip": 198_702_078},
            read=partial(read_ml_large, "ml-20m"),
        ),
        Dataset(
            name="ml-25m",
            description="MovieLens-25M: movie ratings of 1995-2019, with titles and genres",
            licence=GROUPLENS_LATER,
            users=162_541,
            items=59_047,
            interactions=25_000_095,
            megabytes=262.0,
            url="https://files.grouplens.org/datasets/movielens/ml-25m.zip",
            layouts=(("ml-25m.zip",), ("ratings.csv", "movies.csv")),
            sums={"ml-25m.zip": "8b21cfb7eb1706b4ec0aac894368d90acf26ebdfb6aced3ebd4ad5bd1eb9c6aa"},
            sizes={"ml-25m.zip": 261_978_986},
            read=partial(read_ml_large, "ml-25m"),
        ),
        Dataset(
            name="lastfm-2k",
            description="Lastfm-2K (HetRec 2011): who tagged which artist when, in PFedRec's form, with artists' names",
            licence="HetRec 2011: non-commercial use",
            users=1600,
            items=12_454,
            interactions=185_650,
            megabytes=7.0,
            url="https://files.grouplens.org/datasets/hetrec2011/hetrec2011-lastfm-2k.zip",
            layouts=(("ratings.dat", "artists.dat"),),
            sums={
                "ratings.dat": "be03bb5b2b7275b9b14ba4028df5e6ae12ee5ce90ef8ad6d2908ac8fb5b87615",
                "artists.dat": "c173881362c6b28551368fecb3c0be5a6a30a6cd859e1f5775413dfe46d48648",
            },
            supply="its ratings.dat is PFedRec's, made from tags in {url}, and no known source publishes it with a "
            "checksum",
            read=read_lastfm_2k,
        ),
        Dataset(
            name="amazon-video",
            description="Amazon Instant Video: ratings of 2000-14 by people of five or more, in PFedRec's form",
            licence="none stated; collected for research",
            users=8072,
            items=11_830,
            interactions=63_836,
            megabytes=2.7,
            url="http://snap.stanford.edu/data/amazon/productGraph/categoryFiles/ratings_Amazon_Instant_Video.csv",
            layouts=(("ratings.dat",),),
            sums={"ratings.dat": "a1292e4a4dba6c37be6ae5dc83d4404af96bf3eace4c8954e2f4e8360a3cdd76"},
            supply="its ratings.dat is PFedRec's, made from {url}, and no known source publishes it with a checksum",
            read=read_amazon_video,
        ),
        Dataset(
            name="frappe",
            description="Frappe: who used which app in which circumstances, with the apps' shop pages",
            licence="research only, not to be passed on",
            users=957,
            items=4082,
            interactions=96_203,
            megabytes=3.4,
            url="https://www.baltrunas.info/_files/archives/be17b7_474755a5e9684a749a012516d04fb456.zip?dn=Mobile_Frappe.zip",
            layouts=(("Mobile_Frappe.zip",),),
            sums={"Mobile_Frappe.zip": "4adc616de57170f282397f6e6e30215f97fa7ad1b7f40bd12ef5dceaaf3e9b4e"},
            read=read_frappe,
        ),
        Dataset(
            name="book-crossing",
            description="Book-Crossing: ratings of books, collected in 2004, without times",
            licence="research use, with acknowledgement",
            users=105_283,
            items=340_556,
            interactions=1_149_780,
            megabytes=26.1,
            url="http://www2.informatik.uni-freiburg.de/~cziegler/BX/BX-CSV-Dump.zip",
            official={"BX-Book-Ratings.csv": "BX-Book-Ratings.csv"},
            layouts=(("BX-Book-Ratings.csv",), ("BX-Book-Ratings.csv.xz",)),
            sums={
                "BX-Book-Ratings.csv": "f359084e5f350151b61f3d07acbe3c6ff0e2bd057d88901fa60507449d0e0e57",
                "BX-Book-Ratings.csv.xz": "5e56a6b1ab9f3f3bde1574b2e051ce2eaa5dad9b06c1caa96595c3ffd58b627f",
            },
            read=read_book_crossing,
        ),
        # Its files are known by their names alone: each size has files of the same names.
        Dataset(
            name="mind",
            description="MIND: news that people were shown and clicked in 2019, with titles, abstracts and categories",
            licence="Microsoft Research License Terms: research only",
            url="https://msnews.github.io",
            layouts=(("behaviors.tsv", "news.tsv"), *((f"{part}/behaviors.tsv", f"{part}/news.tsv") for part in PARTS)),
            folders=("mind-small", "mind-large"),
            supply="its terms must be accepted on {url}",
            read=read_mind,
        ),
        Dataset(
            name="ebnerd",
            description="EB-NeRD: articles of Ekstra Bladet that people were shown and clicked in 2023",
            licence="Ekstra Bladet: research only, on the terms of its page",
            url="https://recsys.eb.dk",
            layouts=tuple(
                tuple(f"{week}{mark}{name}.parquet" for week in WEEKS for name in ("behaviors", "history"))
                for mark in "/_"
            ),
            folders=("ebnerd-demo", "ebnerd-small", "ebnerd-large"),
            supply="its terms must be accepted on {url}",
            read=read_ebnerd,
        ),
        Dataset(
            name="ibm-articles",
            description="IBM Watson Studio: clicks on articles, with titles and bodies; impressions are drawn",
            licence="MIT, of the package that carries it",
            users=5148,
            items=714,
            interactions=45_976,
            megabytes=4.1,
            url="https://github.com/joanamdsantos/recommender_ibmws_pkg",
            in_package=True,
            package=PackageCopy(
                "recommender-ibmws==0.1.3",
                "dda442a79079abbdef322c182ce18b5e471708c878a3128cfc1180f0f1438d18",
                {
                    f"recommender_ibmws/data/{name}": name
                    for name in ("articles_community.csv", "user-item-interactions.csv")
                },
            ),
            layouts=(
                ("articles_community.csv", "user-item-interactions.csv"),
                ("articles_community.csv.xz", "user-item-interactions.csv"),
            ),
            sums={
                "articles_community.csv": "23ca609a6c14c2ddf26083207c41ce8467036e45c84cd21bfa7a207dd544d544",
                "articles_community.csv.xz": "233a8b46748b0ce40f515cca3a4004b583df438ca3ea79fe4cd5551522101d60",
                "user-item-interactions.csv": "07df24977199e629339723b644a93b8a6452d3a5c70868f7b0a143b14ab59bc6",
            },
            read=read_ibm_articles,
        ),
    )
}
