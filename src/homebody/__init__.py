"""Homebody trains recommenders without collecting anyone's history.

>>> import homebody as hb
>>> from homebody.fit import fit
>>> split = hb.leave_one_out(hb.load("synthetic:users=200,items=100,mean=12"))
>>> fitted = fit(hb.FedIALS(factors=4), hb.Simulator(split), rounds=2)
>>> len(fitted.recommend(user=0, k=3)), fitted.epsilon["server"]
(3, inf)
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Kernels are short: threads that spin while they wait for the next one take the processor from everyone else,
# and on a busy machine from ourselves. OpenMP reads this when torch or numba is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from homebody.core import Method, Rows
    from homebody.data import Population, load
    from homebody.data.partitions import leave_one_out, split
    from homebody.data.splits import Split
    from homebody.errors import HomebodyError
    from homebody.fit import Fitted
    from homebody.methods.baselines import Chance, Popularity, PrivatePopularity
    from homebody.methods.dp_privrec import DPPrivRec
    from homebody.methods.dplcf import DPLCF
    from homebody.methods.fcf import FCF
    from homebody.methods.fedgnn import FedGNN
    from homebody.methods.fedials import FedIALS
    from homebody.methods.fedmf import FedMF
    from homebody.methods.fedncf import FedNCF
    from homebody.methods.fedrecon import FedRecon
    from homebody.methods.fmf_ldp import FMFLDP
    from homebody.methods.ials import IALS
    from homebody.methods.mf import MF
    from homebody.methods.ncf import NCF
    from homebody.methods.nn_self import FOFLSelf, NNSelf
    from homebody.methods.pfedrec import Alone, PFedRec
    from homebody.methods.privrec import PrivRec
    from homebody.methods.privrec_cen import PrivRecCEN
    from homebody.privacy import Channel, Ledger
    from homebody.reference import Reference
    from homebody.simulation import Simulator

__version__ = "0.1.0"

_HOMES = {
    "Alone": "homebody.methods.pfedrec",
    "Chance": "homebody.methods.baselines",
    "Channel": "homebody.privacy",
    "DPLCF": "homebody.methods.dplcf",
    "DPPrivRec": "homebody.methods.dp_privrec",
    "FCF": "homebody.methods.fcf",
    "FMFLDP": "homebody.methods.fmf_ldp",
    "FOFLSelf": "homebody.methods.nn_self",
    "FedGNN": "homebody.methods.fedgnn",
    "FedIALS": "homebody.methods.fedials",
    "FedMF": "homebody.methods.fedmf",
    "FedNCF": "homebody.methods.fedncf",
    "FedRecon": "homebody.methods.fedrecon",
    "Fitted": "homebody.fit",
    "HomebodyError": "homebody.errors",
    "IALS": "homebody.methods.ials",
    "Ledger": "homebody.privacy",
    "MF": "homebody.methods.mf",
    "Method": "homebody.core",
    "NCF": "homebody.methods.ncf",
    "NNSelf": "homebody.methods.nn_self",
    "PFedRec": "homebody.methods.pfedrec",
    "Popularity": "homebody.methods.baselines",
    "Population": "homebody.data",
    "PrivRec": "homebody.methods.privrec",
    "PrivRecCEN": "homebody.methods.privrec_cen",
    "PrivatePopularity": "homebody.methods.baselines",
    "Reference": "homebody.reference",
    "Rows": "homebody.core",
    "Simulator": "homebody.simulation",
    "Split": "homebody.data.splits",
    "leave_one_out": "homebody.data.partitions",
    "load": "homebody.data",
    "split": "homebody.data.partitions",
}

__all__ = [
    "DPLCF",
    "FCF",
    "FMFLDP",
    "IALS",
    "MF",
    "NCF",
    "Alone",
    "Chance",
    "Channel",
    "DPPrivRec",
    "FOFLSelf",
    "FedGNN",
    "FedIALS",
    "FedMF",
    "FedNCF",
    "FedRecon",
    "Fitted",
    "HomebodyError",
    "Ledger",
    "Method",
    "NNSelf",
    "PFedRec",
    "Popularity",
    "Population",
    "PrivRec",
    "PrivRecCEN",
    "PrivatePopularity",
    "Reference",
    "Rows",
    "Simulator",
    "Split",
    "__version__",
    "leave_one_out",
    "load",
    "split",
]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: torch is slow to load, and `--help` does not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'homebody' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
