"""The way off the device, and the record of what it tells."""

from homebody.privacy.channel import Channel, Stage
from homebody.privacy.events import OBSERVERS, Charge, NonPrivate, Observer, Unit
from homebody.privacy.ledger import Entry, Ledger

__all__ = ["OBSERVERS", "Channel", "Charge", "Entry", "Ledger", "NonPrivate", "Observer", "Stage", "Unit"]
