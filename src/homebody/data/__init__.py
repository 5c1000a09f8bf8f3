"""Interactions of a whole population: where they come from, and the arrays they become."""

from homebody.data.population import Population
from homebody.data.sources import get, load

__all__ = ["Population", "get", "load"]
