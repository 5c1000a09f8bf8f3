"""The record of a round, and the progress that a run resumes from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

from homebody.core import Evaluated, Tree
from homebody.errors import refuse_unknown
from homebody.evaluation.metrics import ERRORS
from homebody.privacy.ledger import DELTA
from homebody.stopwatch import Lap

__all__ = ["Best", "Checkpoints", "Progress", "Round", "better"]


@dataclass(frozen=True)
class Round:
    """One line of the run record."""

    phase: str
    round: int
    """Within the phase, from 1."""
    step: int
    """Over all phases."""
    clients: int
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Empty if the round was not evaluated."""
    epsilon: dict[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    """Of wall time, for training, without compilation."""
    evaluation_seconds: float = 0.0
    delta: float = DELTA
    """The δ that ε is stated at."""
    charged: bool = True
    """Whether the ledger has a charge for it. A round that reveals nothing has none."""
    errors: dict[str, float] = field(default_factory=dict)
    """The standard error of each metric to which noise was added."""
    unclipped: dict[str, float] = field(default_factory=dict)
    """The estimates of those metrics that were clipped to their range."""
    compile_seconds: float = 0.0
    """Of wall time, for compiling kernels; neither `seconds` nor `evaluation_seconds` contains it."""

    def measured(self, evaluated: Evaluated, epsilon: dict[str, float], took: Lap) -> Round:
        """The same round, once it is measured. epsilon: what was spent up to now, measuring included."""
        return replace(
            self,
            metrics=evaluated.metrics,
            epsilon=epsilon,
            evaluation_seconds=took.seconds,
            errors=evaluated.errors,
            unclipped=evaluated.unclipped,
            compile_seconds=self.compile_seconds + took.compile_seconds,
        )


@dataclass
class Best:
    """The round chosen on validation."""

    step: int
    evaluated: Evaluated
    shared: Tree
    clients: Tree


@dataclass
class Progress:
    """Everything that a run needs to resume."""

    step: int = 0
    """Rounds done, over all phases."""
    shared: Tree = field(default_factory=dict)
    server: Tree = field(default_factory=dict)
    clients: Tree = field(default_factory=dict)
    """Filled only in a checkpoint; otherwise the runtime holds the clients' states."""
    best: Best | None = None
    digest: str = ""
    """Of everything that shapes the releases; see `homebody.training.fit`. Empty if none was given."""
    charged: int = 0
    """How many of those rounds the ledger has a charge for, at least."""


class Checkpoints(Protocol):
    """Storage for the progress of a run."""

    def load(self) -> Progress | None:
        """The last progress that was saved completely, or None."""

    def due(self) -> bool:
        """Whether it is time to save again."""

    def save(self, progress: Progress) -> None:
        """Replace the saved progress, all or nothing."""


def better(new: Evaluated, best: Evaluated | None, select: str) -> bool:
    """Whether this round is better than the best so far. A round without metrics never is.

    If nothing is held out for validation, the latest round is the best: test data must not choose.

    >>> better(Evaluated({"valid/hr@10": 0.5}), Evaluated({"valid/hr@10": 0.6}), "valid/hr@10")
    False
    >>> better(Evaluated({"hr@10": 0.5}), Evaluated({"hr@10": 0.6}), "valid/hr@10")
    True
    >>> better(Evaluated({"valid/rmse": 1.5}), Evaluated({"valid/rmse": math.nan}), "valid/rmse")
    True
    """
    if not new.metrics:
        return False
    if not any(name.startswith("valid/") for name in new.metrics) and select.startswith("valid/"):
        return True
    refuse_unknown("metric to choose the round by", [select], new.metrics)
    if best is None:
        return True
    value, before = (each.unclipped.get(select, each.metrics[select]) for each in (new, best))
    if math.isnan(before):
        return True
    return value < before if select.rpartition("/")[2] in ERRORS else value > before
