"""One call from data to a model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from homebody.errors import HomebodyError
from homebody.files import path_of
from homebody.methods import find
from homebody.notebook.asking import Named, data_of, loaded, method_of, recipe_of
from homebody.notebook.fitted import Fitted
from homebody.notebook.progress import ProgressLine, watching
from homebody.notebook.wording import in_python, python_errors
from homebody.privacy import Budget
from homebody.privacy.stages import Stage
from homebody.reference import Reference
from homebody.run import finish

__all__ = ["fit"]


@python_errors
def fit(
    method: Named,
    data: Any,
    *,
    rounds: int | None = None,
    cohort: int | None = None,
    split: str | None = None,
    stages: str | Stage | Sequence[str | Stage] = (),
    budget: str | float | Budget | None = None,
    calibrate: bool = False,
    seed: int = 0,
    out: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Fitted:
    """Train a method on data, and give the model of the round that validation chose.

    method: a name from `homebody methods`, a class, or an object with its settings, such as `hb.FedIALS(factors=16)`;
    centralised references too. data: what `hb.load` takes (a name, a file, a frame), or what it gives; also a split,
    or an `hb.Simulator`.
    rounds, cohort: by default the method's own. split: what is held out, such as "ratio:test=0.2".
    stages, budget: the way out of each update, and what it may cost, as texts like those of the command line, or as
    objects such as `hb.Clip(1.0)`; calibrate computes the noise that just spends the budget. out: a folder that keeps
    the record of the run; by default it goes with the model.
    quiet: show no progress and no notes. settings: any other setting of `homebody run`, such as protocol, cutoffs,
    evaluate_every or delta.

    >>> import homebody as hb
    >>> people = hb.load("synthetic:users=200,items=100,mean=12")
    >>> model = hb.fit(hb.FedIALS(factors=4), people, rounds=2, quiet=True)
    >>> model
    Fitted(fedials on synthetic:users=200,items=100,mean=12: HR@10 ..., NDCG@10 ...; ε ∞ for every observer)
    >>> private = hb.fit("fedmf", people, rounds=2, stages=["clip:norm=1", "gaussian:z=2"], budget="eps=8", quiet=True)
    >>> private.epsilon["public"] < 8
    True
    >>> hb.fit("fedmf", people, rounds=2, stages=["clip:norm=1"], round=3)
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no setting 'round'; did you mean 'rounds'? Known: ...
    """
    line = ProgressLine(quiet=quiet)
    asked = {"rounds": rounds, "cohort": cohort, "split": split, "budget": budget, "seed": seed, **settings}
    named = method_of(method)
    with watching("data", line) as watcher:
        given = data_of(data, watcher)
        recipe = recipe_of(named, given, {**asked, "stages": stages, "calibrate": calibrate})
        if (recipe.stages or recipe.budget) and issubclass(find(recipe.method), Reference):
            raise HomebodyError(
                f"{recipe.method} is a centralised reference that collects raw data, so ε is ∞: leave out stages and "
                "budget."
            )
        given = loaded(recipe, given, watcher)
    folder = path_of(out) if out is not None else Path(tempfile.mkdtemp(prefix="homebody-"))
    temporary = folder if out is None else None
    try:
        with watching(f"{recipe.short_method} on {recipe.data}", line, recipe.selects()) as watcher:
            done = finish(recipe, folder, watcher, data=given, lasting=temporary is None)
        for caution in done.result.get("cautions", []):
            line.say(in_python(caution))
        return Fitted(done, temporary=temporary)
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
