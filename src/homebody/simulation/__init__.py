"""Clients at work in this process: `Simulator` runs a whole population, many clients at once."""

from homebody.simulation.clients import usable_device
from homebody.simulation.simulator import Simulator

__all__ = ["Simulator", "usable_device"]
