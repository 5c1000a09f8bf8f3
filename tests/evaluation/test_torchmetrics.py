"""The metrics are those of an independent library, where that one has an opinion: on scores without ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchmetrics import retrieval

from homebody.data import load
from homebody.data.partitions import split
from homebody.evaluation import Block, questions, summarise

CUTOFFS = (1, 3, 10, 25)
THEIRS = {
    "hr": retrieval.RetrievalHitRate,
    "ndcg": retrieval.RetrievalNormalizedDCG,
    "precision": retrieval.RetrievalPrecision,
    "recall": retrieval.RetrievalRecall,
    "mrr": retrieval.RetrievalMRR,
}


@pytest.fixture(scope="module")
def asked() -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Scores, relevance and whose they are, flat, by kind of ranking; and what we make of them under "ours"."""
    done = split(load("synthetic:users=60,items=90,mean=25"), "ratio:test=0.3", negatives=30)
    # Where there is nothing to rank against, the library gives an AUC of 0 and we give 1: nothing is out of order.
    users = np.flatnonzero((done.sizes("test") > 0) & (done.population.lengths < done.n_items))
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(len(users), done.n_items, generator=generator, dtype=torch.float64)
    assert all(len(set(row)) == len(row) for row in scores.tolist())
    question = questions(done, users)["test"]
    found = summarise([Block(users, scores, {"test": question})], CUTOFFS)
    assert found.per_user["user"].tolist() == users.tolist()
    flat: dict[str, list[tuple[float, int, int]]] = {"": [], "full/": []}
    for row, user in enumerate(users.tolist()):
        relevant = set(done.part(user, "test").tolist())
        seen = {*done.part(user, "train").tolist(), *done.part(user, "valid").tolist()}
        sampled = {item for item in question.candidates[row].tolist() if item >= 0}
        for kind, listed in (("", sampled | relevant), ("full/", set(range(done.n_items)) - seen)):
            flat[kind] += [(float(scores[row, item]), int(item in relevant), row) for item in sorted(listed)]
    assert max(done.sizes("test")) > 5
    tables = {}
    for kind, rows in flat.items():
        score, label, owner = zip(*rows, strict=True)
        tables[kind] = (torch.tensor(score), torch.tensor(label), torch.tensor(owner))
    tables["ours"] = found.metrics  # type: ignore[assignment]
    return tables


@pytest.mark.parametrize("kind", ["", "full/"])
@pytest.mark.parametrize("k", CUTOFFS)
@pytest.mark.parametrize("name", THEIRS)
def test_a_metric_at_a_cutoff(asked: dict[str, tuple[torch.Tensor, ...]], name: str, k: int, kind: str) -> None:
    score, label, owner = asked[kind]
    theirs = THEIRS[name](top_k=k)(score, label, indexes=owner)
    assert asked["ours"][f"{kind}{name}@{k}"] == pytest.approx(float(theirs), abs=1e-6)  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", ["", "full/"])
def test_auc(asked: dict[str, tuple[torch.Tensor, ...]], kind: str) -> None:
    score, label, owner = asked[kind]
    theirs = retrieval.RetrievalAUROC()(score, label, indexes=owner)
    assert asked["ours"][f"{kind}auc"] == pytest.approx(float(theirs), abs=1e-6)  # type: ignore[call-overload]
