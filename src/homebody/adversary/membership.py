"""Fourth attack: was the model trained on this person?

The attacker is the public. It has the released parameters, knows the method and its settings, and has the data of the
people it asks about. Two attacks:

- **from lists** (Wang et al. 2021, Section 4.6). The attacker trains a shadow model on four fifths of its own people. A
  random forest learns who was in, from their features and the shadow model's top ten items for these. It then judges
  others by their features and the attacked model's top ten. A list is a function of the features, so no classifier can
  tell two people with the same features apart: `ceiling` is the best that any could reach.
- **by likelihood ratio** (Carlini et al. 2022). How much the model prefers someone's own items to others is compared
  with shadow models trained with this person and without: on random halves of the people, and their complements.

A member who was in no round's cohort left no trace. The likelihoods count them as not trained on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from homebody.adversary.rates import allowed, balanced, ceiling, delong, rate_at
from homebody.adversary.shadows import NEGATIVES, Lab, Outsider, Released, ShadowModel, by_features, whole_histories
from homebody.core import Method, Users, releases
from homebody.data.splits import Split
from homebody.errors import HomebodyError, install
from homebody.privacy import NonPrivate
from homebody.privacy.ledger import DELTA
from homebody.rng import Rng
from homebody.training import choose

__all__ = ["RATES", "SHADOWS", "Released", "attack", "leaves_some_out", "likelihood_ratio"]

SHADOWS = 8
FEWEST_SHADOWS = 4
"""The fewest shadow models: half are trained without a person, and a deviation takes two."""
FEWEST = 20
"""The fewest people of each kind."""
SHADOW_PEOPLE = 1000
"""Whom the attacker of lists has for itself, as in the paper; at most a third of all."""
IN_SHADOW = 0.8
"""The share of them that its shadow model is trained on, as in the paper."""
LISTED = 10
TREES = 200
RATES = (0.01, 0.001)
"""Shares of others taken for members at which true positives are counted."""
PRIOR = 4.0
"""How many observations everyone's deviation counts for, beside those of one person."""
ALARM = 0.001
"""Of intervals that are held against what is certified: several are, and a run is not to be accused by chance."""
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class _People(NamedTuple):
    shadow: Users
    """The attacker's own, who are neither of the others."""
    members: Users
    others: Users


def attack(
    method: Method,
    split: Split,
    *,
    rounds: int,
    cohort: int | None = None,
    released: Released | None = None,
    shadows: int = SHADOWS,
    people: int | None = None,
    shadow_people: int = SHADOW_PEOPLE,
    forest: bool = True,
    delta: float = DELTA,
    seed: int = 0,
    device: str = "cpu",
    fused: bool = True,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Attack a model of this method on this split, at the level of people; what was found, ready for JSON.

    released: the model to attack; its members are those who learn, and those who do not are the others. Without one, a
    target is trained here: of the people who learn, some are the attacker's, and half of the rest are members.
    shadows: models for the likelihood ratio. people: how many are asked about, half of them members; None: all.
    forest: whether to attack from lists too; it takes scikit-learn, and a method whose devices hold nothing of their
    own. step: told how many rounds of how many are done.
    """
    _check(shadows, people)
    lab = Lab(method, whole_histories(split), rounds, cohort, delta, device, fused, Rng.of(seed, "membership"), step)
    why = _no_forest(method, split) if forest else "left out"
    groups = _divided(lab.split, released, 0 if why else shadow_people, lab.generator("people"))
    lab.trainings = shadows + (released is None) + (not why)
    private = np.sort(np.concatenate([groups.members, groups.others]))
    target = lab.trained(groups.members, "target") if released is None else lab.as_released(released)
    asked, members = _asked(groups, people, lab.generator("asked"))
    facts: dict[str, Any] = {
        "target": "trained for the audit" if released is None else "the run's model",
        "members": int(members.sum()),
        "others": int((~members).sum()),
        "trained_on": len(groups.members),
        "took_part": int(target.took[groups.members].sum()),
        "rounds": rounds,
        "cohort": cohort,
        "shadows": shadows,
    }
    bound = allowed(target.epsilon, delta, _relation(method, lab.split, cohort))
    lists: dict[str, Any] = {"skipped": why}
    alarms: list[bool] = []
    if not why:
        guesses, kinds, used = _from_lists(lab, target, groups.shadow, asked)
        lists = {
            "accuracy": list(balanced(guesses, members)),
            "ceiling": ceiling(kinds, members),
            "distinct": int(kinds.max()) + 1,
            "shadow_people": len(groups.shadow),
            "shadow_trained_on": used,
        }
        alarms.append(balanced(guesses, members, ALARM).low > bound.accuracy)
    scores, seen = _ratios(lab, target, private, asked, shadows)
    traced = ~members | target.took[asked]
    rates = [rate for rate in (rate_at(scores, members, share) for share in RATES) if rate]
    ratio = {
        "statistic": f"mean of log σ(own − other) over a person's items, {NEGATIVES} others each",
        "auc": list(delong(scores, members)),
        "auc_without_shadows": list(delong(seen, members)),
        "auc_took_part": list(delong(scores[traced], members[traced])) if members[traced].any() else None,
        "rates": [{"false_positives": rate.at, "true": list(rate.true), "false": list(rate.false)} for rate in rates],
    }
    alarms.append(delong(scores, members, ALARM).low > bound.auc)
    strict = (rate_at(scores, members, rate.at, ALARM) for rate in rates)
    alarms += [rate.true.low > bound.rate(rate.false.high) for rate in strict if rate is not None]
    return {
        **facts,
        "lists": lists,
        "likelihood_ratio": ratio,
        "allowed": {
            "epsilon": target.epsilon if np.isfinite(target.epsilon) else "inf",
            "delta": delta,
            "accuracy": bound.accuracy,
            "auc": bound.auc,
            "rates": [bound.rate(rate.at) for rate in rates],
        },
        "contradicted": any(alarms),
        "notes": lab.notes,
    }


def likelihood_ratio(seen: Floats, known: Floats, took: Bools) -> Floats:
    """(people) the logarithm of how much likelier what is seen of each is if they took part.

    known: (people, shadows) the same of shadow models; took: who took part in which. All normal: a person has a level
    of their own, and in models that they took part in it is higher by everyone's shift and something of their own.
    How much people differ in both is estimated from all of them: so far a few models are believed about one.

    >>> took = np.array([[True, False, True, False], [False, True, False, True]])
    >>> known = np.array([[2.0, 0.1, 2.2, 0.0], [1.0, 3.2, 1.1, 3.0]])
    >>> (likelihood_ratio(np.array([2.1, 1.1]), known, took) > 0).tolist()
    [True, False]
    """
    # Models differ in how well they do altogether, which is not about anybody.
    known, seen = known - known.mean(0), seen - seen.mean()
    counts = [there.sum(1) for there in (~took, took)]
    means = [np.where(there, known, 0.0).sum(1) / np.maximum(there.sum(1), 1) for there in (~took, took)]
    both = (counts[0] > 0) & (counts[1] > 0)
    shift = float((means[1] - means[0])[both].mean()) if both.any() else 0.0
    left = known - np.where(took, means[1][:, None], means[0][:, None])
    freedom = sum(np.maximum(count - 1, 0) for count in counts)
    noise = max(float((left**2).sum()) / max(1, int(freedom.sum())), 1e-18)
    level, extra = (
        max(_variance(values) - noise * float(share.mean() if len(share) else 0.0), 1e-6 * noise)
        for values, share in (
            (means[0][counts[0] > 0], 1 / counts[0][counts[0] > 0]),
            ((means[1] - means[0])[both], 1 / counts[0][both] + 1 / counts[1][both]),
        )
    )
    variance = ((left**2).sum(1) + PRIOR * noise) / (freedom + PRIOR)
    # The posterior of the two, given the shadow models: precision [[a, b], [b, c]], weighted sums u and v.
    a, b, c = 1 / level + took.shape[1] / variance, counts[1] / variance, 1 / extra + counts[1] / variance
    above = known - shift * took
    u, v = above.sum(1) / variance, np.where(took, above, 0.0).sum(1) / variance
    area = a * c - b * b
    without, more = (c * u - b * v) / area, (a * v - b * u) / area
    spread = variance + c / area
    inside, wider = without + shift + more, variance + (a + c - 2 * b) / area
    return _log_normal(seen - inside, wider) - _log_normal(seen - without, spread)


def _variance(values: Floats) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0


def _log_normal(apart: Floats, variance: Floats) -> Floats:
    return -0.5 * (np.log(variance) + apart**2 / variance)


def _from_lists(lab: Lab, target: ShadowModel, shadow: Users, asked: Users) -> tuple[Bools, npt.NDArray[np.int64], int]:
    """The forest's guesses, groups of people with equal inputs, and how many people trained the shadow model."""
    from sklearn.ensemble import RandomForestClassifier

    inside = lab.generator("shadow").permutation(shadow)[: round(IN_SHADOW * len(shadow))]
    model = lab.trained(np.sort(inside), "lists' shadow")
    pairs = ((model, shadow), (target, asked))
    lists = [lab.outsider(trained).lists(trained.shared, who, LISTED) for trained, who in pairs]
    everyone = replace(lab.split, learn=lab.split.lengths > 0)
    reader = Outsider(everyone, target.method, lab.rng)
    items = np.unique(np.concatenate(lists))
    tables = []
    for who, listed in zip((shadow, asked), lists, strict=True):
        hot = np.zeros((len(who), len(items)), dtype=np.float32)
        np.put_along_axis(hot, np.searchsorted(items, listed), 1.0, axis=1)
        tables.append(np.concatenate([reader.described(who), hot], axis=1))
    # Four in five are in: without weights it would say so of nearly everyone.
    forest = RandomForestClassifier(
        TREES, class_weight="balanced", random_state=int(lab.generator("forest").integers(2**31)), n_jobs=1
    )
    forest.fit(tables[0], np.isin(shadow, inside))
    guesses = np.asarray(forest.predict(tables[1]), dtype=np.bool_)
    seen = np.concatenate([tables[1], lists[1]], axis=1)
    return guesses, np.unique(seen, axis=0, return_inverse=True)[1].reshape(-1), len(inside)


def _ratios(lab: Lab, target: ShadowModel, private: Users, asked: Users, shadows: int) -> tuple[Floats, Floats]:
    """(asked) the logarithms of likelihood ratios, and the preferences in the target that they judge."""
    generator = lab.generator("halves")
    known, took = np.empty((len(asked), shadows)), np.empty((len(asked), shadows), dtype=np.bool_)
    half = private
    for number in range(shadows):
        drawn = np.sort(generator.permutation(private)[: len(private) // 2]) if number % 2 == 0 else None
        half = np.setdiff1d(private, half) if drawn is None else drawn
        model = lab.trained(half, f"shadow {number + 1}")
        known[:, number] = lab.outsider(model).preference(model.shared, asked)
        took[:, number] = model.took[asked]
    seen = lab.outsider(target).preference(target.shared, asked)
    return likelihood_ratio(seen, known, took), seen


def _divided(split: Split, released: Released | None, shadow: int, generator: np.random.Generator) -> _People:
    there = (split.lengths > 0) & ~split.public
    members, others = (generator.permutation(np.flatnonzero(there & kind)) for kind in (split.learn, ~split.learn))
    if released is None:
        size = min(shadow, len(members) // 3)
        half = size + (len(members) - size) // 2
        own_people, members, others = members[:size], members[size:half], members[half:]
    else:
        size = min(shadow, len(others) // 2)
        own_people, others = others[:size], others[size:]
    if min(len(members), len(others)) < FEWEST:
        raise HomebodyError(
            f"Members are told from others among at least {FEWEST} of each, and here are {len(members):,} and "
            f"{len(others):,}: use more people."
        )
    return _People(*(np.sort(group) for group in (own_people, members, others)))


def leaves_some_out(split: Split) -> bool:
    """Whether a model of this split has people to compare its members with, who could have been members as well."""
    others = ~split.learn & ~split.public & (whole_histories(split).lengths > 0)
    return not len(split.absent) and int(others.sum()) >= 2 * FEWEST


def _asked(groups: _People, people: int | None, generator: np.random.Generator) -> tuple[Users, Bools]:
    """Who is asked about, and whether they are members."""
    most = max(len(groups.members), len(groups.others)) if people is None else people // 2
    some = [np.sort(generator.permutation(group)[:most]) for group in (groups.members, groups.others)]
    return np.concatenate(some), np.arange(sum(map(len, some))) < len(some[0])


def _relation(method: Method, split: Split, size: int | None) -> str:
    """What certified ε is about: one added or removed, if all of it is."""
    who = np.flatnonzero(split.learn & (split.lengths > 0))
    cohort = choose(who, None if size is None else min(size, len(who)), Rng.of(0), split.n_items)
    acting = [phase.method or method for phase in method.phases]
    events = [charge.event for stage in acting for charge in releases(stage, cohort)]
    relations = {event.relation for event in events if not isinstance(event, NonPrivate)}
    return "add-remove" if relations == {"add-remove"} else "replace-one"


def _no_forest(method: Method, split: Split) -> str:
    """Why the attack from lists is not possible, in a sentence; empty where it is."""
    if importlib.util.find_spec("sklearn") is None:
        return f"The attack from lists needs scikit-learn: {install('report')}."
    if not by_features(method, split.catalogue()):
        return (
            f"What {type(method).__name__} shares gives nobody a list by their features alone, so that there is "
            "nothing for the attack from lists to read."
        )
    return ""


def _check(shadows: int, people: int | None) -> None:
    if shadows < FEWEST_SHADOWS:
        raise HomebodyError(f"The likelihood ratio takes at least {FEWEST_SHADOWS} shadow models, not {shadows}.")
    if people is not None and people < 2 * FEWEST:
        raise HomebodyError(f"The attack asks about at least {2 * FEWEST} people, half of them members, not {people}.")
