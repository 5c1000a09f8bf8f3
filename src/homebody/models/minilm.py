"""MiniLM, a small BERT: the mean of its last layer's vectors, of length 1, is a sentence's vector.

Wang et al., MiniLM: Deep Self-Attention Distillation, NeurIPS 2020, as trained for sentences (Reimers and Gurevych,
Sentence-BERT, EMNLP 2019). The weights are named as their authors' file names them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize

__all__ = ["HEADS", "WIDTH", "sentence_vectors"]

WIDTH, HEADS = 384, 12
EPSILON = 1e-12
"""Of its layer norms."""


def sentence_vectors(weights: Mapping[str, Tensor], pieces: Tensor, real: Tensor) -> Tensor:
    """(N, 384) of sentences given as pieces (N, T); `real` marks those that are no padding."""
    place = torch.arange(pieces.shape[1], device=pieces.device)
    x = weights["embeddings.word_embeddings.weight"][pieces]
    x = x + weights["embeddings.position_embeddings.weight"][place]
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    x = _norm(weights, "embeddings.LayerNorm", x)
    for layer in range(sum(name.endswith(".attention.self.query.weight") for name in weights)):
        x = _layer(weights, f"encoder.layer.{layer}", x, real)
    share = real[..., None].to(x.dtype)
    return normalize((x * share).sum(1) / share.sum(1), dim=-1)


def _layer(weights: Mapping[str, Tensor], name: str, x: Tensor, real: Tensor) -> Tensor:
    query, key, value = (
        _linear(weights, f"{name}.attention.self.{part}", x).reshape(*x.shape[:2], HEADS, -1).transpose(1, 2)
        for part in ("query", "key", "value")
    )
    fit = query @ key.mT * query.shape[-1] ** -0.5
    fit = fit.masked_fill(~real[:, None, None], -torch.inf).softmax(-1)
    seen = _linear(weights, f"{name}.attention.output.dense", (fit @ value).transpose(1, 2).flatten(2))
    x = _norm(weights, f"{name}.attention.output.LayerNorm", x + seen)
    wide = gelu(_linear(weights, f"{name}.intermediate.dense", x))
    return _norm(weights, f"{name}.output.LayerNorm", x + _linear(weights, f"{name}.output.dense", wide))


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _norm(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], EPSILON)
