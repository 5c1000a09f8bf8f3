"""A trained model, with users and items as the data calls them."""

from __future__ import annotations

import shutil
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import polars as pl
import torch

from homebody.core import Method, Tree, Users
from homebody.data import Population
from homebody.data.splits import Split
from homebody.data.stored import insist_on_people
from homebody.errors import HomebodyError
from homebody.files import path_of
from homebody.markup import html
from homebody.notebook.exporting import write_export
from homebody.notebook.keeping import write_model
from homebody.notebook.plots import Plot, history_plot
from homebody.notebook.tables import history_frame, item_frame, ranking_frame, users_of
from homebody.notebook.vectors import most_similar, vectors_of, vectors_of_score
from homebody.notebook.wording import in_python, python_errors
from homebody.privacy import Ledger
from homebody.recipe import Recipe
from homebody.reference import Reference, Score
from homebody.report import words
from homebody.report.listing import named_run
from homebody.run import Finished, reopened
from homebody.settings import is_count
from homebody.simulation import Simulator, usable_device
from homebody.simulation.rankings import Ranking, best_new
from homebody.training import Trained

__all__ = ["Fitted", "open"]

SCORES_AT_ONCE = 1 << 22
SHOWN = ("hr@10", "ndcg@10", "full/hr@10", "full/ndcg@10", "rmse", "mae", "impressions/auc", "impressions/ndcg@10")
"""The metrics that a short text names, as far as there are any."""


class Fitted:
    """A trained model and the record of how it was trained.

    >>> import homebody as hb
    >>> model = hb.fit("fedials", "synthetic:users=200,items=100,mean=12", rounds=2, quiet=True)
    >>> model.recommend(user=7, k=2).columns
    ['user', 'rank', 'item', 'score']
    >>> model.epsilon["server"], model.history.height
    (inf, 2)
    """

    def __init__(self, done: Finished, *, temporary: Path | None = None) -> None:
        """temporary: a folder that goes when the model goes."""
        self._done = done
        self._score = done.score
        if temporary is not None:
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)

    @property
    def method(self) -> Method | Reference:
        """The method, with its settings and its way out; or the centralised reference."""
        return self._done.method

    @property
    def recipe(self) -> Recipe:
        """Everything that says how it was trained; `to_toml` writes it down."""
        return self._done.recipe

    @property
    def split(self) -> Split:
        """What was learnt from, and what was asked."""
        return self._done.split

    @property
    def population(self) -> Population:
        """The people and items."""
        return self._done.split.population

    @property
    def path(self) -> Path:
        """The folder with the record of the run, which `homebody show` shows. `save` keeps it."""
        return self._done.folder.path

    @property
    def result(self) -> dict[str, Any]:
        """The outcome as `homebody run --json` prints it."""
        return {**self._done.result}

    @property
    def metrics(self) -> dict[str, float]:
        """Test metrics under their names, validation metrics under `valid/`, of the chosen round."""
        result = self._done.result
        validation = {f"valid/{name}": value for name, value in result["validation"].items()}
        return {name: float(value) for name, value in {**result["metrics"], **validation}.items()}

    @property
    def epsilon(self) -> dict[str, float]:
        """Certified ε of one person over the whole training, for each observer, at `delta`."""
        return {who: float(value) for who, value in self._done.result["epsilon"].items()}

    @property
    def delta(self) -> float:
        """The δ that ε is stated at."""
        return self._done.result["epsilon_delta"]

    @property
    def chosen(self) -> int:
        """The round that validation chose, counted over all phases."""
        return self._done.result["chosen_round"]

    @property
    def stopped(self) -> str | None:
        """Why training ended before its last round."""
        return self._done.result["stopped"]

    @property
    def notes(self) -> list[str]:
        """What was guessed, missing or left out."""
        return list(self._done.result["notes"])

    @cached_property
    def history(self) -> pl.DataFrame:
        """One row a round: loss, every metric, ε so far for each observer, bytes and seconds."""
        return history_frame(self._done.folder.rounds())

    def plot(self, *metrics: str | Sequence[str]) -> Plot:
        """Curves of metrics, of the loss and of ε over the rounds; a dashed line at the chosen round.

        metrics: by default NDCG@10 and HR@10 on validation; names as in `history`, such as "full/hr@10" or "loss",
        one after the other or in a list. A notebook
        shows the chart, and its `save("curves.svg")` writes it to a file.

        >>> import homebody as hb
        >>> model = hb.fit("fedials", "synthetic:users=60,items=40,mean=8", rounds=3, quiet=True)
        >>> "NDCG@10" in model.plot().svg
        True
        """
        asked = tuple(name for given in metrics for name in map(str, _listed(given)))
        return history_plot(self._title(), self.history, self.chosen, asked)

    @cached_property
    def ledger(self) -> Ledger:
        """Every privacy charge of the training."""
        return Ledger(self._done.folder.ledger_path)

    @cached_property
    def trained(self) -> Trained:
        """The shared parameters and the simulated clients, in numbers."""
        return replace(self._federated, ledger=self.ledger)  # the run closed its own

    @property
    def runtime(self) -> Simulator:
        """The simulated clients."""
        runtime = self._federated.runtime
        assert isinstance(runtime, Simulator)
        return runtime

    @property
    def shared(self) -> Tree:
        """The parameters that the server holds and sends to everyone, by name."""
        return self._federated.shared

    @property
    def _federated(self) -> Trained:
        if self._done.trained is None:
            raise HomebodyError(
                f"{type(self.method).__name__} is a centralised reference: it has no shared parameters and no clients."
            )
        return self._done.trained

    def recommend(self, user: object, k: int = 10, *, now: Mapping[str, object] | None = None) -> pl.DataFrame:
        """The best new items of one user, of a list of users, or of everyone with "all", as a frame.

        Users and items are called what the data calls them. now: the context in which they ask.

        >>> import homebody as hb
        >>> model = hb.fit("popularity", "synthetic:users=50,items=30,mean=6", quiet=True)
        >>> model.recommend([3, 1], k=1)["user"].to_list()
        [3, 1]
        >>> model.recommend("all", k=5).height
        250
        """
        _refuse_few(k)
        insist_on_people(self.population)
        users = users_of(self.population, user)
        different = np.unique(users)
        return ranking_frame(self.population, users, self._rankings(different, k, now))

    def recommend_for(
        self,
        items: Sequence[object] = (),
        features: Mapping[str, object] | None = None,
        now: Mapping[str, object] | None = None,
        k: int = 10,
        *,
        ratings: Sequence[float] | None = None,
    ) -> pl.DataFrame:
        """The best items for somebody who took no part in training, from the items that they have, oldest first.

        items: by id or by name. features: what they tell of themselves; the rest is unknown. now: the context in which
        they ask. ratings: their rating of each item. What was ignored or unknown comes as a warning.

        >>> import homebody as hb
        >>> model = hb.fit("fedials", "synthetic:users=200,items=100,mean=12", rounds=2, quiet=True)
        >>> model.recommend_for([3, 14, 15, 92, 65], k=3).columns
        ['rank', 'item', 'score']
        """
        _refuse_few(k)
        if self._done.trained is None:
            raise HomebodyError(
                f"{type(self.method).__name__} is a centralised reference: it ranks for those whose histories it "
                "collected. Only a federated method adapts to somebody new."
            )
        numbers = [self.population.item(str(item)) for item in _listed(items)]
        best = self._federated.ranked_for(numbers, features, now, k, ratings=ratings)
        for note in best.notes:
            warnings.warn(note, stacklevel=2)
        at, scores = ([pair[place] for pair in best.items] for place in (0, 1))
        frame = item_frame(self.population, np.array(at, dtype=np.int64), np.array(scores, dtype=np.float32))
        return frame.insert_column(0, pl.Series("rank", np.arange(1, len(at) + 1)))

    def similar_items(self, item: object, k: int = 10) -> pl.DataFrame:
        """The items whose vectors point most nearly the way of this item's: its cosines, the largest first.

        item: by id or by name.

        >>> import homebody as hb
        >>> model = hb.fit("fedials", "synthetic:users=60,items=40,mean=8", rounds=2, quiet=True)
        >>> model.similar_items(3, k=2).columns
        ['rank', 'item', 'score']
        """
        _refuse_few(k)
        number = self.population.item(str(item))
        items, cosines = most_similar(self._vectors(), number, k)
        frame = item_frame(self.population, items.numpy(), cosines.numpy())
        return frame.insert_column(0, pl.Series("rank", np.arange(1, len(items) + 1)))

    def export(self, path: str | Path, *, onnx: bool | None = None) -> Path:
        """Write the model into a folder for other programs, all of it or nothing, without anything of its people.

        items.parquet and items.safetensors have the items' vectors, parameters.safetensors the shared parameters,
        MODEL_CARD.md what the model is, statement.html and statement.json the privacy statement. Where the method
        scores by a network, scorer.onnx has it, which takes the extra `onnx`. onnx: True insists on it, False leaves
        it out. An export that is there is replaced; anything else is left alone.

        >>> import tempfile
        >>> import homebody as hb
        >>> model = hb.fit("fedials", "synthetic:users=60,items=40,mean=8", rounds=2, quiet=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(file.name for file in model.export(f"{folder}/export").iterdir())[:3]
        ['MODEL_CARD.md', 'items.parquet', 'items.safetensors']
        """
        folder = path_of(path)
        write_export(self._done, self._vectors(), folder, onnx=onnx)
        return folder

    def _vectors(self) -> torch.Tensor:
        if self._done.trained is not None:
            return vectors_of(self._done.trained)
        return vectors_of_score(self.method, self._scores())

    def save(self, path: str | Path, *, data: bool = False) -> Path:
        """Write the model into a folder, which `hb.open` reads anywhere: all of it or nothing.

        data: also everybody's interactions, features and private states. Without them the folder has the shared
        parameters, the catalogue and the record of the run: the model ranks for somebody new, and knows nobody. A model
        that is there is replaced; anything else is left alone.
        """
        folder = path_of(path)
        write_model(self._done, folder, data=data)
        return folder

    def __reduce__(self) -> NoReturn:
        raise HomebodyError("A model is not pickled or copied: model.save(path) writes it, and hb.open(path) reads it.")

    def _rankings(self, users: Users, k: int, now: Mapping[str, object] | None) -> Iterator[Ranking]:
        done = self._done
        if done.trained is not None:
            yield from self.runtime.rankings_in(done.trained.method, done.trained.shared, users, k, now or {})
            return
        if now:
            raise HomebodyError(f"{type(self.method).__name__} is asked without a context: leave out now.")
        score, everything = self._scores(), torch.arange(self.population.n_items)
        size = max(1, SCORES_AT_ONCE // self.population.n_items)
        for some in (users[start : start + size] for start in range(0, len(users), size)):
            yield best_new(score(some, everything).float().clone(), self.population, some, k)

    def _scores(self) -> Score:
        """A reference's score function; one of an earlier pass than the last is trained again, up to there."""
        if self._score is None:
            done = self._done
            assert isinstance(done.method, Reference)
            histories = done.split.histories()._replace(device=usable_device(done.recipe.device))
            self._score = done.method.trained(histories, done.recipe.seed, self.chosen)
        return self._score

    def __repr__(self) -> str:
        return f"Fitted({self._title()}: {self._figures()}; ε {self._epsilons()})"

    def _title(self) -> str:
        return f"{self._done.recipe.short_method} on {self._done.result['data']}"

    def _figures(self) -> str:
        measured = self.metrics
        shown = [f"{words.metric_name(name)} {measured[name]:.4f}" for name in SHOWN if name in measured]
        return ", ".join(shown[:2]) or "not measured"

    def _epsilons(self) -> str:
        values = {who: words.epsilon(value) for who, value in self.epsilon.items()}
        if len(set(values.values())) == 1:
            return f"{next(iter(values.values()))} for every observer"
        return ", ".join(f"{value} {who}" for who, value in values.items())

    def _repr_html_(self) -> str:
        measured, result = self.metrics, self._done.result
        beside = {
            who: known for who, known in (result.get("references") or {}).items() if who != self._done.recipe.method
        }
        rows: list[tuple[str, ...]] = [
            (
                words.metric_name(name),
                f"{measured[name]:.4f}",
                *(f"{known[name]:.4f}" if name in known else "" for known in beside.values()),
            )
            for name in SHOWN
            if name in measured
        ]
        rest = [(f"ε, {who}", words.epsilon(value)) for who, value in self.epsilon.items()]
        rest += [("rounds", f"{result['rounds']}, chosen {result['chosen_round']}")]
        rest += [("KB up, a client and round", words.kilobytes(result["bytes_up"]))]
        rows += [(*row, *[""] * len(beside)) for row in rest]
        said = [*result.get("cautions", []), *([self.stopped] if self.stopped else [])]
        said = [*map(in_python, said), result["meaning"], *result["notes"]]
        return html(self._title(), ("", "test", *beside), rows, said)


@python_errors
def open(path: str | Path, *, trust_code: bool = False) -> Fitted:  # noqa: A001  # hb.open, as in other packages
    """A model that was saved, or that of a finished run.

    trust_code: run the file that the run names as its method; without it, such a run is refused. A class of your own
    must be defined before.

    >>> import tempfile
    >>> import homebody as hb
    >>> model = hb.fit("fedials", "synthetic:users=60,items=40,mean=8", rounds=2, quiet=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = hb.open(model.save(f"{folder}/model"))
    >>> again.recommend_for([3, 14], k=3).equals(model.recommend_for([3, 14], k=3))
    True
    """
    return Fitted(reopened(named_run(path_of(path)), trust_code=trust_code))


def _listed(items: object) -> Sequence[object]:
    """A list of items; one alone is a list of one."""
    if isinstance(items, str | bytes) or not hasattr(items, "__iter__"):
        return [items]
    return list(items)


def _refuse_few(k: object) -> None:
    if not is_count(k):
        raise HomebodyError(f"k is how many items are asked for, a whole number such as 10, not {k!r}.")
    if k < 1:
        raise HomebodyError(f"At least 1 item must be asked for, not {k}.")
