"""Who computes."""

from homebody.runtime.simulator import Simulator

__all__ = ["Simulator"]
