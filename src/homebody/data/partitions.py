"""Ways to split a population into what is learnt from and what is asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from homebody.data import split_kernels as kernels
from homebody.data.population import Impressions, Population, pointers
from homebody.data.splits import Bools, Held, How, Ints, Longs, Protocol, Rows, ShownPart, Split, isolated
from homebody.errors import HomebodyError, in_short, refuse_unknown, several
from homebody.rng import Rng
from homebody.settings import is_count

__all__ = ["WAYS", "Way", "everything", "leave_one_out", "settings_of", "split"]

LEAST = 3
"""Fewest interactions for leave-one-out to ask a user: one to learn from, one to validate, one to test."""


@dataclass(frozen=True)
class Kept:
    """The interactions that count: repeats left out, unless the protocol keeps them."""

    population: Population
    indptr: Longs
    rows: Rows
    how: How
    seed: int

    @property
    def lengths(self) -> Longs:
        return np.diff(self.indptr)

    @property
    def owner(self) -> Longs:
        """The user of each of the rows."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def everyone(self) -> Bools:
        return np.ones(len(self.lengths), dtype=np.bool_)

    @property
    def items(self) -> Ints:
        return self.population.items[self.rows]

    def shuffled(self, count: int, what: str) -> Longs:
        """The numbers below `count` in an order that the seed decides."""
        keys = Rng.of(self.seed, "split", what).fold(torch.arange(count)).key.numpy()
        return np.argsort(keys, kind="stable")


class Parts(NamedTuple):
    """Who is asked what: the makings of a `Split`."""

    rows: Rows
    bounds: Longs
    learn: Bools
    absent: Ints = np.empty(0, dtype=np.int32)
    unasked: Mapping[Held, Ints] | None = None
    shown: Mapping[ShownPart, Longs] | None = None
    before: Longs | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Way:
    """One way to split: what it is, its settings with their defaults, and how it is done."""

    title: str
    settings: Mapping[str, float]
    make: Callable[[Kept, Mapping[str, float]], Parts]


def split(
    population: Population,
    way: str = "leave-one-out",
    *,
    protocol: str = "strict",
    how: str | None = None,
    seed: int = 0,
    negatives: int = 99,
    public: float = 0.0,
) -> Split:
    """Split a population in a way of `WAYS`, its settings after a colon.

    how: which of a user's interactions are held out, the latest or random ones. Ties in time are broken by file
    order, or by the seed with latest-random: histories are then in that order too. Without times the default is random.
    public: the share of people whose data is public, who neither train with the others nor are asked.

    >>> toy = Population("toy", np.array([0, 10]), np.arange(10, dtype=np.int32), n_items=12)
    >>> made = split(toy, "ratio:test=0.3", how="latest")
    >>> made.part(0, "train").tolist(), made.part(0, "valid").tolist(), made.part(0, "test").tolist()
    ([0, 1, 2, 3, 4, 5], [6], [7, 8, 9])
    >>> split(toy, "ratio:tests=0.3")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no setting of the split ratio 'tests'; did you mean 'test'?
    Known: test, valid.
    """
    given: object = population
    if not isinstance(given, Population):
        raise HomebodyError(f"A population is split, such as hb.load('ml-100k'), not {in_short(given)}.")
    text: object = way
    if not isinstance(text, str):
        raise HomebodyError(f"A split is a text such as 'leave-one-out' or 'ratio:test=0.2', not {in_short(text)}.")
    by: Protocol = _known("protocol", protocol, Protocol)
    chosen: How = _known("way to hold out", how or ("random" if population.times is None else "latest"), How)
    if not is_count(negatives):
        raise HomebodyError(f"negatives is a whole number such as 99, not {negatives!r}.")
    if negatives < 1:
        raise HomebodyError(f"The sampled metrics need at least 1 negative, not {negatives}.")
    name, settings = _parse(way)
    # Impressions may count what came before them: where they are asked, a history keeps its order.
    kept, notes = _kept(population, by, "latest" if name.startswith("impressions") else chosen, seed)
    parts = WAYS[name].make(kept, settings)
    parts = parts._replace(notes=(*notes, *parts.notes))
    done = Split(population, way, by, chosen, seed, negatives, **parts._asdict()).published(public)
    done = replace(done, notes=(*done.notes, *_left_out(done)))
    return replace(done, _avoid=isolated(done)) if by == "isolated" else done


def leave_one_out(
    population: Population, *, protocol: str = "strict", how: str | None = None, seed: int = 0, negatives: int = 99
) -> Split:
    """Hold out each user's latest interaction (or a random one) for test, the one before for validation.

    >>> import homebody as hb
    >>> split = hb.leave_one_out(hb.load("synthetic:users=50,items=30,mean=6"))
    >>> len(split.members()), len(split.part(7, "test"))
    (50, 1)
    """
    return split(population, protocol=protocol, how=how, seed=seed, negatives=negatives)


def everything(population: Population, *, how: str = "latest", seed: int = 0) -> Split:
    """A split that holds nothing out, no interaction and no impression: what a device trains on when it does not
    measure itself.

    how: as in `split`, for the order of ties in time.

    >>> toy = Population("toy", np.array([0, 3]), np.array([2, 0, 2], dtype=np.int32), n_items=4)
    >>> everything(toy).part(0, "train").tolist(), everything(toy).asked().tolist()
    ([2, 0], [])
    """
    chosen: How = _known("way to hold out", how, How)
    kept, notes = _kept(population, "strict", "latest" if population.impressions is not None else chosen, seed)
    none = np.zeros(len(kept.lengths), dtype=np.int64)
    parts = _by_count(kept, none, none, kept.everyone, tuple(notes))
    if population.impressions is not None:
        _, usable, _ = _askable(kept)
        nothing: Longs = usable[:0]
        parts = parts._replace(shown={"train": usable, "valid": nothing, "test": nothing}, before=_before(kept))
    return Split(population, "everything", "strict", chosen, seed, 1, **parts._asdict())


def _leave_one_out(kept: Kept, settings: Mapping[str, float]) -> Parts:
    asked = kept.lengths >= LEAST
    if not asked.any():
        raise HomebodyError(
            f"No user of {kept.population.name} has the {LEAST} interactions that leave-one-out needs (training, "
            f"validation, test); the longest history has {kept.lengths.max(initial=0)}."
        )
    have = "has" if (~asked).sum() == 1 else "have"
    few = f"{(~asked).sum():,} of {len(asked):,} users {have} fewer than {LEAST} interactions: "
    notes = () if asked.all() else (few + "they take part in training and are not evaluated.",)
    count = asked.astype(np.int64)
    return _by_count(kept, count, count, kept.everyone, notes)


def _ratio(kept: Kept, settings: Mapping[str, float]) -> Parts:
    most = np.maximum(kept.lengths - 1, 0)
    elsewhere = kept.population.elsewhere
    # What people have in another app counts: a fifth of everything is the same test, whatever is elsewhere.
    whole = kept.lengths if elsewhere is None else kept.lengths + np.diff(elsewhere.indptr)
    test = np.minimum(np.floor(settings["test"] * whole + 0.5).astype(np.int64), most)
    valid = np.minimum(np.floor(settings["valid"] * whole + 0.5).astype(np.int64), most - test)
    unasked = int(((test + valid == 0) & (kept.lengths > 0)).sum())
    few = several(unasked, "user has", "users have")
    notes = (f"{few} too few interactions to be asked; they train.",) if unasked else ()
    return _by_count(kept, valid, test, kept.everyone, notes)


def _held_out_users(kept: Kept, settings: Mapping[str, float]) -> Parts:
    group = _groups(kept, len(kept.lengths), "users", settings)
    kept, low = _liked(kept, settings["above"])
    asked = np.floor(settings["asked"] * (kept.lengths - low)).astype(np.int64)
    valid, test = np.where(group == 1, asked, 0), np.where(group == 2, asked, 0)
    notes = _guests(valid, test, "after adapting to the rest of what they have")
    if low.any():
        rated = f"rated {settings['above']:g} or less"
        many = several(int(low.sum()), f"interaction {rated} is", f"interactions {rated} are")
        notes += (f"{many} withheld.",)
    few = int(((group > 0) & (asked == 0)).sum())
    if few:
        many = several(few, "held-out user has", "held-out users have")
        notes += (f"{many} too few interactions to be asked anything.",)
    return _by_count(kept, valid, test, group == 0, notes, low)


def _liked(kept: Kept, above: float) -> tuple[Kept, Longs]:
    """Each user's interactions rated above this first, in their order; and how many others follow."""
    if above == -math.inf:
        return kept, np.zeros(len(kept.lengths), dtype=np.int64)
    if kept.population.ratings is None:
        raise HomebodyError(f"{kept.population.name} has no ratings, so none is above {above:g}: leave out above.")
    owner = kept.owner
    low = kept.population.ratings[kept.rows] <= above
    return replace(kept, rows=kept.rows[np.lexsort((low, owner))]), np.bincount(owner[low], minlength=len(kept.lengths))


def _cold_users(kept: Kept, settings: Mapping[str, float]) -> Parts:
    group = _groups(kept, len(kept.lengths), "users", settings)
    valid, test = np.where(group == 1, kept.lengths, 0), np.where(group == 2, kept.lengths, 0)
    return _by_count(kept, valid, test, group == 0, _guests(valid, test, "with no history at all"))


def _guests(valid: Longs, test: Longs, how: str) -> tuple[str, ...]:
    asked = f"{(test > 0).sum():,} in test, {how}."
    if not valid.any():
        return (f"Nobody is asked in validation, so the last round is kept; {asked}",)
    return (f"{several(int((valid > 0).sum()), 'user is', 'users are')} asked in validation and {asked}",)


def _cold_items(kept: Kept, settings: Mapping[str, float]) -> Parts:
    group = _groups(kept, kept.population.n_items, "items", settings)
    return _by_part(kept, group[kept.items], kept.everyone, group)


def _cold_both(kept: Kept, settings: Mapping[str, float]) -> Parts:
    users = _groups(kept, len(kept.lengths), "users", settings)
    items = _groups(kept, kept.population.n_items, "items", settings)
    of_user, of_item = np.repeat(users, kept.lengths), items[kept.items]
    return _by_part(kept, np.where(of_user == of_item, of_user, 3), users == 0, items)


def _impressions(kept: Kept, settings: Mapping[str, float]) -> Parts:
    shown, asked, notes = _askable(kept)
    asked = _asked(shown, asked)
    users = shown.users[asked]
    # The first half of each user's impressions is for validation, the rest for test; who has one only, goes to
    # either in turn.
    first = np.searchsorted(users, users, side="left")
    count = np.searchsorted(users, users, side="right") - first
    early = np.arange(len(users)) - first < np.floor(settings["valid"] * count)
    turn = np.floor(settings["valid"] * np.arange((count == 1).sum() + 1))
    early[count == 1] = np.diff(turn) > 0
    # Where only the times tell what came before, the whole history is learnt from and asked with, as documented.
    before = None if shown.before is None else _before(kept)
    parts: dict[ShownPart, Longs] = {"valid": asked[early], "test": asked[~early]}
    return _asked_of_shown(kept, shown, parts, before, kept.everyone, notes)


def _impressions_later(kept: Kept, settings: Mapping[str, float]) -> Parts:
    shown, usable, notes = _askable(kept)
    if shown.times is None:
        raise HomebodyError(
            f"The impressions of {kept.population.name} have no times, so none is later than others: choose "
            "impressions-people, or give the file of impressions a column time."
        )
    order = usable[np.argsort(shown.times[usable], kind="stable")]
    test, valid = (int(settings[name] * len(order) + 0.5) for name in ("test", "valid"))
    times = shown.times[order]
    # Impressions of the same time are on the same side.
    late, held = (int(np.searchsorted(times, times[min(len(order) - n, len(order) - 1)])) for n in (test, test + valid))
    if not held:
        raise HomebodyError(
            f"The split leaves no impression of {kept.population.name} to learn from: lower its test or valid."
        )
    parts: dict[ShownPart, Longs] = {
        "train": np.sort(order[:held]),
        "valid": _asked(shown, np.sort(order[held:late])),
        "test": _asked(shown, np.sort(order[late:])),
    }
    return _asked_of_shown(kept, shown, parts, _before(kept), kept.everyone, notes, since=int(times[held]))


def _impressions_people(kept: Kept, settings: Mapping[str, float]) -> Parts:
    shown, usable, notes = _askable(kept)
    people = np.unique(shown.users[usable])
    group = np.zeros(len(kept.lengths), dtype=np.int64)
    group[people] = _groups(kept, len(people), "users", settings)
    part = group[shown.users[usable]]
    asked = _asked(shown, usable)
    held = group[shown.users[asked]]
    parts: dict[ShownPart, Longs] = {"train": usable[part == 0], "valid": asked[held == 1], "test": asked[held == 2]}
    return _asked_of_shown(kept, shown, parts, _before(kept), group == 0, notes)


def _askable(kept: Kept) -> tuple[Impressions, Longs, tuple[str, ...]]:
    """The impressions, the numbers of those in which something is clicked and something is not, and a note."""
    shown = kept.population.impressions
    if shown is None or not len(shown.users):
        raise HomebodyError(
            f"{kept.population.name} has no impressions, which this split needs; give a file with --impressions FILE."
        )
    clicks = pointers(shown.clicked)[shown.indptr]
    mixed = (np.diff(clicks) > 0) & (np.diff(clicks) < np.diff(shown.indptr))
    some = int((~mixed).sum())
    them = "it" if some == 1 else "them"
    many = several(some, "impression is", "impressions are")
    notes = (f"{many} not asked: nothing or everything in {them} was clicked.",) if some else ()
    return shown, np.flatnonzero(mixed), notes


def _asked(shown: Impressions, numbers: Longs) -> Longs:
    """Those of these impressions that a model may be asked about."""
    return numbers if shown.asked is None else numbers[shown.asked[numbers]]


def _before(kept: Kept) -> Longs | None:
    """How many of its user's interactions that count came before each impression; None if nothing is known."""
    before, shown = kept.population.before_impressions(), kept.population.impressions
    if before is None or shown is None:
        return None
    counts = pointers(np.bincount(kept.rows, minlength=kept.population.n_interactions))
    start = kept.population.indptr[shown.users]
    return counts[start + before] - counts[start]


def _asked_of_shown(
    kept: Kept,
    shown: Impressions,
    parts: Mapping[ShownPart, Longs],
    before: Longs | None,
    learn: Bools,
    notes: tuple[str, ...],
    since: int | None = None,
) -> Parts:
    """Impressions in parts. What a user did after the first that is asked of them is withheld from training.

    since: the time of the first that is asked of anybody; what anybody did from then on is withheld too.
    """
    valid, test = (len(np.unique(shown.users[parts[held]])) for held in ("valid", "test"))
    early = several(len(parts["valid"]), "impression")
    said = f"{several(valid, 'user is', 'users are')} asked about {early} in validation, {test:,} about "
    notes = (*notes, f"{said}{len(parts['test']):,} in test.")
    if "train" in parts:
        whose = several(len(np.unique(shown.users[parts["train"]])), "user")
        notes = (*notes, f"{several(len(parts['train']), 'impression')} of {whose} can be learnt from.")
    nothing = np.zeros(len(kept.lengths), dtype=np.int64)
    learnt = kept.lengths.copy()
    if before is not None:
        asked = np.concatenate([parts["valid"], parts["test"]])
        np.minimum.at(learnt, shown.users[asked], before[asked])
        if since is not None and kept.population.times is not None:
            early_rows = kept.population.times[kept.rows] < since
            learnt = np.minimum(learnt, np.bincount(kept.owner[early_rows], minlength=len(learnt)))
        if "train" in parts:  # they came before those that are asked, so nothing before them is to be withheld
            np.maximum.at(learnt, shown.users[parts["train"]], before[parts["train"]])
    withheld = kept.lengths - learnt
    if withheld.any():
        many = several(int(withheld.sum()), "interaction is", "interactions are")
        notes = (*notes, f"{many} withheld from training: they came after an impression that is asked.")
    made = _by_count(kept, nothing, nothing, learn, notes, withheld)
    return made._replace(shown=parts, before=before)


WAYS: dict[str, Way] = {
    "leave-one-out": Way("one interaction of each user for validation, one for test", {}, _leave_one_out),
    "ratio": Way("a share of each user's interactions", {"test": 0.2, "valid": 0.1}, _ratio),
    "held-out-users": Way(
        "a share of the users: they adapt to some of what they have and are asked about the rest",
        {"test": 0.2, "valid": 0.1, "asked": 0.5, "above": -math.inf},
        _held_out_users,
    ),
    "cold-users": Way("a share of the users, who bring no history", {"test": 0.1, "valid": 0.1}, _cold_users),
    "cold-items": Way("a share of the items, which nobody had in training", {"test": 0.1, "valid": 0.1}, _cold_items),
    "cold-both": Way("new users and new items together", {"test": 0.1, "valid": 0.1}, _cold_both),
    "impressions": Way("what was clicked among what was shown", {"valid": 0.5}, _impressions),
    "impressions-later": Way(
        "what was clicked among what was shown: the last impressions in time",
        {"test": 0.2, "valid": 0.1},
        _impressions_later,
    ),
    "impressions-people": Way(
        "what was clicked among what was shown: the impressions of a share of the users",
        {"test": 0.2, "valid": 0.1},
        _impressions_people,
    ),
}


def settings_of(way: str) -> dict[str, float]:
    """The settings of a split, as given or by default.

    >>> settings_of("held-out-users:valid=0")["valid"], settings_of("ratio")["test"]
    (0.0, 0.2)
    """
    return _parse(way)[1]


def _parse(way: str) -> tuple[str, dict[str, float]]:
    name, _, rest = way.partition(":")
    refuse_unknown("split", [name], WAYS)
    settings = dict(WAYS[name].settings)
    for setting in filter(None, rest.split(",")):
        key, _, text = (part.strip() for part in setting.partition("="))
        if not settings:
            raise HomebodyError(f"The split {name} has no settings: leave out ':{rest}'.")
        refuse_unknown(f"setting of the split {name}", [key], settings)
        try:
            settings[key] = float(text)
        except ValueError:
            raise HomebodyError(f"The split takes {key} as a share such as {key}=0.2, not '{setting}'.") from None
        # valid may be 0: without validation, the last round is kept.
        fewest = settings[key] >= 0 if key == "valid" and name != "impressions" else settings[key] > 0
        if key == "above":
            if not math.isfinite(settings[key]):
                raise HomebodyError(f"The split's above must be a rating, not {text}.")
        elif not (fewest and settings[key] < 1):
            raise HomebodyError(f"The split's {key} must be a share between 0 and 1, not {text}.")
    if settings.get("test", 0.0) + settings.get("valid", 0.0) >= 1 and "test" in settings:
        raise HomebodyError(
            "The split's test and valid shares leave nothing to train on: give shares whose sum is below 1."
        )
    return name, settings


def _kept(population: Population, protocol: Protocol, how: How, seed: int) -> tuple[Kept, list[str]]:
    # There may be very many: 32 bits wherever they suffice.
    rows: Rows = np.arange(population.n_interactions)
    rows = rows.astype(np.int32) if len(rows) < 2**31 else rows
    indptr = population.indptr
    first = kernels.first_only(indptr, population.items, population.n_items)
    repeats = int((~first).sum())
    notes = []
    if repeats and protocol == "published":
        many = several(repeats, "repeated interaction is", "repeated interactions are")
        notes = [f"{many} kept: a held-out item may stand in training too."]
    elif repeats:
        many = several(repeats, "repeated interaction was", "repeated interactions were")
        notes = [f"{many} left out: each user's first with an item counts."]
        indptr, rows = pointers(first)[indptr], rows[first]
    if how == "latest-first" and population.times is None:
        raise HomebodyError(f"{population.name} has no times, so nothing is the latest: leave out latest-first.")
    if how in ("latest-first", "latest-random"):
        owner = np.repeat(np.arange(population.n_users), np.diff(indptr))
        # Without times, all of a history is one tie.
        times = np.zeros(len(rows), dtype=np.int64) if population.times is None else population.times[rows]
        ties = -rows if how == "latest-first" else _drawn(seed, owner, population.items[rows], times)
        rows = rows[np.lexsort((ties, times, owner))]
    return Kept(population, indptr, rows, how, seed), notes


def _drawn(seed: int, users: Longs, items: Ints, times: Longs) -> Longs:
    """A random number for each interaction, which depends on nothing but these: not on the order of the file."""
    stream = Rng.of(seed, "ties in time")
    return stream.fold(*map(torch.from_numpy, (users, items, times))).key.numpy()


def _groups(kept: Kept, count: int, what: str, settings: Mapping[str, float]) -> Longs:
    """2 for the share that test takes, 1 for validation's, 0 for the others; at least one each."""
    order = kept.shuffled(count, what)
    test, valid = (max(1, int(settings[name] * count + 0.5)) if settings[name] else 0 for name in ("test", "valid"))
    if test + valid >= count:
        raise HomebodyError(f"{kept.population.name} has {count:,} {what}: too few to hold {test + valid:,} out.")
    group = np.zeros(count, dtype=np.int64)
    group[order[:test]], group[order[test : test + valid]] = 2, 1
    return group


def _by_count(
    kept: Kept, valid: Longs, test: Longs, learn: Bools, notes: tuple[str, ...], withheld: Longs | int = 0
) -> Parts:
    """So many of each user's interactions for validation and test, the latest or random ones; the last are withheld."""
    rows = kept.rows
    start, end = kept.indptr[:-1], kept.indptr[1:]
    stop = end - withheld
    if kept.how == "random":
        keys = Rng.of(kept.seed, "held out").fold(torch.arange(len(valid))).key.numpy()
        rows = kernels.hold_out(start, stop, rows, keys, valid + test)
    return Parts(rows, np.stack([start, stop - test - valid, stop - test, stop, end]), learn, notes=notes)


def _by_part(kept: Kept, part: Longs, learn: Bools, items: Longs) -> Parts:
    """Each interaction in the part of this number; items of any group but 0 do not exist in training."""
    owner = kept.owner
    order = np.lexsort((part, owner))
    sizes = np.bincount(owner * 4 + part, minlength=4 * len(kept.lengths)).reshape(-1, 4)
    bounds = np.concatenate([[kept.indptr[:-1]], kept.indptr[:-1] + np.cumsum(sizes, axis=1).T])
    absent = np.flatnonzero(items).astype(np.int32)
    some = several(int((items == 1).sum()), "item appears", "items appear")
    share = f"{some} in validation and {(items == 2).sum():,} in test alone: "
    notes = [share + "in training nobody has them, nor meets them as negatives; they are ranked among themselves."]
    if sizes[:, 3].any():
        notes.append(several(int(sizes[:, 3].sum()), "interaction is", "interactions are") + " in no part.")
    validation, test = (np.flatnonzero(items != number).astype(np.int32) for number in (1, 2))
    unasked: dict[Held, Ints] = {"valid": validation, "test": test}
    return Parts(kept.rows[order], bounds, learn, absent, unasked, notes=tuple(notes))


def _left_out(done: Split) -> list[str]:
    """A note about users without training items; a split that leaves nothing to train on or evaluate is refused."""
    name, way = done.population.name, done.way
    if not (done.learn & (done.lengths > 0)).any():
        raise HomebodyError(f"The split {way} leaves no user of {name} with an interaction to train on.")
    asked = {
        held: bool(len(done.shown[held]) if done.shown is not None else (done.sizes(held) > 0).any())
        for held in ("valid", "test")
    }
    for held, word in (("valid", "validation"), ("test", "test")):
        if not asked[held] and (held == "test" or _parse(way)[1].get("valid") != 0):
            raise HomebodyError(f"The split {way} leaves nothing of {name} for {word}: it has too few interactions.")
    idle = int((done.learn & (done.lengths == 0)).sum())
    many = several(idle, "user has no training items and takes", "users have no training items and take")
    return [f"{many} no part."] if idle else []


def _known(kind: str, name: str, names: Any) -> Any:
    refuse_unknown(kind, [name], get_args(names))
    return name
