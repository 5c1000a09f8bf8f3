"""Who computes."""

from homebody.runtime.simulator import Simulator, usable_device

__all__ = ["Simulator", "usable_device"]
