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

__all__ = [
    "OBSERVERS",
    "Channel",
    "Charge",
    "Entry",
    "Event",
    "GaussianRelease",
    "LaplaceRelease",
    "Ledger",
    "NonPrivate",
    "Observer",
    "PureRelease",
    "Relation",
    "Reports",
    "Sampling",
    "ShuffledReports",
    "Stage",
    "Unit",
    "event_from_json",
]
