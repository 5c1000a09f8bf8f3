"""The processes of a real federation: the server, and the devices that people's histories stay on."""

LONGEST = 5_000
"""Interactions of a person that count where the plan does not say how many."""
MOST_INTERACTIONS = 10_000_000
