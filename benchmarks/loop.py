"""What everyone writes first: one client after the other, in plain PyTorch. The benchmark's yardstick."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import nn

from homebody.data.splits import Split

__all__ = ["seconds_per_client"]


def seconds_per_client(split: Split, kind: str, factors: int, sample: int, seed: int = 0) -> float:
    """Mean seconds a client's round takes, over a sample of clients."""
    generator = np.random.default_rng(seed)
    users = generator.choice(np.flatnonzero(split.lengths > 0), sample, replace=False)
    table = torch.randn(split.n_items, factors)
    work = {"pfedrec": _pfedrec, "fedmf": _fedmf, "fedials": _fedials}[kind]
    total = torch.zeros_like(table)
    work(split.training(int(users[0])), table, total, generator)
    began = time.perf_counter()
    for user in users:
        work(split.training(int(user)), table, total, generator)
    return (time.perf_counter() - began) / sample


def _batches(
    items: np.ndarray, n_items: int, generator: np.random.Generator
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    own = set(items.tolist())
    drawn: list[int] = []
    while len(drawn) < 4 * len(items):
        drawn += [i for i in generator.integers(0, n_items, 4 * len(items)).tolist() if i not in own]
    everything = torch.tensor([*items.tolist(), *drawn[: 4 * len(items)]])
    label = torch.cat([torch.ones(len(items)), torch.zeros(4 * len(items))])
    order = torch.from_numpy(generator.permutation(len(everything)))
    return list(zip(everything[order].split(256), label[order].split(256), strict=True))


def _pfedrec(items: np.ndarray, table: torch.Tensor, total: torch.Tensor, generator: np.random.Generator) -> None:
    embedding = nn.Embedding.from_pretrained(table.clone(), freeze=False)
    score = nn.Linear(table.shape[1], 1)
    step_score = torch.optim.SGD(score.parameters(), lr=0.1)
    step_items = torch.optim.SGD(embedding.parameters(), lr=0.1 * len(table) * 80)
    loss = nn.BCEWithLogitsLoss()
    for batch, label in _batches(items, len(table), generator):
        for optimiser in (step_score, step_items):
            optimiser.zero_grad()
            loss(score(embedding(batch)).squeeze(1), label).backward()
            optimiser.step()
    total += embedding.weight.detach() - table


def _fedmf(items: np.ndarray, table: torch.Tensor, total: torch.Tensor, generator: np.random.Generator) -> None:
    embedding = nn.Embedding.from_pretrained(table.clone(), freeze=False)
    user = nn.Parameter(torch.randn(table.shape[1]))
    optimiser = torch.optim.SGD([{"params": [user], "lr": 0.1}, {"params": embedding.parameters(), "lr": 1.0}], lr=0.1)
    loss = nn.BCEWithLogitsLoss()
    for batch, label in _batches(items, len(table), generator):
        optimiser.zero_grad()
        loss(embedding(batch) @ user, label).backward()
        optimiser.step()
    total += embedding.weight.detach() - table


def _fedials(items: np.ndarray, table: torch.Tensor, total: torch.Tensor, generator: np.random.Generator) -> None:
    own = table[torch.from_numpy(items.astype(np.int64))]
    system = table.T @ table + 5.0 * own.T @ own + torch.eye(table.shape[1])
    vector = torch.linalg.solve(system, 6.0 * own.sum(0))
    total[torch.from_numpy(items.astype(np.int64))] += vector
    torch.outer(vector, vector).repeat(len(items), 1, 1)
