"""A secure sum among devices: the server learns the sum of their vectors, and of no smaller group's.

Each party is a `party.Party`, the server a `collector.Collector`. They exchange bytes, and neither knows how these
travel or where they are stored.
"""
