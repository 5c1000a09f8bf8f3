"""Evaluation without leaks: pure functions of scores."""

from homebody.evaluation.metrics import CUTOFFS, Block, Measured, Question, sound, summarise
from homebody.evaluation.protocols import ImpressionRows, describe, measure, measure_beside_chance, questions, sliced

__all__ = [
    "CUTOFFS",
    "Block",
    "ImpressionRows",
    "Measured",
    "Question",
    "describe",
    "measure",
    "measure_beside_chance",
    "questions",
    "sliced",
    "sound",
    "summarise",
]
