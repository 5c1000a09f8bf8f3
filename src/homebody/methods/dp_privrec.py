"""DP-PrivRec: PrivRec with clipped, noised updates, in one stage or in two (Wang et al., VLDB Journal 2021, §2.3–2.4).

| paper                                        | here                                                               |
|----------------------------------------------|--------------------------------------------------------------------|
| M of N clients, without replacement          | `--cohort`, by default 30                                          |
| clip to S, noise N(0, (z·2S/M)²) on the mean | `uplink`: a clip, a secure sum and noise on that sum               |
| stage 1: L_SSL                               | the phase `pretrain`, of `pretrain_rounds` rounds of `Contrastive` |
| stage 2: λ_DSSM L_DSSM + L_SSL               | the phase `train`; `joint` is 1 / λ_DSSM, and 0 leaves L_SSL out   |

Here noise is added to the sum, and the server's step `meta_rate` (α_2) scales both. Algorithm 2 adds it after that
step: its z is our z / α_2 there, and with α_2 = 1 they are the same.

Stage 1 as published adds no noise to what it learns from people's sequences: whatever stage 2 adds, ε is then ∞. What
`pretraining` says:

- private: stage 1 goes through the same channel as stage 2, and both are charged to the one ledger;
- noiseless: as published; ε = ∞;
- public: stage 1 learns from people whose sequences are public (`--public`), who take no part in stage 2; nothing is
  charged for them.

With `joint` the sequence encoders stay among the shared parameters of stage 2, and each local pass over the
interactions is followed by one step on L_SSL: the stochastic gradients of the two terms in turn, not their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from homebody.core import About, Batch, Catalogue, Data, Phase, Tree, Update, Work, param
from homebody.methods.contrastive import VIEWS, Contrastive
from homebody.methods.privrec import PrivRec
from homebody.privacy import Channel, Clip, Gaussian, SecureSum
from homebody.rng import Rng
from homebody.settings import Range, common_params

__all__ = ["DPPrivRec"]


@dataclass(frozen=True)
class DPPrivRec(PrivRec):
    """PrivRec whose server learns a noised sum of clipped updates; item vectors may be learnt from sequences first.

    >>> import homebody as hb
    >>> hb.DPPrivRec(factors=4).uplink
    Channel(Clip(norm=1.0), SecureSum(), Gaussian(z=1.0))
    """

    uplink: Channel = Channel(Clip(1.0), SecureSum(), Gaussian(z=1.0))
    pretrain_rounds: int = param(0, "rounds of stage 1, which learns item vectors from sequences; 0: one stage", low=0)
    pretraining: str = param(
        "private", "what protects stage 1; public needs --public", choices=("private", "noiseless", "public")
    )
    pretrain_steps: int = param(20, "steps of SGD on a device in a round of stage 1", low=1)
    pretrain_rate: float = param(0.1, "learning rate on the device in stage 1", low=0, search=Range(0.01, 1, log=True))
    windows: int = param(4, "windows of the history in a step of stage 1", low=1)
    window: int = param(10, "T, items in a window", low=2)
    segment: int = param(3, "items in a masked segment, at most half of the window", low=1)
    item_negatives: int = param(10, "negatives for a masked item", low=1)
    segment_negatives: int = param(5, "negatives for a masked segment", low=1)
    item_weight: float = param(1.0, "λ_IM, of the masked item's loss", low=0)
    segment_weight: float = param(1.0, "λ_SM, of the masked segment's loss", low=0)
    joint: float = param(0.0, "weight of stage 1's loss in stage 2 (1 / λ_DSSM); 0: left out", low=0)

    about: ClassVar[About] = replace(
        PrivRec.about,
        title="PrivRec with clipped, noised updates; item vectors from sequences first, if wanted",
        cohort=30,
    )

    @property
    def phases(self) -> Sequence[Phase]:
        if not self.pretrain_rounds:
            return (Phase("train"),)
        public = self.pretraining == "public"
        note = ""
        if public:
            note = "stage 1 learns from public people alone: nothing is charged for it, and ε is stage 2's"
        elif self.pretraining == "noiseless":
            note = "stage 1 learns from everyone's sequences without noise, as published: ε is ∞ whatever stage 2 adds"
        first = Phase("pretrain", self.sequences, self.pretrain_rounds, evaluated=False, public=public, note=note)
        return (first, Phase("train"))

    @property
    def sequences(self) -> Contrastive:
        """Stage 1."""
        channel = self.uplink if self.pretraining == "private" else Channel()
        changed = {"learning_rate": self.pretrain_rate, "steps": self.pretrain_steps}
        return Contrastive(uplink=channel, **{**common_params(self, Contrastive), **changed})

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        shared = super().init_shared(catalogue, rng)
        return shared | self.sequences.init_encoders(rng) if self.joint else shared

    def shared_numbers(self, catalogue: Catalogue) -> int:
        return super().shared_numbers(catalogue) + (self.sequences.encoder_numbers if self.joint else 0)

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        work = super().work(catalogue, longest)
        if not self.joint:
            return work
        tables = Work(memory=24 * self.shared_numbers(catalogue), operations=20 * self.shared_numbers(catalogue))
        each = replace(tables, operations=self.epochs * tables.operations)
        return work + self.sequences.sequence_work(self.epochs) + each

    def prepare(self, data: Data, rng: Rng) -> Batch:
        batch = super().prepare(data, rng)
        if not self.joint:
            return batch
        views = self.sequences.views(data, rng.fold("views"), self.epochs)
        return batch | {f"view/{name}": value for name, value in views.items()}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        if not self.joint:
            return super().client(shared, local, batch)
        mine, loss, first = dict(shared), shared["layers"][0], self.sequences
        for epoch in range(self.epochs):
            now = slice(epoch, epoch + 1)
            once = {**batch, "order": batch["order"][now], "negative": batch["negative"][:, now]}
            stepped, loss = self.stepped(mine, once, 1, self.learning_rate, batch["valid"])
            view = {name: batch[f"view/{name}"][epoch] for name in VIEWS}
            mine, _ = first.step({**mine, **stepped}, view, self.joint * self.learning_rate)
        return {name: mine[name] - shared[name] for name in shared}, {"loss": loss}
