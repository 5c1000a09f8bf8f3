"""Evaluation without leaks: pure functions of scores."""

from homebody.evaluation.metrics import CUTOFFS, Block, Question, sound, summarise
from homebody.evaluation.protocols import describe, measure, questions, sliced

__all__ = ["CUTOFFS", "Block", "Question", "describe", "measure", "questions", "sliced", "sound", "summarise"]
