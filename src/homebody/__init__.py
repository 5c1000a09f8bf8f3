"""Homebody trains recommenders without collecting anyone's history.

>>> import homebody as hb
>>> people = hb.load("synthetic:users=200,items=100,mean=12")
>>> model = hb.fit(hb.FedIALS(factors=4), people, rounds=2, quiet=True)
>>> len(model.recommend(user=0, k=3)), model.epsilon["server"]
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
    # The same names, for type checkers.
    from homebody import account as account
    from homebody import audit as audit
    from homebody.core import Method as Method
    from homebody.core import Rows as Rows
    from homebody.data import Population as Population
    from homebody.data import load as load
    from homebody.data.partitions import leave_one_out as leave_one_out
    from homebody.data.partitions import split as split
    from homebody.data.splits import Split as Split
    from homebody.errors import HomebodyError as HomebodyError
    from homebody.methods.baselines import Chance as Chance
    from homebody.methods.baselines import Popularity as Popularity
    from homebody.methods.baselines import PrivatePopularity as PrivatePopularity
    from homebody.methods.dp_als import DPALS as DPALS
    from homebody.methods.dp_fedrec import DPFedRec as DPFedRec
    from homebody.methods.dp_privrec import DPPrivRec as DPPrivRec
    from homebody.methods.dplcf import DPLCF as DPLCF
    from homebody.methods.dssm import DSSM as DSSM
    from homebody.methods.fcf import FCF as FCF
    from homebody.methods.fed_mvmf import FedMVMF as FedMVMF
    from homebody.methods.fedgnn import FedGNN as FedGNN
    from homebody.methods.fedials import FedIALS as FedIALS
    from homebody.methods.fedmf import FedMF as FedMF
    from homebody.methods.fedncf import FedNCF as FedNCF
    from homebody.methods.fedrec import FedRec as FedRec
    from homebody.methods.fedrecon import FedRecon as FedRecon
    from homebody.methods.fl_mv_dssm import FLMVDSSM as FLMVDSSM
    from homebody.methods.fmf_ldp import FMFLDP as FMFLDP
    from homebody.methods.ials import IALS as IALS
    from homebody.methods.mf import MF as MF
    from homebody.methods.ncf import NCF as NCF
    from homebody.methods.nearby import Nearby as Nearby
    from homebody.methods.nearby import NearbyPopularity as NearbyPopularity
    from homebody.methods.nearby import PublicFeatures as PublicFeatures
    from homebody.methods.news_cen import NewsCentral as NewsCentral
    from homebody.methods.nn_self import FOFLSelf as FOFLSelf
    from homebody.methods.nn_self import NNSelf as NNSelf
    from homebody.methods.pfedrec import Alone as Alone
    from homebody.methods.pfedrec import PFedRec as PFedRec
    from homebody.methods.privaterec import PrivateRec as PrivateRec
    from homebody.methods.privrec import PrivRec as PrivRec
    from homebody.methods.privrec_cen import PrivRecCEN as PrivRecCEN
    from homebody.notebook.comparing import Comparison as Comparison
    from homebody.notebook.comparing import compare as compare
    from homebody.notebook.comparing import leaderboard as leaderboard
    from homebody.notebook.fitted import Fitted as Fitted
    from homebody.notebook.fitted import open as open  # noqa: A004
    from homebody.notebook.fitting import fit as fit
    from homebody.notebook.tuning import Tuned as Tuned
    from homebody.notebook.tuning import tune as tune
    from homebody.privacy import Budget as Budget
    from homebody.privacy import Channel as Channel
    from homebody.privacy import Clip as Clip
    from homebody.privacy import Gaussian as Gaussian
    from homebody.privacy import Laplace as Laplace
    from homebody.privacy import Ledger as Ledger
    from homebody.privacy import OneBit as OneBit
    from homebody.privacy import SecureSum as SecureSum
    from homebody.privacy import Shuffle as Shuffle
    from homebody.privacy import Skellam as Skellam
    from homebody.reference import Reference as Reference
    from homebody.simulation import Simulator as Simulator

__version__ = "0.1.0"

_NAMES = {
    "homebody.core": "Method Rows",
    "homebody.data": "Population load",
    "homebody.data.partitions": "leave_one_out split",
    "homebody.data.splits": "Split",
    "homebody.errors": "HomebodyError",
    "homebody.methods.baselines": "Chance Popularity PrivatePopularity",
    "homebody.methods.dp_als": "DPALS",
    "homebody.methods.dp_fedrec": "DPFedRec",
    "homebody.methods.dp_privrec": "DPPrivRec",
    "homebody.methods.dplcf": "DPLCF",
    "homebody.methods.dssm": "DSSM",
    "homebody.methods.fcf": "FCF",
    "homebody.methods.fed_mvmf": "FedMVMF",
    "homebody.methods.fedgnn": "FedGNN",
    "homebody.methods.fedials": "FedIALS",
    "homebody.methods.fedmf": "FedMF",
    "homebody.methods.fedncf": "FedNCF",
    "homebody.methods.fedrec": "FedRec",
    "homebody.methods.fedrecon": "FedRecon",
    "homebody.methods.fl_mv_dssm": "FLMVDSSM",
    "homebody.methods.fmf_ldp": "FMFLDP",
    "homebody.methods.ials": "IALS",
    "homebody.methods.mf": "MF",
    "homebody.methods.ncf": "NCF",
    "homebody.methods.nearby": "Nearby NearbyPopularity PublicFeatures",
    "homebody.methods.news_cen": "NewsCentral",
    "homebody.methods.nn_self": "FOFLSelf NNSelf",
    "homebody.methods.pfedrec": "Alone PFedRec",
    "homebody.methods.privaterec": "PrivateRec",
    "homebody.methods.privrec": "PrivRec",
    "homebody.methods.privrec_cen": "PrivRecCEN",
    "homebody.notebook.comparing": "Comparison compare leaderboard",
    "homebody.notebook.fitted": "Fitted open",
    "homebody.notebook.fitting": "fit",
    "homebody.notebook.tuning": "Tuned tune",
    "homebody.privacy": "Budget Channel Clip Gaussian Laplace Ledger OneBit SecureSum Shuffle Skellam",
    "homebody.reference": "Reference",
    "homebody.simulation": "Simulator",
}
"""Which names each module gives to the package."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

_ROOMS = ("account", "audit")
"""The modules that are names of the package themselves."""

# `from homebody import *` must not hide Python's own open().
__all__ = [*(name for name in _HOMES if name != "open"), *_ROOMS, "__version__"]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: torch is slow to load, and `--help` does not need it."""
    if name in _ROOMS:
        return importlib.import_module(f"homebody.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'homebody' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])
