"""Evaluation without leaks: pure functions of scores."""

from homebody.evaluation.metrics import CUTOFFS, Block, Question, sound, summarise
from homebody.evaluation.protocols import ImpressionRows, describe, measure, questions, sliced

__all__ = [
    "CUTOFFS",
    "Block",
    "ImpressionRows",
    "Question",
    "describe",
    "measure",
    "questions",
    "sliced",
    "sound",
    "summarise",
]
