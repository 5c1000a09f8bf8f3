"""Evaluation without leaks: pure functions of scores."""

from homebody.evaluation.metrics import Block, Question, Ranks, hit_ratio, ndcg, rank, summarise
from homebody.evaluation.protocols import HELD, describe, questions

__all__ = [
    "HELD",
    "Block",
    "Question",
    "Ranks",
    "describe",
    "hit_ratio",
    "ndcg",
    "questions",
    "rank",
    "summarise",
]
