"""The way off the device, and the record of what it tells."""

from homebody.privacy.budget import Budget
from homebody.privacy.channel import Channel
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
from homebody.privacy.reports import OneBit, RandomisedResponse, Shuffle
from homebody.privacy.stages import Clip, Facts, Gaussian, Laplace, SecureSum, Stage
from homebody.privacy.views import ViewNoise, Views

__all__ = [
    "OBSERVERS",
    "Budget",
    "Channel",
    "Charge",
    "Clip",
    "Entry",
    "Event",
    "Facts",
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
    "ViewNoise",
    "Views",
    "event_from_json",
]
