"""The way off the device, and the record of what it tells."""

from homebody.privacy.budget import Budget
from homebody.privacy.channel import Channel
from homebody.privacy.events import (
    OBSERVERS,
    Charge,
    Event,
    GaussianRelease,
    HelpedRelease,
    LaplaceRelease,
    NonPrivate,
    Observer,
    PureRelease,
    Relation,
    Reports,
    Sampling,
    ShuffledReports,
    SkellamRelease,
    Unit,
    event_from_json,
)
from homebody.privacy.impressions import ImpressionReport
from homebody.privacy.ledger import Entry, Ledger
from homebody.privacy.reports import OneBit, RandomisedResponse, Shuffle
from homebody.privacy.ring import Ring
from homebody.privacy.secure_sum import SecureSum, Skellam
from homebody.privacy.stages import Clip, Facts, Gaussian, Laplace, Stage, VectorLaplace
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
    "HelpedRelease",
    "ImpressionReport",
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
    "Ring",
    "Sampling",
    "SecureSum",
    "Shuffle",
    "ShuffledReports",
    "Skellam",
    "SkellamRelease",
    "Stage",
    "Unit",
    "VectorLaplace",
    "ViewNoise",
    "Views",
    "event_from_json",
]
