"""Sentences of the command line, as Python says them: settings in the place of options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from homebody.errors import HomebodyError

__all__ = ["in_python", "python_errors"]

P = ParamSpec("P")
T = TypeVar("T")
NAMES = {
    "calibrate": "calibrate=True",
    "filter": "filters",
    "kind": "kinds",
    "plain": "fused=False",
    "slice": "slices",
    "stage": "stages",
    "vocabulary": "vocabularies",
}
"""Options whose setting has another name."""
_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*)")


def in_python(text: str) -> str:
    """A sentence in which options are settings.

    >>> in_python("leave out --set output=explicit, or name their column with --rating-col; --stage gaussian")
    'leave out output=explicit, or name their column with rating_col; stages gaussian'
    """
    text = text.replace("--set ", "").replace("The recipe's ", "").replace("the recipe's ", "the ")
    return _OPTION.sub(lambda match: NAMES.get(match[1], match[1].replace("-", "_")), text)


def python_errors(call: Callable[P, T]) -> Callable[P, T]:
    """The same call, whose errors name settings and not options."""
    asked = inspect.signature(call)

    @wraps(call)
    def worded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            asked.bind(*args, **kwargs)
        except TypeError as error:
            raise HomebodyError(f"hb.{call.__name__}({', '.join(_taken(asked))}) is called wrongly: {error}.") from None
        try:
            return call(*args, **kwargs)
        except HomebodyError as error:
            if (said := in_python(str(error))) == str(error):
                raise
            raise type(error)(said) from error

    return worded


def _taken(asked: inspect.Signature) -> list[str]:
    """What a call takes, for a sentence."""
    starts: dict[object, str] = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    names = [f"{starts.get(each.kind, '')}{name}" for name, each in asked.parameters.items()]
    named = [each.kind is each.KEYWORD_ONLY for each in asked.parameters.values()]
    return [*names[: named.index(True)], "*", *names[named.index(True) :]] if any(named) else names
