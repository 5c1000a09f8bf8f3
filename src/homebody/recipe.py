"""A recipe: everything that says what to run. TOML on disk, `--set` and options on the command line."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from homebody.core import Method
from homebody.data.vocabularies import ALL, parse
from homebody.errors import HomebodyError, unknown_name
from homebody.methods import build, find, no_field, own_channel
from homebody.params import KINDS, params
from homebody.privacy import Budget, Shuffle
from homebody.privacy.ledger import DELTA
from homebody.privacy.limits import check_delta
from homebody.privacy.specs import split_stage, with_noise
from homebody.reference import Reference

__all__ = ["Recipe", "parse_fields"]

SCHEMA_VERSION = 2
"""From the second on, vocabularies are declared; those of a recipe of the first are taken as found."""
SELECT = "valid/ndcg@10"
"""What chooses the round of whatever ranks."""


@dataclass(frozen=True)
class Recipe:
    """What to run.

    >>> recipe = Recipe("fedmf", "ml-100k", fields={"factors": 8})
    >>> Recipe.from_toml(recipe.to_toml()) == recipe
    True
    >>> recipe.build().factors
    8
    """

    method: str
    data: str
    fields: dict[str, Any] = field(default_factory=dict)
    """The method's fields that differ from its defaults."""
    rounds: int | None = None
    """None: what the method takes by default."""
    seed: int = 0
    split: str = "leave-one-out"
    """What is held out: a name from `homebody.data.partitions.WAYS`, with its settings (ratio:test=0.2)."""
    protocol: str = "strict"
    held_out: str | None = None
    """latest, latest-first or random; None: latest where there are times."""
    negatives: int = 99
    public: float = 0.0
    """The share of people whose data is public: for stages that learn from nobody else. They are not asked."""
    cohort: int | None = None
    evaluate_every: int | None = None
    """None: as often as the method says."""
    select: str | None = None
    """The metric that chooses the round; None: the method's own, by what it predicts."""
    device: str = "cpu"
    fused: bool = True
    columns: dict[str, str] = field(default_factory=dict)
    """For a file of one's own: user_col, item_col, time_col, rating_col, feature_cols (with commas)."""
    data_dir: str | None = None
    user_features: str | None = None
    """A CSV or Parquet file, a row a user; likewise of items."""
    item_features: str | None = None
    kinds: dict[str, str] = field(default_factory=dict)
    """What columns of features are: categorical, multi-hot, numeric or text."""
    vocabularies: dict[str, str] = field(default_factory=dict)
    """Where values of features come from, by name: see `homebody.data.vocabularies`. The data set says the others."""
    impressions: str | None = None
    """A CSV or Parquet file, a row an item that was shown."""
    filters: dict[str, Any] = field(default_factory=dict)
    """Which part of the data is used: see `homebody.data.filters.Filters`."""
    cutoffs: list[int] = field(default_factory=lambda: [5, 10, 20])
    """Lengths of the lists that metrics look at."""
    slices: list[str] = field(default_factory=list)
    """Users to report beside everyone, by how many interactions they have: 20-30."""
    stages: list[str] = field(default_factory=list)
    """What updates pass on their way out, in order: clip:norm=0.5, secure-sum, gaussian:z=1. None: the method's own."""
    budget: str | None = None
    """How much may be told: eps=8,delta=1e-6,unit=user,observer=public. Training ends before it is broken."""
    calibrate: bool = False
    """Whether the noise is yet to be found that spends the budget over the planned rounds."""
    delta: float = DELTA
    """What ε is stated at where there is no budget."""

    def build(self) -> Method | Reference:
        """The method with its fields set."""
        return build(self.method, self.fields, with_noise(self.stages) if self.calibrate else self.stages)

    def unshuffled(self) -> list[str]:
        """A note where stages were given that leave out the shuffle that the method's own reports pass."""
        given = [split_stage(text)[0] for text in self.stages]
        shuffles = any(isinstance(stage, Shuffle) for stage in own_channel(self.method).stages)
        if not shuffles or "one-bit" not in given or "shuffle" in given:
            return []
        return [f"{self.short_method}'s own channel shuffles; these stages do not"]

    def every(self, method: Method | Reference) -> int:
        """Rounds from one evaluation to the next."""
        own = method.default_evaluate_every if isinstance(method, Method) else 1
        return own if self.evaluate_every is None else self.evaluate_every

    def selects(self) -> str:
        """The metric that the round is chosen by.

        >>> Recipe("fedmf", "ml-1m").selects(), Recipe("privrec", "ml-1m", fields={"output": "explicit"}).selects()
        ('valid/ndcg@10', 'valid/rmse')
        """
        if self.select is not None:
            return self.select
        built = self.build()
        return built.default_select if isinstance(built, Method) else SELECT

    def allowed(self) -> Budget | None:
        """The budget, read and checked."""
        return None if self.budget is None else Budget.parse(self.budget)

    @property
    def stated_at(self) -> float:
        """The δ that ε is stated at."""
        allowed = self.allowed()
        return allowed.delta if allowed else self.delta

    def check(self) -> None:
        """Refuse values of the wrong kind, in a sentence."""
        for spec in fields(self):
            value, wanted = getattr(self, spec.name), _TYPES[spec.name]
            if value is None and spec.default is None:
                continue
            if type(value) is not wanted and not (wanted is float and type(value) is int):
                kind = {**KINDS, list: "a list", dict: "a table"}[wanted]
                raise HomebodyError(f"The recipe's {spec.name} must be {kind}, not {value!r}.")
        for k in self.cutoffs:
            if type(k) is not int or k < 1:
                raise HomebodyError(f"A cut-off of the metrics is a whole number from 1, not {k!r}.")
        if self.evaluate_every is not None and self.evaluate_every < 0:
            raise HomebodyError(f"evaluate-every must be 0 (never) or more, not {self.evaluate_every}.")
        if not self.measured():
            raise HomebodyError("The metrics need a cut-off, such as cutoffs = [10].")
        check_delta(self.delta)
        for spec_text in self.stages:
            if type(spec_text) is not str:
                raise HomebodyError(f"A stage is a text such as 'clip:norm=0.5', not {spec_text!r}.")
        for name, text in self.vocabularies.items():
            if type(text) is not str:
                raise HomebodyError(f"The vocabulary of '{name}' is a text such as 'hash:64', not {text!r}.")
            parse(name, text)
        if self.calibrate and self.budget is None:
            raise HomebodyError("--calibrate finds the noise that spends a budget: give one, such as --budget eps=8.")
        self.allowed()
        if not -(2**63) <= self.seed < 2**63:
            raise HomebodyError(f"The seed must fit in 64 bits; {self.seed} does not.")

    def measured(self) -> list[int]:
        """The cut-offs that are computed: those asked for, and the one that the round is chosen by.

        >>> Recipe("fedmf", "ml-100k", cutoffs=[5]).measured()
        [5, 10]
        """
        _, at, k = (self.select or SELECT).rpartition("@")
        return sorted({*self.cutoffs, *([int(k)] if at and k.isdecimal() and int(k) else [])})

    def options(self) -> list[str]:
        """What is typed after the method to say the same, as `homebody run` takes it.

        >>> Recipe("fedmf", "ml-1m", fields={"factors": 8}, slices=["20-30"]).options()
        ['--data', 'ml-1m', '--slice', '20-30', '--set', 'factors=8']
        >>> Recipe("fedmf", "ml-1m", select="valid/ndcg@10").options()
        ['--data', 'ml-1m']
        """
        words = ["--data", self.data]
        for spec in fields(self):
            value = getattr(self, spec.name)
            default = spec.default if spec.default_factory is MISSING else spec.default_factory()
            if spec.name in ("method", "data", "fields") or value == default:
                continue
            if spec.name == "select" and value == replace(self, select=None).selects():
                continue
            option = f"--{spec.name.replace('_', '-')}"
            if spec.name == "fused":
                words.append("--plain")
            elif spec.name == "calibrate":
                words.append("--calibrate")
            elif spec.name == "columns":
                words += [word for name, one in value.items() for word in (f"--{name.replace('_', '-')}", one)]
            elif spec.name in ("kinds", "filters", "vocabularies"):
                single = "--vocabulary" if spec.name == "vocabularies" else option.removesuffix("s")
                words += [word for name, one in value.items() for word in (single, f"{name}={one}")]
            elif spec.name in ("slices", "stages"):
                words += [word for one in value for word in (option.removesuffix("s"), one)]
            else:
                words += [option, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
        for name, value in self.fields.items():
            words += ["--set", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
        return words

    def to_toml(self) -> str:
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return tomli_w.dumps({"schema": SCHEMA_VERSION, **known})

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise HomebodyError(f"The recipe is not valid TOML: {error}.") from error
        schema = values.pop("schema", SCHEMA_VERSION)
        if type(schema) is not int:
            raise HomebodyError(f"The recipe's schema must be a whole number, not {schema!r}.")
        if schema < 2:
            values = {"vocabularies": {ALL: "found"}, **values}
        if schema > SCHEMA_VERSION:
            raise HomebodyError("The recipe was written by a newer Homebody; update to run it.")
        names = {spec.name for spec in fields(cls)}
        for name in values:
            if name not in names:
                raise unknown_name("recipe field", name, names)
        for name in ("method", "data"):
            if name not in values:
                raise HomebodyError(f"The recipe names no {name}.")
        recipe = cls(**values)
        recipe.check()
        return recipe

    @property
    def short_method(self) -> str:
        """The method's name, or the class of a file of one's own."""
        return self.method.rpartition(":")[2]

    @property
    def name(self) -> str:
        """A short name for a folder."""
        short = [
            self.short_method,
            Path(self.data).stem,
            self.protocol,
            f"seed{self.seed}",
        ]
        return "-".join(part.replace(":", "_").replace(",", "_").replace("=", "")[:40] for part in short)


_TYPES: dict[str, type] = {
    **dict.fromkeys(("method", "data", "split", "protocol", "held_out", "select", "device", "data_dir"), str),
    **dict.fromkeys(("user_features", "item_features", "impressions", "budget"), str),
    **dict.fromkeys(("rounds", "seed", "negatives", "cohort", "evaluate_every"), int),
    **dict.fromkeys(("fields", "columns", "kinds", "filters", "vocabularies"), dict),
    **dict.fromkeys(("cutoffs", "slices", "stages"), list),
    **dict.fromkeys(("fused", "calibrate"), bool),
    **dict.fromkeys(("delta", "public"), float),
}


def parse_fields(method: str, settings: Sequence[str]) -> dict[str, Any]:
    """`field=value` texts as the values of a method's fields.

    >>> parse_fields("fedmf", ["factors=8", "learning_rate=0.05"])
    {'factors': 8, 'learning_rate': 0.05}
    >>> parse_fields("fedmf", ["factor=8"])
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no field of fedmf 'factor'; did you mean 'factors'? Known: batch_size, \
dual, epochs, factors, item_rate, learning_rate, negatives.
    """
    known = {spec.name: spec.default for spec in params(find(method))}
    values = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise HomebodyError(f"--set takes field=value, not '{setting}'.")
        if name not in known:
            raise no_field(method, name, known)
        values[name] = _parse(name, text, type(known[name]))
    return values


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise HomebodyError(f"{name} must be {KINDS.get(kind, kind.__name__)}, not '{text}'.") from None


def fingerprint(parts: Mapping[str, bytes | memoryview]) -> str:
    """A short checksum of named buffers."""
    digest = hashlib.sha256()
    for name, part in parts.items():
        digest.update(name.encode())
        digest.update(part)
    return digest.hexdigest()[:16]
