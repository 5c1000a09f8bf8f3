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

MORE = f"""
[[table]]
id = "4"
kind = "pairs"
title = "With and without"
table = "1"
pairs = [["Popularity", "FedMF+<x>"]]

[[table]]
id = "5"
title = "Costs"
table = "1"
metrics = ["parameters", "epochs", "seconds"]
protocols = ["published"]
[[table.row]]
name = "FedMF"
of = "FedMF+<x>"
published = {{ "{DATA}" = [244, 7, 100] }}

[[table]]
id = "6"
kind = "sweep"
title = "Noise"
table = "1"
seeds = 1
also = ["epsilon"]
vary = "run.stages"
values = [[], ["clip:norm=1,order=1", "laplace:b=0.5"]]
labels = ["none", "some"]
axis = "noise"
[[table.row]]
name = "FedMF+<x>"
published = {{ "{DATA}" = [[3, 2], [1, nan]] }}
published_sd = {{ "{DATA}" = [[0.5, 0.25], [nan, nan]] }}
[[table.row]]
name = "Own noise"
of = "FedMF+<x>"
values = [["clip:norm=2"], ["clip:norm=1,order=1", "laplace:b=0.25"]]
fields = {{ factors = 2 }}
on = {{ "{DATA}" = {{ item_rate = 3.0 }} }}

[[table]]
id = "10"
title = "Few interactions"
table = "1"
run_on = {{ "{DATA}" = {{ slices = ["-12"] }} }}
[[table.row]]
name = "Everyone"
of = "FedMF+<x>"
[[table.row]]
name = "Few"
of = "FedMF+<x>"
slice = {{ "{DATA}" = "-12" }}
published = {{ "{DATA}" = [10, 5] }}
"""


@pytest.fixture
def tiny() -> str:
    """The recipe as it stands; tests change it."""
    return TINY


def _more() -> str:
    tables, figures, rest = TINY.partition('\n[[figure]]\nid = "2"')
    return tables + MORE + figures + rest


@pytest.fixture
def more() -> str:
    """A recipe with every kind of table."""
    return _more()


@pytest.fixture(scope="session")
def write_once() -> Callable[[Path], Path]:
    """Writes that recipe, for what several tests look at."""

    def write(parent: Path) -> Path:
        folder = parent / "tiny"
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text(_more(), encoding="utf-8")
        return folder

    return write


@pytest.fixture
def write_paper() -> Callable[..., Path]:
    """Writes a paper's folder below another one."""

    def write(parent: Path, text: str = TINY, name: str = "tiny") -> Path:
        folder = parent / name
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text(text, encoding="utf-8")
        return folder

    return write
