"""Compiled loops, and which of them stands in for which method.

A kernel does a client's work for many clients at once, faster than `client` or `adapt` under vmap and with the same
numbers; the contract suite compares the two. It is registered here for one class and the CPU. A method does not know
its kernel: without the entry it runs as before, only slower. A subclass has no kernel, since it may compute something
else; `register` one for it if it does not.

The shipped entries are names, so that a kernel is imported, and compiled, when its method first runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from homebody.core import Batch, Catalogue, Method, Tree, Update

__all__ = ["Kernel", "adapt_many", "arrays", "indexed", "kernel_of", "register", "train_many"]


@dataclass(frozen=True)
class Kernel:
    """A method's work for many clients, stacked along the first dimension; the first argument is the method."""

    train: Callable[[Any, Tree, Tree, Batch], tuple[Update, Tree]] | None = None
    """As `client` under vmap. Where an update is too large to write out for many, it may be a formula (`Computed`)."""
    adapt: Callable[[Any, Tree, Tree, Batch], Tree] | None = None
    """As `adapt` under vmap. None: `train` without its update, if the method adapts by a plain round."""
    total: Callable[[Any, Tree, Tree, Batch], tuple[Update, Tree]] | None = None
    """As `train`, with the updates summed over these clients: for a channel that leaves every update as it is."""
    index: Callable[[Any, Tree, Catalogue], Tree] | None = None
    """What every client computes from the shared parameters and the catalogue to rank: once for all of them. `score`
    finds it among the shared parameters."""
    formulas: bool = False
    """Whether `train` gives its updates as formulas, which take no memory until they are read."""
    anywhere: bool = False
    """Whether it runs on every device, not on the CPU alone; `adapt` never does."""
    mixed: Callable[[Any], bool] = lambda _: False
    """Whether a client's work takes the same time whatever its history's length: padding is cheaper than groups."""


_PLAIN = Kernel()
_SHIPPED = {
    "homebody.methods.dp_fedrec.DPFedRec": "news:NEWS",
    "homebody.methods.dp_privrec.DPPrivRec": "privrec:DP_PRIVREC",
    "homebody.methods.fedmf.FedMF": "factors:FEDMF",
    "homebody.methods.fedncf.FedNCF": "network:FEDNCF",
    "homebody.methods.fedrec.FedRec": "news:NEWS",
    "homebody.methods.fedrecon.FedRecon": "factors:FEDRECON",
    "homebody.methods.fl_mv_dssm.FLMVDSSM": "towers:FL_MV_DSSM",
    "homebody.methods.fmf_ldp.FMFLDP": "reports:FMF_LDP",
    "homebody.methods.nn_self.FOFLSelf": "privrec:PRIVREC",
    "homebody.methods.nn_self.NNSelf": "privrec:NN_SELF",
    "homebody.methods.pfedrec.PFedRec": "network:PFEDREC",
    "homebody.methods.baselines.PrivatePopularity": "reports:PRIVATE_POPULARITY",
    "homebody.methods.privaterec.PrivateRec": "news:NEWS",
    "homebody.methods.privrec.PrivRec": "privrec:PRIVREC",
}
"""By a class's full name: the module here, and the kernel in it."""
_REGISTERED: dict[type[Method], Kernel] = {}


def register(kind: type[Method], kernel: Kernel) -> None:
    """Run methods of exactly this class by this kernel from now on.

    >>> from homebody.methods.fedmf import FedMF
    >>> class Mine(FedMF): ...
    >>> kernel_of(Mine()).train is None
    True
    >>> register(Mine, kernel_of(FedMF()))
    >>> kernel_of(Mine()).train is None
    False
    """
    _REGISTERED[kind] = kernel


def kernel_of(method: Method, device: torch.device | str = "cpu") -> Kernel:
    """The kernel registered for exactly this class, as far as it runs on this device; otherwise an empty one."""
    kind = type(method)
    place = _SHIPPED.get(f"{kind.__module__}.{kind.__qualname__}")
    registered = _REGISTERED.get(kind, _PLAIN)
    if registered is _PLAIN and place is not None:
        module, _, name = place.partition(":")
        registered = getattr(import_module(f"{__name__}.{module}"), name)
    if torch.device(device).type == "cpu":
        return registered
    if not registered.anywhere:
        return _PLAIN
    return Kernel(registered.train, total=registered.total, index=registered.index, mixed=registered.mixed)


def train_many(
    method: Method, shared: Tree, locals_: Tree, batches: Batch, *, fused: bool = True
) -> tuple[Update, Tree]:
    """`client` for many clients, stacked along the first dimension; fused: by the method's kernel, if it has one."""
    kernel = kernel_of(method, _device(shared)) if fused else _PLAIN
    if kernel.train is not None:
        return kernel.train(method, shared, locals_, batches)
    return vmap(method.client, in_dims=(None, 0, 0))(shared, locals_, batches)


def adapt_many(method: Method, shared: Tree, locals_: Tree, batches: Batch, *, fused: bool = True) -> Tree:
    """`adapt` for many clients, stacked along the first dimension; fused: by the method's kernel, if it has one."""
    kernel = kernel_of(method, _device(shared)) if fused else _PLAIN
    if kernel.adapt is not None:
        return kernel.adapt(method, shared, locals_, batches)
    if kernel.train is not None and type(method).adapt is Method.adapt:
        return kernel.train(method, shared, locals_, batches)[1]
    return vmap(method.adapt, in_dims=(None, 0, 0))(shared, locals_, batches)


def indexed(method: Method, shared: Tree, catalogue: Catalogue, *, fused: bool = True) -> Tree:
    """The shared parameters with the method's index, if its kernel makes one."""
    kernel = kernel_of(method, _device(shared)) if fused else _PLAIN
    return shared if kernel.index is None else {**shared, **kernel.index(method, shared, catalogue)}


def _device(shared: Tree) -> torch.device | str:
    return next((value.device for value in shared.values()), "cpu")


def arrays(*tensors: Tensor) -> list[Any]:
    """Tensors as the arguments of compiled code."""
    return [tensor.numpy() for tensor in tensors]
