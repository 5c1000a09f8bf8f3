"""The way off the device, and the record of what it tells."""

from homebody.privacy.channel import Channel, Stage
from homebody.privacy.events import (
    OBSERVERS,
    Charge,
    Event,
    GaussianRelease,
    LaplaceRelease,
    NonPrivate,
    Observer,
    PureRelease,
    Relation,
    Reports,
    Sampling,
    ShuffledReports,
    Unit,
    event_from_json,
)
from homebody.privacy.ledger import Entry, Ledger
from homebody.privacy.limits import Budget
from homebody.privacy.reports import OneBit, Shuffle
from homebody.privacy.requests import AskRows
from homebody.privacy.responses import RandomisedResponse
from homebody.privacy.stages import Clip, Gaussian, Laplace, SecureSum

__all__ = [
    "OBSERVERS",
    "AskRows",
    "Budget",
    "Channel",
    "Charge",
    "Clip",
    "Entry",
    "Event",
    "Gaussian",
    "GaussianRelease",
    "Laplace",
    "LaplaceRelease",
    "Ledger",
    "NonPrivate",
    "Observer",
    "OneBit",
    "PureRelease",
    "RandomisedResponse",
    "Relation",
    "Reports",
    "Sampling",
    "SecureSum",
    "Shuffle",
    "ShuffledReports",
    "Stage",
    "Unit",
    "event_from_json",
]
