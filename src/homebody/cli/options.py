"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from homebody.errors import HomebodyError

if TYPE_CHECKING:
    from homebody.recipe import Recipe

__all__ = ["DataDir", "Given", "Json", "Out", "Settings", "TrustCode", "about_data", "folder_anywhere", "pairs", "told"]

Out = Annotated[Path, typer.Option("--out", help="The folder that run folders are made in.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="A folder with a folder per dataset; read before $HOMEBODY_DATA and the cache."),
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Run the file that the folder's recipe names as its method; it is named first."),
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="field=value of the method; repeat.")]
TRAINING, PRIVACY, ASKED, DATA, OWN = "Training", "Privacy", "Evaluation", "Data", "A file of your own"


@dataclass(frozen=True)
class Given:
    """What was said of the data and of how a model is asked about it: the part of a recipe that commands share."""

    data: Annotated[
        str,
        typer.Option("--data", help="A dataset's name, a CSV or Parquet file, or synthetic[:…].", rich_help_panel=DATA),
    ] = "ml-100k"
    rounds: Annotated[
        int | None, typer.Option(help="Training rounds; by default what the method takes.", rich_help_panel=TRAINING)
    ] = None
    protocol: Annotated[
        str, typer.Option(help="strict, isolated or published: see docs/evaluation.md.", rich_help_panel=ASKED)
    ] = "strict"
    split: Annotated[
        str,
        typer.Option(
            help="leave-one-out, ratio, held-out-users, cold-users, cold-items, cold-both, impressions.",
            rich_help_panel=ASKED,
        ),
    ] = "leave-one-out"
    held_out: Annotated[
        str | None,
        typer.Option(
            help="latest, latest-first or random; by default latest where there are times.", rich_help_panel=ASKED
        ),
    ] = None
    negatives: Annotated[
        int, typer.Option(help="Items that the sampled metrics rank against.", rich_help_panel=ASKED)
    ] = 99
    cutoffs: Annotated[str, typer.Option(help="Lengths of the lists that metrics look at.", rich_help_panel=ASKED)] = (
        "5,10,20"
    )
    slices: Annotated[
        list[str] | None,
        typer.Option("--slice", help="Also users of so many interactions (20-30); repeat.", rich_help_panel=ASKED),
    ] = None
    cohort: Annotated[
        int | None,
        typer.Option(
            help="Clients that take part in a round; by default all, or as many as the method says.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            help="Rounds from one evaluation to the next; the last always is. By default every one, or as the method "
            "says.",
            min=1,
            rich_help_panel=ASKED,
        ),
    ] = None
    stages: Annotated[
        list[str] | None,
        typer.Option(
            "--stage",
            help="What updates pass, in order: clip:norm=0.5, secure-sum, gaussian:z=1, …; repeat.",
            rich_help_panel=PRIVACY,
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            help="eps=8,delta=1e-6,unit=user,observer=public: training ends before it is broken.",
            rich_help_panel=PRIVACY,
        ),
    ] = None
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Find the noise that spends the budget.", rich_help_panel=PRIVACY)
    ] = False
    delta: Annotated[
        float, typer.Option(help="What ε is stated at where there is no budget.", rich_help_panel=PRIVACY)
    ] = 1e-6
    public: Annotated[
        float,
        typer.Option(
            help="The share of people whose data is public, for stages that learn from them alone; they are not asked.",
            rich_help_panel=PRIVACY,
        ),
    ] = 0.0
    device: Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel=TRAINING)] = "cpu"
    filters: Annotated[
        list[str] | None,
        typer.Option("--filter", help="A part of the data: core=5, min_user=20, …; repeat.", rich_help_panel=DATA),
    ] = None
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="A folder with a folder per dataset; read before $HOMEBODY_DATA and the cache.", rich_help_panel=DATA
        ),
    ] = None
    user_col: Annotated[str | None, typer.Option(help="The column of users.", rich_help_panel=OWN)] = None
    item_col: Annotated[str | None, typer.Option(help="The column of items.", rich_help_panel=OWN)] = None
    time_col: Annotated[str | None, typer.Option(help="The column of times.", rich_help_panel=OWN)] = None
    rating_col: Annotated[str | None, typer.Option(help="The column of ratings.", rich_help_panel=OWN)] = None
    feature_cols: Annotated[
        str | None,
        typer.Option(help="The columns of features, such as age,genre; by default all others.", rich_help_panel=OWN),
    ] = None
    user_features: Annotated[
        Path | None, typer.Option(help="A CSV or Parquet file, a row a user.", rich_help_panel=OWN)
    ] = None
    item_features: Annotated[
        Path | None, typer.Option(help="A CSV or Parquet file, a row an item.", rich_help_panel=OWN)
    ] = None
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            help="column=categorical, multi-hot, numeric or text; guessed otherwise; repeat.",
            rich_help_panel=OWN,
        ),
    ] = None
    vocabularies: Annotated[
        list[str] | None,
        typer.Option(
            "--vocabulary",
            help="feature=where its values come from: A,B,C, file:PATH, hash:64, range:0:100, private:0.5 or found; "
            "repeat.",
            rich_help_panel=PRIVACY,
        ),
    ] = None
    impressions: Annotated[
        Path | None, typer.Option(help="A CSV or Parquet file, a row an item that was shown.", rich_help_panel=OWN)
    ] = None

    def recipe(self, method: str, **rest: Any) -> Recipe:
        """The recipe for a method that was typed here: its file is trusted. Files go by their whole paths, so that a
        run can be resumed from any folder."""
        from homebody.methods import trust
        from homebody.recipe import Recipe

        named = ("user_col", "item_col", "time_col", "rating_col", "feature_cols")
        columns = {name: getattr(self, name) for name in named}
        return Recipe(
            method=trust(method),
            data=_file_anywhere(self.data),
            rounds=self.rounds,
            split=self.split,
            protocol=self.protocol,
            held_out=self.held_out,
            negatives=self.negatives,
            public=self.public,
            cohort=self.cohort,
            evaluate_every=self.evaluate_every,
            device=self.device,
            columns={name: value for name, value in columns.items() if value is not None},
            data_dir=folder_anywhere(self.data_dir),
            user_features=_optional(self.user_features),
            item_features=_optional(self.item_features),
            kinds=pairs(self.kinds, "--kind"),
            vocabularies=_vocabularies(self.vocabularies),
            impressions=_optional(self.impressions),
            filters={name: _number(value) for name, value in pairs(self.filters, "--filter").items()},
            cutoffs=[_cutoff(text) for text in self.cutoffs.split(",")],
            slices=list(self.slices or []),
            stages=list(self.stages or []),
            budget=self.budget,
            calibrate=self.calibrate,
            delta=self.delta,
            **rest,
        )


def about_data(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `Given`, which it gets as its parameter `given`."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    hints = get_type_hints(Given, include_extras=True)
    shared = [
        inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, default=spec.default, annotation=hints[spec.name])
        for spec in fields(Given)
    ]
    mine = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "given"]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        given = Given(**{spec.name: values.pop(spec.name) for spec in fields(Given)})
        command(given=given, **values)

    everything = [*mine, *shared]
    wrapped.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in everything}
    return wrapped


def pairs(given: list[str] | None, option: str) -> dict[str, str]:
    """What a repeated NAME=VALUE option says.

    >>> pairs(["core=5", "seed=1"], "--filter")
    {'core': '5', 'seed': '1'}
    """
    found: dict[str, str] = {}
    for text in given or []:
        # A column's name may hold an equals sign, a kind or a number may not.
        name, equals, value = (part.strip() for part in text.rpartition("="))
        if not equals or not name or not value:
            raise HomebodyError(f"{option} takes NAME=VALUE, not '{text}'.")
        if name in found:
            raise HomebodyError(f"{option} says twice what '{name}' is; leave one out.")
        found[name] = value
    return found


def _vocabularies(given: list[str] | None) -> dict[str, str]:
    """What is said of features; files by their whole paths.

    >>> _vocabularies(["town=hash:64", "job=cook,vet"])
    {'town': 'hash:64', 'job': 'cook,vet'}
    """
    found: dict[str, str] = {}
    for text in given or []:
        name, equals, said = (part.strip() for part in text.partition("="))
        if not equals or not name or not said:
            raise HomebodyError(f"--vocabulary takes FEATURE=VALUES, such as town=hash:64, not '{text}'.")
        if name in found:
            raise HomebodyError(f"--vocabulary says twice what '{name}' is; leave one out.")
        before, file, path = said.partition("file:")
        found[name] = f"{before}file:{_file_anywhere(path)}" if file and before in ("", "many:", "text:") else said
    return found


def told(text: str) -> None:
    """Say something that must not be missed, whatever is printed otherwise."""
    typer.echo(f"homebody: {text}", err=True)


def _number(text: str) -> int | float | str:
    """A number where it is one; what makes no sense is for the filter itself to refuse."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _cutoff(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise HomebodyError(f"--cutoffs takes whole numbers such as 5,10,20, not '{text}'.")
    return int(text)


def _file_anywhere(file: str) -> str:
    """One that is not there stays as it was typed, for the error to name."""
    return str(Path(file).resolve()) if Path(file).is_file() else file


def _optional(file: Path | None) -> str | None:
    return None if file is None else _file_anywhere(str(file))


def folder_anywhere(folder: Path | None) -> str | None:
    return None if folder is None else str(folder.resolve() if folder.is_dir() else folder)
