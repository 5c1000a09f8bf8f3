"""Which kernel runs for which method; that each gives the same numbers is in the contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from homebody.core import Batch, Catalogue, Method, Tree, Update
from homebody.methods import METHODS, find, kernels
from homebody.methods.contrastive import Contrastive
from homebody.methods.dp_privrec import DPPrivRec
from homebody.methods.dplcf import DPLCF
from homebody.methods.fedmf import FedMF
from homebody.methods.fedncf import FedNCF
from homebody.methods.kernels import Kernel, adapt_many, kernel_of, register, train_many
from homebody.methods.nn_self import NNSelf
from homebody.methods.pfedrec import PFedRec
from homebody.methods.privrec import PrivRec
from homebody.rng import Rng
from homebody.testing import CATALOGUE


@dataclass(frozen=True)
class Doubles(Method):
    """Its client sends twice its number."""

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        return {"sent": 2 * batch["number"]}, {"kept": batch["number"]}


@dataclass(frozen=True)
class Child(Doubles):
    """It inherits everything but the kernel."""


@dataclass(frozen=True)
class Adapts(Doubles):
    """It adapts in a way of its own."""

    def adapt(self, shared: Tree, local: Tree, batch: Batch) -> Tree:
        return {"kept": -batch["number"]}


BATCHES = {"number": torch.tensor([1.0, 2.0])}


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel for `Doubles` whose numbers show that it ran."""
    monkeypatch.setattr(kernels, "_REGISTERED", {})
    kernel = Kernel(lambda method, shared, locals_, batches: ({"sent": torch.zeros(2)}, {"kept": torch.zeros(2)}))
    register(Doubles, kernel)
    return kernel


def test_a_kernel_runs_for_exactly_its_class(marked: Kernel) -> None:
    assert train_many(Doubles(), {}, {}, BATCHES)[0]["sent"].tolist() == [0.0, 0.0]
    assert train_many(Child(), {}, {}, BATCHES)[0]["sent"].tolist() == [2.0, 4.0]


def test_without_fused_no_kernel_runs(marked: Kernel) -> None:
    assert train_many(Doubles(), {}, {}, BATCHES, fused=False)[0]["sent"].tolist() == [2.0, 4.0]
    assert adapt_many(Doubles(), {}, {}, BATCHES, fused=False)["kept"].tolist() == [1.0, 2.0]


def test_adapting_by_a_plain_round_takes_the_rounds_kernel(marked: Kernel) -> None:
    assert adapt_many(Doubles(), {}, {}, BATCHES)["kept"].tolist() == [0.0, 0.0]
    register(Adapts, marked)
    assert adapt_many(Adapts(), {}, {}, BATCHES)["kept"].tolist() == [-1.0, -2.0]
    register(Adapts, Kernel(marked.train, lambda *given: {"kept": torch.ones(2)}))
    assert adapt_many(Adapts(), {}, {}, BATCHES)["kept"].tolist() == [1.0, 1.0]


def test_kernels_are_for_the_cpu_unless_they_say_otherwise() -> None:
    assert kernel_of(FedMF(), "cpu").train is not None
    assert kernel_of(FedMF(), "cuda") == Kernel()
    assert kernel_of(FedMF(), torch.device("meta")) == Kernel()
    assert kernel_of(NNSelf(), "cuda") == Kernel(kernel_of(NNSelf()).train)


def test_every_shipped_kernel_belongs_to_a_method() -> None:
    classes = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in map(find, METHODS)}
    assert kernels._SHIPPED.keys() <= classes.keys()
    for name in kernels._SHIPPED:
        method = classes[name]()
        assert isinstance(method, Method)
        kernel = kernel_of(method)
        assert kernel.train is not None or kernel.total is not None


@pytest.mark.parametrize(
    "method",
    [Contrastive(), DPLCF(), DPPrivRec(joint=1.0), FedMF(), FedNCF(), PFedRec(hidden="4"), PrivRec()],
    ids=lambda method: type(method).__name__,
)
@pytest.mark.parametrize("catalogue", [Catalogue(3), CATALOGUE], ids=["few", "described"])
def test_the_formula_for_the_size_of_what_is_shared_holds(method: Any, catalogue: Catalogue) -> None:
    shared = method.init_shared(catalogue, Rng.of(0))
    assert sum(value.numel() for value in shared.values()) <= method.shared_numbers(catalogue)
