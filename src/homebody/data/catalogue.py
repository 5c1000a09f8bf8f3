"""The datasets known by name: what they are, where they come from, and the checksums they must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from homebody.data.fetch import sha256
from homebody.data.movielens import read_ml_1m, read_ml_100k
from homebody.data.population import Population

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
    users: int
    items: int
    interactions: int
    megabytes: float
    """What fetching it costs."""
    url: str
    official: Mapping[str, str]
    """Which members of the official archive become which files; if empty, the archive itself is the file."""
    package: PackageCopy
    layouts: tuple[tuple[str, ...], ...]
    sums: Mapping[str, str]
    """The sha256 of every file that is read."""
    read: Callable[[Path], Population]

    def layout(self, folder: Path) -> tuple[str, ...] | None:
        """The layout this folder has, or None where it does not hold the dataset."""
        return next((layout for layout in self.layouts if (folder / layout[0]).is_file()), None)

    def damaged(self, folder: Path) -> Path | None:
        """The first file that is there but is not the published one."""
        files = [folder / name for name in self.layout(folder) or ()]
        return next((file for file in files if file.exists() and sha256(file) != self.sums[file.name]), None)

    def complete(self, folder: Path) -> bool:
        """Whether the folder holds every file of a layout, each as published."""
        layout = self.layout(folder)
        return layout is not None and all((folder / name).is_file() for name in layout) and self.damaged(folder) is None


GROUPLENS = "GroupLens: research only, not to be passed on"

_ML_100K = Dataset(
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
        {f"recbole/dataset_example/ml-100k/{name}": name for name in ("ml-100k.inter", "ml-100k.item", "ml-100k.user")},
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
)

_ML_1M = Dataset(
    name="ml-1m",
    description="MovieLens-1M: movie ratings of 2000-03, with titles, genres, ages and occupations",
    licence=GROUPLENS,
    users=6040,
    items=3706,
    interactions=1_000_209,
    megabytes=5.9,
    url="https://files.grouplens.org/datasets/movielens/ml-1m.zip",
    official={},
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
)

DATASETS: dict[str, Dataset] = {dataset.name: dataset for dataset in (_ML_100K, _ML_1M)}
