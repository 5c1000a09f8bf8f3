"""Channels as text, for recipes and the command line: `clip:norm=0.5`, `secure-sum`, `gaussian:z=1`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

from homebody.errors import HomebodyError, refuse_unknown, unknown_name
from homebody.privacy.channel import Channel
from homebody.privacy.impressions import ImpressionReport
from homebody.privacy.reports import OneBit, RandomisedResponse, Shuffle
from homebody.privacy.secure_sum import SecureSum, Skellam
from homebody.privacy.stages import Clip, Gaussian, Laplace, Stage, VectorLaplace
from homebody.privacy.views import ViewNoise, Views
from homebody.settings import parse

__all__ = ["ASK_ROWS", "STAGES", "parse_channel", "split_stage", "stage_text", "stage_texts", "with_noise"]

ASK_ROWS = "ask-rows"
"""Written among the stages, at any place; it is a property of the channel (`Channel.asks_rows`), not a stage."""
STAGES: dict[str, type[Any]] = {
    "clip": Clip,
    "gaussian": Gaussian,
    "impression-report": ImpressionReport,
    "laplace": Laplace,
    "one-bit": OneBit,
    "randomised-response": RandomisedResponse,
    "secure-sum": SecureSum,
    "shuffle": Shuffle,
    "skellam": Skellam,
    "vector-laplace": VectorLaplace,
    "view-noise": ViewNoise,
    "views": Views,
}

REQUIRED = {("one-bit", "k"): 100}
"""Settings that a text must give although the stage has a default, with an example."""


def parse_channel(specs: Sequence[str]) -> Channel:
    """The channel that these texts describe, in the order in which a message passes them.

    >>> parse_channel(["ask-rows", "clip:norm=0.5", "gaussian:z=1"])
    Channel(Clip(norm=0.5), Gaussian(z=1.0), asks_rows=True)
    """
    names = [split_stage(spec)[0] for spec in specs]
    if names.count(ASK_ROWS) > 1:
        raise HomebodyError(f"A second {ASK_ROWS} asks for the same rows: leave one out.")
    stages = [_parse_stage(spec) for name, spec in zip(names, specs, strict=True) if name != ASK_ROWS]
    asks = ASK_ROWS in names
    return Channel(*stages, asks_rows=asks, asks_after=names.index(ASK_ROWS) if asks else 0)


def stage_texts(channel: Channel) -> list[str]:
    """A channel as it is typed: the inverse of `parse_channel`. A stage without a text is named by its class.

    >>> stage_texts(Channel(OneBit(epsilon=2.5, k=100), Shuffle()))
    ['one-bit:epsilon=2.5,k=100', 'shuffle']
    """
    texts = [stage_text(stage) for stage in channel.stages]
    if channel.asks_rows:
        texts.insert(channel.asks_after, ASK_ROWS)
    return texts


def stage_text(stage: Stage) -> str:
    """One stage as it is typed.

    >>> stage_text(Gaussian(z=1.0))
    'gaussian:z=1'
    """
    name = next((name for name, kind in STAGES.items() if type(stage) is kind), None)
    if name is None:
        return type(stage).__name__
    given: dict[str, Any] = {}
    for setting in _settings(type(stage)):
        value = getattr(stage, setting.name)
        if isinstance(value, Mapping):
            given |= {f"{setting.name}.{tensor}": norm for tensor, norm in value.items()}
        elif setting.default is MISSING or value != setting.default or (name, setting.name) in REQUIRED:
            given[setting.name] = str(value).lower() if isinstance(value, bool) else value
    return _spelt(name, {key: str(value).removesuffix(".0") for key, value in given.items()})


def _spelt(name: str, given: Mapping[str, str]) -> str:
    return name + (":" if given else "") + ",".join(f"{key}={value}" for key, value in given.items())


def _settings(kind: type[Any]) -> list[Field[Any]]:
    """The fields that a person may set. A channel fills in the rest."""
    return [setting for setting in fields(kind) if not setting.kw_only]


_hints = functools.cache(get_type_hints)
"""The types of a stage's fields. They are evaluated from text, and a device reads its stages in every letter."""


def with_noise(specs: Sequence[str], noise: float | None = None) -> list[str]:
    """The same stages with this much noise. Without a number, stages that name none get a placeholder of 1.

    >>> with_noise(["clip:norm=0.5", "gaussian:relation=add-remove"], 1.25)
    ['clip:norm=0.5', 'gaussian:relation=add-remove,z=1.25']
    """
    out = []
    for spec in specs:
        name, given = split_stage(spec)
        key = STAGES[name].noise_field
        if key and (noise is not None or key not in given):
            given[key] = repr(1.0 if noise is None else noise)
        out.append(_spelt(name, given))
    return out


def _parse_stage(spec: str) -> Stage:
    """One stage. A clip of each tensor names them: `clip:norm.item=0.5,norm.bias=0.1`.

    >>> _parse_stage("clip:norm.item=0.5,norm.bias=0.1,order=1")
    Clip(norm={'item': 0.5, 'bias': 0.1}, order=1)
    """
    name, given = split_stage(spec)
    kind: Any = STAGES[name]
    known = {setting.name: setting for setting in _settings(kind)}
    hints = _hints(kind)
    values: dict[str, Any] = {}
    for key, text in given.items():
        short, dot, tensor = key.partition(".")
        if dot and (name, short) == ("clip", "norm"):
            norms = values.setdefault("norm", {})
            if not isinstance(norms, dict):
                raise HomebodyError(f"The stage '{spec}' has one norm for all and one for '{tensor}': give one kind.")
            norms[tensor] = parse(f"{key} in the stage '{spec}'", text, float)
        elif key not in known:
            raise unknown_name(f"setting of the stage {name}", key, known)
        elif key in values:
            raise HomebodyError(f"The stage '{spec}' has one norm for all and others for each tensor: give one kind.")
        else:
            values[key] = parse(f"{key} in the stage '{spec}'", text, _kind(hints[key]))
    wanted = [key for key, setting in known.items() if setting.default is MISSING or (name, key) in REQUIRED]
    missing = [key for key in wanted if key not in values]
    if missing:
        example = ",".join(f"{key}={given.get(key) or REQUIRED.get((name, key), 1)}" for key in wanted)
        raise HomebodyError(f"The stage '{spec}' needs {missing[0]}, as in {name}:{example}.")
    stage: Stage = kind(**values)
    return stage


def split_stage(spec: str) -> tuple[str, dict[str, str]]:
    """A stage's name, and its settings as they were written.

    >>> split_stage("gaussian:z=1,relation=add-remove")
    ('gaussian', {'z': '1', 'relation': 'add-remove'})
    """
    name, _, rest = spec.partition(":")
    refuse_unknown("stage", [name], (ASK_ROWS, *STAGES))
    given: dict[str, str] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not key or not value:
            raise HomebodyError(f"A stage is NAME:SETTING=VALUE,…, as in clip:norm=0.5, not '{spec}'.")
        if key in given:
            raise HomebodyError(f"The stage '{spec}' says twice what {key} is; leave one out.")
        given[key] = value
    if name == ASK_ROWS:
        refuse_unknown(f"setting of the stage {ASK_ROWS}", given, ())
    return name, given


def _kind(hint: Any) -> type:
    """What a setting is written as, by its type."""
    for kind, texts in ((bool, ("bool",)), (int, ("int", "Literal[1, 2]")), (float, ("float",))):
        if any(text in str(hint) for text in texts):
            return kind
    return str
