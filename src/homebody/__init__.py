"""Homebody trains and serves recommenders without collecting anyone's history."""

__version__ = "0.1.0"
