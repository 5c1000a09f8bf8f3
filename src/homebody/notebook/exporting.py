"""A model as files that other programs read: vectors of items, parameters, a network, and a card that says what it is.

Nothing of the people is in them.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import safetensors.torch
import torch
from torch import Tensor

from homebody.core import Method
from homebody.data import Population
from homebody.errors import HomebodyError, install
from homebody.files import SHARED, replacing
from homebody.models.networks import ScoreFunction
from homebody.notebook.keeping import replacing_folder
from homebody.notebook.tables import named_items
from homebody.report.model_card import model_card
from homebody.report.statement import statement
from homebody.report.statement_page import write_statement
from homebody.rng import Rng
from homebody.run import Finished
from homebody.training import Trained

__all__ = ["write_export"]

CARD = "MODEL_CARD.md"
MISSING = f"Writing a scorer as ONNX takes two packages more: {install('onnx')}."


def write_export(done: Finished, vectors: Tensor, path: Path, *, onnx: bool | None) -> None:
    """Write all files into a folder, or none; an export that is there is replaced, and nothing else is.

    onnx: whether to write the scorer; None: where it is a network and the packages are there.
    """
    network = _network(done.method)
    if onnx and network is None:
        raise HomebodyError(
            f"{type(done.method).__name__} scores without a network that ONNX could hold: leave out onnx. Its vectors "
            "are in items.parquet."
        )
    if onnx and not _has_onnx():
        raise HomebodyError(MISSING)
    stated = statement(done.folder)
    with replacing_folder(path, CARD) as folder:
        files = {
            "items.parquet": "a row for each item: its id, its name if it has one, and its vector",
            "items.safetensors": "the same vectors as one table, `items`, in the same order",
        }
        _write_items(done.split.population, vectors, folder)
        if done.trained is not None:
            files["parameters.safetensors"] = "the shared parameters, by name"
            _write_tensors(
                {n: v.detach().cpu() for n, v in done.trained.shared.items()}, folder / "parameters.safetensors"
            )
        if network is not None and done.trained is not None:
            if onnx is not False and _has_onnx():
                layers = _common_layers(done.trained)
                _write_scorer(network, layers, folder / "scorer.onnx")
                files["scorer.onnx"] = _inputs(network, layers)
            else:
                files["(no scorer.onnx)"] = MISSING if onnx is None else "it was not asked for"
        write_statement(stated, folder)
        files["statement.html, statement.json"] = "the privacy statement"
        settings = {**done.recipe.fields, **({"stages": " → ".join(done.recipe.stages)} if done.recipe.stages else {})}
        about = {"title": done.method.about.title, "paper": done.method.about.paper}
        with replacing(folder / CARD, mode=SHARED) as file:
            file.write(model_card(done.result, stated, about, settings, files).encode())


def _write_items(population: Population, vectors: Tensor, folder: Path) -> None:
    everything = torch.arange(len(vectors)).numpy()
    vector = pl.Series("vector", vectors.numpy(), dtype=pl.Array(pl.Float32, vectors.shape[1]))
    content = io.BytesIO()
    pl.DataFrame([*named_items(population, everything), vector]).write_parquet(content)
    with replacing(folder / "items.parquet", mode=SHARED) as file:
        file.write(content.getbuffer())
    _write_tensors({"items": vectors}, folder / "items.safetensors")


def _write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    with replacing(path, mode=SHARED) as file:
        file.write(safetensors.torch.save({name: value.contiguous().clone() for name, value in tensors.items()}))


def _network(method: object) -> ScoreFunction | None:
    """The network that scores an item's row, if that is how the method scores."""
    function = getattr(method, "function", None) if isinstance(method, Method) else None
    return function if isinstance(function, ScoreFunction) else None


def _has_onnx() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxscript"))


class ScorerNetwork(torch.nn.Module):
    """Items' rows (N, factors), with what a device adds of its own, to a score each."""

    def __init__(self, function: ScoreFunction, layers: Tensor | None) -> None:
        super().__init__()
        self.function = function
        self.layers: Tensor | None
        self.register_buffer("layers", layers)

    def forward(self, rows: Tensor, user: Tensor | None = None, layers: Tensor | None = None) -> Tensor:
        own = self.layers if layers is None else layers
        assert own is not None
        return self.function.logit(own, rows, user)


def _common_layers(trained: Trained) -> Tensor | None:
    """The weights of the network, if all devices score with the same; None: each has its own."""
    kept = trained.method.init_local(trained.shared, Rng.of(0))
    layers = trained.shared.get("layers")
    return None if layers is None or "layers" in kept else layers.detach().cpu()


def _write_scorer(function: ScoreFunction, layers: Tensor | None, path: Path) -> None:
    given: dict[str, Tensor] = {"rows": torch.zeros(3, function.factors)}
    given |= {"user": torch.zeros(function.beside)} if function.beside else {}
    given |= {} if layers is not None else {"layers": torch.zeros(function.size)}
    shapes: dict[str, Any] = dict.fromkeys(given)
    shapes["rows"] = {0: torch.export.Dim("items", min=1)}
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)  # it tells of packages that are not needed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = torch.onnx.export(
                ScorerNetwork(function, layers).eval(),
                (),
                kwargs=given,
                input_names=list(given),
                output_names=["score"],
                dynamic_shapes=shapes,
                dynamo=True,
                verbose=False,
            )
    finally:
        logger.setLevel(before)
    assert made is not None
    with replacing(path, mode=SHARED) as file:
        file.write(made.model_proto.SerializeToString())


def _inputs(function: ScoreFunction, layers: Tensor | None) -> str:
    """What the network takes."""
    takes = [f"`rows` (N, {function.factors}), vectors of items"]
    takes += [f"`user` ({function.beside}), a person's vector"] if function.beside else []
    if layers is None:
        takes += [f"`layers` ({function.size}), a device's own weights and then offsets, layer by layer"]
    return f"the network that scores: {'; '.join(takes)}; gives `score` (N)"
