"""The people of one device as clients: the same work as in a simulation, for one person at a time."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from homebody.core import Batch, Method, Rows, Tree, Update, Users, written
from homebody.data import Population
from homebody.data.partitions import LEAST, everything, leave_one_out
from homebody.errors import HomebodyError
from homebody.evaluation import Block, questions, summarise
from homebody.federation import wire
from homebody.federation.device.home import Home
from homebody.federation.device.impressions import Ranked
from homebody.federation.device.models import PrivateState
from homebody.federation.device.people import Person
from homebody.federation.schema import FeatureSchema
from homebody.federation.task import acting
from homebody.federation.views import views_of
from homebody.privacy import Channel
from homebody.rng import DeviceRng, Rng, SystemRng
from homebody.simulation.clients import Clients
from homebody.training import carry

if TYPE_CHECKING:
    from homebody.federation.device.apps import Apps

__all__ = ["TOY_ITEMS", "Household", "RankedItem", "carried", "compile_kernels", "feature_schema", "grown", "recommend"]

TOY_ITEMS = 8
"""Items of the catalogue that kernels are compiled with."""


class Household(Clients):
    """Works for one person at a time; private numbers are drawn from the operating system.

    Users are numbered as in the split. `split.numbers` holds the numbers that the server knows them by; random numbers
    that are not private are drawn by those.
    """

    stream = DeviceRng
    app_scores: Mapping[str, Tensor] | None = None
    """Each app's scores of all items, for the person who is ranked for; None: no view is an app."""

    @classmethod
    def of(
        cls,
        home: Home,
        people: Sequence[Person],
        described: Mapping[str, Any],
        n_items: int,
        longest: int | None = None,
        learns: Method | None = None,
    ) -> Self:
        """These people with their interactions with the first items of the catalogue.

        Where devices measure, the last two interactions of each person are held out. longest: only this many of a
        person's latest interactions; None: all. learns: the method that they are to train, which may read impressions.
        """
        population = home.history.population(people, n_items, longest)
        if learns is not None and "impressions" in learns.needs:
            # A message that names a list must not tell the server one that it does not know.
            ranked: Ranked | None = "server" if learns.uplink.facts.names_lists else None
            population = home.impressions.attached(population, people, ranked)
        numbers: npt.NDArray[np.int64] = np.array([described["first"] + person.slot for person in people])
        if described["measures"] and population.lengths.max(initial=0) >= LEAST:
            asked = {name: described[name] for name in ("protocol", "seed", "negatives")}
            split = leave_one_out(population, how=described["held_out"], **asked)
        else:
            ties = "latest-random" if described["held_out"] == "latest-random" else "latest"
            split = everything(population, how=ties, seed=described["seed"])
        if digest := described.get("features", ""):
            profiles = [home.people.profile(person) for person in people]
            split = replace(split, coded=feature_schema(home, digest).encoded(profiles, n_items))
        return cls(replace(split, numbers=numbers), cutoffs=described["cutoffs"])

    def restore(self, home: Home, user: int, state: PrivateState, phase: str, shared: Tree) -> None:
        """Take up a person's stored state, grown to the length of the shared parameters. A state of another phase is
        ignored: each phase starts without one."""
        header, parts = wire.decode_letter(state.bytes)
        if header["phase"] != phase:
            return
        tree = grown(wire.decode_tree(parts["state"]), shared)
        tables = [value for value in tree.values() if isinstance(value, Rows)]
        if any(len(rows.index) and int(rows.index.max()) >= rows.size for rows in tables):
            raise HomebodyError("The private state is about a larger catalogue than the shared parameters.")
        base = None if state.base is None else home.models.shared(state.base)
        self.hold(user, tree, None if base is None else carried(wire.decode_tree(base), shared))

    def hold(self, user: int, state: Tree, base: Tree | None = None) -> None:
        """Set a person's private state, and the shared parameters it was trained from, if ranking needs them."""
        users = np.array([user])
        self._store.put(users, tree_map(lambda leaf: leaf[None], state))
        if base is not None:
            self._remember(base, users, step=user)

    def train(self, method: Method, shared: Tree, user: int, rng: Rng) -> tuple[Update, Tree]:
        """One person's round: the update after the channel, and the private state. Both are finite, or it raises."""
        update, state, _ = self._work(method, shared, np.array([user]), None, self._own(rng))
        sent = {} if method.uplink.stages else {f"update/{name}": value for name, value in update.items()}
        _refuse_not_finite({**state, **sent})
        return _unstacked(update), _unstacked(state)

    def samples(self, method: Method, user: int, rng: Rng) -> Batch:
        """What one person learns from in this round."""
        users = np.array([user])
        streams = self._streams(self._own(rng), users)
        return _unstacked(self._batches(method, streams, self._data(users, avoided=method.about.draws_negatives)))

    def train_views(
        self,
        method: Method,
        shared: Tree,
        user: int,
        batch: Batch,
        apps: Mapping[str, Update],
        leaves: Collection[str],
    ) -> tuple[Update, Tree]:
        """As `train`, where some views are apps, which have given their gradients. The device works on the others.

        leaves: the names of what is sent.
        """
        views, local = views_of(method), self._own_towers(method, shared, user)
        assert views is not None
        update: Update = {}
        state: Tree = {}
        for name in views.people(self.catalogue):
            gradient = apps.get(name)
            if gradient is None:
                gradient = views.view(name, shared, local, batch)
                state |= views.stepped(name, local, gradient) if local else {}
            update |= {f"{name}/{part}": value for part, value in gradient.items() if f"{name}/{part}" in leaves}
        _refuse_not_finite({**state, **update})
        return method.uplink.device(update, SystemRng()), state

    def _own_towers(self, method: Method, shared: Tree, user: int) -> Tree:
        """A person's private state; what it lacks, because an app held it before, starts afresh."""
        users = np.array([user])
        held = _unstacked(self._store.get(users)) if self._store.holds(users)[0] else {}
        begun = method.init_local(shared, Rng.of(0))
        return {name: held.get(name, value) for name, value in begun.items()}

    def _scores(
        self,
        method: Method,
        shared: Tree,
        users: Users,
        data: tuple[Tensor, ...],
        items: Tensor,
        now: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        views = views_of(method)
        if self.app_scores is None or views is None:
            return super()._scores(method, shared, users, data, items, now)
        towers = self._own_towers(method, shared, int(users[0]))
        scores = views.probabilities(shared, towers, self._client_data(*(part[0] for part in data)))
        return torch.stack([self.app_scores.get(name, score)[items] for name, score in scores.items()]).sum(0)[None]

    def measure(self, method: Method, shared: Tree, user: int) -> dict[str, float]:
        """The metrics of one person on their held-out items; empty where nothing is held out."""
        users = np.array([user])
        asked = questions(self.split, users, self.device)
        if not asked:
            return {}
        everything = torch.arange(self.catalogue.n_items, device=self.device)
        scores = self._scores(method, shared, users, self._data(users), everything)
        return summarise([Block(users, scores, asked)], self.cutoffs).metrics

    def _leave(self, channel: Channel, update: Update, streams: Rng, *, summed: bool) -> Update:
        message = _unstacked(written(update))
        _refuse_not_finite(message)
        left: Update = tree_map(lambda leaf: leaf[None], channel.device(message, SystemRng()))
        return left


def compile_kernels(method: Method, schema: FeatureSchema, *, measures: bool, apart: bool = False) -> None:
    """Train and measure one toy person, so that no round waits for compilation.

    apart: views are worked on one by one, so that no kernel for all of them is needed.
    """
    if apart:
        catalogue = schema.catalogue(TOY_ITEMS)
        wire.nothing(method, method.init_shared(catalogue, Rng.of(0)), catalogue)
        return
    toy = Population("toy", np.array([0, 3]), np.array([0, 1, 2], dtype=np.int32), n_items=TOY_ITEMS)
    split = leave_one_out(toy, how="latest", negatives=2) if measures else everything(toy)
    household, rng = Household(replace(split, coded=schema.encoded([{}], TOY_ITEMS))), Rng.of(0)
    household.begin(method, rng)
    shared = method.init_shared(household.catalogue, rng)
    household.train(method, shared, 0, rng)
    household.measure(method, shared, 0)


def feature_schema(home: Home, digest: str) -> FeatureSchema:
    """The schema of features with this digest; an empty one for the empty digest."""
    content = home.items.schema(digest) if digest else None
    return FeatureSchema() if content is None else FeatureSchema.read(content)


def carried(old: Tree, new: Tree) -> Tree:
    """As `carry`, for old parameters that may have been sent in 16 bits."""
    return carry({name: value.to(new[name].dtype) if name in new else value for name, value in old.items()}, new)


def grown(state: Tree, shared: Tree) -> Tree:
    """A state whose tables are as long as the shared ones, because the catalogue may have grown since."""
    return {
        name: Rows(value.index, value.value, len(shared[name])) if isinstance(value, Rows) and name in shared else value
        for name, value in state.items()
    }


def _refuse_not_finite(tree: Tree) -> None:
    """Refuse numbers that are not finite: no channel bounds them, and a state that holds one never recovers."""
    for value in tree.values():
        if not bool(torch.isfinite(value.value if isinstance(value, Rows) else value).all()):
            raise HomebodyError("The round produced numbers that are not finite.")


def _unstacked(stacked: Tree) -> Tree:
    tree: Tree = tree_map(lambda leaf: leaf[0], stacked)
    return tree


class RankedItem(NamedTuple):
    """One item for one person."""

    item: str
    name: str
    score: float


def recommend(home: Home, person: Person, k: int = 10, apps: Apps | None = None) -> list[RankedItem]:
    """A person's best new items, by the model that the device holds.

    apps: asked for the scores of the views that they hold.
    """
    model = home.models.ranking()
    content = None if model is None else home.models.shared(model.digest)
    if model is None or content is None:
        raise HomebodyError("This device has no model yet: it gets one when it takes part in a round.")
    described = json.loads(model.description)
    digest = described.get("features", "")
    if digest and home.items.schema(digest) is None:
        raise HomebodyError(
            "This device lacks the features that its model was trained with: it gets them with the next round."
        )
    phase = model.release.rpartition("/")[0]
    method = acting(described, phase, home.settings.methods)
    household = Household.of(home, [person], {**described, "measures": False}, len(home.items))
    household.begin(method, Rng(torch.tensor(described["clients_key"])))
    fresh = method.init_shared(household.catalogue, Rng.of(described["seed"]))
    shared = carried(wire.decode_tree(content), fresh)  # items that came after the model have fresh rows
    state = home.models.state(person.slot, described["run"], model.step + 1)
    if state is not None and household.split.lengths[0]:
        household.restore(home, 0, state, phase, shared)
    if apps is not None and apps.names(method, household.catalogue):
        about = {name: described[name] for name in ("run", "method", "fields", "stages")}
        about |= {"release": model.release, "phase": phase, "step": model.step, "keep": None, "ask": "recommend"}
        about |= {"n_items": len(home.items), "person": person.name}
        household.app_scores = apps.scores(about, method, shared, feature_schema(home, digest))
    population = household.split.population
    best = household.recommend(method, shared, 0, k)
    return [RankedItem(population.item_id(item), population.item_name(item), score) for item, score in best]
