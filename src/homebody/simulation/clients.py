"""Clients at work in this process, many at once: all those of a simulation, or the people of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import vmap

from homebody.core import (
    Batch,
    Data,
    Evaluated,
    Method,
    Newcomer,
    Recommended,
    Rows,
    Shown,
    Tree,
    Update,
    Users,
    written,
)
from homebody.data.splits import Split
from homebody.errors import Diverged, HomebodyError, in_short
from homebody.evaluation import (
    CUTOFFS,
    Block,
    ImpressionRows,
    Question,
    first_lists,
    questions,
    sliced,
    sound,
    summarise,
)
from homebody.methods.kernels import adapt_many, indexed, kernel_of, train_many
from homebody.privacy import Channel
from homebody.rng import Rng
from homebody.simulation.newcomers import NewcomerSplit, moment, newcomer_split
from homebody.simulation.rankings import Ranking, best_new
from homebody.simulation.states import LocalStore

__all__ = ["SAMPLES_AT_ONCE", "Clients", "usable_device"]

SAMPLES_AT_ONCE = 1 << 15
"""Padded interactions that clients work on together: large enough to be fast, small enough for caches."""
SHOWN_AT_ONCE = 1 << 23
"""Padded items of impressions that clients work on together: they take 9 bytes each."""
SCORES_AT_ONCE = 1 << 21
ON_ONE_THREAD = 1 << 9
"""Up to so many padded interactions, one thread of torch is faster than several."""
USERS_AT_ONCE = 24
"""At least so many users are scored together, however large the catalogue."""
ADAPTED_BYTES = 64 << 20
"""Memory for the adapted parameters of clients that are scored together."""
CACHED_BYTES = 256 << 20
"""Evaluation asks the same questions every round. They are cached up to this size."""


class QuestionGroup(NamedTuple):
    """Clients of similar length that are scored together, and their held-out items."""

    users: Users
    data: tuple[Tensor, ...]
    questions: dict[str, Question]
    items: Tensor | None = None
    """(users, W) what each of them was shown, if the questions are impressions: these name columns of it."""


class Clients:
    """Does the work of a split's clients, vectorised over those of similar length. The caller uses the results.

    fused: use a method's own kernels if it has any; otherwise run `client` under vmap.
    cutoffs, slices: which metrics `evaluate` computes, and for which groups of users beside everyone.
    """

    stream: type[Rng] = Rng
    """How a client draws its random numbers."""
    listing: bool = False
    """Whether `evaluate` gives everyone's first items too, which takes a fifth longer."""

    def __init__(
        self,
        split: Split,
        *,
        device: str = "cpu",
        fused: bool = True,
        cutoffs: Sequence[int] = CUTOFFS,
        slices: Sequence[str] = (),
    ) -> None:
        given: object = split
        if not isinstance(given, Split):
            raise HomebodyError(
                f"A {type(self).__name__} runs the clients of a split, such as hb.leave_one_out(people), not "
                f"{in_short(given)}."
            )
        self.split = split
        self.cutoffs, self.slices = tuple(cutoffs), tuple(slices)
        self._of_slices = sliced(split.population, slices)
        self.device = usable_device(device)
        self.fused = fused
        self.catalogue = split.catalogue(self.device)
        self._features, self._contexts = (
            {name: torch.from_numpy(col.values).to(self.device) for name, col in split.encoded[unit].columns.items()}
            for unit in ("users", "contexts")
        )
        self._members, self._public = split.members(), split.public_members()
        taking_part = np.union1d(self._members, self._public)
        self._store = LocalStore(split.lengths, np.union1d(taking_part, split.asked()))
        self._rng = Rng.of(0)
        self._base_step = np.full(split.n_users, -1, dtype=np.int64)
        self._bases: dict[int, Tree] = {}
        self._kept: list[QuestionGroup] | None = None
        self._uses: tuple[str, ...] = ()
        self._rates = False

    def begin(self, method: Method, rng: Rng) -> None:
        uses, rates = (*method.needs, *method.uses), method.scoring.predicts == "ratings"
        if (self._uses, self._rates) != (uses, rates):
            self._uses, self._rates, self._kept = uses, rates, None
        self._members, self._public = self.split.members(method.needs), self.split.public_members(method.needs)
        self._store.clear()
        self._rng = self._own(rng)
        self._base_step[:] = -1
        self._bases.clear()

    def message(self, method: Method, shared: Tree, user: int, rng: Rng) -> Update:
        """What one client would send in this round, after its half of the channel. The client keeps nothing of it."""
        update, *_ = self._work(method, shared, np.array([user]), None, self._own(rng))
        return torch.utils._pytree.tree_map(lambda leaf: leaf[0], update)

    def participations(self, method: Method, user: int, rng: Rng, count: int) -> Batch:
        """The batches of one client in so many rounds, stacked."""
        users = np.array([user])
        data = tuple(part.expand(count, *part.shape[1:]) for part in self._data(users))
        streams = self._streams(self._own(rng), users).fold(torch.arange(count, device=self.device))
        return self._batches(method, streams, data)

    def private_state(self, method: Method, shared: Tree, user: int) -> Tree:
        """What one client holds; if it never took part, what it would begin with."""
        state: Tree = torch.utils._pytree.tree_map(lambda leaf: leaf[0], self._locals(method, shared, np.array([user])))
        return state

    def requests(self, method: Method, users: Users, rng: Rng) -> Iterator[tuple[Users, dict[str, Tensor]]]:
        """The rows that these clients would request from the server in this round, by groups; padded with -1."""
        rng = self._own(rng)
        for some, width in self._store.groups(users, SAMPLES_AT_ONCE):
            streams = self._streams(rng, some)
            yield some, vmap(method.asks)(self._batches(method, streams, self._data(some, width)))

    def _own(self, rng: Rng) -> Rng:
        """This stream on the clients' device, as the class that they draw with."""
        return self.stream(rng.key.to(self.device))

    def _streams(self, rng: Rng, users: Users) -> Rng:
        return rng.fold(self._tensor(self.split.numbered(users)))

    def _work(
        self, method: Method, shared: Tree, users: Users, width: int | None, rng: Rng, *, summed: bool = False
    ) -> tuple[Update, Tree, dict[str, Tensor]]:
        """A round of some clients: the update that each sends, the state that it keeps, and the rows it requests.

        summed: nobody sees more than the sum of the updates, so the devices' noise is added to that sum at once, and
        the updates may be summed already: see `_added`.
        """
        streams = self._streams(rng, users)
        data = self._data(users, width, avoided=method.about.draws_negatives)
        batches = self._batches(method, streams, data)
        with _threads_for(data[0].numel()):
            locals_ = self._locals(method, shared, users)
            if summed and (added := self._added(method)):
                total, state = added(method, shared, locals_, batches)
                return {name: value[None] for name, value in total.items()}, state, {}
            update, state = train_many(method, shared, locals_, batches, fused=self.fused)
        if update and not method.about.sends:
            raise HomebodyError(
                f"{type(method).__name__} says that it sends nothing, and is charged so; its update is not empty."
            )
        channel = method.uplink
        update = self._leave(channel, update, streams, summed=summed) if channel.stages else written(update)
        return update, state, vmap(method.asks)(batches) if channel.asks_rows else {}

    def _added(self, method: Method) -> Callable[[Any, Tree, Tree, Batch], tuple[Update, Tree]] | None:
        """The kernel that gives the sum of updates, if there is one and they leave the devices as they are."""
        channel = method.uplink
        plain = self.fused and not channel.stages and not channel.asks_rows
        return kernel_of(method, self.device).total if plain else None

    def _leave(self, channel: Channel, update: Update, streams: Rng, *, summed: bool) -> Update:
        """The updates of these clients after the device half of the channel."""
        stream = streams.private.fold("uplink")
        if channel.samples and any(not isinstance(value, Tensor | Rows) for value in update.values()):
            return channel.devices(update, stream)
        half = channel.for_sum if summed else channel.device
        return vmap(lambda key, message: half(message, Rng(key)))(stream.key, written(update))

    def _batches(self, method: Method, streams: Rng, data: tuple[Tensor, ...]) -> Batch:
        """One batch per client, to train or to adapt."""

        def prepare(key: Tensor, *columns: Tensor) -> Batch:
            return method.prepare(self._client_data(*columns), self.stream(key))

        return vmap(prepare)(streams.key, *data)

    def evaluate(self, method: Method, shared: Tree) -> Evaluated:
        return self.measured(self.scored(method, shared))

    def scored(self, method: Method, shared: Tree) -> Iterator[Block]:
        """Everyone's scores with what they are asked, by groups. The groups are the same for every method."""
        return self._blocks(method, indexed(method, shared, self.catalogue, fused=self.fused))

    def measured(self, blocks: Iterable[Block]) -> Evaluated:
        """The metrics of such scores."""
        return summarise(sound(blocks), self.cutoffs, self._of_slices, lists=self.listing)

    def first_items(self, method: Method, shared: Tree) -> dict[str, Tensor]:
        """What everyone who is asked would be recommended first: see `homebody.evaluation.first_lists`."""
        return first_lists(self.scored(method, shared), self.cutoffs)

    def _blocks(self, method: Method, shared: Tree) -> Iterator[Block]:
        """Everyone's scores with their held-out items. With contexts, each question is scored in its own."""
        everything = torch.arange(self.catalogue.n_items, device=self.device)
        for users, data, asked, shown in self._question_groups():
            if shown is not None:
                yield Block(users, self._scores(method, shared, users, data, shown), asked, impressions=True)
                continue
            without = any(question.rows is None for question in asked.values())
            if without or not (self._contexts and "contexts" in self._uses):
                yield Block(users, self._scores(method, shared, users, data, everything), asked)
                continue
            owner = torch.cat([question.owner for question in asked.values()])
            rows = torch.cat([question.rows for question in asked.values() if question.rows is not None])
            held = torch.arange(len(asked), device=self.device).repeat_interleave(
                torch.tensor([len(question.owner) for question in asked.values()], device=self.device)
            )
            place = _place_in_group(owner)
            most = int(place.max()) + 1
            size = max(1, 4 * SCORES_AT_ONCE // (most * self.catalogue.n_items))
            for start in range(0, len(users), size):
                columns, some = tuple(part[start : start + size] for part in data), users[start : start + size]
                inside = (owner >= start) & (owner < start + size)
                where = (owner[inside] - start, place[inside])
                now = {name: _laid_out(v[rows[inside]], where, len(some), most) for name, v in self._contexts.items()}
                scores = self._scores(method, shared, some, columns, everything, now)
                for number, (name, question) in enumerate(asked.items()):
                    chosen = inside[held == number]
                    theirs = held[inside] == number
                    at = where[0][theirs], where[1][theirs]
                    order = torch.arange(len(at[0]), device=self.device)
                    picked = question.taken(chosen, order)
                    yield Block(some[at[0].cpu().numpy()], scores[at], {name: picked})

    def recommend(
        self, method: Method, shared: Tree, user: int, k: int, now: Mapping[str, Tensor] | None = None
    ) -> list[tuple[int, float]]:
        """now: the context of the request, each value of shape (1, 1, …)."""
        scores = self.scores(method, shared, user, now)[None]
        return best_new(_sound(method, scores), self.split.population, np.array([user]), k).pairs(0)

    def rankings(
        self, method: Method, shared: Tree, users: Users, k: int, now: Mapping[str, Tensor] | None = None
    ) -> Iterator[Ranking]:
        """The best new items of many clients, by groups of similar length, in any order.

        now: the context of all requests, as in `recommend`.
        """
        shared = indexed(method, shared, self.catalogue, fused=self.fused)
        everything, around = torch.arange(self.catalogue.n_items, device=self.device), None
        for some, width in self._scored_together(users):
            if now:
                around = {name: v.to(self.device).expand(len(some), *v.shape[1:]) for name, v in now.items()}
            scores = self._scores(method, shared, some, self._data(some, width), everything, around)
            scores = _sound(method, scores.reshape(len(some), -1).cpu())
            yield best_new(scores, self.split.population, some, k)

    def _scored_together(self, users: Users) -> Iterator[tuple[Users, int | None]]:
        """These clients in groups that are scored at once, with the padded length of each."""
        most = max(USERS_AT_ONCE, SCORES_AT_ONCE // self.split.n_items)
        known = self._store.knows(users)
        yield from self._store.groups(users[known], SAMPLES_AT_ONCE, most)
        others = users[~known]  # they neither train nor are asked
        yield from ((others[start : start + USERS_AT_ONCE], None) for start in range(0, len(others), USERS_AT_ONCE))

    def scores(self, method: Method, shared: Tree, user: int, now: Mapping[str, Tensor] | None = None) -> Tensor:
        """How well each item of the catalogue fits one client, in the context of the request."""
        if not 0 <= user < self.split.n_users:
            raise HomebodyError(f"There is no user {user}: users are numbered 0 to {self.split.n_users - 1}.")
        users, now = np.array([user]), now and {name: value.to(self.device) for name, value in now.items()}
        shared = indexed(method, shared, self.catalogue, fused=self.fused)
        everything = torch.arange(self.catalogue.n_items, device=self.device)
        return self._scores(method, shared, users, self._data(users), everything, now).flatten(0, -2)[0].cpu()

    def recommend_in(self, method: Method, shared: Tree, user: int, k: int, now: Mapping[str, object]) -> Recommended:
        """A client's best new items in a context, given by the names and values of the data source."""
        given = moment(method, self.split, now)
        return Recommended(self.recommend(method, shared, user, k, given.now), given.notes)

    def rankings_in(
        self, method: Method, shared: Tree, users: Users, k: int, now: Mapping[str, object]
    ) -> Iterator[Ranking]:
        """As `rankings`, in a context given as in `recommend_in`."""
        return self.rankings(method, shared, users, k, moment(method, self.split, now).now)

    def recommend_for(self, method: Method, shared: Tree, newcomer: Newcomer, k: int) -> Recommended:
        client, encoded = self.newcomer(method, newcomer)
        return Recommended(client.recommend(method, shared, 0, k, encoded.now), encoded.notes)

    def newcomer(self, method: Method, newcomer: Newcomer) -> tuple[Clients, NewcomerSplit]:
        """Somebody who took no part in training, as the only client, number 0; and how they were encoded."""
        encoded = newcomer_split(method, self.split, newcomer)
        client = Clients(encoded.split, device=str(self.device), fused=self.fused)
        client.begin(method, self._rng)
        return client, encoded

    def _remember(self, shared: Tree, users: Users, step: int) -> None:
        """These clients rank with the parameters that they trained from. Parameters without any client are dropped."""
        self._base_step[users] = step
        self._bases[step] = shared
        in_use = set(np.unique(self._base_step).tolist())
        self._bases = {number: tree for number, tree in self._bases.items() if number in in_use}

    def common_base(self, shared: Tree) -> Tree:
        """The shared parameters that most clients rank from, where each ranks from those that it trained from."""
        steps, often = np.unique(self._base_step[self._base_step >= 0], return_counts=True)
        return self._bases.get(int(steps[often.argmax()]), shared) if len(steps) else shared

    def share_with(self, other: Clients) -> None:
        """Let another simulator work for the same clients, with the same states and caches, instead of its own.

        For simulators that change how clients rank, or that add clients of their own. Only one of the two may train.
        """
        vars(other).update(vars(self))

    def _tensor(self, users: Users) -> Tensor:
        return torch.from_numpy(users).to(self.device)

    def _data(
        self, users: Users, width: int | None = None, *, avoided: bool = True, known: Users | None = None
    ) -> tuple[Tensor, ...]:
        """The data on these clients' devices: their interactions, one column per feature and context, ratings, and the
        impressions that they learn from; of the last three, what the method reads.

        known: how many of each client's first interactions to give instead of those of the training part.
        """
        padded = self._here_of(self.split.padded(users, width, avoided=avoided, known=known))
        features = (values[self._tensor(users)] for values in self._features.values())
        shown = self._here_of(self.split.padded_shown(users)) if self._learns_impressions else ()
        contexts, rated = self._taken
        if not contexts and not rated:
            return (*padded, *features, *shown)
        rows = torch.from_numpy(self.split.padded_rows(users, width, known=known)).to(self.device)
        of_rows = [*contexts.values(), *([self._ratings] if rated else [])]
        return (*padded, *features, *(_at(values, rows) for values in of_rows), *shown)

    def _here_of(self, arrays: Iterable[npt.NDArray[np.generic]]) -> list[Tensor]:
        return [torch.from_numpy(part).to(self.device) for part in arrays]

    @property
    def _most_shown(self) -> int | None:
        """How many clients' impressions fit into the memory for those that work at once; None: there are none."""
        if not self._learns_impressions:
            return None
        count, width = self.split.most_shown
        return max(1, SHOWN_AT_ONCE // (count * width))

    @property
    def _learns_impressions(self) -> bool:
        """Whether clients give their method the impressions that they learn from."""
        return "impressions" in self._uses

    @property
    def _taken(self) -> tuple[dict[str, Tensor], bool]:
        """What the method reads of each interaction: its contexts, and whether it reads the rating."""
        contexts = self._contexts if "contexts" in self._uses else {}
        return contexts, "ratings" in self._uses and self.split.population.ratings is not None

    @cached_property
    def _ratings(self) -> Tensor:
        assert self.split.population.ratings is not None
        return torch.from_numpy(self.split.population.ratings).to(self.device)

    def _client_data(self, items: Tensor, valid: Tensor, excluded: Tensor, *others: Tensor) -> Data:
        shown = None
        if self._learns_impressions:
            others, shown = others[:-3], Shown(*others[-3:])
        contexts, rated = self._taken
        ratings = others[-1] if rated else None
        features = dict(zip(self._features, others, strict=False))
        around = dict(zip(contexts, others[len(features) :], strict=False))
        return Data(items, valid, excluded, self.catalogue, features, around, ratings, shown=shown)

    def _locals(self, method: Method, shared: Tree, users: Users) -> Tree:
        """The states of these clients. New clients draw theirs."""
        new = ~self._store.holds(users)
        if new.all():
            return self._fresh(method, shared, users)
        if new.any():
            self._store.put(users[new], self._fresh(method, shared, users[new]))
        return self._store.get(users)

    def _fresh(self, method: Method, shared: Tree, users: Users) -> Tree:
        keys = self._streams(self._rng.fold("local"), users).key
        return vmap(lambda key: method.init_local(shared, self.stream(key)))(keys)

    def _scores(
        self,
        method: Method,
        shared: Tree,
        users: Users,
        data: tuple[Tensor, ...],
        items: Tensor,
        now: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """(users, items) as each device would compute them, with the parameters it holds; items in chunks.

        items: the same for all, (N,), or (users, W) of each one's own, which are not cut up.
        now: several contexts per user; the result is then (users, contexts, items).
        """
        own = items.ndim > 1
        dims = (0 if own else None, *[0] * (2 + len(data)))
        often = len(next(iter(now.values()))[0]) if now else 1
        size = max(1, SCORES_AT_ONCE // (len(users) * often * method.scoring.numbers))
        chunks = [items] if own else torch.split(items, size)
        out = torch.empty(0)
        for chosen, tree, locals_ in self._holdings(method, shared, users, data):
            columns = [part[chosen] for part in data]
            asked = {name: values[chosen] for name, values in (now or {}).items()}
            for number, chunk in enumerate(chunks):
                score = vmap(partial(self._score_one, method, tree), in_dims=dims)
                values: Tensor = score(chunk[chosen] if own else chunk, locals_, asked, *columns)
                if values.shape[-1] != chunk.shape[-1] or values.ndim != (3 if now else 2):
                    raise HomebodyError(
                        f"{type(method).__name__}.score() must give one number for each of {chunk.shape[-1]} items, "
                        f"not {tuple(values.shape[2 if now else 1 :])}."
                    )
                if isinstance(chosen, slice) and len(chunks) == 1:
                    return values
                out = out if len(out) else values.new_empty(len(users), *values.shape[1:-1], items.shape[-1])
                out[chosen, ..., number * size : number * size + chunk.shape[-1]] = values
        return out

    def _score_one(
        self, method: Method, tree: Tree, items: Tensor, local: Tree, now: Mapping[str, Tensor], *columns: Tensor
    ) -> Tensor:
        data = self._client_data(*columns)
        if not now:
            return method.score(tree, local, data, items)
        return vmap(lambda around: method.score(tree, local, data._replace(now=around), items))(dict(now))

    def _holdings(
        self, method: Method, shared: Tree, users: Users, data: tuple[Tensor, ...]
    ) -> Iterator[tuple[slice | Tensor, Tree, Tree]]:
        """Groups of these clients with the shared and local parameters that they rank with; a slice means all."""
        newcomer, guest, returning = -2, -3, -4
        held = self._store.holds(users)
        steps = np.where(held, self._base_step[users], newcomer)
        adapts = (~self.split.learn[users] & method.scoring.adapts) | (method.scoring.parameters == "adapted")
        adapts &= data[1].any(dim=1).cpu().numpy()
        steps[adapts] = np.where(held[adapts], returning, guest)
        for step in np.unique(steps):
            same = np.flatnonzero(steps == step)
            fresh, adapting = step in (newcomer, guest), step in (guest, returning)
            # A client that adapts may hold its own copy of all parameters.
            whole = sum(value.nbytes for value in shared.values())
            size = max(1, ADAPTED_BYTES // max(1, whole)) if adapting else len(same)
            for chosen in (same[start : start + size] for start in range(0, len(same), size)):
                some, where = users[chosen], slice(None) if len(chosen) == len(users) else self._tensor(chosen)
                locals_ = self._fresh(method, shared, some) if fresh else self._store.get(some)
                if adapting:
                    locals_ = self._adapted(method, shared, some, locals_, tuple(part[where] for part in data))
                yield where, self._bases.get(int(step), shared), locals_

    def _adapted(self, method: Method, shared: Tree, users: Users, locals_: Tree, data: tuple[Tensor, ...]) -> Tree:
        """The local parameters of clients after they adapted to their data. They are not stored."""
        streams = self._streams(self._rng.fold("adapt"), users)
        batches = self._batches(method, streams, data)
        with _threads_for(data[0].numel()):
            return adapt_many(method, shared, locals_, batches, fused=self.fused)

    def _question_groups(self) -> Iterator[QuestionGroup]:
        if self._kept is not None:
            yield from self._kept
            return
        groups: list[QuestionGroup] = []
        size = 0
        for block in self._impression_groups() if self.split.shown is not None else self._held_out_groups():
            size += sum(part.nbytes for part in block.data)
            size += sum(part.nbytes for question in block.questions.values() for part in question if part is not None)
            if size <= CACHED_BYTES:
                groups.append(block)
            yield block
        if size <= CACHED_BYTES:
            self._kept = groups

    def _held_out_groups(self) -> Iterator[QuestionGroup]:
        for users, width in self._scored_together(self.split.asked()):
            one_by_one = bool(self._taken[0])
            rated = self._rates and self.split.population.ratings is not None
            asked = questions(self.split, users, self.device, one_by_one, rated)
            yield QuestionGroup(users, self._data(users, width), asked)

    def _impression_groups(self) -> Iterator[QuestionGroup]:
        """Clients as they were when they were shown what they are asked about; only that is scored."""
        rows = ImpressionRows(self.split)
        for some in rows.pieces(self._store.order(rows.users, rows.known), SAMPLES_AT_ONCE, SCORES_AT_ONCE):
            asked = rows.asked(some, self.device)
            data = self._data(asked.users, known=asked.known)
            yield QuestionGroup(asked.users, data, asked.questions, torch.from_numpy(asked.items).to(self.device))


def _sound(method: Method, scores: Tensor) -> Tensor:
    """Scores (users, items) of which each is a number; somebody of whom none is one is an error."""
    if scores.shape[1] and bool(torch.isnan(scores).all(dim=1).any()):
        raise Diverged(
            f"{type(method).__name__} adapted to this person until none of its scores was a number: check the "
            "ratings that were given, if any, or train with a smaller step of adapting."
        )
    return scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)  # topk puts what is no number first


@contextmanager
def _threads_for(interactions: int) -> Iterator[None]:
    """Limit torch to the threads that so few interactions can use. Compiled kernels have threads of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if interactions <= ON_ONE_THREAD else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _place_in_group(group: Tensor) -> Tensor:
    """For each entry, the number of earlier entries of the same group.

    >>> _place_in_group(torch.tensor([3, 1, 3, 3])).tolist()
    [0, 0, 1, 2]
    """
    order = group.argsort(stable=True)
    ordered = group[order]
    first = torch.searchsorted(ordered, ordered)
    return torch.empty_like(group).scatter_(0, order, torch.arange(len(group), device=group.device) - first)


def _laid_out(values: Tensor, where: tuple[Tensor, Tensor], rows: int, columns: int) -> Tensor:
    """A table of this size with these values at these places, and zeros elsewhere."""
    table = values.new_zeros(rows, columns, *values.shape[1:])
    table[where] = values
    return table


def _at(values: Tensor, rows: Tensor) -> Tensor:
    """The values of these rows; zeros for padding."""
    there = (rows >= 0).reshape(*rows.shape, *[1] * (values.ndim - 1))
    return torch.where(there, values[rows.clamp(min=0)], torch.zeros((), dtype=values.dtype, device=values.device))


def usable_device(name: str) -> torch.device:
    """The device of this name. Raises `HomebodyError` if it cannot be used."""
    try:
        device = torch.device(name)
        (torch.zeros(1, device=device) + 1).item()
    except (RuntimeError, AssertionError) as error:
        raise HomebodyError(
            f"The device '{name}' cannot be used here; give --device cpu, or cuda where there is a GPU."
        ) from error
    return device
