"""Options that several commands share; those of a recipe come from the fields of `homebody.recipe.Recipe`."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from typer import Argument, Option, echo

from homebody import settings
from homebody.errors import HomebodyError, install
from homebody.recipe import Recipe, parse_fields
from homebody.report.listing import LATEST, RUNS, named_run
from homebody.screen import console, plain, put, refuse, say, table, wrapped

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "METHOD",
    "RUN_HELP",
    "DataDir",
    "Given",
    "Jobs",
    "Json",
    "Out",
    "Run",
    "Settings",
    "TrustCode",
    "answer",
    "folder_anywhere",
    "from_settings",
    "insist_on_deploy",
    "made_key",
    "of_recipe",
    "one_output",
    "pairs",
    "plain",
    "ranking",
    "recipe_options",
    "refuse",
    "run_named",
    "show",
    "table",
    "warn",
]

SQLITE = "sqlite:///"


def run_named(run: Path | None) -> Path | None:
    """The callback of arguments and options that name a run."""
    return None if run is None else named_run(run)


RUN_HELP = f"A run's folder, its name in {RUNS}/, or {LATEST} for the one begun last."
Run = Annotated[Path, Argument(help=RUN_HELP, metavar="RUN", callback=run_named)]
"""The run that a command is about."""
Out = Annotated[Path, Option("--out", help="The folder in which run folders are created.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")]
Beyond = Annotated[
    bool, Option("--beyond", help="Also show coverage, novelty, diversity, popularity bias and gaps between groups.")
]
TrustCode = Annotated[
    bool,
    Option("--trust-code", help="Run the Python file that the recipe names as its method; its path is printed first."),
]
Jobs = Annotated[int | None, Option(help="Runs in parallel; by default one per processor.")]
Settings = Annotated[list[str] | None, Option("--set", help="A field of the method, field=value; repeat.")]


def _option(spec: Field[Any], name: str = "", **changes: Any) -> Any:
    of = spec.metadata
    words = {"help": of["doc"], "rich_help_panel": of["panel"] or None, "min": of.get("min"), **changes}
    return Option(name or settings.option(spec), **words)


def of_recipe(name: str, **changes: Any) -> Any:
    """The option of a single field of a recipe, for a command that takes only some of them, or with other texts."""
    return _option(settings.declared(Recipe)[name][0], **{"rich_help_panel": None, **changes})


METHOD = Argument(help=settings.declared(Recipe)["method"][0].metadata["doc"])
DataDir = Annotated[Path | None, of_recipe("data_dir")]


class Given:
    """What was typed for the settings of a dataclass."""

    def __init__(self, owner: Any, specs: list[tuple[Field[Any], settings.Kind]], typed: dict[str, Any]) -> None:
        self.owner, self.specs, self.typed = owner, specs, typed

    def values(self) -> dict[str, Any]:
        """The value of each setting. Paths become absolute, so that a run can be resumed from any folder."""
        values: dict[str, Any] = {}
        for spec, kind in self.specs:
            if "keys" in spec.metadata:
                typed = {key: self.typed[key] for key in spec.metadata["keys"]}
                values[spec.name] = {key: text for key, text in typed.items() if text is not None}
            else:
                values[spec.name] = _value(spec, kind, self.typed[spec.name])
        return values

    def recipe(self, method: str, fields: Sequence[str] | None = None, **rest: Any) -> Recipe:
        """The recipe for a method that was typed here, whose file is trusted, and for fields of it, field=value."""
        from homebody.methods import trust

        trusted = trust(method)
        chosen = parse_fields(method, fields) if fields else {}
        recipe: Recipe = self.owner(method=trusted, fields=chosen, **self.values(), **rest)
        return recipe


def from_settings(owner: Any, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, as `given`, an option for each setting of a dataclass that has a panel, or is named here."""
    shown = [(spec, kind) for spec, kind in settings.declared(owner).values() if spec.metadata["panel"]]
    # The order of `--help`: panels as they are first named, then ranks.
    panels = list(dict.fromkeys(spec.metadata["panel"] for spec, _ in shown))
    shown.sort(key=lambda pair: (panels.index(pair[0].metadata["panel"]), pair[0].metadata.get("rank", 0)))
    typed = [(spec, kind) for spec, kind in shown if not names or spec.name in names]
    shared = [parameter for spec, kind in typed for parameter in _parameters(spec, kind)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        everything: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            named = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            everything += shared if parameter.name == "given" else [named]

        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            given = Given(owner, typed, {parameter.name: values.pop(parameter.name) for parameter in shared})
            command(given=given, **values)

        wrapped.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in everything}
        return wrapped

    return decorate


def _parameters(spec: Field[Any], kind: settings.Kind) -> Iterator[inspect.Parameter]:
    """A field as parameters of a command: one, or one for each key of a table whose keys are known."""

    def parameter(name: str, annotation: Any, default: Any, option: Any) -> inspect.Parameter:
        whole = Annotated[annotation, option]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=whole)

    for key, text in spec.metadata.get("keys", {}).items():
        yield parameter(key, str | None, None, _option(spec, f"--{key.replace('_', '-')}", help=text))
    if "keys" in spec.metadata:
        return
    default = settings.default_of(spec)
    annotation: Any = kind.outer
    if default is MISSING:
        default = spec.metadata.get("assume", ...)
    if kind.outer is dict or kind.inner is str:
        annotation, default = list[str] | None, None
    elif kind.outer is list:
        annotation, default = str, ",".join(map(str, default))
    elif spec.metadata.get("path") in ("file", "folder"):
        annotation = Path | None
    elif kind.optional:
        annotation = kind.outer | None
    yield parameter(spec.name, annotation, default, _option(spec))


def _value(spec: Field[Any], kind: settings.Kind, typed: Any) -> Any:
    """The value of a field from what was typed for it."""
    name, path = settings.option(spec), spec.metadata.get("path")
    if kind.outer is dict:
        return _table(typed, name, kind, path) or (None if kind.optional else {})
    if kind.inner is str:
        return list(typed or [])
    if kind.outer is list:
        return [_whole(text, name) for text in typed.split(",")]
    if typed is None or not path:
        return typed
    return folder_anywhere(typed) if path == "folder" else _file_anywhere(str(typed))


def _table(typed: list[str] | None, name: str, kind: settings.Kind, path: str | None) -> dict[str, Any]:
    """What a repeated NAME=VALUE option says: numbers where the values of the table may be numbers. Paths are made
    absolute: path="name", of values that are files; path="values", what follows file: in a value."""
    texts = pairs(typed, name, first=path is not None)
    if kind.inner is Any:
        return {key: _number(text) for key, text in texts.items()}
    if path is None:
        return dict(texts)
    if path == "name":
        return {key: _file_anywhere(text) for key, text in texts.items()}
    parts = {key: text.partition("file:") for key, text in texts.items()}
    files = {key for key, (before, file, _) in parts.items() if file and before in ("", "many:", "text:")}
    return {key: f"{a}{b}{_file_anywhere(c) if key in files else c}" for key, (a, b, c) in parts.items()}


def pairs(given: list[str] | None, option: str, *, first: bool = False) -> dict[str, str]:
    """What a repeated NAME=VALUE option says. It is split at the last equals sign, or at the first one.

    >>> pairs(["core=5", "seed=1"], "--filter")
    {'core': '5', 'seed': '1'}
    """
    values: dict[str, str] = {}
    for text in given or []:
        # A column's name may hold an equals sign; a kind or a number may not.
        name, equals, value = (part.strip() for part in (text.partition("=") if first else text.rpartition("=")))
        if not equals or not name or not value:
            raise HomebodyError(f"{option} takes NAME=VALUE, not '{text}'.")
        if name in values:
            raise HomebodyError(f"{option} gives '{name}' twice; leave one out.")
        values[name] = value
    return values


def answer(result: Mapping[str, Any], as_json: bool, *shown: str | Callable[[], object]) -> None:
    """Print one JSON object, or the same for people: lines, and what functions print."""
    if as_json:
        echo(json.dumps(result))
        return
    for part in shown:
        echo(_on_screen(part, sys.stdout)) if isinstance(part, str) else part()


def show(*parts: str | Table) -> None:
    """Print tables, and lines as they are."""
    output = console()
    for part in parts:
        if isinstance(part, str):
            say(output, plain(part))
        else:
            put(output, part)


def ranking(title: str, items: Iterable[tuple[object, object, float]]) -> Table:
    """The table of ranked items: id, name, where items have any, and score. Texts are never read as markup."""
    from rich.text import Text

    listed = list(items)
    named = any(str(item) != str(name) for item, name, _ in listed)
    ranked = table(["", "item", *(["name"] if named else []), "score"], ["", "score"], title=title)
    ranked.min_width = min(len(title), 60)  # a title of more columns than the table would break
    for place, (item, name, score) in enumerate(listed, 1):
        called = [Text(plain(text)) for text in ((item, name) if named else (item,))]
        ranked.add_row(str(place), *called, f"{score:.3f}")
    return ranked


def made_key(public: Path, give: str, as_json: bool) -> None:
    """Print where a new key is, and who gets its public half. give: a sentence with a place for either half."""
    private = public.with_suffix(".key")
    said = (str(private), str(public), give.format(public, private.name))
    answer({"key": str(private), "public": str(public)}, as_json, *said)


def one_output() -> bool:
    """Whether results and notes end in one place, a terminal or a file, so that what was said need not be repeated."""
    try:
        ends = [os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr)]
    except (OSError, ValueError):  # a test, or a notebook, has no such streams
        return False
    return os.path.samestat(*ends)


def insist_on_deploy(who: str, *, to_start: bool = False) -> None:
    """Refuse in a sentence, at the first command, what would fail at a later one. to_start: also what is installed and
    cannot be imported, which takes half a second to find out."""
    from importlib import import_module
    from importlib.util import find_spec

    try:
        there = all(find_spec(name) for name in ("flwr", "uvicorn", "httpx", "cryptography"))
        if to_start:
            import_module("homebody.federation.flower.protocol")
    except (HomebodyError, ImportError, ValueError):
        there = False
    if not there:
        raise HomebodyError(f"{who} needs the extra: {install('deploy')}.")


def warn(text: str, begin: str = "note") -> None:
    """Print a note to the error stream, whatever else is printed; no error, so that it does not begin as one."""
    echo(_on_screen(f"{begin}: {plain(text)}", sys.stderr), err=True)


def _on_screen(text: str, stream: TextIO) -> str:
    """A text broken at words where a terminal shows it."""
    return wrapped(text, get_terminal_size().columns) if stream.isatty() else text


def _number(text: str) -> int | float | str:
    """A number where the text is one. The filter refuses other texts that make no sense."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _whole(text: str, name: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise HomebodyError(f"{name} takes whole numbers such as 5,10,20, not '{text}'.")
    return int(text)


def _file_anywhere(file: str) -> str:
    """The absolute path of a file, also in the address of a database. A file that does not exist stays as it was typed,
    for the error to name."""
    if file.startswith(SQLITE):
        return SQLITE + _file_anywhere(file.removeprefix(SQLITE))
    return str(Path(file).resolve()) if Path(file).is_file() else file


def folder_anywhere(folder: Path | None) -> str | None:
    return None if folder is None else str(folder.resolve() if folder.is_dir() else folder)


recipe_options = from_settings(Recipe)
"""Give a command the options of a recipe."""
