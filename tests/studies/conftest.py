"""What tests of studies share: a paper small enough for a test, of two methods, two seeds and a few rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

DATA = "synthetic:users=40,items=60,mean=12"
TINY = f"""
title = "A tiny paper"
citation = "Nobody, Nowhere 2020"
docs = "docs/methods.md#fedmf"

[[table]]
id = "1"
title = "Two methods"
metrics = ["hr@10", "ndcg@10"]
scale = 100
data = ["{DATA}"]
seeds = 2
rounds = 3

[[table.row]]
name = "Popularity"
method = "popularity"
rounds = 1
note = "A note with <b>markup</b> | and a bar."
[table.row.published]
"{DATA}" = [99.5, nan]

[[table.row]]
name = "FedMF+<x>"
method = "fedmf"
fields = {{ factors = 4 }}
[table.row.on]
"{DATA}" = {{ learning_rate = 0.05 }}
[table.row.published]
"{DATA}" = [1.0, 0.5]

[[table.row]]
name = "Absent"
missing = "nobody wrote it"
[table.row.published]
"{DATA}" = [50, 25]

[[figure]]
id = "2"
kind = "convergence"
title = "Over rounds"
table = "1"
rows = ["FedMF+<x>"]

[[figure]]
id = "3"
kind = "sweep"
vary = "fields.factors"
values = [2, 4]
title = "Over factors"
metrics = ["ndcg@10"]
data = ["{DATA}"]
protocols = ["strict"]
seeds = 1
rounds = 2
[[figure.row]]
name = "FedMF"
method = "fedmf"
published = {{ "{DATA}" = [[0.1], [0.2]] }}
"""


@pytest.fixture
def tiny() -> str:
    """The recipe as it stands; tests change it."""
    return TINY


@pytest.fixture
def write_paper() -> Callable[..., Path]:
    """Writes a paper's folder below another one."""

    def write(parent: Path, text: str = TINY, name: str = "tiny") -> Path:
        folder = parent / name
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text(text, encoding="utf-8")
        return folder

    return write
