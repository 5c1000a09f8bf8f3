"""MiniLM's mathematics against torch's own layers; its vectors are in tests/test_text_vectors.py."""

from __future__ import annotations

import torch
from torch import nn

from homebody.models.minilm import HEADS, WIDTH, sentence_vectors
from homebody.rng import Rng


def test_a_layer_equals_torchs() -> None:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 16, dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
    ).eval()
    rng = Rng.of(5)
    with torch.no_grad():
        for name, value in layer.named_parameters():
            value.copy_(0.1 * rng.fold(name).normal(*value.shape))
    query, key, value = layer.self_attn.in_proj_weight.chunk(3)
    offsets = layer.self_attn.in_proj_bias.chunk(3)
    weights = {
        f"embeddings.{name}.weight": rng.fold(name).normal(9, WIDTH)
        for name in ("word_embeddings", "position_embeddings", "token_type_embeddings")
    }
    weights |= {"embeddings.LayerNorm.weight": torch.ones(WIDTH), "embeddings.LayerNorm.bias": torch.zeros(WIDTH)}
    for part, weight, offset in zip(("query", "key", "value"), (query, key, value), offsets, strict=True):
        weights |= {f"attention.self.{part}.weight": weight, f"attention.self.{part}.bias": offset}
    pairs = {
        "attention.output.dense": layer.self_attn.out_proj,
        "attention.output.LayerNorm": layer.norm1,
        "intermediate.dense": layer.linear1,
        "output.dense": layer.linear2,
        "output.LayerNorm": layer.norm2,
    }
    for name, part in pairs.items():
        weights |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
    weights = {name if name.startswith("emb") else f"encoder.layer.0.{name}": one for name, one in weights.items()}
    pieces = torch.tensor([[1, 5, 2, 0], [1, 3, 8, 2]])
    real = torch.tensor([[True, True, True, False], [True] * 4])
    with torch.no_grad():
        found = sentence_vectors(weights, pieces, real)
        for row in range(2):
            own = pieces[row][real[row]]
            x = weights["embeddings.word_embeddings.weight"][own]
            x = x + weights["embeddings.position_embeddings.weight"][: len(own)]
            x = nn.functional.layer_norm(x + weights["embeddings.token_type_embeddings.weight"][0], (WIDTH,), eps=1e-12)
            mean = layer(x[None])[0].mean(0)
            torch.testing.assert_close(found[row], mean / mean.norm(), atol=1e-5, rtol=1e-4)
