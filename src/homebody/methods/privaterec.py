"""PrivateRec: Differentially Private Training and Serving for Federated News Recommendation (Liu et al., 2022).

| paper                                                | here                                                       |
|------------------------------------------------------|------------------------------------------------------------|
| b, B basic vectors                                   | `shared["basis"]`, `basis`                                 |
| Algorithm 2, GetPrivAttn: padding p (line 4)         | `padding`; `batch["hidden"]`, drawn in `prepare`           |
| α = softmax(u bᵀ / √d), clip θ (lines 7, 8)          | `interest`, `theta`                                        |
| noise, ReLU or SoftPlus (lines 9, 10)                | `homebody.privacy.queries.Attention`; `noise`, `epsilon`   |
| ũ = Σ α̃ᵢ bᵢ (Algorithm 3, line 17)                   | `weights @ shared["basis"]`                                |
| label permutation, β (lines 19 to 21)                | `_permuted`                                                |
| s = uᵀr′ (line 23), read as ũᵀr′                     | `FedRec.loss`                                              |
| FedAdam                                              | `server`                                                   |
| serving, ε_s (Algorithm 1)                           | `query`, `serving_epsilon`                                 |

`guarantee="published"` is the paper. Its gradients pass through the history as it is, and the candidates give the click
away: whatever the noise, nothing bounds what an upload tells (ε = ∞).

`guarantee="certified"` stops the gradient at the weights. What is left to send is a function of the noised weights, a
pseudo-click and the negatives. **So the device sends just these** (`homebody.privacy.ImpressionReport`), and the server
computes the gradients itself, as often as it likes. A person is the mean of their news: an encoder's weights would get
no gradient. `mechanism` is the paper's noise on the weights (`attention`), or randomised response on the one basis
vector that fits best (`choice`).

In a certified run everyone reports on one of their impressions in each round, by default in `reports` rounds. After
each, the server takes `steps` steps of Adam on the reports of the last `memory` rounds, and shares a running mean of
its parameters. The basis starts as the centres of clusters of the catalogue's news, which are public. With `plm` news
start from the principal axes of their texts, so that the first reports tell something already.

`candidates` is for lists that the server did not rank, such as those of devices. News of a report are then among so
many that the server draws after each round, and shares, and not among what the person was shown. A click on another
news item tells a uniform draw; the more candidates there are, the more clicks are among them.

A choice is the basis vector b under which a history is likeliest, where news r are drawn with chances ∝ e^{rᵀb} from
those that are shown: uᵀb minus the *level* of b, log E[e^{rᵀb}]. The server knows the levels from the news of reports.
Without them, a few long basis vectors would be the choice of nearly everyone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad
from torch.nn.functional import pad

from homebody.core import About, Batch, Catalogue, Data, Total, Tree, Update, param
from homebody.errors import HomebodyError
from homebody.methods.fedrec import FedRec, drawn_impression, last_items
from homebody.models.adam import adam_start, adam_step
from homebody.models.news import MeanUser, UserEncoder, encode_many, filled
from homebody.privacy import Channel
from homebody.privacy.impressions import ImpressionReport
from homebody.privacy.queries import Attention, Choice, Mechanism, before_padding, normalised
from homebody.rng import Rng
from homebody.settings import Range
from homebody.text_vectors import news_inputs

__all__ = ["PrivateRec"]

PASSES = 20
"""Passes in which the centres of clusters settle."""
NOT_TRAINED = ("level", "candidates")
"""What is shared and is no parameter."""
LEVEL_NEWS = 4096
"""The news at so many places of reports, drawn evenly, are what is shown at large."""


@dataclass(frozen=True)
class PrivateRec(FedRec):
    """A person is a few weights of basis vectors, which are noised before anything of them leaves the device.

    >>> import homebody as hb
    >>> from homebody.testing import impressed
    >>> model = hb.fit(hb.PrivateRec(encoder="id", d=8, epsilon=1.0), impressed(), rounds=1, quiet=True)
    >>> round(model.epsilon["server"], 3)
    2.0
    """

    guarantee: str = param(
        "certified", "reports that certify ε, or gradients as published", choices=("certified", "published")
    )
    mechanism: str = param(
        "",
        "how a certified interest is told: attention weights, or a choice; empty: choice",
        choices=("", "attention", "choice"),
    )
    epsilon: float = param(5.0, "ε_t, of one participation", above=0, search=Range(1, 20, log=True))
    basis: int = param(16, "B, the number of basis vectors", low=2)
    theta: float = param(1.0, "θ, the ℓ2 norm that weights are clipped to", above=0, search=Range(0.3, 1))
    noise: str = param(
        "laplace", "noise on the weights; none: published alone, ε_t = ∞", choices=("laplace", "gaussian", "none")
    )
    delta: float = param(1e-3, "δ_t of Gaussian noise", above=0, high=0.5)
    padding: float = param(0.0, "p, the chance that a news of the history is hidden", low=0, high=0.99)
    sharpness: float = param(1.0, "by how much u bᵀ/√d is multiplied", above=0, search=Range(1, 32, log=True))
    reports: int = param(30, "how often a person reports in a certified run, where --rounds says nothing", low=1)
    steps: int = param(20, "steps of the server after a round of reports", low=1)
    memory: int = param(1, "rounds whose reports the server trains on; 0: all", low=0)
    averaging: float = param(
        0.999, "weight of the past in the server's running mean of its parameters", low=0, high=0.9999
    )
    batch_size: int = param(128, "reports in such a step", low=1)
    candidates: int = param(
        0, "items that the server draws for all reports, for lists that it did not rank; 0: what was shown", low=0
    )
    query: str = param(
        "",
        "what a request for recommendations sends; empty: nothing",
        choices=("", "attention", "choice", "nobody"),
    )
    serving_theta: float = param(1.0, "ℓ2 norm that the weights of a request are clipped to", above=0)

    about: ClassVar[About] = replace(
        FedRec.about,
        title="news recommendation from private reports: noised interests and pseudo-clicks",
        paper="Liu et al., PrivateRec: Differentially Private Training and Serving for Federated News Recommendation, "
        "2022",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.certified:
            if self.mechanism == "choice":
                raise HomebodyError(
                    "The published PrivateRec tells attention weights: choice is for guarantee=certified."
                )
            if self.candidates:
                raise HomebodyError(
                    "The published PrivateRec sends gradients of what was shown: candidates is for guarantee=certified."
                )
            return
        if self.noise == "none":
            raise HomebodyError("noise=none hides nothing: it is for guarantee=published.")
        if any(not isinstance(stage, ImpressionReport) for stage in self.uplink.stages):
            raise HomebodyError(
                "A certified PrivateRec sends reports through a stage of its own: set epsilon, mechanism and the like "
                "instead of --stage."
            )
        object.__setattr__(self, "uplink", Channel(self._stage))
        # Everyone reports in each of a few rounds, and each round costs ε: not the hundreds of rounds of a gradient.
        about = replace(type(self).about, rounds=self.reports, cohort=None, evaluate_every=1, dense=False)
        object.__setattr__(self, "about", about)

    @property
    def certified(self) -> bool:
        return self.guarantee == "certified"

    @property
    def chooses(self) -> bool:
        """Whether a person is one basis vector, not a mixture of them."""
        return self.certified and self.mechanism != "attention"

    @property
    def _stage(self) -> ImpressionReport:
        names = ("epsilon", "basis", "theta", "noise", "delta", "padding", "negatives", "candidates")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return ImpressionReport(**given, mechanism="choice" if self.chooses else "attention")

    @property
    def _axes(self) -> bool:
        """The first reports tell as much as the encoder makes of texts before it has learnt anything."""
        return self.certified

    @cached_property
    def user(self) -> UserEncoder:
        return MeanUser(d=self.d) if self.certified else super().user

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        shared = super().init_shared(catalogue, rng)
        if rng.key.is_meta:  # shapes alone: for a device's estimate of its work
            more = {"level": torch.empty(self.basis, device="meta")} if self.chooses else {}
            more |= {"candidates": torch.empty(self.candidates, device="meta")} if self.candidates else {}
            return {**shared, "basis": torch.empty(self.basis, self.d, device="meta"), **more}
        news = self.news.encode(shared, news_inputs(self.news, catalogue, rng.key.device))[:-1].detach()
        shared = {**shared, "basis": centres(news, self.basis, rng.fold("basis"))}
        often = torch.ones(len(news), device=news.device)
        level = {"level": levels(news, shared["basis"], often)} if self.chooses else {}
        return {**shared, **level, **self._drawn(catalogue.n_items, rng.fold("candidates"))}

    def _drawn(self, n_items: int, rng: Rng) -> Tree:
        """The candidates of the next reports: different items, drawn evenly; -1 where the catalogue has fewer."""
        if not self.candidates:
            return {}
        drawn = rng.uniform(n_items).argsort(stable=True)[: self.candidates].to(torch.int32)
        return {"candidates": torch.cat([drawn, drawn.new_full((self.candidates - len(drawn),), -1)])}

    def init_server(self, shared: Tree) -> Tree:
        trained = {name: value for name, value in shared.items() if name not in NOT_TRAINED}
        state = adam_start(trained)
        if self.certified:
            state |= {f"learnt/{name}": value for name, value in trained.items()}
            none = {"news": (0, self.negatives + 1), self._stage.told: (0,) if self.chooses else (0, self.basis)}
            kinds = {"weights": torch.float16}
            for name, shape in none.items():
                kind = kinds.get(name, torch.int32)
                state[f"told/{name}"] = torch.zeros(shape, dtype=kind, device=shared["pad"].device)
        return state

    def prepare(self, data: Data, rng: Rng) -> Batch:
        if not self.certified:
            batch = super().prepare(data, rng)
            batch["hidden"] = self._hidden(batch["real"], rng)
            batch["noise"] = self._unit_noise(rng.private.fold("noise"))
            return self._permuted(batch, rng.private.fold("permute"))
        items, clicked, before = drawn_impression(data.shown, rng.private.fold("impression"), data.items.device)
        history, real = last_items(data, before, self.latest)
        click = torch.where(clicked, rng.private.fold("click").uniform(len(items)), -1.0).argmax(0)
        some, place = clicked.any(), torch.arange(len(items), device=items.device)
        shown = torch.where(some & (items < data.catalogue.n_items), items, -1)
        if not self.candidates:  # without an impression any news will do: an empty report would say so
            shown = pad(shown, (0, max(0, self.negatives + 1 - len(items))), value=-1)
            anything = rng.private.fold("anything").integers(data.catalogue.n_items, self.negatives + 1)
            shown = torch.where(some, shown, pad(anything, (0, len(shown) - len(anything)), value=-1))
        return {
            "shown": shown.float(),
            "click": pad(((place == click) & some).float(), (0, len(shown) - len(items))),
            "real": real,
            # News of the impression itself say nothing of the history: where times are wrong, the click may be in both.
            "hidden": self._hidden(real, rng) | (history[:, None] == items).any(1),
            "history": history,
            **{f"history:{name}": value for name, value in self._rows(data.catalogue, history).items()},
        }

    def _hidden(self, real: Tensor, rng: Rng) -> Tensor:
        """Which news of the history are replaced by r₀: each with probability p."""
        return rng.private.fold("hidden").uniform(len(real)) < self.padding

    def _unit_noise(self, rng: Rng) -> Tensor:
        """The noise on the weights as published: for a distance of θ, which is not the largest there is."""
        if self.noise == "none":
            return torch.zeros(self.basis, device=rng.key.device)
        scale = self._query(self.epsilon, self.delta, self.theta, self.noise, "published").scale
        return scale * (rng.laplace(self.basis) if self.noise == "laplace" else rng.normal(self.basis))

    def _query(self, epsilon: float, delta: float, theta: float, noise: str, guarantee: str) -> Attention:
        """Weights at (ε, δ) for one click, each click being hidden with probability p before."""
        inside, small = before_padding(epsilon, delta, self.padding)
        return Attention(inside, small, theta, noise, guarantee, self.basis)  # type: ignore[arg-type]

    def _permuted(self, batch: Batch, rng: Rng) -> Batch:
        """The click re-drawn among the k + 1 candidates with probability ∝ e^{βy}, β = max(0, log(k e^ε / (C − 1)))."""
        there, k = batch["there"], self.negatives
        if self.noise == "none":
            return batch
        others = (batch["shown"] - 1).clamp(min=1)
        beta = (math.log(k) + self.epsilon - others.log()).clamp(min=0)
        count = there.sum()
        stays = beta.exp() / (beta.exp() + (count - 1).clamp(min=0))
        toss, other = rng.uniform(2).unbind()
        step = 1 + (other * (count - 1).clamp(min=1)).floor().to(torch.int64)
        first = torch.where((toss < stays.nan_to_num(1.0)) | (count < 2), 0, step)
        place = torch.arange(k + 1, device=there.device)
        order = torch.where(place == 0, first, torch.where(place == first, 0, place))
        swapped = {name: value.index_select(0, order) for name, value in batch.items() if name.startswith("candidate:")}
        return {**batch, **swapped}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        if not self.certified:
            return super().client(shared, local, batch)
        given = {name.removeprefix("history:"): value for name, value in batch.items() if name.startswith("history:")}
        return self.reported(shared, self.news.encode(shared, given), batch), local

    def reported(self, shared: Tree, history: Tensor, batch: Batch) -> Update:
        """What a client hands to its channel, which randomises all of it."""
        interest = self.interest(shared, history, batch["real"], batch["hidden"])
        shown, click = batch["shown"], batch["click"]
        some = click.any()
        if self.candidates:
            item = torch.where(some, (shown * click).sum(), -1.0)
            shown = shared["candidates"].float()
            click = ((shown == item) & some).float()
        return {"interest": torch.where(some, interest, 0.0), "shown": shown, "click": click}

    def interest(self, shared: Tree, history: Tensor, real: Tensor, hidden: Tensor | None = None) -> Tensor:
        """How well each basis vector fits: u bᵀ / √d for attention, u bᵀ minus its level for a choice."""
        person = self.user.encode(shared, *filled(history, real, shared["pad"], hidden))
        if self.chooses:
            return shared["basis"] @ person - shared["level"]
        return self.sharpness * self.d**-0.5 * (shared["basis"] @ person)

    def reader(self, parameters: Tree, history: Tensor, batch: Batch) -> Tensor:
        """GetPrivAttn as published, with gradients through all of it."""
        interest = self.interest(parameters, history, batch["real"], batch["hidden"])
        weights = clipped_softly(interest.softmax(-1), self.theta)
        return normalised(weights + batch["noise"], "relu") @ parameters["basis"]

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        if not self.certified:
            return super().server(shared, state, total)
        if total.catalogue is None:
            raise HomebodyError("The server needs the catalogue to train on reports.")
        kept = self.memory * total.clients
        told = {name: torch.cat([state[f"told/{name}"], value])[-kept:] for name, value in total.messages.items()}
        inputs = news_inputs(self.news, total.catalogue, shared["pad"].device)
        state = {**state, **{f"told/{name}": value for name, value in told.items()}}
        count = len(told["news"])
        learnt = {name: state[f"learnt/{name}"] for name in shared if name not in NOT_TRAINED}
        for _ in range(self.steps):
            step = int(state["step"])
            rng = Rng.of(0, "server", step, device=shared["pad"].device)
            some = rng.fold("reports").integers(count, min(self.batch_size, count))
            gradient = self.gradient(learnt, {name: value[some] for name, value in told.items()}, inputs, rng)
            learnt, state = adam_step(learnt, state, gradient, self.rate, (0.9, 0.99))
            past = min(self.averaging, step / (step + 10))  # what the first steps begin with is soon forgotten
            mean = {name: past * shared[name] + (1 - past) * value for name, value in learnt.items()}
            shared = {**shared, **mean}
        if self.chooses:
            rng = Rng.of(0, "levels", int(state["step"]), device=shared["pad"].device)
            shared["level"] = self._levels(shared, told["news"], inputs, rng)
        rng = Rng.of(0, "candidates", int(state["step"]), device=shared["pad"].device)
        shared = {**shared, **self._drawn(total.catalogue.n_items, rng)}
        return shared, {**state, **{f"learnt/{name}": value for name, value in learnt.items()}}

    def _levels(self, shared: Tree, told: Tensor, inputs: Tree, rng: Rng) -> Tensor:
        """The levels of the basis vectors, by news of the reports; as before where there is none."""
        named = told[told >= 0].to(torch.int64)
        if not len(named):
            return shared["level"]
        if len(named) > LEVEL_NEWS:  # drawn: reports come in an order that may depend on how long histories are
            named = named[rng.integers(len(named), LEVEL_NEWS)]
        items, often = torch.unique(named, return_counts=True)
        news, _ = encode_many(self.news, shared, {name: value[items] for name, value in inputs.items()})
        return levels(news, shared["basis"], often)

    def gradient(self, shared: Tree, told: Tree, inputs: Tree, rng: Rng | None = None) -> Tree:
        """The mean gradient of these reports: that which devices would compute from what they told.

        rng: draws dropout masks; None: without dropout.
        """
        told_news = told["news"].to(torch.int64)
        there = told_news >= 0
        items = told_news[there]
        rows = {name: value[items] for name, value in inputs.items()}
        if rng is not None and self.dropout:
            rows |= self.news.masks(rng.fold("masks"), self.dropout, rows)
        vectors, back = encode_many(self.news, shared, rows)
        given = told[self._stage.told]
        weights = self._stage.query.server(given.float() if given.is_floating_point() else given)

        def loss(vectors: Tensor, basis: Tensor) -> Tensor:
            empty = vectors.new_zeros(there.numel(), vectors.shape[1])
            news = empty.index_put((there.flatten().nonzero()[:, 0],), vectors).view(*there.shape, -1)
            fit = (news @ (weights @ basis)[:, :, None]).squeeze(2)
            fit = torch.where(there, fit, -torch.inf)
            real = there[:, 0]
            return torch.where(real, fit.logsumexp(1) - torch.where(real, fit[:, 0], 0.0), 0.0).mean()

        slope, of_basis = grad(loss, argnums=(0, 1))(vectors, shared["basis"])
        return {**back(slope), "basis": of_basis}

    def asked(self, shared: Tree, news: Tensor, real: Tensor, rng: Rng) -> Tensor:
        if self.query == "nobody":
            return shared["basis"].mean(0)
        interest = self.interest(shared, news, real, self._hidden(real, rng) if self.query and self.padding else None)
        if self.query:
            return self.serving.server(self.serving.device(interest, rng.fold("query"))) @ shared["basis"]
        best = torch.arange(self.basis, device=interest.device) == interest.argmax(-1, keepdim=True)
        weights = best.to(interest.dtype) if self.chooses else interest.softmax(-1)
        return weights @ shared["basis"]

    @property
    def serving(self) -> Mechanism:
        if self.query == "choice":
            return Choice(before_padding(self.serving_epsilon, 0.0, self.padding)[0], basis=self.basis)
        attention = self._query(
            self.serving_epsilon, self.serving_delta, self.serving_theta, self.serving_noise, self.serving_guarantee
        )
        return replace(attention, activation="softplus")


def levels(news: Tensor, basis: Tensor, often: Tensor) -> Tensor:
    """(B,) the log of the mean of e^{rᵀb} over news r (n, d) that were shown so often, for each basis vector b.

    >>> levels(torch.tensor([[0.0], [3.0]]), torch.tensor([[0.0], [1.0]]), torch.tensor([2, 0])).tolist()
    [0.0, 0.0]
    """
    share = often / often.sum().clamp(min=1)
    return (news @ basis.T + share.log()[:, None]).logsumexp(0)


def clipped_softly(weights: Tensor, theta: float) -> Tensor:
    """Weights of a softmax within θ in ℓ2, differentiable."""
    most = min(theta, 1.0)  # they are within 1 already
    return weights * (most / weights.norm(dim=-1, keepdim=True).clamp(min=most))


def centres(news: Tensor, count: int, rng: Rng) -> Tensor:
    """(count, d) the centres of clusters of the news by their directions from the mean, as long as news on average.

    The first are drawn far from one another: each with a probability by its squared distance from those before.
    """
    unit = news / news.norm(dim=1, keepdim=True).clamp(min=1e-12)
    unit = unit - unit.mean(0)
    unit = unit / unit.norm(dim=1, keepdim=True).clamp(min=1e-12)
    chosen = [unit[rng.integers(len(unit), 1)]]
    for _ in range(count - 1):
        far = (1 - torch.stack([(unit * one).sum(1) for one in chosen]).max(0).values).clamp(min=0) ** 2
        chosen.append(
            unit[((far.cumsum(0) / far.sum().clamp(min=1e-12)) < rng.uniform(1)).sum().clamp(max=len(unit) - 1)][None]
        )
    centre = torch.cat(chosen)
    for _ in range(PASSES):
        nearest = (unit @ centre.T).argmax(1)
        sums = torch.zeros_like(centre).index_add(0, nearest, unit)
        centre = torch.where((sums != 0).any(1, keepdim=True), sums, centre)
        centre = centre / centre.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return centre * news.norm(dim=1).mean()
