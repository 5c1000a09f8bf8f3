"""Evaluation without leaks: pure functions of scores."""

from homebody.evaluation.metrics import CUTOFFS, METRICS, Block, Places, Question, main_cutoff, place, sound, summarise
from homebody.evaluation.protocols import HELD, describe, measure, questions, sliced

__all__ = [
    "CUTOFFS",
    "HELD",
    "METRICS",
    "Block",
    "Places",
    "Question",
    "describe",
    "main_cutoff",
    "measure",
    "place",
    "questions",
    "sliced",
    "sound",
    "summarise",
]
