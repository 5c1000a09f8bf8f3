"""One release, drawn many times: the sharpest look at a mechanism, and the quickest way to find one that is wrong.

One person sends all that a channel allows, or its opposite (or nothing, under add-remove); nobody else takes part. A
fair coin decides anew in every draw, and the observers guess it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from homebody.audit.bounds import clopper_pearson
from homebody.audit.canaries import Finding
from homebody.audit.views import decoded, whole
from homebody.core import Cohort, Total, Update
from homebody.errors import HomebodyError
from homebody.privacy import OBSERVERS, Channel, Ledger, NonPrivate
from homebody.privacy.ledger import DELTA
from homebody.rng import Rng

__all__ = ["draw_releases"]


def draw_releases(
    channel: Channel, *, draws: int = 100_000, delta: float = DELTA, confidence: float = 0.95, seed: int = 0
) -> list[Finding]:
    """Lower bounds on ε of a single release through this channel, by Clopper and Pearson, beside the certified ones.

    >>> from homebody.privacy import Channel, Clip, Gaussian
    >>> server, clients, public = draw_releases(Channel(Clip(1.0), Gaussian(z=2)), draws=2000, delta=1e-5)
    >>> server.certified, round(clients.certified, 2), clients.contradicted
    (inf, 1.99, False)
    """
    clips = [clip for clip in channel.facts.clips if not isinstance(clip.norm, dict)]
    if not clips and channel.facts.reports is None:
        raise HomebodyError(
            "One release is drawn at the bound of its channel: it needs a Clip with one norm, or OneBit."
        )
    if draws < 100:
        raise HomebodyError(f"So few draws show nothing: take at least 100, better 100,000, not {draws}.")
    rng, one = Rng.of(seed, "release"), Cohort(np.arange(1), "all", 1, 1)
    charges = channel.charges(one)
    relations = {charge.event.relation for charge in charges if not isinstance(charge.event, NonPrivate)}
    coins = (rng.fold("coins").bits(draws) & 1).bool()
    most = min((clip.whole for clip in clips), default=1.0)
    given = torch.where(coins, most, 0.0 if relations == {"add-remove"} else -most)

    def release(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        update: Update = {"value": value[None]}
        sent = channel.device(update, Rng(key).fold("device"))
        total = Total({name: whole(part) for name, part in sent.items()}, 1)
        return decoded(channel, sent)["value"][0], channel.server(total, Rng(key).fold("server")).sum["value"][0]

    keys = rng.fold("draws").fold(torch.arange(draws)).key
    first, after = vmap(release, chunk_size=1 << 14)(keys, given)
    ledger = Ledger()
    ledger.charge("release", charges)
    findings = []
    for observer in OBSERVERS:
        shown = (first if observer == "server" else after).double().numpy()
        lower = clopper_pearson(shown, coins.numpy(), delta, confidence)
        findings.append(Finding(observer, ledger.epsilon(observer, delta=delta).epsilon, lower))
    ledger.close()
    return findings
