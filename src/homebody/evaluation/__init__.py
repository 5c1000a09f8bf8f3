"""Evaluation without leaks: pure functions of scores."""

from homebody.evaluation.beyond import beyond
from homebody.evaluation.metrics import CUTOFFS, Block, Measured, Question, first_lists, sound, summarise
from homebody.evaluation.protocols import ImpressionRows, describe, measure, measure_beside_chance, questions, sliced

__all__ = [
    "CUTOFFS",
    "Block",
    "ImpressionRows",
    "Measured",
    "Question",
    "beyond",
    "describe",
    "first_lists",
    "measure",
    "measure_beside_chance",
    "questions",
    "sliced",
    "sound",
    "summarise",
]
