"""Recommendations from a catalogue that is too large for a device: what a service gives, and how a device uses it.

docs/serving.md says how to run one.
"""
