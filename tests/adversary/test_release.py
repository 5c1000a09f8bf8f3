"""One release, 10⁵ draws: right mechanisms stand, wrong ones fall."""

from __future__ import annotations

import pytest
import torch

from homebody.adversary.canaries import draw_releases
from homebody.errors import HomebodyError
from homebody.privacy import Channel, Clip, Gaussian, Laplace, OneBit, SecureSum, stages

RIGHT = {
    "gaussian": Channel(Clip(0.5), Gaussian(z=1)),
    "little gaussian": Channel(Clip(3.0), SecureSum(), Gaussian(z=0.5)),
    "gaussian, add-remove": Channel(Clip(0.5), Gaussian(z=2, relation="add-remove")),
    "laplace on the device": Channel(Clip(1.0, order=1), Laplace(b=2)),
    "laplace on the sum": Channel(Clip(1.0, order=1), Laplace(b=1, where="sum")),
    "one bit": Channel(OneBit(epsilon=1.0)),
    "three bits": Channel(OneBit(epsilon=1.0, k=3)),
}
DELTA = 1e-3


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_certified_stands_and_the_audit_has_power(name: str, seed: int) -> None:
    """28 pairs at 99.9 % confidence: a right mechanism fails here with probability under 6 %, at fixed seeds."""
    server, clients, public = draw_releases(RIGHT[name], delta=DELTA, confidence=0.999, seed=seed)
    for one in (server, clients, public):
        assert one.lower is not None
        assert not one.contradicted
        assert one.lower.epsilon > min(0.3 * one.certified, 3)


def halved(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = getattr(stages, name)
    monkeypatch.setattr(stages, name, lambda rng, depth, *shape: right(rng, depth - 1, *shape))


@pytest.mark.parametrize("z", [0.7, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("seed", range(2))
def test_gaussian_noise_of_half_the_scale_is_caught(monkeypatch: pytest.MonkeyPatch, z: float, seed: int) -> None:
    halved(monkeypatch, "gaussian")
    server, clients, public = draw_releases(Channel(Clip(1.0), Gaussian(z=z)), delta=DELTA, confidence=0.99, seed=seed)
    assert clients.contradicted
    assert public.contradicted
    assert server.certified == float("inf")
    assert not server.contradicted


@pytest.mark.parametrize("where", ["device", "sum"])
def test_laplace_noise_of_half_the_scale_is_caught(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    halved(monkeypatch, "laplace")
    channel = Channel(Clip(1.0, order=1), Laplace(b=2, where=where))  # type: ignore[arg-type]
    server, clients, _ = draw_releases(channel, delta=DELTA, confidence=0.99)
    assert clients.contradicted
    assert server.contradicted == (where == "device")


def test_a_clip_that_does_not_clip_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clip, "device", lambda self, update, rng: {name: 2 * value for name, value in update.items()})
    _, clients, _ = draw_releases(Channel(Clip(1.0), Gaussian(z=1)), delta=DELTA, confidence=0.99)
    assert clients.contradicted


def test_a_bit_that_tells_too_much_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneBit, "chance", lambda self, value: 0.5 + 0.5 * torch.tanh(torch.tensor(1.0)) * value)
    server, _, _ = draw_releases(Channel(OneBit(epsilon=1.0)), delta=DELTA, confidence=0.99)
    assert server.contradicted


def test_nonsense_is_refused() -> None:
    with pytest.raises(HomebodyError, match="needs a Clip"):
        draw_releases(Channel())
    with pytest.raises(HomebodyError, match="at least 100"):
        draw_releases(RIGHT["one bit"], draws=10)
