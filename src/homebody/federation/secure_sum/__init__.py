"""A secure sum among devices: the server learns the sum of their vectors, and of no smaller group's.

Each party is a `party.Party`, the server a `collector.Collector`. They exchange bytes, and neither knows how these
travel or where they are stored.
"""

FEWEST = 3
"""Fewer parties are refused: in a sum of two, each would learn the other's vector."""
IDENTITY_BYTES = 49
"""A device's public key: a compressed point of P-384."""
SIGNATURE_BYTES = 96
