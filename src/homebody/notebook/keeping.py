"""Models on disk: what `Fitted.save` writes, and `hb.open` reads."""

from __future__ import annotations

from pathlib import Path

from homebody.notebook.fitted import Fitted
from homebody.run import reopened

__all__ = ["open"]


def open(path: str | Path, *, trust_code: bool = False) -> Fitted:  # noqa: A001  # hb.open, as in other packages
    """The model of a finished run, ready to recommend.

    trust_code: run the file that the run names as its method; without it, such a run is refused.

    >>> import tempfile
    >>> import homebody as hb
    >>> with tempfile.TemporaryDirectory() as runs:
    ...     model = hb.fit("fedials", "synthetic:users=60,items=40,mean=8", rounds=2, out=runs, quiet=True)
    ...     again = hb.open(model.path)
    >>> again.recommend("all", k=3).equals(model.recommend("all", k=3))
    True
    """
    return Fitted(reopened(Path(path), trust_code=trust_code))
