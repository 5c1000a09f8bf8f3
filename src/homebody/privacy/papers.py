"""Five papers: what they claim, beside what their mechanisms certify. docs/accounting.md derives each row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from homebody.errors import refuse_unknown
from homebody.privacy.accountant import Bound, epsilon
from homebody.privacy.events import (
    OBSERVERS,
    Event,
    GaussianRelease,
    LaplaceRelease,
    NonPrivate,
    Observer,
    PureRelease,
    Relation,
    Reports,
    Sampling,
    ShuffledReports,
    Unit,
)

__all__ = ["PAPERS", "PRIVREC_DELTAS", "PRIVREC_TABLES", "Claim", "PaperClaims", "paper"]


@dataclass(frozen=True)
class Claim:
    """One release as the paper describes it, against one observer and about one unit."""

    what: str
    observer: Observer
    unit: Unit
    delta: float
    claimed: float | None
    """ε as printed; None: the paper gives none."""
    event: Event
    count: int
    why: str
    """In a sentence, why the two differ, or why they do not."""

    def certified(self) -> Bound:
        return epsilon([(self.event, self.count)], self.delta)

    def as_dict(self) -> dict[str, Any]:
        """The claim beside what is certified, for JSON."""
        bound = self.certified()
        said = {name: getattr(self, name) for name in ("what", "observer", "unit", "delta", "claimed")}
        return {**said, "certified": bound.epsilon, "accountant": bound.accountant, "why": self.why}


@dataclass(frozen=True)
class PaperClaims:
    id: str
    title: str
    claims: tuple[Claim, ...]


PRIVREC_DELTAS = (1e-8, 1e-6, 1e-4)
PRIVREC_TABLES: dict[int, dict[int, tuple[float, float, float]]] = {
    4800: {
        5: (1.7439, 1.3602, 0.9764),
        10: (3.2117, 2.7511, 2.2535),
        15: (5.9705, 5.2030, 4.3074),
        20: (9.4736, 8.3223, 6.9235),
        25: (13.7047, 12.1696, 10.2052),
        30: (18.9107, 16.6081, 14.3056),
    },
    760: {
        2: (2.2994, 1.8388, 1.3783),
        5: (7.4618, 6.5408, 5.3932),
        8: (16.2853, 14.3169, 12.0143),
        10: (23.7651, 21.4626, 18.6182),
        12: (34.5025, 30.0690, 25.4638),
        15: (50.1537, 45.5485, 40.9433),
    },
}
"""Tables 4 and 5: population, cohort, and ε at each δ. Their column δ = 0 is ∞ in every row."""


def _privrec() -> PaperClaims:
    claims = []
    for number, (population, rows) in zip((4, 5), PRIVREC_TABLES.items(), strict=True):
        for cohort, claimed in rows.items():
            event = GaussianRelease(1, "replace-one", Sampling("fixed", cohort, population))
            what = f"Table {number}, {cohort}/{population}"
            why = "Gaussian noise has no ε at δ = 0."
            claims.append(Claim(what, "public", "user", 0.0, math.inf, event, 1000, why))
            claims += [
                Claim(what, "public", "user", delta, value, event, 1000, _PRIVREC_LOOSE)
                for delta, value in zip(PRIVREC_DELTAS, claimed, strict=True)
            ]
    for cohort, population in ((30, 4800), (15, 760)):
        event = GaussianRelease(2, "add-remove", Sampling("poisson", cohort, population))
        why = (
            "The same noise is twice the sensitivity of an addition, and each person is drawn on their own: another "
            "relation and another draw than the paper's."
        )
        what = f"{cohort}/{population} by Poisson sampling"
        claims.append(Claim(what, "public", "user", 1e-6, None, event, 1000, why))
    server = NonPrivate("the server sees each delta and adds the noise itself")
    why = "Noise that the server adds protects nobody from the server."
    claims.append(Claim("DP-PrivRec, any row", "server", "user", 1e-6, None, server, 1, why))
    stage = NonPrivate("stage 1 trains item vectors on people's sequences without noise")
    why = "The tables cover stage 2; stage 1 is released without noise, and the two compose to ∞."
    claims.append(Claim("two-stage training", "public", "user", 1e-6, 16.6081, stage, 1, why))
    title = "Fast-adapting and Privacy-preserving Federated Recommender (DP-PrivRec)"
    return PaperClaims("privrec", title, tuple(claims))


_PRIVREC_LOOSE = (
    "The paper counts each of a round's deltas as a release of its own (1,000 × cohort in all) under a general bound "
    "for samples; one round is one release of the sum, under the bound for Gaussian noise."
)


def _fl_mv_dssm() -> PaperClaims:
    claims = []
    for sigma, claimed in ((4, 4.33), (1, None)):
        relations: tuple[tuple[Relation, int], ...] = (("add-remove", 1), ("replace-one", 2))
        for relation, sensitivity in relations:
            event = GaussianRelease(sigma / sensitivity, relation)
            about = "a view is absent" if relation == "add-remove" else "a view has other data: the sum moves by 2C"
            why = (
                f"100 rounds compose, without sampling, where {about}; no accountant here gives 4.33."
                if claimed
                else f"The setting that was run has a quarter of the noise; {about}."
            )
            what = f"item gradients, σ = {sigma}, {relation}"
            claims.append(Claim(what, "views", "user", 1e-3, claimed, event, 100, why))
    unscaled = NonPrivate("each noised prediction goes to the other views, with noise of no stated scale")
    why = "Predictions are releases too; the paper states neither their noise nor their number."
    claims.append(Claim("predictions", "views", "user", 1e-3, None, unscaled, 1, why))
    towers = NonPrivate("gradients of the user towers carry no noise")
    why = "A secure sum hides who sent what, not what the sum tells: without noise nothing is bounded."
    claims += [Claim("user towers", who, "user", 1e-3, None, towers, 1, why) for who in OBSERVERS]
    return PaperClaims("fl-mv-dssm", "Federated Multi-View DSSM", tuple(claims))


def _pfedrec() -> PaperClaims:
    plain = NonPrivate("Laplace noise on a table that is not clipped")
    why = "The noise has a scale but the table has no bound, so no ε follows, whatever λ is."
    what = "Laplace noise, λ = 0.1 … 0.5 (Table 7)"
    claims = [Claim(what, who, "user", 0.0, None, plain, 1, why) for who in OBSERVERS]
    clipped = LaplaceRelease(0.5 / 2, "replace-one")
    for rounds in (1, 100):
        why = "Two uploads of ℓ1 norm at most 1 are up to 2 apart: ε = 2/λ a round, and rounds add up."
        what = f"λ = 0.5 after a clip to ℓ1 norm 1 (our variant), {rounds} round{'s' if rounds > 1 else ''}"
        claims.append(Claim(what, "server", "user", 0.0, None, clipped, rounds, why))
    return PaperClaims("pfedrec", "Dual Personalization on Federated Recommendation (PFedRec)", tuple(claims))


def _fmf_ldp() -> PaperClaims:
    report, epoch = Reports(2.5), Reports(2.5, 100)
    again = "Each epoch sends k new reports: epochs compose too."
    better = "2,000 reports compose a little better where δ may be above 0, by the exact rule."
    model = "The model is computed from the reports, so it tells no more than they do."
    claims = [
        Claim("one report", "server", "report", 0.0, 2.5, report, 1, "The mechanism is what it is said to be."),
        Claim("one epoch, k = 100", "server", "user", 0.0, 250, epoch, 1, "k reports of one person compose to kε."),
        Claim("20 epochs", "server", "user", 0.0, 250, epoch, 20, again),
        Claim("20 epochs", "server", "user", 1e-6, 250, epoch, 20, better),
        Claim("20 epochs, the trained model", "public", "user", 0.0, 250, epoch, 20, model),
    ]
    for users in (1000, 6040, 75040):
        behind = ShuffledReports(2.5, 100, users)
        why = (
            "k shuffles an epoch, each of one report of everyone, composed over epochs; only behind a proxy that does "
            "not collude. The paper claims unlinkable reports, without an ε."
        )
        what = f"20 epochs, shuffled among {users:,}"
        claims.append(Claim(what, "server", "user", 1e-6, None, behind, 20, why))
    return PaperClaims("fmf-ldp", "Stronger Privacy for Federated CF with Implicit Feedback (FMF-LDP)", tuple(claims))


def _privaterec() -> PaperClaims:
    history = NonPrivate("the uploaded gradient passes through the history before any noise")
    why = "Noise on the attention weights does not cover the gradients of the news and user encoders."
    label = NonPrivate("the candidates always hold the true click, and the gradient reveals them")
    relabel = "Re-drawing the label among k + 1 candidates hides nothing while the candidates give the click away."
    claims = [
        Claim("training, history, ε_t = 10", "server", "interaction", 0.0, 10, history, 1, why),
        Claim("training, label, ε_t = 10", "server", "interaction", 0.0, 10, label, 1, relabel),
    ]
    for times in (1, 10):
        repaired = "Repaired, a participation costs what it says; participations compose."
        what = f"training as repaired, {times} participation{'s' if times > 1 else ''}"
        claims.append(Claim(what, "server", "interaction", 0.0, 10, PureRelease(10), times, repaired))
    # σ = θ/ε √(2 log(1.25/δ)); two non-negative vectors in the ball of radius θ are up to √2·θ apart.
    multiplier = math.sqrt(2 * math.log(1.25 / 1e-3)) / 10 / math.sqrt(2)
    for queries in (1, 100):
        why = "The noise is set for a distance of θ where √2·θ is possible, by a formula that holds for ε ≤ 1 only" + (
            "; and every query is a release." if queries > 1 else "."
        )
        what = f"serving, ε_s = 10, no padding, {queries:,} quer{'ies' if queries > 1 else 'y'}"
        served = GaussianRelease(multiplier, "replace-one")
        claims.append(Claim(what, "server", "interaction", 1e-3, 10, served, queries, why))
    return PaperClaims("privaterec", "PrivateRec: DP training and serving for news", tuple(claims))


PAPERS = {
    "privrec": _privrec,
    "fl-mv-dssm": _fl_mv_dssm,
    "pfedrec": _pfedrec,
    "fmf-ldp": _fmf_ldp,
    "privaterec": _privaterec,
}


def paper(name: str) -> PaperClaims:
    """A paper by its id.

    >>> paper("fmf-ldp").claims[2].certified().epsilon
    5000.0
    """
    refuse_unknown("paper", [name], PAPERS)
    return PAPERS[name]()
