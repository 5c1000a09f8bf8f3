"""Who computes."""

from homebody.runtime.clients import usable_device
from homebody.runtime.simulator import Simulator

__all__ = ["Simulator", "usable_device"]
