"""MiniLM, a small BERT: the mean of its last layer's vectors, of length 1, is a sentence's vector.

Wang et al., MiniLM: Deep Self-Attention Distillation, NeurIPS 2020, as trained for sentences (Reimers and Gurevych,
Sentence-BERT, EMNLP 2019). The weights are named as their authors' file names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize

__all__ = ["HEADS", "LAYERS", "WIDTH", "layer_start", "piece_vectors", "sentence_vectors", "through_layers", "whole"]

WIDTH, HEADS, LAYERS, INNER = 384, 12, 6, 1536
EPSILON = 1e-12
"""Of its layer norms."""
NEVER = -1e30
"""The fit of a piece that is padding: finite, so that no gradient is undefined."""


def sentence_vectors(weights: Mapping[str, Tensor], pieces: Tensor, real: Tensor) -> Tensor:
    """(N, 384) of sentences given as pieces (N, T); `real` marks those that are no padding."""
    depth = sum(name.endswith(".attention.self.query.weight") for name in weights)
    return whole(through_layers(weights, piece_vectors(weights, pieces), real, range(depth)), real)


def piece_vectors(weights: Mapping[str, Tensor], pieces: Tensor) -> Tensor:
    """(N, T, 384) what the first layer is given of pieces (N, T)."""
    place = torch.arange(pieces.shape[1], device=pieces.device)
    x = weights["embeddings.word_embeddings.weight"][pieces]
    x = x + weights["embeddings.position_embeddings.weight"][place]
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    return _norm(weights, "embeddings.LayerNorm", x)


def through_layers(weights: Mapping[str, Tensor], x: Tensor, real: Tensor, layers: Iterable[int]) -> Tensor:
    """What these layers make of x (…, T, 384)."""
    for layer in layers:
        x = _layer(weights, f"encoder.layer.{layer}", x, real)
    return x


def whole(x: Tensor, real: Tensor) -> Tensor:
    """(…, 384) the mean over the real pieces of x (…, T, 384), of length 1; 0 where none is real."""
    share = real[..., None].to(x.dtype)
    return normalize((x * share).sum(-2) / share.sum(-2).clamp(min=1), dim=-1)


def layer_start(layer: int, device: torch.device | str) -> dict[str, Tensor]:
    """The parameters of a layer, empty: their names and shapes.

    >>> sum(value.numel() for value in layer_start(5, "meta").values())
    1774464
    """
    sizes: dict[str, tuple[int, ...]] = {f"attention.self.{part}": (WIDTH, WIDTH) for part in ("query", "key", "value")}
    sizes |= {"attention.output.dense": (WIDTH, WIDTH), "attention.output.LayerNorm": (WIDTH,)}
    sizes |= {"intermediate.dense": (INNER, WIDTH), "output.dense": (WIDTH, INNER), "output.LayerNorm": (WIDTH,)}
    empty = {}
    for name, size in sizes.items():
        empty[f"encoder.layer.{layer}.{name}.weight"] = torch.empty(size, device=device)
        empty[f"encoder.layer.{layer}.{name}.bias"] = torch.empty(size[0], device=device)
    return empty


def _layer(weights: Mapping[str, Tensor], name: str, x: Tensor, real: Tensor) -> Tensor:
    query, key, value = (
        _linear(weights, f"{name}.attention.self.{part}", x).reshape(*x.shape[:-1], HEADS, -1).transpose(-2, -3)
        for part in ("query", "key", "value")
    )
    fit = query @ key.mT * query.shape[-1] ** -0.5
    fit = fit.masked_fill(~real[..., None, None, :], NEVER).softmax(-1)
    seen = _linear(weights, f"{name}.attention.output.dense", (fit @ value).transpose(-2, -3).flatten(-2))
    x = _norm(weights, f"{name}.attention.output.LayerNorm", x + seen)
    wide = gelu(_linear(weights, f"{name}.intermediate.dense", x))
    return _norm(weights, f"{name}.output.LayerNorm", x + _linear(weights, f"{name}.output.dense", wide))


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _norm(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], EPSILON)
