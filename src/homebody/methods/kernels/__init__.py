"""Compiled loops that do a client's work for many clients at once. Each gives the same numbers as the method."""
