from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from homebody.errors import HomebodyError
from homebody.methods.ncf import NCF
from homebody.models import networks as network_module
from homebody.models.networks import Network
from homebody.rng import Rng
from homebody.testing import population

NETWORKS = [Network(3), Network(0, (6, 5, 4)), Network(3, (6, 5, 4)), Network(2, (4, 3))]


def as_in_the_paper(network: Network, p: Tensor, q: Tensor, weights: Tensor) -> Tensor:
    """Equations 8, 10 and 12, one pair at a time."""
    parts, taken = [], 0
    for shape in network.shapes:
        size = int(np.prod(shape))
        parts.append(weights[taken : taken + size].reshape(shape))
        taken += size
    assert taken == len(weights)
    *layers, h, offset = parts
    out = []
    for user, item in zip(p, q, strict=True):
        gmf = user[: network.product] * item[: network.product]
        mlp = torch.cat([user[network.product :], item[network.product :]])
        for weight, bias in zip(layers[::2], layers[1::2], strict=True):
            mlp = torch.relu(weight.T @ mlp + bias)
        out.append(torch.cat([gmf, mlp]) @ h + offset[0])
    return torch.stack(out)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_network_is_the_papers(network: Network) -> None:
    p, q = Rng.of(1).normal(7, network.embedding), Rng.of(2).normal(7, network.embedding)
    weights = Rng.of(3).normal(len(network.start(Rng.of(0))))
    assert_close(network.logit(p, q, weights), as_in_the_paper(network, p, q, weights))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("at_once", [1, 20, 95, 1 << 20])
def test_scores_are_the_logits_of_all_pairs_however_they_are_cut(
    network: Network, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_module, "NUMBERS_AT_ONCE", at_once)
    p, q = Rng.of(1).normal(5, network.embedding), Rng.of(2).normal(8, network.embedding)
    weights = Rng.of(3).normal(len(network.start(Rng.of(0))))
    pairs = network.logit(p.repeat_interleave(8, 0), q.repeat(5, 1), weights).reshape(5, 8)
    assert_close(network.scores(p, q, weights), pairs)
    assert network.scores(p[:0], q, weights).shape == (0, 8)
    assert network.scores(p, q[:0], weights).shape == (5, 0)


def test_weights_start_within_glorots_bounds_and_offsets_at_zero() -> None:
    network = Network(3, (6, 5, 4))
    parts = network.start(Rng.of(0)).split([30, 5, 20, 4, 7, 1])
    for part, spread in zip(parts, [(6 / 11) ** 0.5, 0, (6 / 9) ** 0.5, 0, (6 / 8) ** 0.5, 0], strict=True):
        assert part.abs().max() <= spread
        assert (part.abs().max() > 0) == (spread > 0)


@pytest.mark.parametrize(("model", "size"), [("gmf", 5), ("mlp", 4), ("neumf", 9)])
def test_the_model_says_which_parts_there_are(model: str, size: int) -> None:
    assert NCF(model=model, factors=5, layers="8, 6").network.embedding == size


def test_a_first_step_moves_every_number_by_the_rate_down_its_slope() -> None:
    given = population().histories()
    method = NCF(factors=2, layers="4,3", learning_rate=0.01, batch_size=10**6, init_scale=1.0)
    fit = method.fit(given, seed=2)
    score = next(fit)
    learnt = next(cell.cell_contents for cell in score.__closure__ if isinstance(cell.cell_contents, tuple))
    rng = Rng.of(2, "ncf")
    start = rng.fold("items").normal(120, method.network.embedding)
    moved = (learnt.items.value - start).abs()
    assert_close(moved.max(), torch.tensor(0.01), rtol=1e-3, atol=1e-6)
    layers = (learnt.layers.value[0] - method.network.start(rng.fold("layers"))).abs()
    assert_close(layers.max(), torch.tensor(0.01), rtol=1e-3, atol=1e-6)


def test_an_unknown_model_is_refused_in_a_sentence() -> None:
    with pytest.raises(HomebodyError, match="no model of ncf 'neuralmf'; did you mean 'neumf'"):
        NCF(model="neuralmf")


@pytest.mark.parametrize("layers", ["", "64", "63,8", "64,0", "64,-8", "64,x", "64,,8", "64;32"])
def test_layers_that_are_none_are_refused_in_a_sentence(layers: str) -> None:
    with pytest.raises(HomebodyError, match=r"layers must be two or more widths.*such as 64,32,16,8; not"):
        NCF(layers=layers)
