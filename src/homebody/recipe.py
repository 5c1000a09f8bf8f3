"""A recipe: everything that says what to run. TOML on disk, `--set` and options on the command line."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import tomli_w

from homebody.core import Method, Reference
from homebody.errors import HomebodyError, unknown_name
from homebody.methods import find, params

__all__ = ["Recipe", "parse_fields"]

SCHEMA_VERSION = 1


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
    protocol: str = "strict"
    held_out: str | None = None
    """latest or random; None: latest where there are times."""
    negatives: int = 99
    cohort: int | None = None
    evaluate_every: int = 1
    select: str = "valid/ndcg@10"
    device: str = "cpu"
    fused: bool = True
    columns: dict[str, str] = field(default_factory=dict)
    """For a file of one's own: user_col, item_col, time_col, rating_col."""
    data_dir: str | None = None

    def build(self) -> Method | Reference:
        """The method with its fields set."""
        return find(self.method)(**self.fields)

    def to_toml(self) -> str:
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return tomli_w.dumps({"schema": SCHEMA_VERSION, **known})

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise HomebodyError(f"The recipe is not valid TOML: {error}.") from error
        if values.pop("schema", SCHEMA_VERSION) > SCHEMA_VERSION:
            raise HomebodyError("The recipe was written by a newer Homebody; update to run it.")
        names = {spec.name for spec in fields(cls)}
        for name in values:
            if name not in names:
                raise unknown_name("recipe field", name, names)
        for name in ("method", "data"):
            if name not in values:
                raise HomebodyError(f"The recipe names no {name}.")
        return cls(**values)

    @property
    def name(self) -> str:
        """A short name for a folder."""
        short = [
            Path(self.method.rpartition(":")[2]).stem,
            Path(self.data).stem,
            self.protocol,
            f"seed{self.seed}",
        ]
        return "-".join(part.replace(":", "_").replace(",", "_").replace("=", "")[:40] for part in short)


def parse_fields(method: str, settings: Sequence[str]) -> dict[str, Any]:
    """`field=value` texts as the values of a method's fields.

    >>> parse_fields("fedmf", ["factors=8", "learning_rate=0.05"])
    {'factors': 8, 'learning_rate': 0.05}
    >>> parse_fields("fedmf", ["factor=8"])
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no field of fedmf 'factor'; did you mean 'factors'? Known: batch_size, \
epochs, factors, item_rate, learning_rate, negatives.
    """
    known = {spec.name: spec.default for spec in params(find(method))}
    values = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise HomebodyError(f"--set takes field=value, not '{setting}'.")
        if name not in known:
            raise unknown_name(f"field of {method}", name, known)
        values[name] = _parse(name, text, type(known[name]))
    return values


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, kind.__name__)
        raise HomebodyError(f"{name} must be {wanted}, not '{text}'.") from None


def fingerprint(parts: Mapping[str, bytes | memoryview]) -> str:
    """A short checksum of named buffers."""
    digest = hashlib.sha256()
    for name, part in parts.items():
        digest.update(name.encode())
        digest.update(part)
    return digest.hexdigest()[:16]
