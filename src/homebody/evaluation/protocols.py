"""From a split to the questions a model is asked, and how to say what a number means."""

from __future__ import annotations

import torch

from homebody.core import Users
from homebody.data.splits import PROTOCOLS, Held, Split
from homebody.evaluation.metrics import Question

__all__ = ["HELD", "describe", "questions"]

HELD: tuple[Held, ...] = ("valid", "test")


def questions(split: Split, users: Users, device: torch.device | str = "cpu") -> dict[str, Question]:
    """What these users are asked, for validation and for test."""
    held_out = {"valid": split.valid, "test": split.test}
    return {
        held: Question(
            torch.from_numpy(held_out[held][users]).to(device),
            torch.from_numpy(split.candidates(users, held)).to(device),
            torch.from_numpy(split.seen(users, held)).to(device),
        )
        for held in HELD
    }


def describe(protocol: str, how: str = "latest", negatives: int = 99) -> str:
    """One line to stand beside every number.

    >>> print(describe("strict"))
    protocol strict: training negatives are any items outside the person's training items; latest item
    held out; ranked against 99 sampled negatives (full/: the whole catalogue); round chosen on validation
    """
    return (
        f"protocol {protocol}: {PROTOCOLS[protocol]}; {how} item held out; ranked against {negatives} sampled "
        "negatives (full/: the whole catalogue); round chosen on validation"
    )
